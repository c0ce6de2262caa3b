//! Events for programs of a guest that watch files.
//!
//! An agent in the guest waits for events by an ioctl on the root directory, and replays each as the same system call
//! on the mount. Its kernel then raises the events for everybody who watches, and corrects what it has cached. The
//! requests that the agent causes are recognised by the group of the caller (`REPLAY_GID`) and answered from what is
//! true already. They never change the source, whether they were announced or not.
//!
//! Here is what a session keeps for that; `operations/agent.rs` and `operations/replay.rs` serve the requests. What other
//! exports need for clients of theirs is public: [`subscribe`] fills a [`Queue`] with what happens to what an
//! [`EventClient`] knows.

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

/// What one session tells its agent.
#[derive(Default)]
pub(crate) struct SessionEvents {
    /// From the first request of an agent on.
    queue: OnceLock<(Arc<Queue>, Subscription)>,
    pub(crate) replays: Mutex<Replays>,
    pub(crate) lease: Lease,
}

impl SessionEvents {
    /// The queue, if an agent has asked for events.
    pub(crate) fn queue(&self) -> Option<&Arc<Queue>> {
        self.queue.get().map(|(queue, _)| queue)
    }

    /// The queue; a new one is filled by what `subscribe` returns.
    pub(crate) fn queue_or(&self, is_leased: bool, subscribe: impl FnOnce(&Arc<Queue>) -> Subscription) -> &Arc<Queue> {
        let (queue, _) = self.queue.get_or_init(|| {
            let queue = Arc::new(Queue::new(is_leased));
            let subscription = subscribe(&queue);
            (queue, subscription)
        });
        queue
    }

    /// The client goes on elsewhere, or here later: the agent asks again.
    pub(crate) fn give_up(&self) {
        if let Some(queue) = self.queue() {
            queue.interrupt();
        }
    }
}
