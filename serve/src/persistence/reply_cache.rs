//! Replays of non-idempotent requests after a restart.
//!
//! The first request records its start and its reply. A replayed request returns that reply. Without a reply the
//! request runs again; an error that shows that it ran already (name exists, name gone) is success. Before UNLINK,
//! RMDIR and RENAME the target inode is recorded: if the name refers to another inode on replay, the request ran, or
//! another client changed the name first.

use std::sync::Arc;

use ferry_engine::{Carrier, ReplyBuffer, TransferRequest};
use ferry_state::JournalEntry;
use ferry_vfs::{
    Attr, CreateArgs, Entry, Errno, FallocateFlags, FileType, Handle, Ino, Name, OFlags, RenameFlags, Result, SetAttr,
    Timespec, XattrFlags,
};
use ferry_wire::fuse::{Operation, Reply};

use crate::carrier::{FuseCarrier, ServeOutcome};
use crate::reply;
use crate::server::{Context, Server};

/// The longest reply to these requests: that to CREATE.
const REPLY_BYTES_MAX: usize = 160;

/// The permission bits of a mode.
const PERMISSIONS: u32 = 0o7777;
const OWNER_READS_AND_WRITES: u32 = 0o600;

/// A carrier that records the reply.
struct RecordingCarrier<'a, C> {
    carrier: &'a mut C,
    reply: [u8; REPLY_BYTES_MAX],
}

impl<C: FuseCarrier> ReplyBuffer for RecordingCarrier<'_, C> {
    fn room(&self) -> usize {
        self.carrier.room()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        if let Some(place) = self.reply.get_mut(offset..offset + bytes.len()) {
            place.copy_from_slice(bytes);
        }
        self.carrier.write_at(offset, bytes)
    }
}

impl<C: FuseCarrier> Carrier for RecordingCarrier<'_, C> {
    fn read_at(&self, offset: usize, bytes: &mut [u8]) -> usize {
        self.carrier.read_at(offset, bytes)
    }

    fn transfer(&mut self, request: TransferRequest) {
        self.carrier.transfer(request);
    }
}

impl<C: FuseCarrier> FuseCarrier for RecordingCarrier<'_, C> {
    fn request_bytes(&self) -> usize {
        self.carrier.request_bytes()
    }

    fn token(&self) -> u64 {
        self.carrier.token()
    }

    fn is_resubmitted(&self) -> bool {
        self.carrier.is_resubmitted()
    }

    fn later(&self) -> impl FnOnce(Vec<u8>) + Send + 'static {
        self.carrier.later()
    }
}

/// Whether the operation, executed twice, would fail, have another effect, or leak a reference or handle.
fn is_non_idempotent(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Link { .. }
        | Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::Rename { .. }
        | Operation::Open { .. }
        | Operation::Create { .. }
        | Operation::Tmpfile { .. }
        | Operation::Opendir { .. }
        | Operation::Release(_)
        | Operation::Releasedir(_)
        | Operation::Forget { .. }
        | Operation::BatchForget { .. }
        | Operation::Removexattr { .. } => true,
        Operation::Setxattr { flags, .. } => !flags.is_empty(),
        Operation::Fallocate { .. } => moves(operation),
        _ => false,
    }
}

fn moves(operation: &Operation<'_>) -> bool {
    let moving = FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE;
    matches!(operation, Operation::Fallocate { flags, .. } if flags.intersects(moving))
}

/// Returns the name that an operation removes from its inode.
fn removed_name<'a>(operation: &Operation<'a>) -> Option<Name<'a>> {
    match *operation {
        Operation::Unlink { name } | Operation::Rmdir { name } | Operation::Rename { name, .. } => Some(name),
        _ => None,
    }
}

/// How to detect that an operation ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PriorEffect {
    /// It fails the second time.
    Error,
    /// It ran: executed again, it would have another effect.
    Done,
    /// Not detectable.
    Undetectable,
}

