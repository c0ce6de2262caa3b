//! Images on real files: writes persist until the next mount, and errors are sentences.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test fails by panicking")]

use crate::pmem_common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferry_mem::pmem::{OpenError, Options, PMem, Severity, fsck, open};
use ferry_vfs::{CreateArgs, Data, Errno, FallocateFlags, FileSystem, Ino, OFlags, Seek, SetAttr, Timespec};
use pmem_common::{Random, at, close, cx, get, get_all, name, put, walk};

const IMAGE_BYTES: u64 = 8 << 20;
/// What the image does on its own every 20 ms it has done by then, also on a busy machine.
const SOON: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(20);

fn sized() -> Options {
    Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() }
}

fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    (dir, path)
}

fn sentence(path: &Path, options: &Options) -> String {
    let error: chain::Chain = open(path, options).map(drop).unwrap_err().into();
    error.0
}

/// An error with its sources, as a program would print it.
mod chain {
    pub struct Chain(pub String);

    impl<E: std::error::Error> From<E> for Chain {
        fn from(error: E) -> Self {
            let mut text = error.to_string();
            let mut source = error.source();
            while let Some(next) = source {
                text = format!("{text}: {next}");
                source = next.source();
            }
            Self(text)
        }
    }
}

fn write(fs: &PMem, ino: Ino, handle: ferry_vfs::Handle, offset: u64, mut bytes: &[u8]) {
    let range = at(ino, handle, offset, bytes.len());
    assert_eq!(fs.write(&cx(), &range, &mut bytes).unwrap().bytes(), Some(range.len as usize));
}

#[test]
fn everything_persists_until_the_next_mount() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 5000, &[1; 100_000]).unwrap();
    fs.setxattr(&cx(), ino, b"user.x", b"value", ferry_vfs::XattrFlags::empty(), false).unwrap();
    close(&fs, ino, handle);
    fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &CreateArgs { mode: 0o700, ..CreateArgs::default() }).unwrap();
    fs.symlink(&cx(), Ino::ROOT, name(b"link"), b"target").unwrap();
    let before = walk(&fs);
    assert_eq!(before.len(), 3);
    drop(fs);
    for read_only in [false, true, false] {
        let fs = open(&path, &Options { read_only, ..Options::default() }).unwrap();
        assert_eq!(walk(&fs), before, "read only: {read_only}");
        assert_eq!(fs.unlink(&cx(), Ino::ROOT, name(b"none")), Err(if read_only { Errno::ROFS } else { Errno::NOENT }));
    }
    let report = fsck(&path, None, false).unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.inodes, 4);
}

#[test]
fn bytes_agree_with_a_plain_array() {
    for seed in 1..=3 {
        let (_dir, path) = image();
        let fs = open(&path, &sized()).unwrap();
        let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, b"").unwrap();
        let mut random = Random::new(seed);
        let mut model: Vec<u8> = Vec::new();
        for step in 0..600u32 {
            let (offset, len) = (random.below(300_000) as usize, 1 + random.below(40_000) as usize);
            let end = offset + len;
            match random.below(8) {
                0..=2 => {
                    let bytes = vec![step as u8; len];
                    write(&fs, ino, handle, offset as u64, &bytes);
                    model.resize(model.len().max(end), 0);
                    model[offset..end].copy_from_slice(&bytes);
                }
                3 => {
                    let set = SetAttr { size: Some(offset as u64), ..SetAttr::default() };
                    fs.setattr(&cx(), ino, Some(handle), &set).unwrap();
                    model.resize(offset, 0);
                }
                what @ 4..=6 => {
                    let flags = match what {
                        4 => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                        5 => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                        _ => FallocateFlags::empty(),
                    };
                    fs.fallocate(&cx(), ino, handle, offset as u64, len as u64, flags).unwrap();
                    if what == 6 {
                        model.resize(model.len().max(end), 0);
                    } else if offset < model.len() {
                        let end = end.min(model.len());
                        model[offset..end].fill(0);
                    }
                }
                _ => drop(fs.fsync(&cx(), ino, handle, random.below(2) == 0).unwrap()),
            }
            let (from, len) = (random.below(300_000) as usize, random.below(100_000) as usize);
            let expected = &model[from.min(model.len())..(from + len).min(model.len())];
            assert!(get(&fs, ino, handle, from as u64, len) == expected, "seed {seed}, step {step}");
        }
        assert_eq!(fs.getattr(&cx(), ino, Some(handle)).unwrap().size, model.len() as u64);
        close(&fs, ino, handle);
        drop(fs);
        let fs = open(&path, &Options::default()).unwrap();
        assert!(get_all(&fs, Ino::ROOT, b"file") == model, "seed {seed}, after the next mount");
    }
}

