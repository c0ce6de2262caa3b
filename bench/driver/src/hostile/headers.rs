//! Invalid FUSE messages: lengths, opcodes, inodes, handles, sizes.

use ferry_wire::fuse::abi::{
    BatchForgetIn, CopyFileRangeIn, FallocateIn, FlushIn, ForgetIn, FsyncIn, GetattrIn, GetxattrIn, InitIn, IoctlIn,
    LkIn, LseekIn, Opcode, OpenIn, ReadIn, ReleaseIn, RemovemappingIn, SetattrIn, SetxattrIn, WriteIn,
};
use zerocopy::IntoBytes;

use super::subject::AREA_BYTES;
use super::{Answer, Case, Expect, Recovery, Subject};
use crate::{Config, Driver, ROOT, Result};

/// An inode or handle that no server has given out.
const UNKNOWN: [u64; 4] = [0x1234_5678, 1 << 32, 1 << 63, u64::MAX];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = lengths();
    cases.extend(opcodes());
    cases.extend(nodes());
    cases.extend(handles());
    cases.extend(sizes());
    cases.extend(sessions());
    cases
}

/// The length in the header, and the length of the message, are not what they should be.
fn lengths() -> Vec<Case> {
    let mut cases = Vec::new();
    // The GETATTR of 56 bytes says that it has this many.
    for len in [0, 1, 39, 40, 55, 57, 4096, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        cases.push(Case::new(format!("header/length-{len}-of-56"), Expect::ErrorOrDrop, move |subject| {
            let mut bytes = subject.getattr();
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            subject.send(&bytes, 4096)
        }));
    }
    // The message ends early, and says so.
    for len in [1, 4, 16, 39, 40, 41, 55] {
        cases.push(Case::new(format!("header/message-of-{len}"), Expect::ErrorOrDrop, move |subject| {
            let mut bytes = subject.getattr();
            bytes[..4].copy_from_slice(&u32::try_from(len).unwrap_or(0).to_le_bytes());
            bytes.truncate(len);
            subject.send(&bytes, 4096)
        }));
    }
    // Extensions that are not there (fuse_in_header.total_extlen, in units of 8 bytes).
    for extlen in [1_u16, 2, 3, u16::MAX] {
        cases.push(Case::new(format!("header/extensions-{extlen}"), Expect::Clean, move |subject| {
            let mut bytes = subject.getattr();
            bytes[36..38].copy_from_slice(&extlen.to_le_bytes());
            subject.send(&bytes, 4096)
        }));
    }
    cases
}

fn opcodes() -> Vec<Case> {
    // 7, 19: never given out. 4096: CUSE_INIT. 436207616: an INIT of the other byte order.
    let unknown = [0, 7, 19, 54, 63, 4096, 0x1a00_0000, 0x7fff_ffff, u32::MAX];
    let case = |opcode: u32| {
        Case::new(format!("opcode/{opcode}"), Expect::Error, move |subject: &mut Subject| {
            let bytes = subject.bytes(opcode, ROOT, &[0; 64]);
            subject.send(&bytes, 4096)
        })
    };
    // Each known opcode without any arguments: an error, or a good answer where none are needed.
    let bare = |opcode: &Opcode| {
        let opcode = *opcode;
        Case::new(format!("opcode/{opcode:?}-without-arguments"), Expect::Clean, move |subject: &mut Subject| {
            let bytes = subject.bytes(opcode.as_raw(), subject.file, &[]);
            subject.send(&bytes, 4096)
        })
    };
    let known = Opcode::ALL.iter().filter(|opcode| **opcode != Opcode::Destroy).map(bare);
    unknown.into_iter().map(case).chain(known).collect()
}

