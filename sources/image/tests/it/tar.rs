//! Archives give the images of the directories they were made of, and hostile ones a refusal.

use crate::common;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use common::{Bench, bytes, fill, set_time};
use ferry_image::{BuildOptions, Image, Layout, Source, Store, build};

const COMPOSEFS: Layout = Layout::Composefs { version: None };

fn built(bench: &Bench, source: &Path, layout: Layout) -> ferry_image::Result<Vec<u8>> {
    let options = BuildOptions { threads: 2, layout, ..BuildOptions::default() };
    build(source, &bench.path("image"), Store::create(&bench.store())?, &options, &|_, _| {})?;
    Ok(fs::read(bench.path("image")).expect("it was built"))
}

/// An archive of the bench's tree, made by GNU tar.
fn archive(bench: &Bench, options: &[&str]) {
    let status = Command::new("tar")
        .args(options)
        .args(["-cf", "archive.tar", "-C", "tree", "."])
        .current_dir(bench.directory.path())
        .status();
    assert!(status.expect("tar is there").success(), "{options:?}");
}

#[test]
fn an_archive_gives_the_image_of_its_directory() {
    let bench = Bench::new();
    fill(&bench.tree());
    // tar leaves sockets out, and this layout takes the hard links of a directory for files of their own.
    for name in ["socket", "a-link"] {
        fs::remove_file(bench.tree().join(name)).expect("files can be removed");
    }
    set_time(&bench.tree(), 1_700_000_000, 5);
    archive(&bench, &["--format=posix", "--xattrs", "--xattrs-include=*", "--sort=name"]);
    let of_archive = built(&bench, &bench.path("archive.tar"), COMPOSEFS).expect("the archive can be built");
    assert!(of_archive == built(&bench, &bench.tree(), COMPOSEFS).expect("the tree can be built"));
    // The metadata of a flat image does not depend on the order of the files' bytes, once they are all in the store.
    let of_tree = built(&bench, &bench.tree(), Layout::Flat).expect("the tree can be built");
    assert!(of_tree == built(&bench, &bench.path("archive.tar"), Layout::Flat).expect("the archive can be built"));
}

/// What ustar, GNU and old archives can hold: no attributes, no parts of seconds.
fn fill_plainly(tree: &Path, long_name: usize) {
    fs::create_dir_all(tree.join("dir").join("d".repeat(80))).expect("directories can be made");
    fs::write(tree.join("dir").join("d".repeat(80)).join("l".repeat(long_name)), bytes(1, 100))
        .expect("files can be made");
    for (number, length) in [0, 1, 64, 65, 511, 512, 513, 10_240, 5 << 20].into_iter().enumerate() {
        fs::write(tree.join(format!("file-{length}")), bytes(number, length)).expect("files can be made");
    }
    std::os::unix::fs::symlink("t".repeat(long_name), tree.join("link")).expect("links can be made");
    let sparse = File::create(tree.join("sparse")).expect("files can be made");
    for at in (0..40_u64).map(|piece| piece * 200_000) {
        std::os::unix::fs::FileExt::write_all_at(&sparse, &bytes(3, 5000), at).expect("files can be written");
    }
    sparse.set_len(9_000_000).expect("files can grow");
    let mut left = vec![tree.to_owned()];
    while let Some(path) = left.pop() {
        if path.is_dir() && !path.is_symlink() {
            left.extend(
                fs::read_dir(&path).expect("it can be listed").map(|entry| entry.expect("it can be listed").path()),
            );
        }
        set_time(&path, 1_600_000_000, 0);
    }
}

