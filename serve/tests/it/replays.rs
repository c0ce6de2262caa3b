//! Requests that a server has carried out, or half of them, before it was killed: the next one is asked again.

use crate::common;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{Answer, Client};
use ferry_driver::fuse::append_security_context;
use ferry_serve::{Acl, Server, SessionSlot, Share, ShareOptions};
use ferry_state::{Directory, Geometry, KeeperConnection, SessionStore};
use ferry_vfs::*;
use ferry_wire::fuse::Operation;

const REGULAR: u32 = 0o100_000;
const LABEL: (&[u8], &[u8]) = (b"security.label", b"of a kind");

/// What has a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Object {
    ino: u64,
    mode: u32,
    uid: u32,
    label: Vec<u8>,
}

/// A directory of a server without privileges, which can be killed.
#[derive(Debug, Default)]
struct Tree {
    names: Mutex<BTreeMap<Vec<u8>, Object>>,
    next: AtomicU64,
    /// Who asks.
    caller: u32,
    /// The server ends right after the next change of a name.
    dies: AtomicBool,
}

impl Tree {
    fn add(&self, name: &[u8], mode: u32) -> Entry {
        let ino = 2 + self.next.fetch_add(1, Ordering::Relaxed);
        let object = Object { ino, mode, uid: 0, label: Vec::new() };
        self.names.lock().unwrap().insert(name.to_vec(), object.clone());
        object.entry()
    }

    fn get(&self, name: &[u8]) -> Option<Object> {
        self.names.lock().unwrap().get(name).cloned()
    }

    fn with<R>(&self, ino: Ino, f: impl FnOnce(&mut Object) -> R) -> Result<R> {
        let mut names = self.names.lock().unwrap();
        names.values_mut().find(|object| object.ino == ino.0).map(f).ok_or(Errno::STALE)
    }

    fn changed(&self) {
        assert!(!self.dies.swap(false, Ordering::Relaxed), "the server is killed here");
    }
}

impl Object {
    fn entry(&self) -> Entry {
        let attr = Attr { ino: self.ino, mode: self.mode, uid: self.uid, nlink: 1, ..Attr::default() };
        Entry { ino: Ino(self.ino), generation: 0, attr }
    }
}

impl FileSystem for Tree {
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        self.get(name.as_bytes()).map(|object| object.entry()).ok_or(Errno::NOENT)
    }
    fn forget(&self, _: Ino, _: u64) {}
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.with(ino, |object| object.entry().attr)
    }
    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.with(ino, |object| {
            object.mode = set.mode.map_or(object.mode, |mode| REGULAR | mode);
            object.entry().attr
        })
    }
    fn mkdir(&self, _: &Caller<'_>, _: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        if self.get(name.as_bytes()).is_some() {
            return Err(Errno::EXIST);
        }
        let entry = self.add(name.as_bytes(), 0o040_000 | new.mode);
        self.changed();
        Ok(entry)
    }
    fn unlink(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<()> {
        self.names.lock().unwrap().remove(name.as_bytes()).ok_or(Errno::NOENT)?;
        self.changed();
        Ok(())
    }
    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.unlink(cx, dir, name)
    }
    fn rename(&self, _: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        let moved = self.names.lock().unwrap().remove(from.1.as_bytes()).ok_or(Errno::NOENT)?;
        let other = self.names.lock().unwrap().insert(to.1.as_bytes().to_vec(), moved);
        if flags.contains(RenameFlags::EXCHANGE) {
            self.names.lock().unwrap().insert(from.1.as_bytes().to_vec(), other.ok_or(Errno::NOENT)?);
        }
        if flags.contains(RenameFlags::WHITEOUT) {
            self.add(from.1.as_bytes(), 0o020_000);
        }
        self.changed();
        Ok(())
    }
    fn create(
        &self,
        cx: &Caller<'_>,
        _: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        assert!(flags.contains(OFlags::EXCL));
        if self.get(name.as_bytes()).is_some() {
            return Err(Errno::EXIST);
        }
        let entry = self.add(name.as_bytes(), REGULAR | new.mode);
        self.with(entry.ino, |object| object.uid = cx.uid)?;
        self.changed();
        Ok((entry, Handle(entry.ino.0)))
    }
    fn open(&self, _: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        let writable = self.with(ino, |object| object.mode & 0o200 != 0)?;
        if writable { Ok(Handle(ino.0)) } else { Err(Errno::ACCESS) }
    }
    fn setxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8], value: &[u8], _: XattrFlags, _: bool) -> Result<()> {
        assert_eq!(name, LABEL.0);
        self.with(ino, |object| object.label = value.to_vec())
    }
    fn migrate(&self) -> Option<&dyn Migrate> {
        Some(self)
    }
}