#[test]
fn holes_and_data_are_found() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 8192, &[1; 4096]).unwrap();
    fs.fallocate(&cx(), ino, handle, 0, 4096, FallocateFlags::KEEP_SIZE).unwrap();
    write(&fs, ino, handle, 20_000, &[2; 10]);
    let seek = |offset, what| fs.lseek(&cx(), ino, handle, offset, what);
    for (offset, data, hole) in [(0, 8192, 0), (8192, 8192, 12_288), (9000, 9000, 12_288), (13_000, 16_384, 13_000)] {
        assert_eq!((seek(offset, Seek::Data), seek(offset, Seek::Hole)), (Ok(data), Ok(hole)), "{offset}");
    }
    assert_eq!((seek(20_005, Seek::Data), seek(20_005, Seek::Hole)), (Ok(20_005), Ok(20_010)));
    assert_eq!((seek(20_010, Seek::Data), seek(20_010, Seek::Hole)), (Err(Errno::NXIO), Err(Errno::NXIO)));
    close(&fs, ino, handle);
}

#[test]
fn a_full_image_is_an_error_and_recovers() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let free = fs.statfs(&cx(), Ino::ROOT).unwrap().bfree;
    for round in 0..3 {
        let mut written = 0;
        for index in 0.. {
            let file = format!("{index}");
            match put(&fs, Ino::ROOT, file.as_bytes(), 0, &[round; 200_000]) {
                Ok((ino, handle)) => {
                    close(&fs, ino, handle);
                    written += 1;
                }
                Err(error) => {
                    assert_eq!(error, Errno::NOSPC);
                    break;
                }
            }
        }
        assert!(
            written * 49 <= free && (written + 2) * 49 > free,
            "round {round}: {written} files of 49 blocks in {free}"
        );
        assert_eq!(get_all(&fs, Ino::ROOT, b"0"), vec![round; 200_000]);
        for index in 0..=written {
            fs.unlink(&cx(), Ino::ROOT, name(format!("{index}").as_bytes())).unwrap();
        }
        assert_eq!(fs.statfs(&cx(), Ino::ROOT).unwrap().bfree, free, "round {round}");
    }
}

#[test]
fn a_write_takes_the_room_that_is_left() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let free = || fs.statfs(&cx(), Ino::ROOT).unwrap().bfree * 4096;
    let bytes: Vec<u8> = (0..(1u32 << 20) - 1).map(|at| (at / 7) as u8).collect();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, b"").unwrap();
    let write = |offset, flags| {
        let range = ferry_vfs::IoRange { flags, ..at(ino, handle, offset, bytes.len()) };
        fs.write(&cx(), &range, &mut &bytes[..]).map(|data| data.bytes().unwrap())
    };
    let all = free();
    let mut size = 0;
    while free() > 0 {
        let count = write(size, OFlags::RDWR).unwrap();
        assert!(count == bytes.len() || count > 0 && free() == 0, "{count}");
        assert!(get(&fs, ino, handle, size, count) == bytes[..count]);
        size += count as u64;
    }
    assert_eq!((size, fs.getattr(&cx(), ino, Some(handle)).unwrap().size), (all, all));
    assert_eq!(write(size, OFlags::RDWR), Err(Errno::NOSPC));
    assert_eq!(write(size - 5000, OFlags::RDWR), Ok(5000), "what lies before the end needs no room");
    // Appended records are not torn.
    let shorter = SetAttr { size: Some(size - 8192), ..SetAttr::default() };
    fs.setattr(&cx(), ino, Some(handle), &shorter).unwrap();
    assert_eq!(write(0, OFlags::RDWR | OFlags::APPEND), Err(Errno::NOSPC));
    assert_eq!(write(size - 8192, OFlags::RDWR), Ok(8192));
    close(&fs, ino, handle);
    drop(fs);
    assert!(fsck(&path, None, false).unwrap().is_clean());
}

