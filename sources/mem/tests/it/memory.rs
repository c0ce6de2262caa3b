//! Files with data transferred in memory: the same results as through the descriptor, and never a signal.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Share, range, read_from, write_to};
use ferry_engine::{Operation, copy_mapped};
use ferry_mem::Options;
use ferry_vfs::*;

const PAGE: usize = 4096;
const KEEP: FallocateFlags = FallocateFlags::KEEP_SIZE;
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(KEEP);
/// More transfers than a file has before it is mapped.
const TRANSFERS: usize = 20;

type Open = (Ino, Handle);

/// Creates a share with this number of pages; `None`: this user may not mount a tmpfs.
fn share(pages: u64) -> Option<Share> {
    let share = Share::new(Options { size_bytes: Some(pages * PAGE as u64), ..Options::default() });
    if !share.fs.features().backing {
        ferry_skip::skip!("this user may not mount a tmpfs");
        return None;
    }
    Some(share)
}

/// A file with this many pages of ones, mapped.
fn mapped(share: &Share, name: &str, pages: usize) -> Open {
    let open = share.create(Ino::ROOT, name, 0o644);
    for _ in 0..TRANSFERS {
        share.write(open, 0, &[1; PAGE]).unwrap();
    }
    (1..pages).for_each(|page| assert_eq!(share.write(open, (page * PAGE) as u64, &[1; PAGE]), Ok(PAGE)));
    assert!(is_in_memory(share, open, 0) && is_in_memory(share, open, (pages - 1) * PAGE));
    open
}

fn extent(share: &Share, open: Open, offset: usize) -> Extent {
    match share.fs.read(&share.cx, &range(open.0, open.1, offset as u64, PAGE, OFlags::RDWR), &mut Vec::new()).unwrap()
    {
        Data::Extent(extent) => extent,
        Data::Bytes(_) => panic!("a file with data"),
    }
}

/// Whether a page is read without the descriptor.
fn is_in_memory(share: &Share, open: Open, offset: usize) -> bool {
    let extent = extent(share, open, offset);
    let mut page = [0; PAGE];
    let segment = Segment { address: page.as_mut_ptr(), bytes: PAGE };
    // SAFETY: the page is ours.
    unsafe { copy_mapped(Operation::Read, &extent.file, extent.offset, &[segment]) }.is_some()
}

fn fallocate(share: &Share, open: Open, page: usize, pages: usize, flags: FallocateFlags) -> Result<()> {
    let (offset, len) = ((page * PAGE) as u64, (pages * PAGE) as u64);
    share.fs.fallocate(&share.cx, open.0, open.1, offset, len, flags)
}

fn truncate(share: &Share, open: Open, size: usize) {
    let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
    share.fs.setattr(&share.cx, open.0, None, &set).unwrap();
}

#[test]
fn descriptor_and_memory_show_the_same_bytes() {
    let Some(share) = share(1024) else { return };
    let open = mapped(&share, "f", 8);
    let extent = extent(&share, open, 0);
    for round in 0..200_usize {
        let at = Extent { offset: (round * 1237 % (7 * PAGE)) as u64, ..extent.clone() };
        let (bytes, mut back) = (vec![round as u8; 1 + round * 17], vec![0; 1 + round * 17]);
        let by_memory = round % 2 == 0;
        assert_eq!(write_to(&at, &bytes, by_memory), Ok(bytes.len()));
        assert_eq!(read_from(&at, &mut back, !by_memory), Ok(bytes.len()));
        assert!(back == bytes, "round {round}");
    }
    assert_eq!(share.attr(open.0).size, 8 * PAGE as u64, "nothing grew");
    // Growing, far out, and past the end.
    assert_eq!(share.write(open, 100 << 20, b"far"), Ok(3));
    assert_eq!(share.read(open, (100 << 20) - 2, 99).unwrap(), b"\0\0far");
    assert_eq!(share.write(open, 1 << 40, b"too far to be mapped"), Ok(20));
    assert_eq!(share.attr(open.0).size, (1 << 40) + 20);
    assert_eq!(share.attr(open.0).blocks, (8 + 2) * 8, "reading a hole allocates nothing");
}

