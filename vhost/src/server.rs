//! Listening for front ends.

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
use crate::connection::{Connection, Inherited};
use crate::persistent_connection::{self, ConnectionStore, LostError, PersistentConnection, Records, StoredConnection};

/// Why a device cannot be served: a thread or descriptor cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot start serving: {0}")]
pub struct ServerError(io::Error);

/// A device being served on a socket, to one front end after another.
#[derive(Debug)]
pub struct Server {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
    ended: Ended,
}

/// Tells whether a front end is connected to a server.
#[derive(Clone, Debug)]
pub struct FrontEnd(Weak<Stop>);

impl FrontEnd {
    /// Returns whether one is; `false` once the server has ended.
    pub fn is_connected(&self) -> bool {
        let stop = self.0.upgrade();
        stop.is_some_and(|stop| lock(&stop.stream).is_some())
    }
}

/// Tells when a server serves nobody any more.
#[derive(Clone, Debug, Default)]
pub struct Ended(Arc<(Mutex<bool>, Condvar)>);

impl Ended {
    /// Waits for that.
    pub fn wait(&self) {
        let (ended, changed) = &*self.0;
        let ended = lock(ended);
        drop(changed.wait_while(ended, |ended| !*ended));
    }

    fn say(&self) {
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
    /// The front end that is connected now, and whether its connection is stored.
    stream: Mutex<Option<(UnixStream, bool)>>,
    /// The front end had gone before it was time to stop, or is to be let go for good.
    had_left: AtomicBool,
    /// There is no next server: nothing is left to it.
    for_good: AtomicBool,
    /// How to reach the front end unasked.
    channel: Channel,
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
            channel: Channel::default(),
        });
        let (mine, device) = (Arc::clone(&stop), Arc::new(device));
        let ended = Ended::default();
        let over = ended.clone();
        let serve = move || {
            serve(&listener, &device, &mine);
            over.say();
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(serve).map_err(ServerError)?;
        Ok(Self { stop, thread: Some(thread), ended })
    }

    /// For whoever waits until there is nobody to serve any more: after [`Self::stop`], or when the only front end of a
    /// device that [serves once](Device::serves_once) has gone, or when the socket is lost.
    pub fn ended(&self) -> Ended {
        self.ended.clone()
    }

    /// Returns a handle that reports on the front end.
    pub fn front_end(&self) -> FrontEnd {
        FrontEnd(Arc::downgrade(&self.stop))
    }

    /// Tells the front end, as soon as it can be told, that the configuration space has changed.
    pub fn config_changed(&self) {
        self.stop.channel.config_changed();
    }

    /// Stops taking requests, ends those that were taken, and lets go of the front end, unless its connection
    /// [is stored](Device::connection_store) for the next server.
    pub fn stop(mut self) {
        self.stop_and_join(false);
    }

    /// The same where there is no next server: the front end is let go, and nothing is kept for it.
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
            // It may have gone by itself.
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

/// What came while the server waited for a front end.
enum Accepted {
    FrontEnd(UnixStream),
    /// None did within the time.
    Nobody,
    /// It is time to stop.
    Stop,
}

