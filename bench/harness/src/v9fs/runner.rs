//! Runs the rows: all systems of a row in turn, so that what changes on the machine changes for all.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ferry_guest::Cache;

use super::fio::Sample;
use super::guest::V9fsGuest;
use super::host::Host;
use super::messages::Messages;
use super::place::{Cpus, Files, Route};
use super::rows::{Place, Step};
use super::systems::{Programs, System};
use super::{TABLE, UNIT};
use crate::line::{FERRY, Line, MessageCounts};
use crate::stats::{self, Better};
use crate::time_limit::TimeLimit;
use crate::trouble::Failures;

/// How long each thing takes.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each system.
    pub runs: usize,
    /// The most time of one run; one that is done with its file ends earlier.
    pub runtime: Duration,
    /// The most time of a run that counts messages.
    pub counting: Duration,
    /// When no further row begins.
    pub limit: TimeLimit,
}

impl Effort {
    /// The full run.
    pub const FULL: Self = Self {
        runs: 5,
        runtime: Duration::from_millis(500),
        counting: Duration::from_millis(500),
        limit: TimeLimit::Full(Duration::from_secs(30 * 60)),
    };
    /// The quick one: under five minutes, whatever happens.
    pub const QUICK: Self = Self {
        runs: 2,
        runtime: Duration::from_millis(300),
        counting: Duration::from_millis(300),
        limit: TimeLimit::Quick(Duration::from_secs(260)),
    };
}

/// What a place is made of.
#[derive(Debug)]
enum Side {
    Host(Box<Host>),
    Guest(Box<V9fsGuest>),
}

/// Runs of a row, by system.
type Samples = BTreeMap<System, Vec<f64>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    cache: Cache,
    programs: Programs,
    cpus: Cpus,
    effort: Effort,
    started: Instant,
    /// The place that is there, or why it is not; only one at a time.
    side: Option<(Place, Result<Side, String>)>,
    /// After what uses them.
    files: Files,
    trouble: Failures<(Place, System)>,
    /// Kernels of the guests that ran.
    kernels: BTreeMap<Place, String>,
}

impl Runner {
    /// A runner; servers and guests are started when they are needed.
    pub fn new(cache: Cache, programs: Programs, files: Files, cpus: Cpus, effort: Effort) -> Self {
        Self {
            cache,
            programs,
            cpus,
            effort,
            started: Instant::now(),
            side: None,
            files,
            trouble: Failures::default(),
            kernels: BTreeMap::new(),
        }
    }

    /// Runs a row, and makes a line for each of our configurations.
    pub fn run(&mut self, step: Step, systems: &[System]) -> Vec<Line> {
        let late = self.effort.limit.is_over(self.started);
        let mut samples = Samples::new();
        self.trouble.begin_row();
        for _ in 0..if late { 0 } else { self.effort.runs } {
            let able = systems.iter().copied().filter(|system| self.trouble.is_able((step.place, *system)));
            let able: Vec<System> = able.collect();
            for (system, sample, took) in self.turn(step, &able) {
                match sample {
                    Ok(sample) => samples.entry(system).or_default().push(sample.rate),
                    Err(error) => self.trouble.note((step.place, system), format!("{error:#}"), took),
                }
            }
        }
        self.trouble.end_row(|(place, system)| place == step.place && samples.contains_key(&system));
        let counted = if step.is_counted() && !late { self.count(step, &samples) } else { BTreeMap::new() };
        let mut lines = Vec::new();
        for &ours in systems.iter().filter(|system| system.is_ours()) {
            let kernel = self.kernels.get(&step.place).map(String::as_str);
            let mut line = line(step, ours, kernel, &samples, &counted);
            if late {
                self.effort.limit.tell(&mut line);
            }
            self.explain(step.place, ours, systems, &mut line);
            lines.push(line);
        }
        lines
    }

    /// One run of each able system, and how long a failure took. All systems of a guest run in one command, where those that
    /// fail do so at once.
    fn turn(&mut self, step: Step, able: &[System]) -> Vec<(System, Result<Sample>, Duration)> {
        let (route, began) = (Route::delayed(step.delay_ms), Instant::now());
        let all_failed = |error: &anyhow::Error| {
            let (reason, took) = (format!("{error:#}"), began.elapsed());
            able.iter().map(|system| (*system, Err(anyhow!("{reason}")), took)).collect()
        };
        if let Err(error) = self.go_to(step.place) {
            return all_failed(&error);
        }
        let (programs, files, runtime) = (&self.programs, &self.files, self.effort.runtime);
        match &mut self.side {
            Some((_, Ok(Side::Host(host)))) => {
                let run = |&system: &System| {
                    let began = Instant::now();
                    let found = host.fio(programs, files, (step, system, route), runtime);
                    let sample = with_words(found.map(|(sample, _)| sample), || host.last_words());
                    (system, sample, began.elapsed())
                };
                able.iter().map(run).collect()
            }
            Some((_, Ok(Side::Guest(guest)))) if !able.is_empty() => {
                let found = guest.fio(programs, &files.share, (step, able, route), runtime);
                match with_words(found, || guest.last_words()) {
                    Ok(found) => found.into_iter().map(|(system, found)| (system, found, Duration::ZERO)).collect(),
                    Err(error) => {
                        // The cause is unknown, and a guest that did not reply is useless.
                        self.side = None;
                        all_failed(&error)
                    }
                }
            }
            _ => Vec::new(),
        }
    }

