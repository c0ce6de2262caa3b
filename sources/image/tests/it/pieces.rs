//! Large files are proved piece by piece, as they are read.

use crate::common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use common::{Bench, bytes};
use ferry_image::{Data, ExclusiveStore, Flaw, Image, Nid, Source, Store};
use ferry_vfs::Errno;

const PIECE: u64 = 64 << 10;
/// No multiple of a piece, nor of a block.
const LARGE: u64 = 9 * PIECE + 5000;

/// One large file, and others about as long as a piece.
fn made() -> Bench {
    let bench = Bench::new();
    for (number, length) in [LARGE, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 100].into_iter().enumerate() {
        let content = bytes(number, usize::try_from(length).expect("it fits"));
        fs::write(bench.tree().join(format!("file-{number}")), content).expect("files can be made");
    }
    bench.build("image");
    bench
}

fn open(bench: &Bench) -> Source {
    Source::open(&bench.path("image"), &bench.store(), None).expect("it was built")
}

fn find(image: &Image, name: &str) -> Nid {
    let root = image.inode(image.root()).expect("it is there");
    let name = ferry_vfs::Name::new(name.as_bytes()).expect("a name");
    image.lookup(&root, name).expect("the image is sound").expect("it is there")
}

/// The store's file with this end: `index`, or nothing for the pack itself.
fn stored(bench: &Bench, end: Option<&str>) -> PathBuf {
    let all =
        fs::read_dir(bench.store().join("packs")).expect("it is there").map(|entry| entry.expect("a name").path());
    let path = all.into_iter().find(|path| path.extension().and_then(|end| end.to_str()) == end).expect("it is there");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    path
}

