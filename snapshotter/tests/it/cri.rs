//! Pods, as kubelet runs them: containerd's CRI plugin, asked by crictl.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferry_guest::Cache;
use ferry_tests::recipes::block;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::containerd::{Containerd, PODS, built_by_go, wait_until_empty};
use crate::lazy_containerd::{BUSYBOX, layers, push};
use crate::lazy_place::{ferry, noise, until, without_tables};
use crate::server::{Server, can_mount};
use crate::servers::{Program, Proxy, USER, registry};
use crate::toc_layers::{Format, Layer, Writer, lay_out_with, sha256};

/// More than anything takes, in a guest without KVM too.
const TIMEOUT: &str = "300s";
/// The variable that names the program crictl.
pub const CRICTL: &str = "FERRY_TESTS_CRICTL";
/// The user of the host that root is in a pod with users of its own.
const FIRST_USER: u32 = 200_000;
/// A directory of the image `lazy` of which each container has a copy, and what is in it.
const VOLUME: &str = "/volume";
const NOTE: &[u8] = b"from the image\n";
/// A CNI plugin whose networks have nothing but an address.
const NETWORK: &str = r#"#!/bin/sh
[ "$CNI_COMMAND" = VERSION ] && echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}'
[ "$CNI_COMMAND" = ADD ] && echo '{"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.2/24"}]}'
exit 0
"#;

/// `tests/clients/cri` has its version. In a guest, that of the machine.
pub fn crictl() -> Option<PathBuf> {
    if let Some(program) = std::env::var_os(CRICTL) {
        return Some(program.into());
    }
    built_by_go("cri", &["build", "-trimpath"], "sigs.k8s.io/cri-tools/cmd/crictl", "crictl")
}

/// A machine of a cluster, without kubelet.
struct Node {
    crictl: PathBuf,
    /// The socket of the image service.
    images: PathBuf,
    containerd: Containerd,
    server: Server,
    proxy: Proxy,
    registry: Program,
}

