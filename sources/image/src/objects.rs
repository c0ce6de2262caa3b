//! The packs of one image, open, each object proved before its bytes are seen.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use ferry_vfs::{Backing, Extent};

use crate::composefs::objects::Files;
use crate::erofs::BLOCK_BYTES;
use crate::error::{Doing, Error, Result};
use crate::image::{Data, Image};
use crate::parallel;
use crate::store::{Index, Object, Store};
use crate::verity::Digest;

/// What is known of an object.
const UNKNOWN: u8 = 0;
const SOUND: u8 = 1;
const DAMAGED: u8 = 2;

/// All packs that an image names, in its order.
#[derive(Debug)]
pub struct Objects {
    packs: Vec<Pack>,
    /// composefs's objects.
    files: Option<Files>,
}

#[derive(Debug)]
struct Pack {
    file: File,
    backing: Arc<Backing>,
    index: Index,
    /// For each object what is known of it.
    states: Vec<AtomicU8>,
}

/// Why an object's bytes cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Bad {
    /// The image names a place where no object of this length begins.
    #[error("no object of {bytes} bytes begins at block {block} of the pack {pack}")]
    NoObject {
        /// The pack's name.
        pack: Digest,
        /// The block.
        block: u64,
        /// The length.
        bytes: u64,
    },
    /// The bytes are not what the digest says.
    #[error("the object {digest} in the pack {pack} is damaged")]
    Damaged {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
    },
    /// The image does not tell where they are.
    #[error("the image does not say which object has its bytes")]
    NoPath,
    /// The image does not tell what they are.
    #[error("the image has no digest for the object {}, so nothing proves its bytes", path.display())]
    NoDigest {
        /// The object.
        path: PathBuf,
    },
    /// An object has another length than the file.
    #[error("the object {} is damaged: it has {found} bytes, not {bytes}", path.display())]
    Length {
        /// The object.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// The file's.
        bytes: u64,
    },
    /// An object's bytes are not what the image says.
    #[error("the object {} is damaged: its bytes have the digest {digest}", path.display())]
    Changed {
        /// The object.
        path: PathBuf,
        /// What was found.
        digest: Digest,
    },
    /// An object cannot be read.
    #[error("cannot read the object {}: {source}", path.display())]
    Object {
        /// The object.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// They cannot be read.
    #[error("cannot read the object {digest} in the pack {pack}: {source}")]
    Unreadable {
        /// The pack's name.
        pack: Digest,
        /// The object.
        digest: Digest,
        /// Why not.
        source: std::io::Error,
    },
}

impl Objects {
    /// Opens the packs of an image, or its object store. Their indexes are proved, their objects later.
    ///
    /// # Errors
    /// One is missing, or is not what the image names.
    pub fn open(image: &Image, folder: &Path) -> Result<Self> {
        if image.is_composefs() {
            return Ok(Self { packs: Vec::new(), files: Some(Files::open(folder)?) });
        }
        let store = Store::open(folder)?;
        let open = |pack: &crate::image::PackRef| {
            let index = store.index(pack.name)?;
            let path = store.pack_path(pack.name);
            let file = File::open(&path).doing("open", &path)?;
            let length = file.metadata().doing("look at", &path)?.len();
            // An index may claim more blocks than there are bytes to count.
            let claimed = index.blocks.saturating_mul(BLOCK_BYTES as u64);
            if length != claimed || index.blocks != pack.blocks {
                let reason = format!("has {length} bytes, not {}", pack.blocks * BLOCK_BYTES as u64);
                return Err(Error::Pack { store: folder.into(), pack: pack.name, reason });
            }
            let states = index.objects.iter().map(|_| AtomicU8::new(UNKNOWN)).collect();
            let fd: OwnedFd = file.try_clone().doing("open", &path)?.into();
            Ok(Pack { file, backing: Arc::new(Backing::new(fd)), index, states })
        };
        Ok(Self { packs: image.packs().iter().map(open).collect::<Result<_>>()?, files: None })
    }

