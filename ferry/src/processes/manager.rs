//! The manager of a process that was started with a configuration file: it adds and removes servers while the others go on.
//!
//! A server in its sandbox cannot open another directory or create a socket, so what is added gets a process of its own from here, as
//! at the start. A change is made in steps: plan it, start what is new, replace what has other flags, change settings, end what is
//! removed. Until the last step, whatever fails undoes all of it.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry_control::{ExportKind, ManagerClient, ManagerRequest, ManagerSocket, Request, Setting};
use ferry_isolation::BlockedSignals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;

use super::child::Task;
use super::plan::{self, Base, ItemSettings, Plan, Replacement};
use super::servers::{Server, Servers};
use super::unit::Unit;
use crate::control::{CHANGE_TIME, Client, OWNER};
use crate::new_files::Success;
use crate::{config, disk};

/// The time in which new servers must be up.
const START_TIME: Duration = Duration::from_secs(30);
/// The same if one of them has a quota: it counts its tree before, which takes minutes on slow disks.
const COUNT_TIME: Duration = Duration::from_secs(600);
/// The time in which servers end before the reply is sent. They sync what was written.
const END_TIME: Duration = Duration::from_secs(10);

// Clients wait that long.
const _: () = assert!(CHANGE_TIME.as_secs() == 3 * COUNT_TIME.as_secs() + 2 * END_TIME.as_secs());

/// The maximum number of requests that wait for a change; more come from no script that waits for its changes.
const WAITING_MAX: usize = 64;

/// The manager's state.
pub struct Manager {
    socket: ManagerSocket,
    /// The configuration file.
    path: PathBuf,
    base: Base,
    change: Option<Change>,
    /// Requests that wait for the change under way.
    waiting: VecDeque<(ManagerRequest, ManagerClient)>,
}

/// A change under way; one at a time.
struct Change {
    client: ManagerClient,
    plan: Plan,
    step: Step,
    /// The deadline of the step.
    end: Instant,
    /// What ran before in place of what is replaced.
    before: Vec<Unit>,
    /// The names of what could not be started again.
    lost: Vec<String>,
}

enum Step {
    /// New servers start.
    Start,
    /// Servers end that others replace.
    Stop,
    /// Servers end: those that are removed, or new ones after a failure. Then this is the reply.
    End(Result<Vec<String>, String>),
    /// What was replaced starts again.
    Restore(Result<Vec<String>, String>),
}

/// What is to do next.
enum Next {
    Undo(String),
    Stop,
    Replace,
    Commit,
    Restore,
    Finish,
}

impl Manager {
    /// Starts to listen. On failure it logs a warning, and what is served cannot change.
    pub fn start(path: PathBuf, base: Base) -> Option<Self> {
        match ManagerSocket::bind() {
            Ok(socket) => Some(Self { socket, path, base, change: None, waiting: VecDeque::new() }),
            Err(error) => {
                tracing::warn!("ferry add, remove and reload will not find this process: {error}");
                None
            }
        }
    }

    /// Returns what becomes readable when there is something to do.
    fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.socket.descriptors()
    }

    /// Returns the time until something is to do in any case.
    fn left(&self) -> Option<Duration> {
        let change = self.change.as_ref().map(|change| change.end.saturating_duration_since(Instant::now()));
        change.into_iter().chain(self.socket.left()).min()
    }
}

/// The parent of servers, which waits for them; with a manager, also starts and ends them when it is asked to.
pub struct Supervisor {
    pub servers: Servers,
    /// `None`: what is served cannot change.
    pub manager: Option<Manager>,
}

/// Why the wait for children has ended.
pub enum Outcome {
    /// All have; the exit status.
    Ended(u8),
    /// This process is a new child.
    Child(Box<Task>),
}

impl Supervisor {
    /// Waits until all have ended, and forwards signals; `arrives` can be read when there is one.
    pub fn wait(&mut self, signals: &BlockedSignals, arrives: &OwnedFd) -> Result<Outcome> {
        loop {
            self.servers.poll()?;
            // First: the only server may have ended because another one takes its place.
            if let Some(task) = self.manage()? {
                return Ok(Outcome::Child(Box::new(task)));
            }
            if let Some(status) = self.servers.outcome()? {
                return Ok(Outcome::Ended(status));
            }
            let left = self.servers.left().into_iter().chain(self.manager.as_ref().and_then(Manager::left)).min();
            let clients = self.manager.iter().flat_map(Manager::descriptors);
            if is_ready(arrives, self.servers.pipes().chain(clients), left)?
                && let Some(arrival) = signals.next()?
            {
                self.servers.forward(arrival.signal, arrival.from_terminal);
            }
        }
    }

