//! Moving data between the tiers.
//!
//! Files that were not used for a while (see `heat`) move to the second tier when the first is fuller than
//! [`HIGH_PERCENT`], or a writer finds no room. A file that is read there moves back while the first tier is below
//! [`LOW_PERCENT`]; a written part moves back at once, because writes only go to the first tier. Bytes are copied
//! without the file's lock and synced. Then the record is logged, unless the file changed meanwhile. The old blocks
//! become free when that record is durable.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use ferry_engine::{IoMode, Operation, Segment, Transfers};
use ferry_vfs::{Backing, Result};

use super::disk::{Disk, File, Tier, io_error};
use super::extents::{Piece, Run};
use super::file::lay_out;
use super::format::{BLOCK, TIER2_FIRST};
use super::log::{Effects, Growth};
use super::medium::Ranges;

/// From this fill level of the first tier, cold data move to the second.
const HIGH_PERCENT: u64 = 80;
/// Up to this fill level of the first tier, used data move back.
const LOW_PERCENT: u64 = 60;
/// The blocks of one batch, 4 MiB: a batch takes memory, and a writer may wait for it.
const BATCH_BLOCKS: u64 = 1024;
/// The batches per round of [`Disk::balance`] in each direction, 64 MiB: commits must not wait longer.
const ROUND_BATCHES: u64 = 16;
/// The maximum number of files that a batch examines; the next round continues.
const VISITS_MAX: usize = 4096;
/// The blocks of one transfer, 1 MiB: longer ones are not faster.
const TRANSFER_BLOCKS: u64 = 256;
/// Transfers in flight.
const TRANSFERS_MAX: u32 = 16;

/// A part of a file being moved.
struct Part {
    from: Piece,
    bytes: Vec<u8>,
    to: Vec<Run>,
}

/// Where to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Out,
    Back,
}

impl Disk {
    /// Frees blocks, until there are more than `free_before`; returns `false` if no more can be freed.
    pub(crate) fn make_room(&self, free_before: u64) -> Result<bool> {
        let has_more = || self.tier1.blocks.free_blocks() > free_before;
        if self.log.is_full() {
            return Ok(false);
        }
        if has_more() {
            return Ok(true);
        }
        self.sync_log()?;
        if has_more() {
            return Ok(true);
        }
        // Once around the ring to find out what is used, and once more.
        let moved = self.demote(BATCH_BLOCKS, self.heat.files().saturating_mul(2))?;
        if moved > 0 {
            self.sync_log()?;
        }
        Ok(has_more())
    }

    /// Moves some cold data out, and some warm data back.
    pub(crate) fn balance(&self) {
        if self.tier2.is_none() {
            return;
        }
        let used = |free: u64| (self.tier1.blocks.blocks() - free) * 100;
        let above = |percent| used(self.tier1.blocks.free_blocks()) > percent * self.tier1.blocks.blocks();
        for _ in 0..ROUND_BATCHES {
            let moved = match () {
                () if above(HIGH_PERCENT) => self.demote(BATCH_BLOCKS, VISITS_MAX),
                () if !above(LOW_PERCENT) => self.promote(BATCH_BLOCKS),
                () => Ok(0),
            };
            match moved.and_then(|moved| self.sync_log().map(|()| moved)) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!("cannot move data between the tiers: {error}");
                    break;
                }
            }
        }
    }

    /// Moves up to this many blocks of cold files to the second tier; examines `visits_max` files; returns how many.
    pub(crate) fn demote(&self, blocks: u64, visits_max: usize) -> Result<u64> {
        let Some(tier2) = &self.tier2 else { return Ok(0) };
        let mut moved = 0;
        for _ in 0..visits_max {
            if moved >= blocks || tier2.blocks.free_blocks() == 0 {
                break;
            }
            let Some(file) = self.heat.next(|ino| self.file(ino)) else { break };
            if !file.cool() {
                moved += self.move_file(&file, blocks - moved, Direction::Out)?;
            }
        }
        Ok(moved)
    }

    /// Moves up to this many blocks of warm files back; returns how many.
    pub(crate) fn promote(&self, blocks: u64) -> Result<u64> {
        let mut moved = 0;
        while moved < blocks {
            let Some(file) = self.heat.next_warm(|ino| self.file(ino)) else { break };
            let now = self.move_file(&file, blocks - moved, Direction::Back)?;
            moved += now;
            if now > 0 && moved >= blocks {
                // The file may have more.
                self.heat.warm_up(&file);
            }
        }
        Ok(moved)
    }

    /// Moves up to this many blocks of a file; returns how many.
    fn move_file(&self, file: &File, blocks: u64, direction: Direction) -> Result<u64> {
        let Some(tier2) = &self.tier2 else { return Ok(0) };
        let target = if direction == Direction::Out { tier2 } else { &self.tier1 };
        let (mut parts, version) = self.pick(file, blocks, direction)?;
        for index in 0..parts.len() {
            match target.blocks.take(parts[index].from.count, None, 0) {
                Some(runs) => parts[index].to = runs,
                None => {
                    parts.truncate(index);
                    break;
                }
            }
        }
        let copied = copy(target, &parts).map_err(|error| io_error(&error));
        let moved = copied.and_then(|()| self.switch(file, version, target, &parts));
        if !matches!(moved, Ok(count) if count > 0) {
            parts.iter().for_each(|part| target.blocks.put(&part.to));
        }
        moved
    }

    /// Returns copies of what can be moved, and the file's version.
    fn pick(&self, file: &File, blocks: u64, direction: Direction) -> Result<(Vec<Part>, u64)> {
        let state = file.read();
        let mut parts = Vec::new();
        let mut missing = blocks;
        let suits = |piece: &Piece| piece.written && (piece.block < TIER2_FIRST) == (direction == Direction::Out);
        for piece in state.extents.all().filter(suits) {
            let mut done = 0;
            while done < piece.count && missing > 0 {
                let count = (piece.count - done).min(TRANSFER_BLOCKS).min(missing);
                let from = Piece { logical: piece.logical + done, block: piece.block + done, count, ..piece };
                let mut bytes = Vec::new();
                let wanted = usize::try_from(count).unwrap_or(0) * BLOCK;
                self.look(from.block, 0, wanted, &mut |seen| bytes.extend_from_slice(seen))?;
                parts.push(Part { from, bytes, to: Vec::new() });
                done += count;
                missing -= count;
            }
            if missing == 0 {
                break;
            }
        }
        Ok((parts, state.version))
    }

    /// Switches the file to the copies, if it has not changed.
    fn switch(&self, file: &File, version: u64, target: &Tier, parts: &[Part]) -> Result<u64> {
        let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return Ok(0) };
        let _change = self.change();
        let mut state = file.write();
        if state.version != version || state.removed {
            return Ok(0);
        }
        let blocks = first.from.logical..last.from.end();
        let new: Vec<Piece> = parts
            .iter()
            .flat_map(|part| {
                let range = part.from.logical..part.from.end();
                lay_out(std::slice::from_ref(&range), &part.to, true)
            })
            .collect();
        let pieces = new.len() + state.extents.within(blocks.clone()).count();
        let reservation = self.reserve(pieces, Growth::Grows)?;
        let mut effects = Effects::default();
        for piece in new {
            effects.freed.extend(state.extents.replace(piece).iter().map(Piece::run));
            if target.is_first() {
                effects.before.add(target.range(piece.run()));
            }
        }
        self.record((file, &mut state), reservation, blocks, effects);
        Ok(parts.iter().map(|part| part.from.count).sum())
    }
}

