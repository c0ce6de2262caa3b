//! The table of mappings of a window.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferry_serve::Mapping;
use ferry_vfs::{Errno, Ino, Result};
use ferry_vhost::Part;

use super::mapping_records::MappingRecord;
use super::{CHUNK_BYTES, PAGE_BYTES};

/// An active mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ActiveMapping {
    pub(super) ino: Ino,
    pub(super) part: Part,
    /// The parts that the front end was asked to map: files, and copies (see [`super::eof_copy`]).
    pub(super) mapped: Arc<[Part]>,
    /// The guest has requested write access.
    pub(super) written: bool,
    /// Where it is written down.
    pub(super) note: Option<MappingRecord>,
}

/// The plan for a mapping request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MapPlan {
    /// The requested mapping exists at this offset.
    There(u64),
    /// Remove these mappings, then create a new one.
    Make(Vec<ActiveMapping>),
}

/// The mappings of a window. They never overlap.
#[derive(Debug)]
pub(super) struct Table {
    window_bytes: u64,
    /// By their offset in the window.
    placed: BTreeMap<u64, ActiveMapping>,
}

impl Table {
    pub(super) fn new(window_bytes: u64) -> Self {
        Self { window_bytes, placed: BTreeMap::new() }
    }

    /// Returns the plan for a request.
    /// `INVAL`: it is not within the window, not aligned, longer than a chunk, or would split another mapping.
    pub(super) fn plan(&self, asked: &Mapping) -> Result<MapPlan> {
        let Mapping { ino, offset, len, window_offset, write, .. } = *asked;
        let aligned = [offset, len, window_offset].into_iter().all(|number| number.is_multiple_of(PAGE_BYTES));
        // Longer ones would take much memory to compare with their files.
        let end = window_offset.checked_add(len).filter(|end| *end <= self.window_bytes && len <= CHUNK_BYTES);
        let (true, Some(end), true) = (aligned, end, len > 0) else { return Err(Errno::INVAL) };
        let there = self.placed.get(&window_offset).filter(|placed| {
            let same = (placed.ino, placed.part.file_offset, placed.part.bytes) == (ino, offset, len);
            same && (placed.part.writable || !write)
        });
        if there.is_some() {
            return Ok(MapPlan::There(window_offset));
        }
        self.within(window_offset, end).map(MapPlan::Make)
    }

    /// Returns the mappings in a range of the window.
    /// `INVAL`: one of them extends beyond it.
    pub(super) fn within(&self, start: u64, end: u64) -> Result<Vec<ActiveMapping>> {
        let before = self.placed.range(..start).next_back().filter(|(_, placed)| placed.end() > start);
        let inside: Vec<_> = self.placed.range(start..end.max(start)).map(|(_, placed)| placed.clone()).collect();
        match before.is_some() || inside.last().is_some_and(|last| last.end() > end) {
            true => Err(Errno::INVAL),
            false => Ok(inside),
        }
    }

    /// The mappings of a file.
    pub(super) fn of(&self, ino: Ino) -> Vec<ActiveMapping> {
        self.placed.values().filter(|placed| placed.ino == ino).cloned().collect()
    }

    /// All mappings.
    pub(super) fn all(&self) -> Vec<ActiveMapping> {
        self.placed.values().cloned().collect()
    }

    /// The bytes of all mappings. A window has some hundred.
    pub(super) fn bytes(&self) -> u64 {
        self.placed.values().map(|placed| placed.part.bytes).sum()
    }

    pub(super) fn insert(&mut self, placed: ActiveMapping) {
        self.placed.insert(placed.part.window_offset, placed);
    }

    pub(super) fn remove(&mut self, placed: &ActiveMapping) {
        self.placed.remove(&placed.part.window_offset);
    }

    /// Records that the guest writes to a mapping, and returns it.
    pub(super) fn written(&mut self, window_offset: u64) -> Option<&ActiveMapping> {
        let placed = self.placed.get_mut(&window_offset)?;
        placed.written = true;
        Some(placed)
    }
}

