//! `ferry mount`, `mount.ferry` and `ferry log` as a user meets them: what they say, and what they leave behind.
use crate::common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::place::{Place, runs, until};
use common::{Server, ferry, needs_fuse, refused, run, wait};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn returns_when_the_mount_exists_and_serves_on() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--path", "devfuse"]);
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    fs::write(place.mnt.join("new"), "from the mount").unwrap();
    assert_eq!(fs::read_to_string(place.source.join("new")).unwrap(), "from the mount");
    assert!(place.mounts()[0].contains(" - fuse.ferry "), "{:?}", place.mounts());
    assert!(runs(pid));
    // Nothing of it holds the terminal's or the caller's files.
    for number in 0..3 {
        let file = fs::read_link(format!("/proc/{}/fd/{number}", pid.as_raw_nonzero())).unwrap();
        assert_eq!(file, Path::new("/dev/null"), "{number}");
    }
    place.unmount(pid);
}

/// A lock or a pipe of the caller must not be held until the end of the mount.
#[test]
fn a_mount_holds_nothing_that_its_command_inherited() {
    needs_fuse!();
    let place = Place::new();
    let inherited = place.at("inherited");
    fs::write(&inherited, "").unwrap();
    let mut command = Command::new("sh");
    // The source is passed on purpose.
    command.args(["-c", "exec \"$@\" 8<source 9<inherited", "sh"]).arg(env!("CARGO_BIN_EXE_ferry"));
    command.args(["mount", "/dev/fd/8"]).arg(&place.mnt).current_dir(place.directory.path()).env_remove("FERRY_LOG");
    let pid = place.mounted_by(&mut command);
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    let mnt = place.mnt.to_str().unwrap();
    let is_ours = |process: &PathBuf| {
        let line = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
        line.starts_with("ferry") && line.split('\0').any(|word| word == mnt)
    };
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()).filter(is_ours);
    let processes: Vec<_> = processes.collect();
    // The server and its guardian.
    assert_eq!(processes.len(), 2, "{processes:?}");
    for process in processes {
        let fds: Vec<_> = fs::read_dir(process.join("fd")).unwrap().flatten().map(|fd| fd.path()).collect();
        let is_held = |fd: &&PathBuf| fs::read_link(fd).is_ok_and(|file| file == inherited);
        assert_eq!(fds.iter().find(is_held), None);
    }
    place.unmount(pid);
}

#[test]
fn a_signal_unmounts() {
    needs_fuse!();
    for (signal, foreground) in [(Signal::TERM, false), (Signal::TERM, true), (Signal::INT, true)] {
        let place = Place::new();
        if foreground {
            let mut server = Server::start(&mut place.mount(&["--foreground"]));
            assert_eq!(server.line["mountpoint"], place.mnt.to_str().unwrap());
            assert!(place.mnt.join("file").exists());
            server.signal(signal);
            assert_eq!(server.status(), Some(0));
        } else {
            let pid = place.mounted(&[]);
            kill_process(pid, signal).unwrap();
            until("its end", || !runs(pid));
        }
        assert!(place.is_free(), "{:?}", place.mounts());
        assert!(place.source.join("file").exists());
    }
}

#[test]
fn a_killed_server_is_replaced() {
    needs_fuse!();
    let place = Place::new();
    for round in 0..3 {
        let pid = place.mounted(&[]);
        assert!(place.mnt.join("file").exists());
        kill_process(pid, Signal::KILL).unwrap();
        until("its death", || !runs(pid));
        // Not at once: the kernel ends io_uring's rings after the process.
        if round > 0 {
            let error = || fs::read_dir(&place.mnt).err().and_then(|error| error.raw_os_error());
            until("ENOTCONN", || error() == Some(107));
        }
    }
    assert_eq!(place.mounts().len(), 1, "{:?}", place.mounts());
    let pid = place.mounted(&[]);
    assert!(place.mnt.join("file").exists());
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
    assert!(place.is_free());
    assert_eq!(fs::read_dir(&place.mnt).unwrap().count(), 0);
}

