//! Listens for front ends and serves one at a time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use ferry_engine::RatelimitedLog;
use ferry_vfs::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vhost::vhost_user::{BackendReqHandler, Error};

use crate::Device;
use crate::channel::{self, Channel, has_left};
use crate::connection::{Connection, TakeoverStage};
use crate::persistent_connection::{
    self, ConnectionStore, InheritedConnection, LostError, PersistentConnection, Records,
};

/// Why a device cannot be served: no thread or descriptor is left.
#[derive(Debug, thiserror::Error)]
#[error("cannot start serving: {0}")]
pub struct ServerError(io::Error);

/// A device being served on a socket, to one front end after another.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    ended: EndSignal,
}

/// Reports whether a front end is connected to a server.
#[derive(Clone, Debug)]
pub struct FrontEnd(Weak<Stop>);

impl FrontEnd {
    /// Returns whether one is; `false` once the server has ended.
    pub fn is_connected(&self) -> bool {
        let stop = self.0.upgrade();
        stop.is_some_and(|stop| lock(&stop.stream).is_some())
    }
}

/// Signals that the server has ended.
#[derive(Clone, Debug, Default)]
pub struct EndSignal(Arc<(Mutex<bool>, Condvar)>);

impl EndSignal {
    /// Waits for the end.
    pub fn wait(&self) {
        let (ended, changed) = &*self.0;
        let ended = lock(ended);
        drop(changed.wait_while(ended, |ended| !*ended));
    }

    fn notify(&self) {
        let (ended, changed) = &*self.0;
        *lock(ended) = true;
        changed.notify_all();
    }
}

/// Do not wait.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

#[derive(Debug)]
struct Stop {
    event: OwnedFd,
    /// The connected front end, and whether its connection is stored.
    stream: Mutex<Option<(UnixStream, bool)>>,
    /// The front end had gone before the stop, or must be disconnected for good.
    had_left: AtomicBool,
    /// There is no next server.
    for_good: AtomicBool,
    /// The back-end channel.
    channel: Arc<Channel>,
}

