//! Settings of the running kernel, changed for the duration of a test.

use std::fs;
use std::sync::{Mutex, PoisonError};

/// Whether FUSE connections may use io_uring; Linux 6.14 has it.
pub const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";
/// Which processes may use io_uring: 0 means all, 2 none.
pub const IO_URING_DISABLED: &str = "/proc/sys/kernel/io_uring_disabled";

/// A setting that gets its value back on drop.
#[derive(Debug)]
pub struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    /// Changes a setting. `None` where the kernel does not have it.
    ///
    /// # Panics
    /// When it is there and cannot be changed.
    pub fn change(path: &'static str, value: &str) -> Option<Self> {
        let before = fs::read_to_string(path).ok()?;
        fs::write(path, value).unwrap_or_else(|error| panic!("{path}: {error}"));
        Some(Self { path, before: before.trim_end().into() })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = fs::write(self.path, &self.before) {
            eprintln!("{} is not {} again: {error}", self.path, self.before);
        }
    }
}

/// Allows FUSE over io_uring while any of these exists, then restores the previous setting.
#[derive(Debug)]
pub struct WithUring(());

/// How many there are, and the setting.
static WITH_URING: Mutex<(usize, Option<Setting>)> = Mutex::new((0, None));

/// Allows FUSE over io_uring. `Err` says why that cannot be.
pub fn with_uring() -> Result<WithUring, &'static str> {
    let mut shared = WITH_URING.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.0 == 0 {
        shared.1 = Setting::change(ENABLE_URING, "Y");
    }
    if shared.1.is_none() {
        return Err("this kernel's FUSE knows no io_uring (Linux 6.14 does)");
    }
    shared.0 += 1;
    Ok(WithUring(()))
}

impl Drop for WithUring {
    fn drop(&mut self) {
        let mut shared = WITH_URING.lock().unwrap_or_else(PoisonError::into_inner);
        shared.0 -= 1;
        if shared.0 == 0 {
            shared.1 = None;
        }
    }
}
