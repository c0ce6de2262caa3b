//! Images of OCI image directories: of those that umoci makes, of those that are laid out by hand as the specification says, and of
//! hostile ones.

use crate::archives;
use crate::common;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use archives::bundle::{Bundle, DIR, FILE, Item, LINK, Packing, SYMLINK, TIME, archive, digest, gzip};
use common::{Bench, bytes, set_time};
use ferry_image::{BuildOptions, BuildReport, Image, Layout, Source, Store, build};
use serde_json::json;

const COMPOSEFS: Layout = Layout::Composefs { version: None };

fn try_build(bench: &Bench, source: &str, layout: Layout, platform: Option<&str>) -> ferry_image::Result<BuildReport> {
    let platform = platform.map(Into::into);
    let options = BuildOptions { threads: 2, layout, platform, ..BuildOptions::default() };
    build(Path::new(source), &bench.path("image"), Store::create(&bench.store())?, &options, &|_, _| {})
}

fn built(bench: &Bench, source: &str, layout: Layout) -> Vec<u8> {
    try_build(bench, source, layout, None).unwrap_or_else(|error| panic!("{source}: {}", chain(&error)));
    fs::read(bench.path("image")).expect("it was built")
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut at = error.source();
    while let Some(source) = at {
        let _ = write!(text, ": {source}");
        at = source.source();
    }
    text
}

/// Three layers with everything that the specification says of changes, with what umoci 0.6 does in its own way or without.
fn layered(bench: &Bench, all: bool) -> Bundle {
    let mut bundle = Bundle::new(bench, "bundle");
    let large: Vec<Vec<u8>> = (0..8).map(|number| bytes(number, 9000)).collect();
    bundle.layer(
        &archive(&[
            ("./", DIR, "", b""),
            ("a", FILE, "", &large[0]),
            ("b", FILE, "", &large[1]),
            ("dir/", DIR, "", b""),
            ("dir/x", FILE, "", b"x"),
            ("dir/y", FILE, "", &large[2]),
            ("dir/sub/", DIR, "", b""),
            ("dir/sub/p", FILE, "", b"p"),
            ("dir/sub/q", FILE, "", b"q"),
            ("opaque/", DIR, "", b""),
            ("opaque/1", FILE, "", &large[3]),
            ("opaque/below/", DIR, "", b""),
            ("opaque/below/2", FILE, "", b"2"),
            ("becomes-dir", FILE, "", b"file"),
            ("becomes-file/", DIR, "", b""),
            ("becomes-file/inner", FILE, "", b"inner"),
            ("link", SYMLINK, "a", b""),
            ("kept", FILE, "", &large[4]),
            ("all/", DIR, "", b""),
            ("all/lower", FILE, "", b"lower"),
            ("all/deep/", DIR, "", b""),
            ("all/deep/lower", FILE, "", b"lower"),
        ]),
        Packing::Gzip,
    );
    bundle.layer(
        &archive(&[
            (".wh.a", FILE, "", b""),
            ("b", FILE, "", &large[5]),
            ("dir/", DIR, "", b""),
            ("dir/.wh.x", FILE, "", b""),
            ("dir/sub/.wh.p", FILE, "", b""),
            ("opaque/", DIR, "", b""),
            ("opaque/3", FILE, "", b"3"),
            // It hides nothing of its own layer, wherever it stands.
            ("opaque/.wh..wh..opq", FILE, "", b""),
            ("opaque/4", FILE, "", b"4"),
            ("becomes-dir/", DIR, "", b""),
            ("becomes-dir/inner", FILE, "", b"new"),
            ("becomes-file", FILE, "", b"now a file"),
            ("link", FILE, "", b"no link any more"),
            ("all/", DIR, "", b""),
            ("all/deep/", DIR, "", b""),
            ("all/deep/upper", FILE, "", b"upper"),
        ]),
        Packing::Zstd,
    );
    if all {
        bundle.layer(
            &archive(&[
                (".wh..wh.plnk", DIR, "", b""),
                (".wh..wh.plnk/12.34", FILE, "", b"of aufs"),
                ("all/", DIR, "", b""),
                ("all/deep/", DIR, "", b""),
                // What is of this layer stays.
                ("all/deep/topmost", FILE, "", b"topmost"),
                (".wh.all", FILE, "", b""),
            ]),
            Packing::Zstd,
        );
    }
    bundle.layer(
        &archive(&[
            (".wh.never-there", FILE, "", b""),
            ("no/.wh.such", FILE, "", b""),
            (".wh.becomes-file", FILE, "", b""),
            ("late", FILE, "", &large[6]),
        ]),
        Packing::Plain,
    );
    bundle.finish("latest");
    // What is to come of it.
    let tree = bench.tree();
    for dir in ["dir/sub", "opaque", "becomes-dir", "all/deep"] {
        fs::create_dir_all(tree.join(dir)).expect("directories can be made");
    }
    for (name, data) in [
        ("b", &large[5][..]),
        ("dir/y", &large[2]),
        ("dir/sub/q", b"q"),
        ("opaque/3", b"3"),
        ("opaque/4", b"4"),
        ("becomes-dir/inner", b"new"),
        ("link", b"no link any more"),
        ("kept", &large[4]),
        ("all/deep/topmost", b"topmost"),
        ("late", &large[6]),
    ] {
        fs::write(tree.join(name), data).expect("files can be made");
    }
    let mut left = vec![tree.clone()];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(fs::read_dir(&path).expect("it can be listed").map(|entry| entry.expect("a name").path()));
        }
        set_time(&path, TIME, 0);
    }
    bundle
}

