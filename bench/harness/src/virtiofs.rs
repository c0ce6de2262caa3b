//! Runs the rows of the virtiofs table.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::data::Data;
use crate::fio;
use crate::line::{Line, Requests};
use crate::native;
use crate::rows::{Config, Job, Native, Row, Task, Work};
use crate::server::Peer;
use crate::session::{Place, Session, is_failed};
use crate::stats;
use crate::time_limit::TimeLimit;

/// How long each thing takes.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each server.
    pub runs: usize,
    /// Time of one fio run.
    pub fio: Duration,
    /// Time of one load of the native driver.
    pub native_seconds: f64,
    /// Requests of a counting run.
    pub count_requests: u64,
    /// How long a command in the guest may take beside its own time.
    pub timeout: Duration,
    /// When no further row begins.
    pub limit: Option<TimeLimit>,
    /// Whether tasks are run once more with servers that log each request.
    pub count_tasks: bool,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self {
        runs: 5,
        fio: Duration::from_secs(3),
        native_seconds: 1.0,
        count_requests: 20_000,
        timeout: Duration::from_secs(60),
        limit: None,
        count_tasks: false,
    };
    /// The quick one: under five minutes, whatever happens.
    pub const QUICK: Self = Self {
        runs: 3,
        fio: Duration::from_millis(700),
        native_seconds: 0.3,
        count_requests: 4000,
        timeout: Duration::from_secs(25),
        limit: Some(TimeLimit::Quick(Duration::from_secs(250))),
        count_tasks: false,
    };
}

/// The runner.
#[derive(Debug)]
pub struct Runner {
    table: &'static str,
    place: Place,
    data: Data,
    fio: std::path::PathBuf,
    peers: Vec<Peer>,
    effort: Effort,
    started: Instant,
    sessions: BTreeMap<&'static str, Session>,
    config: Config,
    /// The guest's kernel, once a guest has run.
    pub guest_kernel: Option<String>,
}

impl Runner {
    /// A runner for these servers; ours is the first.
    pub fn new(
        table: &'static str,
        place: Place,
        data: Data,
        fio: std::path::PathBuf,
        peers: Vec<Peer>,
        effort: Effort,
    ) -> Self {
        Self {
            table,
            place,
            data,
            fio,
            peers,
            effort,
            started: Instant::now(),
            sessions: BTreeMap::new(),
            config: Config::None,
            guest_kernel: None,
        }
    }

    /// Compares these servers from now on.
    pub fn set_peers(&mut self, peers: &[Peer]) {
        self.peers = peers.to_vec();
    }

    /// Runs a row, the servers in turn.
    pub fn run(&mut self, row: &Row) -> Line {
        let mut line = Line::empty(self.table, row);
        if let Some(limit) = self.effort.limit.filter(|limit| limit.is_over(self.started)) {
            limit.tell(&mut line);
            return line;
        }
        if matches!(row.work, Work::Native(_)) || row.config != self.config {
            // Guests that are not needed any more only take memory.
            self.sessions.clear();
        }
        self.config = row.config;
        let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        let mut out: Vec<Peer> = Vec::new();
        for _ in 0..self.effort.runs {
            for peer in self.peers.clone() {
                if out.contains(&peer) {
                    continue;
                }
                match self.sample(peer, row) {
                    Ok(value) => samples.entry(peer.name().into()).or_default().push(value),
                    Err(error) => {
                        out.push(peer);
                        let reason = format!("{}: {error:#}", peer.name());
                        if is_failed(&error) && peer != Peer::Ferry {
                            line.skip(&reason);
                        } else {
                            line.fail(&reason);
                        }
                        if !is_failed(&error) {
                            self.sessions.remove(peer.name());
                        }
                    }
                }
            }
        }
        line.fill(&samples);
        if let Work::Native(native) = row.work {
            self.count(native, row.config, &out, &mut line);
        }
        if let (Work::Meta(task), true) = (row.work, self.effort.count_tasks) {
            self.count_task(task, row.config, &out, &mut line);
        }
        line
    }

    fn sample(&mut self, peer: Peer, row: &Row) -> Result<f64> {
        match row.work {
            Work::Fio(job) => self.fio_run(peer, row.config, job),
            Work::Meta(task) => self.task_run(peer, row.config, task),
            Work::Native(native) => {
                let seconds = self.effort.native_seconds;
                self.with_server(peer, row.config, native, |place| native::rate(native, place, seconds))
            }
        }
    }

