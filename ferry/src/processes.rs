//! Several servers: one process per disk, and one for the shares beside them, so that storage that hangs delays no other server.
//!
//! The parent creates the sockets of disks, starts the children, and waits. It forwards signals, prints in JSON what is up, and removes
//! the socket files at the end.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_control::{Control, Logging, MetricsAddress, TraceOptions};
use ferry_isolation::{BlockedSignals, Child, End};
use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use serde_json::Value;

use crate::disk::{self, PATIENCE};
use crate::flags::Share;
use crate::new_files::{NewFiles, Success};
use crate::output::print_json;
use crate::paths::{absolute, start_dir};
use crate::sandbox::{self, SandboxFlags};
use crate::service_manager;
use crate::share::{self, Start};
use crate::socket::ListenSocket;
use crate::status::misuse;

/// The maximum length in bytes of a child's report, which has a few paths per disk or share.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// How long disks that are not open yet may take to end: each removes its files.
const GRACE: Duration = Duration::from_secs(1);

/// Serves shares and disks until SIGTERM or SIGINT, or until nothing is left to serve. Returns the exit status.
pub fn run_shares(
    shares: &[Share],
    disks: &[disk::Args],
    (sandbox_flags, json): (&SandboxFlags, bool),
    (metrics, trace): (Option<&MetricsAddress>, Option<&TraceOptions>),
    logging: &Logging,
) -> Result<u8> {
    share::refuse_duplicates(shares, disks).map_err(misuse)?;
    let inherited = share::inherit(shares)?;
    service_manager::inherit(shares, disks.iter().map(disk::Args::socket))?;
    let sandboxed = Some(sandbox_flags);
    let (words, control) = (&[][..], None);
    let start = Start { shares, words, inherited, sandbox_flags: sandboxed, logging, control, metrics, trace };
    if !disks.is_empty() {
        let inherited_disks = disk::inherit(disks)?;
        // Signals are blocked until they are caught, in either process.
        let signals = BlockedSignals::hold()?;
        // Clients check that the socket belongs to the process that users know.
        let control = if shares.is_empty() { None } else { Control::bind() };
        let start = Start { control, ..start };
        return run_all(Some(start), (disks, inherited_disks), (sandbox_flags, json), (signals, logging));
    }
    let once = shares.iter().any(|share| share.once);
    let new_files = NewFiles::new(Success::new()?);
    start.run(BlockedSignals::hold()?, new_files, |up| {
        match json {
            true => print_json(&serde_json::json!({ "pid": sandbox::pid(), "shares": share::statuses(up) }))?,
            false => share::announce(shares, up)?,
        }
        if once {
            // Kata waits for this line of virtiofsd.
            tracing::info!("Waiting for vhost-user socket connection...");
        }
        Ok(true)
    })
}

/// Serves disks until SIGTERM or SIGINT, each in its own process if there are several; returns the exit status.
pub fn run_disks(disks: &[disk::Args], logging: &Logging) -> Result<u8> {
    if disks.iter().any(|disk| disk.print_capabilities) {
        return print_json(&serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] })).map(|()| 0);
    }
    disk::refuse_duplicates(disks).map_err(misuse)?;
    // Signals are blocked until they are caught, in either process.
    let signals = BlockedSignals::hold()?;
    // Inherited descriptors first: files that this process opens could have their numbers.
    let inherited = disk::inherit(disks)?;
    service_manager::inherit(&[], disks.iter().map(disk::Args::socket))?;
    let sandbox_flags = disks.first().map(|disk| disk.sandbox_flags.clone()).unwrap_or_default();
    let json = disks.iter().any(|disk| disk.json);
    if disks.len() > 1 {
        return run_all(None, (disks, inherited), (&sandbox_flags, json), (signals, logging));
    }
    let new_files = NewFiles::new(Success::new()?);
    disk::serve(disks, inherited, (&sandbox_flags, signals, logging), new_files, |opened| {
        match json {
            true => print_json(&serde_json::json!({ "pid": sandbox::pid(), "disks": opened.to_json() }))?,
            false => opened.announce()?,
        }
        Ok(true)
    })
}

