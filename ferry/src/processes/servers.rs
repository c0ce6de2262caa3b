//! The children of a process that serves several units, seen from that process.

use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_isolation::{Child, End};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use serde_json::Value;

use super::child::{Report, ReportSender, Task};
use super::plan::RunningServer;
use super::unit::Unit;
use crate::disk::{self, PATIENCE};
use crate::new_files::{NewFiles, Success};
use crate::output::{print_json, say};
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
    /// The JSON has a list of shares, which may be empty.
    has_shares: bool,
    json: bool,
    /// The start has succeeded; a disk that comes up later does not change that.
    pub is_announced: bool,
    /// When the first signal to end arrived.
    pub ending: Option<Instant>,
    begun: Instant,
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
    /// The signal that the start has succeeded; `None` once that is sent, or the start has failed.
    pub success: Option<Success>,
    pub end: Option<End>,
    /// A change has started it and is not complete.
    pub is_new: bool,
    /// A change ends it.
    pub is_removed: bool,
    /// The change no longer waits for its end.
    pub is_abandoned: bool,
}

impl Servers {
    pub fn new(has_shares: bool, json: bool) -> Self {
        let begun = Instant::now();
        Self { all: Vec::new(), has_shares, json, is_announced: false, ending: None, begun, status: 0 }
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
            is_abandoned: false,
        });
        Ok(None)
    }

    /// Closes what the parent has, in a child. The parent removes the files.
    pub fn leave(mut self) {
        self.all.iter_mut().filter_map(|server| server.socket.as_mut()).for_each(ListenSocket::leave);
    }

    /// Returns what runs, or will.
    pub fn served(&self) -> Vec<RunningServer<'_>> {
        let runs = |server: &Server| server.end.is_none() && !server.is_removed;
        let all = self.all.iter().enumerate().filter(|(_, server)| runs(server));
        all.map(|(index, server)| RunningServer::new(index, &server.unit)).collect()
    }

    /// Looks for reports and ends.
    pub fn poll(&mut self) -> Result<()> {
        // Before the reports are read, so that none is missed.
        let has_ended = has_ended_child();
        for number in 0..self.all.len() {
            self.all[number].read_report();
            if has_ended && let Some(end) = self.all[number].poll_end()? {
                self.take_end(number, end);
            }
        }
        Ok(())
    }

    /// Returns the exit status once all have ended; otherwise announces what is up, once.
    pub fn outcome(&mut self) -> Result<Option<u8>> {
        let is_over = self.ending.is_some_and(|begun| begun.elapsed() >= GRACE);
        // A child whose storage hangs cannot even be killed; it ends when the storage answers.
        let hangs = |server: &Server| is_over && server.unit.disk().is_some() && !server.is_up();
        if self.all.iter().all(|server| server.end.is_some() || hangs(server)) {
            return Ok(Some(self.status));
        }
        let is_decided = self.all.iter().all(|server| server.end.is_some() || server.is_up());
        // Shares are always announced when they are up; disks are announced in the state that they are in by then.
        let is_late = self.are_shares_up() && self.begun.elapsed() >= PATIENCE;
        if !self.is_announced && self.ending.is_none() && (is_decided || is_late) {
            self.is_announced = true;
            self.all.iter_mut().filter_map(|server| server.success.take()).for_each(|success| success.send());
            self.announce()?;
            service_manager::ready();
        }
        Ok(None)
    }

    fn are_shares_up(&self) -> bool {
        self.all.iter().all(|server| server.unit.disk().is_some() || server.is_up())
    }

    /// Returns the time until [`Self::outcome`] must be called even if nothing is reported.
    pub fn left(&self) -> Option<Duration> {
        match self.ending {
            Some(begun) => Some(GRACE.saturating_sub(begun.elapsed())).filter(|left| !left.is_zero()),
            None => (!self.is_announced && self.are_shares_up()).then(|| PATIENCE.saturating_sub(self.begun.elapsed())),
        }
    }

    /// Returns what becomes readable when a child reports.
    pub fn pipes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.all.iter().filter_map(|server| server.pipe.as_ref()).map(AsFd::as_fd)
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
            say(format_args!("the server of {name} was ended by {end}"));
        }
        if self.ending.is_some() {
            return;
        }
        if was_up || !self.is_announced {
            self.forward(Signal::TERM, false);
        } else {
            say(format_args!("{name} is not served; the others are"));
        }
    }

    /// Forwards a signal, unless a terminal has sent it to all processes.
    pub fn forward(&mut self, signal: Signal, from_terminal: bool) {
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

/// Whether any child has ended that was not waited for. A call for each of many children would take long while they start.
fn has_ended_child() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::All, options), Ok(None))
}

impl Server {
    pub fn is_up(&self) -> bool {
        matches!(self.report, Some(Report::Up(_)))
    }

    /// Whether a change waits for its end.
    pub fn is_ending(&self) -> bool {
        self.is_removed && !self.is_abandoned && self.end.is_none()
    }

    /// Returns why it does not serve, once that is known.
    pub fn failure(&self) -> Option<String> {
        match (&self.report, self.end) {
            (Some(Report::Failed(why)), _) => Some(why.clone()),
            (_, Some(end)) => Some(format!("the server of {} was ended by {end}", self.unit.shown())),
            (_, None) => None,
        }
    }

    fn read_report(&mut self) {
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
    }

    /// Returns how it ended, once.
    fn poll_end(&mut self) -> Result<Option<End>> {
        if self.end.is_some() {
            return Ok(None);
        }
        self.end = self.child.end()?;
        if self.end.is_some() {
            // Nobody waits for a server that does not come, and another one can be at the same place.
            self.socket = None;
        }
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
