//! The rate limit of log lines that a guest can cause.

use std::io;
use std::sync::Mutex;
use std::time::Duration;

use crate::common::{self, CopyPermit, Offered, connect, options};
use ferry_disk::Cache;
use ferry_driver::Config;

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LOG.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn useless_kicks_are_logged_a_few_times_only() {
    if !ferry_alone::in_own_process() {
        return;
    }
    tracing_subscriber::fmt().with_ansi(false).with_writer(|| Log).init();
    let disk = Offered::new(8, Cache::Writeback, options(Duration::ZERO));
    let mut driver = connect(&disk, Config { queue_size: 64, ..Config::default() });
    let queue = driver.queue(0);
    let room = CopyPermit::new(queue);
    for _ in 0..60 {
        for _ in 0..12 {
            queue.kick();
            // For the worker to sleep again.
            std::thread::sleep(Duration::from_millis(1));
        }
        room.read(0);
        common::burst(queue, [room.head]);
    }
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    let lines = log.lines().filter(|line| line.contains("its queue looks empty")).count();
    assert!((1..=10).contains(&lines), "{lines} lines");
}
