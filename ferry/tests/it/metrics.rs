//! `ferry metrics`, `--metrics` and `ferry top`.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount_remount};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::common::place::{Place, until};
use crate::common::schema::Schema;
use crate::common::{Server, ferry, needs_fuse, refused, run};

fn printed(args: &[&str]) -> String {
    let output = run(ferry().args(args));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// The metric families of a text: their types and the names of their samples.
#[derive(Debug, Default)]
struct Families(BTreeMap<String, (String, BTreeSet<String>)>);

/// Checks OpenMetrics text (version 1.0.0, "Text Format"), as far as it is used here; returns its families.
fn families(text: &str) -> Families {
    let mut families = Families::default();
    let mut series = BTreeSet::new();
    let mut family = String::new();
    let body = text.strip_suffix("# EOF\n").expect("the text ends with # EOF");
    for line in body.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let (word, rest) = comment.split_once(' ').unwrap();
            let (name, value) = rest.split_once(' ').unwrap();
            match word {
                "TYPE" => {
                    assert!(["counter", "gauge", "histogram"].contains(&value), "{line}");
                    assert!(!name.ends_with("_total") && !name.ends_with("_info") || value == "gauge", "{line}");
                    let is_new = families.0.insert(name.into(), (value.into(), BTreeSet::new())).is_none();
                    assert!(is_new, "{name} comes twice");
                    family = name.into();
                }
                "UNIT" => assert!(name == family && name.ends_with(&format!("_{value}")), "{line}"),
                "HELP" => assert!(name == family && value.ends_with('.') && !value.contains('\\'), "{line}"),
                _ => panic!("{line}"),
            }
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok_and(|value| value >= 0.0), "{line}");
        assert!(series.insert(sample.to_owned()), "{sample} comes twice");
        let name = sample.split('{').next().unwrap();
        let (kind, names) = families.0.get_mut(&family).unwrap();
        let suffix = name.strip_prefix(family.as_str()).unwrap_or_else(|| panic!("{line} is not of {family}"));
        let suffixes: &[&str] = match kind.as_str() {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_count", "_sum"],
            _ => &[""],
        };
        assert!(suffixes.contains(&suffix), "{line} is no sample of a {kind}");
        names.insert(name.into());
    }
    families
}

/// The value of the only series whose name and labels contain these parts.
fn value(text: &str, parts: &[&str]) -> f64 {
    let mut found = text.lines().filter(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)));
    let line = found.next().unwrap_or_else(|| panic!("no {parts:?} in {text}"));
    assert_eq!(found.next(), None, "{parts:?}");
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// A request over HTTP; the whole reply.
fn fetched(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Returns a port that no process uses, and that the kernel assigns to none.
pub(crate) fn free_port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    loop {
        // Below the ports that the kernel assigns (net.ipv4.ip_local_port_range).
        let number = 10_000 + (std::process::id() + TRIED.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let number = u16::try_from(number).unwrap();
        if TcpListener::bind(("127.0.0.1", number)).is_ok() {
            return number;
        }
    }
}

#[test]
fn a_mounts_requests_are_in_the_metrics() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off"]);
    let mnt = place.mnt.to_str().unwrap();
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    assert!(fs::metadata(place.mnt.join("missing")).is_err());
    fs::write(place.mnt.join("new"), [0; 5000]).unwrap();
    let text = printed(&["metrics", mnt]);
    families(&text);
    let at = format!("at=\"{mnt}\"");
    let of = |parts: &[&str]| value(&text, &[&[at.as_str(), "export=\"mount\""], parts].concat());
    assert!(of(&["ferry_request_data_bytes_total", "operation=\"read\""]) >= 15.0, "{text}");
    assert!((of(&["ferry_request_data_bytes_total", "operation=\"write\""]) - 5000.0).abs() < 0.5, "{text}");
    assert!(of(&["ferry_request_errors_total", "operation=\"lookup\"", "errno=\"ENOENT\""]) >= 1.0, "{text}");
    let count = of(&["ferry_request_duration_seconds_count", "operation=\"lookup\""]);
    assert!(count >= 2.0 && of(&["duration_seconds_bucket", "operation=\"lookup\"", "le=\"+Inf\""]) >= count);
    assert!(of(&["ferry_requests_in_flight", "operation=\"lookup\""]) < 1.0, "{text}");
    place.unmount(pid);
}

