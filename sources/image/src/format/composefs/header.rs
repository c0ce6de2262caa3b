//! The header of a composefs image.

use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a composefs image.
pub(crate) const MAGIC: u32 = 0xd078_629a;
/// The version of [`Header`], which has never changed.
pub(super) const HEADER_VERSION: u32 = 1;

/// The header of a composefs image.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    /// [`MAGIC`].
    pub magic: U32,
    /// [`HEADER_VERSION`].
    pub version: U32,
    /// [`FLAG_ACL`].
    pub flags: U32,
    /// The version of the layout: 1 if directories with whiteouts are marked as opaque, so that overlayfs finds the
    /// whiteouts; 2 for composefs-rs's own layout.
    pub format: U32,
    /// Not used.
    pub reserved: [U32; 4],
}

/// The maximum version of composefs's layout: 0 and 1 are mkcomposefs's, 2 is composefs-rs's.
pub const COMPOSEFS_VERSION_MAX: u32 = NATIVE_VERSION;

/// The version that only composefs-rs writes.
pub(super) const NATIVE_VERSION: u32 = 2;

const _: () = assert!(size_of::<Header>() == 32);
