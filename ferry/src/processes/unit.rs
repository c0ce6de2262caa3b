//! What one server process serves: shares that need each other, or a disk.

use std::path::{Path, PathBuf};

use ferry_control::{LogLevel, MetricsAddress, TraceOptions};

use crate::disk;
use crate::flags::{Kind, Share};
use crate::paths::absolute;
use crate::sandbox::SandboxFlags;

/// What one server process serves.
#[derive(Clone, Debug)]
pub struct Unit {
    pub items: Items,
    /// The table of each item in the configuration file; `None`: it was added by hand.
    pub tables: Vec<Option<toml::Table>>,
    pub sandbox_flags: SandboxFlags,
    /// Where the metrics of its shares can be fetched; a disk has its own.
    pub metrics: Option<MetricsAddress>,
    /// The file of a trace of its shares.
    pub trace: Option<TraceOptions>,
    /// The level of its log, if it is not that of the process.
    pub level: Option<LogLevel>,
}

/// The shares or the disk.
#[derive(Clone, Debug)]
pub enum Items {
    Shares(Vec<Share>),
    Disk(Box<disk::Args>),
}

impl Unit {
    /// Returns the process of a disk.
    pub fn of_disk(disk: disk::Args, table: Option<toml::Table>, sandbox_flags: &SandboxFlags) -> Self {
        Self {
            items: Items::Disk(Box::new(disk)),
            tables: vec![table],
            sandbox_flags: sandbox_flags.clone(),
            metrics: None,
            trace: None,
            level: None,
        }
    }

    /// Returns the processes of shares: each share has its own, except those that need each other.
    pub fn of_shares(shares: Vec<(Share, Option<toml::Table>)>, sandbox_flags: &SandboxFlags) -> Vec<Self> {
        let mut groups: Vec<Vec<(Share, Option<toml::Table>, Needs)>> = Vec::new();
        for (share, table) in shares {
            let needs = Needs::of(&share);
            let one = (share, table, needs);
            let needs = |group: &Vec<(Share, _, Needs)>| group.iter().any(|(.., other)| one.2.meet(other));
            let found: Vec<_> = (0..groups.len()).filter(|at| needs(&groups[*at])).collect();
            match found.split_first() {
                None => groups.push(vec![one]),
                // This one may join several groups.
                Some((first, others)) => {
                    let joined: Vec<_> = others.iter().rev().map(|at| groups.remove(*at)).collect();
                    groups[*first].extend(joined.into_iter().rev().flatten());
                    groups[*first].push(one);
                }
            }
        }
        let plain = |group: Vec<(Share, _, Needs)>| group.into_iter().map(|(share, table, _)| (share, table)).collect();
        groups.into_iter().map(|group| Self::of_group(plain(group), sandbox_flags)).collect()
    }

    /// Returns the one process of all these shares.
    pub fn of_group(shares: Vec<(Share, Option<toml::Table>)>, sandbox_flags: &SandboxFlags) -> Self {
        let (shares, tables) = shares.into_iter().unzip();
        let sandbox_flags = sandbox_flags.clone();
        Self { items: Items::Shares(shares), tables, sandbox_flags, metrics: None, trace: None, level: None }
    }

    /// Sets what one of the items is now: the shares or the disk have one.
    pub fn set_item(&mut self, item: usize, now: Items) {
        match (&mut self.items, now) {
            (Items::Shares(all), Items::Shares(mut now)) => {
                if let (Some(known), Some(now)) = (all.get_mut(item), now.pop()) {
                    *known = now;
                }
            }
            (Items::Disk(known), Items::Disk(now)) => *known = now,
            _ => {}
        }
    }

    pub fn shares(&self) -> &[Share] {
        match &self.items {
            Items::Shares(shares) => shares,
            Items::Disk(_) => &[],
        }
    }

    pub fn disk(&self) -> Option<&disk::Args> {
        match &self.items {
            Items::Shares(_) => None,
            Items::Disk(disk) => Some(disk),
        }
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.tables.len()
    }

    /// Returns the names of the items: sources and files.
    pub fn names(&self) -> Vec<String> {
        match &self.items {
            Items::Shares(shares) => shares.iter().map(|share| share.source.display().to_string()).collect(),
            Items::Disk(disk) => vec![disk.path().map(absolute).unwrap_or_default()],
        }
    }

    /// Returns its name for messages.
    pub fn shown(&self) -> String {
        self.names().join(", ")
    }

    /// Returns where clients find each item.
    pub fn places(&self) -> Vec<Vec<String>> {
        match &self.items {
            Items::Shares(shares) => shares.iter().map(places_of_share).collect(),
            Items::Disk(disk) => vec![places_of_disk(disk)],
        }
    }
}

