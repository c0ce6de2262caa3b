//! `ferry disk`: what the command line does, up to the socket.

use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use common::place::detach;
use common::{Server, ferry, refused, run};

#[test]
fn makes_grows_and_offers_files() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (disk, other, socket) =
        (directory.path().join("disk"), directory.path().join("other"), directory.path().join("s"));
    let second = directory.path().join("t");
    for (file, size, bytes) in
        [(&disk, "4M", 4 << 20), (&disk, "6M", 6 << 20), (&disk, "6M", 6 << 20), (&other, "1M", 1 << 20)]
    {
        assert!(run(ferry().arg("disk").arg(file).args(["--resize", size])).status.success());
        assert_eq!(fs::metadata(file).expect("the file").len(), bytes);
    }
    let smaller = refused(1, ferry().arg("disk").arg(&disk).args(["--resize", "1M"]));
    assert!(smaller.contains("has 6291456 bytes") && smaller.contains("not made smaller"), "{smaller}");
    assert_eq!(fs::metadata(&disk).expect("the file").len(), 6 << 20);
    let mut command = ferry();
    command.arg("disk").arg(&disk).arg("--vhost-user").arg(&socket).args(["--serial", "one", "--queues", "2"]);
    command.arg(&other).arg("--vhost-user").arg(&second).args(["--read-only"]);
    let mut server = Server::start(&mut command);
    assert_eq!(server.line["disks"][0]["bytes"], 6 << 20);
    assert_eq!(
        (&server.line["disks"][0]["serial"], &server.line["disks"][1]["serial"]),
        (&"one".into(), &"other".into())
    );
    assert_eq!(server.line["disks"][1]["read_only"], true);
    assert!(socket.exists() && second.exists());
    let third = directory.path().join("u");
    let text = refused(1, ferry().arg("disk").arg(&disk).arg("--vhost-user").arg(&third));
    assert!(text.contains("is in use by another process"), "{text}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists() && !second.exists());
}

/// A disk that is offered may be made in the same line, and the line may be given again once it was made larger.
#[test]
fn a_new_file_is_offered_and_removed_after_an_error() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("s"));
    for bytes in [4 << 20, 8 << 20] {
        let mut command = ferry();
        command.arg("disk").arg(&disk).args(["--resize", "4M"]).arg("--vhost-user").arg(&socket);
        let mut server = Server::start(&mut command);
        assert_eq!(server.line["disks"][0]["bytes"], bytes);
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
        fs::File::options().write(true).open(&disk).and_then(|file| file.set_len(8 << 20)).expect("a larger file");
    }
    let wrong = directory.path().join("wrong");
    let text = refused(1, ferry().arg("disk").arg(&wrong).args(["--resize", "9999999T"]));
    assert!(text.contains("cannot make"), "{text}");
    refused(1, ferry().arg("disk").arg(&wrong).args(["--resize", "9999999T"]).arg("--vhost-user").arg(&socket));
    assert!(!wrong.exists() && !socket.exists());
}

/// Whether a server answers at a socket: the first thing that a VMM asks (VHOST_USER_GET_FEATURES).
fn answers(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a time limit");
    let asked = [1u32, 1, 0].map(u32::to_le_bytes).concat();
    let mut answer = [0; 20];
    stream.write_all(&asked).and_then(|()| stream.read_exact(&mut answer)).is_ok()
}

#[track_caller]
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not soon: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A FUSE file system with a file of 4 MiB, `a`. When its server is stopped, it is as a network file system whose server is away.
struct Far {
    server: Server,
    mnt: PathBuf,
}

impl Far {
    /// In this directory: the file is `mnt/a`.
    fn mount(directory: &Path) -> Self {
        let (source, mnt) = (directory.join("far"), directory.join("mnt"));
        [&source, &mnt].into_iter().for_each(|path| fs::create_dir_all(path).expect("a directory"));
        fs::File::create(source.join("a")).and_then(|file| file.set_len(4 << 20)).expect("a file");
        Self { server: Server::start(ferry().arg("share").arg(source).arg("--mount").arg(&mnt)), mnt }
    }

    fn stop(&self) {
        self.server.signal(Signal::STOP);
    }

    fn go_on(&self) {
        self.server.signal(Signal::CONT);
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // A server that is killed leaves its mount.
        detach(&self.mnt);
    }
}

