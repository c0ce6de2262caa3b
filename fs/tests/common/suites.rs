//! Other people's programs that test file systems, on `toyfs`.

use std::ffi::OsString;
use std::path::Path;

use ferry_tests::suites::fsx;
use ferry_tests::suites::pjdfstest::{self, Results, names};
use ferry_tests::{Place, folder};
use tempfile::TempDir;

/// Cases of pjdfstest that toyfs does not pass, and why.
const FAILING: &[(&str, &str)] =
    &[("open::interact_2gb", "writes behind a hole of 2 GiB; a toy has no holes, and 256 MiB in all")];

/// Of its 398 cases, 14 remount, which needs a configuration.
const PASSED_MIN: usize = 380;

/// A command for a shell; there are no blanks in it.
fn line(words: &[OsString]) -> String {
    words.join(" ".as_ref()).into_string().expect("plain names")
}

/// The `pjdfstest` crate's suite: POSIX system calls. The folder is for its configuration.
pub struct Pjdfstest(TempDir);

impl Pjdfstest {
    pub fn new() -> Self {
        Self(folder(Place::Disk))
    }

    /// Runs it on a mount; its status does not matter.
    pub fn script(&self, mountpoint: &str) -> String {
        let config = self.0.path().join("suite.toml");
        line(&pjdfstest::command(&config, mountpoint.as_ref(), Path::new("/dev/shm"), false)) + " || :"
    }

    /// Looks at what it said: all but the known cases pass.
    #[track_caller]
    pub fn check(&self, out: &str) {
        let Results { passed, failed, .. } = Results::parse(out, "", false);
        let failed: Vec<_> = failed.difference(&names(FAILING)).cloned().collect();
        assert!(failed.is_empty(), "other cases fail than are known to: {failed:?}\n{out}");
        assert!(passed.len() >= PASSED_MIN, "too few cases pass:\n{out}");
        println!("pjdfstest on toyfs: {} passed", passed.len());
    }
}

/// The `fsx` crate: random reads, writes, maps, truncations, holes and copies, all of them verified.
pub struct Fsx(TempDir);

impl Fsx {
    pub fn new() -> Self {
        Self(folder(Place::Disk))
    }

    /// Runs it in the working directory.
    pub fn script(&self, seed: u32) -> String {
        line(&fsx::command(&self.0.path().join("suite.toml"), Path::new("file"), fsx::MIXED, 3000, seed))
    }
}
