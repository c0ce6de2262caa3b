//! Returns freed heap memory to the system.

/// Returns freed heap memory to the system. glibc keeps free memory below memory in use, in several arenas, so a
/// process stays at its maximum size. The call takes milliseconds: use it after a large drop in memory use.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers; any thread may call it at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
