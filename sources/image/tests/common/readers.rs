//! Everything that a client may ask of a source, and what the log says meanwhile.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use ferry_image::Source;
use ferry_vfs::{
    Caller, Data, DirItem, DirOutput, DirRange, Entry, Errno, FileSystem, Handle, Ino, IoRange, Mappable, Name, OFlags,
    Seek, SessionId,
};
use tracing::field::{Field, Visit};
use tracing::span;

/// A damaged image may lead to the same inodes for ever.
const LOOKS_MAX: usize = 400;
/// Entries of one directory that are looked at.
const NAMES_MAX: usize = 300;

/// Lines of the log.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// What is logged by this thread meanwhile.
    pub fn of<T>(act: impl FnOnce() -> T) -> (T, Vec<String>) {
        let log = Self::default();
        let done = tracing::subscriber::with_default(log.clone(), act);
        let lines = std::mem::take(&mut *log.0.lock().expect("nobody panics with it"));
        (done, lines)
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("strings take all");
        }
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().expect("nobody panics with it").push(line.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// The names of a directory, and where to go on after the last one.
#[derive(Default)]
struct Names(Vec<(Vec<u8>, Option<Ino>)>, u64);

impl DirOutput for Names {
    fn fits(&self, _: &[u8]) -> bool {
        self.0.len() < NAMES_MAX
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.0.push((item.name.to_vec(), entry.map(|entry| entry.ino)));
        self.1 = item.next;
    }
}

/// Asks for everything, by each way that clients have; answers the errors.
pub fn ask_all(source: &Source) -> BTreeSet<i32> {
    let caller = Caller { session: SessionId::unique(), uid: 0, gid: 0, pid: 1, groups: &[] };
    let mut errors = BTreeSet::new();
    let (mut seen, mut left) = (HashSet::new(), vec![Ino::ROOT]);
    while let Some(ino) = left.pop() {
        if seen.len() == LOOKS_MAX {
            break;
        }
        if !seen.insert(ino) {
            continue;
        }
        let mut note = |error: Errno| {
            errors.insert(error.raw_os_error());
        };
        for plus in [true, false] {
            let (mut names, mut offset) = (Names::default(), 0);
            // Twice, for it is gone on with where it ended.
            for _ in 0..2 {
                let at = DirRange { ino, handle: Handle(ino.0), offset, plus };
                source.readdir(&caller, &at, &mut names).unwrap_or_else(&mut note);
                offset = names.1;
            }
            for (name, found) in names.0 {
                if matches!(&*name, b"." | b"..") {
                    continue;
                }
                let name = Name::new(&name).expect("no source hands out what is no name");
                match source.lookup(&caller, ino, name) {
                    Ok(entry) => left.push(entry.ino),
                    Err(error) => note(error),
                }
                left.extend(found);
            }
        }
        source.lookup_parent(&caller, ino).map(drop).unwrap_or_else(&mut note);
        source.lookup_self(&caller, ino).map(drop).unwrap_or_else(&mut note);
        source.getattr(&caller, ino, None).map(drop).unwrap_or_else(&mut note);
        source.readlink(&caller, ino).map(drop).unwrap_or_else(&mut note);
        source.getxattr(&caller, ino, b"user.one").map(drop).unwrap_or_else(&mut note);
        source.listxattr(&caller, ino).map(drop).unwrap_or_else(&mut note);
        let Ok(handle) = source.open(&caller, ino, OFlags::empty()) else { continue };
        for offset in [0, 1, 4095, 65_536, 199_000, u64::MAX] {
            let at = IoRange {
                ino,
                handle,
                offset,
                len: 70_000,
                flags: OFlags::empty(),
                clear_privileges: false,
                owner: None,
            };
            let mut bytes = Vec::new();
            match source.read(&caller, &at, &mut bytes) {
                Ok(Data::Bytes(count)) => assert!(count == bytes.len() && count <= 70_000),
                Ok(Data::Extent(_)) => {}
                Err(error) => note(error),
            }
            source.map_pieces(&caller, ino, offset / 4096 * 4096, 1 << 20).map(drop).unwrap_or_else(&mut note);
            for seek in [Seek::Data, Seek::Hole] {
                source.lseek(&caller, ino, handle, offset, seek).map(drop).unwrap_or_else(&mut note);
            }
        }
        let _ = source.backing(&caller, ino, handle);
    }
    errors
}