#[test]
fn all_formats_of_gnu_tar_are_read() {
    for (format, long_name) in
        [("v7", 5), ("oldgnu", 240), ("gnu", 240), ("gnu --sparse", 240), ("ustar", 60), ("posix", 240)]
    {
        let bench = Bench::new();
        fill_plainly(&bench.tree(), long_name);
        if format.contains("gnu") {
            std::os::unix::fs::lchown(bench.tree().join("file-1"), Some(3_000_000), Some(4_000_000_000))
                .expect("root may");
            set_time(&bench.tree().join("file-64"), -5, 0);
        }
        let options: Vec<_> = format!("--format={format}").split(' ').map(str::to_owned).collect();
        archive(&bench, &options.iter().map(String::as_str).collect::<Vec<_>>());
        let of_archive = built(&bench, &bench.path("archive.tar"), COMPOSEFS).expect("the archive can be built");
        assert!(of_archive == built(&bench, &bench.tree(), COMPOSEFS).expect("the tree can be built"), "{format}");
    }
}

#[test]
fn hard_links_of_archives_are_kept() {
    let bench = Bench::new();
    fs::write(bench.tree().join("a"), bytes(1, 1000)).expect("files can be made");
    fs::hard_link(bench.tree().join("a"), bench.tree().join("b")).expect("links can be made");
    archive(&bench, &["--sort=name"]);
    for layout in [COMPOSEFS, Layout::Flat] {
        built(&bench, &bench.path("archive.tar"), layout).expect("the archive can be built");
        let source = Source::open(&bench.path("image"), &bench.store(), None).expect("it was built");
        let image = source.image();
        let root = image.inode(image.root()).expect("it is there");
        let find = |name: &[u8]| image.lookup(&root, ferry_vfs::Name::new(name).expect("a name")).expect("it is whole");
        let nid = find(b"a").expect("it is there");
        assert_eq!((find(b"b"), image.inode(nid).expect("it is there").nlink), (Some(nid), 2));
        let mut read = vec![0; 2000];
        let count = source.read_at(nid, 0, &mut read).expect("it can be read");
        assert!(read[..count] == bytes(1, 1000));
    }
}

