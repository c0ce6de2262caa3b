//! Trees to make images of.
#![allow(dead_code, reason = "not every test needs all of it")]

pub mod composefs;
pub mod damaged;
pub mod kernel;
pub mod readers;

use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use ferry_image::{BuildOptions, BuildReport, Flaw, Source, Store, build, walk};
use rustix::fs::{CWD, FileType, Mode, Timespec, Timestamps, XattrFlags, lsetxattr, mknodat, utimensat};

/// A directory with a tree, a store and images. It goes at the end.
pub struct Bench {
    pub directory: tempfile::TempDir,
}

impl Bench {
    pub fn new() -> Self {
        Self::of(tempfile::tempdir().expect("a directory can be made"))
    }

    pub fn of(directory: tempfile::TempDir) -> Self {
        fs::create_dir(directory.path().join("tree")).expect("a directory can be made");
        Self { directory }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn tree(&self) -> PathBuf {
        self.path("tree")
    }

    pub fn store(&self) -> PathBuf {
        self.path("store")
    }

    /// Builds `name` of the tree.
    pub fn build(&self, name: &str) -> BuildReport {
        self.try_build(name).expect("the tree can be built")
    }

    pub fn try_build(&self, name: &str) -> ferry_image::Result<BuildReport> {
        let store = Store::create(&self.store())?;
        build(
            &self.tree(),
            &self.path(name),
            store,
            &BuildOptions { threads: 3, ..BuildOptions::default() },
            &|_, _| {},
        )
    }
}

/// Bytes that are not the same for any two numbers.
pub fn bytes(number: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| ((at / 7) ^ (at % 251) ^ (number * 31)).to_le_bytes()[0])
        .chain(number.to_le_bytes())
        .take(length)
        .collect()
}

pub fn set_time(path: &Path, sec: i64, nsec: i64) {
    let time = Timespec { tv_sec: sec, tv_nsec: nsec };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).expect("times can be set");
}

/// Everything that a tree may hold. Devices need root.
pub fn fill(tree: &Path) {
    for (number, length) in [0, 1, 63, 64, 65, 4095, 4096, 4097, 8192, 70_000, 5 << 20].into_iter().enumerate() {
        fs::write(tree.join(format!("file-{length}")), bytes(number, length)).expect("files can be made");
    }
    // Holes, and data after them.
    let sparse = File::create(tree.join("sparse")).expect("files can be made");
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"end", 9 << 20).expect("files can be written");
    fs::write(tree.join("twin"), bytes(9, 70_000)).expect("files can be made");
    fs::hard_link(tree.join("twin"), tree.join("a-link")).expect("links can be made");
    for length in [1, 60, 2000, 4000, 4095] {
        symlink("x".repeat(length), tree.join(format!("link-{length}"))).expect("links can be made");
    }
    let mut deep = tree.to_owned();
    for level in 0..40 {
        deep.push(format!("level {level}"));
        fs::create_dir(&deep).expect("directories can be made");
        fs::write(deep.join("leaf"), bytes(level, 100)).expect("files can be made");
    }
    fs::create_dir(tree.join("empty")).expect("directories can be made");
    // Names before and after "." and "..", and as long as they may be.
    let names = tree.join("names");
    fs::create_dir(&names).expect("directories can be made");
    for name in ["-", "!", ".a", "...", "..a", "\u{1}", "ä", " ", "\n", &"n".repeat(255)] {
        fs::write(names.join(name), name).expect("files can be made");
    }
    for count in [100, 300, 3000] {
        let many = tree.join(format!("many-{count}"));
        fs::create_dir(&many).expect("directories can be made");
        for number in 0..count {
            fs::write(many.join(format!("name-of-file-{number}")), []).expect("files can be made");
        }
    }
    fs::set_permissions(tree.join("file-65"), fs::Permissions::from_mode(0o6751)).expect("modes can be set");
    attributes(tree);
    // What only the longer inode can hold: owners, times, and times before the others.
    std::os::unix::fs::lchown(tree.join("file-1"), Some(100_000), Some(70_000)).expect("owners can be set");
    std::os::unix::fs::lchown(tree.join("link-1"), Some(5), Some(6)).expect("owners can be set");
    set_time(&tree.join("file-63"), 1, 0);
    set_time(&tree.join("file-64"), 2_000_000_000, 999_999_999);
    set_time(&tree.join("link-60"), 5_000_000_000, 0);
    for (name, kind, dev) in [
        ("fifo", FileType::Fifo, 0),
        ("socket", FileType::Socket, 0),
        ("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3)),
        ("disk", FileType::BlockDevice, rustix::fs::makedev(259, 0xabcde)),
    ] {
        mknodat(CWD, tree.join(name), kind, Mode::from_raw_mode(0o640), dev).expect("special files can be made");
    }
    set_time(tree, 1_700_000_000, 0);
}

