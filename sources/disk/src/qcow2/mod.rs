//! QEMU's images, versions 2 and 3 of the format qcow2.
//!
//! Supported are clusters of all sizes, reference counts of all widths, extended L2 entries, compressed clusters of
//! both kinds (rewritten without compression), internal snapshots (read-only), and backing files. Refused before the
//! image is opened for writing are encryption, an external data file, unknown features, and images that need a check.
//!
//! Calls may wait for the file, so exports run them on other threads ([`DiskFeatures::slow`]). They return no extents:
//! the guest could discard a cluster during a transfer to it, which would then overwrite the cluster's new contents,
//! possibly a table of the image.

mod compressed;
mod file;
mod header;
mod image;
#[cfg(test)]
mod power_tests;
mod range_lock;
mod refcounts;
mod shape;
#[cfg(test)]
mod tests;
mod write;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::{
    Backing, BlockRange, Data, Disk, DiskFeatures, Errno, Geometry, Input, OFlags, Output, Result, SizeChange,
};
use rustix::fs::{Mode, ResolveFlags};

use self::file::{AlignedBuffer, ImageFile};
use self::header::{BackingName, Header, HeaderError, Unsupported};
use self::image::{BackingImage, Image};
use self::write::Zeroing;
use crate::{Cache, Error, Options, lock, sys};

/// The maximum length of a chain of images; a longer one is most likely a loop.
const CHAIN_MAX: usize = 32;

/// The smallest disk.
const SECTOR_BYTES: u64 = 512;

/// The number of bytes that contain the header's length.
const START_BYTES: usize = 512;

/// An image as a disk.
pub(crate) struct Qcow2Disk {
    image: Image,
    features: DiskFeatures,
    serial: String,
    /// The number of requests that failed because of the image's contents.
    faults: AtomicU64,
}

/// Checks the header of an image that is open read-only, so that a refused image is never opened for writing.
pub(crate) fn check(file: &File, path: &Path, writes: bool) -> std::result::Result<(), Error> {
    read_header(file, path, writes).map(drop)
}

impl Qcow2Disk {
    /// Wraps an open and locked file.
    pub(crate) fn new(file: File, path: &Path, options: &Options) -> std::result::Result<Self, Error> {
        let opening =
            OpenContext { backing_dir: options.backing_dir.as_deref(), direct: options.cache == Some(Cache::None) };
        let mut image = opening.image(file, path, !options.read_only, 0)?;
        if let Some(bytes) = options.grow_to {
            let bytes = bytes.next_multiple_of(SECTOR_BYTES);
            image.grow(bytes).map_err(|reason| Error::Grow { path: path.into(), bytes, reason })?;
        }
        if image.bytes < SECTOR_BYTES {
            return Err(Error::too_small(path, image.bytes, SECTOR_BYTES));
        }
        let writes = !options.read_only;
        let features =
            DiskFeatures { read_only: options.read_only, discard: writes && image.has_zero_clusters(), slow: true };
        Ok(Self { image, features, serial: options.serial_of(path), faults: AtomicU64::new(0) })
    }

    /// Logs what is wrong with the image, with increasing intervals: the guest can repeat requests without limit.
    fn errno(&self, error: io::Error) -> Errno {
        Errno::from_io_error(&error).unwrap_or_else(|| {
            let faults = self.faults.fetch_add(1, Ordering::Relaxed) + 1;
            if faults.is_power_of_two() {
                tracing::warn!("{}: {error} (failed requests so far: {faults})", self.serial);
            }
            Errno::IO
        })
    }

