//! READDIR and READDIRPLUS.

use std::sync::Arc;

use ferry_vfs::{DirItem, DirOutput, DirRange, Entry, Errno, FileType, Ino, Name, Result, checks};
use ferry_wire::fuse::{DirWriter, InitFlags, Reply};

use crate::carrier::{HEADER_BYTES, ServeOutcome};
use crate::policy::Policy;
use crate::readdirplus_auto::ListingMode;
use crate::reply::ReplyOutcome;
use crate::server::{Context, Server};
use crate::session::Session;
use ferry_engine::ReplyBuffer;

/// The longest reply, which is assembled in this process's memory. Kernels request far less (`max_pages`).
const LISTING_BYTES_MAX: usize = 1 << 20;

/// A listing that records the references that it counts.
struct Listing<'a> {
    writer: DirWriter<'a>,
    plus: bool,
    session: &'a Session,
    policy: &'a Policy,
    /// The client is not told of all changes in the directory.
    misses_changes: bool,
    referenced: &'a mut Vec<Ino>,
    /// The client does not check ACLs.
    by_modes: bool,
    /// The positions of the entries whose modes may have to change.
    entries: Vec<(usize, Entry)>,
    /// References that the reply does not contain.
    surplus: Vec<Ino>,
    /// The source pushed an entry that did not fit. Later ones are dropped: the client continues after the last
    /// entry.
    full: bool,
    flawed: bool,
    dir: Ino,
    mode: ListingMode,
}

impl DirOutput for Listing<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        !self.full && self.writer.fits(name)
    }

    fn wants(&mut self, name: &[u8], kind: FileType) -> bool {
        // A tree walk needs the inodes of directories, and of entries of unknown type.
        let is_file = !matches!(kind, FileType::Directory | FileType::Unknown);
        match self.mode {
            ListingMode::Dirs => !is_file,
            ListingMode::AllButOne if is_file => {
                self.mode = ListingMode::All;
                self.session.readdirplus_auto.record_omitted(self.dir, name);
                false
            }
            ListingMode::All | ListingMode::AllButOne => true,
        }
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.flawed |= !checks::is_listable(item.name);
        self.full |= !self.writer.fits(item.name);
        // Without the entry the client looks the name up itself and gets an error.
        let has_entry = self.plus && !matches!(item.name, b"." | b"..");
        let valid = entry.filter(|_| has_entry).and_then(|entry| checks::entry(*entry).ok());
        if self.full || self.flawed || valid.is_none() {
            self.surplus.extend(entry.map(|entry| entry.ino).filter(|ino| *ino != Ino(0)));
        }
        if !self.full && !self.flawed {
            let valid = valid.map(|entry| self.session.add_reference(entry));
            if let Some(entry) = &valid {
                self.referenced.push(entry.ino);
                if let Ok(name) = Name::new(item.name) {
                    self.session.removals.record_lookup((self.dir, name), Some(entry.ino));
                }
                if self.by_modes {
                    self.entries.push((self.writer.position(), *entry));
                }
                self.writer.set_dax(self.session.dax(&entry.attr));
                self.writer.set_timeouts(self.policy.timeouts_of(
                    self.session,
                    self.misses_changes,
                    entry.ino,
                    &entry.attr,
                ));
            }
            self.writer.push(item, valid.as_ref());
        }
    }
}

impl Server {
    pub(crate) fn readdir(
        &mut self,
        cx: &Context<'_>,
        at: &DirRange,
        bytes_max: u32,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let room = buffer.room().checked_sub(HEADER_BYTES).ok_or(Errno::IO)?;
        let bytes_max = room.min(bytes_max as usize).min(LISTING_BYTES_MAX);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut referenced = std::mem::take(&mut self.referenced);
        scratch.clear();
        referenced.clear();
        let misses_changes = self.share.policy.misses_changes(cx.session, &*self.share.source, at.ino);
        let timeouts = self.share.policy.timeouts(cx.session, misses_changes);
        let writer = DirWriter::new(&mut scratch, bytes_max, at.plus, timeouts, cx.session.negotiated());
        let share = Arc::clone(&self.share);
        let (plus, session, policy) = (at.plus, &**cx.session, &share.policy);
        let (referred_now, surplus) = (&mut referenced, Vec::new());
        let mode = match plus && self.share.policy.tries_listings() {
            true => session.readdirplus_auto.listing(at.ino, at.offset == 0),
            false => ListingMode::All,
        };
        let by_modes = !cx.session.negotiated().has(InitFlags::POSIX_ACL);
        let mut listing = Listing {
            writer,
            plus,
            session,
            policy,
            misses_changes,
            referenced: referred_now,
            by_modes,
            entries: Vec::new(),
            surplus,
            full: false,
            flawed: false,
            dir: at.ino,
            mode,
        };
        let mut outcome = self.share.source.readdir(&cx.caller, at, &mut listing);
        let Listing { entries, surplus, flawed, .. } = listing;
        // Not during the listing: the source may hold locks.
        for (at, entry) in entries {
            let mode = self.share.source.mode_without_acl(&cx.caller, entry.ino, &entry.attr);
            DirWriter::set_mode(&mut scratch, at, mode);
        }
        surplus.into_iter().for_each(|ino| self.share.source.forget(ino, 1));
        if flawed && outcome.is_ok() {
            self.share.ratelimited_log.warn(format_args!("the source lists an invalid name, in {:?}", at.ino));
            outcome = Err(Errno::IO);
        }
        referenced.iter().for_each(|ino| cx.session.sync_window_before_attr(*ino));
        let written = outcome.map(|()| cx.reply(buffer, &Reply::Bytes(&scratch)));
        if !matches!(written, Ok(ReplyOutcome::Whole(_))) {
            referenced.iter().for_each(|ino| cx.session.forget(*ino, 1));
        }
        self.scratch = scratch;
        self.referenced = referenced;
        written.map(|written| ServeOutcome::Reply(written.bytes()))
    }
}
