//! Images and stores that are damaged, made to do harm, or full.

use crate::common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::{Bench, bytes, fill};
use ferry_image::{Algorithm, BuildOptions, Data, Error, Image, Layout, Objects, Source, Store, check};
use ferry_vfs::{Errno, FileType};
use proptest::prelude::*;

fn write_over(path: &Path, offset: u64, bytes: &[u8]) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    File::options()
        .write(true)
        .open(path)
        .and_then(|file| file.write_all_at(bytes, offset))
        .expect("files can be written");
}

#[test]
fn another_digest_is_refused() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 5000)).expect("files can be made");
    let built = bench.build("image");
    Image::open(&bench.path("image"), Some(built.digest)).expect("it has the digest");
    write_over(&bench.path("image"), 1300, &[0x55]);
    let error = Image::open(&bench.path("image"), Some(built.digest)).expect_err("a bit is another");
    assert!(error.to_string().contains(&built.digest.to_string()), "{error}");
}

#[test]
fn damaged_bytes_are_never_handed_out_and_others_are() {
    let bench = Bench::new();
    for number in 0..3 {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 9000)).expect("files can be made");
    }
    let built = bench.build("image");
    let store = Store::open(&bench.store()).expect("the store is there");
    // The second of three blocks of the second file.
    write_over(&store.pack_path(built.packs[0]), 4 * 4096, &[0xaa; 10]);
    let source = Source::open(&bench.path("image"), &bench.store(), None).expect("the image itself is whole");
    let root = source.image().inode(source.image().root()).expect("the root is there");
    for (name, outcome) in [("0", Ok(100)), ("1", Err(Errno::IO)), ("2", Ok(100))] {
        let name = ferry_vfs::Name::new(name.as_bytes()).expect("a name");
        let nid = source.image().lookup(&root, name).expect("the image is whole").expect("the name is there");
        for _ in 0..2 {
            assert_eq!(source.read_at(nid, 0, &mut [0; 100]), outcome, "{name:?}");
        }
    }
}

#[test]
fn packs_that_are_missing_or_cut_are_named() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 9000)).expect("files can be made");
    let built = bench.build("image");
    let path = Store::open(&bench.store()).expect("the store is there").pack_path(built.packs[0]);
    let open = || Source::open(&bench.path("image"), &bench.store(), None).map(drop);
    write_over(&path, 0, &[]);
    File::options().write(true).open(&path).and_then(|file| file.set_len(4096)).expect("files can be cut");
    let error = open().expect_err("the pack is cut off");
    assert!(error.to_string().contains("has 4096 bytes, not 12288"), "{error}");
    // A build does not rely on it either.
    fs::write(bench.tree().join("other"), bytes(2, 9000)).expect("files can be made");
    assert_eq!(bench.build("second").new_bytes, 18_000);
    let index = path.with_extension("index");
    fs::remove_file(&path).expect("files can be removed");
    assert!(open().expect_err("the pack is gone").to_string().contains("cannot open"));
    write_over(&index, 3, &[1]);
    let error = open().expect_err("the index is damaged");
    assert!(error.to_string().contains("its index is damaged"), "{error}");
}

#[test]
fn a_full_disk_leaves_no_image_and_no_pack() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 3 << 20)).expect("files can be made");
    fs::create_dir(bench.store()).expect("directories can be made");
    rustix::mount::mount("none", bench.store(), "tmpfs", rustix::mount::MountFlags::empty(), c"size=1m")
        .expect("root may");
    let outcome = bench.try_build("image");
    let left = fs::read_dir(bench.store().join("packs")).expect("it is there").count();
    rustix::mount::unmount(bench.store(), rustix::mount::UnmountFlags::DETACH).expect("it is mounted");
    let error = outcome.expect_err("there is no room");
    let Error::Io { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(left, 0);
    assert!(!bench.path("image").exists());
}