#[test]
fn bad_places_are_refused_in_sentences() {
    needs_fuse!();
    let place = Place::new();
    let (mnt, source) = (place.mnt.to_str().unwrap(), place.source.to_str().unwrap());
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let (missing, file) = (text(place.at("missing")), text(place.source.join("file")));
    let cases: [(&[&str], &[&str]); 7] = [
        (&[source, &missing], &[&missing, "does not exist", "mkdir"]),
        (&[source, &file], &[&file, "not a directory"]),
        (&[source, source], &[source, "not empty"]),
        (&[&missing, mnt], &[&missing]),
        (&[&file, mnt], &[&file, "directory"]),
        (&[source, mnt, "--log-file", "/no/such/log"], &["/no/such/log"]),
        (&["pmem:/no/such/directory/image", mnt, "--size", "64M"], &["/no/such/directory/image"]),
    ];
    for (args, words) in cases {
        for way in [&[][..], &["--foreground"]] {
            let said = refused(1, ferry().arg("--log").arg("error").arg("mount").args(args).args(way));
            assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
            assert!(place.is_free(), "{args:?}");
        }
    }
    let pid = place.mounted(&[]);
    let said = refused(1, &mut place.mount(&[]));
    assert!(said.contains(mnt) && said.contains("already a ferry mount"), "{said}");
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
}

/// In a mount namespace of its own, where /dev can be anything.
#[test]
fn a_machine_without_fuse_is_an_error() {
    needs_fuse!();
    let place = Place::new();
    let program = env!("CARGO_BIN_EXE_ferry");
    for (before, words) in [("mount -t tmpfs none /dev", "modprobe fuse"), ("ulimit -n 8", "ulimit -n")] {
        // What is not refused is mounted, and must not be for ever.
        let script = format!("{before} && exec timeout 20 \"$@\"");
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            &script,
            "sh",
            program,
            "mount",
            "--foreground",
        ]);
        let output = run(command.arg(&place.source).arg(&place.mnt).stdin(Stdio::null()));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{before}: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("ferry: ") && last.contains(words), "{before}: {said}");
    }
}

#[test]
fn explains_without_leaving_anything() {
    needs_fuse!();
    let place = Place::new();
    for args in [vec![], vec![place.source.clone()], vec![place.source.clone(), place.mnt.clone()]] {
        let output = run(ferry().args(["--log", "error", "mount", "--explain"]).args(&args));
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("io_uring") && text.contains("passthrough"), "{text}");
        assert!(!text.contains("modprobe.d") || text.contains("/etc/modprobe.d/ferry.conf"), "{text}");
        assert!(place.is_free());
        let output = run(ferry().args(["mount", "--explain", "--json", "--path", "devfuse"]).args(&args));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(line["path"], "devfuse");
    }
    // Of a mount that is there.
    let pid = place.mounted(&["--path", "devfuse"]);
    let output = run(ferry().args(["mount", "--explain", "--json"]).arg(&place.mnt));
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(line["path"], "devfuse");
    assert_eq!(place.mounts().len(), 1);
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
}

#[test]
fn one_source_through_two_exports() {
    needs_fuse!();
    let place = Place::new();
    let socket = place.at("s");
    let mut command = ferry();
    command.args(["share", "mem", "--virtiofs"]).arg(&socket).arg("--mount").arg(&place.mnt).args(["--size", "64M"]);
    let mut server = Server::start(&mut command);
    let share = &server.line["shares"][0];
    assert_eq!((&share["source"], &share["mount"]), (&"mem".into(), &place.mnt.to_str().unwrap().into()));
    fs::write(place.mnt.join("file"), "in memory").unwrap();
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "in memory");
    // The socket outlives the mount.
    place.unmount_alone();
    assert!(socket.exists());
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists() && place.is_free());
}

#[test]
fn a_file_lists_the_mounts() {
    needs_fuse!();
    let place = Place::new();
    let file = place.at("ferry.toml");
    fs::write(&file, "[[share]]\nsource = \"source\"\nmount = \"mnt\"\nread-only = true\n").unwrap();
    let mut server = Server::start(ferry().arg("share").arg("--config").arg(&file));
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    assert_eq!(fs::write(place.mnt.join("file"), "x").unwrap_err().raw_os_error(), Some(30));
    place.unmount_alone();
    assert_eq!(server.status(), Some(0), "the only mount is gone");
}

/// A copy of the program under the name that mount(8) looks for.
fn helper(place: &Place) -> PathBuf {
    let helper = place.at("mount.ferry");
    symlink(env!("CARGO_BIN_EXE_ferry"), &helper).unwrap();
    helper
}

