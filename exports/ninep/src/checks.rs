//! What a source answers, checked: a mistake of its author is an error for the caller that runs into it, never a
//! broken reply.

use ferry_vfs::{Attr, Entry, Errno, FileType, Ino, Lock, Name, Result, Timespec};

/// Nanoseconds in a second.
const SECOND_NS: u32 = 1_000_000_000;
/// The longest target of a symbolic link (Linux `PATH_MAX` without its NUL).
const TARGET_BYTES_MAX: usize = 4095;
/// The longest value of an extended attribute, and list of their names (Linux `XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const XATTR_BYTES_MAX: usize = 65536;
/// The preferred size of a transfer where the source names none.
const BLKSIZE: u32 = 4096;

/// What cannot be meant is an error; what does no harm is made sensible.
pub(crate) fn attr(mut attr: Attr) -> Result<Attr> {
    if attr.size > i64::MAX.cast_unsigned() || attr.kind() == FileType::Unknown {
        return Err(Errno::IO);
    }
    for time in [&mut attr.atime, &mut attr.mtime, &mut attr.ctime].into_iter().chain(&mut attr.btime) {
        *time = Timespec { nsec: time.nsec.min(SECOND_NS - 1), ..*time };
    }
    if attr.blksize == 0 {
        attr.blksize = BLKSIZE;
    }
    Ok(attr)
}

/// Inode 0 is none.
pub(crate) fn entry(entry: Entry) -> Result<Entry> {
    if entry.ino == Ino(0) {
        return Err(Errno::IO);
    }
    Ok(Entry { attr: attr(entry.attr)?, ..entry })
}

/// The target of a symbolic link.
pub(crate) fn target(target: &[u8]) -> Result<&[u8]> {
    let sound = (1..=TARGET_BYTES_MAX).contains(&target.len()) && !target.contains(&0);
    if sound { Ok(target) } else { Err(Errno::IO) }
}

/// A value of an extended attribute, or the list of their names.
pub(crate) fn xattr(value: Vec<u8>) -> Result<Vec<u8>> {
    if value.len() <= XATTR_BYTES_MAX { Ok(value) } else { Err(Errno::IO) }
}

/// The name of an entry in a listing.
pub(crate) fn is_listable(name: &[u8]) -> bool {
    matches!(name, b"." | b"..") || Name::new(name).is_ok()
}

/// A lock that is in the way.
pub(crate) fn lock(lock: Option<Lock>) -> Result<Option<Lock>> {
    match lock {
        Some(lock) if lock.start > lock.end || lock.end > i64::MAX.cast_unsigned() => Err(Errno::IO),
        sound => Ok(sound),
    }
}
