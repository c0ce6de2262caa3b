//! Verified load on a disk by our own driver, which outlives the disk's server.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ferry_driver::memory::{Buffer, PAGE_BYTES};
use ferry_driver::ring::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use ferry_driver::{Driver, Error, Queue, Ticket};

use super::model::{Kind, Model, Request, SECTOR_BYTES};

/// Request types (VIRTIO 1.3, section 5.2.6).
const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

/// FLUSH, CONFIG_WCE, DISCARD and WRITE_ZEROES.
pub const FEATURES: u64 = 1 << 9 | 1 << 11 | 1 << 13 | 1 << 14;
/// The same of a disk without a cache.
pub const FEATURES_WITHOUT_CACHE: u64 = 1 << 13 | 1 << 14;

/// The longest request.
const DATA_BYTES_MAX: usize = 128 * SECTOR_BYTES;
/// What a request has under way at most for each queue.
const DEPTH: usize = 48;
/// Where the status lies, in a slot's small memory.
const STATUS_AT: usize = 64;
/// How often used rings are looked at.
const TICK: Duration = Duration::from_micros(50);

/// The load, and what the disk must hold.
#[derive(Debug)]
pub struct Load {
    model: Model,
    lines: Vec<Line>,
    ended: u64,
}

/// How requests of one queue are made.
#[derive(Debug)]
enum Line {
    /// As operating systems do: header, data on pages of their own, status. So data can bypass the page cache.
    Pages(Vec<Slot>),
    /// By the driver: the data of a write follow its header at once.
    Pieces(HashMap<Ticket, Request>),
}

/// Memory of one request.
#[derive(Debug)]
struct Slot {
    head: u16,
    table: Buffer,
    small: Buffer,
    data: Buffer,
    request: Option<Request>,
}

impl Load {
    /// For a disk of zeros, whose driver has asked nothing yet. Rings that are not packed are driven as operating systems
    /// do it, without copies. `discards`: what is discarded on the disk is zeros.
    ///
    /// # Panics
    /// When the guest's memory is too small.
    pub fn new(driver: &mut Driver, sectors: usize, seed: u64, discards: bool) -> Self {
        let pages = !driver.config().packed;
        let lines = (0..driver.config().queues).map(|queue| Line::new(driver.queue(queue), pages)).collect();
        Self { model: Model::new(sectors, seed, discards), lines, ended: 0 }
    }

    /// How many requests have ended so far.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// How many are under way.
    pub fn under_way(&self) -> usize {
        let count = |line: &Line| match line {
            Line::Pages(slots) => slots.iter().filter(|slot| slot.request.is_some()).count(),
            Line::Pieces(asked) => asked.len(),
        };
        self.lines.iter().map(count).sum()
    }

    /// Asks as much as there is room for.
    pub fn fill(&mut self, driver: &mut Driver) {
        for (index, line) in self.lines.iter_mut().enumerate() {
            while line.has_room()
                && let Some(request) = self.model.draw()
            {
                line.ask(driver.queue(index), request);
            }
        }
    }

    /// Takes what has ended, without waiting, and compares it.
    ///
    /// # Panics
    /// When a request failed, or is not what it should be, or was answered twice.
    #[track_caller]
    pub fn reap(&mut self, driver: &mut Driver) {
        for (index, line) in self.lines.iter_mut().enumerate() {
            while let Some((request, read)) = line.next(driver.queue(index)) {
                self.model.ended(&request, &read);
                self.ended += 1;
            }
        }
    }

    /// Goes on until so many more requests have ended and the time is over.
    ///
    /// # Panics
    /// As [`Self::reap`], and when it takes longer than `limit`.
    #[track_caller]
    pub fn run(&mut self, driver: &mut Driver, more: u64, time: Duration, limit: Duration) {
        let (begin, enough) = (Instant::now(), self.ended + more);
        while self.ended < enough || begin.elapsed() < time {
            self.fill(driver);
            self.reap(driver);
            assert!(begin.elapsed() < limit, "{} of {enough} requests, {} under way", self.ended, self.under_way());
            std::thread::sleep(TICK);
        }
    }

    /// Waits until nothing is under way.
    ///
    /// # Panics
    /// As [`Self::run`].
    #[track_caller]
    pub fn drain(&mut self, driver: &mut Driver, limit: Duration) {
        let end = Instant::now() + limit;
        while self.under_way() > 0 {
            self.reap(driver);
            assert!(Instant::now() < end, "{} requests are not answered", self.under_way());
            std::thread::sleep(TICK);
        }
    }

    /// Reads the whole disk through its first queue and compares it. Nothing may be under way.
    ///
    /// # Panics
    /// As [`Self::run`].
    #[track_caller]
    pub fn read_all(&mut self, driver: &mut Driver, limit: Duration) {
        let end = Instant::now() + limit;
        let mut next = 0;
        while next < self.model.sectors() || self.under_way() > 0 {
            while next < self.model.sectors() && self.lines[0].has_room() {
                let to = (next + 128).min(self.model.sectors());
                let request = self.model.begin(Kind::Read, next..to).unwrap();
                self.lines[0].ask(driver.queue(0), request);
                next = to;
            }
            self.reap(driver);
            assert!(Instant::now() < end, "{} requests are not answered", self.under_way());
            std::thread::sleep(TICK);
        }
    }

    /// Reboots the driver. Nothing may be under way.
    ///
    /// # Panics
    /// When the server does not answer, or the guest's memory is too small.
    pub fn reboot(&mut self, driver: &mut Driver) {
        assert_eq!(self.under_way(), 0);
        driver.reboot().unwrap();
        for (index, line) in self.lines.iter_mut().enumerate() {
            *line = Line::new(driver.queue(index), matches!(line, Line::Pages(_)));
        }
    }

