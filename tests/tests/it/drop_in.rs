//! Called as `virtiofsd`, with virtiofsd's options: a Linux guest sees no difference.
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_driver::fuse::append_security_context;
use ferry_driver::{Config, Driver, INIT_FLAGS};
use ferry_isolation::Capabilities;
use ferry_tests::inside::InnerProcess;
use ferry_tests::mounts::RunningProgram;
use ferry_tests::{GuestCache, Place, collect, directory, guest_on};
use ferry_vfs::{CreateArgs, Ino, Name, OFlags};
use ferry_wire::fuse::abi::MINOR_MAX;
use ferry_wire::fuse::{Extensions, InitFlags, Operation, Request, SecurityContexts};
use tempfile::TempDir;

/// Far more than a guest needs for one script.
const LIMIT: Duration = Duration::from_secs(180);
/// How long a server may take until it listens, and until it ends when its guest has gone.
const SOON: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(10);

/// The two programs of the name virtiofsd: ours, and the one that it stands in for. The second is none where it is not
/// fetched.
fn programs(directory: &Path) -> Vec<PathBuf> {
    let ours = directory.join("virtiofsd");
    std::os::unix::fs::symlink(ferry_tests::mounts::program(), &ours).unwrap();
    let theirs = GuestCache::from_env().unwrap().peer("virtiofsd");
    if theirs.is_err() {
        eprintln!("virtiofsd itself is not here (guest/fetch peers): nothing to compare with");
    }
    std::iter::once(ours).chain(theirs).collect()
}

/// A server of the directory `tree` below another.
struct Served {
    child: Child,
    directory: TempDir,
}

impl Served {
    fn start(program: &Path, args: &str) -> Self {
        Self::start_by(Command::new(program), args)
    }

    /// The same with something before the program. It begins in the directory that holds the tree.
    fn start_by(mut command: Command, args: &str) -> Self {
        let directory = directory(Place::Disk);
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::set_permissions(&tree, fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(tree.join("there"), "before").unwrap();
        command.args(["--tag", "t", "--socket-path"]).arg(directory.path().join("s")).args(args.split_whitespace());
        if !args.contains("source=") {
            command.arg("--shared-dir").arg(&tree);
        }
        command.current_dir(directory.path()).stdin(Stdio::null()).env_remove("FERRY_LOG");
        let child = command.spawn().unwrap();
        let served = Self { child, directory };
        served.wait_for("the socket", |served| served.socket().exists());
        served
    }

    /// The same by a command line of somebody else's, in which `{socket}` and `{tree}` stand for ours. Where it has `3<&0`, standard
    /// input is the socket, listening.
    fn start_as(program: &Path, line: &str) -> Self {
        let directory = directory(Place::Disk);
        let (tree, socket) = (directory.path().join("tree"), directory.path().join("s"));
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("there"), "before").unwrap();
        let line = line.replace("{tree}", tree.to_str().unwrap()).replace("{socket}", socket.to_str().unwrap());
        let said = fs::File::create(directory.path().join("said")).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec \"$0\" {line}")]).arg(program);
        let stdin = match line.contains("3<&0") {
            true => std::os::fd::OwnedFd::from(UnixListener::bind(&socket).unwrap()).into(),
            false => Stdio::null(),
        };
        command.current_dir(directory.path()).stdin(stdin).stderr(said).env_remove("FERRY_LOG");
        Self { child: command.spawn().unwrap(), directory }
    }

    fn said(&self) -> String {
        fs::read_to_string(self.directory.path().join("said")).unwrap()
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    fn tree(&self) -> PathBuf {
        self.directory.path().join("tree")
    }

    #[track_caller]
    fn wait_for(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + SOON;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what} does not come: {:?}", self.child);
            std::thread::sleep(TICK);
        }
    }

    /// What a script prints in a guest that has the tree as its working directory.
    fn sh(&self, script: &str) -> String {
        let guest = guest_on(&self.socket(), ["sh", "-c", script]);
        let start = Instant::now();
        let ran = collect(guest.spawn().unwrap(), LIMIT, start);
        format!("{}{}", ran.out, ran.err)
    }

    /// Its status, once its only guest has gone.
    #[track_caller]
    fn end(mut self) -> Option<i32> {
        let end = Instant::now() + SOON;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "it does not end with its guest");
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Owners and names below a directory of the host.
fn owners(tree: &Path) -> Vec<(String, u32, u32)> {
    let mut found: Vec<_> = fs::read_dir(tree)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let about = entry.metadata().unwrap();
            (entry.file_name().into_string().unwrap(), about.uid(), about.gid())
        })
        .collect();
    found.sort();
    found
}

