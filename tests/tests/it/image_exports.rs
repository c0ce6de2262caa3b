//! Images through the exports: the whole unchanged tree over virtio-fs and 9P, and never other bytes.

use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use common::{Bench, Facts, facts, fill};
use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT};
use ferry_image::{BuildOptions, Layout, Source, Store, build};
use ferry_tests::guest::DeviceKind;
use ferry_tests::mounts::program;
use ferry_tests::ninep::NinePServer;
use ferry_tests::window::{FrontEndRequest, answer, next_wish};
use ferry_tests::{Device, Export, Kind, Mount, Options, Share, TIMEOUT, guest_on, run};
use ferry_vfs::FileSystem;
use ferry_wire::fuse::abi::{
    Attr, InitFlags, MINOR_MAX, Opcode, SETUPMAPPING_READ, SETUPMAPPING_WRITE, SetupmappingIn,
};
use zerocopy::IntoBytes;

const LAYOUTS: [(&str, Layout); 2] = [("flat", Layout::Flat), ("composefs", Layout::Composefs { version: None })];

/// A file of many pieces, and one that is an object of its own in either layout.
const LARGE: &str = "file-5242880";
const SHORT: &str = "file-8192";

/// What the sources said, for there is one log in a process.
#[derive(Clone, Default)]
struct SourceLog(Arc<Mutex<String>>);

impl Write for SourceLog {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().push_str(&String::from_utf8_lossy(text));
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl SourceLog {
    fn begin() -> Self {
        static ONE: OnceLock<SourceLog> = OnceLock::new();
        let said = ONE.get_or_init(|| {
            let said = Self::default();
            let writer = said.clone();
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).init();
            said
        });
        said.0.lock().unwrap().clear();
        said.clone()
    }

    #[track_caller]
    fn assert(&self, words: &str) {
        let said = self.0.lock().unwrap();
        assert!(said.contains(words), "the log does not say '{words}': {said}");
    }
}

/// A tree, and an image of it.
struct Made {
    bench: Bench,
    digest: String,
}

impl Made {
    fn new(layout: Layout) -> Self {
        // In memory, where it takes no time to make a store durable.
        let bench = Bench::of(ferry_tests::directory(ferry_tests::Place::Memory));
        fill(&bench.tree());
        let options = BuildOptions { layout, ..BuildOptions::default() };
        let store = Store::create(&bench.store()).unwrap();
        let built = build(&bench.tree(), &bench.path("image"), store, &options, &|_, _| {}).unwrap();
        Self { bench, digest: built.tree.to_string() }
    }

    fn source(&self) -> Arc<dyn FileSystem> {
        Arc::new(Source::open(&self.bench.path("image"), &self.bench.store(), None).unwrap())
    }

    /// What is known of the tree: with the layout composefs names of one file are files.
    fn facts(&self, layout: Layout) -> BTreeMap<PathBuf, Facts> {
        let mut facts = facts(&self.bench.tree());
        if layout != Layout::Flat {
            facts.values_mut().for_each(|facts| facts.nlink = facts.nlink.min(1));
        }
        facts
    }

    /// Flips a bit of what the store has of a file.
    fn damage(&self, name: &str) {
        let whole = fs::read(self.bench.tree().join(name)).unwrap();
        // No other file has these.
        let wanted = &whole[4096..4096 + 64];
        let mut left = vec![self.bench.store()];
        while let Some(path) = left.pop() {
            if path.is_dir() {
                left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let stored = fs::read(&path).unwrap();
            let place = stored.chunks(wanted.len()).position(|bytes| bytes == wanted);
            if let Some(at) = place.map(|place| place * wanted.len()) {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
                let file = fs::File::options().write(true).open(&path).unwrap();
                file.write_all_at(&[stored[at] ^ 1], at as u64).unwrap();
                return;
            }
        }
        panic!("{name} is not in the store");
    }
}

/// A source on a socket, for guests.
struct Shared {
    socket: PathBuf,
    export: Option<Export>,
    _directory: tempfile::TempDir,
}

impl Shared {
    fn new(source: Arc<dyn FileSystem>, tag: &str) -> Self {
        let directory = ferry_tests::directory(ferry_tests::Place::Disk);
        let socket = directory.path().join("s");
        let options = Options { queues: 1, tag: Some(tag.parse().unwrap()), ..Options::default() };
        let export = Export::listen(&socket, source, options).unwrap();
        Self { socket, export: Some(export), _directory: directory }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop();
        }
    }
}