    fn writable(&self) -> Result<()> {
        if self.features.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Ends a change. It is in the file when its request ends, so a killed server's successor finds it. With `durable`
    /// it also survives a power failure.
    fn end_change(&self, durable: bool) -> Result<()> {
        if durable { self.image.flush().map_err(|error| self.errno(error)) } else { Ok(()) }
    }
}

/// Requests are carried out in pieces of this many bytes: the caller has a copy of the data, too.
const PIECE_BYTES: usize = 1 << 20;

/// Returns the length of the next piece of so many bytes.
fn piece_bytes(bytes: u64) -> usize {
    usize::try_from(bytes).map_or(PIECE_BYTES, |bytes| bytes.min(PIECE_BYTES))
}

impl Disk for Qcow2Disk {
    fn geometry(&self) -> Geometry {
        let shape = self.image.shape;
        let units = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
        Geometry {
            bytes: self.image.bytes - self.image.bytes % SECTOR_BYTES,
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: units(shape.cluster_bytes()),
            discard_bytes: units(shape.cluster_bytes()),
        }
    }

    fn features(&self) -> DiskFeatures {
        self.features
    }

    fn serial(&self) -> String {
        self.serial.clone()
    }

    fn size_change(&self) -> SizeChange<'_> {
        SizeChange::Never
    }

    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
        let mut buffer = AlignedBuffer::new(piece_bytes(at.bytes));
        let mut done = 0;
        while (done as u64) < at.bytes {
            let piece = &mut buffer.bytes()[..piece_bytes(at.bytes - done as u64)];
            self.image.read(piece, at.offset + done as u64).map_err(|error| self.errno(error))?;
            let count = out.put(piece);
            done += count;
            if count < piece.len() {
                break;
            }
        }
        Ok(Data::Bytes(done))
    }

    fn write(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<Data> {
        self.writable()?;
        let mut buffer = AlignedBuffer::new(piece_bytes(at.bytes));
        let mut done = 0;
        while (done as u64) < at.bytes {
            let piece = &mut buffer.bytes()[..piece_bytes(at.bytes - done as u64)];
            let count = input.take(piece);
            if count > 0 {
                self.image.write(&piece[..count], at.offset + done as u64).map_err(|error| self.errno(error))?;
            }
            done += count;
            if count < piece.len() {
                break;
            }
        }
        self.end_change(durable)?;
        Ok(Data::Bytes(done))
    }

    fn flush(&self) -> Result<Option<Arc<Backing>>> {
        if !self.features.read_only {
            self.image.flush().map_err(|error| self.errno(error))?;
        }
        Ok(None)
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        self.writable()?;
        match bytes {
            0 => Ok(()),
            _ => self.image.zero(offset, bytes, Zeroing::Discard).map_err(|error| self.errno(error)),
        }
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, may_unmap: bool, durable: bool) -> Result<()> {
        self.writable()?;
        let how = if may_unmap { Zeroing::Unmap } else { Zeroing::Keep };
        if bytes > 0 {
            self.image.zero(offset, bytes, how).map_err(|error| self.errno(error))?;
        }
        self.end_change(durable)
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        // A forked process may drop an image that only the other process serves: it must not change it.
        if !self.image.changed.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = Disk::flush(self) {
            tracing::error!("{}: the last writes may be lost: {error}", self.serial);
        }
    }
}

/// Reads and checks a header.
fn read_header(file: &File, path: &Path, writes: bool) -> std::result::Result<Header, Error> {
    let failed = |reason| Error::Image { path: path.into(), reason };
    let file_bytes = sys::bytes(file).map_err(|error| failed(error.into()))?;
    let start = |bytes: usize| -> io::Result<Vec<u8>> {
        let mut start = vec![0; usize::try_from(file_bytes).unwrap_or(usize::MAX).min(bytes)];
        file.read_exact_at(&mut start, 0).map(|()| start)
    };
    let length = header::bytes_of(&start(START_BYTES).map_err(failed)?).map_err(|fault| error_of(fault, path))?;
    let header = Header::parse(&start(length).map_err(failed)?, file_bytes).map_err(|fault| error_of(fault, path))?;
    match header.needs_check.filter(|_| writes) {
        Some(why) => Err(error_of(HeaderError::Unsupported(Unsupported::NeedsCheck(why)), path)),
        None => Ok(header),
    }
}