    /// The descriptor that an object's bytes are in, and its offset there, once they are proved.
    ///
    /// # Errors
    /// There is no such object, or its bytes are not the ones it was made of.
    fn find(&self, pack: usize, block: u64, bytes: u64) -> std::result::Result<(&Arc<Backing>, u64), Bad> {
        let pack = &self.packs[pack];
        let name = pack.index.pack;
        let missing = Bad::NoObject { pack: name, block, bytes };
        let Ok(at) = pack.index.objects.binary_search_by_key(&block, |object| object.block) else {
            return Err(missing);
        };
        let object = &pack.index.objects[at];
        if object.bytes != bytes {
            return Err(missing);
        }
        pack.prove(at)?;
        Ok((&pack.backing, block * BLOCK_BYTES as u64))
    }

    /// The descriptor that a range of a pack is in, once every object in it is proved.
    ///
    /// # Errors
    /// One of them is damaged.
    pub(crate) fn range(&self, pack: usize, offset: u64, bytes: u64) -> std::result::Result<&Arc<Backing>, Bad> {
        let pack = &self.packs[pack];
        let (first, end) = (offset / BLOCK_BYTES as u64, (offset + bytes).div_ceil(BLOCK_BYTES as u64));
        let from = pack.index.objects.partition_point(|object| object.block + object.blocks() <= first);
        let to = pack.index.objects.partition_point(|object| object.block < end);
        (from..to).try_for_each(|at| pack.prove(at))?;
        Ok(&pack.backing)
    }

    /// Where the bytes of a file are, once they are proved; `None` if they are in the image itself.
    ///
    /// # Errors
    /// There is no such object, or its bytes are not the ones it was made of.
    pub fn extent(&self, data: Data<'_>, bytes: u64) -> std::result::Result<Option<Extent>, Bad> {
        Ok(Some(match data {
            Data::Near(..) => return Ok(None),
            Data::Far { pack, block } => {
                let (file, offset) = self.find(pack, block, bytes)?;
                Extent { file: Arc::clone(file), offset }
            }
            Data::Object { path, digest } => {
                let files = self.files.as_ref().ok_or(Bad::NoPath)?;
                Extent { file: files.find(path, digest, bytes)?, offset: 0 }
            }
        }))
    }
}

impl Pack {
    /// Looks once whether an object's bytes are what its digest says, and its last block ends with zeros: with them it is
    /// mapped.
    fn prove(&self, at: usize) -> std::result::Result<(), Bad> {
        let (pack, object) = (self.index.pack, &self.index.objects[at]);
        let state = match self.states[at].load(Ordering::Acquire) {
            UNKNOWN => {
                let sound = self.is_sound(object);
                let sound = sound.map_err(|source| Bad::Unreadable { pack, digest: object.digest, source })?;
                let state = if sound { SOUND } else { DAMAGED };
                self.states[at].store(state, Ordering::Release);
                state
            }
            state => state,
        };
        if state == SOUND { Ok(()) } else { Err(Bad::Damaged { pack, digest: object.digest }) }
    }

    fn is_sound(&self, object: &Object) -> std::io::Result<bool> {
        let start = object.block * BLOCK_BYTES as u64;
        let past = object.blocks() * BLOCK_BYTES as u64 - object.bytes;
        let mut padding = vec![0; usize::try_from(past).unwrap_or_default()];
        self.file.read_exact_at(&mut padding, start + object.bytes)?;
        let is_padded = padding.iter().all(|byte| *byte == 0);
        Ok(is_padded && parallel::digest(&self.file, start, object.bytes)? == object.digest)
    }
}

/// Reads bytes that were proved.
pub(crate) fn read_exact(file: &Backing, offset: u64, mut bytes: &mut [u8]) -> std::io::Result<()> {
    let mut at = offset;
    while !bytes.is_empty() {
        let count = rustix::io::pread(file, &mut *bytes, at)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        at += count as u64;
        bytes = &mut bytes[count..];
    }
    Ok(())
}
