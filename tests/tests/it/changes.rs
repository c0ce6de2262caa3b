//! `ferry add`, `ferry remove` and `ferry reload`: what a running process serves changes, and clients of all else notice nothing.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, ROOT};
use ferry_tests::disks::model::SECTOR_BYTES;
use ferry_tests::disks::{FEATURES, Load};
use ferry_tests::inside::{InnerProcess, children_of};
use ferry_tests::sandboxed::{SOON, Served, TICK, USER, UserHome, as_user, is_root};
use rustix::process::{Pid, Signal, kill_process};

const SECTORS: usize = 8192;
const O_RDWR_CREAT: u32 = 0o102;

/// Three directories and a disk of a user.
fn home_of(user: u32) -> UserHome {
    let home = UserHome::of(user);
    for dir in ["one", "two", "three"] {
        home.make(dir, |path| fs::create_dir(path).unwrap());
    }
    let bytes = (SECTORS * SECTOR_BYTES) as u64;
    home.make("disk", |file| ferry_disk::grow(file, bytes, &ferry_disk::Options::default()).unwrap());
    home
}

/// A share of a file, with more keys.
fn share(source: &str, socket: &str, keys: &str) -> String {
    format!("[[share]]\nsource = {source:?}\nvirtiofs = {socket:?}\n{keys}\n")
}

/// Serves the shares of a file.
fn serve(home: UserHome, file: &str) -> Served {
    home.make("f.toml", |path| fs::write(path, file).unwrap());
    home.serve("share --config f.toml --json")
}

fn write_config(served: &Served, file: &str) {
    fs::write(served.home.at("f.toml"), file).unwrap();
}

fn ask(served: &Served, line: &str) -> Output {
    served.home.command(&[], line).output().unwrap()
}

