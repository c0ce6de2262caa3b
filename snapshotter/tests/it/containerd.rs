//! containerd itself, its client, and its test suite, with the snapshotter.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferry_guest::Cache;
use rustix::process::Pid;

use crate::client::Client;
use crate::server::{PROGRAM, Server, can_mount};
use crate::tree::Change::{Dir, File, Link, Owner, Symlink};
use crate::tree::{apply, look};

/// Far more than anything here takes, in a guest without KVM too.
const START_TIME: Duration = Duration::from_secs(600);
const IMAGE: &str = "ferry.test/image:latest";
/// containerd's namespace of pods.
pub const PODS: &str = "k8s.io";

/// What only pods need, and what needs it.
pub const WITHOUT_PODS: &str = "disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.cri.v1.images\", \
     \"io.containerd.cri.v1.runtime\", \"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\"]";

/// The table of the plugin.
pub fn plugin(socket: &Path) -> String {
    format!(
        "[proxy_plugins.ferry]\ntype = \"snapshot\"\naddress = {:?}\ncapabilities = [\"remap-ids\"]\n",
        socket.display().to_string()
    )
}

/// A running containerd, with all its files in a directory.
pub struct Containerd {
    command: Command,
    child: Child,
    programs: PathBuf,
    directory: PathBuf,
}

impl Containerd {
    pub fn start(programs: PathBuf, directory: &Path, snapshotter: &Path) -> Self {
        Self::start_with(programs, directory, WITHOUT_PODS, &plugin(snapshotter), "")
    }

