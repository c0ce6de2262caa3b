#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::sync::{Arc, Mutex, mpsc};

use ferry_vfs::{BlockRange, Data, Disk, DiskFeatures, Errno, Geometry, Input, Output, Result};
use ferry_vhost::Device;
use ferry_wire::blk::{Config, DeviceFeatures, Range, Status};

use crate::Options;
use crate::device::Blk;
use crate::jobs::{self, Job};
use crate::state::{CopyBudget, State};

const BYTES: usize = 64 << 10;

/// A disk in memory with faulty sectors.
struct Mem {
    bytes: Mutex<Vec<u8>>,
    features: DiskFeatures,
}

/// The offset at which a read fails, ends early, or panics.
const BROKEN: u64 = 4096;
const SHORT: u64 = 8192;
const PANICS: u64 = 12288;

impl Mem {
    fn new(features: DiskFeatures) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(vec![1; BYTES]), features })
    }
}

fn span(at: &BlockRange) -> std::ops::Range<usize> {
    usize::try_from(at.offset).unwrap()..usize::try_from(at.end()).unwrap()
}

impl Disk for Mem {
    fn geometry(&self) -> Geometry {
        Geometry {
            bytes: self.bytes.lock().unwrap().len() as u64,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: 0,
            discard_bytes: 4096,
        }
    }

    fn features(&self) -> DiskFeatures {
        self.features
    }

    fn serial(&self) -> String {
        "mem".into()
    }

    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
        match at.offset {
            BROKEN => Err(Errno::IO),
            SHORT => Ok(Data::Bytes(out.put(&[0; 256]))),
            PANICS => panic!("a disk that panics"),
            _ => Ok(Data::Bytes(out.put(&self.bytes.lock().unwrap()[span(at)]))),
        }
    }

    fn write(&self, at: &BlockRange, _: bool, input: &mut dyn Input) -> Result<Data> {
        Ok(Data::Bytes(input.take(&mut self.bytes.lock().unwrap()[span(at)])))
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, _: bool, _: bool) -> Result<()> {
        self.bytes.lock().unwrap()[span(&BlockRange { offset, bytes, alignment: 1 })].fill(0);
        Ok(())
    }
}

fn run(state: &Arc<State>, job: Job) -> (Status, Vec<u8>) {
    let (tell, told) = mpsc::channel();
    jobs::run(state, job, None, move |reply| tell.send((reply.status, reply.data)).unwrap());
    told.recv().unwrap()
}

#[test]
fn slow_requests_always_get_a_reply() {
    let disk = Mem::new(DiskFeatures { slow: true, ..DiskFeatures::default() });
    let state = Arc::new(State::new(disk.clone(), true, "disk".into()));
    let at = |offset| BlockRange { offset, bytes: 512, alignment: 512 };
    let range = |offset, bytes| Range { offset, bytes, may_unmap: true };
    let write = Job::Write { at: at(1024), durable: true, bytes: vec![9; 512] };
    assert_eq!(run(&state, write), (Status::Ok, vec![]));
    assert_eq!(run(&state, Job::Read(at(1024))), (Status::Ok, vec![9; 512]));
    assert_eq!(run(&state, Job::Flush), (Status::Ok, vec![]));
    let zeroes = Job::WriteZeroes { ranges: vec![range(0, 512), range(256, 1024), range(0, 0)], durable: false };
    assert_eq!(run(&state, zeroes), (Status::Ok, vec![]));
    assert_eq!(disk.bytes.lock().unwrap()[..2048], [vec![0; 1280], vec![9; 256], vec![1; 512]].concat());
    for (offset, name) in [(BROKEN, "fails"), (SHORT, "ends early"), (PANICS, "panics")] {
        assert_eq!(run(&state, Job::Read(at(offset))), (Status::IoError, vec![]), "a read that {name}");
    }
    assert_eq!(run(&state, Job::Discard(vec![range(0, 512)])), (Status::Unsupported, vec![]));
    assert_eq!(run(&state, Job::Read(at(1536))), (Status::Ok, vec![1; 512]), "and others go on");
}

#[test]
fn the_cache_mode_is_the_negotiated_one() {
    let flush = DeviceFeatures::FLUSH;
    let wce = DeviceFeatures::CONFIG_WCE;
    for (may_cache, negotiated, wanted, writeback) in [
        (true, flush | wce, true, true),
        (true, flush | wce, false, false),
        (true, flush, true, true),
        // What a driver before it has chosen, this one does not see.
        (true, flush, false, true),
        (true, wce, true, false),
        (true, DeviceFeatures::default(), true, false),
        (false, flush | wce, true, false),
    ] {
        let state = State::new(Mem::new(DiskFeatures::default()), may_cache, "disk".into());
        state.negotiated(negotiated);
        state.set_writeback(wanted);
        assert_eq!(state.is_writeback(), writeback, "{may_cache} {negotiated:?} {wanted}");
        state.reset();
        assert_eq!(state.is_writeback(), may_cache && wanted, "the next driver sees what this one has chosen");
        state.begin();
        assert_eq!(state.is_writeback(), may_cache);
    }
}

