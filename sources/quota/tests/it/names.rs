//! Limits of files, and inodes that lose their names.

use std::os::unix::fs::MetadataExt;

use ferry_vfs::*;

use crate::common::*;
use crate::tree::*;

#[test]
fn no_more_inodes_than_allowed_are_created() {
    let tree = Tree::new(1 << 20, Some(6));
    let Tree { quota, cx, .. } = &tree;
    let file = tree.create("file").unwrap();
    quota.mkdir(cx, Ino::ROOT, name("dir"), &new(0o755)).unwrap();
    quota.mknod(cx, Ino::ROOT, name("fifo"), &new(0o010_644)).unwrap();
    quota.symlink(cx, Ino::ROOT, name("link"), &[b'a'; 3000]).unwrap();
    tree.assert_exact();
    let unnamed = quota.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!((quota.usage().files, tree.statfs().files, tree.statfs().ffree), (6, 6, 0));
    let full = [
        tree.create("x").map(drop),
        quota.mkdir(cx, Ino::ROOT, name("x"), &new(0o755)).map(drop),
        quota.mknod(cx, Ino::ROOT, name("x"), &new(0o100_644)).map(drop),
        quota.symlink(cx, Ino::ROOT, name("x"), b"a").map(drop),
        quota.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).map(drop),
    ];
    assert_eq!(full, [Err(Errno::NOSPC); 5]);
    let whiteout = |from, to| quota.rename(cx, (Ino::ROOT, name(from)), (Ino::ROOT, name(to)), RenameFlags::WHITEOUT);
    assert_eq!(whiteout("fifo", "moved"), Err(Errno::NOSPC), "it leaves an inode");
    // A further name is no inode, and between two names of one nothing is renamed.
    quota.link(cx, file.0, Ino::ROOT, name("again")).unwrap();
    whiteout("file", "again").unwrap();
    assert_eq!(quota.usage().files, 6);
    quota.forget(file.0, 1);
    tree.unlink("file").unwrap();
    tree.close((unnamed.0.ino, unnamed.1));
    tree.assert_exact();
    assert_eq!(quota.usage().files, 5);
    whiteout("fifo", "moved").unwrap();
    tree.assert_exact();
    assert_eq!(quota.usage().files, 6);
    tree.unlink("fifo").unwrap();
    tree.assert_exact();
    assert_eq!(quota.usage().files, 5);
    // What failed left nothing behind.
    quota.rmdir(cx, Ino::ROOT, name("dir")).unwrap();
    assert_eq!(quota.usage().files, 5, "the client refers to the directory");
    let dir = quota.mkdir(cx, Ino::ROOT, name("dir"), &new(0o755)).unwrap();
    assert_eq!(quota.usage().files, 6);
    assert_eq!(quota.rmdir(cx, Ino::ROOT, name("no")), Err(Errno::NOENT));
    quota.rmdir(cx, Ino::ROOT, name("dir")).unwrap();
    quota.forget(dir.ino, 1);
    assert_eq!(quota.usage().files, 5);
}

#[test]
fn an_unlinked_file_counts_until_its_last_user_is_gone() {
    let tree = Tree::new(64 * K, None);
    let before = tree.quota.usage();
    let file = tree.create("f").unwrap();
    let reader = tree.quota.open(&tree.cx, file.0, OFlags::RDONLY).unwrap();
    assert_eq!(tree.write(file, 0, 40 << 10), Ok(40 << 10));
    tree.unlink("f").unwrap();
    assert_eq!(tree.quota.usage().files, before.files + 1);
    // It grows, also without a name.
    assert_eq!(tree.write(file, 40 * K, 40 << 10), Ok(24 << 10));
    assert_eq!(tree.create("g").unwrap_err(), Errno::NOSPC);
    tree.close(file);
    assert_eq!(tree.quota.usage().bytes, before.bytes + 64 * K);
    assert!(tree.quota.recount());
    assert_eq!(tree.quota.usage().bytes, before.bytes + 64 * K);
    tree.quota.release(&tree.cx, file.0, reader);
    assert_eq!(tree.quota.usage(), before);
    tree.assert_exact();
}

#[test]
fn a_file_without_a_name_can_get_one() {
    let tree = Tree::new(64 * K, None);
    let Tree { quota, cx, .. } = &tree;
    let (entry, handle) = quota.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!(tree.write((entry.ino, handle), 0, 8192), Ok(8192));
    assert!(quota.recount());
    quota.link(cx, entry.ino, Ino::ROOT, name("f")).unwrap();
    tree.assert_exact();
    quota.release(cx, entry.ino, handle);
    quota.forget(entry.ino, 2);
    assert_eq!(tree.path("f").metadata().unwrap().nlink(), 1);
    tree.assert_exact();
    // Another one never does.
    let (entry, handle) = quota.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!(tree.write((entry.ino, handle), 0, 8192), Ok(8192));
    tree.close((entry.ino, handle));
    tree.assert_exact();
}

