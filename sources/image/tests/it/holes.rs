//! Packs that may have holes, beside whole ones.

use crate::common;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use common::{Bench, bytes};
use ferry_image::ByteSink;
use ferry_image::{
    BuildOptions, Data, Digest, ExclusiveStore, Fetch, FetchOptions, Image, LiveSet, Nid, Source, Store, Trace, build,
};
use ferry_vfs::{Errno, FileSystem};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

const PIECE: u64 = 64 << 10;

/// The store that the images were built in, as if it were elsewhere.
#[derive(Debug)]
struct Elsewhere {
    packs: PathBuf,
    /// Which packs were asked for bytes.
    asked: Mutex<Vec<Digest>>,
}

impl Fetch for Elsewhere {
    fn index(&self, pack: Digest, _: u64) -> io::Result<Vec<u8>> {
        fs::read(self.packs.join(format!("{}.index", pack.hex())))
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(pack);
        let mut found = vec![0; usize::try_from(range.end - range.start).expect("it fits")];
        File::open(self.packs.join(pack.hex()))?.read_exact_at(&mut found, range.start)?;
        sink(&found)
    }
}

impl Elsewhere {
    fn of(bench: &Bench) -> Arc<Self> {
        Arc::new(Self { packs: bench.store().join("packs"), asked: Mutex::default() })
    }

    fn asked(&self) -> Vec<Digest> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The store that images are read from.
fn here(bench: &Bench) -> PathBuf {
    let here = bench.path("here");
    drop(Store::create(&here).expect("directories can be made"));
    here
}

fn open(bench: &Bench, image: &str, from: &Arc<Elsewhere>, cache_bytes: Option<u64>) -> Source {
    let from: Arc<dyn Fetch> = from.clone();
    let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes };
    Source::open_with(&bench.path(image), &here(bench), None, Some(missing)).expect("it was built")
}

fn find(image: &Image, name: &str) -> Nid {
    let root = image.inode(image.root()).expect("it is there");
    let name = ferry_vfs::Name::new(name.as_bytes()).expect("a name");
    image.lookup(&root, name).expect("the image is sound").expect("it is there")
}

/// Which pack a file is in, and where that begins there, in bytes.
fn place(image: &Image, name: &str) -> (Digest, u64) {
    let inode = image.inode(find(image, name)).expect("it is there");
    match image.data(&inode).expect("the image is sound") {
        Data::Far { pack, block } => (image.packs()[pack].name, block * 4096),
        other => panic!("{other:?}"),
    }
}

fn read(source: &Source, name: &str, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut piece = vec![0; length];
    let count = source.read_at(find(source.image(), name), offset, &mut piece)?;
    piece.truncate(count);
    Ok(piece)
}

/// Two images: the second one has the first one's large file, and another one in a pack of its own.
fn two() -> (Bench, Image) {
    let bench = Bench::new();
    let large = bytes(1, usize::try_from(9 * PIECE + 5000).expect("it fits"));
    fs::write(bench.tree().join("large"), large).expect("files can be made");
    bench.build("first");
    fs::write(bench.tree().join("later"), bytes(2, 700_000)).expect("files can be made");
    bench.build("second");
    let image = Image::open(&bench.path("second"), None).expect("it was built");
    assert_ne!(place(&image, "large").0, place(&image, "later").0);
    (bench, image)
}