#[test]
fn a_full_disk_leaves_no_image_and_no_half_object() {
    let bench = Bench::new();
    for number in 0..6 {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 300_000)).expect("files can be made");
    }
    fs::create_dir(bench.store()).expect("directories can be made");
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("none", bench.store(), "tmpfs", none, c"size=1m").expect("root may");
    let build = || {
        let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
        let store = Store::create(&bench.store())?;
        ferry_image::build(&bench.tree(), &bench.path("image"), store, &options, &|_, _| {})
    };
    let outcome = build();
    let there = bench.path("image").exists();
    // Each file below objects/xx is whole: its name is what its bytes are.
    let mut objects = Vec::new();
    for directory in fs::read_dir(bench.store().join("objects")).expect("it is there").flatten() {
        for file in fs::read_dir(directory.path()).expect("it is a directory").flatten() {
            let name = format!("{}{}", directory.file_name().display(), file.file_name().display());
            objects.push((name, Algorithm::Verity.of(&fs::read(file.path()).expect("files can be read")).hex()));
        }
    }
    rustix::mount::mount_remount(bench.store(), none, c"size=8m").expect("it is mounted");
    let again = build();
    rustix::mount::unmount(bench.store(), rustix::mount::UnmountFlags::DETACH).expect("it is mounted");
    let error = outcome.expect_err("there is no room");
    let Error::Io { source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert!(!there);
    assert!(objects.iter().all(|(name, digest)| name == digest), "{objects:?}");
    again.expect("there is room now");
}

#[test]
fn unbuildable_sources_are_errors() {
    let bench = Bench::new();
    fs::write(bench.path("file"), "x").expect("files can be made");
    let store = || Store::create(&bench.store()).expect("a store can be made");
    let build = |source: &str| {
        ferry_image::build(&bench.path(source), &bench.path("image"), store(), &Default::default(), &|_, _| {})
            .map(drop)
    };
    assert!(build("file").expect_err("no directory").to_string().contains("it is not a directory, tar archive"));
    assert!(build("absent").expect_err("not there").to_string().starts_with("cannot look at"));
    assert!(!bench.path("image").exists());
}

/// Looks at everything that can be looked at.
fn use_all(image: &Image) {
    let report = check(image);
    assert!(report.findings.len() <= 4000);
    let mut left = vec![image.root()];
    let mut steps = 0;
    while let Some(nid) = left.pop() {
        steps += 1;
        if steps > 2000 {
            break;
        }
        let Ok(inode) = image.inode(nid) else { continue };
        let _ =
            (image.xattrs(&inode), image.data(&inode).map(|data| matches!(data, Data::Far { .. })), image.link(&inode));
        if let Ok(data) = image.data(&inode) {
            let runs = data.runs(inode.bytes, 0..inode.bytes).take(1000);
            assert!(runs.flatten().all(|run| run.bytes > 0 && run.pack < image.packs().len()));
        }
        let Ok(entries) = image.entries(&inode, 0) else { continue };
        for entry in entries.take(5000).flatten() {
            if !matches!(entry.name, b"." | b"..") {
                let name = ferry_vfs::Name::new(entry.name).expect("nothing else is handed out");
                let _ = image.lookup(&inode, name);
            }
            left.push(entry.nid);
        }
        let _ = image.parent(&inode);
    }
}

fn small_image() -> Vec<u8> {
    static IMAGE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    IMAGE
        .get_or_init(|| {
            let bench = Bench::new();
            fill(&bench.tree());
            fs::remove_dir_all(bench.tree().join("many-3000")).expect("directories can be removed");
            bench.build("image");
            fs::read(bench.path("image")).expect("files can be read")
        })
        .clone()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever stands in an image: answers or flaws, no panic, no endless walk.
    #[test]
    fn any_change_of_an_image_is_survived(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0), Just(0xff), any::<u8>()]), 1..20),
        cut in prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let mut bytes = small_image();
        for (at, byte) in changes {
            // Most of it is names; what matters more often lies in the first blocks.
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            let length = cut.index(bytes.len());
            bytes.truncate(length);
        }
        if let Ok(image) = Image::from_bytes(bytes) {
            use_all(&image);
        }
    }

    /// The same where each byte counts: the superblock and the first inodes.
    #[test]
    fn any_superblock_and_root_are_survived(changes in proptest::collection::vec((1024usize..1300, any::<u8>()), 1..8)) {
        let mut bytes = small_image();
        changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
        if let Ok(image) = Image::from_bytes(bytes) {
            use_all(&image);
        }
    }
}

