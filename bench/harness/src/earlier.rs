//! Lines of earlier runs, so that partial runs form one report.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::line::{Line, MessageCounts, Requests};
use crate::stats::Better;

/// What was found beside figures, in the tables that are run in parts.
const ALSO: [&str; 2] = ["mount_ms", "p99"];

/// What the rows of a table are like.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The unit of its figures.
    pub unit: &'static str,
    /// Which way they are good.
    pub better: Better,
}

/// What a line may have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedLine {
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
    also: BTreeMap<String, BTreeMap<String, f64>>,
    #[serde(default)]
    messages: BTreeMap<String, MessageCounts>,
    #[serde(default)]
    requests: BTreeMap<String, Requests>,
    note: Option<String>,
    skipped: Option<String>,
    error: Option<String>,
}

/// The lines that a table's report in a folder was made of; none where there is no report. `row` knows the table's rows.
pub fn read(folder: &Path, table: &'static str, row: impl Fn(&str) -> Option<Row>) -> Result<Vec<Line>> {
    let path = folder.join(format!("{table}.jsonl"));
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let parsed =
        |(number, text)| parse(text, table, &row).with_context(|| format!("{}, line {number}", path.display()));
    (1..).zip(text.lines()).map(parsed).collect()
}

fn parse(text: &str, table: &'static str, row: &impl Fn(&str) -> Option<Row>) -> Result<Line> {
    let mut kept: SavedLine = serde_json::from_str(text).context("this is no line of a run")?;
    let known = row(&kept.row).filter(|row| kept.table == table && kept.unit == row.unit);
    let known = known.filter(|row| serde_json::to_value(row.better).is_ok_and(|better| better == *kept.better));
    let Some(Row { unit, better }) = known else {
        let SavedLine { table: of, row, unit, better, .. } = kept;
        bail!("this is the row {row:?} of {of} in {unit}, {better} is better, and no row of {table}");
    };
    let mut line = Line::new(table, kept.row, &kept.config, unit, better);
    (line.ferry, line.peers, line.ratio, line.n, line.spread) =
        (kept.ferry, kept.peers, kept.ratio, kept.n, kept.spread);
    (line.messages, line.requests) = (kept.messages, kept.requests);
    (line.note, line.skipped, line.error) = (kept.note, kept.skipped, kept.error);
    line.also = ALSO.into_iter().filter_map(|name| Some((name, kept.also.remove(name)?))).collect();
    ensure!(kept.also.is_empty(), "this line has more beside its figures than is known");
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::FERRY;

    const TABLE: &str = "v9fs";

    fn row(name: &str) -> Option<Row> {
        name.starts_with("uml").then_some(Row { unit: "MiB/s", better: Better::Higher })
    }

    fn line(row: &str, config: &str, value: f64) -> Line {
        let mut line = Line::new(TABLE, row.into(), config, "MiB/s", Better::Higher);
        line.fill(&[(FERRY.to_owned(), vec![value]), ("virtio-blk".to_owned(), vec![2.0, 1.0, 3.0])].into());
        let sent =
            MessageCounts { messages_per_mib: 1.1, bytes_per_message: None, in_flight_mean: 1.5, in_flight_most: 2 };
        line.messages.insert(FERRY.into(), sent);
        line.also.insert("mount_ms", [("diod".to_owned(), 4.5)].into());
        line.requests.insert(FERRY.into(), Requests { per_file: 0.5, by_name: [("lookup".to_owned(), 3)].into() });
        line.skip("diod: no");
        line.note = Some("in a guest".into());
        line
    }

    #[test]
    fn lines_survive_being_written() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path(), TABLE, row).unwrap().is_empty());
        let written = serde_json::to_string(&line("uml read 4K", "v9fs-loose", 5.0)).unwrap();
        let path = dir.path().join("v9fs.jsonl");
        std::fs::write(&path, format!("{written}\n")).unwrap();
        let lines = read(dir.path(), TABLE, row).unwrap();
        assert_eq!(serde_json::to_string(&lines[0]).unwrap(), written);
        for wrong in [
            "nonsense".to_owned(),
            written.replace("\"v9fs\"", "\"images\""),
            written.replace("MiB/s", "ms"),
            written.replace("\"higher\"", "\"lower\""),
            written.replace("uml read", "no row"),
            written.replace("mount_ms", "other_ms"),
        ] {
            assert_ne!(wrong, written);
            std::fs::write(&path, format!("{written}\n{wrong}\n")).unwrap();
            let error = format!("{:#}", read(dir.path(), TABLE, row).unwrap_err());
            assert!(error.contains("v9fs.jsonl, line 2: this "), "{error}");
        }
    }
}
