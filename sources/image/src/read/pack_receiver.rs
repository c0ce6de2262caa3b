//! Receives the bytes of adjacent objects: each object is stored once it is verified.

use std::ops::Range;

use crate::format::digest::Digest;
use crate::format::index::Object;
use crate::read::pack::Pack;
use crate::store::object_error::ObjectError;

/// Receives a run of objects.
pub(crate) struct Receiver<'a> {
    pack: &'a Pack,
    /// The current object, and those after it.
    left: Range<usize>,
    /// The received bytes of the current object and its padding.
    got: u64,
    /// The received bytes of the current object.
    memory: Vec<u8>,
    /// Called with each stored object.
    kept: &'a mut dyn FnMut(usize),
}

impl<'a> Receiver<'a> {
    pub(crate) fn new(pack: &'a Pack, run: Range<usize>, kept: &'a mut dyn FnMut(usize)) -> Self {
        Self { pack, left: run, got: 0, memory: Vec::new(), kept }
    }

    /// Returns whether all objects were received.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    /// Returns the objects that were not received.
    pub(crate) fn left(&self) -> Range<usize> {
        self.left.clone()
    }

    /// Returns the current object.
    pub(crate) fn current(&self) -> Digest {
        let last = self.pack.index.objects.len().saturating_sub(1);
        self.pack.index.objects[self.left.start.min(last)].digest
    }

    /// Receives the next bytes.
    pub(crate) fn take(&mut self, mut bytes: &[u8]) -> Result<(), ObjectError> {
        while !bytes.is_empty() && !self.left.is_empty() {
            let object = self.pack.index.objects[self.left.start];
            // Received padding is not kept: zeros are written.
            let padded = object.padded();
            let end = if self.got < object.bytes { object.bytes } else { padded };
            let count = usize::try_from(end - self.got).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(count);
            bytes = later;
            if self.got < object.bytes {
                self.memory.extend_from_slice(now);
            }
            self.got += count as u64;
            if self.got == object.bytes {
                self.end(&object)?;
            }
            // The padding of the last object may be missing.
            if self.got == padded || (self.got >= object.bytes && self.left.len() == 1) {
                self.left.start += 1;
                self.got = 0;
            }
        }
        Ok(())
    }

    /// Completes an object.
    fn end(&mut self, object: &Object) -> Result<(), ObjectError> {
        let (pack, digest) = (self.pack.index.pack, object.digest);
        if !object.proves(&self.memory) {
            return Err(ObjectError::Received { pack, digest });
        }
        let at = self.left.start;
        self.memory.resize(self.memory.len() + usize::from(object.padding), 0);
        self.pack.put(at, &self.memory).map_err(|reason| ObjectError::Keep { pack, reason })?;
        self.memory.clear();
        (self.kept)(at);
        Ok(())
    }
}
