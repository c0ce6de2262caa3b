//! What each request does on a directory of the host.

use crate::common;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::sync::Arc;

use common::{Client, DirServer, MSIZE, ROOT, Server, name};
use ferry_ninep::{Identity, Options, Users};
use ferry_vfs::{Errno, FileSystem, FileType, LockKind, OFlags, SetAttr, SetTime, Timespec, XattrFlags};
use ferry_wire::ninep::*;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn versions_are_negotiated_and_begin_new_sessions() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    let mut client = share.connect();
    let version = |client: &mut Client<_>, msize, version: &[u8]| {
        client.send(Tag::NONE, &Request::Version { msize, version });
        let (_, message) = client.receive();
        match Reply::decode(&message).unwrap().1 {
            Reply::Version { msize, version } => Ok((msize, version.to_vec())),
            Reply::Error(errno) => Err(errno),
            other => panic!("{other:?}"),
        }
    };
    // Nothing was agreed on yet.
    assert_eq!(client.attach(ROOT, 0), Err(Errno::PROTO));
    for old in [&b"9P2000"[..], b"9P2000.u"] {
        assert_eq!(version(&mut client, 8192, old), Ok((8192, VERSION_UNKNOWN.to_vec())));
        assert_eq!(client.attach(ROOT, 0), Err(Errno::PROTO));
    }
    assert_eq!(version(&mut client, 1000, VERSION), Err(Errno::MSGSIZE));
    assert_eq!(version(&mut client, u32::MAX, VERSION), Ok((Options::default().msize_max, VERSION.to_vec())));
    client.attach(ROOT, 0).unwrap();
    client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    assert_eq!(share.usage().fids, 2);
    // Once more: no fid is left, and the file is closed.
    assert_eq!(version(&mut client, 8192, b"9P2000.L.Google.12"), Ok((8192, VERSION.to_vec())));
    share.assert_released();
    assert_eq!(client.read(Fid(1), 0, 4), Err(Errno::BADF));
    client.attach(ROOT, 0).unwrap();
    client.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    assert_eq!(client.read(Fid(1), 0, u32::MAX), Ok(b"text".to_vec()));
    drop(client);
    share.settles(|usage| usage.connections == 0);
    share.assert_released();
}

#[test]
fn requests_are_counted_with_their_bytes_and_errors() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "text").unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
    assert_eq!(client.read(Fid(1), 0, 4096), Ok(b"text".to_vec()));
    assert_eq!(client.write(Fid(1), 0, b"other!"), Ok(6));
    assert_eq!(client.walk(ROOT, Fid(2), "missing"), Err(Errno::NOENT));
    assert_eq!(client.lock(Fid(1), LockKind::Write, 1, false), Ok(LockStatus::Success));
    // The last reply is counted before it is sent, or a moment later.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while share.counted("lock").0 < 1 && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(share.counted("attach"), (1, 0, vec![]));
    assert_eq!(share.counted("read"), (1, 4, vec![]));
    assert_eq!(share.counted("write"), (1, 6, vec![]));
    assert_eq!(share.counted("walk"), (2, 0, vec![(Errno::NOENT.raw_os_error(), 1)]));
    assert_eq!(share.counted("lock"), (1, 0, vec![]));
}

#[test]
fn files_are_created_written_read_and_found() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    let made = client.create(Fid(1), "file", OFlags::RDWR | OFlags::EXCL, 0o640).unwrap();
    assert_eq!(made.kind, QidKind::FILE);
    assert_ne!(made.version, 0);
    let long: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let most = (MSIZE as usize) - WRITE_HEAD_BYTES;
    for (at, part) in long.chunks(most).enumerate() {
        assert_eq!(client.write(Fid(1), (at * most) as u64, part).unwrap() as usize, part.len());
    }
    assert_eq!(fs::read(share.path.join("file")).unwrap(), long);
    assert_eq!(fs::metadata(share.path.join("file")).unwrap().mode(), 0o100_640);
    // As much as a message holds, and no more.
    let read = client.read(Fid(1), 0, u32::MAX).unwrap();
    assert_eq!((read.len(), &read[..]), (MSIZE as usize - READ_HEAD_BYTES, &long[..read.len()]));
    assert_eq!(client.read(Fid(1), 2_999_990, 100).unwrap(), long[2_999_990..]);
    assert_eq!(client.read(Fid(1), 3_000_000, 100).unwrap(), b"");
    client.ok(&Request::Fsync { fid: Fid(1), data_only: true }).unwrap();
    // The version follows the file.
    let now = client.getattr(Fid(1)).unwrap();
    assert_eq!((now.qid.path, now.attr.size, now.attr.mode), (made.path, 3_000_000, 0o100_640));
    assert_ne!(now.qid.version, made.version);
    let found = client.walk(ROOT, Fid(2), "file").unwrap();
    assert_eq!(found, [now.qid]);
    let (opened, iounit) = client.open(Fid(2), OFlags::RDONLY).unwrap();
    assert_eq!((opened, iounit), (now.qid, 0));
    assert_eq!(client.write(Fid(2), 0, b"x"), Err(Errno::BADF));
    // An open fid stays good when its name is gone.
    client.ok(&Request::Unlinkat { dir: ROOT, name: name("file"), is_dir: false }).unwrap();
    assert_eq!(client.read(Fid(2), 0, 3).unwrap(), long[..3]);
    assert_eq!(client.getattr(Fid(2)).unwrap().attr.nlink, 0);
    client.walk(Fid(2), Fid(3), "").unwrap();
    assert_eq!(client.getattr(Fid(3)).unwrap().attr.size, 3_000_000);
    (1..=3).for_each(|fid| client.ok(&Request::Clunk { fid: Fid(fid) }).unwrap());
    assert_eq!(client.ok(&Request::Clunk { fid: Fid(1) }), Err(Errno::BADF));
    client.ok(&Request::Clunk { fid: ROOT }).unwrap();
    share.assert_released();
}

