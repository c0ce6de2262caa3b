//! What a count finds: at the start, after changes by others, and after a restart.

use std::fs;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_dir::Dir;
use ferry_mem::Mem;
use ferry_quota::Quota;
use ferry_vfs::*;

use crate::common::*;
use crate::tree::*;

#[test]
fn a_tree_counts_each_inode_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = |text: &str| dir.path().join(text);
    fs::create_dir_all(path("a/b/c")).unwrap();
    fs::write(path("a/f"), vec![1; 100_000]).unwrap();
    (0..3).for_each(|n| fs::hard_link(path("a/f"), path(&format!("a/b/link{n}"))).unwrap());
    rustix::fs::mkfifoat(rustix::fs::CWD, path("a/fifo"), 0o600.into()).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("a/socket")).unwrap();
    std::os::unix::fs::symlink("/", path("a/link")).unwrap();
    fs::File::create(path("a/holes")).unwrap().set_len(1 << 40).unwrap();
    (0..2000).for_each(|n| fs::write(path(&format!("a/b/c/{n}")), "x").unwrap());
    for file_handles in [true, false] {
        let options = ferry_dir::Options { file_handles, descriptors_max: Some(40), ..Default::default() };
        let source = Arc::new(Dir::open(dir.path(), options).unwrap());
        let quota = Quota::new(source.clone(), limits(1 << 30, None)).unwrap();
        assert_eq!(quota.usage(), disk_usage(dir.path()));
        assert!(quota.recount());
        assert_eq!(quota.usage(), disk_usage(dir.path()));
        // It keeps nothing.
        assert_eq!((source.usage().inodes, source.usage().handles), (1, 0));
    }
}

#[test]
fn a_count_finds_changes_of_others() {
    let tree = Tree::new(100 * K, None);
    let file = tree.create("f").unwrap();
    fs::write(tree.path("host"), vec![1; 80 << 10]).unwrap();
    assert!(tree.quota.recount());
    tree.assert_exact();
    assert_eq!(tree.write(file, 0, 40 << 10), Ok(20 << 10));
    fs::remove_file(tree.path("host")).unwrap();
    assert_eq!(tree.write(file, 20 * K, 20 << 10), Err(Errno::NOSPC));
    assert!(tree.quota.recount());
    assert_eq!(tree.write(file, 20 * K, 20 << 10), Ok(20 << 10));
    tree.assert_exact();
    // Also what belongs to a file that is open here.
    fs::write(tree.path("f"), vec![1; 60 << 10]).unwrap();
    assert!(tree.quota.recount());
    tree.assert_exact();
    assert_eq!(tree.write(file, 60 * K, 4096), Ok(4096));
    tree.assert_exact();
    fs::write(tree.path("f"), "").unwrap();
    assert!(tree.quota.recount());
    tree.assert_exact();
    assert_eq!(tree.write(file, 0, 4096), Ok(4096));
    tree.assert_exact();
}

