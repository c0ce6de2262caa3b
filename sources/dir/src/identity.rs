//! Identifies inodes and open files for another process that shares the same directory (migration, restart).
//!
//! On this host an identity is the file handle, or without one the directory and name, which this crate stores anyway.
//! Encoding an identity takes no system call until it is requested. On other hosts it is the path from the root,
//! resolved name by name, so it reaches only what lookups reach.
//!
//! ```text
//! version 1 | flags 1 | mode 4 | device 8 | number 8
//!   [birth: seconds 8 | nanoseconds 4] [handle: type 4 | length 1 | bytes] [place: directory's number 8 | length 1 | name]
//! version 1 | flags 1 (PATH, perhaps HANDLE) | mode 4 | length 2 | path [handle]
//! version 1 | flags 1 (FAR and HANDLE) | mode 4 | handle
//! ```
//!
//! Hosts that share a file system may also use file handles ([`IdentityScope::Handles`]), or verify with them that a
//! path leads to the same file ([`IdentityScope::CheckedPaths`]). A handle does not show where its file is, so
//! accepting one from another host trusts it with the whole file system. Processes of this host accept handles, because
//! clients cannot write their identities. From other hosts they are accepted only with [`IdentityScope::Handles`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::{Caller, Errno, FileType, Handle, IdentityScope, Ino, Migrate, Name, OFlags, Result, Timespec};
use rustix::fs::{Mode, Statx};
use rustix::path::DecInt;

use crate::Dir;
use crate::mount::Mount;
use crate::resolve::{self, statx};
use crate::search::SEARCH_TIME_MAX;
use crate::sys::{self, HostHandle};
use crate::table::{FoundInode, Inode, Key};

const VERSION: u8 = 1;

/// Flags for the parts of an identity.
const ON_ROOT_MOUNT: u8 = 1;
const BIRTH: u8 = 2;
const HANDLE: u8 = 4;
const PLACE: u8 = 8;
const MOUNT_ROOT: u8 = 16;
const PATH: u8 = 32;
const FAR: u8 = 64;
const ALL: u8 = 127;

/// A decoded identity.
#[derive(Debug, Default, PartialEq, Eq)]
struct Identity<'a> {
    flags: u8,
    mode: u32,
    dev: u64,
    ino: u64,
    birth: Option<Timespec>,
    handle: Option<(i32, &'a [u8])>,
    place: Option<(Ino, &'a [u8])>,
    path: Option<&'a [u8]>,
}

/// Decodes numbers and bytes from untrusted input.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(count).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(front)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.bytes(N)?.try_into().map_err(|_| Errno::INVAL)
    }

    fn u8(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn handle(&mut self) -> Result<(i32, &'a [u8])> {
        let kind = i32::from_le_bytes(self.array()?);
        let length = self.u8()?;
        Ok((kind, self.bytes(length.into())?))
    }
}

impl<'a> Identity<'a> {
    fn decode(bytes: &'a [u8]) -> Result<Self> {
        let mut reader = Reader(bytes);
        let (version, flags) = (reader.u8()?, reader.u8()?);
        if version != VERSION || flags & !ALL != 0 {
            return Err(Errno::INVAL);
        }
        let mut identity = Self { flags, mode: u32::from_le_bytes(reader.array()?), ..Self::default() };
        if flags & PATH != 0 && flags & !(PATH | HANDLE) != 0 || flags & FAR != 0 && flags != FAR | HANDLE {
            return Err(Errno::INVAL);
        }
        if flags & PATH != 0 {
            let length = u16::from_le_bytes(reader.array()?);
            identity.path = Some(reader.bytes(length.into())?);
        }
        if flags & (PATH | FAR) != 0 {
            identity.handle = if flags & HANDLE != 0 { Some(reader.handle()?) } else { None };
        } else {
            (identity.dev, identity.ino) = (reader.u64()?, reader.u64()?);
            if flags & BIRTH != 0 {
                let sec = i64::from_le_bytes(reader.array()?);
                identity.birth = Some(Timespec { sec, nsec: u32::from_le_bytes(reader.array()?) });
            }
            if flags & HANDLE != 0 {
                identity.handle = Some(reader.handle()?);
            }
            if flags & PLACE != 0 {
                let dir = Ino(reader.u64()?);
                let length = reader.u8()?;
                identity.place = Some((dir, reader.bytes(length.into())?));
            }
        }
        if reader.0.is_empty() { Ok(identity) } else { Err(Errno::INVAL) }
    }

