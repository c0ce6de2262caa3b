//! Starts, and servers of idle guests: the time and the page faults until one is ready, wake-ups, memory, the size of the program.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_driver::{Config, Driver, ROOT};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::line::{FERRY, Line};
use crate::procfs::Family;
use crate::server::Programs;
use crate::stats::Better;

/// How long anything may take here, and how often it is looked whether it has happened: short beside a start.
const TIMEOUT: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_micros(100);
/// A server's threads look for more work for some seconds after a request, five at most.
const CALM: Duration = Duration::from_secs(8);
/// How long wake-ups are counted.
const IDLE: Duration = Duration::from_secs(5);
const DISK_BYTES: usize = 16 << 20;
/// The device's feature of a 9P device: that it has a tag.
const MOUNT_TAG: u64 = 1;
/// Tversion of 9P2000.L, whose reply has the same length; Tattach, and the length of its reply.
const VERSION: &[u8] = b"\x15\0\0\0\x64\xff\xff\0\x20\0\0\x08\09P2000.L";
const ATTACH: &[u8] = b"\x17\0\0\0\x68\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0\0\0\0\0";
const ATTACHED_BYTES: usize = 20;

const SHARE: &str = "start: ferry share, until a guest has an answer";
const MOUNT: &str = "start: ferry mount, until a file's attributes are there";

/// The rows of starts.
pub const START_ROWS: [&str; 2] = [SHARE, MOUNT];
/// What the rows of servers of idle guests begin with.
pub const WAKES: &str = "idle: wake-ups";
pub const MEMORY: &str = "idle: memory";
const PROGRAM: &str = "start: size of the program";

/// The rows about starts and idle servers.
#[derive(Debug)]
pub struct Starts<'a> {
    pub work: &'a Path,
    pub programs: &'a Programs,
    pub table: &'static str,
    /// Starts of each.
    pub runs: usize,
}

/// What serves whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Share,
    Virtiofsd,
    Mount,
    Disk,
    NinepSocket,
    NinepDevice,
}

/// Somebody who is connected; a mount has the kernel.
enum Guest {
    Kernel,
    Driver { _driver: Box<Driver> },
    Socket { _stream: UnixStream },
}

/// A server that was started. It ends when this is dropped.
struct Started {
    child: Child,
    /// Who is served; gone before the server ends.
    guest: Option<Guest>,
    /// Where a file system is mounted.
    mounted: Option<PathBuf>,
    /// From the moment at which its program began until its guest had an answer.
    ms: f64,
    faults: f64,
}

impl Drop for Started {
    fn drop(&mut self) {
        self.guest = None;
        // It has not been waited for, so the process id is still its own. Its children end a moment later, and one of them may remove
        // the socket, which is then the next server's.
        let family = Family::of(self.child.id());
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let end = Instant::now() + TIMEOUT;
        while (matches!(self.child.try_wait(), Ok(None)) || !family.has_ended()) && Instant::now() < end {
            std::thread::sleep(LOOK_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(dir) = &self.mounted {
            let _ = rustix::mount::unmount(dir, UnmountFlags::DETACH);
        }
    }
}

/// A process that becomes a server when it is told to, so that what came before is neither timed nor counted.
struct Waiting {
    child: Child,
    stdin: ChildStdin,
    faults: f64,
}

impl Waiting {
    fn new(command: Vec<OsString>, log: &Path) -> Result<Self> {
        let output = std::fs::File::create(log)?;
        // The shell says that it is there, waits for a line, and replaces itself by the server.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "sh", "-c", "echo; read -r line; exec \"$@\" >&2", "sh"])
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(output)
            .spawn()
            .context("cannot start setpriv (package util-linux)")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (stdin, mut stdout) = (stdin.context("no standard input")?, stdout.context("no standard output")?);
        stdout.read_exact(&mut [0])?;
        let faults = Family::of(child.id()).faults()?;
        Ok(Self { child, stdin, faults })
    }

    fn start(
        mut self,
        is_ready: impl Fn() -> bool,
        connect: impl Fn() -> Result<Guest>,
        mounted: Option<PathBuf>,
    ) -> Result<Started> {
        let begin = Instant::now();
        self.stdin.write_all(b"\n")?;
        let mut started = Started { child: self.child, guest: None, mounted, ms: 0.0, faults: 0.0 };
        while !is_ready() {
            ensure!(matches!(started.child.try_wait(), Ok(None)), "the server ended at its start");
            ensure!(begin.elapsed() < TIMEOUT, "the server was not ready within {} s", TIMEOUT.as_secs());
            std::thread::sleep(LOOK_INTERVAL);
        }
        started.guest = Some(connect()?);
        started.ms = begin.elapsed().as_secs_f64() * 1e3;
        started.faults = Family::of(started.child.id()).faults()? - self.faults;
        Ok(started)
    }
}

impl Kind {
    /// Its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Share => "a share",
            Self::Virtiofsd => "virtiofsd",
            Self::Mount => "a mount",
            Self::Disk => "a disk",
            Self::NinepSocket => "a 9P socket",
            Self::NinepDevice => "a 9P device",
        }
    }
}

