//! The main loop of a thread: wait for an event, receive a message, serve it.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ferry_engine::{BusyPoll, CallSnapshot, IDLE_THREAD, MonitoredWorker, Ownership, Replacement, Watch};
use ferry_vfs::sync::lock;
use ferry_vfs::{Cancellation, Errno};
use ferry_wire::ninep::{Reply, Request};

use crate::carrier::Client;
use crate::clients::Charge;
use crate::connection::{Connection, ReceiveResult, TurnMemory};
use crate::delayed_requests::{DelayedRequest, DelayedRequests};
use crate::hub::{Hub, IdleThread, KEY_LIMIT, KEY_WAKE};
use crate::message::{Buffers, Message};
use crate::rate::cost_bytes;
use crate::request_table::{RejectedRequest, ReplyBytes, Ticket};
use crate::serve::{Context, ReplyPlace, encode, serve};
use crate::session::Session;

/// Memory that a thread keeps for the next message, and for the next reply: enough for the longest of Linux's.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// The most messages that a thread serves for one connection before it serves others.
const TURN_MESSAGES_MAX: usize = 128;

/// A thread, and the memory that it keeps.
struct ServingThread {
    hub: Arc<Hub>,
    post: Arc<Post>,
    busy_poll: BusyPoll,
    /// The message that is being served.
    message: Vec<u8>,
    buffers: Buffers,
    memory: TurnMemory,
}

/// The thread's main function.
pub(crate) fn work(hub: &Arc<Hub>) {
    let post = Arc::new(Post::default());
    let weak = Arc::downgrade(&post);
    hub.monitor_handle.add(weak);
    let (message, buffers, memory) = (Vec::new(), Buffers::default(), TurnMemory::default());
    let busy_poll = BusyPoll::new(hub.share.options.poll.clone());
    let mut thread = ServingThread { hub: Arc::clone(hub), post, busy_poll, message, buffers, memory };
    let mut patience = Some(IDLE_THREAD);
    loop {
        let event = thread.busy_poll.sleep(|| hub.wait(patience));
        if hub.is_stopping() {
            break;
        }
        patience = Some(IDLE_THREAD);
        match event {
            Ok(Some((KEY_WAKE, _))) => {}
            Ok(Some((KEY_LIMIT, _))) => serve_delayed(hub, &mut thread.buffers),
            Ok(Some((key, flags))) => match hub.connection(key) {
                Some(connection) => {
                    if connection.happened(flags) {
                        take_turn(&mut thread, &connection);
                        connection.end_thread();
                    }
                }
                None => hub.accept(key),
            },
            Ok(None) => {
                (thread.message, thread.buffers, thread.memory) = Default::default();
                match hub.idle_thread() {
                    IdleThread::Ends => return,
                    IdleThread::Waits(time) => patience = time,
                }
            }
            Err(error) => {
                tracing::error!("cannot wait for 9P connections: {error}");
                break;
            }
        }
        let ServingThread { message, buffers, memory, .. } = &mut thread;
        for kept in [message, &mut buffers.short, &mut buffers.long, &mut memory.received] {
            if kept.capacity() > KEPT_BYTES_MAX {
                *kept = Vec::new();
            }
        }
        memory.replies.shrink();
    }
    hub.thread_ended();
}

/// Serves the received messages of a connection one after the other, with the replies sent together. When a request
/// blocks, other threads take over the connection.
fn take_turn(thread: &mut ServingThread, connection: &Arc<Connection>) {
    let ServingThread { hub, post, busy_poll, message, buffers, memory } = thread;
    let turn = Turn::begin(hub, post, connection, memory);
    hub.ensure_waiter();
    let mut end = None;
    for number in 0..TURN_MESSAGES_MAX {
        let mut received = connection.receive(message, number == 0);
        if received == ReceiveResult::Nothing && number > 0 && busy_poll.will_poll() && connection.send_replies() {
            // While the connection is not watched, the client wakes no thread.
            busy_poll.poll(|| {
                received = connection.receive(message, true);
                received != ReceiveResult::Nothing
            });
        }
        let bytes = match received {
            ReceiveResult::Message(bytes) => bytes,
            ReceiveResult::Nothing => break,
            ReceiveResult::End(reason) => {
                end = Some(reason);
                break;
            }
        };
        match serve_message(&turn, &message[..bytes], buffers) {
            NextStep::Continue => {}
            NextStep::Pause => break,
            NextStep::End(reason) => {
                end = Some(Some(reason));
                break;
            }
        }
    }
    turn.end();
    if let Some(reason) = end {
        connection.end(reason);
    }
    if let Some(ahead) = buffers.ahead.take() {
        ahead.ask();
    }
}

