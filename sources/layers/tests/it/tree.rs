//! What is found, and what is not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ferry_layers::{Options, reference_name};
use ferry_vfs::{
    Caller, CreateArgs, DirItem, DirOutput, DirRange, Entry, Errno, FileSystem, FileType, Ino, Name, OFlags,
};

use crate::common::Reply;
use crate::place::{Place, Tree, each_format, eventually, layers, noise, toc};
use crate::toc_layers::{Format, Layer, Writer, sha256};

/// Collects the names of a listing.
#[derive(Default)]
struct Names(Vec<(String, u64)>);

impl DirOutput for Names {
    fn fits(&self, _: &[u8]) -> bool {
        true
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        let name = String::from_utf8(item.name.to_vec()).unwrap();
        if let Some(entry) = entry {
            assert_eq!(entry.ino.0, item.ino, "{name}");
        }
        if !name.starts_with('.') {
            self.0.push((name, item.ino));
        }
    }
}

fn list(tree: &Tree, path: &[&str]) -> Vec<String> {
    let dir = tree.find(path).unwrap();
    let mut names = Names::default();
    let at = DirRange { ino: dir.ino, handle: Tree::handle(), offset: 0, plus: true };
    tree.0.readdir(&Caller::default(), &at, &mut names).unwrap();
    for (name, ino) in &names.0 {
        assert_eq!(tree.find(&[path, &[name]].concat()).unwrap().ino.0, *ino, "{name}");
    }
    names.0.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn layers_are_found_by_their_table_of_contents_and_by_their_blob() {
    each_format(|place| {
        let (tree, name) = (place.open(), place.name());
        for (number, layer) in place.layers.iter().enumerate() {
            let (blob, toc) = (sha256(&layer.blob), toc(layer));
            for digest in [&blob, &toc] {
                let at = [name.as_str(), digest];
                let info = tree.info(&at);
                assert_eq!(info["toc-digest"], *toc);
                assert_eq!(info["compressed-size"], layer.blob.len());
                assert_eq!(info["compression"], if layer.media_type.ends_with("zstd") { 4 } else { 2 });
                // Nothing proves that the archive has these files, so it is named only to those who need it.
                let diff = (digest == &blob).then(|| sha256(&layer.plain));
                assert_eq!(info.get("diff-digest").and_then(|digest| digest.as_str()), diff.as_deref());
                // Engines refuse other images with a blob of which they know only the compressed digest.
                let compressed = info.get("compressed-diff-digest").and_then(|digest| digest.as_str());
                assert_eq!(compressed, (digest == &blob).then_some(&*blob));
                assert_eq!(list(&tree, &at), ["diff", "info", "blob"]);
                let file = |path: &[&str]| tree.read(&[&at[..], &["diff"], path].concat());
                if number == 0 {
                    assert_eq!(list(&tree, &[name.as_str(), digest, "diff"]), ["below", "gone", "large", "replaced"]);
                    assert_eq!(file(&["below"]).unwrap(), b"from below");
                    assert_eq!(file(&["large"]).unwrap(), noise(1, 1_000_000));
                } else {
                    assert_eq!(file(&["above"]).unwrap(), noise(2, 5000));
                    assert_eq!(file(&["replaced", "new"]).unwrap(), b"is shown");
                    let whiteout = tree.attr(&[&at[..], &["diff", "gone"]].concat());
                    assert_eq!((whiteout.kind(), whiteout.rdev), (FileType::CharacterDevice, 0));
                    let dir = tree.find(&[&at[..], &["diff", "replaced"]].concat()).unwrap();
                    let opaque = tree.0.getxattr(&Caller::default(), dir.ino, b"trusted.overlay.opaque");
                    assert_eq!(opaque.unwrap(), b"y");
                    // The mark for other users would be copied up with the directory.
                    let other = tree.0.getxattr(&Caller::default(), dir.ino, b"user.overlay.opaque");
                    assert_eq!(other, Err(Errno::NODATA));
                }
            }
        }
        assert_eq!(tree.count("layer_mounts"), 4);
        assert!(tree.count("image_verified_bytes_total") >= 1_005_000);
    });
}

/// One layer without attributes must not make the kernel ask for none any more.
#[test]
fn missing_attributes_return_enodata() {
    let place = Place::of(Format::Estargz);
    let (tree, name) = (place.open(), place.name());
    let toc = toc(&place.layers[0]);
    for path in [&[][..], &[&*name], &[&*name, &*toc], &[&*name, &*toc, "info"], &[&*name, &*toc, "diff", "below"]] {
        let ino = tree.find(path).unwrap().ino;
        let found = tree.0.getxattr(&Caller::default(), ino, b"trusted.overlay.opaque");
        assert_eq!(found, Err(Errno::NODATA), "{path:?}");
        assert_eq!(tree.0.listxattr(&Caller::default(), ino).unwrap(), b"", "{path:?}");
    }
}

#[test]
fn invalid_names_do_not_exist_and_request_nothing() {
    let place = Place::of(Format::ZstdChunked);
    let (tree, name) = (place.open(), place.name());
    for path in [
        &["x"][..],
        &[&*reference_name("http://h/a:1")],
        &[&*name, "use"],
        &[&*name, "sha256:00"],
        &[&*name, &toc(&place.layers[0])[7..]],
    ] {
        assert_eq!(tree.find(path).unwrap_err(), Errno::NOENT, "{path:?}");
    }
    assert!(list(&tree, &[]).is_empty() && list(&tree, &[&name]).is_empty());
    assert!(place.fake.requests().is_empty());
    let cx = Caller::default();
    assert_eq!(tree.0.lookup(&cx, Ino(1 << 41), Name::new(b"diff").unwrap()), Err(Errno::STALE));
    assert_eq!(tree.0.getattr(&cx, Ino((1 << 63) | 99), None), Err(Errno::STALE));
}

#[test]
fn layers_without_a_table_of_contents_do_not_exist() {
    let mut layers = layers(Format::Estargz);
    layers[0].annotations.clear();
    let place = Place::new(layers);
    let (tree, name) = (place.open(), place.name());
    for digest in [sha256(&place.layers[0].blob), sha256(b"of nothing")] {
        assert_eq!(tree.find(&[&name, &digest]).unwrap_err(), Errno::NOENT);
    }
    assert_eq!(tree.read(&[&name, &toc(&place.layers[1]), "diff", "above"]).unwrap(), noise(2, 5000));
    let whole = |path: &str| path.ends_with(&sha256(&place.layers[0].blob));
    assert!(!place.fake.requests().iter().any(|request| whole(&request.path)), "the layer was not requested");
    assert_eq!(
        tree.find(&[&reference_name(&place.reference.replace(":1", ":none")), &toc(&place.layers[1])]).unwrap_err(),
        Errno::NOENT
    );
}

/// Layers as a registry that lies has them.
fn damaged(change: impl FnOnce(&mut Layer)) -> Place {
    let mut layers = layers(Format::ZstdChunked);
    change(&mut layers[1]);
    Place::new(layers)
}

#[test]
fn damage_is_refused() {
    // A table of contents with another digest than the engine looks for.
    let place = damaged(|layer| {
        let key = "io.github.containers.zstd-chunked.manifest-checksum";
        layer.annotations.insert(key.into(), sha256(b"another one"));
    });
    let tree = place.open();
    assert_eq!(tree.find(&[&place.name(), &sha256(b"another one")]).unwrap_err(), Errno::NOENT);
    // A chunk with other bytes.
    let place = damaged(|layer| {
        let at = layer.blob.windows(8).position(|bytes| bytes == &noise(2, 5000)[100..108]).unwrap();
        layer.blob[at] ^= 1;
    });
    let (tree, name) = (place.open(), place.name());
    let toc = toc(&place.layers[1]);
    assert_eq!(tree.read(&[&name, &toc, "diff", "above"]).unwrap_err(), Errno::IO);
    assert_eq!(tree.read(&[&name, &toc, "diff", "replaced", "new"]).unwrap(), b"is shown");
    // A manifest whose configuration names other layers.
    place.fake.edit(|manifest| drop(manifest["layers"].as_array_mut().unwrap().pop()));
    drop(tree);
    std::fs::remove_dir_all(place.root()).unwrap();
    let tree = place.open();
    assert_eq!(tree.find(&[&name, &crate::place::toc(&place.layers[0])]).unwrap_err(), Errno::NOENT);
}

/// Stops answers until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }

    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

#[test]
fn a_lookup_ends_in_time_and_a_later_one_finds_the_layer() {
    let place = Place::of(Format::Estargz);
    let gate = Arc::<Gate>::default();
    let passed = Arc::clone(&gate);
    place.fake.fault(move |_, reply| {
        passed.pass();
        reply
    });
    let tree = place.open_with(Options { lookup_timeout: Duration::from_millis(50), ..Options::default() });
    let (name, toc) = (place.name(), toc(&place.layers[0]));
    // Without the limit this would wait for the gate for ever.
    assert_eq!(tree.find(&[&name, &toc]).unwrap_err(), Errno::NOENT);
    gate.open();
    // The first lookup goes on, and its outcome counts.
    eventually(|| tree.find(&[&name, &toc]).ok());
    assert_eq!(tree.read(&[&name, &toc, "diff", "below"]).unwrap(), b"from below");
}

#[test]
fn failures_expire_and_each_manifest_is_fetched_once() {
    let place = Place::of(Format::Estargz);
    let is_down = Arc::new(AtomicBool::new(true));
    let down = Arc::clone(&is_down);
    place.fake.fault(move |_, reply| if down.load(Ordering::SeqCst) { Reply::of(403, "no") } else { reply });
    let (tree, name) = (place.open(), place.name());
    let names: Vec<_> = place.layers.iter().map(toc).collect();
    for toc in &names {
        assert_eq!(tree.find(&[&name, toc]).unwrap_err(), Errno::NOENT);
    }
    assert!(place.fake.requests().iter().filter(|request| request.is_manifest()).count() <= 1);
    is_down.store(false, Ordering::SeqCst);
    eventually(|| tree.find(&[&name, &names[0]]).ok());
    place.fake.requests();
    tree.find(&[&name, &names[1]]).unwrap();
    assert!(!place.fake.requests().iter().any(|request| request.is_manifest()));
}

#[test]
fn the_blob_is_that_of_the_registry() {
    each_format(|place| {
        let (tree, name) = (place.open(), place.name());
        let layer = &place.layers[1];
        let path = [name.as_str(), &toc(layer), "blob"];
        assert_eq!(tree.attr(&path).size, layer.blob.len() as u64);
        assert_eq!(tree.read(&path).unwrap(), layer.blob);
        place.fake.fault(|request, mut reply| {
            if request.is_blob() {
                reply.body.iter_mut().for_each(|byte| *byte ^= 1);
            }
            reply
        });
        let lower = &place.layers[0];
        tree.find(&[&name, &toc(lower)]).unwrap_err();
        place.fake.heal();
        tree.find(&[&name, &toc(lower)]).unwrap();
        place.fake.fault(|request, mut reply| {
            if request.is_blob() {
                reply.body.iter_mut().for_each(|byte| *byte ^= 1);
            }
            reply
        });
        assert_eq!(tree.read(&[&name, &toc(lower), "blob"]).unwrap_err(), Errno::IO);
        assert_eq!(tree.read(&path).unwrap(), layer.blob, "it is here already");
    });
}

/// podman push and podman save failed when the tag named another image.
#[test]
fn the_blob_is_had_after_the_tag_has_moved_and_is_dropped_when_unread() {
    let place = Place::of(Format::ZstdChunked);
    let (name, layer) = (place.name(), &place.layers[0]);
    let toc = toc(layer);
    let tree = place.open();
    let dir = tree.find(&[&name, &toc]).unwrap().ino;
    let made =
        tree.0.create(&Caller::default(), dir, Name::new(b"use").unwrap(), &CreateArgs::default(), OFlags::WRONLY);
    assert_eq!(made.unwrap_err(), Errno::NOENT);
    drop(tree);
    place.tag("1", &place.layers[1..]);
    let fetches =
        || place.fake.requests().iter().filter(|request| request.path.ends_with(&sha256(&layer.blob))).count();
    for (blob_lifetime, expected) in [(Duration::from_secs(600), 1), (Duration::ZERO, 2)] {
        let tree = place.open_with(Options { blob_lifetime, ..Options::default() });
        fetches();
        for _ in 0..2 {
            assert_eq!(tree.read(&[&name, &toc, "blob"]).unwrap(), layer.blob);
        }
        assert_eq!(fetches(), expected);
    }
}

/// After a restart, what was read is read without the registry.
#[test]
fn fetched_layers_outlive_the_process_while_they_are_used() {
    let place = Place::of(Format::ZstdChunked);
    let (name, toc) = (place.name(), toc(&place.layers[0]));
    let cx = Caller::default();
    let tell_use = |tree: &Tree| {
        let dir = tree.find(&[&name, &toc]).unwrap().ino;
        let made = tree.0.create(&cx, dir, Name::new(b"use").unwrap(), &CreateArgs::default(), OFlags::WRONLY);
        assert_eq!(made.unwrap_err(), Errno::NOENT, "as engines expect it");
    };
    let tell_end = |tree: &Tree| {
        let image = tree.find(&[&name]).unwrap().ino;
        assert_eq!(tree.0.rmdir(&cx, image, Name::new(toc.as_bytes()).unwrap()), Err(Errno::NOENT));
    };
    let tree = place.open();
    assert_eq!(tree.read(&[&name, &toc, "diff", "large"]).unwrap(), noise(1, 1_000_000));
    // Let go and used again, in one process; found, created, let go.
    tell_use(&tree);
    tell_end(&tree);
    tell_use(&tree);
    tell_use(&tree);
    tell_end(&tree);
    drop(tree);
    place.fake.fault(|_, _| Reply::of(403, "no"));
    place.fake.requests();
    let tree = place.open();
    assert_eq!(tree.read(&[&name, &toc, "diff", "large"]).unwrap(), noise(1, 1_000_000));
    assert!(place.fake.requests().is_empty());
    assert!(place.stored_bytes() >= 1_000_000);
    tell_end(&tree);
    drop(tree);
    let tree = place.open();
    assert_eq!(place.stored_bytes(), 0, "nothing uses it");
    assert_eq!(tree.find(&[&name, &toc]).unwrap_err(), Errno::NOENT);
}

/// containerd/stargz-snapshotter pull request 433: a store that is mounted for months grew for months.
#[test]
fn unused_data_are_removed_while_the_store_is_open() {
    let place = Place::of(Format::ZstdChunked);
    let tree = place.open_with(Options { removal_delay: Duration::from_millis(20), ..Options::default() });
    let (cx, name, new) = (Caller::default(), place.name(), Name::new(b"use").unwrap());
    let tocs: Vec<_> = place.layers.iter().map(toc).collect();
    let image = tree.find(&[&name]).unwrap().ino;
    let layers: Vec<_> = tocs.iter().map(|toc| tree.find(&[&name, toc]).unwrap().ino).collect();
    let begin = |number: usize| {
        let begun = tree.0.create(&cx, layers[number], new, &CreateArgs::default(), OFlags::WRONLY);
        assert_eq!(begun.unwrap_err(), Errno::NOENT);
    };
    let end = |number: usize| {
        assert_eq!(tree.0.rmdir(&cx, image, Name::new(tocs[number].as_bytes()).unwrap()), Err(Errno::NOENT));
    };
    let large = || tree.read(&[&name, &tocs[0], "diff", "large"]).unwrap() == noise(1, 1_000_000);
    let above = || tree.read(&[&name, &tocs[1], "diff", "above"]).unwrap() == noise(2, 5000);
    (0..2).for_each(begin);
    assert!(large() && above());
    end(0);
    std::thread::sleep(Duration::from_millis(300));
    place.fake.requests();
    assert!(large() && above() && place.fake.requests().is_empty(), "both are open");
    assert!(place.stored_bytes() >= 1_000_000);
    tree.0.forget(layers[0], u64::MAX);
    eventually(|| (place.stored_bytes() < 500_000).then_some(()));
    assert!(above() && place.fake.requests().is_empty(), "it is used");
    assert_eq!(tree.count("layer_mounts"), 1);
    // It can be had again.
    assert!(large() && !place.fake.requests().is_empty());
    assert!(place.stored_bytes() >= 1_000_000);
    tree.0.forget(layers[1], u64::MAX);
    end(1);
    eventually(|| (place.root().join("layers").read_dir().unwrap().count() == 1).then_some(()));
    assert!(large() && place.fake.requests().is_empty(), "it is open");
}

#[test]
fn changes_are_refused() {
    let place = Place::of(Format::Estargz);
    let (tree, name, cx) = (place.open(), place.name(), Caller::default());
    let at = [name.as_str(), &toc(&place.layers[0])];
    let diff = tree.find(&[&at[..], &["diff"]].concat()).unwrap().ino;
    let file = tree.find(&[&at[..], &["diff", "below"]].concat()).unwrap().ino;
    let new = Name::new(b"use").unwrap();
    for dir in [Ino::ROOT, tree.find(&at[..1]).unwrap().ino, diff] {
        let args = CreateArgs::default();
        assert_eq!(tree.0.create(&cx, dir, new, &args, OFlags::WRONLY).unwrap_err(), Errno::ROFS);
        assert_eq!(tree.0.mkdir(&cx, dir, new, &args), Err(Errno::ROFS));
        assert_eq!(tree.0.unlink(&cx, dir, new), Err(Errno::ROFS));
        assert_eq!(tree.0.rmdir(&cx, dir, new), Err(Errno::ROFS));
    }
    // podman's copies for other users fail so, and not with a puzzle.
    assert_eq!(tree.0.setattr(&cx, file, None, &ferry_vfs::SetAttr::default()), Err(Errno::ROFS));
    assert_eq!(tree.0.open(&cx, file, OFlags::RDWR), Err(Errno::ROFS));
    assert_eq!(
        tree.0.open(&cx, tree.find(&[&at[..], &["info"]].concat()).unwrap().ino, OFlags::WRONLY),
        Err(Errno::ROFS)
    );
}

/// The number of open layers has a bound, and those that clients use stay.
#[test]
fn unused_layers_are_closed() {
    const IMAGES: u32 = 6;
    let place = Place::of(Format::Estargz);
    let mut tocs = Vec::new();
    for number in 0..IMAGES {
        let mut writer = Writer::new(Format::Estargz, &[4 << 20]);
        writer.file("number", &number.to_le_bytes());
        let layer = writer.finish();
        place.tag(&format!("n{number}"), std::slice::from_ref(&layer));
        tocs.push(toc(&layer));
    }
    let name = |number: u32| reference_name(&place.reference.replace(":1", &format!(":n{number}")));
    let small = place.open_with(Options { memory_bytes_max: 1000, ..Options::default() });
    assert_eq!(small.find(&[&name(0), &tocs[0]]).unwrap_err(), Errno::NOENT, "it takes too much memory");
    assert_eq!(small.count("layer_mounts"), 0);
    drop(small);
    let tree = place.open_with(Options { layers_max: 4, ..Options::default() });
    let find = |number: u32| tree.find(&[&name(number), &tocs[number as usize]]);
    let held: Vec<_> = (0..4).map(|number| find(number).unwrap().ino).collect();
    assert_eq!(find(4).unwrap_err(), Errno::NOENT, "all are in use");
    assert_eq!(tree.count("layer_mounts"), 4);
    tree.0.forget(held[1], 1);
    find(4).unwrap();
    assert_eq!(tree.0.getattr(&Caller::default(), held[1], None), Err(Errno::STALE));
    for (number, ino) in held.iter().enumerate().filter(|(number, _)| *number != 1) {
        tree.0.getattr(&Caller::default(), *ino, None).unwrap();
        let read = tree.read(&[&name(u32::try_from(number).unwrap()), &tocs[number], "diff", "number"]).unwrap();
        assert_eq!(read, u32::try_from(number).unwrap().to_le_bytes());
    }
    assert_eq!(tree.count("layer_mounts"), 4);
}
