//! Packs that are not all here, under the kernel's own EROFS: whoever reads waits until what he reads is fetched and proved.
//!
//! Before Linux reads a part of a file that we have marked, it asks us (fanotify's pre-content events, `FAN_PRE_ACCESS`, Linux 6.14;
//! fanotify(7)), and it does so too when the reader is EROFS, which keeps in the page cache what it has read: each block is
//! asked for about once. Files can be marked on ext4, XFS and btrfs.
//!
//! Should nobody hold the other end any more, the kernel stops asking, and holes would be read as zeros. So a process of its own
//! ([`crate::guardian`]) holds it, too, and when the server has died answers in its place, [`answer_for_dead_server`]: what is here may be read,
//! all else is an I/O error. It goes when the packs are whole, nobody has them open any more, or the next server says that it is there,
//! by a lock on each of them. The marks are of the files, so that server answers for the old mount, too.
#![allow(unsafe_code, reason = "a lease has no safe name elsewhere")]

mod event;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_fuse::Mounted;
use ferry_image::Objects;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FlockOperation, SeekFrom, flock, seek};
use rustix::io::Errno;

use super::fuse_fallback::KernelMountError;
use event::{PermissionEvent, ask};

/// `FAN_PRE_ACCESS` of include/uapi/linux/fanotify.h.
const FAN_PRE_ACCESS: u64 = 0x0010_0000;
/// `FAN_ALLOW`.
const ALLOW: u32 = 1;
/// `FAN_DENY`, with the error for the reader: `EIO`.
const DENY: u32 = 2 | (5 << 24);
/// The byte of a pack by whose lock a server says that it is there: no pack is so long.
const SERVED_BYTE: i64 = i64::MAX - 1;
/// How often the guardian looks whether it is still needed.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long the kernel may take to ask for the first time.
const FIRST: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// How long to wait after an event that could not be taken: descriptors or memory are short.
const PAUSE: Duration = Duration::from_millis(10);
/// How many readers of what is not here may wait for a thread that fetches. Each has a descriptor, of which a process has 1024 unless
/// told otherwise. Where more wait, those of what is here wait with them.
const WAITING_MAX: usize = 256;
/// Who was refused is refused again for so long: EROFS asks again for each page of what it could not read.
const REFUSAL: Duration = Duration::from_secs(1);

/// A pack that is watched.
#[derive(Debug)]
struct Watched {
    /// Its device and inode.
    key: (u64, u64),
    /// Its place among the image's.
    number: usize,
    /// The descriptor that it was opened by, which has its locks.
    file: File,
}

/// What could not be had last.
#[derive(Debug)]
struct Refused {
    key: (u64, u64),
    range: (u64, u64),
    when: Instant,
}

impl Refused {
    /// Whether this is a part of it, just afterwards.
    fn covers(&self, key: (u64, u64), (offset, bytes): (u64, u64)) -> bool {
        let end = |(offset, bytes): (u64, u64)| offset.saturating_add(bytes);
        let is_part = self.range.0 <= offset && end((offset, bytes)) <= end(self.range);
        self.key == key && is_part && self.when.elapsed() < REFUSAL
    }
}

/// The packs of an image that are watched, and where the kernel asks.
#[derive(Debug)]
pub struct Watch {
    group: Arc<Fanotify>,
    packs: Arc<[Watched]>,
    /// Questions of others that came before anybody answered.
    early: Vec<PermissionEvent>,
}

/// What to do where the kernel cannot be asked to wait.
const ELSE: &str = "mount with ferry mount image:... --from, which needs nothing of the kernel but FUSE";

/// Checks that this process can have the kernel wait for what is not here, on a file system that can.
pub fn is_possible() -> Result<()> {
    let group = new_group()?;
    let file = tempfile::tempfile().context("cannot make a file in the folder for temporary files")?;
    match mark(&group, &by_fd(&file)) {
        Err(nix::errno::Errno::EINVAL) => Err(too_old()),
        // The kernel knows the event, and this folder's file system does not have it.
        Ok(()) | Err(nix::errno::Errno::EOPNOTSUPP) => Ok(()),
        Err(error) => Err(error).context("cannot watch a file"),
    }
}

