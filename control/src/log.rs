//! The server's log, on standard error or the system log, and for clients of `ferry log --follow`.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_vfs::RatelimitedLog;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tracing::callsite::Identifier;
use tracing::level_filters::LevelFilter;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, reload};

use crate::escape::printable;
use crate::{Error, LOG_LINE_BYTES_MAX};

/// The target of the request log, as a filter directive.
const REQUESTS: &str = "ferry_engine::requests=info";
/// The `tracing` target of the request log's events.
const REQUESTS_TARGET: &str = "ferry_engine::requests";
/// The maximum backlog of a listener in lines; a slower listener misses lines, so that logging never blocks.
const BACKLOG_LINES: usize = 1024;

/// The names of all levels.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The minimum similarity, from 0 to 1, at which a word counts as a misspelling of a name.
const SIMILARITY_MIN: f64 = 0.7;

/// The socket of the system log.
const SYSLOG: &str = "/dev/log";
/// The facility "daemon" of RFC 3164.
const DAEMON: u8 = 3 << 3;

/// A pipe that is writable takes this many bytes at once (pipe(7)).
const PIPE_BUF: usize = 4096;

/// A level or a list of `crate=level`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLevel(String);

impl FromStr for LogLevel {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        filter(text, false).map(|_| Self(text.into()))
    }
}

impl LogLevel {
    /// Returns its text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The log of this process. Clones share it.
#[derive(Clone)]
pub struct Logging {
    reload: Arc<dyn Fn(EnvFilter) -> Result<(), Error> + Send + Sync>,
    listeners: Listeners,
    own_requests: Arc<AtomicBool>,
    default_level: Arc<str>,
}

impl std::fmt::Debug for Logging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Logging").field("default_level", &self.default_level).finish_non_exhaustive()
    }
}

impl Logging {
    /// Starts logging at a level, or with a list of `crate=level`, on standard error or the system log. Lines have no
    /// time stamps, because journald and syslog add them.
    ///
    /// # Errors
    ///
    /// [`Error::Level`]; [`Error::Start`]: the program has a logger already.
    pub fn start(level: &str, plain: bool, syslog: Option<Syslog>) -> Result<Self, Error> {
        let listeners = Listeners::default();
        let (filter, handle) = reload::Layer::new(filter(level, false)?);
        let plain = plain || syslog.is_some();
        let own_requests = Arc::<AtomicBool>::default();
        let writer = Writer {
            listeners: listeners.clone(),
            own_requests: Arc::clone(&own_requests),
            syslog,
            stderr: Stderr::default(),
            limits: Limits::default(),
        };
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(writer)
            .with_ansi(!plain && io::stderr().is_terminal())
            .with_target(false)
            .without_time();
        tracing_subscriber::registry().with(filter).with(lines).try_init().map_err(Error::Start)?;
        let reload = Arc::new(move |filter| handle.reload(filter).map_err(Error::Reload));
        Ok(Self { reload, listeners, own_requests, default_level: level.into() })
    }

    /// Changes the level permanently; later changes for listeners are relative to it.
    ///
    /// # Errors
    /// [`Error::Reload`].
    pub fn with_level(&self, level: &LogLevel) -> Result<Self, Error> {
        self.set(&level.0, false)?;
        Ok(Self { default_level: level.as_str().into(), ..self.clone() })
    }

    /// Returns the permanent level, which `ferry log default` restores.
    #[must_use]
    pub fn default_level(&self) -> &str {
        &self.default_level
    }

    /// Changes the level, with the request log or without.
    pub(crate) fn set(&self, level: &str, requests: bool) -> Result<(), Error> {
        (self.reload)(filter(level, requests)?)
    }

    /// Sets whether the server's own log includes the request log. Otherwise only listeners receive it, so that a
    /// terminal with both does not show each line twice.
    pub(crate) fn keep_requests(&self, own: bool) {
        self.own_requests.store(own, Ordering::Relaxed);
    }

    /// Returns every line from now on, until it is dropped.
    pub(crate) fn listen(&self) -> Lines {
        self.listeners.add(BACKLOG_LINES)
    }

