//! The configuration file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Whether committed layers become images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Images {
    /// Where the kernel mounts them; else they stay directories.
    #[default]
    Auto,
    /// No: they stay directories.
    Never,
    /// The snapshotter does not start where the kernel does not mount them.
    Require,
}

/// Which images start before their layers are here, and what fetches them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct LazyConfig {
    /// Registries or repositories whose images may: `HOST`, `HOST/NAME` with all below it, or `*`.
    pub from: Vec<String>,
    /// Those of them whose converted images are taken for the originals, which nothing proves.
    pub converted_from: Vec<String>,
    /// The same for lists of the files to fetch first, which somebody has stored beside images.
    pub traces_from: Vec<String>,
    /// The folders with containerd's `hosts.toml` files: its `config_path`.
    pub hosts: Vec<PathBuf>,
    /// The file with credentials, as docker and podman write it, or a folder of such files; otherwise theirs.
    pub credentials: Option<PathBuf>,
    /// The number of requests in parallel that fetch the rest of an image; 0: only what is read is fetched.
    pub jobs: u16,
    /// With at most so many bytes per second, together with what is read, which never waits; otherwise without a limit.
    pub fetch_rate: Option<std::num::NonZeroU64>,
    /// How often in a row the process that fetches an image is started again when it is killed.
    pub restarts: u32,
    /// The program `ferry`; otherwise the one beside this program, or on the path.
    pub program: Option<PathBuf>,
}

impl Default for LazyConfig {
    fn default() -> Self {
        Self {
            // Only where every client says which image a layer is of can images not say it themselves.
            from: Vec::new(),
            converted_from: Vec::new(),
            traces_from: Vec::new(),
            hosts: vec!["/etc/containerd/certs.d".into()],
            credentials: None,
            jobs: 4,
            fetch_rate: None,
            restarts: 10,
            program: None,
        }
    }
}

/// What the configuration file sets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Config {
    /// The directory of all snapshots.
    pub root: PathBuf,
    /// The unix socket on which containerd connects.
    pub address: PathBuf,
    /// Whether committed layers become images.
    pub images: Images,
    /// Whether what is based on several images gets one image of them all; otherwise overlayfs stacks them.
    pub merge: bool,
    /// containerd's own root, below which are the blobs of layers.
    pub containerd_root: PathBuf,
    /// Which images start before their layers are here.
    pub lazy: LazyConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root: "/var/lib/ferry-snapshotter".into(),
            address: "/run/ferry-snapshotter/snapshotter.sock".into(),
            images: Images::default(),
            merge: true,
            containerd_root: "/var/lib/containerd".into(),
            lazy: LazyConfig::default(),
        }
    }
}

impl Config {
    /// The file that is read if it exists and no other one is named.
    pub const PATH: &str = "/etc/ferry/snapshotter.toml";

    /// Parses a file's text. Relative paths are relative to the file's own folder.
    ///
    /// # Errors
    ///
    /// What is wrong with it, and where.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, toml::de::Error> {
        let mut config: Self = toml::from_str(text)?;
        let Self { root, address, containerd_root, lazy: LazyConfig { hosts, credentials, program, .. }, .. } =
            &mut config;
        for path in [root, address, containerd_root].into_iter().chain(hosts).chain(credentials).chain(program) {
            *path = folder.join(&*path);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read() {
        let parse = |text: &str| Config::parse(text, Path::new("/etc/ferry"));
        assert_eq!(parse("").unwrap(), Config::default());
        let text = "root = 'data'\naddress = '/run/s.sock'\nimages = 'never'\nmerge = false\ncontainerd-root = 'c'";
        let config = parse(text).unwrap();
        assert!(!config.merge && config.containerd_root == Path::new("/etc/ferry/c"));
        assert_eq!((config.root, config.address), ("/etc/ferry/data".into(), "/run/s.sock".into()));
        assert_eq!(config.images, Images::Never);
        let lazy = parse("[lazy]\nfrom = ['*']\nhosts = ['h']\nprogram = '/bin/ferry'").unwrap().lazy;
        assert_eq!((lazy.hosts, lazy.program), (vec!["/etc/ferry/h".into()], Some("/bin/ferry".into())));
        for (text, why) in [
            ("rot = 1", "unknown field"),
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
