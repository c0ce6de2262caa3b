//! A complete small file system in memory, as a starting point.
//!
//! `toyfs mount DIR` mounts it on this host, `toyfs virtiofs SOCKET` shares it with a virtual machine; its contents are
//! lost at exit. It has files, directories, hard and symbolic links, device nodes, extended attributes, an ioctl, and a
//! limit on the size of its files. It leaves to the client's kernel: locks within one client, SEEK_HOLE without holes,
//! copy_file_range, and fsync without durability. It has no access times, ACLs, capabilities and RENAME_EXCHANGE.
//!
//! [`State`] holds everything; `impl FileSystem for Toy` implements the clients' requests.

use std::collections::{BTreeMap, HashMap};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferry_fs::{
    Attr, Caller, Change, Changes, CreateArgs, Data, DirOutput, DirRange, Entry, Errno, FallocateFlags, FileSystem,
    FileType, Handle, Ino, Input, IoRange, Name, Names, OFlags, Output, RenameFlags, Result, SetAttr, Statfs, Timespec,
    XattrFlags,
};

/// The maximum size of all files together in bytes. Names, links and extended attributes are not limited: a file system
/// for clients that are not trusted counts them, too.
const BYTES_MAX: u64 = 256 << 20;
const BLOCK_BYTES: u32 = 4096;
/// The toy's own ioctl, `_IOR('t', 1, u64)`: the total size of all files.
const TOYFS_IOC_USED: u32 = 0x8008_7401;

/// The file system. One lock for everything keeps it simple, and is enough because nothing under it is slow.
struct Toy {
    state: Mutex<State>,
    changes: Changes,
}

struct State {
    inodes: HashMap<Ino, Inode>,
    /// The number of references that clients hold per inode.
    references: HashMap<Ino, u64>,
    last_ino: u64,
    /// Bytes in all files.
    used: u64,
}

struct Inode {
    attr: Attr,
    body: Body,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

enum Body {
    File(Vec<u8>),
    Directory {
        parent: Ino,
        names: Names<Ino>,
    },
    Symlink(Vec<u8>),
    /// A device node, FIFO or socket, which the client's kernel implements.
    Special,
}

impl Inode {
    fn is_dir(&self) -> bool {
        matches!(self.body, Body::Directory { .. })
    }

    /// Checks whether a rename or removal may take the inode's name.
    fn check_removable(&self, as_dir: bool) -> Result<()> {
        match &self.body {
            Body::Directory { .. } if !as_dir => Err(Errno::ISDIR),
            Body::Directory { names, .. } if !names.is_empty() => Err(Errno::NOTEMPTY),
            Body::Directory { .. } => Ok(()),
            _ if as_dir => Err(Errno::NOTDIR),
            _ => Ok(()),
        }
    }

    /// Updates ctime after a change of the inode.
    fn changed(&mut self) {
        self.attr.ctime = Timespec::now();
    }

    /// Updates the times after a change of its bytes or names.
    fn modified(&mut self) {
        self.changed();
        self.attr.mtime = self.attr.ctime;
    }
}

impl State {
    fn inode(&self, ino: Ino) -> Result<&Inode> {
        self.inodes.get(&ino).ok_or(Errno::STALE)
    }

    fn inode_mut(&mut self, ino: Ino) -> Result<&mut Inode> {
        self.inodes.get_mut(&ino).ok_or(Errno::STALE)
    }

    fn names(&self, dir: Ino) -> Result<&Names<Ino>> {
        match &self.inode(dir)?.body {
            Body::Directory { names, .. } => Ok(names),
            _ => Err(Errno::NOTDIR),
        }
    }

