//! Sources that answer what cannot be: an error for that caller, nothing lost, and the session goes on.

use crate::common;

use std::sync::{Arc, Mutex};

use common::{Answer, Client};
use ferry_serve::{SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::abi::ForgetOne;
use ferry_wire::fuse::{BATCH_FORGET_BYTES_MAX, IN_HEADER_BYTES, Operation, Records};

const DIR: Attr = Attr {
    ino: 1,
    size: 0,
    blocks: 0,
    atime: Timespec { sec: 0, nsec: 0 },
    mtime: Timespec { sec: 0, nsec: 0 },
    ctime: Timespec { sec: 0, nsec: 0 },
    btime: None,
    mode: 0o040_755,
    nlink: 2,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 4096,
    submount: false,
};

/// Answers what it is told to, whatever it is asked.
#[derive(Default)]
struct Liar {
    attr: Attr,
    ino: u64,
    bytes: Vec<u8>,
    count: usize,
    names: Vec<&'static [u8]>,
    forgotten: Mutex<Vec<u64>>,
    released: Mutex<Vec<u64>>,
}

impl Liar {
    fn entry(&self) -> Entry {
        Entry { ino: Ino(self.ino), generation: 0, attr: self.attr }
    }
}

impl FileSystem for Liar {
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        assert_ne!(name.as_bytes(), b"panic", "the test asks for it");
        Ok(self.entry())
    }
    fn forget(&self, ino: Ino, count: u64) {
        (0..count).for_each(|_| self.forgotten.lock().unwrap().push(ino.0));
    }
    fn getattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(self.attr)
    }
    fn readlink(&self, _: &Caller<'_>, _: Ino) -> Result<Vec<u8>> {
        Ok(self.bytes.clone())
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }
    fn create(&self, _: &Caller<'_>, _: Ino, _: Name<'_>, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        Ok((self.entry(), Handle(9)))
    }
    fn read(&self, _: &Caller<'_>, _: &IoRange, out: &mut dyn Output) -> Result<Data> {
        out.put(&self.bytes);
        out.put(&self.bytes);
        Ok(Data::Bytes(self.count))
    }
    fn write(&self, _: &Caller<'_>, _: &IoRange, input: &mut dyn Input) -> Result<Data> {
        input.take(&mut vec![0; self.bytes.len()]);
        Ok(Data::Bytes(self.count))
    }
    fn release(&self, _: &Caller<'_>, _: Ino, handle: Handle) {
        self.released.lock().unwrap().push(handle.0);
    }
    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(0))
    }
    fn readdir(&self, _: &Caller<'_>, _: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        for (name, next) in self.names.iter().zip(1..) {
            let item = DirItem { ino: 1, next, kind: FileType::RegularFile, name };
            out.push(&item, Some(&self.entry()));
        }
        Ok(())
    }
    fn getxattr(&self, _: &Caller<'_>, _: Ino, _: &[u8]) -> Result<Vec<u8>> {
        Ok(self.bytes.clone())
    }
    fn ioctl(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u32, _: &[u8], _: usize) -> Result<Vec<u8>> {
        Ok(self.bytes.clone())
    }
    fn get_lock(&self, _: &Caller<'_>, _: Ino, _: Handle, lock: &Lock) -> Result<Option<Lock>> {
        Ok(Some(Lock { start: 5, end: 4, ..*lock }))
    }
    fn lseek(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64, _: Seek) -> Result<u64> {
        Ok(self.count as u64)
    }
    fn copy_file_range(&self, _: &Caller<'_>, _: &CopyRange) -> Result<u64> {
        Ok(self.count as u64)
    }
}

fn client(liar: Liar) -> (Arc<Liar>, Client) {
    let liar = Arc::new(liar);
    let client =
        Client::new(Arc::clone(&liar) as Arc<dyn FileSystem>, &ShareOptions::default(), SessionSlot::default());
    (liar, client)
}

fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).unwrap()
}

fn range(len: u32, flags: OFlags) -> IoRange {
    let handle = Handle(0);
    IoRange { ino: Ino::ROOT, handle, offset: 0, len, flags, clear_privileges: false, owner: None }
}

/// Asks, and then sees whether an honest question is still answered.
fn ask(liar: Liar, operation: Operation<'_>) -> (Answer, Vec<u64>) {
    let (liar, mut client) = client(liar);
    let answer = client.ask(Ino::ROOT, operation);
    let answer = match answer {
        Answer::Late => common::answer(client.next_unique() - 2, &client.late.recv().unwrap()),
        answer => answer,
    };
    assert_eq!(
        client.ask(Ino::ROOT, Operation::Access { mask: 0 }),
        Answer::Error(Errno::NOSYS),
        "the session goes on"
    );
    let forgotten = liar.forgotten.lock().unwrap().clone();
    (answer, forgotten)
}

