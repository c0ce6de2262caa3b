//! A directory, mounted: what programs do with files.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::sync::Arc;

use common::{mount, paths, plain};
use ferry_fuse::{Cache, Options, Path};
use rustix::fs::OFlags;

fn dir(options: impl Fn(&mut Options)) -> Vec<(tempfile::TempDir, common::Mounted)> {
    let mounts = paths().into_iter().map(|path| {
        let tmp = tempfile::tempdir().unwrap();
        let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
        let mut chosen = plain(path);
        options(&mut chosen);
        let mounted = mount(Arc::new(source), chosen);
        (tmp, mounted)
    });
    mounts.collect()
}

#[test]
fn written_data_are_read_back() {
    for (tmp, mounted) in dir(|_| {}) {
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|i| i.to_le_bytes()[(i % 3) as usize]).collect();
        fs::write(mounted.path("new"), &bytes).unwrap();
        assert!(fs::read(tmp.path().join("new")).unwrap() == bytes);
        fs::write(tmp.path().join("old"), &bytes).unwrap();
        assert!(fs::read(mounted.path("old")).unwrap() == bytes);
        let mut file = fs::File::options().read(true).write(true).open(mounted.path("old")).unwrap();
        file.seek(SeekFrom::Start(1_000_000)).unwrap();
        file.write_all(b"in the middle").unwrap();
        file.sync_all().unwrap();
        let mut back = [0; 13];
        file.read_exact_at(&mut back, 1_000_000).unwrap();
        assert_eq!(&back, b"in the middle");
        file.set_len(5).unwrap();
        assert_eq!(fs::metadata(tmp.path().join("old")).unwrap().size(), 5);
        file.rewind().unwrap();
        let mut rest = Vec::new();
        file.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, bytes[..5]);
        drop(file);
        let stats = mounted.export().stats();
        assert!(stats.requests > 10 && stats.written_bytes >= 3_000_014, "{stats:?}");
        mounted.stop();
    }
}

