//! Identities of files' contents, by which mounts share their page cache.

use crate::common;

use std::fs;
use std::path::Path;

use common::kernel::mount;
use common::{Bench, bytes, facts, facts_of_image, fill};
use ferry_image::{BuildOptions, BuildReport, Digest, Error, Image, InodeShare, Source, Store, build, check};
use rustix::fs::{XattrFlags, lsetxattr};

const NAME: &str = "trusted.overlay.ferry.content";

fn with_identities(bench: &Bench, name: &str) -> ferry_image::Result<BuildReport> {
    let options = BuildOptions { threads: 2, inode_share: true, ..BuildOptions::default() };
    build(&bench.tree(), &bench.path(name), Store::create(&bench.store())?, &options, &|_, _| {})
}

fn share(bench: &Bench, image: &Path) -> ferry_image::Result<Option<InodeShare>> {
    InodeShare::of(&Image::open(image, None)?, image, &Store::open(&bench.store())?)
}

/// Returns the identity of a file, as the kernel shows it.
fn identity(file: &Path) -> Vec<u8> {
    let mut value = [0; 64];
    let count = rustix::fs::lgetxattr(file, NAME, &mut value[..]).expect("it has one");
    value[..count].to_vec()
}

#[test]
fn the_tree_is_the_same_with_and_without() {
    let bench = Bench::new();
    fill(&bench.tree());
    let (plain, built) = (bench.build("plain"), with_identities(&bench, "image").unwrap());
    assert_eq!(plain.tree, built.tree);
    assert_ne!(plain.digest, built.digest);
    let image = Image::open(&bench.path("image"), Some(built.digest)).unwrap();
    assert!(image.has_identities());
    assert_eq!(check(&image).findings, Vec::<String>::new());
    assert!(share(&bench, &bench.path("image")).unwrap().is_some());
    assert!(share(&bench, &bench.path("plain")).unwrap().is_none());
    let facts_of = |name: &str, digest: Digest| {
        facts_of_image(&Source::open(&bench.path(name), &bench.store(), Some(digest)).unwrap())
    };
    assert!(facts_of("image", built.tree) == facts_of("plain", plain.tree));
    let on = bench.path("mounted");
    let Some(_mounted) = mount(&bench, "image", &on) else {
        return ferry_skip::skip!("this kernel mounts no images that are files");
    };
    let mut found = facts(&on);
    for facts in found.values_mut() {
        facts.xattrs.retain(|(name, _)| name != NAME.as_bytes());
    }
    assert!(found == facts(&bench.tree()));
    assert_eq!(identity(&on.join("twin")), identity(&on.join("a-link")));
    assert_eq!(identity(&on.join("twin")), identity(&on.join("file-70000")), "another inode with the same bytes");
    assert_ne!(identity(&on.join("twin")), identity(&on.join("file-8192")));
}

/// In one run, in pieces that are one run, and in pieces of two packs.
#[test]
fn equal_files_of_one_store_have_one_identity() {
    let bench = Bench::new();
    let large = [bytes(1, 1 << 20), bytes(2, 1 << 20)].concat();
    fs::write(bench.tree().join("large"), &large).unwrap();
    fs::write(bench.tree().join("other"), bytes(3, 100_000)).unwrap();
    with_identities(&bench, "first").unwrap();
    let mut changed = large.clone();
    changed[1 << 20] ^= 1;
    fs::write(bench.tree().join("changed"), &changed).unwrap();
    fs::write(bench.tree().join("again"), &changed).unwrap();
    fs::rename(bench.tree().join("large"), bench.tree().join("moved")).unwrap();
    with_identities(&bench, "second").unwrap();
    with_identities(&bench, "third").unwrap();
    let on = ["first", "second", "third"].map(|name| bench.path(&format!("on-{name}")));
    let mounts = ["first", "second", "third"].iter().zip(&on).map(|(name, on)| mount(&bench, name, on));
    if mounts.collect::<Option<Vec<_>>>().is_some_and(|mounts| {
        let [first, second, third] = &on;
        assert_eq!(identity(&first.join("large")), identity(&second.join("moved")));
        assert_eq!(identity(&first.join("other")), identity(&third.join("other")));
        assert_eq!(identity(&second.join("changed")), identity(&third.join("again")));
        assert_ne!(identity(&second.join("changed")), identity(&second.join("moved")));
        for (file, expected) in [("moved", &large), ("changed", &changed), ("again", &changed)] {
            assert!(fs::read(third.join(file)).unwrap() == *expected, "{file}");
        }
        !mounts.is_empty()
    }) {
        return;
    }
    ferry_skip::skip!("this kernel mounts no images that are files");
}

