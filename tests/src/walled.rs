//! The program, started by some user in a folder of his own, with its walls as they are by default.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::inside::Inside;
use crate::mounts::{Started, program};
use crate::{Place, folder};

/// More than any process here takes to begin or end, also on a busy machine.
const SOON: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(10);

/// A folder of a user's, with the program where everybody may start it.
#[derive(Debug)]
pub struct Home {
    folder: TempDir,
    user: u32,
}

impl Home {
    /// A new one.
    pub fn of(user: u32) -> Self {
        let home = Self { folder: folder(Place::Disk), user };
        crate::copy_program(program(), &home.at("ferry-copy"));
        fs::set_permissions(home.at("ferry-copy"), fs::Permissions::from_mode(0o755)).unwrap();
        chown(home.folder.path(), Some(user), Some(user)).unwrap();
        home
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Something in it.
    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes something that belongs to the user.
    pub fn make(&self, name: &str, make: impl FnOnce(&Path)) -> PathBuf {
        let path = self.at(name);
        make(&path);
        chown(&path, Some(self.user), Some(self.user)).unwrap();
        path
    }

    /// The program, started by the user here, with what stands before it.
    pub fn command(&self, before: &[&str], line: &str) -> Command {
        let mut words: Vec<String> = before.iter().map(|word| (*word).to_owned()).collect();
        if self.user != rustix::process::geteuid().as_raw() {
            let user = self.user.to_string();
            words.extend(["setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"].map(str::to_owned));
        }
        words.push(self.at("ferry-copy").to_str().unwrap().into());
        words.extend(line.split_whitespace().map(str::to_owned));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(self.folder.path()).env("XDG_RUNTIME_DIR", self.folder.path());
        command.env_remove("FERRY_LOG");
        command
    }

    /// Has the program do something that comes to an end.
    pub fn run(&self, line: &str) {
        let output = self.command(&[], line).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    }

    /// Starts a server, which says in JSON that it is up.
    pub fn serve(self, line: &str) -> Served {
        let command = self.command(&[], line);
        self.serve_by(command)
    }

    /// The same by a command of whatever kind.
    pub fn serve_by(self, mut command: Command) -> Served {
        let mut started = Started::new(&mut command);
        let end = Instant::now() + SOON;
        while !started.said().0.ends_with('\n') {
            let ended = started.wait(Duration::ZERO);
            assert!(ended.is_none() && Instant::now() < end, "{ended:?}: {}", started.said().1);
            std::thread::sleep(TICK);
        }
        let line: serde_json::Value = serde_json::from_str(&started.said().0).unwrap();
        assert_eq!(line["pid"], started.pid().as_raw_nonzero().get(), "the process that was started is told of");
        Served { inside: Inside::of(started.pid()), started, line, home: self }
    }
}

/// The program, serving.
#[derive(Debug)]
pub struct Served {
    /// The process that was started. It is killed on drop, and the other one does not outlive it.
    pub started: Started,
    /// The one that serves.
    pub inside: Inside,
    /// What it said in JSON.
    pub line: serde_json::Value,
    /// Where it was started.
    pub home: Home,
}

impl Served {
    /// On standard error.
    pub fn said(&self) -> String {
        self.started.said().1
    }

    /// That it says so soon.
    #[track_caller]
    pub fn says(&self, words: &str) {
        let end = Instant::now() + SOON;
        while !self.said().contains(words) {
            assert!(Instant::now() < end, "it does not say {words:?}: {}", self.said());
            std::thread::sleep(TICK);
        }
    }

    /// The status with which it ends after a signal to the process that was started.
    #[track_caller]
    pub fn ends_by(&mut self, signal: Signal) -> i32 {
        kill_process(self.started.pid(), signal).unwrap();
        self.ends()
    }

    /// The status with which it ends.
    #[track_caller]
    pub fn ends(&mut self) -> i32 {
        let status = self.started.wait(SOON).unwrap_or_else(|| panic!("it does not end: {}", self.said()));
        status.code().unwrap_or_else(|| panic!("{status}: {}", self.said()))
    }

    /// That all of its walls stand: these directories can be seen, these files of its home are open, and nothing else can be reached.
    #[track_caller]
    pub fn is_confined(&self, shares: usize, files: &[&str], capabilities: u64) {
        let inside = self.inside;
        inside.all_are("NoNewPrivs", "1");
        inside.all_are("Seccomp", "2");
        inside.has_capabilities(capabilities);
        for namespace in ["mnt", "pid", "net"] {
            assert!(inside.has_own(namespace), "{namespace}");
        }
        assert_eq!(inside.sees(""), ["proc", "share"]);
        let places: Vec<String> = (0..shares).map(|number| number.to_string()).collect();
        assert_eq!(inside.sees("share"), places);
        let mounts = ["/", "/proc/self/fd", "/proc/self/uid_map"].map(str::to_owned);
        let mounts: Vec<String> = mounts.into_iter().chain(places.iter().map(|at| format!("/share/{at}"))).collect();
        assert_eq!(inside.mounts(), mounts);
        assert_eq!(fs::read_link(inside.file("cwd")).unwrap(), Path::new("/"));
        // In another namespace of mounts they have the names that they have there.
        let dirs = inside.open_directories();
        assert!(dirs.iter().all(|dir| dir.starts_with("/share/") && shares > 0), "{dirs:?}");
        let mut expected: Vec<PathBuf> = files.iter().map(|name| self.home.at(name)).collect();
        expected.sort_unstable();
        let found: Vec<_> = inside.open_files().into_iter().filter(|path| path.starts_with(self.home.path())).collect();
        assert_eq!(found, expected);
        // Of the process that stays outside, none of them is.
        let outside = self.started.pid().as_raw_nonzero();
        for entry in fs::read_dir(format!("/proc/{outside}/fd")).unwrap() {
            let open = fs::read_link(entry.unwrap().path()).unwrap();
            assert!(!open.starts_with(self.home.path()), "{}", open.display());
        }
    }
}
