//! What a client's agent replays, and placeholders for what has gone since.

use std::collections::HashMap;

use ferry_vfs::{Attr, Event, FileType, Ino, NameBuf};

/// The most placeholders of one client. With more, replays to the files of earlier ones fail.
const PLACEHOLDERS_MAX: usize = 4096;
/// Where the numbers of placeholders begin. Those that the client knows for another inode are skipped.
const PLACEHOLDERS_FIRST: u64 = 0xfe57_0000_0000_0000;
/// A name that has gone from the source.
pub(crate) type At = (Ino, NameBuf);

/// An inode that only the client's kernel knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placeholder {
    pub(crate) ino: Ino,
    /// File type and permissions.
    pub(crate) mode: u32,
}

impl Placeholder {
    pub(crate) fn attr(self) -> Attr {
        Attr { ino: self.ino.0, mode: self.mode, nlink: 1, blksize: 4096, ..Attr::default() }
    }
}

/// The event that is being replayed.
#[derive(Debug)]
pub(crate) struct Active {
    /// The thread of the agent.
    pub(crate) pid: u32,
    pub(crate) number: u64,
    pub(crate) event: Event,
    /// The call was made: the name is looked up as any other from now on.
    pub(crate) is_done: bool,
    /// The name that was made refers to a placeholder.
    pub(crate) is_gone: bool,
    /// The attributes were asked for.
    pub(crate) has_attributes: bool,
    /// Events were lost: the name under which the client has the inode may be that of another by now.
    pub(crate) is_unsure: bool,
}

/// What is being replayed in a client, and its placeholders.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    pub(crate) active: Option<Active>,
    pub(crate) placeholders: HashMap<At, Placeholder>,
    last: u64,
}

impl Replays {
    /// The event that this thread replays.
    pub(crate) fn active(&mut self, pid: u32) -> Option<&mut Active> {
        self.active.as_mut().filter(|active| active.pid == pid)
    }

    /// Takes the event that another thread has announced and not replayed: an agent was killed.
    pub(crate) fn take_interrupted(&mut self, pid: u32) -> Option<(u64, Event)> {
        let active = self.active.take_if(|active| active.pid != pid && !active.is_done)?;
        Some((active.number, active.event))
    }

    pub(crate) fn placeholder(&self, ino: Ino) -> Option<Placeholder> {
        self.placeholders.values().find(|placeholder| placeholder.ino == ino).copied()
    }

    /// The placeholder of a name, a new one if it has none of that type. `is_known`: the client knows the number otherwise.
    pub(crate) fn add_placeholder(&mut self, at: At, kind: FileType, is_known: impl Fn(Ino) -> bool) -> Placeholder {
        let mode = kind.as_raw_mode() | if kind == FileType::Directory { 0o700 } else { 0o600 };
        if let Some(known) = self.placeholders.get(&at).filter(|known| known.mode == mode) {
            return *known;
        }
        if self.placeholders.len() >= PLACEHOLDERS_MAX {
            self.placeholders.clear();
        }
        let ino = loop {
            let ino = Ino(PLACEHOLDERS_FIRST + self.last % (1 << 32));
            self.last += 1;
            if !is_known(ino) {
                break ino;
            }
        };
        let placeholder = Placeholder { ino, mode };
        self.placeholders.insert(at, placeholder);
        placeholder
    }
}
