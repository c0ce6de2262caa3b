//! Extended attributes: each value is a fid of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, Change, Errno, Ino, Result, XattrFlags};
use ferry_wire::ninep::{Reply, Request};

use crate::client::Shared;
use crate::connection::{Outcome, Outgoing, RequestError};
use crate::inode::Inode;
use crate::session::{OwnedFid, Session};

/// The longest value, and list of names, in bytes (Linux: `XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const VALUE_BYTES_MAX: u64 = 64 << 10;
/// The attribute that Linux requests before a write to a new file or one with changed attributes.
const CAPABILITIES: &[u8] = b"security.capability";
/// How long their absence is believed: as long as mounts keep attributes.
const ABSENT: Duration = Duration::from_secs(1);

impl Shared {
    /// The value of an attribute, or the list of names if `name` is empty.
    pub(crate) fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let inode = self.inodes.get(ino)?;
        if name != CAPABILITIES || self.cache.is_none() {
            return self.ask_xattr(&inode, name);
        }
        // Held meanwhile, so that a concurrent change of attributes wins.
        let mut absent = lock(&inode.no_capabilities);
        if let Some((_, errno)) = absent.filter(|(since, _)| since.elapsed() < ABSENT) {
            return Err(errno);
        }
        let asked = Instant::now();
        let found = self.ask_xattr(&inode, name);
        *absent = match found {
            Err(errno @ (Errno::NODATA | Errno::OPNOTSUPP)) => Some((asked, errno)),
            _ => None,
        };
        found
    }

    fn ask_xattr(&self, inode: &Inode, name: &[u8]) -> Result<Vec<u8>> {
        self.link.with_retry(|session| {
            self.by_any_fid(session, inode, |fid| {
                let new_fid = session.new_fid();
                let request = Request::Xattrwalk { fid: fid.fid(), new_fid, name };
                let walked = session.ask(&request, |reply| match reply {
                    Reply::Xattrwalk { bytes } => Some(bytes),
                    _ => None,
                });
                // ganesha has the same error for a long list.
                if !name.is_empty() {
                    session.note_walk(&walked);
                }
                let bytes = walked.inspect_err(|_| session.free_fid(new_fid))?;
                let held = OwnedFid::new(session, new_fid);
                if bytes > VALUE_BYTES_MAX {
                    return Err(RequestError::Errno(Errno::TOOBIG));
                }
                read_value(session, &held, usize::try_from(bytes).unwrap_or(0))
            })
        })
    }

    pub(crate) fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Result<()> {
        let inode = self.inodes.get(ino)?;
        let set = self.link.with_retry(|session| {
            self.by_any_fid(session, &inode, |fid| {
                let held = session.clone_of(fid.fid())?;
                let bytes = value.len() as u64;
                session.tell(&Request::Xattrcreate { fid: held.fid(), name, bytes, flags })?;
                write_value(session, &held, value)?;
                // Only the end of the fid says whether the attribute was set; it ends in any case.
                let set = session.tell(&Request::Clunk { fid: held.fid() });
                held.mark_ended();
                set.map_err(|fail| match fail {
                    // Made twice, an attribute that must not be there yet would be.
                    RequestError::Lost { .. } if !flags.is_empty() => RequestError::Lost { harmless: false },
                    other => other,
                })
            })
        });
        *lock(&inode.no_capabilities) = None;
        set?;
        self.changes.publish(cx.session, || Change::Attr { ino });
        Ok(())
    }

    /// Removes an attribute, as Linux's client does: a value of no length takes the place of one that must be there.
    pub(crate) fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        self.setxattr(cx, ino, name, b"", XattrFlags::REPLACE)
    }
}

fn read_value(session: &Arc<Session>, held: &OwnedFid, bytes: usize) -> Outcome<Vec<u8>> {
    let mut value = Vec::with_capacity(bytes);
    while value.len() < bytes {
        let piece = (bytes - value.len()).min(Shared::message_bytes(session));
        let request = Outgoing::read(held.fid(), value.len() as u64, vec![0; piece]);
        let message = session.send_one(request).wait(session)?;
        let Some(data) = message.data() else { return session.take(&message, |_| None) };
        if data.is_empty() {
            return Err(RequestError::Errno(Errno::IO));
        }
        value.extend_from_slice(data);
    }
    Ok(value)
}

fn write_value(session: &Arc<Session>, held: &OwnedFid, value: &[u8]) -> Outcome<()> {
    let mut done = 0;
    while done < value.len() {
        let piece = (value.len() - done).min(Shared::message_bytes(session));
        let data = &value[done..done + piece];
        let request = Request::Write { fid: held.fid(), offset: done as u64, data };
        done += session.ask(&request, |reply| match reply {
            Reply::Write { bytes } => usize::try_from(bytes).ok().filter(|count| (1..=piece).contains(count)),
            _ => None,
        })?;
    }
    Ok(())
}
