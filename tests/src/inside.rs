//! A process in a sandbox, as it looks from outside.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

/// A server of the program's: the process inside, if there are two.
#[derive(Clone, Copy, Debug)]
pub struct InnerProcess(Pid);

impl InnerProcess {
    /// Of the process that was started.
    pub fn of(started: Pid) -> Self {
        Self(child_of(started).unwrap_or(started))
    }

    /// Of this process, whether it has one inside or not.
    pub fn only(process: Pid) -> Self {
        Self(process)
    }

    /// Its process id on the host.
    pub fn pid(self) -> Pid {
        self.0
    }

    /// A file of its directory in /proc.
    pub fn file(self, name: &str) -> PathBuf {
        Path::new("/proc").join(self.0.as_raw_nonzero().to_string()).join(name)
    }

    /// Its threads, as they are now.
    pub fn threads(self) -> Vec<Thread> {
        let threads = fs::read_dir(self.file("task")).unwrap();
        let thread = |dir: PathBuf| {
            // One that ends meanwhile has none of these any more.
            let (status, network) = (fs::read_to_string(dir.join("status")), fs::read_link(dir.join("ns/net")));
            let (status, network) = (status.ok()?, network.ok()?);
            let has_own_network = network != fs::read_link("/proc/self/ns/net").unwrap();
            let mounts = fs::read_to_string(dir.join("mountinfo")).ok()?;
            Some(Thread { status, has_own_network, mounts })
        };
        threads.filter_map(|entry| thread(entry.ok()?.path())).collect()
    }

    /// A field of each thread's status.
    pub fn status(self, field: &str) -> Vec<String> {
        self.threads().iter().map(|thread| thread.status(field).to_owned()).collect()
    }

    /// That a field is the same for all threads.
    #[track_caller]
    pub fn all_are(self, field: &str, expected: &str) {
        let found = self.status(field);
        assert!(!found.is_empty() && found.iter().all(|value| value == expected), "{field}: {found:?}, not {expected}");
    }

    /// That no capability of a set is there for any thread but these.
    #[track_caller]
    pub fn has_capabilities(self, bits: u64) {
        self.threads().iter().for_each(|thread| thread.has_capabilities(bits));
    }

    /// Whether its namespace is another than ours.
    pub fn has_own(self, namespace: &str) -> bool {
        let of = |path: PathBuf| fs::read_link(path.join("ns").join(namespace)).unwrap();
        of(self.file("")) != of("/proc/self".into())
    }

    /// The names in its root directory below a directory of that.
    pub fn sees(self, dir: &str) -> Vec<String> {
        names(&self.file("root").join(dir))
    }

    /// Where something is mounted for it.
    pub fn mounts(self) -> Vec<String> {
        let mounts = fs::read_to_string(self.file("mountinfo")).unwrap();
        let mut places: Vec<String> = mounts.lines().map(|line| line.split(' ').nth(4).unwrap().into()).collect();
        places.sort_unstable();
        places
    }

    /// What its descriptors of directories are called: each would be a way out.
    pub fn open_directories(self) -> Vec<PathBuf> {
        let descriptors = fs::read_dir(self.file("fd")).unwrap();
        descriptors
            .filter_map(|entry| Some(entry.ok()?.path()))
            // Descriptors may be closed meanwhile.
            .filter(|path| fs::metadata(path).is_ok_and(|found| found.is_dir()))
            .map(|path| fs::read_link(path).unwrap_or_default())
            .collect()
    }

    /// What its descriptors of files are called.
    pub fn open_files(self) -> Vec<PathBuf> {
        let descriptors = fs::read_dir(self.file("fd")).unwrap();
        let mut files: Vec<PathBuf> = descriptors
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .filter(|path| path.is_absolute() && !path.starts_with("/dev/null"))
            .collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Whether it has ended.
    pub fn is_gone(self) -> bool {
        // One that has ended and was not waited for is there, without files.
        fs::read_dir(self.file("fd")).map_or(true, |fds| fds.count() == 0)
    }
}

/// A thread of a server.
#[derive(Clone, Debug)]
pub struct Thread {
    status: String,
    /// Whether its namespace of networks is another than ours.
    pub has_own_network: bool,
    mounts: String,
}

impl Thread {
    /// A field of its status.
    #[track_caller]
    pub fn status(&self, field: &str) -> &str {
        let line = self.status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("no {field} in {}", self.status))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.status("Name")
    }

    /// With which flags something is mounted for it at a place, if there is anything.
    pub fn mounted(&self, place: &str) -> Option<&str> {
        let mut lines = self.mounts.lines().map(|line| line.split(' ').skip(4));
        lines.find_map(|mut fields| fields.next().filter(|at| *at == place).and_then(|_| fields.next()))
    }

    /// That it has these capabilities, and can have no others.
    #[track_caller]
    pub fn has_capabilities(&self, bits: u64) {
        for (set, bits) in [("CapEff", bits), ("CapPrm", bits), ("CapBnd", bits), ("CapInh", 0), ("CapAmb", 0)] {
            assert_eq!(self.status(set), format!("{bits:016x}"), "{set} of {}", self.name());
        }
    }
}

/// The only child of a process.
pub fn child_of(pid: Pid) -> Option<Pid> {
    children_of(pid).first().copied()
}

/// The children of a process, in the order in which they were begun.
pub fn children_of(pid: Pid) -> Vec<Pid> {
    let pid = pid.as_raw_nonzero();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().filter_map(|child| Pid::from_raw(child.parse().unwrap())).collect()
}

/// The names in a directory.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