    /// A log that nothing writes to.
    #[cfg(test)]
    pub(crate) fn detached() -> Self {
        Self {
            reload: Arc::new(|_| Ok(())),
            listeners: Listeners::default(),
            own_requests: Arc::default(),
            default_level: "info".into(),
        }
    }
}

/// Parses a level or a list.
fn filter(level: &str, requests: bool) -> Result<EnvFilter, Error> {
    let refused = |word: &str| Error::Level { level: level.into(), nearest: nearest(word, LEVELS) };
    // The filter takes an unknown bare word for a target, and then logs nothing else.
    for part in level.split(',') {
        let word = part.rsplit_once('=').map_or(part, |(_, word)| word).trim();
        if LevelFilter::from_str(word).is_err() || word.is_empty() {
            return Err(refused(word));
        }
    }
    let list = if requests { format!("{level},{REQUESTS}") } else { level.to_owned() };
    EnvFilter::builder().parse(list).map_err(|_| refused(""))
}

/// Returns the name that a word is probably a misspelling of.
#[must_use]
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = word.to_lowercase();
    let rated = names.into_iter().map(|name| (strsim::jaro(&word, name), name));
    rated
        .filter(|(similarity, _)| *similarity > SIMILARITY_MIN)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

/// The listeners that receive every line.
#[derive(Clone, Default)]
struct Listeners(Arc<ListenersInner>);

#[derive(Default)]
struct ListenersInner {
    /// Avoids the lock while there is no listener.
    some: AtomicBool,
    senders: Mutex<Senders>,
}

#[derive(Default)]
struct Senders {
    all: Vec<(u64, SyncSender<Vec<u8>>)>,
    /// The number of listeners so far.
    ever: u64,
}

/// The lines for one listener, which leaves when this is dropped.
pub(crate) struct Lines {
    pub(crate) receiver: Receiver<Vec<u8>>,
    listeners: Listeners,
    number: u64,
}

impl Drop for Lines {
    fn drop(&mut self) {
        let mut senders = self.listeners.lock();
        senders.all.retain(|(number, _)| *number != self.number);
        self.listeners.0.some.store(!senders.all.is_empty(), Ordering::Release);
    }
}

impl Listeners {
    fn lock(&self) -> MutexGuard<'_, Senders> {
        self.0.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a listener, which may be so many lines behind.
    fn add(&self, backlog_lines: usize) -> Lines {
        let (sender, receiver) = sync_channel(backlog_lines);
        let mut senders = self.lock();
        senders.ever += 1;
        let number = senders.ever;
        senders.all.push((number, sender));
        self.0.some.store(true, Ordering::Release);
        Lines { receiver, listeners: self.clone(), number }
    }

    fn send(&self, line: &[u8]) {
        if !self.0.some.load(Ordering::Acquire) {
            return;
        }
        for (_, sender) in &self.lock().all {
            // A slow listener misses the line.
            let _ = sender.try_send(line.to_vec());
        }
    }
}

/// The system's log.
pub struct Syslog {
    socket: File,
    /// The program name and process id in each line.
    name: String,
    pid: fn() -> u32,
}

impl std::fmt::Debug for Syslog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Syslog").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Syslog {
    /// Connects to the system log; `name` is the program's name, `pid` returns its process id. Call it before the
    /// sandbox hides the path.
    ///
    /// # Errors
    ///
    /// [`Error::Syslog`]: there is no system log.
    pub fn connect(name: &str, pid: fn() -> u32) -> Result<Self, Error> {
        Self::connect_to(Path::new(SYSLOG), name, pid)
    }

    fn connect_to(path: &Path, name: &str, pid: fn() -> u32) -> Result<Self, Error> {
        let connect = || {
            let socket = UnixDatagram::unbound()?;
            socket.connect(path)?;
            // A slow log must not block requests.
            socket.set_nonblocking(true)?;
            Ok(Self { socket: File::from(OwnedFd::from(socket)), name: name.into(), pid })
        };
        connect().map_err(|reason| Error::Syslog { path: path.into(), reason })
    }

    /// Sends a line in the format of RFC 3164: facility and severity, program name and process id.
    fn send(&self, severity: u8, line: &[u8]) -> io::Result<()> {
        let mut message = format!("<{}>{}[{}]: ", DAEMON | severity, self.name, (self.pid)()).into_bytes();
        message.extend_from_slice(line.trim_ascii());
        (&self.socket).write_all(&message)
    }
}