#[test]
fn a_hanging_disk_does_not_delay_others() {
    common::needs_fuse!();
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let at = |name: &str| directory.path().join(name);
    fs::File::create(at("b")).and_then(|file| file.set_len(4 << 20)).expect("a file");
    let far = Far::mount(directory.path());
    let line = |log: &str| {
        let mut command = ferry();
        command.arg("disk").arg(at("mnt/a")).arg("--vhost-user").arg(at("s"));
        command.arg(at("b")).arg("--vhost-user").arg(at("t")).stderr(fs::File::create(at(log)).expect("a file"));
        command
    };
    far.stop();
    let mut disks = Server::start(&mut line("log"));
    assert_eq!((&disks.line["disks"][0]["bytes"], &disks.line["disks"][1]["bytes"]), (&().into(), &(4 << 20).into()));
    let said = || fs::read_to_string(at("log")).expect("what it says");
    soon("the other one answers", || answers(&at("t")));
    soon("it is named", || said().contains("mnt/a is not open after 3 s"));
    assert!(!answers(&at("s")));
    far.go_on();
    soon("it answers, too", || answers(&at("s")));
    disks.signal(Signal::TERM);
    assert_eq!(disks.status(), Some(0), "{}", said());

    // One that hangs ends when it is told to. With a new mount, nothing of the file is cached.
    drop(far);
    let far = Far::mount(directory.path());
    far.stop();
    let mut disks = Server::start(&mut line("again"));
    disks.signal(Signal::TERM);
    assert_eq!(disks.status(), Some(0));
    assert!(!at("s").exists() && !at("t").exists());
}

/// One that hangs beside shares, in a file: all others are served, it is named, and served when its storage answers.
#[test]
fn a_hanging_disk_in_a_file_delays_no_share_and_no_disk() {
    common::needs_fuse!();
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("data")).expect("a directory");
    fs::File::create(at("b")).and_then(|file| file.set_len(4 << 20)).expect("a file");
    let text = "[[disk]]\nfile = \"mnt/a\"\nvhost-user = \"s\"\n[[disk]]\nfile = \"b\"\nvhost-user = \"t\"\n\
                [[share]]\nsource = \"data\"\nvirtiofs = \"v\"\n";
    fs::write(at("f.toml"), text).expect("a file");
    let far = Far::mount(directory.path());
    far.stop();
    let mut command = ferry();
    command.arg("share").arg("--config").arg(at("f.toml")).stderr(fs::File::create(at("log")).expect("a file"));
    let mut server = Server::start(&mut command);
    let said = || fs::read_to_string(at("log")).expect("what it says");
    assert_eq!(server.line["shares"][0]["virtiofs"], at("v").to_str().expect("a plain path"));
    assert_eq!((&server.line["disks"][0]["bytes"], &server.line["disks"][1]["bytes"]), (&().into(), &(4 << 20).into()));
    soon("the others answer", || answers(&at("t")) && answers(&at("v")));
    soon("it is named", || said().contains("mnt/a is not open after 3 s"));
    assert!(!answers(&at("s")));
    far.go_on();
    soon("it answers, too", || answers(&at("s")));
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0), "{}", said());
    assert!(["s", "t", "v"].iter().all(|name| !at(name).exists()));
}

/// One that hangs, alone, ends when it is told to, and says which it is.
#[test]
fn a_signal_ends_a_server_whose_storage_hangs() {
    common::needs_fuse!();
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let far = Far::mount(directory.path());
    far.stop();
    for (signal, flags) in
        [(Signal::TERM, &["--vhost-user"][..]), (Signal::INT, &["--sandbox", "none", "--vhost-user"])]
    {
        let mut command = ferry();
        command.arg("disk").arg(at("mnt/a")).args(flags).arg(at("s"));
        let mut server = command.stderr(fs::File::create(at("log")).expect("a file")).spawn().expect("it starts");
        soon("it listens", || at("s").exists());
        // Nothing is said of storage that takes less than 1 s.
        std::thread::sleep(Duration::from_millis(1200));
        let pid = rustix::process::Pid::from_child(&server);
        rustix::process::kill_process(pid, signal).expect("it runs");
        assert_eq!(common::wait(&mut server), Some(0));
        let said = fs::read_to_string(at("log")).expect("what it says");
        assert!(said.contains("mnt/a is not served: its storage had not responded"), "{said}");
        assert!(!at("s").exists());
    }
    far.go_on();
}

