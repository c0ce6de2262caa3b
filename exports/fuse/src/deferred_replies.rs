//! Requests that another thread replies to (COPY_FILE_RANGE, SYNCFS).
//!
//! Their handlers have returned, so they block no worker. But their callers must get a reply as well when they take too
//! long or are interrupted.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_wire::fuse::Opcode;

/// A deferred request.
#[derive(Debug)]
struct DeferredRequest<P> {
    place: P,
    since: Instant,
    /// Its caller got an error.
    is_aborted: bool,
}

/// The deferred requests of one worker, each with the place that sends its reply.
#[derive(Debug)]
pub(crate) struct DeferredReplies<P>(Mutex<HashMap<u64, DeferredRequest<P>>>);

impl<P> Default for DeferredReplies<P> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Returns whether a request may be aborted. An aborted lock request could leave a lock that no process knows of.
pub(crate) fn may_be_abandoned(opcode: u32) -> bool {
    opcode != Opcode::Setlk.as_raw() && opcode != Opcode::Setlkw.as_raw()
}

impl<P> DeferredReplies<P> {
    /// Records that another thread will reply to a request.
    pub(crate) fn begin(&self, unique: u64, place: P) {
        lock(&self.0).insert(unique, DeferredRequest { place, since: Instant::now(), is_aborted: false });
    }

    /// Removes a request; returns whether it was aborted.
    pub(crate) fn end(&self, unique: u64) -> bool {
        lock(&self.0).remove(&unique).is_some_and(|asked| asked.is_aborted)
    }

    /// Returns the number of aborted requests that have not ended.
    pub(crate) fn aborted(&self) -> usize {
        lock(&self.0).values().filter(|asked| asked.is_aborted).count()
    }

    /// Calls `abort` for each request. It returns `None` if the request may continue, otherwise whether its caller
    /// got an error. Returns whether any may continue.
    pub(crate) fn apply_policy(&self, mut abort: impl FnMut(u64, &P, Instant) -> Option<bool>) -> bool {
        let mut goes_on = false;
        for (unique, asked) in lock(&self.0).iter_mut().filter(|(_, asked)| !asked.is_aborted) {
            match abort(*unique, &asked.place, asked.since) {
                Some(told) => asked.is_aborted = told,
                None => goes_on = true,
            }
        }
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aborted_request_gets_no_second_reply() {
        let later = DeferredReplies::default();
        (0..3).for_each(|unique| later.begin(unique, unique + 10));
        assert!(!later.end(0), "it was answered");
        let press = |verdict: Option<bool>| {
            let mut asked = Vec::new();
            let goes_on = later.apply_policy(|unique, place, _| {
                asked.push((unique, *place));
                verdict.filter(|_| unique == 1)
            });
            asked.sort_unstable();
            (asked, goes_on)
        };
        assert_eq!(press(None), (vec![(1, 11), (2, 12)], true));
        assert_eq!((press(Some(true)), later.aborted()), ((vec![(1, 11), (2, 12)], true), 1));
        assert_eq!(press(None), (vec![(2, 12)], true));
        assert!(later.end(1) && !later.end(1) && !later.end(2));
        assert_eq!((press(None), later.aborted()), ((vec![], false), 0));
    }
}
