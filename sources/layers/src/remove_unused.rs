//! Removal of unused data while the store is open, in the background: some seconds after engines ended the last use of a layer.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use ferry_image::{ExclusiveStore, error_chain};

use crate::error::Result;
use crate::lookup::Finder;

/// The time between two attempts while lookups run, which are short.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

impl Finder {
    /// Removes what is left of unused layers, after clients have dropped their last reference to a layer.
    pub(crate) fn remove_leftovers(self: &Arc<Self>) {
        if self.garbage.has_leftovers.swap(false, Ordering::AcqRel) {
            self.remove_unused_later();
        }
    }

    /// Schedules the removal of unused data. Engines end the uses of all layers of an image one after another.
    pub(crate) fn remove_unused_later(self: &Arc<Self>) {
        if self.garbage.is_scheduled.swap(true, Ordering::AcqRel) {
            return;
        }
        // The thread does not keep the store open while it sleeps.
        let (finder, mut pause) = (Arc::downgrade(self), self.options.removal_delay);
        let work = move || {
            loop {
                thread::sleep(pause);
                pause = RETRY_PAUSE;
                let Some(finder) = finder.upgrade() else { return };
                match finder.try_remove_unused() {
                    Ok(true) => return,
                    Ok(false) => {}
                    Err(error) => {
                        tracing::warn!("cannot remove the data of unused layers: {}", error_chain(&error));
                        finder.garbage.is_scheduled.store(false, Ordering::Release);
                        return;
                    }
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("layer-removal".into()).spawn(work) {
            tracing::warn!("cannot start a thread: {error}");
            self.garbage.is_scheduled.store(false, Ordering::Release);
        }
    }

    /// Removes the data of layers that no engine uses and no client has open. Returns `false` if files are in use that no entry names.
    fn try_remove_unused(&self) -> Result<bool> {
        let Ok(_removing) = self.garbage.removing.try_write() else { return Ok(false) };
        let Some(store) = ExclusiveStore::try_lock(&self.entries.store())? else { return Ok(false) };
        // Uses that end from now on, and references that are dropped, schedule the next removal.
        self.garbage.is_scheduled.store(false, Ordering::Release);
        self.garbage.has_leftovers.store(true, Ordering::Release);
        let mut has_leftovers = false;
        self.entries.remove_unused(&store, |used| {
            let open = self.tree.close_unused(|entry| used.contains(&self.entries.image(entry)));
            let open: HashSet<PathBuf> = open.iter().map(|entry| self.entries.image(entry)).collect();
            has_leftovers = !open.is_subset(used);
            open
        })?;
        self.garbage.has_leftovers.store(has_leftovers, Ordering::Release);
        Ok(true)
    }
}
