//! Restart and migration: the next server counts the inodes that its clients hold.

use std::os::fd::{BorrowedFd, OwnedFd};

use ferry_vfs::{Caller, Errno, Handle, IdentityScope, Ino, Migrate, OFlags, Result};

use crate::{Quota, storage};

impl Quota {
    fn source_migrate(&self) -> Result<&dyn Migrate> {
        self.source.migrate().ok_or(Errno::NOSYS)
    }

    /// Counts an inode that a client of the former server holds, if it has no name: the count of the tree did not
    /// find it.
    fn count_adopted(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<()> {
        let attr = self.source.getattr(cx, ino, handle)?;
        let held = self.charges.begin(ino, || Ok(storage(&attr)))?;
        if handle.is_some() {
            held.charge().add_open();
        }
        if attr.nlink == 0 && !held.charge().is_orphan() {
            held.charge().set_orphan(true);
            self.bytes.settle(0, held.charge().bytes());
            self.files.settle(0, 1);
        }
        Ok(())
    }
}

impl Migrate for Quota {
    fn identify(&self, ino: Ino, scope: IdentityScope) -> Result<Vec<u8>> {
        self.source_migrate()?.identify(ino, scope)
    }

    fn search(&self, inos: &[Ino], scope: IdentityScope) -> Vec<(Ino, Vec<u8>)> {
        self.source_migrate().map(|source| source.search(inos, scope)).unwrap_or_default()
    }

    fn follows_names(&self, dir: Ino) -> bool {
        self.source_migrate().is_ok_and(|source| source.follows_names(dir))
    }

    fn adopt(
        &self,
        ino: Ino,
        references: u64,
        identity: (&[u8], IdentityScope),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        self.source_migrate()?.adopt(ino, references, identity, file)?;
        // An inode that cannot be measured is counted when it is used.
        let _ = self.count_adopted(&Caller::default(), ino, None);
        Ok(())
    }

    fn adopted_after(&self, identity: &[u8]) -> Option<Ino> {
        self.source_migrate().ok()?.adopted_after(identity)
    }

    fn adopt_open(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        flags: OFlags,
        file: Option<OwnedFd>,
    ) -> Result<()> {
        self.source_migrate()?.adopt_open(cx, ino, handle, flags, file)?;
        let _ = self.count_adopted(cx, ino, Some(handle));
        Ok(())
    }
}
