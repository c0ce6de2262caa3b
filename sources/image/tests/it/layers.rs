//! Images of layers that stay in a registry: eStargz and zstd:chunked.

use crate::archives;
use crate::common;
use crate::toc_layers;

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use archives::bundle::{Bundle, Packing};
use common::{Bench, Facts, facts_of_image};
use ferry_image::{
    BuildLayersError, BuildOptions, ByteSink, Digest, Fetch, FetchOptions, Image, LayerError, LayerRef, Objects,
    Source, Store, build, build_layer, build_layers,
};
use ferry_vfs::{Errno, Name};
use proptest::prelude::*;
use serde_json::{Value, json};
use toc_layers::{FORMATS, Format, Layer, Writer, footer, sha256};

const MANIFEST: [u8; 32] = [7; 32];

/// Corrupts bytes of a blob that the server sends; gets their offset.
type Fault = dyn Fn(u64, &mut Vec<u8>) + Send + Sync;

/// A server in memory.
#[derive(Default)]
struct Server {
    blobs: Mutex<HashMap<[u8; 32], Vec<u8>>>,
    requests: Mutex<Vec<Range<u64>>>,
    fault: Mutex<Option<Box<Fault>>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Server")
    }
}

impl Server {
    fn of(layers: &[&Layer]) -> Arc<Self> {
        let server = Self::default();
        for layer in layers {
            server.blobs.lock().unwrap().insert(layer.name(), layer.blob.clone());
        }
        Arc::new(server)
    }

    /// Returns the ranges that were requested since the last call.
    fn requests(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }

    fn fault(&self, fault: impl Fn(u64, &mut Vec<u8>) + Send + Sync + 'static) {
        *self.fault.lock().unwrap() = Some(Box::new(fault));
    }

    fn heal(&self) {
        *self.fault.lock().unwrap() = None;
    }

    fn get(&self, name: [u8; 32], range: Range<u64>) -> io::Result<Vec<u8>> {
        self.requests.lock().unwrap().push(range.clone());
        let blobs = self.blobs.lock().unwrap();
        let blob = blobs.get(&name).ok_or(io::ErrorKind::NotFound)?;
        let at = |offset| usize::try_from(offset).unwrap();
        let mut bytes = blob.get(at(range.start)..at(range.end)).ok_or(io::ErrorKind::UnexpectedEof)?.to_vec();
        if let Some(fault) = &*self.fault.lock().unwrap() {
            fault(range.start, &mut bytes);
        }
        Ok(bytes)
    }
}

impl Fetch for Server {
    fn index(&self, _: Digest, _: u64) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn read(&self, _: Digest, _: Range<u64>, _: &mut ByteSink<'_>) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn blob(&self, name: [u8; 32], _: u64, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        // In pieces of no particular length.
        self.get(name, range)?.chunks(1777).try_for_each(sink)
    }
}

fn reference(layer: &Layer) -> Result<LayerRef, LayerError> {
    let annotation = |key: &str| layer.annotations.get(key).map(String::as_str);
    LayerRef::parse(layer.name(), layer.blob.len() as u64, layer.media_type, annotation)
}

fn table(server: &Server, layer: &Layer) -> Result<ferry_image::Layer, LayerError> {
    reference(layer)?.fetch(&|range| server.get(layer.name(), range))
}

/// Makes the image `name` of layers.
fn image_of(bench: &Bench, server: &Server, layers: &[&Layer], name: &str) -> Result<Digest, String> {
    let tables = layers.iter().map(|layer| table(server, layer));
    let tables = tables.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
    let store = Store::create(&bench.store()).unwrap();
    build_layers(&tables, &MANIFEST, &bench.path(name), &store).map_err(|error| error.to_string())
}

fn open(bench: &Bench, server: &Arc<Server>, name: &str, cache_bytes: Option<u64>) -> Source {
    let missing = FetchOptions { from: Arc::<Server>::clone(server), ahead_bytes: 0, cache_bytes };
    Source::open_with(&bench.path(name), &bench.store(), None, Some(missing)).unwrap()
}

fn read(source: &Source, path: &str) -> Result<Vec<u8>, Errno> {
    let image = source.image();
    let mut inode = image.inode(image.root()).unwrap();
    for name in path.split('/') {
        let nid = image.lookup(&inode, Name::new(name.as_bytes()).unwrap()).unwrap().expect(path);
        inode = image.inode(nid).unwrap();
    }
    let mut bytes = vec![0; usize::try_from(inode.bytes).unwrap()];
    source.read_at(inode.nid, 0, &mut bytes).map(|count| {
        assert_eq!(count, bytes.len());
        bytes
    })
}

