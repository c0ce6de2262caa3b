//! Limits of bytes.

use std::fs;
use std::sync::Arc;

use ferry_vfs::*;

use crate::common::*;
use crate::tree::*;

#[test]
fn a_file_grows_to_the_limit_and_not_beyond() {
    let tree = Tree::new(100 * K, None);
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 64 << 10), Ok(64 << 10));
    tree.assert_exact();
    // Directories may have needed some.
    let rest = tree.statfs().bfree * u64::from(tree.statfs().frsize);
    assert_eq!(rest, 36 * K);
    // The part that fits is written.
    assert_eq!(tree.write(file, 64 * K, 64 << 10), Ok(36 << 10));
    assert_eq!(tree.write(file, 100 * K, 1), Err(Errno::NOSPC));
    assert_eq!(tree.statfs().bfree, 0);
    tree.assert_exact();
    // What has storage can be written again; a hole cannot.
    assert_eq!(tree.write(file, 1000, 90 << 10), Ok(90 << 10));
    tree.set_size(file, 200 * K).unwrap();
    assert_eq!(tree.write(file, 150 * K, 100), Err(Errno::NOSPC));
    assert_eq!(tree.write(file, 98 * K, 10 << 10), Ok(2 << 10));
    // Room comes back, and is used again.
    tree.set_size(file, 50 * K).unwrap();
    // It begins in the middle of a block.
    assert_eq!(tree.write(file, 150 * K, 100 << 10), Ok(46 << 10));
    tree.assert_exact();
    tree.unlink("f").unwrap();
    tree.close(file);
    tree.assert_exact();
    assert_eq!(tree.quota.usage().files, 1);
}

#[test]
fn appended_and_durable_writes_count_too() {
    let tree = Tree::new(16 * K, None);
    let file = tree.create("f").unwrap();
    for flags in [OFlags::APPEND, OFlags::APPEND | OFlags::DSYNC] {
        let at = range(file.0, file.1, 0, 8000, OFlags::RDWR | flags);
        assert_eq!(tree.quota.write(&tree.cx, &at, &mut &[1; 8000][..]).unwrap().bytes(), Some(8000));
    }
    let at = range(file.0, file.1, 0, 8000, OFlags::RDWR | OFlags::APPEND);
    assert_eq!(tree.quota.write(&tree.cx, &at, &mut &[1; 8000][..]).unwrap().bytes(), Some(384));
    assert_eq!(tree.quota.write(&tree.cx, &at, &mut &[1; 8000][..]).unwrap_err(), Errno::NOSPC);
    assert_eq!(fs::metadata(tree.path("f")).unwrap().len(), 16 * K);
    tree.assert_exact();
}

#[test]
fn allocation_counts_and_holes_do_not() {
    let tree = Tree::new(100 * K, None);
    let (ino, handle) = tree.create("f").unwrap();
    let allocate = |offset, len, flags| tree.quota.fallocate(&tree.cx, ino, handle, offset, len, flags);
    let keep = FallocateFlags::KEEP_SIZE;
    assert_eq!(allocate(0, 104 * K, keep), Err(Errno::NOSPC));
    assert_eq!(allocate(0, 1 << 62, keep), Err(Errno::NOSPC));
    assert_eq!(allocate(1 << 40, 60 * K, keep), Ok(()));
    tree.assert_exact();
    assert_eq!(allocate(0, 60 * K, FallocateFlags::empty()), Err(Errno::NOSPC));
    assert_eq!(allocate(0, 40 * K, FallocateFlags::empty()), Ok(()));
    tree.assert_exact();
    if is_tmpfs(tree.dir.path()) {
        return;
    }
    // What was allocated before can be written although nothing else fits: the purpose of allocation.
    assert_eq!(tree.write((ino, handle), 0, 40 << 10), Ok(40 << 10));
    assert_eq!(tree.write((ino, handle), 1 << 40, 60 << 10), Ok(60 << 10));
    assert_eq!(allocate(0, 40 * K, FallocateFlags::ZERO_RANGE), Ok(()));
    assert_eq!(tree.write((ino, handle), 40 * K, 1), Err(Errno::NOSPC));
    assert_eq!(allocate(8 * K, 16 * K, FallocateFlags::PUNCH_HOLE | keep), Ok(()));
    tree.assert_exact();
    assert_eq!(tree.write((ino, handle), 0, 40 << 10), Ok(40 << 10));
    tree.assert_exact();
    // A file of holes has any size.
    assert_eq!(tree.set_size((ino, handle), 1 << 42).unwrap().size, 1 << 42);
    tree.assert_exact();
}

#[test]
fn copies_count() {
    let tree = Tree::new(100 * K, None);
    let from = tree.create("from").unwrap();
    let to = tree.create("to").unwrap();
    assert_eq!(tree.write(from, 0, 60 << 10), Ok(60 << 10));
    let copy = |from_offset, to_offset, len| {
        let (from, to) = ((from.0, from.1, from_offset), (to.0, to.1, to_offset));
        tree.quota.copy_file_range(&tree.cx, &CopyRange { from, to, len })
    };
    // A client may ask for all that there is.
    assert_eq!(copy(0, 0, u64::MAX >> 1), Ok(40 * K));
    assert_eq!(copy(0, 40 * K, 20 * K), Err(Errno::NOSPC));
    assert_eq!(copy(10 * K, 0, 40 * K), Ok(40 * K));
    tree.assert_exact();
}

