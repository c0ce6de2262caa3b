//! Immutable files whose bytes are in pieces ([`ferry_vfs::Mappable::map_pieces`]).
//!
//! A front end that accepts read-only descriptors maps the pieces themselves, so that all guests and the host share one
//! copy in memory. Otherwise it gets a copy, because a writable descriptor of a piece could be abused.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_vfs::{Backing, Errno, Extent, Piece, Result};
use ferry_vhost::Part;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::PAGE_BYTES;
use super::eof_copy::{read, write};

/// The source of a part's bytes.
enum Source {
    File(Arc<Backing>),
    Copy(OwnedFd),
}

/// What is to be mapped.
pub(super) struct MapRequest {
    pub(super) part: Part,
    source: Source,
}

impl MapRequest {
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::File(file) => file.as_fd(),
            Source::Copy(copy) => copy.as_fd(),
        }
    }
}

/// Returns the mapping requests from an offset in the window: the pieces themselves if `in_place`, otherwise one copy.
pub(super) fn map_requests(mut window_offset: u64, pieces: &[Piece], in_place: bool) -> Result<Vec<MapRequest>> {
    let mut wishes = Vec::new();
    for together in pieces.chunk_by(|one, next| is_copied(one, in_place) && is_copied(next, in_place)) {
        let wish = match together {
            [Piece::Extent(Extent { file, offset: file_offset }, bytes)] if in_place => {
                let part = Part { window_offset, file_offset: *file_offset, bytes: *bytes, writable: false };
                MapRequest { part, source: Source::File(Arc::clone(file)) }
            }
            copied => copy(window_offset, copied)?,
        };
        window_offset += wish.part.bytes;
        wishes.push(wish);
    }
    Ok(wishes)
}

fn is_copied(piece: &Piece, in_place: bool) -> bool {
    !in_place || matches!(piece, Piece::Bytes(_))
}

/// Returns whole pages with the bytes of these pieces.
fn copy(window_offset: u64, pieces: &[Piece]) -> Result<MapRequest> {
    let memory = memfd_create("ferry-dax", MemfdFlags::CLOEXEC)?;
    let mut end = 0;
    for piece in pieces {
        let bytes = match piece {
            Piece::Extent(extent, bytes) => {
                &read(extent.file.as_fd(), extent.offset, usize::try_from(*bytes).map_err(|_| Errno::OVERFLOW)?)?
            }
            Piece::Bytes(bytes) => bytes,
        };
        write(memory.as_fd(), end, bytes)?;
        end += bytes.len() as u64;
    }
    let bytes = end.next_multiple_of(PAGE_BYTES);
    ftruncate(&memory, bytes)?;
    Ok(MapRequest {
        part: Part { window_offset, file_offset: 0, bytes, writable: false },
        source: Source::Copy(memory),
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const PAGE: usize = 4096;

    fn file(text: &[u8]) -> Arc<Backing> {
        let file = File::from(memfd_create("file", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(text, 0).unwrap();
        Arc::new(Backing::new(file.into()))
    }

    /// Returns two pieces of files, with bytes between them and at the end.
    fn pieces() -> (Vec<Piece>, Vec<u8>) {
        let text: Vec<u8> = (0..4 * PAGE).map(|at| (at / 7).to_le_bytes()[0]).collect();
        let file = file(&text);
        let extent =
            |page: usize| Piece::Extent(Extent { file: Arc::clone(&file), offset: (page * PAGE) as u64 }, PAGE as u64);
        let pieces = vec![
            extent(3),
            Piece::Bytes(vec![1; PAGE]),
            Piece::Bytes(vec![2; PAGE]),
            extent(1),
            Piece::Bytes(b"end".to_vec()),
        ];
        let mut all = text[3 * PAGE..].to_vec();
        all.extend([vec![1; PAGE], vec![2; PAGE], text[PAGE..2 * PAGE].to_vec(), b"end".to_vec()].concat());
        all.resize(5 * PAGE, 0);
        (pieces, all)
    }

    /// Returns what a guest would see from an offset in the window.
    fn seen(wishes: &[MapRequest], from: u64) -> Vec<u8> {
        let mut seen = Vec::new();
        for MapRequest { part, .. } in wishes {
            assert_eq!(part.window_offset, from + seen.len() as u64, "no gap");
            let wish = wishes.iter().find(|wish| wish.part == *part).unwrap();
            seen.extend(read(wish.file(), part.file_offset, usize::try_from(part.bytes).unwrap()).unwrap());
        }
        seen
    }

    #[test]
    fn pieces_are_mapped_in_place_or_copied() {
        let (pieces, all) = pieces();
        for (in_place, count) in [(true, 4), (false, 1)] {
            let wishes = map_requests(1 << 21, &pieces, in_place).unwrap();
            assert_eq!(wishes.len(), count);
            assert!(seen(&wishes, 1 << 21) == all, "in place: {in_place}");
            assert!(wishes.iter().all(|wish| !wish.part.writable));
        }
        assert_eq!(map_requests(0, &pieces, true).unwrap()[0].part.file_offset, 3 * PAGE as u64);
        assert!(map_requests(0, &[], true).unwrap().is_empty() && map_requests(0, &[], false).unwrap().is_empty());
    }
}
