//! EROFS as it lies on disk: the parts that Ferry writes and reads.
//!
//! Source: fs/erofs/erofs_fs.h of Linux and the document "EROFS - Enhanced Read-Only File System". All numbers are little
//! endian.

use ferry_vfs::FileType;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Where the superblock is, in bytes.
pub const SUPER_OFFSET: usize = 1024;
/// Where images of the layout flat have the digest of their tree, in bytes: what is before the superblock is nobody's.
pub const TREE_OFFSET: usize = SUPER_OFFSET - crate::format::digest::DIGEST_BYTES;
/// What a superblock begins with.
pub const SUPER_MAGIC: u32 = 0xE0F5_E1E2;
/// The size of a block that Ferry uses, in bytes. It is the page size of nearly all machines, which every kernel takes.
pub const BLOCK_BYTES: usize = 4096;
/// The same as a power of two.
pub const BLOCK_BITS: u8 = 12;
/// The unit of inode numbers, in bytes: an inode begins at its number times this.
pub const SLOT_BYTES: usize = 32;
/// Feature that old kernels must know: data in other devices.
pub const INCOMPAT_DEVICE_TABLE: u32 = 0x8;
/// Feature that old kernels must know: files in chunks.
pub const INCOMPAT_CHUNKS: u32 = 0x4;
/// Feature that old kernels need not know: the times in inodes are of the data.
pub const COMPAT_MTIME: u32 = 0x2;
/// Feature that old kernels need not know: [`XattrHeader::name_filter`] tells something.
pub const COMPAT_XATTR_FILTER: u32 = 0x4;
/// Largest share of a `name_len` in [`XattrEntry`] (`XATTR_NAME_MAX`).
pub const XATTR_NAME_MAX: usize = 255;
/// How the volume's name begins in images of the layout `flat`; the last byte tells what there is.
pub const FLAT_VOLUME: &[u8] = b"ferry flat2\0";
/// How it began in images of the first version, whose digests were others.
pub const FLAT_VOLUME_1: &[u8] = b"ferry flat\0";
/// No inode has extended attributes.
pub const FLAT_NO_XATTRS: u8 = 0x1;
/// No inode has an ACL.
pub const FLAT_NO_ACLS: u8 = 0x2;
/// No inode has a label of SELinux.
pub const FLAT_NO_LABELS: u8 = 0x4;
/// All of these.
pub const FLAT_NO_KIND: u8 = FLAT_NO_XATTRS | FLAT_NO_ACLS | FLAT_NO_LABELS;

/// Which of `FLAT_NO_*` are not so where an inode has this attribute.
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
    /// crc32c of the block, if a feature says so. Ferry's images are proved by their digest.
    pub checksum: U32,
    /// Features that old kernels need not know.
    pub feature_compat: U32,
    /// Size of a block, as a power of two.
    pub block_bits: u8,
    /// Sixteen-byte pieces that follow the superblock.
    pub extra_slots: u8,
    /// Number of the root directory's inode.
    pub root_nid: U16,
    /// How many inodes there are.
    pub inodes: U64,
    /// What the times of compact inodes are added to, in seconds since 1970.
    pub epoch: U64,
    /// Nanoseconds of the times of compact inodes.
    pub fixed_nsec: U32,
    /// Blocks of the metadata.
    pub blocks: U32,
    /// Block that inode numbers are counted from.
    pub meta_block: U32,
    /// Block that shared extended attributes are counted from.
    pub xattr_block: U32,
    /// Identifier of the image.
    pub uuid: [u8; 16],
    /// Name of the image.
    pub volume: [u8; 16],
    /// Features that old kernels must know.
    pub feature_incompat: U32,
    /// Of compressed images.
    pub compression: U16,
    /// Number of entries of the device table.
    pub extra_devices: U16,
    /// Where the device table is, in units of its entries.
    pub device_table: U16,
    /// Size of a directory's block relative to a block, as a power of two.
    pub dir_block_bits: u8,
    /// Of long prefixes of attributes' names.
    pub xattr_prefix_count: u8,
    /// Of long prefixes of attributes' names.
    pub xattr_prefix_start: U32,
    /// Of fragments.
    pub packed_nid: U64,
    /// Of filters for attributes.
    pub xattr_filter: u8,
    /// Not used here.
    pub reserved: [u8; 3],
    /// Not used here.
    pub build_time: U32,
    /// Not used here.
    pub root_nid_48: U64,
    /// Not used here.
    pub reserved2: [u8; 8],
}