/// Quotes a word of a shell command.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-+=:@%".contains(char);
    match text.chars().all(is_plain) && !text.is_empty() {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

fn error_of(fault: HeaderError, path: &Path) -> Error {
    let unsupported = match fault {
        HeaderError::Damaged(what) => {
            return Error::Image { path: path.into(), reason: shape::damaged(what) };
        }
        HeaderError::Unsupported(unsupported) => unsupported,
    };
    let copy = path.with_added_extension("copy");
    let (image, copy) = (quoted(path), quoted(&copy));
    let convert = format!("copy it into one that does not: qemu-img convert -f qcow2 -O qcow2 {image} {copy}");
    let (what, advice) = match unsupported {
        Unsupported::Encrypted(method) => {
            let name = format!("driver=qcow2,encrypt.key-secret=key,file.filename={}", path.display());
            let name = quoted(Path::new(&name));
            let command =
                format!("qemu-img convert --object secret,id=key,data=PASSWORD --image-opts {name} -O qcow2 {copy}");
            (format!("is encrypted ({method}), which is not served"), format!("decrypt a copy of it: {command}"))
        }
        Unsupported::DataFile(name) => {
            (format!("has its data in another file, {name:?}, which is not supported"), convert)
        }
        Unsupported::Feature(what) => (format!("{what}, which is not known here"), convert),
        Unsupported::NeedsCheck(why) => {
            (why.to_owned(), format!("repair it: qemu-img check -r all {image} (--read-only serves it as it is)"))
        }
    };
    Error::Unsupported { path: path.into(), what, advice }
}

/// Parameters of an image and all its backing files.
struct OpenContext<'a> {
    backing_dir: Option<&'a Path>,
    direct: bool,
}

impl OpenContext<'_> {
    /// Opens an image and its backing files.
    fn image(&self, file: File, path: &Path, writes: bool, depth: usize) -> std::result::Result<Image, Error> {
        let header = read_header(&file, path, writes)?;
        let below = header.backing.as_ref().map(|backing| self.below(backing, path, depth)).transpose()?;
        let file = ImageFile::new(file, writes, self.direct);
        Image::new(file, &header, below, writes).map_err(|reason| Error::Image { path: path.into(), reason })
    }

    fn below(&self, backing: &BackingName, path: &Path, depth: usize) -> std::result::Result<BackingImage, Error> {
        let name = backing.name.to_string_lossy();
        let refused = |why: String| Err(Error::Refused { path: path.into(), other: name.clone().into_owned(), why });
        if depth >= CHAIN_MAX {
            return refused("the chain of backing files is too long, or a loop".into());
        }
        match backing.format.as_deref() {
            Some("raw") => {
                let (file, path) = self.backing(path, Path::new(&backing.name))?;
                let bytes = sys::bytes(&file).map_err(|error| Error::Open { path, reason: error.into() })?;
                Ok(BackingImage::Raw { file: ImageFile::new(file, false, self.direct), bytes })
            }
            Some("qcow2") => {
                let (file, path) = self.backing(path, Path::new(&backing.name))?;
                Ok(BackingImage::Image(Box::new(self.image(file, &path, false, depth + 1)?)))
            }
            None => {
                let (base, image) = (quoted(Path::new(&backing.name)), quoted(path));
                refused(format!(
                    "the image does not say its format; say it, raw or qcow2, as it was when the image was made: \
                     qemu-img rebase -u -f qcow2 -b {base} -F qcow2 {image}"
                ))
            }
            Some(format) => refused(format!("its format {format:?} is neither raw nor qcow2")),
        }
    }

    /// Opens a backing file, if its directory allows that.
    fn backing(&self, image: &Path, name: &Path) -> std::result::Result<(File, PathBuf), Error> {
        let refused = |why: &str| Error::Refused {
            path: image.into(),
            other: name.to_string_lossy().into_owned(),
            why: why.into(),
        };
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
        // The path was just resolved: a symbolic link in it now was created since.
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
