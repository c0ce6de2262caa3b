//! What ends the program: a signal, or the mount being gone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Signals that ask the program to end. From the second one on they end it at once.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// How often to look whether the mount is still there: soon enough for whoever unmounted it, and no load.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The signals that have come.
#[derive(Debug)]
pub(crate) struct Endings(Signals);

impl Endings {
    /// Begins to catch signals.
    pub(crate) fn catch() -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // The order matters: a signal first looks whether one came before it, then leaves its mark.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
            signal_hook::flag::register(signal, Arc::clone(&asked))?;
        }
        Ok(Self(Signals::new(SIGNALS)?))
    }

    /// Waits for a signal.
    pub(crate) fn wait(&mut self) {
        self.0.forever().next();
    }

    /// Waits for a signal, or until `ended` says so.
    pub(crate) fn wait_or(&mut self, ended: impl Fn() -> bool) {
        while self.0.pending().next().is_none() && !ended() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
