//! Persistent memory file systems with many files.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ferry_mem::pmem::{self, Options, fsck};
use ferry_vfs::{Caller, CreateArgs, FileSystem, FileType, Ino, Name};

use super::{Case, Measure, resident_mib};

/// Files of each directory, as a package manager or a mail server has them.
const FILES: u64 = 1000;
/// Room for the log of the most files; nothing of it is taken that nothing is written to.
const IMAGE_BYTES: u64 = 16 << 30;

const SIZES: &[u64] = &[1_000, 10_000, 100_000, 1_000_000];
const OF: &str = "files";

pub const CASES: &[Case] = &[
    Case { name: "creating a file on pmem and making all durable", of: OF, sizes: SIZES, unit: "us", prepare: create },
    Case { name: "checking an image of pmem", of: OF, sizes: SIZES, unit: "ms", prepare: check },
    Case { name: "mounting an image of pmem", of: OF, sizes: SIZES, unit: "ms", prepare: mount },
    Case { name: "memory of a mounted image of pmem", of: OF, sizes: SIZES, unit: "MiB", prepare: memory },
    Case {
        name: "memory of a mounted image of pmem whose files were removed",
        of: OF,
        sizes: SIZES,
        unit: "MiB",
        prepare: memory_of_removed,
    },
];

/// Makes an image with so many empty files; returns it, and the microseconds that each file took.
fn make(folder: &Path, files: u64) -> Result<(PathBuf, f64)> {
    let path = folder.join("image");
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
    #[allow(clippy::cast_precision_loss, reason = "there are not so many")]
    let us = begin.elapsed().as_secs_f64() * 1e6 / files as f64;
    Ok((path, us))
}

fn create(folder: &Path, files: u64) -> Result<Measure> {
    let folder = folder.to_owned();
    Ok(Box::new(move || Ok(make(&folder, files)?.1)))
}

fn check(folder: &Path, files: u64) -> Result<Measure> {
    let (path, _) = make(folder, files)?;
    Ok(Box::new(move || {
        let begin = Instant::now();
        let report = fsck(&path, None, false)?;
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        ensure!(report.is_clean(), "it is damaged: {:?}", report.findings);
        Ok(ms)
    }))
}

fn mount(folder: &Path, files: u64) -> Result<Measure> {
    let (path, _) = make(folder, files)?;
    Ok(Box::new(move || {
        let begin = Instant::now();
        let source = pmem::open(&path, &Options::default())?;
        let ms = begin.elapsed().as_secs_f64() * 1e3;
        drop(source);
        Ok(ms)
    }))
}

fn memory(folder: &Path, files: u64) -> Result<Measure> {
    let (path, _) = make(folder, files)?;
    Ok(Box::new(move || {
        let before = resident_mib()?;
        let source = pmem::open(&path, &Options::default())?;
        let after = resident_mib()?;
        drop(source);
        Ok((after - before).max(0.0))
    }))
}

fn memory_of_removed(folder: &Path, files: u64) -> Result<Measure> {
    let (path, _) = make(folder, files)?;
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
    Ok(Box::new(move || {
        let before = resident_mib()?;
        let source = pmem::open(&path, &Options::default())?;
        let after = resident_mib()?;
        drop(source);
        Ok((after - before).max(0.0))
    }))
}
