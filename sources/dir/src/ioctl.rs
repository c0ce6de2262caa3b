//! The file flags and extended flags of inodes, the only ioctls that reach the host.
//!
//! | ioctl | allowed for |
//! | --- | --- |
//! | `FS_IOC_GETFLAGS`, `FS_IOC_FSGETXATTR` | everyone who has the file open |
//! | `FS_IOC_SETFLAGS`, `FS_IOC_FSSETXATTR` | the file's owner and user 0, also through a read-only descriptor |
//! | the same, if they change immutable, append-only or ext4's data journal | user 0 |
//! | the same, if they change the project id or whether it is inherited | nobody: quotas of the host go by them |
//!
//! These are Linux's rules (`vfs_fileattr_set`). The client's kernel applies them only since Linux 5.13, and not to the
//! numbers of 32-bit programs (`FS_IOC32_*`) in a 64-bit program. So this module refuses those numbers and checks the
//! rules again. A caller whose user is unknown (`u32::MAX`) owns nothing.

use std::os::fd::AsFd;

use ferry_vfs::{Caller, Errno, Handle, Ino, Result, SessionId};

use crate::Dir;
use crate::io::Open;
use crate::resolve::statx;
use crate::sys::{self, FileIoctl, IOCTL_BYTES_MAX};

/// The commands by number (64 bits). The kernel takes an `int` for the flags, although the numbers say `long`.
const COMMANDS: [(u32, FileIoctl); 4] = [
    (0x8008_6601, FileIoctl::GetFlags),
    (0x4008_6602, FileIoctl::SetFlags),
    (0x801c_581f, FileIoctl::GetXflags),
    (0x401c_5820, FileIoctl::SetXflags),
];

/// `struct fsxattr`, and where its `fsx_projid` is.
const FSXATTR_BYTES: usize = 28;
const PROJECT_AT: usize = 12;

/// `FS_IMMUTABLE_FL`, `FS_APPEND_FL` (`CAP_LINUX_IMMUTABLE`), `FS_JOURNAL_DATA_FL` (`CAP_SYS_RESOURCE`).
const ROOT_FLAGS: u32 = 0x10 | 0x20 | 0x4000;
/// `FS_XFLAG_IMMUTABLE`, `FS_XFLAG_APPEND`.
const ROOT_XFLAGS: u32 = 0x8 | 0x10;
/// `FS_PROJINHERIT_FL`, `FS_XFLAG_PROJINHERIT`.
const PROJECT_FLAG: u32 = 0x2000_0000;
const PROJECT_XFLAG: u32 = 0x200;

type Argument = [u64; IOCTL_BYTES_MAX / 8];

impl Dir {
    pub(crate) fn ioctl(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        command: u32,
        input: &[u8],
        out_bytes_max: usize,
    ) -> Result<Vec<u8>> {
        let (_, known) = COMMANDS.iter().find(|(number, _)| *number == command).ok_or(Errno::NOTTY)?;
        let open = self.handles.get(cx.session, ino, handle)?;
        let fits = |bytes| match known {
            FileIoctl::GetFlags | FileIoctl::SetFlags => matches!(bytes, 4 | 8),
            FileIoctl::GetXflags | FileIoctl::SetXflags => bytes == FSXATTR_BYTES,
        };
        let mut argument = Argument::default();
        match known {
            FileIoctl::SetFlags | FileIoctl::SetXflags => {
                let _operation = self.writable()?;
                if !fits(input.len()) {
                    return Err(Errno::INVAL);
                }
                fill(&mut argument, input);
                may_set(cx, &open, *known, &argument)?;
                // The host's kernel applies the same rules at the moment of the change.
                let _guard = self.creds.enter(cx)?;
                sys::file_ioctl(open.file.as_fd(), *known, &mut argument)?;
                // Published to the calling client, too, because its kernel caches the change time.
                self.attr_changed(SessionId::default(), &open.inode);
                Ok(Vec::new())
            }
            FileIoctl::GetFlags | FileIoctl::GetXflags => {
                if !fits(out_bytes_max) {
                    return Err(Errno::INVAL);
                }
                sys::file_ioctl(open.file.as_fd(), *known, &mut argument)?;
                let bytes = argument.iter().flat_map(|word| word.to_ne_bytes());
                Ok(bytes.take(out_bytes_max).collect())
            }
        }
    }
}

/// Returns whether the caller may set these flags; see the module.
fn may_set(cx: &Caller<'_>, open: &Open, command: FileIoctl, argument: &Argument) -> Result<()> {
    if cx.uid != 0 && statx(open.file.as_fd(), b"")?.stx_uid != cx.uid {
        return Err(Errno::PERM);
    }
    let (read, root_only, of_projects) = match command {
        FileIoctl::SetXflags => (FileIoctl::GetXflags, ROOT_XFLAGS, PROJECT_XFLAG),
        _ => (FileIoctl::GetFlags, ROOT_FLAGS, PROJECT_FLAG),
    };
    let mut now = Argument::default();
    sys::file_ioctl(open.file.as_fd(), read, &mut now)?;
    let changed = flags(&now) ^ flags(argument);
    // As Linux outside of the initial user namespace.
    let moves = matches!(command, FileIoctl::SetXflags) && project(&now) != project(argument);
    match () {
        () if moves || changed & of_projects != 0 => Err(Errno::INVAL),
        () if cx.uid != 0 && changed & root_only != 0 => Err(Errno::PERM),
        () => Ok(()),
    }
}

/// Returns the project id of a `struct fsxattr`.
fn project(argument: &Argument) -> u32 {
    let bytes: Vec<u8> = argument.iter().flat_map(|word| word.to_ne_bytes()).skip(PROJECT_AT).take(4).collect();
    bytes.try_into().map_or(0, u32::from_ne_bytes)
}

/// Returns the flags: the first 32 bits of either argument.
fn flags(argument: &Argument) -> u32 {
    let [b0, b1, b2, b3, ..] = argument[0].to_ne_bytes();
    u32::from_ne_bytes([b0, b1, b2, b3])
}

fn fill(argument: &mut Argument, input: &[u8]) {
    for (word, chunk) in argument.iter_mut().zip(input.chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_ne_bytes(bytes);
    }
}