#[test]
#[ignore = "long: make test-all"]
fn promtool_accepts_the_metrics() {
    if Command::new("promtool").arg("--version").output().is_err() {
        ferry_skip::skip!("no promtool: apt-get install prometheus");
        return;
    }
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off"]);
    assert!(fs::read(place.mnt.join("file")).is_ok() && fs::read(place.mnt.join("missing")).is_err());
    let text = printed(&["metrics", place.mnt.to_str().unwrap(), "--format", "prometheus"]);
    place.unmount(pid);
    let mut check = Command::new("promtool");
    let mut check = check.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = check.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn shares_and_disks_are_in_the_metrics_of_all_servers() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("shared \"a\\b\"\n\x1b[2J")).unwrap();
    fs::write(at("disk"), [0; 8192]).unwrap();
    let mut share = ferry();
    share.arg("share").arg(at("shared \"a\\b\"\n\x1b[2J")).arg("--virtiofs").arg(at("s"));
    let _share = Server::start(share.arg("--9p").arg(format!("unix:{}", at("9p").display())));
    let mut disk = ferry();
    let disk = Server::start(disk.arg("disk").arg(at("disk")).arg("--vhost-user").arg(at("d")));
    let text = printed(&["metrics"]);
    families(&text);
    assert!(text.lines().all(|line| !line.chars().any(char::is_control)), "{text:?}");
    for (export, socket) in [("virtiofs", "s"), ("9p", "9p"), ("disk", "d")] {
        let (export, place) = (format!("export=\"{export}\""), format!("{}\"", at(socket).display()));
        assert!(value(&text, &["ferry_clients", "pid=\"", &export, &place]) < 0.5, "{text}");
    }
    // A disk is found by its socket and its file, and by ferry status.
    for target in [at("d"), at("disk")] {
        let own = printed(&["metrics", target.to_str().unwrap()]);
        assert!(own.contains("export=\"disk\"") && !own.contains("pid=") && !own.contains("virtiofs"), "{own}");
    }
    let pid = disk.pid().as_raw_nonzero().to_string();
    let status: Value = serde_json::from_str(&printed(&["status", &pid, "--json"])).unwrap();
    Schema::of("watch.md", "JSON of ferry status").check(&status);
    assert_eq!(status["servers"][0]["shares"][0]["exports"][0]["kind"], "disk");
    assert!(printed(&["status", &pid]).contains("disk "), "{status}");
    // The older format has the suffix of counters in their comments.
    let older = printed(&["metrics", "--format", "prometheus"]);
    assert!(older.contains("# TYPE ferry_request_errors_total counter\n") && !older.contains("# EOF"), "{older}");
    assert!(refused(1, ferry().args(["metrics", "/nonexistent"])).contains("/nonexistent"));
}

#[test]
fn each_series_of_a_process_with_several_servers_comes_once() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let mut disks = ferry();
    disks.arg("disk");
    for name in ["a", "b"] {
        fs::write(at(name), [0; 8192]).unwrap();
        disks.arg(at(name)).arg("--vhost-user").arg(at(&format!("{name}.sock")));
    }
    let disks = Server::start(&mut disks);
    let text = printed(&["metrics", &disks.pid().as_raw_nonzero().to_string()]);
    families(&text);
    for socket in ["a.sock", "b.sock"] {
        assert!(value(&text, &["ferry_clients", "pid=\"", socket]) < 0.5, "{text}");
    }
}

