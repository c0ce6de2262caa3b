//! Stores of many packs: what a build reads of them, and what it makes when the table of packs is missing, stale or damaged.

use crate::common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use common::{Bench, bytes};
use ferry_image::{BuildOptions, BuildReport, Source, Store, build, pack_table};
use rustix::fs::inotify;

/// More than are read without a table.
const PACKS: usize = 40;

fn built(tree: &Path, image: &Path, store: &Path) -> BuildReport {
    let options = BuildOptions { threads: 2, ..BuildOptions::default() };
    build(tree, image, Store::create(store).expect("a store"), &options, &|_, _| {}).expect("it can be built")
}

/// A store of so many packs, and a tree with something of three of them and something new.
fn many() -> Bench {
    let bench = Bench::new();
    let one = bench.path("one");
    fs::create_dir(&one).expect("a directory");
    for number in 0..PACKS {
        fs::write(one.join("file"), bytes(number, 9000 + number)).expect("a file");
        built(&one, &bench.path("image"), &bench.store());
    }
    for number in [3, 17, 39] {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 9000 + number)).expect("a file");
    }
    fs::write(bench.tree().join("new"), bytes(1000, 100_000)).expect("a file");
    bench
}

fn table(store: &Path) -> PathBuf {
    store.join("packs/table")
}

/// A copy of a store.
fn copy(bench: &Bench, name: &str) -> PathBuf {
    let (from, to) = (bench.store().join("packs"), bench.path(name));
    fs::create_dir_all(to.join("packs")).expect("directories");
    for entry in fs::read_dir(from).expect("it is there").map(|entry| entry.expect("it can be listed")) {
        fs::copy(entry.path(), to.join("packs").join(entry.file_name())).expect("room");
    }
    to
}

#[test]
fn a_build_reads_the_indexes_of_those_packs_that_it_uses_and_of_a_few_more() {
    let bench = many();
    let notices = inotify::init(inotify::CreateFlags::NONBLOCK).expect("inotify");
    inotify::add_watch(&notices, bench.store().join("packs"), inotify::WatchFlags::OPEN).expect("a watch");
    let built = built(&bench.tree(), &bench.path("image"), &bench.store());
    assert_eq!((built.packs.len(), built.new_bytes), (4, 100_000));
    let mut buffer = [MaybeUninit::uninit(); 1 << 16];
    let mut reader = inotify::Reader::new(notices, &mut buffer);
    let mut opened = BTreeSet::new();
    while let Ok(event) = reader.next() {
        let name = event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        opened.extend(name.strip_suffix(".index").map(str::to_owned));
    }
    let used: BTreeSet<String> = built.packs.iter().map(ferry_image::Digest::hex).collect();
    assert!(used.is_subset(&opened), "{used:?} {opened:?}");
    // Those that came after the table was made, and those that are used.
    assert!(opened.len() <= 16 + used.len(), "{} of {PACKS} indexes were read", opened.len());
}

#[test]
fn a_build_does_not_depend_on_the_table_of_packs() {
    let bench = many();
    // As it is, and a moment later.
    let sound = fs::read(table(&bench.store())).expect("there are enough packs for a table");
    let (packs, entries) = pack_table::read(&sound).expect("it is sound");
    assert!(packs.len() > 16 && packs.len() < PACKS && !entries.is_empty(), "{} packs", packs.len());
    let mut wrong = entries.clone();
    wrong.iter_mut().for_each(|entry| entry.block += 1);
    let lies = pack_table::write(&packs, wrong).expect("there is room");
    let body = sound.len() - entries.len() * 40;
    let flipped = |from: usize, to: usize| {
        let mut bytes = sound.clone();
        bytes[from..to].iter_mut().for_each(|byte| *byte ^= 1);
        bytes
    };
    let others = pack_table::write(&[], Vec::new()).expect("there is room");
    let cases = [
        ("sound", Some(sound.clone())),
        ("none", None),
        ("empty", Some(Vec::new())),
        ("cut off", Some(sound[..sound.len() - 1].to_vec())),
        ("cut off in its head", Some(sound[..100].to_vec())),
        ("damaged in its head", Some(flipped(60, 61))),
        ("damaged in all entries", Some(flipped(body, sound.len()))),
        ("another store's", Some(others)),
    ];
    let mut all = Vec::new();
    for (number, (what, bytes)) in cases.into_iter().enumerate() {
        let store = copy(&bench, &format!("store-{number}"));
        fs::remove_file(table(&store)).expect("it is there");
        if let Some(bytes) = bytes {
            fs::write(table(&store), bytes).expect("room");
        }
        let image = bench.path(&format!("image-{number}"));
        let made = built(&bench.tree(), &image, &store);
        Source::open(&image, &store, Some(made.tree)).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(made.new_bytes, 100_000, "{what}");
        // The next one has no reason to complain.
        assert_eq!(built(&bench.tree(), &image, &store).new_bytes, 0, "{what}");
        let again = fs::read(table(&store)).map(|bytes| pack_table::read(&bytes).map(drop));
        assert!(matches!(again, Ok(Ok(()))), "{what}: {again:?}");
        all.push((what, made));
    }
    for (what, made) in &all[1..] {
        assert_eq!(made, &all[0].1, "{what}");
    }
    // One whose sums are right and whose entries are not costs room and nothing else.
    let store = copy(&bench, "lies");
    fs::remove_file(table(&store)).expect("it is there");
    fs::write(table(&store), lies).expect("room");
    let image = bench.path("image");
    let made = built(&bench.tree(), &image, &store);
    assert!(made.new_bytes > 100_000 && made.tree == all[0].1.tree, "{made:?}");
    Source::open(&image, &store, Some(made.tree)).expect("it is that tree");
}

#[test]
fn packs_changed_after_the_table_was_written_are_not_used() {
    let bench = many();
    let image = bench.path("image");
    let made = built(&bench.tree(), &image, &bench.store());
    let hex = |at: usize| made.packs[at].hex();
    let old: Vec<usize> = (0..4)
        .filter(|at| fs::metadata(bench.store().join("packs").join(hex(*at))).expect("a pack").len() < 90_000)
        .collect();
    let [one, two, three] = old[..] else { panic!("{old:?}") };
    let packs = copy(&bench, "harmed").join("packs");
    for name in [hex(two), format!("{}.index", hex(one))] {
        fs::set_permissions(packs.join(name), fs::Permissions::from_mode(0o644)).expect("modes");
    }
    File::options()
        .write(true)
        .open(packs.join(format!("{}.index", hex(one))))
        .expect("an index")
        .write_all_at(b"x", 20)
        .expect("room");
    File::options().write(true).open(packs.join(hex(two))).expect("a pack").set_len(4096).expect("it can be cut");
    fs::remove_file(packs.join(hex(three))).expect("it is there");
    fs::remove_file(packs.join(format!("{}.index", hex(three)))).expect("it is there");
    let again = built(&bench.tree(), &image, &bench.path("harmed"));
    let stored: u64 = [3, 17, 39].into_iter().map(|number| 9000 + number).sum();
    assert_eq!((again.tree, again.new_bytes), (made.tree, stored));
    Source::open(&image, &bench.path("harmed"), Some(made.tree)).expect("it is that tree");
}
