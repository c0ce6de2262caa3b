//! Versions of the kernel and of programs.

use super::check::{Check, Export};

/// The oldest kernel that Ferry is tested on, that of Debian 12.
const OLDEST_TESTED_KERNEL: Version = Version(6, 1);

/// A version, as far as it decides anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// The first version in a text: `QEMU emulator version 11.1.3 (Debian 1:11.1.3)`, `v52.0`, `6.18.44-fc`.
pub fn first_version(text: &str) -> Option<Version> {
    let words = text.split(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ','));
    words.into_iter().find_map(|word| {
        let (major, rest) = word.strip_prefix('v').unwrap_or(word).split_once('.')?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let minor = &rest[..end];
        // `parse` would accept a sign.
        (is_number(major) && is_number(minor)).then(|| Some(Version(major.parse().ok()?, minor.parse().ok()?)))?
    })
}

/// Kernels for layers of containers: 6.15 (EROFS keeps file times), 5.19 (idmapped layers).
const LAYER_KERNELS: [(&str, Version, &str); 2] = [
    (
        "layers as images",
        Version(6, 15),
        "committed layers of containers stay directories: EROFS shows one time for all files",
    ),
    ("idmapped layers", Version(5, 19), "containers with users of their own get copies of their images"),
];

/// The checks of the running kernel for layers of containers.
pub fn layers() -> impl Iterator<Item = Check> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    LAYER_KERNELS.into_iter().map(move |(name, needed, consequence)| {
        let (check, found) = (Check::new(name, &[], &[Export::Containers]), format!("Linux {}", release.trim()));
        match first_version(&release) {
            Some(version) if version >= needed => check.found(found),
            _ => check.lacks(found, consequence, format!("# boot Linux {needed} or later")),
        }
    })
}

/// The check of the running kernel.
pub fn kernel() -> Check {
    let check = Check::new("kernel", &[], &Export::ALL);
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let found = format!("Linux {}", release.trim());
    match first_version(&release) {
        Some(version) if version >= OLDEST_TESTED_KERNEL => check.found(found),
        Some(_) => check.has_less(
            found,
            format!("Ferry is not tested on kernels before Linux {OLDEST_TESTED_KERNEL}"),
            format!("# boot Linux {OLDEST_TESTED_KERNEL} or later"),
        ),
        None => check.has_less(found, "the version of this kernel is not known", "uname -r"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_from_program_output() {
        for (text, version) in [
            ("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1)\nCopyright (c) 2003-2026\n", Some(Version(11, 1))),
            ("QEMU emulator version 7.2.19", Some(Version(7, 2))),
            ("/usr/sbin/libvirtd (libvirt) 9.0.0", Some(Version(9, 0))),
            ("cloud-hypervisor v52.0", Some(Version(52, 0))),
            ("crosvm 0.1.0-abcdef", Some(Version(0, 1))),
            ("6.18.44-fc-v669", Some(Version(6, 18))),
            ("6.1", Some(Version(6, 1))),
            ("7.3-rc7", Some(Version(7, 3))),
            ("x.y 3.z 4.5", Some(Version(4, 5))),
        ] {
            assert_eq!(first_version(text), version, "{text:?}");
        }
        let long = "9".repeat(100) + ".1";
        for bad in ["", " ", "6", "6.", ".1", "-6.1", "+6.1", "6.-1", "version", "v", "\u{1b}[2J", "６.１", &long] {
            assert_eq!(first_version(bad), None, "{bad:?}");
        }
        assert!(Version(6, 9) < Version(6, 12) && Version(6, 12) < Version(7, 0));
    }
}