/// By the rights of root, who may open everything, or of a user that is checked here.
#[test]
fn create_opens_existing_files_unless_exclusive() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("there"), "text").unwrap();
    symlink("there", share.path.join("link")).unwrap();
    fs::create_dir(share.path.join("dir")).unwrap();
    let mut client = share.attached(0);
    assert_eq!(client.create(Fid(1), "there", OFlags::RDWR | OFlags::EXCL, 0o600), Err(Errno::EXIST));
    // The fid is still the directory.
    assert!(client.walk(Fid(1), Fid(2), "there").is_ok());
    client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
    client.create(Fid(1), "there", OFlags::RDWR, 0o600).unwrap();
    assert_eq!(client.read(Fid(1), 0, 10).unwrap(), b"text");
    client.create(Fid(3), "there", OFlags::RDWR | OFlags::TRUNC, 0o600).unwrap();
    assert_eq!(client.read(Fid(1), 0, 10).unwrap(), b"");
    assert_eq!(client.create(Fid(4), "link", OFlags::RDWR, 0o600), Err(Errno::LOOP));
    assert_eq!(client.create(Fid(5), "dir", OFlags::RDONLY, 0o600), Err(Errno::ISDIR));
    // Only directories, and only once.
    let again = Request::Create { fid: Fid(1), name: name("x"), flags: OFlags::RDWR, mode: 0o600, gid: 0 };
    assert_eq!(client.ok(&again), Err(Errno::BADF));
    assert_eq!(client.open(Fid(1), OFlags::RDONLY), Err(Errno::BADF));
}

/// The client's kernel has found nothing by that name, and so has checked nothing.
#[test]
fn a_file_created_meanwhile_is_not_opened_without_a_check() {
    if !is_root() {
        return;
    }
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("secret"), "text").unwrap();
    fs::set_permissions(share.path.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let mut client = share.attached(1000);
    for flags in [OFlags::RDWR, OFlags::WRONLY | OFlags::TRUNC, OFlags::RDONLY] {
        assert_eq!(client.create(Fid(1), "secret", flags, 0o600), Err(Errno::STALE), "{flags:?}");
        // The fid is still the directory.
        client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
        assert_eq!(client.create(Fid(1), "secret", flags | OFlags::EXCL, 0o600), Err(Errno::EXIST), "{flags:?}");
        client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
    }
    assert_eq!(fs::read(share.path.join("secret")).unwrap(), b"text");
    // What the user may open, whatever groups it is in, is opened.
    for (number, (owner, mode, flags, outcome)) in [
        (1000, 0o400, OFlags::RDONLY, Ok(())),
        (1000, 0o466, OFlags::RDWR, Err(Errno::STALE)),
        (0, 0o644, OFlags::RDONLY, Ok(())),
        (0, 0o644, OFlags::RDONLY | OFlags::TRUNC, Err(Errno::STALE)),
        (0, 0o666, OFlags::WRONLY, Ok(())),
        (0, 0o660, OFlags::WRONLY, Err(Errno::STALE)),
        // Those of the group may less than others.
        (0, 0o604, OFlags::RDONLY, Err(Errno::STALE)),
    ]
    .into_iter()
    .enumerate()
    {
        let (file, fid) = (format!("f{number}"), Fid(10 + u32::try_from(number).unwrap()));
        fs::write(share.path.join(&file), "text").unwrap();
        fs::set_permissions(share.path.join(&file), fs::Permissions::from_mode(mode)).unwrap();
        std::os::unix::fs::chown(share.path.join(&file), Some(owner), Some(owner)).unwrap();
        assert_eq!(client.create(fid, &file, flags, 0o600).map(drop), outcome, "{owner} {mode:o} {flags:?}");
    }
}

