//! A guest that runs one command after another.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, PipeWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ferry_guest::{Cache, Device, DeviceKind, Guest, Input, Mount, Output, Running};

use crate::server::TAG;

/// Where the share is in the guest.
const MOUNT_POINT: &str = "/mnt/share";

/// How long the command loop may take until it reads, in a guest that is emulated, too.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether the server still runs.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// How the line that ends a command's output begins.
const END: &str = "@@ferry-bench";

/// Reads lines and runs each. It measures without starting a process; waiting for the next line costs nothing.
const LOOP: &str = r#"
echo "@@ferry-bench 0 0 0"
while IFS= read -r line; do
    start=$EPOCHREALTIME
    eval "$line" </dev/null >/run/bench.out 2>&1
    status=$? end=$EPOCHREALTIME
    cat /run/bench.out
    printf '\n@@ferry-bench %s %s %s\n' "$status" "$start" "$end"
done
"#;

/// What a command did.
#[derive(Debug)]
pub struct Done {
    /// What it printed.
    pub output: String,
    /// How long it took by the guest's clock.
    pub elapsed: Duration,
}

/// The guest.
#[derive(Debug)]
pub struct Agent {
    stdin: PipeWriter,
    stdout: BufReader<UnixStream>,
    _running: Running,
}

/// The guest's memory: twice what the four files of the multi jobs take, or else the mmap jobs measure how the guest's
/// kernel reclaims pages.
const GUEST_MIB: u32 = 1024;

impl Agent {
    /// Boots a guest on one CPU of the host and mounts its device: a share, or a disk with ext4.
    pub fn boot(cache: &Cache, device: Device, host_cpu: usize, log: &Path) -> Result<Self> {
        let mut guest = Guest::new(cache.clone(), [""; 0]);
        guest.host_cpu = Some(host_cpu);
        guest.memory_mib = GUEST_MIB;
        let mut mount = Mount::virtiofs(TAG, MOUNT_POINT);
        if device.kind == DeviceKind::Block {
            (mount.fstype, mount.source) = ("ext4".into(), "/dev/vda".into());
        }
        (guest.devices, guest.mounts) = (vec![device], vec![mount]);
        guest.cwd = MOUNT_POINT.into();
        Self::start(guest, log)
    }

    /// Boots any guest that has bash. What its commands say on standard error goes to `log`.
    pub fn start(mut guest: Guest, log: &Path) -> Result<Self> {
        guest.command = ["bash", "-c", LOOP].map(Into::into).to_vec();
        guest.env = vec![("LC_ALL".into(), "C".into())];
        guest.stdin = Input::Piped;
        guest.stdout = Output::Piped;
        guest.stderr = Output::File(File::create(log).with_context(|| format!("cannot create {}", log.display()))?);
        let mut running = guest.spawn()?;
        let stdin = running.stdin.take().context("the guest has no standard input")?;
        let stdout = running.stdout.take().context("the guest has no standard output")?;
        let mut agent = Self { stdin, stdout: BufReader::new(stdout), _running: running };
        agent.collect(START_TIMEOUT, &mut || true).context("the guest's command loop does not start")?;
        Ok(agent)
    }

    /// Runs one line of shell in the share. An error is a command that failed, or a guest that did not answer; the
    /// guest is of no use after the latter. It stops waiting when its server is not `alive`.
    pub fn run(&mut self, line: &str, timeout: Duration, alive: &mut dyn FnMut() -> bool) -> Result<Done> {
        debug_assert!(!line.contains('\n'), "a command is one line");
        self.stdin.write_all(format!("{line}\n").as_bytes()).context("the guest has gone")?;
        let (status, done) = self.collect(timeout, alive)?;
        if status != 0 {
            return Err(Failed { status, output: tail(&done.output) }.into());
        }
        Ok(done)
    }

    fn collect(&mut self, timeout: Duration, alive: &mut dyn FnMut() -> bool) -> Result<(i32, Done)> {
        let deadline = Instant::now() + timeout;
        let mut output = Vec::new();
        let mut begin = 0;
        self.stdout.get_ref().set_read_timeout(Some(LOOK_INTERVAL))?;
        loop {
            // What came before the time ran out stays in `output`.
            match self.stdout.read_until(b'\n', &mut output) {
                Ok(0) => bail!("the guest has gone; it said: {}", tail(&String::from_utf8_lossy(&output))),
                Ok(_) => {
                    if let Some((status, elapsed)) = parse_end(&String::from_utf8_lossy(&output[begin..])) {
                        output.truncate(begin);
                        return Ok((status, Done { output: String::from_utf8_lossy(&output).into_owned(), elapsed }));
                    }
                    begin = output.len();
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    ensure!(alive(), "the guest waits for a server that is gone");
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the guest's output cannot be read"),
            }
            ensure!(Instant::now() < deadline, "the guest did not answer within {} s", timeout.as_secs());
        }
    }
}

/// A command of the guest's that ended with a status other than 0.
#[derive(Debug)]
pub struct Failed {
    status: i32,
    output: String,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "status {}: {}", self.status, self.output)
    }
}

impl std::error::Error for Failed {}

/// Reads `@@ferry-bench STATUS START END`, the times in seconds.
fn parse_end(line: &str) -> Option<(i32, Duration)> {
    let mut words = line.trim().strip_prefix(END)?.split_whitespace();
    let status = words.next()?.parse().ok()?;
    let start: f64 = words.next()?.parse().ok()?;
    let end: f64 = words.next()?.parse().ok()?;
    Some((status, Duration::try_from_secs_f64(end - start).ok()?))
}

/// The end of a text, on one line.
fn tail(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skip = words.chars().count().saturating_sub(300);
    words.chars().skip(skip).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_end_of_a_command() {
        let (status, elapsed) = parse_end("@@ferry-bench 3 1790000000.250000 1790000001.500000\n").unwrap();
        assert_eq!(status, 3);
        assert!((elapsed.as_secs_f64() - 1.25).abs() < 1e-6);
        for other in ["", "@@ferry-bench", "@@ferry-bench x 1 2", "something", "@@ferry-bench 0 2.0 1.0"] {
            assert!(parse_end(other).is_none(), "{other}");
        }
    }

    #[test]
    fn shows_the_end_of_long_output() {
        let long = format!("{}\nend\n", "x ".repeat(500));
        assert!(tail(&long).len() <= 300 && tail(&long).ends_with("x end"));
    }
}
