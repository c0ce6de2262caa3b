//! fanotify's permission events and the responses to them.
#![allow(
    unsafe_code,
    reason = "shared memory that the kernel writes to, and a descriptor in an event, have no safe wrapper"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use rustix::io::Errno;

/// `FAN_EVENT_INFO_TYPE_RANGE`.
const INFO_RANGE: u8 = 6;
/// Room for an event with its range (48 bytes), and not for two.
pub(super) const EVENT_BYTES: usize = 64;

/// A permission event: a process waits for a response before it reads.
#[derive(Debug)]
pub struct PermissionEvent {
    /// The file, by a descriptor without events.
    pub file: OwnedFd,
    /// The number of the descriptor in the event, which the response repeats.
    pub number: RawFd,
    /// The process that reads.
    pub pid: i32,
    /// Offset and length in bytes; the whole file if the event has no range.
    pub range: (u64, u64),
}

/// Parses an event: the number of its descriptor, the process, and the range.
pub(super) fn parse_event(bytes: &[u8]) -> Option<(RawFd, i32, (u64, u64))> {
    let field = |at: usize| bytes.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes);
    let wide = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes);
    let all = usize::try_from(field(0)?).ok()?;
    let head = usize::from(u16::from_ne_bytes(bytes.get(6..8)?.try_into().ok()?));
    let (fd, pid) = (field(16)?, field(20)?);
    let mut range = (0, u64::MAX);
    let mut at = head;
    while at + 4 <= all.min(bytes.len()) {
        let length = usize::from(u16::from_ne_bytes(bytes.get(at + 2..at + 4)?.try_into().ok()?));
        if bytes[at] == INFO_RANGE {
            range = (wide(at + 8)?, wide(at + 16)?);
        }
        at += length.max(4);
    }
    Some((fd, pid, range))
}

/// Waits for the next event, which the kernel writes to these words. No other process writes to them meanwhile.
pub(super) fn read_event(group: impl AsFd, words: &[AtomicU64; EVENT_BYTES / 8]) -> io::Result<PermissionEvent> {
    let group = group.as_fd().as_raw_fd();
    // SAFETY: the words are writable memory of this length, also through a shared reference, and live until the call returns.
    let count = unsafe { libc::read(group, words.as_ptr().cast_mut().cast(), EVENT_BYTES) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let event = parse_event(bytes_of(words).get(..count).unwrap_or_default());
    let (number, pid, range) = event.filter(|(fd, ..)| *fd >= 0).ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just opened it for the reader of the event, which is this call alone.
    let file = unsafe { OwnedFd::from_raw_fd(number) };
    Ok(PermissionEvent { file, number, pid, range })
}

/// The event in these words, as the kernel wrote it.
pub(super) fn bytes_of(words: &[AtomicU64; EVENT_BYTES / 8]) -> [u8; EVENT_BYTES] {
    let mut bytes = [0; EVENT_BYTES];
    for (bytes, word) in bytes.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
    }
    bytes
}

/// Responds to the event with this number of a descriptor. Linux compares numbers only, so any process with the group can respond.
pub(super) fn respond_to(group: impl AsFd, number: RawFd, response: u32) {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_ne_bytes());
    bytes[4..].copy_from_slice(&response.to_ne_bytes());
    // ENOENT: the reader may have been killed meanwhile.
    if let Err(error) = rustix::io::write(group, &bytes)
        && error != Errno::NOENT
    {
        tracing::error!("cannot respond to an event: {error}");
    }
}

impl PermissionEvent {
    /// Sends a response.
    pub fn respond(&self, group: impl AsFd, response: u32) {
        respond_to(group, self.number, response);
    }

    /// Returns the device and inode number of the file.
    pub fn key(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.file)?;
        Ok((stat.st_dev, stat.st_ino))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The length of `struct fanotify_event_metadata`.
    const HEAD_BYTES: usize = 24;

    fn event(infos: &[(u8, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        for (kind, rest) in infos {
            let length = u16::try_from(4 + rest.len()).expect("it is short");
            bytes.extend([&[*kind, 0][..], &length.to_ne_bytes(), rest].concat());
        }
        let all = u32::try_from(bytes.len()).expect("it is short");
        bytes[..4].copy_from_slice(&all.to_ne_bytes());
        bytes[6..8].copy_from_slice(&24_u16.to_ne_bytes());
        bytes[16..20].copy_from_slice(&7_i32.to_ne_bytes());
        bytes[20..24].copy_from_slice(&42_i32.to_ne_bytes());
        bytes
    }

    #[test]
    fn events_are_read_with_and_without_their_range() {
        let range = [&[0; 4][..], &4096_u64.to_ne_bytes(), &8192_u64.to_ne_bytes()].concat();
        assert_eq!(parse_event(&event(&[])), Some((7, 42, (0, u64::MAX))));
        assert_eq!(parse_event(&event(&[(INFO_RANGE, &range)])), Some((7, 42, (4096, 8192))));
        assert_eq!(parse_event(&event(&[(4, &[1; 8]), (INFO_RANGE, &range)])), Some((7, 42, (4096, 8192))));
        assert_eq!(parse_event(&event(&[(INFO_RANGE, &range[..12])])), None, "cut off");
        assert_eq!(parse_event(&[0; 23]), None);
        // A length of zero does not loop for ever.
        let mut odd = event(&[(9, &[0; 4])]);
        odd[HEAD_BYTES + 2..HEAD_BYTES + 4].copy_from_slice(&0_u16.to_ne_bytes());
        assert_eq!(parse_event(&odd), Some((7, 42, (0, u64::MAX))));
    }
}
