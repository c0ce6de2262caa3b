//! Large files are proved piece by piece, as they are read.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;

use common::{Bench, bytes};
use ferry_image::{Data, Image, Nid, Sole, Source};
use ferry_vfs::Errno;

const PIECE: u64 = 512 << 10;
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

/// The store's file with this end: `tree`, or nothing for the pack itself.
fn stored(bench: &Bench, end: Option<&str>) -> PathBuf {
    let all =
        fs::read_dir(bench.store().join("packs")).expect("it is there").map(|entry| entry.expect("a name").path());
    let path = all.into_iter().find(|path| path.extension().and_then(|end| end.to_str()) == end).expect("it is there");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    path
}

/// Turns a bit of a stored file around.
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
    // Nine whole pieces and a part of one, one and a byte, two.
    assert_eq!(fs::metadata(stored(&bench, Some("tree"))).expect("it is there").len(), 32 * (10 + 2 + 2));
    for length in [4096, 100_000, 700_000, 6_000_000] {
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
    for (offset, length) in [(7 * PIECE, 1), (8 * PIECE - 1, 1), (6 * PIECE, 600_000), (7 * PIECE - 1, 2)] {
        assert_eq!(read(&source, "file-0", offset, length), Err(Errno::IO), "{offset}");
    }
    assert!(read(&source, "file-3", 0, 10).is_ok());
    // Looked at as a whole it is damaged.
    let objects = ferry_image::Objects::open(source.image(), &bench.store()).expect("the packs are there");
    let inode = source.image().inode(find(source.image(), "file-0")).expect("it is there");
    let data = source.image().data(&inode).expect("the image is sound");
    let error = objects.extent(data, inode.bytes).expect_err("it is damaged");
    assert!(error.to_string().contains("is damaged"), "{error}");
}

/// What follows a file's end in its last block is seen by whoever maps it.
#[test]
fn what_follows_the_end_is_proved_with_the_last_piece() {
    let bench = made();
    let begin = start(&open(&bench), "file-0");
    damage(&stored(&bench, None), begin + LARGE + 1);
    let source = open(&bench);
    assert!(read(&source, "file-0", 8 * PIECE, 1000).is_ok());
    assert_eq!(read(&source, "file-0", 9 * PIECE, 1000), Err(Errno::IO));
}

/// Hashes that are missing or wrong prove nothing, and spoil nothing.
#[test]
fn without_its_tree_an_object_is_proved_as_a_whole() {
    for change in ["gone", "shorter", "longer", "damaged"] {
        let bench = made();
        let tree = stored(&bench, Some("tree"));
        let file = File::options().write(true).open(&tree).expect("it can be opened");
        match change {
            "gone" => fs::remove_file(&tree).expect("it is there"),
            "shorter" => file.set_len(100).expect("it can be cut off"),
            "longer" => file.set_len(10_000).expect("it can grow"),
            _ => damage(&tree, 3),
        }
        let source = open(&bench);
        let expected = fs::read(bench.tree().join("file-0")).expect("files can be read");
        assert!(read(&source, "file-0", 0, 6_000_000).expect("the bytes are sound") == expected, "{change}");
        damage(&stored(&bench, None), start(&source, "file-0") + 7 * PIECE + 100);
        assert_eq!(read(&open(&bench), "file-0", 0, 1000), Err(Errno::IO), "{change}");
        // The hashes of another object are not touched by it, or are as good as none.
        assert!(read(&open(&bench), "file-4", 0, 1000).is_ok(), "{change}");
    }
}

#[test]
fn a_tree_goes_with_its_pack() {
    let bench = made();
    let sole = Sole::lock(&bench.store(), &|| {}).expect("the store is there");
    let found =
        sole.collect(&ferry_image::Needed::default(), std::time::Duration::ZERO, false).expect("it can be collected");
    assert_eq!((found.removed.len(), found.leftovers), (1, 0));
    assert_eq!(fs::read_dir(bench.store().join("packs")).expect("it is there").count(), 0);
    drop(sole);
    bench.build("image");
    let mut needed = ferry_image::Needed::default();
    needed.add(open(&bench).image()).expect("the image is sound");
    let sole = Sole::lock(&bench.store(), &|| {}).expect("the store is there");
    let found = sole.collect(&needed, std::time::Duration::ZERO, false).expect("it can be collected");
    assert_eq!((found.removed.len(), found.leftovers, found.kept), (0, 0, 1));
    assert_eq!(fs::read_dir(bench.store().join("packs")).expect("it is there").count(), 3);
}
