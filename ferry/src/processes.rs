//! Several servers: each disk is opened and served by a process of its own, and so are the shares beside them, so that one whose storage hangs
//! holds up no other.
//!
//! This process makes the sockets of disks, begins the others, which do all that one does for one disk or for shares, and waits. It passes
//! signals on, says in JSON what is up, and removes the sockets' files in the end.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_isolation::{BlockedSignals, Child, End};
use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use serde_json::Value;

use crate::disk::{self, PATIENCE};
use crate::new_files::{NewFiles, Success};
use crate::sandbox::{self, SandboxFlags};
use crate::share::{Start, say, shown};
use crate::socket::Bound;

/// What a process may say of a disk or of shares, which is mostly a few paths for each.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// How long disks that are not open yet may take to end: each has files to remove.
const GRACE: Duration = Duration::from_secs(1);

/// Serves shares and disks; returns the status to end with, in each of the processes that there are then.
pub fn run(
    shares: Option<Start<'_>>,
    (disks, inherited): (&[disk::Args], Vec<Option<Bound>>),
    (sandbox_flags, json): (&SandboxFlags, bool),
    signals: BlockedSignals,
) -> Result<u8> {
    let bound = disks.iter().zip(inherited).map(|(disk, inherited)| disk::bind(disk, inherited));
    let mut sockets = bound.collect::<Result<Vec<_>>>()?;
    sandbox::set_public_pid();
    let has_shares = shares.is_some();
    let mut servers = Servers { all: Vec::new(), has_shares, json, is_told: false, ending: None, status: 0 };
    let mut control = None;
    if let Some(shares) = shares.filter(|start| !start.shares.is_empty()) {
        if let Some(report) = servers.begin(None)? {
            drop(servers);
            sockets.iter_mut().flatten().for_each(Bound::leave);
            drop(sockets);
            return shares.run_beside_disks(signals, report, json);
        }
        // This process removes its file in the end.
        control = shares.control;
    }
    for (number, disk) in disks.iter().enumerate() {
        let Some(report) = servers.begin(Some(disk))? else { continue };
        drop(servers);
        let mut own = sockets.get_mut(number).and_then(Option::take);
        own.as_mut().map_or(Ok(()), Bound::take_over)?;
        control.iter_mut().for_each(Socket::leave_file);
        sockets.iter_mut().flatten().for_each(Bound::leave);
        drop(sockets);
        let (report, new_files) = report.split()?;
        let only = disks.get(number..=number).unwrap_or_default();
        return disk::serve(only, vec![own], (sandbox_flags, signals), new_files, |opened| {
            let is_told = report.tell(&opened.described().into_iter().next().unwrap_or_default())?;
            if is_told && !json {
                opened.announce()?;
            }
            Ok(is_told)
        });
    }
    let arrives = signals.descriptor()?;
    // No file is opened from here on, and no descriptor made: for the paths of messages the folder is known already.
    crate::share::here();
    sandbox::confine_supervisor(sandbox_flags)?;
    servers.wait(&signals, &arrives)
}

/// How a process that serves says that it is up, and learns that the others are, too.
pub struct Report {
    writer: OwnedFd,
    success: Success,
}

impl Report {
    /// The one to say it with, and what is to take care of the files that are made.
    pub fn split(self) -> Result<(Line, NewFiles)> {
        Ok((Line(self.writer, self.success.try_clone()?), NewFiles::until(self.success)))
    }
}

/// Where a process that serves says what it serves.
pub struct Line(OwnedFd, Success);

impl Line {
    /// Says it to the process that waits; whether the start has succeeded, as soon as that is known.
    pub fn tell(self, what: &Value) -> Result<bool> {
        let Self(writer, success) = self;
        let said = File::from(writer).write_all(format!("{what}\n").as_bytes());
        said.context("the process that was started has gone")?;
        Ok(success.wait())
    }
}

/// The processes that serve.
struct Servers<'a> {
    all: Vec<Server<'a>>,
    /// A program is told of shares, too, if only that there are none.
    has_shares: bool,
    json: bool,
    /// It was said what is up; a disk that is not is on its own from then on.
    is_told: bool,
    /// Since when they are being ended.
    ending: Option<Instant>,
    /// To end with.
    status: u8,
}

/// A process that serves.
struct Server<'a> {
    /// None: it serves the shares.
    disk: Option<&'a disk::Args>,
    child: Child,
    /// Where it says what is up; none once it has.
    says: Option<File>,
    /// How it learns that the start has succeeded; none once it has failed.
    success: Option<Success>,
    line: Vec<u8>,
    end: Option<End>,
}

impl<'a> Servers<'a> {
    /// Begins a process that serves a disk, or the shares. In it, what it reports with is returned.
    fn begin(&mut self, disk: Option<&'a disk::Args>) -> Result<Option<Report>> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("no pipe can be had")?;
        let success = Success::new()?;
        let Some(child) = ferry_isolation::begin_child()? else {
            return Ok(Some(Report { writer, success: success.of_parent() }));
        };
        drop(writer);
        rustix::io::ioctl_fionbio(&reader, true).context("cannot use a pipe")?;
        self.all.push(Server {
            disk,
            child,
            says: Some(reader.into()),
            success: Some(success),
            line: Vec::new(),
            end: None,
        });
        Ok(None)
    }