impl Migrate for Tree {
    fn identify(&self, ino: Ino, _: IdentityScope) -> Result<Vec<u8>> {
        Ok(ino.0.to_le_bytes().to_vec())
    }
    fn adopt(&self, _: Ino, _: u64, _: (&[u8], IdentityScope), _: Option<BorrowedFd<'_>>) -> Result<()> {
        Ok(())
    }
    fn adopt_open(&self, _: &Caller<'_>, _: Ino, _: Handle, _: OFlags, _: Option<std::os::fd::OwnedFd>) -> Result<()> {
        Ok(())
    }
}

/// What the server answers that is asked again after the one before was killed in the midst of it.
fn asked_again(tree: &Arc<Tree>, contexts: &[u8], operation: Operation<'_>, meanwhile: impl Fn()) -> Answer {
    let directory = tempfile::tempdir().unwrap();
    let state = Directory::open(&directory.path().join("state")).unwrap();
    let listener = ferry_state::listen(&state).unwrap();
    // Nobody tells the keeper to end.
    let (end, _told) = UnixStream::pair().unwrap();
    let keeper = std::thread::spawn(move || ferry_state::keep(&listener, &end.into()).unwrap());
    let store = || {
        SessionStore::open(KeeperConnection::reach(&state).unwrap(), Geometry { workers: 1, entries: 8 })
            .map(Arc::new)
            .unwrap()
    };
    let options = ShareOptions { security_label: Acl::Auto, ..ShareOptions::default() };
    let source = || Arc::clone(tree) as Arc<dyn FileSystem>;

    let mut first = Client::new(source(), &options, SessionSlot::default().with_store(store()));
    first.server = first.server.with_journal(0);
    let names: Vec<Vec<u8>> = tree.names.lock().unwrap().keys().cloned().collect();
    for known in &names {
        assert!(matches!(first.ask(Ino::ROOT, Operation::Lookup { name: name(known) }), Answer::Reply(_)));
    }
    (first.contexts, first.uid) = (contexts.to_vec(), tree.caller);
    tree.dies.store(true, Ordering::Relaxed);
    assert_eq!(first.ask(Ino::ROOT, operation), Answer::Error(Errno::IO), "it was not killed");
    meanwhile();
    let client = first.outlives();

    let store = store();
    let share = Arc::new(Share::new(source(), &options));
    let session = Arc::new(SessionSlot::default().with_store(Arc::clone(&store)));
    assert!(session.restore_stored(&share).unwrap());
    let server = Server::new(share, Arc::clone(&session)).with_journal(0);
    let mut second = client(server, Arc::clone(&session));
    let answer = second.ask(Ino::ROOT, operation);
    session.end();
    drop((second, session, store));
    keeper.join().unwrap();
    answer
}

fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).unwrap()
}

#[test]
fn a_whiteout_does_not_take_the_place_of_the_file_that_left_it() {
    let operation = |flags| Operation::Rename { name: name(b"a"), new_dir: Ino::ROOT, new_name: name(b"b"), flags };
    let tree = Arc::new(Tree::default());
    let file = tree.add(b"a", REGULAR).ino;
    let answer = asked_again(&tree, &[], operation(RenameFlags::WHITEOUT), || ());
    assert_eq!(answer, Answer::Reply(Vec::new()));
    assert_eq!((tree.get(b"a").unwrap().mode, tree.get(b"b").unwrap().ino), (0o020_000, file.0));
    // Somebody has taken it away meanwhile.
    let tree = Arc::new(Tree::default());
    tree.add(b"a", REGULAR);
    let away = || drop(tree.names.lock().unwrap().remove(b"b".as_slice()));
    assert_eq!(asked_again(&tree, &[], operation(RenameFlags::WHITEOUT), away), Answer::Reply(Vec::new()));
    assert!(tree.get(b"b").is_none());
    // And two names are not exchanged twice.
    let tree = Arc::new(Tree::default());
    let (a, b) = (tree.add(b"a", REGULAR).ino, tree.add(b"b", REGULAR).ino);
    assert_eq!(asked_again(&tree, &[], operation(RenameFlags::EXCHANGE), || ()), Answer::Reply(Vec::new()));
    assert_eq!([tree.get(b"a").unwrap().ino, tree.get(b"b").unwrap().ino], [b.0, a.0]);
    // Without a whiteout the missing name tells.
    let tree = Arc::new(Tree::default());
    tree.add(b"a", REGULAR);
    assert_eq!(asked_again(&tree, &[], operation(RenameFlags::empty()), || ()), Answer::Reply(Vec::new()));
    assert_eq!(tree.names.lock().unwrap().len(), 1);
}