/// Linux's client judges what it found by a name, and sends the name.
#[test]
fn sticky_directories_protect_files_replaced_meanwhile() {
    if !is_root() {
        return;
    }
    let share = DirServer::new(Options::default());
    let at = |name: &str| share.path.join("tmp").join(name);
    fs::create_dir(share.path.join("tmp")).unwrap();
    fs::set_permissions(share.path.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    let put = |name: &str, uid| {
        fs::write(at("draft"), "text").unwrap();
        std::os::unix::fs::chown(at("draft"), Some(uid), Some(uid)).unwrap();
        fs::rename(at("draft"), at(name)).unwrap();
    };
    let mut client = share.attached(1000);
    client.walk(ROOT, Fid(1), "tmp").unwrap();
    let mut fid = 10;
    let mut look = |client: &mut Client<_>, name| {
        fid += 1;
        client.walk(Fid(1), Fid(fid), name).unwrap();
        Fid(fid)
    };
    let unlink = |name| Request::Unlinkat { dir: Fid(1), name, is_dir: false };
    let rename = |name, new_name| Request::Renameat { dir: Fid(1), name, new_dir: Fid(1), new_name };
    put("mine", 1000);
    put("own", 1000);
    look(&mut client, "mine");
    put("mine", 0);
    for request in [unlink(name("mine")), rename(name("mine"), name("x")), rename(name("own"), name("mine"))] {
        assert_eq!(client.ok(&request), Err(Errno::STALE), "{request:?}");
        assert!(at("mine").exists() && at("own").exists(), "{request:?}");
    }
    // By a fid it is what the fid is.
    let fid = look(&mut client, "own");
    put("own", 0);
    assert_eq!(client.ok(&Request::Remove { fid }), Err(Errno::NOENT));
    // One that has looked again, and lets its user (who has a capability in the client) do it all the same.
    for (wanted, request) in [("mine", unlink(name("mine"))), ("own", rename(name("own"), name("x")))] {
        assert_eq!(client.ok(&request), Err(Errno::STALE), "{request:?}");
        look(&mut client, wanted);
        assert_eq!(client.ok(&request), Ok(()), "{request:?}");
    }
    // What belongs to the user, or lies in its directory, it removes at once; and root everything.
    put("mine", 1000);
    client.ok(&unlink(name("mine"))).unwrap();
    put("roots", 0);
    client.attach(Fid(5), 0).unwrap();
    client.walk(Fid(5), Fid(6), "tmp").unwrap();
    client.ok(&Request::Unlinkat { dir: Fid(6), name: name("roots"), is_dir: false }).unwrap();
    std::os::unix::fs::chown(share.path.join("tmp"), Some(1000), None).unwrap();
    put("roots", 0);
    client.ok(&unlink(name("roots"))).unwrap();
}

/// Linux shows the mask of an ACL as the group's permissions, and checks no ACL without `posixacl`.
#[test]
fn modes_for_clients_without_acls_grant_no_more_than_the_acl() {
    // The owner 6, the group 0, the mask 6, others 0; then user 1000 0 and others 4.
    let entry =
        |tag: u16, perm: u16, id: u32| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat();
    let acl = |entries: &[Vec<u8>]| [&2_u32.to_le_bytes()[..], &entries.concat()].concat();
    let none = u32::MAX;
    let group = acl(&[entry(1, 6, none), entry(4, 0, none), entry(0x10, 6, none), entry(0x20, 0, none)]);
    let user =
        acl(&[entry(1, 6, none), entry(2, 0, 1000), entry(4, 4, none), entry(0x10, 4, none), entry(0x20, 4, none)]);
    for (posix_acl, xattr) in [(false, true), (true, true), (true, false)] {
        let share = DirServer::new(Options { posix_acl, xattr, ..Options::default() });
        let mut client = share.attached(0);
        for (number, (value, mask, safe)) in [(&group, 0o660, 0o600), (&user, 0o644, 0o600)].into_iter().enumerate() {
            let file = format!("f{number}");
            fs::write(share.path.join(&file), "text").unwrap();
            let set = rustix::fs::setxattr(
                share.path.join(&file),
                "system.posix_acl_access",
                value,
                rustix::fs::XattrFlags::empty(),
            );
            if set == Err(Errno::OPNOTSUPP) {
                ferry_skip::skip!("this file system has no ACLs");
                return;
            }
            set.unwrap();
            assert_eq!(fs::metadata(share.path.join(&file)).unwrap().permissions().mode() & 0o777, mask);
            let fid = Fid(10 + u32::try_from(number).unwrap());
            client.walk(ROOT, fid, &file).unwrap();
            let shown = client.getattr(fid).unwrap().attr.mode & 0o777;
            assert_eq!(shown, if posix_acl && xattr { mask } else { safe }, "{file}, {posix_acl}, {xattr}");
        }
    }
}

#[test]
fn walks_stop_at_missing_names_and_at_the_root() {
    let share = DirServer::new(Options::default());
    fs::create_dir_all(share.path.join("a/b")).unwrap();
    fs::write(share.path.join("a/file"), "").unwrap();
    let mut client = share.attached(0);
    let root = client.getattr(ROOT).unwrap().qid;
    assert_eq!((root.kind, root.version == 0), (QidKind::DIR, false));
    let qids = client.walk(ROOT, Fid(1), "a/b/../file").unwrap();
    assert_eq!(qids.len(), 4);
    assert_eq!((qids[0], qids[3].kind), (qids[2], QidKind::FILE));
    // Nothing of it: an error. A part of it: that, and no fid.
    assert_eq!(client.walk(ROOT, Fid(2), "missing/b"), Err(Errno::NOENT));
    assert_eq!(client.walk(ROOT, Fid(2), "a/missing/x").unwrap(), qids[..1]);
    assert_eq!(client.walk(ROOT, Fid(2), "a/file/x").unwrap(), [qids[0], qids[3]]);
    assert_eq!(client.getattr(Fid(2)), Err(Errno::BADF));
    assert_eq!(client.walk(Fid(1), Fid(2), "x"), Err(Errno::NOTDIR));
    assert_eq!(client.walk(ROOT, Fid(2), "../../..").unwrap().last().unwrap().path, root.path);
    // A fid that is in use, one that is none, the fid itself.
    assert_eq!(client.walk(ROOT, Fid(1), "a"), Err(Errno::BADF));
    assert_eq!(client.walk(ROOT, Fid::NONE, "a"), Err(Errno::INVAL));
    assert_eq!(client.walk(Fid(9), Fid(3), "a"), Err(Errno::BADF));
    client.walk(Fid(2), Fid(2), "a/b").unwrap();
    assert_eq!(client.walk(Fid(2), Fid(3), "..").unwrap(), qids[..1]);
    drop(client);
    share.settles(|usage| usage.connections == 0);
    share.assert_released();
}

#[test]
fn a_tree_is_a_directory_that_no_walk_leaves() {
    let share = DirServer::new(Options::default());
    fs::create_dir_all(share.path.join("a/b")).unwrap();
    fs::write(share.path.join("file"), "").unwrap();
    let mut client = share.connect();
    client.hello(MSIZE);
    let mut attach = |fid, tree: &str| {
        let user = User { name: b"nobody", uid: None };
        client.ok(&Request::Attach { fid: Fid(fid), afid: Fid::NONE, user, tree: tree.as_bytes() })
    };
    assert_eq!((attach(1, ""), attach(2, "/"), attach(3, "/a/./b/")), (Ok(()), Ok(()), Ok(())));
    assert_eq!(attach(1, ""), Err(Errno::BADF));
    assert_eq!((attach(4, "../x"), attach(4, "missing")), (Err(Errno::INVAL), Err(Errno::NOENT)));
    assert_eq!(attach(4, "file/x"), Err(Errno::NOTDIR));
    let user = User { name: b"", uid: Some(0) };
    assert_eq!(client.ok(&Request::Auth { afid: Fid(7), user, tree: b"" }), Err(Errno::NOENT), "as diod answers");
    assert_eq!(client.ok(&Request::Attach { fid: Fid(7), afid: Fid(6), user, tree: b"" }), Err(Errno::INVAL));
    let inner = client.getattr(Fid(3)).unwrap().qid;
    assert_eq!(client.walk(Fid(3), Fid(5), "../..").unwrap(), [inner, inner]);
    assert_eq!(client.walk(Fid(3), Fid(6), "../file"), Ok(vec![inner]));
}

#[test]
fn directories_are_listed_in_pieces_from_anywhere() {
    let share = DirServer::new(Options::default());
    let names: Vec<String> = (0..300).map(|number| format!("name-{number:03}")).collect();
    names.iter().for_each(|name| fs::write(share.path.join(name), "").unwrap());
    let mut client = share.attached(0);
    client.walk(ROOT, Fid(1), "").unwrap();
    assert_eq!(client.readdir(Fid(1), 0, 1000), Err(Errno::BADF));
    client.open(Fid(1), OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
    let whole = client.readdir(Fid(1), 0, MSIZE).unwrap();
    let mut listed: Vec<_> =
        whole.iter().map(|(name, ..)| name.clone()).filter(|name| !name.starts_with('.')).collect();
    listed.sort();
    assert_eq!(listed, names);
    let mut pieces = Vec::new();
    while let Ok(piece) = client.readdir(Fid(1), pieces.last().map_or(0, |(_, next, _)| *next), 200)
        && !piece.is_empty()
    {
        assert!(piece.len() < 9);
        pieces.extend(piece);
    }
    assert_eq!(pieces, whole);
    // From the middle, twice, and from the start again.
    for from in [150, 20] {
        let offset = whole[from - 1].1;
        assert_eq!(client.readdir(Fid(1), offset, MSIZE).unwrap(), whole[from..]);
    }
    assert_eq!(client.readdir(Fid(1), 0, MSIZE).unwrap(), whole);
    // Too little for one is no end.
    assert_eq!(client.readdir(Fid(1), whole[10].1, 10), Err(Errno::INVAL));
    // Each is the file that a walk leads to.
    let (name, _, qid) = whole.iter().find(|(name, ..)| name == "name-007").unwrap();
    assert_eq!(client.walk(ROOT, Fid(2), name).unwrap()[0].path, qid.path);
    assert_eq!(client.readdir(Fid(2), 0, 100), Err(Errno::BADF));
    assert_eq!(client.open(Fid(2), OFlags::RDONLY | OFlags::DIRECTORY), Err(Errno::NOTDIR));
    assert_eq!(client.read(Fid(1), 0, 100), Err(Errno::ISDIR));
}

#[test]
fn names_are_made_moved_and_removed() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    let dir = ROOT;
    client.ok(&Request::Mkdir { dir, name: name("d"), mode: 0o750, gid: 0 }).unwrap();
    client.ok(&Request::Symlink { dir, name: name("s"), target: b"d/x", gid: 0 }).unwrap();
    let fifo = FileType::Fifo.as_raw_mode() | 0o600;
    client.ok(&Request::Mknod { dir, name: name("p"), mode: fifo, rdev: 0, gid: 0 }).unwrap();
    client.create(Fid(1), "f", OFlags::WRONLY, 0o600).unwrap();
    client.ok(&Request::Link { dir, fid: Fid(1), name: name("l") }).unwrap();
    assert_eq!(fs::metadata(share.path.join("d")).unwrap().mode(), 0o040_750);
    assert_eq!(fs::read_link(share.path.join("s")).unwrap().to_str(), Some("d/x"));
    assert!(fs::metadata(share.path.join("p")).unwrap().file_type().is_fifo());
    assert_eq!(fs::metadata(share.path.join("l")).unwrap().nlink(), 2);
    client.walk(ROOT, Fid(2), "s").unwrap();
    let target = client.get(&Request::Readlink { fid: Fid(2) }, |reply| match reply {
        Reply::Readlink { target } => Some(target.to_vec()),
        _ => None,
    });
    assert_eq!(target, Ok(b"d/x".to_vec()));
    client.walk(ROOT, Fid(3), "d").unwrap();
    let moved = Request::Renameat { dir, name: name("l"), new_dir: Fid(3), new_name: name("m") };
    client.ok(&moved).unwrap();
    assert_eq!(client.ok(&moved), Err(Errno::NOENT));
    assert!(share.path.join("d/m").exists());
    // By fid: the name that led to it, as long as it still does.
    client.walk(ROOT, Fid(4), "f").unwrap();
    client.ok(&Request::Rename { fid: Fid(4), dir: Fid(3), name: name("g") }).unwrap();
    assert!(share.path.join("d/g").exists() && !share.path.join("f").exists());
    client.ok(&Request::Rename { fid: Fid(4), dir, name: name("h") }).unwrap();
    fs::remove_file(share.path.join("h")).unwrap();
    fs::write(share.path.join("h"), "another").unwrap();
    assert_eq!(client.ok(&Request::Rename { fid: Fid(4), dir, name: name("i") }), Err(Errno::NOENT));
    assert_eq!(client.ok(&Request::Remove { fid: Fid(4) }), Err(Errno::NOENT));
    assert_eq!(client.getattr(Fid(4)), Err(Errno::BADF), "the fid ends in any case");
    assert!(share.path.join("h").exists());
    assert_eq!(client.ok(&Request::Unlinkat { dir, name: name("d"), is_dir: false }), Err(Errno::ISDIR));
    assert_eq!(client.ok(&Request::Unlinkat { dir, name: name("d"), is_dir: true }), Err(Errno::NOTEMPTY));
    assert_eq!(client.ok(&Request::Unlinkat { dir, name: name("h"), is_dir: true }), Err(Errno::NOTDIR));
    client.ok(&Request::Unlinkat { dir: Fid(3), name: name("m"), is_dir: false }).unwrap();
    client.ok(&Request::Remove { fid: Fid(3) }).unwrap();
    assert!(!share.path.join("d").exists());
    assert_eq!(client.ok(&Request::Remove { fid: ROOT }), Err(Errno::BUSY));
}

/// A client that renames by names, and removes by fids.
#[test]
fn fids_follow_the_renames_of_their_session() {
    let share = DirServer::new(Options::default());
    fs::create_dir(share.path.join("d")).unwrap();
    fs::write(share.path.join("f"), "first").unwrap();
    let mut client = share.attached(0);
    client.walk(ROOT, Fid(1), "d").unwrap();
    (4..7).for_each(|fid| _ = client.walk(ROOT, Fid(fid), "f").unwrap());
    let (dir, d) = (ROOT, Fid(1));
    let renameat = |dir, from, new_dir, to| Request::Renameat { dir, name: name(from), new_dir, new_name: name(to) };
    client.ok(&renameat(dir, "f", d, "g")).unwrap();
    // Another file takes its name, and is renamed, too.
    fs::write(share.path.join("f"), "second").unwrap();
    (7..9).for_each(|fid| _ = client.walk(ROOT, Fid(fid), "f").unwrap());
    client.ok(&renameat(dir, "f", dir, "h")).unwrap();
    client.ok(&renameat(d, "g", d, "i")).unwrap();
    client.ok(&Request::Rename { fid: Fid(4), dir, name: name("j") }).unwrap();
    assert_eq!(fs::read(share.path.join("j")).unwrap(), b"first");
    client.ok(&Request::Rename { fid: Fid(7), dir: d, name: name("k") }).unwrap();
    assert_eq!(fs::read(share.path.join("d/k")).unwrap(), b"second");
    client.ok(&Request::Remove { fid: Fid(5) }).unwrap();
    client.ok(&Request::Remove { fid: Fid(8) }).unwrap();
    assert!(!share.path.join("j").exists() && !share.path.join("d/k").exists());
    // Of others' renames it knows nothing; and only the last ones are known.
    fs::write(share.path.join("f"), "third").unwrap();
    client.walk(ROOT, Fid(10), "f").unwrap();
    client.walk(ROOT, Fid(11), "f").unwrap();
    fs::rename(share.path.join("f"), share.path.join("m0")).unwrap();
    assert_eq!(client.ok(&Request::Remove { fid: Fid(10) }), Err(Errno::NOENT));
    fs::rename(share.path.join("m0"), share.path.join("f")).unwrap();
    client.walk(ROOT, Fid(12), "f").unwrap();
    client.ok(&renameat(dir, "f", dir, "m0")).unwrap();
    let names: Vec<String> = (0..=256).map(|number| format!("m{number}")).collect();
    names.windows(2).for_each(|pair| client.ok(&renameat(dir, &pair[0], dir, &pair[1])).unwrap());
    assert_eq!(client.ok(&Request::Remove { fid: Fid(12) }), Err(Errno::NOENT));
    client.walk(ROOT, Fid(12), "m256").unwrap();
    client.ok(&renameat(dir, "m256", dir, "n")).unwrap();
    client.ok(&Request::Remove { fid: Fid(12) }).unwrap();
    drop(client);
    share.settles(|usage| usage.connections == 0);
    share.assert_released();
}

#[test]
fn attributes_are_set() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    client.create(Fid(1), "f", OFlags::RDWR, 0o644).unwrap();
    client.write(Fid(1), 0, b"0123456789").unwrap();
    let time = Timespec { sec: 1_000_000_000, nsec: 5 };
    let set = SetAttr {
        mode: Some(0o4711),
        size: Some(4),
        atime: Some(SetTime::At(time)),
        mtime: Some(SetTime::At(time)),
        ..SetAttr::default()
    };
    client.ok(&Request::Setattr { fid: Fid(1), set, ctime: true }).unwrap();
    let attr = client.getattr(Fid(1)).unwrap().attr;
    assert_eq!((attr.mode, attr.size, attr.atime, attr.mtime), (0o104_711, 4, time, time));
    client.ok(&Request::Setattr { fid: Fid(1), set: SetAttr::default(), ctime: true }).unwrap();
    assert!(attr.ctime > time && attr.blksize > 0);
    let totals = client.get(&Request::Statfs { fid: ROOT }, |reply| match reply {
        Reply::Statfs { totals, .. } => Some(totals),
        _ => None,
    });
    let totals = totals.unwrap();
    assert!(totals.frsize > 0 && totals.blocks >= totals.bfree && totals.namelen == 255, "{totals:?}");
}

