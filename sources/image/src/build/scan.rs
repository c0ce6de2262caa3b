//! Reads the tree of a host directory.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ferry_vfs::{FileType, Name, NameBuf, Timespec};
use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, Statx, StatxFlags, lgetxattr, llistxattr, openat, readlinkat, statx,
};
use rustix::io::{Errno, pread, retry_on_intr};

use crate::build::filter::Filter;
use crate::build::options::INLINE_BYTES_MAX;
use crate::format::composefs::fits;
use crate::format::erofs::{self, XATTR_PREFIXES};
use crate::format::error::{Error, IoContext, Result};
use crate::format::plain_file::UNTRUSTED_OPEN_FLAGS;
use crate::format::tree::{Content, Node, NodeId, Tree};

/// The maximum length of a list of attribute names, and of a value (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const XATTR_BYTES_MAX: usize = 65536;
/// The maximum length of all attributes of an inode in an image, in bytes.
const XATTRS_BYTES_MAX: usize = (u16::MAX as usize - 1) * 4;

/// The identity of a file or directory when it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileIdentity {
    /// Device and inode.
    place: (u32, u32, u64),
    kind: u16,
    pub bytes: u64,
    mtime: (i64, u32),
    /// Cannot be set, so it also shows writes within the same length and time.
    ctime: (i64, u32),
}

impl FileIdentity {
    fn of(found: &Statx) -> Self {
        Self {
            place: (found.stx_dev_major, found.stx_dev_minor, found.stx_ino),
            kind: kind(found),
            bytes: found.stx_size,
            mtime: (found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
            ctime: (found.stx_ctime.tv_sec, found.stx_ctime.tv_nsec),
        }
    }

    /// Returns the file that was opened with [`UNTRUSTED_OPEN_FLAGS`], if it is still the one that was found.
    pub(crate) fn file(&self, opened: rustix::io::Result<OwnedFd>, path: &Path) -> Result<File> {
        let file = match opened {
            // A link, or a socket.
            Err(Errno::LOOP | Errno::NXIO) => return Err(Error::Changed(path.into())),
            opened => opened.doing("open", path)?,
        };
        if Self::of(&look(&file, path)?) == *self { Ok(file.into()) } else { Err(Error::Changed(path.into())) }
    }

    /// Verifies that a file that was read is unchanged, and ends where it should.
    pub(crate) fn check(&self, file: &File, path: &Path) -> Result<()> {
        let more = retry_on_intr(|| pread(file, &mut [0], self.bytes)).doing("read", path)?;
        let is_same = more == 0 && Self::of(&look(file, path)?) == *self;
        if is_same { Ok(()) } else { Err(Error::Changed(path.into())) }
    }
}

/// A file that was found, and is to be read.
pub(crate) struct FoundFile {
    pub node: NodeId,
    pub seen: FileIdentity,
    pub path: PathBuf,
}

/// Returns the type bits of the mode.
fn kind(found: &Statx) -> u16 {
    found.stx_mode & 0o170_000
}

fn is_dir(found: &Statx) -> bool {
    FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory
}

/// Returns the metadata of a descriptor.
fn look(file: impl AsFd, path: &Path) -> Result<Statx> {
    statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).doing("look at", path)
}

/// Opens a directory for listing, if it is still the one that was found.
fn open_directory(seen: &FileIdentity, path: &Path) -> Result<Dir> {
    let changed = || Error::Changed(path.into());
    let directory = match openat(CWD, path, UNTRUSTED_OPEN_FLAGS | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => return Err(changed()),
        opened => opened.doing("list", path)?,
    };
    if FileIdentity::of(&look(&directory, path)?).place == seen.place {
        Dir::new(directory).doing("list", path)
    } else {
        Err(changed())
    }
}

/// The directory with this process's descriptors.
const DESCRIPTORS: &str = "/proc/self/fd";

/// A name in an open directory, whose own path may have changed.
#[derive(Clone, Copy)]
struct At<'a> {
    directory: BorrowedFd<'a>,
    name: &'a OsStr,
    /// The path for messages.
    path: &'a Path,
}

impl At<'_> {
    /// Returns a path for attribute calls, which take no directory before Linux 6.13. The root's path is absolute.
    fn host_path(&self) -> PathBuf {
        Path::new(DESCRIPTORS).join(self.directory.as_raw_fd().to_string()).join(self.name)
    }
}

