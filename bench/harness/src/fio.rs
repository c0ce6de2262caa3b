//! fio's command line and its output.

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
    format!(
        "{fio} --name=job --size={FILE_MIB}M {} --time_based --runtime={}ms --ramp_time={RAMP_MS}ms {COMMON}",
        access(job),
        runtime.as_millis(),
        fio = crate::cli::shell_word(fio),
    )
}

/// What all jobs have in common.
const COMMON: &str = "--thread --group_reporting --fallocate=none --randseed=1 --output-format=json";

/// How a job accesses its files.
fn access(job: Job) -> String {
    // The published runs: libaio direct, the others not.
    let engine = match job.engine {
        Engine::Psync => "psync".to_owned(),
        Engine::Mmap => "mmap".to_owned(),
        Engine::Libaio => format!("libaio --direct=1 --iodepth={IODEPTH}"),
    };
    let jobs = if job.multi { MULTI_JOBS } else { 1 };
    format!(
        "--filename_format='fio.$jobnum' --bs=4k --rw={} --ioengine={engine} --numjobs={jobs}",
        pattern(job.random, job.write)
    )
}

/// The command that runs a job once over its files of so many MiB, in one directory after the other: each part is named as its
/// directory, begins with empty caches, and ends after `runtime` if it is not done before. What was written is with the
/// server when it ends.
pub fn once(fio: &Path, job: Job, dirs: &[(String, String)], file_mib: u64, runtime: Duration) -> String {
    let mut line = format!("{} {COMMON}", crate::cli::shell_word(fio));
    let sync = if job.write { " --end_fsync=1" } else { "" };
    for (name, dir) in dirs {
        // A part of its own: each job of a multi row would empty them again while others already run.
        line.push_str(&format!(
            " --name=before-{name} --stonewall --ioengine=null --rw=read --size=4k --exec_prerun='{DROP_CACHES}' \
             --name={name} --stonewall --directory={dir} --size={file_mib}M {}{sync} --runtime={}ms",
            access(job),
            runtime.as_millis()
        ));
    }
    line
}

/// Empties the guest's caches of files, names and inodes.
const DROP_CACHES: &str = "echo 3 >/proc/sys/vm/drop_caches";

/// The bandwidth in MiB/s out of fio's JSON.
pub fn bandwidth(job: Job, output: &str) -> Result<f64> {
    bandwidth_of(job, "job", output)
}

/// The same of a part by its name.
pub fn bandwidth_of(job: Job, name: &str, output: &str) -> Result<f64> {
    let result = result(output, name)?;
    Ok(number(side(&result, job.write), "bw_bytes")? / f64::from(1 << 20))
}

/// What the job of a name found, in fio's JSON.
pub fn result(output: &str, name: &str) -> Result<Value> {
    // Warnings come before it.
    let begin = output.find('{').context("fio printed no JSON")?;
    let mut values = serde_json::Deserializer::from_str(&output[begin..]).into_iter::<Value>();
    let mut json = values.next().context("fio printed no JSON")?.context("fio's JSON is broken")?;
    let mut jobs = json["jobs"].as_array_mut().map(std::mem::take).unwrap_or_default().into_iter();
    let result = jobs.find(|job| job["jobname"] == name).context("fio's JSON does not have the job")?;
    if let Some(error) = result["error"].as_i64().filter(|&error| error != 0) {
        bail!("fio met errno {error}");
    }
    Ok(result)
}

/// The half of a job's result that is about its writes or its reads.
pub fn side(result: &Value, write: bool) -> &Value {
    &result[if write { "write" } else { "read" }]
}

/// A figure of a result by its name.
pub fn number(result: &Value, name: &str) -> Result<f64> {
    result[name].as_f64().with_context(|| format!("fio's JSON has no {name}"))
}

/// What fio calls a pattern.
pub fn pattern(random: bool, write: bool) -> &'static str {
    match (random, write) {
        (false, false) => "read",
        (false, true) => "write",
        (true, false) => "randread",
        (true, true) => "randwrite",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: Job = Job { random: true, write: true, engine: Engine::Libaio, multi: true };

    #[test]
    fn jobs_match_their_row() {
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
    fn parts_begin_with_empty_caches() {
        let dirs = [("a".to_owned(), "/m/a".to_owned()), ("b".to_owned(), "/m/b".to_owned())];
        let line = once(Path::new("/x/fio"), JOB, &dirs, 7, Duration::from_millis(700));
        let (before, after) = line.split_once(" --name=a ").unwrap();
        assert!(before.ends_with("--exec_prerun='echo 3 >/proc/sys/vm/drop_caches'"), "{before}");
        for word in
            ["--directory=/m/a --size=7M", "--end_fsync=1 --runtime=700ms", "--name=b --stonewall --directory=/m/b"]
        {
            assert!(after.contains(word), "{word} in {after}");
        }
    }

    #[test]
    fn reads_fio() {
        let text = r#"fio: a warning
            {"jobs": [{"jobname": "a", "error": 5}, {"jobname": "c", "error": 0, "read": {"iops": 1}},
                {"jobname": "job", "error": 0, "write": {"bw_bytes": 2097152}, "read": {"bw_bytes": 0}}]}"#;
        assert_eq!(bandwidth(JOB, text).unwrap(), 2.0);
        for (name, text, error) in [
            ("a", "fio: no", "no JSON"),
            ("a", text, "errno 5"),
            ("c", text, "no bw_bytes"),
            ("d", text, "does not have the job"),
        ] {
            let found = result(text, name).and_then(|result| number(side(&result, true), "bw_bytes"));
            assert!(found.unwrap_err().to_string().contains(error), "{text}");
        }
    }
}
