//! Which role makes which system calls.

/// What a process or a thread is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A server of files: all of the process, whatever else its threads are.
    Server,
    /// A thread of it that serves requests of a guest, and those that it starts for calls that take long. It is the one that
    /// reads what a guest says; it has no business with whoever started it, the VMM, and whoever asks for the log.
    Worker,
    /// A thread of it that serves requests of a guest to a disk, and those that it starts: a worker that has no business with
    /// what files are called, whose they are, and who else there is.
    Disk,
    /// The thread of it that has files mapped in a guest's window: it speaks with the VMM, opens files, and writes to them. It makes
    /// and removes no names, acts for no other user, and starts no threads.
    Mapper,
    /// The thread of a source that connects to its server, again whenever the connection is lost, and those that it starts: they read
    /// what the server says, and look up its name. No thread of a server's process has it from there: it begins before.
    Connector,
    /// The process that stays outside, to wait, to pass signals on, and to remove the files of sockets.
    Outside,
    /// The process that holds descriptors for one server after another, and opens nothing.
    Holder,
}

/// Of a server's, those that a worker does without: to take connections and what comes over them (descriptors, above all), and to
/// change what holds for the whole process. It does send: descriptors with `--state`, requests to a 9P server, whose connection it ends if that
/// fails, and what it logs; and makes files in memory, for `mem` without privileges.
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

/// Of a server's, those that are about what files are called and whose they are, and that act for others: threads that only move the bytes of
/// open files do without them.
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
    super::SYS_SETXATTRAT,
    super::SYS_REMOVEXATTRAT,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_unshare,
];

/// Of a worker's, those that one of a disk does without besides: its files are open, and all that it does to them is to move, free and
/// flush bytes. It may ask for files that are not there, as libraries do now and then to learn of the machine.
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

/// Of a server's, those that the thread of a window does without besides.
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

/// Of a server's, those that a thread which connects to a 9P server does without besides. It opens a few files, to look up names, and wakes
/// others; no descriptors come over its sockets, it waits for nobody who connects, and starts no transfer.
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

/// What it does that nobody else may. Which sockets, [`refused_of_connector`](super::refused_of_connector) says.
pub(super) const OF_CONNECTOR: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    // Questions to a name server.
    libc::SYS_sendmmsg,
    // Some C libraries open `/etc/hosts` by it.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
];

/// The older names of the same, and of what none of these threads does by them.
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

/// Those of both processes beside the server: memory, signals that ended it would have, an end.
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

/// Besides, of the one that stays outside. It opens no files.
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

/// Besides, of the one that holds descriptors: to be connected to, to be handed some, and to take messages of a VMM from its
/// connection, answer them there, and end it.
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
