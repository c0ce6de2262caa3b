//! A 9P session, which Tversion begins: attached users, and fids that are clunked when dropped.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry_vfs::Errno;
use ferry_vfs::sync::lock;
use ferry_wire::ninep::{Fid, MSIZE_MIN, Qid, Reply, Request, Steps, User, VERSION, VERSION_OF_FERRY};

use crate::connection::{Connection, Counts, Outcome, Outgoing, RequestError, is_shortage};
use crate::event_batch::EventBatch;
use crate::options::{Error, Options};
use crate::transport::Transport;

/// A fid of a connection, released when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct OwnedFid {
    connection: Arc<Connection>,
    fid: Fid,
    is_ended: AtomicBool,
}

impl OwnedFid {
    pub(crate) fn new(connection: &Arc<Connection>, fid: Fid) -> Arc<Self> {
        Arc::new(Self { connection: Arc::clone(connection), fid, is_ended: AtomicBool::new(false) })
    }

    pub(crate) fn fid(&self) -> Fid {
        self.fid
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Records that the fid no longer exists.
    pub(crate) fn mark_ended(&self) {
        self.is_ended.store(true, Ordering::Relaxed);
        self.connection.free_fid(self.fid);
    }

    /// Returns whether it belongs to a session.
    pub(crate) fn is_of(&self, session: &Session) -> bool {
        Arc::ptr_eq(&self.connection, &session.connection)
    }
}

impl Drop for OwnedFid {
    fn drop(&mut self) {
        if !self.connection.is_broken() && !self.is_ended.load(Ordering::Relaxed) {
            self.connection.clunk_later(self.fid);
        }
    }
}

/// The maximum number of users whose roots are kept: each takes a fid of the server.
const USERS_MAX: usize = 64;

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) connection: Arc<Connection>,
    /// Counts the sessions.
    pub(crate) serial: u64,
    /// The root on each further connection.
    pub(crate) further: Vec<Arc<OwnedFid>>,
    /// The root, as the user that all requests are made as.
    root: Arc<OwnedFid>,
    pub(crate) root_qid: Qid,
    /// The root, as others.
    users: Mutex<HashMap<u32, Arc<OwnedFid>>>,
    /// Whether the server is Ferry.
    pub(crate) is_ferry: bool,
    /// Whether the server is Ferry, and has always served a request after the one that it depends on.
    in_order: AtomicBool,
    /// Whether the server supports Tunlinkat and Trenameat, as far as known; diod does not.
    has_at: AtomicBool,
    /// The server has granted a lock.
    pub(crate) has_locked: AtomicBool,
    /// The server refused the first lock, so the next ones have the node's name: ganesha resolves the client's as a host's.
    pub(crate) locks_by_node: AtomicBool,
    /// The server tells what others do from now on.
    pub(crate) has_events: bool,
}

impl std::ops::Deref for Session {
    type Target = Arc<Connection>;