/// As many as Linux sends to a reader of /dev/fuse.
#[test]
fn the_longest_list_of_forgotten_inodes_is_taken() {
    let file = Attr { mode: 0o100_644, ..DIR };
    let (liar, mut client) = client(Liar { ino: 2, attr: file, ..Liar::default() });
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name("x") }), Answer::Reply(_)));
    let unknown = ForgetOne { nodeid: 3, nlookup: 1 };
    let count = (BATCH_FORGET_BYTES_MAX - IN_HEADER_BYTES) / size_of::<ForgetOne>() - 1;
    let mut forgets = vec![unknown; count];
    *forgets.last_mut().unwrap() = ForgetOne { nodeid: 2, nlookup: 1 };
    let forgets = Operation::BatchForget { forgets: Records::new(&forgets) };
    assert_eq!(client.ask(Ino(0), forgets), Answer::NoReply);
    assert_eq!(*liar.forgotten.lock().unwrap(), [2]);
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name("x") }), Answer::Reply(_)));
}

#[test]
fn impossible_values_are_errors() {
    let file = Attr { mode: 0o100_644, ..DIR };
    let copy = CopyRange { from: (Ino(1), Handle(0), 0), to: (Ino(1), Handle(0), 0), len: 10 };
    let lookup = Operation::Lookup { name: name("x") };
    let ioctl = Operation::Ioctl { handle: Handle(0), flags: 0, command: 1, argument: 0, input: &[], out_bytes_max: 8 };
    let lock = ferry_wire::fuse::LockRequest {
        handle: Handle(0),
        owner: 1,
        kind: LockKind::Write,
        start: 0,
        end: 9,
        pid: 1,
        flock: false,
    };
    let getxattr = |bytes_max| Operation::Getxattr { name: b"user.x", bytes_max };
    let seek = Operation::Lseek { handle: Handle(0), offset: 0, seek: Seek::Data };
    let bytes = |bytes: Vec<u8>| Liar { bytes, ..Liar::default() };
    let count = |count| Liar { count, ..Liar::default() };
    for (what, liar, operation, forgotten) in [
        ("no type", Liar { ino: 2, ..Liar::default() }, lookup, vec![2]),
        ("size", Liar { ino: 2, attr: Attr { size: u64::MAX, ..file }, ..Liar::default() }, lookup, vec![2]),
        ("inode 0", Liar { ino: 0, attr: file, ..Liar::default() }, lookup, vec![]),
        (
            "attributes",
            Liar { attr: Attr { mode: 0, ..DIR }, ..Liar::default() },
            Operation::Getattr { handle: None },
            vec![],
        ),
        ("target", bytes(vec![b'x'; 4096]), Operation::Readlink, vec![]),
        ("NUL in target", bytes(b"a\0b".to_vec()), Operation::Readlink, vec![]),
        ("no target", bytes(vec![]), Operation::Readlink, vec![]),
        ("xattr", bytes(vec![0; 65537]), getxattr(65536), vec![]),
        ("size of xattr", bytes(vec![0; 65537]), getxattr(0), vec![]),
        ("ioctl", bytes(vec![0; 9]), ioctl, vec![]),
        ("lock", Liar::default(), Operation::GetLock(lock), vec![]),
        ("seek", count(usize::MAX), seek, vec![]),
        ("copy", count(11), Operation::CopyFileRange(copy), vec![]),
        ("long copy", count(11), Operation::CopyFileRange64(copy), vec![]),
        ("panic", Liar::default(), Operation::Lookup { name: name("panic") }, vec![]),
    ] {
        assert_eq!(ask(liar, operation), (Answer::Error(Errno::IO), forgotten), "{what}");
    }
}

#[test]
fn claims_of_more_than_was_moved_are_errors() {
    // Bytes put twice or taken, the count claimed, and the count that the client gets of 10; `None`: EIO.
    for (bytes, claimed, read, write) in [
        (3, 6, Some(6), None),
        (3, 7, None, None),
        (3, 3, Some(3), Some(3)),
        (3, 2, Some(2), Some(2)),
        (100, 10, Some(10), Some(10)),
        (100, 11, None, None),
        (0, 10, None, Some(10)),
        (0, 11, None, None),
        (100, usize::MAX, None, None),
    ] {
        let liar = || Liar { bytes: vec![b'x'; bytes], count: claimed, ..Liar::default() };
        let (answer, _) = ask(liar(), Operation::Read(range(10, OFlags::RDONLY)));
        let expected = read.map_or(Answer::Error(Errno::IO), |count| Answer::Reply(vec![b'x'; count]));
        assert_eq!(answer, expected, "{bytes} {claimed}");
        let (_, mut client) = client(liar());
        let operation = Operation::Write { range: range(10, OFlags::WRONLY), cached: false };
        let written = match client.ask_and_write(Ino::ROOT, operation, &[b'y'; 10]) {
            Answer::Reply(reply) => Some(reply[..4].to_vec()),
            other => {
                assert_eq!(other, Answer::Error(Errno::IO), "{bytes} {claimed}");
                None
            }
        };
        assert_eq!(written, write.map(|count| u32::to_le_bytes(count).to_vec()), "{bytes} {claimed}");
    }
}

