//! `ferry image trace`: records the files that a workload opens in a mounted image, in order.

use std::ffi::{OsStr, OsString};
use std::io::{BufWriter, IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry_image::Trace;
use nix::errno::Errno;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::CWD;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGINT, SIGTERM};
use tempfile::NamedTempFile;

use super::container::{Container, Table};
use super::registry;

/// The maximum wait for events before the workload is checked.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// The interval at which a container's processes are searched for.
const PROCESSES_INTERVAL: Duration = Duration::from_millis(500);
/// The base of the exit status for signals, as in shells.
const SIGNAL_STATUS: i32 = 128;

#[derive(Debug, clap::Args)]
pub struct TraceArgs {
    /// The mount point of the image, of the kernel or of ferry mount; any other directory works, too.
    #[arg(value_name = "DIR", required_unless_present = "container")]
    dir: Option<PathBuf>,
    /// Record a container on layers of ferry-snapshotter from its start to its end. It is waited for. Its id, or the first digits of it,
    /// names it, or the digest of its image's manifest (sha256:...).
    #[arg(long, value_name = "NAME", conflicts_with = "dir")]
    container: Option<String>,
    /// The list to write: the files that were opened, for ferry image build --order-from, and as IMAGE.trace for mounts with --from
    /// [default with --container: where ferry-snapshotter looks for it when the image is started again].
    #[arg(short, long, value_name = "TRACE", required_unless_present = "container")]
    output: Option<PathBuf>,
    /// Store the list beside a container image in its registry, too, for other machines: oci:HOST/NAME:TAG.
    #[arg(long, value_name = "REF")]
    push: Option<String>,
    /// The command that is the workload, or starts the container. Without one, the recording ends when this program is interrupted.
    #[arg(value_name = "COMMAND", last = true)]
    command: Vec<OsString>,
}

/// Records until the workload ends; returns its status.
pub fn trace(args: &TraceArgs) -> Result<u8> {
    match (&args.container, &args.dir, &args.output) {
        (Some(name), ..) => trace_container(name, args),
        (None, Some(dir), Some(output)) => trace_directory(dir, output, args),
        (None, ..) => bail!("no directory is named"),
    }
}

fn trace_directory(dir: &Path, output: &Path, args: &TraceArgs) -> Result<u8> {
    let dir = dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))?;
    if !dir.is_dir() {
        bail!("{} is not a directory", dir.display());
    }
    let new = new_list(output)?;
    let mut watch = Watch::begin(dir, MarkFlags::FAN_MARK_MOUNT)?;
    let mut workload = Workload::start(&args.command)?;
    let status = loop {
        if let Some(status) = workload.status()? {
            break status;
        }
        watch.look()?;
    };
    watch.take()?;
    watch.keep(new, output, |_| true)?;
    push(args, None, output)?;
    Ok(status)
}