/// Serves shares and disks; returns the exit status, in the parent and in every child.
fn run_all(
    shares: Option<Start<'_>>,
    (disks, inherited): (&[disk::Args], Vec<Option<ListenSocket>>),
    (sandbox_flags, json): (&SandboxFlags, bool),
    (signals, logging): (BlockedSignals, &Logging),
) -> Result<u8> {
    let bound = disks.iter().zip(inherited).map(|(disk, inherited)| disk::bind(disk, inherited));
    let mut sockets = bound.collect::<Result<Vec<_>>>()?;
    sandbox::set_public_pid();
    let has_shares = shares.is_some();
    let mut servers = Servers { all: Vec::new(), has_shares, json, is_announced: false, ending: None, status: 0 };
    let mut control = None;
    if let Some(shares) = shares.filter(|start| !start.shares.is_empty()) {
        if let Some(report) = servers.begin(None)? {
            drop(servers);
            service_manager::leave();
            sockets.iter_mut().flatten().for_each(ListenSocket::leave);
            drop(sockets);
            return run_beside_disks(shares, signals, report, json);
        }
        // This process removes its file in the end.
        control = shares.control;
        service_manager::close_sockets();
    }
    for (number, disk) in disks.iter().enumerate() {
        let Some((report, new_files)) = servers.begin(Some(disk))? else { continue };
        drop(servers);
        service_manager::leave();
        let mut own = sockets.get_mut(number).and_then(Option::take);
        own.as_mut().map_or(Ok(()), ListenSocket::take_over)?;
        control.iter_mut().for_each(Socket::leave_file);
        sockets.iter_mut().flatten().for_each(ListenSocket::leave);
        drop(sockets);
        let only = disks.get(number..=number).unwrap_or_default();
        return disk::serve(only, vec![own], (sandbox_flags, signals, logging), new_files, |opened| {
            let is_announced = report.send(&opened.to_json().into_iter().next().unwrap_or_default())?;
            if is_announced && !json {
                opened.announce()?;
            }
            Ok(is_announced)
        });
    }
    let arrives = signals.descriptor()?;
    // The filter forbids opening files, so the working directory, for paths in messages, is read before.
    start_dir();
    sandbox::confine_supervisor(sandbox_flags)?;
    servers.wait(&signals, &arrives)
}

/// Serves the shares in a child process beside disks. Returns the exit status.
fn run_beside_disks(
    mut start: Start<'_>,
    signals: BlockedSignals,
    (report, new_files): (ReportSender, NewFiles),
    json: bool,
) -> Result<u8> {
    start.control.iter_mut().for_each(Socket::leave_file);
    let shares = start.shares;
    start.run(signals, new_files, |up| {
        let is_announced = report.send(&share::statuses(up))?;
        if is_announced && !json {
            share::announce(shares, up)?;
        }
        Ok(is_announced)
    })
}

/// Sends a child's report to the parent.
struct ReportSender(OwnedFd, Success);

impl ReportSender {
    /// Sends what the child serves; waits for the start's outcome, and returns whether it has succeeded.
    ///
    /// # Errors
    /// The parent has ended.
    fn send(self, what: &Value) -> Result<bool> {
        let Self(writer, success) = self;
        let sent = File::from(writer).write_all(format!("{what}\n").as_bytes());
        sent.context("the parent process has ended")?;
        Ok(success.wait())
    }
}
struct Servers<'a> {
    all: Vec<Server<'a>>,
    /// The JSON has a list of shares, which may be empty.
    has_shares: bool,
    json: bool,
    /// The start has succeeded; a disk that comes up later does not change that.
    is_announced: bool,
    /// When the first signal to end arrived.
    ending: Option<Instant>,
    status: u8,
}
struct Server<'a> {
    /// `None` for the child that serves the shares.
    disk: Option<&'a disk::Args>,
    child: Child,
    /// The pipe of its report; `None` once that has arrived.
    report: Option<File>,
    /// The signal that the start has succeeded; `None` once it has failed.
    success: Option<Success>,
    line: Vec<u8>,
    end: Option<End>,
}

impl<'a> Servers<'a> {
    /// Starts a child for a disk, or for the shares. In the child only, returns the sender of its report, and its new files.
    fn begin(&mut self, disk: Option<&'a disk::Args>) -> Result<Option<(ReportSender, NewFiles)>> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe")?;
        let success = Success::new()?;
        let Some(child) = ferry_isolation::begin_child()? else {
            let success = success.of_parent();
            return Ok(Some((ReportSender(writer, success.try_clone()?), NewFiles::new(success))));
        };
        drop(writer);
        rustix::io::ioctl_fionbio(&reader, true).context("cannot use a pipe")?;
        self.all.push(Server {
            disk,
            child,
            report: Some(reader.into()),
            success: Some(success),
            line: Vec::new(),
            end: None,
        });
        Ok(None)
    }

