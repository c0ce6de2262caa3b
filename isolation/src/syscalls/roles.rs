//! The system calls of each role.

/// Since Linux 6.13, the same on all architectures.
pub(super) const SYS_SETXATTRAT: libc::c_long = 463;
pub(super) const SYS_GETXATTRAT: libc::c_long = 464;
pub(super) const SYS_LISTXATTRAT: libc::c_long = 465;
pub(super) const SYS_REMOVEXATTRAT: libc::c_long = 466;

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
    /// The process outside, which waits, forwards signals, and removes socket files.
    Outside,
    /// The process that holds descriptors for one server after another, and opens nothing.
    Holder,
}

/// The server's calls that a worker lacks: accepting connections, receiving (descriptors above all), and changing
/// properties of the process. A worker may send: descriptors with `--state`, requests to a 9P server, and log lines. It
/// may also create files in memory, for `mem` without privileges.
pub(super) const NOT_OF_WORKER: &[libc::c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_timerfd_create,
    libc::SYS_pipe2,
    libc::SYS_io_uring_setup,
    libc::SYS_truncate,
    libc::SYS_chdir,
    libc::SYS_sched_setaffinity,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_seccomp,
];

/// The server's calls about file names, owners and user ids. Threads that only transfer data of open files lack them.
pub(super) const NAMES_AND_USERS: &[libc::c_long] = &[
    libc::SYS_fchdir,
    libc::SYS_umask,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_symlinkat,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchmodat2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    SYS_SETXATTRAT,
    SYS_REMOVEXATTRAT,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_unshare,
];

/// The calls that a disk worker lacks besides: its files are open, and it only transfers, frees and flushes data. It
/// may try to open missing files, as libraries do to examine the machine.
pub(super) const NOT_OF_DISK: &[libc::c_long] = &[
    libc::SYS_shutdown,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_syncfs,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_utimensat,
    libc::SYS_capset,
    libc::SYS_memfd_create,
];

/// The calls that the thread of a window lacks besides.
pub(super) const NOT_OF_MAPPER: &[libc::c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_timerfd_create,
    libc::SYS_pipe2,
    libc::SYS_io_uring_setup,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_truncate,
    libc::SYS_chdir,
    libc::SYS_clone,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_seccomp,
];

/// The server's calls that a connecting thread of a 9P source lacks besides. It opens a few files to resolve names, and
/// wakes other threads. It receives no descriptors, accepts no connections, and starts no transfers.
pub(super) const NOT_OF_CONNECTOR: &[libc::c_long] = &[
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_socketpair,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_truncate,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_timerfd_create,
    libc::SYS_pipe2,
    libc::SYS_chdir,
    libc::SYS_utimensat,
    libc::SYS_capset,
    libc::SYS_memfd_create,
    libc::SYS_mlock,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_seccomp,
];

/// The calls of the connector that no other role has. `refused_of_connector` restricts
/// the sockets.
pub(super) const OF_CONNECTOR: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    // Questions to a name server.
    libc::SYS_sendmmsg,
    // Some C libraries open `/etc/hosts` with it.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
];

/// Older forms of these, and of calls that none of these threads makes.
#[cfg(target_arch = "x86_64")]
pub(super) const OLDER_NOT_OF_THREADS: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_epoll_create,
    libc::SYS_pipe,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const OLDER_NOT_OF_THREADS: &[libc::c_long] = &[];

/// The calls of both helper processes: memory, blocked signals, exit.
pub(super) const OF_HELPERS: &[libc::c_long] = &[
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_futex,
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_getrandom,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_clock_gettime,
];

/// The additional calls of the supervisor. It opens no files.
pub(super) const OF_OUTSIDE: &[libc::c_long] = &[
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_kill,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_signalfd4,
];

/// The additional calls of the keeper: accepting connections, receiving descriptors, and reading, answering and closing
/// the VMM's connection.
pub(super) const OF_HOLDER: &[libc::c_long] = &[
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_ppoll,
    libc::SYS_geteuid,
];

#[cfg(target_arch = "x86_64")]
pub(super) const OLDER_OF_OUTSIDE: &[libc::c_long] =
    &[libc::SYS_lstat, libc::SYS_stat, libc::SYS_unlink, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const OLDER_OF_OUTSIDE: &[libc::c_long] = &[];

#[cfg(target_arch = "x86_64")]
pub(super) const OLDER_OF_HOLDER: &[libc::c_long] = &[libc::SYS_poll, libc::SYS_unlink];
#[cfg(not(target_arch = "x86_64"))]
pub(super) const OLDER_OF_HOLDER: &[libc::c_long] = &[];