#[test]
fn a_repeated_removal_spares_a_new_file_with_the_name() {
    let rename = |flags| Operation::Rename { name: name(b"a"), new_dir: Ino::ROOT, new_name: name(b"b"), flags };
    let once = [
        Operation::Unlink { name: name(b"a") },
        Operation::Rmdir { name: name(b"a") },
        rename(RenameFlags::empty()),
        rename(RenameFlags::NOREPLACE),
    ];
    for operation in once {
        let tree = Arc::new(Tree::default());
        let old = tree.add(b"a", REGULAR).ino;
        let new = Mutex::new(Ino(0));
        let meanwhile = || *new.lock().unwrap() = tree.add(b"a", REGULAR).ino;
        assert_eq!(asked_again(&tree, &[], operation, meanwhile), Answer::Reply(Vec::new()), "{operation:?}");
        assert_eq!(tree.get(b"a").unwrap().ino, new.lock().unwrap().0, "{operation:?}");
        let moved = tree.get(b"b").map(|object| object.ino);
        assert_eq!(moved, matches!(operation, Operation::Rename { .. }).then_some(old.0));
    }
}

/// It was noted that it begins, and no more: it may have been done, or not.
#[test]
fn a_name_that_is_still_there_is_taken_away() {
    let tree = Arc::new(Tree::default());
    tree.add(b"a", REGULAR);
    let file = tree.get(b"a").unwrap();
    let back = || drop(tree.names.lock().unwrap().insert(b"a".to_vec(), file.clone()));
    let unlink = Operation::Unlink { name: name(b"a") };
    assert_eq!(asked_again(&tree, &[], unlink, back), Answer::Reply(Vec::new()));
    assert_eq!(tree.get(b"a"), None);
}

#[test]
fn a_repeated_create_sets_a_missing_label() {
    let mut contexts = Vec::new();
    append_security_context(&mut contexts, LABEL.0, LABEL.1);
    let tree = Arc::new(Tree::default());
    let operation = Operation::Mkdir { name: name(b"dir"), new: CreateArgs { mode: 0o755, umask: 0, rdev: 0 } };
    let answer = asked_again(&tree, &contexts, operation, || assert!(tree.get(b"dir").unwrap().label.is_empty()));
    assert!(matches!(answer, Answer::Reply(_)), "{answer:?}");
    assert_eq!(tree.get(b"dir").unwrap().label, LABEL.1);
}

#[test]
fn a_repeated_create_opens_a_read_only_file_for_writing() {
    let flags = OFlags::RDWR | OFlags::EXCL;
    let new = CreateArgs { mode: 0o444, umask: 0, rdev: 0 };
    let operation = Operation::Create { name: name(b"object"), new, flags, clear_privileges: false };
    // The second time as if a server in between had been killed, too, when it had made it writable.
    for mode in [0o444, 0o644] {
        let tree = Arc::new(Tree::default());
        let between = || tree.names.lock().unwrap().values_mut().for_each(|object| object.mode = REGULAR | mode);
        let answer = asked_again(&tree, &[], operation, between);
        assert!(matches!(answer, Answer::Reply(_)), "{answer:?}");
        assert_eq!(tree.get(b"object").unwrap().mode, REGULAR | 0o444);
    }
}

fn create(flags: OFlags) -> Operation<'static> {
    let new = CreateArgs { mode: 0o644, umask: 0, rdev: 0 };
    Operation::Create { name: name(b"object"), new, flags: OFlags::RDWR | flags, clear_privileges: false }
}

#[test]
fn a_repeated_create_does_not_open_a_foreign_file() {
    for (flags, error) in [(OFlags::EXCL, Errno::EXIST), (OFlags::empty(), Errno::STALE)] {
        let tree = || Arc::new(Tree { caller: 7, ..Tree::default() });
        let answer = asked_again(&tree(), &[], create(flags), || ());
        assert!(matches!(answer, Answer::Reply(_)), "{flags:?}: {answer:?}");
        let tree = tree();
        let answer = asked_again(&tree, &[], create(flags), || {
            tree.add(b"object", REGULAR | 0o600);
        });
        assert_eq!(answer, Answer::Error(error), "{flags:?}");
    }
}

#[test]
fn a_repeated_create_looks_up_an_existing_file() {
    let tree = Arc::new(Tree::default());
    tree.add(b"object", REGULAR | 0o600);
    let mut client = Client::new(tree, &ShareOptions::default(), SessionSlot::default());
    for (flags, error) in [(OFlags::EXCL, Errno::EXIST), (OFlags::empty(), Errno::STALE), (OFlags::TRUNC, Errno::STALE)]
    {
        assert_eq!(client.ask(Ino::ROOT, create(flags)), Answer::Error(error), "{flags:?}");
    }
}

