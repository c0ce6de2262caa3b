//! The on-disk structures of EROFS that Ferry writes and reads.
//!
//! Source: fs/erofs/erofs_fs.h of Linux and the document "EROFS - Enhanced Read-Only File System". All numbers are
//! little-endian.

use ferry_vfs::FileType;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The offset of the superblock.
pub const SUPER_OFFSET: usize = 1024;
/// The offset of the tree's digest in images of the flat layout: EROFS does not use what precedes the superblock.
pub const TREE_OFFSET: usize = SUPER_OFFSET - crate::format::digest::DIGEST_BYTES;
/// The offset of the SHA-256 digest of a container's manifest, in images of its layers.
pub const MANIFEST_OFFSET: usize = TREE_OFFSET - crate::format::digest::DIGEST_BYTES;
/// The first bytes of a superblock.
pub const SUPER_MAGIC: u32 = 0xE0F5_E1E2;
/// The block size that Ferry uses, in bytes: the page size of nearly all machines, which every kernel supports.
pub const BLOCK_BYTES: usize = 4096;
/// The same as a power of two.
pub const BLOCK_BITS: u8 = 12;
/// The unit of inode numbers in bytes: an inode begins at its number times this.
pub const SLOT_BYTES: usize = 32;
/// Incompatible feature: data in other devices.
pub const INCOMPAT_DEVICE_TABLE: u32 = 0x8;
/// Incompatible feature: files in chunks.
pub const INCOMPAT_CHUNKS: u32 = 0x4;
/// Incompatible feature: long prefixes of attribute names.
pub const INCOMPAT_XATTR_PREFIXES: u32 = 0x40;
/// Compatible feature: the times in inodes are modification times.
pub const COMPAT_MTIME: u32 = 0x2;
/// Compatible feature: [`XattrHeader::name_filter`] is valid.
pub const COMPAT_XATTR_FILTER: u32 = 0x4;
/// Compatible feature: the table of long prefixes is in the image itself, at [`Super::xattr_prefix_start`].
pub const COMPAT_PLAIN_XATTR_PREFIXES: u32 = 0x10;
/// Compatible feature: an attribute identifies the contents of files ([`Super::ishare_xattr_prefix`]).
pub const COMPAT_ISHARE_XATTRS: u32 = 0x20;
/// The bit of [`XattrEntry::prefix`] that marks the number of a long prefix.
pub const LONG_XATTR_PREFIX: u8 = 0x80;
/// The unit of [`Super::xattr_prefix_start`] in bytes.
pub const XATTR_PREFIX_UNIT: usize = 4;
/// The name of the attribute with the identity of a file's contents, in Ferry's images that have these.
pub const IDENTITY_XATTR: &[u8] = b"trusted.overlay.ferry.content";
/// The table of long prefixes in such an image, with its only one: length, number of the prefix `trusted.`, and the rest of
/// [`IDENTITY_XATTR`].
pub const XATTR_PREFIX_TABLE: &[u8] = b"\x16\0\x04overlay.ferry.content";
const _: () = assert!(XATTR_PREFIX_TABLE.len() == 2 + 1 + IDENTITY_XATTR.len() - b"trusted.".len());
const _: () = assert!(XATTR_PREFIX_TABLE[0] as usize == XATTR_PREFIX_TABLE.len() - 2);
/// The maximum `name_len` in [`XattrEntry`] (`XATTR_NAME_MAX`).
pub const XATTR_NAME_MAX: usize = 255;
/// The prefix of the volume name in images of the layout `flat`; the last byte has flags.
pub const FLAT_VOLUME: &[u8] = b"ferry flat2\0";
/// The prefix in images of the first version, which used other digests.
pub const FLAT_VOLUME_1: &[u8] = b"ferry flat\0";
/// No inode has extended attributes.
pub const FLAT_NO_XATTRS: u8 = 0x1;
/// No inode has an ACL.
pub const FLAT_NO_ACLS: u8 = 0x2;
/// No inode has a label of SELinux.
pub const FLAT_NO_LABELS: u8 = 0x4;
/// All of these.
pub const FLAT_NO_KIND: u8 = FLAT_NO_XATTRS | FLAT_NO_ACLS | FLAT_NO_LABELS;

/// Returns the flags of `FLAT_NO_*` that do not hold if an inode has this attribute.
pub fn denied_by(xattr: &[u8]) -> u8 {
    let mut denied = FLAT_NO_XATTRS;
    if xattr.starts_with(XATTR_ACL) {
        denied |= FLAT_NO_ACLS;
    }
    if xattr == XATTR_LABEL {
        denied |= FLAT_NO_LABELS;
    }
    denied
}

