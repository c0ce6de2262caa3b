//! Keys of the inode table.

use ferry_vfs::{Errno, FileType, Result};
use ferry_wire::ninep::{Getattr, QidKind};

/// Identifies a file of a server. Those with one path are next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) path: u64,
    pub(crate) generation: u64,
    pub(crate) kind: u32,
    /// Distinguishes files of different file systems with the same number, for servers that leave out the device.
    pub(crate) twin: u32,
}

impl Key {
    /// Returns the key of a file with these attributes. A qid whose type differs from the mode is invalid.
    pub(crate) fn of(found: &Getattr) -> Result<Self> {
        let kind = found.attr.kind();
        if kind == FileType::Unknown || (found.qid.kind == QidKind::DIR) != (kind == FileType::Directory) {
            return Err(Errno::IO);
        }
        Ok(Self { path: found.qid.path, generation: found.generation, kind: kind.as_raw_mode(), twin: 0 })
    }

    /// Returns the number of the file that users see, which differs from that of its twins: `find` takes a directory with the
    /// number of one above for a loop.
    pub(crate) fn shown(self) -> u64 {
        match self.twin {
            0 => self.path,
            twin => self.path ^ (1 << 63 | u64::from(twin) << 40),
        }
    }
}
