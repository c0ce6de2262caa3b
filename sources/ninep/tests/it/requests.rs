//! Every request, against our own server of a memory file system.
#![allow(clippy::cast_possible_truncation, reason = "bytes of a pattern")]

use crate::common;

use common::{CX, Served, flags, name, range, read, write};
use ferry_9p_client::Options;
use ferry_vfs::*;

/// As most clients are, but without a cache: each read and write is a request.
fn plain() -> Options {
    Options { cache: ferry_9p_client::Cache::None, ..Options::default() }
}

#[test]
fn files_are_made_written_read_and_removed() {
    let served = Served::new();
    let client = served.connect(plain());
    let (entry, handle) = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o640), OFlags::RDWR).unwrap();
    assert_eq!((entry.attr.kind(), entry.attr.mode & 0o7777, entry.attr.size), (FileType::RegularFile, 0o640, 0));
    // Longer than one message, and not a multiple of anything.
    let data: Vec<u8> = (0..3_000_001_u32).map(|n| (n % 251) as u8).collect();
    assert_eq!(write(&client, entry.ino, handle, 5, &data).unwrap(), data.len());
    assert_eq!(client.getattr(&CX, entry.ino, Some(handle)).unwrap().size, 5 + data.len() as u64);
    assert_eq!(read(&client, entry.ino, handle, 0, 4_000_000).unwrap(), [&[0; 5][..], &data].concat());
    assert_eq!(read(&client, entry.ino, handle, 3_000_000, 100).unwrap(), data[2_999_995..]);
    assert_eq!(read(&client, entry.ino, handle, 1 << 40, 100).unwrap(), b"");
    client.fsync(&CX, entry.ino, handle, false).unwrap();
    client.flush(&CX, entry.ino, handle, 0).unwrap();
    // Gone by name, there by handle.
    client.unlink(&CX, Ino::ROOT, name("a")).unwrap();
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::NOENT);
    assert_eq!(read(&client, entry.ino, handle, 5, 3).unwrap(), data[..3]);
    assert_eq!(client.getattr(&CX, entry.ino, Some(handle)).unwrap().nlink, 0);
    client.release(&CX, entry.ino, handle);
    client.forget(entry.ino, 1);
    assert_eq!((client.usage().inodes, client.usage().handles), (0, 0));
    served.settles(|usage| usage.fids <= 1);
}

#[test]
fn opening_truncates_and_shares() {
    let served = Served::new();
    let client = served.connect(plain());
    let (entry, first) = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), OFlags::WRONLY).unwrap();
    write(&client, entry.ino, first, 0, b"0123456789").unwrap();
    let second = client.open(&CX, entry.ino, OFlags::RDONLY).unwrap();
    assert_eq!(read(&client, entry.ino, second, 0, 99).unwrap(), b"0123456789");
    // With a fid that is open already, and without one.
    let third = client.open(&CX, entry.ino, OFlags::RDWR | OFlags::TRUNC).unwrap();
    assert_eq!(read(&client, entry.ino, second, 0, 99).unwrap(), b"");
    write(&client, entry.ino, third, 2, b"x").unwrap();
    for handle in [first, second, third] {
        client.release(&CX, entry.ino, handle);
    }
    let last = client.open(&CX, entry.ino, OFlags::WRONLY | OFlags::TRUNC).unwrap();
    assert_eq!(client.getattr(&CX, entry.ino, None).unwrap().size, 0);
    client.release(&CX, entry.ino, last);
    assert_eq!(client.open(&CX, entry.ino, OFlags::RDONLY).map(|h| client.release(&CX, entry.ino, h)), Ok(()));
    assert_eq!(client.open(&CX, Ino::ROOT, OFlags::RDONLY).unwrap_err(), Errno::ISDIR);
    assert_eq!(client.read(&CX, &range(entry.ino, last, 0, 1), &mut Vec::new()).unwrap_err(), Errno::BADF);
}