#[test]
fn writes_through_another_descriptor_are_read() {
    let Some(share) = share(1024) else { return };
    let open = mapped(&share, "f", 1);
    let backing = share.fs.backing(&share.cx, open.0, open.1).unwrap();
    rustix::io::pwrite(backing.as_fd(), &[5; 3 * PAGE], 0).unwrap();
    for _ in 0..2 {
        assert_eq!(share.read(open, 2 * PAGE as u64, PAGE).unwrap(), [5; PAGE]);
    }
    assert!(is_in_memory(&share, open, 2 * PAGE), "the kernel was asked");
    share.release(open);
    let again = (open.0, share.fs.open(&share.cx, open.0, OFlags::RDWR).unwrap());
    for _ in 0..TRANSFERS {
        assert_eq!(share.read(again, PAGE as u64, PAGE).unwrap(), [5; PAGE]);
    }
    assert!(is_in_memory(&share, again, PAGE), "also what was there before the file was opened");
}

#[test]
fn a_full_file_system_is_an_error() {
    let Some(share) = share(64) else { return };
    let open = mapped(&share, "f", 8);
    let other = share.create(Ino::ROOT, "other", 0o644);
    let filled = (0..100).take_while(|page| share.write(other, page * PAGE as u64, &[2; PAGE]).is_ok()).count();
    assert!((40..64).contains(&filled), "{filled} pages fit");
    for round in 0..50 {
        assert_eq!(share.write(open, 0, &[round; 8 * PAGE]), Ok(8 * PAGE), "what is there can be overwritten");
        assert_eq!(share.read(open, 0, 8 * PAGE).unwrap(), [round; 8 * PAGE]);
    }
    assert_eq!(share.write(open, 8 * PAGE as u64, &[1; PAGE]), Err(Errno::NOSPC));
    // A hole is punched, and another file takes its space.
    for (make_hole, zeros) in [
        (&(|| fallocate(&share, open, 2, 1, PUNCH).unwrap()) as &dyn Fn(), 2),
        (&|| (truncate(&share, open, 5 * PAGE), truncate(&share, open, 8 * PAGE)).0, 5),
    ] {
        make_hole();
        let mut end = filled;
        while share.write(other, ((end + 100) * PAGE) as u64, &[2; PAGE]).is_ok() {
            end += 1;
        }
        for _ in 0..3 {
            assert_eq!(share.read(open, (zeros * PAGE) as u64, PAGE).unwrap(), [0; PAGE]);
            assert_eq!(share.write(open, (zeros * PAGE) as u64, &[1; PAGE]), Err(Errno::NOSPC));
        }
    }
    let stat = share.fs.statfs(&share.cx, Ino::ROOT).unwrap();
    assert_eq!(stat.bfree, 0);
}

#[test]
fn transfers_after_the_last_close_use_the_descriptor() {
    let Some(share) = share(64) else { return };
    let open = mapped(&share, "f", 8);
    let late = extent(&share, open, 4 * PAGE);
    share.release(open);
    let again = mapped(&share, "g", 1);
    share.release(again);
    truncate(&share, open, 0);
    assert_eq!(read_from(&late, &mut [0; PAGE], true), Ok(0), "the file has ended");
    assert_eq!(write_to(&late, &[1; PAGE], true), Ok(PAGE));
    let again = (open.0, share.fs.open(&share.cx, open.0, OFlags::RDONLY).unwrap());
    assert_eq!(share.attr(again.0).size, 5 * PAGE as u64);
}

fn past(atime: i64, mtime: i64) -> SetAttr {
    let at = |sec| Some(SetTime::At(Timespec { sec, nsec: 5 }));
    SetAttr { atime: at(atime), mtime: at(mtime), ..SetAttr::default() }
}

