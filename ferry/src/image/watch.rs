//! Incomplete packs under the kernel's EROFS: readers wait until the data is fetched and verified.
//!
//! Linux sends an event before it reads a part of a marked file, and waits for the response (fanotify's pre-content events,
//! `FAN_PRE_ACCESS`, Linux 6.14; fanotify(7)). This includes reads by EROFS, which caches pages, so there is about one event per
//! block. Files can be marked on ext4, XFS and btrfs.
//!
//! Once the last descriptor of the fanotify group is closed, events stop, and holes would be read as zeros. So a separate process
//! ([`crate::guardian`]) holds one as well, and responds after the death of the server ([`dead_server`]): present data may be read,
//! other reads wait for the next server, or are I/O errors. It ends when the packs are complete, when no other process has them open, or
//! when the next server, or a later guardian, announces itself by a lock on each pack. Marks belong to the files, so that server
//! responds for the old mount, too.
#![allow(unsafe_code, reason = "a lease has no safe wrapper")]

pub mod dead_server;
mod event;
mod event_log;
mod pack_hold;
#[cfg(test)]
mod partial_image;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_fuse::MountEntry;
use ferry_image::Objects;
use ferry_vfs::sync::lock;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;

use self::event::PermissionEvent;
use self::event_log::{EventLog, LoggedEvent};
use crate::paths::descriptor_path;

/// `FAN_PRE_ACCESS` of include/uapi/linux/fanotify.h.
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
/// `FAN_ALLOW`.
const ALLOW: u32 = 1;
/// `FAN_DENY`, with the error for the reader: `EIO`.
const DENY: u32 = 2 | (5 << 24);
/// The byte of a pack whose lock announces a server: no pack is that long.
const SERVED_BYTE: i64 = i64::MAX - 1;
/// The first byte of a pack whose lock announces a guardian. Later guardians lock higher bytes.
const GUARDIANS_BEGIN: i64 = 1 << 62;
/// The interval at which the guardian checks that it is still needed.
const CHECK_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The maximum wait for the first event.
const FIRST_EVENT_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The pause after an event that could not be read: descriptors or memory are short.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// The maximum number of readers that wait for a fetching thread. Each takes a descriptor, of which a process has 1024 by
/// default. Beyond this, readers of present data wait as well.
const WAITING_MAX: usize = 256;
/// `STATX_MNT_ID_UNIQUE` of include/uapi/linux/stat.h (Linux 6.8): the id of a mount that no later one gets.
pub const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
/// The time for which a refusal is repeated: EROFS retries for each page that it could not read.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// The kernel cannot mount images, for this reason.
#[derive(Debug)]
pub struct KernelMountError(String);

impl KernelMountError {
    /// Returns this error.
    pub fn fail<T>(why: impl Into<String>) -> Result<T> {
        Err(Self(why.into()).into())
    }
}

impl fmt::Display for KernelMountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for KernelMountError {}

/// A watched pack.
#[derive(Debug)]
struct WatchedPack {
    /// Its device and inode.
    key: (u64, u64),
    number: usize,
    /// The descriptor that holds its locks.
    file: File,
}

/// The last range that could not be fetched.
#[derive(Debug)]
struct Refusal {
    key: (u64, u64),
    range: (u64, u64),
    when: Instant,
}

impl Refusal {
    /// Whether a range lies within it, shortly after the failure.
    fn covers(&self, key: (u64, u64), (offset, bytes): (u64, u64)) -> bool {
        let end = |(offset, bytes): (u64, u64)| offset.saturating_add(bytes);
        let is_part = self.range.0 <= offset && end((offset, bytes)) <= end(self.range);
        self.key == key && is_part && self.when.elapsed() < REFUSAL_TIME
    }
}

/// The watched packs of an image, and their fanotify group.
#[derive(Debug)]
pub struct Watch {
    group: Arc<Fanotify>,
    packs: Arc<[WatchedPack]>,
    log: Arc<EventLog>,
    log_file: File,
    /// Events of other processes that arrived before `serve`.
    early: Vec<LoggedEvent>,
}

/// What the guardian of a [`Watch`] needs.
pub struct GuardianFiles {
    /// The fanotify group.
    pub group: File,
    /// The memory of the log of events.
    pub log: File,
    /// The packs, by paths that another process can open.
    pub packs: Vec<PathBuf>,
}

/// Advice if fanotify cannot be used.
const FALLBACK_ADVICE: &str = "mount with ferry mount image:... --from, which needs nothing of the kernel but FUSE";

