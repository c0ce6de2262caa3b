//! What the file system should be, kept by the test itself: no answer of the file system goes in but inode numbers and
//! whether a call succeeded.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::pmem_common::{Seen, World};

const DIR_MODE: u32 = 0o040_755;
const FILE_MODE: u32 = 0o100_644;

/// An inode.
#[derive(Clone, Debug, Default)]
struct Node {
    mode: u32,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    bytes: Arc<Vec<u8>>,
}

/// Names and inodes.
#[derive(Clone, Debug, Default)]
pub struct Model {
    names: BTreeMap<Vec<u8>, u64>,
    nodes: BTreeMap<u64, Node>,
}

impl Model {
    /// A file was made, or one of this name opened.
    pub fn create(&mut self, path: &[u8], ino: u64) {
        match self.names.insert(path.to_vec(), ino) {
            Some(before) => assert_eq!(before, ino, "{} was another inode", path.escape_ascii()),
            None => drop(self.nodes.insert(ino, Node { mode: FILE_MODE, ..Node::default() })),
        }
    }

    pub fn mkdir(&mut self, path: &[u8], ino: u64) {
        self.names.insert(path.to_vec(), ino);
        self.nodes.insert(ino, Node { mode: DIR_MODE, ..Node::default() });
    }

    pub fn unlink(&mut self, path: &[u8]) {
        assert!(self.names.remove(path).is_some(), "{} was unlinked and never there", path.escape_ascii());
    }

    pub fn link(&mut self, ino: u64, to: &[u8]) {
        assert!(self.names.insert(to.to_vec(), ino).is_none(), "a link took the place of {}", to.escape_ascii());
    }

    pub fn rename(&mut self, from: &[u8], to: &[u8], exchange: bool) {
        let (source, target) = (self.names[from], self.names.get(to).copied());
        if Some(source) == target {
            return;
        }
        self.names.insert(to.to_vec(), source);
        match target.filter(|_| exchange) {
            Some(target) => self.names.insert(from.to_vec(), target),
            None => self.names.remove(from),
        };
    }

    pub fn chmod(&mut self, ino: u64, mode: u32) {
        let node = self.node(ino);
        node.mode = node.mode & 0o170_000 | mode;
    }

    pub fn set_xattr(&mut self, ino: u64, name: &[u8], value: &[u8]) {
        self.node(ino).xattrs.insert(name.to_vec(), value.to_vec());
    }

    pub fn bytes(&self, ino: u64) -> &[u8] {
        &self.nodes[&ino].bytes
    }

    pub fn write(&mut self, ino: u64, offset: usize, bytes: &[u8]) {
        self.grow(ino, offset + bytes.len());
        Arc::make_mut(&mut self.node(ino).bytes)[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub fn truncate(&mut self, ino: u64, size: usize) {
        Arc::make_mut(&mut self.node(ino).bytes).resize(size, 0);
    }

    pub fn grow(&mut self, ino: u64, size: usize) {
        let size = size.max(self.bytes(ino).len());
        self.truncate(ino, size);
    }

    pub fn punch(&mut self, ino: u64, offset: usize, len: usize) {
        let bytes = Arc::make_mut(&mut self.node(ino).bytes);
        let end = (offset + len).min(bytes.len());
        if let Some(hole) = bytes.get_mut(offset..end) {
            hole.fill(0);
        }
    }

    /// What a walk must find.
    pub fn world(&self) -> World {
        let mut links: BTreeMap<u64, u32> = BTreeMap::new();
        self.names.values().for_each(|ino| *links.entry(*ino).or_default() += 1);
        let seen = |(path, ino): (&Vec<u8>, &u64)| {
            let Node { mode, xattrs, bytes } = self.nodes[ino].clone();
            let nlink = if mode == DIR_MODE { 2 } else { links[ino] };
            (path.clone(), Seen { ino: *ino, mode, nlink, size: bytes.len() as u64, xattrs, bytes })
        };
        self.names.iter().map(seen).collect()
    }

    fn node(&mut self, ino: u64) -> &mut Node {
        self.nodes.get_mut(&ino).unwrap()
    }
}
