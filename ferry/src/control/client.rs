//! The client of the control socket, and the search for the server of a target.

use std::fmt::Display;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry_fuse::{MountEntry, Mountpoint};
use ferry_vfs::sync::lock;
use serde::Serialize;
use serde::de::DeserializeOwned;

use ferry_control::{
    Endpoint, FileName, ManagerRequest, REPLY_BYTES_MAX, REPORT_VERSION, Reply, Request, ServerReport, ShareStatus,
    Status, managers, printable, sockets,
};

use crate::status;

/// The timeout of a request: a server answers at once unless it is stopped.
const PATIENCE: Duration = Duration::from_secs(5);
/// The maximum time of a change that fails: new servers start, others end, their replacements start and end, and the former
/// ones start again. Each start may count a tree for minutes.
pub const CHANGE_TIME: Duration = Duration::from_secs(3 * 600 + 2 * 10);
/// The timeout of a change.
const CHANGE_PATIENCE: Duration = CHANGE_TIME.saturating_add(PATIENCE);
/// The maximum number of servers that are asked at once; each can take the whole timeout.
const ASKING_MAX: usize = 32;
/// The maximum time in which all servers of other users reply. They may be programs that do not.
const OTHERS_PATIENCE: Duration = Duration::from_secs(20);
/// The time from the mount to the control socket: the server starts a few threads in between.
const START_PATIENCE: Duration = Duration::from_secs(2);
/// The interval of retries in that time.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A running server.
#[derive(Debug)]
pub struct Client {
    endpoint: Endpoint,
    /// What limits its replies with those of others.
    allowance: Option<Arc<Allowance>>,
}

/// What the servers of all other users get together.
#[derive(Debug)]
struct Allowance {
    bytes: AtomicUsize,
    end: Instant,
}

impl Allowance {
    /// Takes so many bytes.
    fn take(&self, bytes: usize) -> std::io::Result<()> {
        let taken =
            self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).map(drop);
        taken.map_err(|_| std::io::Error::other("the servers of other users sent too much"))
    }
}

/// The target that a user named.
#[derive(Debug)]
pub struct Target {
    /// The server.
    pub client: Client,
    /// The index of the share; `None`: all shares.
    pub share: Option<usize>,
    /// The file in the share.
    pub file: Option<FileName>,
    /// The process that users know, which may have started the server.
    pub pid: u32,
}

impl Client {
    fn new(endpoint: Endpoint) -> Self {
        Self { endpoint, allowance: None }
    }

    /// Returns that of a server of this user.
    pub fn own(pid: u32) -> Result<Self> {
        Ok(Self::new(Endpoint::own(pid)?))
    }

    /// Sends a request; returns the answer and the connection, for the lines that follow.
    pub fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<(T, BufReader<UnixStream>)> {
        self.ask_within(request, PATIENCE)
    }

    /// Asks a manager for a change; returns what holds now.
    pub fn change(&self, request: &ManagerRequest) -> Result<Vec<String>> {
        Ok(self.ask_within(request, CHANGE_PATIENCE)?.0)
    }

    fn ask_within<T: DeserializeOwned>(
        &self,
        request: &impl Serialize,
        patience: Duration,
    ) -> Result<(T, BufReader<UnixStream>)> {
        let pid = self.endpoint.pid;
        let allowance = self.allowance.as_deref();
        let end = Instant::now() + patience;
        let end = allowance.map_or(end, |allowance| allowance.end.min(end));
        let mut stream = self.endpoint.connect().with_context(|| format!("cannot reach process {pid}"))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        match stream.write_all(&line) {
            // A server with too many clients says so and hangs up.
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                return Err(error).with_context(|| format!("process {pid} does not accept a request"));
            }
            _ => {}
        }
        let mut reader = BufReader::new(stream);
        let line = answer(&mut reader, end, allowance).with_context(|| format!("process {pid} does not answer"))?;
        let parsed = serde_json::from_slice(&line);
        match parsed.with_context(|| format!("process {pid} sent an invalid answer of {} bytes", line.len()))? {
            Reply::Ok(value) => Ok((value, reader)),
            Reply::Error(error) => bail!(error),
        }
    }

    /// Returns the user of the server.
    pub fn owner(&self) -> u32 {
        self.endpoint.owner
    }

    /// Returns its report.
    pub fn report(&self) -> Result<ServerReport> {
        let request = Request::Report { version: REPORT_VERSION };
        let reply = self.ask(&request).with_context(|| format!("process {} does not report", self.endpoint.pid));
        let report: ServerReport = reply?.0;
        // The process id of the endpoint is checked; that in the report is not.
        Ok(ServerReport { pid: self.endpoint.pid, ..report })
    }

    /// Returns its report. Retries if the connection is closed: then the server is ending, and will soon refuse connections.
    fn report_unless_ended(&self) -> Result<ServerReport> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.report() {
                Err(error) if is_cut(&error) && Instant::now() < end => std::thread::sleep(RETRY_INTERVAL),
                report => return report,
            }
        }
    }

    /// Returns its shares and log levels.
    pub fn status(&self) -> Result<Status> {
        Ok(self.ask(&Request::Status)?.0)
    }
}