/// Writing, truncating and opening with `O_TRUNC` take suid and sgid away, except from root.
#[test]
fn writes_clear_privileges() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let share = DirServer::new(Options::default());
    let file = share.path.join("f");
    fs::write(&file, "text").unwrap();
    let mode = || fs::metadata(&file).unwrap().mode() & 0o7777;
    for (uid, kept) in [(0, 0o6777), (1000, 0o777)] {
        let mut client = share.attached(uid);
        let arm = || fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).unwrap();
        arm();
        client.open_path(Fid(1), "f", OFlags::RDWR).unwrap();
        assert_eq!(mode(), 0o6777);
        client.write(Fid(1), 0, b"x").unwrap();
        assert_eq!(mode(), kept, "write by {uid}");
        arm();
        let set = SetAttr { size: Some(1), ..SetAttr::default() };
        client.ok(&Request::Setattr { fid: Fid(1), set, ctime: false }).unwrap();
        assert_eq!(mode(), kept, "truncation by {uid}");
        arm();
        client.open_path(Fid(2), "f", OFlags::WRONLY | OFlags::TRUNC).unwrap();
        assert_eq!((mode(), fs::read(&file).unwrap().len()), (kept, 0), "open by {uid}");
        arm();
        let created = client.create(Fid(3), "f", OFlags::WRONLY | OFlags::TRUNC, 0o600);
        assert_eq!((created.map(drop), mode()), (Ok(()), kept), "create by {uid}");
    }
}