fn new_group() -> Result<Fanotify> {
    let flags = InitFlags::FAN_CLASS_PRE_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_UNLIMITED_QUEUE;
    let files = EventFFlags::O_RDWR | EventFFlags::O_CLOEXEC | EventFFlags::O_LARGEFILE;
    match Fanotify::init(flags, files) {
        Err(nix::errno::Errno::EPERM) => {
            Err(KernelMountError("only root can have the kernel wait for what is not here".into()).into())
        }
        Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOSYS) => {
            Err(KernelMountError("this kernel cannot wait for what is not here".into()).into())
        }
        group => group.with_context(|| format!("this kernel cannot wait for what is not here; {ELSE}")),
    }
}

fn mark(group: &Fanotify, path: &Path) -> nix::Result<()> {
    group.mark(MarkFlags::FAN_MARK_ADD, MaskFlags::from_bits_retain(FAN_PRE_ACCESS), CWD, Some(path))
}

fn too_old() -> anyhow::Error {
    KernelMountError("this kernel cannot wait for what is not here (Linux 6.14 or later can)".into()).into()
}

impl Watch {
    /// Marks the packs that are not all here. What is read and written of them from now on, by us, nobody is asked about.
    pub fn begin(objects: &mut Objects) -> Result<Self> {
        let group = new_group()?;
        let packs: Vec<(usize, PathBuf)> = objects.incomplete().map(|(number, file)| (number, by_fd(file))).collect();
        let (mut watched, mut early) = (Vec::new(), Vec::new());
        for (number, path) in packs {
            match mark(&group, &path) {
                Err(nix::errno::Errno::EINVAL) => return Err(too_old()),
                Err(nix::errno::Errno::EOPNOTSUPP) => {
                    let why = "the store's file system cannot wait for what is not here (ext4, XFS and btrfs can)";
                    return Err(KernelMountError(why.into()).into());
                }
                mark => mark.with_context(|| format!("cannot watch a pack; {ELSE}"))?,
            }
            let quiet = quiet(&group, &path, &mut early)?;
            let file = objects.replace_file(number, quiet).context("a pack is in use already")?;
            let found = file.metadata().context("cannot look at a pack")?;
            watched.push(Watched { key: (found.dev(), found.ino()), number, file });
        }
        Ok(Self { group: Arc::new(group), packs: watched.into(), early })
    }

    /// What the kernel is to open a pack by.
    pub fn path(&self, number: usize) -> Option<PathBuf> {
        self.packs.iter().find(|pack| pack.number == number).map(|pack| by_fd(&pack.file))
    }

    /// The guardian's share: where the kernel asks, and the packs by paths that another process finds.
    pub fn for_guardian(&self) -> Result<(File, Vec<PathBuf>)> {
        let group = self.group.as_fd().try_clone_to_owned().context("cannot pass on where the kernel asks")?;
        let folder = PathBuf::from(format!("/proc/{}/fd", std::process::id()));
        Ok((group.into(), self.packs.iter().map(|pack| folder.join(pack.file.as_raw_fd().to_string())).collect()))
    }