/// Reads the answer of a server, one line. The server may be another user's program, so time and length are limited.
fn answer(reader: &mut BufReader<UnixStream>, end: Instant, allowance: Option<&Allowance>) -> std::io::Result<Vec<u8>> {
    let mut line = Vec::new();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        reader.get_ref().set_read_timeout(Some(left))?;
        let came = reader.fill_buf()?;
        if came.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let found = came.iter().position(|&byte| byte == b'\n');
        let count = found.unwrap_or(came.len());
        allowance.map_or(Ok(()), |allowance| allowance.take(count))?;
        line.extend_from_slice(&came[..count]);
        reader.consume(found.map_or(count, |at| at + 1));
        if line.len() > REPLY_BYTES_MAX {
            return Err(std::io::Error::other(format!("its answer is longer than {REPLY_BYTES_MAX} bytes")));
        }
        if found.is_some() {
            return Ok(line);
        }
    }
}

/// Returns the running servers with their shares.
fn running() -> Vec<(Client, Status)> {
    // Sockets of killed servers do not answer.
    let answered = ask_all(Client::status).into_iter();
    answered.filter_map(|(client, reply)| reply.ok().map(|status| (client, status))).collect()
}

/// Returns the servers with their replies.
fn ask_all<T: Send>(ask: fn(&Client) -> Result<T>) -> Vec<(Client, Result<T>)> {
    let own = rustix::process::geteuid().as_raw();
    let (own, others): (Vec<_>, Vec<_>) = sockets().into_iter().partition(|endpoint| endpoint.owner == own);
    let mut replies = ask_each(own.into_iter().map(Client::new).collect(), ask);
    let (bytes, end) = (AtomicUsize::new(REPLY_BYTES_MAX), Instant::now() + OTHERS_PATIENCE);
    let allowance = Arc::new(Allowance { bytes, end });
    let other = |endpoint| Client { endpoint, allowance: Some(Arc::clone(&allowance)) };
    let of_others = ask_each(others.into_iter().map(other).collect(), ask).into_iter();
    replies.extend(of_others.map(|(client, reply)| (Client { allowance: None, ..client }, reply)));
    replies
}

/// Asks several servers at once.
fn ask_each<T: Send>(clients: Vec<Client>, ask: fn(&Client) -> Result<T>) -> Vec<(Client, Result<T>)> {
    let (threads, clients, replies) = (clients.len().min(ASKING_MAX), Mutex::new(clients), Mutex::new(Vec::new()));
    let ask_next = || {
        let Some(client) = lock(&clients).pop() else { return false };
        let reply = ask(&client);
        lock(&replies).push((client, reply));
        true
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without a thread, fewer are asked at once.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || while ask_next() {});
        }
        while ask_next() {}
    });
    replies.into_inner().unwrap_or_default()
}

/// Returns the reports of the server of a target, or of all running servers, with their users; and the status to end with: not 0 if
/// a server that runs does not report, which is then named on standard error.
pub fn reports_of(target: Option<&Path>) -> Result<(Vec<(u32, ServerReport)>, u8)> {
    if let Some(target) = target {
        let servers = pid_of(target).map(|pid| servers_of(pid, running())).unwrap_or_default();
        if servers.len() > 1 {
            let report = |(client, _): &(Client, Status)| Ok((client.owner(), client.report()?));
            let mut reports = servers.iter().map(report).collect::<Result<Vec<_>>>()?;
            reports.sort_by_key(|(_, report)| report.pid);
            return Ok((reports, status::DONE));
        }
        let Target { client, share, .. } = Target::find(target)?;
        let mut report = client.report()?;
        if let Some(share) = share {
            let named = report.shares.into_iter().nth(share);
            report.shares = vec![named.context("the server has ended this share meanwhile")?];
        }
        return Ok((vec![(client.owner(), report)], status::DONE));
    }
    let (mut found, mut outcome) = (Vec::new(), status::DONE);
    for (user, report) in reports() {
        match report {
            Ok(report) => found.push((user, report)),
            Err(error) => {
                eprintln!("ferry: {}", printable(&format!("{error:#}")));
                outcome = status::FAILED;
            }
        }
    }
    Ok((found, outcome))
}

