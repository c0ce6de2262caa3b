//! Lists in requests, and the extensions after them.

use std::fmt;
use std::marker::PhantomData;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::abi::{EXT_GROUPS, EXT_SECURITY_CONTEXTS_MAX, ExtHeader, Secctx};
use crate::body::{Body, FieldError, ensure};

/// A list of structures inside a message, unaligned.
pub struct Records<'a, T> {
    bytes: &'a [u8],
    kind: PhantomData<T>,
}

impl<'a, T: FromBytes + IntoBytes + Immutable> Records<'a, T> {
    /// Creates a list from a slice.
    pub fn new(items: &'a [T]) -> Self {
        Self { bytes: items.as_bytes(), kind: PhantomData }
    }

    /// Creates a list from bytes; an incomplete record at the end is ignored.
    pub(super) fn from_bytes(bytes: &'a [u8]) -> Self {
        Self { bytes: &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()], kind: PhantomData }
    }

    /// Returns the encoded list.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The structures in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + 'a {
        self.bytes
            .chunks_exact(size_of::<T>())
            .map(|bytes| T::read_from_bytes(bytes).expect("a chunk has the size of the structure"))
    }

    /// Copies as many records as fit into `buffer`, and returns them.
    pub fn copy_to<'b>(&self, buffer: &'b mut [T]) -> &'b [T] {
        let count = buffer.len().min(self.len());
        for (to, from) in buffer.iter_mut().zip(self.iter()) {
            *to = from;
        }
        &buffer[..count]
    }
}

impl<T> Clone for Records<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Records<'_, T> {}

impl<T> Default for Records<'_, T> {
    fn default() -> Self {
        Self { bytes: &[], kind: PhantomData }
    }
}

impl<T> PartialEq for Records<'_, T> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl<T> Eq for Records<'_, T> {}

impl<T: fmt::Debug + FromBytes + IntoBytes + Immutable> fmt::Debug for Records<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Supplementary groups of the caller (FUSE protocol 7.45, `fuse_supp_groups`). Linux sends at most one: the group of
/// the parent directory, if the caller is a member of it.
pub type Groups<'a> = Records<'a, u32>;

/// The security contexts of a new inode (FUSE protocol 7.45, `fuse_secctx`).
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct SecurityContexts<'a> {
    count: u32,
    bytes: &'a [u8],
}

impl<'a> SecurityContexts<'a> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Iterates over the names (of extended attributes, such as `security.selinux`) and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + 'a {
        let mut body = Body(self.bytes);
        std::iter::from_fn(move || if body.0.is_empty() { None } else { Self::record(&mut body).ok() })
    }

    /// Returns the encoded contexts.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Decodes `count` contexts (FUSE protocol 7.45, `fuse_secctx`); returns `None` if they are malformed.
    pub fn parse(bytes: &'a [u8], count: u32) -> Option<Self> {
        Self::checked(bytes, count).ok()
    }

    fn checked(bytes: &'a [u8], count: u32) -> Result<Self, FieldError> {
        ensure(count <= EXT_SECURITY_CONTEXTS_MAX, "too many security contexts")?;
        let mut body = Body(bytes);
        for _ in 0..count {
            Self::record(&mut body)?;
        }
        body.end()?;
        Ok(Self { count, bytes })
    }

    fn record(body: &mut Body<'a>) -> Result<(&'a [u8], &'a [u8]), FieldError> {
        let before = body.0.len();
        let context: Secctx = body.take()?;
        let name = body.xattr_name()?;
        let value = body.bytes(context.size as usize)?;
        let used = before - body.0.len();
        body.bytes(used.next_multiple_of(8) - used)?;
        Ok((name, value))
    }
}

impl fmt::Debug for SecurityContexts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown =
            self.iter().map(|(name, value)| (name.escape_ascii().to_string(), value.escape_ascii().to_string()));
        f.debug_map().entries(shown).finish()
    }
}

/// The extensions after the arguments of a request (FUSE protocol 7.45, `fuse_ext_header`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extensions<'a> {
    /// Supplementary groups of the caller.
    pub groups: Groups<'a>,
    /// Security contexts of a new inode.
    pub security: SecurityContexts<'a>,
}

impl<'a> Extensions<'a> {
    /// Decodes the extensions. Linux 5.17 to 6.1 sends a security context without an extension header at the same
    /// place, which decodes in the same way.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, FieldError> {
        let mut body = Body(bytes);
        let (mut groups, mut security) = (None, None);
        while !body.0.is_empty() {
            let header: ExtHeader = body.take()?;
            let size = (header.size as usize).checked_sub(size_of::<ExtHeader>());
            let size =
                size.filter(|size| size % 8 == 0).ok_or(FieldError::invalid("an extension with an invalid size"))?;
            let mut content = Body(body.bytes(size)?);
            match header.kind {
                0..=EXT_SECURITY_CONTEXTS_MAX => {
                    let contexts = SecurityContexts::checked(content.0, header.kind)?;
                    ensure(security.replace(contexts).is_none(), "an extension occurs twice")?;
                }
                EXT_GROUPS => {
                    let count: u32 = content.take()?;
                    let size = (count as usize).checked_mul(size_of::<u32>());
                    let size = size.ok_or(FieldError::invalid("too many groups"))?;
                    let ids = Groups::from_bytes(content.bytes(size)?);
                    ensure(content.0.len() < 8, "an extension is longer than its groups")?;
                    ensure(groups.replace(ids).is_none(), "an extension occurs twice")?;
                }
                _ => return Err(FieldError::invalid("an unknown extension")),
            }
        }
        Ok(Self { groups: groups.unwrap_or_default(), security: security.unwrap_or_default() })
    }
}
