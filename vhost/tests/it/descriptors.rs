//! A process that has no descriptors left.

use crate::toy;

use std::fs::File;
use std::time::Duration;

use ferry_driver::Driver;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use toy::{GATED, QUEUES, Toy, answers, ask, config, serve};
use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::eventfd::EventFd;

/// Opens files until there is no descriptor left.
fn take_all_descriptors() -> Vec<File> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

#[test]
fn takeover_works_without_free_descriptors() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let toy = Toy { spares: 4, ..Toy::default() };
    let (_socket, _server) = serve(&path, toy.clone());
    let mut driver = Driver::connect(&path, config()).unwrap();
    let left = take_all_descriptors();
    let gate = toy.gate.lock().unwrap();
    let blocked = ask(&mut driver, 0, GATED | 2).unwrap();
    for number in 0..3 {
        let ticket = ask(&mut driver, 0, 2 * number).unwrap();
        let reply = driver.queue(0).wait_for(ticket, Duration::from_secs(10)).unwrap().reply;
        assert!(answers(2 * number, &reply));
    }
    drop(gate);
    assert!(answers(GATED | 2, &driver.queue(0).wait_for(blocked, Duration::from_secs(10)).unwrap().reply));
    drop(left);
}

#[test]
fn a_message_waits_for_room_for_its_descriptor() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut frontend = Frontend::connect(&path, QUEUES as u64).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.set_features(features).unwrap();
    frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(VhostUserProtocolFeatures::MQ).unwrap();
    let event = EventFd::new(0).unwrap();
    let left = take_all_descriptors();
    frontend.set_vring_call(0, &event).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(left);
    assert_eq!(frontend.get_queue_num().unwrap(), QUEUES as u64, "the conversation goes on");
}

#[test]
fn queues_work_without_free_descriptors() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    let (_socket, _server) = serve(&path, Toy::default());
    let mut driver = Driver::connect(&path, config()).unwrap();
    let left = take_all_descriptors();
    for on in [false, true] {
        driver.enable(0, on).unwrap();
    }
    let ticket = ask(&mut driver, 0, 2).unwrap();
    assert!(answers(2, &driver.queue(0).wait_for(ticket, Duration::from_secs(10)).unwrap().reply));
    drop(left);
}
