//! The state that a file's lock protects.

use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::Errno;

use super::buffers::Size;
use super::errors::Errors;
use super::limits::Totals;
use super::pages::{PAGE, Pages, Span};
use super::stream::Streams;

/// The maximum number of remembered read failures. A waiting reader whose failure was forgotten asks the server again.
const FAILURES: usize = 8;

/// The purpose of a message in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read {
        /// The server's file size at the request.
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
    /// For a read: its pages were dropped or truncated meanwhile, so its data are stale.
    pub stale: bool,
    /// For a write: the number of restarts of the server at its start.
    pub restarts: u64,
    pub begun: Instant,
    /// For a read: it is a read-around.
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
    /// The size of the file, including unwritten data.
    pub size: u64,
    /// The known size on the server, beyond which there is nothing to fetch.
    pub remote_size: u64,
    /// Increases when older replies about the size become invalid.
    pub version: u64,
    /// The last mark of a request for attributes, and the last one whose reply was used.
    pub last_mark: u64,
    pub used_mark: u64,
    /// Messages in flight, in the order of their start.
    pub in_flight: Vec<InFlightMessage>,
    /// The number of the last message.
    pub last: u64,
    failures: Vec<Failure>,
    pub streams: Streams,
    pub errors: Errors,
    /// The file is being truncated: no write begins.
    pub held: bool,
    /// In the list of files with work for the cache's thread.
    pub busy: bool,
    /// In the list of the eviction.
    pub listed: bool,
    /// Bytes written to the cache since the last search for whole messages.
    pub added: usize,
    /// Counts data to be sent again, because the server wrote fewer bytes or was restarted.
    pub short_writes: u64,
    /// The restart count since which data are written but neither durable nor kept; and the part being synced.
    pub unkept: Option<u64>,
    pub unkept_at_sync: Option<u64>,
    /// When the oldest unwritten data were written.
    pub dirty_since: Option<Instant>,
}

impl State {
    pub fn new(totals: Arc<Totals>, size: u64) -> Self {
        Self {
            pages: Pages::new(totals),
            size,
            remote_size: size,
            version: 0,
            last_mark: 0,
            used_mark: 0,
            in_flight: Vec::new(),
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

    /// Records a message that is about to begin.
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
        self.in_flight.push(flight);
        flight
    }

    /// A message has ended.
    pub fn end(&mut self, number: u64) -> Option<InFlightMessage> {
        let at = self.in_flight.iter().position(|flight| flight.number == number)?;
        Some(self.in_flight.remove(at))
    }

    pub fn reads(&self) -> usize {
        self.in_flight.iter().filter(|flight| matches!(flight.kind, Kind::Read { .. })).count()
    }

    /// Returns whether a write is in flight that began no later than this message.
    pub fn is_writing(&self, last: u64) -> bool {
        self.in_flight.iter().any(|flight| flight.kind == Kind::Write && flight.number <= last)
    }

    pub fn is_syncing(&self) -> bool {
        self.in_flight.iter().any(|flight| flight.kind == Kind::Sync)
    }

    /// Remembers a failed read.
    pub fn failed(&mut self, flight: &InFlightMessage, error: Errno) {
        if self.failures.len() == FAILURES {
            self.failures.remove(0);
        }
        self.failures.push(Failure { number: flight.number, from: flight.from, to: flight.to, error });
    }

    /// Returns the error with which an offset could not be read, by a later message than this.
    pub fn failure(&self, offset: u64, since: u64) -> Option<Errno> {
        let covers = |failure: &&Failure| failure.number > since && failure.from <= offset && offset < failure.to;
        self.failures.iter().rev().find(covers).map(|failure| failure.error)
    }

    /// Marks reads in flight of a range as stale.
    pub fn make_stale(&mut self, from: u64, to: u64) {
        for at in 0..self.in_flight.len() {
            let flight = self.in_flight[at];
            let is_read = matches!(flight.kind, Kind::Read { .. });
            if !is_read || flight.stale || flight.pages().end * PAGE <= from || flight.from / PAGE * PAGE >= to {
                continue;
            }
            self.in_flight[at].stale = true;
            for page in flight.pages() {
                self.pages.fetched(page, None::<fn(&mut super::pages::Page)>);
            }
        }
    }

    /// Drops clean data of the pages of a range.
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

    /// The file's size on the server has changed, not by this client.
    pub fn resized_remotely(&mut self, remote_size: u64) {
        if remote_size != self.remote_size {
            // From the page with the smaller end, zeros may be data now, and vice versa.
            self.forget_clean(remote_size.min(self.remote_size), u64::MAX);
        }
        self.remote_size = remote_size;
        self.size = remote_size.max(self.pages.unwritten_end());
    }

    /// Drops everything from an offset, including unwritten data.
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