#[test]
fn all_of_a_fragmented_image_can_be_reserved() {
    let (_dir, path) = image();
    let fs = open(&path, &Options { size_bytes: Some(300 << 20), ..Options::default() }).unwrap();
    let free = || fs.statfs(&cx(), Ino::ROOT).unwrap().bfree;
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, b"").unwrap();
    let fallocate =
        |ino, handle, block, count, flags| fs.fallocate(&cx(), ino, handle, block * 4096, count * 4096, flags);
    let all = free();
    fallocate(ino, handle, 0, all, FallocateFlags::empty()).unwrap();
    for block in 0..all / 2 {
        fallocate(ino, handle, 2 * block, 1, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE).unwrap();
    }
    close(&fs, ino, handle);
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    let left = free();
    assert!(left > 33_000, "more than one record takes: {left}");
    let (ino, handle) = put(&fs, Ino::ROOT, b"other", 0, b"").unwrap();
    fallocate(ino, handle, 0, left, FallocateFlags::empty()).unwrap();
    close(&fs, ino, handle);
    assert_eq!(free(), 0);
    drop(fs);
    let report = fsck(&path, None, false).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let fs = open(&path, &Options::default()).unwrap();
    let entry = fs.lookup(&cx(), Ino::ROOT, name(b"other")).unwrap();
    assert_eq!((entry.attr.size, entry.attr.blocks), (left * 4096, left * 8));
}

#[test]
fn a_file_that_was_empty_at_mount_keeps_writes() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let free = fs.statfs(&cx(), Ino::ROOT).unwrap().bfree;
    let (ino, handle) = put(&fs, Ino::ROOT, b"log", 0, b"").unwrap();
    close(&fs, ino, handle);
    drop(fs);
    let fs = open(&path, &Options::default()).unwrap();
    let ino = fs.lookup(&cx(), Ino::ROOT, name(b"log")).unwrap().ino;
    let open = |flags| fs.open(&cx(), ino, flags).unwrap();
    let handle = open(OFlags::RDWR);
    fs.flush(&cx(), ino, handle, 0).unwrap();
    write(&fs, ino, handle, 0, b"hello world");
    fs.release(&cx(), ino, handle);
    let handle = open(OFlags::RDWR);
    assert_eq!(get(&fs, ino, handle, 0, 11), b"hello world");
    fs.release(&cx(), ino, handle);
    let handle = open(OFlags::RDWR | OFlags::TRUNC);
    write(&fs, ino, handle, 0, b"x");
    assert_eq!(get(&fs, ino, handle, 0, 11), b"x");
    fs.release(&cx(), ino, handle);
    fs.unlink(&cx(), Ino::ROOT, name(b"log")).unwrap();
    fs.forget(ino, 1);
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    assert_eq!(fs.statfs(&cx(), Ino::ROOT).unwrap().bfree, free);
}

#[test]
fn reads_move_the_access_time() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 5000]).unwrap();
    let old = Timespec { sec: 20, nsec: 0 };
    let set = SetAttr { atime: Some(ferry_vfs::SetTime::At(old)), ..SetAttr::default() };
    assert_eq!(fs.setattr(&cx(), ino, None, &set).unwrap().atime, old);
    assert_eq!(get(&fs, ino, handle, 0, 10), [1; 10]);
    assert!(fs.getattr(&cx(), ino, None).unwrap().atime > old);
}