    /// The disk as it must be.
    pub fn model(&self) -> &Model {
        &self.model
    }
}

impl Line {
    fn new(queue: &mut Queue, pages: bool) -> Self {
        if !pages {
            return Self::Pieces(HashMap::new());
        }
        let memory = std::sync::Arc::clone(queue.memory());
        let heads = queue.take_descriptors(DEPTH).unwrap();
        let slot = |head| Slot {
            head,
            table: memory.alloc(3 * DESCRIPTOR_BYTES, 64).unwrap(),
            small: memory.alloc(STATUS_AT + 64, 64).unwrap(),
            data: memory.alloc(DATA_BYTES_MAX, PAGE_BYTES).unwrap(),
            request: None,
        };
        Self::Pages(heads.into_iter().map(slot).collect())
    }

    fn has_room(&self) -> bool {
        match self {
            Self::Pages(slots) => slots.iter().any(|slot| slot.request.is_none()),
            Self::Pieces(asked) => asked.len() < DEPTH,
        }
    }

    fn ask(&mut self, queue: &mut Queue, request: Request) {
        match self {
            Self::Pages(slots) => {
                let slot = slots.iter_mut().find(|slot| slot.request.is_none()).expect("there is room");
                slot.ask(queue, request);
            }
            Self::Pieces(asked) => {
                let header = header(&request);
                let sent = sent(&request);
                let room = if request.kind == Kind::Read { request.bytes() } else { 0 };
                let reply: Vec<usize> = [room, 1].into_iter().filter(|bytes| *bytes > 0).collect();
                let pieces: Vec<&[u8]> = [&header[..], &sent].into_iter().filter(|piece| !piece.is_empty()).collect();
                asked.insert(queue.submit(&pieces, &reply).unwrap(), request);
            }
        }
    }

    /// A request that has ended, and what it has read.
    #[track_caller]
    fn next(&mut self, queue: &mut Queue) -> Option<(Request, Vec<u8>)> {
        match self {
            Self::Pages(slots) => {
                let used = queue.ring_mut().pop()?;
                let slot = slots.iter_mut().find(|slot| u32::from(slot.head) == used.id);
                let slot = slot.unwrap_or_else(|| panic!("{} heads no chain", used.id));
                let request = slot.request.take().unwrap_or_else(|| panic!("{} was answered twice", used.id));
                let mut status = [0xff];
                slot.small.read(STATUS_AT, &mut status);
                assert_eq!(status, [0], "{request:?} failed");
                let read = if request.kind == Kind::Read { slot.data.to_vec(request.bytes()) } else { Vec::new() };
                Some((request, read))
            }
            Self::Pieces(asked) => {
                let done = queue.poll().unwrap_or_else(|error: Error| panic!("answered twice: {error}"))?;
                let request = asked.remove(&done.ticket).expect("it was asked");
                let mut read = done.reply;
                assert_eq!(read.pop(), Some(0), "{request:?} failed");
                Some((request, read))
            }
        }
    }
}

impl Slot {
    fn ask(&mut self, queue: &mut Queue, request: Request) {
        self.small.write(0, &header(&request));
        self.small.write(STATUS_AT, &[0xff]);
        let sent = sent(&request);
        self.data.write(0, &sent);
        let piece = |addr, len: usize, flags| Descriptor { addr, len: u32::try_from(len).unwrap(), flags, next: 0 };
        let data = match request.kind {
            Kind::Read => Some(piece(self.data.guest(), request.bytes(), WRITE)),
            _ => (!sent.is_empty()).then(|| piece(self.data.guest(), sent.len(), 0)),
        };
        let header = piece(self.small.guest(), 16, 0);
        let status = piece(self.small.guest() + STATUS_AT as u64, 1, WRITE);
        let mut chain: Vec<Descriptor> = [Some(header), data, Some(status)].into_iter().flatten().collect();
        let last = chain.len() - 1;
        for (index, descriptor) in chain.iter_mut().enumerate() {
            if index < last {
                (descriptor.flags, descriptor.next) = (descriptor.flags | NEXT, u16::try_from(index).unwrap() + 1);
            }
            descriptor.store(&self.table, index);
        }
        let table = piece(self.table.guest(), chain.len() * DESCRIPTOR_BYTES, INDIRECT);
        self.request = Some(request);
        let ring = queue.ring_mut();
        table.store(ring.table(), self.head.into());
        ring.push(self.head);
        queue.publish();
    }
}

fn header(request: &Request) -> [u8; 16] {
    let (kind, sector) = match request.kind {
        Kind::Read => (T_IN, request.sectors.start),
        Kind::Write => (T_OUT, request.sectors.start),
        Kind::Flush => (T_FLUSH, 0),
        Kind::Zero { discard: true } => (T_DISCARD, 0),
        Kind::Zero { discard: false } => (T_WRITE_ZEROES, 0),
    };
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&(sector as u64).to_le_bytes());
    header
}

/// What follows the header.
fn sent(request: &Request) -> Vec<u8> {
    match request.kind {
        Kind::Write => request.data(),
        Kind::Zero { .. } => {
            let sectors = u32::try_from(request.sectors.len()).unwrap();
            [&(request.sectors.start as u64).to_le_bytes()[..], &sectors.to_le_bytes(), &[0; 4]].concat()
        }
        Kind::Read | Kind::Flush => Vec::new(),
    }
}
