//! Stores of which something is damaged, and what replaces it.

use crate::common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Bench, bytes};
use ferry_image::ByteSink;
use ferry_image::{
    BuildOptions, BuildReport, Digest, ExclusiveStore, Fetch, Image, Layout, LiveSet, Objects, RepairCounts, Store,
    build, file_objects, note_damage, repair_packs, walk,
};
use ferry_vfs::FileType;

/// A store with an image of three files of 9000 bytes, each an object of three blocks.
fn three() -> (Bench, BuildReport) {
    let bench = Bench::new();
    for number in 0..3 {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 9000)).expect("files can be made");
    }
    let built = bench.build("image");
    (bench, built)
}

fn open(bench: &Bench, name: &str) -> Image {
    Image::open(&bench.path(name), None).expect("what was built can be opened")
}

fn pack_path(bench: &Bench, pack: Digest) -> PathBuf {
    Store::open(&bench.store()).expect("the store is there").pack_path(pack)
}

fn write_over(path: &Path, offset: u64, bytes: &[u8]) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    let file = File::options().write(true).open(path).expect("files can be opened");
    file.write_all_at(bytes, offset).expect("files can be written");
}

/// The files of an image that cannot be read.
fn damaged(bench: &Bench, name: &str) -> BTreeSet<String> {
    let image = open(bench, name);
    let objects = Objects::open(&image, &bench.store()).expect("the packs are there");
    let mut found = BTreeSet::new();
    walk::<ferry_image::Flaw>(&image, image.root(), b"/", |step, inode| {
        if inode.kind() == FileType::RegularFile && objects.verify_file(image.data(inode)?, inode.bytes).is_err() {
            found.insert(step.text());
        }
        Ok(())
    })
    .expect("the image is sound");
    found
}

fn note(bench: &Bench, name: &str) -> usize {
    note_damage(&open(bench, name), &bench.store()).expect("the store can be written to")
}

fn notes(bench: &Bench) -> usize {
    let names = fs::read_dir(bench.store().join("packs")).expect("it is there");
    names
        .filter(|name| name.as_ref().is_ok_and(|name| name.path().extension().is_some_and(|end| end == "damaged")))
        .count()
}

/// Hands over what a directory has, as it is there.
#[derive(Debug)]
struct Directory(PathBuf);

impl Fetch for Directory {
    fn index(&self, pack: Digest, _: u64) -> io::Result<Vec<u8>> {
        fs::read(self.0.join(format!("{}.index", pack.hex())))
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("it fits")];
        File::open(self.0.join(pack.hex()))?.read_exact_at(&mut bytes, range.start)?;
        bytes.chunks(1000).try_for_each(sink)
    }
}

#[test]
fn a_build_with_the_data_repairs_recorded_damage() {
    let (bench, built) = three();
    let path = pack_path(&bench, built.packs[0]);
    let before = fs::read(&path).expect("files can be read");
    write_over(&path, 4 * 4096, &[0xaa; 10]);
    assert_eq!(damaged(&bench, "image"), BTreeSet::from(["/1".to_owned()]));
    // A build hashes what it reads, and not the store.
    assert_eq!(bench.build("again").new_bytes, 0);
    assert_eq!((note(&bench, "image"), notes(&bench)), (1, 1));
    assert_eq!(damaged(&bench, "image").len(), 1, "a note changes nothing for readers");
    // One that has not got it, leaves it and does not use it.
    fs::rename(bench.tree().join("1"), bench.path("1")).expect("files can be renamed");
    assert_eq!(bench.build("without").new_bytes, 0);
    assert_eq!((damaged(&bench, "image").len(), damaged(&bench, "without").len(), notes(&bench)), (1, 0, 1));
    fs::rename(bench.path("1"), bench.tree().join("1")).expect("files can be renamed");
    let reader = File::open(&path).expect("files can be opened");
    let mended = bench.build("mended");
    assert_eq!((mended.new_bytes, notes(&bench)), (9000, 0));
    for name in ["image", "again", "without", "mended"] {
        assert_eq!(damaged(&bench, name), BTreeSet::new(), "{name}");
    }
    assert_eq!(fs::read(&path).expect("files can be read"), before);
    // Who has the old one open keeps it.
    let mut byte = [0];
    reader.read_exact_at(&mut byte, 4 * 4096).expect("it is as long as before");
    assert_eq!(byte, [0xaa]);
    assert_eq!((note(&bench, "image"), notes(&bench)), (0, 0));
}

