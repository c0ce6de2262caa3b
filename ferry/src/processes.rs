//! Several servers: one process for each disk, and for each share of a configuration file, so that storage that hangs, a crash or a
//! guest that breaks out harms no other server, and each can be added and removed while the others go on.
//!
//! The parent starts the children, and waits. It forwards signals, prints in JSON what is up, and removes the socket files of disks at
//! the end. With a configuration file it is also their manager ([`manager`]), and then keeps the rights that it was started with.

mod manager;
mod plan;
mod servers;
mod unit;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result};
use ferry_control::{Logging, MetricsAddress, TraceOptions};
use ferry_isolation::BlockedSignals;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config;
use crate::disk;
use crate::flags::Share;
use crate::new_files::{NewFiles, Success};
use crate::output::print_json;
use crate::paths::start_dir;
use crate::sandbox::{self, SandboxFlags};
use crate::service_manager;
use crate::share::{self, Start};
use crate::socket::ListenSocket;
use crate::status::misuse;

use manager::Manager;
use plan::Base;
use servers::{Outcome, Servers};
use unit::{Items, Unit};

pub use plan::units_of_command;

/// Serves the shares of a command line until SIGTERM or SIGINT, or until nothing is left to serve. Returns the exit status.
pub fn run_shares(
    shares: &[Share],
    (sandbox_flags, json): (&SandboxFlags, bool),
    (metrics, trace): (Option<&MetricsAddress>, Option<&TraceOptions>),
    logging: &Logging,
) -> Result<u8> {
    share::refuse_duplicates(shares, &[]).map_err(misuse)?;
    let inherited = share::inherit(shares)?;
    service_manager::inherit(shares, std::iter::empty())?;
    let once = shares.iter().any(|share| share.once);
    let new_files = NewFiles::new(Success::new()?);
    let start = Start { shares, words: &[], inherited, sandbox_flags: Some(sandbox_flags), logging, metrics, trace };
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

/// Serves what a configuration file lists, and shares of the command line, each in its own process if possible, until SIGTERM or
/// SIGINT, or until nothing is left to serve. Returns the exit status.
pub fn run_file(
    (path, file): (&Path, config::File),
    more: Vec<Share>,
    (sandbox_flags, json): (SandboxFlags, bool),
    (metrics, trace): (Option<MetricsAddress>, Option<TraceOptions>),
    logging: &Logging,
) -> Result<u8> {
    let base =
        Base { sandbox_flags: sandbox_flags.clone(), of_file: file.sandbox_flags(), metrics: file.metrics.clone() };
    let metrics = metrics.or(file.metrics);
    let tables = file.share_tables.into_iter().map(Some).chain(std::iter::repeat(None));
    let shares: Vec<_> = file.shares.into_iter().chain(more).zip(tables).collect();
    let all: Vec<Share> = shares.iter().map(|(share, _)| share.clone()).collect();
    share::refuse_duplicates(&all, &file.disks).map_err(misuse)?;
    // Inherited descriptors first: files that this process opens could have their numbers.
    let inherited = share::inherit(&all)?;
    service_manager::inherit(&all, file.disks.iter().map(disk::Args::socket))?;
    let inherited_disks = disk::inherit(&file.disks)?;
    let mut units = match metrics.is_some() || trace.is_some() {
        true if !shares.is_empty() => vec![Unit { metrics, trace, ..Unit::of_group(shares, &sandbox_flags) }],
        _ => Unit::of_shares(shares, &sandbox_flags),
    };
    let disks = file.disks.into_iter().zip(file.disk_tables);
    units.extend(disks.map(|(disk, table)| Unit::of_disk(disk, Some(table), &sandbox_flags)));
    let manager = Some((start_dir().join(path), base));
    let signals = BlockedSignals::hold()?;
    run_all(Launch { units, inherited, inherited_disks, manager, sandbox_flags, json, signals, logging })
}

/// Serves disks until SIGTERM or SIGINT, each in its own process if there are several; returns the exit status.
pub fn run_disks(disks: Vec<disk::Args>, logging: &Logging) -> Result<u8> {
    if disks.iter().any(|disk| disk.print_capabilities) {
        return print_json(&serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] })).map(|()| 0);
    }
    disk::refuse_duplicates(&disks).map_err(misuse)?;
    // Signals are blocked until they are caught, in either process.
    let signals = BlockedSignals::hold()?;
    // Inherited descriptors first: files that this process opens could have their numbers.
    let inherited_disks = disk::inherit(&disks)?;
    service_manager::inherit(&[], disks.iter().map(disk::Args::socket))?;
    let sandbox_flags = disks.first().map(|disk| disk.sandbox_flags.clone()).unwrap_or_default();
    let json = disks.iter().any(|disk| disk.json);
    if disks.len() > 1 {
        let units = disks.into_iter().map(|disk| Unit::of_disk(disk, None, &sandbox_flags)).collect();
        let (inherited, manager) = (HashMap::new(), None);
        return run_all(Launch { units, inherited, inherited_disks, manager, sandbox_flags, json, signals, logging });
    }
    let new_files = NewFiles::new(Success::new()?);
    disk::serve(&disks, inherited_disks, (&sandbox_flags, signals, logging), new_files, |opened| {
        match json {
            true => print_json(&serde_json::json!({ "pid": sandbox::pid(), "disks": opened.to_json() }))?,
            false => opened.announce()?,
        }
        Ok(true)
    })
}

/// Several servers that are not started yet.
struct Launch<'a> {
    units: Vec<Unit>,
    /// The inherited sockets of shares by number, and those of disks in their order.
    inherited: HashMap<u16, ListenSocket>,
    inherited_disks: Vec<Option<ListenSocket>>,
    /// The configuration file that can be read again.
    manager: Option<(PathBuf, Base)>,
    sandbox_flags: SandboxFlags,
    json: bool,
    signals: BlockedSignals,
    logging: &'a Logging,
}

