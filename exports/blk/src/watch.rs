//! Detects changes of a disk's size.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_engine::io_hints;
use ferry_vfs::SizeChange;
use ferry_vhost::Server;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::state::State;

/// The interval of checks while the disk is being written, or if its changes are not reported.
const INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A few of `struct inotify_event` without a name.
const EVENTS_BYTES: usize = 8 * 16;

/// A thread that checks the size of a disk when it may have changed, at most about once a second. None if the size never changes.
pub(crate) struct Watch(Option<Running>);

struct Running {
    /// Readable when the thread must end.
    end: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

impl Watch {
    pub(crate) fn start(state: Arc<State>, server: Arc<Server>) -> io::Result<Self> {
        if matches!(state.size_change(), SizeChange::Never) {
            return Ok(Self(None));
        }
        let end = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let ended = Arc::clone(&end);
        let watch = move || {
            let check = || {
                if state.refresh_geometry() {
                    server.config_changed();
                }
            };
            let modifications = Modifications::new(state.size_change());
            while !is_readable(&[ended.as_fd()], Some(&INTERVAL)) {
                // First, so that no change is missed.
                let watched = modifications.as_ref().filter(|modifications| modifications.watch_for_next());
                check();
                if let Some(modifications) = watched {
                    is_readable(&[ended.as_fd(), modifications.inotify.as_fd()], None);
                    modifications.drain();
                    check();
                }
            }
        };
        let thread = std::thread::Builder::new().name("blk-size".into()).spawn(watch)?;
        Ok(Self(Some(Running { end, thread })))
    }

    pub(crate) fn stop(self) {
        let Some(Running { end, thread }) = self.0 else { return };
        // An eventfd takes a first number at once.
        let _ = rustix::io::write(&end, &1u64.to_ne_bytes());
        if thread.join().is_err() {
            tracing::error!("the thread that checks the disk's size panicked");
        }
    }
}

/// The kernel's reports of modifications of a file. Each watch reports one only, because they include every write of this process.
struct Modifications {
    inotify: OwnedFd,
    /// The file, not a path that may lead to another one.
    link: String,
}

impl Modifications {
    /// Returns none if modifications are not reported: those of other machines are not, nor those of block devices.
    fn new(change: SizeChange<'_>) -> Option<Self> {
        let SizeChange::OfFile(file) = change else { return None };
        if io_hints::is_remote(file) {
            return None;
        }
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let inotify = inotify.inspect_err(|error| not_watched(*error)).ok()?;
        Some(Self { inotify, link: format!("/proc/self/fd/{}", file.as_raw_fd()) })
    }

    /// Begins to wait for a modification. Returns false if it will not be reported.
    fn watch_for_next(&self) -> bool {
        let added = inotify::add_watch(&self.inotify, &self.link, WatchFlags::MODIFY | WatchFlags::ONESHOT);
        added.inspect_err(|error| not_watched(*error)).is_ok()
    }

    /// Removes the reports, also that of the end of the watch.
    fn drain(&self) {
        let _ = rustix::io::read(&self.inotify, &mut [0; EVENTS_BYTES]);
    }
}

fn not_watched(error: Errno) {
    tracing::debug!("cannot watch the disk's file ({error}), so its size is checked each second");
}

/// Waits until a descriptor is readable, or for this time.
fn is_readable(descriptors: &[BorrowedFd<'_>], time: Option<&Timespec>) -> bool {
    let mut polled: Vec<PollFd<'_>> = descriptors.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    match retry_on_intr(|| poll(&mut polled, time)) {
        Ok(ready) => ready > 0,
        Err(error) => {
            tracing::error!("cannot wait for changes of the disk's size: {error}");
            std::thread::sleep(Duration::from_secs(1));
            false
        }
    }
}
