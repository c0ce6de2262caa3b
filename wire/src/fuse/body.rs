//! A cursor that decodes the fields of a request or reply.

use ferry_vfs::{Errno, Name};
use zerocopy::FromBytes;

/// A decoding error: the error number of the reply, and a phrase for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flaw {
    pub(super) errno: Errno,
    pub(super) reason: &'static str,
}

impl Flaw {
    pub(super) const fn new(errno: Errno, reason: &'static str) -> Self {
        Self { errno, reason }
    }

    pub(super) const fn invalid(reason: &'static str) -> Self {
        Self::new(Errno::INVAL, reason)
    }
}

/// Returns an error unless the condition holds.
pub(super) fn ensure(condition: bool, reason: &'static str) -> Result<(), Flaw> {
    if condition { Ok(()) } else { Err(Flaw::invalid(reason)) }
}

/// The bytes of a message that are not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body<'a>(pub(super) &'a [u8]);

impl<'a> Body<'a> {
    /// Takes a structure, which may be unaligned.
    pub(super) fn take<T: FromBytes>(&mut self) -> Result<T, Flaw> {
        let (value, rest) =
            T::read_from_prefix(self.0).map_err(|_| Flaw::invalid("shorter than its fixed arguments"))?;
        self.0 = rest;
        Ok(value)
    }

    /// Takes the rest, which must be exactly one structure.
    pub(super) fn only<T: FromBytes>(mut self) -> Result<T, Flaw> {
        let value = self.take()?;
        self.end()?;
        Ok(value)
    }

    /// Takes this many bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Flaw> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Flaw::invalid("shorter than its lengths say"))?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Takes the bytes up to a NUL, and the NUL itself.
    pub(super) fn c_string(&mut self) -> Result<&'a [u8], Flaw> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Flaw::invalid("a string has no terminating NUL"))?;
        let (string, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Ok(string)
    }

    /// Takes a name and its NUL.
    pub(super) fn name(&mut self) -> Result<Name<'a>, Flaw> {
        name(self.c_string()?)
    }

    /// Takes the name of an extended attribute and its NUL.
    pub(super) fn xattr_name(&mut self) -> Result<&'a [u8], Flaw> {
        let name = self.c_string()?;
        if (1..=XATTR_NAME_BYTES_MAX).contains(&name.len()) {
            Ok(name)
        } else {
            Err(Flaw::new(Errno::RANGE, "the name of an extended attribute is empty or too long"))
        }
    }

    /// Checks that no bytes are left.
    pub(super) fn end(self) -> Result<(), Flaw> {
        ensure(self.0.is_empty(), "bytes after its arguments")
    }
}

/// The longest name of an extended attribute in bytes (Linux `XATTR_NAME_MAX`).
pub(super) const XATTR_NAME_BYTES_MAX: usize = 255;
/// The longest value of an extended attribute in bytes (Linux `XATTR_SIZE_MAX`).
pub(super) const XATTR_VALUE_BYTES_MAX: usize = 65536;
/// The longest value or list of names in bytes that Linux has (`XATTR_LIST_MAX`); larger requests are cut to it.
pub(super) const XATTR_REPLY_BYTES_MAX: u32 = 65536;
/// The longest target of a symbolic link in bytes (Linux `PATH_MAX` without its NUL).
pub(super) const SYMLINK_TARGET_BYTES_MAX: usize = 4095;

pub(super) fn name(bytes: &[u8]) -> Result<Name<'_>, Flaw> {
    Name::new(bytes).map_err(|errno| Flaw::new(errno, "not a valid name of a directory entry"))
}
