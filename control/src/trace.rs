//! `--trace`: requests as trace events, which Perfetto and Chrome show, in a new file.
//!
//! The file is a JSON array of the "Trace Event Format". One thread writes it. When the time is over, the file has its maximum
//! length or cannot be written, the trace ends, and serving goes on.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use ferry_engine::metrics::{Metrics, OPERATIONS_MAX};
use ferry_engine::trace::{TracedRequest, Tracer};
use rustix::process::{Resource, getrlimit};

use crate::escape::printable;
use crate::report::errno_name;
use crate::{Error, ServedShare};

/// The default duration of a trace in seconds.
const SECONDS_DEFAULT: u64 = 10;
/// The maximum duration of a trace in seconds.
pub const TRACE_SECONDS_MAX: u64 = 600;
/// The maximum length of the file in bytes: two million requests, as many as a viewer shows with ease.
const BYTES_MAX: u64 = 256 << 20;
/// The interval at which requests are written.
const INTERVAL: Duration = Duration::from_millis(200);
/// Requests of one export that are shown beside each other; more share the last line.
const LANES_MAX: usize = 1024;
/// What stands between the file and the seconds.
const SECONDS: &str = ",seconds=";

/// The end of the array.
const END: &[u8] = b"\n]\n";

/// The value of `--trace`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// The file, which does not exist yet.
    pub path: PathBuf,
    /// The maximum duration in seconds.
    pub seconds: u64,
}

impl FromStr for TraceOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, seconds) = match text.rsplit_once(SECONDS) {
            Some((path, number)) => {
                let seconds = number.parse().ok().filter(|seconds| (1..=TRACE_SECONDS_MAX).contains(seconds));
                let wrong = || format!("seconds={number} is not possible: the number is from 1 to {TRACE_SECONDS_MAX}");
                (path, seconds.ok_or_else(wrong)?)
            }
            None => (text, SECONDS_DEFAULT),
        };
        if path.is_empty() {
            return Err(format!("{text:?} names no file: write FILE or FILE,seconds=N"));
        }
        Ok(Self { path: path.into(), seconds })
    }
}

impl fmt::Display for TraceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{SECONDS}{}", self.path.display(), self.seconds)
    }
}

impl TraceOptions {
    /// Makes the path relative to a directory.
    pub fn resolve(&mut self, directory: &Path) {
        self.path = directory.join(&self.path);
    }
}

/// The file of a trace, before the trace begins. Create it before the sandbox hides paths.
#[derive(Debug)]
pub struct TraceFile {
    file: File,
    options: TraceOptions,
    bytes_max: u64,
}

impl TraceFile {
    /// Creates the file, for this user only. A file that exists is never opened: it may be another's, or a link to one.
    ///
    /// # Errors
    /// [`Error::Trace`].
    pub fn create(options: &TraceOptions) -> Result<Self, Error> {
        let flags = libc_flags();
        let created = File::options().write(true).create_new(true).mode(0o600).custom_flags(flags).open(&options.path);
        let file = created.map_err(|reason| Error::Trace { path: options.path.clone(), reason })?;
        // Past this limit, a signal would end the server.
        let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        Ok(Self { file, options: options.clone(), bytes_max: BYTES_MAX.min(limit) })
    }

    /// Returns the path and the file, for one who removes it if the server does not start.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> Result<(PathBuf, File), Error> {
        Ok((self.options.path.clone(), self.file.try_clone()?))
    }
}

fn libc_flags() -> i32 {
    i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0)
}

/// A trace under way; it ends when this is dropped, if not before.
#[derive(Debug)]
pub struct Trace {
    tracer: Arc<Tracer>,
    thread: Option<JoinHandle<()>>,
}

