//! The process that keeps a guest's state for the next server: what it holds, and when it ends.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferry_driver::{Driver, ROOT};
use ferry_tests::Place;
use ferry_tests::survivor::Survivor;
use ferry_wire::fuse::abi::LK_FLOCK;
use rustix::process::{Signal, kill_process};

use crate::share_survives::{O_RDWR, is_flocked, wrlck};

#[test]
fn a_keeper_holds_nothing_that_its_server_inherited() {
    let directory = ferry_tests::directory(Place::Memory);
    let path = directory.path().join("inherited");
    fs::write(&path, "").unwrap();
    // Not close-on-exec.
    let _inherited = rustix::fs::open(&path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let survivor = Survivor::new(Place::Memory, &[]);
    let _driver = survivor.connect();
    let keeper = survivor.keeper().unwrap().as_raw_nonzero();
    let held: Vec<_> = fs::read_dir(format!("/proc/{keeper}/fd")).unwrap().flatten().map(|fd| fd.path()).collect();
    assert!(held.len() > 4, "{held:?}");
    assert!(held.iter().all(|fd| fs::read_link(fd).is_ok_and(|file| file != path)));
}

#[test]
fn a_share_continues_without_its_keeper() {
    let server = Survivor::new(Place::Memory, &["--tag", "t"]);
    let mut guest = server.connect();
    kill_process(server.keeper().unwrap(), Signal::KILL).unwrap();
    // A message that the keeper cannot answer, and the ones after it.
    for _ in 0..3 {
        assert_eq!(guest.config_space().unwrap().0, "t");
        assert!(guest.getattr(ROOT).is_ok());
        guest.reboot().unwrap();
        guest.init().unwrap();
    }
    assert!(server.said().contains("a restart of this server will lose its guest"), "{}", server.said());
}

/// A share that is served to a guest with an open file that has a `flock`.
fn with_flock(log: &'static str) -> (Survivor, Driver, PathBuf) {
    let mut server = Survivor::new(Place::Memory, &[]);
    server.end();
    server.log = log;
    server.start();
    let mut guest = server.connect();
    let (file, open) = guest.create(ROOT, "file", O_RDWR, 0o644).unwrap();
    guest.setlk(file.nodeid, open.fh, 5, wrlck(0, 9), LK_FLOCK).unwrap();
    let path = server.path.join("file");
    assert!(is_flocked(&path));
    (server, guest, path)
}

#[test]
fn a_server_reports_remaining_state_at_its_end() {
    let (mut server, guest, path) = with_flock("info");
    let said = server.end_by(Signal::TERM);
    let last = said.lines().last().unwrap();
    let keeper = server.keeper().unwrap();
    assert!(
        last.contains("ferry-keeper holds") && last.contains(&format!("kill {}", keeper.as_raw_nonzero())),
        "{said}"
    );
    assert!(is_flocked(&path));
    // Where nobody is left, there is nothing to be said.
    drop(guest);
    server.start();
    server.connect();
    while server.keeper().is_some() && is_flocked(&path) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let said = server.end_by(Signal::TERM);
    assert!(!said.contains("ferry-keeper"), "{said}");
    server.wait_for_the_keeper();
}

#[test]
fn signals_end_a_keeper_and_close_its_descriptors() {
    for signal in [Signal::TERM, Signal::INT] {
        let (mut server, guest, path) = with_flock("warn");
        server.end();
        assert!(is_flocked(&path));
        kill_process(server.keeper().unwrap(), signal).unwrap();
        server.wait_for_the_keeper();
        assert!(!is_flocked(&path));
        assert_eq!(fs::read_dir(server.state()).unwrap().count(), 0, "its socket is gone, too");
        // The next server begins afresh.
        drop(guest);
        server.start();
        assert!(server.connect().getattr(ROOT).is_ok());
    }
}

#[test]
fn one_signal_ends_a_server_with_its_keeper() {
    let (mut server, guest, path) = with_flock("info");
    let said = server.end_by(Signal::QUIT);
    assert!(!said.contains("ferry-keeper"), "{said}");
    server.wait_for_the_keeper();
    assert!(!is_flocked(&path));
    drop(guest);
}

/// What a guest holds that ends while there is no server; the next one `comes` soon, or does not.
fn ends_alone(comes: bool) {
    let (mut server, guest, path) = with_flock("info");
    server.kill();
    drop(guest);
    if comes {
        server.start();
    }
    let begun = Instant::now();
    while is_flocked(&path) {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(10));
    }
    if comes {
        assert!(server.said().contains("the previous guest is gone"), "{}", server.said());
        server.end();
    }
    server.wait_for_the_keeper();
}

#[test]
fn a_guest_that_ends_without_a_server_is_released_soon() {
    ends_alone(false);
}

#[test]
fn the_next_server_does_not_continue_an_ended_guest() {
    ends_alone(true);
}
