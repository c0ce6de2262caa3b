//! The qids of a session's inodes (9P2000, intro(5)): versions, and paths that are unique.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::sync::Mutex;

use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, FileType, Ino};

use crate::shrink::shrink;

/// A number that changes whenever the file does, and is never 0, which would forbid Linux to cache.
pub(crate) fn version(attr: &Attr) -> u32 {
    let mut mixed: u64 = 0x9e37_79b9_7f4a_7c15;
    let seconds = [attr.mtime.sec, attr.ctime.sec].map(i64::cast_unsigned);
    for word in [seconds[0], attr.mtime.nsec.into(), seconds[1], attr.ctime.nsec.into(), attr.size] {
        mixed = (mixed ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^= mixed >> 32;
    }
    let [a, b, c, d, ..] = mixed.to_le_bytes();
    u32::from_le_bytes([a, b, c, d]).max(1)
}

/// Inode numbers need not be unique, but the paths of qids must be: a second inode with a number gets another path. An
/// inode keeps its path for as long as there are fids of it.
#[derive(Debug, Default)]
pub(crate) struct Paths(Mutex<PathTables>);

#[derive(Debug, Default)]
struct PathTables {
    inodes: HashMap<Ino, KnownInode>,
    /// The inodes whose paths are their numbers.
    numbers: HashMap<u64, Ino>,
}

/// An inode with fids.
#[derive(Debug)]
struct KnownInode {
    path: u64,
    nodes: u32,
    is_dir: bool,
}

/// The first path of such inodes: no Linux file system has numbers like these.
const OTHER_PATHS: u64 = 1 << 63;

impl Paths {
    /// Releases the path of an inode.
    pub(crate) fn enter(&self, ino: Ino, attr: &Attr) -> u64 {
        let PathTables { inodes, numbers } = &mut *lock(&self.0);
        let known = inodes.entry(ino).or_insert_with(|| {
            let is_own = *numbers.entry(attr.ino).or_insert(ino) == ino;
            let path = if is_own { attr.ino } else { OTHER_PATHS | ino.0 };
            KnownInode { path, nodes: 0, is_dir: attr.kind() == FileType::Directory }
        });
        // There are fewer fids.
        known.nodes += 1;
        known.path
    }

    /// Returns the path of an inode with fids, and whether it is a directory.
    pub(crate) fn known(&self, ino: Ino) -> Option<(u64, bool)> {
        lock(&self.0).inodes.get(&ino).map(|known| (known.path, known.is_dir))
    }

    pub(crate) fn leave(&self, ino: Ino) {
        let PathTables { inodes, numbers } = &mut *lock(&self.0);
        let Slot::Occupied(mut known) = inodes.entry(ino) else { return };
        known.get_mut().nodes -= 1;
        if known.get().nodes == 0 {
            let path = known.remove().path;
            if numbers.get(&path) == Some(&ino) {
                numbers.remove(&path);
            }
            shrink(inodes);
            shrink(numbers);
        }
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Timespec;

    use super::*;

    #[test]
    fn versions_change_with_the_file_and_are_never_0() {
        let base = Attr { size: 5, mtime: Timespec { sec: 7, nsec: 1 }, ..Attr::default() };
        let others = [
            Attr { size: 6, ..base },
            Attr { mtime: Timespec { sec: 7, nsec: 2 }, ..base },
            Attr { mtime: Timespec { sec: 8, nsec: 1 }, ..base },
            Attr { ctime: Timespec { sec: 0, nsec: 1 }, ..base },
            Attr { ctime: Timespec { sec: 1, nsec: 0 }, ..base },
        ];
        for other in others {
            assert_ne!(version(&base), version(&other), "{other:?}");
        }
        assert_eq!(
            version(&base),
            version(&Attr { atime: Timespec { sec: 9, nsec: 9 }, ..base }),
            "a look is no change"
        );
        assert_ne!(version(&Attr::default()), 0);
    }

    #[test]
    fn inodes_with_one_number_have_two_paths() {
        let paths = Paths::default();
        let attr = Attr { ino: 12, ..Attr::new(Ino(2), FileType::RegularFile, 0o600) };
        assert_eq!([2, 2, 3, 3].map(|ino| paths.enter(Ino(ino), &attr)), [12, 12, OTHER_PATHS | 3, OTHER_PATHS | 3]);
        [2, 3, 2].into_iter().for_each(|ino| paths.leave(Ino(ino)));
        assert_eq!(paths.enter(Ino(3), &attr), OTHER_PATHS | 3, "it keeps its path");
        [3, 3].into_iter().for_each(|ino| paths.leave(Ino(ino)));
        assert_eq!(paths.enter(Ino(3), &attr), 12);
        paths.leave(Ino(3));
        let tables = lock(&paths.0);
        assert!(tables.inodes.is_empty() && tables.numbers.is_empty());
    }
}