/// Of a start that fails nothing is left, and what was there before is as it was.
#[test]
fn a_start_that_fails_leaves_none_of_its_disks() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("data")).expect("a directory");
    fs::write(at("there"), [7; 4096]).expect("a file");
    let missing = "[[disk]]\nfile = \"missing\"\nvhost-user = \"m\"\n";
    let new = "[[disk]]\nfile = \"new\"\nvhost-user = \"n\"\nresize = \"4M\"\n\
               [[disk]]\nfile = \"there\"\nvhost-user = \"t\"\nresize = \"4K\"\n";
    let share = "[[share]]\nsource = \"pmem:image\"\nsize = \"16M\"\nvirtiofs = \"v\"\n";
    for text in [format!("{new}{missing}"), format!("{new}{share}{missing}")] {
        fs::write(at("f.toml"), &text).expect("a file");
        let mut command = ferry();
        command.arg("share").arg("--config").arg(at("f.toml"));
        let output = run(&mut command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("missing"), "{said}");
        let mut left: Vec<_> =
            fs::read_dir(directory.path()).expect("a directory").map(|e| e.expect("one").file_name()).collect();
        left.sort();
        assert_eq!(left, ["data", "f.toml", "there"], "{said}");
    }
    assert_eq!(fs::read(at("there")).expect("it is there"), [7; 4096]);
    // A start that succeeds keeps them.
    fs::write(at("f.toml"), format!("{new}{share}")).expect("a file");
    let mut command = ferry();
    command.arg("share").arg("--config").arg(at("f.toml"));
    let mut server = Server::start(&mut command);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(at("new").exists() && at("image").exists());
}

/// A mistake in one of several is one sentence, and nothing is left.
#[test]
fn several_disks_are_offered_all_or_none() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let at = |name: &str| directory.path().join(name);
    fs::File::create(at("a")).and_then(|file| file.set_len(4 << 20)).expect("a file");
    let mut command = ferry();
    command.arg("disk").arg(at("a")).arg("--vhost-user").arg(at("s"));
    command.arg(at("missing")).arg("--vhost-user").arg(at("t"));
    let text = refused(1, &mut command);
    assert!(text.contains("there is no") && text.contains("missing"), "{text}");
    assert!(!at("s").exists() && !at("t").exists());
}

#[test]
fn mistakes_are_named() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let (disk, socket, image) =
        (directory.path().join("disk"), directory.path().join("s"), directory.path().join("image"));
    fs::write(&disk, [0; 4096]).expect("a file");
    fs::write(&image, [b"QFI\xfb".to_vec(), vec![0; 4092]].concat()).expect("a file");
    let ours = std::path::PathBuf::from("image:base");
    let offer = |file| {
        let mut command = ferry();
        command.arg("disk").arg(file).arg("--vhost-user").arg(&socket);
        command
    };
    assert!(refused(1, &mut offer(&image)).contains("begins like a qcow2 image"));
    assert!(refused(1, offer(&image).args(["--format", "qcow2"])).contains("cannot use the image"));
    assert!(refused(2, ferry().arg("disk").arg(&disk)).contains("'--vhost-user <SOCKET>' is missing"));
    assert!(refused(2, &mut offer(&ours)).contains("image:PATH needs --store"));
    for (flags, words) in [
        ("--pin-memory --io sync", "--pin-memory is for io_uring, which --io sync does not use"),
        ("--backing-dir /tmp", "--backing-dir is for qcow2 images"),
        ("--backing-dir /tmp --format raw", "--backing-dir is for qcow2 images"),
        ("--resize 1M --read-only", "--resize and --read-only exclude each other"),
    ] {
        let text = refused(2, offer(&disk).args(flags.split(' ')));
        assert!(text.contains(words), "{flags}: {text}");
    }
    for flags in [["--metrics", "127.0.0.1:0"], ["--trace", "trace"], ["--limit", "iops=1"]] {
        let text = refused(2, ferry().arg("disk").arg(&disk).args(["--resize", "1M"]).args(flags));
        assert!(text.contains(&format!("{} is for disks that are served", flags[0])), "{flags:?}: {text}");
        assert_eq!(fs::metadata(&disk).expect("a file").len(), 4096, "{flags:?}");
    }
    let twice = refused(2, offer(&disk).arg(&image).arg("--vhost-user").arg(&socket));
    assert!(twice.contains("is given twice"), "{twice}");
    for wrong in
        [["--format", "vmdk"], ["--queues", "257"], ["--queues", "0"], ["--cache", "maybe"], ["--poll-us", "x"]]
    {
        let output = run(offer(&disk).args(wrong));
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    assert!(!socket.exists());
}

