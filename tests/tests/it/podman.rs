//! Containers of podman, with layers and complete images of Ferry's: on this machine, and in a guest with a stock kernel.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use ferry_tests::disks::tool;
use ferry_tests::mounts::{RunningProgram, ferry, missing, mount_entry, program};
use ferry_tests::{GuestCache, Kind, Place, directory, guest_on, run, window};
use rustix::process::{Signal, kill_process};

use crate::servers::{Program, Proxy, registry};
use crate::toc_layers::{FORMATS, Format, Layer, Writer, lay_out, sha256};

/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(3000);
/// For what ends or begins soon, in such a guest too.
const PATIENCE: Duration = Duration::from_secs(600);
const DISK_BYTES: u64 = 4 << 30;
/// The length of what no container of these tests reads, and more than they read.
const LARGE: usize = 12_000_000;
const READ_BYTES_MAX: u64 = 6_000_000;
const BUSYBOX: &str = "/bin/busybox";
/// The first podman that does not record the layers that it finds (containers/storage 1.58).
const WITHOUT_LAYERS: (u32, u32) = (5, 5);
/// The limits are those that a user may always set.
const RUN: [&str; 4] = ["run", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"];

const SCRIPT: &str = r#"
mount -t cgroup2 none /sys/fs/cgroup
mount /dev/vda /var/tmp
if ! "$1" --ignored --exact podman::podman_of_debian_runs_containers --nocapture --test-threads 1 >/tmp/said 2>&1; then
    tail -c 20000 /tmp/said >&2
    exit 1
fi
cat /tmp/said
echo proved
"#;

/// A podman, and what it runs containers by.
struct Engine {
    podman: PathBuf,
    /// The directory of conmon and netavark. `None`: podman knows those of the machine.
    helpers: Option<PathBuf>,
    runtime: PathBuf,
    version: (u32, u32),
}

impl Engine {
    /// `None`: there is no such program.
    fn of(podman: PathBuf, helpers: Option<PathBuf>) -> Option<Self> {
        let output = Command::new(&podman).arg("--version").output().ok()?;
        let said = text(&output.stdout);
        let mut numbers = said.split([' ', '.', '\n']).filter_map(|word| word.parse().ok());
        let version = (numbers.next()?, numbers.next()?);
        let cache = GuestCache::from_env().unwrap();
        // crun refuses machines with both versions of cgroups.
        let runtime = match &helpers {
            _ if !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() => cache.containerd().unwrap().join("runc"),
            Some(helpers) => helpers.join("crun"),
            None => cache.crun().unwrap(),
        };
        Some(Self { podman, helpers, runtime, version })
    }

    /// Those of Debian 13 and sid.
    fn fetched() -> [Self; 2] {
        let cache = GuestCache::from_env().unwrap();
        let directories = [cache.podman_stable(), cache.podman()].map(Result::unwrap);
        directories.map(|directory| Self::of(directory.join("podman"), Some(directory)).unwrap())
    }

    /// The same, and that of this machine.
    fn all() -> Vec<Self> {
        Self::fetched().into_iter().chain(Self::of("podman".into(), None)).collect()
    }

    fn name(&self) -> String {
        let runtime = self.runtime.file_name().unwrap().display();
        format!("podman {}.{} by {runtime}", self.version.0, self.version.1)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn checked(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}{}", text(&stdout), text(&stderr));
    text(&stdout).trim_end().to_owned()
}

/// Bytes that do not compress.
fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

/// A shell, and more than that needs.
fn layers(format: Format) -> Vec<Layer> {
    let busybox = GuestCache::from_env().unwrap().uml().unwrap().busybox;
    let mut lower = Writer::new(format, &[1 << 20]);
    lower.dir("bin/");
    lower.file_as("bin/busybox", &fs::read(busybox).unwrap(), 0o755);
    for name in ["dev/", "proc/", "sys/", "tmp/", "etc/"] {
        lower.dir(name);
    }
    lower.file("large", &noise(1, LARGE));
    let mut upper = Writer::new(format, &[1 << 20]);
    upper.file("first", &noise(2, 50_000));
    upper.file("second", &noise(3, 50_000));
    let mut layers = vec![lower.finish(), upper.finish()];
    // podman 4.3 takes an image of unknown size for a damaged one.
    for layer in &mut layers {
        let bytes = layer.plain.len().to_string();
        layer.annotations.insert("io.containers.estargz.uncompressed-size".into(), bytes);
    }
    layers
}

/// A registry with a container image, and a directory for all files of podman and Ferry.
struct Installation<'a> {
    engine: &'a Engine,
    directory: tempfile::TempDir,
    proxy: Proxy,
    reference: String,
    _registry: Program,
}

impl<'a> Installation<'a> {
    fn new(engine: &'a Engine, format: Format) -> Option<Self> {
        let directory = directory(Place::Disk);
        let server = registry(&directory.path().join("registry"), false)?;
        let proxy = Proxy::to(server.address);
        let reference = format!("{}/os/app:1", proxy.address);
        let here = Self { engine, directory, proxy, reference, _registry: server };
        lay_out(&here.at("bundle"), &layers(format));
        let mut push = Command::new(GuestCache::from_env().unwrap().skopeo().unwrap());
        push.args(["--insecure-policy", "copy", "--dest-tls-verify=false", "--preserve-digests"]);
        push.arg(format!("oci:{}:1", here.at("bundle").display())).arg(format!("docker://{}", here.reference));
        checked(push.env("HOME", here.directory.path()));
        for name in ["layers.mnt", "image.mnt"] {
            fs::create_dir(here.at(name)).unwrap();
        }
        fs::write(here.at("policy.json"), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#).unwrap();
        fs::write(here.at("auth.json"), "{}").unwrap();
        Some(here)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Says where podman has its storage, and what else it looks in.
    fn configure(&self, graph: &str, options: &str) {
        let [run, tmp] = ["run", "tmp"].map(|kind| self.at(&format!("{graph}.{kind}")));
        let graph = self.at(graph);
        let lines = format!(
            "[storage]\ndriver = \"overlay\"\ngraphroot = {graph:?}\nrunroot = {run:?}\n[storage.options]\n{options}\n"
        );
        fs::write(self.at("storage.conf"), lines).unwrap();
        let helpers = self.engine.helpers.as_ref().map_or(String::new(), |helpers| {
            format!("helper_binaries_dir = [{helpers:?}]\nconmon_path = [{:?}]\n", helpers.join("conmon"))
        });
        let program = &self.engine.runtime;
        let runtime = program.file_name().unwrap().to_str().unwrap();
        let lines = format!(
            "[engine]\nruntime = {runtime:?}\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\n\
             lock_type = \"file\"\ntmp_dir = {tmp:?}\n{helpers}[engine.runtimes]\n{runtime} = [{program:?}]\n"
        );
        fs::write(self.at("containers.conf"), lines).unwrap();
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.engine.podman);
        command
            .args(words)
            .env("CONTAINERS_STORAGE_CONF", self.at("storage.conf"))
            .env("CONTAINERS_CONF", self.at("containers.conf"))
            .env("REGISTRY_AUTH_FILE", self.at("auth.json"))
            .env("HOME", self.directory.path())
            .env("PODMAN_IGNORE_CGROUPSV1_WARNING", "1");
        command
    }

    #[track_caller]
    fn podman(&self, words: &[&str]) -> String {
        checked(&mut self.command(words))
    }

    /// Whether podman fails.
    fn refuses(&self, words: &[&str]) -> bool {
        !self.command(words).output().unwrap().status.success()
    }

    fn pull(&self) {
        let policy = format!("--signature-policy={}", self.at("policy.json").display());
        self.podman(&["pull", "--quiet", "--tls-verify=false", &policy, &self.reference]);
    }

    /// The words that run a program of busybox in a new container.
    fn run_words<'b>(&'b self, flags: &[&'b str], words: &[&'b str]) -> Vec<&'b str> {
        [&RUN[..], flags, &[&self.reference, BUSYBOX], words].concat()
    }

    #[track_caller]
    fn run(&self, flags: &[&str], words: &[&str]) -> String {
        self.podman(&self.run_words(flags, words))
    }

    /// Returns what a call returns, and the bytes that the registry has sent meanwhile.
    fn counted<T>(&self, call: impl FnOnce() -> T) -> (T, u64) {
        let before = self.proxy.answered();
        let returned = call();
        (returned, self.proxy.answered() - before)
    }

    /// Starts the server of the layers.
    fn mount_layers(&self) -> RunningProgram {
        let (source, at) = (format!("layers:{}", self.at("layers").display()), self.at("layers.mnt"));
        let mut command = ferry(["mount", "--foreground"]);
        let mut server = RunningProgram::new(command.arg(source).arg(&at).env("HOME", self.directory.path()));
        let is_served = || mount_entry(&at).is_some() && fs::metadata(&at).is_ok();
        let end = std::time::Instant::now() + PATIENCE;
        while !is_served() {
            assert!(std::time::Instant::now() < end, "{:?}", server.said());
            assert_eq!(server.wait(Duration::from_millis(20)), None, "{:?}", server.said());
        }
        server
    }

    /// The layers of podman's that are in the mount.
    fn additional_layers(&self) -> usize {
        let layers = fs::read_dir(self.at("graph/overlay")).unwrap().map(|entry| entry.unwrap().path());
        layers.filter(|layer| layer.join("additionallayer").exists()).count()
    }

    fn image(&self, word: &str, store: &str) -> Command {
        let mut command = ferry(["image", word, "--store"]);
        command.arg(self.at(store)).env("HOME", self.directory.path()).env_remove("XDG_RUNTIME_DIR");
        command.env_remove("REGISTRY_AUTH_FILE");
        command
    }
}

