//! Malformed input: each piece gets an error or a dropped chain, the next good request works, and nothing leaks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::time::Duration;

use ferry_driver::hostile;
use ferry_tests::{Cache, Process, Share, alone};

/// What the first connections allocate for good: thread stacks and allocator arenas.
const MORE_KIB: u64 = 32 << 10;

fn run_table(race: Duration) {
    let _alone = alone();
    let share = Share::new(Cache::Auto);
    let options = hostile::Options { drop_after: Duration::from_millis(100), race, ..hostile::Options::default() };
    let mut cases = hostile::cases();
    // To look into one case: FERRY_HOSTILE=ring/ cargo test ...
    if let Ok(wanted) = std::env::var("FERRY_HOSTILE") {
        cases.retain(|case| case.name.contains(&wanted));
    }
    // The first case warms up what stays.
    let _ = hostile::run(&cases[0], &share.socket, &options);
    share.assert_released();
    let before = Process::now();
    let mut failures = Vec::new();
    for case in &cases {
        let outcome = hostile::run(case, &share.socket, &options);
        if !outcome.passed {
            failures.push(format!("{}: {}", outcome.name, outcome.problem.unwrap_or_default()));
        }
    }
    assert!(failures.is_empty(), "{} of {} cases failed:\n{}", failures.len(), cases.len(), failures.join("\n"));
    share.assert_released();
    before.assert_back(MORE_KIB);
    println!("{} cases", cases.len());
}

#[test]
fn every_malformed_input_is_survived() {
    run_table(Duration::from_millis(300));
}

#[test]
#[ignore = "long: make test-all"]
fn every_malformed_input_is_survived_with_long_races() {
    run_table(Duration::from_secs(20));
}
