//! The sandbox of a server of disks: the program's default layers, and disks that work in it.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver};
use ferry_isolation::Capabilities;
use ferry_tests::disks::model::SECTOR_BYTES;
use ferry_tests::disks::{FEATURES, Load, tool};
use ferry_tests::inside::{InnerProcess, children_of};
use ferry_tests::sandboxed::{SOON, Served, TICK, USER, UserHome, is_root};
use rustix::process::{Signal, kill_process};

const SECTORS: usize = 8192;
const BYTES: u64 = (SECTORS * SECTOR_BYTES) as u64;

/// A raw disk in a user's home.
fn home_of(user: u32) -> UserHome {
    let home = UserHome::of(user);
    home.make("disk", |file| ferry_disk::grow(file, BYTES, &ferry_disk::Options::default()).unwrap());
    home
}

fn qemu_img(home: &UserHome, line: &str) {
    let output = Command::new(tool("qemu-img")).args(line.split(' ')).current_dir(home.path()).output().unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
}

fn connect(served: &Served, socket: &str) -> Driver {
    let config = Config {
        first_queues: 0,
        queues: 2,
        queue_size: 128,
        inflight: true,
        memory_bytes: 32 << 20,
        device_features: FEATURES,
        timeout: SOON,
        connect_within: SOON,
        ..Config::default()
    };
    Driver::connect(served.home.at(socket), config).unwrap()
}

/// All that a guest does to a disk, each answer looked at; with a log of what is in flight.
fn is_used(served: &Served, socket: &str) -> Driver {
    let mut driver = connect(served, socket);
    let mut load = Load::new(&mut driver, SECTORS, 7, true);
    load.run(&mut driver, 4000, Duration::ZERO, SOON);
    load.drain(&mut driver, SOON);
    load.read_all(&mut driver, SOON);
    driver
}

fn qemu_io(served: &Served, socket: &str, commands: &[&str]) -> String {
    let image = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", served.home.at(socket).display());
    let mut program = Command::new(tool("qemu-io"));
    // Of an image nothing can be written.
    let access = if commands.iter().all(|command| command.starts_with("read")) { &["-r"][..] } else { &[] };
    program.args(access).args(["--image-opts", &image]).args(commands.iter().flat_map(|command| ["-c", command]));
    let output = program.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && !said.contains("failed"), "{said}");
    said
}

/// The process's filters, and one more for each worker, and for what that starts for calls that take long.
#[track_caller]
fn workers_are_held_to_less(served: &Served) {
    let (names, filters) = (served.inside.status("Name"), served.inside.status("Seccomp_filters"));
    let count = |name: &str| names.iter().position(|found| found == name).map(|at| filters[at].as_str());
    for (name, expected) in [("blk-0", "3"), ("ferry-blocking", "3"), ("ferry-blk", "2"), ("blk-size", "2")] {
        assert_eq!(count(name), Some(expected), "{name}: {names:?} {filters:?}");
    }
}

/// With words of the log, which tell of Landlock, as nothing else does.
const FLAGS: &str = "--json --queues 2 --log debug";

fn disks_of(user: u32) -> Served {
    let home = home_of(user);
    fs::create_dir(home.at("base")).unwrap();
    home.make("base/below", |file| {
        fs::write(file, vec![5; usize::try_from(BYTES).unwrap()]).unwrap();
    });
    home.make("image", |_| {
        qemu_img(&home, "create -q -f qcow2 -b base/below -F raw image");
    });
    let image = "image --format qcow2 --backing-dir base --vhost-user i --queues 2";
    home.serve(&format!("disk disk --vhost-user s {FLAGS} {image}"))
}

