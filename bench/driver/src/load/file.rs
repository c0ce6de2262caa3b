//! The file of a load.

use rustix::io::Errno;

use super::{Load, Op, pattern};
use crate::ops::TRANSFER_BYTES_MAX;
use crate::{Driver, Error, ROOT, Result};

/// O_RDONLY, O_RDWR and O_CREAT as the guest's kernel sends them.
const O_RDONLY: u32 = 0;
const O_RDWR: u32 = 2;
const O_CREAT: u32 = 0o100;

/// Size of a file that does not exist yet, unless told.
const SIZE_DEFAULT: u64 = 64 << 20;
/// How much is read or written at a time when the file is made or checked.
const CHUNK_BYTES: usize = 128 << 10;

/// The open file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) node: u64,
    pub(super) fh: u64,
    pub(super) size: u64,
}

/// Begins the session, finds or makes the file, and opens it.
pub(super) fn prepare(driver: &mut Driver, load: &Load, name: &str) -> Result<Target> {
    let init = driver.init()?;
    let chunk = CHUNK_BYTES.min(usize::try_from(init.max_write.clamp(4096, TRANSFER_BYTES_MAX)).unwrap_or(CHUNK_BYTES));
    let (node, found_size) = match driver.lookup(ROOT, name) {
        Ok(entry) if entry.nodeid != 0 => (Some(entry.nodeid), entry.attr.size),
        Ok(_) => (None, 0),
        Err(Error::Errno(errno)) if errno == Errno::NOENT.raw_os_error() => (None, 0),
        Err(error) => return Err(error),
    };
    let size = load.size.unwrap_or(if found_size >= load.block as u64 { found_size } else { SIZE_DEFAULT });
    let size = size.max(load.block as u64);
    let fill = node.is_none() || load.verify || found_size < size;
    let flags = if fill || load.op == Op::Write { O_RDWR } else { O_RDONLY };
    let (node, fh) = match node {
        Some(node) => (node, driver.open(node, flags)?.fh),
        None => {
            let (entry, open) = driver.create(ROOT, name, flags | O_CREAT, 0o100_644)?;
            (entry.nodeid, open.fh)
        }
    };
    let target = Target { node, fh, size };
    if fill {
        each_chunk(size, chunk, |offset, block| {
            pattern::fill(block, offset, pattern::SEED_INITIAL);
            match driver.write(node, fh, offset, block)? {
                written if usize::try_from(written) == Ok(block.len()) => Ok(()),
                written => Err(Error::BadReply(format!("{written} of {} bytes written", block.len()))),
            }
        })?;
    }
    Ok(target)
}

/// After a WRITE load: each block is either as it was made or as it was written. Returns how many were written.
pub(super) fn check_written(driver: &mut Driver, load: &Load, target: Target) -> Result<u64> {
    let mut written = 0;
    let chunk = CHUNK_BYTES.next_multiple_of(load.block);
    each_chunk(target.size / load.block as u64 * load.block as u64, chunk, |offset, block| {
        let size = u32::try_from(block.len()).map_err(|_| Error::Memory(block.len()))?;
        let found = driver.read(target.node, target.fh, offset, size)?;
        if found.len() != block.len() {
            return Err(Error::BadReply(format!("{} of {size} bytes read at offset {offset}", found.len())));
        }
        for (bytes, at) in found.chunks(load.block).zip((offset..).step_by(load.block)) {
            if pattern::matches(bytes, at, pattern::SEED_WRITTEN) {
                written += 1;
            } else if !pattern::matches(bytes, at, pattern::SEED_INITIAL) {
                return Err(Error::BadReply(format!("the block at offset {at} is neither the old nor the new one")));
            }
        }
        Ok(())
    })?;
    Ok(written)
}

fn each_chunk(size: u64, chunk: usize, mut action: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let mut block = vec![0; chunk];
    let mut offset = 0;
    while offset < size {
        let len = usize::try_from(size - offset).map_or(chunk, |left| left.min(chunk));
        action(offset, &mut block[..len])?;
        offset += len as u64;
    }
    Ok(())
}
