//! The guardian's work after a server of incomplete packs has died.
//!
//! Present data may be read. Other readers wait for the next server, if one is expected, and get errors (`EIO`) if none comes. The next
//! server has a fanotify group of its own, and does not know who waits for this one. So the guardian reads what they wait for: the next
//! server fetches it for the guardian, and then they may go on. After a second, the next server has all new events, too, and the guardian ends.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::event::{PermissionEvent, read_event, respond_to};
use super::event_log::{EventLog, LostEvent};
use super::pack_hold::PackHold;
use super::{ALLOW, CHECK_INTERVAL, DENY, RETRY_PAUSE};

/// The interval at which the next server is looked for.
const NEXT_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
/// The maximum number of ranges that are read at once.
const READS_MAX: usize = 32;
/// The maximum number of readers that wait for the next server, besides those that waited for the dead one. Each takes a descriptor.
const HELD_MAX: usize = 256;
const READ_BYTES: usize = 1 << 20;
/// How long the guardian goes on when there is a next server. An event that was on its way when that marked the pack is in this group only, and the
/// kernel would let its reader go on when the group is closed.
const LINGER_TIME: Duration = Duration::from_secs(1);

/// What a guardian knows of a server of packs. Whatever can fail is done before the server relies on it: if the guardian ended, readers would
/// read holes.
#[derive(Debug)]
pub struct DeadServer {
    /// The fanotify group.
    group: OwnedFd,
    log: EventLog,
    packs: Vec<PackHold>,
    /// Their devices and inodes.
    keys: Vec<(u64, u64)>,
    /// How long readers wait for the next server.
    restart_time: Duration,
    /// Whether a block may have bytes of two objects, of which one is missing: then it is not known what is present.
    shares_blocks: bool,
}

/// A reader that waits.
#[derive(Debug)]
struct HeldReader {
    /// The number of its event's descriptor.
    number: RawFd,
    /// The descriptor with that number, so that no other event has it. `None`: this process has it open for something else.
    _reserved: Option<OwnedFd>,
    /// The pack, or any of them.
    pack: Option<usize>,
    range: (u64, u64),
}

impl DeadServer {
    /// Prepares to take over from a server of these packs. `log` is the memory of its event log.
    pub fn new(
        group: OwnedFd,
        log: &File,
        packs: &[PathBuf],
        restart_time: Duration,
        shares_blocks: bool,
    ) -> Result<Self> {
        let packs = packs.iter().map(|pack| PackHold::open(pack)).collect::<Result<Vec<_>>>()?;
        let key = |pack: &PackHold| pack.file.metadata().map(|found| (found.dev(), found.ino()));
        let keys = packs.iter().map(key).collect::<io::Result<_>>().context("cannot inspect a pack")?;
        let log = EventLog::open(log).context("cannot map the log of events")?;
        Ok(Self { group, log, packs, keys, restart_time, shares_blocks })
    }