impl Server {
    /// Serves an operation; executes it only once if it is not idempotent.
    pub(crate) fn serve_with_replay(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> ServeOutcome {
        let is_resubmitted = carrier.is_resubmitted();
        if self.journal.is_none() || !is_non_idempotent(operation) || cx.is_of_agent() {
            return self.serve_operation(cx, operation, carrier);
        }
        let entry = if is_resubmitted { cx.session.journal_entry(cx.unique) } else { None };
        let (is_begun, note) = match &entry {
            // Only the first of several servers saw the state before the operation.
            Some(JournalEntry::Begun(note)) => (true, note.clone()),
            _ => {
                let named = removed_name(operation).and_then(|name| self.identify_name(cx, name));
                // Inodes that the client knows keep their number in the next server.
                let known = named.filter(|(ino, _)| cx.session.knows(*ino));
                (false, known.map(|(_, note)| note).unwrap_or_default())
            }
        };
        let Some(journal) = &mut self.journal else { return self.serve_operation(cx, operation, carrier) };
        journal.begin(cx.unique, &note);
        if let Some(JournalEntry::Done(reply)) = entry {
            journal.done(&reply);
            return match reply.is_empty() {
                true => ServeOutcome::NoReply,
                false => ServeOutcome::Reply(carrier.write_at(0, &reply)),
            };
        }
        if is_begun && !operation.wants_reply() {
            // A leaked reference is better than one that is released twice.
            journal.done(&[]);
            return ServeOutcome::NoReply;
        }
        let mut recorded = RecordingCarrier { carrier, reply: [0; REPLY_BYTES_MAX] };
        let effect = if is_begun { self.prior_effect(cx, operation, &note) } else { PriorEffect::Error };
        let served = if effect == PriorEffect::Undetectable {
            self.share.ratelimited_log.warn(format_args!(
                "a request that was being served when the previous server ended may have been executed: {:?} of inode {}",
                operation.opcode(),
                cx.ino.0
            ));
            ServeOutcome::Reply(reply::write_error(&mut recorded, cx.unique, Errno::IO))
        } else if effect == PriorEffect::Done {
            if let Operation::Rename { name, new_dir, new_name, .. } = *operation {
                cx.session.renamed(&cx.caller, &[(new_dir, new_name), (cx.ino, name)]);
            }
            cx.done(&mut recorded, &Reply::Empty)
        } else {
            self.is_replay = is_begun;
            let served = self.serve_operation(cx, operation, &mut recorded);
            self.is_replay = false;
            served
        };
        let reply = recorded.reply;
        if let Some(journal) = &mut self.journal {
            match served {
                ServeOutcome::Reply(bytes) => journal.done(reply.get(..bytes).unwrap_or_default()),
                ServeOutcome::NoReply => journal.done(&[]),
                ServeOutcome::Transfer | ServeOutcome::Later | ServeOutcome::Parked => {}
            }
        }
        served
    }

    /// Returns the inode that has a name now, and a note that identifies it even if another inode gets the name or
    /// the number later.
    fn identify_name(&self, cx: &Context<'_>, name: Name<'_>) -> Option<(Ino, Vec<u8>)> {
        let source = &self.share.source;
        // The operation itself reports the error.
        let entry = source.lookup(&cx.caller, cx.ino, name).ok()?;
        source.forget(entry.ino, 1);
        let Timespec { sec, nsec } = entry.attr.btime.unwrap_or_default();
        Some((entry.ino, [entry.ino.0.to_le_bytes(), sec.to_le_bytes(), u64::from(nsec).to_le_bytes()].concat()))
    }

    fn prior_effect(&self, cx: &Context<'_>, operation: &Operation<'_>, note: &[u8]) -> PriorEffect {
        let leaves_name = RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        match *operation {
            _ if moves(operation) => PriorEffect::Undetectable,
            Operation::Rename { flags, .. } if note.is_empty() && flags.intersects(leaves_name) => {
                PriorEffect::Undetectable
            }
            // If the name is gone, the operation fails with ENOENT.
            _ => {
                match removed_name(operation).filter(|_| !note.is_empty()).and_then(|name| self.identify_name(cx, name))
                {
                    Some((_, now)) if now != note => PriorEffect::Done,
                    _ => PriorEffect::Error,
                }
            }
        }
    }

    /// Handles the error of an operation that may have run already: returns success if that is the cause.
    pub(crate) fn error_of_replay(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        errno: Errno,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let source = Arc::clone(&self.share.source);
        let lookup = |dir: Ino, name: Name<'_>| source.lookup(&cx.caller, dir, name);
        match (*operation, errno) {
            (Operation::Mkdir { name, ref new } | Operation::Mknod { name, ref new }, Errno::EXIST) => {
                let entry = lookup(cx.ino, name)?;
                let is_dir = matches!(operation, Operation::Mkdir { .. });
                let same = match is_dir {
                    true => entry.attr.kind().is_dir(),
                    false => entry.attr.kind() == FileType::from_raw_mode(new.mode),
                };
                self.if_unchanged(same, cx, (name, entry), carrier)
            }
            (Operation::Symlink { name, target }, Errno::EXIST) => {
                let entry = lookup(cx.ino, name)?;
                let same = source.readlink(&cx.caller, entry.ino).is_ok_and(|found| found == target);
                self.if_unchanged(same, cx, (name, entry), carrier)
            }
            (Operation::Link { from, name }, Errno::EXIST) => {
                let entry = lookup(cx.ino, name)?;
                if entry.ino == from {
                    cx.session.renamed(&cx.caller, &[(cx.ino, name)]);
                }
                self.if_unchanged(entry.ino == from, cx, (name, entry), carrier)
            }
            (Operation::Create { name, ref new, flags, .. }, Errno::EXIST | Errno::STALE) => {
                self.reopen_created(cx, (name, new), flags, errno, carrier)
            }
            (Operation::Rename { new_dir, new_name, .. }, Errno::NOENT) => {
                let entry = lookup(new_dir, new_name)?;
                source.forget(entry.ino, 1);
                cx.session.renamed(&cx.caller, &[(new_dir, new_name)]);
                Ok(cx.done(carrier, &Reply::Empty))
            }
            (Operation::Unlink { .. } | Operation::Rmdir { .. }, Errno::NOENT)
            | (Operation::Release(_) | Operation::Releasedir(_), Errno::BADF)
            | (Operation::Removexattr { .. }, Errno::NODATA) => Ok(cx.done(carrier, &Reply::Empty)),
            (Operation::Setxattr { flags, .. }, Errno::EXIST) if flags.contains(XattrFlags::CREATE) => {
                Ok(cx.done(carrier, &Reply::Empty))
            }
            _ => Err(errno),
        }
    }

    /// Opens a file that the previous server created for the same request, unless another client may have created it.
    fn reopen_created(
        &mut self,
        cx: &Context<'_>,
        (name, new): (Name<'_>, &CreateArgs),
        flags: OFlags,
        errno: Errno,
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        let source = Arc::clone(&self.share.source);
        let entry = source.lookup(&cx.caller, cx.ino, name)?;
        let opened = match may_be_created_by(cx, &entry.attr) {
            true => self.open_created(cx, &entry, new, flags - OFlags::EXCL - OFlags::TRUNC),
            false => Err(errno),
        };
        let (attr, handle) = opened.inspect_err(|_| source.forget(entry.ino, 1))?;
        let labelled = self.apply_security_label(cx, Entry { attr, ..entry }, None);
        let entry = labelled.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
        self.created(cx, Some(name), (entry, handle), flags, carrier)
    }

    /// Opens a created file, even if its mode denies access to its owner, a server without privileges.
    fn open_created(&self, cx: &Context<'_>, entry: &Entry, new: &CreateArgs, flags: OFlags) -> Result<(Attr, Handle)> {
        let source = &self.share.source;
        let set = |mode| {
            let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
            source.setattr(&cx.caller, entry.ino, None, &set)
        };
        // Permissions that the request did not ask for: the previous server ended during the calls below.
        let extra = entry.attr.mode & OWNER_READS_AND_WRITES & !new.mode;
        let mode = entry.attr.mode & PERMISSIONS & !extra;
        let attr = if extra == 0 { entry.attr } else { set(mode)? };
        match source.open(&cx.caller, entry.ino, flags) {
            Err(Errno::ACCESS) => {
                set(mode | OWNER_READS_AND_WRITES)?;
                let opened = source.open(&cx.caller, entry.ino, flags);
                let (back, handle) = (set(mode), opened?);
                let attr = back.inspect_err(|_| source.release(&cx.caller, entry.ino, handle))?;
                Ok((attr, handle))
            }
            opened => Ok((attr, opened?)),
        }
    }

    fn if_unchanged(
        &mut self,
        same: bool,
        cx: &Context<'_>,
        (name, entry): (Name<'_>, Entry),
        carrier: &mut impl FuseCarrier,
    ) -> Result<ServeOutcome> {
        if same {
            // The previous server may have ended before it set the label.
            let entry = self.apply_security_label(cx, entry, None)?;
            return self.entry(cx, Some(name), entry, carrier);
        }
        self.share.source.forget(entry.ino, 1);
        Err(Errno::EXIST)
    }
}

/// Whether a file may have been created for this caller by the unfinished request: it is empty, because no client
/// knew it, and belongs to the caller, or to the user of a server that creates all files as itself.
fn may_be_created_by(cx: &Context<'_>, attr: &Attr) -> bool {
    let server = rustix::process::geteuid();
    let is_theirs = cx.caller.uid == 0 || attr.uid == cx.caller.uid || !server.is_root() && attr.uid == server.as_raw();
    is_theirs && attr.kind() == FileType::RegularFile && attr.size == 0
}
