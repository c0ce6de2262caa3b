//! seccomp filters: the system calls that a server may make.

use std::collections::BTreeMap;
use std::str::FromStr;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use crate::{Error, Result};

pub use roles::Role;
use roles::{
    FCHMODAT2, GETXATTRAT, IO_PGETEVENTS, LEGACY_NOT_OF_THREADS, LISTXATTRAT, NAMES_AND_USERS, NOT_OF_CONNECTOR,
    NOT_OF_DISK, NOT_OF_MAPPER, NOT_OF_WORKER, OF_CONNECTOR, OF_HELPERS, OF_KEEPER, OF_SUPERVISOR, REMOVEXATTRAT,
    SETXATTRAT,
};

/// What happens to a server that makes a forbidden system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The kernel ends it.
    Kill,
    /// The kernel logs the call and carries it out.
    Log,
    /// The server gets SIGSYS, which a debugger can catch.
    Trap,
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "kill" => Ok(Self::Kill),
            "log" => Ok(Self::Log),
            "trap" => Ok(Self::Trap),
            _ => Err(Error::Seccomp(format!("{word:?} is not an action; write kill, log or trap"))),
        }
    }
}

/// Returns a list of system calls, by the names of libc or, for those that it lacks, of this module.
macro_rules! calls {
    ($($(#[$cfg:meta])* $name:ident)*) => {{
        #[allow(clippy::wildcard_imports, reason = "only for the names of system calls")]
        use libc::*;
        &[$($(#[$cfg])* $name,)*]
    }};
}

mod roles;

/// Allowed with any arguments.
const UNCONDITIONAL: &[c_long] = calls! {
    // Data.
    SYS_read SYS_readv SYS_pread64 SYS_preadv SYS_preadv2 SYS_write SYS_writev SYS_pwrite64 SYS_pwritev SYS_pwritev2
    SYS_splice SYS_tee SYS_vmsplice SYS_sendfile SYS_copy_file_range SYS_lseek SYS_fsync SYS_fdatasync
    SYS_sync_file_range SYS_syncfs SYS_fallocate SYS_ftruncate SYS_truncate SYS_fadvise64 SYS_readahead
    SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register SYS_io_setup SYS_io_submit SYS_io_getevents
    IO_PGETEVENTS SYS_io_cancel SYS_io_destroy
    // Files and their names.
    SYS_openat SYS_openat2 SYS_open_by_handle_at SYS_name_to_handle_at SYS_close SYS_close_range SYS_dup SYS_dup3
    SYS_fcntl SYS_flock SYS_fstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_getdents64 SYS_mkdirat
    SYS_mknodat SYS_symlinkat SYS_linkat SYS_unlinkat SYS_renameat SYS_renameat2 SYS_readlinkat SYS_fchmod
    SYS_fchmodat FCHMODAT2 SYS_fchown SYS_fchownat SYS_utimensat SYS_faccessat SYS_faccessat2 SYS_getxattr
    SYS_lgetxattr SYS_fgetxattr SYS_setxattr SYS_lsetxattr SYS_fsetxattr SYS_listxattr SYS_llistxattr SYS_flistxattr
    SYS_removexattr SYS_lremovexattr SYS_fremovexattr SETXATTRAT GETXATTRAT LISTXATTRAT
    REMOVEXATTRAT SYS_umask SYS_chdir SYS_fchdir SYS_getcwd
    // User ids: these have no effect without capabilities.
    SYS_setfsuid SYS_setfsgid SYS_setgroups SYS_getgroups SYS_capget SYS_capset SYS_getuid SYS_geteuid SYS_getgid
    SYS_getegid SYS_getresuid SYS_getresgid
    // Memory.
    SYS_brk SYS_munmap SYS_mremap SYS_madvise SYS_mincore SYS_mlock SYS_munlock SYS_msync SYS_memfd_create
    SYS_membarrier
    // Waiting and waking.
    SYS_futex SYS_futex_waitv SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_epoll_pwait2 SYS_eventfd2 SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime SYS_pipe2 SYS_nanosleep
    SYS_clock_nanosleep SYS_clock_gettime SYS_clock_getres SYS_gettimeofday SYS_restart_syscall SYS_inotify_init1
    SYS_inotify_add_watch
    // Existing and accepted sockets; none is created.
    SYS_accept SYS_accept4 SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_shutdown SYS_getsockname
    SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_socketpair
    // Threads, signals, and exit. Signals only reach processes of this PID namespace.
    SYS_set_robust_list SYS_get_robust_list SYS_rseq SYS_set_tid_address SYS_exit SYS_exit_group SYS_gettid
    SYS_getpid SYS_getppid SYS_tgkill SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_setscheduler SYS_getcpu SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn
    SYS_rt_sigtimedwait SYS_sigaltstack
    // By abort().
    #[cfg(target_env = "musl")]
    SYS_tkill
    // The machine.
    SYS_getrandom SYS_getrusage SYS_prlimit64 SYS_sysinfo SYS_uname SYS_times
    // Another filter can only forbid more.
    SYS_seccomp
};

/// Legacy forms of these calls, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const LEGACY: &[c_long] = calls! {
    SYS_open SYS_stat SYS_lstat SYS_poll SYS_select SYS_epoll_wait SYS_epoll_create SYS_dup2 SYS_pipe SYS_eventfd
    SYS_mkdir SYS_rmdir SYS_unlink SYS_rename SYS_link SYS_symlink SYS_readlink SYS_access SYS_chmod SYS_chown
    SYS_lchown SYS_getrlimit SYS_time SYS_arch_prctl
};
#[cfg(not(target_arch = "x86_64"))]
const LEGACY: &[c_long] = &[];

/// The allowed operations of prctl(2): names of threads and mappings, and restrictions of a thread.
const PRCTL: [libc::c_int; 8] = [
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_CAPBSET_READ,
    libc::PR_GET_SECUREBITS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_SET_TIMERSLACK,
];

/// Ioctls that insert input into a terminal.
#[allow(clippy::unnecessary_cast, clippy::cast_sign_loss, reason = "`Ioctl` is signed with musl")]
const TERMINAL_INPUT: [u64; 2] = [libc::TIOCSTI as u64, libc::TIOCLINUX as u64];

/// Flags of clone(2) that create a thread of this process, in its namespaces.
const THREAD: libc::c_int = libc::CLONE_THREAD;
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_PTRACE;

/// The filter of a role, ready to be applied.
#[derive(Clone)]
pub struct Filter {
    /// Applied in this order: the last program may forbid the calls that apply the first.
    programs: Vec<BpfProgram>,
}

impl std::fmt::Debug for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filter").field("programs", &self.programs.len()).finish()
    }
}

impl Filter {
    /// Returns the filter of a process, or of a thread of a server, which inherits the server's filter, too.
    ///
    /// # Errors
    ///
    /// [`Error::Seccomp`]: the architecture is not supported.
    pub fn of(role: Role, action: Action) -> Result<Self> {
        let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(seccomp_error)?;
        let action = match action {
            Action::Kill => SeccompAction::KillProcess,
            Action::Log => SeccompAction::Log,
            Action::Trap => SeccompAction::Trap,
        };
        let compiled = |rules, mismatch, matched| -> Result<BpfProgram> {
            SeccompFilter::new(rules, mismatch, matched, arch).and_then(TryInto::try_into).map_err(seccomp_error)
        };
        let fails =
            |rules, errno: i32| compiled(rules, SeccompAction::Allow, SeccompAction::Errno(errno.cast_unsigned()));
        let mut programs = Vec::new();
        if !matches!(role, Role::Worker | Role::Disk | Role::Mapper) {
            // The flags of clone3 are in memory, which a filter cannot read. ENOSYS makes the C library use clone.
            // Threads of a server inherit that from the server's filter.
            programs.push(fails(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?);
        }
        if role == Role::Connector {
            programs.push(fails(refused_of_connector()?, libc::EACCES)?);
        }
        programs.push(compiled(rules(role)?, action, SeccompAction::Allow)?);
        Ok(Self { programs })
    }

    /// Applies the filter permanently to this thread and its future children. Also sets no_new_privs.
    ///
    /// # Errors
    ///
    /// [`Error::Seccomp`]: the kernel refused.
    pub fn apply(&self) -> Result<()> {
        self.programs.iter().try_for_each(|program| seccompiler::apply_filter(program).map_err(seccomp_error))
    }
}

fn seccomp_error(error: impl std::fmt::Display) -> Error {
    Error::Seccomp(error.to_string())
}

/// Returns a rule with conditions on arguments: number, comparison, value.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Result<SeccompRule> {
    let conditions = conditions.iter().map(|(argument, operator, value)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator.clone(), *value)
    });
    conditions.collect::<std::result::Result<Vec<_>, _>>().and_then(SeccompRule::new).map_err(seccomp_error)
}

