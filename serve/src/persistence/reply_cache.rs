//! Replays of non-idempotent requests after a restart.
//!
//! The first one notes that it begins, and what it answers. The second one gives that answer, if there is one. If there is
//! none, the first one ended somewhere between the two: then the request is carried out, and what shows that it had been
//! already (a name that is there, or is gone) is no error. Of a request that takes a name away it is noted which inode had that
//! name: if another one has it, the request was carried out, or somebody else was first.

use std::sync::Arc;

use ferry_engine::{Carrier, ReplyBuffer, TransferRequest};
use ferry_state::JournalEntry;
use ferry_vfs::{
    Attr, CreateArgs, Entry, Errno, FallocateFlags, FileType, Handle, Ino, Name, OFlags, RenameFlags, Result, SetAttr,
    Timespec, XattrFlags,
};
use ferry_wire::fuse::{Operation, Reply};

use crate::carrier::{FuseCarrier, Served};
use crate::reply;
use crate::server::{Context, Server};

/// The longest answer of these requests: that to CREATE.
const ANSWER_BYTES_MAX: usize = 160;

/// The bits of a mode that are no type.
const PERMISSIONS: u32 = 0o7777;
const OWNER_READS_AND_WRITES: u32 = 0o600;

/// A carrier whose reply is seen.
struct RecordingCarrier<'a, C> {
    carrier: &'a mut C,
    answer: [u8; ANSWER_BYTES_MAX],
}

impl<C: FuseCarrier> ReplyBuffer for RecordingCarrier<'_, C> {
    fn room(&self) -> usize {
        self.carrier.room()
    }

    fn write_at(&mut self, offset: usize, bytes: &[u8]) -> usize {
        if let Some(place) = self.answer.get_mut(offset..offset + bytes.len()) {
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

/// Whether the operation, carried out twice, would fail, do something else, or hand out what nobody gives back.
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

/// The name that an operation takes away from its inode, if it is not gone already.
fn removed_name<'a>(operation: &Operation<'a>) -> Option<Name<'a>> {
    match *operation {
        Operation::Unlink { name } | Operation::Rmdir { name } | Operation::Rename { name, .. } => Some(name),
        _ => None,
    }
}

/// What tells of an operation that was begun whether it was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PriorEffect {
    /// The error that it meets the second time, if it was.
    Error,
    /// It was: carried out again, it would do something else.
    Done,
    /// Nothing.
    None,
}

impl Server {
    /// Serves an operation, and does so once if that matters.
    pub(crate) fn serve_with_replay(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        carrier: &mut impl FuseCarrier,
    ) -> Served {
        let is_again = carrier.is_resubmitted();
        if self.journal.is_none() || !is_non_idempotent(operation) || cx.is_of_agent() {
            return self.serve_operation(cx, operation, carrier);
        }
        let entry = if is_again { cx.session.journal_entry(cx.unique) } else { None };
        let (is_begun, note) = match &entry {
            // Of three servers, too, only the first one knows what there was before.
            Some(JournalEntry::Begun(note)) => (true, note.clone()),
            _ => {
                let named = removed_name(operation).and_then(|name| self.identify_name(cx, name));
                // What the client knows has the same number in the next server.
                let known = named.filter(|(ino, _)| cx.session.knows(*ino));
                (false, known.map(|(_, note)| note).unwrap_or_default())
            }
        };
        let Some(journal) = &mut self.journal else { return self.serve_operation(cx, operation, carrier) };
        journal.begin(cx.unique, &note);
        if let Some(JournalEntry::Done(answer)) = entry {
            journal.done(&answer);
            return match answer.is_empty() {
                true => Served::NoReply,
                false => Served::Reply(carrier.write_at(0, &answer)),
            };
        }
        if is_begun && operation.reply_kind().is_none() {
            // References that stay are better than references that go twice.
            journal.done(&[]);
            return Served::NoReply;
        }
        let mut seen = RecordingCarrier { carrier, answer: [0; ANSWER_BYTES_MAX] };
        let trace = if is_begun { self.prior_effect(cx, operation, &note) } else { PriorEffect::Error };
        let served = if trace == PriorEffect::None {
            self.share.ratelimited_log.warn(format_args!(
                "a request that was under way when the server ended may have been carried out: {:?} of inode {}",
                operation.opcode(),
                cx.ino.0
            ));
            Served::Reply(reply::write_error(&mut seen, cx.unique, Errno::IO))
        } else if trace == PriorEffect::Done {
            if let Operation::Rename { name, new_dir, new_name, .. } = *operation {
                cx.session.renamed(&cx.caller, &[(new_dir, new_name), (cx.ino, name)]);
            }
            cx.done(&mut seen, &Reply::Empty)
        } else {
            self.is_replay = is_begun;
            let served = self.serve_operation(cx, operation, &mut seen);
            self.is_replay = false;
            served
        };
        let answer = seen.answer;
        if let Some(journal) = &mut self.journal {
            match served {
                Served::Reply(bytes) => journal.done(answer.get(..bytes).unwrap_or_default()),
                Served::NoReply => journal.done(&[]),
                Served::Transfer | Served::Later | Served::Parked => {}
            }
        }
        served
    }

