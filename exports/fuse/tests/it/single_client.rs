//! A mount that is the only user of its source: the kernel keeps the locks, and sends no FLUSH.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use common::{mount, paths, plain, wait_until};
use ferry_fuse::Options;
use rustix::fs::FlockOperation;

const FILES: u64 = 50;

fn create(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Takes the lock of a whole file for an open file description; returns whether it is free.
fn lock(file: &File) -> bool {
    let write = i16::try_from(libc::F_WRLCK).unwrap();
    let whole = libc::flock { l_type: write, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the structure outlives the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) == 0 }
}

#[test]
fn no_close_is_waited_for() {
    for path in paths() {
        let [shared, alone] = [false, true].map(|single_client| {
            let source = ferry_mem::Tree::new(&ferry_mem::Options::default()).unwrap();
            let mounted = mount(Arc::new(source), Options { single_client, passthrough: Some(false), ..plain(path) });
            let before = mounted.export().stats().requests;
            for number in 0..FILES {
                drop(create(&mounted.path(&format!("f{number}"))));
            }
            let requests = mounted.export().stats().requests - before;
            mounted.stop();
            requests
        });
        // GETATTR of the directory, which has changed, LOOKUP, CREATE, and RELEASE, which is asynchronous.
        // A request more for half of them is allowed: the kernel may look something up again.
        assert!(alone <= 4 * FILES + FILES / 2, "{path:?}: {alone}");
        // And a FLUSH.
        assert!(shared >= 5 * FILES - 1, "{path:?}: {shared}");
    }
}

#[test]
fn locks_exclude_and_end_with_their_file() {
    for path in paths() {
        let source = Arc::new(ferry_mem::Tree::new(&ferry_mem::Options::default()).unwrap());
        let mounted = mount(source, Options { single_client: true, ..plain(path) });
        let one = create(&mounted.path("file"));
        let other = File::options().read(true).write(true).open(mounted.path("file")).unwrap();
        let before = mounted.export().stats().requests;
        assert!(lock(&one) && !lock(&other), "{path:?}");
        rustix::fs::flock(&one, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).is_err(), "{path:?}");
        assert_eq!(mounted.export().stats().requests, before, "{path:?}: the server is not asked");
        one.write_all_at(b"data", 0).unwrap();
        drop(one);
        // A child of another test has it open until it executes its program.
        wait_until("released by the close", || lock(&other));
        let shared = || rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared);
        wait_until("released by the close, too", || shared().is_ok());
        assert_eq!(std::fs::read(mounted.path("file")).unwrap(), b"data", "{path:?}");
        mounted.stop();
    }
}

/// Who closes a file may go on with its mapping; what is stored there must not stay with the kernel.
#[test]
fn stores_through_a_mapping_reach_the_source() {
    const BYTES: usize = 8192;
    for path in paths() {
        let source = Arc::new(ferry_mem::Tree::new(&ferry_mem::Options::default()).unwrap());
        let options = Options { single_client: true, passthrough: Some(false), ..plain(path) };
        let mounted = mount(Arc::clone(&source) as _, options.clone());
        let file = create(&mounted.path("file"));
        file.set_len(BYTES as u64).unwrap();
        // SAFETY: maps a file at an address of the kernel's choice.
        let map = unsafe {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0).unwrap()
        };
        let store = |byte: u8| {
            // SAFETY: so many bytes were mapped, and nothing else uses them.
            unsafe { std::ptr::write_bytes(map.cast::<u8>(), byte, BYTES) }
        };
        store(b'a');
        drop(file);
        store(b'b');
        // SAFETY: nothing uses the mapping any more.
        unsafe { rustix::mm::munmap(map, BYTES).unwrap() };
        mounted.stop();
        let mounted = mount(source, options);
        assert!(std::fs::read(mounted.path("file")).unwrap() == [b'b'; BYTES], "{path:?}");
        mounted.stop();
    }
}
