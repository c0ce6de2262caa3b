//! From a descriptor chain to a served request.

use std::sync::Arc;

use ferry_vfs::{Caller, Change, Errno, Ino};
use ferry_vhost::{Answer, Chain, Io, Port, QueueHandler};
use ferry_wire::fuse::{
    self, IN_HEADER_BYTES, InitError, InitOutcome, InitRequest, Negotiated, Operation, REQUEST_HEAD_BYTES_MAX, Reply,
    Request, decode, peek,
};

use crate::device::{Session, Share};
use crate::mount::Mount;
use crate::reply;

/// Groups of a caller that are looked at; Linux sends one.
const GROUPS_MAX: usize = 32;

/// Serves one queue of one guest.
pub(crate) struct Handler {
    pub(crate) share: Arc<Share>,
    session: Arc<Session>,
    pub(crate) port: Arc<Port<Vec<u8>>>,
    /// The session, for as long as a batch takes.
    mount: Option<Arc<Mount>>,
    /// The private copy of the request being served.
    head: Vec<u8>,
    /// Listings, values and the like, on their way out.
    pub(crate) scratch: Vec<u8>,
    /// Transfers under way, by the low half of their token.
    moving: Vec<Option<Moving>>,
}

/// A transfer under way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moving {
    Read { unique: u64 },
    Write { unique: u64, ino: Ino, offset: u64 },
    Fsync { unique: u64 },
}

/// A request being served.
pub(crate) struct Context<'a> {
    pub(crate) caller: Caller<'a>,
    pub(crate) mount: &'a Arc<Mount>,
    pub(crate) ino: Ino,
    pub(crate) unique: u64,
    pub(crate) chain: &'a Chain,
}

impl Handler {
    pub(crate) fn new(share: Arc<Share>, session: Arc<Session>, port: Arc<Port<Vec<u8>>>) -> Self {
        let head = vec![0; REQUEST_HEAD_BYTES_MAX];
        Self { share, session, port, mount: None, head, scratch: Vec::new(), moving: Vec::new() }
    }

    /// Copies the request out of guest memory, once, and serves the copy.
    fn read_and_serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> Answer {
        let message_bytes = chain.readable_bytes();
        let mut header = [0; IN_HEADER_BYTES];
        if chain.read_at(0, &mut header) < IN_HEADER_BYTES {
            self.share.complaints.warn(format_args!("a request of {message_bytes} bytes has no FUSE header"));
            return Answer::Done(0);
        }
        let peeked = peek(&header);
        let head_bytes = peeked.head_bytes(message_bytes);
        let mut head = std::mem::take(&mut self.head);
        head[..IN_HEADER_BYTES].copy_from_slice(&header);
        chain.read_at(IN_HEADER_BYTES, &mut head[IN_HEADER_BYTES..head_bytes]);
        if self.mount.is_none() {
            self.mount = self.session.mount();
        }
        let mount = self.mount.clone();
        let session = mount.as_ref().map_or(Negotiated::BEFORE_INIT, |mount| mount.negotiated);
        let answer = match (decode(&head[..head_bytes], message_bytes, &session), mount) {
            (Err(error), _) => {
                // Linux passes names on that are too long; every program in the guest can make it do so.
                if error.errno != Errno::NAMETOOLONG {
                    self.share.complaints.warn(format_args!("{error}"));
                }
                Answer::Done(error.reply_to().map_or(0, |unique| reply::write_error(chain, unique, error.errno)))
            }
            (Ok(Request { operation: Operation::Init(init), unique, .. }), _) => {
                Answer::Done(self.init(chain, unique, &init))
            }
            (Ok(request), Some(mount)) => {
                let mut groups = [0; GROUPS_MAX];
                let groups = request.extensions.groups.copy_to(&mut groups);
                let Request { unique, ino, uid, gid, pid, operation, .. } = request;
                let caller = Caller { session: mount.id, uid, gid, pid, groups };
                let context = Context { caller, mount: &mount, ino, unique, chain };
                self.serve_operation(&context, &operation, io)
            }
            (Ok(request), None) => {
                let wanted = request.operation.reply_kind().is_some();
                Answer::Done(if wanted { reply::write_error(chain, request.unique, Errno::NOTCONN) } else { 0 })
            }
        };
        self.head = head;
        answer
    }

