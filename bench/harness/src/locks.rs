//! The locks table: the cost of each operation of the lock table, by the number of locks and waiting requests.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ferry_vfs::{
    Caller, Handle, Handles, Ino, Lock, LockKind, LockOutcome, LockOwner, Locks, OFlags, SessionId, Waiter,
};

use crate::cli::Cli;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::parts;
use crate::progress::Progress;
use crate::stats::Better;

/// The table's name.
const TABLE: &str = "locks";
/// What the lines are about: no server stands between.
const CONFIG: &str = "vfs";
/// Runs of each row.
const RUNS: usize = 5;
/// How many locks there are; a tenth as many requests wait.
const SIZES: [u64; 3] = [1_000, 10_000, 100_000];
/// A client may have half as many owners as the largest of these.
const CLIENTS: u64 = 8;
const INO: Ino = Ino(7);
/// Owners of requests that wait have a lock there, so that whether they close a ring has to be looked at.
const ELSEWHERE: u64 = 1 << 40;

/// Bytes that are locked or waited for, first and last.
type Place = fn(u64) -> (u64, u64);

/// A way in which locks and requests lie.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    held: Place,
    wanted: Place,
}

const CASES: [Case; 3] = [
    Case { name: "one range", held: |_| (0, 9), wanted: |_| (0, 9) },
    Case { name: "ranges of any length from one byte on", held: |_| (0, 9), wanted: |id| (0, id) },
    Case { name: "records apart", held: |id| (10 * id, 10 * id + 9), wanted: |id| (10 * id, 10 * id + 9) },
];

/// Requests that wait below a lock of all, each for another one, too: no client may have more of them, nor may all together have 100,000.
const BELOW: [u64; 3] = [1_000, 10_000, 50_000];
/// What is done with that lock.
const BELOW_STEPS: [&str; 2] = ["unlock for the first time", "lock and unlock again"];

/// What is done with each lock or request, in this order.
const STEPS: [&str; 5] = ["lock", "wait", "test", "unlock one of many", "unlock the last and wake one"];

/// Clients that have one file open.
struct Table {
    locks: Locks<OFlags>,
    handles: Handles<OFlags>,
    clients: Vec<(Caller<'static>, Handle)>,
    woken: Arc<AtomicU64>,
}

impl Table {
    fn new() -> Result<Self> {
        let handles = Handles::default();
        let client = |_| {
            let session = SessionId::unique();
            Ok((Caller { session, ..Caller::default() }, handles.insert(session, INO, OFlags::RDWR)?))
        };
        let clients = (0..CLIENTS).map(client).collect::<Result<_>>()?;
        Ok(Self { locks: Locks::default(), handles, clients, woken: Arc::default() })
    }

    fn request(&self, kind: LockKind, id: u64, (start, end): (u64, u64)) -> (Caller<'static>, Handle, Lock) {
        let (cx, handle) = self.clients[usize::try_from(id % CLIENTS).unwrap_or_default()];
        let owner = LockOwner { session: cx.session, id };
        (cx, handle, Lock { kind, owner, start, end, pid: 1, flock: false })
    }

    fn set(&self, kind: LockKind, id: u64, place: (u64, u64), waits: bool) -> Result<LockOutcome> {
        let (cx, handle, lock) = self.request(kind, id, place);
        let waiter = waits.then(|| {
            let woken = Arc::clone(&self.woken);
            Waiter::new(move |outcome| {
                woken.fetch_add(u64::from(outcome.is_ok()), Ordering::Relaxed);
            })
        });
        Ok(self.locks.set(&self.handles, &cx, (INO, handle), &lock, waiter, |_| Ok(()))?)
    }

