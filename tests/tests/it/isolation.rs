//! The sandbox of a server: each layer tried from inside, and the program's default layers.

use std::fs;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use ferry_driver::load::{self, Load, LoadTarget, Op};
use ferry_driver::{Caller, Error, ROOT};
use ferry_isolation::Capabilities;
use ferry_tests::mounts::RunningProgram;
use ferry_tests::sandboxed::{SOON, Served, TICK, USER, UserHome, as_user, is_root};
use ferry_tests::{Place, directory};
use rustix::process::{Signal, kill_process};

const O_RDWR_CREAT: u32 = 0o102;

/// A directory to share, and one beside it that the sandbox must hide; both belong to a user.
fn tree_of(user: u32) -> UserHome {
    let home = UserHome::of(user);
    for dir in ["shared", "outside"] {
        home.make(dir, |path| fs::create_dir(path).unwrap());
    }
    for (file, text) in [("outside/secret", "outside"), ("shared/file", "inside")] {
        home.make(file, |path| fs::write(path, text).unwrap());
    }
    symlink(home.at("outside/secret"), home.at("shared/link")).unwrap();
    home
}

/// Attempts to escape from the sandbox, and their outcomes.
struct EscapeAttempts {
    tree: UserHome,
    program: PathBuf,
    user: u32,
}

impl EscapeAttempts {
    fn of(user: u32) -> Self {
        let tree = tree_of(user);
        let program = tree.program(Path::new(env!("CARGO_BIN_EXE_ferry-escape")), "escape");
        Self { tree, program, user }
    }

    /// What it says, or the signal that ends it.
    fn attempt(&self, sandbox: &str, attempt: &str, what: &str) -> String {
        let mut command = as_user(self.user, &self.program);
        let output = command.arg(sandbox).arg(self.tree.at("shared")).args([attempt, what]).output().unwrap();
        // A supervisor returns the exit status of a signal as shells do.
        let signal = output.status.signal().or(output.status.code().and_then(|code| code.checked_sub(128)));
        match signal.filter(|signal| *signal > 0) {
            Some(signal) => format!("signal {signal}"),
            None => format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)),
        }
        .trim_end()
        .to_owned()
    }

    /// The attempt works without the sandbox, and ends like this with it.
    #[track_caller]
    fn is_stopped(&self, sandbox: &str, attempt: &str, what: &str, expected: &str) {
        assert_eq!(self.attempt("none", attempt, what), "worked", "{attempt} {what}, without a sandbox");
        if ["create", "device"].contains(&attempt) {
            fs::remove_file(self.tree.at("shared").join(what)).unwrap();
        }
        assert_eq!(self.attempt(sandbox, attempt, what), expected, "{attempt} {what}, in the sandbox {sandbox}");
    }

    #[track_caller]
    fn works(&self, sandbox: &str, attempt: &str, what: &str) {
        assert_eq!(self.attempt(sandbox, attempt, what), "worked", "{attempt} {what}, in the sandbox {sandbox}");
    }
}

fn errno(number: i32) -> String {
    format!("errno {number}")
}

/// The killed process's signal.
const SIGSYS: &str = "signal 31";