fn nodes() -> Vec<Case> {
    let requests: [(&str, Opcode, Vec<u8>); 9] = [
        ("getattr", Opcode::Getattr, GetattrIn::ZERO.as_bytes().to_vec()),
        ("setattr", Opcode::Setattr, SetattrIn { valid: 1, mode: 0o644, ..SetattrIn::ZERO }.as_bytes().to_vec()),
        ("lookup", Opcode::Lookup, b"file\0".to_vec()),
        ("open", Opcode::Open, OpenIn::ZERO.as_bytes().to_vec()),
        ("opendir", Opcode::Opendir, OpenIn::ZERO.as_bytes().to_vec()),
        ("readlink", Opcode::Readlink, Vec::new()),
        ("unlink", Opcode::Unlink, b"file\0".to_vec()),
        ("statfs", Opcode::Statfs, Vec::new()),
        ("getxattr", Opcode::Getxattr, [GetxattrIn { size: 64, padding: 0 }.as_bytes(), b"user.x\0"].concat()),
    ];
    let mut cases = Vec::new();
    for (name, opcode, args) in requests {
        for node in [0].into_iter().chain(UNKNOWN) {
            // Some servers answer STATFS for the whole share, whatever the inode is.
            let expect = if opcode == Opcode::Statfs { Expect::Clean } else { Expect::Error };
            let args = args.clone();
            cases.push(Case::new(format!("node/{name}/{node:#x}"), expect, move |subject| {
                let bytes = subject.bytes(opcode.as_raw(), node, &args);
                subject.send(&bytes, 4096)
            }));
        }
    }
    // FORGET has no reply. An unknown inode, or too many references, must change nothing.
    for node in UNKNOWN {
        cases.push(Case::new(format!("node/forget/{node:#x}"), Expect::ErrorOrDrop, move |subject| {
            let bytes = subject.bytes(Opcode::Forget.as_raw(), node, ForgetIn { nlookup: 1 }.as_bytes());
            subject.send(&bytes, 0)
        }));
    }
    cases.push(Case::new("node/forget/root-too-often", Expect::ErrorOrDrop, |subject| {
        let bytes = subject.bytes(Opcode::Forget.as_raw(), ROOT, ForgetIn { nlookup: u64::MAX }.as_bytes());
        subject.send(&bytes, 0)
    }));
    cases
}

fn handles() -> Vec<Case> {
    type Make = fn(u64) -> Vec<u8>;
    let requests: [(&str, Opcode, Make); 11] = [
        ("read", Opcode::Read, |fh| ReadIn { fh, size: 64, ..ReadIn::ZERO }.as_bytes().to_vec()),
        ("write", Opcode::Write, |fh| [WriteIn { fh, size: 4, ..WriteIn::ZERO }.as_bytes(), b"data"].concat()),
        ("flush", Opcode::Flush, |fh| FlushIn { fh, ..FlushIn::ZERO }.as_bytes().to_vec()),
        ("fsync", Opcode::Fsync, |fh| FsyncIn { fh, ..FsyncIn::ZERO }.as_bytes().to_vec()),
        ("release", Opcode::Release, |fh| ReleaseIn { fh, ..ReleaseIn::ZERO }.as_bytes().to_vec()),
        ("releasedir", Opcode::Releasedir, |fh| ReleaseIn { fh, ..ReleaseIn::ZERO }.as_bytes().to_vec()),
        ("readdir", Opcode::Readdir, |fh| ReadIn { fh, size: 4096, ..ReadIn::ZERO }.as_bytes().to_vec()),
        ("fallocate", Opcode::Fallocate, |fh| {
            FallocateIn { fh, length: 4096, ..FallocateIn::ZERO }.as_bytes().to_vec()
        }),
        ("lseek", Opcode::Lseek, |fh| LseekIn { fh, whence: 3, ..LseekIn::ZERO }.as_bytes().to_vec()),
        ("setlk", Opcode::Setlk, |fh| LkIn { fh, ..LkIn::ZERO }.as_bytes().to_vec()),
        ("ioctl", Opcode::Ioctl, |fh| IoctlIn { fh, ..IoctlIn::ZERO }.as_bytes().to_vec()),
    ];
    let mut cases = Vec::new();
    for (name, opcode, make) in requests {
        for fh in UNKNOWN {
            // Linux ignores the answer to RELEASE; a server may say that it is done.
            let release = matches!(opcode, Opcode::Release | Opcode::Releasedir);
            let expect = if release { Expect::Clean } else { Expect::Error };
            cases.push(Case::new(format!("handle/{name}/{fh:#x}"), expect, move |subject| {
                let bytes = subject.bytes(opcode.as_raw(), subject.file, &make(fh));
                subject.send(&bytes, 4096)
            }));
        }
    }
    cases.push(Case::new("handle/read-of-a-directory", Expect::Error, |subject| {
        let args = ReadIn { fh: subject.directory_fh, size: 64, ..ReadIn::ZERO };
        let bytes = subject.bytes(Opcode::Read.as_raw(), subject.directory, args.as_bytes());
        subject.send(&bytes, 4096)
    }));
    cases.push(Case::new("handle/readdir-of-a-file", Expect::Error, |subject| {
        let args = ReadIn { fh: subject.fh, size: 4096, ..ReadIn::ZERO };
        let bytes = subject.bytes(Opcode::Readdir.as_raw(), subject.file, args.as_bytes());
        subject.send(&bytes, 4096)
    }));
    cases
}

