//! FUSE_INIT: negotiation at the start of a session.

use ferry_vfs::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::abi::{self, InitFlags, InitIn, InitInShort, InitOut};
use crate::body::{Body, FieldError, ensure};

/// The client's offer (FUSE protocol 7.45, `fuse_init_in`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitRequest {
    /// Major version. If it is not [`abi::MAJOR`], only `major` and `minor` are valid.
    pub major: u32,
    /// Minor version. If it is below [`abi::MINOR_MIN`], only `major` and `minor` are valid.
    pub minor: u32,
    /// The maximum read-ahead in bytes.
    pub max_readahead_bytes: u32,
    /// Features of the client.
    pub flags: InitFlags,
}

/// The server's preferences for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitOptions {
    /// Features to accept if the client offers them. [`InitFlags::INIT_EXT`] and [`InitFlags::MAX_PAGES`] are always
    /// accepted.
    pub flags: InitFlags,
    /// Maximum payload of a WRITE in bytes, up to [`WRITE_BYTES_MAX`], and (through `max_pages`) of a READ. Linux reduces it to its own limit and,
    /// over virtio-fs, to the queue size.
    pub max_write_bytes: u32,
    /// The client's page size in bytes, the unit of `max_pages`. If it is larger, READs may be longer than
    /// `max_write_bytes`.
    pub page_bytes: u32,
    /// Maximum read-ahead in bytes; the client's own limit applies if it is less.
    pub max_readahead_bytes: u32,
    /// Maximum number of concurrent background requests (read-ahead, write-back).
    pub max_background: u16,
    /// Number of background requests at which the client is congested; 0: three quarters of the maximum.
    pub congestion_threshold: u16,
    /// Granularity of times.
    pub time_gran_ns: u32,
    /// log2 of the alignment of DAX mappings, with [`InitFlags::MAP_ALIGNMENT`].
    pub map_alignment_log2: u16,
    /// Maximum depth of stacked backing files, with [`InitFlags::PASSTHROUGH`].
    pub max_stack_depth: u32,
    /// Request timeout of the client in seconds, with [`InitFlags::REQUEST_TIMEOUT`].
    pub request_timeout_s: u16,
}

impl Default for InitOptions {
    /// Returns options without flags, with requests of [`WRITE_BYTES_MAX`].
    fn default() -> Self {
        Self {
            flags: InitFlags::empty(),
            max_write_bytes: WRITE_BYTES_MAX,
            page_bytes: PAGE_BYTES,
            max_readahead_bytes: 1 << 20,
            max_background: 64,
            congestion_threshold: 0,
            time_gran_ns: 1,
            map_alignment_log2: 12,
            max_stack_depth: 1,
            request_timeout_s: 0,
        }
    }
}

/// The outcome of the negotiation, which determines how requests and replies are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Minor version, the lower of the two.
    pub minor: u32,
    /// Features that both sides support.
    pub flags: InitFlags,
    /// Maximum payload of a WRITE, in bytes.
    pub max_write_bytes: u32,
    /// The maximum read-ahead in bytes.
    pub max_readahead_bytes: u32,
}

impl Negotiated {
    /// Used for requests before INIT; only INIT itself is served with it.
    pub const BEFORE_INIT: Self = Self {
        minor: abi::MINOR_MAX,
        flags: InitFlags::empty(),
        max_write_bytes: MAX_WRITE_BYTES_WITHOUT_MAX_PAGES,
        max_readahead_bytes: 0,
    };

    /// Returns the maximum size of a READ, a listing, or the output of an ioctl, in bytes. It allows for as many pages
    /// as a WRITE has, in the largest page size of Linux, and for reads that the kernel does for its own use.
    pub const fn max_read_bytes(&self) -> u32 {
        let bytes = self.max_write_bytes.div_ceil(PAGE_BYTES).saturating_mul(PAGE_BYTES_MAX);
        if bytes > KERNEL_READ_BYTES_MAX { bytes } else { KERNEL_READ_BYTES_MAX }
    }

    /// Returns whether all of these flags were negotiated.
    pub const fn has(&self, flags: InitFlags) -> bool {
        self.flags.contains(flags)
    }
}

/// The outcome of [`negotiate`]. In both cases [`super::Reply::Init`] sends the structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitOutcome {
    /// The session begins.
    Ready(Negotiated, InitOut),
    /// The client's major version is newer. It reads the server's version and sends another INIT.
    Retry(InitOut),
}

/// A client that is too old; the reply to INIT is `EPROTO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client speaks FUSE {major}.{minor}, older than {}.{}", abi::MAJOR, abi::MINOR_MIN)]
pub struct InitError {
    /// The client's major version.
    pub major: u32,
    /// The client's minor version.
    pub minor: u32,
}

impl InitError {
    /// The error number of the reply.
    pub const ERRNO: Errno = Errno::PROTO;
}

/// The maximum payload of a WRITE in bytes: the default limit of Linux (`fs.fuse.max_pages_limit`).
pub const WRITE_BYTES_MAX: u32 = 1 << 20;

