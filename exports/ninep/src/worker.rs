//! The main loop of a thread: wait for an event, receive a message, serve it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferry_engine::IDLE_THREAD;
use ferry_vfs::Errno;
use ferry_wire::ninep::{Reply, Request};

use crate::carrier::Client;
use crate::clients::Charge;
use crate::connection::{Connection, ReceiveResult};
use crate::delayed_requests::{DelayedRequest, DelayedRequests};
use crate::hub::{Hub, KEY_BELL, KEY_LIMIT};
use crate::message::{Buffers, Message};
use crate::rate::cost_bytes;
use crate::request_table::{RejectedRequest, Ticket};
use crate::serve::{Context, ReplyPlace, encode, serve};
use crate::session::Session;

/// Memory that a thread keeps for the next message, and for the next reply: enough for the longest of Linux's.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// The thread's main function.
pub(crate) fn work(hub: &Arc<Hub>) {
    let mut message = Vec::new();
    let mut buffers = Buffers::default();
    loop {
        let event = hub.wait(IDLE_THREAD);
        if hub.is_stopping() {
            break;
        }
        match event {
            Ok(Some((KEY_BELL, _))) => {}
            Ok(Some((KEY_LIMIT, _))) => serve_delayed(hub, &mut buffers),
            Ok(Some((key, flags))) => match hub.connection(key) {
                Some(connection) => {
                    if connection.happened(flags) {
                        read(hub, &connection, &mut message, &mut buffers);
                    }
                }
                None => hub.accept(key),
            },
            Ok(None) => {
                message = Vec::new();
                buffers = Buffers::default();
                if hub.may_end() {
                    return;
                }
            }
            Err(error) => {
                tracing::error!("9P connections cannot be waited for: {error}");
                break;
            }
        }
        if message.len() > KEPT_BYTES_MAX {
            message = Vec::new();
        }
        if buffers.long.len() > KEPT_BYTES_MAX {
            buffers.long = Vec::new();
        }
    }
    hub.thread_ended();
}

/// Takes a message from a connection and deals with it.
fn read(hub: &Arc<Hub>, connection: &Arc<Connection>, message: &mut Vec<u8>, buffers: &mut Buffers) {
    let bytes = match connection.receive(message) {
        ReceiveResult::Message(bytes) => bytes,
        ReceiveResult::Nothing => return connection.read_on(),
        ReceiveResult::End(reason) => return connection.end(reason),
    };
    let (tag, request) = match Request::decode(&message[..bytes]) {
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
            return connection.read_on();
        }
    };
    // These two are dealt with before the next message is taken.
    let refused = match request {
        Request::Version { msize, version } => {
            connection.version(tag, msize, version);
            return connection.read_on();
        }
        Request::Flush { old } => connection.flush(tag, old).err(),
        _ => match connection.register(tag) {
            Ok((ticket, session)) => {
                let held = bytes + reply_bytes(&request).min(session.msize as usize);
                if let (Some(delayed), Some(cost_bytes)) = (&hub.delayed, cost_bytes(&request))
                    && delayed.must_wait(cost_bytes)
                {
                    return delay(delayed, connection, &message[..bytes], (ticket, session), (cost_bytes, held));
                }
                connection.serve_on(held);
                hub.ensure_waiter();
                let client = Arc::clone(connection) as Arc<dyn Client>;
                let timer = Cell::default();
                let context = Context { share: &hub.share, client, session: &session, ticket: &ticket, timer };
                answer(&context, &request, &mut Message::new(&message[..bytes], buffers));
                connection.served(held);
                if let Some(ahead) = buffers.ahead.take() {
                    ahead.ask();
                }
                return;
            }
            Err(refused) => Some(refused),
        },
    };
    match refused {
        None => connection.read_on(),
        Some(RejectedRequest::Error(errno)) => {
            connection.reply(tag, &Reply::Error(errno));
            connection.read_on();
        }
        Some(RejectedRequest::TagInUse) => connection.end(Some("it used a tag for two requests at the same time")),
    }
}

/// A request that waits for a limit.
pub(crate) struct ParkedRequest {
    connection: Arc<Connection>,
    message: Vec<u8>,
    ticket: Ticket,
    session: Arc<Session>,
    /// The bytes of message and reply, for the limit of the connection.
    held_bytes: usize,
    /// The message is on its client's account.
    charge: Charge,
}

/// Lets a request wait for a limit, while its connection goes on.
fn delay(
    delayed: &Arc<DelayedRequests<ParkedRequest>>,
    connection: &Arc<Connection>,
    message: &[u8],
    (ticket, session): (Ticket, Arc<Session>),
    (cost_bytes, held_bytes): (u64, usize),
) {
    let Some(charge) = connection.charge(message.len()) else {
        return connection.end(Some("its requests wait for a limit, and others need the memory"));
    };
    let gone = Arc::new(AtomicBool::new(false));
    connection.park(&ticket, &gone);
    connection.serve_on(held_bytes);
    let (connection, message) = (Arc::clone(connection), message.to_vec());
    let request = ParkedRequest { connection, message, ticket, session, held_bytes, charge };
    delayed.push(DelayedRequest { request, gone, cost_bytes });
    // It may have been cancelled before.
    delayed.release_cancelled();
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
        answer(&context, &request, &mut Message::new(&message, buffers));
    }
    connection.served(held_bytes);
    drop((charge, session));
    if let Some(ahead) = buffers.ahead.take() {
        ahead.ask();
    }
}

/// The longest reply that a request may lead to, where that is long.
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
        Ok(ReplyPlace::Short) => &message.buffers.short,
        Ok(ReplyPlace::Long(bytes)) => message.buffers.long.get(..bytes).unwrap_or_default(),
        Ok(ReplyPlace::Later | ReplyPlace::Parked) => return,
        Err(errno) => {
            encode(message, cx.ticket.tag, &Reply::Error(errno));
            &message.buffers.short
        }
    };
    cx.client.finish(cx.ticket, reply);
}
