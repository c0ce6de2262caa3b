//! Detached copies of directories that contain one of this process's own mount points, as in `ferry mount / /mnt`.
//!
//! Were the source to see that mount, each look at it would be a request that the server makes to itself: with a ring
//! for each CPU it waits for its own answer for ever, and over /dev/fuse the tree has itself inside without end. So the
//! source is given a tree of mounts of its own, a copy that is never attached and in which nothing new appears. What
//! is under the mount point is seen there, as with `mount --rbind`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};

/// A private copy of the mounts below a directory. It goes when this is dropped.
pub struct DetachedMounts(OwnedFd);

impl DetachedMounts {
    /// The copy for a directory, if it is needed: one of the mount points is inside.
    pub fn of(dir: &Path, mount_points: &[PathBuf]) -> Result<Option<Self>> {
        let inside = mount_points.iter().find(|mount| mount.starts_with(dir) && *mount != dir);
        let Some(mount) = inside else { return Ok(None) };
        let (mount, shown) = (mount.display(), dir.display());
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = match rustix::mount::open_tree(rustix::fs::CWD, dir, flags) {
            Ok(tree) => Self(tree),
            Err(Errno::PERM) => bail!(
                "the mount point {mount} is inside {shown}, which would then contain itself, and only root can keep \
                 the two apart; choose a mount point outside"
            ),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot keep the mount point {mount} apart from {shown}"));
            }
        };
        // Copies of shared mounts hear of new ones.
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change(tree.path(), private)
            .with_context(|| format!("cannot keep the mount point {mount} apart from {shown}"))?;
        Ok(Some(tree))
    }

    /// A path of the directory in the copy, for this process.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
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
