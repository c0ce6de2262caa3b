//! A line on standard error that says where the run is.

use std::io::{IsTerminal, Write};
use std::time::Instant;

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

    /// On a terminal, says what is being done.
    pub fn show(&self, what: &str) {
        if self.terminal {
            eprint!("\r\x1b[K{what}");
            let _ = std::io::stderr().flush();
        }
    }

    /// A row begins.
    pub fn begin(&self, done: usize, row: &str) {
        let (rows, seconds) = (self.rows, self.started.elapsed().as_secs());
        self.show(&format!("{}/{rows} {row}, {seconds} s so far", done + 1));
    }

    /// A row has ended.
    pub fn end(&self, line: &Line) {
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