/// A file that its server appends to; the server reads it only through handles that are open for reading.
#[derive(Debug)]
struct Log {
    path: std::path::PathBuf,
    /// Nobody may open it for reading.
    is_secret: bool,
}

impl FileSystem for Log {
    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Err(Errno::NOENT)
    }
    fn forget(&self, _: Ino, _: u64) {}
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        let size = std::fs::metadata(&self.path).unwrap().len();
        Ok(Attr { ino: ino.0, mode: REGULAR | 0o644, nlink: 1, size, ..Attr::default() })
    }
    fn open(&self, _: &Caller<'_>, _: Ino, flags: OFlags) -> Result<Handle> {
        if self.is_secret && flags & OFlags::ACCMODE == OFlags::RDONLY {
            return Err(Errno::ACCESS);
        }
        Ok(Handle(flags.bits().into()))
    }
    fn release(&self, _: &Caller<'_>, _: Ino, _: Handle) {}
    fn read(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Output) -> Result<Data> {
        assert_eq!(at.handle, Handle(OFlags::RDONLY.bits().into()));
        let file = Arc::new(Backing::new(std::fs::File::open(&self.path).unwrap().into()));
        Ok(Data::Extent(Extent { file, offset: at.offset }))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        let appends = at.flags.contains(OFlags::APPEND);
        let file = std::fs::File::options().write(!appends).append(appends).open(&self.path).unwrap();
        Ok(Data::Extent(Extent { file: Arc::new(Backing::new(file.into())), offset: at.offset }))
    }
}

#[test]
fn a_repeated_append_keeps_the_bytes_of_others_and_is_made_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let is_secret = std::cell::Cell::new(false);
    let ask = |before: &[u8], flags: OFlags, offset: u64, data: &[u8]| {
        std::fs::write(&path, before).unwrap();
        let log = Log { path: path.clone(), is_secret: is_secret.get() };
        let mut client = Client::new(Arc::new(log), &ShareOptions::default(), SessionSlot::default());
        client.again = true;
        let handle = Handle((OFlags::WRONLY | OFlags::APPEND).bits().into());
        let len = u32::try_from(data.len()).unwrap();
        let range = IoRange { ino: Ino(2), handle, offset, len, flags, clear_privileges: false, owner: None };
        let answer = client.ask_and_write(Ino(2), Operation::Write { range, cached: false }, data);
        assert_eq!(answer, Answer::Reply([len.to_le_bytes(), [0; 4]].concat()));
        std::fs::read(&path).unwrap()
    };
    let append = OFlags::WRONLY | OFlags::APPEND;
    let mine = b"mine\n";
    for (before, after) in [
        // The server was killed before it appended, with and without others that appended since.
        ("old\n", "old\nmine\n"),
        ("old\ntheirs, and longer\n", "old\ntheirs, and longer\nmine\n"),
        ("old\nm", "old\nmmine\n"),
        // It was killed afterwards; others appended before it, after it, or both.
        ("old\nmine\n", "old\nmine\n"),
        ("old\ntheirs\nmine\n", "old\ntheirs\nmine\n"),
        ("old\nmine\ntheirs\n", "old\nmine\ntheirs\n"),
        ("old\nmi\nmine\ntheirs\n", "old\nmi\nmine\ntheirs\n"),
        // Another has truncated the file.
        ("o", "omine\n"),
    ] {
        let there = ask(before.as_bytes(), append, 4, mine);
        assert_eq!(String::from_utf8(there).unwrap(), after, "{before:?}");
    }
    // What the client itself had there before its append does not count.
    assert_eq!(ask(b"mine\n", append, 5, mine), b"mine\nmine\n");
    // A write that does not append goes where the client wants it.
    assert_eq!(ask(b"old\ntheirs\n", OFlags::WRONLY, 4, mine), b"old\nmine\ns\n");
    // It was killed in the midst of it.
    let (long, old) = (vec![b'x'; 9000], vec![b'o'; 100]);
    let whole = [&old[..], &long].concat();
    assert_eq!(ask(&whole[..8192], append, 100, &long), whole);
    // What is there cannot be read: bytes may be there twice, and those of others stay.
    is_secret.set(true);
    assert_eq!(ask(b"old\ntheirs\n", append, 4, mine), b"old\ntheirs\nmine\n");
    assert_eq!(ask(b"old\nmine\n", append, 4, mine), b"old\nmine\nmine\n");
}