fn bits(flags: libc::c_int) -> u64 {
    u64::from(flags.cast_unsigned())
}

/// Returns the rule of mmap(2) and mprotect(2): no executable memory.
fn no_executable_memory() -> Result<SeccompRule> {
    rule(&[(2, SeccompCmpOp::MaskedEq(bits(libc::PROT_EXEC)), 0)])
}

fn rules(role: Role) -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let without = |calls: &[&[libc::c_long]]| {
        let is_excluded =
            |call: &i64| calls.iter().any(|calls| calls.contains(call)) || LEGACY_NOT_OF_THREADS.contains(call);
        Ok(of_server()?.into_iter().filter(|(call, _)| !is_excluded(call)).collect())
    };
    let only = |calls: &[c_long]| {
        let plain = OF_HELPERS.iter().chain(calls).map(|call| (*call, Vec::new()));
        let memory =
            [(libc::SYS_mmap, vec![no_executable_memory()?]), (libc::SYS_mprotect, vec![no_executable_memory()?])];
        Ok(plain.chain(memory).collect())
    };
    match role {
        Role::Server => of_server(),
        Role::Worker => without(&[NOT_OF_WORKER]),
        Role::Disk => without(&[NOT_OF_WORKER, NAMES_AND_USERS, NOT_OF_DISK]),
        Role::Mapper => without(&[NAMES_AND_USERS, NOT_OF_MAPPER]),
        Role::Connector => {
            let mut rules: BTreeMap<_, _> = without(&[NAMES_AND_USERS, NOT_OF_CONNECTOR])?;
            // [`refused_of_connector`] restricts these.
            let some = [libc::SYS_mmap, libc::SYS_mprotect];
            rules.extend(OF_CONNECTOR.iter().chain(&some).map(|call| (*call, Vec::new())));
            Ok(rules)
        }
        Role::Supervisor => only(OF_SUPERVISOR),
        Role::Keeper => only(OF_KEEPER),
    }
}

