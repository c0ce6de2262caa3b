//! One run of a load, on this host or in the guest: its command, and what it found.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::fio::{self, Found, Job};

/// How often it is looked whether a program has ended: short beside a run.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);
/// How long a program that was killed may take to go; longer, and it waits for a server that does not answer.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// The end of a program's complaint that an error shows.
const LAST_WORDS_BYTES: usize = 300;

/// One figure of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// How many per second.
    pub rate: f64,
    /// Bandwidth and latency, where fio measured.
    pub found: Option<Found>,
}

/// The programs that make load.
#[derive(Debug, Clone)]
pub struct Loads {
    /// fio.
    pub fio: PathBuf,
    /// Ours, for names.
    pub names: PathBuf,
    /// For outputs.
    pub folder: PathBuf,
}

impl Loads {
    /// fio's command for a job.
    pub fn fio(&self, job: Job, dir: &Path) -> Command {
        let mut command = Command::new(&self.fio);
        // fio leaves files in its directory.
        command.args(fio::arguments(job, dir)).current_dir(&self.folder);
        command
    }

    /// The command for work on names.
    pub fn names(&self, dir: &Path, threads: usize, files: usize) -> Command {
        let mut command = Command::new(&self.names);
        command.arg(dir).args(["--threads", &threads.to_string(), "--files", &files.to_string()]);
        command
    }

    /// Runs a command and takes what it prints on standard output.
    ///
    /// A program that waits for a server cannot even be killed, so this gives up on it: it goes when its server does.
    pub fn run(&self, mut command: Command, timeout: Duration) -> Result<String> {
        let (output, complaint) = (self.folder.join("load.out"), self.folder.join("load.err"));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(File::create(&output)?)
            .stderr(File::create(&complaint)?)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let mut deadline = Instant::now() + timeout;
        let mut late = false;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if Instant::now() > deadline {
                if late {
                    break None;
                }
                child.kill()?;
                late = true;
                deadline = Instant::now() + KILL_TIMEOUT;
            }
            std::thread::sleep(LOOK_INTERVAL);
        };
        ensure!(!late, "it did not end within {} s", timeout.as_secs());
        let status = status.context("it ended, but without a status")?;
        let text = std::fs::read_to_string(&output).unwrap_or_default();
        ensure!(status.success(), "{status}: {}", last_words(&complaint, &text));
        Ok(text)
    }
}

/// What a program that failed has to say: fio says it on either output.
fn last_words(complaint: &Path, output: &str) -> String {
    let text = std::fs::read_to_string(complaint).ok().filter(|text| !text.trim().is_empty());
    let text = text.unwrap_or_else(|| output.to_owned());
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skip = words.chars().count().saturating_sub(LAST_WORDS_BYTES);
    words.chars().skip(skip).collect()
}

/// Reads what the load on names prints.
pub fn parse_names(output: &str) -> Result<BTreeMap<String, f64>> {
    serde_json::from_str(output.trim()).context("the load on names printed no JSON")
}

/// Fills the files that a job works on, so that it measures overwriting.
pub fn fill(dir: &Path, files: usize, file_mib: u64) -> Result<()> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let chunk = vec![0x5a; usize::try_from(CHUNK_BYTES)?];
    for number in 0..files {
        let path = dir.join(fio::file_name(number));
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        for index in 0..file_mib {
            let written = file.write_all_at(&chunk, index * CHUNK_BYTES);
            written.with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(folder: &Path) -> Loads {
        Loads { fio: "fio".into(), names: "names".into(), folder: folder.into() }
    }

    fn shell(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_program_that_fails_or_hangs_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let loads = loads(dir.path());
        let second = Duration::from_secs(1);
        assert_eq!(loads.run(shell("echo out; echo err >&2"), second).unwrap(), "out\n");
        let error = loads.run(shell("echo out; echo why >&2; exit 3"), second).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.ends_with("why"), "{error}");
        let error = loads.run(shell("exec sleep 60"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("did not end"), "{error}");
    }

    #[test]
    fn reads_rates() {
        assert_eq!(parse_names("{\"create\": 12.5}\n").unwrap()["create"], 12.5);
        assert!(parse_names("").is_err());
    }

    #[test]
    fn fills_files() {
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), 2, 1).unwrap();
        assert_eq!(std::fs::metadata(dir.path().join("fio.1")).unwrap().len(), 1 << 20);
    }
}
