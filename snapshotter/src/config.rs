//! The configuration file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Whether committed layers become images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Images {
    /// If the kernel can mount them; otherwise layers stay directories.
    #[default]
    Auto,
    /// Layers stay directories.
    Never,
    /// The snapshotter refuses to start if the kernel cannot mount them.
    Require,
}

/// Lazy images: which ones start before their layers are fetched, and how they are fetched.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct LazyConfig {
    /// Registries or repositories with lazy images: `HOST`, `HOST/NAME` with all repositories below it, or `*`.
    pub from: Vec<String>,
    /// Those whose converted images are trusted to equal the originals, which nothing proves.
    pub converted_from: Vec<String>,
    /// Those whose lists of files to fetch first are used; the lists are stored beside images.
    pub traces_from: Vec<String>,
    /// The directories with containerd's `hosts.toml` files: its `config_path`.
    pub hosts: Vec<PathBuf>,
    /// The file with credentials, as docker and podman write it, or a directory of such files; otherwise theirs.
    pub credentials: Option<PathBuf>,
    /// containerd's socket, to which the calls of CRI's image service go on that come to this program's. Lazy images use the credentials of
    /// their pulls. `None`: such calls are refused.
    pub image_service: Option<PathBuf>,
    /// The number of parallel background requests per image; 0: data is fetched only when it is read.
    pub jobs: u16,
    /// The maximum rate of background requests in bytes per second, which includes reads; reads never wait. `None`: no limit.
    pub fetch_rate: Option<std::num::NonZeroU64>,
    /// The maximum number of consecutive restarts of an image's process.
    pub restarts: u32,
    /// The program `ferry`; otherwise the one beside this program, or on the path.
    pub program: Option<PathBuf>,
}

impl Default for LazyConfig {
    fn default() -> Self {
        Self {
            // Off by default only if every client names a layer's image itself.
            from: Vec::new(),
            converted_from: Vec::new(),
            traces_from: Vec::new(),
            hosts: vec!["/etc/containerd/certs.d".into()],
            credentials: None,
            image_service: None,
            jobs: 4,
            fetch_rate: None,
            restarts: 10,
            program: None,
        }
    }
}

/// How virtual machines have views.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct VirtiofsConfig {
    /// The directory of the sockets of views whose label asks for one; otherwise there are none.
    pub socket_directory: Option<PathBuf>,
}

/// The configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Config {
    /// The directory of all snapshots.
    pub root: PathBuf,
    /// The unix socket on which containerd connects.
    pub address: PathBuf,
    /// Whether committed layers become images.
    pub images: Images,
    /// Whether the layers below a snapshot are merged to one image; otherwise overlayfs stacks them.
    pub merge: bool,
    /// Whether images share the memory of equal files; the snapshotter refuses to start if the kernel cannot.
    pub inode_share: bool,
    /// containerd's own root, which contains the blobs of layers.
    pub containerd_root: PathBuf,
    /// Lazy images.
    pub lazy: LazyConfig,
    /// Which views are shared by virtio-fs.
    pub virtiofs: VirtiofsConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root: "/var/lib/ferry-snapshotter".into(),
            address: "/run/ferry-snapshotter/snapshotter.sock".into(),
            images: Images::default(),
            merge: true,
            inode_share: false,
            containerd_root: "/var/lib/containerd".into(),
            lazy: LazyConfig::default(),
            virtiofs: VirtiofsConfig::default(),
        }
    }
}

impl Config {
    /// The file that is read if it exists and no other one is named.
    pub const PATH: &str = "/etc/ferry/snapshotter.toml";

    /// Parses a file's text. Relative paths are relative to the file's own directory.
    ///
    /// # Errors
    ///
    /// The file is invalid; the error has the reason and the position.
    pub fn parse(text: &str, directory: &Path) -> Result<Self, toml::de::Error> {
        let mut config: Self = toml::from_str(text)?;
        let Self { root, address, containerd_root, lazy, virtiofs, .. } = &mut config;
        let LazyConfig { hosts, credentials, image_service, program, .. } = lazy;
        let all = [root, address, containerd_root].into_iter().chain(hosts).chain(credentials).chain(image_service);
        for path in all.chain(program).chain(&mut virtiofs.socket_directory) {
            *path = directory.join(&*path);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_files_are_parsed() {
        let parse = |text: &str| Config::parse(text, Path::new("/etc/ferry"));
        assert_eq!(parse("").unwrap(), Config::default());
        let text = "root = 'data'\naddress = '/run/s.sock'\nimages = 'never'\nmerge = false\ninode-share = true\ncontainerd-root = 'c'";
        let config = parse(text).unwrap();
        assert!(!config.merge && config.inode_share && config.containerd_root == Path::new("/etc/ferry/c"));
        assert_eq!((config.root, config.address), ("/etc/ferry/data".into(), "/run/s.sock".into()));
        assert_eq!(config.images, Images::Never);
        let lazy = parse("[lazy]\nfrom = ['*']\nhosts = ['h']\nprogram = '/bin/ferry'").unwrap().lazy;
        assert_eq!((lazy.hosts, lazy.program), (vec!["/etc/ferry/h".into()], Some("/bin/ferry".into())));
        let virtiofs = parse("[virtiofs]\nsocket-directory = 's'").unwrap().virtiofs;
        assert_eq!(virtiofs.socket_directory, Some("/etc/ferry/s".into()));
        for (text, why) in [
            ("rot = 1", "unknown field"),
            ("[virtiofs]\nsocket = 's'", "unknown field"),
            ("[lazy]\nfrom = 1", "invalid type"),
            ("[lazy]\nrot = 1", "unknown field"),
            ("[lazy]\nfetch-rate = 0", "expected a nonzero u64"),
            ("images = 'maybe'", "unknown variant"),
            ("root = 1", "invalid type"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
