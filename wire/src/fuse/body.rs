//! Decodes the fields of FUSE messages.

use ferry_vfs::{Errno, Name};
use zerocopy::FromBytes;

use crate::body::{Body, FieldError, XATTR_NAME_BYTES_MAX, name};

impl<'a> Body<'a> {
    /// Takes a structure, which may be unaligned.
    pub(super) fn take<T: FromBytes>(&mut self) -> Result<T, FieldError> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| FieldError::invalid("shorter than its fields"))?;
        self.0 = rest;
        Ok(value)
    }

    /// Takes the rest, which must be exactly one structure.
    pub(super) fn only<T: FromBytes>(mut self) -> Result<T, FieldError> {
        let value = self.take()?;
        self.end()?;
        Ok(value)
    }

    /// Takes the bytes up to a NUL, and the NUL itself.
    pub(super) fn c_string(&mut self) -> Result<&'a [u8], FieldError> {
        let end =
            self.0.iter().position(|byte| *byte == 0).ok_or(FieldError::invalid("a string has no terminating NUL"))?;
        let (string, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Ok(string)
    }

    /// Takes a name and its NUL.
    pub(super) fn c_name(&mut self) -> Result<Name<'a>, FieldError> {
        name(self.c_string()?)
    }

    /// Takes the name of an extended attribute and its NUL.
    pub(super) fn xattr_name(&mut self) -> Result<&'a [u8], FieldError> {
        let name = self.c_string()?;
        if (1..=XATTR_NAME_BYTES_MAX).contains(&name.len()) {
            Ok(name)
        } else {
            Err(FieldError::new(Errno::RANGE, "the name of an extended attribute is empty or too long"))
        }
    }
}

/// The longest value or list of names in bytes that Linux has (`XATTR_LIST_MAX`); larger requests are cut to it.
pub(super) const XATTR_REPLY_BYTES_MAX: u32 = 65536;
