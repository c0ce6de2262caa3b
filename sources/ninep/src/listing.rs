//! Directory listings.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Caller, DirItem, DirOutput, DirRange, Entry, Errno, FileType, Handle, Ino, Name, NameBuf, OFlags, Result,
};
use ferry_wire::ninep::{DirEntries, QidKind, Reply, Request};

use crate::change_count::now_in_changes;
use crate::client::Shared;
use crate::connection::{Outcome, RequestError};
use crate::file::HEAD_BYTES;
use crate::inode::Inode;
use crate::session::{OwnedFid, Session};

/// The maximum size of a message with names, in bytes. Others than Ferry get the whole message size: p9ufs takes the size for the
/// number of names that it may skip, and those past the message are lost.
const LISTING_BYTES: usize = 64 << 10;
/// The maximum size while this client changes names in the directory, because each change discards prefetched entries.
const LISTING_BYTES_CHANGING: usize = 8 << 10;
/// The number of names that are looked up at a time.
const BATCH: usize = 32;
/// The maximum number of consecutive messages without a valid name; more are an error of the server.
const VAIN_MAX: usize = 16;

/// A name of a listing.
#[derive(Debug)]
struct Item {
    ino: u64,
    next: u64,
    kind: FileType,
    name: Box<[u8]>,
    looked: LookupState,
}

/// The result of looking up a name.
#[derive(Debug)]
enum LookupState {
    NotYet,
    /// The entry with a reference, and the time of the lookup.
    Found(Entry, u64),
    /// The name does not exist any more.
    Gone,
    /// It cannot be looked up, or is `.` or `..`.
    Unknown,
}

/// Entries that the server listed and the client has not received yet.
#[derive(Debug, Default)]
struct Listing {
    /// The offset of the first item.
    at: u64,
    items: VecDeque<Item>,
    /// No entries follow.
    is_end: bool,
    /// The time before the items were requested.
    time: u64,
    /// The directory is changing.
    is_changing: bool,
}

/// The entries in a message.
struct ListedBatch {
    items: VecDeque<Item>,
    /// The offset of the next message; `None` at the end.
    next: Option<u64>,
}

/// An open directory of a client.
#[derive(Debug)]
pub(crate) struct OpenDir {
    inode: Arc<Inode>,
    fid: Mutex<Option<Arc<OwnedFid>>>,
    listing: Mutex<Listing>,
}

/// Returns the type of a listed file. Some servers (Go's p9) send the type of the qid instead.
fn kind_of(qid: QidKind, said: FileType) -> FileType {
    match qid {
        qid if qid == QidKind::of(said) => said,
        QidKind::DIR => FileType::Directory,
        QidKind::SYMLINK => FileType::Symlink,
        _ => FileType::Unknown,
    }
}

impl OpenDir {
    /// Returns the fid for listing, opened again after a lost connection.
    pub(crate) fn fid(&self, shared: &Shared, session: &Arc<Session>) -> Outcome<Arc<OwnedFid>> {
        let mut fid = lock(&self.fid);
        if let Some(fid) = fid.as_ref().filter(|fid| fid.is_of(session)) {
            return Ok(Arc::clone(fid));
        }
        let path = self.inode.fid(session, &shared.link.options)?;
        let held = session.clone_of(path.fid())?;
        session.tell(&Request::Open { fid: held.fid(), flags: OFlags::RDONLY | OFlags::DIRECTORY })?;
        *fid = Some(Arc::clone(&held));
        Ok(held)
    }
}