    fn unlock(&self, id: u64) -> Result<()> {
        ensure!(self.set(LockKind::Unlock, id, (0, u64::MAX), false)? == LockOutcome::Done, "an unlock waits");
        Ok(())
    }
}

/// Does something for each of some numbers; returns nanoseconds for each.
fn each(ids: std::ops::Range<u64>, mut run: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let count = u32::try_from(ids.end - ids.start)?;
    let begin = Instant::now();
    ids.into_iter().try_for_each(&mut run)?;
    Ok(begin.elapsed().as_secs_f64() * 1e9 / f64::from(count))
}

/// One run: the cost of each of [`STEPS`].
fn measure(case: &Case, size: u64) -> Result<[f64; STEPS.len()]> {
    let waiters = size / 10;
    let table = Table::new()?;
    let lock = each(0..size, |id| table.set(LockKind::Read, id, (case.held)(id), false).map(drop))?;
    each(size..size + waiters, |id| table.set(LockKind::Read, id, (ELSEWHERE + id, ELSEWHERE + id), false).map(drop))?;
    let wait = each(0..waiters, |id| {
        ensure!(
            table.set(LockKind::Write, size + id, (case.wanted)(id), true)? == LockOutcome::Waiting,
            "it does not wait"
        );
        Ok(())
    })?;
    let test = each(0..size, |id| {
        let (cx, handle, lock) = table.request(LockKind::Write, id, (case.wanted)(id % waiters));
        ensure!(table.locks.get(&table.handles, &cx, (INO, handle), &lock).is_ok(), "it cannot be tested");
        Ok(())
    })?;
    // Those that somebody waits for, and nobody else has: the last of all, or each.
    let last = if (case.held)(0) == (case.held)(1) { size - 1..size } else { 0..waiters };
    let rest = if last.start == 0 { waiters..size } else { 0..size - 1 };
    let unlock = each(rest, |id| table.unlock(id))?;
    ensure!(table.woken.load(Ordering::Relaxed) == 0, "somebody was woken too soon");
    let begin = Instant::now();
    last.clone().try_for_each(|id| table.unlock(id))?;
    (size..size + waiters).try_for_each(|id| table.unlock(id))?;
    let wake = begin.elapsed().as_secs_f64() * 1e9 / f64::from(u32::try_from(waiters)?);
    ensure!(table.woken.load(Ordering::Relaxed) == waiters, "not all were woken");
    Ok([lock, wait, test, unlock, wake])
}

/// One run of a lock of all below which so many wait: the cost of each of [`BELOW_STEPS`].
fn measure_below(size: u64) -> Result<[f64; BELOW_STEPS.len()]> {
    let table = Table::new()?;
    let (over, record) = (2 * size, |id: u64| (10 * id, 10 * id + 9));
    table.set(LockKind::Read, over, (0, u64::MAX), false).map(drop)?;
    each(0..size, |id| table.set(LockKind::Read, id, record(id), false).map(drop))?;
    each(0..size, |id| {
        ensure!(table.set(LockKind::Write, size + id, record(id), true)? == LockOutcome::Waiting, "it does not wait");
        Ok(())
    })?;
    let first = each(0..1, |_| table.unlock(over))?;
    let again = each(0..100, |_| {
        table.set(LockKind::Read, over, (0, u64::MAX), false).map(drop)?;
        table.unlock(over)
    })?;
    ensure!(table.woken.load(Ordering::Relaxed) == 0, "somebody was woken too soon");
    Ok([first, again])
}

/// One row: a case with so many locks; without a case, a lock of all below which so many wait.
type Row = (Option<&'static Case>, u64);

fn name((case, size): &Row) -> String {
    match case {
        Some(case) => format!("{}, {size} locks", case.name),
        None => format!("records apart below a lock of all, {size} requests"),
    }
}

/// The lines of one row.
fn lines(row: &Row, runs: usize) -> Vec<Line> {
    match *row {
        (Some(case), size) => {
            let name = |step| format!("{}: {step}, {size} locks", case.name);
            lines_of(&STEPS.map(name), (0..runs).map(|_| measure(case, size)).collect())
        }
        (None, size) => {
            let name = |step| format!("records apart below a lock of all: {step}, {size} requests");
            lines_of(&BELOW_STEPS.map(name), (0..runs).map(|_| measure_below(size)).collect())
        }
    }
}

/// A line for each step, of the outcomes of all runs.
fn lines_of<const N: usize>(rows: &[String; N], outcomes: Result<Vec<[f64; N]>>) -> Vec<Line> {
    let line = |number: usize| {
        let row = rows[number].clone();
        let mut line = Line::new(TABLE, row, CONFIG, "ns", Better::Lower);
        match &outcomes {
            Ok(outcomes) => {
                let values = outcomes.iter().map(|outcome| outcome[number]).collect();
                line.fill(&BTreeMap::from([(FERRY.to_owned(), values)]));
            }
            Err(error) => line.fail(&format!("{error:#}")),
        }
        line
    };
    (0..N).map(line).collect()
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let all = CASES.iter().flat_map(|case| SIZES.map(|size| (Some(case), size)));
    let all = all.chain(BELOW.map(|size| (None, size)));
    let rows: Vec<Row> = all.filter(|row| cli.rows.as_ref().is_none_or(|regex| regex.is_match(&name(row)))).collect();
    if let Some(code) = cli.listed(TABLE, rows.iter().map(name)) {
        return Ok(code);
    }
    let runs = if cli.quick { 2 } else { RUNS };
    let machine = Machine::look(&cli.work, None, None);
    let progress = Progress::new(rows.len());
    let lines = progress.measure(&rows, name, &[], |row| lines(row, runs))?;
    if let Some(directory) = cli.results() {
        let machine = Machine { command: crate::cli::command(), ..machine };
        write(&directory, &lines, &machine, runs)?;
    }
    Ok(crate::cli::verdict(&lines))
}

/// Writes the report of a full run into a directory.
pub fn write_full(directory: &Path, lines: &[Line], machine: &Machine) -> Result<()> {
    write(directory, lines, machine, RUNS)
}

fn write(directory: &Path, lines: &[Line], machine: &Machine, runs: usize) -> Result<()> {
    let json: Result<Vec<String>, _> = lines.iter().map(serde_json::to_string).collect();
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let put = |ending: &str, text: String| {
        let path = directory.join(format!("{TABLE}.{ending}"));
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    put("jsonl", json?.join("\n") + "\n")?;
    put("md", markdown(lines, machine, runs) + &parts::notes(directory, TABLE)?)
}

fn markdown(lines: &[Line], machine: &Machine, runs: usize) -> String {
    let Machine { cpu, cpus, kernel, ferry, command, date, .. } = machine;
    let mut out = String::from("# What locks cost\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}. {runs} runs of each; medians of the time for \
         one operation, with the least and the greatest in brackets.\n\n\
         The table of locks of one file (`ferry-vfs`), without server or client. Read locks are held, each by an owner of its own; a tenth as \
         many others wait for write locks, each of whom has a lock elsewhere, too. `unlock one of many`: nobody can go on yet. `unlock the last \
         and wake one`: who is woken unlocks, and wakes the next. Below a lock of all as many wait as there are locks: each for its own \
         and for that one, which is unlocked.\n"
    );
    for case in &CASES {
        let row = |step: &str, size: u64| format!("{}: {step}, {size} locks", case.name);
        let sizes = SIZES.map(|size| format!("{size} locks, {} wait", size / 10));
        out.push_str(&section(lines, case.name, &STEPS, (SIZES, sizes), row));
    }
    let row = |step: &str, size: u64| format!("records apart below a lock of all: {step}, {size} requests");
    let sizes = BELOW.map(|size| format!("{size} locks, {size} wait"));
    out.push_str(&section(lines, "records apart below a lock of all", &BELOW_STEPS, (BELOW, sizes), row));
    out.truncate(out.trim_end().len());
    out + "\n"
}

/// A case: its steps by its sizes.
fn section(
    lines: &[Line],
    name: &str,
    steps: &[&str],
    (sizes, titles): ([u64; 3], [String; 3]),
    row: impl Fn(&str, u64) -> String,
) -> String {
    let mut out = format!("## {name}\n\n| | unit | {} |\n| --- | --- | --- | --- | --- |\n", titles.join(" | "));
    for step in steps {
        let found = sizes.map(|size| parts::find(lines, &row(step, size), CONFIG));
        let unit = found.iter().flatten().next().map_or("-", |line| &*line.unit);
        let figures = found.map(|line| line.map_or("-".into(), |line| parts::figure(line, FERRY))).join(" | ");
        let _ = writeln!(out, "| {step} | {unit} | {figures} |");
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_wakes_all_and_has_a_place_in_the_report() {
        let rows = CASES.iter().map(Some).chain([None]).map(|case| (case, 1_000));
        let lines: Vec<Line> = rows.flat_map(|row| lines(&row, 1)).collect();
        assert!(lines.iter().all(|line| line.error.is_none() && line.ferry.is_some()), "{lines:?}");
        let text = markdown(&lines, &Machine::default(), 1);
        assert_eq!(text.matches("| unlock the last and wake one | ns | ").count(), CASES.len(), "{text}");
        assert_eq!(text.matches("| unlock for the first time | ns | ").count(), 1, "{text}");
    }
}
