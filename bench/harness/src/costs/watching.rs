//! The cost of watching for changes on the host: files are created, changed, renamed and removed on a watched file
//! system.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Size, TABLE};
use crate::line::{FERRY, Line};
use crate::mounted::Mounted;
use crate::stats::{self, Better};

/// How long what is still to be told, or told again, is waited for.
const TELL_TIME: Duration = Duration::from_secs(3);
/// The unit of a process's times (USER_HZ, the same on all architectures that Linux has today but one).
const TICK_MS: f64 = 10.0;

/// The server: Ferry that watches, Ferry that does not, or none.
const WATCHES: [(&str, Option<&str>); 3] =
    [(FERRY, Some("always")), ("not-watching", Some("never")), ("no-server", None)];

/// Where files are changed.
const PLACES: [(&str, &str); 3] = [
    ("watching: changes beside the shared directory", "beside"),
    ("watching: changes in it, on the host", "shared"),
    ("watching: changes through the mount", "mnt"),
];

/// The rows about watching.
#[derive(Debug)]
pub struct Watching<'a> {
    pub work: &'a Path,
    pub ferry: &'a Path,
    pub size: Size,
}

/// Times and the server's CPU times, by who is there.
type Samples = BTreeMap<String, Vec<f64>>;

impl Watching<'_> {
    /// Runs them, with all in turn.
    pub fn run(&self) -> Vec<Line> {
        let mut lines = PLACES.map(|(row, _)| Line::new(TABLE, row.into(), "always", "ms", Better::Lower));
        let mut times: [Samples; PLACES.len()] = Default::default();
        let mut cpu: [Samples; PLACES.len()] = Default::default();
        if let Err(error) = self.measure(&mut times, &mut cpu) {
            lines.iter_mut().for_each(|line| line.fail(&format!("{error:#}")));
        }
        for ((line, times), cpu) in lines.iter_mut().zip(&times).zip(&cpu) {
            line.fill(times);
            let medians = cpu.iter().filter_map(|(who, values)| Some((who.clone(), stats::median(values)?)));
            line.also.insert("server_cpu_ms".into(), medians.collect());
        }
        lines.into()
    }

    fn measure(&self, times: &mut [Samples], cpu: &mut [Samples]) -> Result<()> {
        let directory = self.work.join("watching");
        for (_, place) in PLACES {
            std::fs::create_dir_all(directory.join(place))?;
        }
        // Each is first as often as the others: the file system's journal remembers who was before.
        let turns =
            (0..self.size.runs * WATCHES.len()).map(|turn| WATCHES[(turn + turn / WATCHES.len()) % WATCHES.len()]);
        for (who, watch) in turns {
            let server = watch.map(|watch| self.mount(&directory, watch)).transpose()?;
            for (number, (_, place)) in PLACES.iter().enumerate() {
                if *place == "mnt" && server.is_none() {
                    continue;
                }
                let before = server.as_ref().map(cpu_ms).transpose()?;
                let took = change(&directory.join(place), self.size.changed)?;
                times[number].entry(who.into()).or_default().push(took.as_secs_f64() * 1000.0);
                if let (Some(server), Some(before)) = (&server, before) {
                    std::thread::sleep(TELL_TIME);
                    cpu[number].entry(who.into()).or_default().push(cpu_ms(server)? - before);
                }
            }
        }
        Ok(())
    }

    fn mount(&self, directory: &Path, watch: &str) -> Result<Mounted> {
        let words = ["--log", "error", "mount"].map(OsString::from);
        let mut command = vec![OsString::from(self.ferry)];
        command.extend(words);
        command.extend([directory.join("shared").into(), directory.join("mnt").into()]);
        command.extend(["--foreground", "--cache", "always", "--watch", watch].map(OsString::from));
        Mounted::new(directory.join("mnt"), Some(command))
    }
}

/// Five changes of each of so many files.
fn change(directory: &Path, files: usize) -> Result<Duration> {
    let start = Instant::now();
    let renamed = |number: usize| directory.join(format!("{number}.new"));
    for number in 0..files {
        let path = directory.join(number.to_string());
        std::fs::File::create(&path)?.write_all(&[b'x'; 100])?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&path, renamed(number))?;
    }
    for number in 0..files {
        std::fs::remove_file(renamed(number))?;
    }
    Ok(start.elapsed())
}

/// The CPU time of a server.
fn cpu_ms(server: &Mounted) -> Result<f64> {
    let pid = server.pid().context("it has no server")?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let ticks = ticks(&stat).with_context(|| format!("no times in the status of process {pid}"))?;
    ensure!(ticks >= 0.0, "times below zero");
    Ok(ticks * TICK_MS)
}

/// User's and system's time out of `/proc/PID/stat`, whose second field may hold anything.
fn ticks(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<f64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_times() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 12 30 0 0 20 0 1 0 5 1 2";
        assert_eq!((ticks(stat), ticks("7 (a) S 1"), ticks("")), (Some(42.0), None, None));
    }

    #[test]
    fn changes_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        change(dir.path(), 3).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
