//! A container image of two layers in a registry in memory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferry_layers::{Error, LayerStore, Options, reference_name};
use ferry_vfs::{Attr, Caller, Data, Entry, FileSystem, Handle, Ino, IoRange, Name, OFlags, Result};
use serde_json::{Value, json};

use crate::common::{self, Fake};
use crate::toc_layers::{FORMATS, Format, Layer, Writer, sha256};

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

pub fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

/// The upper layer removes a file, and replaces a directory.
pub fn layers(format: Format) -> Vec<Layer> {
    let mut lower = Writer::new(format, &[65_536, 30_000]);
    lower.file("below", b"from below");
    lower.file("gone", b"is removed");
    lower.dir("replaced");
    lower.file("replaced/old", b"is hidden");
    lower.file("large", &noise(1, 1_000_000));
    let mut upper = Writer::new(format, &[4 << 20]);
    upper.file(".wh.gone", b"");
    upper.dir("replaced");
    upper.file("replaced/.wh..wh..opq", b"");
    upper.file("replaced/new", b"is shown");
    upper.file("above", &noise(2, 5000));
    let mut layers = vec![lower.finish(), upper.finish()];
    for layer in &mut layers {
        let bytes = layer.plain.len().to_string();
        layer.annotations.insert("io.containers.estargz.uncompressed-size".into(), bytes);
    }
    layers
}

/// Returns what a function returns at last.
pub fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    for _ in 0..1200 {
        if let Some(found) = attempt() {
            return found;
        }
        thread::sleep(Duration::from_millis(50));
    }
    panic!("not in a minute");
}

/// A registry, and a directory for a store.
pub struct Place {
    pub directory: tempfile::TempDir,
    pub fake: Fake,
    pub layers: Vec<Layer>,
    pub reference: String,
}

impl Place {
    pub fn new(layers: Vec<Layer>) -> Self {
        let fake = Fake::start();
        let reference = format!("{}/a/b:1", fake.address);
        // On a disk, as overlayfs and sparse packs have it in use.
        let directory = tempfile::Builder::new().prefix("ferry-layers.").tempdir_in("/var/tmp").unwrap();
        let place = Self { directory, fake, layers, reference };
        place.tag("1", &place.layers);
        place
    }

    pub fn of(format: Format) -> Self {
        Self::new(layers(format))
    }

    /// Stores the blobs of an image, and its manifest.
    pub fn tag(&self, tag: &str, layers: &[Layer]) {
        let arch = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
        let plain: Vec<_> = layers.iter().map(|layer| sha256(&layer.plain)).collect();
        let config = json!({"architecture": arch, "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": plain}});
        let config = config.to_string();
        self.fake.add_blob(config.as_bytes());
        let descriptors = layers.iter().map(|layer| {
            self.fake.add_blob(&layer.blob);
            layer.descriptor()
        });
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": descriptors.collect::<Vec<_>>(),
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
                "digest": format!("sha256:{}", common::sha256(config.as_bytes()))}});
        self.fake.tag(tag, &manifest);
    }

    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    pub fn open(&self) -> Tree {
        self.open_with(Options::default())
    }

    pub fn open_with(&self, options: Options) -> Tree {
        // A mount that was stopped may have it a moment longer.
        let open = || match LayerStore::open(&self.root(), options.clone()) {
            Err(Error::InUse(_)) => None,
            opened => Some(Tree(Arc::new(opened.unwrap()))),
        };
        eventually(open)
    }

    /// The name of the directory of the image.
    pub fn name(&self) -> String {
        reference_name(&self.reference)
    }

    /// What the store has of files.
    pub fn stored_bytes(&self) -> u64 {
        let packs = fs::read_dir(self.root().join("store/packs")).unwrap();
        let packs = packs.map(|file| file.unwrap()).filter(|file| file.file_name() != "table");
        // It may be removed meanwhile.
        packs.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks() * 512).sum()
    }
}

/// The digest of a layer's table of contents, as its manifest names it.
pub fn toc(layer: &Layer) -> String {
    let names = ["containerd.io/snapshot/stargz/toc.digest", "io.github.containers.zstd-chunked.manifest-checksum"];
    names.iter().find_map(|name| layer.annotations.get(*name)).unwrap().clone()
}

pub fn each_format(test: impl Fn(Place)) {
    FORMATS.into_iter().for_each(|format| test(Place::of(format)));
}

/// A store, as an export uses it.
pub struct Tree(pub Arc<LayerStore>);

impl Tree {
    /// Looks up a path, and keeps the references to all of it.
    pub fn find(&self, path: &[&str]) -> Result<Entry> {
        let cx = Caller::default();
        let attr = self.0.getattr(&cx, Ino::ROOT, None)?;
        let root = Entry::new(Ino::ROOT, attr);
        path.iter().try_fold(root, |dir, name| self.0.lookup(&cx, dir.ino, Name::new(name.as_bytes())?))
    }

    pub fn read(&self, path: &[&str]) -> Result<Vec<u8>> {
        let (cx, entry) = (Caller::default(), self.find(path)?);
        let handle = self.0.open(&cx, entry.ino, OFlags::RDONLY)?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < entry.attr.size {
            let (offset, before) = (bytes.len() as u64, bytes.len());
            let at = IoRange {
                ino: entry.ino,
                handle,
                offset,
                len: 100_000,
                flags: OFlags::RDONLY,
                clear_privileges: false,
                owner: None,
            };
            match self.0.read(&cx, &at, &mut bytes)? {
                Data::Bytes(count) => assert_eq!(bytes.len() - before, count),
                Data::Extent(extent) => {
                    let mut part = vec![0; 100_000];
                    let count = rustix::io::pread(&*extent.file, &mut part[..], extent.offset)?;
                    bytes.extend_from_slice(&part[..count]);
                }
            }
            assert!(bytes.len() > before, "the file ends early");
        }
        Ok(bytes)
    }

    pub fn info(&self, path: &[&str]) -> Value {
        serde_json::from_slice(&self.read(&[path, &["info"]].concat()).unwrap()).unwrap()
    }

    pub fn count(&self, name: &str) -> u64 {
        self.0.counts().into_iter().find(|(found, _)| *found == name).map_or(0, |(_, count)| count)
    }

    pub fn attr(&self, path: &[&str]) -> Attr {
        self.find(path).unwrap().attr
    }

    pub fn handle() -> Handle {
        Handle(0)
    }
}