/// What a driver is told of a tree.
fn seen(driver: &mut Driver) -> BTreeMap<PathBuf, Facts> {
    let root = driver.getattr(ROOT).unwrap().attr;
    let mut seen = BTreeMap::from([(PathBuf::new(), facts_of(driver, ROOT, &root))]);
    let mut left = vec![(ROOT, PathBuf::new())];
    while let Some((dir, path)) = left.pop() {
        for name in names(driver, dir) {
            let path = path.join(std::ffi::OsStr::from_bytes(&name));
            let entry = driver.lookup(dir, &name).unwrap();
            if entry.attr.mode & libc::S_IFMT == libc::S_IFDIR {
                left.push((entry.nodeid, path.clone()));
            }
            let facts = facts_of(driver, entry.nodeid, &entry.attr);
            assert_eq!(seen.insert(path.clone(), facts), None, "{} is listed twice", path.display());
        }
    }
    seen
}

fn names(driver: &mut Driver, dir: u64) -> Vec<Vec<u8>> {
    let handle = driver.opendir(dir).map_or(0, |opened| opened.fh);
    let (mut names, mut offset) = (Vec::new(), 0);
    loop {
        let listed = driver.readdirplus(dir, handle, offset, 1 << 15).unwrap();
        let Some(last) = listed.last() else { return names };
        offset = last.next;
        let real = listed.into_iter().map(|listed| listed.name).filter(|name| name != b"." && name != b"..");
        names.extend(real);
    }
}

fn facts_of(driver: &mut Driver, node: u64, attr: &Attr) -> Facts {
    let kind = attr.mode & libc::S_IFMT;
    let own = |value: u64| if kind == libc::S_IFDIR { 0 } else { value };
    // As `new_encode_dev` of Linux has it.
    let device = (attr.rdev >> 8 & 0xfff, attr.rdev & 0xff | attr.rdev >> 12 & 0xf_ff00);
    let target = driver.readlink(node).ok().map(|target| std::ffi::OsString::from_vec(target).into());
    Facts {
        mode: attr.mode,
        owner: (attr.uid, attr.gid),
        nlink: own(attr.nlink.into()),
        size: own(attr.size),
        rdev: rustix::fs::makedev(device.0, device.1),
        mtime: (attr.mtime.cast_signed(), attr.mtimensec.into()),
        target: target.filter(|_| kind == libc::S_IFLNK),
        bytes: (kind == libc::S_IFREG).then(|| read(driver, node, attr.size).unwrap()),
        xattrs: xattrs(driver, node),
    }
}

fn xattrs(driver: &mut Driver, node: u64) -> Vec<(Vec<u8>, Vec<u8>)> {
    let names = driver.listxattr(node).unwrap();
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut all: Vec<_> = names.map(|name| (name.to_vec(), driver.getxattr(node, name).unwrap())).collect();
    all.sort_unstable();
    all
}

/// All bytes of a file, read in lengths that are none of its pieces'.
fn read(driver: &mut Driver, node: u64, size: u64) -> ferry_driver::Result<Vec<u8>> {
    let opened = match driver.open(node, 0) {
        // Files are opened and closed without a request.
        Err(error) if error.errno() == Some(libc::ENOSYS) => None,
        opened => Some(opened?.fh),
    };
    let handle = opened.unwrap_or(0);
    let mut bytes = Vec::new();
    let outcome = loop {
        match driver.read(node, handle, bytes.len() as u64, 100_000) {
            Ok(read) if read.is_empty() => break Ok(()),
            Ok(read) => bytes.extend(read),
            Err(error) => break Err(error),
        }
    };
    if let Some(handle) = opened {
        driver.release(node, handle)?;
    }
    outcome?;
    assert_eq!(bytes.len() as u64, size);
    Ok(bytes)
}

