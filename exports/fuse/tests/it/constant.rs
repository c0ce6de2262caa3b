//! A source that never changes: the kernel opens and closes files without a request, and requests nothing twice.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Mounted, mount, paths, plain, wait_until};
use ferry_fuse::{Cache, Options};
use ferry_vfs::*;
use rustix::fs::{AtFlags, FlockOperation, OFlags, StatxFlags};

const FILES: u64 = 20;
const BYTES: usize = 5000;
const FIRST_FILE: u64 = 100;
const FIRST_LINK: u64 = 200;

/// [`FILES`] files and as many links to them, all in the root.
#[derive(Default)]
struct Constant {
    features: Features,
    opens: AtomicU64,
    flushes: AtomicU64,
    /// Reads with a handle that is neither 0 nor one of an open.
    strange_handles: AtomicU64,
}

fn entry(ino: u64) -> Entry {
    let ino = Ino(ino);
    Entry::new(ino, attr(ino))
}

fn attr(ino: Ino) -> Attr {
    let (kind, size) = match ino.0 {
        1 => (FileType::Directory, 0),
        FIRST_LINK.. => (FileType::Symlink, 3),
        _ => (FileType::RegularFile, BYTES as u64),
    };
    let times = Timespec { sec: 1_000_000_000, nsec: 0 };
    Attr { atime: times, mtime: times, ctime: times, btime: None, size, ..Attr::new(ino, kind, 0o755) }
}

fn content(ino: Ino) -> Vec<u8> {
    (0..BYTES).map(|at| u8::try_from((at as u64 + ino.0) % 251).unwrap()).collect()
}

fn names() -> impl Iterator<Item = (String, u64)> {
    let files = (0..FILES).map(|at| (format!("f{at}"), FIRST_FILE + at));
    files.chain((0..FILES).map(|at| (format!("l{at}"), FIRST_LINK + at)))
}

impl FileSystem for Constant {
    fn features(&self) -> Features {
        Features { constant: true, read_only: true, ..self.features }
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        let found = names().find(|(known, _)| known.as_bytes() == name.as_bytes());
        found.map(|(_, ino)| entry(ino)).ok_or(Errno::NOENT)
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(attr(ino))
    }
    fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Ok(format!("f{}", ino.0 - FIRST_LINK).into_bytes())
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        self.opens.fetch_add(1, Ordering::Relaxed);
        Ok(Handle(7))
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        if at.handle != Handle(0) && at.handle != Handle(7) {
            self.strange_handles.fetch_add(1, Ordering::Relaxed);
        }
        let content = content(at.ino);
        let from = content.len().min(usize::try_from(at.offset).unwrap_or(usize::MAX));
        let to = content.len().min(from + at.len as usize);
        Ok(Data::Bytes(out.put(&content[from..to])))
    }
    fn flush(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64) -> Result<()> {
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn readdir(&self, _: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        for (index, (name, ino)) in names().enumerate().skip(usize::try_from(at.offset).unwrap_or(usize::MAX)) {
            if !out.fits(name.as_bytes()) {
                break;
            }
            let entry = entry(ino);
            let item = DirItem { ino, next: index as u64 + 1, kind: entry.attr.kind(), name: name.as_bytes() };
            out.push(&item, at.plus.then_some(&entry));
        }
        Ok(())
    }
}

/// Opens each file, reads it, and closes it.
fn read_all(at: &Path) {
    for number in 0..FILES {
        assert!(fs::read(at.join(format!("f{number}"))).unwrap() == content(Ino(FIRST_FILE + number)));
    }
}

/// Lists everything, as `ls -l` does, and reads the links.
fn list(at: &Path) {
    let mut count = 0;
    for found in fs::read_dir(at).unwrap() {
        let found = found.unwrap();
        rustix::fs::statx(rustix::fs::CWD, found.path(), AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS).unwrap();
        if found.file_type().unwrap().is_symlink() {
            fs::read_link(found.path()).unwrap();
        }
        count += 1;
    }
    assert_eq!(count, 2 * FILES);
    let root = rustix::fs::statx(rustix::fs::CWD, at, AtFlags::empty(), StatxFlags::BASIC_STATS).unwrap();
    assert_eq!(u32::from(root.stx_mode) & libc::S_IFMT, libc::S_IFDIR);
}

fn requests(mounted: &Mounted, work: impl FnOnce(&Path)) -> u64 {
    let before = mounted.export().stats().requests;
    work(&mounted.at);
    mounted.export().stats().requests - before
}