/// Returns the severity of a level in syslog (RFC 3164).
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Standard error or the system log, and the listeners. The subscriber writes one line per call.
struct Writer {
    listeners: Listeners,
    own_requests: Arc<AtomicBool>,
    syslog: Option<Syslog>,
    stderr: Stderr,
    limits: Limits,
}

/// Standard error. Lines that it has no room for are dropped and counted: its reader may itself wait for a request.
#[derive(Default)]
struct Stderr {
    dropped: AtomicU32,
    /// The last line was cut off.
    is_cut: AtomicBool,
}

impl Stderr {
    /// Writes a line to `to`, which is locked.
    fn write(&self, mut to: impl Write + AsFd, line: &str) -> io::Result<()> {
        if self.is_cut.load(Ordering::Relaxed) && !self.try_write(&mut to, "\n")? {
            return Ok(());
        }
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            let more = format!(" WARN {dropped} more lines were not logged: standard error had no room\n");
            if !self.try_write(&mut to, &more)? {
                return Ok(());
            }
            self.dropped.store(0, Ordering::Relaxed);
        }
        self.try_write(&mut to, line).map(drop)
    }

    /// Writes a text that ends a line. Returns `false`, and counts the line as dropped, if there is no room for all of it.
    fn try_write(&self, to: &mut (impl Write + AsFd), text: &str) -> io::Result<bool> {
        for (number, part) in text.as_bytes().chunks(PIPE_BUF).enumerate() {
            if !has_room(to) {
                self.dropped.fetch_add(1, Ordering::Relaxed);
                self.is_cut.fetch_or(number > 0, Ordering::Relaxed);
                return Ok(false);
            }
            to.write_all(part)?;
        }
        self.is_cut.store(false, Ordering::Relaxed);
        Ok(true)
    }
}

/// Whether a write does not block; a failure counts as room, so that the write returns it.
fn has_room(to: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    loop {
        match poll(&mut [PollFd::new(to, PollFlags::OUT)], Some(&now)) {
            Err(Errno::INTR) => {}
            found => return found != Ok(0),
        }
    }
}

/// The rate limits of warnings and errors, one for each line of code that logs, because outside input can trigger them. The lines of a
/// [`RatelimitedLog`] have their own limit, and pass.
#[derive(Default)]
struct Limits(Mutex<HashMap<Identifier, RatelimitedLog>>);

impl Limits {
    /// Returns `None` if the line must not be logged, otherwise the number of suppressed lines like it.
    fn admit(&self, metadata: &Metadata<'_>) -> Option<u32> {
        if *metadata.level() > Level::WARN || metadata.target() == RatelimitedLog::TARGET {
            return Some(0);
        }
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        limits.entry(metadata.callsite()).or_default().admit()
    }
}

/// Returns a line in printable form: one line of limited length without control characters. The first result keeps the
/// subscriber's colours, the second has none.
fn printable_line(line: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(line);
    let mut text = text.strip_suffix('\n').unwrap_or(&text);
    let is_cut = text.len() > LOG_LINE_BYTES_MAX;
    if is_cut {
        text = &text[..text.floor_char_boundary(LOG_LINE_BYTES_MAX)];
    }
    let (mut coloured, mut plain) = (String::with_capacity(text.len() + 1), String::with_capacity(text.len() + 1));
    // tracing-subscriber (0.3.20 and later) escapes ESC in messages, so what is left are its own colours.
    for (at, part) in text.split("\x1b[").enumerate() {
        let colour =
            part.find(|c: char| !c.is_ascii_digit() && c != ';').filter(|end| at > 0 && part[*end..].starts_with('m'));
        let (colour, rest) = colour.map_or(("", part), |end| part.split_at(end + 1));
        match (at, colour) {
            (0, _) => {}
            (_, "") => [&mut coloured, &mut plain].into_iter().for_each(|text| text.push_str(r"\u{1b}[")),
            (_, colour) => coloured.extend(["\x1b[", colour]),
        }
        let rest = printable(rest);
        coloured.push_str(&rest);
        plain.push_str(&rest);
    }
    for text in [&mut coloured, &mut plain] {
        text.push_str(if is_cut { "...\n" } else { "\n" });
    }
    (coloured, plain)
}

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { to: self, severity: severity(Level::INFO), admitted: Some(0), is_own: true }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line<'a> {
        let is_own = metadata.target() != REQUESTS_TARGET || self.own_requests.load(Ordering::Relaxed);
        Line { to: self, severity: severity(*metadata.level()), admitted: self.limits.admit(metadata), is_own }
    }
}

