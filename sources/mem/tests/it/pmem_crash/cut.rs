//! What a power cut leaves of media.

use std::ops::Range;

use crate::pmem_common::{Event, Random};

/// Bytes that are written together or not at all.
const UNIT: usize = 8;

/// The media as a power cut would find them.
pub struct Cut {
    durable: Vec<Vec<u8>>,
    /// Units that are written and not durable, in order.
    pending: Vec<(usize, usize, Vec<u8>)>,
}

impl Cut {
    /// Media that hold this, durably.
    pub fn new(durable: Vec<Vec<u8>>) -> Self {
        Self { durable, pending: Vec::new() }
    }

    pub fn follow(&mut self, event: &Event) {
        match event {
            Event::Write { medium, offset, bytes } => {
                // Units, aligned as the medium has them.
                let mut from = 0;
                while from < bytes.len() {
                    let at = offset + from;
                    let count = (UNIT - at % UNIT).min(bytes.len() - from);
                    self.pending.push((*medium, at, bytes[from..from + count].to_vec()));
                    from += count;
                }
            }
            Event::Persist { medium, ranges } => {
                let durable = &mut self.durable;
                let touches = |at: usize, len: usize, range: &Range<u64>| {
                    (at as u64) < range.end && (at + len) as u64 > range.start
                };
                self.pending.retain(|(of, at, unit)| {
                    let done = of == medium && ranges.iter().any(|range| touches(*at, unit.len(), range));
                    if done {
                        durable[*of][*at..*at + unit.len()].copy_from_slice(unit);
                    }
                    !done
                });
            }
        }
    }

    /// What is left: with luck 0 nothing more than the durable, with luck 100 everything.
    pub fn leave(&self, random: &mut Random, luck: u64) -> Vec<Vec<u8>> {
        let mut left = self.durable.clone();
        // Runs of units share their fate, as sectors and pages do, or each has its own.
        let run = [1, 64, 512][random.below(3) as usize];
        let mut lucky = true;
        for (index, (medium, at, unit)) in self.pending.iter().enumerate() {
            if index % run == 0 {
                lucky = random.below(100) < luck;
            }
            if lucky {
                left[*medium][*at..*at + unit.len()].copy_from_slice(unit);
            }
        }
        left
    }
}