fn each_wall_holds(user: u32) {
    let escapes = EscapeAttempts::of(user);
    let secret = escapes.tree.at("outside/secret").to_str().unwrap().to_owned();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap().to_string();
    let name = format!("ferry-isolation-{}-{user}", std::process::id());
    let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    // A process that this user may send signals to.
    let mut sleeper = as_user(user, Path::new("/bin/sleep")).arg("600").spawn().unwrap();
    let sleeping = sleeper.id().to_string();

    let sandbox = "namespaces";
    escapes.is_stopped(sandbox, "open", &secret, &errno(libc::ENOENT));
    escapes.is_stopped(sandbox, "below", "../outside/secret", &errno(libc::ENOENT));
    escapes.is_stopped(sandbox, "below", "link", &errno(libc::ENOENT));
    escapes.is_stopped(sandbox, "create", "../new", &errno(libc::EROFS));
    escapes.is_stopped(sandbox, "connect", &address, &errno(libc::ENETUNREACH));
    escapes.is_stopped(sandbox, "abstract", &name, &errno(libc::ECONNREFUSED));
    escapes.is_stopped(sandbox, "signal", &sleeping, &errno(libc::ESRCH));
    escapes.is_stopped(sandbox, "processes", "", &errno(libc::ENOENT));
    escapes.works(sandbox, "below", "file");
    if user == 0 {
        escapes.is_stopped(sandbox, "device", "null", &errno(libc::EACCES));
        escapes.is_stopped("capabilities", "mount", "", &errno(libc::EPERM));
        escapes.is_stopped("capabilities", "chroot", "", &errno(libc::EPERM));
    }

    let sandbox = "landlock";
    escapes.is_stopped(sandbox, "open", &secret, &errno(libc::EACCES));
    escapes.is_stopped(sandbox, "below", "../outside/secret", &errno(libc::EACCES));
    escapes.is_stopped(sandbox, "below", "link", &errno(libc::EACCES));
    escapes.is_stopped(sandbox, "execute", "", &errno(libc::EACCES));
    escapes.is_stopped(sandbox, "connect", &address, &errno(libc::EACCES));
    escapes.is_stopped(sandbox, "abstract", &name, &errno(libc::EPERM));
    escapes.is_stopped(sandbox, "signal", &sleeping, &errno(libc::EPERM));
    escapes.works(sandbox, "below", "file");
    escapes.works(sandbox, "create", "made");
    // With a port that may be connected to, all others stay closed.
    let (other, port) = (TcpListener::bind("127.0.0.1:0").unwrap(), server.local_addr().unwrap().port());
    let with_port = format!("landlock:{port}");
    escapes.works(&with_port, "connect", &address);
    escapes.is_stopped(&with_port, "connect", &other.local_addr().unwrap().to_string(), &errno(libc::EACCES));
    escapes.is_stopped(&with_port, "open", &secret, &errno(libc::EACCES));
    // What was opened before, to be read: its name leads to it still, and Landlock lets nobody open it to be written.
    escapes.works("namespaces", "again", &secret);
    escapes.is_stopped("namespaces,landlock", "again", &secret, &errno(libc::EACCES));

    for attempt in ["execute", "fork", "trace", "code", "users", "type"] {
        escapes.is_stopped("seccomp", attempt, "", SIGSYS);
    }
    escapes.is_stopped("seccomp", "connect", &address, SIGSYS);
    escapes.is_stopped("seccomp", "abstract", &name, SIGSYS);
    escapes.is_stopped("seccomp", "signal", &sleeping, SIGSYS);
    escapes.is_stopped("seccomp-trap", "fork", "", SIGSYS);
    escapes.works("seccomp-log", "fork", "");
    let all = "namespaces,capabilities,landlock,seccomp";
    escapes.is_stopped(all, "fork", "", SIGSYS);
    for (attempt, what) in [("thread", ""), ("below", "file"), ("create", "also-made")] {
        escapes.works(all, attempt, what);
    }
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
}

