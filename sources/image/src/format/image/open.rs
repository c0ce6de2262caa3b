//! Opening an image: identifies it before it uses anything else of it.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ferry_vfs::FileType;

use super::{HEAD_BYTES, IMAGE_BYTES_MAX, Image, ImageResult, PackRef, prefix_table, read_at};
use crate::format::composefs::{self, Header};
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::{
    BLOCK_BITS, BLOCK_BYTES, COMPAT_ISHARE_XATTRS, COMPAT_PLAIN_XATTR_PREFIXES, DeviceSlot, FLAT_VOLUME, FLAT_VOLUME_1,
    INCOMPAT_CHUNKS, INCOMPAT_DEVICE_TABLE, INCOMPAT_XATTR_PREFIXES, SLOT_AHEAD, SUPER_MAGIC, SUPER_OFFSET, Super,
    XATTR_PREFIX_TABLE,
};
use crate::format::error::{Error, Flaw, IoContext, Result};
use crate::format::image::ExpectedTree;
use crate::format::index::pack_name;
use crate::format::plain_file;

impl Image {
    /// Opens an image; with a digest, only if it matches. The digest of a tree is verified when the packs are opened
    /// ([`crate::Objects`]), or by [`Self::verify_tree`].
    ///
    /// # Errors
    ///
    /// It cannot be read, is not the requested one, or is no image of Ferry's.
    pub fn open(path: &Path, wanted: Option<Digest>) -> Result<Self> {
        Self::open_with_file(path, wanted).map(|(image, _)| image)
    }

    /// As [`Self::open`]; also returns the file that was read, because its name may lead to another one by now.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn open_with_file(path: &Path, wanted: Option<Digest>) -> Result<(Self, File)> {
        let invalid = |reason| Error::Invalid { path: path.into(), reason };
        let file = File::open(path).doing("open", path)?;
        let length = file.metadata().doing("look at", path)?.len();
        let mut bytes = Vec::new();
        (&file).take(HEAD_BYTES as u64).read_to_end(&mut bytes).doing("read", path)?;
        let bytes_max = bytes_max(&bytes).map_err(invalid)?;
        let check = |length| if length > bytes_max { Err(invalid(longer(bytes_max))) } else { Ok(()) };
        check(length)?;
        if let Some(flaw) = mostly_holes(&file, length).doing("look at", path)? {
            return Err(invalid(flaw));
        }
        // Without this, each growth of the memory copies what was read.
        let _ = bytes.try_reserve_exact(usize::try_from(length + 1).unwrap_or_default());
        (&file).take(bytes_max + 1 - bytes.len() as u64).read_to_end(&mut bytes).doing("read", path)?;
        check(bytes.len() as u64)?;
        let digest = algorithm(&bytes).of(&bytes);
        let is_tree = wanted.is_some_and(|wanted| wanted.algorithm() == Algorithm::Tree);
        if let Some(wanted) = wanted.filter(|wanted| !is_tree && *wanted != digest) {
            return Err(Error::OtherDigest { path: PathBuf::from(path), wanted, found: digest });
        }
        let mut image = Self::of_bytes(bytes, digest).map_err(invalid)?;
        if let Some(wanted) = wanted.filter(|_| is_tree) {
            if let Some(found) = image.tree().filter(|found| *found != wanted) {
                return Err(Error::OtherDigest { path: PathBuf::from(path), wanted, found });
            }
            image.expected = Some(ExpectedTree { tree: wanted, path: path.into() });
        }
        Ok((image, file))
    }

    /// Parses an image.
    ///
    /// # Errors
    ///
    /// It is not an image.
    pub fn from_bytes(bytes: Vec<u8>) -> ImageResult<Self> {
        let digest = algorithm(&bytes).of(&bytes);
        Self::of_bytes(bytes, digest)
    }

    fn of_bytes(bytes: Vec<u8>, digest: Digest) -> ImageResult<Self> {
        let header = superblock(&bytes)?;
        let composefs: Header = read_at(&bytes, 0)?;
        let is_composefs = composefs.magic.get() == composefs::MAGIC;
        let mut image =
            Self { bytes, digest, header, packs: Vec::new(), is_composefs, absent: OnceLock::new(), expected: None };
        if header.feature_incompat.get() & INCOMPAT_DEVICE_TABLE != 0 {
            image.read_devices()?;
        }
        let prefixes = prefix_table(&header);
        if image.has_identities() && !image.bytes.get(prefixes..).is_some_and(|at| at.starts_with(XATTR_PREFIX_TABLE)) {
            return Err(Flaw { what: "an unknown prefix of attributes", offset: prefixes as u64 });
        }
        if image.inode(image.root())?.kind() != FileType::Directory {
            return Err(Flaw { what: "a root that is not a directory", offset: SUPER_OFFSET as u64 + 14 });
        }
        Ok(image)
    }

    fn read_devices(&mut self) -> ImageResult<()> {
        let table = usize::from(self.header.device_table.get()) * size_of::<DeviceSlot>();
        for slot in 0..usize::from(self.header.extra_devices.get()) {
            let at = table + slot * size_of::<DeviceSlot>();
            let device: DeviceSlot = read_at(&self.bytes, at)?;
            let flaw = |what| Flaw { what, offset: at as u64 };
            let name = pack_name(&device.tag).ok_or_else(|| flaw("a device that is no pack"))?;
            let (blocks, first_block) = (device.blocks.get().into(), device.first_block.get().into());
            let pack = PackRef { name, blocks, ahead: device.flags & SLOT_AHEAD != 0, first_block };
            let after = self.packs.last().map_or(u64::from(self.header.blocks.get()), PackRef::end);
            if pack.first_block < after {
                return Err(flaw("devices that overlap"));
            }
            // The kernel reads zeros at the block `u32::MAX` (EROFS_NULL_ADDR).
            if pack.end() > u64::from(u32::MAX) {
                return Err(flaw("a device that ends after the last block"));
            }
            self.packs.push(pack);
        }
        Ok(())
    }
}

