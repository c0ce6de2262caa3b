//! Writes layers with tables of contents, as the formats' documents describe them.
#![allow(dead_code, missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Estargz,
    ZstdChunked,
}

pub const FORMATS: [Format; 2] = [Format::Estargz, Format::ZstdChunked];

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold("sha256:".into(), |text, byte| format!("{text}{byte:02x}"))
}

/// A finished layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub blob: Vec<u8>,
    /// The archive.
    pub plain: Vec<u8>,
    pub media_type: &'static str,
    pub annotations: HashMap<String, String>,
}

impl Layer {
    pub fn descriptor(&self) -> Value {
        json!({"mediaType": self.media_type, "digest": sha256(&self.blob), "size": self.blob.len(),
            "annotations": self.annotations})
    }

    /// Returns the bytes of the digest.
    pub fn name(&self) -> [u8; 32] {
        Sha256::digest(&self.blob).into()
    }
}

/// A layer that is being written.
pub struct Writer {
    format: Format,
    /// The length of chunks: these, in turn.
    pub chunks: Vec<usize>,
    blob: Vec<u8>,
    plain: Vec<u8>,
    pub entries: Vec<Value>,
}

impl Writer {
    pub fn new(format: Format, chunks: &[usize]) -> Self {
        Self { format, chunks: chunks.into(), blob: Vec::new(), plain: Vec::new(), entries: Vec::new() }
    }

    /// Appends a compressed stream; returns its offset.
    pub fn stream(&mut self, plain: &[u8]) -> usize {
        let at = self.blob.len();
        self.plain.extend_from_slice(plain);
        self.blob.extend(self.pack(plain));
        at
    }

    /// Adds a file of one chunk, whose stream is this one.
    pub fn file_in(&mut self, name: &str, bytes: &[u8], stream: &[u8]) {
        let offset = self.blob.len();
        self.blob.extend_from_slice(stream);
        let more =
            json!({"size": bytes.len(), "digest": sha256(bytes), "chunkDigest": sha256(bytes), "offset": offset});
        self.entry("reg", name, more);
    }

    fn pack(&self, plain: &[u8]) -> Vec<u8> {
        match self.format {
            Format::Estargz => gzip(plain),
            Format::ZstdChunked => zstd::encode_all(plain, 3).unwrap(),
        }
    }

    fn entry(&mut self, kind: &str, name: &str, more: Value) {
        let mut entry = json!({"type": kind, "name": name, "mode": 0o644, "uid": 0, "gid": 0,
            "modtime": "2023-11-14T22:13:20Z"});
        let fields = entry.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        self.entries.push(entry);
    }

    pub fn dir(&mut self, name: &str) {
        self.stream(&header(name, b'5', 0, ""));
        self.entry("dir", name, json!({"mode": 0o755}));
    }

    pub fn symlink(&mut self, name: &str, target: &str) {
        self.stream(&header(name, b'2', 0, target));
        self.entry("symlink", name, json!({"linkName": target, "mode": 0o777}));
    }

    pub fn link(&mut self, name: &str, target: &str) {
        self.stream(&header(name, b'1', 0, target));
        self.entry("hardlink", name, json!({"linkName": target}));
    }

    pub fn file(&mut self, name: &str, bytes: &[u8]) {
        self.file_as(name, bytes, 0o644);
    }

    /// A file with these permissions.
    pub fn file_as(&mut self, name: &str, bytes: &[u8], mode: u32) {
        self.stream(&header_as(name, b'0', bytes.len(), "", mode));
        let padding = vec![0; bytes.len().next_multiple_of(512) - bytes.len()];
        let (mut at, mut turn) = (0, self.chunks.clone().into_iter().cycle());
        if bytes.is_empty() {
            self.entry("reg", name, json!({}));
        }
        while at < bytes.len() {
            let count = turn.next().unwrap().min(bytes.len() - at);
            let chunk = &bytes[at..at + count];
            let is_last = at + count == bytes.len();
            let offset = self.stream(&[chunk, if is_last { &padding[..] } else { &[] }].concat());
            let size = if is_last && self.format == Format::Estargz { 0 } else { count };
            let mut more =
                json!({"offset": offset, "chunkOffset": at, "chunkSize": size, "chunkDigest": sha256(chunk)});
            if at == 0 {
                more["mode"] = mode.into();
                more["size"] = bytes.len().into();
                more["digest"] = sha256(bytes).into();
            }
            self.entry(if at == 0 { "reg" } else { "chunk" }, name, more);
            at += count;
        }
    }

