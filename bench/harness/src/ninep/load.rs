//! One client that asks a 9P server without a kernel's client between: so many requests at a time, by one thread.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry_vfs::{Name, OFlags};
use ferry_wire::ninep::{Fid, Reply, Request, Step, Steps, Tag, User, valid};

use crate::noise::Noise;

/// Where a server listens.
#[derive(Debug, Clone)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// TCP.
    Tcp(SocketAddr),
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Tgetattr of a file, the attributes that `stat` needs.
    Getattr,
    /// Twalk to a file and Tclunk, in turn; each counts.
    WalkClunk,
    /// Tread of so many bytes, anywhere in a file.
    Read(u32),
    /// Twrite of so many bytes, anywhere in a file.
    Write(u32),
}

/// What a client found.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Requests that were answered.
    pub requests: u64,
    /// Replies that one system call of the client received, on average.
    pub replies_per_receive: f64,
    /// How long that took.
    pub elapsed: Duration,
}

/// What a message may have at most, in bytes.
const MSIZE: u32 = 1 << 20;
/// A message's head: its length, its kind and its tag.
const HEAD_BYTES: usize = 7;
/// How long a reply may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The client's first fid is the root, the second the file; each request has one of its own.
const ROOT: Fid = Fid(0);
const FILE: Fid = Fid(1);
const FIRST_FID: u32 = 2;

trait Stream: Read + Write {}
impl Stream for TcpStream {}
impl Stream for UnixStream {}

/// A connection with an open file.
pub struct Client {
    stream: Box<dyn Stream>,
    /// What was received, from the first reply that was not looked at.
    received: Vec<u8>,
    filled: usize,
    receives: u64,
    send: Vec<u8>,
    names: Vec<u8>,
    name: String,
    data: Vec<u8>,
    /// The offsets of reads and writes, the same for each server.
    offsets: Noise,
    file_bytes: u64,
}

