//! The counters of requests.

use std::time::Duration;

use ferry_disk::Cache;
use ferry_driver::Config;
use ferry_engine::metrics::Snapshot;

use crate::common::{self, CopyPermit, Offered, connect, options};

fn operation(snapshot: &Snapshot, name: &str) -> (u64, u64, Vec<(i32, u64)>) {
    let found = snapshot.operations.iter().find(|operation| operation.name == name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {snapshot:?}"));
    (found.requests(), found.bytes, found.errors.clone())
}

#[test]
fn requests_of_a_guest_are_counted_with_their_bytes() {
    let _alone = common::alone();
    let disk = Offered::new(8, Cache::Writeback, options(Duration::ZERO));
    let metrics = disk.metrics();
    assert_eq!(metrics.snapshot(), Snapshot::default());
    let mut driver = connect(&disk, Config { queue_size: 64, ..Config::default() });
    let queue = driver.queue(0);
    let (read, write) = (CopyPermit::new(queue), CopyPermit::sent(queue));
    for _ in 0..3 {
        read.read(1);
        write.write(2);
        common::burst(queue, [read.head, write.head]);
        assert_eq!((read.status(), write.status()), (0, 0));
    }
    // A block behind the end is refused by the decoder, which is no request that was served.
    read.read(100);
    common::burst(queue, [read.head]);
    assert_eq!(read.status(), 1);
    let seen = metrics.snapshot();
    let bytes = 3 * common::block(0).len() as u64;
    assert_eq!(operation(&seen, "read"), (3, bytes, vec![]));
    assert_eq!(operation(&seen, "write"), (3, bytes, vec![]));
    assert_eq!((seen.in_flight(), seen.requests(), seen.invalid), (0, 6, 1));
    assert!(seen.operations.iter().all(|operation| operation.latency_ns > 0), "{seen:?}");
}
