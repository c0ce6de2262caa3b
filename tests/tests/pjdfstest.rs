//! The `pjdfstest` crate's suite (POSIX system calls, 398 cases) on a share, in a guest.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::BTreeSet;

use ferry_tests::{Cache, MOUNTPOINT, Place, Share, TIMEOUT, cache_name, folder, run, suites};

/// Cases that do not run in a guest on a share, with what the suite itself says, and why that is so.
const SKIPPED: &[(&str, &str)] = &[(
    "link::link_count_max",
    "Cannot get value for LINK_MAX: the C library knows it of a few file systems by their type, FUSE is none of them",
)];

/// Cases that fail, and why. None is known to.
const FAILING: &[(&str, &str)] = &[];

/// The read-only cases remount the share, which no file may be open on for writing. In one run with the others the
/// suite itself has left some open by then (the same four cases fail on virtiofsd 1.14), so they have a run of their own.
const REMOUNTING: &str = "erofs";

const CONFIG: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = REMOUNT
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

/// The suite's lines, by their last word.
#[derive(Debug, Default)]
struct Results {
    passed: BTreeSet<String>,
    skipped: BTreeSet<String>,
    failed: BTreeSet<String>,
}

impl Results {
    fn parse(text: &str) -> Self {
        let mut results = Self::default();
        for line in text.lines() {
            let Some((name, outcome)) = line.split_once(' ').map(|(name, rest)| (name, rest.trim())) else { continue };
            let set = match outcome {
                "ok" => &mut results.passed,
                "skipped" => &mut results.skipped,
                "FAILED" => &mut results.failed,
                _ => continue,
            };
            set.insert(name.to_owned());
        }
        results
    }
}

fn run_suite(share: &Share, remount: bool) -> Results {
    let program = suites::tool("pjdfstest", "0.2.2");
    let config = folder(Place::Disk);
    let path = config.path().join("pjdfstest.toml");
    std::fs::write(&path, CONFIG.replace("REMOUNT", &remount.to_string())).unwrap();
    let (program, path) = (program.to_str().unwrap(), path.to_str().unwrap());
    let mut command = vec![program, "-c", path, "-p", MOUNTPOINT, "-s", "/dev/shm"];
    if remount {
        command.push(REMOUNTING);
    }
    let ran = run(share.guest(command), TIMEOUT);
    let results = Results::parse(&ran.out);
    let total = results.passed.len() + results.skipped.len() + results.failed.len();
    assert!(total >= if remount { 13 } else { 390 }, "the suite did not come to its end:\n{}\n{}", ran.out, ran.err);
    if !results.failed.is_empty() {
        println!("{}", ran.out);
    }
    results
}

fn conforms(cache: Cache) {
    let share = Share::new(cache);
    let main = run_suite(&share, false);
    let remounting = run_suite(&share, true);
    let known = |table: &[(&str, &str)]| table.iter().map(|(name, _)| (*name).to_owned()).collect::<BTreeSet<_>>();
    let apart = |name: &&String| !name.contains(REMOUNTING);
    let skipped: BTreeSet<_> = main.skipped.iter().filter(apart).cloned().collect();
    assert_eq!(skipped, known(SKIPPED), "other cases are skipped than are known to be");
    assert_eq!(main.failed, known(FAILING), "other cases fail than are known to");
    assert!(remounting.skipped.is_empty() && remounting.failed.is_empty(), "{remounting:?}");
    let passed = main.passed.len() + remounting.passed.len();
    println!("pjdfstest, cache {}: {passed} passed, {} skipped", cache_name(cache), skipped.len());
    share.assert_released();
}

#[test]
fn pjdfstest_with_cache_auto() {
    conforms(Cache::Auto);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_none() {
    conforms(Cache::None);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_always() {
    conforms(Cache::Always);
}

/// What fails on the host's own file system is the environment's fault: nothing does.
#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_on_the_host() {
    let (config, target) = (folder(Place::Disk), folder(Place::Disk));
    let path = config.path().join("pjdfstest.toml");
    std::fs::write(&path, CONFIG.replace("REMOUNT", "false")).unwrap();
    let mut command = std::process::Command::new(suites::tool("pjdfstest", "0.2.2"));
    let output = command.arg("-c").arg(&path).arg("-p").arg(target.path()).output().unwrap();
    let results = Results::parse(&String::from_utf8_lossy(&output.stdout));
    assert!(results.failed.is_empty(), "{:?}", results.failed);
    assert!(results.passed.len() > 380, "{results:?}");
}