    /// The same, with lines for the file's head, with tables, and with the differ of the transfer service.
    pub fn start_with(programs: PathBuf, directory: &Path, head: &str, tables: &str, differ: &str) -> Self {
        let config = directory.join("containerd.toml");
        let at = |name: &str| directory.join(name).display().to_string();
        let text = format!(
            "version = 3\nroot = {:?}\nstate = {:?}\n{head}\n\
             [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n{tables}\
             [[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\nplatform = \"linux\"\nsnapshotter = \"ferry\"\n{differ}",
            at("c-root"),
            at("c-state"),
            at("c.sock"),
            at("c.ttrpc"),
        );
        fs::write(&config, text).expect("it can be written");
        let log = fs::File::create(directory.join("containerd.log")).expect("it can be made");
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new(programs.join("containerd"));
        command.env("PATH", path);
        command
            .arg("--config")
            .arg(config)
            .arg("--log-level=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command.spawn().expect("containerd can be started");
        let containerd = Self { command, child, programs, directory: directory.into() };
        containerd.wait();
        containerd
    }

    fn wait(&self) {
        let end = Instant::now() + START_TIME;
        while !self.try_ctr(&["version"]).0 {
            assert!(Instant::now() < end, "containerd does not serve: {}", self.log());
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Kills it, and starts it again.
    pub fn restart(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = self.command.spawn().expect("containerd can be started");
        self.wait();
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.join("containerd.log")).unwrap_or_default()
    }

    pub fn try_ctr(&self, args: &[&str]) -> (bool, String) {
        let mut command = Command::new(self.programs.join("ctr"));
        let output =
            command.arg("--address").arg(self.directory.join("c.sock")).args(args).output().expect("ctr starts");
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    pub fn ctr(&self, args: &[&str]) -> String {
        let (succeeded, said) = self.try_ctr(args);
        assert!(succeeded, "ctr {}: {said}\n{}", args.join(" "), self.log());
        said
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // What a failed test left running would outlive containerd.
        for namespace in ["default", PODS] {
            for task in self.try_ctr(&["--namespace", namespace, "task", "ls", "--quiet"]).1.split_whitespace() {
                self.try_ctr(&["--namespace", namespace, "task", "rm", "--force", task]);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes an archive of an image of three layers, with whiteouts and an opaque directory; and what a container of it sees.
fn image(umoci: &Path, directory: &Path) -> PathBuf {
    let at = |name: &str| directory.join(name);
    let run = |args: &[&str]| {
        let output = Command::new(umoci).args(args).current_dir(directory).output().expect("umoci starts");
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let long = "more than an inode of an image holds, so that it is in a pack ".repeat(100);
    fs::create_dir_all(at("one")).expect("it can be made");
    apply(
        &at("one"),
        &[
            Dir("etc", 0o755),
            File("etc/kept", &long, 0o644),
            File("etc/gone", &long, 0o644),
            Link("etc/kept", "etc/linked"),
            Symlink("kept", "etc/link"),
            Dir("opaque", 0o755),
            File("opaque/old", &long, 0o644),
            Dir("tmp", 0o1777),
            File("suid", &long, 0o4755),
            Owner("etc", 7),
        ],
    );
    fs::create_dir_all(at("two")).expect("it can be made");
    apply(&at("two"), &[File("new", "new", 0o600), Dir("sub", 0o700), File("sub/file", &long, 0o640)]);
    run(&["init", "--layout", "bundle"]);
    run(&["new", "--image", "bundle:latest"]);
    run(&["insert", "--image", "bundle:latest", "one", "/"]);
    run(&["insert", "--image", "bundle:latest", "--opaque", "two", "/opaque"]);
    run(&["insert", "--image", "bundle:latest", "--whiteout", "/etc/gone"]);
    run(&["unpack", "--image", "bundle:latest", "unpacked"]);
    let tar = Command::new("tar").args(["-C", "bundle", "-cf", "image.tar", "."]).current_dir(directory).status();
    assert!(tar.expect("there is tar").success());
    at("image.tar")
}

/// Waits until containerd has removed all snapshots, which it does in the background. What it could not remove while the program was
/// killed, it removes only with another one (containerd issue 13416).
pub fn wait_until_empty(containerd: &Containerd, server: &mut Server) -> Client {
    let mut client = server.client();
    let end = Instant::now() + START_TIME;
    while !(client.list(&[]).expect("it serves").is_empty() && server.mount_points().is_empty()) {
        assert!(Instant::now() < end, "{:?} {:?}", client.list(&[]), server.mount_points());
        thread::sleep(Duration::from_millis(200));
        containerd.try_ctr(&["snapshots", "--snapshotter", "ferry", "prepare", "another", ""]);
        containerd.try_ctr(&["snapshots", "--snapshotter", "ferry", "rm", "another"]);
        containerd.try_ctr(&["content", "prune", "references"]);
    }
    client
}

fn import_mount_and_remove(images: &'static str) {
    let cache = Cache::from_env().expect("there is a cache");
    let (programs, umoci) = (cache.containerd().expect("it can be fetched"), cache.umoci().expect("it can be fetched"));
    let mut server = Server::start(images);
    drop(server.client());
    let directory = server.directory.path().to_owned();
    let archive = image(&umoci, &directory);
    let containerd = Containerd::start(programs, &directory, &server.socket());
    let import = [
        "images",
        "import",
        "--snapshotter",
        "ferry",
        "--base-name",
        "ferry.test/image",
        archive.to_str().expect("it is text"),
    ];
    containerd.ctr(&import);
    let listed = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "ls"]);
    assert_eq!(listed.matches("Committed").count(), 3, "{listed}");
    let usage = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "usage"]);
    assert!(usage.contains("KiB"), "{usage}");

    let at = directory.join("at");
    fs::create_dir(&at).expect("it can be made");
    let at = at.to_str().expect("it is text");
    // The program may be killed at any time.
    server.kill();
    drop(server.start_again());
    for flag in [None, Some("--rw")] {
        let words = ["images", "mount", "--snapshotter", "ferry"].into_iter().chain(flag).chain([IMAGE, at]);
        containerd.ctr(&words.collect::<Vec<_>>());
        assert_eq!(look(Path::new(at)), look(&directory.join("unpacked/rootfs")), "{flag:?}, images {images}");
        if flag.is_some() {
            fs::write(Path::new(at).join("etc/new"), "written").expect("it can be written to");
            fs::remove_file(Path::new(at).join("etc/kept")).expect("it can be removed");
            // Between a view of the layers and this mount.
            let tar = "application/vnd.oci.image.layer.v1.tar";
            let diff = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "diff", "--media-type", tar, at]);
            let members: Vec<_> = ["etc/new", "etc/.wh.kept", "etc/linked", "suid", "opaque/"]
                .into_iter()
                .filter(|name| diff.contains(&format!("{name}\0")))
                .collect();
            assert_eq!(members, ["etc/new", "etc/.wh.kept"], "images {images}");
        }
        containerd.ctr(&["images", "unmount", "--snapshotter", "ferry", "--rm", at]);
    }
    // Importing it again finds all layers.
    containerd.ctr(&import);
    containerd.ctr(&["images", "rm", "--sync", IMAGE]);
    let listed = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "ls"]);
    assert_eq!(listed.matches("Committed").count(), 0, "{listed}");
    let mut client = wait_until_empty(&containerd, &mut server);
    client.cleanup().expect("it serves");
    let packs = fs::read_dir(server.root().join("store/packs"))
        .map(|packs| packs.flatten().map(|pack| pack.file_name()).filter(|name| name != "table").collect::<Vec<_>>());
    assert_eq!(packs.unwrap_or_default(), [] as [&str; 0]);
}

#[test]
#[ignore = "long: make test-all"]
fn containerd_imports_mounts_and_removes_images() {
    if can_mount() {
        for images in ["never", "auto"] {
            import_mount_and_remove(images);
        }
    }
}

