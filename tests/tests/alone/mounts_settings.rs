//! Kernels that forbid io_uring, or FUSE over it: a mount falls back to /dev/fuse and reports it.
//!
//! These tests change settings of the whole machine for a moment, so they are in a separate program and run one at a
//! time.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ferry_tests::mounts::{
    Cell, ENABLE_URING, IO_URING_DISABLED, MountOptions, Mounted, Setting, Site, assert_nothing_left, ferry, missing,
};
use ferry_tests::{Place, alone, directory};

/// Longer than anything here takes that does not hang.
const SOON: Duration = Duration::from_secs(30);

/// What the program says of a mount.
fn explained(mountpoint: &Path) -> String {
    let here = Site::on_host(Path::new("/"));
    here.run(ferry(["mount", "--explain"]).arg(mountpoint), SOON).ok()
}

/// Mounts while a setting is as it is now: by whatever path there is, which must be /dev/fuse, and by io_uring, which
/// must be refused. The reason must have these words.
fn falls_back(words: &[&str]) {
    for source in ["mem", "dir", "pmem"] {
        let cell: Cell = format!("{source}_auto").parse().unwrap();
        let directory = directory(Place::Disk);
        let at = directory.path().join("mnt");
        fs::create_dir(&at).unwrap();
        let mounted = Mounted::again(cell, &at, &MountOptions::default());
        mounted.site.sh("seq 1 1000 >a; cp a b; cmp a b; sync; rm a; ls b", SOON).ok();
        assert_eq!(mounted.line()["explain"]["path"], "devfuse", "{source}");
        let text = explained(&at);
        assert!(text.contains("Requests go through /dev/fuse"), "{text}");
        for word in words {
            assert!(text.contains(word), "{source}: '{word}' is not in: {text}");
        }
        mounted.finish();
        let host = Site::on_host(directory.path());
        let ran = host.run(ferry(["mount", "mem"]).arg(&at), SOON);
        let said = ran.err.clone();
        ran.ok();
        host.sh(&format!("umount {}", at.display()), SOON).ok();
        for word in words {
            assert!(said.contains(word), "'{word}' is not said when it is mounted: {said}");
        }
        let ran = host.run(ferry(["mount", "mem"]).arg(&at).args(["--path", "uring"]), SOON);
        assert_ne!(ran.status, 0, "{ran:?}");
        assert_eq!(ran.err.trim_end().lines().count(), 1, "not one sentence: {}", ran.err);
        for word in words {
            assert!(ran.err.contains(word), "'{word}' is not in: {}", ran.err);
        }
        assert_nothing_left(&at);
    }
}

#[test]
fn the_module_parameter_is_off() {
    let _alone = alone();
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    match Setting::change(ENABLE_URING, "N") {
        Some(_off) => falls_back(&["io_uring", "echo Y > /sys/module/fuse/parameters/enable_uring"]),
        None => falls_back(&["io_uring"]),
    }
}

#[test]
fn io_uring_is_forbidden() {
    let _alone = alone();
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    let _on = Setting::change(ENABLE_URING, "Y");
    let Some(_forbidden) = Setting::change(IO_URING_DISABLED, "2") else {
        ferry_skip::skip!("this kernel has no kernel.io_uring_disabled (Linux 6.6 has)");
        return;
    };
    falls_back(&["io_uring", "kernel.io_uring_disabled"]);
}

#[test]
fn io_uring_is_used_where_it_can_be() {
    let _alone = alone();
    let _on = Setting::change(ENABLE_URING, "Y");
    let cell: Cell = "mem_uring".parse().unwrap();
    let Some(mounted) = Mounted::new(&cell) else { return };
    let text = explained(&mounted.site.path);
    assert!(text.contains("Requests go through io_uring"), "{text}");
    // Its name is in the process's descriptors.
    let directory = format!("/proc/{}/fd", mounted.server().pid().as_raw_nonzero());
    let ran = Site::on_host(Path::new("/")).run(Command::new("ls").arg("-l").arg(directory), SOON);
    assert!(ran.out.contains("io_uring"), "{}", ran.out);
    mounted.finish();
}
