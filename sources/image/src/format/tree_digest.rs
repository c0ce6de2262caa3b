//! The digest of a tree's content.
//!
//! An image of the layout flat names packs and places in them, so its own digest depends on what the store held when it was built. The
//! digest of the tree does not, nor on threads, the order of data, or fs-verity. The image holds it ([`crate::format::erofs::TREE_OFFSET`]) for
//! display; with `tree:` it is proved from the metadata and the indexes of packs.
//!
//! ```text
//! digest   BLAKE3 (derive_key "ferry 2026-11 tree digest 1") of the root's record and what follows it
//! record   kind and permissions 4, uid 4, gid 4, seconds 8, nanoseconds 4,
//!          number of attributes 4, and of each, by name: length 4, name, length 4, value;
//!          then by kind: directory: number of names 4, and of each, by name: length 4, name, record
//!                        symbolic link: length 4, target
//!                        device: number 4 (the kernel's form of 32 bits)
//!                        file: length 8, and of each 64 KiB its BLAKE3 digest 32
//! link     2^32 - 1 in 4 bytes, and which of the records before it has the inode, in 8 bytes: instead of the record, where an inode has
//!          an earlier name
//! ```
//!
//! Numbers are little endian. In the layout composefs an image is the same for the same tree, and its digest is that of the tree.

use std::collections::HashMap;
use std::path::Path;

use ferry_vfs::{FileType, Timespec};

use crate::format::check::check;
use crate::format::chunk::{self, CHUNK_BYTES};
use crate::format::data::Data;
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::{BLOCK_BYTES, COMPAT_ISHARE_XATTRS, COMPAT_MTIME, COMPAT_PLAIN_XATTR_PREFIXES};
use crate::format::error::{Error, Flaw, ImageResult, Result};
use crate::format::image::{Image, Inode, Nid};
use crate::format::index::Index;
use crate::format::tree::{Content, Node, NodeId, Tree};
use crate::format::walk::walk;

/// The BLAKE3 context that separates these digests from others.
const CONTEXT: &str = "ferry 2026-11 tree digest 1";
/// The value in place of kind and permissions if an inode has an earlier name.
const LINK: u32 = u32::MAX;

/// Hashes records in order.
struct Records {
    hasher: blake3::Hasher,
    count: u64,
}

/// The fields that all inodes have.
struct Head<'a> {
    mode: u32,
    owner: (u32, u32),
    mtime: Timespec,
    xattrs: Vec<(&'a [u8], &'a [u8])>,
}

/// Encodes a count; images that could exceed it are not read.
fn count(length: usize) -> [u8; 4] {
    u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes()
}

impl Records {
    fn new() -> Self {
        Self { hasher: blake3::Hasher::new_derive_key(CONTEXT), count: 0 }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.hasher.update(&count(bytes.len()));
        self.hasher.update(bytes);
    }

    fn head(&mut self, mut head: Head<'_>) {
        self.count += 1;
        let (uid, gid) = head.owner;
        for number in [head.mode, uid, gid] {
            self.hasher.update(&number.to_le_bytes());
        }
        self.hasher.update(&head.mtime.sec.to_le_bytes());
        self.hasher.update(&head.mtime.nsec.to_le_bytes());
        head.xattrs.sort_unstable();
        self.hasher.update(&count(head.xattrs.len()));
        for (name, value) in head.xattrs {
            self.bytes(name);
            self.bytes(value);
        }
    }

    fn link(&mut self, record: u64) {
        self.hasher.update(&LINK.to_le_bytes());
        self.hasher.update(&record.to_le_bytes());
    }

    /// Begins a directory with this number of names.
    fn names(&mut self, names: usize) {
        self.hasher.update(&count(names));
    }

    fn number(&mut self, number: u32) {
        self.hasher.update(&number.to_le_bytes());
    }

    /// Begins a file of this length; the digests of its chunks follow.
    fn file(&mut self, bytes: u64) {
        self.hasher.update(&bytes.to_le_bytes());
    }

    fn piece(&mut self, digest: &Digest) {
        self.hasher.update(digest.bytes());
    }

    /// Adds a file whose bytes are in memory.
    fn inline(&mut self, bytes: &[u8]) {
        self.file(bytes.len() as u64);
        bytes.chunks(CHUNK_BYTES).for_each(|bytes| self.piece(&chunk::digest(bytes)));
    }

    fn finish(self) -> Digest {
        Digest::new(Algorithm::Tree, self.hasher.finalize().into())
    }
}

/// Returns the digest of a tree that is to be written; `pieces` are the chunks of all its files.
pub(crate) fn of_tree(tree: &Tree, pieces: &[Digest]) -> Digest {
    let mut records = Records::new();
    let mut met: HashMap<NodeId, u64> = HashMap::new();
    let mut left = vec![(None, 0)];
    while let Some((name, id)) = left.pop() {
        if let Some(name) = name {
            records.bytes(name);
        }
        let node = &tree.nodes[id];
        let is_dir = matches!(node.content, Content::Directory(_));
        if !is_dir && node.nlink > 1 {
            if let Some(record) = met.get(&id) {
                records.link(*record);
                continue;
            }
            met.insert(id, records.count);
        }
        of_node(&mut records, node, pieces);
        if let Content::Directory(names) = &node.content {
            left.extend(names.iter().rev().map(|(name, child)| (Some(name.as_name().as_bytes()), *child)));
        }
    }
    records.finish()
}

