//! Returns freed heap memory to the system.

/// Gives back what was freed. glibc keeps it for later where something behind it is still in use, in an arena for every few threads, so a process
/// stays as large as it ever was. Takes milliseconds: for who knows that much less is needed from now on.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointers; the function may be called by any thread at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}