/// Runs a script in a guest of each program, and compares what it prints and what it leaves on the host.
#[track_caller]
fn same(args: &str, script: &str) -> (String, Vec<(String, u32, u32)>) {
    let directory = tempfile::tempdir().unwrap();
    let mut seen = programs(directory.path()).into_iter().map(|program| {
        let served = Served::start(&program, args);
        let said = served.sh(script);
        let left = owners(&served.tree());
        assert_eq!(served.end(), Some(0), "{}", program.display());
        (said, left)
    });
    let ours = seen.next().unwrap();
    if let Some(theirs) = seen.next() {
        assert_eq!(ours, theirs, "{args}: ours, and virtiofsd's");
    }
    ours
}

const OWNERS: &str = "touch made; mkdir dir; touch given; chown 5:6 given; stat -c '%n %u:%g' there made dir given 2>&1; \
                      chown 1234:4321 made 2>&1; echo $?; stat -c '%u:%g' made";

#[test]
fn numbers_are_translated_as_virtiofsd_does() {
    for args in [
        "--translate-uid map:0:1000:10 --translate-gid map:0:2000:10",
        "--translate-uid guest:0:1000:10 --translate-gid host:0:77:1",
        "--translate-uid squash-guest:0:1000:70000 --translate-gid squash-guest:0:1000:70000",
        "--translate-uid squash-host:0:55:3000 --translate-gid squash-host:0:66:3000",
    ] {
        let (said, _) = same(args, OWNERS);
        assert!(said.contains("there "), "{said}");
    }
    // Where virtiofsd says EIO.
    let directory = tempfile::tempdir().unwrap();
    let served = Served::start(&programs(directory.path())[0], "--translate-uid forbid-guest:1234:1");
    assert!(served.sh(OWNERS).contains("Operation not permitted\n1\n0:0"));
    let (said, left) = same("--translate-uid map:0:1000:10 --translate-gid map:0:2000:10", "touch a; stat -c %u:%g a");
    assert_eq!(said, "0:0\n");
    assert!(left.contains(&("a".into(), 1000, 2000)), "{left:?}");
}

#[test]
fn modes_and_flags_of_virtiofsd_are_taken() {
    for args in [
        "--cache never",
        "--cache=metadata --no-readdirplus",
        "--cache=always --writeback --allow-direct-io --xattr --posix-acl",
        "--cache=auto --no-announce-submounts --inode-file-handles=never --thread-pool-size=4 --seccomp=none",
        "--sandbox=namespace --seccomp=kill --modcaps=-mknod:+lease --cache=never",
        "--inode-file-handles=mandatory --modcaps=+dac_read_search --log-level=error --rlimit-nofile 2000",
        "--sandbox none --preserve-noatime --killpriv-v2 --security-label=never",
        "--sandbox chroot --seccomp trap --inode-file-handles=never -o loglevel=err",
        "-f -o source=tree,cache=always,no_xattr,sandbox=chroot -o writeback,no_readdirplus",
    ] {
        let script = "cat there && echo new >made && cat made && rm there && mkdir d && mv made d && ls -R && df . >/dev/null && echo end";
        let (said, _) = same(args, script);
        assert!(said.starts_with("beforenew\n") && said.ends_with("end\n"), "{args}: {said}");
    }
    let (said, left) = same("--readonly", "cat there; touch made 2>/dev/null || echo refused");
    assert_eq!((said.as_str(), left.len()), ("beforerefused\n", 1));
}

