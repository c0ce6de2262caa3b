//! Appends that a previous server may have made.
//!
//! Others may have appended since the client saw the end of the file. So the bytes are searched for behind the offset
//! of the request; if they are not there, they are appended. Equal bytes that another writer appended count as found.

use ferry_engine::DataInput;
use ferry_vfs::{Caller, Data, Errno, FileSystem, Input, IoRange, OFlags, Output, Result};
use ferry_wire::fuse::WRITE_HEAD_BYTES;

use crate::carrier::FuseCarrier;

/// The most bytes at the end of a file that are searched: the server was killed soon after it appended.
const SEARCHED_BYTES_MAX: u64 = 64 << 20;
/// The bytes that are read at once.
const READ_BYTES: u32 = 1 << 16;
/// A write that is killed ends at the end of a page.
const PAGE_BYTES: u64 = 4096;

/// What a previous server did of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PriorAppend {
    /// It appended nothing.
    Nothing,
    /// It was killed while it appended, and nobody has appended since.
    Part,
    /// It appended everything.
    Whole,
}

/// Finds out what a previous server did of this WRITE with `O_APPEND`.
pub(crate) fn prior_append(
    (source, caller): (&dyn FileSystem, &Caller<'_>),
    range: &IoRange,
    carrier: &impl FuseCarrier,
) -> Result<PriorAppend> {
    let mut payload = vec![0; range.len as usize];
    if DataInput::new(carrier, WRITE_HEAD_BYTES, payload.len()).take(&mut payload) < payload.len() {
        return Err(Errno::IO);
    }
    let size = source.getattr(caller, range.ino, Some(range.handle))?.size;
    let start = range.offset.max(size.saturating_sub(SEARCHED_BYTES_MAX));
    if size <= range.offset {
        return Ok(PriorAppend::Nothing);
    }
    // The client's own handle may be for writing only.
    let Ok(handle) = source.open(caller, range.ino, OFlags::RDONLY) else {
        // Nor may the server read it. Bytes that are there twice are better than those of others overwritten.
        return Ok(PriorAppend::Nothing);
    };
    let at = IoRange { handle, offset: start, flags: OFlags::RDONLY, clear_privileges: false, ..*range };
    let mut search = Search::new(payload);
    let searched = search.read((source, caller), at);
    source.release(caller, range.ino, handle);
    let end = searched?;
    let is_part = end.checked_sub(search.matched as u64) == Some(range.offset) && end.is_multiple_of(PAGE_BYTES);
    Ok(match search.matched {
        matched if matched == search.wanted.len() => PriorAppend::Whole,
        1.. if is_part => PriorAppend::Part,
        _ => PriorAppend::Nothing,
    })
}

/// Searches for bytes in a stream (Knuth, Morris, Pratt).
struct Search {
    wanted: Vec<u8>,
    /// For each beginning of `wanted`: the length of its longest proper beginning with which it ends.
    borders: Vec<usize>,
    /// How many bytes of `wanted` the stream ends with; all of them once they were found.
    matched: usize,
}

impl Search {
    /// `wanted` must not be empty.
    fn new(wanted: Vec<u8>) -> Self {
        let mut search = Self { borders: vec![0], wanted, matched: 0 };
        for at in 1..search.wanted.len() {
            search.next(search.wanted[at]);
            search.borders.push(search.matched);
        }
        search.matched = 0;
        search
    }

    /// Reads from an offset until the bytes are found, or to the end of the file. Returns where it ended.
    fn read(&mut self, (source, caller): (&dyn FileSystem, &Caller<'_>), mut at: IoRange) -> Result<u64> {
        at.len = READ_BYTES;
        let mut buffer = vec![0; READ_BYTES as usize];
        while self.matched < self.wanted.len() {
            let count = match source.read(caller, &at, self)? {
                Data::Bytes(count) => count,
                Data::Extent(extent) => {
                    let count =
                        rustix::io::retry_on_intr(|| rustix::io::pread(&*extent.file, &mut buffer[..], extent.offset))?;
                    self.put(&buffer[..count])
                }
            };
            if count == 0 {
                break;
            }
            at.offset = at.offset.checked_add(count as u64).ok_or(Errno::FBIG)?;
        }
        Ok(at.offset)
    }

    fn next(&mut self, byte: u8) {
        while self.matched > 0 && self.wanted[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.wanted[self.matched] == byte);
    }
}

impl Output for Search {
    fn put(&mut self, bytes: &[u8]) -> usize {
        for byte in bytes {
            if self.matched == self.wanted.len() {
                break;
            }
            self.next(*byte);
        }
        bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_window_finds() {
        let mut random = 1u32;
        let mut bit = || {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            b'a' + u8::from(random >> 24 & 1 == 1)
        };
        for round in 0..2000 {
            let wanted: Vec<u8> = (0..=round % 7).map(|_| bit()).collect();
            let text: Vec<u8> = (0..round % 40).map(|_| bit()).collect();
            let mut search = Search::new(wanted.clone());
            text.chunks(3).for_each(|part| assert_eq!(search.put(part), part.len()));
            let is_there = text.windows(wanted.len()).any(|window| window == wanted);
            let at_end = (0..=wanted.len()).rev().find(|bytes| text.ends_with(&wanted[..*bytes])).unwrap();
            assert_eq!(search.matched, if is_there { wanted.len() } else { at_end }, "{wanted:?} in {text:?}");
        }
    }
}