    /// Files of which several are in one stream, as eStargz has them with a minimal length of streams.
    pub fn files_in_one_stream(&mut self, files: &[(&str, &[u8])]) {
        let (mut plain, mut entries) = (Vec::new(), Vec::new());
        let offset = self.blob.len();
        for (name, bytes) in files {
            plain.extend(header(name, b'0', bytes.len(), ""));
            let inner = plain.len();
            plain.extend_from_slice(bytes);
            plain.resize(plain.len().next_multiple_of(512), 0);
            entries.push((
                *name,
                json!({"size": bytes.len(), "digest": sha256(bytes), "chunkDigest": sha256(bytes),
                "offset": offset, "innerOffset": inner}),
            ));
        }
        assert_eq!(self.stream(&plain), offset);
        entries.into_iter().for_each(|(name, more)| self.entry("reg", name, more));
    }

    /// Ends the layer.
    pub fn finish(self) -> Layer {
        self.finish_with(|json| json)
    }

    /// Ends the layer with another table of contents.
    pub fn finish_with(mut self, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Layer {
        let json = change(json!({"version": 1, "entries": self.entries}).to_string().into_bytes());
        let mut annotations = HashMap::new();
        let mut annotate = |key: &str, value: String| drop(annotations.insert(key.into(), value));
        let media_type = match self.format {
            Format::Estargz => {
                let at = self.blob.len();
                let mut table = header("stargz.index.json", b'0', json.len(), "");
                table.extend_from_slice(&json);
                table.resize(table.len().next_multiple_of(512) + 1024, 0);
                self.stream(&table);
                self.blob.extend(footer(at));
                annotate("containerd.io/snapshot/stargz/toc.digest", sha256(&json));
                "application/vnd.oci.image.layer.v1.tar+gzip"
            }
            Format::ZstdChunked => {
                self.stream(&[0; 1024]);
                let packed = zstd::encode_all(&json[..], 3).unwrap();
                self.blob.extend([0x50, 0x2a, 0x4d, 0x18]);
                self.blob.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
                let (at, length, unpacked) = (self.blob.len(), packed.len(), json.len());
                self.blob.extend(&packed);
                annotate("io.github.containers.zstd-chunked.manifest-checksum", sha256(&packed));
                annotate("io.github.containers.zstd-chunked.manifest-position", format!("{at}:{length}:{unpacked}:1"));
                "application/vnd.oci.image.layer.v1.tar+zstd"
            }
        };
        Layer { blob: self.blob, plain: self.plain, media_type, annotations }
    }
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packer.write_all(plain).unwrap();
    packer.finish().unwrap()
}

/// The footer of eStargz: an empty member with an extra field.
pub fn footer(at: usize) -> Vec<u8> {
    let mut footer = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff, 26, 0, b'S', b'G', 22, 0];
    footer.extend(format!("{at:016x}STARGZ").bytes());
    footer.extend([1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    footer
}

fn header(name: &str, kind: u8, bytes: usize, link: &str) -> Vec<u8> {
    header_as(name, kind, bytes, link, if kind == b'5' { 0o755 } else { 0o644 })
}

fn header_as(name: &str, kind: u8, bytes: usize, link: &str, mode: u32) -> Vec<u8> {
    let mut header = vec![0; 512];
    let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, &format!("{mode:07o}"));
    put(108, "0000000");
    put(116, "0000000");
    put(124, &format!("{bytes:011o}"));
    put(136, &format!("{:011o}", 1_700_000_000));
    put(148, "        ");
    put(157, link);
    put(257, "ustar\0");
    put(263, "00");
    header[156] = kind;
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// Makes an OCI image directory.
pub fn lay_out(directory: &Path, layers: &[Layer]) {
    lay_out_with(directory, layers, &[]);
}

/// The same for an image whose containers have volumes at these paths.
pub fn lay_out_with(directory: &Path, layers: &[Layer], volumes: &[&str]) {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let blob = |bytes: &[u8]| {
        let name = sha256(bytes);
        fs::write(blobs.join(name.strip_prefix("sha256:").unwrap()), bytes).unwrap();
        json!({"digest": name, "size": bytes.len()})
    };
    let typed = |mut blob: Value, kind: &str| {
        blob["mediaType"] = kind.into();
        blob
    };
    let plain: Vec<_> = layers.iter().map(|layer| sha256(&layer.plain)).collect();
    // CRI refuses an image of a pod without a command.
    let volumes: BTreeMap<_, _> = volumes.iter().map(|path| (*path, json!({}))).collect();
    let config = json!({"Cmd": ["/bin/busybox", "sleep", "1000000"], "Volumes": volumes});
    let config = json!({"architecture": "amd64", "os": "linux", "config": config,
        "rootfs": {"type": "layers", "diff_ids": plain}});
    let config = typed(blob(config.to_string().as_bytes()), "application/vnd.oci.image.config.v1+json");
    layers.iter().for_each(|layer| drop(blob(&layer.blob)));
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let layers: Vec<_> = layers.iter().map(Layer::descriptor).collect();
    let manifest = json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
    let mut manifest = typed(blob(manifest.to_string().as_bytes()), kind);
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": "1"});
    fs::write(directory.join("index.json"), json!({"schemaVersion": 2, "manifests": [manifest]}).to_string()).unwrap();
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).unwrap();
}