/// Sizes and offsets at their limits, and sizes beyond the message or the reply area.
fn sizes() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, expect, opcode: Opcode, room: usize, make: fn(&Subject) -> Vec<u8>| {
        cases.push(Case::new(format!("size/{name}"), expect, move |subject| {
            let args = make(subject);
            let bytes = subject.bytes(opcode.as_raw(), subject.file, &args);
            subject.send(&bytes, room)
        }));
    };
    let all = AREA_BYTES;
    add("read-4g", Expect::Clean, Opcode::Read, all, |s| read(s, 0, u32::MAX));
    add("read-4g-into-4k", Expect::Clean, Opcode::Read, 4096, |s| read(s, 0, u32::MAX));
    add("read-more-than-room", Expect::Clean, Opcode::Read, 16 + 512, |s| read(s, 0, 4096));
    add("read-without-room", Expect::Clean, Opcode::Read, 16, |s| read(s, 0, 4096));
    add("read-nothing", Expect::Works, Opcode::Read, 16, |s| read(s, 0, 0));
    add("read-at-the-last-offset", Expect::Clean, Opcode::Read, 4096, |s| read(s, u64::MAX, 4));
    add("read-past-the-last-offset", Expect::Clean, Opcode::Read, 4096, |s| read(s, i64::MAX.cast_unsigned(), 64));
    add("write-more-than-sent", Expect::Error, Opcode::Write, 64, |s| write(s, 0, 4096, b"data"));
    add("write-4g", Expect::Error, Opcode::Write, 64, |s| write(s, 0, u32::MAX, b"data"));
    add("write-nothing-at-all", Expect::Error, Opcode::Write, 64, |s| write(s, 0, 4, b""));
    add("write-at-the-last-offset", Expect::Error, Opcode::Write, 64, |s| write(s, u64::MAX, 4, b"data"));
    add("write-past-the-last-offset", Expect::Error, Opcode::Write, 64, |s| {
        write(s, i64::MAX.cast_unsigned(), 4, b"data")
    });
    add("setxattr-more-than-sent", Expect::Error, Opcode::Setxattr, 64, |_| {
        [SetxattrIn { size: 4096, ..SetxattrIn::ZERO }.as_bytes(), b"user.x\0value"].concat()
    });
    add("setxattr-4g", Expect::Error, Opcode::Setxattr, 64, |_| {
        [SetxattrIn { size: u32::MAX, ..SetxattrIn::ZERO }.as_bytes(), b"user.x\0value"].concat()
    });
    add("getxattr-4g", Expect::Clean, Opcode::Getxattr, 4096, |_| {
        [GetxattrIn { size: u32::MAX, padding: 0 }.as_bytes(), b"user.x\0"].concat()
    });
    add("listxattr-4g", Expect::Clean, Opcode::Listxattr, 4096, |_| {
        GetxattrIn { size: u32::MAX, padding: 0 }.as_bytes().to_vec()
    });
    add("fallocate-wraps", Expect::Error, Opcode::Fallocate, 64, |s| {
        FallocateIn { fh: s.fh, offset: u64::MAX - 10, length: 100, ..FallocateIn::ZERO }.as_bytes().to_vec()
    });
    add("lseek-before-the-start", Expect::Error, Opcode::Lseek, 64, |s| {
        LseekIn { fh: s.fh, offset: u64::MAX, whence: 3, padding: 0 }.as_bytes().to_vec()
    });
    add("lseek-whence", Expect::Error, Opcode::Lseek, 64, |s| {
        LseekIn { fh: s.fh, offset: 0, whence: 77, padding: 0 }.as_bytes().to_vec()
    });
    add("truncate-to-the-last-offset", Expect::Error, Opcode::Setattr, 4096, |_| {
        SetattrIn { valid: 1 << 3, size: u64::MAX, ..SetattrIn::ZERO }.as_bytes().to_vec()
    });
    add("copy-wraps", Expect::Clean, Opcode::CopyFileRange, 64, |s| {
        let (fh_in, fh_out, nodeid_out) = (s.fh, s.fh, s.file);
        let args =
            CopyFileRangeIn { fh_in, fh_out, nodeid_out, off_in: u64::MAX - 1, len: u64::MAX, ..CopyFileRangeIn::ZERO };
        args.as_bytes().to_vec()
    });
    add("ioctl-input-not-sent", Expect::Error, Opcode::Ioctl, 64, |s| {
        IoctlIn { fh: s.fh, in_size: 4096, ..IoctlIn::ZERO }.as_bytes().to_vec()
    });
    add("ioctl-4g", Expect::Error, Opcode::Ioctl, 64, |s| {
        IoctlIn { fh: s.fh, cmd: 1, in_size: u32::MAX, out_size: u32::MAX, ..IoctlIn::ZERO }.as_bytes().to_vec()
    });
    add("removemapping-count", Expect::Error, Opcode::Removemapping, 64, |_| {
        RemovemappingIn { count: u32::MAX }.as_bytes().to_vec()
    });
    add("batch-forget-count", Expect::ErrorOrDrop, Opcode::BatchForget, 0, |_| {
        BatchForgetIn { count: u32::MAX, dummy: 0 }.as_bytes().to_vec()
    });
    cases.push(Case::new("size/readdir-4g", Expect::Clean, |subject| {
        let args = ReadIn { fh: subject.directory_fh, size: u32::MAX, ..ReadIn::ZERO };
        let bytes = subject.bytes(Opcode::Readdir.as_raw(), subject.directory, args.as_bytes());
        subject.send(&bytes, 4096)
    }));
    for room in [1, 8, 15, 16, 17, 119] {
        cases.push(Case::new(format!("size/reply-area-of-{room}"), Expect::ErrorOrDrop, move |subject| {
            let bytes = subject.getattr();
            subject.send(&bytes, room)
        }));
    }
    cases
}

