//! Public suites in a stock QEMU guest with a DAX window.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use ferry_tests::suites::fsx::{self, MAPPED, MIXED, PLAIN};
use ferry_tests::suites::pjdfstest::{self, Results, SKIPPED, names};
use ferry_tests::window::{guest, programs};
use ferry_tests::{CACHES, Cache, GuestResult, MOUNTPOINT, Options, Place, Share, cache_name, directory, run};

/// An emulated guest, with hundreds of cases or thousands of operations.
const TIMEOUT: Duration = Duration::from_secs(1800);
/// What a file is mapped in.
const CHUNK_BYTES: u64 = 2 << 20;

fn share(cache: Cache, writeback: bool) -> Share {
    let tag = Some("d".parse().unwrap());
    Share::with(Place::Disk, Options { cache, writeback, queues: 1, tag, ..Options::default() })
}

fn run_in(share: &Share, options: &str, command: Vec<OsString>) -> GuestResult {
    let programs = programs();
    run(guest(&programs, share, options, command), TIMEOUT)
}

/// On a file that becomes some chunks long, so that parts of it are mapped as they are and its end is a copy; what went wrong.
fn fsx_in(cache: Cache, writeback: bool, options: &str, (weights, operations, seed): (&str, u32, u32)) {
    let (share, files) = (share(cache, writeback), directory(Place::Disk));
    let (config, file) = (files.path().join("fsx.toml"), Path::new(MOUNTPOINT).join("file"));
    let command = fsx::command_up_to(3 * CHUNK_BYTES, &config, &file, weights, operations, seed);
    let ran = run_in(&share, options, command);
    let how = if writeback { ", written back" } else { "" };
    println!("fsx, {options}, cache {}{how}, {operations} operations: {:?}", cache_name(cache), ran.took);
    ran.ok();
    share.assert_released();
}

#[test]
fn fsx_through_the_window() {
    fsx_in(Cache::None, false, "dax=always", (MIXED, 1500, 1));
}

#[test]
#[ignore = "long: make test-all"]
fn fsx_in_every_cache_mode() {
    for (seed, (_, cache)) in (10..).zip(CACHES) {
        fsx_in(cache, false, "dax=always", (MIXED, 5000, seed));
        fsx_in(cache, true, "dax=always", (MIXED, 5000, seed));
        // A file is mapped or not by the length that it has when it is looked up.
        fsx_in(cache, false, "dax=inode", (MIXED, 5000, seed));
    }
    fsx_in(Cache::None, false, "dax=always", (MAPPED, 10_000, 20));
    fsx_in(Cache::None, false, "dax=always", (PLAIN, 10_000, 21));
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_in_every_cache_mode() {
    for (_, cache) in CACHES {
        let (share, config) = (share(cache, false), directory(Place::Disk));
        let path = config.path().join("pjdfstest.toml");
        let cases = |only: Option<&str>| {
            let mut command = pjdfstest::command(&path, Path::new(MOUNTPOINT), Path::new("/dev/shm"), false);
            command.extend(only.map(Into::into));
            run_in(&share, "dax=always", command)
        };
        let ran = cases(None);
        let mut results = Results::parse(&ran.out, &ran.err, false);
        results.run_racing_again(|name| cases(Some(name)).status == 0);
        let (passed, took) = (results.passed.len(), ran.took);
        println!("pjdfstest, dax=always, cache {}: {passed} passed in {took:?}", cache_name(cache));
        assert_eq!(results.skipped_for_good(), names(SKIPPED), "other cases are skipped than are known to be");
        assert!(results.failed.is_empty(), "{:?}", results.failed);
        share.assert_released();
    }
}