/// The superblock.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Super {
    /// [`SUPER_MAGIC`].
    pub magic: U32,
    /// crc32c of the block, if a feature says so. Ferry's images are verified by their digest.
    pub checksum: U32,
    /// Compatible features.
    pub feature_compat: U32,
    /// Size of a block, as a power of two.
    pub block_bits: u8,
    /// The number of sixteen-byte extensions after the superblock.
    pub extra_slots: u8,
    /// Number of the root directory's inode.
    pub root_nid: U16,
    /// The number of inodes.
    pub inodes: U64,
    /// The base of the times of compact inodes, in seconds since 1970.
    pub epoch: U64,
    /// Nanoseconds of the times of compact inodes.
    pub fixed_nsec: U32,
    /// Blocks of the metadata.
    pub blocks: U32,
    /// The block from which inode numbers count.
    pub meta_block: U32,
    /// The block from which shared extended attributes count.
    pub xattr_block: U32,
    /// Identifier of the image.
    pub uuid: [u8; 16],
    /// Name of the image.
    pub volume: [u8; 16],
    /// Incompatible features.
    pub feature_incompat: U32,
    /// For compressed images.
    pub compression: U16,
    /// Number of entries of the device table.
    pub extra_devices: U16,
    /// The offset of the device table, in units of its entries.
    pub device_table: U16,
    /// Size of a directory's block relative to a block, as a power of two.
    pub dir_block_bits: u8,
    /// The number of long prefixes of attribute names.
    pub xattr_prefix_count: u8,
    /// The offset of their table, in units of [`XATTR_PREFIX_UNIT`].
    pub xattr_prefix_start: U32,
    /// For fragments.
    pub packed_nid: U64,
    /// For attribute filters.
    pub xattr_filter: u8,
    /// The number of the long prefix that is the name of the attribute with the identity of a file's contents.
    pub ishare_xattr_prefix: u8,
    /// Not used here.
    pub reserved: [u8; 2],
    /// Not used here.
    pub build_time: U32,
    /// Not used here.
    pub root_nid_48: U64,
    /// Not used here.
    pub reserved2: [u8; 8],
}

/// The compact inode.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Compact {
    /// Version and layout of the data.
    pub format: U16,
    /// Size of the attributes that follow: 0, or four-byte pieces beyond the header, plus one.
    pub xattr_count: U16,
    /// Type and permissions.
    pub mode: U16,
    /// Number of names.
    pub nlink: U16,
    /// Size in bytes.
    pub size: U32,
    /// Seconds since [`Super::epoch`] (Linux 6.15 and later; 0 before).
    pub mtime: U32,
    /// First block, or device number.
    pub place: U32,
    /// A number for 32-bit programs.
    pub ino: U32,
    /// Owner.
    pub uid: U16,
    /// Group.
    pub gid: U16,
    /// Not used here.
    pub reserved: U32,
}

/// The extended inode.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Extended {
    /// Version and layout of the data.
    pub format: U16,
    /// As in [`Compact`].
    pub xattr_count: U16,
    /// Type and permissions.
    pub mode: U16,
    /// Not used here.
    pub reserved: U16,
    /// Size in bytes.
    pub size: U64,
    /// First block, or device number.
    pub place: U32,
    /// A number for 32-bit programs.
    pub ino: U32,
    /// Owner.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Seconds since 1970.
    pub mtime: U64,
    /// Nanoseconds within the second.
    pub mtime_nsec: U32,
    /// Number of names.
    pub nlink: U32,
    /// Not used here.
    pub reserved2: [u8; 16],
}

/// An entry of a directory block; the names follow the last one.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// Number of the inode.
    pub nid: U64,
    /// The offset of the name in the block. The first one's implies the number of entries.
    pub name_offset: U16,
    /// The file type (`FT_*`).
    pub kind: u8,
    /// Not used here.
    pub reserved: u8,
}

/// An additional device.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// Its tag: in Ferry's images the name of the pack, 64 hexadecimal digits.
    pub tag: [u8; 64],
    /// The number of its blocks.
    pub blocks: U32,
    /// The number of its first block in the image's address space.
    pub first_block: U32,
    /// Not used here.
    pub reserved: [u8; 55],
    /// In Ferry's images [`SLOT_AHEAD`] or 0. Unused by others.
    pub flags: u8,
}

/// [`DeviceSlot::flags`]: the pack contains what a workload needs first, in order, and is to be read at once.
pub const SLOT_AHEAD: u8 = 1;

