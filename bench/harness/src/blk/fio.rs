//! fio's command line for a disk, and its output.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;

use super::rows::Step;
use crate::fio;

/// How much of a disk is used: all of it, or nearly.
pub const USED_MIB: u64 = 64;
/// What is done before the measured time begins.
const RAMP_MS: u64 = 100;

/// How fio makes its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// As the published runs did, in guests.
    Libaio,
    /// For the bare file.
    Uring,
}

/// The words after fio's own name that run a step on disks or files, one after the other, each job by its name.
pub fn arguments(
    step: Step,
    engine: Engine,
    direct: bool,
    targets: &[(String, PathBuf)],
    runtime: Duration,
) -> Vec<String> {
    let engine = if engine == Engine::Uring { "io_uring" } else { "libaio" };
    let pattern = fio::pattern(step.random, step.write);
    // Not invalidated: what the page cache has is to stay there.
    let mut words: Vec<String> = "--thread --time_based --invalidate=0 --fallocate=none --randseed=1 \
                                  --output-format=json"
        .split_whitespace()
        .map(str::to_owned)
        .collect();
    words.extend([
        format!("--ioengine={engine}"),
        format!("--direct={}", u8::from(direct)),
        format!("--rw={pattern}"),
        format!("--bs={}", step.block),
        format!("--iodepth={}", step.depth),
        format!("--size={USED_MIB}M"),
        format!("--runtime={}ms", runtime.as_millis()),
        format!("--ramp_time={RAMP_MS}ms"),
    ]);
    for (name, path) in targets {
        words.extend([format!("--name={name}"), "--stonewall".into(), format!("--filename={}", path.display())]);
    }
    words
}

/// One run of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Requests per second.
    pub iops: f64,
    /// The mean time from a request to its answer.
    pub latency_us: f64,
}

/// What a job found, from fio's JSON.
pub fn parse(step: Step, name: &str, output: &str) -> Result<Sample> {
    let result = fio::result(output, name)?;
    let side = fio::side(&result, step.write);
    // From submission to completion, both included: what is answered at once has no completion time of its own.
    Ok(Sample { iops: fio::number(side, "iops")?, latency_us: fio::number(&side["lat_ns"], "mean")? / 1000.0 })
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;

    fn step() -> Step {
        rows::all().into_iter().find(|step| step.name() == "uml random write 4K depth 32").unwrap()
    }

    #[test]
    fn jobs_match_their_row() {
        let targets = [("a".to_owned(), "/dev/vdb".into()), ("b".to_owned(), "/dev/vda".into())];
        let words = arguments(step(), Engine::Libaio, true, &targets, Duration::from_millis(600)).join("|");
        for word in [
            "|--ioengine=libaio|--direct=1|--rw=randwrite|--bs=4096|--iodepth=32|",
            "=600ms",
            "|--name=a|--stonewall|--filename=/dev/vdb|--name=b|--stonewall|--filename=/dev/vda",
        ] {
            assert!(words.contains(word), "{word} in {words}");
        }
    }

    #[test]
    fn reads_fio() {
        let text = r#"{"jobs": [{"jobname": "b", "error": 0, "write": {"iops": 1000.5, "lat_ns": {"mean": 2500.0}}}]}"#;
        assert_eq!(parse(step(), "b", text).unwrap(), Sample { iops: 1000.5, latency_us: 2.5 });
    }
}
