//! The measured ways to a tree, of ferry and its peers.

use crate::line::FERRY;

/// What an EROFS image is mounted from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Device {
    /// The file itself.
    File,
    /// A loop device.
    Loop,
}

/// Whether the metadata is read, one piece after the other, before the mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Prefetch {
    /// Left to the kernel.
    No,
    /// All of it, as `ferry image mount` does.
    Yes,
}

/// A mounted tree to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// `ferry image mount`: the kernel's EROFS on our image.
    Ferry,
    /// The same on an image that was built by a trace of what is read.
    FerryOrdered,
    /// `ferry mount image:`: our FUSE export.
    FerryFuse,
    /// `ferry image mount` of an image in composefs's layout: EROFS and overlayfs.
    FerryComposefs,
    /// The same image by our FUSE export.
    FerryComposefsFuse,
    /// mount.composefs: EROFS and overlayfs.
    Composefs(Prefetch),
    /// The composefs image and overlayfs by hand, to choose what the image is mounted from.
    Overlay(Device),
    /// One image with metadata and data, by mkfs.erofs.
    Full(Device),
    /// Metadata with an index of chunks, and a blob with the data, by mkfs.erofs.
    Blob(Device, Prefetch),
    /// Our virtio-fs device in a guest.
    FerryGuest,
    /// virtiofsd in front of mount.composefs, in a guest.
    ComposefsGuest,
    /// virtiofsd in front of the EROFS image with a blob, in a guest.
    BlobGuest,
    /// No image: the tree on the disk's own file system.
    Bare,
}

/// Those that are walked, in the order in which they take turns.
pub const WALKED: [System; 14] = [
    System::Ferry,
    System::Composefs(Prefetch::No),
    System::Blob(Device::File, Prefetch::No),
    System::FerryFuse,
    System::FerryComposefs,
    System::FerryComposefsFuse,
    System::Overlay(Device::File),
    System::Full(Device::File),
    System::Composefs(Prefetch::Yes),
    System::Blob(Device::File, Prefetch::Yes),
    System::Overlay(Device::Loop),
    System::Full(Device::Loop),
    System::Blob(Device::Loop, Prefetch::No),
    System::Bare,
];

/// Those that are walked in a guest.
pub const GUESTS: [System; 3] = [System::FerryGuest, System::ComposefsGuest, System::BlobGuest];

/// Those that a large file is read from.
pub const READ: [System; 3] = [System::FerryFuse, System::Bare, System::Ferry];

/// Those that a program is started from.
pub const STARTED: [System; 6] = [
    System::Ferry,
    System::FerryOrdered,
    System::Composefs(Prefetch::No),
    System::FerryFuse,
    System::Blob(Device::File, Prefetch::Yes),
    System::Bare,
];

/// A program that makes an image of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Builder {
    /// `ferry image build`.
    Ferry,
    /// The same with `--order-from`.
    FerryOrdered,
    /// The same with `--verity`.
    FerryVerity,
    /// The same with `--layout composefs`.
    FerryComposefs,
    /// mkcomposefs with an object store.
    Composefs,
    /// mkfs.erofs, one image with all.
    Full,
    /// mkfs.erofs with a blob.
    Blob,
}

/// All of them, in turn.
pub const BUILDERS: [Builder; 6] =
    [Builder::Ferry, Builder::FerryVerity, Builder::FerryComposefs, Builder::Composefs, Builder::Blob, Builder::Full];

impl System {
    /// Whether it is ours.
    pub fn is_ours(self) -> bool {
        let flat = matches!(self, Self::Ferry | Self::FerryOrdered | Self::FerryFuse | Self::FerryGuest);
        flat || matches!(self, Self::FerryComposefs | Self::FerryComposefsFuse)
    }