    /// Returns the names of a directory for a change.
    fn names_mut(&mut self, dir: Ino) -> Result<&mut Names<Ino>> {
        let inode = self.inode_mut(dir)?;
        inode.modified();
        match &mut inode.body {
            Body::Directory { names, .. } => Ok(names),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn child(&self, dir: Ino, name: Name) -> Result<Ino> {
        self.names(dir)?.get(name).copied().ok_or(Errno::NOENT)
    }

    fn bytes(&self, ino: Ino) -> Result<&[u8]> {
        match &self.inode(ino)?.body {
            Body::File(bytes) => Ok(bytes),
            Body::Directory { .. } => Err(Errno::ISDIR),
            Body::Symlink(_) | Body::Special => Err(Errno::INVAL),
        }
    }

    /// Cuts or extends a file.
    fn resize(&mut self, ino: Ino, len: u64) -> Result<()> {
        let before = self.bytes(ino)?.len() as u64;
        let len_usize = usize::try_from(len).map_err(|_| Errno::FBIG)?;
        if len > before && len - before > BYTES_MAX - self.used {
            return Err(if len > BYTES_MAX { Errno::FBIG } else { Errno::NOSPC });
        }
        let inode = self.inode_mut(ino)?;
        if let Body::File(bytes) = &mut inode.body {
            bytes.resize(len_usize, 0);
            inode.attr.set_size(len);
        }
        self.used = self.used - before + len;
        Ok(())
    }

    /// Returns the entry for a client, which then holds a reference until it forgets the inode.
    fn entry(&mut self, ino: Ino) -> Result<Entry> {
        let attr = self.inode(ino)?.attr;
        *self.references.entry(ino).or_insert(0) += 1;
        Ok(Entry::new(ino, attr))
    }

    /// Refuses an existing name, and names in a removed directory.
    fn check_free(&self, dir: Ino, name: Name) -> Result<()> {
        match self.names(dir)?.get(name) {
            Some(_) => Err(Errno::EXIST),
            None if self.inode(dir)?.attr.nlink == 0 => Err(Errno::NOENT),
            None => Ok(()),
        }
    }

    /// Creates an inode without a name.
    fn make(&mut self, cx: &Caller, dir: Ino, new: &CreateArgs, body: Body) -> Result<Ino> {
        self.last_ino += 1;
        let ino = Ino(self.last_ino);
        let mut attr = Attr::for_new(ino, cx, new, &self.inode(dir)?.attr);
        if let Body::Symlink(target) = &body {
            attr.set_size(target.len() as u64);
        }
        self.inodes.insert(ino, Inode { attr, body, xattrs: BTreeMap::new() });
        Ok(ino)
    }

    /// Links an inode to a name; it may come from another directory.
    fn place(&mut self, dir: Ino, name: Name, ino: Ino) -> Result<()> {
        self.names_mut(dir)?.insert(name, ino);
        let inode = self.inode_mut(ino)?;
        inode.changed();
        if let Body::Directory { parent, .. } = &mut inode.body {
            let from = std::mem::replace(parent, dir);
            self.inode_mut(from)?.attr.nlink -= 1;
            self.inode_mut(dir)?.attr.nlink += 1;
        }
        Ok(())
    }

    /// Removes an inode's name in a directory. A directory had two links: that one, and its own `.`.
    fn unlinked(&mut self, dir: Ino, ino: Ino) -> Result<()> {
        let inode = self.inode_mut(ino)?;
        inode.changed();
        if inode.is_dir() {
            inode.attr.nlink = 0;
            self.inode_mut(dir)?.attr.nlink -= 1;
        } else {
            inode.attr.nlink -= 1;
        }
        self.drop_unused(ino);
        Ok(())
    }

    /// Drops an inode without names and references; open files count as references.
    fn drop_unused(&mut self, ino: Ino) {
        if self.inode(ino).is_ok_and(|inode| inode.attr.nlink == 0) && !self.references.contains_key(&ino) {
            self.used -= self.bytes(ino).map_or(0, |bytes| bytes.len() as u64);
            self.inodes.remove(&ino);
        }
    }

    /// Returns whether `ino` is `above`, or below it.
    fn is_within(&self, mut ino: Ino, above: Ino) -> Result<bool> {
        while ino != above && ino != Ino::ROOT {
            match self.inode(ino)?.body {
                Body::Directory { parent, .. } => ino = parent,
                _ => return Err(Errno::NOTDIR),
            }
        }
        Ok(ino == above)
    }
}

impl Toy {
    fn new() -> Self {
        let root = Inode {
            attr: Attr::new(Ino::ROOT, FileType::Directory, 0o755),
            body: Body::Directory { parent: Ino::ROOT, names: Names::default() },
            xattrs: BTreeMap::new(),
        };
        let inodes = HashMap::from([(Ino::ROOT, root)]);
        let state = State { inodes, references: HashMap::new(), last_ino: Ino::ROOT.0, used: 0 };
        Self { state: Mutex::new(state), changes: Changes::default() }
    }

    /// Locks the state. A handler that panics returns EIO to its caller; a poisoned lock would make all later calls
    /// fail.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies the other clients; the caller knows its own change. The lock is not held, so that clients then see the
    /// change.
    fn publish(&self, cx: &Caller, change: Change) {
        self.changes.publish(cx.session, || change);
    }

    fn name_changed(&self, cx: &Caller, dir: Ino, name: Name) {
        self.publish(cx, Change::Entry { dir, name: name.to_buf() });
    }

    /// Changes attributes of an inode but not its contents.
    fn change(&self, cx: &Caller, ino: Ino, change: impl FnOnce(&mut Inode) -> Result<()>) -> Result<()> {
        let mut state = self.state();
        let inode = state.inode_mut(ino)?;
        change(inode)?;
        inode.changed();
        drop(state);
        self.publish(cx, Change::Attr { ino });
        Ok(())
    }

    /// Creates an inode with a name.
    fn add(&self, cx: &Caller, dir: Ino, name: Name, new: &CreateArgs, body: Body) -> Result<Entry> {
        let mut state = self.state();
        state.check_free(dir, name)?;
        let ino = state.make(cx, dir, new, body)?;
        if state.inode(ino)?.is_dir() {
            // For its `..`; `place` subtracts one from the previous directory, which is this one, too.
            state.inode_mut(dir)?.attr.nlink += 1;
        }
        state.place(dir, name, ino)?;
        let entry = state.entry(ino);
        drop(state);
        self.name_changed(cx, dir, name);
        entry
    }

    fn remove(&self, cx: &Caller, dir: Ino, name: Name, as_dir: bool) -> Result<()> {
        let mut state = self.state();
        let ino = state.child(dir, name)?;
        state.inode(ino)?.check_removable(as_dir)?;
        state.names_mut(dir)?.remove(name);
        state.unlinked(dir, ino)?;
        drop(state);
        self.publish(cx, Change::Removed { dir, name: name.to_buf(), ino });
        Ok(())
    }
}

impl FileSystem for Toy {
    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }

    fn lookup(&self, _: &Caller, dir: Ino, name: Name) -> Result<Entry> {
        let mut state = self.state();
        let ino = state.child(dir, name)?;
        state.entry(ino)
    }

    fn forget(&self, ino: Ino, count: u64) {
        let mut state = self.state();
        if let Some(held) = state.references.get_mut(&ino) {
            *held = held.saturating_sub(count);
            if *held == 0 {
                state.references.remove(&ino);
                state.drop_unused(ino);
            }
        }
    }

    fn getattr(&self, _: &Caller, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(self.state().inode(ino)?.attr)
    }

    fn setattr(&self, cx: &Caller, ino: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        let mut state = self.state();
        if let Some(len) = set.size {
            state.resize(ino, len)?;
        }
        let inode = state.inode_mut(ino)?;
        set.apply(cx, &mut inode.attr);
        let attr = inode.attr;
        drop(state);
        let change = match set.size {
            Some(offset) => Change::Data { ino, offset, len: u64::MAX },
            None => Change::Attr { ino },
        };
        self.publish(cx, change);
        Ok(attr)
    }

    fn readlink(&self, _: &Caller, ino: Ino) -> Result<Vec<u8>> {
        match &self.state().inode(ino)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL),
        }
    }