    /// Returns whether an identity of this kind is acceptable in this scope.
    fn is_for(&self, within: IdentityScope) -> bool {
        match within {
            IdentityScope::Host => self.flags & (PATH | FAR) == 0,
            IdentityScope::Paths | IdentityScope::CheckedPaths => self.flags & PATH != 0,
            IdentityScope::Handles => self.flags & (PATH | FAR) != 0,
        }
    }

    fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![VERSION, self.flags];
        bytes.extend(self.mode.to_le_bytes());
        if let Some(path) = self.path {
            bytes.extend(u16::try_from(path.len()).map_err(|_| Errno::NAMETOOLONG)?.to_le_bytes());
            bytes.extend(path);
        } else if self.flags & FAR == 0 {
            bytes.extend(self.dev.to_le_bytes());
            bytes.extend(self.ino.to_le_bytes());
        }
        if let Some(Timespec { sec, nsec }) = self.birth {
            bytes.extend(sec.to_le_bytes());
            bytes.extend(nsec.to_le_bytes());
        }
        if let Some((kind, handle)) = self.handle {
            bytes.extend(kind.to_le_bytes());
            bytes.push(u8::try_from(handle.len()).map_err(|_| Errno::OVERFLOW)?);
            bytes.extend(handle);
        }
        if let Some((dir, name)) = self.place {
            bytes.extend(dir.0.to_le_bytes());
            bytes.push(u8::try_from(name.len()).map_err(|_| Errno::NAMETOOLONG)?);
            bytes.extend(name);
        }
        Ok(bytes)
    }
}

/// Decodes any bytes, for the fuzzer.
#[cfg(fuzzing)]
pub fn fuzz(bytes: &[u8]) {
    if let Ok(identity) = Identity::decode(bytes) {
        assert_eq!(identity.encode().as_deref(), Ok(bytes));
    }
}

impl Dir {
    fn identify_elsewhere(&self, inode: &Arc<Inode>, within: IdentityScope) -> Result<Vec<u8>> {
        let mode = inode.found.kind.as_raw_mode();
        if within == IdentityScope::Handles
            && let Some(handle) = self.host_independent_handle(inode, self.path_fd(inode)?.as_fd())
        {
            let handle = Some(handle.parts());
            return Identity { flags: FAR | HANDLE, mode, handle, ..Identity::default() }.encode();
        }
        self.identify_at(inode, &self.path_of(inode)?, within)
    }

    pub(crate) fn identify_at(&self, inode: &Arc<Inode>, path: &[u8], within: IdentityScope) -> Result<Vec<u8>> {
        let mode = inode.found.kind.as_raw_mode();
        let handle = match within {
            IdentityScope::Paths => None,
            _ => self.host_independent_handle(inode, self.walk(path)?.as_fd()),
        };
        let handle = handle.as_ref().map(HostHandle::parts);
        let flags = if handle.is_some() { PATH | HANDLE } else { PATH };
        Identity { flags, mode, handle, path: Some(path), ..Identity::default() }.encode()
    }

    /// Returns a handle that identifies the file on other hosts. Mounts below the share are different mounts there, so
    /// only a path leads to their files.
    fn host_independent_handle(&self, inode: &Inode, fd: BorrowedFd<'_>) -> Option<HostHandle> {
        if inode.found.mount.id != self.root.found.mount.id {
            return None;
        }
        sys::name_to_handle(fd, b"").ok()
    }