#[test]
fn fetched_data_is_proved_before_it_replaces_any() {
    let (bench, built) = three();
    let (path, copy) = (pack_path(&bench, built.packs[0]), bench.path("copy"));
    fs::create_dir(&copy).expect("directories can be made");
    let copied = copy.join(built.packs[0].hex());
    fs::copy(&path, &copied).expect("files can be copied");
    let mut half = fs::read(&path).expect("files can be read");
    half[7 * 4096..][..10].fill(0xaa);
    write_over(&path, 0, &[0xaa; 10]);
    write_over(&path, 7 * 4096, &[0xaa; 10]);
    assert_eq!(note(&bench, "image"), 2);
    let image = open(&bench, "image");
    let from = Directory(copy);
    write_over(&copied, 7 * 4096, &[0xbb]);
    let error = repair_packs(&image, &bench.store(), Some(&from)).expect_err("one comes damaged, too");
    assert!(error.to_string().contains("cannot fetch the object blake3:"), "{error}");
    // The other one is mended.
    assert!(fs::read(&path).expect("files can be read") == half);
    assert_eq!((damaged(&bench, "image"), notes(&bench)), (BTreeSet::from(["/2".to_owned()]), 1));
    write_over(&copied, 7 * 4096, &bytes(2, 9000)[4096..4097]);
    assert_eq!(
        repair_packs(&image, &bench.store(), Some(&from)).expect("it is sound"),
        RepairCounts { repaired: 1, left: 0 }
    );
    assert_eq!((damaged(&bench, "image").len(), notes(&bench)), (0, 0));
    assert_eq!(
        repair_packs(&image, &bench.store(), Some(&from)).expect("there is nothing to do"),
        RepairCounts::default()
    );
}

/// Refuses the first object, and puts a directory where the pack was.
#[derive(Debug)]
struct Meddler(Directory, PathBuf);

impl Fetch for Meddler {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        self.0.index(pack, bytes_max)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        if range.start > 0 {
            return self.0.read(pack, range, sink);
        }
        fs::remove_file(&self.1).and_then(|()| fs::create_dir(&self.1))?;
        Err(io::Error::new(io::ErrorKind::NotFound, "nobody has it"))
    }
}

#[test]
fn errors_of_fetching_and_of_writing_are_both_reported() {
    let (bench, built) = three();
    let (path, copy) = (pack_path(&bench, built.packs[0]), bench.path("copy"));
    fs::create_dir(&copy).expect("directories can be made");
    fs::copy(&path, copy.join(built.packs[0].hex())).expect("files can be copied");
    write_over(&path, 0, &[0xaa; 10]);
    write_over(&path, 7 * 4096, &[0xaa; 10]);
    assert_eq!(note(&bench, "image"), 2);
    let from = Meddler(Directory(copy), path.clone());
    let error =
        repair_packs(&open(&bench, "image"), &bench.store(), Some(&from)).expect_err("a directory is in the way");
    let error = error.to_string();
    assert!(error.contains("nobody has it") && error.contains("directory"), "{error}");
}

/// Zeros repair it, without a server.
#[test]
fn padding_is_repaired_without_a_server() {
    let (bench, built) = three();
    let path = pack_path(&bench, built.packs[0]);
    let before = fs::read(&path).expect("files can be read");
    // Behind the first object and the last one.
    for at in [9000, 9 * 4096 - 1] {
        write_over(&path, at, &[1]);
    }
    assert_eq!(note(&bench, "image"), 2);
    let mended = repair_packs(&open(&bench, "image"), &bench.store(), None).expect("the store can be written to");
    assert_eq!((mended, notes(&bench)), (RepairCounts { repaired: 2, left: 0 }, 0));
    assert!(fs::read(&path).expect("files can be read") == before);
    // Beside an object that no source has.
    write_over(&path, 12_287, &[1]);
    write_over(&path, 4 * 4096, &[!before[4 * 4096]]);
    assert_eq!(note(&bench, "image"), 2);
    let mended = repair_packs(&open(&bench, "image"), &bench.store(), None).expect("the store can be written to");
    assert_eq!((mended, notes(&bench)), (RepairCounts { repaired: 1, left: 1 }, 1));
    assert_eq!(damaged(&bench, "image"), BTreeSet::from(["/1".to_owned()]));
}

