//! Runs the rows: all systems of a row in turn.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ferry_guest::Cache;

use super::guest::DaxGuest;
use super::systems::System;
use super::{Files, TABLE};
use crate::line::{FERRY, Line};
use crate::rows::{Job, Row, Work};
use crate::server::Programs;
use crate::time_limit::TimeLimit;
use crate::trouble::Failures;

/// How much of a reason is shown.
const REASON_CHARS_MAX: usize = 600;
/// Guests that may be lost before the run goes without one.
const GUESTS_LOST_MAX: usize = 3;

/// How long each thing takes.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Runs of each system.
    runs: usize,
    /// The most time of one run; one that is done with its files ends earlier.
    runtime: Duration,
    /// When no further row begins.
    limit: TimeLimit,
}

impl Effort {
    /// The full run.
    pub const FULL: Self =
        Self { runs: 5, runtime: Duration::from_millis(700), limit: TimeLimit::Full(Duration::from_secs(24 * 60)) };
    /// The quick one: under five minutes, whatever happens.
    pub const QUICK: Self =
        Self { runs: 2, runtime: Duration::from_millis(400), limit: TimeLimit::Quick(Duration::from_secs(240)) };
}

/// Runs of a row, by system.
type Samples = BTreeMap<System, Vec<f64>>;

/// The runner.
#[derive(Debug)]
pub struct Runner {
    cache: Cache,
    programs: Programs,
    fio: PathBuf,
    cpus: String,
    systems: Vec<System>,
    effort: Effort,
    started: Instant,
    guest: Option<DaxGuest>,
    /// How many guests were lost, and why the last one.
    lost: (usize, String),
    trouble: Failures<System>,
    /// After what uses them.
    files: Files,
    /// The guest's kernel, once it has run.
    pub kernel: Option<String>,
}

impl Runner {
    /// A runner; the guest boots when it is needed.
    pub fn new(
        cache: Cache,
        programs: Programs,
        fio: PathBuf,
        files: Files,
        cpus: String,
        systems: Vec<System>,
        effort: Effort,
    ) -> Self {
        Self {
            cache,
            programs,
            fio,
            cpus,
            systems,
            effort,
            started: Instant::now(),
            guest: None,
            lost: (0, String::new()),
            trouble: Failures::default(),
            files,
            kernel: None,
        }
    }

    /// Runs a row, and makes a line for each of our configurations.
    pub fn run(&mut self, row: &Row) -> Vec<Line> {
        let Work::Fio(job) = row.work else { return Vec::new() };
        let late = self.effort.limit.is_over(self.started);
        let mut samples = Samples::new();
        self.trouble.begin_row();
        for _ in 0..if late { 0 } else { self.effort.runs } {
            let able: Vec<System> =
                self.systems.iter().copied().filter(|system| self.trouble.is_able(*system)).collect();
            let began = Instant::now();
            // All run in one command, where a system that fails does so at once.
            let (found, took) = self.turn(job, &able).map(|found| (found, Duration::ZERO)).unwrap_or_else(|error| {
                let reason = short(&error);
                (able.iter().map(|system| (*system, Err(anyhow!("{reason}")))).collect(), began.elapsed())
            });
            for (system, rate) in found {
                match rate {
                    Ok(rate) => samples.entry(system).or_default().push(rate),
                    Err(error) => self.trouble.note(system, short(&error), took),
                }
            }
        }
        self.trouble.end_row(|system| samples.contains_key(&system));
        let ours = self.systems.iter().copied().filter(|system| matches!(system, System::Ferry(_)));
        ours.map(|ours| self.line(row, ours, &samples, late)).collect()
    }

    /// One run of each able system. A guest that fails is not used again.
    fn turn(&mut self, job: Job, able: &[System]) -> Result<Vec<(System, Result<f64>)>> {
        let mut guest = match self.guest.take() {
            Some(guest) => guest,
            None if self.lost.0 >= GUESTS_LOST_MAX => return Err(anyhow!("no guest: {}", self.lost.1)),
            None => self.boot(job, able).inspect_err(|error| self.lost = (self.lost.0 + 1, short(error)))?,
        };
        let found = guest.fio(&self.fio, job, able, self.effort.runtime);
        match found {
            Ok(found) => {
                self.guest = Some(guest);
                Ok(found)
            }
            Err(error) => {
                let words = guest.last_words();
                let error = if words.is_empty() { error } else { error.context(words) };
                self.lost = (self.lost.0 + 1, short(&error));
                Err(error)
            }
        }
    }

    /// A guest that has run the job once: an emulated one translates its programs the first time.
    fn boot(&mut self, job: Job, able: &[System]) -> Result<DaxGuest> {
        let mut guest = DaxGuest::boot(&self.cache, &self.programs, &self.files, &self.cpus, &self.systems)?;
        self.kernel.get_or_insert_with(|| guest.kernel.clone());
        guest.fio(&self.fio, job, able, self.effort.runtime)?;
        Ok(guest)
    }

    fn line(&self, row: &Row, ours: System, samples: &Samples, late: bool) -> Line {
        let config = if let System::Ferry(config) = ours { config.name() } else { "" };
        let mut line = Line::new(TABLE, row.name.clone(), config, row.unit(), row.better());
        let named = |system: System| if system == ours { Some(FERRY.to_owned()) } else { ours.calls(system) };
        let rates = samples.iter().filter_map(|(system, rates)| Some((named(*system)?, rates.clone())));
        line.fill(&rates.collect());
        if late {
            self.effort.limit.tell(&mut line);
        }
        for &system in &self.systems {
            let reason = self.trouble.reason(system, self.effort.runs);
            match (named(system), reason) {
                (Some(_), Some(reason)) if system == ours => line.fail(&format!("{}: {reason}", system.name())),
                (Some(_), Some(reason)) => line.skip(&format!("{}: {reason}", system.name())),
                _ => {}
            }
        }
        line
    }
}

/// A reason on one line, without the middle of a kernel's log.
fn short(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let length = words.chars().count();
    if length <= REASON_CHARS_MAX {
        return words;
    }
    let begin: String = words.chars().take(REASON_CHARS_MAX / 3).collect();
    let end: String = words.chars().skip(length - REASON_CHARS_MAX / 3).collect();
    format!("{begin} ... {end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_short() {
        let text = short(&anyhow!("the guest ended:\n{}\nthe reason", "a log ".repeat(200)));
        assert!(
            text.len() < 420 && text.starts_with("the guest ended: a log") && text.ends_with("the reason"),
            "{text}"
        );
        assert_eq!(short(&anyhow!("no\nlog")), "no log");
    }
}
