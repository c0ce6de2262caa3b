//! The log of messages that the next server must replay.
//!
//! A record's key is its place in the replay: features, the dirty log, the back-end channel, the window, memory, rings. Of most
//! messages only the last is kept. Of the memory, the last SET_MEM_TABLE and each later ADD_MEM_REG and REM_MEM_REG are kept; a region
//! that was added and removed again leaves no record. The base of a ring is recorded whenever the ring stops.

use std::collections::{BTreeMap, BTreeSet};

use super::connection_store::Records;
use crate::channel::{HEADER_BYTES, number};

/// Requests by their numbers (vhost-user, "Front-end message types").
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_FEATURES: u32 = 2;
    pub(super) const RESET_OWNER: u32 = 4;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const SET_LOG_BASE: u32 = 6;
    pub(super) const SET_LOG_FD: u32 = 7;
    pub(super) const SET_VRING_NUM: u32 = 8;
    pub(super) const SET_VRING_ADDR: u32 = 9;
    pub(super) const SET_VRING_BASE: u32 = 10;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const SET_VRING_KICK: u32 = 12;
    pub(super) const SET_VRING_CALL: u32 = 13;
    pub(super) const SET_VRING_ERR: u32 = 14;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const SET_VRING_ENABLE: u32 = 18;
    pub(super) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(super) const SET_INFLIGHT_FD: u32 = 32;
    pub(super) const GPU_SET_SOCKET: u32 = 33;
    pub(super) const RESET_DEVICE: u32 = 34;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
    pub(super) const SET_DEVICE_STATE_FD: u32 = 42;
    pub(super) const GET_SHMEM_CONFIG: u32 = 44;
}

/// The messages of a ring in the order of replay: the last one starts it.
const RING_REQUESTS: [u32; 7] = [
    request::SET_VRING_NUM,
    request::SET_VRING_BASE,
    request::SET_VRING_ADDR,
    request::SET_VRING_CALL,
    request::SET_VRING_ERR,
    request::SET_VRING_KICK,
    request::SET_VRING_ENABLE,
];

/// The first key of each kind.
const OFFERED_FEATURES: u64 = 1;
const FEATURES: u64 = 2;
const PROTOCOL_FEATURES: u64 = 3;
const DIRTY_LOG: u64 = 4;
const BACKEND_CHANNEL: u64 = 5;
const SHMEM_CONFIG: u64 = 6;
const MEMORY: u64 = 1 << 32;
const RINGS: u64 = 1 << 62;
/// In the key of added memory: the guest ran already.
const WAS_ADDED: u64 = 1;

/// Flags of a message (vhost-user, "Header").
const FLAGS_AT: usize = 4;
const NEED_REPLY: u32 = 8;
/// With the number of a ring: the message has no descriptor.
const NO_DESCRIPTOR: u32 = 1 << 8;
const VERSION: u32 = 1;

/// Whether a record is of memory that was added to a running guest.
pub(crate) fn was_added(key: u64) -> bool {
    (MEMORY..RINGS).contains(&key) && key & WAS_ADDED != 0
}

/// Whether a message has descriptors.
pub(super) fn has_files(message: &[u8]) -> bool {
    match request_of(message) {
        Some(request::SET_VRING_KICK | request::SET_VRING_CALL | request::SET_VRING_ERR) => {
            u32_at(message, HEADER_BYTES).is_some_and(|ring| ring & NO_DESCRIPTOR == 0)
        }
        Some(
            request::SET_MEM_TABLE
            | request::SET_LOG_BASE
            | request::SET_LOG_FD
            | request::SET_BACKEND_REQ_FD
            | request::SET_INFLIGHT_FD
            | request::GPU_SET_SOCKET
            | request::ADD_MEM_REG
            | request::SET_DEVICE_STATE_FD,
        ) => true,
        _ => false,
    }
}

/// Whether a message resets the device.
pub(super) fn resets(message: &[u8]) -> bool {
    matches!(request_of(message), Some(request::RESET_OWNER | request::RESET_DEVICE))
}

/// The change of the records by a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    /// The record, and its key.
    pub(super) record: Option<(u64, Vec<u8>)>,
    /// The record includes the message's descriptors.
    pub(super) has_files: bool,
    /// Records that are void.
    pub(super) drops: Vec<u64>,
}

/// The guest-physical address and the length of a region.
type Place = (u64, u64);

