//! Durability when several sync at once.
use crate::pmem_common;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ferry_mem::pmem::{Media, Medium, Options, open_media};
use ferry_vfs::{FileSystem, Ino};
use pmem_common::{Recording, at, cx, name, put};

/// A medium whose first write becomes durable only when it is let go; later ones do not wait.
#[derive(Debug)]
struct Gated {
    inner: Arc<Recording>,
    /// Whether it is closed, and how many wait.
    gate: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gated {
    fn close(&self, closed: bool) {
        self.gate.lock().unwrap().0 = closed;
        self.changed.notify_all();
    }

    fn await_waiter(&self) {
        let (gate, late) = self
            .changed
            .wait_timeout_while(self.gate.lock().unwrap(), Duration::from_secs(10), |gate| gate.1 == 0)
            .unwrap();
        assert!(!late.timed_out() && gate.1 == 1, "somebody is making something durable");
    }
}

impl Medium for Gated {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        self.inner.look(offset, bytes, seen)
    }
    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize> {
        self.inner.edit(offset, bytes, fill)
    }
    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        let mut gate = self.gate.lock().unwrap();
        gate.1 += 1;
        self.changed.notify_all();
        if gate.1 == 1 {
            gate = self.changed.wait_while(gate, |gate| gate.0).unwrap();
        }
        gate.1 -= 1;
        drop(gate);
        self.inner.persist(ranges)
    }
}

#[test]
fn fdatasync_waits_for_bytes_that_another_thread_is_syncing() {
    let inner = Recording::new(vec![0; 8 << 20], 0, None);
    let medium = Arc::new(Gated { inner, gate: Mutex::default(), changed: Condvar::new() });
    let image: Arc<dyn Medium> = Arc::clone(&medium) as _;
    let fs = open_media(&Media { image, tier2: None }, &Options { commit: Some(Duration::ZERO), ..Options::default() })
        .unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 8192]).unwrap();
    fs.fsync(&cx(), ino, handle, false).unwrap();
    // In place: nothing but these bytes is to become durable.
    assert_eq!(fs.write(&cx(), &at(ino, handle, 0, 4096), &mut &[2; 4096][..]).unwrap().bytes(), Some(4096));
    medium.close(true);
    std::thread::scope(|scope| {
        let all = scope.spawn(|| fs.syncfs(&cx(), Ino::ROOT));
        medium.await_waiter();
        let one = scope.spawn(|| fs.fsync(&cx(), ino, handle, true).map(drop));
        std::thread::sleep(Duration::from_millis(200));
        let early = one.is_finished();
        medium.close(false);
        assert!(!early, "the bytes are not durable yet");
        assert_eq!(one.join().unwrap(), Ok(()));
        assert_eq!(all.join().unwrap(), Ok(()));
    });
}

/// The other way round.
#[test]
fn syncfs_waits_for_bytes_that_an_fdatasync_has_taken() {
    let inner = Recording::new(vec![0; 8 << 20], 0, None);
    let medium = Arc::new(Gated { inner, gate: Mutex::default(), changed: Condvar::new() });
    let image: Arc<dyn Medium> = Arc::clone(&medium) as _;
    let fs = open_media(&Media { image, tier2: None }, &Options { commit: Some(Duration::ZERO), ..Options::default() })
        .unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 8192]).unwrap();
    fs.fsync(&cx(), ino, handle, false).unwrap();
    assert_eq!(fs.write(&cx(), &at(ino, handle, 0, 4096), &mut &[2; 4096][..]).unwrap().bytes(), Some(4096));
    medium.close(true);
    std::thread::scope(|scope| {
        let one = scope.spawn(|| fs.fsync(&cx(), ino, handle, true).map(drop));
        medium.await_waiter();
        let all = scope.spawn(|| fs.syncfs(&cx(), Ino::ROOT));
        std::thread::sleep(Duration::from_millis(200));
        let early = all.is_finished();
        medium.close(false);
        assert_eq!((one.join().unwrap(), all.join().unwrap()), (Ok(()), Ok(())));
        assert!(!early, "the bytes are not durable yet");
    });
}

#[test]
fn syncfs_makes_the_times_of_open_files_durable() {
    let medium = Recording::new(vec![0; 8 << 20], 0, None);
    let image: Arc<dyn Medium> = Arc::clone(&medium) as _;
    let options = Options { commit: Some(Duration::ZERO), ..Options::default() };
    let fs = open_media(&Media { image, tier2: None }, &options).unwrap();
    let (ino, handle) = put(&fs, Ino::ROOT, b"file", 0, &[1; 8192]).unwrap();
    fs.fsync(&cx(), ino, handle, false).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    // In place: only its times change.
    assert_eq!(fs.write(&cx(), &at(ino, handle, 0, 4096), &mut &[2; 4096][..]).unwrap().bytes(), Some(4096));
    let written = fs.getattr(&cx(), ino, None).unwrap().mtime;
    fs.syncfs(&cx(), ino).unwrap();
    let image: Arc<dyn Medium> = Recording::new(medium.contents(), 0, None);
    let fs = open_media(&Media { image, tier2: None }, &options).unwrap();
    assert_eq!(fs.lookup(&cx(), Ino::ROOT, name(b"file")).unwrap().attr.mtime, written);
}
