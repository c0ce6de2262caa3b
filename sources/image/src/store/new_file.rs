//! Files that get their name when they are complete, and careful opening of untrusted files.

use std::fs::{self, File};
use std::path::Path;

use tempfile::TempPath;

use crate::format::digest::Digest;
use crate::format::error::{Error, IoContext, Result};
use crate::store::fsverity::{self, Verity};

/// The name prefix of an incomplete file.
pub(crate) const NEW_PREFIX: &str = ".new-";

/// A file without its final name. It is removed when dropped.
pub(crate) struct NewFile {
    pub file: File,
    pub path: TempPath,
}

impl NewFile {
    /// Creates a file in this directory.
    pub(crate) fn begin(directory: &Path) -> Result<Self> {
        let file =
            tempfile::Builder::new().prefix(NEW_PREFIX).tempfile_in(directory).doing("make a file in", directory)?;
        let (file, path) = file.into_parts();
        Ok(Self { file, path })
    }

    /// Makes it durable under its name, readable by all users, and replaces an earlier file.
    pub(crate) fn keep(self, name: &Path) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        self.file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*self.path)?;
        self.file.sync_all().doing("sync", &*self.path)?;
        Self::name(self.path, name)
    }

    /// As [`Self::keep`]. With its fs-verity digest, also enables fs-verity where supported: the file cannot change any
    /// more, and the kernel verifies reads.
    pub(crate) fn keep_sealed(self, name: &Path, verity: Option<Digest>) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let Some(verity) = verity else { return self.keep(name) };
        let Self { file, path } = self;
        file.set_permissions(fs::Permissions::from_mode(0o444)).doing("change", &*path)?;
        // It must not be open for writing when fs-verity is enabled.
        drop(file);
        let file = File::open(&path).doing("open", &*path)?;
        if let Verity::On(found) = fsverity::enable_if_supported(&file).doing("turn fs-verity on for", &*path)?
            && found != verity
        {
            return Err(Error::Unlike { path: name.into(), wanted: verity, found });
        }
        file.sync_all().doing("sync", &*path)?;
        Self::name(path, name)
    }

    /// Gives a durable file its name.
    fn name(path: TempPath, name: &Path) -> Result<()> {
        path.persist(name).map_err(|error| error.error).doing("make", name)?;
        let directory = directory_of(name);
        File::open(directory).and_then(|directory| directory.sync_all()).doing("sync", directory)
    }
}

/// Returns the directory of a file.
pub(crate) fn directory_of(name: &Path) -> &Path {
    name.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
