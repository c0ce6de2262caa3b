//! A layer that is unpacked while it is read gives the image that its archive gives.

use std::fs;
use std::io::{self, Read, Write as _};
use std::path::Path;

use ferry_image::{
    BuildOptions, BuildReport, Error, Image, LayerRules, LowerDirectory, Result, Store, UnpackReport, Whiteouts, build,
    hex, unpack_layer,
};
use ferry_vfs::Timespec;
use proptest::prelude::*;

use crate::archives::bundle::{self, DIR, FILE, Item, LINK, Packing, archive, packed};
use crate::archives::random::{Choices, layers};
use crate::common::Bench;

fn unpack(bench: &Bench, blob: impl Read + Send, rules: &LayerRules<'_>) -> Result<UnpackReport> {
    unpack_layer(blob, Path::new("layer"), &bench.path("image"), Store::create(&bench.store())?, rules)
}

/// Rules of a layer with nothing below.
const ALONE: LayerRules<'static> =
    LayerRules { whiteouts: Whiteouts::Overlay, lower: &|_| Ok(None), file_bytes_max: 1 << 30, inode_share: false };

fn build_archive(bench: &Bench, archive: &[u8]) -> Result<BuildReport> {
    let path = bench.path("archive");
    fs::write(&path, archive).unwrap();
    let options = BuildOptions { whiteouts: Some(Whiteouts::Overlay), ..BuildOptions::default() };
    build(&path, &bench.path("image"), Store::create(&bench.store())?, &options, &|_, _| {})
}

#[test]
fn each_packing_gives_the_image_of_the_archive() {
    let bench = Bench::new();
    let large = vec![7; 3 << 20];
    let items = [
        ("dir/", DIR, "", &b""[..]),
        ("dir/large", FILE, "", &large),
        ("dir/same", LINK, "dir/large", b""),
        ("dir/.wh.gone", FILE, "", b""),
        ("small", FILE, "", b"some"),
    ];
    let plain = archive(&items);
    let expected = build_archive(&bench, &plain).unwrap();
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let (_, blob) = packed(&plain, packing);
        let report = unpack(&bench, &*blob, &ALONE).unwrap();
        assert_eq!((report.image.tree, report.image.new_bytes), (expected.tree, 0));
        assert_eq!(
            (report.bytes, format!("sha256:{}", hex(&report.sha256))),
            (plain.len() as u64, bundle::digest(&plain))
        );
        // What follows the last member belongs to the archive's digest, too.
        let more = [&plain[..], &[0; 1 << 20]].concat();
        let report = unpack(&bench, &*packed(&more, packing).1, &ALONE).unwrap();
        assert_eq!(
            (report.bytes, format!("sha256:{}", hex(&report.sha256))),
            (more.len() as u64, bundle::digest(&more))
        );
    }
}

#[test]
fn failed_unpacking_leaves_no_image() {
    let bench = Bench::new();
    let large: Vec<u8> = (0..3_u32 << 20).flat_map(|word| (word.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    let plain = archive(&[("large", FILE, "", &large), ("small", FILE, "", b"some")]);
    for packing in [Packing::Plain, Packing::Gzip, Packing::Zstd] {
        let (_, blob) = packed(&plain, packing);
        for end in [1, 100, blob.len() / 3, blob.len() * 2 / 3] {
            unpack(&bench, &blob[..end], &ALONE).unwrap_err();
        }
        let broken = || io::Error::other("the disk is broken");
        struct Broken(fn() -> io::Error);
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(self.0())
            }
        }
        let error = unpack(&bench, blob[..blob.len() / 2].chain(Broken(broken)), &ALONE).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        let rules = LayerRules { file_bytes_max: large.len() as u64 + 3, ..ALONE };
        let error = unpack(&bench, &*blob, &rules).unwrap_err();
        assert!(matches!(error, Error::Input { .. }), "{error}");
    }
    assert!(!bench.path("image").exists());
}

