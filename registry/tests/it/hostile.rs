//! Servers that lie, break off, send in circles or never end: each gets an error that says what is wrong, nothing of it is ever
//! seen, and the next try goes on.
use crate::common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Disk, Fake, Place, Reply, Way};
use ferry_image::{Algorithm, Image, Layout, Objects, Store, file_objects};
use ferry_registry::{Client, Limits, Options, PullOptions, Remote};
use serde_json::json;

/// The timeout for a silent server.
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn damaged_objects_are_named_and_not_kept() {
    let place = Place::new();
    let part = place.part();
    let (pack, bytes) = place.pack();
    // One byte in the middle of the pack is changed, in every range that contains it.
    let victim = bytes.len() / 2;
    place.fake.fault(move |request, mut reply| {
        if let (true, Some((from, to))) = (request.path.ends_with(&part), request.range())
            && (from..to).contains(&victim)
        {
            reply.body[victim - from] ^= 1;
        }
        reply
    });
    let said = place.refused("copy");
    assert!(said.contains("came damaged, and was not kept") && said.contains(&pack.to_string()), "{said}");
    let kept = fs::read(place.at("copy/packs").join(format!("{}.part", pack.hex()))).unwrap();
    assert_eq!(kept.len(), bytes.len());
    for (block, (kept, right)) in kept.chunks(4096).zip(bytes.chunks(4096)).enumerate() {
        assert!(kept == right || kept.iter().all(|byte| *byte == 0), "block {block} is neither right nor a hole");
    }
    let pulled = place.is_well("copy");
    assert!(pulled.fetched_bytes < place.built.data_bytes, "{pulled:?}");
}

/// What was fetched before is proved again: a bit behind an object that has flipped since is no part of it, and does not stay.
#[test]
fn damage_after_kept_objects_is_repaired() {
    let place = Place::new();
    let part = place.part();
    let (pack, bytes) = place.pack();
    place.fake.fault(move |request, mut reply| {
        if request.path.ends_with(&part) {
            reply.way = Way::Cut(reply.body.len() / 2);
        }
        reply
    });
    place.refused("copy");
    let path = place.at("copy/packs").join(format!("{}.part", pack.hex()));
    let kept = fs::read(&path).unwrap();
    let index = Store::open(&place.at("store")).unwrap().index(pack).unwrap();
    let is_kept = |object: &&ferry_image::Object| {
        let from = usize::try_from(object.block * 4096).unwrap();
        let to = from + usize::try_from(object.bytes).unwrap();
        !to.is_multiple_of(4096) && kept[from..to] == bytes[from..to]
    };
    let object = index.objects.iter().find(is_kept).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", object.block * 4096 + object.bytes).unwrap();
    place.is_well("copy");
    assert!(fs::read(path.with_extension("")).unwrap() == bytes);
}

/// Reads all objects of the pulled image.
fn read_objects(place: &Place, store: &str) -> Vec<Vec<u8>> {
    let image = Image::open(&place.at(&format!("{store}.img")), Some(place.built.digest)).unwrap();
    let objects = Objects::open(&image, &place.at(store)).unwrap();
    let read = |object: &ferry_image::FileObject| {
        let mut bytes = vec![0; usize::try_from(object.bytes).unwrap()];
        assert_eq!(objects.read_object(object, 0, &mut bytes).unwrap(), bytes.len());
        assert_eq!(objects.read_object(object, object.bytes, &mut [0]).unwrap(), 0);
        bytes
    };
    file_objects(&image).unwrap().iter().map(read).collect()
}