/// A header and its data.
fn member(name: &str, kind: u8, data: &[u8], change: impl Fn(&mut [u8; 512])) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..124].copy_from_slice(b"0000000\x000000000\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    header[136..148].copy_from_slice(b"00000000005\0");
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    change(&mut header);
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut bytes = [&header[..], data].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn plain(name: &str, kind: u8, data: &[u8]) -> Vec<u8> {
    member(name, kind, data, |_| {})
}

fn linked(name: &str, kind: u8, to: &str) -> Vec<u8> {
    member(name, kind, b"", |header| header[157..157 + to.len()].copy_from_slice(to.as_bytes()))
}

fn pax(records: &str) -> Vec<u8> {
    plain("pax", b'x', records.as_bytes())
}

/// A file below more directories than Linux's paths can have.
fn deep(top: &str) -> Vec<u8> {
    [plain("long", b'L', format!("{top}{}/file", "/d".repeat(2046)).as_bytes()), plain("cut", b'0', b"")].concat()
}

/// Builds of members; answers what was said.
fn said(bench: &Bench, members: &[Vec<u8>]) -> Option<String> {
    let mut archive = members.concat();
    archive.resize(archive.len() + 1024, 0);
    fs::write(bench.path("hostile.tar"), archive).expect("files can be made");
    built(bench, &bench.path("hostile.tar"), COMPOSEFS).err().map(|error| error.to_string())
}

#[test]
fn hostile_archives_are_refused() {
    let bench = Bench::new();
    let sized = |name: &str, size: &'static str, kind| {
        member(name, kind, b"", |header| header[124..136].copy_from_slice(size.as_bytes()))
    };
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("has .. in it", vec![plain("../a", b'0', b"")]),
        ("has .. in it", vec![plain("a/../../b", b'0', b"")]),
        ("a hard link: its name has .. in it", vec![linked("a", b'1', "../../etc/passwd")]),
        ("which is not in the archive before it", vec![linked("a", b'1', "/etc/passwd")]),
        ("a hard link to a directory", vec![plain("d/", b'5', b""), linked("a", b'1', "d")]),
        ("its parent is not a directory", vec![plain("a", b'0', b"1"), plain("a/b", b'0', b"")]),
        ("its parent is not a directory", vec![linked("a", b'2', "b"), plain("b", b'0', b""), plain("a/b", b'0', b"")]),
        ("more than 255 symbolic links", vec![linked("a", b'2', "b"), linked("b", b'2', "a"), plain("a/c", b'0', b"")]),
        ("more than 2048 names", vec![linked("a", b'2', "b/a/"), plain("b/a/", b'5', b""), deep("a")]),
        ("a hard link to itself", vec![plain("a", b'0', b"1"), linked("a", b'1', "a")]),
        ("a hard link to itself", vec![plain("d/a", b'0', b"1"), linked("l", b'2', "d"), linked("d/a", b'1', "l/a")]),
        ("the root is not a directory", vec![plain("d/", b'5', b""), plain("./.", b'0', b"")]),
        ("without a target", vec![linked("a", b'2', "")]),
        ("it has data but is not a file", vec![plain("d", b'5', b"data"), plain("hidden", b'0', b"")]),
        (
            "it has data but is not a file",
            vec![plain("a", b'0', b""), member("b", b'1', b"data", |header| header[157] = b'a')],
        ),
        ("wrong lengths", vec![pax("99 path=a\n"), plain("b", b'0', b"")]),
        ("wrong lengths", vec![pax("10 path=abc"), plain("b", b'0', b"")]),
        ("wrong lengths", vec![pax("0 path=a\n"), plain("b", b'0', b"")]),
        ("wrong lengths", vec![pax("+9 path=a\n"), plain("b", b'0', b"")]),
        ("has .. in it", vec![pax("13 path=../a\n"), plain("b", b'0', b"")]),
        ("cut off", vec![pax("17 size=99999999\n"), plain("a", b'0', b"")]),
        ("is not a number", vec![pax("11 size=-x\n"), plain("a", b'0', b"")]),
        ("below zero", vec![pax("11 size=-1\n"), plain("a", b'0', b"")]),
        ("a duplicate extended header", vec![pax(""), pax(""), plain("a", b'0', b"")]),
        ("all members the same path", vec![plain("g", b'g', b"9 path=a\n"), plain("b", b'0', b"")]),
        ("all members the same size", vec![plain("g", b'g', b"9 size=1\n"), plain("b", b'0', b"")]),
        ("in the form 1.?", vec![pax("22 GNU.sparse.major=1\n"), plain("b", b'0', b"")]),
        ("in the form 2.0", vec![pax("22 GNU.sparse.major=2\n22 GNU.sparse.minor=0\n"), plain("b", b'0', b"")]),
        ("the unknown type 'Q'", vec![plain("a", b'Q', b"")]),
        ("header of more than 1 MiB", vec![sized("a", "77777777777\0", b'x')]),
        ("header of more than 1 MiB", vec![sized("a", "77777777777\0", b'L')]),
        ("cut off", vec![sized("a", "77777777777\0", b'0')]),
        ("is not a number", vec![sized("a", "0000000000x\0", b'0')]),
        ("cut off", vec![plain("name", b'L', b"long\0")]),
        ("no name", vec![plain("", b'0', b"")]),
        ("is not a valid name", vec![plain("long", b'L', &[b'n'; 300]), plain("b", b'0', b"")]),
        (
            "does not fit in 12 and 20 bits",
            vec![member("a", b'3', b"", |header| header[329..337].copy_from_slice(b"7777777\0"))],
        ),
    ];
    for (expected, members) in cases {
        let found = said(&bench, &members).unwrap_or_else(|| panic!("taken, but: {expected}"));
        assert!(found.contains(expected), "{found}\nbut expected: {expected}");
    }
    // Nothing came into the store.
    assert_eq!(fs::read_dir(bench.store().join("objects")).expect("it can be listed").count(), 0);
}

