//! What can be wrong with an image, one thing after the other: what `fsck` calls it, and that who reads it gets EIO and no panic.

use crate::common;

use std::collections::BTreeSet;
use std::fs;
use std::sync::OnceLock;

use common::Bench;
use common::damaged::{
    DEVICE_BLOCKS, DEVICE_BYTES, DEVICE_FIRST_BLOCK, DEVICES, Damaged, FORMAT, KIND, MODE, NAME_OFFSET, NLINK, NSEC,
    PLACE, SIZE, SUPER_INODES, SUPER_XATTR_BLOCK, XATTR_COUNT, bench, composefs_bench,
};
use common::readers::{Log, ask_all};
use ferry_image::erofs::SUPER_OFFSET;
use ferry_image::{Image, Source, check};
use ferry_vfs::Errno;
use proptest::prelude::*;

/// Where the device table of the flat image ends, which has two packs.
const DEVICES_END: usize = DEVICES + 2 * DEVICE_BYTES;

/// Changes an image.
type Damage = fn(&mut Damaged);

/// What no reader can get over: how the finding begins, and what makes it.
const FLAWS: [(&str, Damage); 36] = [
    ("/far: the end of the image in the middle of a structure", |image| {
        image.put_u64(image.line("", "far").0, 1 << 40);
    }),
    ("/far: an inode number outside of the image", |image| {
        image.put_u64(image.line("", "far").0, u64::MAX);
    }),
    ("/far: the end of the image in the middle of a structure", |image| {
        image.put_u64(image.line("", "far").0, image.bytes.len() as u64 / 32);
    }),
    ("/a: an inode number outside of the image", |image| {
        image.put_u64(image.line("", "a").0, u64::MAX);
    }),
    ("/far: an inode of an unknown layout", |image| image.put_u16(image.inode("far") + FORMAT, 1 << 1)),
    ("/older: a time with more than a second of nanoseconds", |image| {
        image.put_u32(image.inode("older") + NSEC, 1_000_000_000);
    }),
    ("/far: attributes that end outside of the image", |image| {
        image.put_u16(image.inode("far") + XATTR_COUNT, u16::MAX);
    }),
    ("/far: data that end outside of their pack", |image| image.put_u32(image.inode("far") + SIZE, 1 << 30)),
    ("/tiny: data behind an inode that cross a block", |image| image.put_u32(image.inode("tiny") + SIZE, 4095)),
    ("/long: data outside of the image", |image| image.put_u32(image.inode("long") + PLACE, 0xffff_0000)),
    ("/a: a directory outside of the image", |image| {
        let first = image.u32(DEVICES + DEVICE_FIRST_BLOCK);
        image.put_u16(image.inode("a") + FORMAT, 0);
        image.put_u32(image.inode("a") + PLACE, first);
    }),
    ("/mixed: chunks outside of the image", |image| image.put_u32(image.inode("mixed") + SIZE, u32::MAX)),
    ("/mixed: chunks that are not of 64 KiB", |image| image.put_u32(image.inode("mixed") + PLACE, 5)),
    ("/mixed: a piece outside of all packs", |image| image.put_u32(image.tail("mixed"), 0)),
    ("/mixed: a piece that ends outside of its pack", |image| {
        // The last block before the second pack.
        let second = image.u32(DEVICES + DEVICE_BYTES + DEVICE_FIRST_BLOCK);
        image.put_u32(image.tail("mixed"), second - 1);
    }),
    ("/link: a link without a target", |image| image.put_u32(image.inode("link") + SIZE, 0)),
    ("/long: a link without a target", |image| image.put_u32(image.inode("long") + SIZE, 4096)),
    ("/link: a link with a byte of zero", |image| image.put(image.tail("link"), &[0])),
    ("/a: a directory's block with an impossible number of entries", |image| {
        image.put_u16(image.line("a", ".").0 + NAME_OFFSET, 13);
    }),
    ("/a: a directory's block with an impossible number of entries", |image| {
        image.put_u16(image.line("a", ".").0 + NAME_OFFSET, 0);
    }),
    ("/a: a directory's block with an impossible number of entries", |image| {
        image.put_u16(image.line("a", ".").0 + NAME_OFFSET, 12 * 100);
    }),
    ("/empty: a directory's block without entries", |image| image.put_u32(image.inode("empty") + SIZE, 5)),
    ("/a: a name outside of its block", |image| image.put_u16(image.line("a", "b").0 + NAME_OFFSET, u16::MAX)),
    ("/a: an invalid name", |image| image.put(image.line("a", "b").1, b"/")),
    ("/a: an invalid name", |image| image.put(image.line("a", "file").1 + 1, b"/")),
    ("/a: an invalid name", |image| image.put(image.line("a", "b").1, &[0])),
    ("/a: an invalid name", |image| {
        // Both names begin at one place, so that the first one is empty.
        let at = image.u16(image.line("a", "b").0 + NAME_OFFSET);
        image.put_u16(image.line("a", "file").0 + NAME_OFFSET, at);
    }),
    ("/many: an invalid name", |image| {
        // One name, as long as the block.
        let line = image.line("many", ".").0;
        image.put_u16(line + NAME_OFFSET, 12);
        image.put(line + 12, &[b'n'; 4096 - 12]);
    }),
    ("/attributes: an attribute of an unknown kind", |image| {
        image.put(image.find("attributes", b"one1") - 3, &[9]);
    }),
    ("/attributes: an attribute that is cut off", |image| {
        image.put(image.find("attributes", b"one1") - 4, &[u8::MAX]);
    }),
    ("/attributes: an attribute that is cut off", |image| {
        image.put_u16(image.find("attributes", b"one1") - 2, u16::MAX);
    }),
    ("/attributes: an attribute of another kind than it says", |image| {
        image.put(image.find("attributes", b"user.x3") - 3, &[0]);
    }),
    ("/attributes: an attribute with an invalid name", |image| image.put(image.find("attributes", b"one1") + 1, &[0])),
    ("/attributes: the end of the image in the middle of a structure", |image| {
        image.put_u32(image.xattrs("attributes") + 12, u32::MAX);
    }),
    ("/attributes: the end of the image in the middle of a structure", |image| {
        image.put(image.xattrs("attributes") + 4, &[u8::MAX]);
    }),
    ("/attributes: the end of the image in the middle of a structure", |image| {
        // Room for less than what attributes begin with.
        image.put_u16(image.inode("attributes") + XATTR_COUNT, 1);
        image.put(image.xattrs("attributes") + 4, &[1]);
    }),
];

