//! The state that a file's lock protects.

use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::Errno;

use super::buffers::Size;
use super::errors::Errors;
use super::limits::Totals;
use super::pages::{PAGE, Pages, Span};
use super::stream::Streams;

/// Failed reads remembered for those who wait for them. Who finds its failure gone asks the server again.
const FAILURES: usize = 8;

/// What a message under way is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read {
        /// Where the file ended at the server when it was asked.
        remote_size: u64,
    },
    Write,
    Sync,
}

/// A message under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightMessage {
    pub number: u64,
    pub kind: Kind,
    /// The bytes that it moves.
    pub from: u64,
    pub to: u64,
    /// Of a read: its pages were dropped or truncated meanwhile, and what comes is old.
    pub stale: bool,
    /// Of a write: how often the server had been restarted.
    pub restarts: u64,
    pub begun: Instant,
    /// Of a read: it brings what lies around another.
    pub around: bool,
    /// Of a write: its buffer.
    pub size: Size,
}

impl InFlightMessage {
    /// The pages that it touches.
    pub fn pages(&self) -> std::ops::Range<u64> {
        self.from / PAGE..self.to.div_ceil(PAGE)
    }
}

#[derive(Clone, Copy, Debug)]
struct Failure {
    number: u64,
    from: u64,
    to: u64,
    error: Errno,
}

#[derive(Debug)]
pub(super) struct State {
    pub pages: Pages,
    /// The size of the file, with what is not written yet.
    pub size: u64,
    /// The size at the server as far as it is known: there is nothing to be fetched beyond.
    pub remote_size: u64,
    /// Goes up whenever an older answer about the size says nothing any more.
    pub version: u64,
    /// Messages under way, in the order in which they were begun.
    pub flights: Vec<InFlightMessage>,
    /// The number of the last message.
    pub last: u64,
    failures: Vec<Failure>,
    pub streams: Streams,
    pub errors: Errors,
    /// The file is being truncated: nothing is begun to be written.
    pub held: bool,
    /// Among the files that the thread of the cache looks after.
    pub busy: bool,
    /// Among the files that the eviction comes by.
    pub listed: bool,
    /// Bytes that were written to the cache since it was last looked through for whole messages.
    pub added: usize,
    /// Times that something that was sent is to be sent again: the server wrote less, or was restarted.
    pub short_writes: u64,
    /// Since how many restarts of the server there is something that is written, and neither durable nor kept; and that of it
    /// which the server is being asked to make durable.
    pub unkept: Option<u64>,
    pub unkept_at_sync: Option<u64>,
    /// Since when something waits to be written.
    pub dirty_since: Option<Instant>,
}

impl State {
    pub fn new(totals: Arc<Totals>, size: u64) -> Self {
        Self {
            pages: Pages::new(totals),
            size,
            remote_size: size,
            version: 0,
            flights: Vec::new(),
            last: 0,
            failures: Vec::with_capacity(FAILURES),
            streams: Streams::default(),
            errors: Errors::default(),
            held: false,
            busy: false,
            listed: false,
            added: 0,
            short_writes: 0,
            unkept: None,
            unkept_at_sync: None,
            dirty_since: None,
        }
    }

    /// Notes a message that is about to be begun.
    pub fn begin(&mut self, kind: Kind, from: u64, to: u64) -> InFlightMessage {
        self.last += 1;
        let begun = Instant::now();
        let flight = InFlightMessage {
            number: self.last,
            kind,
            from,
            to,
            stale: false,
            restarts: 0,
            begun,
            around: false,
            size: Size::Whole,
        };
        self.flights.push(flight);
        flight
    }

    /// A message has ended.
    pub fn end(&mut self, number: u64) -> Option<InFlightMessage> {
        let at = self.flights.iter().position(|flight| flight.number == number)?;
        Some(self.flights.remove(at))
    }

    pub fn reads(&self) -> usize {
        self.flights.iter().filter(|flight| matches!(flight.kind, Kind::Read { .. })).count()
    }

    /// Whether a write is under way that began no later than the message of this number.
    pub fn is_writing(&self, last: u64) -> bool {
        self.flights.iter().any(|flight| flight.kind == Kind::Write && flight.number <= last)
    }

    pub fn is_syncing(&self) -> bool {
        self.flights.iter().any(|flight| flight.kind == Kind::Sync)
    }

    /// Remembers a failed read.
    pub fn failed(&mut self, flight: &InFlightMessage, error: Errno) {
        if self.failures.len() == FAILURES {
            self.failures.remove(0);
        }
        self.failures.push(Failure { number: flight.number, from: flight.from, to: flight.to, error });
    }

    /// The error with which an offset could not be read, by a message younger than this.
    pub fn failure(&self, offset: u64, since: u64) -> Option<Errno> {
        let covers = |failure: &&Failure| failure.number > since && failure.from <= offset && offset < failure.to;
        self.failures.iter().rev().find(covers).map(|failure| failure.error)
    }

    /// What is being fetched of this range of bytes will be old when it comes.
    pub fn make_stale(&mut self, from: u64, to: u64) {
        for at in 0..self.flights.len() {
            let flight = self.flights[at];
            let is_read = matches!(flight.kind, Kind::Read { .. });
            if !is_read || flight.stale || flight.pages().end * PAGE <= from || flight.from / PAGE * PAGE >= to {
                continue;
            }
            self.flights[at].stale = true;
            for page in flight.pages() {
                self.pages.fetched(page, None::<fn(&mut super::pages::Page)>);
            }
        }
    }

    /// Forgets what the server can be asked for again, of the pages of this range of bytes.
    pub fn forget_clean(&mut self, from: u64, to: u64) {
        self.make_stale(from, to);
        let mut next = from / PAGE;
        while let Some(page) = self.pages.next_present(next).filter(|page| page * PAGE < to) {
            self.pages.drop_clean(page);
            if self.pages.get(page).is_some() {
                self.pages.update(page, super::pages::Page::forget_clean);
            }
            next = page + 1;
        }
    }

    /// The file ends elsewhere at the server, and not because of us.
    pub fn resized_remotely(&mut self, remote_size: u64) {
        if remote_size != self.remote_size {
            // From the page with the lesser end on, zeros may be data now, and data zeros.
            self.forget_clean(remote_size.min(self.remote_size), u64::MAX);
        }
        self.remote_size = remote_size;
        self.size = remote_size.max(self.pages.unwritten_end());
    }

    /// Forgets everything from an offset on, also what waits to be written.
    pub fn cut(&mut self, end: u64) {
        self.make_stale(end, u64::MAX);
        let mut next = end / PAGE;
        while let Some(page) = self.pages.next_present(next) {
            let keep = Span::of(page, 0, end).to;
            self.pages.update(page, |content| content.cut(keep));
            if keep == 0 {
                self.pages.drop_clean(page);
            }
            next = page + 1;
        }
    }
}
