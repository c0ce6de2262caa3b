//! What the tests of all sources share: short names for the contract's verbs, and listings.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc, reason = "each test uses some of it")]

use ferry_vfs::*;

/// Somebody with a session of its own.
pub fn caller() -> Caller<'static> {
    Caller { session: SessionId::unique(), ..Caller::default() }
}

pub fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).unwrap()
}

pub fn new(mode: u32) -> CreateArgs {
    CreateArgs { mode, ..CreateArgs::default() }
}

pub fn range(ino: Ino, handle: Handle, offset: u64, len: usize, flags: OFlags) -> IoRange {
    IoRange { ino, handle, offset, len: len.try_into().unwrap(), flags, clear_privileges: false, owner: None }
}

/// Lists a directory, `per_call` names at a time; the references of a plus listing are kept.
pub fn list(fs: &impl FileSystem, cx: &Caller<'_>, ino: Ino, plus: bool, per_call: usize) -> Vec<Line> {
    let handle = fs.opendir(cx, ino, OFlags::RDONLY).unwrap();
    let mut lines = Vec::new();
    loop {
        let offset = lines.last().map_or(0, |line: &Line| line.next);
        let mut out = Listing { lines: Vec::new(), max: per_call };
        fs.readdir(cx, &DirRange { ino, handle, offset, plus }, &mut out).unwrap();
        if out.lines.is_empty() {
            break;
        }
        lines.append(&mut out.lines);
    }
    fs.releasedir(cx, ino, handle);
    lines
}

/// One line of a listing.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    pub kind: FileType,
    pub ino: u64,
    pub next: u64,
    pub entry: Option<Entry>,
}

/// Takes at most `max` lines.
pub struct Listing {
    pub lines: Vec<Line>,
    pub max: usize,
}

impl DirOutput for Listing {
    fn fits(&self, _: &[u8]) -> bool {
        self.lines.len() < self.max
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        assert!(self.lines.len() < self.max, "pushed without asking");
        self.lines.push(Line {
            name: String::from_utf8_lossy(item.name).into_owned(),
            kind: item.kind,
            ino: item.ino,
            next: item.next,
            entry: entry.copied(),
        });
    }
}
