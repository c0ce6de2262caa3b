//! The `pjdfstest` crate's suite: POSIX system calls, 398 cases.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

/// The version whose cases the tests know.
const VERSION: &str = "0.2.2";

/// The read-only cases remount the file system, which no file may be open on for writing. In one run with the others
/// the suite itself has left some open by then (the same four cases fail on virtiofsd 1.14), so they have a run of
/// their own.
pub const REMOUNTING: &str = "erofs";

/// Cases that do not run on any FUSE file system, with what the suite itself says, and why that is so.
pub const SKIPPED: &[(&str, &str)] = &[(
    "link::link_count_max",
    "Cannot get value for LINK_MAX: the C library knows it of a few file systems by their type, FUSE is none of them",
)];

/// Cases that Linux loses now and then on FUSE file systems, on machines with much else to do, and why.
const RACING: &[(&str, &str)] = &[(
    "open::etxtbsy",
    "open(O_RDONLY | O_TRUNC) of a file that is being executed has the server truncate it first (fuse_open with \
     FUSE_ATOMIC_O_TRUNC), and ETXTBSY comes after that (handle_truncate); a process that has not come to its sleep by \
     then dies for want of its pages, and once it is gone nobody executes the file any more",
)];

/// How often a case of [`RACING`] that has failed is run again.
const TRIES: u32 = 5;

/// Fewer cases than this mean that the suite ended early.
const CASES_MIN: usize = 390;
/// As [`CASES_MIN`], of the cases that remount.
const REMOUNTING_MIN: usize = 13;

const CONFIG: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = REMOUNT
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// The suite's command: on the directory `target`, with `second` on another file system. `config` is the file that its
/// configuration is written to.
pub fn command(config: &Path, target: &Path, second: &Path, remount: bool) -> Vec<OsString> {
    std::fs::write(config, CONFIG.replace("REMOUNT", &remount.to_string())).unwrap();
    let program = super::tool("pjdfstest", VERSION);
    let mut command: Vec<OsString> = vec![program.into(), "-c".into(), config.into()];
    command.extend([OsString::from("-p"), target.into(), "-s".into(), second.into()]);
    if remount {
        command.push(REMOUNTING.into());
    }
    command
}

/// The suite's cases, by their outcome.
#[derive(Debug, Default)]
pub struct Results {
    /// As it should be.
    pub passed: BTreeSet<String>,
    /// Not run.
    pub skipped: BTreeSet<String>,
    /// Not as it should be.
    pub failed: BTreeSet<String>,
}

impl Results {
    /// Reads the outcome off the last word of each line.
    ///
    /// # Panics
    /// When the suite did not come to its end.
    #[track_caller]
    pub fn parse(out: &str, err: &str, remount: bool) -> Self {
        let mut results = Self::default();
        for line in out.lines() {
            let Some((name, outcome)) = line.split_once(' ').map(|(name, rest)| (name, rest.trim())) else { continue };
            let set = match outcome {
                "ok" => &mut results.passed,
                "skipped" => &mut results.skipped,
                "FAILED" => &mut results.failed,
                _ => continue,
            };
            set.insert(name.to_owned());
        }
        let total = results.passed.len() + results.skipped.len() + results.failed.len();
        let least = if remount { REMOUNTING_MIN } else { CASES_MIN };
        assert!(total >= least, "the suite did not come to its end:\n{out}\n{err}");
        // What a case that failed has to say stands below its name, behind a tab.
        let mut said_of_failed = false;
        for line in out.lines() {
            said_of_failed = line.ends_with("FAILED") || (said_of_failed && line.starts_with('\t'));
            if said_of_failed {
                println!("{line}");
            }
        }
        results
    }

    /// Has what is known to be lost now and then run again, alone, by `passes`: it must pass in one of a few tries.
    pub fn run_racing_again(&mut self, mut passes: impl FnMut(&str) -> bool) {
        for (name, why) in RACING {
            if self.failed.contains(*name) && (0..TRIES).any(|_| passes(name)) {
                println!("{name} failed, and passed when it was run again: {why}");
                self.failed.remove(*name);
                self.passed.insert((*name).to_owned());
            }
        }
    }

    /// What was skipped apart from the cases that remount.
    pub fn skipped_for_good(&self) -> BTreeSet<String> {
        self.skipped.iter().filter(|name| !name.contains(REMOUNTING)).cloned().collect()
    }
}

/// The names of a table of known cases.
pub fn names(table: &[(&str, &str)]) -> BTreeSet<String> {
    table.iter().map(|(name, _)| (*name).to_owned()).collect()
}