impl Starts<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.work.join("starts").join(name)
    }

    fn make(&self) -> Result<()> {
        ["share", "mnt"].into_iter().try_for_each(|name| std::fs::create_dir_all(self.path(name)))?;
        std::fs::write(self.path("share").join("file"), "")?;
        std::fs::write(self.path("disk"), vec![0; DISK_BYTES])?;
        Ok(())
    }

    fn command(&self, kind: Kind) -> Result<Vec<OsString>> {
        let (share, socket) = (self.path("share").into_os_string(), self.path("socket").into_os_string());
        let text = |words: &str| words.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let joined = |scheme: &str| [OsString::from(scheme), socket.clone()].into_iter().collect::<OsString>();
        let words = match kind {
            Kind::Virtiofsd => {
                let flags = text("--log-level warn --shared-dir");
                return Ok(
                    [vec![self.virtiofsd()?.into()], flags, vec![share, "--socket-path".into(), socket]].concat()
                );
            }
            Kind::Share => [text("share"), vec![share, "--virtiofs".into(), socket]].concat(),
            Kind::Mount => [text("mount --foreground"), vec![share, self.path("mnt").into()]].concat(),
            Kind::Disk => [text("disk"), vec![self.path("disk").into(), "--vhost-user".into(), socket]].concat(),
            Kind::NinepSocket => [text("share"), vec![share, "--9p".into(), joined("unix:")]].concat(),
            Kind::NinepDevice => [text("share"), vec![share, "--9p".into(), joined("vhost-user:")]].concat(),
        };
        Ok([vec![self.programs.ferry.clone().into()], text("--log error"), words].concat())
    }

    fn virtiofsd(&self) -> Result<PathBuf> {
        self.programs.virtiofsd.clone().context("virtiofsd is not there")
    }

    fn start(&self, kind: Kind) -> Result<Started> {
        let (socket, log) = (self.path("socket"), self.path("log"));
        let _ = std::fs::remove_file(&socket);
        let waiting = Waiting::new(self.command(kind)?, &log)?;
        let (file, mount) = (self.path("mnt").join("file"), self.path("mnt"));
        let is_mount = kind == Kind::Mount;
        let is_ready = || match kind {
            Kind::Mount => std::fs::symlink_metadata(&file).is_ok(),
            // virtiofsd takes one connection only, so none is made to see whether it listens.
            _ => crate::server::is_listening(&socket),
        };
        let started = waiting.start(is_ready, || self.connect(kind), is_mount.then_some(mount));
        started.with_context(|| std::fs::read_to_string(&log).unwrap_or_default().trim().to_owned())
    }

    /// Starts each so often, in turn: the time and the page faults until it is ready.
    fn starts(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        let peer = self.programs.virtiofsd.is_some().then_some(("virtiofsd", Kind::Virtiofsd));
        let shares: Vec<_> = [(FERRY, Kind::Share)].into_iter().chain(peer).collect();
        for (row, kinds) in [(SHARE, shares), (MOUNT, vec![(FERRY, Kind::Mount)])] {
            let mut figures = [("", "ms"), (": page faults", "faults")]
                .map(|(what, unit)| Line::new(self.table, format!("{row}{what}"), "auto", unit, Better::Lower));
            let mut samples: [BTreeMap<String, Vec<f64>>; 2] = Default::default();
            // The first start reads the program from the disk.
            for (run, (name, kind)) in (0..=self.runs).flat_map(|run| kinds.iter().map(move |kind| (run, *kind))) {
                match self.start(kind) {
                    Ok(started) if run > 0 => {
                        samples[0].entry(name.into()).or_default().push(started.ms);
                        samples[1].entry(name.into()).or_default().push(started.faults);
                    }
                    Ok(_) => {}
                    Err(error) => figures.iter_mut().for_each(|line| tell(line, name, &error)),
                }
            }
            for (line, samples) in figures.iter_mut().zip(&samples) {
                line.fill(samples);
            }
            lines.extend(figures);
        }
        lines
    }

    fn connect(&self, kind: Kind) -> Result<Guest> {
        let socket = self.path("socket");
        let driver = |first_queues, device_features| {
            Driver::connect(&socket, Config { first_queues, device_features, ..Config::default() })
        };
        Ok(match kind {
            Kind::Mount => {
                std::fs::symlink_metadata(self.path("mnt").join("file"))?;
                Guest::Kernel
            }
            Kind::Share | Kind::Virtiofsd => {
                let mut driver = driver(1, 0)?;
                driver.init()?;
                driver.getattr(ROOT)?;
                Guest::Driver { _driver: driver.into() }
            }
            Kind::Disk => {
                let mut driver = driver(0, 0)?;
                let ticket = driver.queue(0).submit(&[&[0; 16]], &[512, 1])?;
                driver.queue(0).wait_for(ticket, TIMEOUT)?;
                Guest::Driver { _driver: driver.into() }
            }
            Kind::NinepDevice => {
                let mut driver = driver(0, MOUNT_TAG)?;
                let ticket = driver.queue(0).submit(&[VERSION], &[8192])?;
                driver.queue(0).wait_for(ticket, TIMEOUT)?;
                Guest::Driver { _driver: driver.into() }
            }
            Kind::NinepSocket => {
                let mut stream = UnixStream::connect(&socket)?;
                stream.write_all(VERSION)?;
                stream.read_exact(&mut [0; VERSION.len()])?;
                stream.write_all(ATTACH)?;
                stream.read_exact(&mut [0; ATTACHED_BYTES])?;
                Guest::Socket { _stream: stream }
            }
        })
    }

    /// One server of an idle guest: wake-ups per second, its RSS and its private memory in MiB, and its program's size in MiB.
    #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    fn idle(&self, kind: Kind) -> Result<[f64; 4]> {
        let started = self.start(kind)?;
        std::thread::sleep(CALM);
        let family = Family::of(started.child.id());
        let [rss, private] = family.memory_kib()?;
        let before = family.usage()?;
        std::thread::sleep(IDLE);
        let (wakes, _) = before.since()?;
        let name = if kind == Kind::Virtiofsd { "virtiofsd" } else { FERRY };
        let program = loaded_bytes(&std::fs::read(family.program(name)?)?).context("the program is no ELF file")?;
        drop(started);
        let wakes = wakes as f64 / IDLE.as_secs_f64();
        Ok([wakes, rss / 1024.0, private / 1024.0, program as f64 / (1 << 20) as f64])
    }

    /// Servers of idle guests: wake-ups and memory, and of a share the size of the program.
    fn idles(&self) -> Vec<Line> {
        let line = |row: String, unit: &'static str| Line::new(self.table, row, "auto", unit, Better::Lower);
        let mut lines = Vec::new();
        for kind in [Kind::Share, Kind::Mount, Kind::Disk, Kind::NinepSocket, Kind::NinepDevice] {
            let mut figures = vec![
                line(format!("{WAKES} of {}", kind.name()), "wake-ups/s"),
                line(format!("{MEMORY} of {}: RSS", kind.name()), "MiB"),
                line(format!("{MEMORY} of {}: what nobody else has", kind.name()), "MiB"),
            ];
            let mut servers = vec![(FERRY, kind)];
            if kind == Kind::Share {
                figures.push(line(PROGRAM.into(), "MiB"));
                servers.extend(self.programs.virtiofsd.is_some().then_some(("virtiofsd", Kind::Virtiofsd)));
            }
            let mut samples: [BTreeMap<String, Vec<f64>>; 4] = Default::default();
            for (name, kind) in servers {
                match self.idle(kind) {
                    Ok(idle) => {
                        for (samples, figure) in samples.iter_mut().zip(idle) {
                            samples.insert(name.to_owned(), vec![figure]);
                        }
                    }
                    Err(error) => figures.iter_mut().for_each(|line| tell(line, name, &error)),
                }
            }
            figures.iter_mut().zip(&samples).for_each(|(line, samples)| line.fill(samples));
            lines.extend(figures);
        }
        lines
    }

    /// Runs them.
    pub fn run(&self, skipped: &[String]) -> Vec<Line> {
        if let Err(error) = self.make() {
            let mut line = Line::new(self.table, SHARE.into(), "auto", "ms", Better::Lower);
            line.fail(&format!("{error:#}"));
            return vec![line];
        }
        let mut lines = self.starts();
        lines.extend(self.idles());
        lines.iter_mut().for_each(|line| skipped.iter().for_each(|reason| line.skip(reason)));
        lines
    }
}

