//! A memory file system before and behind the translations: every call that carries a number or a name.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_idmap::{IdMapped, Ids, Rule, Xattrs};
use ferry_mem::{Mem, Options};
use ferry_vfs::{
    Caller, CreateArgs, DirItem, DirOutput, DirRange, Entry, Errno, FileSystem, Handle, IdentityScope, Ino, Mappable,
    Migrate, Name, OFlags, Result, SetAttr, XattrFlags,
};

fn ids(rules: &[&str]) -> Ids {
    Ids::new(&rules.iter().map(|rule| rule.parse::<Rule>().unwrap()).collect::<Vec<_>>()).unwrap()
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap()
}

/// The memory file system, and the same with the client's 0 to 99 as 1000 to 1099 (groups: 2000 to 2099).
fn both(xattrs: &str) -> (Arc<Mem>, IdMapped) {
    let mem = Arc::new(Mem::new(&Options::default()).unwrap());
    let xattrs = if xattrs.is_empty() { Xattrs::default() } else { xattrs.parse().unwrap() };
    let uids = ids(&["map:0:1000:100", "forbid-guest:500:1"]);
    let mapped = IdMapped::new(Arc::clone(&mem) as _, uids, ids(&["map:0:2000:100", "forbid-guest:600:1"]), xattrs);
    (mem, mapped)
}

fn owner(source: &impl FileSystem, ino: Ino) -> (u32, u32) {
    let attr = source.getattr(&Caller::default(), ino, None).unwrap();
    (attr.uid, attr.gid)
}

#[test]
fn new_files_belong_to_the_mapped_id() {
    let (mem, mapped) = both("");
    let cx = Caller { uid: 5, gid: 6, ..Caller::default() };
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    let file = CreateArgs { mode: 0o100_644, ..CreateArgs::default() };
    let mut made = vec![
        mapped.mkdir(&cx, Ino::ROOT, name("dir"), &new).unwrap(),
        mapped.symlink(&cx, Ino::ROOT, name("link"), b"x").unwrap(),
        mapped.mknod(&cx, Ino::ROOT, name("node"), &file).unwrap(),
    ];
    for (entry, handle) in [
        mapped.create(&cx, Ino::ROOT, name("file"), &new, OFlags::RDWR).unwrap(),
        mapped.tmpfile(&cx, Ino::ROOT, &new, OFlags::RDWR).unwrap(),
    ] {
        assert_eq!(mapped.getattr(&cx, entry.ino, Some(handle)).unwrap().uid, 5);
        made.push(entry);
    }
    for entry in made {
        assert_eq!((entry.attr.uid, entry.attr.gid), (5, 6));
        assert_eq!(owner(&mapped, entry.ino), (5, 6));
        assert_eq!(owner(&*mem, entry.ino), (1005, 2006));
    }
    assert_eq!(mapped.lookup(&cx, Ino::ROOT, name("dir")).unwrap().attr.gid, 6);
}

#[test]
fn forbidden_ids_are_refused_without_effect() {
    let (mem, mapped) = both("");
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    for cx in [Caller { uid: 500, ..Caller::default() }, Caller { gid: 600, ..Caller::default() }] {
        assert_eq!(mapped.mkdir(&cx, Ino::ROOT, name("d"), &new).unwrap_err(), Errno::PERM);
        assert_eq!(mapped.create(&cx, Ino::ROOT, name("d"), &new, OFlags::RDWR).unwrap_err(), Errno::PERM);
        assert_eq!(mapped.symlink(&cx, Ino::ROOT, name("d"), b"x").unwrap_err(), Errno::PERM);
        assert_eq!(mapped.lookup(&cx, Ino::ROOT, name("d")).unwrap_err(), Errno::NOENT, "looking is no matter");
    }
    let (entry, _) = mapped.create(&Caller::default(), Ino::ROOT, name("f"), &new, OFlags::RDWR).unwrap();
    let mode = Some(0o777);
    for set in
        [SetAttr { uid: Some(500), mode, ..SetAttr::default() }, SetAttr { gid: Some(600), mode, ..SetAttr::default() }]
    {
        assert_eq!(mapped.setattr(&Caller::default(), entry.ino, None, &set).unwrap_err(), Errno::PERM);
    }
    assert_eq!(mem.getattr(&Caller::default(), entry.ino, None).unwrap().mode & 0o777, 0o644);
    let set = SetAttr { uid: Some(7), gid: Some(150), ..SetAttr::default() };
    let attr = mapped.setattr(&Caller::default(), entry.ino, None, &set).unwrap();
    assert_eq!((attr.uid, attr.gid), (7, 150));
    assert_eq!(owner(&*mem, entry.ino), (1007, 150));
    // Nobody in particular is nobody there, too.
    let nobody = Caller { uid: u32::MAX, gid: u32::MAX, ..Caller::default() };
    assert_eq!(owner(&mapped, mapped.lookup(&nobody, Ino::ROOT, name("f")).unwrap().ino), (7, 150));
}

struct Owners(Vec<(Vec<u8>, Option<u32>)>);

impl DirOutput for Owners {
    fn fits(&self, _: &[u8]) -> bool {
        true
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.0.push((item.name.to_vec(), entry.map(|entry| entry.attr.uid)));
    }
}

