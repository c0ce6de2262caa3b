//! A socket's messages as carriers of requests: all of a message is in memory, and so is its reply.

use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_engine::{Lane, WithoutFsetid};
use ferry_vfs::{Backing, Errno, Extent, Result};
use ferry_wire::ninep::{READ_HEAD_BYTES, WRITE_HEAD_BYTES};

use crate::ahead::Ahead;
use crate::carrier::{Carrier, ReplyBuffer};
use crate::serve::Moving;

/// A long reply grows by so much at a time: who asks for more than there is gets no memory for it.
const PIECE_BYTES: usize = 1 << 20;

/// A thread's memory for replies.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// A short reply.
    pub(crate) short: Vec<u8>,
    /// A long reply. The length of this is the most that was needed yet.
    pub(crate) long: Vec<u8>,
    /// What is to be read ahead when the reply is sent.
    pub(crate) ahead: Option<Ahead>,
}

/// A message that is being served.
pub(crate) struct Message<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) buffers: &'a mut Buffers,
}

impl Message<'_> {
    /// A part of the long reply.
    fn place(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        let long = &mut self.buffers.long;
        if long.len() < offset + bytes {
            long.resize(offset + bytes, 0);
        }
        &mut long[offset..offset + bytes]
    }
}

impl ReplyBuffer for Message<'_> {
    fn short(&mut self) -> &mut Vec<u8> {
        &mut self.buffers.short
    }

    fn room(&self) -> usize {
        usize::MAX
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.place(offset, bytes.len()).copy_from_slice(bytes);
        bytes.len()
    }
}

// Everything is done at once: the thread may wait.
impl Carrier for Message<'_> {
    fn data_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let data = self.bytes.get(WRITE_HEAD_BYTES + offset..).unwrap_or_default();
        let count = data.len().min(bytes.len());
        bytes[..count].copy_from_slice(&data[..count]);
        count
    }

    fn read(&mut self, extent: Extent, bytes: usize) -> Option<Result<usize>> {
        let mut done = 0;
        while done < bytes {
            let piece = PIECE_BYTES.min(bytes - done);
            match read(&extent, done as u64, self.place(READ_HEAD_BYTES + done, piece)) {
                Ok(count) => {
                    done += count;
                    if count < piece {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(errno) => return Some(Err(errno)),
            }
        }
        Some(Ok(done))
    }

    fn write(&mut self, extent: Extent, bytes: usize, clear_privileges: bool, _: bool) -> Option<Result<usize>> {
        let data = self.bytes.get(WRITE_HEAD_BYTES..WRITE_HEAD_BYTES + bytes).unwrap_or_default();
        Some(write(&extent, data, clear_privileges))
    }

    fn fsync(&mut self, file: Arc<Backing>, data_only: bool) -> Option<Result<usize>> {
        let synced = if data_only { rustix::fs::fdatasync(file.as_fd()) } else { rustix::fs::fsync(file.as_fd()) };
        Some(synced.map(|()| 0))
    }

    /// Nothing is left for later.
    fn expect(&mut self, _: Moving) {}

    /// This thread does it when the reply is sent; another one waits for the next request by then.
    fn read_ahead(&mut self, _: &Lane, ahead: Ahead) {
        self.buffers.ahead = Some(ahead);
    }
}

fn read(extent: &Extent, from: u64, room: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while done < room.len() {
        match rustix::io::pread(extent.file.as_fd(), &mut room[done..], extent.offset + from + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

fn write(extent: &Extent, data: &[u8], clear_privileges: bool) -> Result<usize> {
    let _without = if clear_privileges { Some(WithoutFsetid::enter()?) } else { None };
    let mut done = 0;
    while done < data.len() {
        match rustix::io::pwrite(extent.file.as_fd(), &data[done..], extent.offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            // What was written is told; what was not will be tried again, and tell the error.
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    if let Some(memory) = extent.file.memory() {
        memory.written();
    }
    Ok(done)
}
