//! The last part of a file in the window.
//!
//! QEMU maps nothing that reaches beyond a file's end (`qemu_ram_alloc_from_fd`), and a guest asks for 2 MiB at a time, of
//! which the end is anywhere. So the file itself is mapped up to its last whole page, and what is left of the 2 MiB is a
//! copy: memory that holds the rest of the file, and has room for it to grow. Copy and file are brought together
//! whenever the guest asks for something that could tell the difference: close-to-open, as with a page cache. Files that
//! cannot be opened for writing are copied as a whole, 2 MiB at a time.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_vfs::{Backing, Errno, Ino, Result};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

/// The step in which the sides are compared.
const BLOCK_BYTES: usize = 4096;

/// A part of a file, as a copy.
pub(super) struct Tail {
    file: Arc<Backing>,
    writable: bool,
    /// Its first byte in the file, and its length: room included.
    start: u64,
    bytes: u64,
    copy: Arc<OwnedFd>,
    /// What both sides had when they were last brought together, up to where the file ended then. What is behind that is the file's: the
    /// sides are brought together before the guest is told of a longer file, so what it stored there was behind the end.
    base: Vec<u8>,
}

impl Tail {
    /// Copies what the file has from `start` on, with room up to `bytes`; but nothing behind `end`, where the file is about to end.
    pub(super) fn new(file: Arc<Backing>, writable: bool, (start, bytes): (u64, u64), end: u64) -> Result<Self> {
        let copy = memfd_create("ferry-dax", MemfdFlags::CLOEXEC)?;
        ftruncate(&copy, bytes)?;
        let mut tail = Self { file, writable, start, bytes, copy: Arc::new(copy), base: Vec::new() };
        tail.settle_up_to(end)?;
        Ok(tail)
    }

    /// The memory.
    pub(super) fn copy(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.copy)
    }

    /// Brings what the guest has stored into the file, and what the file has got otherwise into the copy. Where both have
    /// changed, the guest's is kept, but for what was behind the file's end.
    fn settle(&mut self) -> Result<()> {
        self.settle_up_to(u64::MAX)
    }

    fn settle_up_to(&mut self, end: u64) -> Result<()> {
        let size = u64::try_from(fstat(self.file.as_fd())?.st_size).unwrap_or(0).min(end);
        let in_file = usize::try_from(size.saturating_sub(self.start).min(self.bytes)).map_err(|_| Errno::OVERFLOW)?;
        let (length, common) = (in_file.max(self.base.len()), in_file.min(self.base.len()));
        let mut host = read(self.file.as_fd(), self.start, in_file)?;
        host.resize(length, 0);
        let guest = read(self.copy.as_fd(), 0, length)?;
        if self.writable {
            for (start, end) in differences(&guest[..common], &self.base[..common]) {
                write(self.file.as_fd(), self.start + start as u64, &guest[start..end])?;
                host[start..end].copy_from_slice(&guest[start..end]);
            }
        }
        for (start, end) in differences(&host, &guest) {
            write(self.copy.as_fd(), start as u64, &host[start..end])?;
        }
        host.truncate(in_file);
        self.base = host;
        Ok(())
    }
}