fn trace_container(name: &str, args: &TraceArgs) -> Result<u8> {
    let (table, before) = (Table::open()?, Container::uppers()?);
    eprintln!("ferry: waiting for the container {name}");
    let mut workload = Workload::start(&args.command)?;
    let container = loop {
        if let Some(found) = Container::find(name, &before)? {
            break found;
        }
        while !table.changes(&LOOK) {
            if workload.status()?.is_some() {
                bail!("no container {name} on layers of ferry-snapshotter was started");
            }
        }
    };
    // Processes of the container open files by another mount of the same file system.
    let mut watch = Watch::begin(container.at.clone(), MarkFlags::FAN_MARK_FILESYSTEM)?;
    eprintln!("ferry: recording {}", container.at.display());
    let mut end = End::default();
    let status = loop {
        if let Some(status) = workload.status()? {
            break status;
        }
        watch.look()?;
        if args.command.is_empty() && (!container.is_mounted() || end.has_come(|| container.has_processes())) {
            break 0;
        }
    };
    watch.take()?;
    let list = args.output.clone().unwrap_or_else(|| container.list());
    if args.output.is_none() {
        let directory = parent(&list);
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    // Files that the container has written are left out.
    let is_of_image = |path: &[u8]| is_file(&container.layer, path);
    watch.keep(new_list(&list)?, &list, is_of_image)?;
    push(args, Some(&container.manifest), &list)?;
    Ok(status)
}

/// Detects the end of a container whose mount stays: a background container's mount exists until it is removed.
#[derive(Default)]
struct End {
    has_run: bool,
    next: Option<Instant>,
}

impl End {
    /// Whether it ran and has ended. Checks at intervals.
    fn has_come(&mut self, runs: impl FnOnce() -> bool) -> bool {
        if self.next.is_some_and(|next| Instant::now() < next) {
            return false;
        }
        self.next = Some(Instant::now() + PROCESSES_INTERVAL);
        let runs = runs();
        let had_run = std::mem::replace(&mut self.has_run, runs);
        had_run && !runs
    }
}

fn push(args: &TraceArgs, manifest: Option<&str>, list: &Path) -> Result<()> {
    args.push.as_deref().map_or(Ok(()), |reference| registry::push_trace(reference, manifest, list))
}

/// Whether a tree has a regular file at a path that begins with the slash of its root.
fn is_file(tree: &Path, path: &[u8]) -> bool {
    let path = path.strip_prefix(b"/").unwrap_or(path);
    std::fs::symlink_metadata(tree.join(OsStr::from_bytes(path))).is_ok_and(|found| found.is_file())
}

fn parent(list: &Path) -> &Path {
    list.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a temporary file for a list.
fn new_list(list: &Path) -> Result<NamedTempFile> {
    let new = tempfile::Builder::new().prefix(".new-").tempfile_in(parent(list));
    new.with_context(|| format!("cannot make a file in {}", parent(list).display()))
}

/// A process that is killed when this is dropped; without one, the workload ends with a signal.
struct Workload {
    child: Option<Child>,
    /// The last signal, or 0.
    stop: Arc<AtomicUsize>,
}

impl Workload {
    fn start(command: &[OsString]) -> Result<Self> {
        let stop = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            let number = usize::try_from(signal).context("signals have numbers")?;
            signal_hook::flag::register_usize(signal, Arc::clone(&stop), number).context("cannot wait for signals")?;
        }
        let start = |(program, words): (&OsString, &[OsString])| {
            let child = Command::new(program).args(words).spawn();
            child.map_err(|error| anyhow::anyhow!("cannot start {}: {error}", program.display()))
        };
        Ok(Self { child: command.split_first().map(start).transpose()?, stop })
    }

    /// Forwards signals; returns the exit status once it has ended.
    fn status(&mut self) -> Result<Option<u8>> {
        let signal = self.stop.swap(0, Ordering::Relaxed);
        let Some(child) = &mut self.child else { return Ok((signal != 0).then_some(0)) };
        let number = i32::try_from(signal).unwrap_or(SIGTERM);
        // The terminal also sends SIGINT to the workload.
        let is_there = number == SIGINT && std::io::stdin().is_terminal();
        if let Some(signal) = Signal::from_named_raw(number).filter(|_| !is_there) {
            // The only error is that it has just ended.
            let _ = kill_process(Pid::from_child(child), signal);
        }
        let Some(status) = child.try_wait().context("cannot wait for the workload")? else { return Ok(None) };
        let status = status.code().or_else(|| Some(SIGNAL_STATUS + status.signal()?));
        Ok(Some(status.and_then(|status| u8::try_from(status).ok()).unwrap_or(u8::MAX)))
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // Both do nothing after a successful wait.
        if let Some(child) = &mut self.child {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }
}

/// A watched directory.
struct Watch {
    dir: PathBuf,
    is_container: bool,
    events: Fanotify,
    trace: Trace,
    /// The number of files that could not be reported.
    lost: usize,
}

impl Watch {
    fn begin(dir: PathBuf, scope: MarkFlags) -> Result<Self> {
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
            .mark(MarkFlags::FAN_MARK_ADD | scope, MaskFlags::FAN_OPEN, CWD, Some(&dir))
            .with_context(|| format!("cannot watch opened files in {}", dir.display()))?;
        let is_container = scope.contains(MarkFlags::FAN_MARK_FILESYSTEM);
        Ok(Self { dir, is_container, events, trace: Trace::default(), lost: 0 })
    }

    /// Waits for events up to the maximum time, and reads all of them.
    fn look(&mut self) -> Result<()> {
        let events = self.events.as_fd();
        match poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&LOOK)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => self.take(),
            Err(error) => Err(error).context("cannot wait for events"),
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
                    && let Some(path) = self.inside(&path)
                {
                    self.trace.add(&[b"/", path.as_os_str().as_bytes()].concat());
                }
            }
        }
    }

    /// Returns a path below the watched directory. In a container it is the root.
    fn inside<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let below = path.strip_prefix(&self.dir).ok();
        below.or_else(|| path.strip_prefix("/").ok().filter(|_| self.is_container))
    }

    /// Writes a list of those files that a function accepts.
    fn keep(self, mut new: NamedTempFile, list: &Path, accepts: impl Fn(&[u8]) -> bool) -> Result<()> {
        let mut trace = Trace::default();
        for path in self.trace.paths().filter(|path| accepts(path)) {
            trace.add(path);
        }
        if self.is_container && trace.is_empty() {
            bail!("the container opened no file of its image that is fetched when it is read: no list is kept");
        }
        let mut out = BufWriter::new(new.as_file_mut());
        let written = trace.write(&mut out).and_then(|()| out.flush());
        written.with_context(|| format!("cannot write to {}", parent(list).display()))?;
        drop(out);
        new.persist(list).with_context(|| format!("cannot make {}", list.display()))?;
        if self.lost > 0 {
            tracing::warn!("{} opened files are not in the list: the kernel could not report them", self.lost);
        }
        eprintln!("ferry: {} files in {}", trace.len(), list.display());
        Ok(())
    }
}
