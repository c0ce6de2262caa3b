//! Container images: read chunk by chunk, pulled as a whole, converted.

use crate::common;
use crate::toc_layers;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Fake, Reply, Request, Way, sha256};
use ferry_image::{Digest, FetchOptions, Image, Source, Store};
use ferry_registry::{Client, Error, Options, PullOptions, PullOutcome, Remote, pull, pull_metadata};
use ferry_vfs::{Errno, Name};
use serde_json::{Value, json};
use toc_layers::{FORMATS, Format, Layer, Writer};

pub const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX: &str = "application/vnd.oci.image.index.v1+json";

pub fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

/// Files of the lower layer; the last one is hidden by the upper layer.
const FILES: u32 = 30;

pub fn layers(format: Format) -> Vec<Layer> {
    let mut lower = Writer::new(format, &[65_536, 30_000]);
    for number in 0..FILES {
        lower.file(&format!("{number}"), &noise(number, 10_000));
    }
    lower.file("large", &noise(100, 2_000_000));
    let mut upper = Writer::new(format, &[4 << 20]);
    upper.file(&format!(".wh.{}", FILES - 1), b"");
    upper.file("above", &noise(101, 5000));
    vec![lower.finish(), upper.finish()]
}

/// A container image on a server.
pub struct Place {
    pub directory: tempfile::TempDir,
    pub fake: Fake,
    pub layers: Vec<Layer>,
}

impl Place {
    pub fn new(layers: Vec<Layer>) -> Self {
        let place = Self { directory: tempfile::tempdir().unwrap(), fake: Fake::start(), layers };
        place.fake.tag("1", &place.manifest());
        place
    }

    /// Stores the blobs; returns the manifest.
    pub fn manifest(&self) -> Value {
        let plain: Vec<_> = self.layers.iter().map(|layer| format!("sha256:{}", sha256(&layer.plain))).collect();
        let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": plain}});
        let config = config.to_string();
        self.fake.add_blob(config.as_bytes());
        let descriptors = self.layers.iter().map(|layer| {
            self.fake.add_blob(&layer.blob);
            layer.descriptor()
        });
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "layers": descriptors.collect::<Vec<_>>(),
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
                "digest": format!("sha256:{}", sha256(config.as_bytes()))}})
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Opens the image before its files are there.
    pub fn open(&self, remote: &Arc<Remote>, name: &str, digest: Option<Digest>) -> Result<Source, Error> {
        let (image, store) = (self.at(&format!("{name}.img")), self.at(name));
        drop(Store::create(&store)?);
        let from = pull_metadata(remote, &image, &store, digest)?;
        let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
        Ok(Source::open_with(&image, &store, None, Some(missing))?)
    }

    pub fn pull(&self, name: &str, options: &PullOptions) -> Result<PullOutcome, Error> {
        let _held = Store::create(&self.at(name))?;
        pull(&self.fake.remote(), &self.at(&format!("{name}.img")), &self.at(name), options, &|_, _| {})
    }

    pub fn blob_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.blob.len() as u64).sum()
    }
}

pub fn read(source: &Source, name: &str) -> Result<Vec<u8>, Errno> {
    let image = source.image();
    let root = image.inode(image.root()).unwrap();
    let nid = image.lookup(&root, Name::new(name.as_bytes()).unwrap()).unwrap().ok_or(Errno::NOENT)?;
    let mut bytes = vec![0; usize::try_from(image.inode(nid).unwrap().bytes).unwrap()];
    source.read_at(nid, 0, &mut bytes).map(|count| {
        assert_eq!(count, bytes.len());
        bytes
    })
}

pub fn is_right(source: &Source) {
    for number in 0..FILES - 1 {
        assert_eq!(read(source, &format!("{number}")).unwrap(), noise(number, 10_000));
    }
    assert_eq!(read(source, "large").unwrap(), noise(100, 2_000_000));
    assert_eq!(read(source, "above").unwrap(), noise(101, 5000));
    assert_eq!(read(source, &format!("{}", FILES - 1)), Err(Errno::NOENT));
}

/// Whether a request is for a layer.
pub fn is_layer(place: &Place) -> impl Fn(&Request) -> bool + Send + Sync + 'static {
    let names: Vec<_> = place.layers.iter().map(|layer| sha256(&layer.blob)).collect();
    move |request: &Request| names.iter().any(|name| request.path.ends_with(name))
}

