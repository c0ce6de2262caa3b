//! The optional traits of the wrapped source.

use std::sync::Arc;

use ferry_vfs::{Backing, Caller, Errno, Ino, Mappable, Migrate, MigrateLayer, Piece, Result};

use crate::IdMapped;

impl IdMapped {
    fn source_mappable(&self) -> Result<&dyn Mappable> {
        self.source.mappable().ok_or(Errno::NOSYS)
    }
}

impl MigrateLayer for IdMapped {
    fn source_migrate(&self) -> Option<&dyn Migrate> {
        self.source.migrate()
    }

    fn with_source_caller<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> T) -> T {
        self.with(cx, then)
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
