//! The names in a directory: found by name, listed by cookie.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use ferry_vfs::{Name, NameBuf};

use super::node::{Node, is_sparse};
use crate::store::Store;

/// Cookies of `.` and `..`; names have later ones.
pub(crate) const COOKIE_DOT: u64 = 1;
pub(crate) const COOKIE_DOTDOT: u64 = 2;

/// A name and its inode.
#[derive(Debug)]
pub(crate) struct Link<S: Store> {
    pub(crate) name: NameBuf,
    /// Its position in listings. Cookies only grow, so an offset stays valid while names come and go.
    pub(crate) cookie: u64,
    pub(crate) node: Arc<Node<S>>,
}

#[derive(Debug)]
struct ByName<S: Store>(Arc<Link<S>>);

impl<S: Store> Borrow<[u8]> for ByName<S> {
    fn borrow(&self) -> &[u8] {
        self.0.name.borrow()
    }
}

impl<S: Store> Hash for ByName<S> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let name: &[u8] = self.borrow();
        name.hash(state);
    }
}

impl<S: Store> PartialEq for ByName<S> {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

impl<S: Store> Eq for ByName<S> {}

/// The names in a directory.
#[derive(Debug)]
pub(crate) struct Dir<S: Store> {
    by_name: HashSet<ByName<S>>,
    by_cookie: BTreeMap<u64, Arc<Link<S>>>,
    next: u64,
}

impl<S: Store> Default for Dir<S> {
    fn default() -> Self {
        Self { by_name: HashSet::default(), by_cookie: BTreeMap::new(), next: COOKIE_DOTDOT + 1 }
    }
}

impl<S: Store> Dir<S> {
    /// What a name means.
    pub(crate) fn get(&self, name: Name<'_>) -> Option<&Arc<Node<S>>> {
        self.by_name.get(name.as_bytes()).map(|link| &link.0.node)
    }

    /// Adds a new name.
    pub(crate) fn insert(&mut self, name: Name<'_>, node: Arc<Node<S>>) {
        let link = Arc::new(Link { name: name.to_buf(), cookie: self.next, node });
        self.next += 1;
        self.by_cookie.insert(link.cookie, Arc::clone(&link));
        let new = self.by_name.insert(ByName(link));
        debug_assert!(new, "the caller looked the name up under the same lock");
    }

    /// Replaces the inode of a name; returns the previous one. The cookie stays, so concurrent listings find the name.
    pub(crate) fn replace(&mut self, name: Name<'_>, node: Arc<Node<S>>) -> Option<Arc<Node<S>>> {
        let old = self.by_name.take(name.as_bytes())?.0;
        let link = Arc::new(Link { name: name.to_buf(), cookie: old.cookie, node });
        self.by_cookie.insert(link.cookie, Arc::clone(&link));
        self.by_name.insert(ByName(link));
        Some(Arc::clone(&old.node))
    }

    /// Takes a name away.
    pub(crate) fn remove(&mut self, name: Name<'_>) -> Option<Arc<Node<S>>> {
        let link = self.by_name.take(name.as_bytes())?;
        self.by_cookie.remove(&link.0.cookie);
        // A directory that was once large releases its memory.
        if is_sparse(self.by_name.len(), self.by_name.capacity()) {
            let len = self.by_name.len();
            self.by_name.shrink_to(2 * len);
        }
        Some(Arc::clone(&link.0.node))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The number of names.
    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Returns the cookie of the next new name: all existing names have smaller ones.
    pub(crate) fn end(&self) -> u64 {
        self.next
    }

    /// Returns the names after a cookie and before `end`, in order of creation.
    pub(crate) fn between(&self, cookie: u64, end: u64) -> impl Iterator<Item = &Link<S>> {
        let from = cookie.saturating_add(1);
        self.by_cookie.range(from..end.max(from)).map(|(_, link)| &**link)
    }

    /// Removes all names.
    pub(crate) fn clear(&mut self) {
        self.by_name = HashSet::default();
        self.by_cookie = BTreeMap::new();
    }
}
