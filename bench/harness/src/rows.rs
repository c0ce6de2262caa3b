//! The rows of the virtiofs table.

use ferry_driver::load::Op;

use crate::stats::Better;

/// What the guest may cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Config {
    /// Nothing.
    None,
    /// Names and attributes for a second, data while a file is open; extended attributes and ACLs work.
    Auto,
    /// The same without extended attributes and ACLs.
    AutoNoXattr,
    /// That, and locks that nobody else meets: no more than virtiofsd offers.
    AutoLocalLocks,
    /// Everything until it is told otherwise, without extended attributes and ACLs.
    AlwaysNoXattr,
    /// Nothing, but for what lies in a DAX window, which the peer has not.
    NoneDax,
}

impl Config {
    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Auto => "auto",
            Self::AutoNoXattr => "auto-no-xattr",
            Self::AutoLocalLocks => "auto-local-locks",
            Self::AlwaysNoXattr => "always-no-xattr",
            Self::NoneDax => "none-dax",
        }
    }

    /// The flags of `ferry share`.
    pub fn ferry_flags(self) -> &'static str {
        match self {
            Self::None => "--cache none",
            Self::Auto => "--cache auto",
            Self::AutoNoXattr => "--cache auto --no-xattr",
            Self::AutoLocalLocks => "--cache auto --no-xattr --local-locks",
            Self::AlwaysNoXattr => "--cache always --no-xattr",
            Self::NoneDax => "--cache none",
        }
    }

    /// The flags of virtiofsd that make it offer the same. With mmap where it caches nothing, so that it can run
    /// those jobs.
    pub fn virtiofsd_flags(self) -> &'static str {
        match self {
            Self::None | Self::NoneDax => "--cache never --allow-mmap",
            Self::Auto => "--cache auto --xattr --posix-acl",
            Self::AutoNoXattr | Self::AutoLocalLocks => "--cache auto",
            Self::AlwaysNoXattr => "--cache always",
        }
    }
}

/// How fio accesses the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// pread and pwrite.
    Psync,
    /// Loads and stores.
    Mmap,
    /// Asynchronous, direct, 16 in flight.
    Libaio,
}

/// A job of fio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Random offsets rather than a walk.
    pub random: bool,
    /// Writes rather than reads.
    pub write: bool,
    /// The engine.
    pub engine: Engine,
    /// Four at once.
    pub multi: bool,
}

/// Work on names and small files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// `find` with the attributes of a tree, after the guest has dropped what it knew.
    StatWalk,
    /// The same again at once.
    StatWalkWarm,
    /// `tar` unpacks 2,000 small files in 50 directories.
    TreeCreate,
    /// `rm` removes them.
    TreeDelete,
    /// `git status` in a repository of 2,000 files.
    GitStatus,
    /// `git clone` of a small repository.
    GitClone,
    /// `cp -r` of 1,000 files.
    SmallFileCopy,
    /// `cat` of the same files.
    OpenReadClose,
    /// `find` in a large repository, names alone.
    LargeFind,
    /// The same with the attributes.
    LargeFindStat,
    /// `git status` in it.
    LargeGitStatus,
    /// `tar` unpacks a tree like a node_modules.
    LargeUnpack,
    /// `rm` removes it.
    LargeDelete,
    /// `git clone` of the large repository.
    LargeGitClone,
    /// `cargo build` of a workspace of small crates.
    CargoBuild,
    /// `npm ci` of packages that are archives on this machine.
    NpmCi,
}

/// A load by the native driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Native {
    /// What it asks.
    pub op: Op,
    /// Over how many queues.
    pub queues: usize,
    /// With how many requests in flight on each.
    pub depth: usize,
}

/// What a row does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// fio in the guest.
    Fio(Job),
    /// Names and small files in the guest.
    Meta(Task),
    /// Requests from the host.
    Native(Native),
}

/// A row.
#[derive(Debug, Clone)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// The configuration of both servers.
    pub config: Config,
    /// What it does.
    pub work: Work,
    /// Whether a quick run has it.
    pub quick: bool,
}

/// The fio jobs of a quick run.
const QUICK_JOBS: [&str; 10] = [
    "seqread-psync",
    "seqread-psync-multi",
    "randread-psync",
    "randread-mmap",
    "randread-libaio",
    "randread-libaio-multi",
    "seqwrite-psync",
    "randwrite-psync-multi",
    "randwrite-mmap",
    "randwrite-libaio",
];

impl Row {
    /// Its name with its configuration.
    pub fn full_name(&self) -> String {
        format!("{} {}", self.name, self.config.name())
    }

