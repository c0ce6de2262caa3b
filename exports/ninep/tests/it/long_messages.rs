//! Messages longer than Linux's, for clients that ask for them, and what they cost.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use common::{Client, DirServer, Link, ROOT};
use ferry_ninep::Options;
use ferry_vfs::OFlags;
use ferry_wire::ninep::*;

const LONGEST: u32 = 16 << 20;

/// One test looks at what the process has.
static ALONE: Mutex<()> = Mutex::new(());

fn longest() -> Options {
    Options { msize_max: LONGEST, ..Options::default() }
}

fn attached(share: &DirServer, msize: u32) -> Client<Link> {
    let mut client = share.connect();
    assert_eq!(client.hello(u32::MAX), msize);
    client.attach(ROOT, 0).unwrap();
    client
}

/// A line of what the kernel says of this process's memory.
fn memory_bytes(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// How much memory the process has at most, beyond what it has before, while something is done.
fn peak_bytes(act: impl FnOnce()) -> u64 {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory_bytes("VmRSS");
    act();
    memory_bytes("VmHWM").saturating_sub(before)
}

#[test]
fn data_goes_both_ways_in_one_message() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (options, msize) in [(Options::default(), 4 << 20), (longest(), LONGEST)] {
        let share = DirServer::new(options);
        let mut client = attached(&share, msize);
        client.create(Fid(1), "f", OFlags::RDWR, 0o600).unwrap();
        let most = msize as usize - 24;
        let data: Vec<u8> = (0..most as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        assert_eq!(client.write(Fid(1), 0, &data), Ok(most as u32));
        assert!(client.read(Fid(1), 0, msize).unwrap() == data, "{msize}");
        assert!(client.read(Fid(1), 5, u32::MAX).unwrap() == data[5..], "up to the end, {msize}");
        assert!(client.read(Fid(1), most as u64 - 5, u32::MAX).unwrap() == data[most - 5..], "{msize}");
        assert!(std::fs::read(share.path.join("f")).unwrap() == data);
        // A reply has at most the length that was agreed on.
        assert_eq!(client.write(Fid(1), most as u64, &data), Ok(most as u32));
        assert_eq!(client.read(Fid(1), 0, u32::MAX).unwrap().len(), msize as usize - READ_HEAD_BYTES);
        drop(client);
        share.settles(|usage| usage.buffered_bytes == 0);
    }
}

/// Who announces much and sends little, or asks for much where there is little, gets little memory.
#[test]
fn large_announced_sizes_take_little_memory() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const CLIENTS: usize = 40;
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let share = DirServer::new(longest());
    std::fs::write(share.path.join("f"), "short").unwrap();
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| attached(&share, LONGEST)).collect();
    clients[0].open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    let read = peak_bytes(|| assert_eq!(clients[0].read(Fid(1), 0, u32::MAX), Ok(b"short".to_vec())));
    assert!(read < 8 << 20, "{read} bytes for a reply of 5");
    let announced = peak_bytes(|| {
        for client in &mut clients {
            let mut head = LONGEST.to_le_bytes().to_vec();
            head.extend([kind::TWRITE, 1, 0, 0, 0, 0, 0]);
            client.stream.write_all(&head).unwrap();
        }
        share.settles(|usage| usage.buffered_bytes >= CLIENTS);
        let usage = share.usage();
        assert!(usage.buffered_bytes < CLIENTS * (256 << 10), "{usage:?}");
    });
    assert!(announced < 64 << 20, "{announced} bytes for {CLIENTS} heads of messages");
}