#[test]
fn times_move_as_if_the_kernel_had_seen_it() {
    const FUTURE: i64 = 4_000_000_000;
    let Some(share) = share(64) else { return };
    let open = mapped(&share, "f", 2);
    for mtime in [20, FUTURE] {
        let set = share.fs.setattr(&share.cx, open.0, None, &past(10, mtime)).unwrap();
        assert_eq!((set.atime.sec, set.mtime.sec), (10, mtime));
        // The first uses the descriptor, the others do not.
        (0..5).for_each(|_| assert_eq!(share.write(open, 0, b"x"), Ok(1)));
        let written = share.attr(open.0);
        assert!(written.mtime.sec > 20 && written.mtime.sec < FUTURE, "{written:?}");
        assert!(written.ctime >= written.mtime && written.atime.sec == 10);
    }
    let mut last = share.attr(open.0);
    for round in 0..20 {
        // Without a read of the times in between, writes go through memory.
        share.write(open, 0, b"x").unwrap();
        std::thread::sleep(Duration::from_millis(12));
        share.write(open, 0, b"x").unwrap();
        let now = share.attr(open.0);
        assert!(now.mtime > last.mtime && now.ctime > last.ctime, "round {round}");
        last = now;
    }
    assert!(is_in_memory(&share, open, 0), "a read");
    let read = share.attr(open.0);
    assert!(read.atime >= last.mtime && read.mtime == last.mtime, "{read:?}");
    share.write(open, 0, b"x").unwrap();
    share.write(open, 0, b"x").unwrap();
    let before = share.attr(open.0);
    share.release(open);
    let after = share.attr(open.0);
    assert_eq!((after.atime, after.mtime, after.ctime), (before.atime, before.mtime, before.ctime));
    let again = (open.0, share.fs.open(&share.cx, open.0, OFlags::RDONLY).unwrap());
    assert_eq!(share.attr(again.0), before, "the data file knows");
}

#[test]
fn copies_survive_the_removal_of_pages() {
    const PAGES: usize = 48;
    let Some(share) = share(64) else { return };
    let share = Arc::new(share);
    let open = mapped(&share, "f", PAGES);
    let other = share.create(Ino::ROOT, "other", 0o644);
    let (over, moved, refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for seed in 1..=4_u64 {
            let (share, over, moved, refused) = (&share, &over, &moved, &refused);
            scope.spawn(move || {
                let mut number = seed;
                while !over.load(Ordering::Relaxed) {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (page, action) = ((number >> 33) as usize % PAGES, (number >> 50) % 400);
                    let offset = (page * PAGE) as u64;
                    let outcome = match action {
                        0 => {
                            truncate(share, open, page * PAGE);
                            Ok(())
                        }
                        1 => {
                            truncate(share, open, PAGES * PAGE);
                            Ok(())
                        }
                        2 | 3 => fallocate(share, open, page, 3, PUNCH),
                        4 => fallocate(share, open, page, 3, KEEP),
                        5 => {
                            truncate(share, other, 0);
                            Ok(())
                        }
                        6..=60 => share.write(other, offset, &[9; PAGE]).map(drop),
                        61..=200 => share.read(open, offset, PAGE).map(|bytes| {
                            assert!(bytes.iter().all(|byte| [0, 1, 7].contains(byte)));
                        }),
                        _ => share.write(open, offset, &[7; PAGE]).map(drop),
                    };
                    match outcome {
                        Ok(()) => moved.fetch_add(1, Ordering::Relaxed),
                        Err(error) => {
                            assert_eq!(error, Errno::NOSPC);
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                }
            });
        }
        while start.elapsed() < Duration::from_secs(3) {
            // Sometimes also a new mapping.
            let again = (open.0, share.fs.open(&share.cx, open.0, OFlags::RDWR).unwrap());
            share.release(again);
            std::thread::sleep(Duration::from_millis(1));
        }
        over.store(true, Ordering::Relaxed);
    });
    println!("{} done, {} refused", moved.load(Ordering::Relaxed), refused.load(Ordering::Relaxed));
    assert!(moved.load(Ordering::Relaxed) > 1000 && refused.load(Ordering::Relaxed) > 10);
}

#[test]
fn many_large_files_share_the_mapping_limit() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let Some(share) = share(4096) else { return };
    // Each needs 64 GiB; together they exceed the limit.
    let opens: Vec<Open> = (0..40)
        .map(|index| {
            let open = mapped_or_not(&share, &format!("f{index}"));
            assert_eq!(share.write(open, (64 << 30) - PAGE as u64, &[3; PAGE]), Ok(PAGE));
            open
        })
        .collect();
    for open in &opens {
        assert_eq!(share.read(*open, (64 << 30) - PAGE as u64, PAGE).unwrap(), [3; PAGE]);
        share.release(*open);
    }
    let open = mapped_or_not(&share, "last");
    assert!(is_in_memory(&share, open, 0), "closed files gave theirs back");
}

