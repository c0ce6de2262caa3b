//! A tree that grows by paths: what dump files and archives are read into.

use std::collections::{BTreeMap, HashMap, HashSet};

use ferry_vfs::{FileType, Name, NameBuf};

use crate::tree::{Content, Node, NodeId, Tree};

/// The deepest tree; Linux's paths end at 2048 names (`PATH_MAX`).
pub(crate) const DEPTH_MAX: usize = 2048;

/// Why a path cannot be added; a sentence's end.
pub(crate) type Refusal = String;

/// A tree that is being made. Directories keep their names apart until the end.
#[derive(Default)]
pub(crate) struct Growing {
    nodes: Vec<Node>,
    names: HashMap<NodeId, Names>,
    links: HashSet<(NodeId, NameBuf)>,
    /// Files whose last name was removed.
    removed: HashSet<NodeId>,
    /// The layer that is being added.
    layer: usize,
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

/// The names of a path. Slashes may be several; `.` and `..` are refused.
pub(crate) fn names_of(path: &[u8]) -> Result<Vec<Name<'_>>, Refusal> {
    let mut names = Vec::new();
    for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
        names.push(Name::new(part).map_err(|error| format!("{} is no name ({error})", part.escape_ascii()))?);
    }
    if names.len() > DEPTH_MAX {
        return Err(format!("more than {DEPTH_MAX} names in a path"));
    }
    Ok(names)
}

impl Growing {
    /// Finds a path, without following symbolic links.
    pub(crate) fn find(&self, names: &[Name<'_>]) -> Option<NodeId> {
        let root = if self.nodes.is_empty() { None } else { Some(0) };
        names.iter().try_fold(root?, |id, name| Some(self.names.get(&id)?.get(name.as_bytes())?.id))
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
        self.push(node);
        Ok(())
    }

    fn push(&mut self, node: Node) -> NodeId {
        let id = self.nodes.len();
        if node.kind() == FileType::Directory {
            self.names.insert(id, BTreeMap::new());
        }
        self.nodes.push(node);
        id
    }

    fn directory(&mut self, parents: &[Name<'_>]) -> Result<(NodeId, &mut Names), Refusal> {
        let id = self.find(parents).ok_or("its directory is not there")?;
        let names = self.names.get_mut(&id).ok_or("what it is in is no directory")?;
        Ok((id, names))
    }

    /// Adds an inode under a name that is free, or that only lower layers have.
    pub(crate) fn add(&mut self, names: &[Name<'_>], node: Node) -> Result<NodeId, Refusal> {
        let (directory, name) = self.vacate(names)?;
        let id = self.push(node);
        self.names.entry(directory).or_default().insert(name.to_vec(), Named { id, layer: self.layer });
        Ok(id)
    }

    /// Adds a further name of an inode.
    pub(crate) fn link(&mut self, names: &[Name<'_>], target: NodeId) -> Result<(), Refusal> {
        if self.nodes[target].kind() == FileType::Directory {
            return Err("a hard link to a directory".into());
        }
        let (directory, name) = self.vacate(names)?;
        if self.removed.contains(&target) {
            return Err("a hard link to itself".into());
        }
        let buf = Name::new(name).map_err(|error| error.to_string())?.to_buf();
        self.names.entry(directory).or_default().insert(name.to_vec(), Named { id: target, layer: self.layer });
        self.links.insert((directory, buf));
        Ok(())
    }

    /// Makes a name free that only lower layers have; answers the directory that it is in.
    fn vacate<'a>(&mut self, names: &[Name<'a>]) -> Result<(NodeId, &'a [u8]), Refusal> {
        let (name, parents) = names.split_last().ok_or("it has no name")?;
        let (layer, (directory, known)) = (self.layer, self.directory(parents)?);
        let Some(found) = known.get(name.as_bytes()).map(|named| named.layer) else {
            return Ok((directory, name.as_bytes()));
        };
        if found == layer {
            return Err("it is there already".into());
        }
        if self.remove_lower(directory, name.as_bytes()) {
            Ok((directory, name.as_bytes()))
        } else {
            Err("it is there already, as a directory with files of the same layer".into())
        }
    }

    /// Goes on with the next layer, which may replace what the ones before it have.
    pub(crate) fn next_layer(&mut self) {
        self.layer += 1;
    }

    /// Notes that the layer has a directory that was there before.
    pub(crate) fn touch(&mut self, names: &[Name<'_>]) {
        let layer = self.layer;
        if let Some((name, parents)) = names.split_last()
            && let Ok((_, known)) = self.directory(parents)
            && let Some(named) = known.get_mut(name.as_bytes())
        {
            named.layer = layer;
        }
    }

    /// Removes a name with all below it, as far as lower layers have it. What is not there is nothing to remove.
    pub(crate) fn whiteout(&mut self, names: &[Name<'_>]) {
        if let Some((name, parents)) = names.split_last()
            && let Some(directory) = self.find(parents)
        {
            self.remove_lower(directory, name.as_bytes());
        }
    }

    /// Removes everything in a directory that lower layers have.
    pub(crate) fn make_opaque(&mut self, names: &[Name<'_>]) {
        let Some(directory) = self.find(names) else { return };
        let Some(known) = self.names.get(&directory) else { return };
        for name in known.keys().cloned().collect::<Vec<_>>() {
            self.remove_lower(directory, &name);
        }
    }

    /// Removes what lower layers have of a name and below it; answers whether the name is gone.
    fn remove_lower(&mut self, directory: NodeId, name: &[u8]) -> bool {
        let named = |growing: &Self, (directory, name): &(NodeId, Vec<u8>)| {
            growing.names.get(directory).and_then(|known| known.get(name)).copied()
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
            if layer == self.layer || !is_empty {
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
            if node.nlink == 0 {
                self.removed.insert(id);
            }
        }
        self.names.get(&directory).is_none_or(|known| !known.contains_key(name))
    }

    /// The tree, without what was removed, and for each inode that was added its place there.
    pub(crate) fn finish_layers(self) -> Result<(Tree, Vec<Option<NodeId>>), Refusal> {
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
