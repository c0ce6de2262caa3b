//! Limits: space, inodes, descriptors, memory.

use crate::common;

use common::{Share, both, name, new};
use ferry_mem::Options;
use ferry_vfs::*;

/// Writes until the file system is full; returns the number of written bytes.
fn fill(share: &Share, open: (Ino, Handle)) -> u64 {
    let mut at = 0;
    loop {
        match share.write(open, at, &[1; 65536]) {
            Ok(count) => at += count as u64,
            Err(error) => {
                assert_eq!(error, Errno::NOSPC);
                return at;
            }
        }
        assert!(at < 1 << 30, "the file system never fills up");
    }
}

#[test]
fn a_full_file_system_is_an_error_and_recovers() {
    // A child of another test holds copies of open descriptors until it execs.
    if !ferry_alone::in_own_process() {
        return;
    }
    const SIZE: u64 = 4 << 20;
    for memfds in [false, true] {
        let share = Share::new(Options { memfds, size_bytes: Some(SIZE), ..Options::default() });
        let (fs, cx) = (&share.fs, &share.cx);
        let open = share.create(Ino::ROOT, "large", 0o644);
        assert_eq!(fill(&share, open), SIZE);
        let stat = fs.statfs(cx, Ino::ROOT).unwrap();
        assert_eq!((stat.blocks, stat.bfree), (SIZE / 4096, 0));
        assert_eq!(share.attr(open.0).size, SIZE);
        // Existing data can be overwritten and read.
        assert_eq!(share.write(open, 4096, b"again"), Ok(5));
        assert_eq!(share.read(open, 4096, 6).unwrap(), b"again\x01");
        // Names do not count against the data limit.
        let empty = share.create(Ino::ROOT, "empty", 0o644);
        assert_eq!(share.write(empty, 0, b"x"), Err(Errno::NOSPC));
        let append = common::range(empty.0, empty.1, 0, 1, OFlags::RDWR | OFlags::APPEND);
        assert_eq!(share.write_at(&append, b"x"), Err(Errno::NOSPC));
        assert_eq!(fs.fallocate(cx, empty.0, empty.1, 0, 9, FallocateFlags::empty()), Err(Errno::NOSPC));
        // Half of the space is freed: by a hole, by truncation, by unlink.
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fs.fallocate(cx, open.0, open.1, 0, SIZE / 2, punch).unwrap();
        assert_eq!(fill(&share, empty), SIZE / 2);
        let shorter = SetAttr { size: Some(SIZE / 4), ..SetAttr::default() };
        fs.setattr(cx, empty.0, None, &shorter).unwrap();
        assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().bfree, SIZE / 4 / 4096);
        fs.unlink(cx, Ino::ROOT, name("large")).unwrap();
        assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().bfree, SIZE / 4 / 4096, "it is still open");
        share.release(open);
        share.release(empty);
        assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().bfree, SIZE / 4 * 3 / 4096);
        let again = share.create(Ino::ROOT, "again", 0o644);
        assert_eq!(fill(&share, again), SIZE / 4 * 3);
    }
}

/// A page that is taken away, even for a moment, may be gone for a window that has it mapped.
#[test]
fn zeroing_takes_no_page_away() {
    const PAGE: usize = 4096;
    for memfds in [false, true] {
        let share = Share::new(Options { memfds, size_bytes: Some(16 * PAGE as u64), ..Options::default() });
        let (open, other) = (share.create(Ino::ROOT, "file", 0o644), share.create(Ino::ROOT, "other", 0o644));
        share.write(open, 0, &[7; 4 * PAGE]).unwrap();
        fill(&share, other);
        let zero = |offset, pages, flags| {
            share.fs.fallocate(
                &share.cx,
                open.0,
                open.1,
                offset,
                (pages * PAGE) as u64,
                FallocateFlags::ZERO_RANGE | flags,
            )
        };
        assert_eq!(zero(0, 8, FallocateFlags::empty()), Err(Errno::NOSPC));
        assert_eq!(share.attr(open.0).blocks, 4 * 8);
        assert!(share.read(open, 0, 4 * PAGE).unwrap() == [7; 4 * PAGE]);
        zero(100, 2, FallocateFlags::KEEP_SIZE).unwrap();
        let mut expected = [7; 4 * PAGE];
        expected[100..100 + 2 * PAGE].fill(0);
        assert!(share.read(open, 0, 4 * PAGE).unwrap() == expected);
        assert_eq!(share.attr(open.0).blocks, 4 * 8);
    }
}

