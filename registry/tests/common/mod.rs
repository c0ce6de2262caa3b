//! A registry in memory whose responses can be changed.
#![allow(dead_code, missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use ferry_image::{Algorithm, BuildOptions, BuildReport, Digest, Layout, Store, build};
use ferry_registry::{Client, Limits, Options, PullOptions, PullOutcome, Remote, Result, pull, push};
use sha2::Digest as _;

/// No request is tried again.
pub const ONCE: Limits = Limits { patience: Duration::from_secs(30), deadline: None, attempts_max: 1 };

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub query: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Request {
    /// Returns the requested range.
    pub fn range(&self) -> Option<(usize, usize)> {
        let (from, to) = self.headers.get("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse().unwrap(), to.parse::<usize>().unwrap() + 1))
    }

    pub fn is_blob(&self) -> bool {
        self.method == "GET" && self.path.contains("/blobs/sha256:")
    }

    pub fn is_manifest(&self) -> bool {
        self.method == "GET" && self.path.contains("/manifests/")
    }
}

#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// What is unusual about the body.
    pub way: Way,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Way {
    #[default]
    Whole,
    /// The connection ends after this many bytes.
    Cut(usize),
    /// After this many bytes nothing more comes.
    Stall(usize),
    /// In chunks, endlessly repeated.
    Endless,
    /// No response at all.
    Silence,
}

impl Reply {
    pub fn of(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

type Fault = dyn Fn(&Request, Reply) -> Reply + Send + Sync;

/// The server. It ends with the process.
pub struct Fake {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    blobs: Mutex<HashMap<String, Vec<u8>>>,
    manifests: Mutex<HashMap<String, Vec<u8>>>,
    requests: Mutex<Vec<Request>>,
    fault: Mutex<Option<Arc<Fault>>>,
    /// Whether it lists referrers itself.
    lists_referrers: AtomicBool,
    /// The number of accepted connections.
    connections: AtomicUsize,
    /// The number of current requests, and its maximum.
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Fake {
    pub fn start() -> Self {
        Self::start_at("127.0.0.1:0", None)
    }

    /// At an address, and by TLS if there is a configuration for it.
    pub fn start_at(address: &str, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let server = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                server.connections.fetch_add(1, Ordering::SeqCst);
                let (server, tls) = (Arc::clone(&server), tls.clone());
                // A client may disconnect at any time.
                thread::spawn(move || match tls {
                    Some(tls) => {
                        let connection = rustls::ServerConnection::new(tls).unwrap();
                        drop(server.serve(rustls::StreamOwned::new(connection, stream)));
                    }
                    None => drop(server.serve(stream)),
                });
            }
        });
        Self { address, shared }
    }

    /// Changes all later responses with this function.
    pub fn fault(&self, fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static) {
        *self.shared.fault.lock().unwrap() = Some(Arc::new(fault));
    }

    pub fn heal(&self) {
        *self.shared.fault.lock().unwrap() = None;
    }

    /// Adds blobs, each by its name.
    pub fn add_blob(&self, bytes: &[u8]) -> String {
        let name = sha256(bytes);
        self.shared.blobs.lock().unwrap().insert(name.clone(), bytes.to_vec());
        name
    }

    /// Returns a blob by its name.
    pub fn blob(&self, name: &str) -> Vec<u8> {
        self.shared.blobs.lock().unwrap()[name].clone()
    }

    /// Names a manifest by a tag.
    pub fn tag(&self, tag: &str, manifest: &serde_json::Value) -> String {
        let bytes = manifest.to_string().into_bytes();
        self.shared.manifests.lock().unwrap().insert(tag.into(), bytes.clone());
        self.add_blob(&bytes)
    }

    /// Returns the manifest of a tag.
    pub fn tagged(&self, tag: &str) -> Option<serde_json::Value> {
        let manifests = self.shared.manifests.lock().unwrap();
        manifests.get(tag).map(|bytes| serde_json::from_slice(bytes).unwrap())
    }

    /// Has the server list referrers itself, as registries of version 1.1 of the specification do.
    pub fn list_referrers(&self) {
        self.shared.lists_referrers.store(true, Ordering::SeqCst);
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.shared.requests.lock().unwrap())
    }

    /// Changes the manifest of a tag.
    pub fn edit(&self, change: impl FnOnce(&mut serde_json::Value)) {
        let mut manifests = self.shared.manifests.lock().unwrap();
        let bytes = manifests.get_mut("1").unwrap();
        let mut manifest = serde_json::from_slice(bytes).unwrap();
        change(&mut manifest);
        *bytes = serde_json::to_vec(&manifest).unwrap();
    }

    pub fn remote(&self) -> Arc<Remote> {
        self.remote_as("1", Duration::from_secs(60))
    }

    pub fn remote_as(&self, version: &str, patience: Duration) -> Arc<Remote> {
        let at = if version.starts_with("sha256:") { '@' } else { ':' };
        let reference = format!("oci:{}/a/b{at}{version}", self.address).parse().unwrap();
        let limits = Limits { patience, ..Limits::default() };
        Arc::new(Remote::open(&reference, Client::new(Options { limits, ..Options::default() })).unwrap())
    }

    /// Returns a remote with this limit of concurrent requests.
    pub fn remote_of(&self, requests_max: usize) -> Arc<Remote> {
        let reference = format!("oci:{}/a/b:1", self.address).parse().unwrap();
        Arc::new(Remote::open(&reference, Client::new(Options { requests_max, ..Options::default() })).unwrap())
    }

    /// Returns the number of connections since the last call.
    pub fn connections(&self) -> usize {
        self.shared.connections.swap(0, Ordering::SeqCst)
    }

    /// Returns the maximum number of concurrent requests since the last call.
    pub fn most(&self) -> usize {
        self.shared.most.swap(0, Ordering::SeqCst)
    }
}

