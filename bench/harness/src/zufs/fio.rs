//! fio's command line and its answer: 4 KiB, direct and synchronous, a file for each thread.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::fio;

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
    let pattern = fio::pattern(true, job.write);
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
    let result = fio::result(output, "job")?;
    let side = fio::side(&result, job.write);
    Ok(Found {
        iops: fio::number(side, "iops")?,
        kib_s: fio::number(side, "bw")?,
        latency_us: fio::number(&side["lat_ns"], "mean")? / 1000.0,
        requests: fio::number(side, "total_ios")?,
        switches: fio::number(&result, "ctx")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Job = Job { write: true, threads: 4, file_mib: 32, length: Length::Time(Duration::from_millis(700)) };

    #[test]
    fn jobs_match_their_row() {
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
            {"jobs": [{"jobname": "job", "error": 0, "ctx": 7, "write":
                {"iops": 1000.5, "bw": 4002, "total_ios": 100, "lat_ns": {"mean": 2500.0}}}]}"#;
        let found = parse(JOB, text).unwrap();
        assert_eq!(found, Found { iops: 1000.5, kib_s: 4002.0, latency_us: 2.5, requests: 100.0, switches: 7.0 });
    }
}
