//! Copies of the last, partial page of files in the window.
//!
//! QEMU maps nothing beyond a file's end (`qemu_ram_alloc_from_fd`), but a guest requests 2 MiB at a time, which may
//! contain the end. So the file is mapped up to its last whole page, and the rest of the 2 MiB is a copy: memory with
//! the rest of the file and room for it to grow. Copy and file are synchronized whenever the guest sends a request that
//! could see a difference (close-to-open, as with a page cache). Files that cannot be opened for writing are copied
//! completely, 2 MiB at a time.
//!
//! Synchronizing reads both. So it is limited to the requested range: for a WRITE its range, and before attributes are
//! returned to a guest only if they have changed.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use ferry_vfs::sync::lock;
use ferry_vfs::{Backing, Errno, Ino, Result};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite, retry_on_intr};

/// The unit of comparison in bytes.
const BLOCK_BYTES: usize = 4096;
/// All of a file.
pub(super) const WHOLE: Range<u64> = 0..u64::MAX;
/// A file changed more recently may change again with the same time stamp: file system clocks tick (every 10 ms at
/// most), and Linux stamps a write before its bytes are visible.
const YOUNG: Duration = Duration::from_millis(250);

/// A copy of a part of a file.
pub(super) struct EofCopy {
    file: Arc<Backing>,
    writable: bool,
    /// Its first byte in the file, and its length including room to grow.
    start: u64,
    bytes: u64,
    /// The copy. After it, beyond the mapping, the file stores for the next server what both sides had at the last
    /// synchronization, up to the file's end then, and the number of those bytes. Bytes past the end belong to the
    /// file: the sides are synchronized before the guest learns of a longer file.
    copy: Arc<OwnedFd>,
    base_bytes: usize,
}

/// The size of the number of common bytes.
const COUNT_BYTES: u64 = 8;

impl EofCopy {
    /// Copies the file from `start`, with room up to `bytes`, but nothing past `end`, where the file will end.
    pub(super) fn new(file: Arc<Backing>, writable: bool, (start, bytes): (u64, u64), end: u64) -> Result<Self> {
        let copy = memfd_create("ferry-dax", MemfdFlags::CLOEXEC)?;
        ftruncate(&copy, 2 * bytes + COUNT_BYTES)?;
        let mut eof_copy = Self { file, writable, start, bytes, copy: Arc::new(copy), base_bytes: 0 };
        let size = FileStamp::at(&eof_copy.file)?.bytes.min(end);
        eof_copy.sync(size, &WHOLE)?;
        Ok(eof_copy)
    }

    /// Continues with the copy of a previous server.
    pub(super) fn adopt(file: Arc<Backing>, writable: bool, (start, bytes): (u64, u64), copy: OwnedFd) -> Result<Self> {
        let count = read(copy.as_fd(), 2 * bytes, 8)?;
        let base_bytes = count.first_chunk().map_or(0, |count| u64::from_le_bytes(*count)).min(bytes);
        let base_bytes = usize::try_from(base_bytes).map_err(|_| Errno::OVERFLOW)?;
        Ok(Self { file, writable, start, bytes, copy: Arc::new(copy), base_bytes })
    }

    /// Ends the copy after the guest has unmapped it.
    pub(super) fn end(mut self) -> Result<()> {
        match self.writable {
            true => self.sync(FileStamp::at(&self.file)?.bytes, &WHOLE),
            false => Ok(()),
        }
    }

