//! A descriptor chain as the carrier of a request. Data goes between files and the guest's own pages.

use std::sync::Arc;

use ferry_engine::Lane;
use ferry_vfs::{Backing, Extent, Result};
use ferry_vhost::{Chain, Io};
use ferry_wire::ninep::{READ_HEAD_BYTES, WRITE_HEAD_BYTES};

use crate::ahead::Ahead;
use crate::carrier::{Carrier, ReplyBuffer};
use crate::serve::Moving;

/// Where a chain's reply goes.
pub(super) struct Reply<'a> {
    pub(super) chain: &'a Chain,
    pub(super) short: &'a mut Vec<u8>,
}

impl ReplyBuffer for Reply<'_> {
    fn short(&mut self) -> &mut Vec<u8> {
        self.short
    }

    fn room(&self) -> usize {
        self.chain.writable_bytes()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.chain.write_at(offset, bytes)
    }
}

/// A chain that is being served.
pub(super) struct Request<'a, 'io> {
    pub(super) reply: Reply<'a>,
    pub(super) io: &'a mut Io<'io>,
    /// What is to be done when the chain's transfer has ended.
    pub(super) moving: Option<Moving>,
}

impl ReplyBuffer for Request<'_, '_> {
    fn short(&mut self) -> &mut Vec<u8> {
        self.reply.short()
    }

    fn room(&self) -> usize {
        self.reply.room()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.reply.write_at(offset, bytes)
    }
}

// What `Io` answers is known: a transfer comes by itself.
impl Carrier for Request<'_, '_> {
    fn data_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        self.reply.chain.read_at(WRITE_HEAD_BYTES + offset, bytes)
    }

    fn read(&mut self, extent: Extent, bytes: usize) -> Option<Result<usize>> {
        let _ = self.io.read(extent.file, extent.offset, READ_HEAD_BYTES, bytes);
        None
    }

    fn write(&mut self, extent: Extent, bytes: usize, clear_privileges: bool, waits: bool) -> Option<Result<usize>> {
        let data = (WRITE_HEAD_BYTES, bytes);
        let _ = self.io.write(extent.file, extent.offset, data, clear_privileges, waits);
        None
    }

    fn fsync(&mut self, file: Arc<Backing>, data_only: bool) -> Option<Result<usize>> {
        let _ = self.io.fsync(file, data_only);
        None
    }

    fn expect(&mut self, moving: Moving) {
        self.moving = Some(moving);
    }

    /// The worker has others to serve.
    fn read_ahead(&mut self, lane: &Lane, ahead: Ahead) {
        lane.run(move || ahead.ask());
    }
}
