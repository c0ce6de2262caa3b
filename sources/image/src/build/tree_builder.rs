//! A tree that grows by paths: what dump files and archives are read into.

use std::collections::{BTreeMap, HashMap, HashSet};

use ferry_vfs::{FileType, Name, NameBuf};

use crate::format::tree::{Content, Node, NodeId, Tree};

/// The deepest tree; Linux's paths end at 2048 names (`PATH_MAX`).
pub(crate) const DEPTH_MAX: usize = 2048;
/// The most symbolic links that a path may lead through; containerd and umoci have the same limit.
const LINKS_MAX: usize = 255;
/// The most memory that names, links and attributes of a tree may take, in bytes: archives are compressed, and little of them can
/// stand for much.
const TREE_BYTES_MAX: usize = 4 << 30;
/// What an inode takes beside its attributes, in bytes.
const NODE_BYTES: usize = 192;
/// What a name takes beside its own bytes.
const NAME_BYTES: usize = 64;

/// Why a path cannot be added; a sentence's end.
pub(crate) type Refusal = String;

/// A tree that is being made. Directories keep their names apart until the end.
pub(crate) struct TreeBuilder {
    nodes: Vec<Node>,
    names: HashMap<NodeId, Names>,
    links: HashSet<(NodeId, NameBuf)>,
    /// The layer that is being added.
    layer: usize,
    bytes_left: usize,
}

impl Default for TreeBuilder {
    fn default() -> Self {
        Self { nodes: Vec::new(), names: HashMap::new(), links: HashSet::new(), layer: 0, bytes_left: TREE_BYTES_MAX }
    }
}

/// The names in a directory.
type Names = BTreeMap<Vec<u8>, Named>;

/// What a name stands for.
#[derive(Clone, Copy)]
struct Named {
    id: NodeId,
    /// The layer that has last said so.
    layer: usize,
}

/// Where a path leads.
struct Walked {
    /// The inodes on the way, from the root on.
    found: Vec<NodeId>,
    /// The names below the last of them that are not there.
    missing: Vec<NameBuf>,
}

/// Which names [`TreeBuilder::remove`] removes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Removed {
    All,
    /// Those that only lower layers have.
    Lower,
}