    /// The memory.
    pub(super) fn copy(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.copy)
    }

    /// Writes the guest's changes to the file, which is `size` bytes long, and other changes of the file to the copy:
    /// in this part, and wherever its length changed. The guest's change wins, except past the file's end.
    fn sync(&mut self, size: u64, part: &Range<u64>) -> Result<()> {
        let in_file = self.index(size)?;
        let end = self.index(part.end)?.min(in_file).min(self.base_bytes);
        let merged = self.merge(self.index(part.start)?..end);
        merged.and(self.follow(in_file))
    }

    /// Returns the position of a file offset relative to the copy's start.
    fn index(&self, offset: u64) -> Result<usize> {
        usize::try_from(offset.saturating_sub(self.start).min(self.bytes)).map_err(|_| Errno::OVERFLOW)
    }

    /// Synchronizes a part that was, and is, inside the file.
    fn merge(&mut self, part: Range<usize>) -> Result<()> {
        if part.is_empty() {
            return Ok(());
        }
        let (in_file, in_copy) = (self.start + part.start as u64, part.start as u64);
        let mut host = read(self.file.as_fd(), in_file, part.len())?;
        let guest = read(self.copy.as_fd(), in_copy, part.len())?;
        let base = read(self.copy.as_fd(), self.bytes + in_copy, part.len())?;
        if self.writable {
            for (start, end) in differences(&guest, &base) {
                write(self.file.as_fd(), in_file + start as u64, &guest[start..end])?;
                host[start..end].copy_from_slice(&guest[start..end]);
            }
        }
        for (start, end) in differences(&host, &guest) {
            write(self.copy.as_fd(), in_copy + start as u64, &host[start..end])?;
        }
        for (start, end) in differences(&host, &base) {
            write(self.copy.as_fd(), self.bytes + in_copy + start as u64, &host[start..end])?;
        }
        Ok(())
    }

    /// Follows changes of the file's length.
    fn follow(&mut self, in_file: usize) -> Result<()> {
        let (start, end) = (in_file.min(self.base_bytes), in_file.max(self.base_bytes));
        if start == end {
            return Ok(());
        }
        let mut host = read(self.file.as_fd(), self.start + start as u64, in_file - start)?;
        host.resize(end - start, 0);
        let guest = read(self.copy.as_fd(), start as u64, end - start)?;
        for (from, to) in differences(&host, &guest) {
            write(self.copy.as_fd(), (start + from) as u64, &host[from..to])?;
        }
        write(self.copy.as_fd(), self.bytes + start as u64, &host[..in_file - start])?;
        self.base_bytes = in_file;
        write(self.copy.as_fd(), 2 * self.bytes, &(in_file as u64).to_le_bytes())
    }
}

/// The length of a file, and its change time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileStamp {
    bytes: u64,
    /// Seconds and nanoseconds of 1970.
    changed: (i64, u64),
}

impl FileStamp {
    fn at(file: &Backing) -> Result<Self> {
        let stat = fstat(file.as_fd())?;
        Ok(Self { bytes: u64::try_from(stat.st_size).unwrap_or(0), changed: (stat.st_ctime, stat.st_ctime_nsec) })
    }

    /// Returns whether every later change will alter it.
    fn is_old(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = self.changed;
        let changed = u64::try_from(seconds).map(|s| Duration::from_secs(s) + Duration::from_nanos(nanoseconds));
        changed.is_ok_and(|changed| now > changed + YOUNG)
    }
}

/// Reads this many bytes; bytes past the end are 0.
pub(super) fn read(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    let mut done = 0;
    while done < bytes {
        match retry_on_intr(|| pread(file, &mut out[done..], offset + done as u64))? {
            0 => break,
            count => done += count,
        }
    }
    Ok(out)
}

/// Writes all bytes.
pub(super) fn write(file: BorrowedFd<'_>, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match retry_on_intr(|| pwrite(file, bytes, offset))? {
            0 => return Err(Errno::IO),
            count => (bytes, offset) = (&bytes[count..], offset + count as u64),
        }
    }
    Ok(())
}

/// Returns the runs in which two sides of equal length differ, as begin and end.
fn differences(one: &[u8], other: &[u8]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (block, (one, other)) in one.chunks(BLOCK_BYTES).zip(other.chunks(BLOCK_BYTES)).enumerate() {
        if one == other {
            continue;
        }
        for at in (0..one.len()).filter(|at| one[*at] != other[*at]) {
            let at = block * BLOCK_BYTES + at;
            match runs.last_mut() {
                Some((_, end)) if *end == at => *end += 1,
                _ => runs.push((at, at + 1)),
            }
        }
    }
    runs
}

/// The tails of one file.
#[derive(Default)]
struct FileCopies {
    /// By their chunk's offset in the window.
    eof_copies: HashMap<u64, EofCopy>,
    /// The file's state when all of them were last synchronized completely.
    seen: Option<FileStamp>,
}

impl FileCopies {
    fn look(&self) -> Result<Option<FileStamp>> {
        self.eof_copies.values().next().map(|eof_copy| FileStamp::at(&eof_copy.file)).transpose()
    }

    /// See [`EofCopy::sync`]: all of them, or only the writable ones.
    fn sync(&mut self, part: &Range<u64>, all: bool) -> Result<()> {
        let Some(look) = self.look()? else { return Ok(()) };
        let is_settled = *part == WHOLE && all && look.is_old();
        let eof_copies = self.eof_copies.values_mut().filter(|eof_copy| all || eof_copy.writable);
        let outcome = eof_copies.map(|eof_copy| eof_copy.sync(look.bytes, part)).fold(Ok(()), Result::and);
        if is_settled && outcome.is_ok() {
            self.seen = Some(look);
        }
        outcome
    }