#[test]
fn layers_are_applied_as_the_specification_says() {
    let bench = Bench::new();
    let bundle = layered(&bench, true);
    let tree = bench.tree();
    let of_tree = built(&bench, tree.to_str().expect("text"), COMPOSEFS);
    assert!(built(&bench, &bundle.source("latest"), COMPOSEFS) == of_tree);
    assert!(built(&bench, &format!("oci:{}", bundle.directory.display()), COMPOSEFS) == of_tree);
    // Nothing that an upper layer removes or replaces is stored.
    let found = try_build(&bench, &bundle.source("latest"), Layout::Flat, None).expect("it can be built");
    assert_eq!((found.data_bytes, found.new_bytes, found.inodes), (36_000, 36_000, 17));
    let again = try_build(&bench, tree.to_str().expect("text"), Layout::Flat, None).expect("it can be built");
    assert_eq!((again.digest, again.new_bytes), (found.digest, 0));
}

/// Hard links: within a layer, to a lower layer's file, and of a file whose first name is removed.
#[test]
fn hard_links_span_layers() {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    let data = bytes(1, 9000);
    let first = [("one", FILE, "", &data[..]), ("two", LINK, "one", b""), ("three", LINK, "./one", b"")];
    bundle.layer(&archive(&first), Packing::Gzip);
    bundle.layer(&archive(&[("four", LINK, "/two", b""), (".wh.one", FILE, "", b"")]), Packing::Gzip);
    // AUFS's own names last as long as their layer.
    let of_aufs = [(".wh..wh.plnk/1.2", FILE, "", &data[..]), ("five", LINK, ".wh..wh.plnk/1.2", b"")];
    bundle.layer(&archive(&of_aufs), Packing::Gzip);
    bundle.finish("latest");
    for layout in [Layout::Flat, COMPOSEFS] {
        built(&bench, &bundle.source("latest"), layout);
        let source = Source::open(&bench.path("image"), &bench.store(), None).expect("it was built");
        let image = source.image();
        assert_eq!(ferry_image::check(image).findings, Vec::<String>::new());
        let root = image.inode(image.root()).expect("it is there");
        let find = |name: &[u8]| image.lookup(&root, ferry_vfs::Name::new(name).expect("a name")).expect("it is whole");
        let nid = find(b"two").expect("it is there");
        assert_eq!((find(b"one"), find(b"three"), find(b"four")), (None, Some(nid), Some(nid)));
        assert_eq!(image.inode(nid).expect("it is there").nlink, 3);
        let five = find(b"five").expect("it is there");
        assert_eq!((find(b".wh..wh.plnk"), image.inode(five).expect("it is there").nlink), (None, 1));
        let mut read = vec![0; 10_000];
        assert_eq!(source.read_at(nid, 0, &mut read), Ok(9000));
        assert!(read[..9000] == data);
    }
}