#[track_caller]
fn assert_same(found: &BTreeMap<PathBuf, Facts>, expected: &BTreeMap<PathBuf, Facts>) {
    for (path, facts) in expected {
        assert!(found.get(path) == Some(facts), "{}: {:?}, not {facts:?}", path.display(), found.get(path));
    }
    assert_eq!(found.len(), expected.len(), "there is more than there should be");
}

#[test]
fn a_driver_reads_the_whole_tree() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    for (name, layout) in LAYOUTS {
        let made = Made::new(layout);
        let shared = Shared::new(made.source(), "t");
        let mut driver = Driver::connect(&shared.socket, Config::default()).unwrap();
        driver.init().unwrap();
        println!("{name}");
        assert_same(&seen(&mut driver), &made.facts(layout));
        let [twin, link] = ["twin", "a-link"].map(|name| driver.lookup(ROOT, name).unwrap().nodeid);
        assert_eq!(twin == link, layout == Layout::Flat, "one file with two names");
        // Nothing can be changed.
        let refused = driver.open(twin, libc::O_WRONLY.cast_unsigned()).unwrap_err();
        assert_eq!(refused.errno(), Some(libc::EROFS));
        assert_eq!(driver.unlink(ROOT, "twin").unwrap_err().errno(), Some(libc::EROFS));
    }
}

/// Linux opens nothing by a request then, and closes nothing.
#[test]
fn a_client_that_opens_without_a_request_reads_the_whole_tree() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    let offered = INIT_FLAGS | InitFlags::NO_OPEN_SUPPORT | InitFlags::NO_OPENDIR_SUPPORT;
    for (name, layout) in LAYOUTS {
        let made = Made::new(layout);
        let shared = Shared::new(made.source(), "t");
        let mut driver = Driver::connect(&shared.socket, Config::default()).unwrap();
        driver.init_with(offered, MINOR_MAX).unwrap();
        let node = driver.lookup(ROOT, "twin").unwrap().nodeid;
        let refused = [driver.open(node, 0).map(drop), driver.flush(node, 0, 1), driver.opendir(ROOT).map(drop)];
        for refused in refused {
            assert_eq!(refused.unwrap_err().errno(), Some(libc::ENOSYS), "{name}");
        }
        assert_same(&seen(&mut driver), &made.facts(layout));
        assert_eq!(driver.write(node, 0, 0, b"x").unwrap_err().errno(), Some(libc::EROFS), "{name}");
    }
}

#[test]
fn a_flipped_bit_is_an_error_and_named() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for (name, layout) in LAYOUTS {
        let made = Made::new(layout);
        [LARGE, SHORT].into_iter().for_each(|damaged| made.damage(damaged));
        for damaged in [LARGE, SHORT] {
            // An image says ten times in ten seconds what is wrong with it: each file has an open image of its own.
            let shared = Shared::new(made.source(), "t");
            let mut driver = Driver::connect(&shared.socket, Config::default()).unwrap();
            driver.init().unwrap();
            let said = SourceLog::begin();
            let whole = fs::read(made.bench.tree().join(damaged)).unwrap();
            let node = driver.lookup(ROOT, damaged).unwrap().nodeid;
            for _ in 0..2 {
                let refused = read(&mut driver, node, whole.len() as u64).unwrap_err();
                assert_eq!(refused.errno(), Some(libc::EIO), "{name}, {damaged}");
            }
            said.assert("the object ");
            said.assert("is damaged");
            // What can be read is right, in whatever pieces.
            let handle = driver.open(node, 0).unwrap().fh;
            for (at, block) in whole.chunks(4096).enumerate() {
                match driver.read(node, handle, at as u64 * 4096, 4096) {
                    Ok(read) => assert!(read == block, "{name}, {damaged}: wrong bytes in block {at}"),
                    Err(error) => assert_eq!(error.errno(), Some(libc::EIO)),
                }
            }
            // Others are as they were.
            for other in ["file-4097", "twin"] {
                let entry = driver.lookup(ROOT, other).unwrap();
                let expected = fs::read(made.bench.tree().join(other)).unwrap();
                assert!(read(&mut driver, entry.nodeid, entry.attr.size).unwrap() == expected, "{other}");
            }
        }
    }
}

