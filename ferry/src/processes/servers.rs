//! The children of a process that serves several units, seen from that process.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_isolation::{BlockedSignals, Child, End};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use serde_json::Value;

use super::manager::Manager;
use super::plan::Served;
use super::unit::Unit;
use super::{Report, ReportSender, Task};
use crate::disk::{self, PATIENCE};
use crate::new_files::{NewFiles, Success};
use crate::output::print_json;
use crate::paths::absolute;
use crate::sandbox;
use crate::service_manager;
use crate::socket::ListenSocket;

/// The maximum length in bytes of a child's report, which has a few paths per disk or share.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// How long disks that are not open yet may take to end: each removes its files.
const GRACE: Duration = Duration::from_secs(1);

pub struct Servers {
    pub all: Vec<Server>,
    /// `None`: what is served cannot change.
    pub manager: Option<Manager>,
    /// The JSON has a list of shares, which may be empty.
    has_shares: bool,
    json: bool,
    /// The start has succeeded; a disk that comes up later does not change that.
    pub is_announced: bool,
    /// When the first signal to end arrived.
    pub ending: Option<Instant>,
    status: u8,
}

pub struct Server {
    pub unit: Unit,
    pub child: Child,
    /// The socket of a disk, whose file this process removes.
    pub socket: Option<ListenSocket>,
    /// The pipe of its report; `None` once that has arrived.
    pipe: Option<File>,
    line: Vec<u8>,
    report: Option<Report>,
    /// The signal that the start has succeeded; `None` once it has failed.
    pub success: Option<Success>,
    pub end: Option<End>,
    /// A change has started it and is not complete.
    pub is_new: bool,
    /// A change ends it.
    pub is_removed: bool,
}

/// Why the wait for children has ended.
pub enum Outcome {
    /// All have; the exit status.
    Ended(u8),
    /// This process is a new child.
    Child(Box<Task>),
}

impl Servers {
    pub fn new(manager: Option<Manager>, has_shares: bool, json: bool) -> Self {
        Self { all: Vec::new(), manager, has_shares, json, is_announced: false, ending: None, status: 0 }
    }

    /// Starts a child. In the child only, returns its task. `is_new`: a change starts it.
    pub fn begin(
        &mut self,
        unit: Unit,
        socket: Option<ListenSocket>,
        inherited: HashMap<u16, ListenSocket>,
        is_new: bool,
    ) -> Result<Option<Task>> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe")?;
        let success = Success::new()?;
        let Some(child) = ferry_isolation::begin_child()? else {
            let success = success.of_parent();
            let report = ReportSender::new(writer, success.try_clone()?);
            return Ok(Some(Task { unit, socket, inherited, report, new_files: NewFiles::new(success) }));
        };
        drop(writer);
        rustix::io::ioctl_fionbio(&reader, true).context("cannot use a pipe")?;
        self.all.push(Server {
            unit,
            child,
            socket,
            pipe: Some(reader.into()),
            line: Vec::new(),
            report: None,
            success: Some(success),
            end: None,
            is_new,
            is_removed: false,
        });
        Ok(None)
    }

    /// Closes what the parent has, in a child. The parent removes the files.
    pub fn leave(mut self) {
        self.all.iter_mut().filter_map(|server| server.socket.as_mut()).for_each(ListenSocket::leave);
        if let Some(manager) = self.manager.take() {
            manager.leave();
        }
    }

    /// Returns what runs, or will.
    pub fn served(&self) -> Vec<Served<'_>> {
        let runs = |server: &Server| server.end.is_none() && !server.is_removed;
        let all = self.all.iter().enumerate().filter(|(_, server)| runs(server));
        all.map(|(index, server)| Served { index, unit: &server.unit }).collect()
    }

    /// Waits until all have ended, and forwards signals; `arrives` can be read when there is one.
    pub fn wait(&mut self, signals: &BlockedSignals, arrives: &OwnedFd) -> Result<Outcome> {
        let begun = Instant::now();
        loop {
            for number in 0..self.all.len() {
                if let Some(end) = self.all[number].poll()? {
                    self.take_end(number, end);
                }
            }
            if let Some(task) = self.manage()? {
                return Ok(Outcome::Child(Box::new(task)));
            }
            let grace = self.ending.map(|begun| GRACE.saturating_sub(begun.elapsed()));
            // A child whose storage hangs cannot even be killed; it ends when the storage answers.
            let hangs =
                |server: &Server| grace == Some(Duration::ZERO) && server.unit.disk().is_some() && !server.is_up();
            if self.all.iter().all(|server| server.end.is_some() || hangs(server)) {
                return Ok(Outcome::Ended(self.status));
            }
            let is_decided = self.all.iter().all(|server| server.end.is_some() || server.is_up());
            // Shares are always announced when they are up; disks are announced in the state that they are in by then.
            let are_shares_up = self.all.iter().all(|server| server.unit.disk().is_some() || server.is_up());
            let is_late = are_shares_up && begun.elapsed() >= PATIENCE;
            if !self.is_announced && self.ending.is_none() && (is_decided || is_late) {
                self.is_announced = true;
                self.all.iter().filter_map(|server| server.success.as_ref()).for_each(Success::send);
                self.announce()?;
                service_manager::ready();
            }
            let patience = (!self.is_announced && are_shares_up).then(|| PATIENCE.saturating_sub(begun.elapsed()));
            let left = grace.filter(|left| !left.is_zero()).or(patience.filter(|_| grace.is_none()));
            let left = left.into_iter().chain(self.manager.as_ref().and_then(Manager::left)).min();
            let pipes = self.all.iter().filter_map(|server| server.pipe.as_ref()).map(AsFd::as_fd);
            let clients = self.manager.iter().flat_map(Manager::descriptors);
            if is_ready(arrives, pipes.chain(clients), left)?
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
        let (name, was_up) = (server.unit.shown(), server.is_up());
        let is_expected = server.is_new || server.is_removed || self.ending.is_some() && !was_up;
        if end == End::Status(0) || is_expected {
            return;
        }
        self.status = self.status.max(end.status());
        if let End::Signal(_) = end {
            eprintln!("ferry: the server of {name} was ended by {end}");
        }
        if self.ending.is_some() {
            return;
        }
        if was_up || !self.is_announced {
            self.forward(Signal::TERM, false);
        } else {
            eprintln!("ferry: {name} is not served; the others are");
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
            let reports = there().filter(|server| server.unit.disk().is_none()).map(Server::to_json);
            let shares = reports.flat_map(|report| report.as_array().cloned().unwrap_or_default());
            line["shares"] = shares.collect();
        }
        if self.all.iter().any(|server| server.unit.disk().is_some()) {
            line["disks"] = there().filter(|server| server.unit.disk().is_some()).map(Server::to_json).collect();
        }
        print_json(&line)
    }
}

