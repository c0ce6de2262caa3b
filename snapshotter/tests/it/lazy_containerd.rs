//! containerd pulls from a registry through the snapshotter, and runs containers before their layers are here.

use std::fs;
use std::path::Path;
use std::process::Command;

use ferry_guest::Cache;

use crate::containerd::{Containerd, WITHOUT_PODS, plugin, wait_until_empty};
use crate::lazy_order::Recorder;
use crate::lazy_place::{ferry, noise, until};
use crate::server::{Server, can_mount};
use crate::servers::{Program, Proxy, registry};
use crate::toc_layers::{Format, Layer, Writer, lay_out, sha256};

const LARGE: usize = 12_000_000;
pub const BUSYBOX: &str = "/bin/busybox";

/// How often the program is killed while a container reads, and the files that it reads.
const KILLS: usize = 100;
const FILES: usize = 400;

/// An image with a shell, and more than that needs: noise of a seed, and files.
pub fn layers(busybox: &Path, seed: u32, files: usize) -> Vec<Layer> {
    let mut lower = Writer::new(Format::Estargz, &[1 << 20]);
    lower.dir("bin/");
    lower.file_as("bin/busybox", &fs::read(busybox).expect("it is there"), 0o755);
    for name in ["dev/", "proc/", "sys/", "tmp/", "etc/"] {
        lower.dir(name);
    }
    lower.file("large", &noise(seed, LARGE));
    let contents: Vec<_> = (100..).take(files).map(|seed| noise(seed, 40_000)).collect();
    for (file, content) in contents.iter().enumerate() {
        lower.file(&format!("f-{file}"), content);
        let sum = sha256(content).replace("sha256:", "");
        lower.file(&format!("sum-{file}"), format!("{sum}  /f-{file}\n").as_bytes());
    }
    let mut upper = Writer::new(Format::Estargz, &[1 << 20]);
    upper.file("first", &noise(2, 50_000));
    upper.file("second", &noise(3, 50_000));
    vec![lower.finish(), upper.finish()]
}

/// Everything that a pull needs, with an image in the registry.
struct Place {
    containerd: Containerd,
    proxy: Proxy,
    upstream: Program,
    server: Server,
    image: String,
}

impl Place {
    /// `words`: how skopeo pushes the image.
    fn new(words: &[&str], layers: impl FnOnce(&Path) -> Vec<Layer>) -> Option<Self> {
        let cache = Cache::from_env().expect("there is a cache");
        let busybox = cache.uml().expect("it can be fetched").busybox;
        let (programs, skopeo) =
            (cache.containerd().expect("it can be fetched"), cache.skopeo().expect("it can be fetched"));
        let mut server = Server::start_with("auto", |root| {
            let more = format!("[lazy]\nfrom = [\"*\"]\njobs = 0\nprogram = {:?}\nhosts = [\"certs.d\"]\n", ferry());
            fs::write(root.with_file_name("more.toml"), more).expect("it can be written");
        });
        drop(server.client());
        let directory = server.directory.path().to_owned();
        let upstream = registry(&directory.join("registry"), false)?;
        let proxy = Proxy::to(upstream.address);
        let image = format!("{}/os/app:1", proxy.address);
        lay_out(&directory.join("bundle"), &layers(&busybox));
        push(&skopeo, &directory.join("bundle"), &image, words);
        let exports = "[proxy_plugins.ferry.exports]\nenable_remote_snapshot_annotations = \"true\"\n";
        let containerd =
            Containerd::start_with(programs, &directory, WITHOUT_PODS, &(plugin(&server.socket()) + exports), "");
        Some(Self { containerd, proxy, upstream, server, image })
    }

    /// What a container has written to its `/tmp`.
    fn written(&self, file: &str) -> Option<Vec<u8>> {
        let snapshots = fs::read_dir(self.server.root().join("snapshots")).expect("it can be listed");
        snapshots.flatten().find_map(|id| fs::read(id.path().join("fs/tmp").join(file)).ok())
    }

    /// Ends a container, and removes all.
    fn finish(&mut self, name: &str) {
        let Self { containerd, server, image, .. } = self;
        containerd.try_ctr(&["task", "kill", "--signal", "SIGKILL", name]);
        until("the end of the container", || containerd.try_ctr(&["task", "rm", name]).0);
        containerd.ctr(&["container", "rm", name]);
        containerd.ctr(&["images", "rm", "--sync", image]);
        let mut client = wait_until_empty(containerd, server);
        client.cleanup().expect("it serves");
        assert_eq!(fs::read_dir(server.root().join("lazy")).expect("it can be listed").count(), 0);
    }
}

/// Pushes an image directory to a registry.
pub fn push(skopeo: &Path, bundle: &Path, image: &str, words: &[&str]) {
    let mut push = Command::new(skopeo);
    push.args(["--insecure-policy", "copy", "--dest-tls-verify=false"]).args(words).env("HOME", bundle);
    push.arg(format!("oci:{}:1", bundle.display())).arg(format!("docker://{image}"));
    let pushed = push.output().expect("skopeo starts");
    assert!(pushed.status.success(), "{}", String::from_utf8_lossy(&pushed.stderr));
}

