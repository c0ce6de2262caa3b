//! The scale table: how costs grow with the size of what is served.
//!
//! A row is a [`Case`] in [`cases`]: a name, the sizes, and a function that prepares one size and returns what measures it.

mod ninep;
mod packs;
mod pmem;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::cli::Cli;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::parts;
use crate::progress::Progress;
use crate::stats::Better;

/// The table's name.
const TABLE: &str = "scale";
/// No other server is compared.
const CONFIG: &str = "alone";

/// Measures one run of a prepared size.
type Measure = Box<dyn FnMut() -> Result<f64>>;

/// One row of the table.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    /// What the sizes count.
    of: &'static str,
    sizes: &'static [u64],
    unit: &'static str,
    /// Prepares one size in an empty folder; the result is called once for each run.
    prepare: fn(&Path, u64) -> Result<Measure>,
}

/// The memory that this process has.
fn resident_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    Ok(kib.context("no VmRSS in the status of this process")? / 1024.0)
}

/// All rows, in the order of the report.
fn cases() -> Vec<Case> {
    [packs::CASES, ninep::CASES, pmem::CASES].concat()
}

fn name(case: &Case, size: u64) -> String {
    format!("{}, {size} {}", case.name, case.of)
}

/// Measures one size in a folder of its own, which goes afterwards.
fn line(work: &Path, case: &Case, size: u64, runs: usize) -> Line {
    let mut line = Line::new(TABLE, name(case, size), CONFIG, case.unit, Better::Lower);
    match values(work, case, size, runs) {
        Ok(values) => line.fill(&BTreeMap::from([(FERRY.to_owned(), values)])),
        Err(error) => line.fail(&format!("{error:#}")),
    }
    line
}

fn values(work: &Path, case: &Case, size: u64, runs: usize) -> Result<Vec<f64>> {
    let folder = work.join(TABLE);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let values = (case.prepare)(&folder, size).and_then(|mut measure| (0..runs).map(|_| measure()).collect());
    std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    values
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let cases = cases();
    let all = cases.iter().flat_map(|case| case.sizes.iter().map(move |size| (case, *size)));
    let name = |(case, size): &(&Case, u64)| name(case, *size);
    let rows: Vec<_> = all.filter(|row| cli.rows.as_ref().is_none_or(|regex| regex.is_match(&name(row)))).collect();
    if let Some(code) = cli.listed(TABLE, rows.iter().map(name)) {
        return Ok(code);
    }
    let runs = if cli.quick { 1 } else { 5 };
    let machine = Machine::look(&cli.work, None, None);
    let progress = Progress::new(rows.len());
    let lines = progress.measure(&rows, name, &[], |(case, size)| vec![line(&cli.work, case, *size, runs)])?;
    if let Some(folder) = cli.results() {
        let machine = Machine { command: crate::cli::command(), ..machine };
        write(&folder, &lines, &markdown(&cases, &lines, &machine, runs))?;
    }
    Ok(crate::cli::verdict(&lines))
}

/// Writes the report into a folder.
fn write(folder: &Path, lines: &[Line], markdown: &str) -> Result<()> {
    let json: Result<Vec<String>, _> = lines.iter().map(serde_json::to_string).collect();
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let put = |ending: &str, text: &str| {
        let path = folder.join(format!("{TABLE}.{ending}"));
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    put("jsonl", &(json?.join("\n") + "\n"))?;
    put("md", markdown)
}

fn markdown(cases: &[Case], lines: &[Line], machine: &Machine, runs: usize) -> String {
    let Machine { cpu, cpus, kernel, ferry, command, date, .. } = machine;
    let mut out = String::from("# How costs grow with size\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}. {runs} runs of each; medians, with the least and \
         the greatest in brackets.\n"
    );
    for case in cases {
        let sizes: Vec<String> = case.sizes.iter().map(|size| format!("{size} {}", case.of)).collect();
        let figure = |size: &u64| {
            let found = parts::find(lines, &name(case, *size), CONFIG);
            found.map_or("-".into(), |line| parts::figure(line, FERRY))
        };
        let figures: Vec<String> = case.sizes.iter().map(figure).collect();
        let _ = writeln!(out, "| | unit | {} |\n| --- | --- |{}", sizes.join(" | "), " --- |".repeat(sizes.len()));
        let _ = writeln!(out, "| {} | {} | {} |\n", case.name, case.unit, figures.join(" | "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_size_of_each_case_is_measured_and_reported() {
        let work = tempfile::tempdir().expect("a folder");
        let cases = cases();
        let lines: Vec<Line> = cases.iter().map(|case| line(work.path(), case, case.sizes[0], 1)).collect();
        assert!(lines.iter().all(|line| line.error.is_none() && line.ferry.is_some()), "{lines:?}");
        let text = markdown(&cases, &lines, &Machine::default(), 1);
        for case in &cases {
            assert!(text.contains(&format!("| {} | {} | ", case.name, case.unit)), "{text}");
        }
    }
}