#[test]
fn damaged_objects_of_composefs_are_named_and_not_kept() {
    let place = Place::laid_out(Layout::Composefs { version: None });
    // Small objects, and the large one, whose name comes 40 files later.
    for victim in [700_000, 3_000_000] {
        place.fake.fault(move |request, mut reply| {
            if let (true, Some((from, to))) = (request.is_blob(), request.range())
                && (from..to).contains(&victim)
                && to > 600_000
            {
                reply.body[victim - from] ^= 1;
            }
            reply
        });
        let store = format!("copy-{victim}");
        let said = place.refused(&store);
        let image = place.built.digest.to_string();
        assert!(said.contains("came damaged, and was not kept") && said.contains(&image), "{said}");
        let mut kept = 0;
        for directory in fs::read_dir(place.at(&store).join("objects")).unwrap().map(|entry| entry.unwrap().path()) {
            assert!(directory.is_dir(), "{} was left", directory.display());
            for file in fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
                let name = [&directory, &file].map(|path| path.file_name().unwrap().to_str().unwrap()).concat();
                assert_eq!(Algorithm::Verity.of(&fs::read(&file).unwrap()).hex(), name);
                kept += 1;
            }
        }
        assert!(kept > 0, "what came before is kept");
        let pulled = place.is_well(&store);
        assert!(pulled.fetched_bytes < place.built.data_bytes, "{pulled:?}");
        assert_eq!(read_objects(&place, &store).iter().map(Vec::len).sum::<usize>() as u64, place.built.data_bytes);
    }
}

#[test]
fn missing_or_short_parts_of_composefs_are_reported() {
    let place = Place::laid_out(Layout::Composefs { version: None });
    let manifest = Arc::new(std::sync::Mutex::new(json!(null)));
    place.fake.edit(|found| *manifest.lock().unwrap() = found.clone());
    let right = manifest.lock().unwrap().clone();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        place.fake.edit(|found| {
            *found = right.clone();
            change(found);
        });
        place.refused("copy")
    };
    let size = right["layers"][1]["size"].as_u64().unwrap();
    assert_eq!(right["layers"].as_array().unwrap().len(), 2, "the image and one part: {right}");
    assert!(with(&|m| m["layers"].as_array_mut().unwrap().truncate(1)).contains("has no such pack"));
    assert!(with(&|m| m["layers"][1]["size"] = json!(size - 1)).contains("shorter than the pack"));
    let other = ferry_image::Digest::new(Algorithm::Verity, [7; 32]).to_string();
    assert!(with(&|m| m["layers"][1]["annotations"]["ferry.pack"] = json!(other)).contains("has no such pack"));
    place.fake.edit(|found| *found = right.clone());
    place.is_well("copy");
    assert_eq!(read_objects(&place, "copy").len(), common::FILES as usize + 1);
    // A second pull fetches nothing.
    assert_eq!(place.pull(&place.fake.remote(), "copy").unwrap().fetched_bytes, 0);
}

#[test]
fn damaged_metadata_and_indexes_are_refused() {
    let place = Place::new();
    for layer in [0, 1] {
        let target = Arc::new(std::sync::Mutex::new(String::new()));
        let seen = Arc::clone(&target);
        place.fake.edit(|manifest| {
            *target.lock().unwrap() = manifest["layers"][layer]["digest"].as_str().unwrap().into();
        });
        place.fake.fault(move |request, mut reply| {
            if request.path.ends_with(&*seen.lock().unwrap()) && request.method == "GET" {
                reply.body[17] ^= 1;
            }
            reply
        });
        let said = place.refused("copy");
        assert!(said.contains("came damaged"), "layer {layer}: {said}");
        place.fake.heal();
    }
    // The whole chain is right in itself, but it is another image than the one that was asked for.
    let other = ferry_image::Digest::new(Algorithm::Blake3, [7; 32]);
    let options = PullOptions { digest: Some(other), ..PullOptions::default() };
    let said = place.pull_with(&place.fake.remote(), "copy", &options).unwrap_err().to_string();
    assert!(said.contains(&format!("the image has the digest {}, not {other}", place.built.digest)), "{said}");
    // A manifest with a false digest does not match the image.
    place.fake.edit(|manifest| manifest["layers"][0]["annotations"]["ferry.digest"] = json!(other.to_string()));
    let said = place.pull_with(&place.fake.remote(), "copy", &options).unwrap_err().to_string();
    assert!(said.contains(&format!("has the digest {}, not {other}", place.built.digest)), "{said}");
    assert!(!place.at("copy.img").exists());
}

