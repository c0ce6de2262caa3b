//! Listings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_vfs::{Caller, DirItem, DirOutput, DirRange, Entry, FileType, Result};

use super::Tree;
use super::dir::{COOKIE_DOT, COOKIE_DOTDOT};
use crate::store::Store;

impl<S: Store> Tree<S> {
    pub(crate) fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let (node, list_end) = self
            .handles
            .with(cx.session, at.ino, at.handle, |open| Ok((Arc::clone(&open.node), Arc::clone(&open.list_end))))?;
        {
            let state = node.read();
            let names = state.dir()?;
            // A new listing ends at the directory's current end, as does one that continues with another handle.
            if at.offset == 0 || list_end.load(Ordering::Relaxed) == u64::MAX {
                list_end.store(names.end(), Ordering::Relaxed);
            }
            let end = list_end.load(Ordering::Relaxed);
            let parent = node.parent.load(Ordering::Acquire);
            let dots = [(COOKIE_DOT, &b"."[..], node.ino.0), (COOKIE_DOTDOT, b"..", parent)];
            for (next, name, ino) in dots.into_iter().filter(|(cookie, ..)| *cookie > at.offset) {
                if !out.fits(name) {
                    return Ok(());
                }
                out.push(&DirItem { ino, next, kind: FileType::Directory, name }, None);
            }
            for link in names.between(at.offset.max(COOKIE_DOTDOT), end) {
                let name = link.name.as_name().as_bytes();
                if !out.fits(name) {
                    break;
                }
                let item = DirItem { ino: link.node.ino.0, next: link.cookie, kind: link.node.kind, name };
                if !at.plus {
                    out.push(&item, None);
                } else if let Ok(attr) = self.attr(&link.node, &link.node.read()) {
                    // With the directory's lock: the name keeps it alive.
                    link.node.hold();
                    out.push(&item, Some(&Entry { ino: link.node.ino, generation: 0, attr }));
                } else {
                    // Its attributes are not available now, but its name is.
                    out.push(&item, None);
                }
            }
        }
        self.accessed(&node);
        Ok(())
    }
}
