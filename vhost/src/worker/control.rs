//! Starts and stops the queues of a worker, and reads its commands.

use std::sync::Arc;

use super::running::Running;
use super::{Command, Control, QueueHandler, Start, StoppedQueue, Worker, WorkerContext};
use crate::dirty::Dirty;
use crate::io::ServedChain;
use crate::memory::Memory;
use crate::ring::{Begin, Ring, RingError};

impl<H: QueueHandler> Worker<H> {
    pub(super) fn read_commands(&mut self, context: &mut WorkerContext<H>) {
        // Replies first: a stop must see those that are queued behind it.
        let (replies, controls): (Vec<_>, Vec<_>) =
            self.port.0.take().into_iter().partition(|command| !matches!(command, Command::Control(_)));
        for command in replies.into_iter().chain(controls) {
            match command {
                Command::Reply(token, message) => self.deliver(context, token, message),
                Command::Completion => self.take_completions(context),
                Command::Control(Control::Start(queue, start, reply)) => {
                    let _ = reply.send(self.start(context, queue, start));
                }
                Command::Control(Control::Stop(queue, reply)) => {
                    let _ = reply.send(self.stop(context, queue));
                }
                Command::Control(Control::Memory(queue, memory)) => {
                    if let Some(running) = self.running_mut(queue) {
                        running.ring.set_memory(Arc::new(memory));
                    }
                }
                Command::Control(Control::Call(queue, call)) => {
                    if let Some(running) = self.running_mut(queue) {
                        running.call = call;
                        running.owes_signal = true;
                    }
                }
                Command::Control(Control::Error(queue, error)) => {
                    if let Some(running) = self.running_mut(queue) {
                        running.error = error;
                    }
                }
                Command::Control(Control::Quit) => self.quit = true,
            }
        }
    }

    fn start(&mut self, context: &mut WorkerContext<H>, queue: usize, start: Start) -> Result<(), RingError> {
        self.stop(context, queue);
        let Start { memory, setup, base, resumes, log, resubmitted, dirty, kick, call, error } = start;
        let stopped_at = self.stopped.iter().find(|(stopped, _)| *stopped == queue).map(|(_, at)| *at);
        let begin = match resumes && stopped_at == Some(base) {
            true => Begin::Resume(base),
            false => Begin::after(stopped_at, base, || setup.is_used(&memory)),
        };
        let owes_signal = log.is_some();
        if let (Some(log), Some(_), Begin::At(_)) = (&log, stopped_at, begin) {
            // All chains that this process took have replies, or the driver has restarted the ring.
            log.reset();
        }
        if self.queue_options.registers_memory {
            self.register(context, &memory);
        }
        let dirty = dirty.map(|log| Dirty::new(log, &memory, &setup));
        let mut ring = Ring::new(Arc::new(memory), &setup, begin, log)?;
        if !resubmitted.is_empty() {
            // They ended when the state was saved.
            self.slots.drop_parked(queue);
            if !ring.take_resubmitted(resubmitted) {
                tracing::warn!(
                    "queue {queue} was restarted from the beginning: requests that waited before the migration are dropped"
                );
            }
        }
        ring.want_kicks(false);
        let watch = context.transfers.watch(Arc::clone(&kick));
        if matches!(begin, Begin::At(_)) {
            self.slots.drop_parked(queue);
        }
        let out = self.slots.of_queue(queue).count();
        let (broken, spurious_kicks, touched) = (false, 0, true);
        self.running.push(Running {
            queue,
            ring,
            kick,
            watch,
            call,
            error,
            out,
            broken,
            owes_signal,
            spurious_kicks,
            delayed_until: None,
            dirty,
            touched,
        });
        for (token, message) in std::mem::take(&mut self.late) {
            self.deliver(context, token, message);
        }
        Ok(())
    }

    /// Registers this memory in place of the previous one, which is no longer in use.
    fn register(&self, context: &mut WorkerContext<H>, memory: &Memory) {
        // SAFETY: the owners are the mappings.
        if let Err(error) = unsafe { context.transfers.register_memory(memory.mapped()) } {
            self.ratelimited_log.warn(format_args!(
                "{}: cannot register the guest's memory with io_uring ({error}), so each transfer must look it up; \
                 raise the limit of locked memory (ulimit -l), or let the guest's memory be a memfd or huge pages",
                self.name
            ));
        }
    }

    fn stop(&mut self, context: &mut WorkerContext<H>, queue: usize) -> StoppedQueue {
        let Some(index) = self.running.iter().position(|running| running.queue == queue) else {
            let base = self.stopped.iter().find(|(stopped, _)| *stopped == queue).map_or(0, |(_, at)| *at);
            return StoppedQueue { base, out: self.slots.of_queue(queue).collect() };
        };
        // The base says nothing of the chains that the previous server left, so they are served first.
        while self.running[index].ring.is_recovering() && self.serve_resubmitted(context, index) {}
        self.drain(context);
        let running = self.running.swap_remove(index);
        if let Err(error) = context.transfers.unwatch(running.watch) {
            tracing::debug!("{}: cannot stop watching a kick descriptor: {error}", self.name);
        }
        let at = running.ring.position();
        self.stopped.retain(|(stopped, _)| *stopped != queue);
        // Otherwise the remaining chains are read from the log again.
        if !running.ring.is_recovering() {
            self.stopped.push((queue, at));
        }
        StoppedQueue { base: at, out: self.slots.of_queue(queue).collect() }
    }

    /// Serves a chain that the previous server left, without limits. Returns whether there was one.
    fn serve_resubmitted(&mut self, context: &mut WorkerContext<H>, index: usize) -> bool {
        if !self.take_one(&context.handler, index) {
            return false;
        }
        let (token, chain) = (self.slots.next_token(), std::mem::take(&mut self.chain));
        context.accept(token, &chain);
        let served = ServedChain::by(&mut context.handler, &chain, token);
        self.served(context, index, token, chain, served);
        true
    }

    /// Completes every chain that needs no external event. Parked ones stay.
    pub(super) fn drain(&mut self, context: &mut WorkerContext<H>) {
        let mut controls = Vec::new();
        loop {
            context.transfers.flush();
            self.finish_transfers(context);
            for command in self.port.0.take() {
                match command {
                    Command::Reply(token, message) => self.deliver(context, token, message),
                    Command::Completion => self.take_completions(context),
                    control @ Command::Control(_) => controls.push(control),
                }
            }
            self.publish();
            if self.slots.active() == 0 && context.transfers.unfinished() == 0 {
                break;
            }
            if let Err(error) = context.transfers.sleep() {
                tracing::error!("{}: {error}", self.name);
                break;
            }
        }
        for control in controls {
            self.port.0.post(control);
        }
    }
}
