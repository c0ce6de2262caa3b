//! Takes chains from the queues and serves them, here or on the pool.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ferry_engine::PoolTransfer;

use super::{ChainState, Placement, QueueHandler, Worker, WorkerContext};
use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::io::ServedChain;
use crate::ring::{PopOutcome, RingError};
use crate::takeover::Completion;

/// Chains per batch: enough to share system calls, few enough that the driver can process the first while the last
/// are served.
const BATCH_MAX: usize = 64;

impl<H: QueueHandler> Worker<H> {
    pub(super) fn take_batch(mut self: Box<Self>, context: &mut WorkerContext<H>) -> Option<(Box<Self>, usize)> {
        let mut all = 0;
        for index in 0..self.running.len() {
            let took;
            (self, took) = self.take_from(context, index)?;
            all += took;
        }
        Some((self, all))
    }

    /// Serves the available chains of one queue; returns their number. `None`: another thread has the queues.
    fn take_from(mut self: Box<Self>, context: &mut WorkerContext<H>, index: usize) -> Option<(Box<Self>, usize)> {
        for took in 0..BATCH_MAX {
            if !self.take_one(&context.handler, index) {
                return Some((self, took));
            }
            let token = self.slots.next_token();
            context.accept(token, &self.chain);
            let placement = match &context.takeover {
                Some(takeover) => takeover.slow.place(|| context.handler.placement(&self.chain)),
                None => Placement::Here,
            };
            if placement != Placement::Here {
                self.send_chain_to_pool(context, index, token, placement);
                continue;
            }
            let chain = std::mem::take(&mut self.chain);
            // Keeps the memory mapped while the handler uses it.
            let memory = Arc::clone(self.running[index].ring.memory());
            self.serving = Some((self.running[index].queue, chain.stub()));
            let (worker, served) = self.with_takeover(context, |handler, _| ServedChain::by(handler, &chain, token));
            let Some(worker) = worker else {
                context.hand_back(token, chain, &memory, served);
                return None;
            };
            self = worker;
            self.serving = None;
            self.served(context, index, token, chain, served);
        }
        Some((self, BATCH_MAX))
    }

    /// Takes the next chain of a queue; returns whether there is one.
    pub(super) fn take_one(&mut self, handler: &H, index: usize) -> bool {
        let running = &mut self.running[index];
        for _ in 0..BATCH_MAX {
            // In this order: a chain may lie in memory that an earlier command announced.
            let is_there = !running.broken && running.ring.has_available();
            if !is_there || self.port.0.is_filled() && !running.ring.is_recovering() {
                return false;
            }
            // Chains of the previous server are not delayed: a stop waits for them.
            if let Some(delay) = handler.delay(running.queue).filter(|_| !running.ring.is_recovering()) {
                running.delayed_until = Some(Instant::now() + delay);
                return false;
            }
            running.delayed_until = None;
            let popped = match running.out < usize::from(QUEUE_SIZE_MAX) {
                true => running.ring.pop(&mut self.chain),
                // A correct driver has no more chains in flight than its ring has entries.
                false => Err(RingError::TooManyChains),
            };
            match popped {
                Ok(PopOutcome::Chain) => {
                    running.spurious_kicks = 0;
                    // A driver without indirect descriptors has three or four for a chain.
                    self.chain.parked_max = usize::from(running.ring.size() / 4);
                    self.chain.parked.get_or_insert_with(|| Arc::clone(&self.parked));
                    return true;
                }
                Ok(PopOutcome::Empty) => return false,
                Ok(PopOutcome::Dropped(error)) => {
                    running.touched = true;
                    self.ratelimited_log.warn(format_args!("{}: a request was dropped: {error}", self.name));
                }
                Err(error) => {
                    running.fail_queue(&self.name, &error, &self.ratelimited_log);
                    return false;
                }
            }
        }
        false
    }

    /// Completes or stores a chain that was served here.
    pub(super) fn served(
        &mut self,
        context: &mut WorkerContext<H>,
        index: usize,
        token: u64,
        chain: Chain,
        mut served: ServedChain,
    ) {
        let running = &mut self.running[index];
        if let ChainState::Done(written) = served.state {
            running.push(&chain, None, context.handler.complete(token, written));
            self.chain = chain;
            return;
        }
        // SAFETY: the slot keeps the memory until the transfer has ended.
        unsafe { served.queue(&mut context.transfers, &chain, token) };
        self.slots.put(running.queue, chain, running.ring.memory(), served.state == ChainState::Parked);
        running.out += 1;
        self.chain = self.spare.pop().unwrap_or_default();
    }

    /// Serves the taken chain on another thread.
    fn send_chain_to_pool(&mut self, context: &mut WorkerContext<H>, index: usize, token: u64, placement: Placement) {
        let Some(takeover) = context.takeover.clone() else { return };
        let running = &mut self.running[index];
        let spare = self.spare.pop().unwrap_or_default();
        let (chain, memory) = (std::mem::replace(&mut self.chain, spare), Arc::clone(running.ring.memory()));
        self.slots.put_away(running.queue, chain.stub(), &memory);
        running.out += 1;
        let order = match placement {
            Placement::InOrder(number) => Some(number),
            Placement::Here | Placement::Anywhere => None,
        };
        let pool = Arc::clone(&takeover.pool);
        takeover.slow.sent_elsewhere();
        takeover.slow.ordered.fetch_add(order.map_or(0, |_| 1), Ordering::Relaxed);
        let job = move |handler: &mut H| {
            let start = Instant::now();
            let served = ServedChain::by(handler, &chain, token);
            // SAFETY: `memory` is what the chain lies in.
            let state = unsafe { served.finish(handler, &chain, token) };
            drop(memory);
            let _ = catch_unwind(AssertUnwindSafe(|| handler.end_batch()));
            takeover.slow.ordered.fetch_sub(order.map_or(0, |_| 1), Ordering::Release);
            takeover.slow.served_elsewhere(Some(start.elapsed()));
            takeover.complete(Completion::Served { token, chain, state });
        };
        if let Err(job) = pool.run(order, Box::new(job)) {
            job(&mut context.handler);
        }
    }

    /// Runs a transfer on another thread.
    pub(super) fn send_to_pool(&mut self, context: &mut WorkerContext<H>, transfer: PoolTransfer) {
        let PoolTransfer { token, mut transfer } = transfer;
        let pending = context.handler.detach(token);
        let (Some(takeover), Some(memory)) = (context.takeover.clone(), self.slots.memory(token).cloned()) else {
            return;
        };
        let pool = Arc::clone(&takeover.pool);
        let job = move |_: &mut H| {
            // SAFETY: `memory` is what the chain lies in.
            let outcome = unsafe { transfer.run() };
            drop(memory);
            takeover.complete(Completion::Transferred { token, outcome, pending });
        };
        if let Err(job) = pool.run(None, Box::new(job)) {
            job(&mut context.handler);
        }
    }
}