/// The shorter inode.
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

/// The longer inode.
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

/// One line of a directory's block; the names follow the last one.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// Number of the inode.
    pub nid: U64,
    /// Where in the block the name begins. The first one's tells how many entries there are.
    pub name_offset: U16,
    /// What kind of file, as in `readdir(3)` of a file system (`FT_*`).
    pub kind: u8,
    /// Not used here.
    pub reserved: u8,
}

/// One more device.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeviceSlot {
    /// What it is: in Ferry's images the name of the pack, 64 hexadecimal digits.
    pub tag: [u8; 64],
    /// How many blocks it has.
    pub blocks: U32,
    /// Which block of the image's address space its first one is.
    pub first_block: U32,
    /// Not used here.
    pub reserved: [u8; 55],
    /// In Ferry's images: [`SLOT_AHEAD`] or 0. Others do not use it.
    pub flags: u8,
}

/// [`DeviceSlot::flags`]: what a workload needs first, in its order, is in this pack: it is to be read at once.
pub const SLOT_AHEAD: u8 = 1;

impl Default for DeviceSlot {
    fn default() -> Self {
        Self { tag: [0; 64], blocks: U32::ZERO, first_block: U32::ZERO, reserved: [0; 55], flags: 0 }
    }
}

/// What the extended attributes of an inode begin with; the numbers of the shared ones follow.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// Which names are surely absent, if a feature says so.
    pub name_filter: U32,
    /// How many shared ones there are.
    pub shared_count: u8,
    /// Not used here.
    pub reserved: [u8; 7],
}

/// One extended attribute; name and value follow, padded to four bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Length of the name without its prefix.
    pub name_len: u8,
    /// Which prefix ([`XATTR_PREFIXES`]).
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
/// What the names of ACLs begin with.
pub const XATTR_ACL: &[u8] = b"system.posix_acl_";
/// The name of a label of SELinux.
pub const XATTR_LABEL: &[u8] = b"security.selinux";
/// The prefixes that are told by a number, and their numbers. The ACLs' are whole names; none may be the beginning of one that
/// comes after it.
pub const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];

/// The number of a name's prefix, and the rest of the name. Names without a known prefix have the number 0, which Linux leaves out.
pub fn split_xattr(name: &[u8]) -> (u8, &[u8]) {
    let known = XATTR_PREFIXES.iter().find_map(|(number, prefix)| Some((*number, name.strip_prefix(*prefix)?)));
    known.unwrap_or((0, name))
}

/// The size of an attribute that is not shared, in bytes.
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

/// How an inode tells the size of what its attributes take behind it.
pub fn xattr_count(bytes: usize) -> u16 {
    match bytes.checked_sub(size_of::<XattrHeader>()) {
        None => 0,
        Some(more) => u16::try_from(more / 4 + 1).unwrap_or(u16::MAX),
    }
}

/// Where the bytes of an inode are (bits 1 to 3 of its format).
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
    /// The format of an inode.
    pub fn format(self, extended: bool) -> u16 {
        let layout = match self {
            Self::Plain => 0,
            Self::Inline => 2,
            Self::Chunks => 4,
        };
        layout << 1 | u16::from(extended)
    }

    /// The layout in a format, and whether the inode is the longer one; `None` if Ferry does not know it.
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

/// Writes a structure at a place.
pub(crate) fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}