impl Server {
    pub fn is_up(&self) -> bool {
        matches!(self.report, Some(Report::Up(_)))
    }

    /// Returns why it does not serve, once that is known.
    pub fn failure(&self) -> Option<String> {
        match (&self.report, self.end) {
            (Some(Report::Failed(why)), _) => Some(why.clone()),
            (_, Some(end)) => Some(format!("the server of {} was ended by {end}", self.unit.shown())),
            (_, None) => None,
        }
    }

    /// Reads its report, and returns how it ended, once.
    fn poll(&mut self) -> Result<Option<End>> {
        if let Some(pipe) = &mut self.pipe {
            let left = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
            let read = pipe.take(left).read_to_end(&mut self.line);
            let is_whole = self.line.ends_with(b"\n");
            let goes_on = read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock) && !is_whole;
            self.pipe = self.pipe.take().filter(|_| goes_on);
            if is_whole {
                let report = serde_json::from_slice(&std::mem::take(&mut self.line));
                self.report =
                    Some(report.unwrap_or_else(|error| Report::Failed(format!("an invalid report: {error}"))));
            }
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
                "file": self.unit.shown(),
                "vhost_user": disk.vhost_user.as_deref().map(absolute),
                "fd": disk.fd,
                "bytes": null,
            })
        };
        match &self.report {
            Some(Report::Up(report)) => report.clone(),
            _ => self.unit.disk().map(unknown).unwrap_or_default(),
        }
    }
}

/// Waits until one of the descriptors can be read; returns whether it is the first.
fn is_ready<'a>(first: &OwnedFd, others: impl Iterator<Item = BorrowedFd<'a>>, left: Option<Duration>) -> Result<bool> {
    let others: Vec<_> = others.collect();
    let mut polled = vec![PollFd::new(first, PollFlags::IN)];
    polled.extend(others.iter().map(|other| PollFd::new(other, PollFlags::IN)));
    let left = left.map(Timespec::try_from).transpose().context("the timeout is too long")?;
    match poll(&mut polled, left.as_ref()) {
        Ok(_) => Ok(polled[0].revents().contains(PollFlags::IN)),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno).context("cannot wait for the servers"),
    }
}