#[test]
fn names_are_created_linked_renamed_and_removed() {
    let served = Served::new();
    let client = served.connect(plain());
    let dir = client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o750)).unwrap();
    assert_eq!((dir.attr.kind(), dir.attr.mode & 0o7777), (FileType::Directory, 0o750));
    let link = client.symlink(&CX, dir.ino, name("s"), b"over/there").unwrap();
    assert_eq!(client.readlink(&CX, link.ino).unwrap(), b"over/there");
    let fifo = CreateArgs { mode: FileType::Fifo.as_raw_mode() | 0o666, umask: 0o022, rdev: 0 };
    let fifo = client.mknod(&CX, dir.ino, name("p"), &fifo).unwrap();
    assert_eq!((fifo.attr.kind(), fifo.attr.mode & 0o777), (FileType::Fifo, 0o644));
    let other = client.link(&CX, fifo.ino, Ino::ROOT, name("q")).unwrap();
    assert_eq!((other.ino, other.attr.nlink), (fifo.ino, 2));
    client.rename(&CX, (dir.ino, name("s")), (Ino::ROOT, name("t")), RenameFlags::empty()).unwrap();
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("t")).unwrap().ino, link.ino);
    let exchange = client.rename(&CX, (dir.ino, name("p")), (Ino::ROOT, name("t")), RenameFlags::EXCHANGE);
    assert_eq!(exchange, Err(Errno::INVAL));
    assert_eq!(client.lookup_parent(&CX, dir.ino).unwrap().ino, Ino::ROOT);
    assert_eq!(client.rmdir(&CX, Ino::ROOT, name("d")), Err(Errno::NOTEMPTY));
    assert_eq!(client.unlink(&CX, Ino::ROOT, name("d")), Err(Errno::ISDIR));
    client.unlink(&CX, dir.ino, name("p")).unwrap();
    client.rmdir(&CX, Ino::ROOT, name("d")).unwrap();
    assert_eq!(client.lookup(&CX, link.ino, name("x")).unwrap_err(), Errno::NOTDIR);
    let again = client.mkdir(&CX, Ino::ROOT, name("t"), &common::dir(0o750));
    assert_eq!(again.unwrap_err(), Errno::EXIST);
}

#[test]
fn new_files_belong_to_their_creator() {
    let served = Served::new();
    let client = served.connect(Options { uid: 0, ..plain() });
    let dir = client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o777)).unwrap();
    let joe = Caller { uid: 1000, gid: 100, ..*CX };
    let sub = client.mkdir(&joe, dir.ino, name("s"), &common::dir(0o755)).unwrap();
    let (made, handle) = client.create(&joe, sub.ino, name("f"), &common::file(0o600), OFlags::RDWR).unwrap();
    assert_eq!((sub.attr.uid, sub.attr.gid, made.attr.uid, made.attr.gid), (1000, 100, 1000, 100));
    assert_eq!((dir.attr.uid, dir.attr.gid), (0, 0));
    write(&client, made.ino, handle, 0, b"x").unwrap();
    client.release(&joe, made.ino, handle);
    // A user that the server refuses.
    let served = Served::with(ferry_ninep::Users::Only(vec![ferry_ninep::Identity::default()]));
    let client = served.connect(Options { uid: 0, ..plain() });
    assert_eq!(client.mkdir(&joe, Ino::ROOT, name("d"), &common::dir(0o777)).unwrap_err(), Errno::ACCESS);
}

#[test]
fn many_users_take_a_bounded_number_of_fids() {
    let served = Served::new();
    let client = served.connect(Options { uid: 0, ..plain() });
    let open = SetAttr { mode: Some(0o777), ..SetAttr::default() };
    client.setattr(&CX, Ino::ROOT, None, &open).unwrap();
    // Each makes something of its own; the first comes again, and its root is not there any more.
    for (number, uid) in (1..300).chain([1]).enumerate() {
        let user = Caller { uid, gid: 100, ..*CX };
        let made = client.mkdir(&user, Ino::ROOT, name(&number.to_string()), &common::dir(0o755)).unwrap();
        assert_eq!(made.attr.uid, uid);
        client.forget(made.ino, 1);
    }
    served.settles(|usage| usage.fids <= 100);
}

