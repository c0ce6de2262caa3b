//! fio's command line and its answer.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::rows::{Engine, Job};

/// The size of each file.
pub const FILE_MIB: u64 = 128;
/// Jobs of a `multi` row, each with a file of its own.
pub const MULTI_JOBS: usize = 4;
/// Requests in flight of libaio.
const IODEPTH: u32 = 16;
/// What is done before the measured time begins.
const RAMP_MS: u64 = 200;

/// The file of job `number`.
pub fn file_name(number: usize) -> String {
    format!("fio.{number}")
}

/// The command that runs a job in the current directory.
pub fn command(fio: &Path, job: Job, runtime: Duration) -> String {
    let pattern = match (job.random, job.write) {
        (false, false) => "read",
        (false, true) => "write",
        (true, false) => "randread",
        (true, true) => "randwrite",
    };
    // The published runs: libaio direct, the others not.
    let engine = match job.engine {
        Engine::Psync => "psync".to_owned(),
        Engine::Mmap => "mmap".to_owned(),
        Engine::Libaio => format!("libaio --direct=1 --iodepth={IODEPTH}"),
    };
    let jobs = if job.multi { MULTI_JOBS } else { 1 };
    format!(
        "{fio} --name=job --filename_format='fio.$jobnum' --size={FILE_MIB}M --bs=4k --rw={pattern} --ioengine={engine} \
         --numjobs={jobs} --thread --group_reporting --time_based --runtime={}ms --ramp_time={RAMP_MS}ms \
         --fallocate=none --randseed=1 --output-format=json",
        runtime.as_millis(),
        fio = crate::shell_word(fio),
    )
}

/// The bandwidth in MiB/s out of fio's JSON.
pub fn bandwidth(job: Job, output: &str) -> Result<f64> {
    // Warnings come before it.
    let begin = output.find('{').context("fio printed no JSON")?;
    let mut values = serde_json::Deserializer::from_str(&output[begin..]).into_iter::<Value>();
    let json = values.next().context("fio printed no JSON")?.context("fio's JSON is broken")?;
    let result = &json["jobs"][0];
    if let Some(error) = result["error"].as_i64().filter(|&error| error != 0) {
        bail!("fio met errno {error}");
    }
    let side = &result[if job.write { "write" } else { "read" }];
    let bytes = side["bw_bytes"].as_f64().context("fio's JSON has no bandwidth")?;
    Ok(bytes / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Job = Job { random: true, write: true, engine: Engine::Libaio, multi: true };

    #[test]
    fn asks_for_what_the_row_says() {
        let line = command(Path::new("/x/fio"), JOB, Duration::from_millis(700));
        for word in [
            "'/x/fio' ",
            "--rw=randwrite",
            "--ioengine=libaio --direct=1 --iodepth=16",
            "--numjobs=4",
            "--runtime=700ms",
        ] {
            assert!(line.contains(word), "{word} in {line}");
        }
    }

    #[test]
    fn reads_fio() {
        let text = r#"fio: a warning
            {"jobs": [{"error": 0, "write": {"bw_bytes": 2097152}, "read": {"bw_bytes": 0}}]}"#;
        assert_eq!(bandwidth(JOB, text).unwrap(), 2.0);
        assert!(bandwidth(JOB, "fio: no").is_err());
        assert!(bandwidth(JOB, r#"{"jobs": [{"error": 5}]}"#).unwrap_err().to_string().contains("errno 5"));
    }
}
