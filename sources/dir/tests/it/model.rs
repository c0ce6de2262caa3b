//! Random sequences of operations, through the source and directly on the host: both trees end up the same, and so
//! does every answer on the way.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;
use proptest::prelude::*;
use rustix::fs::{AtFlags, Mode};

const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Step {
    Create { at: Place, exclusive: bool, truncate: bool, bytes: usize },
    Mkdir(Place),
    Symlink(Place),
    Fifo(Place),
    Unlink(Place),
    Rmdir(Place),
    Link(Place, Place),
    Rename(Place, Place, u8),
    Truncate(Place, u64),
    Chmod(Place, u32),
    Write(Place, u64, usize),
    ForgetAll,
}

/// A name, in the root or in one of its directories.
#[derive(Clone, Copy, Debug)]
struct Place {
    dir: Option<&'static str>,
    name: &'static str,
}

impl Place {
    fn dir_path(&self) -> &'static str {
        self.dir.unwrap_or("")
    }

    fn path(&self) -> String {
        format!("{}/{}", self.dir.unwrap_or("."), self.name)
    }
}

fn place() -> impl Strategy<Value = Place> {
    let name = prop::sample::select(&NAMES[..]);
    (prop::option::of(prop::sample::select(&NAMES[..])), name).prop_map(|(dir, name)| Place { dir, name })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (place(), any::<bool>(), any::<bool>(), 0..9usize)
            .prop_map(|(at, exclusive, truncate, bytes)| Step::Create { at, exclusive, truncate, bytes }),
        3 => place().prop_map(Step::Mkdir),
        1 => place().prop_map(Step::Symlink),
        1 => place().prop_map(Step::Fifo),
        2 => place().prop_map(Step::Unlink),
        1 => place().prop_map(Step::Rmdir),
        2 => (place(), place()).prop_map(|(a, b)| Step::Link(a, b)),
        3 => (place(), place(), 0..3u8).prop_map(|(a, b, flags)| Step::Rename(a, b, flags)),
        1 => (place(), 0..20u64).prop_map(|(at, size)| Step::Truncate(at, size)),
        1 => (place(), 0..0o1000u32).prop_map(|(at, mode)| Step::Chmod(at, mode | 0o700)),
        2 => (place(), 0..20u64, 1..9usize).prop_map(|(at, offset, bytes)| Step::Write(at, offset, bytes)),
        1 => Just(Step::ForgetAll),
    ]
}

fn rename_flags(flags: u8) -> RenameFlags {
    [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][usize::from(flags)]
}