/// What a thread does after a message.
enum NextStep {
    Continue,
    /// Leave later messages for later, or for other threads.
    Pause,
    /// End the connection, for this reason.
    End(&'static str),
}

/// The monitor's view of a thread: the connection whose turn it has.
#[derive(Default)]
struct Post {
    watch: Watch,
    connection: Mutex<Option<Arc<Connection>>>,
}

impl MonitoredWorker for Post {
    fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The request continues, and other threads take over the connection.
    fn replace_worker(self: Arc<Self>, seen: CallSnapshot) -> Replacement {
        let connection = lock(&self.connection).clone();
        match connection {
            Some(connection) if self.watch.take(seen).is_some() => {
                connection.hand_over(&mut TurnMemory::default());
                Replacement::Found
            }
            _ => Replacement::NotNeeded,
        }
    }
}

/// A thread's turn with a connection, until another thread may take the next message.
struct Turn<'a> {
    hub: &'a Arc<Hub>,
    post: &'a Post,
    connection: &'a Arc<Connection>,
    memory: RefCell<&'a mut TurnMemory>,
    ownership: RefCell<Ownership>,
    is_ours: Cell<bool>,
}

impl<'a> Turn<'a> {
    fn begin(hub: &'a Arc<Hub>, post: &'a Post, connection: &'a Arc<Connection>, memory: &'a mut TurnMemory) -> Self {
        connection.begin_turn(memory);
        *lock(&post.connection) = Some(Arc::clone(connection));
        let ownership = RefCell::new(post.watch.first_owner());
        Self { hub, post, connection, memory: RefCell::new(memory), ownership, is_ours: Cell::new(true) }
    }

    fn end(self) {
        *lock(&self.post.connection) = None;
        if self.is_ours.get() {
            self.connection.end_turn(self.memory.into_inner());
        }
    }

    /// Serves a request as a part of the turn.
    fn serve(&self, serve: impl FnOnce()) {
        self.post.watch.enter(&mut self.ownership.borrow_mut());
        self.hub.monitor_handle.ring();
        serve();
        if self.is_ours.get() {
            self.is_ours.set(self.leave());
        }
    }

    /// Returns whether the turn has not been taken away.
    fn leave(&self) -> bool {
        self.post.watch.leave(&mut self.ownership.borrow_mut())
    }

    /// Called before the request blocks: ends the turn, so that other threads take over.
    fn end_before_wait(&self) {
        if self.is_ours.replace(false) && self.leave() {
            self.connection.hand_over(&mut self.memory.borrow_mut());
        }
    }
}

fn serve_message(turn: &Turn<'_>, message: &[u8], buffers: &mut Buffers) -> NextStep {
    let Turn { hub, connection, .. } = *turn;
    let (tag, request) = match Request::decode(message) {
        Ok(decoded) => decoded,
        Err(flaw) => {
            hub.share.metrics.invalid();
            // Every program of a client can make it pass on names that are too long.
            if !matches!(flaw.errno, Errno::NAMETOOLONG | Errno::OPNOTSUPP) {
                hub.share.ratelimited_log.warn(format_args!("{flaw}"));
            }
            if let Some(tag) = flaw.tag {
                connection.reply(tag, &Reply::Error(flaw.errno));
            }
            return NextStep::Continue;
        }
    };
    let refused = match request {
        Request::Version { msize, version } => {
            if let Some(before) = connection.version(tag, msize, version) {
                turn.serve(|| {
                    turn.end_before_wait();
                    drop(before);
                });
                return NextStep::Pause;
            }
            None
        }
        Request::Flush { old } => connection.flush(tag, old).err(),
        _ => match connection.register(tag) {
            Ok(registered) => return serve_registered(turn, message, (&request, registered), buffers),
            Err(refused) => Some(refused),
        },
    };
    match refused {
        None => {}
        Some(RejectedRequest::Error(errno)) => connection.reply(tag, &Reply::Error(errno)),
        Some(RejectedRequest::TagInUse) => return NextStep::End("it used a tag for two requests at the same time"),
    }
    NextStep::Continue
}