fn disks_are_confined(user: u32) {
    let mut served = disks_of(user);
    served.says("confined namespaces=true landlock=Some(Full) capabilities=none seccomp=Some(Kill)");
    let line = &served.line;
    // Named from where it was started, not from where it is.
    assert_eq!(line["disks"][0]["file"], served.home.at("disk").to_str().unwrap());
    assert_eq!(line["disks"][1]["vhost_user"], served.home.at("i").to_str().unwrap());
    let one = is_used(&served, "s");
    // Each has its own process with its own sandbox, and a supervisor outside.
    let outside = children_of(served.started.pid());
    assert_eq!(outside.len(), 2);
    for (files, outside) in [(&["base/below", "image"][..], outside[1]), (&["disk"], outside[0])] {
        served.inside = InnerProcess::of(outside);
        served.is_confined(0, files, 0);
        assert!(InnerProcess::only(outside).open_files().iter().all(|path| !path.starts_with(served.home.path())));
        InnerProcess::only(outside).all_are("Seccomp", "2");
    }
    workers_are_held_to_less(&served);
    drop(one);
    qemu_io(&served, "i", &["read -P 5 0 1M", "write -P 6 1M 1M", "discard 2M 512k", "write -z -u 3M 100k", "flush"]);
    qemu_io(&served, "i", &["read -P 6 1M 1M", "read -P 0 3M 100k", "read -P 5 3200k 64k"]);
    assert_eq!(served.inside.has_own("user"), user != 0);
    // Grown while it is offered.
    fs::File::options().write(true).open(served.home.at("disk")).unwrap().set_len(BYTES + (1 << 20)).unwrap();
    served.says("the size of the disk has changed");
    qemu_io(&served, "s", &["write -P 9 4M 1M", "read -P 9 4M 1M", "flush"]);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    for socket in ["s", "i"] {
        assert!(!served.home.at(socket).exists(), "the socket {socket} is left behind");
    }
    qemu_img(&served.home, "check -q -f qcow2 image");
}

/// One that is killed ends the others, so that whoever restarts them does so as a whole; and none outlives the process that was
/// started.
#[test]
fn servers_of_several_disks_end_together() {
    let insides =
        |served: &Served| children_of(served.started.pid()).into_iter().map(InnerProcess::of).collect::<Vec<_>>();
    let mut served = disks_of(rustix::process::geteuid().as_raw());
    let servers = insides(&served);
    kill_process(servers[0].pid(), Signal::KILL).unwrap();
    assert_eq!(served.ends(), 128 + 9, "{}", served.said());
    assert!(servers.iter().all(|server| server.is_gone()));
    assert!(["s", "i"].iter().all(|socket| !served.home.at(socket).exists()));

    let mut served = disks_of(rustix::process::geteuid().as_raw());
    let servers = insides(&served);
    kill_process(served.started.pid(), Signal::KILL).unwrap();
    served.started.wait(SOON).unwrap();
    let end = Instant::now() + SOON;
    while !servers.iter().all(|server| server.is_gone()) {
        assert!(Instant::now() < end, "a server outlives the process that was started");
        std::thread::sleep(TICK);
    }
}

#[test]
fn disks_of_roots_are_confined() {
    if is_root() {
        disks_are_confined(0);
    }
}

#[test]
fn disks_of_another_user_are_confined() {
    if is_root() {
        disks_are_confined(USER);
    }
}