#[test]
fn listings_bring_every_name_once_with_its_inode() {
    let served = Served::new();
    let client = served.connect(plain());
    for n in 0..300 {
        let (entry, handle) =
            client.create(&CX, Ino::ROOT, name(&format!("file-{n}")), &common::file(0o600), OFlags::RDWR).unwrap();
        client.release(&CX, entry.ino, handle);
        client.forget(entry.ino, 1);
    }
    for (plus, room) in [(false, 1000), (true, 1000), (true, 7), (false, 7)] {
        let handle = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
        let mut seen = Vec::new();
        let mut offset = 0;
        loop {
            let mut out = common::Few::new(room);
            client.readdir(&CX, &DirRange { ino: Ino::ROOT, handle, offset, plus }, &mut out).unwrap();
            let Some(last) = out.items.last() else { break };
            offset = last.next;
            seen.extend(out.items);
        }
        client.releasedir(&CX, Ino::ROOT, handle);
        let files: Vec<_> = seen.iter().filter(|item| item.name.starts_with("file-")).collect();
        let names: std::collections::BTreeSet<_> = seen.iter().map(|item| item.name.clone()).collect();
        assert_eq!((files.len(), names.len(), seen.len()), (300, 302, 302), "plus={plus}, {room} at a time");
        assert!(files.iter().all(|item| item.entry.is_some() == plus));
        for entry in files.iter().filter_map(|item| item.entry) {
            assert_eq!(entry.attr.kind(), FileType::RegularFile);
            client.forget(entry.ino, 1);
        }
        assert_eq!(client.usage().inodes, 0, "what was looked up and not told is given back");
    }
    // Looking up is done many at a time.
    assert!(client.usage().in_flight_max >= 16, "{:?}", client.usage());
}

#[test]
fn setattr_changes_the_given_attributes() {
    let served = Served::new();
    let client = served.connect(plain());
    let (entry, handle) = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), OFlags::RDWR).unwrap();
    let time = Timespec { sec: 1_000_000, nsec: 5 };
    let set = SetAttr {
        mode: Some(0o6755),
        uid: Some(7),
        gid: Some(8),
        size: Some(100),
        mtime: Some(SetTime::At(time)),
        ..SetAttr::default()
    };
    let attr = client.setattr(&CX, entry.ino, Some(handle), &set).unwrap();
    assert_eq!((attr.uid, attr.gid, attr.size, attr.mtime), (7, 8, 100, time));
    client.setattr(&CX, entry.ino, None, &SetAttr { mode: Some(0o6755), ..SetAttr::default() }).unwrap();
    // A write by somebody without the right to keep them.
    let at = IoRange { clear_privileges: true, ..range(entry.ino, handle, 0, 1) };
    assert_eq!(client.write(&CX, &at, &mut b"x".as_slice()).unwrap().bytes(), Some(1));
    assert_eq!(client.getattr(&CX, entry.ino, None).unwrap().mode & 0o7777, 0o755);
    client.setattr(&CX, entry.ino, None, &SetAttr { mode: Some(0o4755), ..SetAttr::default() }).unwrap();
    let set = SetAttr { size: Some(1), clear_privileges: true, ..SetAttr::default() };
    assert_eq!(client.setattr(&CX, entry.ino, None, &set).unwrap().mode & 0o7777, 0o755);
    let totals = client.statfs(&CX, Ino::ROOT).unwrap();
    assert!(totals.blocks > 0 && totals.namelen == 255);
}