/// Serves all; returns the exit status, in the parent and in every child.
fn run_all(launch: Launch<'_>) -> Result<u8> {
    let Launch { units, mut inherited, inherited_disks, manager, sandbox_flags, json, signals, logging } = launch;
    // Before the first child, so that errors appear at once.
    let mut disks = inherited_disks.into_iter();
    let mut bound = Vec::new();
    for unit in units {
        let socket = match unit.disk() {
            Some(disk) => disk::bind(disk, disks.next().flatten())?,
            None => None,
        };
        let numbers = unit.shares().iter().filter_map(|share| share.fd);
        let own = numbers.filter_map(|number| inherited.remove_entry(&number)).collect();
        bound.push((unit, socket, own));
    }
    sandbox::set_public_pid();
    // Paths in messages, and the file that is read again, are relative to it.
    start_dir();
    let is_managed = manager.is_some();
    let mut servers = Servers::new(manager.and_then(|(path, base)| Manager::start(path, base)), is_managed, json);
    let context = ChildContext { signals, logging, json };
    let mut bound = bound.into_iter();
    while let Some((unit, socket, own)) = bound.next() {
        if let Some(task) = servers.begin(unit, socket, own, false)? {
            servers.leave();
            bound.filter_map(|(_, socket, _)| socket).for_each(|mut socket| socket.leave());
            return task.run(&context);
        }
    }
    if !is_managed {
        sandbox::confine_supervisor(&sandbox_flags)?;
    }
    let arrives = signals.descriptor()?;
    match servers.wait(&signals, &arrives)? {
        Outcome::Ended(status) => Ok(status),
        Outcome::Child(task) => {
            drop(arrives);
            servers.leave();
            task.run(&context)
        }
    }
}

/// What every child needs.
struct ChildContext<'a> {
    signals: BlockedSignals,
    logging: &'a Logging,
    json: bool,
}

/// What a child has to do.
struct Task {
    unit: Unit,
    /// The socket of a disk.
    socket: Option<ListenSocket>,
    /// The inherited sockets of shares.
    inherited: HashMap<u16, ListenSocket>,
    report: ReportSender,
    new_files: NewFiles,
}

impl Task {
    /// Serves, and returns the exit status.
    fn run(self, context: &ChildContext<'_>) -> Result<u8> {
        service_manager::leave();
        let Self { unit, socket, inherited, report, new_files } = self;
        let Unit { items, sandbox_flags, metrics, trace, .. } = unit;
        let &ChildContext { signals, logging, json } = context;
        let failure = report.clone();
        let outcome = match items {
            Items::Shares(shares) => {
                let (metrics, trace) = (metrics.as_ref(), trace.as_ref());
                let start = Start {
                    shares: &shares,
                    words: &[],
                    inherited,
                    sandbox_flags: Some(&sandbox_flags),
                    logging,
                    metrics,
                    trace,
                };
                start.run(signals, new_files, |up| {
                    let is_announced = report.send(share::statuses(up))?;
                    if is_announced && !json {
                        share::announce(&shares, up)?;
                    }
                    Ok(is_announced)
                })
            }
            Items::Disk(disk) => serve_disk(&disk, socket, (&sandbox_flags, context), (report, new_files)),
        };
        outcome.inspect_err(|error| failure.fail(&format!("{error:#}")))
    }
}

fn serve_disk(
    disk: &disk::Args,
    mut socket: Option<ListenSocket>,
    (sandbox_flags, context): (&SandboxFlags, &ChildContext<'_>),
    (report, new_files): (ReportSender, NewFiles),
) -> Result<u8> {
    service_manager::close_sockets();
    socket.as_mut().map_or(Ok(()), ListenSocket::take_over)?;
    let &ChildContext { signals, logging, json } = context;
    disk::serve(std::slice::from_ref(disk), vec![socket], (sandbox_flags, signals, logging), new_files, |opened| {
        let is_announced = report.send(opened.to_json().into_iter().next().unwrap_or_default())?;
        if is_announced && !json {
            opened.announce()?;
        }
        Ok(is_announced)
    })
}

/// What a child reports, once; a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Report {
    /// It is up, and serves this.
    Up(Value),
    /// Why it is not.
    Failed(String),
}

/// Sends a child's report to the parent. Clones share the pipe, which is closed when the report is sent.
#[derive(Clone)]
struct ReportSender {
    pipe: Rc<RefCell<Option<OwnedFd>>>,
    success: Rc<Success>,
}

impl ReportSender {
    fn new(pipe: OwnedFd, success: Success) -> Self {
        Self { pipe: Rc::new(RefCell::new(Some(pipe))), success: Rc::new(success) }
    }

    /// Sends what the child serves; waits for the start's outcome, and returns whether it has succeeded.
    ///
    /// # Errors
    /// The parent has ended.
    fn send(self, what: Value) -> Result<bool> {
        self.write(&Report::Up(what)).context("the parent process has ended")?;
        Ok(self.success.wait())
    }

    /// Sends why the child serves nothing, unless it has reported.
    fn fail(&self, why: &str) {
        // A parent that has ended needs no report.
        let _ = self.write(&Report::Failed(why.into()));
    }

    fn write(&self, report: &Report) -> Result<()> {
        let Some(pipe) = self.pipe.borrow_mut().take() else { return Ok(()) };
        Ok(File::from(pipe).write_all(format!("{}\n", serde_json::to_string(report)?).as_bytes())?)
    }
}
