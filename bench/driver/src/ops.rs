//! Typed requests, one method each, so that tests read like system calls.
//!
//! All of them use the caller ([`Driver::set_caller`]) and the selected queue ([`Driver::select`]), and wait for the reply.
//! Exceptions: [`Driver::forget`] and [`Driver::batch_forget`] use queue 0, and [`Driver::send_setlkw`] does not wait.
//! Errors are [`Error::Errno`] for an error reply, else as [`Driver::ask`].

#![allow(clippy::missing_errors_doc, reason = "the same for all; see the module's page")]

use ferry_vfs::{Entry, FileType};
use ferry_wire::fuse::Negotiated;
use ferry_wire::fuse::abi::{
    self, AccessIn, AttrOut, BatchForgetIn, CopyFileRangeIn, CreateIn, EntryOut, FallocateIn, FileLock, FlushIn,
    ForgetIn, ForgetOne, FsyncIn, GetattrIn, GetxattrIn, InitFlags, InitIn, InitOut, Kstatfs, LinkIn, LkIn, LkOut,
    LseekIn, LseekOut, MkdirIn, MknodIn, Opcode, OpenIn, OpenOut, ReadIn, ReleaseIn, Rename2In, SetattrIn, SetxattrIn,
    StatxIn, StatxOut, SyncfsIn, WriteIn, WriteOut,
};
use zerocopy::IntoBytes;

use crate::fuse::{DirEntries, DirEntry};
use crate::session::parse;
use crate::{Driver, Error, Result, Ticket};

/// The flags that [`Driver::init`] offers: a part of those that Linux 7.2 offers over virtio-fs. [`Driver::init_with`] takes
/// any others.
pub const INIT_FLAGS: InitFlags = InitFlags::ASYNC_READ
    .union(InitFlags::POSIX_LOCKS)
    .union(InitFlags::ATOMIC_O_TRUNC)
    .union(InitFlags::BIG_WRITES)
    .union(InitFlags::DONT_MASK)
    .union(InitFlags::FLOCK_LOCKS)
    .union(InitFlags::HAS_IOCTL_DIR)
    .union(InitFlags::DO_READDIRPLUS)
    .union(InitFlags::ASYNC_DIO)
    .union(InitFlags::PARALLEL_DIROPS)
    .union(InitFlags::MAX_PAGES)
    .union(InitFlags::HANDLE_KILLPRIV_V2)
    .union(InitFlags::SETXATTR_EXT)
    .union(InitFlags::INIT_EXT);

/// The largest request that Linux makes over virtio-fs: 256 pages.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;

const NO_ARGS: [u8; 0] = [];
const NUL: &[u8] = b"\0";

/// An entry of a directory listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListEntry {
    /// The name.
    pub name: Vec<u8>,
    /// The inode number shown to users.
    pub ino: u64,
    /// The offset to go on from.
    pub next: u64,
    /// The file type.
    pub kind: FileType,
    /// Of READDIRPLUS: the inode, with one reference.
    pub entry: Option<Entry>,
}

impl Driver {
    /// INIT with [`INIT_FLAGS`].
    pub fn init(&mut self) -> Result<InitOut> {
        self.init_with(INIT_FLAGS, abi::MINOR_MAX)
    }

    /// INIT with any flags and minor version.
    pub fn init_with(&mut self, flags: InitFlags, minor: u32) -> Result<InitOut> {
        let bits = flags.bits();
        let low = u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
        let high = u32::try_from(bits >> 32).unwrap_or(0);
        let max_readahead = TRANSFER_BYTES_MAX;
        let args = InitIn { major: abi::MAJOR, minor, max_readahead, flags: low, flags2: high, ..InitIn::ZERO };
        let reply: InitOut = self.ask_for(Opcode::Init, 0, &args, &[])?;
        let answered = u64::from(reply.flags2) << 32 | u64::from(reply.flags);
        self.negotiated = Negotiated {
            minor: minor.min(reply.minor),
            flags: flags & InitFlags::from_bits_retain(answered),
            max_write_bytes: reply.max_write,
            max_readahead_bytes: reply.max_readahead.min(max_readahead),
        };
        Ok(reply)
    }

    /// DESTROY.
    pub fn destroy(&mut self) -> Result<()> {
        self.tell(Opcode::Destroy, 0, &NO_ARGS, &[])
    }

    /// LOOKUP.
    pub fn lookup(&mut self, parent: u64, name: impl AsRef<[u8]>) -> Result<EntryOut> {
        self.ask_for(Opcode::Lookup, parent, &NO_ARGS, &[name.as_ref(), NUL])
    }

