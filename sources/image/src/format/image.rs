//! An image that is open for reading. Images are untrusted: everything is checked where it is used.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;

use ferry_vfs::{FileType, Timespec};
use zerocopy::FromBytes;

use crate::format::chunk::{self, CHUNK_FORMAT};
use crate::format::composefs::view::{METACOPY, REDIRECT, digest_of, visible_name};
use crate::format::data::{ChunkIndex, Data, ENTRY_BYTES, PackRef};
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::{
    BLOCK_BYTES, COMPAT_ISHARE_XATTRS, Compact, DeviceSlot, Extended, IDENTITY_XATTR, LONG_XATTR_PREFIX, Layout,
    MANIFEST_OFFSET, SLOT_BYTES, SUPER_OFFSET, Super, TREE_OFFSET, XATTR_PREFIX_TABLE, XATTR_PREFIX_UNIT,
    XATTR_PREFIXES, XattrEntry, XattrHeader, split_xattr,
};
use crate::format::error::{Flaw, ImageResult};

mod directory;
mod kinds;
mod open;

pub use directory::{Entries, Entry};

/// The maximum size of an image. The metadata of a hundred million files fits.
pub const IMAGE_BYTES_MAX: u64 = 16 << 30;
/// The number of bytes that identify an image, before the rest is read.
const HEAD_BYTES: usize = SUPER_OFFSET + size_of::<Super>();

/// An extended attribute: its full name, and its value.
pub type Xattr<'a> = (Vec<u8>, &'a [u8]);

/// An attribute with its location in the image.
#[derive(Clone, Debug)]
pub(crate) struct XattrAt<'a> {
    pub name: Vec<u8>,
    pub value: &'a [u8],
    pub value_offset: usize,
    /// The offsets of its entry, and of the next one.
    pub range: Range<usize>,
}

/// The number of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

/// An open image.
///
/// It is a copy of the file, made once: what the digest has verified cannot change any more.
#[derive(Debug)]
pub struct Image {
    bytes: Vec<u8>,
    digest: Digest,
    header: Super,
    packs: Vec<PackRef>,
    is_composefs: bool,
    /// Which kinds of attributes no inode has (`FLAT_NO_*`), once determined.
    absent: OnceLock<u8>,
    /// The tree for which it was opened; verified when the packs are opened.
    expected: Option<ExpectedTree>,
}

/// An inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Its number.
    pub nid: Nid,
    /// Type and permissions.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the data.
    pub mtime: Timespec,
    /// Device number of a device, first block of anything else.
    place: u32,
    layout: Layout,
    /// The range of the attributes.
    xattrs: (usize, usize),
}

impl Inode {
    /// Returns the file type.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// Returns the number of a device in the kernel's 32-bit form; 0 for anything else.
    pub fn rdev(&self) -> u32 {
        if matches!(self.kind(), FileType::BlockDevice | FileType::CharacterDevice) { self.place } else { 0 }
    }
}

impl Image {
    /// Returns the digest of the image.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the digest of the tree in an image of the flat layout.
    pub(crate) fn declared_tree(&self) -> Option<Digest> {
        let bytes: [u8; DIGEST_BYTES] = read_at(&self.bytes, TREE_OFFSET).ok()?;
        (bytes != [0; DIGEST_BYTES]).then(|| Digest::new(Algorithm::Tree, bytes))
    }

    /// Returns the SHA-256 digest of a container's manifest, for an image of its layers as they are in a registry.
    pub fn manifest(&self) -> Option<[u8; DIGEST_BYTES]> {
        let bytes: [u8; DIGEST_BYTES] = read_at(&self.bytes, MANIFEST_OFFSET).ok()?;
        (!self.is_composefs && bytes != [0; DIGEST_BYTES]).then_some(bytes)
    }

    /// Returns the compatible features.
    pub(crate) fn features(&self) -> u32 {
        self.header.feature_compat.get()
    }

    pub(crate) fn expected_tree(&self) -> Option<&ExpectedTree> {
        self.expected.as_ref()
    }

    /// Returns the size of the image in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the size in its superblock.
    pub(crate) fn declared_bytes(&self) -> u64 {
        u64::from(self.header.blocks.get()) * BLOCK_BYTES as u64
    }

