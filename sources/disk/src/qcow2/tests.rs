use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferry_vfs::{BlockRange, Errno};
use tempfile::TempDir;

use crate::tests::images::create;
use crate::{Format, Options, open};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;
/// The locations of an image's tables; one cluster each.
const REFCOUNT_TABLE: u64 = CLUSTER;
const REFCOUNT_BLOCK: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;

fn options(read_only: bool) -> Options {
    Options { format: Some(Format::Qcow2), read_only, ..Options::default() }
}

fn patch(path: &Path, bytes: &[u8], at: u64) {
    File::options().write(true).open(path).and_then(|file| file.write_all_at(bytes, at)).expect("a write");
}

fn at(offset: u64, bytes: u64) -> BlockRange {
    BlockRange { offset, bytes, alignment: 1 }
}

/// Returns an image whose only L2 table begins with this entry.
fn with_entry(directory: &TempDir, entry: u64) -> std::path::PathBuf {
    let path = directory.path().join("image");
    let _ = fs::remove_file(&path);
    create(&path, MIB, None);
    patch(&path, &(L2 | 1 << 63).to_be_bytes(), L1);
    patch(&path, &[0, 1], REFCOUNT_BLOCK + 8);
    patch(&path, &vec![0; 64 << 10], L2);
    patch(&path, &entry.to_be_bytes(), L2);
    path
}

#[test]
fn hostile_headers_are_refused_and_images_stay_unchanged() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    let word = |number: u32| number.to_be_bytes().to_vec();
    let long = |number: u64| number.to_be_bytes().to_vec();
    for (place, bytes, words) in [
        (0, word(0), "does not begin like a qcow2 image"),
        (4, word(1), "has version 1, which is not known"),
        (4, word(u32::MAX), "has version 4294967295"),
        (8, long(u64::MAX), "backing file's name"),
        (8, long(65530), "backing file's name"),
        (8, [long(200), word(1024)].concat(), "backing file's name"),
        (8, [long(200), word(u32::MAX)].concat(), "backing file's name"),
        (8, [long(200), word(2)].concat(), "backing file's name"),
        (20, word(8), "2^8 bytes"),
        (20, word(22), "2^22 bytes"),
        (20, word(u32::MAX), "bytes; 2^9 to 2^21"),
        (24, long(u64::MAX), "its L1 table has 1 entries; 18446744073709551615 bytes need"),
        (32, word(1), "is encrypted (AES)"),
        (32, word(2), "is encrypted (LUKS)"),
        (32, word(3), "its encryption method 3 is unknown"),
        (36, word(u32::MAX), "its L1 table has 4294967295 entries"),
        (36, word(0), "its L1 table has 0 entries"),
        (36, word(2), "ends past the file's"),
        (40, long(REFCOUNT_BLOCK + 8), "where no cluster begins"),
        (40, long(0), "where no cluster begins"),
        (40, long(1 << 63), "ends past the file's"),
        (40, long(u64::MAX), "ends past the file's"),
        (48, long(CLUSTER + 512), "its refcount table is at byte 66048"),
        (48, long(1 << 40), "ends past the file's"),
        (56, word(0), "its refcount table has 0 bytes"),
        (56, word(100), "ends past the file's"),
        (56, word(u32::MAX), "its refcount table has"),
        (60, word(u32::MAX), "4294967295 snapshots"),
        (60, word(65536), "its snapshot table"),
        (60, [word(1), long(u64::MAX)].concat(), "its snapshot table"),
        (72, long(1 << 2), "has its data in another file"),
        (72, long(1 << 3), "contradicts itself about the type of compression"),
        (72, long(1 << 5), "has the unknown feature 5"),
        (72, long(1), "qemu-img check -r all"),
        (72, long(2), "qemu-img check -r all"),
        (96, word(7), "2^7 bits"),
        (96, word(u32::MAX), "bits; 64 are the most"),
        (100, word(96), "claims a length of 96 bytes"),
        (100, word(105), "claims a length of 105 bytes"),
        (100, word(u32::MAX - 7), "claims a length of"),
        (104, [word(0x1234), word(u32::MAX)].concat(), "longer than the header"),
        (104, [word(0x1234), word(65_536 - 111)].concat(), "longer than the header"),
        (104, [word(0x0537_be77), word(0)].concat(), "is encrypted"),
        (L1, long(1 << 55), "a table at 36028797018963968"),
        (L1, long(L2), "a table at 262144"),
        (L1, long(512), "a table at 512"),
        (REFCOUNT_TABLE, long(u64::MAX), "is no cluster of the file's"),
        (REFCOUNT_TABLE + 8, long(1 << 40), "is no cluster of the file's"),
        (REFCOUNT_TABLE + 8, long(REFCOUNT_BLOCK), "has several tables"),
        (REFCOUNT_TABLE + 8, long(REFCOUNT_TABLE), "has several tables"),
        (L1, long(REFCOUNT_BLOCK), "has several tables"),
        (L1, long(REFCOUNT_TABLE), "has several tables"),
    ] {
        let _ = fs::remove_file(&path);
        create(&path, MIB, None);
        patch(&path, &bytes, place);
        let before = fs::read(&path).expect("the file");
        let said = match open(&path, &options(false)) {
            Ok(_) => panic!("{bytes:?} at {place}: it is served"),
            Err(error) => error.to_string(),
        };
        assert!(said.contains(words), "{bytes:?} at {place}: {said}");
        assert!(fs::read(&path).expect("the file") == before, "{bytes:?} at {place}: it was changed");
    }
    for bytes in [0, 3, 4, 71, 72, 103, 104, 4096] {
        create_short(&path, bytes);
        let Err(error) = open(&path, &options(false)) else { panic!("{bytes} bytes are served") };
        assert!(error.to_string().contains("cannot use the image"), "{bytes}: {error}");
    }
}

