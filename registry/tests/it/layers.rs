//! Container images: read chunk by chunk, pulled as a whole, converted.

use crate::common;
use crate::toc_layers;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Fake, ONCE, Reply, Request, Way, sha256};
use ferry_image::{Digest, FetchOptions, Image, Objects, Source, Store};
use ferry_registry::{
    Client, Error, LIST_BYTES_MAX, LazyOptions, Options, PullOptions, PullOutcome, Reference, Remote, convert,
    list_beside, pull, pull_lazily, pull_metadata, pull_trace, push_trace,
};
use ferry_vfs::{Errno, Name};
use serde_json::{Value, json};
use toc_layers::{FORMATS, Format, Layer, Writer};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

/// Files of the lower layer; the last one is hidden by the upper layer.
const FILES: u32 = 30;

fn layers(format: Format) -> Vec<Layer> {
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
struct Place {
    folder: tempfile::TempDir,
    fake: Fake,
    layers: Vec<Layer>,
}

impl Place {
    fn new(layers: Vec<Layer>) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap(), fake: Fake::start(), layers };
        place.fake.tag("1", &place.manifest());
        place
    }

    /// Stores the blobs; returns the manifest.
    fn manifest(&self) -> Value {
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

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Opens the image before its files are there.
    fn open(&self, remote: &Arc<Remote>, name: &str, digest: Option<Digest>) -> Result<Source, Error> {
        let (image, store) = (self.at(&format!("{name}.img")), self.at(name));
        drop(Store::create(&store)?);
        let from = pull_metadata(remote, &image, &store, digest)?;
        let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
        Ok(Source::open_with(&image, &store, None, Some(missing))?)
    }

    fn pull(&self, name: &str, options: &PullOptions) -> Result<PullOutcome, Error> {
        let _held = Store::create(&self.at(name))?;
        pull(&self.fake.remote(), &self.at(&format!("{name}.img")), &self.at(name), options, &|_, _| {})
    }

    fn blob_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.blob.len() as u64).sum()
    }
}

fn read(source: &Source, name: &str) -> Result<Vec<u8>, Errno> {
    let image = source.image();
    let root = image.inode(image.root()).unwrap();
    let nid = image.lookup(&root, Name::new(name.as_bytes()).unwrap()).unwrap().ok_or(Errno::NOENT)?;
    let mut bytes = vec![0; usize::try_from(image.inode(nid).unwrap().bytes).unwrap()];
    source.read_at(nid, 0, &mut bytes).map(|count| {
        assert_eq!(count, bytes.len());
        bytes
    })
}

fn is_right(source: &Source) {
    for number in 0..FILES - 1 {
        assert_eq!(read(source, &format!("{number}")).unwrap(), noise(number, 10_000));
    }
    assert_eq!(read(source, "large").unwrap(), noise(100, 2_000_000));
    assert_eq!(read(source, "above").unwrap(), noise(101, 5000));
    assert_eq!(read(source, &format!("{}", FILES - 1)), Err(Errno::NOENT));
}

