//! What `/proc` says of servers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ferry_driver::measure::Snapshot;

/// Figures of a process's status, in KiB, all of the same moment.
pub fn kib<const COUNT: usize>(pid: u32, names: [&str; COUNT]) -> Result<[f64; COUNT]> {
    figures(&format!("/proc/{pid}/status"), names)
}

fn figures<const COUNT: usize>(path: &str, names: [&str; COUNT]) -> Result<[f64; COUNT]> {
    let status = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let mut figures = [0.0; COUNT];
    for (name, figure) in names.into_iter().zip(&mut figures) {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok());
        *figure = value.with_context(|| format!("no {name} in {path}"))?;
    }
    Ok(figures)
}

/// A process and all that it started, with what these started: a server that confines itself is several processes.
#[derive(Debug, Clone)]
pub struct Family(Vec<u32>);

impl Family {
    /// Of a process that was started.
    pub fn of(started: u32) -> Self {
        let mut found = vec![started];
        let mut next = 0;
        while let Some(pid) = found.get(next) {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
            let children: Vec<u32> = children
                .flat_map(|list| list.split(' ').filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
                .collect();
            found.extend(children);
            next += 1;
        }
        Self(found)
    }

    /// Whether none of them is there any more.
    pub fn has_ended(&self) -> bool {
        self.0.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    }

    fn sum(&self, figure: impl Fn(u32) -> Result<f64>) -> Result<f64> {
        self.0.iter().map(|pid| figure(*pid)).sum()
    }

    /// Figures of the status of all of them, in KiB: the sums.
    pub fn kib<const COUNT: usize>(&self, names: [&str; COUNT]) -> Result<[f64; COUNT]> {
        let mut sums = [0.0; COUNT];
        for pid in &self.0 {
            for (sum, figure) in sums.iter_mut().zip(kib(*pid, names)?) {
                *sum += figure;
            }
        }
        Ok(sums)
    }

    /// Open descriptors.
    #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    pub fn descriptors(&self) -> Result<f64> {
        self.sum(|pid| Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64))
    }

    /// Resident memory and what of it no other process has, in KiB.
    pub fn memory_kib(&self) -> Result<[f64; 2]> {
        let names = ["Rss:", "Private_Clean:", "Private_Dirty:"];
        let each = self.0.iter().map(|pid| figures(&format!("/proc/{pid}/smaps_rollup"), names));
        let each = each.collect::<Result<Vec<_>>>()?;
        let sum = each.iter().fold([0.0; 2], |sum, [rss, clean, dirty]| [sum[0] + rss, sum[1] + clean + dirty]);
        Ok(sum)
    }

    /// Page faults up to now that read nothing from a disk.
    pub fn faults(&self) -> Result<f64> {
        self.sum(|pid| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
            minor_faults(&stat).with_context(|| format!("no page faults in the status of process {pid}"))
        })
    }

    /// Threads.
    #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
    pub fn threads(&self) -> Result<f64> {
        self.sum(|pid| Ok(std::fs::read_dir(format!("/proc/{pid}/task"))?.count() as f64))
    }

    /// How often threads have gone to sleep up to now, and the CPU time that they took, process by process.
    pub fn usage(&self) -> Result<Usage> {
        Ok(Usage(self.0.iter().map(|pid| anyhow::Ok((*pid, Snapshot::take(*pid)?))).collect::<Result<_>>()?))
    }

    /// The program of this name that one of them runs.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let maps = self.0.iter().filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/maps")).ok());
        let paths = maps.flat_map(|maps| maps.lines().filter_map(mapped_file).collect::<Vec<_>>());
        let program = paths.into_iter().find(|path| path.file_name().is_some_and(|found| found == name));
        program.with_context(|| format!("no process has mapped a program {name}"))
    }
}

/// The figures of some processes up to a moment.
#[derive(Debug)]
pub struct Usage(Vec<(u32, Snapshot)>);

impl Usage {
    /// How often threads went to sleep since then, and the seconds of CPU time.
    pub fn since(&self) -> Result<(u64, f64)> {
        let mut sum = (0, 0.0);
        for (pid, before) in &self.0 {
            let used = Snapshot::take(*pid)?.since(before);
            sum = (sum.0 + used.voluntary_switches, sum.1 + used.cpu_seconds);
        }
        Ok(sum)
    }
}

/// Out of `/proc/PID/stat`, whose second field may hold anything.
fn minor_faults(stat: &str) -> Option<f64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
}

/// The file of a line of `/proc/PID/maps`.
fn mapped_file(line: &str) -> Option<PathBuf> {
    Some(PathBuf::from(&line[line.find('/')?..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_status() {
        let me = std::process::id();
        let [now, most] = kib(me, ["VmRSS:", "VmHWM:"]).unwrap();
        assert!(now > 100.0 && most >= now, "{now} {most}");
        assert!(kib(me, ["VmNothing:"]).is_err());
    }

    #[test]
    fn a_family_has_figures() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let both = Family::of(std::process::id());
        let one = Family::of(child.id());
        assert!(both.0.contains(&child.id()) && one.0 == [child.id()], "{both:?} {one:?}");
        let [rss, private] = both.memory_kib().unwrap();
        assert!(rss > private && private > 0.0 && both.threads().unwrap() > one.threads().unwrap());
        assert!(both.faults().unwrap() > one.faults().unwrap());
        let [status] = both.kib(["VmRSS:"]).unwrap();
        assert!(status > one.kib(["VmRSS:"]).unwrap()[0] && both.descriptors().unwrap() > one.descriptors().unwrap());
        assert!(one.usage().unwrap().since().is_ok());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(one.has_ended() && !both.has_ended());
    }

    #[test]
    fn programs_may_have_any_name() {
        assert_eq!(minor_faults("7 (a ) b) S 1 7 7 0 -1 4194560 321 0 0 0 12"), Some(321.0));
        assert_eq!(mapped_file("00-ff r-xp 00 fe:00 5      /a b/ferry"), Some("/a b/ferry".into()));
        assert_eq!(mapped_file("00-ff rw-p 00 00:00 0"), None);
    }
}