    /// Returns the ranges of the superblock, with what precedes it, of the device table, and of the prefixes of attributes.
    pub(crate) fn head(&self) -> [Range<usize>; 3] {
        let table = usize::from(self.header.device_table.get()) * size_of::<DeviceSlot>();
        let prefixes = prefix_table(&self.header);
        let prefixes_end = if self.has_identities() { prefixes + XATTR_PREFIX_TABLE.len() } else { prefixes };
        [0..HEAD_BYTES, table..table + self.packs.len() * size_of::<DeviceSlot>(), prefixes..prefixes_end]
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Returns whether files have identities, by which mounts can share their page cache.
    pub fn has_identities(&self) -> bool {
        self.features() & COMPAT_ISHARE_XATTRS != 0
    }

    /// Returns whether it has the composefs layout: files' bytes are in an object store.
    pub fn is_composefs(&self) -> bool {
        self.is_composefs
    }

    /// Returns the number of inodes in its superblock.
    pub fn inodes(&self) -> u64 {
        self.header.inodes.get()
    }

    /// Returns its packs, in the order in which a mount needs them.
    pub fn packs(&self) -> &[PackRef] {
        &self.packs
    }

    /// Returns the root directory.
    pub fn root(&self) -> Nid {
        Nid(self.header.root_nid.get().into())
    }

    /// Returns the offset of an inode.
    fn offset(&self, nid: Nid) -> ImageResult<usize> {
        let meta = u64::from(self.header.meta_block.get()) * BLOCK_BYTES as u64;
        let at = nid.0.checked_mul(SLOT_BYTES as u64).and_then(|at| at.checked_add(meta));
        let outside = || Flaw { what: "an inode number outside of the image", offset: nid.0 };
        at.and_then(|at| usize::try_from(at).ok()).ok_or_else(outside)
    }

    /// Returns an inode.
    ///
    /// # Errors
    ///
    /// It does not exist.
    pub fn inode(&self, nid: Nid) -> ImageResult<Inode> {
        let at = self.offset(nid)?;
        let flaw = |what| Flaw { what, offset: at as u64 };
        let compact: Compact = read_at(&self.bytes, at)?;
        let (layout, is_extended) =
            Layout::of(compact.format.get()).ok_or_else(|| flaw("an inode of an unknown layout"))?;
        let xattr_bytes = match usize::from(compact.xattr_count.get()) {
            0 => 0,
            count => size_of::<XattrHeader>() + (count - 1) * 4,
        };
        let mode = u32::from(compact.mode.get());
        let inode = if is_extended {
            let inode: Extended = read_at(&self.bytes, at)?;
            let after = at + size_of::<Extended>();
            Inode {
                nid,
                mode,
                nlink: inode.nlink.get(),
                uid: inode.uid.get(),
                gid: inode.gid.get(),
                bytes: inode.size.get(),
                mtime: Timespec { sec: inode.mtime.get().cast_signed(), nsec: inode.mtime_nsec.get() },
                place: inode.place.get(),
                layout,
                xattrs: (after, after + xattr_bytes),
            }
        } else {
            let after = at + size_of::<Compact>();
            let epoch = self.header.epoch.get().cast_signed();
            Inode {
                nid,
                mode,
                nlink: compact.nlink.get().into(),
                uid: compact.uid.get().into(),
                gid: compact.gid.get().into(),
                bytes: compact.size.get().into(),
                mtime: Timespec {
                    sec: epoch.saturating_add(compact.mtime.get().into()),
                    nsec: self.header.fixed_nsec.get(),
                },
                place: compact.place.get(),
                layout,
                xattrs: (after, after + xattr_bytes),
            }
        };
        if inode.mtime.nsec >= 1_000_000_000 {
            return Err(flaw("a time with more than a second of nanoseconds"));
        }
        if inode.xattrs.1 > self.bytes.len() {
            return Err(flaw("attributes that end outside of the image"));
        }
        Ok(inode)
    }

    /// Returns the location of the bytes of a file, link or directory, which is checked.
    ///
    /// # Errors
    ///
    /// It is outside of the image and its packs.
    pub fn data(&self, inode: &Inode) -> ImageResult<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        let outside = || flaw("data outside of the image");
        if inode.layout == Layout::Chunks {
            return if self.is_composefs { self.object(inode) } else { self.pieces(inode) };
        }
        let first = u64::from(inode.place);
        let blocks = inode.bytes.div_ceil(BLOCK_BYTES as u64);
        let far = self.packs.iter().position(|pack| first >= pack.first_block && first < pack.end());
        if let (Layout::Plain, Some(pack)) = (inode.layout, far) {
            if blocks > self.packs[pack].end() - first {
                return Err(flaw("data that end outside of their pack"));
            }
            return Ok(Data::Far { pack, block: first - self.packs[pack].first_block });
        }
        let bytes = usize::try_from(inode.bytes).map_err(|_| outside())?;
        let tail = if inode.layout == Layout::Inline { bytes % BLOCK_BYTES } else { 0 };
        let whole = match bytes - tail {
            0 => &[],
            whole => {
                let at = usize::try_from(first).map_err(|_| outside())?.checked_mul(BLOCK_BYTES).ok_or_else(outside)?;
                let end = at.checked_add(whole).ok_or_else(outside)?;
                self.bytes.get(at..end).ok_or_else(outside)?
            }
        };
        let from = inode.xattrs.1;
        if tail > 0 && from / BLOCK_BYTES != (from + tail - 1) / BLOCK_BYTES {
            return Err(flaw("data behind an inode that cross a block"));
        }
        let rest = self.bytes.get(from..from + tail).ok_or_else(outside)?;
        Ok(Data::Near(whole, rest))
    }