/// Incompressible bytes that depend on the seed.
fn noise(seed: u32, length: usize) -> Vec<u8> {
    let words = (0..).map(|at: u32| (at ^ seed.wrapping_mul(40_503)).wrapping_mul(2_654_435_761).rotate_left(at % 31));
    words.flat_map(u32::to_le_bytes).take(length).collect()
}

fn two_layers(format: Format, chunks: &[usize]) -> (Layer, Layer) {
    let mut lower = Writer::new(format, chunks);
    lower.dir("usr/");
    lower.dir("usr/bin/");
    lower.file("usr/bin/tool", &noise(1, 300_000));
    lower.file("usr/bin/small", b"small");
    lower.file("usr/empty", b"");
    lower.symlink("bin", "usr/bin");
    lower.link("usr/tool", "usr/bin/tool");
    lower.dir("gone/");
    lower.file("gone/below", &noise(2, 9000));
    lower.dir("opaque/");
    lower.file("opaque/below", &noise(3, 9000));
    let mut upper = Writer::new(format, chunks);
    upper.file(".wh.gone", b"");
    upper.dir("opaque/");
    upper.file("opaque/.wh..wh..opq", b"");
    upper.file("opaque/above", &noise(4, 20_000));
    upper.file("usr/bin/small", &noise(5, 4096));
    upper.file("usr/bin/same", &noise(1, 300_000));
    (lower.finish(), upper.finish())
}

/// The tree of the same layers, as it is built of the archives.
fn whole(bench: &Bench, layers: &[&Layer]) -> std::collections::BTreeMap<PathBuf, Facts> {
    let mut bundle = Bundle::new(bench, "bundle");
    layers.iter().for_each(|layer| bundle.layer(&layer.plain, Packing::Gzip));
    bundle.finish("latest");
    let store = Store::create(&bench.path("whole-store")).unwrap();
    let source = bundle.source("latest");
    build(Path::new(&source), &bench.path("whole"), store, &BuildOptions::default(), &|_, _| {}).unwrap();
    let mut tree = facts_of_image(&Source::open(&bench.path("whole"), &bench.path("whole-store"), None).unwrap());
    // The archive of eStargz has its own table of contents.
    tree.remove(Path::new("stargz.index.json"));
    tree
}

#[test]
fn layers_give_the_tree_of_their_archives() {
    for format in FORMATS {
        // Whole chunks of eStargz, parts of blocks, and one byte over a block.
        for chunks in [&[4 << 20][..], &[65_536], &[4097], &[5000, 123, 70_000]] {
            let bench = Bench::new();
            let (lower, upper) = two_layers(format, chunks);
            let server = Server::of(&[&lower, &upper]);
            let digest = image_of(&bench, &server, &[&lower, &upper], "image").unwrap();
            let source = open(&bench, &server, "image", None);
            assert_eq!(source.image().manifest(), Some(MANIFEST));
            assert_eq!((source.image().digest(), source.image().tree()), (digest, None));
            assert_eq!(ferry_image::check(source.image()).findings, Vec::<String>::new());
            server.requests();
            let found = facts_of_image(&source);
            assert_eq!(found, whole(&bench, &[&lower, &upper]), "{format:?} {chunks:?}");
            source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
            source.shared_objects().complete().unwrap();
            drop(source);
            // From the store alone, and another image of the same layer needs nothing more.
            let source = Source::open(&bench.path("image"), &bench.store(), None).unwrap();
            assert_eq!(facts_of_image(&source), found);
            source.shared_objects().verify_all().unwrap();
            assert_eq!(image_of(&bench, &server, &[&lower], "other"), image_of(&bench, &server, &[&lower], "again"));
            server.requests();
            let other = open(&bench, &server, "other", None);
            assert_eq!(read(&other, "gone/below").unwrap(), noise(2, 9000));
            assert!(other.shared_objects().looks_complete());
            assert_eq!(server.requests(), []);
            let store = Store::open(&bench.store()).unwrap();
            let layer = store.layer_of(other.image().packs()[0].name).unwrap();
            assert_eq!(layer.sha256, lower.name());
        }
    }
}