    /// Responds in place of the server, of which no thread runs any more. Returns when that is no longer needed.
    pub fn respond(self) {
        // Before the first event is read.
        let mut held: Vec<_> = self.log.lost().iter().map(|lost| self.reserve(lost)).collect();
        let end = Instant::now() + if self.log.has_ended() { Duration::ZERO } else { self.restart_time };
        let (server, reads) = (Arc::new(self), Arc::new(AtomicUsize::new(0)));
        // When each pack was seen to have a next server.
        let mut next_since: Vec<Option<Instant>> = vec![None; server.packs.len()];
        loop {
            let has_next: Vec<bool> = server.packs.iter().map(PackHold::has_next).collect();
            for (since, has_next) in next_since.iter_mut().zip(&has_next) {
                *since = since.or(Some(Instant::now())).filter(|_| *has_next);
            }
            let has_all = |at: usize| next_since[at].is_some_and(|since| since.elapsed() >= LINGER_TIME);
            let waits = Instant::now() < end;
            let is_busy = !held.is_empty() || reads.load(Ordering::Acquire) > 0;
            let is_full = waits && held.len() >= HELD_MAX && !has_next.contains(&true);
            let event = if is_full {
                thread::sleep(RETRY_PAUSE);
                None
            } else {
                server.next_event(if waits || is_busy { &NEXT_INTERVAL } else { &CHECK_INTERVAL })
            };
            let needs_no_response = |at: usize| has_all(at) || !waits && server.packs[at].is_unused();
            if event.is_none() && !is_busy && (0..has_next.len()).all(needs_no_response) {
                return;
            }
            if let Some(event) = event {
                let pack = event.key().ok().and_then(|key| server.pack_of(key));
                if pack.is_some_and(|at| has_all(at) || server.may_read(at, &event)) {
                    event.respond(&server.group, ALLOW);
                } else if waits || pack.is_none_or(|at| has_next[at]) {
                    let PermissionEvent { file, number, range, .. } = event;
                    held.push(HeldReader { number, _reserved: Some(file), pack, range });
                } else {
                    event.respond(&server.group, DENY);
                }
            }
            for reader in std::mem::take(&mut held) {
                let is_served = reader.pack.map_or_else(|| !has_next.contains(&false), |at| has_next[at]);
                if is_served && reads.load(Ordering::Acquire) < READS_MAX {
                    server.read_for(reader, &reads);
                } else if is_served || waits {
                    held.push(reader);
                } else {
                    respond_to(&server.group, reader.number, DENY);
                }
            }
        }
    }

    fn pack_of(&self, key: (u64, u64)) -> Option<usize> {
        self.keys.iter().position(|other| *other == key)
    }

    /// Returns the reader of an event that the server had read.
    fn reserve(&self, lost: &LostEvent) -> HeldReader {
        let reserved = fcntl_dupfd_cloexec(&self.group, lost.number).ok();
        HeldReader {
            number: lost.number,
            _reserved: reserved.filter(|reserved| reserved.as_raw_fd() == lost.number),
            pack: lost.key.and_then(|key| self.pack_of(key)),
            range: lost.range,
        }
    }

    /// Returns the next event, if there is one in this time.
    fn next_event(&self, time: &Timespec) -> Option<PermissionEvent> {
        match poll(&mut [PollFd::new(&self.group, PollFlags::IN)], Some(time)) {
            Ok(0) | Err(Errno::INTR) => return None,
            Ok(_) => {}
            Err(_) => {
                thread::sleep(RETRY_PAUSE);
                return None;
            }
        }
        let event = read_event(&self.group, &Default::default());
        if event.is_err() {
            // The kernel has refused its reader: memory or descriptors are short.
            thread::sleep(RETRY_PAUSE);
        }
        event.ok()
    }

    /// Whether a reader can go on now: what it reads is present, or it is a guardian that reads for others, and has found a later
    /// server than that of this one.
    fn may_read(&self, pack: usize, event: &PermissionEvent) -> bool {
        let pack = &self.packs[pack];
        let is_present = pack.is_whole() || pack.has(event.range, self.shares_blocks);
        is_present || u32::try_from(event.pid).is_ok_and(|pid| pid == std::process::id() || pack.has_successor_of(pid))
    }