/// Walks a directory and crosses mounts. For composefs each name is an inode, and all attributes are read.
///
/// Excluded paths are not visited. Large files are passed to `found` with their identity, in the order of the walk.
pub(crate) fn scan(
    root: &Path,
    for_composefs: bool,
    filter: &Filter,
    found: &mut dyn FnMut(FoundFile),
) -> Result<Tree> {
    let found_root = statx(CWD, root, AtFlags::empty(), StatxFlags::BASIC_STATS).doing("look at", root)?;
    if !is_dir(&found_root) {
        return Err(Error::CannotHold { path: root.into(), reason: "is not a directory".into() });
    }
    // The root may be a symbolic link; nothing below it may be.
    let root = fs::canonicalize(root).doing("look at", root)?;
    let mut walk =
        Walk { tree: Tree::default(), found, known: HashMap::new(), for_composefs, filter, root: root.clone() };
    let at = At { directory: CWD, name: root.as_os_str(), path: &root };
    let mut left = vec![(walk.add(at, &found_root)?, FileIdentity::of(&found_root), root)];
    while let Some((node, seen, path)) = left.pop() {
        let directories = walk.list(node, &seen, &path)?;
        left.extend(directories.into_iter().rev());
    }
    Ok(walk.tree)
}

struct Walk<'a> {
    tree: Tree,
    found: &'a mut dyn FnMut(FoundFile),
    /// Inodes with several names, by device and number.
    known: HashMap<(u32, u32, u64), NodeId>,
    for_composefs: bool,
    filter: &'a Filter,
    /// The prefix of all paths of the tree.
    root: PathBuf,
}

impl Walk<'_> {
    /// Lists a directory and adds its entries; returns its subdirectories in order.
    fn list(&mut self, node: NodeId, seen: &FileIdentity, path: &Path) -> Result<Vec<(NodeId, FileIdentity, PathBuf)>> {
        let mut directory = open_directory(seen, path)?;
        let mut names: Vec<OsString> = Vec::new();
        while let Some(entry) = directory.read() {
            let name = entry.doing("list", path)?.file_name().to_bytes().to_vec();
            names.extend(Some(OsString::from_vec(name)).filter(|name| name != "." && name != ".."));
        }
        names.sort_unstable_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
        let directory = directory.fd().doing("list", path)?;
        let mut entries = Vec::with_capacity(names.len());
        let mut directories = Vec::new();
        for name in names {
            let path = path.join(&name);
            let below = path.strip_prefix(&self.root).unwrap_or(&path);
            if !self.filter.exclude.is_empty() && self.filter.excludes(below.as_os_str().as_bytes()) {
                continue;
            }
            // Relative to the listed directory: another one may be at the path by now.
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
            let found = statx(directory, &name, flags, StatxFlags::BASIC_STATS).doing("look at", &path)?;
            let child = self.add(At { directory, name: &name, path: &path }, &found)?;
            if is_dir(&found) {
                directories.push((child, FileIdentity::of(&found), path.clone()));
            }
            entries.push((self.name(name, &path)?, child));
        }
        let node = &mut self.tree.nodes[node];
        node.nlink = u32::try_from(directories.len()).unwrap_or(u32::MAX - 2) + 2;
        node.content = Content::Directory(entries);
        Ok(directories)
    }

    fn name(&self, name: OsString, path: &Path) -> Result<NameBuf> {
        let bytes = name.into_vec();
        let name = Name::new(&bytes).map_err(|error| Error::CannotHold {
            path: path.into(),
            reason: format!("the name cannot be kept ({error})"),
        })?;
        Ok(name.to_buf())
    }

    /// Returns the node of an inode, created at its first name.
    fn add(&mut self, at: At<'_>, found: &Statx) -> Result<NodeId> {
        let path = at.path;
        let nodes = &mut self.tree.nodes;
        let id = nodes.len();
        if found.stx_nlink > 1 && !is_dir(found) && !self.for_composefs {
            match self.known.entry(FileIdentity::of(found).place) {
                std::collections::hash_map::Entry::Occupied(known) => {
                    let id = *known.get();
                    nodes[id].nlink += 1;
                    return Ok(id);
                }
                std::collections::hash_map::Entry::Vacant(new) => _ = new.insert(id),
            }
        }
        let content = content(at, found)?;
        let xattrs = if self.filter.skip_xattrs { Vec::new() } else { xattrs(at, self.for_composefs)? };
        if self.for_composefs && !fits(&xattrs) {
            let reason = "its extended attributes have more than 32 KiB, which composefs does not hold".into();
            return Err(Error::CannotHold { path: path.into(), reason });
        }
        if !self.for_composefs {
            check_room(&xattrs).map_err(|reason| Error::CannotHold { path: path.into(), reason })?;
        }
        if let Content::Unread { .. } = content {
            (self.found)(FoundFile { node: id, seen: FileIdentity::of(found), path: path.into() });
        }
        nodes.push(Node {
            mode: found.stx_mode,
            uid: found.stx_uid,
            gid: found.stx_gid,
            rdev: rdev(found.stx_rdev_major, found.stx_rdev_minor, path)?,
            mtime: Timespec { sec: found.stx_mtime.tv_sec, nsec: found.stx_mtime.tv_nsec },
            nlink: 1,
            xattrs,
            content,
        });
        Ok(id)
    }
}

