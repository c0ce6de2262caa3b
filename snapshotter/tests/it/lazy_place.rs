//! A container image on a registry in memory, and a snapshotter that pulls it as containerd does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ferry_snapshotter::api::{Kind, Labels, Mount};
use rustix::process::Pid;
use serde_json::json;
use tonic::Code;

use crate::client::{Client, root_label};
use crate::fake::{Fake, Request};
use crate::server::{DIR, PROGRAM, Server};
use crate::toc_layers::{Format, Layer, Writer, sha256};

/// Far more than anything here takes, in a guest without KVM too.
const PATIENCE: Duration = Duration::from_secs(600);
pub const LARGE: usize = 6_000_000;

/// The program `ferry` that was built with this one, or else built now.
pub fn ferry() -> &'static Path {
    static FERRY: OnceLock<PathBuf> = OnceLock::new();
    FERRY.get_or_init(|| {
        let path = Path::new(PROGRAM).with_file_name("ferry");
        if !path.is_file() {
            let mut command = Command::new(env!("CARGO"));
            command.args(["build", "--locked", "-p", "ferry", "--profile"]);
            command.arg(if PROGRAM.contains("/release/") { "release" } else { "dev" });
            let status = command.current_dir(env!("CARGO_MANIFEST_DIR")).status();
            assert!(status.is_ok_and(|status| status.success()) && path.is_file(), "cannot build ferry");
        }
        path
    })
}

pub fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

/// Layers, and where the store is. The kernel mounts images before they are here, whether their chunks begin at blocks (eStargz) or not;
/// but it lets nobody wait for files in memory, so their mount is by FUSE.
pub const WAYS: [(Format, &str); 3] =
    [(Format::Estargz, DIR), (Format::ZstdChunked, DIR), (Format::ZstdChunked, "/dev/shm")];

/// A lower layer with a large file, and an upper one that hides a file.
pub fn layers(format: Format) -> Vec<Layer> {
    let chunks = if format == Format::Estargz { [128 << 10] } else { [100_000] };
    let mut lower = Writer::new(format, &chunks);
    lower.file("small", &noise(1, 20_000));
    lower.file("other", &noise(2, 20_000));
    lower.file("hidden", &noise(3, 20_000));
    lower.file("large", &noise(4, LARGE));
    let mut upper = Writer::new(format, &chunks);
    upper.file(".wh.hidden", b"");
    upper.file("above", &noise(5, 20_000));
    vec![lower.finish(), upper.finish()]
}

pub fn without_tables(mut layers: Vec<Layer>) -> Vec<Layer> {
    layers.iter_mut().for_each(|layer| layer.annotations.clear());
    layers
}

/// Waits for something.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} does not happen");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A container image on a registry, and a snapshotter.
pub struct Place {
    pub server: Server,
    pub fake: Arc<Fake>,
    pub layers: Vec<Layer>,
    /// The digest of its manifest.
    pub manifest: String,
}

impl Place {
    pub fn new(layers: Vec<Layer>) -> Self {
        Self::configured(layers, 0, "")
    }

    pub fn configured(layers: Vec<Layer>, jobs: u16, more: &str) -> Self {
        Self::in_directory(DIR, layers, jobs, more)
    }

    /// One of the [`WAYS`].
    pub fn of((format, directory): (Format, &str), jobs: u16) -> Self {
        Self::in_directory(directory, layers(format), jobs, "")
    }

    pub fn in_directory(directory: &str, layers: Vec<Layer>, jobs: u16, more: &str) -> Self {
        let fake = Arc::new(Fake::start());
        let mut server = Server::start_in(directory, "never", |root| {
            let from = if more.starts_with("from") { "" } else { "from = [\"*\"]\n" };
            let more = format!("[lazy]\njobs = {jobs}\nprogram = {:?}\nhosts = [\"certs.d\"]\n{from}{more}", ferry());
            fs::write(root.with_file_name("more.toml"), more).unwrap();
        });
        drop(server.client());
        let mut place = Self { server, fake, layers, manifest: String::new() };
        place.manifest = place.push("1");
        place
    }