/// What a share has that another one of its process may need.
struct Needs {
    source: Kind,
    limit_group: Option<String>,
    mount: Option<PathBuf>,
}

impl Needs {
    fn of(share: &Share) -> Self {
        Self {
            source: share.kind().canonical(),
            limit_group: share.limit.as_ref().and_then(|limit| limit.group.clone()),
            mount: share.mount.as_ref().and_then(|mount| mount.canonicalize().ok()),
        }
    }

    /// Whether one process must serve both: they have one source or one limit, or one does not see the mount of the other.
    fn meet(&self, other: &Self) -> bool {
        let contains = |one: &Self, other: &Self| match (&one.source, &other.mount) {
            (Kind::Dir(path), Some(mount)) => mount.starts_with(path),
            _ => false,
        };
        let is_one_limit = self.limit_group.is_some() && self.limit_group == other.limit_group;
        self.source == other.source || is_one_limit || contains(self, other) || contains(other, self)
    }
}

/// Returns where clients find a share.
pub fn places_of_share(share: &Share) -> Vec<String> {
    let path = |path: &Path| real(path);
    let ninep = share.ninep.as_ref().map(|address| match address.path() {
        Some(socket) => path(socket),
        // Any free port is no place yet.
        None if address.is_any() => format!("{address} of {}", share.source.display()),
        None => address.to_string(),
    });
    let fd = share.fd.map(|fd| format!("descriptor {fd}"));
    let paths = [&share.virtiofs, &share.mount].into_iter().flatten().map(|place| path(place));
    paths.chain(ninep).chain(fd).collect()
}

/// Returns where clients find a disk.
pub fn places_of_disk(disk: &disk::Args) -> Vec<String> {
    let (socket, fd) = disk.socket();
    socket.map(real).into_iter().chain(fd.map(|fd| format!("descriptor {fd}"))).collect()
}

/// Returns the absolute path of a socket or mount point, through the links of its directory.
fn real(path: &Path) -> String {
    let path = absolute(path);
    let path = Path::new(&path);
    let directory = path.parent().and_then(|directory| directory.canonicalize().ok());
    let real = directory.zip(path.file_name()).map(|(directory, name)| directory.join(name));
    real.as_deref().unwrap_or(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::tests::shares;

    fn groups(line: &str) -> Vec<Vec<String>> {
        let shares = shares(&format!("ferry share {line}")).expect(line).into_iter().map(|share| (share, None));
        let units = Unit::of_shares(shares.collect(), &SandboxFlags::default());
        units.iter().map(Unit::names).collect()
    }

    #[test]
    fn shares_have_a_process_each_unless_they_need_each_other() {
        for (line, processes) in [
            ("/usr --virtiofs a", vec![vec!["/usr"]]),
            ("/usr --virtiofs a /etc --virtiofs b", vec![vec!["/usr"], vec!["/etc"]]),
            ("/usr --virtiofs a /etc --virtiofs b /usr/. --virtiofs c", vec![vec!["/usr", "/usr"], vec!["/etc"]]),
            ("mem --virtiofs a mem --virtiofs b", vec![vec!["mem", "mem"]]),
            (
                "/usr --virtiofs a --limit iops=1,group=g /etc --virtiofs b /var --virtiofs c --limit iops=1,group=g",
                vec![vec!["/usr", "/var"], vec!["/etc"]],
            ),
            ("/usr --virtiofs a --limit iops=1 /etc --virtiofs b --limit iops=1", vec![vec!["/usr"], vec!["/etc"]]),
            ("/usr --virtiofs a mem --mount /usr/lib", vec![vec!["/usr", "mem"]]),
            ("mem --mount /usr/lib /etc --virtiofs a", vec![vec!["mem"], vec!["/etc"]]),
            // The third share joins the processes of two others.
            (
                "/usr --virtiofs a --limit iops=1,group=g /etc --virtiofs b /etc --virtiofs c --limit iops=1,group=g",
                vec![vec!["/usr", "/etc", "/etc"]],
            ),
        ] {
            assert_eq!(groups(line), processes, "{line}");
        }
    }

    #[test]
    fn places_are_where_clients_connect() {
        let all = |line: &str| places_of_share(&shares(&format!("ferry share {line}")).expect(line)[0]);
        assert_eq!(all("mem --virtiofs /usr/../usr/s --mount /mnt"), ["/usr/s", "/mnt"]);
        assert_eq!(all("mem --9p unix:/usr/s"), all("mem --virtiofs /usr/s"));
        assert_eq!(all("mem --9p tcp:127.0.0.1:564"), ["tcp:127.0.0.1:564"]);
        assert_eq!(all("mem --9p tcp:127.0.0.1:0"), ["tcp:127.0.0.1:0 of mem"]);
    }
}