#[test]
fn layers_are_read_before_they_are_pulled() {
    for format in FORMATS {
        let place = Place::new(layers(format));
        let remote = place.fake.remote();
        let source = place.open(&remote, "lazy", None).unwrap();
        let begun = remote.counts();
        assert_eq!(read(&source, "7").unwrap(), noise(7, 10_000));
        assert_eq!(read(&source, "above").unwrap(), noise(101, 5000));
        let now = remote.counts();
        let whole = place.fake.remote();
        pull(&whole, &place.at("whole.img"), &place.at("whole"), &PullOptions::default(), &|_, _| {}).unwrap();
        let all = whole.counts();
        println!(
            "{format:?}: mounted after {} requests and {} bytes, two files read after {} and {}; a whole pull: {} and {}",
            begun.requests, begun.received_bytes, now.requests, now.received_bytes, all.requests, all.received_bytes
        );
        assert!(begun.requests <= 3 && now.requests == begun.requests + 2, "{begun:?} {now:?}");
        assert!(now.received_bytes - begun.received_bytes < 16_000, "{begun:?} {now:?}");
        assert!(all.received_bytes > place.blob_bytes(), "{all:?}");
        is_right(&source);
        source.shared_objects().fetch_all(3, &AtomicBool::new(false), &|_, _| {}).unwrap();
        source.shared_objects().complete().unwrap();
        drop(source);
        // Without the server.
        place.fake.fault(|_, _| Reply::of(403, "no"));
        let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
        assert!(source.shared_objects().looks_complete());
        is_right(&source);
        let digest = source.image().manifest().map(|digest| ferry_image::hex(&digest));
        assert_eq!(digest, Some(sha256(place.fake.tagged("1").unwrap().to_string().as_bytes())));
        // The whole pull has the same files, and proves the tree.
        let source = Source::open(&place.at("whole.img"), &place.at("whole"), None).unwrap();
        is_right(&source);
        assert!(source.image().tree().is_some());
    }
}

#[test]
fn an_open_image_works_without_its_manifest() {
    let place = Place::new(layers(Format::ZstdChunked));
    drop(place.open(&place.fake.remote(), "lazy", None).unwrap());
    place.fake.requests();
    let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
    assert_eq!(place.fake.requests().len(), 0);
    is_right(&source);
    drop(source);
    // A store that has lost the index of a pack gets it again.
    let packs = place.at("lazy/packs");
    for entry in fs::read_dir(&packs).unwrap().map(Result::unwrap) {
        fs::remove_file(entry.path()).unwrap();
    }
    is_right(&place.open(&place.fake.remote(), "lazy", None).unwrap());
}

/// In the index of a layer's pack an object takes more than its blocks suggest.
#[test]
fn a_pushed_layer_of_one_small_file_is_pulled() {
    for format in FORMATS {
        let mut writer = Writer::new(format, &[4 << 20]);
        writer.file("small", b"small");
        let place = Place::new(vec![writer.finish()]);
        let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
        source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).unwrap();
        source.shared_objects().complete().unwrap();
        drop(source);
        let (image, store) = (place.at("lazy.img"), place.at("lazy"));
        let pushed = place.fake.remote_as("2", Duration::from_secs(60));
        ferry_registry::push(&pushed, &image, None, &Store::open(&store).unwrap(), &store, 1, &|_, _| {}).unwrap();
        let (copy, store) = (place.at("copy.img"), place.at("copy"));
        let _held = Store::create(&store).unwrap();
        pull(&pushed, &copy, &store, &PullOptions::default(), &|_, _| {}).unwrap();
        assert_eq!(read(&Source::open(&copy, &store, None).unwrap(), "small").unwrap(), b"small");
    }
}