/// Serves a registered request of a connection.
fn serve_registered(
    turn: &Turn<'_>,
    bytes: &[u8],
    (request, (ticket, session)): (&Request<'_>, (Ticket, Arc<Session>)),
    buffers: &mut Buffers,
) -> NextStep {
    let Turn { hub, connection, .. } = *turn;
    let held = bytes.len() + reply_bytes(request).min(session.msize as usize);
    if let (Some(delayed), Some(cost_bytes)) = (&hub.delayed, cost_bytes(request))
        && delayed.must_wait(cost_bytes)
    {
        return delay(delayed, connection, bytes, (ticket, session), (cost_bytes, held));
    }
    connection.serving(held);
    let client = Arc::clone(connection) as Arc<dyn Client>;
    let context = Context { share: &hub.share, client, session: &session, ticket: &ticket, timer: Cell::default() };
    let before_wait = || turn.end_before_wait();
    let mut message = Message::new(bytes, buffers, &before_wait);
    let began = Instant::now();
    turn.serve(|| {
        if connection.pace().is_parallel() || hub.share.waits || matches!(request, Request::Fsync { .. }) {
            turn.end_before_wait();
        }
        answer(&context, request, &mut message);
    });
    connection.pace().record(began.elapsed());
    // The read-ahead is requested at the end of the turn.
    let goes_on = connection.served(held) && turn.is_ours.get() && buffers.ahead.is_none();
    if goes_on { NextStep::Continue } else { NextStep::Pause }
}

/// A request that waits for a limit.
pub(crate) struct ParkedRequest {
    connection: Arc<Connection>,
    message: Vec<u8>,
    ticket: Ticket,
    session: Arc<Session>,
    /// The bytes of message and reply, for the limit of the connection.
    held_bytes: usize,
    /// The charge of the message on its client's account.
    charge: Charge,
}

/// Queues a request for the rate limit; its connection continues.
fn delay(
    delayed: &Arc<DelayedRequests<ParkedRequest>>,
    connection: &Arc<Connection>,
    message: &[u8],
    (ticket, session): (Ticket, Arc<Session>),
    (cost_bytes, held_bytes): (u64, usize),
) -> NextStep {
    let Some(charge) = connection.charge(message.len()) else {
        return NextStep::End("its requests wait for a limit, and others need the memory");
    };
    let gone = Arc::<Cancellation>::default();
    connection.park(&ticket, &gone);
    let has_room = connection.serving(held_bytes);
    let (connection, message) = (Arc::clone(connection), message.to_vec());
    let peer = session.holder.peer();
    let request = ParkedRequest { connection, message, ticket, session, held_bytes, charge };
    delayed.push(peer, DelayedRequest { request, gone, cost_bytes });
    // It may have been cancelled before.
    delayed.release_cancelled(peer);
    if has_room { NextStep::Continue } else { NextStep::Pause }
}

/// Serves a request that has waited for a limit, unless it was cancelled.
fn serve_delayed(hub: &Arc<Hub>, buffers: &mut Buffers) {
    let Some(delayed) = hub.delayed.as_ref().and_then(|delayed| delayed.take()) else { return };
    let ParkedRequest { connection, message, ticket, session, held_bytes, charge } = delayed;
    hub.ensure_waiter();
    if connection.unpark(&ticket)
        && let Ok((_, request)) = Request::decode(&message)
    {
        let client = Arc::clone(&connection) as Arc<dyn Client>;
        let context = Context { share: &hub.share, client, session: &session, ticket: &ticket, timer: Cell::default() };
        answer(&context, &request, &mut Message::new(&message, buffers, &|| ()));
    }
    connection.served(held_bytes);
    drop((charge, session));
    if let Some(ahead) = buffers.ahead.take() {
        ahead.ask();
    }
}

/// The longest reply to a request, if it may be long.
fn reply_bytes(request: &Request<'_>) -> usize {
    match *request {
        Request::Read { bytes_max, .. } | Request::Readdir { bytes_max, .. } => bytes_max as usize,
        _ => 0,
    }
}

/// Serves a request and sends the reply. A panic of the source is an error for this request alone.
fn answer(cx: &Context<'_>, request: &Request<'_>, message: &mut Message<'_>) {
    let served = catch_unwind(AssertUnwindSafe(|| serve(cx, request, message))).unwrap_or(Err(Errno::IO));
    let reply = match served {
        Ok(ReplyPlace::Short) => ReplyBytes::Borrowed(&message.buffers.short),
        Ok(ReplyPlace::Long(bytes)) => ReplyBytes::Exchanged(&mut message.buffers.long, bytes),
        Ok(ReplyPlace::Later | ReplyPlace::Parked) => return,
        Err(errno) => {
            encode(message, cx.ticket.tag, &Reply::Error(errno));
            ReplyBytes::Borrowed(&message.buffers.short)
        }
    };
    cx.client.finish(cx.ticket, reply);
}
