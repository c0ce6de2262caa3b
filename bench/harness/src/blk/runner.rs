//! Runs the rows: all systems of a row in turn, so that changes of the machine affect all.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ferry_driver::load::{Load, LoadTarget, Op};
use ferry_guest::Cache;

use super::TABLE;
use super::files::Files;
use super::fio::{self, Engine, Sample, USED_MIB};
use super::guest::{BlkGuest, Cpus, Guests, is_guest};
use super::rows::{Client, Step};
use super::systems::{Programs, System, Way, comma_doubled};
use crate::line::{FERRY, Line};
use crate::server::Server;
use crate::stats::{self, Better};
use crate::time_limit::TimeLimit;
use crate::trouble::Failures;
use crate::{native, process};

/// Blocks from one request of qemu-img's to the next where they are to look random: it meets all of a disk's.
const STRIDE_BLOCKS: usize = 5003;
/// Requests of the first run of qemu-img, whose rate is not known yet.
const FIRST_REQUESTS: f64 = 3000.0;

/// How long each thing takes.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each system.
    pub runs: usize,
    /// Time of one run on this host.
    pub native: Duration,
    /// The same in User-mode Linux.
    pub uml: Duration,
    /// The same in QEMU.
    pub qemu: Duration,
    /// Requests of a counting run.
    pub count_requests: u64,
    /// How long a run may take beside its own time.
    pub timeout: Duration,
    /// When no further row begins.
    pub limit: TimeLimit,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self {
        runs: 5,
        native: Duration::from_millis(350),
        uml: Duration::from_millis(500),
        qemu: Duration::from_millis(500),
        count_requests: 6000,
        timeout: Duration::from_secs(20),
        limit: TimeLimit::Full(Duration::from_secs(20 * 60)),
    };
    /// The quick one: under five minutes, whatever happens.
    pub const QUICK: Self = Self {
        runs: 2,
        native: Duration::from_millis(120),
        uml: Duration::from_millis(250),
        qemu: Duration::from_millis(300),
        count_requests: 2000,
        timeout: Duration::from_secs(10),
        limit: TimeLimit::Quick(Duration::from_secs(260)),
    };
}

/// The samples of a row by system.
type Samples = BTreeMap<System, Vec<Sample>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    cache: Cache,
    programs: Programs,
    files: Files,
    /// The CPU of guest and driver; those of servers; all.
    cpus: (usize, String, String),
    effort: Effort,
    started: Instant,
    guests: Guests,
    trouble: Failures<(Client, System)>,
    /// What qemu-img reached last, in requests per second.
    rates: BTreeMap<System, f64>,
}

impl Runner {
    /// A runner; servers are started row by row.
    pub fn new(cache: Cache, programs: Programs, files: Files, cpus: (usize, String), effort: Effort) -> Self {
        let all = format!("{},{}", cpus.0, cpus.1);
        Self {
            cache,
            programs,
            files,
            cpus: (cpus.0, cpus.1, all),
            effort,
            started: Instant::now(),
            guests: Guests::default(),
            trouble: Failures::default(),
            rates: BTreeMap::new(),
        }
    }

    /// The kernels of the guests that ran.
    pub fn guest_kernels(&self) -> String {
        let name = |client: &Client| if *client == Client::Uml { "User-mode Linux" } else { "QEMU (TCG)" };
        let kernels: Vec<String> =
            self.guests.kernels.iter().map(|(client, kernel)| format!("{} {kernel}", name(client))).collect();
        if kernels.is_empty() { "none ran".into() } else { kernels.join(", ") }
    }

