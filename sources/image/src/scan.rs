//! The tree of a directory of this host.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferry_vfs::{FileType, Name, NameBuf, Timespec};
use rustix::fs::{lgetxattr, llistxattr};
use rustix::io::Errno;

use crate::composefs::fits;
use crate::erofs::XATTR_PREFIXES;
use crate::error::{Doing, Error, Result};
use crate::tree::{Content, Node, NodeId, Tree};

/// Files up to this size are kept with their inodes, where whoever looks at the inode has them already. More would make
/// walks of the metadata slower; composefs keeps as many.
pub const INLINE_BYTES_MAX: u64 = 64;
/// The longest list of names of attributes, and the longest value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const XATTR_BYTES_MAX: usize = 65536;

/// Walks a directory, without crossing into other file systems' mounts being any different from directories. For composefs
/// each name is an inode of its own, and attributes of all kinds are taken: so does mkcomposefs.
///
/// Larger files are still to be read: each is told to `found`, with its length, in the order of the walk.
pub(crate) fn scan(root: &Path, for_composefs: bool, found: &mut dyn FnMut(NodeId, u64, PathBuf)) -> Result<Tree> {
    let metadata = fs::metadata(root).doing("look at", root)?;
    if !metadata.is_dir() {
        return Err(Error::CannotHold { path: root.into(), reason: "is no directory".into() });
    }
    // The root may be named by a symbolic link, whatever is in it may not.
    let root = fs::canonicalize(root).doing("look at", root)?;
    let mut walk = Walk { tree: Tree::default(), found, known: HashMap::new(), for_composefs };
    let mut left = vec![(walk.add(&root, &metadata)?, root)];
    while let Some((node, path)) = left.pop() {
        let directories = walk.list(node, &path)?;
        left.extend(directories.into_iter().rev());
    }
    Ok(walk.tree)
}

struct Walk<'a> {
    tree: Tree,
    found: &'a mut dyn FnMut(NodeId, u64, PathBuf),
    /// Inodes with several names that have been met.
    known: HashMap<(u64, u64), NodeId>,
    for_composefs: bool,
}

impl Walk<'_> {
    /// Lists a directory and adds what is in it; answers the directories among them, in order.
    fn list(&mut self, node: NodeId, path: &Path) -> Result<Vec<(NodeId, PathBuf)>> {
        let mut names: Vec<OsString> = Vec::new();
        for entry in fs::read_dir(path).doing("list", path)? {
            names.push(entry.doing("list", path)?.file_name());
        }
        names.sort_unstable_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
        let mut entries = Vec::with_capacity(names.len());
        let mut directories = Vec::new();
        for name in names {
            let path = path.join(&name);
            let metadata = fs::symlink_metadata(&path).doing("look at", &path)?;
            let child = self.add(&path, &metadata)?;
            if metadata.is_dir() {
                directories.push((child, path.clone()));
            }
            entries.push((self.name(name, &path)?, child));
        }
        let node = &mut self.tree.nodes[node];
        node.nlink = u32::try_from(directories.len()).unwrap_or(u32::MAX - 2) + 2;
        node.content = Content::Directory(entries);
        Ok(directories)
    }

    fn name(&self, name: OsString, path: &Path) -> Result<NameBuf> {
        let bytes = name.into_vec();
        let name = Name::new(&bytes).map_err(|error| Error::CannotHold {
            path: path.into(),
            reason: format!("the name cannot be kept ({error})"),
        })?;
        Ok(name.to_buf())
    }

    /// The node of an inode, which is made at its first name.
    fn add(&mut self, path: &Path, metadata: &Metadata) -> Result<NodeId> {
        let nodes = &mut self.tree.nodes;
        let id = nodes.len();
        if metadata.nlink() > 1 && !metadata.is_dir() && !self.for_composefs {
            match self.known.entry((metadata.dev(), metadata.ino())) {
                std::collections::hash_map::Entry::Occupied(known) => {
                    let id = *known.get();
                    nodes[id].nlink += 1;
                    return Ok(id);
                }
                std::collections::hash_map::Entry::Vacant(new) => _ = new.insert(id),
            }
        }
        let content = content(path, metadata)?;
        let xattrs = xattrs(path, self.for_composefs)?;
        if self.for_composefs && !fits(&xattrs) {
            let reason = "its extended attributes have more than 32 KiB, which composefs does not hold".into();
            return Err(Error::CannotHold { path: path.into(), reason });
        }
        if let Content::Unread { bytes } = content {
            (self.found)(id, bytes, path.into());
        }
        nodes.push(Node {
            // The type and the permissions are 16 bits.
            mode: u16::try_from(metadata.mode() & 0xffff).unwrap_or_default(),
            uid: metadata.uid(),
            gid: metadata.gid(),
            rdev: rdev(metadata.rdev(), path)?,
            mtime: Timespec { sec: metadata.mtime(), nsec: u32::try_from(metadata.mtime_nsec()).unwrap_or(0) },
            nlink: 1,
            xattrs,
            content,
        });
        Ok(id)
    }
}

fn content(path: &Path, metadata: &Metadata) -> Result<Content> {
    Ok(match FileType::from_raw_mode(metadata.mode()) {
        FileType::Directory => Content::Directory(Vec::new()),
        FileType::Symlink => {
            let target = fs::read_link(path).doing("read the link", path)?;
            Content::Inline(target.into_os_string().into_vec())
        }
        FileType::RegularFile if metadata.size() <= INLINE_BYTES_MAX => {
            let bytes = fs::read(path).doing("read", path)?;
            if bytes.len() as u64 != metadata.size() {
                return Err(Error::Changed(path.into()));
            }
            Content::Inline(bytes)
        }
        FileType::RegularFile => Content::Unread { bytes: metadata.size() },
        _ => Content::None,
    })
}

/// The kernel's form of a device number in 32 bits: the lower 8 bits of the minor number, 12 of the major, the other 12.
fn rdev(dev: u64, path: &Path) -> Result<u32> {
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    if major >= 1 << 12 || minor >= 1 << 20 {
        let reason = format!("the device number {major}:{minor} does not fit in 12 and 20 bits");
        return Err(Error::CannotHold { path: path.into(), reason });
    }
    Ok(minor & 0xff | major << 8 | (minor & !0xff) << 12)
}

/// The attributes that EROFS has prefixes for, by name. Others are of the file system below (`system.nfs4_acl`) and mean nothing
/// elsewhere.
fn xattrs(path: &Path, all: bool) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = Vec::with_capacity(XATTR_BYTES_MAX);
    match llistxattr(path, rustix::buffer::spare_capacity(&mut names)) {
        Ok(_) => {}
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(error) => return Err(error).doing("list the attributes of", path),
    }
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0) {
        let is_known = all || XATTR_PREFIXES.iter().any(|(_, prefix)| name.starts_with(prefix));
        if name.is_empty() || !is_known {
            continue;
        }
        let mut value = Vec::with_capacity(XATTR_BYTES_MAX);
        match lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)) {
            Ok(_) => found.push((name.to_vec(), value.as_slice().to_vec())),
            // It went away meanwhile.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error).doing("read the attributes of", path),
        }
    }
    found.sort_unstable();
    Ok(found)
}
