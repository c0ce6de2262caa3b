//! Random values, and every kind of request and reply built from them.

use ferry_vfs::{Attr, Errno, FileType, LockKind, Name, OFlags, SetAttr, SetTime, Statfs, Timespec, XattrFlags};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::ninep::*;

#[derive(Clone, Debug)]
pub(super) struct Seed {
    pub(super) names: Vec<Vec<u8>>,
    pub(super) text: Vec<u8>,
    pub(super) bytes: Vec<u8>,
    pub(super) words: [u64; 8],
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let byte = any::<u8>().prop_map(|byte| if matches!(byte, 0 | b'/') { b'x' } else { byte });
    let long_or_short = prop_oneof![9 => vec(byte.clone(), 1..12), 1 => vec(byte, 1..=255)];
    long_or_short.prop_map(|name| if matches!(&name[..], b"." | b"..") { b"...".to_vec() } else { name })
}

pub(super) fn seed() -> impl Strategy<Value = Seed> {
    let word = prop_oneof![any::<u64>(), 0..5_u64, Just(u64::MAX)];
    let text = vec(any::<u8>().prop_map(|byte| byte.max(1)), 1..=64);
    (vec(name(), 2..6), text, vec(any::<u8>(), 0..80), proptest::array::uniform8(word))
        .prop_map(|(names, text, bytes, words)| Seed { names, text, bytes, words })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "random material")]
impl Seed {
    fn u32(&self, index: usize) -> u32 {
        self.words[index] as u32
    }

    fn bit(&self, index: usize) -> bool {
        self.words[7] & (1 << index) != 0
    }

    /// A number below 2^62.
    fn positive(&self, index: usize) -> u64 {
        self.words[index] >> 2
    }

    fn fid(&self, index: usize) -> Fid {
        Fid(self.u32(index))
    }

    fn name(&self, index: usize) -> Name<'_> {
        Name::new(&self.names[index]).unwrap()
    }

    fn time(&self, index: usize) -> Timespec {
        Timespec { sec: self.words[index] as i64, nsec: self.u32(index + 1) % 1_000_000_000 }
    }

    fn qid(&self, index: usize) -> Qid {
        Qid { kind: QidKind(self.u32(index) as u8), version: self.u32(index + 1), path: self.words[index] }
    }

    fn flags(&self) -> OFlags {
        let all = [OFlags::TRUNC, OFlags::APPEND, OFlags::DSYNC, OFlags::DIRECT, OFlags::DIRECTORY, OFlags::NOFOLLOW];
        let mut flags: OFlags = all.iter().enumerate().filter(|(at, _)| self.bit(*at)).map(|(_, flag)| *flag).collect();
        flags |= if self.bit(6) { OFlags::SYNC } else { OFlags::NOATIME };
        flags | [OFlags::RDONLY, OFlags::WRONLY, OFlags::RDWR][self.positive(0) as usize % 3]
    }

    fn set(&self) -> SetAttr {
        let at = |bit: usize, index| {
            let time = if self.bit(bit) { SetTime::Now } else { SetTime::At(self.time(index)) };
            self.bit(bit + 1).then_some(time)
        };
        SetAttr {
            mode: self.bit(0).then_some(self.u32(0) & 0o7777),
            uid: self.bit(1).then_some(self.u32(1) >> 1),
            gid: self.bit(2).then_some(self.u32(2) >> 1),
            size: self.bit(3).then_some(self.positive(3)),
            atime: at(4, 4),
            mtime: at(6, 5),
            ..SetAttr::default()
        }
    }

    fn lock(&self, kind: LockKind) -> LockRequest<'_> {
        let (one, other) = (self.positive(1), self.positive(2));
        let end = if self.bit(0) { i64::MAX.cast_unsigned() } else { one.max(other) };
        LockRequest { kind, start: one.min(other), end, pid: self.u32(3), client: &self.text }
    }
}

