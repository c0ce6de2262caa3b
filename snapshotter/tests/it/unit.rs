//! The unit of systemd.

use std::fs;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::server::{PROGRAM, can_mount};

const UNIT: &str = include_str!("../../../dist/systemd/ferry-snapshotter.service");

#[test]
fn systemd_takes_the_unit() {
    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
        return ferry_skip::skip!("no systemd-analyze: apt-get install systemd");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ferry-snapshotter.service");
    fs::write(&path, UNIT.replace("/usr/bin/ferry-snapshotter", env!("CARGO_BIN_EXE_ferry-snapshotter"))).unwrap();
    let output = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let wrong: Vec<_> = said.lines().filter(|line| line.contains("ferry")).collect();
    assert!(output.status.success() && wrong.is_empty(), "{said}");
}

/// containerd has to see the mounts, and they have to outlive the process.
#[test]
fn the_unit_keeps_mounts_where_they_are_seen() {
    let set: Vec<_> =
        UNIT.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once('=')).collect();
    assert!(set.contains(&("KillMode", "process")) && set.contains(&("Type", "notify")));
    for (name, _) in set {
        let has_namespace =
            ["Private", "Protect", "ReadOnly", "ReadWrite", "Bind", "Temporary", "Inaccessible", "Root"];
        assert!(!has_namespace.iter().any(|prefix| name.starts_with(prefix)), "{name} gives it a namespace of mounts");
        assert!(!["MountFlags", "DynamicUser", "CapabilityBoundingSet", "SystemCallFilter"].contains(&name), "{name}");
    }
}

#[test]
fn the_service_manager_is_told_when_calls_are_answered() {
    if !can_mount() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let manager = UnixDatagram::bind(folder.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("--root").arg(folder.path().join("root")).arg("--address").arg(folder.path().join("s"));
    let mut child = command.env("NOTIFY_SOCKET", folder.path().join("notify")).spawn().unwrap();
    let mut said = [0; 64];
    let bytes = manager.recv(&mut said);
    let connected = UnixStream::connect(folder.path().join("s"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(&said[..bytes.unwrap()], b"READY=1");
    connected.unwrap();
}