/// For a pull, and for a mount that fetches the metadata first.
#[test]
fn a_requested_tree_is_verified_before_the_image_is_published() {
    let place = Place::new();
    let tree = place.built.tree;
    let other = ferry_image::Digest::new(Algorithm::Tree, [7; 32]);
    let pull = |store: &str, digest| {
        let options = PullOptions { digest: Some(digest), ..PullOptions::default() };
        place.pull_with(&place.fake.remote(), store, &options)
    };
    let lazily = |store: &str, digest| {
        ferry_image::Store::create(&place.at(store)).unwrap();
        let image = place.at(&format!("{store}.img"));
        ferry_registry::pull_metadata(&place.fake.remote(), &image, &place.at(store), Some(digest)).map(drop)
    };
    let said = format!("the image has the digest {tree}, not {other}");
    for error in [pull("copy", other).unwrap_err(), lazily("lazy", other).unwrap_err()] {
        assert!(error.to_string().contains(&said), "{error}");
    }
    // One that says that it is the other tree, with a manifest that is right of it.
    place.claim_tree(other);
    let said = format!("has the digest {tree}, not {other}");
    for error in [pull("copy", other).unwrap_err(), lazily("lazy", other).unwrap_err()] {
        assert!(error.to_string().contains(&said), "{error}");
    }
    // Also where nobody asks for a digest: what a pull prints is so.
    let error = place.pull(&place.fake.remote(), "copy").unwrap_err();
    assert!(error.to_string().contains(&said), "{error}");
    assert!(!place.at("copy.img").exists() && !place.at("lazy.img").exists());
    place.claim_tree(tree);
    assert_eq!(pull("copy", tree).unwrap().digest, tree);
    lazily("lazy", tree).unwrap();
    assert!(place.at("lazy.img").exists());
}

#[test]
fn a_manifest_requested_by_digest_is_verified() {
    let place = Place::new();
    let pulled = place.pull(&place.fake.remote(), "copy").unwrap();
    let exact = format!("sha256:{}", pulled.manifest);
    place.fake.edit(|manifest| manifest["layers"][0]["size"] = json!(1));
    place.pull(&place.fake.remote_as(&exact, Duration::from_secs(60)), "exact").unwrap();
    place.fake.fault(|request, mut reply| {
        if request.is_manifest() {
            reply.body.push(b' ');
        }
        reply
    });
    let said = place.pull(&place.fake.remote_as(&exact, Duration::from_secs(60)), "other").unwrap_err().to_string();
    assert!(said.contains("it has the digest sha256:"), "{said}");
}

#[test]
fn wrong_sizes_are_detected() {
    let place = Place::new();
    let manifest = Arc::new(std::sync::Mutex::new(json!(null)));
    place.fake.edit(|found| *manifest.lock().unwrap() = found.clone());
    let with = |layer: usize, size: serde_json::Value| {
        let right = manifest.lock().unwrap().clone();
        place.fake.edit(|found| {
            *found = right;
            found["layers"][layer]["size"] = size;
        });
        place.refused("copy")
    };
    // The image, the index and a part, shorter, longer, and beyond all bounds.
    let size = |layer: usize| manifest.lock().unwrap()["layers"][layer]["size"].as_u64().unwrap();
    assert!(with(0, json!(size(0) - 1)).contains("came damaged"));
    // It is asked for a range that is longer than the blob, and says so by the range that it answers.
    let said = with(0, json!(size(0) + 1));
    assert!(said.contains("is not the requested range"), "{said}");
    assert!(with(0, json!(1_u64 << 40)).contains("the maximum is"));
    assert!(with(1, json!(size(1) - 1)).contains("came damaged"));
    assert!(with(1, json!(1_u64 << 50)).contains("the maximum is"));
    assert!(with(2, json!(size(2) - 4096)).contains("shorter than the pack"));
    assert!(with(2, json!(0)).contains("shorter than the pack"));
    assert!(with(2, json!(u64::MAX)).contains("a part of"));
    assert!(with(0, json!(0)).contains("came damaged"));
    let right = manifest.lock().unwrap().clone();
    place.fake.edit(|found| *found = right);
    place.is_well("copy");
}

