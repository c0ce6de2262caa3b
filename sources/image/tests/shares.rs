//! How much many images that are nearly the same take together, beside a store that cuts files where their content says so.

mod common;

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use common::Bench;
use ferry_image::{Algorithm, Digest};

const IMAGES: u64 = 20;
const FILES: u64 = 400;
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

/// What a file is replaced by.
fn fresh(noise: &mut Noise) -> Vec<u8> {
    // From a few bytes up to 256 KiB, most of them small: a power of two, and a part of the next.
    let bits = 7 + noise.next() % 11;
    let count = (1 << bits) + noise.next() % (1 << bits);
    noise.bytes(usize::try_from(count).expect("it fits"))
}

/// Twenty images, of which each has another twentieth of its files than the one before. Answers bytes in the store, bytes that the
/// ideal one has, and what the blocks that files begin in cost beside that.
fn twenty() -> (u64, u64, u64) {
    let bench = Bench::new();
    let (mut noise, mut ideal) = (Noise(42), Ideal::default());
    let mut padding = 0;
    for number in 0..16 {
        fs::create_dir(bench.tree().join(format!("dir-{number}"))).expect("folders can be made");
    }
    for image in 0..IMAGES {
        let count = if image == 0 { FILES } else { FILES / 20 };
        let mut changed = BTreeSet::new();
        while (changed.len() as u64) < count {
            changed.insert(noise.next() % FILES);
        }
        for number in changed {
            let bytes = fresh(&mut noise);
            fs::write(path(&bench.tree(), number), &bytes).expect("files can be written");
            ideal.add(&bytes);
            padding += (bytes.len() as u64).next_multiple_of(BLOCK_BYTES) - bytes.len() as u64;
        }
        bench.build(&format!("image-{image}"));
    }
    (stored(&bench), ideal.bytes(), padding)
}

/// As packages change: files are replaced. Files here have 36 KiB on average; the smaller they are, the more it costs that each begins
/// in a block of its own, which is what the kernel maps them by.
#[test]
fn twenty_images_take_little_more_than_what_is_new_in_each() {
    let (stored, ideal, padding) = twenty();
    eprintln!("stored {stored}, ideal {ideal}, padding {padding} bytes");
    assert!(stored * 10 <= ideal * 11, "{stored} bytes, {padding} of them padding, ideally {ideal}");
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
