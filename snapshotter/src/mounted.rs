//! Detects whether a snapshot is still mounted.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{IoContext, Result};

const MOUNT_TABLE: &str = "/proc/self/mountinfo";

/// Whether a directory `ROOT/snapshots/ID/fs` is a directory of an overlayfs, or mounted itself.
///
/// # Errors
///
/// The kernel's mount table cannot be read.
pub fn is_in_use(upper: &Path) -> Result<bool> {
    let table = fs::read(MOUNT_TABLE).doing("read", MOUNT_TABLE)?;
    let uses = uses(&table, upper);
    let own = fs::metadata(upper).doing("inspect", upper)?;
    // A mount that cannot be inspected counts as a use.
    let is_it = |at: &Vec<u8>| {
        fs::metadata(OsStr::from_bytes(at)).map_or(true, |found| (found.dev(), found.ino()) == (own.dev(), own.ino()))
    };
    Ok(uses.is_in_overlay || uses.bound.iter().any(is_it))
}

/// The uses of the directory of a snapshot in a mount table.
#[derive(Debug, Default, PartialEq, Eq)]
struct Uses {
    /// Whether an overlayfs has it, as its upper directory or a lower one.
    is_in_overlay: bool,
    /// The mount points of directories that may be the same.
    bound: Vec<Vec<u8>>,
}

/// Parses a mount table (proc_pid_mountinfo(5)). Paths of snapshots have no escapes, because [`crate::directories`] refuses such roots.
fn uses(table: &[u8], upper: &Path) -> Uses {
    let own = upper.as_os_str().as_bytes();
    // Paths in the table are relative to the root of a file system, which may be the root of all snapshots.
    let id = upper.parent().and_then(Path::file_name).unwrap_or_default();
    let tail = [&b"/snapshots/"[..], id.as_bytes(), b"/fs"].concat();
    let mut uses = Uses::default();
    for line in table.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let [_, _, _, root, at, .., options] = fields[..] else { continue };
        if root.ends_with(&tail) {
            uses.bound.push(unescaped(at));
        }
        // `upperdir=`, `lowerdir=` with colons between, or `lowerdir+=`.
        uses.is_in_overlay |= options.split(|byte| matches!(byte, b',' | b':' | b'=')).any(|found| *found == *own);
    }
    uses
}

/// Undoes the escapes of a mount table: a backslash and three octal digits.
fn unescaped(path: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    let mut rest = path;
    while let [first, tail @ ..] = rest {
        let escaped = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                found.push(byte);
                rest = &tail[3..];
            }
            None => {
                found.push(*first);
                rest = tail;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn upper_directories_and_bind_mounts_are_found() {
        let table = b"22 27 0:21 / /sys rw shared:7 - sysfs sysfs rw\nbroken\n\n\
            36 35 98:0 / /mnt rw shared:2 - overlay overlay rw,lowerdir=/x,upperdir=/root/snapshots/7/fs,workdir=/w\n\
            37 35 98:1 / /mnt rw - overlay overlay ro,lowerdir=/root/snapshots/5/layer:/root/snapshots/4/fs\n\
            37 35 98:1 / /mnt rw - overlay overlay ro,lowerdir+=/root/snapshots/5/layer,lowerdir+=/root/snapshots/3/fs\n\
            38 35 8:1 /snapshots/9/fs /tmp/my\\040dir rw - ext4 /dev/sda rw\n";
        for (id, is_in_overlay, bound) in [
            (7, true, None),
            (4, true, None),
            (3, true, None),
            (5, false, None),
            (9, false, Some("/tmp/my dir")),
            (8, false, None),
            (97, false, None),
        ] {
            let bound = bound.into_iter().map(|at| at.as_bytes().to_vec()).collect();
            assert_eq!(
                uses(table, Path::new(&format!("/root/snapshots/{id}/fs"))),
                Uses { is_in_overlay, bound },
                "{id}"
            );
        }
    }

    #[test]
    fn an_unmounted_directory_is_not_in_use() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!is_in_use(directory.path()).unwrap());
    }

    proptest! {
        #[test]
        fn every_table_is_read(table in prop::collection::vec(any::<u8>(), 0..200)) {
            uses(&table, Path::new("/a/snapshots/1/fs"));
        }
    }
}
