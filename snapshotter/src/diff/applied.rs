//! A layer that was unpacked into an active snapshot as an image, `ROOT/snapshots/ID/applied`, until it is committed.
//!
//! The file is the only state, so a restart loses nothing. Its packs are needed while it exists.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::ErrorKind;

use ferry_image::{Image, walk};
use ferry_vfs::FileType;

use crate::error::{Error, IoContext, Result};
use crate::layers::Layers;
use crate::metadata::{LayerImage, Usage};
use crate::mounted;

/// The size of a block of the directory's file system, in bytes.
const BLOCK_BYTES: u64 = 4096;
/// The length of symbolic links that take no block, in bytes.
const SHORT_LINK_BYTES: u64 = 60;

/// A layer that was unpacked into a snapshot.
#[derive(Debug)]
pub(crate) struct Applied {
    pub image: LayerImage,
    /// The space that the layer would take as a directory.
    pub usage: Usage,
}

impl Layers {
    /// Whether a layer was unpacked into a snapshot.
    pub(crate) fn is_applied(&self, id: u64) -> Result<bool> {
        let path = self.directories.applied(id);
        path.try_exists().doing("inspect", path)
    }

    /// Returns the layer that was unpacked into a snapshot, if there is one.
    pub(crate) fn applied(&self, id: u64) -> Result<Option<Applied>> {
        if !self.is_applied(id)? {
            return Ok(None);
        }
        let image = Image::open(&self.directories.applied(id), None)?;
        let packs = image.packs().iter().map(|pack| pack.name.hex()).collect();
        let digest = image.digest().to_string();
        Ok(Some(Applied { image: LayerImage { digest, packs }, usage: usage(&image)? }))
    }

    /// Mounts the layer that was unpacked into a snapshot, unless the snapshot was used otherwise. [`Self::undo`] reverts this.
    pub(crate) fn adopt(&self, id: u64, image: &LayerImage) -> Result<()> {
        let upper = self.directories.upper(id);
        let changed = fs::read_dir(&upper).doing("list", &upper)?.next().is_some();
        if changed || mounted::is_in_use(&upper)? {
            let what = if changed { "has been written to" } else { "is mounted" };
            return Err(Error::FailedPrecondition(format!(
                "the directory {} {what}, and a layer was unpacked into its snapshot: commit the layer first",
                upper.display()
            )));
        }
        // Remains of a commit with an unknown outcome.
        self.remove_image(id)?;
        let path = self.directories.image(id);
        fs::hard_link(self.directories.applied(id), &path).doing("create", path)?;
        // The record says soon that it is there, and the other name goes.
        let directory = self.directories.snapshot(id);
        File::open(&directory).and_then(|directory| directory.sync_all()).doing("sync", directory)?;
        let mounted = self.mount(id, image);
        if mounted.is_err() {
            self.undo(id);
        }
        mounted.map(drop)
    }

    /// Removes the layer that was unpacked into a snapshot.
    pub(crate) fn remove_applied(&self, id: u64) -> Result<()> {
        let path = self.directories.applied(id);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.doing("remove", path),
        }
    }
}

/// Returns the space of a tree as a directory of ext4.
fn usage(image: &Image) -> Result<Usage> {
    let (mut linked, mut bytes, mut inodes) = (HashSet::new(), 0_u64, 0);
    walk(image, image.root(), b"/", |_, inode| {
        let kind = inode.kind();
        if kind != FileType::Directory && inode.nlink > 1 && !linked.insert(inode.nid) {
            return Ok(());
        }
        inodes += 1;
        bytes += match kind {
            FileType::Directory => inode.bytes.max(1).next_multiple_of(BLOCK_BYTES),
            FileType::Symlink if inode.bytes < SHORT_LINK_BYTES => 0,
            FileType::RegularFile | FileType::Symlink => inode.bytes.next_multiple_of(BLOCK_BYTES),
            _ => 0,
        };
        Ok::<(), ferry_image::Flaw>(())
    })
    .map_err(|reason| ferry_image::Error::Invalid { path: "a layer".into(), reason })?;
    Ok(Usage { bytes: i64::try_from(bytes).unwrap_or(i64::MAX), inodes })
}