#[test]
fn full_metadata_is_an_error_and_recovers() {
    let (_dir, path) = image();
    let fs = open(&path, &Options { size_bytes: Some(8 * IMAGE_BYTES), ..Options::default() }).unwrap();
    let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
    let mut made = 0;
    while let Ok(entry) = fs.mkdir(&cx(), Ino::ROOT, name(format!("{made:0200}").as_bytes()), &new) {
        fs.forget(entry.ino, 1);
        made += 1;
    }
    assert_eq!(fs.mkdir(&cx(), Ino::ROOT, name(b"x"), &new).unwrap_err(), Errno::NOSPC);
    assert!(made > 2000, "{made}");
    // A small part of them.
    let removed = made / 25;
    let remove = |fs: &PMem, index: usize| {
        fs.rmdir(&cx(), Ino::ROOT, name(format!("{index:0200}").as_bytes())).unwrap();
    };
    (0..removed).for_each(|index| remove(&fs, index));
    fs.forget(fs.mkdir(&cx(), Ino::ROOT, name(b"x"), &new).expect("there is room again").ino, 1);
    fs.rmdir(&cx(), Ino::ROOT, name(b"x")).unwrap();
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    drop(fs);
    let fs = open(&path, &Options::default()).unwrap();
    assert_eq!(walk(&fs).len(), made - removed);
    (removed..made).for_each(|index| remove(&fs, index));
    assert!(fs.mkdir(&cx(), Ino::ROOT, name(b"x"), &new).is_ok());
    drop(fs);
    assert!(fsck(&path, None, false).unwrap().is_clean());
}

#[test]
fn empty_files_that_grow_do_not_fill_the_metadata_to_its_end() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let mut files = Vec::new();
    while let Ok((ino, handle)) = put(&fs, Ino::ROOT, format!("{:06}", files.len()).as_bytes(), 0, b"") {
        fs.release(&cx(), ino, handle);
        files.push(ino);
    }
    let set = SetAttr { size: Some(1), ..SetAttr::default() };
    for ino in &files {
        let _ = fs.setattr(&cx(), *ino, None, &set);
        fs.forget(*ino, 1);
    }
    for index in 0..files.len() {
        assert_eq!(fs.unlink(&cx(), Ino::ROOT, name(format!("{index:06}").as_bytes())), Ok(()), "{index}");
    }
}

#[test]
fn an_extent_keeps_its_bytes_until_it_is_released() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &vec![7; 1 << 20]).unwrap();
    let mut out = Vec::new();
    let Data::Extent(extent) = fs.read(&cx(), &at(ino, handle, 0, 1 << 20), &mut out).unwrap() else {
        panic!("a long contiguous read is an extent");
    };
    fs.setattr(&cx(), ino, Some(handle), &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    // All that is free is written.
    let mut index = 0;
    while let Ok((ino, handle)) = put(&fs, Ino::ROOT, format!("{index}").as_bytes(), 0, &[9; 100_000]) {
        close(&fs, ino, handle);
        index += 1;
    }
    let mut bytes = vec![0; 1 << 20];
    assert_eq!(rustix::io::pread(&*extent.file, &mut bytes, extent.offset), Ok(1 << 20));
    assert!(bytes.iter().all(|byte| *byte == 7), "blocks were used again while a reader had them");
    drop(extent);
    let room = put(&fs, Ino::ROOT, b"more", 0, &[9; 500_000]);
    assert!(room.is_ok(), "and are free after that: {room:?}");
}

#[test]
fn an_unlinked_open_file_is_removed_at_the_next_mount() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let free = fs.statfs(&cx(), Ino::ROOT).unwrap().bfree;
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 100_000]).unwrap();
    fs.unlink(&cx(), Ino::ROOT, name(b"file")).unwrap();
    assert_eq!(get(&fs, ino, handle, 0, 10), [1; 10]);
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    drop(fs);
    let fs = open(&path, &Options::default()).unwrap();
    assert_eq!((walk(&fs).len(), fs.statfs(&cx(), Ino::ROOT).unwrap().bfree), (0, free));
}

