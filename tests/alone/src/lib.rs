//! Tests that run in a separate process.
//!
//! The integration tests of a crate are one program, and its tests run concurrently. A test that changes the state of
//! the whole process (limits, the log's subscriber), or measures it (descriptors, threads, memory), runs in a separate
//! process:
//!
//! ```no_run
//! #[test]
//! fn memory_is_bounded() {
//!     if !ferry_alone::in_own_process() {
//!         return;
//!     }
//!     // ...
//! }
//! ```

use std::process::Command;

use rustix::fs::Mode;
use rustix::thread::UnshareFlags;

/// The test that a process was started for.
const TEST: &str = "FERRY_TEST_IN_OWN_PROCESS";

/// Returns whether this process was started for the calling test. If it was not, runs the test in a new process of the same program
/// and returns when that has passed.
///
/// # Panics
///
/// If the test fails in its own process, or the calling thread is not the one that the harness started for the test.
#[must_use]
pub fn in_own_process() -> bool {
    let thread = std::thread::current();
    // The harness names threads after tests.
    let test = thread.name().expect("the harness names the threads of tests");
    if std::env::var_os(TEST).is_some_and(|started_for| started_for == test) {
        return true;
    }
    let program = std::env::current_exe().expect("a process has a program");
    let output = Command::new(program)
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(TEST, test)
        .output()
        .expect("the test's own program can be started");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    print!("{out}");
    eprint!("{err}");
    assert!(output.status.success() && out.contains("1 passed"), "{test} fails in its own process: {}", output.status);
    false
}

/// Gives the calling thread, and threads that it starts later, a separate umask of 0.
///
/// # Panics
///
/// If the kernel refuses that, which it does for no user.
pub fn clear_umask() {
    // SAFETY: `FS` makes the root, the working directory and the umask this thread's own. No descriptor and no memory changes.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }.expect("a thread may have a umask of its own");
    rustix::process::umask(Mode::empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set when [`the_outcome_is_that_of_another_process`] must fail in its own process.
    const FAILS: &str = "FERRY_TEST_FAILS";

    #[test]
    fn the_outcome_is_that_of_another_process() {
        if in_own_process() {
            assert!(std::env::var_os(FAILS).is_none(), "as it is told to");
            return;
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tests::the_outcome_is_that_of_another_process"]).env(FAILS, "1");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("fails in its own process"), "{said}");
    }

    fn umask() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap().trim().to_owned()
    }

    #[test]
    fn a_cleared_umask_is_the_threads_own() {
        let before = umask();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                clear_umask();
                assert_eq!(umask(), "0000");
                assert_eq!(std::thread::scope(|scope| scope.spawn(umask).join().unwrap()), "0000");
            });
        });
        assert_eq!(umask(), before);
    }
}
