//! Descriptor chains as carriers of requests.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ferry_engine::RateLimiter;
use ferry_serve::{Carrier, DetachedTransfer, FuseCarrier, ReplyBuffer, ServeOutcome, Server, TransferRequest};
use ferry_vhost::{Chain, ChainState, Io, Placement, Port, QueueHandler};
use ferry_wire::fuse::{IN_HEADER_BYTES, Opcode, peek};

/// The queue for FORGET and INTERRUPT, which is served first; the request queues follow it.
pub(crate) const HIGH_PRIORITY_QUEUES: usize = 1;

/// Serves the queues of one worker for one guest.
pub(crate) struct Handler {
    pub(crate) server: Server,
    pub(crate) port: Arc<Port<Vec<u8>>>,
    pub(crate) limiter: Option<Arc<RateLimiter>>,
}

/// Where a chain's reply goes.
struct Reply<'a>(&'a Chain);

/// A chain that is being served.
struct Request<'a, 'io> {
    chain: &'a Chain,
    io: &'a mut Io<'io>,
    port: &'a Arc<Port<Vec<u8>>>,
}

impl ReplyBuffer for Reply<'_> {
    fn room(&self) -> usize {
        self.0.writable_bytes()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.0.write_at(offset, bytes)
    }
}

impl ReplyBuffer for Request<'_, '_> {
    fn room(&self) -> usize {
        self.chain.writable_bytes()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        self.chain.write_at(offset, bytes)
    }
}

impl Carrier for Request<'_, '_> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        self.chain.read_at(offset, bytes)
    }

    fn transfer(&mut self, request: TransferRequest) {
        // The result of `Io` needs no check: the transfer completes later.
        let _ = self.io.transfer(request);
    }
}

impl FuseCarrier for Request<'_, '_> {
    fn request_bytes(&self) -> usize {
        self.chain.readable_bytes()
    }

    fn token(&self) -> u64 {
        self.io.token()
    }

    fn is_resubmitted(&self) -> bool {
        self.chain.is_resubmitted()
    }

    fn may_park(&self) -> bool {
        self.chain.may_park()
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        let (port, token) = (Arc::clone(self.port), self.io.token());
        move |reply| port.reply(token, reply)
    }
}

/// Lengths in the used ring have 32 bits.
fn written(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

impl QueueHandler for Handler {
    type Message = Vec<u8>;
    type PendingTransfer = DetachedTransfer;

    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState {
        let mut request = Request { chain, io, port: &self.port };
        match self.server.serve_caught(&mut request) {
            ServeOutcome::Reply(bytes) => ChainState::Done(written(bytes)),
            ServeOutcome::NoReply => ChainState::Done(0),
            ServeOutcome::Transfer | ServeOutcome::Later => ChainState::Later,
            ServeOutcome::Parked => ChainState::Parked,
        }
    }

    fn finish_transfer(&mut self, token: u64, chain: &Chain, outcome: io::Result<usize>) -> u32 {
        written(self.server.finish_transfer(token, &mut Reply(chain), outcome))
    }

    fn deliver(&mut self, chain: &Chain, message: Vec<u8>) -> u32 {
        match chain.writable_bytes() >= message.len() {
            true => written(chain.write_at(0, &message)),
            false => 0,
        }
    }

    /// A panic here is a bug in the device (the server catches the source's): the request's state is unknown.
    fn write_error(&mut self, _: &Chain) -> u32 {
        0
    }

    fn end_batch(&mut self) {
        self.server.end_batch();
    }

    /// FUSE requests are independent: the client waits for replies, but for that of RELEASE, which may release a lock.
    fn placement(&self, chain: &Chain) -> Placement {
        let mut header = [0; IN_HEADER_BYTES];
        chain.read_at(0, &mut header);
        let peeked = peek(&header);
        match Opcode::from_raw(peeked.opcode) {
            None
            | Some(
                Opcode::Init
                | Opcode::Destroy
                | Opcode::Forget
                | Opcode::BatchForget
                | Opcode::Interrupt
                // The window's thread serves these.
                | Opcode::Setupmapping
                | Opcode::Removemapping,
            ) => Placement::Here,
            Some(Opcode::Getlk | Opcode::Setlk | Opcode::Setlkw | Opcode::Flush | Opcode::Release) => {
                Placement::InOrder(peeked.ino.0)
            }
            Some(_) => Placement::Anywhere,
        }
    }

    /// FORGET has a queue of its own, which is not delayed.
    fn delay(&self, queue: usize) -> Option<Duration> {
        self.limiter.as_ref().filter(|_| queue >= HIGH_PRIORITY_QUEUES)?.wait()
    }

    fn detach(&mut self, token: u64) -> Option<DetachedTransfer> {
        self.server.detach(token)
    }

    fn attach(&mut self, token: u64, unfinished: DetachedTransfer) {
        self.server.attach(token, unfinished);
    }
}
