//! The header of an image (QEMU, docs/interop/qcow2.rst). It is checked completely before the rest of the image is
//! used, and before the image is opened for writing.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::shape::{Compression, Shape};

const MAGIC: &[u8] = b"QFI\xfb";

/// The length of every header, and the minimum that version 3 adds, in bytes.
const V2_BYTES: usize = 72;
const V3_BYTES: usize = 104;

/// QEMU's limits: an L1 table of 32 MiB, a refcount table of 8 MiB, and this number of snapshots.
const L1_BYTES_MAX: u64 = 32 << 20;
pub(super) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
const SNAPSHOTS_MAX: u32 = 65536;

/// The fixed part of a snapshot table entry in bytes.
const SNAPSHOT_BYTES_MIN: u64 = 40;

/// The longest name of a backing file in bytes.
const NAME_BYTES_MAX: u32 = 1023;

/// Incompatible features.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;
const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;

/// The minimum cluster size of images with extended L2 entries.
const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;

/// Types of header extensions.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
const ENCRYPTION: u32 = 0x0537_be77;
const DATA_FILE_NAME: u32 = 0x4441_5441;

/// The size of an entry of the feature name table: type, bit, name.
const FEATURE_BYTES: usize = 48;

/// Why an image is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderError {
    /// The header contradicts itself, the file, or the specification.
    Damaged(String),
    /// An unsupported feature.
    Unsupported(Unsupported),
}

/// An unsupported feature.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unsupported {
    /// Encryption by this method.
    Encrypted(&'static str),
    /// The data are in another file.
    DataFile(String),
    /// Something newer than this program.
    Feature(String),
    /// The image must be checked before writing.
    NeedsCheck(&'static str),
}

/// The backing file of an image.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BackingName {
    pub name: OsString,
    /// Its format in the header; `None`: not given.
    pub format: Option<String>,
}

/// What a header says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub shape: Shape,
    /// The size of the disk.
    pub bytes: u64,
    pub l1_offset: u64,
    pub l1_entries: u32,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
    pub snapshots: u32,
    pub snapshots_offset: u64,
    pub backing: Option<BackingName>,
    pub autoclear: u64,
    /// Why `qemu-img check` must repair the image before it may be written.
    pub needs_check: Option<&'static str>,
}

/// Big-endian numbers at offsets of a header; offsets past its end read as zeros.
struct HeaderFields<'a>(&'a [u8]);

impl HeaderFields<'_> {
    fn u32(&self, at: usize) -> u32 {
        let found = at.checked_add(4).and_then(|end| self.0.get(at..end)).and_then(|bytes| bytes.try_into().ok());
        u32::from_be_bytes(found.unwrap_or_default())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) << 32 | u64::from(self.u32(at + 4))
    }
}

fn damaged<T>(what: impl Into<String>) -> Result<T, HeaderError> {
    Err(HeaderError::Damaged(what.into()))
}

/// Returns the maximum length of the header, from the first few bytes of an image.
pub(super) fn bytes_of(start: &[u8]) -> Result<usize, HeaderError> {
    if !start.starts_with(MAGIC) {
        return damaged("it does not begin like a qcow2 image");
    }
    if start.len() < V2_BYTES {
        return damaged(format!("its header ends after {} bytes", start.len()));
    }
    let bits = HeaderFields(start).u32(20);
    match Shape::CLUSTER_BITS.contains(&bits) {
        true => Ok(1 << bits),
        false => damaged(format!("its clusters have 2^{bits} bytes; 2^9 to 2^21 are allowed")),
    }
}

