//! Lines of earlier runs: a run in parts ends in one report.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::rows::{self, Step};
use super::systems::System;
use super::{TABLE, UNIT};
use crate::line::{Line, Sent};
use crate::parts::find;
use crate::stats::Better;

/// What a line of this table may have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    table: String,
    row: String,
    config: String,
    unit: String,
    better: String,
    ferry: Option<f64>,
    peers: BTreeMap<String, f64>,
    ratio: BTreeMap<String, f64>,
    n: usize,
    spread: BTreeMap<String, [f64; 2]>,
    #[serde(default)]
    messages: BTreeMap<String, Sent>,
    note: Option<String>,
    skipped: Option<String>,
    error: Option<String>,
}

/// The lines that the report in a folder was made of; none where there is no report.
pub fn read(folder: &Path) -> Result<Vec<Line>> {
    let path = folder.join(format!("{TABLE}.jsonl"));
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let lines = (1..).zip(text.lines());
    lines.map(|(number, text)| parse(text).with_context(|| format!("{}, line {number}", path.display()))).collect()
}

fn parse(text: &str) -> Result<Line> {
    let kept: Kept = serde_json::from_str(text).context("this is no line of a run")?;
    let Kept { table, row, config, unit, better, .. } = kept;
    anyhow::ensure!(
        table == TABLE && unit == UNIT && better == "higher",
        "this is a line of {table} in {unit}, {better} is better, not of {TABLE}"
    );
    let mut line = Line::new(TABLE, row, &config, UNIT, Better::Higher);
    (line.ferry, line.peers, line.ratio, line.n, line.spread) =
        (kept.ferry, kept.peers, kept.ratio, kept.n, kept.spread);
    (line.messages, line.note, line.skipped, line.error) = (kept.messages, kept.note, kept.skipped, kept.error);
    Ok(line)
}

/// The lines of this run and, for what it had no part in, those of earlier ones, in the order of the rows.
pub fn join(earlier: &[Line], now: &[Line]) -> Vec<Line> {
    let line = |step: Step, ours: System| {
        let (row, config) = (step.name(), ours.name());
        find(now, &row, config).or_else(|| find(earlier, &row, config)).cloned()
    };
    let ours = |step: Step| step.systems().into_iter().filter(|system| system.is_ours()).map(move |ours| (step, ours));
    rows::all().into_iter().flat_map(ours).filter_map(|(step, ours)| line(step, ours)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::FERRY;

    fn line(row: &str, config: &str, value: f64) -> Line {
        let mut line = Line::new(TABLE, row.into(), config, UNIT, Better::Higher);
        line.fill(&[(FERRY.to_owned(), vec![value]), ("virtio-blk".to_owned(), vec![2.0, 1.0, 3.0])].into());
        let sent = Sent { messages_per_mib: 1.1, bytes_per_message: None, in_flight_mean: 1.5, in_flight_most: 2 };
        line.messages.insert(FERRY.into(), sent);
        line.skip("diod: no");
        line.note = Some("in a guest".into());
        line
    }

    #[test]
    fn lines_survive_being_written() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).unwrap().is_empty());
        let written = serde_json::to_string(&line("uml read 4K", "v9fs-loose", 5.0)).unwrap();
        let path = dir.path().join("v9fs.jsonl");
        std::fs::write(&path, format!("{written}\n")).unwrap();
        let lines = read(dir.path()).unwrap();
        assert_eq!(serde_json::to_string(&lines[0]).unwrap(), written);
        for wrong in ["nonsense".to_owned(), written.replace("\"v9fs\"", "\"images\""), written.replace("MiB/s", "ms")]
        {
            std::fs::write(&path, format!("{written}\n{wrong}\n")).unwrap();
            let error = format!("{:#}", read(dir.path()).unwrap_err());
            assert!(error.contains("v9fs.jsonl, line 2: this is "), "{error}");
        }
    }

    #[test]
    fn what_runs_again_replaces_what_ran() {
        let earlier = [line("uml read 4K", "v9fs-loose", 5.0), line("read 4K", "pipelined", 6.0)];
        let now = [line("qemu read 4K", "v9fs-none", 7.0), line("uml read 4K", "v9fs-loose", 8.0)];
        let joined: Vec<_> = join(&earlier, &now).into_iter().map(|line| (line.row, line.ferry)).collect();
        let expected = [("read 4K", 6.0), ("uml read 4K", 8.0), ("qemu read 4K", 7.0)];
        assert_eq!(joined, expected.map(|(row, value)| (row.to_owned(), Some(value))));
    }
}
