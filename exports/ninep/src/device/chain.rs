//! A descriptor chain as the carrier of a request. Data are transferred between files and the guest's pages.

use ferry_engine::{BlockingPool, Carrier, ReplyBuffer, TransferRequest};
use ferry_vfs::Result;
use ferry_vhost::{Chain, Io};

use crate::carrier::{NinepCarrier, NinepReply};
use crate::read_ahead::ReadAhead;
use crate::serve::PendingTransfer;

/// Where a chain's reply goes.
pub(super) struct Reply<'a> {
    pub(super) chain: &'a Chain,
    pub(super) short: &'a mut Vec<u8>,
}

impl NinepReply for Reply<'_> {
    fn short(&mut self) -> &mut Vec<u8> {
        self.short
    }
}

impl ReplyBuffer for Reply<'_> {
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
    /// The rest of the request after the chain's transfer.
    pub(super) moving: Option<PendingTransfer>,
}

impl NinepReply for Request<'_, '_> {
    fn short(&mut self) -> &mut Vec<u8> {
        self.reply.short()
    }
}

impl ReplyBuffer for Request<'_, '_> {
    fn room(&self) -> usize {
        self.reply.room()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.reply.write_at(offset, bytes)
    }
}

impl Carrier for Request<'_, '_> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        self.reply.chain.read_at(offset, bytes)
    }

    fn transfer(&mut self, request: TransferRequest) {
        // The result of `Io` needs no check: the transfer completes later.
        let _ = self.io.transfer(request);
    }
}

impl NinepCarrier for Request<'_, '_> {
    fn ended(&mut self) -> Option<Result<usize>> {
        None
    }

    fn expect(&mut self, moving: PendingTransfer) {
        self.moving = Some(moving);
    }

    /// The worker has other requests to serve.
    fn read_ahead(&mut self, blocking_pool: &BlockingPool, ahead: ReadAhead) {
        blocking_pool.run_if_short(move || ahead.ask());
    }
}