impl Drop for Installation<'_> {
    fn drop(&mut self) {
        // What a failed test left. podman leaves a mount of its own.
        if self.at("storage.conf").exists() {
            let _ = self.command(&["rm", "--force", "--all", "--time", "0"]).output();
        }
        for name in ["graph/overlay", "second/overlay", "image.mnt", "layers.mnt"] {
            let _ = Command::new("umount").arg("--lazy").arg(self.at(name)).output();
        }
    }
}

fn is_noise(said: &str, seed: u32) -> bool {
    said.starts_with(&sha256(&noise(seed, 50_000))["sha256:".len()..])
}

/// Layers that podman finds in the mount stay in the registry. Their server is killed under a container.
fn run_containers_of_layers(engine: &Engine, format: Format) {
    let Some(here) = Installation::new(engine, format) else { return };
    here.configure("graph", &format!("additionallayerstores = [\"{}:ref\"]", here.at("layers.mnt").display()));
    let mut server = here.mount_layers();
    let ((), pulled) = here.counted(|| here.pull());
    assert_eq!(here.additional_layers(), 2);
    let (said, started) = here.counted(|| here.run(&["--rm"], &["sha256sum", "/first"]));
    println!("{}, {format:?}: pulled after {pulled} bytes, started after {started}", engine.name());
    assert!(is_noise(&said, 2), "{said}");
    assert!(pulled < 1_000_000 && started < READ_BYTES_MAX, "{pulled} {started}");

    let stays = here.run(&["--detach"], &["sleep", "1000000"]);
    let stays = &*stays;
    let exec = |words: &[&str]| here.podman(&[&["exec", stays, BUSYBOX][..], words].concat());
    exec(&["sh", "-c", "echo x >/tmp/written"]);
    server.kill();
    assert!(here.refuses(&here.run_words(&["--rm"], &["true"])), "there are no layers");
    server = here.mount_layers();
    // What had been fetched is there. A container has its files again when podman mounts them again, which `restart` does not do.
    let ((), fetched) = here.counted(|| {
        for words in [&["stop", "--time", "0", stays][..], &["start", stays]] {
            here.podman(words);
        }
        assert!(is_noise(&exec(&["sha256sum", "/second"]), 3));
        assert_eq!(exec(&["cat", "/tmp/written"]), "x");
        assert!(is_noise(&here.run(&["--rm"], &["sha256sum", "/first"]), 2));
    });
    assert!(fetched < 500_000, "{fetched}");

    here.podman(&["rm", "--force", "--time", "0", stays]);
    here.podman(&["rmi", &here.reference]);
    assert_eq!(here.additional_layers(), 0);
    kill_process(server.pid(), Signal::TERM).unwrap();
    assert!(server.wait(PATIENCE).is_some_and(|status| status.success()), "{:?}", server.said());
    // What no image needs is removed by the next one.
    drop(here.mount_layers());
    let packs = fs::read_dir(here.at("layers/store/packs")).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(packs.filter(|name| name != "table").collect::<Vec<_>>(), [] as [&str; 0]);
}