struct Line<'a> {
    to: &'a Writer,
    severity: u8,
    /// Whether it is logged, and how many lines like it were suppressed.
    admitted: Option<u32>,
    /// Whether it is also for the server's own log.
    is_own: bool,
}

impl Line<'_> {
    fn log(&self, line: &[u8]) -> io::Result<()> {
        let (coloured, plain) = printable_line(line);
        self.to.listeners.send(plain.as_bytes());
        if !self.is_own {
            return Ok(());
        }
        // If the system log is gone or slow, standard error receives the line.
        let sent = self.to.syslog.as_ref().is_some_and(|syslog| syslog.send(self.severity, plain.as_bytes()).is_ok());
        if sent { Ok(()) } else { self.to.stderr.write(io::stderr().lock(), &coloured) }
    }
}

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(suppressed) = self.admitted {
            if suppressed > 0 {
                self.log(format!(" WARN {suppressed} more lines like the next one were not logged\n").as_bytes())?;
            }
            self.log(line)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn levels_are_read() {
        for level in ["off", "error", "warn", "info", "debug", "trace", "info,ferry_fuse=debug"] {
            assert!(filter(level, false).is_ok() && filter(level, true).is_ok(), "{level}");
        }
        let refused = |wrong: &str| filter(wrong, false).expect_err(wrong).to_string();
        for wrong in ["", " ", "info,=", "a=b=c", "ferry=loud", "ferry_fuse", "info,ferry_fuse"] {
            assert!(!refused(wrong).contains("did you mean"), "{wrong:?}: {}", refused(wrong));
        }
        for (wrong, level) in
            [("debgu", "debug"), ("info,ferry_fuse=tarce", "trace"), ("warning", "warn"), ("INFOS", "info")]
        {
            assert!(refused(wrong).contains(&format!("did you mean {level}?")), "{wrong:?}: {}", refused(wrong));
        }
    }

    #[test]
    fn the_system_log_receives_lines_with_their_severity() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let missing = Syslog::connect_to(&path, "ferry", std::process::id).unwrap_err().to_string();
        assert!(missing.contains("--syslog: no system log at /"), "{missing}");
        let log = UnixDatagram::bind(&path).unwrap();
        let writer = Writer {
            listeners: Listeners::default(),
            own_requests: Arc::default(),
            syslog: Some(Syslog::connect_to(&path, "ferry", std::process::id).unwrap()),
            stderr: Stderr::default(),
            limits: Limits::default(),
        };
        let mut line = Line { to: &writer, severity: severity(Level::WARN), admitted: Some(0), is_own: true };
        line.write_all(b" WARN something is wrong\n").unwrap();
        let mut bytes = [0; 200];
        let length = log.recv(&mut bytes).unwrap();
        let expected = format!("<28>ferry[{}]: WARN something is wrong", std::process::id());
        assert_eq!(String::from_utf8_lossy(&bytes[..length]), expected);
        drop(log);
        assert!(writer.syslog.as_ref().unwrap().send(3, b"nobody").is_err());
        line.write_all(b"on standard error\n").unwrap();
    }

    /// As when journald hangs: it may wait for the server that logs.
    #[test]
    fn a_full_pipe_drops_lines_and_counts_them() {
        let (mut reader, writer) = io::pipe().unwrap();
        let stderr = Stderr::default();
        let line = "x".repeat(LOG_LINE_BYTES_MAX - 1) + "\n";
        (0..100).for_each(|_| stderr.write(&writer, &line).unwrap());
        let mut bytes = vec![0; 1 << 20];
        let written = reader.read(&mut bytes).unwrap() / line.len();
        assert!((1..100).contains(&written), "{written}");
        stderr.write(&writer, "next\n").unwrap();
        stderr.write(&writer, "last\n").unwrap();
        let length = reader.read(&mut bytes).unwrap();
        let more = format!(" WARN {} more lines were not logged: standard error had no room\n", 100 - written);
        assert_eq!(String::from_utf8_lossy(&bytes[..length]), more + "next\nlast\n");
    }

    #[test]
    fn a_line_that_was_cut_off_is_ended_before_the_next() {
        let (mut reader, writer) = io::pipe().unwrap();
        let stderr = Stderr::default();
        let line = |chunks: usize| "x".repeat(chunks * PIPE_BUF - 1) + "\n";
        stderr.write(&writer, &line(1)).unwrap();
        (0..100).for_each(|_| stderr.write(&writer, &line(2)).unwrap());
        let mut bytes = vec![0; 1 << 20];
        let length = reader.read(&mut bytes).unwrap();
        assert!(bytes[..length].ends_with(b"x"), "a part of the last one had room");
        stderr.write(&writer, "next\n").unwrap();
        let length = reader.read(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..length]);
        assert!(text.starts_with("\n WARN ") && text.ends_with(" had no room\nnext\n"), "{text}");
    }

    /// Two places of a program that repeat a message are limited separately.
    #[test]
    fn a_warning_is_logged_a_few_times_from_each_place() {
        let listeners = Listeners::default();
        let heard = listeners.add(1000);
        let (stderr, limits) = (Stderr::default(), Limits::default());
        let writer = Writer { listeners, own_requests: Arc::default(), syslog: None, stderr, limits };
        let lines =
            tracing_subscriber::fmt::layer().with_writer(writer).without_time().with_target(false).with_ansi(true);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            let ratelimited_log = [RatelimitedLog::default(), RatelimitedLog::default()];
            for number in 0..50 {
                tracing::error!("one place");
                tracing::warn!("there {number}");
                tracing::info!("for people {number}");
                ratelimited_log.iter().for_each(|one| one.warn(format_args!("of one")));
            }
            tracing::warn!("a\nb\x1b[31m{}", "x".repeat(LOG_LINE_BYTES_MAX));
        });
        let lines: Vec<String> = heard.receiver.try_iter().map(|line| String::from_utf8(line).expect("text")).collect();
        let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
        assert_eq!([count("one place"), count("there"), count("for people"), count("of one")], [10, 10, 50, 20]);
        for line in &lines {
            let text = line.strip_suffix('\n').expect("a line");
            assert!(text.len() <= LOG_LINE_BYTES_MAX + 3 && printable(text) == text, "{text:?}");
        }
        assert!(lines.last().expect("some").contains(r"a\nb\x1b[31mxxx"), "{:?}", lines.last());
    }

    #[test]
    fn colours_are_the_only_control_sequences_left() {
        let (coloured, plain) = printable_line(b"\x1b[33m WARN\x1b[0m a\x1b[2Jb\x1b]0;c\x07\r\n\xffd\x1b[1;31\n");
        assert_eq!(plain, " WARN a\\u{1b}[2Jb\\u{1b}]0;c\\u{7}\\r\\n\u{fffd}d\\u{1b}[1;31\n");
        assert_eq!(coloured, format!("\x1b[33m WARN\x1b[0m{}", &plain[5..]));
    }

    #[test]
    fn listeners_can_join_and_leave() {
        let listeners = Listeners::default();
        listeners.send(b"nobody");
        let first = listeners.add(1);
        drop(listeners.add(1));
        listeners.send(b"one");
        listeners.send(b"missed");
        assert_eq!(first.receiver.recv().as_deref(), Ok(&b"one"[..]));
        assert!(first.receiver.try_recv().is_err());
        // Also if no line comes any more.
        drop(first);
        assert!(!listeners.0.some.load(Ordering::Acquire));
    }
}
