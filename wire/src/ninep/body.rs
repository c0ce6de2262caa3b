//! Decodes the fields of 9P messages.

use ferry_vfs::{Errno, Name, Timespec};

use super::numbers::{Fid, Qid, QidKind, Tag};
use crate::body::{Body, FieldError, ensure, name};

/// A message that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed 9P message (type {kind}): {reason}")]
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

impl<'a> Body<'a> {
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
}

/// The longest name of a user in bytes (Linux `LOGIN_NAME_MAX`).
pub(super) const USER_BYTES_MAX: usize = 256;
/// The longest client name in a lock, in bytes. Linux sends its node name, at most 64 bytes.
pub(super) const CLIENT_BYTES_MAX: usize = 256;
/// The longest version string in bytes; real ones are far shorter.
pub(super) const VERSION_BYTES_MAX: usize = 64;
