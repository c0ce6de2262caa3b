//! Listings that go on while this client changes what is listed, and groups of what is made in directories with setgid.

use crate::common;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use common::{CX, Served, file, name};
use ferry_9p_client::{Client, Options};
use ferry_vfs::*;

/// A listing as a kernel takes it: some entries at a time.
struct Taken {
    room: usize,
    names: Vec<(String, Option<Entry>)>,
    next: u64,
}

impl DirOutput for Taken {
    fn fits(&self, _: &[u8]) -> bool {
        self.names.len() < self.room
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.names.push((String::from_utf8_lossy(item.name).into_owned(), entry.copied()));
        self.next = item.next;
    }
}

/// Goes through a directory, and does something after each so many entries.
fn list(client: &Client, dir: Ino, room: usize, plus: bool, mut each: impl FnMut(&[(String, Option<Entry>)])) {
    let handle = client.opendir(&CX, dir, OFlags::RDONLY).unwrap();
    let mut offset = 0;
    loop {
        let mut taken = Taken { room, names: Vec::new(), next: offset };
        client.readdir(&CX, &DirRange { ino: dir, handle, offset, plus }, &mut taken).unwrap();
        if taken.names.is_empty() {
            break;
        }
        offset = taken.next;
        each(&taken.names);
        taken.names.iter().filter_map(|(_, entry)| *entry).for_each(|entry| client.forget(entry.ino, 1));
    }
    client.releasedir(&CX, dir, handle);
}

fn make(client: &Client, names: impl Iterator<Item = String>) {
    for text in names {
        let (entry, handle) = client.create(&CX, Ino::ROOT, name(&text), &file(0o600), OFlags::RDWR).unwrap();
        client.release(&CX, entry.ino, handle);
        client.forget(entry.ino, 1);
    }
}

fn sources() -> Vec<(Arc<dyn FileSystem>, Option<tempfile::TempDir>)> {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let dir = ferry_dir::Dir::open(directory.path(), ferry_dir::Options::default()).unwrap();
    let mem = ferry_mem::Mem::new(&ferry_mem::Options::default()).unwrap();
    vec![(Arc::new(mem), None), (Arc::new(dir), Some(directory))]
}

/// 995 of 1000 files are removed when some entries were taken: of what comes then, all is there.
#[test]
fn names_that_this_client_has_removed_are_not_listed() {
    for (source, _directory) in sources() {
        for plus in [false, true] {
            let served = Served::of(Arc::clone(&source), ferry_ninep::Users::Client);
            let client = served.connect(Options::default());
            make(&client, (0..1000).map(|number| format!("file-{number}")));
            let left: HashSet<String> = (0..5).map(|number| format!("file-{number}")).collect();
            let (mut is_first, mut later) = (true, HashSet::new());
            let mut early = HashSet::new();
            list(&client, Ino::ROOT, 7, plus, |names| {
                let names = names.iter().map(|(name, _)| name.clone()).filter(|name| name.starts_with("file"));
                if is_first {
                    early.extend(names);
                    for number in 5..1000 {
                        client.unlink(&CX, Ino::ROOT, name(&format!("file-{number}"))).unwrap();
                    }
                    is_first = false;
                } else {
                    later.extend(names);
                }
            });
            assert!(
                later.is_subset(&left),
                "plus {plus}: {} names that are gone: {later:?}",
                later.difference(&left).count()
            );
            assert!(
                early.union(&later).cloned().collect::<HashSet<_>>().is_superset(&left),
                "plus {plus}: none is left out"
            );
            (0..5).for_each(|number| client.unlink(&CX, Ino::ROOT, name(&format!("file-{number}"))).unwrap());
            assert_eq!(client.usage().inodes, 0);
        }
    }
}

/// As `rm -r` does it where a listing is long: what was told is removed before the next is asked for. Nothing is passed over.
#[test]
fn a_directory_can_be_emptied_while_it_is_listed() {
    for (source, _directory) in sources() {
        for plus in [false, true] {
            let served = Served::of(Arc::clone(&source), ferry_ninep::Users::Client);
            let client = served.connect(Options::default());
            make(&client, (0..700).map(|number| format!("file-{number}")));
            let messages = client.usage().messages;
            list(&client, Ino::ROOT, 25, plus, |names| {
                for (text, _) in names.iter().filter(|(name, _)| name.starts_with("file")) {
                    client.unlink(&CX, Ino::ROOT, name(text)).unwrap();
                }
            });
            let mut left = Vec::new();
            list(&client, Ino::ROOT, 25, false, |names| left.extend(names.iter().map(|(name, _)| name.clone())));
            left.sort();
            assert_eq!(left, [".", ".."], "plus {plus}");
            let messages = client.usage().messages - messages;
            assert!(messages < 700 * 8, "{messages} messages");
        }
    }
}

