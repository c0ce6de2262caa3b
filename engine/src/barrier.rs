//! An asymmetric memory barrier between the threads of this process (`membarrier(2)`).

/// Registers the process for [`barrier`]; returns false if the kernel does not support it (before Linux 4.14).
pub(crate) fn register_barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED)
}

/// Orders the memory accesses of all threads of this process (membarrier(2)). After the call, the caller sees what
/// other threads stored before it. After the call, other threads see what the caller stored before it.
pub(crate) fn barrier() -> bool {
    membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}
