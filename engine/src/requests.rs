//! The request log, which can be switched on and off at run time.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError, RwLock};
use std::time::Instant;

use ferry_vfs::{Errno, Ino, OFlags, SetAttr};

use ferry_vfs::sync::lock;

/// The maximum number of inodes in a [`Filter`].
pub const INODES_MAX: usize = 16;
/// The logged bytes of an operation: names fit, values of extended attributes are cut.
const SHOWN_BYTES_MAX: usize = 400;

/// Which requests are logged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Requests of this share, by the name that its exports use; `None`: of all shares.
    pub share: Option<String>,
    /// Requests about these inodes (for a name, its directory); only the first [`INODES_MAX`] count; empty: all.
    pub inodes: Vec<Ino>,
}

/// Whether there is a filter: the only check while logging is off.
static ON: AtomicBool = AtomicBool::new(false);
static FILTER: RwLock<Option<Filter>> = RwLock::new(None);
/// The paths of inodes that were found while requests were logged, per share.
static PATHS: LazyLock<Mutex<HashMap<(String, Ino), String>>> = LazyLock::new(Mutex::default);
/// The maximum number of paths: some ten MB.
const PATHS_MAX: usize = 1 << 16;

/// Logs the requests that match the filter, at level `info` and target `ferry_engine::requests`; `None`: no more.
pub fn watch(filter: Option<Filter>) {
    let filter = filter.map(|mut filter| {
        filter.inodes.truncate(INODES_MAX);
        filter
    });
    let mut current = FILTER.write().unwrap_or_else(PoisonError::into_inner);
    ON.store(filter.is_some(), Ordering::Relaxed);
    if filter.is_none() {
        *lock(&PATHS) = HashMap::new();
    }
    *current = filter;
}

/// Records the name of an inode, which later log lines show, if requests are logged.
pub fn record_name(share: &str, (dir, name): (Ino, &[u8]), ino: Ino) {
    if !is_on() {
        return;
    }
    let name = String::from_utf8_lossy(name);
    let path = match dir {
        Ino::ROOT => format!("/{name}"),
        _ => match lock(&PATHS).get(&(share.to_owned(), dir)) {
            Some(dir) => format!("{dir}/{name}"),
            None => return,
        },
    };
    set_path(share, ino, path);
}

/// Records the path of an inode from the root, for an inode that will be logged.
pub fn record_path(share: &str, path: &[u8], ino: Ino) {
    set_path(share, ino, format!("/{}", String::from_utf8_lossy(path).trim_start_matches('/')));
}

fn set_path(share: &str, ino: Ino, path: String) {
    let mut paths = lock(&PATHS);
    if paths.len() >= PATHS_MAX {
        paths.clear();
    }
    paths.insert((share.to_owned(), ino), path);
}

/// Returns the log's name for an inode.
fn file(share: &str, ino: Ino) -> String {
    match ino {
        Ino::ROOT => "/".into(),
        Ino(number) => {
            let path = lock(&PATHS).get(&(share.to_owned(), ino)).cloned();
            path.unwrap_or_else(|| format!("inode {number}"))
        }
    }
}

/// Which requests are logged now.
pub fn watched() -> Option<Filter> {
    FILTER.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Filter {
    fn matches(&self, share: &str, ino: Ino) -> bool {
        self.share.as_deref().is_none_or(|wanted| wanted == share)
            && (self.inodes.is_empty() || self.inodes.contains(&ino))
    }
}

/// Whether any requests are logged.
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The start of a formatted request, so that its data is not formatted to the end.
struct TruncatedText(String);

impl Write for TruncatedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = SHOWN_BYTES_MAX.saturating_sub(self.0.len());
        let fits = text.floor_char_boundary(room.min(text.len()));
        self.0.push_str(&text[..fits]);
        if fits == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

/// A request that is logged when it ends.
#[derive(Debug)]
pub struct LoggedRequest {
    share: String,
    /// Its path, as far as known.
    file: String,
    pid: Option<u32>,
    request: String,
    begun: Instant,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    /// The request succeeded with this many bytes; for data, the number of data bytes.
    Bytes(usize),
    /// Not done.
    Error(Errno),
    /// The reply comes later: when a lock is free, or a transfer ends.
    Waits,
}

impl From<Result<usize, Errno>> for Outcome {
    fn from(result: Result<usize, Errno>) -> Self {
        result.map_or_else(Self::Error, Self::Bytes)
    }
}

impl LoggedRequest {
    /// Begins to log a request, and its process if known. Without a matching filter this costs one load.
    pub fn begin(share: &str, ino: Ino, pid: Option<u32>, operation: &dyn fmt::Debug) -> Option<Box<Self>> {
        if !is_on() {
            return None;
        }
        let filter = FILTER.read().unwrap_or_else(PoisonError::into_inner);
        if !filter.as_ref()?.matches(share, ino) {
            return None;
        }
        drop(filter);
        let mut shown = TruncatedText(String::new());
        if write!(shown, "{operation:?}").is_err() {
            shown.0.push('…');
        }
        Some(Box::new(Self {
            share: share.into(),
            file: file(share, ino),
            pid,
            request: shown.0,
            begun: Instant::now(),
        }))
    }

    /// Logs it.
    pub fn end(self, outcome: Outcome) {
        let Self { share, file, pid, request, begun } = self;
        let us = begun.elapsed().as_micros();
        match outcome {
            Outcome::Bytes(bytes) => {
                tracing::info!(target: "ferry_engine::requests", share, file, pid, bytes, us, "{request}");
            }
            Outcome::Error(error) => {
                tracing::info!(target: "ferry_engine::requests", share, file, pid, %error, us, "{request}");
            }
            Outcome::Waits => {
                tracing::info!(target: "ferry_engine::requests", share, file, pid, waits = true, us, "{request}");
            }
        }
    }
}

/// The permission bits of a mode.
const PERMISSIONS: u32 = 0o7777;

/// Bytes that are usually text: the target of a link, the name of an attribute.
pub struct Text<'a>(pub &'a [u8]);

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.0))
    }
}