/// An image of podman's storage, which is here as a whole, and one whose files come from the registry when they are read.
fn run_containers_of_an_image(engine: &Engine) {
    let Some(here) = Installation::new(engine, Format::Estargz) else { return };
    here.configure("graph", "");
    here.pull();
    let _ = Command::new("umount").arg(here.at("graph/overlay")).output();
    let digest = checked(here.image("build", "store").arg(here.at("graph")).arg("-o").arg(here.at("app.img")));
    let remote = format!("oci:{}/os/storage:1", here.proxy.address);
    checked(here.image("push", "store").arg(here.at("app.img")).arg(&remote));
    fs::remove_dir_all(here.at("graph")).unwrap();
    let at = here.at("image.mnt");
    here.configure("second", &format!("additionalimagestores = [{at:?}]"));
    let lazily: [&str; 6] = ["--from", &remote, "--digest", &digest, "--jobs", "0"];
    for (image, store, more) in [("app.img", "store", &[][..]), ("lazy.img", "lazy", &lazily)] {
        let ((), fetched) = here.counted(|| {
            checked(here.image("mount", store).arg(here.at(image)).arg(&at).args(more));
            for (seed, file) in [(2, "/first"), (3, "/second")] {
                let said = here.run(&["--rm"], &["sh", "-c", &format!("echo x >/new; {BUSYBOX} sha256sum {file}")]);
                assert!(is_noise(&said, seed), "{said}");
            }
        });
        println!("{}, {image}: {fetched} bytes fetched", engine.name());
        let most = if more.is_empty() { 0 } else { READ_BYTES_MAX };
        assert!(fetched <= most, "{fetched}");
        assert!(here.refuses(&["rmi", &here.reference]), "the store is read only");
        checked(Command::new("umount").arg(&at));
    }
}