impl Server {
    /// Serves on a thread of its own, until stopped or dropped.
    ///
    /// # Errors
    /// [`ServerError`].
    pub fn start<D: Device>(listener: UnixListener, device: D, name: &str) -> Result<Self, ServerError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| ServerError(error.into()))?;
        let stop = Arc::new(Stop {
            event,
            stream: Mutex::new(None),
            had_left: AtomicBool::new(false),
            for_good: AtomicBool::new(false),
            channel: Arc::default(),
        });
        let (mine, device) = (Arc::clone(&stop), Arc::new(device));
        let ended = EndSignal::default();
        let over = ended.clone();
        let serve = move || {
            serve(&listener, &device, &mine);
            over.notify();
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(serve).map_err(ServerError)?;
        Ok(Self { stop, thread: Some(thread), ended })
    }

    /// Returns a signal of the end: after [`Self::stop`], when the only front end of a device that [serves
    /// once](Device::serves_once) has gone, or when the socket is lost.
    pub fn ended(&self) -> EndSignal {
        self.ended.clone()
    }

    /// Returns a handle that reports on the front end.
    pub fn front_end(&self) -> FrontEnd {
        FrontEnd(Arc::downgrade(&self.stop))
    }

    /// Notifies the front end, as soon as possible, that the configuration space has changed.
    pub fn config_changed(&self) {
        self.stop.channel.config_changed();
    }

    /// Stops taking requests, completes those that were taken, and disconnects the front end, unless its connection
    /// [is stored](Device::connection_store) for the next server.
    pub fn stop(mut self) {
        self.stop_and_join(false);
    }

    /// Stops without a next server: disconnects the front end, and stores nothing for it.
    pub fn stop_for_good(mut self) {
        self.stop_and_join(true);
    }

    fn stop_and_join(&mut self, for_good: bool) {
        let Some(thread) = self.thread.take() else { return };
        let stream = lock(&self.stop.stream);
        let had_left = for_good || stream.as_ref().is_some_and(|(stream, _)| has_left(stream));
        self.stop.had_left.store(had_left, Ordering::Relaxed);
        self.stop.for_good.store(for_good, Ordering::Relaxed);
        let _ = rustix::io::write(&self.stop.event, &1u64.to_ne_bytes());
        if let Some((stream, is_stored)) = stream.as_ref()
            && (for_good || !is_stored)
        {
            // The front end may have disconnected.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        drop(stream);
        if thread.join().is_err() {
            tracing::error!("the thread of a share panicked");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_and_join(false);
    }
}

/// The outcome of waiting for a front end.
enum AcceptOutcome {
    FrontEnd(UnixStream),
    /// None connected in time.
    TimedOut,
    /// The server stops.
    Stop,
}

impl Stop {
    /// Waits for a front end, until `last` if set.
    fn accept(
        &self,
        listener: &UnixListener,
        last: Option<Instant>,
        ratelimited_log: &RatelimitedLog,
    ) -> io::Result<AcceptOutcome> {
        loop {
            let mut fds =
                [PollFd::new(&self.event, PollFlags::IN), PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            let left = last.map(|last| Timespec::try_from(last.saturating_duration_since(Instant::now())));
            match poll(&mut fds, left.transpose().map_err(io::Error::other)?.as_ref()) {
                Ok(0) => return Ok(AcceptOutcome::TimedOut),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(AcceptOutcome::Stop);
            }
            match listener.accept() {
                Ok((stream, _)) => return Ok(AcceptOutcome::FrontEnd(stream)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Most likely out of descriptors, which is temporary.
                    ratelimited_log.error(format_args!("cannot accept a front end: {error}"));
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    /// Whether the server stops or the front end has hung up, so that no reply is needed.
    fn is_over(&self) -> bool {
        self.is_set() || lock(&self.stream).as_ref().is_some_and(|(stream, _)| has_left(stream))
    }

    fn is_set(&self) -> bool {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN)];
        poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready > 0)
    }
}

fn serve<D: Device>(listener: &UnixListener, device: &Arc<D>, stop: &Stop) {
    // All front ends share one limit, so that reconnecting does not raise it.
    let ratelimited_log = Arc::<RatelimitedLog>::default();
    let store = device.connection_store();
    let mut left = store.as_ref().and_then(take_over);
    // The front end of the previous guest may reconnect.
    let timeout = store.filter(|_| left.is_none()).and_then(|store| store.reconnect_timeout());
    let mut awaited = timeout.map(|timeout| Instant::now() + timeout);
    let release = || Connection::new(Arc::clone(device), Arc::clone(&ratelimited_log)).gone();
    loop {
        let conversation = match left.take() {
            Some(conversation) => conversation,
            None => match stop.accept(listener, awaited, &ratelimited_log) {
                Ok(AcceptOutcome::FrontEnd(stream)) => begin(stream, device.connection_store()),
                Ok(AcceptOutcome::TimedOut) => {
                    tracing::info!("the previous guest is gone: releasing its files and locks");
                    awaited = None;
                    release();
                    continue;
                }
                Ok(AcceptOutcome::Stop) if awaited.is_some() && stop.for_good.load(Ordering::Relaxed) => {
                    return release();
                }
                Ok(AcceptOutcome::Stop) => return,
                Err(error) => {
                    tracing::error!("the socket is lost: {error}");
                    return;
                }
            },
        };
        awaited = None;
        let current = conversation.stream.try_clone().ok().map(|stream| (stream, conversation.stored.is_some()));
        *lock(&stop.stream) = current;
        if !stop.is_set() {
            tracing::debug!("a front end connected");
            stop.channel.begin(device.changes_config());
            converse(device, conversation, stop, &ratelimited_log);
            stop.channel.end();
            tracing::debug!("the front end is gone");
        }
        *lock(&stop.stream) = None;
        if device.serves_once() {
            return;
        }
    }
}

/// A front end, and the store of its connection with the recorded messages.
struct Conversation {
    stream: UnixStream,
    stored: Option<(Arc<dyn ConnectionStore>, Records)>,
}

/// Takes over the connection that the previous server left, unless the front end has hung up: then it may reconnect.
fn take_over(store: &Arc<dyn ConnectionStore>) -> Option<Conversation> {
    let InheritedConnection { socket, records } = store.take()?;
    let stream = UnixStream::from(socket);
    if has_left(&stream) {
        tracing::debug!("the front end hung up while there was no server");
        store.end();
        return None;
    }
    Some(Conversation { stream, stored: Some((Arc::clone(store), records)) })
}

/// Stores a new connection.
fn begin(stream: UnixStream, store: Option<Arc<dyn ConnectionStore>>) -> Conversation {
    let store = store.filter(|store| match store.put(stream.as_fd()) {
        Ok(()) => true,
        Err(error) => {
            tracing::error!("a restart of this server will lose its guest unless the VMM reconnects: {error}");
            false
        }
    });
    Conversation { stream, stored: store.map(|store| (store, Records::new())) }
}

/// Serves one front end until it disconnects or sends an invalid message.
fn converse<D: Device>(
    device: &Arc<D>,
    Conversation { stream, stored }: Conversation,
    stop: &Stop,
    ratelimited_log: &Arc<RatelimitedLog>,
) {
    let mut connection = Connection::new(Arc::clone(device), Arc::clone(ratelimited_log));
    connection.set_server(stop.event.try_clone().ok(), Arc::clone(&stop.channel));
    let connection = Arc::new(Mutex::new(connection));
    let outcome = match &stored {
        Some((store, records)) => listen_persistent(&**device, (stream, store, records), &connection, stop),
        None => listen(&**device, stream, &connection, stop),
    };
    if let Err(error) = outcome {
        ratelimited_log.error(format_args!("disconnecting the front end: {error}"));
    }
    if !stop.is_set() || stop.had_left.load(Ordering::Relaxed) {
        // End the store first: the next server must not take over a connection whose state was released.
        if let Some((store, _)) = stored {
            store.end();
        }
        lock(&connection).gone();
    }
}

/// Why a front end is disconnected.
#[derive(Debug, thiserror::Error)]
enum ConnectionError {
    #[error("no descriptor is left: {0}")]
    Descriptors(io::Error),
    #[error(transparent)]
    Message(Error),
    #[error(transparent)]
    Lost(#[from] LostError),
}

/// The outcome of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageOutcome {
    Done,
    /// It was refused; the front end was told if it requested a reply. The connection stays.
    Refused,
    /// The front end disconnected.
    Over,
}

/// Reads messages from a socket, and replies to them there.
struct Listener<'a, D: Device> {
    requests: BackendReqHandler<Mutex<Connection<D>>>,
    ours: UnixStream,
    connection: &'a Arc<Mutex<Connection<D>>>,
    stop: &'a Stop,
    takes_channel: bool,
}

impl<'a, D: Device> Listener<'a, D> {
    fn new(
        device: &D,
        stream: UnixStream,
        connection: &'a Arc<Mutex<Connection<D>>>,
        stop: &'a Stop,
    ) -> Result<Self, ConnectionError> {
        let ours = stream.try_clone().map_err(ConnectionError::Descriptors)?;
        let requests = BackendReqHandler::from_stream(stream, Arc::clone(connection));
        let takes_channel = device.changes_config() || device.window_bytes().is_some();
        Ok(Self { requests, ours, connection, stop, takes_channel })
    }

    /// Waits for a message and executes it.
    fn handle_message(&mut self) -> Result<MessageOutcome, ConnectionError> {
        if !channel::wait_for_descriptors(&self.ours, || self.stop.is_over()) {
            // Unread messages stay for the next server.
            return if self.stop.is_set() { Err(LostError::Stopped.into()) } else { Ok(MessageOutcome::Over) };
        }
        let taken = channel::take(&self.ours, self.takes_channel, || lock(self.connection).acknowledges());
        let outcome = match taken {
            Ok(Some(socket)) => {
                lock(self.connection).attach(&socket);
                self.stop.channel.set(socket);
                Ok(())
            }
            Ok(None) => self.requests.handle_request(),
            Err(error) => Err(error),
        };
        match outcome {
            Ok(()) => Ok(MessageOutcome::Done),
            Err(Error::Disconnected | Error::PartialMessage) => Ok(MessageOutcome::Over),
            Err(error @ (Error::ReqHandlerError(_) | Error::InvalidOperation(_))) => {
                lock(self.connection).refuses(&error);
                Ok(MessageOutcome::Refused)
            }
            Err(error) => Err(ConnectionError::Message(error)),
        }
    }
}

fn listen<D: Device>(
    device: &D,
    stream: UnixStream,
    connection: &Arc<Mutex<Connection<D>>>,
    stop: &Stop,
) -> Result<(), ConnectionError> {
    let mut listener = Listener::new(device, stream, connection, stop)?;
    loop {
        match listener.handle_message() {
            Ok(MessageOutcome::Over) | Err(ConnectionError::Lost(LostError::Stopped)) => return Ok(()),
            Ok(MessageOutcome::Done | MessageOutcome::Refused) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Serves a persistent connection.
fn listen_persistent<D: Device>(
    device: &D,
    (stream, store, records): (UnixStream, &Arc<dyn ConnectionStore>, &Records),
    connection: &Arc<Mutex<Connection<D>>>,
    stop: &Stop,
) -> Result<(), ConnectionError> {
    let (near, far) = UnixStream::pair().map_err(ConnectionError::Descriptors)?;
    let mut listener = Listener::new(device, far, connection, stop)?;
    let mut connection_log = PersistentConnection::new(stream, near, Arc::clone(store), records);
    for (key, (bytes, files)) in records {
        lock(listener.connection)
            .taking_over(TakeoverStage::Replaying { later: persistent_connection::was_added(*key) });
        connection_log.forward(bytes, files)?;
        let outcome = match listener.handle_message() {
            Err(ConnectionError::Lost(LostError::Stopped)) => return Ok(()),
            outcome => outcome?,
        };
        if outcome != MessageOutcome::Done {
            tracing::warn!("cannot replay the recorded front-end message {key:#x}");
        }
        connection_log.reply()?;
    }
    if !records.is_empty() {
        lock(listener.connection).taking_over(TakeoverStage::Done);
        tracing::debug!("a front end was taken over");
    }
    loop {
        let message = match connection_log.next(&stop.event) {
            Ok(message) => message,
            Err(LostError::HungUp | LostError::Stopped) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        connection_log.record_before(&message)?;
        let runs = lock(listener.connection).runs();
        let outcome = listener.handle_message();
        if let Err(ConnectionError::Lost(LostError::Stopped)) = outcome {
            return Ok(());
        }
        let reply = connection_log.reply()?;
        connection_log.record_base(lock(listener.connection).stopped_queues())?;
        connection_log.commit(&message, &reply, (matches!(outcome, Ok(MessageOutcome::Done)), runs))?;
        outcome?;
    }
}
