//! Requests through /dev/fuse: threads that read one, serve it, and write the reply.

mod carrier;
mod cpu_affinity;
mod readers;
mod splice;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use ferry_engine::{CallSnapshot, CurrentRequest, GenerationCell, MonitoredWorker, NotEnded, Replacement, Watch};
use ferry_serve::{FuseCarrier, HEADER_BYTES, ServeOutcome, Server};
use ferry_vfs::Errno;
use ferry_vfs::sync::lock;
use ferry_wire::fuse::abi::InterruptIn;
use ferry_wire::fuse::{IN_HEADER_BYTES, Negotiated, Opcode, encode_error, peek};
use rustix::thread::Pid;
use zerocopy::FromBytes;

use crate::connection::Connection;
use crate::device::{ReadOutcome, receive, send, try_receive};
use crate::handshake::await_message;
use crate::sched_idle::SchedIdle;
use crate::stats::Counters;
use carrier::{DeviceCarrier, Memory};
use cpu_affinity::AffinityThread;
pub(crate) use readers::Readers;
use readers::Turn;
use splice::{LoadedReply, SplicePipe};

/// A reader thread, as other threads see it.
struct Reader {
    readers: Arc<Readers>,
    channel: Arc<OwnedFd>,
    /// The descriptor that the current request was received by, if it was another reader's: the kernel knows it by no other.
    other_channel: Mutex<Option<Arc<OwnedFd>>>,
    watch: Watch,
    unique: AtomicU64,
    generation_cell: GenerationCell,
    /// Its thread, once it has started.
    thread: OnceLock<Pid>,
    way: OnceLock<SchedIdle>,
}

impl Reader {
    fn new(readers: &Arc<Readers>, channel: OwnedFd) -> Self {
        Self {
            readers: Arc::clone(readers),
            channel: Arc::new(channel),
            other_channel: Mutex::default(),
            watch: Watch::default(),
            unique: AtomicU64::new(0),
            generation_cell: GenerationCell::default(),
            thread: OnceLock::new(),
            way: OnceLock::new(),
        }
    }

    /// Returns the descriptor for the reply to the current request, to other threads.
    fn reply_channel(&self) -> Arc<OwnedFd> {
        Arc::clone(lock(&self.other_channel).as_ref().unwrap_or(&self.channel))
    }
}

/// Serves the first messages on this thread until the reply to INIT; `look_at` gets each one before it is served.
pub(crate) fn serve_first(connection: &Arc<Connection>, look_at: &mut dyn FnMut(&[u8])) -> io::Result<Negotiated> {
    let reader = Arc::new(Reader::new(&Readers::none(connection, 1), connection.device.as_fd().try_clone_to_owned()?));
    let mut work = Work::new(&reader);
    loop {
        await_message(&connection.device)?;
        match receive(reader.channel.as_fd(), work.memory.request_room())? {
            ReadOutcome::Request(bytes) => {
                work.memory.received(bytes);
                look_at(work.memory.request());
                let reply = work.serve();
                work.send(reply);
            }
            ReadOutcome::Nothing => continue,
            ReadOutcome::Unmounted => return Err(io::Error::other("the mount ended before it began")),
        }
        if let Some(session) = connection.session.current() {
            return Ok(*session.negotiated());
        }
    }
}

/// Negotiates as an earlier server of the connection did, to whose INIT the kernel has the reply.
pub(crate) fn serve_init_again(connection: &Arc<Connection>, init: &[u8]) -> io::Result<Negotiated> {
    let reader = Arc::new(Reader::new(&Readers::none(connection, 1), connection.device.as_fd().try_clone_to_owned()?));
    let mut work = Work::new(&reader);
    if init.len() > work.memory.request_room().len() {
        return Err(io::Error::other("the INIT of the last server is too long"));
    }
    let bytes = work.memory.load(init);
    work.memory.received(bytes);
    let _ = work.serve();
    let session = connection.session.current();
    let session = session.ok_or_else(|| io::Error::other("the INIT of the last server is none"))?;
    Ok(*session.negotiated())
}

impl MonitoredWorker for Reader {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn serving(&self) -> CurrentRequest {
        let (unique, call) = (self.unique.load(Ordering::Relaxed), self.watch.look());
        CurrentRequest { unique, place: 0, generation: self.generation_cell.current(), call }
    }

