//! A server that is a byte vector: it delays, reorders, shortens, fails, restarts, and checks what it is sent.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "this is a part of tests")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use ferry_9p_client::cache::{Completion, Remote};
use ferry_vfs::Errno;

/// How the server behaves.
#[derive(Clone, Copy, Debug)]
pub struct Manners {
    pub message_bytes: usize,
    /// The round trip.
    pub delay: Duration,
    /// Up to so much more, at random: what overtakes what is random then.
    pub jitter: Duration,
    /// Answers are shortened at random.
    pub shortens: bool,
    pub seed: u64,
}

impl Default for Manners {
    fn default() -> Self {
        let (delay, jitter) = (Duration::ZERO, Duration::ZERO);
        Self { message_bytes: 1 << 20, delay, jitter, shortens: false, seed: 1 }
    }
}

enum Op {
    Read,
    Write,
    Sync,
}

struct Job {
    due: Instant,
    number: u64,
    op: Op,
    offset: u64,
    buffer: Vec<u8>,
    done: Completion,
}

impl PartialEq for Job {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Job {}
impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Job {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

#[derive(Default)]
pub struct Content {
    pub bytes: Vec<u8>,
    pub durable: Vec<u8>,
}

struct Queue {
    jobs: BinaryHeap<Reverse<Job>>,
    writing: Vec<(u64, u64)>,
    stopped: bool,
}

pub struct Fake {
    pub manners: Manners,
    pub content: Mutex<Content>,
    queue: Mutex<Queue>,
    /// Held while a job is served.
    serving: Mutex<()>,
    changed: Condvar,
    random: AtomicU64,
    numbers: AtomicU64,
    pub paused: AtomicBool,
    pub fail_reads: AtomicBool,
    pub fail_writes: AtomicBool,
    pub fail_syncs: AtomicBool,
    pub overlaps: AtomicUsize,
    pub reads: Mutex<Vec<(u64, usize)>>,
    pub writes: Mutex<Vec<(u64, usize)>>,
}

impl Fake {
    pub fn new(manners: Manners, bytes: Vec<u8>) -> Arc<Self> {
        let queue = Queue { jobs: BinaryHeap::new(), writing: Vec::new(), stopped: false };
        let fake = Arc::new(Self {
            manners,
            content: Mutex::new(Content { durable: bytes.clone(), bytes }),
            queue: Mutex::new(queue),
            serving: Mutex::new(()),
            changed: Condvar::new(),
            random: AtomicU64::new(manners.seed | 1),
            numbers: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            fail_reads: AtomicBool::new(false),
            fail_writes: AtomicBool::new(false),
            fail_syncs: AtomicBool::new(false),
            overlaps: AtomicUsize::new(0),
            reads: Mutex::default(),
            writes: Mutex::default(),
        });
        let weak = Arc::downgrade(&fake);
        thread::spawn(move || {
            while let Some(fake) = weak.upgrade() {
                if !fake.turn() {
                    return;
                }
            }
        });
        fake
    }

    pub fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap()
    }

    pub fn random(&self) -> u64 {
        let step = |x: u64| {
            let x = x ^ (x << 13);
            let x = x ^ (x >> 7);
            x ^ (x << 17)
        };
        step(self.random.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x))).unwrap())
    }

    /// Serves nothing more until it is said to; nothing is being served when this returns.
    pub fn pause(&self, paused: bool) {
        let _serving = self.serving.lock().unwrap();
        self.paused.store(paused, Ordering::SeqCst);
        self.changed.notify_all();
    }

    /// Truncates, durably.
    pub fn truncate(&self, size: u64) {
        let mut content = self.content();
        content.bytes.resize(size as usize, 0);
        content.durable.resize(size as usize, 0);
    }

    /// Loses what is not durable. While paused only.
    pub fn restart(&self) {
        let mut content = self.content();
        content.bytes = content.durable.clone();
    }

    pub fn stop(&self) {
        self.queue.lock().unwrap().stopped = true;
        self.changed.notify_all();
    }

    fn push(&self, op: Op, offset: u64, buffer: Vec<u8>, done: Completion) {
        let jitter = self.manners.jitter.as_nanos() as u64;
        let more = if jitter == 0 { 0 } else { self.random() % jitter };
        let due = Instant::now() + self.manners.delay + Duration::from_nanos(more);
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.queue.lock().unwrap();
        match op {
            Op::Read => self.reads.lock().unwrap().push((offset, buffer.len())),
            Op::Write => {
                let range = (offset, offset + buffer.len() as u64);
                if queue.writing.iter().any(|other| other.0 < range.1 && range.0 < other.1) {
                    self.overlaps.fetch_add(1, Ordering::Relaxed);
                }
                queue.writing.push(range);
                self.writes.lock().unwrap().push((offset, buffer.len()));
            }
            Op::Sync => (),
        }
        queue.jobs.push(Reverse(Job { due, number, op, offset, buffer, done }));
        drop(queue);
        self.changed.notify_all();
    }

    /// Serves what is due, or waits a while.
    fn turn(&self) -> bool {
        let serving = self.serving.lock().unwrap();
        let mut queue = self.queue.lock().unwrap();
        if queue.stopped {
            return false;
        }
        let now = Instant::now();
        let due = queue.jobs.peek().map(|job| job.0.due);
        if self.paused.load(Ordering::SeqCst) || due.is_none_or(|due| due > now) {
            let wait = due.map_or(Duration::from_millis(20), |due| due.saturating_duration_since(now));
            let wait = wait.clamp(Duration::from_micros(50), Duration::from_millis(20));
            drop(serving);
            drop(self.changed.wait_timeout(queue, wait).unwrap());
            return true;
        }
        let Some(Reverse(job)) = queue.jobs.pop() else { return true };
        drop(queue);
        self.serve(job);
        true
    }

    fn shorten(&self, count: usize) -> usize {
        if self.manners.shortens && count > 1 && self.random().is_multiple_of(3) {
            1 + (self.random() as usize) % count
        } else {
            count
        }
    }

    fn serve(&self, mut job: Job) {
        let offset = job.offset as usize;
        match job.op {
            Op::Read => {
                let result = if self.fail_reads.load(Ordering::SeqCst) {
                    Err(Errno::IO)
                } else {
                    let content = self.content();
                    let there = content.bytes.len().saturating_sub(offset).min(job.buffer.len());
                    let count = self.shorten(there);
                    job.buffer[..count].copy_from_slice(content.bytes.get(offset..offset + count).unwrap_or_default());
                    Ok(count)
                };
                job.done.end(job.buffer, result);
            }
            Op::Write => {
                let result = if self.fail_writes.load(Ordering::SeqCst) {
                    Err(Errno::NOSPC)
                } else {
                    let count = self.shorten(job.buffer.len());
                    let mut content = self.content();
                    if content.bytes.len() < offset + count {
                        content.bytes.resize(offset + count, 0);
                    }
                    content.bytes[offset..offset + count].copy_from_slice(&job.buffer[..count]);
                    Ok(count)
                };
                let end = job.offset + job.buffer.len() as u64;
                let mut queue = self.queue.lock().unwrap();
                let at = queue.writing.iter().position(|range| *range == (job.offset, end)).unwrap();
                queue.writing.remove(at);
                drop(queue);
                job.done.end(job.buffer, result);
            }
            Op::Sync => {
                let result = if self.fail_syncs.load(Ordering::SeqCst) {
                    Err(Errno::IO)
                } else {
                    let mut content = self.content();
                    content.durable = content.bytes.clone();
                    Ok(0)
                };
                job.done.end(job.buffer, result);
            }
        }
    }
}

impl Remote for Fake {
    fn message_bytes(&self) -> usize {
        self.manners.message_bytes
    }

    fn read(&self, offset: u64, buffer: Vec<u8>, done: Completion) {
        self.push(Op::Read, offset, buffer, done);
    }

    fn write(&self, offset: u64, buffer: Vec<u8>, done: Completion) {
        self.push(Op::Write, offset, buffer, done);
    }

    fn sync(&self, done: Completion) {
        self.push(Op::Sync, 0, Vec::new(), done);
    }
}