/// Threads, supervisor and keeper are allowed fewer system calls than the server.
#[test]
fn each_role_is_held_to_its_own() {
    let escapes = EscapeAttempts::of(rustix::process::geteuid().as_raw());
    let too_much = [
        ("worker", &["accept", "receive", "fork", "execute"][..]),
        ("disk", &["accept", "receive", "unlink", "memory", "fork", "execute"]),
        ("mapper", &["accept", "unlink", "thread", "fork", "execute"]),
        ("connector", &["accept", "receive", "listen", "unlink", "memory", "fork", "execute"]),
        ("supervisor", &["accept", "receive", "memory", "thread", "fork", "execute"]),
        ("keeper", &["memory", "thread", "fork", "execute", "signal"]),
    ];
    for (role, attempts) in too_much {
        let sandbox =
            if ["worker", "disk", "mapper"].contains(&role) { format!("seccomp,{role}") } else { role.to_owned() };
        let myself = std::process::id().to_string();
        attempts.iter().for_each(|attempt| escapes.is_stopped(&sandbox, attempt, &myself, SIGSYS));
        if ["supervisor", "keeper"].contains(&role) {
            escapes.is_stopped(&sandbox, "below", "file", SIGSYS);
        }
    }
    // And can do what they are there for.
    for (attempt, what) in [("thread", ""), ("below", "file"), ("create", "made"), ("unlink", ""), ("memory", "")] {
        escapes.works("seccomp,worker", attempt, what);
    }
    for (attempt, what) in [("thread", ""), ("below", "file")] {
        escapes.works("seccomp,disk", attempt, what);
    }
    for (attempt, what) in [("below", "file"), ("memory", ""), ("receive", "")] {
        escapes.works("seccomp,mapper", attempt, what);
    }
    // It connects, and is told no, without an end, where libraries try what they can do without.
    let (server, path) = (TcpListener::bind("127.0.0.1:0").unwrap(), escapes.tree.at("socket"));
    let (address, _listens) = (server.local_addr().unwrap().to_string(), UnixListener::bind(&path).unwrap());
    let path = path.to_str().unwrap();
    for (attempt, what) in [("connect", &*address), ("path", path), ("thread", ""), ("below", "file")] {
        escapes.works("connector", attempt, what);
    }
    escapes.works("none", "fast open", &address);
    for attempt in ["netlink", "protocol", "code", "fast open"] {
        escapes.is_stopped("connector", attempt, &address, &errno(libc::EACCES));
    }
    // All others of a server's do not.
    for role in ["seccomp", "seccomp,worker"] {
        escapes.is_stopped(role, "connect", &address, SIGSYS);
        escapes.is_stopped(role, "path", path, SIGSYS);
    }
    for attempt in ["signal", "unlink"] {
        escapes.works("outside", attempt, &std::process::id().to_string());
    }
    for attempt in ["receive", "unlink"] {
        escapes.works("holder", attempt, "");
    }
}

#[test]
fn each_layer_holds_for_root() {
    if is_root() {
        each_wall_holds(0);
    }
}

#[test]
fn each_layer_holds_for_others() {
    if is_root() {
        each_wall_holds(USER);
    }
}

/// The program, sharing a tree.
fn serve(user: u32, flags: &str) -> Served {
    tree_of(user).serve(&line(flags))
}

fn line(flags: &str) -> String {
    format!("share shared --virtiofs s --json {flags}")
}

/// Does most of what a guest does.
fn is_used(served: &Served) {
    let mut driver = served.guest();
    let (file, open) = driver.create(ROOT, "new", O_RDWR_CREAT, 0o100_644).unwrap();
    assert_eq!(driver.write(file.nodeid, open.fh, 0, b"written").unwrap(), 7);
    assert_eq!(driver.read(file.nodeid, open.fh, 0, 64).unwrap(), b"written");
    driver.fsync(file.nodeid, open.fh).unwrap();
    driver.setxattr(file.nodeid, "user.name", b"value", 0).unwrap();
    assert_eq!(driver.getxattr(file.nodeid, "user.name").unwrap(), b"value");
    driver.release(file.nodeid, open.fh).unwrap();
    let dir = driver.mkdir(ROOT, "dir", 0o755).unwrap();
    driver.rename(ROOT, "new", dir.nodeid, "moved", 0).unwrap();
    driver.symlink(dir.nodeid, "link", "/etc/passwd").unwrap();
    driver.mknod(dir.nodeid, "fifo", libc::S_IFIFO | 0o600, 0).unwrap();
    driver.tmpfile(ROOT, 0o2, 0o600).unwrap();
    driver.truncate(file.nodeid, 3).unwrap();
    let found = driver.lookup(dir.nodeid, "moved").unwrap();
    let open = driver.open(found.nodeid, 0).unwrap();
    assert_eq!(driver.read(found.nodeid, open.fh, 0, 64).unwrap(), b"wri");
    let listing = driver.opendir(ROOT).unwrap();
    assert!(driver.readdirplus(ROOT, listing.fh, 0, 4096).unwrap().len() >= 5);
    driver.syncfs().unwrap();
    driver.statfs(ROOT).unwrap();
    for (name, is_file) in [("moved", true), ("link", true), ("fifo", true), ("dir", false)] {
        match is_file {
            true => driver.unlink(dir.nodeid, name).unwrap(),
            false => driver.rmdir(ROOT, name).unwrap(),
        }
    }
    assert_eq!(driver.peer(), Some(served.inside.pid().as_raw_nonzero().get().unsigned_abs()));
}

