//! The DAX window on the source `mem`: guests map the same pages that the server copies.

use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT, Ticket};
use ferry_mem::Mem;
use ferry_tests::window::{FrontEndRequest, answer, next_wish};
use ferry_tests::{Export, Options, Place, directory};
use ferry_vfs::FileSystem;
use ferry_wire::fuse::abi::{
    ATTR_DAX, InitFlags, MINOR_MAX, Opcode, SETUPMAPPING_READ, SETUPMAPPING_WRITE, SetupmappingIn,
};
use zerocopy::IntoBytes;

const CHUNK: u64 = 2 << 20;
const PAGE: usize = 4096;
/// More transfers than a file has before the server maps it.
const WRITES: u64 = 20;
const BOTH: u64 = SETUPMAPPING_READ | SETUPMAPPING_WRITE;

fn setup(driver: &mut Driver, node: u64, offset: u64, flags: u64) -> Ticket {
    let args = SetupmappingIn { fh: u64::MAX, foffset: offset, len: CHUNK, flags, moffset: offset };
    driver.send(Opcode::Setupmapping, node, &[args.as_bytes()], &[], 0).unwrap()
}

/// Maps a chunk; returns the request to the front end.
fn map(driver: &mut Driver, line: &UnixStream, node: u64, offset: u64) -> FrontEndRequest {
    let ticket = setup(driver, node, offset, BOTH);
    let wish = next_wish(line).unwrap();
    answer(line, wish.code, 0);
    driver.receive(ticket).unwrap();
    wish
}

/// When another guest truncates a file, the range past its new end is unmapped first.
#[test]
fn a_range_truncated_by_another_guest_is_unmapped_first() {
    const O_TRUNC: u32 = libc::O_TRUNC.cast_unsigned();
    let mem = Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap();
    if !mem.features().backing {
        ferry_skip::skip!("this user may not mount a tmpfs");
        return;
    }
    let (directory, mem) = (directory(Place::Disk), Arc::new(mem));
    let export = |name: &str| {
        let socket = directory.path().join(name);
        let options = Options { queues: 1, tag: Some("m".parse().unwrap()), ..Options::default() };
        (Export::listen(&socket, Arc::clone(&mem) as Arc<dyn FileSystem>, options).unwrap(), socket)
    };
    let (one, two) = (export("one"), export("two"));
    let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
    let mut driver = Driver::connect(&one.1, config).unwrap();
    let (_, line) = driver.window().unwrap();
    // A missing request is an error.
    line.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
    let (entry, _) = driver.create(ROOT, "f", 2, 0o600).unwrap();
    let node = entry.nodeid;
    let mut other = Driver::connect(&two.1, Config::default()).unwrap();
    other.init().unwrap();
    let theirs = other.lookup(ROOT, "f").unwrap().nodeid;
    for by_open in [false, true] {
        driver.truncate(node, 2 * CHUNK).unwrap();
        let mapped = map(&mut driver, &line, node, CHUNK).file.unwrap();
        std::thread::scope(|scope| {
            let cut = scope.spawn(|| match by_open {
                true => other.open(theirs, 2 | O_TRUNC).map(drop),
                false => other.truncate(theirs, 0).map(drop),
            });
            let wish = next_wish(&line).unwrap();
            assert_eq!((wish.code, wish.numbers), (10, [0, CHUNK, CHUNK, CHUNK, 1]));
            assert_eq!(mapped.metadata().unwrap().len(), 2 * CHUNK, "it is short already");
            answer(&line, wish.code, 0);
            let wish = next_wish(&line).unwrap();
            assert_eq!((wish.code, wish.numbers), (9, [0, 0, CHUNK, CHUNK, 1]), "zeros");
            answer(&line, wish.code, 0);
            cut.join().unwrap().unwrap();
        });
        assert_eq!(mapped.metadata().unwrap().len(), 0);
        let args = [1u32.to_le_bytes().as_slice(), &CHUNK.to_le_bytes(), &CHUNK.to_le_bytes()].concat();
        let ticket = driver.send(Opcode::Removemapping, node, &[&args], &[], 0).unwrap();
        answer(&line, next_wish(&line).unwrap().code, 0);
        driver.receive(ticket).unwrap();
    }
    drop((driver, other));
    one.0.stop();
    two.0.stop();
}

#[test]
fn mapped_and_copied_pages_are_the_same() {
    let mem = Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap();
    if !mem.features().backing {
        ferry_skip::skip!("this user may not mount a tmpfs");
        return;
    }
    let directory = directory(Place::Disk);
    let socket = directory.path().join("s");
    let options = Options { queues: 1, tag: Some("m".parse().unwrap()), ..Options::default() };
    let export = Export::listen(&socket, Arc::new(mem), options).unwrap();
    let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
    let mut driver = Driver::connect(&socket, config).unwrap();
    let (_, line) = driver.window().unwrap();
    driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
    let (entry, opened) = driver.create(ROOT, "f", 2, 0o600).unwrap();
    let (node, handle) = (entry.nodeid, opened.fh);
    for at in 0..2 * CHUNK / (64 << 10) {
        assert_eq!(driver.write(node, handle, at * (64 << 10), &[1; 64 << 10]).unwrap(), 64 << 10);
    }
    assert_ne!(driver.lookup(ROOT, "f").unwrap().attr.flags & ATTR_DAX, 0);

    let wish = map(&mut driver, &line, node, CHUNK);
    assert_eq!(wish.numbers, [0, CHUNK, CHUNK, CHUNK, 1], "the file itself, also for writing");
    let mapped = wish.file.unwrap();
    let mut page = [0; PAGE];
    for round in 0..WRITES {
        let number = u8::try_from(round).unwrap();
        // Bytes that the server writes appear in the mapping, and stores to the mapping appear in its reads.
        assert_eq!(driver.write(node, handle, CHUNK + 5 * 4096, &[number; PAGE]).unwrap(), 4096);
        mapped.read_exact_at(&mut page, CHUNK + 5 * 4096).unwrap();
        assert_eq!(page, [number; PAGE]);
        mapped.write_all_at(&[number + 100; PAGE], CHUNK + 6 * 4096).unwrap();
        assert_eq!(driver.read(node, handle, CHUNK + 6 * 4096, 4096).unwrap(), [number + 100; PAGE]);
    }
    // The file is truncated under the mapping. The server, which has it mapped, too, continues.
    driver.truncate(node, 100).unwrap();
    assert_eq!(driver.getattr(node).unwrap().attr.size, 100);
    assert_eq!(driver.read(node, handle, CHUNK + 5 * 4096, 4096).unwrap(), b"");
    assert_eq!(mapped.metadata().unwrap().len(), 100);
    for round in 0..WRITES {
        assert_eq!(driver.write(node, handle, CHUNK + round * 4096, &[9; PAGE]).unwrap(), 4096);
    }
    assert_eq!(driver.read(node, handle, CHUNK + 4096, 4096).unwrap(), [9; PAGE]);
    assert_eq!(driver.read(node, handle, 4096, 4096).unwrap(), [0; PAGE], "a hole");
    // All mappings end with the session.
    let ticket = driver.send(Opcode::Destroy, 0, &[], &[], 0).unwrap();
    let wish = next_wish(&line).unwrap();
    assert_eq!((wish.code, wish.numbers), (10, [0, CHUNK, CHUNK, CHUNK, 1]));
    answer(&line, wish.code, 0);
    driver.receive(ticket).unwrap();
    drop(driver);
    export.stop();
}
