//! What one Tversion begins: who has attached, and fids that end by themselves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::Errno;
use ferry_wire::ninep::{Fid, MSIZE_MIN, Qid, Reply, Request, Steps, User, VERSION};

use crate::line::{Counts, Fail, Line, Outcome, Outgoing, lock};
use crate::options::{Error, Options};
use crate::transport::Transport;

/// A fid of a connection, ended when nobody has it any more.
#[derive(Debug)]
pub(crate) struct Held {
    line: Arc<Line>,
    fid: Fid,
    is_ended: AtomicBool,
}

impl Held {
    pub(crate) fn new(line: &Arc<Line>, fid: Fid) -> Arc<Self> {
        Arc::new(Self { line: Arc::clone(line), fid, is_ended: AtomicBool::new(false) })
    }

    pub(crate) fn fid(&self) -> Fid {
        self.fid
    }

    /// The connection that knows it.
    pub(crate) fn line(&self) -> &Arc<Line> {
        &self.line
    }

    /// It was ended already.
    pub(crate) fn is_ended(&self) {
        self.is_ended.store(true, Ordering::Relaxed);
        self.line.free_fid(self.fid);
    }

    /// Whether it is one of this session.
    pub(crate) fn is_of(&self, session: &Session) -> bool {
        Arc::ptr_eq(&self.line, &session.line)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.line.is_broken() && !self.is_ended.load(Ordering::Relaxed) {
            self.line.clunk_later(self.fid);
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) line: Arc<Line>,
    /// Counts the sessions.
    pub(crate) serial: u64,
    /// The root on each further connection.
    pub(crate) further: Vec<Arc<Held>>,
    /// The root, as the user that all requests are made as.
    root: Arc<Held>,
    pub(crate) root_qid: Qid,
    /// The root, as others.
    users: Mutex<HashMap<u32, Arc<Held>>>,
    /// Whether the server has always served a request after the one that it depends on.
    in_order: AtomicBool,
    /// Whether the server knows Tunlinkat and Trenameat, as far as was seen; diod does not.
    has_at: AtomicBool,
}

impl std::ops::Deref for Session {
    type Target = Arc<Line>;

    fn deref(&self) -> &Arc<Line> {
        &self.line
    }
}

impl Session {
    /// Connects, agrees on the version, and attaches.
    pub(crate) fn begin(
        transport: &dyn Transport,
        options: &Options,
        serial: u64,
        counts: &Arc<Counts>,
    ) -> Result<Self, Error> {
        let (root, root_qid) = connect(transport, options, counts)?;
        let mut session = Self {
            line: Arc::clone(&root.line),
            root,
            serial,
            further: Vec::new(),
            root_qid,
            users: Mutex::default(),
            in_order: AtomicBool::new(true),
            has_at: AtomicBool::new(true),
        };
        session.connect_further(transport, options, counts);
        Ok(session)
    }

    /// Makes the further connections. One is enough to go on with: a server may have a limit.
    fn connect_further(&mut self, transport: &dyn Transport, options: &Options, counts: &Arc<Counts>) {
        while self.further.len() + 1 < options.connections && !self.is_broken() {
            let reason = match connect(transport, options, counts) {
                Ok((root, qid)) if qid.path == self.root_qid.path && root.line.msize() >= self.line.msize() => {
                    Line::bind(&self.line, &root.line);
                    self.further.push(root);
                    continue;
                }
                Ok((root, _)) => {
                    root.line.fail("it is not used");
                    "it answers there as another server would".to_owned()
                }
                Err(error) => error.to_string(),
            };
            let (made, address) = (self.further.len() + 1, transport.address());
            tracing::warn!("{made} of {} connections to {address} are used: {reason}", options.connections);
            return;
        }
    }

    /// How many connections it has.
    pub(crate) fn connections(&self) -> usize {
        self.further.len() + 1
    }

    /// Ends the session if the server owes an answer by some connection, and has been silent there for too long.
    pub(crate) fn check(&self) {
        self.line.check();
        self.further.iter().for_each(|root| root.line.check());
    }

    /// The root, as a user.
    pub(crate) fn root(&self, uid: u32, options: &Options) -> Outcome<Arc<Held>> {
        if uid == options.uid {
            return Ok(Arc::clone(&self.root));
        }
        if let Some(root) = lock(&self.users).get(&uid) {
            return Ok(Arc::clone(root));
        }
        let fid = self.line.new_fid();
        let request = Request::Attach { fid, afid: Fid::NONE, user: user(b"", uid), tree: &options.tree };
        match self.line.tell(&request) {
            Ok(()) => {}
            Err(fail) => {
                self.line.free_fid(fid);
                // Whoever may not attach may not do what he wants to.
                return Err(if let Fail::Errno(_) = fail { Fail::Errno(Errno::ACCESS) } else { fail });
            }
        }
        let root = Held::new(&self.line, fid);
        Ok(Arc::clone(lock(&self.users).entry(uid).or_insert(root)))
    }

