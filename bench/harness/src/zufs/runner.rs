//! Runs the steps: all systems of a step in turn, so that what changes on the machine changes for all.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ferry_guest::Cache;

use super::commands::{self, Programs};
use super::fio::{self, Job, Length};
use super::guest::{self, NvdimmGuest};
use super::load::{self, Loads, Sample};
use super::rows::{Step, THREADS, Work};
use super::systems::System;
use super::{TABLE, costs};
use crate::line::{FERRY, Line};
use crate::mounted::Mounted;
use crate::stats::{self, Better};
use crate::time_limit::TimeLimit;

/// Threads of the write rows whose costs are counted: the least and the most.
const COUNTED: [usize; 2] = [THREADS[0], THREADS[THREADS.len() - 1]];

/// How long each thing takes.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each system.
    pub runs: usize,
    /// Time of one fio run.
    pub fio: Duration,
    /// The same in the guest.
    pub guest_fio: Duration,
    /// Files that each thread of the load on names makes.
    pub files: usize,
    /// Requests of each thread of a counting run.
    pub count_requests: u64,
    /// How long a load may take beside its own time.
    pub timeout: Duration,
    /// When no further step begins.
    pub limit: Option<TimeLimit>,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self {
        runs: 5,
        fio: Duration::from_millis(700),
        guest_fio: Duration::from_millis(1000),
        files: 4000,
        count_requests: 10_000,
        timeout: Duration::from_secs(20),
        limit: None,
    };
    /// The quick one: under five minutes, whatever happens.
    pub const QUICK: Self = Self {
        runs: 3,
        fio: Duration::from_millis(350),
        guest_fio: Duration::from_millis(500),
        files: 2000,
        count_requests: 3000,
        timeout: Duration::from_secs(10),
        limit: Some(TimeLimit::Quick(Duration::from_secs(230))),
    };
}

/// The samples of a step, by the load's name of the figure and by system.
type Samples = BTreeMap<(String, System), Vec<Sample>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    cache: Cache,
    programs: Programs,
    loads: Loads,
    mkfs: Option<PathBuf>,
    directory: PathBuf,
    effort: Effort,
    started: Instant,
    mounted: BTreeMap<System, Mounted>,
    guest: Option<Result<NvdimmGuest, String>>,
    /// Systems that failed, on this host (`false`) and in the guest, and why.
    out: BTreeMap<(bool, System), String>,
}

impl Runner {
    /// A runner; systems are mounted when they are first needed.
    pub fn new(
        cache: Cache,
        programs: Programs,
        loads: Loads,
        mkfs: Option<PathBuf>,
        directory: PathBuf,
        effort: Effort,
    ) -> Self {
        Self {
            cache,
            programs,
            loads,
            mkfs,
            directory,
            effort,
            started: Instant::now(),
            mounted: BTreeMap::new(),
            guest: None,
            out: BTreeMap::new(),
        }
    }

    /// The kernel of the guest, if one ran.
    pub fn guest_kernel(&self) -> Option<&str> {
        self.guest.as_ref()?.as_ref().ok().map(|guest| guest.kernel.as_str())
    }

    /// Runs a step, and makes a line of each of its rows for each of our configurations.
    pub fn run(&mut self, step: Step, systems: &[System]) -> Vec<Line> {
        let late = self.effort.limit.filter(|limit| limit.is_over(self.started));
        let in_guest = step.work == Work::Guest;
        if in_guest {
            // The guest is emulated: servers that nobody uses are not to take its time.
            self.mounted.clear();
        }
        let mut samples = Samples::new();
        for _ in 0..if late.is_some() { 0 } else { self.effort.runs } {
            for &system in systems {
                if self.out.contains_key(&(in_guest, system)) {
                    continue;
                }
                match self.sample(step, system) {
                    Ok(found) => found
                        .into_iter()
                        .for_each(|(figure, sample)| samples.entry((figure, system)).or_default().push(sample)),
                    Err(error) => self.give_up(in_guest, system, &error),
                }
            }
        }
        let mut lines = Vec::new();
        for (figure, row) in step.rows() {
            for &ours in systems.iter().filter(|system| system.is_ours()) {
                let mut line = line(step, figure, &row, ours, systems, &samples);
                if let Some(limit) = late {
                    limit.tell(&mut line);
                }
                self.explain(in_guest, ours, systems, &mut line);
                lines.push(line);
            }
        }
        if step.work == Work::Write && COUNTED.contains(&step.threads) && late.is_none() {
            self.count(step, systems, &mut lines);
        }
        lines
    }