    /// Closes what the parent has, in a child. The parent removes the files.
    pub fn leave(self) {
        self.servers.leave();
        if let Some(manager) = self.manager {
            manager.socket.leave();
        }
    }

    /// Handles requests, one after the other, and goes on with the change under way. In a new child only, returns its task.
    fn manage(&mut self) -> Result<Option<Task>> {
        let Some(manager) = &mut self.manager else { return Ok(None) };
        for (request, client) in manager.socket.requests(OWNER.may_access) {
            match manager.waiting.len() < WAITING_MAX {
                true => manager.waiting.push_back((request, client)),
                false => client.reply(Err(unchanged(&format!("{WAITING_MAX} changes wait already")))),
            }
        }
        loop {
            while let Some(next) = self.next_step() {
                if let Some(task) = self.go_on(next)? {
                    return Ok(Some(task));
                }
            }
            let Some(manager) = self.manager.as_mut().filter(|manager| manager.change.is_none()) else { break };
            // Nothing refers to servers by their index.
            self.servers.all.retain(|server| !server.is_removed || server.end.is_none());
            if !self.servers.is_announced && self.servers.ending.is_none() {
                break;
            }
            let Some((request, client)) = manager.waiting.pop_front() else { break };
            if client.has_gone() {
                continue;
            }
            match self.plan(request) {
                Ok(plan) => {
                    if let Some(task) = self.begin_change(plan, client)? {
                        return Ok(Some(task));
                    }
                }
                Err(error) => client.reply(Err(unchanged(&format!("{error:#}")))),
            }
        }
        Ok(None)
    }

    /// Finds out what a request changes, without any effect.
    fn plan(&self, request: ManagerRequest) -> Result<Plan> {
        let Some(Manager { path, base, .. }) = &self.manager else { bail!("there is no manager") };
        ensure!(self.servers.ending.is_none(), "the process is ending");
        let served = self.servers.served();
        let (plan, force) = match request {
            ManagerRequest::Add { words, directory } => {
                let words: Vec<_> = words.into_iter().map(|word| OsString::from_vec(word.0)).collect();
                let directory = PathBuf::from(OsString::from_vec(directory.0));
                (plan::add(&words, &directory, &served, base)?, false)
            }
            ManagerRequest::Remove { pid, share, force } => {
                let server = self.servers.all.iter().position(|server| server.child.pid() == pid);
                let server = server.with_context(|| format!("process {pid} is not a server of this process"))?;
                (plan::remove(server, share, &served)?, force)
            }
            ManagerRequest::Reload { force } => (plan::reload(config::read(path)?, &served, base)?, force),
        };
        let ends = plan.ends.iter().filter(|_| !force).filter_map(|index| self.servers.all.get(*index));
        for server in ends {
            ensure_unused(server)?;
        }
        for Replacement { server, keys, .. } in plan.replaces.iter().filter(|_| !force) {
            let server = self.servers.all.get(*server).context("a server has ended")?;
            ensure_unused(server).with_context(|| format!("{keys} cannot change now"))?;
        }
        Ok(plan)
    }

    /// Starts what is new. In a new child only, returns its task.
    fn begin_change(&mut self, mut plan: Plan, client: ManagerClient) -> Result<Option<Task>> {
        let starts = std::mem::take(&mut plan.starts);
        let end = Instant::now() + start_time(&starts);
        if let Some(manager) = &mut self.manager {
            manager.change =
                Some(Change { client, plan, step: Step::Start, end, before: Vec::new(), lost: Vec::new() });
        }
        self.start_all(starts)
    }