#[test]
fn long_reads_are_spliced_with_the_right_data() {
    const LONG: usize = 512 << 10;
    const READS: u64 = 20;
    if paths().is_empty() {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
    let mounted = mount(Arc::new(source), Options { cache: Cache::None, ..plain(Path::Devfuse) });
    let bytes: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(tmp.path().join("file"), &bytes).unwrap();
    // Each read is one request.
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = fs::File::options().read(true).custom_flags(direct).open(mounted.path("file")).unwrap();
    let mut back = vec![0; LONG];
    // At pages' begins and elsewhere, whole, cut short by the end to a long and to a short rest, and at the end.
    for at in [0, LONG, 1, 4097, bytes.len() - 300_001, bytes.len() - 5, bytes.len()] {
        back.fill(0xee);
        let count = file.read_at(&mut back, at as u64).unwrap();
        let wanted = &bytes[at..bytes.len().min(at + LONG)];
        assert!(count == wanted.len() && back[..count] == *wanted, "{count} bytes at {at}");
    }
    let before = mounted.export().stats();
    for _ in 0..READS {
        assert_eq!(file.read_at(&mut back, 0).unwrap(), LONG);
    }
    let after = mounted.export().stats();
    // Copying takes three calls: for the request, the data and the reply. Another one puts the header into the pipe.
    assert!(after.system_calls - before.system_calls >= 4 * READS, "{before:?} {after:?}");
    assert!(after.read_bytes - before.read_bytes == READS * LONG as u64, "{before:?} {after:?}");
    drop(file);
    mounted.stop();
}

#[test]
fn names_come_go_and_change() {
    for (tmp, mounted) in dir(|_| {}) {
        fs::create_dir_all(mounted.path("a/b")).unwrap();
        fs::write(mounted.path("a/b/one"), "1").unwrap();
        fs::rename(mounted.path("a/b/one"), mounted.path("two")).unwrap();
        std::os::unix::fs::symlink("two", mounted.path("link")).unwrap();
        fs::hard_link(mounted.path("two"), mounted.path("a/three")).unwrap();
        assert_eq!(fs::read_to_string(mounted.path("link")).unwrap(), "1");
        assert_eq!(fs::metadata(mounted.path("two")).unwrap().nlink(), 2);
        for index in 0..500 {
            fs::write(mounted.path(&format!("a/b/file-{index}")), "").unwrap();
        }
        let mut names: Vec<_> = fs::read_dir(mounted.path("a/b")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 500);
        assert_eq!(fs::remove_dir(mounted.path("a/b")).unwrap_err().kind(), std::io::ErrorKind::DirectoryNotEmpty);
        fs::remove_dir_all(mounted.path("a")).unwrap();
        let mut left: Vec<_> = fs::read_dir(tmp.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["link", "two"]);
        assert_eq!(fs::metadata(mounted.path("gone")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        mounted.stop();
    }
}

#[test]
fn direct_and_synchronous_io_goes_through() {
    for cache in [Cache::None, Cache::Auto, Cache::Always] {
        for (tmp, mounted) in dir(|options| options.cache = cache) {
            let page = |byte: u8| {
                let mut memory = vec![byte; 3 * 4096];
                let start = memory.as_ptr().align_offset(4096);
                memory.drain(..start);
                memory.truncate(4096);
                memory
            };
            fs::write(tmp.path().join("f"), page(1)).unwrap();
            let flags = libc::O_DIRECT | libc::O_SYNC;
            let file = fs::File::options().read(true).write(true).custom_flags(flags).open(mounted.path("f")).unwrap();
            let mut memory = vec![0_u8; 3 * 4096];
            let start = memory.as_ptr().align_offset(4096);
            let aligned = &mut memory[start..start + 4096];
            file.read_exact_at(aligned, 0).unwrap();
            assert!(aligned.iter().all(|byte| *byte == 1));
            aligned.fill(2);
            file.write_all_at(aligned, 4096).unwrap();
            assert_eq!(fs::read(tmp.path().join("f")).unwrap(), [page(1), page(2)].concat());
            drop(file);
            mounted.stop();
        }
    }
}

#[test]
fn mapped_memory_is_the_file() {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    for cache in [Cache::None, Cache::Auto] {
        for (tmp, mounted) in dir(|options| options.cache = cache) {
            fs::write(tmp.path().join("f"), vec![7; 8192]).unwrap();
            let file = fs::File::options().read(true).write(true).open(mounted.path("f")).unwrap();
            // SAFETY: the mapping is used within this block only, and the file keeps its size.
            unsafe {
                let flags = ProtFlags::READ | ProtFlags::WRITE;
                let map = mmap(std::ptr::null_mut(), 8192, flags, MapFlags::SHARED, &file, 0).unwrap();
                let bytes = std::slice::from_raw_parts_mut(map.cast::<u8>(), 8192);
                assert!(bytes.iter().all(|byte| *byte == 7));
                bytes[5000] = 9;
                msync(map, 8192, MsyncFlags::SYNC).unwrap();
                assert_eq!(fs::read(tmp.path().join("f")).unwrap()[4999..5002], [7, 9, 7]);
                munmap(map, 8192).unwrap();
            }
            drop(file);
            mounted.stop();
        }
    }
}

#[test]
fn all_cpus_at_once() {
    for (tmp, mounted) in dir(|options| options.ring_depth = 2) {
        let cpus = std::thread::available_parallelism().unwrap().get();
        std::thread::scope(|scope| {
            for thread in 0..4 * cpus {
                let mounted = &mounted;
                scope.spawn(move || {
                    common::stay_on(thread % cpus);
                    let name = mounted.path(&format!("f{thread}"));
                    for round in 0..30_u8 {
                        let bytes = vec![round ^ u8::try_from(thread).unwrap(); 10_000 + thread];
                        fs::write(&name, &bytes).unwrap();
                        let mut back = Vec::new();
                        fs::File::open(&name).unwrap().read_to_end(&mut back).unwrap();
                        assert!(back == bytes);
                        assert_eq!(fs::metadata(&name).unwrap().size(), bytes.len() as u64);
                    }
                    fs::remove_file(&name).unwrap();
                });
            }
        });
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 0);
        mounted.stop();
    }
}

#[test]
fn passthrough_leaves_reads_and_writes_to_the_kernel() {
    for path in paths() {
        let tmp = tempfile::tempdir().unwrap();
        let source: Arc<dyn ferry_vfs::FileSystem> =
            Arc::new(ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap());
        let mounted = mount(source, Options { passthrough: None, ..plain(path) });
        let verdict = &mounted.export().explain().passthrough;
        assert!(verdict.used || verdict.reason.is_some());
        if !rustix::process::geteuid().is_root() {
            ferry_skip::skip!("passthrough needs root");
            return;
        }
        assert!(verdict.used, "{verdict:?}");
        let bytes = vec![3; 1 << 20];
        fs::write(mounted.path("f"), &bytes).unwrap();
        assert!(fs::read(mounted.path("f")).unwrap() == bytes && fs::read(tmp.path().join("f")).unwrap() == bytes);
        let stats = mounted.export().stats();
        assert_eq!((stats.read_bytes, stats.written_bytes), (0, 0), "the server sees no data");
        mounted.stop();
    }
}

/// Linux takes any success of a write from its page cache for the whole.
#[test]
fn writes_that_do_not_fit_fail_at_sync() {
    const ROOM: usize = 900 << 10;
    for path in paths() {
        for memfds in [false, true] {
            let options = ferry_mem::Options { size_bytes: Some(ROOM as u64), memfds, ..ferry_mem::Options::default() };
            let mounted =
                mount(Arc::new(ferry_mem::Tree::new(&options).unwrap()), Options { writeback: true, ..plain(path) });
            let file = File::create(mounted.path("f")).unwrap();
            // One request, of which most fits.
            file.write_all_at(&[7; 1 << 20], 0).unwrap();
            let told = file.sync_all().expect_err("not all of it fits");
            assert_eq!(told.raw_os_error(), Some(libc::ENOSPC), "{path:?}, memfds {memfds}: {told}");
            drop(file);
            let file = File::options().write(true).truncate(true).open(mounted.path("f")).unwrap();
            file.write_all_at(&[7; ROOM / 2], 0).unwrap();
            file.sync_all().expect("this fits");
            drop(file);
            mounted.stop();
        }
    }
}

/// A process in execve closes files while its /proc files are locked; its server must not read them.
#[test]
fn clients_that_begin_programs_are_served() {
    for (_, mounted) in dir(|options| options.cache = Cache::None) {
        let file = File::create(mounted.path("file")).unwrap();
        for _ in 0..100 {
            // Enough of them, for the reader to follow its client.
            for _ in 0..20 {
                file.write_all_at(&[1; 512], 0).unwrap();
            }
            // The program does not get the file, which is closed as it begins.
            assert!(std::process::Command::new("true").status().unwrap().success());
        }
        file.write_all_at(&[1; 512], 0).expect("the watchdog had nothing to end");
        mounted.stop();
    }
}
