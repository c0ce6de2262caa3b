//! Checks what a source returns. An invalid value becomes `IO` for that request; a malformed reply would make Linux
//! abort the whole mount.

use crate::{Attr, Entry, Errno, FileType, Ino, Lock, Name, Result, Timespec};

/// Nanoseconds in a second.
const SECOND_NS: u32 = 1_000_000_000;
/// The maximum preferred transfer size in bytes: more than any file system has. Linux shifts by its logarithm.
const BLKSIZE_MAX: u32 = 1 << 30;
/// The longest target of a symbolic link (Linux `PATH_MAX` without its NUL).
const TARGET_BYTES_MAX: usize = 4095;
/// The longest value of an extended attribute, and list of their names (Linux `XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const XATTR_BYTES_MAX: usize = 65536;

/// Checks attributes. Harmless invalid values are replaced; others are errors.
///
/// # Errors
/// `IO`: a size past `i64::MAX`, or no file type.
pub fn attr(mut attr: Attr) -> Result<Attr> {
    if attr.size > i64::MAX.cast_unsigned() || attr.kind() == FileType::Unknown {
        return Err(Errno::IO);
    }
    for time in [&mut attr.atime, &mut attr.mtime, &mut attr.ctime].into_iter().chain(&mut attr.btime) {
        *time = Timespec { nsec: time.nsec.min(SECOND_NS - 1), ..*time };
    }
    if !attr.blksize.is_power_of_two() || attr.blksize > BLKSIZE_MAX {
        // 0: the client chooses.
        attr.blksize = 0;
    }
    Ok(attr)
}

/// Checks an entry. For clients, inode 0 means "no such name".
///
/// # Errors
/// `IO`: inode 0, or invalid attributes.
pub fn entry(entry: Entry) -> Result<Entry> {
    if entry.ino == Ino(0) {
        return Err(Errno::IO);
    }
    Ok(Entry { attr: attr(entry.attr)?, ..entry })
}

/// Checks the target of a symbolic link.
///
/// # Errors
/// `IO`: it is empty, longer than Linux allows, or has a NUL.
pub fn target(target: &[u8]) -> Result<&[u8]> {
    let is_valid = (1..=TARGET_BYTES_MAX).contains(&target.len()) && !target.contains(&0);
    if is_valid { Ok(target) } else { Err(Errno::IO) }
}

/// Checks the value of an extended attribute, or the list of names.
///
/// # Errors
/// `IO`: it is longer than Linux allows.
pub fn xattr(value: &[u8]) -> Result<&[u8]> {
    if value.len() <= XATTR_BYTES_MAX { Ok(value) } else { Err(Errno::IO) }
}

/// Returns whether a name may be listed.
pub fn is_listable(name: &[u8]) -> bool {
    matches!(name, b"." | b"..") || Name::new(name).is_ok()
}

/// Checks a conflicting lock.
///
/// # Errors
/// `IO`: its range ends before it begins, or past the maximum file offset.
pub fn lock(lock: Option<Lock>) -> Result<Option<Lock>> {
    match lock {
        Some(lock) if lock.start > lock.end || lock.end > i64::MAX.cast_unsigned() => Err(Errno::IO),
        valid => Ok(valid),
    }
}

/// Checks that a number is at most `max`.
///
/// # Errors
/// `IO`: it is greater.
pub fn at_most(number: u64, max: u64) -> Result<u64> {
    if number <= max { Ok(number) } else { Err(Errno::IO) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Attr = Attr {
        ino: 1,
        size: 1,
        blocks: 1,
        atime: Timespec { sec: 1, nsec: 1 },
        mtime: Timespec { sec: 1, nsec: 1 },
        ctime: Timespec { sec: -1, nsec: 999_999_999 },
        btime: None,
        mode: 0o100_644,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        submount: false,
    };

    #[test]
    fn attributes_are_refused_or_corrected() {
        let late = Timespec { sec: 1, nsec: 1_000_000_000 };
        let last = Timespec { sec: 1, nsec: 999_999_999 };
        for (given, expected) in [
            (FILE, Ok(FILE)),
            (Attr { size: 1 << 63, ..FILE }, Err(Errno::IO)),
            (Attr { size: (1 << 63) - 1, ..FILE }, Ok(Attr { size: (1 << 63) - 1, ..FILE })),
            (Attr { mode: 0o644, ..FILE }, Err(Errno::IO)),
            (Attr { mode: 0o170_644, ..FILE }, Err(Errno::IO)),
            (Attr { blksize: 0, ..FILE }, Ok(Attr { blksize: 0, ..FILE })),
            (Attr { blksize: 1000, ..FILE }, Ok(Attr { blksize: 0, ..FILE })),
            (Attr { blksize: 1 << 31, ..FILE }, Ok(Attr { blksize: 0, ..FILE })),
            (Attr { atime: late, btime: Some(late), ..FILE }, Ok(Attr { atime: last, btime: Some(last), ..FILE })),
            (Attr { mtime: Timespec { sec: 1, nsec: u32::MAX }, ..FILE }, Ok(Attr { mtime: last, ..FILE })),
        ] {
            assert_eq!(attr(given), expected, "{given:?}");
        }
    }
}