    /// Returns the path of an inode below the root. If it has several names, the kernel returns one of them.
    fn path_of(&self, inode: &Arc<Inode>) -> Result<Vec<u8>> {
        let seen = |fd: BorrowedFd<'_>| rustix::fs::readlinkat(&self.proc_fds, DecInt::from_fd(fd), Vec::new());
        let (root, fd) = (self.path_fd(&self.root)?, self.path_fd(inode)?);
        let (root, path) = (seen(root.as_fd())?, seen(fd.as_fd())?);
        // Of "/" nothing is left.
        let root = root.as_bytes().strip_suffix(b"/").unwrap_or(root.as_bytes());
        let path = path.as_bytes().strip_prefix(root).and_then(|path| path.strip_prefix(b"/")).ok_or(Errno::STALE)?;
        // The path may be that of a file that is now unlinked.
        let again = self.walk(path)?;
        let same = resolve::key(&statx(again.as_fd(), b"")?) == inode.found.key;
        if same { Ok(path.to_vec()) } else { Err(Errno::STALE) }
    }

    /// Resolves a path name by name from the root.
    fn walk(&self, path: &[u8]) -> Result<OwnedFd> {
        let root = self.path_fd(&self.root)?;
        let mut at: Option<OwnedFd> = None;
        for name in path.split(|byte| *byte == b'/') {
            let name = Name::new(name)?;
            let dir = at.as_ref().map_or(root.as_fd(), AsFd::as_fd);
            let next = self.open_path(dir, name.as_bytes())?;
            at = Some(next);
        }
        at.ok_or(Errno::INVAL)
    }

    fn adopt_identity(&self, ino: Ino, references: u64, identity: &Identity<'_>) -> Result<()> {
        if let Some(path) = identity.path {
            let fd = self.walk(path)?;
            if let Some(expected) = identity.handle {
                let handle = sys::name_to_handle(fd.as_fd(), b"").map_err(|_| Errno::STALE)?;
                if handle.parts() != expected {
                    return Err(Errno::STALE);
                }
            }
            return self.adopt_descriptor(ino, references, fd, identity);
        }
        if identity.flags & FAR != 0 {
            let handle = identity.handle.and_then(|(kind, bytes)| HostHandle::from_parts(kind, bytes));
            let (handle, mount) = handle.zip(self.root.found.mount.handles()).ok_or(Errno::STALE)?;
            let fd = self.retry_with_room(|| sys::open_by_handle(mount, &handle, resolve::PATH_FLAGS))?;
            return self.adopt_descriptor(ino, references, fd, identity);
        }
        let dir = match identity.place {
            // It may be adopted later.
            Some((dir, _)) => Some(self.table.peek(dir).ok_or(Errno::AGAIN)?),
            None => None,
        };
        if let (Some(dir), Some((_, name)), true) = (&dir, identity.place, identity.flags & MOUNT_ROOT != 0) {
            // Only its path shows which mount it is.
            let dir = self.path_fd(dir)?;
            let fd = self.open_path(dir.as_fd(), Name::new(name)?.as_bytes())?;
            return self.adopt_descriptor(ino, references, fd, identity);
        }
        let mount = match identity.flags & ON_ROOT_MOUNT != 0 {
            true => Arc::clone(&self.root.found.mount),
            false => self.mounts.of_device(identity.dev).ok_or(Errno::AGAIN)?,
        };
        let handle = identity.handle.and_then(|(kind, bytes)| HostHandle::from_parts(kind, bytes));
        if handle.is_some() && mount.handles().is_none() || handle.is_none() && dir.is_none() {
            return Err(Errno::STALE);
        }
        let found = FoundInode {
            key: Key { dev: identity.dev, ino: identity.ino, mount: mount.id },
            kind: FileType::from_raw_mode(identity.mode),
            btime: identity.birth,
            mount,
            handle,
            mount_root: false,
            // Verified when it is used.
            verified: false,
        };
        let inode = self.table.adopt(ino, references, found)?;
        if let (Some(dir), Some((_, name))) = (&dir, identity.place) {
            inode.set_place(dir, Name::new(name)?.as_bytes());
        }
        Ok(())
    }