/// Returns the calls that libraries try during name lookup but do not require; they fail with an error. Those are
/// sockets of families without servers (netlink above all), and executable memory for loaded libraries.
fn refused_of_connector() -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK];
    let others: Vec<_> = families.iter().map(|family| (0, SeccompCmpOp::Ne, bits(*family))).collect();
    // SOCK_STREAM is 1, SOCK_DGRAM 2; the bits above these four are flags.
    let kinds =
        [(0x4, 0x4), (0x8, 0x8), (0xf, 0x3), (0xf, 0)].map(|(mask, kind)| (1, SeccompCmpOp::MaskedEq(mask), kind));
    let mut sockets = vec![rule(&others)?];
    for kind in kinds {
        sockets.push(rule(&[kind])?);
    }
    // Landlock restricts TCP but not its replacements (MPTCP).
    sockets.push(rule(&[(2, SeccompCmpOp::Ne, 0)])?);
    let with =
        |argument, flag| rule(&[(argument, SeccompCmpOp::MaskedEq(bits(flag)), bits(flag))]).map(|rule| vec![rule]);
    // Sending can connect as well (TCP Fast Open), which Landlock does not check.
    let fast_open = libc::MSG_FASTOPEN;
    Ok(BTreeMap::from([
        (libc::SYS_socket, sockets),
        (libc::SYS_mmap, with(2, libc::PROT_EXEC)?),
        (libc::SYS_mprotect, with(2, libc::PROT_EXEC)?),
        (libc::SYS_sendto, with(3, fast_open)?),
        (libc::SYS_sendmsg, with(2, fast_open)?),
        (libc::SYS_sendmmsg, with(3, fast_open)?),
    ]))
}