#[test]
fn without_snapshots_their_table_may_be_anywhere() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    create(&path, MIB, None);
    // As QEMU leaves it after the last snapshot is deleted.
    patch(&path, &(1_u64 << 40).to_be_bytes(), 64);
    let disk = open(&path, &options(false)).expect("an image");
    assert_eq!(disk.write(&at(0, 512), true, &mut &[7; 512][..]).expect("a write").bytes(), Some(512));
}

fn create_short(path: &Path, bytes: u64) {
    let _ = fs::remove_file(path);
    create(path, MIB, None);
    File::options().write(true).open(path).and_then(|file| file.set_len(bytes)).expect("a shorter file");
}

/// Entries with invalid targets: requests fail, and tables are not overwritten with data.
#[test]
fn hostile_entries_fail_requests_without_changing_tables() {
    let directory = tempfile::tempdir().expect("a directory");
    let own = 1 << 63;
    for (entry, reads) in [
        (512, false),
        (own | (CLUSTER + 1024), false),
        // Compressed: past the end of the file, and nothing that can be decompressed.
        (1 << 62 | 1 << 40, false),
        (u64::MAX, false),
        (1 << 62 | L1, false),
        // Tables as data, one of them as the only user.
        (own | L1, true),
        (own | L2, true),
        (own | CLUSTER, true),
        (own | REFCOUNT_BLOCK, true),
    ] {
        let path = with_entry(&directory, entry);
        let before = fs::read(&path).expect("the file");
        let disk = open(&path, &options(false)).expect("an image");
        let read = disk.read(&at(0, 4096), &mut Vec::new());
        assert_eq!(read.is_ok(), reads, "{entry:#x}: {read:?}");
        let written = disk.write(&at(512, 512), true, &mut &[7; 512][..]);
        assert_eq!(written.err(), Some(Errno::IO), "{entry:#x}");
        // Beside it all is well.
        let beside = disk.write(&at(CLUSTER, 512), true, &mut &[7; 512][..]);
        assert_eq!(beside.expect("a write").bytes(), Some(512));
        drop(disk);
        let after = fs::read(&path).expect("the file");
        let tables = usize::try_from(L2 + 8).expect("a small file");
        let counts = usize::try_from(REFCOUNT_BLOCK).expect("a small file");
        assert!(after[..counts] == before[..counts], "{entry:#x}");
        assert!(after[counts + 32..tables] == before[counts + 32..tables], "{entry:#x}");
    }
}

#[test]
fn data_past_the_end_of_the_file_are_zeros() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = with_entry(&directory, 1 << 63 | 1 << 40);
    let disk = open(&path, &options(true)).expect("an image");
    let mut out = Vec::new();
    assert_eq!(disk.read(&at(0, CLUSTER), &mut out).expect("a read").bytes(), usize::try_from(CLUSTER).ok());
    assert!(out.iter().all(|byte| *byte == 0) && out.len() as u64 == CLUSTER);
}

/// A table that is counted as free is not allocated.
#[test]
fn tables_with_wrong_reference_counts_are_not_allocated() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = with_entry(&directory, 0);
    patch(&path, &[0; 10], REFCOUNT_BLOCK);
    let before = fs::read(&path).expect("the file");
    let disk = open(&path, &options(false)).expect("an image");
    assert_eq!(disk.write(&at(0, 512), true, &mut &[7; 512][..]).err(), Some(Errno::IO));
    drop(disk);
    assert!(fs::read(&path).expect("the file") == before);
}