#[test]
fn management_programs_find_the_expected_interface() {
    let directory = tempfile::tempdir().expect("a directory");
    let back_end = directory.path().join("ferry-disk");
    symlink(env!("CARGO_BIN_EXE_ferry"), &back_end).expect("a link");
    for command in [&mut Command::new(&back_end), ferry().arg("disk")] {
        let output = run(command.arg("--print-capabilities"));
        assert!(output.status.success());
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(said, serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
    }
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("s"));
    fs::write(&disk, [0; 4096]).expect("a file");
    let mut command = Command::new(&back_end);
    command.arg("--socket-path").arg(&socket).arg("--blk-file").arg(&disk).arg("--read-only");
    let mut server = Server::start(&mut command);
    assert_eq!(server.line["disks"][0]["read_only"], true);
    server.signal(Signal::INT);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn an_installed_back_end_is_found_and_started() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().to_str().expect("a plain path");
    let script = |prefix: &str| {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install"));
        command.env("FERRY", env!("CARGO_BIN_EXE_ferry")).env("FERRY_AGENT", env!("CARGO_BIN_EXE_ferry"));
        command.env("DESTDIR", root).env("PREFIX", prefix);
        command
    };
    let files = || {
        let output = run(Command::new("find").arg(root).args(["!", "-type", "d", "-printf", "%P\n"]));
        String::from_utf8(output.stdout).expect("plain names").lines().map(str::to_owned).collect::<Vec<_>>()
    };
    for prefix in ["/usr", "/opt/ferry"] {
        // Over itself, too.
        for _ in 0..2 {
            let output = run(&mut script(prefix));
            assert!(output.status.success(), "{output:?}");
            let advice = String::from_utf8_lossy(&output.stderr)
                .contains("ln -s /opt/ferry/sbin/mount.ferry /opt/ferry/sbin/mount.fuse.ferry /sbin/");
            assert_eq!(advice, prefix == "/opt/ferry");
        }
        assert!(files().iter().all(|file| file.starts_with(&prefix[1..])), "{:?}", files());
        for (name, kind) in [("50-ferry-disk.json", "block"), ("60-ferry-virtiofsd.json", "fs")] {
            let text = fs::read(format!("{root}{prefix}/share/qemu/vhost-user/{name}")).expect("a descriptor");
            let said: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            assert_eq!(said["type"], kind);
            let binary = said["binary"].as_str().expect("a path");
            assert!(binary.starts_with(prefix));
            let output = run(Command::new(format!("{root}{binary}")).arg("--print-capabilities"));
            let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!(said["type"], kind);
        }
        let bytes = |path: &str| fs::metadata(path).expect("the program").len();
        assert!(bytes(&format!("{root}{prefix}/bin/ferry")) < bytes(env!("CARGO_BIN_EXE_ferry")), "it is not stripped");
        for name in ["mount.ferry", "mount.fuse.ferry"] {
            let helper = fs::canonicalize(format!("{root}{prefix}/sbin/{name}")).expect("a helper for mount(8)");
            assert_eq!(helper, fs::canonicalize(format!("{root}{prefix}/bin/ferry")).expect("the program"));
        }
        let dashboard = fs::read(format!("{root}{prefix}/share/ferry/grafana.json")).expect("a dashboard");
        let dashboard: serde_json::Value = serde_json::from_slice(&dashboard).expect("JSON");
        assert!(dashboard["panels"].as_array().is_some_and(|panels| !panels.is_empty()));
        for document in
            ["man/man1/ferry-image-build.1", "bash-completion/completions/ferry", "ferry/openrc/ferry-agent"]
        {
            assert!(fs::metadata(format!("{root}{prefix}/share/{document}")).expect(document).len() > 0);
        }
        assert!(run(script(prefix).arg("--remove")).status.success());
        assert_eq!(files(), Vec::<String>::new(), "what is left");
        assert!(!directory.path().join(&prefix[1..]).join("share/ferry").exists());
    }
    assert!(!run(&mut script("here")).status.success(), "a prefix from somewhere");
}