    /// FORGET, on the high-priority queue as Linux sends it.
    pub fn forget(&mut self, node: u64, nlookup: u64) -> Result<()> {
        self.on_hiprio(Opcode::Forget, node, &[ForgetIn { nlookup }.as_bytes()])
    }

    /// BATCH_FORGET, on the high-priority queue.
    pub fn batch_forget(&mut self, nodes: &[ForgetOne]) -> Result<()> {
        let count = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let head = BatchForgetIn { count, dummy: 0 };
        self.on_hiprio(Opcode::BatchForget, 0, &[head.as_bytes(), nodes.as_bytes()])
    }

    fn on_hiprio(&mut self, opcode: Opcode, node: u64, args: &[&[u8]]) -> Result<()> {
        let (before, timeout) = (self.selected, self.config().timeout);
        self.select(0);
        let sent = self.send(opcode, node, args, &[], 0);
        let done = sent.and_then(|ticket| self.queue(0).wait_for(ticket, timeout));
        self.select(before);
        done.map(drop)
    }

    /// GETATTR without a handle.
    pub fn getattr(&mut self, node: u64) -> Result<AttrOut> {
        self.ask_for(Opcode::Getattr, node, &GetattrIn::ZERO, &[])
    }

    /// STATX.
    pub fn statx(&mut self, node: u64, mask: u32) -> Result<StatxOut> {
        self.ask_for(Opcode::Statx, node, &StatxIn { sx_mask: mask, ..StatxIn::ZERO }, &[])
    }

    /// SETATTR.
    pub fn setattr(&mut self, node: u64, args: &SetattrIn) -> Result<AttrOut> {
        self.ask_for(Opcode::Setattr, node, args, &[])
    }

    /// SETATTR of the size.
    pub fn truncate(&mut self, node: u64, size: u64) -> Result<AttrOut> {
        self.setattr(node, &SetattrIn { valid: abi::FATTR_SIZE, size, ..SetattrIn::ZERO })
    }

    /// ACCESS.
    pub fn access(&mut self, node: u64, mask: u32) -> Result<()> {
        self.tell(Opcode::Access, node, &AccessIn { mask, padding: 0 }, &[])
    }

    /// READLINK.
    pub fn readlink(&mut self, node: u64) -> Result<Vec<u8>> {
        self.ask(Opcode::Readlink, node, &[], &[], 4096)
    }

