//! Packs that are made for fs-verity: what names their digests, and what becomes of wrong ones. What the kernel does with them is tried in a
//! guest (`tests/tests/it/image_verity.rs`), for many file systems have no fs-verity.

use crate::common;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use common::{Bench, bytes, fill};
use ferry_image::{
    Algorithm, BuildOptions, BuildReport, Digest, Image, Objects, PackProof, SealReport, Store, Trace, build,
    note_damage, repair_packs, seal, seal_image,
};

/// Builds for fs-verity.
fn build_sealed(source: &Path, bench: &Bench, (image, store): (&str, &str), options: BuildOptions) -> BuildReport {
    let options = BuildOptions { verity: true, ..options };
    let store = Store::create(&bench.path(store)).expect("directories can be made");
    build(source, &bench.path(image), store, &options, &|_, _| {}).expect("the tree can be built")
}

/// That each pack has the digest that its index names.
fn all_named(bench: &Bench, store: &str, packs: &[Digest]) {
    let store = Store::open(&bench.path(store)).expect("the store is there");
    for pack in packs {
        let bytes = fs::read(store.pack_path(*pack)).expect("packs can be read");
        let named = store.index(*pack).expect("the index is sound").verity;
        assert_eq!(named, Some(Algorithm::Verity.of(&bytes)), "{pack} of {} bytes", bytes.len());
    }
}

#[test]
fn indexes_name_the_digests_of_packs_of_every_kind() {
    let bench = Bench::new();
    fill(&bench.tree());
    let with = |threads, order| BuildOptions { threads, order, ..BuildOptions::default() };
    let one = build_sealed(&bench.tree(), &bench, ("one", "store-1"), with(1, None));
    all_named(&bench, "store-1", &one.packs);
    let four = build_sealed(&bench.tree(), &bench, ("four", "store-4"), with(4, None));
    assert_eq!((one.digest, &one.packs), (four.digest, &four.packs), "however many threads hash");
    // Pieces that are copied from a pack to another one.
    let mut order = Trace::default();
    ["/sparse", "/file-70000", "/twin"].iter().for_each(|path| _ = order.add(path.as_bytes()));
    let ordered = build_sealed(&bench.tree(), &bench, ("ordered", "store-1"), with(2, Some(order)));
    assert_eq!(ordered.packs.len(), 2, "and what is not wanted first");
    all_named(&bench, "store-1", &ordered.packs);
    // What one thread reads, and others hash.
    let tar = bench.path("tar");
    let packed = std::process::Command::new("tar").arg("-cf").arg(&tar).arg("-C").arg(bench.tree()).arg(".").status();
    assert!(packed.expect("there is tar").success());
    let of_tar = build_sealed(&tar, &bench, ("of-tar", "store-t"), with(3, None));
    all_named(&bench, "store-t", &of_tar.packs);
    let objects = Objects::open(&Image::open(&bench.path("one"), None).expect("it was built"), &bench.path("store-1"));
    objects.expect("all is there").verify_packs().expect("all is right");
}

#[test]
fn packs_that_name_no_digest_are_not_used_by_builds_for_verity() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 300_000)).expect("files can be made");
    let plain = bench.build("plain");
    let store = Store::open(&bench.store()).expect("the store is there");
    assert_eq!(store.index(plain.packs[0]).expect("it is sound").verity, None, "nobody asked for it");
    let sealed = build_sealed(&bench.tree(), &bench, ("sealed", "store"), BuildOptions::default());
    assert!(sealed.packs != plain.packs && sealed.new_bytes == 300_000, "{sealed:?}");
    all_named(&bench, "store", &sealed.packs);
    // But they are by all others, and by themselves; the digest of an image that nobody asked that for stays.
    let again = build_sealed(&bench.tree(), &bench, ("again", "store"), BuildOptions::default());
    assert_eq!((again.digest, again.new_bytes), (sealed.digest, 0));
    assert_eq!(bench.build("third").new_bytes, 0);
    let elsewhere = build_sealed(&bench.tree(), &bench, ("elsewhere", "other"), BuildOptions::default());
    assert_eq!(elsewhere.digest, sealed.digest, "whatever else is in the store");
    let image = Image::open(&bench.path("plain"), None).expect("it was built");
    Objects::open(&image, &bench.store()).expect("all is there").verify_packs().expect("there is nothing to prove");
    assert_eq!(
        seal(&image, &bench.store(), None).expect("there is nothing to do"),
        SealReport { unnamed: 1, ..SealReport::default() }
    );
}

