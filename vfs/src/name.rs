//! Names of directory entries. A [`Name`] is always valid.

use std::borrow::Borrow;
use std::fmt;

use crate::{Errno, Result};

/// One component of a path: not empty, at most [`Name::BYTES_MAX`] bytes, without `/` and NUL, and neither `.`
/// nor `..`. Only [`Name::new`] creates one, so a `Name` need not be checked again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name<'a>(&'a [u8]);

impl<'a> Name<'a> {
    /// The longest name that Linux accepts, in bytes (`NAME_MAX`).
    pub const BYTES_MAX: usize = 255;

    /// Parses a name.
    ///
    /// # Errors
    /// `NAMETOOLONG` past [`Self::BYTES_MAX`]; `INVAL` for any other invalid name.
    pub fn new(bytes: &'a [u8]) -> Result<Self> {
        match bytes {
            [] | b"." | b".." => Err(Errno::INVAL),
            _ if bytes.len() > Self::BYTES_MAX => Err(Errno::NAMETOOLONG),
            _ if bytes.iter().any(|byte| matches!(byte, b'/' | 0)) => Err(Errno::INVAL),
            _ => Ok(Self(bytes)),
        }
    }

    /// Returns the bytes of the name, in no particular encoding.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// Returns an owned copy.
    pub fn to_buf(self) -> NameBuf {
        NameBuf(self.0.into())
    }
}

/// An owned [`Name`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameBuf(Box<[u8]>);

impl NameBuf {
    /// Returns the name, borrowed.
    pub fn as_name(&self) -> Name<'_> {
        Name(&self.0)
    }
}

impl Borrow<[u8]> for NameBuf {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Debug for NameBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_name().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepts_exactly_the_names_that_linux_accepts() {
        let longest = [b'x'; Name::BYTES_MAX];
        for good in [&b"a"[..], b"...", b".a", b"a.", b"\xff\xfe", b"a b", b"\n", &longest] {
            assert_eq!(Name::new(good).map(Name::as_bytes), Ok(good));
        }
        for bad in [&b""[..], b".", b"..", b"/", b"/x", b"a/b", b"a\0", b"\0"] {
            assert_eq!(Name::new(bad), Err(Errno::INVAL), "{}", bad.escape_ascii());
        }
        assert_eq!(Name::new(&[b'x'; Name::BYTES_MAX + 1]), Err(Errno::NAMETOOLONG));
    }
}
