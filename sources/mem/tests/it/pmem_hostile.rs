//! Forged images: opening one ends with a mount or an error, never with a panic.
use crate::pmem_common;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ferry_mem::pmem::format::{BLOCK_BYTES, Superblock};
use ferry_mem::pmem::{Media, Medium, Options, fsck_medium, open_media};
use ferry_vfs::{CreateArgs, FileSystem, Ino};
use pmem_common::{Recording, close, cx, name, put, walk};
use proptest::prelude::*;

fn options() -> Options {
    Options { commit: Some(Duration::ZERO), ..Options::default() }
}

fn media(bytes: Vec<u8>) -> Media {
    let image: Arc<dyn Medium> = Recording::new(bytes, 0, None);
    Media { image, tier2: None }
}

/// A small image with a bit of everything.
static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let medium = Recording::new(vec![0; 1 << 20], 0, None);
    let image: Arc<dyn Medium> = Arc::clone(&medium) as _;
    let fs = open_media(&Media { image, tier2: None }, &options()).unwrap();
    fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &CreateArgs { mode: 0o755, ..CreateArgs::default() }).unwrap();
    for file in [b"a", b"b"] {
        let (ino, handle) = put(&fs, Ino::ROOT, file, 5000, &[1; 9000]).unwrap();
        close(&fs, ino, handle);
    }
    drop(fs);
    medium.contents()
});

/// The image with bytes of its log changed, and its checksums right again.
fn forge(changes: &[(usize, u8)]) -> Vec<u8> {
    let mut image = IMAGE.clone();
    let superblock = Superblock::decode(&image).unwrap();
    let start = usize::try_from(superblock.layout.log_offset(superblock.generation)).unwrap();
    let mut at = start;
    loop {
        let word = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap());
        let bytes = word(at) as usize;
        let sequence = u64::from_le_bytes(image[at + 8..at + 16].try_into().unwrap());
        if bytes == 0 || sequence >> 32 != superblock.generation {
            break;
        }
        for (index, byte) in changes {
            if bytes > 0 {
                image[at + 16 + index % bytes] ^= byte;
            }
        }
        let sum = crc32c::crc32c_append(superblock.salt, &image[at..at + 4]);
        let sum = crc32c::crc32c_append(sum, &image[at + 8..at + 16 + bytes]);
        image[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
        at += 16 + bytes.next_multiple_of(8);
    }
    assert!(at > start);
    image
}

fn survive(image: Vec<u8>) {
    let media = media(image);
    let checked = fsck_medium(&media, false);
    if let Ok(fs) = open_media(&media, &options()) {
        assert!(checked.is_ok());
        let _ = walk(&fs);
        let _ = put(&fs, Ino::ROOT, b"new", 0, &[1; 5000]).map(|(ino, handle)| close(&fs, ino, handle));
    }
    if fsck_medium(&media, true).is_ok_and(|report| report.repaired) {
        let report = fsck_medium(&media, false).unwrap();
        assert!(report.is_clean(), "what is repaired is sound: {report:?}");
    }
}

#[test]
fn the_unchanged_image_is_sound() {
    let media = media(forge(&[]));
    assert!(fsck_medium(&media, false).unwrap().is_clean());
    assert_eq!(walk(&open_media(&media, &options()).unwrap()).len(), 3);
}

/// Where a changed bit must be noticed: both superblocks and the snapshot. What follows the snapshot ends there, as after a
/// crash.
#[test]
fn every_kind_of_flipped_bit_is_detected_and_repaired() {
    let superblock = Superblock::decode(&IMAGE).unwrap();
    let start = usize::try_from(superblock.layout.log_offset(superblock.generation)).unwrap();
    let copies = (0..92).step_by(5).chain(4096..4188);
    let log = (start..start + 400).step_by(3);
    let mut noticed = 0;
    for (index, at) in copies.chain(log).enumerate() {
        let mut image = IMAGE.clone();
        image[at] ^= 1 << (index % 8);
        let media = media(image);
        let report = fsck_medium(&media, false).unwrap();
        let must = at < start + 16;
        assert!(!must || !report.is_clean(), "byte {at}: {report:?}");
        noticed += usize::from(!report.is_clean());
        let repaired = fsck_medium(&media, true).unwrap();
        assert_eq!(repaired.repaired, !report.is_clean(), "byte {at}: {repaired:?}");
        assert!(fsck_medium(&media, false).unwrap().is_clean(), "byte {at}");
        let world = walk(&open_media(&media, &options()).unwrap());
        assert!(at >= 8192 || world.len() == 3, "byte {at}: one superblock is enough");
    }
    assert!(noticed > 100, "{noticed}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_forged_log_is_survived(changes in prop::collection::vec((0usize..1000, 1u8..), 1..4)) {
        survive(forge(&changes));
    }

    #[test]
    fn forged_bytes_are_survived(at in 0usize..3 * 4096, bytes in prop::collection::vec(any::<u8>(), 1..64)) {
        let mut image = IMAGE.clone();
        image[at..at + bytes.len()].copy_from_slice(&bytes);
        survive(image);
    }

    #[test]
    fn a_forged_superblock_is_survived(field in 2usize..10, value in prop_oneof![any::<u64>(), 0u64..2000, Just(u64::MAX)]) {
        let mut image = IMAGE.clone();
        for copy in [0, usize::try_from(BLOCK_BYTES).unwrap()] {
            image[copy + field * 8..copy + field * 8 + 8].copy_from_slice(&value.to_le_bytes());
            let sum = crc32c::crc32c(&image[copy..copy + 92]);
            image[copy + 92..copy + 96].copy_from_slice(&sum.to_le_bytes());
        }
        survive(image);
    }
}

/// A disk that gives nothing but errors.
#[derive(Debug)]
struct Dead;

impl Medium for Dead {
    fn bytes(&self) -> u64 {
        1 << 20
    }

    fn look(&self, _: u64, _: usize, _: &mut dyn FnMut(&[u8])) -> std::io::Result<()> {
        Err(std::io::Error::other("the disk is dead"))
    }

    fn edit(&self, _: u64, _: usize, _: &mut dyn FnMut(&mut [u8]) -> usize) -> std::io::Result<usize> {
        unreachable!("what cannot be read is not written to")
    }

    fn persist(&self, _: &[std::ops::Range<u64>]) -> std::io::Result<()> {
        unreachable!("what cannot be read is not written to")
    }
}

/// An image that cannot be read is not taken for something else, which one could empty.
#[test]
fn unreadable_parts_are_reported_and_left_unchanged() {
    let media = Media { image: Arc::new(Dead), tier2: None };
    for error in [fsck_medium(&media, true).unwrap_err(), open_media(&media, &options()).unwrap_err()] {
        let text = error.to_string();
        assert!(text.contains("cannot be read (the disk is dead)") && !text.contains("empty it"), "{text}");
    }
}
