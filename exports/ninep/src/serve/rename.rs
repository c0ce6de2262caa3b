//! Trename, Trenameat and Tremove.

use std::sync::Arc;

use ferry_vfs::{Errno, FileType, Name, RenameFlags, Result};
use ferry_wire::ninep::{Fid, Reply};

use super::Context;
use super::permission::WRITE;
use crate::session::{File, Place, State};

/// Returns an error for the fid of an extended attribute.
fn is_file(file: &File) -> Result<()> {
    if matches!(file.state, State::Path | State::Open(_)) { Ok(()) } else { Err(Errno::BADF) }
}

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
        self.session.renames.add(from, (&new_dir.node, new_dir.node.ino), new_name);
        Ok(())
    }

    /// Returns whether a file is at a location; `NOENT` if it is not.
    fn is_at(&self, file: &File, place: &Place) -> Result<()> {
        let cx = self.caller(file.user, None);
        let (node, _) = self.session.node(self.share.source.lookup(&cx, place.dir.ino, place.name.as_name())?)?;
        if node.ino == file.node.ino { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// Returns the directory and name of a fid's file, if they are still valid: others may rename it.
    fn place(&self, file: &File) -> Result<(File, Arc<Place>)> {
        let mut place = file.place.clone().ok_or(Errno::BUSY)?;
        match self.is_at(file, &place) {
            Err(Errno::NOENT) => {
                place = self.session.renames.follow(&place).ok_or(Errno::NOENT)?;
                self.is_at(file, &place)?;
            }
            other => other?,
        }
        let dir = File { node: Arc::clone(&place.dir), place: None, state: State::Path, ..*file };
        Ok((dir, place))
    }

    pub(super) fn rename(&self, fid: Fid, dir: Fid, name: Name<'_>) -> Result<Reply<'static>> {
        let (file, new_dir) = (self.session.get(fid)?, self.dir(dir)?);
        is_file(&file)?;
        let (dir, place) = self.place(&file)?;
        self.rename_in(&dir, place.name.as_name(), &new_dir, name)?;
        let moved = File { place: Some(self.session.place(&new_dir.node, name)), ..File::clone(&file) };
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
        is_file(&file)?;
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
