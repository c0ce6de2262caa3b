//! A check of this machine, and what it means for the exports.

use std::io;

use ferry_isolation::Capabilities;
use rustix::io::Errno;
use serde::Serialize;

/// Exports that a machine is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Export {
    /// `ferry share --virtiofs`.
    Virtiofs,
    /// `ferry mount`.
    Mount,
    /// `ferry disk`.
    Disk,
    /// `ferry share --9p`, and mounts of 9p: sources.
    #[value(name = "9p")]
    #[serde(rename = "9p")]
    Ninep,
    /// `ferry image mount`.
    Image,
    /// `ferry-snapshotter`, and layers for podman.
    Containers,
}

impl Export {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 6] = [Self::Virtiofs, Self::Mount, Self::Disk, Self::Ninep, Self::Image, Self::Containers];
    /// Those that serve virtual machines or 9P clients, and confine themselves.
    pub const SERVERS: &[Self] = &[Self::Virtiofs, Self::Disk, Self::Ninep];

    /// The word of `--for`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Virtiofs => "virtiofs",
            Self::Mount => "mount",
            Self::Disk => "disk",
            Self::Ninep => "9p",
            Self::Image => "image",
            Self::Containers => "containers",
        }
    }
}

/// The result of a check for the exports that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The machine has it.
    Ok,
    /// Exports work without it, or with less of it.
    Degraded,
    /// An export does not work without it.
    Missing,
}

impl State {
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Missing => "missing",
        }
    }
}

/// What a machine lacks.
#[derive(Debug)]
pub struct Lack {
    /// What does not work, or works less well.
    pub consequence: String,
    /// A line for a shell that changes it; a comment of the shell if no command does.
    pub remedy: String,
    /// Some of it is there, so that exports that need it work.
    pub is_partial: bool,
}

/// Whether this process may mount; root of a container often may not.
pub fn can_mount() -> bool {
    Capabilities::of_thread().is_ok_and(Capabilities::can_mount)
}

/// The remedy for a process that may not mount.
pub fn remedy_to_mount() -> &'static str {
    match rustix::process::geteuid().is_root() {
        true => "# run ferry outside of the container, or with CAP_SYS_ADMIN",
        false => "# run ferry as root",
    }
}

/// The remedy if the control group of a container refuses a device. The error is then EPERM; that of a file's mode is EACCES.
pub fn device_remedy(error: &io::Error, device: &str) -> Option<String> {
    (Errno::from_io_error(error) == Some(Errno::PERM)).then(|| format!("# start the container with --device {device}"))
}

/// One check.
#[derive(Debug)]
pub struct Check {
    /// What is checked.
    pub name: &'static str,
    /// What was found.
    pub found: String,
    /// What is lacking, if anything is.
    pub lack: Option<Lack>,
    needed_by: &'static [Export],
    helps: &'static [Export],
}

impl Check {
    /// A check of something that `needed_by` do not work without, and that `helps` work better with.
    pub fn new(name: &'static str, needed_by: &'static [Export], helps: &'static [Export]) -> Self {
        Self { name, found: String::new(), lack: None, needed_by, helps }
    }

    /// The machine has it.
    pub fn found(self, found: impl Into<String>) -> Self {
        Self { found: found.into(), ..self }
    }

    /// The machine does not have it.
    pub fn lacks(self, found: impl Into<String>, consequence: impl Into<String>, remedy: impl Into<String>) -> Self {
        let lack = Lack { consequence: consequence.into(), remedy: remedy.into(), is_partial: false };
        Self { found: found.into(), lack: Some(lack), ..self }
    }

    /// The machine has less of it than would be good.
    pub fn has_less(self, found: impl Into<String>, consequence: impl Into<String>, remedy: impl Into<String>) -> Self {
        let lack = Lack { consequence: consequence.into(), remedy: remedy.into(), is_partial: true };
        Self { found: found.into(), lack: Some(lack), ..self }
    }

    /// Which of these exports it concerns.
    pub fn exports(&self, of: &[Export]) -> Vec<Export> {
        of.iter().copied().filter(|one| self.needed_by.contains(one) || self.helps.contains(one)).collect()
    }

    /// Its state for these exports.
    pub fn state(&self, exports: &[Export]) -> State {
        match &self.lack {
            None => State::Ok,
            Some(lack) if !lack.is_partial && self.needed_by.iter().any(|one| exports.contains(one)) => State::Missing,
            Some(_) => State::Degraded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_a_container_lacks_is_told_from_one_of_another_user() {
        let remedy = |errno: Errno| device_remedy(&errno.into(), "/dev/fuse");
        assert_eq!(remedy(Errno::PERM).as_deref(), Some("# start the container with --device /dev/fuse"));
        assert_eq!((remedy(Errno::ACCESS), remedy(Errno::NOENT)), (None, None));
    }
}