    fn mknod(&self, cx: &Caller, dir: Ino, name: Name, new: &CreateArgs) -> Result<Entry> {
        let body = match FileType::from_raw_mode(new.mode) {
            FileType::RegularFile => Body::File(Vec::new()),
            _ => Body::Special,
        };
        self.add(cx, dir, name, new, body)
    }

    fn mkdir(&self, cx: &Caller, dir: Ino, name: Name, new: &CreateArgs) -> Result<Entry> {
        self.add(cx, dir, name, new, Body::Directory { parent: dir, names: Names::default() })
    }

    fn symlink(&self, cx: &Caller, dir: Ino, name: Name, target: &[u8]) -> Result<Entry> {
        let new = CreateArgs { mode: FileType::Symlink.as_raw_mode() | 0o777, ..CreateArgs::default() };
        self.add(cx, dir, name, &new, Body::Symlink(target.to_vec()))
    }

    fn link(&self, cx: &Caller, ino: Ino, dir: Ino, name: Name) -> Result<Entry> {
        let mut state = self.state();
        state.check_free(dir, name)?;
        let inode = state.inode_mut(ino)?;
        if inode.is_dir() {
            return Err(Errno::PERM);
        }
        inode.attr.nlink += 1;
        state.place(dir, name, ino)?;
        let entry = state.entry(ino);
        drop(state);
        self.name_changed(cx, dir, name);
        self.publish(cx, Change::Attr { ino });
        entry
    }