/// Returns the reports of the running servers, or why there is none, with their users, in the order of their process ids.
fn reports() -> Vec<(u32, Result<ServerReport>)> {
    let mut all = ask_all(Client::report_unless_ended);
    all.sort_by_key(|(client, _)| client.endpoint.pid);
    let reports = all.into_iter().map(|(client, report)| (client.owner(), report));
    reports.filter(|(_, report)| report.as_ref().err().is_none_or(|error| !has_ended(error))).collect()
}

/// Returns whether no process listens, because the server was killed or is ending.
fn has_ended(error: &anyhow::Error) -> bool {
    is_any_of(error, &[ErrorKind::ConnectionRefused, ErrorKind::NotFound])
}

/// Returns whether the connection ended before the answer.
fn is_cut(error: &anyhow::Error) -> bool {
    is_any_of(error, &[ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::UnexpectedEof])
}

fn is_any_of(error: &anyhow::Error, kinds: &[ErrorKind]) -> bool {
    let is_one = |error: &std::io::Error| kinds.contains(&error.kind());
    error.chain().any(|cause| match cause.downcast_ref() {
        Some(ferry_control::Error::System(error)) => is_one(error),
        _ => cause.downcast_ref().is_some_and(is_one),
    })
}

/// Returns the status of the running servers, in the order of their process ids.
pub fn statuses() -> Vec<Status> {
    let mut all: Vec<_> = running().into_iter().map(|(_, status)| status).collect();
    all.sort_by_key(|status| status.pid);
    all
}

impl Target {
    /// Finds the target of a process id, a mount point, a socket, a 9P address, or a file in a mount or a shared directory.
    pub fn find(target: &Path) -> Result<Self> {
        let begin = Instant::now();
        loop {
            let found = Self::find_once(target);
            // A mount is in the mount table a moment before its server listens.
            let may_come = found.is_err() && is_in_mount(target) && begin.elapsed() < START_PATIENCE;
            if !may_come {
                return found;
            }
            std::thread::sleep(RETRY_INTERVAL);
        }
    }

    /// The same, or all servers of a process, for what concerns each of them.
    pub fn find_all(target: &Path) -> Result<Vec<Self>> {
        let servers = pid_of(target).map(|pid| servers_of(pid, running())).unwrap_or_default();
        if servers.len() < 2 {
            return Ok(vec![Self::find(target)?]);
        }
        let of_server = |(client, status): (Client, Status)| Self { client, share: None, file: None, pid: status.pid };
        Ok(servers.into_iter().map(of_server).collect())
    }