    fn deref(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Session {
    /// Connects, negotiates the version, and attaches.
    pub(crate) fn begin(
        transport: &dyn Transport,
        options: &Options,
        serial: u64,
        (counts, wants_events): (&Arc<Counts>, bool),
    ) -> Result<Self, Error> {
        let Root { fid: root, qid: root_qid, is_ferry } = connect(transport, options, counts)?;
        let mut session = Self {
            connection: Arc::clone(&root.connection),
            root,
            serial,
            further: Vec::new(),
            root_qid,
            users: Mutex::default(),
            is_ferry,
            in_order: AtomicBool::new(is_ferry),
            has_at: AtomicBool::new(true),
            has_locked: AtomicBool::new(false),
            locks_by_node: AtomicBool::new(false),
            has_events: false,
        };
        // Data that were written on further connections would be told as those of others.
        if is_ferry && wants_events && options.connections == 1 {
            session.has_events = session.ask_events(0, Duration::ZERO).is_ok();
        }
        session.connect_further(transport, options, counts);
        Ok(session)
    }

    /// Asks what others did after an event, and waits for that as long as the server may take.
    pub(crate) fn ask_events(&self, acknowledged: u64, wait: Duration) -> Outcome<EventBatch> {
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let request = Request::Events { fid: self.root.fid(), acknowledged, wait_ms };
        let message = self.send_one_parked(Outgoing::new(&request)).wait(self)?;
        self.take(&message, |reply| if let Reply::Events(data) = reply { EventBatch::decode(data) } else { None })
    }

    /// Opens the additional connections. The session continues without them: a server may have a limit.
    fn connect_further(&mut self, transport: &dyn Transport, options: &Options, counts: &Arc<Counts>) {
        while self.further.len() + 1 < options.connections && !self.is_broken() {
            let reason = match connect(transport, options, counts) {
                Ok(Root { fid, qid, .. })
                    if qid.path == self.root_qid.path && fid.connection.msize() >= self.connection.msize() =>
                {
                    Connection::bind(&self.connection, &fid.connection);
                    self.further.push(fid);
                    continue;
                }
                Ok(Root { fid: root, .. }) => {
                    root.connection.fail("it is not used");
                    "it answers there as another server would".to_owned()
                }
                Err(error) => error.to_string(),
            };
            let (made, address) = (self.further.len() + 1, transport.address());
            tracing::warn!("{made} of {} connections to {address} are used: {reason}", options.connections);
            return;
        }
    }

    /// Returns the number of connections.
    pub(crate) fn connections(&self) -> usize {
        self.further.len() + 1
    }

    /// Ends the session if a reply is overdue on a connection that is silent for too long.
    pub(crate) fn check(&self) {
        self.connection.check();
        self.further.iter().for_each(|root| root.connection.check());
    }

    /// Returns the root for a user.
    pub(crate) fn root(&self, uid: u32, options: &Options) -> Outcome<Arc<OwnedFid>> {
        if uid == options.uid {
            return Ok(Arc::clone(&self.root));
        }
        if let Some(root) = lock(&self.users).get(&uid) {
            return Ok(Arc::clone(root));
        }
        let fid = self.connection.new_fid();
        let request = Request::Attach { fid, afid: Fid::NONE, user: user(b"", uid), tree: &options.tree };
        let attached = self.connection.tell(&request);
        self.note_walk(&attached);
        if let Err(fail) = attached {
            self.connection.free_fid(fid);
            // A user who may not attach may not do the operation either.
            return Err(match fail {
                RequestError::Errno(errno) if errno != Errno::NOMEM && !is_shortage(errno) => Errno::ACCESS.into(),
                fail => fail,
            });
        }
        let root = OwnedFid::new(&self.connection, fid);
        let mut users = lock(&self.users);
        let other = users.keys().next().copied().filter(|_| users.len() >= USERS_MAX);
        let dropped = other.and_then(|other| users.remove(&other));
        let root = Arc::clone(users.entry(uid).or_insert(root));
        drop(users);
        // It is clunked.
        drop(dropped);
        Ok(root)
    }

    /// Returns whether a request may be sent before the reply to the one that creates its fid. The server may still serve
    /// it first, so the caller must be ready to retry.
    pub(crate) fn is_in_order(&self) -> bool {
        self.in_order.load(Ordering::Relaxed)
    }

    /// Records that the server served such a request first.
    pub(crate) fn mark_out_of_order(&self) {
        self.in_order.store(false, Ordering::Relaxed);
    }

    /// Runs `at`, which uses messages with a directory and a name, or `or_else` for servers without them.
    pub(crate) fn at_or_else<T>(
        &self,
        at: impl FnOnce() -> Outcome<T>,
        or_else: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        if self.has_at.load(Ordering::Relaxed) {
            match at() {
                Err(RequestError::Errno(Errno::OPNOTSUPP | Errno::NOSYS)) => {}
                other => return other,
            }
        }
        let done = or_else();
        if done.is_ok() {
            self.has_at.store(false, Ordering::Relaxed);
        }
        done
    }

    /// Returns another fid of the same file.
    pub(crate) fn clone_of(&self, fid: Fid) -> Outcome<Arc<OwnedFid>> {
        let new_fid = self.connection.new_fid();
        let request = Request::Walk { fid, new_fid, steps: Steps::default() };
        let walked = self.connection.tell(&request);
        self.note_walk(&walked);
        match walked {
            Ok(()) => Ok(OwnedFid::new(&self.connection, new_fid)),
            Err(fail) => {
                self.connection.free_fid(new_fid);
                Err(fail)
            }
        }
    }
}

fn user(name: &[u8], uid: u32) -> User<'_> {
    User { name, uid: Some(uid) }
}

/// What a connection begins with.
struct Root {
    fid: Arc<OwnedFid>,
    qid: Qid,
    /// Whether the server is Ferry.
    is_ferry: bool,
}

/// Connects, negotiates the version, and attaches.
fn connect(transport: &dyn Transport, options: &Options, counts: &Arc<Counts>) -> Result<Root, Error> {
    let address = transport.address();
    let stream = transport.connect(options.timeout);
    let stream = stream.map_err(|reason| Error::Unreachable { address: address.clone(), reason })?;
    let connection = Connection::start(stream, options, Arc::clone(counts)).map_err(Error::Threads)?;
    let begun = negotiate(&connection, options, &address)
        .and_then(|is_ferry| Ok((is_ferry, attach(&connection, options, &address)?)));
    match begun {
        Ok((is_ferry, (fid, qid))) => Ok(Root { fid: OwnedFid::new(&connection, fid), qid, is_ferry }),
        Err(error) => {
            connection.fail("it is not used");
            Err(error)
        }
    }
}

/// Sends a Tversion; returns the message size and the version of the reply.
fn ask_version(connection: &Arc<Connection>, msize: u32, version: &[u8]) -> Outcome<(u32, Vec<u8>)> {
    let message = connection.send_one(Outgoing::new(&Request::Version { msize, version })).wait(connection)?;
    connection.take(&message, |reply| match reply {
        Reply::Version { msize, version } => Some((msize, version.to_vec())),
        _ => None,
    })
}

/// Negotiates version and message size (version(5)); returns whether the server is Ferry.
fn negotiate(connection: &Arc<Connection>, options: &Options, address: &str) -> Result<bool, Error> {
    let silent = |reason: String| Error::NoAnswer { address: address.into(), reason };
    let mut answer = ask_version(connection, options.msize, VERSION_OF_FERRY);
    // Most servers do not strip a suffix that they do not know.
    let is_refused = match &answer {
        Ok((_, version)) => version != VERSION_OF_FERRY && version != VERSION,
        Err(RequestError::Errno(_)) => !connection.is_broken(),
        Err(RequestError::Lost { .. }) => false,
    };
    if is_refused {
        answer = ask_version(connection, options.msize, VERSION);
    }
    let (msize, version) = match answer {
        Ok(answer) => answer,
        Err(RequestError::Errno(errno)) if connection.is_broken() => {
            return Err(silent(connection.why_broken().unwrap_or_else(|| errno.to_string())));
        }
        Err(RequestError::Errno(errno)) => return Err(silent(format!("Tversion was answered by the error {errno}"))),
        Err(RequestError::Lost { .. }) => return Err(silent(connection.why_broken().unwrap_or_default())),
    };
    let is_ferry = version == VERSION_OF_FERRY;
    if !is_ferry && version != VERSION {
        let spoken = String::from_utf8_lossy(&version).into_owned();
        return Err(Error::Version { address: address.into(), spoken });
    }
    if !(MSIZE_MIN..=options.msize).contains(&msize) {
        return Err(Error::Msize { address: address.into(), msize });
    }
    connection.msize.store(msize, Ordering::Relaxed);
    Ok(is_ferry)
}

fn attach(connection: &Arc<Connection>, options: &Options, address: &str) -> Result<(Fid, Qid), Error> {
    let fid = connection.new_fid();
    let user = user(&options.user, options.uid);
    let request = Outgoing::new(&Request::Attach { fid, afid: Fid::NONE, user, tree: &options.tree });
    let message = connection.send_one(request).wait(connection);
    let qid = message.and_then(|message| {
        connection.take(&message, |reply| if let Reply::Attach(qid) = reply { Some(qid) } else { None })
    });
    match qid {
        Ok(qid) => Ok((fid, qid)),
        Err(RequestError::Errno(errno)) if !connection.is_broken() => Err(Error::Refused {
            address: address.into(),
            uid: options.uid,
            tree: String::from_utf8_lossy(&options.tree).into_owned(),
            errno,
        }),
        Err(_) => {
            let reason = connection.why_broken().unwrap_or_default();
            Err(Error::NoAnswer { address: address.into(), reason })
        }
    }
}
