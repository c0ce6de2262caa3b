//! Trename, Trenameat and Tremove.

use std::sync::Arc;

use ferry_vfs::{Errno, FileType, Name, RenameFlags, Result};
use ferry_wire::ninep::{Fid, Reply};

use super::Context;
use super::permission::WRITE;
use crate::session::{File, Place, State};

impl Context<'_> {
    pub(super) fn renameat(&self, from: (Fid, Name<'_>), to: (Fid, Name<'_>)) -> Result<Reply<'static>> {
        let (dir, new_dir) = (self.dir(from.0)?, self.dir(to.0)?);
        self.rename_in(&dir, from.1, &new_dir, to.1)?;
        Ok(Reply::Renameat)
    }

    fn rename_in(&self, dir: &File, name: Name<'_>, new_dir: &File, new_name: Name<'_>) -> Result<()> {
        // Both names: the client looks up both again.
        let (moves, replaces) = (self.may_remove(dir, name), self.may_remove(new_dir, new_name));
        moves?;
        match replaces {
            // No file is replaced.
            Err(Errno::NOENT) => {}
            other => other?,
        }
        let cx = self.caller(dir.user, None);
        if dir.user.is_bound() && dir.node.ino != new_dir.node.ino {
            // A directory's own `..` changes.
            let (node, _) = self.session.node(self.share.source.lookup(&cx, dir.node.ino, name)?)?;
            if node.kind == FileType::Directory {
                self.may(dir.user, &node, WRITE)?;
            }
        }
        let (from, to) = ((dir.node.ino, name), (new_dir.node.ino, new_name));
        self.share.source.rename(&cx, from, to, RenameFlags::empty())?;
        self.session.removals.record_lookup(from, None);
        self.session.removals.record_lookup(to, None);
        Ok(())
    }

    /// Returns the directory and name of a fid's file, if they are still valid: others may rename it.
    fn place(&self, file: &File) -> Result<(File, Arc<Place>)> {
        let place = file.place.clone().ok_or(Errno::BUSY)?;
        let cx = self.caller(file.user, None);
        let (node, _) = self.session.node(self.share.source.lookup(&cx, place.dir.ino, place.name.as_name())?)?;
        if node.ino != file.node.ino {
            return Err(Errno::NOENT);
        }
        let dir = File { node: Arc::clone(&place.dir), place: None, state: State::Path, ..*file };
        Ok((dir, place))
    }

    pub(super) fn rename(&self, fid: Fid, dir: Fid, name: Name<'_>) -> Result<Reply<'static>> {
        let (file, new_dir) = (self.session.get(fid)?, self.dir(dir)?);
        let (dir, place) = self.place(&file)?;
        self.rename_in(&dir, place.name.as_name(), &new_dir, name)?;
        let moved = File { place: Some(Place::new(&new_dir.node, name)), ..File::clone(&file) };
        // If the fid was changed concurrently, its location stays.
        let _ = self.session.replace(fid, &file, moved);
        Ok(Reply::Rename)
    }

    /// Removes the file of a fid, and ends the fid in any case (remove(5)).
    pub(super) fn remove(&self, fid: Fid) -> Result<Reply<'static>> {
        let file = self.session.remove(fid)?;
        if self.share.read_only {
            return Err(Errno::ROFS);
        }
        let (dir, place) = self.place(&file)?;
        let name = place.name.as_name();
        self.may_remove(&dir, name)?;
        let (source, cx) = (&self.share.source, self.caller(file.user, None));
        match file.node.kind {
            FileType::Directory => source.rmdir(&cx, place.dir.ino, name)?,
            _ => source.unlink(&cx, place.dir.ino, name)?,
        }
        self.session.removals.record_lookup((place.dir.ino, name), None);
        Ok(Reply::Remove)
    }
}