    /// Returns the ranges of the image that an inode uses: its head, attributes and tail, and whole blocks of data.
    ///
    /// # Errors
    ///
    /// They are outside of the image.
    pub(crate) fn own_bytes(&self, inode: &Inode) -> ImageResult<(Range<usize>, Range<usize>)> {
        let begin = self.offset(inode.nid)?;
        let mut blocks = 0..0;
        let tail = match inode.kind() {
            FileType::RegularFile | FileType::Directory | FileType::Symlink => match self.data(inode)? {
                Data::Near(whole, rest) => {
                    let from = if whole.is_empty() { 0 } else { inode.place as usize * BLOCK_BYTES };
                    blocks = from..from + whole.len();
                    rest.len()
                }
                Data::Chunks(pieces) => pieces.index.len(),
                Data::Object { .. } => self.holes(inode)?.len(),
                Data::Far { .. } => 0,
            },
            _ => 0,
        };
        Ok((begin..inode.xattrs.1 + tail, blocks))
    }

    /// Returns the chunk index of a composefs file; empty if it would cross a block: mkcomposefs stores it elsewhere.
    fn holes(&self, inode: &Inode) -> ImageResult<&[u8]> {
        let outside = || Flaw { what: "chunks outside of the image", offset: inode.xattrs.0 as u64 };
        let chunk = (BLOCK_BYTES as u64) << (inode.place & 31);
        let index = usize::try_from(inode.bytes.div_ceil(chunk)).ok().and_then(|count| count.checked_mul(4));
        // It never exceeds a block: composefs files have up to 2^53 bytes, in chunks of maximum size.
        let index = index.filter(|index| *index <= BLOCK_BYTES).ok_or_else(outside)?;
        if inode.xattrs.1 % BLOCK_BYTES + index > BLOCK_BYTES {
            return Ok(&[]);
        }
        let end = inode.xattrs.1.checked_add(index);
        end.and_then(|end| self.bytes.get(inode.xattrs.1..end)).ok_or_else(outside)
    }

