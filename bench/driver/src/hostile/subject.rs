//! The session that a case works in.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_wire::fuse::abi::{Opcode, OpenOut, ReadIn};
use zerocopy::IntoBytes;

use super::{Answer, Options};
use crate::memory::Buffer;
use crate::queue::link;
use crate::ring::{Descriptor, Used, WRITE};
use crate::session::{header, parse_reply};
use crate::{Caller, Config, Driver, Error, Queue, ROOT, Result};

/// The directory and the file that cases work on, in the root of the share.
const DIRECTORY: &str = "ferry-hostile";
const FILE: &str = "file";
/// What the file holds, over and over.
pub(super) const CONTENT: u8 = 0x5a;
/// Its size.
pub(super) const FILE_BYTES: usize = 64 << 10;
/// Room for a request and for its reply.
pub(super) const AREA_BYTES: usize = 128 << 10;
/// How long a good request or a message may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The request queue.
pub(super) const QUEUE: usize = 1;
/// Entries of its ring: few, so that loops and overflows are soon there.
pub(super) const QUEUE_SIZE: u16 = 128;
/// Stale used entries to pass over when a good request waits for its own.
const STALE_MAX: usize = 100_000;

const O_RDWR_CREAT: u32 = 0o102;

/// Makes the request numbers of malformed requests, which differ from all of [`Queue::next_unique`].
static UNIQUE: AtomicU64 = AtomicU64::new(1 << 62);

/// A connection with a directory and an open file.
#[derive(Debug)]
pub struct Subject {
    /// The connection; it has two memory regions that follow one another.
    pub driver: Driver,
    /// The directory's inode.
    pub directory: u64,
    /// An open handle of it.
    pub directory_fh: u64,
    /// The file's inode.
    pub file: u64,
    /// An open handle of it.
    pub fh: u64,
    pub(super) options: Options,
    pub(super) request: Buffer,
    pub(super) reply: Buffer,
    /// The number of the last malformed request.
    pub(super) unique: u64,
}

pub(super) fn config() -> Config {
    Config {
        queues: 1,
        queue_size: QUEUE_SIZE,
        memory_bytes: 8 << 20,
        regions: 2,
        timeout: TIMEOUT,
        ..Config::default()
    }
}

impl Subject {
    /// Connects, and makes what cases work on unless it is there.
    ///
    /// # Errors
    /// When the server does not work as it should.
    pub fn connect(socket: &Path, options: &Options) -> Result<Self> {
        let mut driver = Driver::connect(socket, config())?;
        driver.init()?;
        let directory = match driver.lookup(ROOT, DIRECTORY) {
            Ok(entry) if entry.nodeid != 0 => entry.nodeid,
            _ => driver.mkdir(ROOT, DIRECTORY, 0o755)?.nodeid,
        };
        let directory_fh = driver.opendir(directory).map_or(0, |OpenOut { fh, .. }| fh);
        let (file, fh) = match driver.lookup(directory, FILE) {
            Ok(entry) if entry.nodeid != 0 => (entry.nodeid, driver.open(entry.nodeid, 2)?.fh),
            _ => {
                let (entry, open) = driver.create(directory, FILE, O_RDWR_CREAT, 0o100_644)?;
                (entry.nodeid, open.fh)
            }
        };
        driver.truncate(file, FILE_BYTES as u64)?;
        driver.write(file, fh, 0, &[CONTENT; FILE_BYTES])?;
        let alloc = || driver.memory().alloc(AREA_BYTES, 4096).ok_or(Error::Memory(AREA_BYTES));
        let (request, reply) = (alloc()?, alloc()?);
        Ok(Self { driver, directory, directory_fh, file, fh, options: options.clone(), request, reply, unique: 0 })
    }

    /// Two good requests, with the right answers.
    ///
    /// # Errors
    /// When they do not work.
    pub fn good_request(&mut self) -> Result<()> {
        while self.queue().ring_mut().pop().is_some() {}
        self.patient(Opcode::Getattr, ROOT, &[0; 16], 104)?;
        let size = 4096;
        let args = ReadIn { fh: self.fh, offset: 4096, size, ..ReadIn::ZERO };
        let data = self.patient(Opcode::Read, self.file, args.as_bytes(), 4096)?;
        if data.len() == 4096 && data.iter().all(|&byte| byte == CONTENT) {
            return Ok(());
        }
        Err(Error::BadReply(format!("a READ of 4096 bytes brings {} bytes, not all of them those written", data.len())))
    }

