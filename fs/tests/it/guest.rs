//! The examples in a real guest, over virtio-fs.
use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::suites::{Fsx, Pjdfstest};
use common::{GREET, MISTAKE, Mistaken, Server, WORK};
use ferry_fs::virtiofs::{Export, Options};
use ferry_tests::{MOUNTPOINT, Place, TIMEOUT, directory, guest_on, run};
use rustix::process::Signal;

/// Serves an example to a guest that runs a shell script in it.
fn in_guest(name: &str, flags: &[&str], script: &str, timeout: Duration) -> ferry_tests::GuestResult {
    let directory = directory(Place::Memory);
    let socket = directory.path().join("s");
    let mut server = Server::start(name, "virtiofs", &socket, &[&["--tag", "t"], flags].concat());
    let ran = run(guest_on(&socket, ["sh", "-euc", script]), timeout);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists(), "the socket is left behind");
    ran
}

#[test]
fn hello_greets() {
    in_guest("hello", &[], GREET, TIMEOUT).ok();
}

#[test]
fn toyfs_works() {
    for cache in ["none", "auto", "always"] {
        in_guest("toyfs", &["--cache", cache], WORK, TIMEOUT).ok();
    }
}

#[test]
fn toyfs_passes_pjdfstest() {
    Pjdfstest::new().check(MOUNTPOINT, |script| in_guest("toyfs", &[], script, TIMEOUT).out);
}

#[test]
fn toyfs_passes_fsx() {
    let suite = Fsx::new();
    for (seed, cache) in [(1, "none"), (2, "auto"), (3, "always")] {
        in_guest("toyfs", &["--cache", cache], &suite.script(seed), TIMEOUT).ok();
    }
}

#[test]
fn a_panic_fails_only_its_caller() {
    let directory = directory(Place::Memory);
    let socket = directory.path().join("s");
    let options = Options { tag: Some("t".parse().unwrap()), queues: 1, ..Options::default() };
    let export = Export::listen(&socket, Arc::new(Mistaken), options).unwrap();
    run(guest_on(&socket, ["sh", "-euc", MISTAKE]), TIMEOUT).ok();
    export.stop();
}
