//! Servers that are killed while they notify the kernel of changes. Such a thread may be unable to end before the mount.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, MountOptions, Mounted, Pair, Site};
use ferry_tests::{Place, directory};
use tempfile::TempDir;

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The number of kills: only some hit a blocked notification.
const ROUNDS: u32 = 20;
/// The number of callers on each mount, all in the same few directories.
const CALLERS: u32 = 3;
/// The maximum time until a killed server and its callers have ended. It usually takes milliseconds; a hang lasts until the
/// connection is aborted.
const SOON: Duration = Duration::from_secs(30);
/// The maximum time of a round, longer than [`SOON`]. After that a watchdog aborts the connections.
const LIMIT: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_millis(5);

/// Callers that change files of which the other mount is notified.
fn storm(pair: &Pair) -> Vec<Child> {
    let start = |seed: u32| {
        let mut command = Command::new(PROBE);
        command.args(["--role", "storm", ".", &seed.to_string(), "600"]).stderr(Stdio::null());
        pair.sites[seed as usize % 2].spawn(&mut command)
    };
    (0..2 * CALLERS).map(start).collect()
}

/// Waits until the mount of a killed server returns errors to new and waiting callers.
#[track_caller]
fn assert_dead(mountpoint: &Path, end: Instant) {
    let outside = Site::on_host(Path::new("/"));
    for (what, script) in [("a statfs", "exec stat -f \"$0\""), ("a new file", ": > \"$0/new\"")] {
        loop {
            let ran = outside.run(Command::new("sh").args(["-c", script]).arg(mountpoint).env("LC_ALL", "C"), SOON);
            assert_ne!(ran.status, 0, "{what}: a dead server has replied: {ran:?}");
            if ran.err.contains("endpoint is not connected") {
                break;
            }
            assert!(Instant::now() < end, "{what}, {SOON:?} after the end: {ran:?}");
            std::thread::sleep(TICK);
        }
    }
}

/// The control file system of FUSE connections, in a separate mount.
struct Controls(TempDir);

impl Controls {
    fn mount() -> Self {
        let directory = directory(Place::Disk);
        let status = Command::new("mount").args(["-t", "fusectl", "none"]).arg(directory.path()).status().unwrap();
        assert!(status.success(), "the controls of FUSE connections cannot be mounted");
        Self(directory)
    }

    /// Returns the identity of a connection: unlike its number, it is never reused.
    fn find(&self, number: &OsStr) -> Option<u64> {
        std::fs::metadata(self.0.path().join(number)).map(|found| found.ino()).ok()
    }
}

impl Drop for Controls {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// Kills the server of two mounts in use, and checks the state of both. Returns how long callers waited.
fn kill(pair: &Pair, children: &mut [Child]) -> Duration {
    let all = Controls::mount();
    let controls = pair.controls().map(|controls| {
        let number = controls.file_name().unwrap().to_owned();
        (all.find(&number).expect("it is mounted"), number)
    });
    let begin = Instant::now();
    pair.kill();
    let end = begin + SOON;
    let mut held = 0;
    for child in children {
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > end {
                held += 1;
                pair.sites[0].stop(child);
                break;
            }
            std::thread::sleep(TICK);
        }
    }
    let waited = begin.elapsed();
    assert_eq!(held, 0, "callers still wait for the dead server, which was {:?}", pair.wait(Duration::ZERO));
    assert!(pair.wait(end.saturating_duration_since(Instant::now())).is_some(), "the server is still dying");
    pair.paths().into_iter().for_each(|path| assert_dead(path, end));
    for path in pair.paths() {
        let cell: Cell = "mem_auto".parse().unwrap();
        let next = Mounted::again(cell, path, &MountOptions { limit: LIMIT, ..MountOptions::default() });
        std::fs::write(path.join("file"), "text").unwrap();
        assert_eq!(std::fs::read_to_string(path.join("file")).unwrap(), "text");
        // It also searches for processes that name the mount point, as guardians do.
        next.finish();
    }
    let left = || controls.iter().filter(|(found, number)| all.find(number) == Some(*found)).count();
    let end = Instant::now() + SOON;
    while left() > 0 {
        assert!(Instant::now() < end, "{} connections of the dead server are left", left());
        std::thread::sleep(TICK);
    }
    waited
}

fn killed(cells: [&str; 2]) {
    let [one, two]: [Cell; 2] = cells.map(|name| name.parse().unwrap());
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS {
        let Some(pair) = Pair::new([&one, &two], LIMIT) else { return };
        let mut children = storm(&pair);
        std::thread::sleep(Duration::from_millis(u64::from(200 + 13 * (round % 7))));
        for child in &mut children {
            assert!(child.try_wait().unwrap().is_none(), "round {round}: the storm is over: {}", pair.said());
        }
        longest = longest.max(kill(&pair, &mut children));
    }
    println!("{ROUNDS} kills; the last caller was told after {longest:?} at most");
}

#[test]
fn by_io_uring() {
    killed(["mem_uring_always", "mem_uring_always"]);
}

#[test]
fn by_dev_fuse() {
    killed(["mem_devfuse_always", "mem_devfuse_always"]);
}
