//! podman, and skopeo with the newer version of the same libraries.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::Reply;
use crate::mounts::Mount;
use crate::place::{MANIFEST, Place, each_format};
use crate::toc_layers::sha256;

/// The storage of an engine that looks for layers in the mount.
struct Storage {
    graph: PathBuf,
    run: PathBuf,
    file: PathBuf,
}

impl Storage {
    fn new(place: &Place, mount: &Mount) -> Self {
        let at = |name: &str| place.directory.path().join(name);
        let storage = Self { graph: at("graph"), run: at("run"), file: at("storage.conf") };
        let text = format!(
            "[storage]\ndriver = \"overlay\"\ngraphroot = \"{}\"\nrunroot = \"{}\"\n[storage.options]\n\
             additionallayerstores = [\"{}:ref\"]\n",
            storage.graph.display(),
            storage.run.display(),
            mount.at.display()
        );
        fs::write(&storage.file, text).unwrap();
        // Engines ask first whether it is a registry, and for the type of each document.
        place.fake.fault(|request, reply| match request.path.as_str() {
            "/v2/" => Reply::of(200, "{}"),
            _ if request.is_manifest() => reply.with("content-type", MANIFEST),
            _ => reply,
        });
        fs::write(at("auth.json"), "{}").unwrap();
        fs::write(at("policy.json"), r#"{"default": [{"type": "insecureAcceptAnything"}]}"#).unwrap();
        storage
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("CONTAINERS_STORAGE_CONF", &self.file)
            .env("REGISTRY_AUTH_FILE", self.file.with_file_name("auth.json"));
        command
    }

    /// The layers that the storage has of the mount.
    fn layers(&self) -> usize {
        let layers = fs::read_dir(self.graph.join("overlay")).unwrap().map(|entry| entry.unwrap().path());
        layers.filter(|layer| layer.join("additionallayer").exists()).count()
    }
}

/// Engines leave a mount of their own there, in the way of removing the directory.
impl Drop for Storage {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.graph.join("overlay")).output();
    }
}

fn checked(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {said}");
    assert!(!said.contains("GC doesn't seem to be supported"), "{said}");
    String::from_utf8(stdout).unwrap()
}

fn is_installed(program: &Path) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Whether the engine, and not Ferry, asked the registry for a layer.
fn has_pulled(place: &Place) -> bool {
    let names: Vec<_> = place.layers.iter().map(|layer| sha256(&layer.blob)).collect();
    let agent = |request: &crate::common::Request| request.headers.get("user-agent").cloned().unwrap_or_default();
    let all = place.fake.requests();
    let of_engine: Vec<_> = all.iter().filter(|request| !agent(request).starts_with("ferry/")).collect();
    assert!(of_engine.iter().any(|request| request.is_manifest()), "{:?}", all.iter().map(agent).collect::<Vec<_>>());
    of_engine.iter().any(|request| names.iter().any(|name| request.path.ends_with(name)))
}

#[test]
#[ignore = "long: make test-all installs podman"]
fn podman_pulls_without_the_layers_and_runs_containers() {
    let podman = Path::new("podman");
    if !is_installed(podman) {
        return ferry_skip::skip!("no podman: apt-get install podman");
    }
    each_format(|place| {
        let Some(mount) = Mount::of(&place) else { return };
        let storage = Storage::new(&place, &mount);
        let podman = |args: &[&str]| {
            // With --root it would leave out the options of the file.
            checked(storage.command(podman).args(["--runtime=runc", "--cgroup-manager=cgroupfs"]).args(args))
        };
        let policy = place.directory.path().join("policy.json");
        let policy = format!("--signature-policy={}", policy.display());
        podman(&["pull", "--quiet", "--tls-verify=false", &policy, &place.reference]);
        assert!(!has_pulled(&place), "Ferry fetches what is read");
        assert_eq!(storage.layers(), 2);
        let at = podman(&["image", "mount", &place.reference]);
        let at = Path::new(at.trim());
        assert_eq!(fs::read(at.join("replaced/new")).unwrap(), b"is shown");
        assert!(!at.join("replaced/old").exists() && !at.join("gone").exists() && at.join("below").exists());
        podman(&["image", "unmount", &place.reference]);
        // Containers have their own layer above. The limits are those that a user may always set.
        let busybox = ferry_guest::Cache::from_env().and_then(|cache| cache.uml()).unwrap().busybox;
        let volume = format!("--volume={}:/busybox:ro", busybox.display());
        let limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--network=host", "--rm"];
        let script = "/busybox cat /replaced/new; /busybox ls /replaced; echo x >/below; /busybox cat /below";
        let run = ["run", &volume];
        let said = podman(&[&run[..], &limits, &[&place.reference, "/busybox", "sh", "-c", script]].concat());
        assert_eq!(said, "is shownnew\nx\n");
        // It reads the blobs. Docker's format has no zstd.
        if place.layers[0].media_type.ends_with("gzip") {
            let saved = place.directory.path().join("saved");
            podman(&["save", "--quiet", "--format=docker-dir", "--output", saved.to_str().unwrap(), &place.reference]);
            assert!(place.layers.iter().all(|layer| saved.join(&sha256(&layer.plain)[7..]).exists()));
        }
        podman(&["rmi", &place.reference]);
        mount.stop();
        // What no engine uses is removed.
        drop(place.open());
        assert_eq!(place.stored_bytes(), 0);
    });
}

/// They do not record the layers afterwards: containers/storage since 1.58 writes no file of layers that it finds here.
#[test]
#[ignore = "long: make test-all fetches skopeo"]
fn skopeo_finds_layers_by_their_tables_of_contents() {
    let cache = ferry_guest::Cache::from_env().unwrap();
    let Ok(skopeo) = cache.skopeo() else {
        return ferry_skip::skip!("no skopeo: guest/fetch skopeo");
    };
    each_format(|place| {
        let Some(mount) = Mount::of(&place) else { return };
        let storage = Storage::new(&place, &mount);
        let mut command = storage.command(&skopeo);
        command.args(["--insecure-policy", "copy", "--src-tls-verify=false", &format!("docker://{}", place.reference)]);
        let store = format!(
            "containers-storage:[overlay@{}+{}:overlay.additionallayerstore={}:ref]{}",
            storage.graph.display(),
            storage.run.display(),
            mount.at.display(),
            place.reference
        );
        checked(command.arg(store));
        assert!(!has_pulled(&place), "Ferry fetches what is read");
        assert_eq!(storage.layers(), 2);
        mount.stop();
    });
}