impl Header {
    /// Parses the first cluster of an image, or the available part of it, in a file of `file_bytes`.
    pub(super) fn parse(start: &[u8], file_bytes: u64) -> Result<Self, HeaderError> {
        let room = bytes_of(start)?;
        let start = &start[..start.len().min(room)];
        let fields = HeaderFields(start);
        let version = fields.u32(4);
        let (length, incompatible, refcount_order) = match version {
            2 => (V2_BYTES, 0, 4),
            3 if start.len() < V3_BYTES => return damaged(format!("its header ends after {} bytes", start.len())),
            3 => (fields.u32(100) as usize, fields.u64(72), fields.u32(96)),
            _ => return Err(HeaderError::Unsupported(Unsupported::Feature(format!("has version {version}")))),
        };
        if version == 3 && !(V3_BYTES..=room).contains(&length) || !length.is_multiple_of(8) {
            return damaged(format!("its header claims a length of {length} bytes"));
        }
        if refcount_order > 6 {
            return damaged(format!("its reference counts have 2^{refcount_order} bits; 64 are the most"));
        }
        let extensions = Extensions::parse(start, length, fields.u64(8))?;
        // Encryption is reported first: it is the most likely reason for a refusal.
        match fields.u32(32) {
            0 if extensions.encryption => {
                return Err(HeaderError::Unsupported(Unsupported::Encrypted("an unknown method")));
            }
            0 => {}
            1 => return Err(HeaderError::Unsupported(Unsupported::Encrypted("AES"))),
            2 => return Err(HeaderError::Unsupported(Unsupported::Encrypted("LUKS"))),
            method => return damaged(format!("its encryption method {method} is unknown")),
        }
        if incompatible & DATA_FILE != 0 {
            return Err(HeaderError::Unsupported(Unsupported::DataFile(extensions.data_file.unwrap_or_default())));
        }
        if incompatible & !KNOWN != 0 {
            let bit = (incompatible & !KNOWN).trailing_zeros();
            return Err(HeaderError::Unsupported(Unsupported::Feature(extensions.feature(bit))));
        }
        let compression = compression(&fields, length, incompatible)?;
        let shape = Shape {
            version,
            cluster_bits: fields.u32(20),
            extended: incompatible & EXTENDED_L2 != 0,
            refcount_order,
            compression,
        };
        if shape.extended && shape.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            return damaged("it has extended L2 entries, for which its clusters are too small");
        }
        let header = Self {
            shape,
            bytes: fields.u64(24),
            l1_offset: fields.u64(40),
            l1_entries: fields.u32(36),
            refcount_table_offset: fields.u64(48),
            refcount_table_clusters: fields.u32(56),
            snapshots: fields.u32(60),
            snapshots_offset: fields.u64(64),
            backing: backing(start, &fields, extensions.backing_format)?,
            autoclear: if version == 3 { fields.u64(88) } else { 0 },
            needs_check: match incompatible {
                bits if bits & CORRUPT != 0 => Some("is marked as corrupt"),
                bits if bits & DIRTY != 0 => Some("was not closed, and its reference counts are not up to date"),
                _ => None,
            },
        };
        header.check_tables(file_bytes)?;
        Ok(header)
    }

    /// Checks that the tables are at cluster boundaries within the file, and have valid sizes.
    fn check_tables(&self, file_bytes: u64) -> Result<(), HeaderError> {
        let lies = |what: &str, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes).filter(|end| *end <= file_bytes);
            match end {
                Some(_) if bytes == 0 || self.shape.is_cluster(offset) && offset > 0 => Ok(()),
                Some(_) => damaged(format!("its {what} is at byte {offset}, where no cluster begins")),
                None => damaged(format!("its {what} ({bytes} bytes at {offset}) ends past the file's {file_bytes}")),
            }
        };
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if l1_bytes > L1_BYTES_MAX {
            return damaged(format!("its L1 table has {} entries", self.l1_entries));
        }
        lies("L1 table", self.l1_offset, l1_bytes)?;
        let wanted = self.shape.l1_entries_for(self.bytes);
        if wanted > u64::from(self.l1_entries) {
            let (has, bytes) = (self.l1_entries, self.bytes);
            return damaged(format!("its L1 table has {has} entries; {bytes} bytes need {wanted}"));
        }
        let refcount_bytes = u64::from(self.refcount_table_clusters) << self.shape.cluster_bits;
        if refcount_bytes == 0 || refcount_bytes > REFCOUNT_TABLE_BYTES_MAX {
            return damaged(format!("its refcount table has {refcount_bytes} bytes"));
        }
        lies("refcount table", self.refcount_table_offset, refcount_bytes)?;
        if self.snapshots > SNAPSHOTS_MAX {
            return damaged(format!("it has {} snapshots; {SNAPSHOTS_MAX} are allowed", self.snapshots));
        }
        match self.snapshots {
            // QEMU leaves any offset when it deletes the last snapshot.
            0 => Ok(()),
            count => lies("snapshot table", self.snapshots_offset, u64::from(count) * SNAPSHOT_BYTES_MIN),
        }
    }
}

