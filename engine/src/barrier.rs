//! An asymmetric memory barrier between the threads of this process (`membarrier(2)`).

/// Prepares [`barrier`]; false where the kernel has none for threads of one process (before Linux 4.14).
pub(crate) fn register_barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// Orders memory accesses of all threads of this process: what a thread stored before the call is seen by the caller after it,
/// and what the caller stored before it is seen by whatever a thread loads after it (membarrier(2)).
pub(crate) fn barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: takes and touches no memory.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