/// Whether a request is for a layer.
fn is_layer(place: &Place) -> impl Fn(&Request) -> bool + Send + Sync + 'static {
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
fn an_image_that_was_opened_before_goes_on_without_its_manifest() {
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
fn ranges_that_are_gone_are_errors() {
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
    let left: Vec<_> = fs::read_dir(place.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["whole"], "nothing half-made is left");
}

#[test]
fn converted_images_are_found_beside_the_original() {
    for lists_referrers in [true, false] {
        let place = Place::new(layers(Format::Estargz));
        if lists_referrers {
            place.fake.list_referrers();
        }
        let signature = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [
            {"mediaType": MANIFEST, "digest": format!("sha256:{}", "5".repeat(64)), "size": 1, "artifactType": "a/signature"}]});
        let original = place.fake.tagged("1").unwrap();
        let subject = sha256(original.to_string().as_bytes());
        let tag = format!("sha256-{subject}");
        if !lists_referrers {
            place.fake.tag(&tag, &signature);
        }
        let convert = |name: &str| {
            drop(Store::create(&place.at(name)).unwrap());
            convert(&place.fake.remote(), &place.at(&format!("{name}.img")), &place.at(name), 2, &|_, _| {}).unwrap()
        };
        let first = convert("first");
        assert_eq!(first.subject.to_string(), subject);
        assert!(first.sent_bytes.is_some_and(|bytes| bytes > 2_000_000), "{first:?}");
        assert_eq!(place.fake.tagged("1").unwrap(), original, "the original stays");
        let list = place.fake.tagged(&tag).filter(|_| !lists_referrers);
        if let Some(list) = &list {
            assert_eq!(list["manifests"][0], signature["manifests"][0], "what others have added stays");
            assert_eq!(list["manifests"][1]["digest"], format!("sha256:{}", first.manifest));
        } else {
            assert!(lists_referrers && place.fake.tagged(&tag).is_none());
        }
        // Once more: nothing is pulled.
        place.fake.requests();
        let second = convert("second");
        assert_eq!((second.digest, second.manifest, second.sent_bytes), (first.digest, first.manifest, None));
        assert!(!place.at("second.img").exists());
        assert!(!place.fake.requests().iter().any(Request::is_blob));
        // With the digest, the converted image is mounted; without it, the original is.
        let source = place.open(&place.fake.remote(), "by-digest", Some(first.digest)).unwrap();
        is_right(&source);
        assert_eq!(source.image().tree(), Some(first.digest));
        let layer = is_layer(&place);
        assert!(!place.fake.requests().iter().any(layer), "no layer is needed");
        let source = place.open(&place.fake.remote(), "by-name", None).unwrap();
        is_right(&source);
        assert_eq!(source.image().tree(), None);
        let options = PullOptions { digest: Some(first.digest), ..PullOptions::default() };
        place.fake.requests();
        assert_eq!(place.pull("pulled", &options).unwrap().digest, first.digest);
        let layer = is_layer(&place);
        assert!(!place.fake.requests().iter().any(layer), "no layer is needed");
        let image = Image::open(&place.at("pulled.img"), None).unwrap();
        Objects::open(&image, &place.at("pulled")).unwrap().verify_all().unwrap();
    }
}

/// A mirror's list may be old or forged, and nothing proves a list.
#[test]
fn lists_of_referrers_are_the_registrys_own() {
    let place = Place::new(layers(Format::Estargz));
    let mirror = Fake::start();
    let hosts = place.at("certs.d");
    fs::create_dir_all(hosts.join("registry.invalid")).unwrap();
    let text = format!("server = \"http://{}\"\n[host.\"http://{}\"]\n", place.fake.address, mirror.address);
    fs::write(hosts.join("registry.invalid/hosts.toml"), text).unwrap();
    let remote = || {
        let options = Options { hosts: vec![hosts.clone()], limits: ONCE, ..Options::default() };
        Arc::new(Remote::open(&"oci:registry.invalid/a/b:1".parse().unwrap(), Client::new(options)).unwrap())
    };
    let tag = format!("sha256-{}", sha256(place.fake.tagged("1").unwrap().to_string().as_bytes()));
    let list = |entries: &[Value]| json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries});
    let signature = json!({"mediaType": MANIFEST, "digest": format!("sha256:{}", "5".repeat(64)), "size": 1,
        "artifactType": "a/signature"});
    place.fake.tag(&tag, &list(std::slice::from_ref(&signature)));
    mirror.tag(&tag, &list(&[]));
    let _held = Store::create(&place.at("own")).unwrap();
    let converted = convert(&remote(), &place.at("own.img"), &place.at("own"), 2, &|_, _| {}).unwrap();
    let kept = place.fake.tagged(&tag).unwrap();
    assert_eq!(kept["manifests"][0], signature, "the list of the registry is added to");
    assert_eq!(kept["manifests"][1]["digest"], format!("sha256:{}", converted.manifest));
    let lazily = LazyOptions { trusts_converted: true, ..LazyOptions::default() };
    drop(Store::create(&place.at("store")).unwrap());
    let (image, _) = pull_lazily(&remote(), &place.at("image"), &place.at("store"), lazily).unwrap();
    assert!(image.from.ends_with(&format!("@sha256:{}", converted.manifest)), "{}", image.from);
    let asked = mirror.requests();
    assert!(!asked.is_empty(), "it is a mirror");
    assert!(!asked.iter().any(|request| request.path.contains("/referrers/") || request.path.ends_with(&tag)));
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

