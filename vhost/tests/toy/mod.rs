//! A device for tests: it replies to a number with another number, immediately or later.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry_driver::{Config, Driver, Ticket};
use ferry_vhost::{Chain, ChainState, Device, Io, Placement, Port, QueueHandler, Server, Socket, WorkerOptions};

/// The difference between a request and its reply.
const MASK: u64 = 0x5555_aaaa_0f0f_3c3c;
/// The time to serve odd numbers.
const LATER: Duration = Duration::from_micros(300);
/// Numbers from here on are parked, and get a reply after [`MUCH_LATER`].
pub const PARKED: u64 = 1 << 63;
const MUCH_LATER: Duration = Duration::from_millis(30);
/// Added to a number: it gets a reply with [`Toy::release`], or at once if it is parked and may not be.
pub const HELD: u64 = 1 << 62;
/// Added to a number: the worker first waits for [`Toy::gate`].
pub const GATED: u64 = 1 << 61;
/// Added to a number: its handler panics.
pub const PANICS: u64 = 1 << 60;
/// Added to such a number: the error handler panics, too, which ends the worker.
pub const FATAL: u64 = 1 << 59;
/// Added to a number that waits for the gate: it never leaves the thread that owns the queue.
pub const HERE: u64 = 1 << 58;
/// The byte of the configuration space that the driver may write.
pub const WRITABLE_AT: u32 = 4;
/// The number of queues, each with its own worker.
pub const QUEUES: usize = 4;

/// Pending replies: port, token and number.
pub type Held = Arc<Mutex<Vec<(Arc<Port<u64>>, u64, u64)>>>;

#[derive(Clone, Default)]
pub struct Toy {
    /// All executed requests.
    pub journal: Option<PathBuf>,
    pub written: Arc<AtomicU8>,
    pub features: Arc<AtomicU64>,
    /// While it is locked, [`GATED`] numbers wait.
    pub gate: Arc<Mutex<()>>,
    /// The number of requests that have reached the gate.
    pub at_gate: Arc<AtomicUsize>,
    pub held: Held,
    /// The number of threads for waiting requests: those at the gate and odd ones.
    pub spares: usize,
    /// The length of the shared memory region, if there is one.
    pub window_bytes: Option<u64>,
}

impl Toy {
    /// Returns the number of held requests.
    pub fn held(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// Replies to all held requests.
    pub fn release(&self) {
        for (port, token, number) in self.held.lock().unwrap().drain(..) {
            port.reply(token, number);
        }
    }
}

pub struct Handler {
    journal: Option<std::fs::File>,
    port: Arc<Port<u64>>,
    toy: Toy,
    is_broken: bool,
}

impl Device for Toy {
    type Handler = Handler;
    type Session = ();

    fn queue_count(&self) -> usize {
        QUEUES
    }

    fn config(&self) -> Option<Vec<u8>> {
        Some(vec![1, 2, 3, 4, self.written.load(Ordering::SeqCst)])
    }

    fn write_config(&self, (): &(), offset: u32, bytes: &[u8]) -> bool {
        match bytes {
            [byte] if offset == WRITABLE_AT => {
                self.written.store(*byte, Ordering::SeqCst);
                true
            }
            _ => false,
        }
    }

    fn changes_config(&self) -> bool {
        true
    }

    fn window_bytes(&self) -> Option<u64> {
        self.window_bytes
    }

    fn tracks_in_flight(&self) -> bool {
        true
    }

    fn driver_state(&self, (): &()) -> Option<u32> {
        Some(self.written.load(Ordering::SeqCst).into())
    }

    fn restore(&self, (): &(), kept: u32) {
        self.written.store(kept.to_le_bytes()[0], Ordering::SeqCst);
    }

    fn negotiated(&self, (): &(), features: u64) {
        self.features.store(features, Ordering::SeqCst);
    }

    fn reset(&self, (): &()) {
        self.written.store(0, Ordering::SeqCst);
    }

    fn spare_threads(&self) -> usize {
        self.spares
    }

    fn worker_count(&self) -> usize {
        QUEUES
    }

    fn worker_of(&self, index: usize) -> usize {
        index
    }

    fn worker_options(&self, index: usize) -> WorkerOptions {
        let io = ferry_engine::IoMode::Auto;
        WorkerOptions { name: format!("toy-{index}"), io, poll: Duration::ZERO.into(), begun: None }
    }

    fn session(&self) {}

    fn handler(&self, _: &Arc<()>, _: usize, port: Arc<Port<u64>>) -> Handler {
        let open = |path: &PathBuf| std::fs::File::options().append(true).create(true).open(path).unwrap();
        Handler { journal: self.journal.as_ref().map(open), port, toy: self.clone(), is_broken: false }
    }
}

impl QueueHandler for Handler {
    type Message = u64;
    type PendingTransfer = ();

    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState {
        let mut bytes = [0; 8];
        chain.read_at(0, &mut bytes);
        let number = u64::from_le_bytes(bytes);
        if let Some(journal) = &mut self.journal {
            journal.write_all(&bytes).unwrap();
        }
        if number & GATED != 0 {
            self.toy.at_gate.fetch_add(1, Ordering::SeqCst);
            drop(self.toy.gate.lock());
        }
        if number & HELD != 0 && (number < PARKED || chain.may_park()) {
            self.toy.held.lock().unwrap().push((Arc::clone(&self.port), io.token(), number));
            return if number < PARKED { ChainState::Later } else { ChainState::Parked };
        }
        if number.is_multiple_of(2) || number & HELD != 0 {
            return ChainState::Done(self.deliver(chain, number));
        }
        let (port, token) = (Arc::clone(&self.port), io.token());
        let (state, delay) =
            if number < PARKED { (ChainState::Later, LATER) } else { (ChainState::Parked, MUCH_LATER) };
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            port.reply(token, number);
        });
        state
    }

    fn finish_transfer(&mut self, _: u64, _: &Chain, _: io::Result<usize>) -> u32 {
        0
    }

    fn deliver(&mut self, chain: &Chain, number: u64) -> u32 {
        self.is_broken = number & FATAL != 0;
        assert!(number & PANICS == 0, "a test panic");
        u32::try_from(chain.write_at(0, &(number ^ MASK).to_le_bytes())).unwrap()
    }

    fn placement(&self, chain: &Chain) -> Placement {
        let mut bytes = [0; 8];
        chain.read_at(0, &mut bytes);
        let number = u64::from_le_bytes(bytes);
        let is_here = number & HERE != 0;
        if !is_here && (number & GATED != 0 || !number.is_multiple_of(2)) {
            Placement::Anywhere
        } else {
            Placement::Here
        }
    }

    fn write_error(&mut self, _: &Chain) -> u32 {
        assert!(!self.is_broken, "a test panic");
        0
    }
}

/// Serves a toy on a socket.
pub fn serve(path: &Path, toy: Toy) -> (Socket, Server) {
    let socket = Socket::bind(path).unwrap();
    let server = Server::start(socket.listener().unwrap(), toy, "toy").unwrap();
    (socket, server)
}

/// Returns the configuration of tests.
pub fn config() -> Config {
    Config { queues: QUEUES, first_queues: 0, queue_size: 64, ..Config::default() }
}

/// Sends a number.
pub fn ask(driver: &mut Driver, queue: usize, number: u64) -> ferry_driver::Result<Ticket> {
    driver.queue(queue).submit(&[&number.to_le_bytes()], &[8])
}

/// Whether this is the reply to a number.
pub fn answers(number: u64, reply: &[u8]) -> bool {
    reply == (number ^ MASK).to_le_bytes()
}
