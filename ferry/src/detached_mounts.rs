//! Detached copies of directories that contain a mount point of this process, as in `ferry mount / /mnt`.
//!
//! If the source saw that mount, each access would be a request of the server to itself: a deadlock with one ring per CPU, and an
//! endless tree over /dev/fuse. So the source gets a copy of the mounts that is never attached and gets no new mounts. The files
//! under the mount point are visible there, as with `mount --rbind`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};

use crate::paths::descriptor_path;

/// A private copy of the mounts below a directory, until it is dropped.
pub struct DetachedMounts(OwnedFd);

impl DetachedMounts {
    /// Returns the copy for a directory, if one of the mount points is inside.
    pub fn of(dir: &Path, mount_points: &[PathBuf]) -> Result<Option<Self>> {
        let inside = mount_points.iter().find(|mount| mount.starts_with(dir) && *mount != dir);
        let Some(mount) = inside else { return Ok(None) };
        let (mount, shown) = (mount.display(), dir.display());
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = match rustix::mount::open_tree(rustix::fs::CWD, dir, flags) {
            Ok(tree) => Self(tree),
            Err(Errno::PERM) => bail!(
                "the mount point {mount} is inside {shown}, which would then contain itself, and only root can hide \
                 the mount from its source; choose a mount point outside"
            ),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot hide the mount point {mount} from its source {shown}"));
            }
        };
        // Copies of shared mounts would get new mounts.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change(tree.path(), private)
            .with_context(|| format!("cannot hide the mount point {mount} from its source {shown}"))?;
        Ok(Some(tree))
    }

    /// Returns the path of the copy, for this process.
    pub fn path(&self) -> PathBuf {
        descriptor_path(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_with_a_mount_point_inside_need_a_copy() {
        for (dir, mounts) in [("/a", &["/b/c", "/ab"][..]), ("/a", &["/a"]), ("/a/b", &["/a"]), ("/a", &[])] {
            let mounts: Vec<PathBuf> = mounts.iter().map(PathBuf::from).collect();
            assert!(
                DetachedMounts::of(Path::new(dir), &mounts).expect("nothing is done").is_none(),
                "{dir} {mounts:?}"
            );
        }
    }
}