    /// Makes the place of a row, unless it is there; one that could not be made is not tried again.
    fn go_to(&mut self, place: Place) -> Result<()> {
        if self.side.as_ref().is_none_or(|(of, _)| *of != place) {
            // Before the next one begins: two guests at once are too many for a small machine.
            self.side = None;
            let (programs, files, cpus) = (&self.programs, &self.files, &self.cpus);
            let made = match place {
                Place::Host => Host::start(programs, files, cpus).map(|host| Side::Host(Box::new(host))),
                _ => V9fsGuest::boot(place, &self.cache, programs, files, cpus)
                    .inspect(|guest| _ = self.kernels.insert(place, guest.kernel.clone()))
                    .map(|guest| Side::Guest(Box::new(guest))),
            };
            self.side = Some((place, made.map_err(|error| format!("{error:#}"))));
        }
        match &self.side {
            Some((_, Err(reason))) => Err(anyhow!("{reason}")),
            _ => Ok(()),
        }
    }

    /// Messages, in runs of their own. A count that fails leaves the figures as they are.
    fn count(&mut self, step: Step, samples: &Samples) -> BTreeMap<System, Result<MessageCounts>> {
        let (programs, files, runtime) = (&self.programs, &self.files, self.effort.counting);
        let systems = samples.keys().copied().filter(|system| *system != System::VirtioBlk);
        let mut count = |system: System| {
            let (sample, messages) = match &mut self.side {
                Some((_, Ok(Side::Host(host)))) => {
                    let (sample, messages) = host.fio(programs, files, (step, system, Route::COUNTED), runtime)?;
                    (sample, messages.ok_or_else(|| anyhow!("nothing counts its messages"))?)
                }
                Some((_, Ok(Side::Guest(guest)))) => guest.count(programs, &files.share, (step, system), runtime)?,
                _ => return Err(anyhow!("the place has gone")),
            };
            Ok(sent(sample, messages))
        };
        systems.map(|system| (system, count(system))).collect()
    }

    fn explain(&self, place: Place, ours: System, systems: &[System], line: &mut Line) {
        let reason = |system: System| {
            let reason = self.trouble.reason((place, system), self.effort.runs)?;
            Some(format!("{}: {reason}", system.full_name()))
        };
        if let Some(reason) = reason(ours) {
            line.fail(&reason);
        }
        let peers = systems.iter().filter(|peer| ours.calls(**peer).is_some());
        peers.filter_map(|peer| reason(*peer)).for_each(|reason| line.skip(&reason));
    }
}

/// Adds what servers that are gone said last.
fn with_words<T>(found: Result<T>, words: impl FnOnce() -> String) -> Result<T> {
    found.map_err(|error| {
        let words = words();
        if words.is_empty() { error } else { error.context(words) }
    })
}

#[allow(clippy::cast_precision_loss)] // Messages of a run of half a second.
fn sent(sample: Sample, messages: Messages) -> MessageCounts {
    let data = messages.data_requests as f64;
    MessageCounts {
        messages_per_mib: stats::round(messages.requests as f64 / sample.mib),
        bytes_per_message: (data > 0.0).then(|| stats::round(messages.data_bytes as f64 / data)),
        in_flight_mean: stats::round(messages.in_flight_mean),
        in_flight_most: messages.in_flight_most,
    }
}

/// The line of one of our configurations.
fn line(
    step: Step,
    ours: System,
    kernel: Option<&str>,
    samples: &Samples,
    counted: &BTreeMap<System, Result<MessageCounts>>,
) -> Line {
    let mut line = Line::new(TABLE, step.name(), ours.name(), UNIT, Better::Higher);
    line.note = step.place.note(kernel);
    let named = |system: System| if system == ours { Some(FERRY.to_owned()) } else { ours.calls(system) };
    let rates = samples.iter().filter_map(|(system, rates)| Some((named(*system)?, rates.clone())));
    line.fill(&rates.collect());
    for (&system, sent) in counted {
        match (named(system), sent) {
            (Some(name), Ok(sent)) => _ = line.messages.insert(name, *sent),
            (Some(name), Err(error)) => {
                let reason = format!("{name}: counting: {error:#}");
                if system == ours { line.fail(&reason) } else { line.skip(&reason) }
            }
            (None, _) => {}
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::super::systems::{Cache as Caching, Server, Way};
    use super::*;

    #[test]
    fn a_line_has_its_peers_and_their_messages() {
        let step = rows::all().into_iter().find(|step| step.name() == "uml read 4K").unwrap();
        let (ours, theirs) =
            (System::Kernel(Server::Ferry, Caching::Loose), System::Kernel(Server::Diod, Caching::Loose));
        let samples: Samples = [
            (ours, vec![30.0, 10.0, 20.0]),
            (theirs, vec![10.0]),
            (System::Kernel(Server::Diod, Caching::None), vec![1.0]),
            (System::Client(Way::Pipelined), vec![80.0]),
        ]
        .into();
        let messages =
            Messages { requests: 70, data_requests: 64, data_bytes: 64 << 20, in_flight_most: 3, in_flight_mean: 1.5 };
        let counted = sent(Sample { rate: 1.0, mib: 64.0 }, messages);
        let counted = [(ours, Ok(counted)), (theirs, Err(anyhow!("no")))].into();
        let line = line(step, ours, Some("7.2"), &samples, &counted);
        assert_eq!((line.config.as_str(), line.ferry, line.peers.len()), ("v9fs-loose", Some(20.0), 1));
        assert_eq!((line.ratio["diod"], line.messages.len()), (2.0, 1));
        assert_eq!(line.messages[FERRY].bytes_per_message, Some(1_048_576.0));
        assert_eq!(
            (line.messages[FERRY].messages_per_mib, line.skipped.as_deref()),
            (1.094, Some("diod: counting: no"))
        );
    }
}
