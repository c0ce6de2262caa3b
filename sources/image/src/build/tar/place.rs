//! Adds members of an archive to a tree, and reads their bytes.

use std::io::Read;
use std::path::Path;

use ferry_vfs::{FileType, Name, Timespec};

use super::member::{Kind, Member, Members};
use crate::build::content_writer::ContentWriter;
use crate::build::options::INLINE_BYTES_MAX;
use crate::build::tree_builder::{DEPTH_MAX, Refusal, TreeBuilder, names_of};
use crate::format::composefs::fits;
use crate::format::erofs::split_xattr;
use crate::format::error::{Error, Result};
use crate::format::tree::{Content, Node, NodeId, set_xattr};

/// The size of reads of large files, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

pub(super) fn refused(source: &Path, member: &Member, reason: Refusal) -> Error {
    let at = format!("the member {} at byte {}", member.path.escape_ascii(), member.offset);
    Error::Input { path: source.into(), at, reason }
}

pub(super) fn at_end(source: &Path, reason: Refusal) -> Error {
    Error::Input { path: source.into(), at: "at its end".into(), reason }
}

/// Adds a member, a regular file with these contents; returns its inode if it is new.
pub(super) fn place(
    builder: &mut TreeBuilder,
    names: &[Name<'_>],
    member: &Member,
    file: Option<Content>,
    for_composefs: bool,
) -> Result<Option<NodeId>, Refusal> {
    let content = match member.kind {
        Kind::File => file.unwrap_or(Content::None),
        Kind::Link => return link(builder, names, member).map(|()| None),
        Kind::Symlink => Content::Inline(member.link.clone()),
        Kind::Directory => Content::Directory(Vec::new()),
        Kind::Special => Content::None,
    };
    add(builder, names, node(member, content, for_composefs)?)
}

/// Returns the names of a member's path without `.`, with which archives of a whole directory begin.
pub(crate) fn components(path: &[u8]) -> Result<Vec<Name<'_>>, Refusal> {
    if path.is_empty() {
        return Err("it has no name".into());
    }
    let mut names = Vec::new();
    for part in path.split(|byte| *byte == b'/').filter(|part| *part != b".") {
        if part == b".." {
            return Err("its name has .. in it, which leads out of the tree".into());
        }
        names.append(&mut names_of(part)?);
    }
    if names.len() > DEPTH_MAX {
        return Err("its path has too many names".into());
    }
    Ok(names)
}

fn link(builder: &mut TreeBuilder, names: &[Name<'_>], member: &Member) -> Result<(), Refusal> {
    let target = components(&member.link).map_err(|reason| format!("a hard link: {reason}"))?;
    let absent = || format!("a hard link to {}, which is not in the archive before it", member.link.escape_ascii());
    let (target_name, target_parents) = target.split_last().ok_or("a hard link to a directory")?;
    let target_parent = builder.directory(target_parents)?.ok_or_else(absent)?;
    builder.child(target_parent, *target_name).ok_or_else(absent)?;
    let (name, parents) = names.split_last().ok_or("a hard link in the root's place")?;
    let parent = builder.enter(parents, directory)?;
    let id = builder.replace_by_link((parent, *name), (target_parent, *target_name))?;
    builder.node(id).nlink += 1;
    Ok(())
}

/// Replaces a name by an inode, as GNU tar, containerd and umoci do; a symbolic link of that name is not followed. An
/// existing directory gets the later member's mode, owner, times and attributes.
fn add(builder: &mut TreeBuilder, names: &[Name<'_>], node: Node) -> Result<Option<NodeId>, Refusal> {
    let Some((name, parents)) = names.split_last() else {
        match builder.find(&[]) {
            Some(root) if node.kind() == FileType::Directory => builder.describe(root, node)?,
            Some(_) => return Err("the root is not a directory".into()),
            None => builder.root(node)?,
        }
        return Ok(None);
    };
    let parent = builder.enter(parents, directory)?;
    if let (FileType::Directory, Some(known)) = (node.kind(), builder.child(parent, *name))
        && builder.node(known).kind() == FileType::Directory
    {
        builder.describe(known, node)?;
        builder.touch(parent, *name);
        return Ok(None);
    }
    builder.replace(parent, *name, node).map(Some)
}

/// Returns a directory that the archive does not describe.
pub(super) fn directory() -> Node {
    let (mtime, xattrs, content) = (Timespec::default(), Vec::new(), Content::Directory(Vec::new()));
    Node { mode: 0o040_755, uid: 0, gid: 0, rdev: 0, mtime, nlink: 2, xattrs, content }
}

fn node(member: &Member, content: Content, for_composefs: bool) -> Result<Node, Refusal> {
    let mut xattrs = Vec::new();
    for (name, value) in &member.xattrs {
        // Others belong to a file system, and mean nothing in an image.
        if for_composefs || split_xattr(name).0 != 0 {
            if !(1..=255).contains(&name.len()) || name.contains(&0) || value.len() > usize::from(u16::MAX) {
                return Err(format!("it has an attribute {} that cannot be", name.escape_ascii()));
            }
            set_xattr(&mut xattrs, name, value);
        }
    }
    if !fits(&xattrs) {
        return Err("it has more than 32 KiB of extended attributes".into());
    }
    if let Content::Inline(target) = &content
        && member.kind == Kind::Symlink
        && (target.is_empty() || target.len() > 4095 || target.contains(&0))
    {
        return Err("a symbolic link without a target, or with one that cannot be".into());
    }
    // On Linux, links have all permissions, whatever the archive says.
    let mode = if member.kind == Kind::Symlink { member.mode | 0o777 } else { member.mode };
    Ok(Node {
        mode,
        uid: member.uid,
        gid: member.gid,
        rdev: member.rdev,
        mtime: member.mtime,
        nlink: 1,
        xattrs,
        content,
    })
}

/// Reads a file: a small one is stored with its inode, others by `writer`.
pub(super) fn contents(
    members: &mut Members<impl Read>,
    member: &Member,
    writer: &mut impl ContentWriter,
) -> Result<Content> {
    let mut kept = Vec::new();
    if member.bytes <= INLINE_BYTES_MAX {
        while members.piece(member, &mut kept, PIECE_BYTES)? {}
        return Ok(Content::Inline(kept));
    }
    let content = writer.add_file(member.bytes, &mut |mut out| {
        while !out.is_empty() {
            kept.clear();
            if !members.piece(member, &mut kept, PIECE_BYTES.min(out.len() as u64))? {
                break;
            }
            let (now, later) = std::mem::take(&mut out).split_at_mut(kept.len());
            now.copy_from_slice(&kept);
            out = later;
        }
        Ok(())
    })?;
    // The padding of its last record.
    members.piece(member, &mut kept, PIECE_BYTES)?;
    Ok(content)
}