#[test]
fn hostile_sparse_files_are_refused() {
    let bench = Bench::new();
    let sparse = |pieces: &[(u64, u64)], length: u64, data: &[u8]| {
        member("a", b'S', data, |header| {
            header[257..265].copy_from_slice(b"ustar  \0");
            for (index, (at, bytes)) in pieces.iter().enumerate() {
                let text = format!("{at:011o}\0{bytes:011o}\0");
                header[386 + index * 24..][..24].copy_from_slice(text.as_bytes());
            }
            header[483..495].copy_from_slice(format!("{length:011o}\0").as_bytes());
        })
    };
    for (expected, archive) in [
        ("overlap", sparse(&[(0, 600), (500, 600)], 4096, &[1; 1200])),
        ("end behind it", sparse(&[(4000, 600)], 4096, &[1; 600])),
        ("not as long as its data", sparse(&[(0, 600)], 4096, &[1; 1200])),
        ("not as long as its data", sparse(&[(0, 600)], 4096, &[])),
        (
            "more than 64 GiB",
            member("a", b'S', b"", |header| {
                header[483..495].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0, 0, 0, 0, 0, 0, 0]);
            }),
        ),
    ] {
        let found = said(&bench, &[archive]).unwrap_or_else(|| panic!("taken, but: {expected}"));
        assert!(found.contains(expected), "{found}\nbut expected: {expected}");
    }
    assert_eq!(said(&bench, &[sparse(&[(100, 600)], 4096, &[1; 600])]), None);
    // The forms of PAX.
    let records = |records: &[&str]| {
        let record = |text: &&str| {
            (text.len()..).find_map(|length| {
                let whole = format!("{length} GNU.sparse.{text}\n");
                (whole.len() == length).then_some(whole)
            })
        };
        pax(&records.iter().filter_map(record).collect::<String>())
    };
    let before = ["major=1", "minor=0", "realsize=4096", "name=a"];
    let in_header = |map: &str| records(&["size=4096", map]);
    let mut mapped = b"1\n0\n600\n".to_vec();
    mapped.resize(512, 0);
    mapped.extend([1; 600]);
    for (expected, header, data) in [
        ("without a length", records(&["map=0,600"]), &[1; 600][..]),
        ("without a length", records(&["size=-1", "map=0,600"]), &[1; 600]),
        ("overlap", in_header("map=0,300,200,300"), &[1; 600]),
        ("end behind it", in_header("map=4000,600"), &[1; 600]),
        ("not as long as its data", in_header("map=0,500"), &[1; 600]),
        ("is not numeric", in_header("map=0,+600"), &[1; 600]),
        ("not as many pieces as it says", in_header("map=0"), &[1; 600]),
        ("not as many pieces as it says", records(&["size=4096", "numblocks=2", "map=0,600"]), &[1; 600]),
        ("do not take turns", records(&["size=4096", "numbytes=0"]), &[1; 600]),
        ("more than 64 GiB", records(&["size=68719476737", "map=0,600"]), &[1; 600]),
        ("whose map is cut off", records(&before), b"1\n"),
        ("whose map is cut off", records(&before), ["300\n", &"0\n".repeat(254)].concat().as_bytes()),
        ("is not numeric", records(&before), &[b'1'; 512]),
        ("is not numeric", records(&before), &[0; 512]),
        ("more than a million pieces", records(&before), [&b"1048577\n"[..], &[b'0'; 504]].concat().as_slice()),
        ("not as long as its data", records(&before), &mapped[..1000]),
    ] {
        let found = said(&bench, &[header, plain("a", b'0', data)]).unwrap_or_else(|| panic!("taken, but: {expected}"));
        assert!(found.contains(expected), "{found}\nbut expected: {expected}");
    }
    assert_eq!(said(&bench, &[records(&before), plain("x", b'0', &mapped)]), None);
}

/// PAX and plain headers may have different sizes; a reader that uses the wrong one sees forged members.
#[test]
fn members_are_those_that_gnu_tar_lists() {
    let bench = Bench::new();
    let hidden = [plain("first", b'0', b""), plain("second", b'0', b"")].concat();
    let of_size = |size: usize| {
        let record = format!("{} size={size}\n", if size < 10 { 9 } else { 13 });
        assert!(record.starts_with(&record.len().to_string()));
        pax(&record)
    };
    let short = |data: &[u8]| {
        let mut bytes = member("a", b'0', b"", |_| {});
        bytes.extend_from_slice(data);
        bytes
    };
    for members in [vec![of_size(1), plain("a", b'0', &hidden)], vec![of_size(1024), short(&hidden)]] {
        assert_eq!(said(&bench, &members), None);
        let listed = Command::new("tar").arg("-tf").arg(bench.path("hostile.tar")).output().expect("tar is there");
        let image = Image::open(&bench.path("image"), None).expect("it was built");
        let text = String::from_utf8(common::composefs::dump_of(&image)).expect("our names are text");
        let ours: String =
            text.lines().skip(1).map(|line| line[1..].split(' ').next().unwrap_or(line).to_owned() + "\n").collect();
        assert_eq!(ours, String::from_utf8(listed.stdout).expect("our names are text"));
    }
}

