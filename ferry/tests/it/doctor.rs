//! `ferry doctor` on machines that lack something.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::schema::Schema;
use crate::common::{ferry, needs_fuse, run};

/// An unused user id.
const STRANGER: u32 = 64_321;

/// The JSON of a run, checked against its schema, and its exit status.
fn report(command: &mut Command) -> (Value, Option<i32>) {
    let output = run(command.arg("--json"));
    let errors = String::from_utf8_lossy(&output.stderr);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"));
    assert!(errors.is_empty(), "{errors}");
    Schema::of("watch.md", "JSON of ferry doctor").check(&json);
    let missing = json["checks"].as_array().unwrap().iter().any(|check| check["state"] == "missing");
    assert_eq!(json["complete"], !missing, "{json}");
    assert_eq!(output.status.code(), Some(i32::from(missing)), "{json}");
    (json, output.status.code())
}

fn doctor(args: &[&str]) -> Command {
    let mut command = ferry();
    command.arg("doctor").args(args);
    command
}

/// `ferry doctor` by way of another program.
fn by(program: &str, before: &[&str], args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(before).arg(ferry().get_program()).arg("doctor").args(args).env_remove("FERRY_LOG");
    command
}

/// In a mount namespace of its own, after a script.
fn after(script: &str, args: &[&str]) -> Command {
    let script = format!("set -e; {script}; exec \"$@\"");
    by("unshare", &["--mount", "--propagation", "private", "sh", "-c", &script, "sh"], args)
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no check {name}: {report}"))
}

#[test]
fn every_failed_check_has_a_consequence_and_a_one_line_remedy() {
    for exports in ["virtiofs", "mount", "disk", "9p", "image", "containers", "virtiofs,mount,disk,9p,image,containers"]
    {
        let (report, _) = report(&mut doctor(&["--for", exports]));
        let checks = report["checks"].as_array().unwrap();
        assert!(checks.len() > 3, "{report}");
        for check in checks {
            let is_ok = check["state"] == "ok";
            assert_eq!(check.get("consequence").is_none(), is_ok, "{check}");
            assert_eq!(check.get("remedy").is_none(), is_ok, "{check}");
            assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
            let concerned = check["exports"].as_array().unwrap();
            let is_asked = |export: &Value| exports.split(',').any(|asked| *export == asked);
            assert!(!concerned.is_empty() && concerned.iter().all(is_asked), "{check}");
            if let Some(remedy) = check["remedy"].as_str() {
                assert!(!remedy.is_empty() && !remedy.contains('\n'), "{check}");
                // A shell takes it, without running it.
                let parsed = Command::new("sh").args(["-n", "-c", remedy]).status().unwrap();
                assert!(parsed.success(), "{check}");
            }
        }
    }
}

#[test]
fn text_and_json_agree() {
    let (report, status) = report(&mut doctor(&["--for", "9p"]));
    let output = run(&mut doctor(&["--for", "9p"]));
    assert_eq!(output.status.code(), status);
    let text = String::from_utf8(output.stdout).unwrap();
    for check in report["checks"].as_array().unwrap() {
        let [state, name] = ["state", "name"].map(|field| check[field].as_str().unwrap());
        let line = text.lines().find(|line| line.get(10..).is_some_and(|rest| rest.starts_with(&format!("{name} "))));
        assert!(line.is_some_and(|line| line.starts_with(state)), "{check}: {text}");
    }
}

#[test]
fn mount_and_doctor_report_the_same_request_paths() {
    needs_fuse!();
    let temporary = tempfile::tempdir().unwrap();
    let (report, _) = report(doctor(&["--for", "mount"]).env("TMPDIR", temporary.path()));
    let explained = run(ferry().args(["mount", "--explain", "--json"]).env("TMPDIR", temporary.path()));
    let explained: Value = serde_json::from_slice(&explained.stdout).unwrap();
    for (name, field) in [("fuse ring", "uring"), ("passthrough", "passthrough")] {
        let (check, verdict) = (check(&report, name), &explained[field]);
        assert_eq!(check["state"] == "ok", verdict["used"] == true, "{check}: {verdict}");
        if let Some(reason) = verdict["reason"].as_str() {
            assert_eq!(check["found"], reason);
        }
    }
    let left = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!left.contains(temporary.path().to_str().unwrap()), "{left}");
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn a_machine_without_the_device_lacks_mounts_and_serves_guests() {
    needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().display();
    let script =
        format!("mount -t tmpfs -o mode=755,dev none {at}; mknod -m 666 {at}/null c 1 3; mount --bind {at} /dev");
    let (mount, status) = report(&mut after(&script, &["--for", "mount"]));
    assert_eq!(status, Some(1), "{mount}");
    for name in ["fuse device", "fuse mount"] {
        let check = check(&mount, name);
        assert_eq!(check["state"], "missing", "{check}");
        assert!(check["remedy"].as_str().unwrap().contains("/dev/fuse"), "{check}");
    }
    // Without FUSE, images are mounted by the kernel's EROFS only.
    let (image, _) = report(&mut after(&script, &["--for", "image"]));
    assert_eq!(check(&image, "fuse device")["state"], "degraded");
    let (ninep, status) = report(&mut after(&script, &["--for", "9p"]));
    assert_eq!(status, Some(0), "{ninep}");
}

#[test]
fn a_machine_that_hides_the_module_is_judged_by_a_mount() {
    needs_fuse!();
    let (hidden, status) = report(&mut after("mount -t tmpfs none /sys/module/fuse", &["--for", "mount"]));
    assert_eq!(status, Some(0), "{hidden}");
    assert_eq!(check(&hidden, "fuse mount")["state"], "ok");
    // The module's directory is there, and its parameter is not.
    let ring = check(&hidden, "fuse ring");
    assert!(ring["state"] == "degraded" && ring["found"].as_str().unwrap().contains("6.14"), "{ring}");
    let (hidden, status) = report(&mut after("mount -t tmpfs none /sys", &["--for", "mount"]));
    assert_eq!(status, Some(0), "{hidden}");
}

