//! The scale table: how costs grow with the size of what is served.
//!
//! A row is a size of a [`Case`] in [`cases`]: a name, the sizes, the figures, and a function that prepares one size and returns
//! what measures it.

mod case;
mod directory;
mod images;
mod locks;
mod ninep;
mod packs;
mod place;
mod pmem;
mod shares;
mod told;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use self::case::{Case, Figure};
use self::place::Place;
use crate::cli::Cli;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::parts;
use crate::progress::Progress;
use crate::stats::Better;
use crate::target::{self, Target};

/// The table's name.
const TABLE: &str = "scale";
/// No other server is compared.
const CONFIG: &str = "alone";
/// Runs of a row, and how long they may take in all: beyond it there are no more. All rows are to take less than 25 minutes.
const RUNS: usize = 5;
const RUNS_TIME: Duration = Duration::from_secs(12);

/// All cases, in the order of the report.
fn cases() -> Vec<Case> {
    [directory::CASES, images::CASES, locks::CASES, ninep::CASES, shares::CASES, packs::CASES, pmem::CASES, told::CASES]
        .concat()
}

fn name(case: &Case, size: u64) -> String {
    format!("{}, {size} {}", case.name, case.of)
}

fn figure_name(case: &Case, figure: &Figure, size: u64) -> String {
    let step = if figure.name.is_empty() { String::new() } else { format!(": {}", figure.name) };
    format!("{}{step}, {size} {}", case.name, case.of)
}

/// Measures one size in a directory of its own, which goes afterwards.
fn lines(work: &Path, case: &Case, size: u64, runs: usize) -> Vec<Line> {
    let values = values(work, case, size, runs);
    let line = |(number, figure): (usize, &Figure)| {
        let mut line = Line::new(TABLE, figure_name(case, figure, size), CONFIG, figure.unit, Better::Lower);
        match &values {
            Ok(values) => {
                let values = values.iter().filter_map(|run| run.get(number).copied()).collect();
                line.fill(&BTreeMap::from([(FERRY.to_owned(), values)]));
            }
            Err(error) => line.fail(&format!("{error:#}")),
        }
        line
    };
    case.figures.iter().enumerate().map(line).collect()
}

fn values(work: &Path, case: &Case, size: u64, runs: usize) -> Result<Vec<Vec<f64>>> {
    let place = Place::new(work.join(TABLE))?;
    let values = (case.prepare)(&place, size).and_then(|mut measure| {
        let begin = Instant::now();
        let mut values = vec![measure()?];
        while values.len() < runs && begin.elapsed() < RUNS_TIME {
            values.push(measure()?);
        }
        Ok(values)
    });
    std::fs::remove_dir_all(&place.directory)
        .with_context(|| format!("cannot remove {}", place.directory.display()))?;
    values
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let cases = cases();
    let all = cases.iter().flat_map(|case| case.sizes.iter().map(move |size| (case, *size)));
    let all = all.filter(|(case, size)| !cli.quick || *size <= case.quick_max);
    let name = |(case, size): &(&Case, u64)| name(case, *size);
    let rows: Vec<_> = all.filter(|row| cli.rows.as_ref().is_none_or(|regex| regex.is_match(&name(row)))).collect();
    if let Some(code) = cli.listed(TABLE, rows.iter().map(name)) {
        return Ok(code);
    }
    let runs = if cli.quick { 1 } else { RUNS };
    let machine = Machine::look(&cli.work, None, None);
    let progress = Progress::new(rows.len());
    let lines = progress.measure(&rows, name, &[], |(case, size)| lines(&cli.work, case, *size, runs))?;
    let targets = targets(&cases, &lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let machine = Machine { command: crate::cli::command(), ..machine };
        write(&directory, &lines, &markdown(&cases, &lines, &machine, &targets, runs))?;
    }
    Ok(crate::cli::verdict(&lines))
}

/// How far figures grow, from the second size that this run has (the first of two) to the last.
fn targets(cases: &[Case], lines: &[Line]) -> Vec<Target> {
    let target = |case: &Case, figure: &Figure| {
        let found = |size: &u64| {
            let line = parts::find(lines, &figure_name(case, figure, *size), CONFIG)?;
            Some((*size, line.ferry.filter(|figure| *figure > 0.0)))
        };
        let found: Vec<(u64, Option<f64>)> = case.sizes.iter().filter_map(found).collect();
        let (from, to) = (found.get(usize::from(found.len() > 2))?, found.last().filter(|_| found.len() > 1)?);
        let what = format!("{} : {}", figure_name(case, figure, to.0), from.0);
        Some(Target::at_most(what, to.1.zip(from.1).map(|(to, from)| to / from), figure.growth_max?))
    };
    cases.iter().flat_map(|case| case.figures.iter().filter_map(move |figure| target(case, figure))).collect()
}