impl Node {
    /// With a user, its registry lets nobody else in, and crictl calls the snapshotter for images, as kubelet would.
    fn start(crictl: &Path, without: &str, images: &[&str], user: Option<&str>) -> Option<Self> {
        let cache = Cache::from_env().expect("there is a cache");
        let busybox = cache.uml().expect("it can be fetched").busybox;
        let skopeo = cache.skopeo().expect("it can be fetched");
        let server = Server::start_with("auto", |root| {
            let more = format!("[lazy]\nfrom = [\"*\"]\njobs = 0\nprogram = {:?}\nhosts = [\"certs.d\"]\n", ferry());
            let more = more + "image-service = \"c.sock\"\n";
            fs::write(root.with_file_name("more.toml"), more).expect("it can be written");
        });
        let directory = server.directory.path().to_owned();
        let registry = registry(&directory.join("registry"), user.is_some())?;
        let words: Vec<_> = ["--preserve-digests"]
            .into_iter()
            .chain(user.into_iter().flat_map(|user| ["--dest-creds", user]))
            .collect();
        let proxy = Proxy::to(registry.address);
        for name in images {
            let (layers, volumes) = match *name {
                "usual" => (without_tables(layers(&busybox, 9, 0)), &[][..]),
                "many" => (many(&busybox), &[][..]),
                _ => (with_volume(layers(&busybox, 1, 0)), &[VOLUME][..]),
            };
            let bundle = directory.join("bundles").join(name);
            lay_out_with(&bundle, &layers, volumes);
            push(&skopeo, &bundle, &format!("{}/os/{name}:1", registry.address), &words);
        }
        for plugin in ["loopback", "address"] {
            let plugin = directory.join("cni/bin").join(plugin);
            fs::create_dir_all(directory.join("cni/bin")).expect("it can be made");
            fs::write(&plugin, NETWORK).expect("it can be written");
            fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).expect("it is ours");
        }
        let network = json!({"cniVersion": "1.0.0", "name": "address", "plugins": [{"type": "address"}]});
        fs::write(directory.join("cni/1.conflist"), network.to_string()).expect("it can be written");
        let file = block("# /etc/containerd/config.toml, for Kubernetes").join("\n");
        let file = file.replace("/run/ferry-snapshotter/snapshotter.sock", &server.socket().display().to_string());
        let file = file.replace("/var/lib/ferry-snapshotter", &server.root().display().to_string());
        let lines = format!(
            "{}\nstats_collect_period = 1\n\
             [plugins.\"io.containerd.cri.v1.images\".pinned_images]\nsandbox = \"{}/os/lazy:1\"\n\
             [plugins.\"io.containerd.cri.v1.runtime\"]\nrestrict_oom_score_adj = true\n\
             [plugins.\"io.containerd.cri.v1.runtime\".cni]\nbin_dirs = [{:?}]\nconf_dir = {:?}\n\
             [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
             [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.crun]\nruntime_type = \"io.containerd.runc.v2\"\n\
             [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.crun.options]\nBinaryName = {:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\ndisable_tcp_service = true\n",
            file.replace(without, "#"),
            proxy.address,
            directory.join("cni/bin"),
            directory.join("cni"),
            cache.crun().expect("it can be fetched"),
        );
        let programs = cache.containerd().expect("it can be fetched");
        let head = "disabled_plugins = [\"io.containerd.nri.v1.nri\"]";
        let containerd = Containerd::start_with(programs, &directory, head, &lines, "");
        let images = if user.is_some() { server.socket() } else { directory.join("c.sock") };
        let node = Self { crictl: crictl.into(), images, containerd, server, proxy, registry };
        node.wait();
        Some(node)
    }

    /// Waits for containerd, whose socket is there before its plugins.
    fn wait(&self) {
        until("the CRI plugin", || self.try_cri(&["images"]).0 && self.try_cri(&["pods"]).0);
    }

    fn restart_containerd(&mut self) {
        self.containerd.restart();
        self.wait();
    }

    fn directory(&self) -> &Path {
        self.server.directory.path()
    }

    fn image(&self, name: &str) -> String {
        format!("{}/os/{name}:1", self.proxy.address)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.crictl);
        let socket = format!("unix://{}", self.directory().join("c.sock").display());
        let images = format!("unix://{}", self.images.display());
        command.args(["--runtime-endpoint", &socket, "--image-endpoint", &images, "--timeout", TIMEOUT]).args(words);
        command.env("HOME", self.directory());
        command
    }

    /// Returns whether crictl succeeded, what it printed, and its messages.
    fn try_cri(&self, words: &[&str]) -> (bool, String, String) {
        let output = self.command(words).output().expect("crictl starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    }

    #[track_caller]
    fn cri(&self, words: &[&str]) -> String {
        let (succeeded, printed, said) = self.try_cri(words);
        assert!(succeeded, "crictl {}: {printed}{said}\n{}", words.join(" "), self.containerd.log());
        printed
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.cri(words)).expect("crictl prints JSON")
    }

    /// Runs a program of busybox in a container.
    #[track_caller]
    fn exec(&self, container: &str, words: &[&str]) -> String {
        self.cri(&[&["exec", "--sync", container, BUSYBOX], words].concat())
    }

    #[track_caller]
    fn has(&self, container: &str, file: &str, bytes: &[u8]) {
        let sum = self.exec(container, &["sha256sum", file]);
        assert!(sum.starts_with(&sha256(bytes)["sha256:".len()..]), "{file}: {sum}");
    }

    fn file(&self, name: &str, content: &Value) -> String {
        let path = self.directory().join(name);
        fs::write(&path, content.to_string()).expect("it can be written");
        path.display().to_string()
    }

    /// Runs a pod on the network of the node, or with users of its own.
    fn run(&self, name: &'static str, runtime: &str, has_users: bool) -> Pod {
        let users = json!([{"container_id": 0, "host_id": FIRST_USER, "length": 65536}]);
        let options = if has_users {
            json!({"network": 0, "userns_options": {"mode": 0, "uids": users, "gids": users}})
        } else {
            json!({"network": 2})
        };
        let config = json!({"metadata": {"name": name, "namespace": "tests", "uid": name, "attempt": 0},
            "log_directory": self.directory().join("logs"), "linux": {"security_context": {"namespace_options": options}}});
        let config = self.file(&format!("{name}.pod"), &config);
        // kubelet tries again, too: containerd waits three seconds for a snapshotter, which a loaded machine may take.
        let mut id = String::new();
        until(name, || {
            let (succeeded, printed, said) = self.try_cri(&["runp", "--runtime", runtime, &config]);
            assert!(succeeded || said.contains("Unavailable"), "{said}\n{}", self.containerd.log());
            id = printed.trim().to_owned();
            succeeded
        });
        Pod { config, id, options }
    }

    /// Starts a container, which prints its name and waits.
    fn start_container(&self, pod: &Pod, name: &str, image: &str) -> String {
        self.start_with(pod, name, image, |_| {})
    }

    /// The same with a changed configuration.
    fn start_with(&self, pod: &Pod, name: &str, image: &str, change: impl FnOnce(&mut Value)) -> String {
        let script = format!("echo {name} runs; exec {BUSYBOX} sleep 1000000");
        let mut config = json!({"metadata": {"name": name}, "image": {"image": image}, "log_path": format!("{name}.log"),
            "command": [BUSYBOX, "sh", "-c", script],
            "linux": {"security_context": {"namespace_options": pod.options}}});
        change(&mut config);
        let config = self.file(name, &config);
        let id = self.cri(&["create", &pod.id, &config, &pod.config]).trim().to_owned();
        self.cri(&["start", &id]);
        until("a line of its log", || self.cri(&["logs", &id]) == format!("{name} runs\n"));
        id
    }

    /// Removes all pods and images, after which nothing is left.
    fn remove_all(&mut self) {
        self.cri(&["rmp", "--force", "--all"]);
        self.cri(&["rmi", "--all"]);
        // That of the pull that was killed lasts for a day.
        let pods = ["--namespace", PODS, "leases"];
        for lease in self.containerd.ctr(&[&pods[..], &["ls", "--quiet"]].concat()).split_whitespace() {
            self.containerd.ctr(&[&pods[..], &["rm", lease]].concat());
        }
        let mut client = wait_until_empty(&self.containerd, &mut self.server);
        let root = self.server.root();
        let left = |directory: &str| {
            let files =
                fs::read_dir(root.join(directory)).expect("it can be listed").flatten().map(|file| file.file_name());
            files.filter(|name| name != "table").count()
        };
        // What a process has open that ends just now is removed the next time.
        until("an empty store", || {
            client.cleanup().expect("it serves");
            left("lazy") + left("store/packs") + left("snapshots") == 0
        });
    }
}

