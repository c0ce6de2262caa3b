//! What keeps the snapshots: Ferry in its configurations, and others.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::image::Form;
use crate::line::FERRY;

/// What containerd's documentation (docs/snapshotters/erofs.md) prefers from erofs-utils 1.8.2 on.
const EROFS_MKFS_OPTIONS: [&str; 3] = ["-T0", "--mkfs-time", "--sort=none"];

/// A snapshotter and the images that it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Ours with ordinary images.
    Layers,
    /// The same, with layers that overlayfs stacks.
    Stacked,
    /// Ours with images that Ferry prepared.
    Prepared,
    /// The same, with the files of a start in a pack of their own.
    Ordered,
    /// Ours with eStargz.
    Estargz,
    /// containerd's own, with directories.
    Overlayfs,
    /// containerd's own, with an EROFS for each layer.
    Erofs,
    /// stargz-snapshotter with eStargz.
    Stargz,
    /// soci-snapshotter with an index beside the image.
    Soci,
}

/// Where programs are.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Ours.
    pub ferry: PathBuf,
    /// Ours, for containerd.
    pub snapshotter: PathBuf,
    /// The directory of containerd, ctr and runc.
    pub containerd: PathBuf,
    /// The directory of mkfs.erofs.
    pub erofs: Option<PathBuf>,
    /// The directory of the other snapshotters and their tools.
    pub peers: Option<PathBuf>,
    /// What makes images.
    pub umoci: PathBuf,
    /// What pushes them.
    pub skopeo: PathBuf,
    /// What they are pushed to.
    pub registry: PathBuf,
    /// The packages that images are made of.
    pub packages: PathBuf,
}

impl System {
    /// All, in the order in which they take turns.
    pub const ALL: [Self; 9] = [
        Self::Layers,
        Self::Overlayfs,
        Self::Stacked,
        Self::Prepared,
        Self::Ordered,
        Self::Erofs,
        Self::Estargz,
        Self::Stargz,
        Self::Soci,
    ];

