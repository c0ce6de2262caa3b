//! Programs that run to their end, within a time.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How long a program that was killed may take to go; longer, and it waits for a server that does not answer.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// The end of a program's complaint that an error shows.
const LAST_WORDS_BYTES: usize = 300;

/// Runs a command and takes what it prints on standard output; its outputs lie in `directory`.
///
/// A program that waits for a server cannot even be killed, so this gives up on it: it goes when its server does.
pub fn run(mut command: Command, directory: &Path, timeout: Duration) -> Result<String> {
    let (output, complaint) = (directory.join("load.out"), directory.join("load.err"));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(File::create(&output)?)
        .stderr(File::create(&complaint)?)
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let status = wait(&mut child, timeout)?;
    if status.is_none() {
        child.kill()?;
        wait(&mut child, KILL_TIMEOUT)?;
    }
    let status = status.with_context(|| format!("it did not end within {} s", timeout.as_secs()))?;
    let text = std::fs::read_to_string(&output).unwrap_or_default();
    ensure!(status.success(), "{status}: {}", last_words(&complaint, &text));
    Ok(text)
}

/// Waits for the end of a program; none where the time is over. The kernel wakes this at once, so that callers can time
/// programs of some milliseconds.
fn wait(child: &mut Child, timeout: Duration) -> Result<Option<ExitStatus>> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).context("cannot wait for a program")?;
    let deadline = Instant::now() + timeout;
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now()))?;
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(child.wait()?)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for a program"),
        }
    }
}

/// Empties the kernel's caches.
pub fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("cannot empty the kernel's caches, which root can")
}

/// What a program that failed has to say: fio says it on either output.
fn last_words(complaint: &Path, output: &str) -> String {
    let text = std::fs::read_to_string(complaint).ok().filter(|text| !text.trim().is_empty());
    let text = text.unwrap_or_else(|| output.to_owned());
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skip = words.chars().count().saturating_sub(LAST_WORDS_BYTES);
    words.chars().skip(skip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(10);
        assert_eq!(run(shell("echo out; echo err >&2"), dir.path(), second).unwrap(), "out\n");
        let error = run(shell("echo out; echo why >&2; exit 3"), dir.path(), second).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("why"), "{error}");
        let error = run(shell("exec sleep 60"), dir.path(), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("did not end"), "{error}");
        let mut child = shell("exit 3").spawn().unwrap();
        assert_eq!(wait(&mut child, second).unwrap().and_then(|status| status.code()), Some(3));
    }
}
