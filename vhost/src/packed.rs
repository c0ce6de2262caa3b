//! Places and descriptors of packed rings (VIRTIO 1.3, 2.8), which the rings and their in-flight logs share.

/// Descriptor flags of availability and use (2.8.1).
pub(crate) const AVAILABLE: u16 = 1 << 7;
pub(crate) const USED: u16 = 1 << 15;

/// A place in the ring, and the wrap counter there (2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Place {
    /// The beginning of a ring that was never used.
    pub(crate) const FRESH: Self = Self { index: 0, wrap: true };

    /// Returns the place this many descriptors later, at most a whole ring.
    #[inline]
    pub(crate) fn after(self, descriptors: u16, size: u16) -> Self {
        let index = u32::from(self.index) + u32::from(descriptors);
        match u16::try_from(index) {
            Ok(index) if index < size => Self { index, ..self },
            _ => Self { index: u16::try_from(index - u32::from(size)).unwrap_or(0), wrap: !self.wrap },
        }
    }

    /// Returns how many descriptors `self` is ahead of `other`, if that is possible.
    pub(crate) fn ahead_of(self, other: Self, size: u16) -> Option<u16> {
        let lap = if self.wrap == other.wrap { 0 } else { size };
        (self.index + lap).checked_sub(other.index).filter(|ahead| *ahead <= size)
    }

    pub(crate) fn to_bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    pub(crate) fn from_bits(bits: u32) -> Self {
        Self { index: u16::try_from(bits & 0x7fff).unwrap_or(0), wrap: bits & 0x8000 != 0 }
    }

    /// Whether a descriptor here with these flags is available.
    #[inline]
    pub(crate) fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    /// Returns the flags of a used descriptor here.
    #[inline]
    pub(crate) fn used_flags(self) -> u16 {
        if self.wrap { AVAILABLE | USED } else { 0 }
    }
}

/// A descriptor of the ring and of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) bytes: u32,
    pub(crate) id: u16,
    pub(crate) flags: u16,
}
