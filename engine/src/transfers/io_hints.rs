//! Properties of a file that are remembered between its transfers ([`Backing::io_hints`]).

use std::os::fd::AsFd;

use ferry_vfs::Backing;

/// Reads can be tried without waiting.
pub const READ_TRIES: u8 = 1;
/// Reads cannot be tried (tmpfs). io_uring would pass each to a kernel thread; a plain call is faster.
pub const READ_CANNOT_TRY: u8 = 2;
/// Writes cannot be tried (buffered ext4, tmpfs), as for reads.
pub const WRITE_CANNOT_TRY: u8 = 4;
/// The file is in memory: no transfer waits.
pub const IN_MEMORY: u8 = 8;
/// Another machine or process serves the file: any transfer may take long.
pub const REMOTE: u8 = 16;
/// [`IN_MEMORY`] and [`REMOTE`] are valid.
pub const PROBED: u8 = 32;
/// Writes can be tried without waiting (buffered xfs and block devices).
pub const WRITE_TRIES: u8 = 64;

/// File systems in memory (`statfs(2)`, `f_type`): tmpfs and memfds, ramfs, huge pages.
const MEMORY_FILE_SYSTEMS: [i64; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// File systems served by another process or machine: FUSE, NFS, 9P, two of CIFS, Ceph and AFS.
const REMOTE_FILE_SYSTEMS: [i64; 7] =
    [0x6573_5546, 0x6969, 0x0102_1997, 0xff53_4d42, 0xfe53_4d42, 0x00c3_6400, 0x5346_414f];

/// Returns the hints of a file with the location probed. The first call costs one `fstatfs`.
pub fn with_place(file: &Backing) -> u8 {
    let known = file.io_hints();
    if known & PROBED != 0 {
        return known;
    }
    let place = place(file);
    file.add_io_hints(place | PROBED);
    known | place | PROBED
}

/// Returns whether another machine or process serves the file.
pub fn is_remote(file: impl AsFd) -> bool {
    place(file) == REMOTE
}

fn place(file: impl AsFd) -> u8 {
    rustix::fs::fstatfs(file).map_or(0, |found| {
        #[allow(clippy::unnecessary_cast, clippy::cast_lossless, reason = "its type differs between machines")]
        let kind = found.f_type as i64;
        match kind {
            _ if MEMORY_FILE_SYSTEMS.contains(&kind) => IN_MEMORY,
            _ if REMOTE_FILE_SYSTEMS.contains(&kind) => REMOTE,
            _ => 0,
        }
    })
}