fn content(at: At<'_>, found: &Statx) -> Result<Content> {
    Ok(match FileType::from_raw_mode(found.stx_mode.into()) {
        FileType::Directory => Content::Directory(Vec::new()),
        FileType::Symlink => {
            let target = match readlinkat(at.directory, at.name, Vec::new()) {
                // It was a link.
                Err(Errno::INVAL) => return Err(Error::Changed(at.path.into())),
                target => target.doing("read the link", at.path)?,
            };
            Content::Inline(target.into_bytes())
        }
        FileType::RegularFile if found.stx_size <= INLINE_BYTES_MAX => {
            Content::Inline(read(&FileIdentity::of(found), at)?)
        }
        FileType::RegularFile => Content::Unread { bytes: found.stx_size },
        _ => Content::None,
    })
}

/// Reads a small file.
fn read(seen: &FileIdentity, at: At<'_>) -> Result<Vec<u8>> {
    let path = at.path;
    let mut file = seen.file(openat(at.directory, at.name, UNTRUSTED_OPEN_FLAGS, Mode::empty()), path)?;
    let mut bytes = vec![0; usize::try_from(seen.bytes).unwrap_or_default()];
    file.read_exact(&mut bytes).map_err(|error| unreadable(error, path))?;
    seen.check(&file, path)?;
    Ok(bytes)
}

/// A file that ends early has changed.
pub(crate) fn unreadable(error: io::Error, path: &Path) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::Changed(path.into()),
        _ => Error::Io { what: "read", path: path.into(), source: error },
    }
}

/// Returns the kernel's 32-bit device number: the lower 8 bits of the minor number, 12 of the major, the other 12.
fn rdev(major: u32, minor: u32, path: &Path) -> Result<u32> {
    if major >= 1 << 12 || minor >= 1 << 20 {
        let reason = format!("the device number {major}:{minor} does not fit in 12 and 20 bits");
        return Err(Error::CannotHold { path: path.into(), reason });
    }
    Ok(minor & 0xff | major << 8 | (minor & !0xff) << 12)
}

/// Checks that EROFS can hold the attributes of an inode: their lengths are numbers of 16 bits, that of all in units of four bytes.
fn check_room(xattrs: &[(Vec<u8>, Vec<u8>)]) -> std::result::Result<(), String> {
    if let Some((name, value)) = xattrs.iter().find(|(_, value)| value.len() > usize::from(u16::MAX)) {
        return Err(format!("its attribute {} has {} bytes; 65,535 are the most", name.escape_ascii(), value.len()));
    }
    let all: usize = xattrs.iter().map(|(name, value)| erofs::xattr_size(name, value)).sum();
    match all > XATTRS_BYTES_MAX {
        true => Err(format!("its attributes have {all} bytes; {XATTRS_BYTES_MAX} are the most")),
        false => Ok(()),
    }
}