/// Builds an image of what the guest sees by both exports, whose digest says whether that is the tree, and looks at a damaged one.
const SCRIPT: &str = r#"
ferry=$1 layout=$2 large=$3
for way in virtiofs share; do
    echo $way $("$ferry" image build /mnt/$way -o /mnt/work/image-$way --store /mnt/work/store-$way --layout $layout)
done
if cat /mnt/bad/$large >/mnt/work/got 2>/mnt/work/said; then exit 1; fi
grep -q 'Input/output error' /mnt/work/said
cmp -n $(stat -c %s /mnt/work/got) /mnt/work/got /mnt/virtiofs/$large
# It is opened without a request, and not changed.
for how in conv=notrunc conv=fsync; do
    if dd if=/dev/zero of=/mnt/virtiofs/twin bs=10 count=1 $how 2>/mnt/work/said; then exit 1; fi
    grep -q 'Read-only file system' /mnt/work/said
done
cmp /mnt/bad/twin /mnt/virtiofs/twin
"#;

#[test]
fn a_guest_sees_the_whole_tree_by_virtio_fs_and_by_9p() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for (name, layout) in LAYOUTS {
        let said = SourceLog::begin();
        let (made, other) = (Made::new(layout), Made::new(layout));
        other.damage(LARGE);
        let Some(server) = NinePServer::new(made.source(), ferry_ninep::Options::default()) else { return };
        let (good, bad) = (Shared::new(made.source(), "good"), Shared::new(other.source(), "bad"));
        let script = format!("mkdir /mnt/work; mount -t tmpfs none /mnt/work\n{SCRIPT}");
        let words = ["sh", "-euxc", &script, "sh", program().to_str().unwrap(), name, LARGE];
        let mut guest = server.guest("msize=1048576", words);
        guest.devices = vec![Device::fs(&good.socket, "good"), Device::fs(&bad.socket, "bad")];
        guest.mounts = vec![Mount::virtiofs("good", "/mnt/virtiofs"), Mount::virtiofs("bad", "/mnt/bad")];
        let out = run(guest, TIMEOUT).ok();
        assert_eq!(out, format!("virtiofs {0}\nshare {0}\n", made.digest), "{name}");
        said.assert("is damaged");
    }
}

/// A mount on this host; `None`, with a line that says so, where there are none.
fn mounted(source: Arc<dyn FileSystem>, at: &Path, options: ferry_fuse::Options) -> Option<ferry_fuse::Export> {
    if let Some(why) = ferry_tests::mounts::missing() {
        ferry_skip::skip!("{why}");
        return None;
    }
    fs::create_dir(at).unwrap();
    Some(ferry_fuse::Export::mount(at, source, options).unwrap())
}

