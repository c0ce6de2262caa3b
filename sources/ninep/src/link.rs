//! The link to the server, which survives its connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferry_vfs::sync::{lock, wait};
use ferry_vfs::{Errno, Result};

use crate::client::Shared;
use crate::connection::{Counts, Outcome, RequestError};
use crate::options::{Error, Options};
use crate::session::Session;
use crate::transport::Transport;

/// A restarted server is usually back at once.
const BACK_OFF_MIN: Duration = Duration::from_millis(20);
/// The maximum delay between two connection attempts: short for waiting callers, and few attempts during a long outage.
const BACK_OFF_MAX: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    transport: Arc<dyn Transport>,
    pub(crate) options: Options,
    pub(crate) counts: Arc<Counts>,
    /// The server tells what others do, or did at first.
    pub(crate) has_events: bool,
    session: Mutex<Arc<Session>>,
    /// A new session, or the end of the link.
    changed: Condvar,
    is_over: AtomicBool,
    /// The client, for [`Self::release_fids`].
    pub(crate) shared: OnceLock<Weak<Shared>>,
    /// Signals the keeper that the connection is lost, or the client ends.
    keeper_wake: (Mutex<bool>, Condvar),
}

impl Link {
    pub(crate) fn new(transport: Arc<dyn Transport>, options: Options) -> std::result::Result<Self, Error> {
        let counts = Arc::default();
        let session = Session::begin(&*transport, &options, 0, (&counts, true))?;
        Ok(Self {
            transport,
            options,
            counts,
            has_events: session.has_events,
            session: Mutex::new(Arc::new(session)),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
            shared: OnceLock::new(),
            keeper_wake: Default::default(),
        })
    }

    /// Returns the server's address for messages.
    pub(crate) fn address(&self) -> String {
        self.transport.address()
    }

    /// Returns the current session, broken or not.
    pub(crate) fn current(&self) -> Arc<Session> {
        Arc::clone(&lock(&self.session))
    }

    /// Waits for the session after this one, however long that takes; `None` at the end of the link.
    pub(crate) fn session_after(&self, serial: Option<u64>) -> Option<Arc<Session>> {
        let mut session = lock(&self.session);
        while !self.is_over() {
            if serial.is_none_or(|serial| serial < session.serial) {
                return Some(Arc::clone(&session));
            }
            session = wait(&self.changed, session);
        }
        None
    }

    /// Waits for a session with a connection until this time, or until the server was away for longer than the limit.
    /// The limit counts from the loss of the connection, so that not every request waits again.
    fn session(&self, until: Instant) -> Result<Arc<Session>> {
        let mut session = lock(&self.session);
        loop {
            if self.is_over() {
                return Err(Errno::IO);
            }
            let Some(since) = session.broken_since() else { return Ok(Arc::clone(&session)) };
            self.wake_keeper();
            let left = until.min(since + self.options.patience).saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Errno::IO);
            }
            session = self.changed.wait_timeout(session, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Runs an operation, and repeats it if the connection is lost meanwhile and that is harmless.
    ///
    /// # Errors
    ///
    /// The server's; `IO` if the outcome is unknown, or the server stays away.
    pub(crate) fn with_retry<T>(&self, act: impl FnMut(&Arc<Session>) -> Outcome<T>) -> Result<T> {
        self.with_retry_until(Instant::now() + self.options.patience, act)
    }

    /// As [`Self::with_retry`], until this time.
    pub(crate) fn with_retry_until<T>(
        &self,
        until: Instant,
        mut act: impl FnMut(&Arc<Session>) -> Outcome<T>,
    ) -> Result<T> {
        let mut has_released = false;
        loop {
            let session = self.session(until)?;
            match act(&session) {
                Ok(done) => return Ok(done),
                Err(RequestError::Errno(errno))
                    if !has_released && session.is_short_of_fids(errno) && self.release_fids(&session) =>
                {
                    has_released = true;
                }
                Err(RequestError::Errno(errno)) => return Err(errno),
                Err(RequestError::Lost { harmless: true }) if Instant::now() < until => {}
                Err(RequestError::Lost { .. }) => return Err(Errno::IO),
            }
        }
    }

    /// Makes room for fids at the server, which are looked up again when they are needed. Returns false where the server tells
    /// only of files with fids what others do.
    pub(crate) fn release_fids(&self, session: &Session) -> bool {
        let Some(shared) = self.shared.get().and_then(Weak::upgrade).filter(|_| !self.has_events) else { return false };
        shared.inodes.drop_fids();
        session.wait_for_clunks();
        true
    }

    /// Reconnects, however long it takes; calls `restore` before others use the session.
    pub(crate) fn reconnect(&self, restore: impl Fn(&Arc<Session>)) {
        let broken = self.current();
        let why = broken.why_broken().unwrap_or_default();
        tracing::warn!("the connection to the 9P server at {} is lost: {why}", self.address());
        let mut back_off = BACK_OFF_MIN;
        let mut told = None;
        while !self.is_over() {
            let counts = (&self.counts, self.has_events);
            match Session::begin(&*self.transport, &self.options, broken.serial + 1, counts) {
                Ok(session) => {
                    let session = Arc::new(session);
                    // It is the same server.
                    let by_node = broken.locks_by_node.load(Ordering::Relaxed);
                    session.locks_by_node.store(by_node, Ordering::Relaxed);
                    restore(&session);
                    if !session.is_broken() {
                        tracing::info!("the 9P server at {} is back", self.address());
                        *lock(&self.session) = session;
                        self.changed.notify_all();
                        return;
                    }
                }
                Err(error) => {
                    let error = error.to_string();
                    if told.as_ref() != Some(&error) {
                        tracing::warn!("{error}; requests wait, and it is tried again");
                        told = Some(error);
                    }
                }
            }
            self.rest(back_off);
            back_off = (back_off * 2).min(BACK_OFF_MAX);
        }
    }

    pub(crate) fn wake_keeper(&self) {
        *lock(&self.keeper_wake.0) = true;
        self.keeper_wake.1.notify_all();
    }

    /// Lets the keeper sleep until a signal.
    pub(crate) fn sleep(&self, at_most: Duration) {
        let is_woken = lock(&self.keeper_wake.0);
        let (mut is_woken, _) = self
            .keeper_wake
            .1
            .wait_timeout_while(is_woken, at_most, |is_woken| !*is_woken && !self.is_over())
            .unwrap_or_else(PoisonError::into_inner);
        *is_woken = false;
    }

    /// Lets the keeper sleep, regardless of signals.
    fn rest(&self, time: Duration) {
        let is_woken = lock(&self.keeper_wake.0);
        drop(self.keeper_wake.1.wait_timeout_while(is_woken, time, |_| !self.is_over()));
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Ends the connection for good.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        let session = lock(&self.session);
        session.fail("the client has ended it");
        self.changed.notify_all();
        drop(session);
        self.wake_keeper();
    }
}
