//! What two clients of one server see of each other's files.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test that cannot go on ends, and its sizes are small"
)]

use crate::common;

use common::{CX, Served, name, read, write};
use ferry_9p_client::{Cache, Options};
use ferry_vfs::*;

#[test]
fn an_open_sees_writes_before_another_clients_close() {
    let served = Served::new();
    let [one, two] = [(); 2].map(|()| served.connect(Options { cache: Cache::Auto, ..Options::default() }));
    let (made, handle) = one.create(&CX, Ino::ROOT, name("f"), &common::file(0o600), OFlags::RDWR).unwrap();
    write(&one, made.ino, handle, 0, b"by the one").unwrap();
    one.flush(&CX, made.ino, handle, 0).unwrap();
    one.release(&CX, made.ino, handle);
    for text in [b"by the two", b"once again"] {
        // Of the same length, so that the size says nothing.
        let found = two.lookup(&CX, Ino::ROOT, name("f")).unwrap();
        let handle = two.open(&CX, found.ino, OFlags::RDWR).unwrap();
        read(&two, found.ino, handle, 0, 99).unwrap();
        write(&two, found.ino, handle, 0, text).unwrap();
        two.flush(&CX, found.ino, handle, 0).unwrap();
        two.release(&CX, found.ino, handle);
        let handle = one.open(&CX, made.ino, OFlags::RDONLY).unwrap();
        assert_eq!(read(&one, made.ino, handle, 0, 99).unwrap(), text);
        one.release(&CX, made.ino, handle);
    }
}