#[test]
fn our_client_sees_the_whole_tree_by_9p() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let said = SourceLog::begin();
    for (name, layout) in LAYOUTS {
        let made = Made::new(layout);
        let socket = made.bench.path("s");
        let serve = |source| {
            let _ = fs::remove_file(&socket);
            let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            ferry_ninep::Export::start(vec![listener.into()], source, ferry_ninep::Options::default()).unwrap()
        };
        let connect = || {
            let server = ferry_9p_client::Unix(socket.clone());
            Arc::new(ferry_9p_client::Client::connect(Arc::new(server), ferry_9p_client::Options::default()).unwrap())
        };
        let server = serve(made.source());
        let at = made.bench.path("mnt");
        let Some(export) = mounted(connect(), &at, ferry_fuse::Options::default()) else { return };
        println!("{name}");
        assert_same(&facts(&at), &made.facts(layout));
        export.stop();
        server.stop();
        made.damage(LARGE);
        let server = serve(made.source());
        let Some(export) = mounted(connect(), &made.bench.path("bad"), ferry_fuse::Options::default()) else { return };
        let refused = fs::read(made.bench.path("bad").join(LARGE)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EIO), "{name}");
        said.assert("is damaged");
        export.stop();
        server.stop();
    }
}

/// composefs's objects are files, which the kernel reads on its own once they are proved.
#[test]
fn objects_are_passed_through() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let said = SourceLog::begin();
    let layout = Layout::Composefs { version: None };
    let made = Made::new(layout);
    let at = made.bench.path("mnt");
    // Without a cache a READ comes for each read that is not passed through.
    let options = || ferry_fuse::Options { cache: ferry_tests::Cache::None, ..ferry_fuse::Options::default() };
    let Some(export) = mounted(made.source(), &at, options()) else { return };
    let verdict = export.explain().passthrough.clone();
    if verdict.reason.as_ref().is_some_and(|reason| reason.contains("this kernel has no FUSE passthrough")) {
        ferry_skip::skip!("{verdict:?}");
        export.stop();
        return;
    }
    assert!(verdict.used, "{verdict:?}");
    let check = |name: &str| {
        let bytes = fs::read(at.join(name)).unwrap();
        assert!(bytes == fs::read(made.bench.tree().join(name)).unwrap(), "{name}");
        bytes.len() as u64
    };
    check(SHORT);
    check("twin");
    assert_eq!(export.stats().read_bytes, 0, "small objects are proved when they are opened");
    // The first reader of a larger one has it proved.
    let bytes = check(LARGE);
    assert_eq!(export.stats().read_bytes, bytes);
    check(LARGE);
    assert_eq!(export.stats().read_bytes, bytes, "the second one reads it from the kernel");
    assert_same(&facts(&at), &made.facts(layout));
    export.stop();
    [SHORT, LARGE].into_iter().for_each(|name| made.damage(name));
    let at = made.bench.path("bad");
    let Some(export) = mounted(made.source(), &at, options()) else { return };
    for name in [SHORT, LARGE, SHORT] {
        let refused = fs::read(at.join(name)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EIO), "{name}");
    }
    said.assert("is damaged: its bytes have the digest");
    export.stop();
}

/// What packs hold has no file of its own.
#[test]
fn pieces_of_packs_are_not_passed_through() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    let made = Made::new(Layout::Flat);
    let at = made.bench.path("mnt");
    let Some(export) = mounted(made.source(), &at, ferry_fuse::Options::default()) else { return };
    assert!(!export.explain().passthrough.used);
    assert!(fs::read(at.join(LARGE)).unwrap() == fs::read(made.bench.tree().join(LARGE)).unwrap());
    export.stop();
}

/// Programs that copy attributes take "not supported" for an error.
#[test]
fn a_file_without_attributes_has_an_empty_list_in_a_mount() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    let bench = Bench::of(ferry_tests::directory(ferry_tests::Place::Memory));
    fs::write(bench.tree().join("plain"), "x").unwrap();
    bench.build("image");
    let source = Arc::new(Source::open(&bench.path("image"), &bench.store(), None).unwrap());
    let at = bench.path("mnt");
    let Some(export) = mounted(source, &at, ferry_fuse::Options::default()) else { return };
    // Asked for one by its name, the kernel is told once that there are none, and the list stays.
    for _ in 0..2 {
        for path in [at.clone(), at.join("plain")] {
            assert_eq!(rustix::fs::listxattr(&path, &mut [0_u8; 100][..]), Ok(0));
            let none = rustix::fs::getxattr(&path, "user.none", &mut [0_u8; 100][..]);
            assert_eq!(none, Err(rustix::io::Errno::OPNOTSUPP));
        }
    }
    export.stop();
}