    fn unlink(&self, cx: &Caller, dir: Ino, name: Name) -> Result<()> {
        self.remove(cx, dir, name, false)
    }

    fn rmdir(&self, cx: &Caller, dir: Ino, name: Name) -> Result<()> {
        self.remove(cx, dir, name, true)
    }

    fn rename(&self, cx: &Caller, from: (Ino, Name), to: (Ino, Name), flags: RenameFlags) -> Result<()> {
        let mut state = self.state();
        let ino = state.child(from.0, from.1)?;
        let replaced = state.names(to.0)?.get(to.1).copied();
        match replaced {
            // A directory must not be moved into itself.
            _ if !RenameFlags::NOREPLACE.contains(flags) || state.is_within(to.0, ino)? => return Err(Errno::INVAL),
            _ if state.inode(to.0)?.attr.nlink == 0 => return Err(Errno::NOENT),
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => return Err(Errno::EXIST),
            Some(other) if other == ino => return Ok(()),
            Some(other) => state.inode(other)?.check_removable(state.inode(ino)?.is_dir())?,
            None => {}
        }
        state.names_mut(from.0)?.remove(from.1);
        state.place(to.0, to.1, ino)?;
        if let Some(other) = replaced {
            state.unlinked(to.0, other)?;
        }
        drop(state);
        self.name_changed(cx, from.0, from.1);
        self.name_changed(cx, to.0, to.1);
        Ok(())
    }

    fn open(&self, cx: &Caller, ino: Ino, flags: OFlags) -> Result<Handle> {
        if flags.contains(OFlags::TRUNC) {
            self.setattr(cx, ino, None, &SetAttr { size: Some(0), ..SetAttr::default() })?;
        }
        // Open files have no state, so the inode number is the handle.
        Ok(Handle(ino.0))
    }

    fn create(&self, cx: &Caller, dir: Ino, name: Name, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)> {
        let entry = self.add(cx, dir, name, new, Body::File(Vec::new()))?;
        Ok((entry, self.open(cx, entry.ino, flags)?))
    }

    fn tmpfile(&self, cx: &Caller, dir: Ino, new: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        let mut state = self.state();
        let ino = state.make(cx, dir, new, Body::File(Vec::new()))?;
        state.inode_mut(ino)?.attr.nlink = 0;
        Ok((state.entry(ino)?, Handle(ino.0)))
    }

    fn read(&self, _: &Caller, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        Ok(at.read_from(self.state().bytes(at.ino)?, out))
    }

    fn write(&self, cx: &Caller, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let mut state = self.state();
        let len = state.bytes(at.ino)?.len() as u64;
        state.resize(at.ino, at.end()?.max(len))?;
        let inode = state.inode_mut(at.ino)?;
        if at.clear_privileges {
            inode.attr.clear_privileges(cx);
        }
        inode.modified();
        match &mut inode.body {
            // The export notifies other clients of this change.
            Body::File(bytes) => at.write_to(bytes, input, BYTES_MAX),
            _ => Err(Errno::INVAL),
        }
    }