    /// Waits until all have ended, and forwards signals; `arrives` can be read when there is one.
    fn wait(&mut self, signals: &BlockedSignals, arrives: &OwnedFd) -> Result<u8> {
        let begun = Instant::now();
        loop {
            for number in 0..self.all.len() {
                if let Some(end) = self.all[number].poll()? {
                    self.take_end(number, end);
                }
            }
            let grace = self.ending.map(|begun| GRACE.saturating_sub(begun.elapsed()));
            // A child whose storage hangs cannot even be killed; it ends when the storage answers.
            let hangs = |server: &Server<'_>| grace == Some(Duration::ZERO) && server.disk.is_some() && !server.is_up();
            if self.all.iter().all(|server| server.end.is_some() || hangs(server)) {
                return Ok(self.status);
            }
            let is_decided = self.all.iter().all(|server| server.end.is_some() || server.is_up());
            // Shares are always announced when they are up; disks are announced in the state that they are in by then.
            let are_shares_up = self.all.iter().all(|server| server.disk.is_some() || server.is_up());
            let is_late = are_shares_up && begun.elapsed() >= PATIENCE;
            if !self.is_announced && self.ending.is_none() && (is_decided || is_late) {
                self.is_announced = true;
                self.all.iter().filter_map(|server| server.success.as_ref()).for_each(Success::send);
                self.announce()?;
                service_manager::ready();
            }
            let patience = (!self.is_announced && are_shares_up).then(|| PATIENCE.saturating_sub(begun.elapsed()));
            let left = grace.filter(|left| !left.is_zero()).or(patience.filter(|_| grace.is_none()));
            if is_ready(arrives, self.all.iter().filter_map(|server| server.report.as_ref()), left)?
                && let Some(arrival) = signals.next()?
            {
                self.forward(arrival.signal, arrival.from_terminal);
            }
        }
    }

    /// Handles the end of a child. Before the announcement, and after it for a child that served, it ends all others. A disk whose storage
    /// fails after the announcement ends alone.
    fn take_end(&mut self, number: usize, end: End) {
        let server = &self.all[number];
        let (file, was_up) = (server.shown(), server.is_up());
        if end == End::Status(0) || self.ending.is_some() && !was_up {
            return;
        }
        self.status = self.status.max(end.status());
        if let End::Signal(_) = end {
            eprintln!("ferry: the server of {file} was ended by {end}");
        }
        if self.ending.is_some() {
            return;
        }
        if was_up || !self.is_announced {
            self.forward(Signal::TERM, false);
        } else {
            eprintln!("ferry: {file} is not served; the other disks are");
        }
    }

    /// Forwards a signal, unless a terminal has sent it to all processes.
    fn forward(&mut self, signal: Signal, from_terminal: bool) {
        if [Signal::TERM, Signal::INT, Signal::QUIT].contains(&signal) {
            service_manager::stopping();
            self.ending.get_or_insert_with(Instant::now);
            self.all.iter_mut().for_each(|server| server.success = None);
        }
        if !from_terminal {
            self.all.iter().filter(|server| server.end.is_none()).for_each(|server| server.child.signal(signal));
        }
    }

    /// Prints what is up, and what is not, as JSON.
    fn announce(&self) -> Result<()> {
        let there = || self.all.iter().filter(|server| server.end.is_none() || server.is_up());
        if !self.json || there().next().is_none() {
            return Ok(());
        }
        let mut line = serde_json::json!({ "pid": sandbox::pid() });
        if self.has_shares {
            let shares = there().find(|server| server.disk.is_none());
            line["shares"] = shares.map_or_else(|| Value::Array(Vec::new()), Server::to_json);
        }
        line["disks"] = there().filter(|server| server.disk.is_some()).map(Server::to_json).collect();
        print_json(&line)
    }
}

impl Server<'_> {
    fn shown(&self) -> String {
        self.disk.map_or_else(|| "the shares".into(), |disk| disk.path().map(absolute).unwrap_or_default())
    }

    fn is_up(&self) -> bool {
        self.line.ends_with(b"\n")
    }

    /// Reads its report, and returns how it ended, once.
    fn poll(&mut self) -> Result<Option<End>> {
        if let Some(report) = &mut self.report {
            let left = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
            let read = report.take(left).read_to_end(&mut self.line);
            let goes_on = read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock) && !self.is_up();
            self.report = self.report.take().filter(|_| goes_on);
        }
        if self.end.is_some() {
            return Ok(None);
        }
        self.end = self.child.end()?;
        Ok(self.end)
    }

    /// Returns its report, or the disk's name if there is none yet.
    fn to_json(&self) -> Value {
        let unknown = |disk: &disk::Args| {
            serde_json::json!({
                "file": self.shown(),
                "vhost_user": disk.vhost_user.as_deref().map(absolute),
                "fd": disk.fd,
                "bytes": null,
            })
        };
        serde_json::from_slice(&self.line).ok().or_else(|| self.disk.map(unknown)).unwrap_or_default()
    }
}

/// Waits until one of the descriptors can be read; returns whether it is the first.
fn is_ready<'a>(first: &OwnedFd, others: impl Iterator<Item = &'a File>, left: Option<Duration>) -> Result<bool> {
    let mut polled = vec![PollFd::new(first, PollFlags::IN)];
    polled.extend(others.map(|file| PollFd::new(file, PollFlags::IN)));
    let left = left.map(Timespec::try_from).transpose().context("the timeout is too long")?;
    match poll(&mut polled, left.as_ref()) {
        Ok(_) => Ok(polled[0].revents().contains(PollFlags::IN)),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).context("cannot wait for the servers of disks"),
    }
}