impl Shared {
    pub(crate) fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        let inode = self.inodes.dir(ino)?;
        let dir = OpenDir { inode, fid: Mutex::default(), listing: Mutex::default() };
        self.link.with_retry(|session| dir.fid(self, session))?;
        self.dirs.insert(cx.session, ino, dir)
    }

    pub(crate) fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        if let Ok(dir) = self.dirs.remove(cx.session, ino, handle) {
            self.forget_listing(&mut lock(&dir.listing));
        }
    }

    /// Releases entries that the client has not received.
    fn forget_listing(&self, listing: &mut Listing) {
        for item in listing.items.drain(..) {
            if let LookupState::Found(entry, _) = item.looked {
                self.inodes.forget(entry.ino, 1);
            }
        }
    }

    /// Discards prefetched entries if this client has changed names since.
    fn refresh_listing(&self, listing: &mut Listing, dir: &Inode) {
        if !dir.is_unchanged_since(listing.time) {
            self.forget_listing(listing);
            *listing = Listing { at: listing.at, time: now_in_changes(), is_changing: true, ..Listing::default() };
        }
    }

    /// Returns the entry that was found under a name, unless this client has changed the file since.
    fn unchanged<'a>(&self, item: &'a Item) -> Option<&'a Entry> {
        let LookupState::Found(entry, time) = &item.looked else { return None };
        let is_unchanged = self.inodes.get(entry.ino).is_ok_and(|inode| inode.is_unchanged_since(*time));
        Some(entry).filter(|_| is_unchanged)
    }

    pub(crate) fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let dir = self.dirs.get(cx.session, at.ino, at.handle)?;
        let mut listing = lock(&dir.listing);
        if listing.at != at.offset || at.offset == 0 {
            self.forget_listing(&mut listing);
            *listing = Listing { at: at.offset, time: now_in_changes(), ..Listing::default() };
        }
        self.refresh_listing(&mut listing, &dir.inode);
        let (mut told, mut vain) = (false, 0);
        loop {
            if listing.items.is_empty() {
                // With entries to return, only one message at a time.
                if listing.is_end || told {
                    return Ok(());
                }
                if vain == VAIN_MAX {
                    return Err(Errno::IO);
                }
                vain += 1;
                listing.time = now_in_changes();
                let listed = self.link.with_retry(|session| self.list(session, &dir, &listing))?;
                (listing.items, listing.is_end) = (listed.items, listed.next.is_none());
                if listing.items.is_empty() {
                    listing.at = listed.next.unwrap_or(listing.at);
                }
                continue;
            }
            if at.plus {
                self.look_up_next(&dir.inode, &mut listing)?;
            }
            let Some(item) = listing.items.front() else { continue };
            let mut is_handed_over = false;
            if !matches!(item.looked, LookupState::Gone) {
                if !out.fits(&item.name) {
                    return Ok(());
                }
                let entry = self.unchanged(item);
                // p9ufs lists symbolic links as files.
                let kind = entry.map_or(item.kind, |entry| entry.attr.kind());
                let shown = DirItem { ino: item.ino, next: item.next, kind, name: &item.name };
                let entry = entry.filter(|_| at.plus);
                out.push(&shown, entry);
                told = true;
                is_handed_over = entry.is_some();
            }
            if let Some(item) = listing.items.pop_front() {
                listing.at = item.next;
                if let (LookupState::Found(entry, _), false) = (item.looked, is_handed_over) {
                    self.inodes.forget(entry.ino, 1);
                }
            }
        }
    }

    /// Requests names from an offset.
    fn list(&self, session: &Arc<Session>, dir: &OpenDir, listing: &Listing) -> Outcome<ListedBatch> {
        let (fid, offset) = (dir.fid(self, session)?, listing.at);
        let bytes_max = match (listing.is_changing, session.is_ferry) {
            (true, _) => LISTING_BYTES_CHANGING,
            (false, true) => LISTING_BYTES,
            (false, false) => usize::MAX,
        };
        let bytes_max = session.msize().saturating_sub(HEAD_BYTES).min(bytes_max);
        let bytes_max = u32::try_from(bytes_max).unwrap_or(u32::MAX);
        let request = Request::Readdir { fid: fid.fid(), offset, bytes_max };
        session.ask(&request, |reply| match reply {
            Reply::Readdir(data) if data.len() <= bytes_max as usize => {
                let next = DirEntries::new(data).last().map(|entry| entry.next);
                // An offset that does not advance, or an invalid entry, would make the listing endless.
                if next == Some(offset) || (next.is_none() && !data.is_empty()) {
                    return None;
                }
                // Invalid names are skipped.
                let is_name = |name: &[u8]| matches!(name, b"." | b"..") || Name::new(name).is_ok();
                let items = DirEntries::new(data).filter(|entry| is_name(entry.name)).map(|entry| Item {
                    ino: entry.qid.path,
                    next: entry.next,
                    kind: kind_of(entry.qid.kind, entry.kind),
                    name: entry.name.into(),
                    looked: if matches!(entry.name, b"." | b"..") { LookupState::Unknown } else { LookupState::NotYet },
                });
                Some(ListedBatch { items: items.collect(), next })
            }
            _ => None,
        })
    }

    /// Looks up the next names in a batch, unless that is done.
    fn look_up_next(&self, dir: &Arc<Inode>, listing: &mut Listing) -> Result<()> {
        if !matches!(listing.items.front(), Some(Item { looked: LookupState::NotYet, .. })) {
            return Ok(());
        }
        let next = listing.items.iter_mut().filter(|item| matches!(item.looked, LookupState::NotYet)).take(BATCH);
        let mut next: Vec<&mut Item> = next.collect();
        let names = next.iter().map(|item| Name::new(&item.name).map(Name::to_buf));
        let names: Vec<NameBuf> = names.collect::<Result<_>>()?;
        let time = now_in_changes();
        let found = self.link.with_retry(|session| {
            let found = self.find_all(session, dir, &names)?;
            if found.iter().any(|found| matches!(found, Err(RequestError::Lost { .. }))) {
                found.into_iter().flatten().for_each(|entry| self.inodes.forget(entry.ino, 1));
                return Err(RequestError::Lost { harmless: true });
            }
            Ok(found)
        })?;
        for (item, found) in next.iter_mut().zip(found) {
            item.looked = match found {
                Ok(entry) => LookupState::Found(entry, time),
                Err(RequestError::Errno(Errno::NOENT)) => LookupState::Gone,
                Err(_) => LookupState::Unknown,
            };
        }
        Ok(())
    }
}
