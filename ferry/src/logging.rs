//! What the program says on standard error, and to those who listen with `ferry log --follow`.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, reload};

/// Where the log of requests comes from, in the words of a filter.
const REQUESTS: &str = "ferry_engine::requests=info";
/// Lines that a listener may be behind; then it misses some, and nobody waits.
const BACKLOG_LINES: usize = 1024;

/// The switch of the log.
#[derive(Clone)]
pub struct Logging {
    reload: Arc<dyn Fn(EnvFilter) -> Result<()> + Send + Sync>,
    listeners: Listeners,
}

impl std::fmt::Debug for Logging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Logging")
    }
}

/// Starts logging at a level, or by a list of `crate=level`. There are no times: who keeps logs (journald) adds them.
pub fn start(level: &str, plain: bool) -> Result<Logging> {
    let listeners = Listeners::default();
    let (filter, handle) = reload::Layer::new(filter(level, false)?);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(Writer(listeners.clone()))
        .with_ansi(!plain && io::stderr().is_terminal())
        .with_target(false)
        .without_time();
    tracing_subscriber::registry().with(filter).with(lines).try_init().context("cannot start logging")?;
    let reload = Arc::new(move |filter| handle.reload(filter).context("cannot change what is logged"));
    Ok(Logging { reload, listeners })
}

impl Logging {
    /// Logs at another level from now on, with the log of requests or without.
    pub fn set(&self, level: &str, requests: bool) -> Result<()> {
        (self.reload)(filter(level, requests)?)
    }

    /// Every line from now on, until the receiver is dropped.
    pub fn listen(&self) -> Receiver<Vec<u8>> {
        let (sender, receiver) = sync_channel(BACKLOG_LINES);
        self.listeners.add(sender);
        receiver
    }
}

/// Reads a level or a list.
fn filter(level: &str, requests: bool) -> Result<EnvFilter> {
    let list = if requests { format!("{level},{REQUESTS}") } else { level.to_owned() };
    match EnvFilter::builder().parse(list) {
        Ok(filter) if !level.trim().is_empty() => Ok(filter),
        _ => bail!(
            "cannot log at {level:?}; use error, warn, info, debug or trace, or a list like info,ferry_virtiofs=debug"
        ),
    }
}

/// Those who want to see every line.
#[derive(Clone, Default)]
struct Listeners(Arc<ListenersInner>);

#[derive(Default)]
struct ListenersInner {
    /// Spares each line the lock while nobody listens.
    some: AtomicBool,
    senders: Mutex<Vec<SyncSender<Vec<u8>>>>,
}

impl Listeners {
    fn add(&self, sender: SyncSender<Vec<u8>>) {
        let mut senders = self.0.senders.lock().unwrap_or_else(PoisonError::into_inner);
        senders.push(sender);
        self.0.some.store(true, Ordering::Release);
    }

    fn tell(&self, line: &[u8]) {
        if !self.0.some.load(Ordering::Acquire) {
            return;
        }
        let mut senders = self.0.senders.lock().unwrap_or_else(PoisonError::into_inner);
        // One that is too slow stays and misses the line; one that has gone goes.
        senders.retain(|sender| {
            !matches!(sender.try_send(line.to_vec()), Err(std::sync::mpsc::TrySendError::Disconnected(_)))
        });
        self.0.some.store(!senders.is_empty(), Ordering::Release);
    }
}

/// Standard error and the listeners. The subscriber writes a line at a time.
struct Writer(Listeners);

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(&self.0)
    }
}

struct Line<'a>(&'a Listeners);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.tell(line);
        io::stderr().write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_read() {
        for level in ["off", "error", "warn", "info", "debug", "trace", "info,ferry_fuse=debug"] {
            assert!(filter(level, false).is_ok() && filter(level, true).is_ok(), "{level}");
        }
        for wrong in ["", " ", "info,=", "a=b=c", "ferry=loud"] {
            assert!(filter(wrong, false).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn listeners_come_and_go() {
        let listeners = Listeners::default();
        listeners.tell(b"nobody");
        let (sender, receiver) = sync_channel(1);
        listeners.add(sender);
        listeners.tell(b"one");
        listeners.tell(b"missed");
        assert_eq!(receiver.recv().as_deref(), Ok(&b"one"[..]));
        assert!(receiver.try_recv().is_err());
        drop(receiver);
        listeners.tell(b"nobody");
        assert!(!listeners.0.some.load(Ordering::Acquire));
    }
}
