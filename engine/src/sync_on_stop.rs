//! Syncs a source when its export stops.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry_vfs::{Caller, Errno, FileSystem, Ino};

/// Makes everything durable that was written to a source, by an export that has ended. There is nobody left to be told of an error:
/// it is logged.
pub fn sync_on_stop(source: &dyn FileSystem) {
    if source.features().read_only {
        return;
    }
    let sync = || source.syncfs(&Caller::default(), Ino::ROOT);
    match catch_unwind(AssertUnwindSafe(sync)).unwrap_or(Err(Errno::IO)) {
        Ok(()) | Err(Errno::NOSYS) => {}
        Err(error) => tracing::error!("what was written may not be on disk: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Result;

    use super::*;

    struct Panics;

    impl FileSystem for Panics {
        fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
            panic!("a source with a flaw");
        }
    }

    #[test]
    fn a_source_that_panics_ends_nobody() {
        sync_on_stop(&Panics);
    }
}