/// A registry that takes the tag of the list for the digest of the original, which has no referrers then.
#[test]
fn the_original_is_not_taken_for_its_list_of_referrers() {
    let place = Place::new(layers(Format::Estargz));
    let original = place.fake.tagged("1").unwrap();
    let subject = sha256(original.to_string().as_bytes());
    let bytes = original.to_string();
    let path = format!("/manifests/sha256-{subject}");
    place.fake.fault(move |request, reply| {
        if request.method == "GET" && request.path.ends_with(&path) { Reply::of(200, bytes.clone()) } else { reply }
    });
    let wrong = Digest::new(ferry_image::Algorithm::Tree, [3; 32]);
    let options = PullOptions { digest: Some(wrong), ..PullOptions::default() };
    let said = place.pull("pulled", &options).unwrap_err().to_string();
    assert!(said.contains("the image has the digest"), "{said}");
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

/// A list of referrers that is none is an error, and so is what another writer leaves of it.
#[test]
fn lists_of_referrers_that_are_wrong_are_refused() {
    let place = Place::new(layers(Format::Estargz));
    let subject = sha256(place.fake.tagged("1").unwrap().to_string().as_bytes());
    drop(Store::create(&place.at("store")).unwrap());
    let convert = || convert(&place.fake.remote(), &place.at("image"), &place.at("store"), 2, &|_, _| {});
    place.fake.tag(&format!("sha256-{subject}"), &json!({"manifests": 1}));
    let said = convert().unwrap_err().to_string();
    assert!(said.contains("its list of referrers"), "{said}");
    place.fake.tag(&format!("sha256-{subject}"), &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}));
    // Another writer always wins.
    let tag = format!("/manifests/sha256-{subject}");
    place.fake.fault(move |request, reply| {
        let is_list = request.method == "GET" && request.path.ends_with(&tag);
        if is_list {
            Reply::of(200, json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}).to_string())
        } else {
            reply
        }
    });
    let said = convert().unwrap_err().to_string();
    assert!(said.contains("others change it at the same time"), "{said}");
    place.fake.heal();
    // An image of Ferry is nothing to convert.
    let images = common::Place::new();
    let said = ferry_registry::convert(&images.fake.remote(), &place.at("i"), &place.at("store"), 1, &|_, _| {});
    let said = said.unwrap_err().to_string();
    assert!(said.contains("an image of Ferry already"), "{said}");
}

