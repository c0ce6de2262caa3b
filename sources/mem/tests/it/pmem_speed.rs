//! How fast a persistent image is, beside plain files of the file system that the image is on, by the same program:
//!
//! ```text
//! cargo test --release -p ferry-mem --test it pmem_speed -- --ignored --nocapture --test-threads=1
//! ```
//!
//! `FERRY_TEST_DIR` says where; the default is the directory for temporary files.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a test fails by panicking"
)]

use crate::pmem_common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_mem::pmem::{Options, PMem, fsck, open};
use ferry_vfs::{CreateArgs, FileSystem, Ino};
use pmem_common::{Random, at, close, cx, name, put};

const IMAGE_BYTES: u64 = 1 << 30;
const FILE_BYTES: u64 = 32 << 20;
const WRITE_BYTES: u64 = 4096;
const TIME: Duration = Duration::from_secs(4);

fn directory() -> tempfile::TempDir {
    let parent = std::env::var_os("FERRY_TEST_DIR").map_or_else(std::env::temp_dir, Into::into);
    tempfile::tempdir_in(parent).unwrap()
}

fn image(dir: &Path) -> PMem {
    open(&dir.join("image"), &Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() }).unwrap()
}

/// Writes blocks at random places by so many threads for a while; returns how many writes there were a second.
fn rate(threads: u64, write: impl Fn(u64, u64) + Sync) -> f64 {
    let (done, start) = (AtomicU64::new(0), Instant::now());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (done, write) = (&done, &write);
            scope.spawn(move || {
                let mut random = Random::new(thread + 1);
                while start.elapsed() < TIME {
                    write(thread, random.below(FILE_BYTES / WRITE_BYTES) * WRITE_BYTES);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    done.into_inner() as f64 / start.elapsed().as_secs_f64()
}

fn random_writes(sync: bool, what: &str) {
    for threads in [1, 4] {
        let dir = directory();
        let fs = image(dir.path());
        let files: Vec<_> = (0..threads)
            .map(|thread| {
                put(&fs, Ino::ROOT, format!("{thread}").as_bytes(), 0, &vec![1; FILE_BYTES as usize]).unwrap()
            })
            .collect();
        fs.syncfs(&cx(), Ino::ROOT).unwrap();
        let block = [7; WRITE_BYTES as usize];
        let pmem = rate(threads, |thread, offset| {
            let (ino, handle) = files[thread as usize];
            assert!(fs.write(&cx(), &at(ino, handle, offset, block.len()), &mut &block[..]).is_ok());
            if sync {
                assert!(fs.fsync(&cx(), ino, handle, false).is_ok());
            }
        });
        files.into_iter().for_each(|(ino, handle)| close(&fs, ino, handle));
        drop(fs);
        let plain: Vec<File> = (0..threads)
            .map(|thread| {
                let path = dir.path().join(format!("plain{thread}"));
                std::fs::write(&path, vec![1; FILE_BYTES as usize]).unwrap();
                let file = File::options().write(true).open(path).unwrap();
                file.sync_all().unwrap();
                file
            })
            .collect();
        let host = rate(threads, |thread, offset| {
            plain[thread as usize].write_all_at(&block, offset).unwrap();
            if sync {
                plain[thread as usize].sync_all().unwrap();
            }
        });
        println!("{what}, {threads} threads: {pmem:.0}/s, plain files {host:.0}/s");
    }
}

#[test]
#[ignore = "measures"]
fn random_4k_writes() {
    random_writes(false, "4 KiB random writes");
}

#[test]
#[ignore = "measures"]
fn random_4k_writes_with_fsync() {
    random_writes(true, "4 KiB random writes with fsync");
}

#[test]
#[ignore = "measures"]
fn mounting_100_000_files() {
    const FILES: u64 = 100_000;
    let dir = directory();
    let fs = image(dir.path());
    let start = Instant::now();
    for index in 0..FILES {
        if index % 1000 == 0 {
            fs.mkdir(
                &cx(),
                Ino::ROOT,
                name(format!("{}", index / 1000).as_bytes()),
                &CreateArgs { mode: 0o755, ..CreateArgs::default() },
            )
            .unwrap();
        }
        let parent = fs.lookup(&cx(), Ino::ROOT, name(format!("{}", index / 1000).as_bytes())).unwrap().ino;
        let (ino, handle) = put(&fs, parent, format!("{index}").as_bytes(), 0, b"something").unwrap();
        close(&fs, ino, handle);
    }
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    println!("{FILES} files made in {:?}", start.elapsed());
    drop(fs);
    // What was made since the last snapshot is replayed record by record; the mount after that reads a snapshot.
    for what in ["log", "snapshot"] {
        let start = Instant::now();
        let records = fsck(&dir.path().join("image"), None, false).unwrap().records;
        let check = start.elapsed();
        let start = Instant::now();
        let fs = image(dir.path());
        println!("mount of {FILES} files from a {what} of {records} records: {:?}; fsck: {check:?}", start.elapsed());
        drop(fs);
    }
}
