//! The file flags and extended flags of inodes: the only ioctls that reach the host.

use std::os::fd::AsFd;

use ferry_vfs::{Caller, Errno, Handle, Ino, Result};

use crate::Dir;
use crate::sys::{self, FileIoctl, IOCTL_BYTES_MAX};

/// The commands, as a 64-bit and as a 32-bit caller writes them. The kernel takes an `int` for both, though the
/// number of the 64-bit command says `long`.
const COMMANDS: [(u32, FileIoctl); 6] = [
    (0x8008_6601, FileIoctl::GetFlags),
    (0x8004_6601, FileIoctl::GetFlags),
    (0x4008_6602, FileIoctl::SetFlags),
    (0x4004_6602, FileIoctl::SetFlags),
    (0x801c_581f, FileIoctl::GetXflags),
    (0x401c_5820, FileIoctl::SetXflags),
];

/// `struct fsxattr`.
const FSXATTR_BYTES: usize = 28;

impl Dir {
    pub(crate) fn ioctl_(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        command: u32,
        input: &[u8],
        out_bytes_max: usize,
    ) -> Result<Vec<u8>> {
        let (_, known) = COMMANDS.iter().find(|(number, _)| *number == command).ok_or(Errno::NOTTY)?;
        let open = self.handles.get(cx.session, ino, handle)?;
        let mut argument = [0u64; IOCTL_BYTES_MAX / 8];
        match known {
            FileIoctl::SetFlags | FileIoctl::SetXflags => {
                self.writable()?;
                let fits = match known {
                    FileIoctl::SetFlags => matches!(input.len(), 4 | 8),
                    _ => input.len() == FSXATTR_BYTES,
                };
                if !fits {
                    return Err(Errno::INVAL);
                }
                fill(&mut argument, input);
                sys::file_ioctl(open.file.as_fd(), *known, &mut argument)?;
                self.attr_changed(cx.session, &open.inode);
                Ok(Vec::new())
            }
            FileIoctl::GetFlags | FileIoctl::GetXflags => {
                let fits = match known {
                    FileIoctl::GetFlags => matches!(out_bytes_max, 4 | 8),
                    _ => out_bytes_max == FSXATTR_BYTES,
                };
                if !fits {
                    return Err(Errno::INVAL);
                }
                sys::file_ioctl(open.file.as_fd(), *known, &mut argument)?;
                let bytes = argument.iter().flat_map(|word| word.to_ne_bytes());
                Ok(bytes.take(out_bytes_max).collect())
            }
        }
    }
}

fn fill(argument: &mut [u64], input: &[u8]) {
    for (word, chunk) in argument.iter_mut().zip(input.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(bytes);
    }
}
