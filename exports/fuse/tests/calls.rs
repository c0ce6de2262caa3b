//! How many system calls the ring makes for a request. Needs `strace`, and rings; otherwise passes idly.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

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

/// Reply and fetch are one call, `io_uring_enter`.
#[test]
fn a_request_is_one_call() {
    if !paths().contains(&Path::Uring) {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let log = tmp.path().join("log");
    let mut strace = Command::new("strace");
    strace.args(["-f", "--seccomp-bpf", "-e", "trace=io_uring_enter,statx", "-o"]).arg(&log);
    strace.arg(std::env::current_exe().unwrap()).args(["--exact", "counted", "--ignored", "--test-threads=1"]);
    let Ok(output) = strace.output() else {
        println!("skipped: no strace");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&log).unwrap();
    for what in ["reads", "writes"] {
        let mark = |word: &str| format!("/{word}/{what}\"");
        let between = text.lines().skip_while(|line| !line.contains(&mark("begin")));
        let between = between.take_while(|line| !line.contains(&mark("end")));
        // A call that is interrupted by the other threads' lines has a second one.
        let calls = between.filter(|line| line.contains("io_uring_enter(")).count();
        println!("{REQUESTS} {what}: {calls} calls");
        assert!((REQUESTS..=REQUESTS + OTHERS).contains(&calls), "{calls} calls for {REQUESTS} {what}");
    }
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
