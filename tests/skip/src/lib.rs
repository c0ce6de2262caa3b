//! Reports tests that cannot run here.
//!
//! A test that returns early passes, although it checked nothing. [`skip!`] writes a line to standard error, past the
//! harness, which only shows the output of failed tests. `scripts/test` collects and counts the lines. If the
//! environment variable `CI` is set, a skipped test fails, because a CI machine has everything that the tests need.
//!
//! ```
//! fn mounts_are_listed() {
//!     if !std::path::Path::new("/dev/fuse").exists() {
//!         return ferry_skip::skip!("there is no {}", "/dev/fuse");
//!     }
//!     // ...
//! }
//! ```

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io::Write;

/// The file to which lines are appended, besides standard error.
const FILE: &str = "FERRY_SKIPPED";

/// Reports that the running test is skipped, completely or in part, and why: the arguments are those of [`format!`]. It
/// does not return from the test.
#[macro_export]
macro_rules! skip {
    ($($why:tt)*) => {
        $crate::skipped(::std::format_args!($($why)*))
    };
}

/// What [`skip!`] does.
///
/// # Panics
///
/// If `CI` is set.
#[track_caller]
pub fn skipped(why: fmt::Arguments<'_>) {
    let line = line(&test(), &why.to_string());
    // The macros for output go to the harness, this does not.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os(FILE).filter(|path| !path.is_empty()) {
        let file = File::options().append(true).create(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    assert!(!is_ci(std::env::var_os("CI").as_deref()), "a test must not be skipped in CI: {why}");
}

fn is_ci(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !["", "0", "false"].iter().any(|no| value == *no))
}

/// Returns one line, whatever the reason contains.
fn line(test: &str, why: &str) -> String {
    format!("skipped: {test}: {}\n", why.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns the program and the test. The harness names threads after tests.
fn test() -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy();
    let name = program.rsplit_once('-').map_or(&*program, |(name, _)| name);
    format!("{name}::{}", std::thread::current().name().unwrap_or("(another thread)"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set when [`skips`] must be skipped.
    const SKIPS: &str = "FERRY_TEST_SKIPS";

    #[test]
    #[ignore = "run by the other one"]
    fn skips() {
        if std::env::var_os(SKIPS).is_some() {
            skip!("needs\n{}", "a word");
        }
    }

    fn run(file: &std::path::Path, ci: &str) -> (bool, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::skips", "--ignored"]).env(FILE, file).env("CI", ci).env(SKIPS, "1");
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    }

    #[test]
    fn a_skipped_test_is_named_though_it_passes_and_fails_in_ci() {
        let file = std::env::temp_dir().join(format!("ferry-skip.{}", std::process::id()));
        let expected = "skipped: ferry_skip::tests::skips: needs a word\n";
        assert_eq!(run(&file, ""), (true, expected.into()));
        let (passes, said) = run(&file, "true");
        assert!(!passes && said.contains(expected), "{said}");
        let lines = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(lines, expected.repeat(2));
    }

    #[test]
    fn ci_is_set_or_not() {
        for (value, expected) in [(None, false), (Some(""), false), (Some("false"), false), (Some("true"), true)] {
            assert_eq!(is_ci(value.map(OsStr::new)), expected, "{value:?}");
        }
    }
}
