//! What is stored beside container images: converted images, lists of files to fetch first; and what a snapshotter asks for.

use crate::common::{self, Fake, ONCE, Reply, Request, sha256};
use crate::layers::{INDEX, MANIFEST, Place, is_layer, is_right, layers, noise};
use crate::toc_layers::{Format, Writer};

use std::fs;
use std::sync::Arc;

use std::sync::atomic::AtomicBool;

use ferry_image::{Digest, FetchOptions, Image, Objects, Store, Trace};
use ferry_registry::{
    Client, ConvertOptions, LIST_BYTES_MAX, LazyOptions, Options, PullOptions, Reference, Remote, convert, list_beside,
    pull_lazily, pull_trace, push_trace,
};
use ferry_vfs::Name;
use serde_json::{Value, json};

const IN_ANY_ORDER: ConvertOptions = ConvertOptions { order: None, jobs: 2 };

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
            convert(&place.fake.remote(), &place.at(&format!("{name}.img")), &place.at(name), &IN_ANY_ORDER, &|_, _| {})
                .unwrap()
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

/// A machine that has the image fetched would fetch such packs to their end.
#[test]
fn converted_images_have_no_packs_that_are_mostly_of_other_images() {
    let place_of = |files: &[(&str, Vec<u8>)]| {
        let mut layer = Writer::new(Format::Estargz, &[4 << 20]);
        files.iter().for_each(|(name, bytes)| layer.file(name, bytes));
        Place::new(vec![layer.finish()])
    };
    let (library, data) = (noise(1, 200_000), noise(2, 6_000_000));
    let places = [
        place_of(&[("library", library.clone()), ("data", data.clone())]),
        place_of(&[("library", library.clone()), ("other", noise(3, 1_000_000))]),
        place_of(&[("data", data), ("more", noise(4, 1_000_000))]),
    ];
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("store");
    drop(Store::create(&store).unwrap());
    let images = [0, 1, 2].map(|number| {
        let path = directory.path().join(number.to_string());
        let done = convert(&places[number].fake.remote(), &path, &store, &IN_ANY_ORDER, &|_, _| {}).unwrap();
        let image = Image::open(&path, None).unwrap();
        Objects::open(&image, &store).unwrap().verify_all().unwrap();
        let packs: Vec<Digest> = image.packs().iter().map(|pack| pack.name).collect();
        (packs, done.sent_bytes.unwrap())
    });
    let [(first, _), (second, second_bytes), (third, third_bytes)] = images;
    assert!(!second.iter().any(|pack| first.contains(pack)), "it needs 200 KB of 6 MB");
    assert!((1_200_000..2_000_000).contains(&second_bytes), "{second_bytes}");
    assert!(first.iter().all(|pack| third.contains(pack)), "it needs nearly all");
    // Another repository lacks what it shares.
    assert!(third_bytes > 7_000_000, "{third_bytes}");
}

