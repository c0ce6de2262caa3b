//! Bytes of neighbouring objects as they come in: each object is kept when it is proved, and not before.

use std::io::Write;
use std::ops::Range;
use std::path::Path;

use crate::build::KEPT_BYTES_MAX;
use crate::erofs::BLOCK_BYTES;
use crate::fetch::Bytes;
use crate::objects::Bad;
use crate::pack::Pack;
use crate::store::{self, New};
use crate::verity::{Digest, Hasher};

/// Takes the bytes of a run of objects.
pub(crate) struct Receiver<'a> {
    pack: &'a Pack,
    store: &'a Path,
    /// The object whose bytes come now, and those after it.
    left: Range<usize>,
    /// How many bytes of it have come, and of what fills its last block.
    got: u64,
    hasher: Hasher,
    /// What has come of a small object, and of a large one.
    memory: Vec<u8>,
    file: Option<New>,
    /// Is told of each object that is in its place.
    kept: &'a mut dyn FnMut(usize),
}

impl<'a> Receiver<'a> {
    pub(crate) fn new(pack: &'a Pack, store: &'a Path, run: Range<usize>, kept: &'a mut dyn FnMut(usize)) -> Self {
        Self { pack, store, left: run, got: 0, hasher: Hasher::default(), memory: Vec::new(), file: None, kept }
    }

    /// Whether all objects have come.
    pub(crate) fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    /// The object whose turn it is.
    pub(crate) fn current(&self) -> Digest {
        let last = self.pack.index.objects.len().saturating_sub(1);
        self.pack.index.objects[self.left.start.min(last)].digest
    }

    /// Takes the next bytes.
    pub(crate) fn take(&mut self, mut bytes: &[u8]) -> Result<(), Bad> {
        while !bytes.is_empty() && !self.left.is_empty() {
            let object = self.pack.index.objects[self.left.start];
            // What follows an object up to its block's end is not kept: it is zeros, as the file's holes are.
            let padded = object.blocks() * BLOCK_BYTES as u64;
            let end = if self.got < object.bytes { object.bytes } else { padded };
            let count = usize::try_from(end - self.got).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(count);
            bytes = later;
            if self.got < object.bytes {
                self.hasher.update(now);
                self.hold(object.bytes, now)?;
            }
            self.got += count as u64;
            if self.got == object.bytes {
                self.end(object.digest)?;
            }
            // The last object's block need not come to its end.
            if self.got == padded || (self.got >= object.bytes && self.left.len() == 1) {
                self.left.start += 1;
                self.got = 0;
            }
        }
        Ok(())
    }

    fn wrong(&self, source: std::io::Error) -> Bad {
        Bad::Keep { pack: self.pack.index.pack, source }
    }

    fn hold(&mut self, all: u64, bytes: &[u8]) -> Result<(), Bad> {
        if all <= KEPT_BYTES_MAX {
            self.memory.extend_from_slice(bytes);
            return Ok(());
        }
        if self.file.is_none() {
            let new = New::begin(&store::packs_folder(self.store));
            self.file = Some(new.map_err(|error| self.wrong(std::io::Error::other(error)))?);
        }
        let file = self.file.as_mut().expect("it was just made");
        file.file.write_all(bytes).map_err(|source| Bad::Keep { pack: self.pack.index.pack, source })
    }

    /// All bytes of an object are there.
    fn end(&mut self, digest: Digest) -> Result<(), Bad> {
        let (found, chunks) = std::mem::take(&mut self.hasher).finish_with_chunks();
        if found != digest {
            return Err(Bad::Received { pack: self.pack.index.pack, digest });
        }
        let at = self.left.start;
        let file = self.file.take();
        let bytes = file.as_ref().map_or(Bytes::Memory(&self.memory), |new| Bytes::File(&new.file));
        self.pack.put(at, bytes).map_err(|source| self.wrong(source))?;
        self.memory.clear();
        if let Some(absent) = &self.pack.absent {
            absent.note_chunks(at, chunks);
        }
        (self.kept)(at);
        Ok(())
    }
}
