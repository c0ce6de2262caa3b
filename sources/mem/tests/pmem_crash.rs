//! Power cuts: a random workload over media that take down every write, and then, for every moment of it, what a power
//! cut could have left: all that was made durable, and any part of the rest, torn anywhere between units of 8 bytes.
//! Each such image must pass fsck, mount, hold what was synced, and nothing that never was.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test fails by panicking")]

mod pmem_common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_mem::pmem::{Media, Medium, Options, PMem, fsck_medium, open_media};
use ferry_vfs::{FallocateFlags, FileSystem, Handle, Ino, New, OFlags, RenameFlags, SetAttr, XattrFlags};
use pmem_common::{Event, Events, Random, Recording, Seen, World, at, close, cx, get, name, put, walk};

/// The least image there can be: little room makes blocks go round.
const IMAGE_BYTES: usize = 1 << 20;
const TIER2_BYTES: usize = 1 << 20;
/// Bytes that are written together or not at all.
const UNIT: usize = 8;
/// Names in use: few, so that they meet.
const NAMES: u64 = 6;

/// What the workload was promised, as of an event.
#[derive(Debug)]
struct Promise {
    event: usize,
    step: usize,
    what: What,
}

#[derive(Debug)]
enum What {
    /// All names and attributes as of the step.
    Names,
    /// The bytes of this inode as of the step.
    Bytes(u64),
}

struct Workload {
    fs: PMem,
    random: Random,
    events: Events,
    tiers: usize,
    /// The world after each step; the first is before any.
    worlds: Vec<World>,
    /// Events so far, when each step ended.
    ends: Vec<usize>,
    promises: Vec<Promise>,
    /// Unlinked, but open.
    orphans: Vec<(Ino, Handle)>,
}

fn options() -> Options {
    Options { commit: Some(Duration::ZERO), ..Options::default() }
}

impl Workload {
    fn dir(&mut self) -> Ino {
        match self.random.below(3) {
            0 => self.fs.lookup(&cx(), Ino::ROOT, name(b"dir")).map_or(Ino::ROOT, |entry| entry.ino),
            _ => Ino::ROOT,
        }
    }

    fn name(&mut self) -> Vec<u8> {
        vec![b'a' + self.random.below(NAMES) as u8]
    }

    /// One step; errors (no such file, no space) are part of life.
    fn step(&mut self) {
        let step = self.worlds.len();
        let (dir, file, offset) = (self.dir(), self.name(), self.random.below(60_000));
        let what = self.random.below(24);
        let opened = match what {
            0..=14 => put(&self.fs, dir, &file, 0, &[]).ok(),
            _ => None,
        };
        if let Some((ino, handle)) = opened {
            self.file_step(step, what, (ino, handle), offset);
            if self.random.below(8) == 0 && self.orphans.len() < 3 {
                self.orphans.push((ino, handle));
            } else {
                close(&self.fs, ino, handle);
            }
        }
        let (to_dir, to) = (self.dir(), self.name());
        let fs = &self.fs;
        match what {
            15 => {
                let _ = fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &New { mode: 0o755, ..New::default() });
            }
            16 | 17 => {
                let flags = if offset % 5 == 0 { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
                let _ = fs.rename(&cx(), (dir, name(&file)), (to_dir, name(&to)), flags);
            }
            18 | 19 => {
                let _ = fs.unlink(&cx(), dir, name(&file));
            }
            20 => {
                if let Ok(entry) = fs.lookup(&cx(), dir, name(&file)) {
                    let _ = fs.link(&cx(), entry.ino, to_dir, name(&to));
                    fs.forget(entry.ino, 1);
                }
            }
            21 => {
                if let Some((ino, handle)) = self.orphans.pop() {
                    close(fs, ino, handle);
                }
            }
            22 => {
                let handle = fs.opendir(&cx(), Ino::ROOT, OFlags::RDONLY).unwrap();
                assert!(fs.fsyncdir(&cx(), Ino::ROOT, handle, false).unwrap().is_none());
                fs.releasedir(&cx(), Ino::ROOT, handle);
                self.promise(step, What::Names);
            }
            23 => {
                fs.syncfs(&cx(), Ino::ROOT).unwrap();
                self.promise(step, What::Names);
                for seen in walk(&self.fs).values() {
                    self.promise(step, What::Bytes(seen.ino));
                }
            }
            _ => {}
        }
        self.end_step();
    }

