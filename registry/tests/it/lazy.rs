//! Images that are read before they are complete.
use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Barrier, LazyLock};
use std::thread;
use std::time::Duration;

use common::{Disk, FILES, Place, Reply, content};
use ferry_image::{BuildOptions, FetchOptions, Layout, Source, Store, Trace};
use ferry_registry::pull_metadata;
use ferry_vfs::{Errno, Name};
use proptest::prelude::*;

/// Opens the image in a separate store.
fn open(place: &Place, store: &str, ahead_bytes: u64, cache_bytes: Option<u64>) -> Result<Source, ferry_image::Error> {
    let image = place.at(&format!("{store}.img"));
    drop(Store::create(&place.at(store)).unwrap());
    let from = pull_metadata(&place.fake.remote(), &image, &place.at(store), Some(place.built.digest)).unwrap();
    let missing = FetchOptions { from, ahead_bytes, cache_bytes };
    Source::open_with(&image, &place.at(store), None, Some(missing))
}

fn read(source: &Source, name: &str) -> Result<Vec<u8>, Errno> {
    let image = source.image();
    let root = image.inode(image.root()).unwrap();
    let nid = image.lookup(&root, Name::new(name.as_bytes()).unwrap()).unwrap().unwrap();
    let mut bytes = vec![0; usize::try_from(image.inode(nid).unwrap().bytes).unwrap()];
    source.read_at(nid, 0, &mut bytes).map(|count| {
        assert_eq!(count, bytes.len());
        bytes
    })
}

fn file(number: u32) -> String {
    format!("{number:02}")
}

/// The space that the file system may use for its map of the file's extents.
const SLACK: u64 = 64 << 10;

/// Requests for ranges of the pack.
fn asked(place: &Place) -> Vec<(usize, usize)> {
    let part = place.part();
    place
        .fake
        .requests()
        .iter()
        .filter(|request| request.path.ends_with(&part))
        .map(|request| request.range().unwrap())
        .collect()
}

#[test]
fn concurrent_readers_fetch_an_object_once() {
    let place = Place::new();
    let source = Arc::new(open(&place, "lazy", 0, None).unwrap());
    assert_eq!(asked(&place), [], "nothing is asked for before it is read");
    let barrier = Arc::new(Barrier::new(16));
    let readers: Vec<_> = (0..16)
        .map(|_| {
            let (source, barrier) = (Arc::clone(&source), Arc::clone(&barrier));
            thread::spawn(move || {
                barrier.wait();
                read(&source, "07").unwrap() == content(7)
            })
        })
        .collect();
    assert!(readers.into_iter().all(|reader| reader.join().unwrap()));
    let asked_for = asked(&place);
    assert_eq!(asked_for.len(), 1, "{asked_for:?}");
    assert_eq!(asked_for[0].1 - asked_for[0].0, content(7).len(), "no byte more than the file has");
    read(&source, "07").unwrap();
    assert_eq!(asked(&place), []);
    drop(source);
    // Objects that were fetched before are found again.
    let source = open(&place, "lazy", 0, None).unwrap();
    assert_eq!(read(&source, "07").unwrap(), content(7));
    assert_eq!(asked(&place), []);
}

/// Each handshake costs round trips.
#[test]
fn redirects_and_missing_manifests_do_not_cost_connections() {
    let place = Place::new();
    place.fake.fault(|request, reply| match request.query.as_str() {
        "" if request.is_blob() => Reply::of(307, "moved").with("location", format!("{}?sig=1", request.path)),
        _ => reply,
    });
    let source = open(&place, "lazy", 0, None).unwrap();
    let before = place.fake.connections();
    for number in 0..10 {
        assert_eq!(read(&source, &file(number)).unwrap(), content(number));
    }
    assert_eq!(asked(&place).len(), 20, "with the redirects");
    let while_read = place.fake.connections();
    let missing = place.fake.remote_as("none", Duration::from_secs(60));
    for _ in 0..5 {
        pull_metadata(&missing, &place.at("none.img"), &place.at("none"), None).unwrap_err();
    }
    assert_eq!((while_read, place.fake.connections()), (0, 1), "{before} before");
}

#[test]
fn adjacent_objects_are_read_ahead() {
    let place = Place::new();
    let source = open(&place, "lazy", 100_000, None).unwrap();
    for number in 0..FILES {
        assert_eq!(read(&source, &file(number)).unwrap(), content(number));
    }
    let all: usize = (0..FILES).map(|number| content(number).len()).sum();
    let few = asked(&place);
    assert!(
        few.len() <= all / 50_000 && few.iter().all(|(from, to)| to - from <= 100_000 + 4096 * FILES as usize),
        "{few:?}"
    );
}

