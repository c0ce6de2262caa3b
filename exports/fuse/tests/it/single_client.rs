//! A mount that nobody shares its source with: the kernel keeps the locks, and closes files without asking.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use common::{mount, paths, plain};
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
        // GETATTR of the directory, which has changed, LOOKUP, CREATE, and RELEASE, which nobody waits for.
        assert!(alone <= 4 * FILES, "{path:?}: {alone}");
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
        assert!(lock(&other), "{path:?}: released by the close");
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
        assert_eq!(std::fs::read(mounted.path("file")).unwrap(), b"data", "{path:?}");
        mounted.stop();
    }
}
