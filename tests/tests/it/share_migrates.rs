//! What a front end may ask of a server about its guest's state (vhost-user, "Migrating back-end state"). That guests go on elsewhere is in
//! `share_survives` and `qemu_migration`.

use std::fs;
use std::io::{PipeWriter, pipe};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, Error, ROOT};
use ferry_tests::{Options, Place, SETTLE, Share};

/// Longer than anything takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

fn config() -> Config {
    Config { memory_bytes: 8 << 20, timeout: LIMIT, ..Config::default() }
}

/// Threads of this process, in which the server is, that transfer a state.
fn transfers() -> usize {
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "migration").count()
}

/// Waits until so many are under way. A thread takes its name when it begins.
#[track_caller]
fn are_under_way(count: usize) {
    let end = Instant::now() + SETTLE;
    while transfers() != count {
        assert!(Instant::now() < end, "{} transfers are under way, not {count}", transfers());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Has a server begin to read a state, of which nothing comes.
fn begin(driver: &Driver) -> Result<PipeWriter, Error> {
    let (theirs, ours) = pipe().unwrap();
    driver.begin_load(theirs.into()).map(|()| ours)
}

/// Each has a thread of the server's, and up to a gigabyte of its memory.
#[test]
fn one_state_is_transferred_at_a_time() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::with(Place::Memory, Options::default());
    let driver = Driver::negotiate(&share.socket, config()).unwrap();
    let first = begin(&driver).unwrap();
    for _ in 0..2 {
        assert!(begin(&driver).is_err(), "the first one is still under way");
        are_under_way(1);
    }
    // QEMU closes its end of one that it gives up, and asks for nothing; the next one may follow at once.
    drop(first);
    let second = begin(&driver).unwrap();
    are_under_way(1);
    // Nobody can ask for its outcome any more.
    drop(driver);
    are_under_way(0);
    drop(second);
}

/// A window is its guest's, not its server's.
#[test]
fn a_guest_without_a_window_migrates_after_one_that_has_had_one() {
    let share = Share::with(Place::Memory, Options::default());
    let mut guest = Driver::connect(&share.socket, Config { window: true, ..config() }).unwrap();
    let (bytes, line) = guest.window().unwrap();
    assert!(bytes > 0);
    guest.init().unwrap();
    assert!(guest.save().is_err(), "what it maps cannot be taken along");
    drop((guest, line));
    let mut next = Driver::connect(&share.socket, config()).unwrap();
    next.init().unwrap();
    let state = next.save().unwrap();
    next.migrate(&share.socket, &state).unwrap();
    assert!(next.getattr(ROOT).is_ok());
}