    /// The inode that has a name now, and what tells it from others that have the name, or its number, later.
    fn identify_name(&self, cx: &Context<'_>, name: Name<'_>) -> Option<(Ino, Vec<u8>)> {
        let source = &self.share.source;
        // Whatever this meets, the operation meets it, too.
        let entry = source.lookup(&cx.caller, cx.ino, name).ok()?;
        source.forget(entry.ino, 1);
        let Timespec { sec, nsec } = entry.attr.btime.unwrap_or_default();
        Some((entry.ino, [entry.ino.0.to_le_bytes(), sec.to_le_bytes(), u64::from(nsec).to_le_bytes()].concat()))
    }

    fn prior_effect(&self, cx: &Context<'_>, operation: &Operation<'_>, note: &[u8]) -> PriorEffect {
        let leaves_something = RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        match *operation {
            _ if moves(operation) => PriorEffect::None,
            Operation::Rename { flags, .. } if note.is_empty() && flags.intersects(leaves_something) => {
                PriorEffect::None
            }
            // If nothing has the name any more, that shows in the error.
            _ => {
                match removed_name(operation).filter(|_| !note.is_empty()).and_then(|name| self.identify_name(cx, name))
                {
                    Some((_, now)) if now != note => PriorEffect::Done,
                    _ => PriorEffect::Error,
                }
            }
        }
    }

    /// An operation that may have been carried out already has failed: returns success if that is why.
    pub(crate) fn error_of_replay(
        &mut self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        errno: Errno,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
        let source = Arc::clone(&self.share.source);
        let there = |dir: Ino, name: Name<'_>| source.lookup(&cx.caller, dir, name);
        match (*operation, errno) {
            (Operation::Mkdir { name, ref new } | Operation::Mknod { name, ref new }, Errno::EXIST) => {
                let entry = there(cx.ino, name)?;
                let is_dir = matches!(operation, Operation::Mkdir { .. });
                let same = match is_dir {
                    true => entry.attr.kind().is_dir(),
                    false => entry.attr.kind() == FileType::from_raw_mode(new.mode),
                };
                self.if_unchanged(same, cx, (name, entry), carrier)
            }
            (Operation::Symlink { name, target }, Errno::EXIST) => {
                let entry = there(cx.ino, name)?;
                let same = source.readlink(&cx.caller, entry.ino).is_ok_and(|there| there == target);
                self.if_unchanged(same, cx, (name, entry), carrier)
            }
            (Operation::Link { from, name }, Errno::EXIST) => {
                let entry = there(cx.ino, name)?;
                if entry.ino == from {
                    cx.session.renamed(&cx.caller, &[(cx.ino, name)]);
                }
                self.if_unchanged(entry.ino == from, cx, (name, entry), carrier)
            }
            (Operation::Create { name, ref new, flags, .. }, Errno::EXIST | Errno::STALE) => {
                self.reopen_created(cx, (name, new), flags, errno, carrier)
            }
            (Operation::Rename { new_dir, new_name, .. }, Errno::NOENT) => {
                let entry = there(new_dir, new_name)?;
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

    /// Opens a file that a server before this one has made for the same request, unless it may be anybody else's.
    fn reopen_created(
        &mut self,
        cx: &Context<'_>,
        (name, new): (Name<'_>, &CreateArgs),
        flags: OFlags,
        errno: Errno,
        carrier: &mut impl FuseCarrier,
    ) -> Result<Served> {
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

    /// Opens it also where its mode keeps its own owner, a server without privileges, from opening it again.
    fn open_created(&self, cx: &Context<'_>, entry: &Entry, new: &CreateArgs, flags: OFlags) -> Result<(Attr, Handle)> {
        let source = &self.share.source;
        let set = |mode| {
            let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
            source.setattr(&cx.caller, entry.ino, None, &set)
        };
        // Rights that it was not made with: a server has ended in the midst of what follows.
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
    ) -> Result<Served> {
        if same {
            // The server before may have ended before it was labelled.
            let entry = self.apply_security_label(cx, entry, None)?;
            return self.entry(cx, Some(name), entry, carrier);
        }
        self.share.source.forget(entry.ino, 1);
        Err(Errno::EXIST)
    }
}

/// Whether a file can be one that was just made for this caller: nobody was told of it, so nobody has written to it, and it is the
/// caller's, or that of a server that makes all files as its own user.
fn may_be_created_by(cx: &Context<'_>, attr: &Attr) -> bool {
    let server = rustix::process::geteuid();
    let is_theirs = cx.caller.uid == 0 || attr.uid == cx.caller.uid || !server.is_root() && attr.uid == server.as_raw();
    is_theirs && attr.kind() == FileType::RegularFile && attr.size == 0
}