/// Without a size nothing is made, and what to do is said; a size that cannot be leaves nothing behind.
#[test]
fn a_new_image_needs_a_size_and_a_mistake_leaves_no_file() {
    let (_dir, path) = image();
    let (none, tier2) = (Options::default(), path.with_extension("tier2"));
    let text = sentence(&path, &none);
    assert!(text.contains("there is no") && text.contains("--size 8G"), "{text}");
    for bytes in [1000, u64::MAX / 2] {
        sentence(&path, &Options { size_bytes: Some(bytes), ..Options::default() });
        assert!(!path.exists(), "{bytes}");
    }
    let text = sentence(&path, &Options { tier2: Some(tier2.clone()), ..sized() });
    assert!(text.contains("--tier2-size 8G") && !tier2.exists() && !path.exists(), "{text}");
    let empty = path.with_extension("empty");
    std::fs::write(&empty, b"").unwrap();
    let text = sentence(&empty, &none);
    assert!(text.contains("is empty") && text.contains("--size 8G"), "{text}");
    // It was there before.
    sentence(&empty, &Options { size_bytes: Some(1000), ..Options::default() });
    assert!(empty.exists());
}

#[test]
fn each_invalid_image_has_its_error() {
    let (dir, path) = image();
    assert!(sentence(&path, &Options { read_only: true, ..Options::default() }).contains("No such file"));
    std::fs::write(&path, b"").unwrap();
    std::fs::write(&path, vec![b'x'; 2 << 20]).unwrap();
    assert!(sentence(&path, &sized()).contains("holds something else"));
    assert_eq!(std::fs::read(&path).unwrap(), vec![b'x'; 2 << 20], "and is left alone");
    std::fs::remove_file(&path).unwrap();
    let tiny = Options { size_bytes: Some(1000), ..Options::default() };
    assert!(sentence(&path, &tiny).contains("too few"));
    assert!(sentence(dir.path(), &Options { read_only: true, ..Options::default() }).contains("neither a file nor"));

    let fs = open(&path, &sized()).unwrap();
    assert!(matches!(open(&path, &Options::default()), Err(OpenError::Busy { .. })));
    assert!(matches!(fsck(&path, None, false), Err(OpenError::Busy { .. })));
    drop(fs);
    let whole = std::fs::read(&path).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(IMAGE_BYTES / 2).unwrap();
    assert!(sentence(&path, &Options::default()).contains("cut short"));

    let mut version = whole.clone();
    for at in [0, 4096] {
        version[at + 8] = 9;
        let sum = crc32c::crc32c(&version[at..at + 92]);
        version[at + 92..at + 96].copy_from_slice(&sum.to_le_bytes());
    }
    std::fs::write(&path, &version).unwrap();
    assert!(sentence(&path, &Options::default()).contains("version 9"));
    let mut both = whole;
    both[20] ^= 1;
    both[4096 + 20] ^= 1;
    std::fs::write(&path, &both).unwrap();
    assert!(sentence(&path, &Options::default()).contains("both superblocks are damaged"));
}

#[test]
fn fsck_reports_and_repairs() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 100_000]).unwrap();
    close(&fs, ino, handle);
    let before = walk(&fs);
    drop(fs);
    // One superblock: nothing is lost.
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(b"broken", 16).unwrap();
    let report = fsck(&path, None, false).unwrap();
    assert_eq!((report.is_clean(), report.findings[0].severity), (false, Severity::Warning), "{report:?}");
    assert!(fsck(&path, None, true).unwrap().repaired);
    assert!(fsck(&path, None, false).unwrap().is_clean());
    assert_eq!(walk(&open(&path, &Options::default()).unwrap()), before);
    // The snapshot: no mount, and a repair that falls back on the one before.
    let superblock = ferry_mem::pmem::format::Superblock::decode(&std::fs::read(&path).unwrap()).unwrap();
    file.write_all_at(&[0xff; 64], superblock.layout.log_offset(superblock.generation)).unwrap();
    assert!(sentence(&path, &Options::default()).contains("`ferry fsck`"));
    let report = fsck(&path, None, true).unwrap();
    assert!(report.repaired && !report.is_clean(), "{report:?}");
    assert!(fsck(&path, None, false).unwrap().is_clean());
    assert_eq!(walk(&open(&path, &Options::default()).unwrap()), before, "the log before it had all of this");
}