/// Returns the algorithm of an image's digest: BLAKE3 for the flat layout, fs-verity for all others.
fn algorithm(bytes: &[u8]) -> Algorithm {
    let is_flat = read_at(bytes, SUPER_OFFSET).is_ok_and(|header: Super| header.volume.starts_with(FLAT_VOLUME));
    if is_flat { Algorithm::Blake3 } else { Algorithm::Verity }
}

/// Returns the superblock, if it is supported.
fn superblock(bytes: &[u8]) -> ImageResult<Super> {
    let flaw = |what, at: usize| Flaw { what, offset: (SUPER_OFFSET + at) as u64 };
    let header: Super = read_at(bytes, SUPER_OFFSET)?;
    if header.magic.get() != SUPER_MAGIC {
        return Err(flaw("no magic number of EROFS", 0));
    }
    if header.block_bits != BLOCK_BITS || header.dir_block_bits != 0 {
        return Err(flaw("blocks that are not 4 KiB", 12));
    }
    let prefixes = match header.feature_compat.get() & COMPAT_ISHARE_XATTRS {
        0 => 0,
        _ if header.feature_compat.get() & COMPAT_PLAIN_XATTR_PREFIXES == 0
            || (header.xattr_prefix_count, header.ishare_xattr_prefix) != (1, 0) =>
        {
            return Err(flaw("identities of files that are not Ferry's", 8));
        }
        _ => INCOMPAT_XATTR_PREFIXES,
    };
    if header.feature_incompat.get() & !(INCOMPAT_DEVICE_TABLE | INCOMPAT_CHUNKS | prefixes) != 0 {
        return Err(flaw("features that Ferry does not know (compression, long prefixes)", 80));
    }
    // Then an inode could have the number that stands for the root.
    if header.meta_block.get() != 0 {
        return Err(flaw("inodes that begin at another block", 40));
    }
    if header.volume.starts_with(FLAT_VOLUME_1) {
        return Err(flaw(
            "the first version of the layout flat, which is not read any more: build the image again",
            64,
        ));
    }
    Ok(header)
}

/// Returns the maximum size of an image by its first bytes.
fn bytes_max(head: &[u8]) -> ImageResult<u64> {
    let blocks = superblock(head)?.blocks.get();
    let bytes_max = (u64::from(blocks) * BLOCK_BYTES as u64).min(IMAGE_BYTES_MAX);
    // The bytes already read must not exceed it.
    if bytes_max < head.len() as u64 { Err(longer(bytes_max)) } else { Ok(bytes_max) }
}

/// Returns a flaw if a file has so many holes that it cannot be a built image: otherwise a small file could claim
/// gigabytes of memory.
fn mostly_holes(mut file: &File, length: u64) -> io::Result<Option<Flaw>> {
    let found = plain_file::hole_at(file, length)?;
    file.seek(io::SeekFrom::Start(HEAD_BYTES as u64))?;
    let what = "a hole with most of what should be there: copy it with cp --sparse=never, or fetch the image again";
    Ok(found.map(|offset| Flaw { what, offset }))
}

fn longer(bytes_max: u64) -> Flaw {
    let what = if bytes_max == IMAGE_BYTES_MAX { "more than 16 GiB" } else { "more than its superblock tells of" };
    Flaw { what, offset: bytes_max }
}
