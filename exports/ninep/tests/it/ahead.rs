//! What clients that read one piece after the other will ask for next is in memory when they do.

use crate::common;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use common::{Client, DirServer, Link, PATIENCE};
use ferry_ninep::Options;
use ferry_vfs::OFlags;
use ferry_wire::ninep::Fid;
use rustix::fs::Advice;

const MIB: u64 = 1 << 20;
const FILE_MIB: u64 = 64;
/// What is read at once.
const PIECE: u32 = 512 << 10;
const READ_MIB: u64 = 8;

/// Returns how many bytes of a file are in the page cache; `None`: unknown.
fn resident(path: &Path) -> Option<u64> {
    let output =
        Command::new("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(path).output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

/// A share with a file of which nothing is in memory, if the file system can do that.
fn cold(options: Options) -> (DirServer, bool) {
    let share = DirServer::new(options);
    let path = share.path.join("file");
    let noise = (0..FILE_MIB * MIB / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    std::fs::write(&path, noise.collect::<Vec<u8>>()).unwrap();
    let file = File::open(&path).unwrap();
    rustix::fs::fsync(&file).unwrap();
    // Pages in use stay cached, so a busy machine needs several attempts.
    let is_cold = (0..50).any(|_| {
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let is_cold = resident(&path).is_some_and(|bytes| bytes < MIB);
        if !is_cold {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        is_cold
    });
    if !is_cold {
        ferry_skip::skip!("what is in memory cannot be told here: only what was asked for is");
    }
    (share, is_cold)
}

fn read(client: &mut Client<Link>, offset: u64) {
    let data = client.read(Fid(1), offset, PIECE).unwrap();
    assert_eq!(data.len(), PIECE as usize);
    let expected = (offset / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    assert_eq!(data[..8], expected);
}

fn read_in_order(client: &mut Client<Link>) {
    (0..READ_MIB * MIB).step_by(PIECE as usize).for_each(|offset| read(client, offset));
}

#[test]
fn sequential_reads_find_the_next_piece_in_memory() {
    let (share, is_cold) = cold(Options::default());
    let mut client = share.attached(0);
    client.open_path(Fid(1), "file", OFlags::RDONLY).unwrap();
    read_in_order(&mut client);
    let end = Instant::now() + PATIENCE;
    // Who reads 8 MiB has 2 to 4 MiB in advance. The last reply may be here before the server has asked.
    while share.read_ahead_bytes() < (READ_MIB + 2 - 1) * MIB {
        assert!(Instant::now() < end, "{} bytes were asked for", share.read_ahead_bytes());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(share.read_ahead_bytes() <= (READ_MIB + 4) * MIB, "{}", share.read_ahead_bytes());
    let wanted = (READ_MIB + 2) * MIB - u64::from(PIECE);
    while is_cold && resident(&share.path.join("file")).unwrap() < wanted {
        assert!(Instant::now() < end, "{:?} bytes of {wanted} are in memory", resident(&share.path.join("file")));
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn nothing_is_read_ahead_of_random_reads() {
    let (share, _) = cold(Options::default());
    let mut client = share.attached(0);
    client.open_path(Fid(1), "file", OFlags::RDONLY).unwrap();
    for number in 0..16 {
        // Each is 23 MiB from the one before, or as far from the end.
        read(&mut client, number * 23 * MIB % (FILE_MIB * MIB));
    }
    drop(client);
    share.settles(|usage| usage.fids == 0);
    assert_eq!(share.read_ahead_bytes(), 0);
}

#[test]
fn it_can_be_left_out() {
    let (share, _) = cold(Options { read_ahead_bytes_max: 0, ..Options::default() });
    let mut client = share.attached(0);
    client.open_path(Fid(1), "file", OFlags::RDONLY).unwrap();
    read_in_order(&mut client);
    drop(client);
    share.settles(|usage| usage.fids == 0);
    assert_eq!(share.read_ahead_bytes(), 0);
}