/// What only `fsck` looks for.
const FINDINGS: [(&str, Damage); 27] = [
    ("/: the image ends after", |image| image.bytes.truncate(image.bytes.len() - 1)),
    ("/a/file: not in the order of names, or twice", |image| image.put(image.line("a", "b").1, b"z")),
    ("/pair/x1: not in the order of names, or twice", |image| image.put(image.line("pair", "x2").1, b"x1")),
    ("/attributes: an attribute twice", |image| image.put(image.find("attributes", b"two2"), b"one")),
    ("/a: an attribute of a kind of which the image says that there is none", |image| {
        image.put(SUPER_OFFSET + 64 + 15, &[1]);
    }),
    ("/a/.: leads to another directory than it should", |image| {
        image.put_u64(image.line("a", ".").0, image.nid("empty").0);
    }),
    ("/a/b/..: leads to another directory than it should", |image| {
        image.put_u64(image.line("a/b", "..").0, image.nid("").0);
    }),
    ("/a: no . or no ..", |image| image.put(image.line("a", "..").1, b".x")),
    ("/a: no . or no ..", |image| image.put(image.line("a", ".").1, b"-")),
    ("/far: another kind of file than its directory says", |image| image.put(image.line("", "far").0 + KIND, &[7])),
    ("/far: another kind of file than its directory says", |image| {
        image.put(image.line("", "far").0 + KIND, &[0]);
        image.put_u16(image.inode("far") + MODE, 0o644);
    }),
    ("/a/b: a directory that has another name already", |image| {
        image.put_u64(image.line("a", "b").0, image.nid("empty").0);
    }),
    ("/a: 9 links, but 1 directories in it", |image| image.put_u16(image.inode("a") + NLINK, 9)),
    ("/far: 2 links, but 1 names", |image| image.put_u16(image.inode("far") + NLINK, 2)),
    ("/far-2: 1 links, but 2 names", |image| image.put_u16(image.inode("far-2") + NLINK, 1)),
    ("/older: 7 links, but 1 names", |image| image.put_u32(image.inode("older") + 44, 7)),
    ("/mixed-2: more pieces than there is room for", |image| {
        // Each has as many as reach to the end of the image.
        for name in ["mixed", "mixed-2"] {
            let count = (image.bytes.len() - image.tail(name)) / 4;
            let bytes = u32::try_from(count << 16).expect("the image is small");
            image.put_u32(image.inode(name) + SIZE, bytes);
        }
    }),
    ("/: 170 inodes, but the superblock says 99", |image| image.put_u64(SUPER_INODES, 99)),
    ("/far-2: overlaps /far at block 1 of the pack ", |image| {
        // From its second block on.
        let at = image.u32(image.inode("far") + PLACE);
        image.put_u32(image.inode("far-2") + PLACE, at + 1);
    }),
    ("/far-2: overlaps /far at block 0 of the pack ", |image| {
        // All of it, and more.
        let at = image.u32(image.inode("far") + PLACE);
        image.put_u32(image.inode("far-2") + PLACE, at);
    }),
    ("/far: overlaps /mixed at block ", |image| {
        // A whole piece, and more of the next one than there is of the other's last.
        let at = image.u32(image.tail("mixed") + 8);
        image.put_u32(image.inode("far") + PLACE, at);
        image.put_u32(image.inode("far") + SIZE, 70_000);
    }),
    ("/mixed-2: overlaps /mixed at block ", |image| {
        // Pieces at other places than the other's.
        let at = image.u32(image.tail("mixed"));
        image.put_u32(image.tail("mixed-2"), at + 1);
    }),
    ("overlaps /tiny at byte ", |image| image.put_u32(image.inode("tiny") + SIZE, 90)),
    ("/many: overlaps /long at byte ", |image| {
        let at = image.u32(image.inode("many") + PLACE);
        image.put_u32(image.inode("long") + PLACE, at);
    }),
    ("overlaps /far at byte 0 of the image", |image| image.put_u64(image.line("", "far").0, 0)),
    ("overlaps /attributes at byte ", |image| {
        // An attribute that both share is where the other has its own.
        let at = image.find("attributes", b"one1") - 4;
        image.put_u32(SUPER_XATTR_BLOCK, 0);
        for name in ["a", "attributes"] {
            image.put_u32(image.xattrs(name) + 12, u32::try_from(at / 4).expect("the image is small"));
        }
    }),
    ("/far: 65535 links, but 1 names", |image| image.put_u16(image.inode("far") + NLINK, u16::MAX)),
];