    /// Of ours: the configuration's name in the results. Of a peer: its name there.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferry => "flat",
            Self::FerryOrdered => "flat ordered",
            Self::FerryFuse => "flat fuse",
            Self::FerryComposefs => "composefs layout",
            Self::FerryComposefsFuse => "composefs layout fuse",
            Self::Composefs(Prefetch::No) => "composefs",
            Self::Composefs(Prefetch::Yes) => "composefs-ahead",
            Self::Overlay(Device::File) => "erofs-overlay",
            Self::Overlay(Device::Loop) => "erofs-overlay-loop",
            Self::Full(Device::File) => "erofs-full",
            Self::Full(Device::Loop) => "erofs-full-loop",
            Self::Blob(Device::File, Prefetch::No) => "erofs-blob",
            Self::Blob(Device::File, Prefetch::Yes) => "erofs-blob-ahead",
            Self::Blob(Device::Loop, Prefetch::No) => "erofs-blob-loop",
            Self::Blob(Device::Loop, Prefetch::Yes) => "erofs-blob-loop-ahead",
            Self::FerryGuest => "flat virtiofs",
            Self::ComposefsGuest => "virtiofsd-composefs",
            Self::BlobGuest => "virtiofsd-erofs-blob",
            Self::Bare => "bare",
        }
    }

    /// What a line of ours calls `peer`: our FUSE export and the image that was built by a trace are compared with our image in the
    /// kernel, too. Ours in composefs's layout is the same image as composefs's, and compared with that alone.
    pub fn calls(self, peer: Self) -> Option<String> {
        match (self, peer) {
            (Self::FerryFuse | Self::FerryOrdered, Self::Ferry) => Some(format!("{FERRY}-{}", peer.name())),
            (Self::FerryComposefs | Self::FerryComposefsFuse, peer) => {
                (peer == Self::Bare || peer.builder() == Some(Builder::Composefs)).then(|| peer.name().into())
            }
            (ours, peer) if ours.is_ours() && !peer.is_ours() => Some(peer.name().into()),
            _ => None,
        }
    }

    /// In a guest: what virtiofsd serves. Our device needs no mount.
    pub fn served(self) -> Option<Self> {
        match self {
            Self::ComposefsGuest => Some(Self::Composefs(Prefetch::No)),
            Self::BlobGuest => Some(Self::Blob(Device::File, Prefetch::No)),
            _ => None,
        }
    }

    /// Whose image it mounts; none of the bare tree.
    pub fn builder(self) -> Option<Builder> {
        match self {
            Self::Ferry | Self::FerryFuse | Self::FerryGuest => Some(Builder::Ferry),
            Self::FerryOrdered => Some(Builder::FerryOrdered),
            Self::FerryComposefs | Self::FerryComposefsFuse => Some(Builder::FerryComposefs),
            Self::Composefs(_) | Self::Overlay(_) | Self::ComposefsGuest => Some(Builder::Composefs),
            Self::Full(_) => Some(Builder::Full),
            Self::Blob(..) | Self::BlobGuest => Some(Builder::Blob),
            Self::Bare => None,
        }
    }
}

impl Builder {
    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferry => FERRY,
            Self::FerryOrdered => "ferry-ordered",
            Self::FerryVerity => "ferry-verity",
            Self::FerryComposefs => "ferry-composefs",
            Self::Composefs => "composefs",
            Self::Full => "erofs-full",
            Self::Blob => "erofs-blob",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_compared_with_all_others() {
        let peers = |ours: System| WALKED.iter().filter_map(|&peer| ours.calls(peer)).collect::<Vec<_>>();
        assert_eq!(peers(System::Ferry).len(), WALKED.len() - 4);
        assert_eq!(peers(System::FerryFuse)[0], "ferry-flat");
        assert_eq!(peers(System::FerryFuse).len(), WALKED.len() - 3);
        assert_eq!(
            peers(System::FerryComposefs),
            ["composefs", "erofs-overlay", "composefs-ahead", "erofs-overlay-loop", "bare"]
        );
        let mut names = WALKED.map(System::name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
