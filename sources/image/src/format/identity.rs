//! Identities of files' contents: files of several mounts with the same one have one copy in the page cache (EROFS's `inode_share`,
//! Linux 7.0).
//!
//! The kernel believes what an image says. A digest of a file's bytes could be a lie, by which an image has its bytes read from the files
//! of another one, and only reading all bytes would tell. So the identity is a digest of where the bytes are: of the names of packs, which
//! are digests, and of the offsets in them. In one store, equal objects have one location. [`Image::verify_identities`] computes all of
//! them again and reads no file.
//!
//! The attribute is one of overlayfs's own, which it neither shows nor copies to changed files.
//!
//! Source: "Image-share Xattrs" and "Long Xattr Prefixes" of the EROFS on-disk format; fs/erofs/ishare.c of Linux.

use ferry_vfs::FileType;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U16;

use crate::format::chunk;
use crate::format::data::{Data, ENTRY_BYTES};
use crate::format::digest::DIGEST_BYTES;
use crate::format::erofs::{IDENTITY_XATTR, LONG_XATTR_PREFIX, XattrEntry, put};
use crate::format::error::{Flaw, ImageResult};
use crate::format::image::{Image, Inode, Nid};
use crate::format::walk::each_file;

/// The size of an identity in bytes.
const BYTES: u16 = 32;
/// Separates these digests from others.
const CONTEXT: &str = "ferry 2026-11 location of a file's contents 1";

const _: () = assert!(BYTES as usize == DIGEST_BYTES);

/// Appends the attribute with room for the identity.
pub(crate) fn append_empty(bytes: &mut Vec<u8>) {
    let entry = XattrEntry { name_len: 0, prefix: LONG_XATTR_PREFIX, value_len: U16::new(BYTES) };
    bytes.extend_from_slice(entry.as_bytes());
    bytes.extend_from_slice(&[0; BYTES as usize]);
}

/// Fills in the identities of the inodes with these numbers, which have room for them, in the bytes of an image.
pub(crate) fn fill(bytes: Vec<u8>, numbers: impl Iterator<Item = u64>) -> ImageResult<Vec<u8>> {
    let image = Image::from_bytes(bytes)?;
    let mut found = Vec::new();
    for number in numbers {
        let inode = image.inode(Nid(number))?;
        let attribute = image.all_xattrs(&inode)?.into_iter().find(|xattr| xattr.name == IDENTITY_XATTR);
        if let (Some(attribute), Some(identity)) = (attribute, of(&image, &inode)?) {
            found.push((attribute.value_offset, identity));
        }
    }
    let mut bytes = image.into_bytes();
    found.iter().for_each(|(at, identity)| put(&mut bytes, *at, identity));
    Ok(bytes)
}

/// Returns the identity of a file's contents, if they are in packs.
fn of(image: &Image, inode: &Inode) -> ImageResult<Option<[u8; DIGEST_BYTES]>> {
    let data = image.data(inode)?;
    if !matches!(data, Data::Far { .. } | Data::Chunks(_)) {
        return Ok(None);
    }
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    for run in data.runs(inode.bytes, 0..inode.bytes) {
        let run = run?;
        hasher
            .update(image.packs()[run.pack].name.bytes())
            .update(&run.at.to_le_bytes())
            .update(&run.bytes.to_le_bytes());
    }
    Ok(Some(*hasher.finalize().as_bytes()))
}

impl Image {
    /// Verifies that no file has an identity that is not that of its contents. No file is read.
    ///
    /// # Errors
    ///
    /// One has, or the image is damaged.
    pub(crate) fn verify_identities(&self) -> ImageResult<()> {
        // Chunk indexes are disjoint, so together no longer than the image: one that says otherwise must not take endless time.
        let mut entries_left = self.bytes() / ENTRY_BYTES as u64;
        each_file(self, &mut |inode, data| {
            if matches!(data, Data::Chunks(_)) {
                let crowded = Flaw { what: "more pieces than there is room for", offset: inode.nid.0 };
                entries_left = entries_left.checked_sub(chunk::count(inode.bytes)).ok_or(crowded)?;
            }
            let wrong = Flaw { what: "an inode with an identity that is not of its contents", offset: inode.nid.0 };
            if self.has_own_identity(inode)? { Ok(()) } else { Err(wrong) }
        })
    }

    /// Whether the identity of an inode is that of its contents, if it has one.
    pub(crate) fn has_own_identity(&self, inode: &Inode) -> ImageResult<bool> {
        let xattrs = self.all_xattrs(inode)?;
        let mut identities = xattrs.iter().filter(|xattr| xattr.name == IDENTITY_XATTR).map(|xattr| xattr.value);
        Ok(match (identities.next(), identities.next()) {
            (None, _) => true,
            (Some(identity), None) if inode.kind() == FileType::RegularFile => {
                of(self, inode)?.is_some_and(|own| own == identity)
            }
            _ => false,
        })
    }
}
