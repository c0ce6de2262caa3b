//! Random values, and every kind of request and reply built from them.

use ferry_driver::fuse::{ReplyKind, append_security_context};
use ferry_vfs::*;
use ferry_wire::fuse::abi::{self, ForgetOne, InitFlags, InitOut, OpenFlags, RemovemappingOne};
use ferry_wire::fuse::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// The maximum size in requests; `malformed` tests larger ones.
const READ_MAX: u32 = super::FULL.max_read_bytes();
const XATTR_MAX: u32 = 65536;

#[derive(Clone, Debug)]
pub(super) struct Seed {
    pub(super) names: [Vec<u8>; 2],
    pub(super) bytes: Vec<u8>,
    pub(super) target: Vec<u8>,
    pub(super) words: [u64; 8],
    pub(super) forgets: Vec<ForgetOne>,
    pub(super) ranges: Vec<RemovemappingOne>,
    pub(super) groups: Vec<u32>,
    pub(super) contexts: (Vec<u8>, u32),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_map(|byte| if matches!(byte, 0 | b'/') { b'x' } else { byte });
    let long_or_short = prop_oneof![vec(byte.clone(), 1..12), vec(byte, 1..=255)];
    long_or_short.prop_map(|name| if matches!(&name[..], b"." | b"..") { b"...".to_vec() } else { name })
}

pub(super) fn seed() -> impl Strategy<Value = Seed> {
    let word = prop_oneof![any::<u64>(), 0..5_u64, Just(u64::MAX)];
    let words = proptest::array::uniform8(word);
    let forgets = vec(any::<[u64; 2]>().prop_map(|[nodeid, nlookup]| ForgetOne { nodeid, nlookup }), 0..5);
    let ranges = vec(any::<[u64; 2]>().prop_map(|[moffset, len]| RemovemappingOne { moffset, len }), 0..5);
    let contexts = vec((name(), vec(any::<u8>(), 0..20)), 0..3).prop_map(|contexts| {
        let mut bytes = Vec::new();
        contexts.iter().for_each(|(name, value)| append_security_context(&mut bytes, name, value));
        (bytes, u32::try_from(contexts.len()).unwrap())
    });
    let groups = vec(any::<u32>(), 0..4);
    (([name(), name()]), vec(any::<u8>(), 0..300), words, forgets, ranges, groups, contexts).prop_map(
        |(names, bytes, words, forgets, ranges, groups, contexts)| {
            let target = bytes.iter().map(|byte| (*byte).max(1)).chain([b'.']).collect();
            Seed { names, bytes, target, words, forgets, ranges, groups, contexts }
        },
    )
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "random material")]
impl Seed {
    fn u32(&self, index: usize) -> u32 {
        self.words[index] as u32
    }

    fn bit(&self, index: usize) -> bool {
        self.words[7] & (1 << index) != 0
    }

    fn positive(&self, index: usize) -> u64 {
        self.words[index] >> 2
    }

