//! QEMU's images, through the crate `imago`.
//!
//! `imago` is used in its synchronous form, without any runtime; its calls may wait for the file, so exports make them
//! on threads of their own ([`DiskFeatures::slow`]). No extents are answered, although `imago` could tell them: the guest
//! could discard a cluster while a transfer to it is under way, and the transfer would hit what the cluster
//! holds by then, which may be the image's own tables.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::{Backing, BlockRange, Data, Disk, DiskFeatures, Errno, Geometry, Input, OFlags, Output, Result};
use imago::format::PreallocateMode;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, StorageOpenOptions};
use rustix::fs::{Mode, ResolveFlags};

use crate::{Cache, Error, Options, lock};

type Image = FormatAccess<imago::file::File>;

/// A chain of images that is longer than this is most likely a loop.
const CHAIN_MAX: usize = 32;

/// What QEMU makes clusters of unless told otherwise; discarding less than one frees nothing.
const CLUSTER_BYTES: u32 = 64 << 10;

/// An image as a disk.
pub(crate) struct Qcow2Disk {
    /// Shared by reads and writes; what frees, zeroes, or writes the image's tables wants it alone.
    image: RwLock<Image>,
    features: DiskFeatures,
    serial: String,
    /// Something was asked for that changes the image.
    changed: AtomicBool,
}

impl Qcow2Disk {
    /// Takes over a file that is open and locked.
    pub(crate) fn new(file: File, path: &Path, options: &Options) -> std::result::Result<Self, Error> {
        let opening =
            Opening { backing_dir: options.backing_dir.as_deref(), direct: options.cache == Some(Cache::None) };
        let file = opening.storage(file, path, !options.read_only)?;
        let image = FormatAccess::new(opening.image(file, path, !options.read_only, 0)?);
        if let Some(bytes) = options.grow_to {
            let grown = image.resize_grow(bytes.next_multiple_of(512), PreallocateMode::None);
            grown.and_then(|()| image.flush()).map_err(|reason| Error::Grow { path: path.into(), bytes, reason })?;
        }
        if image.size() < 512 {
            return Err(Error::Empty(path.into()));
        }
        let features = DiskFeatures { read_only: options.read_only, discard: !options.read_only, slow: true };
        let serial = options.serial_of(path);
        Ok(Self { image: RwLock::new(image), features, serial, changed: AtomicBool::new(false) })
    }

    fn shared(&self) -> RwLockReadGuard<'_, Image> {
        self.image.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be called before anything is changed.
    fn change(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    fn alone(&self) -> RwLockWriteGuard<'_, Image> {
        self.image.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets what was changed survive this process, and with `durable` a power failure, too. `imago` keeps the image's
    /// tables in memory; a request that has ended must be found by the next server if this one is killed, for the guest
    /// goes on with that one as if nothing had been. Alone, for `imago` calls a table clean as soon as somebody has begun to
    /// write it: beside others, this would return before what was changed is in the file.
    fn settle(&self, durable: bool) -> Result<()> {
        self.alone().flush().map_err(errno)?;
        if durable { self.shared().sync().map_err(errno) } else { Ok(()) }
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or_else(|| {
        tracing::warn!("an image: {error}");
        Errno::IO
    })
}

impl Disk for Qcow2Disk {
    fn geometry(&self) -> Geometry {
        let bytes = self.shared().size();
        Geometry {
            bytes: bytes - bytes % 512,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: CLUSTER_BYTES,
            discard_bytes: CLUSTER_BYTES,
        }
    }

    fn features(&self) -> DiskFeatures {
        self.features
    }

    fn serial(&self) -> String {
        self.serial.clone()
    }

    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
        let mut bytes = vec![0; usize::try_from(at.bytes).map_err(|_| Errno::INVAL)?];
        self.shared().read(&mut bytes, at.offset).map_err(errno)?;
        Ok(Data::Bytes(out.put(&bytes)))
    }

    fn write(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<Data> {
        let mut bytes = vec![0; usize::try_from(at.bytes).map_err(|_| Errno::INVAL)?];
        let count = input.take(&mut bytes);
        self.change();
        self.shared().write(&bytes[..count], at.offset).map_err(errno)?;
        self.settle(durable)?;
        Ok(Data::Bytes(count))
    }

    fn flush(&self) -> Result<Option<Arc<Backing>>> {
        if !self.features.read_only {
            self.settle(true)?;
        }
        Ok(None)
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        self.change();
        self.alone().discard_to_any(offset, bytes).map_err(errno)?;
        self.settle(false)
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, may_unmap: bool, durable: bool) -> Result<()> {
        self.change();
        // Alone: `imago` looks whether the rest of a cluster is zeros, and then makes all of it zeros; what others
        // write there in between would be lost.
        match may_unmap {
            true => self.alone().discard_to_zero(offset, bytes),
            false => self.alone().write_zeroes(offset, bytes),
        }
        .map_err(errno)?;
        self.settle(durable)
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        // A process that has forked may drop an image that only the other one serves: it must not touch it.
        if !*self.changed.get_mut() {
            return;
        }
        if let Err(error) = Disk::flush(self) {
            tracing::error!("{}: what was written last may be lost: {error}", self.serial);
        }
    }
}

/// What applies to an image and all images below it.
struct Opening<'a> {
    backing_dir: Option<&'a Path>,
    direct: bool,
}

impl Opening<'_> {
    fn storage(&self, file: File, path: &Path, writes: bool) -> std::result::Result<imago::file::File, Error> {
        let failed = |reason| Error::Open { path: path.into(), reason };
        let direct = self.direct && {
            let flags = rustix::fs::fcntl_getfl(&file).map_err(|error| failed(error.into()))?;
            rustix::fs::fcntl_setfl(&file, flags | OFlags::DIRECT).is_ok()
        };
        let options = StorageOpenOptions::new().filename(path).write(writes).direct(direct);
        imago::file::File::from_open_file(file, options).map_err(failed)
    }

