//! The formats of disks, and which of them may be detected.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::str::FromStr;

use crate::Error;

/// The format of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// QEMU's images, versions 2 and 3.
    #[cfg(feature = "qcow2")]
    Qcow2,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "raw" => Ok(Self::Raw),
            #[cfg(feature = "qcow2")]
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(format!("{text:?} is not a known format; known are raw and qcow2")),
        }
    }
}

/// The first bytes of images of other formats: all that any server would open as an image, supported here or not.
const MAGICS: [(&[u8], &str); 9] = [
    (b"QFI\xfb", "qcow2"),
    (b"QED\0", "qed"),
    (b"KDMV", "vmdk"),
    (b"COWD", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"conectix", "vpc"),
    (b"vhdxfile", "vhdx"),
    (b"WithoutFreeSpace", "parallels"),
    (b"LUKS\xba\xbe", "luks"),
];

/// Returns an error if a file looks like an image: only raw is assumed without an option.
pub(crate) fn check_is_raw(file: &File, path: &Path) -> Result<(), Error> {
    let mut start = [0; 32];
    let mut known = 0;
    while known < start.len() {
        match file.read_at(&mut start[known..], known as u64) {
            Ok(0) => break,
            Ok(count) => known += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(reason) => return Err(Error::Open { path: path.into(), reason }),
        }
    }
    match MAGICS.iter().find(|(magic, _)| start[..known].starts_with(magic)) {
        Some((_, looks)) => Err(Error::Ambiguous { path: path.into(), looks }),
        None => Ok(()),
    }
}
