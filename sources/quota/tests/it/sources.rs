//! Sources that number inodes again, fail, or free storage later.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Duration;

use ferry_dir::Dir;
use ferry_quota::Quota;
use ferry_vfs::*;

use crate::common::*;
use crate::tree::*;

/// A directory whose inode numbers do not encode handles: a forgotten inode gets another number.
fn without_handles(path: &Path) -> Dir {
    Dir::open(path, ferry_dir::Options { file_handles: false, ..Default::default() }).unwrap()
}

fn limited(source: impl FileSystem + 'static) -> Arc<Quota> {
    Arc::new(Quota::new(Arc::new(source), limits(1 << 30, None)).unwrap())
}

fn empty(source: impl FnOnce(&Path) -> Arc<Quota>) -> Tree {
    let dir = tempfile::tempdir().unwrap();
    Tree { quota: source(dir.path()), cx: caller(), dir }
}

#[test]
fn an_open_file_that_was_forgotten_counts() {
    let tree = empty(|path| limited(without_handles(path)));
    let Tree { quota, cx, .. } = &tree;
    let before = quota.usage();
    let (ino, handle) = tree.create("f").unwrap();
    assert_eq!(tree.write((ino, handle), 0, 40 << 10), Ok(40 << 10));
    let full = quota.usage();
    quota.forget(ino, 1);
    tree.unlink("f").unwrap();
    assert_eq!(quota.usage(), full, "its storage exists");
    assert!(quota.recount());
    assert_eq!(quota.usage(), full);
    quota.release(cx, ino, handle);
    assert_eq!(quota.usage(), before);
    assert_eq!(quota.getattr(cx, ino, None).unwrap_err(), Errno::STALE);
}

#[test]
fn a_forgotten_file_has_one_charge() {
    let tree = empty(|path| limited(without_handles(path)));
    let Tree { quota, cx, .. } = &tree;
    let first = tree.create("f").unwrap();
    quota.fallocate(cx, first.0, first.1, 0, 40 << 10, FallocateFlags::empty()).unwrap();
    quota.forget(first.0, 1);
    let again = quota.lookup(cx, Ino::ROOT, name("f")).unwrap().ino;
    let second = (again, quota.open(cx, again, OFlags::RDWR).unwrap());
    tree.set_size(first, 0).unwrap();
    tree.set_size(second, 0).unwrap();
    tree.assert_exact();
    quota.release(cx, first.0, first.1);
    tree.close(second);
    tree.assert_exact();
    assert_eq!(quota.getattr(cx, again, None).unwrap_err(), Errno::STALE);
}

/// Steps of the test below.
struct Steps {
    written: Barrier,
    measured: Barrier,
    forgotten: Barrier,
}

/// A source that writes the data itself. The first measurement of a count comes between the write and its end, and the
/// count goes on when the client has forgotten the file.
struct Racing {
    dir: Dir,
    steps: Arc<Steps>,
    file: Mutex<Option<Ino>>,
}

fn is_count() -> bool {
    thread::current().name() == Some("count")
}

impl FileSystem for Racing {
    ferry_vfs::delegate!(self => self.dir; lookup, readdir, releasedir, unlink);

    fn forget(&self, ino: Ino, count: u64) {
        self.dir.forget(ino, count);
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.dir.release(cx, ino, handle);
    }

    fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let made = self.dir.create(cx, dir, name, new, flags)?;
        *self.file.lock().unwrap() = Some(made.0.ino);
        Ok(made)
    }

    /// No count completes, and so none corrects the account.
    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        if is_count() { Err(Errno::IO) } else { self.dir.opendir(cx, ino, flags) }
    }

    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let mut bytes = vec![0; at.len as usize];
        let count = input.take(&mut bytes);
        let Data::Extent(extent) = self.dir.write(cx, at, input)? else { panic!("files of directories are extents") };
        rustix::io::pwrite(extent.file.as_fd(), &bytes[..count], at.offset)?;
        self.steps.written.wait();
        self.steps.measured.wait();
        Ok(Data::Bytes(count))
    }

    fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        let is_awaited = is_count() && self.file.lock().unwrap().take_if(|file| *file == ino).is_some();
        if !is_awaited {
            return self.dir.getattr(cx, ino, handle);
        }
        self.steps.written.wait();
        let attr = self.dir.getattr(cx, ino, handle);
        self.steps.measured.wait();
        self.steps.forgotten.wait();
        attr
    }
}

