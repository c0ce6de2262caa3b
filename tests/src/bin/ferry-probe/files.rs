//! Files: open, read, write, map, rename, attributes.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, Timespec, Timestamps, linkat, openat, renameat_with};

use crate::Check;
use crate::sys::{Mapping, errno, statx};

pub const CHECKS: &[Check] = &[
    ("rename-flags", rename_flags),
    ("rename-over-open", rename_over_open),
    ("tmpfile", tmpfile),
    ("unlinked-but-open", unlinked_but_open),
    ("removed-directory", removed_directory),
    ("btime", btime),
    ("times", times),
    ("mmap-shared", mmap_shared),
    ("mmap-after-truncate", mmap_after_truncate),
    ("append", append),
    ("direct", direct),
    ("sync-flags", sync_flags),
    ("hard-links", hard_links),
    ("long-link", long_link),
    ("statfs", statfs),
    ("flags-ioctl", flags_ioctl),
    ("execute", execute),
    ("vectored", vectored),
    ("open-flags", open_flags),
    ("ino-is-stable", ino_is_stable),
];

fn rename_flags(dir: &Path) {
    let [a, b] = ["a", "b"].map(|name| dir.join(name));
    let rename = |from: &PathBuf, to: &PathBuf, flags| renameat_with(CWD, from, CWD, to, flags);
    fs::write(&a, "a").unwrap();
    fs::create_dir(&b).unwrap();
    fs::write(b.join("inside"), "").unwrap();
    assert_eq!(errno(rename(&a, &b, RenameFlags::NOREPLACE)), libc::EEXIST);
    rename(&a, &b, RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(&b).unwrap(), "a");
    assert!(a.join("inside").exists());
    assert_eq!(errno(rename(&a, &dir.join("none"), RenameFlags::EXCHANGE)), libc::ENOENT);
    rename(&b, &dir.join("c"), RenameFlags::NOREPLACE).unwrap();
    assert!(!b.exists());
    rename(&dir.join("c"), &dir.join("d"), RenameFlags::WHITEOUT).unwrap();
    let whiteout = statx(&dir.join("c"));
    assert_eq!(u32::from(whiteout.stx_mode) & libc::S_IFMT, libc::S_IFCHR);
    assert_eq!((whiteout.stx_rdev_major, whiteout.stx_rdev_minor), (0, 0));
    let both = RenameFlags::EXCHANGE | RenameFlags::NOREPLACE;
    assert_eq!(errno(rename(&a, &dir.join("d"), both)), libc::EINVAL);
}

fn rename_over_open(dir: &Path) {
    let [a, b] = ["a", "b"].map(|name| dir.join(name));
    fs::write(&a, "new").unwrap();
    fs::write(&b, "old").unwrap();
    let mut old = File::open(&b).unwrap();
    fs::rename(&a, &b).unwrap();
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), old.metadata().unwrap().nlink()), ("old", 0));
    assert_eq!(fs::read_to_string(&b).unwrap(), "new");
    // Onto a hard link of itself: nothing happens.
    fs::hard_link(&b, &a).unwrap();
    fs::rename(&a, &b).unwrap();
    assert!(a.exists() && b.exists());
}

