//! Locks between the processes of one guest.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::Check;
use crate::many::Role;
use crate::sys::{errno, fcntl_lock};

pub const CHECKS: &[Check] = &[
    ("posix-locks", posix_locks),
    ("posix-lock-ranges", posix_lock_ranges),
    ("posix-lock-deadlock", posix_lock_deadlock),
    ("posix-lock-interrupted", posix_lock_interrupted),
    ("flock", flock_locks),
    ("ofd-locks", ofd_locks),
    ("lock-waits", lock_waits),
];

fn file(dir: &Path) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(dir.join("file")).unwrap()
}

fn posix_locks(dir: &Path) {
    let file = file(dir);
    let path = dir.join("file");
    fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0).unwrap();
    assert!(!Role::try_lock("posix", &path), "two hold one lock");
    let mut other = Role::start(&["get-lock", path.to_str().unwrap()]);
    assert_eq!(other.line(), format!("{} {}", libc::F_WRLCK, std::process::id()), "F_GETLK: kind and holder");
    // A close of any descriptor of the file drops the process's locks.
    drop(File::open(&path).unwrap());
    assert!(Role::try_lock("posix", &path), "a close did not drop the lock");
    fcntl_lock(&file, libc::F_SETLK, libc::F_RDLCK, 0, 0).unwrap();
    assert!(!Role::try_lock("posix", &path), "a write lock beside a read lock");
    fcntl_lock(&file, libc::F_SETLK, libc::F_UNLCK, 0, 0).unwrap();
    let mut other = Role::start(&["get-lock", path.to_str().unwrap()]);
    assert!(other.line().starts_with(&format!("{} ", libc::F_UNLCK)), "F_GETLK without a lock");
    let holder = Role::hold("posix", &path);
    assert!([libc::EAGAIN, libc::EACCES].contains(&errno(fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0))));
    let mut holder = holder;
    holder.kill();
    fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0).unwrap();
}

fn posix_lock_ranges(dir: &Path) {
    let file = file(dir);
    let path = dir.join("file");
    let lock = |kind, start, len| fcntl_lock(&file, libc::F_SETLK, kind, start, len).unwrap();
    let taken = |start: i64, len: i64| {
        let path = path.to_str().unwrap();
        Role::start(&["range-free", path, &start.to_string(), &len.to_string()]).line() == "taken"
    };
    lock(libc::F_WRLCK, 100, 100);
    assert!(taken(150, 1) && taken(0, 0) && !taken(0, 100) && !taken(200, 0));
    lock(libc::F_UNLCK, 120, 10); // Split.
    assert!(taken(100, 20) && !taken(120, 10) && taken(130, 1));
    lock(libc::F_RDLCK, 150, 10); // Another kind in the middle.
    assert!(taken(155, 1) && taken(199, 1));
    lock(libc::F_WRLCK, 0, 0); // All in one again, to the end of all files.
    assert!(taken(i64::MAX - 1, 1) && taken(125, 1));
    lock(libc::F_UNLCK, 0, 0);
    assert!(!taken(0, 0));
}

fn posix_lock_deadlock(dir: &Path) {
    let file = file(dir);
    let path = dir.join("file");
    fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 1).unwrap();
    // The other holds byte 1 and then waits for byte 0.
    let mut other = Role::start(&["hold-then-wait", path.to_str().unwrap()]);
    assert_eq!(other.line(), "held");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(errno(fcntl_lock(&file, libc::F_SETLKW, libc::F_WRLCK, 1, 1)), libc::EDEADLK);
    fcntl_lock(&file, libc::F_SETLK, libc::F_UNLCK, 0, 1).unwrap();
    assert_eq!(other.line(), "got");
}

/// A process is killed while it waits for a lock, which others can have afterwards. Over virtio-fs it stays until it
/// is answered, for Linux sends no INTERRUPT there: so it is not waited for before the lock is free.
fn posix_lock_interrupted(dir: &Path) {
    let file = file(dir);
    let path = dir.join("file");
    fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 0, 0).unwrap();
    let mut waiting = Role::start(&["hold", "posix", path.to_str().unwrap()]);
    std::thread::sleep(std::time::Duration::from_millis(300));
    waiting.signal();
    fcntl_lock(&file, libc::F_SETLK, libc::F_UNLCK, 0, 0).unwrap();
    waiting.kill();
    assert!(Role::try_lock("posix", &path), "the killed process's wait still counts");
}

fn flock_locks(dir: &Path) {
    let one = file(dir);
    let path = dir.join("file");
    let two = file(dir);
    flock(&one, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert_eq!(errno(flock(&two, FlockOperation::NonBlockingLockShared)), libc::EWOULDBLOCK);
    assert!(!Role::try_lock("flock", &path));
    assert!(Role::try_lock("posix", &path), "the two kinds of lock have nothing to do with each other");
    flock(&one, FlockOperation::NonBlockingLockShared).unwrap();
    flock(&two, FlockOperation::NonBlockingLockShared).unwrap();
    assert!(!Role::try_lock("flock", &path));
    // A duplicate shares the lock; the last close drops it.
    let duplicate = one.try_clone().unwrap();
    drop((one, two));
    assert!(!Role::try_lock("flock", &path));
    drop(duplicate);
    assert!(Role::try_lock("flock", &path));
    let mut holder = Role::hold("flock", &path);
    assert!(!Role::try_lock("flock", &path));
    holder.kill();
    assert!(Role::try_lock("flock", &path));
}

fn ofd_locks(dir: &Path) {
    let (one, two) = (file(dir), file(dir));
    let path = dir.join("file");
    fcntl_lock(&one, libc::F_OFD_SETLK, libc::F_WRLCK, 0, 10).unwrap();
    assert_eq!(errno(fcntl_lock(&two, libc::F_OFD_SETLK, libc::F_WRLCK, 5, 10)), libc::EAGAIN);
    assert_eq!(errno(fcntl_lock(&two, libc::F_SETLK, libc::F_WRLCK, 5, 10)), libc::EAGAIN);
    assert!(!Role::try_lock("ofd", &path));
    // Another descriptor's close does not drop it; its own does.
    drop(two);
    assert!(!Role::try_lock("ofd", &path));
    drop(one);
    assert!(Role::try_lock("ofd", &path));
}

fn lock_waits(dir: &Path) {
    let path = dir.join("file");
    drop(file(dir));
    for kind in ["posix", "flock", "ofd"] {
        let mut first = Role::hold(kind, &path);
        let mut second = Role::start(&["hold", kind, path.to_str().unwrap()]);
        std::thread::sleep(std::time::Duration::from_millis(200));
        first.finish();
        assert_eq!(second.line(), "held", "{kind}: the lock was not handed over");
        second.finish();
    }
}