    fn has_changed(&self) -> bool {
        self.seen.is_none() || self.look() != Ok(self.seen)
    }
}

/// All tails in a window. One thread adds and removes them.
#[derive(Default)]
pub(super) struct EofCopies {
    /// Their number: the only check while there are none.
    count: AtomicUsize,
    files: Mutex<HashMap<Ino, Arc<Mutex<FileCopies>>>>,
}

impl EofCopies {
    fn of(&self, ino: Ino) -> Option<Arc<Mutex<FileCopies>>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        lock(&self.files).get(&ino).cloned()
    }

    /// Synchronizes the copies of a part of a file with the file, also after an error in another part.
    pub(super) fn sync(&self, ino: Ino, part: &Range<u64>) -> Result<()> {
        self.of(ino).map_or(Ok(()), |file| lock(&file).sync(part, true))
    }

    /// As [`Self::sync`], for writable copies only.
    pub(super) fn writeback(&self, ino: Ino, part: &Range<u64>) -> Result<()> {
        self.of(ino).map_or(Ok(()), |file| lock(&file).sync(part, false))
    }

    /// As [`Self::sync`], for all of a file whose state has changed. Later stores of the guest, and of others through
    /// mappings, may stay unsynchronized, because they need not change the time stamp.
    pub(super) fn sync_if_changed(&self, ino: Ino) -> Result<()> {
        let Some(file) = self.of(ino) else { return Ok(()) };
        let mut file = lock(&file);
        if file.has_changed() { file.sync(&WHOLE, true) } else { Ok(()) }
    }

    /// As [`Self::writeback`] for all files. Returns those that failed, with the error.
    pub(super) fn writeback_all(&self) -> Vec<(Ino, Errno)> {
        let files: Vec<_> = lock(&self.files).iter().map(|(ino, file)| (*ino, Arc::clone(file))).collect();
        files.into_iter().filter_map(|(ino, file)| Some((ino, lock(&file).sync(&WHOLE, false).err()?))).collect()
    }

    /// Adds the copy of the chunk at this offset.
    pub(super) fn insert(&self, ino: Ino, window_offset: u64, eof_copy: EofCopy) {
        // Only one of both locks at a time: a file on a file system that hangs must not hold up others.
        let file = Arc::clone(lock(&self.files).entry(ino).or_default());
        let mut file = lock(&file);
        file.eof_copies.insert(window_offset, eof_copy);
        file.seen = None;
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Removes the copy of the chunk at this offset, which the guest has unmapped.
    /// After an error the guest's stores may be lost.
    pub(super) fn remove(&self, ino: Ino, window_offset: u64) -> Result<()> {
        let Some(file) = lock(&self.files).get(&ino).cloned() else { return Ok(()) };
        let mut file = lock(&file);
        let Some(eof_copy) = file.eof_copies.remove(&window_offset) else { return Ok(()) };
        self.count.fetch_sub(1, Ordering::AcqRel);
        if file.eof_copies.is_empty() {
            lock(&self.files).remove(&ino);
        }
        eof_copy.end()
    }

    /// Returns the memory of the copy of the chunk at this offset.
    pub(super) fn copy(&self, ino: Ino, window_offset: u64) -> Option<Arc<OwnedFd>> {
        let file = self.of(ino)?;
        lock(&file).eof_copies.get(&window_offset).map(EofCopy::copy)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const ROOM: u64 = 2 << 20;
    const INO: Ino = Ino(7);

    struct MergeSides {
        file: File,
        copy: File,
        eof_copies: EofCopies,
    }

    /// Returns a file with a copy of its bytes from 4096, and their contents.
    fn sides(writable: bool, text: &[u8]) -> MergeSides {
        let file = File::from(memfd_create("file", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(text, 4096).unwrap();
        let backing = Arc::new(Backing::new(file.try_clone().unwrap().into()));
        let eof_copy = EofCopy::new(backing, writable, (4096, ROOM), u64::MAX).unwrap();
        let copy = File::from(eof_copy.copy().try_clone().unwrap());
        let eof_copies = EofCopies::default();
        eof_copies.insert(INO, 0, eof_copy);
        MergeSides { file, copy, eof_copies }
    }

    impl MergeSides {
        fn check(&self, file: &[u8], copy: &[u8]) {
            self.eof_copies.sync(Ino(8), &WHOLE).unwrap();
            self.eof_copies.sync(INO, &WHOLE).unwrap();
            assert_eq!(self.file.metadata().unwrap().len(), 4096 + file.len() as u64);
            assert!(read(self.file.as_fd(), 4096, file.len()).unwrap() == file, "the file");
            let mut expected = copy.to_vec();
            expected.resize(usize::try_from(ROOM).unwrap(), 0);
            assert!(read(self.copy.as_fd(), 0, expected.len()).unwrap() == expected, "the copy");
        }
    }

    #[test]
    fn changes_of_either_side_reach_the_other() {
        let sides = sides(true, b"abcdefgh");
        sides.check(b"abcdefgh", b"abcdefgh");
        sides.copy.write_all_at(b"B", 1).unwrap();
        sides.file.write_all_at(b"H", 4096 + 7).unwrap();
        sides.check(b"aBcdefgH", b"aBcdefgH");
        // Both: the guest's is kept.
        sides.copy.write_all_at(b"1", 0).unwrap();
        sides.file.write_all_at(b"22", 4096).unwrap();
        sides.check(b"12cdefgH", b"12cdefgH");
        // It grows, over more than a page, and shrinks.
        let long = vec![b'x'; 100_000];
        sides.file.write_all_at(&long, 4096 + 8).unwrap();
        let all = [&b"12cdefgH"[..], &long].concat();
        sides.check(&all, &all);
        sides.copy.write_all_at(b"END", 99_000).unwrap();
        sides.file.set_len(4096 + 99_002).unwrap();
        let mut all = all[..99_002].to_vec();
        all[99_000..].copy_from_slice(b"EN");
        sides.check(&all, &all);
        sides.file.set_len(4096 + 3).unwrap();
        sides.check(b"12c", b"12c");
        sides.file.set_len(4096 + 6).unwrap();
        sides.check(b"12c\0\0\0", b"12c\0\0\0");
    }

    #[test]
    fn bytes_past_the_end_belong_to_the_file() {
        let sides = sides(true, b"abc");
        // Bytes are stored past the end, and then another process appends there.
        sides.copy.write_all_at(b"XXXX", 3).unwrap();
        sides.check(b"abc", b"abcXXXX");
        sides.file.write_all_at(b"de", 4096 + 3).unwrap();
        sides.check(b"abcde", b"abcdeXX");
        // The same where the file has a hole then, and from there on the guest may store.
        sides.file.set_len(4096 + 7).unwrap();
        sides.check(b"abcde\0\0", b"abcde\0\0");
        sides.copy.write_all_at(b"g", 6).unwrap();
        sides.check(b"abcde\0g", b"abcde\0g");
        // Longer and changed within the old end, at once.
        sides.copy.write_all_at(b"EFGH", 4).unwrap();
        sides.file.write_all_at(b"hij", 4096 + 7).unwrap();
        sides.check(b"abcdEFGhij", b"abcdEFGhij");
    }

    #[test]
    fn a_read_only_copy_changes_nothing() {
        let sides = sides(false, b"abc");
        sides.copy.write_all_at(b"X", 1).unwrap();
        sides.check(b"abc", b"abc");
    }

    #[test]
    fn only_the_requested_range_is_compared() {
        let sides = sides(true, b"abcdefgh");
        let stored = || read(sides.file.as_fd(), 4096, 9).unwrap();
        sides.copy.write_all_at(b"ABCDEFGH", 0).unwrap();
        // Before this part, and behind all; but where it has become longer.
        sides.file.write_all_at(b"i", 4096 + 8).unwrap();
        sides.eof_copies.sync(INO, &(0..4096)).unwrap();
        sides.eof_copies.sync(INO, &(8192..8193)).unwrap();
        assert_eq!(stored(), b"abcdefghi");
        assert_eq!(read(sides.copy.as_fd(), 0, 9).unwrap(), b"ABCDEFGHi");
        sides.eof_copies.writeback(INO, &(4098..4100)).unwrap();
        assert_eq!(stored(), b"abCDefghi");
        sides.eof_copies.sync(INO, &(4000..4097)).unwrap();
        assert_eq!(stored(), b"AbCDefghi");
        // Where the guest stores nothing, nothing is taken from.
        let reader = super::tests::sides(false, b"abc");
        reader.file.write_all_at(b"X", 4096).unwrap();
        reader.eof_copies.writeback(INO, &WHOLE).unwrap();
        assert!(reader.eof_copies.writeback_all().is_empty());
        assert_eq!(read(reader.copy.as_fd(), 0, 3).unwrap(), b"abc");
        reader.check(b"Xbc", b"Xbc");
    }

    #[test]
    fn an_unchanged_file_is_not_compared() {
        let sides = sides(true, b"abc");
        let stored = || read(sides.file.as_fd(), 4096, 3).unwrap();
        std::thread::sleep(YOUNG + YOUNG / 5);
        sides.eof_copies.sync_if_changed(INO).unwrap();
        sides.copy.write_all_at(b"2", 1).unwrap();
        sides.eof_copies.sync_if_changed(INO).unwrap();
        assert_eq!(stored(), b"abc", "it was compared for nothing");
        // It changes, and another part of it comes.
        sides.file.write_all_at(b"C", 4096 + 2).unwrap();
        sides.eof_copies.sync_if_changed(INO).unwrap();
        assert_eq!((stored(), read(sides.copy.as_fd(), 0, 3).unwrap()), (b"a2C".to_vec(), b"a2C".to_vec()));
        std::thread::sleep(YOUNG + YOUNG / 5);
        sides.eof_copies.sync_if_changed(INO).unwrap();
        sides.copy.write_all_at(b"3", 2).unwrap();
        let backing = Arc::new(Backing::new(sides.file.try_clone().unwrap().into()));
        sides.eof_copies.insert(INO, ROOM, EofCopy::new(backing, true, (4096 + ROOM, ROOM), u64::MAX).unwrap());
        sides.eof_copies.sync_if_changed(INO).unwrap();
        assert_eq!(stored(), b"a23");
    }

    #[test]
    fn recent_time_stamps_are_not_trusted() {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let at = |since_1970: Duration| {
            let changed = (i64::try_from(since_1970.as_secs()).unwrap(), since_1970.subsec_nanos().into());
            FileStamp { bytes: 0, changed }.is_old()
        };
        assert!(at(now - 2 * YOUNG) && at(Duration::ZERO));
        assert!(!at(now + Duration::from_secs(100)));
        assert!(!FileStamp { bytes: 0, changed: (-1, 0) }.is_old());
    }

    #[test]
    fn writeback_covers_all_files() {
        let (sides, other) = (sides(true, b"abc"), sides(true, b"def"));
        let eof_copy =
            lock(&other.eof_copies.files).get(&INO).and_then(|file| lock(file).eof_copies.remove(&0)).unwrap();
        sides.eof_copies.insert(Ino(8), 1 << 21, eof_copy);
        sides.copy.write_all_at(b"A", 0).unwrap();
        other.copy.write_all_at(b"D", 0).unwrap();
        assert!(sides.eof_copies.writeback_all().is_empty());
        assert_eq!(read(sides.file.as_fd(), 4096, 3).unwrap(), b"Abc");
        assert_eq!(read(other.file.as_fd(), 4096, 3).unwrap(), b"Def");
    }

    /// The server may have been killed; the copy holds the common bytes.
    #[test]
    fn the_next_server_continues_with_a_copy() {
        let before = sides(true, b"abcdefgh");
        before.check(b"abcdefgh", b"abcdefgh");
        let copy = before.copy.try_clone().unwrap();
        std::mem::forget(before.eof_copies);
        // Either side goes on meanwhile.
        copy.write_all_at(b"G", 6).unwrap();
        before.file.write_all_at(b"B", 4096 + 1).unwrap();
        before.file.write_all_at(b"ij", 4096 + 8).unwrap();
        let backing = Arc::new(Backing::new(before.file.try_clone().unwrap().into()));
        let eof_copy = EofCopy::adopt(backing, true, (4096, ROOM), copy.try_clone().unwrap().into()).unwrap();
        let eof_copies = EofCopies::default();
        eof_copies.insert(INO, 0, eof_copy);
        let after = MergeSides { file: before.file, copy, eof_copies };
        after.check(b"aBcdefGhij", b"aBcdefGhij");
        after.file.set_len(4096 + 4).unwrap();
        after.check(b"aBcd", b"aBcd");
    }

    #[test]
    fn the_last_stores_are_not_lost() {
        let sides = sides(true, b"abc");
        sides.copy.write_all_at(b"Z", 2).unwrap();
        sides.eof_copies.remove(INO, 0).unwrap();
        sides.eof_copies.remove(INO, 0).unwrap();
        assert_eq!(read(sides.file.as_fd(), 4096, 3).unwrap(), b"abZ");
        assert_eq!(sides.eof_copies.count.load(Ordering::SeqCst), 0);
        assert!(lock(&sides.eof_copies.files).is_empty());
    }
}