/// Flips a bit of a stored file.
fn damage(path: &PathBuf, at: u64) {
    let file = File::options().read(true).write(true).open(path).expect("it can be opened");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("it can be read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("it can be written");
}

/// Where a file begins in the pack, in bytes.
fn start(source: &Source, name: &str) -> u64 {
    let image = source.image();
    let inode = image.inode(find(image, name)).expect("it is there");
    match image.data(&inode).expect("the image is sound") {
        Data::Far { block, .. } => block * 4096,
        other => panic!("{other:?}"),
    }
}

fn read(source: &Source, name: &str, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut piece = vec![0; length];
    let count = source.read_at(find(source.image(), name), offset, &mut piece)?;
    piece.truncate(count);
    Ok(piece)
}

#[test]
fn every_part_of_every_file_is_read() {
    let bench = made();
    // Nine whole pieces and a part of one, one less a byte, one, one and a byte, two, and one small file.
    assert_eq!(fs::metadata(stored(&bench, Some("index"))).expect("it is there").len(), 40 * (10 + 1 + 1 + 2 + 2 + 1));
    for length in [4096, 100_000, 200_000, 700_000] {
        for threads in [1, 4] {
            let source = open(&bench);
            std::thread::scope(|scope| {
                for thread in 0..threads {
                    let (source, bench) = (&source, &bench);
                    scope.spawn(move || {
                        for number in 0..6 {
                            let name = format!("file-{number}");
                            let expected = fs::read(bench.tree().join(&name)).expect("files can be read");
                            let offsets: Vec<usize> = (0..expected.len() + 1).step_by(length).collect();
                            // In order, and from the end.
                            let order: Vec<_> =
                                if thread % 2 == 0 { offsets } else { offsets.into_iter().rev().collect() };
                            for offset in order {
                                let found = read(source, &name, offset as u64, length).expect("it can be read");
                                let end = expected.len().min(offset + length);
                                assert!(found == expected[offset.min(end)..end], "{name} at {offset}");
                            }
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn only_the_damaged_piece_is_not_read() {
    let bench = made();
    let begin = start(&open(&bench), "file-0");
    damage(&stored(&bench, None), begin + 7 * PIECE + 100);
    let (source, expected) = (open(&bench), fs::read(bench.tree().join("file-0")).expect("files can be read"));
    for piece in [0, 6, 8, 9, 1, 5] {
        let found = read(&source, "file-0", piece * PIECE, 1000).expect("this piece is sound");
        let at = usize::try_from(piece * PIECE).expect("it fits");
        assert!(found == expected[at..(at + 1000).min(expected.len())]);
    }
    for (offset, length) in [(7 * PIECE, 1), (8 * PIECE - 1, 1), (6 * PIECE, 140_000), (7 * PIECE - 1, 2)] {
        assert_eq!(read(&source, "file-0", offset, length), Err(Errno::IO), "{offset}");
    }
    assert!(read(&source, "file-3", 0, 10).is_ok());
    // Verifying the whole file reports the damage.
    let objects = ferry_image::Objects::open(source.image(), &bench.store()).expect("the packs are there");
    let inode = source.image().inode(find(source.image(), "file-0")).expect("it is there");
    let data = source.image().data(&inode).expect("the image is sound");
    let error = objects.verify_file(data, inode.bytes).expect_err("it is damaged");
    assert!(error.to_string().contains("is damaged"), "{error}");
}

/// Bytes past a file's end in its last block are visible in a mapping.
#[test]
fn padding_is_proved_with_the_last_piece() {
    let bench = made();
    let begin = start(&open(&bench), "file-0");
    damage(&stored(&bench, None), begin + LARGE + 1);
    let source = open(&bench);
    assert!(read(&source, "file-0", 8 * PIECE, 1000).is_ok());
    assert_eq!(read(&source, "file-0", 9 * PIECE, 1000), Err(Errno::IO));
}

/// The file `name` of the tree, with other bytes from a place on.
fn change(bench: &Bench, name: &str, at: u64, count: usize) {
    let file = File::options().write(true).open(bench.tree().join(name)).expect("it can be opened");
    file.write_all_at(&vec![0xc5; count], at).expect("it can be written");
}

#[test]
fn versions_of_a_file_share_the_pieces_that_are_the_same() {
    let bench = made();
    let pieces = |image: &str| {
        let source = Source::open(&bench.path(image), &bench.store(), None).expect("it was built");
        let inode = source.image().inode(find(source.image(), "file-0")).expect("it is there");
        let data = source.image().data(&inode).expect("the image is sound");
        (matches!(data, Data::Chunks(_)), data.runs(inode.bytes, 0..inode.bytes).count())
    };
    assert_eq!(pieces("image"), (false, 1));
    // Across the end of a piece, and in the last one.
    change(&bench, "file-0", 3 * PIECE - 5, 10);
    change(&bench, "file-0", LARGE - 1, 1);
    let built = bench.build("changed");
    assert_eq!(built.new_bytes, 2 * PIECE + 5000);
    // Before, the two pieces, between, the end.
    assert_eq!(pieces("changed"), (true, 4));
    assert_eq!(ferry_image::check(&Image::open(&bench.path("changed"), None).expect("it was built")).findings, [""; 0]);
    for (image, expected) in [("changed", fs::read(bench.tree().join("file-0")).expect("files can be read"))] {
        for length in [1000, 65_536, 65_537, 300_000, 700_000] {
            let source = Source::open(&bench.path(image), &bench.store(), None).expect("it was built");
            for offset in (0..LARGE + 1).step_by(length) {
                let at = usize::try_from(offset).expect("it fits");
                let found = read(&source, "file-0", offset, length).expect("it can be read");
                assert!(found == expected[at.min(expected.len())..(at + length).min(expected.len())], "{offset}");
            }
        }
    }
    // Rebuilding adds no data, and neither does restoring the old content.
    assert_eq!(bench.build("again").new_bytes, 0);
    assert_eq!(
        fs::read(bench.path("again")).expect("it is there"),
        fs::read(bench.path("changed")).expect("it is there")
    );
    fs::write(bench.tree().join("file-0"), bytes(0, usize::try_from(LARGE).expect("it fits")))
        .expect("it can be written");
    assert_eq!(bench.build("back").new_bytes, 0);
    assert_eq!(pieces("back"), (false, 1));
}

#[test]
fn shared_pieces_are_compared_counted_and_kept() {
    let bench = made();
    change(&bench, "file-0", 4 * PIECE, 1);
    bench.build("changed");
    let store = Store::open(&bench.store()).expect("it is there");
    let open = |name: &str| Image::open(&bench.path(name), None).expect("it was built");
    let (old, new) = (open("image"), open("changed"));
    let mut digests = ferry_image::Digests::default();
    digests.add(&new, &store).expect("the packs are there");
    let mut found = Vec::new();
    let noted = ferry_image::diff::<Flaw>(&old, &new, &digests, &mut |change| {
        found.push((change.path, change.what));
        Ok(())
    });
    noted.expect("both are sound");
    let found: Vec<_> = found.iter().filter(|(_, what)| what.contains(&"content")).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].0, b"/file-0");
    let (before, after) =
        (ferry_image::object_locations(&old).expect("sound"), ferry_image::object_locations(&new).expect("sound"));
    let mut usage = ferry_image::Usage::default();
    usage.add(&before);
    usage.add(&after);
    assert_eq!((usage.of_image(&before).own_bytes, usage.of_image(&after).own_bytes), (PIECE, PIECE));
    drop(store);
    // Both packs are needed by the new one.
    let mut needed = ferry_image::LiveSet::default();
    needed.add(&new).expect("the image is sound");
    let sole = ExclusiveStore::lock(&bench.store(), &|| {}).expect("the store is there");
    let collected = sole.collect(&needed, std::time::Duration::ZERO, false).expect("it can be collected");
    assert_eq!((collected.kept, collected.removed.len(), collected.leftovers), (2, 0, 0));
}

/// A damaged piece fails in every image that shares it, and nowhere else.
#[test]
fn a_damaged_piece_is_missed_in_each_version() {
    let bench = made();
    let begin = start(&open(&bench), "file-0");
    // Now, while there is only one pack.
    damage(&stored(&bench, None), begin + 2 * PIECE + 77);
    change(&bench, "file-0", 5 * PIECE, 1);
    bench.build("changed");
    for (image, name) in [("image", "file-0"), ("changed", "file-0")] {
        let source = Source::open(&bench.path(image), &bench.store(), None).expect("it was built");
        assert_eq!(read(&source, name, 2 * PIECE, 10), Err(Errno::IO), "{image}");
        assert_eq!(read(&source, name, PIECE, 70_000), Err(Errno::IO), "{image}");
        assert_eq!(read(&source, name, 3 * PIECE, 200_000).map(|bytes| bytes.len()), Ok(200_000), "{image}");
    }
}

#[test]
fn an_image_of_the_first_version_is_refused_with_a_remedy() {
    let bench = made();
    let mut image = fs::read(bench.path("image")).expect("it is there");
    let at = image.windows(11).position(|name| name == b"ferry flat2").expect("the volume has a name");
    image[at + 10] = 0;
    let error = Image::from_bytes(image).expect_err("it is of another version");
    assert!(error.to_string().contains("build the image again"), "{error}");
}
