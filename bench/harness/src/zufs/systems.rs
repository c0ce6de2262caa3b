//! The file systems that are measured, ours and the peers.

use crate::line::FERRY;

/// What a server does with data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Files {
    /// Writes go nowhere, reads give zeros.
    Null,
    /// Memory.
    Mem,
}

/// How requests reach our server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// FUSE-over-io_uring.
    Uring,
    /// /dev/fuse.
    Devfuse,
    /// The kernel reads data from the backing file itself.
    Passthrough,
}

/// How requests reach libfuse's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flavour {
    /// /dev/fuse, read and written.
    Plain,
    /// /dev/fuse, spliced.
    Splice,
    /// FUSE-over-io_uring.
    Uring,
    /// The kernel reads data from the backing file itself.
    Passthrough,
}

/// A file system to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Ours.
    Ferry(Files, Way),
    /// Ours, with everything cached for as long as the kernel likes.
    FerryCached,
    /// Ours in persistent memory, through the ring (in a guest, where there is some): its files are no files of the host
    /// that the kernel could pass through to.
    FerryPmem,
    /// libfuse's.
    Libfuse(Files, Flavour),
    /// The ceiling: the kernel's own memory file system.
    Tmpfs,
    /// XFS on persistent memory (in a guest).
    XfsDax,
}

/// Those of the write and read rows, in the order in which they take turns.
pub const DATA: [System; 13] = [
    System::Ferry(Files::Null, Way::Uring),
    System::Libfuse(Files::Null, Flavour::Plain),
    System::Ferry(Files::Null, Way::Devfuse),
    System::Libfuse(Files::Null, Flavour::Splice),
    System::Ferry(Files::Mem, Way::Uring),
    System::Libfuse(Files::Null, Flavour::Uring),
    System::Ferry(Files::Mem, Way::Devfuse),
    System::Libfuse(Files::Mem, Flavour::Plain),
    System::Ferry(Files::Mem, Way::Passthrough),
    System::Libfuse(Files::Mem, Flavour::Passthrough),
    System::Tmpfs,
    System::Libfuse(Files::Mem, Flavour::Splice),
    System::Libfuse(Files::Mem, Flavour::Uring),
];

/// Those of the rows about names: splice and passthrough are about data.
pub const NAMES: [System; 5] = [
    System::Ferry(Files::Mem, Way::Uring),
    System::Libfuse(Files::Mem, Flavour::Plain),
    System::Ferry(Files::Mem, Way::Devfuse),
    System::Libfuse(Files::Mem, Flavour::Uring),
    System::Tmpfs,
];

/// Those of the cached `stat`.
pub const CACHED: [System; 3] = [System::FerryCached, System::Tmpfs, System::Libfuse(Files::Mem, Flavour::Plain)];

/// Those in the guest.
pub const GUEST: [System; 6] = [
    System::Ferry(Files::Mem, Way::Uring),
    System::XfsDax,
    System::Ferry(Files::Mem, Way::Devfuse),
    System::FerryPmem,
    System::Tmpfs,
    System::Ferry(Files::Mem, Way::Passthrough),
];

