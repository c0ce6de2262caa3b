//! A cursor over the structures of a reply.

use zerocopy::FromBytes;

/// A malformed reply, or a malformed listing in one: what is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE reply: {0}")]
pub struct Malformed(pub &'static str);

/// Returns an error unless the condition holds.
pub(super) fn ensure(condition: bool, reason: &'static str) -> Result<(), Malformed> {
    if condition { Ok(()) } else { Err(Malformed(reason)) }
}

/// The bytes that are not decoded yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body<'a>(pub(super) &'a [u8]);

impl<'a> Body<'a> {
    /// Takes this many bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(Malformed("shorter than its fields"))?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Takes a structure, which may be unaligned.
    pub(super) fn take<T: FromBytes>(&mut self) -> Result<T, Malformed> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Malformed("shorter than its fields"))?;
        self.0 = rest;
        Ok(value)
    }

    /// Takes the rest, which must be exactly one structure.
    pub(super) fn only<T: FromBytes>(mut self) -> Result<T, Malformed> {
        let value = self.take()?;
        self.end()?;
        Ok(value)
    }

    /// Checks that no bytes are left.
    pub(super) fn end(self) -> Result<(), Malformed> {
        ensure(self.0.is_empty(), "bytes after its fields")
    }
}