#[test]
fn metrics_are_served_on_loopback_and_unix_sockets() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    let mut share = ferry();
    share.arg("share").arg(directory.path()).arg("--virtiofs").arg(at("s")).args(["--metrics", &address]);
    let mut share = Server::start(&mut share);
    let reply = fetched(TcpStream::connect(&address).unwrap(), GET);
    let (head, text) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("openmetrics-text; version=1.0.0"), "{head}");
    families(text);
    assert!(text.contains("export=\"virtiofs\""), "{text}");
    let old = fetched(TcpStream::connect(&address).unwrap(), "GET /metrics HTTP/1.0\r\nAccept: text/plain\r\n\r\n");
    assert!(old.contains("version=0.0.4") && !old.contains("# EOF"), "{old}");
    assert!(fetched(TcpStream::connect(&address).unwrap(), "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    // A second server cannot have the address, and says so.
    let mut second = ferry();
    second.arg("share").arg(directory.path()).arg("--virtiofs").arg(at("t")).args(["--metrics", &address]);
    assert!(refused(1, &mut second).contains(&address));
    share.signal(Signal::TERM);
    assert_eq!(share.status(), Some(0));
    assert!(TcpStream::connect(&address).is_err());
    // A disk's, on a unix socket that is this user's only and is removed at the end.
    fs::write(at("disk"), [0; 8192]).unwrap();
    let mut disk = ferry();
    disk.arg("disk").arg(at("disk")).arg("--vhost-user").arg(at("d"));
    let mut disk = Server::start(disk.arg("--metrics").arg(format!("unix:{}", at("m").display())));
    assert_eq!(fs::metadata(at("m")).unwrap().permissions().mode() & 0o777, 0o600);
    let reply = fetched(UnixStream::connect(at("m")).unwrap(), GET);
    assert!(reply.contains("export=\"disk\""), "{reply}");
    disk.signal(Signal::TERM);
    assert_eq!(disk.status(), Some(0));
    assert!(!at("m").exists());
    for (address, why) in [("0.0.0.0:9100", "other machines"), ("[::]:1", "other machines"), ("9100", "not an address")]
    {
        let output = run(ferry().args(["share", "/srv", "--virtiofs", "/nonexistent/s", "--metrics", address]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(why) && said.contains("127.0.0.1:PORT"), "{said}");
    }
}

#[test]
fn a_metrics_client_that_never_reads_or_sends_garbage_costs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let mut share = ferry();
    share.arg("share").arg(directory.path()).arg("--virtiofs").arg(directory.path().join("s"));
    let share = Server::start(share.args(["--metrics", &address]));
    let connect = || TcpStream::connect(&address).unwrap();
    // More than are served at once: some say nothing, some never read, some send garbage that never ends.
    let silent: Vec<_> = (0..20).map(|_| connect()).collect();
    let deaf: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = connect();
            let _ = stream.write_all(GET.as_bytes());
            stream
        })
        .collect();
    for _ in 0..20 {
        let mut stream = connect();
        stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        // It is cut off.
        let _ = (0..1024).try_for_each(|_| stream.write_all(&[0x1b; 1024]));
    }
    for request in ["\r\n\r\n", "\u{0}\r\n\r\n", "GET /metrics\r\n\r\n"] {
        let begin = Instant::now();
        assert!(fetched(connect(), request).starts_with("HTTP/1.1 400 "), "{request:?}");
        assert!(begin.elapsed() < Duration::from_secs(4));
    }
    let begin = Instant::now();
    assert!(fetched(connect(), GET).starts_with("HTTP/1.1 200 OK"));
    assert!(begin.elapsed() < Duration::from_secs(4), "others hold it up");
    // Half a request and an end of it.
    let half = connect();
    half.shutdown(Shutdown::Write).unwrap();
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", serving(&share))).unwrap().count();
    drop((silent, deaf, half));
    let before = descriptors();
    assert!(before < 60, "{before} descriptors");
}

/// The process that serves: the child of the one outside of the sandbox, if there is one.
fn serving(server: &Server) -> String {
    let pid = server.pid().as_raw_nonzero().to_string();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().next().map_or(pid, str::to_owned)
}

#[test]
fn a_mount_in_the_background_serves_metrics() {
    needs_fuse!();
    let place = Place::new();
    let address = format!("unix:{}", place.at("m").display());
    let pid = place.mounted(&["--metrics", &address]);
    let reply = fetched(UnixStream::connect(place.at("m")).unwrap(), GET);
    assert!(reply.contains("export=\"mount\""), "{reply}");
    place.unmount(pid);
    assert!(!place.at("m").exists());
}