#[test]
fn features_for_root_only_are_reported() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to become another user");
        return;
    }
    let user = [format!("--reuid={STRANGER}"), format!("--regid={STRANGER}")];
    let before = [user[0].as_str(), &user[1], "--clear-groups"];
    let (report, _) = report(&mut by("setpriv", &before, &[]));
    for (name, word) in
        [("erofs", "root"), ("fanotify", "root"), ("fanotify for images", "root"), ("huge pages", "this user")]
    {
        let check = check(&report, name);
        assert_eq!(check["state"], "degraded", "{check}");
        assert!(check["found"].as_str().unwrap().contains(word), "{check}");
        assert_eq!(check["remedy"], "# run ferry as root");
    }
    let mode = fs::metadata("/dev/fuse").map(|found| found.permissions().mode());
    if mode.is_ok_and(|mode| mode & 0o006 == 0) {
        let device = check(&report, "fuse device");
        assert!(device["state"] == "missing" && device["remedy"] == "chmod 666 /dev/fuse", "{device}");
    }
}

/// Forbids user namespaces, as the one of a container may.
const FORBID_USERNS: &str = "echo 0 >/proc/sys/user/max_user_namespaces; exec \"$@\"";

#[test]
fn root_without_cap_sys_admin_is_told_to_get_it() {
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root, to drop a capability");
    }
    let drop = ["setpriv", "--bounding-set", "-sys_admin"];
    let forbid = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID_USERNS, "sh"];
    for before in [drop.to_vec(), [forbid.as_slice(), &drop].concat()] {
        let (report, _) = report(&mut by(before[0], &before[1..], &[]));
        for name in ["namespaces", "huge pages", "fuse mount", "fanotify", "erofs", "overlayfs", "fanotify for images"]
        {
            let check = check(&report, name);
            assert!(check["remedy"].as_str().is_some_and(|remedy| remedy.contains("CAP_SYS_ADMIN")), "{check}");
        }
        assert_eq!(check(&report, "overlayfs")["state"], "degraded");
    }
}

#[test]
fn a_file_system_without_fs_verity_is_not_one_that_has_it() {
    needs_fuse!();
    if check(&report(&mut doctor(&["--for", "image"])).0, "fs-verity")["state"] == "ok" {
        return ferry_skip::skip!("the file system of ferry has fs-verity");
    }
    let script = "mount -t tmpfs none /sys; mkdir -p /sys/fs/ext4/features; touch /sys/fs/ext4/features/verity";
    let (report, _) = report(&mut after(script, &["--for", "image"]));
    let verity = check(&report, "fs-verity");
    assert!(verity["state"] == "degraded" && verity["remedy"].as_str().unwrap().contains("tune2fs"), "{verity}");
}

#[test]
fn low_limits_are_reported() {
    let (low, _) = report(&mut by("prlimit", &["--nofile=256:256", "--"], &["--for", "virtiofs"]));
    let descriptors = check(&low, "descriptors");
    assert_eq!(descriptors["state"], "degraded");
    assert!(descriptors["consequence"].as_str().unwrap().contains("256"), "{descriptors}");
    // With so few, checks fail: each reports that, and none ends the program.
    let (none, _) = report(&mut by("prlimit", &["--nofile=4:4", "--"], &[]));
    assert!(check(&none, "io_uring")["found"].as_str().is_some_and(|found| !found.is_empty()), "{none}");
}

/// A directory with programs of these names, each a script.
fn programs(scripts: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, script) in scripts {
        let path = directory.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    directory
}

#[test]
fn virtual_machine_monitors_are_found_and_judged() {
    let list =
        r#"case "$1" in --version) echo QEMU emulator version 9.2.0;; *) echo 'name "vhost-user-fs-pci"';; esac"#;
    let directory = programs(&[
        ("qemu-system-x86_64", list),
        ("qemu-system-aarch64", list),
        ("crosvm", "exit 1"),
        ("cloud-hypervisor", "printf 'cloud-hypervisor v52.0 \\033]0;title\\007\\n'"),
    ]);
    let with = |directory: &Path| {
        let mut command = doctor(&["--for", "virtiofs,disk"]);
        command.env("PATH", directory);
        command
    };
    let (report, _) = report(&mut with(directory.path()));
    assert_eq!(check(&report, "vmm")["state"], "ok");
    let qemu = check(&report, "QEMU");
    assert!(qemu["found"].as_str().unwrap().contains("9.2.0"), "{qemu}");
    assert!(qemu["state"] == "degraded" && qemu["remedy"].as_str().unwrap().contains("QEMU 11.1"), "{qemu}");
    let devices = check(&report, "vhost-user");
    assert!(devices["found"].as_str().unwrap().contains("no vhost-user-blk-pci"), "{devices}");
    assert_eq!(check(&report, "cloud-hypervisor")["state"], "ok");
    assert!(check(&report, "crosvm")["found"].as_str().unwrap().contains("prints no version"));
    let text = String::from_utf8(run(&mut with(directory.path())).stdout).unwrap();
    assert!(text.contains("title") && !text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

#[test]
fn an_unknown_export_is_named() {
    let said = run(&mut doctor(&["--for", "virtiofs,nfs"]));
    let text = String::from_utf8(said.stderr).unwrap();
    assert!(said.status.code() == Some(2) && text.contains("nfs") && text.contains("virtiofs"), "{text}");
}