fn mapped_or_not(share: &Share, name: &str) -> Open {
    let open = share.create(Ino::ROOT, name, 0o644);
    (0..TRANSFERS).for_each(|_| assert_eq!(share.write(open, 0, &[1; PAGE]), Ok(PAGE)));
    open
}

/// Returns the bytes of huge pages in all tmpfs of this machine.
fn huge_bytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("ShmemHugePages:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Returns the preferred I/O size of an open file in bytes: the size of a huge page if the file may use huge pages, even if none is
/// free (`shmem_getattr`).
fn unit(share: &Share, open: Open) -> u64 {
    rustix::fs::fstat(&*extent(share, open, 0).file).unwrap().st_blksize.try_into().unwrap()
}

/// Huge pages behave as small ones, through memory and the descriptor, and without a signal. The kernel splits them, removes them
/// beyond the end, and lacks them when memory is short.
#[test]
fn huge_pages_behave_as_small_ones() {
    const FILE: usize = (12 << 20) + 5000;
    let options = Options { size_bytes: Some(32 << 20), huge: true, ..Options::default() };
    let fs = match ferry_mem::Mem::new(&options) {
        Ok(fs) => fs,
        Err(error) => {
            ferry_skip::skip!("{error}");
            return;
        }
    };
    let share = Share::over(fs);
    let before = huge_bytes();
    let open = share.create(Ino::ROOT, "f", 0o644);
    let mut model = vec![0_u8; FILE];
    truncate(&share, open, FILE);
    for (number, piece) in model.chunks_mut(64 << 10).enumerate() {
        piece.fill(number as u8);
        assert_eq!(share.write(open, (number * (64 << 10)) as u64, piece), Ok(piece.len()));
    }
    let huge_page = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").unwrap();
    assert_eq!(unit(&share, open), huge_page.trim().parse::<u64>().unwrap(), "it may not be in huge pages");
    let small = Share::new(Options { huge: false, ..options });
    let beside = small.create(Ino::ROOT, "f", 0o644);
    assert_eq!(small.write(beside, 0, &model), Ok(FILE));
    assert_eq!(unit(&small, beside), PAGE as u64, "huge pages were not requested");
    small.release(beside);
    match huge_bytes().saturating_sub(before) {
        0 => eprintln!("this machine has no huge page to spare now"),
        bytes => println!("{} MiB in huge pages", bytes >> 20),
    }
    let mut number = 7_u64;
    let mut next = |below: usize| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (number >> 33) as usize % below
    };
    for round in 0..3000_usize {
        let (at, bytes) = (next(FILE - (200 << 10)), 1 + next(200 << 10));
        match next(40) {
            0 => {
                let page = at / PAGE;
                fallocate(&share, open, page, 40, PUNCH).unwrap();
                model[page * PAGE..(page + 40) * PAGE].fill(0);
            }
            1 => {
                truncate(&share, open, at);
                truncate(&share, open, FILE);
                model[at..].fill(0);
            }
            2..20 => {
                let extent = Extent { offset: at as u64, ..extent(&share, open, 0) };
                assert_eq!(write_to(&extent, &vec![round as u8; bytes], round % 2 == 0), Ok(bytes));
                model[at..at + bytes].fill(round as u8);
            }
            _ => {
                let extent = Extent { offset: at as u64, ..extent(&share, open, 0) };
                let mut back = vec![1; bytes];
                assert_eq!(read_from(&extent, &mut back, round % 2 == 0), Ok(bytes));
                assert!(back == model[at..at + bytes], "round {round}, {bytes} bytes at {at}");
            }
        }
    }
    assert_eq!(share.write(open, 0, &[2; PAGE]), Ok(PAGE));
    // Until the share is full and huge pages do not fit any more.
    let other = share.create(Ino::ROOT, "other", 0o644);
    truncate(&share, other, 64 << 20);
    let filled = (0..).take_while(|page| share.write(other, page * PAGE as u64, &[2; PAGE]).is_ok()).count();
    assert!(filled * PAGE > 16 << 20, "{filled} pages fit");
    assert_eq!(share.write(open, 0, &[3; PAGE]), Ok(PAGE), "what is there can be overwritten");
    assert_eq!(share.read(open, PAGE as u64, FILE).unwrap(), model[PAGE..]);
    share.release(open);
    share.release(other);
}
