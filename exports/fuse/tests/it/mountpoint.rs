//! Making mounts, as root and as a user, and what becomes of them when their server dies.
#![allow(clippy::unwrap_used, missing_docs, reason = "a test that cannot go on ends")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferry_fuse::{MountError, MountOptions, Mountpoint};
use rustix::mount::UnmountFlags;

/// A mount point that is free again when the test ends, however it ends.
struct Place {
    directory: tempfile::TempDir,
    path: PathBuf,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("mnt");
        std::fs::create_dir(&path).unwrap();
        Self { directory, path }
    }

    /// The lines about it in the kernel's table.
    fn mounts(&self) -> Vec<String> {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = format!(" {} ", self.path.display());
        table.lines().filter(|line| line.contains(&path)).map(str::to_owned).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while !self.mounts().is_empty() && rustix::mount::unmount(&self.path, UnmountFlags::DETACH).is_ok() {}
    }
}

/// Mounting needs root and the device; without them there is nothing to test.
fn can_mount() -> bool {
    let can = rustix::process::geteuid().is_root() && File::open("/dev/fuse").is_ok();
    if !can {
        ferry_skip::skip!("needs root and /dev/fuse");
    }
    can
}

/// A server that answers INIT, and everything else with an error, until the mount goes.
fn serve(device: OwnedFd) -> std::thread::JoinHandle<()> {
    const INIT: u32 = 26;
    const ENOSYS: i32 = 38;
    std::thread::spawn(move || {
        let mut device = File::from(device);
        let mut request = vec![0; 1 << 17];
        while let Ok(count) = device.read(&mut request) {
            let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
            assert!(count >= 40, "a request has a header");
            let mut body = Vec::new();
            if word(4) == INIT {
                // Version 7.31, no flags, and zeros, which stand for the defaults.
                body = [7_u32, 31].iter().flat_map(|n| n.to_ne_bytes()).chain([0; 56]).collect();
                body[20..24].copy_from_slice(&65536_u32.to_ne_bytes());
            }
            let error = if body.is_empty() { -ENOSYS } else { 0 };
            let mut reply = u32::try_from(16 + body.len()).unwrap().to_ne_bytes().to_vec();
            reply.extend(error.to_ne_bytes());
            reply.extend(&request[8..16]);
            reply.extend(body);
            // FORGET and the like want no reply; the kernel says so.
            let _ = device.write(&reply);
        }
    })
}

#[test]
fn a_mount_is_made_and_undone() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let options = MountOptions {
        fsname: "pmem:/a b,suid".into(),
        noexec: true,
        max_read: Some(65536),
        ..MountOptions::default()
    };
    let (device, mut mount) = Mountpoint::mount(&place.path, &options).unwrap();
    let server = serve(device);
    let lines = place.mounts();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("noexec") && lines[0].contains("default_permissions,max_read=65536"), "{lines:?}");
    assert!(lines[0].contains(r"- fuse.ferry pmem:/a\040b,suid "), "{lines:?}");
    assert!(mount.is_ours());
    assert!(lines[0].contains(&format!(" 0:{} ", mount.connection())), "{lines:?}");
    mount.unmount().unwrap();
    assert!(!mount.is_ours() && place.mounts().is_empty());
    mount.unmount().unwrap();
    server.join().unwrap();
}

#[test]
fn a_dropped_mount_leaves_nothing_behind() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let (device, mount) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
    drop(device);
    assert_eq!(place.mounts().len(), 1);
    drop(mount);
    assert!(place.mounts().is_empty());
}

/// The end of a mount is found without a look at its path, where another process may have mounted since: the look would make
/// that process's `umount` fail with `EBUSY`.
#[test]
fn the_next_mount_is_never_busy_for_the_end_of_the_last_one() {
    const ROUNDS: usize = 300;
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let (device, ended) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
    drop(device);
    rustix::mount::unmount(&place.path, rustix::mount::UnmountFlags::NOFOLLOW).unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                assert!(!ended.is_ours());
            }
        });
        let busy = (0..ROUNDS).find(|_| {
            let (device, mut next) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
            drop(device);
            next.unmount().is_err()
        });
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(busy, None, "the mount of this round is busy");
    });
}

#[test]
fn unmounting_a_mount_in_use_is_an_error() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let (device, mut mount) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
    let server = serve(device);
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
    let held = rustix::fs::open(&place.path, flags, rustix::fs::Mode::empty()).unwrap();
    let error = mount.unmount().unwrap_err();
    assert!(matches!(error, MountError::Busy(_)), "{error}");
    assert!(error.to_string().contains("fuser"), "{error}");
    assert!(mount.is_ours());
    mount.detach().unwrap();
    assert!(place.mounts().is_empty());
    drop(held);
    server.join().unwrap();
}

/// As often as it died, the next mount finds a free place.
#[test]
fn a_dead_mount_is_replaced() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    for _ in 0..3 {
        let (device, mount) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
        drop(device);
        // As after a kill: the mount stays.
        std::mem::forget(mount);
        assert_eq!(std::fs::metadata(&place.path).unwrap_err().raw_os_error(), Some(107));
    }
    assert_eq!(place.mounts().len(), 1, "{:?}", place.mounts());
}

#[test]
fn dead_mounts_of_others_stay() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let options = MountOptions { subtype: "other".into(), ..MountOptions::default() };
    let (device, mount) = Mountpoint::mount(&place.path, &options).unwrap();
    drop(device);
    let error = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap_err();
    assert!(matches!(&error, MountError::DeadForeign { kind, .. } if kind == "fuse.other"), "{error}");
    assert!(mount.is_ours());
}

