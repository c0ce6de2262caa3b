//! What the tests share: mounts on both paths, and a watchdog, so that no test hangs.
#![allow(dead_code, missing_docs, clippy::unwrap_used, reason = "each test uses some of it")]

pub mod sources;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ferry_fuse::{Export, Options, Path, uring_verdict};
use ferry_vfs::FileSystem;
use rustix::thread::Pid;

/// No test takes longer, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(150);

/// What is waited for comes in less, unless it never comes, even if the machine has much else to do.
const SOON: Duration = Duration::from_secs(5);

/// Both paths to the kernel, or those that there are here.
pub fn paths() -> Vec<Path> {
    if !std::path::Path::new("/dev/fuse").exists() {
        ferry_skip::skip!("there is no /dev/fuse");
        return Vec::new();
    }
    let mut paths = vec![Path::Devfuse];
    match uring_verdict().reason {
        None => paths.push(Path::Uring),
        Some(reason) => ferry_skip::skip!("no FUSE over io_uring: {reason}"),
    }
    paths
}

/// A mount, and a watchdog that aborts it.
pub struct Mounted {
    pub export: Option<Export>,
    pub at: PathBuf,
    tmp: Option<tempfile::TempDir>,
    _done: Sender<()>,
}

/// Options without surprises: what is asked for arrives.
pub fn plain(path: Path) -> Options {
    Options { path, passthrough: Some(false), ..Options::default() }
}

pub fn mount(source: Arc<dyn FileSystem>, options: Options) -> Mounted {
    let tmp = tempfile::tempdir().unwrap();
    let at = tmp.path().to_owned();
    let export = Export::mount(&at, source, options).unwrap();
    let number = export.connection_number();
    let (done, ended) = channel::<()>();
    let watched = at.clone();
    std::thread::spawn(move || {
        // Nothing is ever sent: it ends when the mount is dropped.
        if ended.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("the watchdog aborts connection {number}");
            abort(&watched, number);
        }
    });
    Mounted { export: Some(export), at, tmp: Some(tmp), _done: done }
}

/// Ends a connection, through the control file system or, where that is not mounted, by force.
pub fn abort(at: &std::path::Path, number: u32) {
    use rustix::mount::{UnmountFlags, unmount};
    if std::fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1").is_err() {
        let _ = unmount(at, UnmountFlags::FORCE);
    }
}

impl Mounted {
    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    pub fn export(&self) -> &Export {
        self.export.as_ref().unwrap()
    }

    /// Stops the export, within reason.
    pub fn stop(mut self) {
        let start = Instant::now();
        self.export.take().unwrap().stop();
        assert!(start.elapsed() < Duration::from_secs(60), "stopping took {:?}", start.elapsed());
        assert!(!is_mounted(&self.at));
    }
}

pub fn is_mounted(at: &std::path::Path) -> bool {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == at.to_str())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.export = None;
        if is_mounted(&self.at)
            && let Some(tmp) = self.tmp.take()
        {
            // Never remove files through a mount that stayed.
            let _ = tmp.keep();
        }
    }
}

/// Waits for something, but not for long.
pub fn wait_until(what: &str, done: impl FnMut() -> bool) {
    wait_within(SOON, what, done);
}

/// Waits for something, for no longer than this.
pub fn wait_within(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < limit, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Threads of this process whose names begin so.
pub fn threads(name: &str) -> Vec<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let comm = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    let named = tasks.filter(|task| comm(task).starts_with(name));
    named.filter_map(|task| Pid::from_raw(task.file_name().to_str()?.parse().ok()?)).collect()
}

/// How many there are.
pub fn threads_named(name: &str) -> usize {
    threads(name).len()
}

/// Whether a thread lets all others go first.
pub fn gives_way(thread: Pid) -> bool {
    // SAFETY: takes and touches no memory.
    unsafe { libc::sched_getscheduler(thread.as_raw_nonzero().get()) == libc::SCHED_IDLE }
}

/// Keeps the calling thread on a CPU.
pub fn stay_on(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
