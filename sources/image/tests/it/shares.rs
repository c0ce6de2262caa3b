//! How much many images that are nearly the same take together, beside a store that cuts files where their content says so.

use crate::common;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use common::kernel::mount;
use common::{Bench, facts};
use ferry_image::{Algorithm, Digest, INLINE_BYTES_MAX, Image};

const IMAGES: u64 = 20;
const BLOCK_BYTES: u64 = 4096;
/// The pieces of the ideal store, in bytes.
const PIECE_BYTES_MIN: usize = 4 << 10;
const PIECE_BYTES_MAX: usize = 64 << 10;
/// On average 16 KiB after the least.
const PIECE_MASK: u64 = (1 << 14) - 1;

/// Numbers that look random, the same for each seed (splitmix64).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(count).collect()
    }
}

/// Cuts where a rolling hash of the last bytes says so (gear hash, as FastCDC has it).
fn cut(bytes: &[u8]) -> Vec<&[u8]> {
    let mut noise = Noise(1);
    let gear: [u64; 256] = std::array::from_fn(|_| noise.next());
    let (mut pieces, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let mut hash = 0_u64;
        let mut end = rest.len().min(PIECE_BYTES_MAX);
        for (at, byte) in rest[..end].iter().enumerate() {
            hash = (hash << 1).wrapping_add(gear[usize::from(*byte)]);
            if at >= PIECE_BYTES_MIN && hash & PIECE_MASK == 0 {
                end = at + 1;
                break;
            }
        }
        let (piece, later) = rest.split_at(end);
        pieces.push(piece);
        rest = later;
    }
    pieces
}

/// The ideal store: each piece once.
#[derive(Default)]
struct Ideal(HashMap<Digest, u64>);

impl Ideal {
    fn add(&mut self, bytes: &[u8]) {
        for piece in cut(bytes) {
            self.0.insert(Algorithm::Blake3.of(piece), piece.len() as u64);
        }
    }

    fn bytes(&self) -> u64 {
        self.0.values().sum()
    }
}

fn stored(bench: &Bench) -> u64 {
    let entries = fs::read_dir(bench.store().join("packs")).expect("it is there");
    entries.map(|entry| entry.and_then(|entry| entry.metadata()).expect("it can be looked at").len()).sum()
}

fn path(tree: &Path, number: u64) -> PathBuf {
    tree.join(format!("dir-{}", number % 16)).join(format!("file-{number}"))
}

/// From a few bytes up to 256 KiB, most of them small: a power of two, and a part of the next; 36 KiB on average.
fn large(noise: &mut Noise) -> u64 {
    let bits = 7 + noise.next() % 11;
    (1 << bits) + noise.next() % (1 << bits)
}

/// As in a distribution's root, and in the tree of the benchmark: half of the files below 4 KiB, some empty or tiny, few large; 11 KiB on
/// average.
fn root(noise: &mut Noise) -> u64 {
    let (from, to) = match noise.next() % 100 {
        0..2 => return 0,
        2..10 => (1, 64),
        10..58 => (65, 4096),
        58..87 => (4097, 16 << 10),
        87..98 => (16 << 10, 64 << 10),
        _ => (64 << 10, 384 << 10),
    };
    from + noise.next() % (to - from)
}

/// What twenty images take.
#[derive(Debug)]
struct Taken {
    /// Bytes in packs.
    stored: u64,
    /// Bytes that the ideal store has.
    ideal: u64,
    /// What it costs beside that that each file begins in a block of its own. Files of up to 64 bytes are in the image.
    padding: u64,
}

