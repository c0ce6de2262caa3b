//! File systems mounted on this host by the program itself: `ferry mount` as a user runs it.
//!
//! A [`Cell`] of the matrix is a source and a transport; [`Mounted`] is one such mount, with its own directory.
//! Programs run on it through its [`Site`], each with a time limit. Nothing may hang: each mount has a watchdog that
//! aborts its FUSE connection, so that all waiting processes get an error.

mod cell;
mod changes;
mod emergency;
mod mounted;
mod pair;
mod program;
mod server;
mod settings;
mod site;

pub use cell::{Cell, Source, Transport};
pub use changes::{each_change, shows};
pub use emergency::{Emergency, Watchdog};
pub use mounted::{MountOptions, Mounted, assert_nothing_left, unmount};
pub use pair::Pair;
pub use program::{RunningProgram, ferry, program};
pub use server::{NinePServer, ServerVendor, diod, go_program};
pub use settings::{ENABLE_URING, IO_URING_DISABLED, Setting, WithUring, with_uring};
pub use site::Site;

use std::path::Path;

/// Why mounts cannot be tested here, if so.
pub fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        Some("mounting, aborting connections and changing the kernel's settings need root")
    } else if !Path::new("/dev/fuse").exists() {
        Some("there is no /dev/fuse here")
    } else {
        None
    }
}

/// The entry of /proc/self/mountinfo for a mount point, if it is one: its numbers and all that follows.
pub fn mount_entry(mountpoint: &Path) -> Option<String> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let at = mountpoint.to_str().unwrap();
    // The last one covers those before it.
    table.lines().rfind(|line| line.split(' ').nth(4) == Some(at)).map(str::to_owned)
}

/// Makes tests of a suite, `fn(&Cell)`: one for each of the named cells.
#[macro_export]
macro_rules! on_cells {
    ($suite:ident: quick [$($quick:ident),* $(,)?] long [$($long:ident),* $(,)?]) => {
        mod $suite {
            $(#[test]
            fn $quick() {
                super::$suite(&stringify!($quick).parse().unwrap());
            })*
            $(#[test]
            #[ignore = "long: make test-all"]
            fn $long() {
                super::$suite(&stringify!($long).parse().unwrap());
            })*
        }
    };
}
