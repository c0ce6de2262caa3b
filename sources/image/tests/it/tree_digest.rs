//! One tree has one digest, whatever is done to build an image of it; another tree has another one.

use crate::common;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use common::{Bench, bytes, fill, set_time};
use ferry_image::{
    Algorithm, BuildOptions, BuildReport, Digest, Error, Image, Layout, Objects, Source, Store, Trace, build, check,
};

/// Where an image says of which tree it is.
const TREE_OFFSET: u64 = 992;

fn built(tree: &Path, directory: &Path, name: &str, options: &BuildOptions) -> BuildReport {
    let store = Store::create(&directory.join(format!("{name}.store"))).expect("a store");
    build(tree, &directory.join(name), store, options, &|_, _| {}).expect("it can be built")
}

/// The digest is in the image, and what opens the image and its packs agrees with what built it.
fn assert_proved(directory: &Path, name: &str, built: &BuildReport) {
    let (image, store) = (directory.join(name), directory.join(format!("{name}.store")));
    let opened = Image::open(&image, Some(built.tree)).expect("it is that tree");
    assert_eq!(opened.tree(), Some(built.tree), "{name}");
    opened.verify_tree(&store).unwrap_or_else(|error| panic!("{name}: {error}"));
    Source::open(&image, &store, Some(built.tree)).unwrap_or_else(|error| panic!("{name}: {error}"));
}

#[test]
fn a_tree_has_one_digest_whatever_the_store_held_and_however_it_is_built() {
    let bench = Bench::new();
    let tree = bench.tree();
    fill(&tree);
    let directory = bench.directory.path();
    let usual = BuildOptions { threads: 1, ..BuildOptions::default() };
    let first = built(&tree, directory, "first", &usual);
    assert_proved(directory, "first", &first);
    assert_eq!(built(&tree, directory, "again", &usual), first, "into another empty store");

    // A store with some pieces of it, in two packs.
    for (number, from, to) in [(0, 0, 100_000), (1, 200_000, 3 << 20)] {
        let part = bench.path(&format!("part-{number}"));
        fs::create_dir(&part).expect("a directory");
        fs::write(part.join("x"), &bytes(10, 5 << 20)[from / 65_536 * 65_536..to]).expect("a file");
        built(&part, directory, "mixed", &usual);
    }
    let mixed = built(&tree, directory, "mixed", &usual);
    assert!(mixed.packs.len() > 1 && mixed.digest != first.digest, "it takes pieces from other packs");
    assert_eq!(mixed.tree, first.tree);
    assert_proved(directory, "mixed", &mixed);

    let mut order = Trace::default();
    assert!(order.add(b"/file-70000") && order.add(b"/file-4097"));
    let ways = [
        ("threads", BuildOptions { threads: 5, ..usual.clone() }),
        ("verity", BuildOptions { verity: true, ..usual.clone() }),
        ("order", BuildOptions { order: Some(order), ..usual.clone() }),
    ];
    for (name, options) in ways {
        let other = built(&tree, directory, name, &options);
        assert_eq!(other.tree, first.tree, "{name}");
        assert_eq!(name == "threads", other.digest == first.digest, "{name}");
        assert_proved(directory, name, &other);
    }
}

/// tar(1) decides what is in the tree.
#[test]
fn an_archive_of_a_tree_has_the_digest_of_the_tree() {
    let bench = Bench::new();
    let tree = bench.tree();
    // As in archives, which have no holes and no attributes unless that is asked for.
    fs::create_dir(tree.join("dir")).expect("a directory");
    fs::write(tree.join("dir/large"), bytes(1, 200_000)).expect("a file");
    fs::write(tree.join("small"), "small").expect("a file");
    fs::hard_link(tree.join("small"), tree.join("dir/other")).expect("a link");
    symlink("dir/large", tree.join("link")).expect("a link");
    let directory = bench.directory.path();
    let archive = bench.path("tree.tar");
    let mut tar = Command::new("tar");
    tar.args(["--format=posix", "--pax-option=delete=atime,delete=ctime", "--numeric-owner", "-cf"]);
    let status = tar.arg(&archive).arg("-C").arg(&tree).arg(".").status().expect("tar is there");
    assert!(status.success());
    let of_tree = built(&tree, directory, "directory", &BuildOptions::default());
    let of_archive = built(&archive, directory, "archive", &BuildOptions::default());
    assert_eq!(of_archive.tree, of_tree.tree);
}