    fn find_once(target: &Path) -> Result<Self> {
        let running = running();
        if let Some(pid) = pid_of(target) {
            return Self::of_process(pid, running);
        }
        let own = rustix::process::geteuid().as_raw();
        let (own, others): (Vec<_>, Vec<_>) = running.into_iter().partition(|(client, _)| client.owner() == own);
        let by_address = target.to_str().and_then(|text| Self::of_address(text, &own));
        if let Some(found) = by_address {
            return Ok(Self::found(own, found));
        }
        let shown = target.display();
        let hint = if others.is_empty() { "" } else { "; servers of other users can be named by their process ids" };
        let path = target.canonicalize().with_context(|| format!("cannot find {shown}{hint}"))?;
        let other = || Self::of_other(&path, &others);
        // Another user's socket may be in a directory that this user shares.
        let is_socket = path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket());
        let found = other().filter(|_| is_socket && Self::of_socket(&path, &own).is_none());
        if let Some(found) = found {
            return Ok(Self::found(others, found));
        }
        if let Some(found) = Self::of_path(&shown, &path, &own)? {
            return Ok(Self::found(own, found));
        }
        if let Some(found) = other() {
            return Ok(Self::found(others, found));
        }
        if is_in_mount(&path) {
            bail!("the ferry that serves {shown} does not answer; if it has died, unmount {shown}, or mount again");
        }
        bail!(
            "{shown} is not in a mount or a shared directory of a running ferry of yours, and not the socket of one{hint}"
        )
    }

    fn found(running: Vec<(Client, Status)>, (client, share, file): Found) -> Self {
        let (client, status) = running.into_iter().nth(client).expect("it was found there");
        Self { client, share: Some(share), file, pid: status.pid }
    }

    /// Returns the share of another user's server. What servers say of themselves does not count, but that a socket or a mount is that
    /// user's.
    fn of_other(path: &Path, others: &[(Client, Status)]) -> Option<Found> {
        // One at a time: what a third user's server says does not hide it.
        let of_owner = |owner: Option<u32>, find: &dyn Fn(&[Running]) -> Option<Found>| {
            let own = (0..others.len()).filter(|at| owner == Some(others[*at].0.owner()));
            { own }.find_map(|at| find(&others[at..=at]).map(|(_, share, file)| (at, share, file)))
        };
        let owner = path.symlink_metadata().ok().filter(|found| found.file_type().is_socket()).map(|found| found.uid());
        of_owner(owner, &|one| Self::of_socket(path, one)).or_else(|| {
            let mount = mount_of(path)?;
            let mount = MountEntry::all().ok()?.into_iter().find(|mounted| mounted.id == mount)?;
            let owner = mount.option("user_id").and_then(|id| id.to_str()?.parse().ok());
            of_owner(owner, &|one| Self::of_mount(path, one).pop())
        })
    }

    /// Returns the only server of a process, or the only one of its shares.
    fn of_process(pid: u32, running: Vec<(Client, Status)>) -> Result<Self> {
        let (of_shares, of_disks): (Vec<_>, Vec<_>) = servers_of(pid, running)
            .into_iter()
            .partition(|(_, status)| status.shares.iter().any(|share| share.disk.is_none()));
        let mut found = if of_shares.is_empty() { of_disks } else { of_shares };
        if found.len() > 1 {
            let all: Vec<_> = (0..found.len()).map(|server| (server, 0, None)).collect();
            bail!("process {pid} has a process for each share and disk: name {}", places(&found, &all).join(", or "));
        }
        let (client, _) =
            found.pop().with_context(|| format!("process {pid} is not a ferry share or mount of yours"))?;
        Ok(Self { client, share: None, file: None, pid })
    }

    /// Returns the share with this path; `shown` is its name for the user.
    fn of_path(shown: &dyn Display, path: &Path, running: &[(Client, Status)]) -> Result<Option<Found>> {
        if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket())
            && let Some(found) = Self::of_socket(path, running)
        {
            return Ok(Some(found));
        }
        let mut found = Self::of_mount(path, running);
        if found.is_empty() {
            found = Self::of_source(path, running);
            if found.len() > 1 {
                bail!("{shown} is shared several times: name {}", places(running, &found).join(", or "));
            }
        }
        Ok(found.pop())
    }

    /// Returns the share with this 9P address, as `ferry log` shows it.
    fn of_address(address: &str, running: &[(Client, Status)]) -> Option<Found> {
        let found = each_share(running).find(|(_, _, shown)| shown.ninep.as_deref() == Some(address));
        found.map(|(client, share, _)| (client, share, None))
    }

    fn of_socket(path: &Path, running: &[(Client, Status)]) -> Option<Found> {
        each_share(running).find_map(|(client, share, shown)| {
            let ninep = shown
                .ninep
                .as_deref()
                .and_then(|address| address.strip_prefix("unix:").or_else(|| address.strip_prefix("vhost-user:")));
            let mut sockets = [&shown.virtiofs, &shown.disk, &shown.snapshotter]
                .into_iter()
                .flatten()
                .map(String::as_str)
                .chain(ninep);
            let same = |socket| Path::new(socket).canonicalize().is_ok_and(|socket| socket == path);
            sockets.any(same).then_some((client, share, None))
        })
    }

    /// Returns the share of the innermost mount that contains a path.
    fn of_mount(path: &Path, running: &[(Client, Status)]) -> Vec<Found> {
        Self::innermost(path, running, |shown| shown.mount.as_deref().map(PathBuf::from))
    }

    /// Returns all shares of the innermost shared directory that contains a path, for files that are mounted elsewhere.
    fn of_source(path: &Path, running: &[(Client, Status)]) -> Vec<Found> {
        // Sources other than directories are not absolute paths.
        Self::innermost(path, running, |shown| {
            Path::new(&shown.source).canonicalize().ok().filter(|_| shown.source.starts_with('/'))
        })
    }

    fn innermost(
        path: &Path,
        running: &[(Client, Status)],
        directory: impl Fn(&ShareStatus) -> Option<PathBuf>,
    ) -> Vec<Found> {
        // A mount inside the mount or source of another ferry does not belong to it, even if its own server has died.
        let mount = mount_of(path);
        let within: Vec<_> = each_share(running)
            .filter_map(|(client, share, shown)| {
                let directory = directory(shown).filter(|directory| mount.is_none() || mount_of(directory) == mount)?;
                let rest = path.strip_prefix(&directory).ok()?.as_os_str().as_bytes();
                let file = (!rest.is_empty()).then(|| FileName(rest.to_vec()));
                Some((directory.as_os_str().len(), (client, share, file)))
            })
            .collect();
        let innermost = within.iter().map(|(length, _)| *length).max();
        within.into_iter().filter(|(length, _)| Some(*length) == innermost).map(|(_, found)| found).collect()
    }
}

