//! The optional traits of the wrapped source.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_vfs::{Backing, Caller, Errno, Handle, IdentityScope, Ino, Mappable, Migrate, OFlags, Piece, Result};

use crate::IdMapped;

impl IdMapped {
    fn source_migrate(&self) -> Result<&dyn Migrate> {
        self.source.migrate().ok_or(Errno::NOSYS)
    }

    fn source_mappable(&self) -> Result<&dyn Mappable> {
        self.source.mappable().ok_or(Errno::NOSYS)
    }
}

impl Migrate for IdMapped {
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
        self.source_migrate()?.adopt(ino, references, identity, file)
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
        let source = self.source_migrate()?;
        self.with(cx, |cx| source.adopt_open(cx, ino, handle, flags, file))
    }
}

impl Mappable for IdMapped {
    fn map(&self, cx: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        let source = self.source_mappable()?;
        self.with(cx, |cx| source.map(cx, ino, writes))
    }

    fn map_pieces(&self, cx: &Caller<'_>, ino: Ino, offset: u64, len: u64) -> Result<Vec<Piece>> {
        let source = self.source_mappable()?;
        self.with(cx, |cx| source.map_pieces(cx, ino, offset, len))
    }
}
