//! The directories of snapshots.
//!
//! ```text
//! ROOT/metadata.redb      the records, see [`crate::metadata`]
//! ROOT/snapshots/ID/fs    the directory of a snapshot without an image: overlayfs's upper one while it is active
//! ROOT/snapshots/ID/work  overlayfs's work directory
//! ROOT/snapshots/ID/image the image of a committed layer
//! ROOT/snapshots/ID/applied   the image of a layer that is not yet committed, see [`crate::diff`]
//! ROOT/snapshots/ID/layer where it is mounted
//! ROOT/snapshots/ID/merged-image  the image of this layer and all below it
//! ROOT/snapshots/ID/merged where it is mounted
//! ROOT/snapshots/ID/share  the process that shares a view by virtio-fs, see [`crate::virtiofs`]
//! ROOT/snapshots/ID/lower/NUMBER, merged   the layers below, with the users of a container
//! ROOT/trash/             directories that are being removed
//! ROOT/probe/             files of the tests at start
//! ROOT/store/             the data of all images
//! ROOT/lazy/KEY/          images that are fetched on demand, see [`crate::lazy`]
//! ROOT/traces/MANIFEST    which files of such an image are fetched first, as `ferry image trace` recorded it
//! ```
//!
//! All of it is below a directory that only root can enter: layers have set-user-id programs and device nodes.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext, Result};
use crate::trash;

/// The maximum length of the root's path in bytes: the kernel takes strings of up to 255 bytes for a device of a mount, and packs have
/// long names.
pub const ROOT_BYTES_MAX: usize = 128;

/// The name of the file of the records.
const METADATA: &str = "metadata.redb";
/// The name of the mount point of a merged image.
pub const MERGED: &str = "merged";

/// Owner and permissions of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The permissions.
    pub mode: u32,
}

impl Owner {
    /// The root directory of a snapshot with nothing below it.
    pub const ROOT: Self = Self { uid: 0, gid: 0, mode: 0o755 };

    /// Returns the owner and permissions of a directory.
    ///
    /// # Errors
    ///
    /// It cannot be inspected.
    pub fn of(path: &Path) -> Result<Self> {
        let found = fs::metadata(path).doing("inspect", path)?;
        Ok(Self { uid: found.uid(), gid: found.gid(), mode: found.mode() & 0o7777 })
    }
}

/// The root of all directories.
#[derive(Clone, Debug)]
pub struct Directories {
    root: PathBuf,
}

impl Directories {
    /// Creates missing directories.
    ///
    /// # Errors
    ///
    /// The path of the root is unusable, or a directory cannot be created.
    pub fn create(root: &Path) -> Result<Self> {
        let bytes = root.as_os_str().len();
        if bytes > ROOT_BYTES_MAX || !root.is_absolute() {
            let why = format!("the root {} is not an absolute path of at most {ROOT_BYTES_MAX} bytes", root.display());
            return Err(Error::InvalidArgument(why));
        }
        // Separators in mount options, and characters that gRPC messages cannot contain.
        let is_odd =
            |path: &str| path.contains([':', ',', '\\', '"', '\'']) || path.chars().any(|c| c.is_control() || c == ' ');
        if root.to_str().is_none_or(is_odd) {
            let why = format!("the root {} has characters that options of mounts cannot have", root.display());
            return Err(Error::InvalidArgument(why));
        }
        refuse_others(root)?;
        create_dir(root, 0o700)?;
        fs::set_permissions(root, fs::Permissions::from_mode(0o700)).doing("change", root)?;
        let directories = Self { root: root.into() };
        for directory in [directories.snapshots(), directories.trash(), directories.store(), directories.lazy()] {
            create_dir(&directory, 0o700)?;
        }
        Ok(directories)
    }

    /// Returns the root.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the file of the records.
    #[must_use]
    pub fn metadata(&self) -> PathBuf {
        self.root.join(METADATA)
    }

    /// Returns the store of images.
    #[must_use]
    pub fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// Returns the directory of images that are fetched on demand.
    #[must_use]
    pub fn lazy(&self) -> PathBuf {
        self.root.join("lazy")
    }

    /// Returns the directory of recorded starts of images.
    #[must_use]
    pub fn traces(&self) -> PathBuf {
        self.root.join("traces")
    }

    /// Returns the directory of all snapshots.
    #[must_use]
    pub fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    /// Returns the directory for tests at start.
    #[must_use]
    pub fn probe(&self) -> PathBuf {
        self.root.join("probe")
    }

    fn trash(&self) -> PathBuf {
        self.root.join("trash")
    }