fn compression(fields: &HeaderFields<'_>, length: usize, incompatible: u64) -> Result<Compression, HeaderError> {
    let kind = if length > V3_BYTES { fields.0.get(V3_BYTES).copied().unwrap_or_default() } else { 0 };
    match (kind, incompatible & COMPRESSION_TYPE != 0) {
        (0, false) => Ok(Compression::Deflate),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => damaged("its header contradicts itself about the type of compression"),
        (kind, _) => Err(HeaderError::Unsupported(Unsupported::Feature(format!("has compression of type {kind}")))),
    }
}

fn backing(
    start: &[u8],
    fields: &HeaderFields<'_>,
    format: Option<String>,
) -> Result<Option<BackingName>, HeaderError> {
    let (offset, length) = (fields.u64(8), fields.u32(16));
    if offset == 0 {
        return Ok(None);
    }
    let name = usize::try_from(offset).ok().filter(|_| length > 0 && length <= NAME_BYTES_MAX).and_then(|offset| {
        let end = offset.checked_add(length as usize)?;
        start.get(offset..end)
    });
    match name {
        Some(name) if !name.contains(&0) => Ok(Some(BackingName { name: OsString::from_vec(name.to_vec()), format })),
        _ => damaged(format!("its backing file's name ({length} bytes at {offset}) is not one")),
    }
}

/// The relevant extensions of a header.
#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<String>,
    encryption: bool,
    features: Vec<u8>,
}

impl Extensions {
    /// They begin after the header, in version 2, too, and end with the cluster or at the backing file's name.
    fn parse(start: &[u8], mut at: usize, backing_offset: u64) -> Result<Self, HeaderError> {
        let end = match usize::try_from(backing_offset) {
            Ok(offset) if offset > 0 => offset.min(start.len()),
            _ => start.len(),
        };
        let mut found = Self::default();
        while at.checked_add(8).is_some_and(|data| data <= end) {
            let (kind, length) = (HeaderFields(start).u32(at), HeaderFields(start).u32(at + 4) as usize);
            if kind == END {
                break;
            }
            let data = (at + 8).checked_add(length).filter(|data_end| *data_end <= end);
            let Some(data) = data.map(|data_end| &start[at + 8..data_end]) else {
                return damaged(format!("its header extension {kind:#x} of {length} bytes is longer than the header"));
            };
            let text = || String::from_utf8_lossy(data).into_owned();
            match kind {
                BACKING_FORMAT if found.backing_format.as_ref().is_some_and(|other| *other != text()) => {
                    return damaged("it says two formats of its backing file");
                }
                BACKING_FORMAT => found.backing_format = Some(text()),
                DATA_FILE_NAME => found.data_file = Some(text()),
                ENCRYPTION => found.encryption = true,
                FEATURE_NAMES => found.features = data.to_vec(),
                _ => {}
            }
            at = (at + 8 + length).next_multiple_of(8);
        }
        Ok(found)
    }

    /// Returns the name of an incompatible feature.
    fn feature(&self, bit: u32) -> String {
        let mut entries = self.features.chunks_exact(FEATURE_BYTES);
        match entries.find(|entry| entry[0] == 0 && u32::from(entry[1]) == bit) {
            Some(entry) => {
                let name = String::from_utf8_lossy(&entry[2..]);
                format!("has the feature {:?}", name.trim_end_matches('\0'))
            }
            None => format!("has the unknown feature {bit}"),
        }
    }
}
