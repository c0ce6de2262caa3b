//! Power cuts: a random workload over media that take down every write, and then, for every moment of it, what a power
//! cut could have left: all that was made durable, and any part of the rest, torn anywhere between units of 8 bytes.
//! Each such image must pass fsck, mount, hold what was synced, and nothing that never was; a second power cut while
//! it is mounted again must not change that. What should be there comes from a model of the test's own.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test fails by panicking")]

mod cut;
mod model;
use crate::pmem_common;
mod workload;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use cut::Cut;
use ferry_mem::pmem::{Media, Medium, fsck_medium, open_media};
use pmem_common::{Events, Random, Recording, Seen, World, walk};
use workload::{What, Workload, options};

/// The least image there can be: little room makes blocks go round.
const IMAGE_BYTES: usize = 1 << 20;
const TIER2_BYTES: usize = 1 << 20;
/// How much of what was not yet durable survives, in percent, in the images that are made of one moment.
const LUCKS: [u64; 3] = [0, 50, 95];

/// Runs a workload and cuts the power after every event. Returns how many images were checked.
fn cut_everywhere(seed: u64, steps: usize, tiers: usize) -> usize {
    println!("seed {seed}, {steps} steps, {tiers} tiers");
    let events = Events::default();
    let empty: Vec<Vec<u8>> = [IMAGE_BYTES, TIER2_BYTES][..tiers].iter().map(|bytes| vec![0; *bytes]).collect();
    let media = recordings(empty.clone(), Some(&events));
    let fs = open_media(&as_media(&media), &options()).unwrap();
    let mut workload = Workload::new(fs, seed, Arc::clone(&events), tiers);
    for _ in 0..steps {
        workload.step();
    }
    let mut random = Random::new(seed + 1);
    let mut cut = Cut::new(empty);
    let (all, first) = (events.lock().unwrap().clone(), workload.ends[0]);
    let mut checked = 0;
    for (index, event) in all.iter().enumerate() {
        cut.follow(event);
        for luck in LUCKS {
            if index >= first {
                let left = cut.leave(&mut random, luck);
                let context = format!("seed {seed}, {tiers} tiers, event {index}, luck {luck}");
                check(&workload, index + 1, left, &mut random, &context);
                checked += 1;
            }
        }
    }
    checked
}

fn recordings(contents: Vec<Vec<u8>>, events: Option<&Events>) -> Vec<Arc<Recording>> {
    let recording = |(number, bytes)| Recording::new(bytes, number, events.map(Arc::clone));
    contents.into_iter().enumerate().map(recording).collect()
}

fn as_media(media: &[Arc<Recording>]) -> Media {
    let of = |medium: &Arc<Recording>| -> Arc<dyn Medium> { Arc::clone(medium) as _ };
    Media { image: of(&media[0]), tier2: media.get(1).map(of) }
}

/// Mounts what is left after `event` events, and compares; also after a power cut at some moment of that mount.
fn check(workload: &Workload, event: usize, left: Vec<Vec<u8>>, random: &mut Random, context: &str) {
    let mounting = Events::default();
    look_at(workload, event, left.clone(), Some(&mounting), context);
    let mounting = mounting.lock().unwrap();
    if !mounting.is_empty() {
        let mut cut = Cut::new(left);
        let moment = random.below(mounting.len() as u64) as usize;
        mounting[..=moment].iter().for_each(|event| cut.follow(event));
        let left = cut.leave(random, 50);
        look_at(workload, event, left, None, &format!("{context}, mounted, event {moment} of that"));
    }
}

fn look_at(workload: &Workload, event: usize, left: Vec<Vec<u8>>, events: Option<&Events>, context: &str) {
    let media = as_media(&recordings(left, events));
    let report = fsck_medium(&media, false).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    // A cut between the two superblocks leaves one torn.
    let sound = report.findings.iter().all(|finding| finding.what.starts_with("superblock") || report.is_clean());
    assert!(sound, "{context}: {report:?}");
    let fs = open_media(&media, &options()).unwrap_or_else(|error| panic!("{context}: {error:?}"));
    compare(workload, event, &walk(&fs), context);
    drop(fs);
    assert!(fsck_medium(&media, false).unwrap().is_clean(), "{context}: after the mount");
}

