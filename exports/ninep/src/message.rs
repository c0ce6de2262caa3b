//! A socket's messages as carriers of requests: message and reply are in memory.

use std::io;

use ferry_engine::{
    BlockingPool, Carrier, Operation, ReplyBuffer, TransferRequest, read_blocking, sync_blocking, write_blocking,
};
use ferry_vfs::{Errno, Result};

use crate::carrier::{NinepCarrier, NinepReply};
use crate::read_ahead::ReadAhead;
use crate::serve::PendingTransfer;

/// The growth of a long reply in bytes, so that a request for more than exists takes no memory.
const PIECE_BYTES: usize = 1 << 20;

/// A thread's memory for replies.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// A short reply.
    pub(crate) short: Vec<u8>,
    /// A long reply, as long as the longest so far.
    pub(crate) long: Vec<u8>,
    /// The range to read ahead after the reply is sent.
    pub(crate) ahead: Option<ReadAhead>,
}

/// A message in progress.
pub(crate) struct Message<'a> {
    bytes: &'a [u8],
    pub(crate) buffers: &'a mut Buffers,
    /// Called before this thread waits for a transfer.
    before_wait: &'a dyn Fn(),
    /// The outcome of the request's transfer.
    ended: Option<io::Result<usize>>,
}

impl<'a> Message<'a> {
    pub(crate) fn new(bytes: &'a [u8], buffers: &'a mut Buffers, before_wait: &'a dyn Fn()) -> Self {
        Self { bytes, buffers, before_wait, ended: None }
    }

    /// Returns a part of the long reply.
    fn place(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        let long = &mut self.buffers.long;
        if long.len() < offset + bytes {
            long.resize(offset + bytes, 0);
        }
        &mut long[offset..offset + bytes]
    }
}

impl Message<'_> {
    /// Runs a transfer; may block.
    fn run(&mut self, request: &TransferRequest) -> io::Result<usize> {
        let TransferRequest { operation, file, file_offset, at, bytes } = request;
        match *operation {
            Operation::Read => self.run_read(request),
            Operation::Write { clear_privileges, waits } => {
                let data = self.bytes.get(*at..at + bytes).unwrap_or_default();
                if waits {
                    (self.before_wait)();
                }
                write_blocking(file, *file_offset, data, clear_privileges)
            }
            Operation::Fsync { data_only } => {
                (self.before_wait)();
                sync_blocking(file, data_only).map(|()| 0)
            }
        }
    }

    fn run_read(&mut self, request: &TransferRequest) -> io::Result<usize> {
        let mut done = 0;
        while done < request.bytes {
            let piece = PIECE_BYTES.min(request.bytes - done);
            let before_wait = self.before_wait;
            let place = self.place(request.at + done, piece);
            match read_blocking(&request.file, request.file_offset + done as u64, place, before_wait) {
                Ok(count) => {
                    done += count;
                    if count < piece {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}

impl ReplyBuffer for Message<'_> {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.place(offset, bytes.len()).copy_from_slice(bytes);
        bytes.len()
    }
}

impl NinepReply for Message<'_> {
    fn short(&mut self) -> &mut Vec<u8> {
        &mut self.buffers.short
    }
}

impl Carrier for Message<'_> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let data = self.bytes.get(offset..).unwrap_or_default();
        let count = data.len().min(bytes.len());
        bytes[..count].copy_from_slice(&data[..count]);
        count
    }

    fn transfer(&mut self, request: TransferRequest) {
        self.ended = Some(self.run(&request));
    }
}

impl NinepCarrier for Message<'_> {
    fn ended(&mut self) -> Option<Result<usize>> {
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
        self.ended.take().map(|ended| ended.map_err(errno))
    }

    /// The transfer has already ended.
    fn expect(&mut self, _: PendingTransfer) {}

    /// This thread reads ahead after the reply is sent, while another one waits for the next request.
    fn read_ahead(&mut self, _: &BlockingPool, ahead: ReadAhead) {
        let before = self.buffers.ahead.replace(ahead);
        debug_assert!(before.is_none(), "a turn ends with the first");
    }
}