/// A pod that runs.
struct Pod {
    config: String,
    id: String,
    options: Value,
}

/// One more layer, with the volume's directory, and a user.
fn with_volume(mut layers: Vec<Layer>) -> Vec<Layer> {
    let mut layer = Writer::new(Format::Estargz, &[1 << 20]);
    layer.dir(&format!("{}/", &VOLUME[1..]));
    layer.file(&format!("{}/note", &VOLUME[1..]), NOTE);
    layer.file("etc/passwd", b"root:x:0:0::/:/bin/sh\nworker:x:7:8::/:/bin/sh\n");
    layers.push(layer.finish());
    layers
}

/// More layers than a label has room for names.
fn many(busybox: &Path) -> Vec<Layer> {
    let mut layers = layers(busybox, 1, 0);
    for number in 0..60 {
        let mut layer = Writer::new(Format::Estargz, &[1 << 20]);
        layer.file(&format!("layer-{number}"), &noise(number, 5000));
        layers.push(layer.finish());
    }
    layers
}

/// What containerd's configuration is without: with all of it, its client says which layer of which image it wants, and else its transfer
/// service does, as with k3s.
const WAYS: [&str; 2] = ["nothing of it", "disable_snapshot_annotations = false"];

fn run_pods(crictl: &Path, without: &str) {
    let Some(mut node) = Node::start(crictl, without, &["lazy", "usual", "many"], None) else { return };
    let (lazy, usual, many) = (node.image("lazy"), node.image("usual"), node.image("many"));
    let before = node.proxy.answered();
    node.cri(&["pull", &lazy]);
    let pulled = node.proxy.answered() - before;
    // The pod's own image is the same one.
    let pod = node.run("first", "runc", false);
    let container = node.start_container(&pod, "one", &lazy);
    let started = node.proxy.answered() - before;
    println!("without {without}: pulled after {pulled} bytes, started after {started}");
    assert!(pulled < 1_000_000 && started < 8_000_000, "{pulled} {started}");
    node.has(&container, "/first", &noise(2, 50_000));
    node.exec(&container, &["dd", "if=/dev/zero", "of=/tmp/new", "bs=64k", "count=32"]);

    // What kubelet watches, and by which it removes images.
    let root = node.server.root();
    let number = |value: &Value| value["value"].as_str().and_then(|value| value.parse::<u64>().ok()).unwrap_or(0);
    let images = |node: &Node| node.json(&["imagefsinfo"])["status"]["imageFilesystems"][0].clone();
    until("the use by images", || number(&images(&node)["usedBytes"]) > 0);
    assert_eq!(images(&node)["fsId"]["mountpoint"], json!(root));
    until("the use by a container", || {
        let stats = node.json(&["stats", "--output", "json", "--id", &container]);
        number(&stats["stats"][0]["writableLayer"]["usedBytes"]) >= 2 << 20
    });

    // Neither of the two is missed: the container goes on, and others can be started.
    node.server.kill();
    node.exec(&container, &["touch", "/tmp/alone"]);
    drop(node.server.start_again());
    node.restart_containerd();
    node.exec(&container, &["stat", "/tmp/alone"]);
    node.has(&container, "/second", &noise(3, 50_000));
    let another = node.start_container(&pod, "another", &lazy);
    node.has(&another, "/first", &noise(2, 50_000));

    // containerd is killed while it unpacks.
    let pid = node.containerd.pid();
    node.proxy.die_after(4_000_000, move || kill_process(pid, Signal::KILL).expect("it runs"));
    assert!(!node.try_cri(&["pull", &usual]).0 && node.proxy.is_dead());
    node.restart_containerd();
    node.proxy.revive(node.registry.address);
    node.cri(&["pull", &usual]);
    let second = node.run("second", "runc", false);
    let container = node.start_container(&second, "usual", &usual);
    node.has(&container, "/first", &noise(2, 50_000));

    node.cri(&["pull", &many]);
    let third = node.run("third", "runc", true);
    let container = node.start_container(&third, "many", &many);
    node.has(&container, "/layer-59", &noise(59, 5000));
    assert_eq!(node.exec(&container, &["stat", "-c", "%u", "/", "/layer-0", "/first"]).trim(), "0\n0\n0");
    assert_eq!(node.exec(&container, &["cat", "/proc/self/uid_map"]).split_whitespace().nth(1), Some("200000"));

    node.remove_all();
}

