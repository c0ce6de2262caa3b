//! `ferry try`, with a real guest. The first test on a machine fetches it.

use crate::common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{ferry, refused, run, wait};
use rustix::process::{Pid, Signal, kill_process};

fn in_guest(dirs: &[&Path], flags: &[&str], script: &str) -> Command {
    let mut command = ferry();
    command.arg("try").args(dirs).args(flags).args(["--", "sh", "-c", script]);
    command
}

#[test]
fn the_commands_status_is_its_own() {
    let directory = tempfile::tempdir().unwrap();
    for (script, status) in [("true", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("exec /no/such/program", 127)] {
        let output = run(&mut in_guest(&[directory.path()], &[], script));
        assert_eq!(output.status.code(), Some(status), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_directory_is_the_working_directory() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("work");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("in"), "from the host").unwrap();
    let script = "cat in; printf 'from the guest' >out; mkdir sub; mv out sub/; pwd >&2";
    let output = run(&mut in_guest(&[&dir], &[], script));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert_eq!((&*out, &*err), ("from the host", "/mnt/work\n"));
    assert_eq!(fs::read_to_string(dir.join("sub/out")).unwrap(), "from the guest");
}

#[test]
fn a_directory_of_another_name_in_the_guest_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("my work");
    fs::create_dir(&dir).unwrap();
    let output = run(&mut in_guest(&[&dir], &[], "pwd; id -u; touch /etc/gone; ls /etc/gone"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(&*out, "/mnt/my-work\n0\n/etc/gone\n", "{err}");
    assert!(err.contains("my work as /mnt/my-work"), "{err}");
    assert!(!Path::new("/etc/gone").exists());
    // And --help says all of that.
    let help = String::from_utf8(run(common::ferry().args(["try", "--help"])).stdout).unwrap();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["runs as root of the guest", "are made on this host", "are discarded at the end", "become dashes"] {
        assert!(help.contains(words), "{words}: {help}");
    }
}

#[test]
fn every_directory_has_a_place() {
    let directory = tempfile::tempdir().unwrap();
    let dirs = ["a/src", "b/src", "doc"].map(|name| directory.path().join(name));
    for dir in &dirs {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("name"), dir.strip_prefix(directory.path()).unwrap().to_str().unwrap()).unwrap();
    }
    let dirs: Vec<&Path> = dirs.iter().map(|dir| dir.as_path()).collect();
    let script = "echo $(cat name) $(cat /mnt/src-2/name) $(cat /mnt/doc/name)";
    let output = run(&mut in_guest(&dirs, &[], script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "a/src b/src doc\n");
}

#[test]
fn read_only_means_it() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "old").unwrap();
    let script = "mount -o remount,rw . 2>/dev/null; echo new >file; rm -f file; mkdir dir; cat file";
    let output = run(&mut in_guest(&[directory.path()], &["--read-only"], script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "old");
    assert_eq!(fs::read_to_string(directory.path().join("file")).unwrap(), "old");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn standard_input_reaches_the_command() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("in");
    let bytes: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    fs::write(&file, &bytes).unwrap();
    let output = in_guest(&[directory.path()], &[], "cat").stdin(fs::File::open(&file).unwrap()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
}

#[test]
#[ignore = "fetches QEMU (some 200 MB) and takes ten seconds"]
fn a_stock_kernel_does_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let script = "echo from the guest >file; git --version; exit 6";
    let output = run(&mut in_guest(&[directory.path()], &["--qemu"], script));
    assert_eq!(output.status.code(), Some(6), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("git version"), "no program of the host's");
    assert_eq!(fs::read_to_string(directory.path().join("file")).unwrap(), "from the guest\n");
}

/// The guest's processes die with the program, and its directories go.
#[test]
fn a_signal_ends_it_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let (dir, tmp) = (directory.path().join("dir"), directory.path().join("tmp"));
    fs::create_dir(&dir).unwrap();
    fs::create_dir(&tmp).unwrap();
    for (during_boot, signal, status) in
        [(false, Signal::TERM, 143), (false, Signal::INT, 130), (true, Signal::HUP, 129)]
    {
        let _ = fs::remove_file(dir.join("up"));
        let mut command = in_guest(&[&dir], &[], "touch up; sleep 1000");
        let mut child = command.env("TMPDIR", &tmp).stdout(Stdio::null()).spawn().unwrap();
        let begin = Instant::now();
        let ready = || if during_boot { fs::read_dir(&tmp).unwrap().count() > 0 } else { dir.join("up").exists() };
        while !ready() {
            assert!(begin.elapsed() < Duration::from_secs(300), "the guest does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(wait(&mut child), Some(status));
        assert_eq!(fs::read_dir(&tmp).unwrap().count(), 0, "directories are left behind");
        assert_eq!(processes_about(&tmp), Vec::<String>::new());
    }
}

/// The command lines that name a path.
fn processes_about(path: &Path) -> Vec<String> {
    let lines = fs::read_dir("/proc").expect("/proc is mounted").filter_map(|entry| {
        let line = fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    let path = path.to_string_lossy();
    lines.filter(|line| line.contains(&*path)).collect()
}

#[test]
fn mistakes_are_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let text = refused(1, &mut in_guest(&[&missing], &[], "true"));
    assert!(text.contains("missing"), "{text}");
}

/// Runs a watcher in the guest while the host makes files; returns its output and what `ferry` says.
fn watched_in_guest(flags: &[&str], limit: Duration) -> (String, String) {
    let directory = tempfile::tempdir().unwrap();
    let script = "inotifywait -q -t 20 -e create --format %f . || echo nothing";
    let mut child = in_guest(&[directory.path()], &[flags, &["--verbose"]].concat(), script);
    let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (begin, pid) = (Instant::now(), child.id());
    let ended = std::thread::spawn(move || child.wait_with_output().unwrap());
    let mut number = 0;
    while !ended.is_finished() && begin.elapsed() < limit {
        number += 1;
        fs::write(directory.path().join(format!("fresh{number}")), "").unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }
    if !ended.is_finished() {
        kill_process(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(), Signal::TERM).unwrap();
    }
    let output = ended.join().unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The agent runs without being asked for: a program of the guest sees what this host does.
#[test]
fn watchers_in_the_guest_see_host_changes() {
    if Command::new("inotifywait").arg("--help").stdout(Stdio::null()).status().is_err() {
        return ferry_skip::skip!("no inotifywait: apt-get install inotify-tools");
    }
    let (out, err) = watched_in_guest(&[], Duration::from_secs(60));
    assert!(out.starts_with("fresh"), "{out}, {err}");
    assert!(err.contains("see changes by this host"), "{err}");
    let (out, err) = watched_in_guest(&["--read-only"], Duration::from_secs(6));
    assert_eq!(out, "");
    assert!(err.contains("miss changes by this host: they are mounted read-only"), "{err}");
}