/// Containers of runc, with this host's users and with their own; the program is killed and started while one runs.
#[test]
#[ignore = "long: make test-all"]
fn containers_run_and_do_not_notice_restarts() {
    if !can_mount() {
        return;
    }
    let cache = Cache::from_env().expect("there is a cache");
    let busybox = cache.uml().expect("it can be fetched").busybox;
    let (programs, umoci) = (cache.containerd().expect("it can be fetched"), cache.umoci().expect("it can be fetched"));
    for images in ["never", "auto"] {
        let mut server = Server::start(images);
        drop(server.client());
        let directory = server.directory.path().to_owned();
        fs::create_dir_all(directory.join("two/bin")).expect("it can be made");
        fs::copy(&busybox, directory.join("two/bin/busybox")).expect("it can be copied");
        let archive = image(&umoci, &directory);
        let containerd = Containerd::start(programs.clone(), &directory, &server.socket());
        let archive = archive.to_str().expect("it is text");
        containerd.ctr(&[
            "images",
            "import",
            "--local",
            "--snapshotter",
            "ferry",
            "--base-name",
            "ferry.test/image",
            archive,
        ]);
        let busybox = "/opaque/bin/busybox";
        // runc knows all containers of this machine by their names.
        let named = |name: &str| format!("{name}-{}-{images}", std::process::id());
        let stays = &*named("stays");
        let run = |name: &str, flags: &[&str], script: &str| {
            let words = ["run", "--snapshotter", "ferry"].into_iter().chain(flags.iter().copied());
            containerd.ctr(&words.chain([IMAGE, &named(name), busybox, "sh", "-c", script]).collect::<Vec<_>>())
        };
        let script =
            "b=/opaque/bin/busybox; $b stat -c '%u %a' / /etc /suid; echo x >/etc/new && $b cat /etc/new; $b id -u";
        let said = run("own", &["--rm"], script);
        assert_eq!(said, "0 755\n7 755\n0 4755\nx\n0\n", "{images}");
        // The same, but the host sees other users.
        let maps = ["--rm", "--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536", "--remap-labels"];
        assert_eq!(run("mapped", &maps, script), said, "{images}");

        run("stays", &["--detach"], "while :; do /opaque/bin/busybox sleep 1; done");
        for round in 0..3 {
            server.kill();
            let exec = format!("/opaque/bin/busybox cat /etc/kept >/etc/copy-{round}");
            let id = format!("exec-{round}");
            containerd.ctr(&["task", "exec", "--exec-id", &id, stays, busybox, "sh", "-c", &exec]);
            // ctr loses output of programs that end soon, so the file is looked for.
            let snapshots = fs::read_dir(server.root().join("snapshots")).expect("it can be listed");
            let copies =
                snapshots.flatten().filter_map(|id| fs::read(id.path().join(format!("fs/etc/copy-{round}"))).ok());
            assert_eq!(copies.map(|copy| copy.len()).collect::<Vec<_>>(), [6200], "what is in the layer");
            drop(server.start_again());
        }
        containerd.ctr(&["task", "kill", "--signal", "SIGKILL", stays]);
        let end = Instant::now() + START_TIME;
        while !containerd.try_ctr(&["task", "rm", stays]).0 {
            assert!(Instant::now() < end, "it does not end: {}", containerd.log());
            thread::sleep(Duration::from_millis(50));
        }
        containerd.ctr(&["container", "rm", stays]);
        containerd.ctr(&["images", "rm", "--sync", IMAGE]);
        wait_until_empty(&containerd, &mut server);
    }
}

/// Builds a program from a directory of `tests/clients` into the cache. Skips the test without Go.
pub fn built_by_go(directory: &str, words: &[&str], package: &str, name: &str) -> Option<PathBuf> {
    if Command::new("go").arg("version").stdout(Stdio::null()).status().is_err() {
        ferry_skip::skip!("no Go here: apt-get install golang-go");
        return None;
    }
    let program = Cache::from_env().expect("there is a cache").path().join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients").join(directory);
    let built = Command::new("go").args(words).arg("-o").arg(&program).arg(package).current_dir(source).output();
    let built = built.expect("Go starts");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(program)
}

/// `tests/clients/containerd` has the suite's version.
#[test]
#[ignore = "long: make test-all"]
fn the_suite_of_containerd_passes() {
    if !can_mount() {
        return;
    }
    let Some(suite) = built_by_go("containerd", &["test", "-c"], ".", "containerd-suite") else { return };
    for images in ["never", "auto"] {
        // On a disk: a memory file system cannot be below an EROFS.
        let mut command = Command::new(&suite);
        command.args(["-test.v", "-test.root"]).env("IMAGES", images).env("TMPDIR", "/var/tmp");
        let output = command.env("SNAPSHOTTER", PROGRAM).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{images}: {said}{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(said.matches("\n    --- PASS: ").count(), 21, "{images}: {said}");
    }
}
