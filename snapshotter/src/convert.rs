//! Committed layers that stayed directories, because the disk was full or they were still mounted, become images later.
//!
//! Whoever is based on a directory keeps it: an overlayfs must not lose what is below it. So only a layer is taken that no container
//! and no view is based on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLockWriteGuard, TryLockError};
use std::thread;
use std::time::Duration;

use rustix::fs::statvfs;

use crate::api::Kind;
use crate::error::{Error, IoContext, Result, log_failure};
use crate::metadata::Record;
use crate::running::Running;
use crate::snapshotter::Snapshotter;

/// How often, and with which pause, a moment is looked for in which no snapshot is being added: ten seconds.
const TRIES: u32 = 500;
const PAUSE: Duration = Duration::from_millis(20);
/// What has to be free on the disk beside the bytes of a layer: the metadata of its image.
const ROOM_BYTES: u64 = 1 << 20;

impl Snapshotter {
    /// Makes images of layers that are directories, on a thread of its own, unless one does so already.
    pub fn convert_in_background(self: &Arc<Self>) {
        if !self.layers.builds() {
            return;
        }
        let Some(converting) = Running::begin(&self.converting) else { return };
        // The metadata is closed when the program ends.
        let snapshotter = Arc::downgrade(self);
        let convert = move || {
            let _converting = converting;
            let candidates = snapshotter.upgrade().map_or(Ok(Vec::new()), |all| all.directories());
            let none = |error| {
                log_failure(Err(error));
                Vec::new()
            };
            for (name, record) in candidates.unwrap_or_else(none) {
                let Some(all) = snapshotter.upgrade() else { return };
                log_failure(all.convert(&name, &record));
            }
        };
        if let Err(error) = thread::Builder::new().name("convert".into()).spawn(convert) {
            tracing::warn!("cannot start a thread: {error}");
        }
    }

    /// Returns the committed layers that are directories, and on which nothing but layers is based.
    fn directories(&self) -> Result<Vec<(String, Record)>> {
        let (mut all, mut uses) = (BTreeMap::new(), Vec::new());
        self.metadata.for_each(|name, record| {
            if record.kind() != Kind::Committed {
                uses.push(record.parent.clone());
            }
            all.insert(name.to_owned(), record);
            Ok(())
        })?;
        let mut used = BTreeSet::new();
        for mut name in uses {
            while let Some(record) = all.get(&name).filter(|_| used.insert(name.clone())) {
                name = record.parent.clone();
            }
        }
        let is_directory = |(name, record): &(String, Record)| {
            record.kind() == Kind::Committed && record.is_directory() && !used.contains(name)
        };
        Ok(all.into_iter().filter(is_directory).collect())
    }

    /// Makes one of them an image, if there is room.
    fn convert(&self, name: &str, record: &Record) -> Result<()> {
        let store = self.directories.store();
        let disk = statvfs(&store).doing("inspect", store)?;
        let needed = u64::try_from(record.usage.bytes).unwrap_or(0).saturating_add(ROOM_BYTES);
        if disk.f_bavail.saturating_mul(disk.f_frsize) < needed {
            return Ok(());
        }
        let _held = self.keys.hold(name);
        let is_it = |found: &Record| found.id == record.id && found.is_directory();
        if !self.metadata.get(name).is_ok_and(|found| is_it(&found)) {
            return Ok(());
        }
        let recording = self.layers.recording();
        let Some(image) = self.layers.build_later(record.id)? else { return Ok(()) };
        let recorded = self.quiet().map_or(Ok(false), |_quiet| {
            let is_free = self.directories()?.iter().any(|(_, found)| found.id == record.id);
            if is_free && !self.layers.is_mounted(record.id)? {
                self.metadata.set_image(name, image)?;
                return Ok(true);
            }
            Ok(false)
        });
        // After a failure of the disk, only the database knows.
        let is_recorded = match &recorded {
            Ok(done) => *done,
            Err(_) => self.metadata.get(name).is_ok_and(|found| !is_it(&found)),
        };
        let is_lost = recorded.is_err() && matches!(self.metadata.get(name), Err(Error::Metadata(_)));
        if !is_recorded && !is_lost {
            self.layers.undo(record.id);
        }
        drop(recording);
        if is_recorded {
            tracing::info!("layer {} was a directory, and is an image now", record.id);
            self.remove_upper(record.id)?;
        }
        recorded.map(drop)
    }

    /// Waits for a moment in which no snapshot is being added, and prevents it; `None`: there was none. A lock that is waited for
    /// would hold up all of them.
    fn quiet(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        for _ in 0..TRIES {
            match self.adding.try_write() {
                Ok(quiet) => return Some(quiet),
                Err(TryLockError::Poisoned(quiet)) => return Some(quiet.into_inner()),
                Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            }
        }
        None
    }
}