fn tmpfile(dir: &Path) {
    let flags = OFlags::TMPFILE | OFlags::RDWR;
    let mut file = File::from(openat(CWD, dir, flags, Mode::from_raw_mode(0o640)).unwrap());
    file.write_all(b"hidden").unwrap();
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    linkat(CWD, &path, CWD, dir.join("shown"), AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(fs::read_to_string(dir.join("shown")).unwrap(), "hidden");
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    assert_eq!(fs::metadata(dir.join("shown")).unwrap().mode() & 0o7777, 0o640);
    let file = openat(CWD, dir, flags | OFlags::EXCL, Mode::from_raw_mode(0o640)).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    assert_eq!(errno(linkat(CWD, &path, CWD, dir.join("never"), AtFlags::SYMLINK_FOLLOW)), libc::ENOENT);
}

fn unlinked_but_open(dir: &Path) {
    let path = dir.join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(b"before", 0).unwrap();
    let again = File::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    // Another file takes its name.
    fs::write(&path, "other").unwrap();
    file.write_all_at(b" after", 6).unwrap();
    let mut bytes = [0; 12];
    again.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"before after");
    let meta = file.metadata().unwrap();
    assert_eq!((meta.nlink(), meta.len()), (0, 12));
    file.set_len(3).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    rustix::fs::fsetxattr(&file, "user.x", b"y", rustix::fs::XattrFlags::empty()).unwrap();
    file.sync_all().unwrap();
    let meta = again.metadata().unwrap();
    assert_eq!((meta.len(), meta.mode() & 0o7777), (3, 0o600));
    let reopened = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file))).unwrap();
    assert_eq!(reopened.metadata().unwrap().len(), 3);
    assert_eq!(fs::read_to_string(&path).unwrap(), "other");
}

fn removed_directory(dir: &Path) {
    let path = dir.join("dir");
    fs::create_dir(&path).unwrap();
    let open = File::open(&path).unwrap();
    fs::remove_dir(&path).unwrap();
    assert!(open.metadata().unwrap().is_dir());
    let create = openat(&open, "new", OFlags::CREATE | OFlags::WRONLY, Mode::from_raw_mode(0o644));
    assert_eq!(errno(create), libc::ENOENT);
    let mut listing = rustix::fs::Dir::read_from(&open).unwrap();
    assert!(listing.read().is_none_or(|entry| entry.is_err()), "a removed directory has entries");
}

fn btime(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "x").unwrap();
    let before = statx(&path);
    assert_ne!(before.stx_mask & rustix::fs::StatxFlags::BTIME.bits(), 0, "no birth time");
    std::thread::sleep(Duration::from_millis(20));
    fs::write(&path, "yy").unwrap();
    let after = statx(&path);
    let nanoseconds =
        |time: rustix::fs::StatxTimestamp| i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    assert_eq!(nanoseconds(before.stx_btime), nanoseconds(after.stx_btime));
    assert!(nanoseconds(after.stx_mtime) > nanoseconds(after.stx_btime));
    assert!(nanoseconds(after.stx_btime) > 1_600_000_000_000_000_000);
}

fn times(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "x").unwrap();
    let set = |access, modification| {
        let times = Timestamps { last_access: access, last_modification: modification };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty()).unwrap();
    };
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    for seconds in [0, 1_234_567_890, -5, 4_102_444_800] {
        set(Timespec { tv_sec: seconds, tv_nsec: 123_456_789 }, Timespec { tv_sec: seconds + 1, tv_nsec: 987_654_321 });
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.atime(), meta.atime_nsec()), (seconds, 123_456_789));
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (seconds + 1, 987_654_321));
    }
    set(omit, Timespec { tv_sec: 7, tv_nsec: 8 });
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.atime(), meta.mtime(), meta.mtime_nsec()), (4_102_444_800, 7, 8));
    let changed = (meta.ctime(), meta.ctime_nsec());
    std::thread::sleep(Duration::from_millis(20));
    File::options().write(true).open(&path).unwrap().write_all(b"y").unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert!(meta.mtime() > 7, "a write does not change mtime");
    assert!((meta.ctime(), meta.ctime_nsec()) > changed, "a write does not change ctime");
}

