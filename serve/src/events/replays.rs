//! The event that a client's agent replays, and placeholders for files that are gone.

use std::collections::HashMap;

use ferry_vfs::{Attr, Event, FileType, Ino, NameBuf};

/// The most placeholders of one client. Beyond that all are dropped, and replays to their files fail.
const PLACEHOLDERS_MAX: usize = 4096;
/// The first inode number of placeholders. Numbers that the client knows already are skipped.
const PLACEHOLDERS_FIRST: u64 = 0xfe57_0000_0000_0000;
/// A directory and a name in it.
pub(crate) type At = (Ino, NameBuf);

/// An inode that exists only in the client's kernel.
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
    /// The call was replayed: the name is looked up as any other from now on.
    pub(crate) is_done: bool,
    /// The created name refers to a placeholder.
    pub(crate) is_gone: bool,
    /// The agent has requested the attributes.
    pub(crate) has_attributes: bool,
    /// Events were lost, so the client's name of the inode may belong to another inode by now.
    pub(crate) is_unsure: bool,
}

/// The replay of one client, and its placeholders.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    pub(crate) active: Option<Active>,
    pub(crate) placeholders: HashMap<At, Placeholder>,
    last: u64,
}

impl Replays {
    /// Returns the event that this thread replays.
    pub(crate) fn active(&mut self, pid: u32) -> Option<&mut Active> {
        self.active.as_mut().filter(|active| active.pid == pid)
    }

    /// Takes an event that another thread announced and did not replay: that agent was killed.
    pub(crate) fn take_interrupted(&mut self, pid: u32) -> Option<(u64, Event)> {
        let active = self.active.take_if(|active| active.pid != pid && !active.is_done)?;
        Some((active.number, active.event))
    }

    pub(crate) fn placeholder(&self, ino: Ino) -> Option<Placeholder> {
        self.placeholders.values().find(|placeholder| placeholder.ino == ino).copied()
    }

    /// Returns the placeholder of a name; creates one if there is none of that type. `is_known`: whether the client
    /// knows a number already.
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