    /// Starts servers. In a new child only, returns its task.
    fn start_all(&mut self, units: Vec<Unit>) -> Result<Option<Task>> {
        let mut bound = Vec::new();
        for unit in units {
            match unit.disk().map_or(Ok(None), |disk| disk::bind(disk, None)) {
                Ok(socket) => bound.push((unit, socket)),
                Err(error) => {
                    self.undo(format!("{error:#}"));
                    return Ok(None);
                }
            }
        }
        let mut bound = bound.into_iter();
        while let Some((unit, socket)) = bound.next() {
            match self.servers.begin(unit, socket, HashMap::new(), true) {
                Ok(None) => {}
                Ok(Some(task)) => {
                    bound.filter_map(|(_, socket)| socket).for_each(|mut socket| socket.leave());
                    return Ok(Some(task));
                }
                Err(error) => {
                    self.undo(format!("{error:#}"));
                    return Ok(None);
                }
            }
        }
        Ok(None)
    }

    fn change(&mut self) -> Option<&mut Change> {
        self.manager.as_mut().and_then(|manager| manager.change.as_mut())
    }

    /// Returns what the change under way needs next; `None`: to wait.
    fn next_step(&self) -> Option<Next> {
        let change = self.manager.as_ref()?.change.as_ref()?;
        let is_late = Instant::now() >= change.end;
        let new = || self.servers.all.iter().filter(|server| server.is_new);
        let have_ended = !self.servers.all.iter().any(Server::is_ending);
        match &change.step {
            Step::Start | Step::Stop if self.servers.ending.is_some() => {
                Some(Next::Undo("the process is ending".into()))
            }
            Step::Start => match new().find_map(Server::failure) {
                Some(why) => Some(Next::Undo(why)),
                None if new().all(Server::is_up) && change.plan.replaces.is_empty() => Some(Next::Commit),
                None if new().all(Server::is_up) => Some(Next::Stop),
                None => is_late.then(|| {
                    let late = new().filter(|server| !server.is_up()).map(|server| server.unit.shown());
                    let late = late.collect::<Vec<_>>().join(", ");
                    let time = start_time(new().map(|server| &server.unit));
                    Next::Undo(format!("{late} did not start within {} s", time.as_secs()))
                }),
            },
            Step::Stop if have_ended => Some(Next::Replace),
            Step::Stop => is_late.then(|| Next::Undo("a server did not end".into())),
            Step::End(_) if !have_ended && !is_late => None,
            Step::End(Err(_)) if !change.before.is_empty() && self.servers.ending.is_none() => Some(Next::Restore),
            Step::End(_) => Some(Next::Finish),
            Step::Restore(_) => {
                let is_decided = new().all(|server| server.is_up() || server.failure().is_some());
                (is_decided || is_late || self.servers.ending.is_some()).then_some(Next::Finish)
            }
        }
    }

    /// Makes a step of the change under way. In a new child only, returns its task.
    fn go_on(&mut self, next: Next) -> Result<Option<Task>> {
        match next {
            Next::Undo(why) => self.undo(why),
            Next::Stop => self.stop_replaced(),
            Next::Replace => return self.replace(),
            Next::Commit => self.commit(),
            Next::Restore => return self.restore(),
            Next::Finish => self.finish(),
        }
        Ok(None)
    }

    /// Ends the servers that others replace.
    fn stop_replaced(&mut self) {
        let Some(change) = self.manager.as_mut().and_then(|manager| manager.change.as_mut()) else { return };
        (change.step, change.end) = (Step::Stop, Instant::now() + END_TIME);
        for replacement in &change.plan.replaces {
            let Some(server) = self.servers.all.get_mut(replacement.server) else { continue };
            change.before.push(server.unit.clone());
            server.is_removed = true;
            server.child.signal(Signal::TERM);
        }
    }

    /// Starts servers in place of those that have ended.
    fn replace(&mut self) -> Result<Option<Task>> {
        let Some(change) = self.change() else { return Ok(None) };
        let replaces = std::mem::take(&mut change.plan.replaces).into_iter();
        let units: Vec<_> = replaces.map(|replacement| replacement.unit).collect();
        (change.step, change.end) = (Step::Start, Instant::now() + start_time(&units));
        self.start_all(units)
    }