    /// A system that failed once is left alone, or each of its runs would wait for its time to end.
    fn give_up(&mut self, in_guest: bool, system: System, error: &anyhow::Error) {
        let mut reason = format!("{}: {error:#}", system.full_name());
        if let Some(mounted) = self.mounted.remove(&system) {
            reason.push_str(&format!("; its server said last: {}", mounted.last_words()));
        }
        self.out.insert((in_guest, system), reason);
    }

    fn explain(&self, in_guest: bool, ours: System, systems: &[System], line: &mut Line) {
        if let Some(reason) = self.out.get(&(in_guest, ours)) {
            line.fail(reason);
        }
        for &peer in systems.iter().filter(|peer| ours.calls(**peer).is_some()) {
            if let Some(reason) = self.out.get(&(in_guest, peer)) {
                line.skip(reason);
            }
        }
    }

    fn sample(&mut self, step: Step, system: System) -> Result<Vec<(String, Sample)>> {
        if step.work == Work::Guest {
            let job = self.job(step);
            let found = self.guest(system)?.fio(system, job)?;
            return Ok(vec![("write".into(), Sample { rate: found.iops, found: Some(found) })]);
        }
        let job = self.job(step);
        let dir = self.mount(system)?.dir().to_owned();
        if step.is_data() {
            let output = self.loads.run(self.loads.fio(job, &dir), self.effort.timeout + self.effort.fio)?;
            let found = fio::parse(job, &output)?;
            let figure = if job.write { "write" } else { "read" };
            return Ok(vec![(figure.into(), Sample { rate: found.iops, found: Some(found) })]);
        }
        let output = self.loads.run(self.loads.names(&dir, step.threads, self.effort.files), self.effort.timeout)?;
        let rates = load::parse_names(&output)?;
        Ok(rates.into_iter().map(|(figure, rate)| (figure, Sample { rate, found: None })).collect())
    }

    fn job(&self, step: Step) -> Job {
        let (file_mib, time) = match step.work {
            Work::Guest => (guest::FILE_MIB, self.effort.guest_fio),
            _ => (fio::FILE_MIB, self.effort.fio),
        };
        Job { write: step.work != Work::Read, threads: step.threads, file_mib, length: Length::Time(time) }
    }

    fn mount(&mut self, system: System) -> Result<&Mounted> {
        // Entered before it is asked for, as a fallible start does not fit the map's own way.
        if !self.mounted.contains_key(&system) {
            let mounted = commands::mount(system, &self.programs, &self.directory)?;
            if system.keeps_data() {
                load::fill(mounted.dir(), THREADS.len(), fio::FILE_MIB)?;
            }
            self.mounted.insert(system, mounted);
        }
        self.mounted.get(&system).context("the system was just mounted")
    }

    /// The guest with the system mounted in it.
    fn guest(&mut self, system: System) -> Result<&mut NvdimmGuest> {
        if self.guest.is_none() {
            let mkfs = self.mkfs.clone().context("there is no mkfs.xfs");
            let booted = mkfs.and_then(|mkfs| {
                NvdimmGuest::boot(&self.cache, &self.programs, &self.loads.fio, &mkfs, &self.directory)
            });
            self.guest = Some(booted.map_err(|error| format!("{error:#}")));
        }
        match self.guest.as_mut().context("the guest was just booted")? {
            Ok(guest) => {
                guest.mount(system)?;
                Ok(guest)
            }
            Err(reason) => Err(anyhow!("no guest: {reason}")),
        }
    }