    fn file_step(&mut self, step: usize, what: u64, (ino, handle): (Ino, Handle), offset: u64) {
        let len = 1 + self.random.below(20_000) as usize;
        let bytes = vec![(step % 255) as u8 + 1; len];
        let mut promises = Vec::new();
        let fs = &self.fs;
        match what {
            0..=6 => {
                // No space, perhaps.
                let _ = fs.write(&cx(), &at(ino, handle, offset, len), &mut &bytes[..]);
            }
            7 => {
                let at = ferry_vfs::IoRange { flags: OFlags::RDWR | OFlags::DSYNC, ..at(ino, handle, offset, len) };
                if fs.write(&cx(), &at, &mut &bytes[..]).is_ok() {
                    promises.push(What::Bytes(ino.0));
                }
            }
            8 => {
                let _ = fs.setattr(&cx(), ino, Some(handle), &SetAttr { size: Some(offset), ..SetAttr::default() });
            }
            9 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fs.fallocate(&cx(), ino, handle, offset, len as u64, flags);
            }
            10 => {
                let _ = fs.fallocate(&cx(), ino, handle, offset, len as u64, FallocateFlags::empty());
            }
            11 => {
                let _ = fs.setxattr(&cx(), ino, b"user.x", &bytes[..len.min(50)], XattrFlags::empty(), false);
            }
            12 => {
                let mode = Some(0o600 + (step % 8) as u32);
                let _ = fs.setattr(&cx(), ino, Some(handle), &SetAttr { mode, ..SetAttr::default() });
            }
            _ => {
                let data_only = what == 14;
                assert!(fs.fsync(&cx(), ino, handle, data_only).unwrap().is_none());
                promises.push(What::Bytes(ino.0));
                if !data_only {
                    promises.push(What::Names);
                }
            }
        }
        promises.into_iter().for_each(|promise| self.promise(step, promise));
        if self.tiers > 1 && self.random.below(3) == 0 {
            self.fs.store().move_to_tier2(8).unwrap();
        }
    }

    fn promise(&mut self, step: usize, what: What) {
        let event = self.events.lock().unwrap().len();
        self.promises.push(Promise { event, step, what });
    }

    fn end_step(&mut self) {
        self.worlds.push(walk(&self.fs));
        self.ends.push(self.events.lock().unwrap().len());
    }

    fn world_at(&self, event: usize) -> usize {
        self.ends.partition_point(|end| *end <= event).min(self.worlds.len() - 1)
    }
}

/// The media as a power cut would find them.
struct Cut {
    durable: Vec<Vec<u8>>,
    /// Units that are written and not durable, in order.
    pending: Vec<(usize, usize, Vec<u8>)>,
}

impl Cut {
    fn follow(&mut self, event: &Event) {
        match event {
            Event::Write { medium, offset, bytes } => {
                // Units, aligned as the medium has them.
                let mut from = 0;
                while from < bytes.len() {
                    let at = offset + from;
                    let count = (UNIT - at % UNIT).min(bytes.len() - from);
                    self.pending.push((*medium, at, bytes[from..from + count].to_vec()));
                    from += count;
                }
            }
            Event::Persist { medium, ranges } => {
                let durable = &mut self.durable;
                let touches = |at: usize, len: usize, range: &Range<u64>| {
                    (at as u64) < range.end && (at + len) as u64 > range.start
                };
                self.pending.retain(|(of, at, unit)| {
                    let done = of == medium && ranges.iter().any(|range| touches(*at, unit.len(), range));
                    if done {
                        durable[*of][*at..*at + unit.len()].copy_from_slice(unit);
                    }
                    !done
                });
            }
        }
    }

