//! The background process of a mount.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Starts this program again, with this command line and without a terminal, and waits until it has mounted or failed.
pub fn start(line: &[OsString], json: bool) -> Result<u8> {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferry").args(line.get(1..).unwrap_or_default());
    ferry_isolation::inherit_only(&mut command, descriptors_in(line));
    // Until the mount exists, errors and warnings go to this process's standard error.
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start the background server")?;
    let stdout = child.stdout.take().expect("it is piped");
    let mut ready = String::new();
    BufReader::new(stdout).read_line(&mut ready).context("cannot read the report of the background server")?;
    if ready.is_empty() {
        let status = child.wait().context("cannot wait for the background server")?;
        if let Some(signal) = status.signal() {
            bail!("the background server was ended by signal {signal}");
        }
        return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX));
    }
    if json {
        std::io::stdout().write_all(ready.as_bytes()).context("cannot write to standard output")?;
    }
    Ok(0)
}

/// Returns the descriptors that paths of a command line name, as a shell writes them for `<(command)`: `/dev/fd/63`.
fn descriptors_in(line: &[OsString]) -> Vec<RawFd> {
    let of_word = |word: &OsString| {
        let word = word.to_string_lossy();
        let numbers = word.split("/fd/").skip(1).map(|rest| {
            let end = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
            rest[..end].parse().ok()
        });
        numbers.flatten().collect::<Vec<_>>()
    };
    line.iter().flat_map(of_word).collect()
}

/// What a background process leaves once the mount exists.
///
/// Not before: automount(8) waits for the mount, and its kernel lets only processes of its own group reach the mount point.
pub struct Terminal {
    /// For standard output and error. They are opened before anything is mounted: a failure must precede the report of success.
    nulls: [File; 2],
}

impl Terminal {
    pub fn new() -> Result<Self> {
        let null = || OpenOptions::new().read(true).write(true).open("/dev/null").context("cannot open /dev/null");
        Ok(Self { nulls: [null()?, null()?] })
    }

    /// Leaves the session, announces the mount, and closes what was inherited from the terminal.
    pub fn leave(self, announce: impl FnOnce() -> Result<()>, log: Option<File>) -> Result<()> {
        // A new session gets no signals of the terminal.
        rustix::process::setsid().context("cannot leave the terminal")?;
        announce()?;
        let [out, error] = &self.nulls;
        rustix::stdio::dup2_stdout(out).context("cannot replace standard output")?;
        rustix::stdio::dup2_stderr(log.as_ref().unwrap_or(error)).context("cannot replace standard error")?;
        // The start directory can then be unmounted.
        std::env::set_current_dir("/").context("cannot enter /")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_the_command_line_names_are_found() {
        let line = ["ferry", "mount", "-o", "ro,client-key=/dev/fd/63", "--server-ca=/proc/self/fd/7", "/fd/x", "/fd/"];
        assert_eq!(descriptors_in(&line.map(OsString::from)), [63, 7]);
    }
}
