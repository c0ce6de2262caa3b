//! kill -9: a child process works on an image and reports what was acknowledged. It is killed at random moments,
//! repeatedly on the same image, and everything acknowledged must persist.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test fails by panicking")]

use crate::pmem_common;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferry_mem::pmem::{Options, PMem, fsck, open};
use ferry_vfs::{FileSystem, Ino, RenameFlags};
use pmem_common::{Random, close, cx, get_all, name, put, walk};

/// The environment variable with the image's path for the child; without it, the child's test does nothing.
const IMAGE: &str = "FERRY_TEST_PMEM_IMAGE";
const SEED: &str = "FERRY_TEST_PMEM_SEED";
const IMAGE_BYTES: u64 = 16 << 20;
const FILES: u64 = 40;

/// Returns the contents of version `version` of a file: its number, repeated.
fn contents(version: u64) -> Vec<u8> {
    let words = 1 + version * 37 % 5000;
    (0..words).flat_map(|_| version.to_le_bytes()).collect()
}

/// Replaces files as programs do, by a new file that is synced and renamed; reports each durable replacement.
fn work(fs: &PMem, random: &mut Random) -> ferry_vfs::Result<()> {
    let mut out = std::io::stdout().lock();
    for count in 0.. {
        let (file, version) = (random.below(FILES), random.next() >> 8);
        let fresh = format!("new{count}");
        let (ino, handle) = put(fs, Ino::ROOT, fresh.as_bytes(), 0, &contents(version))?;
        assert!(fs.fsync(&cx(), ino, handle, false)?.is_none());
        close(fs, ino, handle);
        let target = format!("{file}");
        // Reported before and after the rename: in between, both versions are correct.
        writeln!(out, "begin {file} {version}").unwrap();
        let (from, to) = ((Ino::ROOT, name(fresh.as_bytes())), (Ino::ROOT, name(target.as_bytes())));
        fs.rename(&cx(), from, to, RenameFlags::empty())?;
        if random.below(4) == 0 {
            fs.syncfs(&cx(), Ino::ROOT)?;
            writeln!(out, "durable").unwrap();
        }
        out.flush().unwrap();
    }
    Ok(())
}

/// The child process.
#[test]
fn child() {
    let (Ok(image), Ok(seed)) = (std::env::var(IMAGE), std::env::var(SEED)) else { return };
    let fs =
        open(Path::new(&image), &Options { commit: Some(Duration::from_millis(3)), ..Options::default() }).unwrap();
    let mut random = Random::new(seed.parse().unwrap());
    panic!("the work ended: {:?}", work(&fs, &mut random));
}

/// The possible contents of each file: the last acknowledged version (`None`: no file), and those begun since.
type Known = BTreeMap<u64, Vec<Option<u64>>>;

fn follow(line: &str, known: &mut Known) {
    // The test harness prints other lines.
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["begin", file, version] => {
            if let (Ok(file), Ok(version)) = (file.parse(), version.parse()) {
                known.entry(file).or_insert_with(|| vec![None]).push(Some(version));
            }
        }
        ["durable"] => known.values_mut().for_each(|versions| drop(versions.drain(..versions.len() - 1))),
        _ => {}
    }
}

fn kill_once(image: &Path, seed: u64, after: Duration, known: &mut Known) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pmem_kill::child", "--nocapture"])
        .env(IMAGE, image)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let output = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut lines = Vec::new();
        // A truncated line is the last one.
        for line in BufReader::new(output).lines() {
            lines.push(line.unwrap());
        }
        lines
    });
    std::thread::sleep(after);
    child.kill().unwrap();
    assert!(!child.wait().unwrap().success());
    reader.join().unwrap().iter().for_each(|line| follow(line, known));
}

fn kill_loop(time: Duration, seed: u64) {
    println!("seed {seed}");
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    drop(open(&image, &Options { size_bytes: Some(IMAGE_BYTES), ..Options::default() }).unwrap());
    let mut random = Random::new(seed);
    let mut known = Known::new();
    let (end, mut kills) = (Instant::now() + time, 0);
    while Instant::now() < end {
        let after = Duration::from_millis(30 + random.below(150));
        kill_once(&image, random.next(), after, &mut known);
        kills += 1;
        let report = fsck(&image, None, false).unwrap();
        assert!(report.is_clean(), "kill {kills}: {report:?}");
        let fs = open(&image, &Options::default()).unwrap();
        let world = walk(&fs);
        for (file, versions) in &mut known {
            let path = format!("/{file}");
            let version = world.get(path.as_bytes()).map(|seen| {
                let version = u64::from_le_bytes(seen.bytes[..8].try_into().unwrap());
                assert!(*seen.bytes == contents(version), "kill {kills}: {path} is not a complete version");
                version
            });
            assert!(versions.contains(&version), "kill {kills}: {path} is {version:?}, none of {versions:?}");
            *versions = vec![version];
        }
        for file in world.keys().filter(|path| path.starts_with(b"/new")) {
            fs.unlink(&cx(), Ino::ROOT, name(&file[1..])).unwrap();
        }
        if let Some((file, _)) = known.iter().find(|(_, versions)| versions[0].is_some()) {
            assert!(!get_all(&fs, Ino::ROOT, file.to_string().as_bytes()).is_empty());
        }
    }
    let files = known.values().filter(|versions| versions[0].is_some()).count();
    println!("{kills} kills, {files} files");
    assert!(kills >= 3 && files > 3, "{kills} kills, {files} files");
}

#[test]
fn acknowledged_changes_survive_kill_9() {
    kill_loop(Duration::from_secs(4), 5);
}

#[test]
#[ignore = "takes five minutes"]
fn acknowledged_changes_survive_many_kills() {
    kill_loop(Duration::from_secs(300), 6);
}