/// Copies a whole pack, so that it can be written to.
fn bring(bench: &Bench, pack: Digest) {
    for end in ["", ".index"] {
        let name = format!("{}{end}", pack.hex());
        let to = here(bench).join("packs").join(&name);
        fs::copy(bench.store().join("packs").join(&name), &to).expect("it is there");
        fs::set_permissions(&to, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    }
}

#[test]
fn complete_packs_are_proved_in_pieces_during_fetches() {
    let (bench, image) = two();
    let ((whole, start), (absent, _)) = (place(&image, "large"), place(&image, "later"));
    bring(&bench, whole);
    let pack = here(&bench).join("packs").join(whole.hex());
    let pack = File::options().write(true).open(pack).expect("it can be opened");
    let expected = fs::read(bench.tree().join("large")).expect("files can be read");
    let at = usize::try_from(7 * PIECE + 100).expect("it fits");
    pack.write_all_at(&[expected[at] ^ 1], start + 7 * PIECE + 100).expect("it can be written");
    for bound in [None, Some(64 << 10)] {
        let from = Elsewhere::of(&bench);
        let source = open(&bench, "second", &from, bound);
        for piece in [0, 6, 8, 9] {
            let found = read(&source, "large", piece * PIECE, 1000).expect("this piece is sound");
            let at = usize::try_from(piece * PIECE).expect("it fits");
            assert!(found == expected[at..at + 1000], "{piece}");
        }
        assert_eq!(read(&source, "large", 7 * PIECE, 1000), Err(Errno::IO), "{bound:?}");
        assert_eq!(from.asked(), []);
        // What may have holes is got piece by piece, and what is asked for together by one request.
        assert_eq!(read(&source, "later", 600_000, 50).expect("it can be had"), bytes(2, 700_000)[600_000..600_050]);
        let later = read(&source, "later", 0, 800_000).expect("it can be had");
        assert!(later == bytes(2, 700_000), "{bound:?}");
        assert!(from.asked().iter().all(|pack| *pack == absent), "{:?}", from.asked());
    }
}

/// What the store has in another pack is copied from there, and each way is counted.
#[test]
fn bytes_are_counted_by_where_they_come_from() {
    let (bench, image) = two();
    let (whole, _) = place(&image, "large");
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "second", &from, None);
    let counts = |source: &Source| source.counts().into_iter().map(|(_, value)| value).collect::<Vec<_>>();
    let names: Vec<_> = source.counts().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["image_fetched_bytes_total", "image_verified_bytes_total", "image_deduplicated_bytes_total"]);
    assert_eq!(counts(&source), [0, 0, 0]);
    assert!(!read(&source, "later", 0, 800_000).expect("it can be had").is_empty());
    assert_eq!(counts(&source), [700_000, 700_000, 0]);
    // Once more: nothing is fetched or verified again.
    assert!(!read(&source, "later", 0, 800_000).expect("it can be had").is_empty());
    assert_eq!(counts(&source), [700_000, 700_000, 0]);
    drop(source);
    // The same objects in another pack of the store are copied.
    let other = Bench::new();
    fs::write(other.tree().join("later"), bytes(2, 700_000)).expect("files can be made");
    fs::write(other.tree().join("more"), bytes(3, 100_000)).expect("files can be made");
    other.build("other");
    fs::remove_dir_all(here(&bench)).expect("it is there");
    for found in fs::read_dir(other.store().join("packs")).expect("a directory") {
        let found = found.expect("an entry");
        let to = here(&bench).join("packs").join(found.file_name());
        fs::copy(found.path(), to).expect("it is there");
    }
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "second", &from, None);
    assert!(!read(&source, "later", 0, 800_000).expect("it is there").is_empty());
    assert_eq!((counts(&source), from.asked()), (vec![0, 700_000, 700_000], vec![]));
    drop(source);
    // A whole pack of the image itself is verified.
    bring(&bench, whole);
    let source = open(&bench, "second", &from, None);
    assert!(!read(&source, "large", 0, 1000).expect("it is sound").is_empty());
    assert_eq!(counts(&source), [0, PIECE, 0]);
}

/// A child process has a copy of each descriptor until its exec, and with it of the lock of a part of a pack.
#[test]
fn a_copy_of_a_descriptor_keeps_no_part_of_a_pack_in_use() {
    let (bench, _) = two();
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "second", &from, None);
    assert!(!read(&source, "later", 0, 1000).expect("it can be had").is_empty());
    let process = pidfd_open(getpid(), PidfdFlags::empty()).expect("a descriptor");
    let packs = here(&bench).join("packs");
    let copies: Vec<_> = fs::read_dir("/proc/self/fd")
        .expect("a directory")
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|path| path.starts_with(&packs)))
        .map(|entry| {
            let number = entry.file_name().into_string().expect("a number").parse().expect("a number");
            pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).expect("a copy")
        })
        .collect();
    assert!(!copies.is_empty());
    drop(source);
    // Alone, which a lock that is still held would refuse.
    drop(open(&bench, "second", &from, Some(64 << 10)));
}

#[test]
fn read_ahead_does_not_fetch_missing_objects() {
    let bench = Bench::new();
    for number in 0..20 {
        let content = bytes(number, 5000 + number * 100);
        fs::write(bench.tree().join(number.to_string()), content).expect("files can be made");
    }
    let mut order = Trace::default();
    order.add(b"/8");
    order.add(b"/3");
    let options = BuildOptions { order: Some(order), ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("directories can be made");
    build(&bench.tree(), &bench.path("ordered"), store, &options, &|_, _| {}).expect("it can be built");
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "ordered", &from, None);
    let ahead = source.image().packs().iter().find(|pack| pack.ahead).expect("there is one").name;
    let (other, _) = place(source.image(), "5");
    assert_ne!(other, ahead);
    // Whoever would fetch it beside us has had the time to.
    thread::sleep(Duration::from_millis(300));
    assert_eq!(from.asked(), []);
    assert!(read(&source, "5", 0, 10_000).expect("it can be had") == bytes(5, 5500));
    assert_eq!(from.asked(), [other]);
    assert!(read(&source, "8", 0, 10_000).expect("it can be had") == bytes(8, 5800));
    assert_eq!(from.asked(), [other, ahead]);
    // With all of it here, it is a store as any other.
    let objects = source.shared_objects();
    objects.fetch_all(2, &AtomicBool::new(false), &|_, _| {}).expect("it can be had");
    objects.complete().expect("it can be kept");
    let source = Source::open(&bench.path("ordered"), &here(&bench), None).expect("all is here");
    for number in 0..20 {
        let found = read(&source, &number.to_string(), 0, 10_000).expect("it can be read");
        assert!(found == bytes(number, 5000 + number * 100), "{number}");
    }
}

