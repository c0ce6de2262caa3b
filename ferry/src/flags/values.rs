//! Values of flags.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use ferry_image::Digest;
use ferry_virtiofs::Tag;
use serde::{Deserialize, Deserializer, Serialize};

use crate::size::{Size, deserialize_from_str};

/// What a guest may cache, and for how long.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Nothing: every read and lookup is a request.
    None,
    /// Names and attributes for a second; data until the file is opened again and has changed.
    #[default]
    Auto,
    /// Names and attributes as with always, data as with none.
    Metadata,
    /// Everything, until a notification. Mounts are notified of changes by others (see --watch), guests are not: for directories
    /// that nobody else changes.
    Always,
}

/// Whether guests check POSIX ACLs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Acl {
    /// No: they are ordinary attributes.
    Never,
    /// If the source and the guest's kernel support them.
    #[default]
    Auto,
    /// Always: guests without support cannot mount, and the source must support them.
    Always,
}

/// How the destination of a migration finds files.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationMode {
    /// By their paths.
    #[default]
    FindPaths,
    /// By their file handles: for hosts that share one file system (and for root).
    FileHandles,
}

/// What happens to files that the destination of a migration does not find.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnMigrationError {
    /// The migration fails.
    #[default]
    Abort,
    /// The guest gets errors for these files.
    GuestError,
}

/// When to refer to files by file handles, which take no descriptors.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FileHandles {
    /// Never: each file takes an open descriptor, within a budget.
    Never,
    /// If the file system supports them and the server may open them.
    #[default]
    Prefer,
    /// Always; an error if it is not possible.
    Mandatory,
}

/// Whether to watch a directory for changes by other processes of the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Watch {
    /// If a mount caches for long (--cache always and metadata, and --writeback) and watching is possible.
    #[default]
    Auto,
    /// Always; an error if it is not possible.
    Always,
    /// Never: caches are stale until they expire.
    Never,
}

/// The user that all clients of a share act as.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MapUser {
    /// The user.
    pub uid: u32,
    /// The user's group.
    pub gid: u32,
}

impl std::str::FromStr for MapUser {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
            return Ok(Self { uid: uid.as_raw(), gid: gid.as_raw() });
        }
        let number = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX);
        let pair = text.split_once(':').and_then(|(uid, gid)| Some((number(uid)?, number(gid)?)));
        let why = || format!("{text:?} is not a user: write auto, or UID:GID with two numbers");
        pair.map(|(uid, gid)| Self { uid, gid }).ok_or_else(why)
    }
}

/// The transport of requests between the kernel and this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// The best available.
    Auto,
    /// FUSE over io_uring; an error if it is not available.
    Uring,
    /// /dev/fuse.
    Devfuse,
}

/// Whether the kernel may access files of the source directly.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Passthrough {
    /// If it can.
    Auto,
    /// Always; an error if it is not possible.
    On,
    /// Never.
    Off,
}

/// The size of a DAX window; `None`: no window.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window(pub Option<u64>);

/// The size of one mapping, in bytes.
const WINDOW_BYTES_MIN: u64 = 2 << 20;

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => {
                let Size(bytes) = text.parse()?;
                // QEMU aborts with any other size: the window is a PCI bar.
                let right =
                    bytes.is_power_of_two() && (WINDOW_BYTES_MIN..=ferry_virtiofs::WINDOW_BYTES_MAX).contains(&bytes);
                right.then_some(Self(Some(bytes))).ok_or_else(|| {
                    format!(
                        "a window of {text:?} is not possible: the size is a power of two from 2M to 256M, such as 128M"
                    )
                })
            }
        }
    }
}

/// Which files guests map if they leave the choice to the server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DaxFiles(pub ferry_virtiofs::DaxFiles);

impl FromStr for DaxFiles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let files = match (text, text.strip_prefix("size>")) {
            ("always", _) => ferry_virtiofs::DaxFiles::Always,
            ("never", _) => ferry_virtiofs::DaxFiles::Never,
            (_, Some(size)) => ferry_virtiofs::DaxFiles::Above(size.parse::<Size>()?.0),
            _ => return Err("write always, never, or size>N, as in size>1M".into()),
        };
        Ok(Self(files))
    }
}

