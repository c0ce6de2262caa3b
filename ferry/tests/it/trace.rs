//! `--trace`: requests as trace events in a file.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::place::{Place, until};
use crate::common::{Server, ferry, needs_fuse, refused, run};

/// The events of a whole trace, and the names of its exports.
fn events(path: &Path) -> Option<(Vec<Value>, Vec<String>)> {
    let events: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
    let (names, events): (Vec<_>, Vec<_>) = events.into_iter().partition(|event| event["ph"] == "M");
    let names = names.iter().map(|event| event["args"]["name"].as_str().unwrap().to_owned()).collect();
    Some((events, names))
}

fn named<'a>(events: &'a [Value], name: &'a str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |event| event["name"] == name)
}

/// How many requests of an operation the metrics of a mount have.
fn counted(mnt: &str, operation: &str) -> usize {
    let output = run(ferry().args(["metrics", mnt]));
    let text = String::from_utf8(output.stdout).unwrap();
    let label = format!("operation=\"{operation}\"");
    let is_it = |line: &&str| line.starts_with("ferry_request_duration_seconds_count") && line.contains(&label);
    text.lines().find(is_it).map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

#[test]
fn a_mounts_requests_are_events_with_begin_and_duration() {
    needs_fuse!();
    let place = Place::new();
    let file = place.at("trace \"x\".json");
    let argument = format!("{},seconds=600", file.display());
    let pid = place.mounted(&["--passthrough", "off", "--cache", "none", "--trace", &argument]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let mnt = place.mnt.to_str().unwrap();
    for _ in 0..20 {
        assert!(fs::read(place.mnt.join("file")).is_ok() && fs::metadata(place.mnt.join("missing")).is_err());
    }
    let operations = ["lookup", "open", "read", "release"];
    until("the last release", || counted(mnt, "release") >= 20);
    let expected = operations.map(|operation| counted(mnt, operation));
    assert!(expected.iter().all(|count| *count >= 20), "{expected:?}");
    place.unmount(pid);
    let (events, names) = events(&file).unwrap();
    assert_eq!(operations.map(|operation| named(&events, operation).count()), expected);
    assert_eq!(names, [format!("mount {mnt} {}", place.source.display())]);
    assert_eq!(named(&events, "lookup").filter(|event| event["args"]["error"] == "ENOENT").count(), 20);
    let bytes: u64 = named(&events, "read").filter_map(|event| event["args"]["bytes"].as_u64()).sum();
    assert_eq!(bytes, 20 * 15);
    for event in &events {
        let number = |field: &str| event[field].as_f64().unwrap_or_else(|| panic!("{field} in {event}"));
        assert!(number("ts") >= 0.0 && number("dur") > 0.0 && number("tid") >= 1.0, "{event}");
        assert_eq!((&event["ph"], &event["cat"], &event["pid"]), (&"X".into(), &"mount".into(), &1.into()));
    }
}

#[test]
fn a_trace_ends_at_its_time_limit_while_serving_continues() {
    needs_fuse!();
    let place = Place::new();
    let file = place.at("trace");
    let pid = place.mounted(&["--cache", "none", "--trace", &format!("{},seconds=1", file.display())]);
    until("the end of the trace", || {
        let _ = fs::metadata(place.mnt.join("missing"));
        events(&file).is_some()
    });
    let before = fs::read(&file).unwrap();
    assert!(fs::metadata(place.mnt.join("missing")).is_err());
    place.unmount(pid);
    assert!(fs::read(&file).unwrap() == before, "it is complete");
}

#[test]
fn shares_and_disks_have_traces_from_inside_their_sandboxes() {
    needs_fuse!();
    let place = Place::new();
    let at = |name: &str| place.at(name);
    let address = format!("unix:{}", at("9p").display());
    let mut share = ferry();
    share.arg("share").arg(&place.source).arg("--virtiofs").arg(at("s")).args(["--9p", &address]);
    let mut share = Server::start(share.arg("--trace").arg(at("share.json")));
    let mut mount = ferry();
    mount.arg("mount").arg(format!("9p:{address}")).arg(&place.mnt);
    let pid = place.mounted_by(&mut mount);
    assert!(fs::read(place.mnt.join("file")).is_ok());
    place.unmount(pid);
    share.signal(Signal::TERM);
    assert_eq!(share.status(), Some(0));
    let (found, names) = events(&at("share.json")).unwrap();
    assert!(named(&found, "walk").count() >= 1 && named(&found, "lopen").count() >= 1, "{found:?}");
    assert!(found.iter().all(|event| event["cat"] == "9p"), "{found:?}");
    let source = place.source.display();
    let virtiofs = format!("virtiofs {} {source}", at("s").display());
    assert_eq!(names, [format!("9p {address} {source}"), virtiofs]);
    fs::write(at("disk"), [0; 8192]).unwrap();
    let mut disk = ferry();
    disk.arg("disk").arg(at("disk")).arg("--vhost-user").arg(at("d"));
    let mut disk = Server::start(disk.arg("--trace").arg(at("disk.json")));
    disk.signal(Signal::TERM);
    assert_eq!(disk.status(), Some(0));
    let (found, names) = events(&at("disk.json")).unwrap();
    assert!(found.is_empty() && names.len() == 1 && names[0].starts_with("disk "), "{names:?}");
}

#[test]
fn a_full_disk_ends_a_trace_while_serving_continues() {
    needs_fuse!();
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root to mount a small tmpfs");
        return;
    }
    let place = Place::new();
    let small = place.at("small");
    fs::create_dir(&small).unwrap();
    rustix::mount::mount("tmpfs", &small, "tmpfs", MountFlags::empty(), Some(c"size=16k")).unwrap();
    let (file, log) = (small.join("trace"), place.at("log"));
    let argument = format!("{},seconds=600", file.display());
    let words = ["--passthrough", "off", "--cache", "none", "--log-file", log.to_str().unwrap(), "--trace", &argument];
    let pid = place.mounted(&words);
    let said = || fs::read_to_string(&log).unwrap();
    until("the end of the trace", || {
        (0..500).for_each(|_| drop(fs::metadata(place.mnt.join("missing"))));
        said().contains("ends early")
    });
    // It goes on being served, and says so once.
    for _ in 0..1000 {
        assert_eq!(fs::read(place.mnt.join("file")).unwrap(), b"from the source");
    }
    let (found, bytes) = (events(&file), fs::metadata(&file).unwrap().len());
    place.unmount(pid);
    let outcome = rustix::mount::unmount(&small, UnmountFlags::DETACH);
    let said = said();
    assert_eq!(said.matches("ends early").count(), 1, "{said}");
    assert!(said.contains("serving goes on") && said.contains("No space left"), "{said}");
    assert!(found.is_some_and(|(events, _)| !events.is_empty() || bytes < 4096), "whole events: {bytes} bytes");
    outcome.unwrap();
}

#[test]
fn a_trace_is_refused_where_a_file_exists_and_removed_if_the_start_fails() {
    needs_fuse!();
    let place = Place::new();
    fs::write(place.at("kept"), "as it was").unwrap();
    std::os::unix::fs::symlink(place.at("nothing"), place.at("link")).unwrap();
    for name in ["kept", "link", "missing/directory"] {
        let said = refused(1, place.mount(&["--foreground"]).arg("--trace").arg(place.at(name)));
        assert!(said.contains(name) && said.contains("for the trace"), "{said}");
    }
    assert_eq!(fs::read_to_string(place.at("kept")).unwrap(), "as it was");
    assert!(!place.at("nothing").exists() && place.is_free());
    for seconds in ["0", "601", "18446744073709551616", "x"] {
        let argument = format!("{},seconds={seconds}", place.at("new").display());
        let output = run(&mut place.mount(&["--trace", &argument]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("1 to 600"), "{said}");
    }
    // The mount point is not empty, so there is no mount, and nothing was traced.
    fs::write(place.mnt.join("in the way"), "").unwrap();
    refused(1, place.mount(&["--foreground"]).arg("--trace").arg(place.at("new")));
    assert!(!place.at("new").exists());
}
