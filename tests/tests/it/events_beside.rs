//! What runs in a guest while the host changes files beside it, and its agent replays that: suites, and programs that read
//! what another guest writes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ferry_tests::suites::{fsx, pjdfstest};
use ferry_tests::{Cache, MOUNTPOINT, Options, Place, TIMEOUT, alone, cache_name, collect, directory, guest_on};

use crate::events::{WATCH, Watched};
use crate::events_programs::{PRELUDE, beside, host, with_agent};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// How long a suite may take.
const SUITE_MAX: Duration = Duration::from_secs(900);

/// Runs a command in a guest while the host changes files beside it at random, and with a script in `d`. Returns what it said.
fn suite(cache: Cache, command: &[std::ffi::OsString], script: &str) -> Option<String> {
    let watched = Watched::new(cache)?;
    let command: Vec<_> = command.iter().map(|word| word.to_str().unwrap()).collect();
    let command = format!(
        "mkdir disk; (while [ ! -e done ]; do ls -lR d || :; sleep 1; done) >/dev/null 2>&1 &
        : >ready; status=0; {} || status=$?; : >done; kill -0 $agent; echo status $status",
        command.join(" ")
    );
    let mut rounds = 0;
    let said = beside(&watched, &command, |dir| {
        let start = Instant::now();
        while !watched.path("done").exists() {
            assert!(start.elapsed() < SUITE_MAX && !watched.path("failed").exists(), "the suite does not end");
            rounds += 1;
            let churn = format!("mkdir -p new/sub; {WATCH} churn new 300 {rounds}; {script}");
            host(dir, &format!("rm -rf old; [ ! -e new ] || mv new old; {churn}"));
        }
    });
    println!("cache {}: beside {rounds} times 300 operations of the host", cache_name(cache));
    assert!(rounds > 0, "nothing happened beside it");
    Some(said)
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_beside_events() {
    let _alone = alone();
    let config = directory(Place::Disk);
    let target = Path::new(MOUNTPOINT).join("disk");
    let command = pjdfstest::command(&config.path().join("pjdfstest.toml"), &target, Path::new("/dev/shm"), false);
    for cache in [Cache::Auto, Cache::Always] {
        let Some(said) = suite(cache, &command, "") else { return };
        let mut results = pjdfstest::Results::parse(&said, "", false);
        results.run_racing_again(|name| {
            let mut command = command.clone();
            command.push(name.into());
            suite(cache, &command, "").is_some_and(|said| said.ends_with("status 0\n"))
        });
        assert_eq!(results.failed, BTreeSet::new());
        assert_eq!(results.skipped_for_good(), pjdfstest::names(pjdfstest::SKIPPED));
    }
}

/// The host changes attributes of the file itself, too.
#[test]
#[ignore = "long: make test-all"]
fn fsx_beside_events() {
    let _alone = alone();
    let (config, file) = (directory(Place::Disk), Path::new(MOUNTPOINT).join("disk/file"));
    for (seed, cache) in (1..).zip([Cache::Auto, Cache::Always]) {
        for weights in [fsx::MIXED, fsx::MAPPED] {
            let command = fsx::command(&config.path().join("fsx.toml"), &file, weights, 10_000, seed);
            let script = "for mode in 600 644 660; do chmod $mode ../disk/file || :; touch -a ../disk/file; done";
            let Some(said) = suite(cache, &command, script) else { return };
            assert!(said.ends_with("status 0\n"), "{said}");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_probe_passes_beside_events() {
    let _alone = alone();
    for cache in [Cache::Auto, Cache::Always] {
        let Some(said) = suite(cache, &[PROBE.into(), Path::new(MOUNTPOINT).join("disk").into()], "") else { return };
        let failed: Vec<_> = said.lines().filter(|line| line.contains(" FAILED")).collect();
        // See `semantics`.
        assert!(failed.len() == 1 && failed[0].starts_with("idmapped-mount "), "{failed:#?}");
        assert!(said.lines().count() > 70, "{said}");
    }
}

/// How late a guest has read what another one counts in `d/count`, as the host sees both; until there is a file `stop`.
fn staleness(watched: &Watched) -> Vec<Duration> {
    let number = |name| fs::read_to_string(watched.path(name)).ok()?.parse::<usize>().ok();
    let (start, mut last, mut late) = (Instant::now(), 0, Vec::new());
    let mut written = vec![start];
    while !watched.path("stop").exists() && !watched.path("failed").exists() && start.elapsed() < TIMEOUT {
        let count = number("d/count").unwrap_or_default();
        written.resize(written.len().max(count + 1), Instant::now());
        let read = number("d/read").unwrap_or_default();
        if read > last && read < written.len() {
            last = read;
            late.push(written[read].elapsed());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    late.sort_unstable();
    late
}

/// A guest counts in a file, and another one, which keeps what it knows for minutes, reads it: never an older number than before.
fn counter(watched: Option<Watched>, what: &str, reads: usize) {
    let Some(watched) = watched else { return };
    fs::write(watched.path("d/count"), "00000000").unwrap();
    let (socket, export) = watched.beside(Options { cache: Cache::Always, ..Options::default() });
    let writer = with_agent(&format!(": >counting; {WATCH} count d/count"));
    let reader = with_agent(&format!("reach [ -e counting ]; {WATCH} read d/count {reads} d/read; : >stop"));
    let start = Instant::now();
    let writer = watched.guest(&format!("{PRELUDE}\n{writer}")).spawn().unwrap();
    let reader = guest_on(&socket, ["sh", "-euc", &format!("{PRELUDE}\n{reader}")]).spawn().unwrap();
    let late = staleness(&watched);
    let [reader, writer] = [reader, writer].map(|guest| collect(guest, TIMEOUT, start));
    assert!(reader.status == 0 && writer.status == 0, "{reader:?}\n{writer:?}");
    let last: usize = reader.out.trim().parse().unwrap();
    assert!(last > 0 && !late.is_empty(), "nothing was counted: {reader:?}");
    let part = |percent| late[(late.len() - 1) * percent / 100];
    println!("two guests, {what}: {last} numbers in {reads} reads, late by {:?} (p50), {:?} (p99)", part(50), part(99));
    drop(export);
}

#[test]
fn a_guest_never_reads_old_data() {
    let _alone = alone();
    counter(Watched::new(Cache::Always), "one directory", 10_000);
    counter(Some(Watched::mem(Cache::Always)), "one source in memory", 10_000);
}

#[test]
#[ignore = "long: make test-all"]
fn a_guest_does_not_read_old_data_for_long() {
    let _alone = alone();
    counter(Watched::new(Cache::Always), "one directory", 100_000);
    counter(Some(Watched::mem(Cache::Always)), "one source in memory", 100_000);
}
