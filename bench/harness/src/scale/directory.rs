//! Directories with many entries, and guests that know many files.

use std::time::Instant;

use anyhow::{Result, ensure};
use ferry_driver::walk::Walk;
use ferry_driver::{Driver, ROOT};
use ferry_wire::fuse::abi::ForgetOne;

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::{Place, connect};
use crate::noise::Noise;
use crate::procfs::kib;
use crate::tmpfs::{Tmpfs, file_name};

/// What one READDIRPLUS may bring, as Linux asks for.
const LISTING_BYTES: u32 = 32 << 10;
/// Entries that are looked up, or created, in a directory that has enough of them.
const STEPS_MAX: u64 = 10_000;
/// Inodes of one BATCH_FORGET: as many as Linux puts into a page.
const FORGET_BATCH: usize = 254;
/// Files of each directory of a tree.
const DIR_FILES: u64 = 1000;
const FILE_MODE: u32 = 0o100_644;

const SIZES: &[u64] = &[1_000, 10_000, 100_000, 1_000_000];
const QUICK_MAX: u64 = 100_000;

const OF_DIRECTORY: &[Figure] = &[
    Figure { name: "list one, by READDIRPLUS", unit: "us", growth_max: STRAIGHT },
    Figure { name: "look one up", unit: "us", growth_max: STRAIGHT },
    Figure { name: "create one", unit: "us", growth_max: STRAIGHT },
];

pub const CASES: &[Case] = &[
    Case {
        name: "entries in one directory of the host",
        of: "entries",
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: OF_DIRECTORY,
        prepare: of_host,
    },
    Case {
        name: "entries in one directory of mem",
        of: "entries",
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: OF_DIRECTORY,
        prepare: of_mem,
    },
    Case {
        name: "files known to a guest",
        of: "files",
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: &[
            Figure { name: "walk over one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "memory of one", unit: "bytes", growth_max: STRAIGHT },
            Figure { name: "look one up again", unit: "us", growth_max: STRAIGHT },
            Figure { name: "forget one", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: known,
    },
];

fn of_host(place: &Place, entries: u64) -> Result<Measure> {
    let tmpfs = Tmpfs::mount(place.directory.join("host"))?;
    tmpfs.make_files("share", entries)?;
    let server = place.share(&place.word("host/share")?, &[], "socket")?;
    let mut driver = connect(server.socket())?;
    Ok(Box::new(move || {
        // The directory lies on the tmpfs, and the server on the directory.
        let _ = (&server, &tmpfs);
        measure(&mut driver, entries)
    }))
}

fn of_mem(place: &Place, entries: u64) -> Result<Measure> {
    let server = place.share("mem", &["--size", "16G"], "socket")?;
    let mut driver = connect(server.socket())?;
    let mut made = Made::default();
    for number in 0..entries {
        let entry = driver.mknod(ROOT, file_name(number), FILE_MODE, 0)?;
        made.0.push(ForgetOne { nodeid: entry.nodeid, nlookup: 1 });
    }
    made.forget(&mut driver)?;
    Ok(Box::new(move || {
        let _ = &server;
        measure(&mut driver, entries)
    }))
}

/// References that are to be given back.
#[derive(Default)]
struct Made(Vec<ForgetOne>);

impl Made {
    fn forget(&mut self, driver: &mut Driver) -> Result<()> {
        std::mem::take(&mut self.0).chunks(FORGET_BATCH).try_for_each(|batch| driver.batch_forget(batch))?;
        Ok(())
    }
}

/// Lists, looks up and creates in the root of a share with so many entries.
fn measure(driver: &mut Driver, entries: u64) -> Result<Vec<f64>> {
    let steps = entries.min(STEPS_MAX);
    let mut made = Made::default();

    let begin = Instant::now();
    let open = driver.opendir(ROOT)?;
    let (mut offset, mut found) = (0, 0);
    loop {
        let listed = driver.readdirplus(ROOT, open.fh, offset, LISTING_BYTES)?;
        let Some(last) = listed.last() else { break };
        offset = last.next;
        let names = listed.iter().filter(|entry| entry.name != b"." && entry.name != b"..");
        found += u64::try_from(names.count())?;
        let nodes = listed.iter().filter_map(|listed| listed.entry.as_ref()).filter(|entry| entry.ino.0 != 0);
        made.0.extend(nodes.map(|entry| ForgetOne { nodeid: entry.ino.0, nlookup: 1 }));
    }
    driver.releasedir(ROOT, open.fh)?;
    let list = us_each(begin, entries);
    ensure!(found == entries, "{found} of {entries} entries are listed");
    made.forget(driver)?;

    let mut any = Noise(entries);
    let begin = Instant::now();
    for _ in 0..steps {
        let entry = driver.lookup(ROOT, file_name(any.below(entries)))?;
        made.0.push(ForgetOne { nodeid: entry.nodeid, nlookup: 1 });
    }
    let look_up = us_each(begin, steps);
    made.forget(driver)?;

    let begin = Instant::now();
    for number in 0..steps {
        let entry = driver.mknod(ROOT, format!("new-{number}"), FILE_MODE, 0)?;
        made.0.push(ForgetOne { nodeid: entry.nodeid, nlookup: 1 });
    }
    let create = us_each(begin, steps);
    (0..steps).try_for_each(|number| driver.unlink(ROOT, format!("new-{number}")))?;
    made.forget(driver)?;
    Ok(vec![list, look_up, create])
}

fn known(place: &Place, files: u64) -> Result<Measure> {
    let tmpfs = Tmpfs::mount(place.directory.join("host"))?;
    for directory in 0..files.div_ceil(DIR_FILES) {
        tmpfs.make_files(&format!("d{directory}"), DIR_FILES)?;
    }
    let place = place.clone();
    Ok(Box::new(move || walk(&place, &tmpfs, files)))
}

/// One walk, by a server that knows nothing yet.
#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn walk(place: &Place, tmpfs: &Tmpfs, files: u64) -> Result<Vec<f64>> {
    let server = place.share(&tmpfs.path().to_string_lossy(), &[], "socket")?;
    let [before] = kib(server.pid(), ["VmRSS:"])?;
    let begin = Instant::now();
    let mut walk = Walk::over(server.socket())?;
    let walked = us_each(begin, files);
    let expected = usize::try_from(files + files.div_ceil(DIR_FILES))?;
    ensure!(walk.entries() == expected, "the walk found {} of {expected} entries", walk.entries());
    let [after] = kib(server.pid(), ["VmRSS:"])?;

    let driver = walk.driver();
    let steps = files.min(STEPS_MAX);
    let mut any = Noise(files);
    let mut made = Made::default();
    let directories = (0..files.div_ceil(DIR_FILES)).map(|directory| driver.lookup(ROOT, format!("d{directory}")));
    let directories = directories.collect::<Result<Vec<_>, _>>()?;
    made.0.extend(directories.iter().map(|directory| ForgetOne { nodeid: directory.nodeid, nlookup: 1 }));
    let begin = Instant::now();
    for _ in 0..steps {
        let directory = &directories[usize::try_from(any.below(u64::try_from(directories.len())?))?];
        let entry = driver.lookup(directory.nodeid, file_name(any.below(DIR_FILES)))?;
        made.0.push(ForgetOne { nodeid: entry.nodeid, nlookup: 1 });
    }
    let look_up = us_each(begin, steps);
    made.forget(driver)?;

    let begin = Instant::now();
    walk.forget()?;
    let forget = us_each(begin, files);
    Ok(vec![walked, (after - before) * 1024.0 / files as f64, look_up, forget])
}