/// A digest on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageDigest(pub Digest);

impl FromStr for ImageDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digest = Digest::parse(text.as_bytes());
        let why = || {
            format!(
                "{text:?} is not a digest: write tree:, blake3: or sha256: and 64 hexadecimal digits, as ferry image build and info print it"
            )
        };
        digest.map(Self).ok_or_else(why)
    }
}

/// Rewrites a sentence about flags for a configuration file: without dashes.
pub fn as_keys(sentence: &str) -> String {
    let words = sentence.split(' ');
    words.map(|word| word.strip_prefix("--").unwrap_or(word)).collect::<Vec<_>>().join(" ")
}

deserialize_from_str!(Window, DaxFiles, ImageDigest);

/// Deserializes a value by parsing it.
pub fn parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(input: D) -> Result<Option<T>, D::Error> {
    String::deserialize(input)?.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Returns a tag from the name of a directory, also for `.` and `..`.
pub fn default_tag(dir: &Path) -> Tag {
    let absolute = dir.canonicalize();
    let name = absolute.as_deref().unwrap_or(dir).file_name();
    tag_from_name(&name.unwrap_or_default().to_string_lossy())
}

/// Returns a tag from any name: characters that are special in shells, `fstab` and VMM options become dashes.
pub fn tag_from_name(name: &str) -> Tag {
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let tag: String = name.chars().map(safe).take(Tag::BYTES_MAX).collect();
    let tag = if tag.chars().any(|c| c.is_ascii_alphanumeric()) { &tag } else { "share" };
    tag.parse().expect("1 to 36 bytes of ASCII")
}

/// Parses `512M` or `2G` into mebibytes.
pub fn memory_mib(text: &str) -> Result<u32, String> {
    /// Below this a stock kernel does not boot.
    const MIB_MIN: u64 = 64;
    let Size(bytes) = text.parse()?;
    match u32::try_from(bytes >> 20) {
        Ok(mib) if u64::from(mib) < MIB_MIN => Err(format!("a guest needs at least {MIB_MIN}M, and {text:?} is less")),
        Ok(mib) => Ok(mib),
        Err(_) => Err(format!("{text:?} is more than any guest can have")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_made_of_any_name() {
        for (name, tag) in [
            ("src", "src"),
            ("my files, 2024", "my-files--2024"),
            ("été", "-t-"),
            ("", "share"),
            ("数据", "share"),
            ("0123456789012345678901234567890123456789", "012345678901234567890123456789012345"),
        ] {
            assert_eq!(tag_from_name(name).as_str(), tag, "{name}");
        }
    }

    #[test]
    fn memory_has_a_unit() {
        assert_eq!(memory_mib("512M"), Ok(512));
        assert_eq!(memory_mib("2g"), Ok(2048));
        for wrong in ["", "512", "M", "1M", "-1G", "99999999999G", "5000000G"] {
            assert!(memory_mib(wrong).is_err(), "{wrong}");
        }
    }
}

#[cfg(test)]
mod window_tests {
    use super::*;

    #[test]
    fn windows_are_powers_of_two() {
        for (text, bytes) in [("off", None), ("2M", Some(2 << 20)), ("256M", Some(256 << 20))] {
            assert_eq!(text.parse(), Ok(Window(bytes)), "{text}");
        }
        for wrong in ["", "on", "0", "1M", "3M", "6M", "480M", "512M", "2097153"] {
            assert!(wrong.parse::<Window>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_are_chosen_by_size() {
        use ferry_virtiofs::DaxFiles as Files;
        for (text, files) in [
            ("always", Files::Always),
            ("never", Files::Never),
            ("size>64K", Files::Above(65536)),
            ("size>1", Files::Above(1)),
        ] {
            assert_eq!(text.parse(), Ok(DaxFiles(files)), "{text}");
        }
        for wrong in ["", "Always", "size", "size>", "size<1M", "size>x"] {
            assert!(wrong.parse::<DaxFiles>().is_err(), "{wrong}");
        }
    }
}