    /// Begins a session; what an earlier one held (the guest was reset) is given back.
    fn init(&mut self, chain: &Chain, unique: u64, init: &InitRequest) -> u32 {
        self.mount = None;
        self.session.set_mount(None);
        match fuse::negotiate(init, self.share.policy.wanted()) {
            Ok(InitOutcome::Ready(negotiated, answer)) => {
                tracing::debug!("a guest speaks FUSE 7.{}, agreed on {:?}", init.minor, negotiated.flags);
                let mount = Mount::new(Arc::clone(&self.share.source), negotiated);
                self.session.set_mount(Some(Arc::new(mount)));
                reply::write(chain, unique, &negotiated, &Reply::Init(answer))
            }
            Ok(InitOutcome::Retry(answer)) => {
                reply::write(chain, unique, &Negotiated::BEFORE_INIT, &Reply::Init(answer))
            }
            Err(error) => {
                self.share.complaints.warn(format_args!("{error}; no mount"));
                reply::write_error(chain, unique, InitError::ERRNO)
            }
        }
    }

    /// Ends the session.
    pub(crate) fn destroy(&mut self) {
        self.mount = None;
        self.session.set_mount(None);
    }

    /// Remembers what to do when the transfer with this token ends.
    pub(crate) fn expect(&mut self, io: &Io<'_>, moving: Moving) {
        let index = slot(io.token());
        if self.moving.len() <= index {
            self.moving.resize(index + 1, None);
        }
        self.moving[index] = Some(moving);
    }
}

/// Tokens count slots in their low half.
fn slot(token: u64) -> usize {
    usize::try_from(token & u64::from(u32::MAX)).unwrap_or(0)
}

impl Context<'_> {
    /// Answers at once.
    pub(crate) fn done(&self, reply: &Reply<'_>) -> Answer {
        Answer::Done(reply::write(self.chain, self.unique, &self.mount.negotiated, reply))
    }
}

impl QueueHandler for Handler {
    type Message = Vec<u8>;

    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> Answer {
        self.read_and_serve(chain, io)
    }

    fn transferred(&mut self, token: u64, chain: &Chain, outcome: std::io::Result<usize>) -> u32 {
        let Some(moving) = self.moving.get_mut(slot(token)).and_then(Option::take) else { return 0 };
        let unique = match moving {
            Moving::Read { unique } | Moving::Write { unique, .. } | Moving::Fsync { unique } => unique,
        };
        let count = match outcome {
            Ok(count) => count,
            Err(error) => {
                let errno = error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error);
                return reply::write_error(chain, unique, errno);
            }
        };
        let reply = match moving {
            Moving::Read { unique } => {
                let head = Reply::encode_bytes_head(unique, count);
                chain.write_at(0, &head);
                return reply::written(head.len() + count);
            }
            Moving::Write { ino, offset, .. } => {
                if let Some(changes) = self.share.source.changes() {
                    changes.publish(|| Change::Data { ino, offset, len: count as u64 });
                }
                Reply::Write { bytes: reply::written(count) }
            }
            Moving::Fsync { .. } => Reply::Empty,
        };
        reply::write(chain, unique, &Negotiated::BEFORE_INIT, &reply)
    }

    fn deliver(&mut self, chain: &Chain, message: Vec<u8>) -> u32 {
        match chain.writable_bytes() >= message.len() {
            true => reply::written(chain.write_at(0, &message)),
            false => 0,
        }
    }

    fn failed(&mut self, chain: &Chain) -> u32 {
        // The panic may have come while the buffer was lent out.
        self.head.resize(REQUEST_HEAD_BYTES_MAX, 0);
        let mut header = [0; IN_HEADER_BYTES];
        chain.read_at(0, &mut header);
        let peeked = peek(&header);
        if peeked.wants_reply() { reply::write_error(chain, peeked.unique, Errno::IO) } else { 0 }
    }

    fn batch_end(&mut self) {
        self.mount = None;
    }
}