/// Writes the parts to their new location. In the second tier it syncs them, in the first the log does.
fn copy(target: &Tier, parts: &[Part]) -> io::Result<()> {
    if parts.is_empty() {
        return Ok(());
    }
    let mut writes: BTreeMap<u64, &[u8]> = BTreeMap::new();
    for part in parts {
        let mut rest = &part.bytes[..];
        for run in &part.to {
            let (now, later) = rest.split_at((usize::try_from(run.count).unwrap_or(0) * BLOCK).min(rest.len()));
            writes.insert(target.at(run.block), now);
            rest = later;
        }
    }
    let is_second = !target.is_first();
    match target.medium.descriptor().filter(|_| is_second) {
        Some(descriptor) => transfer(Arc::new(Backing::new(descriptor)), &writes),
        None => {
            let mut ranges = Ranges::default();
            for (offset, bytes) in writes {
                target.medium.write(offset, bytes)?;
                ranges.add(offset..offset + bytes.len() as u64);
            }
            if is_second { target.medium.persist(&ranges.into_sorted()) } else { Ok(()) }
        }
    }
}

/// Writes and syncs through io_uring, many at once.
fn transfer(file: Arc<Backing>, writes: &BTreeMap<u64, &[u8]>) -> io::Result<()> {
    const FSYNC: u64 = u64::MAX;
    let mut transfers = Transfers::new(IoMode::Auto, TRANSFERS_MAX).map_err(io::Error::other)?;
    let wait = |transfers: &mut Transfers, unfinished: usize| -> io::Result<()> {
        while transfers.unfinished() > unfinished {
            if !transfers.flush().has_done() {
                transfers.sleep().map_err(io::Error::other)?;
            }
            while let Some((token, outcome)) = transfers.next_done() {
                let wanted = writes.get(&token).map_or(0, |bytes| bytes.len());
                if outcome? < wanted && token != FSYNC {
                    return Err(io::ErrorKind::WriteZero.into());
                }
            }
        }
        Ok(())
    };
    let operation = Operation::Write { clear_privileges: false, waits: true };
    for (&offset, bytes) in writes {
        let segment = Segment { address: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
        // SAFETY: the bytes are only read, and outlive `transfers`, which waits for all transfers when it is dropped.
        unsafe { transfers.queue(offset, operation, Arc::clone(&file), offset, [segment]) };
        if transfers.unfinished() >= TRANSFERS_MAX as usize {
            wait(&mut transfers, TRANSFERS_MAX as usize / 2)?;
        }
    }
    wait(&mut transfers, 0)?;
    // SAFETY: no memory is involved.
    unsafe { transfers.queue(FSYNC, Operation::Fsync { data_only: true }, file, 0, []) };
    wait(&mut transfers, 0)
}
