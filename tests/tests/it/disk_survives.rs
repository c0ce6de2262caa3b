//! Disks whose server is killed with SIGKILL under load and started again: no request is lost, doubled or torn.

use std::process::Command;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver};
use ferry_tests::disks::model::{Random, SECTOR_BYTES};
use ferry_tests::disks::{FEATURES, FEATURES_WITHOUT_CACHE, Load, Process, check_image, tool};
use ferry_tests::{Place, directory};

const SECTORS: usize = 8192;
const BYTES: u64 = (SECTORS * SECTOR_BYTES) as u64;
/// Of images: large enough that most writes are to places where none was before, and change the image's tables.
const IMAGE_SECTORS: usize = 32 * SECTORS;
const QUEUES: usize = 2;
/// Longer than anything here takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);
/// How many times a server is killed in a long test.
const MANY: usize = 100;

/// A way of serving and driving a disk.
#[derive(Clone, Copy, Debug)]
struct Way {
    packed: bool,
    args: &'static [&'static str],
    features: u64,
    discards: bool,
    sectors: usize,
}

const DIRECT: Way =
    Way { packed: false, args: &["--queues", "2"], features: FEATURES, discards: true, sectors: SECTORS };
const PACKED: Way = Way { packed: true, ..DIRECT };
const THROUGH: Way =
    Way { args: &["--queues", "2", "--cache", "writethrough"], features: FEATURES_WITHOUT_CACHE, ..PACKED };
const CACHED: Way = Way { args: &["--queues", "2", "--cache", "writeback", "--poll-us", "0"], ..DIRECT };
const SYNCHRONOUS: Way = Way { args: &["--queues", "2", "--io", "sync"], ..DIRECT };
// What is discarded in an image may be anything that was there before.
const QCOW2: Way =
    Way { args: &["--queues", "2", "--format", "qcow2"], discards: false, sectors: IMAGE_SECTORS, ..DIRECT };
const QCOW2_DIRECT: Way =
    Way { args: &["--queues", "2", "--format", "qcow2", "--cache", "none"], packed: true, ..QCOW2 };

impl Way {
    fn connect(self, server: &Process) -> Driver {
        let config = Config {
            first_queues: 0,
            queues: QUEUES,
            queue_size: if self.packed { 200 } else { 128 },
            packed: self.packed,
            inflight: true,
            memory_bytes: 32 << 20,
            device_features: self.features,
            timeout: LIMIT,
            connect_within: LIMIT,
            ..Config::default()
        };
        Driver::connect(&server.socket, config).unwrap()
    }

    /// Kills the server in the middle of things, again and again.
    #[track_caller]
    fn survives(self, rounds: usize, mut server: Process) -> Process {
        let mut driver = self.connect(&server);
        let mut load = Load::new(&mut driver, self.sectors, 7, self.discards);
        let mut random = Random::new(rounds as u64);
        let (mut killed_under_way, begin) = (0, Instant::now());
        for _ in 0..rounds {
            // It dies at another moment every time, and sometimes before it has answered anything.
            let more = random.below(40) as u64;
            load.run(&mut driver, more, Duration::from_micros(random.below(20_000) as u64), LIMIT);
            load.fill(&mut driver);
            let moment = Duration::from_micros(random.below(300) as u64);
            let pause = Instant::now();
            while pause.elapsed() < moment {
                std::hint::spin_loop();
            }
            server.kill();
            killed_under_way += load.under_way();
            server.start();
            driver.reattach().unwrap();
        }
        load.drain(&mut driver, LIMIT);
        load.read_all(&mut driver, LIMIT);
        println!(
            "{self:?}: {rounds} kills, {} requests, {killed_under_way} not yet answered at a kill, {:?}",
            load.ended(),
            begin.elapsed()
        );
        assert!(killed_under_way > 0 && server.is_running());
        if self.discards {
            load.model().check_all(&std::fs::read(&server.file).unwrap());
        }
        server
    }
}

fn survives_raw(way: Way, rounds: usize) {
    way.survives(rounds, Process::new(Place::Disk, BYTES, way.args));
}