    /// Runs a row, and makes a line for each of our configurations.
    pub fn run(&mut self, step: Step, systems: &[System]) -> Vec<Line> {
        let late = self.effort.limit.is_over(self.started);
        let (mut samples, mut servers) = (Samples::new(), BTreeMap::new());
        self.trouble.begin_row();
        if !is_guest(step.client) {
            // A guest that is not needed any more only takes time.
            self.guests.end();
        }
        if step.write {
            self.files.settle();
        }
        for turn in 0..if late { 0 } else { self.effort.runs } {
            let able = systems.iter().copied().filter(|system| self.trouble.is_able((step.client, *system)));
            let able: Vec<System> = able.collect();
            let turn: Vec<(System, Result<Sample>, Duration)> = match is_guest(step.client) {
                true => self.guest_turn(step, systems, &able),
                false => self.turn(step, &able, turn, &mut servers),
            };
            for (system, sample, took) in turn {
                match sample {
                    Ok(sample) => samples.entry(system).or_default().push(sample),
                    Err(error) => {
                        let reason = reason(&error, servers.remove(&system));
                        self.trouble.note((step.client, system), reason, took);
                    }
                }
            }
        }
        self.trouble.end_row(|(client, system)| client == step.client && samples.contains_key(&system));
        let mut lines = Vec::new();
        for &ours in systems.iter().filter(|system| system.is_ours()) {
            let mut line = line(step, ours, systems, &samples);
            if late {
                self.effort.limit.tell(&mut line);
            }
            self.explain(step.client, ours, systems, &mut line);
            lines.push(line);
        }
        if step.is_counted() && !late {
            self.count(step, &servers, &mut lines);
        }
        lines
    }

    /// One run of each able system in a guest that has disks of all, and how long a failure took. All run in one command, where
    /// those that fail do so at once.
    fn guest_turn(
        &mut self,
        step: Step,
        systems: &[System],
        able: &[System],
    ) -> Vec<(System, Result<Sample>, Duration)> {
        if able.is_empty() {
            return Vec::new();
        }
        let runtime = if step.client == Client::Uml { self.effort.uml } else { self.effort.qemu };
        let (cache, programs, files) = (&self.cache, &self.programs, &self.files);
        let cpus = Cpus { guest: self.cpus.0, servers: &self.cpus.1, all: &self.cpus.2 };
        let boot = || BlkGuest::boot(step.client, systems, cache, programs, files, cpus);
        let began = Instant::now();
        match self.guests.get(step.client, boot).and_then(|guest| guest.fio(programs, able, step, runtime)) {
            Ok(found) => found.into_iter().map(|(system, found)| (system, found, Duration::ZERO)).collect(),
            Err(error) => {
                // The cause is unknown, and a guest that did not reply is useless.
                self.guests.lose();
                let (reason, took) = (format!("{error:#}"), began.elapsed());
                able.iter().map(|system| (*system, Err(anyhow!("{reason}")), took)).collect()
            }
        }
    }

    /// One run of each system from this host, and how long it took.
    fn turn(
        &mut self,
        step: Step,
        able: &[System],
        turn: usize,
        servers: &mut BTreeMap<System, Server>,
    ) -> Vec<(System, Result<Sample>, Duration)> {
        let mut found = Vec::new();
        for &system in able {
            let began = Instant::now();
            let needed = turn == 0 || system != System::BareFile && !servers.contains_key(&system);
            let ready = if needed { self.ready(step, system, servers) } else { Ok(()) };
            let sample = ready.and_then(|()| self.sample(step, system, servers.get(&system)));
            found.push((system, sample, began.elapsed()));
        }
        found
    }

    /// Before the first run of a row: the server, and its file as the row wants it.
    fn ready(&self, step: Step, system: System, servers: &mut BTreeMap<System, Server>) -> Result<()> {
        if !step.direct {
            self.files.warm(system)?;
        }
        if system != System::BareFile {
            // What several queues are for shows only with more than one CPU.
            let cpus = if step.queues > 1 { &self.cpus.2 } else { &self.cpus.1 };
            servers.insert(system, self.files.serve(&self.programs, system, step.direct, cpus)?);
        }
        Ok(())
    }

    fn sample(&mut self, step: Step, system: System, server: Option<&Server>) -> Result<Sample> {
        if system == System::BareFile {
            return self.bare(step);
        }
        let server = server.context("there is no server")?;
        if step.client == Client::QemuImg {
            return self.image(step, system, server.socket());
        }
        let load = Load { seconds: Some(self.effort.native.as_secs_f64()), ..self.load(step, system) };
        let report = native::run(server.socket(), self.driver_cpu(step), load)?;
        Ok(Sample { iops: report.requests_per_second, latency_us: report.latency_us.mean })
    }

