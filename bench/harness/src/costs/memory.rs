//! The memory of a server for a guest that has looked up a million inodes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ferry_driver::walk::Walk;

use super::{Size, TABLE};
use crate::line::Line;
use crate::procfs::Family;
use crate::rows::Config;
use crate::server::{Peer, Programs, Server, Sharing};
use crate::stats::Better;
use crate::tmpfs::Tmpfs;

/// Files in each directory.
pub const DIR_FILES: usize = 1000;

/// Longer than anybody keeps what is not used any more.
const LATER: Duration = Duration::from_secs(30);

/// The figures of one walk, each with its unit.
const FIGURES: [(&str, &str); 7] = [
    ("memory: RSS after the walk", "MiB"),
    ("memory: most RSS (VmHWM)", "MiB"),
    ("memory: bytes for each inode", "bytes"),
    ("memory: descriptors after the walk", "descriptors"),
    ("memory: descriptors half a minute later", "descriptors"),
    ("memory: RSS after FORGET", "MiB"),
    ("memory: time of the walk", "ms"),
];

/// The rows about memory.
#[derive(Debug)]
pub struct Memory<'a> {
    pub work: &'a Path,
    pub programs: &'a Programs,
    pub cpus: &'a str,
    pub size: Size,
}

/// Makes the empty files.
fn make_files(path: PathBuf, directories: usize) -> Result<Tmpfs> {
    let tmpfs = Tmpfs::mount(path)?;
    for directory in 0..directories {
        tmpfs.make_files(&format!("d{directory:04}"), u64::try_from(DIR_FILES)?)?;
    }
    Ok(tmpfs)
}

impl Memory<'_> {
    /// Runs them, the servers in turn.
    pub fn run(&self, skipped: &[String]) -> Vec<Line> {
        let new = |(row, unit): (&str, &'static str)| {
            Line::new(TABLE, row.into(), Config::AutoNoXattr.name(), unit, Better::Lower)
        };
        let mut lines = FIGURES.map(new);
        let files = match make_files(self.work.join("walked"), self.size.directories) {
            Ok(files) => files,
            Err(error) => {
                lines[0].fail(&format!("{error:#}"));
                return lines.into();
            }
        };
        let mut samples: [BTreeMap<String, Vec<f64>>; FIGURES.len()] = Default::default();
        let peers = [Some(Peer::Ferry), self.programs.virtiofsd.as_ref().map(|_| Peer::Virtiofsd)];
        let mut out = Vec::new();
        for peer in (0..self.size.runs).flat_map(|_| peers).flatten() {
            if out.contains(&peer) {
                continue;
            }
            match self.walk(peer, files.path()) {
                Ok(figures) => {
                    for (samples, figure) in samples.iter_mut().zip(figures) {
                        samples.entry(peer.name().into()).or_default().push(figure);
                    }
                }
                Err(error) => {
                    out.push(peer);
                    let reason = format!("{}: {error:#}", peer.name());
                    let tell = if peer == Peer::Ferry { Line::fail } else { Line::skip };
                    lines.iter_mut().for_each(|line| tell(line, &reason));
                }
            }
        }
        for (line, samples) in lines.iter_mut().zip(&samples) {
            line.fill(samples);
            skipped.iter().for_each(|reason| line.skip(reason));
        }
        lines.into()
    }

    #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    fn walk(&self, peer: Peer, dir: &Path) -> Result<[f64; FIGURES.len()]> {
        let socket = self.work.join("run").join(format!("{}-memory", peer.name()));
        let sharing = Sharing { dir, socket, config: Config::AutoNoXattr, queues: None, cpus: self.cpus, logs: false };
        let server = Server::start(peer, self.programs, &sharing)?;
        // A server that confines itself is several processes.
        let family = || Family::of(server.started());
        let [begun] = family().kib(["VmRSS:"])?;
        let start = Instant::now();
        let mut walk = Walk::over(server.socket())?;
        let took = start.elapsed().as_secs_f64() * 1000.0;
        let expected = self.size.directories * (DIR_FILES + 1);
        ensure!(walk.entries() == expected, "the walk found {} of {expected} entries", walk.entries());
        let [rss, most] = family().kib(["VmRSS:", "VmHWM:"])?;
        let at_once = family().descriptors()?;
        std::thread::sleep(LATER);
        let later = family().descriptors()?;
        walk.forget()?;
        let [after] = family().kib(["VmRSS:"])?;
        let each = (rss - begun) * 1024.0 / expected as f64;
        Ok([rss / 1024.0, most / 1024.0, each, at_once, later, after / 1024.0, took])
    }
}
