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

/// The size of buffers in bytes from which on they are returned to the system when they are dropped.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: libc::c_int = 512 << 10;

/// Makes the allocator of this process return buffers of 512 KiB or more to the system when they are dropped. Otherwise glibc keeps
/// dropped buffers of up to 32 MiB, for each thread (mallopt(3), `M_MMAP_THRESHOLD`). A new buffer then costs a page fault for each
/// 4 KiB, so this is for processes in which many threads have such a buffer now and then.
pub fn return_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers; any thread may call it at any time (mallopt(3)).
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
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

    /// Pages that this process has to itself.
    fn anonymous_bytes() -> usize {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").expect("there is /proc");
        let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
    }

    #[test]
    fn large_buffers_are_returned() {
        if !ferry_alone::in_own_process() {
            return;
        }
        return_large_buffers();
        let before = anonymous_bytes();
        // One for each arena of glibc.
        let [dropped, measured] = [(); 2].map(|()| std::sync::Barrier::new(9));
        let after = std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    drop(std::hint::black_box(vec![1_u8; 8 << 20]));
                    drop(std::hint::black_box(vec![1_u8; 4 << 20]));
                    dropped.wait();
                    measured.wait();
                });
            }
            dropped.wait();
            let after = anonymous_bytes();
            measured.wait();
            after
        });
        assert!(after < before + (4 << 20), "{before} bytes before, {after} after");
    }

    #[test]
    fn code_and_constants_are_there_again_when_they_are_used() {
        if !ferry_alone::in_own_process() {
            return;
        }
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
