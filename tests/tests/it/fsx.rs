//! The `fsx` crate: random reads, writes, maps, truncations, holes and copies, all of them verified.

use std::path::Path;
use std::time::Duration;

use ferry_tests::suites::fsx::{MAPPED, MIXED, PLAIN, command};
use ferry_tests::{CACHES, Cache, MOUNTPOINT, Options, Place, Share, cache_name, directory, run};

fn fsx(place: Place, options: Options, config: &str, operations: u32, seed: u32) {
    let files = directory(Place::Disk);
    let (name, how) = (cache_name(options.cache), if options.writeback { ", written back" } else { "" });
    let share = Share::with(place, options);
    let file = Path::new(MOUNTPOINT).join("file");
    let command = command(&files.path().join("fsx.toml"), &file, config, operations, seed);
    let ran = run(share.guest(command), Duration::from_secs(60 + u64::from(operations) / 50));
    println!("fsx, cache {name}{how}, {operations} operations: {:?}", ran.took);
    ran.ok();
    share.assert_released();
}

fn options(cache: Cache) -> Options {
    Options { cache, ..Options::default() }
}

/// Without a cache every read and write goes to the server as it is (FOPEN_DIRECT_IO).
#[test]
fn fsx_direct() {
    fsx(Place::Disk, options(Cache::None), MIXED, 3000, 1);
}

#[test]
fn fsx_cached() {
    fsx(Place::Disk, options(Cache::Auto), MIXED, 3000, 2);
}

#[test]
fn fsx_cached_for_long() {
    fsx(Place::Disk, options(Cache::Always), MIXED, 3000, 3);
}

#[test]
fn fsx_written_back() {
    fsx(Place::Disk, Options { writeback: true, ..options(Cache::Auto) }, MIXED, 3000, 4);
}

#[test]
fn fsx_on_tmpfs() {
    fsx(Place::Memory, options(Cache::Auto), MIXED, 3000, 5);
}

#[test]
#[ignore = "long: make test-all"]
fn fsx_in_every_cache_mode() {
    for (seed, (_, cache)) in (300..).zip(CACHES) {
        fsx(Place::Disk, options(cache), MIXED, 3000, seed);
        fsx(Place::Disk, Options { writeback: true, ..options(cache) }, MIXED, 3000, seed);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn fsx_long() {
    for (number, config) in [PLAIN, MAPPED, MIXED].into_iter().enumerate() {
        for cache in [Cache::None, Cache::Auto, Cache::Always] {
            fsx(Place::Disk, options(cache), config, 50_000, 100 + u32::try_from(number).unwrap());
        }
    }
    fsx(Place::Disk, Options { writeback: true, ..options(Cache::Always) }, MIXED, 50_000, 200);
}
