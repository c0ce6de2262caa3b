//! The disk of a load.

use ferry_wire::blk::DeviceFeatures;

use super::ledger::{self, Flaw, Ledger};
use super::slots::{Data, RequestProtocol, SECTOR_BYTES, Template};
use super::{Load, Op, pattern};
use crate::{Driver, Error, Result};

/// Request types (VIRTIO 1.3, 5.2.6).
const T_IN: u32 = 0;
const T_OUT: u32 = 1;

/// The status of success.
const STATUS_OK: u8 = 0;
/// How much is read or written at a time when the disk is filled or checked.
const CHUNK_BYTES: u64 = 128 << 10;
/// The length of the capacity field (capacity, in sectors) in bytes.
const CAPACITY_BYTES: u32 = 8;

/// What Linux negotiates and a load cares about: writes that may stay in a cache, several queues.
pub(super) fn features() -> u64 {
    (DeviceFeatures::FLUSH | DeviceFeatures::CONFIG_WCE | DeviceFeatures::MQ).0
}

/// Finds how many bytes of the disk the load uses, and fills them if data is to be checked.
pub(super) fn prepare(driver: &mut Driver, load: &Load) -> Result<u64> {
    let space = driver.read_config(0, CAPACITY_BYTES)?;
    let sectors = space.try_into().map(u64::from_le_bytes);
    let sectors = sectors.map_err(|_| Error::BadReply("the configuration space has no capacity".into()))?;
    let capacity = sectors.saturating_mul(SECTOR_BYTES);
    let block = load.block as u64;
    let size = load.size.unwrap_or(capacity);
    if size > capacity || size < block {
        return Err(Error::Unfit(format!("{size} bytes, in blocks of {block}, of a disk of {capacity}")));
    }
    if !load.verify {
        return Ok(size);
    }
    // More blocks than requests in flight, so that one is always free.
    if Ledger::blocks(size, block, load.queues) <= load.depth as u64 {
        return Err(Error::Unfit(format!("{size} bytes for more than {} blocks on each queue", load.depth)));
    }
    let mut bytes = Vec::new();
    each_chunk(0..size / block * block, block, |range| {
        bytes.resize(usize::try_from(range.end - range.start).unwrap_or(0), 0);
        pattern::fill(&mut bytes, range.start, ledger::seed(0));
        request(driver, T_OUT, range.start, &bytes, 0).map(drop)
    })?;
    Ok(size)
}

/// The request to repeat.
pub(super) fn template(load: &Load) -> Result<Template> {
    let (kind, data) = match load.op {
        Op::Read => (T_IN, Data::In(load.block)),
        Op::Write => (T_OUT, Data::Out(load.block)),
        Op::Getattr | Op::Lookup => return Err(Error::Unfit("a disk, which is read or written".into())),
    };
    if !(load.block as u64).is_multiple_of(SECTOR_BYTES) {
        return Err(Error::Unfit(format!("blocks of {} bytes: use a multiple of {SECTOR_BYTES}", load.block)));
    }
    Ok(Template { form: RequestProtocol::Block, request: header(kind, 0), reply_args: 0, data })
}

/// After a load that was checked: every block holds what was written there last. Returns how many were written.
pub(super) fn check<'a>(driver: &mut Driver, ledgers: impl Iterator<Item = &'a Ledger>) -> Result<u64> {
    let mut written = 0;
    for ledger in ledgers {
        each_chunk(ledger.range(), ledger.block_bytes(), |range| {
            let room = usize::try_from(range.end - range.start).unwrap_or(0);
            let found = request(driver, T_IN, range.start, &[], room)?;
            ledger.check(&found, range.start).map_err(|(offset, flaw)| {
                let holds = match flaw {
                    Flaw::Older => "the write before the last: one is lost, or was carried out twice",
                    Flaw::Other => "data that was never written there",
                };
                Error::BadReply(format!("the block at offset {offset} holds {holds}"))
            })
        })?;
        written += ledger.written();
    }
    Ok(written)
}

/// One request, waited for; returns what was read.
fn request(driver: &mut Driver, kind: u32, offset: u64, data: &[u8], room: usize) -> Result<Vec<u8>> {
    let timeout = driver.config().timeout;
    let queue = driver.queue(0);
    let header = header(kind, offset / SECTOR_BYTES);
    let pieces = [&header[..], data];
    let out = if data.is_empty() { &pieces[..1] } else { &pieces };
    let rooms = [room, 1];
    let ticket = queue.submit(out, if room == 0 { &rooms[1..] } else { &rooms })?;
    let mut reply = queue.wait_for(ticket, timeout)?.reply;
    match reply.pop() {
        Some(STATUS_OK) if reply.len() == room => Ok(reply),
        status => Err(Error::BadReply(format!("status {status:?} to a request at offset {offset}"))),
    }
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

/// Walks over a range in steps of whole blocks.
fn each_chunk(
    range: std::ops::Range<u64>,
    block: u64,
    mut action: impl FnMut(std::ops::Range<u64>) -> Result<()>,
) -> Result<()> {
    let step = CHUNK_BYTES.next_multiple_of(block);
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + step);
        action(start..end)?;
        start = end;
    }
    Ok(())
}
