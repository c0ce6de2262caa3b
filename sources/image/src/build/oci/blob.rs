//! Blobs: files named by the digest of their bytes.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::format::digest::{bytes_of_hex, hex};
use crate::format::error::{Error, IoContext, Result};

/// The size of the reads of a blob's rest, in bytes.
const PIECE_BYTES: usize = 1 << 16;

/// The name of a blob: `sha256:` and 64 hexadecimal digits, so it is safe as a part of a path.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct BlobDigest([u8; 32]);

impl TryFrom<String> for BlobDigest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.strip_prefix("sha256:").and_then(|digits| bytes_of_hex(digits.as_bytes()));
        digits
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a supported digest: use sha256: and 64 hexadecimal digits"))
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", hex(&self.0))
    }
}

impl fmt::Debug for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Opens a file of any type: that neither waits nor has an effect.
pub(super) fn open_untrusted(path: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(CWD, path, flags, Mode::empty()).doing("open", path).map(File::from)
}

/// A reader that hashes what it reads.
pub(super) struct HashReader<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> HashReader<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// Reads to the end; returns the name of all that was read.
    pub(super) fn finish(mut self) -> io::Result<BlobDigest> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match self.read(&mut piece) {
                Ok(0) => return Ok(BlobDigest(self.hash.finalize().into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl<R: Read> Read for HashReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        self.hash.update(&bytes[..count]);
        Ok(count)
    }
}

/// A blob that is being read. Its digest is known only at the end.
pub(super) struct Blob {
    pub path: PathBuf,
    what: &'static str,
    name: BlobDigest,
    reader: HashReader<io::Take<File>>,
}

impl Blob {
    /// Opens the blob of an image directory with this name and length.
    pub(super) fn open(directory: &Path, name: BlobDigest, bytes: u64, what: &'static str) -> Result<Self> {
        let path = directory.join("blobs/sha256").join(hex(&name.0));
        let file = open_untrusted(&path)?;
        let found = file.metadata().doing("look at", &path)?;
        if !found.is_file() || found.len() != bytes {
            let reason = if found.is_file() {
                format!("it has {} bytes, not {bytes}", found.len())
            } else {
                "it is not a regular file".into()
            };
            return Err(Error::Input { path, at: what.into(), reason });
        }
        Ok(Self { path, what, name, reader: HashReader::new(file.take(bytes)) })
    }

    /// Reads the rest, and compares the digest with the name.
    pub(super) fn finish(self) -> Result<()> {
        let found = self.reader.finish().doing("read", &self.path)?;
        if found == self.name {
            return Ok(());
        }
        let reason = format!("its bytes have the digest {found}: it is damaged");
        Err(Error::Input { path: self.path, at: self.what.into(), reason })
    }
}

impl Read for Blob {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes)
    }
}