    /// Returns the directory of a snapshot.
    #[must_use]
    pub fn snapshot(&self, id: u64) -> PathBuf {
        self.snapshots().join(id.to_string())
    }

    /// Returns a snapshot's own files.
    #[must_use]
    pub fn upper(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("fs")
    }

    /// Returns overlayfs's work directory.
    #[must_use]
    pub fn work(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("work")
    }

    /// Returns the image of a layer.
    #[must_use]
    pub fn image(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("image")
    }

    /// Returns the image of a layer that is not yet committed.
    #[must_use]
    pub fn applied(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("applied")
    }

    /// Returns the mount point of a layer's image.
    #[must_use]
    pub fn layer(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("layer")
    }

    /// Returns the image of a layer and all below it.
    #[must_use]
    pub fn merged_image(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("merged-image")
    }

    /// Returns the mount point of that image.
    #[must_use]
    pub fn merged(&self, id: u64) -> PathBuf {
        self.snapshot(id).join(MERGED)
    }

    /// Returns the directory of idmapped layers.
    #[must_use]
    pub fn lower(&self, id: u64) -> PathBuf {
        self.snapshot(id).join("lower")
    }

    /// Creates the directory of a snapshot. Files of a killed process with this id are removed first.
    ///
    /// # Errors
    ///
    /// The file system refuses.
    pub fn add(&self, id: u64, owner: Owner, is_writable: bool) -> Result<()> {
        let directory = self.snapshot(id);
        if directory.symlink_metadata().is_ok() {
            self.discard(&directory)?;
        }
        create_dir(&directory, 0o700)?;
        let upper = self.upper(id);
        create_dir(&upper, 0o755)?;
        chown(&upper, Some(owner.uid), Some(owner.gid)).doing("change the owner of", &upper)?;
        // After the change of owner, which can clear bits; and not subject to the umask.
        fs::set_permissions(&upper, fs::Permissions::from_mode(owner.mode)).doing("change", &upper)?;
        if is_writable {
            create_dir(&self.work(id), 0o700)?;
        }
        let snapshots = self.snapshots();
        File::open(&snapshots).and_then(|directory| directory.sync_all()).doing("sync", snapshots)
    }

    /// Returns the directories of snapshots whose ids are not among these, and everything else beside them.
    ///
    /// # Errors
    ///
    /// They cannot be listed.
    pub fn unknown(&self, is_known: impl Fn(u64) -> bool) -> Result<Vec<PathBuf>> {
        let snapshots = self.snapshots();
        let mut unknown = Vec::new();
        for entry in fs::read_dir(&snapshots).doing("list", &snapshots)? {
            let name = entry.doing("list", &snapshots)?.file_name();
            let id = name.to_str().and_then(|name| name.parse().ok());
            if !id.is_some_and(&is_known) {
                unknown.push(snapshots.join(name));
            }
        }
        Ok(unknown)
    }

    /// Moves a directory to the trash, by a rename; `None`: it does not exist. It stays there until
    /// [`Self::remove_trash`] or [`Self::empty_trash`].
    ///
    /// # Errors
    ///
    /// The file system refuses.
    pub fn take(&self, directory: &Path) -> Result<Option<OsString>> {
        trash::put(&self.trash(), directory).doing("remove", directory)
    }

    /// Removes a directory in the trash.
    ///
    /// # Errors
    ///
    /// The file system refuses.
    pub fn remove_trash(&self, name: &OsString) -> Result<()> {
        trash::remove(&self.trash(), name).doing("remove", self.trash().join(name))
    }

    /// Removes a directory of a snapshot, on which nothing is mounted, or one in it.
    ///
    /// # Errors
    ///
    /// The file system refuses.
    pub fn discard(&self, directory: &Path) -> Result<()> {
        match self.take(directory)? {
            Some(name) => self.remove_trash(&name),
            None => Ok(()),
        }
    }

    /// Removes everything in the trash, including the remains of interrupted removals. `unmount` is called before, with each
    /// directory.
    ///
    /// # Errors
    ///
    /// The file system refuses to remove one of them; the others are removed.
    pub fn empty_trash(&self, unmount: impl Fn(&Path) -> Result<()>) -> Result<()> {
        let trash = self.trash();
        let mut outcome = Ok(());
        for entry in fs::read_dir(&trash).doing("list", &trash)? {
            let name = entry.doing("list", &trash)?.file_name();
            let removed = unmount(&trash.join(&name)).and_then(|()| self.remove_trash(&name));
            outcome = outcome.and(removed);
        }
        outcome
    }
}