/// What is the same for root and others.
fn is_confined(served: &Served, capabilities: u64) {
    is_used(served);
    let _stays = served.guest();
    // The process's two, and one more for those that serve the guest.
    let filters = served.inside.status("Seccomp_filters");
    assert!(["2", "3"].iter().all(|count| filters.iter().any(|found| found == count)), "{filters:?}");
    // Of the host nothing is left but the shared directory, the directory that holds it, and its own descriptors.
    served.is_confined(1, &[], capabilities);
    assert_eq!(served.inside.sees("proc/self"), ["fd", "uid_map"]);
    assert_eq!(fs::read_to_string(served.inside.file("root/share/0/file")).unwrap(), "inside");
    assert_eq!(served.said(), "", "nothing is missing");
}

#[test]
fn a_server_of_roots_is_confined() {
    if !is_root() {
        return;
    }
    let mut served = serve(0, "");
    is_confined(&served, Capabilities::of_server(true).bits() & Capabilities::of_thread().unwrap().bits());
    assert!(!served.inside.has_own("user"));
    // A device of the guest's is made, and belongs to whom it says.
    let mut driver = served.guest();
    driver.mknod(ROOT, "null", libc::S_IFCHR | 0o600, 0x103).unwrap();
    drop(driver);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    assert!(!served.home.at("s").exists(), "the socket is left behind");
}

#[test]
fn a_server_of_another_user_is_confined() {
    if !is_root() {
        return;
    }
    let mut served = serve(USER, "--map-user auto");
    is_confined(&served, 0);
    assert!(served.inside.has_own("user"));
    let map = fs::read_to_string(served.inside.file("uid_map")).unwrap();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), [USER.to_string(), USER.to_string(), "1".into()]);
    // Its user reaches its log.
    let asked = served.home.command(&[], &format!("log {}", served.started.pid())).output().unwrap();
    assert!(asked.status.success(), "{asked:?}");
    assert_eq!(served.ends_by(Signal::INT), 0, "{}", served.said());
    assert!(!served.home.at("s").exists(), "the socket is left behind");
}

#[test]
fn capabilities_and_filters_are_as_the_flags_say() {
    if !is_root() {
        return;
    }
    let ours = Capabilities::of_thread().unwrap().bits();
    let bits = |list: &str, handles| {
        let kept = Capabilities::of_server(handles).modified(list).unwrap().bits();
        format!("{:016x}", kept & ours)
    };
    let served = serve(0, "--modcaps +sys_admin:-mknod --seccomp none --inode-file-handles never");
    is_used(&served);
    served.inside.all_are("CapEff", &bits("+sys_admin:-mknod", false));
    served.inside.all_are("CapBnd", &bits("+sys_admin:-mknod", false));
    served.inside.all_are("Seccomp", "0");
    let served = serve(0, "--inode-file-handles never --sandbox namespace --seccomp kill");
    is_used(&served);
    served.inside.all_are("CapEff", &bits("-sys_admin", false));

    for (sandbox, root) in [("chroot", None), ("none", Some("/"))] {
        let served = serve(0, &format!("--sandbox {sandbox}"));
        is_used(&served);
        served.inside.all_are("CapEff", &bits("-sys_admin", true));
        served.inside.all_are("Seccomp", "2");
        assert!(served.inside.pid() == served.started.pid() && !served.inside.has_own("mnt"));
        let expected = root.map_or_else(|| served.home.at("shared"), PathBuf::from);
        assert_eq!(fs::read_link(served.inside.file("root")).unwrap(), expected);
    }
}