#[test]
fn extended_attributes_are_set_read_listed_and_removed() {
    let served = Served::new();
    let client = served.connect(Options { msize: 8192, ..plain() });
    let (entry, _) = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), OFlags::RDWR).unwrap();
    // Longer than one message.
    let value: Vec<u8> = (0..30_000_u32).map(|n| (n % 253) as u8).collect();
    let set = |key: &str, value: &[u8], how| client.setxattr(&CX, entry.ino, key.as_bytes(), value, how, false);
    set("user.long", &value, XattrFlags::empty()).unwrap();
    set("user.none", b"", XattrFlags::empty()).unwrap();
    assert_eq!(set("user.none", b"x", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.new", b"x", XattrFlags::REPLACE), Err(Errno::NODATA));
    assert_eq!(client.getxattr(&CX, entry.ino, b"user.long").unwrap(), value);
    assert_eq!(client.getxattr(&CX, entry.ino, b"user.none").unwrap(), b"");
    assert_eq!(client.getxattr(&CX, entry.ino, b"user.other").unwrap_err(), Errno::NODATA);
    let list = client.listxattr(&CX, entry.ino).unwrap();
    let mut names: Vec<_> = list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    assert_eq!(names, [b"user.long".as_slice(), b"user.none"]);
    client.removexattr(&CX, entry.ino, b"user.long").unwrap();
    assert_eq!(client.removexattr(&CX, entry.ino, b"user.long"), Err(Errno::NODATA));
}

#[test]
fn small_messages_carry_long_transfers() {
    let served = Served::new();
    for (msize, depth) in [(4096, 1), (5000, 3), (65536, 64)] {
        let client = served.connect(Options { msize, depth, ..plain() });
        let (entry, handle) = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), flags("rw")).unwrap();
        let data: Vec<u8> = (0..200_003_u32).map(|n| (n % 241) as u8).collect();
        assert_eq!(write(&client, entry.ino, handle, 0, &data).unwrap(), data.len());
        assert_eq!(read(&client, entry.ino, handle, 0, 300_000).unwrap(), data);
        assert!(client.usage().in_flight_max <= depth);
        client.unlink(&CX, Ino::ROOT, name("a")).unwrap();
    }
}

#[test]
fn each_caller_has_a_request_in_flight() {
    let slow = common::Slow::source(std::time::Duration::from_millis(200));
    let served = Served::of(slow, ferry_ninep::Users::Client);
    let client = served.connect(plain());
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        for n in 0..16 {
            let client = &client;
            scope.spawn(move || client.lookup(&CX, Ino::ROOT, name(&format!("slow-{n}"))).unwrap_err());
        }
    });
    assert!(client.usage().in_flight_max >= 16, "{:?}", client.usage());
    assert!(begun.elapsed() < std::time::Duration::from_millis(200 * 16), "one after the other: {:?}", begun.elapsed());
}

/// A server without Tunlinkat and Trenameat is used by the older messages, once it has said so.
#[test]
fn older_servers_remove_and_rename_by_fid() {
    use common::fake::{Fake, reply};
    use ferry_wire::ninep::{Reply, Request};
    let asked = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let noted = std::sync::Arc::clone(&asked);
    let fake = Fake::new(move |tag, request| {
        let (word, answer) = match request {
            Request::Unlinkat { .. } => ("unlinkat", Reply::Error(Errno::OPNOTSUPP)),
            Request::Renameat { .. } => ("renameat", Reply::Error(Errno::OPNOTSUPP)),
            Request::Remove { .. } => ("remove", Reply::Remove),
            Request::Rename { .. } => ("rename", Reply::Rename),
            _ => return None,
        };
        noted.lock().unwrap().push(word);
        Some(reply(tag, &answer))
    });
    let client = fake.connect(plain()).unwrap();
    client.unlink(&CX, Ino::ROOT, name("a")).unwrap();
    client.unlink(&CX, Ino::ROOT, name("b")).unwrap();
    client.rename(&CX, (Ino::ROOT, name("a")), (Ino::ROOT, name("b")), RenameFlags::empty()).unwrap();
    // Every name leads to a file there.
    assert_eq!(client.rmdir(&CX, Ino::ROOT, name("a")), Err(Errno::NOTDIR));
    assert_eq!(*asked.lock().unwrap(), ["unlinkat", "remove", "remove", "rename"]);
}