/// Runs a command that succeeds; returns what it says.
#[track_caller]
fn done(served: &Served, line: &str) -> String {
    let output = ask(served, line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line}: {said} {}", served.said());
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a command that fails; returns its sentence.
#[track_caller]
fn refused(served: &Served, line: &str) -> String {
    let output = ask(served, line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

fn pid_of(served: &Served) -> u32 {
    served.started.pid().as_raw_nonzero().get().unsigned_abs()
}

/// The sources that are served, with their limits.
fn sources(served: &Served) -> Vec<(String, Option<String>)> {
    let said = done(served, &format!("status {} --json", pid_of(served)));
    let json: serde_json::Value = serde_json::from_str(&said).unwrap();
    let servers = json["servers"].as_array().unwrap().iter();
    let shares = servers.flat_map(|server| server["shares"].as_array().unwrap());
    let name = |share: &serde_json::Value| {
        let path = Path::new(share["source"].as_str().unwrap());
        path.file_name().unwrap_or_default().to_str().unwrap().to_owned()
    };
    let mut found: Vec<_> = shares.map(|share| (name(share), share["limit"].as_str().map(str::to_owned))).collect();
    found.sort();
    found
}

fn names(served: &Served) -> Vec<String> {
    sources(served).into_iter().map(|(name, _)| name).collect()
}

/// The processes that serve now.
fn processes(served: &Served) -> Vec<Pid> {
    children_of(served.started.pid())
}

/// Something that a guest does, seen on the host.
#[track_caller]
fn is_used(driver: &mut Driver, dir: &Path, name: &str) {
    let (file, open) = driver.create(ROOT, name, O_RDWR_CREAT, 0o100_644).unwrap();
    driver.write(file.nodeid, open.fh, 0, name.as_bytes()).unwrap();
    driver.release(file.nodeid, open.fh).unwrap();
    assert_eq!(fs::read(dir.join(name)).unwrap(), name.as_bytes());
}

fn disk_is_used(served: &Served, socket: &str) {
    let config = Config {
        first_queues: 0,
        queues: 1,
        queue_size: 128,
        memory_bytes: 32 << 20,
        device_features: FEATURES,
        timeout: SOON,
        ..Config::default()
    };
    let mut driver = Driver::connect(served.home.at(socket), config).unwrap();
    let mut load = Load::new(&mut driver, SECTORS, 7, true);
    load.run(&mut driver, 500, Duration::ZERO, SOON);
    load.drain(&mut driver, SOON);
    load.read_all(&mut driver, SOON);
}

/// The processes of one command have the same keys of hash maps: numbers that clients must not meet twice come from elsewhere.
#[test]
fn processes_of_one_command_have_random_numbers_of_their_own() {
    if !is_root() {
        return;
    }
    let home = home_of(USER);
    for file in ["one/file", "two/file"] {
        home.make(file, |path| fs::write(path, "").unwrap());
    }
    let served = serve(home, &(share("one", "a", "") + &share("two", "b", "")));
    assert_eq!(processes(&served).len(), 2);
    let number = |socket: &str| served.guest_at(socket).lookup(ROOT, "file").unwrap().nodeid;
    assert_ne!(number("a"), number("b"), "a client of one of them could name an inode of the other");
}

/// Repeats a command until it succeeds: the server notices the end of a client a moment later.
#[track_caller]
fn done_soon(served: &Served, line: &str) -> String {
    let end = Instant::now() + SOON;
    loop {
        let output = ask(served, line);
        if output.status.success() {
            return String::from_utf8(output.stdout).unwrap();
        }
        assert!(Instant::now() < end, "{line}: {}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(TICK);
    }
}

fn shares_and_disks_come_and_go(user: u32) {
    let keys = if user == 0 { "" } else { "map-user = \"auto\"" };
    let flags = if user == 0 { "" } else { "--map-user auto" };
    let mut served = serve(home_of(user), &share("one", "a", keys));
    let mut first = served.guest_at("a");
    is_used(&mut first, &served.home.at("one"), "before");
    let before = processes(&served);

    // By something that it serves, and by its id.
    let said = done(&served, &format!("add a share two --virtiofs b --tag two {flags}"));
    assert!(said.starts_with("serving ") && said.contains("/two at ") && said.contains("/b"), "{said}");
    let said = done(&served, &format!("add {} disk disk --vhost-user d", pid_of(&served)));
    assert!(said.contains("/disk at "), "{said}");
    assert_eq!(names(&served), ["disk", "one", "two"]);
    disk_is_used(&served, "d");
    let mut second = served.guest_at("b");
    is_used(&mut second, &served.home.at("two"), "there");
    is_used(&mut first, &served.home.at("one"), "meanwhile");

    // The new server sees its own directory and nothing else.
    let own = processes(&served)
        .into_iter()
        .find(|pid| InnerProcess::of(*pid).mounts().contains(&"/share/0".into()) && !before.contains(pid));
    let inside = InnerProcess::of(own.unwrap());
    inside.all_are("Seccomp", "2");
    assert_eq!(inside.sees("share"), ["0"]);
    assert_eq!(fs::read_to_string(inside.file("root/share/0/there")).unwrap(), "there");

    // The same again, and what is of no use.
    let count = processes(&served).len();
    for (line, words) in [
        ("add a share two --virtiofs b", "is served already, from "),
        ("add a share two --9p unix:b", "is served already, from "),
        ("add a disk disk --vhost-user b", "is served already, from "),
        ("add a disk disk --vhost-user e", "is in use by another process"),
        ("add a share missing --virtiofs c", "missing"),
        ("add a share two --virtiofs nowhere/c", "does not exist"),
        ("add a share two --fd 3", "descriptors are inherited at the start"),
        ("add a share two --virtiofs c --log debug", "are for the whole process"),
        ("remove two/there", "is a file"),
        ("remove one/nothing", "cannot find"),
        (&format!("remove {}", pid_of(&served)), "is a process: name the socket"),
    ] {
        assert!(refused(&served, line).contains(words), "{line}: {}", refused(&served, line));
        assert!(["c", "e"].iter().all(|socket| !served.home.at(socket).exists()), "{line}");
    }
    let end = Instant::now() + SOON;
    while processes(&served).len() != count {
        assert!(Instant::now() < end, "processes are left");
        std::thread::sleep(TICK);
    }

    // Not under a client.
    let said = refused(&served, "remove b");
    assert!(said.contains("two has 1 connected client at ") && said.contains("--force"), "{said}");
    is_used(&mut second, &served.home.at("two"), "still");
    drop(second);
    let said = done_soon(&served, "remove b");
    assert!(said.contains("no longer serving") && !served.home.at("b").exists(), "{said}");
    assert_eq!(names(&served), ["disk", "one"]);
    assert!(inside.is_gone());

    // Or with force; and once more in its place.
    done(&served, &format!("add a share three --virtiofs b {flags}"));
    let third = served.guest_at("b");
    done(&served, "remove b --force");
    drop(third);
    done(&served, &format!("add a share two --virtiofs b {flags}"));
    let mut fourth = served.guest_at("b");
    is_used(&mut fourth, &served.home.at("two"), "again");
    drop(fourth);
    done_soon(&served, "remove d");
    done_soon(&served, "remove b");
    is_used(&mut first, &served.home.at("one"), "after");
    drop(first);
    let end = Instant::now() + SOON;
    while !refused(&served, "remove a").contains("is the last that this process serves") {
        assert!(Instant::now() < end);
    }
    assert_eq!(processes(&served), before);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    assert!(["a", "b", "d"].iter().all(|socket| !served.home.at(socket).exists()));
}

#[test]
fn shares_and_disks_come_and_go_while_guests_use_others() {
    if is_root() {
        shares_and_disks_come_and_go(0);
    }
}

#[test]
fn shares_of_a_user_come_and_go() {
    if is_root() {
        shares_and_disks_come_and_go(USER);
    }
}

#[test]
fn a_reload_applies_the_differences() {
    if !is_root() {
        return;
    }
    let disk = "[[disk]]\nfile = \"disk\"\nvhost-user = \"d\"\n";
    let start = share("one", "a", "limit = \"iops=100000\"") + &share("two", "b", "");
    let mut served = serve(home_of(0), &start);
    let mut first = served.guest_at("a");
    let kept = processes(&served);
    done(&served, "add a share mem --virtiofs m");
    assert_eq!(done(&served, "reload a"), "nothing to change\n");
    // Added, removed, changed, and as it was.
    write_config(
        &served,
        &(share("one", "a", "limit = \"iops=50000\"\npoll-us = 0") + &share("three", "c", "") + disk),
    );
    let said = done(&served, &format!("reload {}", pid_of(&served)));
    for words in ["one: limit iops=50000", "one: poll-us 0", "/three at ", "/disk at ", "no longer serving "] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let limit = |rates: &str| Some(rates.to_owned());
    let expected = [("disk", None), ("mem", None), ("one", limit("iops=50000")), ("three", None)];
    assert_eq!(sources(&served), expected.map(|(name, limit)| (name.to_owned(), limit)));
    assert!(processes(&served).contains(&kept[0]) && !processes(&served).contains(&kept[1]));
    assert!(!served.home.at("b").exists());
    is_used(&mut served.guest_at("c"), &served.home.at("three"), "new");
    disk_is_used(&served, "d");
    is_used(&mut first, &served.home.at("one"), "kept");
    // The level, of all servers and of those that come.
    let level = || done(&served, &format!("log {} --json", pid_of(&served)));
    assert_eq!(level().matches("\"log\":\"info\"").count(), 4, "{}", level());
    write_config(
        &served,
        &("log = \"warn\"\n".to_owned()
            + &share("one", "a", "")
            + &share("three", "c", "")
            + &share("two", "b", "")
            + disk),
    );
    assert!(done(&served, "reload a").contains("log warn\n"));
    done(&served, "add a share two --9p unix:n");
    assert_eq!(level().matches("\"log\":\"warn\"").count(), 6, "{}", level());
    // What was added by hand stays, and belongs to the file once that lists it.
    write_config(&served, &(share("one", "a", "") + &share("mem", "m", "")));
    let said = done_soon(&served, "reload a");
    assert!(said.contains("no longer serving"), "{said}");
    assert!(said.contains("log info"), "{said}");
    assert_eq!(names(&served), ["mem", "one", "two"]);
    write_config(&served, &share("one", "a", ""));
    done(&served, "reload a");
    assert_eq!(names(&served), ["one", "two"]);
    is_used(&mut first, &served.home.at("one"), "last");
    drop(first);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// The process that starts them has logged at another one from its start.
#[test]
fn servers_that_come_have_the_level_of_the_file() {
    if !is_root() {
        return;
    }
    let mut served = serve(home_of(0), &("log = \"warn\"\n".to_owned() + &share("one", "a", "")));
    write_config(&served, &share("one", "a", ""));
    assert!(done(&served, "reload a").contains("log info"));
    done(&served, "add a share two --virtiofs b");
    write_config(&served, &(share("one", "a", "") + &share("two", "b", "") + &share("three", "c", "")));
    done(&served, "reload a");
    let level = done(&served, &format!("log {} --json", pid_of(&served)));
    assert_eq!((level.matches("\"log\":\"info\"").count(), level.matches("\"log\"").count()), (3, 3), "{level}");
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Each file has a mistake, or asks for what cannot be: it is named, and nothing changes.
#[test]
fn a_reload_with_a_mistake_changes_nothing() {
    if !is_root() {
        return;
    }
    let one = share("one", "a", "limit = \"iops=1000\"");
    let start = one.clone() + &share("two", "b", "") + &share("two", "c", "tag = \"c\"");
    let mut served = serve(home_of(0), &start);
    let mut first = served.guest_at("a");
    let (before, shown) = (processes(&served), sources(&served));
    let faster = share("one", "a", "limit = \"iops=5\"");
    let rest = share("two", "b", "") + &share("two", "c", "tag = \"c\"");
    for (file, words) in [
        ("[[share]]\nsource = \"one\"\nvirtiof = \"a\"\n".into(), "line 3: unknown field `virtiof`: did you mean"),
        ("[[share]]\nsource = \"one\"\nvirtiofs = \n".into(), "line 3"),
        (String::new(), "it has no share or disk"),
        (share("one", "a", "limit = \"iops=0\"") + &rest, "line 4: iops=0 is not possible"),
        // A guest is connected, and other flags need another server.
        (share("one", "a", "cache = \"always\"\nlimit = \"iops=5\"") + &rest, "cache of "),
        (share("one", "a", "limit = \"iops=5,group=g\"") + &rest, "limit of "),
        (share("three", "a", "limit = \"iops=5\"") + &rest, "source of "),
        // No guest, but one process.
        (one.clone() + &share("two", "b", "read-only = true") + &share("two", "c", "tag = \"c\""), "read-only of "),
        (format!("sandbox = \"none\"\n{faster}{rest}"), "sandbox cannot change while the process runs"),
        (format!("metrics = \"127.0.0.1:0\"\n{faster}{rest}"), "metrics cannot change while the process runs"),
        // One process has both of two.
        (faster.clone() + &share("two", "b", ""), "two cannot be removed without "),
        // A guest is connected.
        (rest.clone(), "one has 1 connected client at "),
        // The start of what is new fails, by what comes last.
        (faster.clone() + &rest + &share("missing", "d", ""), "missing"),
        (faster.clone() + &rest + &share("three", "d", "") + &share("three", "e/e", ""), "does not exist"),
        (
            faster.clone()
                + &rest
                + "[[share]]\nsource = \"pmem:new\"\nsize = \"16M\"\nvirtiofs = \"d\"\n[[disk]]\nfile = \"gone\"\nvhost-user = \"e\"\n",
            "gone",
        ),
    ] {
        write_config(&served, &file);
        let said = refused(&served, "reload a");
        assert!(said.contains(words) && said.contains("nothing has changed"), "{file}: {said}");
        assert_eq!((processes(&served), sources(&served)), (before.clone(), shown.clone()), "{file}");
        assert!(["d", "e", "new"].iter().all(|name| !served.home.at(name).exists()), "{file}");
    }
    fs::remove_file(served.home.at("f.toml")).unwrap();
    assert!(refused(&served, "reload a").contains("f.toml"));
    is_used(&mut first, &served.home.at("one"), "after");
    write_config(&served, &start);
    assert_eq!(done(&served, "reload a"), "nothing to change\n");
    drop(first);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Mounts and 9P addresses, with clients of their own; and what concerns all servers of a process.
#[test]
fn mounts_and_9p_addresses_come_and_go() {
    if !is_root() {
        return;
    }
    let mut served = serve(home_of(0), &share("one", "a", ""));
    for dir in ["mnt", "client"] {
        fs::create_dir(served.home.at(dir)).unwrap();
    }
    let said = done(&served, "add a share two --mount mnt --9p unix:n");
    assert!(said.contains("/two at ") && said.contains("/mnt") && said.contains("/n"), "{said}");
    let file = fs::File::create(served.home.at("mnt/file")).unwrap();
    assert!(served.home.at("two/file").exists());
    let said = refused(&served, "remove mnt");
    assert!(said.contains("two has 1 open file at "), "{said}");
    drop(file);
    done(&served, "mount 9p:unix:n client");
    assert!(served.home.at("client/file").exists());
    let said = refused(&served, "remove two");
    assert!(said.contains("two has 1 connected client at unix:"), "{said}");
    let umount = std::process::Command::new("umount").arg(served.home.at("client")).status().unwrap();
    assert!(umount.success());
    for line in ["log debug", "set log=info"] {
        let (command, rest) = line.split_once(' ').unwrap();
        let said = done(&served, &format!("{command} {} {rest}", pid_of(&served)));
        assert_eq!(said.matches(rest.trim_start_matches("log=")).count(), 2, "{said}");
    }
    let said = refused(&served, &format!("set {} limit=iops=5", pid_of(&served)));
    assert!(said.contains("has a process for each share and disk: name "), "{said}");
    done_soon(&served, "remove two");
    assert!(!served.home.at("mnt/file").exists() && !served.home.at("n").exists());
    assert_eq!(names(&served), ["one"]);
    done(&served, "add a share mem --mount mnt");
    let held = fs::File::create(served.home.at("mnt/held")).unwrap();
    assert!(refused(&served, "remove mnt").contains("mem has 1 open file"));
    done(&served, "remove mnt --force");
    drop(held);
    assert!(fs::read_dir(served.home.at("mnt")).unwrap().next().is_none());
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Other flags need another server: in place of the one that no client uses, or of any with force; and if it cannot start, the one before
/// is back.
#[test]
fn other_flags_replace_an_unused_server() {
    if !is_root() {
        return;
    }
    let one = share("one", "a", "");
    let mut served = serve(home_of(0), &(one.clone() + &share("two", "b", "")));
    let mut first = served.guest_at("a");
    let mut second = served.guest_at("b");
    is_used(&mut second, &served.home.at("two"), "there");
    let read_only = one.clone() + &share("two", "b", "read-only = true");
    write_config(&served, &read_only);
    let said = refused(&served, "reload a");
    assert!(said.contains("read-only of ") && said.contains("two has 1 connected client"), "{said}");
    drop(second);
    let said = done_soon(&served, "reload a");
    assert!(said.contains("serving ") && said.contains("/two at "), "{said}");
    let mut second = served.guest_at("b");
    assert!(second.mkdir(ROOT, "no", 0o755).is_err());
    // One that cannot start.
    drop(second);
    let wrong = one.clone() + &share("missing", "b", "") + &share("three", "c", "");
    write_config(&served, &wrong);
    let end = Instant::now() + SOON;
    loop {
        let said = refused(&served, "reload a");
        if said.contains("missing") && said.contains("nothing has changed") {
            break;
        }
        assert!(said.contains("connected client") && Instant::now() < end, "{said}");
    }
    assert!(!served.home.at("c").exists());
    let mut second = served.guest_at("b");
    second.lookup(ROOT, "there").unwrap();
    assert!(second.mkdir(ROOT, "no", 0o755).is_err(), "it is read-only as before");
    // By force, under a client.
    write_config(&served, &(one + &share("three", "b", "")));
    done(&served, "reload a --force");
    drop(second);
    is_used(&mut served.guest_at("b"), &served.home.at("three"), "new");
    is_used(&mut first, &served.home.at("one"), "all the time");
    drop(first);
    // The only one, and back.
    write_config(&served, &share("one", "a", "read-only = true"));
    done_soon(&served, "reload a");
    write_config(&served, &share("one", "a", "read-only = true\nlimit = \"iops=70000\""));
    done(&served, "reload a");
    write_config(&served, &share("missing", "a", ""));
    assert!(refused(&served, "reload a").contains("nothing has changed"));
    assert_eq!(sources(&served), [("one".to_owned(), Some("iops=70000".to_owned()))], "as it was last");
    served.guest_at("a").lookup(ROOT, "all the time").unwrap();
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// A directory that was shared can be unmounted, and clients that come in the middle of its removal do no harm.
#[test]
fn removed_shares_leave_no_descriptors() {
    if !is_root() {
        return;
    }
    let mut served = serve(home_of(0), &share("one", "a", ""));
    let two = served.home.at("two");
    let umount = |path: &Path| std::process::Command::new("umount").arg(path).status().unwrap().success();
    let made = std::process::Command::new("mount").args(["-t", "tmpfs", "ferry-changes"]).arg(&two).status().unwrap();
    assert!(made.success());
    done(&served, "add a share two --virtiofs b");
    // It starts while the file system is there.
    done(&served, "add a share three --virtiofs c");
    is_used(&mut served.guest_at("b"), &two, "file");
    let socket = served.home.at("b");
    let comes = std::thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            drop(std::os::unix::net::UnixStream::connect(&socket));
        }
    });
    done_soon(&served, "remove b --force");
    comes.join().unwrap();
    for pid in processes(&served) {
        for process in [InnerProcess::only(pid), InnerProcess::of(pid)] {
            let mounts = fs::read_to_string(process.file("mountinfo")).unwrap();
            let is_host = process.file("ns/mnt").read_link().ok() == Path::new("/proc/self/ns/mnt").read_link().ok();
            assert!(is_host || !mounts.contains("ferry-changes"), "{mounts}");
        }
    }
    assert!(umount(&two), "it is in use");
    assert_eq!(names(&served), ["one", "three"]);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Only the user and root reach a manager, which always acts with the rights of its user.
#[test]
fn servers_of_other_users_cannot_be_changed() {
    if !is_root() {
        return;
    }
    const OTHER: u32 = USER + 1;
    let served = serve(home_of(USER), &share("one", "a", "map-user = \"auto\""));
    let (pid, socket) = (pid_of(&served).to_string(), served.home.at("a"));
    for line in [
        vec!["add", &pid, "share", "/usr", "--virtiofs", "/tmp/ferry-other.sock"],
        vec!["add", socket.to_str().unwrap(), "share", "/usr", "--virtiofs", "/tmp/ferry-other.sock"],
        vec!["remove", socket.to_str().unwrap(), "--force"],
        vec!["reload", &pid],
    ] {
        let mut command = as_user(OTHER, &served.home.at("ferry-copy"));
        command.args(&line).env("XDG_RUNTIME_DIR", served.home.path());
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{line:?}: {output:?}");
    }
    assert!(!Path::new("/tmp/ferry-other.sock").exists());
    // The directory of the sockets keeps others out, and so does the manager.
    let manager = served.home.at("ferry").join(format!("{pid}.manager"));
    let mode = |path: &Path| std::os::unix::fs::PermissionsExt::mode(&fs::metadata(path).unwrap().permissions());
    assert_eq!((mode(&manager) & 0o777, mode(manager.parent().unwrap()) & 0o777), (0o600, 0o700));
    served.home.make("secret", |path| fs::create_dir(path).unwrap());
    std::os::unix::fs::chown(served.home.at("secret"), Some(0), Some(0)).unwrap();
    fs::set_permissions(served.home.at("secret"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let said = refused(&served, "add a share secret --virtiofs b --map-user auto");
    assert!(said.contains("this user may not read it"), "{said}");
    assert_eq!(names(&served), ["one"]);
}

/// Scripts need not wait for each other.
#[test]
fn concurrent_changes_are_serialized() {
    if !is_root() {
        return;
    }
    let mut served = serve(home_of(0), &share("one", "a", ""));
    let add = |at: usize| served.home.command(&[], &format!("add a share two --virtiofs s{at}")).spawn().unwrap();
    let adding: Vec<_> = (0..8).map(add).collect();
    for mut adding in adding {
        assert!(adding.wait().unwrap().success(), "{}", served.said());
    }
    assert_eq!(names(&served).len(), 9);
    // The same by all: one succeeds.
    let add = |_| served.home.command(&[], "add a share three --virtiofs b").spawn().unwrap();
    let adding: Vec<_> = (0..4).map(add).collect();
    let outcomes = adding.into_iter().map(|mut adding| adding.wait().unwrap().success());
    assert_eq!(outcomes.filter(|done| *done).count(), 1);
    let remove = |at: usize| served.home.command(&[], &format!("remove s{at}")).spawn().unwrap();
    let removing: Vec<_> = (0..8).map(remove).collect();
    for mut removing in removing {
        assert!(removing.wait().unwrap().success(), "{}", served.said());
    }
    assert_eq!(names(&served), ["one", "three"]);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Killed while a change waits, it leaves no process, and the next start serves the same sockets.
#[test]
fn a_killed_manager_ends_its_servers() {
    if !is_root() {
        return;
    }
    let served = serve(home_of(0), &share("one", "a", ""));
    // A server that never replies: what is added waits for it.
    let _silent = UnixListener::bind(served.home.at("silent")).unwrap();
    let _guest = served.guest_at("a");
    let mut adding = served.home.command(&[], "add a share 9p:unix:silent --virtiofs b").spawn().unwrap();
    let end = Instant::now() + SOON;
    while processes(&served).len() < 2 {
        assert!(Instant::now() < end && adding.try_wait().unwrap().is_none(), "it does not begin");
        std::thread::sleep(TICK);
    }
    // One change at a time, and others are served meanwhile.
    let mut waiting = served.home.command(&[], "add a share two --virtiofs c").spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(waiting.try_wait().unwrap().is_none() && !served.home.at("c").exists());
    assert!(names(&served).contains(&"one".into()));
    let all: Vec<_> =
        processes(&served).into_iter().flat_map(|pid| [InnerProcess::only(pid), InnerProcess::of(pid)]).collect();
    kill_process(served.started.pid(), Signal::KILL).unwrap();
    assert!(!adding.wait().unwrap().success() && !waiting.wait().unwrap().success());
    let end = Instant::now() + SOON;
    while !all.iter().all(|process| process.is_gone()) {
        assert!(Instant::now() < end, "processes are left");
        std::thread::sleep(TICK);
    }
    let killed = pid_of(&served);
    let Served { home, started, .. } = served;
    drop(started);
    let mut served = home.serve("share --config f.toml --json");
    is_used(&mut served.guest_at("a"), &served.home.at("one"), "again");
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    for name in [pid_of(&served).to_string(), format!("{}.manager", pid_of(&served)), format!("{killed}.manager")] {
        assert!(!Path::new("/run/ferry").join(&name).exists(), "{name}");
    }
}
