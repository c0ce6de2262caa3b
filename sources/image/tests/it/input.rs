//! Whatever an archive, a dump file or an OCI image directory says: it is refused, or gives an image that fsck calls clean.

use crate::common;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use common::{Bench, bytes};
use ferry_image::{BuildOptions, Image, Layout, Store, Whiteouts, build, check};
use proptest::prelude::*;
use sha2::{Digest, Sha256};

const COMPOSEFS: Layout = Layout::Composefs { version: None };

/// Builds, and looks at what was built; answers whether it was.
fn is_taken(bench: &Bench, source: &Path, layout: Layout, whiteouts: Option<Whiteouts>) -> bool {
    let platform = Some("linux/amd64".into());
    let options = BuildOptions { threads: 2, layout, whiteouts, platform, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("stores can be made");
    let image = bench.path("image");
    let _ = fs::remove_file(&image);
    let Ok(built) = build(source, &image, store, &options, &|_, _| {}) else {
        assert!(!image.exists());
        return false;
    };
    let report = check(&Image::open(&image, Some(built.digest)).expect("it was built"));
    assert_eq!(report.findings, Vec::<String>::new());
    // composefs's root has whiteouts of its own.
    assert!(layout != Layout::Flat || report.inodes == built.inodes as u64);
    true
}

/// A tree of a little of everything, as an archive.
fn archive() -> Vec<u8> {
    static ARCHIVE: OnceLock<Vec<u8>> = OnceLock::new();
    let make = || {
        let bench = Bench::new();
        let tree = bench.tree();
        fs::create_dir_all(tree.join("dir/below")).expect("directories can be made");
        for (name, length) in [("small", 10), ("dir/file", 700), ("dir/below/other", 5000)] {
            fs::write(tree.join(name), bytes(length, length)).expect("files can be made");
        }
        fs::write(tree.join("dir/.wh.gone"), "").expect("files can be made");
        std::os::unix::fs::symlink("x".repeat(120), tree.join("link")).expect("links can be made");
        fs::hard_link(tree.join("dir/file"), tree.join("again")).expect("links can be made");
        let line = ["--format=posix", "-b1", "--sort=name", "-cf", "archive.tar", "-C", "tree", "."];
        let made = Command::new("tar").args(line).current_dir(bench.directory.path()).status().expect("tar is there");
        assert!(made.success());
        fs::read(bench.path("archive.tar")).expect("files can be read")
    };
    ARCHIVE.get_or_init(make).clone()
}

/// Gives each header of an archive its sum.
fn sum(archive: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = archive.get_mut(at..at + 512).filter(|header| header.iter().any(|byte| *byte != 0)) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let digits = std::str::from_utf8(&header[124..135]).unwrap_or_default();
        let size = usize::from_str_radix(digits, 8).unwrap_or_default();
        at = at.saturating_add(512).saturating_add(size.next_multiple_of(512));
    }
}

/// Puts bytes into a text where it may matter.
fn changed(text: &[u8], changes: &[(prop::sample::Index, Vec<u8>)]) -> Vec<u8> {
    let mut text = text.to_vec();
    for (at, with) in changes {
        let at = at.index(text.len());
        let end = (at + with.len()).min(text.len());
        text.splice(at..end, with.iter().copied());
    }
    text
}

