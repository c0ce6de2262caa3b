//! Records the mappings of a window for the next server (`--state`).
//!
//! A mapping is recorded, with its copy, before the front end is asked for it, and until it is removed completely. So
//! all mappings that the front end may have are known, wherever the server is killed.
//!
//! ```text
//! mapping: 1 | inode 8 | window offset 8 | file offset 8 | length 8 | writable 1 | each part of it: file offset 8 | length 8
//! file:    2 | inode 8 | open for writing 1
//! ```
//!
//! A mapping's number is its progress; a file has none. Descriptors: the copy of a mapping, and the file. A source with
//! files in pieces cannot identify inodes for a next server, so nothing is recorded for it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_state::{MappedFile, SessionStore, Slot};
use ferry_vfs::Ino;
use ferry_vhost::Part;

use super::table::ActiveMapping;

const MAPPING: u8 = 1;
const FILE: u8 = 2;
/// Added to a mapping's number if the guest writes there.
const WRITTEN: u64 = 1 << 8;

/// How far a mapping is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is being mapped or removed; the guest's request is served again.
    Unsure,
    /// It is there.
    There,
    /// It is being remapped with another end ([`super::shorten`]).
    Moving,
}

/// Where something is noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MappingRecord {
    slot: Slot,
    has_file: bool,
}

/// A record of the previous server.
pub(super) enum RecordedMapping {
    Mapping { placed: ActiveMapping, progress: Progress, copy: Option<OwnedFd> },
    File { ino: Ino, file: OwnedFd, for_writing: bool, note: MappingRecord },
}

/// Where to record mappings, if anywhere.
#[derive(Clone)]
pub(super) struct MappingRecords(pub(super) Option<Arc<SessionStore>>);

impl MappingRecords {
    /// Records that a mapping of these parts begins; the last part is this copy.
    pub(super) fn placing(
        &self,
        ino: Ino,
        part: Part,
        parts: &[Part],
        copy: Option<BorrowedFd<'_>>,
    ) -> Option<MappingRecord> {
        let slot = self.0.as_ref()?.mapped(&mapping(ino, part, parts), Progress::Unsure as u64, copy)?;
        Some(MappingRecord { slot, has_file: copy.is_some() })
    }

    /// Records the progress of a mapping.
    pub(super) fn progress(&self, placed: &ActiveMapping, progress: Progress) {
        if let (Some(kept), Some(note)) = (&self.0, placed.note) {
            kept.mapping(note.slot, progress as u64 | if placed.written { WRITTEN } else { 0 });
        }
    }

    /// Records that a file is open for its mappings.
    pub(super) fn open(&self, ino: Ino, file: BorrowedFd<'_>, for_writing: bool) -> Option<MappingRecord> {
        let bytes = [&[FILE][..], &ino.0.to_le_bytes(), &[for_writing.into()]].concat();
        let slot = self.0.as_ref()?.mapped(&bytes, 0, Some(file))?;
        Some(MappingRecord { slot, has_file: true })
    }

    /// Nothing of it is left.
    pub(super) fn gone(&self, note: Option<MappingRecord>) {
        if let (Some(kept), Some(note)) = (&self.0, note) {
            kept.close_file(note.slot, note.has_file);
        }
    }
}

fn mapping(ino: Ino, part: Part, parts: &[Part]) -> Vec<u8> {
    let numbers = [ino.0, part.window_offset, part.file_offset, part.bytes].map(u64::to_le_bytes).concat();
    let parts = parts.iter().flat_map(|part| [part.file_offset, part.bytes]).flat_map(u64::to_le_bytes);
    [MAPPING].into_iter().chain(numbers).chain([part.writable.into()]).chain(parts).collect()
}

impl RecordedMapping {
    /// Decodes a record; an invalid one is ignored.
    pub(super) fn of(MappedFile { slot, state, bytes, file }: MappedFile) -> Option<Self> {
        let note = MappingRecord { slot, has_file: file.is_some() };
        match bytes.split_first()? {
            (&FILE, rest) => {
                let (ino, for_writing) = rest.split_first_chunk::<8>()?;
                let (ino, for_writing) = (Ino(u64::from_le_bytes(*ino)), for_writing == [1]);
                Some(Self::File { ino, file: file?, for_writing, note })
            }
            (&MAPPING, rest) => {
                let (ino, part, mapped) = parse(rest)?;
                let progress = match state & !WRITTEN {
                    there if there == Progress::There as u64 => Progress::There,
                    moving if moving == Progress::Moving as u64 => Progress::Moving,
                    _ => Progress::Unsure,
                };
                let (mapped, written) = (mapped.into(), state & WRITTEN != 0);
                let placed = ActiveMapping { ino, part, mapped, written, note: Some(note) };
                Some(Self::Mapping { placed, progress, copy: file })
            }
            _ => None,
        }
    }
}

/// Decodes the output of [`mapping`] without its first byte.
fn parse(bytes: &[u8]) -> Option<(Ino, Part, Vec<Part>)> {
    let (numbers, rest) = bytes.split_at_checked(32)?;
    let (writable, parts) = rest.split_first()?;
    let writable = *writable == 1;
    let [ino, window_offset, file_offset, bytes] = words(numbers)[..] else { return None };
    let (mut at, mut mapped) = (window_offset, Vec::new());
    for part in words(parts).chunks_exact(2) {
        mapped.push(Part { window_offset: at, file_offset: part[0], bytes: part[1], writable });
        at = at.checked_add(part[1])?;
    }
    let part = Part { window_offset, file_offset, bytes, writable };
    let fits = window_offset.checked_add(bytes) == Some(at) && file_offset.checked_add(bytes).is_some();
    fits.then_some((Ino(ino), part, mapped))
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip() {
        const CHUNK: u64 = 2 << 20;
        for writable in [false, true] {
            let part = Part { window_offset: CHUNK, file_offset: 3 * CHUNK, bytes: CHUNK, writable };
            let file = Part { bytes: 8192, ..part };
            let copy = Part { window_offset: CHUNK + 8192, file_offset: 0, bytes: CHUNK - 8192, writable };
            for parts in [vec![part], vec![file, copy], vec![Part { file_offset: 0, ..part }]] {
                let bytes = mapping(Ino(7), part, &parts);
                assert_eq!(parse(&bytes[1..]), Some((Ino(7), part, parts)));
                // A record that is cut off must not decode.
                (1..bytes.len()).for_each(|end| assert_eq!(parse(&bytes[1..end]), None, "{end} bytes"));
            }
        }
    }

    #[test]
    fn invalid_records_are_ignored() {
        let good = Part { window_offset: 4096, file_offset: 8192, bytes: 4096, writable: true };
        let read = |part: Part, parts: &[Part]| parse(&mapping(Ino(7), part, parts)[1..]);
        assert!(read(good, &[good]).is_some());
        assert_eq!(read(good, &[]), None);
        assert_eq!(read(good, &[Part { bytes: 4095, ..good }]), None);
        assert_eq!(read(good, &[good, good]), None);
        for part in [
            Part { window_offset: u64::MAX - 4094, ..good },
            Part { file_offset: u64::MAX - 4094, ..good },
            Part { bytes: u64::MAX, ..good },
        ] {
            assert_eq!(read(part, &[Part { bytes: part.bytes, ..good }]), None, "{part:?}");
        }
    }
}
