//! Returns memory to the system that this process no longer needs.

use std::ffi::{c_int, c_void};

/// Returns freed heap memory to the system. glibc keeps free memory below memory in use, in several arenas, so a
/// process stays at its maximum size. The call takes milliseconds: use it after a large drop in memory use.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers; any thread may call it at any time (malloc_trim(3)).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns what only the start of a server needed: freed heap memory, and the pages of the program and its libraries, which
/// stay in the page cache. What is called again is mapped again, by one fault for 64 KiB (`fault_around_bytes`).
pub fn release_startup_memory() {
    trim_heap();
    // SAFETY: `unmap_code` is a callback of dl_iterate_phdr(3) that uses no data.
    unsafe { libc::dl_iterate_phdr(Some(unmap_code), std::ptr::null_mut()) };
}

/// Unmaps the pages of a loaded object that it cannot write: code and constants.
#[allow(clippy::cast_possible_truncation, reason = "addresses of this process")]
unsafe extern "C" fn unmap_code(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: dl_iterate_phdr passes an object that stays loaded during the call, with `dlpi_phnum` headers.
    let (base, headers) = unsafe {
        let info = &*info;
        (info.dlpi_addr as usize, std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)))
    };
    // SAFETY: sysconf has no preconditions.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0) {
        let start = base.wrapping_add(header.p_vaddr as usize);
        let aligned = start / page * page;
        // SAFETY: this is a private mapping of a file that nobody has written or can write, so each page has the bytes of the
        // file again when it is next used. The kernel's own object (vDSO) has the same pages again, or refuses.
        unsafe {
            libc::madvise(aligned as *mut c_void, start - aligned + header.p_memsz as usize, libc::MADV_DONTNEED)
        };
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_constants_are_there_again_when_they_are_used() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").expect("there is /proc");
            statm.split(' ').nth(2).and_then(|shared| shared.parse::<usize>().ok()).expect("pages of files")
        };
        // Formatting and parsing touch much code.
        let text = || format!("{:?} {:.3}", "1.5".parse::<f64>(), std::f64::consts::PI);
        let (expected, before) = (text(), resident());
        release_startup_memory();
        let after = resident();
        assert!(after < before, "{before} pages of files before, {after} after");
        assert_eq!(text(), expected);
    }
}