impl System {
    /// Whether it is ours.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Ferry(..) | Self::FerryCached | Self::FerryPmem)
    }

    /// Whether it keeps what is written.
    pub fn keeps_data(self) -> bool {
        !matches!(self, Self::Ferry(Files::Null, _) | Self::Libfuse(Files::Null, _))
    }

    /// Of ours: the configuration's name in the results. Of a peer: its name there.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferry(Files::Null, Way::Uring) => "null uring",
            Self::Ferry(Files::Null, Way::Devfuse) => "null devfuse",
            Self::Ferry(Files::Null, Way::Passthrough) => "null passthrough",
            Self::Ferry(Files::Mem, Way::Uring) => "mem uring",
            Self::Ferry(Files::Mem, Way::Devfuse) => "mem devfuse",
            Self::Ferry(Files::Mem, Way::Passthrough) => "mem passthrough",
            Self::FerryCached => "mem cache-always",
            Self::FerryPmem => "pmem uring",
            Self::Libfuse(_, Flavour::Plain) => "libfuse",
            Self::Libfuse(_, Flavour::Splice) => "libfuse-splice",
            Self::Libfuse(_, Flavour::Uring) => "libfuse-uring",
            Self::Libfuse(_, Flavour::Passthrough) => "libfuse-passthrough",
            Self::Tmpfs => "tmpfs",
            Self::XfsDax => "xfs-dax",
        }
    }

    /// A name that no other system has: for directories, and where all stand in one list.
    pub fn full_name(self) -> String {
        match self {
            Self::Libfuse(Files::Null, _) => format!("{} null", self.name()),
            Self::Libfuse(Files::Mem, _) => format!("{} mem", self.name()),
            system if system.is_ours() => format!("{FERRY} {}", system.name()),
            _ => self.name().into(),
        }
    }

    /// What a line of ours calls `peer`, if it is compared with it: what does the same work, and the baselines.
    pub fn calls(self, peer: Self) -> Option<String> {
        let same_files = |files| match self {
            Self::Ferry(ours, _) => ours == files,
            Self::FerryCached => files == Files::Mem,
            _ => false,
        };
        match (self, peer) {
            // Passed through, data reach no server: that is compared with the same alone.
            (Self::Ferry(Files::Mem, Way::Passthrough), Self::Libfuse(Files::Mem, Flavour::Passthrough)) => {
                Some(peer.name().into())
            }
            (Self::Ferry(_, Way::Passthrough), Self::Libfuse(..)) | (_, Self::Libfuse(_, Flavour::Passthrough)) => None,
            (_, Self::Libfuse(files, _)) => same_files(files).then(|| peer.name().into()),
            (Self::Ferry(Files::Null, _), Self::Tmpfs) => None,
            (_, Self::Tmpfs | Self::XfsDax) => Some(peer.name().into()),
            // What memory costs beside the way there.
            (Self::Ferry(Files::Mem, ours), Self::Ferry(Files::Null, way)) => {
                (ours == way).then(|| format!("{FERRY}-{}", peer.name()))
            }
            _ => None,
        }
    }

    /// How often the bytes of a write are copied, by construction: the kernel's copies, then the server's.
    pub fn copies_per_byte(self) -> &'static str {
        match self {
            Self::Libfuse(Files::Null, Flavour::Splice) => "0 (pages pass through a pipe)",
            Self::Ferry(Files::Null, _) | Self::Libfuse(Files::Null, _) => "1 (kernel to server)",
            Self::Libfuse(Files::Mem, Flavour::Splice) => "1 (pipe to file)",
            Self::Ferry(Files::Mem, Way::Passthrough) | Self::Libfuse(Files::Mem, Flavour::Passthrough) => {
                "1 (program to file, in the kernel)"
            }
            Self::Ferry(..) | Self::FerryCached | Self::FerryPmem | Self::Libfuse(..) => {
                "2 (kernel to server, server to file)"
            }
            Self::Tmpfs | Self::XfsDax => "1 (program to file)",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for systems in [&DATA[..], &NAMES, &CACHED, &GUEST] {
            let mut names: Vec<_> = systems.iter().map(|system| system.full_name()).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), systems.len());
        }
    }

    #[test]
    fn ferry_is_compared_with_equivalent_systems() {
        let peers = |ours: System| DATA.iter().filter_map(|&peer| ours.calls(peer)).collect::<Vec<_>>();
        assert_eq!(peers(System::Ferry(Files::Null, Way::Uring)), ["libfuse", "libfuse-splice", "libfuse-uring"]);
        assert_eq!(
            peers(System::Ferry(Files::Mem, Way::Devfuse)),
            ["ferry-null devfuse", "libfuse", "tmpfs", "libfuse-splice", "libfuse-uring"]
        );
        assert_eq!(peers(System::Ferry(Files::Mem, Way::Passthrough)), ["libfuse-passthrough", "tmpfs"]);
    }
}
