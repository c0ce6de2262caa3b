//! What the control socket tells, as `ferry status`, `ferry metrics` and `ferry log` ask it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use ferry_control::{
    Endpoint, ExportKind, MetricsFormat, REPORT_VERSION, Reply, Request, ServerReport, Status, metrics_text,
};
use serde::de::DeserializeOwned;

use crate::server::{PROGRAM, Server, can_mount};

/// Sends a request; returns the reply, and what follows.
pub fn ask<T: DeserializeOwned>(server: &Server, request: &Request) -> (T, BufReader<UnixStream>) {
    let mut stream = Endpoint::own(server.pid()).unwrap().connect().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    writeln!(stream, "{}", serde_json::to_string(request).unwrap()).unwrap();
    let (mut reader, mut line) = (BufReader::new(stream), String::new());
    reader.read_line(&mut line).unwrap();
    match serde_json::from_str(&line).unwrap() {
        Reply::Ok(value) => (value, reader),
        Reply::Error(reason) => panic!("{reason}"),
    }
}

#[test]
fn calls_snapshots_and_the_store_are_counted() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("auto");
    let mut client = server.client();
    client.prepare("a", "").unwrap();
    client.commit("layer", "a").unwrap();
    client.prepare("b", "layer").unwrap();
    client.view("c", "layer").unwrap();
    for _ in 0..2 {
        client.stat("none").unwrap_err();
    }
    let (report, _) = ask::<ServerReport>(&server, &Request::Report { version: REPORT_VERSION });
    let [share] = &report.shares[..] else { panic!("{report:?}") };
    assert_eq!(share.share.source, server.root().to_str().unwrap());
    assert_eq!(share.share.place(ExportKind::Snapshotter).unwrap(), server.socket().to_str().unwrap());
    let [export] = &share.exports[..] else { panic!("{report:?}") };
    assert_eq!((export.requests, export.errors, export.in_flight), (Some(6), Some(2), Some(0)));
    let count = |name: &str| export.operations.iter().find(|one| one.name == name).unwrap().requests;
    assert_eq!(["prepare", "commit", "view", "stat"].map(count), [2, 1, 1, 2]);
    let text = metrics_text(&[report], MetricsFormat::OpenMetrics, false);
    for words in [
        "ferry_snapshots{kind=\"active\"} 1",
        "ferry_snapshots{kind=\"committed\"} 1",
        "ferry_snapshots{kind=\"view\"} 1",
        "ferry_request_errors_total{operation=\"stat\",errno=\"ENOENT\"} 2",
    ] {
        let (name, rest) = words.split_once('{').unwrap();
        let is_it =
            |line: &str| line.starts_with(name) && line.contains("export=\"snapshotter\"") && line.ends_with(rest);
        assert!(text.lines().any(is_it), "{words} in {text}");
    }
    let layers = server.mount_points().len();
    assert!(
        text.lines().any(|line| line.starts_with("ferry_layer_mounts{") && line.ends_with(&format!(" {layers}"))),
        "{text}"
    );
    assert!(text.contains("\nferry_store_bytes{"), "{text}");
    server.stop();
    Endpoint::own(server.pid()).unwrap().connect().unwrap_err();
}

#[test]
fn the_log_is_followed_and_changed() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    let request = Request::Log { level: "info".into(), share: None, file: None, follow: true };
    let (status, mut lines) = ask::<Status>(&server, &request);
    assert_eq!((status.log.as_str(), status.shares.len()), ("info", 1));
    std::fs::create_dir(server.root().join("snapshots/new-1")).unwrap();
    client.cleanup().unwrap();
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(line.contains("INFO") && line.contains("removing a directory without a snapshot"), "{line}");
}

#[test]
fn the_manual_page_and_the_completions_are_printed() {
    let print = |document: &str| {
        let output = Command::new(PROGRAM).args(["--print", document]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    let page = String::from_utf8(print("man")).unwrap();
    let title = format!(".TH \"ferry-snapshotter\" \"8\" \"\" \"ferry {}\" \"Ferry\"\n", env!("CARGO_PKG_VERSION"));
    assert!(page.starts_with(&title) && page.contains("\\-\\-config") && page.contains("proxy_plugins"), "{page}");
    for (shell, words) in [("bash", "--address"), ("zsh", "#compdef ferry-snapshotter"), ("fish", "-l address")] {
        let script = String::from_utf8(print(shell)).unwrap();
        assert!(script.contains(words), "{shell}: {script}");
    }
    if !std::path::Path::new("/usr/bin/mandoc").exists() {
        return ferry_skip::skip!("no mandoc: apt-get install mandoc");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ferry-snapshotter.8");
    std::fs::write(&file, page).unwrap();
    let output = Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    // The pages have no date, so that they are the same in each build.
    let known = ["missing date", "skipping paragraph macro: br"];
    let wrong: Vec<_> = said.lines().filter(|line| !known.iter().any(|words| line.contains(words))).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
