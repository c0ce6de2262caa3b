//! Lines of earlier runs, so that partial runs form one report.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::line::Line;
use crate::stats::Better;

/// What the rows of a table are like.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The unit of its figures.
    pub unit: &'static str,
    /// Which way they are good.
    pub better: Better,
}

/// The lines that a table's report in a directory was made of; none where there is no report. `row` knows the table's rows.
pub fn read(directory: &Path, table: &str, row: impl Fn(&str) -> Option<Row>) -> Result<Vec<Line>> {
    let path = directory.join(format!("{table}.jsonl"));
    if !path.try_exists()? {
        return Ok(Vec::new());
    }
    let is_known = |line: &Line| row(&line.row).is_some_and(|row| row.unit == line.unit && row.better == line.better);
    parse(&path, table, is_known)
}

/// The same of rows of any name, where there must be a report.
pub fn all(directory: &Path, table: &str) -> Result<Vec<Line>> {
    parse(&directory.join(format!("{table}.jsonl")), table, |_| true)
}

fn parse(path: &Path, table: &str, is_known: impl Fn(&Line) -> bool) -> Result<Vec<Line>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let line = |text: &str| {
        let line: Line = serde_json::from_str(text).context("this is no line of a run")?;
        let Line { table: of, row, unit, better, .. } = &line;
        ensure!(
            of == table && is_known(&line),
            "this is the row {row:?} of {of} in {unit}, {better:?} is better, and no row of {table}"
        );
        Ok(line)
    };
    let numbered = |(number, text)| line(text).with_context(|| format!("{}, line {number}", path.display()));
    (1..).zip(text.lines()).map(numbered).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::{FERRY, MessageCounts, Requests};

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
        line.also.insert("mount_ms".into(), [("diod".to_owned(), 4.5)].into());
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
        assert_eq!(all(dir.path(), TABLE).unwrap().len(), 1);
        assert!(all(dir.path(), "images").is_err(), "there is no report");
        for wrong in [
            "nonsense".to_owned(),
            written.replace("\"v9fs\"", "\"images\""),
            written.replace("MiB/s", "ms"),
            written.replace("\"higher\"", "\"lower\""),
            written.replace("uml read", "no row"),
            written.replace("\"n\"", "\"runs\""),
        ] {
            assert_ne!(wrong, written);
            std::fs::write(&path, format!("{written}\n{wrong}\n")).unwrap();
            let error = format!("{:#}", read(dir.path(), TABLE, row).unwrap_err());
            assert!(error.contains("v9fs.jsonl, line 2: this "), "{error}");
        }
    }
}