/// The least of a few times: the kernel forgets what it knows where memory is short.
fn requests_again(mounted: &Mounted, work: impl Fn(&Path)) -> Option<u64> {
    (0..3).map(|_| requests(mounted, &work)).min()
}

#[test]
fn nothing_is_requested_twice() {
    for path in paths() {
        for cache in [Cache::Auto, Cache::Always] {
            let source = Arc::new(Constant::default());
            let mounted = mount(Arc::clone(&source) as _, Options { cache, ..plain(path) });
            // The root, the first OPEN, FLUSH and STATX, and of the file a LOOKUP and a READ. A child of another test may close
            // it, too, before the kernel knows that no FLUSH is wanted.
            let first = requests(&mounted, |at| drop(fs::read(at.join("f0")).unwrap()));
            assert!((6..=8).contains(&first), "{path:?} {cache:?}: {first}");
            // Of each other file a LOOKUP and a READ.
            assert_eq!(requests(&mounted, read_all), 2 * (FILES - 1), "{path:?} {cache:?}");
            assert_eq!(requests_again(&mounted, read_all), Some(0), "{path:?} {cache:?}: opened again");
            // The first OPENDIR, the listing, its end, and each link. The kernel lists the names that it knows, too.
            let listed = requests(&mounted, list);
            assert!((3 + FILES..6 + FILES).contains(&listed), "{path:?} {cache:?}: {listed}");
            assert_eq!(requests_again(&mounted, list), Some(0), "{path:?} {cache:?}: listed again");
            let counts = [&source.opens, &source.flushes, &source.strange_handles];
            assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), [0; 3], "{path:?} {cache:?}");
            mounted.stop();
        }
    }
}

#[test]
fn files_that_are_opened_without_a_request_work_as_others() {
    for path in paths() {
        let mounted = mount(Arc::new(Constant::default()), plain(path));
        let name = mounted.path("f3");
        let expected = content(Ino(FIRST_FILE + 3));
        let file = File::open(&name).unwrap();
        let mut end = [0; 100];
        assert_eq!(file.read_at(&mut end, 4990).unwrap(), 10);
        assert_eq!(end[..10], expected[4990..]);
        // Past the page cache.
        let direct = File::options().read(true).custom_flags(OFlags::DIRECT.bits().cast_signed()).open(&name).unwrap();
        let mut whole = vec![0; 8192];
        assert_eq!(direct.read_at(&mut whole, 0).unwrap(), BYTES);
        assert!(whole[..BYTES] == expected);
        // Locks are the kernel's own.
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        let refused = rustix::fs::flock(&direct, FlockOperation::NonBlockingLockExclusive);
        assert_eq!(refused, Err(rustix::io::Errno::AGAIN));
        drop(file);
        // A child of another test has it open until it executes its program.
        let lock = || rustix::fs::flock(&direct, FlockOperation::NonBlockingLockExclusive);
        wait_until("released by the close", || lock().is_ok());
        // SAFETY: maps a file at an address of the kernel's choice.
        let map = unsafe {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            mmap(std::ptr::null_mut(), BYTES, ProtFlags::READ, MapFlags::SHARED, &direct, 0).unwrap()
        };
        // SAFETY: so many bytes were mapped just now, and nothing writes to them.
        let mapped = unsafe { std::slice::from_raw_parts(map.cast::<u8>().cast_const(), BYTES) };
        assert!(*mapped == expected);
        // SAFETY: nothing uses the mapping any more.
        unsafe { rustix::mm::munmap(map, BYTES).unwrap() };
        // Nothing can be written, and nothing seems to be.
        for options in [File::options().write(true), File::options().write(true).truncate(true)] {
            assert_eq!(options.open(&name).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
        }
        assert_eq!(fs::read(&name).unwrap(), expected);
        mounted.stop();
    }
}

#[test]
fn open_is_sent_only_where_it_matters() {
    let locks = Features { posix_locks: true, ..Features::default() };
    for path in paths() {
        for (features, options) in [
            (locks, plain(path)),
            (Features::default(), Options { cache: Cache::Metadata, ..plain(path) }),
            // Only the source checks permissions then.
            (Features::default(), Options { default_permissions: false, ..plain(path) }),
        ] {
            let source = Arc::new(Constant { features, ..Constant::default() });
            let mounted = mount(Arc::clone(&source) as _, options);
            read_all(&mounted.at);
            assert_eq!(source.opens.load(Ordering::Relaxed), FILES);
            mounted.stop();
        }
    }
}
