//! Replies whose data move from a file to the kernel by reference, through a pipe.
//!
//! Splicing avoids a copy into this process's memory. It costs another call, and work per page, so it is used for long
//! reads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_engine::Transfer;
use ferry_serve::HEADER_BYTES;
use ferry_vfs::Backing;
use ferry_wire::fuse::abi::OutHeader;
use rustix::io::{Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use zerocopy::IntoBytes;

/// The minimum data length that is spliced, in bytes. Shorter reads are cheaper to copy.
const BYTES_MIN: usize = 256 << 10;

/// The unit of a pipe: the header takes one, and unaligned data touch an additional one.
const PAGE_BYTES: usize = 4096;

/// The maximum pipe without `CAP_SYS_RESOURCE`, in bytes (`/proc/sys/fs/pipe-max-size`).
const UNPRIVILEGED_BYTES: usize = 1 << 20;

/// The pipe of one reader.
#[derive(Debug, Default)]
pub(super) enum SplicePipe {
    /// Not needed yet, or the last one was discarded with its contents.
    #[default]
    None,
    /// It is empty.
    Ready(Pipe),
    /// No pipe is available.
    Refused,
}

/// A pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    from: OwnedFd,
    to: OwnedFd,
    /// The maximum length of data that fit beside the header.
    room_bytes: usize,
}

/// A reply in a pipe: header and data.
#[derive(Debug)]
pub(super) struct LoadedReply {
    pipe: Pipe,
    pub(super) bytes: usize,
    pub(super) calls: u64,
    /// The pipe has pages of the file, not copies: the source must not reuse what they hold before they are sent.
    _file: Arc<Backing>,
}

impl SplicePipe {
    /// Returns a pipe, if possible with room for this many bytes of data.
    fn take(&mut self, data_bytes: usize) -> Option<Pipe> {
        if matches!(self, Self::None) {
            *self = Pipe::new(data_bytes).map_or_else(
                |error| {
                    tracing::debug!("long replies are copied, not spliced: {error}");
                    Self::Refused
                },
                Self::Ready,
            );
        }
        match std::mem::take(self) {
            Self::Ready(pipe) => Some(pipe),
            Self::Refused => {
                *self = Self::Refused;
                None
            }
            Self::None => None,
        }
    }

    /// Puts a reply into the pipe: the data of a read, which runs now and may block. `None` if the reply must be
    /// copied: it is short, there is no pipe, or the file returns fewer bytes.
    pub(super) fn load(&mut self, transfer: &Transfer, unique: u64, room_bytes: usize) -> Option<LoadedReply> {
        if !transfer.is_read() || transfer.bytes() < BYTES_MIN {
            return None;
        }
        // The header comes first and contains the length; a file that is shortened meanwhile is copied instead.
        let size = u64::try_from(rustix::fs::fstat(&**transfer.file()).ok()?.st_size).ok()?;
        let left = usize::try_from(size.saturating_sub(transfer.offset())).unwrap_or(usize::MAX);
        let bytes = transfer.bytes().min(left);
        if bytes < BYTES_MIN {
            return None;
        }
        let pipe = self.take(room_bytes)?;
        if bytes > pipe.room_bytes {
            *self = Self::Ready(pipe);
            return None;
        }
        let len = u32::try_from(HEADER_BYTES + bytes).ok()?;
        let header: [u8; HEADER_BYTES] = OutHeader { len, error: 0, unique }.as_bytes().try_into().ok()?;
        let calls = pipe.fill(&header, transfer, bytes)?;
        Some(LoadedReply { pipe, bytes, calls, _file: Arc::clone(transfer.file()) })
    }

    /// Sends a reply, and keeps the pipe.
    pub(super) fn send(&mut self, loaded: LoadedReply, channel: BorrowedFd<'_>) -> Result<(), Errno> {
        let LoadedReply { pipe, bytes, _file, .. } = loaded;
        let bytes = HEADER_BYTES + bytes;
        retry_on_intr(|| splice(&pipe.from, None, channel, None, bytes, SpliceFlags::empty()))?;
        *self = Self::Ready(pipe);
        Ok(())
    }
}

impl Pipe {
    fn new(data_bytes: usize) -> io::Result<Self> {
        let (from, to) = pipe_with(PipeFlags::CLOEXEC)?;
        let wanted = data_bytes + 2 * PAGE_BYTES;
        let bytes = fcntl_setpipe_size(&to, wanted).or_else(|_| fcntl_setpipe_size(&to, UNPRIVILEGED_BYTES))?;
        Ok(Self { from, to, room_bytes: bytes - 2 * PAGE_BYTES })
    }

    /// Moves pages by reference, which [`Transfer::run`] cannot: that fills memory of this process. Returns the number of calls;
    /// `None` if the pipe does not hold everything.
    fn fill(&self, header: &[u8], transfer: &Transfer, bytes: usize) -> Option<u64> {
        if rustix::io::write(&self.to, header) != Ok(header.len()) {
            return None;
        }
        let mut offset = transfer.offset();
        let mut left = bytes;
        let mut calls = 2;
        while left > 0 {
            calls += 1;
            match splice(transfer.file().as_fd(), Some(&mut offset), &self.to, None, left, SpliceFlags::NONBLOCK) {
                Ok(0) => return None,
                Ok(count) => left = left.saturating_sub(count),
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Some(calls)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use ferry_engine::Operation;
    use ferry_vfs::Segment;

    use super::*;

    /// Pages of a persistent image are reused once nobody holds its descriptor.
    #[test]
    fn a_loaded_reply_holds_its_file() {
        let mut source = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut source, &vec![7; BYTES_MIN]).unwrap();
        let file = Arc::new(Backing::new(source.into()));
        let nowhere = Segment { address: std::ptr::null_mut(), bytes: BYTES_MIN };
        let transfer = Transfer::new(Operation::Read, Arc::clone(&file), 0, [nowhere]);
        let mut pipe = SplicePipe::default();
        let loaded = pipe.load(&transfer, 1, BYTES_MIN).expect("it is long enough");
        drop(transfer);
        assert_eq!(Arc::strong_count(&file), 2);
        let sent = tempfile::tempfile().unwrap();
        pipe.send(loaded, sent.as_fd()).unwrap();
        assert_eq!(Arc::strong_count(&file), 1);
        let mut data = vec![0; BYTES_MIN];
        sent.read_exact_at(&mut data, HEADER_BYTES as u64).unwrap();
        assert!(data.iter().all(|byte| *byte == 7));
    }
}