/// A server, and what it says of itself.
type Running = (Client, Status);

/// The index of a server, the index of its share, and the file in it.
type Found = (usize, usize, Option<FileName>);

/// Returns a name for each of these.
fn places(running: &[(Client, Status)], found: &[Found]) -> Vec<String> {
    let place = |(client, share, _): &Found| {
        let status = &running[*client].1;
        let shown = &status.shares[*share];
        let place = shown.mount.as_ref().or(shown.virtiofs.as_ref()).or(shown.ninep.as_ref()).or(shown.disk.as_ref());
        place.map_or_else(|| status.pid.to_string(), Clone::clone)
    };
    found.iter().map(place).collect()
}

/// Returns the process that a target names.
fn pid_of(target: &Path) -> Option<u32> {
    target.to_str()?.parse().ok()
}

/// Returns the servers of a process: itself, or those that it has started.
fn servers_of(pid: u32, running: Vec<(Client, Status)>) -> Vec<(Client, Status)> {
    // A server of another user may name any process as its parent.
    let owner = fs::metadata(format!("/proc/{pid}")).ok().map(|found| found.uid());
    let is_of = |(client, status): &(Client, Status)| {
        client.endpoint.pid == pid || status.pid == pid && owner == Some(client.endpoint.owner)
    };
    running.into_iter().filter(is_of).collect()
}

/// A server's process, and the index of a share.
pub type ServerShare = (u32, Option<usize>);

/// Returns the manager of the process that serves a target; and the server with the index of the share, unless the target is the
/// process itself.
pub fn manager_of(target: &Path) -> Result<(Client, Option<ServerShare>)> {
    if let Some(endpoint) = pid_of(target).and_then(|pid| managers().into_iter().find(|manager| manager.pid == pid)) {
        return Ok((Client::new(endpoint), None));
    }
    let Target { client: Client { endpoint, .. }, share, file, pid } = Target::find(target)?;
    if file.is_some() {
        bail!("{} is a file; name its mount point or shared directory", target.display());
    }
    let manager = endpoint.of_manager(pid);
    if !manager.path.exists() {
        bail!(
            "process {pid} was not started with ferry share --config, so what it serves cannot change; start another one"
        );
    }
    Ok((Client::new(manager), Some((endpoint.pid, share))))
}

/// Whether a path is in a mount of any ferry, running or not.
pub fn is_in_mount(path: &Path) -> bool {
    mount_of(path).is_some()
}

/// Returns the id of the ferry mount that contains a path.
fn mount_of(path: &Path) -> Option<u64> {
    Mountpoint::of_ferry(&path.canonicalize().ok()?)
}