impl Default for DeviceSlot {
    fn default() -> Self {
        Self { tag: [0; 64], blocks: U32::ZERO, first_block: U32::ZERO, reserved: [0; 55], flags: 0 }
    }
}

/// The header of an inode's extended attributes; the numbers of shared ones follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// Which names are surely absent, if a feature says so.
    pub name_filter: U32,
    /// The number of shared ones.
    pub shared_count: u8,
    /// Not used here.
    pub reserved: [u8; 7],
}

/// An extended attribute; name and value follow, padded to four bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Length of the name without its prefix.
    pub name_len: u8,
    /// The number of the prefix: one of [`XATTR_PREFIXES`], or [`LONG_XATTR_PREFIX`] and the number of a long one.
    pub prefix: u8,
    /// Length of the value.
    pub value_len: U16,
}

const _: () = assert!(size_of::<Super>() == 128);
const _: () = assert!(size_of::<Compact>() == SLOT_BYTES);
const _: () = assert!(size_of::<Extended>() == 2 * SLOT_BYTES);
const _: () = assert!(size_of::<Dirent>() == 12);
const _: () = assert!(size_of::<DeviceSlot>() == 128);
const _: () = assert!(size_of::<XattrHeader>() == 12);
const _: () = assert!(size_of::<XattrEntry>() == 4);
const _: () = assert!(std::mem::offset_of!(Super, feature_incompat) == 80);
const _: () = assert!(std::mem::offset_of!(Super, packed_nid) == 96);
/// The prefix of ACL names.
pub const XATTR_ACL: &[u8] = b"system.posix_acl_";
/// The name of an SELinux label.
pub const XATTR_LABEL: &[u8] = b"security.selinux";
/// The prefixes with numbers. Those of ACLs are whole names; none may be a prefix of a later one.
pub const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// Returns the number of a name's prefix, and the rest. A name without a known prefix has 0, which Linux ignores.
pub fn split_xattr(name: &[u8]) -> (u8, &[u8]) {
    let known = XATTR_PREFIXES.iter().find_map(|(number, prefix)| Some((*number, name.strip_prefix(*prefix)?)));
    known.unwrap_or((0, name))
}

/// Returns the size of an attribute that is not shared, in bytes.
pub fn xattr_size(name: &[u8], value: &[u8]) -> usize {
    (size_of::<XattrEntry>() + split_xattr(name).1.len() + value.len()).next_multiple_of(4)
}

/// Appends an attribute.
pub fn append_xattr(bytes: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    let (prefix, rest) = split_xattr(name);
    let entry = XattrEntry {
        name_len: u8::try_from(rest.len()).unwrap_or(u8::MAX),
        prefix,
        value_len: U16::new(u16::try_from(value.len()).unwrap_or(u16::MAX)),
    };
    bytes.extend_from_slice(entry.as_bytes());
    bytes.extend_from_slice(rest);
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// Returns the encoded size of an inode's attributes.
pub fn xattr_count(bytes: usize) -> u16 {
    match bytes.checked_sub(size_of::<XattrHeader>()) {
        None => 0,
        Some(more) => u16::try_from(more / 4 + 1).unwrap_or(u16::MAX),
    }
}

/// The layout of an inode's data (bits 1 to 3 of its format).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// In consecutive blocks.
    Plain,
    /// The same, but the last, incomplete block follows the inode.
    Inline,
    /// In chunks, each of which may be a hole; their index follows the inode.
    Chunks,
}

impl Layout {
    /// Returns the format of an inode.
    pub fn format(self, extended: bool) -> u16 {
        let layout = match self {
            Self::Plain => 0,
            Self::Inline => 2,
            Self::Chunks => 4,
        };
        layout << 1 | u16::from(extended)
    }

    /// Returns the layout of a format, and whether the inode is extended; `None` if it is unknown.
    pub fn of(format: u16) -> Option<(Self, bool)> {
        let layout = match format >> 1 {
            0 => Self::Plain,
            2 => Self::Inline,
            4 => Self::Chunks,
            _ => return None,
        };
        Some((layout, format & 1 == 1))
    }
}

/// `FT_*` of include/linux/fs_types.h.
pub(crate) fn kind(kind: FileType) -> u8 {
    match kind {
        FileType::RegularFile => 1,
        FileType::Directory => 2,
        FileType::CharacterDevice => 3,
        FileType::BlockDevice => 4,
        FileType::Fifo => 5,
        FileType::Socket => 6,
        FileType::Symlink => 7,
        FileType::Unknown => 0,
    }
}

/// Writes a structure at an offset.
pub(crate) fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}