#[test]
fn places_outside_of_a_pack_are_no_objects() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 9000)).expect("files can be made");
    bench.build("image");
    let image = Image::open(&bench.path("image"), None).expect("it was built");
    let objects = Objects::open(&image, &bench.store()).expect("it is whole");
    let find = |block, bytes| objects.verify_file(Data::Far { pack: 0, block }, bytes);
    find(0, 9000).expect("that is the object");
    for (block, length) in [(0, 8999), (0, 9001), (1, 9000), (1 << 40, 1)] {
        find(block, length).expect_err("that is none");
    }
}

/// A directory that holds itself, found by changing an entry's number.
#[test]
fn directories_in_a_circle_are_found() {
    let bench = Bench::new();
    fs::create_dir_all(bench.tree().join("a/b")).expect("directories can be made");
    bench.build("image");
    let mut bytes = fs::read(bench.path("image")).expect("files can be read");
    let image = Image::from_bytes(bytes.clone()).expect("it was built");
    let find = |nid, name: &[u8]| {
        let dir = image.inode(nid).expect("it is there");
        assert_eq!(dir.kind(), FileType::Directory);
        image.lookup(&dir, ferry_vfs::Name::new(name).expect("a name")).expect("whole").expect("there")
    };
    let a = find(image.root(), b"a");
    let b = find(a, b"b");
    // The entry of b in a is behind a's inode; make it lead to a.
    let from = usize::try_from(a.0 * 32).expect("it fits");
    let number = b.0.to_le_bytes();
    let at = (from..from + 200).find(|at| bytes[*at..*at + 8] == number).expect("the entry is there");
    bytes[at..at + 8].copy_from_slice(&a.0.to_le_bytes());
    let findings = check(&Image::from_bytes(bytes).expect("the root is whole")).findings;
    assert!(
        findings.iter().any(|finding| finding == "/a/b: a directory that has another name already"),
        "{findings:?}"
    );
}

#[test]
fn an_image_is_looked_at_before_all_of_it_is_read() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 5000)).expect("files can be made");
    let built = bench.build("image");
    let said = |name: &str| Image::open(&bench.path(name), None).expect_err("it is none").to_string();
    let other = File::create(bench.path("other")).expect("files can be made");
    // So much is not even asked of the memory.
    other.set_len(1 << 40).expect("files can grow");
    assert!(said("other").contains("no magic number"), "{}", said("other"));
    fs::copy(bench.path("image"), bench.path("longer")).expect("files can be copied");
    write_over(&bench.path("longer"), 1 << 40, b"x");
    assert!(said("longer").contains("more than its superblock tells of"), "{}", said("longer"));
    Image::open(&bench.path("image"), Some(built.digest)).expect("it is whole");
}

/// Who has few bytes must not have us take gigabytes for them.
#[test]
fn an_image_that_is_mostly_holes_takes_no_memory() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const LENGTH: u64 = 8 << 30;
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), "no pack").expect("files can be made");
    let built = bench.build("image");
    let image = bench.path("image");
    // As many blocks as the superblock can be made to tell of.
    write_over(&image, 1024 + 36, &u32::MAX.to_le_bytes());
    let grow = |length: u64| {
        File::options().write(true).open(&image).and_then(|file| file.set_len(length)).expect("files can grow");
    };
    grow(LENGTH);
    let begin = peak();
    let said = Image::open(&image, None).expect_err("it is mostly holes").to_string();
    assert!(said.contains("a hole with most of what should be there: copy it with cp --sparse=never"), "{said}");
    assert!(peak() - begin < 1 << 20, "{} KiB", peak() - begin);
    // Data at the end, and here and there, do not help; enough of them do.
    write_over(&image, LENGTH - 1, b"x");
    write_over(&image, LENGTH / 2, &[1; 1 << 20]);
    Image::open(&image, None).expect_err("it is mostly holes");
    grow(32 << 20);
    Image::open(&image, None).expect_err("it is mostly holes");
    write_over(&image, 1 << 20, &vec![1; 5 << 20]);
    assert_eq!(Image::open(&image, None).expect("it may have holes").bytes(), 32 << 20);
    // A short one may be nothing else.
    grow(built.image_bytes);
    grow(1 << 20);
    Image::open(&image, None).expect("so much memory is there");
}

/// The most memory that this process has had, in KiB.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("it can be read");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it is told");
    line.trim().trim_end_matches("kB").trim().parse().expect("a number")
}
