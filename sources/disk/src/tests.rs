use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use ferry_vfs::{BlockRange, Data, Errno};
use tempfile::TempDir;

use super::*;

const MIB: u64 = 1 << 20;

/// Creates a file of a MiB of sevens on a real disk, which supports holes.
fn raw(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("disk.raw");
    fs::write(&path, vec![7; 1 << 20]).expect("a file");
    path
}

fn directory() -> TempDir {
    tempfile::tempdir_in("/var/tmp").expect("a directory")
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).expect("the file").blocks() * 512
}

fn sentence(path: &Path, options: &Options) -> String {
    match open(path, options) {
        Ok(_) => panic!("{} can be opened", path.display()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn formats_are_never_guessed() {
    let directory = directory();
    let path = raw(&directory);
    assert_eq!(open(&path, &Options::default()).expect("raw").geometry().bytes, MIB);
    for (start, looks) in
        [(&b"QFI\xfb"[..], "qcow2"), (b"KDMV", "vmdk"), (b"conectix", "vpc"), (b"vhdxfile", "vhdx"), (b"QED\0", "qed")]
    {
        File::options().write(true).open(&path).and_then(|file| file.write_all_at(start, 0)).expect("a write");
        let text = sentence(&path, &Options::default());
        assert!(text.contains(&format!("begins like a {looks} image")), "{text}");
        // With the format raw it opens.
        open(&path, &Options { format: Some(Format::Raw), ..Options::default() }).expect("raw");
    }
}

#[test]
fn errors_name_the_mistake() {
    let directory = directory();
    let empty = directory.path().join("empty");
    File::create(&empty).expect("a file");
    let short = directory.path().join("short");
    fs::write(&short, [1; 511]).expect("a file");
    let fifo = directory.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    for (path, words) in [
        (directory.path().to_path_buf(), "neither a file nor a block device"),
        (fifo, "neither a file nor a block device"),
        (empty, "is empty"),
        (short, "has 511 bytes, and a disk at least 512"),
        (directory.path().join("missing"), "--resize 20G"),
    ] {
        let text = sentence(&path, &Options::default());
        assert!(text.contains(words) && text.contains(&*path.to_string_lossy()), "{text}");
    }
}

#[test]
fn a_writer_excludes_other_writers() {
    let directory = directory();
    let path = raw(&directory);
    let reading = Options { read_only: true, ..Options::default() };
    let writer = open(&path, &Options::default()).expect("the first");
    for options in [&Options::default(), &reading] {
        assert!(sentence(&path, options).contains("is in use by another process"));
    }
    drop(writer);
    let reader = open(&path, &reading).expect("a reader");
    let second = open(&path, &reading).expect("another reader");
    assert!(sentence(&path, &Options::default()).contains("is in use by another process"));
    drop((reader, second));
    open(&path, &Options::default()).expect("nobody else is there any more");
}

#[test]
fn aligned_transfers_bypass_the_page_cache() {
    let directory = directory();
    let path = raw(&directory);
    let disk = open(&path, &Options::default()).expect("a disk");
    let flags = |offset, bytes, alignment, durable| {
        let at = BlockRange { offset, bytes, alignment };
        match disk.write(&at, durable, &mut &[][..]).expect("a place") {
            Data::Extent(extent) => {
                assert_eq!(extent.offset, offset);
                rustix::fs::fcntl_getfl(&*extent.file).expect("its flags")
            }
            Data::Bytes(_) => panic!("raw disks move nothing themselves"),
        }
    };
    use ferry_vfs::OFlags;
    let is_direct = |flags: OFlags| flags.contains(OFlags::DIRECT);
    assert!(is_direct(flags(4096, 4096, 4096, false)));
    assert!(flags(4096, 4096, 4096, true).contains(OFlags::DSYNC | OFlags::DIRECT));
    assert!(!flags(4096, 4096, 4096, false).contains(OFlags::DSYNC));
    drop(disk);
    let cached = Options { cache: Some(Cache::Writeback), ..Options::default() };
    let disk = open(&path, &cached).expect("a disk");
    match disk.read(&BlockRange { offset: 0, bytes: 4096, alignment: 4096 }, &mut Vec::new()) {
        Ok(Data::Extent(extent)) => assert!(!extent.file.waits()),
        other => panic!("{other:?}"),
    }
}

/// A partial write through the page cache would read the block and later overwrite a concurrent direct write.
#[test]
fn unaligned_memory_is_written_directly_too() {
    let directory = directory();
    let path = raw(&directory);
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path).expect("the file");
    if sys::direct_alignment(&direct).expect("O_DIRECT can be used") >= 4096 {
        ferry_skip::skip!("this disk takes whole blocks only");
        return;
    }
    let disk = open(&path, &Options::default()).expect("a disk");
    let pages = || {
        let output =
            std::process::Command::new("fincore").args(["--noheadings", "--output", "PAGES"]).arg(&path).output();
        String::from_utf8(output.expect("fincore, of util-linux").stdout).expect("a number").trim().to_owned()
    };
    let file = File::open(&path).expect("the file");
    file.sync_all().expect("what raw() wrote is on the disk");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
    assert_eq!(pages(), "0");
    // Longer than what is copied at once, and of a length that it is no multiple of.
    let mut bytes: Vec<u8> = (0..600 << 10).map(|at: u32| at.to_le_bytes()[at as usize % 3]).collect();
    let start = 512;
    for (alignment, durable) in [(1, false), (256, true)] {
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        let at = BlockRange { offset: start as u64, bytes: (bytes.len() - start) as u64, alignment };
        assert!(disk.write_waits(&at) && !disk.write_waits(&BlockRange { alignment: 4096, ..at }));
        let written = disk.write(&at, durable, &mut &bytes[start..]).expect("a write");
        assert_eq!(written.bytes(), Some(bytes.len() - start));
        assert_eq!(pages(), "0", "nothing went through the page cache");
        let found = fs::read(&path).expect("the file");
        assert!(found[..start] == [7; 512] && found[start..bytes.len()] == bytes[start..]);
        assert!(found[bytes.len()..].iter().all(|byte| *byte == 7));
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice");
    }
    let short = BlockRange { offset: 0, bytes: 1024, alignment: 1 };
    assert_eq!(
        disk.write(&short, false, &mut &bytes[..1000]).err(),
        Some(Errno::FAULT),
        "a client that lost its memory"
    );
    let read = disk.read(&short, &mut Vec::new()).expect("a place");
    let Data::Extent(extent) = read else { panic!("{read:?}") };
    let flags = rustix::fs::fcntl_getfl(&*extent.file).expect("its flags");
    assert!(!flags.contains(ferry_vfs::OFlags::DIRECT), "reads may go through the page cache");
}

#[test]
fn discarded_and_zeroed_ranges() {
    let directory = directory();
    let path = raw(&directory);
    let disk = open(&path, &Options::default()).expect("a disk");
    assert!(disk.features().discard, "this file system cannot punch holes");
    let before = allocated(&path);
    disk.discard(0, 256 << 10).expect("a hole");
    let after = allocated(&path);
    assert!(after + (256 << 10) <= before, "{before} bytes before, {after} after");
    disk.write_zeroes(512 << 10, 64 << 10, true, false).expect("zeros");
    assert!(allocated(&path) + (64 << 10) <= after);
    let keeps = allocated(&path);
    disk.write_zeroes((768 << 10) + 512, 1024, false, true).expect("zeros");
    assert_eq!(allocated(&path), keeps);
    let bytes = fs::read(&path).expect("the file");
    assert_eq!(bytes.len() as u64, MIB);
    let zero = |at: usize| bytes[at] == 0;
    let (hole, zeros, middle) = (0..256 << 10, 512 << 10..576 << 10, (768 << 10) + 512..(768 << 10) + 1536);
    for at in 0..bytes.len() {
        assert_eq!(zero(at), hole.contains(&at) || zeros.contains(&at) || middle.contains(&at), "byte {at}");
    }
    drop(disk);
    let disk = open(&path, &Options { read_only: true, ..Options::default() }).expect("a disk");
    assert_eq!(disk.discard(0, 4096), Err(Errno::ROFS));
    assert_eq!(disk.write_zeroes(0, 4096, true, true), Err(Errno::ROFS));
    let at = BlockRange { offset: 0, bytes: 512, alignment: 512 };
    assert_eq!(disk.write(&at, false, &mut &[][..]).err(), Some(Errno::ROFS));
}

#[test]
fn a_file_may_grow_and_shrink_meanwhile() {
    let directory = directory();
    let path = raw(&directory);
    let disk = open(&path, &Options::default()).expect("a disk");
    assert_eq!(disk.refresh_geometry(), Ok(false));
    grow(&path, 3 * MIB + 5, &Options::default()).expect("the file grows while it is in use");
    assert_eq!((disk.refresh_geometry(), disk.geometry().bytes), (Ok(true), 3 * MIB + 512));
    grow(&path, 3 * MIB + 512, &Options::default()).expect("nothing to do");
    let error = grow(&path, MIB, &Options::default()).expect_err("a smaller file").to_string();
    assert!(error.contains("a disk is not made smaller"), "{error}");
    assert_eq!(disk.refresh_geometry(), Ok(false));
    File::options().write(true).open(&path).and_then(|file| file.set_len(1000)).expect("a shorter file");
    assert_eq!((disk.refresh_geometry(), disk.geometry().bytes), (Ok(true), 512));
    assert_eq!(disk.refresh_geometry(), Ok(false));
    let fresh = directory.path().join("fresh");
    grow(&fresh, 2 * MIB, &Options::default()).expect("a new file");
    assert_eq!(open(&fresh, &Options::default()).expect("a disk").geometry().bytes, 2 * MIB);
}

#[test]
fn a_missing_file_is_created_with_a_size_and_removed_on_failure() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let sized = |bytes| Options { grow_to: Some(bytes), ..Options::default() };
    assert!(open(&at("a"), &Options::default()).is_err() && !at("a").exists());
    assert!(open(&at("a"), &Options { read_only: true, ..sized(MIB) }).is_err() && !at("a").exists());
    assert_eq!(open(&at("a"), &sized(MIB)).expect("a new disk").geometry().bytes, MIB);
    // A larger one stays unchanged, for repeated starts.
    assert_eq!(open(&at("a"), &sized(4096)).expect("the same").geometry().bytes, MIB);
    for wrong in [0, u64::MAX] {
        assert!(open(&at("b"), &sized(wrong)).is_err() && !at("b").exists(), "{wrong}");
    }
    assert!(grow(&at("b"), u64::MAX, &Options::default()).is_err() && !at("b").exists());
}

#[cfg(feature = "qcow2")]
pub(crate) mod images {
    use super::*;

    /// Creates an image as `qemu-img create` does: header, refcount table and block, L1 table, one cluster each.
    pub(crate) fn create(path: &Path, bytes: u64, backing: Option<(&str, &str)>) {
        const CLUSTER: u64 = 64 << 10;
        let file = File::create_new(path).expect("a file");
        let l1_entries = u32::try_from(bytes.div_ceil(CLUSTER * 8192)).expect("a small disk");
        let (name, format) = backing.unwrap_or_default();
        let mut extensions = Vec::new();
        if backing.is_some() {
            extensions.extend([&0xe279_2aca_u32.to_be_bytes()[..], &[0, 0, 0, format.len().to_le_bytes()[0]]].concat());
            extensions.extend(format.as_bytes());
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        }
        extensions.extend([0; 8]);
        let name_offset = if backing.is_some() { 104 + extensions.len() as u64 } else { 0 };
        let mut header = b"QFI\xfb\0\0\0\x03".to_vec();
        header.extend(name_offset.to_be_bytes());
        header.extend(u32::try_from(name.len()).expect("a short name").to_be_bytes());
        header.extend(16_u32.to_be_bytes());
        header.extend(bytes.to_be_bytes());
        header.extend([0; 4]);
        header.extend(l1_entries.to_be_bytes());
        header.extend((3 * CLUSTER).to_be_bytes());
        header.extend(CLUSTER.to_be_bytes());
        header.extend(1_u32.to_be_bytes());
        header.extend([0; 36]);
        header.extend(4_u32.to_be_bytes());
        header.extend(104_u32.to_be_bytes());
        header.extend(&extensions);
        header.extend(name.as_bytes());
        file.write_all_at(&header, 0).expect("a header");
        file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER).expect("a refcount table");
        file.write_all_at(&[0, 1, 0, 1, 0, 1, 0, 1], 2 * CLUSTER).expect("a refcount block");
        file.set_len(3 * CLUSTER + u64::from(l1_entries) * 8).expect("an L1 table");
    }

    fn qcow2() -> Options {
        Options { format: Some(Format::Qcow2), ..Options::default() }
    }

    fn read(disk: &dyn Disk, offset: u64, bytes: u64) -> Vec<u8> {
        let mut out = Vec::new();
        let data = disk.read(&BlockRange { offset, bytes, alignment: 1 }, &mut out).expect("a read");
        assert_eq!(data.bytes(), usize::try_from(bytes).ok());
        out
    }

    fn write(disk: &dyn Disk, offset: u64, bytes: &[u8]) {
        let at = BlockRange { offset, bytes: bytes.len() as u64, alignment: 1 };
        let written = disk.write(&at, true, &mut &bytes[..]).expect("a write");
        assert_eq!(written.bytes(), Some(bytes.len()));
    }

    #[test]
    fn images_are_read_written_discarded_and_grown() {
        let directory = directory();
        let path = directory.path().join("disk.qcow2");
        create(&path, 8 * MIB, None);
        let disk = open(&path, &qcow2()).expect("an image");
        assert_eq!((disk.geometry().bytes, disk.features().slow), (8 * MIB, true));
        assert_eq!(read(&*disk, 0, 4096), vec![0; 4096]);
        write(&*disk, 65536 - 512, &[5; 1024]);
        write(&*disk, MIB, &vec![6; 1 << 20]);
        disk.discard(MIB, 512 << 10).expect("a discard");
        disk.write_zeroes(MIB + (512 << 10), 1000 * 512, true, false).expect("zeros");
        disk.write_zeroes(65536, 512, false, true).expect("zeros");
        drop(disk);
        grow(&path, 16 * MIB, &qcow2()).expect("a larger image");
        assert!(grow(&path, MIB, &qcow2()).is_err_and(|error| error.to_string().contains("not made smaller")));
        let disk = open(&path, &qcow2()).expect("an image");
        assert_eq!(disk.geometry().bytes, 16 * MIB);
        assert_eq!(read(&*disk, 65536 - 512, 1024), [vec![5; 512], vec![0; 512]].concat());
        assert_eq!(read(&*disk, MIB, 4096), vec![0; 4096]);
        assert_eq!(read(&*disk, 2 * MIB - 24 * 512, 24 * 512), vec![6; 24 * 512]);
        assert!(sentence(&path, &qcow2()).contains("is in use"));
        assert!(grow(&path, 32 * MIB, &qcow2()).is_err(), "not while it is in use");
    }

    /// Concurrent writes and zeroing in one cluster must not overwrite each other.
    #[test]
    fn concurrent_changes_in_a_cluster_keep_both() {
        const CLUSTER: u64 = 64 << 10;
        let directory = directory();
        let path = directory.path().join("disk.qcow2");
        create(&path, 64 * MIB, None);
        for cache in [Cache::Writeback, Cache::None] {
            let disk = open(&path, &Options { cache: Some(cache), ..qcow2() }).expect("an image");
            let both = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                let zeroes = scope.spawn(|| {
                    for cluster in 0..512 {
                        both.wait();
                        disk.write_zeroes(cluster * CLUSTER + 4096, CLUSTER - 4096, false, false).expect("zeros");
                    }
                });
                for cluster in 0..512 {
                    both.wait();
                    write(&*disk, cluster * CLUSTER + 512, &[7; 1024]);
                }
                zeroes.join().expect("zeros are written");
            });
            for cluster in 0..512 {
                let found = read(&*disk, cluster * CLUSTER, CLUSTER);
                assert!(found[512..1536] == [7; 1024], "{cache:?}: cluster {cluster}");
                assert!(found[4096..].iter().all(|byte| *byte == 0), "{cache:?}: cluster {cluster}");
            }
            disk.discard(0, 64 * MIB).expect("a discard");
        }
    }

    #[test]
    fn backing_files_are_opened_only_in_their_directory() {
        let directory = directory();
        let allowed = directory.path().join("base");
        fs::create_dir(&allowed).expect("a directory");
        fs::write(allowed.join("base.raw"), vec![3; 1 << 20]).expect("a file");
        fs::write(directory.path().join("secret"), vec![4; 1 << 20]).expect("a file");
        std::os::unix::fs::symlink("../secret", allowed.join("link")).expect("a link");
        let image = |name: &str, backing: &str, format: &str| {
            let path = directory.path().join(name);
            create(&path, MIB, Some((backing, format)));
            path
        };
        let below = Options { backing_dir: Some(allowed.clone()), ..qcow2() };
        let good = image("good", "base/base.raw", "raw");
        assert!(sentence(&good, &qcow2()).contains("none is named"));
        let disk = open(&good, &below).expect("an image with a backing file");
        assert_eq!(read(&*disk, 4096, 512), vec![3; 512]);
        write(&*disk, 4096, &[8; 512]);
        assert_eq!(read(&*disk, 4096, 1024), [vec![8; 512], vec![3; 512]].concat());
        drop(disk);
        assert_eq!(fs::read(allowed.join("base.raw")).expect("the base"), vec![3; 1 << 20]);
        for (name, backing, format, words) in [
            ("outside", "secret", "raw", "outside the directory"),
            ("absolute", "/etc/passwd", "raw", "outside the directory"),
            ("up", "base/../secret", "raw", "outside the directory"),
            ("linked", "base/link", "raw", "outside the directory"),
            ("vmdk", "base/base.raw", "vmdk", "neither raw nor qcow2"),
            ("unsaid", "base/base.raw", "", "neither raw nor qcow2"),
            ("directory", "base", "raw", "not a regular file"),
            ("json", "json:{\"driver\":\"file\"}", "raw", "cannot open"),
        ] {
            let text = sentence(&image(name, backing, format), &below);
            assert!(text.contains(words), "{name}: {text}");
        }
        let looped = allowed.join("loop");
        create(&looped, MIB, Some(("loop", "qcow2")));
        let text = sentence(&looped, &Options { read_only: true, ..below.clone() });
        assert!(text.contains("too long, or a loop"), "{text}");
    }
}