/// A file system that is mounted below the directory is one of its own in the guest, unless that is not wanted.
#[test]
fn mounts_below_are_shown_as_such_or_as_directories() {
    const MOUNTED: &str = "mkdir tree/sub; mount -t tmpfs tmpfs tree/sub; echo file >tree/sub/file; exec \"$@\"";
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to mount");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for program in programs(directory.path()) {
        for (args, file_systems) in [("", 2), ("--no-announce-submounts", 1)] {
            let mut command = Command::new("unshare");
            command.args(["--mount", "--propagation", "private", "sh", "-euc", MOUNTED, "sh"]).arg(&program);
            let served = Served::start_by(command, args);
            let said = served.sh("cat sub/file; stat -c %d . there sub/. sub/file | uniq | wc -l");
            assert_eq!(said, format!("file\n{file_systems}\n"), "{} {args}", program.display());
            assert_eq!(served.end(), Some(0));
        }
    }
}

/// Their command lines, word for word: Kata's runtime in Go (`virtiofsd.go`: a socket as descriptor 3, and the extra arguments of its
/// configuration), Kata's in Rust (`share_virtio_fs_standalone.rs`), and cloud-hypervisor's manual (`docs/fs.md`).
#[test]
fn kata_and_cloud_hypervisor_start_it_as_they_do() {
    let directory = tempfile::tempdir().unwrap();
    let program = &programs(directory.path())[0];
    for (line, waits_for) in [
        (
            "--syslog --cache=auto --shared-dir={tree} --fd=3 --inode-file-handles=prefer --thread-pool-size=1 \
             --announce-submounts 3<&0 0</dev/null",
            "",
        ),
        (
            "--socket-path {socket} --shared-dir {tree} --cache auto --sandbox none --seccomp none --inode-file-handles \
             never --thread-pool-size=1 --announce-submounts --xattr",
            "Waiting for vhost-user socket connection",
        ),
        (
            "--log-level debug --socket-path={socket} --shared-dir={tree} --cache=never --thread-pool-size=4",
            "Waiting for vhost-user socket connection",
        ),
    ] {
        let served = Served::start_as(program, line);
        // Kata's runtime in Rust takes it for started only then.
        served.wait_for(waits_for, |served| served.said().contains(waits_for));
        let mut driver = Driver::connect(served.socket(), Config::default()).unwrap();
        driver.init().unwrap();
        let node = driver.lookup(ferry_driver::ROOT, "there").unwrap().nodeid;
        let handle = driver.open(node, 0).unwrap().fh;
        assert_eq!(driver.read(node, handle, 0, 100).unwrap(), b"before", "{line}");
        drop(driver);
        let said = served.said();
        assert_eq!(served.end(), Some(0), "{line}: {said}");
    }
}

#[test]
fn it_prints_the_capabilities_of_virtiofsd() {
    let directory = tempfile::tempdir().unwrap();
    let mut said = programs(directory.path()).into_iter().map(|program| {
        let output = Command::new(program).arg("--print-capabilities").output().unwrap();
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    });
    let ours = said.next().unwrap();
    let features: Vec<_> = ours["features"].as_array().unwrap().iter().filter_map(|feature| feature.as_str()).collect();
    // libvirt does not migrate a guest without the first.
    let expected =
        ["migrate-precopy", "posix-acl-negotiation-mode", "security-label-negotiation-mode", "separate-options"];
    assert_eq!((ours["type"].as_str(), &features[..]), (Some("fs"), &expected[..]));
    assert!(said.all(|theirs| theirs == ours));
}

/// What a process may have open: now, and at most.
fn limits(pid: u32) -> Vec<String> {
    let all = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = all.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    line.split_whitespace().take(2).map(str::to_owned).collect()
}

#[test]
fn its_process_is_as_virtiofsds() {
    let directory = tempfile::tempdir().unwrap();
    let most: u64 = limits(std::process::id())[1].parse().unwrap();
    for program in programs(directory.path()) {
        for (flags, expected) in [
            ("--rlimit-nofile 2000", Some(2000)),
            ("--rlimit-nofile=2000 --inode-file-handles=never", Some(2000)),
            // More than this process may have, unless it may raise the limit.
            ("", (most < 1_000_000).then_some(most)),
        ] {
            let served = Served::start(&program, &format!("--sandbox none {flags}"));
            let pid = served.child.id();
            served.wait_for("the limit of open files", |_| {
                let found = limits(pid);
                found[0] == found[1] && expected.is_none_or(|most| found[0] == most.to_string() || flags.is_empty())
            });
            let file = served.directory.path().join("s.pid");
            assert_eq!(fs::read_to_string(&file).unwrap().trim(), pid.to_string(), "{}", program.display());
            assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
        }
    }
}