#[test]
fn top_shows_the_rates_of_an_interval() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off", "--cache", "none"]);
    let mnt = place.mnt.to_str().unwrap();
    let file = place.mnt.join("file");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let load = std::thread::spawn(move || {
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            fs::read(&file).unwrap();
            let _ = fs::metadata(file.with_file_name("missing"));
        }
    });
    let json: Value = serde_json::from_str(&printed(&["top", mnt, "--once", "--json"])).unwrap();
    let text = printed(&["top", mnt, "--once"]);
    drop(stop);
    load.join().unwrap();
    Schema::of("metrics.md", "JSON of ferry top").check(&json);
    let export = &json["exports"][0];
    assert_eq!((&export["export"], &export["at"]), (&"mount".into(), &mnt.into()));
    let number = |field: &str| export[field].as_u64().unwrap();
    assert!(number("requests_per_s") > 10 && number("errors_per_s") > 1 && number("read_bytes_per_s") > 15, "{export}");
    assert!(0 < number("p50_ns") && number("p50_ns") <= number("p99_ns"), "{export}");
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().nth(1).unwrap().contains(&format!("mount {mnt} ")), "{text}");
    let said = refused(2, ferry().args(["top", mnt]));
    assert!(said.contains("--once"), "{said}");
    place.unmount(pid);
}

/// In a pseudo-terminal, which script(1) makes.
#[test]
fn top_redraws_a_terminal_and_escapes_names() {
    let directory = tempfile::tempdir().unwrap();
    let hostile = directory.path().join("a\x1b]0;title\x07\nb");
    fs::create_dir(&hostile).unwrap();
    let mut share = ferry();
    let share = Server::start(share.arg("share").arg(&hostile).arg("--virtiofs").arg(directory.path().join("s")));
    let pid = share.pid().as_raw_nonzero();
    let program = ferry().get_program().to_str().unwrap().to_owned();
    let mut top = Command::new("script");
    top.args([
        "--quiet",
        "--flush",
        "--return",
        "--command",
        &format!("stty rows 50 cols 200 && exec {program} top {pid}"),
        "/dev/null",
    ]);
    let mut top = top.stdin(Stdio::null()).stdout(Stdio::piped()).env("TERM", "xterm").spawn().unwrap();
    let mut shown = String::new();
    let mut out = top.stdout.take().unwrap();
    let begin = Instant::now();
    // Two frames, each with the heading.
    while shown.matches("REQ/S").count() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(30), "{shown:?}");
        let mut bytes = [0; 4096];
        let count = out.read(&mut bytes).unwrap();
        assert!(count > 0, "it has ended: {shown:?}");
        shown += &String::from_utf8_lossy(&bytes[..count]);
    }
    top.kill().unwrap();
    top.wait().unwrap();
    assert!(shown.contains("virtiofs") && shown.contains("a\\u{1b}]0;title"), "{shown:?}");
    // The only control sequences are those that clear the screen.
    let plain = shown.replace("\x1b[2J", "").replace("\x1b[1;1H", "").replace("\x1b[H", "").replace("\r\x1b[2K", "");
    assert!(!plain.chars().any(|c| c.is_control() && !['\r', '\n'].contains(&c)), "{plain:?}");
}