pub(super) fn requests<'a>(seed: &'a Seed, buffer: &'a mut Vec<u8>) -> Vec<Request<'a>> {
    let walk = seed.names.iter().map(|name| Step::Child(Name::new(name).unwrap()));
    let steps = Steps::write(buffer, walk.chain([Step::Parent]));
    let (fid, other, gid) = (seed.fid(0), seed.fid(1), seed.u32(2));
    let (name, new_name, text) = (seed.name(0), seed.name(1), &seed.text[..]);
    let user = User { name: text, uid: (seed.u32(2) != NO_UID).then_some(seed.u32(2)) };
    let (offset, bytes_max) = (seed.positive(3), seed.u32(4));
    let xattr = if seed.bit(0) { XattrFlags::CREATE } else { XattrFlags::REPLACE };
    let node = [FileType::Fifo, FileType::BlockDevice, FileType::Socket][seed.names.len() % 3].as_raw_mode();
    vec![
        Request::Version { msize: seed.u32(0), version: text },
        Request::Auth { afid: fid, user, tree: text },
        Request::Attach { fid, afid: other, user, tree: b"" },
        Request::Flush { old: Tag(seed.words[0].to_le_bytes()[0].into()) },
        Request::Walk { fid, new_fid: other, steps },
        Request::Walk { fid, new_fid: other, steps: Steps::default() },
        Request::Read { fid, offset, bytes_max },
        Request::Write { fid, offset, data: &seed.bytes },
        Request::Clunk { fid },
        Request::Remove { fid },
        Request::Statfs { fid },
        Request::Open { fid, flags: seed.flags() },
        Request::Create { fid, name, flags: seed.flags() | OFlags::EXCL, mode: seed.u32(1) & 0o7777, gid },
        Request::Symlink { dir: fid, name, target: text, gid },
        Request::Mknod { dir: fid, name, mode: node | (seed.u32(1) & 0o7777), rdev: seed.u32(2), gid },
        Request::Rename { fid, dir: other, name },
        Request::Readlink { fid },
        Request::Getattr { fid, mask: seed.words[2] },
        Request::Setattr { fid, set: seed.set(), ctime: seed.bit(9) },
        Request::Xattrwalk { fid, new_fid: other, name: text },
        Request::Xattrwalk { fid, new_fid: other, name: b"" },
        Request::Xattrcreate { fid, name: text, bytes: seed.positive(3) % 65537, flags: xattr },
        Request::Readdir { fid, offset: seed.words[5], bytes_max },
        Request::Fsync { fid, data_only: seed.bit(1) },
        Request::Lock { fid, lock: seed.lock(LockKind::Unlock), wait: seed.bit(1), reclaim: seed.bit(2) },
        Request::Getlock { fid, lock: seed.lock(LockKind::Write) },
        Request::Link { dir: fid, fid: other, name },
        Request::Mkdir { dir: fid, name, mode: seed.u32(1) & 0o7777, gid },
        Request::Renameat { dir: fid, name, new_dir: other, new_name },
        Request::Unlinkat { dir: fid, name, is_dir: seed.bit(3) },
        Request::Events { fid, acknowledged: seed.words[3], wait_ms: seed.u32(4) },
    ]
}

pub(super) fn replies(seed: &Seed) -> Vec<Reply<'_>> {
    let qid = seed.qid(0);
    let mut qids = Qids::default();
    (0..seed.names.len()).for_each(|at| qids.push(seed.qid(at)));
    let kind = FileType::from_raw_mode(seed.u32(1));
    let is_device = matches!(kind, FileType::BlockDevice | FileType::CharacterDevice);
    let attr = Attr {
        ino: qid.path,
        size: seed.words[1],
        blocks: seed.words[2],
        atime: seed.time(3),
        mtime: seed.time(4),
        ctime: seed.time(5),
        btime: seed.bit(0).then_some(seed.time(6)),
        mode: seed.u32(1),
        nlink: seed.u32(2),
        uid: seed.u32(3),
        gid: seed.u32(4),
        rdev: if is_device { seed.u32(5) } else { 0 },
        blksize: seed.u32(6),
        submount: false,
    };
    let totals = Statfs {
        blocks: seed.words[0],
        bfree: seed.words[1],
        bavail: seed.words[2],
        files: seed.words[3],
        ffree: seed.words[4],
        bsize: seed.u32(5),
        namelen: seed.u32(6),
        frsize: seed.u32(5),
    };
    vec![
        Reply::Error(Errno::XDEV),
        Reply::Version { msize: seed.u32(0), version: VERSION_UNKNOWN },
        Reply::Auth(qid),
        Reply::Attach(qid),
        Reply::Flush,
        Reply::Walk(qids),
        Reply::Walk(Qids::default()),
        Reply::Read(&seed.bytes),
        Reply::Write { bytes: seed.u32(0) },
        Reply::Clunk,
        Reply::Remove,
        Reply::Statfs { totals, id: seed.words[6] },
        Reply::Open { qid, iounit: seed.u32(0) },
        Reply::Create { qid, iounit: seed.u32(0) },
        Reply::Symlink(qid),
        Reply::Mknod(qid),
        Reply::Rename,
        Reply::Readlink { target: &seed.text },
        Reply::Getattr(Getattr { qid, attr, generation: seed.words[7] }),
        Reply::Setattr,
        Reply::Xattrwalk { bytes: seed.words[0] },
        Reply::Xattrcreate,
        Reply::Readdir(&seed.bytes),
        Reply::Fsync,
        Reply::Lock(LockStatus::Blocked),
        Reply::Getlock(seed.lock(LockKind::Read)),
        Reply::Link,
        Reply::Mkdir(qid),
        Reply::Renameat,
        Reply::Unlinkat,
        Reply::Events(&seed.bytes),
    ]
}