#[test]
fn listings_stay_within_their_room_and_every_reference_is_accounted_for() {
    let file = Attr { mode: 0o100_644, ..DIR };
    // Names, whether entries are asked for, bytes; then the length of the listing and the references that are left.
    for (names, plus, bytes_max, listed, left) in [
        (vec![&b"abcdefgh"[..]; 5], false, 100, Some(96), 0),
        (vec![b"abcdefgh"; 5], true, 400, Some(320), 2),
        (vec![b"abcdefgh"; 5], true, 10, Some(0), 0),
        (vec![b"a", b"a/b", b"c"], true, 4096, None, 0),
        (vec![b"a", b""], true, 4096, None, 0),
        (vec![b".", b".."], true, 4096, Some(2 * 160), 0),
        // The first does not fit, so the shorter one behind it must not be listed.
        (vec![&[b'x'; 200], b"a"], false, 100, Some(0), 0),
    ] {
        let count = names.len();
        let (liar, mut client) = client(Liar { ino: 5, attr: file, names, ..Liar::default() });
        let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus };
        let answer = client.ask(Ino::ROOT, Operation::Readdir { at, bytes_max });
        match (answer, listed) {
            (Answer::Reply(listing), Some(listed)) => assert_eq!(listing.len(), listed, "{count} {bytes_max}"),
            (answer, None) => assert_eq!(answer, Answer::Error(Errno::IO)),
            (answer, listed) => panic!("{answer:?}, expected {listed:?}"),
        }
        assert_eq!(liar.forgotten.lock().unwrap().len(), count - left, "{count} {plus} {bytes_max}");
        client.ask(Ino::ROOT, Operation::Destroy);
        client.server.end_batch();
        assert_eq!(liar.forgotten.lock().unwrap().len(), count);
    }
}

#[test]
fn undelivered_references_are_released() {
    let file = Attr { mode: 0o100_644, ..DIR };
    let new = CreateArgs { mode: 0o100_644, ..CreateArgs::default() };
    let create = Operation::Create { name: name("x"), new, flags: OFlags::RDWR, clear_privileges: false };
    let open = Operation::Open { flags: OFlags::RDWR, clear_privileges: false };
    let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus: true };
    for (operation, forgotten, released) in [
        (Operation::Lookup { name: name("x") }, vec![5], vec![]),
        (create, vec![5], vec![9]),
        (open, vec![], vec![0]),
        (Operation::Readdir { at, bytes_max: 4096 }, vec![5, 5], vec![]),
    ] {
        for (room, revoked, expected) in
            [(1 << 17, true, Answer::Nothing), (16, false, Answer::Error(Errno::IO)), (15, false, Answer::Nothing)]
        {
            let (liar, mut client) = client(Liar { ino: 5, attr: file, names: vec![b"a", b"b"], ..Liar::default() });
            (client.room, client.revoked) = (room, revoked);
            let answer = client.ask(Ino::ROOT, operation);
            if !matches!(operation, Operation::Readdir { .. }) {
                assert_eq!(answer, expected, "{operation:?}");
                assert_eq!(*liar.forgotten.lock().unwrap(), forgotten, "{operation:?} {room}");
            } else if revoked {
                assert_eq!((answer, liar.forgotten.lock().unwrap().clone()), (expected, forgotten.clone()));
            }
            assert_eq!(*liar.released.lock().unwrap(), released, "{operation:?} {room}");
        }
    }
}

#[test]
fn one_handle_for_all_files_is_closed_as_often_as_it_was_opened() {
    let (liar, mut client) = client(Liar { attr: DIR, ..Liar::default() });
    let release = ferry_wire::fuse::Release {
        handle: Handle(0),
        flags: OFlags::empty(),
        flush: false,
        unlock_flock: false,
        owner: 0,
    };
    let open = Operation::Open { flags: OFlags::RDONLY, clear_privileges: false };
    for ino in [2, 3, 3] {
        assert!(matches!(client.ask(Ino(ino), open), Answer::Reply(_)));
    }
    assert!(matches!(client.ask(Ino::ROOT, Operation::Opendir { flags: OFlags::RDONLY }), Answer::Reply(_)));
    for (ino, expected) in [
        (3, Answer::Reply(vec![])),
        (3, Answer::Reply(vec![])),
        (3, Answer::Error(Errno::BADF)),
        (1, Answer::Error(Errno::BADF)),
    ] {
        assert_eq!(client.ask(Ino(ino), Operation::Release(release)), expected, "{ino}");
    }
    assert_eq!(liar.released.lock().unwrap().len(), 2);
    client.session.end();
    client.server.end_batch();
    assert_eq!(liar.released.lock().unwrap().len(), 3);
}