#[test]
fn directories_that_are_not_described_are_those_below() {
    let bench = Bench::new();
    let items: [Item<'_>; 7] = [
        ("./", DIR, "", b""),
        ("a/b/c/file", FILE, "", b"some"),
        ("a/new/file", FILE, "", b"some"),
        ("own/file", FILE, "", b"some"),
        ("own/", DIR, "", b""),
        ("w/.wh.gone", FILE, "", b""),
        ("o/.wh..wh..opq", FILE, "", b""),
    ];
    let lower = |path: &Path| {
        let known = ["", "a", "a/b", "a/b/c", "own", "w", "o"].contains(&path.to_str().unwrap());
        let depth = u32::try_from(path.components().count()).unwrap();
        let xattrs = vec![(b"trusted.overlay.opaque".to_vec(), b"y".to_vec()), (b"user.depth".to_vec(), vec![1])];
        let mtime = Timespec { sec: 1_500_000_000 + i64::from(depth), nsec: 5 };
        Ok(known.then_some(LowerDirectory { mode: 0o1700, uid: 10 + depth, gid: 20, mtime, xattrs }))
    };
    let rules = LayerRules { lower: &lower, ..ALONE };
    unpack(&bench, &*archive(&items), &rules).unwrap();
    let image = Image::open(&bench.path("image"), None).unwrap();
    let mut found = Vec::new();
    ferry_image::walk(&image, image.root(), b"", |step, inode| {
        if inode.kind() == ferry_vfs::FileType::Directory {
            let path = String::from_utf8(step.path()).unwrap();
            let names: Vec<_> = image
                .xattrs(inode)
                .unwrap()
                .iter()
                .map(|xattr| String::from_utf8_lossy(&xattr.0).into_owned())
                .collect();
            found.push((path, inode.mode & 0o7777, inode.uid, inode.mtime.sec, names.join(" ")));
        }
        Ok::<_, ferry_image::Flaw>(())
    })
    .unwrap();
    found.sort();
    let (depth, opaque) = ("user.depth", "trusted.overlay.opaque user.depth");
    let expected = [
        ("", 0o1700, 10, 1_500_000_000, depth),
        ("/a", 0o1700, 11, 1_500_000_001, depth),
        ("/a/b", 0o1700, 12, 1_500_000_002, depth),
        ("/a/b/c", 0o1700, 13, 1_500_000_003, depth),
        ("/a/new", 0o755, 0, 0, ""),
        ("/o", 0o1700, 11, 1_500_000_001, opaque),
        ("/own", 0o755, 0, bundle::TIME, ""),
        ("/w", 0o1700, 11, 1_500_000_001, depth),
    ];
    assert_eq!(found, expected.map(|(path, mode, uid, time, names)| (path.into(), mode, uid, time, names.into())));
}

struct Numbers<'a>(std::slice::Iter<'a, usize>);

impl Choices for Numbers<'_> {
    fn below(&mut self, end: usize) -> usize {
        self.0.next().map_or(0, |number| number % end)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn random_layers_give_the_images_of_their_archives(numbers in prop::collection::vec(any::<usize>(), 0..200)) {
        let bench = Bench::new();
        for members in layers(&mut Numbers(numbers.iter())) {
            // The root is not the layer's own.
            let own = members.iter().filter(|member| !matches!(&*member.path, "./" | "/" | "."));
            let items: Vec<Item<'_>> =
                own.map(|member| (&*member.path, member.kind, &*member.target, &*member.data)).collect();
            let plain = archive(&items);
            let unpacked = unpack(&bench, &*packed(&plain, Packing::Gzip).1, &ALONE);
            match build_archive(&bench, &plain) {
                Ok(expected) => prop_assert_eq!(unpacked.unwrap().image.tree, expected.tree),
                Err(_) => prop_assert!(matches!(unpacked, Err(Error::Input { .. })), "{:?}", unpacked),
            }
        }
    }
}

/// Returns the names in the image, and what they are.
fn names(bench: &Bench) -> String {
    let image = Image::open(&bench.path("image"), None).unwrap();
    let mut found = Vec::new();
    ferry_image::walk(&image, image.root(), b"", |step, inode| {
        let kind = match inode.kind() {
            ferry_vfs::FileType::Directory if image.xattrs(inode).unwrap().is_empty() => "/",
            ferry_vfs::FileType::Directory => "/ opaque",
            ferry_vfs::FileType::CharacterDevice => " gone",
            ferry_vfs::FileType::Symlink => " link",
            _ => "",
        };
        found.push(format!("{}{kind}", String::from_utf8(step.path()).unwrap()));
        Ok::<_, ferry_image::Flaw>(())
    })
    .unwrap();
    found.sort();
    found[1..].join(", ")
}

/// Returns a member whose header is changed.
fn changed((name, kind, target, data): Item<'_>, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut bytes = bundle::member(name, kind, target, data);
    change(&mut bytes[..512]);
    bytes[148..156].fill(b' ');
    let sum: u32 = bytes[..512].iter().map(|byte| u32::from(*byte)).sum();
    bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    bytes
}