    /// Returns the object of a composefs file: all its chunks are holes, and attributes locate the bytes.
    fn object(&self, inode: &Inode) -> ImageResult<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        let index = self.holes(inode)?;
        // If the index is elsewhere, a part of its block's number remains.
        let format = if index.is_empty() { inode.place & 0xffff } else { inode.place };
        if inode.kind() != FileType::RegularFile || format > 31 || index.iter().any(|byte| *byte != 0xff) {
            return Err(flaw("chunks that are no holes"));
        }
        let (mut path, mut digest) = (None, None);
        for (name, value) in self.raw_xattrs(inode)? {
            if name == REDIRECT {
                path = Some(value.strip_prefix(b"/").ok_or_else(|| flaw("an invalid redirect"))?);
            } else if name == METACOPY {
                digest = digest_of(value).map_err(|()| flaw("a digest of an unknown kind"))?;
            }
        }
        Ok(Data::Object { path, digest })
    }

    /// Returns the chunks of a file, whose index follows the inode. They are checked on use.
    fn pieces(&self, inode: &Inode) -> ImageResult<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        if inode.kind() != FileType::RegularFile || inode.place != CHUNK_FORMAT {
            return Err(flaw("chunks that are not of 64 KiB"));
        }
        let bytes = usize::try_from(chunk::count(inode.bytes)).ok().and_then(|count| count.checked_mul(ENTRY_BYTES));
        let end = bytes.and_then(|bytes| inode.xattrs.1.checked_add(bytes));
        let index = end.and_then(|end| self.bytes.get(inode.xattrs.1..end));
        let index = index.ok_or_else(|| flaw("chunks outside of the image"))?;
        Ok(Data::Chunks(ChunkIndex { packs: &self.packs, index, at: inode.xattrs.1 as u64 }))
    }

    /// Returns the target of a symbolic link.
    ///
    /// # Errors
    ///
    /// It is not a link, or not in the image.
    pub fn link(&self, inode: &Inode) -> ImageResult<Vec<u8>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        match self.data(inode)? {
            Data::Near(whole, rest) if inode.kind() == FileType::Symlink && (1..=4095).contains(&inode.bytes) => {
                let target = [whole, rest].concat();
                if target.contains(&0) { Err(flaw("a link with a byte of zero")) } else { Ok(target) }
            }
            _ => Err(flaw("a link without a target")),
        }
    }

    /// Returns the extended attributes of an inode; for a composefs image those that overlayfs shows.
    ///
    /// # Errors
    ///
    /// They are damaged.
    pub fn xattrs(&self, inode: &Inode) -> ImageResult<Vec<Xattr<'_>>> {
        let raw = self.raw_xattrs(inode)?;
        if !self.is_composefs {
            return Ok(raw);
        }
        Ok(raw.into_iter().filter_map(|(name, value)| Some((visible_name(name)?, value))).collect())
    }

    /// Returns the extended attributes as stored, shared ones last, without identities.
    pub(crate) fn raw_xattrs(&self, inode: &Inode) -> ImageResult<Vec<Xattr<'_>>> {
        let mut all = self.all_xattrs(inode)?;
        if self.has_identities() {
            all.retain(|xattr| xattr.name != IDENTITY_XATTR);
        }
        Ok(all.into_iter().map(|XattrAt { name, value, .. }| (name, value)).collect())
    }

    /// The same with identities.
    pub(crate) fn all_xattrs(&self, inode: &Inode) -> ImageResult<Vec<XattrAt<'_>>> {
        let (shared, mut at) = self.shared_xattrs(inode)?;
        let mut found = Vec::new();
        while at < inode.xattrs.1 {
            let xattr = self.xattr(at, inode.xattrs.1)?;
            at = xattr.range.end;
            found.push(xattr);
        }
        found.extend(shared);
        Ok(found)
    }

    /// Returns an inode's shared attributes, and the offset of its own ones.
    pub(crate) fn shared_xattrs(&self, inode: &Inode) -> ImageResult<(Vec<XattrAt<'_>>, usize)> {
        let (from, to) = inode.xattrs;
        let mut found = Vec::new();
        if from == to {
            return Ok((found, to));
        }
        let header: XattrHeader = read_at(&self.bytes[..to], from)?;
        let mut at = from + size_of::<XattrHeader>();
        let shared = self.header.xattr_block.get() as usize * BLOCK_BYTES;
        for _ in 0..header.shared_count {
            let id: zerocopy::little_endian::U32 = read_at(&self.bytes[..to], at)?;
            at += size_of_val(&id);
            found.push(self.xattr(shared + id.get() as usize * 4, self.bytes.len())?);
        }
        Ok((found, at))
    }

    /// Returns the attribute at an offset.
    fn xattr(&self, at: usize, end: usize) -> ImageResult<XattrAt<'_>> {
        let flaw = |what| Flaw { what, offset: at as u64 };
        let bytes = self.bytes.get(..end).unwrap_or_default();
        let entry: XattrEntry = read_at(bytes, at)?;
        let prefix: &[u8] = match XATTR_PREFIXES.iter().find(|(number, _)| *number == entry.prefix) {
            Some((_, prefix)) => prefix,
            None if entry.prefix == 0 => b"",
            None if entry.prefix == LONG_XATTR_PREFIX && self.has_identities() => IDENTITY_XATTR,
            None => return Err(flaw("an attribute of an unknown kind")),
        };
        let name = at + size_of::<XattrEntry>();
        let value_offset = name + usize::from(entry.name_len);
        let after = value_offset + usize::from(entry.value_len.get());
        let cut = || flaw("an attribute that is cut off");
        let suffix = bytes.get(name..value_offset).ok_or_else(cut)?;
        let value = bytes.get(value_offset..after).ok_or_else(cut)?;
        let is_long = entry.prefix == LONG_XATTR_PREFIX;
        let name = [prefix, suffix].concat();
        if if is_long { name != IDENTITY_XATTR } else { split_xattr(&name).0 != entry.prefix } {
            return Err(flaw("an attribute of another kind than it says"));
        }
        if name.contains(&0) || name.len() > crate::format::erofs::XATTR_NAME_MAX {
            return Err(flaw("an attribute with an invalid name"));
        }
        Ok(XattrAt { name, value, value_offset, range: at..after.next_multiple_of(4) })
    }
}

/// Returns the offset of the table of long prefixes.
fn prefix_table(header: &Super) -> usize {
    header.xattr_prefix_start.get() as usize * XATTR_PREFIX_UNIT
}

/// Reads a structure at any offset.
fn read_at<T: FromBytes>(bytes: &[u8], at: usize) -> ImageResult<T> {
    let flaw = || Flaw { what: "the end of the image in the middle of a structure", offset: at as u64 };
    let from = bytes.get(at..).ok_or_else(flaw)?;
    T::read_from_prefix(from).map(|(value, _)| value).map_err(|_| flaw())
}

/// The tree for which an image was opened.
#[derive(Clone, Debug)]
pub(crate) struct ExpectedTree {
    pub tree: Digest,
    /// The image's file.
    pub path: PathBuf,
}
