//! The tools of others take our images: fsck.erofs and dump.erofs of erofs-utils.

use crate::common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Bench, bytes, facts, fill};
use ferry_image::{Image, Store};

/// The directory of the tools; nothing where they cannot be fetched.
fn tools() -> Option<PathBuf> {
    match ferry_guest::Cache::from_env().and_then(|cache| cache.erofs()) {
        Ok(set) => Some(set.join("bin")),
        Err(error) => {
            ferry_skip::skip!("no erofs-utils: {error}");
            None
        }
    }
}

fn open(bench: &Bench, name: &str) -> Image {
    Image::open(&bench.path(name), None).expect("its superblock and its root are sound")
}

/// Runs a tool on an image with its packs; answers whether it was content, and what it said.
fn run(tool: &Path, words: &[&str], bench: &Bench, name: &str) -> (bool, String) {
    let image = open(bench, name);
    let store = Store::open(&bench.store()).expect("the store is there");
    let mut command = Command::new(tool);
    for pack in image.packs() {
        command.arg(format!("--device={}", store.pack_path(pack.name).display()));
    }
    let output = command.args(words).arg(bench.path(name)).output().expect("the tool starts");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

/// Trees of every kind: everything that may be in one, nothing, no data, data in two packs, one file's data in two packs.
fn benches() -> Vec<(&'static str, Bench)> {
    let all = Bench::new();
    fill(&all.tree());
    all.build("image");
    let empty = Bench::new();
    empty.build("image");
    let tiny = Bench::new();
    fs::write(tiny.tree().join("tiny"), "tiny").expect("files can be made");
    tiny.build("image");
    let packs = Bench::new();
    fs::write(packs.tree().join("one"), bytes(1, 100_000)).expect("files can be made");
    packs.build("first");
    fs::write(packs.tree().join("two"), bytes(2, 5000)).expect("files can be made");
    assert_eq!(packs.build("image").packs.len(), 2);
    // Pieces of one file in two packs.
    let pieces = Bench::new();
    let mut large = bytes(3, 500_000);
    fs::write(pieces.tree().join("large"), &large).expect("files can be made");
    pieces.build("first");
    large[200_000] ^= 1;
    fs::write(pieces.tree().join("large"), &large).expect("files can be made");
    assert_eq!(pieces.build("image").packs.len(), 2);
    vec![("all", all), ("empty", empty), ("tiny", tiny), ("packs", packs), ("pieces", pieces)]
}

#[test]
fn fsck_erofs_finds_nothing() {
    let Some(tools) = tools() else { return };
    for (what, bench) in benches() {
        let (sound, said) = run(&tools.join("fsck.erofs"), &["-d3"], &bench, "image");
        assert!(sound && said.contains("No errors found"), "{what}: {said}");
        // erofs-utils 1.9.4 finds the place of data in a pack, but reads there in the image; the kernel reads the pack.
        if open(&bench, "image").packs().is_empty() {
            let out = bench.path("out");
            let extract = format!("--extract={}", out.display());
            let (sound, said) = run(&tools.join("fsck.erofs"), &["--preserve", &extract], &bench, "image");
            assert!(sound, "{what}: {said}");
            let (tree, out) = (facts(&bench.tree()), facts(&out));
            assert!(tree.iter().eq(&out), "{what}: {tree:?} {out:?}");
        }
    }
}

#[test]
fn fsck_erofs_finds_damage() {
    let Some(tools) = tools() else { return };
    let bench = Bench::new();
    fs::write(bench.tree().join("file"), bytes(1, 9000)).expect("files can be made");
    bench.build("image");
    // The root's own entry, which follows the superblock, the place of the one pack, and its inode, gets an impossible place of its name.
    let mut image = fs::read(bench.path("image")).expect("images can be read");
    let root = 1024 + 128 + 128 + 32;
    image[root + 8..root + 10].fill(0xff);
    fs::remove_file(bench.path("image")).expect("images can be removed");
    fs::write(bench.path("image"), image).expect("images can be written");
    let (sound, said) = run(&tools.join("fsck.erofs"), &["-d3"], &bench, "image");
    assert!(!sound, "{said}");
    let image = open(&bench, "image");
    assert!(!ferry_image::check(&image).findings.is_empty(), "but fsck.erofs said {said}");
}

#[test]
fn dump_erofs_shows_the_contents() {
    let Some(tools) = tools() else { return };
    let dump = tools.join("dump.erofs");
    for (what, bench) in benches() {
        let image = open(&bench, "image");
        let (sound, said) = run(&dump, &["-s"], &bench, "image");
        let inodes = format!("Filesystem inode count:                       {}", image.inodes());
        let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(sound && squeezed(&said).contains(&squeezed(&inodes)), "{what}: {said}");
    }
    let (_, bench) = benches().swap_remove(0);
    for name in ["/file-70000", "/file-65", "/file-64", "/many-3000", "/empty", "/twin"] {
        let (sound, said) = run(&dump, &[&format!("--path={name}")], &bench, "image");
        let found = fs::metadata(bench.tree().join(&name[1..])).expect("it is in the tree");
        // It shows neither suid nor sgid.
        let mode = format!("Access: {:04o}/", found.mode() & 0o777);
        assert!(sound && said.contains(&mode) && said.contains(&format!("Uid: {}", found.uid())), "{name}: {said}");
        if found.is_file() {
            assert!(said.contains(&format!("Size: {}", found.len())), "{name}: {said}");
        }
    }
}