/// The digest of the image follows from the manifest.
#[test]
fn digests_are_those_of_the_manifest() {
    let place = Place::new(layers(Format::Estargz));
    let metadata = PullOptions { metadata_only: true, ..PullOptions::default() };
    let one = place.pull("one", &metadata).unwrap();
    let two = place.pull("two", &PullOptions { digest: Some(one.digest), ..metadata.clone() }).unwrap();
    assert_eq!(one, two);
    assert_eq!(fs::read(place.at("one.img")).unwrap(), fs::read(place.at("two.img")).unwrap());
    let whole = place.pull("whole", &PullOptions::default()).unwrap();
    assert_ne!(whole.digest, one.digest);
    for options in [metadata, PullOptions::default()] {
        let error = place.pull("other", &PullOptions { digest: Some(two.digest), ..options.clone() });
        assert_eq!(error.is_ok(), options.metadata_only);
        let wrong = Some(Digest::new(ferry_image::Algorithm::Tree, [3; 32]));
        let said = place.pull("wrong", &PullOptions { digest: wrong, ..options }).unwrap_err().to_string();
        assert!(said.contains("the image has the digest"), "{said}");
        assert!(!place.at("wrong.img").exists());
    }
    let by_tree = PullOptions { digest: Some(whole.digest), ..PullOptions::default() };
    assert_eq!(place.pull("by-tree", &by_tree).unwrap().digest, whole.digest);
}

/// What is wrong, and the sentence that says so: the whole image is then pulled.
#[test]
fn images_that_cannot_be_read_by_chunks_are_pulled_as_a_whole() {
    let plain = |mut layers: Vec<Layer>| {
        layers[1].annotations.clear();
        layers
    };
    let lying = |mut layers: Vec<Layer>| {
        for value in layers[0].annotations.values_mut().filter(|value| value.starts_with("sha256:")) {
            *value = format!("sha256:{}", "1".repeat(64));
        }
        layers
    };
    for format in FORMATS {
        for change in [&plain as &dyn Fn(Vec<Layer>) -> Vec<Layer>, &lying] {
            let place = Place::new(change(layers(format)));
            let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
            assert!(source.shared_objects().looks_complete() && source.image().tree().is_some());
            place.fake.fault(|_, _| Reply::of(403, "no"));
            is_right(&source);
        }
        // No ranges.
        let place = Place::new(layers(format));
        let blobs: Vec<_> = place.layers.iter().map(|layer| layer.blob.clone()).collect();
        let layer = is_layer(&place);
        place.fake.fault(move |request, reply| {
            let blob = blobs.iter().find(|blob| request.path.ends_with(&sha256(blob)));
            match blob.filter(|_| layer(request)) {
                Some(blob) => Reply::of(200, blob.clone()),
                None => reply,
            }
        });
        let remote = place.fake.remote();
        let source = place.open(&remote, "lazy", None).unwrap();
        assert!(source.shared_objects().looks_complete());
        is_right(&source);
        // No blob was fetched only to find that out.
        assert!(remote.counts().received_bytes < place.blob_bytes() * 3 / 2, "{:?}", remote.counts());
    }
}

/// A server that stops to send ranges later does not cause whole layers to be fetched for each chunk.
#[test]
fn missing_ranges_are_errors() {
    let place = Place::new(layers(Format::Estargz));
    let remote = place.fake.remote();
    let source = place.open(&remote, "lazy", None).unwrap();
    let (before, layer) = (remote.counts().received_bytes, is_layer(&place));
    let blob = place.layers[0].blob.clone();
    place.fake.fault(move |request, reply| if layer(request) { Reply::of(200, blob.clone()) } else { reply });
    assert_eq!(read(&source, "7"), Err(Errno::IO));
    assert!(remote.counts().received_bytes - before < 1000);
    place.fake.heal();
    is_right(&source);
}