/// Who reads and writes by turns does not wait for the server each time: only users' questions have data written first.
#[test]
fn the_end_of_a_file_is_known_without_a_request() {
    let served = Served::new();
    let client = served.connect(Options { cache: ferry_9p_client::Cache::Auto, ..plain() });
    let (made, handle) = client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), flags("rw")).unwrap();
    assert_eq!(client.getattr_hint(&CX, made.ino, handle), None, "nothing is written behind");
    let before = client.usage().messages;
    for round in 0..50 {
        write(&client, made.ino, handle, round * 1000, &[7; 1000]).unwrap();
        assert_eq!(client.getattr_hint(&CX, made.ino, handle).unwrap().size, (round + 1) * 1000);
        assert_eq!(read(&client, made.ino, handle, round * 1000, 1000).unwrap(), [7; 1000]);
    }
    // On a slow machine some may have been written because they were old.
    let few = client.usage().messages - before;
    assert!(few < 20, "{few} messages");
    let attr = client.getattr(&CX, made.ino, Some(handle)).unwrap();
    assert_eq!(attr.size, 50_000);
    assert_eq!(
        served.source.lookup(&CX, Ino::ROOT, name("f")).unwrap().attr.mtime,
        attr.mtime,
        "it was written before"
    );
    assert_eq!(client.getattr_hint(&CX, made.ino, handle), None);
}

/// Linux asks for a file's capabilities before it writes, whenever it has been told attributes: that they are not there is
/// known for a while, and of a new file at once.
#[test]
fn missing_capabilities_are_requested_once() {
    const NAME: &[u8] = b"security.capability";
    let served = Served::new();
    let client = served.connect(Options { cache: ferry_9p_client::Cache::Auto, ..plain() });
    let (made, _) = client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), flags("rw")).unwrap();
    let other = served.connect(Options { cache: ferry_9p_client::Cache::Auto, ..plain() });
    let found = other.lookup(&CX, Ino::ROOT, name("f")).unwrap();
    for (client, ino) in [(&client, made.ino), (&other, found.ino)] {
        let before = client.usage().messages;
        for _ in 0..200 {
            assert_eq!(client.getxattr(&CX, ino, NAME).unwrap_err(), Errno::NODATA);
        }
        // Machines that are slow ask now and then.
        let few = client.usage().messages - before;
        assert!(few < 100, "{few} messages");
    }
    // What this client sets it sees.
    client.setxattr(&CX, made.ino, NAME, b"value", XattrFlags::empty(), false).unwrap();
    assert_eq!(client.getxattr(&CX, made.ino, NAME).unwrap(), b"value");
    client.removexattr(&CX, made.ino, NAME).unwrap();
    assert_eq!(client.getxattr(&CX, made.ino, NAME).unwrap_err(), Errno::NODATA);
}

/// With our server, whose longest is 4 MiB: it answers the lesser of both, and that is used.
#[test]
fn messages_are_as_long_as_both_sides_want() {
    const BYTES: u32 = 7 << 20;
    let data: Vec<u8> = (0..BYTES).map(|at| at.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    for (msize, messages) in [(1 << 20, 8), (4 << 20, 2), (64 << 20, 2)] {
        let served = Served::new();
        let client = served.connect(Options { msize, ..plain() });
        let (made, handle) = client.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), flags("rw")).unwrap();
        let before = client.usage().messages;
        assert_eq!(write(&client, made.ino, handle, 0, &data), Ok(data.len()));
        assert_eq!(client.usage().messages - before, messages, "written with {msize}");
        assert!(read(&client, made.ino, handle, 0, BYTES).unwrap() == data, "{msize}");
        assert_eq!(client.usage().messages - before, 2 * messages, "and read");
        // By the cache, too.
        let other = served.connect(Options { msize, cache: ferry_9p_client::Cache::Auto, ..plain() });
        let found = other.lookup(&CX, Ino::ROOT, name("f")).unwrap();
        let handle = other.open(&CX, found.ino, flags("rw")).unwrap();
        assert!(read(&other, found.ino, handle, 0, BYTES).unwrap() == data, "{msize}");
        assert_eq!(write(&other, found.ino, handle, 0, &data[1..]), Ok(data.len() - 1));
        other.fsync(&CX, found.ino, handle, false).unwrap();
        let again = served.connect(plain());
        let found = again.lookup(&CX, Ino::ROOT, name("f")).unwrap();
        let handle = again.open(&CX, found.ino, flags("r")).unwrap();
        assert!(read(&again, found.ino, handle, 0, BYTES - 1).unwrap() == data[1..], "{msize}");
    }
}