#[test]
fn only_the_chunks_that_are_read_are_fetched() {
    for format in FORMATS {
        let bench = Bench::new();
        let mut writer = Writer::new(format, &[100_000]);
        let large = noise(9, 3_000_000);
        writer.file("large", &large);
        writer.file("small", &noise(10, 700));
        let layer = writer.finish();
        let server = Server::of(&[&layer]);
        image_of(&bench, &server, &[&layer], "image").unwrap();
        assert!(server.requests().iter().map(|range| range.end - range.start).sum::<u64>() < 140_000);
        let source = open(&bench, &server, "image", None);
        assert_eq!(read(&source, "small").unwrap(), noise(10, 700));
        let requests = server.requests();
        assert!(requests.len() == 1 && requests[0].end - requests[0].start < 2000, "{requests:?}");
        // In the midst of the file, over the edge of two chunks.
        let image = source.image();
        let root = image.inode(image.root()).unwrap();
        let nid = image.lookup(&root, Name::new(b"large").unwrap()).unwrap().unwrap();
        let mut bytes = vec![0; 10];
        source.read_at(nid, 1_499_995, &mut bytes).unwrap();
        assert_eq!(bytes, large[1_499_995..1_500_005]);
        let bytes: u64 = server.requests().iter().map(|range| range.end - range.start).sum();
        assert!((190_000..220_000).contains(&bytes), "{bytes}");
    }
}

#[test]
fn files_in_a_shared_stream_are_distinguished() {
    let bench = Bench::new();
    let mut writer = Writer::new(Format::Estargz, &[4 << 20]);
    let (one, two, three) = (noise(1, 5000), noise(2, 12_345), noise(3, 10));
    writer.files_in_one_stream(&[("one", &one), ("two", &two), ("three", &three)]);
    writer.file("four", &noise(4, 100));
    let layer = writer.finish();
    let server = Server::of(&[&layer]);
    image_of(&bench, &server, &[&layer], "image").unwrap();
    let source = open(&bench, &server, "image", None);
    assert_eq!(read(&source, "two").unwrap(), two);
    assert_eq!(read(&source, "one").unwrap(), one);
    assert_eq!(read(&source, "four").unwrap(), noise(4, 100));
    assert_eq!(read(&source, "three").unwrap(), three);
}

/// Returns how many bytes this thread has read from files.
fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).map_or(0, |bytes| bytes.parse().unwrap())
}

#[test]
fn tables_of_endless_zeros_are_refused() {
    let mut writer = Writer::new(Format::ZstdChunked, &[10_000]);
    let bytes = 1_u64 << 41;
    writer.entries.push(json!({"type": "reg", "name": "zeros", "mode": 0o600, "size": bytes, "chunkSize": bytes,
        "chunkType": "zeros"}));
    let layer = writer.finish();
    let (bench, server) = (Bench::new(), Server::of(&[&layer]));
    let said = image_of(&bench, &server, &[&layer], "image").unwrap_err();
    assert!(said.contains("have 2199023255552 bytes, more than"), "{said}");
    let store = Store::create(&bench.store()).unwrap();
    let said = build_layer(&table(&server, &layer).unwrap(), &bench.path("image"), &store).unwrap_err().to_string();
    assert!(said.contains("have 2199023255552 bytes, more than"), "{said}");
}

/// Memory and time for a chunk are those of honest encoders.
#[test]
fn windows_and_streams_are_limited() {
    let plain = noise(7, 300_000);
    let packed = |window: u32, plain: &[u8]| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window).unwrap();
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    };
    let zeros = packed(21, &vec![0; 256 << 20]);
    let bomb = [packed(21, &plain), zeros.repeat(64)].concat();
    let mut writer = Writer::new(Format::ZstdChunked, &[1]);
    writer.file_in("right", &plain, &packed(25, &plain));
    writer.file_in("large", &plain, &packed(26, &plain));
    writer.file_in("bomb", &plain, &bomb);
    let layer = writer.finish();
    let (bench, server) = (Bench::new(), Server::of(&[&layer]));
    image_of(&bench, &server, &[&layer], "image").unwrap();
    let source = open(&bench, &server, "image", None);
    assert!(read(&source, "right").unwrap() == plain);
    assert!(read(&source, "large").is_err_and(|error| error == Errno::IO));
    // Of this thread, in hundredths of a second.
    let time = || -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = text.rsplit_once(')').unwrap();
        fields.split_whitespace().skip(11).take(2).map(|time| time.parse::<u64>().unwrap()).sum()
    };
    let before = time();
    assert!(read(&source, "bomb").unwrap() == plain);
    assert!(time() - before < 100, "{} for what is behind the chunk", time() - before);
}