#[test]
fn a_second_tier_takes_the_overflow_of_the_first() {
    let (dir, path) = image();
    let tier2 = dir.path().join("tier2");
    let options = Options { tier2: Some(tier2.clone()), tier2_bytes: Some(32 << 20), ..sized() };
    let fs = open(&path, &options).unwrap();
    let total = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks * 4096;
    assert!(total > 36 << 20, "{total}");
    let bytes = |index: usize| -> Vec<u8> { (0..1 << 20).map(|at| (at / 7 + index * 31) as u8).collect() };
    for index in 0..30 {
        let (ino, handle) = put(&fs, Ino::ROOT, format!("{index}").as_bytes(), 0, &bytes(index)).unwrap();
        close(&fs, ino, handle);
    }
    let check = |fs: &PMem| {
        for index in 0..30 {
            assert!(get_all(fs, Ino::ROOT, format!("{index}").as_bytes()) == bytes(index), "file {index}");
        }
    };
    check(&fs);
    // Cold data go, and what was read there comes back.
    assert!(fs.store().move_to_tier2(256).unwrap() > 0);
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    check(&fs);
    assert!(fs.store().bring_back(64).unwrap() > 0);
    check(&fs);
    // A part of a cold file is overwritten: the rest of its block comes along.
    let entry = fs.lookup(&cx(), Ino::ROOT, name(b"0")).unwrap();
    let handle = fs.open(&cx(), entry.ino, OFlags::RDWR).unwrap();
    write(&fs, entry.ino, handle, 5000, b"hello");
    let mut expected = bytes(0);
    expected[5000..5005].copy_from_slice(b"hello");
    assert!(get(&fs, entry.ino, handle, 0, 1 << 20) == expected);
    write(&fs, entry.ino, handle, 5000, &bytes(0)[5000..5005]);
    close(&fs, entry.ino, handle);
    drop(fs);
    assert!(fsck(&path, Some(&tier2), false).unwrap().is_clean());
    assert!(sentence(&path, &Options::default()).contains("tier2=FILE"));
    let fs = open(&path, &options).unwrap();
    check(&fs);
    drop(fs);
    std::fs::write(&tier2, vec![0; 33 << 20]).unwrap();
    assert!(sentence(&path, &options).contains("not a second tier"));
}

/// Returns the image as a power failure would leave it now, without a sync or a close.
fn after_a_cut(path: &Path) -> pmem_common::World {
    let copy = path.with_extension("copy");
    // Two equal reads in a row are a consistent copy.
    let mut bytes = Vec::new();
    while bytes.is_empty() || std::fs::read(path).unwrap() != bytes {
        bytes = std::fs::read(path).unwrap();
    }
    std::fs::write(&copy, bytes).unwrap();
    walk(&open(&copy, &Options { read_only: true, ..Options::default() }).unwrap())
}

/// Waits for what happens on its own.
#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "not in {SOON:?}: {what}");
        std::thread::sleep(TICK);
    }
}