    /// Adopts the inode of a descriptor if it matches the identity, as far as the two can be compared.
    fn adopt_descriptor(&self, ino: Ino, references: u64, fd: OwnedFd, identity: &Identity<'_>) -> Result<()> {
        let st = statx(fd.as_fd(), b"")?;
        let kind = resolve::kind(&st);
        // Device numbers are specific to a host.
        let is_far = identity.flags & (PATH | FAR) != 0;
        let same = is_far || (resolve::key(&st).dev, resolve::key(&st).ino) == (identity.dev, identity.ino);
        if kind != FileType::from_raw_mode(identity.mode) || !same {
            return Err(Errno::STALE);
        }
        let mount = match identity.flags & ON_ROOT_MOUNT != 0 {
            true => Arc::clone(&self.root.found.mount),
            false => self.mounts.get(resolve::key(&st).mount, kind, fd.as_fd(), self.proc_fds.as_fd()),
        };
        let (found, is_gone) = (Self::found_by(&st, mount, fd.as_fd()), st.stx_nlink == 0);
        let has_handle = found.handle.is_some();
        let inode = self.table.adopt(ino, references, found)?;
        if let Some((dir, name)) = identity.place
            && let (Some(dir), Ok(name)) = (self.table.peek(dir), Name::new(name))
        {
            inode.set_place(&dir, name.as_bytes());
        }
        // Nothing else leads to it.
        if is_gone || !has_handle {
            inode.set_pinned(is_gone || inode.place().is_none());
            self.cache.keep(&self.table, &inode, self.cache.wrap(fd));
        }
        Ok(())
    }

    pub(crate) fn found_by(st: &Statx, mount: Arc<Mount>, fd: BorrowedFd<'_>) -> FoundInode {
        let handle = mount.handles().and_then(|_| sys::name_to_handle(fd, b"").ok());
        let mount_root = resolve::is_mount_root(st);
        let (kind, btime) = (resolve::kind(st), resolve::btime(st));
        // The descriptor may have been opened through another process's mount.
        let key = Key { mount: mount.id, ..resolve::key(st) };
        FoundInode { key, kind, btime, mount, handle, mount_root, verified: true }
    }
}

impl Migrate for Dir {
    fn identify(&self, ino: Ino, within: IdentityScope) -> Result<Vec<u8>> {
        let inode = self.table.get(ino)?;
        let mode = inode.found.kind.as_raw_mode();
        let found = &inode.found;
        if within != IdentityScope::Host {
            return self.identify_elsewhere(&inode, within);
        }
        let place = inode.place();
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let flags = flag(found.mount.id == self.root.found.mount.id, ON_ROOT_MOUNT)
            | flag(found.btime.is_some(), BIRTH)
            | flag(found.handle.is_some(), HANDLE)
            | flag(place.is_some(), PLACE)
            | flag(found.mount_root, MOUNT_ROOT);
        let identity = Identity {
            flags,
            mode,
            dev: found.key.dev,
            ino: found.key.ino,
            birth: found.btime,
            handle: found.handle.as_ref().map(HostHandle::parts),
            place: place.as_ref().map(|(dir, name)| (dir.ino, &**name)),
            path: None,
        };
        identity.encode()
    }

    fn search(&self, inos: &[Ino], within: IdentityScope) -> Vec<(Ino, Vec<u8>)> {
        self.search_until(inos, within, Instant::now() + SEARCH_TIME_MAX)
    }

    fn follows_names(&self, dir: Ino) -> bool {
        self.table.peek(dir).is_some_and(|dir| dir.found.mount.handles().is_none())
    }

