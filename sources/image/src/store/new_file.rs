//! Files that have no name until they are complete, and files of others that are opened with care.

use std::fs::{self, File};
use std::path::Path;

use rustix::fs::OFlags;
use tempfile::TempPath;

use crate::format::digest::Digest;
use crate::format::error::{Error, IoContext, Result};
use crate::store::fsverity::{self, Verity};

/// What begins the name of a file that is not complete.
pub(crate) const NEW_PREFIX: &str = ".new-";

/// A file that is not there until it is complete. If that never happens, it goes.
pub(crate) struct NewFile {
    pub file: File,
    pub path: TempPath,
}

impl NewFile {
    /// Begins a file in this folder.
    pub(crate) fn begin(folder: &Path) -> Result<Self> {
        let file = tempfile::Builder::new().prefix(NEW_PREFIX).tempfile_in(folder).doing("make a file in", folder)?;
        let (file, path) = file.into_parts();
        Ok(Self { file, path })
    }

    /// Makes it durable under its name, readable by everybody, with what stood there before replaced.
    pub(crate) fn keep(self, name: &Path) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        self.file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*self.path)?;
        self.file.sync_all().doing("sync", &*self.path)?;
        Self::name(self.path, name)
    }

    /// The same; with its fs-verity digest, fs-verity is on for the file where the file system has it: nobody can change it any more then,
    /// and the kernel proves what is read of it.
    pub(crate) fn keep_sealed(self, name: &Path, verity: Option<Digest>) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let Some(verity) = verity else { return self.keep(name) };
        let Self { file, path } = self;
        file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*path)?;
        // Nobody may have it open for writing when fs-verity is turned on.
        drop(file);
        let file = File::open(&path).doing("open", &*path)?;
        if let Verity::On(found) = fsverity::turn_on(&file).doing("turn fs-verity on for", &*path)?
            && found != verity
        {
            return Err(Error::Unlike { path: name.into(), wanted: verity, found });
        }
        file.sync_all().doing("sync", &*path)?;
        Self::name(path, name)
    }

    /// Gives a file that is durable its name.
    fn name(path: TempPath, name: &Path) -> Result<()> {
        path.persist(name).map_err(|error| error.error).doing("make", name)?;
        let folder = folder_of(name);
        File::open(folder).and_then(|folder| folder.sync_all()).doing("sync", folder)
    }
}

/// The folder that a file is in.
pub(crate) fn folder_of(name: &Path) -> &Path {
    name.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// How a file is opened that was found: what has taken its place must not lead elsewhere, and opening it must neither wait nor do
/// anything. Who owns the tree may put anything there at any time.
pub(crate) const UNTRUSTED_OPEN_FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
