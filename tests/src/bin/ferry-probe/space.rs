//! Space within files: holes, fallocate, copies, sizes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, seek};

use crate::Check;
use crate::files::on_tmpfs;
use crate::sys::errno;

pub const CHECKS: &[Check] = &[
    ("fallocate", fallocate_modes),
    ("holes", holes),
    ("copy-file-range", copy),
    ("large-offsets", large_offsets),
    ("truncate", truncate),
    ("transfer-sizes", transfer_sizes),
    ("sendfile-and-splice", sendfile_and_splice),
];

fn new(dir: &Path, name: &str) -> File {
    File::options().read(true).write(true).create_new(true).open(dir.join(name)).unwrap()
}

fn fallocate_modes(dir: &Path) {
    let file = new(dir, "file");
    fallocate(&file, FallocateFlags::empty(), 0, 100_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    assert!(file.metadata().unwrap().blocks() * 512 >= 100_000);
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 300_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 100_000);
    assert!(file.metadata().unwrap().blocks() * 512 >= 300_000);
    file.write_all_at(&[1; 100_000], 0).unwrap();
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 5000, 20_000).unwrap();
    let bytes = fs::read(dir.join("file")).unwrap();
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == u8::from(!(5000..25_000).contains(&at))));
    assert_eq!(errno(fallocate(&file, FallocateFlags::PUNCH_HOLE, 0, 4096)), libc::EOPNOTSUPP);
    if !on_tmpfs(dir) {
        fallocate(&file, FallocateFlags::ZERO_RANGE, 50_000, 100_000).unwrap();
        let bytes = fs::read(dir.join("file")).unwrap();
        assert!(bytes.len() == 150_000 && bytes[49_999] == 1 && bytes[50_000..].iter().all(|&byte| byte == 0));
    }
    assert_eq!(errno(fallocate(&file, FallocateFlags::empty(), 0, 0)), libc::EINVAL);
    let read_only = File::open(dir.join("file")).unwrap();
    assert_eq!(errno(fallocate(&read_only, FallocateFlags::empty(), 0, 10)), libc::EBADF);
}

fn holes(dir: &Path) {
    let file = new(dir, "file");
    file.set_len(10 << 20).unwrap();
    file.write_all_at(&[1; 4096], 1 << 20).unwrap();
    file.write_all_at(&[1; 4096], 5 << 20).unwrap();
    file.sync_all().unwrap();
    let find = |at| seek(&file, at).map_err(std::io::Error::from);
    assert_eq!(find(SeekFrom::Data(0)).unwrap(), 1 << 20);
    assert_eq!(find(SeekFrom::Hole(1 << 20)).unwrap(), (1 << 20) + 4096);
    assert_eq!(find(SeekFrom::Data((1 << 20) + 4096)).unwrap(), 5 << 20);
    assert_eq!(find(SeekFrom::Hole(0)).unwrap(), 0);
    assert_eq!(errno(find(SeekFrom::Data((5 << 20) + 4096))), libc::ENXIO);
    assert_eq!(find(SeekFrom::Hole((10 << 20) - 1)).unwrap(), (10 << 20) - 1);
    assert_eq!(errno(find(SeekFrom::Hole(10 << 20))), libc::ENXIO);
    assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20);
}

fn copy(dir: &Path) {
    let (from, to) = (new(dir, "from"), new(dir, "to"));
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    from.write_all_at(&bytes, 0).unwrap();
    let (mut at, mut out) = (1000, 500);
    loop {
        let count = copy_file_range(&from, Some(&mut at), &to, Some(&mut out), 2_500_000).unwrap();
        if count == 0 {
            break;
        }
    }
    assert_eq!((at, out), (3_000_000, 2_999_500));
    let copied = fs::read(dir.join("to")).unwrap();
    assert!(copied[..500] == [0; 500] && copied[500..] == bytes[1000..]);
    // Within one file, not overlapping; overlapping is refused.
    let (mut at, mut out) = (0, 4_000_000);
    assert_eq!(copy_file_range(&from, Some(&mut at), &from, Some(&mut out), 100).unwrap(), 100);
    let mut part = [0; 100];
    from.read_exact_at(&mut part, 4_000_000).unwrap();
    assert_eq!(part, bytes[..100]);
    let (mut at, mut out) = (0, 50);
    assert_eq!(errno(copy_file_range(&from, Some(&mut at), &from, Some(&mut out), 100)), libc::EINVAL);
    // What was written and not synced is copied too.
    from.write_all_at(b"fresh", 0).unwrap();
    let (mut at, mut out) = (0, 0);
    copy_file_range(&from, Some(&mut at), &to, Some(&mut out), 5).unwrap();
    assert_eq!(&fs::read(dir.join("to")).unwrap()[..5], b"fresh");
}

fn large_offsets(dir: &Path) {
    let file = new(dir, "file");
    for at in [(1_u64 << 31) - 3, (1 << 32) - 3, 1 << 40] {
        file.write_all_at(b"across", at).unwrap();
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, at).unwrap();
        assert_eq!(&bytes, b"across");
        assert_eq!(file.metadata().unwrap().len(), at + 6);
    }
    assert!(file.write_at(b"x", i64::MAX as u64).is_err());
    file.set_len(0).unwrap();
}

fn truncate(dir: &Path) {
    let path = dir.join("file");
    let file = new(dir, "file");
    file.write_all_at(&[1; 10_000], 0).unwrap();
    for len in [5000, 0, 1, 4096, 4097, 100_000, 10] {
        file.set_len(len).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), len);
        assert_eq!(fs::read(&path).unwrap().len() as u64, len);
    }
    assert_eq!(fs::read(&path).unwrap(), [0; 10]);
    crate::sys::truncate(&path, 3).unwrap();
    assert_eq!(fs::read(&path).unwrap(), [0; 3]);
}

/// Reads and writes of many sizes, around those where requests are split.
fn transfer_sizes(dir: &Path) {
    let mut sizes = vec![1, 2, 511, 4095, 4096, 4097, 65_535, 131_072, 131_073];
    sizes.extend([(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 17]);
    for (number, size) in sizes.into_iter().enumerate() {
        let name = format!("file{number}");
        let file = new(dir, &name);
        let bytes: Vec<u8> = (0..size).map(|at: usize| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        file.write_all_at(&bytes, 13).unwrap();
        let mut back = vec![0; size];
        file.read_exact_at(&mut back, 13).unwrap();
        assert!(back == bytes, "{size} bytes");
        drop(file);
        assert!(fs::read(dir.join(&name)).unwrap()[13..] == bytes, "{size} bytes, opened again");
    }
}

fn sendfile_and_splice(dir: &Path) {
    let (from, to) = (new(dir, "from"), new(dir, "to"));
    let bytes: Vec<u8> = (0..200_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    from.write_all_at(&bytes, 0).unwrap();
    let mut at = 100;
    let mut left = 150_000;
    while left > 0 {
        left -= rustix::fs::sendfile(&to, &from, Some(&mut at), left).unwrap();
    }
    assert!(fs::read(dir.join("to")).unwrap() == bytes[100..150_100]);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let flags = rustix::pipe::SpliceFlags::empty();
    let (mut input, mut output) = (0, 150_000);
    let count = rustix::pipe::splice(&from, Some(&mut input), &writer, None, 50_000, flags).unwrap();
    let mut left = count;
    while left > 0 {
        left -= rustix::pipe::splice(&reader, None, &to, Some(&mut output), left, flags).unwrap();
    }
    assert!(fs::read(dir.join("to")).unwrap()[150_000..] == bytes[..count]);
}