/// QEMU shows the next driver what it has read under the current one.
#[test]
fn the_configuration_shows_the_cache_that_the_next_driver_gets() {
    let (flush, wce) = (DeviceFeatures::FLUSH, DeviceFeatures::CONFIG_WCE);
    for (negotiated, shown) in [(flush | wce, 1), (flush, 1), (DeviceFeatures::default(), 1), (wce, 0)] {
        let state = Arc::new(State::new(Mem::new(DiskFeatures::default()), true, "disk".into()));
        let device = Blk::new(Arc::clone(&state), Options::default());
        let shows = || device.config().unwrap()[Config::WRITEBACK_OFFSET];
        device.negotiated(&(), negotiated.0);
        assert_eq!(shows(), shown, "{negotiated:?}");
        assert_eq!(state.is_writeback(), shown == 1 && negotiated.contains(flush), "{negotiated:?}");
        device.reset(&());
        assert_eq!(shows(), shown, "{negotiated:?}");
        device.negotiated(&(), (flush | wce).0);
        assert_eq!(state.is_writeback(), shown == 1, "{negotiated:?}");
    }
}

#[test]
fn a_driver_that_does_not_see_the_block_size_may_use_sectors() {
    let state = State::new(Mem::new(DiskFeatures::default()), true, "disk".into());
    for (negotiated, block_bytes) in [(DeviceFeatures::FLUSH, 512), (DeviceFeatures::BLK_SIZE, 4096)] {
        state.negotiated(negotiated);
        assert_eq!(state.request_limits(4096).block_bytes, block_bytes);
        assert_eq!(state.limits(4096).block_bytes, 4096, "the configuration keeps it for the next driver");
    }
}

#[test]
fn the_offered_features_are_those_of_the_disk() {
    let device = |features, writeback| {
        let state = Arc::new(State::new(Mem::new(features), writeback, "disk".into()));
        Blk::new(state, Options { queues: 3, writeback, ..Options::default() })
    };
    let has = |device: &Blk, feature| DeviceFeatures(device.features()).contains(feature);
    let full = device(DiskFeatures { discard: true, ..DiskFeatures::default() }, true);
    for feature in [DeviceFeatures::FLUSH, DeviceFeatures::CONFIG_WCE, DeviceFeatures::DISCARD, DeviceFeatures::MQ] {
        assert!(has(&full, feature), "{feature:?}");
    }
    assert!(!has(&full, DeviceFeatures::RO));
    let read_only = device(DiskFeatures { read_only: true, discard: true, ..DiskFeatures::default() }, true);
    assert!(has(&read_only, DeviceFeatures::RO) && !has(&read_only, DeviceFeatures::DISCARD));
    assert!(!has(&read_only, DeviceFeatures::WRITE_ZEROES) && !has(&read_only, DeviceFeatures::FLUSH));
    let through = device(DiskFeatures::default(), false);
    assert!(!has(&through, DeviceFeatures::FLUSH) && !has(&through, DeviceFeatures::DISCARD));

    let config = full.config().unwrap();
    assert_eq!((config.len(), config[Config::WRITEBACK_OFFSET], config[34]), (Config::BYTES, 1, 3));
    let offset = u32::try_from(Config::WRITEBACK_OFFSET).unwrap();
    assert!(full.write_config(&(), offset, &[0]));
    assert_eq!(full.config().unwrap()[Config::WRITEBACK_OFFSET], 0);
    assert!(full.write_config(&(), offset, &[1, 0, 3, 0]), "a front end may write the word");
    assert_eq!(full.config().unwrap()[Config::WRITEBACK_OFFSET], 1);
    for (offset, bytes) in [
        (0, &[1][..]),
        (offset, &[1, 0, 4, 0]),
        (offset, &[1; 40]),
        (offset, &[]),
        (offset + 1, &[0]),
        (u32::MAX, &[1]),
    ] {
        assert!(!full.write_config(&(), offset, bytes), "{offset} {bytes:?}");
    }
    assert!(!through.write_config(&(), offset, &[1]), "a cache that nobody offered");
}

#[test]
fn a_changed_size_is_reported_once() {
    let disk = Mem::new(DiskFeatures::default());
    let state = State::new(disk.clone(), true, "disk".into());
    assert!(!state.refresh_geometry());
    disk.bytes.lock().unwrap().truncate(4096);
    assert!(state.refresh_geometry());
    assert!(!state.refresh_geometry());
    assert_eq!(state.limits(512).bytes, 4096);
}

#[test]
fn the_copy_budget_is_returned() {
    let budget = CopyBudget::default();
    let (first, second) = (budget.take(200 << 20), budget.take(56 << 20));
    assert!(first.is_some() && second.is_some());
    assert!(budget.take(1).is_none() && budget.take(usize::MAX).is_none());
    drop(second);
    assert!(budget.take((56 << 20) + 1).is_none());
    assert!(budget.take(56 << 20).is_some() && budget.take(56 << 20).is_some(), "each is dropped at once");
}