/// Writes the report of a full run into a directory.
pub fn write_full(directory: &Path, lines: &[Line], machine: &Machine) -> Result<()> {
    let cases = cases();
    write(directory, lines, &markdown(&cases, lines, machine, &targets(&cases, lines), RUNS))
}

fn write(directory: &Path, lines: &[Line], markdown: &str) -> Result<()> {
    let json: Result<Vec<String>, _> = lines.iter().map(serde_json::to_string).collect();
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let put = |ending: &str, text: &str| {
        let path = directory.join(format!("{TABLE}.{ending}"));
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    put("jsonl", &(json?.join("\n") + "\n"))?;
    put("md", &(markdown.to_owned() + &parts::notes(directory, TABLE)?))
}

fn markdown(cases: &[Case], lines: &[Line], machine: &Machine, targets: &[Target], runs: usize) -> String {
    let Machine { cpu, cpus, kernel, ferry, command, date, .. } = machine;
    let mut out = String::from("# How costs grow with size\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}. {runs} runs of each, fewer where they take more than \
         {} s in all; medians, with the least and the greatest in brackets.\n",
        RUNS_TIME.as_secs()
    );
    target::chapter(&mut out, targets);
    out.push_str("## Figures\n\n");
    for case in cases {
        let sizes: Vec<String> = case.sizes.iter().map(u64::to_string).collect();
        let _ = writeln!(
            out,
            "| {}: {} | unit | {} |\n| --- | --- |{}",
            case.name,
            case.of,
            sizes.join(" | "),
            " --- |".repeat(sizes.len())
        );
        for figure in case.figures {
            let of_size = |size: &u64| {
                let found = parts::find(lines, &figure_name(case, figure, *size), CONFIG);
                found.map_or("-".into(), |line| parts::figure(line, FERRY))
            };
            let figures: Vec<String> = case.sizes.iter().map(of_size).collect();
            let name = if figure.name.is_empty() { case.name } else { figure.name };
            let _ = writeln!(out, "| {name} | {} | {} |", figure.unit, figures.join(" | "));
        }
        out.push('\n');
    }
    // The head says which rows have fewer runs.
    parts::shortfalls(&mut out, lines, |_| true, |_| 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Why a case cannot run here: it needs the program, which tests of this crate alone do not build, or root.
    const NOT_HERE: [&str; 2] = ["no program ", "cannot mount a tmpfs"];

    #[test]
    fn the_smallest_size_of_each_case_is_measured_and_reported() {
        let work = tempfile::tempdir().expect("a directory");
        let cases = cases();
        let lines: Vec<Line> = cases.iter().flat_map(|case| lines(work.path(), case, case.sizes[0], 1)).collect();
        for line in &lines {
            let not_here = |error: &String| NOT_HERE.iter().any(|reason| error.contains(reason));
            assert!(line.error.as_ref().map_or(line.ferry.is_some(), not_here), "{line:?}");
        }
        let text = markdown(&cases, &lines, &Machine::default(), &[], 1);
        for case in &cases {
            assert!(case.sizes.contains(&case.quick_max), "{}", case.name);
            for figure in case.figures {
                let name = if figure.name.is_empty() { case.name } else { figure.name };
                assert!(text.contains(&format!("| {name} | {} | ", figure.unit)), "{text}");
            }
        }
    }

    #[test]
    fn figures_may_grow_so_far() {
        const FIGURES: &[Figure] = &[Figure { name: "", unit: "us", growth_max: case::STRAIGHT }];
        let case = Case {
            name: "c",
            of: "files",
            sizes: &[1, 2, 3, 4],
            quick_max: 3,
            figures: FIGURES,
            prepare: |_, _| anyhow::bail!("not here"),
        };
        let line = |size: u64, value: f64| {
            let mut line = Line::new(TABLE, name(&case, size), CONFIG, "us", Better::Lower);
            line.fill(&BTreeMap::from([(FERRY.to_owned(), vec![value])]));
            line
        };
        let text = |lines: &[Line]| targets(&[case], lines).iter().map(ToString::to_string).collect::<String>();
        assert_eq!(
            text(&[line(1, 9.0), line(2, 1.0), line(4, 2.0)]),
            "c, 4 files : 2: 2.00 (target: at most 1.5: missed)"
        );
        assert_eq!(text(&[line(1, 2.0), line(2, 2.0)]), "c, 2 files : 1: 1.00 (target: at most 1.5: reached)");
        assert_eq!(text(&[line(2, 1.0)]), "");
        let failed = Line::new(TABLE, name(&case, 4), CONFIG, "us", Better::Lower);
        assert_eq!(
            text(&[line(1, 9.0), line(2, 1.0), line(3, 1.0), failed]),
            "c, 4 files : 2: not measured (target: at most 1.5)"
        );
    }
}