#[test]
fn partial_packs_live_as_long_as_their_images() {
    let (bench, image) = two();
    let ((whole, _), (absent, _)) = (place(&image, "large"), place(&image, "later"));
    bring(&bench, whole);
    drop(open(&bench, "second", &Elsewhere::of(&bench), None));
    let directory = here(&bench);
    let names = || {
        let entries = fs::read_dir(directory.join("packs")).expect("it is there");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("a name").file_name().into_string().expect("text")).collect();
        names.sort_unstable();
        names
    };
    let collect = |packs: &[Digest]| {
        let needed = LiveSet { packs: packs.iter().copied().collect(), ..LiveSet::default() };
        let sole = ExclusiveStore::lock(&directory, &|| {}).expect("nobody else is here");
        sole.collect(&needed, Duration::ZERO, false).expect("it can be cleaned")
    };
    let of = |pack: Digest, ends: &[&str]| -> Vec<String> {
        ends.iter().map(|end| format!("{}{end}", pack.hex())).collect()
    };
    let mut all = [of(whole, &["", ".index"]), of(absent, &[".part", ".part.index"])].concat();
    all.sort_unstable();
    assert_eq!(names(), all);
    assert_eq!(collect(&[whole, absent]).leftovers, 0);
    assert_eq!(names(), all);
    assert_eq!(collect(&[whole]).leftovers, 2);
    assert_eq!(names(), of(whole, &["", ".index"]));
    // Of a pack that is whole, nothing that was left of fetching it is needed.
    fs::write(directory.join("packs").join(format!("{}.part", whole.hex())), "rest").expect("files can be made");
    assert_eq!(collect(&[whole]).leftovers, 1);
    assert_eq!(names(), of(whole, &["", ".index"]));
    let collected = collect(&[]);
    assert_eq!((collected.removed, collected.leftovers), (vec![whole], 0));
    assert_eq!(names(), Vec::<String>::new());
}

#[test]
fn parts_that_servers_use_stay() {
    let (bench, image) = two();
    let packs = [place(&image, "large").0, place(&image, "later").0];
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "second", &from, None);
    let directory = here(&bench);
    let collect = || {
        let sole = ExclusiveStore::lock(&directory, &|| {}).expect("nobody else is here");
        sole.collect(&LiveSet::default(), Duration::ZERO, false).expect("it can be cleaned")
    };
    assert_eq!(collect().leftovers, 0);
    assert!(packs.iter().all(|pack| directory.join("packs").join(format!("{}.part.index", pack.hex())).exists()));
    let objects = source.shared_objects();
    objects.fetch_all(2, &AtomicBool::new(false), &|_, _| {}).expect("it can be had");
    objects.complete().expect("nothing was removed under our hands");
    drop((objects, source));
    assert_eq!(collect().removed.len(), 2);
    // Nobody uses these any more.
    drop(open(&bench, "second", &from, None));
    assert_eq!(collect().leftovers, 4);
}

/// A source that has one object damaged, and waits with the first request until it is told to go on.
#[derive(Debug)]
struct Damaging {
    from: Arc<Elsewhere>,
    at: u64,
    begun: Mutex<Sender<()>>,
    go_on: Mutex<Option<Receiver<()>>>,
}

impl Fetch for Damaging {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        self.from.index(pack, bytes_max)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        if let Some(go_on) = self.go_on.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.begun.lock().unwrap_or_else(PoisonError::into_inner).send(()).expect("the test waits");
            go_on.recv().expect("the test goes on");
        }
        self.from.read(pack, range.clone(), &mut |bytes| {
            let mut bytes = bytes.to_vec();
            if let Some(byte) = self.at.checked_sub(range.start).and_then(|at| bytes.get_mut(usize::try_from(at).ok()?))
            {
                *byte ^= 1;
            }
            sink(&bytes)
        })
    }
}