#[test]
fn packs_missing_in_the_manifest_are_reported() {
    let place = Place::new();
    place.fake.edit(|manifest| manifest["layers"].as_array_mut().unwrap().truncate(1));
    let said = place.refused("copy");
    assert!(said.contains("has no such pack"), "{said}");
}

#[test]
fn endless_responses_are_aborted() {
    let place = Place::new();
    let endless = |_: &common::Request, reply: Reply| Reply { way: Way::Endless, ..reply };
    place
        .fake
        .fault(move |request, reply| if request.is_manifest() { endless(request, Reply::of(200, "")) } else { reply });
    assert!(place.refused("copy").contains("more than 4194304 bytes"));
    // Bytes after the range are not read: the correct bytes come first, and are repeated.
    place.fake.fault(move |request, reply| if request.is_blob() { endless(request, reply) } else { reply });
    place.pull(&place.fake.remote(), "endless").unwrap();
    place.is_whole("endless");
    let junk = |reply: Reply| Reply { body: Vec::new(), way: Way::Endless, ..reply };
    place.fake.fault(move |request, reply| if request.is_blob() { junk(reply) } else { reply });
    assert!(place.refused("copy").contains("came damaged"));
    // The same for the text of an error.
    place.fake.fault(|_, _| Reply { way: Way::Endless, ..Reply::of(403, "") });
    let said = place.refused("copy");
    assert!(said.contains("answers 403") && said.len() < 1000, "{said}");
}

#[test]
fn servers_without_ranges_are_accepted_and_wrong_ranges_are_refused() {
    let place = Place::new();
    let part = place.part();
    let whole = place.pack().1;
    let (name, bytes) = (part.clone(), whole.clone());
    place.fake.fault(move |request, reply| {
        if request.path.ends_with(&name) && request.method == "GET" { Reply::of(200, bytes.clone()) } else { reply }
    });
    place.pull(&place.fake.remote(), "plain").unwrap();
    place.is_whole("plain");
    for said in ["bytes 1-2/3", "", "bytes */5", "pages 0-1"] {
        let part = part.clone();
        place.fake.fault(move |request, mut reply| {
            if request.path.ends_with(&part) {
                reply.headers = vec![("content-range".into(), said.into())];
            }
            reply
        });
        let said = place.refused("copy");
        assert!(said.contains("is not the requested range"), "{said}");
    }
    place.is_well("copy");
}

