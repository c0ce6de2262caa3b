//! A client that holds its requests in memory.
#![allow(dead_code, reason = "each test uses a part")]

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};

use ferry_driver::fuse::{ReplyKind, decode_reply, encode};
use ferry_engine::Operation as Movement;
use ferry_serve::{
    Carrier, FuseCarrier, HEADER_BYTES, ReplyBuffer, ServeOutcome, Server, SessionSlot, Share, ShareOptions,
    TransferRequest,
};
use ferry_vfs::{Errno, FileSystem, Ino};
use ferry_wire::fuse::{Extensions, InitFlags, InitRequest, Negotiated, Operation, Request, SecurityContexts};

pub struct Message {
    pub request: Vec<u8>,
    pub reply: Vec<u8>,
    /// The export has given up on it.
    pub revoked: bool,
    /// A server before has taken it already.
    pub again: bool,
    /// A transfer was begun.
    pub transfer: Option<TransferRequest>,
    /// A write was begun that waits for a device.
    pub waits: bool,
    pub late: mpsc::Sender<Vec<u8>>,
}

impl ReplyBuffer for Message {
    fn room(&self) -> usize {
        self.reply.len()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        if self.revoked {
            return 0;
        }
        let room = self.reply.get_mut(offset..).unwrap_or_default();
        let count = room.len().min(bytes.len());
        room[..count].copy_from_slice(&bytes[..count]);
        count
    }
}

impl Carrier for Message {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        let rest = self.request.get(offset..).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        count
    }

    fn transfer(&mut self, request: TransferRequest) {
        self.waits = matches!(request.operation, Movement::Write { waits: true, .. });
        self.transfer = Some(request);
    }
}

impl FuseCarrier for Message {
    fn request_bytes(&self) -> usize {
        self.request.len()
    }

    fn token(&self) -> u64 {
        7
    }

    fn is_resubmitted(&self) -> bool {
        self.again
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        let late = self.late.clone();
        move |reply| late.send(reply).unwrap()
    }
}

impl Message {
    /// Does what was begun, as an engine would.
    fn transfer(&mut self) -> io::Result<usize> {
        let TransferRequest { operation, file, file_offset, at, bytes } =
            self.transfer.take().expect("a transfer was begun");
        match operation {
            Movement::Read => Ok(rustix::io::pread(file.as_fd(), &mut self.reply[at..at + bytes], file_offset)?),
            Movement::Write { .. } => Ok(rustix::io::pwrite(file.as_fd(), &self.request[at..at + bytes], file_offset)?),
            Movement::Fsync { .. } => Ok(0),
        }
    }
}

/// The result of serving a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The bytes behind the header.
    Reply(Vec<u8>),
    Error(Errno),
    /// Not one byte.
    Nothing,
    NoReply,
    /// A reply will come to [`Client::late`].
    Late,
}

pub struct Client {
    pub server: Server,
    pub session: Arc<SessionSlot>,
    pub negotiated: Negotiated,
    pub late: mpsc::Receiver<Vec<u8>>,
    sender: mpsc::Sender<Vec<u8>>,
    pub room: usize,
    pub revoked: bool,
    pub again: bool,
    /// The last request began a write that waits for a device.
    pub waits: bool,
    /// What every request has with it.
    pub contexts: Vec<u8>,
    /// Who asks.
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    unique: u64,
}

impl Client {
    pub fn new(source: Arc<dyn FileSystem>, options: &ShareOptions, session: SessionSlot) -> Self {
        Self::offering(InitFlags::ALL, source, options, session).unwrap()
    }

    /// One whose kernel can these things only; the answer, if it is not let in.
    pub fn offering(
        flags: InitFlags,
        source: Arc<dyn FileSystem>,
        options: &ShareOptions,
        session: SessionSlot,
    ) -> Result<Self, Answer> {
        let (sender, late) = mpsc::channel();
        let session = Arc::new(session);
        let server = Server::new(Arc::new(Share::new(source, options)), Arc::clone(&session));
        let mut client = Self::of(server, session, Negotiated::BEFORE_INIT, (sender, late));
        let offer = InitRequest { major: 7, minor: 45, max_readahead_bytes: 1 << 20, flags };
        match client.ask(Ino::ROOT, Operation::Init(offer)) {
            Answer::Reply(_) => {}
            other => return Err(other),
        }
        client.negotiated = *client.session.current().expect("INIT was answered").negotiated();
        Ok(client)
    }

    fn of(
        server: Server,
        session: Arc<SessionSlot>,
        negotiated: Negotiated,
        (sender, late): (mpsc::Sender<Vec<u8>>, mpsc::Receiver<Vec<u8>>),
    ) -> Self {
        let (contexts, room) = (Vec::new(), 1 << 17);
        Self {
            server,
            session,
            negotiated,
            late,
            sender,
            room,
            revoked: false,
            again: false,
            waits: false,
            contexts,
            uid: 0,
            gid: 0,
            pid: 1,
            unique: 0,
        }
    }

    /// The same client, once its server is gone: what it asked last it asks again, the server that has taken it up.
    pub fn outlives(self) -> impl FnOnce(Server, Arc<SessionSlot>) -> Self {
        let Self { negotiated, contexts, uid, unique, .. } = self;
        move |server, session| {
            let mut client = Self::of(server, session, negotiated, mpsc::channel());
            (client.again, client.contexts, client.uid, client.unique) = (true, contexts, uid, unique - 2);
            client
        }
    }

    /// The number of the next request.
    pub fn next_unique(&self) -> u64 {
        self.unique + 2
    }

    pub fn ask(&mut self, ino: Ino, operation: Operation<'_>) -> Answer {
        self.ask_and_write(ino, operation, &[])
    }

    /// For WRITE: its data follow.
    pub fn ask_and_write(&mut self, ino: Ino, operation: Operation<'_>, data: &[u8]) -> Answer {
        self.unique += 2;
        let count = u32::from(!self.contexts.is_empty());
        let security = SecurityContexts::parse(&self.contexts, count).expect("contexts");
        let extensions = Extensions { security, ..Extensions::default() };
        let request =
            Request { unique: self.unique, ino, uid: self.uid, gid: self.gid, pid: self.pid, extensions, operation };
        let mut bytes = Vec::new();
        encode(&request, &self.negotiated, &mut bytes);
        bytes.extend_from_slice(data);
        let mut message = Message {
            request: bytes,
            reply: vec![0; self.room],
            revoked: self.revoked,
            again: self.again,
            transfer: None,
            waits: false,
            late: self.sender.clone(),
        };
        let written = match self.server.serve_caught(&mut message) {
            ServeOutcome::Reply(written) => written,
            ServeOutcome::NoReply => return Answer::NoReply,
            ServeOutcome::Later | ServeOutcome::Parked => return Answer::Late,
            ServeOutcome::Transfer => {
                let outcome = message.transfer();
                self.server.finish_transfer(message.token(), &mut message, outcome)
            }
        };
        self.server.end_batch();
        self.waits = message.waits;
        if written == 0 { Answer::Nothing } else { answer(self.unique, &message.reply[..written]) }
    }
}

/// Takes a reply apart; its header must be sound.
pub fn answer(unique: u64, reply: &[u8]) -> Answer {
    let (decoded, outcome) = decode_reply(ReplyKind::Bytes, reply).expect("a sound header");
    assert_eq!(decoded, unique);
    outcome.map_or_else(Answer::Error, |_| Answer::Reply(reply[HEADER_BYTES..].to_vec()))
}