fn attributes(tree: &Path) {
    for (name, attribute, value) in [
        ("file-65", "user.one", &b"1"[..]),
        ("file-4096", "user.one", b"1"),
        ("empty", "user.one", b"1"),
        ("empty", "user.two", b""),
        ("many-300", "trusted.own", b"only here"),
        ("file-0", "security.ferry", &[7; 3000]),
        ("twin", "user.long", &[9; 1000]),
    ] {
        lsetxattr(tree.join(name), attribute, value, XattrFlags::empty()).expect("attributes can be set");
    }
}

/// What can be told of a path: everything but what file systems are free to choose.
#[derive(Debug, PartialEq, Eq)]
pub struct Facts {
    pub mode: u32,
    pub owner: (u32, u32),
    pub nlink: u64,
    pub size: u64,
    pub rdev: u64,
    pub mtime: (i64, i64),
    pub target: Option<PathBuf>,
    pub bytes: Option<Vec<u8>>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// All of a tree, by path.
pub fn facts(tree: &Path) -> std::collections::BTreeMap<PathBuf, Facts> {
    let mut all = std::collections::BTreeMap::new();
    let mut left = vec![tree.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path).expect("what was listed is there");
        if found.is_dir() {
            let names = fs::read_dir(&path).expect("directories can be listed");
            left.extend(names.map(|entry| entry.expect("directories can be listed").path()));
        }
        let own = |value: u64| if found.is_dir() { 0 } else { value };
        all.insert(
            path.strip_prefix(tree).expect("it is in the tree").to_owned(),
            Facts {
                mode: found.mode(),
                owner: (found.uid(), found.gid()),
                nlink: own(found.nlink()),
                size: own(found.size()),
                rdev: found.rdev(),
                mtime: (found.mtime(), found.mtime_nsec()),
                target: found.is_symlink().then(|| fs::read_link(&path).expect("links can be read")),
                bytes: found.is_file().then(|| fs::read(&path).expect("files can be read")),
                xattrs: xattrs(&path),
            },
        );
    }
    all
}

/// The same of an image.
pub fn facts_of_image(source: &Source) -> std::collections::BTreeMap<PathBuf, Facts> {
    let image = source.image();
    let mut all = std::collections::BTreeMap::new();
    let walked = walk::<Flaw>(image, image.root(), b"/", |step, inode| {
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&step.path()[1..]));
        let kind = inode.kind();
        let own = |value: u64| if kind == ferry_vfs::FileType::Directory { 0 } else { value };
        let bytes = (kind == ferry_vfs::FileType::RegularFile).then(|| {
            let mut bytes = vec![0; usize::try_from(inode.bytes).expect("files of tests fit")];
            assert_eq!(source.read_at(inode.nid, 0, &mut bytes), Ok(bytes.len()));
            bytes
        });
        let target = if kind == ferry_vfs::FileType::Symlink { Some(image.link(inode)?) } else { None };
        let mut xattrs: Vec<_> = image.xattrs(inode)?.into_iter().map(|(name, value)| (name, value.to_vec())).collect();
        xattrs.sort_unstable();
        let facts = Facts {
            mode: inode.mode,
            owner: (inode.uid, inode.gid),
            nlink: own(inode.nlink.into()),
            size: own(inode.bytes),
            rdev: own(inode.rdev().into()),
            mtime: (inode.mtime.sec, inode.mtime.nsec.into()),
            target: target.map(|target| PathBuf::from(std::ffi::OsString::from_vec(target))),
            bytes,
            xattrs,
        };
        all.insert(path, facts);
        Ok(())
    });
    walked.expect("the image is whole");
    all
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 65536];
    let count = rustix::fs::llistxattr(path, &mut names[..]).expect("attributes can be listed");
    let mut all: Vec<_> = names[..count]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0; 65536];
            let count = rustix::fs::lgetxattr(path, name, &mut value[..]).expect("attributes can be read");
            (name.to_vec(), value[..count].to_vec())
        })
        .collect();
    all.sort_unstable();
    all
}