/// What a stock guest has in its windows are copies.
const WINDOWS: &str = r#"
ferry=$1 large=$2
for layout in flat composefs; do
    grep " /mnt/$layout virtiofs .*dax=always" /proc/mounts >/dev/null
    echo $layout $("$ferry" image build /mnt/$layout -o /run/image-$layout --store /run/store-$layout --layout $layout)
done
if cat /mnt/bad/$large >/run/got 2>/run/said; then exit 1; fi
grep -q 'Input/output error' /run/said
cmp -n $(stat -c %s /run/got) /run/got /mnt/flat/$large
cmp /mnt/bad/twin /mnt/flat/twin
cd /
umount /mnt/flat /mnt/composefs /mnt/bad
"#;

#[test]
#[ignore = "long: make test-all"]
fn a_guest_of_qemu_sees_the_whole_tree_in_its_windows() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let said = SourceLog::begin();
    let options = Options { queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let programs = Share::of(Path::new("/"), ferry_tests::directory(ferry_tests::Place::Disk), dir, options);
    let made = LAYOUTS.map(|(name, layout)| (name, Made::new(layout)));
    let bad = Made::new(Layout::Flat);
    bad.damage(LARGE);
    let shared = [(made[0].0, &made[0].1), (made[1].0, &made[1].1), ("bad", &bad)]
        .map(|(tag, made)| (tag, Shared::new(made.source(), tag)));
    let words = ["sh", "-euxc", WINDOWS, "sh", program().to_str().unwrap(), LARGE];
    let mut guest = guest_on(&programs.socket, words);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    for (tag, shared) in &shared {
        let kind = DeviceKind::Fs { tag: (*tag).into(), queues: 1, dax: true };
        guest.devices.push(Device { socket: shared.socket.clone(), kind });
        let options = "dax=always".into();
        guest.mounts.push(Mount { options, ..Mount::virtiofs(*tag, format!("/mnt/{tag}")) });
    }
    guest.cwd = "/".into();
    guest.memory_mib = 1024;
    let out = run(guest, TIMEOUT).ok();
    let expected = made.iter().map(|(name, made)| format!("{name} {}\n", made.digest)).collect::<String>();
    assert_eq!(out, expected);
    said.assert("is damaged");
}

const CHUNK: u64 = 2 << 20;

/// A front end that maps what it is asked to map, and what is in its window.
struct Front {
    driver: Driver,
    mapped: Arc<Mutex<BTreeMap<u64, FrontEndRequest>>>,
    /// Nothing is mapped at the moment.
    refuses_all: Arc<AtomicBool>,
}

