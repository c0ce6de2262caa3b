//! What ends the program: a signal, or the mount being gone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Signals that ask the program to end. From the second one on they end it at once.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Waits for whatever comes first.
#[derive(Debug)]
pub(crate) struct Endings {
    sender: Sender<Ending>,
    receiver: Receiver<Ending>,
}

/// Why the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By this signal.
    Signal(i32),
    /// Somebody unmounted it.
    Unmounted,
}

impl Endings {
    /// Begins to catch signals.
    pub(crate) fn catch() -> io::Result<Self> {
        let (sender, receiver) = channel();
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            // The order matters: a signal first looks whether one came before it, then leaves its mark.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
            signal_hook::flag::register(signal, Arc::clone(&asked))?;
        }
        let mut signals = Signals::new(SIGNALS)?;
        let tell = sender.clone();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            for signal in signals.forever() {
                // Nobody listens any more once the program is ending.
                let _ = tell.send(Ending::Signal(signal));
            }
        })?;
        Ok(Self { sender, receiver })
    }

    /// Ends the program too when `gone` comes back.
    pub(crate) fn when(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let tell = self.sender.clone();
        std::thread::Builder::new().name("unmounted".into()).spawn(move || {
            gone();
            let _ = tell.send(Ending::Unmounted);
        })?;
        Ok(())
    }

    /// Waits for the first of them.
    pub(crate) fn wait(&self) -> Ending {
        self.receiver.recv().expect("a sender is kept beside the receiver")
    }
}
