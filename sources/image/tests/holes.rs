//! Packs that may have holes, beside whole ones.

mod common;

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use common::{Bench, bytes};
use ferry_image::fetch::Sink;
use ferry_image::{BuildOptions, Data, Digest, Fetch, Image, Missing, Needed, Nid, Sole, Source, Store, Trace, build};
use ferry_vfs::Errno;

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

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut Sink<'_>) -> io::Result<()> {
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
    drop(Store::create(&here).expect("folders can be made"));
    here
}

fn open(bench: &Bench, image: &str, from: &Arc<Elsewhere>, cache_bytes: Option<u64>) -> Source {
    let from: Arc<dyn Fetch> = from.clone();
    let missing = Missing { from, ahead_bytes: 0, cache_bytes };
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
fn whole_packs_are_proved_in_pieces_beside_what_is_fetched() {
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

#[test]
fn what_is_to_be_read_ahead_is_not_fetched_before_it_is_read() {
    let bench = Bench::new();
    for number in 0..20 {
        let content = bytes(number, 5000 + number * 100);
        fs::write(bench.tree().join(number.to_string()), content).expect("files can be made");
    }
    let mut order = Trace::default();
    order.add(b"/8");
    order.add(b"/3");
    let options = BuildOptions { order: Some(order), ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("folders can be made");
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
fn parts_stay_and_go_with_what_they_are_of() {
    let (bench, image) = two();
    let ((whole, _), (absent, _)) = (place(&image, "large"), place(&image, "later"));
    bring(&bench, whole);
    drop(open(&bench, "second", &Elsewhere::of(&bench), None));
    let folder = here(&bench);
    let names = || {
        let entries = fs::read_dir(folder.join("packs")).expect("it is there");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("a name").file_name().into_string().expect("text")).collect();
        names.sort_unstable();
        names
    };
    let collect = |packs: &[Digest]| {
        let needed = Needed { packs: packs.iter().copied().collect(), ..Needed::default() };
        let sole = Sole::lock(&folder, &|| {}).expect("nobody else is here");
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
    fs::write(folder.join("packs").join(format!("{}.part", whole.hex())), "rest").expect("files can be made");
    assert_eq!(collect(&[whole]).leftovers, 1);
    assert_eq!(names(), of(whole, &["", ".index"]));
    let collected = collect(&[]);
    assert_eq!((collected.removed, collected.leftovers), (vec![whole], 0));
    assert_eq!(names(), Vec::<String>::new());
}