/// What a snapshotter asks for: as many layers as have tables, exactly some, or the converted image.
#[test]
fn as_many_layers_as_have_tables_are_read_before_they_are_here() {
    let mut all = layers(Format::Estargz);
    let mut plain = Writer::new(Format::Estargz, &[4 << 20]);
    plain.file("top", &noise(102, 5000));
    let mut plain = plain.finish();
    plain.annotations.clear();
    all.push(plain);
    let place = Place::new(all);
    let get = |name: &str, options: LazyOptions| {
        drop(Store::create(&place.at(name)).unwrap());
        let image = place.at(&format!("{name}.img"));
        pull_lazily(&place.fake.remote(), &image, &place.at(name), options).map(|(image, _)| image)
    };
    let names = |name: &str| {
        let image = Image::open(&place.at(&format!("{name}.img")), None).unwrap();
        ["0", "29", "above", "top"].map(|file| {
            let root = image.inode(image.root()).unwrap();
            image.lookup(&root, Name::new(file.as_bytes()).unwrap()).unwrap().is_some()
        })
    };
    let image = get("two", LazyOptions::default()).unwrap();
    assert_eq!((image.covers, image.layers.len(), image.packs.len()), (2, 3, 2));
    assert_eq!(image.layers[2].table, None);
    assert_eq!(image.layers[1].table.as_ref(), place.layers[1].annotations.values().next());
    assert_eq!(names("two"), [true, false, true, false]);
    let manifest = sha256(place.fake.tagged("1").unwrap().to_string().as_bytes());
    assert!(image.from.ends_with(&format!("/a/b@sha256:{manifest}")), "{}", image.from);
    let only = |layers| LazyOptions { layers: Some(layers), trusts_converted: true, trusts_trace: false };
    let layer = is_layer(&place);
    assert_eq!(get("one", only(1)).unwrap().covers, 1);
    assert_eq!(names("one"), [true, true, false, false]);
    // One of them has no table: they are pulled.
    place.fake.requests();
    assert_eq!(get("three", only(3)).unwrap().covers, 3);
    assert_eq!(names("three"), [true, false, true, true]);
    assert!(place.fake.requests().iter().any(&layer));
    Objects::open(&Image::open(&place.at("three.img"), None).unwrap(), &place.at("three"))
        .unwrap()
        .verify_all()
        .unwrap();
    for layers in [0, 4] {
        let error = get("none", only(layers)).unwrap_err().to_string();
        assert!(error.contains("it has 3 layers"), "{error}");
    }
    // The converted image has all layers; nobody takes it who does not trust it.
    let _held = Store::create(&place.at("own")).unwrap();
    convert(&place.fake.remote(), &place.at("own.img"), &place.at("own"), 2, &|_, _| {}).unwrap();
    let trusting = LazyOptions { layers: None, trusts_converted: true, trusts_trace: true };
    let manifest = image.container.rsplit_once(':').unwrap().1.to_owned();
    let tag = format!("sha256-{manifest}");
    let right = place.fake.tagged(&tag).unwrap();
    let first = right["manifests"][0]["annotations"]["ferry.first"].as_str().unwrap().to_owned();
    for (name, first) in [("converted", first.clone()), ("wrong", format!("{}:1,x", "0".repeat(64)))] {
        let mut list = right.clone();
        list["manifests"][0]["annotations"]["ferry.first"] = json!(first);
        place.fake.tag(&tag, &list);
        place.fake.requests();
        let image = get(name, trusting).unwrap();
        assert_eq!((image.covers, image.layers.len()), (3, 3), "{name}");
        // What is fetched together with the manifest is not fetched again.
        let asked: Vec<_> = place.fake.requests().into_iter().map(|request| request.path).collect();
        let blobs = asked.iter().filter(|path| path.contains("/blobs/") && !path.contains(&"0".repeat(64)));
        let mut blobs: Vec<_> = blobs.collect();
        let all = blobs.len();
        blobs.sort_unstable();
        blobs.dedup();
        assert!(all == blobs.len() && all >= 2, "{name}: {asked:?}");
    }
    place.fake.tag(&tag, &right);
    push_trace(&place.fake.remote(), None, b"/top\n").unwrap();
    let image = get("traced", trusting).unwrap();
    assert_eq!(fs::read(list_beside(&place.at("traced.img"))).unwrap(), b"/top\n");
    assert!(!list_beside(&place.at("converted.img")).exists());
    assert_ne!(image.from, image.container);
    for name in ["converted", "wrong", "traced"] {
        assert_eq!(names(name), [true, false, true, true], "{name}");
    }
    assert_eq!(get("again", LazyOptions::default()).unwrap().covers, 2);
}