    /// Lets a reader go on when this process has read its range: the next server has fetched it then.
    fn read_for(self: &Arc<Self>, reader: HeldReader, reads: &Arc<AtomicUsize>) {
        let (server, number) = (Arc::clone(self), reader.number);
        let running = Arc::clone(reads);
        let read = move || {
            let packs = reader.pack.map_or(&server.packs[..], |at| &server.packs[at..=at]);
            let outcome = packs.iter().try_for_each(|pack| read_through(&pack.file, reader.range));
            respond_to(&server.group, number, if outcome.is_ok() { ALLOW } else { DENY });
            // Not before: another event could have its number.
            drop(reader);
            running.fetch_sub(1, Ordering::AcqRel);
        };
        reads.fetch_add(1, Ordering::AcqRel);
        if thread::Builder::new().name("guardian-read".into()).spawn(read).is_err() {
            respond_to(&self.group, number, DENY);
            reads.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Reads a range of a file up to its end, and forgets it.
fn read_through(file: &File, (offset, bytes): (u64, u64)) -> io::Result<()> {
    let (mut at, end) = (offset, offset.saturating_add(bytes));
    let mut buffer = vec![0; usize::try_from(bytes).unwrap_or(READ_BYTES).min(READ_BYTES)];
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(READ_BYTES).min(READ_BYTES);
        match file.read_at(&mut buffer[..wanted], at) {
            Ok(0) => break,
            Ok(count) => at += count as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::event_log::LoggedEvent;
    use super::super::partial_image::{Elsewhere, open, partly_here};
    use super::super::{GuardianFiles, Watch};
    use super::*;

    /// A server that was killed when it had read an event, and the outcome of the reader.
    struct Killed {
        from: Arc<Elsewhere>,
        server: DeadServer,
        reader: thread::JoinHandle<io::Result<u8>>,
    }

    fn killed(directory: &Path, restart_time: Duration) -> Option<Killed> {
        let (from, mut objects, part) = partly_here(directory);
        let watch = match Watch::begin(&mut objects) {
            Ok(watch) => watch,
            Err(error) => {
                ferry_skip::skip!("{error:#}");
                return None;
            }
        };
        let GuardianFiles { group, log, packs } = watch.for_guardian().expect("descriptors can be had");
        let server = DeadServer::new(group.into(), &log, &packs, restart_time, false).expect("the packs are here");
        let reader = thread::spawn(move || {
            let mut byte = [0];
            File::open(&part)?.read_exact_at(&mut byte, 3 * 4096)?;
            Ok(byte[0])
        });
        let mut logged: LoggedEvent = watch.log.read(&*watch.group).expect("the reader waits");
        // It gets no response and stays in the log, and its descriptor is closed, as when a process is killed.
        let null = File::open("/dev/null").expect("it is there");
        drop(std::mem::replace(&mut logged.event.file, null.into()));
        std::mem::forget(logged);
        Some(Killed { from, server, reader })
    }

    /// Readers of what is missing get errors, and never zeros from holes.
    #[test]
    fn readers_are_refused_if_no_server_is_expected() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let Some(Killed { server, reader, .. }) = killed(directory.path(), Duration::ZERO) else { return };
        let responder = thread::spawn(move || server.respond());
        let error = reader.join().expect("it does not panic").expect_err("nothing is here");
        assert_eq!(error.raw_os_error(), Some(nix::libc::EIO));
        // Nobody has the packs open.
        responder.join().expect("it ends");
    }

    /// The reader's event was read by the dead server, and the next one does not get it.
    #[test]
    fn readers_wait_for_the_next_server() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let Some(Killed { from, server, reader }) = killed(directory.path(), Duration::from_secs(60)) else { return };
        let responder = thread::spawn(move || server.respond());
        thread::sleep(Duration::from_millis(300));
        assert!(!reader.is_finished(), "the next server is not here yet");
        let mut objects = open(directory.path(), &from);
        let mut next = Watch::begin(&mut objects).expect("the first one could");
        next.serve(&Arc::new(objects), 2).expect("threads can be had");
        assert_ne!(reader.join().expect("it does not panic").expect("it is fetched"), 0);
        responder.join().expect("it ends");
    }

    /// A server that has ended by itself has no next one.
    #[test]
    fn readers_do_not_wait_after_an_end() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let Some(Killed { server, reader, .. }) = killed(directory.path(), Duration::from_secs(600)) else { return };
        server.log.end();
        let responder = thread::spawn(move || server.respond());
        reader.join().expect("it does not panic").expect_err("nothing is here");
        responder.join().expect("it ends");
    }
}