#[test]
fn readers_behind_a_damaged_object_are_served() {
    let bench = Bench::new();
    let content: Vec<_> = (0..8).map(|number| bytes(number, 5000)).collect();
    for (number, content) in content.iter().enumerate() {
        fs::write(bench.tree().join(number.to_string()), content).expect("files can be made");
    }
    bench.build("image");
    let image = Image::open(&bench.path("image"), None).expect("it was built");
    let (begun, has_begun) = channel();
    let (go_on, goes_on) = channel();
    let (begun, go_on_when) = (Mutex::new(begun), Mutex::new(Some(goes_on)));
    let at = place(&image, "2").1 + 100;
    let from = Arc::new(Damaging { from: Elsewhere::of(&bench), at, begun, go_on: go_on_when });
    let missing = FetchOptions { from, ahead_bytes: 1 << 20, cache_bytes: None };
    let source = Source::open_with(&bench.path("image"), &here(&bench), None, Some(missing)).expect("it was built");
    thread::scope(|scope| {
        let source = &source;
        let reader = |number: usize| scope.spawn(move || read(source, &number.to_string(), 0, 5000));
        let first = reader(0);
        // It has claimed all of them.
        has_begun.recv().expect("it is asked for");
        let others: Vec<_> = (1..8).map(reader).collect();
        thread::sleep(Duration::from_millis(200));
        go_on.send(()).expect("it waits");
        assert!(first.join().expect("no panic").expect("it is sound") == content[0]);
        for (number, other) in (1..8).zip(others) {
            let found = other.join().expect("no panic");
            match number {
                2 => assert_eq!(found.expect_err("it is damaged"), Errno::IO),
                _ => assert!(found.expect("it is sound") == content[number], "{number}"),
            }
        }
    });
}

/// A source whose requests wait half a second for their first byte.
#[derive(Debug)]
struct Far(Arc<Elsewhere>);

impl Fetch for Far {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        self.0.index(pack, bytes_max)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        thread::sleep(Duration::from_millis(500));
        self.0.read(pack, range, sink)
    }
}

/// Requests of 4 MiB would be six.
#[test]
fn distant_servers_get_larger_requests() {
    let bench = Bench::new();
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()
    };
    let content: Vec<u8> = (0..3 << 20).flat_map(|_| next()).collect();
    fs::write(bench.tree().join("large"), &content).expect("files can be made");
    bench.build("image");
    let from = Elsewhere::of(&bench);
    let missing = FetchOptions { from: Arc::new(Far(Arc::clone(&from))), ahead_bytes: 0, cache_bytes: None };
    let source = Source::open_with(&bench.path("image"), &here(&bench), None, Some(missing)).expect("it was built");
    source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).expect("it can be had");
    let requests = from.asked().len();
    assert!((2..6).contains(&requests), "{requests}");
    assert!(read(&source, "large", 0, content.len()).expect("it is here") == content);
    assert_eq!(from.asked().len(), requests);
}

#[test]
fn an_uncompleted_pack_is_proved_again() {
    let (bench, image) = two();
    let from = Elsewhere::of(&bench);
    let source = open(&bench, "second", &from, None);
    let objects = source.shared_objects();
    objects.fetch_all(2, &AtomicBool::new(false), &|_, _| {}).expect("it can be had");
    let (pack, start) = place(&image, "later");
    let number = image.packs().iter().position(|other| other.name == pack).expect("it is one of them");
    assert!(objects.verify_here(number, start, 700_000));
    // Its name is taken, and what was written does not come to the disk.
    let name = here(&bench).join("packs").join(pack.hex());
    fs::create_dir(&name).expect("directories can be made");
    objects.complete().expect_err("no file gets the name of a directory");
    let part = File::options().write(true).open(name.with_extension("part")).expect("it is there");
    part.write_all_at(&[0; 100_000], start).expect("it can be written");
    assert!(!objects.verify_here(number, start, 700_000));
    let asked = from.asked().len();
    assert!(read(&source, "later", 0, 700_000).expect("it can be had again") == bytes(2, 700_000));
    assert_eq!(from.asked()[asked..].iter().filter(|other| **other == pack).count(), from.asked().len() - asked);
    assert!(from.asked().len() > asked && objects.verify_here(number, start, 700_000));
}

#[test]
fn earlier_objects_are_proved_without_requests() {
    let (bench, image) = two();
    let from = Elsewhere::of(&bench);
    let (pack, start) = place(&image, "later");
    let number = image.packs().iter().position(|other| other.name == pack).expect("it is one of them");
    let source = open(&bench, "second", &from, None);
    assert!(!source.shared_objects().verify_here(number, start, 100));
    read(&source, "later", 0, 100).expect("it can be had");
    drop(source);
    let asked = from.asked().len();
    let objects = open(&bench, "second", &from, None).shared_objects();
    assert!(objects.verify_here(number, start, 100));
    assert!(!objects.verify_here(number, start, 700_000) && !objects.verify_here(number, start + 600_000, 100));
    assert_eq!(from.asked().len(), asked);
}