    /// Starts again what was replaced.
    fn restore(&mut self) -> Result<Option<Task>> {
        let Some(change) = self.change() else { return Ok(None) };
        let before = std::mem::take(&mut change.before);
        change.lost = before.iter().map(Unit::shown).collect();
        change.end = Instant::now() + start_time(&before);
        if let Step::End(reply) = std::mem::replace(&mut change.step, Step::Start) {
            change.step = Step::Restore(reply);
        }
        // Each separately, so that a failure does not prevent the others.
        for unit in before {
            let name = unit.shown();
            let socket = unit.disk().map_or(Ok(None), |disk| disk::bind(disk, None));
            match socket.and_then(|socket| self.servers.begin(unit, socket, HashMap::new(), true)) {
                Ok(None) => {}
                Ok(task) => return Ok(task),
                Err(error) => tracing::error!("{name} cannot be started again: {error:#}"),
            }
        }
        Ok(None)
    }

    /// All that is new is up: changes the settings, and ends what is removed.
    fn commit(&mut self) {
        let Some(change) = self.change() else { return };
        let plan = std::mem::take(&mut change.plan);
        let mut outcomes = match set_all(&self.servers.all, &plan.settings) {
            Ok(outcomes) => outcomes,
            Err(error) => return self.undo(format!("{error:#}")),
        };
        if let Some(level) = plan.level {
            let setting = plan::level_setting(level.as_ref());
            outcomes.push(format!("log {}", setting.value));
            self.set_level(&setting);
            let level_of_units = plan::level_or_default(level.as_ref());
            self.servers.all.iter_mut().for_each(|server| server.unit.level.clone_from(&level_of_units));
            if let Some(manager) = &mut self.manager {
                manager.base.level = Some(level);
            }
        }
        for (server, item, table) in plan.tables {
            if let Some(known) = self.servers.all.get_mut(server).and_then(|server| server.unit.tables.get_mut(item)) {
                *known = Some(table);
            }
        }
        for (server, item, known) in plan.items {
            if let Some(server) = self.servers.all.get_mut(server) {
                server.unit.set_item(item, known);
            }
        }
        for server in self.servers.all.iter_mut().filter(|server| server.is_new) {
            server.is_new = false;
            server.success.take().iter().for_each(Success::send);
            for (name, places) in server.unit.names().iter().zip(server.unit.places()) {
                outcomes.push(format!("serving {name} at {}", places.join(", ")));
            }
        }
        for index in plan.ends {
            let Some(server) = self.servers.all.get_mut(index) else { continue };
            server.is_removed = true;
            server.child.signal(Signal::TERM);
            outcomes.push(format!("no longer serving {}", server.unit.shown()));
        }
        if outcomes.is_empty() {
            outcomes.push("nothing to change".into());
        }
        outcomes.extend(plan.notes);
        tracing::info!("changed while it runs: {}", outcomes.join("; "));
        self.wait_for_ends(Ok(outcomes));
    }

    /// Sets the level of all servers; one that does not take it is named in the log.
    fn set_level(&self, setting: &Setting) {
        let runs = |server: &&Server| !server.is_new && !server.is_removed && server.is_up() && server.end.is_none();
        for server in self.servers.all.iter().filter(runs) {
            let request = Request::Set { share: None, settings: vec![setting.clone()] };
            let set = || Client::own(server.child.pid())?.ask::<Vec<String>>(&request);
            if let Err(error) = set() {
                tracing::warn!("{} does not log at {}: {error:#}", server.unit.shown(), setting.value);
            }
        }
    }

    /// Ends what was started, and keeps all else.
    fn undo(&mut self, why: String) {
        for server in self.servers.all.iter_mut().filter(|server| server.is_new) {
            (server.is_new, server.is_removed) = (false, true);
            server.success = None;
            server.child.signal(Signal::TERM);
        }
        self.wait_for_ends(Err(why));
    }

    fn wait_for_ends(&mut self, reply: Result<Vec<String>, String>) {
        if let Some(change) = self.change() {
            (change.step, change.end) = (Step::End(reply), Instant::now() + END_TIME);
        }
    }