/// The snapshotter and containerd are killed under pods, and during a pull.
#[test]
#[ignore = "long: make test-all"]
fn pods_run() {
    if !can_mount() {
        return;
    }
    let Some(crictl) = crictl() else { return };
    for way in WAYS {
        run_pods(&crictl, way);
    }
}

/// Pods with the network of this machine and with users of their own, by crun and by runc.
#[test]
#[ignore = "long: make test-all"]
fn pods_start_and_end() {
    if !can_mount() {
        return;
    }
    let Some(crictl) = crictl() else { return };
    let Some(mut node) = Node::start(&crictl, WAYS[0], &["lazy"], None) else { return };
    let image = node.image("lazy");
    // crun refuses machines with both versions of cgroups.
    let runtime = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { "crun" } else { "runc" };
    println!("the first pod is by {runtime}");
    for (name, runtime, has_users) in [("first", runtime, false), ("second", "runc", true)] {
        // The pod's own image is the same one, and is pulled for it.
        let pod = node.run(name, runtime, has_users);
        let container = node.start_container(&pod, name, &image);
        node.has(&container, "/first", &noise(2, 50_000));
        // containerd reads the image to fill the volume (containerd/containerd issue 12834).
        node.has(&container, &format!("{VOLUME}/note"), NOTE);
        node.exec(&container, &["sh", "-c", &format!("echo more >>{VOLUME}/note")]);
        // Another image as a volume (containerd/containerd issue 13534), and a user whom only the image knows
        // (containerd/nydus-snapshotter issue 647).
        let container = node.start_with(&pod, &format!("{name}-with-image"), &image, |config| {
            config["mounts"] = json!([{"container_path": "/other", "readonly": true, "image": {"image": image}}]);
            config["linux"]["security_context"]["run_as_username"] = json!("worker");
        });
        assert_eq!(node.exec(&container, &["id", "-u"]).trim(), "7");
        node.has(&container, "/other/second", &noise(3, 50_000));
        node.has(&container, &format!("/other{VOLUME}/note"), NOTE);
        assert!(!node.try_cri(&["exec", "--sync", &container, BUSYBOX, "touch", "/other/new"]).0, "it is read-only");
    }
    node.remove_all();
}