#[test]
fn the_helper_has_the_statuses_of_mount() {
    needs_fuse!();
    let place = Place::new();
    let helper = helper(&place);
    let (mnt, source) = (place.mnt.to_str().unwrap(), place.source.to_str().unwrap());
    let cases: [(&[&str], i32, &str); 6] = [
        (&[source], 1, "a source and a mount point"),
        (&[source, mnt, "-o", "rw,fast"], 1, "unknown mount option \"fast\""),
        (&[source, mnt, "-o", "cache=sometimes"], 1, "sometimes"),
        (&[source, "/no/such/place", "-o", "rw"], 32, "/no/such/place"),
        (&["/no/such/source", mnt], 32, "/no/such/source"),
        (&[source, mnt, "-f"], 0, ""),
    ];
    for (args, status, words) in cases {
        let output = run(Command::new(&helper).args(args));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(said.contains(words) && said.lines().count() <= 1, "{args:?}: {said}");
        assert!(place.is_free(), "{args:?}");
    }
}

/// mount(8) looks for helpers in /sbin only; there, in a mount namespace of its own, this one is.
#[test]
fn mount_and_fstab_find_the_helper() {
    needs_fuse!();
    let place = Place::new();
    helper(&place);
    let fstab = place.at("fstab");
    let line = |options: &str| format!("{} {} ferry {options} 0 0\n", place.source.display(), place.mnt.display());
    fs::write(&fstab, line("ro,noatime,nofail,x-systemd.automount,_netdev,cache=always")).unwrap();
    let script = "set -e
        mkdir sbin upper work
        mount -t tmpfs none sbin
        cp -a /sbin/. sbin/ 2>/dev/null || true
        cp -a mount.ferry sbin/
        mount --bind sbin \"$(readlink -f /sbin)\"
        mount -t ferry -o ro,nosuid,fsname=named source mnt
        grep \"$PWD/mnt \" /proc/self/mountinfo
        cat mnt/file
        umount mnt
        mount --fstab fstab mnt
        grep \"$PWD/mnt \" /proc/self/mountinfo
        umount mnt
        mount -t ferry -o fast source mnt || echo status $?";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]).current_dir(place.directory.path());
    let output = run(command.stdin(Stdio::null()));
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{said}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].contains("ro,nosuid") && lines[0].contains(" named "), "{out}");
    assert!(lines[1].starts_with("from the source"), "{out}");
    assert!(out.contains("ro,noatime") && out.contains("status 1"), "{out}");
    assert!(said.contains("unknown mount option \"fast\""), "{said}");
}

/// automount(8) mounts when somebody looks, and unmounts what nobody uses. Until the mount exists, only processes of its group reach
/// the mount point; others wait for the mount.
#[test]
fn automount_mounts_and_unmounts() {
    needs_fuse!();
    let place = Place::new();
    helper(&place);
    fs::write(place.at("map"), format!("src -fstype=ferry,ro :{}\n", place.source.display())).unwrap();
    let directory = place.directory.path().display();
    fs::write(place.at("master"), format!("{directory}/auto {directory}/map --timeout=1\n")).unwrap();
    let script = r#"set -e
        mkdir sbin auto
        mount -t tmpfs none sbin
        cp -a /sbin/. sbin/ 2>/dev/null || true
        cp -a mount.ferry sbin/
        mount --bind sbin "$(readlink -f /sbin)"
        # One can run for each /run. Its process group is not that of this shell.
        mount -t tmpfs none /run
        setsid automount -f -v -p "$PWD/pid" "$PWD/master" 2>log &
        trap 'kill $(cat pid); wait' EXIT
        until grep -q " $PWD/auto " /proc/self/mountinfo; do sleep 0.1; done
        for round in 1 2; do
            timeout 60 cat auto/src/file
            echo
            grep " $PWD/auto/src " /proc/self/mountinfo
            while grep -q " $PWD/auto/src " /proc/self/mountinfo; do sleep 0.1; done
        done"#;
    let mut command = Command::new("timeout");
    command.args(["240", "unshare", "--mount", "--propagation", "private", "sh", "-c", script]);
    let output = run(command.current_dir(place.directory.path()).stdin(Stdio::null()));
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{said}{:?}", fs::read_to_string(place.at("log")));
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((lines[0], lines[2]), ("from the source", "from the source"), "{out}");
    assert!([1, 3].iter().all(|at| lines[*at].contains(" ro,") && lines[*at].contains(" - fuse.ferry ")), "{out}");
}

