//! The log of requests.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::common::{self, CopyPermit, OK, Offered, alone, burst, connect, options};
use ferry_blk::Options;
use ferry_disk::Cache;
use ferry_driver::Config;
use ferry_engine::requests::{Filter, watch};

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Lines;

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LINES.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn lines() -> String {
    String::from_utf8_lossy(&LINES.lock().unwrap_or_else(PoisonError::into_inner)).into_owned()
}

/// Reads a block twice and returns what the log got.
fn logged(name: &str, cache: Cache, filter: Option<Filter>) -> String {
    let disk = Offered::new(8, cache, Options { name: name.into(), ..options(Duration::ZERO) });
    let mut driver = connect(&disk, Config { queue_size: 128, ..Config::default() });
    let queue = driver.queue(0);
    let (room, sent, outside) = (CopyPermit::new(queue), CopyPermit::sent(queue), CopyPermit::new(queue));
    LINES.lock().unwrap_or_else(PoisonError::into_inner).clear();
    let is_expected = filter.as_ref().is_some_and(|filter| filter.share.as_deref().is_none_or(|share| share == name));
    watch(filter);
    room.read(2);
    sent.write(3);
    outside.read(8);
    burst(queue, [room.head, sent.head, outside.head]);
    assert_eq!((room.status(), sent.status()), (OK, OK));
    assert_ne!(outside.status(), OK);
    let end = Instant::now() + common::WITHIN;
    while is_expected && lines().lines().count() < 2 {
        assert!(Instant::now() < end, "{}", lines());
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(driver);
    drop(disk);
    watch(None);
    lines()
}

#[test]
fn requests_are_logged_with_their_outcome_on_demand() {
    let _alone = alone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(|| Lines);
    subscriber.with_env_filter("ferry_engine::requests=info").init();
    let of = |share: &str| Some(Filter { share: Some(share.into()), inodes: Vec::new() });
    for cache in [Cache::Writeback, Cache::None] {
        let all = logged("/d", cache, of("/d"));
        for request in ["Read 4096 bytes from byte 8192", "Write 4096 bytes from byte 12288"] {
            let found: Vec<_> = all.lines().filter(|line| line.contains(request)).collect();
            assert_eq!(found.len(), 1, "{all}");
            assert!(found[0].contains("share=\"/d\"") && found[0].contains("bytes=4096"), "{all}");
            assert!(!found[0].contains("waits"), "a transfer is logged when it ends: {all}");
        }
        assert_eq!(logged("/d", cache, of("/e")), "", "of another disk");
        assert_eq!(logged("/d", cache, None), "");
    }
}