/// The keys of the records.
#[derive(Debug, Default)]
pub(super) struct ReplayLog {
    /// Records of memory, added regions with their places.
    memory: BTreeMap<u64, Option<Place>>,
    rings: BTreeSet<u64>,
    /// The bases of rings that do not begin at 0.
    bases: BTreeMap<u8, u32>,
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn request_of(message: &[u8]) -> Option<u32> {
    Some(number(message.first_chunk::<HEADER_BYTES>()?, 0))
}

/// The region of ADD_MEM_REG and REM_MEM_REG: 8 bytes of padding, its address, its length, and more.
fn place(message: &[u8]) -> Option<Place> {
    Some((u64_at(message, HEADER_BYTES + 8)?, u64_at(message, HEADER_BYTES + 16)?))
}

/// Returns the ring of a message.
fn ring_of(message: &[u8]) -> Option<u8> {
    // In messages with descriptors the upper bits are flags (vhost-user, "A vring descriptor index").
    u8::try_from(u32_at(message, HEADER_BYTES)? & 0xff).ok()
}

fn ring_key(ring: u8, request: u32) -> Option<u64> {
    let step = RING_REQUESTS.iter().position(|of| *of == request)?;
    Some(RINGS | u64::from(ring) << 8 | step as u64)
}

impl ReplayLog {
    /// Creates the log from the records of the previous server.
    pub(super) fn of(records: &Records) -> Self {
        let mut replay_log = Self::default();
        for (key, (bytes, _)) in records {
            if (MEMORY..RINGS).contains(key) {
                let is_added = request_of(bytes) == Some(request::ADD_MEM_REG);
                replay_log.memory.insert(*key, place(bytes).filter(|_| is_added));
            } else if *key >= RINGS {
                replay_log.rings.insert(*key);
                if request_of(bytes) == Some(request::SET_VRING_BASE)
                    && let (Some(ring), Some(base)) = (ring_of(bytes), u32_at(bytes, HEADER_BYTES + 4))
                {
                    replay_log.bases.insert(ring, base);
                }
            }
        }
        replay_log
    }

    /// Records the base of a stopped ring.
    pub(super) fn record_base(&mut self, ring: u8, base: u32) -> Option<Entry> {
        let key = ring_key(ring, request::SET_VRING_BASE)?;
        if self.bases.get(&ring).copied().unwrap_or(0) == base {
            return None;
        }
        self.bases.insert(ring, base);
        self.rings.insert(key);
        let message = [request::SET_VRING_BASE, VERSION, 8, u32::from(ring), base].map(u32::to_ne_bytes).concat();
        Some(Entry { record: Some((key, message)), ..Entry::default() })
    }

    /// Records an executed message; `run`: whether queues run or ran.
    pub(super) fn enter(&mut self, message: &[u8], run: bool) -> Entry {
        let Some(request) = request_of(message) else { return Entry::default() };
        let mut bytes = message.to_vec();
        // A replayed message needs no reply.
        let flags = number(message.first_chunk().unwrap_or(&[0; HEADER_BYTES]), FLAGS_AT) & !NEED_REPLY;
        bytes[FLAGS_AT..FLAGS_AT + 4].copy_from_slice(&flags.to_ne_bytes());
        match request {
            // Replayed first: the vhost crate sends acknowledgements only if it has seen GET_FEATURES.
            request::GET_FEATURES => Entry { record: Some((OFFERED_FEATURES, bytes)), ..Entry::default() },
            request::SET_FEATURES => Entry { record: Some((FEATURES, bytes)), ..Entry::default() },
            request::SET_PROTOCOL_FEATURES => Entry { record: Some((PROTOCOL_FEATURES, bytes)), ..Entry::default() },
            request::SET_LOG_BASE => Entry { record: Some((DIRTY_LOG, bytes)), has_files: true, drops: Vec::new() },
            request::SET_BACKEND_REQ_FD => {
                Entry { record: Some((BACKEND_CHANNEL, bytes)), has_files: true, drops: Vec::new() }
            }
            request::GET_SHMEM_CONFIG => Entry { record: Some((SHMEM_CONFIG, bytes)), ..Entry::default() },
            request::SET_MEM_TABLE => {
                let drops = std::mem::take(&mut self.memory).into_keys().collect();
                self.memory.insert(MEMORY, None);
                Entry { record: Some((MEMORY, bytes)), has_files: true, drops }
            }
            request::ADD_MEM_REG => {
                let key = self.next_memory() | if run { WAS_ADDED } else { 0 };
                self.memory.insert(key, place(message));
                Entry { record: Some((key, bytes)), has_files: true, drops: Vec::new() }
            }
            request::REM_MEM_REG => self.remove_memory(message, bytes),
            // The base is recorded when the ring stops.
            request::SET_VRING_BASE => Entry::default(),
            // The ring restarts with another kick descriptor.
            request::GET_VRING_BASE => {
                let kick = ring_of(message).and_then(|ring| ring_key(ring, request::SET_VRING_KICK));
                let drops: Vec<u64> = kick.into_iter().filter(|kick| self.rings.remove(kick)).collect();
                Entry { drops, ..Entry::default() }
            }
            request::RESET_OWNER | request::RESET_DEVICE => {
                // The call and error descriptors stay valid.
                let is_void = |key: &u64| {
                    let stays = [request::SET_VRING_CALL, request::SET_VRING_ERR];
                    !RING_REQUESTS.get((key & 0xff) as usize).is_some_and(|of| stays.contains(of))
                };
                let drops: Vec<u64> = self.rings.iter().copied().filter(is_void).collect();
                self.rings.retain(|key| !is_void(key));
                self.bases.clear();
                Entry { drops, ..Entry::default() }
            }
            _ => match ring_of(message).and_then(|ring| ring_key(ring, request)) {
                Some(key) => {
                    self.rings.insert(key);
                    Entry { record: Some((key, bytes)), has_files: true, drops: Vec::new() }
                }
                None => Entry::default(),
            },
        }
    }

