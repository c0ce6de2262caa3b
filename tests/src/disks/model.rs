//! What a disk must hold, sector by sector, while requests to it are under way.

use std::ops::Range;

/// The unit of everything here.
pub const SECTOR_BYTES: usize = 512;

/// How many sectors requests have: less than a block, a block, many.
const LENGTHS: [usize; 7] = [1, 3, 8, 8, 16, 64, 128];
/// How often a place is looked for where nothing is under way.
const TRIES: usize = 8;

/// Numbers that look random, the same ones for the same seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Begins a series.
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below a bound (xorshift64*).
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap_or(usize::MAX) % bound
    }
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads, and compares.
    Read,
    /// Writes what no write wrote before.
    Write,
    /// Makes all durable.
    Flush,
    /// Makes zeros, one way or the other.
    Zero {
        /// By a discard, and not by a write of zeros.
        discard: bool,
    },
}

/// A request under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub kind: Kind,
    /// Where.
    pub sectors: Range<usize>,
    stamp: u64,
}

impl Request {
    /// How many bytes it is about.
    pub fn bytes(&self) -> usize {
        self.sectors.len() * SECTOR_BYTES
    }

    /// What a write writes.
    pub fn data(&self) -> Vec<u8> {
        self.sectors.clone().flat_map(|sector| contents(self.stamp, sector)).collect()
    }
}

/// A disk as it must be. No two requests that are under way touch the same sector, so at each moment each sector has one
/// right content.
#[derive(Debug)]
pub struct Model {
    /// The write that a sector is of; 0: it is zeros.
    stamps: Vec<u64>,
    busy: Vec<bool>,
    random: Random,
    last_stamp: u64,
    discards: bool,
}

impl Model {
    /// A disk of zeros. `discards`: what is discarded on it is zeros.
    pub fn new(sectors: usize, seed: u64, discards: bool) -> Self {
        let (stamps, busy) = (vec![0; sectors], vec![false; sectors]);
        Self { stamps, busy, random: Random::new(seed), last_stamp: 0, discards }
    }

    /// How many sectors there are.
    pub fn sectors(&self) -> usize {
        self.stamps.len()
    }

    /// Some request, if there is a place for it.
    pub fn draw(&mut self) -> Option<Request> {
        let kind = match self.random.below(20) {
            0..8 => Kind::Read,
            8..17 => Kind::Write,
            17 => Kind::Flush,
            number => Kind::Zero { discard: self.discards && number == 18 },
        };
        if kind == Kind::Flush {
            return Some(Request { kind, sectors: 0..0, stamp: 0 });
        }
        (0..TRIES).find_map(|_| {
            let length = LENGTHS[self.random.below(LENGTHS.len())];
            let begin = self.random.below(self.sectors() - length);
            // Mostly whole blocks, as a file system has it.
            let begin = if length.is_multiple_of(8) && self.random.below(4) > 0 { begin / 8 * 8 } else { begin };
            self.begin(kind, begin..begin + length)
        })
    }

    /// A request of this kind and place, unless something is under way there.
    pub fn begin(&mut self, kind: Kind, sectors: Range<usize>) -> Option<Request> {
        let busy = &mut self.busy[sectors.clone()];
        if busy.contains(&true) {
            return None;
        }
        busy.fill(true);
        self.last_stamp += 1;
        Some(Request { kind, sectors, stamp: self.last_stamp })
    }

    /// A request has ended; what a read has read is compared.
    ///
    /// # Panics
    /// When it is not what it should be.
    #[track_caller]
    pub fn ended(&mut self, request: &Request, read: &[u8]) {
        let stamp = match request.kind {
            Kind::Flush => return,
            Kind::Read => {
                assert_eq!(read.len(), request.bytes(), "{request:?}");
                for (sector, bytes) in request.sectors.clone().zip(read.chunks(SECTOR_BYTES)) {
                    self.check(sector, bytes);
                }
                self.busy[request.sectors.clone()].fill(false);
                return;
            }
            Kind::Write => request.stamp,
            Kind::Zero { .. } => 0,
        };
        self.stamps[request.sectors.clone()].fill(stamp);
        self.busy[request.sectors.clone()].fill(false);
    }

    /// Compares a whole disk on which nothing is under way.
    ///
    /// # Panics
    /// When a sector is not what it should be.
    #[track_caller]
    pub fn check_all(&self, disk: &[u8]) {
        assert_eq!(disk.len(), self.sectors() * SECTOR_BYTES);
        assert!(!self.busy.contains(&true), "something is under way");
        for (sector, bytes) in disk.chunks(SECTOR_BYTES).enumerate() {
            self.check(sector, bytes);
        }
    }

    #[track_caller]
    fn check(&self, sector: usize, bytes: &[u8]) {
        let stamp = self.stamps[sector];
        if bytes == contents(stamp, sector) {
            return;
        }
        let words: Vec<u64> = bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        let found = (0..=self.last_stamp).find(|stamp| bytes == contents(*stamp, sector));
        let torn = words.iter().zip(contents(stamp, sector).chunks(8)).filter(|(a, b)| a.to_le_bytes() == *b).count();
        panic!(
            "sector {sector} must be of write {stamp} of {}; it is of {found:?}, {torn} of 64 words are right",
            self.last_stamp
        );
    }
}

/// What a write leaves in a sector: each word tells write, sector and place.
fn contents(stamp: u64, sector: usize) -> [u8; SECTOR_BYTES] {
    let mut bytes = [0; SECTOR_BYTES];
    if stamp != 0 {
        for (place, word) in bytes.chunks_mut(8).enumerate() {
            let number = stamp.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (sector as u64) << 20 ^ place as u64;
            word.copy_from_slice(&number.to_le_bytes());
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_doubled_and_torn_writes_are_detected() {
        let caught = |spoil: fn(&mut Vec<u8>, &[Vec<u8>; 2])| {
            let mut model = Model::new(64, 1, true);
            let mut disk = vec![0; 64 * SECTOR_BYTES];
            let writes = [(); 2].map(|()| {
                let write = model.begin(Kind::Write, 8..16).unwrap();
                assert!(model.begin(Kind::Read, 15..17).is_none(), "no two requests overlap");
                model.ended(&write, &[]);
                write.data()
            });
            disk[8 * SECTOR_BYTES..16 * SECTOR_BYTES].copy_from_slice(&writes[1]);
            spoil(&mut disk, &writes);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.check_all(&disk))).is_err()
        };
        assert!(!caught(|_, _| {}));
        assert!(caught(|disk, _| disk[8 * SECTOR_BYTES..9 * SECTOR_BYTES].fill(0)), "lost");
        assert!(caught(|disk, writes| disk[8 * SECTOR_BYTES..][..8].copy_from_slice(&writes[0][..8])), "doubled, torn");
        assert!(
            caught(|disk, writes| disk[16 * SECTOR_BYTES..][..512].copy_from_slice(&writes[1][..512])),
            "elsewhere"
        );
    }
}
