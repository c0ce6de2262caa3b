//! Reads maps of sparse files from the data of an archive.

use std::io::Read;

use super::header::{HEADER_BYTES, Header, SPARSE, SPARSE_BYTES, SPARSE_MORE, SPARSE_NEXT, SPARSE_NEXT_MORE};
use super::member::{Member, Members};
use super::sparse::{DIGITS_MAX, Form, PIECES_MAX, Pieces, Sparse, check, listed, number};
use crate::format::error::Result;

impl<R: Read> Members<R> {
    /// Reads the map of an old GNU sparse file with this many bytes in the archive; returns its pieces.
    pub(super) fn old_sparse(&mut self, header: &Header, member: &mut Member, stored: u64) -> Result<Pieces> {
        let wrong = |members: &Self, reason: &str| members.refused(member.offset, format!("a sparse file {reason}"));
        let mut pieces = Vec::new();
        let mut more = header.0[SPARSE_MORE] != 0;
        listed(header, SPARSE, &mut pieces).map_err(|reason| self.refused(member.offset, reason))?;
        while more {
            let block = self.block()?.ok_or_else(|| wrong(self, "that is cut off"))?;
            more = block.0[SPARSE_NEXT_MORE] != 0;
            listed(&block, SPARSE_NEXT, &mut pieces).map_err(|reason| self.refused(member.offset, reason))?;
            if pieces.len() > PIECES_MAX {
                return Err(wrong(self, "of more than a million pieces"));
            }
        }
        let bytes = header.number(SPARSE_BYTES, "length").ok().and_then(|bytes| u64::try_from(bytes).ok());
        member.bytes = bytes.ok_or_else(|| wrong(self, "without a length"))?;
        check(&pieces, member.bytes, stored).map_err(|reason| wrong(self, reason))?;
        Ok(pieces)
    }

    /// Reads the map of a sparse file in a PAX header. Also returns the number of bytes after the map.
    pub(super) fn pax_sparse(&mut self, sparse: Sparse, member: &mut Member, stored: u64) -> Result<(Pieces, u64)> {
        member.bytes = sparse.bytes;
        let (pieces, left) = match sparse.form {
            Form::InHeader(pieces) => (pieces, stored),
            Form::BeforeData => self.map_before_data(member.offset, stored)?,
        };
        let wrong = |reason| self.refused(member.offset, format!("a sparse file {reason}"));
        check(&pieces, member.bytes, left).map_err(wrong)?;
        Ok((pieces, left))
    }

    /// Reads a map in the first blocks of a file's data: lines with the number of pieces, and each offset and length.
    fn map_before_data(&mut self, offset: u64, stored: u64) -> Result<(Pieces, u64)> {
        let wrong = |members: &Self, reason: &str| members.refused(offset, format!("a sparse file {reason}"));
        let (mut left, mut line, mut numbers) = (stored, Vec::new(), Vec::new());
        let mut count = None;
        while count.is_none_or(|count| numbers.len() < count) {
            if left < HEADER_BYTES as u64 {
                return Err(wrong(self, "whose map is cut off"));
            }
            left -= HEADER_BYTES as u64;
            let block = self.block()?.ok_or_else(|| wrong(self, "whose map is cut off"))?;
            for byte in block.0 {
                if byte != b'\n' {
                    line.push(byte);
                    if line.len() > DIGITS_MAX {
                        return Err(wrong(self, "whose map is not numeric"));
                    }
                    continue;
                }
                let found = number(&line).ok_or_else(|| wrong(self, "whose map is not numeric"))?;
                line.clear();
                if count.is_none() {
                    let pieces = usize::try_from(found).ok().filter(|pieces| *pieces <= PIECES_MAX);
                    count = Some(2 * pieces.ok_or_else(|| wrong(self, "of more than a million pieces"))?);
                } else {
                    numbers.push(found);
                }
                if count.is_some_and(|count| numbers.len() == count) {
                    break;
                }
            }
        }
        Ok((numbers.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(), left))
    }
}