    fn session(&mut self, peer: Peer, config: Config) -> Result<&mut Session> {
        // Entered before it is asked for, as a fallible start does not fit the map's own way.
        if !self.sessions.contains_key(peer.name()) {
            let mut session = Session::start(&self.place, peer, config).context("no guest")?;
            if self.guest_kernel.is_none() {
                let said = session.run("uname -r", self.effort.timeout)?;
                self.guest_kernel = Some(said.output.trim().to_owned());
            }
            self.sessions.insert(peer.name(), session);
        }
        self.sessions.get_mut(peer.name()).context("the session was just made")
    }

    fn fio_run(&mut self, peer: Peer, config: Config, job: Job) -> Result<f64> {
        let command = fio::command(&self.fio, job, self.effort.fio);
        let timeout = self.effort.timeout + self.effort.fio;
        if job.write {
            self.data.settle();
        }
        let done = self.session(peer, config)?.run(&command, timeout)?;
        fio::bandwidth(job, &done.output)
    }

    fn task_run(&mut self, peer: Peer, config: Config, task: Task) -> Result<f64> {
        let run = self.data.task(task)?;
        let timeout = self.effort.timeout;
        let session = self.session(peer, config)?;
        session.run(&run.before, timeout)?;
        let done = session.run(&run.timed, timeout)?;
        Ok(done.elapsed.as_secs_f64() * 1000.0)
    }

    /// A server of its own for each load: the peer's ends with its client.
    fn with_server<T>(
        &self,
        peer: Peer,
        config: Config,
        native: Native,
        run: impl FnOnce(native::Place<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut server = self.place.serve(peer, config, "native", Some(native.queues))?;
        let place = native::Place {
            socket: server.socket(),
            cpu: (native.queues == 1).then_some(self.place.guest_cpu),
            one_queue: peer == Peer::Virtiofsd,
        };
        run(place).map_err(|error| {
            let said = server.last_words();
            let state = if server.is_alive() { "still runs" } else { "has ended" };
            error.context(format!("the server {state} and said last: {said}"))
        })
    }

    /// The requests of a task, in a guest of its own. A count that fails leaves the figures as they are.
    fn count_task(&mut self, task: Task, config: Config, out: &[Peer], line: &mut Line) {
        // Guests that wait meanwhile only take memory, and the log would be theirs, too.
        self.sessions.clear();
        for peer in self.peers.clone().into_iter().filter(|peer| !out.contains(peer)) {
            match self.requests(peer, task, config) {
                Ok(requests) => _ = line.requests.insert(peer.name().into(), requests),
                Err(error) => line.fail(&format!("{}: counting: {error:#}", peer.name())),
            }
        }
    }

    fn requests(&self, peer: Peer, task: Task, config: Config) -> Result<Requests> {
        let run = self.data.task(task)?;
        let timeout = self.effort.timeout;
        let mut session = Session::start_logging(&self.place, peer, config).context("no guest")?;
        session.run(&run.before, timeout)?;
        let before = session.server().logged_bytes();
        session.run(&run.timed, timeout)?;
        let by_name = session.server().requests(before)?;
        let waited_for = by_name.iter().filter(|(name, _)| !name.contains("forget")).map(|(_, count)| count);
        let files = self.data.files(task).context("a task without a number of files")?;
        #[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
        let per_file = waited_for.sum::<u64>() as f64 / files as f64;
        Ok(Requests { per_file: stats::round(per_file), by_name })
    }

    /// What noise does not touch. A count that fails leaves the figures as they are.
    fn count(&self, native: Native, config: Config, out: &[Peer], line: &mut Line) {
        for &peer in self.peers.iter().filter(|peer| !out.contains(peer)) {
            for sleep in [false, true] {
                let requests = self.effort.count_requests;
                let counted =
                    self.with_server(peer, config, native, |place| native::counts(native, place, requests, sleep));
                match counted {
                    Ok(counts) => {
                        let to = if sleep { &mut line.counts_asleep } else { &mut line.counts };
                        to.insert(peer.name().into(), counts);
                    }
                    Err(error) => line.fail(&format!("{}: counting: {error:#}", peer.name())),
                }
            }
        }
    }
}
