//! The unit of systemd.

use std::fs;
use std::os::unix::fs::PermissionsExt;
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
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ferry-snapshotter.service");
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
        assert!(!has_namespace.iter().any(|prefix| name.starts_with(prefix)), "{name} gives it a mount namespace");
        assert!(!["MountFlags", "DynamicUser", "CapabilityBoundingSet", "SystemCallFilter"].contains(&name), "{name}");
    }
}

#[test]
fn the_service_manager_is_notified_when_the_server_is_ready() {
    if !can_mount() {
        return;
    }
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let manager = UnixDatagram::bind(directory.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = Command::new(PROGRAM);
    command.arg("--root").arg(directory.path().join("root")).arg("--address").arg(directory.path().join("s"));
    let mut child = command.env("NOTIFY_SOCKET", directory.path().join("notify")).spawn().unwrap();
    let mut said = [0; 64];
    let bytes = manager.recv(&mut said);
    let connected = UnixStream::connect(directory.path().join("s"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(&said[..bytes.unwrap()], b"READY=1");
    connected.unwrap();
}

/// The node's root with a shell from this host, and a systemctl that writes down how it was called. `$1`: the program, `$2`: the root,
/// `$3`: what starts the program.
const INSTALL: &str = r#"
mount --make-rprivate /
mount --rbind /proc "$2/proc"
for directory in bin lib lib64; do
    [ ! -d "/$directory" ] || mount --bind "/$directory" "$2/$directory"
done
exec $3 "$1" --install-to "$2"
"#;

const SYSTEMCTL: &str = r#"#!/bin/sh
echo "$SYSTEMD_IGNORE_CHROOT$SYSTEMD_OFFLINE$SYSTEMD_IN_CHROOT $*" >>/called
[ "$1" != "$(cat /fails)" ] || { echo "it cannot" >&2; exit 3; }
"#;

/// A node's links lead to places on the node.
#[test]
fn a_node_gets_the_programs_and_its_systemd_starts_the_unit() {
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("only root can change the root directory");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["image", "node/usr/bin", "node/bin", "node/lib", "node/lib64", "node/units", "node/etc", "node/proc"] {
        fs::create_dir_all(path(name)).unwrap();
    }
    let program = path("image/ferry-snapshotter");
    fs::copy(PROGRAM, &program).unwrap();
    fs::write(path("node/usr/bin/systemctl"), SYSTEMCTL).unwrap();
    fs::set_permissions(path("node/usr/bin/systemctl"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(path("node/fails"), "").unwrap();
    let install_by = |starter: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-euc", INSTALL, "sh"]).arg(&program).arg(path("node")).arg(starter);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let install = || install_by("");
    let node = path("node").display().to_string();
    let (status, said) = install_by("unshare --pid --fork --mount-proc");
    assert!(status == Some(1) && said.contains("set hostPID: true"), "{said}");
    assert_eq!(
        install(),
        (
            Some(1),
            format!(
                "ferry-snapshotter: the node has no {node}/etc/systemd/system: it needs systemd: No such file or directory (os error 2)\n"
            )
        )
    );
    fs::create_dir(path("node/etc/systemd")).unwrap();
    std::os::unix::fs::symlink("/units", path("node/etc/systemd/system")).unwrap();
    let (status, said) = install();
    assert!(status == Some(1) && said.contains("cannot read the program") && said.contains("image/ferry:"), "{said}");

    fs::write(path("image/ferry"), "a program").unwrap();
    // Left of a copy that did not end.
    fs::write(path("node/usr/bin/.ferry.new"), "part").unwrap();
    assert_eq!(install(), (Some(0), String::new()));
    for (name, bytes, mode) in [
        ("usr/bin/ferry", b"a program".to_vec(), 0o755),
        ("usr/bin/ferry-snapshotter", fs::read(PROGRAM).unwrap(), 0o755),
        ("units/ferry-snapshotter.service", UNIT.into(), 0o644),
    ] {
        let path = path("node").join(name);
        assert!(fs::read(&path).unwrap() == bytes, "{name}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode, "{name}");
    }
    let called = "100 daemon-reload\n100 enable ferry-snapshotter.service\n100 restart ferry-snapshotter.service\n";
    assert_eq!(fs::read_to_string(path("node/called")).unwrap(), called);
    assert_eq!(fs::read_dir(path("node/usr/bin")).unwrap().count(), 3);

    // Again, as after each start of the node.
    fs::remove_file(path("node/called")).unwrap();
    assert_eq!(install(), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(path("node/called")).unwrap(), called.replace("restart", "start"));

    // A program that runs is replaced.
    fs::write(path("image/ferry"), "a newer program").unwrap();
    fs::write(path("node/fails"), "restart").unwrap();
    let expected =
        "ferry-snapshotter: systemctl restart ferry-snapshotter.service on the node: exit status: 3: it cannot\n";
    assert_eq!(install(), (Some(1), expected.into()));
    assert_eq!(fs::read_to_string(path("node/usr/bin/ferry")).unwrap(), "a newer program");

    // The next one goes on where this one ended, and leaves nothing else.
    fs::write(path("node/fails"), "").unwrap();
    fs::remove_file(path("node/called")).unwrap();
    assert_eq!(install(), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(path("node/called")).unwrap(), called);
    assert_eq!(fs::read_dir(path("node/units")).unwrap().count(), 1);
}
