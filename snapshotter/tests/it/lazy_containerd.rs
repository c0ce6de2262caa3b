//! containerd pulls from a registry through the snapshotter, and runs containers before their layers are here.

use std::fs;
use std::path::Path;
use std::process::Command;

use ferry_guest::Cache;

use crate::containerd::{Containerd, wait_until_empty};
use crate::lazy_place::{ferry, noise, until};
use crate::server::{Server, can_mount};
use crate::servers::{Proxy, registry};
use crate::toc_layers::{Format, Layer, Writer, lay_out};

const LARGE: usize = 12_000_000;
const BUSYBOX: &str = "/bin/busybox";

/// An image with a shell, and more than that needs.
fn layers(busybox: &Path) -> Vec<Layer> {
    let mut lower = Writer::new(Format::Estargz, &[1 << 20]);
    lower.dir("bin/");
    lower.file_as("bin/busybox", &fs::read(busybox).expect("it is there"), 0o755);
    for name in ["dev/", "proc/", "sys/", "tmp/", "etc/"] {
        lower.dir(name);
    }
    lower.file("large", &noise(1, LARGE));
    let mut upper = Writer::new(Format::Estargz, &[1 << 20]);
    upper.file("first", &noise(2, 50_000));
    upper.file("second", &noise(3, 50_000));
    vec![lower.finish(), upper.finish()]
}

/// A container starts when a part of its layers is here, and goes on when the program, and then the registry, is killed.
#[test]
#[ignore = "long: make test-all"]
fn containers_start_before_their_layers_are_here() {
    if !can_mount() {
        return;
    }
    let cache = Cache::from_env().expect("there is a cache");
    let busybox = cache.uml().expect("it can be fetched").busybox;
    let (programs, skopeo) =
        (cache.containerd().expect("it can be fetched"), cache.skopeo().expect("it can be fetched"));
    for (format, words) in [
        ("eStargz", &["--preserve-digests"][..]),
        ("zstd:chunked", &["--dest-compress-format", "zstd:chunked", "--dest-force-compress-format"]),
    ] {
        let mut server = Server::start_with("auto", |root| {
            let more = format!("[lazy]\njobs = 0\nprogram = {:?}\nhosts = [\"certs.d\"]\n", ferry());
            fs::write(root.with_file_name("more.toml"), more).expect("it can be written");
        });
        drop(server.client());
        let folder = server.folder.path().to_owned();
        let Some(mut upstream) = registry(&folder.join("registry"), false) else { return };
        let proxy = Proxy::to(upstream.address);
        let image = &*format!("{}/os/app:1", proxy.address);
        let layers = layers(&busybox);
        lay_out(&folder.join("bundle"), &layers);
        let mut push = Command::new(&skopeo);
        push.args(["--insecure-policy", "copy", "--dest-tls-verify=false"]).args(words).env("HOME", &folder);
        push.arg(format!("oci:{}:1", folder.join("bundle").display())).arg(format!("docker://{image}"));
        let pushed = push.output().expect("skopeo starts");
        assert!(pushed.status.success(), "{}", String::from_utf8_lossy(&pushed.stderr));

        let exports = "[proxy_plugins.ferry.exports]\nenable_remote_snapshot_annotations = \"true\"\n";
        let containerd = Containerd::start_with(programs.clone(), &folder, &server.socket(), exports);
        let before = proxy.answered();
        containerd.ctr(&["images", "pull", "--plain-http", "--snapshotter", "ferry", image]);
        let pulled = proxy.answered() - before;
        let listed = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "ls"]);
        assert_eq!(listed.matches("Committed").count(), 2, "{listed}");
        let name = &*format!("lazy-{}-{}", std::process::id(), format.len());
        let script = "while :; do /bin/busybox sleep 1; done";
        containerd.ctr(&["run", "--snapshotter", "ferry", "--detach", image, name, BUSYBOX, "sh", "-c", script]);
        let started = proxy.answered() - before;
        println!(
            "{format}: pulled after {pulled} bytes, started after {started}, of {} in the layers",
            layers[0].blob.len()
        );
        assert!(pulled < 1_000_000 && started < 8_000_000, "{pulled} {started}");

        // Another namespace finds the same snapshots.
        let of_another = ["--namespace", "another"];
        let another = |words: &[&str]| containerd.ctr(&[&of_another, words].concat());
        another(&["images", "pull", "--plain-http", "--snapshotter", "ferry", image]);
        let listed = another(&["snapshots", "--snapshotter", "ferry", "ls"]);
        assert_eq!(listed.matches("Committed").count(), 2, "{listed}");
        another(&["images", "rm", "--sync", image]);
        let root = server.root();
        let written = |file: &str| {
            let snapshots = fs::read_dir(root.join("snapshots")).expect("it can be listed");
            snapshots.flatten().find_map(|id| fs::read(id.path().join("fs/tmp").join(file)).ok())
        };
        // ctr loses output of programs that end soon, so a copy is looked for.
        let copy = |file: &str| {
            let script =
                format!("/bin/busybox cat /{file} >/tmp/{file} && /bin/busybox mv /tmp/{file} /tmp/{file}.copy");
            containerd.try_ctr(&["task", "exec", "--exec-id", file, name, BUSYBOX, "sh", "-c", &script])
        };
        assert!(copy("first").0);
        assert!(written("first.copy") == Some(noise(2, 50_000)));
        server.kill();
        let (works, said) = copy("second");
        assert!(works, "{said}");
        assert!(written("second.copy") == Some(noise(3, 50_000)), "{format}");
        drop(server.start_again());
        // Without its registry, the container has what was read.
        upstream.kill();
        let script = "/bin/busybox cmp /first /tmp/first.copy && /bin/busybox touch /tmp/same; /bin/busybox cat /large >/dev/null || /bin/busybox touch /tmp/failed";
        containerd.ctr(&["task", "exec", "--exec-id", "cmp", name, BUSYBOX, "sh", "-c", script]);
        assert!(written("same").is_some() && written("failed").is_some(), "{format}");
        containerd.ctr(&["task", "kill", "--signal", "SIGKILL", name]);
        until("the end of the container", || containerd.try_ctr(&["task", "rm", name]).0);
        containerd.ctr(&["container", "rm", name]);
        containerd.ctr(&["images", "rm", "--sync", image]);
        let mut client = wait_until_empty(&containerd, &mut server);
        client.cleanup().expect("it serves");
        assert_eq!(fs::read_dir(server.root().join("lazy")).expect("it can be listed").count(), 0);
    }
}
