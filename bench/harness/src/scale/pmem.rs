//! Persistent memory file systems with many files, and files with many extents.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ferry_mem::pmem::{self, Options, fsck};
use ferry_vfs::{Caller, CreateArgs, Data, FileSystem, FileType, Ino, IoRange, Name, OFlags, Seek, SetAttr};

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::Place;
use crate::noise::Noise;
use crate::tmpfs::Tmpfs;

/// Files of each directory, as a package manager or a mail server has them.
const FILES: u64 = 1000;
/// Room for the log of the most files; nothing of it is taken that nothing is written to.
const IMAGE_BYTES: u64 = 16 << 30;
const BLOCK_BYTES: u64 = 4096;
/// Places anywhere in a file, and how often each is read and data are searched from it.
const PLACES: u64 = 1000;
const ROUNDS: u64 = 10;
const MIB: f64 = 1024.0 * 1024.0;

const SIZES: &[u64] = &[1_000, 10_000, 100_000, 1_000_000];
const QUICK_MAX: u64 = 100_000;
const OF: &str = "files";

pub const CASES: &[Case] = &[
    Case {
        name: "files on pmem",
        of: OF,
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: &[
            Figure { name: "create one, and make all durable", unit: "us", growth_max: STRAIGHT },
            Figure { name: "check, for one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "mount, for one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "memory of one", unit: "bytes", growth_max: STRAIGHT },
        ],
        prepare: files_of_image,
    },
    Case {
        name: "memory of a mounted image of pmem whose files were removed",
        of: OF,
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: &[Figure { name: "", unit: "MiB", growth_max: None }],
        prepare: memory_of_removed,
    },
    Case {
        name: "extents of a file on pmem, a block each with a hole behind it",
        of: "extents",
        sizes: SIZES,
        quick_max: QUICK_MAX,
        figures: &[
            Figure { name: "write one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "read one, anywhere", unit: "us", growth_max: STRAIGHT },
            Figure { name: "find the data behind a hole", unit: "us", growth_max: STRAIGHT },
            Figure { name: "memory of one", unit: "bytes", growth_max: STRAIGHT },
            Figure { name: "mount, for one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "check, for one", unit: "us", growth_max: STRAIGHT },
            Figure { name: "truncate, for one", unit: "us", growth_max: STRAIGHT },
        ],
        prepare: extents,
    },
];

/// Makes an image with so many empty files; returns it, and the microseconds that each file took.
fn make(directory: &Path, files: u64) -> Result<(PathBuf, f64)> {
    let path = directory.join("image");
    let _ = std::fs::remove_file(&path);
    File::create(&path)?.set_len(IMAGE_BYTES)?;
    let source = pmem::open(&path, &Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() })?;
    let cx = Caller::default();
    let new = |kind: FileType| CreateArgs { mode: kind.as_raw_mode() | 0o755, umask: 0, rdev: 0 };
    let begin = Instant::now();
    for dir in 0..files.div_ceil(FILES) {
        let name = dir.to_string();
        let dir = source.mkdir(&cx, Ino::ROOT, Name::new(name.as_bytes())?, &new(FileType::Directory))?;
        for file in 0..FILES {
            let name = file.to_string();
            let made = source.mknod(&cx, dir.ino, Name::new(name.as_bytes())?, &new(FileType::RegularFile))?;
            source.forget(made.ino, 1);
        }
        source.forget(dir.ino, 1);
    }
    source.syncfs(&cx, Ino::ROOT)?;
    Ok((path, us_each(begin, files)))
}

fn files_of_image(place: &Place, files: u64) -> Result<Measure> {
    let place = place.clone();
    Ok(Box::new(move || measure_files(&place, files)))
}

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn measure_files(place: &Place, files: u64) -> Result<Vec<f64>> {
    let (path, create) = make(&place.directory, files)?;
    let begin = Instant::now();
    let report = fsck(&path, None, false)?;
    let check = us_each(begin, files);
    ensure!(report.is_clean(), "it is damaged: {:?}", report.findings);
    let begin = Instant::now();
    let source = pmem::open(&path, &Options::default())?;
    let mount = us_each(begin, files);
    drop(source);
    let memory = memory_bytes(place, &path)? / files as f64;
    Ok(vec![create, check, mount, memory])
}

/// The memory that a server of an image has, without that which it has of an empty one, in bytes; the image itself is not in it.
fn memory_bytes(place: &Place, image: &Path) -> Result<f64> {
    let empty = place.directory.join("empty");
    if !empty.exists() {
        File::create(&empty)?.set_len(IMAGE_BYTES)?;
        drop(pmem::open(&empty, &Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() })?);
    }
    let kib = |image: &Path| {
        let server = place.share(&format!("pmem:{}", image.display()), &[], "socket")?;
        let [kib] = crate::procfs::kib(server.pid(), ["RssAnon:"])?;
        anyhow::Ok(kib)
    };
    Ok((kib(image)? - kib(&empty)?).max(0.0) * 1024.0)
}

