//! Threads are counted: this test is alone in its process.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test that cannot go on ends")]

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::fake::{Act, Fake, file_attr, reply};
use common::{CX, PATIENCE, name, read};
use ferry_9p_client::Options;
use ferry_vfs::*;
use ferry_wire::ninep::{Fid, Getattr, Reply, Request};

/// Threads of this process with a name.
fn threads(named: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let comm = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    tasks.filter(|task| comm(task).trim_end() == named).count()
}

/// A file of 1 MiB, every byte of which is 7, by a server that ends its first connection with all reads in it.
#[test]
fn transfers_that_a_connection_lost_wait_on_one_thread() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const READERS: usize = 12;
    let (connections, reads): (Arc<AtomicUsize>, Arc<AtomicUsize>) = Default::default();
    let asked = Arc::clone(&reads);
    let fake = Fake::new(move |tag, request| {
        let is_first = connections.load(Ordering::SeqCst) == 1;
        match *request {
            Request::Version { .. } => {
                // Those that wait are counted meanwhile.
                if connections.fetch_add(1, Ordering::SeqCst) > 0 {
                    std::thread::sleep(Duration::from_millis(500));
                }
                None
            }
            Request::Getattr { fid, .. } if fid != Fid(1) => {
                let attr = file_attr().attr.with_size(1 << 20);
                Some(reply(tag, &Reply::Getattr(Getattr { attr, ..file_attr() })))
            }
            Request::Read { .. } if is_first => {
                let last = asked.fetch_add(1, Ordering::SeqCst) == READERS - 1;
                Some(if last { Act::HangUp } else { Act::Silence })
            }
            Request::Read { bytes_max, .. } => Some(reply(tag, &Reply::Read(&vec![7; bytes_max as usize]))),
            _ => None,
        }
    });
    let client = fake.connect(Options { patience: PATIENCE, ..Options::default() }).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDONLY).unwrap();
    let mut most = 0;
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                let client = &client;
                // Far from each other, so that nothing is read ahead.
                let at = (READERS - number) as u64 * 80_000 / 4096 * 4096;
                scope.spawn(move || assert_eq!(read(client, ino, handle, at, 4096).unwrap(), [7; 4096]))
            })
            .collect();
        while readers.iter().any(|reader| !reader.is_finished()) {
            most = most.max(threads("9p-again"));
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_eq!(most, 1, "threads for {READERS} transfers");
    assert_eq!(reads.load(Ordering::SeqCst), READERS);
}
