//! Operations of a guest's program on mapped files: `ferry-window ACTION ARG...`, one or two system calls each.
//!
//! * `sum FILE`: the sum of its bytes, read through a mapping.
//! * `store FILE OFFSET TEXT`: stores the text through a shared mapping, and makes it durable.
//! * `append FROM TO`: appends FROM to TO; the buffer of the write is a mapping of FROM.
//! * `keep FILE READY GO`: maps FILE, reads every page, creates READY, waits for GO, then reads each page and stores
//!   into it; prints how many were not zero before.
//! * `fill FROM TO`: reads FROM into a shared mapping of TO, which is at least as long.

#![allow(clippy::unwrap_used, reason = "an action that cannot go on has failed")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync};

/// A file, mapped shared until the process ends.
struct Mapped {
    start: *mut u8,
    bytes: usize,
}

impl Mapped {
    fn new(file: &File, writable: bool) -> Self {
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: the kernel chooses the place; nothing is unmapped again.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, 0) }.unwrap();
        Self { start: start.cast(), bytes }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "within the file");
        self.start.wrapping_add(offset)
    }

    fn slice(&self) -> &[u8] {
        // SAFETY: the mapping exists until the process ends, and the tests do not change the file meanwhile.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

fn open(path: &str, writable: bool) -> File {
    OpenOptions::new().read(true).write(writable).open(path).unwrap()
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["sum", file] => {
            let mapped = Mapped::new(&open(file, false), false);
            println!("{}", mapped.slice().iter().map(|byte| u64::from(*byte)).sum::<u64>());
        }
        ["store", file, offset, text] => {
            let file = open(file, true);
            let mapped = Mapped::new(&file, true);
            let offset = offset.parse::<usize>().unwrap();
            assert!(offset + text.len() <= mapped.bytes, "within the file");
            // SAFETY: it lies within the mapping, of which there is no reference.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), mapped.at(offset), text.len()) };
            // SAFETY: it is the whole mapping.
            unsafe { msync(mapped.start.cast(), mapped.bytes, MsyncFlags::SYNC) }.unwrap();
        }
        ["append", from, to] => {
            let mapped = Mapped::new(&open(from, false), false);
            let to = open(to, true);
            let end = to.metadata().unwrap().len();
            // By address and not as a slice that was read before: the kernel accesses pages that were not touched before.
            to.write_all_at(mapped.slice(), end).unwrap();
        }
        ["fill", from, to] => {
            let from = open(from, false);
            let mapped = Mapped::new(&open(to, true), true);
            let bytes = usize::try_from(from.metadata().unwrap().len()).unwrap();
            assert!(bytes <= mapped.bytes, "as long at least");
            // SAFETY: the mapping is there until the process ends, and this is the only reference to it.
            let target = unsafe { std::slice::from_raw_parts_mut(mapped.start, bytes) };
            from.read_exact_at(target, 0).unwrap();
        }
        ["keep", file, ready, go] => {
            let mapped = Mapped::new(&open(file, true), true);
            let pages = || (0..mapped.bytes).step_by(4096);
            // SAFETY: it lies within the mapping, and is one byte, of which there is no reference; others may change it.
            let byte = |at: usize| unsafe { mapped.at(at).read_volatile() };
            let first_zero = || pages().position(|at| byte(at) == 0);
            assert_eq!(first_zero(), None, "the first page of zeros");
            File::create(ready).unwrap();
            while std::fs::metadata(go).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let full = pages().filter(|at| byte(*at) != 0).count();
            if let Some(number) = first_zero() {
                eprintln!("ferry-window: page {number} is the first one of zeros");
            }
            for at in pages() {
                // SAFETY: as for reading.
                unsafe { mapped.at(at).write_volatile(7) };
            }
            println!("{full} pages had something in them");
        }
        _ => panic!("ferry-window: unknown words: {words:?}"),
    }
}