/// The same step, on the host.
fn on_host(root: &OwnedFd, step: &Step) -> Result<()> {
    let no_follow = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let is = |path: &str, kind: FileType| {
        let st = rustix::fs::statat(root, path, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(st.st_mode) == kind { Ok(true) } else { Ok(false) }
    };
    let walk = |at: &Place| match at.dir {
        None => Ok(()),
        Some(dir) if is(dir, FileType::Directory)? => Ok(()),
        Some(_) => Err(Errno::NOTDIR),
    };
    match step {
        Step::Create { at, exclusive, truncate, bytes } => {
            walk(at)?;
            if !exclusive && is(&at.path(), FileType::Fifo) == Ok(true) {
                return Err(Errno::NXIO);
            }
            let mut flags = OFlags::CREATE | OFlags::RDWR | no_follow;
            flags.set(OFlags::EXCL, *exclusive);
            flags.set(OFlags::TRUNC, *truncate);
            let file = rustix::fs::openat(root, at.path(), flags, Mode::from_raw_mode(0o644))?;
            rustix::io::pwrite(&file, &vec![b'c'; *bytes], 0).map(drop)
        }
        Step::Mkdir(at) => walk(at).and_then(|()| rustix::fs::mkdirat(root, at.path(), Mode::from_raw_mode(0o755))),
        Step::Symlink(at) => walk(at).and_then(|()| rustix::fs::symlinkat("../a", root, at.path())),
        Step::Fifo(at) => {
            walk(at).and_then(|()| rustix::fs::mknodat(root, at.path(), FileType::Fifo, Mode::from_raw_mode(0o600), 0))
        }
        Step::Unlink(at) => walk(at).and_then(|()| rustix::fs::unlinkat(root, at.path(), AtFlags::empty())),
        Step::Rmdir(at) => walk(at).and_then(|()| rustix::fs::unlinkat(root, at.path(), AtFlags::REMOVEDIR)),
        Step::Link(a, b) => {
            walk(a)?;
            let dir = is(&a.path(), FileType::Directory)?;
            walk(b)?;
            if dir {
                return Err(Errno::PERM);
            }
            rustix::fs::linkat(root, a.path(), root, b.path(), AtFlags::empty())
        }
        Step::Rename(a, b, flags) => {
            walk(a)?;
            walk(b)?;
            rustix::fs::renameat_with(root, a.path(), root, b.path(), rename_flags(*flags))
        }
        Step::Truncate(at, size) => {
            walk(at)?;
            match FileType::from_raw_mode(rustix::fs::statat(root, at.path(), AtFlags::SYMLINK_NOFOLLOW)?.st_mode) {
                FileType::RegularFile => {}
                FileType::Directory => return Err(Errno::ISDIR),
                _ => return Err(Errno::INVAL),
            }
            let file = rustix::fs::openat(root, at.path(), OFlags::WRONLY | no_follow, Mode::empty())?;
            rustix::fs::ftruncate(file, *size)
        }
        Step::Chmod(at, mode) => {
            walk(at)?;
            if is(&at.path(), FileType::Symlink)? {
                return Err(Errno::OPNOTSUPP);
            }
            rustix::fs::chmodat(root, at.path(), Mode::from_raw_mode(*mode), AtFlags::empty())
        }
        Step::Write(at, offset, bytes) => {
            walk(at)?;
            if is(&at.path(), FileType::Fifo)? {
                return Err(Errno::NXIO);
            }
            let file = rustix::fs::openat(root, at.path(), OFlags::RDWR | no_follow, Mode::empty())?;
            rustix::io::pwrite(&file, &vec![b'w'; *bytes], *offset).map(drop)
        }
        Step::ForgetAll => Ok(()),
    }
}

/// The source, and the references that were taken.
struct Through {
    share: Share,
    taken: Vec<Ino>,
}

impl Through {
    fn take(&mut self, entry: &Entry) -> Ino {
        self.taken.push(entry.ino);
        entry.ino
    }

    fn dir(&mut self, at: &Place) -> Result<Ino> {
        let entry = match at.dir_path() {
            "" => return Ok(Ino::ROOT),
            dir => self.share.dir.lookup(&self.share.cx, Ino::ROOT, name(dir))?,
        };
        let ino = self.take(&entry);
        if entry.attr.kind() == FileType::Directory { Ok(ino) } else { Err(Errno::NOTDIR) }
    }

    fn at(&mut self, at: &Place) -> Result<(Ino, Attr)> {
        let dir = self.dir(at)?;
        let entry = self.share.dir.lookup(&self.share.cx, dir, name(at.name))?;
        Ok((self.take(&entry), entry.attr))
    }

    fn write(&self, ino: Ino, handle: Handle, offset: u64, bytes: &[u8]) -> Result<()> {
        let result = self.share.write((ino, handle), offset, bytes);
        self.share.dir.release(&self.share.cx, ino, handle);
        result.map(drop)
    }

    fn run(&mut self, step: &Step) -> Result<()> {
        let cx = self.share.cx;
        match step {
            Step::Create { at, exclusive, truncate, bytes } => {
                let dir = self.dir(at)?;
                let mut flags = OFlags::RDWR;
                flags.set(OFlags::EXCL, *exclusive);
                flags.set(OFlags::TRUNC, *truncate);
                let made = self.share.dir.create(&cx, dir, name(at.name), &new(0o644), flags | OFlags::EXCL);
                let (entry, handle) = match made {
                    // As the client's kernel does then.
                    Err(Errno::EXIST) if !exclusive => {
                        let entry = self.share.dir.lookup(&cx, dir, name(at.name))?;
                        self.take(&entry);
                        (entry, self.share.dir.open(&cx, entry.ino, flags)?)
                    }
                    made => {
                        let (entry, handle) = made?;
                        self.take(&entry);
                        (entry, handle)
                    }
                };
                self.write(entry.ino, handle, 0, &vec![b'c'; *bytes])
            }
            Step::Mkdir(at) => {
                let dir = self.dir(at)?;
                let entry = self.share.dir.mkdir(&cx, dir, name(at.name), &new(0o755))?;
                self.take(&entry);
                Ok(())
            }
            Step::Symlink(at) => {
                let dir = self.dir(at)?;
                let entry = self.share.dir.symlink(&cx, dir, name(at.name), b"../a")?;
                self.take(&entry);
                Ok(())
            }
            Step::Fifo(at) => {
                let dir = self.dir(at)?;
                let entry = self.share.dir.mknod(&cx, dir, name(at.name), &new(0o010_600))?;
                self.take(&entry);
                Ok(())
            }
            Step::Unlink(at) => {
                let dir = self.dir(at)?;
                self.share.dir.unlink(&cx, dir, name(at.name))
            }
            Step::Rmdir(at) => {
                let dir = self.dir(at)?;
                self.share.dir.rmdir(&cx, dir, name(at.name))
            }
            Step::Link(a, b) => {
                let (ino, _) = self.at(a)?;
                let dir = self.dir(b)?;
                let entry = self.share.dir.link(&cx, ino, dir, name(b.name))?;
                self.take(&entry);
                Ok(())
            }
            Step::Rename(a, b, flags) => {
                let (from, to) = (self.dir(a)?, self.dir(b)?);
                self.share.dir.rename(&cx, (from, name(a.name)), (to, name(b.name)), rename_flags(*flags))
            }
            Step::Truncate(at, size) => {
                let (ino, _) = self.at(at)?;
                let set = SetAttr { size: Some(*size), ..SetAttr::default() };
                self.share.dir.setattr(&cx, ino, None, &set).map(drop)
            }
            Step::Chmod(at, mode) => {
                let (ino, _) = self.at(at)?;
                let set = SetAttr { mode: Some(*mode), ..SetAttr::default() };
                self.share.dir.setattr(&cx, ino, None, &set).map(drop)
            }
            Step::Write(at, offset, bytes) => {
                let (ino, _) = self.at(at)?;
                let handle = self.share.dir.open(&cx, ino, OFlags::RDWR)?;
                self.write(ino, handle, *offset, &vec![b'w'; *bytes])
            }
            Step::ForgetAll => {
                for ino in self.taken.drain(..) {
                    self.share.dir.forget(ino, 1);
                }
                let usage = self.share.dir.usage();
                assert_eq!((usage.inodes, usage.handles, usage.descriptors), (1, 0, 1));
                Ok(())
            }
        }
    }
}

/// Everything that two equal trees have in common.
fn picture(root: &Path) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    let mut picture = BTreeMap::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for item in fs::read_dir(dir).unwrap() {
            let path = item.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let content = match meta.file_type() {
                kind if kind.is_file() => fs::read(&path).unwrap(),
                kind if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
                _ => Vec::new(),
            };
            if meta.is_dir() {
                dirs.push(path.clone());
            }
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            picture.insert(name, (meta.mode(), meta.nlink(), content));
        }
    }
    picture
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn the_source_behaves_like_the_host(
        steps in prop::collection::vec(step(), 1..60),
        file_handles in any::<bool>(),
        few in any::<bool>(),
    ) {
        ferry_alone::clear_umask();
        let descriptors_max = few.then_some(1);
        let options = Options { file_handles, descriptors_max, ..Options::default() };
        let mut through = Through { share: Share::new(options), taken: Vec::new() };
        let host = tempdir();
        let root = rustix::fs::open(host.path(), OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        for step in &steps {
            prop_assert_eq!(through.run(step), on_host(&root, step), "{:?}", step);
        }
        prop_assert_eq!(picture(through.share.tmp.path()), picture(host.path()));
        through.run(&Step::ForgetAll).unwrap();
    }
}