#[test]
fn all_packs_are_named_of_which_something_cannot_be_had() {
    let (bench, _) = three();
    fs::write(bench.tree().join("3"), bytes(3, 9000)).expect("files can be made");
    let packs = bench.build("second").packs;
    assert_eq!(packs.len(), 2);
    packs.iter().for_each(|pack| write_over(&pack_path(&bench, *pack), 0, &[0xaa; 10]));
    assert_eq!(note(&bench, "second"), 2);
    let from = Directory(bench.path("nothing"));
    let error =
        repair_packs(&open(&bench, "second"), &bench.store(), Some(&from)).expect_err("nobody has it").to_string();
    for pack in packs {
        assert!(error.contains(&format!("of the pack {pack}: No such file")), "{error}");
    }
}

#[test]
fn available_objects_among_several_damaged_are_repaired() {
    let (bench, built) = three();
    let path = pack_path(&bench, built.packs[0]);
    // All of it but the first object.
    File::options().write(true).open(&path).and_then(|file| file.set_len(4 * 4096)).expect("root may");
    assert_eq!(note(&bench, "image"), 2);
    (0..2).for_each(|number| fs::remove_file(bench.tree().join(number.to_string())).expect("files can be removed"));
    // A pack that is cut off is not used at all.
    assert_eq!(bench.build("third").new_bytes, 9000);
    assert_eq!(damaged(&bench, "image"), BTreeSet::from(["/1".to_owned()]));
    assert_eq!(notes(&bench), 1);
    let left = repair_packs(&open(&bench, "image"), &bench.store(), None).expect("the store can be written to");
    assert_eq!(left, RepairCounts { repaired: 0, left: 1 });
    fs::write(bench.tree().join("one"), bytes(1, 9000)).expect("files can be made");
    bench.build("fourth");
    assert_eq!((damaged(&bench, "image").len(), notes(&bench)), (0, 0));
}

/// A file of which every read is an error, as of a broken device: a process's memory at the address 0.
struct Unreadable(PathBuf);

impl Unreadable {
    fn make(path: &Path) -> Option<Self> {
        rustix::mount::mount_bind("/proc/self/mem", path).ok()?;
        Some(Self(path.into()))
    }
}