/// Returns every share with the indexes of its server and itself.
fn each_share(running: &[(Client, Status)]) -> impl Iterator<Item = (usize, usize, &ShareStatus)> {
    running.iter().enumerate().flat_map(|(client, (_, status))| {
        status.shares.iter().enumerate().map(move |(share, shown)| (client, share, shown))
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn server(pid: u32, mounts: &[&str]) -> (Client, Status) {
        let share =
            |mount: &&str| ShareStatus { source: "mem".into(), mount: Some((*mount).into()), ..ShareStatus::default() };
        let shares = mounts.iter().map(share).collect();
        let endpoint = Endpoint { pid, owner: 0, path: "/s".into() };
        (Client::new(endpoint), Status { pid, shares, log: "info".into(), requests: None })
    }

    /// What a client makes of a server that says this.
    fn told(says: impl Fn(&mut UnixStream) -> std::io::Result<()> + Send + 'static) -> Result<Status> {
        told_within(None, says)
    }

    /// The same, of another user's.
    fn told_within(
        allowance: Option<Arc<Allowance>>,
        says: impl Fn(&mut UnixStream) -> std::io::Result<()> + Send + 'static,
    ) -> Result<Status> {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("a free path");
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("a client");
            let mut request = String::new();
            BufReader::new(&client).read_line(&mut request).expect("a request");
            says(&mut client)
        });
        let owner = rustix::process::geteuid().as_raw();
        Client { allowance, ..Client::new(Endpoint { pid: std::process::id(), owner, path }) }.status()
    }

    #[test]
    fn a_server_that_ends_before_its_answer_has_ended() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("a free path");
        let server = std::thread::spawn(move || drop(listener.accept().expect("a client")));
        let owner = rustix::process::geteuid().as_raw();
        let client = Client::new(Endpoint { pid: std::process::id(), owner, path });
        let error = client.report_unless_ended().expect_err("nobody answers");
        assert!(has_ended(&error), "{error:#}");
        server.join().expect("a client came");
    }

    #[test]
    fn endless_and_slow_replies_are_abandoned() {
        let begin = Instant::now();
        let error = told(|client| (0..).try_for_each(|_| client.write_all(&[b'x'; 65536]))).expect_err("no end");
        assert!(format!("{error:#}").contains("longer than"), "{error:#}");
        assert!(begin.elapsed() < PATIENCE);
        let slowly = |client: &mut UnixStream| {
            (0..).try_for_each(|_| {
                std::thread::sleep(Duration::from_millis(100));
                client.write_all(b" ")
            })
        };
        let begin = Instant::now();
        told(slowly).expect_err("no end");
        assert!(begin.elapsed() < PATIENCE * 2, "{:?}", begin.elapsed());
        let error = told(|client| client.write_all(b"{\"error\": \"no\\u001b[2J\"}\n")).expect_err("an error");
        assert_eq!(error.to_string(), "no\u{1b}[2J");
        let error = told(|client| client.write_all(b"\x1b[2J\n")).expect_err("no answer");
        assert!(!format!("{error:#}").contains('\u{1b}'), "{error:#}");
    }

    #[test]
    fn servers_of_other_users_are_limited_together() {
        let status = server(1, &[]).1;
        let line = move |client: &mut UnixStream| {
            serde_json::to_writer(&*client, &Reply::Ok(status.clone()))?;
            client.write_all(b"\n")
        };
        let allowance = |bytes, end| Some(Arc::new(Allowance { bytes: AtomicUsize::new(bytes), end }));
        let later = Instant::now() + PATIENCE;
        let shared = allowance(200, later);
        told_within(shared.clone(), line.clone()).expect("the first");
        let error = (0..200).find_map(|_| told_within(shared.clone(), line.clone()).err()).expect("too much");
        assert!(format!("{error:#}").contains("sent too much"), "{error:#}");
        let begin = Instant::now();
        told_within(allowance(200, begin), line).expect_err("too late");
        assert!(begin.elapsed() < PATIENCE);
    }

    #[test]
    fn many_servers_are_asked_by_a_few_threads() {
        let clients = (0..500).map(|pid| server(pid, &[]).0).collect();
        let replies = ask_each(clients, |client| Ok((client.endpoint.pid, std::thread::current().id())));
        let replies: Vec<_> = replies.into_iter().map(|(_, reply)| reply.expect("a reply")).collect();
        let pids: std::collections::HashSet<_> = replies.iter().map(|(pid, _)| *pid).collect();
        let threads: std::collections::HashSet<_> = replies.iter().map(|(_, thread)| *thread).collect();
        assert!(pids.len() == 500 && threads.len() <= ASKING_MAX, "{} threads", threads.len());
    }

    #[test]
    fn paths_belong_to_the_innermost_mount() {
        let running = [server(1, &["/mnt", "/srv/a"]), server(2, &["/mnt/inner"])];
        let file = |bytes: &str| Some(FileName(bytes.into()));
        for (path, expected) in [
            ("/mnt", Some((0, 0, None))),
            ("/mnt/x/y", Some((0, 0, file("x/y")))),
            ("/mnt/inner", Some((1, 0, None))),
            ("/mnt/inner/z", Some((1, 0, file("z")))),
            ("/mnt2/x", None),
            ("/srv/a/b", Some((0, 1, file("b")))),
            ("/", None),
        ] {
            assert_eq!(Target::of_mount(Path::new(path), &running), Vec::from_iter(expected), "{path}");
        }
    }
}