#[test]
fn the_two_processes_end_together() {
    let user = rustix::process::geteuid().as_raw();
    // The one outside is killed.
    let mut served = serve(user, "");
    if served.inside.pid() == served.started.pid() {
        ferry_skip::skip!("no namespaces here: {}", served.said());
        return;
    }
    kill_process(served.started.pid(), Signal::KILL).unwrap();
    served.started.wait(SOON).unwrap();
    let end = Instant::now() + SOON;
    while !served.inside.is_gone() {
        assert!(Instant::now() < end, "the server outlives the process that was started");
        std::thread::sleep(TICK);
    }
    // The one inside is.
    let mut served = serve(user, "");
    kill_process(served.inside.pid(), Signal::KILL).unwrap();
    assert_eq!(served.ends(), 128 + 9);
    assert!(served.said().contains("ended by signal 9"), "{}", served.said());
    assert!(!served.home.at("s").exists(), "the socket is left behind");
}

/// What stands before a command that can make no namespaces: a namespace of users of which no other may be made.
const WITHOUT_NAMESPACES: [&str; 7] = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    "echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all \"$@\"",
    "sh",
];

/// Landlock stands around a directory: with rules about files where none is opened by its handle, and without them where some are.
#[test]
fn landlock_confines_to_a_directory() {
    if !is_root() {
        return;
    }
    let (files, other) = ("files below 1 directories", "all but files");
    let by_handles = if Capabilities::of_thread().unwrap().can_open_handles() { other } else { files };
    for (user, flags, landlock, rules) in [
        (0, "", "Some(Full)", by_handles),
        (0, "--inode-file-handles never", "Some(Full)", files),
        (0, "--sandbox chroot --inode-file-handles never", "Some(Full)", files),
        (0, "--sandbox none", "None", "none"),
        (USER, "", "Some(Full)", files),
    ] {
        let served = serve(user, &format!("{flags} --log debug"));
        served.says(&format!(" landlock={landlock} "));
        served.says(&format!(" rules={rules}\n"));
    }
}

/// A directory that the guest knows is moved out of the share. The server's descriptor leads there still, and where Landlock is the only
/// layer, it is Landlock that refuses to open a file there.
#[test]
fn files_that_are_moved_out_are_not_opened() {
    if !is_root() {
        return;
    }
    for (sandbox, expected) in [("none", None), ("", Some(libc::EACCES))] {
        let tree = tree_of(0);
        tree.make("shared/dir", |path| fs::create_dir(path).unwrap());
        tree.make("shared/dir/file", |path| fs::write(path, "moved").unwrap());
        let flag = if sandbox.is_empty() { String::new() } else { format!("--sandbox {sandbox}") };
        let command = tree.command(&WITHOUT_NAMESPACES, &line(&format!("--inode-file-handles never {flag}")));
        let served = tree.serve_by(command);
        let mut driver = served.guest();
        let dir = driver.lookup(ROOT, "dir").unwrap().nodeid;
        let file = driver.lookup(dir, "file").unwrap().nodeid;
        let open = driver.open(file, 0).unwrap();
        driver.release(file, open.fh).unwrap();
        fs::rename(served.home.at("shared/dir"), served.home.at("outside/dir")).unwrap();
        let outcome = driver.open(file, 0).map(drop);
        assert_eq!(outcome.as_ref().err().and_then(Error::errno), expected, "{sandbox}: {outcome:?}");
        assert_eq!(outcome.is_ok(), expected.is_none(), "{sandbox}: {outcome:?}");
        // What is below the directory is opened on.
        let inside = driver.lookup(ROOT, "file").unwrap().nodeid;
        driver.open(inside, 0).unwrap();
    }
}

