//! The operations by messages of 9P2000.L.

use std::sync::Arc;

use ferry_ninep::{Options, Users};
use ferry_vfs::{Errno, FileSystem, FileType, Name, OFlags, SetAttr, SetTime, Timespec, XattrFlags};
use ferry_wire::ninep::*;

use super::{CONTENT, GID, Made, Op, Outcome, PAST, PIECE, Tree, UID, has_attributes, lines, names_of, value_of};
use crate::common::{Client, Link, ROOT, Server, name};

/// A source that is served as the user, and for root, who makes its files.
pub(super) struct Remote {
    root: Client<Link>,
    user: Client<Link>,
    _servers: [Server; 2],
}

impl Remote {
    pub(super) fn new(source: &Arc<dyn FileSystem>, users: Users) -> Self {
        let for_root = Server::of(Arc::clone(source), Options::default());
        let for_user = Server::of(Arc::clone(source), Options { users, ..Options::default() });
        let mut root = for_root.attached(0);
        set(&mut root, ROOT, SetAttr { mode: Some(0o755), ..SetAttr::default() }).unwrap();
        Self { root, user: for_user.attached(UID), _servers: [for_root, for_user] }
    }

    pub(super) fn make(&mut self, at: &str, made: Made) {
        let root = &mut self.root;
        let (directory, file) = at.rsplit_once('/').unwrap_or(("", at));
        root.walk(ROOT, Fid(1), directory).unwrap();
        let (dir, name_of) = (Fid(1), name(file));
        let mode = made.mode;
        match made.kind {
            FileType::Directory => root.ok(&Request::Mkdir { dir, name: name_of, mode, gid: 0 }),
            FileType::Symlink => root.ok(&Request::Symlink { dir, name: name_of, target: b"target", gid: 0 }),
            kind => root.ok(&Request::Mknod { dir, name: name_of, mode: kind.as_raw_mode() | mode, rdev: 0, gid: 0 }),
        }
        .unwrap();
        root.walk(dir, Fid(2), file).unwrap();
        if made.kind == FileType::RegularFile {
            root.walk(Fid(2), Fid(3), "").unwrap();
            root.open(Fid(3), OFlags::WRONLY).unwrap();
            root.write(Fid(3), 0, CONTENT).unwrap();
            clunk(root, Fid(3));
        }
        set(root, Fid(2), SetAttr { uid: Some(made.uid), gid: Some(made.gid), ..SetAttr::default() }).unwrap();
        if made.kind != FileType::Symlink {
            set(root, Fid(2), SetAttr { mode: Some(mode), ..SetAttr::default() }).unwrap();
        }
        if has_attributes(made.kind) {
            for name in ["user.a", "trusted.b"] {
                set_xattr(root, Fid(2), name, b"1").unwrap();
            }
        }
        clunk(root, Fid(2));
        clunk(root, Fid(1));
    }

    /// Removes everything below a directory.
    pub(super) fn clear(&mut self, at: &str) {
        for (file, is_dir) in list(&mut self.root, at) {
            let path = format!("{at}/{file}");
            if is_dir {
                self.clear(&path);
            }
            self.root.walk(ROOT, Fid(1), at).unwrap();
            self.root.ok(&Request::Unlinkat { dir: Fid(1), name: name(&file), is_dir }).unwrap();
            clunk(&mut self.root, Fid(1));
        }
    }

    pub(super) fn tree(&mut self) -> Tree {
        let mut tree = Vec::new();
        let mut directories = vec![String::new()];
        while let Some(directory) = directories.pop() {
            for (file, is_dir) in list(&mut self.root, &directory) {
                let at = format!("{directory}{file}");
                self.root.walk(ROOT, Fid(1), &at).unwrap();
                let attr = self.root.getattr(Fid(1)).unwrap().attr;
                let size = if attr.kind() == FileType::RegularFile { attr.size } else { 0 };
                let links = if is_dir { 0 } else { attr.nlink };
                let names = value(&mut self.root, Fid(1), "").map(|list| names_of(&list)).unwrap_or_default();
                tree.push((at.clone(), attr.mode, attr.uid, attr.gid, size, links, names));
                clunk(&mut self.root, Fid(1));
                if is_dir {
                    directories.push(at + "/");
                }
            }
        }
        tree.sort();
        tree
    }

