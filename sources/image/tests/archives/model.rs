//! What layers make, as simply as can be: paths are lists of names, and everything is looked for among all of them.

use std::collections::{BTreeMap, BTreeSet};

use super::random::{DIR, LINK, Member, SYMLINK};

type Path = Vec<String>;

/// The most symbolic links that a path may lead through, as in containerd and umoci.
const LINKS_MAX: usize = 255;

/// What has a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    Dir,
    /// The number of the file, which all its hard links have.
    File(usize),
    Symlink(String, usize),
}

/// A tree.
#[derive(Debug, Default)]
pub struct Model {
    names: BTreeMap<Path, Entry>,
    /// The bytes of all files there ever were.
    files: Vec<Vec<u8>>,
    /// What the current layer has put there, and all above that.
    upper: BTreeSet<Path>,
    /// Symbolic links there ever were.
    symlinks: usize,
}

/// What is to be seen of a name: bytes, target, and how many names the inode has.
#[derive(Debug, PartialEq, Eq)]
pub enum Shown<'a> {
    Dir,
    File(&'a [u8], usize),
    Symlink(&'a str, usize),
}

fn parts(path: &str) -> Path {
    path.split('/').map(str::to_owned).collect()
}

impl Model {
    /// Applies layers; `None` where a member cannot be.
    pub fn of(layers: &[Vec<Member>]) -> Option<Self> {
        let mut model = Self::default();
        for layer in layers {
            model.upper.clear();
            for member in layer {
                model.add(member)?;
            }
        }
        Some(model)
    }

    /// Everything that is there, by its path.
    pub fn shown(&self) -> BTreeMap<String, Shown<'_>> {
        self.names.iter().map(|(path, entry)| (path.join("/"), self.show(entry))).collect()
    }

    fn show<'a>(&'a self, entry: &'a Entry) -> Shown<'a> {
        let count = self.names.values().filter(|other| *other == entry).count();
        match entry {
            Entry::Dir => Shown::Dir,
            Entry::File(number) => Shown::File(&self.files[*number], count),
            Entry::Symlink(target, _) => Shown::Symlink(target, count),
        }
    }

    /// Where a path leads, all links followed.
    fn resolve(&self, path: &str) -> Option<Path> {
        let (mut at, mut left) = (Path::new(), parts(path));
        let mut links = 0;
        while !left.is_empty() {
            let part = left.remove(0);
            match part.as_str() {
                "" | "." => continue,
                ".." => drop(at.pop()),
                _ => at.push(part),
            }
            if let Some(Entry::Symlink(target, _)) = self.names.get(&at) {
                links += 1;
                if links > LINKS_MAX {
                    return None;
                }
                at.pop();
                if target.starts_with('/') {
                    at.clear();
                }
                left = [parts(target), left].concat();
            }
        }
        Some(at)
    }

    fn remove(&mut self, path: &Path, also_upper: bool) {
        let below: Vec<Path> = self.names.keys().filter(|other| other.starts_with(path)).cloned().collect();
        for path in below {
            if also_upper || !self.upper.contains(&path) {
                self.names.remove(&path);
            }
        }
    }

    fn put(&mut self, path: &Path, entry: Entry) -> Option<()> {
        for end in 1..path.len() {
            if *self.names.entry(path[..end].to_vec()).or_insert(Entry::Dir) != Entry::Dir {
                return None;
            }
        }
        if entry != Entry::Dir || self.names.get(path) != Some(&Entry::Dir) {
            self.remove(path, true);
            self.names.insert(path.clone(), entry);
        }
        self.upper.extend((1..=path.len()).map(|end| path[..end].to_vec()));
        Some(())
    }

    fn add(&mut self, member: &Member) -> Option<()> {
        let mut path: Path =
            parts(&member.path).into_iter().filter(|part| !matches!(part.as_str(), "" | ".")).collect();
        let Some(name) = path.pop() else { return Some(()) };
        let mut at = self.resolve(&path.join("/"))?;
        if name == ".wh..wh..opq" {
            let below: Vec<Path> =
                self.names.keys().filter(|path| path.len() == at.len() + 1 && path.starts_with(&at)).cloned().collect();
            below.iter().for_each(|path| self.remove(path, false));
            return Some(());
        }
        if let Some(gone) = name.strip_prefix(".wh.") {
            at.push(gone.to_owned());
            self.remove(&at, false);
            return Some(());
        }
        at.push(name);
        let entry = match member.kind {
            DIR => Entry::Dir,
            SYMLINK => {
                self.symlinks += 1;
                Entry::Symlink(member.target.clone(), self.symlinks)
            }
            LINK => {
                let (dir, name) = member.target.rsplit_once('/').unwrap_or(("", &member.target));
                let mut target = self.resolve(dir)?;
                target.push(name.to_owned());
                let entry = self.names.get(&target).filter(|entry| **entry != Entry::Dir)?.clone();
                // It goes before it is linked to.
                if target.starts_with(&at) {
                    return None;
                }
                entry
            }
            _ => {
                self.files.push(member.data.clone());
                Entry::File(self.files.len() - 1)
            }
        };
        self.put(&at, entry)
    }
}