impl Drop for Unreadable {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn read_errors_are_not_damage_and_do_not_stop_repair() {
    let (bench, built) = three();
    fs::write(bench.tree().join("3"), bytes(3, 9000)).expect("files can be made");
    let second = bench.build("second").packs;
    let new =
        second.into_iter().find(|pack| *pack != built.packs[0]).expect("what was not there before is in another pack");
    let packs = [built.packs[0], new].map(|pack| pack_path(&bench, pack));
    let (all, copy) = (packs.each_ref().map(|path| fs::read(path).expect("files can be read")), bench.path("copy"));
    fs::create_dir(&copy).expect("directories can be made");
    for unreadable in [0, 1] {
        let path = |at: usize| &packs[at];
        (0..2).for_each(|at| write_over(path(at), 0, &[0xaa; 10]));
        assert_eq!((note(&bench, "second"), notes(&bench)), (2, 2));
        for (path, bytes) in packs.iter().zip(&all) {
            fs::write(copy.join(path.file_name().expect("a name")), bytes).expect("files can be made");
        }
        let below = fs::read(path(unreadable)).expect("files can be read");
        let Some(covered) = Unreadable::make(path(unreadable)) else {
            return ferry_skip::skip!("only root can mount a file whose reads are errors");
        };
        let error = repair_packs(&open(&bench, "second"), &bench.store(), None).expect_err("it cannot be read");
        assert!(error.to_string().starts_with("cannot read "), "{error}");
        // The server has not got that one, but the other.
        fs::remove_file(copy.join(path(unreadable).file_name().expect("a name"))).expect("files can be removed");
        repair_packs(&open(&bench, "second"), &bench.store(), Some(&Directory(copy.clone())))
            .expect_err("it cannot be had");
        assert!(fs::read(path(1 - unreadable)).expect("files can be read") == all[1 - unreadable]);
        assert_eq!(notes(&bench), 1);
        drop(covered);
        assert!(fs::read(path(unreadable)).expect("files can be read") == below, "nothing took its place");
        fs::write(path(unreadable), &all[unreadable]).expect("files can be made");
        assert_eq!((note(&bench, "second"), notes(&bench)), (0, 0));
    }
}

#[test]
fn a_pack_that_is_too_long_is_repaired() {
    let (bench, built) = three();
    let path = pack_path(&bench, built.packs[0]);
    write_over(&path, 9 * 4096, &[1]);
    let error = Objects::open(&open(&bench, "image"), &bench.store()).expect_err("it is too long");
    assert!(error.to_string().contains("not 36864"), "{error}");
    assert_eq!((note(&bench, "image"), notes(&bench)), (0, 1));
    repair_packs(&open(&bench, "image"), &bench.store(), None).expect("the store can be written to");
    assert_eq!((damaged(&bench, "image").len(), notes(&bench)), (0, 0));
}

#[test]
fn damage_records_are_removed_with_their_packs() {
    let (bench, built) = three();
    write_over(&pack_path(&bench, built.packs[0]), 0, &[0xaa]);
    note(&bench, "image");
    let collect = |needed: &LiveSet| {
        let sole = ExclusiveStore::lock(&bench.store(), &|| {}).expect("the store is there");
        sole.collect(needed, Duration::ZERO, false).expect("it can be collected")
    };
    let mut needed = LiveSet::default();
    needed.add(&open(&bench, "image")).expect("the image is sound");
    collect(&needed);
    assert_eq!(notes(&bench), 1);
    let collected = collect(&LiveSet::default());
    assert_eq!((collected.removed.len(), collected.leftovers, notes(&bench)), (1, 0, 0));
}

#[test]
fn damaged_objects_of_composefs_are_removed_and_rebuilt() {
    let bench = Bench::new();
    for number in 0..3 {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 9000)).expect("files can be made");
    }
    let build_it = || {
        let store = Store::create(&bench.store()).expect("a store can be made");
        let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
        build(&bench.tree(), &bench.path("image"), store, &options, &|_, _| {}).expect("it can be built").new_bytes
    };
    assert_eq!(build_it(), 27_000);
    let objects = file_objects(&open(&bench, "image")).expect("the image is sound");
    let path = |at: usize| {
        let hex: String = objects[at].digest.hex();
        bench.store().join("objects").join(&hex[..2]).join(&hex[2..])
    };
    write_over(&path(1), 100, &[0xaa]);
    File::options().write(true).open(path(2)).and_then(|file| file.set_len(9001)).expect("root may");
    assert_eq!(note(&bench, "image"), 2);
    assert!(path(0).exists() && !path(1).exists() && !path(2).exists());
    assert_eq!(build_it(), 18_000);
    assert_eq!(damaged(&bench, "image"), BTreeSet::new());
    // That something is not there is no damage.
    fs::remove_file(path(0)).expect("files can be removed");
    assert_eq!(note(&bench, "image"), 0);
    // Unreadable packs stay; the others are checked nevertheless.
    fs::create_dir(path(0)).expect("directories can be made");
    write_over(&path(2), 100, &[0xaa]);
    let error = note_damage(&open(&bench, "image"), &bench.store()).expect_err("it cannot be read");
    assert!(error.to_string().starts_with("cannot read "), "{error}");
    assert!(path(0).exists() && path(1).exists() && !path(2).exists());
}