/// What a server of root's keeps of root, by default and where no file is opened by its handle.
#[test]
fn it_keeps_the_capabilities_that_virtiofsd_keeps() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root");
        return;
    }
    let ours = Capabilities::of_thread().unwrap().bits();
    let directory = tempfile::tempdir().unwrap();
    for program in programs(directory.path()) {
        for (args, handles) in [("", true), ("--inode-file-handles=never", false)] {
            let expected = format!("{:016x}", Capabilities::of_server(handles).bits() & ours);
            let served = Served::start(&program, args);
            // Whoever answers stands where it is going to be.
            let mut driver = Driver::connect(served.socket(), Config { timeout: SOON, ..Config::default() }).unwrap();
            driver.init().unwrap();
            println!("{} {args}", program.display());
            InnerProcess::of(rustix::process::Pid::from_child(&served.child)).all_are("CapEff", &expected);
        }
    }
}

#[test]
fn a_server_that_does_not_start_leaves_no_file_with_its_number() {
    let directory = tempfile::tempdir().unwrap();
    let program = &programs(directory.path())[0];
    for (words, error) in [
        ("--shared-dir nowhere", "cannot share"),
        ("--shared-dir /dev/null", "cannot share"),
        // Only the process inside the sandbox finds this.
        ("--shared-dir . --posix-acl=always --xattrmap=:map::user.virtiofs.:", "--posix-acl always"),
    ] {
        let mut command = Command::new(program);
        command.arg("--socket-path").arg(directory.path().join("s")).args(words.split(' '));
        command.current_dir(directory.path());
        let mut started = RunningProgram::new(command.stdin(Stdio::null()).env_remove("FERRY_LOG"));
        let ended = started.wait(SOON).expect("it ends");
        let said = started.said().1;
        assert!(ended.code() == Some(1) && said.contains(error), "{ended}: {said}");
        assert!(!directory.path().join("s.pid").exists(), "{words:?}");
    }
    let served = Served::start(program, "");
    let (started, file) = (rustix::process::Pid::from_child(&served.child), served.directory.path().join("s.pid"));
    // The reply comes from the process inside.
    let mut driver = Driver::connect(served.socket(), Config { timeout: SOON, ..Config::default() }).unwrap();
    driver.init().unwrap();
    let inside = InnerProcess::of(started).pid();
    if inside == started {
        return ferry_skip::skip!("no namespaces here");
    }
    rustix::process::kill_process(inside, rustix::process::Signal::KILL).unwrap();
    served.wait_for("its end", |_| InnerProcess::only(started).is_gone());
    assert!(!fs::exists(&file).unwrap(), "the file with its number is left behind");
    assert_eq!(served.end(), Some(128 + 9));
}