/// By each podman here, and from layers of each format.
#[test]
#[ignore = "long: make test-all fetches podman"]
fn each_podman_runs_containers() {
    if let Some(missing) = missing() {
        return ferry_skip::skip!("{missing}");
    }
    for engine in Engine::all() {
        if engine.version < WITHOUT_LAYERS {
            FORMATS.into_iter().for_each(|format| run_containers_of_layers(&engine, format));
        }
        run_containers_of_an_image(&engine);
    }
}

/// The part that a guest does, too.
#[test]
#[ignore = "long: make test-all fetches podman"]
fn podman_of_debian_runs_containers() {
    if let Some(missing) = missing() {
        return ferry_skip::skip!("{missing}");
    }
    let [stable, newest] = Engine::fetched();
    run_containers_of_layers(&stable, Format::Estargz);
    run_containers_of_an_image(&newest);
}

/// With crun and cgroups of version 2.
#[test]
#[ignore = "long: make test-all fetches podman"]
fn podman_runs_containers_in_a_guest() {
    let programs = window::programs();
    let disk = programs.socket.with_extension("disk");
    File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    checked(Command::new(tool("mkfs.ext4")).arg("-q").arg(&disk));
    let this = std::env::current_exe().unwrap();
    let mut guest =
        guest_on(&programs.socket, ["sh".as_ref(), "-euxc".as_ref(), SCRIPT.as_ref(), "sh".as_ref(), this.as_os_str()]);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    guest.cwd = "/".into();
    guest.memory_mib = 2048;
    let cache = guest.cache.path().into();
    // What it needs is fetched and built here.
    Engine::fetched();
    drop(guest.cache.uml().and_then(|_| guest.cache.skopeo()).and_then(|_| guest.cache.registry()).unwrap());
    guest.env = vec![("FERRY_CACHE".into(), cache), ("FERRY_BIN".into(), program().into())];
    let drive = format!("file={},format=raw,if=virtio,cache=unsafe", disk.display());
    guest.qemu_args = ["-drive".into(), drive.into()].into();
    let ran = run(guest, TIMEOUT);
    println!("{:?}, {}", ran.took, ran.out);
    let said = ran.ok();
    assert!(said.contains("by crun, Estargz: ") && said.ends_with("proved\n"), "{said}");
}