/// Twenty images, of which each has another twentieth of so many files than the one before, of such sizes.
fn twenty(bench: &Bench, files: u64, size: fn(&mut Noise) -> u64) -> Taken {
    let (mut noise, mut ideal) = (Noise(42), Ideal::default());
    let mut padding = 0;
    for number in 0..16 {
        fs::create_dir(bench.tree().join(format!("dir-{number}"))).expect("directories can be made");
    }
    for image in 0..IMAGES {
        let count = if image == 0 { files } else { files / 20 };
        let mut changed = BTreeSet::new();
        while (changed.len() as u64) < count {
            changed.insert(noise.next() % files);
        }
        for number in changed {
            let count = size(&mut noise);
            let bytes = noise.bytes(usize::try_from(count).expect("it fits"));
            fs::write(path(&bench.tree(), number), &bytes).expect("files can be written");
            ideal.add(&bytes);
            padding += if count > INLINE_BYTES_MAX { count.next_multiple_of(BLOCK_BYTES) - count } else { 0 };
        }
        bench.build(&format!("image-{image}"));
    }
    Taken { stored: stored(bench), ideal: ideal.bytes(), padding }
}

/// As packages change: files are replaced. Files here have 36 KiB on average; the smaller they are, the more it costs that each begins
/// in a block of its own, which is what the kernel maps them by. The last image, whose files are in all packs, is mounted by the kernel.
#[test]
fn twenty_images_take_little_more_than_their_new_data() {
    let bench = Bench::new();
    let taken = twenty(&bench, 400, large);
    eprintln!("{taken:?}");
    assert!(taken.stored * 10 <= taken.ideal * 11, "{taken:?}");
    let name = format!("image-{}", IMAGES - 1);
    let image = Image::open(&bench.path(&name), None).expect("it was built");
    assert_eq!(image.packs().len() as u64, IMAGES);
    let on = bench.path("mounted");
    let Some(_mounted) = mount(&bench, &name, &on) else {
        ferry_skip::skip!("this kernel mounts no images that are files");
        return;
    };
    let (before, after) = (facts(&bench.tree()), facts(&on));
    assert!(before.len() == 417 && before == after, "{} names, {} of them mounted", before.len(), after.len());
}

/// The same with the sizes of a distribution's files, of which the last block is half of what most of them have: that padding, and the
/// packs' indexes, are all that is more than the ideal.
#[test]
fn twenty_images_of_small_files_also_take_their_padding() {
    let taken = twenty(&Bench::new(), 2000, root);
    eprintln!("{taken:?}, {} thousandths of the ideal", taken.stored * 1000 / taken.ideal);
    assert!(taken.stored * 200 <= (taken.ideal + taken.padding) * 201, "{taken:?}");
    assert!(taken.stored * 20 <= taken.ideal * 23, "{taken:?}");
}

/// Twenty images, of which each has other bytes in a twentieth of each of its large files than the one before: ranges of so many bytes,
/// anywhere. Answers bytes in the store, and bytes that the ideal one has.
fn twenty_changed_within(range_bytes: u64) -> (u64, u64) {
    const LARGE: u64 = 4 << 20;
    let bench = Bench::new();
    let (mut noise, mut ideal) = (Noise(43), Ideal::default());
    let mut files: Vec<Vec<u8>> = (0..4).map(|_| noise.bytes(usize::try_from(LARGE).expect("it fits"))).collect();
    for image in 0..IMAGES {
        for (number, bytes) in files.iter_mut().enumerate() {
            let changes = if image == 0 { 0 } else { LARGE / 20 / range_bytes };
            for _ in 0..changes {
                let at = usize::try_from(noise.next() % (LARGE - range_bytes)).expect("it fits");
                let fresh = noise.bytes(usize::try_from(range_bytes).expect("it fits"));
                bytes[at..at + fresh.len()].copy_from_slice(&fresh);
            }
            fs::write(bench.tree().join(number.to_string()), &*bytes).expect("files can be written");
            ideal.add(bytes);
        }
        bench.build(&format!("image-{image}"));
    }
    (stored(&bench), ideal.bytes())
}

/// As databases and disk images change: in the middle.
#[test]
fn twenty_images_with_large_files_that_change_within_share_their_pieces() {
    let (stored, ideal) = twenty_changed_within(200 << 10);
    eprintln!("stored {stored}, ideal {ideal} bytes");
    assert!(stored * 10 <= ideal * 11, "{stored} bytes, ideally {ideal}");
}
