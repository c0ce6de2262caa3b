//! Memory that is written out must not need memory: when it is short, the kernel waits for that. A program of its own, because
//! its allocator counts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{CX, Served, file, name, write};
use ferry_9p_client::Options;
use ferry_vfs::*;

/// The client's threads: the server is in this process, too.
const COUNTED: [&str; 3] = ["write-behind", "9p-reader", "9p-sender"];

static IS_COUNTING: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether what this thread takes counts; `None`: nobody has looked yet.
    static COUNTS: Cell<Option<bool>> = const { Cell::new(None) };
}

struct Counting;

fn note() {
    if !IS_COUNTING.load(Ordering::Relaxed) {
        return;
    }
    let counts = COUNTS.try_with(|counts| {
        if counts.get().is_none() {
            // The name takes memory itself.
            counts.set(Some(false));
            let name = rustix::thread::name().unwrap();
            counts.set(Some(COUNTED.iter().any(|counted| name.to_str() == Ok(counted))));
        }
        counts.get() == Some(true)
    });
    if counts == Ok(true) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all is left to the system's allocator; what is done besides takes no memory but where that is looked for.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: passed on to the caller.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Dirties so many bytes, and has them written and made durable: by the client's thread, and by whoever asks for it.
fn round(client: &ferry_9p_client::Client, (ino, handle): (Ino, Handle), bytes: u64, step: u64) {
    let page = [5; 4096];
    for at in (0..bytes).step_by(usize::try_from(step).unwrap()) {
        write(client, ino, handle, at, &page).unwrap();
    }
    COUNTS.set(Some(true));
    client.fsync(&CX, ino, handle, false).unwrap();
    COUNTS.set(Some(false));
}

#[test]
fn writing_out_takes_no_memory() {
    const BYTES: u64 = 32 << 20;
    let served = Served::new();
    let client = served.connect(Options::default());
    let (made, handle) = client.create(&CX, Ino::ROOT, name("f"), &file(0o600), OFlags::RDWR).unwrap();
    let open = (made.ino, handle);
    // Whole messages, and pages that are alone.
    for step in [4096, 16384] {
        round(&client, open, BYTES, step);
        IS_COUNTING.store(true, Ordering::Relaxed);
        let (before, messages) = (COUNT.load(Ordering::Relaxed), client.usage().messages);
        round(&client, open, BYTES, step);
        let (taken, messages) = (COUNT.load(Ordering::Relaxed) - before, client.usage().messages - messages);
        IS_COUNTING.store(false, Ordering::Relaxed);
        println!("{taken} allocations for {messages} messages");
        assert!(messages >= BYTES >> 20, "{messages} messages");
        assert!(taken <= 4, "{taken} allocations for {messages} messages");
    }
}