#[test]
fn unsynced_changes_are_committed_periodically() {
    let (_dir, path) = image();
    let make = |fs: &PMem| {
        let (ino, handle) = put(fs, Ino::ROOT, b"file", 5000, &[1; 100_000]).unwrap();
        close(fs, ino, handle);
        fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &CreateArgs { mode: 0o700, ..CreateArgs::default() }).unwrap();
        walk(fs)
    };
    // Nobody is told to: so it is not the making itself that commits.
    let fs = open(&path, &Options { commit: Some(Duration::ZERO), ..sized() }).unwrap();
    assert_eq!(make(&fs).len(), 2);
    std::thread::sleep(10 * TICK);
    assert!(after_a_cut(&path).is_empty(), "it is there without a commit");
    drop(fs);
    std::fs::remove_file(&path).unwrap();
    let fs = open(&path, &Options { commit: Some(TICK), ..sized() }).unwrap();
    let made = make(&fs);
    wait_until("a commit", || after_a_cut(&path) == made);
    drop(fs);
}

/// The inode number of the host's file that an open file's first bytes are in.
fn place_of(fs: &PMem, ino: Ino, handle: ferry_vfs::Handle) -> u64 {
    match fs.read(&cx(), &at(ino, handle, 0, 64 << 10), &mut Vec::new()).unwrap() {
        Data::Extent(extent) => rustix::fs::fstat(&*extent.file).unwrap().st_ino,
        Data::Bytes(_) => panic!("a long contiguous read is an extent"),
    }
}

#[test]
fn data_move_between_the_tiers_automatically() {
    const BLOCK: usize = 4096;
    const FILE_BLOCKS: u64 = 256;
    let (dir, path) = image();
    let tier2 = dir.path().join("tier2");
    let bytes = 64 << 20;
    let options = Options {
        size_bytes: Some(bytes),
        tier2: Some(tier2.clone()),
        tier2_bytes: Some(bytes),
        commit: Some(TICK),
        ..Options::default()
    };
    let fs = open(&path, &options).unwrap();
    let first = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks - (bytes / BLOCK as u64 - 1);
    let percent = |blocks: u64| blocks * 100 / first;
    // Each file is full of its own number, which is not zero: so what is in the second tier's file is seen from outside.
    let file = |number: u64| (format!("{number}"), vec![number as u8; FILE_BLOCKS as usize * BLOCK]);
    let moved = || {
        let mut blocks = std::collections::BTreeMap::new();
        for block in std::fs::read(&tier2).unwrap().chunks(BLOCK).skip(1).filter(|block| block[0] != 0) {
            *blocks.entry(u64::from(block[0])).or_insert(0) += 1;
        }
        blocks
    };
    let moved_blocks = || moved().values().sum::<u64>();
    let fill = |from: u64, up_to: u64| -> u64 {
        (from..).take_while(|number| percent(number * FILE_BLOCKS) < up_to).fold(from, |_, number| {
            let (name, bytes) = file(number);
            let (ino, handle) = put(&fs, Ino::ROOT, name.as_bytes(), 0, &bytes).unwrap();
            close(&fs, ino, handle);
            number + 1
        })
    };
    // There is room: all stays where it is.
    let some = fill(1, 70);
    std::thread::sleep(10 * TICK);
    assert_eq!(moved_blocks(), 0, "with {} %", percent((some - 1) * FILE_BLOCKS));
    // Nearly full: as much goes as makes it less than that, and not all.
    let end = fill(some, 90);
    let used = || percent((end - 1) * FILE_BLOCKS - moved_blocks());
    wait_until("cold data go", || used() <= 80);
    std::thread::sleep(10 * TICK);
    assert!(used() > 60, "{} % are left", used());
    // What is used again stays there while it is as full as that, and comes back when there is room.
    let went = moved();
    let (&number, _) = went.iter().find(|(_, blocks)| **blocks == FILE_BLOCKS).expect("whole files go");
    let entry = fs.lookup(&cx(), Ino::ROOT, name(file(number).0.as_bytes())).unwrap();
    let handle = fs.open(&cx(), entry.ino, OFlags::RDONLY).unwrap();
    let [image, cold] = [&path, &tier2].map(|path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap()));
    assert_eq!(place_of(&fs, entry.ino, handle), cold);
    std::thread::sleep(10 * TICK);
    assert_eq!(place_of(&fs, entry.ino, handle), cold, "it came back with {} %", used());
    let stayed: Vec<u64> = (1..end).filter(|number| !went.contains_key(number)).collect();
    let gone = &stayed[..stayed.len() / 2];
    for number in gone {
        fs.unlink(&cx(), Ino::ROOT, name(file(*number).0.as_bytes())).unwrap();
    }
    wait_until("used data come back", || place_of(&fs, entry.ino, handle) == image);
    close(&fs, entry.ino, handle);
    for number in (1..end).filter(|number| !gone.contains(number)) {
        let (name, bytes) = file(number);
        assert!(get_all(&fs, Ino::ROOT, name.as_bytes()) == bytes, "file {number}");
    }
    drop(fs);
    assert!(fsck(&path, Some(&tier2), false).unwrap().is_clean());
}

