//! Images of trees with many files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_driver::walk::Walk;

use super::case::{Case, Figure, Measure, STRAIGHT, us_each};
use super::place::Place;
use crate::noise::Noise;
use crate::procfs::kib;
use crate::tmpfs::{Tmpfs, file_name};

/// Files of each directory.
const DIR_FILES: u64 = 1000;
/// One of so many files has content, which differs from all others'.
const CONTENT_EVERY: u64 = 10;
const CONTENT_BYTES: usize = 200;
/// How often it is looked at the memory of a build.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

pub const CASES: &[Case] = &[Case {
    name: "an image, one of ten files with 200 bytes",
    of: "files",
    sizes: &[1_000, 10_000, 100_000, 1_000_000],
    quick_max: 100_000,
    figures: &[
        Figure { name: "build, for one file", unit: "us", growth_max: STRAIGHT },
        Figure { name: "most memory of the build, for one file", unit: "bytes", growth_max: STRAIGHT },
        Figure { name: "serve, until it listens, for one file", unit: "us", growth_max: STRAIGHT },
        Figure { name: "walk over one file", unit: "us", growth_max: STRAIGHT },
        Figure { name: "fsck, for one file", unit: "us", growth_max: STRAIGHT },
        Figure { name: "du, for one file", unit: "us", growth_max: STRAIGHT },
        Figure { name: "gc, for one file", unit: "us", growth_max: STRAIGHT },
    ],
    prepare,
}];

fn prepare(place: &Place, files: u64) -> Result<Measure> {
    let tmpfs = Tmpfs::mount(place.directory.join("host"))?;
    let mut noise = Noise(7);
    std::fs::create_dir(tmpfs.path().join("tree"))?;
    for directory in 0..files.div_ceil(DIR_FILES) {
        let directory = tmpfs.make_files(&format!("tree/d{directory}"), DIR_FILES)?;
        let full = (0..DIR_FILES).step_by(usize::try_from(CONTENT_EVERY)?);
        full.into_iter()
            .try_for_each(|file| std::fs::write(directory.join(file_name(file)), noise.bytes(CONTENT_BYTES)))?;
    }
    let place = place.clone();
    Ok(Box::new(move || measure(&place, &tmpfs, files)))
}

fn measure(place: &Place, tmpfs: &Tmpfs, files: u64) -> Result<Vec<f64>> {
    let [tree, image, store] = ["host/tree", "host/image", "host/store"].map(|name| place.word(name));
    let (tree, image, store) = (tree?, image?, store?);
    let begin = Instant::now();
    let memory = run(&["image", "build", &tree, "-o", &image, "--store", &store])?;
    let build = us_each(begin, files);

    let begin = Instant::now();
    let server = place.share(&format!("image:{image}"), &["--store", &store], "socket")?;
    let serve = us_each(begin, files);
    let begin = Instant::now();
    let walk = Walk::over(server.socket())?;
    let walked = us_each(begin, files);
    let expected = usize::try_from(files + files.div_ceil(DIR_FILES))?;
    ensure!(walk.entries() == expected, "the walk found {} of {expected} entries", walk.entries());
    drop((walk, server));

    let timed = |words: &[&str]| {
        let begin = Instant::now();
        run(words).map(|_| us_each(begin, files))
    };
    let fsck = timed(&["image", "fsck", &image])?;
    let du = timed(&["image", "du", &image, "--store", &store])?;
    let gc = timed(&["image", "gc", &image, "--store", &store, "--grace-s", "0"])?;
    for path in [image, store].map(PathBuf::from) {
        remove(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    ensure!(tmpfs.path().join("tree").exists(), "the tree has gone");
    #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    let memory = memory * 1024.0 / files as f64;
    Ok(vec![build, memory, serve, walked, fsck, du, gc])
}

fn remove(path: &Path) -> std::io::Result<()> {
    if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) }
}

/// Runs `ferry` with these words to its end; returns the most memory that it had, in KiB.
fn run(words: &[&str]) -> Result<f64> {
    let command = Place::command(words)?;
    let (program, words) = command.split_first().context("a command has a program")?;
    let mut child = Command::new(program).args(words).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let mut most = 0.0_f64;
    let status = loop {
        // Nothing when it has just ended.
        if let Ok([kib]) = kib(child.id(), ["VmHWM:"]) {
            most = most.max(kib);
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
        std::thread::sleep(LOOK_INTERVAL);
    };
    ensure!(status.success(), "ferry {words:?}: {status}");
    Ok(most)
}