/// golang/go issue 21005 (moby 34092): a prefix in a GNU header; and sizes of members that have no data.
#[test]
fn layers_are_read_as_go_reads_them_and_archives_refuse_what_is_ambiguous() {
    let sized = |header: &mut [u8]| header[124..136].copy_from_slice(b"00000000004\0");
    let of_old_go = |header: &mut [u8]| {
        header[108..116].copy_from_slice(&[0x80, 0, 0, 0, 0, 0x3d, 9, 0]);
        header[257..265].copy_from_slice(b"ustar  \0");
        header[345..351].copy_from_slice(b"prefix");
    };
    let with_time = |header: &mut [u8]| {
        header[257..265].copy_from_slice(b"ustar  \0");
        header[345..357].copy_from_slice(b"14371234567\0");
    };
    for (member, expected, refusal) in [
        (
            changed(("a", FILE, "", b"some"), of_old_go),
            "/last, /prefix/, /prefix/a",
            Some("a GNU header with a prefix"),
        ),
        (changed(("a", FILE, "", b"some"), with_time), "/a, /last", None),
        (changed(("d/", DIR, "", b""), sized), "/d/, /last", Some("it has data but is not a file")),
        (changed(("s", bundle::SYMLINK, "a", b""), sized), "/last, /s link", Some("it has data but is not a file")),
    ] {
        let bench = Bench::new();
        let plain = [member, archive(&[("last", FILE, "", b"last")])].concat();
        unpack(&bench, &*plain, &ALONE).unwrap();
        assert_eq!(names(&bench), expected);
        match (refusal, build_archive(&Bench::new(), &plain)) {
            (Some(refusal), Err(error)) => assert!(error.to_string().contains(refusal), "{error}"),
            (None, Ok(_)) => {}
            (_, outcome) => panic!("{expected}: {outcome:?}"),
        }
    }
    // Other readers take it for a file.
    let bench = Bench::new();
    let slash = [bundle::member("d/", FILE, "", b"some"), archive(&[])].concat();
    assert!(matches!(unpack(&bench, &*slash, &ALONE), Err(Error::Input { .. })));
}

#[test]
fn large_windows_are_unpacked_and_larger_ones_left_to_other_programs() {
    for (window, works) in [(28, true), (30, false)] {
        let bench = Bench::new();
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window).unwrap();
        encoder.write_all(&archive(&[("a", FILE, "", b"some")])).unwrap();
        match unpack(&bench, &*encoder.finish().unwrap(), &ALONE) {
            Ok(_) => assert!(works, "{window}"),
            Err(error) => assert!(!works && matches!(error, Error::Input { .. }), "{window}: {error:?}"),
        }
    }
}

/// Layers of other projects' bug reports.
#[test]
fn layers_that_others_have_failed_on_are_unpacked() {
    let tree = |items: &[Item<'_>], left_out: usize| {
        let bench = Bench::new();
        let mut plain = archive(items);
        plain.truncate(plain.len() - left_out);
        unpack(&bench, &*plain, &ALONE).unwrap();
        names(&bench)
    };
    let (file, some) = (FILE, &b"some"[..]);
    let link = bundle::SYMLINK;
    for (report, items, left_out, expected) in [
        (
            "apple/container 1797: a hard link in a directory without a member",
            &[("bin/app", file, "", some), ("bin/app.runfiles/_main/app", LINK, "bin/app", &b""[..])][..],
            0,
            "/bin/, /bin/app, /bin/app.runfiles/, /bin/app.runfiles/_main/, /bin/app.runfiles/_main/app",
        ),
        (
            "containerd 6991: a whiteout beside what replaces it",
            &[("doc/", DIR, "", b""), ("doc/curl", link, "other", b""), ("doc/.wh.curl", file, "", b"")],
            0,
            "/doc/, /doc/curl link",
        ),
        (
            "kaniko 2308: a whiteout in a directory that a link replaces",
            &[("a/.wh.a", file, "", b""), ("a", link, "b", b""), ("b/", DIR, "", b"")],
            0,
            "/a link, /b/",
        ),
        (
            "kaniko 2308: the same, with the link first",
            &[("a", link, "b", b""), ("a/.wh.a", file, "", b""), ("b/", DIR, "", b"")],
            0,
            "/a link, /b/, /b/a gone",
        ),
        (
            "containerd 4658: whiteouts below a file",
            &[("a", file, "", some), ("a/.wh.b", file, "", b""), ("a/b/.wh..wh..opq", file, "", b"")],
            0,
            "/a",
        ),
        (
            "container2wasm 257: an opaque directory that is nowhere else",
            &[("var/cache/.wh..wh..opq", file, "", b"")],
            0,
            "/var/, /var/cache/ opaque",
        ),
        (
            "clearlinux 1765: a link in the place of a directory, and again a directory",
            &[("sbin/", DIR, "", b""), ("sbin", link, "usr/bin", b""), ("sbin/", DIR, "", b"")],
            0,
            "/sbin/",
        ),
        (
            "AUFS: hard links to a file that is no longer there",
            &[(".wh..wh.plnk/1.2", file, "", some), ("a", LINK, ".wh..wh.plnk/1.2", b""), ("b", LINK, "a", b"")],
            0,
            "/a, /b",
        ),
        ("container-libs 391: an archive without its end", &[("a", file, "", some)], 1024, "/a"),
        ("container-libs 391: and without the padding of its last file", &[("a", file, "", some)], 1024 + 508, "/a"),
    ] {
        assert_eq!(tree(items, left_out), expected, "{report}");
    }
}
