//! Waits for the end of the program: a signal, or an unmount.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::iterator::{Handle, Signals};

/// The signals that end a program. A second one ends it at once.
///
/// ```no_run
/// # fn mounted() -> ferry_fs::fuse::Export { unimplemented!() }
/// # use std::sync::Arc;
/// use ferry_fs::ShutdownSignals;
///
/// let mut signals = ShutdownSignals::catch(&ShutdownSignals::ALL)?;
/// let export = Arc::new(mounted());
/// let (watched, handle) = (Arc::clone(&export), signals.handle());
/// std::thread::spawn(move || {
///     watched.wait();
///     handle.shutdown();
/// });
/// signals.wait();
/// export.stop();
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct ShutdownSignals(Signals);

impl ShutdownSignals {
    /// SIGINT, SIGTERM, and SIGHUP, which is sent when the terminal closes.
    pub const ALL: [i32; 3] = [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP];

    /// Begins to catch signals, and SIGXFSZ: a write past the limit of file sizes (`ulimit -f`) must be `EFBIG` for the client that
    /// makes it, and not the end of the server.
    ///
    /// # Errors
    ///
    /// Those of the system: an invalid signal number, or no descriptor left.
    pub fn catch(signals: &[i32]) -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for &signal in signals {
            // The order matters: a signal first checks whether one came before it, and then sets its flag.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
            signal_hook::flag::register(signal, Arc::clone(&asked))?;
        }
        // Not ignored, which programs that are started later would inherit. The flag is not read.
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())?;
        Ok(Self(Signals::new(signals)?))
    }

    /// Waits for a signal and returns its number; `None` after [`ShutdownHandle::shutdown`].
    pub fn wait(&mut self) -> Option<i32> {
        self.0.forever().next()
    }

    /// Returns a handle that ends the wait.
    #[must_use]
    pub fn handle(&self) -> ShutdownHandle {
        ShutdownHandle(self.0.handle())
    }
}

/// Ends the wait of [`ShutdownSignals::wait`], from another thread.
#[derive(Clone, Debug)]
pub struct ShutdownHandle(Handle);

impl ShutdownHandle {
    /// Ends the wait.
    pub fn shutdown(&self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_can_be_ended() {
        let mut signals = ShutdownSignals::catch(&[signal_hook::consts::SIGUSR1]).expect("a signal");
        let handle = signals.handle();
        let thread = std::thread::spawn(move || signals.wait());
        handle.shutdown();
        assert_eq!(thread.join().expect("no panic"), None);
    }

    #[test]
    fn a_signal_is_returned() {
        let mut signals = ShutdownSignals::catch(&[signal_hook::consts::SIGUSR2]).expect("a signal");
        signal_hook::low_level::raise(signal_hook::consts::SIGUSR2).expect("our own process");
        assert_eq!(signals.wait(), Some(signal_hook::consts::SIGUSR2));
    }
}
