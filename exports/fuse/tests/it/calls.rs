//! How many system calls the ring makes for a request. Needs `strace` that may trace, and rings; otherwise passes idly.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;

use common::sources::Null;
use common::{mount, paths, plain, stay_on};
use ferry_fuse::{Cache, Options, Path};

const REQUESTS: usize = 400;
/// Of those that are beside the requests: of the first one, and where somebody was slow under the tracer's hand.
const OTHERS: usize = REQUESTS / 20;
/// On a machine that does much else, somebody is slow more often than not.
const TRIES: usize = 5;

/// With threads, and asked by a filter for each call that is of interest.
fn strace() -> Command {
    let mut strace = Command::new("strace");
    strace.args(["-f", "--seccomp-bpf"]);
    strace
}

/// Whether there is one, which knows what is asked of it and may trace.
fn can_trace() -> bool {
    let probe = strace().args(["-e", "trace=statx", "-o", "/dev/null", "true"]).output();
    match probe {
        Ok(output) if output.status.success() => true,
        Ok(output) => {
            ferry_skip::skip!("strace cannot trace: {}", String::from_utf8_lossy(&output.stderr));
            false
        }
        Err(error) => {
            ferry_skip::skip!("no strace: {error}");
            false
        }
    }
}

/// Reply and fetch are one call, `io_uring_enter`.
#[test]
fn a_request_is_one_call() {
    if !paths().contains(&Path::Uring) || !can_trace() {
        return;
    }
    let fits = |calls: [usize; 2]| calls.iter().all(|calls| (REQUESTS..=REQUESTS + OTHERS).contains(calls));
    let mut tried = Vec::new();
    while !tried.last().is_some_and(|calls| fits(*calls)) {
        assert!(tried.len() < TRIES, "{tried:?} calls for {REQUESTS} reads and as many writes");
        tried.push(trace());
    }
}

/// How many calls that many reads take, and that many writes.
fn trace() -> [usize; 2] {
    let tmp = tempfile::tempdir().unwrap();
    let log = tmp.path().join("log");
    let mut strace = strace();
    strace.args(["-e", "trace=io_uring_enter,statx", "-o"]).arg(&log);
    strace.arg(std::env::current_exe().unwrap()).args(["--exact", "calls::counted", "--ignored", "--test-threads=1"]);
    let output = strace.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&log).unwrap();
    ["reads", "writes"].map(|what| {
        let mark = |word: &str| format!("/{word}/{what}\"");
        let between = text.lines().skip_while(|line| !line.contains(&mark("begin")));
        let between = between.take_while(|line| !line.contains(&mark("end")));
        // A call that is interrupted by the other threads' lines has a second one.
        between.filter(|line| line.contains("io_uring_enter(")).count()
    })
}

/// What is counted.
#[test]
#[ignore = "run by the other one"]
fn counted() {
    let mounted = mount(Arc::new(Null::default()), Options { cache: Cache::None, ..plain(Path::Uring) });
    stay_on(0);
    let file = File::options().read(true).write(true).open(mounted.path("file")).unwrap();
    let mark = |word: &str, what: &str| assert!(!std::path::Path::new(&format!("/{word}/{what}")).exists());
    let mut buffer = [0; 4096];
    let mut count = |what: &str, request: &mut dyn FnMut(&mut [u8]) -> usize| {
        mark("begin", what);
        assert!((0..REQUESTS).all(|_| request(&mut buffer) == 4096));
        mark("end", what);
    };
    count("reads", &mut |buffer| file.read_at(buffer, 0).unwrap());
    count("writes", &mut |buffer| file.write_at(buffer, 0).unwrap());
    drop(file);
    mounted.stop();
}