    /// Begins to answer until this process ends: one thread answers for what is here and never waits for a server, so many others
    /// fetch. Says to the guardians of servers that have died that somebody answers again.
    pub fn serve(&mut self, objects: &Arc<Objects>, threads: usize) -> Result<()> {
        let known = PackState { packs: Arc::clone(&self.packs), objects: Arc::clone(objects), refused: Arc::default() };
        let (sender, waiting) = sync_channel(WAITING_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..threads {
            let (group, known, waiting) = (Arc::clone(&self.group), known.clone(), Arc::clone(&waiting));
            let work = move || {
                while let Some(question) = next(&waiting) {
                    question.answer(&*group, guarded(DENY, || known.verdict(&question)));
                }
            };
            thread::Builder::new().name("image-fetch".into()).spawn(work).context("cannot start a thread")?;
        }
        let group = Arc::clone(&self.group);
        let mut early = std::mem::take(&mut self.early).into_iter();
        let work = move || {
            loop {
                let question = match early.next().map_or_else(|| ask(&*group), Ok) {
                    Ok(question) => question,
                    Err(error) => {
                        tracing::warn!("a reader was refused, for the kernel's question did not arrive: {error}");
                        thread::sleep(PAUSE);
                        continue;
                    }
                };
                match guarded(Some(DENY), || known.at_once(&question)) {
                    Some(verdict) => question.answer(&*group, verdict),
                    None => {
                        if let Err(SendError(question)) = sender.send(question) {
                            question.answer(&*group, DENY);
                        }
                    }
                }
            }
        };
        thread::Builder::new().name("image-watch".into()).spawn(work).context("cannot start a thread")?;
        for pack in self.packs.iter() {
            let lock = whole_lock(libc::F_RDLCK);
            fcntl(&pack.file, FcntlArg::F_OFD_SETLK(&lock)).context("cannot lock a pack")?;
        }
        Ok(())
    }
}

fn by_fd(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A descriptor of a marked file that nobody is asked about: the one that comes with the first question, to which our own
/// read gives rise.
fn quiet(group: &Fanotify, path: &Path, early: &mut Vec<PermissionEvent>) -> Result<File> {
    let ours = i32::try_from(std::process::id()).unwrap_or_default();
    thread::scope(|scope| {
        // At the end, where there is nothing that anybody has to fetch.
        let read = || {
            let file = File::open(path)?;
            file.read_at(&mut [0], file.metadata()?.len())
        };
        let reader = scope.spawn(read);
        loop {
            let events = group.as_fd();
            let is_there = match poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&FIRST)) {
                Err(Errno::INTR) => continue,
                outcome => outcome.context("cannot wait for the kernel to ask")? > 0,
            };
            if !is_there {
                // Nobody waits for us, or the reader would be one.
                drop(reader.join());
                return Err(KernelMountError("this kernel does not ask before a file is read".into()).into());
            }
            let question = ask(group).context("the kernel's question cannot be read")?;
            if question.pid != ours {
                early.push(question);
                continue;
            }
            question.answer(group, ALLOW);
            return Ok(question.file.into());
        }
    })
}

/// The next question that has to be fetched for.
fn next(waiting: &Mutex<Receiver<PermissionEvent>>) -> Option<PermissionEvent> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// Whoever reads must not wait for ever, whatever happens here.
fn guarded<T>(denial: T, look: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(look)).unwrap_or(denial)
}

/// What answers go by.
#[derive(Clone)]
struct PackState {
    packs: Arc<[Watched]>,
    objects: Arc<Objects>,
    refused: Arc<Mutex<Option<Refused>>>,
}

impl PackState {
    fn last(&self) -> MutexGuard<'_, Option<Refused>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer, if nothing has to be fetched for it.
    fn at_once(&self, question: &PermissionEvent) -> Option<u32> {
        let key = match question.key() {
            Ok(key) => key,
            Err(error) => return Some(refuse(&error)),
        };
        let Some(pack) = self.packs.iter().find(|pack| pack.key == key) else { return Some(ALLOW) };
        let range = question.range;
        if self.last().as_ref().is_some_and(|last| last.covers(key, range)) {
            return Some(DENY);
        }
        self.objects.prove_here(pack.number, range.0, range.1).then_some(ALLOW)
    }

    /// Gets and proves what is asked for.
    fn verdict(&self, question: &PermissionEvent) -> u32 {
        // Somebody may have got it, or been refused it, since it was asked.
        if let Some(verdict) = self.at_once(question) {
            return verdict;
        }
        let (key, range) = (question.key(), question.range);
        let Ok(key) = key else { return DENY };
        let Some(pack) = self.packs.iter().find(|pack| pack.key == key) else { return ALLOW };
        match self.objects.prove_range(pack.number, range.0, range.1) {
            Ok(()) => ALLOW,
            Err(bad) => {
                let range = self.objects.whole_range(pack.number, range.0, range.1);
                *self.last() = Some(Refused { key, range, when: Instant::now() });
                refuse(&bad)
            }
        }
    }
}

fn refuse(error: &dyn std::fmt::Display) -> u32 {
    tracing::error!("{error}; its readers get I/O errors");
    DENY
}