/// Without user namespaces, the program reports what is missing, and continues only if no sandbox was requested.
#[test]
fn unavailable_features_are_reported() {
    if !is_root() {
        return;
    }
    let before = WITHOUT_NAMESPACES;
    let tree = tree_of(0);
    let command = tree.command(&before, &line(""));
    let served = tree.serve_by(command);
    let said = served.said();
    assert!(said.contains("namespaces are not available") && said.contains("user namespace"), "{said}");
    is_used(&served);
    served.inside.all_are("Seccomp", "2");
    served.inside.all_are("CapEff", &format!("{:016x}", 0));
    assert!(!served.inside.has_own("mnt"));

    let tree = tree_of(0);
    let output = tree.command(&before, &line("--sandbox namespace")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("--sandbox namespace") && said.contains("user namespace"), "{said}");
    assert!(!tree.at("s").exists(), "the socket is left behind");
}

/// Root of a container has no CAP_SYS_ADMIN. In a user namespace it would have one mapping, so files of other users would
/// belong to nobody.
#[test]
fn root_without_sys_admin_acts_for_others_on() {
    if !is_root() {
        return;
    }
    let before = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"];
    let tree = tree_of(0);
    fs::set_permissions(tree.at("shared"), fs::Permissions::from_mode(0o777)).unwrap();
    let command = tree.command(&before, &line(""));
    let served = tree.serve_by(command);
    let said = served.said();
    assert!(said.contains("namespaces are not available") && said.contains("without CAP_SYS_ADMIN"), "{said}");
    is_used(&served);
    assert!(!served.inside.has_own("user"));
    served.inside.all_are("Seccomp", "2");
    let mut driver = served.guest();
    driver.set_caller(Caller { uid: USER, gid: USER, pid: 1 });
    driver.create(ROOT, "theirs", O_RDWR_CREAT, 0o100_600).unwrap();
    let owner = fs::metadata(served.home.at("shared/theirs")).unwrap();
    assert_eq!((owner.uid(), owner.gid()), (USER, USER));

    let tree = tree_of(0);
    let output = tree.command(&before, &line("--sandbox namespace")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("--sandbox namespace") && said.contains("SETUID"), "{said}");
}

/// A server that may use one CPU still knows, in its sandbox, that its clients have others: it looks for the next request for
/// a moment before it sleeps, so that it need not be called for each.
#[test]
fn one_that_is_bound_to_a_cpu_polls() {
    if std::thread::available_parallelism().map_or(1, usize::from) == 1 {
        ferry_skip::skip!("needs two CPUs");
        return;
    }
    let tree = tree_of(rustix::process::geteuid().as_raw());
    let command = tree.command(&["taskset", "--cpu-list", "0"], &line("--queues 1"));
    let served = tree.serve_by(command);
    let load = Load {
        on: LoadTarget::File("new".into()),
        size: Some(1 << 20),
        op: Op::Read,
        queues: 1,
        queue_size: 128,
        event_idx: true,
        indirect: true,
        packed: false,
        depth: 1,
        block: 4096,
        random: true,
        seconds: None,
        requests: Some(2000),
        sleep: false,
        threads: None,
        verify: false,
        reattach: None,
        pid: None,
        count_syscalls: None,
    };
    // Whoever else works on this machine, the other tests among them, may keep it from polling for a while.
    let end = Instant::now() + SOON;
    loop {
        let kicks = load::run(&served.home.at("s"), &load).unwrap().kicks_per_request;
        if kicks < 0.5 {
            break;
        }
        assert!(Instant::now() < end, "it is called for each request: {kicks} calls for one");
        std::thread::sleep(TICK);
    }
}

/// What cannot be confined says so, if it was asked to be.
#[test]
fn unsuitable_options_are_refused() {
    let directory = directory(Place::Disk);
    for (line, words) in [
        ("share mem --mount m --sandbox namespace", "is mounted on this host"),
        ("share mem --virtiofs s --sandbox chroot", "one shared directory"),
        ("share 9p:tcp:127.0.0.1:1 --virtiofs s --sandbox chroot", "one shared directory"),
        ("share 9p:unix:none --virtiofs s --seccomp kill", "/none: No such file or directory"),
        ("share . --virtiofs s --modcaps everything", "not a list of capabilities"),
    ] {
        let mut command = Command::new(ferry_tests::mounts::program());
        let output = command.args(line.split(' ')).current_dir(directory.path()).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(words), "{line}: {said}");
    }
}

