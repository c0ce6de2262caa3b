//! Ending on SIGTERM, SIGINT and the like: the first signal asks, the second insists.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use signal_hook::iterator::Signals;

pub use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The signals that ask this process to end. From the second one on they end it at once.
#[derive(Debug)]
pub struct Endings(Signals);

impl Endings {
    /// Begins to catch the signals.
    pub fn catch(signals: &[i32]) -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for &signal in signals {
            // The order matters: a signal first looks whether one came before it, then leaves its mark.
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&asked)))
                .with_context(|| format!("cannot catch signal {signal}"))?;
        }
        Ok(Self(Signals::new(signals).context("cannot catch signals")?))
    }

    /// Waits for the first signal; answers its number.
    pub fn wait(&mut self) -> i32 {
        self.0.forever().next().unwrap_or(SIGTERM)
    }
}
