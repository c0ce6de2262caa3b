//! What a change of a running process does. All of it is found before anything is done, so a change that is refused changes nothing.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Result, anyhow, bail, ensure};
use ferry_control::{LogLevel, MetricsAddress, Setting};

use super::unit::{Items, Unit, places_of_disk, places_of_share};
use crate::cli::{Cli, Command};
use crate::config;
use crate::disk;
use crate::flags::{Limit, Share};
use crate::groups::{self, Invocation};
use crate::sandbox::SandboxFlags;
use crate::{share, source};

/// The keys of a table that can change while the share or disk is served.
const LIVE: [&str; 5] = ["limit", "poll-us", "entry-timeout", "attr-timeout", "negative-timeout"];

/// The maximum number of server processes; clients read reports of a thousand shares.
const SERVERS_MAX: usize = 1000;

/// What a change does.
#[derive(Debug, Default)]
pub struct Plan {
    /// Processes to start.
    pub starts: Vec<Unit>,
    /// The indexes of the servers to end.
    pub ends: Vec<usize>,
    /// Servers to start in place of others.
    pub replaces: Vec<Replacement>,
    /// Settings of items that go on.
    pub settings: Vec<ItemSettings>,
    /// The new level of the log, if it changes; `None` inside: the default.
    pub level: Option<Option<LogLevel>>,
    /// What the configuration file says now of items that go on: the index of the server, that of the item, and its table.
    pub tables: Vec<(usize, usize, toml::Table)>,
    /// What these items are then, should their server be started again: the index of the server, that of the item, and the item.
    pub items: Vec<(usize, usize, Items)>,
    /// What else the user should know.
    pub notes: Vec<String>,
}

/// A server with other flags.
#[derive(Debug)]
pub struct Replacement {
    /// The index of the server that it replaces.
    pub server: usize,
    pub unit: Unit,
    /// What changes, for messages.
    pub keys: String,
}

/// The settings of an item that change.
#[derive(Debug)]
pub struct ItemSettings {
    /// The index of the server.
    pub server: usize,
    /// The index of the item.
    pub item: usize,
    pub settings: Vec<Setting>,
    /// The values until now.
    pub undo: Vec<Setting>,
}

/// A server that runs.
#[derive(Clone, Debug)]
pub struct RunningServer<'a> {
    pub index: usize,
    pub unit: &'a Unit,
    /// The places of its items.
    places: Vec<Vec<String>>,
}

impl<'a> RunningServer<'a> {
    pub fn new(index: usize, unit: &'a Unit) -> Self {
        Self { index, unit, places: unit.places() }
    }
}

/// What the process was started with.
#[derive(Clone, Debug, Default)]
pub struct Base {
    /// The confinement of what is added without flags of its own.
    pub sandbox_flags: SandboxFlags,
    /// What the configuration file said of it.
    pub of_file: SandboxFlags,
    pub metrics: Option<MetricsAddress>,
    /// What the configuration file says of the log; `None`: a flag or the environment does.
    pub level: Option<Option<LogLevel>>,
}

/// The level of the log if the configuration file has none.
const DEFAULT_LEVEL: &str = "info";

/// Returns the level of servers, by what the configuration file says: the process itself may log at that of its start.
pub fn level_or_default(level: Option<&LogLevel>) -> Option<LogLevel> {
    level.cloned().or_else(|| DEFAULT_LEVEL.parse().ok())
}

/// Returns the setting of a level.
pub fn level_setting(level: Option<&LogLevel>) -> Setting {
    Setting { name: "log".into(), value: level.map_or(DEFAULT_LEVEL, LogLevel::as_str).into() }
}