impl Front {
    /// One that takes files that are open for reading only, or that refuses them.
    fn new(socket: &Path, takes_read_only: bool) -> Self {
        let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
        let mut driver = Driver::connect(socket, config).unwrap();
        let (_, line) = driver.window().unwrap();
        driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT, MINOR_MAX).unwrap();
        let mapped = Arc::default();
        let theirs: Arc<Mutex<BTreeMap<u64, FrontEndRequest>>> = Arc::clone(&mapped);
        let refuses_all = Arc::new(AtomicBool::new(false));
        let busy = Arc::clone(&refuses_all);
        std::thread::spawn(move || {
            while let Some(wish) = next_wish(&line) {
                let (code, at) = (wish.code, wish.numbers[2]);
                let takes = |file: &fs::File| !busy.load(Ordering::Relaxed) && (takes_read_only || !is_read_only(file));
                let refuses = wish.file.as_ref().is_some_and(|file| !takes(file));
                match (code, refuses) {
                    (9, false) => assert!(theirs.lock().unwrap().insert(at, wish).is_none(), "mapped twice"),
                    (9, true) => {}
                    _ => assert_eq!(theirs.lock().unwrap().remove(&at).map(|was| was.numbers), Some(wish.numbers)),
                }
                answer(&line, code, refuses.into());
            }
        });
        Self { driver, mapped, refuses_all }
    }

    /// Has a part of a file mapped, as Linux does; returns what was mapped for it.
    fn map(&mut self, name: &str, offset: u64, window_offset: u64) -> ferry_driver::Result<Vec<FrontEndRequest>> {
        let node = self.driver.lookup(ROOT, name)?.nodeid;
        self.setup(node, offset, window_offset, SETUPMAPPING_READ)?;
        let mapped = self.mapped.lock().unwrap();
        let there = mapped.range(window_offset..window_offset + CHUNK).map(|(_, wish)| FrontEndRequest {
            code: wish.code,
            numbers: wish.numbers,
            file: wish.file.as_ref().map(|file| file.try_clone().unwrap()),
        });
        Ok(there.collect())
    }

    fn setup(&mut self, node: u64, offset: u64, window_offset: u64, flags: u64) -> ferry_driver::Result<Vec<u8>> {
        let args = SetupmappingIn { fh: u64::MAX, foffset: offset, len: CHUNK, flags, moffset: window_offset };
        self.driver.ask(Opcode::Setupmapping, node, &[args.as_bytes()], &[], 0)
    }
}

fn is_read_only(file: &fs::File) -> bool {
    rustix::fs::fcntl_getfl(file).unwrap() & rustix::fs::OFlags::RWMODE == rustix::fs::OFlags::RDONLY
}

/// The bytes that a guest sees by these mappings, which lie one behind the other, and which of them are files of the store.
fn shown(wishes: &[FrontEndRequest]) -> (Vec<u8>, Vec<bool>) {
    let (mut bytes, mut in_place) = (Vec::new(), Vec::new());
    let begin = wishes.first().map_or(0, |wish| wish.numbers[2]);
    for FrontEndRequest { numbers: [_, file_offset, window_offset, length, flags], file, .. } in wishes {
        assert_eq!((*window_offset, *flags), (begin + bytes.len() as u64, 0), "no gap, and nothing to be written");
        let mut part = vec![0; usize::try_from(*length).unwrap()];
        let file = file.as_ref().unwrap();
        file.read_exact_at(&mut part, *file_offset).unwrap();
        bytes.extend(part);
        in_place.push(is_read_only(file));
    }
    (bytes, in_place)
}

/// What a file has from a place on, up to the end of a chunk, and zeros up to the end of the page.
fn expected(made: &Made, name: &str, offset: u64) -> Vec<u8> {
    let whole = fs::read(made.bench.tree().join(name)).unwrap();
    let rest = &whole[usize::try_from(offset).unwrap()..];
    let mut part = rest[..rest.len().min(usize::try_from(CHUNK).unwrap())].to_vec();
    part.resize(part.len().next_multiple_of(4096), 0);
    part
}

