//! The result of one row: a line of JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::rows::Row;
use crate::stats::{self, Better};

/// The name of the server under test among the peers.
pub const FERRY: &str = "ferry";

/// What one row found. Its form is an interface: fields are added, never changed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// The table.
    pub table: String,
    /// The row.
    pub row: String,
    /// Our configuration.
    pub config: String,
    /// The unit of the figures.
    pub unit: String,
    /// Which way they are good.
    pub better: Better,
    /// Our median.
    pub ferry: Option<f64>,
    /// The peers' medians.
    pub peers: BTreeMap<String, f64>,
    /// How many times better ours is.
    pub ratio: BTreeMap<String, f64>,
    /// Runs of each server.
    pub n: usize,
    /// The least and the greatest value of each.
    pub spread: BTreeMap<String, [f64; 2]>,
    /// What noise does not touch, server by server.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counts: BTreeMap<String, Counts>,
    /// The same with a driver that sleeps between answers, as a guest does.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counts_asleep: BTreeMap<String, Counts>,
    /// Medians of what was found beside the figure, by name and server: latency, bandwidth.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub also: BTreeMap<String, BTreeMap<String, f64>>,
    /// What a request costs a file system of this host, server by server.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub costs: BTreeMap<String, Costs>,
    /// What was sent, client by client or server by server.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub messages: BTreeMap<String, MessageCounts>,
    /// Requests of the guest, server by server.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub requests: BTreeMap<String, Requests>,
    /// What a reader must know to read the figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why a peer could not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Costs per request.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Counts {
    /// System calls of the server, where they could be counted.
    pub syscalls_per_request: Option<f64>,
    /// How often the server's threads went to sleep and were woken.
    pub wakeups_per_request: Option<f64>,
    /// Interrupts to the guest.
    pub calls_per_request: f64,
    /// Notifications from the guest.
    pub kicks_per_request: f64,
}

/// Costs for each request of a program, on a file system of this host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Costs {
    /// System calls of the server.
    pub syscalls_per_request: f64,
    /// How often the server's threads slept or were made to yield.
    pub server_switches_per_request: f64,
    /// The same of the program.
    pub program_switches_per_request: f64,
    /// Requests from the kernel to the server, where they could be counted.
    pub fuse_requests_per_request: Option<f64>,
    /// Copies of each byte written, by construction.
    pub copies_per_byte: String,
}

/// Messages of a file protocol.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MessageCounts {
    /// Requests of any kind for each MiB of the file.
    pub messages_per_mib: f64,
    /// Bytes of the file for each request that carries some; nothing where none did.
    pub bytes_per_message: Option<f64>,
    /// Requests under way, on average while any was.
    pub in_flight_mean: f64,
    /// The most of them.
    pub in_flight_most: usize,
}

/// Requests of a guest in a run of its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Requests {
    /// For each file, without those that have no reply (FORGET, BATCH_FORGET).
    pub per_file: f64,
    /// All of them by their names, lower case.
    pub by_name: BTreeMap<String, u64>,
}

impl Line {
    /// The line of a row that has not run.
    pub fn empty(table: &str, row: &Row) -> Self {
        let line = Self::new(table, row.name.clone(), row.config.name(), row.unit(), row.better());
        Self { note: row.note(), ..line }
    }

    /// The same of any table.
    pub fn new(table: &str, row: String, config: &str, unit: &str, better: Better) -> Self {
        Self {
            table: table.into(),
            row,
            config: config.into(),
            unit: unit.into(),
            better,
            ferry: None,
            peers: BTreeMap::new(),
            ratio: BTreeMap::new(),
            n: 0,
            spread: BTreeMap::new(),
            counts: BTreeMap::new(),
            counts_asleep: BTreeMap::new(),
            also: BTreeMap::new(),
            costs: BTreeMap::new(),
            messages: BTreeMap::new(),
            requests: BTreeMap::new(),
            note: None,
            skipped: None,
            error: None,
        }
    }

    /// Takes the values of all runs, server by server.
    pub fn fill(&mut self, samples: &BTreeMap<String, Vec<f64>>) {
        self.n = samples.values().map(Vec::len).filter(|&n| n > 0).min().unwrap_or(0);
        for (name, values) in samples {
            let (Some(median), Some([least, most])) = (stats::median(values), stats::spread(values)) else { continue };
            self.spread.insert(name.clone(), [stats::round(least), stats::round(most)]);
            if name == FERRY {
                self.ferry = Some(stats::round(median));
            } else {
                self.peers.insert(name.clone(), stats::round(median));
            }
        }
        let Some(ours) = samples.get(FERRY).and_then(|values| stats::median(values)) else { return };
        for (name, values) in samples.iter().filter(|(name, _)| *name != FERRY) {
            let ratio = stats::median(values).and_then(|theirs| stats::ratio(ours, theirs, self.better));
            if let Some(ratio) = ratio {
                self.ratio.insert(name.clone(), stats::round(ratio));
            }
        }
    }

    /// Adds a reason why a peer did not run.
    pub fn skip(&mut self, reason: &str) {
        append(&mut self.skipped, reason);
    }

    /// Adds something that went wrong.
    pub fn fail(&mut self, reason: &str) {
        append(&mut self.error, reason);
    }
}

fn append(to: &mut Option<String>, reason: &str) {
    match to {
        Some(text) if text.contains(reason) => {}
        Some(text) => {
            text.push_str("; ");
            text.push_str(reason);
        }
        None => *to = Some(reason.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows;

    fn line(name: &str) -> Line {
        let row = rows::all().into_iter().find(|row| row.name == name).unwrap();
        Line::empty("virtiofs", &row)
    }

    #[test]
    fn has_the_form_that_was_agreed() {
        let mut line = line("randread-psync-multi");
        let samples = [("ferry", vec![162.0, 150.1, 170.2]), ("virtiofsd", vec![88.0, 80.3, 91.0])];
        line.fill(&samples.map(|(name, values)| (name.to_owned(), values)).into());
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "table": "virtiofs", "row": "randread-psync-multi", "config": "none", "unit": "MiB/s",
                "better": "higher", "ferry": 162.0, "peers": {"virtiofsd": 88.0}, "ratio": {"virtiofsd": 1.841},
                "n": 3, "spread": {"ferry": [150.1, 170.2], "virtiofsd": [80.3, 91.0]},
            })
        );
    }

    #[test]
    fn times_are_better_when_shorter() {
        let mut line = line("tree-create");
        let samples = [("ferry", vec![100.0]), ("virtiofsd", vec![150.0])];
        line.fill(&samples.map(|(name, values)| (name.to_owned(), values)).into());
        assert_eq!(line.ratio["virtiofsd"], 1.5);
    }

    #[test]
    fn a_peer_without_values_has_no_ratio() {
        let mut line = line("tree-create");
        let samples = [("ferry", vec![100.0]), ("virtiofsd", vec![])];
        line.fill(&samples.map(|(name, values)| (name.to_owned(), values)).into());
        line.skip("virtiofsd: no");
        line.skip("virtiofsd: no");
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!((&json["ferry"], &json["n"], &json["skipped"]), (&100.0.into(), &1.into(), &"virtiofsd: no".into()));
        assert_eq!(json["ratio"], serde_json::json!({}));
    }
}
