//! Syncs a source when its export stops.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferry_vfs::{Caller, Errno, FileSystem, Ino};

/// Syncs a source after its export has ended. Errors are logged, because no client is left to receive them.
pub fn sync_on_stop(source: &dyn FileSystem) {
    if source.features().read_only {
        return;
    }
    let sync = || source.syncfs(&Caller::default(), Ino::ROOT);
    match catch_unwind(AssertUnwindSafe(sync)).unwrap_or(Err(Errno::IO)) {
        Ok(()) | Err(Errno::NOSYS) => {}
        Err(error) => tracing::error!("cannot sync, so written data may be lost: {error}"),
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
    fn a_panic_in_a_source_is_caught() {
        sync_on_stop(&Panics);
    }
}