    /// Replies.
    fn finish(&mut self) {
        let Some(change) = self.manager.as_mut().and_then(|manager| manager.change.take()) else { return };
        let Change { client, step: Step::End(reply) | Step::Restore(reply), mut lost, .. } = change else { return };
        // Those that run again, or will: one that takes long is better than none.
        let mut starting = Vec::new();
        for server in self.servers.all.iter_mut().filter(|server| server.is_new) {
            server.is_new = false;
            if server.failure().is_some() {
                (server.is_removed, server.success) = (true, None);
                server.child.signal(Signal::TERM);
                continue;
            }
            server.success.take().iter().for_each(Success::send);
            let name = server.unit.shown();
            lost.retain(|lost| *lost != name);
            if !server.is_up() {
                starting.push(name);
            }
        }
        // Storage that hangs can hold up an end for any time.
        let mut hang = Vec::new();
        for server in self.servers.all.iter_mut().filter(|server| server.is_ending()) {
            server.is_abandoned = true;
            hang.push(format!("{} is still ending", server.unit.shown()));
        }
        client.reply(match reply {
            Ok(outcomes) => Ok(outcomes.into_iter().chain(hang).collect()),
            Err(why) if lost.is_empty() && starting.is_empty() => Err(unchanged(&why)),
            Err(mut why) => {
                for (names, what) in [(lost, "could not be started again"), (starting, "is still starting again")] {
                    if !names.is_empty() {
                        why = format!("{why}; {} {what}", names.join(", "));
                    }
                }
                Err(why)
            }
        });
    }
}

/// Returns the time in which these must be up.
fn start_time<'a>(units: impl IntoIterator<Item = &'a Unit>) -> Duration {
    let has_quota = units.into_iter().flat_map(Unit::shares).any(|share| share.quota.is_some());
    if has_quota { COUNT_TIME } else { START_TIME }
}

fn unchanged(why: &str) -> String {
    format!("{why}; nothing has changed")
}

/// Checks that no client uses a server.
fn ensure_unused(server: &Server) -> Result<()> {
    if !server.is_up() {
        return Ok(());
    }
    let report = Client::own(server.child.pid())?.report();
    let report =
        report.with_context(|| format!("cannot tell who uses {}; --force does not ask", server.unit.shown()))?;
    for share in &report.shares {
        for export in &share.exports {
            let clients = export.clients.unwrap_or_default();
            let open = export.usage.iter().find(|usage| usage.name == "open_files").map_or(0, |usage| usage.value);
            let place = share.share.place(export.kind).unwrap_or_default();
            let source = &share.share.source;
            ensure!(
                clients == 0,
                "{source} has {clients} connected client{} at {place}; --force removes it all the same",
                plural(clients)
            );
            ensure!(
                export.kind != ExportKind::Mount || open == 0,
                "{source} has {open} open file{} at {place}; --force removes it all the same",
                plural(open)
            );
        }
    }
    Ok(())
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Changes settings of servers, all or none; returns what holds now.
fn set_all(all: &[Server], changes: &[ItemSettings]) -> Result<Vec<String>> {
    let set = |change: &ItemSettings, settings: &[Setting]| -> Result<Vec<String>> {
        let server = all.get(change.server).context("a server has ended")?;
        let request = Request::Set { share: Some(change.item), settings: settings.to_vec() };
        let outcomes: Vec<String> = Client::own(server.child.pid())?.ask(&request)?.0;
        let name = server.unit.names().into_iter().nth(change.item).unwrap_or_default();
        Ok(outcomes.into_iter().map(|outcome| format!("{name}: {outcome}")).collect())
    };
    let mut outcomes = Vec::new();
    for (number, change) in changes.iter().enumerate() {
        match set(change, &change.settings) {
            Ok(done) => outcomes.extend(done),
            Err(error) => {
                // With the one that failed: it may have been made without a reply.
                for done in &changes[..=number] {
                    if let Err(error) = set(done, &done.undo) {
                        tracing::warn!("cannot undo a setting: {error:#}");
                    }
                }
                return Err(error);
            }
        }
    }
    Ok(outcomes)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::tests::shares;
    use crate::sandbox::SandboxFlags;

    #[test]
    fn a_server_that_counts_a_tree_has_more_time() {
        for (line, time) in [
            ("/usr --virtiofs a", START_TIME),
            ("/usr --virtiofs a --quota 1G", COUNT_TIME),
            ("/usr --virtiofs a /etc --virtiofs b --quota 1G", COUNT_TIME),
        ] {
            let shares = shares(&format!("ferry share {line}")).expect(line).into_iter();
            let units = Unit::of_shares(shares.map(|share| (share, None)).collect(), &SandboxFlags::default());
            assert_eq!(start_time(&units), time, "{line}");
        }
    }
}