#[test]
fn objects_are_fetched_in_the_order_of_the_workload() {
    let place = Place::new();
    let mut trace = Trace::default();
    assert!(trace.add(b"/35") && trace.add(b"/12"));
    let options = BuildOptions { order: Some(trace), ..BuildOptions::default() };
    let image = place.at("ordered");
    let store = || Store::create(&place.at("store")).unwrap();
    let built = ferry_image::build(&place.at("tree"), &image, store(), &options, &|_, _| {}).unwrap();
    let remote = place.fake.remote_as("2", Duration::from_secs(60));
    ferry_registry::push(&remote, &image, None, &store(), &place.at("store"), 2, &|_, _| {}).unwrap();
    drop(Store::create(&place.at("lazy")).unwrap());
    let from = pull_metadata(&remote, &place.at("lazy.img"), &place.at("lazy"), Some(built.digest)).unwrap();
    let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
    let source = Source::open_with(&place.at("lazy.img"), &place.at("lazy"), None, Some(missing)).unwrap();
    place.fake.requests();
    source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).unwrap();
    let requests = place.fake.requests();
    let (from, to) = requests.iter().find_map(common::Request::range).unwrap();
    let whole = content(35).len().next_multiple_of(4096) + content(12).len();
    // Noise shrinks by its padding.
    assert!(
        from == 0 && (whole - 4096..=whole).contains(&to),
        "{from}..{to}: the two files, in the order of the trace"
    );
    assert_eq!(read(&source, "35").unwrap(), content(35));
}

#[test]
fn listed_files_are_fetched_first() {
    let place = Place::new();
    let fetch = |source: &Source| source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).unwrap();
    let alone = open(&place, "alone", 0, None).unwrap();
    let ranges = ["35", "12"].map(|name| {
        read(&alone, name).unwrap();
        asked(&place)[0]
    });
    let source = open(&place, "lazy", 0, None).unwrap();
    let paths: [&[u8]; 9] = [b"/35", b"/nowhere", b"35/x", b"/", b"", b"/35", b"//./12", b"//12", b"/\0\xff"];
    let found = source.shared_objects().put_first(source.image(), paths);
    let unknown: [&[u8]; 5] = [b"/nowhere", b"35/x", b"/", b"", b"//./12"];
    assert_eq!((found.files, found.unknown, found.unknown_names), (2, 6, unknown.map(<[u8]>::to_vec).to_vec()));
    fetch(&source);
    assert_eq!(asked(&place)[..2], ranges);
    assert_eq!(read(&source, "large").unwrap(), read(&alone, "large").unwrap());
    // A list changes nothing where all is here, or composefs's objects are fetched.
    fetch(&source);
    let composefs = Place::laid_out(Layout::Composefs { version: None });
    let source = open(&composefs, "lazy", 0, None).unwrap();
    assert_eq!(source.shared_objects().put_first(source.image(), paths).files, 2);
    fetch(&source);
    assert_eq!(read(&source, "12").unwrap(), content(12));
}

proptest! {
    /// Lists are untrusted.
    #[test]
    fn any_list_of_paths_is_taken(paths in prop::collection::vec("(/|/?[0-9]{1,2}|\\PC{0,9}){0,4}", 0..20)) {
        static PLACE: LazyLock<(Place, Source)> = LazyLock::new(|| {
            let place = Place::new();
            let source = open(&place, "lazy", 0, None).unwrap();
            (place, source)
        });
        let (source, objects) = (&PLACE.1, PLACE.1.shared_objects());
        let found = objects.put_first(source.image(), paths.iter().map(String::as_bytes));
        prop_assert!(found.files + found.unknown <= paths.len() && found.unknown_names.len() <= 5);
    }
}

#[test]
fn failures_are_io_errors_and_temporary() {
    let place = Place::new();
    let source = open(&place, "lazy", 0, None).unwrap();
    place.fake.fault(|request, reply| if request.is_blob() { Reply::of(403, "no") } else { reply });
    assert_eq!(read(&source, "01").unwrap_err(), Errno::IO);
    let part = place.part();
    place.fake.fault(move |request, mut reply| {
        if request.path.ends_with(&part) {
            reply.body[3] ^= 1;
        }
        reply
    });
    assert_eq!(read(&source, "01").unwrap_err(), Errno::IO);
    place.fake.heal();
    assert_eq!(read(&source, "01").unwrap(), content(1));
    assert_eq!(read(&source, "02").unwrap(), content(2));
}