    /// What is left: with luck 0 nothing more than the durable, with luck 100 everything.
    fn leave(&self, random: &mut Random, luck: u64) -> Vec<Vec<u8>> {
        let mut left = self.durable.clone();
        // Runs of units share their fate, as sectors and pages do, or each has its own.
        let run = [1, 64, 512][random.below(3) as usize];
        let mut lucky = true;
        for (index, (medium, at, unit)) in self.pending.iter().enumerate() {
            if index % run == 0 {
                lucky = random.below(100) < luck;
            }
            if lucky {
                left[*medium][*at..*at + unit.len()].copy_from_slice(unit);
            }
        }
        left
    }
}

/// Runs a workload and cuts the power everywhere, or at every so-manieth event. Answers how many images were checked.
fn cut_everywhere(seed: u64, steps: usize, tiers: usize, every: usize) -> usize {
    println!("seed {seed}, {steps} steps, {tiers} tiers");
    let events = Events::default();
    let sizes = [IMAGE_BYTES, TIER2_BYTES];
    let media: Vec<Arc<Recording>> =
        (0..tiers).map(|tier| Recording::new(vec![0; sizes[tier]], tier, Some(Arc::clone(&events)))).collect();
    let fs = open_media(&as_media(&media), &options()).unwrap();
    let mut workload = Workload {
        worlds: vec![walk(&fs)],
        ends: vec![events.lock().unwrap().len()],
        fs,
        random: Random::new(seed),
        events: Arc::clone(&events),
        tiers,
        promises: Vec::new(),
        orphans: Vec::new(),
    };
    for _ in 0..steps {
        workload.step();
    }
    let mut random = Random::new(seed + 1);
    let mut cut = Cut { durable: (0..tiers).map(|tier| vec![0; sizes[tier]]).collect(), pending: Vec::new() };
    let (all, first) = (events.lock().unwrap().clone(), workload.ends[0]);
    let mut checked = 0;
    for (index, event) in all.iter().enumerate() {
        cut.follow(event);
        if index >= first && (index + seed as usize) % every == 0 {
            let luck = [0, 50, 90, 100][random.below(4) as usize];
            let left = cut.leave(&mut random, luck);
            check(&workload, index + 1, left, &format!("seed {seed}, event {index}, luck {luck}"));
            checked += 1;
        }
    }
    checked
}

fn as_media(media: &[Arc<Recording>]) -> Media {
    let of = |medium: &Arc<Recording>| -> Arc<dyn Medium> { Arc::clone(medium) as _ };
    Media { image: of(&media[0]), tier2: media.get(1).map(of) }
}

/// Mounts what is left after `event` events, and compares.
fn check(workload: &Workload, event: usize, left: Vec<Vec<u8>>, context: &str) {
    let media: Vec<Arc<Recording>> =
        left.into_iter().enumerate().map(|(number, bytes)| Recording::new(bytes, number, None)).collect();
    let media = as_media(&media);
    let report = fsck_medium(&media, false).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    // A cut between the two superblocks leaves one torn.
    let sound = report.findings.iter().all(|finding| finding.what.starts_with("superblock") || report.is_clean());
    assert!(sound, "{context}: {report:?}");
    let fs = open_media(&media, &options()).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    let found = walk(&fs);
    let now = workload.world_at(event);
    let kept = workload.promises.iter().filter(|promise| promise.event <= event);
    let mut names_from = 0;
    let mut bytes_from: BTreeMap<u64, usize> = BTreeMap::new();
    for promise in kept {
        match promise.what {
            What::Names => names_from = names_from.max(promise.step),
            What::Bytes(ino) => drop(bytes_from.insert(ino, promise.step)),
        }
    }
    let matches = |world: &World| {
        world.len() == found.len()
            && world.iter().zip(&found).all(|(was, is)| was.0 == is.0 && was.1.same_but_bytes(is.1))
    };
    let world = (names_from..=now).find(|step| matches(&workload.worlds[*step]));
    assert!(
        world.is_some(),
        "{context}: the names are those of no moment from step {names_from} to {now}:\n{:?}\nlast:\n{:?}\npromised:\n{:?}",
        brief(&found),
        brief(&workload.worlds[now]),
        brief(&workload.worlds[names_from])
    );
    for (path, seen) in &found {
        let from = bytes_from.get(&seen.ino).copied().unwrap_or(0);
        check_bytes(
            &workload.worlds[from..=now],
            seen,
            &format!("{context}: {}, step {from} to {now}, names of {world:?}", path.escape_ascii()),
        );
    }
    assert!(fsck_after(fs, &media).is_clean(), "{context}: after the mount");
}