/// A second one for the same socket leaves the first one's number alone, and one after that has the file.
#[test]
fn the_number_of_a_server_that_runs_stays_in_its_file() {
    let directory = tempfile::tempdir().unwrap();
    for (at, program) in programs(directory.path()).iter().enumerate() {
        let mut served = Served::start(program, "");
        let (socket, tree, file) = (served.socket(), served.tree(), served.directory.path().join("s.pid"));
        let number = || fs::read_to_string(&file).unwrap().trim().to_owned();
        let again = || {
            let mut command = Command::new(program);
            command.args(["--tag", "t", "--socket-path"]).arg(&socket).arg("--shared-dir").arg(&tree);
            command.stdin(Stdio::null()).env_remove("FERRY_LOG");
            command
        };
        let first = served.child.id().to_string();
        assert_eq!(number(), first, "{}", program.display());
        let mut second = RunningProgram::new(&mut again());
        let ended = second.wait(SOON).expect("the second one ends");
        let said = second.said().1;
        assert!(!ended.success(), "{}: {said}", program.display());
        assert_eq!(number(), first, "{}", program.display());
        if at == 0 {
            assert!(said.contains(&format!("s.pid is locked by a running server, process {first}")), "{said}");
            // That one continues, and inside its sandbox it has no file of the host.
            let mut driver = Driver::connect(&socket, Config { timeout: SOON, ..Config::default() }).unwrap();
            driver.init().unwrap();
            let started = rustix::process::Pid::from_child(&served.child);
            let inside = InnerProcess::of(started);
            assert!(inside.pid() == started || !inside.open_files().contains(&file), "{:?}", inside.open_files());
        }
        served.child.kill().unwrap();
        served.child.wait().unwrap();
        served.child = again().spawn().unwrap();
        let (mut next, end) = (served.child.id().to_string(), Instant::now() + SOON);
        while number() != next {
            let ended = served.child.try_wait().unwrap();
            assert!(Instant::now() < end, "{}: {ended:?}", program.display());
            if ended.is_some() {
                // virtiofsd's confined process has the lock, too, and dies a moment after it was killed.
                assert_ne!(at, 0, "{}: {ended:?}", program.display());
                served.child = again().spawn().unwrap();
                next = served.child.id().to_string();
            }
            std::thread::sleep(TICK);
        }
    }
}

/// Extended attributes as a guest sees them, among them ACLs that are not agreed on: what a program that sets, gets, lists and
/// removes them is told, and what the host has then.
#[test]
fn attributes_are_taken_and_refused_as_virtiofsd_does() {
    const PYTHON: &str = "/usr/bin/python3";
    const SCRIPT: &str = r#"
import os, errno
acl = bytes.fromhex("02000000 01000600 ffffffff 02000600 05000000 04000400 ffffffff 10000600 ffffffff 20000400 ffffffff")
def told(what, name, call):
    try: print(what, name, call())
    except OSError as error: print(what, name, errno.errorcode[error.errno])
for name, value in [("user.one", b"1"), ("user.virtiofs.two", b"2"), ("trusted.three", b"3"), ("security.four", b"4"),
        ("system.posix_acl_access", acl), ("system.posix_acl_default", acl)]:
    told("set", name, lambda: os.setxattr("there", name, value))
    told("get", name, lambda: os.getxattr("there", name))
told("list", "all", lambda: sorted(os.listxattr("there")))
told("mode", "all", lambda: oct(os.stat("there").st_mode))
for name in ["user.one", "trusted.three", "system.posix_acl_access"]:
    told("remove", name, lambda: os.removexattr("there", name))
told("list", "all", lambda: sorted(os.listxattr("there")))
"#;
    if !Path::new(PYTHON).exists() || !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs {PYTHON}, and root");
        return;
    }
    let script = format!("{PYTHON} -c '{SCRIPT}'");
    for args in [
        "--xattr",
        "--posix-acl",
        "--xattrmap :map::user.virtiofs.:",
        "--xattr --xattrmap /prefix/all/trusted./user.virtiofs./:ok:all:::",
        "--xattr --xattrmap :unsupported:client:security.:::bad:all:trusted.:::ok:all:::",
    ] {
        let (said, _) = same(&format!("--modcaps=+sys_admin {args}"), &script);
        assert!(said.lines().count() == 18, "{args}: {said}");
        if args == "--xattr" {
            assert!(said.contains("set system.posix_acl_access ENOTSUP"), "{said}");
        }
    }
}