    /// Whether a request may be sent before the one that makes its fid was answered. Nothing in the protocol says that a
    /// server may not serve it first, so whoever does this must be ready to ask again.
    pub(crate) fn is_in_order(&self) -> bool {
        self.in_order.load(Ordering::Relaxed)
    }

    /// The server did serve one first.
    pub(crate) fn not_in_order(&self) {
        self.in_order.store(false, Ordering::Relaxed);
    }

    /// Does something by the messages that name a directory and a name in it, or else by the older ones that name a file.
    pub(crate) fn at_or_else<T>(
        &self,
        at: impl FnOnce() -> Outcome<T>,
        or_else: impl FnOnce() -> Outcome<T>,
    ) -> Outcome<T> {
        if self.has_at.load(Ordering::Relaxed) {
            match at() {
                Err(Fail::Errno(Errno::OPNOTSUPP | Errno::NOSYS)) => {}
                other => return other,
            }
        }
        let done = or_else();
        if done.is_ok() {
            self.has_at.store(false, Ordering::Relaxed);
        }
        done
    }

    /// One more fid of the same file.
    pub(crate) fn clone_of(&self, fid: Fid) -> Outcome<Arc<Held>> {
        let new_fid = self.line.new_fid();
        let request = Request::Walk { fid, new_fid, steps: Steps::default() };
        match self.line.tell(&request) {
            Ok(()) => Ok(Held::new(&self.line, new_fid)),
            Err(fail) => {
                self.line.free_fid(new_fid);
                Err(fail)
            }
        }
    }
}

fn user(name: &[u8], uid: u32) -> User<'_> {
    User { name, uid: Some(uid) }
}

/// Connects, agrees on the version, and attaches; answers the root.
fn connect(transport: &dyn Transport, options: &Options, counts: &Arc<Counts>) -> Result<(Arc<Held>, Qid), Error> {
    let address = transport.address();
    let stream = transport.connect(options.timeout);
    let stream = stream.map_err(|reason| Error::Unreachable { address: address.clone(), reason })?;
    let line = Line::start(stream, options, Arc::clone(counts)).map_err(Error::Threads)?;
    let begun = agree(&line, options, &address).and_then(|()| attach(&line, options, &address));
    match begun {
        Ok((fid, qid)) => Ok((Held::new(&line, fid), qid)),
        Err(error) => {
            line.fail("it is not used");
            Err(error)
        }
    }
}

/// Agrees on version and message size (version(5)).
fn agree(line: &Arc<Line>, options: &Options, address: &str) -> Result<(), Error> {
    let silent = |reason: String| Error::NoAnswer { address: address.into(), reason };
    let request = Outgoing::new(&Request::Version { msize: options.msize, version: VERSION });
    let message = line.send_one(request).wait(line);
    let answer = message.and_then(|message| {
        line.take(&message, |reply| match reply {
            Reply::Version { msize, version } => Some((msize, version.to_vec())),
            _ => None,
        })
    });
    let (msize, version) = match answer {
        Ok(answer) => answer,
        Err(Fail::Errno(errno)) if line.is_broken() => {
            return Err(silent(line.why_broken().unwrap_or_else(|| errno.to_string())));
        }
        Err(Fail::Errno(errno)) => return Err(silent(format!("Tversion was answered by the error {errno}"))),
        Err(Fail::Lost { .. }) => return Err(silent(line.why_broken().unwrap_or_default())),
    };
    if version != VERSION {
        let spoken = String::from_utf8_lossy(&version).into_owned();
        return Err(Error::Version { address: address.into(), spoken });
    }
    if !(MSIZE_MIN..=options.msize).contains(&msize) {
        return Err(Error::Msize { address: address.into(), msize });
    }
    line.msize.store(msize, Ordering::Relaxed);
    Ok(())
}

fn attach(line: &Arc<Line>, options: &Options, address: &str) -> Result<(Fid, Qid), Error> {
    let fid = line.new_fid();
    let user = user(&options.user, options.uid);
    let request = Outgoing::new(&Request::Attach { fid, afid: Fid::NONE, user, tree: &options.tree });
    let message = line.send_one(request).wait(line);
    let qid = message
        .and_then(|message| line.take(&message, |reply| if let Reply::Attach(qid) = reply { Some(qid) } else { None }));
    match qid {
        Ok(qid) => Ok((fid, qid)),
        Err(Fail::Errno(errno)) if !line.is_broken() => Err(Error::Refused {
            address: address.into(),
            uid: options.uid,
            tree: String::from_utf8_lossy(&options.tree).into_owned(),
            errno,
        }),
        Err(_) => {
            let reason = line.why_broken().unwrap_or_default();
            Err(Error::NoAnswer { address: address.into(), reason })
        }
    }
}