    /// Over several queues the driver has several threads.
    fn driver_cpu(&self, step: Step) -> Option<usize> {
        (step.queues == 1).then_some(self.cpus.0)
    }

    fn load(&self, step: Step, system: System) -> Load {
        Load {
            on: LoadTarget::Disk,
            size: Some(USED_MIB << 20),
            op: if step.write { Op::Write } else { Op::Read },
            queues: step.queues,
            queue_size: 256,
            event_idx: true,
            indirect: true,
            packed: system == System::Ferry(Way::Packed),
            depth: step.depth,
            block: step.block,
            random: step.random,
            seconds: None,
            requests: None,
            sleep: false,
            threads: None,
            verify: false,
            reattach: None,
            pid: None,
            count_syscalls: None,
        }
    }

    /// fio with io_uring on the file itself.
    fn bare(&self, step: Step) -> Result<Sample> {
        let file = self.files.path(System::BareFile);
        let mut command = Command::new("taskset");
        command.arg("-c").arg(self.cpus.0.to_string()).arg(&self.programs.fio);
        let name = System::BareFile.full_name();
        let target = [(name.clone(), file)];
        command.args(fio::arguments(step, Engine::Uring, step.direct, &target, self.effort.native));
        command.current_dir(self.files.directory());
        let output = process::run(command, self.files.directory(), self.effort.timeout + self.effort.native)?;
        fio::parse(step, &name, &output)
    }

    fn image(&mut self, step: Step, system: System, socket: &Path) -> Result<Sample> {
        let seconds = self.effort.native.as_secs_f64();
        let requests = self.rates.get(&system).map_or(FIRST_REQUESTS, |rate| (rate * seconds).max(500.0));
        let mut command = Command::new("taskset");
        command.arg("-c").arg(self.cpus.0.to_string()).arg(self.programs.tool("qemu-img")?);
        command.args(image_arguments(step, socket, requests));
        let output = process::run(command, self.files.directory(), self.effort.timeout)?;
        let seconds = parse_image(&output).with_context(|| format!("qemu-img said {:?}", output.trim()))?;
        let iops = requests.floor() / seconds;
        // The next row's depth differs: its first run is not to take for ever.
        self.rates.insert(system, iops / if step.depth > 3 { 4.0 } else { 1.0 });
        #[allow(clippy::cast_precision_loss)] // A depth.
        let latency_us = step.depth as f64 / iops * 1e6;
        Ok(Sample { iops, latency_us })
    }

    fn explain(&self, client: Client, ours: System, systems: &[System], line: &mut Line) {
        let reason = |system: System| {
            let reason = self.trouble.reason((client, system), self.effort.runs)?;
            Some(format!("{}: {reason}", system.full_name()))
        };
        if let Some(reason) = reason(ours) {
            line.fail(&reason);
        }
        let peers = systems.iter().filter(|peer| ours.calls(**peer).is_some());
        peers.filter_map(|peer| reason(*peer)).for_each(|reason| line.skip(&reason));
    }

    /// What noise does not touch, in runs of their own. A count that fails leaves the figures as they are.
    fn count(&self, step: Step, servers: &BTreeMap<System, Server>, lines: &mut [Line]) {
        for (&system, server) in servers {
            // A peer's counts stand in one line only: the first.
            let name = if system.is_ours() { FERRY.to_owned() } else { system.name().to_owned() };
            let config = step.config(system);
            let Some(line) = lines.iter_mut().find(|line| !system.is_ours() || line.config == config) else { continue };
            for sleep in [false, true] {
                let load = Load { sleep, ..self.load(step, system) };
                match native::costs(server.socket(), self.driver_cpu(step), &load, self.effort.count_requests) {
                    Ok(counts) => {
                        let to = if sleep { &mut line.counts_asleep } else { &mut line.counts };
                        to.insert(name.clone(), counts);
                    }
                    Err(error) => {
                        let reason = format!("{}: counting: {error:#}", system.full_name());
                        if system.is_ours() { line.fail(&reason) } else { line.skip(&reason) }
                    }
                }
            }
        }
    }
}