/// A container starts when a part of its layers is here, and goes on when the program, and then the registry, is killed.
#[test]
#[ignore = "long: make test-all"]
fn containers_start_before_their_layers_are_here() {
    if !can_mount() {
        return;
    }
    for (format, words) in [
        ("eStargz", &["--preserve-digests"][..]),
        ("zstd:chunked", &["--dest-compress-format", "zstd:chunked", "--dest-force-compress-format"]),
    ] {
        let mut bytes = 0;
        let Some(mut place) = Place::new(words, |busybox| {
            let layers = layers(busybox, 1, 0);
            bytes = layers[0].blob.len();
            layers
        }) else {
            return;
        };
        let Place { containerd, proxy, image, .. } = &place;
        let before = proxy.answered();
        containerd.ctr(&["images", "pull", "--plain-http", "--snapshotter", "ferry", image]);
        let pulled = proxy.answered() - before;
        let listed = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "ls"]);
        assert_eq!(listed.matches("Committed").count(), 2, "{listed}");
        let name = &*format!("lazy-{}-{}", std::process::id(), format.len());
        let script = "while :; do /bin/busybox sleep 1; done";
        let mut recorder = Recorder::start(name);
        containerd.ctr(&["run", "--snapshotter", "ferry", "--detach", image, name, BUSYBOX, "sh", "-c", script]);
        recorder.records();
        let started = proxy.answered() - before;
        println!("{format}: pulled after {pulled} bytes, started after {started}, of {bytes} in the layers");
        assert!(pulled < 1_000_000 && started < 8_000_000, "{pulled} {started}");

        // Another namespace finds the same snapshots.
        let of_another = ["--namespace", "another"];
        let another = |words: &[&str]| containerd.ctr(&[&of_another, words].concat());
        another(&["images", "pull", "--plain-http", "--snapshotter", "ferry", image]);
        let listed = another(&["snapshots", "--snapshotter", "ferry", "ls"]);
        assert_eq!(listed.matches("Committed").count(), 2, "{listed}");
        another(&["images", "rm", "--sync", image]);
        // ctr loses output of programs that end soon, so a copy is looked for.
        let copy = |place: &Place, file: &str| {
            let script =
                format!("/bin/busybox cat /{file} >/tmp/{file} && /bin/busybox mv /tmp/{file} /tmp/{file}.copy");
            place.containerd.try_ctr(&["task", "exec", "--exec-id", file, name, BUSYBOX, "sh", "-c", &script])
        };
        let (works, said) = copy(&place, "first");
        assert!(works, "{said}");
        assert!(place.written("first.copy") == Some(noise(2, 50_000)));
        place.server.kill();
        let (works, said) = copy(&place, "second");
        assert!(works, "{said}");
        assert!(place.written("second.copy") == Some(noise(3, 50_000)), "{format}");
        drop(place.server.start_again());
        // Without its registry, the container has what was read.
        place.upstream.kill();
        let script = "/bin/busybox cmp /first /tmp/first.copy && /bin/busybox touch /tmp/same; /bin/busybox cat /large >/dev/null || /bin/busybox touch /tmp/failed";
        place.containerd.ctr(&["task", "exec", "--exec-id", "cmp", name, BUSYBOX, "sh", "-c", script]);
        assert!(place.written("same").is_some() && place.written("failed").is_some(), "{format}");
        place.containerd.ctr(&["task", "kill", "--signal", "SIGKILL", name]);
        recorder.end();
        let traces = fs::read_dir(place.server.root().join("traces")).expect("it was made").flatten();
        let lists: Vec<_> = traces.map(|list| fs::read_to_string(list.path()).expect("it is text")).collect();
        assert_eq!(lists, ["/bin/busybox\n/first\n/second\n/large\n"], "{format}");
        place.finish(name);
    }
}

/// A container that reads unfetched data does not notice a hundred kills of the program.
#[test]
#[ignore = "long: make test-all"]
fn a_container_does_not_notice_a_hundred_kills_of_the_program() {
    if !can_mount() {
        return;
    }
    let Some(mut place) = Place::new(&["--preserve-digests"], |busybox| layers(busybox, 1, FILES)) else { return };
    let Place { containerd, image, .. } = &place;
    containerd.ctr(&["images", "pull", "--plain-http", "--snapshotter", "ferry", image]);
    let name = &*format!("kills-{}", std::process::id());
    let script = format!(
        "b=/bin/busybox; i=0; while [ $i -lt {FILES} ]; do $b sha256sum -c /sum-$i >/dev/null 2>&1 || echo $i >>/tmp/bad; \
         i=$((i+1)); echo $i >/tmp/at; done; $b touch /tmp/done; while :; do $b sleep 1; done"
    );
    containerd.ctr(&["run", "--snapshotter", "ferry", "--detach", image, name, BUSYBOX, "sh", "-c", &script]);
    let at = |place: &Place| -> usize {
        // It may be written at this moment.
        let text = place.written("at").unwrap_or_default();
        String::from_utf8_lossy(&text).trim().parse().unwrap_or_default()
    };
    for kill in 0..KILLS {
        until("the next file", || at(&place) >= kill * FILES / KILLS);
        place.server.kill();
        // The container goes on without it.
        until("a file without the program", || at(&place) > kill * FILES / KILLS);
        drop(place.server.start_again());
    }
    until("the last file", || place.written("done").is_some());
    assert_eq!(place.written("bad"), None, "files that could not be read, or were wrong");
    place.finish(name);
}
