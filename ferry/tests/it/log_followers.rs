//! Several people follow the log of one server: who leaves takes along what he wished, and nothing else.
#![allow(missing_docs, clippy::unwrap_used)]

use crate::common;

use std::process::{Child, Stdio};

use common::place::until;
use common::{Server, ferry, run};
use rustix::process::Signal;

fn status_of(target: &std::path::Path, args: &[&str]) -> (String, Option<String>) {
    let output = run(ferry().arg("log").arg(target).args(args).arg("--json"));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    (status["log"].as_str().unwrap().to_owned(), status["requests"].as_str().map(str::to_owned))
}

fn follow(target: &std::path::Path, level: &str) -> Child {
    let mut ferry = ferry();
    ferry.arg("log").arg(target).args([level, "--follow"]);
    ferry.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn end(mut follower: Child) {
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn the_log_level_follows_the_remaining_followers() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, a, b) = (directory.path().join("s"), directory.path().join("a"), directory.path().join("b"));
    std::fs::write(&a, "a").unwrap();
    std::fs::write(&b, "b").unwrap();
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    let status = || status_of(&socket, &[]);
    let whose = |words: &[&str]| {
        let requests = status().1.unwrap_or_default();
        let names = |word: &str| requests.contains(&format!("{word} in "));
        ["a", "b"].iter().all(|word| names(word) == words.contains(word))
    };
    let begin = status();
    assert_eq!(begin, ("info".into(), None));

    let first = follow(&a, "requests");
    until("the first one's requests", || whose(&["a"]));
    let second = follow(&b, "requests");
    until("those of both", || whose(&["a", "b"]));
    let third = follow(&socket, "debug");
    until("the third one's level", || status().0 == "debug");
    assert!(whose(&["a", "b"]));
    end(first);
    until("those of the second alone", || whose(&["b"]));
    assert_eq!(status().0, "debug");
    // For good, and only seen when the third has gone.
    assert_eq!(status_of(&socket, &["warn"]).0, "debug");
    let refused = run(ferry().arg("log").arg(&socket).arg("loud=quiet=x"));
    assert_eq!(refused.status.code(), Some(1), "also behind a follower's level");
    end(third);
    until("the level that was set", || status().0 == "warn");
    assert!(whose(&["b"]));
    end(second);
    until("no requests", || status().1.is_none());
    assert_eq!(status_of(&socket, &["default"]), begin);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// A client without a subscription always gets in, however many follow.
#[test]
fn followers_leave_places_for_questions() {
    const FOLLOWERS: usize = 12;
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    let mut followers: Vec<_> = (0..FOLLOWERS).map(|_| follow(&socket, "debug")).collect();
    let refusal = || {
        let mut ferry = ferry();
        ferry.arg("log").arg(&socket).args(["debug", "--follow"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = ferry.spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(200));
        child.kill().unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap()
    };
    until("one more is refused", || refusal().contains("12 clients follow this log already"));
    for _ in 0..4 {
        assert_eq!(status_of(&socket, &[]).0, "debug");
        let status = run(ferry().arg("status").arg(&socket));
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
    }
    end(followers.pop().unwrap());
    until("a place is free", || {
        let mut another = follow(&socket, "debug");
        std::thread::sleep(std::time::Duration::from_millis(200));
        let stays = another.try_wait().unwrap().is_none();
        followers.push(another);
        stays
    });
    followers.into_iter().for_each(end);
    until("the level of the start", || status_of(&socket, &[]).0 == "info");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn without_a_target_all_that_run_are_listed() {
    let directory = tempfile::tempdir().unwrap();
    let start = |name: &str| {
        let socket = directory.path().join(name);
        (Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket)), socket)
    };
    let (mut first, socket) = start("first");
    let (second, other) = start("second");
    let listed = |args: &[&str]| {
        let output = run(ferry().arg("log").args(args));
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = listed(&[]);
    for (server, socket) in [(&first, &socket), (&second, &other)] {
        let head = format!("process {}: level info, requests logged: none\n", server.pid().as_raw_nonzero());
        let share = format!("  {} for virtual machines on {}\n", directory.path().display(), socket.display());
        assert!(text.contains(&(head + &share)), "{text}");
    }
    let pids = || {
        let all: serde_json::Value = serde_json::from_str(&listed(&["--json"])).unwrap();
        all.as_array().unwrap().iter().map(|status| status["pid"].as_i64().unwrap()).collect::<Vec<_>>()
    };
    let [gone, stays] = [&first, &second].map(|server| i64::from(server.pid().as_raw_nonzero().get()));
    assert!(pids().contains(&gone) && pids().contains(&stays), "{:?}", pids());
    assert!(pids().is_sorted());
    first.signal(Signal::TERM);
    assert_eq!(first.status(), Some(0));
    assert!(!pids().contains(&gone) && pids().contains(&stays), "{:?}", pids());
}
