//! How the layout flat is laid out: what makes it small and fast, and is not seen by who reads it.

use crate::common;

use std::fs;

use common::damaged::{Damaged, settle};
use common::{Bench, bytes, set_time};
use ferry_image::erofs::{Compact, SLOT_BYTES};
use ferry_image::{BuildOptions, Image, Nid, Store, build};
use ferry_vfs::FileType;
use rustix::fs::{XattrFlags, lsetxattr};

/// Directories in directories, each with a few files, and names before and behind those of the directories.
fn tree(bench: &Bench) {
    for dir in ["b", "b/b", "b/d", "b/d/b", "d"] {
        fs::create_dir(bench.tree().join(dir)).expect("directories can be made");
    }
    for (number, dir) in ["", "b", "b/b", "b/d", "b/d/b", "d"].into_iter().enumerate() {
        for name in ["a", "c", "e"] {
            fs::write(bench.tree().join(dir).join(name), bytes(number, 5000)).expect("files can be made");
        }
    }
    settle(&bench.tree());
}

fn built(bench: &Bench) -> (Damaged, Image) {
    bench.build("image");
    let bytes = fs::read(bench.path("image")).expect("it was built");
    (Damaged::new(&bytes), Image::from_bytes(bytes).expect("it is whole"))
}

/// Inodes in the order in which `ls -lR` and `find` want them: a directory, its files, then each of its directories with all that is in it.
fn walked(image: &Image, dir: Nid, order: &mut Vec<Nid>) {
    order.push(dir);
    let inode = image.inode(dir).expect("it is there");
    let names = image.entries(&inode, 0).expect("it is a directory").map(|entry| entry.expect("a name"));
    let (dirs, files): (Vec<_>, Vec<_>) = names
        .filter(|entry| !matches!(entry.name, b"." | b".."))
        .map(|entry| entry.nid)
        .partition(|nid| image.inode(*nid).expect("it is there").kind() == FileType::Directory);
    order.extend(files);
    dirs.into_iter().for_each(|dir| walked(image, dir, order));
}

#[test]
fn inodes_are_in_the_order_of_the_walk() {
    let bench = Bench::new();
    tree(&bench);
    let (_, image) = built(&bench);
    let mut order = Vec::new();
    walked(&image, image.root(), &mut order);
    assert_eq!(order.len(), 6 + 18);
    assert!(order.is_sorted(), "{order:?}");
    // One behind the other: what is between files' inodes is nothing but the inodes.
    let files = &order[1..4];
    assert!(files.windows(2).all(|pair| pair[1].0 - pair[0].0 == (size_of::<Compact>() / SLOT_BYTES) as u64));
}

#[test]
fn inodes_are_the_shorter_ones_wherever_they_fit() {
    let bench = Bench::new();
    tree(&bench);
    let at = |name: &str| bench.tree().join(name);
    set_time(&at("a"), 1_700_000_000, 5);
    set_time(&at("b/a"), 1_700_000_000 + i64::from(u32::MAX), 0);
    set_time(&at("b/c"), 1_700_000_001 + i64::from(u32::MAX), 0);
    std::os::unix::fs::lchown(at("c"), Some(65_535), Some(65_535)).expect("owners can be set");
    std::os::unix::fs::lchown(at("d/a"), Some(65_536), Some(0)).expect("owners can be set");
    std::os::unix::fs::lchown(at("d/c"), Some(0), Some(65_536)).expect("owners can be set");
    let (image, _) = built(&bench);
    for dir in ["", "b", "b/b", "b/d", "b/d/b", "d"] {
        assert!(!image.is_extended(dir), "{dir:?}");
        for name in ["a", "c", "e"] {
            let path = format!("{dir}/{name}");
            let is_long = matches!(&*path, "/a" | "b/c" | "d/a" | "d/c");
            assert_eq!(image.is_extended(&path), is_long, "{path}");
        }
    }
}

#[test]
fn attributes_of_several_inodes_are_there_once() {
    let bench = Bench::new();
    tree(&bench);
    let label = b"system_u:object_r:usr_t:s0, or something as long";
    let set = |name: &str, attribute: &str, value: &[u8]| {
        lsetxattr(bench.tree().join(name), attribute, value, XattrFlags::empty()).expect("attributes can be set");
    };
    for name in ["a", "c", "b", "b/d/e"] {
        set(name, "user.label", label);
    }
    set("a", "user.own", b"1");
    set("c", "user.own", b"2");
    let (image, _) = built(&bench);
    // The number of shared ones is the fifth byte of what attributes begin with.
    for (name, count, own) in [("a", 1, "own1"), ("c", 1, "own2"), ("b", 1, ""), ("b/d/e", 1, "")] {
        assert_eq!(image.bytes[image.xattrs(name) + 4], count, "{name}");
        let size = 12 + 4 + if own.is_empty() { 0 } else { 4 + own.len() };
        assert_eq!(image.tail(name) - image.xattrs(name), size, "{name}");
    }
    assert_eq!(image.bytes.windows(label.len()).filter(|bytes| bytes == label).count(), 1);
}

/// However many threads hash, and in whichever order they come to an end.
#[test]
fn an_image_does_not_depend_on_the_number_of_threads() {
    let bench = Bench::new();
    for number in 0..200 {
        let length = 3000 + number * 997 + if number % 50 == 0 { 3 << 20 } else { 0 };
        fs::write(bench.tree().join(number.to_string()), bytes(number % 150, length)).expect("files can be made");
    }
    settle(&bench.tree());
    let built = [1, 2, 3, 8].map(|threads| {
        let (image, store) = (bench.path(&format!("image-{threads}")), bench.path(&format!("store-{threads}")));
        let options = BuildOptions { threads, ..BuildOptions::default() };
        let store = Store::create(&store).expect("a store can be made");
        let built = build(&bench.tree(), &image, store, &options, &|_, _| {}).expect("the tree can be built");
        (built, fs::read(image).expect("it was built"))
    });
    assert!(built.iter().all(|other| *other == built[0]), "{:?}", built.map(|(built, _)| built));
}