fn of_node(records: &mut Records, node: &Node, pieces: &[Digest]) {
    records.head(Head {
        mode: node.mode.into(),
        owner: (node.uid, node.gid),
        mtime: node.mtime,
        xattrs: node.xattrs.iter().map(|(name, value)| (&name[..], &value[..])).collect(),
    });
    match (&node.content, node.kind()) {
        (Content::Directory(names), _) => records.names(names.len()),
        (Content::Inline(target), FileType::Symlink) => records.bytes(target),
        (Content::Inline(bytes), _) => records.inline(bytes),
        (Content::Packed { bytes, first }, _) => {
            records.file(*bytes);
            let count = usize::try_from(chunk::count(*bytes)).unwrap_or(usize::MAX);
            pieces[*first..][..count].iter().for_each(|digest| records.piece(digest));
        }
        (_, FileType::BlockDevice | FileType::CharacterDevice) => records.number(node.rdev),
        (_, FileType::RegularFile) => records.file(0),
        _ => {}
    }
}

/// Returns the digest of an image's tree, by the indexes of its packs, in order.
///
/// # Errors
///
/// The image is damaged: readers agree only on an image without findings ([`check`]).
fn of_image(image: &Image, indexes: &[&Index]) -> ImageResult<Result<Digest, String>> {
    // The kernel may read an image with other features differently.
    let identities = COMPAT_PLAIN_XATTR_PREFIXES | COMPAT_ISHARE_XATTRS;
    let own = if image.has_identities() { COMPAT_MTIME | identities } else { COMPAT_MTIME };
    let other = (image.features() != own).then(|| "features that Ferry does not write".into());
    if let Some(finding) = other.or_else(|| check(image).findings.into_iter().next()) {
        return Ok(Err(finding));
    }
    let mut records = Records::new();
    let mut met: HashMap<Nid, u64> = HashMap::new();
    walk(image, image.root(), b"/", |step, inode| -> ImageResult<()> {
        if step.depth > 0 {
            records.bytes(step.name());
        }
        if inode.kind() != FileType::Directory && inode.nlink > 1 {
            if let Some(record) = met.get(&inode.nid) {
                records.link(*record);
                return Ok(());
            }
            met.insert(inode.nid, records.count);
        }
        of_inode(&mut records, image, indexes, inode)
    })?;
    Ok(Ok(records.finish()))
}

fn of_inode(records: &mut Records, image: &Image, indexes: &[&Index], inode: &Inode) -> ImageResult<()> {
    let xattrs = image.xattrs(inode)?;
    records.head(Head {
        mode: inode.mode,
        owner: (inode.uid, inode.gid),
        mtime: inode.mtime,
        xattrs: xattrs.iter().map(|(name, value)| (&name[..], *value)).collect(),
    });
    match inode.kind() {
        FileType::Directory => {
            let mut names = 0;
            for entry in image.entries(inode, 0)? {
                names += usize::from(!matches!(entry?.name, b"." | b".."));
            }
            records.names(names);
        }
        FileType::Symlink => records.bytes(&image.link(inode)?),
        FileType::BlockDevice | FileType::CharacterDevice => records.number(inode.rdev()),
        FileType::RegularFile => match image.data(inode)? {
            Data::Near(whole, rest) => records.inline(&[whole, rest].concat()),
            data => {
                records.file(inode.bytes);
                for run in data.pieces(inode.bytes) {
                    let run = run?;
                    let (index, block) = (indexes.get(run.pack), run.at / BLOCK_BYTES as u64);
                    let object =
                        index.and_then(|index| index.objects_at(block).find(|object| object.bytes == run.bytes));
                    let flaw = Flaw { what: "a file whose bytes are no object of its pack", offset: inode.nid.0 };
                    records.piece(&object.ok_or(flaw)?.digest);
                }
            }
        },
        _ => {}
    }
    Ok(())
}

impl Image {
    /// Returns the digest of the tree in the image, which [`Self::verify_tree`] verifies. Older images have none.
    pub fn tree(&self) -> Option<Digest> {
        if self.is_composefs() { Some(self.digest()) } else { self.declared_tree() }
    }

    /// Returns the digest to display: that of the tree, or of the image if it has none.
    pub fn shown_digest(&self) -> Digest {
        self.tree().unwrap_or(self.digest())
    }

    /// Verifies the digest of the tree by the indexes of the packs, in order.
    pub(crate) fn verify_tree_by(&self, indexes: &[&Index]) -> Result<()> {
        let said = || Some((self.declared_tree()?, Path::new("the image")));
        let expected = self.expected_tree().map(|expected| (expected.tree, &*expected.path));
        let Some((wanted, path)) = expected.or_else(said).filter(|_| !self.is_composefs()) else { return Ok(()) };
        let invalid = |reason| Error::Invalid { path: path.into(), reason };
        let found = of_image(self, indexes).map_err(invalid)?;
        let found = found.map_err(|finding| Error::Unsound { path: path.into(), finding })?;
        if found == wanted {
            return Ok(());
        }
        Err(Error::OtherDigest { path: path.into(), wanted, found })
    }
}
