//! Requests that may block, on separate threads.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ferry_engine::requests::LoggedRequest;
use ferry_engine::{read_blocking, write_blocking};
use ferry_vfs::{Backing, BlockRange, Data, Disk, Errno, Extent};
use ferry_wire::blk::{Range, Request, Status};

use crate::metrics::ActiveRequest;
use crate::state::{CopyPermit, State};

/// The outcome of a request served on another thread.
pub(crate) struct Reply {
    pub(crate) status: Status,
    /// The data for the driver.
    pub(crate) data: Vec<u8>,
    /// The permit for the data's memory.
    pub(crate) room: Option<CopyPermit>,
    /// The request, until its end is counted.
    pub(crate) active: Option<ActiveRequest>,
    /// The request, until its end is logged.
    pub(crate) logged: Option<Box<LoggedRequest>>,
}

impl Reply {
    pub(crate) fn failed(error: Errno) -> Self {
        let status = if error == Errno::NOTSUP { Status::Unsupported } else { Status::IoError };
        Self { status, data: Vec::new(), room: None, active: None, logged: None }
    }
}

/// A request with all its data, independent of the guest's memory.
pub(crate) enum Job {
    Read(BlockRange),
    Write { at: BlockRange, durable: bool, bytes: Vec<u8> },
    Flush,
    Discard(Vec<Range>),
    WriteZeroes { ranges: Vec<Range>, durable: bool },
}

/// Runs a job on the pool, and passes the reply to `tell`. `room` is the permit for its copies.
pub(crate) fn run(state: &Arc<State>, job: Job, room: Option<CopyPermit>, tell: impl FnOnce(Reply) + Send + 'static) {
    // Not the whole state: dropping the pool waits for its threads, so a thread must not drop it.
    let (disk, ratelimited_log) = (Arc::clone(&state.disk), Arc::clone(&state.ratelimited_log));
    state.blocking_pool.run(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| job.carry_out(&*disk)));
        let reply = match outcome.unwrap_or(Err(Errno::IO)) {
            Ok(data) => Reply { status: Status::Ok, data, room, active: None, logged: None },
            Err(error) => {
                ratelimited_log.warn(format_args!("a request failed: {error}"));
                Reply::failed(error)
            }
        };
        tell(reply);
    });
}

impl Job {
    /// Returns the data for the driver.
    pub(crate) fn carry_out(self, disk: &dyn Disk) -> Result<Vec<u8>, Errno> {
        match self {
            Self::Read(at) => {
                let mut bytes = Vec::new();
                match disk.read(&at, &mut bytes)? {
                    Data::Bytes(count) if count as u64 == at.bytes => {}
                    Data::Bytes(_) => return Err(Errno::IO),
                    Data::Extent(extent) => bytes = read_extent(&extent, &at)?,
                }
                return Ok(bytes);
            }
            Self::Write { at, durable, bytes } => match disk.write(&at, durable, &mut &bytes[..])? {
                Data::Bytes(count) if count == bytes.len() => {}
                Data::Bytes(_) => return Err(Errno::IO),
                Data::Extent(extent) => write_extent(&extent, &bytes)?,
            },
            Self::Flush => disk.flush()?.map_or(Ok(()), |file: Arc<Backing>| rustix::fs::fdatasync(&*file))?,
            Self::Discard(ranges) => {
                ranges.iter().try_for_each(|range| disk.discard(range.offset, range.bytes))?;
            }
            Self::WriteZeroes { ranges, durable } => ranges
                .iter()
                .try_for_each(|range| disk.write_zeroes(range.offset, range.bytes, range.may_unmap, durable))?,
        }
        Ok(Vec::new())
    }

    /// Returns the job of a request with ranges.
    pub(crate) fn of_ranges(request: Request, ranges: Vec<Range>, durable: bool) -> Self {
        match request {
            Request::Discard { .. } => Self::Discard(ranges),
            _ => Self::WriteZeroes { ranges, durable },
        }
    }
}

fn read_extent(extent: &Extent, at: &BlockRange) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; usize::try_from(at.bytes).map_err(|_| Errno::INVAL)?];
    let moved = read_blocking(&extent.file, extent.offset, &mut bytes, || {});
    check_complete(moved, bytes.len())?;
    Ok(bytes)
}

fn write_extent(extent: &Extent, bytes: &[u8]) -> Result<(), Errno> {
    check_complete(write_blocking(&extent.file, extent.offset, bytes, false), bytes.len())
}

fn check_complete(moved: io::Result<usize>, bytes: usize) -> Result<(), Errno> {
    match moved {
        Ok(count) if count == bytes => Ok(()),
        Ok(_) => Err(Errno::IO),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}