    /// Opens an image and what is below it. `imago` would open that by itself; then nobody would have checked names and
    /// formats.
    fn image(
        &self,
        file: imago::file::File,
        path: &Path,
        writes: bool,
        depth: usize,
    ) -> std::result::Result<Qcow2<imago::file::File>, Error> {
        let failed = |reason| Error::Image { path: path.into(), reason };
        let refused = |other: &str, why| Err(Error::Refused { path: path.into(), other: other.into(), why });
        let mut image = Qcow2::open_image(file, writes).map_err(failed)?;
        if image.requires_external_data_file() {
            let name = image.implicit_external_data_file().cloned().unwrap_or_default();
            return refused(&name, "images with a separate data file are not opened");
        }
        let backing = image.implicit_backing_file().cloned();
        let format = image.implicit_backing_format().cloned();
        let below = match (backing, format.as_deref()) {
            (None, _) => None,
            (Some(name), _) if depth >= CHAIN_MAX => {
                return refused(&name, "the chain of backing files is too long, or a loop");
            }
            (Some(name), Some("raw")) => {
                let (file, path) = self.backing(path, &name)?;
                let raw = Raw::open_image(self.storage(file, &path, false)?, false).map_err(failed)?;
                Some(FormatAccess::new(raw))
            }
            (Some(name), Some("qcow2")) => {
                let (file, path) = self.backing(path, &name)?;
                Some(FormatAccess::new(self.image(self.storage(file, &path, false)?, &path, false, depth + 1)?))
            }
            (Some(name), None) => {
                return refused(&name, "the image does not say its format; qemu-img rebase -u -F FORMAT says it");
            }
            (Some(name), Some(_)) => return refused(&name, "its format is neither raw nor qcow2"),
        };
        image.set_backing(below);
        image.open_implicit_dependencies_gated(DenyImplicitOpenGate::default()).map_err(failed)?;
        Ok(image)
    }

    /// Opens a backing file, if it lies where such files may.
    fn backing(&self, image: &Path, name: &str) -> std::result::Result<(File, PathBuf), Error> {
        let refused = |why| Error::Refused { path: image.into(), other: name.into(), why };
        let allowed = self.backing_dir.ok_or_else(|| {
            refused("backing files are opened only below a directory that --backing-dir names, and none is named")
        })?;
        let allowed = allowed.canonicalize().map_err(|reason| Error::Open { path: allowed.into(), reason })?;
        let beside = image.parent().unwrap_or(Path::new("")).join(name);
        let real = beside.canonicalize().map_err(|reason| Error::Open { path: beside, reason })?;
        let below =
            real.strip_prefix(&allowed).map_err(|_| refused("it lies outside the directory of --backing-dir"))?;
        if below.as_os_str().is_empty() {
            return Err(refused("it is not a regular file"));
        }
        let failed = |error: Errno| Error::Open { path: real.clone(), reason: error.into() };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let directory =
            rustix::fs::open(&allowed, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        // The path was just resolved, so whatever would be resolved again has been put there since.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let fd = rustix::fs::openat2(&directory, below, flags, Mode::empty(), resolve).map_err(failed)?;
        let found = rustix::fs::fstat(&fd).map_err(failed)?;
        if rustix::fs::FileType::from_raw_mode(found.st_mode) != rustix::fs::FileType::RegularFile {
            return Err(refused("it is not a regular file"));
        }
        let file = File::from(fd);
        lock::take(&file, &real, false)?;
        Ok((file, real))
    }
}
