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
    names: HashMap<NodeId, BTreeMap<Vec<u8>, NodeId>>,
    links: HashSet<(NodeId, NameBuf)>,
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
        names.iter().try_fold(root?, |id, name| self.names.get(&id)?.get(name.as_bytes()).copied())
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

    fn directory(&mut self, parents: &[Name<'_>]) -> Result<(NodeId, &mut BTreeMap<Vec<u8>, NodeId>), Refusal> {
        let id = self.find(parents).ok_or("its directory is not there")?;
        let names = self.names.get_mut(&id).ok_or("what it is in is no directory")?;
        Ok((id, names))
    }

    /// Adds an inode under a name that is free.
    pub(crate) fn add(&mut self, names: &[Name<'_>], node: Node) -> Result<NodeId, Refusal> {
        let (name, parents) = names.split_last().ok_or("it has no name")?;
        let (directory, known) = self.directory(parents)?;
        if known.contains_key(name.as_bytes()) {
            return Err("it is there already".into());
        }
        let id = self.push(node);
        self.names.entry(directory).or_default().insert(name.as_bytes().to_vec(), id);
        Ok(id)
    }

    /// Adds a further name of an inode.
    pub(crate) fn link(&mut self, names: &[Name<'_>], target: NodeId) -> Result<(), Refusal> {
        if self.nodes[target].kind() == FileType::Directory {
            return Err("a hard link to a directory".into());
        }
        let (name, parents) = names.split_last().ok_or("it has no name")?;
        let (directory, known) = self.directory(parents)?;
        if known.contains_key(name.as_bytes()) {
            return Err("it is there already".into());
        }
        known.insert(name.as_bytes().to_vec(), target);
        self.links.insert((directory, name.to_buf()));
        Ok(())
    }

    /// The tree. Directories get their numbers of links.
    pub(crate) fn finish(mut self) -> Result<Tree, Refusal> {
        if self.nodes.is_empty() {
            return Err("there is no root directory".into());
        }
        for (id, names) in self.names {
            let is_dir = |child: &&NodeId| self.nodes[**child].kind() == FileType::Directory;
            let nlink = 2 + u32::try_from(names.values().filter(is_dir).count()).unwrap_or(u32::MAX - 2);
            let named = |(name, child): (Vec<u8>, NodeId)| Name::new(&name).ok().map(|name| (name.to_buf(), child));
            let node = &mut self.nodes[id];
            node.nlink = nlink;
            node.content = Content::Directory(names.into_iter().filter_map(named).collect());
        }
        Ok(Tree { nodes: self.nodes, links: self.links })
    }
}