#[test]
fn servers_that_lie_stall_or_are_busy() {
    for format in FORMATS {
        let place = Place::new(layers(format));
        let remote = place.fake.remote_as("1", Duration::from_secs(1));
        let source = place.open(&remote, "lazy", None).unwrap();
        // Other bytes.
        let layer = Arc::new(is_layer(&place));
        let is = Arc::clone(&layer);
        place.fake.fault(move |request, mut reply| {
            if is(request) {
                reply.body.iter_mut().for_each(|byte| *byte ^= 0xff);
            }
            reply
        });
        assert_eq!(read(&source, "1"), Err(Errno::IO));
        // Another range.
        let is = Arc::clone(&layer);
        place.fake.fault(move |request, reply| match request.range().filter(|_| is(request)) {
            Some((from, to)) => Reply::of(206, reply.body).with("content-range", format!("bytes {}-{to}/9", from + 1)),
            None => reply,
        });
        assert_eq!(read(&source, "1"), Err(Errno::IO));
        // Busy for two requests, then half of what was asked for, then all.
        let (is, times) = (Arc::clone(&layer), AtomicUsize::new(0));
        place.fake.fault(move |request, reply| match times.fetch_add(usize::from(is(request)), Ordering::SeqCst) {
            0 | 1 if is(request) => Reply::of(429, "slow down").with("retry-after", "0"),
            2 if is(request) => Reply { way: Way::Cut(reply.body.len() / 2), ..reply },
            _ => reply,
        });
        assert_eq!(read(&source, "1").unwrap(), noise(1, 10_000));
        // Silence ends.
        let is = Arc::clone(&layer);
        place.fake.fault(move |request, reply| if is(request) { Reply { way: Way::Silence, ..reply } } else { reply });
        let begin = Instant::now();
        assert_eq!(read(&source, "2"), Err(Errno::IO));
        assert!(begin.elapsed() < Duration::from_secs(30));
        assert_eq!(read(&source, "1").unwrap(), noise(1, 10_000), "what is here is read");
        place.fake.heal();
        is_right(&source);
        // The same while the tables are fetched.
        let is = Arc::clone(&layer);
        place.fake.fault(move |request, reply| if is(request) { Reply::of(403, "no") } else { reply });
        let error = place.open(&remote, "other", None).map(drop).unwrap_err().to_string();
        assert!(error.contains("403"), "{error}");
        assert!(!place.at("other.img").exists());
    }
}

#[test]
fn readers_and_the_background_fetch_each_chunk_once() {
    let place = Place::new(layers(Format::ZstdChunked));
    let remote = place.fake.remote();
    let source = Arc::new(place.open(&remote, "lazy", None).unwrap());
    let before = remote.counts().received_bytes;
    place.fake.fault(|_, reply| {
        std::thread::sleep(Duration::from_millis(5));
        reply
    });
    let objects = source.shared_objects();
    std::thread::scope(|scope| {
        scope.spawn(|| objects.fetch_all(3, &AtomicBool::new(false), &|_, _| {}).unwrap());
        (0..4).for_each(|_| _ = scope.spawn(|| is_right(&source)));
    });
    let bytes = remote.counts().received_bytes - before;
    // Some headers between files come twice.
    assert!(bytes < place.blob_bytes() * 11 / 10, "{bytes} of {}", place.blob_bytes());
}

/// With 50 ms of delay per request: the time until the first file is read, beside a whole pull.
#[test]
fn a_first_read_from_a_distant_registry_is_early() {
    for format in FORMATS {
        let place = Place::new(layers(format));
        place.fake.fault(|_, reply| {
            // A delay, and 2 MB per second.
            std::thread::sleep(Duration::from_millis(50) + Duration::from_micros(reply.body.len() as u64 / 2));
            reply
        });
        let begin = Instant::now();
        let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
        assert_eq!(read(&source, "7").unwrap(), noise(7, 10_000));
        let lazily = begin.elapsed();
        let begin = Instant::now();
        place.pull("whole", &PullOptions::default()).unwrap();
        let whole = begin.elapsed();
        println!("{format:?}: a file is read after {lazily:?}; a whole pull takes {whole:?}");
        // A manifest, two tables at once, and a chunk: four delays at most, however slow this machine is.
        assert!(place.fake.requests().len() <= 4 + 4 && lazily < whole, "{lazily:?} {whole:?}");
    }
}