    /// What noise does not touch, in runs of their own. A count that fails leaves the figures as they are.
    fn count(&mut self, step: Step, systems: &[System], lines: &mut [Line]) {
        let job = self.job(step);
        for &system in systems {
            let Some(mounted) = self.mounted.get(&system) else { continue };
            let counted = costs::count(system, mounted, &self.loads, job, self.effort.count_requests);
            let (name, of): (_, &dyn Fn(&Line) -> bool) = match system.is_ours() {
                true => (FERRY.to_owned(), &|line: &Line| line.config == system.name()),
                // A peer's costs stand in one line only: the first that it is compared with.
                false => (system.full_name(), &|_| true),
            };
            let Some(line) = lines.iter_mut().find(|line| of(line)) else { continue };
            match counted {
                Ok(costs) => {
                    line.costs.insert(name, costs);
                }
                Err(error) => line.fail(&format!("{}: counting: {error:#}", system.full_name())),
            }
        }
    }
}

/// Something that fio found beside the rate, and what it is called.
type Beside = (&'static str, fn(&fio::Found) -> f64);

/// The line of one of our configurations.
fn line(step: Step, figure: &str, row: &str, ours: System, systems: &[System], samples: &Samples) -> Line {
    let mut line = Line::new(TABLE, row.to_owned(), ours.name(), step.unit(), Better::Higher);
    line.note = step.note().map(str::to_owned);
    let named = |system: System| if system == ours { Some(FERRY.to_owned()) } else { ours.calls(system) };
    let of = |system: System| Some((named(system)?, samples.get(&(figure.to_owned(), system))?));
    let rates = systems.iter().filter_map(|&system| of(system));
    line.fill(&rates.map(|(name, samples)| (name, samples.iter().map(|sample| sample.rate).collect())).collect());
    let beside: [Beside; 2] = [("kib_s", |found| found.kib_s), ("latency_us", |found| found.latency_us)];
    for (name, pick) in beside {
        let medians = systems.iter().filter_map(|&system| {
            let (peer, samples) = of(system)?;
            let values: Vec<f64> = samples.iter().filter_map(|sample| sample.found.as_ref().map(pick)).collect();
            Some((peer, stats::round(stats::median(&values)?)))
        });
        let medians: BTreeMap<String, f64> = medians.collect();
        if !medians.is_empty() {
            line.also.insert(name.into(), medians);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zufs::fio::Found;
    use crate::zufs::systems::{DATA, Files, Flavour, Way};

    #[test]
    fn a_line_has_its_peers_and_findings() {
        let found = |iops: f64| Found { iops, kib_s: iops * 4.0, latency_us: 1e6 / iops, requests: 1.0, switches: 0.0 };
        let sample = |iops: f64| Sample { rate: iops, found: Some(found(iops)) };
        let ours = System::Ferry(Files::Null, Way::Uring);
        let samples: Samples = [
            (("write".to_owned(), ours), vec![sample(200_000.0), sample(210_000.0), sample(100_000.0)]),
            (("write".to_owned(), System::Libfuse(Files::Null, Flavour::Plain)), vec![sample(50_000.0)]),
            (("write".to_owned(), System::Libfuse(Files::Mem, Flavour::Plain)), vec![sample(1.0)]),
        ]
        .into();
        let step = Step { work: Work::Write, threads: 1, quick: true };
        let line = line(step, "write", "threads 1", ours, &DATA, &samples);
        assert_eq!((line.ferry, line.ratio["libfuse"]), (Some(200_000.0), 4.0));
        assert_eq!(line.also["latency_us"], [("ferry".into(), 5.0), ("libfuse".into(), 20.0)].into());
        assert_eq!((line.config.as_str(), line.peers.len()), ("null uring", 1));
    }
}