#[test]
fn extended_attributes_are_fids_of_their_own() {
    let share = DirServer::new(Options::default());
    let mut client = share.attached(0);
    client.create(Fid(1), "f", OFlags::RDWR, 0o644).unwrap();
    let mut fid = 10;
    let mut set = |client: &mut Client<_>, bytes: u64, parts: &[&[u8]], flags| {
        fid += 1;
        client.walk(Fid(1), Fid(fid), "").unwrap();
        client.ok(&Request::Xattrcreate { fid: Fid(fid), name: b"user.a", bytes, flags })?;
        let mut offset = 0;
        for part in parts {
            assert_eq!(client.write(Fid(fid), offset, part)? as usize, part.len());
            offset += part.len() as u64;
        }
        client.ok(&Request::Clunk { fid: Fid(fid) })
    };
    let get = |client: &mut Client<_>, name: &[u8]| {
        let walk = Request::Xattrwalk { fid: Fid(1), new_fid: Fid(9), name };
        let bytes =
            client.get(&walk, |reply| if let Reply::Xattrwalk { bytes } = reply { Some(bytes) } else { None })?;
        let value = client.read(Fid(9), 0, 65536).unwrap();
        assert_eq!(value.len() as u64, bytes);
        assert_eq!(
            client.read(Fid(9), 1, 2).unwrap(),
            value.get(1..).unwrap_or_default()[..value.len().saturating_sub(1).min(2)]
        );
        client.ok(&Request::Clunk { fid: Fid(9) }).unwrap();
        Ok(value)
    };
    let (any, create, replace) = (XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE);
    match set(&mut client, 5, &[b"va", b"lue"], create) {
        Err(Errno::OPNOTSUPP) => return ferry_skip::skip!("no extended attributes here"),
        outcome => outcome.unwrap(),
    }
    assert_eq!(get(&mut client, b"user.a"), Ok(b"value".to_vec()));
    assert_eq!(get(&mut client, b"user.b"), Err(Errno::NODATA));
    let names = get(&mut client, b"").unwrap();
    assert!(names.split(|byte| *byte == 0).any(|name| name == b"user.a"), "{}", names.escape_ascii());
    assert_eq!(set(&mut client, 1, &[b"x"], create), Err(Errno::EXIST));
    // Not what was announced: nothing is set.
    assert_eq!(set(&mut client, 5, &[b"x"], any), Err(Errno::INVAL));
    assert_eq!(set(&mut client, 1, &[b"xy"], any), Err(Errno::NOSPC));
    assert_eq!(get(&mut client, b"user.a"), Ok(b"value".to_vec()));
    set(&mut client, 0, &[], any).unwrap();
    assert_eq!(get(&mut client, b"user.a"), Ok(Vec::new()));
    set(&mut client, 0, &[], replace).unwrap();
    assert_eq!(get(&mut client, b"user.a"), Err(Errno::NODATA));
    // A value is read, and nothing else can be done with it.
    client.walk(ROOT, Fid(8), "").unwrap();
    client.ok(&Request::Xattrwalk { fid: Fid(8), new_fid: Fid(7), name: b"" }).unwrap();
    assert_eq!(client.walk(Fid(7), Fid(6), ""), Err(Errno::BADF));
    assert_eq!(client.write(Fid(7), 0, b""), Err(Errno::BADF));
    client.walk(ROOT, Fid(6), "f").unwrap();
    client.ok(&Request::Xattrwalk { fid: Fid(6), new_fid: Fid(5), name: b"" }).unwrap();
    client.ok(&Request::Xattrcreate { fid: Fid(6), name: b"user.a", bytes: 1, flags: any }).unwrap();
    for fid in [Fid(5), Fid(6)] {
        assert_eq!(client.ok(&Request::Rename { fid, dir: ROOT, name: name("g") }), Err(Errno::BADF));
        assert_eq!(client.ok(&Request::Remove { fid }), Err(Errno::BADF));
        assert_eq!(client.ok(&Request::Clunk { fid }), Err(Errno::BADF), "the fid ends in any case");
    }
    assert!(share.path.join("f").exists());
    assert_eq!(client.ok(&Request::Mkdir { dir: Fid(7), name: name("d"), mode: 0, gid: 0 }), Err(Errno::BADF));
}