    /// The operation by messages of the user's client.
    pub(super) fn act(&mut self, op: Op) -> Outcome {
        let mut fids = Fids { client: &mut self.user, made: Vec::new() };
        let outcome = fids.act(op);
        let made = std::mem::take(&mut fids.made);
        made.into_iter().for_each(|fid| clunk(&mut self.user, fid));
        outcome
    }
}

fn set(client: &mut Client<Link>, fid: Fid, set: SetAttr) -> Result<(), Errno> {
    client.ok(&Request::Setattr { fid, set, ctime: false })
}

fn clunk(client: &mut Client<Link>, fid: Fid) {
    // It ends in any case.
    let _ = client.ok(&Request::Clunk { fid });
}

/// The value of an attribute, or the list of their names.
fn value(client: &mut Client<Link>, fid: Fid, name: &str) -> Outcome {
    client.ok(&Request::Xattrwalk { fid, new_fid: Fid(90), name: name.as_bytes() })?;
    let value = client.read(Fid(90), 0, 4096);
    clunk(client, Fid(90));
    value
}

fn set_xattr(client: &mut Client<Link>, fid: Fid, name: &str, value: &[u8]) -> Result<(), Errno> {
    let flags = if value.is_empty() { XattrFlags::REPLACE } else { XattrFlags::empty() };
    client.walk(fid, Fid(91), "")?;
    let made =
        client.ok(&Request::Xattrcreate { fid: Fid(91), name: name.as_bytes(), bytes: value.len() as u64, flags });
    if made.is_ok() && !value.is_empty() {
        client.write(Fid(91), 0, value)?;
    }
    let ended = client.ok(&Request::Clunk { fid: Fid(91) });
    made.and(ended)
}

/// The names in a directory, and whether each is one.
fn list(client: &mut Client<Link>, at: &str) -> Vec<(String, bool)> {
    client.open_path(Fid(80), at, OFlags::RDONLY).unwrap();
    let entries = client.readdir(Fid(80), 0, 60_000).unwrap();
    clunk(client, Fid(80));
    let entries = entries.into_iter().filter(|(name, ..)| !matches!(name.as_str(), "." | ".."));
    entries.map(|(name, _, qid)| (name, qid.kind == QidKind::DIR)).collect()
}

/// Fids of one operation.
struct Fids<'a> {
    client: &'a mut Client<Link>,
    made: Vec<Fid>,
}

