//! A process that has no descriptors left.

use crate::toy;

use std::fs::File;
use std::time::Duration;

use ferry_driver::Driver;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use toy::{Toy, answers, ask, config, serve};

#[test]
fn queues_go_on_without_any_descriptor_left() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut driver = Driver::connect(&path, config()).unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
    let left: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    for on in [false, true] {
        driver.enable(0, on).unwrap();
    }
    let ticket = ask(&mut driver, 0, 2).unwrap();
    assert!(answers(2, &driver.queue(0).wait_for(ticket, Duration::from_secs(10)).unwrap().reply));
    drop(left);
}
