//! Public test suites for file systems, on `toyfs`.

use std::ffi::OsString;
use std::path::Path;

use ferry_tests::suites::fsx;
use ferry_tests::suites::pjdfstest::{self, Results, names};
use ferry_tests::{Place, directory};
use tempfile::TempDir;

/// Cases of pjdfstest that toyfs fails, and why.
const FAILING: &[(&str, &str)] =
    &[("open::interact_2gb", "writes behind a hole of 2 GiB; a toy has no holes, and 256 MiB in all")];

/// Of its 398 cases, 14 remount, which needs a configuration.
const PASSED_MIN: usize = 380;

/// Returns a shell command of words without blanks.
fn line(words: &[OsString]) -> String {
    words.join(" ".as_ref()).into_string().expect("plain names")
}

/// The `pjdfstest` crate's suite of POSIX system calls. The directory holds its configuration.
pub struct Pjdfstest(TempDir);

impl Pjdfstest {
    pub fn new() -> Self {
        Self(directory(Place::Disk))
    }

    /// Runs it on a mount and checks its output: all cases except the known ones pass. `sh` runs a script where the
    /// mount is, and returns its output.
    #[track_caller]
    pub fn check(&self, mountpoint: &str, sh: impl Fn(&str) -> String) {
        let run = |only: &str| {
            let config = self.0.path().join("suite.toml");
            let command = line(&pjdfstest::command(&config, mountpoint.as_ref(), Path::new("/dev/shm"), false));
            sh(&format!("{command} {only} || :"))
        };
        let mut results = Results::parse(&run(""), "", false);
        results.run_racing_again(|name| run(name).lines().any(|line| line.starts_with(name) && line.ends_with(" ok")));
        assert_eq!(results.failed, names(FAILING), "the failing cases differ from the known ones");
        assert!(results.passed.len() >= PASSED_MIN, "too few cases pass: {}", results.passed.len());
        println!("pjdfstest on toyfs: {} passed", results.passed.len());
    }
}

/// The `fsx` crate: random reads, writes, maps, truncations, holes and copies, all verified.
pub struct Fsx(TempDir);

impl Fsx {
    pub fn new() -> Self {
        Self(directory(Place::Disk))
    }

    /// Runs it in the working directory.
    pub fn script(&self, seed: u32) -> String {
        line(&fsx::command(&self.0.path().join("suite.toml"), Path::new("file"), fsx::MIXED, 3000, seed))
    }
}
