//! Reads, writes and listings of data in a source's memory.

use crate::{Data, DirItem, DirOutput, DirRange, Entry, Errno, FileType, Ino, Input, IoRange, Name, Output, Result};

/// The offsets after `.` and `..` in a listing of [`DirRange::list`].
const AFTER_DOT: u64 = 1;
const AFTER_DOTS: u64 = 2;

impl IoRange {
    /// Returns the end of the range in bytes; `FBIG` past `i64::MAX`, the maximum file offset of Linux.
    pub fn end(&self) -> Result<u64> {
        let end = self.offset.checked_add(u64::from(self.len)).ok_or(Errno::FBIG)?;
        if i64::try_from(end).is_err() { Err(Errno::FBIG) } else { Ok(end) }
    }

    /// Reads the range of a file that consists of `bytes`.
    pub fn read_from(&self, bytes: &[u8], out: &mut dyn Output) -> Data {
        let start = usize::try_from(self.offset).map_or(bytes.len(), |start| start.min(bytes.len()));
        let rest = &bytes[start..];
        let count = usize::try_from(self.len).map_or(rest.len(), |count| count.min(rest.len()));
        Data::Bytes(out.put(&rest[..count]))
    }

    /// Writes the range of a file that consists of `bytes`; a gap before the range is filled with zeros.
    ///
    /// # Errors
    /// `FBIG` if the file would be longer than `bytes_max`, `NOSPC` if there is not enough memory: a client can send any
    /// offset.
    pub fn write_to(&self, bytes: &mut Vec<u8>, input: &mut dyn Input, bytes_max: u64) -> Result<Data> {
        let end = self.end()?;
        if end > bytes_max {
            return Err(Errno::FBIG);
        }
        let (Ok(start), Ok(end)) = (usize::try_from(self.offset), usize::try_from(end)) else {
            return Err(Errno::FBIG);
        };
        let before = bytes.len();
        if end > before {
            bytes.try_reserve(end - before).map_err(|_| Errno::NOSPC)?;
            bytes.resize(end, 0);
        }
        let count = input.take(&mut bytes[start..end]);
        // If the input was shorter than announced, the file ends after it, or at its previous end.
        bytes.truncate(if count == 0 { before } else { before.max(start + count) });
        Ok(Data::Bytes(count))
    }
}

impl DirRange {
    /// Returns the position of the first name that [`Self::list`] lists; it skips earlier ones.
    pub fn position(&self) -> u64 {
        self.offset.saturating_sub(AFTER_DOTS)
    }

