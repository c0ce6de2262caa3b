//! The index of the names by which clients know inodes.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use ferry_vfs::Ino;

use crate::int_hasher::IntHasher;

/// The maximum number of names by which one inode is found. A further one replaces them all, and clients look up again those
/// that they use.
const NAMES_MAX: usize = 256;

/// A hash of a directory's number and a name in it. Names with equal hashes are published together, which costs an
/// unnecessary revalidation.
pub(super) type NameHash = u64;

pub(super) fn hash(dir: Ino, name: &[u8]) -> NameHash {
    let mut mix = IntHasher::default();
    (dir.0, name).hash(&mut mix);
    mix.finish()
}

/// The names by which clients found inodes. A name that an inode has lost stays: a client may have found another inode
/// there before the event arrives, and that entry must not be removed.
#[derive(Debug, Default)]
pub(super) struct NameIndex {
    by_name: BTreeSet<(NameHash, Ino)>,
    /// With the directories of the names.
    by_ino: BTreeMap<(Ino, NameHash), Ino>,
}

impl NameIndex {
    pub(super) fn names(&self, ino: Ino) -> impl Iterator<Item = (NameHash, Ino)> {
        self.by_ino.range((ino, 0)..=(ino, u64::MAX)).map(|((ino, name), _)| (*name, *ino))
    }

    /// Returns the directories with names of an inode.
    pub(super) fn dirs(&self, ino: Ino) -> impl Iterator<Item = Ino> {
        self.by_ino.range((ino, 0)..=(ino, u64::MAX)).map(|(_, dir)| *dir)
    }

    pub(super) fn is_full(&self, ino: Ino) -> bool {
        self.names(ino).count() >= NAMES_MAX
    }

    pub(super) fn find(&self, name: NameHash) -> Vec<Ino> {
        self.by_name.range((name, Ino(0))..=(name, Ino(u64::MAX))).map(|(_, ino)| *ino).collect()
    }

    /// Returns false if it is there already.
    pub(super) fn insert(&mut self, (dir, name): (Ino, NameHash), ino: Ino) -> bool {
        if self.by_name.contains(&(name, ino)) {
            return false;
        }
        if self.is_full(ino) {
            self.forget(ino);
        }
        self.by_ino.insert((ino, name), dir);
        self.by_name.insert((name, ino))
    }

    /// Removes all names of an inode.
    pub(super) fn forget(&mut self, ino: Ino) {
        let names: Vec<_> = self.names(ino).collect();
        for (name, ino) in names {
            self.by_name.remove(&(name, ino));
            self.by_ino.remove(&(ino, name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_has_a_limited_number_of_names() {
        let mut index = NameIndex::default();
        for number in 0..1000_u64 {
            assert!(index.insert((Ino(1), number), Ino(7)));
            assert!(!index.insert((Ino(1), number), Ino(7)));
            assert_eq!(index.find(number), [Ino(7)]);
            assert!(index.by_name.len() <= NAMES_MAX && index.by_ino.len() <= NAMES_MAX);
        }
        index.insert((Ino(1), 999), Ino(8));
        assert_eq!(index.find(999), [Ino(7), Ino(8)]);
        index.forget(Ino(7));
        index.forget(Ino(8));
        assert!(index.by_name.is_empty() && index.by_ino.is_empty());
    }
}
