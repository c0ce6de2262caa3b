//! Parts common to the reports of all tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use crate::line::{FERRY, Line};

/// The maximum number of rows that are listed for one reason why something did not run.
const ROWS_NAMED_MAX: usize = 4;

/// Writes a table's report into a directory: `TABLE.md`, `TABLE.svg` and `TABLE.jsonl`. What was written by hand about the
/// figures, in `TABLE-notes.md`, ends the first.
pub fn save(directory: &Path, table: &str, lines: &[Line], markdown: &str, svg: &str) -> Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let mut json = String::new();
    for line in lines {
        json.push_str(&serde_json::to_string(line)?);
        json.push('\n');
    }
    let markdown = format!("{markdown}{}", notes(directory, table)?);
    for (kind, content) in [("md", &*markdown), ("svg", svg), ("jsonl", &*json)] {
        let path = directory.join(format!("{table}.{kind}"));
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    eprintln!("bench/run: the report is {}", directory.join(format!("{table}.md")).display());
    Ok(())
}

/// Writes a report that has the head of the one before it: all up to its first chapter.
pub fn keep_head(directory: &Path, table: &str, write: impl FnOnce() -> Result<()>) -> Result<()> {
    let path = directory.join(format!("{table}.md"));
    let read = || std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()));
    let chapters = |text: &str| text.find("\n## ").with_context(|| format!("{} has no chapters", path.display()));
    let before = read()?;
    let head = &before[..chapters(&before)?];
    write()?;
    let after = read()?;
    let report = format!("{head}{}", &after[chapters(&after)?..]);
    std::fs::write(&path, report).with_context(|| format!("cannot write {}", path.display()))
}

/// What was written by hand about a table's figures, as the last chapter of its report.
pub fn notes(directory: &Path, table: &str) -> Result<String> {
    let path = directory.join(format!("{table}-notes.md"));
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(format!("\n### Why\n\n{text}")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The line of one of our configurations in a row.
pub fn find<'a>(lines: &'a [Line], row: &str, config: &str) -> Option<&'a Line> {
    lines.iter().find(|line| line.row == row && line.config == config)
}

