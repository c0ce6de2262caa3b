//! Events for programs in a guest that watch files.
//!
//! An agent in the guest waits for events by an ioctl on the root directory, and replays each as the same system call
//! on the mount. The guest's kernel then raises the event for every watcher and corrects its caches. The agent's
//! requests have the group `REPLAY_GID`. Their replies reflect the present state. They never change the source,
//! announced or not.
//!
//! This module holds the state of a session; `operations/agent.rs` and `operations/replay.rs` serve the requests.
//! Other exports use the public items for their clients: [`subscribe`] fills a [`Queue`] with the events of the
//! inodes that an [`EventClient`] knows.

mod lease;
mod listener;
mod queue;
mod replays;
mod timer;

use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::Subscription;

pub(crate) use lease::{Lease, RENEWAL};
pub use listener::{EventClient, subscribe};
pub use queue::Queue;
pub(crate) use replays::{Active, Placeholder, Replays};
pub use timer::Timer;

/// The events of one session for its agent.
#[derive(Default)]
pub(crate) struct SessionEvents {
    /// Set by the first request of an agent.
    queue: OnceLock<(Arc<Queue>, Subscription)>,
    pub(crate) replays: Mutex<Replays>,
    pub(crate) lease: Lease,
}

impl SessionEvents {
    /// Returns the queue if an agent has requested events.
    pub(crate) fn queue(&self) -> Option<&Arc<Queue>> {
        self.queue.get().map(|(queue, _)| queue)
    }

    /// Returns the queue; creates it if there is none and fills it by `subscribe`.
    pub(crate) fn queue_or(&self, is_leased: bool, subscribe: impl FnOnce(&Arc<Queue>) -> Subscription) -> &Arc<Queue> {
        let (queue, _) = self.queue.get_or_init(|| {
            let queue = Arc::new(Queue::new(is_leased));
            let subscription = subscribe(&queue);
            (queue, subscription)
        });
        queue
    }

    /// Ends the agent's wait with EINTR: the client migrates or changes servers, and the agent repeats the request.
    pub(crate) fn interrupt_agent(&self) {
        if let Some(queue) = self.queue() {
            queue.interrupt();
        }
    }
}
