//! Reads an object of a pack, and proves it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::format::chunk::{self, Found};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::index::Object;

/// Reads an object from a block of a file on, with what fills its last block; returns whether both are as they should be.
pub(crate) fn read_object(file: &File, block: u64, object: &Object, memory: &mut Vec<u8>) -> io::Result<bool> {
    look_at_object(file, block, object, memory).map(|found| found == Found::Sound)
}

/// The same; returns what there is.
pub(crate) fn look_at_object(file: &File, block: u64, object: &Object, memory: &mut Vec<u8>) -> io::Result<Found> {
    let read = |bytes: &mut [u8]| file.read_exact_at(bytes, block * BLOCK_BYTES as u64);
    chunk::look(read, object.bytes, object.digest, memory)
}
