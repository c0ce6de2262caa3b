//! The source "disk": a file or block device as a [`Disk`].
//!
//! * **raw**: the bytes of a file or block device are the bytes of the disk. Reads and writes return extents, with
//!   `O_DIRECT` where the file supports it ([`Cache::None`]).
//! * **qcow2** (feature `qcow2`): QEMU's images. An image with unsupported features is refused and stays unchanged.
//!
//! # Formats are not guessed
//!
//! A guest can write anything to the first sector of its disk. If a raw disk that begins like a qcow2 image were opened
//! as one at the next start, the guest could name any host file as its backing file and read it. So without a
//! [`Format`] a file is raw, and one that begins like an image of another format is refused ([`Error::Ambiguous`]).
//! Backing files are opened only below [`Options::backing_dir`], and only if the image names their format.
//!
//! # One writer
//!
//! A disk takes the locks that QEMU takes, so that neither QEMU nor another Ferry opens it for writing at the same time.
//!
//! ```
//! use ferry_vfs::{BlockRange, Data, Disk};
//!
//! let file = tempfile::NamedTempFile::new()?;
//! file.as_file().set_len(1 << 20)?;
//! let disk = ferry_disk::open(file.path(), &ferry_disk::Options::default())?;
//! assert_eq!(disk.geometry().bytes, 1 << 20);
//! let at = BlockRange { offset: 4096, bytes: 512, alignment: 512 };
//! assert!(matches!(disk.read(&at, &mut Vec::new())?, Data::Extent(extent) if extent.offset == 4096));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod format;
mod lock;
#[cfg(feature = "qcow2")]
mod qcow2;
mod raw;
mod syncs;
mod sys;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use error::Error;
use ferry_vfs::Disk;
pub use format::Format;
use sys::NewFile;

/// The cache between writes and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// No page cache (`O_DIRECT`) where the file supports it; the device's own cache until a flush.
    None,
    /// The page cache of this host, until a flush.
    Writeback,
    /// The page cache for reads; a write completes when it is durable.
    Writethrough,
}

/// How to open a disk.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The format; `None`: raw, refused if the file looks like an image.
    pub format: Option<Format>,
    /// `None`: [`Cache::None`] for raw disks, [`Cache::Writeback`] for images.
    pub cache: Option<Cache>,
    /// Open the disk read-only.
    pub read_only: bool,
    /// The serial number of the disk; `None`: the file's name.
    pub serial: Option<String>,
    /// The directory of backing files; `None`: they are not opened.
    pub backing_dir: Option<PathBuf>,
    /// Grow the disk to this size in bytes before it is used, if it is smaller.
    pub grow_to: Option<u64>,
}

impl Options {
    fn serial_of(&self, path: &Path) -> String {
        let named = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.serial.clone().unwrap_or_else(named)
    }
}

/// Opens a disk. A missing raw one is created if [`Options::grow_to`] is set.
///
/// # Errors
///
/// [`Error`]: a sentence with the path and a remedy.
pub fn open(path: &Path, options: &Options) -> Result<Arc<dyn Disk>, Error> {
    Ok(open_or_make(path, options)?.0)
}

/// As [`open`]; if the file was created, also returns a second descriptor, for a caller that removes the file after a
/// later error. While the caller holds it no other process gets the disk's lock.
///
/// # Errors
/// As for [`open`].
pub fn open_or_make(path: &Path, options: &Options) -> Result<(Arc<dyn Disk>, Option<File>), Error> {
    let new = match (options.format.unwrap_or(Format::Raw), options.grow_to, options.read_only) {
        (Format::Raw, Some(_), false) => NewFile::make_missing(path)?,
        _ => None,
    };
    let (disk, made) = match &new {
        Some(_) => open_made(path, options)?,
        None => (open_existing(path, options)?, None),
    };
    new.into_iter().for_each(NewFile::keep);
    let bytes = disk.geometry().bytes;
    if options.grow_to.is_some_and(|wanted| raw::rounded(wanted) < bytes) {
        tracing::info!("{} stays at {bytes} bytes: a disk is never made smaller", path.display());
    }
    Ok((disk, made))
}

/// Opens a raw disk that was just created.
fn open_made(path: &Path, options: &Options) -> Result<(Arc<dyn Disk>, Option<File>), Error> {
    let file = open_locked(path, options)?;
    let made = file.try_clone().map_err(|reason| Error::Open { path: path.into(), reason })?;
    Ok((Arc::new(raw::RawDisk::new(file, path, options)?), Some(made)))
}

fn open_existing(path: &Path, options: &Options) -> Result<Arc<dyn Disk>, Error> {
    #[cfg(feature = "qcow2")]
    if options.format == Some(Format::Qcow2) {
        let file = sys::open(path, false)?;
        lock::take(&file, path, false)?;
        qcow2::check(&file, path, !options.read_only)?;
    }
    let file = open_locked(path, options)?;
    match options.format.unwrap_or(Format::Raw) {
        Format::Raw => Ok(Arc::new(raw::RawDisk::new(file, path, options)?)),
        #[cfg(feature = "qcow2")]
        Format::Qcow2 => Ok(Arc::new(qcow2::Qcow2Disk::new(file, path, options)?)),
    }
}

fn open_locked(path: &Path, options: &Options) -> Result<File, Error> {
    loop {
        let file = sys::open(path, !options.read_only)?;
        if options.format.is_none() {
            format::check_is_raw(&file, path)?;
        }
        lock::take(&file, path, !options.read_only)?;
        // The previous holder of the lock may have removed it.
        if sys::is_at(path, &file) {
            return Ok(file);
        }
    }
}

/// Grows a disk, even while a server exports it, which then notifies its guest. A missing file is created.
///
/// # Errors
///
/// [`Error`]; an image can grow only while it is not in use, and no disk shrinks.
pub fn grow(path: &Path, bytes: u64, options: &Options) -> Result<(), Error> {
    let found = match options.format {
        #[cfg(feature = "qcow2")]
        Some(Format::Qcow2) => {
            let options = Options { grow_to: Some(bytes), read_only: false, ..options.clone() };
            open_existing(path, &options)?.geometry().bytes
        }
        format => {
            let new = NewFile::make_missing(path)?;
            let file = sys::open(path, true)?;
            if format.is_none() {
                format::check_is_raw(&file, path)?;
            }
            let found = raw::grow(&file, path, bytes)?;
            new.into_iter().for_each(NewFile::keep);
            found
        }
    };
    if found > raw::rounded(bytes) {
        return Err(Error::Larger { path: path.into(), bytes, found });
    }
    Ok(())
}