/// The kernel would read the bytes of another file.
#[test]
fn identities_of_other_contents_are_refused() {
    let bench = Bench::new();
    for number in 0..2 {
        fs::write(bench.tree().join(number.to_string()), bytes(number, 5000)).unwrap();
    }
    with_identities(&bench, "image").unwrap();
    let good = fs::read(bench.path("image")).unwrap();
    // The entry of the attribute: no name, the first long prefix, 32 bytes.
    let entries: Vec<usize> =
        (0..good.len() - 36).step_by(4).filter(|at| good[*at..].starts_with(&[0, 0x80, 32, 0])).collect();
    assert_eq!(entries.len(), 2);
    let [one, other] = [0, 1].map(|number| entries[number] + 4..entries[number] + 36);
    let mut swapped = good.clone();
    swapped[one.clone()].copy_from_slice(&good[other.clone()]);
    let mut spoiled = good.clone();
    spoiled[other.start] ^= 1;
    for (what, bad) in [("another file's", swapped), ("nobody's", spoiled)] {
        fs::write(bench.path("bad"), bad).unwrap();
        let error = share(&bench, &bench.path("bad")).expect_err(what).to_string();
        assert!(error.contains("an identity that is not of its contents"), "{error}");
        let findings = check(&Image::open(&bench.path("bad"), None).unwrap()).findings;
        assert!(findings.iter().any(|found| found.contains("an identity that is not of its contents")), "{findings:?}");
    }
    assert!(share(&bench, &bench.path("image")).unwrap().is_some());
    // Its name, its number and its features.
    let table = good.windows(9).position(|bytes| bytes == b"\x04overlay.").unwrap();
    for (at, byte, why) in [
        (table, 1, "an unknown prefix of attributes"),
        (1024 + 91, 2, "identities of files that are not Ferry's"),
        (1024 + 105, 1, "identities of files that are not Ferry's"),
        (1024 + 8, 0x22, "identities of files that are not Ferry's"),
        (1024 + 8, 2, "features that Ferry does not know"),
        (entries[0] + 1, 0x81, "an attribute of an unknown kind"),
    ] {
        let mut bad = good.clone();
        bad[at] = byte;
        let outcome = Image::from_bytes(bad).map(|image| check(&image).findings.join("; "));
        let said = outcome.unwrap_or_else(|flaw| flaw.to_string());
        assert!(said.contains(why), "{said}, not {why}");
    }
}

/// The kernel takes the first attribute of this name.
#[test]
fn an_attribute_of_the_tree_is_no_identity() {
    let bench = Bench::new();
    let file = bench.tree().join("file");
    fs::write(&file, bytes(0, 5000)).unwrap();
    if let Err(error) = lsetxattr(&file, NAME, &[7; 32], XattrFlags::empty()) {
        return ferry_skip::skip!("only root can set {NAME}: {error}");
    }
    let error = with_identities(&bench, "image").expect_err("it is refused");
    assert!(matches!(error, Error::OwnIdentities), "{error}");
    bench.build("plain");
    assert!(share(&bench, &bench.path("plain")).unwrap().is_none());
}