#[test]
fn zeros_of_sparse_files_are_not_fetched() {
    let bench = Bench::new();
    let mut writer = Writer::new(Format::ZstdChunked, &[10_000]);
    let end = noise(1, 4000);
    let offset = writer.stream(&end);
    writer
        .entries
        .push(json!({"type": "reg", "name": "sparse", "mode": 0o600, "size": 9_004_000, "chunkSize": 9_000_000,
        "chunkType": "zeros"}));
    writer.entries.push(json!({"type": "chunk", "name": "sparse", "offset": offset, "chunkOffset": 9_000_000,
        "chunkSize": 4000, "chunkDigest": sha256(&end)}));
    let layer = writer.finish();
    let server = Server::of(&[&layer]);
    image_of(&bench, &server, &[&layer], "image").unwrap();
    server.requests();
    let source = open(&bench, &server, "image", None);
    let before = bytes_read();
    let found = read(&source, "sparse").unwrap();
    // Where they are holes is known without reading them.
    assert!(bytes_read() - before < 10_000_000, "{} bytes", bytes_read() - before);
    assert!(found[..9_000_000].iter().all(|byte| *byte == 0));
    assert_eq!(found[9_000_000..], end);
    assert_eq!(server.requests().len(), 1);
    source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).unwrap();
    source.shared_objects().complete().unwrap();
    // They take no disk space either.
    let pack = bench.store().join("packs").join(source.image().packs()[0].name.hex());
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(pack).unwrap());
    assert!(blocks < 100, "{blocks}");
}

#[test]
fn chunks_that_are_not_those_of_the_table_are_refused() {
    for format in FORMATS {
        for chunks in [&[65_536][..], &[5000]] {
            let bench = Bench::new();
            let (lower, _) = two_layers(format, chunks);
            let server = Server::of(&[&lower]);
            image_of(&bench, &server, &[&lower], "image").unwrap();
            let source = open(&bench, &server, "image", None);
            // One byte of all that comes, in turn at other places; zeros; something else that unpacks.
            for turn in 0..6 {
                let other = if format == Format::Estargz {
                    vec![]
                } else {
                    zstd::encode_all(&noise(8, 400_000)[..], 1).unwrap()
                };
                server.fault(move |_, bytes| match turn {
                    4 => bytes.fill(0),
                    5 => {
                        let count = bytes.len().min(other.len());
                        bytes[..count].copy_from_slice(&other[..count]);
                    }
                    turn => {
                        let at = bytes.len() * turn / 4;
                        bytes[at] ^= 0x55;
                    }
                });
                let outcome = read(&source, "gone/below");
                // A change after the chunk, in the headers that follow, is harmless.
                assert!(outcome.is_err() || outcome == Ok(noise(2, 9000)), "{turn}");
                if matches!(turn, 0 | 4) {
                    assert_eq!(outcome, Err(Errno::IO), "{turn}");
                }
            }
            server.heal();
            assert_eq!(read(&source, "gone/below").unwrap(), noise(2, 9000));
            assert_eq!(read(&source, "usr/bin/tool").unwrap(), noise(1, 300_000));
        }
    }
}

#[test]
fn a_damaged_chunk_does_not_stop_the_background_fetch() {
    for format in FORMATS {
        let bench = Bench::new();
        let mut writer = Writer::new(format, &[100_000]);
        writer.file("large", &noise(9, 9_000_000));
        let layer = writer.finish();
        let server = Server::of(&[&layer]);
        image_of(&bench, &server, &[&layer], "image").unwrap();
        // Behind the header of the archive, in the first chunk.
        let at = 5000;
        server.fault(move |from, bytes| {
            if let Some(byte) = usize::try_from(at - from.min(at)).ok().and_then(|at| bytes.get_mut(at)) {
                *byte ^= u8::from(from <= at);
            }
        });
        let source = open(&bench, &server, "image", None);
        let fetch = || source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {});
        let said = fetch().unwrap_err().to_string();
        assert!(said.contains("came damaged"), "{format:?}: {said}");
        assert_eq!(source.shared_objects().fetched_bytes(), 8_900_000, "{format:?}: all other chunks");
        server.heal();
        server.requests();
        fetch().unwrap();
        assert_eq!(server.requests().len(), 1);
        assert_eq!(read(&source, "large").unwrap(), noise(9, 9_000_000));
        // A server that damages everything is left alone in the end.
        drop(source);
        let other = Bench::new();
        let mut writer = Writer::new(format, &[100]);
        writer.file("large", &noise(9, 300_000));
        let layer = writer.finish();
        let server = Server::of(&[&layer]);
        image_of(&other, &server, &[&layer], "image").unwrap();
        let source = open(&other, &server, "image", None);
        server.fault(|_, bytes| bytes.fill(0));
        server.requests();
        source.shared_objects().fetch_all(1, &AtomicBool::new(false), &|_, _| {}).unwrap_err();
        let requests = server.requests().len();
        assert!((2..300).contains(&requests), "{format:?}: {requests} requests");
    }
}