    /// The unit of its figures.
    pub fn unit(&self) -> &'static str {
        match self.work {
            Work::Fio(_) => "MiB/s",
            Work::Meta(_) => "ms",
            Work::Native(_) => "requests/s",
        }
    }

    /// Which way they are good.
    pub fn better(&self) -> Better {
        if matches!(self.work, Work::Meta(_)) { Better::Lower } else { Better::Higher }
    }

    /// What a reader must know.
    pub fn note(&self) -> Option<String> {
        match self.work {
            Work::Native(Native { queues, depth, .. }) if queues > 1 => Some(format!(
                "virtiofsd has one queue: all {} requests in flight are on it; nobody is bound to a CPU",
                queues * depth
            )),
            _ => None,
        }
    }

    /// Whether it is about names and small files, in the guest or natively.
    pub fn is_metadata(&self) -> bool {
        match self.work {
            Work::Meta(_) => true,
            Work::Native(native) => matches!(native.op, Op::Getattr | Op::Lookup),
            Work::Fio(_) => false,
        }
    }

    /// Whether several jobs run at once in the guest.
    pub fn is_multi(&self) -> bool {
        matches!(self.work, Work::Fio(Job { multi: true, .. }))
    }
}

/// All rows, in the order in which they run.
pub fn all() -> Vec<Row> {
    let mut rows = jobs();
    rows.push(meta("stat-walk", Config::None, Task::StatWalk));
    for config in [Config::Auto, Config::AutoNoXattr] {
        rows.extend(TASKS.map(|(name, task)| meta(name, config, task)));
    }
    rows.push(meta("open-read-close", Config::AutoLocalLocks, Task::OpenReadClose));
    for queues in [1, 4] {
        for depth in [1, 16, 64] {
            rows.push(native("native-read-4k", Op::Read, queues, depth));
        }
    }
    rows.push(native("native-getattr", Op::Getattr, 1, 16));
    rows.push(native("native-lookup", Op::Lookup, 1, 16));
    rows
}

/// The rows about names and small files.
const TASKS: [(&str, Task); 8] = [
    ("stat-walk", Task::StatWalk),
    ("stat-walk-warm", Task::StatWalkWarm),
    ("tree-create", Task::TreeCreate),
    ("tree-delete", Task::TreeDelete),
    ("git-status", Task::GitStatus),
    ("git-clone", Task::GitClone),
    ("small-file-copy", Task::SmallFileCopy),
    ("open-read-close", Task::OpenReadClose),
];

/// The 24 published jobs, in their order.
pub fn jobs() -> Vec<Row> {
    let mut rows = Vec::new();
    for (pattern, random, write) in
        [("seqread", false, false), ("randread", true, false), ("seqwrite", false, true), ("randwrite", true, true)]
    {
        for (engine_name, engine) in [("psync", Engine::Psync), ("mmap", Engine::Mmap), ("libaio", Engine::Libaio)] {
            for multi in [false, true] {
                let name = format!("{pattern}-{engine_name}{}", if multi { "-multi" } else { "" });
                let quick = QUICK_JOBS.contains(&name.as_str());
                rows.push(Row {
                    name,
                    config: Config::None,
                    work: Work::Fio(Job { random, write, engine, multi }),
                    quick,
                });
            }
        }
    }
    rows
}

/// The rows about large trees: those of the table `metadata`.
pub fn large() -> Vec<Row> {
    let tasks = [
        ("find", Task::LargeFind),
        ("find-stat", Task::LargeFindStat),
        ("git-status", Task::LargeGitStatus),
        ("unpack", Task::LargeUnpack),
        ("delete", Task::LargeDelete),
    ];
    let of = |config| tasks.map(|(name, task)| Row { quick: true, ..meta(name, config, task) });
    let tools = [("git-clone", Task::LargeGitClone), ("cargo-build", Task::CargoBuild), ("npm-ci", Task::NpmCi)];
    let all = [Config::AutoNoXattr, Config::AlwaysNoXattr].into_iter().flat_map(of);
    all.chain(tools.map(|(name, task)| meta(name, Config::AutoNoXattr, task))).collect()
}

fn meta(name: &str, config: Config, task: Task) -> Row {
    Row { name: name.into(), config, work: Work::Meta(task), quick: config == Config::AutoNoXattr }
}

fn native(name: &str, op: Op, queues: usize, depth: usize) -> Row {
    let work = Work::Native(Native { op, queues, depth });
    Row { name: format!("{name} q{queues} d{depth}"), config: Config::None, work, quick: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_job_is_a_row() {
        let rows = all();
        let published = crate::report::published();
        assert_eq!(published.len(), 24);
        for job in published {
            assert!(rows.iter().any(|row| row.name == job.name && row.config == Config::None), "{}", job.name);
        }
    }

    #[test]
    fn names_are_unique_within_a_configuration() {
        let mut names: Vec<_> = all().into_iter().map(|row| (row.name, row.config)).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(all().iter().filter(|row| row.quick && matches!(row.work, Work::Fio(_))).count(), QUICK_JOBS.len());
    }
}