/// An index of several platforms and compressions.
#[test]
fn the_image_for_this_machine_is_found_in_an_index() {
    let place = Place::new(layers(Format::ZstdChunked));
    let manifest = place.fake.tagged("1").unwrap();
    let digest = format!("sha256:{}", sha256(manifest.to_string().as_bytes()));
    let arch = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let entry = |arch: &str, digest: &str| json!({"mediaType": MANIFEST, "digest": digest, "size": 1, "platform": {"os": "linux", "architecture": arch}});
    let other = format!("sha256:{}", "0".repeat(64));
    let inner =
        json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry("s390x", &other), entry(arch, &digest)]});
    let inner = place.fake.tag("inner", &inner);
    let outer = json!({"schemaVersion": 2, "mediaType": INDEX,
        "manifests": [{"mediaType": INDEX, "digest": format!("sha256:{inner}"), "size": 1}]});
    place.fake.tag("1", &outer);
    is_right(&place.open(&place.fake.remote(), "lazy", None).unwrap());
    let manifest = Image::open(&place.at("lazy.img"), None).unwrap().manifest().unwrap();
    assert_eq!(format!("sha256:{}", ferry_image::hex(&manifest)), digest);
    // A manifest that is another one than the index names.
    let name = digest.clone();
    place.fake.fault(move |request, mut reply| {
        if request.path.ends_with(&name) {
            reply.body.push(b' ');
        }
        reply
    });
    let said = place.open(&place.fake.remote(), "other", None).map(drop).unwrap_err().to_string();
    assert!(said.contains("it has the digest"), "{said}");
    place.fake.heal();
    place.fake.tag("1", &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry("s390x", &other)]}));
    let said = place.open(&place.fake.remote(), "other", None).map(drop).unwrap_err().to_string();
    assert!(said.contains("no image for linux/"), "{said}");
}

#[test]
fn damaged_layers_are_refused_by_a_whole_pull() {
    let place = Place::new(layers(Format::Estargz));
    let layer = is_layer(&place);
    place.fake.fault(move |request, mut reply| {
        if layer(request) {
            let at = reply.body.len() / 2;
            reply.body[at] ^= 1;
        }
        reply
    });
    let said = place.pull("whole", &PullOptions::default()).unwrap_err().to_string();
    assert!(said.contains("came damaged"), "{said}");
    let left: Vec<_> = fs::read_dir(place.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["whole"], "nothing half-made is left");
}

/// A part of the image needs it in memory.
#[test]
fn a_large_configuration_is_refused() {
    let mut all = layers(Format::Estargz);
    all.iter_mut().for_each(|layer| layer.annotations.clear());
    let place = Place::new(all);
    place.fake.edit(|manifest| manifest["config"]["size"] = json!(9 << 20));
    let error = place.pull("whole", &PullOptions::default()).unwrap_err().to_string();
    assert!(error.contains("its configuration has 9437184 bytes"), "{error}");
}

/// A proxy sends whole blobs until it has them; a mirror that does is not asked again for a minute.
#[test]
fn whole_blobs_in_place_of_ranges_are_retried() {
    let place = Place::new(layers(Format::Estargz));
    let blobs: Vec<_> = place.layers.iter().map(|layer| (sha256(&layer.blob), layer.blob.clone())).collect();
    let whole = move |request: &Request, reply| {
        let blob = blobs.iter().find(|(name, _)| request.path.ends_with(name));
        blob.map_or(reply, |(_, blob)| Reply::of(200, blob.clone()))
    };
    let (times, is, is_whole) = (AtomicUsize::new(0), is_layer(&place), whole.clone());
    place.fake.fault(move |request, reply| match is(request) && times.fetch_add(1, Ordering::SeqCst) < 2 {
        true => is_whole(request, reply),
        false => reply,
    });
    let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
    assert!(!source.shared_objects().looks_complete(), "it is read by chunks");
    is_right(&source);
    let mirror = Fake::start();
    mirror.fault(whole);
    let hosts = place.at("certs.d");
    fs::create_dir_all(hosts.join("registry.invalid")).unwrap();
    let text = format!(
        "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\"]\n",
        place.fake.address, mirror.address
    );
    fs::write(hosts.join("registry.invalid/hosts.toml"), text).unwrap();
    let options = Options { hosts: vec![hosts], ..Options::default() };
    let remote = Remote::open(&"oci:registry.invalid/a/b:1".parse().unwrap(), Client::new(options)).unwrap();
    let source = place.open(&Arc::new(remote), "by-mirror", None).unwrap();
    assert!(!source.shared_objects().looks_complete() && mirror.requests().iter().any(Request::is_blob));
    is_right(&source);
    assert!(mirror.requests().is_empty(), "it is left out");
}

/// A proxy that sends the range, but not its status.
#[test]
fn ranges_with_another_status_are_ranges() {
    let place = Place::new(layers(Format::Estargz));
    let layer = is_layer(&place);
    place.fake.fault(move |request, reply| if layer(request) { Reply { status: 200, ..reply } } else { reply });
    let source = place.open(&place.fake.remote(), "lazy", None).unwrap();
    assert!(!source.shared_objects().looks_complete());
    is_right(&source);
}
