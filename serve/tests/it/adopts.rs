//! A server that goes on with a client takes over inodes, some of which need others first.

use crate::common;

use std::collections::BTreeSet;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{Answer, Client};
use ferry_serve::{Server, SessionSlot, Share, ShareOptions};
use ferry_state::{Directory, Geometry, KeeperConnection, SessionStore};
use ferry_vfs::*;
use ferry_wire::fuse::Operation;

const DEPTH: u64 = 500;
/// The numbers of files in the root.
const FLAT: u64 = 1 << 32;

/// A chain of directories below the root, whose numbers are their depths, and files beside it. An inode is found by its parent.
#[derive(Debug, Default)]
struct Chain {
    known: Mutex<BTreeSet<u64>>,
    adoptions: AtomicUsize,
}

impl FileSystem for Chain {
    fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let number = std::str::from_utf8(name.as_bytes()).ok().and_then(|name| name.parse().ok());
        let ino = number.map_or(dir.0 + 1, |number: u64| FLAT + number);
        let attr = Attr { ino, mode: 0o040_755, nlink: 2, ..Attr::default() };
        Ok(Entry { ino: Ino(ino), generation: 0, attr })
    }

    fn migrate(&self) -> Option<&dyn Migrate> {
        Some(self)
    }
}

impl Migrate for Chain {
    fn identify(&self, ino: Ino, _: IdentityScope) -> Result<Vec<u8>> {
        Ok(if ino.0 < FLAT { ino.0 - 1 } else { 1 }.to_le_bytes().to_vec())
    }

    fn adopt(&self, ino: Ino, _: u64, (identity, _): (&[u8], IdentityScope), _: Option<BorrowedFd<'_>>) -> Result<()> {
        self.adoptions.fetch_add(1, Ordering::Relaxed);
        let parent = self.adopted_after(identity).ok_or(Errno::INVAL)?;
        let mut known = self.known.lock().unwrap();
        if parent != Ino::ROOT && !known.contains(&parent.0) {
            return Err(Errno::AGAIN);
        }
        known.insert(ino.0);
        Ok(())
    }

    fn adopted_after(&self, identity: &[u8]) -> Option<Ino> {
        identity.try_into().ok().map(|parent| Ino(u64::from_le_bytes(parent)))
    }

    fn adopt_open(&self, _: &Caller<'_>, _: Ino, _: Handle, _: OFlags, _: Option<OwnedFd>) -> Result<()> {
        Err(Errno::STALE)
    }
}

/// A client decides on the order of the records by what it forgets.
#[test]
fn a_chain_in_the_worst_order_is_taken_over_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let state = Directory::open(&directory.path().join("state")).unwrap();
    let listener = ferry_state::listen(&state).unwrap();
    let (end, _told) = UnixStream::pair().unwrap();
    let keeper = std::thread::spawn(move || ferry_state::keep(&listener, &end.into()).unwrap());
    let store = || {
        SessionStore::open(KeeperConnection::reach(&state).unwrap(), Geometry { workers: 1, entries: 8 })
            .map(Arc::new)
            .unwrap()
    };
    let options = ShareOptions::default();
    let mut first = Client::new(Arc::new(Chain::default()), &options, SessionSlot::default().with_store(store()));
    let look = |client: &mut Client, dir, name: &str| {
        let name = Name::new(name.as_bytes()).unwrap();
        assert!(matches!(client.ask(dir, Operation::Lookup { name }), Answer::Reply(_)));
    };
    (0..DEPTH).for_each(|number| look(&mut first, Ino::ROOT, &number.to_string()));
    for number in 0..DEPTH {
        first.ask(Ino(FLAT + number), Operation::Forget { count: 1 });
    }
    (1..=DEPTH).for_each(|dir| look(&mut first, Ino(dir), "next"));
    let client = first.outlives();

    let chain = Arc::new(Chain::default());
    let share = Arc::new(Share::new(Arc::clone(&chain) as Arc<dyn FileSystem>, &options));
    let store = store();
    let session = Arc::new(SessionSlot::default().with_store(Arc::clone(&store)));
    assert!(session.restore_stored(&share).unwrap());
    let adoptions = chain.adoptions.load(Ordering::Relaxed) as u64;
    assert_eq!(chain.known.lock().unwrap().len() as u64, DEPTH);
    assert!(adoptions <= 2 * DEPTH, "{adoptions} calls");
    let second = client(Server::new(share, Arc::clone(&session)), Arc::clone(&session));
    session.end();
    drop((second, session, store));
    keeper.join().unwrap();
}
