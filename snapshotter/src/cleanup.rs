//! What a killed process left, and what no snapshot needs: removed at start, and when containerd collects garbage.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::api::Kind;
use crate::erofs;
use crate::error::{IoContext, Result, log_failure};
use crate::layers::{may_pass, unmount_in};
use crate::metadata::{Record, RemoteLayers};
use crate::running::Running;
use crate::snapshotter::Snapshotter;

/// How often a collection is tried while other processes use the store, and the pause after the first try, which doubles: a minute in all.
const COLLECTIONS_MAX: u32 = 6;
const COLLECTION_PAUSE: Duration = Duration::from_secs(1);

impl Snapshotter {
    /// Removes the directories of recorded images, and images that were not recorded.
    pub(crate) fn finish_interrupted(&self) -> Result<()> {
        self.metadata.for_each(|name, record| {
            log_failure(self.finish_one(name, &record));
            Ok(())
        })
    }

    fn finish_one(&self, name: &str, record: &Record) -> Result<()> {
        let id = record.id;
        let is_directory = record.is_directory();
        if !is_directory {
            // Before the only other copy is removed.
            self.restore_image(record)?;
            self.remove_upper(id)?;
        } else if !self.directories.upper(id).exists() {
            tracing::error!("the directory of snapshot {name} is missing: {}", self.directories.upper(id).display());
        }
        let entries = match fs::read_dir(self.directories.snapshot(id)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.doing("list", self.directories.snapshot(id))?,
        };
        let kept: &[&str] = match is_directory {
            true => &["fs", "work", "lower", "applied", "share"],
            false if record.merged.is_empty() => &["image", "layer"],
            false => &["image", "layer", "merged-image", "merged"],
        };
        for entry in entries.flatten().filter(|entry| !kept.iter().any(|kept| entry.file_name() == *kept)) {
            let path = entry.path();
            erofs::unmount_all(&path)?;
            let removed = if path.is_dir() { fs::remove_dir(&path) } else { fs::remove_file(&path) };
            removed.doing("remove", path)?;
        }
        Ok(())
    }

    /// Removes directories without a snapshot, and packs without an image. What cannot be removed is logged, and stays until the next time.
    ///
    /// # Errors
    ///
    /// The metadata, the directories or the store cannot be read.
    pub fn cleanup(&self) -> Result<()> {
        self.metadata.with_ids(|ids| {
            let take = |directory: PathBuf| {
                tracing::info!("removing a directory without a snapshot: {}", directory.display());
                let id = directory.file_name().and_then(|id| id.to_str()?.parse().ok());
                id.into_iter().for_each(|id| self.shares.end(id, &directory));
                unmount_in(&directory)?;
                self.directories.take(&directory).map(drop)
            };
            self.directories.unknown(|id| ids.contains(&id))?.into_iter().for_each(|path| log_failure(take(path)));
            Ok(())
        })?;
        // Removing takes long, and others can change snapshots meanwhile.
        log_failure(self.directories.empty_trash(unmount_in));
        let collected = self.collect();
        log_failure(self.layers.detect_again());
        collected
    }

    /// Repeats, on a thread, a collection that left garbage: an image was being pulled, or another process uses the store or a pack.
    pub fn collect_in_background(self: &Arc<Self>) {
        if !self.has_left_garbage() {
            return;
        }
        let Some(collecting) = Running::begin(&self.collecting) else { return };
        // The metadata is closed when the program ends.
        let (lazy, snapshotter) = (Arc::clone(&self.lazy), Arc::downgrade(self));
        let collect = move || {
            for tried in 0..COLLECTIONS_MAX {
                lazy.wait_for_pulls();
                let Some(all) = snapshotter.upgrade() else { return };
                log_failure(all.collect());
                if !all.has_left_garbage() {
                    break;
                }
                drop(all);
                thread::sleep(COLLECTION_PAUSE * (1 << tried));
            }
            drop(collecting);
            // One that was skipped since the last look found this thread running.
            if let Some(all) = snapshotter.upgrade().filter(|all| all.lazy.has_skipped()) {
                all.collect_in_background();
            }
        };
        if let Err(error) = thread::Builder::new().name("collect".into()).spawn(collect) {
            tracing::warn!("cannot start a thread: {error}");
        }
    }

    fn has_left_garbage(&self) -> bool {
        self.lazy.has_skipped() || self.layers.has_garbage()
    }

    /// Removes images and packs that no snapshot needs, unless an image is being pulled.
    fn collect(&self) -> Result<()> {
        let known = || {
            let mut known: Vec<RemoteLayers> = Vec::new();
            self.metadata.for_each(|_, record| {
                known.extend(record.remote);
                Ok(())
            })?;
            Ok(known)
        };
        self.lazy.collect(known, |is_less, incomplete| {
            if is_less {
                self.layers.note_garbage();
            }
            let Some(incomplete) = incomplete else { return Ok(()) };
            self.layers.collect(incomplete, || {
                let mut needed = BTreeSet::new();
                self.metadata.for_each(|_, record| {
                    let image = if record.kind() == Kind::Active {
                        self.layers.applied(record.id).map(|applied| Some(applied?.image))
                    } else {
                        Ok(record.image)
                    };
                    match image {
                        Ok(image) => needed.extend(image.into_iter().flat_map(|image| image.packs)),
                        Err(error) if may_pass(&error) => return Err(error),
                        // A damaged one cannot be committed.
                        Err(error) => log_failure(Err(error)),
                    }
                    Ok(())
                })?;
                Ok(needed)
            })
        })
    }

    /// Restores the image of a layer: after a power failure the record can exist without the file's second name.
    fn restore_image(&self, record: &Record) -> Result<()> {
        let (Some(image), path) = (&record.image, self.directories.image(record.id)) else { return Ok(()) };
        if path.exists() {
            return Ok(());
        }
        match self.layers.applied(record.id)? {
            Some(applied) if applied.image.digest == image.digest => {
                let applied = self.directories.applied(record.id);
                fs::rename(&applied, &path).doing("rename", applied)
            }
            _ => Ok(()),
        }
    }

    /// Removes the directory that an image has replaced.
    pub(crate) fn remove_upper(&self, id: u64) -> Result<()> {
        self.layers.remove_applied(id)?;
        self.directories.discard(&self.directories.work(id))?;
        self.directories.discard(&self.directories.upper(id))
    }
}
