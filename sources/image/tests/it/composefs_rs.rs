//! Images of dumps have the digests that composefs-rs computes of them, in each of its versions.

use crate::common;

use std::fmt::Write;
use std::fs;

use common::Bench;
use common::composefs::{dump_of, random_dump};
use ferry_image::{BuildOptions, Image, Layout, Store, build};

/// For the dump that is made by hand, or a random one, the beginnings of its digests: what `FileSystem::compute_image_id` of the crate
/// composefs 0.9.4 returns of `dumpfile_to_filesystem::<Sha256HashValue>` for `FormatVersion::V0`, `V1` and `V2`. It takes few of the random
/// ones; nothing stands where version 2 has files that cannot be read by their inodes, which are refused here.
const DIGESTS: [(Option<u64>, [&str; 3]); 7] = [
    (None, ["24dcb9d4c8bde63c", "1b30f357720fa182", "86d06a8974308490"]),
    (Some(22), ["86538a0baaf9f7c2", "7a70c38cb089e781", ""]),
    (Some(33), ["3f59fde92cf18041", "8174890ebdcbdbf2", ""]),
    (Some(57), ["5a80c142d02c9bf9", "687791413753fa50", ""]),
    (Some(68), ["ce1df94b9cd55704", "a1230cf48147f175", ""]),
    (Some(100), ["56fc0dfbcb7f4ac8", "31befe00ae336b92", ""]),
    (Some(107), ["007c40a9160b9d6f", "087aeebc9f133a94", "827a23d54b9558e5"]),
];

/// Directories with blocks and without, every kind of file, shared attributes and own ones, hard links, times with fractions.
fn made_by_hand() -> String {
    let known = "4c7e6c75f1014377909ba4222b4a796bf40ce11e4d0990161ef7f4db9622cf9d";
    let path = |digest: &str| format!("{}/{}", &digest[..2], &digest[2..]);
    let mut text = String::from(
        "/ 0 40755 3 0 0 0 5.0 - - - user.a=1\n\
         /blk 0 60600 1 0 0 261 1.0 - - -\n\
         /dir 0 40711 3 70000 7 0 9.999999999 - - - security.selinux=label trusted.x=y\n",
    );
    for number in 0..150 {
        let content = if number == 0 { "-".into() } else { "c".repeat(number) };
        writeln!(text, "/dir/name-of-file-{number:03} {number} 100644 1 0 0 0 {number}.5 - {content} -")
            .expect("strings take all");
    }
    text.push_str("/dir/sub 0 40755 2 0 0 0 1.0 - - -\n");
    for number in 0..40 {
        let digest = format!("{number:064x}");
        let (bytes, path) = (5000 + number, path(&digest));
        let line = format!("{bytes} 100755 1 1000 1000 0 77.0 {path} - {digest} user.a=1 user.number={number}");
        writeln!(text, "/dir/sub/object-{number:02} {line}").expect("strings take all");
    }
    text.push_str("/fifo 0 10644 1 0 0 0 1.0 - - -\n/link 5 120777 1 0 0 0 1.0 there - -\n");
    writeln!(text, "/long 1000 120777 1 0 0 0 2.0 {} - - user.a=1", "t".repeat(1000)).expect("strings take all");
    let line = format!("9000 100644 2 0 0 0 3.25 {} - {known} trusted.overlay.opaque=y user.a=1", path(known));
    writeln!(text, "/one {line}\n/two 0 @100644 2 0 0 0 0.0 /one - -").expect("strings take all");
    text
}

#[test]
fn composefs_rs_computes_the_same_digests() {
    let bench = Bench::of(tempfile::tempdir_in("/dev/shm").expect("a directory can be made"));
    for (seed, digests) in DIGESTS {
        fs::write(bench.path("dump"), seed.map_or_else(made_by_hand, random_dump)).expect("files can be made");
        for (version, expected) in (0..).zip(digests) {
            let options =
                BuildOptions { layout: Layout::Composefs { version: Some(version) }, ..BuildOptions::default() };
            let store = Store::create(&bench.store()).expect("a store can be made");
            let built = build(&bench.path("dump"), &bench.path("image"), store, &options, &|_, _| {});
            if expected.is_empty() {
                let said = built.expect_err("it cannot be read").to_string();
                assert!(said.contains("of the layout"), "seed {seed:?}: {said}");
                continue;
            }
            let built = built.unwrap_or_else(|error| panic!("seed {seed:?}, version {version}: {error}"));
            assert_eq!(&built.digest.hex()[..16], expected, "seed {seed:?}, version {version}");
            let image = Image::open(&bench.path("image"), None).expect("it was built");
            assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new(), "seed {seed:?}, version {version}");
            assert!(dump_of(&image).starts_with(b"/ "), "seed {seed:?}, version {version}");
        }
    }
}