/// A pod's secret, which kubelet gives with the pull, is enough for a lazy start, and for what is read after restarts.
#[test]
#[ignore = "long: make test-all"]
fn private_images_start_lazily_by_the_secret_of_a_pod() {
    if !can_mount() {
        return;
    }
    let Some(crictl) = crictl() else { return };
    let Some(mut node) = Node::start(&crictl, WAYS[0], &["lazy"], Some(USER)) else { return };
    let image = node.image("lazy");
    assert!(!node.try_cri(&["pull", &image]).0 && !node.try_cri(&["pull", "--creds", "me:wrong", &image]).0);
    node.cri(&["pull", "--creds", USER, &image]);
    let lazy = || fs::read_dir(node.server.root().join("lazy")).expect("it can be listed").flatten();
    let [directory] = &lazy().map(|image| image.path()).collect::<Vec<_>>()[..] else { panic!("it starts lazily") };
    let pod = node.run("private", "runc", false);
    let container = node.start_container(&pod, "one", &image);
    node.has(&container, "/first", &noise(2, 50_000));
    node.server.kill();
    let process = fs::read_to_string(directory.join("process")).expect("it is served");
    let process = process.split(' ').next().and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
    kill_process(process.expect("it is a number"), Signal::KILL).expect("it runs");
    drop(node.server.start_again());
    node.has(&container, "/second", &noise(3, 50_000));
    node.remove_all();
}

/// Kubernetes takes the DaemonSet, and its pods may do what `--install-to` needs (`unit.rs`).
#[test]
#[ignore = "long: make test-all"]
fn the_daemon_set_installs_on_the_root_of_a_node() {
    let Some(reader) = built_by_go("cri", &["build", "-trimpath"], "./manifest", "manifest") else { return };
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/kubernetes/ferry-snapshotter.yaml");
    let manifest = fs::File::open(manifest).expect("it is there");
    let output = Command::new(reader).stdin(manifest).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let set: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    let pod = &set["spec"]["template"]["spec"];
    let install = &pod["initContainers"][0];
    assert_eq!((&pod["hostPID"], &install["securityContext"]["privileged"]), (&json!(true), &json!(true)));
    assert_eq!(install["command"], json!(["/usr/bin/ferry-snapshotter", "--install-to", "/node"]));
    assert_eq!(install["volumeMounts"], json!([{ "name": "node", "mountPath": "/node" }]));
    let [volume] = pod["volumes"].as_array().expect("there is a list").as_slice() else { panic!("{pod}") };
    assert_eq!((&volume["name"], &volume["hostPath"]["path"]), (&json!("node"), &json!("/")));
}