/// What `ferry-registry` pulls is built.
#[test]
fn a_configuration_of_more_than_4_mib_is_read() {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    bundle.layer(&archive(&[("a", FILE, "", b"some")]), Packing::Plain);
    let config = json!({"rootfs": {"type": "layers", "diff_ids": bundle.plain}, "more": "x".repeat(5 << 20)});
    let config = bundle.blob(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": bundle.layers});
    let manifest = bundle.blob(manifest.to_string().as_bytes(), "application/vnd.oci.image.manifest.v1+json");
    bundle.index(&[manifest]);
    built(&bench, &format!("oci:{}", bundle.directory.display()), Layout::Flat);
}

/// What is in an image, a line for each name.
fn lines(image: Vec<u8>) -> BTreeSet<String> {
    let image = Image::from_bytes(image).expect("it is one");
    let text = String::from_utf8(common::composefs::dump_of(&image)).expect("names here are text");
    text.lines().map(str::to_owned).collect()
}

/// Another program's idea of the same layers, and layers that it makes.
#[test]
fn umoci_unpacks_the_same_tree() {
    let program = ferry_guest::Cache::from_env().and_then(|cache| cache.umoci()).expect("umoci can be fetched");
    let umoci = |bench: &Bench, words: &[&str]| {
        let output = Command::new(&program).args(words).current_dir(bench.directory.path()).output();
        let output = output.expect("umoci starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let same = |bench: &Bench, image: &str| {
        umoci(bench, &["unpack", "--image", &format!("bundle:{image}"), "unpacked"]);
        let of_image = built(bench, &format!("oci:{}:{image}", bench.path("bundle").display()), COMPOSEFS);
        let tree = bench.path("unpacked/rootfs");
        let of_image = lines(of_image);
        let of_tree = lines(built(bench, tree.to_str().expect("text"), COMPOSEFS));
        let others: Vec<_> = of_image.symmetric_difference(&of_tree).collect();
        assert!(others.is_empty(), "{image}: {others:#?}");
        fs::remove_dir_all(bench.path("unpacked")).expect("it can be removed");
    };
    let bench = Bench::new();
    layered(&bench, false);
    same(&bench, "latest");

    let bench = Bench::new();
    umoci(&bench, &["init", "--layout", "bundle"]);
    umoci(&bench, &["new", "--image", "bundle:made"]);
    umoci(&bench, &["unpack", "--image", "bundle:made", "work"]);
    let root = bench.path("work/rootfs");
    for number in 0..20 {
        let directory = root.join(format!("dir-{}", number % 3));
        fs::create_dir_all(&directory).expect("directories can be made");
        fs::write(directory.join(format!("file-{number}")), bytes(number, number * 700)).expect("files can be made");
    }
    std::os::unix::fs::symlink("dir-1/file-1", root.join("link")).expect("links can be made");
    umoci(&bench, &["repack", "--refresh-bundle", "--image", "bundle:made", "work"]);
    fs::remove_dir_all(root.join("dir-2")).expect("directories can be removed");
    fs::remove_file(root.join("dir-0/file-3")).expect("files can be removed");
    fs::write(root.join("dir-1/file-4"), "another").expect("files can be written");
    fs::remove_file(root.join("link")).expect("files can be removed");
    fs::create_dir(root.join("link")).expect("directories can be made");
    fs::write(root.join("link/file"), "in a directory").expect("files can be made");
    umoci(&bench, &["repack", "--image", "bundle:made", "work"]);
    same(&bench, "made");
}

#[test]
fn an_image_is_chosen_by_tag_and_platform() {
    let bench = Bench::new();
    let mut manifests = Vec::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    for architecture in ["amd64", "arm64"] {
        (bundle.layers, bundle.plain) = (Vec::new(), Vec::new());
        bundle.layer(&archive(&[(architecture, FILE, "", b"x")]), Packing::Gzip);
        let mut manifest = bundle.manifest();
        manifest["platform"] = json!({"os": "linux", "architecture": architecture});
        manifests.push(manifest);
    }
    let kind = "application/vnd.oci.image.index.v1+json";
    let inner = json!({"schemaVersion": 2, "mediaType": kind, "manifests": manifests}).to_string();
    let mut named = bundle.blob(inner.as_bytes(), kind);
    named["annotations"] = json!({"org.opencontainers.image.ref.name": "both"});
    let mut single = manifests[1].clone();
    single["annotations"] = json!({"org.opencontainers.image.ref.name": "one"});
    bundle.index(&[named, single]);
    let has = |tag: &str, platform: Option<&str>, name: &[u8]| {
        try_build(&bench, &bundle.source(tag), Layout::Flat, platform).unwrap_or_else(|error| panic!("{error}"));
        let image = Image::open(&bench.path("image"), None).expect("it was built");
        let root = image.inode(image.root()).expect("it is there");
        assert!(image.lookup(&root, ferry_vfs::Name::new(name).expect("a name")).expect("it is whole").is_some());
    };
    has("both", Some("linux/amd64"), b"amd64");
    has("both", Some("linux/arm64"), b"arm64");
    // The only one of its tag is what was asked for.
    has("one", Some("linux/amd64"), b"arm64");
    let said = |source: String, platform| {
        chain(&try_build(&bench, &source, Layout::Flat, Some(platform)).expect_err("it is not there"))
    };
    assert!(said(bundle.source("both"), "linux/riscv64").ends_with("it has no image for linux/riscv64"));
    assert!(
        said(bundle.source("none"), "linux/amd64")
            .contains("no image has the tag \"none\"; there are \"both\", \"one\"")
    );
    let untagged = said(format!("oci:{}", bundle.directory.display()), "linux/arm64");
    assert!(untagged.contains("several images for linux/arm64: name one by its tag"), "{untagged}");
}

/// Without a requested variant, the image without one is used.
#[test]
fn an_image_without_a_variant_is_preferred() {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    let mut manifest = |platform: &str| {
        (bundle.layers, bundle.plain) = (Vec::new(), Vec::new());
        bundle.layer(&archive(&[(&platform.replace('/', "-"), FILE, "", b"x")]), Packing::Gzip);
        let mut manifest = bundle.manifest();
        let parts: Vec<_> = platform.split('/').collect();
        manifest["platform"] = json!({"os": "linux", "architecture": parts[0]});
        if let Some(variant) = parts.get(1) {
            manifest["platform"]["variant"] = json!(variant);
        }
        manifest
    };
    let all = ["amd64/v3", "amd64", "amd64/v2", "arm64/v8", "arm64/v9", "arm/v6", "arm/v7", "riscv64/v1"];
    let manifests = all.map(&mut manifest);
    bundle.index(&manifests);
    let source = format!("oci:{}", bundle.directory.display());
    for (wanted, found) in [
        ("linux/amd64", "amd64"),
        ("linux/amd64/v1", "amd64"),
        ("linux/amd64/v3", "amd64-v3"),
        ("linux/arm64", "arm64-v8"),
        ("linux/arm64/v8", "arm64-v8"),
        ("linux/arm64/v9", "arm64-v9"),
        ("linux/arm/v6", "arm-v6"),
        ("linux/riscv64", "riscv64-v1"),
    ] {
        try_build(&bench, &source, Layout::Flat, Some(wanted)).unwrap_or_else(|error| panic!("{wanted}: {error}"));
        let image = Image::open(&bench.path("image"), None).expect("it was built");
        let root = image.inode(image.root()).expect("it is there");
        let name = ferry_vfs::Name::new(found.as_bytes()).expect("a name");
        assert!(image.lookup(&root, name).expect("it is whole").is_some(), "{wanted}");
    }
    for (wanted, said) in [
        ("linux/arm", "it has images for the variants v6, v7 of linux/arm: name one of them"),
        ("linux/amd64/v4", "it has no image for linux/amd64/v4"),
    ] {
        let error = chain(&try_build(&bench, &source, Layout::Flat, Some(wanted)).expect_err("there is none"));
        assert!(error.contains(said), "{error}");
    }
}

fn make_fifo(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("FIFOs can be made");
}

/// A member of an archive of GNU tar: a file that is nothing but a hole of so many bytes.
fn hole(name: &str, bytes: u64) -> [u8; 512] {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[124..136].copy_from_slice(b"00000000000\0");
    header[148..156].copy_from_slice(b"        ");
    header[156] = b'S';
    header[257..265].copy_from_slice(b"ustar  \0");
    header[483] = 0x80;
    header[487..495].copy_from_slice(&bytes.to_be_bytes());
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// What is done to a bundle, and what is said of it then.
type Case = (&'static str, fn(&mut Bundle));

#[test]
fn hostile_directories_are_refused() {
    let with = |members: &'static [Item<'static>]| {
        move |bundle: &mut Bundle| {
            bundle.layer(&archive(members), Packing::Gzip);
            bundle.finish("latest");
        }
    };
    let members: [(&str, &'static [Item<'static>]); 12] = [
        ("its name has .. in it", &[("../outside", FILE, "", b"x")]),
        ("its name has .. in it", &[("dir/../../outside", FILE, "", b"x")]),
        ("a hard link: its name has .. in it", &[("link", LINK, "../../etc/passwd", b"")]),
        ("a hard link to /etc/passwd, which is not in the archive before it", &[("link", LINK, "/etc/passwd", b"")]),
        ("a hard link to a directory", &[("other", LINK, "dir", b"")]),
        ("which is not in the archive before it", &[(".wh.file", FILE, "", b""), ("other", LINK, "file", b"")]),
        ("a hard link to itself", &[("file", LINK, "file", b"")]),
        ("a whiteout of no name", &[(".wh.", FILE, "", b"")]),
        ("a whiteout of no name", &[("dir/.wh...", FILE, "", b"")]),
        ("a path continues below a whiteout", &[(".wh.dir/file", FILE, "", b"x")]),
        ("its parent is not a directory", &[("file/inner", FILE, "", b"x")]),
        ("more than 255 symbolic links", &[("loop", SYMLINK, "./loop", b""), ("loop/x", FILE, "", b"x")]),
    ];
    for (reason, members) in members {
        refused(reason, with(members));
    }
    let cases: [Case; 16] = [
        ("No such file or directory", |bundle| {
            fs::remove_file(bundle.blob_path(bundle.layers[0]["digest"].as_str().expect("text"))).expect("it is there");
        }),
        ("it is damaged", |bundle| {
            let path = bundle.blob_path(bundle.layers[0]["digest"].as_str().expect("text"));
            let mut bytes = fs::read(&path).expect("it is there");
            // The time in gzip's header: what is packed stays the same.
            bytes[4] ^= 1;
            fs::write(path, bytes).expect("it can be written");
        }),
        ("it is damaged", |bundle| {
            let path = bundle.blob_path(bundle.layers[0]["digest"].as_str().expect("text"));
            let bytes = fs::read(&path).expect("it is there");
            fs::write(path, vec![0xff; bytes.len()]).expect("it can be written");
        }),
        (" bytes, not ", |bundle| {
            let path = bundle.blob_path(bundle.layers[0]["digest"].as_str().expect("text"));
            let file = File::options().append(true).open(path).expect("it is there");
            file.set_len(100).expect("it can be cut off");
        }),
        ("it is not a regular file", |bundle| {
            let path = bundle.blob_path(bundle.layers[0]["digest"].as_str().expect("text"));
            fs::remove_file(&path).expect("it is there");
            make_fifo(&path);
        }),
        ("it is not a regular file", |bundle| {
            let path = bundle.directory.join("oci-layout");
            fs::remove_file(&path).expect("it is there");
            make_fifo(&path);
        }),
        ("the files up to here have 1131723891496 bytes, more than 1099511627776", |bundle| {
            let members: Vec<u8> = (0..17).flat_map(|number| hole(&format!("hole{number}"), 62 << 30)).collect();
            bundle.layer(&members, Packing::Gzip);
            bundle.finish("latest");
        }),
        ("it is damaged", |bundle| {
            let manifest = bundle.manifest();
            let path = bundle.blob_path(manifest["digest"].as_str().expect("text"));
            let text = fs::read_to_string(&path).expect("it is there");
            fs::write(path, text.replace("schemaVersion", "schemaversion")).expect("it can be written");
        }),
        ("is not a supported digest", |bundle| {
            let mut manifest = bundle.manifest();
            manifest["digest"] = json!("sha256:../../../../../../etc/passwd");
            bundle.index(&[manifest]);
        }),
        ("is not a supported digest", |bundle| {
            bundle.layers[0]["digest"] = json!("sha512:00");
            bundle.finish("latest");
        }),
        ("it has 1 layers, and its configuration 2", |bundle| {
            bundle.plain.push(bundle.plain[0].clone());
            bundle.finish("latest");
        }),
        ("as the configuration says", |bundle| {
            bundle.plain[0] = digest(b"another");
            bundle.finish("latest");
        }),
        ("a layer of the kind \"application/vnd.oci.image.layer.v1.tar+gzip+encrypted\"", |bundle| {
            bundle.layers[0]["mediaType"] = json!("application/vnd.oci.image.layer.v1.tar+gzip+encrypted");
            bundle.finish("latest");
        }),
        ("the version \"2.0.0\" is not known here", |bundle| {
            let path = bundle.directory.join("oci-layout");
            fs::write(path, r#"{"imageLayoutVersion": "2.0.0"}"#).expect("files can be written");
        }),
        ("indexes name indexes", |bundle| {
            let mut named = bundle.manifest();
            for _ in 0..6 {
                let kind = "application/vnd.oci.image.index.v1+json";
                named = bundle.blob(json!({"manifests": [named]}).to_string().as_bytes(), kind);
            }
            bundle.index(&[named]);
        }),
        ("it is not what it should be", |bundle| {
            fs::write(bundle.directory.join("index.json"), vec![b'['; 100_000]).expect("files can be written");
        }),
    ];
    for (reason, change) in cases {
        refused(reason, change);
    }
}

/// Changes a bundle that is sound, and looks what is said of it, and that nothing of it is left in the store.
fn refused(reason: &str, change: impl Fn(&mut Bundle)) {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    let large = bytes(1, 9000);
    let lowest = [("dir/", DIR, "", &b""[..]), ("file", FILE, "", &large), ("symlink", SYMLINK, "dir", b"")];
    bundle.layer(&archive(&lowest), Packing::Gzip);
    bundle.finish("latest");
    change(&mut bundle);
    let error = try_build(&bench, &format!("oci:{}", bundle.directory.display()), Layout::Flat, None);
    let said = chain(&error.map(|_| ()).expect_err(reason));
    assert!(said.contains(reason), "{reason}: {said}");
    assert!(!bench.path("image").exists());
    let left = fs::read_dir(bench.store().join("packs")).expect("it is there").count();
    assert_eq!(left, 0, "{reason}");
}

#[test]
fn packed_archives_are_unpacked() {
    let bench = Bench::new();
    let large = bytes(1, 9000);
    let plain = archive(&[("dir/", DIR, "", b""), ("dir/file", FILE, "", &large)]);
    let packed = [
        ("plain.tar", plain.clone()),
        ("packed.tar.gz", gzip(&plain)),
        ("packed.tar.zst", zstd::encode_all(&plain[..], 3).expect("it can be packed")),
    ];
    let images = packed.map(|(name, bytes)| {
        fs::write(bench.path(name), bytes).expect("files can be made");
        built(&bench, bench.path(name).to_str().expect("text"), COMPOSEFS)
    });
    assert!(images[0] == images[1] && images[0] == images[2]);
    fs::write(bench.path("cut.tar.gz"), &gzip(&plain)[..100]).expect("files can be made");
    let source = bench.path("cut.tar.gz");
    try_build(&bench, source.to_str().expect("text"), COMPOSEFS, None).expect_err("it is cut off");
}