    /// Stores the image under a tag; returns the digest of its manifest.
    pub fn push(&self, tag: &str) -> String {
        let plain: Vec<_> = self.layers.iter().map(|layer| sha256(&layer.plain)).collect();
        let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": plain}});
        let config = config.to_string();
        self.fake.add_blob(config.as_bytes());
        let descriptors = self.layers.iter().map(|layer| {
            self.fake.add_blob(&layer.blob);
            layer.descriptor()
        });
        let manifest = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "layers": descriptors.collect::<Vec<_>>(),
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
                "digest": sha256(config.as_bytes())}});
        format!("sha256:{}", self.fake.tag(tag, &manifest))
    }

    /// The labels that CRI and the transfer service set.
    pub fn labels(&self, layer: usize) -> Labels {
        let names: Vec<_> = self.layers[layer..].iter().map(|layer| sha256(&layer.blob)).collect();
        let mut labels = root_label();
        for (name, value) in [
            ("containerd.io/snapshot.ref", format!("sha256:chain-{layer}")),
            ("containerd.io/snapshot/cri.image-ref", format!("{}/os/app:1", self.fake.address)),
            ("containerd.io/snapshot/cri.manifest-digest", self.manifest.clone()),
            ("containerd.io/snapshot/cri.layer-digest", names[0].clone()),
            ("containerd.io/snapshot/cri.image-layers", names.join(",")),
        ] {
            labels.insert(name.into(), value);
        }
        if let Some(table) = self.layers[layer].annotations.get("containerd.io/snapshot/stargz/toc.digest") {
            labels.insert("containerd.io/snapshot/stargz/toc.digest".into(), table.clone());
        }
        labels
    }

    /// Prepares a layer as containerd does. Whether it need not be unpacked.
    pub fn prepare(&self, client: &mut Client, layer: usize, parent: &str, labels: Labels) -> Result<(), Vec<Mount>> {
        let key = format!("extract-{layer}-{}", client.list(&[]).unwrap().len());
        match client.prepare_with(&key, parent, labels) {
            Ok(mounts) => Err(mounts),
            Err(error) => {
                assert_eq!(error.code(), Code::AlreadyExists, "{error}");
                assert_eq!(client.stat(&key).unwrap_err().code(), Code::NotFound);
                Ok(())
            }
        }
    }

    /// Pulls the image: every layer starts lazily.
    pub fn pull(&self, client: &mut Client) {
        for layer in 0..self.layers.len() {
            let parent = if layer == 0 { String::new() } else { format!("sha256:chain-{}", layer - 1) };
            let name = format!("sha256:chain-{layer}");
            assert_eq!(self.prepare(client, layer, &parent, self.labels(layer)), Ok(()), "layer {layer}");
            // How containerd finds it.
            let filter = format!("labels.\"containerd.io/snapshot.ref\"=={name},parent=={parent:?}");
            let found = client.list(&[&filter]).unwrap();
            let [info] = &found[..] else { panic!("{found:?}") };
            assert_eq!((&*info.name, info.kind(), &*info.parent), (&*name, Kind::Committed, &*parent));
        }
    }

    pub fn top(&self) -> String {
        format!("sha256:chain-{}", self.layers.len() - 1)
    }

    /// Bytes of layers that were requested since the last call.
    pub fn fetched(&self) -> usize {
        let names: Vec<_> = self.layers.iter().map(|layer| sha256(&layer.blob)).collect();
        let is_layer = |request: &&Request| names.iter().any(|name| request.path.ends_with(name));
        let bytes = |request: &Request| request.range().map_or(usize::MAX, |(from, to)| to - from);
        self.fake.requests().iter().filter(is_layer).map(bytes).fold(0, usize::saturating_add)
    }

    /// The directories of images.
    pub fn images(&self) -> Vec<PathBuf> {
        fs::read_dir(self.server.root().join("lazy")).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// The process that serves an image.
    pub fn process(&self) -> Option<Pid> {
        let [image] = &self.images()[..] else { panic!("one image: {:?}", self.images()) };
        let text = fs::read_to_string(image.join("process")).unwrap();
        // It may be written at this moment.
        let pid: i32 = text.split(' ').next()?.parse().ok()?;
        // A process of a killed program has no parent here that reaps it.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        (!stat.rsplit_once(')')?.1.trim_start().starts_with('Z')).then(|| Pid::from_raw(pid).unwrap())
    }

    pub fn is_complete(&self) -> bool {
        let packs = fs::read_dir(self.server.root().join("store/packs")).unwrap();
        !packs.flatten().any(|pack| pack.file_name().to_string_lossy().contains(".part"))
    }
}

pub fn is_right(at: &Path) {
    for (name, seed, length) in [("small", 1, 20_000), ("other", 2, 20_000), ("large", 4, LARGE), ("above", 5, 20_000)]
    {
        assert!(fs::read(at.join(name)).unwrap() == noise(seed, length), "{name}");
    }
    assert!(!at.join("hidden").exists());
}