/// Started as management programs start it: by another name, on a descriptor that it inherits.
#[test]
fn a_back_end_is_confined() {
    let home = home_of(rustix::process::geteuid().as_raw());
    let listener = UnixListener::bind(home.at("s")).unwrap();
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    std::os::unix::fs::symlink("ferry-copy", home.at("ferry-disk")).unwrap();
    let mut command = Command::new(home.at("ferry-disk"));
    command.args(["--blk-file", "disk", "--queues", "2", "--json", "--fd", &listener.as_raw_fd().to_string()]);
    command.args(["--sandbox", "namespace", "--seccomp", "kill"]).current_dir(home.path());
    let mut served = home.serve_by(command);
    let driver = is_used(&served, "s");
    served.is_confined(0, &["disk"], 0);
    drop(driver);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// Disks beside shares: the shares have a process and each disk has one, with what it needs alone.
#[test]
fn disks_beside_shares_are_confined() {
    if !is_root() {
        return;
    }
    let home = home_of(0);
    fs::create_dir(home.at("dir")).unwrap();
    let file =
        "[[share]]\nsource = \"dir\"\nvirtiofs = \"v\"\n[[disk]]\nfile = \"disk\"\nvhost-user = \"s\"\nqueues = 2\n";
    fs::write(home.at("f.toml"), file).unwrap();
    let mut served = home.serve("share --config f.toml --json");
    let driver = is_used(&served, "s");
    let outside = children_of(served.started.pid());
    assert_eq!(outside.len(), 2);
    // The process that was started is their manager, and those outside the sandboxes only wait.
    InnerProcess::only(served.started.pid()).all_are("Seccomp", "0");
    outside.iter().for_each(|pid| InnerProcess::only(*pid).all_are("Seccomp", "2"));
    served.inside = InnerProcess::of(outside[1]);
    served.is_confined(0, &["disk"], 0);
    workers_are_held_to_less(&served);
    served.inside = InnerProcess::of(outside[0]);
    served.inside.all_are("Seccomp", "2");
    let ours = Capabilities::of_thread().unwrap().bits();
    served.inside.has_capabilities(Capabilities::of_server(true).bits() & ours);
    assert_eq!(served.inside.mounts(), ["/", "/proc/self/fd", "/proc/self/uid_map", "/share/0"]);
    drop(driver);
    let mut guest = served.guest_at("v");
    guest.mkdir(ferry_driver::ROOT, "made", 0o755).unwrap();
    assert!(served.home.at("dir/made").is_dir());
    drop(guest);
    let asked = served.home.command(&[], &format!("log {}", served.started.pid())).output().unwrap();
    assert!(asked.status.success(), "{asked:?}");
    assert_eq!(served.ends_by(Signal::INT), 0, "{}", served.said());
    assert!(["s", "v"].iter().all(|socket| !served.home.at(socket).exists()));
}

/// A flat image: its packs are open, and its store cannot be reached.
#[test]
fn images_as_disks_are_confined() {
    let home = home_of(rustix::process::geteuid().as_raw());
    fs::create_dir(home.at("tree")).unwrap();
    fs::write(home.at("tree/file"), "file".repeat(100_000)).unwrap();
    home.run("image build tree -o image --store store");
    let mut served = home.serve("disk image:image --store store --vhost-user s --json --queues 2");
    let bytes = served.line["disks"][0]["bytes"].as_u64().unwrap();
    qemu_io(&served, "s", &[&format!("read 0 {bytes}")]);
    let packs = fs::read_dir(served.home.at("store/packs")).unwrap();
    let packs: Vec<String> = packs
        .map(|entry| format!("store/packs/{}", entry.unwrap().file_name().into_string().unwrap()))
        .filter(|name| !name.contains('.'))
        .collect();
    assert!(!packs.is_empty());
    served.is_confined(0, &packs.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    // Data is verified by threads that were started inside the sandbox.
    let names: Vec<_> = served.inside.status("Name");
    if std::thread::available_parallelism().map_or(1, usize::from) > 1 {
        assert!(names.contains(&"image-verifier".to_owned()), "{names:?}");
    }
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// A device of the host's: discarded, zeroed and flushed through the descriptor that was opened before.
#[test]
fn block_devices_work_in_the_sandbox() {
    if !is_root() {
        return;
    }
    let home = home_of(0);
    let made = Command::new("losetup").args(["--find", "--show"]).arg(home.at("disk")).output().unwrap();
    if !made.status.success() {
        ferry_skip::skip!("no loop devices here");
        return;
    }
    let device = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let mut served = home.serve(&format!("disk {device} --vhost-user s --json --queues 2"));
    // When the server has closed it, also if this test fails.
    assert!(Command::new("losetup").arg("--detach").arg(&device).status().unwrap().success());
    let driver = is_used(&served, "s");
    // Grown while it is offered: the kernel tells nobody of it.
    fs::File::options().write(true).open(served.home.at("disk")).unwrap().set_len(BYTES + (1 << 20)).unwrap();
    assert!(Command::new("losetup").args(["--set-capacity", &device]).status().unwrap().success());
    served.says("the size of the disk has changed");
    served.says("the guest does not learn before its next start that its device has changed");
    drop(driver);
    qemu_io(&served, "s", &["write -P 9 4M 1M", "read -P 9 4M 1M", "flush"]);
    qemu_io(&served, "s", &["write -P 7 0 4M", "discard 0 2M", "write -z -u 2M 64k", "read -P 0 2M 64k", "flush"]);
    let said = served.said();
    assert_eq!(served.ends_by(Signal::TERM), 0, "{said}");
    assert!(!said.contains("failed"), "{said}");
}

/// A guest's memory stays pinned for a server that is not root any more.
#[test]
fn memory_is_pinned_in_the_sandbox() {
    if !is_root() {
        return;
    }
    const LESS: [&str; 3] = ["prlimit", "--memlock=65536:65536", "--"];
    const WITHOUT: [&str; 3] = ["setpriv", "--bounding-set=-sys_resource", "--"];
    let has = |list: &str| {
        let asked = Capabilities::NONE.modified(list).unwrap().bits();
        Capabilities::of_thread().unwrap().bits() & asked
    };
    // The limit is lifted while that can be done; or else what does without a limit is kept.
    let (lifts, pins) = (has("+sys_resource") != 0, has("+ipc_lock"));
    for (before, kept) in [(LESS.to_vec(), if lifts { 0 } else { pins }), ([LESS, WITHOUT].concat(), pins)] {
        let home = home_of(0);
        let command = home.command(&before, &format!("disk disk --vhost-user s --pin-memory {FLAGS}"));
        let mut served = home.serve_by(command);
        let driver = is_used(&served, "s");
        served.is_confined(0, &["disk"], kept);
        if lifts || pins != 0 {
            assert!(!served.said().contains("cannot register the guest's memory"), "{}", served.said());
        }
        drop(driver);
        assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    }
}

/// A disk has one server: while the process inside lives, and no longer than it.
#[test]
fn the_lock_is_the_servers() {
    let mut served = home_of(rustix::process::geteuid().as_raw()).serve(&format!("disk disk --vhost-user s {FLAGS}"));
    let file = served.home.at("disk");
    let taken = ferry_disk::open(&file, &ferry_disk::Options::default()).err().expect("it is in use").to_string();
    assert!(taken.contains("in use"), "{taken}");
    assert_ne!(served.inside.pid(), served.started.pid(), "{}", served.said());
    // The one outside is killed.
    kill_process(served.started.pid(), Signal::KILL).unwrap();
    served.started.wait(SOON).unwrap();
    let end = Instant::now() + SOON;
    while !served.inside.is_gone() {
        assert!(Instant::now() < end, "the server outlives the process that was started");
        std::thread::sleep(TICK);
    }
    drop(ferry_disk::open(&file, &ferry_disk::Options::default()).unwrap());
    // The one inside is.
    let home = served.home;
    let mut served = home.serve(&format!("disk disk --vhost-user s {FLAGS}"));
    kill_process(served.inside.pid(), Signal::KILL).unwrap();
    assert_eq!(served.ends(), 128 + 9);
    assert!(served.said().contains("ended by signal 9"), "{}", served.said());
    assert!(!served.home.at("s").exists(), "the socket is left behind");
    drop(ferry_disk::open(&file, &ferry_disk::Options::default()).unwrap());
}

#[test]
fn the_sandbox_follows_the_flags() {
    if !is_root() {
        return;
    }
    let ours = Capabilities::of_thread().unwrap().bits();
    let line = format!("disk disk --vhost-user s {FLAGS} --sandbox none --seccomp none --modcaps +sys_admin");
    let served = home_of(0).serve(&line);
    drop(is_used(&served, "s"));
    served.inside.all_are("Seccomp", "0");
    served.inside.has_capabilities(Capabilities::NONE.modified("+sys_admin").unwrap().bits() & ours);
    assert!(served.inside.pid() == served.started.pid() && !served.inside.has_own("mnt"));
    assert_eq!(fs::read_link(served.inside.file("root")).unwrap(), Path::new("/"));
    served.says("landlock=None");
}

/// Without user namespaces, the program reports what is missing, and continues only if no sandbox was requested.
#[test]
fn unavailable_features_are_reported() {
    if !is_root() {
        return;
    }
    // Of this namespace no other may be made.
    const SCRIPT: &str =
        "echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all \"$@\"";
    let before = ["unshare", "--user", "--map-root-user", "sh", "-c", SCRIPT, "sh"];
    let home = home_of(0);
    let command = home.command(&before, "disk disk --vhost-user s --json --queues 2");
    let served = home.serve_by(command);
    let said = served.said();
    assert!(said.contains("namespaces are not available") && said.contains("user namespace"), "{said}");
    drop(is_used(&served, "s"));
    served.inside.all_are("Seccomp", "2");
    served.inside.has_capabilities(0);
    assert!(!served.inside.has_own("mnt"));

    let refused = |output: Output, words: &[&str], home: &UserHome| {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
        assert!(!home.at("s").exists(), "the socket is left behind");
    };
    let home = home_of(0);
    let output = home.command(&before, "disk disk --vhost-user s --sandbox namespace").output().unwrap();
    refused(output, &["--sandbox namespace", "user namespace"], &home);
    let output = home.command(&[], "disk disk --vhost-user s --sandbox chroot").output().unwrap();
    refused(output, &["one shared directory"], &home);
    // Without a socket nothing is served, and no process is confined.
    let output = home.command(&[], "disk disk --resize 8M --sandbox namespace").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::metadata(home.at("disk")).unwrap().len(), 8 << 20);
}