#[test]
fn objects_of_an_earlier_process_are_found_and_proved() {
    let bench = Bench::new();
    let (lower, _) = two_layers(Format::ZstdChunked, &[5000]);
    let server = Server::of(&[&lower]);
    image_of(&bench, &server, &[&lower], "image").unwrap();
    let source = open(&bench, &server, "image", None);
    assert_eq!(read(&source, "usr/bin/tool").unwrap(), noise(1, 300_000));
    let pack = source.image().packs()[0].name;
    drop(source);
    server.requests();
    let part = bench.store().join("packs").join(format!("{}.part", pack.hex()));
    let file = std::fs::File::options().write(true).open(part).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"other", 7000).unwrap();
    drop(file);
    let source = open(&bench, &server, "image", None);
    assert_eq!(read(&source, "usr/bin/tool").unwrap(), noise(1, 300_000));
    let requests = server.requests();
    assert!(requests.len() == 1 && requests[0].end - requests[0].start < 6000, "{requests:?}");
}

#[test]
fn a_bounded_cache_drops_chunks_that_share_blocks() {
    let bench = Bench::new();
    let (lower, upper) = two_layers(Format::ZstdChunked, &[5000]);
    let server = Server::of(&[&lower, &upper]);
    image_of(&bench, &server, &[&lower, &upper], "image").unwrap();
    let source = open(&bench, &server, "image", Some(30_000));
    for _ in 0..3 {
        assert_eq!(read(&source, "usr/bin/tool").unwrap(), noise(1, 300_000));
        assert_eq!(read(&source, "opaque/above").unwrap(), noise(4, 20_000));
        assert_eq!(read(&source, "usr/bin/small").unwrap(), noise(5, 4096));
    }
}

/// Changes the entries of a table.
type Change = dyn Fn(&mut Vec<Value>);

/// A layer with a table of contents that was changed.
fn changed(format: Format, change: impl FnOnce(&mut Vec<Value>)) -> Layer {
    let mut writer = Writer::new(format, &[4096]);
    writer.dir("dir/");
    writer.file("dir/a", &noise(1, 10_000));
    writer.file("dir/b", &noise(2, 500));
    writer.symlink("s", "dir/a");
    change(&mut writer.entries);
    writer.finish()
}

fn refusal(layer: &Layer) -> String {
    let bench = Bench::new();
    let server = Server::of(&[layer]);
    image_of(&bench, &server, &[layer], "image").expect_err("it is wrong")
}

#[test]
fn wrong_tables_are_refused_by_name() {
    let cases: Vec<(&str, Box<Change>)> = vec![
        ("leads out of the tree", Box::new(|all| all[1]["name"] = "dir/../../etc/passwd".into())),
        ("leads out of the tree", Box::new(|all| all[0]["name"] = "..".into())),
        ("two entries have this name", Box::new(|all| all.push(all[5].clone()))),
        (
            "two entries have this name",
            Box::new(|all| {
                let mut other = all[5].clone();
                other["name"] = "./dir//b".into();
                all[5]["name"] = "dir/b".into();
                other["type"] = "symlink".into();
                all.push(other);
            }),
        ),
        (
            "which is not in the archive before it",
            Box::new(|all| {
                all.push(json!({"type": "hardlink", "name": "l", "linkName": "missing"}));
            }),
        ),
        (
            "a hard link to a directory",
            Box::new(|all| {
                all.push(json!({"type": "hardlink", "name": "l", "linkName": "dir"}));
            }),
        ),
        ("a chunk of dir/a is outside of the layer", Box::new(|all| all[3]["offset"] = (1_u64 << 40).into())),
        ("a chunk of dir/a is outside of the layer", Box::new(|all| all[3]["offset"] = u64::MAX.into())),
        ("invalid", Box::new(|all| all[3]["offset"] = (-1).into())),
        ("overlap", Box::new(|all| all[3]["offset"] = all[2]["offset"].clone())),
        ("overlap", Box::new(|all| all[2]["offset"] = 1.into())),
        ("its size is 20000", Box::new(|all| (all[1]["size"], all[3]["chunkSize"]) = (20_000.into(), 1808.into()))),
        (
            "where 8192 of 9000 bytes are known",
            Box::new(|all| {
                (all[1]["size"], all[3]["chunkSize"]) = (9000.into(), 1808.into());
            }),
        ),
        ("of 4000 bytes are known", Box::new(|all| all[1]["size"] = 4000.into())),
        ("invalid", Box::new(|all| all[1]["size"] = (-1).into())),
        ("where 4096 of 10000", Box::new(|all| all[2]["chunkOffset"] = 5000.into())),
        ("where 4096 of 10000", Box::new(|all| all[2]["chunkSize"] = u64::MAX.into())),
        ("nothing proves its bytes", Box::new(|all| all[2]["chunkDigest"] = Value::Null)),
        ("no digest by SHA-256", Box::new(|all| all[2]["chunkDigest"] = "sha512:00".into())),
        ("a digest of zeros", Box::new(|all| all[2]["chunkDigest"] = format!("sha256:{}", "0".repeat(64)).into())),
        ("a chunk of the unknown kind", Box::new(|all| all[2]["chunkType"] = "other".into())),
        ("a chunk that does not follow its file", Box::new(|all| all[2]["name"] = "dir/b".into())),
        ("a chunk before any file", Box::new(|all| drop(all.drain(..2)))),
        ("an entry of the unknown kind", Box::new(|all| all[0]["type"] = "door".into())),
        ("not UTF-8", Box::new(|all| all[5]["name"] = "a\u{fffd}".into())),
        ("its time", Box::new(|all| all[0]["modtime"] = "yesterday".into())),
        ("base64", Box::new(|all| all[0]["xattrs"] = json!({"user.a": "%"}))),
        (
            "does not fit in 12 and 20 bits",
            Box::new(|all| all.push(json!({"type": "char", "name": "c", "devMajor": 1 << 20}))),
        ),
        ("a symbolic link without a target", Box::new(|all| all[5]["linkName"] = "".into())),
        ("not a valid name", Box::new(|all| all[5]["name"] = "a\u{0}b".into())),
        (
            "more than 1,048,576 chunks",
            Box::new(|all| {
                all.push(json!({"type": "reg", "name": "z", "size": 1_u64 << 62, "chunkType": "zeros"}));
            }),
        ),
    ];
    for format in FORMATS {
        for (expected, change) in &cases {
            let said = refusal(&changed(format, change));
            assert!(said.contains(expected) && !said.contains('\n'), "{expected}: {said}");
        }
    }
}