/// The permissions of a new file.
#[derive(Clone, Copy, Debug)]
pub struct Mode(pub u32);

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, " mode {:04o}", self.0 & PERMISSIONS)
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug)]
pub struct Access(pub OFlags);

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 & OFlags::ACCMODE {
            OFlags::RDONLY => " for reading",
            OFlags::WRONLY => " for writing",
            _ => " for reading and writing",
        })?;
        (self.0 - OFlags::ACCMODE).iter_names().try_for_each(|(name, _)| write!(f, ", O_{name}"))
    }
}

/// Returns what an fsync makes durable, as the log shows it.
#[must_use]
pub fn of_data(only: bool) -> &'static str {
    if only { " of data alone" } else { "" }
}

/// Formats the attributes that a request sets.
///
/// # Errors
///
/// Those of the formatter.
pub fn setattr(f: &mut fmt::Formatter<'_>, set: &SetAttr) -> fmt::Result {
    write!(f, "Setattr")?;
    if let Some(mode) = set.mode {
        write!(f, "{}", Mode(mode))?;
    }
    for (name, value) in [("uid", set.uid.map(u64::from)), ("gid", set.gid.map(u64::from)), ("size", set.size)] {
        if let Some(value) = value {
            write!(f, " {name} {value}")?;
        }
    }
    let times = [(set.atime.is_some(), "atime"), (set.mtime.is_some(), "mtime"), (set.ctime.is_some(), "ctime")];
    times.iter().filter(|(is_set, _)| *is_set).try_for_each(|(_, name)| write!(f, " {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_matches_its_share_and_inodes() {
        let filter = |share: Option<&str>, inodes: &[u64]| Filter {
            share: share.map(Into::into),
            inodes: inodes.iter().copied().map(Ino).collect(),
        };
        for (filter, share, ino, through) in [
            (filter(None, &[]), "a", 1, true),
            (filter(Some("a"), &[]), "a", 1, true),
            (filter(Some("b"), &[]), "a", 1, false),
            (filter(None, &[2, 3]), "a", 3, true),
            (filter(None, &[2, 3]), "a", 1, false),
            (filter(Some("a"), &[1]), "b", 1, false),
        ] {
            assert_eq!(filter.matches(share, Ino(ino)), through, "{filter:?} {share} {ino}");
        }
    }

    #[test]
    fn access_modes_are_formatted() {
        for (flags, text) in [
            (OFlags::RDONLY, " for reading"),
            (OFlags::WRONLY | OFlags::TRUNC, " for writing, O_TRUNC"),
            (OFlags::RDWR | OFlags::APPEND, " for reading and writing, O_APPEND"),
        ] {
            assert_eq!(Access(flags).to_string(), text);
        }
    }

    #[test]
    fn requests_outside_the_filter_are_not_formatted() {
        #[derive(Debug)]
        struct Statfs;
        // An inode that no other concurrent test uses.
        let ino = Ino(0xdeb0_6001);
        let begin_of = |ino| LoggedRequest::begin("share", ino, Some(1), &Statfs);
        let begin = || begin_of(ino);
        assert!(begin().is_none());
        let inodes = (0..20).map(|index| Ino(ino.0 + index)).collect();
        watch(Some(Filter { share: None, inodes }));
        assert_eq!(watched().unwrap().inodes.len(), INODES_MAX);
        assert!(begin().is_some_and(|watched| watched.request == "Statfs"));
        let named = |ino| begin_of(ino).map(|watched| watched.file);
        let of = |at: u64| Ino(ino.0 + at);
        assert_eq!(named(of(1)).as_deref(), Some(&*format!("inode {}", of(1).0)));
        record_name("share", (Ino::ROOT, b"a"), of(1));
        record_name("share", (of(1), b"b"), of(2));
        record_name("share", (of(9), b"c"), of(3));
        record_path("share", b"d/e", of(4));
        let files = [of(1), of(2), of(3), of(4)].map(|ino| named(ino).unwrap());
        assert_eq!(files, ["/a".into(), "/a/b".into(), format!("inode {}", of(3).0), "/d/e".into()]);
        let value = [b'x'; 4096];
        let shown = LoggedRequest::begin("share", ino, None, &value).unwrap().request;
        assert!(shown.len() < SHOWN_BYTES_MAX + 4 && shown.ends_with('…'), "{shown}");
        watch(None);
        assert!(begin().is_none());
    }
}