#[test]
fn archives_of_gnu_tar_are_accepted() {
    let bench = Bench::new();
    let members = [
        plain("/absolute/name", b'0', b"data"),
        plain("./dot/./dot", b'0', b""),
        plain("old/", 0, b""),
        plain("old", b'5', b""),
        plain("g", b'g', b"16 comment=1234\n"),
        pax("9 path=p\n15 mtime=-1.25\n18 uid=4000000000\n"),
        plain("ignored", b'0', b"x"),
    ];
    assert_eq!(said(&bench, &members), None);
    let image = Image::open(&bench.path("image"), None).expect("it was built");
    let text = String::from_utf8(common::composefs::dump_of(&image)).expect("our names are text");
    let lines: Vec<_> = text.lines().collect();
    let expected = [
        "/ 4096 40755 5 0 0 0 0.0 - - -",
        "/absolute 43 40755 2 0 0 0 0.0 - - -",
        "/absolute/name 4 100644 1 0 0 0 5.0 - data -",
        "/dot 42 40755 2 0 0 0 0.0 - - -",
        "/dot/dot 0 100644 1 0 0 0 5.0 - - -",
        "/old 27 40644 2 0 0 0 5.0 - - -",
        "/p 1 100644 1 4000000000 0 0 -2.750000000 - x -",
    ];
    assert_eq!(lines, expected);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).expect("memory takes all");
    packed.finish().expect("memory takes all")
}

#[test]
fn the_sum_of_a_packed_archive_is_looked_at() {
    let bench = Bench::new();
    let mut archive = plain("a", b'0', b"data");
    archive.resize(archive.len() + (1 << 20), 0);
    let (packed, source) = (gzip(&archive), bench.path("archive.tar.gz"));
    let taken = |bytes: Vec<u8>| {
        fs::write(&source, bytes).expect("files can be made");
        built(&bench, &source, COMPOSEFS)
    };
    let image = taken(packed.clone()).expect("it is whole");
    // The sum stands before the length, both at the end.
    let mut other = packed.clone();
    let at = other.len() - 8;
    other[at] ^= 1;
    let error = taken(other).expect_err("its sum is another");
    assert!(matches!(&error, ferry_image::Error::Io { what: "read", path, .. } if *path == source), "{error}");
    taken(packed[..packed.len() - 8].to_vec()).expect_err("it is cut off");
    taken([&packed[..], &[0; 512], b"x"].concat()).expect_err("something follows");
    // Several parts, and what fills the last record of a tape.
    let (one, two) = archive.split_at(300);
    assert!(taken([gzip(one), gzip(b""), gzip(two), vec![0; 70_000]].concat()).expect("gzip takes it, too") == image);
}

