//! The blob of a layer in containerd's content store.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::api::Descriptor;
use crate::error::{Error, IoContext, Result};

/// The directory of blobs in containerd's root.
const BLOBS: &str = "io.containerd.content.v1.content/blobs";
/// containerd's digest algorithms, with the number of hexadecimal digits.
const ALGORITHMS: [(&str, usize); 3] = [("sha256", 64), ("sha384", 96), ("sha512", 128)];
/// The media types of layers.
const MEDIA_TYPES: [(&str, &[&str]); 4] = [
    ("application/vnd.oci.image.layer.v1.tar", &["", "+gzip", "+zstd"]),
    ("application/vnd.oci.image.layer.nondistributable.v1.tar", &["", "+gzip", "+zstd"]),
    ("application/vnd.docker.image.rootfs.diff.tar", &["", ".gzip", ".zstd"]),
    ("application/vnd.docker.image.rootfs.foreign.diff.tar", &["", ".gzip", ".zstd"]),
];

/// A flag that is set when the client of a call has disconnected.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Returns a value that stops the call when it is dropped.
    pub fn when_dropped(&self) -> StopGuard {
        StopGuard(self.clone())
    }
}

/// See [`Stop::when_dropped`].
#[derive(Debug)]
pub struct StopGuard(Stop);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// An open blob with the length in its descriptor.
#[derive(Debug)]
pub(super) struct Blob {
    pub path: PathBuf,
    file: io::Take<File>,
    stop: Stop,
}

impl Blob {
    /// Opens the blob of a descriptor below containerd's root.
    ///
    /// # Errors
    ///
    /// [`Error::Unimplemented`]: the media type is not supported, or the blob does not exist; [`Error::InvalidArgument`]: the descriptor is
    /// invalid, or the blob has another length.
    pub(super) fn open(root: &Path, descriptor: &Descriptor, stop: Stop) -> Result<Self> {
        let Descriptor { media_type, digest, size, .. } = descriptor;
        let is_known = MEDIA_TYPES
            .iter()
            .any(|(archive, packed)| media_type.strip_prefix(archive).is_some_and(|how| packed.contains(&how)));
        if !is_known {
            return Err(Error::Unimplemented(format!("the media type {media_type:?} is no layer that is known here")));
        }
        let path = path(digest).map(|path| root.join(BLOBS).join(path));
        let path = path.ok_or_else(|| Error::InvalidArgument(format!("{digest:?} is not the digest of a blob")))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = match openat(CWD, &path, flags, Mode::empty()) {
            Err(Errno::NOENT) => {
                let path = path.display();
                let why = format!("the blob {path} does not exist: set `containerd-root` to containerd's own `root`");
                return Err(Error::Unimplemented(why));
            }
            opened => File::from(opened.doing("open", &path)?),
        };
        let found = file.metadata().doing("inspect", &path)?;
        let size = u64::try_from(*size).unwrap_or_default();
        if !found.is_file() || found.len() != size {
            let why =
                format!("the blob {} has {} bytes, not {size} as its descriptor says", path.display(), found.len());
            return Err(Error::InvalidArgument(why));
        }
        Ok(Self { path, file: file.take(size), stop })
    }
}

impl Read for Blob {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.stop.0.load(Ordering::Relaxed) {
            return Err(io::Error::other("the call was cancelled"));
        }
        self.file.read(bytes)
    }
}

/// Returns the path of a blob in the directory: its algorithm, and its digits in lower case.
fn path(digest: &str) -> Option<PathBuf> {
    let (algorithm, digits) = digest.split_once(':')?;
    let (_, count) = ALGORITHMS.iter().find(|(known, _)| *known == algorithm)?;
    let are_digits = digits.len() == *count && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    are_digits.then(|| Path::new(algorithm).join(digits))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_blobs_are_opened() {
        let root = tempfile::tempdir().unwrap();
        let blobs = root.path().join(BLOBS).join("sha256");
        fs::create_dir_all(&blobs).unwrap();
        let (there, link, absent) = ("a".repeat(64), "b".repeat(64), "c".repeat(64));
        fs::write(blobs.join(&there), "some").unwrap();
        symlink("/etc/passwd", blobs.join(&link)).unwrap();
        let layer = "application/vnd.oci.image.layer.v1.tar";
        let open = |media_type: &str, digest: &str, size| {
            let (media_type, digest) = (media_type.into(), digest.into());
            let descriptor = Descriptor { media_type, digest, size, ..Descriptor::default() };
            Blob::open(root.path(), &descriptor, Stop::default())
        };
        let good = format!("sha256:{there}");
        for media_type in [layer, "application/vnd.docker.image.rootfs.diff.tar.gzip"] {
            assert_eq!(io::read_to_string(open(media_type, &good, 4).unwrap()).unwrap(), "some");
        }
        for media_type in ["", "application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "text/plain"] {
            assert!(matches!(open(media_type, &good, 4), Err(Error::Unimplemented(_))), "{media_type}");
        }
        for (digest, size) in [(&*good, 3), (&good, 5), (&good, -1), ("", 4), ("sha256:", 4), ("md5:00", 4)] {
            assert!(matches!(open(layer, digest, size), Err(Error::InvalidArgument(_))), "{digest} {size}");
        }
        let (upper, path) = (good.to_uppercase(), format!("sha256:{}", "../".repeat(22)));
        for digest in [upper, path, good[..70].into(), format!("{good}0"), format!("sha512:{there}")] {
            assert!(matches!(open(layer, &digest, 4), Err(Error::InvalidArgument(_))), "{digest}");
        }
        assert!(matches!(open(layer, &format!("sha256:{absent}"), 4), Err(Error::Unimplemented(_))));
        assert!(matches!(open(layer, &format!("sha256:{link}"), 4), Err(Error::Io { .. })));
    }

    #[test]
    fn reading_stops_when_the_client_disconnects() {
        let mut directory = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut directory, b"some").unwrap();
        let stop = Stop::default();
        let mut blob = Blob { path: "blob".into(), file: directory.take(4), stop: stop.clone() };
        assert!(blob.read(&mut [0; 4]).is_ok());
        drop(stop.when_dropped());
        assert!(blob.read(&mut [0; 4]).is_err());
    }
}