impl Stop {
    /// Waits for a front end, until `last` if there is one.
    fn accept(
        &self,
        listener: &UnixListener,
        last: Option<Instant>,
        ratelimited_log: &RatelimitedLog,
    ) -> io::Result<Accepted> {
        loop {
            let mut fds =
                [PollFd::new(&self.event, PollFlags::IN), PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            let left = last.map(|last| Timespec::try_from(last.saturating_duration_since(Instant::now())));
            match poll(&mut fds, left.transpose().map_err(io::Error::other)?.as_ref()) {
                Ok(0) => return Ok(Accepted::Nobody),
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !fds[0].revents().is_empty() {
                return Ok(Accepted::Stop);
            }
            match listener.accept() {
                Ok((stream, _)) => return Ok(Accepted::FrontEnd(stream)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Most likely out of descriptors: that passes.
                    ratelimited_log.error(format_args!("cannot accept a front end: {error}"));
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
        }
    }

    /// Whether nobody waits for an answer any more.
    fn is_over(&self) -> bool {
        self.is_set() || lock(&self.stream).as_ref().is_some_and(|(stream, _)| has_left(stream))
    }

    fn is_set(&self) -> bool {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN)];
        poll(&mut fds, Some(&NOW)).is_ok_and(|ready| ready > 0)
    }
}

fn serve<D: Device>(listener: &UnixListener, device: &Arc<D>, stop: &Stop) {
    // All front ends have them together: whoever comes again and again is not heard more often.
    let ratelimited_log = Arc::<RatelimitedLog>::default();
    let store = device.connection_store();
    let mut left = store.as_ref().and_then(take_over);
    // The front end of the guest that was here before may connect again.
    let timeout = store.filter(|_| left.is_none()).and_then(|store| store.reconnect_timeout());
    let mut awaited = timeout.map(|timeout| Instant::now() + timeout);
    let forget = || Connection::new(Arc::clone(device), Arc::clone(&ratelimited_log)).gone();
    loop {
        let conversation = match left.take() {
            Some(conversation) => conversation,
            None => match stop.accept(listener, awaited, &ratelimited_log) {
                Ok(Accepted::FrontEnd(stream)) => begin(stream, device.connection_store()),
                Ok(Accepted::Nobody) => {
                    tracing::info!("the guest that was here before is gone: its files and locks are given back");
                    awaited = None;
                    forget();
                    continue;
                }
                Ok(Accepted::Stop) if awaited.is_some() && stop.for_good.load(Ordering::Relaxed) => return forget(),
                Ok(Accepted::Stop) => return,
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

/// A front end, and where its connection is stored with what it said to the server before.
struct Conversation {
    stream: UnixStream,
    stored: Option<(Arc<dyn ConnectionStore>, Records)>,
}

/// Takes up the connection that the server before has left, unless the front end has hung up meanwhile: then it may come again.
fn take_over(store: &Arc<dyn ConnectionStore>) -> Option<Conversation> {
    let StoredConnection { socket, records } = store.take()?;
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
            tracing::error!("should this server end, its guest is lost unless its VMM connects again: {error}");
            false
        }
    });
    Conversation { stream, stored: store.map(|store| (store, Records::new())) }
}

/// Speaks with one front end until it goes or says something that cannot be.
fn converse<D: Device>(
    device: &Arc<D>,
    Conversation { stream, stored }: Conversation,
    stop: &Stop,
    ratelimited_log: &Arc<RatelimitedLog>,
) {
    let connection = Arc::new(Mutex::new(Connection::new(Arc::clone(device), Arc::clone(ratelimited_log))));
    let outcome = match &stored {
        Some((store, records)) => listen_lasting(&**device, (stream, store, records), &connection, stop),
        None => listen(&**device, stream, &connection, stop),
    };
    if let Err(error) = outcome {
        ratelimited_log.error(format_args!("the front end is let go: {error}"));
    }
    if !stop.is_set() || stop.had_left.load(Ordering::Relaxed) {
        // First: what is forgotten then would be missed by whoever takes the connection over.
        if let Some((store, _)) = stored {
            store.end();
        }
        lock(&connection).gone();
    }
}

/// Why a front end is let go.
#[derive(Debug, thiserror::Error)]
enum ReleasedConnection {
    #[error("there is no descriptor left: {0}")]
    Descriptors(io::Error),
    #[error(transparent)]
    Message(Error),
    #[error(transparent)]
    Lost(#[from] LostError),
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    Done,
    /// It was refused, and the front end told, if it asked to be; what it does next is up to it.
    Refused,
    /// The front end hung up.
    Over,
}

/// Reads messages from a socket, and answers them there.
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
    ) -> Result<Self, ReleasedConnection> {
        let ours = stream.try_clone().map_err(ReleasedConnection::Descriptors)?;
        let requests = BackendReqHandler::from_stream(stream, Arc::clone(connection));
        let takes_channel = device.changes_config() || device.window_bytes().is_some();
        Ok(Self { requests, ours, connection, stop, takes_channel })
    }

    /// Waits for a message, and acts upon it.
    fn hear(&mut self) -> Result<Received, ReleasedConnection> {
        if !channel::wait_for_descriptors(&self.ours, || self.stop.is_over()) {
            // What was not read stays for the next server.
            return if self.stop.is_set() { Err(LostError::Stopped.into()) } else { Ok(Received::Over) };
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
            Ok(()) => Ok(Received::Done),
            Err(Error::Disconnected | Error::PartialMessage) => Ok(Received::Over),
            Err(error @ (Error::ReqHandlerError(_) | Error::InvalidOperation(_))) => {
                lock(self.connection).refuses(&error);
                Ok(Received::Refused)
            }
            Err(error) => Err(ReleasedConnection::Message(error)),
        }
    }
}

fn listen<D: Device>(
    device: &D,
    stream: UnixStream,
    connection: &Arc<Mutex<Connection<D>>>,
    stop: &Stop,
) -> Result<(), ReleasedConnection> {
    let mut listener = Listener::new(device, stream, connection, stop)?;
    loop {
        match listener.hear() {
            Ok(Received::Over) | Err(ReleasedConnection::Lost(LostError::Stopped)) => return Ok(()),
            Ok(Received::Done | Received::Refused) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The same on a connection that no end of this server closes.
fn listen_lasting<D: Device>(
    device: &D,
    (stream, store, records): (UnixStream, &Arc<dyn ConnectionStore>, &Records),
    connection: &Arc<Mutex<Connection<D>>>,
    stop: &Stop,
) -> Result<(), ReleasedConnection> {
    let (near, far) = UnixStream::pair().map_err(ReleasedConnection::Descriptors)?;
    let mut listener = Listener::new(device, far, connection, stop)?;
    let mut lasting = PersistentConnection::new(stream, near, Arc::clone(store), records);
    for (key, (bytes, files)) in records {
        lock(listener.connection).taking_over(Inherited::Now { later: persistent_connection::was_added(*key) });
        lasting.forward(bytes, files)?;
        let heard = match listener.hear() {
            Err(ReleasedConnection::Lost(LostError::Stopped)) => return Ok(()),
            heard => heard?,
        };
        if heard != Received::Done {
            tracing::warn!("cannot replay the recorded front-end message {key:#x}");
        }
        lasting.reply()?;
    }
    if !records.is_empty() {
        lock(listener.connection).taking_over(Inherited::Done);
        tracing::debug!("a front end was taken over");
    }
    loop {
        let message = match lasting.next(&stop.event) {
            Ok(message) => message,
            Err(LostError::HungUp | LostError::Stopped) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        lasting.record_before(&message)?;
        let runs = lock(listener.connection).runs();
        let heard = listener.hear();
        if let Err(ReleasedConnection::Lost(LostError::Stopped)) = heard {
            return Ok(());
        }
        let reply = lasting.reply()?;
        lasting.record_base(lock(listener.connection).resting())?;
        lasting.commit(&message, &reply, (matches!(heard, Ok(Received::Done)), runs))?;
        heard?;
    }
}