/// What is found when an image is opened.
const REFUSALS: [(&str, Damage); 12] = [
    ("no magic number of EROFS", |image| image.put(SUPER_OFFSET, &[0])),
    ("blocks that are not 4 KiB", |image| image.put(SUPER_OFFSET + 12, &[13])),
    ("blocks that are not 4 KiB", |image| image.put(SUPER_OFFSET + 90, &[1])),
    ("features that Ferry does not know", |image| image.put(SUPER_OFFSET + 80, &[1])),
    ("the first version of the layout flat", |image| image.put(SUPER_OFFSET + 64, b"ferry flat\0")),
    ("a device that is no pack", |image| image.put(DEVICES + DEVICE_BYTES, b"x")),
    ("devices that overlap", |image| {
        let first = image.u32(DEVICES + DEVICE_FIRST_BLOCK);
        image.put_u32(DEVICES + DEVICE_BYTES + DEVICE_FIRST_BLOCK, first);
    }),
    ("devices that overlap", |image| image.put_u32(DEVICES + DEVICE_FIRST_BLOCK, 0)),
    ("a device that ends after the last block", |image| {
        // The kernel reads zeros there.
        let blocks = image.u32(DEVICES + DEVICE_BYTES + DEVICE_BLOCKS);
        image.put_u32(DEVICES + DEVICE_BYTES + DEVICE_FIRST_BLOCK, u32::MAX - blocks + 1);
    }),
    ("inodes that begin at another block", |image| image.put_u32(SUPER_OFFSET + 40, 1)),
    ("the end of the image in the middle of a structure", |image| image.put_u16(SUPER_OFFSET + 88, u16::MAX)),
    ("a root that is not a directory", |image| image.put_u16(image.inode("") + MODE, 0o100_644)),
];

/// What no reader of an image of composefs's can get over.
const COMPOSEFS_FLAWS: [(&str, Damage); 7] = [
    ("/far: chunks that are no holes", |image| image.put(image.tail("far"), &[0])),
    ("/far: chunks that are no holes", |image| image.put_u32(image.inode("far") + PLACE, 32)),
    ("/far: chunks outside of the image", |image| {
        // The file is as long as its chunks can tell, and each has one block.
        image.put_u32(image.inode("far") + SIZE, u32::MAX);
        image.put_u32(image.inode("far") + PLACE, 0);
    }),
    ("/a/file: an invalid redirect", |image| {
        let at = image.find("a/file", b"overlay.redirect");
        image.put(at + b"overlay.redirect".len(), b"x");
    }),
    ("/a/file: a digest of an unknown kind", |image| {
        // The algorithm is the fourth byte of what the attribute has.
        let at = image.find("a/file", b"overlay.metacopy");
        image.put(at + b"overlay.metacopy".len() + 3, &[9]);
    }),
    ("/a/file: an attribute that is cut off", |image| {
        let at = image.find("a/file", b"overlay.metacopy");
        image.put_u16(at - 2, u16::MAX);
    }),
    ("/tiny: data behind an inode that cross a block", |image| image.put_u32(image.inode("tiny") + SIZE, 4095)),
];

/// A tree, its image and its store, made once.
struct Made {
    bench: Bench,
    image: Vec<u8>,
}

impl Made {
    fn of(bench: Bench) -> Self {
        let image = fs::read(bench.path("image")).expect("it was built");
        Self { bench, image }
    }