/// Names that are moved over others, or made, while a listing goes on.
#[test]
fn names_replaced_by_this_client_lead_to_the_new_file() {
    let served = Served::new();
    let client = served.connect(Options::default());
    make(&client, (0..200).map(|number| format!("file-{number:03}")));
    let root = Ino::ROOT;
    let new = client.mkdir(&CX, root, name("d"), &common::dir(0o700)).unwrap();
    let (mut seen, mut target) = (Vec::new(), None);
    list(&client, root, 7, true, |names| {
        if target.is_none() {
            let is_later = |text: &&&str| names.iter().all(|(name, _)| name != **text);
            target = ["file-199", "file-100", "file-050", "file-010"].iter().find(is_later).copied();
            let target = target.unwrap();
            client.create(&CX, new.ino, name("x"), &file(0o640), OFlags::RDWR).map(drop).unwrap();
            client.rename(&CX, (new.ino, name("x")), (root, name(target)), RenameFlags::empty()).unwrap();
        }
        seen.extend(
            names
                .iter()
                .filter(|(name, _)| Some(name.as_str()) == target)
                .map(|(_, entry)| entry.map(|entry| entry.attr.mode & 0o777)),
        );
    });
    assert_eq!(seen, [Some(0o640)]);
}

/// Attributes that were looked ahead are told only as long as this client has not changed them.
#[test]
fn attributes_changed_by_this_client_are_current() {
    for cache in [ferry_9p_client::Cache::None, ferry_9p_client::Cache::Auto] {
        let served = Served::new();
        let client = served.connect(Options { cache, ..Options::default() });
        make(&client, (0..64).map(|number| format!("file-{number:02}")));
        let mut is_first = true;
        list(&client, Ino::ROOT, 3, true, |names| {
            for (text, entry) in names {
                let is_new = !is_first && text.starts_with("file");
                let told = entry.filter(|_| is_new).map(|entry| (entry.attr.mode & 0o777, entry.attr.size));
                assert!(matches!(told, None | Some((0o640, 4))), "{text}: {told:?}");
            }
            if std::mem::take(&mut is_first) {
                for number in 0..64 {
                    let entry = client.lookup(&CX, Ino::ROOT, name(&format!("file-{number:02}"))).unwrap();
                    let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
                    client.setattr(&CX, entry.ino, None, &set).unwrap();
                    let handle = client.open(&CX, entry.ino, OFlags::RDWR).unwrap();
                    common::write(&client, entry.ino, handle, 0, b"text").unwrap();
                    client.release(&CX, entry.ino, handle);
                    client.forget(entry.ino, 1);
                }
            }
        });
    }
}

/// A source whose root has setgid, and that notes which groups and modes it is asked for.
#[derive(Default)]
struct Groups(Mutex<Vec<(&'static str, u32, u32)>>);

impl Groups {
    fn note(&self, what: &'static str, cx: &Caller<'_>, mode: u32) -> Result<Entry> {
        self.0.lock().unwrap().push((what, cx.gid, mode & 0o7777));
        self.lookup(cx, Ino::ROOT, name(what))
    }
}

impl FileSystem for Groups {
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        let kind = if ino == Ino::ROOT { FileType::Directory } else { FileType::RegularFile };
        Ok(Attr { gid: 300, ..Attr::new(ino, kind, 0o2777) })
    }

    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(Entry::new(Ino(2), Attr::new(Ino(2), FileType::RegularFile, 0o666)))
    }

    fn create(&self, cx: &Caller<'_>, _: Ino, _: Name<'_>, new: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        Ok((self.note("create", cx, new.mode)?, Handle(0)))
    }

    fn mkdir(&self, cx: &Caller<'_>, _: Ino, _: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.note("mkdir", cx, new.mode)
    }

    fn mknod(&self, cx: &Caller<'_>, _: Ino, _: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.note("mknod", cx, new.mode)
    }

    fn symlink(&self, cx: &Caller<'_>, _: Ino, _: Name<'_>, _: &[u8]) -> Result<Entry> {
        self.note("symlink", cx, 0)
    }
}