/// Where an open file's first bytes lie in the image.
fn offset_of(fs: &PMem, ino: Ino, handle: ferry_vfs::Handle) -> u64 {
    match fs.read(&cx(), &at(ino, handle, 0, 64 << 10), &mut Vec::new()).unwrap() {
        Data::Extent(extent) => extent.offset,
        Data::Bytes(_) => panic!("a long contiguous read is an extent"),
    }
}

#[test]
fn writers_on_different_cpus_write_to_different_parts() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    let may_run_on = rustix::thread::sched_getaffinity(None).unwrap();
    if cpus < 2 || !(0..cpus).all(|cpu| may_run_on.is_set(cpu)) {
        return ferry_skip::skip!("needs two CPUs");
    }
    let (_dir, path) = image();
    let fs = open(&path, &Options { size_bytes: Some(cpus as u64 * (32 << 20)), ..Options::default() }).unwrap();
    let part = fs.statfs(&cx(), Ino::ROOT).unwrap().blocks * 4096 / cpus as u64;
    let place_of = |cpu: usize, file: &str| {
        let write = || {
            let mut here = rustix::thread::CpuSet::new();
            here.set(cpu);
            rustix::thread::sched_setaffinity(None, &here).unwrap();
            let (ino, handle) = put(&fs, Ino::ROOT, file.as_bytes(), 0, &[1; 128 << 10]).unwrap();
            let offset = offset_of(&fs, ino, handle);
            close(&fs, ino, handle);
            offset
        };
        std::thread::scope(|scope| scope.spawn(write).join().unwrap())
    };
    let [first, second, third] = [(0, "a"), (1, "b"), (0, "c")].map(|(cpu, file)| place_of(cpu, file));
    assert!(second.abs_diff(first) >= part * 9 / 10, "both are in one part: {first}, {second}, parts of {part}");
    assert!(third.abs_diff(first) < part / 10, "not in one part: {first}, {third}, parts of {part}");
}

/// As xfstests' generic/423 wants it.
#[test]
fn times_never_precede_earlier_changes_or_clock_readings() {
    let (_dir, path) = image();
    let fs = open(&path, &sized()).unwrap();
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    for round in 0..200 {
        let before = Timespec::now();
        let file = format!("file{round}");
        let (entry, handle) = fs.create(&cx(), Ino::ROOT, name(file.as_bytes()), &new, OFlags::RDWR).unwrap();
        let ino = entry.ino;
        // Each of them moves the time.
        for number in 0..20 {
            write(&fs, ino, handle, number * 1024, &[1; 1024]);
        }
        let file = fs.getattr(&cx(), ino, None).unwrap();
        let link = format!("link{round}");
        let link = fs.symlink(&cx(), Ino::ROOT, name(link.as_bytes()), b"nowhere").unwrap().attr;
        let dir = fs.getattr(&cx(), Ino::ROOT, None).unwrap();
        let (file_btime, link_btime) = (file.btime.unwrap(), link.btime.unwrap());
        let order = [before, file_btime, file.mtime, link_btime, dir.mtime, Timespec::now()];
        assert!(order.is_sorted(), "{round}: {order:?}");
        assert!(file.mtime <= file.ctime && link.mtime == link_btime);
        close(&fs, ino, handle);
    }
}
