//! A link with a delay: a proxy between client and server.
//!
//! Each piece of a stream goes on when its time has come, in either direction, and what is under way limits nothing, so
//! it is a link of any bandwidth. The kernel's own (netem) is not to be had everywhere.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::messages::{Frames, Messages, Side, Tally};

/// What is read at once, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// What may be under way in one direction, in bytes: 6 GB/s for 10 ms.
const UNDER_WAY_BYTES_MAX: usize = 64 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link to a server. Nobody new can use it when this is dropped; connections end with their client or server.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    tally: Option<Arc<Mutex<Tally>>>,
    received_bytes: Arc<AtomicU64>,
}

impl Link {
    /// A link to a server, from a port of its own at the same address.
    pub fn new(server: SocketAddr, delay: Duration, counted: bool) -> Result<Self> {
        let listener =
            TcpListener::bind((server.ip(), 0)).with_context(|| format!("cannot listen on {}", server.ip()))?;
        let address = listener.local_addr()?;
        let ended = Arc::new(AtomicBool::new(false));
        let tally = counted.then(Arc::<Mutex<Tally>>::default);
        let received_bytes = Arc::<AtomicU64>::default();
        let (ending, counting, received) = (Arc::clone(&ended), tally.clone(), Arc::clone(&received_bytes));
        std::thread::spawn(move || {
            for (number, client) in (0..).zip(listener.incoming().map_while(Result::ok)) {
                if ending.load(Ordering::Acquire) {
                    break;
                }
                let tally = counting.clone().map(|tally| (tally, number));
                if let Err(error) = join(&client, server, delay, tally, &received) {
                    eprintln!("bench/run: a connection to {server} failed: {error:#}");
                }
            }
        });
        Ok(Self { address, ended, tally, received_bytes })
    }

    /// Where to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The bytes that the server has sent.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// What went through since the last time, if that is counted.
    pub fn take(&self) -> Option<Messages> {
        self.tally.as_ref().map(|tally| lock(tally).take())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // It waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

/// Where a direction is counted.
type Counter = Option<(Arc<Mutex<Tally>>, u64)>;

/// Joins a client to the server.
fn join(
    client: &TcpStream,
    server: SocketAddr,
    delay: Duration,
    counter: Counter,
    received_bytes: &Arc<AtomicU64>,
) -> Result<()> {
    let server = TcpStream::connect(server).context("no connection")?;
    for stream in [client, &server] {
        stream.set_nodelay(true)?;
    }
    carry(client.try_clone()?, server.try_clone()?, delay, Side::Client, counter.clone(), None);
    carry(server, client.try_clone()?, delay, Side::Server, counter, Some(Arc::clone(received_bytes)));
    Ok(())
}

/// Carries one direction, by two threads.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    delay: Duration,
    side: Side,
    counter: Counter,
    all_bytes: Option<Arc<AtomicU64>>,
) {
    let under_way = Arc::new(DelayedData::default());
    let counted = counter.clone();
    let count = move |frames: &mut Frames, bytes: &[u8]| {
        if let Some((tally, connection)) = &counter {
            let mut tally = lock(tally);
            frames.feed(bytes, |frame| tally.note(side, *connection, frame));
        }
    };
    let (reading, counting) = (Arc::clone(&under_way), count.clone());
    std::thread::spawn(move || {
        let mut piece = vec![0; PIECE_BYTES];
        let mut frames = Frames::default();
        // The client connects to this process at once. To a server that is far, that takes the way there and back.
        let mut handshake = if side == Side::Client { 2 * delay } else { Duration::ZERO };
        loop {
            match from.read(&mut piece) {
                Ok(0) => break,
                Ok(bytes) => {
                    if let Some(all_bytes) = &all_bytes {
                        all_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
                    }
                    // Requests are under way as soon as they are sent, replies until they have arrived.
                    if side == Side::Client {
                        counting(&mut frames, &piece[..bytes]);
                    }
                    reading.push(Instant::now() + delay + handshake, piece[..bytes].to_vec());
                    handshake = Duration::ZERO;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        if let (Side::Client, Some((tally, connection))) = (side, &counted) {
            lock(tally).end(*connection);
        }
        reading.end();
    });
    std::thread::spawn(move || {
        let mut frames = Frames::default();
        while let Some((due, piece)) = under_way.next() {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if side == Side::Server {
                count(&mut frames, &piece);
            }
            if to.write_all(&piece).is_err() {
                under_way.end();
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}

#[derive(Debug, Default)]
struct Pieces {
    queue: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    ended: bool,
}

/// What one side sent and the other has not got.
#[derive(Debug, Default)]
struct DelayedData {
    pieces: Mutex<Pieces>,
    changed: Condvar,
}

impl DelayedData {
    fn push(&self, due: Instant, piece: Vec<u8>) {
        let mut pieces = lock(&self.pieces);
        while pieces.bytes > UNDER_WAY_BYTES_MAX && !pieces.ended {
            pieces = self.changed.wait(pieces).unwrap_or_else(PoisonError::into_inner);
        }
        pieces.bytes += piece.len();
        pieces.queue.push_back((due, piece));
        self.changed.notify_all();
    }

    fn next(&self) -> Option<(Instant, Vec<u8>)> {
        let mut pieces = lock(&self.pieces);
        loop {
            if let Some(next) = pieces.queue.pop_front() {
                pieces.bytes -= next.1.len();
                self.changed.notify_all();
                return Some(next);
            }
            if pieces.ended {
                return None;
            }
            pieces = self.changed.wait(pieces).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end(&self) {
        lock(&self.pieces).ended = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends back what it gets, and a link to it.
    fn echo(delay: Duration, counted: bool) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Link::new(listener.local_addr().unwrap(), delay, counted).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut copy = stream.try_clone().unwrap();
            std::io::copy(&mut stream, &mut copy).unwrap();
            copy.shutdown(Shutdown::Write).unwrap();
        });
        link
    }

    #[test]
    fn delays_both_ways_and_loses_nothing() {
        let delay = Duration::from_millis(20);
        let link = echo(delay, false);
        let mut client = TcpStream::connect(link.address).unwrap();
        let began = Instant::now();
        client.write_all(b"a").unwrap();
        client.read_exact(&mut [0]).unwrap();
        assert!(began.elapsed() >= 4 * delay, "connecting is a message each way, too: {:?}", began.elapsed());
        assert_eq!(link.received_bytes(), 1);
        let sent: Vec<u8> = (0..3 << 20).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect();
        let mut got = Vec::new();
        std::thread::scope(|scope| {
            let mut writer = client.try_clone().unwrap();
            let sent = &sent;
            scope.spawn(move || {
                writer.write_all(sent).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            client.read_to_end(&mut got).unwrap();
        });
        assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
        assert_eq!(link.received_bytes(), sent.len() as u64 + 1);
        assert!(link.take().is_none());
    }

    #[test]
    fn counts_messages() {
        let link = echo(Duration::ZERO, true);
        let mut client = TcpStream::connect(link.address).unwrap();
        // Tflush, tag 1, oldtag 2: what comes back looks like another request, and requests are counted on their way only.
        let flush = [9, 0, 0, 0, 108, 1, 0, 2, 0];
        client.write_all(&flush).unwrap();
        client.read_exact(&mut [0; 9]).unwrap();
        assert_eq!(link.take().unwrap().requests, 1);
        assert_eq!(link.take().unwrap().requests, 0);
    }
}