/// What Linux's client sends (`v9fs_get_fsgid_for_create`).
#[test]
fn creation_in_a_setgid_directory_sends_its_group() {
    let source = Arc::new(Groups::default());
    let served = Served::of(Arc::clone(&source) as Arc<dyn FileSystem>, ferry_ninep::Users::Client);
    let client = served.connect(Options::default());
    let joe = Caller { uid: 1000, gid: 100, ..*CX };
    let at = |text| (Ino::ROOT, name(text));
    let new = |mode| CreateArgs { mode, umask: 0, rdev: 0 };
    let _ = client.mkdir(&joe, at("a").0, at("a").1, &new(0o040_750));
    let _ = client.mknod(&joe, at("b").0, at("b").1, &new(0o102_755));
    let _ = client.symlink(&joe, at("c").0, at("c").1, b"x");
    let _ = client.create(&joe, at("create").0, at("create").1, &new(0o100_640), OFlags::RDWR | OFlags::EXCL);
    let asked = source.0.lock().unwrap().clone();
    assert_eq!(asked, [("mkdir", 300, 0o2750), ("mknod", 300, 0o2755), ("symlink", 300, 0), ("create", 300, 0o640)]);
}

/// The same through a real server, beside a directory of this host.
#[test]
fn creation_in_a_setgid_directory_matches_a_local_one() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root, to make files of others");
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = |text: &str| directory.path().join(text);
    std::fs::create_dir(path("d")).unwrap();
    chown(path("d"), Some(0), Some(300)).unwrap();
    std::fs::set_permissions(path("d"), std::fs::Permissions::from_mode(0o2777)).unwrap();
    let dir = ferry_dir::Dir::open(directory.path(), ferry_dir::Options::default()).unwrap();
    let served = Served::of(Arc::new(dir), ferry_ninep::Users::Client);
    let client = served.connect(Options::default());
    let d = client.lookup(&CX, Ino::ROOT, name("d")).unwrap();
    // A member of the directory's group by one of the other groups, of which the protocol tells nothing.
    let joe = Caller { uid: 1000, gid: 100, ..*CX };
    client.mkdir(&joe, d.ino, name("dir"), &common::dir(0o755)).unwrap();
    client.mknod(&joe, d.ino, name("program"), &file(0o2755)).unwrap();
    client.symlink(&joe, d.ino, name("link"), b"x").unwrap();
    client.create(&joe, d.ino, name("file"), &file(0o640), OFlags::RDWR).unwrap();
    let local = path("local");
    std::fs::create_dir(&local).unwrap();
    chown(&local, Some(0), Some(300)).unwrap();
    std::fs::set_permissions(&local, std::fs::Permissions::from_mode(0o2777)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use rustix::fs::Mode;
            use rustix::process::{Gid, Uid};
            let root = rustix::fs::open(&local, OFlags::PATH, Mode::empty()).unwrap();
            rustix::thread::set_thread_groups(&[Gid::from_raw(300)]).unwrap();
            rustix::thread::set_thread_res_gid(Gid::from_raw(100), Gid::from_raw(100), Gid::from_raw(100)).unwrap();
            rustix::thread::set_thread_res_uid(Uid::from_raw(1000), Uid::from_raw(1000), Uid::from_raw(1000)).unwrap();
            rustix::fs::mkdirat(&root, "dir", Mode::from_raw_mode(0o755)).unwrap();
            rustix::fs::mknodat(&root, "program", FileType::RegularFile, Mode::from_raw_mode(0o2755), 0).unwrap();
            rustix::fs::symlinkat("x", &root, "link").unwrap();
            rustix::fs::openat(&root, "file", OFlags::CREATE | OFlags::RDWR, Mode::from_raw_mode(0o640)).unwrap();
        });
    });
    for text in ["dir", "program", "link", "file"] {
        let of = |at: std::path::PathBuf| {
            std::fs::symlink_metadata(at.join(text)).map(|found| (found.mode(), found.uid(), found.gid()))
        };
        assert_eq!(of(path("d")).unwrap(), of(local.clone()).unwrap(), "{text}");
    }
}
