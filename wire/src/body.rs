//! A cursor that decodes the fields of a message; each protocol adds its own kinds of fields.

use ferry_vfs::{Errno, Name};

/// A decoding error of a field: the error number of the reply, and a phrase for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FieldError {
    pub(crate) errno: Errno,
    pub(crate) reason: &'static str,
}

impl FieldError {
    pub(crate) const fn new(errno: Errno, reason: &'static str) -> Self {
        Self { errno, reason }
    }

    pub(crate) const fn invalid(reason: &'static str) -> Self {
        Self::new(Errno::INVAL, reason)
    }
}

/// Returns an error unless the condition holds.
pub(crate) fn ensure(condition: bool, reason: &'static str) -> Result<(), FieldError> {
    if condition { Ok(()) } else { Err(FieldError::invalid(reason)) }
}

/// Checks a name of a directory entry.
pub(crate) fn name(bytes: &[u8]) -> Result<Name<'_>, FieldError> {
    Name::new(bytes).map_err(|errno| FieldError::new(errno, "not a valid name of a directory entry"))
}

/// Checks that a range ends at `i64::MAX` at most, as file offsets of Linux do.
pub(crate) fn check_range(offset: u64, len: u64) -> Result<(), FieldError> {
    let end = offset.checked_add(len).filter(|end| i64::try_from(*end).is_ok());
    ensure(end.is_some(), "a range past the maximum file offset")
}

/// The bytes of a message that are not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Body<'a>(pub(crate) &'a [u8]);

impl<'a> Body<'a> {
    /// Takes this many bytes.
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], FieldError> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(FieldError::invalid("shorter than its fields"))?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Checks that no bytes are left.
    pub(crate) fn end(self) -> Result<(), FieldError> {
        ensure(self.0.is_empty(), "bytes after its fields")
    }
}

/// The permission bits of `st_mode`, with suid, sgid and sticky.
pub(crate) const PERMISSIONS: u32 = 0o7777;
/// The longest name of an extended attribute in bytes (Linux `XATTR_NAME_MAX`).
pub(crate) const XATTR_NAME_BYTES_MAX: usize = 255;
/// The longest value of an extended attribute in bytes (Linux `XATTR_SIZE_MAX`).
pub(crate) const XATTR_VALUE_BYTES_MAX: usize = 65536;
/// The longest target of a symbolic link in bytes (Linux `PATH_MAX` without its NUL).
pub(crate) const PATH_BYTES_MAX: usize = 4095;
