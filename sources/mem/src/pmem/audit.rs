//! An independent check of the tree for fsck: counts names and links from the records alone.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};

use ferry_vfs::{Attr, Caller, FileType, Ino};

use super::PMem;
use super::codec::Item;
use super::error::DamageError;
use super::load::LoadedImage;
use crate::store::{At, Record};

/// Names and inodes, from the records.
#[derive(Clone, Debug, Default)]
struct Audit {
    /// The inode of each name of each directory.
    dirs: BTreeMap<Ino, HashMap<Box<[u8]>, Ino>>,
    /// Ordered by number, in which they are usually created, for locality.
    inodes: BTreeMap<Ino, Inode>,
}

#[derive(Clone, Debug)]
struct Inode {
    /// By its mode.
    kind: FileType,
    /// The number of reachable names, including a directory's own.
    links: u32,
}

/// Compares a tree with the undamaged log that it was loaded from; returns the differences, as sentences.
pub(crate) fn compare(tree: &PMem, log: &LoadedImage<'_>) -> Vec<String> {
    let mut audit = Audit::default();
    audit.make(Ino::ROOT, FileType::Directory.as_raw_mode());
    let read = log.for_each(&mut |_: DamageError| Ok(()), |_, _, item| {
        if let Item::Tree(record) = item {
            audit.follow(record);
        }
        Ok(())
    });
    match read {
        Ok(()) => audit.check(|ino| tree.getattr(&Caller::default(), ino, None).ok(), tree.usage().inodes),
        Err(error) => vec![error.to_string()],
    }
}

impl Audit {
    fn follow(&mut self, record: &Record<'_>) {
        match record {
            Record::Make { ino, meta, at, .. } => {
                self.make(*ino, meta.mode);
                if let Some(at) = at {
                    self.put(at, *ino);
                }
            }
            Record::Link { ino, at, .. } => self.put(at, *ino),
            Record::Unlink { at, .. } => drop(self.take(at)),
            Record::Rename { from, to, exchange, whiteout, .. } => {
                let (source, target) = (self.take(from), self.take(to));
                if let Some(source) = source {
                    self.put(to, source);
                }
                if let Some(target) = target.filter(|_| *exchange) {
                    self.put(from, target);
                }
                if let Some((ino, meta)) = whiteout {
                    self.make(*ino, meta.mode);
                    self.put(from, *ino);
                }
            }
            Record::Free { ino } => {
                self.inodes.remove(ino);
                self.dirs.remove(ino);
            }
            Record::Attr { .. } | Record::Xattr { .. } => {}
        }
    }

    fn make(&mut self, ino: Ino, mode: u32) {
        let kind = FileType::from_raw_mode(mode);
        self.inodes.insert(ino, Inode { kind, links: 0 });
        if kind == FileType::Directory {
            self.dirs.entry(ino).or_default();
        }
    }

    fn put(&mut self, at: &At<'_>, ino: Ino) {
        self.dirs.entry(at.dir).or_default().insert(at.name.as_bytes().into(), ino);
    }

    fn take(&mut self, at: &At<'_>) -> Option<Ino> {
        self.dirs.get_mut(&at.dir)?.remove(at.name.as_bytes())
    }

    /// Counts the links of everything reachable from the root.
    fn count(&mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut waiting = vec![Ino::ROOT];
        self.add_links(Ino::ROOT, 2);
        while let Some(dir) = waiting.pop() {
            for (name, ino) in self.dirs.remove(&dir).into_iter().flatten() {
                match self.inodes.get(&ino).map(|inode| (inode.kind, inode.links)) {
                    Some((FileType::Directory, 0)) => {
                        // `.` and the name; `..` is a link of the parent.
                        self.add_links(ino, 2);
                        self.add_links(dir, 1);
                        waiting.push(ino);
                    }
                    Some((FileType::Directory, _)) => {
                        self.add_links(ino, 2);
                        wrong.push(format!("directory {} has a second name, {}", ino.0, name.escape_ascii()));
                    }
                    Some(_) => self.add_links(ino, 1),
                    None => wrong.push(format!("inode {} has a name but is not there", ino.0)),
                }
            }
        }
        wrong
    }

    fn add_links(&mut self, ino: Ino, links: u32) {
        if let Some(inode) = self.inodes.get_mut(&ino) {
            inode.links = inode.links.saturating_add(links);
        }
    }

    /// Visits everything reachable from the root, and compares each inode with the tree's.
    fn check(mut self, attr: impl Fn(Ino) -> Option<Attr>, inodes: u64) -> Vec<String> {
        let mut wrong = self.count();
        let mut reached = 0;
        for (ino, Inode { links, .. }) in self.inodes.iter().filter(|(_, inode)| inode.links > 0) {
            reached += 1;
            match attr(*ino) {
                None => wrong.push(format!("inode {} has a name but is not there", ino.0)),
                Some(attr) if attr.nlink != *links => {
                    wrong.push(format!("inode {} counts {} links, and there are {links}", ino.0, attr.nlink));
                }
                Some(_) => {}
            }
        }
        if reached != inodes {
            wrong.push(format!("{reached} inodes can be reached, and there are {inodes}"));
        }
        wrong
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::{Name, Timespec};

    use super::*;
    use crate::store::Meta;

    fn at(dir: u64, name: &[u8]) -> At<'_> {
        At { dir: Ino(dir), name: Name::new(name).unwrap() }
    }

    fn make<'a>(ino: u64, mode: u32, place: At<'a>) -> Record<'a> {
        let meta = Meta { mode, ..Meta::default() };
        Record::Make { ino: Ino(ino), meta, target: &[], xattrs: &[], at: Some(place) }
    }

    #[test]
    fn links_are_counted_and_differences_reported() {
        let time = Timespec::default();
        let mut audit = Audit::default();
        audit.make(Ino::ROOT, FileType::Directory.as_raw_mode());
        for record in [
            make(2, 0o040_755, at(1, b"dir")),
            make(3, 0o100_644, at(2, b"file")),
            Record::Link { ino: Ino(3), at: at(1, b"more"), time },
            make(4, 0o100_644, at(1, b"gone")),
            Record::Rename { from: at(1, b"more"), to: at(1, b"gone"), exchange: false, whiteout: None, time },
            Record::Free { ino: Ino(4) },
        ] {
            audit.follow(&record);
        }
        let tree = |links: [u32; 3]| {
            move |ino: Ino| {
                let nlink = links.get(usize::try_from(ino.0).ok()?.checked_sub(1)?)?;
                Some(Attr { nlink: *nlink, ..Attr::default() })
            }
        };
        assert_eq!(audit.clone().check(tree([3, 2, 2]), 3), [""; 0]);
        assert_eq!(audit.clone().check(tree([3, 2, 1]), 3), ["inode 3 counts 1 links, and there are 2"]);
        assert_eq!(audit.clone().check(tree([3, 2, 2]), 4), ["3 inodes can be reached, and there are 4"]);
    }
}