/// With mount(8) and its helper in /sbin, in a mount namespace of its own.
#[test]
fn a_mount_is_made_read_only_and_writable_again() {
    needs_fuse!();
    let place = Place::new();
    symlink(env!("CARGO_BIN_EXE_ferry"), place.at("mount.fuse.ferry")).unwrap();
    let script = r#"set -e
        mkdir sbin
        mount -t tmpfs none sbin
        cp -a /sbin/. sbin/ 2>/dev/null || true
        cp -a mount.fuse.ferry sbin/
        mount --bind sbin "$(readlink -f /sbin)"
        options() { grep " $PWD/mnt " /proc/self/mountinfo | cut -d ' ' -f 6; }
        mount -t fuse.ferry -o nosuid,noatime,cache=always source mnt
        options
        echo before >mnt/new
        mount -o remount,ro mnt
        options
        ! touch mnt/refused 2>/dev/null
        cat mnt/new
        mount -o remount,rw,relatime mnt
        options
        echo after >mnt/new
        exec 9>mnt/new
        ! mount -o remount,ro mnt
        exec 9>&-
        mount -o remount,cache=none mnt
        options
        umount mnt
        mount -t fuse.ferry -o ro source mnt
        ! mount -o remount,rw mnt
        options
        ! ./mount.fuse.ferry source source -o remount,rw"#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]).current_dir(place.directory.path());
    let output = run(command.stdin(Stdio::null()));
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{said}");
    let expected =
        ["rw,nosuid,noatime", "ro,nosuid,noatime", "before", "rw,nosuid,relatime", "rw,nosuid,relatime", "ro,relatime"];
    assert_eq!(out.lines().collect::<Vec<_>>(), expected, "{said}");
    let said: Vec<&str> = said.lines().filter(|line| line.starts_with("mount.ferry: ")).collect();
    for (line, words) in said.iter().zip(["open for writing", "cache=none", "mounted read-only", "no mount of ferry"]) {
        assert!(line.contains(words), "{line}");
    }
    assert_eq!(said.len(), 4, "{said:?}");
}