    /// Lists a directory: `.`, `..`, and `names` with their positions, in ascending order. A position is any number below
    /// 2^62 that a name keeps until it is removed, and that no other name gets. A counter is suitable; an index is not,
    /// because removing an earlier name would make the client miss another one. `parent` is the inode of `..`.
    ///
    /// `refer` is called for each inode whose entry the client gets, to count its reference.
    pub fn list<'a>(
        &self,
        out: &mut dyn DirOutput,
        parent: Ino,
        names: impl IntoIterator<Item = (u64, Name<'a>, Entry)>,
        mut refer: impl FnMut(Ino),
    ) {
        for (next, name, ino) in [(AFTER_DOT, b".".as_slice(), self.ino), (AFTER_DOTS, b"..", parent)] {
            if self.offset < next {
                if !out.fits(name) {
                    return;
                }
                out.push(&DirItem { ino: ino.0, next, kind: FileType::Directory, name }, None);
            }
        }
        let wanted = names.into_iter().filter(|(position, ..)| *position >= self.position());
        for (position, name, entry) in wanted {
            let name = name.as_bytes();
            if !out.fits(name) {
                return;
            }
            if self.plus {
                refer(entry.ino);
            }
            let next = position.saturating_add(AFTER_DOTS + 1);
            let item = DirItem { ino: entry.attr.ino, next, kind: entry.attr.kind(), name };
            out.push(&item, self.plus.then_some(&entry));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attr, Handle, OFlags};

    fn range(offset: u64, len: u32) -> IoRange {
        let (ino, handle) = (Ino(2), Handle(0));
        IoRange { ino, handle, offset, len, flags: OFlags::RDWR, clear_privileges: false, owner: None }
    }

    #[test]
    fn a_read_ends_at_the_end_of_the_file() {
        for (offset, len, wanted) in
            [(0, 3, "abc"), (2, 9, "cdef"), (6, 1, ""), (7, 1, ""), (u64::MAX, u32::MAX, ""), (0, 0, "")]
        {
            let mut out = Vec::new();
            let data = range(offset, len).read_from(b"abcdef", &mut out);
            assert_eq!((data.bytes(), out.as_slice()), (Some(wanted.len()), wanted.as_bytes()), "{len} at {offset}");
        }
    }

    #[test]
    fn a_write_grows_the_file_within_bounds() {
        // Offset, announced length, input; the outcome and the file, which held "ab".
        for (offset, len, input, outcome, wanted) in [
            (0, 1, "x", Ok(1), "xb"),
            (1, 3, "xyz", Ok(3), "axyz"),
            (4, 2, "xy", Ok(2), "ab\0\0xy"),
            (1, 7, "x", Ok(1), "ax"),
            (4, 4, "x", Ok(1), "ab\0\0x"),
            (6, 0, "", Ok(0), "ab"),
            (0, 0, "", Ok(0), "ab"),
            (0, 9, "123456789", Err(Errno::FBIG), "ab"),
            (u64::MAX, 1, "x", Err(Errno::FBIG), "ab"),
            (i64::MAX.unsigned_abs(), 1, "x", Err(Errno::FBIG), "ab"),
        ] {
            let mut file = b"ab".to_vec();
            let result = range(offset, len).write_to(&mut file, &mut input.as_bytes(), 8);
            assert_eq!(result.map(|data| data.bytes()), outcome.map(Some), "{len} at {offset}");
            assert_eq!(file, wanted.as_bytes(), "{len} at {offset}");
        }
    }

    /// A listing with room for so many names.
    struct LimitedListing(usize, Vec<(String, u64, bool)>);

    impl DirOutput for LimitedListing {
        fn fits(&self, _: &[u8]) -> bool {
            self.1.len() < self.0
        }

        fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
            self.1.push((String::from_utf8_lossy(item.name).into_owned(), item.next, entry.is_some()));
        }
    }

    #[test]
    fn every_name_is_listed_once_whatever_the_steps() {
        let names = [(0, "a"), (3, "b"), (4, "c"), (1 << 40, "d")];
        let entry = |ino| Entry::new(Ino(ino), Attr::new(Ino(ino), FileType::RegularFile, 0o644));
        for room in 1..=7 {
            for plus in [false, true] {
                let (mut seen, mut offset, mut referred) = (Vec::new(), 0, 0);
                loop {
                    let mut out = LimitedListing(room, Vec::new());
                    let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset, plus };
                    let names = names.iter().map(|(at, name)| (*at, Name::new(name.as_bytes()).unwrap(), entry(*at)));
                    at.list(&mut out, Ino::ROOT, names, |_| referred += 1);
                    let Some((_, next, _)) = out.1.last() else { break };
                    offset = *next;
                    seen.append(&mut out.1);
                }
                let listed: Vec<_> = seen.iter().map(|(name, ..)| name.as_str()).collect();
                assert_eq!(listed, [".", "..", "a", "b", "c", "d"], "{room} at a time");
                assert_eq!(referred, if plus { names.len() } else { 0 });
                assert!(seen.iter().skip(2).all(|(.., with_entry)| *with_entry == plus));
            }
        }
    }

    #[test]
    fn after_removing_a_listed_name_no_other_is_missed() {
        let attr = Attr::new(Ino(5), FileType::RegularFile, 0o644);
        let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
        let mut out = LimitedListing(3, Vec::new());
        let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus: false };
        let names =
            [(0, name("a")), (1, name("b")), (2, name("c"))].map(|(at, name)| (at, name, Entry::new(Ino(5), attr)));
        at.list(&mut out, Ino::ROOT, names, |_| ());
        let next = out.1.last().expect("three were listed").1;
        let mut rest = LimitedListing(9, Vec::new());
        DirRange { offset: next, ..at }.list(&mut rest, Ino::ROOT, names.into_iter().skip(1), |_| ());
        assert_eq!(rest.1.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), ["b", "c"]);
    }
}