fn of_server() -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        UNCONDITIONAL.iter().chain(LEGACY).map(|call| (*call, Vec::new())).collect();
    // The first filter refuses it without ending the server.
    rules.insert(libc::SYS_clone3, Vec::new());
    let thread = SeccompCmpOp::MaskedEq(bits(THREAD | NEW_NAMESPACES));
    rules.insert(libc::SYS_clone, vec![rule(&[(0, thread, bits(THREAD))])?]);
    // Only the thread's own working directory and umask.
    rules.insert(libc::SYS_unshare, vec![rule(&[(0, SeccompCmpOp::Eq, bits(libc::CLONE_FS))])?]);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![no_executable_memory()?]);
    }
    let other: Vec<_> = TERMINAL_INPUT.iter().map(|command| (1, SeccompCmpOp::Ne, *command)).collect();
    rules.insert(libc::SYS_ioctl, vec![rule(&other)?]);
    let options = PRCTL.iter().map(|option| rule(&[(0, SeccompCmpOp::Eq, bits(*option))]));
    rules.insert(libc::SYS_prctl, options.collect::<Result<_>>()?);
    // Copies within this process, whose memory may be missing (a window of mapped files).
    let own = u64::from(std::process::id());
    for call in [libc::SYS_process_vm_readv, libc::SYS_process_vm_writev] {
        rules.insert(call, vec![rule(&[(0, SeccompCmpOp::Eq, own)])?]);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_compile() {
        for action in [Action::Kill, Action::Log, Action::Trap] {
            let one = [Role::Worker, Role::Disk, Role::Mapper].map(|role| (role, 1));
            let two = [Role::Server, Role::Supervisor, Role::Keeper].map(|role| (role, 2));
            for (role, programs) in one.into_iter().chain(two).chain([(Role::Connector, 3)]) {
                let filter = Filter::of(role, action).expect("this architecture");
                assert_eq!(filter.programs.len(), programs, "{role:?}");
            }
        }
        assert_eq!("log".parse::<Action>().expect("a word"), Action::Log);
        assert!("none".parse::<Action>().is_err());
    }

    #[test]
    fn calls_that_escape_the_sandbox_are_not_allowed() {
        let rules = rules(Role::Server).expect("sound rules");
        let forbidden: &[c_long] = calls! {
            SYS_execve SYS_execveat SYS_socket SYS_connect SYS_bind SYS_ptrace SYS_kill SYS_mount
            SYS_move_mount SYS_open_tree SYS_fsopen SYS_pivot_root SYS_chroot SYS_setns SYS_bpf SYS_perf_event_open
            SYS_keyctl SYS_add_key SYS_userfaultfd SYS_init_module SYS_finit_module SYS_kexec_load SYS_reboot
            SYS_pidfd_getfd SYS_setuid SYS_personality SYS_swapon
            #[cfg(not(target_env = "musl"))]
            SYS_tkill
        };
        for call in forbidden {
            assert!(!rules.contains_key(call), "{call}");
        }
        let bounded = [
            libc::SYS_clone,
            libc::SYS_unshare,
            libc::SYS_mmap,
            libc::SYS_ioctl,
            libc::SYS_prctl,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
        ];
        for call in bounded {
            assert!(rules.get(&call).is_some_and(|rules| !rules.is_empty()), "{call}");
        }
    }

    #[test]
    fn threads_are_allowed_less_than_their_server() {
        let calls = |role| rules(role).expect("sound rules").into_keys().collect::<std::collections::BTreeSet<_>>();
        let server = calls(Role::Server);
        let threads = [
            (Role::Worker, NOT_OF_WORKER),
            (Role::Disk, NOT_OF_WORKER),
            (Role::Disk, NAMES_AND_USERS),
            (Role::Disk, NOT_OF_DISK),
            (Role::Mapper, NAMES_AND_USERS),
            (Role::Mapper, NOT_OF_MAPPER),
        ];
        for (role, not) in threads {
            let calls = calls(role);
            assert!(calls.is_subset(&server), "{role:?}");
            // A call that the server's list lacks would be a mistake.
            assert!(not.iter().all(|call| server.contains(call)), "{role:?}");
            assert!(not.iter().all(|call| !calls.contains(call)), "{role:?}");
        }
        let (connector, more) = (calls(Role::Connector), OF_CONNECTOR.iter().copied().collect());
        assert!(connector.difference(&server).all(|call| OF_CONNECTOR.contains(call)));
        assert!(connector.is_superset(&more));
        let not = NAMES_AND_USERS.iter().chain(NOT_OF_CONNECTOR);
        assert!(not.clone().all(|call| server.contains(call)));
        let of_resolver: &[i64] = if cfg!(target_env = "musl") { &[libc::SYS_bind, libc::SYS_recvmsg] } else { &[] };
        assert!(not.clone().all(|call| !connector.contains(call) || of_resolver.contains(call)));
        for role in [Role::Supervisor, Role::Keeper] {
            assert!(!calls(role).contains(&libc::SYS_openat), "{role:?}");
        }
    }
}