fn word() -> impl Strategy<Value = Vec<u8>> {
    let words = [
        "-1",
        "18446744073709551615",
        "0",
        "\"",
        "{",
        "}",
        "[]",
        "null",
        "sha256:",
        " - ",
        "\n",
        "\\x00",
        "@",
        "../",
        "/",
    ];
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..4),
        proptest::sample::select(words.to_vec()).prop_map(|word| word.as_bytes().to_vec())
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn any_archive_is_refused_or_gives_a_clean_image(
        changes in proptest::collection::vec((0..24_usize, 0..512_usize, prop_oneof![Just(0), Just(b'0'), Just(b'7'), any::<u8>()]), 0..8),
        is_flat in any::<bool>(),
        whiteouts in proptest::sample::select(vec![None, Some(Whiteouts::Drop), Some(Whiteouts::Overlay), Some(Whiteouts::Keep)]),
    ) {
        let bench = Bench::new();
        let mut archive = archive();
        let is_whole = changes.is_empty();
        for (block, at, byte) in changes {
            let at = (block * 512 + at) % archive.len();
            archive[at] = byte;
        }
        sum(&mut archive);
        let source = bench.path("hostile.tar");
        fs::write(&source, archive).expect("files can be made");
        let taken = is_taken(&bench, &source, if is_flat { Layout::Flat } else { COMPOSEFS }, whiteouts);
        prop_assert!(!is_whole || taken == whiteouts.is_some());
    }

    #[test]
    fn any_dump_file_is_refused_or_gives_a_clean_image(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), word()), 0..6),
    ) {
        let dump = b"/ 4096 40755 4 0 0 0 1.5 - - - user.one=two\n/a 27 40755 2 0 0 0 0.0 - - -\n\
            /a/file 70000 100644 1 1000 1000 0 7.0 ab/cd - 0000000000000000000000000000000000000000000000000000000000000001\n\
            /again 70000 @100644 2 0 0 0 0.0 /a/file - -\n/dev 0 20644 1 0 0 259 0.0 - - -\n/gone 0 20000 1 0 0 0 0.0 - - -\n\
            /inline 4 100644 1 0 0 0 0.0 - da\\x00a -\n/link 3 120777 1 0 0 0 0.0 to\\n - -\n";
        let bench = Bench::new();
        let source = bench.path("dump");
        fs::write(&source, changed(dump, &changes)).expect("files can be made");
        let taken = is_taken(&bench, &source, COMPOSEFS, None);
        prop_assert!(!changes.is_empty() || taken);
    }

    #[test]
    fn any_image_directory_is_refused_or_gives_a_clean_image(
        changes in proptest::collection::vec((0..4_usize, any::<prop::sample::Index>(), word()), 0..4),
    ) {
        let bench = Bench::new();
        let blobs = bench.path("oci/blobs/sha256");
        fs::create_dir_all(&blobs).expect("directories can be made");
        let of = |part: usize| -> Vec<_> {
            changes.iter().filter(|change| change.0 == part).map(|(_, at, with)| (*at, with.clone())).collect()
        };
        let blob = |bytes: &[u8]| {
            let name: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            fs::write(blobs.join(&name), bytes).expect("files can be made");
            format!("\"digest\": \"sha256:{name}\", \"size\": {}", bytes.len())
        };
        let mut layer = changed(&archive(), &of(0));
        sum(&mut layer);
        let diff: String = Sha256::digest(&layer).iter().map(|byte| format!("{byte:02x}")).collect();
        let config = format!(r#"{{"rootfs": {{"type": "layers", "diff_ids": ["sha256:{diff}"]}}}}"#);
        let config = blob(&changed(config.as_bytes(), &of(1)));
        let kind = "application/vnd.oci.image";
        let manifest = format!(
            r#"{{"config": {{"mediaType": "{kind}.config.v1+json", {config}}}, "layers": [{{"mediaType": "{kind}.layer.v1.tar", {}}}]}}"#,
            blob(&layer)
        );
        let manifest = blob(&changed(manifest.as_bytes(), &of(2)));
        let index = format!(r#"{{"manifests": [{{"mediaType": "{kind}.manifest.v1+json", {manifest}}}]}}"#);
        fs::write(bench.path("oci/index.json"), changed(index.as_bytes(), &of(3))).expect("files can be made");
        fs::write(bench.path("oci/oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#).expect("files can be made");
        let source = format!("oci:{}", bench.path("oci").display());
        let taken = is_taken(&bench, Path::new(&source), Layout::Flat, None);
        prop_assert!(!changes.is_empty() || taken);
    }
}
