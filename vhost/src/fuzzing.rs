//! The way in for the fuzz target of the virtqueue: what is inside is not public otherwise.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use vhost::vhost_user::message::VhostUserMemoryRegion;

use crate::chain::Chain;
use crate::memory::Memory;
use crate::ring::{Popped, RingAddresses, SplitRing};

const SIZE: u32 = 8;
const BASE: u64 = 0x10_0000;
const MEMORY_BYTES: u64 = 0x4000;
/// More than the ring has, so that old entries come round again.
const CHAINS: usize = 32;

/// Serves a ring that lies in memory with these contents: descriptors at 0, the available ring at 0x100, the used
/// ring at 0x200, and anything behind.
pub fn ring(contents: &[u8], event_index: bool) {
    let fd = rustix::fs::memfd_create("ferry-fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.set_len(MEMORY_BYTES).expect("room");
    let contents = &contents[..contents.len().min(usize::try_from(MEMORY_BYTES).unwrap_or(0))];
    file.write_all_at(contents, 0).expect("room");
    let region =
        VhostUserMemoryRegion { guest_phys_addr: BASE, memory_size: MEMORY_BYTES, user_addr: BASE, mmap_offset: 0 };
    let memory = Rc::new(Memory::default().with(&region, file).expect("the region is sound"));
    let addresses = RingAddresses { descriptors: BASE, available: BASE + 0x100, used: BASE + 0x200 };
    let mut ring = SplitRing::new(memory, SIZE, addresses, 0, event_index, true).expect("the ring is sound");
    let mut chain = Chain::default();
    let mut sink = vec![0; 2 * contents.len()];
    for _ in 0..CHAINS {
        match ring.pop(&mut chain) {
            Ok(Popped::Chain) => {
                chain.read_at(0, &mut sink);
                let written = chain.write_at(1, &sink);
                ring.push(chain.head, u32::try_from(written).unwrap_or(u32::MAX));
            }
            Ok(Popped::Dropped(_)) => {}
            Ok(Popped::Empty) | Err(_) => break,
        }
        ring.publish();
        ring.want_kicks(true);
    }
}