/// The names of metrics in the dashboard are those of a server that has everything.
#[test]
fn the_dashboard_asks_for_metrics_that_exist() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off"]);
    let mut share = ferry();
    share.arg("share").arg(&place.source).arg("--virtiofs").arg(place.at("s")).arg("--state").arg(place.at("state"));
    fs::create_dir(place.at("state")).unwrap();
    fs::set_permissions(place.at("state"), fs::Permissions::from_mode(0o700)).unwrap();
    let _share = Server::start(share.arg("--9p").arg(format!("unix:{}", place.at("9p").display())));
    let images = crate::common::images::Place::new();
    let mut image = shared_image(&images, "share", "--virtiofs");
    let _image = Server::start(&mut image);
    assert!(fs::read(place.mnt.join("file")).is_ok() && fs::read(place.mnt.join("missing")).is_err());
    let known: BTreeSet<String> =
        families(&printed(&["metrics"])).0.into_values().flat_map(|(_, names)| names).collect();
    place.unmount(pid);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/grafana.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries: Vec<_> = targets.map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(panels.len() >= 6 && queries.len() >= panels.len(), "{queries:?}");
    let mut asked = BTreeSet::new();
    let lists = dashboard["templating"]["list"].as_array().unwrap().iter().filter(|list| list["type"] == "query");
    for query in queries.into_iter().chain(lists.map(|list| list["query"].as_str().unwrap())) {
        let is_name = |word: &&str| word.starts_with("ferry_");
        let names: Vec<_> = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(is_name).collect();
        assert!(!names.is_empty(), "{query}");
        for name in names {
            assert!(known.contains(name), "{name} in {query} is none of {known:?}");
            asked.insert(name);
        }
    }
    assert!(asked.len() >= 5, "{asked:?}");
    // What is documented is what is printed.
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide/metrics.md")).unwrap();
    let rows: String = page.lines().filter(|line| line.starts_with("| `ferry_")).collect();
    for name in &known {
        let base = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(rows.contains(&format!("`{base}`")), "{base} is not documented");
    }
}

#[test]
fn metrics_count_what_clients_hold() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off"]);
    let mnt = place.mnt.to_str().unwrap();
    let of = |name: &str| value(&printed(&["metrics", mnt]), &[name]);
    let inodes = of("ferry_inodes{");
    let files: Vec<_> = ["file", "other"].iter().map(|name| fs::File::open(place.mnt.join(name)).unwrap()).collect();
    until("two open files", || of("ferry_open_files{") > 1.5);
    assert!(of("ferry_inodes{") >= inodes + 1.5);
    let descriptors = of("ferry_descriptors ");
    assert!((8.0..500.0).contains(&descriptors), "{descriptors}");
    assert!(of("ferry_invalid_requests_total{") < 0.5);
    let init = printed(&["metrics", mnt]);
    let init = value(&init, &["ferry_request_duration_seconds_count", "operation=\"init\""]);
    assert!((init - 1.0).abs() < 0.1, "{init}");
    // A lock that is waited for.
    let first = fs::File::open(place.mnt.join("file")).unwrap();
    first.lock().unwrap();
    let second = fs::File::open(place.mnt.join("file")).unwrap();
    let waits = std::thread::spawn(move || second.lock().unwrap());
    until("a lock that waits", || of("ferry_parked_locks{") > 0.5);
    first.unlock().unwrap();
    waits.join().unwrap();
    drop((files, first));
    until("nothing is held", || of("ferry_parked_locks{") < 0.5 && of("ferry_open_files{") < 0.5);
    place.unmount(pid);
}

/// The kernel puts as many forgotten inodes into a message as the server's buffer for a WRITE has room for.
#[test]
fn inodes_that_are_forgotten_while_a_server_is_busy_are_released() {
    needs_fuse!();
    let place = Place::new();
    for number in 0..6000 {
        fs::write(place.source.join(number.to_string()), "").unwrap();
    }
    let pid = place.mounted(&["--path", "devfuse"]);
    let inodes = || value(&printed(&["metrics", place.mnt.to_str().unwrap()]), &["ferry_inodes{"]);
    for entry in fs::read_dir(&place.mnt).unwrap() {
        entry.unwrap().metadata().unwrap();
    }
    assert!(inodes() > 6000.0);
    kill_process(pid, Signal::STOP).unwrap();
    // A remount drops all names, and FUSE keeps no inode without one.
    mount_remount(&place.mnt, MountFlags::empty(), "").unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    until("their release", || inodes() < 1000.0);
    place.unmount(pid);
}

/// `ferry share` or `ferry disk` of an image, on a socket of the command's name.
fn shared_image(place: &crate::common::images::Place, command: &str, flag: &str) -> Command {
    if !place.at("image").exists() {
        let mut build = ferry();
        build.args(["image", "build"]).arg(place.at("tree")).arg("-o").arg(place.at("image"));
        assert!(run(build.arg("--store").arg(place.at("store"))).status.success());
    }
    let mut line = ferry();
    line.arg(command).arg(format!("image:{}", place.at("image").display()));
    line.arg("--store").arg(place.at("store")).arg(flag).arg(place.at(&format!("{command}.sock")));
    line
}