#[test]
fn replacing_renames_free_space() {
    let tree = Tree::new(64 * K, Some(8));
    let Tree { quota, cx, .. } = &tree;
    let rename = |from: &'static str, to: &'static str, flags| {
        quota.rename(cx, (Ino::ROOT, name(from)), (Ino::ROOT, name(to)), flags)
    };
    let (old, new_file) = (tree.create("old").unwrap(), tree.create("new").unwrap());
    assert_eq!(tree.write(old, 0, 20 << 10), Ok(20 << 10));
    assert_eq!(tree.write(new_file, 0, 64 << 10), Ok(44 << 10));
    // At the limit, too: editors save files so.
    assert_eq!(rename("new", "old", RenameFlags::empty()), Ok(()));
    tree.close(old);
    tree.assert_exact();
    assert_eq!(rename("old", "old", RenameFlags::empty()), Ok(()));
    tree.assert_exact();
    assert_eq!(tree.write(new_file, 44 * K, 64 << 10), Ok(20 << 10));
    // A name more may need a block.
    assert_eq!(rename("old", "new", RenameFlags::empty()), Err(Errno::NOSPC));
    tree.set_size(new_file, 0).unwrap();
    quota.link(cx, new_file.0, Ino::ROOT, name("again")).unwrap();
    // Two names of one inode: nothing happens.
    assert_eq!(rename("old", "again", RenameFlags::empty()), Ok(()));
    tree.assert_exact();
    let dirs = ["a", "b"].map(|text| quota.mkdir(cx, Ino::ROOT, name(text), &new(0o755)).unwrap().ino);
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    assert_eq!(rename("a", "old", RenameFlags::EXCHANGE), Ok(()));
    assert_eq!(rename("b", "old", RenameFlags::empty()), Ok(()));
    quota.forget(dirs[0], 1);
    tree.assert_exact();
    let inner = (dirs[1], name("inner"));
    assert_eq!(quota.rename(cx, (Ino::ROOT, name("again")), inner, RenameFlags::NOREPLACE), Ok(()));
    tree.assert_exact();
}

#[test]
fn failed_requests_reserve_nothing() {
    let tree = Tree::new(64 * K, Some(4));
    let Tree { quota, cx, .. } = &tree;
    let file = tree.create("f").unwrap();
    for _ in 0..20 {
        assert_eq!(tree.create("f").unwrap_err(), Errno::EXIST);
        assert_eq!(quota.mkdir(cx, Ino::ROOT, name("f"), &new(0o755)).unwrap_err(), Errno::EXIST);
        assert_eq!(quota.link(cx, file.0, Ino::ROOT, name("f")).unwrap_err(), Errno::EXIST);
        assert_eq!(quota.unlink(cx, Ino::ROOT, name("no")), Err(Errno::NOENT));
        assert_eq!(quota.open(cx, file.0, OFlags::ACCMODE).unwrap_err(), Errno::INVAL);
        let read_only = quota.open(cx, file.0, OFlags::RDONLY).unwrap();
        assert_eq!(tree.write((file.0, read_only), 0, 10).unwrap_err(), Errno::BADF);
        quota.release(cx, file.0, read_only);
        assert!(tree.write((file.0, Handle(1 << 40)), 0, 10).is_err());
        let gone = quota.rename(cx, (Ino::ROOT, name("no")), (Ino::ROOT, name("f")), RenameFlags::empty());
        assert_eq!(gone, Err(Errno::NOENT));
        tree.assert_exact();
    }
}

#[test]
fn links_between_directories_count_once_and_move_freely() {
    let tree = Tree::new(256 * K, Some(6));
    let Tree { quota, cx, .. } = &tree;
    let dirs = ["a", "b"].map(|text| quota.mkdir(cx, Ino::ROOT, name(text), &new(0o755)).unwrap().ino);
    let (entry, handle) = quota.create(cx, dirs[0], name("f"), &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!(tree.write((entry.ino, handle), 0, 50 << 10), Ok(50 << 10));
    quota.link(cx, entry.ino, dirs[1], name("g")).unwrap();
    tree.assert_exact();
    quota.symlink(cx, dirs[0], name("s"), b"f").unwrap();
    for (from, to) in [((dirs[0], "s"), (dirs[0], "t")), ((dirs[0], "t"), (dirs[1], "s"))] {
        quota.rename(cx, (from.0, name(from.1)), (to.0, name(to.1)), RenameFlags::empty()).unwrap();
        tree.assert_exact();
    }
    // A directory goes with all that is in it.
    quota.rename(cx, (Ino::ROOT, name("b")), (dirs[0], name("b")), RenameFlags::empty()).unwrap();
    tree.assert_exact();
    quota.unlink(cx, dirs[0], name("f")).unwrap();
    tree.assert_exact();
    // Opened twice, and replaced while it is open.
    let other = tree.create("other").unwrap();
    quota.rename(cx, (Ino::ROOT, name("other")), (dirs[1], name("g")), RenameFlags::empty()).unwrap();
    assert_eq!(quota.usage().files, 6);
    quota.release(cx, entry.ino, handle);
    quota.forget(entry.ino, 2);
    tree.close(other);
    tree.assert_exact();
    assert!(quota.recount());
    tree.assert_exact();
}