/// Lower layers of which one has no table are pulled without those above.
#[test]
fn lower_layers_without_tables_are_pulled_alone() {
    let mut all = layers(Format::Estargz);
    all.iter_mut().for_each(|layer| layer.annotations.clear());
    let place = Place::new(all);
    drop(Store::create(&place.at("store")).unwrap());
    let get = |options| {
        let pulled = pull_lazily(&place.fake.remote(), &place.at("image"), &place.at("store"), options);
        pulled.map(|(image, _)| image)
    };
    let error = get(LazyOptions::default()).unwrap_err().to_string();
    assert!(error.contains("layer 1 of 2: it has no table of contents that its manifest proves"), "{error}");
    place.fake.requests();
    assert_eq!(get(LazyOptions { layers: Some(1), ..LazyOptions::default() }).unwrap().covers, 1);
    let upper = sha256(&place.layers[1].blob);
    assert!(!place.fake.requests().iter().any(|request| request.path.ends_with(&upper)));
    let image = Image::open(&place.at("image"), None).unwrap();
    Objects::open(&image, &place.at("store")).unwrap().verify_all().unwrap();
    let root = image.inode(image.root()).unwrap();
    assert!(image.lookup(&root, Name::new(b"29").unwrap()).unwrap().is_some(), "the upper layer hides it");
}

/// Anybody who may write to the repository may store such a list.
#[test]
fn lists_that_are_wrong_are_not_taken() {
    let place = Place::new(layers(Format::Estargz));
    let remote = place.fake.remote();
    let image = place.at("image");
    let manifest = sha256(place.manifest().to_string().as_bytes());
    let container: Reference = format!("oci:{}/a/b@sha256:{manifest}", place.fake.address).parse().unwrap();
    let taken = || pull_trace(&remote, &container, &image);
    assert!(!taken().unwrap(), "there is none");
    let long = vec![b'/'; usize::try_from(LIST_BYTES_MAX).unwrap() + 1];
    let error = push_trace(&remote, None, &long).unwrap_err().to_string();
    assert!(error.contains("the maximum is 4194304"), "{error}");
    let error = push_trace(&remote, Some(&"0".repeat(64)), b"/a\n").unwrap_err().to_string();
    assert!(error.contains("the container's is sha256:000"), "{error}");
    push_trace(&remote, Some(&manifest), b"/a\n").unwrap();
    assert!(taken().unwrap());
    assert_eq!(fs::read(list_beside(&image)).unwrap(), b"/a\n");
    let kind = "application/vnd.ferry.trace.v1";
    let blob = |size: u64| json!({"mediaType": kind, "digest": format!("sha256:{}", sha256(b"/a\n")), "size": size});
    let subject = |digits: &str| json!({"mediaType": MANIFEST, "digest": format!("sha256:{digits}"), "size": 1});
    let (own, other) = (subject(&manifest), subject(&"1".repeat(64)));
    for (found, expected) in [
        (json!({"layers": [blob(3)], "subject": other}), "it is of another image"),
        (json!({"layers": [blob(3)]}), "it is of another image"),
        (json!({"layers": [], "subject": own}), "it is not a trace list"),
        (json!({"layers": [{"digest": "sha256:1"}], "subject": own}), "it is not a trace list"),
        (json!({"layers": [blob(5 << 30)], "subject": own}), "the maximum is 4194304"),
        (json!({"layers": [blob(2)], "subject": own}), "came damaged"),
        (json!({"layers": "x", "subject": own}), "invalid type"),
        (json!({"manifests": []}), "missing field"),
    ] {
        let digest = place.fake.tag("found", &found);
        // The newest one, and others that are no lists.
        let entry = |digest: &str, kind: &str, created: &str| json!({"digest": format!("sha256:{digest}"), "artifactType": kind, "annotations": {"ferry.created": created}});
        let zeros = "0".repeat(64);
        let entries = json!({"manifests": [entry(&zeros, kind, "7"), entry(&digest, kind, "1000"),
            entry(&zeros, kind, "x"), entry(&zeros, "other", "2000"), {"digest": "no digest"}]});
        place.fake.tag(&format!("sha256-{manifest}"), &entries);
        let error = taken().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
        assert_eq!(fs::read(list_beside(&image)).unwrap(), b"/a\n", "it stays");
    }
    for index in [json!([]), json!({"manifests": 1})] {
        place.fake.tag(&format!("sha256-{manifest}"), &index);
        assert!(taken().is_err());
    }
}