fn compare(workload: &Workload, event: usize, found: &World, context: &str) {
    let now = workload.world_at(event);
    let mut names_from = 0;
    let mut bytes_from: BTreeMap<u64, usize> = BTreeMap::new();
    for promise in workload.promises.iter().filter(|promise| promise.event <= event) {
        match promise.what {
            What::Names => names_from = names_from.max(promise.world),
            What::Bytes(ino) => drop(bytes_from.insert(ino, promise.world)),
        }
    }
    let matches = |world: &World| {
        world.len() == found.len()
            && world.iter().zip(found).all(|(was, is)| was.0 == is.0 && was.1.same_but_bytes(is.1))
    };
    // The world of a promise is pushed when its call ends, which may be after the event.
    let names_from = names_from.min(now);
    let world = (names_from..=now).find(|world| matches(&workload.worlds[*world]));
    assert!(
        world.is_some(),
        "{context}: the names are those of no moment from {names_from} to {now}:\n{:?}\nlast:\n{:?}\npromised:\n{:?}",
        brief(found),
        brief(&workload.worlds[now]),
        brief(&workload.worlds[names_from])
    );
    for (path, seen) in found {
        let from = bytes_from.get(&seen.ino).copied().unwrap_or(0).min(now);
        let context = format!("{context}: {}, worlds {from} to {now}, names of {world:?}", path.escape_ascii());
        check_bytes(&workload.worlds[from..=now], seen, &context);
    }
}

fn brief(world: &World) -> Vec<String> {
    let line = |(path, seen): (&Vec<u8>, &Seen)| {
        let Seen { ino, mode, nlink, size, xattrs, .. } = seen;
        format!("{} ino {ino} mode {mode:o} nlink {nlink} size {size} {} xattrs", path.escape_ascii(), xattrs.len())
    };
    world.iter().map(line).collect()
}

/// Each byte is one that this very file had there at one of these times.
fn check_bytes(worlds: &[World], seen: &Seen, context: &str) {
    let mut versions: Vec<&Arc<Vec<u8>>> = Vec::new();
    for world in worlds {
        if let Some(was) = world.values().find(|was| was.ino == seen.ino)
            && versions.last().is_none_or(|last| !Arc::ptr_eq(last, &was.bytes))
        {
            versions.push(&was.bytes);
        }
    }
    if versions.iter().any(|version| version == &&seen.bytes) {
        return;
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
    let checked: usize = (1..=5).map(|seed| cut_everywhere(seed, 60, 1)).sum();
    println!("{checked} images in {:?}", start.elapsed());
    assert!(checked > 1000, "{checked}");
}

#[test]
fn power_cuts_during_moves_between_the_tiers() {
    let start = Instant::now();
    let checked: usize = (11..=13).map(|seed| cut_everywhere(seed, 60, 2)).sum();
    println!("{checked} images in {:?}", start.elapsed());
    assert!(checked > 700, "{checked}");
}

#[test]
#[ignore = "takes minutes: 200 seeds"]
fn many_power_cuts() {
    let start = Instant::now();
    let checked: usize = (1000..1200).map(|seed| cut_everywhere(seed, 150, 1 + (seed % 2) as usize)).sum();
    println!("{checked} images in {:?}", start.elapsed());
}

#[test]
fn a_wrong_byte_is_detected() {
    let events = Events::default();
    let media = recordings(vec![vec![0; IMAGE_BYTES]], Some(&events));
    let fs = open_media(&as_media(&media), &options()).unwrap();
    let (ino, handle) = pmem_common::put(&fs, ferry_vfs::Ino::ROOT, b"a", 0, &[7; 100]).unwrap();
    let before = walk(&fs);
    let mut seen = before[&b"/a"[..]].clone();
    check_bytes(std::slice::from_ref(&before), &seen, "as it is");
    Arc::make_mut(&mut seen.bytes)[50] = 8;
    let noticed = std::panic::catch_unwind(|| check_bytes(std::slice::from_ref(&before), &seen, "forged"));
    assert!(noticed.is_err());
    pmem_common::close(&fs, ino, handle);
}
