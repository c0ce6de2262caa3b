//! Enables and queries fs-verity, for which no crate has safe functions.
#![allow(unsafe_code, reason = "ioctls")]

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;

use rustix::io::Errno;
use rustix::ioctl::{Setter, Updater, ioctl, opcode};

use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};

/// `struct fsverity_enable_arg` of include/uapi/linux/fsverity.h.
#[repr(C)]
#[derive(Default)]
struct Enable {
    version: u32,
    hash_algorithm: u32,
    block_bytes: u32,
    salt_bytes: u32,
    salt: u64,
    signature_bytes: u32,
    reserved: u32,
    signature: u64,
    reserved2: [u64; 11],
}

const _: () = assert!(size_of::<Enable>() == 128);

/// The owner's write permission.
const OWNER_WRITES: u32 = 0o200;

/// `FS_IOC_ENABLE_VERITY`.
const FS_IOC_ENABLE_VERITY: rustix::ioctl::Opcode = opcode::write::<Enable>(b'f', 133);

/// Enables fs-verity for a file that is open for reading, and nowhere for writing: it cannot be changed any more, and
/// the kernel verifies each block. Returns whether the file system supports it.
///
/// # Errors
///
/// The system's.
pub(crate) fn enable(file: &File) -> io::Result<bool> {
    // SHA-256 over blocks of 4 KiB.
    let argument = Enable { version: 1, hash_algorithm: 1, block_bytes: 4096, ..Enable::default() };
    // SAFETY: the opcode is the one of FS_IOC_ENABLE_VERITY, which reads a `struct fsverity_enable_arg`; `Enable` is laid out as
    // that is, its pointers are null with lengths of 0, and it lives until the call returns.
    let outcome = unsafe { ioctl(file, Setter::<FS_IOC_ENABLE_VERITY, Enable>::new(argument)) };
    match outcome {
        Ok(()) | Err(Errno::EXIST) => Ok(true),
        // The last one: blocks of 4 KiB are not supported (before Linux 6.3, with larger pages).
        Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// `FS_VERITY_HASH_ALG_SHA256`.
const SHA256: u16 = 1;

/// `struct fsverity_digest`, with room for a digest.
#[repr(C)]
struct VerityDigest {
    algorithm: u16,
    /// The room for the digest; after the call its length.
    bytes: u16,
    digest: [u8; DIGEST_BYTES],
}

const _: () = assert!(size_of::<VerityDigest>() == 4 + DIGEST_BYTES);

/// The room for a digest, in the kernel's type.
const ROOM_BYTES: u16 = 32;

const _: () = assert!(ROOM_BYTES as usize == DIGEST_BYTES);

/// `FS_IOC_MEASURE_VERITY`: its number contains the size of the header only.
const FS_IOC_MEASURE_VERITY: rustix::ioctl::Opcode = opcode::read_write::<[u16; 2]>(b'f', 134);

/// The type of a FUSE mount (`FUSE_SUPER_MAGIC`), where a program answers such calls, not the kernel.
const FUSE_SUPER_MAGIC: u32 = 0x6573_5546;

/// The state of a file's fs-verity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verity {
    /// The kernel verifies each block on read: readers get bytes of this digest, or EIO.
    On(Digest),
    /// Not enabled, or enabled with another type of digest.
    Off,
    /// The file system or the kernel has no fs-verity.
    Unavailable,
}

/// Queries the kernel for a file's fs-verity.
pub fn verity_of(file: &File) -> Verity {
    let is_fuse = rustix::fs::fstatfs(file)
        .is_ok_and(|found| u32::try_from(found.f_type).is_ok_and(|kind| kind == FUSE_SUPER_MAGIC));
    if is_fuse {
        return Verity::Unavailable;
    }
    let room = ROOM_BYTES;
    let mut measured = VerityDigest { algorithm: 0, bytes: room, digest: [0; DIGEST_BYTES] };
    // SAFETY: the opcode is the one of FS_IOC_MEASURE_VERITY, which reads a `struct fsverity_digest` and writes it with as many bytes
    // behind it as `bytes` says that there is room for: those of `digest`. `measured` lives until the call returns.
    let outcome = unsafe { ioctl(file, Updater::<FS_IOC_MEASURE_VERITY, VerityDigest>::new(&mut measured)) };
    let is_ours = measured.algorithm == SHA256 && measured.bytes == room;
    match outcome {
        Ok(()) if is_ours => Verity::On(Digest::new(Algorithm::Verity, measured.digest)),
        // A longer digest does not fit.
        Ok(()) | Err(Errno::NODATA | Errno::OVERFLOW) => Verity::Off,
        Err(_) => Verity::Unavailable,
    }
}

/// Enables fs-verity for a file if supported; returns its state.
///
/// # Errors
///
/// It cannot be enabled: the file is open for writing (`ETXTBSY`), cannot be read, or has another owner.
pub(crate) fn enable_if_supported(file: &File) -> io::Result<Verity> {
    let found = verity_of(file);
    if found != Verity::Off {
        return Ok(found);
    }
    match enable(file) {
        // Files of a store are read-only, but users other than root need write permission for this call.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let before = file.metadata()?.permissions();
            file.set_permissions(Permissions::from_mode(before.mode() | OWNER_WRITES))?;
            let outcome = enable(file);
            file.set_permissions(before)?;
            outcome?
        }
        outcome => outcome?,
    };
    Ok(verity_of(file))
}

/// Returns the digest by which the kernel verifies a file, if it does.
pub(crate) fn measure(file: &File) -> Option<Digest> {
    match verity_of(file) {
        Verity::On(digest) => Some(digest),
        Verity::Off | Verity::Unavailable => None,
    }
}