/// Why a run failed, and what the server said to it.
fn reason(error: &anyhow::Error, server: Option<Server>) -> String {
    let said = server.map(|server| format!("; its server said last: {}", server.last_words()));
    format!("{error:#}{}", said.unwrap_or_default())
}

/// The words that have qemu-img send requests to a server.
fn image_arguments(step: Step, socket: &Path, requests: f64) -> Vec<String> {
    let blocks = if step.random { STRIDE_BLOCKS } else { 1 };
    let image = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", comma_doubled(socket));
    let mut words = vec!["bench".to_owned(), "--image-opts".into(), "-t".into(), "none".into()];
    for (option, value) in [
        ("-c", format!("{requests:.0}", requests = requests.floor())),
        ("-d", step.depth.to_string()),
        ("-s", step.block.to_string()),
        ("-S", (step.block * blocks).to_string()),
    ] {
        words.extend([option.to_owned(), value]);
    }
    if step.write {
        words.push("-w".into());
    }
    words.push(image);
    words
}

/// Reads `Run completed in 1.234 seconds.`
fn parse_image(output: &str) -> Option<f64> {
    let (_, rest) = output.split_once("Run completed in ")?;
    rest.split_whitespace().next()?.parse().ok().filter(|seconds| *seconds > 0.0)
}

/// The line of one of our configurations.
fn line(step: Step, ours: System, systems: &[System], samples: &Samples) -> Line {
    let mut line = Line::new(TABLE, step.name(), &step.config(ours), "IOPS", Better::Higher);
    line.note = step.client.note().map(str::to_owned);
    let named = |system: System| if system == ours { Some(FERRY.to_owned()) } else { ours.calls(system) };
    let of = |system: &System| Some((named(*system)?, samples.get(system)?));
    let rates = systems.iter().filter_map(of);
    line.fill(&rates.map(|(name, samples)| (name, samples.iter().map(|sample| sample.iops).collect())).collect());
    let latencies = systems.iter().filter_map(of).filter_map(|(name, samples)| {
        let values: Vec<f64> = samples.iter().map(|sample| sample.latency_us).collect();
        Some((name, stats::round(stats::median(&values)?)))
    });
    let latencies: BTreeMap<String, f64> = latencies.collect();
    if !latencies.is_empty() {
        line.also.insert("latency_us".into(), latencies);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;

    fn step(name: &str) -> Step {
        rows::all().into_iter().find(|step| step.name() == name).unwrap()
    }

    #[test]
    fn a_line_has_its_peers_and_their_latencies() {
        let sample = |iops: f64| Sample { iops, latency_us: 1e6 / iops };
        let (ours, theirs) = (System::Ferry(Way::Sleep), System::StorageDaemon(Way::Poll));
        let samples: Samples = [
            (ours, vec![sample(200_000.0), sample(210_000.0), sample(100_000.0)]),
            (theirs, vec![sample(50_000.0)]),
            (System::Ferry(Way::Poll), vec![sample(400_000.0)]),
        ]
        .into();
        let step = step("sequential read 512B depth 1");
        let line = line(step, ours, &step.systems(), &samples);
        assert_eq!((line.ferry, line.ratio["qemu-storage-daemon"]), (Some(200_000.0), 4.0));
        assert_eq!(line.ratio["ferry-poll"], 0.5);
        assert_eq!(line.also["latency_us"]["ferry"], 5.0);
        assert_eq!((line.config.as_str(), line.peers.len()), ("no-poll", 2));
    }

    #[test]
    fn qemu_img_is_run_and_parsed() {
        let words = image_arguments(step("qemu-img random write 4K depth 32"), Path::new("/s"), 1234.5).join(" ");
        assert_eq!(
            words,
            "bench --image-opts -t none -c 1234 -d 32 -s 4096 -S 20492288 -w \
             driver=virtio-blk-vhost-user,path=/s,cache.direct=on"
        );
        let said = "Sending 10 read requests, 512 bytes each\nRun completed in 0.250 seconds.\n";
        assert_eq!((parse_image(said), parse_image("Run failed")), (Some(0.25), None));
    }
}