fn mmap_shared(dir: &Path) {
    let path = dir.join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(3 * 4096 + 100).unwrap();
    let mut one = Mapping::new(&file, 4 * 4096).unwrap();
    let other = File::options().read(true).write(true).open(&path).unwrap();
    let two = Mapping::new(&other, 4 * 4096).unwrap();
    one.write(4090, b"across pages");
    assert_eq!(two.read(4090, 12), b"across pages");
    one.sync();
    let mut bytes = [0; 12];
    file.read_exact_at(&mut bytes, 4090).unwrap();
    assert_eq!(&bytes, b"across pages");
    // A write through the file is seen in the mapping.
    file.write_all_at(b"by write", 8192).unwrap();
    assert_eq!(one.read(8192, 8), b"by write");
    // Behind the end, up to the page's end, there is nothing.
    one.write(3 * 4096 + 99, b"end, and beyond");
    one.sync();
    assert_eq!(file.metadata().unwrap().len(), 3 * 4096 + 100);
    drop((one, two, file, other));
    let bytes = fs::read(&path).unwrap();
    assert_eq!(
        (bytes.len(), &bytes[4090..4102], &bytes[8192..8200]),
        (3 * 4096 + 100, &b"across pages"[..], &b"by write"[..])
    );
    assert_eq!(bytes[3 * 4096 + 99], b'e');
}

fn mmap_after_truncate(dir: &Path) {
    let path = dir.join("file");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(&[b'x'; 8192], 0).unwrap();
    let mut map = Mapping::new(&file, 8192).unwrap();
    map.write(0, b"dirty");
    file.set_len(100).unwrap();
    file.set_len(8192).unwrap();
    assert_eq!(map.read(98, 4), b"xx\0\0");
    assert_eq!(map.read(4096, 4), [0; 4]);
    drop(map);
    let bytes = fs::read(&path).unwrap();
    assert!(bytes.starts_with(b"dirtyxxx") && bytes[100..].iter().all(|&byte| byte == 0));
}

fn append(dir: &Path) {
    let path = dir.join("file");
    let mut one = File::options().append(true).create(true).open(&path).unwrap();
    let mut two = File::options().append(true).read(true).open(&path).unwrap();
    one.write_all(b"one ").unwrap();
    two.write_all(b"two ").unwrap();
    two.seek(SeekFrom::Start(0)).unwrap();
    two.write_all(b"three ").unwrap();
    one.write_all(b"four").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "one two three four");
    // Appending can be switched on and off.
    let file = File::options().write(true).open(&path).unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::APPEND).unwrap();
    (&file).write_all(b"!").unwrap();
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).unwrap();
    file.write_all_at(b"ONE", 0).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "ONE two three four!");
    // Also where the file was opened with it.
    rustix::fs::fcntl_setfl(&two, OFlags::empty()).unwrap();
    two.write_all_at(b"TWO", 4).unwrap();
    one.write_all(b"+").unwrap();
    two.write_all_at(b"?", 18).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "ONE TWO three four?+");
    rustix::fs::fcntl_setfl(&two, OFlags::APPEND).unwrap();
    two.write_all(b"-").unwrap();
    one.write_all(b"*").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "ONE TWO three four?+-*");
}

/// Memory that O_DIRECT takes.
pub fn aligned(bytes: u8, len: usize) -> (Vec<u8>, std::ops::Range<usize>) {
    let buffer = vec![bytes; len + 4096];
    let start = buffer.as_ptr().align_offset(4096);
    (buffer, start..start + len)
}

fn direct(dir: &Path) {
    let path = dir.join("file");
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT);
    let file = match options.open(&path) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return, // The host's file system has none.
        file => file.unwrap(),
    };
    let (buffer, range) = aligned(3, 128 << 10);
    file.write_all_at(&buffer[range.clone()], 0).unwrap();
    let cached = File::options().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    cached.read_exact_at(&mut byte, 70_000).unwrap();
    assert_eq!(byte, [3]);
    cached.write_all_at(&[4; 5000], 4096).unwrap();
    let (mut buffer, range) = aligned(0, 256 << 10);
    let count = file.read_at(&mut buffer[range.clone()], 0).unwrap();
    assert_eq!(count, 128 << 10, "a read at the end is short");
    let bytes = &buffer[range];
    assert!(bytes[..4096].iter().all(|&byte| byte == 3) && bytes[4096..9096].iter().all(|&byte| byte == 4));
    assert_eq!(bytes[9096], 3);
    let (mut buffer, range) = aligned(0, 4096);
    assert_eq!(file.read_at(&mut buffer[range], 128 << 10).unwrap(), 0);
}