#[test]
fn open_with_truncation_frees_space() {
    let tree = Tree::new(40 * K, None);
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 60 << 10), Ok(40 << 10));
    let handle = tree.quota.open(&tree.cx, file.0, OFlags::RDWR | OFlags::TRUNC).unwrap();
    tree.assert_exact();
    assert_eq!(tree.write((file.0, handle), 0, 60 << 10), Ok(40 << 10));
    tree.quota.release(&tree.cx, file.0, handle);
    let set = SetAttr { size: Some(0), ..SetAttr::default() };
    tree.quota.setattr(&tree.cx, file.0, None, &set).unwrap();
    tree.assert_exact();
}

#[test]
fn nothing_grows_in_a_tree_without_room() {
    for bytes in [0, 4 * K] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("f"), vec![1; 40 << 10]).unwrap();
        fs::create_dir(dir.path().join("d")).unwrap();
        let tree = Tree { quota: open(dir.path(), limits(bytes, None)), cx: caller(), dir };
        tree.assert_exact();
        assert_eq!(tree.create("g").unwrap_err(), Errno::NOSPC);
        let f = tree.quota.lookup(&tree.cx, Ino::ROOT, name("f")).unwrap().ino;
        let handle = tree.quota.open(&tree.cx, f, OFlags::RDWR).unwrap();
        // Writes in place, truncation, reading and removal work.
        assert_eq!(tree.write((f, handle), 0, 40 << 10), Ok(40 << 10));
        assert_eq!(tree.write((f, handle), 40 * K, 1), Err(Errno::NOSPC));
        let statfs = tree.statfs();
        assert_eq!((statfs.blocks * u64::from(statfs.frsize), statfs.bfree, statfs.bavail), (bytes, 0, 0));
        tree.set_size((f, handle), 10).unwrap();
        assert_eq!(tree.write((f, handle), 0, 4096), Ok(4096));
        tree.close((f, handle));
        tree.unlink("f").unwrap();
        tree.quota.rmdir(&tree.cx, Ino::ROOT, name("d")).unwrap();
        tree.assert_exact();
        if bytes == 0 {
            assert_eq!(tree.create("g").unwrap_err(), Errno::NOSPC);
        }
    }
}

#[test]
fn a_limit_of_everything_limits_nothing() {
    let tree = Tree::new(u64::MAX, Some(u64::MAX));
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 1 << 20), Ok(1 << 20));
    tree.assert_exact();
    let host = rustix::fs::statvfs(tree.dir.path()).unwrap();
    let statfs = tree.statfs();
    assert_eq!((statfs.blocks, statfs.files), (host.f_blocks, host.f_files));
    assert!(statfs.bfree > 0 && statfs.ffree > 0);
}

#[test]
fn attributes_count() {
    let tree = Tree::new(4 * K, None);
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 4096), Ok(4096));
    let set = |bytes| tree.quota.setxattr(&tree.cx, file.0, b"user.a", &vec![1; bytes], XattrFlags::empty(), false);
    assert_eq!(set(2000), Err(Errno::NOSPC));
    tree.set_size(file, 0).unwrap();
    assert_eq!(set(2000), Ok(()));
    tree.assert_exact();
    tree.quota.removexattr(&tree.cx, file.0, b"user.a").unwrap();
    tree.assert_exact();
}

#[test]
fn direct_writes_count_too() {
    let dir = tempfile::tempdir().unwrap();
    let own = disk_usage(dir.path()).bytes;
    let options = ferry_dir::Options { direct_io: true, ..Default::default() };
    let source = ferry_dir::Dir::open(dir.path(), options).unwrap();
    let quota = Arc::new(ferry_quota::Quota::new(Arc::new(source), limits(own + 40 * K, None)).unwrap());
    let tree = Tree { quota, cx: caller(), dir };
    let (ino, handle) = tree.create("f").unwrap();
    let write = |offset, bytes: usize| {
        let at = range(ino, handle, offset, bytes, OFlags::RDWR | OFlags::DIRECT);
        tree.quota.write(&tree.cx, &at, &mut &vec![7; bytes][..]).map(|data| data.bytes().unwrap())
    };
    if is_tmpfs(tree.dir.path()) {
        return;
    }
    assert_eq!(write(0, 4096), Ok(4096));
    assert_eq!(write(4 * K, 32 << 10), Ok(32 << 10));
    assert_eq!(write(36 * K, 64 << 10), Ok(4 << 10));
    assert_eq!(write(40 * K, 4096), Err(Errno::NOSPC));
    assert_eq!(write(100, 100), Err(Errno::INVAL));
    tree.assert_exact();
}

#[test]
fn writes_clear_privileges() {
    let tree = Tree::new(40 * K, None);
    let (ino, handle) = tree.create("f").unwrap();
    for (clear_privileges, left) in [(false, 0o4755), (true, 0o755)] {
        let set = SetAttr { mode: Some(0o4755), ..SetAttr::default() };
        tree.quota.setattr(&tree.cx, ino, None, &set).unwrap();
        let at = IoRange { clear_privileges, ..range(ino, handle, 0, 10, OFlags::RDWR) };
        assert_eq!(tree.quota.write(&tree.cx, &at, &mut &[1; 10][..]).unwrap().bytes(), Some(10));
        let mode = tree.quota.getattr(&tree.cx, ino, None).unwrap().mode & 0o7777;
        // Only root may keep them.
        if rustix::process::geteuid().is_root() {
            assert_eq!(mode, left, "{clear_privileges}");
        }
    }
}

#[test]
fn all_data_paths_are_counted() {
    let tree = Tree::new(4 * K, None);
    let (ino, handle) = tree.create("f").unwrap();
    assert!(tree.quota.backing(&tree.cx, ino, handle).is_none() && !tree.quota.features().backing);
    assert!(tree.quota.mappable().is_none());
    // Reads are the source's extents.
    let read = tree.quota.read(&tree.cx, &range(ino, handle, 0, 1, OFlags::RDWR), &mut Vec::new()).unwrap();
    assert!(matches!(read, Data::Extent(_)));
}