/// Checks that this process can delay readers of missing data.
pub fn is_possible() -> Result<()> {
    let group = new_group()?;
    let file = tempfile::tempfile().context("cannot make a file in the directory for temporary files")?;
    match mark(&group, &descriptor_path(&file)) {
        Err(nix::errno::Errno::EINVAL) => Err(too_old()),
        // The kernel knows the event, and this directory's file system does not have it.
        Ok(()) | Err(nix::errno::Errno::EOPNOTSUPP) => Ok(()),
        Err(error) => Err(error).context("cannot watch a file"),
    }
}

fn new_group() -> Result<Fanotify> {
    let flags = InitFlags::FAN_CLASS_PRE_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_UNLIMITED_QUEUE;
    let files = EventFFlags::O_RDWR | EventFFlags::O_CLOEXEC | EventFFlags::O_LARGEFILE;
    match Fanotify::init(flags, files) {
        Err(nix::errno::Errno::EPERM) => {
            Err(KernelMountError("only root can make readers of missing data wait".into()).into())
        }
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOSYS) => {
            Err(KernelMountError("this kernel cannot make readers of missing data wait".into()).into())
        }
        Err(nix::errno::Errno::EMFILE) => {
            let why =
                "as many programs wait for readers of missing data as the kernel lets (fs.fanotify.max_user_groups)";
            Err(KernelMountError(why.into()).into())
        }
        group => {
            group.with_context(|| format!("this kernel cannot make readers of missing data wait; {FALLBACK_ADVICE}"))
        }
    }
}

fn mark(group: &Fanotify, path: &Path) -> nix::Result<()> {
    group.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::from_bits_retain(FAN_PRE_ACCESS), CWD, Some(path))
}

fn too_old() -> anyhow::Error {
    KernelMountError("this kernel cannot make readers of missing data wait (Linux 6.14 or later can)".into()).into()
}

impl Watch {
    /// Marks incomplete packs. From now on, this process reads and writes them through descriptors without events.
    pub fn begin(objects: &mut Objects) -> Result<Self> {
        let group = new_group()?;
        let (log, log_file) = EventLog::new().context("cannot create a log of events")?;
        let log = Arc::new(log);
        let packs: Vec<(usize, PathBuf)> =
            objects.incomplete().map(|(number, file)| (number, descriptor_path(file))).collect();
        let (mut watched, mut early) = (Vec::new(), Vec::new());
        for (number, path) in packs {
            match mark(&group, &path) {
                Err(nix::errno::Errno::EINVAL) => return Err(too_old()),
                Err(nix::errno::Errno::EOPNOTSUPP) => {
                    return KernelMountError::fail(
                        "the store's file system cannot make readers of missing data wait (ext4, XFS and btrfs can)",
                    );
                }
                mark => mark.with_context(|| format!("cannot watch a pack; {FALLBACK_ADVICE}"))?,
            }
            let descriptor_without_events = descriptor_without_events(&group, &log, &path, &mut early)?;
            let file = objects.replace_file(number, descriptor_without_events).context("a pack is in use already")?;
            let found = file.metadata().context("cannot inspect a pack")?;
            watched.push(WatchedPack { key: (found.dev(), found.ino()), number, file });
        }
        Ok(Self { group: Arc::new(group), packs: watched.into(), log, log_file, early })
    }

    /// Returns the path by which the kernel opens a pack.
    pub fn path(&self, number: usize) -> Option<PathBuf> {
        self.packs.iter().find(|pack| pack.number == number).map(|pack| descriptor_path(&pack.file))
    }

    /// Returns what another process needs to respond after the death of this one.
    pub fn for_guardian(&self) -> Result<GuardianFiles> {
        let group = self.group.as_fd().try_clone_to_owned().context("cannot duplicate the fanotify group")?;
        let log = self.log_file.try_clone().context("cannot duplicate the log of events")?;
        let directory = PathBuf::from(format!("/proc/{}/fd", std::process::id()));
        let packs = self.packs.iter().map(|pack| directory.join(pack.file.as_raw_fd().to_string())).collect();
        Ok(GuardianFiles { group: group.into(), log, packs })
    }

    /// Records that this process ends because it is no longer wanted: readers of missing data shall not wait for another one.
    pub fn end(&self) {
        self.log.end();
    }

