//! The system calls of each role.
#![allow(non_upper_case_globals, reason = "constants of system calls are named as those of libc")]

use libc::c_long;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the numbers of system calls are not checked for this architecture");

/// System calls that libc lacks for some targets. All but the first have the same numbers everywhere.
pub(super) const IO_PGETEVENTS: c_long = if cfg!(target_arch = "x86_64") { 333 } else { 292 };
pub(super) const FCHMODAT2: c_long = 452;
pub(super) const SETXATTRAT: c_long = 463;
pub(super) const GETXATTRAT: c_long = 464;
pub(super) const LISTXATTRAT: c_long = 465;
pub(super) const REMOVEXATTRAT: c_long = 466;

#[cfg(target_env = "musl")]
const _: () = assert!(IO_PGETEVENTS == libc::SYS_io_pgetevents);
#[cfg(all(target_env = "gnu", target_arch = "x86_64"))]
const _: () = assert!(FCHMODAT2 == libc::SYS_fchmodat2);

/// The role of a process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A server of files: the whole process.
    Server,
    /// A thread of the server that serves a guest's requests, and threads that it starts for slow calls. It parses
    /// untrusted data, so it has no access to the VMM's connection and the control socket.
    Worker,
    /// A thread of the server that serves a guest's disk requests, and threads that it starts. It needs no calls about
    /// file names, owners or other processes.
    Disk,
    /// The thread of the server that maps files in a guest's window. It talks to the VMM, and opens and writes files.
    /// It does not change names or user ids, and starts no threads.
    Mapper,
    /// The thread of a source that connects and reconnects to its server, and threads that it starts: they read the
    /// server's messages and resolve its name. It starts before the server's filter applies, so no thread of the server
    /// has its calls.
    Connector,
    /// The process outside the namespaces, which waits, forwards signals, and removes socket files.
    Supervisor,
    /// The process that keeps descriptors for one server after another, and opens nothing.
    Keeper,
}

/// The server's calls that a worker lacks: accepting connections, receiving (descriptors above all), and changing
/// properties of the process. A worker may send: descriptors with `--state`, requests to a 9P server, and log lines. It
/// may also create files in memory, for `mem` without privileges.
pub(super) const NOT_OF_WORKER: &[c_long] = calls! {
    SYS_accept SYS_accept4 SYS_recvmsg SYS_recvfrom SYS_getsockname SYS_getpeername SYS_getsockopt SYS_setsockopt
    SYS_socketpair SYS_epoll_create1 SYS_epoll_ctl SYS_timerfd_create SYS_pipe2 SYS_io_uring_setup SYS_truncate
    SYS_chdir SYS_sched_setaffinity SYS_rt_sigtimedwait SYS_seccomp SYS_inotify_init1 SYS_inotify_add_watch
};

/// The server's calls about file names, owners and user ids. Threads that only transfer data of open files lack them.
pub(super) const NAMES_AND_USERS: &[c_long] = calls! {
    SYS_fchdir SYS_umask SYS_mkdirat SYS_mknodat SYS_symlinkat SYS_linkat SYS_unlinkat SYS_renameat SYS_renameat2
    SYS_fchmod SYS_fchmodat FCHMODAT2 SYS_fchown SYS_fchownat SYS_setxattr SYS_lsetxattr SYS_fsetxattr
    SYS_removexattr SYS_lremovexattr SYS_fremovexattr SETXATTRAT REMOVEXATTRAT SYS_setfsuid SYS_setfsgid
    SYS_setgroups SYS_unshare
};

/// The calls that a disk worker lacks besides: its files are open, and it only transfers, frees and flushes data. It
/// may try to open missing files, as libraries do to examine the machine.
pub(super) const NOT_OF_DISK: &[c_long] = calls! {
    SYS_shutdown SYS_splice SYS_tee SYS_vmsplice SYS_sendfile SYS_copy_file_range SYS_syncfs SYS_open_by_handle_at
    SYS_name_to_handle_at SYS_utimensat SYS_capset SYS_memfd_create
};

/// The calls that the thread of a window lacks besides.
pub(super) const NOT_OF_MAPPER: &[c_long] = calls! {
    SYS_accept SYS_accept4 SYS_setsockopt SYS_socketpair SYS_epoll_create1 SYS_epoll_ctl SYS_timerfd_create
    SYS_pipe2 SYS_io_uring_setup SYS_io_setup SYS_io_submit SYS_truncate SYS_chdir SYS_clone SYS_sched_setaffinity
    SYS_sched_setscheduler SYS_rt_sigtimedwait SYS_seccomp SYS_inotify_init1 SYS_inotify_add_watch
};

