//! A log of requests and what became of them, switched on and off while they are served.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Instant;

use ferry_vfs::{Errno, Ino};

/// The most inodes that a [`Filter`] names.
pub const INODES_MAX: usize = 16;
/// Bytes of an operation that are shown: its names fit, the value of an extended attribute need not.
const SHOWN_BYTES_MAX: usize = 400;

/// Which requests are logged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Those of the share of this name, as its exports have it; `None`: of all.
    pub share: Option<String>,
    /// Those about one of these inodes, the first [`INODES_MAX`] of which count; empty: about any. For a request
    /// about a name, that is the directory.
    pub inodes: Vec<Ino>,
}

/// Whether there is a filter: all that is looked at while there is none.
static ON: AtomicBool = AtomicBool::new(false);
static FILTER: RwLock<Option<Filter>> = RwLock::new(None);

/// Logs, from now on, the requests that the filter lets through, with outcome and time, at level `info` and target
/// `ferry_engine::requests`; `None`: logs no more.
pub fn watch(filter: Option<Filter>) {
    let filter = filter.map(|mut filter| {
        filter.inodes.truncate(INODES_MAX);
        filter
    });
    let mut current = FILTER.write().unwrap_or_else(PoisonError::into_inner);
    ON.store(filter.is_some(), Ordering::Relaxed);
    *current = filter;
}

/// Which requests are logged now.
pub fn watched() -> Option<Filter> {
    FILTER.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Filter {
    fn lets_through(&self, share: &str, ino: Ino) -> bool {
        self.share.as_deref().is_none_or(|wanted| wanted == share)
            && (self.inodes.is_empty() || self.inodes.contains(&ino))
    }
}

/// Whether any requests are logged.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The beginning of what a request looks like: its data need not be formatted to the end.
struct Shown(String);

impl Write for Shown {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = SHOWN_BYTES_MAX.saturating_sub(self.0.len());
        let fits = text.floor_char_boundary(room.min(text.len()));
        self.0.push_str(&text[..fits]);
        if fits == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// A request whose outcome will be logged.
#[derive(Debug)]
pub struct Watched {
    share: String,
    ino: Ino,
    pid: Option<u32>,
    request: String,
    begun: Instant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// Answered with this many bytes; for data, those of the data.
    Bytes(usize),
    /// Not done.
    Error(Errno),
    /// It is answered later: when a lock is free, or data was moved.
    Waits,
}

impl From<Result<usize, Errno>> for Outcome {
    fn from(result: Result<usize, Errno>) -> Self {
        result.map_or_else(Self::Error, Self::Bytes)
    }
}

impl Watched {
    /// Looks at a request that begins, of a process where that is known; almost always that ends with one load.
    pub fn begin(share: &str, ino: Ino, pid: Option<u32>, operation: &dyn fmt::Debug) -> Option<Box<Self>> {
        if !is_on() {
            return None;
        }
        let filter = FILTER.read().unwrap_or_else(PoisonError::into_inner);
        if !filter.as_ref()?.lets_through(share, ino) {
            return None;
        }
        drop(filter);
        let mut shown = Shown(String::new());
        if write!(shown, "{operation:?}").is_err() {
            shown.0.push('…');
        }
        Some(Box::new(Self { share: share.into(), ino, pid, request: shown.0, begun: Instant::now() }))
    }

    /// Logs it.
    pub fn end(self, outcome: Outcome) {
        let Self { share, ino: Ino(ino), pid, request, begun } = self;
        let us = begun.elapsed().as_micros();
        match outcome {
            Outcome::Bytes(bytes) => {
                tracing::info!(target: "ferry_engine::requests", share, ino, pid, bytes, us, "{request}");
            }
            Outcome::Error(error) => {
                tracing::info!(target: "ferry_engine::requests", share, ino, pid, %error, us, "{request}");
            }
            Outcome::Waits => {
                tracing::info!(target: "ferry_engine::requests", share, ino, pid, waits = true, us, "{request}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_lets_through_what_it_names() {
        let filter = |share: Option<&str>, inodes: &[u64]| Filter {
            share: share.map(Into::into),
            inodes: inodes.iter().copied().map(Ino).collect(),
        };
        for (filter, share, ino, through) in [
            (filter(None, &[]), "a", 1, true),
            (filter(Some("a"), &[]), "a", 1, true),
            (filter(Some("b"), &[]), "a", 1, false),
            (filter(None, &[2, 3]), "a", 3, true),
            (filter(None, &[2, 3]), "a", 1, false),
            (filter(Some("a"), &[1]), "b", 1, false),
        ] {
            assert_eq!(filter.lets_through(share, Ino(ino)), through, "{filter:?} {share} {ino}");
        }
    }

    #[test]
    fn only_what_is_watched_costs_anything() {
        #[derive(Debug)]
        struct Statfs;
        // An inode of its own, for other tests run at the same time.
        let ino = Ino(0xdeb0_6001);
        let begin = || Watched::begin("share", ino, Some(1), &Statfs);
        assert!(begin().is_none());
        let inodes = (0..20).map(|index| Ino(ino.0 + index)).collect();
        watch(Some(Filter { share: None, inodes }));
        assert_eq!(watched().unwrap().inodes.len(), INODES_MAX);
        assert!(begin().is_some_and(|watched| watched.request == "Statfs"));
        let value = [b'x'; 4096];
        let shown = Watched::begin("share", ino, None, &value).unwrap().request;
        assert!(shown.len() < SHOWN_BYTES_MAX + 4 && shown.ends_with('…'), "{shown}");
        watch(None);
        assert!(begin().is_none());
    }
}