/// Has an image, and the index of its only pack, name another digest; answers the pack's new name.
fn name_another(bench: &Bench, built: &BuildReport) -> Digest {
    let packs = bench.store().join("packs");
    let at = |pack: Digest, end: &str| packs.join(format!("{}{end}", pack.hex()));
    let old = built.packs[0];
    let mut index = fs::read(at(old, ".index")).expect("the index is there");
    *index.last_mut().expect("it has entries") ^= 1;
    let new = Algorithm::Blake3.of(&index);
    fs::write(at(new, ".index"), index).expect("files can be written");
    fs::rename(at(old, ""), at(new, "")).expect("files can be renamed");
    let mut image = fs::read(bench.path("image")).expect("the image is there");
    let tag = image.windows(64).position(|bytes| bytes == old.hex().as_bytes()).expect("it names the pack");
    image[tag..tag + 64].copy_from_slice(new.hex().as_bytes());
    fs::remove_file(bench.path("image")).expect("files can be removed");
    fs::write(bench.path("image"), image).expect("files can be written");
    new
}

#[test]
fn an_index_that_names_another_digest_is_found() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 300_000)).expect("files can be made");
    let built = build_sealed(&bench.tree(), &bench, ("image", "store"), BuildOptions::default());
    let pack = name_another(&bench, &built);
    let image = Image::open(&bench.path("image"), None).expect("it is an image");
    let objects = Objects::open(&image, &bench.store()).expect("all is there");
    objects.verify_all().expect("each object is sound");
    let bad = objects.verify_packs().expect_err("the pack is not").to_string();
    assert!(bad.contains(&pack.to_string()) && bad.contains("fs-verity digest"), "{bad}");
}

/// As far as the file system has fs-verity: nothing of it is an error where it has none.
#[test]
fn sealed_packs_can_be_used_repaired_and_sealed_again() {
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 300_000)).expect("files can be made");
    let built = build_sealed(&bench.tree(), &bench, ("image", "store"), BuildOptions::default());
    let image = Image::open(&bench.path("image"), Some(built.digest)).expect("it was built");
    let store = Store::open(&bench.store()).expect("the store is there");
    let proof = || {
        let file = fs::File::open(store.pack_path(built.packs[0])).expect("the pack is there");
        store.pack_proof(&image.packs()[0], &file).expect("it has no other digest")
    };
    let has_verity = proof() == PackProof::Kernel;
    assert!(has_verity || proof() == PackProof::Unavailable);
    assert_eq!(Objects::open(&image, &bench.store()).expect("all is there").sealed(), usize::from(has_verity));
    let (on, unavailable) = (usize::from(has_verity), usize::from(!has_verity));
    let sealed = SealReport { on, unavailable, ..SealReport::default() };
    assert_eq!(seal(&image, &bench.store(), None).expect("nothing fails"), sealed);
    assert_eq!(seal_image(&bench.path("image")).expect("nothing fails"), has_verity);
    assert_eq!(image.verity_digest(), Algorithm::Verity.of(&fs::read(bench.path("image")).expect("it is there")));
    // A copy that is damaged, and what has the right bytes for it.
    let path = store.pack_path(built.packs[0]);
    let mut pack = fs::read(&path).expect("the pack is there");
    pack[70_000] ^= 1;
    fs::remove_file(&path).expect("files can be removed");
    fs::write(&path, pack).expect("files can be written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).expect("modes can be set");
    assert_eq!(note_damage(&image, &bench.store()).expect("the store can be written"), 1);
    bench.build("plain");
    let mended = repair_packs(&image, &bench.store(), None).expect("the store can be written");
    assert_eq!(mended.left, 0);
    all_named(&bench, "store", &built.packs);
    assert_eq!(proof() == PackProof::Kernel, has_verity, "what is mended is sealed");
    // Of a pack that is not all here nothing is done.
    fs::remove_file(&path).expect("files can be removed");
    fs::File::create(&path).and_then(|file| file.write_all_at(b"x", 0)).expect("files can be written");
    assert_eq!(
        seal(&image, &bench.store(), None).expect("nothing fails"),
        SealReport { left: 1, ..SealReport::default() }
    );
}
