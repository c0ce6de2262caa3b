//! The mounts in the guest, and the comparison of each line.

use crate::fio;
use crate::line::FERRY;
use crate::rows::Config;
use crate::server::{Peer, TAG};

/// The longest message of 9P over virtio, in bytes.
const MSIZE: u32 = 512_000;

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// QEMU's own 9P device.
    Qemu9p,
    /// virtiofsd, which keeps nothing in the guest.
    Virtiofsd,
    /// Ours, in one of three ways.
    Ferry(Config),
}

impl System {
    /// All, in the order of the published columns.
    pub const ALL: [Self; 5] = [
        Self::Qemu9p,
        Self::Virtiofsd,
        Self::Ferry(Config::None),
        Self::Ferry(Config::Auto),
        Self::Ferry(Config::NoneDax),
    ];

    /// Its name: in the results, of its mount point, of its part of fio's run.
    pub fn name(self) -> String {
        match self {
            Self::Qemu9p => "qemu-9p".into(),
            Self::Virtiofsd => Peer::Virtiofsd.name().into(),
            Self::Ferry(config) => format!("{FERRY}-{}", config.name()),
        }
    }

    /// Ours always; of the peers those that were named, or all.
    pub fn is_wanted(self, peers: &[String]) -> bool {
        matches!(self, Self::Ferry(_)) || peers.is_empty() || peers.contains(&self.name())
    }

    /// What a line of ours calls `peer`: others always, and what caches are compared with.
    pub fn calls(self, peer: Self) -> Option<String> {
        match (self, peer) {
            (Self::Ferry(_), Self::Qemu9p | Self::Virtiofsd) => Some(peer.name()),
            (Self::Ferry(Config::Auto | Config::NoneDax), Self::Ferry(Config::None)) => Some(peer.name()),
            _ => None,
        }
    }

    /// The server to start, if it is not QEMU itself.
    pub fn server(self) -> Option<(Peer, Config)> {
        match self {
            Self::Qemu9p => None,
            Self::Virtiofsd => Some((Peer::Virtiofsd, Config::None)),
            Self::Ferry(config) => Some((Peer::Ferry, config)),
        }
    }

    /// The tag of its device: for a window the device tells it, else QEMU does.
    pub fn tag(self) -> String {
        if self == Self::Ferry(Config::NoneDax) { TAG.into() } else { self.name() }
    }

    /// The line of shell that mounts it, and fails where a window is not used.
    pub fn mount_line(self, dir: &str) -> String {
        let tag = self.tag();
        match self {
            Self::Qemu9p => format!(
                "mkdir -p {dir} && mount -i -t 9p -o trans=virtio,version=9p2000.L,msize={MSIZE},cache=none {tag} {dir}"
            ),
            Self::Ferry(Config::NoneDax) => format!(
                "mkdir -p {dir} && mount -i -t virtiofs -o dax {tag} {dir} && grep ' {dir} virtiofs .*dax' /proc/mounts{}",
                pins(dir)
            ),
            _ => format!("mkdir -p {dir} && mount -i -t virtiofs {tag} {dir}"),
        }
    }
}

/// Keeps the files open in the shell, so that their mappings stay when caches are emptied: QEMU takes milliseconds for each, and
/// tells every other device of it, too.
fn pins(dir: &str) -> String {
    (0..fio::MULTI_JOBS).map(|number| format!(" && exec {{pin{number}}}<{dir}/{}", fio::file_name(number))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_compared_with_none() {
        let [none, auto, dax] = [Config::None, Config::Auto, Config::NoneDax].map(System::Ferry);
        assert_eq!(dax.calls(none), Some("ferry-none".into()));
        assert_eq!((none.calls(dax), none.calls(none), dax.calls(auto)), (None, None, None));
        assert_eq!(auto.calls(System::Virtiofsd), Some("virtiofsd".into()));
        assert!(dax.mount_line("/m").contains("-o dax share /m && grep"));
        assert!(dax.mount_line("/m").ends_with(" && exec {pin3}</m/fio.3"));
    }
}
