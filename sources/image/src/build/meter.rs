//! How much of a source was read, told while an image is built.

use std::cell::Cell;
use std::io::{self, Read};

use crate::build::options::Progress;

/// Counts bytes of a source.
pub(crate) struct Meter<'a> {
    done: Cell<u64>,
    all: Cell<u64>,
    progress: &'a Progress<'a>,
}

impl<'a> Meter<'a> {
    pub(crate) fn new(progress: &'a Progress<'a>) -> Self {
        Self { done: Cell::new(0), all: Cell::new(0), progress }
    }

    /// So many there will be; of a pipe nobody knows.
    pub(crate) fn expect(&self, bytes: u64) {
        self.all.set(bytes);
    }

    /// So many more are done.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.get().saturating_add(bytes);
        self.done.set(done);
        let number = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        (self.progress)(number(done), number(self.all.get().max(done)));
    }

    /// Counts what is read of this.
    pub(crate) fn over<R>(&'a self, inner: R) -> Metered<'a, R> {
        Metered { inner, meter: self }
    }
}

/// A source that is counted.
pub(crate) struct Metered<'a, R> {
    inner: R,
    meter: &'a Meter<'a>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        self.meter.add(count as u64);
        Ok(count)
    }
}
