//! Directory entries of a source that keeps them in memory.

use std::collections::{BTreeMap, HashMap};

use crate::{DirRange, Name, NameBuf};

/// The names of a directory in memory, each with a value (such as its inode) and a position for [`DirRange::list`]. A
/// name keeps its position until it is removed, and no other name gets that position. So a listing in several steps
/// misses no name and lists none twice, whatever is added or removed meanwhile.
#[derive(Clone, Debug)]
pub struct Names<T> {
    positions: HashMap<NameBuf, u64>,
    values: BTreeMap<u64, (NameBuf, T)>,
    next_position: u64,
}

impl<T> Default for Names<T> {
    fn default() -> Self {
        Self { positions: HashMap::new(), values: BTreeMap::new(), next_position: 0 }
    }
}

impl<T> Names<T> {
    /// Returns the number of names.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Returns the value of a name.
    pub fn get(&self, name: Name<'_>) -> Option<&T> {
        let position = self.positions.get(name.as_bytes())?;
        self.values.get(position).map(|(_, value)| value)
    }

    /// Sets the value of a name; returns the previous one.
    pub fn insert(&mut self, name: Name<'_>, value: T) -> Option<T> {
        if let Some(position) = self.positions.get(name.as_bytes())
            && let Some((_, present)) = self.values.get_mut(position)
        {
            return Some(std::mem::replace(present, value));
        }
        self.positions.insert(name.to_buf(), self.next_position);
        self.values.insert(self.next_position, (name.to_buf(), value));
        self.next_position += 1;
        None
    }

    /// Removes a name; returns its value.
    pub fn remove(&mut self, name: Name<'_>) -> Option<T> {
        let position = self.positions.remove(name.as_bytes())?;
        self.values.remove(&position).map(|(_, value)| value)
    }

    /// Returns the remaining names of a listing, with their positions.
    pub fn entries_from(&self, at: &DirRange) -> impl Iterator<Item = (u64, Name<'_>, &T)> {
        self.values.range(at.position()..).map(|(position, (name, value))| (*position, name.as_name(), value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Handle, Ino};

    fn name(text: &str) -> Name<'_> {
        Name::new(text.as_bytes()).unwrap()
    }

    fn from(names: &Names<u8>, position: u64) -> Vec<(u64, u8)> {
        let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: position + 2, plus: false };
        names.entries_from(&at).map(|(position, _, value)| (position, *value)).collect()
    }

    #[test]
    fn a_name_keeps_its_position_and_no_other_gets_it() {
        let mut names = Names::default();
        for (text, value) in [("a", 1), ("b", 2), ("c", 3)] {
            assert_eq!(names.insert(name(text), value), None);
        }
        assert_eq!(names.insert(name("b"), 9), Some(2));
        assert_eq!(from(&names, 0), [(0, 1), (1, 9), (2, 3)]);
        assert_eq!((names.remove(name("a")), names.remove(name("a"))), (Some(1), None));
        assert_eq!(names.insert(name("a"), 4), None);
        assert_eq!(from(&names, 1), [(1, 9), (2, 3), (3, 4)]);
        assert_eq!((names.get(name("a")), names.get(name("d")), names.len()), (Some(&4), None, 3));
    }
}