/// The names of a path. Slashes may be several; `.` and `..` are refused.
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
    Name::new(part).map_err(|error| format!("{} is no name ({error})", part.escape_ascii()))
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

    /// What was added.
    pub(crate) fn node(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id]
    }

    /// Adds the root.
    pub(crate) fn root(&mut self, node: Node) -> Result<(), Refusal> {
        if !self.nodes.is_empty() {
            return Err("there is a root already".into());
        }
        if node.kind() != FileType::Directory {
            return Err("the root is no directory".into());
        }
        self.push(node).map(drop)
    }

    fn charge(&mut self, bytes: usize) -> Result<(), Refusal> {
        let left = self.bytes_left.checked_sub(bytes);
        self.bytes_left = left.ok_or("there are more than 4 GiB of names and attributes by here")?;
        Ok(())
    }

    fn push(&mut self, node: Node) -> Result<NodeId, Refusal> {
        let xattrs: usize = node.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let content = if let Content::Inline(bytes) = &node.content { bytes.len() } else { 0 };
        self.charge(NODE_BYTES + xattrs + content)?;
        let id = self.nodes.len();
        if node.kind() == FileType::Directory {
            self.names.insert(id, BTreeMap::new());
        }
        self.nodes.push(node);
        Ok(id)
    }

    fn insert(&mut self, directory: NodeId, name: &[u8], id: NodeId) -> Result<(), Refusal> {
        self.charge(NAME_BYTES + name.len())?;
        self.names.entry(directory).or_default().insert(name.to_vec(), Named { id, layer: self.layer });
        Ok(())
    }

    /// Adds an inode under a name that is free, without following symbolic links.
    pub(crate) fn add(&mut self, names: &[Name<'_>], node: Node) -> Result<NodeId, Refusal> {
        let (directory, name) = self.vacant(names)?;
        let id = self.push(node)?;
        self.insert(directory, name.as_bytes(), id)?;
        Ok(id)
    }

    /// Adds a further name of an inode, which is free, without following symbolic links.
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
        let known = self.names.get(&directory).ok_or("what it is in is no directory")?;
        if known.contains_key(name.as_bytes()) {
            return Err("it is there already".into());
        }
        Ok((directory, *name))
    }

    /// Adds an inode under a name of a directory, instead of whatever has that name, and all below it.
    pub(crate) fn replace(&mut self, directory: NodeId, name: Name<'_>, node: Node) -> Result<NodeId, Refusal> {
        self.remove(directory, name.as_bytes(), Removed::All);
        let id = self.push(node)?;
        self.insert(directory, name.as_bytes(), id)?;
        Ok(id)
    }

    /// Gives a name's inode a further name, instead of whatever has that name, and all below it. Names are told with their directories.
    pub(crate) fn replace_by_link(
        &mut self,
        (directory, name): (NodeId, Name<'_>),
        (from, target): (NodeId, Name<'_>),
    ) -> Result<NodeId, Refusal> {
        let id = self.child(from, target).ok_or("a hard link to nothing")?;
        if self.nodes[id].kind() == FileType::Directory {
            return Err("a hard link to a directory".into());
        }
        self.remove(directory, name.as_bytes(), Removed::All);
        if self.child(from, target).is_none() {
            return Err("a hard link to itself, or to what it replaces".into());
        }
        self.insert_link(directory, name, id)?;
        Ok(id)
    }

    /// Walks a path, and follows symbolic links on it: absolute ones begin at the root, and `..` leads no higher than that. So
    /// containerd (`fs.RootPath`) and umoci (`SecureJoin`) do it; what is not there is taken for a directory.
    fn walk(&self, path: &[Name<'_>]) -> Result<Walked, Refusal> {
        let mut walked = Walked { found: vec![0], missing: Vec::new() };
        // The next one is the last.
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

    /// Finds the directory that a path leads to, if it is there and is one. Symbolic links are followed within the tree.
    pub(crate) fn directory(&self, path: &[Name<'_>]) -> Result<Option<NodeId>, Refusal> {
        if self.nodes.is_empty() {
            return Ok(None);
        }
        let Walked { found, missing } = self.walk(path)?;
        Ok(found.last().copied().filter(|id| missing.is_empty() && self.names.contains_key(id)))
    }

    /// Finds the directory that a path leads to, and makes those that are not there. Symbolic links are followed within the tree.
    pub(crate) fn enter(&mut self, path: &[Name<'_>], new: impl Fn() -> Node) -> Result<NodeId, Refusal> {
        if self.nodes.is_empty() {
            self.root(new())?;
        }
        let Walked { found, missing } = self.walk(path)?;
        let mut directory = found.last().copied().unwrap_or_default();
        if !self.names.contains_key(&directory) {
            return Err("what it is in is no directory".into());
        }
        for name in missing {
            directory = self.replace(directory, name.as_name(), new())?;
        }
        Ok(directory)
    }

    /// Goes on with the next layer, which may replace what the ones before it have.
    pub(crate) fn next_layer(&mut self) {
        self.layer += 1;
    }

    /// Notes that the layer has a directory that was there before.
    pub(crate) fn touch(&mut self, directory: NodeId, name: Name<'_>) {
        let layer = self.layer;
        if let Some(named) = self.names.get_mut(&directory).and_then(|known| known.get_mut(name.as_bytes())) {
            named.layer = layer;
        }
    }

    /// Removes a name with all below it, as far as lower layers have it. What is not there is nothing to remove.
    pub(crate) fn whiteout(&mut self, names: &[Name<'_>]) -> Result<(), Refusal> {
        if let Some((name, parents)) = names.split_last()
            && let Some(directory) = self.directory(parents)?
        {
            self.remove(directory, name.as_bytes(), Removed::Lower);
        }
        Ok(())
    }

    /// Removes everything in a directory that lower layers have.
    pub(crate) fn make_opaque(&mut self, names: &[Name<'_>]) -> Result<(), Refusal> {
        let Some(directory) = self.directory(names)? else { return Ok(()) };
        let Some(known) = self.names.get(&directory) else { return Ok(()) };
        for name in known.keys().cloned().collect::<Vec<_>>() {
            self.remove(directory, &name, Removed::Lower);
        }
        Ok(())
    }

    /// Removes a name and what is below it, or what of that only lower layers have.
    fn remove(&mut self, directory: NodeId, name: &[u8], which: Removed) {
        let named = |builder: &Self, (directory, name): &(NodeId, Vec<u8>)| {
            builder.names.get(directory).and_then(|known| known.get(name)).copied()
        };
        // Directories come before what is in them, and are looked at again, from the last on, when that is gone.
        let mut found = vec![(directory, name.to_vec())];
        let mut at = 0;
        while let Some(place) = found.get(at) {
            if let Some(below) = named(self, place).and_then(|named| Some((named.id, self.names.get(&named.id)?))) {
                let (id, names) = below;
                found.extend(names.keys().map(|name| (id, name.clone())));
            }
            at += 1;
        }
        for place in found.into_iter().rev() {
            let Some(Named { id, layer }) = named(self, &place) else { continue };
            let is_empty = self.names.get(&id).is_none_or(BTreeMap::is_empty);
            if (which == Removed::Lower && layer == self.layer) || !is_empty {
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

    /// The tree, without what was removed or replaced, and for each inode that was added its place there.
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
        // A link whose first name was removed is the first name now.
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

    /// The tree. Directories get their numbers of links.
    pub(crate) fn finish(mut self) -> Result<Tree, Refusal> {
        if self.nodes.is_empty() {
            return Err("there is no root directory".into());
        }
        for (id, names) in self.names {
            let is_dir = |child: &&Named| self.nodes[child.id].kind() == FileType::Directory;
            let nlink = 2 + u32::try_from(names.values().filter(is_dir).count()).unwrap_or(u32::MAX - 2);
            let named = |(name, child): (Vec<u8>, Named)| Name::new(&name).ok().map(|name| (name.to_buf(), child.id));
            let node = &mut self.nodes[id];
            node.nlink = nlink;
            node.content = Content::Directory(names.into_iter().filter_map(named).collect());
        }
        Ok(Tree { nodes: self.nodes, links: self.links })
    }
}
