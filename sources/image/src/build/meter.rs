//! Reports the progress of reading a source.

use std::cell::Cell;
use std::io::{self, Read};

use crate::build::options::Progress;

/// Counts the bytes of a source.
pub(crate) struct Meter<'a> {
    done: Cell<u64>,
    all: Cell<u64>,
    progress: &'a Progress<'a>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(progress: &'a Progress<'a>) -> Self {
        Self { done: Cell::new(0), all: Cell::new(0), progress }
    }

    /// Sets the expected total. A pipe has no known total.
    pub(crate) fn expect(&self, bytes: u64) {
        self.all.set(bytes);
    }

    /// Adds to the bytes that were read.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.get().saturating_add(bytes);
        self.done.set(done);
        let number = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        (self.progress)(number(done), number(self.all.get().max(done)));
    }

    /// Returns a reader that counts what is read from `inner`.
    pub(crate) fn over<R>(&'a self, inner: R) -> MeteredReader<'a, R> {
        MeteredReader { inner, meter: self }
    }
}

/// See [`Meter::over`].
pub(crate) struct MeteredReader<'a, R> {
    inner: R,
    meter: &'a Meter<'a>,
}

impl<R: Read> Read for MeteredReader<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        self.meter.add(count as u64);
        Ok(count)
    }
}