impl Fids<'_> {
    /// Walks name by name, so that the error of each is told.
    fn walk(&mut self, path: &str) -> Result<Fid, Errno> {
        let mut at = ROOT;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            let fid = Fid(10 + u32::try_from(self.made.len()).unwrap());
            self.client.walk(at, fid, part)?;
            self.made.push(fid);
            at = fid;
        }
        if at == ROOT {
            let fid = Fid(10 + u32::try_from(self.made.len()).unwrap());
            self.client.walk(ROOT, fid, "")?;
            self.made.push(fid);
            at = fid;
        }
        Ok(at)
    }

    fn parent<'p>(&mut self, path: &'p str) -> Result<(Fid, Name<'p>), Errno> {
        let (directory, file) = path.rsplit_once('/').unwrap();
        Ok((self.walk(directory)?, name(file)))
    }

    fn act(&mut self, op: Op) -> Outcome {
        let nothing = |()| Vec::new();
        // That the server sends, though Linux's client does it by itself.
        let open = |fids: &mut Self, flags| {
            let fid = fids.walk("d/f")?;
            fids.client.open(fid, flags).map(|_| fid)
        };
        match op {
            Op::Stat => {
                let fid = self.walk("d/f")?;
                self.client.getattr(fid).map(|found| found.attr.mode.to_le_bytes().to_vec())
            }
            Op::Open(flags) => open(self, flags).map(|_| Vec::new()),
            Op::Read(flags) => {
                let fid = open(self, flags)?;
                self.client.read(fid, 0, 100)
            }
            Op::Write(flags) => {
                let fid = open(self, flags)?;
                self.client.write(fid, 0, PIECE).map(|_| Vec::new())
            }
            Op::Cut => {
                let fid = open(self, OFlags::RDWR)?;
                set(self.client, fid, SetAttr { size: Some(1), ..SetAttr::default() }).map(nothing)
            }
            Op::Create(at, flags, mode) => {
                let (fid, name) = self.parent(at)?;
                self.client.ok(&Request::Create { fid, name, flags, mode, gid: GID }).map(nothing)
            }
            Op::Mkdir(mode) => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Mkdir { dir, name, mode, gid: GID }).map(nothing)
            }
            Op::Mknod(mode, rdev) => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Mknod { dir, name, mode, rdev, gid: GID }).map(nothing)
            }
            Op::Symlink => {
                let (dir, name) = self.parent("d/new")?;
                self.client.ok(&Request::Symlink { dir, name, target: b"x", gid: GID }).map(nothing)
            }
            Op::Link(from, to) => {
                let fid = self.walk(from)?;
                let (dir, name) = self.parent(to)?;
                self.client.ok(&Request::Link { dir, fid, name }).map(nothing)
            }
            Op::Unlink | Op::Rmdir => {
                let (dir, name) = self.parent("d/f")?;
                self.client.ok(&Request::Unlinkat { dir, name, is_dir: matches!(op, Op::Rmdir) }).map(nothing)
            }
            Op::Rename(from, to) => {
                let ((dir, name), (new_dir, new_name)) = (self.parent(from)?, self.parent(to)?);
                self.client.ok(&Request::Renameat { dir, name, new_dir, new_name }).map(nothing)
            }
            Op::Chmod(mode) => self.set(SetAttr { mode: Some(mode), ..SetAttr::default() }),
            Op::Chown(uid, gid) => self.set(SetAttr { uid, gid, ..SetAttr::default() }),
            Op::Truncate => self.set(SetAttr { size: Some(0), ..SetAttr::default() }),
            Op::Times(atime, mtime) => {
                let past = SetTime::At(Timespec { sec: PAST, nsec: 0 });
                let time = |time: Option<bool>| time.map(|is_now| if is_now { SetTime::Now } else { past });
                self.set(SetAttr { atime: time(atime), mtime: time(mtime), ..SetAttr::default() })
            }
            Op::Getxattr(name) => {
                let fid = self.walk("d/f")?;
                value(self.client, fid, name)
            }
            Op::Setxattr(name) | Op::Removexattr(name) => {
                let fid = self.walk("d/f")?;
                let value = if matches!(op, Op::Setxattr(_)) { value_of(name) } else { b"" };
                set_xattr(self.client, fid, name, value).map(nothing)
            }
            Op::Listxattr => {
                let fid = self.walk("d/f")?;
                value(self.client, fid, "").map(|list| lines(names_of(&list)))
            }
            Op::List => {
                let fid = self.walk("d")?;
                self.client.open(fid, OFlags::RDONLY)?;
                let names = self.client.readdir(fid, 0, 60_000)?;
                Ok(lines(names.into_iter().map(|(name, ..)| name).collect()))
            }
            Op::Readlink => {
                let fid = self.walk("d/f")?;
                self.client.get(&Request::Readlink { fid }, |reply| match reply {
                    Reply::Readlink { target } => Some(target.to_vec()),
                    _ => None,
                })
            }
        }
    }

    fn set(&mut self, attributes: SetAttr) -> Outcome {
        let fid = self.walk("d/f")?;
        set(self.client, fid, attributes).map(|()| Vec::new())
    }
}