    fn replace_worker(self: Arc<Self>, _: CallSnapshot) -> Replacement {
        self.readers.replace_blocked();
        // If no thread was available, the next check of any reader finds the waiting requests.
        Replacement::Found
    }

    fn runs(&self, serving: &CurrentRequest) -> bool {
        self.generation_cell.runs(serving.generation)
    }

    fn abort(&self, serving: &CurrentRequest, errno: Errno) -> Result<(), NotEnded> {
        // Before the generation ends: then the thread goes on with the next request, which may have another descriptor.
        let channel = self.reply_channel();
        self.readers.lose(self.thread.get().copied(), || self.generation_cell.try_end(serving.generation))?;
        answer_error(&channel, serving.unique, errno);
        self.readers.replace_blocked();
        Ok(())
    }

    fn apply_policy(&self, verdict: &dyn Fn(u64, Instant) -> Option<Errno>) -> bool {
        self.readers.deferred.apply_policy(|unique, channel, since| {
            verdict(unique, since).map(|errno| {
                answer_error(channel, unique, errno);
                true
            })
        })
    }

    fn tick(self: Arc<Self>, served: bool) {
        self.readers.tick(&self.watch);
        if let Some(way) = self.way.get() {
            way.look(self.readers.cpu_affinity.is_wanted(), served);
        }
    }
}

/// Sends an error in place of a handler. The caller may be gone.
fn answer_error(channel: &OwnedFd, unique: u64, errno: Errno) {
    let reply = encode_error(unique, errno);
    if let Err(error) = send(channel.as_fd(), &[io::IoSlice::new(&reply)]) {
        tracing::debug!("cannot send the error of request {unique}, whose caller may be gone: {error}");
    }
}

/// What a reader's thread needs.
struct Work<'a> {
    reader: &'a Arc<Reader>,
    /// The descriptor for the reply to the current request.
    reply_channel: Arc<OwnedFd>,
    server: Server,
    memory: Memory,
    spliced: SplicePipe,
    counters: Arc<Counters>,
}

/// A reply to send: this many bytes of the memory, or the contents of the pipe.
enum ToSend {
    Bytes(usize),
    Loaded(LoadedReply),
}

impl<'a> Work<'a> {
    fn new(reader: &'a Arc<Reader>) -> Self {
        let connection = &reader.readers.connection;
        Self {
            reader,
            reply_channel: Arc::clone(&reader.channel),
            server: connection.server(),
            memory: Memory::new(),
            spliced: SplicePipe::default(),
            counters: connection.counters.lend(),
        }
    }

    /// Serves until the connection ends, or this thread is no longer needed.
    fn run(&mut self, thread: Pid) {
        let reader = self.reader;
        let readers = &*reader.readers;
        let connection = &readers.connection;
        let mut owner = reader.watch.first_owner();
        let mut follower = AffinityThread::default();
        loop {
            let turn = readers.turn(reader.channel.as_fd());
            let waited = matches!(turn, Turn::Serve(..));
            let received = match turn {
                Turn::Serve(message, channel) => {
                    self.reply_channel = Arc::clone(&channel);
                    *lock(&reader.other_channel) = Some(channel);
                    Ok(ReadOutcome::Request(self.memory.load(&message)))
                }
                Turn::Receive => receive(reader.channel.as_fd(), self.memory.request_room()),
                Turn::TryReceive => try_receive(reader.channel.as_fd(), self.memory.request_room()),
                Turn::Nothing => Ok(ReadOutcome::Nothing),
            };
            readers.has_work();
            self.counters.system_calls.add(1);
            match received {
                Ok(ReadOutcome::Request(bytes)) if !waited && self.is_delayed(bytes) => {}
                Ok(ReadOutcome::Request(bytes)) => {
                    self.counters.requests.add(1);
                    self.memory.received(bytes);
                    self.note_interrupt();
                    reader.unique.store(self.memory.unique(), Ordering::Relaxed);
                    if let Some(client) = self.memory.client() {
                        readers.note_client(client);
                        follower.step(&readers.cpu_affinity, client);
                    }
                    reader.watch.enter(&mut owner);
                    connection.monitor_handle.ring();
                    let reply = self.serve();
                    self.counters.message_bytes.add((bytes + reply.bytes()) as u64);
                    // A reader is assisted, never replaced: its thread has its own buffers.
                    let _ = reader.watch.leave(&mut owner);
                    self.send(reply);
                    if waited {
                        *lock(&reader.other_channel) = None;
                        self.reply_channel = Arc::clone(&reader.channel);
                    }
                }
                Ok(ReadOutcome::Nothing) => {}
                Ok(ReadOutcome::Unmounted) => break connection.end.mark_ended(),
                Err(error) => {
                    tracing::error!("cannot read /dev/fuse, so the mount ends: {error}");
                    break connection.end.mark_ended();
                }
            }
            if connection.end.is_ended() || !readers.is_free(thread) {
                break;
            }
        }
        self.server.end_batch();
    }

