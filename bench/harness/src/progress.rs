//! A line on standard error that says where the run is.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use anyhow::Result;

use crate::line::{FERRY, Line};

/// The progress of a run.
#[derive(Debug)]
pub struct Progress {
    terminal: bool,
    rows: usize,
    started: Instant,
}

impl Progress {
    /// Of a run of so many rows.
    pub fn new(rows: usize) -> Self {
        Self { terminal: std::io::stderr().is_terminal(), rows, started: Instant::now() }
    }

    /// Runs the rows of a table in turn, and prints each line of JSON as soon as it is there. `skipped` says which peers
    /// cannot run in any of them.
    pub fn measure<R>(
        &self,
        rows: &[R],
        name: impl Fn(&R) -> String,
        skipped: &[String],
        mut run: impl FnMut(&R) -> Vec<Line>,
    ) -> Result<Vec<Line>> {
        let mut lines = Vec::new();
        for (done, row) in rows.iter().enumerate() {
            self.begin(done, &name(row));
            for mut line in run(row) {
                skipped.iter().for_each(|reason| line.skip(reason));
                self.end(&line);
                let mut stdout = std::io::stdout().lock();
                writeln!(stdout, "{}", serde_json::to_string(&line)?).and_then(|()| stdout.flush())?;
                lines.push(line);
            }
        }
        Ok(lines)
    }

    /// On a terminal, says what is being done.
    pub fn show(&self, what: &str) {
        if self.terminal {
            eprint!("\r\x1b[K{what}");
            let _ = std::io::stderr().flush();
        }
    }

    /// A row begins.
    fn begin(&self, done: usize, row: &str) {
        let (rows, seconds) = (self.rows, self.started.elapsed().as_secs());
        self.show(&format!("{}/{rows} {row}, {seconds} s so far", done + 1));
    }

    /// A row has ended.
    fn end(&self, line: &Line) {
        self.show("");
        eprintln!("{}", text(line));
    }
}

fn text(line: &Line) -> String {
    let mut text = format!("{:26} {:5}", line.row, line.config);
    if let Some(ours) = line.ferry {
        text.push_str(&format!(" {FERRY} {ours} {}", line.unit));
    }
    for (name, theirs) in &line.peers {
        text.push_str(&format!(", {name} {theirs}"));
        if let Some(ratio) = line.ratio.get(name) {
            text.push_str(&format!(": {ratio:.2} times as good"));
        }
    }
    for (what, reason) in [("skipped", &line.skipped), ("error", &line.error)] {
        if let Some(reason) = reason {
            text.push_str(&format!(" [{what}: {reason}]"));
        }
    }
    text
}
