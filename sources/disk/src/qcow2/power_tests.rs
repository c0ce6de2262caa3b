//! The states of an image after a power failure, which keeps any of the writes since the last `fdatasync`, and after a
//! failed write.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;

use super::file::Event;
use super::image::Image;
use super::shape::{ClusterLocation, OFFSET};
use super::write::Zeroing;
use super::{OpenContext, sys};
use crate::tests::images::create;
use ferry_vfs::sync;

const SECTOR: usize = 512;
const BYTES: usize = 2 << 20;
/// The image below is shorter than the disk.
const BELOW: usize = BYTES / 2 + 4096;
const REQUESTS: usize = 50;
const FAILURES: usize = 100;

/// A pseudorandom sequence (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % bound
    }
}

/// A request and its events.
struct Step {
    events: Range<usize>,
    /// The value that it wrote to sectors; `None`: a flush.
    made: Option<(Range<usize>, u8)>,
}

fn open(path: &Path) -> Image {
    let opening = OpenContext { backing_dir: path.parent(), direct: false };
    opening.image(sys::open(path, true).expect("a file"), path, true, 0).expect("an image")
}

fn events(image: &Image) -> usize {
    image.file.log.lock().expect("a log").len()
}

/// Runs random requests; each writes another byte.
fn work(image: &Image, random: &mut Random) -> Vec<Step> {
    let mut steps = Vec::new();
    for number in 0..REQUESTS {
        let start = events(image);
        let count = 1 + random.below(if number % 8 == 0 { 600 } else { 40 });
        let first = random.below(BYTES / SECTOR - count);
        let (offset, bytes) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
        let byte = u8::try_from(number).expect("few requests") + 1;
        let made = match random.below(6) {
            0 => {
                image.flush().expect("a flush");
                None
            }
            1 => {
                let how = if number % 2 == 0 { Zeroing::Unmap } else { Zeroing::Keep };
                image.zero(offset, bytes, how).expect("zeros");
                Some((first..first + count, 0))
            }
            _ => {
                image.write(&vec![byte; count * SECTOR], offset).expect("a write");
                Some((first..first + count, byte))
            }
        };
        steps.push(Step { events: start..events(image), made });
    }
    steps
}

/// Returns a possible file after a power failure before the event `end`.
fn failed(mut bytes: Vec<u8>, log: &[Event], end: usize, random: &mut Random) -> Vec<u8> {
    let synced = log[..end].iter().rposition(|event| matches!(event, Event::Sync)).unwrap_or(0);
    for (number, event) in log[..end].iter().enumerate() {
        let Event::Write(offset, data) = event else { continue };
        let offset = usize::try_from(*offset).expect("a small file");
        if number >= synced && random.below(3) == 0 {
            continue;
        }
        // Sectors that are not durable may be lost, but not torn.
        let is_torn = number >= synced && random.below(3) == 0;
        bytes.resize(bytes.len().max(offset + data.len()), 0);
        let mut at = 0;
        while at < data.len() {
            let sector_end = ((offset + at) / SECTOR + 1) * SECTOR - offset;
            let part = at..sector_end.min(data.len());
            if !is_torn || random.below(2) == 0 {
                bytes[offset + part.start..offset + part.end].copy_from_slice(&data[part.clone()]);
            }
            at = part.end;
        }
    }
    bytes
}

/// Returns the possible values of each sector after a power failure before the event `end`.
fn allowed(initial: &[u8], steps: &[Step], end: usize) -> Vec<Vec<u8>> {
    let flushed = steps.iter().rposition(|step| step.made.is_none() && step.events.end <= end).unwrap_or(0);
    let mut allowed: Vec<Vec<u8>> = initial.iter().map(|byte| vec![*byte]).collect();
    for (number, step) in steps.iter().enumerate().filter(|(_, step)| step.events.start < end) {
        let Some((sectors, byte)) = &step.made else { continue };
        for sector in sectors.clone() {
            if number < flushed {
                allowed[sector].clear();
            }
            allowed[sector].push(*byte);
        }
    }
    allowed
}