    /// SYMLINK.
    pub fn symlink(&mut self, parent: u64, name: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Result<EntryOut> {
        self.ask_for(Opcode::Symlink, parent, &NO_ARGS, &[name.as_ref(), NUL, target.as_ref(), NUL])
    }

    /// MKNOD.
    pub fn mknod(&mut self, parent: u64, name: impl AsRef<[u8]>, mode: u32, rdev: u32) -> Result<EntryOut> {
        let args = MknodIn { mode, rdev, ..MknodIn::ZERO };
        self.ask_for(Opcode::Mknod, parent, &args, &[name.as_ref(), NUL])
    }

    /// MKDIR.
    pub fn mkdir(&mut self, parent: u64, name: impl AsRef<[u8]>, mode: u32) -> Result<EntryOut> {
        self.ask_for(Opcode::Mkdir, parent, &MkdirIn { mode, umask: 0 }, &[name.as_ref(), NUL])
    }

    /// UNLINK.
    pub fn unlink(&mut self, parent: u64, name: impl AsRef<[u8]>) -> Result<()> {
        self.tell(Opcode::Unlink, parent, &NO_ARGS, &[name.as_ref(), NUL])
    }

    /// RMDIR.
    pub fn rmdir(&mut self, parent: u64, name: impl AsRef<[u8]>) -> Result<()> {
        self.tell(Opcode::Rmdir, parent, &NO_ARGS, &[name.as_ref(), NUL])
    }

    /// RENAME2.
    pub fn rename(
        &mut self,
        parent: u64,
        name: impl AsRef<[u8]>,
        newdir: u64,
        new_name: impl AsRef<[u8]>,
        flags: u32,
    ) -> Result<()> {
        let args = Rename2In { newdir, flags, padding: 0 };
        self.tell(Opcode::Rename2, parent, &args, &[name.as_ref(), NUL, new_name.as_ref(), NUL])
    }

    /// LINK.
    pub fn link(&mut self, node: u64, parent: u64, name: impl AsRef<[u8]>) -> Result<EntryOut> {
        self.ask_for(Opcode::Link, parent, &LinkIn { oldnodeid: node }, &[name.as_ref(), NUL])
    }

    /// OPEN.
    pub fn open(&mut self, node: u64, flags: u32) -> Result<OpenOut> {
        self.ask_for(Opcode::Open, node, &OpenIn { flags, open_flags: 0 }, &[])
    }

    /// CREATE.
    pub fn create(
        &mut self,
        parent: u64,
        name: impl AsRef<[u8]>,
        flags: u32,
        mode: u32,
    ) -> Result<(EntryOut, OpenOut)> {
        let args = CreateIn { flags, mode, ..CreateIn::ZERO };
        self.entry_and_open(Opcode::Create, parent, &args, &[name.as_ref(), NUL])
    }

    /// TMPFILE.
    pub fn tmpfile(&mut self, parent: u64, flags: u32, mode: u32) -> Result<(EntryOut, OpenOut)> {
        self.entry_and_open(Opcode::Tmpfile, parent, &CreateIn { flags, mode, ..CreateIn::ZERO }, &[NUL])
    }

    fn entry_and_open(
        &mut self,
        opcode: Opcode,
        parent: u64,
        args: &CreateIn,
        name: &[&[u8]],
    ) -> Result<(EntryOut, OpenOut)> {
        let pieces: Vec<&[u8]> = [args.as_bytes()].into_iter().chain(name.iter().copied()).collect();
        let body = self.ask(opcode, parent, &pieces, &[], size_of::<EntryOut>() + size_of::<OpenOut>())?;
        let (entry, rest) = parse(&body)?;
        Ok((entry, parse(rest)?.0))
    }

    /// READ.
    pub fn read(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Result<Vec<u8>> {
        let args = ReadIn { fh, offset, size, ..ReadIn::ZERO };
        let room = usize::try_from(size).unwrap_or(usize::MAX);
        self.ask(Opcode::Read, node, &[args.as_bytes()], &[], room)
    }

    /// WRITE; returns how much was written.
    pub fn write(&mut self, node: u64, fh: u64, offset: u64, data: &[u8]) -> Result<u32> {
        let size = u32::try_from(data.len()).map_err(|_| Error::Memory(data.len()))?;
        let args = WriteIn { fh, offset, size, ..WriteIn::ZERO };
        let body = self.ask(Opcode::Write, node, &[args.as_bytes()], data, size_of::<WriteOut>())?;
        parse::<WriteOut>(&body).map(|(reply, _)| reply.size)
    }

    /// FLUSH.
    pub fn flush(&mut self, node: u64, fh: u64, lock_owner: u64) -> Result<()> {
        self.tell(Opcode::Flush, node, &FlushIn { fh, lock_owner, ..FlushIn::ZERO }, &[])
    }

    /// FSYNC.
    pub fn fsync(&mut self, node: u64, fh: u64) -> Result<()> {
        self.tell(Opcode::Fsync, node, &FsyncIn { fh, ..FsyncIn::ZERO }, &[])
    }

    /// RELEASE.
    pub fn release(&mut self, node: u64, fh: u64) -> Result<()> {
        self.tell(Opcode::Release, node, &ReleaseIn { fh, ..ReleaseIn::ZERO }, &[])
    }

    /// OPENDIR.
    pub fn opendir(&mut self, node: u64) -> Result<OpenOut> {
        self.ask_for(Opcode::Opendir, node, &OpenIn::ZERO, &[])
    }

    /// RELEASEDIR.
    pub fn releasedir(&mut self, node: u64, fh: u64) -> Result<()> {
        self.tell(Opcode::Releasedir, node, &ReleaseIn { fh, ..ReleaseIn::ZERO }, &[])
    }

    /// READDIR: what fits into `size` bytes, from `offset` on; empty at the end.
    pub fn readdir(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Result<Vec<ListEntry>> {
        self.list(Opcode::Readdir, node, ReadIn { fh, offset, size, ..ReadIn::ZERO })
    }

    /// READDIRPLUS.
    pub fn readdirplus(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Result<Vec<ListEntry>> {
        self.list(Opcode::Readdirplus, node, ReadIn { fh, offset, size, ..ReadIn::ZERO })
    }

    fn list(&mut self, opcode: Opcode, node: u64, args: ReadIn) -> Result<Vec<ListEntry>> {
        let room = usize::try_from(args.size).unwrap_or(usize::MAX);
        let body = self.ask(opcode, node, &[args.as_bytes()], &[], room)?;
        let own = |found: DirEntry<'_>| ListEntry {
            name: found.item.name.to_vec(),
            ino: found.item.ino,
            next: found.item.next,
            kind: found.item.kind,
            entry: found.entry.map(|(entry, ..)| entry),
        };
        let entries = DirEntries::new(&body, opcode == Opcode::Readdirplus);
        entries.map(|found| found.map(own).map_err(|flaw| Error::BadReply(flaw.to_string()))).collect()
    }

    /// SETXATTR.
    pub fn setxattr(&mut self, node: u64, name: impl AsRef<[u8]>, value: &[u8], flags: u32) -> Result<()> {
        let size = u32::try_from(value.len()).map_err(|_| Error::Memory(value.len()))?;
        let args = SetxattrIn { size, flags, ..SetxattrIn::ZERO };
        self.tell(Opcode::Setxattr, node, &args, &[name.as_ref(), NUL, value])
    }

    /// GETXATTR of a value up to 64 KiB.
    pub fn getxattr(&mut self, node: u64, name: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        let args = GetxattrIn { size: 1 << 16, padding: 0 };
        self.ask(Opcode::Getxattr, node, &[args.as_bytes(), name.as_ref(), NUL], &[], 1 << 16)
    }

    /// LISTXATTR: names, each with its NUL.
    pub fn listxattr(&mut self, node: u64) -> Result<Vec<u8>> {
        let args = GetxattrIn { size: 1 << 16, padding: 0 };
        self.ask(Opcode::Listxattr, node, &[args.as_bytes()], &[], 1 << 16)
    }

    /// REMOVEXATTR.
    pub fn removexattr(&mut self, node: u64, name: impl AsRef<[u8]>) -> Result<()> {
        self.tell(Opcode::Removexattr, node, &NO_ARGS, &[name.as_ref(), NUL])
    }

    /// STATFS.
    pub fn statfs(&mut self, node: u64) -> Result<Kstatfs> {
        self.ask_for(Opcode::Statfs, node, &NO_ARGS, &[])
    }

    /// SYNCFS.
    pub fn syncfs(&mut self) -> Result<()> {
        self.tell(Opcode::Syncfs, crate::ROOT, &SyncfsIn::ZERO, &[])
    }

    /// FALLOCATE.
    pub fn fallocate(&mut self, node: u64, fh: u64, mode: u32, offset: u64, length: u64) -> Result<()> {
        self.tell(Opcode::Fallocate, node, &FallocateIn { fh, offset, length, mode, padding: 0 }, &[])
    }

    /// LSEEK for data or a hole.
    pub fn lseek(&mut self, node: u64, fh: u64, offset: u64, whence: u32) -> Result<u64> {
        let reply: LseekOut = self.ask_for(Opcode::Lseek, node, &LseekIn { fh, offset, whence, padding: 0 }, &[])?;
        Ok(reply.offset)
    }

    /// COPY_FILE_RANGE.
    pub fn copy_file_range(&mut self, node: u64, args: &CopyFileRangeIn) -> Result<u32> {
        let reply: WriteOut = self.ask_for(Opcode::CopyFileRange, node, args, &[])?;
        Ok(reply.size)
    }

    /// GETLK of a POSIX lock.
    pub fn getlk(&mut self, node: u64, fh: u64, owner: u64, lk: FileLock) -> Result<FileLock> {
        let reply: LkOut = self.ask_for(Opcode::Getlk, node, &LkIn { fh, owner, lk, ..LkIn::ZERO }, &[])?;
        Ok(reply.lk)
    }

    /// SETLK; `lk_flags` is 0 for a POSIX lock, [`abi::LK_FLOCK`] for a flock lock.
    pub fn setlk(&mut self, node: u64, fh: u64, owner: u64, lk: FileLock, lk_flags: u32) -> Result<()> {
        self.tell(Opcode::Setlk, node, &LkIn { fh, owner, lk, lk_flags, padding: 0 }, &[])
    }

    /// SETLKW, which may wait long: send it here, take the answer with [`Driver::receive`].
    pub fn send_setlkw(&mut self, node: u64, fh: u64, owner: u64, lk: FileLock, lk_flags: u32) -> Result<Ticket> {
        let args = LkIn { fh, owner, lk, lk_flags, padding: 0 };
        self.send(Opcode::Setlkw, node, &[args.as_bytes()], &[], 0)
    }
}
