//! `ferry image trace`: records the files that a workload opens in a mounted image, in order.

use std::ffi::OsString;
use std::io::{BufWriter, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use ferry_image::Trace;
use nix::errno::Errno;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::CWD;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};

/// The maximum wait for events before the workload is checked, in nanoseconds.
const LOOK_NS: i64 = 50_000_000;
/// The base of the exit status for signals, as in shells.
const SIGNAL_STATUS: i32 = 128;

#[derive(Debug, clap::Args)]
pub struct TraceArgs {
    /// The mount point of the image, of the kernel or of ferry mount; any other directory works, too.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The list to write: the files that were opened, for ferry image build --order-from.
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
    /// The command that is the workload. Without one, the recording ends when this program is interrupted.
    #[arg(value_name = "COMMAND", last = true)]
    command: Vec<OsString>,
}

/// Records until the workload ends; returns its status.
pub fn trace(args: &TraceArgs) -> Result<u8> {
    let dir = args.dir.canonicalize().with_context(|| format!("cannot find {}", args.dir.display()))?;
    if !dir.is_dir() {
        bail!("{} is not a directory", dir.display());
    }
    let folder = args.output.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let new = tempfile::Builder::new().prefix(".new-").tempfile_in(folder);
    let mut new = new.with_context(|| format!("cannot make a file in {}", folder.display()))?;
    let mut watch = Watch::begin(dir)?;
    // The last signal, or 0.
    let stop = Arc::new(AtomicUsize::new(0));
    for signal in [SIGINT, SIGTERM] {
        let number = usize::try_from(signal).context("signals have numbers")?;
        signal_hook::flag::register_usize(signal, Arc::clone(&stop), number).context("cannot wait for signals")?;
    }
    let status = match args.command.split_first() {
        None => {
            while stop.load(Ordering::Relaxed) == 0 {
                watch.look()?;
            }
            0
        }
        Some((program, words)) => {
            let child = Command::new(program).args(words).spawn();
            let child = child.map_err(|error| anyhow::anyhow!("cannot start {}: {error}", program.display()))?;
            watch.until(&mut Workload(child), &stop)?
        }
    };
    watch.take()?;
    let Watch { trace, lost, .. } = watch;
    let mut out = BufWriter::new(new.as_file_mut());
    trace
        .write(&mut out)
        .and_then(|()| out.flush())
        .with_context(|| format!("cannot write to {}", folder.display()))?;
    drop(out);
    new.persist(&args.output).with_context(|| format!("cannot make {}", args.output.display()))?;
    if lost > 0 {
        tracing::warn!("{lost} opened files are not in the list: the kernel could not report them");
    }
    eprintln!("ferry: {} files in {}", trace.len(), args.output.display());
    Ok(status)
}

/// A process that is killed when this is dropped.
struct Workload(Child);

impl Workload {
    /// Forwards a signal.
    fn signal(&self, number: i32) {
        // The terminal also sends SIGINT to the workload.
        let is_there = number == SIGINT && std::io::stdin().is_terminal();
        if let Some(signal) = Signal::from_named_raw(number).filter(|_| !is_there) {
            // The only error is that it has just ended.
            let _ = kill_process(Pid::from_child(&self.0), signal);
        }
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // Both do nothing after a successful wait.
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// A directory that is watched.
struct Watch {
    dir: PathBuf,
    events: Fanotify,
    trace: Trace,
    /// The number of files that could not be reported.
    lost: usize,
}

impl Watch {
    fn begin(dir: PathBuf) -> Result<Self> {
        let flags = InitFlags::FAN_CLASS_NOTIF
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_UNLIMITED_QUEUE;
        // Each event opens the file: a FIFO must not block.
        let files = EventFFlags::O_RDONLY
            | EventFFlags::O_CLOEXEC
            | EventFFlags::O_NONBLOCK
            | EventFFlags::O_LARGEFILE
            | EventFFlags::O_NOATIME;
        let events = match Fanotify::init(flags, files) {
            Err(Errno::EPERM) => bail!("only root can watch files that other processes open"),
            Err(Errno::ENOSYS) => bail!("this kernel cannot report opened files (CONFIG_FANOTIFY)"),
            events => events.context("cannot watch opened files")?,
        };
        events
            .mark(MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT, MaskFlags::FAN_OPEN, CWD, Some(&dir))
            .with_context(|| format!("cannot watch opened files in {}", dir.display()))?;
        Ok(Self { dir, events, trace: Trace::default(), lost: 0 })
    }

    /// Waits a moment for events, and reads all of them.
    fn look(&mut self) -> Result<()> {
        let moment = Timespec { tv_sec: 0, tv_nsec: LOOK_NS };
        let events = self.events.as_fd();
        match poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&moment)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => self.take(),
            Err(error) => Err(error).context("cannot wait for events"),
        }
    }

    /// Records until a process ends; returns its status. Signals are forwarded to it.
    fn until(&mut self, workload: &mut Workload, stop: &AtomicUsize) -> Result<u8> {
        loop {
            match stop.swap(0, Ordering::Relaxed) {
                0 => {}
                number => workload.signal(i32::try_from(number).unwrap_or(SIGTERM)),
            }
            if let Some(status) = workload.0.try_wait().context("cannot wait for the workload")? {
                let status = status.code().or_else(|| Some(SIGNAL_STATUS + status.signal()?));
                return Ok(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(u8::MAX));
            }
            self.look()?;
        }
    }

    /// Reads all events, including those of files that were opened before this call.
    fn take(&mut self) -> Result<()> {
        loop {
            let events = match self.events.read_events() {
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                // The kernel could not open the file for this process, and drops the event.
                Err(Errno::ENXIO | Errno::ENODEV | Errno::EACCES | Errno::EPERM | Errno::ESTALE | Errno::EIO) => {
                    self.lost += 1;
                    continue;
                }
                events => events.context("cannot read events")?,
            };
            for event in events {
                let Some(file) = event.fd() else {
                    self.lost += 1;
                    continue;
                };
                let is_file = rustix::fs::fstat(file)
                    .is_ok_and(|found| rustix::fs::FileType::from_raw_mode(found.st_mode).is_file());
                let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
                if let (true, Ok(path)) = (is_file, path)
                    && let Ok(path) = path.strip_prefix(&self.dir)
                {
                    self.trace.add(&[b"/", path.as_os_str().as_bytes()].concat());
                }
            }
        }
    }
}