    /// Puts a request that was received behind others that wait for a limit, if it must wait. Returns whether it does.
    fn is_delayed(&mut self, bytes: usize) -> bool {
        self.memory.received(bytes);
        self.reader.readers.delay(self.memory.request(), &self.reader.channel)
    }

    /// Wakes the monitor for an INTERRUPT, and ends a request that waits for a limit.
    fn note_interrupt(&self) {
        let Some((header, rest)) = self.memory.request().split_first_chunk::<IN_HEADER_BYTES>() else { return };
        if peek(header).opcode == Opcode::Interrupt.as_raw()
            && let Ok((interrupt, _)) = InterruptIn::read_from_prefix(rest)
        {
            let readers = &self.reader.readers;
            readers.connection.interrupted.note(interrupt.unique);
            if let Some(channel) = readers.interrupt_delayed(interrupt.unique) {
                answer_error(&channel, interrupt.unique, Errno::INTR);
            }
        }
    }

    /// Serves a request and returns the reply to send; none if another thread sends it, or there is no reply.
    fn serve(&mut self) -> ToSend {
        let Self { reader, reply_channel, server, memory, spliced, counters } = self;
        let generation = reader.generation_cell.current();
        let (unique, room_bytes) = (memory.unique(), carrier::PAYLOAD_BYTES);
        let mut carrier = DeviceCarrier::new(reader, reply_channel, (generation, memory, counters));
        let mut served = server.serve_caught(&mut carrier);
        let mut loaded = None;
        if let (ServeOutcome::Transfer, Some(mut transfer)) = (served, carrier.transfer.take()) {
            loaded = spliced.load(&transfer, unique, room_bytes);
            let outcome = if let Some(loaded) = &loaded {
                counters.system_calls.add(loaded.calls);
                Ok(loaded.bytes)
            } else {
                // SAFETY: the transfer is described within the payload, which is this thread's own.
                let outcome = unsafe { transfer.run() };
                counters.system_calls.add(transfer.calls());
                outcome
            };
            if let (true, Ok(bytes)) = (transfer.is_read(), &outcome) {
                counters.read_bytes.add(*bytes as u64);
            }
            served = ServeOutcome::Reply(server.finish_transfer(carrier.token(), &mut carrier, outcome));
        }
        if carrier.is_monitored.get() && served != ServeOutcome::Later {
            reader.readers.deferred.end(unique);
        }
        let ours = reader.generation_cell.end(generation);
        if !ours {
            reader.readers.come_back(reader.thread.get().copied());
        }
        match (served, loaded) {
            (ServeOutcome::Reply(_), Some(loaded)) if ours => ToSend::Loaded(loaded),
            (ServeOutcome::Reply(bytes), None) if ours => ToSend::Bytes(bytes),
            _ => ToSend::Bytes(0),
        }
    }

    fn send(&mut self, reply: ToSend) {
        let channel = self.reply_channel.as_fd();
        if reply.bytes() > 0 {
            self.counters.system_calls.add(1);
        }
        match reply {
            ToSend::Bytes(0) => {}
            ToSend::Bytes(bytes) => self.memory.send(channel, bytes),
            ToSend::Loaded(loaded) => {
                let (bytes, sent) = (loaded.bytes, self.spliced.send(loaded, channel));
                self.memory.check_sent(channel, bytes, sent);
            }
        }
        self.server.end_batch();
    }
}

impl ToSend {
    fn bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => *bytes,
            Self::Loaded(loaded) => HEADER_BYTES + loaded.bytes,
        }
    }
}
