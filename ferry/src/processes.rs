//! Several servers: one process for each disk, and for each share of a configuration file, so that storage that hangs and a guest that
//! breaks out of its server reach no other one, and each can be added and removed while the others go on.
//!
//! The parent starts the children, and waits. It forwards signals, prints in JSON what is up, and removes the socket files of disks at
//! the end. With a configuration file it is also their manager ([`manager`]), and then keeps the rights that it was started with.

mod child;
mod manager;
mod plan;
mod servers;
mod unit;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use ferry_control::{Logging, MetricsAddress, TraceOptions};
use ferry_isolation::BlockedSignals;

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

use child::ChildContext;
use manager::{Manager, Outcome, Supervisor};
use plan::Base;
use servers::Servers;
use unit::Unit;

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
    (logging, is_level_given): (&Logging, bool),
) -> Result<u8> {
    let base = Base {
        sandbox_flags: sandbox_flags.clone(),
        of_file: file.sandbox_flags(),
        metrics: file.metrics.clone(),
        level: if is_level_given { None } else { Some(file.log.clone()) },
    };
    let metrics = metrics.or(file.metrics);
    let tables = file.share_tables.into_iter().map(Some).chain(std::iter::repeat(None));
    let shares: Vec<_> = file.shares.into_iter().chain(more).zip(tables).collect();
    let all: Vec<Share> = shares.iter().map(|(share, _)| share.clone()).collect();
    if all.is_empty() {
        let path = path.display();
        if metrics.is_some() {
            return Err(misuse(anyhow!(
                "metrics are those of shares, and {path} has none: give each [[disk]] its own metrics"
            )));
        }
        if trace.is_some() {
            return Err(misuse(anyhow!("--trace is for shares, and {path} has none: use ferry disk --trace")));
        }
    }
    share::refuse_duplicates(&all, &file.disks).map_err(misuse)?;
    // Inherited descriptors first: files that this process opens could have their numbers.
    let inherited = share::inherit(&all)?;
    service_manager::inherit(&all, file.disks.iter().map(disk::Args::socket))?;
    let inherited_disks = disk::inherit(&file.disks)?;
    let mut units = match metrics.is_some() || trace.is_some() {
        true => vec![Unit { metrics, trace, ..Unit::of_group(shares, &sandbox_flags) }],
        false => Unit::of_shares(shares, &sandbox_flags),
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
    // Each server takes some descriptors here.
    sandbox::raise_descriptor_limit();
    let is_managed = manager.is_some();
    let manager = manager.and_then(|(path, base)| Manager::start(path, base));
    let mut supervisor = Supervisor { servers: Servers::new(is_managed, json), manager };
    let context = ChildContext { signals, logging, json };
    let mut bound = bound.into_iter();
    while let Some((unit, socket, own)) = bound.next() {
        if let Some(task) = supervisor.servers.begin(unit, socket, own, false)? {
            supervisor.leave();
            bound.filter_map(|(_, socket, _)| socket).for_each(|mut socket| socket.leave());
            return task.run(&context);
        }
    }
    if !is_managed {
        sandbox::confine_supervisor(&sandbox_flags)?;
    }
    let arrives = signals.descriptor()?;
    match supervisor.wait(&signals, &arrives)? {
        Outcome::Ended(status) => Ok(status),
        Outcome::Child(task) => {
            drop(arrives);
            supervisor.leave();
            task.run(&context)
        }
    }
}
