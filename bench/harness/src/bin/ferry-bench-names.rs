//! Creates, queries and removes files in a directory from several threads, and prints the rates per second as JSON.
//!
//! Each thread has its own directory. `stat` queries the file system each time (AT_STATX_FORCE_SYNC); `cached-stat`
//! uses the kernel's caches, which a previous pass has filled.

#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags};

/// Rounds of the cached `stat`: one pass over the files is over too soon to measure.
const CACHED_ROUNDS: usize = 20;

#[derive(Debug, Parser)]
struct Cli {
    /// The directory to work in
    dir: PathBuf,
    /// Number of threads
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Number of files per thread
    #[arg(long, default_value_t = 2000)]
    files: usize,
}

/// What is done to each file, in this order.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Create,
    Stat,
    CachedStat,
    Unlink,
}

const PHASES: [(&str, Phase); 4] =
    [("create", Phase::Create), ("stat", Phase::Stat), ("cached-stat", Phase::CachedStat), ("unlink", Phase::Unlink)];

impl Phase {
    /// Processes all files; returns the number of calls.
    fn run(self, files: &[PathBuf]) -> rustix::io::Result<usize> {
        let stat = |flags: AtFlags| {
            files.iter().try_for_each(|file| rustix::fs::statx(CWD, file, flags, StatxFlags::BASIC_STATS).map(drop))
        };
        match self {
            Self::Create => files.iter().try_for_each(|file| {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                rustix::fs::open(file, flags, Mode::from_raw_mode(0o644)).map(drop)
            })?,
            Self::Stat => stat(AtFlags::STATX_FORCE_SYNC)?,
            Self::CachedStat => {
                for _ in 0..CACHED_ROUNDS {
                    stat(AtFlags::empty())?;
                }
                return Ok(files.len() * CACHED_ROUNDS);
            }
            Self::Unlink => files.iter().try_for_each(rustix::fs::unlink)?,
        }
        Ok(files.len())
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let barrier = Barrier::new(cli.threads);
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cli.threads)
            .map(|number| {
                let (barrier, dir) = (&barrier, cli.dir.join(format!("t{number}")));
                scope.spawn(move || work(&dir, cli.files, barrier))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker does not panic")).collect()
    });
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    let rates = PHASES.iter().enumerate().map(|(index, (name, _))| {
        let calls: usize = results.iter().map(|thread| thread[index].0).sum();
        // All begin together; the phase is over when the last one is.
        let longest = results.iter().map(|thread| thread[index].1).max().unwrap_or_default();
        #[allow(clippy::cast_precision_loss)] // A count of calls is far below 2^52.
        let rate = calls as f64 / longest.as_secs_f64();
        (*name, serde_json::Value::from(rate))
    });
    println!("{}", serde_json::Value::Object(rates.map(|(name, rate)| (name.to_owned(), rate)).collect()));
    Ok(())
}

/// One thread's phases: how many calls, and how long they took.
fn work(dir: &PathBuf, files: usize, barrier: &Barrier) -> Result<Vec<(usize, Duration)>> {
    let made = fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()));
    let files: Vec<PathBuf> = (0..files).map(|number| dir.join(format!("f{number}"))).collect();
    let mut failed = made.err();
    let mut results = Vec::new();
    for (name, phase) in PHASES {
        // Every thread waits here in each phase, also after a failure, or the others would block.
        barrier.wait();
        let start = Instant::now();
        let calls = if failed.is_some() { Ok(0) } else { phase.run(&files) };
        match calls {
            Ok(calls) => results.push((calls, start.elapsed())),
            Err(error) => {
                failed = Some(anyhow::Error::from(error).context(format!("{name} failed in {}", dir.display())));
            }
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    fs::remove_dir(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    Ok(results)
}