    /// Responds to events until this process ends. One thread responds for present data and never waits for a server; `threads`
    /// others fetch. This also announces the server to the guardians of dead servers.
    pub fn serve(&mut self, objects: &Arc<Objects>, threads: usize) -> Result<()> {
        let known = PackState { packs: Arc::clone(&self.packs), objects: Arc::clone(objects), refused: Arc::default() };
        let (sender, waiting) = sync_channel(WAITING_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..threads {
            let (group, known, waiting) = (Arc::clone(&self.group), known.clone(), Arc::clone(&waiting));
            let work = move || {
                while let Some(LoggedEvent { event, .. }) = &next_queued(&waiting) {
                    event.respond(&*group, deny_on_panic(DENY, || known.response(event)));
                }
            };
            thread::Builder::new().name("image-fetch".into()).spawn(work).context("cannot start a thread")?;
        }
        let (group, log) = (Arc::clone(&self.group), Arc::clone(&self.log));
        let mut early = std::mem::take(&mut self.early).into_iter();
        let work = move || {
            loop {
                let logged = match early.next().map_or_else(|| log.read(&*group), Ok) {
                    Ok(logged) => logged,
                    // As many readers as the log has room for: the others wait in the kernel.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        thread::sleep(RETRY_PAUSE);
                        continue;
                    }
                    Err(error) => {
                        tracing::warn!("a reader was refused, because its event could not be read: {error}");
                        thread::sleep(RETRY_PAUSE);
                        continue;
                    }
                };
                match deny_on_panic(Some(DENY), || known.response_without_fetch(&logged.event)) {
                    Some(response) => logged.event.respond(&*group, response),
                    None => {
                        if let Err(SendError(logged)) = sender.send(logged) {
                            logged.event.respond(&*group, DENY);
                        }
                    }
                }
            }
        };
        thread::Builder::new().name("image-watch".into()).spawn(work).context("cannot start a thread")?;
        for pack in self.packs.iter() {
            let lock = server_lock(libc::F_RDLCK);
            fcntl(&pack.file, FcntlArg::F_OFD_SETLK(&lock)).context("cannot lock a pack")?;
        }
        Ok(())
    }
}

/// Returns a descriptor of a marked file without events: the one in the first event, which this process's own read causes.
fn descriptor_without_events(
    group: &Fanotify,
    log: &Arc<EventLog>,
    path: &Path,
    early: &mut Vec<LoggedEvent>,
) -> Result<File> {
    let own_pid = i32::try_from(std::process::id()).unwrap_or_default();
    thread::scope(|scope| {
        // Reads at the end, where there is nothing to fetch.
        let read = || {
            let file = File::open(path)?;
            file.read_at(&mut [0], file.metadata()?.len())
        };
        let reader = scope.spawn(read);
        loop {
            let events = group.as_fd();
            let is_there = match poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&FIRST_EVENT_TIMEOUT)) {
                Err(Errno::INTR) => continue,
                outcome => outcome.context("cannot wait for events")? > 0,
            };
            if !is_there {
                // The read has ended without an event.
                drop(reader.join());
                return KernelMountError::fail("this kernel sends no event before a file is read");
            }
            let logged = log.read(group).context("cannot read an event")?;
            if logged.event.pid != own_pid {
                early.push(logged);
                continue;
            }
            logged.event.respond(group, ALLOW);
            let file = logged.event.file.try_clone().context("cannot duplicate the descriptor of a pack")?;
            return Ok(file.into());
        }
    })
}

/// Returns the next event that needs a fetch.
fn next_queued(waiting: &Mutex<Receiver<LoggedEvent>>) -> Option<LoggedEvent> {
    lock(waiting).recv().ok()
}

/// Denies on a panic: readers must not wait for ever.
fn deny_on_panic<T>(denial: T, look: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(look)).unwrap_or(denial)
}

/// The state that responses depend on.
#[derive(Clone)]
struct PackState {
    packs: Arc<[WatchedPack]>,
    objects: Arc<Objects>,
    refused: Arc<Mutex<Option<Refusal>>>,
}

