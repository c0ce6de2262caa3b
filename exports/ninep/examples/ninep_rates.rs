//! Measures the server with a client on the same machine, over a unix socket: `rates [SECONDS]`.
//!
//! Each row keeps a number of requests in flight; client and server share the machine's CPUs.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_ninep::{Export, Options};
use ferry_vfs::{Name, OFlags};
use ferry_wire::ninep::{Fid, Frame, Request, Step, Steps, Tag, User, VERSION, valid};

const MSIZE: u32 = 1 << 20;
const FILE_BYTES: u64 = 64 << 20;
const FILE: Fid = Fid(1);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

struct Client {
    stream: UnixStream,
    message: Vec<u8>,
    reply: Vec<u8>,
}

impl Client {
    fn send(&mut self, tag: u16, request: &Request<'_>) -> Outcome<()> {
        self.message.clear();
        request.encode(Tag(tag), &mut self.message);
        Ok(self.stream.write_all(&self.message)?)
    }

    /// Returns the tag of the next reply.
    fn receive(&mut self) -> Outcome<u16> {
        self.stream.read_exact(&mut self.reply[..4])?;
        let bytes = usize::try_from(Frame::bytes(*self.reply.first_chunk().ok_or("short")?))?;
        self.stream.read_exact(&mut self.reply[4..bytes])?;
        let frame = Frame::peek(&self.reply).ok_or("short")?;
        if frame.kind == ferry_wire::ninep::kind::RLERROR { Err("an error".into()) } else { Ok(frame.tag.0) }
    }

    /// Keeps `depth` requests in flight for a while; returns the replies per second.
    fn rate<'a>(&mut self, depth: u16, time: Duration, next: impl Fn(u64) -> Request<'a>) -> Outcome<f64> {
        let begin = Instant::now();
        let mut done = 0_u64;
        for tag in 0..depth {
            self.send(tag, &next(tag.into()))?;
        }
        while begin.elapsed() < time {
            let tag = self.receive()?;
            done += 1;
            self.send(tag, &next(done))?;
        }
        for _ in 0..depth {
            self.receive()?;
        }
        #[allow(clippy::cast_precision_loss, reason = "a rate")]
        Ok(done as f64 / begin.elapsed().as_secs_f64())
    }
}

fn main() -> Outcome<()> {
    let seconds = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let folder = tempfile::tempdir_in("/dev/shm")?;
    std::fs::write(folder.path().join("file"), vec![1; usize::try_from(FILE_BYTES)?])?;
    let source = Arc::new(ferry_dir::Dir::open(folder.path(), ferry_dir::Options::default())?);
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket)?;
    let export = Export::start(vec![listener.into()], source, Options::default())?;
    let reply = vec![0; usize::try_from(MSIZE)?];
    let mut client = Client { stream: UnixStream::connect(&socket)?, message: Vec::new(), reply };
    client.send(Tag::NONE.0, &Request::Version { msize: MSIZE, version: VERSION })?;
    client.receive()?;
    let user = User { name: b"", uid: Some(0) };
    client.send(0, &Request::Attach { fid: Fid(0), afid: Fid::NONE, user, tree: b"" })?;
    client.receive()?;
    let mut buffer = Vec::new();
    let steps = Steps::write(&mut buffer, [Step::Child(Name::new(b"file")?)]);
    client.send(0, &Request::Walk { fid: Fid(0), new_fid: FILE, steps })?;
    client.receive()?;
    client.send(0, &Request::Open { fid: FILE, flags: OFlags::RDWR })?;
    client.receive()?;
    let time = Duration::from_secs(seconds);
    for depth in [1, 16] {
        let rate = client.rate(depth, time, |_| Request::Getattr { fid: FILE, mask: valid::BASIC })?;
        println!("getattr, {depth:2} under way: {rate:>9.0} /s");
        for bytes in [4096, 65536, MSIZE - 11] {
            let range = FILE_BYTES / u64::from(bytes);
            let at = |number: u64| number.wrapping_mul(7919) % range * u64::from(bytes);
            let rate = client.rate(depth, time, |number| {
                let offset = at(number);
                Request::Read { fid: FILE, offset, bytes_max: bytes }
            })?;
            let mib = rate * f64::from(bytes) / f64::from(1 << 20);
            println!("read {bytes:7}, {depth:2} under way: {rate:>9.0} /s, {mib:>6.0} MiB/s");
        }
        let data = vec![2; 4096];
        let rate = client.rate(depth, time, |number| {
            let offset = number.wrapping_mul(7919) % (FILE_BYTES / 4096) * 4096;
            Request::Write { fid: FILE, offset, data: &data }
        })?;
        println!("write   4096, {depth:2} under way: {rate:>9.0} /s");
    }
    drop(client);
    export.stop();
    Ok(())
}
