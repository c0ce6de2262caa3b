//! Installation on a node of Kubernetes, from a container that has the node's root as a volume.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fchmod, fstat, fsync, openat, openat2, renameat, syncfs,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::{chroot, fchdir};

/// Where programs go: the unit names them there.
const PROGRAMS: &str = "usr/bin";
/// Where the unit goes.
const UNITS: &str = "etc/systemd/system";
const UNIT: &str = "ferry-snapshotter.service";
const UNIT_TEXT: &str = include_str!("../../dist/systemd/ferry-snapshotter.service");
/// Exists beside the unit during an installation. If it is found later, an installation was interrupted, and its changes are unknown.
const UNFINISHED: &str = ".ferry-snapshotter.unfinished";
/// The name of a file until it is complete.
const NEW: &str = ".ferry.new";
/// The environment variables, from old to new versions, that make `systemctl` contact systemd although its own root is not that of
/// process 1.
const IN_CHROOT: [(&str, &str); 3] =
    [("SYSTEMD_IGNORE_CHROOT", "1"), ("SYSTEMD_OFFLINE", "0"), ("SYSTEMD_IN_CHROOT", "0")];

/// Copies this program, the `ferry` beside it and the unit to a node, and starts the unit; restarts it if one of them changed. `node` is
/// the node's root, with all mounts below it.
///
/// # Errors
///
/// A file cannot be read or written, or the node's systemd does not start the unit. Copied files stay.
pub fn install(node: &Path) -> Result<()> {
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = openat(CWD, node, directory, Mode::empty())
        .with_context(|| format!("cannot open the node's root {}: mount it as a volume", node.display()))?;
    check_processes(node)?;
    let this = std::env::current_exe().context("cannot find this program")?;
    let units = below(&root, node, UNITS)?;
    let programs = below(&root, node, PROGRAMS)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut is_new = match openat(&units, UNFINISHED, flags, Mode::from_raw_mode(0o600)) {
        Err(Errno::EXIST) => true,
        made => made.map(|_| false).with_context(|| format!("cannot write /{UNITS}/{UNFINISHED}"))?,
    };
    for program in [this.with_file_name("ferry"), this] {
        let cannot = || format!("cannot read the program {}", program.display());
        let bytes = std::fs::read(&program).with_context(cannot)?;
        let name = program.file_name().with_context(cannot)?;
        is_new |= put(&programs, name.as_ref(), 0o755, &bytes)
            .with_context(|| format!("cannot write /{PROGRAMS}/{}", name.display()))?;
    }
    is_new |= put(&units, UNIT.as_ref(), 0o644, UNIT_TEXT.as_bytes())
        .with_context(|| format!("cannot write /{UNITS}/{UNIT}"))?;
    // A power failure leaves no unit without its programs.
    syncfs(&root).context("cannot write to the node's disk")?;
    fchdir(&root)
        .and_then(|()| chroot("."))
        .context("cannot change to the node's root: the container needs the capability SYS_CHROOT")?;
    // No restart while a node boots: pods are being pulled.
    let start = if is_new { "restart" } else { "start" };
    for words in [&["daemon-reload"][..], &["enable", UNIT], &[start, UNIT]] {
        let mut systemctl = Command::new("systemctl");
        systemctl.args(words).envs(IN_CHROOT).env("PATH", "/usr/bin:/bin").stdin(Stdio::inherit());
        let said =
            systemctl.output().context("cannot run systemctl: the node needs systemd, or an installation by hand")?;
        let messages: Vec<_> = String::from_utf8_lossy(&said.stderr).lines().map(str::to_owned).collect();
        let (status, words, messages) = (said.status, words.join(" "), messages.join(" "));
        ensure!(status.success(), "systemctl {words} on the node: {status}: {messages}");
    }
    unlinkat(&units, UNFINISHED, AtFlags::empty()).with_context(|| format!("cannot remove /{UNITS}/{UNFINISHED}"))
}

/// systemd replies only to processes that see its own process; otherwise `systemctl` fails with "No data available".
fn check_processes(node: &Path) -> Result<()> {
    let path = node.join("proc/self/status");
    let status = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}: mount the node's root with what is below it", path.display()))?;
    // The ids of this process in the PID namespace of that /proc and in nested ones (proc_pid_status(5)).
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let is_node = numbers.is_some_and(|numbers| numbers.split_whitespace().count() == 1);
    ensure!(is_node, "this container does not see the node's processes: set hostPID: true in its pod");
    Ok(())
}

/// Opens a directory of the node's, by its own symbolic links.
fn below(root: &OwnedFd, node: &Path, path: &str) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let opened = loop {
        match openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => {}
            opened => break opened,
        }
    };
    opened.with_context(|| format!("the node has no {}: it needs systemd", node.join(path).display()))
}

/// Creates or replaces a file atomically; returns false if it is there already.
fn put(directory: &OwnedFd, name: &Path, mode: u32, bytes: &[u8]) -> io::Result<bool> {
    let mode = Mode::from_raw_mode(mode);
    if is_there(directory, name, mode, bytes).unwrap_or(false) {
        return Ok(false);
    }
    match unlinkat(directory, NEW, AtFlags::empty()) {
        Err(error) if error != Errno::NOENT => return Err(error.into()),
        _ => {}
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut file = File::from(openat(directory, NEW, flags, Mode::from_raw_mode(0o600))?);
    let written = file
        .write_all(bytes)
        .and_then(|()| Ok(fchmod(&file, mode)?))
        .and_then(|()| Ok(fsync(&file)?))
        .and_then(|()| Ok(renameat(directory, NEW, directory, name)?));
    if written.is_err() {
        let _ = unlinkat(directory, NEW, AtFlags::empty());
    }
    written.map(|()| true)
}

fn is_there(directory: &OwnedFd, name: &Path, mode: Mode, bytes: &[u8]) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = File::from(openat(directory, name, flags, Mode::empty())?);
    let found = fstat(&file)?;
    if !FileType::from_raw_mode(found.st_mode).is_file()
        || Mode::from_raw_mode(found.st_mode) != mode
        || found.st_uid != 0
        || u64::try_from(found.st_size).ok() != Some(bytes.len() as u64)
    {
        return Ok(false);
    }
    let mut there = Vec::new();
    file.read_to_end(&mut there)?;
    Ok(there == bytes)
}
