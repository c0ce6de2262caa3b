//! Serializes calls that change the same snapshot.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex};

use ferry_vfs::sync::{lock, wait};

/// The names of snapshots that are being changed.
#[derive(Debug, Default)]
pub struct Keys {
    held: Mutex<HashSet<String>>,
    released: Condvar,
}

/// A locked name.
#[derive(Debug)]
pub struct HeldKey<'a> {
    keys: &'a Keys,
    key: String,
}

impl Keys {
    /// Waits until no other thread holds a name, and locks it.
    pub fn hold(&self, key: &str) -> HeldKey<'_> {
        let mut held = lock(&self.held);
        while !held.insert(key.to_owned()) {
            held = wait(&self.released, held);
        }
        HeldKey { keys: self, key: key.into() }
    }
}

impl Drop for HeldKey<'_> {
    fn drop(&mut self) {
        lock(&self.keys.held).remove(&self.key);
        self.keys.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn holders_of_one_name_wait_and_others_do_not() {
        let (keys, released) = (Keys::default(), AtomicBool::new(false));
        let first = keys.hold("a");
        thread::scope(|scope| {
            scope.spawn(|| {
                let _second = keys.hold("a");
                assert!(released.load(Ordering::SeqCst), "it was held");
            });
            let _other = keys.hold("b");
            thread::sleep(Duration::from_millis(20));
            released.store(true, Ordering::SeqCst);
            drop(first);
        });
    }
}