#[test]
fn tables_that_are_not_those_of_the_manifest_are_refused() {
    for format in FORMATS {
        let mut layer = changed(format, |_| ());
        for (key, value) in layer.annotations.clone() {
            let Some(digits) = value.strip_prefix("sha256:") else { continue };
            layer.annotations.insert(key, format!("sha256:{}", digits.chars().rev().collect::<String>()));
        }
        assert!(refusal(&layer).contains("as its annotation says"), "{}", refusal(&layer));
        layer.annotations.clear();
        assert!(refusal(&layer).contains("no table of contents that its manifest proves"));
        // Neither is there more than the document, nor another version of it.
        let mut writer = Writer::new(format, &[4096]);
        writer.file("a", b"a");
        let said = refusal(&writer.finish_with(|json| [&json[..], b"{}"].concat()));
        assert!(said.contains("trailing characters"), "{said}");
        let said = refusal(&Writer::new(format, &[1]).finish_with(|_| br#"{"version": 2, "entries": []}"#.to_vec()));
        assert!(said.contains("version 2"), "{said}");
    }
    let key = |name: &str| format!("io.github.containers.zstd-chunked.manifest-{name}");
    let layer = changed(Format::ZstdChunked, |_| ());
    let with = |name: &str, value: &str| {
        let mut layer = layer.clone();
        layer.annotations.insert(key(name), value.into());
        refusal(&layer)
    };
    for (position, expected) in [
        ("1:2:3", "not a valid position"),
        ("1:2:3:4", "unknown kind 4"),
        ("1:2:3:1:5", "not a valid position"),
        ("+1:2:3:1", "not a valid position"),
        ("1:0:0:1", "not a valid position"),
        ("99999999:10:10:1", "outside of the blob"),
        ("18446744073709551615:10:10:1", "not a valid position"),
        ("1:999999999999:10:1", "the maximum is"),
        ("1:10:999999999999:1", "the maximum is"),
    ] {
        assert!(with("position", position).contains(expected), "{position}: {}", with("position", position));
    }
    assert!(with("checksum", "md5:00").contains("no digest of a table"));
    // Which of two is right?
    let mut both = changed(Format::Estargz, |_| ());
    both.annotations.extend(layer.annotations.clone());
    assert!(refusal(&both).contains("which of two tables"), "{}", refusal(&both));
    // A table of more bytes than it says, or of less.
    let position = &layer.annotations[&key("position")];
    let [at, packed, unpacked, kind] = position.split(':').collect::<Vec<_>>().try_into().unwrap();
    let (unpacked, less): (u64, &dyn Fn(u64) -> String) =
        (unpacked.parse().unwrap(), &|unpacked| format!("{at}:{packed}:{unpacked}:{kind}"));
    for unpacked in [unpacked - 1, unpacked + 1] {
        assert!(with("position", &less(unpacked)).contains("unpacks to"));
    }
}

#[test]
fn footers_that_lead_elsewhere_are_refused() {
    let layer = changed(Format::Estargz, |_| ());
    let end = layer.blob.len() - 51;
    let with = |footer: Vec<u8>| {
        let mut layer = layer.clone();
        layer.blob.truncate(end);
        layer.blob.extend(footer);
        refusal(&layer)
    };
    for at in [end, end + 1, usize::MAX] {
        assert!(with(footer(at)).contains("is said to be at"), "{at}");
    }
    for at in [0, 1, end - 1] {
        let said = with(footer(at));
        assert!(said.contains("does not unpack") || said.contains("another name"), "{at}: {said}");
    }
    for at in [0, 12, 16, 20, 35] {
        let mut other = footer(0);
        other[at] = b'~';
        assert!(with(other).contains("no footer of eStargz"), "{at}");
    }
    let mut short = layer.clone();
    short.blob.truncate(10);
    assert!(refusal(&short).contains("no footer of eStargz"));
}

/// A table that is larger than what is requested at first, and one that unpacks to more than it may.
#[test]
fn large_tables_are_fetched_and_endless_ones_are_not() {
    let bench = Bench::new();
    let mut writer = Writer::new(Format::Estargz, &[4 << 20]);
    for number in 0..6000_u32 {
        writer.file(&format!("{number}"), &number.to_le_bytes());
    }
    let layer = writer.finish();
    let server = Server::of(&[&layer]);
    image_of(&bench, &server, &[&layer], "image").unwrap();
    assert_eq!(server.requests().len(), 2);
    let source = open(&bench, &server, "image", None);
    assert_eq!(read(&source, "4711").unwrap(), 4711_u32.to_le_bytes());
    // More than 50 MiB, where other programs give up.
    for format in FORMATS {
        let large = Writer::new(format, &[1]).finish_with(|json| [json, vec![b' '; 60 << 20]].concat());
        table(&Server::of(&[&large]), &large).unwrap();
    }
    let endless = Writer::new(Format::Estargz, &[1]).finish_with(|_| vec![b' '; (256 << 20) + 1]);
    assert!(refusal(&endless).contains("the maximum is"), "{}", refusal(&endless));
}

#[test]
fn prefetch_landmarks_are_left_out() {
    for name in [".prefetch.landmark", ".no.prefetch.landmark"] {
        let bench = Bench::new();
        let mut writer = Writer::new(Format::Estargz, &[1]);
        writer.file(name, &[0xf]);
        writer.file("dir/.prefetch.landmark", b"ours");
        let layer = writer.finish();
        let server = Server::of(&[&layer]);
        image_of(&bench, &server, &[&layer], "image").unwrap();
        let source = open(&bench, &server, "image", None);
        let names: Vec<_> = facts_of_image(&source).into_keys().collect();
        assert_eq!(names, ["", "dir", "dir/.prefetch.landmark"].map(PathBuf::from));
    }
}

/// A registry that has the image as Ferry pushed it, without the blobs of the layers.
#[test]
fn a_pack_is_fetched_where_there_is_no_blob() {
    #[derive(Debug)]
    struct Packs(Vec<u8>, io::ErrorKind);
    impl Fetch for Packs {
        fn index(&self, _: Digest, _: u64) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn read(&self, _: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
            sink(&self.0[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()])
        }

        fn blob(&self, _: [u8; 32], _: u64, _: Range<u64>, _: &mut ByteSink<'_>) -> io::Result<()> {
            Err(self.1.into())
        }
    }
    let bench = Bench::new();
    let (lower, _) = two_layers(Format::ZstdChunked, &[5000]);
    let server = Server::of(&[&lower]);
    image_of(&bench, &server, &[&lower], "image").unwrap();
    let source = open(&bench, &server, "image", None);
    source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
    source.shared_objects().complete().unwrap();
    let pack = bench.store().join("packs").join(source.image().packs()[0].name.hex());
    let bytes = std::fs::read(&pack).unwrap();
    drop(source);
    // S3 says the latter where nobody may list the bucket.
    for kind in [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied] {
        let other = bench.path(&format!("{kind:?}"));
        let store = Store::create(&other).unwrap();
        build_layers(&[table(&server, &lower).unwrap()], &MANIFEST, &bench.path("image"), &store).unwrap();
        let from = Arc::new(Packs(bytes.clone(), kind));
        let missing = FetchOptions { from, ahead_bytes: 0, cache_bytes: None };
        let source = Source::open_with(&bench.path("image"), &other, None, Some(missing)).unwrap();
        assert_eq!(read(&source, "usr/bin/tool").unwrap(), noise(1, 300_000));
    }
}

#[test]
fn damage_of_a_layers_pack_is_found_and_repaired_from_its_blob() {
    let bench = Bench::new();
    let (lower, _) = two_layers(Format::Estargz, &[5000]);
    let server = Server::of(&[&lower]);
    image_of(&bench, &server, &[&lower], "image").unwrap();
    let source = open(&bench, &server, "image", None);
    source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
    source.shared_objects().complete().unwrap();
    let pack = bench.store().join("packs").join(source.image().packs()[0].name.hex());
    let whole = std::fs::read(&pack).unwrap();
    drop(source);
    let file = std::fs::File::options().write(true).open(&pack).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"other", 7000).unwrap();
    drop(file);
    let image = Image::open(&bench.path("image"), None).unwrap();
    assert_eq!(ferry_image::note_damage(&image, &bench.store()).unwrap(), 1);
    server.requests();
    let repaired = ferry_image::repair_packs(&image, &bench.store(), Some(&*server)).unwrap();
    assert_eq!((repaired.repaired, repaired.left), (1, 0));
    assert_eq!(std::fs::read(&pack).unwrap(), whole);
    assert_eq!(server.requests().len(), 1);
    Objects::open(&image, &bench.store()).unwrap().verify_all().unwrap();
}

#[test]
fn a_layer_that_disagrees_with_those_below_is_refused_by_its_number() {
    let bench = Bench::new();
    let (lower, _) = two_layers(Format::Estargz, &[5000]);
    let mut upper = Writer::new(Format::Estargz, &[5000]);
    upper.file("usr/empty/x", b"x");
    let upper = upper.finish();
    let server = Server::of(&[&lower, &upper]);
    let tables = [table(&server, &lower).unwrap(), table(&server, &upper).unwrap()];
    let store = Store::create(&bench.store()).unwrap();
    let error = build_layers(&tables, &MANIFEST, &bench.path("image"), &store).expect_err("a file is no directory");
    assert!(matches!(&error, BuildLayersError::Refused(said) if said.starts_with("layer 2, usr/empty/x: ")), "{error}");
    assert!(!bench.path("image").exists());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Files and chunks of any lengths, in either format, are read back.
    #[test]
    fn any_layer_is_read_back(
        lengths in prop::collection::vec(0_usize..60_000, 1..8),
        chunks in prop::collection::vec(1_usize..20_000, 1..4),
        is_zstd in any::<bool>(),
        ahead in prop_oneof![Just(0), Just(100_000_u64)],
        seed in any::<u32>(),
    ) {
        let format = if is_zstd { Format::ZstdChunked } else { Format::Estargz };
        let chunks: Vec<usize> = chunks.into_iter().map(|chunk| chunk.max(200)).collect();
        let bench = Bench::new();
        let mut writer = Writer::new(format, &chunks);
        let contents: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(number, length)| {
            noise(seed ^ u32::try_from(number).unwrap(), *length)
        }).collect();
        contents.iter().enumerate().for_each(|(number, bytes)| writer.file(&format!("{number}"), bytes));
        let layer = writer.finish();
        let server = Server::of(&[&layer]);
        image_of(&bench, &server, &[&layer], "image").unwrap();
        let missing = FetchOptions { from: Arc::<Server>::clone(&server), ahead_bytes: ahead, cache_bytes: None };
        let source = Source::open_with(&bench.path("image"), &bench.store(), None, Some(missing)).unwrap();
        for number in (0..contents.len()).rev() {
            prop_assert_eq!(&read(&source, &format!("{number}")).unwrap(), &contents[number]);
        }
        source.shared_objects().fetch_all(2, &AtomicBool::new(false), &|_, _| {}).unwrap();
        source.shared_objects().complete().unwrap();
        drop(source);
        let source = Source::open(&bench.path("image"), &bench.store(), None).unwrap();
        source.shared_objects().verify_all().unwrap();
    }

    /// A table that was changed anywhere gives an image without findings, or is refused.
    #[test]
    fn changed_tables_are_sound_or_refused(
        is_zstd in any::<bool>(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        let format = if is_zstd { Format::ZstdChunked } else { Format::Estargz };
        let mut writer = Writer::new(format, &[4096]);
        writer.dir("d/");
        writer.file("d/a", &noise(1, 9000));
        writer.link("l", "d/a");
        let layer = writer.finish_with(|mut json| {
            for (at, byte) in &changes {
                // What JSON consists of, more often than other bytes.
                const LIKELY: &[u8] = b"0123456789\"{}[]:,. -/aeioubcdegklrst";
                let byte = *LIKELY.get(usize::from(*byte)).unwrap_or(byte);
                *at.get_mut(&mut json) = byte;
            }
            json
        });
        let bench = Bench::new();
        let server = Server::of(&[&layer]);
        if image_of(&bench, &server, &[&layer], "image").is_ok() {
            let source = open(&bench, &server, "image", None);
            prop_assert_eq!(ferry_image::check(source.image()).findings, Vec::<String>::new());
            let objects = source.shared_objects();
            let _ = objects.fetch_all(1, &AtomicBool::new(false), &|_, _| {});
        }
    }
}