fn read(subject: &Subject, offset: u64, size: u32) -> Vec<u8> {
    ReadIn { fh: subject.fh, offset, size, ..ReadIn::ZERO }.as_bytes().to_vec()
}

fn write(subject: &Subject, offset: u64, size: u32, data: &[u8]) -> Vec<u8> {
    [WriteIn { fh: subject.fh, offset, size, ..WriteIn::ZERO }.as_bytes(), data].concat()
}

/// INIT at the wrong time, or with an unknown version.
fn sessions() -> Vec<Case> {
    let mut cases = Vec::new();
    for (major, minor) in [(0, 0), (6, 99), (7, 0), (8, 0), (u32::MAX, u32::MAX)] {
        // INIT, good or not, may end the session that was there, and its handles.
        let case = Case::new(format!("init/again-{major}.{minor}"), Expect::Clean, move |subject| {
            let args = InitIn { major, minor, ..InitIn::ZERO };
            let bytes = subject.bytes(Opcode::Init.as_raw(), 0, args.as_bytes());
            subject.send(&bytes, 4096)
        });
        cases.push(case.recovering(Recovery::Reconnect));
    }
    cases.push(Case::bare("init/not-yet", |socket, options| {
        let mut driver = Driver::connect(socket, Config { timeout: options.drop_after, ..Config::default() })?;
        answer(driver.getattr(ROOT))
    }));
    cases.push(Case::bare("init/after-destroy", |socket, options| {
        let mut driver = Driver::connect(socket, Config { timeout: options.drop_after, ..Config::default() })?;
        driver.init()?;
        driver.destroy()?;
        answer(driver.init())
    }));
    cases
}

/// The answer to a typed request.
fn answer<T>(result: Result<T>) -> Result<Answer> {
    match result {
        Ok(_) => Ok(Answer::Reply(Vec::new())),
        Err(crate::Error::Errno(errno)) => Ok(Answer::Errno(errno)),
        Err(crate::Error::TimedOut(_)) => Ok(Answer::Dropped),
        Err(crate::Error::BadReply(text)) => Ok(Answer::Malformed(text)),
        Err(error) => Err(error),
    }
}