impl Client {
    /// Connects, and opens a file of `bytes` bytes in the root of a tree.
    pub fn connect(address: &Address, tree: &Path, name: &str, bytes: u64) -> Result<Self> {
        let stream: Box<dyn Stream> = match address {
            Address::Unix(path) => {
                let stream =
                    UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Box::new(stream)
            }
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Box::new(stream)
            }
        };
        let mut client = Self {
            stream,
            received: vec![0; 2 * MSIZE as usize],
            filled: 0,
            receives: 0,
            send: Vec::new(),
            names: Vec::new(),
            name: name.to_owned(),
            data: Noise(1).bytes(MSIZE as usize),
            offsets: Noise(2),
            file_bytes: bytes,
        };
        let tree = tree.as_os_str().as_encoded_bytes();
        client.ask(&Request::Version { msize: MSIZE, version: b"9P2000.L" })?;
        client.ask(&Request::Attach {
            fid: ROOT,
            afid: Fid::NONE,
            user: User { name: b"root", uid: Some(0) },
            tree,
        })?;
        let mut names = Vec::new();
        let steps = Steps::write(&mut names, [Step::Child(Name::new(name.as_bytes()).context("an odd name")?)]);
        client.ask(&Request::Walk { fid: ROOT, new_fid: FILE, steps })?;
        client.ask(&Request::Open { fid: FILE, flags: OFlags::RDWR })?;
        Ok(client)
    }

    /// Asks and waits.
    fn ask(&mut self, request: &Request<'_>) -> Result<()> {
        let tag = if matches!(request, Request::Version { .. }) { Tag(u16::MAX) } else { Tag(0) };
        request.encode(tag, &mut self.send);
        self.flush()?;
        let mut count = 0;
        while count == 0 {
            count = self.receive(|_, _| Ok(()))?;
        }
        ensure!(count == 1, "{count} replies to one request");
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.stream.write_all(&self.send).context("cannot send requests")?;
        self.send.clear();
        Ok(())
    }

    /// Receives what is there, at least something, and hands out the tags of whole replies; returns how many.
    fn receive(&mut self, mut each: impl FnMut(&mut Self, Tag) -> Result<()>) -> Result<u64> {
        let bytes = self.stream.read(&mut self.received[self.filled..]).context("no reply comes")?;
        ensure!(bytes > 0, "the server has closed the connection");
        self.receives += 1;
        self.filled += bytes;
        let buffer = std::mem::take(&mut self.received);
        let (mut at, mut count, mut outcome) = (0, 0, Ok(()));
        while outcome.is_ok()
            && let Some(head) = buffer[at..self.filled].first_chunk::<4>()
        {
            let bytes = u32::from_le_bytes(*head) as usize;
            if !(HEAD_BYTES..=MSIZE as usize).contains(&bytes) {
                outcome = Err(anyhow::anyhow!("a reply of {bytes} bytes"));
                break;
            }
            let Some(message) = buffer[at..self.filled].get(..bytes) else { break };
            outcome = match Reply::decode(message) {
                Ok((_, Reply::Error(errno))) => Err(anyhow::anyhow!("the server refuses a request: {errno}")),
                Ok((tag, _)) => each(self, tag),
                Err(error) => Err(anyhow::anyhow!("a reply cannot be understood: {error}")),
            };
            (at, count) = (at + bytes, count + 1);
        }
        self.received = buffer;
        self.received.copy_within(at..self.filled, 0);
        self.filled -= at;
        outcome.map(|()| count)
    }

    fn offset(&mut self, bytes: u32) -> u64 {
        self.offsets.below(self.file_bytes / u64::from(bytes)) * u64::from(bytes)
    }

    /// Puts a request behind the others to be sent. `round` tells a walk from a clunk.
    fn put(&mut self, operation: Operation, tag: Tag, round: u64) -> Result<()> {
        let own = Fid(FIRST_FID + u32::from(tag.0));
        match operation {
            Operation::Getattr => Request::Getattr { fid: FILE, mask: valid::BASIC }.encode(tag, &mut self.send),
            Operation::WalkClunk if round.is_multiple_of(2) => {
                let name = Name::new(self.name.as_bytes()).context("an odd name")?;
                let steps = Steps::write(&mut self.names, [Step::Child(name)]);
                Request::Walk { fid: ROOT, new_fid: own, steps }.encode(tag, &mut self.send);
            }
            Operation::WalkClunk => Request::Clunk { fid: own }.encode(tag, &mut self.send),
            Operation::Read(bytes) => {
                let offset = self.offset(bytes);
                Request::Read { fid: FILE, offset, bytes_max: bytes }.encode(tag, &mut self.send);
            }
            Operation::Write(bytes) => {
                let offset = self.offset(bytes);
                let data = self.data.get(..bytes as usize).context("more than a message has")?;
                Request::Write { fid: FILE, offset, data }.encode(tag, &mut self.send);
            }
        }
        Ok(())
    }

    /// Keeps `depth` requests under way until `is_done`, which gets the number of replies; then waits for the rest.
    pub fn run(&mut self, operation: Operation, depth: u16, mut is_done: impl FnMut(u64) -> bool) -> Result<Rate> {
        let mut rounds = vec![0_u64; depth.into()];
        let (receives, began) = (self.receives, Instant::now());
        let (mut requests, mut ends, mut left) = (0, false, u64::from(depth));
        for tag in 0..depth {
            self.put(operation, Tag(tag), 0)?;
        }
        while left > 0 {
            self.flush()?;
            let mut ended = 0;
            requests += self.receive(|client, tag| {
                let Some(round) = rounds.get_mut(usize::from(tag.0)) else { bail!("a reply to nothing: {tag:?}") };
                *round += 1;
                // A fid that was walked to is released.
                let is_open = operation == Operation::WalkClunk && !round.is_multiple_of(2);
                if ends && !is_open {
                    ended += 1;
                    return Ok(());
                }
                client.put(operation, tag, *round)
            })?;
            left -= ended;
            ends = ends || is_done(requests);
        }
        let receives = self.receives - receives;
        #[allow(clippy::cast_precision_loss, reason = "counts of a second")]
        let replies_per_receive = requests as f64 / receives as f64;
        Ok(Rate { requests, replies_per_receive, elapsed: began.elapsed() })
    }
}
