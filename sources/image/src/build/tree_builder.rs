//! Builds a tree by paths, for dump files and archives.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};

use ferry_vfs::{FileType, Name, NameBuf};

use crate::format::tree::{Content, Node, NodeId, Tree};

/// The maximum depth of a tree; Linux's paths end at 2048 names (`PATH_MAX`).
pub(crate) const DEPTH_MAX: usize = 2048;
/// The maximum number of symbolic links on a path, as in containerd and umoci.
const LINKS_MAX: usize = 255;
/// The maximum memory for names, links and attributes, in bytes: a small compressed archive can expand to much.
const TREE_BYTES_MAX: usize = 4 << 30;
/// The memory of an inode besides its attributes, in bytes.
const NODE_BYTES: usize = 192;
/// The memory of a name besides its own bytes.
pub(crate) const NAME_BYTES: usize = 64;
/// The maximum length of all symbolic links that paths lead through, in bytes: hours of them may come in a short archive.
const FOLLOWED_BYTES_MAX: u64 = 4 << 30;

/// The refusal of a path below something else than a directory.
pub(crate) const NO_DIRECTORY: &str = "its parent is not a directory";

/// Why a path cannot be added, as the end of a sentence.
pub(crate) type Refusal = String;

/// A tree under construction. Directories keep their names in maps until the end.
pub(crate) struct TreeBuilder {
    nodes: Vec<Node>,
    names: HashMap<NodeId, Names>,
    links: HashSet<(NodeId, NameBuf)>,
    /// The layer being added.
    layer: usize,
    /// Directories in which only this layer has anything.
    cleaned: HashSet<NodeId>,
    bytes_left: usize,
    followed_bytes_left: Cell<u64>,
}

impl Default for TreeBuilder {
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            names: HashMap::new(),
            links: HashSet::new(),
            layer: 0,
            cleaned: HashSet::new(),
            bytes_left: TREE_BYTES_MAX,
            followed_bytes_left: Cell::new(FOLLOWED_BYTES_MAX),
        }
    }
}

/// The names in a directory.
type Names = BTreeMap<Vec<u8>, NameEntry>;

/// What a name stands for.
#[derive(Clone, Copy)]
struct NameEntry {
    id: NodeId,
    /// The last layer that contained it.
    layer: usize,
    /// Whether it is a directory that no member describes, because only names below it are there.
    is_implied: bool,
}

/// The result of a walk.
struct WalkResult {
    /// The inodes on the path, from the root.
    found: Vec<NodeId>,
    /// The missing names below the last of them.
    missing: Vec<NameBuf>,
}

/// The names that [`TreeBuilder::remove`] removes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RemoveScope {
    All,
    /// Those that only lower layers contain.
    Lower,
}

/// Splits a path into names. Slashes may be repeated; `.` and `..` are refused.
pub(crate) fn names_of(path: &[u8]) -> Result<Vec<Name<'_>>, Refusal> {
    let mut names = Vec::new();
    for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
        names.push(name_of(part)?);
    }
    if names.len() > DEPTH_MAX {
        return Err(too_deep());
    }
    Ok(names)
}

fn name_of(part: &[u8]) -> Result<Name<'_>, Refusal> {
    Name::new(part).map_err(|error| format!("{} is not a valid name ({error})", part.escape_ascii()))
}

/// Returns what an inode takes beside itself.
fn more_bytes(node: &Node) -> usize {
    let xattrs: usize = node.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
    xattrs + if let Content::Inline(bytes) = &node.content { bytes.len() } else { 0 }
}

fn too_deep() -> Refusal {
    format!("more than {DEPTH_MAX} names in a path")
}

impl TreeBuilder {
    /// Finds a path, without following symbolic links.
    pub(crate) fn find(&self, names: &[Name<'_>]) -> Option<NodeId> {
        let root = if self.nodes.is_empty() { None } else { Some(0) };
        names.iter().try_fold(root?, |id, name| self.child(id, *name))
    }

    /// Finds a name in a directory.
    pub(crate) fn child(&self, directory: NodeId, name: Name<'_>) -> Option<NodeId> {
        Some(self.names.get(&directory)?.get(name.as_bytes())?.id)
    }

    /// Returns whether an inode is a directory, and not removed.
    pub(crate) fn is_directory(&self, id: NodeId) -> bool {
        self.names.contains_key(&id)
    }

    /// Returns an added inode.
    pub(crate) fn node(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id]
    }