    fn name(&self, index: usize) -> Name<'_> {
        Name::new(&self.names[index]).unwrap()
    }

    fn handle(&self) -> Handle {
        Handle(self.words[0])
    }

    fn time(&self, index: usize) -> Timespec {
        Timespec { sec: self.words[index] as i64, nsec: self.u32(index) % 1_000_000_000 }
    }

    fn new_inode(&self, kind: FileType, rdev: u32) -> CreateArgs {
        CreateArgs { mode: kind.as_raw_mode() | self.u32(1) & 0o7777, umask: self.u32(2) & 0o777, rdev }
    }

    pub(super) fn extensions(&self) -> Extensions<'_> {
        let security = SecurityContexts::parse(&self.contexts.0, self.contexts.1).unwrap();
        Extensions { groups: Groups::new(&self.groups), security }
    }

    pub(super) fn request<'a>(&'a self, operation: Operation<'a>, extensions: Extensions<'a>) -> Request<'a> {
        let [unique, ino, ..] = self.words;
        let (uid, gid, pid) = (self.u32(2), self.u32(3), self.u32(4));
        Request { unique, ino: Ino(ino), uid, gid, pid, extensions, operation }
    }

    fn set_attr(&self) -> SetAttr {
        let set_time = |index, now, at| match (self.bit(now), self.bit(at)) {
            (true, _) => Some(SetTime::Now),
            (_, true) => Some(SetTime::At(self.time(index))),
            _ => None,
        };
        SetAttr {
            mode: self.bit(0).then_some(self.u32(2) & 0o7777),
            uid: self.bit(1).then_some(self.u32(3) >> 1),
            gid: self.bit(2).then_some(self.u32(4) >> 1),
            size: self.bit(3).then_some(self.positive(5)),
            atime: set_time(5, 4, 5),
            mtime: set_time(6, 6, 7),
            ctime: self.bit(8).then_some(self.time(4)),
            clear_privileges: self.bit(9),
        }
    }

    fn range(&self, len: u32) -> IoRange {
        IoRange {
            ino: Ino(self.words[1]),
            handle: self.handle(),
            offset: self.positive(2),
            len,
            flags: OFlags::from_bits_retain(self.u32(4)),
            clear_privileges: false,
            owner: self.bit(0).then_some(self.words[5]),
        }
    }

    fn lock(&self) -> LockRequest {
        let kind = [LockKind::Read, LockKind::Write, LockKind::Unlock][self.u32(1) as usize % 3];
        let (a, b) = (self.positive(2), self.positive(3));
        let (handle, owner, pid, flock) = (self.handle(), self.words[4], self.u32(5), self.bit(0));
        LockRequest { handle, owner, kind, start: a.min(b), end: a.max(b), pid, flock }
    }

    /// Returns one operation of every kind, for a session with all features.
    pub(super) fn operations(&self) -> Vec<Operation<'_>> {
        let (handle, words) = (self.handle(), &self.words);
        let (name, new_name) = (self.name(0), self.name(1));
        let some_handle = self.bit(0).then_some(handle);
        let node = [FileType::RegularFile, FileType::CharacterDevice, FileType::Fifo, FileType::Socket];
        let node = self.new_inode(node[self.u32(1) as usize % 4], self.u32(3));
        let file = self.new_inode(FileType::RegularFile, 0);
        let opened = OFlags::RDWR | OFlags::from_bits_retain(self.u32(3) & 0o2000);
        let flags = OFlags::from_bits_retain(self.u32(3));
        let clear_privileges = self.bit(1);
        let rename = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE, RenameFlags::WHITEOUT];
        let rename = rename[self.u32(2) as usize % 4];
        let release = Release { handle, flags, flush: self.bit(2), unlock_flock: self.bit(3), owner: words[4] };
        let copy = CopyRange {
            from: (Ino(words[1]), handle, self.positive(2)),
            to: (Ino(words[3]), Handle(words[4]), self.positive(5)),
            len: words[6],
        };
        let test = LockRequest { kind: LockKind::Write, ..self.lock() };
        let init = InitRequest {
            major: 7,
            minor: 36 + self.u32(0) % 10,
            max_readahead_bytes: self.u32(1),
            flags: InitFlags::from_bits_retain(words[2]) | InitFlags::INIT_EXT,
        };
        let old = InitRequest { minor: 30, flags: InitFlags::from_bits_retain(words[2] & 0x3fff_ffff), ..init };
        let strange = InitRequest { major: 8, max_readahead_bytes: 0, flags: InitFlags::empty(), ..init };
        let directory = |plus| DirRange { ino: Ino(words[1]), handle, offset: words[2], plus };
        let data_only = self.bit(4);
        let len = u32::try_from(self.bytes.len()).unwrap();
        vec![
            Operation::Lookup { name },
            Operation::LookupSelf,
            Operation::LookupParent,
            Operation::Forget { count: words[0] },
            Operation::BatchForget { forgets: Records::new(&self.forgets) },
            Operation::Getattr { handle: some_handle },
            Operation::Statx { handle: some_handle, flags: self.u32(1), mask: self.u32(2) },
            Operation::Setattr { handle: some_handle, owner: self.bit(10).then_some(words[1]), set: self.set_attr() },
            Operation::Readlink,
            Operation::Symlink { name, target: &self.target },
            Operation::Mknod { name, new: node },
            Operation::Mkdir { name, new: self.new_inode(FileType::Directory, 0) },
            Operation::Unlink { name },
            Operation::Rmdir { name },
            Operation::Rename { name, new_dir: Ino(words[0]), new_name, flags: rename },
            Operation::Link { from: Ino(words[0]), name },
            Operation::Open { flags: opened, clear_privileges },
            Operation::Opendir { flags: opened },
            Operation::Create { name, new: file, flags, clear_privileges },
            Operation::Tmpfile { new: file, flags },
            Operation::Read(self.range(self.u32(3) % (READ_MAX + 1))),
            Operation::Write { range: IoRange { clear_privileges, ..self.range(len) }, cached: self.bit(2) },
            Operation::CopyFileRange(copy),
            Operation::CopyFileRange64(copy),
            Operation::Fallocate {
                handle,
                offset: self.positive(1),
                len: self.positive(2) + 1,
                flags: FallocateFlags::from_bits_retain(self.u32(3) & 0xfb),
            },
            Operation::Lseek { handle, offset: words[1], seek: if self.bit(0) { Seek::Data } else { Seek::Hole } },
            Operation::Flush { handle, owner: words[1] },
            Operation::Release(release),
            Operation::Fsync { handle, data_only },
            Operation::Readdir { at: directory(false), bytes_max: self.u32(3) % (READ_MAX + 1) },
            Operation::Readdir { at: directory(true), bytes_max: self.u32(3) % (READ_MAX + 1) },
            Operation::Releasedir(release),
            Operation::Fsyncdir { handle, data_only },
            Operation::Syncfs,
            Operation::Statfs,
            Operation::Setxattr {
                name: &self.names[0],
                value: &self.bytes,
                flags: XattrFlags::from_bits_retain(self.u32(1) & 3),
                clear_sgid: self.bit(0),
            },
            Operation::Getxattr { name: &self.names[0], bytes_max: self.u32(1) % (XATTR_MAX + 1) },
            Operation::Listxattr { bytes_max: self.u32(1) % (XATTR_MAX + 1) },
            Operation::Removexattr { name: &self.names[0] },
            Operation::Access { mask: self.u32(1) & 7 },
            Operation::GetLock(test),
            Operation::SetLock { lock: self.lock(), wait: false },
            Operation::SetLock { lock: self.lock(), wait: true },
            Operation::Bmap { block: words[0], block_bytes: self.u32(1) },
            Operation::Ioctl {
                handle,
                flags: self.u32(1) & (abi::IOCTL_COMPAT | abi::IOCTL_32BIT | abi::IOCTL_DIR),
                command: self.u32(2),
                argument: words[3],
                input: &self.bytes,
                out_bytes_max: self.u32(4) % (READ_MAX + 1),
            },
            Operation::Poll { handle, client_handle: words[1], flags: self.u32(2), events: self.u32(3) },
            Operation::Setupmapping {
                handle: self.bit(0).then_some(Handle(words[0] >> 1)),
                offset: self.positive(1),
                len: self.positive(2) + 1,
                window_offset: self.positive(3),
                read: self.bit(1),
                write: self.bit(2),
            },
            Operation::Removemapping { ranges: Records::new(&self.ranges) },
            Operation::Interrupt { unique: words[0] },
            Operation::Init(init),
            Operation::Init(old),
            Operation::Init(strange),
            Operation::Destroy,
        ]
    }

    pub(super) fn attr(&self) -> Attr {
        Attr {
            ino: self.words[0],
            size: self.words[1],
            blocks: self.words[2],
            atime: self.time(3),
            mtime: self.time(4),
            ctime: self.time(5),
            btime: None,
            mode: self.u32(6) & 0xffff,
            nlink: self.u32(1),
            uid: self.u32(2),
            gid: self.u32(3),
            rdev: self.u32(4),
            blksize: self.u32(5),
            submount: self.bit(0),
        }
    }

    pub(super) fn entry(&self) -> Entry {
        Entry { ino: Ino(self.words[6].max(1)), generation: self.words[5], attr: self.attr() }
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        let time = |index| std::time::Duration::new(self.words[index], self.u32(index + 1) % 1_000_000_000);
        Timeouts { entry: time(0), attr: time(2) }
    }

    /// Returns one reply of every kind, with the kind.
    pub(super) fn replies(&self) -> Vec<(ReplyKind, Reply<'_>)> {
        let (entry, timeouts, attr, dax) = (self.entry(), self.timeouts(), self.attr(), self.bit(1));
        let timeout = timeouts.attr;
        let flags = OpenFlags::from_bits_retain(self.u32(1));
        let opened = OpenReply { handle: self.handle(), flags, backing_id: self.u32(2).cast_signed() };
        let statx = Attr { btime: self.bit(2).then_some(self.time(1)), submount: false, ..attr };
        let statfs = Statfs {
            blocks: self.words[0],
            bfree: self.words[1],
            bavail: self.words[2],
            files: self.words[3],
            ffree: self.words[4],
            bsize: self.u32(5),
            namelen: self.u32(6),
            frsize: self.u32(7),
        };
        let LockRequest { start, end, pid, .. } = self.lock();
        let owner = LockOwner { session: SessionId::default(), id: 0 };
        let lock = Lock { kind: LockKind::Read, owner, start, end, pid, flock: false };
        let init = InitOut { major: 7, minor: self.u32(0), flags: self.u32(1), max_pages: 3, ..InitOut::ZERO };
        vec![
            (ReplyKind::Empty, Reply::Empty),
            (ReplyKind::Entry, Reply::Entry { entry, timeouts, dax }),
            (ReplyKind::Entry, Reply::Negative { timeout }),
            (ReplyKind::Created, Reply::Created { entry, timeouts, dax, opened }),
            (ReplyKind::Attr, Reply::Attr { attr, timeout, dax }),
            (ReplyKind::Statx, Reply::Statx { attr: statx, timeout }),
            (ReplyKind::Open, Reply::Open(opened)),
            (ReplyKind::Write, Reply::Write { bytes: self.u32(0) }),
            (ReplyKind::CopyFileRange64, Reply::CopyFileRange64 { bytes: self.words[0] }),
            (ReplyKind::Statfs, Reply::Statfs(statfs)),
            (ReplyKind::XattrSize, Reply::XattrSize { bytes: self.u32(0) }),
            (ReplyKind::Lock, Reply::Lock(self.bit(3).then_some(lock))),
            (ReplyKind::Lseek, Reply::Lseek { offset: self.words[0] }),
            (ReplyKind::Ioctl, Reply::Ioctl { result: self.u32(0).cast_signed(), data: &self.bytes }),
            (ReplyKind::Poll, Reply::Poll { events: self.u32(0) }),
            (ReplyKind::Bmap, Reply::Bmap { block: self.words[0] }),
            (ReplyKind::Init, Reply::Init(init)),
            (ReplyKind::Bytes, Reply::Bytes(&self.bytes)),
        ]
    }
}