impl PackState {
    fn last(&self) -> MutexGuard<'_, Option<Refusal>> {
        lock(&self.refused)
    }

    /// Returns the response if nothing has to be fetched.
    fn response_without_fetch(&self, event: &PermissionEvent) -> Option<u32> {
        let key = match event.key() {
            Ok(key) => key,
            Err(error) => return Some(refuse(&error)),
        };
        let Some(pack) = self.packs.iter().find(|pack| pack.key == key) else { return Some(ALLOW) };
        let range = event.range;
        if self.last().as_ref().is_some_and(|last| last.covers(key, range)) {
            return Some(DENY);
        }
        self.objects.verify_here(pack.number, range.0, range.1).then_some(ALLOW)
    }

    /// Fetches and verifies the range, and returns the response.
    fn response(&self, event: &PermissionEvent) -> u32 {
        // Another thread may have fetched or refused it meanwhile.
        if let Some(response) = self.response_without_fetch(event) {
            return response;
        }
        let (key, range) = (event.key(), event.range);
        let Ok(key) = key else { return DENY };
        let Some(pack) = self.packs.iter().find(|pack| pack.key == key) else { return ALLOW };
        match self.objects.verify_range(pack.number, range.0, range.1) {
            Ok(()) => ALLOW,
            Err(bad) => {
                let range = self.objects.whole_range(pack.number, range.0, range.1);
                *self.last() = Some(Refusal { key, range, when: Instant::now() });
                refuse(&bad)
            }
        }
    }
}

fn refuse(error: &dyn std::fmt::Display) -> u32 {
    tracing::error!("{error}; its readers get I/O errors");
    DENY
}

fn server_lock(kind: i32) -> libc::flock {
    range_lock(kind, SERVED_BYTE, SERVED_BYTE + 1)
}

fn range_lock(kind: i32, from: i64, to: i64) -> libc::flock {
    let l_type = i16::try_from(kind).unwrap_or_default();
    libc::flock { l_type, l_whence: 0, l_start: from, l_len: to - from, l_pid: 0 }
}