#[test]
fn each_difference_changes_the_tree_digest() {
    let bench = Bench::new();
    let (tree, directory) = (bench.tree(), bench.directory.path());
    let make = |tree: &Path| {
        let _ = fs::remove_dir_all(tree);
        fs::create_dir_all(tree.join("dir/below")).expect("directories");
        fs::write(tree.join("large"), bytes(1, 200_000)).expect("a file");
        fs::write(tree.join("small"), "small").expect("a file");
        fs::write(tree.join("same"), "small").expect("a file");
        fs::write(tree.join("empty"), "").expect("a file");
        symlink("large", tree.join("link")).expect("a link");
        for name in ["dir/below", "dir", "large", "small", "same", "empty", "link", "."] {
            set_time(&tree.join(name), 1000, 5);
        }
    };
    type Change = fn(&Path);
    let changes: [(&str, Change); 12] = [
        ("a byte of a large file", |tree| {
            let file = File::options().write(true).open(tree.join("large")).expect("a file");
            file.write_all_at(b"x", 100_000).expect("room");
        }),
        ("a byte of a small file", |tree| fs::write(tree.join("small"), "smaLl").expect("a file")),
        ("a length", |tree| {
            File::options()
                .write(true)
                .open(tree.join("large"))
                .and_then(|file| file.set_len(199_999))
                .expect("a file");
        }),
        ("permissions", |tree| {
            fs::set_permissions(tree.join("small"), fs::Permissions::from_mode(0o600)).expect("modes");
        }),
        ("permissions of the root", |tree| {
            fs::set_permissions(tree, fs::Permissions::from_mode(0o700)).expect("modes");
        }),
        ("a second", |tree| set_time(&tree.join("small"), 1001, 5)),
        ("a nanosecond", |tree| set_time(&tree.join("small"), 1000, 6)),
        ("a name", |tree| fs::rename(tree.join("same"), tree.join("samf")).expect("it is there")),
        ("a directory", |tree| fs::rename(tree.join("same"), tree.join("dir/same")).expect("it is there")),
        ("a hard link in the place of a copy", |tree| {
            fs::remove_file(tree.join("same")).expect("it is there");
            fs::hard_link(tree.join("small"), tree.join("same")).expect("a link");
        }),
        ("a target", |tree| {
            fs::remove_file(tree.join("link")).expect("it is there");
            symlink("small", tree.join("link")).expect("a link");
        }),
        ("a link's bytes as a file's", |tree| {
            fs::remove_file(tree.join("link")).expect("it is there");
            fs::write(tree.join("link"), "large").expect("a file");
        }),
    ];
    make(&tree);
    let mut met = vec![("nothing", built(&tree, directory, "image", &BuildOptions::default()).tree)];
    make(&tree);
    assert_eq!(built(&tree, directory, "image", &BuildOptions::default()).tree, met[0].1, "the same once more");
    for (what, change) in changes {
        make(&tree);
        change(&tree);
        // Only what was changed is another.
        for name in ["dir", "large", "same", "dir/same", "link", "."] {
            if tree.join(name).symlink_metadata().is_ok() {
                set_time(&tree.join(name), 1000, 5);
            }
        }
        if tree.join("small").metadata().expect("it is there").mtime() > 1001 {
            set_time(&tree.join("small"), 1000, 5);
        }
        let built = built(&tree, directory, "image", &BuildOptions::default());
        assert_proved(directory, "image", &built);
        if let Some((other, _)) = met.iter().find(|(_, tree)| *tree == built.tree) {
            panic!("{what} gives the digest of {other}");
        }
        met.push((what, built.tree));
    }
}

#[test]
fn an_image_with_a_wrong_tree_digest_is_refused_by_all_users_of_packs() {
    let bench = Bench::new();
    fill(&bench.tree());
    let built = bench.build("image");
    let (path, store) = (bench.path("image"), bench.store());
    let other = Digest::new(Algorithm::Tree, [7; 32]);
    let refused = |error: Error| {
        let said = matches!(error, Error::OtherDigest { .. }) && error.to_string().contains(&other.to_string());
        assert!(said, "{error}");
    };
    refused(Image::open(&path, Some(other)).expect_err("another tree was asked for"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("modes");
    let file = File::options().write(true).open(&path).expect("a file");
    file.write_all_at(other.bytes(), TREE_OFFSET).expect("room");
    // It is sound, and says that it is the other tree.
    let image = Image::open(&path, Some(other)).expect("only its packs can tell");
    assert_eq!((check(&image).findings, image.tree()), (Vec::new(), Some(other)));
    refused(image.verify_tree(&store).expect_err("it lies"));
    refused(Objects::open(&image, &store).expect_err("it lies"));
    refused(Source::open(&path, &store, Some(other)).expect_err("it lies"));
    // By its own digest it is what it is, and its word for the tree is looked at by who wants to know.
    let image = Image::open(&path, None).expect("it is an image");
    refused(Objects::open(&image, &store).expect("nobody asked").verify_tree(&image).expect_err("it lies"));
    // An earlier image has no tree digest, and is proved nevertheless.
    file.write_all_at(&[0; 32], TREE_OFFSET).expect("room");
    let image = Image::open(&path, None).expect("it is an image");
    assert_eq!((image.tree(), image.shown_digest()), (None, image.digest()));
    Source::open(&path, &store, Some(built.tree)).expect("it is that tree");
    refused(Source::open(&path, &store, Some(other)).expect_err("it is another tree"));
}

/// What two readers would read differently proves nothing.
#[test]
fn a_damaged_image_proves_no_tree() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 100_000)).expect("a file");
    let built = bench.build("image");
    let path = bench.path("image");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("modes");
    let file = File::options().read(true).write(true).open(&path).expect("a file");
    // A feature that makes Linux look at filters of attributes before it looks at them (EROFS_FEATURE_COMPAT_XATTR_FILTER).
    let mut features = [0; 4];
    file.read_exact_at(&mut features, 1024 + 8).expect("a superblock");
    features[0] |= 4;
    file.write_all_at(&features, 1024 + 8).expect("room");
    let error = Source::open(&path, &bench.store(), Some(built.tree)).expect_err("it is damaged");
    assert!(matches!(error, Error::Unsound { .. }), "{error}");
}

#[test]
fn the_digest_of_a_composefs_image_is_that_of_its_tree() {
    let bench = Bench::new();
    fill(&bench.tree());
    let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
    let built = built(&bench.tree(), bench.directory.path(), "image", &options);
    assert_eq!((built.tree, built.tree.algorithm()), (built.digest, Algorithm::Verity));
    assert_proved(bench.directory.path(), "image", &built);
}
