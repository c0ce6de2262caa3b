//! Inodes and open files that another process finds again.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::{Caller, Errno, Handle, Ino, OFlags, Result};

/// A source whose inodes and open files another process finds again: the next server on this host after a restart, or
/// a server on another host after a migration ([`FileSystem::migrate`](crate::FileSystem::migrate)). Both processes
/// share the same files.
pub trait Migrate {
    /// Returns the identity of an inode: bytes that only [`Self::adopt`] interprets. They stay valid when the inode
    /// is renamed, if that is possible in this scope. Errors: those of `stat(2)`; `STALE` or `NOENT` if no path or
    /// handle leads to the inode.
    fn identify(&self, ino: Ino, scope: IdentityScope) -> Result<Vec<u8>>;

    /// Searches the whole tree for inodes that [`Self::identify`] cannot find, because another process moved them.
    /// Returns the identities of those found. The client is stopped during the search, so a source must limit its
    /// time (`ferry-dir`: 10 s).
    fn search(&self, inos: &[Ino], scope: IdentityScope) -> Vec<(Ino, Vec<u8>)> {
        let _ = (inos, scope);
        Vec::new()
    }

    /// Returns whether the identities of the inodes in this directory depend on their names.
    fn follows_names(&self, dir: Ino) -> bool {
        let _ = dir;
        false
    }

    /// Takes over an inode under the number that it had in the other process, with this many references. The
    /// `identity` was created in the given scope. With [`IdentityScope::Host`] no client can have forged it. With
    /// [`IdentityScope::Handles`] its creator is trusted with file handles. Otherwise it may be forged, and must lead
    /// only to inodes that a lookup would find. `file` is open, and is used if the identity no longer leads to the
    /// inode. Errors: `AGAIN` if another inode must be taken over first ([`Self::adopted_after`]), `INVAL` for a
    /// malformed identity, otherwise those of looking up the inode.
    fn adopt(
        &self,
        ino: Ino,
        references: u64,
        identity: (&[u8], IdentityScope),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()>;

    /// Returns the inode that must be taken over before the one with this identity, if it is known which.
    fn adopted_after(&self, identity: &[u8]) -> Option<Ino> {
        let _ = identity;
        None
    }

    /// Takes over an open file or directory under the number that it had in the other process: opens it with the same
    /// flags, or takes over its descriptor. Errors are those of `open(2)`.
    fn adopt_open(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, flags: OFlags, file: Option<OwnedFd>)
    -> Result<()>;
}

/// A layer over another source whose inodes and open files are those of the source. A layer has [`Migrate`] from its source, and
/// returns itself from [`FileSystem::migrate`](crate::FileSystem::migrate) if the source has it.
pub trait MigrateLayer {
    /// Returns [`Migrate`] of the source.
    fn source_migrate(&self) -> Option<&dyn Migrate>;

    /// Calls `then` with the caller as the source knows it.
    fn with_source_caller<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> T) -> T {
        then(cx)
    }

    /// Called after the source has taken over an inode, or with a handle, an open file of it.
    fn adopted(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) {
        let _ = (cx, ino, handle);
    }
}

impl<L: MigrateLayer> Migrate for L {
    fn identify(&self, ino: Ino, scope: IdentityScope) -> Result<Vec<u8>> {
        self.source_migrate().ok_or(Errno::NOSYS)?.identify(ino, scope)
    }

    fn search(&self, inos: &[Ino], scope: IdentityScope) -> Vec<(Ino, Vec<u8>)> {
        self.source_migrate().map(|source| source.search(inos, scope)).unwrap_or_default()
    }

    fn follows_names(&self, dir: Ino) -> bool {
        self.source_migrate().is_some_and(|source| source.follows_names(dir))
    }

    fn adopt(
        &self,
        ino: Ino,
        references: u64,
        identity: (&[u8], IdentityScope),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        self.source_migrate().ok_or(Errno::NOSYS)?.adopt(ino, references, identity, file)?;
        self.adopted(&Caller::default(), ino, None);
        Ok(())
    }

    fn adopted_after(&self, identity: &[u8]) -> Option<Ino> {
        self.source_migrate()?.adopted_after(identity)
    }

    fn adopt_open(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        flags: OFlags,
        file: Option<OwnedFd>,
    ) -> Result<()> {
        let source = self.source_migrate().ok_or(Errno::NOSYS)?;
        self.with_source_caller(cx, |cx| source.adopt_open(cx, ino, handle, flags, file))?;
        self.adopted(cx, ino, Some(handle));
        Ok(())
    }
}

/// The processes in which an identity ([`Migrate::identify`]) leads to the inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdentityScope {
    /// On this host, until a file system is mounted again.
    Host,
    /// On any host with the same tree, by paths.
    Paths,
    /// As `Paths`, but only if it is the same file: on hosts that share a file system.
    CheckedPaths,
    /// On hosts that share a file system, by file handles, even if the file was renamed.
    Handles,
}
