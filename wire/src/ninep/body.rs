//! A cursor that decodes the fields of a message.

use ferry_vfs::{Errno, Name, Timespec};

use super::numbers::{Fid, Qid, QidKind, Tag};

/// A message that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a 9P message of type {kind}: {reason}")]
pub struct DecodeError {
    /// The tag for the reply; `None` if the header is incomplete.
    pub tag: Option<Tag>,
    /// The message's type; 0 without a header.
    pub kind: u8,
    /// The error number of the reply.
    pub errno: Errno,
    /// What is wrong.
    pub reason: &'static str,
}

/// A decoding error of a field, before the message is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FieldError {
    pub(super) errno: Errno,
    pub(super) reason: &'static str,
}

impl FieldError {
    pub(super) const fn new(errno: Errno, reason: &'static str) -> Self {
        Self { errno, reason }
    }

    pub(super) const fn invalid(reason: &'static str) -> Self {
        Self::new(Errno::INVAL, reason)
    }
}

/// Returns an error unless the condition holds.
pub(super) fn ensure(condition: bool, reason: &'static str) -> Result<(), FieldError> {
    if condition { Ok(()) } else { Err(FieldError::invalid(reason)) }
}

/// The bytes of a message that are not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body<'a>(pub(super) &'a [u8]);

impl<'a> Body<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], FieldError> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(FieldError::invalid("shorter than its fields"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FieldError> {
        let (bytes, rest) = self.0.split_first_chunk().ok_or(FieldError::invalid("shorter than its fields"))?;
        self.0 = rest;
        Ok(*bytes)
    }

    pub(super) fn u8(&mut self) -> Result<u8, FieldError> {
        self.array().map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self) -> Result<u16, FieldError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, FieldError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, FieldError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn fid(&mut self) -> Result<Fid, FieldError> {
        self.u32().map(Fid)
    }

    pub(super) fn qid(&mut self) -> Result<Qid, FieldError> {
        Ok(Qid { kind: QidKind(self.u8()?), version: self.u32()?, path: self.u64()? })
    }

    /// Takes a string of `0..=bytes_max` bytes without NUL.
    pub(super) fn string(&mut self, bytes_max: usize) -> Result<&'a [u8], FieldError> {
        let count = usize::from(self.u16()?);
        let string = self.bytes(count)?;
        if count > bytes_max {
            return Err(FieldError::new(Errno::NAMETOOLONG, "a string is too long"));
        }
        ensure(!string.contains(&0), "a string contains a NUL")?;
        Ok(string)
    }

    pub(super) fn name(&mut self) -> Result<Name<'a>, FieldError> {
        let count = usize::from(self.u16()?);
        name(self.bytes(count)?)
    }

    /// Takes seconds and nanoseconds, 64 bits each.
    pub(super) fn time(&mut self) -> Result<Timespec, FieldError> {
        let (sec, nsec) = (self.u64()?.cast_signed(), self.u64()?);
        let nsec = u32::try_from(nsec).ok().filter(|nsec| *nsec < 1_000_000_000);
        let nsec = nsec.ok_or(FieldError::invalid("nanoseconds of a second or more"))?;
        Ok(Timespec { sec, nsec })
    }

    /// Takes data with a 32-bit length.
    pub(super) fn data(&mut self) -> Result<&'a [u8], FieldError> {
        let count = self.u32()?;
        self.bytes(usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// Checks that no bytes are left.
    pub(super) fn end(self) -> Result<(), FieldError> {
        ensure(self.0.is_empty(), "bytes after its fields")
    }
}

pub(super) fn name(bytes: &[u8]) -> Result<Name<'_>, FieldError> {
    Name::new(bytes).map_err(|errno| FieldError::new(errno, "not a valid name of a directory entry"))
}

/// The longest name of an extended attribute in bytes (Linux `XATTR_NAME_MAX`).
pub(super) const XATTR_NAME_BYTES_MAX: usize = 255;
/// The longest value of an extended attribute in bytes (Linux `XATTR_SIZE_MAX`).
pub(super) const XATTR_VALUE_BYTES_MAX: u64 = 65536;
/// The longest target of a symbolic link, or path of a tree, in bytes (Linux `PATH_MAX` without its NUL).
pub(super) const PATH_BYTES_MAX: usize = 4095;
/// The longest name of a user in bytes (Linux `LOGIN_NAME_MAX`).
pub(super) const USER_BYTES_MAX: usize = 256;
/// The longest client name in a lock, in bytes. Linux sends its node name, at most 64 bytes.
pub(super) const CLIENT_BYTES_MAX: usize = 256;
/// The longest version string in bytes; real ones are far shorter.
pub(super) const VERSION_BYTES_MAX: usize = 64;