/// Plans `ferry add`.
pub fn add(words: &[OsString], directory: &Path, served: &[RunningServer<'_>], base: &Base) -> Result<Plan> {
    let mut starts = units_of_command(words, directory, &base.sandbox_flags)?;
    if let Some(level) = &base.level {
        starts.iter_mut().for_each(|unit| unit.level = level_or_default(level.as_ref()));
    }
    check_count(&starts, served)?;
    check_places(&starts, served)?;
    check_beside(&starts, served)?;
    Ok(Plan { starts, ..Plan::default() })
}

/// Plans `ferry remove`. `item`: the only one to remove of a server.
pub fn remove(index: usize, item: Option<usize>, served: &[RunningServer<'_>]) -> Result<Plan> {
    let unit = served.iter().find(|server| server.index == index).map(|server| server.unit);
    let unit = unit.ok_or_else(|| anyhow!("it has ended meanwhile"))?;
    if let Some(item) = item.filter(|_| unit.len() > 1) {
        let gone = BTreeSet::from([item]);
        bail!(alone(unit, &gone));
    }
    ensure!(served.len() > 1, "{} is the last that this process serves: end the process instead", unit.shown());
    Ok(Plan { ends: vec![index], ..Plan::default() })
}

/// Plans `ferry reload`.
pub fn reload(file: config::File, served: &[RunningServer<'_>], base: &Base) -> Result<Plan> {
    check_process(&file, base)?;
    share::refuse_duplicates(&file.shares, &file.disks)?;
    let mut difference = Difference { served, matched: BTreeSet::new(), plan: Plan::default(), blocked: Vec::new() };
    let mut shares = Vec::new();
    for (share, table) in file.shares.into_iter().zip(file.share_tables) {
        let is_same = |unit: &Unit, item: usize| unit.shares().get(item) == Some(&share);
        match difference.find(&places_of_share(&share), &table, is_same) {
            ItemState::New => shares.push((share, Some(table))),
            ItemState::Known(server, item) => difference.plan.items.push((server, item, Items::Shares(vec![share]))),
            ItemState::Changed(server, keys) => {
                let unit = Unit::of_group(vec![(share, Some(table))], &base.sandbox_flags);
                difference.plan.replaces.push(Replacement { server, unit, keys });
            }
        }
    }
    let mut starts = Unit::of_shares(shares, &base.sandbox_flags);
    for (disk, table) in file.disks.into_iter().zip(file.disk_tables) {
        match difference.find(&places_of_disk(&disk), &table, |unit, _| unit.disk() == Some(&disk)) {
            ItemState::New => starts.push(Unit::of_disk(disk, Some(table), &base.sandbox_flags)),
            ItemState::Known(server, item) => difference.plan.items.push((server, item, Items::Disk(Box::new(disk)))),
            ItemState::Changed(server, keys) => {
                let unit = Unit::of_disk(disk, Some(table), &base.sandbox_flags);
                difference.plan.replaces.push(Replacement { server, unit, keys });
            }
        }
    }
    let mut plan = difference.ends()?;
    let is_replaced = |index| plan.replaces.iter().any(|replacement| replacement.server == index);
    let others: Vec<_> = served.iter().filter(|server| !is_replaced(server.index)).cloned().collect();
    let stays: Vec<_> = others.iter().filter(|server| !plan.ends.contains(&server.index)).cloned().collect();
    let new = || starts.iter().chain(plan.replaces.iter().map(|replacement| &replacement.unit));
    check_count(&starts, served)?;
    // What is removed ends last.
    check_places(new(), &others)?;
    check_beside(new(), &stays)?;
    let uncounted = starts.iter().filter(|unit| base.metrics.is_some() && unit.disk().is_none());
    plan.notes.extend(uncounted.map(|unit| {
        format!("the metrics of {} are those of ferry metrics, and at no address until the next start", unit.shown())
    }));
    plan.starts = starts;
    match &base.level {
        Some(level) => {
            plan.level = (*level != file.log).then(|| file.log.clone());
            let replaced = plan.replaces.iter_mut().map(|replacement| &mut replacement.unit);
            let level = level_or_default(file.log.as_ref());
            plan.starts.iter_mut().chain(replaced).for_each(|unit| unit.level.clone_from(&level));
        }
        None if file.log.is_some() => plan.notes.push("log has no effect beside --log and FERRY_LOG".into()),
        None => {}
    }
    Ok(plan)
}

/// The state of an item of the file.
enum ItemState {
    New,
    /// It is served by this server, as this item, and unchanged.
    Known(usize, usize),
    /// It is served with other flags, by this server alone.
    Changed(usize, String),
}

/// The difference between the configuration file and what runs.
struct Difference<'a> {
    served: &'a [RunningServer<'a>],
    /// The items that the file lists: the index of the server, and that of the item.
    matched: BTreeSet<(usize, usize)>,
    plan: Plan,
    /// What cannot change.
    blocked: Vec<String>,
}

impl Difference<'_> {
    /// Finds an item of the file. `is_same` tells whether one that was added by hand is the same.
    fn find(&mut self, places: &[String], table: &toml::Table, is_same: impl Fn(&Unit, usize) -> bool) -> ItemState {
        let Some((index, unit, item)) = find(places, self.served) else { return ItemState::New };
        let shown = format!("{} at {}", name_of(unit, item), places.join(", "));
        if !self.matched.insert((index, item)) {
            self.blocked.push(format!("{shown} is listed twice"));
            return ItemState::Known(index, item);
        }
        let Some(before) = unit.tables.get(item).and_then(Option::as_ref) else {
            match is_same(unit, item) {
                true => self.plan.tables.push((index, item, table.clone())),
                false => {
                    self.blocked.push(format!("{shown} was added by hand with other settings: ferry remove it first"))
                }
            }
            return ItemState::Known(index, item);
        };
        let keys: BTreeSet<_> = before.keys().chain(table.keys()).collect();
        let changed = keys.into_iter().filter(|key| before.get(*key) != table.get(*key));
        let is_live = |key: &&String| LIVE.contains(&key.as_str()) && (*key != "limit" || one_group(before, table));
        let (live, fixed): (Vec<&String>, Vec<&String>) = changed.partition(is_live);
        if !fixed.is_empty() {
            let keys: Vec<_> = fixed.into_iter().map(String::as_str).collect();
            let keys = format!("{} of {shown}", keys.join(", "));
            if unit.len() == 1 && unit.metrics.is_none() && unit.trace.is_none() {
                return ItemState::Changed(index, keys);
            }
            self.blocked.push(format!(
                "{keys} cannot change while its process serves others, or has an address for metrics: start it again"
            ));
        } else if !live.is_empty() {
            let is_disk = unit.disk().is_some();
            let values = |table| live.iter().map(|key| value_of(table, key, is_disk)).collect();
            self.plan.settings.push(ItemSettings {
                server: index,
                item,
                settings: values(table),
                undo: values(before),
            });
            self.plan.tables.push((index, item, table.clone()));
        }
        ItemState::Known(index, item)
    }

    /// Adds what the file does not list any more; returns the plan if all of it is possible.
    fn ends(mut self) -> Result<Plan> {
        for RunningServer { index, unit, .. } in self.served {
            let is_gone = |item: &usize| unit.tables[*item].is_some() && !self.matched.contains(&(*index, *item));
            let gone: BTreeSet<_> = (0..unit.len()).filter(is_gone).collect();
            match gone.len() {
                0 => {}
                count if count == unit.len() => self.plan.ends.push(*index),
                _ => self.blocked.push(alone(unit, &gone)),
            }
        }
        ensure!(self.blocked.is_empty(), self.blocked.join("; "));
        Ok(self.plan)
    }
}