/// Says why a server has no figures.
fn tell(line: &mut Line, name: &str, error: &anyhow::Error) {
    let reason = format!("{name}: {error:#}");
    if name == FERRY { line.fail(&reason) } else { line.skip(&reason) }
}

/// The bytes of a program that are loaded: what is left of one without symbols.
fn loaded_bytes(elf: &[u8]) -> Option<u64> {
    const SEGMENT_LOAD: u32 = 1;
    let word = |at: usize| Some(u16::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let long = |at: usize| Some(u64::from_le_bytes(*elf.get(at..)?.first_chunk()?));
    let of_64_bits = elf.starts_with(b"\x7fELF\x02\x01");
    let (first, length, count) = (usize::try_from(long(0x20)?).ok()?, usize::from(word(0x36)?), word(0x38)?);
    let segment = |number: u16| {
        let at = first.checked_add(length * usize::from(number))?;
        let kind = u32::from_le_bytes(*elf.get(at..)?.first_chunk()?);
        Some(if kind == SEGMENT_LOAD { long(at.checked_add(0x20)?)? } else { 0 })
    };
    of_64_bits.then_some(())?;
    (0..count).map(segment).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_have_a_size() {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let bytes = loaded_bytes(&program).unwrap();
        assert!(bytes > 100_000 && bytes <= program.len() as u64, "{bytes}");
        assert_eq!((loaded_bytes(b"#!/bin/sh"), loaded_bytes(&program[..99])), (None, None));
    }

    #[test]
    fn a_start_is_timed_from_its_program_on() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ready");
        // No second process, which could end while its page faults are read.
        let script = format!(": >'{}'; exec sleep 60", file.display());
        let command = ["sh", "-c", &script].map(OsString::from);
        let waiting = Waiting::new(command.into(), &dir.path().join("log")).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!file.exists());
        let started = waiting.start(|| file.exists(), || Ok(Guest::Kernel), None).unwrap();
        assert!(started.ms > 0.0 && started.faults > 0.0, "{} {}", started.ms, started.faults);
    }
}
