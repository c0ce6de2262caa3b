//! Archives that are made by hand, and OCI image directories of them.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::common::Bench;

/// The time of all that is made here: archives and directories are to give the same image.
pub const TIME: i64 = 1_600_000_000;

pub fn digest(bytes: &[u8]) -> String {
    let hash: [u8; 32] = Sha256::digest(bytes).into();
    format!("sha256:{}", ferry_image::hex(&hash))
}

/// How a layer is packed.
#[derive(Clone, Copy)]
pub enum Packing {
    Plain,
    Gzip,
    Zstd,
}

/// An archive as a layer has it, and what kind it is then.
pub fn packed(archive: &[u8], packing: Packing) -> (&'static str, Vec<u8>) {
    match packing {
        Packing::Plain => ("application/vnd.oci.image.layer.v1.tar", archive.to_vec()),
        // In two members each: programs that pack in parallel make many.
        Packing::Gzip => ("application/vnd.oci.image.layer.v1.tar+gzip", {
            let (begin, end) = archive.split_at(archive.len() / 2);
            [gzip(begin), gzip(end)].concat()
        }),
        Packing::Zstd => ("application/vnd.oci.image.layer.v1.tar+zstd", {
            let (begin, end) = archive.split_at(archive.len() / 2);
            [begin, end].map(|part| zstd::encode_all(part, 3).expect("it can be packed")).concat()
        }),
    }
}

/// An image directory that is being laid out.
pub struct Bundle {
    pub directory: PathBuf,
    pub layers: Vec<Value>,
    pub plain: Vec<String>,
}

impl Bundle {
    pub fn new(bench: &Bench, name: &str) -> Self {
        let directory = bench.path(name);
        fs::create_dir_all(directory.join("blobs/sha256")).expect("directories can be made");
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("files can be made");
        Self { directory, layers: Vec::new(), plain: Vec::new() }
    }

    pub fn blob(&self, bytes: &[u8], kind: &str) -> Value {
        let name = digest(bytes);
        fs::write(self.blob_path(&name), bytes).expect("files can be made");
        json!({"mediaType": kind, "digest": name, "size": bytes.len()})
    }

    pub fn blob_path(&self, name: &str) -> PathBuf {
        self.directory.join("blobs").join(name.replace(':', "/"))
    }

    pub fn layer(&mut self, archive: &[u8], packing: Packing) {
        let (kind, bytes) = packed(archive, packing);
        self.layer_as(archive, &bytes, kind);
    }

    /// The same, packed as it is said already, of any kind.
    pub fn layer_as(&mut self, archive: &[u8], bytes: &[u8], kind: &str) {
        self.layers.push(self.blob(bytes, kind));
        self.plain.push(digest(archive));
    }

    /// The manifest, as a descriptor.
    pub fn manifest(&self) -> Value {
        let config = json!({"architecture": "amd64", "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": self.plain}});
        let config = self.blob(config.to_string().as_bytes(), "application/vnd.oci.image.config.v1+json");
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": self.layers});
        self.blob(manifest.to_string().as_bytes(), kind)
    }

    pub fn index(&self, manifests: &[Value]) {
        let index = json!({"schemaVersion": 2, "manifests": manifests}).to_string();
        fs::write(self.directory.join("index.json"), index).expect("files can be made");
    }

    /// The index, with one image of this tag.
    pub fn finish(&self, tag: &str) {
        let mut manifest = self.manifest();
        manifest["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
        self.index(&[manifest]);
    }

    pub fn source(&self, tag: &str) -> String {
        format!("oci:{}:{tag}", self.directory.display())
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(bytes).and_then(|()| packed.finish()).expect("it can be packed")
}

/// A member of an archive: name, kind, target of a link, data.
pub fn member(name: &str, kind: u8, target: &str, data: &[u8]) -> Vec<u8> {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    header[100..108].copy_from_slice(if kind == b'5' { b"0000755\0" } else { b"0000644\0" });
    header[108..124].copy_from_slice(b"0000000\x000000000\0");
    header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    header[136..148].copy_from_slice(format!("{TIME:011o}\0").as_bytes());
    header[156] = kind;
    header[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let padding = vec![0; data.len().next_multiple_of(512) - data.len()];
    [&header[..], data, &padding].concat()
}

/// Name, kind, target, data.
pub type Item<'a> = (&'a str, u8, &'a str, &'a [u8]);

pub fn archive(members: &[Item<'_>]) -> Vec<u8> {
    let members = members.iter().flat_map(|(name, kind, target, data)| member(name, *kind, target, data));
    members.chain([0; 1024]).collect()
}

pub const FILE: u8 = b'0';
pub const LINK: u8 = b'1';
pub const SYMLINK: u8 = b'2';
pub const DIR: u8 = b'5';