/// Returns why some items of a server cannot be removed.
fn alone(unit: &Unit, gone: &BTreeSet<usize>) -> String {
    let names = |is_gone: bool| {
        let names = (0..unit.len()).filter(|item| gone.contains(item) == is_gone).map(|item| name_of(unit, item));
        names.collect::<Vec<_>>().join(", ")
    };
    format!(
        "{} cannot be removed without {}: one process serves them, because they have one source, one group of limits, or one address \
         for metrics",
        names(true),
        names(false)
    )
}

fn name_of(unit: &Unit, item: usize) -> String {
    unit.names().into_iter().nth(item).unwrap_or_default()
}

/// Returns the item that has one of these places.
fn find<'a>(places: &[String], served: &[RunningServer<'a>]) -> Option<(usize, &'a Unit, usize)> {
    served.iter().find_map(|server| {
        let is_one = |own: &Vec<String>| own.iter().any(|place| places.contains(place));
        server.places.iter().position(is_one).map(|item| (server.index, server.unit, item))
    })
}

/// Whether the limits of two tables belong to the same group.
fn one_group(before: &toml::Table, after: &toml::Table) -> bool {
    group_of(before) == group_of(after)
}

fn limit_of(table: &toml::Table) -> Option<Limit> {
    table.get("limit").and_then(toml::Value::as_str).and_then(|text| text.parse().ok())
}

fn group_of(table: &toml::Table) -> Option<String> {
    limit_of(table).and_then(|limit| limit.group)
}

/// Returns the value of a setting in a table, as `ferry set` takes it.
fn value_of(table: &toml::Table, key: &str, is_disk: bool) -> Setting {
    let value = match key {
        // The group stays.
        "limit" => limit_of(table).map_or_else(|| "none".into(), |limit| Limit { group: None, ..limit }.to_string()),
        "poll-us" => {
            let default = if is_disk { ferry_blk::Options::default().poll } else { Share::default().poll() };
            let given = table.get(key).and_then(toml::Value::as_integer);
            given.map_or_else(|| default.get().as_micros().to_string(), |us| us.to_string())
        }
        timeout => {
            let given = table.get(timeout).and_then(toml::Value::as_integer);
            given.map_or_else(|| "default".into(), |seconds| seconds.to_string())
        }
    };
    Setting { name: key.into(), value }
}

/// Checks the keys of the whole process, which holds them until it ends.
fn check_process(file: &config::File, base: &Base) -> Result<()> {
    let (now, then) = (file.sandbox_flags(), &base.of_file);
    let changed = [
        ("sandbox", now.sandbox != then.sandbox),
        ("seccomp", now.seccomp != then.seccomp),
        ("modcaps", now.modcaps != then.modcaps),
        ("metrics", file.metrics != base.metrics),
    ];
    let changed: Vec<_> = changed.into_iter().filter(|(_, is)| *is).map(|(key, _)| key).collect();
    ensure!(changed.is_empty(), "{} cannot change while the process runs: start it again", changed.join(", "));
    Ok(())
}

