//! Reading and writing files.
//!
//! Written blocks are overwritten in place. Holes get new blocks, reserved (unwritten) blocks become written, and
//! blocks of the second tier move back to the first. In each case the bytes are in place before their record, and the
//! log keeps that order on the medium.

use std::ops::Range;

use ferry_vfs::sync::lock;
use ferry_vfs::{Data, Errno, Extent, FallocateFlags, Input, Output, Result, Seek};

use super::disk::{Disk, File, MAP_PIECES_MAX, Refusal, State, block_of, io_error, skip_of};
use super::extents::{Piece, Run};
use super::format::{BLOCK, BLOCK_BYTES, TIER2_FIRST};
use super::log::{Effects, Growth, Reservation};
use super::medium::Ranges;
use crate::store::WriteAt;

/// The outcome of an attempt to change a file's blocks.
type Attempt<T> = std::result::Result<T, Refusal>;

/// Reads of at least this size return an extent; below, the overhead of a transfer exceeds the cost of a copy.
const EXTENT_BYTES_MIN: u64 = 16 << 10;
/// The contents of holes, a chunk at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Disk {
    /// Reads; see [`crate::store::Store::read`].
    pub(crate) fn read(&self, file: &File, offset: u64, len: u32, out: &mut dyn Output) -> Result<Data> {
        self.touch(file);
        let state = file.read();
        if self.tier2.is_some() && state.extents.at(block_of(offset)).is_some_and(|piece| piece.block >= TIER2_FIRST) {
            self.heat.warm_up(file);
        }
        let end = offset.saturating_add(len.into()).min(state.size);
        if let Some(extent) = self.extent(&state, offset, end, len) {
            return Ok(Data::Extent(extent));
        }
        let bytes = end.saturating_sub(offset);
        self.copy_out(&state, offset, bytes, out).map(Data::Bytes)
    }

    /// Reads without extents.
    pub(crate) fn read_bytes(&self, file: &File, offset: u64, bytes: u64, out: &mut dyn Output) -> Result<usize> {
        let state = file.read();
        self.copy_out(&state, offset, bytes.min(state.size.saturating_sub(offset)), out)
    }

    fn copy_out(&self, state: &State, offset: u64, bytes: u64, out: &mut dyn Output) -> Result<usize> {
        let end = offset + bytes;
        let mut at = offset;
        while at < end {
            let (piece, until) = match state.extents.at(block_of(at)) {
                Some(piece) => (Some(piece).filter(|piece| piece.written), piece.end()),
                None => (None, state.extents.next_from(block_of(at)).map_or(u64::MAX, |piece| piece.logical)),
            };
            let bytes = usize::try_from(end.min(until.saturating_mul(BLOCK_BYTES)) - at).unwrap_or(usize::MAX);
            let mut put = 0;
            let wanted = match piece {
                Some(piece) => {
                    self.look(piece.block, skip_of(at) as u64, bytes, &mut |seen| put = out.put(seen))?;
                    bytes
                }
                None => {
                    let wanted = bytes.min(ZEROS.len());
                    put = out.put(&ZEROS[..wanted]);
                    wanted
                }
            };
            at += put as u64;
            if put < wanted {
                break;
            }
        }
        Ok(usize::try_from(at - offset).unwrap_or(0))
    }

    /// Returns the range as an extent, if it is allocated contiguously in a tier with a descriptor.
    fn extent(&self, state: &State, offset: u64, end: u64, len: u32) -> Option<Extent> {
        // An extent covers the whole request; a read across the end of the file must be shorter.
        if end.checked_sub(offset) != Some(len.into()) || u64::from(len) < EXTENT_BYTES_MIN {
            return None;
        }
        let piece =
            state.extents.at(block_of(offset)).filter(|piece| piece.written && piece.end() * BLOCK_BYTES >= end)?;
        let (tier, number) = self.tier(piece.block).ok()?;
        let file = self.grace.backing(number)?;
        Some(Extent { file, offset: tier.at(piece.block) + skip_of(offset) as u64 })
    }

    /// Writes; see [`crate::store::Store::write`].
    pub(crate) fn write(&self, file: &File, at: WriteAt, input: &mut dyn Input) -> Result<Data> {
        if at.len == 0 {
            return Ok(Data::Bytes(0));
        }
        self.touch(file);
        let count = match self.write_in_place(file, at, input)? {
            Some(count) => count,
            None => {
                let mut bytes = vec![0; at.len as usize];
                let count = input.take(&mut bytes);
                bytes.truncate(count);
                self.write_bytes(file, (!at.append).then_some(at.offset), &bytes)?
            }
        };
        if at.sync {
            self.sync_file(file, true)?;
        }
        Ok(Data::Bytes(count))
    }

    /// Overwrites, if the whole range is allocated contiguously.
    fn write_in_place(&self, file: &File, at: WriteAt, input: &mut dyn Input) -> Result<Option<usize>> {
        let mut state = file.write();
        let end = at.offset + u64::from(at.len);
        if at.append || end > state.size {
            return Ok(None);
        }
        let piece = state.extents.at(block_of(at.offset));
        let usable = |piece: &Piece| piece.written && piece.block < TIER2_FIRST && piece.end() * BLOCK_BYTES >= end;
        let Some(piece) = piece.filter(usable) else { return Ok(None) };
        let start = self.tier1.at(piece.block) + skip_of(at.offset) as u64;
        let edit = self.tier1.medium.edit(start, at.len as usize, &mut |to| input.take(to));
        let count = edit.map_err(|error| io_error(&error))?;
        state.version += 1;
        lock(&file.dirty).add(start..start + count as u64);
        Ok(Some(count))
    }

    /// Writes bytes at an offset, or at the end; makes room if necessary. Returns how many were written: at an offset as many
    /// as there is room for, at the end all.
    pub(crate) fn write_bytes(&self, file: &File, offset: Option<u64>, bytes: &[u8]) -> Result<usize> {
        let all = self.with_room(|| {
            let _change = self.change();
            let mut state = file.write();
            let offset = offset.unwrap_or(state.size);
            self.write_locked((file, &mut state), offset, bytes)
        });
        match (all, offset) {
            (Err(Errno::NOSPC), Some(offset)) => {
                let _change = self.change();
                let mut state = file.write();
                let fitting = self.fitting(&state, offset, bytes);
                if fitting.is_empty() {
                    return Err(Errno::NOSPC);
                }
                Ok(self.write_locked((file, &mut state), offset, fitting)?)
            }
            (all, _) => all,
        }
    }

    fn write_locked(&self, (file, state): (&File, &mut State), offset: u64, bytes: &[u8]) -> Attempt<usize> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| i64::try_from(*end).is_ok());
        let end = end.ok_or(Errno::FBIG)?;
        let cleared = self.clear_tail(file, state, offset)?;
        self.put((file, state), offset, bytes, end, cleared)?;
        Ok(bytes.len())
    }

    /// Returns the bytes of a write, from the first, for which there are enough free blocks.
    fn fitting<'a>(&self, state: &State, offset: u64, bytes: &'a [u8]) -> &'a [u8] {
        let mut free = self.tier1.blocks.free_blocks();
        let blocks = block_of(offset)..(offset + bytes.len() as u64).div_ceil(BLOCK_BYTES);
        for range in missing(state, blocks) {
            let count = range.end - range.start;
            if count > free {
                let end = (range.start + free) * BLOCK_BYTES;
                return usize::try_from(end.saturating_sub(offset))
                    .ok()
                    .and_then(|end| bytes.get(..end))
                    .unwrap_or(bytes);
            }
            free -= count;
        }
        bytes
    }

    /// Retries after making room, as long as that succeeds and blocks are what is missing.
    fn with_room<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T> {
        loop {
            let free_before = self.tier1.blocks.free_blocks();
            match attempt() {
                Err(Refusal::Blocks) if self.make_room(free_before)? => {}
                outcome => return Ok(outcome?),
            }
        }
    }

    /// Writes the bytes; then the file's size is at least `end`. The `cleared` ranges must be durable before that.
    fn put(
        &self,
        (file, state): (&File, &mut State),
        offset: u64,
        bytes: &[u8],
        end: u64,
        cleared: Ranges,
    ) -> Attempt<()> {
        let blocks = block_of(offset)..end.div_ceil(BLOCK_BYTES);
        let size = state.size.max(end);
        let new = self.plan(state, blocks.clone())?;
        let in_place: Vec<Piece> = state.extents.within(blocks.clone()).filter(is_settled).collect();
        if new.is_empty() && size == state.size {
            self.overwrite(file, state, &in_place, offset, bytes)?;
            return Ok(());
        }
        let fresh = fresh_runs(state, &new);
        let pieces = new.len() + in_place.len() + 2;
        let reservation = self.reserve(pieces, Growth::Grows).inspect_err(|_| self.give_back(&fresh))?;
        let filled = new.iter().try_for_each(|piece| self.fill(state, piece, offset, bytes));
        let overwritten = filled.and_then(|()| self.overwrite(file, state, &in_place, offset, bytes));
        let mut before = match overwritten {
            // Blocks beyond the old end count as new: the bytes must be durable before the size.
            Ok(ranges) if size > state.size => ranges,
            Ok(_) => Ranges::default(),
            Err(error) => {
                self.give_back(&fresh);
                self.log.cancel(reservation);
                return Err(error.into());
            }
        };
        before.add_all(cleared);
        new.iter().for_each(|piece| before.add(self.tier1.range(piece.run())));
        let mut freed = Vec::new();
        for piece in &new {
            let old = state.extents.replace(*piece);
            freed.extend(old.iter().filter(|old| old.block >= TIER2_FIRST).map(Piece::run));
        }
        state.size = size;
        self.record((file, state), reservation, blocks, Effects { before, freed, more: 0 });
        Ok(())
    }

    /// Plans and allocates the pieces for a write to these blocks: new blocks for holes and for data of the second
    /// tier, and reserved blocks that become written.
    fn plan(&self, state: &State, blocks: Range<u64>) -> Attempt<Vec<Piece>> {
        let reserved = |piece: &Piece| piece.block < TIER2_FIRST && !piece.written;
        let reserved = state.extents.within(blocks.clone()).filter(reserved);
        let mut new: Vec<Piece> = reserved.map(|piece| Piece { written: true, ..piece }).collect();
        let missing = missing(state, blocks.clone());
        let count = missing.iter().map(|range| range.end - range.start).sum();
        if count == 0 {
            return Ok(new);
        }
        let before = blocks.start.checked_sub(1).and_then(|logical| state.extents.at(logical));
        let goal = before.filter(|piece| piece.block < TIER2_FIRST).map(|piece| piece.block + 1);
        new.extend(lay_out(&missing, &self.allocate(count, goal)?, true));
        Ok(new)
    }

    /// Writes the blocks of a new piece: the new bytes, and the previous contents around them.
    fn fill(&self, state: &State, piece: &Piece, offset: u64, bytes: &[u8]) -> Result<()> {
        let (start, end) = (piece.logical * BLOCK_BYTES, piece.end() * BLOCK_BYTES);
        let (from, to) = (offset.clamp(start, end), (offset + bytes.len() as u64).clamp(start, end));
        let target = self.tier1.at(piece.block);
        let medium = &self.tier1.medium;
        let old = |at: u64, buffer: &mut [u8]| match state.extents.at(block_of(at)) {
            Some(old) if old.written && old.block >= TIER2_FIRST => {
                self.look(old.block, skip_of(at) as u64, buffer.len(), &mut |seen| buffer.copy_from_slice(seen))
            }
            _ => {
                buffer.fill(0);
                Ok(())
            }
        };
        for edge in [start..from, to..end] {
            let mut at = edge.start;
            while at < edge.end {
                let mut buffer = [0; BLOCK];
                let count = (BLOCK - skip_of(at)).min(usize::try_from(edge.end - at).unwrap_or(BLOCK));
                old(at, &mut buffer[..count])?;
                medium.write(target + (at - start), &buffer[..count]).map_err(|error| io_error(&error))?;
                at += count as u64;
            }
        }
        if let (Ok(first), Ok(last)) = (usize::try_from(from - offset.min(from)), usize::try_from(to - offset.min(to)))
        {
            let part = bytes.get(first..last).unwrap_or_default();
            medium.write(target + (from - start), part).map_err(|error| io_error(&error))?;
        }
        Ok(())
    }

    /// Overwrites the parts of a range that are in these pieces; returns the ranges of the medium.
    fn overwrite(&self, file: &File, state: &mut State, pieces: &[Piece], offset: u64, bytes: &[u8]) -> Result<Ranges> {
        let end = offset + bytes.len() as u64;
        let mut ranges = Ranges::default();
        for piece in pieces {
            let from = offset.max(piece.logical * BLOCK_BYTES);
            let to = end.min(piece.end() * BLOCK_BYTES);
            let range = usize::try_from(from - offset).ok().zip(usize::try_from(to.saturating_sub(offset)).ok());
            let part = range.and_then(|(first, last)| bytes.get(first..last)).unwrap_or_default();
            let start = self.tier1.at(piece.block) + (from - piece.logical * BLOCK_BYTES);
            self.tier1.medium.write(start, part).map_err(|error| io_error(&error))?;
            ranges.add(start..start + part.len() as u64);
        }
        lock(&file.dirty).add_all(ranges.clone());
        state.version += 1;
        Ok(ranges)
    }

    /// Zeroes the rest of the last block before a file grows. Returns ranges that must be durable before the new size.
    fn clear_tail(&self, file: &File, state: &mut State, until: u64) -> Attempt<Ranges> {
        let (size, tail) = (state.size, skip_of(state.size));
        let written = || state.extents.at(block_of(size)).is_some_and(|piece| piece.written);
        if until <= size || tail == 0 || !written() {
            return Ok(Ranges::default());
        }
        let count = (BLOCK - tail).min(usize::try_from(until - size).unwrap_or(BLOCK));
        // The rest may hold the bytes of a longer file, to which a crash would revert.
        if !self.log.is_durable(state.ticket) {
            self.log.sync(state.ticket)?;
        }
        let blocks = block_of(size)..block_of(size) + 1;
        match state.extents.at(blocks.start) {
            Some(piece) if is_settled(&piece) => {
                Ok(self.overwrite(file, state, &[Piece { count: 1, ..piece }], size, &ZEROS[..count])?)
            }
            // In the second tier: the block moves back.
            _ => self.put((file, state), size, &ZEROS[..count], size, Ranges::default()).map(|()| Ranges::default()),
        }
    }

    /// Sets the size.
    pub(crate) fn truncate(&self, file: &File, size: u64) -> Result<()> {
        self.touch(file);
        self.with_room(|| {
            let _change = self.change();
            let mut state = file.write();
            let before = self.clear_tail(file, &mut state, size)?;
            let first = size.div_ceil(BLOCK_BYTES);
            // The first record of a file is one more in each snapshot.
            let is_first = size > 0 && state.size == 0 && state.extents.blocks() == 0;
            let reservation = self.reserve(0, if is_first { Growth::Grows } else { Growth::Keeps })?;
            let freed = state.extents.remove(first..u64::MAX).iter().map(Piece::run).collect();
            state.size = size;
            self.record((file, &mut state), reservation, first..u64::MAX, Effects { before, freed, more: 0 });
            Ok(())
        })
    }

    /// Allocates, punches and zeroes.
    pub(crate) fn fallocate(&self, file: &File, offset: u64, len: u64, flags: FallocateFlags) -> Result<()> {
        self.touch(file);
        let keep = flags.contains(FallocateFlags::KEEP_SIZE);
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        match flags - FallocateFlags::KEEP_SIZE {
            mode if mode == FallocateFlags::PUNCH_HOLE && keep => self.punch(file, offset..end),
            mode if mode == FallocateFlags::ZERO_RANGE => {
                self.punch(file, offset..end)?;
                self.reserve_blocks(file, offset..end, keep)
            }
            mode if mode.is_empty() => self.reserve_blocks(file, offset..end, keep),
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    /// Punches a hole: whole blocks are freed, parts of blocks become zeros.
    fn punch(&self, file: &File, range: Range<u64>) -> Result<()> {
        let (first, last) = (range.start.div_ceil(BLOCK_BYTES), block_of(range.end));
        let edges = match first <= last {
            true => [range.start..first * BLOCK_BYTES, last * BLOCK_BYTES..range.end],
            false => [range.clone(), range.end..range.end],
        };
        self.with_room(|| {
            let _change = self.change();
            let mut state = file.write();
            for edge in &edges {
                let written = state.extents.at(block_of(edge.start)).is_some_and(|piece| piece.written);
                let end = edge.end.min(state.size);
                if written && edge.start < end {
                    let bytes = usize::try_from(end - edge.start).unwrap_or(0);
                    self.put((file, &mut state), edge.start, &ZEROS[..bytes], end, Ranges::default())?;
                }
            }
            if first >= last || state.extents.within(first..last).next().is_none() {
                return Ok(());
            }
            // A hole in the midst of a piece leaves two.
            let splits = first > 0 && state.extents.at(first - 1).is_some_and(|piece| piece.end() > last);
            let reservation = self.reserve(0, if splits { Growth::Grows } else { Growth::Keeps })?;
            let freed = state.extents.remove(first..last).iter().map(Piece::run).collect();
            self.record((file, &mut state), reservation, first..last, Effects { freed, ..Effects::default() });
            Ok(())
        })
    }

    /// Reserves blocks for the holes of a range; they read as zeros until they are written.
    fn reserve_blocks(&self, file: &File, range: Range<u64>, keep_size: bool) -> Result<()> {
        let holes = file.read().extents.holes(block_of(range.start)..range.end.div_ceil(BLOCK_BYTES));
        let missing: u64 = holes.iter().map(|hole| hole.end - hole.start).sum();
        // Nothing is moved out of the first tier for what never fits.
        let never_fits = || missing > self.space().1.min(self.tier1.blocks.blocks());
        if never_fits() {
            // What a flush has freed may not be collected yet.
            self.sync_log()?;
            if never_fits() {
                return Err(Errno::NOSPC);
            }
        }
        self.with_room(|| {
            let _change = self.change();
            let mut state = file.write();
            let blocks = block_of(range.start)..range.end.div_ceil(BLOCK_BYTES);
            let size = if keep_size { state.size } else { state.size.max(range.end) };
            let before = self.clear_tail(file, &mut state, size)?;
            let holes = state.extents.holes(blocks.clone());
            if holes.is_empty() && size == state.size {
                return Ok(());
            }
            let count = holes.iter().map(|hole| hole.end - hole.start).sum();
            let runs = if count > 0 { self.allocate(count, None)? } else { Vec::new() };
            let new = lay_out(&holes, &runs, false);
            let mut pieces: Vec<Piece> = state.extents.within(blocks.clone()).chain(new.iter().copied()).collect();
            pieces.sort_unstable_by_key(|piece| piece.logical);
            let parts = self.reserve_parts(blocks.start, &pieces).inspect_err(|_| self.give_back(&runs))?;
            new.into_iter().for_each(|piece| state.extents.insert(piece));
            state.size = size;
            let mut effects = Effects { before, ..Effects::default() };
            for (blocks, reservation) in parts {
                self.record((file, &mut state), reservation, blocks, std::mem::take(&mut effects));
            }
            Ok(())
        })
    }

    /// Reserves room in the log for these contiguous pieces, which may need several records.
    fn reserve_parts(&self, start: u64, pieces: &[Piece]) -> Result<Vec<(Range<u64>, Reservation)>> {
        let mut parts: Vec<(Range<u64>, Reservation)> = Vec::new();
        for part in pieces.chunks(MAP_PIECES_MAX) {
            let from = parts.last().map_or(start, |(before, _)| before.end);
            let to = part.last().map_or(from, Piece::end);
            match self.reserve(part.len(), Growth::Grows) {
                Ok(reservation) => parts.push((from..to, reservation)),
                Err(error) => {
                    parts.into_iter().for_each(|(_, reservation)| self.log.cancel(reservation));
                    return Err(error);
                }
            }
        }
        Ok(parts)
    }

    /// The next data or hole.
    pub(crate) fn seek(&self, file: &File, offset: u64, seek: Seek) -> Result<u64> {
        let state = file.read();
        if offset >= state.size {
            return Err(Errno::NXIO);
        }
        let mut at = offset;
        loop {
            let next = state.extents.next_from(block_of(at));
            let data = next.filter(|piece| piece.logical * BLOCK_BYTES <= at && piece.written);
            at = match (seek, data, next) {
                (Seek::Data, Some(_), _) | (Seek::Hole, None, _) => return Ok(at.min(state.size)),
                (Seek::Hole, Some(piece), _) => piece.end() * BLOCK_BYTES,
                (Seek::Data, None, Some(next)) if next.logical * BLOCK_BYTES > at => next.logical * BLOCK_BYTES,
                (Seek::Data, None, Some(next)) => next.end() * BLOCK_BYTES,
                (Seek::Data, None, None) => return Err(Errno::NXIO),
            };
            if at >= state.size {
                return if seek == Seek::Hole { Ok(state.size) } else { Err(Errno::NXIO) };
            }
        }
    }
}

/// Returns whether a write to this piece may go in place.
fn is_settled(piece: &Piece) -> bool {
    piece.written && piece.block < TIER2_FIRST
}

/// Returns the ranges that a write needs new blocks for: holes, and data of the second tier.
fn missing(state: &State, blocks: Range<u64>) -> Vec<Range<u64>> {
    let mut missing = state.extents.holes(blocks.clone());
    let cold = state.extents.within(blocks).filter(|piece| piece.block >= TIER2_FIRST);
    missing.extend(cold.map(|piece| piece.logical..piece.end()));
    missing.sort_unstable_by_key(|range| range.start);
    missing
}

/// Returns the blocks of planned pieces that are new to the file.
fn fresh_runs(state: &State, new: &[Piece]) -> Vec<Run> {
    let has = |piece: &&Piece| state.extents.at(piece.logical).is_none_or(|old| old.block != piece.block);
    new.iter().filter(has).map(Piece::run).collect()
}

/// Assigns the blocks of runs to logical ranges, in order; the total lengths are equal.
pub(crate) fn lay_out(ranges: &[Range<u64>], runs: &[Run], written: bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut runs = runs.iter().copied();
    let mut run = Run { block: 0, count: 0 };
    for range in ranges {
        let mut logical = range.start;
        while logical < range.end {
            if run.count == 0 {
                let Some(next) = runs.next() else { return pieces };
                run = next;
            }
            let count = run.count.min(range.end - logical);
            pieces.push(Piece { logical, block: run.block, count, written });
            run = Run { block: run.block + count, count: run.count - count };
            logical += count;
        }
    }
    pieces
}