#[test]
fn a_window_has_the_stores_own_pages() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    for (name, layout) in LAYOUTS {
        let made = Made::new(layout);
        for takes_read_only in [true, false] {
            println!("{name}, {takes_read_only}");
            let shared = Shared::new(made.source(), "t");
            let mut front = Front::new(&shared.socket, takes_read_only);
            // Which front ends do not take everything is known only after the first mapping.
            let (bytes, in_place) = shown(&front.map(LARGE, 0, 0).unwrap());
            assert!(bytes == expected(&made, LARGE, 0) && in_place == [false]);
            for (at, (file, offset, in_place_if_taken)) in [
                (LARGE, CHUNK, vec![true]),
                (LARGE, 2 * CHUNK, vec![true]),
                // The last page: with zeros behind its end in a pack, and of unknown ends elsewhere.
                ("file-70000", 0, if layout == Layout::Flat { vec![true] } else { vec![true, false] }),
                ("file-1", 0, vec![false]),
            ]
            .into_iter()
            .enumerate()
            {
                let (bytes, in_place) = shown(&front.map(file, offset, (at as u64 + 1) * CHUNK).unwrap());
                assert!(bytes == expected(&made, file, offset), "{file} from {offset} on");
                assert_eq!(in_place, if takes_read_only { in_place_if_taken } else { vec![false] }, "{file}");
            }
            assert_eq!(front.map(LARGE, 3 * CHUNK, 6 * CHUNK).unwrap().len(), 0, "nothing is behind the end");
            let node = front.driver.lookup(ROOT, LARGE).unwrap().nodeid;
            for (node, flags, errno) in
                [(node, SETUPMAPPING_READ | SETUPMAPPING_WRITE, libc::EROFS), (ROOT, SETUPMAPPING_READ, libc::EISDIR)]
            {
                let refused = front.setup(node, 0, 7 * CHUNK, flags).unwrap_err();
                assert_eq!(refused.errno(), Some(errno));
            }
            front.driver.ask(Opcode::Destroy, 0, &[], &[], 0).unwrap();
            assert!(front.mapped.lock().unwrap().is_empty(), "each was taken away as it was mapped");
        }
    }
}

#[test]
fn a_refusal_of_everything_does_not_end_the_sharing_of_pages() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let said = SourceLog::begin();
    let made = Made::new(Layout::Flat);
    let shared = Shared::new(made.source(), "t");
    let mut front = Front::new(&shared.socket, true);
    front.map("file-70000", 0, 0).unwrap();
    front.refuses_all.store(true, Ordering::Relaxed);
    assert_eq!(front.map(LARGE, 0, CHUNK).unwrap_err().errno(), Some(libc::EIO));
    front.refuses_all.store(false, Ordering::Relaxed);
    let (bytes, in_place) = shown(&front.map(LARGE, 0, CHUNK).unwrap());
    assert!(bytes == expected(&made, LARGE, 0) && in_place == [true]);
    // One that refuses these files alone is told of.
    let shared = Shared::new(made.source(), "t");
    let mut front = Front::new(&shared.socket, false);
    (0..2).for_each(|at| drop(front.map(LARGE, at * CHUNK, at * CHUNK).unwrap()));
    said.assert("open for reading only; from now on it gets copies");
}

#[test]
fn damaged_data_never_reaches_a_window() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for (name, layout) in LAYOUTS {
        let said = SourceLog::begin();
        let made = Made::new(layout);
        made.damage(LARGE);
        let shared = Shared::new(made.source(), "t");
        let mut front = Front::new(&shared.socket, true);
        front.map("file-70000", 0, 0).unwrap();
        for _ in 0..2 {
            let refused = front.map(LARGE, 0, CHUNK).unwrap_err();
            assert_eq!(refused.errno(), Some(libc::EIO), "{name}");
        }
        said.assert("is damaged");
        assert_eq!(front.mapped.lock().unwrap().len(), 1, "{name}");
    }
}

/// A file of which two images share most pieces.
#[test]
fn pieces_that_lie_apart_are_mapped_one_by_one() {
    if !ferry_alone::in_own_process() {
        return;
    }
    SourceLog::begin();
    let mut made = Made::new(Layout::Flat);
    let large = fs::File::options().write(true).open(made.bench.tree().join(LARGE)).unwrap();
    large.write_all_at(b"another", 700_000).unwrap();
    let built = made.bench.build("image");
    assert_eq!(built.packs.len(), 2);
    made.digest = built.tree.to_string();
    let shared = Shared::new(made.source(), "t");
    let mut front = Front::new(&shared.socket, true);
    front.map("file-70000", 0, 0).unwrap();
    let wishes = front.map(LARGE, 0, CHUNK).unwrap();
    let (bytes, in_place) = shown(&wishes);
    assert!(bytes == expected(&made, LARGE, 0));
    assert_eq!(in_place, [true; 3], "before the new piece, that piece, and behind it");
}