    fn next_memory(&self) -> u64 {
        self.memory.last_key_value().map_or(MEMORY, |(last, _)| (last | WAS_ADDED) + 1)
    }

    fn remove_memory(&mut self, message: &[u8], bytes: Vec<u8>) -> Entry {
        let place = place(message);
        let added = self.memory.iter().find(|(_, added)| added.is_some() && **added == place).map(|(key, _)| *key);
        match added {
            Some(key) => {
                self.memory.remove(&key);
                Entry { drops: vec![key], ..Entry::default() }
            }
            // A region of the table.
            None => {
                let key = self.next_memory();
                self.memory.insert(key, None);
                Entry { record: Some((key, bytes)), ..Entry::default() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(request: u32, words: &[u64]) -> Vec<u8> {
        let length = u32::try_from(words.len() * 8).expect("it is short");
        let head = [request, VERSION | NEED_REPLY, length].map(u32::to_ne_bytes).concat();
        head.into_iter().chain(words.iter().flat_map(|word| word.to_ne_bytes())).collect()
    }

    /// Returns the records after these messages, as numbers of requests in the order of their keys.
    fn recorded(messages: &[(Vec<u8>, u32)]) -> Vec<(u32, Option<u64>)> {
        let (mut replay_log, mut records) = (ReplayLog::default(), BTreeMap::new());
        for (message, base) in messages {
            let stopped = replay_log.record_base(0, *base);
            let entries = stopped.into_iter().chain([replay_log.enter(message, true)]).collect::<Vec<_>>();
            for entry in entries {
                for key in entry.drops {
                    records.remove(&key);
                }
                if let Some((key, bytes)) = entry.record {
                    assert_eq!(
                        number(bytes.first_chunk().expect("a header"), FLAGS_AT),
                        VERSION,
                        "no reply is asked for"
                    );
                    records.insert(key, (bytes, Vec::new()));
                }
            }
            // The next server has the same log.
            let next = ReplayLog::of(&records);
            assert_eq!((&next.memory, &next.rings), (&replay_log.memory, &replay_log.rings));
            assert_eq!(next.bases, replay_log.bases);
            replay_log = next;
        }
        let all = records.into_values().map(|(bytes, _)| (request_of(&bytes).expect("a header"), u64_at(&bytes, 20)));
        all.collect()
    }

    fn after(messages: &[(u32, &[u64])]) -> Vec<(u32, Option<u64>)> {
        recorded(&messages.iter().map(|(request, words)| (message(*request, words), 0)).collect::<Vec<_>>())
    }

    #[test]
    fn the_last_of_each_kind_counts_and_in_order() {
        use request::*;
        let of = after(&[
            (SET_VRING_ENABLE, &[1]),
            (SET_VRING_KICK, &[1]),
            (SET_VRING_ADDR, &[1, 7]),
            (SET_VRING_ADDR, &[0, 8]),
            (SET_VRING_ADDR, &[1, 9]),
            (SET_MEM_TABLE, &[1, 2]),
            (SET_PROTOCOL_FEATURES, &[5]),
            (GET_FEATURES, &[]),
            (15, &[]),
            (SET_LOG_BASE, &[1, 0]),
            (SET_FEATURES, &[5]),
            (SET_LOG_BASE, &[1, 3]),
            (SET_VRING_KICK, &[0x101]),
        ]);
        let expected = [
            (GET_FEATURES, None),
            (SET_FEATURES, None),
            (SET_PROTOCOL_FEATURES, None),
            (SET_LOG_BASE, Some(3)),
            (SET_MEM_TABLE, Some(2)),
            (SET_VRING_ADDR, Some(8)),
            (SET_VRING_ADDR, Some(9)),
            (SET_VRING_KICK, None),
            (SET_VRING_ENABLE, None),
        ];
        assert_eq!(of, expected);
    }

    /// A server that takes over must know the mappings before the regions.
    #[test]
    fn the_window_is_replayed_before_the_memory() {
        use request::*;
        let steps: &[(u32, &[u64])] = &[
            (SET_MEM_TABLE, &[1, 2]),
            (GET_SHMEM_CONFIG, &[]),
            (SET_BACKEND_REQ_FD, &[]),
            (SET_PROTOCOL_FEATURES, &[5]),
            (RESET_DEVICE, &[]),
        ];
        let requests: Vec<u32> = after(steps).iter().map(|(request, _)| *request).collect();
        assert_eq!(requests, [SET_PROTOCOL_FEATURES, SET_BACKEND_REQ_FD, GET_SHMEM_CONFIG, SET_MEM_TABLE]);
        assert!(ReplayLog::default().enter(&message(SET_BACKEND_REQ_FD, &[]), true).has_files);
    }

    #[test]
    fn memory_that_came_and_went_leaves_nothing() {
        use request::*;
        let (one, two): (&[u64], &[u64]) = (&[0, 0x1000, 0x1000, 0, 0], &[0, 0x2000, 0x1000, 0, 0]);
        let table: (u32, &[u64]) = (SET_MEM_TABLE, &[1]);
        let mut steps = vec![table, (ADD_MEM_REG, one)];
        for _ in 0..50 {
            steps.extend([(ADD_MEM_REG, two), (REM_MEM_REG, two)]);
        }
        assert_eq!(after(&steps), [(SET_MEM_TABLE, None), (ADD_MEM_REG, Some(0x1000))]);
        // The removal of a region of the table is recorded.
        let removed = after(&[table, (REM_MEM_REG, one), (ADD_MEM_REG, one), (REM_MEM_REG, one)]);
        assert_eq!(removed, [(SET_MEM_TABLE, None), (REM_MEM_REG, Some(0x1000))]);
        assert_eq!(after(&[table, (ADD_MEM_REG, one), table]), [(SET_MEM_TABLE, None)]);
    }

    #[test]
    fn a_stopped_ring_continues_at_its_index() {
        use request::*;
        let setup = [(SET_VRING_BASE, 0), (SET_VRING_CALL, 0), (SET_VRING_KICK, 0), (SET_VRING_ENABLE, 1 << 32)];
        let mut steps: Vec<_> = setup.map(|(request, word)| (message(request, &[word]), 0)).into();
        // It is disabled, then stopped.
        steps.push((message(SET_VRING_ENABLE, &[0]), 77));
        let of = recorded(&steps);
        let requests: Vec<u32> = of.iter().map(|(request, _)| *request).collect();
        assert_eq!(requests, [SET_VRING_BASE, SET_VRING_CALL, SET_VRING_KICK, SET_VRING_ENABLE]);
        steps.push((message(GET_VRING_BASE, &[0]), 77));
        let requests: Vec<u32> = recorded(&steps).iter().map(|(request, _)| *request).collect();
        assert_eq!(requests, [SET_VRING_BASE, SET_VRING_CALL, SET_VRING_ENABLE]);
        let entry = ReplayLog::default().record_base(3, 77).expect("it is not at 0");
        let (_, bytes) = entry.record.expect("where it rests");
        assert_eq!((ring_of(&bytes), u64_at(&bytes, HEADER_BYTES)), (Some(3), Some(77 << 32 | 3)));
        // After a reset only the call descriptor stays.
        steps.push((message(RESET_DEVICE, &[]), 77));
        assert_eq!(recorded(&steps).iter().map(|(request, _)| *request).collect::<Vec<_>>(), [SET_VRING_CALL]);
    }

    #[test]
    fn memory_says_whether_it_came_later() {
        let mut replay_log = ReplayLog::default();
        for (run, later) in [(false, false), (true, true), (false, false)] {
            let entry = replay_log.enter(&message(request::ADD_MEM_REG, &[0, 1, 2, 3, 4]), run);
            assert_eq!(was_added(entry.record.expect("it is recorded").0), later);
        }
    }
}
