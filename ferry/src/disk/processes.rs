//! Several disks: each is opened and served by a process of its own, so that one whose storage hangs holds up no other.
//!
//! This process makes the sockets, begins the others, which do all that one does for one disk, and waits. It passes signals on, says in
//! JSON what is up, and removes the sockets' files in the end.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_isolation::{Child, End, Held};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use super::disks::{PATIENCE, bind};
use super::{Args, Disks, say, serve};
use crate::sandbox::{self, Walls};
use crate::share::shown;
use crate::socket::Bound;

/// What a process may say of its disk, which is mostly two paths.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// Serves disks; returns the status to end with, in each of the processes that there are then.
pub fn run(disks: &[Args], inherited: Vec<Option<Bound>>, walls: &Walls, signals: Held) -> Result<u8> {
    let bound = disks.iter().zip(inherited).map(|(disk, inherited)| bind(disk, inherited));
    let mut sockets = bound.collect::<Result<Vec<_>>>()?;
    sandbox::be_known();
    let json = disks.iter().any(|disk| disk.json);
    let mut servers = Servers { all: Vec::new(), json, is_told: false, is_ending: false, status: 0 };
    for number in 0..disks.len() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("no pipe can be had")?;
        let Some(child) = ferry_isolation::begin_child()? else {
            drop((servers, reader));
            let mut own = sockets.get_mut(number).and_then(Option::take);
            own.as_mut().map_or(Ok(()), Bound::take_over)?;
            sockets.iter_mut().flatten().for_each(Bound::leave);
            drop(sockets);
            let disk = disks.get(number..=number).unwrap_or_default();
            return serve(disk, vec![own], walls, signals, |opened| tell(opened, writer, json));
        };
        drop(writer);
        rustix::io::ioctl_fionbio(&reader, true).context("cannot use a pipe")?;
        servers.all.push(Server {
            disk: &disks[number],
            child,
            says: Some(reader.into()),
            line: Vec::new(),
            is_killed: false,
            end: None,
        });
    }
    let arrives = signals.descriptor()?;
    // No file is opened from here on, and no descriptor made: for the paths of messages the folder is known already.
    crate::share::here();
    sandbox::stay_outside(walls)?;
    servers.wait(&signals, &arrives)
}

/// Says that a disk is up: to the process that waits, what it is, and to a person, unless a program is told.
fn tell(opened: &Disks<'_>, writer: OwnedFd, json: bool) -> Result<()> {
    if !json {
        opened.announce()?;
    }
    let line = opened.described().into_iter().next().unwrap_or_default();
    File::from(writer).write_all(format!("{line}\n").as_bytes()).context("the process that was started has gone")
}

/// The processes that serve.
struct Servers<'a> {
    all: Vec<Server<'a>>,
    json: bool,
    /// It was said what is up; a disk that is not is on its own from then on.
    is_told: bool,
    is_ending: bool,
    /// To end with.
    status: u8,
}

/// A process that serves a disk.
struct Server<'a> {
    disk: &'a Args,
    child: Child,
    /// Where it says that its disk is up; none once it has.
    says: Option<File>,
    line: Vec<u8>,
    /// It was killed, for its disk was not up when all were to end.
    is_killed: bool,
    end: Option<End>,
}

impl Servers<'_> {
    /// Waits until all have ended, for signals, which are told by a descriptor that `arrives`.
    fn wait(&mut self, signals: &Held, arrives: &OwnedFd) -> Result<u8> {
        let begun = Instant::now();
        loop {
            for number in 0..self.all.len() {
                if let Some(end) = self.all[number].look()? {
                    self.take_end(number, end);
                }
            }
            // One that hangs may not even be killed: it goes when its storage answers, or is given up.
            if self.all.iter().all(|server| server.end.is_some() || self.is_ending && !server.is_up()) {
                return Ok(self.status);
            }
            let is_decided = self.all.iter().all(|server| server.end.is_some() || server.is_up());
            if !self.is_told && !self.is_ending && (is_decided || begun.elapsed() >= PATIENCE) {
                self.is_told = true;
                self.announce()?;
            }
            let left = (!self.is_told).then(|| PATIENCE.saturating_sub(begun.elapsed()));
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
        if end == End::Status(0) || self.is_ending && (!was_up || server.is_killed) {
            return;
        }
        self.status = self.status.max(end.status());
        if let End::Signal(_) = end {
            eprintln!("ferry: the server of {file} was ended by {end}");
        }
        if self.is_ending {
            return;
        }
        if was_up || !self.is_told {
            self.pass_on(Signal::TERM, false);
        } else {
            eprintln!("ferry: {file} is not served; the other disks are");
        }
    }

    /// Passes a signal on, but for one that a terminal has sent to all. Those that are not up yet have it wait, and are ended.
    fn pass_on(&mut self, signal: Signal, from_terminal: bool) {
        let ends = [Signal::TERM, Signal::INT, Signal::QUIT].contains(&signal);
        self.is_ending |= ends;
        for server in self.all.iter_mut().filter(|server| server.end.is_none()) {
            // It may have come up since.
            server.hear();
            match server.is_up() {
                true if !from_terminal => server.child.signal(signal),
                false if ends => {
                    server.is_killed = true;
                    server.child.signal(Signal::KILL);
                }
                _ => {}
            }
        }
    }

    /// Tells a program what is up, and what is not.
    fn announce(&self) -> Result<()> {
        let there = self.all.iter().filter(|server| server.end.is_none() || server.is_up());
        let disks: Vec<_> = there.map(Server::described).collect();
        match self.json && !disks.is_empty() {
            true => say(&serde_json::json!({ "pid": sandbox::pid(), "disks": disks })),
            false => Ok(()),
        }
    }
}

impl Server<'_> {
    fn shown(&self) -> String {
        self.disk.path().map(shown).unwrap_or_default()
    }

    fn is_up(&self) -> bool {
        self.line.ends_with(b"\n")
    }

    /// Reads what it says.
    fn hear(&mut self) {
        if let Some(says) = &mut self.says {
            let left = LINE_BYTES_MAX.saturating_sub(self.line.len() as u64);
            let heard = says.take(left).read_to_end(&mut self.line);
            let goes_on = heard.is_err_and(|error| error.kind() == ErrorKind::WouldBlock) && !self.is_up();
            self.says = self.says.take().filter(|_| goes_on);
        }
    }

    /// Reads what it says, and returns how it ended, once.
    fn look(&mut self) -> Result<Option<End>> {
        self.hear();
        if self.end.is_some() {
            return Ok(None);
        }
        self.end = self.child.end()?;
        Ok(self.end)
    }

    /// What it said of its disk, or, as long as it does not know, which one it is.
    fn described(&self) -> serde_json::Value {
        let unknown = serde_json::json!({
            "file": self.shown(),
            "vhost_user": self.disk.vhost_user.as_deref().map(shown),
            "fd": self.disk.fd,
            "bytes": null,
        });
        serde_json::from_slice(&self.line).unwrap_or(unknown)
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