fn memory_of_removed(place: &Place, files: u64) -> Result<Measure> {
    let (path, _) = make(&place.directory, files)?;
    let source = pmem::open(&path, &Options::default())?;
    let cx = Caller::default();
    for dir in 0..files.div_ceil(FILES) {
        let name = dir.to_string();
        let name = Name::new(name.as_bytes())?;
        let found = source.lookup(&cx, Ino::ROOT, name).context("a directory is not there")?;
        for file in 0..FILES {
            source.unlink(&cx, found.ino, Name::new(file.to_string().as_bytes())?)?;
        }
        source.forget(found.ino, 1);
        source.rmdir(&cx, Ino::ROOT, name)?;
    }
    source.syncfs(&cx, Ino::ROOT)?;
    drop(source);
    let place = place.clone();
    Ok(Box::new(move || Ok(vec![memory_bytes(&place, &path)? / MIB])))
}

fn extents(place: &Place, extents: u64) -> Result<Measure> {
    // The data are as large as they are many, and no disk is to write them.
    let tmpfs = Tmpfs::mount(place.directory.join("host"))?;
    let place = place.clone();
    Ok(Box::new(move || measure_extents(&place, tmpfs.path(), extents)))
}

#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn measure_extents(place: &Place, directory: &Path, extents: u64) -> Result<Vec<f64>> {
    let path = directory.join("image");
    File::create(&path)?.set_len(IMAGE_BYTES)?;
    let source = pmem::open(&path, &Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() })?;
    let cx = Caller::default();
    let new = CreateArgs { mode: FileType::RegularFile.as_raw_mode() | 0o644, umask: 0, rdev: 0 };
    let name = Name::new(b"file")?;
    let ino = source.mknod(&cx, Ino::ROOT, name, &new)?.ino;
    let handle = source.open(&cx, ino, OFlags::RDWR)?;
    let at = |number: u64, len: u32| {
        let offset = number * 2 * BLOCK_BYTES;
        IoRange { ino, handle, offset, len, flags: OFlags::RDWR, clear_privileges: false, owner: None }
    };
    let len = u32::try_from(BLOCK_BYTES)?;
    let block = vec![7; usize::try_from(BLOCK_BYTES)?];
    let begin = Instant::now();
    for number in 0..extents {
        let written = source.write(&cx, &at(number, len), &mut &block[..])?;
        ensure!(matches!(written, Data::Bytes(bytes) if bytes == block.len()), "a block is not written: {written:?}");
    }
    let write = us_each(begin, extents);

    // The same number of blocks of each size, so that faults and the CPU's caches are no part of what grows.
    let (mut any, mut data) = (Noise(extents), Vec::new());
    let places: Vec<u64> = (0..PLACES).map(|_| any.below(extents - 1)).collect();
    let mut read_all = || {
        places.iter().try_for_each(|place| {
            data.clear();
            let found = source.read(&cx, &at(*place, len), &mut data)?;
            ensure!(matches!(found, Data::Bytes(_)) && data == block, "a block is not as it was written: {found:?}");
            Ok(())
        })
    };
    read_all()?;
    let begin = Instant::now();
    (0..ROUNDS).try_for_each(|_| read_all())?;
    let read = us_each(begin, PLACES * ROUNDS);
    let begin = Instant::now();
    for before in (0..ROUNDS).flat_map(|_| &places) {
        let found = source.lseek(&cx, ino, handle, (2 * before + 1) * BLOCK_BYTES, Seek::Data)?;
        ensure!(found == 2 * (before + 1) * BLOCK_BYTES, "data are found at {found}");
    }
    let seek = us_each(begin, PLACES * ROUNDS);
    source.release(&cx, ino, handle);
    source.forget(ino, 1);
    source.syncfs(&cx, Ino::ROOT)?;
    drop(source);

    let memory = memory_bytes(place, &path)? / extents as f64;
    let begin = Instant::now();
    let report = fsck(&path, None, false)?;
    let checked = us_each(begin, extents);
    ensure!(report.is_clean(), "it is damaged: {:?}", report.findings);
    let begin = Instant::now();
    let source = pmem::open(&path, &Options::default())?;
    let mounted = us_each(begin, extents);
    let ino = source.lookup(&cx, Ino::ROOT, name)?.ino;
    let begin = Instant::now();
    source.setattr(&cx, ino, None, &SetAttr { size: Some(0), ..SetAttr::default() })?;
    let truncated = us_each(begin, extents);
    source.forget(ino, 1);
    drop(source);
    std::fs::remove_file(&path)?;
    Ok(vec![write, read, seek, memory, mounted, checked, truncated])
}