/// Checks that every used cluster is counted at least as often.
fn check_counts(image: &Image, file: &[u8]) {
    let bits = image.shape.cluster_bits;
    let tables = sync::read(&image.tables);
    let mut used: HashMap<u64, u64> = HashMap::new();
    let mut uses = |offset: u64| *used.entry(offset >> bits).or_default() += 1;
    [0, tables.l1_offset, tables.refcounts_offset].into_iter().for_each(&mut uses);
    tables.refcounts.iter().filter(|offset| **offset != 0).for_each(|offset| uses(*offset));
    tables.l1.iter().filter(|entry| **entry != 0).for_each(|entry| uses(entry & OFFSET));
    for entry in image.entries(&tables, image.clusters(0, BYTES as u64)).expect("the entries") {
        if let ClusterLocation::Cluster { offset, .. } = entry.place {
            uses(offset);
        }
    }
    for (cluster, uses) in used {
        let block = tables.refcounts[usize::try_from(cluster >> (bits - 1)).expect("a small file")];
        let at = usize::try_from(block + (cluster % (1 << (bits - 1))) * 2).expect("a small file");
        let count = u64::from(u16::from_be_bytes([file[at], file[at + 1]]));
        assert!(count >= uses, "cluster {cluster} is used {uses} times, and counted {count} times");
        assert_eq!(uses, 1, "cluster {cluster}");
    }
}

#[test]
fn a_power_failure_loses_only_unflushed_writes() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = directory.path().join("image");
    let mut below = vec![0xee; BELOW];
    below[BELOW / 2..].fill(0xdd);
    fs::write(directory.path().join("below"), &below).expect("a file");
    for seed in [1, 2, 3] {
        let mut random = Random(seed * 0x9e37_79b9);
        let _ = fs::remove_file(&path);
        create(&path, BYTES as u64, Some(("below", "raw")));
        let before = fs::read(&path).expect("the file");
        let image = open(&path);
        let steps = work(&image, &mut random);
        let log = std::mem::take(&mut *image.file.log.lock().expect("a log"));
        drop(image);
        assert!(log.iter().filter(|event| matches!(event, Event::Sync)).count() > REQUESTS / 4);
        let mut initial: Vec<u8> = below.iter().step_by(SECTOR).copied().collect();
        initial.resize(BYTES / SECTOR, 0);
        for _ in 0..FAILURES {
            let end = random.below(log.len() + 1);
            fs::write(&path, failed(before.clone(), &log, end, &mut random)).expect("the file");
            let image = open(&path);
            check_counts(&image, &fs::read(&path).expect("the file"));
            let mut found = vec![0; BYTES];
            image.read(&mut found, 0).expect("a read");
            let allowed = allowed(&initial, &steps, end);
            for (sector, bytes) in found.chunks(SECTOR).enumerate() {
                let is_one = allowed[sector].iter().any(|byte| bytes.iter().all(|found| found == byte));
                // An unflushed write may have gone to a cluster with other bytes of this disk.
                let is_lost = allowed[sector].len() > 1;
                assert!(
                    is_one || is_lost,
                    "seed {seed}, event {end}, sector {sector}: {} of {:?}",
                    bytes[0],
                    allowed[sector]
                );
            }
            // Later writes do not overwrite other data.
            for cluster in 0..BYTES / (64 << 10) {
                let at = cluster * (64 << 10) + SECTOR;
                found[at..at + SECTOR].fill(0xaa);
                image.write(&[0xaa; SECTOR], at as u64).expect("a write");
            }
            image.flush().expect("a flush");
            let mut now = vec![0; BYTES];
            image.read(&mut now, 0).expect("a read");
            assert!(now == found, "seed {seed}, event {end}");
            check_counts(&image, &fs::read(&path).expect("the file"));
        }
    }
}

#[test]
fn a_failed_write_of_the_l1_table_frees_no_linked_table() {
    const L2_COVERS: u64 = 512 << 20;
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = directory.path().join("image");
    create(&path, 4 * L2_COVERS, None);
    let image = open(&path);
    // Of two new L2 tables only the first is linked.
    let second_entry = sync::read(&image.tables).l1_offset + 8;
    image.file.failing_offset.store(second_entry, Ordering::Relaxed);
    let (at, data) = (L2_COVERS - 512, [7; 1024]);
    assert!(image.write(&data, at).is_err());
    image.file.failing_offset.store(0, Ordering::Relaxed);
    image.flush().expect("a flush");
    image.write(&data, at).expect("a write");
    // New clusters do not lie where the tables do.
    for number in 1..8 {
        image.write(&[0xaa; 512], number << 16).expect("a write");
    }
    image.flush().expect("a flush");
    drop(image);
    let image = open(&path);
    let mut found = [0; 1024];
    image.read(&mut found, at).expect("a read");
    assert_eq!(found, data);
}
