//! seccomp filters: the system calls that a server may make.

use std::collections::BTreeMap;
use std::str::FromStr;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use crate::{Error, Result};

mod roles;

pub use roles::Role;
use roles::{
    NAMES_AND_USERS, NOT_OF_CONNECTOR, NOT_OF_DISK, NOT_OF_MAPPER, NOT_OF_WORKER, OF_CONNECTOR, OF_HELPERS, OF_HOLDER,
    OF_OUTSIDE, OLDER_NOT_OF_THREADS, OLDER_OF_HOLDER, OLDER_OF_OUTSIDE,
};
use roles::{SYS_GETXATTRAT, SYS_LISTXATTRAT, SYS_REMOVEXATTRAT, SYS_SETXATTRAT};

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

/// Which the library lacks.
#[cfg(target_arch = "x86_64")]
const SYS_IO_PGETEVENTS: libc::c_long = 333;
#[cfg(not(target_arch = "x86_64"))]
const SYS_IO_PGETEVENTS: libc::c_long = 292;

/// Allowed with any arguments.
const PLAIN: &[libc::c_long] = &[
    // Data.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_truncate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    SYS_IO_PGETEVENTS,
    libc::SYS_io_cancel,
    libc::SYS_io_destroy,
    // Files and their names.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_readlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getxattr,
    libc::SYS_lgetxattr,
    libc::SYS_fgetxattr,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_listxattr,
    libc::SYS_llistxattr,
    libc::SYS_flistxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    SYS_SETXATTRAT,
    SYS_GETXATTRAT,
    SYS_LISTXATTRAT,
    SYS_REMOVEXATTRAT,
    libc::SYS_umask,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_getcwd,
    // User ids: these have no effect without capabilities.
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_getgroups,
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    libc::SYS_msync,
    libc::SYS_memfd_create,
    libc::SYS_membarrier,
    // Waiting and waking.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe2,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    // Existing and accepted sockets; none is created.
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    // Threads, signals, and exit. Signals only reach processes of this PID namespace.
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_rseq,
    libc::SYS_set_tid_address,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_tgkill,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler,
    libc::SYS_getcpu,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // The machine.
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_prlimit64,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_times,
    // Another filter can only forbid more.
    libc::SYS_seccomp,
];

/// Older forms of these calls, which newer architectures lack.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_create,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_eventfd,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_readlink,
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_getrlimit,
    libc::SYS_time,
    libc::SYS_arch_prctl,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

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
const TYPING: [libc::Ioctl; 2] = [libc::TIOCSTI, libc::TIOCLINUX];

/// Flags of clone(2) that create a thread of this process, in its namespaces.
const THREAD: libc::c_int = libc::CLONE_THREAD;
const NEW: libc::c_int = libc::CLONE_NEWNS
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
        let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(wrong)?;
        let action = match action {
            Action::Kill => SeccompAction::KillProcess,
            Action::Log => SeccompAction::Log,
            Action::Trap => SeccompAction::Trap,
        };
        let compiled = |rules, mismatch, matched| -> Result<BpfProgram> {
            SeccompFilter::new(rules, mismatch, matched, arch).and_then(TryInto::try_into).map_err(wrong)
        };
        let answered = |rules, errno: i32| {
            let answer = SeccompAction::Errno(errno.cast_unsigned());
            compiled(rules, SeccompAction::Allow, answer)
        };
        let mut programs = Vec::new();
        if !matches!(role, Role::Worker | Role::Disk | Role::Mapper) {
            // The flags of clone3 are in memory, which a filter cannot read. ENOSYS makes the C library use clone.
            // Threads of a server inherit that from the server's filter.
            programs.push(answered(BTreeMap::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)?);
        }
        if role == Role::Connector {
            programs.push(answered(refused_of_connector()?, libc::EACCES)?);
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
        self.programs.iter().try_for_each(|program| seccompiler::apply_filter(program).map_err(wrong))
    }
}

fn wrong(error: impl std::fmt::Display) -> Error {
    Error::Seccomp(error.to_string())
}

/// Returns a rule with conditions on arguments: number, comparison, value.
fn rule(conditions: &[(u8, SeccompCmpOp, u64)]) -> Result<SeccompRule> {
    let conditions = conditions.iter().map(|(argument, operator, value)| {
        SeccompCondition::new(*argument, SeccompCmpArgLen::Dword, operator.clone(), *value)
    });
    conditions.collect::<std::result::Result<Vec<_>, _>>().and_then(SeccompRule::new).map_err(wrong)
}

fn bits(flags: libc::c_int) -> u64 {
    u64::from(flags.cast_unsigned())
}

/// Returns the rule of mmap(2) and mprotect(2): no executable memory.
fn no_code() -> Result<SeccompRule> {
    rule(&[(2, SeccompCmpOp::MaskedEq(bits(libc::PROT_EXEC)), 0)])
}

fn rules(role: Role) -> Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let without = |calls: &[&[libc::c_long]]| {
        let left_out =
            |call: &i64| calls.iter().any(|calls| calls.contains(call)) || OLDER_NOT_OF_THREADS.contains(call);
        Ok(of_server()?.into_iter().filter(|(call, _)| !left_out(call)).collect())
    };
    let only = |calls: &[libc::c_long], older: &[libc::c_long]| {
        let plain = OF_HELPERS.iter().chain(calls).chain(older).map(|call| (*call, Vec::new()));
        let memory = [(libc::SYS_mmap, vec![no_code()?]), (libc::SYS_mprotect, vec![no_code()?])];
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
        Role::Outside => only(OF_OUTSIDE, OLDER_OF_OUTSIDE),
        Role::Holder => only(OF_HOLDER, OLDER_OF_HOLDER),
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
        PLAIN.iter().chain(OLDER).map(|call| (*call, Vec::new())).collect();
    // The other filter refuses it without ending the server.
    rules.insert(libc::SYS_clone3, Vec::new());
    let thread = SeccompCmpOp::MaskedEq(bits(THREAD | NEW));
    rules.insert(libc::SYS_clone, vec![rule(&[(0, thread, bits(THREAD))])?]);
    // Only the thread's own working directory and umask.
    rules.insert(libc::SYS_unshare, vec![rule(&[(0, SeccompCmpOp::Eq, bits(libc::CLONE_FS))])?]);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![no_code()?]);
    }
    let not: Vec<_> = TYPING.iter().map(|command| (1, SeccompCmpOp::Ne, *command & 0xffff_ffff)).collect();
    rules.insert(libc::SYS_ioctl, vec![rule(&not)?]);
    let asked = PRCTL.iter().map(|option| rule(&[(0, SeccompCmpOp::Eq, bits(*option))]));
    rules.insert(libc::SYS_prctl, asked.collect::<Result<_>>()?);
    // Copies within this process, in which the memory may be missing (a window of mapped files).
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
            let two = [Role::Server, Role::Outside, Role::Holder].map(|role| (role, 2));
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
        for call in [
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_tkill,
            libc::SYS_mount,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_userfaultfd,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_kexec_load,
            libc::SYS_reboot,
            libc::SYS_pidfd_getfd,
            libc::SYS_setuid,
            libc::SYS_personality,
            libc::SYS_swapon,
        ] {
            assert!(!rules.contains_key(&call), "{call}");
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
        assert!(not.clone().all(|call| server.contains(call)) && not.clone().all(|call| !connector.contains(call)));
        for role in [Role::Outside, Role::Holder] {
            assert!(!calls(role).contains(&libc::SYS_openat), "{role:?}");
        }
    }
}