/// Reads so many bytes; what is not there is 0.
pub(super) fn read(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; bytes];
    let mut done = 0;
    while done < bytes {
        match pread(file, &mut out[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(out)
}

/// Writes all bytes.
pub(super) fn write(file: BorrowedFd<'_>, mut offset: u64, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => (bytes, offset) = (&bytes[count..], offset + count as u64),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The runs in which two equally long sides differ, as begin and end.
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

/// The tails of one file, by their chunk's place in the window.
type OfFile = Arc<Mutex<HashMap<u64, Tail>>>;

/// All tails in a window.
#[derive(Default)]
pub(super) struct Tails {
    /// How many there are: all that is looked at while there are none.
    count: AtomicUsize,
    files: Mutex<HashMap<Ino, OfFile>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settle(tails: &OfFile) -> Result<()> {
    let outcomes: Vec<_> = lock(tails).values_mut().map(Tail::settle).collect();
    outcomes.into_iter().collect()
}

impl Tails {
    /// Brings the copies of a file's parts and the file together.
    ///
    /// # Errors
    /// Those of reading and writing; the other parts are seen to all the same.
    pub(super) fn settle(&self, ino: Ino) -> Result<()> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let Some(tails) = lock(&self.files).get(&ino).cloned() else { return Ok(()) };
        settle(&tails)
    }

    /// The same for all files. Answers those with which it did not succeed, and why.
    pub(super) fn settle_all(&self) -> Vec<(Ino, Errno)> {
        let files: Vec<_> = lock(&self.files).iter().map(|(ino, tails)| (*ino, Arc::clone(tails))).collect();
        files.into_iter().filter_map(|(ino, tails)| Some((ino, settle(&tails).err()?))).collect()
    }

    /// Notes the tail of the chunk at this place.
    pub(super) fn insert(&self, ino: Ino, window_offset: u64, tail: Tail) {
        let mut files = lock(&self.files);
        lock(files.entry(ino).or_default()).insert(window_offset, tail);
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Forgets the tail of the chunk at this place, which the guest does not use any more.
    ///
    /// # Errors
    /// As for [`Self::settle`]: what the guest has stored may be lost.
    pub(super) fn remove(&self, ino: Ino, window_offset: u64) -> Result<()> {
        let mut files = lock(&self.files);
        let Some(tails) = files.get(&ino).cloned() else { return Ok(()) };
        let mut tails = lock(&tails);
        let Some(mut tail) = tails.remove(&window_offset) else { return Ok(()) };
        self.count.fetch_sub(1, Ordering::AcqRel);
        if tails.is_empty() {
            files.remove(&ino);
        }
        drop(files);
        tail.settle()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const ROOM: u64 = 2 << 20;
    const INO: Ino = Ino(7);

    struct Sides {
        file: File,
        copy: File,
        tails: Tails,
    }

    /// A file whose bytes from 4096 on are a tail, and what is in it.
    fn sides(writable: bool, text: &[u8]) -> Sides {
        let file = File::from(memfd_create("file", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(text, 4096).unwrap();
        let backing = Arc::new(Backing::new(file.try_clone().unwrap().into()));
        let tail = Tail::new(backing, writable, (4096, ROOM), u64::MAX).unwrap();
        let copy = File::from(tail.copy().try_clone().unwrap());
        let tails = Tails::default();
        tails.insert(INO, 0, tail);
        Sides { file, copy, tails }
    }

    impl Sides {
        fn check(&self, file: &[u8], copy: &[u8]) {
            self.tails.settle(Ino(8)).unwrap();
            self.tails.settle(INO).unwrap();
            assert_eq!(self.file.metadata().unwrap().len(), 4096 + file.len() as u64);
            assert!(read(self.file.as_fd(), 4096, file.len()).unwrap() == file, "the file");
            let mut expected = copy.to_vec();
            expected.resize(usize::try_from(ROOM).unwrap(), 0);
            assert!(read(self.copy.as_fd(), 0, expected.len()).unwrap() == expected, "the copy");
        }
    }

    #[test]
    fn what_either_side_changes_the_other_gets() {
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
    fn what_is_behind_the_end_is_the_files() {
        let sides = sides(true, b"abc");
        // Stored behind the end, where somebody appends then.
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
    fn what_was_stored_in_any_file_is_brought_there() {
        let (sides, other) = (sides(true, b"abc"), sides(true, b"def"));
        let tail = lock(&other.tails.files).get(&INO).and_then(|tails| lock(tails).remove(&0)).unwrap();
        sides.tails.insert(Ino(8), 1 << 21, tail);
        sides.copy.write_all_at(b"A", 0).unwrap();
        other.copy.write_all_at(b"D", 0).unwrap();
        assert!(sides.tails.settle_all().is_empty());
        assert_eq!(read(sides.file.as_fd(), 4096, 3).unwrap(), b"Abc");
        assert_eq!(read(other.file.as_fd(), 4096, 3).unwrap(), b"Def");
    }

    #[test]
    fn the_last_stores_are_not_lost() {
        let sides = sides(true, b"abc");
        sides.copy.write_all_at(b"Z", 2).unwrap();
        sides.tails.remove(INO, 0).unwrap();
        sides.tails.remove(INO, 0).unwrap();
        assert_eq!(read(sides.file.as_fd(), 4096, 3).unwrap(), b"abZ");
        assert_eq!(sides.tails.count.load(Ordering::SeqCst), 0);
        assert!(lock(&sides.tails.files).is_empty());
    }
}