#[test]
fn special_files_are_not_opened_here() {
    let share = DirServer::new(Options::default());
    symlink("nowhere", share.path.join("link")).unwrap();
    let mut client = share.attached(0);
    let mut kinds = vec![(FileType::Fifo, Errno::NXIO), (FileType::Socket, Errno::NXIO)];
    if is_root() {
        kinds.push((FileType::CharacterDevice, Errno::ACCESS));
    }
    let modes = [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR | OFlags::TRUNC];
    for (number, (kind, errno)) in kinds.into_iter().enumerate() {
        let text = format!("node{number}");
        let mode = kind.as_raw_mode() | 0o666;
        // /dev/null, if it is a device.
        let rdev = if kind == FileType::CharacterDevice { 0x103 } else { 0 };
        client.ok(&Request::Mknod { dir: ROOT, name: name(&text), mode, rdev, gid: 0 }).unwrap();
        client.walk(ROOT, Fid(1), &text).unwrap();
        for flags in modes {
            assert_eq!(client.open(Fid(1), flags), Err(errno), "{kind:?}");
            let create = client.create(Fid(2), &text, flags, 0o600);
            assert_eq!(create, Err(errno), "{kind:?}");
            client.ok(&Request::Clunk { fid: Fid(2) }).unwrap();
        }
        client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
    }
    client.walk(ROOT, Fid(1), "link").unwrap();
    assert_eq!(client.open(Fid(1), OFlags::RDONLY), Err(Errno::LOOP));
    assert_eq!(client.open(ROOT, OFlags::RDWR), Err(Errno::ISDIR));
}