fn whole_lock(kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: 0,
        l_start: SERVED_BYTE,
        l_len: 1,
        l_pid: 0,
    }
}

/// A pack as its guardian holds it.
#[derive(Debug)]
pub struct PackHold(File);

impl PackHold {
    /// Opens a pack, and keeps it from being removed from its store.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        flock(&file, FlockOperation::NonBlockingLockShared)
            .with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Self(file))
    }

    /// Whether a server says that it answers for this pack.
    fn is_served(&self) -> bool {
        let mut lock = whole_lock(libc::F_WRLCK);
        fcntl(&self.0, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Whether a reader may go on, as far as this one can say. A server, where there is one, is asked, too.
    fn may_be_read(&self, question: &PermissionEvent) -> bool {
        self.is_whole() || self.is_served() || self.has(question)
    }

    /// Whether nobody else has it open, neither EROFS nor a process.
    fn is_unused(&self) -> bool {
        let lease = |kind: i32| {
            // SAFETY: no pointers; the descriptor is open as long as `self` is.
            unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
        };
        lease(libc::F_WRLCK) && lease(libc::F_UNLCK)
    }

    /// Whether all of it is here: then it has a name of its own.
    fn is_whole(&self) -> bool {
        let name = fs::read_link(by_fd(&self.0)).unwrap_or_default();
        name.is_absolute() && !name.to_string_lossy().contains(".part")
    }

    /// Whether all of a range was written once. Only what is proved ever is.
    fn has(&self, question: &PermissionEvent) -> bool {
        let size = self.0.metadata().map_or(0, |found| found.len());
        let (from, to) = (question.range.0, question.range.0.saturating_add(question.range.1).min(size));
        // The place in a file is the descriptor's, and nobody shares this one.
        from >= to || seek(&self.0, SeekFrom::Hole(from)).is_ok_and(|hole| hole >= to)
    }
}

/// Answers in the place of a server that has died: what is here may be read, for the rest readers get `EIO`. Ends when it is
/// needed no more.
pub fn answer_for_dead_server(group: impl AsFd, packs: &[PackHold]) -> Result<()> {
    let keys: Vec<(u64, u64)> = packs
        .iter()
        .map(|pack| pack.0.metadata().map(|found| (found.dev(), found.ino())))
        .collect::<io::Result<_>>()
        .context("cannot look at a pack")?;
    loop {
        let is_there = {
            let group = group.as_fd();
            poll(&mut [PollFd::new(&group, PollFlags::IN)], Some(&LOOK))
        };
        match is_there {
            Ok(1..) => {
                let Ok(question) = ask(&group) else {
                    thread::sleep(PAUSE);
                    continue;
                };
                let pack = question.key().ok().and_then(|key| keys.iter().position(|other| *other == key));
                let may = pack.is_none_or(|at| packs[at].may_be_read(&question));
                question.answer(&group, if may { ALLOW } else { DENY });
            }
            Ok(0) if packs.iter().all(|pack| pack.is_whole() || pack.is_served() || pack.is_unused()) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the kernel to ask"),
        }
    }
}

/// Waits until a mount is in this process's table no more.
pub fn until_unmounted(id: u64) -> io::Result<()> {
    // Opened before it is looked at: what changes after that is told.
    let table = File::open("/proc/self/mountinfo")?;
    while Mounted::all()?.iter().any(|mounted| mounted.id == id) {
        match poll(&mut [PollFd::new(&table, PollFlags::PRI)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::os::fd::OwnedFd;
    use std::sync::RwLock;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use ferry_image::ByteSink;
    use ferry_image::{BuildOptions, Digest, Fetch, Image, Missing, Store, build};

    use super::*;

    #[test]
    fn refusals_hold_for_their_parts_and_not_for_long() {
        let mut refused = Refused { key: (1, 2), range: (4096, 65_536), when: Instant::now() };
        assert!(refused.covers((1, 2), (4096, 65_536)) && refused.covers((1, 2), (65_536, 4096)));
        assert!(!refused.covers((1, 3), (4096, 4096)) && !refused.covers((1, 2), (65_536, 8192)));
        assert!(!refused.covers((1, 2), (0, 8192)) && !refused.covers((1, 2), (4096, u64::MAX)));
        refused.when -= 2 * REFUSAL;
        assert!(!refused.covers((1, 2), (4096, 4096)));
    }

    #[test]
    fn holes_are_not_here() {
        let file = tempfile::tempfile_in("/var/tmp").expect("a file");
        file.set_len(1 << 20).expect("holes take no room");
        file.write_all_at(&[1; 65_536], 131_072).expect("it can be written");
        file.sync_all().expect("it can be synced");
        let held = PackHold(file.try_clone().expect("a descriptor"));
        let null = || OwnedFd::from(File::open("/dev/null").expect("it is there"));
        let has = |from: u64, bytes: u64| {
            held.has(&PermissionEvent { file: null(), number: 0, pid: 0, range: (from, bytes) })
        };
        assert!(has(131_072, 65_536) && has(135_168, 4096) && has(2 << 20, 1));
        assert!(!has(131_071, 65_536) && !has(131_072, 65_537) && !has(0, u64::MAX) && !has(0, 4096));
        assert!(!held.is_served());
    }

    /// Another store, which says nothing as long as somebody else holds its lock.
    #[derive(Debug)]
    struct Elsewhere {
        packs: PathBuf,
        silence: RwLock<()>,
    }

    impl Fetch for Elsewhere {
        fn index(&self, pack: Digest, _: u64) -> io::Result<Vec<u8>> {
            fs::read(self.packs.join(format!("{}.index", pack.hex())))
        }

        fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
            let _answers = self.silence.read().unwrap_or_else(PoisonError::into_inner);
            let mut found = vec![0; usize::try_from(range.end - range.start).expect("it is short")];
            File::open(self.packs.join(pack.hex()))?.read_exact_at(&mut found, range.start)?;
            sink(&found)
        }
    }

    /// Of an image of 16 objects of a block each, what is behind its first blocks.
    fn partly_here(folder: &Path) -> (Arc<Elsewhere>, Objects, PathBuf) {
        let at = |name: &str| folder.join(name);
        fs::create_dir(at("tree")).expect("folders can be made");
        for number in 0..16_u8 {
            fs::write(at("tree").join(number.to_string()), [number; 4096]).expect("files can be made");
        }
        let store = || Store::create(&at("store")).expect("folders can be made");
        let built = build(&at("tree"), &at("image"), store(), &BuildOptions::default(), &|_, _| {});
        let pack = built.expect("it can be built").packs[0];
        drop(Store::create(&at("here")).expect("folders can be made"));
        let from = Arc::new(Elsewhere { packs: at("store/packs"), silence: RwLock::default() });
        let missing = Missing { from: Arc::clone(&from) as Arc<dyn Fetch>, ahead_bytes: 0, cache_bytes: None };
        let image = Image::open(&at("image"), None).expect("it was built");
        let objects = Objects::open_with(&image, &at("here"), Some(missing)).expect("it was built");
        (from, objects, at("here/packs").join(format!("{}.part", pack.hex())))
    }

    #[test]
    fn a_silent_server_holds_up_nobody_who_reads_what_is_here() {
        // A tmpfs cannot be watched, which /tmp may be.
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
        let (from, mut objects, part) = partly_here(folder.path());
        let mut watch = match Watch::begin(&mut objects) {
            Ok(watch) => watch,
            Err(error) => return ferry_skip::skip!("{error:#}"),
        };
        objects.prove_range(0, 4096, 4096).expect("it can be had");
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
        let here = read(1).recv_timeout(Duration::from_secs(20)).expect("it does not wait");
        let held: Vec<_> = waiting.iter().map(|outcome| outcome.recv_timeout(Duration::ZERO)).collect();
        // First of all, or the readers would wait for ever.
        drop(silence);
        here.expect("it is here");
        assert!(held.iter().all(|outcome| matches!(outcome, Err(RecvTimeoutError::Timeout))), "{held:?}");
        for outcome in waiting {
            let read = outcome.recv_timeout(Duration::from_secs(20)).expect("it is answered");
            assert_ne!(read.expect("it can be had"), 0);
        }
    }
}