    fn adopt(
        &self,
        ino: Ino,
        references: u64,
        (identity, within): (&[u8], IdentityScope),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let identity = Identity::decode(identity)?;
        if !identity.is_for(within) {
            return Err(Errno::PERM);
        }
        let Some(file) = file else { return self.adopt_identity(ino, references, &identity) };
        let st = statx(file, b"")?;
        if (resolve::key(&st).dev, resolve::key(&st).ino) != (identity.dev, identity.ino) {
            return Err(Errno::STALE);
        }
        if st.stx_nlink > 0 {
            match self.adopt_identity(ino, references, &identity) {
                // The host has renamed it, or it had several names, and the directory of this one is gone.
                Err(Errno::STALE | Errno::NOENT | Errno::AGAIN) => {}
                other => return other,
            }
        }
        // Seen through the mounts of the other process, which are not ours: linkat fails from there.
        let handle = identity.handle.and_then(|(kind, bytes)| HostHandle::from_parts(kind, bytes));
        let by_handle = match (&handle, self.root.found.mount.handles()) {
            (Some(handle), Some(mount)) => sys::open_by_handle(mount, handle, resolve::PATH_FLAGS).ok(),
            _ => None,
        };
        let fd = by_handle.map_or_else(|| self.reopen(file, OFlags::PATH), Ok)?;
        self.adopt_descriptor(ino, references, fd, &identity)
    }

    fn adopted_after(&self, identity: &[u8]) -> Option<Ino> {
        Identity::decode(identity).ok()?.place.map(|(dir, _)| dir)
    }

    fn adopt_open(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        flags: OFlags,
        file: Option<OwnedFd>,
    ) -> Result<()> {
        let inode = self.table.get(ino)?;
        let flags = if inode.is_dir() { OFlags::RDONLY } else { self.host_flags(flags)? - OFlags::TRUNC };
        let file = match file {
            Some(file) => {
                let Key { dev, ino, .. } = resolve::key(&statx(file.as_fd(), b"")?);
                if (dev, ino) != (inode.found.key.dev, inode.found.key.ino) {
                    return Err(Errno::STALE);
                }
                file
            }
            None if inode.is_dir() => {
                let fd = self.path_fd(&inode)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                self.retry_with_room_to_keep(|| rustix::fs::openat(fd.as_fd(), ".", flags, Mode::empty()))?
            }
            None => {
                ferry_vfs::openable(inode.found.kind)?;
                self.open_data(&inode, flags)?
            }
        };
        // The descriptor of an earlier version may have others than at the open.
        let now = rustix::fs::fcntl_getfl(&file)?;
        let changed = OFlags::APPEND | OFlags::DIRECT;
        let open = Self::opened(inode, file, (flags - changed) | (now & changed));
        self.handles.adopt(cx.session, ino, handle, open)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn identities_for_other_hosts_round_trip() {
        let handle = Some((-11, &b"handle"[..]));
        let far = |flags, handle, path| Identity { flags, mode: 0o100_000, handle, path, ..Identity::default() };
        for identity in [
            far(PATH, None, Some(&b"a/b"[..])),
            far(PATH | HANDLE, handle, Some(b"a/b")),
            far(FAR | HANDLE, handle, None),
        ] {
            let bytes = identity.encode().expect("it is short");
            assert_eq!(Identity::decode(&bytes), Ok(identity));
            assert!((0..bytes.len()).all(|len| Identity::decode(&bytes[..len]).is_err()));
        }
        for flags in [FAR, FAR | HANDLE | PATH, FAR | HANDLE | BIRTH, PATH | PLACE, 128] {
            let bytes = [&[VERSION, flags][..], &[0; 40]].concat();
            assert_eq!(Identity::decode(&bytes), Err(Errno::INVAL), "{flags}");
        }
    }

    #[test]
    fn identities_round_trip() {
        let identity = Identity {
            flags: ON_ROOT_MOUNT | BIRTH | HANDLE | PLACE,
            mode: 0o100_000,
            dev: 7,
            ino: 8,
            birth: Some(Timespec { sec: -9, nsec: 10 }),
            handle: Some((-11, b"handle")),
            place: Some((Ino(12), b"name")),
            path: None,
        };
        let bytes = identity.encode().expect("it is short");
        assert_eq!(Identity::decode(&bytes), Ok(identity));
        assert!((0..bytes.len()).all(|len| Identity::decode(&bytes[..len]).is_err()));
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_identity_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80), flags in 0..128u8) {
            let bytes = [&[VERSION, flags][..], &bytes].concat();
            if let Ok(identity) = Identity::decode(&bytes) {
                prop_assert_eq!(identity.encode(), Ok(bytes.clone()));
            }
        }
    }
}