#[test]
fn a_count_measures_a_file_that_its_client_forgets() {
    let [written, measured, forgotten] = [(); 3].map(|()| Barrier::new(2));
    let steps = Arc::new(Steps { written, measured, forgotten });
    let tree = empty(|path| {
        let dir = Dir::open(path, ferry_dir::Options::default()).unwrap();
        limited(Racing { dir, steps: Arc::clone(&steps), file: Mutex::default() })
    });
    let file = tree.create("f").unwrap();
    thread::scope(|scope| {
        let count = thread::Builder::new().name("count".into()).spawn_scoped(scope, || tree.quota.recount()).unwrap();
        assert_eq!(tree.write(file, 0, 40 << 10), Ok(40 << 10));
        tree.close(file);
        steps.forgotten.wait();
        assert!(!count.join().unwrap());
    });
    tree.assert_exact();
    assert_eq!(tree.quota.getattr(&tree.cx, file.0, None).unwrap_err(), Errno::STALE, "a reference is left");
}

/// A directory that cannot be listed again.
struct Unlistable {
    dir: Dir,
    opens: Arc<AtomicUsize>,
}

impl FileSystem for Unlistable {
    ferry_vfs::delegate!(self => self.dir; lookup, readdir, releasedir, getattr, statfs);

    fn forget(&self, ino: Ino, count: u64) {
        self.dir.forget(ino, count);
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        match self.opens.fetch_add(1, Ordering::SeqCst) {
            0 => self.dir.opendir(cx, ino, flags),
            _ => Err(Errno::ACCESS),
        }
    }
}

#[test]
fn counts_that_fail_become_rare() {
    let opens = Arc::<AtomicUsize>::default();
    let tree = empty(|path| {
        let dir = Dir::open(path, ferry_dir::Options::default()).unwrap();
        limited(Unlistable { dir, opens: Arc::clone(&opens) })
    });
    tree.quota.begin().unwrap();
    tree.statfs();
    thread::sleep(Duration::from_secs(5));
    // The first of all, and then after 0, 1 and 3 seconds.
    let opens = opens.load(Ordering::SeqCst);
    assert!((3..=4).contains(&opens), "{opens}");
}

/// A directory with faults.
struct Faulty {
    dir: Dir,
    /// What a lookup of "hidden" returns, which has no entry in listings.
    hidden: Option<Errno>,
    getattr_fails: Arc<AtomicBool>,
    /// What a file of this name has allocated in advance is freed when it is closed.
    trimmed: Option<std::path::PathBuf>,
    fsxattr: [u8; 28],
}

impl Faulty {
    fn new(path: &Path) -> Self {
        Self {
            dir: Dir::open(path, ferry_dir::Options::default()).unwrap(),
            hidden: None,
            getattr_fails: Arc::default(),
            trimmed: None,
            fsxattr: [0; 28],
        }
    }
}

/// A listing without the entry of "hidden".
struct Hiding<'a>(&'a mut dyn DirOutput, &'a Dir);

impl DirOutput for Hiding<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        self.0.fits(name)
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        let hidden = entry.filter(|_| item.name == b"hidden");
        hidden.inspect(|entry| self.1.forget(entry.ino, 1));
        self.0.push(item, entry.filter(|_| hidden.is_none()));
    }
}

impl FileSystem for Faulty {
    ferry_vfs::delegate!(self => self.dir; open, opendir, releasedir, link, unlink, create, tmpfile, write, fallocate, setattr);

    fn forget(&self, ino: Ino, count: u64) {
        self.dir.forget(ino, count);
    }

    fn lookup(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        match self.hidden.filter(|_| name.as_bytes() == b"hidden") {
            Some(errno) => Err(errno),
            None => self.dir.lookup(cx, dir, name),
        }
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.dir.readdir(cx, at, &mut Hiding(out, &self.dir))
    }

    fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        let attr = self.dir.getattr(cx, ino, handle)?;
        if self.getattr_fails.load(Ordering::SeqCst) && attr.kind() == FileType::RegularFile {
            return Err(Errno::IO);
        }
        Ok(attr)
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.dir.release(cx, ino, handle);
        if let Some(path) = &self.trimmed {
            fs::File::options().write(true).open(path).unwrap().set_len(4096).unwrap();
        }
    }

    fn ioctl(&self, _: &Caller<'_>, _: Ino, _: Handle, command: u32, _: &[u8], _: usize) -> Result<Vec<u8>> {
        Ok(if command == 0x801c_581f { self.fsxattr.to_vec() } else { Vec::new() })
    }
}

#[test]
fn a_count_finds_names_without_entries_or_fails() {
    let tree = empty(|path| {
        fs::create_dir(path.join("hidden")).unwrap();
        fs::write(path.join("hidden/f"), [1; 40 << 10]).unwrap();
        limited(Faulty::new(path))
    });
    tree.assert_exact();
    let count = |errno| {
        let source = Arc::new(Faulty { hidden: Some(errno), ..Faulty::new(tree.dir.path()) });
        let quota = Quota::new(source.clone(), limits(1 << 30, None));
        assert_eq!(source.dir.usage().inodes, 1, "a reference is left");
        quota.map(|quota| quota.usage().files).ok()
    };
    assert_eq!([Errno::ACCESS, Errno::IO, Errno::NOENT].map(count), [None, None, Some(1)]);
}

#[test]
fn a_file_that_cannot_be_measured_keeps_its_other_name() {
    let fails = Arc::<AtomicBool>::default();
    let tree = empty(|path| limited(Faulty { getattr_fails: fails.clone(), ..Faulty::new(path) }));
    let before = tree.quota.usage();
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 40 << 10), Ok(40 << 10));
    tree.quota.link(&tree.cx, file.0, Ino::ROOT, name("g")).unwrap();
    let unlink = |name| {
        fails.store(true, Ordering::SeqCst);
        tree.unlink(name).unwrap();
        fails.store(false, Ordering::SeqCst);
    };
    unlink("f");
    tree.quota.release(&tree.cx, file.0, file.1);
    tree.quota.forget(file.0, 2);
    tree.assert_exact();
    let named = tree.quota.lookup(&tree.cx, Ino::ROOT, name("g")).unwrap().ino;
    // Open, so that its charge is known.
    let handle = tree.quota.open(&tree.cx, named, OFlags::RDWR).unwrap();
    unlink("g");
    tree.close((named, handle));
    assert_eq!(tree.quota.usage(), before);
}

#[test]
fn what_closing_a_file_frees_is_counted() {
    let tree = empty(|path| limited(Faulty { trimmed: Some(path.join("f")), ..Faulty::new(path) }));
    let file = tree.create("f").unwrap();
    assert_eq!(tree.write(file, 0, 40 << 10), Ok(40 << 10));
    tree.close(file);
    tree.assert_exact();
}

#[test]
fn the_size_of_extents_cannot_change() {
    const FSSETXATTR: u32 = 0x401c_5820;
    let mut fsxattr = [0; 28];
    (fsxattr[1], fsxattr[5]) = (0x8, 1);
    let tree = empty(|path| limited(Faulty { fsxattr, ..Faulty::new(path) }));
    let set = |change: fn(&mut [u8; 28])| {
        let mut input = fsxattr;
        change(&mut input);
        tree.quota.ioctl(&tree.cx, Ino::ROOT, Handle(0), FSSETXATTR, &input, 0).map(drop)
    };
    assert_eq!(set(|_| {}), Ok(()));
    assert_eq!(set(|fsxattr| fsxattr[0] |= 0x80), Ok(()), "no dump, for example");
    let changes: [fn(&mut [u8; 28]); 4] =
        [|x| x[7] = 0x40, |x| x[1] = 0, |x| x[1] |= 0x10, |x| (x[2], x[17]) = (1, 0x10)];
    assert_eq!(changes.map(set), [Err(Errno::PERM); 4]);
    assert_eq!(tree.quota.ioctl(&tree.cx, Ino::ROOT, Handle(0), FSSETXATTR, &[0; 8], 0), Err(Errno::PERM));
}