#[test]
fn an_images_bytes_and_a_confined_servers_descriptors_are_in_the_metrics() {
    let place = crate::common::images::Place::new();
    let share = Server::start(&mut shared_image(&place, "share", "--virtiofs"));
    let _disk = Server::start(&mut shared_image(&place, "disk", "--vhost-user"));
    for socket in ["share.sock", "disk.sock"] {
        let text = printed(&["metrics", place.at(socket).to_str().unwrap()]);
        for name in ["fetched", "verified", "deduplicated"] {
            assert!(value(&text, &[&format!("ferry_image_{name}_bytes_total{{")]) < 1e9, "{text}");
        }
        // Inside the sandbox there is no /proc but the table of descriptors.
        let descriptors = value(&text, &["ferry_descriptors "]);
        assert!((5.0..500.0).contains(&descriptors), "{descriptors}");
    }
    // One more connection, one more descriptor.
    let count = || value(&printed(&["metrics", &share.pid().as_raw_nonzero().to_string()]), &["ferry_descriptors "]);
    let before = count();
    let connection = UnixStream::connect(place.at("share.sock")).unwrap();
    until("a descriptor of a connection", || count() > before);
    drop(connection);
    until("it is closed", || count() <= before);
}

/// A disk has its own process, so an address for all shares of a file has nothing to show.
#[test]
fn metrics_and_a_trace_of_disks_alone_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("disk"), [0; 4096]).unwrap();
    let disk = "[[disk]]\nfile = \"disk\"\nvhost-user = \"s\"\n";
    for (before, flags, words) in [
        ("metrics = \"127.0.0.1:0\"\n", &[][..], "give each [[disk]] its own metrics"),
        ("", &["--metrics", "127.0.0.1:0"], "give each [[disk]] its own metrics"),
        ("", &["--trace", "trace"], "ferry disk --trace"),
    ] {
        fs::write(at("config"), format!("{before}{disk}")).unwrap();
        let mut command = ferry();
        command.args(["share", "--config", "config"]).args(flags).current_dir(directory.path());
        let said = refused(2, &mut command);
        assert!(said.contains(words), "{said}");
        assert!(!at("s").exists() && !at("trace").exists());
    }
}

/// Each has samples of its own, and neither takes anything from the other.
#[test]
fn a_second_top_sees_the_same() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--passthrough", "off", "--cache", "none"]);
    let mnt = place.mnt.to_str().unwrap();
    let file = place.mnt.join("file");
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let load = std::thread::spawn(move || {
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            fs::read(&file).unwrap();
        }
    });
    let top = || ferry().args(["top", mnt, "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut tops = [top(), top()];
    let mut lines = tops.each_mut().map(|top| BufReader::new(top.stdout.take().unwrap()).lines());
    let mut requests = |number: usize| {
        let line: Value = serde_json::from_str(&lines[number].next().unwrap().unwrap()).unwrap();
        assert_eq!(line["exports"].as_array().unwrap().len(), 1, "{line}");
        line["exports"][0]["requests_per_s"].as_u64().unwrap()
    };
    for _ in 0..2 {
        assert!(requests(0) > 10 && requests(1) > 10);
    }
    // The other goes on when one is killed.
    tops[0].kill().unwrap();
    tops[0].wait().unwrap();
    assert!(requests(1) > 10);
    tops[1].kill().unwrap();
    tops[1].wait().unwrap();
    drop(stop);
    load.join().unwrap();
    place.unmount(pid);
}

#[test]
fn the_version_is_that_of_each_server() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("disk"), [0; 8192]).unwrap();
    let mut disk = ferry();
    let disk = Server::start(disk.arg("disk").arg(at("disk")).arg("--vhost-user").arg(at("s")));
    let pid = disk.pid().as_raw_nonzero();
    let line = format!("ferry_build_info{{pid=\"{pid}\",version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
    let text = printed(&["metrics"]);
    assert!(text.lines().any(|found| found == line), "{line}: {text}");
}