impl Trace {
    /// Begins a trace of all exports of these shares.
    ///
    /// # Errors
    /// [`Error`]: there is no thread.
    pub fn start(file: TraceFile, shares: &[ServedShare]) -> Result<Self, Error> {
        let tracer = Arc::<Tracer>::default();
        let exports: Vec<_> = shares.iter().flat_map(ServedShare::traced).collect();
        for (number, (_, metrics)) in (0..).zip(&exports) {
            metrics.trace(&tracer, number);
        }
        let TraceFile { file, options, bytes_max } = file;
        let mut writer = Writer::new(file, bytes_max, exports);
        let traced = Arc::clone(&tracer);
        let write = move || {
            let outcome = writer.run(&traced, Duration::from_secs(options.seconds));
            // Requests cost nothing from here on.
            traced.close();
            let path = options.path.display();
            match outcome.and_then(|end| writer.end().map(|()| end)) {
                Ok(TraceEnd::Over) => tracing::info!("the trace {path} is complete: {}", writer.summary()),
                Ok(TraceEnd::Full) => {
                    tracing::warn!(
                        "the trace {path} ends early: it has {bytes_max} bytes, the most; {}",
                        writer.summary()
                    );
                }
                Err(error) => {
                    tracing::warn!("the trace {path} ends early: {error}; serving goes on; {}", writer.summary());
                }
            }
        };
        let thread = Some(std::thread::Builder::new().name("trace".into()).spawn(write)?);
        Ok(Self { tracer, thread })
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        self.tracer.close();
        // A panic there was logged.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Why a trace has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TraceEnd {
    /// Its time is over, or the server ends.
    Over,
    /// The file has its maximum length.
    Full,
}

/// An export of a trace.
struct Export {
    metrics: Arc<Metrics>,
    /// The names of operations, once they occur.
    names: [Option<String>; OPERATIONS_MAX],
    kind: &'static str,
    /// The end of the last request in each lane.
    lanes: Vec<u64>,
}

/// Writes events.
struct Writer {
    file: File,
    bytes_max: u64,
    exports: Vec<Export>,
    /// Events that are not written yet.
    text: String,
    /// The length of the file up to its last whole event.
    complete_bytes: u64,
    requests: u64,
    left_out: u64,
}

impl Writer {
    fn new(file: File, bytes_max: u64, exports: Vec<((&'static str, String), Arc<Metrics>)>) -> Self {
        let mut text = String::new();
        for (number, ((_, name), _)) in exports.iter().enumerate() {
            separate(&mut text, 0);
            // `printable` escapes what a terminal takes for a command, and this what JSON does not allow.
            let name = serde_json::Value::from(printable(name).as_ref());
            let pid = number + 1;
            let _ = write!(text, r#"{{"name":"process_name","ph":"M","pid":{pid},"tid":1,"args":{{"name":{name}}}}}"#);
        }
        let exports = exports.into_iter().map(|((kind, _), metrics)| {
            let names = [const { None }; OPERATIONS_MAX];
            Export { metrics, names, kind, lanes: Vec::new() }
        });
        let exports = exports.collect();
        Self { file, bytes_max, exports, text, complete_bytes: 0, requests: 0, left_out: 0 }
    }

    /// Writes what ends until the trace does.
    fn run(&mut self, tracer: &Tracer, duration: Duration) -> io::Result<TraceEnd> {
        let mut requests = Vec::new();
        loop {
            let left = duration.saturating_sub(tracer.elapsed());
            if left.is_zero() {
                tracer.close();
            }
            let is_last = !tracer.is_open();
            requests.clear();
            self.left_out += tracer.take(left.min(INTERVAL), &mut requests);
            for request in &requests {
                self.add(request);
            }
            if self.complete_bytes + self.text.len() as u64 + END.len() as u64 > self.bytes_max {
                return Ok(TraceEnd::Full);
            }
            self.flush()?;
            // What ended between these two looks is in the queue.
            if is_last {
                return Ok(TraceEnd::Over);
            }
        }
    }

    fn add(&mut self, request: &TracedRequest) {
        let TracedRequest { export: number, operation, begin_ns, latency_ns, outcome } = *request;
        let Some(export) = self.exports.get_mut(number as usize) else { return };
        let (lane, kind) = (lane(&mut export.lanes, begin_ns, begin_ns.saturating_add(latency_ns)), export.kind);
        let metrics = &export.metrics;
        let name =
            export.names[operation.min(OPERATIONS_MAX - 1)].get_or_insert_with(|| metrics.operation_name(operation));
        let (begin, duration) = (Microseconds(begin_ns), Microseconds(latency_ns));
        let (pid, tid) = (number + 1, lane + 1);
        separate(&mut self.text, self.complete_bytes);
        let _ = write!(
            self.text,
            r#"{{"name":"{name}","cat":"{kind}","ph":"X","pid":{pid},"tid":{tid},"ts":{begin},"dur":{duration},"args":{{"#
        );
        let _ = match outcome {
            Ok(bytes) => write!(self.text, r#""bytes":{bytes}}}}}"#),
            Err(errno) => write!(self.text, r#""error":"{}"}}}}"#, errno_name(errno.raw_os_error())),
        };
        self.requests += 1;
    }

    /// Writes the events so far. After a failure the file ends with the last event that was written before.
    fn flush(&mut self) -> io::Result<()> {
        let outcome = self.file.write_all(self.text.as_bytes());
        match &outcome {
            Ok(()) => self.complete_bytes += self.text.len() as u64,
            // A full disk may have room for the end of the array where a part of an event was.
            Err(_) => {
                let _ = self.file.set_len(self.complete_bytes);
                let _ = io::Seek::seek(&mut self.file, io::SeekFrom::Start(self.complete_bytes));
                let _ = self.file.write_all(if self.complete_bytes == 0 { b"[]\n" } else { END });
            }
        }
        self.text.clear();
        outcome
    }

    /// Ends the array. A viewer does not need that: it accepts the file of a server that was killed.
    fn end(&mut self) -> io::Result<()> {
        self.file.write_all(if self.complete_bytes == 0 { b"[]\n" } else { END })
    }

    fn summary(&self) -> String {
        let left_out =
            if self.left_out > 0 { format!(", {} more were too many", self.left_out) } else { String::new() };
        format!("{} requests{left_out}", self.requests)
    }
}

/// What stands before an event, at this length of the file.
fn separate(text: &mut String, complete_bytes: u64) {
    text.push_str(if text.is_empty() && complete_bytes == 0 { "[\n" } else { ",\n" });
}

/// Viewers show events of one thread below each other only if one contains the other. So each lane, as a thread, has requests that
/// follow each other.
fn lane(lanes: &mut Vec<u64>, begin_ns: u64, end_ns: u64) -> usize {
    let lane = lanes.iter().position(|end| *end <= begin_ns).unwrap_or_else(|| {
        if lanes.len() < LANES_MAX {
            lanes.push(0);
        }
        lanes.len() - 1
    });
    lanes[lane] = lanes[lane].max(end_ns);
    lane
}

/// Nanoseconds as microseconds with decimals, the unit of the format.
struct Microseconds(u64);

impl fmt::Display for Microseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use serde_json::Value;

    fn options(text: &str) -> Result<TraceOptions, String> {
        text.parse()
    }

    #[test]
    fn a_file_may_have_seconds_behind_it() {
        for (text, path, seconds) in
            [("/a", "/a", 10), ("a,b,seconds=1", "a,b", 1), ("/a,seconds=600", "/a", 600), ("/a,b", "/a,b", 10)]
        {
            let found = options(text).expect(text);
            assert_eq!(found, TraceOptions { path: path.into(), seconds }, "{text}");
            assert_eq!(options(&found.to_string()), Ok(found));
        }
        for (text, why) in [
            ("", "no file"),
            (",seconds=3", "no file"),
            ("/a,seconds=0", "1 to 600"),
            ("/a,seconds=601", "1 to 600"),
            ("/a,seconds=18446744073709551616", "1 to 600"),
            ("/a,seconds=-1", "1 to 600"),
            ("/a,seconds=", "1 to 600"),
        ] {
            let said = options(text).expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    #[test]
    fn a_trace_is_never_written_to_a_file_that_exists() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "kept").expect("it can be written");
        std::os::unix::fs::symlink("nothing", at("link")).expect("it can be made");
        for name in ["file", "link"] {
            let said = TraceFile::create(&TraceOptions { path: at(name), seconds: 1 }).expect_err(name).to_string();
            assert!(said.contains(name) && said.contains("remove it"), "{said}");
        }
        assert_eq!(std::fs::read_to_string(at("file")).expect("it is there"), "kept");
        assert!(!at("nothing").exists());
    }

    #[test]
    fn requests_at_the_same_time_are_in_different_lanes() {
        let mut lanes = Vec::new();
        for (begin, end, expected) in [(0, 10, 0), (10, 20, 0), (5, 21, 1), (6, 22, 2), (21, 30, 0), (22, 31, 1)] {
            assert_eq!(lane(&mut lanes, begin, end), expected, "{begin}..{end}");
        }
        for _ in 0..2 * LANES_MAX {
            assert!(lane(&mut lanes, 0, 100) < LANES_MAX);
        }
        assert_eq!(lanes.len(), LANES_MAX);
    }

    /// A writer for one export with this name, and its file.
    fn writer(name: &str, bytes_max: u64) -> (Writer, Arc<Metrics>, Arc<Tracer>, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let metrics = Arc::new(Metrics::new(|operation| format!("operation {operation}")));
        let tracer = Arc::<Tracer>::default();
        metrics.trace(&tracer, 0);
        let exports = vec![(("mount", name.to_owned()), Arc::clone(&metrics))];
        let writer = Writer::new(file.reopen().expect("it is there"), bytes_max, exports);
        (writer, metrics, tracer, file)
    }

    fn events(file: &tempfile::NamedTempFile) -> Vec<Value> {
        let text = std::fs::read_to_string(file.path()).expect("it is there");
        assert!(text.lines().all(|line| printable(line) == line), "{text:?}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn events_are_json_whatever_exports_are_called() {
        let hostile = "a\"b\\c\n\x1b[2J\u{202e}\u{0}";
        let (mut writer, metrics, tracer, file) = writer(hostile, BYTES_MAX);
        let timer = metrics.begin(3);
        metrics.end(timer, Ok(4096));
        let timer = metrics.begin(3);
        metrics.end(timer, Err(ferry_vfs::Errno::NOENT));
        tracer.close();
        assert_eq!(writer.run(&tracer, Duration::from_secs(9)).expect("there is room"), TraceEnd::Over);
        writer.end().expect("there is room");
        let events = events(&file);
        assert_eq!(events.len(), 3, "{events:?}");
        assert_eq!(events[0]["args"]["name"], printable(hostile).as_ref());
        assert_eq!((&events[1]["name"], &events[1]["args"]["bytes"]), (&"operation 3".into(), &4096.into()));
        assert_eq!(events[2]["args"]["error"], "ENOENT");
        assert!(events[1]["ts"].is_number() && events[1]["dur"].as_f64() > Some(0.0) && events[1]["ph"] == "X");
        assert_eq!(writer.summary(), "2 requests");
    }

    #[test]
    fn a_trace_without_exports_or_requests_is_an_array() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let tracer = Tracer::default();
        tracer.close();
        let mut writer = Writer::new(file.reopen().expect("it is there"), BYTES_MAX, Vec::new());
        writer.run(&tracer, Duration::from_secs(1)).expect("there is room");
        writer.end().expect("there is room");
        assert!(events(&file).is_empty());
    }

    #[test]
    fn a_trace_has_a_maximum_length() {
        let (mut writer, metrics, tracer, file) = writer("name", 4096);
        let count = AtomicUsize::new(0);
        let is_over = AtomicBool::new(false);
        let end = std::thread::scope(|scope| {
            let load = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let timer = metrics.begin(1);
                    metrics.end(timer, Ok(0));
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            let end = writer.run(&tracer, Duration::from_secs(60));
            is_over.store(true, Ordering::Relaxed);
            load.join().expect("it ends");
            end
        });
        assert_eq!(end.expect("there is room"), TraceEnd::Full);
        writer.end().expect("there is room");
        assert!(file.path().metadata().expect("it is there").len() <= 4096);
        assert!(events(&file).len() < count.load(Ordering::Relaxed));
    }

    #[test]
    fn a_full_disk_ends_a_trace_with_whole_events() {
        let (mut writer, metrics, tracer, _file) = writer("name", BYTES_MAX);
        writer.file = File::options().write(true).open("/dev/full").expect("Linux has it");
        let timer = metrics.begin(1);
        metrics.end(timer, Ok(0));
        tracer.close();
        let error = writer.run(&tracer, Duration::from_secs(9)).expect_err("it is full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}
