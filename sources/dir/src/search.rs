//! Searches the whole tree for inodes whose path is unknown.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::{Errno, FileType, IdentityScope, Ino, OFlags, Result};
use rustix::fs::Mode;

use crate::Dir;
use crate::readdir::Names;
use crate::resolve::{self, statx};
use crate::sys;
use crate::table::{Inode, Key};

/// The maximum path length in bytes: Linux accepts no longer ones, and an identity has no room for more.
const PATH_BYTES_MAX: usize = 4096;

/// The maximum duration of a search: the guest is paused meanwhile, and the migration waits.
pub(crate) const SEARCH_TIME_MAX: Duration = Duration::from_secs(10);

/// A directory to search: its parent, its name, and its path from the root.
struct PendingDir {
    parent: Arc<OwnedFd>,
    name: Vec<u8>,
    path: Vec<u8>,
}

/// The inodes to find, and those found.
struct Search<'a> {
    dir: &'a Dir,
    within: IdentityScope,
    wanted: HashMap<Key, Arc<Inode>>,
    /// The host's inode numbers of these: most files are excluded by number.
    numbers: HashSet<u64>,
    found: Vec<(Ino, Vec<u8>)>,
    /// When the search ends.
    until: Instant,
}

impl Dir {
    /// Returns whether an inode may have a name; inodes without one are not searched for.
    fn is_somewhere(&self, inode: &Inode) -> bool {
        match self.with_stat(inode.ino, |_, st| st.stx_nlink > 0) {
            Ok(has_name) => has_name,
            Err(error) => !(error == Errno::STALE && inode.has_persistent_handle()),
        }
    }

    pub(crate) fn search_until(&self, inos: &[Ino], within: IdentityScope, until: Instant) -> Vec<(Ino, Vec<u8>)> {
        let inodes = inos.iter().filter_map(|ino| self.table.peek(*ino)).filter(|inode| self.is_somewhere(inode));
        let wanted: HashMap<Key, Arc<Inode>> = inodes.map(|inode| (inode.found.key, inode)).collect();
        let numbers = wanted.keys().map(|key| key.ino).collect();
        let mut search = Search { dir: self, within, wanted, numbers, found: Vec::new(), until };
        let root = self.path_fd(&self.root).and_then(|root| self.reopen(root.as_fd(), OFlags::PATH));
        let Ok(root) = root else { return Vec::new() };
        let mut ahead = vec![PendingDir { parent: Arc::new(root), name: b".".to_vec(), path: Vec::new() }];
        // Depth first, so that few directories are open at a time.
        while let Some(next) = ahead.pop().filter(|_| !search.wanted.is_empty()) {
            if search.is_over() {
                let (count, limit_s) = (search.wanted.len(), SEARCH_TIME_MAX.as_secs());
                tracing::warn!(
                    "{count} inodes are not found within {limit_s} s, and are lost: not all of the share was looked at"
                );
                break;
            }
            if let Err(error) = search.scan_directory(&next, &mut ahead) {
                tracing::debug!(path = %next.path.escape_ascii(), %error, "cannot search a directory");
            }
        }
        search.found
    }
}

impl Search<'_> {
    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    fn scan_directory(&mut self, at: &PendingDir, ahead: &mut Vec<PendingDir>) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&at.parent, at.name.as_slice(), flags, Mode::empty());
        let fd = Arc::new(self.dir.retry_with_room(open)?);
        let mut names = Names::default();
        while let Some((number, kind, name)) = names.next(fd.as_fd())? {
            if self.is_over() {
                // The next iteration of the loop reports the error.
                ahead.push(PendingDir { parent: Arc::clone(&fd), name: b".".to_vec(), path: at.path.clone() });
                break;
            }
            let path = if at.path.is_empty() { name.to_vec() } else { [&at.path[..], b"/", name].concat() };
            if matches!(name, b"." | b"..") || path.len() > PATH_BYTES_MAX {
                continue;
            }
            // A mount point's directory has another number in the listing.
            let mut is_dir = kind == FileType::Directory;
            if is_dir || kind == FileType::Unknown || self.numbers.contains(&number) {
                let Ok(st) = statx(fd.as_fd(), name) else { continue };
                is_dir = resolve::kind(&st) == FileType::Directory;
                if let Some(inode) = self.wanted.get(&resolve::key(&st)).cloned() {
                    self.check_candidate(&inode, fd.as_fd(), name, &path);
                }
            }
            if is_dir {
                ahead.push(PendingDir { parent: Arc::clone(&fd), name: name.to_vec(), path });
            }
        }
        Ok(())
    }

    /// Checks a file with the number of a wanted inode.
    fn check_candidate(&mut self, inode: &Arc<Inode>, dir: BorrowedFd<'_>, name: &[u8], path: &[u8]) {
        if self.is(inode, dir, name).unwrap_or(false)
            && let Ok(identity) = self.dir.identify_at(inode, path, self.within)
        {
            self.found.push((inode.ino, identity));
            self.wanted.remove(&inode.found.key);
        }
    }

    fn is(&self, inode: &Inode, dir: BorrowedFd<'_>, name: &[u8]) -> Result<bool> {
        let fd = self.dir.open_path(dir, name)?;
        self.dir.check(inode, fd.as_fd())?;
        // The number may belong to another file by now.
        Ok(match &inode.found.handle {
            Some(handle) => sys::name_to_handle(fd.as_fd(), b"")?.parts() == handle.parts(),
            None => true,
        })
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::{Caller, Name};

    use super::*;
    use crate::Options;

    #[test]
    fn a_search_ends_in_time() {
        let directory = tempfile::tempdir().expect("the directory is created");
        std::fs::write(directory.path().join("file"), "").expect("the file is created");
        let dir = Dir::open(directory.path(), Options::default()).expect("it can be shared");
        let name = Name::new(b"file").expect("a name");
        let ino = dir.lookup(&Caller::default(), Ino::ROOT, name).expect("it is there").ino;
        assert_eq!(dir.search_until(&[ino], IdentityScope::Paths, Instant::now() + SEARCH_TIME_MAX).len(), 1);
        assert!(dir.search_until(&[ino], IdentityScope::Paths, Instant::now()).is_empty());
    }

    /// With its descriptor cached and with it evicted.
    #[test]
    fn files_that_the_host_deleted_are_not_found() {
        let directory = tempfile::tempdir().expect("the directory is created");
        let dir = Dir::open(directory.path(), Options::default()).expect("it can be shared");
        let [held, given_up, there] = ["held", "given-up", "there"].map(|name| {
            std::fs::write(directory.path().join(name), "").expect("the file is created");
            let name = Name::new(name.as_bytes()).expect("a name");
            let ino = dir.lookup(&Caller::default(), Ino::ROOT, name).expect("it is there").ino;
            dir.getattr(&Caller::default(), ino, None).expect("it is there");
            dir.table.get(ino).expect("it is known")
        });
        for name in ["held", "given-up"] {
            std::fs::remove_file(directory.path().join(name)).expect("it is there");
        }
        assert!(held.is_held() && !dir.is_somewhere(&held));
        assert!(dir.is_somewhere(&there));
        if given_up.has_persistent_handle() {
            assert!(given_up.evict_idle().is_some() && there.evict().is_none(), "the latter was just used");
            assert!(!dir.is_somewhere(&given_up));
        }
    }
}