impl Shared {
    fn serve(&self, stream: impl Read + Write) -> std::io::Result<()> {
        // A client asks one question at a time, so nothing is in the buffer when it is answered.
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            let mut words = line.split(' ').map(str::to_owned);
            let (method, target) = (words.next().unwrap(), words.next().unwrap());
            let (path, query) = target.split_once('?').unwrap_or((&target, ""));
            let mut headers = HashMap::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                let Some((name, value)) = line.trim_end().split_once(": ") else { break };
                headers.insert(name.to_ascii_lowercase(), value.to_owned());
            }
            let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            let request = Request { method, path: path.into(), query: query.into(), headers, body };
            let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(now, Ordering::SeqCst);
            let mut reply = self.answer(&request);
            let fault = self.fault.lock().unwrap().clone();
            if let Some(fault) = fault {
                reply = fault(&request, reply);
            }
            self.requests.lock().unwrap().push(request.clone());
            // Before the response, after which the client may send the next request.
            self.now.fetch_sub(1, Ordering::SeqCst);
            say(reader.get_mut(), &request, &reply)?;
        }
    }

    fn answer(&self, request: &Request) -> Reply {
        let last = request.path.rsplit('/').next().unwrap();
        let blob = last.strip_prefix("sha256:").and_then(|name| self.blobs.lock().unwrap().get(name).cloned());
        match request.method.as_str() {
            "GET" if request.path.contains("/referrers/") => self.referrers(last),
            "GET" if request.is_manifest() => match (self.manifests.lock().unwrap().get(last), blob) {
                (Some(bytes), _) => Reply::of(200, bytes.clone()),
                (None, Some(bytes)) => Reply::of(200, bytes),
                _ => Reply::of(404, "none"),
            },
            "HEAD" | "GET" => match (blob, request.range()) {
                (Some(bytes), Some((from, to))) if from < bytes.len() => {
                    let to = to.min(bytes.len());
                    let range = format!("bytes {from}-{}/{}", to - 1, bytes.len());
                    Reply::of(206, &bytes[from..to]).with("content-range", range)
                }
                (Some(_), Some(_)) => Reply::of(416, "beyond its end"),
                (Some(bytes), None) => Reply::of(200, bytes),
                (None, _) => Reply::of(404, "none"),
            },
            "POST" => Reply::of(202, "").with("location", "/v2/a/b/blobs/uploads/1?state=x"),
            "PUT" if request.path.contains("/uploads/") => {
                let (_, digest) = request.query.split_once("digest=sha256%3A").unwrap();
                self.blobs.lock().unwrap().insert(digest.into(), request.body.clone());
                Reply::of(201, "")
            }
            "PUT" => {
                self.manifests.lock().unwrap().insert(last.into(), request.body.clone());
                self.blobs.lock().unwrap().insert(sha256(&request.body), request.body.clone());
                let reply = Reply::of(201, "");
                let is_listed = self.lists_referrers.load(Ordering::SeqCst);
                if is_listed { reply.with("oci-subject", "sha256:00") } else { reply }
            }
            _ => Reply::of(405, ""),
        }
    }
}