    fn flat() -> &'static Self {
        static MADE: OnceLock<Made> = OnceLock::new();
        MADE.get_or_init(|| Self::of(bench()))
    }

    fn composefs() -> &'static Self {
        static MADE: OnceLock<Made> = OnceLock::new();
        MADE.get_or_init(|| Self::of(composefs_bench()))
    }

    fn damaged(&self, damage: Damage) -> Vec<u8> {
        let mut damaged = Damaged::new(&self.image);
        damage(&mut damaged);
        damaged.bytes
    }

    /// What `fsck` finds of damage that does not keep the image from being opened.
    fn findings(&self, damage: Damage) -> Vec<String> {
        let image = Image::from_bytes(self.damaged(damage)).expect("it can be opened all the same");
        check(&image).findings
    }
}

#[test]
fn fsck_names_each_error() {
    let (flat, composefs) = (Made::flat(), Made::composefs());
    for made in [flat, composefs] {
        assert_eq!(made.findings(|_| ()), Vec::<String>::new());
    }
    let of_flat = FLAWS.iter().chain(&FINDINGS).map(|damage| (flat, damage));
    let mut missed = Vec::new();
    for (made, (expected, damage)) in of_flat.chain(COMPOSEFS_FLAWS.iter().map(|damage| (composefs, damage))) {
        let findings = made.findings(*damage);
        if !findings.iter().any(|finding| finding.contains(expected)) {
            missed.push((expected, findings));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn other_files_are_not_opened_as_images() {
    for (expected, damage) in REFUSALS {
        let said = Image::from_bytes(Made::flat().damaged(damage)).expect_err(expected).to_string();
        assert!(said.contains(expected), "{said}\nbut expected: {expected}");
    }
}

/// All that a source may answer where an image is damaged, beside what is so in a sound one: the last two are for inode numbers that
/// clients cannot have from us, and for a directory that is none any more.
fn expected_errors() -> BTreeSet<i32> {
    let sound = [Errno::INVAL, Errno::NODATA, Errno::NOTDIR, Errno::NXIO];
    sound.into_iter().chain([Errno::IO, Errno::STALE, Errno::NOENT]).map(Errno::raw_os_error).collect()
}

#[test]
fn readers_of_invalid_metadata_get_eio_and_a_log_line() {
    let (flat, composefs) = (Made::flat(), Made::composefs());
    let mut missed = Vec::new();
    let of_flat = FLAWS.iter().map(|damage| (flat, damage));
    for (made, (expected, damage)) in of_flat.chain(COMPOSEFS_FLAWS.iter().map(|damage| (composefs, damage))) {
        let image = Image::from_bytes(made.damaged(*damage)).expect("it can be opened all the same");
        let source = Source::open_idle(image, &made.bench.store()).expect("the store is whole");
        let (errors, log) = Log::of(|| ask_all(&source));
        let what = expected.split_once(": ").expect("a path and what it is").1;
        let is_told = log.iter().any(|line| line.starts_with(&format!("the image is damaged: {what} at byte ")));
        if !is_told || !errors.contains(&Errno::IO.raw_os_error()) || !errors.is_subset(&expected_errors()) {
            missed.push((expected, errors, log));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// What there is to compare with: the same questions to sound images.
#[test]
fn nothing_is_refused_in_a_sound_image() {
    for made in [Made::flat(), Made::composefs()] {
        let image = Image::from_bytes(made.image.clone()).expect("it is whole");
        let source = Source::open_idle(image, &made.bench.store()).expect("the store is whole");
        let (errors, log) = Log::of(|| ask_all(&source));
        let expected = [Errno::INVAL, Errno::NODATA, Errno::NOTDIR, Errno::NXIO].map(Errno::raw_os_error);
        assert!(errors.is_subset(&expected.into()), "{errors:?} {log:?}");
        assert_eq!(log, Vec::<String>::new());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Whatever stands in an image: its readers get an answer or an error, none of which is a panic.
    #[test]
    fn readers_survive_any_change_of_an_image(
        is_composefs in any::<bool>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0), Just(0xff), any::<u8>()]), 1..30),
    ) {
        let made = if is_composefs { Made::composefs() } else { Made::flat() };
        let mut bytes = made.image.clone();
        for (at, byte) in changes {
            // Not the names of packs: without them there is no source.
            let at = at.index(bytes.len() - DEVICES_END) + DEVICES_END;
            bytes[at] = byte;
        }
        if let Ok(image) = Image::from_bytes(bytes) {
            let source = Source::open_idle(image, &made.bench.store()).expect("the store is whole");
            let (errors, _) = Log::of(|| ask_all(&source));
            prop_assert!(errors.is_subset(&expected_errors()), "{errors:?}");
        }
    }
}
