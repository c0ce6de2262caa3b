//! What one guest holds, from its INIT to its end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_vfs::{Caller, Errno, FileSystem, Handle, Ino, Result, SessionId};
use ferry_wire::fuse::Negotiated;

/// Shards, so that queues rarely meet; a power of two.
const SHARDS: usize = 64;

#[derive(Clone, Copy)]
struct Open {
    ino: Ino,
    is_dir: bool,
}

#[derive(Default)]
struct Shard {
    references: HashMap<Ino, u64>,
    handles: HashMap<Handle, Open>,
}

/// One guest's session: what was agreed on, and what to give back when the guest is gone.
pub(crate) struct Mount {
    pub(crate) id: SessionId,
    pub(crate) negotiated: Negotiated,
    source: Arc<dyn FileSystem>,
    shards: [Mutex<Shard>; SHARDS],
}

impl Mount {
    pub(crate) fn new(source: Arc<dyn FileSystem>, negotiated: Negotiated) -> Self {
        let shards = std::array::from_fn(|_| Mutex::default());
        Self { id: SessionId::unique(), negotiated, source, shards }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, Shard> {
        let index = usize::try_from(number % SHARDS as u64).unwrap_or(0);
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest was told of an inode, and has one reference more.
    pub(crate) fn refer(&self, ino: Ino) {
        *self.shard(ino.0).references.entry(ino).or_insert(0) += 1;
    }

    /// The guest gives references back; never more than it has.
    pub(crate) fn forget(&self, ino: Ino, count: u64) {
        let mut shard = self.shard(ino.0);
        let Some(held) = shard.references.get_mut(&ino) else { return };
        let count = count.min(*held);
        *held -= count;
        if *held == 0 {
            shard.references.remove(&ino);
        }
        drop(shard);
        self.source.forget(ino, count);
    }

    /// The guest has opened something.
    pub(crate) fn opened(&self, ino: Ino, handle: Handle, is_dir: bool) {
        self.shard(handle.0).handles.insert(handle, Open { ino, is_dir });
    }

    /// The guest closes a handle, which must be its own.
    pub(crate) fn release(&self, caller: &Caller<'_>, handle: Handle, is_dir: bool) -> Result<()> {
        let mut shard = self.shard(handle.0);
        match shard.handles.get(&handle) {
            Some(open) if open.is_dir == is_dir => {}
            _ => return Err(Errno::BADF),
        }
        let open = shard.handles.remove(&handle);
        drop(shard);
        if let Some(open) = open {
            self.close(caller, handle, open);
        }
        Ok(())
    }

    fn close(&self, caller: &Caller<'_>, handle: Handle, open: Open) {
        if open.is_dir {
            self.source.releasedir(caller, open.ino, handle);
        } else {
            self.source.release(caller, open.ino, handle);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let caller = Caller { session: self.id, ..Caller::default() };
        for shard in &self.shards {
            let Shard { references, handles } =
                std::mem::take(&mut *shard.lock().unwrap_or_else(PoisonError::into_inner));
            for (handle, open) in handles {
                self.close(&caller, handle, open);
            }
            for (ino, count) in references {
                self.source.forget(ino, count);
            }
        }
    }
}