/// Reads of fetched objects succeed. Reads of objects that do not fit fail, and succeed as soon as there is space.
#[test]
fn a_full_disk_fails_only_requests_that_need_space() {
    for layout in [Layout::Flat, Layout::Composefs { version: None }] {
        let place = Place::laid_out(layout);
        let disk = Disk::at(place.at("lazy"), "1m");
        let source = open(&place, "lazy", 0, None).unwrap();
        assert_eq!(read(&source, "07").unwrap(), content(7));
        let error = read(&source, "large").unwrap_err();
        assert!(matches!(error, Errno::NOSPC | Errno::IO), "{error}");
        assert_eq!(read(&source, "07").unwrap(), content(7));
        disk.grow("64m");
        assert_eq!(read(&source, "large").unwrap().len(), 6_000_000);
        for number in 0..FILES {
            assert_eq!(read(&source, &file(number)).unwrap(), content(number));
        }
        source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
        source.shared_objects().complete().unwrap();
        place.is_whole("lazy");
        drop(source);
    }
}

#[test]
fn readers_and_the_background_fetch_do_not_fetch_twice() {
    let place = Place::new();
    let source = Arc::new(open(&place, "lazy", 30_000, None).unwrap());
    let objects = source.shared_objects();
    let background = thread::spawn(move || {
        objects.fetch_all(3, &AtomicBool::new(false), &|_, _| {}).unwrap();
        objects.complete().unwrap();
    });
    for number in (0..FILES).rev() {
        assert_eq!(read(&source, &file(number)).unwrap(), content(number));
    }
    background.join().unwrap();
    let bytes = place.pack().1.len();
    let mut times = vec![0_u8; bytes.div_ceil(4096)];
    for (from, to) in asked(&place) {
        times[from / 4096..to.div_ceil(4096)].iter_mut().for_each(|block| *block += 1);
    }
    assert!(times.iter().all(|block| *block == 1), "{times:?}");
    place.is_whole("lazy");
    assert_eq!(read(&source, "03").unwrap(), content(3), "also where the files had other names");
}

#[test]
fn a_bounded_cache_drops_the_least_recently_used_objects() {
    let place = Place::new();
    let bound = 200_000;
    let source = open(&place, "lazy", 0, Some(bound)).unwrap();
    let pack = place.pack().0;
    let part = place.at("lazy/packs").join(format!("{}.part", pack.hex()));
    let taken = || fs::metadata(&part).unwrap().blocks() * 512;
    for round in 0..2 {
        for number in 0..FILES {
            assert_eq!(read(&source, &file(number)).unwrap(), content(number), "round {round}");
            // Only the file that was just read may be left.
            assert!(taken() <= bound + SLACK, "{} bytes after {number}", taken());
        }
    }
    asked(&place);
    read(&source, &file(FILES - 1)).unwrap();
    assert_eq!(asked(&place), [], "what was just used is here");
    read(&source, "00").unwrap();
    assert_eq!(asked(&place).len(), 1);
    // The large object exceeds the limit of the cache, and can still be read.
    assert_eq!(read(&source, "large").unwrap().len(), 6_000_000);
    assert!(taken() <= bound + SLACK, "{}", taken());
    // Background fetching ends where eviction would begin.
    source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
    source.shared_objects().complete().unwrap();
    assert!(taken() <= bound + SLACK, "{}", taken());
    // Exclusively: a reader without the limit would find holes.
    let said = open(&place, "lazy", 0, None).unwrap_err().to_string();
    assert!(said.contains("another ferry uses"), "{said}");
    drop(source);
    let source = open(&place, "lazy", 0, None).unwrap();
    let said = open(&place, "lazy", 0, Some(bound)).unwrap_err().to_string();
    assert!(said.contains("another ferry uses"), "{said}");
    for number in 0..FILES {
        assert_eq!(read(&source, &file(number)).unwrap(), content(number));
    }
    drop(source);
    // Fetched objects above the limit are dropped at once.
    let source = open(&place, "lazy", 0, Some(50_000)).unwrap();
    assert!(taken() <= 50_000 + SLACK, "{}", taken());
    assert_eq!(read(&source, "30").unwrap(), content(30));
}

