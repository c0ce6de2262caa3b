//! Parked requests (which wait for locks) of a guest that migrates.
//!
//! They were taken from their rings and have no reply, so the rings do not show them; but their descriptors stay
//! unchanged until the reply. So their heads are sent before the device's own state, and the destination takes them
//! again:
//!
//! ```text
//! "FERRYWT\0" | count 4 | (queue 2 | first descriptor 2) ... | the device's state
//! ```
//!
//! All numbers are little-endian. Without parked requests the state is the device's own.

use crate::QUEUE_SIZE_MAX;

const MAGIC: &[u8; 8] = b"FERRYWT\0";
const COUNT_BYTES: usize = 4;
const ENTRY_BYTES: usize = 4;

/// Prepends the parked requests to the device's state.
pub(crate) fn before(state: Vec<u8>, waiting: &[(u16, u16)]) -> Vec<u8> {
    if waiting.is_empty() {
        return state;
    }
    let mut all = Vec::with_capacity(MAGIC.len() + COUNT_BYTES + waiting.len() * ENTRY_BYTES + state.len());
    all.extend(MAGIC);
    all.extend(u32::try_from(waiting.len()).unwrap_or(u32::MAX).to_le_bytes());
    all.extend(waiting.iter().flat_map(|(queue, head)| [queue.to_le_bytes(), head.to_le_bytes()].concat()));
    all.extend(state);
    all
}

/// Splits the parked requests, by queue, from the state of a device with this many queues.
pub(crate) fn split(state: &[u8], queues: usize) -> Result<(Vec<Vec<u16>>, &[u8]), String> {
    let mut waiting = vec![Vec::new(); queues];
    let Some(rest) = state.strip_prefix(MAGIC) else { return Ok((waiting, state)) };
    let short = || "it ends within the list of parked requests".to_owned();
    let (count, rest) = rest.split_first_chunk().ok_or_else(short)?;
    let bytes = usize::try_from(u32::from_le_bytes(*count)).ok().and_then(|count| count.checked_mul(ENTRY_BYTES));
    let (entries, state) = bytes.and_then(|bytes| rest.split_at_checked(bytes)).ok_or_else(short)?;
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let number = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        let (queue, head) = (number(0), number(2));
        let heads = waiting.get_mut(usize::from(queue));
        let heads = heads
            .ok_or_else(|| format!("requests are parked in queue {queue}, but this device has {queues} queues"))?;
        if heads.contains(&head) || heads.len() >= usize::from(QUEUE_SIZE_MAX) {
            return Err(format!("descriptor {head} of queue {queue} is parked twice, or too many are parked"));
        }
        heads.push(head);
    }
    Ok((waiting, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_requests_are_migrated() {
        let plain = b"FERRYFS\0and more".to_vec();
        assert_eq!(before(plain.clone(), &[]), plain);
        assert_eq!(split(&plain, 2), Ok((vec![vec![], vec![]], &plain[..])));
        assert_eq!(split(b"", 1), Ok((vec![vec![]], &b""[..])));
        let state = before(plain.clone(), &[(1, 7), (0, 3), (1, 2)]);
        assert_eq!(split(&state, 2), Ok((vec![vec![3], vec![7, 2]], &plain[..])));
    }

    #[test]
    fn invalid_states_are_refused() {
        let state = before(Vec::new(), &[(1, 7), (0, 3)]);
        for length in MAGIC.len()..state.len() {
            assert!(split(&state[..length], 2).is_err(), "{length} bytes");
        }
        assert!(split(&state, 1).is_err(), "another device");
        assert!(split(&before(Vec::new(), &[(0, 7), (0, 7)]), 1).is_err(), "twice the same");
        let mut many = state;
        many[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(split(&many, 2).is_err());
    }
}