/// The log of a server in the foreground, line by line.
struct Logged {
    child: Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Logged {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok()));
        Self { child, lines }
    }

    /// The lines so far that have a word.
    fn with(&self, word: &str) -> Vec<String> {
        std::thread::sleep(Duration::from_millis(300));
        self.lines.try_iter().filter(|line| line.contains(word)).collect()
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_of(target: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> serde_json::Value {
    let output = run(ferry().arg("log").arg(target).args(args).arg("--json"));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn requests_are_logged_on_demand() {
    needs_fuse!();
    let place = Place::new();
    let log = place.at("log");
    let pid = place.mounted(&["--cache", "none", "--log-file", log.to_str().unwrap()]);
    let status = log_of(&place.mnt, &[]);
    assert_eq!((&status["log"], &status["requests"]), (&"info".into(), &serde_json::Value::Null));
    let logged =
        || fs::read_to_string(&log).unwrap().lines().filter(|line| line.to_lowercase().contains("lookup")).count();
    let look = || fs::metadata(place.mnt.join("file")).unwrap();
    look();
    assert_eq!(logged(), 0);
    log_of(pid.as_raw_nonzero().to_string(), &["requests"]);
    look();
    until("a logged request", || logged() > 0);
    log_of(&place.mnt, &["default"]);
    let before = logged();
    look();
    assert_eq!(logged(), before);
    assert_eq!(log_of(&place.mnt, &["info,ferry_fuse=debug"])["log"], "info,ferry_fuse=debug");
    let off = log_of(&place.mnt, &["off"]);
    assert_eq!((&off["log"], &off["requests"]), (&"off".into(), &serde_json::Value::Null));
    assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
}

#[test]
fn status_omits_unmounted_mounts() {
    needs_fuse!();
    let place = Place::new();
    let socket = place.at("s");
    let mut share = ferry();
    share.arg("share").arg(&place.source).arg("--mount").arg(&place.mnt).arg("--virtiofs").arg(&socket);
    let mut server = Server::start(&mut share);
    assert_eq!(log_of(&socket, &[])["shares"][0]["mount"], place.mnt.to_str().unwrap());
    place.unmount_alone();
    until("its end", || log_of(&socket, &[])["shares"][0]["mount"].is_null());
    let said = run(ferry().arg("log").arg(&socket)).stdout;
    assert!(!String::from_utf8_lossy(&said).contains("mounted"), "{said:?}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// A server on its follower's terminal would show each line twice.
#[test]
fn followed_lines_are_not_in_the_servers_log() {
    needs_fuse!();
    let place = Place::new();
    let log = place.at("log");
    let pid = place.mounted(&["--cache", "none", "--log-file", log.to_str().unwrap()]);
    let mut follow = ferry();
    let follow = follow.arg("log").arg(&place.mnt).args(["requests", "--follow"]);
    let mut follower = follow.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    until("somebody who follows", || log_of(&place.mnt, &[])["requests"].is_string());
    fs::metadata(place.mnt.join("file")).unwrap();
    assert!(lines.any(|line| line.unwrap().to_lowercase().contains("lookup")));
    assert!(!fs::read_to_string(&log).unwrap().to_lowercase().contains("lookup"));
    follower.kill().unwrap();
    follower.wait().unwrap();
    place.unmount(pid);
}

#[test]
fn two_mounts_of_one_source_are_distinguished() {
    needs_fuse!();
    let (place, other) = (Place::new(), Place::new());
    let log = fs::File::create(place.at("log")).unwrap();
    let file = place.at("ferry.toml");
    let share = |mount: &Path| format!("[[share]]\nsource = \"source\"\nmount = {mount:?}\ncache = \"none\"\n");
    fs::write(&file, share(&place.mnt) + &share(&other.mnt)).unwrap();
    let mut server = Server::start(ferry().arg("share").arg("--config").arg(&file).stderr(log));
    let logged = |mount: &Path| {
        let text = fs::read_to_string(place.at("log")).unwrap();
        let share = format!("source on {}\"", mount.display());
        text.lines().filter(|line| line.contains("Lookup") && line.contains(&share)).count()
    };
    // One after the other, each with the other's requests beside it.
    for (wanted, unwanted) in [(&place.mnt, &other.mnt), (&other.mnt, &place.mnt)] {
        log_of(wanted, &["requests"]);
        let before = [logged(wanted), logged(unwanted)];
        for mount in [unwanted, wanted] {
            assert_eq!(fs::read_to_string(mount.join("file")).unwrap(), "from the source");
        }
        until("a logged request", || logged(wanted) > before[0]);
        assert_eq!(logged(unwanted), before[1], "of {}", unwanted.display());
    }
    let said = refused(1, ferry().arg("log").arg(place.source.join("file")).arg("requests"));
    for word in ["is shared several times", place.mnt.to_str().unwrap(), other.mnt.to_str().unwrap()] {
        assert!(said.contains(word), "{said}");
    }
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn to_explain_a_mount_makes_no_image() {
    needs_fuse!();
    let place = Place::new();
    let (image, tier) = (place.at("image"), place.at("tier"));
    let explain = |image: &Path, more: &[&str]| {
        let mut source = std::ffi::OsString::from("pmem:");
        source.push(image);
        let mut command = ferry();
        let output =
            run(command.arg("mount").arg(source).arg(&place.mnt).args(["--explain", "--size", "64M"]).args(more));
        let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(out.contains("Requests go through"), "{out}");
        assert!(place.is_free());
    };
    explain(&image, &[]);
    explain(&image, &["--tier2", tier.to_str().unwrap(), "--tier2-size", "64M"]);
    assert!(!image.exists() && !tier.exists(), "nothing is left behind");
    fs::write(&image, "").unwrap();
    explain(&image, &[]);
    assert_eq!(fs::metadata(&image).unwrap().len(), 0, "it was not ours to make a file system of");
    let left: Vec<_> = fs::read_dir(place.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn the_log_is_followed_for_one_file() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--cache", "none"]);
    let mut follower = Logged::start(ferry().arg("log").arg(place.mnt.join("file")).args(["requests", "--follow"]));
    until("the change of the log", || log_of(&place.mnt, &[])["requests"].is_string());
    assert_eq!(fs::read_to_string(place.mnt.join("other")).unwrap(), "another");
    assert_eq!(follower.with("").len(), 0, "the requests of another file");
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    assert!(!follower.with("").is_empty(), "no request of the file");
    // As by Ctrl-C, but that is ignored below whatever a shell has started in the background.
    kill_process(Pid::from_child(&follower.child), Signal::TERM).unwrap();
    wait(&mut follower.child);
    until("the old log", || log_of(&place.mnt, &[])["requests"].is_null());
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
}

/// As when a server is killed while its guardian is starting: the thread that it would have heard from has ended.
#[test]
fn a_guardian_that_comes_too_late_ends_the_connection() {
    use std::os::unix::process::CommandExt;
    let ended = std::thread::spawn(rustix::thread::gettid).join().unwrap();
    let keepers = [format!("/proc/{}/task/{ended}", std::process::id()), "/proc/0/task/0".into()];
    for keeper in keepers {
        let mut switch = tempfile::tempfile().unwrap();
        let mut guardian = ferry();
        guardian.arg0("ferry-guardian").args([&keeper, "/mnt"]).stdout(switch.try_clone().unwrap());
        let mut guardian = guardian.spawn().unwrap();
        assert_eq!(wait(&mut guardian), Some(0), "{keeper}");
        let mut written = String::new();
        std::io::Seek::rewind(&mut switch).unwrap();
        std::io::Read::read_to_string(&mut switch, &mut written).unwrap();
        assert_eq!(written, "1", "{keeper}");
    }
}

#[test]
fn shares_are_found_by_their_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    assert_eq!(log_of(&socket, &["debug"])["log"], "debug");
    assert_eq!(log_of(&socket, &["default"])["log"], "info");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    let text = refused(1, ferry().arg("log").arg(directory.path()));
    assert!(text.contains("not in a mount or a shared directory of a running ferry"), "{text}");
}

/// What is proposed where a target means several shares is understood as a target.
#[test]
fn shares_are_found_by_the_names_that_are_proposed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().canonicalize().unwrap();
    let file = path.join("ferry.toml");
    let share = |address: &str| format!("[[share]]\nsource = {path:?}\n9p = {address:?}\n");
    let socket = format!("unix:{}", path.join("s").display());
    fs::write(&file, share(&socket) + &share("tcp:127.0.0.1:0")).unwrap();
    let mut server = Server::start(ferry().arg("share").arg("--config").arg(&file));
    let said = refused(1, ferry().arg("log").arg(&path).arg("requests"));
    let (_, names) = said.trim_end().split_once("is shared several times: name ").unwrap();
    let names: Vec<_> = names.split(", or ").collect();
    assert!(names.len() == 2 && names[0] == socket && names[1].starts_with("tcp:127.0.0.1:"), "{said}");
    for name in &names {
        let requests = log_of(name, &["requests"])["requests"].clone();
        assert!(requests.as_str().is_some_and(|requests| !requests.is_empty()), "{name}: {requests}");
        assert_eq!(log_of(name, &["default"])["log"], "info");
    }
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    let said = refused(1, ferry().arg("log").arg(names[1]));
    assert!(said.contains("cannot find tcp:127.0.0.1:"), "{said}");
}

#[test]
fn bad_targets_are_refused_in_sentences() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    let socket = socket.to_str().unwrap();
    let pid = server.pid().as_raw_nonzero().to_string();
    for (args, words) in [
        (&["1", "requests"][..], "process 1"),
        (&["/no/such/path"], "/no/such/path"),
        (&[socket, "loud=quiet=x"], "cannot log at"),
        (&[&pid, "loud=quiet=x"], "cannot log at"),
        (&[socket, "debgu"], "did you mean debug?"),
    ] {
        let text = refused(1, ferry().arg("log").args(args));
        assert!(text.contains(words), "{args:?}: {text}");
    }
}

/// Whatever comes in on the control socket, the server goes on and takes the next request.
#[test]
fn the_control_socket_bears_anything() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    let pid = server.pid().as_raw_nonzero().to_string();
    let control = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run/ferry").join(&pid)
    } else {
        ferry_skip::skip!("the directory is known for root");
        return;
    };
    assert_eq!(fs::metadata(&control).unwrap().permissions().mode() & 0o777, 0o600);
    let long = [b'x'; 100_000];
    let cases: [&[u8]; 7] =
        [b"\n", b"null\n", b"{\"do\":\"explain\",\"share\":99}\n", b"{\"do\":\"sing\"}\n", &[0xff, b'\n'], &long, b"{"];
    for request in cases {
        let mut client = UnixStream::connect(&control).unwrap();
        // A server that has read enough may hang up before everything is sent.
        let _ = client.write_all(request).and_then(|()| client.shutdown(std::net::Shutdown::Write));
        let mut text = Vec::new();
        let _ = client.read_to_end(&mut text);
        assert!(text.is_empty() || text.starts_with(b"{\"error\":"), "{}", String::from_utf8_lossy(&text));
    }
    let idle: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect(&control).unwrap()).collect();
    assert_eq!(log_of(&pid, &[])["log"], "info");
    drop(idle);
    drop(server);
    // A killed server leaves its socket, which is ignored.
    let text = refused(1, ferry().args(["log", &pid]));
    assert!(text.contains(&format!("process {pid}")), "{text}");
    // Another server that starts may have done it.
    let _ = fs::remove_file(&control);
}
