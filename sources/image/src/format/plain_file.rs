//! Regular files of directories to which other users may write.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{OFlags, SeekFrom, fcntl_getfl, fcntl_setfl, seek};
use rustix::io::Errno;

/// Flags to open a file that another user may have put there: no link is followed, and a FIFO or device has no effect.
pub(crate) const UNTRUSTED_OPEN_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Files up to this size may consist of holes: this much memory is available.
const SPARSE_BYTES_MAX: u64 = 1 << 20;
/// The maximum ratio of length to data of a larger file. Only copies have holes, for zero blocks.
const HOLES_PER_DATA: u64 = 8;

/// Opens a regular file: no link is followed, and a FIFO or device has no effect.
///
/// # Errors
///
/// It is no regular file, or cannot be opened.
pub(crate) fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(UNTRUSTED_OPEN_FLAGS.bits().cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    // io_uring of older kernels does not wait for a file with it.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// As [`open`], for reading.
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    open(File::options().read(true), path)
}

/// Reads a whole file of a limited length.
///
/// # Errors
///
/// It is longer, or consists of holes; and those of [`open`].
pub(crate) fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut file = open_to_read(path)?;
    let length = file.metadata()?.len();
    if length > bytes_max || hole_at(&file, length)?.is_some() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("it has {length} bytes, or few that are data")));
    }
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the offset of a hole if a file has more of these than a copy of a written file can have: otherwise a small file
/// could claim gigabytes of memory. Files whose holes are unknown are accepted. Moves the file's position.
pub(crate) fn hole_at(file: &File, length: u64) -> io::Result<Option<u64>> {
    if length <= SPARSE_BYTES_MAX {
        return Ok(None);
    }
    let (mut at, mut data) = (0, 0);
    while at < length && data < length / HOLES_PER_DATA {
        let from = match seek(file, SeekFrom::Data(at)) {
            Ok(from) => from,
            Err(Errno::NXIO) => break,
            Err(_) => return Ok(None),
        };
        let to = seek(file, SeekFrom::Hole(from))?;
        data += to.saturating_sub(from);
        // An inconsistent file system must not cause an endless loop.
        at = to.max(at + 1);
    }
    Ok((data < length / HOLES_PER_DATA).then_some(at))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn without_hole_detection_everything_is_data() {
        let (one, _other) = UnixStream::pair().expect("sockets can be made");
        assert_eq!(hole_at(&OwnedFd::from(one).into(), 1 << 30).expect("it is not asked"), None);
    }

    #[test]
    fn only_plain_files_with_data_are_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("plain"), "text").expect("a file");
        assert_eq!(read(&path("plain"), 4).expect("it is plain"), b"text");
        read(&path("plain"), 3).expect_err("it is too long");
        std::os::unix::fs::symlink("plain", path("link")).expect("a link");
        std::os::unix::fs::symlink("/dev/zero", path("device")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a FIFO");
        File::create(path("sparse")).and_then(|file| file.set_len(1 << 32)).expect("a file");
        for name in ["link", "device", "fifo", "sparse", "none"] {
            read(&path(name), u64::MAX).expect_err(name);
        }
        assert!(
            !fcntl_getfl(open_to_read(&path("plain")).expect("it is plain")).expect("flags").contains(OFlags::NONBLOCK)
        );
    }
}