fn sync_flags(dir: &Path) {
    for (name, flags) in [("sync", libc::O_SYNC), ("dsync", libc::O_DSYNC), ("none", 0)] {
        let path = dir.join(name);
        let mut file = File::options().write(true).create(true).truncate(true).custom_flags(flags).open(&path).unwrap();
        file.write_all(&[1; 10_000]).unwrap();
        file.sync_data().unwrap();
        file.sync_all().unwrap();
        rustix::fs::syncfs(&file).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 10_000);
    }
    File::open(dir).unwrap().sync_all().unwrap();
}

fn hard_links(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "x").unwrap();
    for number in 0..50 {
        fs::hard_link(&path, dir.join(format!("link{number}"))).unwrap();
    }
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.nlink(), 51);
    for number in 0..50 {
        let link = dir.join(format!("link{number}"));
        assert_eq!(fs::metadata(&link).unwrap().ino(), meta.ino());
        fs::remove_file(link).unwrap();
    }
    assert_eq!(fs::metadata(&path).unwrap().nlink(), 1);
    symlink("file", dir.join("symlink")).unwrap();
    linkat(CWD, dir.join("symlink"), CWD, dir.join("of-symlink"), AtFlags::empty()).unwrap();
    assert!(fs::symlink_metadata(dir.join("of-symlink")).unwrap().is_symlink());
    assert_eq!(errno(fs::hard_link(dir, dir.join("of-dir"))), libc::EPERM);
}

fn long_link(dir: &Path) {
    let target = "t".repeat(4095);
    symlink(&target, dir.join("long")).unwrap();
    assert_eq!(fs::read_link(dir.join("long")).unwrap(), PathBuf::from(&target));
    assert_eq!(fs::symlink_metadata(dir.join("long")).unwrap().len(), 4095);
    symlink("loop", dir.join("loop")).unwrap();
    assert_eq!(errno(File::open(dir.join("loop"))), libc::ELOOP);
}

fn statfs(dir: &Path) {
    let stat = rustix::fs::statvfs(dir).unwrap();
    assert!(stat.f_blocks > 0 && stat.f_bfree <= stat.f_blocks && stat.f_bsize >= 512 && stat.f_namemax == 255);
}

fn flags_ioctl(dir: &Path) {
    use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
    let path = dir.join("file");
    fs::write(&path, "x").unwrap();
    let file = File::open(&path).unwrap();
    let before = match ioctl_getflags(&file) {
        Err(rustix::io::Errno::NOTTY | rustix::io::Errno::OPNOTSUPP) if on_tmpfs(dir) => return,
        flags => flags.unwrap(),
    };
    ioctl_setflags(&file, before | IFlags::NODUMP).unwrap();
    assert!(ioctl_getflags(&file).unwrap().contains(IFlags::NODUMP));
    ioctl_setflags(&file, before | IFlags::APPEND).unwrap();
    assert_eq!(errno(File::options().write(true).open(&path)), libc::EPERM);
    assert_eq!(errno(fs::remove_file(&path)), libc::EPERM);
    let appended = File::options().append(true).open(&path).and_then(|mut file| file.write_all(b"y"));
    ioctl_setflags(&file, before | IFlags::IMMUTABLE).unwrap();
    let removed = fs::remove_file(&path);
    // Whatever the result, the flags are cleared first: otherwise the file cannot be removed.
    ioctl_setflags(&file, before).unwrap();
    appended.unwrap();
    assert_eq!(errno(removed), libc::EPERM);
    assert_eq!(fs::read_to_string(&path).unwrap(), "xy");
    assert!(ioctl_getflags(File::open(dir).unwrap().as_fd()).is_ok(), "no flags of a directory");
}