/// Returns the attributes for which EROFS has prefixes, by name. Others belong to the host's file system
/// (`system.nfs4_acl`) and mean nothing elsewhere.
fn xattrs(at: At<'_>, all: bool) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let (way, path) = (at.host_path(), at.path);
    let mut names = Vec::with_capacity(XATTR_BYTES_MAX);
    match llistxattr(&way, rustix::buffer::spare_capacity(&mut names)) {
        Ok(_) => {}
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(error @ (Errno::NOENT | Errno::NOTDIR)) if !Path::new(DESCRIPTORS).exists() => {
            return Err(error).doing("list, without /proc/self/fd (mount /proc), the attributes of", path);
        }
        Err(error) => return Err(error).doing("list the attributes of", path),
    }
    let mut found = Vec::new();
    for name in names.split(|byte| *byte == 0) {
        let is_known = all || XATTR_PREFIXES.iter().any(|(_, prefix)| name.starts_with(prefix));
        if name.is_empty() || !is_known {
            continue;
        }
        let mut value = Vec::with_capacity(XATTR_BYTES_MAX);
        match lgetxattr(&way, name, rustix::buffer::spare_capacity(&mut value)) {
            Ok(_) => found.push((name.to_vec(), value.as_slice().to_vec())),
            // It was removed meanwhile.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error).doing("read the attributes of", path),
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_proc_is_an_error() {
        const TREE: &str = "FERRY_TEST_TREE_WITHOUT_PROC";
        if let Some(tree) = std::env::var_os(TREE) {
            assert!(!Path::new(DESCRIPTORS).exists());
            let error =
                scan(Path::new(&tree), false, &Filter::default(), &mut |_| {}).expect_err("attributes cannot be read");
            assert!(error.to_string().contains("mount /proc"), "{error}");
            return;
        }
        if !rustix::process::geteuid().is_root() {
            ferry_skip::skip!("only root may hide /proc");
            return;
        }
        let directory = tempfile::tempdir().expect("directories can be made");
        fs::write(directory.path().join("file"), "some").expect("files can be made");
        let mut alone = std::process::Command::new("unshare");
        alone.args(["--mount", "sh", "-c", "mount -t tmpfs none /proc && exec \"$@\"", "sh"]);
        alone.arg(std::env::current_exe().expect("it is there"));
        alone
            .args(["--exact", "build::scan::tests::a_missing_proc_is_an_error", "--nocapture"])
            .env(TREE, directory.path());
        let told = alone.output().expect("unshare is there");
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&[told.stdout, told.stderr].concat()));
    }

    #[test]
    fn attributes_that_erofs_cannot_hold_are_refused() {
        let attribute = |name: usize, bytes: usize| (format!("user.{name}").into_bytes(), vec![1; bytes]);
        let refused = |all: &[(Vec<u8>, Vec<u8>)]| check_room(all).err().unwrap_or_default();
        assert_eq!(refused(&[attribute(0, 65_535)]), "");
        assert!(refused(&[attribute(0, 65_536)]).contains("user.0 has 65536 bytes"));
        let many: Vec<_> = (0..9).map(|name| attribute(name, 32_000)).collect();
        assert_eq!(refused(&many[..8]), "");
        assert!(refused(&many).contains("262136 are the most"), "{}", refused(&many));
    }

    #[test]
    fn replaced_files_and_directories_are_detected() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let at = |name: &str| directory.path().join(name);
        let seen = |path: &Path| {
            let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
            FileIdentity::of(&found.expect("it is there"))
        };
        let is_changed = |outcome: Result<()>| matches!(outcome, Err(Error::Changed(_)));
        for name in ["one", "two"] {
            fs::create_dir(at(name)).expect("directories can be made");
            fs::write(at(name).join("file"), "some").expect("files can be made");
        }
        let (dir, file) = (seen(&at("one")), seen(&at("one/file")));
        let read =
            |seen: &FileIdentity, path: &Path| super::read(seen, At { directory: CWD, name: path.as_os_str(), path });
        assert_eq!(read(&file, &at("one/file")).expect("it is the same"), b"some");
        open_directory(&dir, &at("one")).expect("it is the same");
        // As if the directory had been replaced by another one, or by a link to it.
        assert!(is_changed(read(&file, &at("two/file")).map(drop)));
        assert!(is_changed(open_directory(&dir, &at("two")).map(drop)));
        std::os::unix::fs::symlink(at("one"), at("link")).expect("links can be made");
        assert!(is_changed(open_directory(&dir, &at("link")).map(drop)));
        std::os::unix::fs::symlink("file", at("one/link")).expect("links can be made");
        assert!(is_changed(read(&file, &at("one/link")).map(drop)));
        assert!(is_changed(open_directory(&dir, &at("one/file")).map(drop)));
    }

    #[test]
    fn a_directory_that_is_replaced_while_it_is_listed_stays_the_one_that_is_listed() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let one = directory.path().join("one");
        let make = |what: &str| {
            fs::create_dir(&one).expect("directories can be made");
            std::os::unix::fs::symlink(what, one.join("link")).expect("links can be made");
            fs::write(one.join("file"), what).expect("files can be made");
            let flags = rustix::fs::XattrFlags::empty();
            let set = rustix::fs::setxattr(one.join("file"), "user.what", what.as_bytes(), flags);
            set.expect("the file system has attributes");
        };
        make("old");
        let listed = openat(CWD, &one, UNTRUSTED_OPEN_FLAGS, Mode::empty()).expect("it is there");
        fs::rename(&one, directory.path().join("gone")).expect("directories can be renamed");
        make("new");
        for name in ["link", "file"] {
            let at = At { directory: listed.as_fd(), name: OsStr::new(name), path: &one.join(name) };
            let flags = AtFlags::SYMLINK_NOFOLLOW;
            let found = statx(at.directory, name, flags, StatxFlags::BASIC_STATS).expect("it is there");
            let Content::Inline(bytes) = content(at, &found).expect("it is the same") else {
                panic!("{name} is small")
            };
            assert_eq!(bytes, b"old", "{name}");
            let expected = if name == "file" { vec![(b"user.what".to_vec(), b"old".to_vec())] } else { Vec::new() };
            let found: Vec<_> = xattrs(at, false).expect("they can be read").into_iter().collect();
            assert_eq!(found, expected, "{name}");
        }
    }
}