/// A layer of an OCI image, given alone.
#[test]
fn whiteouts_of_a_single_layer_follow_the_flag() {
    use ferry_image::{Filter, Whiteouts};
    let bench = Bench::new();
    let mut archive = [
        plain(".wh.gone", b'0', b""),
        plain("opaque/", b'5', b""),
        plain("opaque/.wh..wh..opq", b'0', b""),
        plain("opaque/file", b'0', b"1"),
        plain(".wh.again", b'0', b""),
        plain("again", b'0', b"2"),
        plain("both/", b'5', b""),
        plain(".wh.both", b'0', b""),
        plain("nowhere/.wh.x", b'0', b""),
        plain("unsaid/.wh..wh..opq", b'0', b""),
        plain(".wh..wh.plnk/12.34", b'0', b"of aufs"),
    ]
    .concat();
    archive.resize(archive.len() + 1024, 0);
    fs::write(bench.path("layer.tar"), archive).expect("files can be made");
    let take_with = |source: &str, whiteouts, filter| {
        let options = BuildOptions { layout: COMPOSEFS, whiteouts, filter, ..BuildOptions::default() };
        let store = Store::create(&bench.store()).expect("a store can be made");
        build(&bench.path(source), &bench.path("image"), store, &options, &|_, _| {}).map(|_| {
            let image = Image::open(&bench.path("image"), None).expect("it was built");
            String::from_utf8(common::composefs::dump_of(&image)).expect("our names are text")
        })
    };
    let take = |source: &str, whiteouts| take_with(source, whiteouts, Filter::default());
    let names = |text: &str| {
        let name = |line: &str| {
            let fields: Vec<_> = line.split(' ').collect();
            let is_opaque = line.contains(" trusted.overlay.opaque=y");
            let whiteout = fields[2] == "20000" && fields[6] == "0";
            format!("{}{}{}", fields[0], if is_opaque { " opaque" } else { "" }, if whiteout { " gone" } else { "" })
        };
        text.lines().skip(1).map(name).collect::<Vec<_>>()
    };
    let error = take("layer.tar", None).expect_err("nobody said what becomes of them").to_string();
    assert!(error.contains("the member .wh.gone at byte 0: a whiteout") && error.contains("--whiteouts"), "{error}");
    let dropped = take("layer.tar", Some(Whiteouts::Drop)).expect("they go");
    assert_eq!(names(&dropped), ["/again", "/both", "/opaque", "/opaque/file"]);
    let overlay = take("layer.tar", Some(Whiteouts::Overlay)).expect("they become overlayfs's");
    let expected = [
        "/again",
        "/both opaque",
        "/gone gone",
        "/nowhere",
        "/nowhere/x gone",
        "/opaque opaque",
        "/opaque/file",
        "/unsaid opaque",
    ];
    assert_eq!(names(&overlay), expected);
    // Without attributes, too: those are not the archive's.
    let bare = || Filter { skip_xattrs: true, ..Filter::default() };
    let overlay = take_with("layer.tar", Some(Whiteouts::Overlay), bare()).expect("they become overlayfs's");
    assert_eq!(names(&overlay), expected);
    let kept = take("layer.tar", Some(Whiteouts::Keep)).expect("they are files");
    assert_eq!((names(&kept).len(), kept.contains("/.wh..wh.plnk/12.34 ")), (14, true), "{kept}");
    // What is no archive has none.
    let error = take("tree", Some(Whiteouts::Drop)).expect_err("it is a directory").to_string();
    assert!(error.contains("only for a tar archive"), "{error}");
}

#[test]
fn progress_counts_bytes_of_the_archive() {
    let bench = Bench::new();
    for number in 0..4 {
        fs::write(bench.tree().join(number.to_string()), bytes(number, 2 << 20)).expect("files can be made");
    }
    archive(&bench, &[]);
    let plain = fs::read(bench.path("archive.tar")).expect("files can be read");
    fs::write(bench.path("archive.tar.gz"), gzip(&plain)).expect("files can be made");
    for name in ["archive.tar", "archive.tar.gz"] {
        let length = usize::try_from(fs::metadata(bench.path(name)).expect("it is there").len()).expect("it fits");
        let told = std::sync::Mutex::new(Vec::new());
        let tell = |done, all| told.lock().expect("nobody has panicked").push((done, all));
        let store = Store::create(&bench.store()).expect("a store can be made");
        build(&bench.path(name), &bench.path("image"), store, &BuildOptions::default(), &tell)
            .expect("it can be built");
        let told = told.into_inner().expect("nobody has panicked");
        assert!(told.is_sorted() && told.iter().all(|(_, all)| *all == length), "{name}: {told:?}");
        assert_eq!(told.last(), Some(&(length, length)), "{name}");
    }
}
