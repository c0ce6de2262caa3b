//! fio's command line and its answer: 4 KiB, direct and synchronous, a file for each thread.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The size of each file on the host.
pub const FILE_MIB: u64 = 32;
const BLOCK_KIB: u64 = 4;
/// What is done before the measured time begins.
const RAMP_MS: u64 = 100;

/// How long a job lasts.
#[derive(Debug, Clone, Copy)]
pub enum Length {
    /// So long.
    Time(Duration),
    /// So many requests in each thread.
    Requests(u64),
}

/// A job.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Writes rather than reads.
    pub write: bool,
    /// Threads, each with its file.
    pub threads: usize,
    /// The size of each file.
    pub file_mib: u64,
    /// How long.
    pub length: Length,
}

/// The file of thread `number`.
pub fn file_name(number: usize) -> String {
    format!("fio.{number}")
}

/// The words after fio's own name that run a job in `dir`.
pub fn arguments(job: Job, dir: &Path) -> Vec<String> {
    let pattern = if job.write { "randwrite" } else { "randread" };
    let mut words: Vec<String> = "--name=job --filename_format=fio.$jobnum --ioengine=psync --direct=1 --sync=1 \
                                  --thread --group_reporting --fallocate=none --randseed=1 --output-format=json"
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    words.push(format!("--directory={}", dir.display()));
    words.push(format!("--bs={BLOCK_KIB}k"));
    words.push(format!("--size={}M", job.file_mib));
    words.push(format!("--rw={pattern}"));
    words.push(format!("--numjobs={}", job.threads));
    match job.length {
        Length::Time(time) => words.extend([
            "--time_based".into(),
            format!("--runtime={}ms", time.as_millis()),
            format!("--ramp_time={RAMP_MS}ms"),
        ]),
        // By their bytes, which may be more than the file has: then it is gone over again.
        Length::Requests(requests) => words.push(format!("--io_size={}k", requests * BLOCK_KIB)),
    }
    words
}

/// What fio found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// Requests per second.
    pub iops: f64,
    /// Bandwidth.
    pub kib_s: f64,
    /// The mean time from a request to its answer.
    pub latency_us: f64,
    /// Requests, in all.
    pub requests: f64,
    /// How often fio's threads slept or were made to yield.
    pub switches: f64,
}

/// Reads fio's JSON.
pub fn parse(job: Job, output: &str) -> Result<Found> {
    // Warnings come before it.
    let begin = output.find('{').context("fio printed no JSON")?;
    let mut values = serde_json::Deserializer::from_str(&output[begin..]).into_iter::<Value>();
    let json = values.next().context("fio printed no JSON")?.context("fio's JSON is broken")?;
    let result = &json["jobs"][0];
    if let Some(error) = result["error"].as_i64().filter(|&error| error != 0) {
        bail!("fio met errno {error}");
    }
    let side = &result[if job.write { "write" } else { "read" }];
    let number = |value: &Value, what: &str| value.as_f64().with_context(|| format!("fio's JSON has no {what}"));
    Ok(Found {
        iops: number(&side["iops"], "iops")?,
        kib_s: number(&side["bw"], "bw")?,
        latency_us: number(&side["lat_ns"]["mean"], "lat_ns")? / 1000.0,
        requests: number(&side["total_ios"], "total_ios")?,
        switches: number(&result["ctx"], "ctx")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Job = Job { write: true, threads: 4, file_mib: 32, length: Length::Time(Duration::from_millis(700)) };

    #[test]
    fn asks_for_what_the_row_says() {
        let line = arguments(JOB, Path::new("/a b")).join("|");
        for words in ["--direct=1|--sync=1", "--rw=randwrite", "--numjobs=4", "--runtime=700ms", "|--directory=/a b|"] {
            assert!(line.contains(words), "{words} in {line}");
        }
        let counted = arguments(Job { length: Length::Requests(9), write: false, ..JOB }, Path::new("/"));
        assert!(counted.contains(&"--io_size=36k".into()) && counted.contains(&"--rw=randread".into()));
    }

    #[test]
    fn reads_fio() {
        let text = r#"a warning
            {"jobs": [{"error": 0, "ctx": 7, "write":
                {"iops": 1000.5, "bw": 4002, "total_ios": 100, "lat_ns": {"mean": 2500.0}}}]}"#;
        let found = parse(JOB, text).unwrap();
        assert_eq!(found, Found { iops: 1000.5, kib_s: 4002.0, latency_us: 2.5, requests: 100.0, switches: 7.0 });
        for (text, error) in [
            ("fio: no", "no JSON"),
            (r#"{"jobs": [{"error": 5}]}"#, "errno 5"),
            (r#"{"jobs": [{"error": 0, "write": {"iops": 1}}]}"#, "no bw"),
        ] {
            assert!(parse(JOB, text).unwrap_err().to_string().contains(error), "{text}");
        }
    }
}