    /// A request whose reply may come behind stale used entries.
    fn patient(&mut self, opcode: Opcode, node: u64, args: &[u8], reply: usize) -> Result<Vec<u8>> {
        let ticket = self.driver.send(opcode, node, &[args], &[], reply)?;
        for _ in 0..STALE_MAX {
            match self.driver.receive(ticket) {
                Err(Error::BadUsed(_)) => {}
                result => return result,
            }
        }
        Err(Error::BadReply("the used ring is full of what was never available".into()))
    }

    /// Stops the queue and starts it with a ring that is in order again.
    ///
    /// # Errors
    /// When the server refuses.
    pub fn restart(&mut self) -> Result<()> {
        let base = self.driver.stop(QUEUE)?;
        self.driver.start(QUEUE, base)
    }

    pub(super) fn queue(&mut self) -> &mut Queue {
        self.driver.queue(QUEUE)
    }

    /// A whole request with a header that is right, and a number of its own.
    pub(super) fn bytes(&mut self, opcode: u32, node: u64, args: &[u8]) -> Vec<u8> {
        self.unique = UNIQUE.fetch_add(2, Ordering::Relaxed);
        let caller = Caller { uid: 0, gid: 0, pid: 1 };
        [header(opcode, self.unique, node, args.len(), caller).as_bytes(), args].concat()
    }

    /// A GETATTR of the root: the good request that most malformed ones are made from.
    pub(super) fn getattr(&mut self) -> Vec<u8> {
        self.bytes(Opcode::Getattr.as_raw(), ROOT, &[0; 16])
    }

    /// Sends a request as it is, in one descriptor, with a reply area of `room` bytes in another.
    pub(super) fn send(&mut self, request: &[u8], room: usize) -> Result<Answer> {
        self.request.write(0, request);
        let mut chain = vec![self.readable(0, request.len())];
        if room > 0 {
            chain.push(self.writable(0, room));
        }
        self.send_chain(&mut chain)
    }

    /// A descriptor for part of the request area.
    pub(super) fn readable(&self, offset: usize, len: usize) -> Descriptor {
        at(self.request.guest() + offset as u64, len, 0)
    }

    /// A descriptor for part of the reply area.
    pub(super) fn writable(&self, offset: usize, len: usize) -> Descriptor {
        at(self.reply.guest() + offset as u64, len, WRITE)
    }

    /// Links a chain in the ring's own table, sends it, and takes the answer.
    pub(super) fn send_chain(&mut self, chain: &mut [Descriptor]) -> Result<Answer> {
        let heads = self.queue().take_descriptors(chain.len())?;
        link(chain, |position| heads[position]);
        self.send_as_is(chain, &heads)
    }

    /// Stores descriptors at the given places of the ring's table, sends the first, and takes the answer.
    pub(super) fn send_as_is(&mut self, chain: &[Descriptor], heads: &[u16]) -> Result<Answer> {
        for (descriptor, &index) in chain.iter().zip(heads) {
            descriptor.store(self.queue().ring().table(), index.into());
        }
        self.send_head(heads[0])
    }

    /// Makes a head available and takes the answer.
    pub(super) fn send_head(&mut self, head: u16) -> Result<Answer> {
        self.reply.write(0, &[0; 256]);
        self.queue().ring_mut().push(head);
        self.queue().ring_mut().publish();
        self.queue().kick();
        self.answer()
    }

    /// What becomes of the chain that is in flight.
    pub(super) fn answer(&mut self) -> Result<Answer> {
        let patience = self.options.drop_after;
        match self.queue().wait_used(patience) {
            Ok(used) => Ok(self.judge(used)),
            Err(Error::TimedOut(_)) => Ok(Answer::Dropped),
            Err(Error::Disconnected) => Ok(Answer::Disconnected),
            Err(error) => Err(error),
        }
    }

    fn judge(&self, used: Used) -> Answer {
        let len = usize::try_from(used.len).unwrap_or(usize::MAX);
        if len == 0 {
            return Answer::Empty;
        }
        if len > AREA_BYTES {
            return Answer::Malformed(format!("{len} bytes used"));
        }
        match parse_reply(&self.reply.to_vec(len), used.len) {
            Ok((header, _)) if header.unique != self.unique => {
                Answer::Malformed(format!("it answers request {:#x}, not {:#x}", header.unique, self.unique))
            }
            Ok((_, body)) => Answer::Reply(body.to_vec()),
            Err(Error::Errno(errno)) => Answer::Errno(errno),
            Err(error) => Answer::Malformed(error.to_string()),
        }
    }
}

/// A descriptor without flags for the chain.
pub(super) fn at(addr: u64, len: usize, flags: u16) -> Descriptor {
    Descriptor { addr, len: u32::try_from(len).unwrap_or(u32::MAX), flags, next: 0 }
}