fn fsck_after(fs: PMem, media: &Media) -> ferry_mem::pmem::Report {
    drop(fs);
    fsck_medium(media, false).unwrap()
}

fn brief(world: &World) -> Vec<String> {
    let line = |(path, seen): (&Vec<u8>, &Seen)| {
        format!(
            "{} ino {} mode {:o} nlink {} size {} {} xattrs",
            path.escape_ascii(),
            seen.ino,
            seen.mode,
            seen.nlink,
            seen.size,
            seen.xattrs.len()
        )
    };
    world.iter().map(line).collect()
}

/// Each byte is one that this very file had there at one of these times.
fn check_bytes(worlds: &[World], seen: &Seen, context: &str) {
    let mut versions: Vec<&[u8]> = Vec::new();
    for world in worlds {
        if let Some(was) = world.values().find(|was| was.ino == seen.ino) {
            if versions.last() != Some(&&was.bytes[..]) {
                versions.push(&was.bytes);
            }
        }
    }
    for (index, byte) in seen.bytes.iter().enumerate() {
        let known = versions.iter().any(|version| version.get(index) == Some(byte));
        let were: Vec<_> = versions.iter().map(|version| (version.len(), version.get(index))).collect();
        assert!(known, "{context}: byte {index} of {} is {byte}, which it never was: {were:?}", seen.size);
    }
}

#[test]
fn every_moment_of_a_power_cut_leaves_a_sound_image() {
    let start = Instant::now();
    let mut checked = 0;
    for seed in 1..=4 {
        checked += cut_everywhere(seed, 60, 1, 2);
    }
    println!("{checked} images in {:?}", start.elapsed());
    assert!(checked > 100, "{checked}");
}

#[test]
fn power_cuts_during_moves_between_the_tiers() {
    let checked: usize = (11..=13).map(|seed| cut_everywhere(seed, 60, 2, 2)).sum();
    assert!(checked > 100, "{checked}");
}

#[test]
#[ignore = "takes minutes: many seeds, every event"]
fn many_power_cuts() {
    let end = Instant::now() + Duration::from_secs(300);
    let mut checked = 0;
    let mut seed = 1000;
    while Instant::now() < end {
        checked += cut_everywhere(seed, 150, 1 + (seed % 2) as usize, 1);
        seed += 1;
    }
    println!("{checked} images, seeds 1000 to {seed}");
}

#[test]
fn a_byte_that_never_was_is_noticed() {
    let media = [Recording::new(vec![0; IMAGE_BYTES], 0, None)];
    let fs = open_media(&as_media(&media), &options()).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"a", 0, &[7; 100]).unwrap();
    let before = walk(&fs);
    assert_eq!(get(&fs, ino, handle, 0, 100), [7; 100]);
    let mut seen = before[&b"/a"[..]].clone();
    check_bytes(std::slice::from_ref(&before), &seen, "as it is");
    seen.bytes[50] = 8;
    let noticed = std::panic::catch_unwind(|| check_bytes(std::slice::from_ref(&before), &seen, "forged"));
    assert!(noticed.is_err());
    close(&fs, ino, handle);
}