/// A user who may not write there is told so, and nothing is left.
#[test]
fn an_installation_that_cannot_be_is_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("share"), "in the way").expect("a file");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install");
    let mut command = Command::new(script);
    command.env("FERRY", env!("CARGO_BIN_EXE_ferry")).env("FERRY_AGENT", env!("CARGO_BIN_EXE_ferry"));
    command.env("DESTDIR", "").env("PREFIX", directory.path());
    let output = run(&mut command);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.lines().count() == 1 && told.contains("set PREFIX"), "{told}");
    assert!(!directory.path().join("bin/ferry").exists());
}

/// Started as management programs do it: with a socket that they listen on.
#[test]
fn a_back_end_takes_over_a_socket() {
    let directory = tempfile::tempdir().expect("a directory");
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("s"));
    fs::write(&disk, [0; 4096]).expect("a file");
    let listener = UnixListener::bind(&socket).expect("a socket");
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).expect("a descriptor to inherit");
    let number = std::os::fd::AsRawFd::as_raw_fd(&listener).to_string();
    let back_end = directory.path().join("ferry-disk");
    symlink(env!("CARGO_BIN_EXE_ferry"), &back_end).expect("a link");
    let mut command = Command::new(&back_end);
    command.args(["--fd", &number]).arg("--blk-file").arg(&disk);
    let mut server = Server::start(&mut command);
    assert_eq!(
        (&server.line["disks"][0]["fd"].to_string(), &server.line["disks"][0]["read_only"]),
        (&number, &false.into())
    );
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(socket.exists(), "an inherited socket's file is its maker's");
    let twice = [disk.as_os_str(), "--fd".as_ref(), number.as_ref()];
    let text = refused(2, ferry().arg("disk").args(twice).args(twice));
    assert!(text.contains("is given twice"), "{text}");
}

#[test]
fn disks_stand_beside_shares_in_a_file() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    fs::create_dir(directory.path().join("data")).expect("a directory");
    fs::write(directory.path().join("raw"), [0; 8192]).expect("a file");
    fs::write(directory.path().join("other"), [0; 4096]).expect("a file");
    let file = directory.path().join("ferry.toml");
    let serve = |text: &str| {
        fs::write(&file, text).expect("a file");
        let mut command = ferry();
        command.arg("share").arg("--config").arg(&file);
        command
    };
    let both = "[[share]]\nsource = \"data\"\nvirtiofs = \"s\"\n[[disk]]\nfile = \"raw\"\nvhost-user = \"d\"\n";
    let mut server =
        Server::start(&mut serve(&format!("{both}[[disk]]\nfile = \"other\"\nvhost-user = \"e\"\nread-only = true\n")));
    assert_eq!(server.line["shares"].as_array().map(Vec::len), Some(1));
    assert_eq!(
        (&server.line["disks"][0]["bytes"], &server.line["disks"][1]["read_only"]),
        (&8192.into(), &true.into())
    );
    let sockets = ["s", "d", "e"].map(|name| directory.path().join(name));
    assert!(sockets.iter().all(|socket| socket.exists()));
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(sockets.iter().all(|socket| !socket.exists()));
    // Disks alone will do.
    let mut server = Server::start(&mut serve("[[disk]]\nfile = \"raw\"\nvhost-user = \"d\"\n"));
    assert_eq!(server.line["disks"].as_array().map(Vec::len), Some(1));
    server.signal(Signal::INT);
    assert_eq!(server.status(), Some(0));
    for (status, text, words) in [
        (2, both.replace("\"d\"", "\"s\""), "is given for a share and a disk"),
        (1, both.replace("\"raw\"", "\"missing\""), "there is no"),
        (2, both.replace("\"raw\"", "\"image:x\""), "image:PATH needs store"),
        (1, format!("{both}[[disk]]\nfile = \"raw\"\nvhost-user = \"e\"\n"), "is in use by another process"),
    ] {
        let text = refused(status, &mut serve(&text));
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(sockets.iter().all(|socket| !socket.exists()), "a server that does not start leaves nothing");
}