/// Fails if a directory has files but no database: files without a record are removed, and these may belong to another snapshotter.
fn refuse_others(root: &Path) -> Result<()> {
    let is_empty = |path: &Path| -> Result<bool> {
        match fs::read_dir(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(false),
            entries => Ok(entries.doing("list", path)?.next().is_none()),
        }
    };
    if is_empty(root)? || root.join(METADATA).symlink_metadata().is_ok() {
        return Ok(());
    }
    for entry in fs::read_dir(root).doing("list", root)? {
        let path = entry.doing("list", root)?.path();
        let is_known = match path.file_name().and_then(OsStr::to_str) {
            Some("store" | "traces" | "lost+found") => true,
            // A first start that was killed.
            Some("snapshots" | "trash" | "lazy" | "probe") => is_empty(&path)?,
            _ => false,
        };
        if !is_known {
            let why = format!(
                "the root {} has files and no {METADATA}: {} may be another program's, and would be removed. Name an empty directory as \
                 root, or restore {METADATA}",
                root.display(),
                path.display()
            );
            return Err(Error::InvalidArgument(why));
        }
    }
    Ok(())
}

/// Creates a directory with these permissions, whatever the umask, unless it exists.
pub(crate) fn create_dir(path: &Path, mode: u32) -> Result<()> {
    match DirBuilder::new().recursive(true).mode(mode).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error).doing("create", path),
        _ if path.is_dir() => Ok(()),
        _ => Err(io::Error::from(ErrorKind::NotADirectory)).doing("use", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_that_mounts_cannot_name_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["a:b", "a,b", "a\\b", "a b", "a\"b", "a\nb", &"x".repeat(ROOT_BYTES_MAX)] {
            let root = directory.path().join(name);
            assert!(matches!(Directories::create(&root), Err(Error::InvalidArgument(_))), "{name:?}");
            assert!(!root.exists(), "{name:?}");
        }
        assert!(matches!(Directories::create(Path::new("relative")), Err(Error::InvalidArgument(_))));
    }

    #[test]
    fn a_root_of_another_program_is_refused_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        for (files, is_refused) in [
            (&["snapshots/1/fs/x", "metadata.db"][..], true),
            (&["snapshots/1/fs/x"], true),
            (&["lazy/key/image"], true),
            (&["containerd/x"], true),
            (&["snapshots"], true),
            (&["store/packs/x", "traces/x"], false),
            (&["snapshots/1/fs/x", METADATA], false),
        ] {
            let root = directory.path().join("root");
            for file in files {
                fs::create_dir_all(root.join(file).parent().unwrap()).unwrap();
                fs::write(root.join(file), "some").unwrap();
            }
            fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
            match Directories::create(&root) {
                Ok(_) => assert!(!is_refused, "{files:?}"),
                Err(error) => {
                    let (text, mode) = (error.to_string(), fs::metadata(&root).unwrap().mode() & 0o777);
                    assert!(is_refused && text.contains("no metadata.redb") && mode == 0o755, "{files:?}: {text}");
                    assert!(files.iter().all(|file| root.join(file).exists()), "{files:?}");
                }
            }
            fs::remove_dir_all(&root).unwrap();
        }
        let root = directory.path().join("first");
        for _ in 0..2 {
            // The first start may be killed before it creates the database.
            Directories::create(&root).unwrap();
        }
    }

    #[test]
    fn directories_are_added_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let directories = Directories::create(&directory.path().join("root")).unwrap();
        let owner = Owner { mode: 0o1777, ..Owner::of(directory.path()).unwrap() };
        for writable in [true, false] {
            // The second finds what the first left.
            directories.add(7, owner, writable).unwrap();
            assert_eq!(Owner::of(&directories.upper(7)).unwrap(), owner);
            assert_eq!(directories.work(7).exists(), writable);
        }
        directories.add(8, owner, true).unwrap();
        fs::write(directories.upper(8).join("file"), "some").unwrap();
        fs::write(directories.snapshots().join("new-1"), "").unwrap();
        assert_eq!(directories.unknown(|id| id == 7).unwrap().len(), 2);
        directories.discard(&directories.snapshot(8)).unwrap();
        directories.discard(&directories.snapshot(8)).unwrap();
        assert_eq!(directories.unknown(|id| id == 7).unwrap(), [directories.snapshots().join("new-1")]);
        for name in ["left/over", "kept", "more"] {
            fs::create_dir_all(directories.trash().join(name)).unwrap();
        }
        let unmount = |directory: &Path| match directory.ends_with("kept") {
            true => Err(Error::NotFound("it".into())),
            false => Ok(()),
        };
        assert!(directories.empty_trash(unmount).is_err());
        let left: Vec<_> = fs::read_dir(directories.trash()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["kept"], "the others are removed if one fails");
    }
}
