//! Files with many locks, by a client in a guest's place. The table `locks` has those of the lock table alone.

use std::time::Instant;

use anyhow::{Result, ensure};
use ferry_driver::ROOT;
use ferry_wire::fuse::abi::{FileLock, LOCK_NONE, LOCK_READ, LOCK_WRITE};

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::{Place, connect};

const FILE_MODE: u32 = 0o100_644;
const READ_WRITE: u32 = 2;
/// Bytes of each record, of which one is between two.
const RECORD_BYTES: u64 = 8;
/// Whoever asks what is locked.
const OTHER: u64 = 1 << 40;

/// Owners of the locks, or fewer: a server of a host directory has a descriptor for each.
const OWNERS: u64 = 1000;

const FIGURES: &[Figure] = &[
    Figure { name: "lock one", unit: "us", growth_max: STRAIGHT },
    Figure { name: "test one", unit: "us", growth_max: STRAIGHT },
    Figure { name: "unlock one", unit: "us", growth_max: STRAIGHT },
];

pub const CASES: &[Case] = &[
    Case {
        name: "locks on a file of mem, each of a record of its own",
        of: "locks",
        sizes: &[1_000, 10_000, 100_000, 1_000_000],
        quick_max: 100_000,
        figures: FIGURES,
        prepare: of_mem,
    },
    Case {
        name: "locks on a file of the host, each of a record of its own",
        of: "locks",
        sizes: &[1_000, 10_000],
        quick_max: 10_000,
        figures: FIGURES,
        prepare: of_host,
    },
];

fn record(number: u64, kind: u32) -> FileLock {
    let start = number * (RECORD_BYTES + 1);
    FileLock { start, end: start + RECORD_BYTES - 1, kind, pid: 1 }
}

fn of_mem(place: &Place, locks: u64) -> Result<Measure> {
    prepare(place, "mem", locks)
}

fn of_host(place: &Place, locks: u64) -> Result<Measure> {
    std::fs::create_dir(place.directory.join("share"))?;
    prepare(place, &place.word("share")?, locks)
}

fn prepare(place: &Place, source: &str, locks: u64) -> Result<Measure> {
    let server = place.share(source, &[], "socket")?;
    let mut driver = connect(server.socket())?;
    let (entry, open) = driver.create(ROOT, "file", READ_WRITE, FILE_MODE)?;
    Ok(Box::new(move || {
        let _ = &server;
        let (node, fh) = (entry.nodeid, open.fh);
        let begin = Instant::now();
        (0..locks).try_for_each(|number| driver.setlk(node, fh, number % OWNERS, record(number, LOCK_WRITE), 0))?;
        let lock = us_each(begin, locks);
        let begin = Instant::now();
        for number in 0..locks {
            let found = driver.getlk(node, fh, OTHER, record(number, LOCK_READ))?;
            ensure!(found.kind == LOCK_WRITE, "record {number} is not locked");
        }
        let test = us_each(begin, locks);
        let begin = Instant::now();
        (0..locks).try_for_each(|number| driver.setlk(node, fh, number % OWNERS, record(number, LOCK_NONE), 0))?;
        Ok(vec![lock, test, us_each(begin, locks)])
    }))
}