/// A page, as a unit of `max_pages`. With larger pages in the guest `max_pages` allows more than needed, but
/// `max_write` still limits the size.
const PAGE_BYTES: u32 = 4096;
/// The largest page size in common builds of Linux (arm64, ppc64).
const PAGE_BYTES_MAX: u32 = 64 << 10;
/// Before 6.13 Linux reads files such as kernel modules past its page cache into its own memory. It ignores `max_pages`
/// then, up to the largest allocation (`KMALLOC_MAX_SIZE`).
const KERNEL_READ_BYTES_MAX: u32 = 4 << 20;
/// The maximum size of a request without `max_pages`, in bytes (Linux `FUSE_DEFAULT_MAX_PAGES_PER_REQ`).
const MAX_WRITE_BYTES_WITHOUT_MAX_PAGES: u32 = 32 * PAGE_BYTES;

/// Negotiates a session from an INIT request (FUSE protocol 7.45, "Version negotiation").
///
/// # Errors
///
/// [`InitError`] if the client is older than [`abi::MINOR_MIN`].
pub fn negotiate(request: &InitRequest, wanted: &InitOptions) -> Result<InitOutcome, InitError> {
    if request.major > abi::MAJOR {
        return Ok(InitOutcome::Retry(InitOut { major: abi::MAJOR, minor: abi::MINOR_MAX, ..InitOut::ZERO }));
    }
    if request.major < abi::MAJOR || request.minor < abi::MINOR_MIN {
        return Err(InitError { major: request.major, minor: request.minor });
    }
    let flags = (wanted.flags | InitFlags::INIT_EXT | InitFlags::MAX_PAGES) & request.flags;
    let has = |flag| flags.contains(flag);
    let max_write_bytes = match has(InitFlags::MAX_PAGES) {
        true => wanted.max_write_bytes.clamp(PAGE_BYTES, WRITE_BYTES_MAX),
        false => wanted.max_write_bytes.clamp(PAGE_BYTES, MAX_WRITE_BYTES_WITHOUT_MAX_PAGES),
    };
    let max_pages = u16::try_from(max_write_bytes.div_ceil(wanted.page_bytes.max(PAGE_BYTES))).unwrap_or(u16::MAX);
    let congestion_threshold = match wanted.congestion_threshold {
        0 => wanted.max_background / 4 * 3 + wanted.max_background % 4 * 3 / 4,
        threshold => threshold,
    };
    let agreed = Negotiated {
        minor: request.minor.min(abi::MINOR_MAX),
        flags,
        max_write_bytes,
        max_readahead_bytes: wanted.max_readahead_bytes.min(request.max_readahead_bytes),
    };
    let (low, high) = halves(flags);
    let reply = InitOut {
        major: abi::MAJOR,
        minor: agreed.minor,
        max_readahead: agreed.max_readahead_bytes,
        flags: low,
        max_background: wanted.max_background,
        congestion_threshold,
        max_write: max_write_bytes,
        time_gran: wanted.time_gran_ns.clamp(1, 1_000_000_000),
        max_pages: if has(InitFlags::MAX_PAGES) { max_pages } else { 0 },
        map_alignment: if has(InitFlags::MAP_ALIGNMENT) { wanted.map_alignment_log2 } else { 0 },
        flags2: high,
        max_stack_depth: if has(InitFlags::PASSTHROUGH) { wanted.max_stack_depth } else { 0 },
        request_timeout: if has(InitFlags::REQUEST_TIMEOUT) { wanted.request_timeout_s } else { 0 },
        unused: [0; 11],
    };
    Ok(InitOutcome::Ready(agreed, reply))
}

fn combine(low: u32, high: u32) -> InitFlags {
    let low = InitFlags::from_bits_retain(u64::from(low));
    if low.contains(InitFlags::INIT_EXT) { low | InitFlags::from_bits_retain(u64::from(high) << 32) } else { low }
}

/// Returns `flags` and `flags2` of the wire; the latter is zero without [`InitFlags::INIT_EXT`].
fn halves(flags: InitFlags) -> (u32, u32) {
    let [low, high]: [u32; 2] = zerocopy::transmute!(flags.bits());
    (low, if flags.contains(InitFlags::INIT_EXT) { high } else { 0 })
}

impl InitRequest {
    /// Clients before 7.36 send 16 bytes, later ones 64 (FUSE protocol 7.36, `fuse_init_in`). Newer clients may send
    /// more. A client of another major version may send anything.
    pub(super) fn decode(mut body: Body<'_>) -> Result<Self, FieldError> {
        let [major, minor]: [u32; 2] = Body(body.0).take()?;
        if major != abi::MAJOR || minor < abi::MINOR_MIN {
            return Ok(Self { major, minor, max_readahead_bytes: 0, flags: InitFlags::empty() });
        }
        const LONG: usize = size_of::<InitIn>();
        let (fixed, flags2) = match body.0.len() {
            0..LONG => (body.only::<InitInShort>()?, 0),
            _ => {
                let long: InitIn = body.take()?;
                ensure(body.0.is_empty() || minor > abi::MINOR_MAX, "bytes after its fields")?;
                let (short, _) =
                    InitInShort::read_from_prefix(long.as_bytes()).expect("the long form begins as the short");
                (short, long.flags2)
            }
        };
        let flags = combine(fixed.flags, flags2);
        Ok(Self { major, minor, max_readahead_bytes: fixed.max_readahead, flags })
    }
}