#[test]
fn listings_show_the_clients_numbers() {
    let (mem, mapped) = both("");
    let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
    mem.mkdir(&Caller { uid: 1042, ..Caller::default() }, Ino::ROOT, name("d"), &new).unwrap();
    let handle = mapped.opendir(&Caller::default(), Ino::ROOT, OFlags::RDONLY).unwrap();
    let mut found = Owners(Vec::new());
    mapped
        .readdir(&Caller::default(), &DirRange { ino: Ino::ROOT, handle, offset: 0, plus: true }, &mut found)
        .unwrap();
    assert!(found.0.contains(&(b"d".to_vec(), Some(42))), "{:?}", found.0);
    mapped.releasedir(&Caller::default(), Ino::ROOT, handle);
}

#[test]
fn attributes_have_other_names() {
    let (mem, mapped) = both(":map:trusted.:user.virtiofs.:");
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    let (entry, _) = mapped.create(&Caller::default(), Ino::ROOT, name("f"), &new, OFlags::RDWR).unwrap();
    let set = |name: &[u8]| mapped.setxattr(&Caller::default(), entry.ino, name, b"v", XattrFlags::empty(), false);
    set(b"trusted.a").unwrap();
    set(b"user.b").unwrap();
    assert_eq!(set(b"user.virtiofs.trusted.a"), Err(Errno::PERM));
    // Asked for, it is not there: that is what virtiofsd says, and programs expect.
    let hidden = mapped.getxattr(&Caller::default(), entry.ino, b"user.virtiofs.trusted.a");
    assert_eq!(hidden, Err(Errno::NODATA));
    assert_eq!(mem.getxattr(&Caller::default(), entry.ino, b"user.virtiofs.trusted.a").unwrap(), b"v");
    assert_eq!(mem.getxattr(&Caller::default(), entry.ino, b"trusted.a"), Err(Errno::NODATA));
    assert_eq!(mapped.getxattr(&Caller::default(), entry.ino, b"trusted.a").unwrap(), b"v");
    let list = String::from_utf8(mapped.listxattr(&Caller::default(), entry.ino).unwrap()).unwrap();
    let mut names: Vec<_> = list.split_terminator('\0').collect();
    names.sort_unstable();
    assert_eq!(names, ["trusted.a", "user.b"]);
    mapped.removexattr(&Caller::default(), entry.ino, b"trusted.a").unwrap();
    assert_eq!(mapped.removexattr(&Caller::default(), entry.ino, b"user.virtiofs.trusted.a"), Err(Errno::PERM));
    assert_eq!(mem.listxattr(&Caller::default(), entry.ino).unwrap(), b"user.b\0");
}

#[test]
fn capabilities_are_good_for_the_other_root() {
    let (mem, mapped) = both("");
    let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
    let (entry, _) = mapped.create(&Caller::default(), Ino::ROOT, name("f"), &new, OFlags::RDWR).unwrap();
    let name = b"security.capability";
    let set = |value: &[u8]| mapped.setxattr(&Caller::default(), entry.ino, name, value, XattrFlags::empty(), false);
    let get = |source: &dyn FileSystem| source.getxattr(&Caller::default(), entry.ino, name).unwrap();
    let value = |revision: u32, root: &[u8]| [&(revision << 24 | 1).to_le_bytes(), &[3; 16][..], root].concat();
    // The client's root, which is not written, and 7 in a container of the client's.
    for (to_client, here) in [
        (value(2, &[]), value(3, &1000_u32.to_le_bytes())),
        (value(3, &7_u32.to_le_bytes()), value(3, &1007_u32.to_le_bytes())),
    ] {
        set(&to_client).unwrap();
        assert_eq!((get(&mapped), get(&*mem)), (to_client, here));
    }
    assert_eq!(set(&value(3, &500_u32.to_le_bytes())), Err(Errno::PERM));
}

#[test]
fn renamed_acls_are_none() {
    let (mem, mapped) = both(":map::user.virtiofs.:");
    assert_eq!((mem.features().posix_acl, mapped.features().posix_acl), (both("").1.features().posix_acl, false));
}

/// A source that may be migrated and mapped, or not.
struct Optional {
    offers: bool,
}

impl FileSystem for Optional {
    fn migrate(&self) -> Option<&dyn Migrate> {
        self.offers.then_some(self)
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        self.offers.then_some(self)
    }
}

impl Migrate for Optional {
    fn identify(&self, ino: Ino, _: IdentityScope) -> Result<Vec<u8>> {
        Ok(ino.0.to_le_bytes().into())
    }

    fn adopt(&self, _: Ino, _: u64, _: (&[u8], IdentityScope), _: Option<BorrowedFd<'_>>) -> Result<()> {
        Err(Errno::STALE)
    }

    fn adopt_open(&self, _: &Caller<'_>, _: Ino, _: Handle, _: OFlags, _: Option<OwnedFd>) -> Result<()> {
        Err(Errno::STALE)
    }
}

impl Mappable for Optional {}

#[test]
fn the_layer_has_its_sources_features() {
    for offers in [false, true] {
        let layer = IdMapped::new(Arc::new(Optional { offers }), ids(&[]), ids(&[]), Xattrs::default());
        assert_eq!((layer.migrate().is_some(), layer.mappable().is_some()), (offers, offers));
        let found = layer.migrate().map(|source| source.identify(Ino(7), IdentityScope::Host));
        assert_eq!(found, offers.then(|| Ok(7_u64.to_le_bytes().into())));
    }
}