#[test]
fn redirects_are_limited_and_leak_no_credentials() {
    let place = Place::new();
    // Blobs are elsewhere, as most registries have it; who we are is not told there.
    let other = {
        let fake = Fake::start();
        let from = place.fake.address;
        fake.fault(move |request, _| relay(from, request));
        fake
    };
    let to = other.address;
    let first = place.fake.address;
    place.fake.fault(move |request, reply| {
        if request.headers.contains_key("x-relay") {
            return reply;
        }
        if request.path == "/token" {
            assert_eq!(request.query, "service=s&scope=repository%3Aa%2Fb%3Apull");
            return Reply::of(200, r#"{"token": "t"}"#);
        }
        if request.headers.get("authorization").map(String::as_str) != Some("Bearer t") {
            let realm = format!("Bearer realm=\"http://{first}/token\",service=\"s\",scope=\"repository:a/b:pull\"");
            return Reply::of(401, "").with("www-authenticate", realm);
        }
        if request.is_blob() {
            return Reply::of(307, "").with("location", format!("http://{to}{}?sig=1", request.path));
        }
        reply
    });
    place.pull(&place.fake.remote(), "copy").unwrap();
    place.is_whole("copy");
    let relayed = other.requests();
    assert!(relayed.len() >= 3 && relayed.iter().all(|request| !request.headers.contains_key("authorization")));

    for (location, said) in [
        ("/v2/a/b/manifests/1", "more than 5 redirects"),
        ("http://registry.invalid/x", "--plain-http"),
        ("ftp://localhost/x", "--plain-http"),
        ("http://[", "without saying where to"),
    ] {
        place.fake.fault(move |_, _| Reply::of(302, "").with("location", location));
        let error = place.refused("other");
        assert!(error.contains(said), "{location}: {error}");
    }
    place.fake.fault(|_, _| Reply::of(301, ""));
    assert!(place.refused("other").contains("without saying where to"));
    place.fake.requests();
    place.fake.fault(|_, _| Reply::of(302, "").with("location", "/v2/a/b/manifests/1"));
    place.refused("other");
    assert_eq!(place.fake.requests().len(), 6);
}

/// Redirects to another server.
fn relay(server: std::net::SocketAddr, request: &common::Request) -> Reply {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(server).unwrap();
    let range = request.headers.get("range").map(|range| format!("range: {range}\r\n")).unwrap_or_default();
    write!(stream, "GET {} HTTP/1.1\r\nx-relay: 1\r\n{range}\r\n", request.path).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(all[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut reply = Reply::of(status, &all[end + 4..]);
    for line in head.lines().filter(|line| line.starts_with("content-range")) {
        reply = reply.with("content-range", line.split_once(": ").unwrap().1);
    }
    reply
}

#[test]
fn transient_errors_are_retried_and_others_are_not() {
    let place = Place::new();
    // Every response fails twice, in all possible ways.
    let count = AtomicUsize::new(0);
    place.fake.fault(move |_, reply| match count.fetch_add(1, Ordering::SeqCst) % 3 {
        0 => Reply::of(503, "later").with("retry-after", "0"),
        1 => Reply { way: Way::Cut(100), ..reply },
        _ => reply,
    });
    let options = PullOptions { jobs: 1, ..PullOptions::default() };
    let pulled = place.pull_with(&place.fake.remote(), "copy", &options).unwrap();
    assert_eq!(pulled.fetched_bytes, place.built.data_bytes, "each byte was counted once");
    place.is_whole("copy");

    for (status, tries) in [(503, 5), (404, 1), (403, 1), (400, 1), (418, 1)] {
        place.fake.requests();
        place.fake.fault(move |_, _| Reply::of(status, "no\r\n\u{1b}[2Jway").with("retry-after", "0"));
        let said = place.refused("other");
        assert_eq!(place.fake.requests().len(), tries, "{status}: {said}");
        match status {
            404 => assert!(said.contains("there is no image"), "{said}"),
            _ => assert!(said.contains(&format!("answers {status}: no")) && !said.contains('\u{1b}'), "{said}"),
        }
    }
    // The other transient errors, once each: five attempts take four seconds.
    for status in [500, 429] {
        place.fake.requests();
        let count = AtomicUsize::new(0);
        place.fake.fault(move |_, reply| match count.fetch_add(1, Ordering::SeqCst) {
            0 => Reply::of(status, "no"),
            1 => Reply::of(404, "gone"),
            _ => reply,
        });
        let said = place.refused("other");
        assert_eq!(place.fake.requests().len(), 2, "{status}: {said}");
    }
    // A response that continues an interrupted one counts as one attempt.
    let part = place.part();
    place.fake.fault(
        move |request, reply| {
            if request.path.ends_with(&part) { Reply { way: Way::Cut(1_100_000), ..reply } } else { reply }
        },
    );
    place.pull_with(&place.fake.remote(), "slow", &options).unwrap();
    place.is_whole("slow");
}

#[test]
fn a_blob_is_sent_again_after_a_server_error() {
    let place = Place::new();
    let part = place.part();
    let stumbles = part.clone();
    place.fake.fault(move |request, reply| {
        if request.method == "HEAD" && request.path.ends_with(&stumbles) { Reply::of(500, "") } else { reply }
    });
    let store = Store::create(&place.at("store")).unwrap();
    let (image, directory) = (place.at("image"), place.at("store"));
    let pushed = ferry_registry::push(&place.fake.remote(), &image, None, &store, &directory, 1, &|_, _| {}).unwrap();
    let bytes = place.pack().1.len() as u64;
    assert_eq!(pushed.sent_bytes, bytes, "the pack, and nothing else");
}

#[test]
fn a_silent_server_is_a_timeout() {
    let place = Place::new();
    place.fake.fault(|_, reply| Reply { way: Way::Silence, ..reply });
    let said = place.pull(&place.fake.remote_as("1", SHORT), "copy").unwrap_err();
    let said = format!("{said}");
    assert!(said.contains("timeout"), "{said}");
    assert_eq!(place.fake.requests().len(), 5);
    place.is_well("copy");
}

/// As one whose machine has vanished: the length of the rest gives it no time.
#[test]
fn a_server_that_falls_silent_in_a_long_reply_is_a_timeout() {
    const LONG: usize = 4 << 20;
    let place = Place::new();
    place.fake.fault(|_, reply| match reply.body.len() {
        LONG.. => Reply { way: Way::Stall(1000), ..reply },
        _ => reply,
    });
    let begin = Instant::now();
    let said = place.pull(&place.fake.remote_as("1", SHORT), "copy").unwrap_err().to_string();
    assert!(said.contains("timeout"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(LONG as u64 / (64 << 10)), "{:?}", begin.elapsed());
    place.is_well("copy");
}

#[test]
fn a_deadline_ends_running_requests() {
    let place = Place::new();
    place.fake.fault(|_, reply| Reply { way: Way::Silence, ..reply });
    let reference = format!("oci:{}/a/b:1", place.fake.address).parse().unwrap();
    let limits = Limits { deadline: Some(Instant::now() + SHORT), ..Limits::default() };
    let options = Options { limits, ..Options::default() };
    let remote = Arc::new(Remote::open(&reference, Client::new(options)).unwrap());
    let begin = Instant::now();
    place.pull(&remote, "copy").unwrap_err();
    // Long before the server has been silent for too long.
    assert!(begin.elapsed() < 20 * SHORT, "{:?}", begin.elapsed());
}

#[test]
fn invalid_tokens_and_foreign_realms_are_refused() {
    let place = Place::new();
    let address = place.fake.address;
    for (token, said) in [
        (Reply::of(200, "{}"), "no token"),
        (Reply::of(200, r#"{"token": "a\r\nb"}"#), "no token"),
        (Reply::of(200, r#"{"token": 5}"#), "no token"),
        (Reply::of(200, "<html>"), "no token"),
        (Reply { way: Way::Endless, ..Reply::of(200, "") }, "more than 65536 bytes"),
        (Reply::of(403, "go"), "answers 403"),
    ] {
        place.fake.fault(move |request, _| match request.path.as_str() {
            "/token" => token.clone(),
            _ => Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"http://{address}/token\"")),
        });
        let error = place.refused("copy");
        assert!(error.contains(said), "{error}");
    }
    for challenge in
        ["", "Bearer", "Bearer realm=\"nowhere\"", "Digest realm=\"x\"", "Basic realm=\"x\"", "Bearer ====\"\"\","]
    {
        place.fake.fault(move |_, _| Reply::of(401, "").with("www-authenticate", challenge));
        assert!(place.refused("copy").contains("answers 401"), "{challenge}");
    }
    place
        .fake
        .fault(|_, _| Reply::of(401, "").with("www-authenticate", "Bearer realm=\"http://registry.invalid/token\""));
    assert!(place.refused("copy").contains("--plain-http"));
    // A token that is refused is not requested repeatedly.
    place.fake.requests();
    place.fake.fault(move |request, _| match request.path.as_str() {
        "/token" => Reply::of(200, r#"{"token": "t"}"#),
        _ => Reply::of(401, "").with("www-authenticate", format!("Bearer realm=\"http://{address}/token\"")),
    });
    assert!(place.refused("copy").contains("answers 401"));
    assert_eq!(place.fake.requests().len(), 3);
}

/// A pull without disk space reports that, leaves no image, and continues from its partial data when there is space.
#[test]
fn a_pull_continues_after_a_full_disk() {
    for layout in [Layout::Flat, Layout::Composefs { version: None }] {
        let place = Place::laid_out(layout);
        let disk = Disk::at(place.at("full"), "4m");
        let said = place.refused("full");
        assert!(said.contains("No space left on device"), "{said}");
        place.fake.requests();
        disk.grow("64m");
        let pulled = place.is_well("full");
        // Of composefs's objects the large one may have been the first.
        let is_less = pulled.fetched_bytes < place.built.data_bytes;
        assert!(is_less || layout != Layout::Flat, "what came before is not fetched again: {pulled:?}");
    }
}