/// A server without privileges: its user is root inside.
#[test]
fn my_user_outside_is_root_inside() {
    const USER: u32 = 1234;
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to become somebody else");
        return;
    }
    let directory = directory(Place::Disk);
    let (tree, socket) = (directory.path().join("tree"), directory.path().join("s"));
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("roots"), "").unwrap();
    for path in [directory.path(), &tree] {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    }
    // Other users may not run a program in the directory of the tests' user.
    let program = directory.path().join("ferry");
    ferry_tests::copy_program(ferry_tests::mounts::program(), &program);
    let user = USER.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(program).arg("share").arg(&tree);
    command.args(["--map-user", "auto", "--once", "--tag", "t", "--virtiofs"]).arg(&socket);
    command.current_dir(directory.path()).stdin(Stdio::null()).env_remove("FERRY_LOG");
    // Where it keeps the socket by which it is asked for its log.
    command.env("XDG_RUNTIME_DIR", directory.path());
    let child = command.spawn().unwrap();
    let served = Served { child, directory };
    served.wait_for("the socket", |served| served.socket().exists());
    let said = served.sh("touch made && chown 5:6 made && mkdir dir && stat -c '%n %u:%g' made dir roots");
    assert_eq!(said, "made 0:0\ndir 0:0\nroots 65534:65534\n");
    let mine = |name: &str| (name.to_owned(), USER, USER);
    assert_eq!(owners(&served.tree()), [mine("dir"), mine("made"), ("roots".into(), 0, 0)]);
    assert_eq!(served.end(), Some(0));
}

/// A request that makes something has the label of the guest's SELinux with it.
#[test]
fn created_files_have_their_label_or_fail() {
    const LABEL: (&[u8], &[u8]) = (b"security.selinux", b"system_u:object_r:etc_t:s0");
    let directory = tempfile::tempdir().unwrap();
    let program = &programs(directory.path())[0];
    // Names that take no rights, and that symbolic links cannot have.
    let start = |when: &str| Served::start(program, &format!("--security-label={when} --xattrmap :map::user.guest.:"));
    let connect = |served: &Served| Driver::connect(served.socket(), Config::default()).unwrap();
    let refused = connect(&start("always")).init().unwrap_err();
    assert!(refused.errno().is_some(), "a guest that has no labels is refused: {refused}");
    let served = start("auto");
    let mut driver = connect(&served);
    let mut contexts = Vec::new();
    append_security_context(&mut contexts, LABEL.0, LABEL.1);
    let security = SecurityContexts::parse(&contexts, 1).unwrap();
    let extensions = Extensions { security, ..Extensions::default() };
    let made = |driver: &mut Driver, operation: Operation<'_>| {
        let request = Request { unique: 0, ino: Ino::ROOT, uid: 0, gid: 0, pid: 1, extensions, operation };
        let reply = driver.call(1, &request, &[], 512).unwrap().unwrap();
        reply.get().map(drop).map_err(|error| error.errno())
    };
    let [plain, dir, file, pipe, link] =
        ["plain", "dir", "file", "pipe", "link"].map(|name| Name::new(name.as_bytes()).unwrap());
    let new = |kind: u32| CreateArgs { mode: kind | 0o644, umask: 0, rdev: 0 };
    driver.init().unwrap();
    made(&mut driver, Operation::Mkdir { name: plain, new: new(0o040_000) }).unwrap();
    driver.init_with(INIT_FLAGS | InitFlags::SECURITY_CTX, MINOR_MAX).unwrap();
    made(&mut driver, Operation::Mkdir { name: dir, new: new(0o040_000) }).unwrap();
    let flags = OFlags::RDWR | OFlags::EXCL;
    made(&mut driver, Operation::Create { name: file, new: new(0o100_000), flags, clear_privileges: false }).unwrap();
    let refused = Err(Some(rustix::io::Errno::PERM.raw_os_error()));
    assert_eq!(made(&mut driver, Operation::Mknod { name: pipe, new: new(0o010_000) }), refused);
    assert_eq!(made(&mut driver, Operation::Symlink { name: link, target: b"there" }), refused);
    let found: Vec<String> = owners(&served.tree()).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(found, ["dir", "file", "plain", "there"]);
    let label = |name: &str| {
        let mut value = [0; 100];
        let path = served.tree().join(name);
        let length = rustix::fs::getxattr(&path, "user.guest.security.selinux", &mut value[..]).ok()?;
        Some(value[..length].to_vec())
    };
    let labelled = Some(LABEL.1.to_vec());
    // The first client had not agreed on labels.
    assert_eq!((label("dir"), label("file"), label("plain")), (labelled.clone(), labelled, None));
    drop(driver);
    assert_eq!(served.end(), Some(0));
}