#[test]
fn readers_of_a_bounded_cache_never_see_holes() {
    let place = Place::new();
    // What an earlier process has left is looked at and dropped at the same time.
    let before = open(&place, "lazy", 0, None).unwrap();
    for number in 0..FILES {
        read(&before, &file(number)).unwrap();
    }
    drop(before);
    let source = Arc::new(open(&place, "lazy", 20_000, Some(60_000)).unwrap());
    let readers: Vec<_> = (0..8_u32)
        .map(|reader| {
            let source = Arc::clone(&source);
            thread::spawn(move || {
                for turn in 0..60 {
                    let number = (reader * 7 + turn * 11) % FILES;
                    assert_eq!(read(&source, &file(number)).unwrap(), content(number));
                }
            })
        })
        .collect();
    // Beside them, the rest: what is bounded is never complete, and that is no error.
    source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

#[test]
fn readers_and_the_background_fetch_share_the_limit_of_requests() {
    let place = Place::new();
    let image = place.at("lazy.img");
    for requests_max in [3, 1] {
        let store = format!("lazy{requests_max}");
        let (remote, digest) = (place.fake.remote_of(requests_max), Some(place.built.digest));
        let from = pull_metadata(&remote, &image, &place.at(&store), digest).unwrap();
        drop(Store::create(&place.at(&store)).unwrap());
        let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
        let source = Arc::new(Source::open_with(&image, &place.at(&store), None, Some(missing)).unwrap());
        // Long enough for all that want something to be there at the same time.
        place.fake.fault(|request, reply| {
            if request.is_blob() {
                thread::sleep(Duration::from_millis(30));
            }
            reply
        });
        place.fake.most();
        let readers: Vec<_> = (0..FILES)
            .map(|number| {
                let source = Arc::clone(&source);
                thread::spawn(move || assert_eq!(read(&source, &file(number)).unwrap(), content(number)))
            })
            .collect();
        thread::sleep(Duration::from_millis(20));
        // Objects without readers; readers of an object being fetched would wait for it.
        source.shared_objects().fetch_all(8, &AtomicBool::new(false), &|_, _| {}).unwrap();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(place.fake.most(), requests_max);
    }
}

/// An image that was pulled, without its server.
fn pulled() -> (Place, Arc<ferry_registry::Remote>) {
    let place = Place::new();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    // Every response is invalid.
    place.fake.fault(|_, _| Reply::of(403, "no"));
    place.fake.requests();
    let remote = place.fake.remote();
    (place, remote)
}

#[test]
fn a_complete_image_needs_no_server() {
    let (place, remote) = pulled();
    let from = pull_metadata(&remote, &place.at("lazy.img"), &place.at("lazy"), Some(place.built.digest)).unwrap();
    let missing = FetchOptions { from: from.clone(), ahead_bytes: 0, cache_bytes: None };
    let source = Source::open_with(&place.at("lazy.img"), &place.at("lazy"), None, Some(missing)).unwrap();
    assert!(source.shared_objects().looks_complete());
    assert_eq!(read(&source, "07").unwrap(), content(7));
    source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
    assert_eq!(place.fake.requests().len(), 0);
    let error = from.fetch_manifest().unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
}

#[test]
fn objects_recorded_as_damaged_are_fetched_and_verified() {
    use std::os::unix::fs::FileExt;
    let (place, remote) = pulled();
    let image = ferry_image::Image::open(&place.at("lazy.img"), None).unwrap();
    let (pack, whole) = place.pack();
    let path = place.at("lazy/packs").join(pack.hex());
    let flip = |at: usize| {
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[whole[at] ^ 1], at as u64).unwrap();
    };
    flip(100);
    flip(3 << 20);
    assert_eq!(ferry_image::note_damage(&image, &place.at("lazy")).unwrap(), 2);
    // A useless server changes nothing, and does not prevent reads of other objects.
    let error = place.pull(&remote, "lazy").unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    let from = pull_metadata(&remote, &place.at("lazy.img"), &place.at("lazy"), None).unwrap();
    let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
    let source = Source::open_with(&place.at("lazy.img"), &place.at("lazy"), None, Some(missing)).unwrap();
    assert_eq!(read(&source, "00").unwrap_err(), Errno::IO);
    assert_eq!(read(&source, "07").unwrap(), content(7));
    drop(source);
    // Nor one that has something else.
    let part = place.part();
    place.fake.fault(move |request, mut reply| {
        if request.path.ends_with(&part) {
            reply.body[0] ^= 1;
        }
        reply
    });
    let error = place.pull(&place.fake.remote(), "lazy").unwrap_err();
    let said = format!("{error}: {:?}", std::error::Error::source(&error).map(ToString::to_string));
    assert!(said.contains("it came damaged"), "{said}");
    place.fake.heal();
    place.fake.requests();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    let bytes: usize = asked(&place).iter().map(|(from, to)| to - from).sum();
    assert_eq!(bytes, content(0).len() + (64 << 10), "no more than what is damaged");
    assert_eq!(fs::read(&path).unwrap(), whole);
    place.is_whole("lazy");
    // Nor does one refused object prevent reads of the others.
    for status in [401, 403, 404] {
        flip(100);
        flip(3 << 20);
        assert_eq!(ferry_image::note_damage(&image, &place.at("lazy")).unwrap(), 2);
        let part = place.part();
        place.fake.fault(move |request, reply| {
            let is_first = request.range().is_some_and(|(from, to)| (from..to).contains(&100));
            if request.path.ends_with(&part) && is_first { Reply::of(status, "no") } else { reply }
        });
        place.pull(&place.fake.remote(), "lazy").unwrap_err();
        let now = fs::read(&path).unwrap();
        assert_eq!((now[100], now[3 << 20]), (whole[100] ^ 1, whole[3 << 20]), "{status}");
        place.fake.heal();
        place.pull(&place.fake.remote(), "lazy").unwrap();
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
}

/// One pack cannot be repaired, and another one is missing.
#[test]
fn an_irreparable_object_does_not_prevent_other_fetches() {
    let mut place = Place::new();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    let (old, whole) = place.pack();
    let image = ferry_image::Image::open(&place.at("lazy.img"), None).unwrap();
    let path = place.at("lazy/packs").join(old.hex());
    let file = fs::File::options().write(true).open(&path).unwrap();
    let (first, second) = (100, 3 << 20);
    for at in [first, second] {
        std::os::unix::fs::FileExt::write_all_at(&file, &[whole[at] ^ 1], at as u64).unwrap();
    }
    assert_eq!(ferry_image::note_damage(&image, &place.at("lazy")).unwrap(), 2);
    fs::write(place.at("tree/new"), content(99)).unwrap();
    let part = place.part();
    place.build_and_push();
    let new = *place.built.packs.iter().find(|pack| **pack != old).unwrap();
    fs::remove_file(place.at("lazy.img")).unwrap();
    place.fake.fault(move |request, mut reply| {
        if let (true, Some((from, to))) = (request.path.ends_with(&part), request.range())
            && (from..to).contains(&second)
        {
            reply.body[second - from] ^= 1;
        }
        reply
    });
    let said = place.refused("lazy");
    assert!(said.contains(&format!("of the pack {old}: it came damaged")), "{said}");
    let store = ferry_image::Store::open(&place.at("lazy")).unwrap();
    assert!(store.has(new), "the other pack has come");
    let now = fs::read(&path).unwrap();
    assert_eq!((now[first], now[second]), (whole[first], whole[second] ^ 1), "what could be mended is");
    // If another object is not available either, both errors are reported.
    for end in ["", ".index"] {
        fs::remove_file(place.at("lazy/packs").join(format!("{}{end}", new.hex()))).unwrap();
    }
    let (index, part) = (place.blob(&format!("{}.index", new.hex())), place.blob(&old.hex()));
    place.fake.fault(move |request, mut reply| {
        if request.path.ends_with(&index) || request.path.ends_with(&part) {
            reply = Reply::of(403, "no");
        }
        reply
    });
    let said = place.refused("lazy");
    assert!(said.contains(&old.to_string()) && said.contains(&format!("the index of the pack {new}")), "{said}");
    place.is_well("lazy");
    assert_eq!(fs::read(&path).unwrap(), whole);
}

#[test]
fn an_unusable_pack_is_fetched_again() {
    let place = Place::new();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    let path = place.at("lazy/packs").join(place.pack().0.hex());
    // Recorded damage does not prevent it.
    let image = ferry_image::Image::open(&place.at("lazy.img"), None).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&fs::File::options().write(true).open(&path).unwrap(), b"xyz", 0).unwrap();
    assert_eq!(ferry_image::note_damage(&image, &place.at("lazy")).unwrap(), 1);
    fs::write(path.with_extension("index"), "no index").unwrap();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    place.is_whole("lazy");
    fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    place.pull(&place.fake.remote(), "lazy").unwrap();
    place.is_whole("lazy");
}