impl ActiveMapping {
    fn end(&self) -> u64 {
        self.part.window_offset + self.part.bytes
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::SessionId;

    use super::*;

    const WINDOW: u64 = 16 << 20;
    const CHUNK: u64 = 2 << 20;

    fn asked(ino: u64, offset: u64, window_offset: u64, write: bool) -> Mapping {
        let by = SessionId::unique();
        Mapping { by, ino: Ino(ino), offset, len: CHUNK, window_offset, write, may_write: write }
    }

    fn placed(asked: &Mapping) -> ActiveMapping {
        let Mapping { ino, offset: file_offset, len: bytes, window_offset, write: writable, .. } = *asked;
        let part = Part { window_offset, file_offset, bytes, writable };
        ActiveMapping { ino, part, mapped: Arc::from([part]), written: false, note: None }
    }

    fn table(asked: &[Mapping]) -> Table {
        let mut table = Table::new(WINDOW);
        asked.iter().for_each(|one| table.insert(placed(one)));
        table
    }

    #[test]
    fn invalid_requests_are_refused() {
        let table = Table::new(WINDOW);
        let good = asked(7, 0, 0, false);
        assert_eq!(table.plan(&good), Ok(MapPlan::Make(Vec::new())));
        assert_eq!(table.plan(&Mapping { window_offset: WINDOW - CHUNK, ..good }), Ok(MapPlan::Make(Vec::new())));
        for bad in [
            Mapping { window_offset: WINDOW - CHUNK + PAGE_BYTES, ..good },
            Mapping { window_offset: WINDOW, ..good },
            Mapping { window_offset: u64::MAX - PAGE_BYTES + 1, ..good },
            Mapping { len: WINDOW + PAGE_BYTES, ..good },
            Mapping { len: 0, ..good },
            Mapping { len: 1, ..good },
            Mapping { offset: 1, ..good },
            Mapping { window_offset: 512, ..good },
        ] {
            assert_eq!(table.plan(&bad), Err(Errno::INVAL), "{bad:?}");
        }
    }

    #[test]
    fn a_sufficient_mapping_is_kept() {
        let (reads, writes) = (asked(7, 0, CHUNK, false), asked(8, 0, 2 * CHUNK, true));
        let table = table(&[reads, writes]);
        assert_eq!(table.plan(&reads), Ok(MapPlan::There(CHUNK)));
        // A writable mapping serves reads.
        assert_eq!(table.plan(&Mapping { write: false, ..writes }), Ok(MapPlan::There(2 * CHUNK)));
        // A read-only mapping does not serve writes; nor does another file or part.
        for other in
            [Mapping { write: true, ..reads }, Mapping { ino: Ino(9), ..reads }, Mapping { offset: CHUNK, ..reads }]
        {
            assert_eq!(table.plan(&other), Ok(MapPlan::Make(vec![placed(&reads)])), "{other:?}");
        }
        let both = Mapping { len: 2 * CHUNK, ..asked(9, 0, CHUNK, false) };
        assert_eq!(table.plan(&both), Err(Errno::INVAL), "no client asks for so much");
    }

    #[test]
    fn all_obstacles_are_removed() {
        let halves = [CHUNK, CHUNK + CHUNK / 2].map(|at| Mapping { len: CHUNK / 2, ..asked(7, 0, at, false) });
        let all = halves.iter().map(placed).collect();
        assert_eq!(table(&halves).plan(&asked(9, 0, CHUNK, false)), Ok(MapPlan::Make(all)));
    }

    #[test]
    fn no_mapping_is_split() {
        let one = asked(7, 0, CHUNK, false);
        let table = table(&[one]);
        for (start, end, found) in [
            (0, WINDOW, Ok(1)),
            (CHUNK, 2 * CHUNK, Ok(1)),
            (0, CHUNK, Ok(0)),
            (2 * CHUNK, WINDOW, Ok(0)),
            (CHUNK + PAGE_BYTES, WINDOW, Err(Errno::INVAL)),
            (CHUNK + PAGE_BYTES, CHUNK + 2 * PAGE_BYTES, Err(Errno::INVAL)),
            (0, CHUNK + PAGE_BYTES, Err(Errno::INVAL)),
            (5, 3, Ok(0)),
        ] {
            assert_eq!(table.within(start, end).map(|found| found.len()), found, "{start:#x}..{end:#x}");
        }
        assert_eq!(table.plan(&Mapping { window_offset: CHUNK / 2, ..one }), Err(Errno::INVAL));
        assert_eq!((table.of(Ino(7)).len(), table.of(Ino(8)).len(), table.all().len()), (1, 0, 1));
    }
}