    /// Whether it is ours.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Layers | Self::Stacked | Self::Prepared | Self::Ordered | Self::Estargz)
    }

    /// Of ours: the configuration's name in the results. Of a peer: its name there.
    pub fn name(self) -> &'static str {
        match self {
            Self::Layers => "layers",
            Self::Stacked => "stacked",
            Self::Prepared => "prepared",
            Self::Ordered => "ordered",
            Self::Estargz => "estargz",
            Self::Overlayfs => "overlayfs",
            Self::Erofs => "erofs",
            Self::Stargz => "stargz",
            Self::Soci => "soci",
        }
    }

    /// What a line of ours calls `other`: our other configurations are compared with ordinary layers, too.
    pub fn calls(self, other: Self) -> Option<String> {
        match other {
            _ if other == self => Some(FERRY.into()),
            Self::Layers => Some(format!("{FERRY}-{}", other.name())),
            _ if other.is_ours() => None,
            _ => Some(other.name().into()),
        }
    }

    /// Its name in containerd.
    pub fn plugin(self) -> &'static str {
        if self.is_ours() { FERRY } else { self.name() }
    }

    /// The form of images that it is given.
    pub fn form(self) -> Form {
        match self {
            Self::Layers | Self::Stacked | Self::Overlayfs | Self::Erofs => Form::Plain,
            Self::Prepared => Form::Prepared,
            Self::Ordered => Form::Ordered,
            Self::Estargz | Self::Stargz => Form::Estargz,
            Self::Soci => Form::Soci,
        }
    }

    /// Whether it pulls no layer. An index of soci is for large layers only.
    pub fn is_lazy(self) -> bool {
        matches!(self.form(), Form::Prepared | Form::Ordered | Form::Estargz)
    }

    /// Whether it is a part of containerd.
    pub fn is_built_in(self) -> bool {
        matches!(self, Self::Overlayfs | Self::Erofs)
    }

    /// Where its data are, below the directory of all.
    pub fn root(self, directory: &Path) -> PathBuf {
        if self.is_built_in() {
            directory.join(format!("containerd/io.containerd.snapshotter.v1.{}", self.name()))
        } else {
            directory.join("snapshotter")
        }
    }

    /// The command that serves it at a socket, after its configuration was written; none for a part of containerd.
    pub fn command(self, programs: &Programs, directory: &Path) -> std::io::Result<Option<Vec<OsString>>> {
        let (root, socket, config) =
            (self.root(directory), directory.join("s.sock"), directory.join("snapshotter.toml"));
        let peer = |name: &str| programs.peers.as_ref().map(|peers| peers.join(name)).unwrap_or_default();
        let (program, text) = match self {
            Self::Overlayfs | Self::Erofs => return Ok(None),
            Self::Stargz => {
                std::fs::create_dir_all(&root)?;
                return Ok(Some(vec![peer("stargz-snapshotter").into(), root.into(), socket.into()]));
            }
            Self::Layers | Self::Stacked | Self::Estargz | Self::Prepared | Self::Ordered => {
                let more = match self {
                    Self::Stacked => "merge = false\n",
                    Self::Estargz => "[lazy]\nfrom = [\"*\"]\n",
                    Self::Prepared | Self::Ordered => "[lazy]\nfrom = [\"*\"]\nconverted-from = [\"*\"]\n",
                    _ => "",
                };
                let text = format!("containerd-root = {:?}\n{more}", directory.join("containerd"));
                (programs.snapshotter.clone(), text)
            }
            Self::Soci => (peer("soci-snapshotter-grpc"), String::new()),
        };
        std::fs::create_dir_all(&root)?;
        std::fs::write(&config, text)?;
        let flags = [("--config", config), ("--root", root), ("--address", socket)];
        let flags = flags.into_iter().flat_map(|(flag, path)| [OsString::from(flag), path.into()]);
        Ok(Some(std::iter::once(program.into()).chain(flags).collect()))
    }

    /// The configuration of containerd that has only this one.
    pub fn containerd(self, directory: &Path) -> String {
        let at = |name: &str| directory.join(name).display().to_string();
        let name = self.plugin();
        let mut text = format!(
            "version = 3\nroot = {:?}\nstate = {:?}\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.cri.v1.images\", \"io.containerd.cri.v1.runtime\", \
             \"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]\n\
             [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n\
             [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nplatform = \"linux\"\nsnapshotter = {name:?}\n",
            at("containerd"),
            at("state"),
            at("c.sock"),
            at("t.sock"),
        );
        let differ = match self {
            Self::Erofs => "erofs",
            _ if self.is_ours() => "ferry-diff",
            _ => "",
        };
        if !differ.is_empty() {
            let _ = writeln!(
                text,
                "differ = {differ:?}\n[plugins.\"io.containerd.service.v1.diff-service\"]\ndefault = [{differ:?}, \"walking\"]"
            );
        }
        if self == Self::Erofs {
            let _ =
                writeln!(text, "[plugins.\"io.containerd.differ.v1.erofs\"]\nmkfs_options = {EROFS_MKFS_OPTIONS:?}");
        }
        if self.is_ours() {
            let _ = writeln!(text, "[proxy_plugins.{differ}]\ntype = \"diff\"\naddress = {:?}", at("s.sock"));
        }
        if !self.is_built_in() {
            // What names the image for those that fetch on demand.
            let exports = "enable_remote_snapshot_annotations = \"true\"";
            let _ = writeln!(
                text,
                "[proxy_plugins.{name}]\ntype = \"snapshot\"\naddress = {:?}\n[proxy_plugins.{name}.exports]\n{exports}",
                at("s.sock")
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_own_configuration() {
        let directory = Path::new("/f");
        let erofs = System::Erofs.containerd(directory);
        assert!(erofs.contains("snapshotter = \"erofs\"\ndiffer = \"erofs\"") && !erofs.contains("proxy"), "{erofs}");
        assert!(
            erofs.ends_with("differ.v1.erofs\"]\nmkfs_options = [\"-T0\", \"--mkfs-time\", \"--sort=none\"]\n"),
            "{erofs}"
        );
        assert!(!System::Overlayfs.containerd(directory).contains("mkfs_options"));
        let ours = System::Estargz.containerd(directory);
        assert!(ours.contains("snapshotter = \"ferry\"") && ours.contains("address = \"/f/s.sock\""), "{ours}");
        assert!(
            ours.contains("differ = \"ferry-diff\"") && ours.contains("[proxy_plugins.ferry-diff]\ntype = \"diff\"")
        );
        assert_eq!(System::ALL.into_iter().filter(|system| system.is_ours()).count(), 5);
        let called = |other| System::Prepared.calls(other);
        assert_eq!(called(System::Layers), Some("ferry-layers".into()));
        assert_eq!((called(System::Estargz), called(System::Prepared)), (None, Some(FERRY.into())));
        let mut names = System::ALL.map(System::name);
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
