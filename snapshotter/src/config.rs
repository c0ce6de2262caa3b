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
}

impl Default for Config {
    fn default() -> Self {
        Self {
            root: "/var/lib/ferry-snapshotter".into(),
            address: "/run/ferry-snapshotter/snapshotter.sock".into(),
            images: Images::default(),
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
        for path in [&mut config.root, &mut config.address] {
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
        let config = parse("root = 'data'\naddress = '/run/s.sock'\nimages = 'never'").unwrap();
        assert_eq!((config.root, config.address), ("/etc/ferry/data".into(), "/run/s.sock".into()));
        assert_eq!(config.images, Images::Never);
        for (text, why) in
            [("rot = 1", "unknown field"), ("images = 'maybe'", "unknown variant"), ("root = 1", "invalid type")]
        {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