fn survives_qcow2(way: Way, rounds: usize) {
    let directory = directory(Place::Disk);
    let file = directory.path().join("disk");
    let image = |args: &[&str]| Command::new(tool("qemu-img")).args(args).output().unwrap();
    let path = file.to_str().unwrap();
    let created = image(&["create", "-q", "-f", "qcow2", path, &(IMAGE_SECTORS * SECTOR_BYTES).to_string()]);
    assert!(created.status.success(), "{created:?}");
    let mut server = way.survives(rounds, Process::of(file.clone(), directory, way.args));
    // After the last kill, too, the image is sound; unreferenced clusters are no damage.
    server.kill();
    let checked = check_image(&file);
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
}

#[test]
fn killed_under_split_rings() {
    survives_raw(DIRECT, 12);
}

#[test]
fn killed_under_packed_rings() {
    survives_raw(PACKED, 12);
}

#[test]
fn killed_with_an_image() {
    survives_qcow2(QCOW2, 12);
}

#[test]
#[ignore = "long: make test-all"]
fn killed_100_times_under_split_rings() {
    survives_raw(DIRECT, MANY);
}

#[test]
#[ignore = "long: make test-all"]
fn killed_100_times_under_packed_rings() {
    survives_raw(PACKED, MANY);
}

#[test]
#[ignore = "long: make test-all"]
fn killed_100_times_with_each_cache_and_engine() {
    survives_raw(THROUGH, MANY);
    survives_raw(CACHED, MANY);
    survives_raw(SYNCHRONOUS, MANY);
}

#[test]
#[ignore = "long: make test-all"]
fn killed_100_times_with_an_image() {
    survives_qcow2(QCOW2, MANY);
    survives_qcow2(QCOW2_DIRECT, MANY);
}

#[test]
fn the_next_server_starts_at_once_and_a_second_one_is_refused() {
    let mut server = Process::new(Place::Disk, BYTES, DIRECT.args);
    let mut driver = DIRECT.connect(&server);
    let mut load = Load::new(&mut driver, SECTORS, 3, true);
    load.run(&mut driver, 100, Duration::ZERO, LIMIT);
    let second = ferry_disk::open(&server.file, &ferry_disk::Options::default());
    assert!(second.err().unwrap().to_string().contains("is in use by another process"));
    server.kill();
    // What is killed holds no lock any more.
    drop(ferry_disk::open(&server.file, &ferry_disk::Options::default()).unwrap());
    server.start();
    driver.reattach().unwrap();
    load.run(&mut driver, 100, Duration::ZERO, LIMIT);
    load.drain(&mut driver, LIMIT);
    load.read_all(&mut driver, LIMIT);
}

/// A guest that has turned the cache off does not flush: the next server must know.
#[test]
fn a_cache_that_is_off_stays_off() {
    /// Where the configuration space says it (5.2.4).
    const WRITEBACK_AT: u32 = 32;
    for way in [DIRECT, PACKED] {
        let mut server = Process::new(Place::Disk, BYTES, way.args);
        let mut driver = way.connect(&server);
        for on in [1, 0, 0, 1, 0] {
            driver.write_config(WRITEBACK_AT, &[on]).unwrap();
            server.kill();
            server.start();
            driver.reattach().unwrap();
            assert_eq!(driver.read_config(WRITEBACK_AT, 1).unwrap(), [on]);
        }
        driver.reboot().unwrap();
        for restarted in [false, true] {
            if restarted {
                server.kill();
                server.start();
                driver.reattach().unwrap();
            }
            assert_eq!(driver.read_config(WRITEBACK_AT, 1).unwrap(), [0], "QEMU shows it after a reboot, too");
        }
    }
}

#[test]
fn a_reboot_drops_only_requests_in_flight() {
    for way in [DIRECT, PACKED] {
        let mut server = Process::new(Place::Disk, BYTES, way.args);
        let mut driver = way.connect(&server);
        let mut load = Load::new(&mut driver, SECTORS, 5, true);
        for killed in [false, true, false, true] {
            load.run(&mut driver, 200, Duration::ZERO, LIMIT);
            load.drain(&mut driver, LIMIT);
            if killed {
                server.kill();
                server.start();
                driver.reattach().unwrap();
            }
            load.reboot(&mut driver);
        }
        load.read_all(&mut driver, LIMIT);
    }
}
