//! fio's command line for a file, and its answer.

use std::time::Duration;

use anyhow::Result;

use super::rows::Step;
use super::systems::{System, Way};
use crate::fio;

/// The size of each file, all of which a run reads or writes unless its time is over before.
pub const FILE_MIB: u64 = 64;

/// What is shorter than this goes page by page.
const PAGES_BYTES: usize = 64 << 10;

/// Of a row whose bytes go to the server one page at a time so many MiB are written, or else the fsync at the end of a run
/// takes minutes: each page takes a round trip. These take a second to five.
const fn paged_mib(delay_ms: u64) -> u64 {
    match delay_ms {
        0 => 16,
        1 => 2,
        _ => 1,
    }
}

/// How many MiB a run of a row reads or writes at most.
pub fn most_mib(step: Step, system: System) -> u64 {
    let by_pages = system == System::Client(Way::PageAtATime);
    // Nothing can be coalesced, and with a delay it takes everybody a while.
    let scattered = step.random && step.block < PAGES_BYTES && step.delay_ms > 0;
    if step.write && (by_pages || scattered) { paged_mib(step.delay_ms) } else { FILE_MIB }
}

/// A file to read or write.
#[derive(Debug, Clone)]
pub struct Job {
    /// Its name in the results.
    pub name: String,
    /// Where.
    pub file: String,
    /// What is done before: caches are emptied.
    pub before: Option<String>,
    /// How much of it, at most; see [`most_mib`].
    pub most_mib: u64,
}

/// The words after fio's own name that run a row on files, one after the other.
///
/// Every byte is with the server when a run ends: a written file is synced, within the time that counts.
pub fn arguments(step: Step, jobs: &[Job], runtime: Duration) -> Vec<String> {
    let mut words: Vec<String> =
        "--thread --ioengine=psync --fallocate=none --randseed=1 --end_fsync=1 --output-format=json"
            .split_whitespace()
            .map(str::to_owned)
            .collect();
    words.extend([
        format!("--rw={}", fio::pattern(step.random, step.write)),
        format!("--bs={}", step.block),
        format!("--size={FILE_MIB}M"),
        format!("--runtime={}ms", runtime.as_millis()),
    ]);
    for Job { name, file, before, most_mib } in jobs {
        words.extend([format!("--name={name}"), "--stonewall".into(), format!("--filename={file}")]);
        words.push(format!("--io_size={most_mib}M"));
        words.extend(before.as_ref().map(|before| format!("--exec_prerun={before}")));
    }
    words
}

/// What a run found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Its rate in MiB/s.
    pub rate: f64,
    /// How much it read or wrote.
    pub mib: f64,
}

/// What a job found, from fio's JSON.
pub fn parse(step: Step, name: &str, output: &str) -> Result<Sample> {
    let result = fio::result(output, name)?;
    let side = fio::side(&result, step.write);
    let mib = |name: &str| Ok::<f64, anyhow::Error>(fio::number(side, name)? / f64::from(1 << 20));
    Ok(Sample { rate: mib("bw_bytes")?, mib: mib("io_bytes")? })
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;

    fn step() -> Step {
        rows::all().into_iter().find(|step| step.name() == "random write 4K").unwrap()
    }

    #[test]
    fn jobs_match_their_row() {
        let job = |name: &str, before: Option<&str>| Job {
            name: name.into(),
            file: format!("/m/{name}"),
            before: before.map(str::to_owned),
            most_mib: 7,
        };
        let words = arguments(step(), &[job("a", None), job("b", Some("sync"))], Duration::from_millis(600)).join("|");
        for part in [
            "|--rw=randwrite|--bs=4096|--size=64M|--runtime=600ms|",
            "|--name=a|--stonewall|--filename=/m/a|--io_size=7M|",
            "|--name=b|--stonewall|--filename=/m/b|--io_size=7M|--exec_prerun=sync",
        ] {
            assert!(words.contains(part), "{part} in {words}");
        }
    }

    #[test]
    fn page_sized_writes_are_limited_in_time() {
        for step in rows::all() {
            for system in step.systems() {
                let mib = most_mib(step, system);
                let pages = mib * 256;
                let is_paged = system == System::Client(Way::PageAtATime) || step.name().contains("random write 4K");
                assert!(!is_paged || !step.write || pages * 2 * step.delay_ms <= 6000, "{}", step.name());
                assert!(mib << 20 >= step.block as u64 && mib <= FILE_MIB, "{}", step.name());
            }
        }
    }

    #[test]
    fn reads_fio() {
        let text = r#"{"jobs": [{"jobname": "a", "error": 0, "write": {"bw_bytes": 3145728, "io_bytes": 1048576}}]}"#;
        assert_eq!(parse(step(), "a", text).unwrap(), Sample { rate: 3.0, mib: 1.0 });
    }
}
