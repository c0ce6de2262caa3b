//! Archives and layers give the trees that GNU tar and umoci make of them.

use crate::archives;
use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use archives::bundle::{Bundle, DIR, FILE, Item, LINK, Packing, SYMLINK, TIME, archive, gzip, member, packed};
use archives::model::{Model, Shown};
use archives::random::{Choices, Member, layers};
use common::composefs::Random;
use common::{Bench, Facts, bytes, facts, facts_of_image};
use ferry_image::{BuildOptions, Layout, Source, Store, build};

type Tree = BTreeMap<PathBuf, Facts>;

/// The tree of an image that is built of something.
fn built(bench: &Bench, source: &str) -> Result<Tree, String> {
    let options = BuildOptions { threads: 2, layout: Layout::Flat, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("a store can be made");
    build(Path::new(source), &bench.path("image"), store, &options, &|_, _| {})
        .map_err(|error| ferry_image::error_chain(&error))?;
    let source = Source::open(&bench.path("image"), &bench.store(), None).expect("it was built");
    assert_eq!(ferry_image::check(source.image()).findings, Vec::<String>::new());
    Ok(facts_of_image(&source))
}

fn of_bundle(bench: &Bench, bundle: &Bundle) -> Result<Tree, String> {
    built(bench, &bundle.source("latest"))
}

/// What umoci unpacks, or what it says.
fn unpacked(bench: &Bench, image: &str) -> Result<Tree, String> {
    let program = ferry_guest::Cache::from_env().and_then(|cache| cache.umoci()).expect("umoci can be fetched");
    let directory = bench.path("unpacked");
    // Directories that no layer names have the permissions that the mask leaves.
    let output = Command::new("sh")
        .args(["-c", "umask 022; exec \"$@\"", "sh"])
        .arg(program)
        .args(["unpack", "--image", image])
        .arg(&directory)
        .current_dir(bench.directory.path())
        .output()
        .expect("it starts");
    assert_eq!(output.status.signal(), None);
    let tree = if output.status.success() {
        Ok(facts(&directory.join("rootfs")))
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    if directory.exists() {
        fs::remove_dir_all(&directory).expect("it can be removed");
    }
    tree
}

/// What both trees say of directories' times is left out: umoci changes them when it adds to a directory that another layer has made.
fn timeless(mut tree: Tree) -> Tree {
    let dirs = tree.values_mut().filter(|facts| facts.mode & 0o170_000 == 0o040_000);
    dirs.for_each(|facts| facts.mtime = (0, 0));
    tree
}

fn assert_same(ours: &Tree, theirs: &Tree, what: &str) {
    let other =
        |a: &Tree, b: &Tree| a.iter().find(|(path, facts)| b.get(*path) != Some(facts)).map(|(path, _)| path.clone());
    if let Some(path) = other(ours, theirs).or_else(|| other(theirs, ours)) {
        panic!("{what}: {}: here {:?}, there {:?}", path.display(), ours.get(&path), theirs.get(&path));
    }
}

/// Layers, of which umoci and we make the same; what is looked for in it, with its contents.
fn same(what: &str, layers: &[&[Item<'_>]], expected: &[(&str, &str)]) {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    layers.iter().for_each(|members| bundle.layer(&archive(members), Packing::Gzip));
    bundle.finish("latest");
    let ours = timeless(of_bundle(&bench, &bundle).unwrap_or_else(|error| panic!("{what}: {error}")));
    let theirs = unpacked(&bench, "bundle:latest").unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_same(&ours, &timeless(theirs), what);
    for (path, content) in expected {
        let found =
            ours.get(Path::new(path)).unwrap_or_else(|| panic!("{what}: {path} is not there: {:?}", ours.keys()));
        let target = found.target.as_ref().map(|target| target.to_string_lossy().into_owned().into_bytes());
        assert_eq!(found.bytes.clone().or(target).unwrap_or_default(), content.as_bytes(), "{what}: {path}");
    }
}

/// `/lib` is a link to `usr/lib` in every distribution now, and packages have files in it.
#[test]
fn a_path_below_a_link_of_a_lower_layer_is_followed_within_the_root() {
    const ROOT: Item<'_> = ("./", DIR, "", b"");
    let merged: &[Item<'_>] = &[
        ROOT,
        ("usr/", DIR, "", b""),
        ("usr/lib/", DIR, "", b""),
        ("usr/lib/old", FILE, "", b"old"),
        ("usr/lib/gone", FILE, "", b"gone"),
        ("lib", SYMLINK, "usr/lib", b""),
        ("lib64", SYMLINK, "/usr/lib", b""),
        ("out", SYMLINK, "../../../../usr", b""),
        ("usr/up", SYMLINK, "../lib/.././lib", b""),
        ("nowhere", SYMLINK, "var/new/../deep", b""),
    ];
    same(
        "files",
        &[merged, &[("lib/x", FILE, "", b"x"), ("lib64/y", FILE, "", b"y"), ("lib/d/z", FILE, "", b"z")]],
        &[("lib", "usr/lib"), ("usr/lib/x", "x"), ("usr/lib/y", "y"), ("usr/lib/d/z", "z"), ("usr/lib/old", "old")],
    );
    same(
        "never out of the root",
        &[merged, &[("out/a", FILE, "", b"a"), ("usr/up/b", FILE, "", b"b"), ("out/lib/c", FILE, "", b"c")]],
        &[("usr/a", "a"), ("usr/lib/b", "b"), ("usr/lib/c", "c")],
    );
    same("directories that are not there", &[merged, &[("nowhere/a", FILE, "", b"a")]], &[("var/deep/a", "a")]);
    same(
        "hard links",
        &[merged, &[("a", LINK, "lib/old", b""), ("lib64/b", LINK, "out/lib/old", b""), ("c", LINK, "lib", b"")]],
        &[("a", "old"), ("usr/lib/b", "old"), ("c", "usr/lib")],
    );
    same(
        "whiteouts",
        &[merged, &[("lib/.wh.gone", FILE, "", b""), ("lib/gone/.wh.x", FILE, "", b"")]],
        &[("lib", "usr/lib")],
    );
    same(
        "opaque directories",
        &[merged, &[("lib64/.wh..wh..opq", FILE, "", b""), ("lib/a", FILE, "", b"a")]],
        &[("usr/lib/a", "a")],
    );
    same(
        "the link itself is replaced",
        &[merged, &[("lib/", DIR, "", b""), ("lib/x", FILE, "", b"x")]],
        &[("lib/x", "x"), ("usr/lib/old", "old")],
    );
    same(
        "the link itself is removed",
        &[merged, &[(".wh.lib", FILE, "", b"")], &[("lib/x", FILE, "", b"x")]],
        &[("lib/x", "x")],
    );
    // Links of the same layer, as GNU tar has it.
    same("one layer", &[&[ROOT, ("l", SYMLINK, "d", b""), ("l/x", FILE, "", b"x")]], &[("d/x", "x")]);
}

#[test]
fn the_last_of_members_with_one_name_is_taken() {
    const ROOT: Item<'_> = ("./", DIR, "", b"");
    let large = "large".repeat(2000);
    same(
        "files, directories and links become each other",
        &[&[
            ROOT,
            ("file", FILE, "", b"1"),
            ("file", FILE, "", large.as_bytes()),
            ("becomes-dir", FILE, "", b"1"),
            ("becomes-dir/", DIR, "", b""),
            ("becomes-dir/x", FILE, "", b"x"),
            ("becomes-file/", DIR, "", b""),
            ("becomes-file/d/e/f", FILE, "", b"f"),
            ("becomes-file", FILE, "", b"2"),
            ("becomes-link", FILE, "", b"1"),
            ("becomes-link", SYMLINK, "file", b""),
            ("was-link", SYMLINK, "becomes-dir", b""),
            ("was-link", FILE, "", b"3"),
            ("kept", FILE, "", b"kept"),
            ("other", LINK, "kept", b""),
            ("kept", FILE, "", b"another"),
            ("linked", FILE, "", b"1"),
            ("linked", LINK, "other", b""),
        ]],
        &[
            ("file", &large),
            ("becomes-dir/x", "x"),
            ("becomes-file", "2"),
            ("becomes-link", "file"),
            ("was-link", "3"),
            ("kept", "another"),
            ("other", "kept"),
            ("linked", "kept"),
        ],
    );
    same(
        "a layer replaces what it has put into a directory of the lower one",
        &[
            &[ROOT, ("d/", DIR, "", b""), ("d/low", FILE, "", b"1")],
            &[("d/high", FILE, "", b"2"), ("d", FILE, "", b"3"), ("d/", DIR, "", b""), ("d/last", FILE, "", b"4")],
        ],
        &[("d/last", "4")],
    );
}

/// What others had wrong.
#[test]
fn faults_of_other_readers_are_none_here() {
    const ROOT: Item<'_> = ("./", DIR, "", b"");
    same(
        "anchore/stereoscope#694: an opaque directory in the place of a link hides nothing of what the link led to",
        &[
            &[ROOT, ("target/", DIR, "", b""), ("target/keep", FILE, "", b"k"), ("link", SYMLINK, "/target", b"")],
            &[("link/", DIR, "", b""), ("link/.wh..wh..opq", FILE, "", b""), ("link/new", FILE, "", b"n")],
        ],
        &[("target/keep", "k"), ("link/new", "n")],
    );
    same(
        "apple/container#1797: a hard link whose directory no member names",
        &[&[ROOT, ("bin/app", FILE, "", b"app"), ("bin/app.runfiles/_main/app_/app", LINK, "bin/app", b"")]],
        &[("bin/app.runfiles/_main/app_/app", "app")],
    );
    same(
        "containerd#6991: links and files of a directory that is opaque, by the names of the lower layer's",
        &[
            &[ROOT, ("doc/", DIR, "", b""), ("doc/news", SYMLINK, "../old", b""), ("doc/gone", FILE, "", b"g")],
            &[("doc/", DIR, "", b""), ("doc/.wh..wh..opq", FILE, "", b""), ("doc/news", SYMLINK, "../new", b"")],
        ],
        &[("doc/news", "../new")],
    );
    same(
        "containerd#2458: a hard link to a symbolic link is one to the link",
        &[&[ROOT, ("zzz", FILE, "", b"z"), ("xxx", SYMLINK, "/zzz", b""), ("yyy", LINK, "xxx", b"")]],
        &[("yyy", "/zzz")],
    );
    same(
        "goldmann/docker-squash#104: files below a link to what is not there",
        &[&[ROOT, ("var/log", SYMLINK, "/data/var/log", b"")], &[("var/log/lastlog", FILE, "", b"l")]],
        &[("data/var/log/lastlog", "l")],
    );
}

/// Only what is left in the end is named by an image; a build of an archive stores what it reads before it knows that.
#[test]
fn replaced_members_are_not_in_the_image() {
    let bench = Bench::new();
    let (first, last) = (bytes(1, 9000), bytes(2, 9000));
    fs::write(bench.path("one.tar"), archive(&[("a", FILE, "", &first)])).expect("files can be made");
    built(&bench, bench.path("one.tar").to_str().expect("text")).expect("it can be built");
    let twice = archive(&[("a", FILE, "", &first), ("a", FILE, "", &last), ("b", FILE, "", &last)]);
    fs::write(bench.path("two.tar"), twice).expect("files can be made");
    let tree = built(&bench, bench.path("two.tar").to_str().expect("text")).expect("it can be built");
    assert!(tree[Path::new("a")].bytes.as_ref() == Some(&last));
    let image = ferry_image::Image::open(&bench.path("image"), None).expect("it was built");
    assert_eq!(image.packs().len(), 1, "the pack of the first file only is not needed");
}

/// How a layer is packed shows at its beginning, and what is said of it does not matter, nor whether it may be distributed.
#[test]
fn layers_are_unpacked_by_their_first_bytes() {
    const OCI: &str = "application/vnd.oci.image.layer";
    let plain = archive(&[("./", DIR, "", b""), ("file", FILE, "", b"data")]);
    // A frame that holds something else, as zstd:chunked has it, before the data.
    let skippable = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3][..], &packed(&plain, Packing::Zstd).1].concat();
    let all =
        [packed(&plain, Packing::Plain).1, packed(&plain, Packing::Gzip).1, packed(&plain, Packing::Zstd).1, skippable];
    for kind in [
        format!("{OCI}.v1.tar"),
        format!("{OCI}.v1.tar+gzip"),
        format!("{OCI}.v1.tar+zstd"),
        format!("{OCI}.nondistributable.v1.tar+gzip"),
        "application/vnd.docker.image.rootfs.diff.tar.gzip".into(),
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip".into(),
        "application/vnd.docker.image.rootfs.foreign.diff.tar".into(),
    ] {
        for bytes in &all {
            let bench = Bench::new();
            let mut bundle = Bundle::new(&bench, "bundle");
            bundle.layer_as(&plain, bytes, &kind);
            bundle.finish("latest");
            let tree = of_bundle(&bench, &bundle).unwrap_or_else(|error| panic!("{kind}: {error}"));
            assert_eq!(tree[Path::new("file")].bytes.as_deref(), Some(&b"data"[..]), "{kind}");
        }
    }
}

/// Headers for all members and names of volumes change nothing in a layer.
#[test]
fn headers_without_a_member_are_skipped() {
    let bench = Bench::new();
    let mut bundle = Bundle::new(&bench, "bundle");
    let members = [
        member("label", b'V', "", b""),
        member("pax_global_header", b'g', "", b"52 comment=1234567890123456789012345678901234567890\n"),
        member("pax_global_header", b'g', "", b"9 path=a\n14 mtime=1234\n9 uid=12\n"),
        member("file", FILE, "", b"data"),
    ];
    let bytes = [members.concat(), vec![0; 1024]].concat();
    bundle.layer_as(&bytes, &gzip(&bytes), "application/vnd.oci.image.layer.v1.tar+gzip");
    bundle.finish("latest");
    let tree = of_bundle(&bench, &bundle).expect("it can be built");
    let file = &tree[Path::new("file")];
    assert_eq!((tree.len(), file.owner, file.mtime), (2, (0, 0), (TIME, 0)));
}

impl Choices for Random {
    fn below(&mut self, end: usize) -> usize {
        usize::try_from(Self::below(self, end as u64)).expect("it is below a usize")
    }
}

/// Random layers, the image directory of them, and what is in them for people.
fn random_layers(bench: &Bench, seed: u64) -> (Vec<Vec<Member>>, Bundle, String) {
    let layers = layers(&mut Random::new(seed));
    let mut bundle = Bundle::new(bench, "bundle");
    for members in &layers {
        let mut archive: Vec<u8> =
            members.iter().flat_map(|of| member(&of.path, of.kind, &of.target, &of.data)).collect();
        archive.resize(archive.len() + 1024, 0);
        bundle.layer(&archive, Packing::Gzip);
    }
    bundle.finish("latest");
    let layer = |members: &Vec<Member>| members.iter().map(|member| format!("  {member}\n")).collect::<String>();
    let text = layers.iter().map(layer).collect::<Vec<_>>().join("next layer\n");
    (layers, bundle, text)
}

/// Both make the same of random layers.
fn random(seeds: std::ops::Range<u64>) {
    let (mut compared, mut refused) = (0, 0);
    for seed in seeds.clone() {
        let bench = Bench::new();
        let (_, bundle, text) = random_layers(&bench, seed);
        match (of_bundle(&bench, &bundle), unpacked(&bench, "bundle:latest")) {
            (Ok(ours), Ok(theirs)) => {
                assert_same(&timeless(ours), &timeless(theirs), &format!("seed {seed}:\n{text}"));
                compared += 1;
            }
            (Err(_), Err(_)) => refused += 1,
            // umoci puts a directory in a file's place then; containerd and GNU tar refuse it, too.
            (Err(ours), Ok(_)) if ours.contains("its parent is not a directory") => refused += 1,
            (Ok(_), Err(theirs)) => panic!("seed {seed}: umoci refuses it: {theirs}\n{text}"),
            (Err(ours), Ok(_)) => panic!("seed {seed}: refused here only: {ours}\n{text}"),
        }
    }
    assert!(compared * 3 > seeds.count(), "{compared} compared, {refused} refused");
}

/// The model that the fuzz target compares with.
#[test]
fn a_simple_model_agrees_on_random_layers() {
    let mut compared = 0;
    for seed in 0..300 {
        let bench = Bench::of(tempfile::tempdir_in("/dev/shm").expect("a directory can be made"));
        let (layers, bundle, text) = random_layers(&bench, seed);
        let (ours, model) = (of_bundle(&bench, &bundle), Model::of(&layers));
        assert_eq!(ours.is_ok(), model.is_some(), "seed {seed}: {:?}\n{text}", ours.err());
        let (Ok(ours), Some(model)) = (ours, model) else { continue };
        let shown = |facts: &Facts| match (&facts.bytes, &facts.target) {
            (Some(bytes), _) => format!("{bytes:?} {}", facts.nlink),
            (None, Some(target)) => format!("{target:?} {}", facts.nlink),
            (None, None) => "a directory".into(),
        };
        let expected = |shown: &Shown<'_>| match shown {
            Shown::Dir => "a directory".into(),
            Shown::File(bytes, nlink) => format!("{bytes:?} {nlink}"),
            Shown::Symlink(target, nlink) => format!("{target:?} {nlink}"),
        };
        let ours: BTreeMap<String, String> = ours
            .iter()
            .filter(|(path, _)| !path.as_os_str().is_empty())
            .map(|(path, facts)| (path.to_string_lossy().into_owned(), shown(facts)))
            .collect();
        let model: BTreeMap<String, String> =
            model.shown().iter().map(|(path, entry)| (path.clone(), expected(entry))).collect();
        assert_eq!(ours, model, "seed {seed}\n{text}");
        compared += 1;
    }
    assert!(compared > 100, "{compared} compared");
}

#[test]
fn umoci_agrees_on_random_layers() {
    random(0..40);
}

#[test]
#[ignore = "takes minutes"]
fn umoci_agrees_on_many_random_layers() {
    random(40..1000);
}

/// skopeo recompresses layers by zstd or not at all, and writes Docker manifests: the trees are equal.
#[test]
fn skopeo_copies_of_an_image_are_the_same_tree() {
    let program = ferry_guest::Cache::from_env().and_then(|cache| cache.skopeo()).expect("skopeo can be fetched");
    let copy = |bench: &Bench, words: &[&str]| {
        let output = Command::new(&program)
            .args(["--insecure-policy", "--tmpdir", ".", "copy", "--quiet"])
            .args(words)
            .current_dir(bench.directory.path())
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let mut compared = 0;
    for seed in 0..12 {
        let bench = Bench::new();
        let (_, bundle, text) = random_layers(&bench, seed);
        let Ok(ours) = of_bundle(&bench, &bundle) else { continue };
        for (form, words) in [
            ("a copy", &["oci:bundle:latest", "oci:copy:latest"][..]),
            ("zstd", &["--dest-compress", "--dest-compress-format", "zstd", "oci:bundle:latest", "oci:copy:latest"]),
            ("docker", &["--format", "v2s2", "oci:bundle:latest", "oci:copy:latest"]),
            ("saved", &["oci:bundle:latest", "docker-archive:saved.tar"]),
            ("plain", &["--dest-oci-accept-uncompressed-layers", "docker-archive:saved.tar", "oci:copy:latest"]),
        ] {
            copy(&bench, words);
            if form == "saved" {
                continue;
            }
            let theirs = built(&bench, &format!("oci:{}:latest", bench.path("copy").display()))
                .unwrap_or_else(|error| panic!("seed {seed}, {form}: {error}\n{text}"));
            assert_same(&ours, &theirs, &format!("seed {seed}, {form}:\n{text}"));
            fs::remove_dir_all(bench.path("copy")).expect("it can be removed");
        }
        compared += 1;
    }
    assert!(compared >= 4, "{compared} compared");
}

/// What GNU tar appends to an archive, and what it extracts of it then.
fn tar(bench: &Bench, words: &[&str]) -> Result<(), String> {
    let output = Command::new("tar").args(words).current_dir(bench.directory.path()).output().expect("tar is there");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// An archive that was appended to: `tar -r` has what changed once more.
#[test]
fn gnu_tar_extracts_the_same_of_archives_that_were_appended_to() {
    for (number, options) in [
        vec!["--format=gnu"],
        vec!["--format=gnu", "--sparse"],
        vec!["--format=ustar"],
        vec!["--format=posix", "--xattrs", "--xattrs-include=user.*"],
        vec!["--format=posix", "--sparse", "--sparse-version=0.0"],
        vec!["--format=posix", "--sparse", "--sparse-version=0.1"],
        vec!["--format=posix", "--sparse", "--sparse-version=1.0"],
        vec!["--format=gnu", "--label=a volume"],
        vec!["--format=posix", "--label=a volume", "--sparse"],
        vec!["--format=posix", "--pax-option=comment=of all,mtime=77,uid=12"],
    ]
    .iter()
    .enumerate()
    {
        let bench = Bench::new();
        let tree = bench.tree();
        let add = |how: &str| {
            tar(&bench, &[&[how, "archive.tar", "-C", "tree", "--sort=name"], &options[..], &["."]].concat())
                .unwrap_or_else(|said| panic!("{options:?}: {said}"));
        };
        fs::create_dir_all(tree.join("dir/empty")).expect("directories can be made");
        fs::write(tree.join("dir/file"), bytes(number, 5000)).expect("files can be made");
        fs::write(tree.join("changes"), "before").expect("files can be made");
        fs::write(tree.join("becomes-dir"), "before").expect("files can be made");
        fs::hard_link(tree.join("dir/file"), tree.join("linked")).expect("links can be made");
        std::os::unix::fs::symlink("dir", tree.join("link")).expect("links can be made");
        let sparse = fs::File::create(tree.join("sparse")).expect("files can be made");
        for at in (0..30_u64).map(|piece| piece * 300_000) {
            std::os::unix::fs::FileExt::write_all_at(&sparse, &bytes(3, 5000), at).expect("files can be written");
        }
        let hole = fs::File::create(tree.join("hole")).expect("files can be made");
        hole.set_len(1 << 20).expect("files can grow");
        rustix::fs::lsetxattr(tree.join("changes"), "user.one", b"1", rustix::fs::XattrFlags::empty())
            .expect("attributes can be set");
        add("-cf");
        fs::write(tree.join("changes"), bytes(number, 9000)).expect("files can be made");
        fs::remove_file(tree.join("becomes-dir")).expect("files can be removed");
        fs::create_dir(tree.join("becomes-dir")).expect("directories can be made");
        fs::write(tree.join("becomes-dir/file"), "after").expect("files can be made");
        fs::remove_dir(tree.join("dir/empty")).expect("directories can be removed");
        fs::write(tree.join("dir/empty"), "now a file").expect("files can be made");
        fs::remove_file(tree.join("link")).expect("files can be removed");
        fs::create_dir(tree.join("link")).expect("directories can be made");
        sparse.set_len(20 << 20).expect("files can grow");
        // tar appends to no archive with a header for all members.
        add(if options[1..].iter().any(|option| option.starts_with("--pax-option")) { "-cf" } else { "-rf" });
        fs::create_dir(bench.path("extracted")).expect("directories can be made");
        let extract = ["-xpf", "archive.tar", "-C", "extracted", "--xattrs", "--xattrs-include=*", "--same-owner"];
        tar(&bench, &extract).unwrap_or_else(|said| panic!("{options:?}: {said}"));
        let ours = built(&bench, bench.path("archive.tar").to_str().expect("text"));
        let ours = ours.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        assert_same(&ours, &facts(&bench.path("extracted")), &format!("{options:?}"));
    }
}