/// A capability that the process does not have cannot be kept.
#[test]
fn a_missing_capability_is_named() {
    if !is_root() {
        return;
    }
    let without = ["setpriv", "--bounding-set=-lease", "--inh-caps=-lease"];
    for sandbox in ["namespace", "chroot", "none"] {
        let home = tree_of(0);
        let line = format!("share shared --virtiofs s --sandbox {sandbox} --modcaps -mknod:+chown:+lease");
        let mut started = RunningProgram::new(home.command(&without, &line).stdin(Stdio::null()));
        let ended = started.wait(SOON).unwrap_or_else(|| panic!("{sandbox}: it serves"));
        let said = started.said().1;
        assert_eq!(ended.code(), Some(1), "{sandbox}: {said}");
        assert!(said.contains("--modcaps: this process lacks LEASE:"), "{sandbox}: {said}");
        assert!(said.contains("CapabilityBoundingSet=") && !home.at("s").exists(), "{sandbox}: {said}");
    }
    // A user has all capabilities in the user namespace of the server.
    let served = serve(USER, "--modcaps +lease --map-user auto");
    is_used(&served);
    served.inside.has_capabilities(Capabilities::NONE.modified("+lease").unwrap().bits());
}

/// The sandbox forbids to create a control socket, so a server whose socket could not be created does not try again.
#[test]
fn a_server_without_a_control_socket_serves() {
    if !is_root() {
        return;
    }
    let home = tree_of(USER);
    // Something else is where its socket would be.
    const SCRIPT: &str = "mkdir -m 700 ferry && mkdir ferry/$$ && chown -R 1234 ferry && exec \"$@\"";
    let command = home.command(
        &["sh", "-c", SCRIPT, "sh"],
        "--log warn share shared --virtiofs s --json --sandbox none --map-user auto",
    );
    let mut served = home.serve_by(command);
    is_used(&served);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    assert_eq!(served.said().matches("WARN").count(), 1, "{}", served.said());
}

/// The memory of a guest is not in a core dump of its server.
#[test]
fn a_core_dump_has_no_memory_of_a_guest() {
    let served = serve(rustix::process::geteuid().as_raw(), "");
    let _guest = served.guest();
    let mappings = fs::read_to_string(served.inside.file("smaps")).unwrap();
    let flags = |name: &str| {
        let mapping = mappings.split_once(name).map(|(_, rest)| rest).unwrap_or_else(|| panic!("{name}: {mappings}"));
        mapping.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
    };
    let of_guest = flags("memfd:");
    assert!(of_guest.split(' ').any(|flag| flag == "dd"), "{of_guest}");
}

/// A descriptor of a file keeps its bytes on the host, whoever deletes it. A guest that is never told of that keeps the
/// file in mind for as long as it has memory; so the server lets go of it on its own.
#[test]
fn files_deleted_by_the_host_release_their_space() {
    if !is_root() {
        return;
    }
    let mut served = tree_of(0).serve("--log warn share shared --virtiofs s --json");
    let mut guest = served.guest();
    let node = guest.lookup(ROOT, "file").unwrap().nodeid;
    guest.getattr(node).unwrap();
    let inside = served.inside;
    let knows = || inside.open_files().iter().any(|path| path.to_string_lossy().contains("/file"));
    assert!(knows(), "{:?}", inside.open_files());
    fs::remove_file(served.home.at("shared/file")).unwrap();
    let end = Instant::now() + SOON;
    while knows() {
        assert!(Instant::now() < end, "{:?}", inside.open_files());
        std::thread::sleep(TICK);
    }
    assert!(matches!(guest.getattr(node), Err(Error::Errno(libc::ESTALE))));
    drop(guest);
    assert_eq!(served.ends_by(Signal::TERM), 0);
    assert_eq!(served.said(), "");
}
