//! Parses the values of flags.

use std::path::Path;
use std::str::FromStr;

use ferry_image::Digest;
use ferry_virtiofs::Tag;
use serde::{Deserialize, Serialize};

use crate::size::{Size, deserialize_from_str};

/// What a guest may keep, and for how long.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Nothing: every read and every look-up asks the host.
    None,
    /// Names and attributes for a second; an open sees all that was written before.
    #[default]
    Auto,
    /// Names and attributes as with always, data as with none.
    Metadata,
    /// Everything, until told otherwise. Mounts are told of what others change (see --watch), guests are not: for
    /// directories that nobody else changes.
    Always,
}

/// Whether guests check permissions by POSIX ACLs, too.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Acl {
    /// No: they are attributes as any other.
    Never,
    /// If the source and the guest's kernel have them.
    #[default]
    Auto,
    /// A guest whose kernel has none cannot mount, and a source must have them.
    Always,
}

/// How files are found when a guest has been migrated.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MigrationMode {
    /// By their paths.
    #[default]
    FindPaths,
    /// By their file handles: for hosts that share one file system (and for root).
    FileHandles,
}

/// What to do about files that a migration does not find again.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum OnMigrationError {
    /// It fails.
    #[default]
    Abort,
    /// They are errors for the guest.
    GuestError,
}

/// When to remember files of a directory by file handles, which take no descriptors.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FileHandles {
    /// Never: an open descriptor for each, within a budget.
    Never,
    /// Where the file system has them and the server may use them.
    #[default]
    Prefer,
    /// Or an error that says why not.
    Mandatory,
}

/// Whether to watch for what others change in a directory on the host.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Watch {
    /// Where a mount keeps things for long (caches always and metadata, and --writeback), if it can be done.
    #[default]
    Auto,
    /// Whatever the mount keeps, or an error that says why not.
    Always,
    /// Never: what is kept is old until its time is over.
    Never,
}

/// As whom everybody acts who comes through a share.
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
        let why = || format!("{text:?} is nobody: write auto, or UID:GID with two numbers");
        pair.map(|(uid, gid)| Self { uid, gid }).ok_or_else(why)
    }
}

/// How requests of a mount travel between the kernel and this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// The best that can be had here.
    Auto,
    /// FUSE over io_uring, or an error that says why not.
    Uring,
    /// /dev/fuse.
    Devfuse,
}

/// Whether the kernel may read and write files of the source on its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Passthrough {
    /// If it can.
    Auto,
    /// Or an error that says why not.
    On,
    /// Never.
    Off,
}

/// The length of a DAX window; `None`: there is none.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Window(pub Option<u64>);

/// One mapping.
const WINDOW_BYTES_MIN: u64 = 2 << 20;

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => {
                let Size(bytes) = text.parse()?;
                // QEMU aborts over any other length: the window is a PCI bar.
                let right =
                    bytes.is_power_of_two() && (WINDOW_BYTES_MIN..=ferry_virtiofs::WINDOW_BYTES_MAX).contains(&bytes);
                right.then_some(Self(Some(bytes))).ok_or_else(|| {
                    format!("a window of {text:?} cannot be: it is a power of two from 2M to 256M, as 128M")
                })
            }
        }
    }
}

/// Which files guests map that leave it to us.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DaxFiles(pub ferry_virtiofs::DaxFiles);

impl FromStr for DaxFiles {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let files = match (text, text.strip_prefix("size>")) {
            ("always", _) => ferry_virtiofs::DaxFiles::Always,
            ("never", _) => ferry_virtiofs::DaxFiles::Never,
            (_, Some(size)) => ferry_virtiofs::DaxFiles::Above(size.parse::<Size>()?.0),
            _ => return Err("it is always, never, or size>N, as in size>1M".into()),
        };
        Ok(Self(files))
    }
}

/// A digest as people write it.
#[derive(Clone, Copy, Debug)]
pub struct ImageDigest(pub Digest);

impl FromStr for ImageDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digest = Digest::parse(text.as_bytes());
        let why = || {
            format!(
                "{text:?} is no digest: it is tree:, blake3: or sha256: and 64 hexadecimal digits, as ferry image build and info print it"
            )
        };
        digest.map(Self).ok_or_else(why)
    }
}

/// The same sentence for a file.
pub fn as_keys(sentence: &str) -> String {
    let words = sentence.split(' ');
    words.map(|word| word.strip_prefix("--").unwrap_or(word)).collect::<Vec<_>>().join(" ")
}

deserialize_from_str!(Window, DaxFiles, ImageDigest);

/// A tag made of a directory's own name, also for `.` and `..`.
pub fn default_tag(dir: &Path) -> Tag {
    let absolute = dir.canonicalize();
    let name = absolute.as_deref().unwrap_or(dir).file_name();
    tag_from_name(&name.unwrap_or_default().to_string_lossy())
}

/// A tag made of any name: what shells, `fstab` and VMM options would trip over becomes a dash.
pub fn tag_from_name(name: &str) -> Tag {
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let tag: String = name.chars().map(safe).take(Tag::BYTES_MAX).collect();
    let tag = if tag.chars().any(|c| c.is_ascii_alphanumeric()) { &tag } else { "share" };
    tag.parse().expect("1 to 36 bytes of ASCII")
}

/// Mebibytes out of `512M` or `2G`.
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
