//! Images whose files are in the order in which a workload wants them.

use crate::common;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Bench, bytes};
use ferry_image::{BuildOptions, BuildReport, Data, Image, PackRef, Source, Store, Trace, build};
use serde_json::json;
use sha2::{Digest as _, Sha256};

fn with_order(bench: &Bench, image: &str, paths: &[&str]) -> ferry_image::Result<BuildReport> {
    with_order_of(bench, &bench.tree(), image, paths)
}

/// The same of another source than the tree itself.
fn with_order_of(bench: &Bench, source: &Path, image: &str, paths: &[&str]) -> ferry_image::Result<BuildReport> {
    let mut order = Trace::default();
    paths.iter().for_each(|path| {
        order.add(path.as_bytes());
    });
    let options = BuildOptions { threads: 2, order: Some(order), ..BuildOptions::default() };
    build(source, &bench.path(image), Store::create(&bench.store())?, &options, &|_, _| {})
}

/// The tree as an archive.
fn archive(bench: &Bench) -> PathBuf {
    let path = bench.path("tree.tar");
    let made = Command::new("tar").arg("-cf").arg(&path).arg("-C").arg(bench.tree()).arg(".").status();
    assert!(made.expect("there is tar").success());
    path
}

/// An archive as the only layer of an image directory.
fn image_directory(bench: &Bench, archive: &Path) -> PathBuf {
    let blobs = bench.path("oci/blobs/sha256");
    fs::create_dir_all(&blobs).expect("directories can be made");
    let blob = |bytes: &[u8], kind: &str| {
        let hash: [u8; 32] = Sha256::digest(bytes).into();
        let name = ferry_image::hex(&hash);
        fs::write(blobs.join(&name), bytes).expect("files can be made");
        let kind = format!("application/vnd.oci.image.{kind}");
        json!({"mediaType": kind, "digest": format!("sha256:{name}"), "size": bytes.len()})
    };
    let layer = blob(&fs::read(archive).expect("it was made"), "layer.v1.tar");
    let rootfs = json!({"type": "layers", "diff_ids": [layer["digest"]]});
    let config = json!({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs});
    let config = blob(config.to_string().as_bytes(), "config.v1+json");
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": [layer]});
    let index = json!({"schemaVersion": 2, "manifests": [blob(manifest.to_string().as_bytes(), "manifest.v1+json")]});
    fs::write(bench.path("oci/index.json"), index.to_string()).expect("files can be made");
    fs::write(bench.path("oci/oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("files can be made");
    format!("oci:{}", bench.path("oci").display()).into()
}

/// Twenty files of a few blocks, one that is kept with its inode, and a link.
fn tree(bench: &Bench) {
    fs::create_dir(bench.tree().join("dir")).expect("directories can be made");
    for number in 0..20 {
        let name = if number % 2 == 0 { format!("dir/{number}") } else { number.to_string() };
        fs::write(bench.tree().join(name), bytes(number, 5000 + number * 100)).expect("files can be made");
    }
    fs::write(bench.tree().join("tiny"), "x").expect("files can be made");
    std::os::unix::fs::symlink("7", bench.tree().join("link")).expect("links can be made");
}

fn ahead(image: &Image) -> Option<PackRef> {
    image.packs().iter().copied().find(|pack| pack.ahead)
}

/// Where a file's bytes are: whether in the pack that is read ahead, and from which block on.
fn place(image: &Image, path: &str) -> (bool, u64) {
    let nid = path.split('/').fold(image.root(), |nid, name| {
        let dir = image.inode(nid).expect("it is there");
        let name = ferry_vfs::Name::new(name.as_bytes()).expect("a name");
        image.lookup(&dir, name).expect("the image is sound").expect("it is there")
    });
    match image.data(&image.inode(nid).expect("it is there")).expect("the image is sound") {
        Data::Far { pack, block } => (image.packs()[pack].ahead, block),
        other => panic!("{other:?}"),
    }
}

fn reads_back(bench: &Bench, name: &str) {
    let source = Source::open(&bench.path(name), &bench.store(), None).expect("it was built");
    assert_eq!(ferry_image::check(source.image()).findings, Vec::<String>::new());
    let mut left = vec![(source.image().root(), bench.tree())];
    let mut files = 0;
    while let Some((nid, path)) = left.pop() {
        let inode = source.image().inode(nid).expect("it is there");
        if inode.kind() == ferry_vfs::FileType::Directory {
            for entry in source.image().entries(&inode, 0).expect("it can be listed") {
                let entry = entry.expect("a name");
                if !matches!(entry.name, b"." | b"..") {
                    left.push((entry.nid, path.join(std::str::from_utf8(entry.name).expect("text"))));
                }
            }
        } else if inode.kind() == ferry_vfs::FileType::RegularFile {
            let mut read = vec![0; 10_000];
            let count = source.read_at(nid, 0, &mut read).expect("it can be read");
            assert!(read[..count] == fs::read(&path).expect("files can be read"), "{}", path.display());
            files += 1;
        }
    }
    assert_eq!(files, 21);
}

#[test]
fn files_of_a_trace_get_their_own_pack_in_order() {
    let bench = Bench::new();
    tree(&bench);
    bench.build("plain");
    assert_eq!(ahead(&Image::open(&bench.path("plain"), None).expect("it was built")), None);
    // What is not there, is no file with bytes in the store, or was named before, is left out.
    let order = ["/dir/8", "/none", "/3", "/dir", "/tiny", "/link", "/dir/8", "/dir/0", "/dir/8/below", "/19"];
    let built = with_order(&bench, "ordered", &order).expect("it can be built");
    let image = Image::open(&bench.path("ordered"), None).expect("it was built");
    let pack = ahead(&image).expect("there is one");
    // Files of 5800, 5300, 5000 and 6900 bytes.
    assert_eq!((pack.blocks, built.packs.len()), (8, 2));
    let first = ["dir/8", "3", "dir/0", "19"].map(|path| place(&image, path));
    assert_eq!(first, [(true, 0), (true, 2), (true, 4), (true, 6)]);
    assert!(!place(&image, "5").0);
    reads_back(&bench, "ordered");
    // Nothing but the order counts, and what was there before is used.
    let again = with_order(&bench, "again", &order).expect("it can be built");
    assert_eq!((again.digest, again.new_bytes), (built.digest, 0));
    let other = with_order(&bench, "other", &["/19", "/3"]).expect("it can be built");
    assert_ne!(other.digest, built.digest);
    assert_eq!(place(&Image::open(&bench.path("other"), None).expect("it was built"), "3"), (true, 2));
    reads_back(&bench, "other");
    let nothing = with_order(&bench, "nothing", &["/none"]).expect("it can be built");
    assert_eq!(ahead(&Image::open(&bench.path("nothing"), None).expect("it was built")), None);
    assert_eq!(nothing.data_bytes, built.data_bytes);
}

#[test]
fn files_of_archives_and_layers_are_put_first_as_well() {
    let bench = Bench::new();
    tree(&bench);
    let archive = archive(&bench);
    let layered = image_directory(&bench, &archive);
    let paths = ["/3", "/dir/4", "/none", "/19"];
    with_order(&bench, "directory", &paths).expect("it can be built");
    let expected = Image::open(&bench.path("directory"), None).expect("it was built");
    for (name, source) in [("archive", archive), ("layers", layered)] {
        with_order_of(&bench, &source, name, &paths).unwrap_or_else(|error| panic!("{name}: {error}"));
        let image = Image::open(&bench.path(name), None).expect("it was built");
        let blocks = [("3", 0), ("dir/4", 2), ("19", 4)];
        assert!(blocks.iter().all(|(path, block)| place(&image, path) == (true, *block)), "{name}");
        assert!(!place(&image, "5").0, "{name}");
        // The same objects in the same order are the same pack.
        assert_eq!(ahead(&image).map(|pack| pack.name), ahead(&expected).map(|pack| pack.name), "{name}");
        reads_back(&bench, name);
    }
}

/// The same bytes twice are wanted once, and a fresh store gets both packs.
#[test]
fn twins_are_wanted_once() {
    let bench = Bench::new();
    tree(&bench);
    fs::write(bench.tree().join("4"), bytes(3, 5300)).expect("files can be made");
    fs::remove_file(bench.tree().join("dir/0")).expect("files can be removed");
    let built = with_order(&bench, "image", &["/3", "/4", "/5"]).expect("it can be built");
    let image = Image::open(&bench.path("image"), None).expect("it was built");
    assert_eq!((place(&image, "3"), place(&image, "4"), place(&image, "5")), ((true, 0), (true, 0), (true, 2)));
    assert_eq!((ahead(&image).expect("there is one").blocks, built.packs.len()), (4, 2));
    reads_back(&bench, "image");
}

#[test]
fn a_damaged_object_is_not_put_first() {
    let bench = Bench::new();
    tree(&bench);
    bench.build("plain");
    let packs =
        fs::read_dir(bench.store().join("packs")).expect("it is there").map(|entry| entry.expect("a name").path());
    let pack = packs.into_iter().find(|path| path.extension().is_none()).expect("there is one");
    fs::set_permissions(&pack, fs::Permissions::from_mode(0o644)).expect("modes can be set");
    let file = fs::File::options().write(true).open(&pack).expect("packs can be opened");
    let block = place(&Image::open(&bench.path("plain"), None).expect("it was built"), "3").1;
    file.write_all_at(b"xxxx", block * 4096 + 10).expect("packs can be written");
    let error = with_order(&bench, "ordered", &["/5", "/3"]).expect_err("it is damaged");
    assert!(error.to_string().contains("in it is damaged"), "{error}");
    assert!(!bench.path("ordered").exists());
    with_order(&bench, "ordered", &["/5"]).expect("this one is sound");
}
