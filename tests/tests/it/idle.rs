//! What servers of idle guests cost: no thread of them wakes up, but for those that look at something once a second.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use ferry_driver::measure::{Snapshot, serving};
use ferry_driver::{Config, Driver, ROOT};
use ferry_tests::mounts::{RunningProgram, ferry};
use ferry_tests::{Place, directory};

/// Longer than a start, or the time until a server sleeps, takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);
/// How long a server is idle while its wake-ups are counted. Its monitor looks for half a second after a request.
const IDLE: Duration = Duration::from_secs(1);
/// A disk looks each second whether its file has grown. Two such looks may be in one second.
const DISK_WAKES_MAX: u64 = 2;

/// Tries until it succeeds.
fn retry<T>(connect: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(client) = connect() {
            return client;
        }
        assert!(Instant::now() < end, "no connection within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Starts a server, sends it a request, and waits for a time in which its threads wake up no more often than that.
fn sleeps(args: &[&str], socket: &Path, wakes_max: u64, use_it: impl FnOnce(&Path) -> Box<dyn Send>) {
    let server = RunningProgram::new(&mut ferry(args));
    let client = use_it(socket);
    let outer = server.pid().as_raw_nonzero().get().unsigned_abs();
    let processes = [outer, serving(outer)];
    let end = Instant::now() + LIMIT;
    loop {
        let before = processes.map(|pid| Snapshot::take(pid).unwrap());
        std::thread::sleep(IDLE);
        let used = processes.iter().zip(&before).map(|(pid, before)| Snapshot::take(*pid).unwrap().since(before));
        let used: Vec<_> = used.collect();
        if used.iter().map(|used| used.voluntary_switches).sum::<u64>() <= wakes_max {
            break;
        }
        assert!(Instant::now() < end, "{args:?}: an idle server wakes up: {used:?}");
    }
    drop(client);
}

fn driver(socket: &Path, first_queues: usize, device_features: u64) -> Driver {
    let config = Config { first_queues, queues: 1, device_features, ..Config::default() };
    retry(|| Driver::connect(socket, config.clone()).ok())
}

#[test]
fn servers_of_idle_guests_sleep() {
    let place = directory(Place::Disk);
    let [data, disk] = ["data", "disk"].map(|name| place.path().join(name));
    std::fs::create_dir(&data).unwrap();
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    // One for each: a server that is being killed may still accept connections.
    let sockets = ["fs", "blk", "9p-device", "9p"].map(|name| place.path().join(name));
    let [data, disk, fs, blk, device, unix] =
        [&data, &disk, &sockets[0], &sockets[1], &sockets[2], &sockets[3]].map(|path| path.to_str().unwrap());
    let version = [&21u32.to_le_bytes()[..], &[100, 255, 255], &8192u32.to_le_bytes(), b"\x08\x009P2000.L"].concat();
    let attach = [&23u32.to_le_bytes()[..], &[104, 0, 0], &[0; 4], &[255; 4], &[0; 8]].concat();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sleeps(&["share", data, "--virtiofs", fs], fs.as_ref(), 0, |socket| {
                let mut driver = driver(socket, 1, 0);
                driver.init().unwrap();
                driver.getattr(ROOT).unwrap();
                Box::new(driver)
            });
        });
        scope.spawn(|| {
            sleeps(&["disk", disk, "--vhost-user", blk], blk.as_ref(), DISK_WAKES_MAX, |socket| {
                let mut driver = driver(socket, 0, 0);
                let ticket = driver.queue(0).submit(&[&[0; 16]], &[512, 1]).unwrap();
                assert_eq!(driver.queue(0).wait_for(ticket, LIMIT).unwrap().reply.last(), Some(&0));
                Box::new(driver)
            });
        });
        scope.spawn(|| {
            sleeps(&["share", data, "--9p", &format!("vhost-user:{device}")], device.as_ref(), 0, |socket| {
                let mut driver = driver(socket, 0, 1);
                let ticket = driver.queue(0).submit(&[&version], &[8192]).unwrap();
                assert_eq!(driver.queue(0).wait_for(ticket, LIMIT).unwrap().reply[..4], version[..4]);
                Box::new(driver)
            });
        });
        scope.spawn(|| {
            sleeps(&["share", data, "--9p", &format!("unix:{unix}")], unix.as_ref(), 0, |socket| {
                let mut stream = retry(|| UnixStream::connect(socket).ok());
                stream.write_all(&version).unwrap();
                let mut reply = [0; 21];
                stream.read_exact(&mut reply).unwrap();
                assert_eq!(reply[..4], version[..4]);
                // One that does not attach is waited for.
                stream.write_all(&attach).unwrap();
                let mut reply = [0; 20];
                stream.read_exact(&mut reply).unwrap();
                assert_eq!(reply[..5], [20, 0, 0, 0, 105]);
                Box::new(stream)
            });
        });
    });
}
