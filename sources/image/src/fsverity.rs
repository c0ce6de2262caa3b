//! Two calls of Linux that have no safe names elsewhere: fs-verity is turned on for a file, and asked for its digest.
#![allow(unsafe_code, reason = "ioctls")]

use std::fs::File;
use std::io;

use rustix::io::Errno;
use rustix::ioctl::{Setter, Updater, ioctl, opcode};

use crate::digest::{Algorithm, DIGEST_BYTES, Digest};

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

/// `FS_IOC_ENABLE_VERITY`.
const FS_IOC_ENABLE_VERITY: rustix::ioctl::Opcode = opcode::write::<Enable>(b'f', 133);

/// Turns fs-verity on for a file that is open for reading, and for writing nowhere: from then on it cannot be changed, and the
/// kernel checks each block. Answers whether the file system can do that.
///
/// # Errors
/// What the system says.
pub(crate) fn enable(file: &File) -> io::Result<bool> {
    // SHA-256 over blocks of 4 KiB.
    let argument = Enable { version: 1, hash_algorithm: 1, block_bytes: 4096, ..Enable::default() };
    // SAFETY: the opcode is the one of FS_IOC_ENABLE_VERITY, which reads a `struct fsverity_enable_arg`; `Enable` is laid out as
    // that is, its pointers are null with lengths of 0, and it lives until the call returns.
    let outcome = unsafe { ioctl(file, Setter::<FS_IOC_ENABLE_VERITY, Enable>::new(argument)) };
    match outcome {
        Ok(()) | Err(Errno::EXIST) => Ok(true),
        Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// `FS_VERITY_HASH_ALG_SHA256`.
const SHA256: u16 = 1;

/// `struct fsverity_digest`, with room for a digest.
#[repr(C)]
struct Measured {
    algorithm: u16,
    /// The room for the digest, and then its length.
    bytes: u16,
    digest: [u8; DIGEST_BYTES],
}

const _: () = assert!(size_of::<Measured>() == 4 + DIGEST_BYTES);

/// `FS_IOC_MEASURE_VERITY`: its number has the length of the head only.
const FS_IOC_MEASURE_VERITY: rustix::ioctl::Opcode = opcode::read_write::<[u16; 2]>(b'f', 134);

/// The digest by which the kernel checks each block of a file, if it does. Whoever reads the file sees bytes of that digest, or EIO.
pub(crate) fn measure(file: &File) -> Option<Digest> {
    let room = u16::try_from(DIGEST_BYTES).ok()?;
    let mut measured = Measured { algorithm: 0, bytes: room, digest: [0; DIGEST_BYTES] };
    // SAFETY: the opcode is the one of FS_IOC_MEASURE_VERITY, which reads a `struct fsverity_digest` and writes it with as many bytes
    // behind it as `bytes` says that there is room for: those of `digest`. `measured` lives until the call returns.
    unsafe { ioctl(file, Updater::<FS_IOC_MEASURE_VERITY, Measured>::new(&mut measured)) }.ok()?;
    let is_ours = measured.algorithm == SHA256 && measured.bytes == room;
    is_ours.then(|| Digest::new(Algorithm::Verity, measured.digest))
}