#[test]
fn a_read_only_share_is_one() {
    let share = DirServer::new(Options { read_only: true, ..Options::default() });
    fs::write(share.path.join("f"), "text").unwrap();
    let mut client = share.attached(0);
    client.walk(ROOT, Fid(1), "f").unwrap();
    let (fid, dir, set) = (Fid(1), ROOT, SetAttr { mode: Some(0), ..SetAttr::default() });
    for request in [
        Request::Open { fid, flags: OFlags::RDWR },
        Request::Open { fid, flags: OFlags::RDONLY | OFlags::TRUNC },
        Request::Create { fid: ROOT, name: name("g"), flags: OFlags::RDONLY, mode: 0o600, gid: 0 },
        Request::Setattr { fid, set, ctime: false },
        Request::Mkdir { dir, name: name("d"), mode: 0o700, gid: 0 },
        Request::Symlink { dir, name: name("d"), target: b"x", gid: 0 },
        Request::Mknod { dir, name: name("d"), mode: FileType::Fifo.as_raw_mode(), rdev: 0, gid: 0 },
        Request::Link { dir, fid, name: name("l") },
        Request::Unlinkat { dir, name: name("f"), is_dir: false },
        Request::Renameat { dir, name: name("f"), new_dir: dir, new_name: name("g") },
        Request::Rename { fid, dir, name: name("g") },
        Request::Xattrcreate { fid, name: b"user.a", bytes: 0, flags: XattrFlags::empty() },
        Request::Write { fid, offset: 0, data: b"x" },
    ] {
        assert_eq!(client.ok(&request), Err(Errno::ROFS), "{request:?}");
    }
    client.open(Fid(1), OFlags::RDONLY).unwrap();
    assert_eq!(client.read(Fid(1), 0, 10).unwrap(), b"text");
    client.walk(ROOT, Fid(2), "f").unwrap();
    assert_eq!(client.ok(&Request::Remove { fid: Fid(2) }), Err(Errno::ROFS));
    assert_eq!(client.getattr(Fid(2)), Err(Errno::BADF), "the fid ends in any case");
}

/// Linux's unlinkat(2) of an open directory sends the open fid.
#[test]
fn names_are_changed_by_open_directories() {
    let share = DirServer::new(Options::default());
    fs::write(share.path.join("f"), "").unwrap();
    let mut client = share.attached(0);
    client.open_path(Fid(1), "", OFlags::RDONLY).unwrap();
    let dir = Fid(1);
    client.ok(&Request::Mkdir { dir, name: name("d"), mode: 0o700, gid: 0 }).unwrap();
    client.ok(&Request::Renameat { dir, name: name("f"), new_dir: dir, new_name: name("g") }).unwrap();
    client.ok(&Request::Unlinkat { dir, name: name("g"), is_dir: false }).unwrap();
    client.ok(&Request::Unlinkat { dir, name: name("d"), is_dir: true }).unwrap();
    assert_eq!(fs::read_dir(&share.path).unwrap().count(), 0);
}

#[test]
fn created_files_belong_to_the_user_or_are_refused() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let user = Identity { uid: 1000, gid: 100, groups: vec![1234] };
    let users = Users::Only(vec![Identity::default(), user]);
    let share = DirServer::new(Options { users, ..Options::default() });
    fs::set_permissions(&share.path, fs::Permissions::from_mode(0o777)).unwrap();
    let mut client = share.attached(1000);
    let create = Request::Mkdir { dir: ROOT, name: name("d"), mode: 0o700, gid: 1234 };
    client.ok(&create).unwrap();
    let made = fs::metadata(share.path.join("d")).unwrap();
    assert_eq!((made.uid(), made.gid()), (1000, 1234));
    // One connection has many users.
    client.attach(Fid(50), 0).unwrap();
    client.ok(&Request::Mkdir { dir: Fid(50), name: name("r"), mode: 0o700, gid: 0 }).unwrap();
    assert_eq!(fs::metadata(share.path.join("r")).unwrap().uid(), 0);
    assert_eq!(client.attach(Fid(51), 1001), Err(Errno::PERM));
}