    fn opendir(&self, _: &Caller, ino: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(ino.0))
    }

    fn readdir(&self, _: &Caller, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let State { inodes, references, .. } = &mut *self.state();
        let Some(Inode { body: Body::Directory { parent, names }, .. }) = inodes.get(&at.ino) else {
            return Err(Errno::NOTDIR);
        };
        let listed = names.entries_from(at).filter_map(|(position, name, ino)| {
            let inode = inodes.get(ino)?;
            Some((position, name, Entry::new(*ino, inode.attr)))
        });
        at.list(out, *parent, listed, |ino| *references.entry(ino).or_insert(0) += 1);
        Ok(())
    }

    fn statfs(&self, _: &Caller, _: Ino) -> Result<Statfs> {
        let state = self.state();
        let blocks = |bytes: u64| bytes / u64::from(BLOCK_BYTES);
        let (free, files) = (blocks(BYTES_MAX - state.used), state.inodes.len() as u64);
        Ok(Statfs {
            blocks: blocks(BYTES_MAX),
            bfree: free,
            bavail: free,
            files: files + free,
            ffree: free,
            bsize: BLOCK_BYTES,
            frsize: BLOCK_BYTES,
            namelen: 255,
        })
    }

    fn getxattr(&self, _: &Caller, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        self.state().inode(ino)?.xattrs.get(name).cloned().ok_or(Errno::NODATA)
    }

    fn listxattr(&self, _: &Caller, ino: Ino) -> Result<Vec<u8>> {
        let state = self.state();
        let names = state.inode(ino)?.xattrs.keys();
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    fn setxattr(&self, cx: &Caller, ino: Ino, name: &[u8], value: &[u8], how: XattrFlags, _: bool) -> Result<()> {
        if name.starts_with(b"system.") || name.starts_with(b"security.") {
            return Err(Errno::OPNOTSUPP);
        }
        self.change(cx, ino, |inode| {
            match inode.xattrs.contains_key(name) {
                true if how.contains(XattrFlags::CREATE) => return Err(Errno::EXIST),
                false if how.contains(XattrFlags::REPLACE) => return Err(Errno::NODATA),
                _ => inode.xattrs.insert(name.to_vec(), value.to_vec()),
            };
            Ok(())
        })
    }

    fn removexattr(&self, cx: &Caller, ino: Ino, name: &[u8]) -> Result<()> {
        self.change(cx, ino, |inode| inode.xattrs.remove(name).map(drop).ok_or(Errno::NODATA))
    }

    fn ioctl(&self, _: &Caller, _: Ino, _: Handle, command: u32, _: &[u8], _: usize) -> Result<Vec<u8>> {
        match command {
            TOYFS_IOC_USED => Ok(self.state().used.to_ne_bytes().to_vec()),
            _ => Err(Errno::NOTTY),
        }
    }

    fn fallocate(&self, cx: &Caller, ino: Ino, _: Handle, offset: u64, len: u64, how: FallocateFlags) -> Result<()> {
        let zero = FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !(zero | FallocateFlags::KEEP_SIZE).contains(how) {
            return Err(Errno::OPNOTSUPP);
        }
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        let mut state = self.state();
        let size = state.bytes(ino)?.len() as u64;
        if !how.contains(FallocateFlags::KEEP_SIZE) && end > size {
            state.resize(ino, end)?;
        }
        let inode = state.inode_mut(ino)?;
        inode.modified();
        if let Body::File(bytes) = &mut inode.body
            && how.intersects(zero)
        {
            let within = |at: u64| usize::try_from(at).map_or(bytes.len(), |at| at.min(bytes.len()));
            let range = within(offset)..within(end);
            bytes[range].fill(0);
        }
        drop(state);
        self.publish(cx, Change::Data { ino, offset, len });
        Ok(())
    }
}

fn main() -> ExitCode {
    ferry_fs::run(Toy::new())
}