/// A write after the end of its request would evade the limit if the file is truncated meanwhile.
#[test]
fn a_memfd_is_written_before_its_request_ends() {
    const SIZE: u64 = 1 << 20;
    let share = Share::new(Options { memfds: true, size_bytes: Some(SIZE), ..Options::default() });
    let (fs, cx, bytes) = (&share.fs, &share.cx, [7; 1 << 19]);
    let open = share.create(Ino::ROOT, "f", 0o644);
    let request = common::range(open.0, open.1, 0, bytes.len(), OFlags::RDWR);
    let written = fs.write(cx, &request, &mut &bytes[..]).unwrap();
    assert!(matches!(written, Data::Bytes(count) if count == bytes.len()));
    assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().bfree, SIZE / 2 / 4096);
    // A part of it fits.
    assert_eq!(share.write(open, SIZE / 4 * 3, &bytes), Ok(bytes.len()), "a hole takes nothing");
    assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().bfree, 0);
    assert_eq!(share.write(open, SIZE / 4, &bytes), Ok(bytes.len() / 2), "up to the hole");
    assert_eq!(share.read(open, SIZE / 4, 1).unwrap(), [7]);
}

#[test]
fn inodes_are_limited_and_can_be_freed() {
    let share = Share::new(Options { inodes_max: Some(10), ..Options::default() });
    let (fs, cx) = (&share.fs, &share.cx);
    for index in 0..9 {
        share.file(Ino::ROOT, &index.to_string(), b"");
    }
    assert_eq!(fs.mkdir(cx, Ino::ROOT, name("one too many"), &new(0o755)), Err(Errno::NOSPC));
    let whiteout = fs.rename(cx, (Ino::ROOT, name("0")), (Ino::ROOT, name("x")), RenameFlags::WHITEOUT);
    assert_eq!(whiteout, Err(Errno::NOSPC));
    assert_eq!(fs.statfs(cx, Ino::ROOT).unwrap().ffree, 0);
    fs.unlink(cx, Ino::ROOT, name("0")).unwrap();
    share.mkdir(Ino::ROOT, "fits");
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn descriptors_are_for_open_files_only() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = both().remove(0);
    if !share.fs.features().backing {
        ferry_skip::skip!("without a private tmpfs each file has a descriptor");
        return;
    }
    let before = descriptors();
    for index in 0..2000 {
        share.file(Ino::ROOT, &index.to_string(), b"bytes");
    }
    let open: Vec<_> = (0..100)
        .map(|index| {
            let ino = share.ino(&index.to_string());
            (ino, share.fs.open(&share.cx, ino, OFlags::RDONLY).unwrap())
        })
        .collect();
    // Other tests open files of their own at the same time.
    assert!(descriptors() < before + 400, "{} now, {before} before", descriptors());
    for open in open {
        assert_eq!(share.read(open, 0, 9).unwrap(), b"bytes");
        share.release(open);
    }
}

#[test]
#[ignore = "long and large: make test-all"]
fn a_million_files() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const COUNT: u64 = 1_000_000;
    let share = Share::new(Options { inodes_max: Some(2 * COUNT), ..Options::default() });
    let before = resident_bytes();
    let start = std::time::Instant::now();
    for index in 0..COUNT {
        let open = share.create(Ino::ROOT, &format!("file{index:07}"), 0o644);
        share.release(open);
    }
    let made = start.elapsed();
    let per_inode = (resident_bytes() - before) / COUNT;
    println!("{COUNT} files in one directory: {per_inode} bytes each, {:.2} s to make", made.as_secs_f64());
    assert!(per_inode < 1024);
    let start = std::time::Instant::now();
    for index in 0..COUNT {
        share.ino(&format!("file{index:07}"));
    }
    println!("lookup and forget: {:.2} s", start.elapsed().as_secs_f64());
    let start = std::time::Instant::now();
    for index in 0..COUNT {
        share.fs.unlink(&share.cx, Ino::ROOT, name(&format!("file{index:07}"))).unwrap();
    }
    println!("unlink: {:.2} s", start.elapsed().as_secs_f64());
    assert_eq!(share.fs.usage().inodes, 1);
}