    /// Waits until all have ended, for signals, which are told by a descriptor that `arrives`.
    fn wait(&mut self, signals: &BlockedSignals, arrives: &OwnedFd) -> Result<u8> {
        let begun = Instant::now();
        loop {
            for number in 0..self.all.len() {
                if let Some(end) = self.all[number].look()? {
                    self.take_end(number, end);
                }
            }
            let grace = self.ending.map(|begun| GRACE.saturating_sub(begun.elapsed()));
            // One that hangs may not even be killed: it goes when its storage answers, or is given up.
            let hangs = |server: &Server<'_>| grace == Some(Duration::ZERO) && server.disk.is_some() && !server.is_up();
            if self.all.iter().all(|server| server.end.is_some() || hangs(server)) {
                return Ok(self.status);
            }
            let is_decided = self.all.iter().all(|server| server.end.is_some() || server.is_up());
            // What shares are there is known once they are up; disks without them are told of as they are by then.
            let are_shares_up = self.all.iter().all(|server| server.disk.is_some() || server.is_up());
            let is_late = are_shares_up && begun.elapsed() >= PATIENCE;
            if !self.is_told && self.ending.is_none() && (is_decided || is_late) {
                self.is_told = true;
                self.all.iter().filter_map(|server| server.success.as_ref()).for_each(Success::say);
                self.announce()?;
            }
            let patience = (!self.is_told && are_shares_up).then(|| PATIENCE.saturating_sub(begun.elapsed()));
            let left = grace.filter(|left| !left.is_zero()).or(patience.filter(|_| grace.is_none()));
            if is_ready(arrives, self.all.iter().filter_map(|server| server.says.as_ref()), left)?
                && let Some(arrival) = signals.next()?
            {
                self.pass_on(arrival.signal, arrival.from_terminal);
            }
        }
    }

    /// A mistake in one ends all as long as nobody was told that they are up, and so does the end of one that served. One whose storage
    /// answers too late, and with an error, ends alone.
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
        if was_up || !self.is_told {
            self.pass_on(Signal::TERM, false);
        } else {
            eprintln!("ferry: {file} is not served; the other disks are");
        }
    }

    /// Passes a signal on, but for one that a terminal has sent to all.
    fn pass_on(&mut self, signal: Signal, from_terminal: bool) {
        if [Signal::TERM, Signal::INT, Signal::QUIT].contains(&signal) {
            self.ending.get_or_insert_with(Instant::now);
            self.all.iter_mut().for_each(|server| server.success = None);
        }
        if !from_terminal {
            self.all.iter().filter(|server| server.end.is_none()).for_each(|server| server.child.signal(signal));
        }
    }

    /// Tells a program what is up, and what is not.
    fn announce(&self) -> Result<()> {
        let there = || self.all.iter().filter(|server| server.end.is_none() || server.is_up());
        if !self.json || there().next().is_none() {
            return Ok(());
        }
        let mut line = serde_json::json!({ "pid": sandbox::pid() });
        if self.has_shares {
            let shares = there().find(|server| server.disk.is_none());
            line["shares"] = shares.map_or_else(|| Value::Array(Vec::new()), Server::described);
        }
        line["disks"] = there().filter(|server| server.disk.is_some()).map(Server::described).collect();
        say(&line)
    }
}

impl Server<'_> {
    fn shown(&self) -> String {
        self.disk.map_or_else(|| "the shares".into(), |disk| disk.path().map(shown).unwrap_or_default())
    }

    fn is_up(&self) -> bool {
        self.line.ends_with(b"\n")
    }

    /// Hears what it says, and returns how it ended, once.
    fn look(&mut self) -> Result<Option<End>> {
        if let Some(says) = &mut self.says {
            let left = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
            let heard = says.take(left).read_to_end(&mut self.line);
            let goes_on = heard.is_err_and(|error| error.kind() == ErrorKind::WouldBlock) && !self.is_up();
            self.says = self.says.take().filter(|_| goes_on);
        }
        if self.end.is_some() {
            return Ok(None);
        }
        self.end = self.child.end()?;
        Ok(self.end)
    }

    /// What it said that it serves, or, as long as it does not know, which disk it is.
    fn described(&self) -> Value {
        let unknown = |disk: &disk::Args| {
            serde_json::json!({
                "file": self.shown(),
                "vhost_user": disk.vhost_user.as_deref().map(shown),
                "fd": disk.fd,
                "bytes": null,
            })
        };
        serde_json::from_slice(&self.line).ok().or_else(|| self.disk.map(unknown)).unwrap_or_default()
    }
}

/// Waits until one of them can be read; whether it is the first.
fn is_ready<'a>(first: &OwnedFd, others: impl Iterator<Item = &'a File>, left: Option<Duration>) -> Result<bool> {
    let mut polled = vec![PollFd::new(first, PollFlags::IN)];
    polled.extend(others.map(|file| PollFd::new(file, PollFlags::IN)));
    let left = left.map(Timespec::try_from).transpose().context("a time that is too long")?;
    match poll(&mut polled, left.as_ref()) {
        Ok(_) => Ok(polled[0].revents().contains(PollFlags::IN)),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).context("the servers of disks cannot be waited for"),
    }
}
