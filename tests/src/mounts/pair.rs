//! Two mounts of one source by one process: what one changes, the other shows.

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use super::mounted::prepare;
use super::{
    Cell, Emergency, NinePServer, RunningProgram, Site, Transport, Watchdog, WithUring, assert_nothing_left, ferry,
    mount_entry,
};
use crate::{Place, SETTLE, directory};

/// How long the program may take until both are there.
const START: Duration = Duration::from_secs(30);

/// Two mounts. Everything is gone when it is dropped.
#[derive(Debug)]
pub struct Pair {
    /// Where they are, and how to run programs there.
    pub sites: [Site; 2],
    emergencies: [Emergency; 2],
    watchdogs: [Watchdog; 2],
    server: Arc<Mutex<RunningProgram>>,
    _remote: Option<NinePServer>,
    _directories: [TempDir; 2],
    _uring: Option<WithUring>,
}

impl Pair {
    /// Mounts the source of a cell by its path, and again by that of another; `None`, with a word why, where that
    /// cannot be done here. All is ended after `limit`.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn new(cells: [&Cell; 2], limit: Duration) -> Option<Self> {
        Self::with_each(cells, limit, [&[], &[]])
    }

    /// The same, with further arguments for each.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn with_each(cells: [&Cell; 2], limit: Duration, args: [&[&str]; 2]) -> Option<Self> {
        let uring = match super::missing() {
            Some(missing) => Err(missing),
            None => super::with_uring(),
        };
        if let Err(why) = uring
            && (super::missing().is_some() || cells.iter().any(|cell| cell.road == Transport::Uring))
        {
            ferry_skip::skip!("{} and {}: {why}", cells[0], cells[1]);
            return None;
        }
        let directories = [directory(Place::Disk), directory(Place::Disk)];
        let (source, remote) = prepare(cells[0].source, &directories[0].path().join("below"))?;
        let paths = directories.each_ref().map(|directory| directory.path().join("mnt"));
        let mut command = ferry(["share"]);
        for ((cell, path), args) in cells.iter().zip(&paths).zip(args) {
            std::fs::create_dir(path).unwrap();
            command.arg(&source).arg("--mount").arg(path).arg("--allow-other").args(cell.flags_of_one_of_several());
            command.args(args);
        }
        let server = Arc::new(Mutex::new(RunningProgram::new(&mut command)));
        let emergency = |path: &PathBuf| Emergency::new(path, Some(Arc::clone(&server)));
        let emergencies = paths.each_ref().map(emergency);
        let watchdogs = emergencies.each_ref().map(|emergency| Watchdog::new(emergency.clone(), limit));
        let sites = [0, 1].map(|number| Site::new(&paths[number], emergencies[number].clone()));
        let (_remote, _directories, _uring) = (remote, directories, uring.ok());
        let pair = Self { sites, emergencies, watchdogs, server, _remote, _directories, _uring };
        pair.wait_for_mounts();
        Some(pair)
    }

    fn wait_for_mounts(&self) {
        let end = Instant::now() + START;
        while self.paths().iter().any(|path| mount_entry(path).is_none()) {
            assert!(!self.has_ended(), "ferry ended: {}", self.said());
            assert!(Instant::now() < end, "not both mounts after {START:?}: {}", self.said());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn has_ended(&self) -> bool {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).wait(Duration::ZERO).is_some()
    }

    /// The mount points.
    pub fn paths(&self) -> [&Path; 2] {
        self.sites.each_ref().map(|site| site.path.as_path())
    }

    /// What the program has said so far.
    pub fn said(&self) -> String {
        let (out, err) = self.server.lock().unwrap_or_else(PoisonError::into_inner).said();
        out + &err
    }

    /// Kills the program as `kill -9` does, and does not wait for its end.
    pub fn kill(&self) {
        let pid = self.server.lock().unwrap_or_else(PoisonError::into_inner).pid();
        kill_process(pid, Signal::KILL).unwrap();
    }

    /// The end of the program, if it comes within `limit`.
    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).wait(limit)
    }

    /// The directories of the controls of both connections.
    ///
    /// # Panics
    /// When one is not mounted.
    pub fn controls(&self) -> [PathBuf; 2] {
        self.emergencies.each_ref().map(|emergency| emergency.controls().unwrap())
    }

    /// Ends the program as `kill` does, and checks that nothing is left.
    ///
    /// # Panics
    /// When anything is left, the program failed, or something had hung.
    #[track_caller]
    pub fn finish(mut self) {
        let pid = self.server.lock().unwrap_or_else(PoisonError::into_inner).pid();
        kill_process(pid, Signal::TERM).unwrap();
        let status = self.server.lock().unwrap_or_else(PoisonError::into_inner).wait(SETTLE);
        let said = self.said();
        let expired = self.watchdogs.each_mut().map(Watchdog::dismiss);
        assert_eq!(expired, [false, false], "it took too long: {said}");
        let Some(status) = status else { panic!("ferry runs on after SIGTERM: {said}") };
        assert!(status.success() && !said.contains("panicked"), "{status}: {said}");
        self.paths().into_iter().for_each(assert_nothing_left);
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.emergencies.iter().for_each(Emergency::end);
    }
}