fn check_count(starts: &[Unit], served: &[RunningServer<'_>]) -> Result<()> {
    let count = starts.len() + served.len();
    ensure!(
        count <= SERVERS_MAX,
        "there would be {count} server processes, and {SERVERS_MAX} are the most: start another manager"
    );
    Ok(())
}

/// Checks that the places of new processes are free.
fn check_places<'a>(starts: impl IntoIterator<Item = &'a Unit>, served: &[RunningServer<'_>]) -> Result<()> {
    for unit in starts {
        for (item, places) in unit.places().iter().enumerate() {
            if let Some(fd) = places.iter().find(|place| place.starts_with("descriptor ")) {
                bail!("{fd} of {}: descriptors are inherited at the start; use a socket", name_of(unit, item));
            }
            if let Some((_, other, at)) = find(places, served) {
                bail!("{} is served already, from {}: ferry remove it first", places.join(", "), name_of(other, at));
            }
        }
    }
    Ok(())
}

/// Checks that new processes need not be one with those that run.
fn check_beside<'a>(starts: impl IntoIterator<Item = &'a Unit>, served: &[RunningServer<'_>]) -> Result<()> {
    let shares = starts.into_iter().flat_map(Unit::shares);
    let mut pairs =
        shares.flat_map(|share| served.iter().flat_map(|server| server.unit.shares()).map(move |other| (share, other)));
    pairs.try_for_each(|(share, other)| check_pair(share, other))
}

/// Checks that two shares can have a process each.
fn check_pair(share: &Share, other: &Share) -> Result<()> {
    let (name, other_name) = (share.source.display(), other.source.display());
    let group = |share: &Share| share.limit.as_ref().and_then(|limit| limit.group.clone());
    if let Some(group) = group(share).filter(|name| group(other).as_ref() == Some(name)) {
        bail!(
            "--limit group={group}: the shares of a group have one process, and {other_name} is served already: start all of them again"
        );
    }
    ensure!(
        !source::share_memory(share, other),
        "mem is one tree, which one process serves, and it is served already: start both again, from one file, or give this one another \
         --size"
    );
    if share.quota.is_none() && other.quota.is_none() {
        return Ok(());
    }
    if let Some(why) = source::quota_conflict(&[share.clone(), other.clone()]) {
        bail!(why);
    }
    let is_counted = share.quota.is_some() && share.kind().canonical() == other.kind().canonical();
    ensure!(!is_counted, "--quota: one process must count {name} and {other_name}: start both again, from one file");
    Ok(())
}

/// Parses the command line of `ferry add`.
pub fn units_of_command(words: &[OsString], directory: &Path, sandbox_flags: &SandboxFlags) -> Result<Vec<Unit>> {
    let line = std::iter::once(OsStr::new("ferry").to_owned()).chain(words.iter().cloned());
    let Invocation { cli: Cli { command, log, syslog }, more, more_disks, .. } = groups::parse_in(line, directory)?;
    ensure!(log.is_none() && !syslog, "--log and --syslog are for the whole process: see ferry log");
    let units = match command {
        Command::Share(args) => {
            ensure!(args.config.is_none() && !args.json, "--config and --json are for ferry share");
            let sandbox_flags = args.sandbox_flags.or(sandbox_flags.clone());
            let mut shares: Vec<_> = args.share.into_iter().chain(more).collect();
            shares.iter_mut().for_each(|share| share.resolve_sockets(directory));
            share::refuse_duplicates(&shares, &[])?;
            let shares: Vec<_> = shares.into_iter().map(|share| (share, None)).collect();
            let (mut metrics, mut trace) = (args.metrics, args.trace);
            metrics.iter_mut().for_each(|metrics| metrics.resolve(directory));
            trace.iter_mut().for_each(|trace| trace.resolve(directory));
            match metrics.is_some() || trace.is_some() {
                true => vec![Unit { metrics, trace, ..Unit::of_group(shares, &sandbox_flags) }],
                false => Unit::of_shares(shares, &sandbox_flags),
            }
        }
        Command::Disk(first) => {
            let sandbox_flags = first.sandbox_flags.clone().or(sandbox_flags.clone());
            let mut disks: Vec<disk::Args> = std::iter::once(*first).chain(more_disks).collect();
            for disk in &mut disks {
                ensure!(!disk.json && !disk.print_capabilities, "--json and --print-capabilities are for ferry disk");
                ensure!(
                    disk.socket() != (None, None),
                    "'--vhost-user <SOCKET>' is missing after {}",
                    disk.path()?.display()
                );
                disk.resolve_paths(directory);
            }
            disk::refuse_duplicates(&disks)?;
            disks.into_iter().map(|disk| Unit::of_disk(disk, None, &sandbox_flags)).collect()
        }
        _ => bail!("only share and disk can be added"),
    };
    Ok(units)
}

#[cfg(test)]
mod tests;
