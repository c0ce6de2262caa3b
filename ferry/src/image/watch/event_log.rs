//! The events that a server has read and not responded to, in memory that it shares with its guardian.
//!
//! ```text
//! word 0        1: the server has ended normally, and no other is expected
//! slots         12 words each: the event, as the kernel wrote it (8), device, inode, 1 if both are known, 0
//! ```
//!
//! The kernel writes each event to this memory itself: so a server can be killed at any instruction, and the log has every event
//! that it was given. A slot whose first word is zero is free.

use std::array;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferry_state::Memory;
use ferry_vfs::sync::lock;

use super::event::{EVENT_BYTES, PermissionEvent, bytes_of, parse_event, read_event};

/// The number of slots. Each takes a descriptor, of which a process has 1024 by default.
const SLOTS: usize = 1024;
const EVENT_WORDS: usize = EVENT_BYTES / 8;
const SLOT_WORDS: usize = EVENT_WORDS + 4;
const HEAD_WORDS: usize = SLOT_WORDS;
const WORDS: usize = HEAD_WORDS + SLOTS * SLOT_WORDS;

/// The log of one server.
#[derive(Debug)]
pub struct EventLog {
    memory: Memory,
    free: Mutex<Vec<usize>>,
}

/// An event without a response in the log of a server that is dead.
#[derive(Debug, PartialEq, Eq)]
pub struct LostEvent {
    /// The number of its descriptor, which is closed.
    pub number: RawFd,
    /// The device and inode number of the file; `None`: it is one of the packs.
    pub key: Option<(u64, u64)>,
    /// Offset and length in bytes.
    pub range: (u64, u64),
}

impl EventLog {
    /// Creates a log, and the file with its memory.
    pub fn new() -> io::Result<(Self, File)> {
        let file = Memory::file(WORDS)?;
        let log = Self::open(&file)?;
        // The kernel never has to allocate a page while it writes an event.
        for slot in 0..SLOTS {
            log.event_words(slot).iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        Ok((log, file))
    }

    /// Maps the log of another process.
    pub fn open(file: &File) -> io::Result<Self> {
        let free = Mutex::new((0..SLOTS).rev().collect());
        Ok(Self { memory: Memory::map(file, WORDS)?, free })
    }

    fn slot(&self, slot: usize) -> &[AtomicU64] {
        &self.memory[HEAD_WORDS + slot * SLOT_WORDS..][..SLOT_WORDS]
    }

    fn event_words(&self, slot: usize) -> &[AtomicU64; EVENT_WORDS] {
        self.slot(slot).first_chunk().expect("a slot is longer than an event")
    }

    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// It cannot be read, so its reader was refused; or `WouldBlock`: too many have no response.
    pub fn read(self: &Arc<Self>, group: impl AsFd) -> io::Result<LoggedEvent> {
        let slot = lock(&self.free).pop().ok_or(io::ErrorKind::WouldBlock)?;
        let [_, _, _, _, _, _, _, _, device, inode, is_known, _]: [&AtomicU64; SLOT_WORDS] =
            array::from_fn(|word| &self.slot(slot)[word]);
        is_known.store(0, Ordering::Release);
        let event = match read_event(group, self.event_words(slot)) {
            Ok(event) => event,
            Err(error) => {
                self.free(slot);
                return Err(error);
            }
        };
        if let Ok(key) = event.key() {
            device.store(key.0, Ordering::Relaxed);
            inode.store(key.1, Ordering::Relaxed);
            is_known.store(1, Ordering::Release);
        }
        Ok(LoggedEvent { event, slot, log: Arc::clone(self) })
    }

    fn free(&self, slot: usize) {
        self.slot(slot)[0].store(0, Ordering::Release);
        lock(&self.free).push(slot);
    }

    /// Records that the server ends by itself.
    pub fn end(&self) {
        self.memory[0].store(1, Ordering::Release);
    }

    /// Whether the server has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.memory[0].load(Ordering::Acquire) == 1
    }

    /// Returns the events without a response of a server that is dead.
    pub fn lost(&self) -> Vec<LostEvent> {
        let lost = |slot: usize| {
            let words = self.event_words(slot);
            let is_free = words[0].load(Ordering::Acquire) == 0;
            let (number, _, range) = parse_event(&bytes_of(words)).filter(|(number, ..)| !is_free && *number >= 0)?;
            let [device, inode, is_known] =
                array::from_fn(|word| self.slot(slot)[EVENT_WORDS + word].load(Ordering::Acquire));
            Some(LostEvent { number, key: (is_known == 1).then_some((device, inode)), range })
        };
        (0..SLOTS).filter_map(lost).collect()
    }
}

/// An event, in the log until it is dropped.
#[derive(Debug)]
pub struct LoggedEvent {
    pub event: PermissionEvent,
    slot: usize,
    log: Arc<EventLog>,
}

impl Drop for LoggedEvent {
    fn drop(&mut self) {
        // Before its descriptor is closed: after that, another event may have its number.
        self.log.free(self.slot);
    }
}