/// The server's calls that a connecting thread of a 9P source lacks besides. It opens a few files to resolve names, and
/// wakes other threads. It receives no descriptors, accepts no connections, and starts no transfers.
pub(super) const NOT_OF_CONNECTOR: &[c_long] = calls! {
    SYS_accept SYS_accept4 SYS_recvmsg SYS_socketpair SYS_splice SYS_tee SYS_vmsplice SYS_sendfile
    SYS_copy_file_range SYS_sync_file_range SYS_syncfs SYS_fallocate SYS_ftruncate SYS_truncate
    SYS_open_by_handle_at SYS_name_to_handle_at SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register
    SYS_io_setup SYS_io_submit SYS_timerfd_create SYS_pipe2 SYS_chdir SYS_utimensat SYS_capset SYS_memfd_create
    SYS_mlock SYS_sched_setaffinity SYS_sched_setscheduler SYS_rt_sigtimedwait SYS_process_vm_readv
    SYS_process_vm_writev SYS_seccomp SYS_inotify_init1 SYS_inotify_add_watch
};

/// The calls of the connector that no other role has. `refused_of_connector` restricts the sockets.
pub(super) const OF_CONNECTOR: &[c_long] = calls! {
    SYS_socket SYS_connect
    // Queries to a name server.
    SYS_sendmmsg
    // Some C libraries open `/etc/hosts` with it.
    #[cfg(target_arch = "x86_64")]
    SYS_open
    // musl binds the socket of a query to no address, and receives the answer as a message.
    #[cfg(target_env = "musl")]
    SYS_bind
    #[cfg(target_env = "musl")]
    SYS_recvmsg
};

/// Legacy forms of calls that no thread with a role of its own may make. musl has no other way to open a file.
#[cfg(target_arch = "x86_64")]
pub(super) const LEGACY_NOT_OF_THREADS: &[c_long] = calls! {
    #[cfg(not(target_env = "musl"))]
    SYS_open
    SYS_epoll_create SYS_pipe SYS_mkdir SYS_rmdir SYS_unlink SYS_rename SYS_link SYS_symlink SYS_chmod
    SYS_chown SYS_lchown
};
#[cfg(not(target_arch = "x86_64"))]
pub(super) const LEGACY_NOT_OF_THREADS: &[c_long] = &[];

/// The calls of both helper processes: memory, blocked signals, exit.
pub(super) const OF_HELPERS: &[c_long] = calls! {
    SYS_rt_sigprocmask SYS_rt_sigaction SYS_rt_sigreturn SYS_sigaltstack SYS_tgkill SYS_getpid SYS_gettid
    SYS_unlinkat SYS_write SYS_writev SYS_close SYS_fcntl SYS_futex SYS_brk SYS_munmap SYS_mremap SYS_madvise
    SYS_getrandom SYS_restart_syscall SYS_exit SYS_exit_group SYS_clock_gettime
    // By abort().
    #[cfg(target_env = "musl")]
    SYS_tkill
};

/// The additional calls of the supervisor. It opens no files.
pub(super) const OF_SUPERVISOR: &[c_long] = calls! {
    SYS_wait4 SYS_waitid SYS_kill SYS_rt_sigtimedwait SYS_fstat SYS_statx SYS_newfstatat SYS_ppoll SYS_read
    SYS_signalfd4
    #[cfg(target_arch = "x86_64")]
    SYS_lstat
    #[cfg(target_arch = "x86_64")]
    SYS_stat
    #[cfg(target_arch = "x86_64")]
    SYS_unlink
    #[cfg(target_arch = "x86_64")]
    SYS_poll
};

/// The additional calls of the keeper: accepting connections, receiving descriptors, and reading, answering and closing
/// the VMM's connection.
pub(super) const OF_KEEPER: &[c_long] = calls! {
    SYS_accept4 SYS_getsockopt SYS_recvfrom SYS_recvmsg SYS_sendmsg SYS_shutdown SYS_ppoll SYS_geteuid
    #[cfg(target_arch = "x86_64")]
    SYS_poll
    #[cfg(target_arch = "x86_64")]
    SYS_unlink
};