#[test]
fn a_refused_request_leads_to_a_count() {
    let tree = Tree::new(40 * K, None);
    tree.quota.begin().unwrap();
    let file = tree.create("f").unwrap();
    fs::write(tree.path("host"), vec![1; 40 << 10]).unwrap();
    // A client that asks for the room sees it soon.
    let end = Instant::now() + Duration::from_secs(30);
    while tree.statfs().bfree > 0 {
        assert!(Instant::now() < end, "what the host wrote is not counted");
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::remove_file(tree.path("host")).unwrap();
    while tree.write(file, 0, 20 << 10) != Ok(20 << 10) {
        assert!(Instant::now() < end, "what the host removed is not found");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_restart_counts_files_without_a_name() {
    let tree = Tree::new(64 * K, None);
    let cx = &tree.cx;
    let (entry, handle) = tree.quota.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!(tree.write((entry.ino, handle), 0, 30 << 10), Ok(30 << 10));
    let named = tree.create("f").unwrap();
    assert_eq!(tree.write(named, 0, 10 << 10), Ok(10 << 10));
    let before = tree.quota.usage();
    let next = open(tree.dir.path(), limits(1 << 20, None));
    let adopt = |(ino, handle): (Ino, Handle)| {
        let migrate = tree.quota.migrate().unwrap();
        let identity = migrate.identify(ino, IdentityScope::Host).unwrap();
        let path = format!("/proc/self/fd/{}", backing_fd(&tree, ino, handle));
        let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
        let next = next.migrate().unwrap();
        next.adopt(ino, 1, (&identity, IdentityScope::Host), Some(file.as_fd())).unwrap();
        next.adopt_open(cx, ino, handle, OFlags::RDWR, Some(file.into())).unwrap();
    };
    adopt((entry.ino, handle));
    adopt(named);
    assert_eq!(next.usage(), before);
    for (ino, handle) in [(entry.ino, handle), named] {
        next.release(cx, ino, handle);
        next.forget(ino, 1);
    }
    assert_eq!(next.usage(), disk_usage(tree.dir.path()));
}

/// The number of a descriptor of an open file, from a read's extent.
fn backing_fd(tree: &Tree, ino: Ino, handle: Handle) -> i32 {
    use std::os::fd::AsRawFd;
    match tree.quota.read(&tree.cx, &range(ino, handle, 0, 1, OFlags::RDWR), &mut Vec::new()).unwrap() {
        Data::Extent(extent) => extent.file.as_fd().as_raw_fd(),
        Data::Bytes(_) => panic!("a directory's files are extents"),
    }
}

#[test]
fn any_source_has_a_quota() {
    let mem = Arc::new(Mem::new(&ferry_mem::Options::default()).unwrap());
    let quota = Quota::new(mem, limits(64 * K, Some(3))).unwrap();
    let cx = caller();
    let begin = quota.usage();
    let (entry, handle) = quota.create(&cx, Ino::ROOT, name("f"), &new(0o644), OFlags::RDWR).unwrap();
    let at = range(entry.ino, handle, 0, 100 << 10, OFlags::RDWR);
    let written = quota.write(&cx, &at, &mut &vec![3; 100 << 10][..]).unwrap().bytes().unwrap();
    assert!((1..=64 << 10).contains(&written), "{written}");
    assert_eq!(quota.write(&cx, &IoRange { offset: 100 << 10, ..at }, &mut &[1][..]).unwrap_err(), Errno::NOSPC);
    quota.unlink(&cx, Ino::ROOT, name("f")).unwrap();
    quota.release(&cx, entry.ino, handle);
    quota.forget(entry.ino, 1);
    assert_eq!(quota.usage(), begin);
    assert!(quota.recount());
    assert_eq!(quota.usage(), begin);
}

#[test]
fn a_tree_that_changes_can_be_counted() {
    let dir = tempfile::tempdir().unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                for n in 0..50 {
                    let at = dir.path().join(n.to_string());
                    fs::create_dir_all(at.join("deep")).unwrap();
                    fs::write(at.join("deep/file"), "x").unwrap();
                    fs::hard_link(at.join("deep/file"), at.join("link")).unwrap();
                }
                (0..50).for_each(|n| fs::remove_dir_all(dir.path().join(n.to_string())).unwrap());
            }
        });
        let count = || {
            let source = Dir::open(dir.path(), ferry_dir::Options::default()).unwrap();
            Quota::new(Arc::new(source), limits(0, None)).map(|quota| quota.usage().files)
        };
        let counted: Vec<_> = (0..30).map(|_| count()).collect();
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(counted.iter().all(|files| files.as_ref().is_ok_and(|files| *files > 0)), "{counted:?}");
    });
}

/// A directory that this user may not list.
struct Unreadable;

impl FileSystem for Unreadable {
    fn getattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(Attr { ino: 42, mode: 0o040_000, ..Attr::default() })
    }

    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Err(Errno::ACCESS)
    }
}

#[test]
fn a_tree_that_cannot_be_read_has_no_quota() {
    let error = Quota::new(Arc::new(Unreadable), limits(1 << 20, None)).unwrap_err();
    assert_eq!(error.inode, 42);
    assert!(error.to_string().contains("find -inum 42"), "{error}");
}