/// Waits until a mount is no longer in the mount table.
pub fn wait_for_unmount(id: u64) -> io::Result<()> {
    // Opened before the first check, so that no change is missed.
    let table = File::open("/proc/self/mountinfo")?;
    let found = MountEntry::all()?.into_iter().find(|mounted| mounted.id == id);
    let Some(MountEntry { at, kind, source, .. }) = found else { return Ok(()) };
    let unique = unique_id(&at, id);
    // The kernel reuses mount ids.
    let is_it = |mounted: &MountEntry| mounted.id == id && mounted.kind == kind && mounted.source == source;
    // The table is read only if the mount is covered or gone: with many mounts it is long, and each has a process that waits here.
    let is_mounted = || match (unique, mount_id(&at, MNT_ID_UNIQUE)) {
        (Some(unique), Some(top)) if top == unique => Ok(true),
        // Asked again, because mounts on top may come and go meanwhile.
        (Some(_), Some(top))
            if mount_id(&at, StatxFlags::MNT_ID) == Some(id) && mount_id(&at, MNT_ID_UNIQUE) == Some(top) =>
        {
            Ok(false)
        }
        _ => MountEntry::all().map(|all| all.iter().any(is_it)),
    };
    while is_mounted()? {
        match poll(&mut [PollFd::new(&table, PollFlags::PRI)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns the id, which no later mount gets, of the mount with this other id, if it is the topmost one at a path.
pub fn unique_id(at: &Path, id: u64) -> Option<u64> {
    mount_id(at, StatxFlags::MNT_ID).filter(|top| *top == id).and_then(|_| mount_id(at, MNT_ID_UNIQUE))
}

/// Returns the id of the topmost mount at a path, of one of both kinds.
pub fn mount_id(at: &Path, kind: StatxFlags) -> Option<u64> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = statx(CWD, at, flags, kind).ok()?;
    (found.stx_mask & kind.bits() != 0).then_some(found.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::pack_hold::PackHold;
    use super::partial_image::partly_here;
    use super::*;

    #[test]
    fn refusals_cover_their_range_and_expire() {
        let mut refused = Refusal { key: (1, 2), range: (4096, 65_536), when: Instant::now() };
        assert!(refused.covers((1, 2), (4096, 65_536)) && refused.covers((1, 2), (65_536, 4096)));
        assert!(!refused.covers((1, 3), (4096, 4096)) && !refused.covers((1, 2), (65_536, 8192)));
        assert!(!refused.covers((1, 2), (0, 8192)) && !refused.covers((1, 2), (4096, u64::MAX)));
        refused.when -= 2 * REFUSAL_TIME;
        assert!(!refused.covers((1, 2), (4096, 4096)));
    }

    /// Another mount, which is made at once, has its id, its place and its source.
    #[test]
    fn the_end_of_a_mount_is_noticed() {
        use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path().canonicalize().expect("it is there");
        let mounted = || mount("ferry-test", &at, "tmpfs", MountFlags::empty(), None);
        if let Err(error) = mounted() {
            return ferry_skip::skip!("cannot mount: {error}");
        }
        let id = mount_id(&at, StatxFlags::MNT_ID).expect("it is a mount");
        let waits = thread::spawn(move || wait_for_unmount(id));
        thread::sleep(Duration::from_secs(1));
        // It is covered and uncovered.
        mounted().expect("it could");
        thread::sleep(Duration::from_millis(100));
        unmount(&at, UnmountFlags::DETACH).expect("it is a mount");
        thread::sleep(Duration::from_millis(100));
        let goes_on = !waits.is_finished();
        unmount(&at, UnmountFlags::DETACH).expect("it is a mount");
        mounted().expect("it could");
        let end = Instant::now() + Duration::from_secs(20);
        while !waits.is_finished() && Instant::now() < end {
            thread::sleep(RETRY_PAUSE);
        }
        unmount(&at, UnmountFlags::DETACH).expect("it is a mount");
        assert!(goes_on && Instant::now() < end);
        waits.join().expect("it does not panic").expect("the table can be read");
    }

    #[test]
    fn holes_count_as_missing() {
        let file = tempfile::tempfile_in("/var/tmp").expect("a file");
        file.set_len(1 << 20).expect("holes take no room");
        file.write_all_at(&[1; 65_536], 131_072).expect("it can be written");
        file.sync_all().expect("it can be synced");
        let held = PackHold { file: file.try_clone().expect("a descriptor"), own_byte: GUARDIANS_BEGIN };
        let has = |from: u64, bytes: u64| held.has((from, bytes), false);
        assert!(has(131_072, 65_536) && has(135_168, 4096) && has(2 << 20, 1));
        assert!(!has(131_071, 65_536) && !has(131_072, 65_537) && !has(0, u64::MAX) && !has(0, 4096));
        let shares = |from: u64, bytes: u64| held.has((from, bytes), true);
        assert!(!shares(131_072, 65_536) && shares(2 << 20, 1), "of a block a part may be missing");
        assert!(!held.is_served());
    }

    /// Of two guardians of one pack, the earlier one ends, and then the later one, which is not needed.
    #[test]
    fn guardians_do_not_keep_each_other_running() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let path = directory.path().join("pack.part");
        fs::write(&path, "").expect("it can be made");
        let first = PackHold::open(&path).expect("it is there");
        // Later by the clock.
        thread::sleep(RETRY_PAUSE);
        let second = PackHold::open(&path).expect("it is there");
        assert!(first.has_successor() && !second.has_successor());
        let pid = std::process::id();
        assert!(first.has_successor_of(pid) && !first.has_successor_of(pid + 1) && !second.has_successor_of(pid));
        assert!(!second.has_next() && !second.is_unused(), "another process has it open");
        assert!(first.has_next());
        drop(first);
        // A program that another test is just starting may have it open, too.
        let end = Instant::now() + Duration::from_secs(60);
        while !second.is_unused() {
            assert!(Instant::now() < end, "it is not needed");
            thread::sleep(RETRY_PAUSE);
        }
    }

    #[test]
    fn a_silent_server_does_not_delay_reads_of_present_data() {
        // /tmp may be a tmpfs, which cannot be watched.
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let (from, mut objects, part) = partly_here(directory.path());
        let mut watch = match Watch::begin(&mut objects) {
            Ok(watch) => watch,
            Err(error) => return ferry_skip::skip!("{error:#}"),
        };
        objects.verify_range(0, 4096, 4096).expect("it can be had");
        watch.serve(&Arc::new(objects), 2).expect("threads can be had");
        let read = |block: u64| {
            let (sender, outcome) = channel();
            let file = File::open(&part).expect("it is there");
            thread::spawn(move || {
                let mut bytes = [0; 1];
                let read = file.read_exact_at(&mut bytes, block * 4096);
                let _ = sender.send(read.map(|()| bytes[0]));
            });
            outcome
        };
        let silence = from.silence.write().expect("nobody has panicked");
        let waiting: Vec<_> = (8..14).map(read).collect();
        thread::sleep(Duration::from_millis(300));
        let here = read(1).recv_timeout(Duration::from_secs(20)).expect("the read does not wait");
        let held: Vec<_> = waiting.iter().map(|outcome| outcome.recv_timeout(Duration::ZERO)).collect();
        // First, or the readers would wait for ever.
        drop(silence);
        here.expect("it is here");
        assert!(held.iter().all(|outcome| matches!(outcome, Err(RecvTimeoutError::Timeout))), "{held:?}");
        for outcome in waiting {
            let read = outcome.recv_timeout(Duration::from_secs(20)).expect("it is answered");
            assert_ne!(read.expect("it can be had"), 0);
        }
    }
}
