//! What servers of idle guests cost: no thread of them wakes up.

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

/// Tries until it succeeds.
fn retry<T>(mut connect: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(client) = connect() {
            return client;
        }
        assert!(Instant::now() < end, "no connection within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reads the sector at this byte of a disk; returns the status.
fn read_sector(driver: &mut Driver, at: u64) -> u8 {
    let header = [&[0; 8][..], &(at / 512).to_le_bytes()].concat();
    let ticket = driver.queue(0).submit(&[&header], &[512, 1]).unwrap();
    *driver.queue(0).wait_for(ticket, LIMIT).unwrap().reply.last().unwrap()
}

/// Starts a server, sends it a request, and waits for a time in which none of its threads wakes up. Then calls `after`.
fn sleeps<C>(args: &[&str], socket: &Path, use_it: impl FnOnce(&Path) -> C, after: impl FnOnce(C)) {
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
        if used.iter().map(|used| used.voluntary_switches).sum::<u64>() == 0 {
            break;
        }
        assert!(Instant::now() < end, "{args:?}: an idle server wakes up: {used:?}");
    }
    after(client);
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
            let use_it = |socket: &Path| {
                let mut driver = driver(socket, 1, 0);
                driver.init().unwrap();
                driver.getattr(ROOT).unwrap();
                driver
            };
            sleeps(&["share", data, "--virtiofs", fs], fs.as_ref(), use_it, drop);
        });
        scope.spawn(|| {
            let use_it = |socket: &Path| {
                let mut driver = driver(socket, 0, 0);
                assert_eq!(read_sector(&mut driver, 0), 0);
                driver
            };
            // It sleeps until its file changes, each time.
            let grow = |mut driver: Driver| {
                for bytes in [2 << 20, 3 << 20] {
                    assert_ne!(read_sector(&mut driver, bytes - 512), 0, "it is past the end");
                    std::fs::File::options().write(true).open(disk).unwrap().set_len(bytes).unwrap();
                    retry(|| (read_sector(&mut driver, bytes - 512) == 0).then_some(()));
                }
            };
            sleeps(&["disk", disk, "--vhost-user", blk], blk.as_ref(), use_it, grow);
        });
        scope.spawn(|| {
            let use_it = |socket: &Path| {
                let mut driver = driver(socket, 0, 1);
                let ticket = driver.queue(0).submit(&[&version], &[8192]).unwrap();
                assert_eq!(driver.queue(0).wait_for(ticket, LIMIT).unwrap().reply[..4], version[..4]);
                driver
            };
            sleeps(&["share", data, "--9p", &format!("vhost-user:{device}")], device.as_ref(), use_it, drop);
        });
        scope.spawn(|| {
            let use_it = |socket: &Path| {
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
                stream
            };
            sleeps(&["share", data, "--9p", &format!("unix:{unix}")], unix.as_ref(), use_it, drop);
        });
    });
}
