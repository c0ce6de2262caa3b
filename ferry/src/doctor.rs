//! `ferry doctor`: what this machine offers for each export, and what it lacks.

mod args;
mod check;
mod confinement;
mod files;
mod limits;
mod version;
mod vmm;

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context, Result};
use ferry_control::{printable, printable_json};
use serde::Serialize;

pub use args::Args;

use crate::status;
use check::{Check, Export, State};

/// The version of the JSON report. It grows when a field changes its meaning or goes; new fields do not change it.
const REPORT_VERSION: u32 = 1;
/// The width of the longest state.
const STATE_WIDTH: usize = 8;

/// The report in JSON.
#[derive(Debug, Serialize)]
struct Report {
    version: u32,
    exports: Vec<Export>,
    complete: bool,
    checks: Vec<Line>,
}

/// One check of the report.
#[derive(Debug, Serialize)]
struct Line {
    name: &'static str,
    exports: Vec<Export>,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    consequence: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

/// Checks the machine. Returns the status to end with.
pub fn run(args: &Args) -> Result<u8> {
    let report = Report::new(all_checks(), &args.exports);
    let text = if args.json { printable_json(&serde_json::to_string(&report)?) + "\n" } else { report.to_string() };
    match std::io::stdout().write_all(text.as_bytes()) {
        // A pager that was left early.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        result => result.context("cannot write to standard output")?,
    }
    Ok(if report.complete { status::DONE } else { status::FAILED })
}

/// Runs all checks. Those that fork come first, while this process has one thread.
fn all_checks() -> Vec<Check> {
    let mut checks = vec![version::kernel()];
    checks.extend(confinement::checks());
    checks.extend(limits::checks());
    checks.extend(files::checks());
    checks.extend(version::layers());
    checks.extend(vmm::checks());
    checks
}

impl Report {
    /// The report on the checks that concern these exports; on all checks if there are none.
    fn new(checks: Vec<Check>, exports: &[Export]) -> Self {
        let exports: Vec<_> =
            Export::ALL.into_iter().filter(|one| exports.is_empty() || exports.contains(one)).collect();
        let line = |check: Check| {
            let concerned = check.exports(&exports);
            let state = check.state(&exports);
            let (consequence, remedy) = check.lack.map(|lack| (lack.consequence, lack.remedy)).unzip();
            (!concerned.is_empty()).then_some(Line {
                name: check.name,
                exports: concerned,
                state,
                found: check.found,
                consequence,
                remedy,
            })
        };
        let checks: Vec<_> = checks.into_iter().filter_map(line).collect();
        let complete = checks.iter().all(|line| line.state != State::Missing);
        Self { version: REPORT_VERSION, exports, complete, checks }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self.checks.iter().map(|line| line.name.len()).max().unwrap_or_default();
        let indent = " ".repeat(STATE_WIDTH + 2);
        for line in &self.checks {
            let state = line.state.word();
            writeln!(f, "{state:STATE_WIDTH$}  {:width$}  {}", line.name, printable(&line.found))?;
            if let (Some(consequence), Some(remedy)) = (&line.consequence, &line.remedy) {
                writeln!(f, "{indent}so: {}", printable(consequence))?;
                writeln!(f, "{indent}do: {}", printable(remedy))?;
            }
        }
        let missing = self.checks.iter().filter(|line| line.state == State::Missing);
        let mut summary = String::new();
        for line in missing {
            let exports: Vec<_> = line.exports.iter().map(|export| export.word()).collect();
            write!(
                summary,
                "{}{} (for {})",
                if summary.is_empty() { "" } else { ", " },
                line.name,
                exports.join(", ")
            )?;
        }
        match summary.is_empty() {
            true => writeln!(f, "Nothing that is needed is missing."),
            false => writeln!(f, "Missing: {summary}."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> Vec<Check> {
        vec![
            Check::new("a", &[Export::Mount], &[Export::Image]).lacks("no \x1b[2J", "none", "# do\n"),
            Check::new("b", &[], &[Export::Disk]).found("yes"),
        ]
    }

    #[test]
    fn missing_requirements_fail_and_missing_options_degrade() {
        for (asked, states, complete) in [
            (&[][..], &[("a", State::Missing), ("b", State::Ok)][..], false),
            (&[Export::Mount], &[("a", State::Missing)], false),
            (&[Export::Image], &[("a", State::Degraded)], true),
            (&[Export::Image, Export::Mount], &[("a", State::Missing)], false),
            (&[Export::Disk], &[("b", State::Ok)], true),
            (&[Export::Ninep], &[], true),
        ] {
            let report = Report::new(checks(), asked);
            let found: Vec<_> = report.checks.iter().map(|line| (line.name, line.state)).collect();
            assert_eq!((found.as_slice(), report.complete), (states, complete), "{asked:?}");
        }
    }

    #[test]
    fn words_of_other_programs_do_nothing_to_a_terminal() {
        let report = Report::new(checks(), &[]);
        let text = report.to_string();
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        assert_eq!(text.lines().count(), 5, "{text}");
        assert!(text.contains("Missing: a (for mount, image)."), "{text}");
    }
}
