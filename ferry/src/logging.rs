//! What the program says on standard error or to the system's log, and to those who listen with `ferry log --follow`.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, reload};

/// Where the log of requests comes from, in the words of a filter.
const REQUESTS: &str = "ferry_engine::requests=info";
/// Lines that a listener may be behind; then it misses some, and nobody waits.
const BACKLOG_LINES: usize = 1024;

/// Where the system's log listens.
const SYSLOG: &str = "/dev/log";
/// The facility "daemon", as RFC 3164 counts.
const DAEMON: u8 = 3 << 3;

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

/// Starts logging at a level, or by a list of `crate=level`, on standard error or to the system's log. There are no times: who
/// keeps logs (journald, syslog) adds them.
pub fn start(level: &str, plain: bool, syslog: bool) -> Result<Logging> {
    let listeners = Listeners::default();
    let (filter, handle) = reload::Layer::new(filter(level, false)?);
    // Connected before there are walls, behind which there is no such path.
    let syslog = if syslog { Some(Syslog::connect(Path::new(SYSLOG))?) } else { None };
    let plain = plain || syslog.is_some();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(Writer { listeners: listeners.clone(), syslog })
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

/// The system's log.
#[derive(Debug)]
struct Syslog(File);

impl Syslog {
    fn connect(path: &Path) -> Result<Self> {
        let connect = || {
            let socket = UnixDatagram::unbound()?;
            socket.connect(path)?;
            // No request waits for a log that is slow.
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(Self(File::from(OwnedFd::from(socket))))
        };
        connect().with_context(|| {
            format!("--syslog: no log of the system at {}: start one, or leave --syslog out", path.display())
        })
    }

    /// Sends a line as RFC 3164 has it: facility and severity, the program's name and number.
    fn send(&self, severity: u8, line: &[u8]) -> io::Result<()> {
        let mut message = format!("<{}>ferry[{}]: ", DAEMON | severity, crate::sandbox::pid()).into_bytes();
        message.extend_from_slice(line.trim_ascii());
        (&self.0).write_all(&message)
    }
}

/// What syslog calls a level.
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Standard error or the system's log, and the listeners. The subscriber writes a line at a time.
struct Writer {
    listeners: Listeners,
    syslog: Option<Syslog>,
}

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { to: self, severity: severity(Level::INFO) }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line<'a> {
        Line { to: self, severity: severity(*metadata.level()) }
    }
}

struct Line<'a> {
    to: &'a Writer,
    severity: u8,
}

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.to.listeners.tell(line);
        // A log that has gone, or is behind: better here than nowhere.
        let sent = self.to.syslog.as_ref().is_some_and(|syslog| syslog.send(self.severity, line).is_ok());
        if !sent {
            io::stderr().write_all(line)?;
        }
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
    fn the_systems_log_gets_lines_with_their_severity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let missing = Syslog::connect(&path).unwrap_err().to_string();
        assert!(missing.contains("--syslog: no log of the system at /"), "{missing}");
        let log = UnixDatagram::bind(&path).unwrap();
        let writer = Writer { listeners: Listeners::default(), syslog: Some(Syslog::connect(&path).unwrap()) };
        let mut line = Line { to: &writer, severity: severity(Level::WARN) };
        line.write_all(b" WARN something is wrong\n").unwrap();
        let mut bytes = [0; 200];
        let length = log.recv(&mut bytes).unwrap();
        let expected = format!("<28>ferry[{}]: WARN something is wrong", std::process::id());
        assert_eq!(String::from_utf8_lossy(&bytes[..length]), expected);
        drop(log);
        assert!(writer.syslog.as_ref().unwrap().send(3, b"nobody").is_err());
        line.write_all(b"said on standard error\n").unwrap();
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
