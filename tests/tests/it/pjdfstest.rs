//! The `pjdfstest` crate's suite (POSIX system calls, 398 cases) on a share, in a guest.

use std::ffi::OsString;
use std::path::Path;

use ferry_tests::confined::ConfinedShare;
use ferry_tests::suites::pjdfstest::{self, Results, SKIPPED, names};
use ferry_tests::{
    Cache, GuestResult, MOUNTPOINT, Options, Place, Share, TIMEOUT, cache_name, directory, guest_on, run,
};

/// Cases that fail, and why. None is known to.
const FAILING: &[(&str, &str)] = &[];

/// With a write-back cache the guest's kernel says when a file was changed that the host has made. A guest's clock is behind the
/// host's, by as much as its boot was held up; so it is set, to a little more than what the host said last, until it is ahead: on a
/// busy machine setting it takes longer than that little.
const WITH_HOSTS_CLOCK: &str = r#"
    for ahead in 0.1 0.1 0.2 0.2 0.3 0.3 0.4; do
        : >"$1/clock"
        date -s "@$(stat -c %.3Z "$1/clock" | awk -v ahead=$ahead '{ printf "%.3f", $1 + ahead }')"
        here=$(date +%s.%3N)
        : >"$1/later"
        host=$(stat -c %.3Z "$1/later")
        rm "$1/clock" "$1/later"
        if awk -v here=$here -v host=$host 'BEGIN { exit !(here >= host) }'; then break; fi
    done
    shift
    exec "$@"
"#;

fn run_cases(share: &Share, remount: bool, only: Option<&str>) -> GuestResult {
    let config = directory(Place::Disk);
    let path = config.path().join("pjdfstest.toml");
    let mut command: Vec<OsString> = ["sh", "-euc", WITH_HOSTS_CLOCK, "sh", MOUNTPOINT].map(Into::into).to_vec();
    command.extend(pjdfstest::command(&path, Path::new(MOUNTPOINT), Path::new("/dev/shm"), remount));
    command.extend(only.map(Into::into));
    run(share.guest(command), TIMEOUT)
}

fn run_suite(share: &Share, remount: bool) -> Results {
    let ran = run_cases(share, remount, None);
    Results::parse(&ran.out, &ran.err, remount)
}

fn conforms(cache: Cache) {
    conforms_with(cache, false);
}

fn conforms_with(cache: Cache, writeback: bool) {
    let share = Share::with(Place::Disk, Options { cache, writeback, ..Options::default() });
    let mut main = run_suite(&share, false);
    main.run_racing_again(|name| run_cases(&share, false, Some(name)).status == 0);
    let remounting = run_suite(&share, true);
    let skipped = main.skipped_for_good();
    assert_eq!(skipped, names(SKIPPED), "other cases are skipped than are known to be");
    assert_eq!(main.failed, names(FAILING), "other cases fail than are known to");
    assert!(remounting.skipped.is_empty() && remounting.failed.is_empty(), "{remounting:?}");
    let passed = main.passed.len() + remounting.passed.len();
    let how = if writeback { ", written back" } else { "" };
    println!("pjdfstest, cache {}{how}: {passed} passed, {} skipped", cache_name(cache), skipped.len());
    share.assert_released();
}

#[test]
fn pjdfstest_with_cache_auto() {
    conforms(Cache::Auto);
}

/// The program in its whole sandbox.
#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_confined() {
    let mut server = ConfinedShare::start(&[]);
    let config = directory(Place::Disk);
    let cases = |remount, only: Option<&str>| {
        let path = config.path().join("pjdfstest.toml");
        let mut command = pjdfstest::command(&path, Path::new(MOUNTPOINT), Path::new("/dev/shm"), remount);
        command.extend(only.map(Into::into));
        run(guest_on(&server.socket, command), TIMEOUT)
    };
    let ran = cases(false, None);
    let mut results = Results::parse(&ran.out, &ran.err, false);
    results.run_racing_again(|name| cases(false, Some(name)).status == 0);
    assert!(server.is_alive(), "{}", server.said());
    assert_eq!(results.skipped_for_good(), names(SKIPPED), "other cases are skipped than are known to be");
    assert_eq!(results.failed, names(FAILING), "other cases fail than are known to");
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

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_metadata() {
    conforms(Cache::Metadata);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_none_and_writeback() {
    conforms_with(Cache::None, true);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_auto_written_back() {
    conforms_with(Cache::Auto, true);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_metadata_written_back() {
    conforms_with(Cache::Metadata, true);
}

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_with_cache_always_written_back() {
    conforms_with(Cache::Always, true);
}

/// What fails on the host's own file system is the environment's fault: nothing does.
#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_on_the_host() {
    let (config, target) = (directory(Place::Disk), directory(Place::Disk));
    let command =
        pjdfstest::command(&config.path().join("pjdfstest.toml"), target.path(), Path::new("/dev/shm"), false);
    let output = std::process::Command::new(&command[0]).args(&command[1..]).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let results = Results::parse(&text(&output.stdout), &text(&output.stderr), false);
    assert!(results.failed.is_empty(), "{:?}", results.failed);
    assert!(results.passed.len() > 380, "{results:?}");
}