impl Shared {
    /// Lists the manifests that refer to one.
    fn referrers(&self, subject: &str) -> Reply {
        if !self.lists_referrers.load(Ordering::SeqCst) {
            return Reply::of(404, "page not found");
        }
        let manifests = self.manifests.lock().unwrap();
        let entry = |bytes: &Vec<u8>| {
            let manifest: serde_json::Value = serde_json::from_slice(bytes).ok()?;
            (manifest["subject"]["digest"] == subject).then(|| {
                serde_json::json!({"digest": format!("sha256:{}", sha256(bytes)), "size": bytes.len(),
                    "artifactType": manifest["artifactType"], "annotations": manifest["annotations"]})
            })
        };
        let entries: Vec<_> = manifests.values().filter_map(entry).collect();
        Reply::of(200, serde_json::json!({"schemaVersion": 2, "manifests": entries}).to_string())
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn say(stream: &mut (impl Read + Write), request: &Request, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} x\r\n", reply.status);
    for (name, value) in &reply.headers {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    match reply.way {
        Way::Silence => {
            // Until the client disconnects.
            let mut byte = [0];
            while stream.read(&mut byte)? > 0 {}
            Err(std::io::ErrorKind::ConnectionAborted.into())
        }
        Way::Endless => {
            stream.write_all(format!("{head}transfer-encoding: chunked\r\n\r\n").as_bytes())?;
            loop {
                let chunk = if reply.body.is_empty() { &[b'x'; 1000][..] } else { &reply.body };
                stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
                stream.write_all(chunk)?;
                stream.write_all(b"\r\n")?;
            }
        }
        Way::Stall(bytes) => {
            stream.write_all(format!("{head}content-length: {}\r\n\r\n", reply.body.len()).as_bytes())?;
            stream.write_all(&reply.body[..bytes.min(reply.body.len())])?;
            let mut byte = [0];
            while stream.read(&mut byte)? > 0 {}
            Err(std::io::ErrorKind::ConnectionAborted.into())
        }
        Way::Whole | Way::Cut(_) => {
            stream.write_all(format!("{head}content-length: {}\r\n\r\n", reply.body.len()).as_bytes())?;
            if request.method == "HEAD" {
                return Ok(());
            }
            if let Way::Cut(bytes) = reply.way {
                stream.write_all(&reply.body[..bytes.min(reply.body.len())])?;
                return Err(std::io::ErrorKind::ConnectionAborted.into());
            }
            stream.write_all(&reply.body)?;
            stream.flush()
        }
    }
}

/// A tree that was built and pushed.
pub struct Place {
    directory: tempfile::TempDir,
    pub fake: Fake,
    pub built: BuildReport,
    layout: Layout,
}

fn build_and_push(directory: &Path, layout: Layout, fake: &Fake) -> BuildReport {
    let (image, store) = (directory.join("image"), directory.join("store"));
    let open = || Store::create(&store).unwrap();
    let options = BuildOptions { layout, ..BuildOptions::default() };
    let built = build(&directory.join("tree"), &image, open(), &options, &|_, _| {}).unwrap();
    push(&fake.remote(), &image, None, &open(), &store, 2, &|_, _| {}).unwrap();
    fake.requests();
    built
}

/// Files of the tree, by number.
pub const FILES: u32 = 40;

pub fn content(number: u32) -> Vec<u8> {
    let bytes = 5000 + 1000 * number as usize;
    (number * 1_000_003..).flat_map(|n: u32| n.wrapping_mul(2_654_435_761).to_le_bytes()).take(bytes).collect()
}

impl Place {
    pub fn new() -> Self {
        Self::laid_out(Layout::Flat)
    }

    pub fn laid_out(layout: Layout) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        for number in 0..FILES {
            fs::write(tree.join(format!("{number:02}")), content(number)).unwrap();
        }
        let large: Vec<u8> = (0..1_500_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
        fs::write(tree.join("large"), large).unwrap();
        let fake = Fake::start();
        let built = build_and_push(directory.path(), layout, &fake);
        Self { directory, fake, built, layout }
    }

    /// Builds the tree once more in the same store, and pushes it to the same place.
    pub fn build_and_push(&mut self) {
        self.built = build_and_push(self.directory.path(), self.layout, &self.fake);
    }

    /// Has the server offer the image with the digest of another tree in it, and all names that follow from that.
    pub fn claim_tree(&self, tree: Digest) {
        let mut image = fs::read(self.at("image")).unwrap();
        image[992..1024].copy_from_slice(tree.bytes());
        let own = Algorithm::Blake3.of(&image).to_string();
        let name: String = sha2::Sha256::digest(&image).iter().map(|byte| format!("{byte:02x}")).collect();
        self.fake.edit(|manifest| {
            manifest["layers"][0]["digest"] = format!("sha256:{name}").into();
            manifest["layers"][0]["annotations"]["ferry.digest"] = own.into();
        });
        self.fake.shared.blobs.lock().unwrap().insert(name, image);
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn pull(&self, remote: &Arc<Remote>, store: &str) -> Result<PullOutcome> {
        self.pull_with(remote, store, &PullOptions::default())
    }

    pub fn pull_with(&self, remote: &Arc<Remote>, store: &str, options: &PullOptions) -> Result<PullOutcome> {
        let _held = Store::create(&self.at(store)).unwrap();
        pull(remote, &self.at(&format!("{store}.img")), &self.at(store), options, &|_, _| {})
    }

    /// Asserts that a pull fails without leaving an image; returns the error message.
    pub fn refused(&self, store: &str) -> String {
        let error = self.pull(&self.fake.remote(), store).unwrap_err();
        assert!(!self.at(&format!("{store}.img")).exists(), "{error}");
        let mut said = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            write!(said, ": {error}").unwrap();
            source = error.source();
        }
        assert!(!said.contains('\n'), "{said}");
        said
    }

    /// Pulls from the working server; the image must then be complete and correct.
    pub fn is_well(&self, store: &str) -> PullOutcome {
        self.fake.heal();
        let pulled = self.pull(&self.fake.remote(), store).unwrap();
        self.is_whole(store);
        pulled
    }

    pub fn is_whole(&self, store: &str) {
        let image = ferry_image::Image::open(&self.at(&format!("{store}.img")), Some(self.built.digest)).unwrap();
        ferry_image::Objects::open(&image, &self.at(store)).unwrap().verify_all().unwrap();
    }

    /// The pack of the image, as it is in the store that it was built in, and where a file is in it.
    pub fn pack(&self) -> (Digest, Vec<u8>) {
        let pack = self.built.packs[0];
        (pack, fs::read(self.at("store/packs").join(pack.hex())).unwrap())
    }

    /// The name of the blob that is the pack.
    pub fn part(&self) -> String {
        self.blob(&self.pack().0.hex())
    }

    /// The name of the blob that is a file of the store's packs.
    pub fn blob(&self, file: &str) -> String {
        let mut name = String::new();
        for byte in sha2::Sha256::digest(fs::read(self.at("store/packs").join(file)).unwrap()) {
            write!(name, "{byte:02x}").unwrap();
        }
        name
    }
}

/// A small file system mounted on a directory. It is unmounted when dropped.
pub struct Disk(PathBuf);

impl Disk {
    pub fn at(path: PathBuf, size: &str) -> Self {
        fs::create_dir(&path).unwrap();
        let disk = Self(path);
        disk.mount(&format!("size={size}"));
        disk
    }

    /// Frees its space.
    pub fn grow(&self, size: &str) {
        self.mount(&format!("remount,size={size}"));
    }

    fn mount(&self, options: &str) {
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&self.0).status().unwrap();
        assert!(status.success(), "root may");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