/// Whether the file system below is tmpfs, as far as the name of the directory tells.
pub fn on_tmpfs(dir: &Path) -> bool {
    dir.to_string_lossy().contains("tmpfs")
}

fn execute(dir: &Path) {
    let path = dir.join("true");
    fs::copy("/bin/true", &path).unwrap();
    assert!(std::process::Command::new(&path).status().unwrap().success());
    let script = dir.join("script");
    fs::write(&script, "#!/bin/sh\nexit 7\n").unwrap();
    assert_eq!(errno(std::process::Command::new(&script).status()), libc::EACCES);
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(std::process::Command::new(&script).status().unwrap().code(), Some(7));
}

fn vectored(dir: &Path) {
    use std::io::{IoSlice, IoSliceMut};
    let path = dir.join("file");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let pieces: Vec<Vec<u8>> = (1..=200_u8).map(|byte| vec![byte; usize::from(byte) * 7]).collect();
    let slices: Vec<_> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
    let total: usize = pieces.iter().map(Vec::len).sum();
    assert_eq!(file.write_vectored(&slices).unwrap(), total);
    file.rewind().unwrap();
    let mut parts: Vec<Vec<u8>> = (0..100).map(|_| vec![0; total / 100 + 1]).collect();
    let mut slices: Vec<_> = parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
    assert_eq!(file.read_vectored(&mut slices).unwrap(), total);
    let mut got = parts.concat();
    got.truncate(total);
    assert!(got == pieces.concat());
}

fn open_flags(dir: &Path) {
    let path = dir.join("file");
    let open = |flags: OFlags| openat(CWD, &path, flags, Mode::from_raw_mode(0o600));
    assert_eq!(errno(open(OFlags::RDONLY)), libc::ENOENT);
    drop(open(OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY).unwrap());
    assert_eq!(errno(open(OFlags::CREATE | OFlags::EXCL)), libc::EEXIST);
    assert_eq!(errno(open(OFlags::DIRECTORY)), libc::ENOTDIR);
    fs::write(&path, "text").unwrap();
    drop(open(OFlags::TRUNC | OFlags::WRONLY).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    symlink(&path, dir.join("link")).unwrap();
    let link = openat(CWD, dir.join("link"), OFlags::NOFOLLOW, Mode::empty());
    assert_eq!(errno(link), libc::ELOOP);
    let read_only = File::from(open(OFlags::RDONLY).unwrap());
    assert_eq!(errno(read_only.write_at(b"x", 0)), libc::EBADF);
    let write_only = File::from(open(OFlags::WRONLY).unwrap());
    assert_eq!(errno(write_only.read_at(&mut [0], 0)), libc::EBADF);
    assert_eq!(errno(File::options().write(true).open(dir)), libc::EISDIR);
    let by_path = openat(CWD, &path, OFlags::PATH, Mode::empty()).unwrap();
    assert_eq!(errno(rustix::io::read(&by_path, &mut [0])), libc::EBADF);
    // Created without permissions, and still writable through the descriptor that created it.
    let closed = File::from(openat(CWD, dir.join("closed"), OFlags::CREATE | OFlags::RDWR, Mode::empty()).unwrap());
    closed.write_all_at(b"x", 0).unwrap();
}

fn ino_is_stable(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, "x").unwrap();
    let ino = fs::metadata(&path).unwrap().ino();
    for number in 0..200 {
        fs::write(dir.join(format!("other{number}")), "").unwrap();
    }
    fs::rename(&path, dir.join("renamed")).unwrap();
    let listed = fs::read_dir(dir).unwrap().map(Result::unwrap).find(|entry| entry.file_name() == "renamed").unwrap();
    assert_eq!(std::os::unix::fs::DirEntryExt::ino(&listed), ino, "the listing has another inode number");
    assert_eq!(fs::metadata(dir.join("renamed")).unwrap().ino(), ino);
}