    /// Adds the root.
    pub(crate) fn root(&mut self, node: Node) -> Result<(), Refusal> {
        if !self.nodes.is_empty() {
            return Err("there is a root already".into());
        }
        if node.kind() != FileType::Directory {
            return Err("the root is not a directory".into());
        }
        self.push(node).map(drop)
    }

    /// Takes so many bytes of what an input may take.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), Refusal> {
        let left = self.bytes_left.checked_sub(bytes);
        self.bytes_left = left.ok_or("there are more than 4 GiB of names and attributes by here")?;
        Ok(())
    }

    /// Gives an inode other attributes and contents.
    pub(crate) fn describe(&mut self, id: NodeId, node: Node) -> Result<(), Refusal> {
        self.charge(more_bytes(&node))?;
        self.nodes[id] = node;
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<NodeId, Refusal> {
        self.charge(NODE_BYTES + more_bytes(&node))?;
        let id = self.nodes.len();
        if node.kind() == FileType::Directory {
            self.names.insert(id, BTreeMap::new());
        }
        self.nodes.push(node);
        Ok(id)
    }

    fn insert(&mut self, directory: NodeId, name: &[u8], id: NodeId) -> Result<(), Refusal> {
        self.charge(NAME_BYTES + name.len())?;
        let entry = NameEntry { id, layer: self.layer, is_implied: false };
        self.names.entry(directory).or_default().insert(name.to_vec(), entry);
        Ok(())
    }

    /// Adds an inode under a free name, without following symbolic links.
    pub(crate) fn add(&mut self, names: &[Name<'_>], node: Node) -> Result<NodeId, Refusal> {
        let (directory, name) = self.vacant(names)?;
        let id = self.push(node)?;
        self.insert(directory, name.as_bytes(), id)?;
        Ok(id)
    }

    /// Adds another name, which is free, for an inode, without following symbolic links.
    pub(crate) fn link(&mut self, names: &[Name<'_>], target: NodeId) -> Result<(), Refusal> {
        let (directory, name) = self.vacant(names)?;
        self.insert_link(directory, name, target)
    }

    fn insert_link(&mut self, directory: NodeId, name: Name<'_>, target: NodeId) -> Result<(), Refusal> {
        if self.nodes[target].kind() == FileType::Directory {
            return Err("a hard link to a directory".into());
        }
        self.insert(directory, name.as_bytes(), target)?;
        self.links.insert((directory, name.to_buf()));
        Ok(())
    }

    fn vacant<'a>(&self, names: &[Name<'a>]) -> Result<(NodeId, Name<'a>), Refusal> {
        let (name, parents) = names.split_last().ok_or("it has no name")?;
        let directory = self.find(parents).ok_or("its directory is not there")?;
        let known = self.names.get(&directory).ok_or(NO_DIRECTORY)?;
        if known.contains_key(name.as_bytes()) {
            return Err("it is there already".into());
        }
        Ok((directory, *name))
    }

    /// Adds an inode under a name in a directory, and removes the name's previous inode with everything below it.
    pub(crate) fn replace(&mut self, directory: NodeId, name: Name<'_>, node: Node) -> Result<NodeId, Refusal> {
        self.remove(directory, name.as_bytes(), RemoveScope::All);
        let id = self.push(node)?;
        self.insert(directory, name.as_bytes(), id)?;
        Ok(id)
    }

    /// Adds another name for an inode, and removes the name's previous inode with everything below it.
    pub(crate) fn replace_by_link(
        &mut self,
        (directory, name): (NodeId, Name<'_>),
        (from, target): (NodeId, Name<'_>),
    ) -> Result<NodeId, Refusal> {
        let id = self.child(from, target).ok_or("a hard link to nothing")?;
        if self.nodes[id].kind() == FileType::Directory {
            return Err("a hard link to a directory".into());
        }
        self.remove(directory, name.as_bytes(), RemoveScope::All);
        if self.child(from, target).is_none() {
            return Err("a hard link to itself, or to what it replaces".into());
        }
        self.insert_link(directory, name, id)?;
        Ok(id)
    }

    /// Walks a path and follows symbolic links on it: absolute ones begin at the root, and `..` stops there, as in
    /// containerd (`fs.RootPath`) and umoci (`SecureJoin`). A missing name counts as a directory.
    fn walk(&self, path: &[Name<'_>]) -> Result<WalkResult, Refusal> {
        let mut walked = WalkResult { found: vec![0], missing: Vec::new() };
        // The next name is the last.
        let mut left: Vec<&[u8]> = path.iter().rev().map(|name| name.as_bytes()).collect();
        let mut links = 0;
        while let Some(part) = left.pop() {
            match part {
                b"" | b"." => continue,
                b".." if walked.missing.pop().is_some() => continue,
                b".." => {
                    walked.found.truncate((walked.found.len() - 1).max(1));
                    continue;
                }
                _ => {}
            }
            let name = name_of(part)?;
            let here = walked.found[walked.found.len() - 1];
            let Some(id) = self.child(here, name).filter(|_| walked.missing.is_empty()) else {
                walked.missing.push(name.to_buf());
                continue;
            };
            match &self.nodes[id] {
                Node { content: Content::Inline(target), .. } if self.nodes[id].kind() == FileType::Symlink => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Err(format!("its path leads through more than {LINKS_MAX} symbolic links"));
                    }
                    let allowed = self.followed_bytes_left.get().checked_sub(target.len() as u64 + 1);
                    self.followed_bytes_left
                        .set(allowed.ok_or("paths lead through more than 4 GiB of symbolic links")?);
                    if target.starts_with(b"/") {
                        walked.found.truncate(1);
                    }
                    left.extend(target.rsplit(|byte| *byte == b'/'));
                }
                _ => walked.found.push(id),
            }
        }
        // The root has no name, and a name follows.
        if walked.found.len() + walked.missing.len() > DEPTH_MAX {
            return Err(too_deep());
        }
        Ok(walked)
    }

    /// Returns the directory that a path leads to, if there is one. Symbolic links are followed within the tree.
    pub(crate) fn directory(&self, path: &[Name<'_>]) -> Result<Option<NodeId>, Refusal> {
        if self.nodes.is_empty() {
            return Ok(None);
        }
        let WalkResult { found, missing } = self.walk(path)?;
        Ok(found.last().copied().filter(|id| missing.is_empty() && self.names.contains_key(id)))
    }

    /// Returns the directory at a path, and creates missing ones. Symbolic links are followed within the tree.
    pub(crate) fn enter(&mut self, path: &[Name<'_>], new: impl Fn() -> Node) -> Result<NodeId, Refusal> {
        if self.nodes.is_empty() {
            self.root(new())?;
        }
        let WalkResult { found, missing } = self.walk(path)?;
        let mut directory = found.last().copied().unwrap_or_default();
        if !self.names.contains_key(&directory) {
            return Err(NO_DIRECTORY.into());
        }
        for name in missing {
            let above = directory;
            directory = self.replace(above, name.as_name(), new())?;
            self.note(above, name.as_name(), |entry| entry.is_implied = true);
        }
        Ok(directory)
    }

    /// Calls a function with each directory that [`Self::enter`] created and no member has described since, and its names.
    pub(crate) fn for_each_implied<E>(
        &mut self,
        mut call: impl FnMut(&[&[u8]], &mut Node) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self { nodes, names, .. } = self;
        // The directories on the path, each with its names that are still to be visited.
        let mut path: Vec<&[u8]> = Vec::new();
        let mut left: Vec<_> = names.get(&0).map(BTreeMap::iter).into_iter().collect();
        while let Some(siblings) = left.last_mut() {
            let Some((name, NameEntry { id, is_implied, .. })) = siblings.next() else {
                left.pop();
                path.pop();
                continue;
            };
            let Some(below) = names.get(id) else { continue };
            path.push(name);
            left.push(below.iter());
            if *is_implied {
                call(&path, &mut nodes[*id])?;
            }
        }
        Ok(())
    }

    /// Begins the next layer, which may replace what earlier ones contain.
    pub(crate) fn next_layer(&mut self) {
        self.layer += 1;
        self.cleaned.clear();
    }

    /// Records that the layer contains an existing directory.
    pub(crate) fn touch(&mut self, directory: NodeId, name: Name<'_>) {
        let layer = self.layer;
        self.note(directory, name, |entry| (entry.layer, entry.is_implied) = (layer, false));
    }

    fn note(&mut self, directory: NodeId, name: Name<'_>, change: impl FnOnce(&mut NameEntry)) {
        if let Some(entry) = self.names.get_mut(&directory).and_then(|known| known.get_mut(name.as_bytes())) {
            change(entry);
        }
    }

    /// Removes a name with everything below it, as far as lower layers contain it. A missing name is ignored.
    pub(crate) fn whiteout(&mut self, names: &[Name<'_>]) -> Result<(), Refusal> {
        if let Some((name, parents)) = names.split_last()
            && let Some(directory) = self.directory(parents)?
        {
            self.remove(directory, name.as_bytes(), RemoveScope::Lower);
        }
        Ok(())
    }

    /// Removes a name in the root with everything below it. A missing name is ignored.
    pub(crate) fn remove_from_root(&mut self, name: &[u8]) {
        self.remove(0, name, RemoveScope::All);
    }

    /// Removes everything in a directory that lower layers contain.
    pub(crate) fn make_opaque(&mut self, names: &[Name<'_>]) -> Result<(), Refusal> {
        let Some(directory) = self.directory(names)? else { return Ok(()) };
        // A layer may name it by many paths.
        if !self.cleaned.insert(directory) {
            return Ok(());
        }
        let Some(known) = self.names.get(&directory) else { return Ok(()) };
        for name in known.keys().cloned().collect::<Vec<_>>() {
            self.remove(directory, &name, RemoveScope::Lower);
        }
        Ok(())
    }

    /// Removes a name and what is below it, or only those parts that lower layers contain.
    fn remove(&mut self, directory: NodeId, name: &[u8], which: RemoveScope) {
        let named = |builder: &Self, (directory, name): &(NodeId, Vec<u8>)| {
            builder.names.get(directory).and_then(|known| known.get(name)).copied()
        };
        // Directories come before their entries, and are checked again, from the last one, when those are gone.
        let mut found = vec![(directory, name.to_vec())];
        let mut at = 0;
        while let Some(place) = found.get(at) {
            if let Some(below) = named(self, place).and_then(|named| Some((named.id, self.names.get(&named.id)?))) {
                let (id, names) = below;
                if which == RemoveScope::All || self.cleaned.insert(id) {
                    found.extend(names.keys().map(|name| (id, name.clone())));
                }
            }
            at += 1;
        }
        for place in found.into_iter().rev() {
            let Some(NameEntry { id, layer, .. }) = named(self, &place) else { continue };
            let is_empty = self.names.get(&id).is_none_or(BTreeMap::is_empty);
            if (which == RemoveScope::Lower && layer == self.layer) || !is_empty {
                continue;
            }
            let (directory, name) = place;
            if let Some(known) = self.names.get_mut(&directory) {
                known.remove(&name);
            }
            self.names.remove(&id);
            if let Ok(name) = Name::new(&name) {
                self.links.remove(&(directory, name.to_buf()));
            }
            let node = &mut self.nodes[id];
            node.nlink = node.nlink.saturating_sub(1);
        }
    }

    /// Returns the tree without removed or replaced inodes, and for each added inode its number there.
    pub(crate) fn finish_compact(self) -> Result<(Tree, Vec<Option<NodeId>>), Refusal> {
        let mut tree = self.finish()?;
        let mut places = vec![None; tree.nodes.len()];
        let mut order = vec![0];
        places[0] = Some(0);
        let mut at = 0;
        while let Some(id) = order.get(at) {
            if let Content::Directory(names) = &tree.nodes[*id].content {
                for (_, child) in names {
                    if places[*child].is_none() {
                        places[*child] = Some(order.len());
                        order.push(*child);
                    }
                }
            }
            at += 1;
        }
        let place = |id: NodeId| places[id].unwrap_or_default();
        let mut nodes: Vec<Option<Node>> = tree.nodes.into_iter().map(Some).collect();
        tree.nodes = order.iter().filter_map(|id| nodes[*id].take()).collect();
        // If the first name of a link was removed, another one becomes the first.
        let mut firsts = HashSet::new();
        let mut links = HashSet::new();
        for (at, old) in order.iter().enumerate() {
            let Content::Directory(names) = &mut tree.nodes[at].content else { continue };
            for (name, child) in names {
                if !tree.links.is_empty() && tree.links.contains(&(*old, name.clone())) {
                    links.insert((at, name.clone(), place(*child)));
                } else {
                    firsts.insert(place(*child));
                }
                *child = place(*child);
            }
        }
        let mut links: Vec<_> = links.into_iter().collect();
        links.sort_unstable_by(|a, b| (a.0, a.1.as_name().as_bytes()).cmp(&(b.0, b.1.as_name().as_bytes())));
        links.retain(|(_, _, child)| !firsts.insert(*child));
        tree.links = links.into_iter().map(|(directory, name, _)| (directory, name)).collect();
        Ok((tree, places))
    }

    /// Returns the tree, with link counts of directories.
    pub(crate) fn finish(mut self) -> Result<Tree, Refusal> {
        if self.nodes.is_empty() {
            return Err("there is no root directory".into());
        }
        for (id, names) in self.names {
            let is_dir = |child: &&NameEntry| self.nodes[child.id].kind() == FileType::Directory;
            let nlink = 2 + u32::try_from(names.values().filter(is_dir).count()).unwrap_or(u32::MAX - 2);
            let named =
                |(name, child): (Vec<u8>, NameEntry)| Name::new(&name).ok().map(|name| (name.to_buf(), child.id));
            let node = &mut self.nodes[id];
            node.nlink = nlink;
            node.content = Content::Directory(names.into_iter().filter_map(named).collect());
        }
        Ok(Tree { nodes: self.nodes, links: self.links })
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Timespec;

    use super::*;

    fn node(mode: u16, content: Content) -> Node {
        let mtime = Timespec { sec: 0, nsec: 0 };
        Node { mode, uid: 0, gid: 0, rdev: 0, mtime, nlink: 1, xattrs: Vec::new(), content }
    }

    fn directory() -> Node {
        node(0o040_755, Content::Directory(Vec::new()))
    }

    fn path(text: &'static [u8]) -> Vec<Name<'static>> {
        names_of(text).expect("names")
    }

    #[test]
    fn the_memory_of_an_input_is_bounded() {
        let mut builder = TreeBuilder::default();
        builder.root(directory()).expect("the first");
        builder.add(&path(b"d"), directory()).expect("new");
        builder.add(&path(b"link"), node(0o120_777, Content::Inline(b"d".to_vec()))).expect("new");
        builder.followed_bytes_left = Cell::new(5);
        // Two bytes each: the target, and one for the link.
        assert!(builder.enter(&path(b"link"), directory).is_ok() && builder.enter(&path(b"link"), directory).is_ok());
        let refused = builder.enter(&path(b"link"), directory).expect_err("the end");
        assert!(refused.contains("more than 4 GiB of symbolic links"), "{refused}");
        // Also of what is described again.
        let described = || Node { xattrs: vec![(b"user.a".to_vec(), vec![1; 94])], ..directory() };
        builder.bytes_left = 250;
        let again: Vec<_> = (0..3).map(|_| builder.describe(0, described())).collect();
        assert!(matches!(&again[..], [Ok(()), Ok(()), Err(why)] if why.contains("more than 4 GiB")), "{again:?}");
    }

    /// A small archive may have as many links to a directory as the directory has files.
    #[test]
    fn many_marks_in_one_directory_are_quick() {
        const COUNT: usize = 30_000;
        let file = || node(0o100_644, Content::None);
        let mut builder = TreeBuilder::default();
        builder.root(directory()).expect("the first");
        builder.add(&path(b"d"), directory()).expect("new");
        builder.add(&path(b"d/lower"), file()).expect("new");
        builder.next_layer();
        builder.touch(0, path(b"d")[0]);
        for number in 0..COUNT {
            let name = format!("d/{number}");
            builder.add(&names_of(name.as_bytes()).expect("names"), file()).expect("new");
        }
        builder.add(&path(b"link"), node(0o120_777, Content::Inline(b"d".to_vec()))).expect("new");
        // In a step for each of both this would take minutes.
        for _ in 0..COUNT {
            builder.make_opaque(&path(b"link")).expect("a directory");
            builder.whiteout(&path(b"d")).expect("a name");
        }
        assert!(builder.find(&path(b"d/lower")).is_none() && builder.find(&path(b"d/0")).is_some());
        builder.next_layer();
        builder.make_opaque(&path(b"link")).expect("a directory");
        assert!(builder.find(&path(b"d/0")).is_none() && builder.find(&path(b"d")).is_some());
    }
}
