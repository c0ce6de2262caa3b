//! What one client may have of the server.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Answer, Client};
use ferry_serve::{Acl, HEADER_BYTES, Session, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::{Operation, Release};

/// A directory that has no end.
#[derive(Default)]
struct Endless {
    opened: AtomicU64,
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
    Client::new(Arc::new(Endless::default()), options, Session::default())
}

#[test]
fn a_listing_is_no_longer_than_anybody_needs() {
    let mut client = client(&ShareOptions::default());
    let at = DirRange { ino: Ino::ROOT, handle: Handle(0), offset: 0, plus: false };
    for (room, expected) in [(4096, 4096), (1 << 20, 1 << 20), (64 << 20, 1 << 20)] {
        client.room = room + HEADER_BYTES;
        let Answer::Reply(listing) = client.ask(Ino::ROOT, Operation::Readdir { at, bytes_max: u32::MAX }) else {
            panic!("no listing")
        };
        // As many entries of 32 bytes as there is room for.
        assert_eq!(listing.len(), expected);
    }
}

#[test]
fn a_client_has_no_more_open_than_it_may() {
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
fn who_has_not_agreed_on_acls_sees_and_makes_none() {
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
