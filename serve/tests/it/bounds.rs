//! Limits of the resources of one client.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Answer, Client};
use ferry_serve::{Acl, HEADER_BYTES, SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::{Operation, Release};

/// A directory with an endless listing.
#[derive(Default)]
struct Endless {
    opened: AtomicU64,
    /// The maximum size of a read or write that it received, in bytes.
    asked: AtomicU64,
}

impl FileSystem for Endless {
    fn features(&self) -> Features {
        Features { posix_acl: true, ..Features::default() }
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(self.opened.fetch_add(1, Ordering::Relaxed)))
    }
    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.open(cx, ino, flags)
    }
    fn readdir(&self, _: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let mut next = at.offset;
        while out.fits(b"name") {
            next += 1;
            out.push(&DirItem { ino: 2, next, kind: FileType::RegularFile, name: b"name" }, None);
        }
        Ok(())
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Output) -> Result<Data> {
        self.asked.fetch_max(at.len.into(), Ordering::Relaxed);
        Ok(Data::Bytes(0))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.asked.fetch_max(at.len.into(), Ordering::Relaxed);
        Ok(Data::Bytes(at.len as usize))
    }
    fn ioctl(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u32, _: &[u8], bytes_max: usize) -> Result<Vec<u8>> {
        self.asked.fetch_max(bytes_max as u64, Ordering::Relaxed);
        Ok(Vec::new())
    }
    fn getxattr(&self, _: &Caller<'_>, _: Ino, _: &[u8]) -> Result<Vec<u8>> {
        Ok(b"value".to_vec())
    }
    fn setxattr(&self, _: &Caller<'_>, _: Ino, _: &[u8], _: &[u8], _: XattrFlags, _: bool) -> Result<()> {
        Ok(())
    }
    fn removexattr(&self, _: &Caller<'_>, _: Ino, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

fn client(options: &ShareOptions) -> Client {
    Client::new(Arc::new(Endless::default()), options, SessionSlot::default())
}

#[test]
fn listings_are_bounded() {
    let mut client = client(&ShareOptions::default());
    let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus: false };
    for (room, expected) in [(4096, 4096), (1 << 20, 1 << 20), (64 << 20, 1 << 20)] {
        client.room = room + HEADER_BYTES;
        let Answer::Reply(listing) = client.ask(Ino::ROOT, Operation::Readdir { at, bytes_max: u32::MAX }) else {
            panic!("no listing")
        };
        // As many entries of 32 bytes as fit.
        assert_eq!(listing.len(), expected);
    }
}

/// Sources allocate memory for a request's size, while a chain whose descriptors share memory costs its client nothing.
#[test]
fn requests_beyond_the_negotiated_limits_never_reach_a_source() {
    let source = Arc::new(Endless::default());
    let mut client =
        Client::new(Arc::clone(&source) as Arc<dyn FileSystem>, &ShareOptions::default(), SessionSlot::default());
    let (read_max, write_max) = (client.negotiated.max_read_bytes(), client.negotiated.max_write_bytes);
    assert_eq!((read_max, write_max), (16 << 20, 1 << 20));
    client.room = (read_max as usize + HEADER_BYTES) * 2;
    let (ino, handle, flags) = (Ino(2), Handle(0), OFlags::RDWR);
    let range = |len| IoRange { ino, handle, offset: 0, len, flags, clear_privileges: false, owner: None };
    let asked = || source.asked.swap(0, Ordering::Relaxed);
    for (len, most, is_allowed) in [(read_max, read_max, true), (read_max + 1, 0, false), (u32::MAX, 0, false)] {
        let outcome = |answer: Answer| match is_allowed {
            true => assert!(matches!(answer, Answer::Reply(_)), "{len}: {answer:?}"),
            false => assert_eq!(answer, Answer::Error(Errno::INVAL), "{len}"),
        };
        outcome(client.ask(ino, Operation::Read(range(len))));
        assert_eq!(asked(), u64::from(most));
        let (argument, input) = (0, &[][..]);
        outcome(
            client.ask(ino, Operation::Ioctl { handle, flags: 0, command: 1, argument, input, out_bytes_max: len }),
        );
        assert_eq!(asked(), u64::from(most));
    }
    for (len, expected) in [(write_max, Ok(())), (write_max + 1, Err(Errno::INVAL)), (32 << 20, Err(Errno::INVAL))] {
        let write = Operation::Write { range: range(len), cached: false };
        match (client.ask_and_write(ino, write, &vec![1; len as usize]), expected) {
            (Answer::Reply(_), Ok(())) => assert_eq!(asked(), u64::from(len)),
            (answer, Err(errno)) => assert_eq!((answer, asked()), (Answer::Error(errno), 0), "{len}"),
            (answer, _) => panic!("{len}: {answer:?}"),
        }
    }
}

#[test]
fn open_files_per_client_are_limited() {
    const MOST: u64 = 1 << 20;
    let mut client = client(&ShareOptions::default());
    client.room = 256;
    let open = Operation::Open { flags: OFlags::RDWR, clear_privileges: false };
    for number in 0..MOST {
        assert!(matches!(client.ask(Ino(2 + number % 7), open), Answer::Reply(_)), "{number}");
    }
    assert_eq!(client.ask(Ino(2), open), Answer::Error(Errno::NFILE));
    assert_eq!(client.ask(Ino::ROOT, Operation::Opendir { flags: OFlags::RDONLY }), Answer::Error(Errno::NFILE));
    let release = Release { handle: Handle(0), flags: OFlags::RDWR, owner: 0, flush: false, unlock_flock: false };
    assert_eq!(client.ask(Ino(2), Operation::Release(release)), Answer::Reply(Vec::new()));
    assert!(matches!(client.ask(Ino(2), open), Answer::Reply(_)));
    assert_eq!(client.ask(Ino(2), open), Answer::Error(Errno::NFILE));
}

#[test]
fn without_negotiated_acls_none_are_visible() {
    for (posix_acl, is_there) in [(Acl::Never, false), (Acl::Auto, true)] {
        let mut client = client(&ShareOptions { posix_acl, ..ShareOptions::default() });
        for (name, expected) in [
            (&b"system.posix_acl_access"[..], is_there),
            (b"system.posix_acl_default", is_there),
            (b"user.posix_acl_access", true),
        ] {
            let flags = XattrFlags::empty();
            for operation in [
                Operation::Getxattr { name, bytes_max: 100 },
                Operation::Setxattr { name, value: b"value", flags, clear_sgid: false },
                Operation::Removexattr { name },
            ] {
                let answer = client.ask(Ino(2), operation);
                match expected {
                    true => assert!(matches!(answer, Answer::Reply(_)), "{operation:?}: {answer:?}"),
                    false => assert_eq!(answer, Answer::Error(Errno::OPNOTSUPP), "{operation:?}"),
                }
            }
        }
    }
}
