//! Tlopen, Tlcreate and Treaddir.

use std::cell::Cell;
use std::sync::Arc;

use ferry_engine::requests;
use ferry_vfs::{
    Attr, CreateArgs, DirItem, DirOutput, DirRange, Entry, Errno, FileType, Handle, Ino, Name, OFlags, Result, SetAttr,
    checks,
};
use ferry_wire::ninep::{DirWriter, Fid, READ_HEAD_BYTES, Reply, encode_data_head, kind};

use super::permission::{SEARCH, wanted};
use super::{Context, ReplyPlace};
use crate::carrier::NinepReply;
use crate::session::{File, Node, State};
use crate::users::User;

/// Flags that are not passed on. Buffers of replies are not aligned for `O_DIRECT`.
const NOT_PASSED: OFlags = OFlags::DIRECT.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW);

impl Context<'_> {
    pub(super) fn open(&self, fid: Fid, flags: OFlags) -> Result<Reply<'static>> {
        let file = self.session.closed(fid)?;
        let (node, user) = (&file.node, file.user);
        let handle = match node.kind {
            FileType::Directory => {
                if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC) {
                    return Err(Errno::ISDIR);
                }
                self.may_open(user, node, flags)?;
                self.share.source.opendir(&self.caller(user, None), node.ino, OFlags::RDONLY)?
            }
            _ => {
                self.may_open(user, node, flags)?;
                self.open_file(node, user, flags)?
            }
        };
        let open = self.session.opened(node, handle, flags - NOT_PASSED - OFlags::TRUNC, user);
        let opened = File { state: State::Open(Arc::clone(&open)), ..File::clone(&file) };
        let attr = self.attr(&opened)?;
        if flags.contains(OFlags::TRUNC) {
            self.session.client_ends.resized(node.ino, 0);
        }
        open.found(self.session, attr.size);
        let qid = node.qid(&attr);
        self.session.replace(fid, &file, opened)?;
        Ok(Reply::Open { qid, iounit: 0 })
    }

    /// Opens a file that is no directory.
    fn open_file(&self, node: &Node, user: User, flags: OFlags) -> Result<Handle> {
        match node.kind {
            FileType::RegularFile if flags.contains(OFlags::DIRECTORY) => return Err(Errno::NOTDIR),
            FileType::RegularFile => {}
            FileType::Symlink => return Err(Errno::LOOP),
            // The client's kernel implements these; an open here would access this host's devices.
            FileType::BlockDevice | FileType::CharacterDevice => return Err(Errno::ACCESS),
            _ => return Err(Errno::NXIO),
        }
        let (source, cx) = (&self.share.source, self.caller(user, None));
        let truncate_apart = user.clears_privileges() && flags.contains(OFlags::TRUNC);
        let plain = flags - NOT_PASSED;
        let handle = source.open(&cx, node.ino, if truncate_apart { plain - OFlags::TRUNC } else { plain })?;
        // Truncates separately so that suid and sgid are cleared: the host's kernel would keep them at an open by
        // this process.
        let truncate = SetAttr { size: Some(0), clear_privileges: true, ..SetAttr::default() };
        if truncate_apart && let Err(errno) = source.setattr(&self.writer(user), node.ino, Some(handle), &truncate) {
            source.release(&cx, node.ino, handle);
            return Err(errno);
        }
        Ok(handle)
    }

    /// Creates and opens a file; the fid changes from the directory to the file.
    pub(super) fn create(
        &self,
        fid: Fid,
        name: Name<'_>,
        flags: OFlags,
        (mode, gid): (u32, u32),
    ) -> Result<Reply<'static>> {
        let dir = self.session.closed(fid)?;
        if dir.node.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        let user = dir.user;
        let mode = FileType::RegularFile.as_raw_mode() | mode;
        let new = CreateArgs { mode, umask: 0, rdev: 0 };
        let (node, attr, handle) = match self.create_or_open(&dir, name, flags, &new, gid) {
            // Another client has created it in between.
            Err(Errno::EXIST) if opens_what_is_there(user, flags) => {
                self.create_or_open(&dir, name, flags, &new, gid)?
            }
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => self.open_shown(&dir, name, flags)?,
            other => other?,
        };
        self.session.removals.record_lookup((dir.node.ino, name), Some(node.ino));
        requests::record_name(&self.share.options.name, (dir.node.ino, name.as_bytes()), node.ino);
        let open = self.session.opened(&node, handle, flags - NOT_PASSED - OFlags::TRUNC - OFlags::EXCL, user);
        if flags.contains(OFlags::TRUNC) {
            self.session.client_ends.resized(node.ino, 0);
        }
        let size = if flags.contains(OFlags::TRUNC) { 0 } else { attr.size };
        open.found(self.session, size);
        let qid = node.qid(&attr);
        let place = Some(self.session.place(&dir.node, name));
        let file = File { node, place, user, root: dir.root, state: State::Open(open) };
        self.session.replace(fid, &dir, file)?;
        Ok(Reply::Create { qid, iounit: 0 })
    }

    fn create_or_open(
        &self,
        dir: &File,
        name: Name<'_>,
        flags: OFlags,
        new: &CreateArgs,
        gid: u32,
    ) -> Result<(Arc<Node>, Attr, Handle)> {
        let (source, user) = (&self.share.source, dir.user);
        if opens_what_is_there(user, flags) {
            self.may(user, &dir.node, SEARCH)?;
            // An existing file is only opened, with the permissions for that.
            match source.lookup(&self.caller(user, None), dir.node.ino, name) {
                Ok(entry) => {
                    let (node, attr) = self.session.node(entry)?;
                    if node.kind == FileType::Directory {
                        return Err(Errno::ISDIR);
                    }
                    self.may_open_by_creating(dir, &attr)?;
                    self.may_open(user, &node, flags)?;
                    let handle = self.open_file(&node, user, flags)?;
                    return Ok((node, attr, handle));
                }
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        self.may_add(dir)?;
        let cx = self.caller(user, Some(gid));
        let flags = (flags | OFlags::EXCL) - NOT_PASSED - OFlags::TRUNC;
        let (entry, handle) = source.create(&cx, dir.node.ino, name, new, flags)?;
        match self.session.node(entry) {
            Ok((node, attr)) => Ok((node, attr, handle)),
            Err(errno) => {
                source.release(&cx, entry.ino, handle);
                Err(errno)
            }
        }
    }

    /// Opens a file that was created since the client's lookup. The client did not check the user's permission, so it
    /// is opened only if the user may open it with any groups, which the server does not know. Otherwise `STALE` makes
    /// Linux's client look again and open the file normally; with `cache=loose`, however, it keeps its negative entry.
    fn open_shown(&self, dir: &File, name: Name<'_>, flags: OFlags) -> Result<(Arc<Node>, Attr, Handle)> {
        let (source, user) = (&self.share.source, dir.user);
        let cx = self.caller(user, None);
        let (node, attr) = match source.lookup(&cx, dir.node.ino, name) {
            // It was removed again.
            Err(Errno::NOENT) => return Err(Errno::STALE),
            found => self.session.node(found?)?,
        };
        if node.kind == FileType::Directory {
            return Err(Errno::ISDIR);
        }
        let mode = source.mode_without_acl(&cx, node.ino, &attr);
        let allowed = if attr.uid == user.uid { mode >> 6 } else { (mode >> 3) & mode };
        let wanted = wanted(flags);
        if allowed & wanted != wanted {
            return Err(Errno::STALE);
        }
        let handle = self.open_file(&node, user, flags)?;
        Ok((node, attr, handle))
    }

    pub(super) fn readdir(
        &self,
        buffer: &mut impl NinepReply,
        fid: Fid,
        offset: u64,
        bytes_max: u32,
    ) -> Result<ReplyPlace> {
        let (file, open) = self.session.open(fid)?;
        if !open.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let room = buffer.room().min(self.session.msize as usize).saturating_sub(READ_HEAD_BYTES);
        let bytes_max = room.min(usize::try_from(bytes_max).unwrap_or(usize::MAX));
        let at = DirRange { ino: file.node.ino, handle: open.handle, offset, plus: false };
        let data = buffer.short();
        data.clear();
        data.resize(READ_HEAD_BYTES, 0);
        let mut listing = Listing {
            writer: DirWriter::new(data, bytes_max),
            own: (file.node.ino, file.node.path()),
            full: Cell::new(false),
            flawed: false,
            pushed: false,
            surplus: Vec::new(),
        };
        let outcome = self.share.source.readdir(&self.caller(file.user, None), &at, &mut listing);
        let Listing { full, flawed, pushed, surplus, .. } = listing;
        let full = full.get();
        surplus.into_iter().for_each(|ino| self.share.source.forget(ino, 1));
        outcome?;
        if flawed {
            self.share.ratelimited_log.warn(format_args!("the source lists an invalid name, in {:?}", at.ino));
            return Err(Errno::IO);
        }
        // An empty reply would mean the end of the directory.
        if full && !pushed {
            return Err(Errno::INVAL);
        }
        let bytes = u32::try_from(data.len() - READ_HEAD_BYTES).unwrap_or(u32::MAX);
        data[..READ_HEAD_BYTES].copy_from_slice(&encode_data_head(kind::TREADDIR, self.ticket.tag, bytes));
        Ok(ReplyPlace::Short)
    }
}

/// Returns whether an existing file is opened instead: for users that the server checks, and for root.
fn opens_what_is_there(user: User, flags: OFlags) -> bool {
    !flags.contains(OFlags::EXCL) && (user.checked || user.uid == 0)
}

/// A listing being written.
struct Listing<'a> {
    writer: DirWriter<'a>,
    /// The directory, which `.` is.
    own: (Ino, u64),
    /// An entry did not fit. No later one is added: the client continues after the last one.
    full: Cell<bool>,
    flawed: bool,
    pushed: bool,
    /// References that the client did not request.
    surplus: Vec<Ino>,
}

impl DirOutput for Listing<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        let fits = !self.full.get() && self.writer.fits(name);
        self.full.set(!fits);
        fits
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.surplus.extend(entry.map(|entry| entry.ino).filter(|ino| *ino != Ino(0)));
        self.flawed |= !checks::is_listable(item.name);
        if self.full.get() || self.flawed {
            return;
        }
        let ino = if item.name == b"." { self.own.1 } else { item.ino };
        let told = self.writer.push(&DirItem { ino, ..*item });
        self.full.set(!told);
        self.pushed |= told;
    }
}
