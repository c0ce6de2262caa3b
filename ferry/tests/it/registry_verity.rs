//! Images that were built with `--verity`, pushed and pulled: their packs have the fs-verity digests that the image names, whatever the
//! server or the store says. What the kernel does with them is tried in a guest (`tests/tests/it/image_verity.rs`).
#![cfg(feature = "registry")]
use crate::common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::images::{Kind, Place, Target, json, number, text};
use common::{refused, run};
use ferry_image::{Algorithm, Digest, Image, Index, Store};

/// The image's only pack.
fn pack(place: &Place) -> (Digest, Index) {
    let image = Image::open(&place.at("image"), None).unwrap();
    let [pack] = image.packs() else { panic!("{:?}", image.packs()) };
    (pack.name, Store::open(&place.at("store")).unwrap().index(pack.name).unwrap())
}

fn pack_in(place: &Place, store: &str) -> PathBuf {
    place.at(store).join("packs").join(pack(place).0.hex())
}

/// A byte that fills a block behind an object, and one of that object.
fn places(index: &Index) -> (u64, u64) {
    let object = index.objects.iter().rfind(|object| object.bytes % 4096 != 0).unwrap();
    (object.block * 4096 + object.bytes, object.block * 4096)
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// The pack as the server has it.
fn on_server(place: &Place) -> PathBuf {
    let bytes = fs::metadata(pack_in(place, "store")).unwrap().len();
    let mut find = Command::new("find");
    let found = text(find.arg(place.at("server")).args(["-type", "f", "-size", &format!("{bytes}c")]));
    let [path] = found.lines().collect::<Vec<_>>()[..] else { panic!("{found:?}") };
    path.into()
}

/// That what was pulled is what was built, and the pack has the digest that the image names.
fn is_right(place: &Place, store: &str) {
    place.is_same(store);
    let (name, built) = pack(place);
    let bytes = fs::read(pack_in(place, store)).unwrap();
    assert!(bytes == fs::read(pack_in(place, "store")).unwrap());
    let index = Store::open(&place.at(store)).unwrap().index(name).unwrap();
    assert_eq!((index.verity, index.objects), (Some(Algorithm::Verity.of(&bytes)), built.objects));
}

fn there_and_back(kind: Kind) {
    let place = Place::for_verity();
    let Some(target) = Target::start(kind, &place.at("server")) else { return };
    let digest = place.build();
    assert_eq!(json(&mut place.push(&target))["digest"], digest.as_str());
    let pull = |store: &str| {
        let mut line = place.pull(&target, store);
        line.args(["--digest", &digest]);
        line
    };
    json(&mut pull("copy"));
    is_right(&place, "copy");
    assert_eq!(number(&json(&mut pull("copy")), "new_bytes"), 0);

    // A server that has something else behind an object, where nothing is.
    let (padding, object) = places(&pack(&place).1);
    let blob = on_server(&place);
    flip(&blob, padding);
    json(&mut pull("lied"));
    is_right(&place, "lied");
    // And one that has something else in it.
    flip(&blob, object);
    let said = refused(1, &mut pull("wrong"));
    assert!(said.contains("came damaged, and was not kept") && !place.at("wrong.img").exists(), "{said}");
    flip(&blob, object);
    json(&mut pull("wrong"));
    is_right(&place, "wrong");
}

#[test]
fn packs_for_verity_go_to_a_registry_and_back() {
    there_and_back(Kind::Oci);
}

#[test]
fn packs_for_verity_go_to_an_s3_store_and_back() {
    there_and_back(Kind::S3);
}

/// Padding is known to be zeros, so no server is needed.
#[test]
fn flipped_bits_in_padding_are_repaired_without_a_server() {
    let place = Place::for_verity();
    let Some(target) = Target::start(Kind::Oci, &place.at("server")) else { return };
    place.build();
    json(&mut place.push(&target));
    json(&mut place.pull(&target, "copy"));
    let verify = |words: &[&str]| {
        let mut line = place.command("verify", "copy");
        let output = run(target.set(&mut line).arg(place.at("copy.img")).args(words));
        let said = String::from_utf8(output.stdout).unwrap() + std::str::from_utf8(&output.stderr).unwrap();
        (output.status.code(), said)
    };
    let (padding, object) = places(&pack(&place).1);
    flip(&pack_in(&place, "copy"), padding);
    let (status, said) = verify(&[]);
    assert!(status == Some(4) && said.contains("is damaged"), "{said}");
    let (status, said) = verify(&["--repair"]);
    assert!(status == Some(0) && said.contains("1 objects were damaged; 1 of them were repaired"), "{said}");
    is_right(&place, "copy");

    flip(&pack_in(&place, "copy"), padding);
    flip(&pack_in(&place, "copy"), object);
    let (status, said) = verify(&["--repair"]);
    assert!(status == Some(4) && said.contains("1 objects were damaged; 0 of them"), "{said}");
    let (status, said) = verify(&["--repair", "--from", &target.reference]);
    assert!(status == Some(0) && said.contains("1 objects were damaged; 1 of them"), "{said}");
    is_right(&place, "copy");
}