/// Whoever is squashed can do what that user can, though the client takes itself for root.
#[test]
fn a_squashed_client_is_checked() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let share = DirServer::new(Options { users: Users::Squash { uid: 1000, gid: 100 }, ..Options::default() });
    let at = |name: &str| share.path.join(name);
    let make = |name: &str, mode| {
        fs::write(at(name), "text").unwrap();
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    make("secret", 0o600);
    make("shown", 0o644);
    fs::create_dir(at("closed")).unwrap();
    fs::set_permissions(at("closed"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::create_dir(at("sticky")).unwrap();
    fs::set_permissions(at("sticky"), fs::Permissions::from_mode(0o1777)).unwrap();
    make("sticky/roots", 0o666);
    let mut client = share.attached(0);
    assert_eq!(client.open_path(Fid(1), "secret", OFlags::RDONLY), Err(Errno::ACCESS));
    client.ok(&Request::Clunk { fid: Fid(1) }).unwrap();
    client.open_path(Fid(1), "shown", OFlags::RDONLY).unwrap();
    assert_eq!(client.open_path(Fid(2), "shown", OFlags::RDWR), Err(Errno::ACCESS));
    assert_eq!(client.open(Fid(2), OFlags::RDONLY | OFlags::TRUNC), Err(Errno::ACCESS));
    assert_eq!(client.walk(ROOT, Fid(3), "closed/x").unwrap().len(), 1);
    assert_eq!(client.create(Fid(4), "new", OFlags::RDWR, 0o600), Err(Errno::ACCESS));
    client.ok(&Request::Clunk { fid: Fid(4) }).unwrap();
    assert_eq!(client.create(Fid(4), "secret", OFlags::RDWR, 0o600), Err(Errno::ACCESS));
    assert_eq!(client.ok(&Request::Unlinkat { dir: ROOT, name: name("shown"), is_dir: false }), Err(Errno::ACCESS));
    for set in [
        SetAttr { mode: Some(0o777), ..SetAttr::default() },
        SetAttr { uid: Some(1000), ..SetAttr::default() },
        SetAttr { mtime: Some(SetTime::At(Timespec::default())), ..SetAttr::default() },
    ] {
        assert_eq!(client.ok(&Request::Setattr { fid: Fid(2), set, ctime: false }), Err(Errno::PERM), "{set:?}");
    }
    let set = SetAttr { size: Some(0), ..SetAttr::default() };
    assert_eq!(client.ok(&Request::Setattr { fid: Fid(2), set, ctime: false }), Err(Errno::ACCESS));
    client.walk(ROOT, Fid(5), "sticky").unwrap();
    let create = Request::Mkdir { dir: Fid(5), name: name("own"), mode: 0o700, gid: 0 };
    client.ok(&create).unwrap();
    let made = fs::metadata(at("sticky/own")).unwrap();
    assert_eq!((made.uid(), made.gid()), (1000, 100), "not the group that the client names");
    assert_eq!(client.ok(&Request::Unlinkat { dir: Fid(5), name: name("roots"), is_dir: false }), Err(Errno::PERM));
    let device = FileType::CharacterDevice.as_raw_mode() | 0o666;
    let mknod = Request::Mknod { dir: Fid(5), name: name("dev"), mode: device, rdev: 0x103, gid: 0 };
    assert_eq!(client.ok(&mknod), Err(Errno::PERM));
    let moved = Request::Renameat { dir: Fid(5), name: name("own"), new_dir: Fid(5), new_name: name("roots") };
    assert_eq!(client.ok(&moved), Err(Errno::PERM));
    client.ok(&Request::Unlinkat { dir: Fid(5), name: name("own"), is_dir: true }).unwrap();
    assert!(at("shown").exists() && at("sticky/roots").exists());
}

/// A source that has bytes in memory, and two clients of it.
#[test]
fn memory_is_a_source_too_and_clients_see_each_other() {
    let mem = ferry_mem::Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap();
    let server = Server::of(Arc::new(mem) as Arc<dyn FileSystem>, Options::default());
    let (mut one, mut other) = (server.attached(0), server.attached(0));
    let made = one.create(Fid(1), "f", OFlags::RDWR | OFlags::APPEND, 0o600).unwrap();
    let data: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[1]).collect();
    assert_eq!(one.write(Fid(1), 0, &data).unwrap(), 200_000);
    let seen = other.open_path(Fid(1), "f", OFlags::RDONLY).unwrap();
    assert_eq!(seen.path, made.path);
    assert_eq!(other.read(Fid(1), 0, MSIZE).unwrap(), data);
    assert_eq!(other.read(Fid(1), 199_990, MSIZE).unwrap(), data[199_990..]);
    let before = other.getattr(Fid(1)).unwrap().qid.version;
    one.write(Fid(1), 200_000, b"appended").unwrap();
    assert_eq!(other.read(Fid(1), 200_000, 8).unwrap(), b"appended");
    assert_ne!(other.getattr(Fid(1)).unwrap().qid.version, before);
}

/// A client says once, when it opens a file, that it appends. When `fcntl` takes that from its file it writes anywhere.
#[test]
fn appends_go_to_the_end_and_other_writes_to_their_offset() {
    let mem = ferry_mem::Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap();
    let tmp = tempfile::tempdir().unwrap();
    let dir = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
    for source in [Arc::new(mem) as Arc<dyn FileSystem>, Arc::new(dir)] {
        let server = Server::of(source, Options::default());
        let (mut one, mut other) = (server.attached(0), server.attached(0));
        let flags = OFlags::RDWR | OFlags::APPEND;
        one.create(Fid(1), "log", flags, 0o600).unwrap();
        one.write(Fid(1), 0, b"one,").unwrap();
        other.open_path(Fid(1), "log", flags).unwrap();
        other.write(Fid(1), 4, b"two,").unwrap();
        // Each believes the file to end where it wrote last.
        one.write(Fid(1), 4, b"three,").unwrap();
        other.write(Fid(1), 8, b"four").unwrap();
        assert_eq!(one.read(Fid(1), 0, 100).unwrap(), b"one,two,three,four");
        // The flag is gone: at the beginning, and behind the end, from where it is an end again.
        one.write(Fid(1), 0, b"ONE").unwrap();
        assert_eq!(one.getattr(Fid(1)).unwrap().attr.size, 18);
        one.write(Fid(1), 20, b"hole").unwrap();
        assert_eq!(other.read(Fid(1), 0, 100).unwrap(), b"ONE,two,three,four\0\0hole");
        assert_eq!(other.getattr(Fid(1)).unwrap().attr.size, 24);
        one.write(Fid(1), 24, b"+").unwrap();
        other.write(Fid(1), 24, b"-").unwrap();
        assert_eq!(other.read(Fid(1), 20, 100).unwrap(), b"hole+-");
        other.write(Fid(1), 1, b"n").unwrap();
        assert_eq!(other.read(Fid(1), 0, 4).unwrap(), b"OnE,");
        // Two processes of one client, for which it knows the end apart.
        one.open_path(Fid(2), "log", flags).unwrap();
        one.write(Fid(2), 26, b"a").unwrap();
        one.write(Fid(1), 25, b"b").unwrap();
        one.write(Fid(2), 27, b"c").unwrap();
        assert_eq!(other.read(Fid(1), 24, 100).unwrap(), b"+-abc");
        // Both at the end that it knows, so it believes the file to be shorter than it is; and then a third one begins.
        one.write(Fid(1), 28, b"d").unwrap();
        one.write(Fid(2), 28, b"e").unwrap();
        one.write(Fid(1), 29, b"f").unwrap();
        one.write(Fid(2), 29, b"g").unwrap();
        one.open_path(Fid(3), "log", flags).unwrap();
        one.write(Fid(3), 30, b"h").unwrap();
        assert_eq!(other.read(Fid(1), 24, 100).unwrap(), b"+-abcdefgh");
        // Made shorter by the client.
        let set = SetAttr { size: Some(3), ..SetAttr::default() };
        one.ok(&Request::Setattr { fid: Fid(1), set, ctime: false }).unwrap();
        one.write(Fid(2), 3, b",end").unwrap();
        assert_eq!(other.read(Fid(1), 0, 100).unwrap(), b"OnE,end");
    }
}
