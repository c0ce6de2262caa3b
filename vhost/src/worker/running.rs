//! A queue that a worker serves.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_engine::RatelimitedLog;

use crate::chain::Chain;
use crate::dirty::Dirty;
use crate::memory::Memory;
use crate::ring::{Ring, RingError};

/// Kicks without an available chain after which the usual cause is logged.
const SPURIOUS_KICKS: u32 = 8;

/// A queue that is being served.
pub(super) struct Running {
    pub(super) queue: usize,
    pub(super) ring: Ring,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) watch: u64,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) error: Option<Arc<OwnedFd>>,
    /// Chains in flight.
    pub(super) out: usize,
    pub(super) broken: bool,
    /// The call descriptor must be signalled once: the previous server may have ended before it signalled its last
    /// batch, or the descriptor is new.
    pub(super) owes_signal: bool,
    pub(super) spurious_kicks: u32,
    /// No chain is taken before this time ([`QueueHandler::delay`](super::QueueHandler::delay)).
    pub(super) delayed_until: Option<Instant>,
    /// The log of written pages, and whether the ring was written since it was last marked.
    pub(super) dirty: Option<Dirty>,
    pub(super) touched: bool,
}

impl Running {
    /// Adds a chain to the used ring; it lies in this memory, or in the ring's.
    pub(super) fn push(&mut self, chain: &Chain, memory: Option<&Memory>, written: u32) {
        if let Some(dirty) = &self.dirty {
            dirty.chain(memory.unwrap_or_else(|| self.ring.memory()), chain);
        }
        self.ring.push(chain, written);
        self.touched = true;
    }

    pub(super) fn want_kicks(&mut self, wanted: bool) -> bool {
        let has_work = self.ring.want_kicks(wanted);
        self.touched = true;
        self.mark_ring();
        has_work
    }

    /// Marks the ring's pages if they were written.
    pub(super) fn mark_ring(&mut self) {
        if let Some(dirty) = self.dirty.as_ref().filter(|_| self.touched) {
            dirty.ring();
            self.touched = false;
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.broken && self.ring.has_available() && self.delay_left().is_none()
    }

    /// Returns how long no chain is taken, if that is so.
    pub(super) fn delay_left(&self) -> Option<Duration> {
        let left = self.delayed_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    pub(super) fn fail_queue(&mut self, name: &str, error: &RingError, ratelimited_log: &RatelimitedLog) {
        ratelimited_log.error(format_args!("{name}: stopped until the guest sets the queue up again: {error}"));
        self.broken = true;
        if let Some(fd) = &self.error {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn count_spurious_kick(&mut self, name: &str, ratelimited_log: &RatelimitedLog) {
        self.spurious_kicks += 1;
        if self.spurious_kicks == SPURIOUS_KICKS {
            ratelimited_log.warn(format_args!(
                "{name}: the guest kicks but its queue looks empty; if it hangs, its memory is not shared with us \
                 (QEMU: memory-backend-memfd,share=on; cloud-hypervisor: --memory shared=on)"
            ));
        }
    }
}