#[test]
fn a_live_mount_is_not_mounted_over() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let options = MountOptions { fsname: "first".into(), ..MountOptions::default() };
    let (device, mut mount) = Mountpoint::mount(&place.path, &options).unwrap();
    let server = serve(device);
    let error = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap_err();
    assert!(matches!(&error, MountError::Mounted { source_name, .. } if source_name == "first"), "{error}");
    mount.unmount().unwrap();
    server.join().unwrap();
}

/// Whoever unmounts by hand and mounts something else keeps it.
#[test]
fn only_own_mounts_are_unmounted() {
    if !can_mount() {
        return;
    }
    let place = Place::new();
    let (first, mut lost) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
    rustix::mount::unmount(&place.path, UnmountFlags::DETACH).unwrap();
    drop(first);
    let (_second, kept) = Mountpoint::mount(&place.path, &MountOptions::default()).unwrap();
    assert!(!lost.is_ours());
    lost.unmount().unwrap();
    drop(lost);
    assert!(kept.is_ours());
    assert_eq!(place.mounts().len(), 1);
}

/// The environment variable under which this test program mounts as the user that it was started as.
const AS_USER: &str = "FERRY_TEST_MOUNT_AS_USER";

/// Not a test of its own: the part of the tests below that runs as a user.
#[test]
fn as_user() {
    let Ok(path) = std::env::var(AS_USER) else { return };
    let options = MountOptions {
        fsname: r"a,b\c".into(),
        allow_other: std::env::var_os("FERRY_TEST_ALLOW_OTHER").is_some(),
        auto_unmount: std::env::var_os("FERRY_TEST_AUTO_UNMOUNT").is_some(),
        ..MountOptions::default()
    };
    match Mountpoint::mount(path.as_ref(), &options) {
        Ok((device, mut mount)) => {
            let server = serve(device);
            let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
            let lines: Vec<&str> = table.lines().filter(|line| line.contains(&path)).collect();
            println!("\nsaid: {} ({} there)", lines[0], lines.len());
            if std::env::var_os("FERRY_TEST_DIE").is_some() {
                std::process::exit(0);
            }
            mount.unmount().unwrap();
            server.join().unwrap();
        }
        Err(error) => println!("\nsaid: {error}"),
    }
}

/// A script that makes `/dev/fuse` what it is on most machines, usable for everybody, in a mount namespace of its own, in
/// which mounts also end. Then it does what its further arguments say.
const OPEN_DEVICE: &str = "set -e
    mount -t tmpfs -o mode=755,dev none \"$1\"
    mknod -m 666 \"$1/fuse\" c 10 229
    mount --bind \"$1/fuse\" /dev/fuse
    shift
    eval \"$RUN\"";

/// Runs [`as_user`] as nobody, as often as there are sets of variables; answers what each said.
fn said_as_user(path: &Path, runs: &[&[&str]]) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // A copy that every user can execute, wherever the build directory is.
    let program = directory.path().join("test");
    assert!(Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap().success());
    std::fs::create_dir(directory.path().join("device")).unwrap();
    let lines = runs.iter().map(|variables| {
        let variables = variables.join(" ");
        format!("/usr/bin/setpriv --reuid 65534 --regid 65534 --clear-groups -- /usr/bin/env {variables} \"$@\"\n")
    });
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", OPEN_DEVICE, "sh"]);
    command.arg(directory.path().join("device")).arg(&program).args(["mountpoint::as_user", "--exact", "--nocapture"]);
    command.env("RUN", lines.collect::<String>()).env(AS_USER, path).current_dir(directory.path());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = text.lines().filter_map(|line| line.split_once("said: "));
    let said: Vec<String> = said.map(|(_, said)| said.to_owned()).collect();
    assert_eq!(said.len(), runs.len(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    said
}

fn has_helper() -> bool {
    let has = can_mount() && Command::new("fusermount3").arg("--version").output().is_ok();
    if !has {
        ferry_skip::skip!("needs fusermount3");
    }
    has
}

/// A mount point that belongs to the user `nobody`.
fn users_place() -> Place {
    let place = Place::new();
    std::fs::set_permissions(place.directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&place.path, Some(65534), Some(65534)).unwrap();
    place
}

#[test]
fn a_user_mounts_through_the_helper() {
    if !has_helper() {
        return;
    }
    let place = users_place();
    // The second finds the place free, the third what the second did not undo.
    for line in said_as_user(&place.path, &[&[], &["FERRY_TEST_DIE=1"], &[], &["FERRY_TEST_AUTO_UNMOUNT=1"]]) {
        assert!(line.contains("nosuid,nodev") && line.contains("user_id=65534"), "{line}");
        assert!(line.contains(r"- fuse.ferry a,b\134c "), "{line}");
        assert!(line.ends_with("(1 there)"), "{line}");
    }
    assert!(place.mounts().is_empty(), "{:?}", place.mounts());
}

#[test]
fn a_user_is_refused_in_sentences() {
    if !has_helper() {
        return;
    }
    let place = users_place();
    let foreign = place.directory.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    let said = said_as_user(&foreign, &[&[]]);
    assert!(said[0].contains("may not write to the mount point") && said[0].contains("foreign"), "{said:?}");
    let said = said_as_user(&place.path, &[&["PATH=/nonexistent"]]);
    assert!(said[0].contains("apt-get install fuse3"), "{said:?}");
    let allowed = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    if !allowed.lines().any(|line| line.trim() == "user_allow_other") {
        let said = said_as_user(&place.path, &[&["FERRY_TEST_ALLOW_OTHER=1"]]);
        assert!(said[0].contains("add the line user_allow_other"), "{said:?}");
    }
}