/// The lines of this run and, for rows that it has no figure of, those of earlier ones, in the order of rows and configurations.
pub fn join(earlier: &[Line], now: &[Line], order: impl Iterator<Item = (String, &'static str)>) -> Vec<Line> {
    let line = |(row, config): (String, &str)| {
        let (now, earlier) = (find(now, &row, config), find(earlier, &row, config));
        now.filter(|line| line.n > 0).or(earlier).or(now).cloned()
    };
    order.filter_map(line).collect()
}

/// A median with the least and the greatest value, ours or a peer's; a dash where there is none.
pub fn figure(line: &Line, name: &str) -> String {
    let median = if name == FERRY { line.ferry } else { line.peers.get(name).copied() };
    match (median, line.spread.get(name)) {
        (Some(median), Some([least, most])) => format!("{median} [{least}, {most}]"),
        _ => "-".into(),
    }
}

/// How many times better ours is, bold; a dash where that is not known.
pub fn ratio(line: Option<&Line>, peer: &str) -> String {
    line.and_then(|line| line.ratio.get(peer)).map_or("-".into(), |ratio| format!("**{ratio:.2}**"))
}

/// The notes of some lines, each once, with the rows that they belong to.
pub fn line_notes(out: &mut String, lines: &[&Line]) {
    let mut notes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for line in lines {
        let rows = line.note.as_ref().map(|note| notes.entry(note).or_default());
        rows.into_iter().for_each(|rows| rows.push(&line.row));
    }
    for (note, mut rows) in notes {
        rows.dedup();
        let _ = writeln!(out, "* {}: {note}", named(&rows));
    }
}

fn named(rows: &[&str]) -> String {
    let more = rows.len().saturating_sub(ROWS_NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", rows[..rows.len().min(ROWS_NAMED_MAX)].join(", "))
}

/// The most runs that one of the lines has: what a full run of most tables asks of each of its rows.
pub fn most_runs(lines: &[Line]) -> usize {
    lines.iter().map(|line| line.n).max().unwrap_or(0)
}

/// The last chapter: where a peer whose name passes `counts` is better, which rows have fewer runs than `asked`, and what did
/// not run and why, each reason once.
pub fn shortfalls(out: &mut String, lines: &[Line], counts: impl Fn(&str) -> bool, asked: impl Fn(&Line) -> usize) {
    out.push_str("\n## Below a peer, skipped or failed\n\n");
    let before = out.len();
    for line in lines {
        for (peer, ratio) in line.ratio.iter().filter(|(peer, ratio)| counts(peer) && **ratio < 1.0) {
            let within = match (line.spread.get(FERRY), line.spread.get(peer)) {
                (Some(a), Some(b)) if a[0] <= b[1] && b[0] <= a[1] => "; the runs of both overlap",
                _ => "",
            };
            let _ = writeln!(out, "* {} ({}): {ratio:.2} of {peer}{within}", line.row, line.config);
        }
    }
    fewer_runs(out, lines, asked);
    reasons(out, lines);
    if out.len() == before {
        out.push_str("No row is below its peers, none was skipped or failed.\n");
    }
}

/// Rows that were run, but not as often as they were to.
fn fewer_runs(out: &mut String, lines: &[Line], asked: impl Fn(&Line) -> usize) {
    let mut short: BTreeMap<(usize, usize), Vec<String>> = BTreeMap::new();
    for line in lines.iter().filter(|line| line.n > 0 && line.n < asked(line)) {
        short.entry((line.n, asked(line))).or_default().push(format!("{} ({})", line.row, line.config));
    }
    for ((n, asked), rows) in short {
        let _ = writeln!(out, "* {n} of {asked} runs: {}", rows.join(", "));
    }
}

fn reasons(out: &mut String, lines: &[Line]) {
    let mut reasons: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for line in lines {
        for (what, reason) in [("error", &line.error), ("skipped", &line.skipped)] {
            let rows = reason.as_ref().map(|reason| reasons.entry((what, reason)).or_default());
            rows.into_iter().for_each(|rows| rows.push(format!("{} ({})", line.row, line.config)));
        }
    }
    for ((what, reason), rows) in reasons {
        let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
        let _ = writeln!(out, "* {what}: {reason} (in {})", named(&rows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    fn line(row: &str, ours: f64, theirs: [f64; 2]) -> Line {
        let mut line = Line::new("t", row.into(), "c", "MiB/s", Better::Higher);
        line.fill(&[(FERRY.to_owned(), vec![ours]), ("peer".to_owned(), theirs.to_vec())].into());
        line
    }

    #[test]
    fn notes_by_hand_end_the_report() {
        let dir = tempfile::tempdir().unwrap();
        let lines = [line("a", 1.0, [1.0, 1.0])];
        save(dir.path(), "t", &lines, "text\n", "<svg/>").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("t.md")).unwrap(), "text\n");
        std::fs::write(dir.path().join("t-notes.md"), "Because.\n").unwrap();
        save(dir.path(), "t", &lines, "text\n", "<svg/>").unwrap();
        let read = |kind: &str| std::fs::read_to_string(dir.path().join(format!("t.{kind}"))).unwrap();
        assert_eq!(read("md"), "text\n\n### Why\n\nBecause.\n");
        assert_eq!((read("svg").as_str(), read("jsonl").lines().count()), ("<svg/>", 1));
    }

    #[test]
    fn a_report_that_is_written_again_keeps_its_head() {
        let dir = tempfile::tempdir().unwrap();
        let lines = [line("a", 1.0, [1.0, 1.0])];
        save(dir.path(), "t", &lines, "# T\n\nbegun then\n\n## Targets\n\nold\n", "<svg/>").unwrap();
        keep_head(dir.path(), "t", || save(dir.path(), "t", &lines, "# T\n\n## Targets\n\nnew\n", "<svg/>")).unwrap();
        let text = std::fs::read_to_string(dir.path().join("t.md")).unwrap();
        assert_eq!(text, "# T\n\nbegun then\n\n## Targets\n\nnew\n");
    }

    #[test]
    fn rows_below_a_peer_are_reported_with_each_reason_once() {
        let mut lines = [line("a", 1.0, [2.0, 4.0]), line("b", 3.0, [2.0, 4.0]), line("c", 4.0, [2.0, 2.0])];
        lines.iter_mut().for_each(|line| line.skip("other: no"));
        let mut out = String::new();
        shortfalls(&mut out, &lines, |peer| peer == "peer", |_| 1);
        assert!(out.contains("\n* a (c): 0.33 of peer\n* skipped: other: no (in a (c), b (c), c (c))\n"), "{out}");
        lines[0] = line("a", 2.0, [1.0, 4.0]);
        shortfalls(&mut out, &lines[..1], |_| true, |_| 1);
        assert!(out.ends_with("* a (c): 0.80 of peer; the runs of both overlap\n"), "{out}");
        shortfalls(&mut out, &lines[..1], |_| false, |_| 1);
        assert!(out.ends_with("No row is below its peers, none was skipped or failed.\n"), "{out}");
    }

    #[test]
    fn rows_with_fewer_runs_are_reported() {
        let lines = [line("a", 1.0, [1.0, 1.0]), line("b", 1.0, [1.0, 1.0])];
        assert_eq!((most_runs(&lines), most_runs(&[])), (1, 0));
        let mut out = String::new();
        shortfalls(&mut out, &lines, |_| true, |line| if line.row == "a" { 5 } else { 1 });
        assert!(out.ends_with("\n* 1 of 5 runs: a (c)\n"), "{out}");
    }

    #[test]
    fn a_run_without_figures_replaces_none() {
        let order = || ["a", "b"].map(|row| (row.to_owned(), "c")).into_iter();
        let failed = |row: &str| {
            let mut line = Line::new("t", row.into(), "c", "MiB/s", Better::Higher);
            line.fail("no");
            line
        };
        let joined = join(&[line("a", 1.0, [1.0, 1.0])], &[failed("a"), failed("b")], order());
        assert_eq!((joined[0].ferry, joined[1].error.as_deref()), (Some(1.0), Some("no")));
        let joined = join(&[line("a", 1.0, [1.0, 1.0])], &[line("a", 2.0, [1.0, 1.0])], order());
        assert_eq!((joined[0].ferry, joined.len()), (Some(2.0), 1));
    }

    #[test]
    fn figures_have_their_spread() {
        let line = line("a", 1.0, [2.0, 4.0]);
        assert_eq!((figure(&line, FERRY), figure(&line, "peer")), ("1 [1, 1]".into(), "3 [2, 4]".into()));
        assert_eq!((figure(&line, "x"), ratio(Some(&line), "peer")), ("-".into(), "**0.33**".into()));
    }
}
