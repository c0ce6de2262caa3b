//! The mounts that containerd makes of layers.

use std::path::{Path, PathBuf};

use rustix::fd::AsFd;
use rustix::mount::{FsOpenFlags, fsconfig_create, fsconfig_set_string, fsopen};

use crate::api::{Kind, Mount};
use crate::erofs::messages;
use crate::error::{Error, Result};

/// Exists if this kernel's overlayfs knows the option `index`.
const INDEX_PARAMETER: &str = "/sys/module/overlay/parameters/index";

/// The directories of a snapshot.
#[derive(Debug)]
pub struct Layers<'a> {
    /// Active or a view.
    pub kind: Kind,
    /// Its own files.
    pub upper: &'a Path,
    /// The work directory of an active one.
    pub work: &'a Path,
    /// The layers below, nearest first.
    pub lower: &'a [PathBuf],
}

impl Layers<'_> {
    /// Returns the mounts, with the options of containerd's own overlayfs snapshotter. A single directory is a bind mount, because
    /// overlayfs needs an upper directory or two lower ones.
    #[must_use]
    pub fn mounts(&self) -> Vec<Mount> {
        let mut options = Vec::new();
        let is_writable = self.kind == Kind::Active;
        let bound = match (is_writable, self.lower) {
            (_, []) => Some(self.upper),
            (false, [only]) => Some(only.as_path()),
            _ => None,
        };
        let (kind, source) = match bound {
            Some(path) => {
                options.extend([if is_writable { "rw" } else { "ro" }, "rbind"].map(str::to_owned));
                ("bind", text(path))
            }
            None => {
                if is_writable {
                    options.push(format!("workdir={}", text(self.work)));
                    options.push(format!("upperdir={}", text(self.upper)));
                }
                let lower: Vec<String> = self.lower.iter().map(|path| text(path)).collect();
                options.push(format!("lowerdir={}", lower.join(":")));
                // Layers can change below an existing mount, which would invalidate an index.
                if Path::new(INDEX_PARAMETER).exists() {
                    options.push("index=off".into());
                }
                ("overlay", "overlay".into())
            }
        };
        vec![Mount { r#type: kind.into(), source, target: String::new(), options }]
    }
}

/// Returns a path as text: [`crate::directories`] refuses roots that are none.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Checks that overlayfs accepts these directories: upper, work, and a layer.
///
/// # Errors
///
/// It does not; the error has the kernel's reason.
pub fn check(upper: &Path, work: &Path, lower: &Path) -> Result<()> {
    let failed =
        |messages: String, error: rustix::io::Errno| Error::Mount { path: upper.into(), messages, error: error.into() };
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC);
    let context = context.map_err(|error| failed("no overlayfs".into(), error))?;
    let configured = || -> rustix::io::Result<()> {
        let fs = context.as_fd();
        fsconfig_set_string(fs, "source", "overlay")?;
        fsconfig_set_string(fs, "lowerdir", lower)?;
        fsconfig_set_string(fs, "upperdir", upper)?;
        fsconfig_set_string(fs, "workdir", work)?;
        fsconfig_create(fs)
    };
    configured().map_err(|error| failed(messages(&context), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_equal_those_of_containerd() {
        let lower: Vec<PathBuf> = ["/s/2/layer", "/s/1/fs"].map(PathBuf::from).into();
        for (kind, count, expected) in [
            (Kind::Active, 0, "bind /s/9/fs rw rbind"),
            (Kind::View, 0, "bind /s/9/fs ro rbind"),
            (Kind::View, 1, "bind /s/2/layer ro rbind"),
            (Kind::View, 2, "overlay overlay lowerdir=/s/2/layer:/s/1/fs"),
            (Kind::Active, 1, "overlay overlay workdir=/s/9/work upperdir=/s/9/fs lowerdir=/s/2/layer"),
            (Kind::Active, 2, "overlay overlay workdir=/s/9/work upperdir=/s/9/fs lowerdir=/s/2/layer:/s/1/fs"),
        ] {
            let (upper, work) = (Path::new("/s/9/fs"), Path::new("/s/9/work"));
            let mounts = Layers { kind, upper, work, lower: &lower[..count] }.mounts();
            let [Mount { r#type, source, target, options }] = &mounts[..] else { panic!("{mounts:?}") };
            let options = options.iter().filter(|option| *option != "index=off").cloned().collect::<Vec<_>>().join(" ");
            assert_eq!((format!("{} {source} {options}", r#type), &**target), (expected.to_owned(), ""));
        }
    }
}