/// A start needs the files of the list: they are a pack that is fetched first, and no other pack has them.
#[test]
fn converted_images_have_the_order_of_a_list() {
    let place = Place::new(layers(Format::Estargz));
    drop(Store::create(&place.at("own")).unwrap());
    let convert = |list: &[&str]| {
        let mut order = Trace::default();
        list.iter().for_each(|path| _ = order.add(path.as_bytes()));
        let options = ConvertOptions { order: Some(order).filter(|order| !order.is_empty()), jobs: 2 };
        convert(&place.fake.remote(), &place.at("own.img"), &place.at("own"), &options, &|_, _| {})
    };
    let any = convert(&[]).unwrap();
    let list = ["/large", "/above", "/nowhere", "/3"];
    let ordered = convert(&list).unwrap();
    assert_eq!(ordered.digest, any.digest, "it is the same tree");
    assert!(ordered.manifest != any.manifest && ordered.sent_bytes.is_some());
    assert_eq!(convert(&list).unwrap().manifest, ordered.manifest, "the same order changes nothing");
    assert_eq!(convert(&[]).unwrap().manifest, ordered.manifest, "it is there");
    let said = convert(&["/nowhere"]).unwrap_err().to_string();
    assert!(said.contains("has none of the files in the list"), "{said}");

    let lazily = LazyOptions { trusts_converted: true, ..LazyOptions::default() };
    let remote = place.fake.remote();
    let (path, store) = (place.at("lazy.img"), place.at("lazy"));
    drop(Store::create(&store).unwrap());
    place.fake.requests();
    let (found, packs) = pull_lazily(&remote, &path, &store, lazily).unwrap();
    assert!(found.from.ends_with(&format!("@sha256:{}", ordered.manifest)), "the newest is used: {}", found.from);
    let image = Image::open(&path, None).unwrap();
    let bytes =
        |ahead| image.packs().iter().filter(|pack| pack.ahead == ahead).map(|pack| pack.blocks * 4096).sum::<u64>();
    // The blocks of these three files, and of 28 others and what eStargz adds.
    assert_eq!(bytes(true), (489 + 2 + 3) * 4096);
    assert!((28 * 3..28 * 3 + 3).contains(&(bytes(false) / 4096)), "{}", bytes(false));
    let missing = FetchOptions { from: packs, ahead_bytes: 0, cache_bytes: None };
    let objects = Objects::open_with(&image, &store, Some(missing)).unwrap();
    place.fake.requests();
    let mut fetched = 0;
    objects.fetch_first(1, &AtomicBool::new(false), &|_, all| assert!(all > 2_000_000)).unwrap();
    for request in place.fake.requests().iter().filter(|request| request.is_blob()) {
        let (from, to) = request.range().unwrap();
        fetched += to - from;
    }
    assert!((2_000_000..2_024_000).contains(&fetched), "{fetched}: nothing but the first pack");
    let at_once = convert(&["/3"]).unwrap();
    assert_eq!(convert(&[]).unwrap().manifest, at_once.manifest, "the newest is used, also of one second");
    place.fake.fault(|_, _| Reply::of(500, "gone"));
    let source = ferry_image::Source::open(&place.at("own.img"), &place.at("own"), None).unwrap();
    is_right(&source);
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
    let converted = convert(&remote(), &place.at("own.img"), &place.at("own"), &IN_ANY_ORDER, &|_, _| {}).unwrap();
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

/// artifacthub/hub issue 4785, and others: registries that have no lists of referrers refuse in many ways.
#[test]
fn registries_that_refuse_lists_of_referrers_have_the_list_of_a_tag() {
    let busy = Fake::start();
    busy.fault(|_, _| Reply::of(429, "later"));
    let elsewhere = format!("http://{}/x", busy.address);
    let refuse = |place: &Place, reply: &Reply| {
        let refused = reply.clone();
        place.fake.fault(move |request, reply| match request.path.contains("/referrers/") {
            true => refused.clone(),
            false => reply,
        });
    };
    let convert = |place: &Place, name: &str| {
        drop(Store::create(&place.at(name)).unwrap());
        convert(&place.fake.remote(), &place.at(&format!("{name}.img")), &place.at(name), &IN_ANY_ORDER, &|_, _| {})
    };
    let page = || Reply::of(200, "<html>Sign in</html>").with("content-type", "Text/HTML; charset=utf-8");
    let people = Fake::start();
    people.fault(move |_, _| page());
    let sign_in = format!("http://{}/login", people.address);
    for reply in [
        Reply::of(303, "").with("location", elsewhere),
        Reply::of(406, ""),
        Reply::of(401, ""),
        page(),
        Reply::of(302, "").with("location", sign_in),
    ] {
        let place = Place::new(layers(Format::Estargz));
        refuse(&place, &reply);
        let first = convert(&place, "first").unwrap();
        let asked = place.fake.requests();
        let accepts = |request: &Request| request.headers.get("accept").is_some_and(|accepted| accepted == INDEX);
        assert!(asked.iter().filter(|request| request.path.contains("/referrers/")).all(accepts), "{asked:?}");
        let source = place.open(&place.fake.remote(), "by-digest", Some(first.digest)).unwrap();
        assert_eq!(source.image().tree(), Some(first.digest));
    }
    // Another refusal is an error, unless there is such a list.
    let place = Place::new(layers(Format::Estargz));
    refuse(&place, &Reply::of(418, ""));
    assert!(convert(&place, "refused").unwrap_err().to_string().contains("418"));
    place.fake.heal();
    let first = convert(&place, "first").unwrap();
    refuse(&place, &Reply::of(418, ""));
    let source = place.open(&place.fake.remote(), "by-digest", Some(first.digest)).unwrap();
    assert_eq!(source.image().tree(), Some(first.digest));
}

#[test]
fn all_pages_of_a_list_of_referrers_are_read() {
    let place = Place::new(layers(Format::Estargz));
    place.fake.list_referrers();
    drop(Store::create(&place.at("first")).unwrap());
    let convert = || {
        convert(&place.fake.remote(), &place.at("first.img"), &place.at("first"), &IN_ANY_ORDER, &|_, _| {}).unwrap()
    };
    let first = convert();
    let page = |link: String| {
        let empty = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": []});
        Reply::of(200, empty.to_string()).with("link", link)
    };
    place.fake.fault(move |request, reply| match request.path.contains("/referrers/") {
        true if !request.query.contains("page=2") => page(format!("<{}?page=2>; rel=\"next\"", request.path)),
        _ => reply,
    });
    let source = place.open(&place.fake.remote(), "by-digest", Some(first.digest)).unwrap();
    assert_eq!(source.image().tree(), Some(first.digest));
    // Not endlessly, and not elsewhere.
    for (link, count) in [("?", 16), ("http://127.0.0.1:1/", 1)] {
        place.fake.fault(move |request, reply| match request.path.contains("/referrers/") {
            true => page(format!("<{link}>; rel=next")),
            false => reply,
        });
        place.fake.requests();
        assert!(convert().sent_bytes.is_some(), "none is found");
        let asked = place.fake.requests();
        assert_eq!(asked.iter().filter(|request| request.path.contains("/referrers/")).count(), count, "{link}");
    }
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

/// A list of referrers that is none is an error, and so is what another writer leaves of it.
#[test]
fn lists_of_referrers_that_are_wrong_are_refused() {
    let place = Place::new(layers(Format::Estargz));
    let subject = sha256(place.fake.tagged("1").unwrap().to_string().as_bytes());
    drop(Store::create(&place.at("store")).unwrap());
    let convert = || convert(&place.fake.remote(), &place.at("image"), &place.at("store"), &IN_ANY_ORDER, &|_, _| {});
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
    let said =
        ferry_registry::convert(&images.fake.remote(), &place.at("i"), &place.at("store"), &IN_ANY_ORDER, &|_, _| {});
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
    // The converted image has all layers; it is used only if it is trusted.
    let _held = Store::create(&place.at("own")).unwrap();
    convert(&place.fake.remote(), &place.at("own.img"), &place.at("own"), &IN_ANY_ORDER, &|_, _| {}).unwrap();
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
