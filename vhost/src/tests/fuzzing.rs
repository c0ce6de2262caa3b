//! Entry points for the fuzz targets of the virtqueues.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vhost::vhost_user::message::{VhostUserInflight, VhostUserMemoryRegion};

use crate::chain::Chain;
use crate::inflight::Area;
use crate::memory::Memory;
use crate::ring::{Begin, PopOutcome, Ring, RingAddresses, RingSetup};

const SIZE: u16 = 8;
const BASE: u64 = 0x10_0000;
const MEMORY_BYTES: u64 = 0x4000;
/// More than the ring has, so that entries are reused.
const CHAINS: usize = 32;

/// Serves a ring that lies in memory with these contents: descriptors at 0, the available ring (or the driver's event
/// structure) at 0x100, the used ring (or the device's event structure) at 0x200, and anything behind.
pub fn ring(contents: &[u8], packed: bool, event_index: bool) {
    let memory = Arc::new(memory_with(contents));
    let addresses = RingAddresses { descriptors: BASE, available: BASE + 0x100, used: BASE + 0x200 };
    let setup = RingSetup { size: u32::from(SIZE), addresses, packed, event_index, indirect: true };
    let begin = Begin::At(if packed { 0x8000 } else { 0 });
    let ring = Ring::new(memory, &setup, begin, None).expect("the ring is sound");
    serve(ring, contents.len());
}

/// Takes over a ring, with in-flight memory that holds the first `log_bytes` bytes of the contents.
pub fn recovery(contents: &[u8], log_bytes: usize, packed: bool) {
    let (log, contents) = contents.split_at(log_bytes.min(contents.len()));
    let request = VhostUserInflight::new(0, 0, 1, SIZE);
    let (kept, file) = Area::make(&request, 1).expect("memory for one queue");
    let room = usize::try_from(kept.mmap_size).unwrap_or(0);
    file.write_all_at(&log[..log.len().min(room)], 0).expect("room");
    let area = Area::open(&kept, file, 1).expect("it was made a moment ago");
    let addresses = RingAddresses { descriptors: BASE, available: BASE + 0x100, used: BASE + 0x200 };
    let setup = RingSetup { size: u32::from(SIZE), addresses, packed, event_index: true, indirect: true };
    let memory = Arc::new(memory_with(contents));
    if let Ok(ring) = Ring::new(memory, &setup, Begin::At(0), area.region(0)) {
        serve(ring, contents.len());
    }
}

fn memory_with(contents: &[u8]) -> Memory {
    let fd = rustix::fs::memfd_create("ferry-fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.set_len(MEMORY_BYTES).expect("room");
    let contents = &contents[..contents.len().min(usize::try_from(MEMORY_BYTES).unwrap_or(0))];
    file.write_all_at(contents, 0).expect("room");
    let region =
        VhostUserMemoryRegion { guest_phys_addr: BASE, memory_size: MEMORY_BYTES, user_addr: BASE, mmap_offset: 0 };
    Memory::default().with(&region, file, false).expect("the region is sound")
}

fn serve(mut ring: Ring, bytes: usize) {
    let mut chain = Chain::default();
    let mut sink = vec![0; 2 * bytes];
    for number in 0..CHAINS {
        match ring.pop(&mut chain) {
            Ok(PopOutcome::Chain) => {
                chain.read_at(0, &mut sink);
                let written = chain.write_at(1, &sink);
                ring.push(&chain, u32::try_from(written).unwrap_or(u32::MAX));
            }
            Ok(PopOutcome::Dropped(_)) => {}
            Ok(PopOutcome::Empty) | Err(_) => break,
        }
        if number % 3 != 0 {
            ring.publish();
        }
        ring.want_kicks(true);
    }
}
