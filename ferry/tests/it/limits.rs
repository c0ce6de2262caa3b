//! `--limit` and `ferry set`: what they take, and what they refuse.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::place::Place;
use crate::common::schema::Schema;
use crate::common::{Server, ferry, needs_fuse, refused, run};

/// What `ferry set` says.
fn set(target: &Path, setting: &str) -> String {
    let output = run(ferry().arg("set").arg(target).arg(setting));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Why `ferry set` refuses a setting.
fn refused_set(target: &Path, setting: &str) -> String {
    refused(1, ferry().arg("set").arg(target).arg(setting))
}

/// Why `ferry set` refuses several settings.
fn refused_sets(target: &Path, settings: &[&str]) -> String {
    refused(1, ferry().arg("set").arg(target).args(settings))
}

/// The limit that `ferry status` shows.
fn limit_of(target: &Path) -> Value {
    let output = run(ferry().arg("status").arg(target).arg("--json"));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    Schema::of("watch.md", "JSON of ferry status").check(&json);
    json["servers"][0]["shares"][0]["limit"].clone()
}

/// The level that `ferry log` shows.
fn log_of(target: &Path) -> String {
    let output = run(ferry().arg("log").arg("--json").arg(target));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    json["log"].as_str().unwrap().into()
}

/// What a mount keeps from now on is kept as long as was set; what it kept before, as it was told.
#[test]
fn times_of_caches_change_under_a_mount() {
    needs_fuse!();
    let place = Place::new();
    let flags = ["--watch", "never", "--entry-timeout", "3600", "--attr-timeout", "3600"];
    let pid = place.mounted(&flags);
    let names = ["kept", "asked", "kept again"];
    let length = |name: &str| fs::metadata(place.mnt.join(name)).unwrap().len();
    let grow = |name: &str| fs::write(place.source.join(name), "12345678").unwrap();
    names.iter().for_each(|name| fs::write(place.source.join(name), "1234").unwrap());
    assert_eq!(length("kept"), 4);
    assert_eq!(set(&place.mnt, "attr-timeout=0"), "attr-timeout 0\n");
    assert_eq!(length("asked"), 4);
    ["kept", "asked"].into_iter().for_each(grow);
    assert_eq!((length("kept"), length("asked")), (4, 8));
    assert_eq!(set(&place.mnt, "attr-timeout=3600"), "attr-timeout 3600\n");
    assert_eq!(length("kept again"), 4);
    grow("kept again");
    assert_eq!(length("kept again"), 4);
    for wrong in ["attr-timeout=-1", "entry-timeout=soon", "negative-timeout=18446744073709551616", "entry-timeout="] {
        let said = refused_set(&place.mnt, wrong);
        assert!(said.contains(&format!("{wrong} is not possible: write default, or seconds from 0 to")), "{said}");
    }
    assert_eq!(set(&place.mnt, "entry-timeout=default"), "entry-timeout default\n");
    place.unmount(pid);
}

#[test]
fn a_running_share_is_limited_by_ferry_set() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (directory.path().join("a"), directory.path().join("b"));
    let limit = "iops=1000,group=g";
    let mut command = ferry();
    command.args(["share", "mem", "--limit", limit, "--virtiofs"]).arg(&a);
    let mut server = Server::start(command.args(["mem", "--limit", limit, "--virtiofs"]).arg(&b));
    assert_eq!(set(&a, "limit=iops=5,bps=1M"), "limit iops=5,bps=1048576 of group g\n");
    assert_eq!(set(&b, "limit=none"), "no limit of group g\n");
    assert_eq!(set(&b, "log=debug"), "log debug\n");
    for (setting, words) in [
        ("limit=iops=0", "cannot set limit=iops=0: iops=0 is not possible: the number is from 1 to 1000000000"),
        ("limit=iops=18446744073709551616", "iops=18446744073709551616 is not possible"),
        ("limit=bps=2T", "bps=2T is not possible"),
        ("limit=", "\"\" is not a limit"),
        ("limit=iops=1,group=h", "the group is chosen when the share starts"),
        (
            "tag=x",
            "\"tag\" cannot be changed while mem is served (what can be: limit, entry-timeout, attr-timeout, negative-timeout, poll-us, log)",
        ),
        ("log=loud", "cannot log at \"loud\""),
    ] {
        let said = refused_set(&a, setting);
        assert!(said.contains(words), "{setting}: {said}");
    }
    let said = refused_sets(&b, &["limit=iops=7", "log=loud"]);
    assert!(said.contains("cannot set limit=iops=7 log=loud: cannot log at \"loud\""), "{said}");
    let said = refused_sets(&b, &["log=trace", "limit=iops=0"]);
    assert!(said.contains("iops=0 is not possible"), "{said}");
    let said = refused_sets(&b, &["limit=iops=8", "limit=iops=9"]);
    assert!(said.contains("\"limit\" is given twice"), "{said}");
    assert_eq!((limit_of(&b), log_of(&b)), (Value::Null, "debug".into()), "nothing has changed");
    let said = run(ferry().arg("set").arg(&b).args(["limit=iops=9", "log=info"]));
    assert_eq!(String::from_utf8_lossy(&said.stdout), "log info\nlimit iops=9 of group g\n");
    assert_eq!((limit_of(&a), log_of(&a)), ("iops=9,group=g".into(), "info".into()));
    let text = String::from_utf8(run(ferry().arg("status").arg(&a)).stdout).unwrap();
    assert!(text.contains("mem, cache auto, limit iops=9,group=g\n"), "{text}");
    let pid = server.pid().as_raw_nonzero().to_string();
    let said = refused_set(Path::new(&pid), "limit=none");
    assert!(said.contains("several shares"), "{said}");
    let said = refused(2, ferry().arg("set").arg(&a).arg("limit"));
    assert!(said.contains("\"limit\" has no value"), "{said}");
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn a_9p_server_polls_for_the_configured_time() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let address = format!("unix:{}", socket.display());
    let mut server = Server::start(ferry().args(["share", "mem", "--poll-us", "50", "--9p", &address]));
    assert_eq!(set(&socket, "poll-us=0"), "poll-us 0\n");
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn the_limit_of_a_running_disk_changes() {
    let directory = tempfile::tempdir().unwrap();
    let (file, socket) = (directory.path().join("\x1b[2Jd"), directory.path().join("s"));
    File::create(&file).unwrap().set_len(1 << 20).unwrap();
    let mut server = Server::start(ferry().arg("disk").arg(&file).arg("--vhost-user").arg(&socket));
    assert_eq!(limit_of(&socket), Value::Null);
    assert_eq!(set(&socket, "limit=iops=5,bps=1M,burst=2"), "limit iops=5,bps=1048576,burst=2\n");
    assert_eq!(limit_of(&socket), "iops=5,bps=1048576,burst=2");
    for (setting, words) in [
        ("limit=iops=0", "iops=0 is not possible"),
        ("limit=bps=18446744073709551616", "bps=18446744073709551616 is not possible"),
        ("limit=iops=1,group=g", "omit group="),
        ("poll-us=1000001", "poll-us=1000001 is not possible: the number is from 0 to 1000000"),
        ("poll-us=18446744073709551616", "poll-us=18446744073709551616 is not possible"),
        ("poll-us=-1", "poll-us=-1 is not possible"),
        ("entry-timeout=1", "\"entry-timeout\" cannot be changed while "),
    ] {
        let said = refused_set(&socket, setting);
        assert!(said.contains(words) && !said.contains('\x1b'), "{setting}: {said:?}");
    }
    assert_eq!(limit_of(&socket), "iops=5,bps=1048576,burst=2", "nothing has changed");
    assert_eq!(set(&socket, "poll-us=0"), "poll-us 0\n");
    assert_eq!(set(&socket, "limit=none"), "no limit\n");
    assert_eq!(limit_of(&socket), Value::Null);
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn impossible_limits_are_refused_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    for limit in ["iops=0", "bps=18446744073709551616", "iops=1000000001", "group=a", "x"] {
        for command in ["share", "disk"] {
            let socket_flag = if command == "share" { "--virtiofs" } else { "--vhost-user" };
            let output = run(ferry().args([command, "mem", "--limit", limit, socket_flag]).arg(&socket));
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(said.contains(limit), "{limit}: {said}");
            assert!(!socket.exists());
        }
    }
    let disk = run(ferry().args(["disk", "f", "--limit", "iops=1,group=a", "--vhost-user"]).arg(&socket));
    let said = String::from_utf8_lossy(&disk.stderr);
    assert!(!disk.status.success() && said.contains("a disk has no group"), "{said}");
    let mut command = ferry();
    command.args(["share", "mem", "--limit", "iops=1,group=a", "--virtiofs"]).arg(&socket);
    let said =
        refused(2, command.args(["mem", "--limit", "iops=2,group=a", "--virtiofs"]).arg(directory.path().join("t")));
    assert!(said.contains("are of one group"), "{said}");
}

#[test]
fn a_mount_is_limited_while_it_runs() {
    needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path().join("m");
    std::fs::create_dir(&at).unwrap();
    let mut command = ferry();
    // Without it the mount would use passthrough.
    command.args(["share", "mem", "--limit", "iops=100000", "--cache", "none", "--mount"]).arg(&at);
    let server = Server::start(&mut command);
    let path = at.join("f");
    std::fs::write(&path, [7; 4096]).unwrap();
    let file = File::open(&path).unwrap();
    let reads = |time: Duration| {
        let (begin, mut done) = (Instant::now(), 0_u32);
        while begin.elapsed() < time {
            assert_eq!(file.read_at(&mut [0; 4096], 0).unwrap(), 4096);
            done += 1;
        }
        done
    };
    let said = refused_set(&at, "poll-us=1");
    assert!(
        said.contains("\"poll-us\" cannot be changed while mem is served (what can be: limit, entry-timeout,"),
        "{said}"
    );
    set(&at, "limit=iops=100");
    let waits = || {
        let output = run(ferry().arg("metrics").arg(&at));
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("ferry_limit_waits_total{")).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = waits();
    let limited = reads(Duration::from_secs(1));
    assert!(waits() > before, "nothing waited");
    set(&at, "limit=none");
    let unlimited = reads(Duration::from_secs(1));
    assert!((10..=115).contains(&limited), "{limited} reads");
    assert!(unlimited > 200, "{unlimited} reads");
    drop((file, server));
}

/// Past the limit of file sizes a client gets an error, and others are served on. The system would send a signal that ends the server.
#[test]
fn a_write_past_the_limit_of_file_sizes_is_an_error_for_its_client_only() {
    needs_fuse!();
    let program = ferry().get_program().to_owned();
    let limited = || {
        let mut command = Command::new("sh");
        // In units of 512 bytes.
        command.args(["-c", "ulimit -f 100; exec \"$0\" \"$@\""]).arg(&program).stdin(Stdio::null());
        command
    };
    let check = |place: &Place, way: &str| {
        let file = File::create(place.mnt.join("large")).unwrap();
        // A client of 9P writes behind.
        let error = file.write_all_at(&vec![1; 1 << 20], 0).and_then(|()| file.sync_all()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::FBIG.raw_os_error()), "{way}");
        assert_eq!(fs::read(place.mnt.join("file")).unwrap(), b"from the source", "{way}");
        assert!(fs::metadata(place.source.join("large")).unwrap().len() <= 51_200, "{way}");
    };
    for path in ["devfuse", "auto"] {
        let place = Place::new();
        let mut mount = limited();
        mount.arg("mount").arg(&place.source).arg(&place.mnt).args(["--passthrough", "off", "--path", path]);
        let pid = place.mounted_by(&mut mount);
        check(&place, path);
        place.unmount(pid);
    }
    let place = Place::new();
    let address = format!("unix:{}", place.at("9p").display());
    let mut share = limited();
    let _share = Server::start(share.arg("share").arg(&place.source).args(["--9p", &address]));
    let mut mount = ferry();
    let pid = place.mounted_by(mount.arg("mount").arg(format!("9p:{address}")).arg(&place.mnt));
    check(&place, "9p");
    place.unmount(pid);
}
