//! One call of Linux that has no safe name elsewhere: fs-verity is turned on for a file.
#![allow(unsafe_code, reason = "an ioctl")]

use std::fs::File;
use std::io;

use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl, opcode};

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
