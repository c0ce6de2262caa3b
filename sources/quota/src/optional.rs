//! Restart and migration: the next server counts the inodes that its clients hold.

use ferry_vfs::{Caller, Handle, Ino, Migrate, MigrateLayer, Result};

use crate::{Quota, storage};

impl Quota {
    /// Counts an inode that a client of the former server holds, if it has no name: the count of the tree did not
    /// find it.
    fn count_adopted(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<()> {
        let attr = self.source.getattr(cx, ino, handle)?;
        let held = self.charges.begin(ino, || Ok(storage(&attr)))?;
        if handle.is_some() {
            held.charge().add_open();
        }
        let _removal = self.removals.begin();
        if attr.nlink == 0 && !held.charge().is_orphan() {
            held.charge().set_orphan(true);
            self.bytes.settle(0, held.charge().bytes());
            self.files.settle(0, 1);
        }
        Ok(())
    }
}

impl MigrateLayer for Quota {
    fn source_migrate(&self) -> Option<&dyn Migrate> {
        self.source.migrate()
    }

    fn adopted(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) {
        // An inode that cannot be measured is counted when it is used.
        let _ = self.count_adopted(cx, ino, handle);
    }
}
