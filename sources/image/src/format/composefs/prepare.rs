//! Prepares a tree for its layout: escapes overlayfs's own attributes and adds those that locate files' bytes.

use std::collections::HashSet;

use ferry_vfs::{FileType, NameBuf};

use super::view::{
    METACOPY, OPAQUE, OVERLAY_PREFIX, REDIRECT, USER_OPAQUE, USER_WHITEOUT, USER_WHITEOUTS, WHITEOUT, WHITEOUTS,
    escape, metacopy,
};
use crate::format::digest::Digest;
use crate::format::tree::{Content, Node, NodeId, Tree, set_xattr};

/// The maximum size of an inode's attributes in mkcomposefs, counted as by [`fits`].
const XATTR_BYTES_MAX: usize = 32767;
/// The mode of the whiteouts in the root.
const STUB_MODE: u16 = 0o020_644;
const TYPE_BITS: u16 = 0o170_000;
const REGULAR: u16 = 0o100_000;

/// Returns whether composefs accepts these attributes on one inode.
pub(crate) fn fits(xattrs: &[(Vec<u8>, Vec<u8>)]) -> bool {
    let size: usize = xattrs.iter().map(|(name, value)| 7 + name.len() + value.len()).sum();
    12 + size <= XATTR_BYTES_MAX
}

/// Prepares a tree; returns the version of the layout.
pub(super) fn prepare(tree: &mut Tree, version: Option<u32>) -> u32 {
    let (whiteouts, marked) = whiteouts(tree);
    let version = version.unwrap_or(u32::from(!whiteouts.is_empty()));
    for node in &mut tree.nodes {
        for (name, _) in &mut node.xattrs {
            if name.starts_with(OVERLAY_PREFIX) {
                *name = escape(name);
            }
        }
        node.xattrs.sort_unstable();
    }
    for id in whiteouts {
        let node = &mut tree.nodes[id];
        node.mode = REGULAR | node.mode & !TYPE_BITS;
        set_xattr(&mut node.xattrs, &escape(WHITEOUT), b"");
        set_xattr(&mut node.xattrs, USER_WHITEOUT, b"");
    }
    for id in marked {
        let xattrs = &mut tree.nodes[id].xattrs;
        set_xattr(xattrs, &escape(WHITEOUTS), b"");
        set_xattr(xattrs, USER_WHITEOUTS, b"");
        if version >= 1 {
            set_xattr(xattrs, &escape(OPAQUE), b"x");
            set_xattr(xattrs, USER_OPAQUE, b"x");
        }
    }
    add_stubs(tree);
    set_xattr(&mut tree.nodes[0].xattrs, OPAQUE, b"y");
    for node in &mut tree.nodes {
        let (path, digest) = match &node.content {
            Content::Object { digest, .. } => (Some(path_of(*digest)), Some(*digest)),
            Content::Elsewhere { bytes: 1.., path, digest } => (path.clone(), *digest),
            _ => continue,
        };
        set_xattr(&mut node.xattrs, METACOPY, &metacopy(digest));
        if let Some(path) = path {
            set_xattr(&mut node.xattrs, REDIRECT, &[b"/", path.as_slice()].concat());
        }
    }
    version
}

/// The name of an object below the store's directory `objects`.
pub(crate) fn path_of(digest: Digest) -> Vec<u8> {
    let mut path = digest.hex().into_bytes();
    path.insert(2, b'/');
    path
}

/// Returns all whiteouts (character devices 0, 0), and their directories. Further hard links do not count.
fn whiteouts(tree: &Tree) -> (Vec<NodeId>, HashSet<NodeId>) {
    let (mut found, mut marked) = (Vec::new(), HashSet::new());
    for (id, node) in tree.nodes.iter().enumerate() {
        let Content::Directory(names) = &node.content else { continue };
        for (name, child) in names {
            let node = &tree.nodes[*child];
            if node.kind() == FileType::CharacterDevice && node.rdev == 0 && !tree.is_link(id, name) {
                found.push(*child);
                marked.insert(id);
            }
        }
    }
    (found, marked)
}

/// Adds a whiteout to the root for each free name of two hexadecimal digits: those of the object store's directories, which
/// overlayfs must not show.
fn add_stubs(tree: &mut Tree) {
    let root = &tree.nodes[0];
    let Content::Directory(names) = &root.content else { return };
    let mut names = names.clone();
    let label = root.xattrs.iter().find(|(name, _)| name == b"security.selinux").cloned();
    let (uid, gid, mtime) = (root.uid, root.gid, root.mtime);
    let known: HashSet<NameBuf> = names.iter().map(|(name, _)| name.clone()).collect();
    for number in 0..=u8::MAX {
        let text = format!("{number:02x}");
        let Ok(name) = ferry_vfs::Name::new(text.as_bytes()) else { continue };
        let name = name.to_buf();
        if known.contains(&name) {
            continue;
        }
        names.push((name, tree.nodes.len()));
        tree.nodes.push(Node {
            mode: STUB_MODE,
            uid,
            gid,
            rdev: 0,
            mtime,
            nlink: 1,
            xattrs: label.iter().cloned().collect(),
            content: Content::None,
        });
    }
    names.sort_unstable_by(|(a, _), (b, _)| a.as_name().as_bytes().cmp(b.as_name().as_bytes()));
    tree.nodes[0].content = Content::Directory(names);
}
