//! Images of the layout composefs equal those of mkcomposefs, byte for byte.

use crate::common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::composefs::{dump_of, mkcomposefs, random_dump, tool};
use common::{Bench, bytes, fill};
use ferry_image::{BuildOptions, Image, Layout, Source, Store, build};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, mknodat};

/// Builds the image `name` of a source, with a version of the layout.
fn built(bench: &Bench, source: &Path, name: &str, version: Option<u32>) -> ferry_image::Result<Vec<u8>> {
    let options = BuildOptions { threads: 2, layout: Layout::Composefs { version }, ..BuildOptions::default() };
    let store = Store::create(&bench.store())?;
    build(source, &bench.path(name), store, &options, &|_, _| {})?;
    Ok(fs::read(bench.path(name)).expect("it was built"))
}

/// Returns the names `xx/yyyy...` of all objects in a directory.
fn objects(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let list = |directory: &Path| {
        let entries = fs::read_dir(directory).expect("directories can be listed");
        entries.map(|entry| entry.expect("directories can be listed").path()).collect::<Vec<_>>()
    };
    let mut all: Vec<_> = list(directory)
        .iter()
        .flat_map(|path| list(path))
        .map(|path| {
            (path.strip_prefix(directory).expect("it is in it").to_owned(), fs::read(&path).expect("it can be read"))
        })
        .collect();
    all.sort();
    all
}

/// Adds files that this layout treats specially.
fn fill_more(tree: &Path) {
    let nodes = [("whiteout", 0), ("dev", rustix::fs::makedev(1, 3))];
    fs::create_dir_all(tree.join("overlay/below")).expect("directories can be made");
    for (name, dev) in nodes {
        let path = tree.join("overlay/below").join(name);
        mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o600), dev).expect("devices can be made");
    }
    for name in ["00", "7f", "fe"] {
        fs::write(tree.join(name), bytes(name.len(), 3000)).expect("files can be made");
    }
    let acl =
        [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255];
    for (name, attribute, value) in [
        ("overlay", "trusted.overlay.opaque", &b"y"[..]),
        ("overlay/below", "trusted.overlay.origin", b""),
        ("00", "trusted.overlay.redirect", b"/etc/passwd"),
        ("7f", "user.overlay.whiteout", b""),
        ("fe", "system.posix_acl_access", &acl),
        ("overlay", "system.posix_acl_default", &acl),
        ("overlay", "security.selinux", b"system_u:object_r:etc_t:s0\0"),
    ] {
        lsetxattr(tree.join(name), attribute, value, XattrFlags::empty()).expect("attributes can be set");
    }
    fs::hard_link(tree.join("fe"), tree.join("overlay/fe")).expect("links can be made");
    fs::set_permissions(tree.join("overlay/below"), fs::Permissions::from_mode(0o3711)).expect("modes can be set");
    for length in [2048, 2049, 4031, 4032, 4033, 4063, 4064, 4065] {
        symlink("l".repeat(length), tree.join(format!("long-{length}"))).expect("links can be made");
    }
}

#[test]
fn a_directory_gives_the_image_and_the_objects_of_mkcomposefs() {
    let bench = Bench::new();
    fill(&bench.tree());
    fill_more(&bench.tree());
    for version in [None, Some(0), Some(1)] {
        let ours = built(&bench, &bench.tree(), "ours", version).expect("the tree can be built");
        let theirs = mkcomposefs(&bench, &bench.tree(), version, &["--digest-store=theirs"]);
        assert!(ours == theirs.expect("mkcomposefs takes it"), "version {version:?}");
    }
    assert!(objects(&bench.store().join("objects")) == objects(&bench.path("theirs")));
    // There are no other objects.
    let left = fs::read_dir(bench.store().join("objects")).expect("directories can be listed");
    assert!(left.flatten().all(|entry| entry.file_name().len() == 2));
}

#[test]
fn dumps_give_the_image_of_mkcomposefs() {
    let bench = Bench::new();
    let dump = bench.path("dump");
    let mut refused = 0;
    'seeds: for seed in 0..60 {
        fs::write(&dump, random_dump(seed)).expect("files can be made");
        for version in [None, Some(0), Some(1)] {
            let ours = built(&bench, &dump, "ours", version);
            let theirs = mkcomposefs(&bench, &dump, version, &["--from-file"]);
            match (ours, theirs) {
                (Ok(ours), Ok(theirs)) => assert!(ours == theirs, "seed {seed}, version {version:?}"),
                // mkcomposefs's count of attributes underflows for whiteouts that already have overlayfs's attributes.
                (Ok(_), Err(said)) if said.contains("Numerical result out of range") => {}
                // The generator sometimes produces duplicate names.
                (Err(ours), Err(theirs))
                    if ours.to_string().contains("it is there already") && theirs.contains("Can't add child") =>
                {
                    refused += 1;
                    continue 'seeds;
                }
                (ours, theirs) => panic!("seed {seed}, version {version:?}: {:?} {:?}", ours.err(), theirs.err()),
            }
        }
        let ours = Image::open(&bench.path("ours"), None).expect("it is an image");
        assert_eq!(ferry_image::check(&ours).findings, Vec::<String>::new(), "seed {seed}");
        // Compare the dumps of both, and the images of these dumps.
        let theirs = tool("composefs-info").arg("dump").arg(bench.path("ours")).output();
        let theirs = theirs.expect("it starts").stdout;
        let text = dump_of(&ours);
        let text = String::from_utf8(text).expect("a dump is text");
        let theirs = String::from_utf8(theirs).expect("a dump is text");
        let other = text.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
        assert!(text == theirs, "seed {seed}: {other:?}");
    }
    assert!(refused < 10, "{refused} of 60 were refused");
}

#[test]
fn a_dump_of_an_image_gives_the_image_again() {
    let bench = Bench::new();
    fill(&bench.tree());
    fill_more(&bench.tree());
    for version in [Some(0), Some(1)] {
        let image = built(&bench, &bench.tree(), "image", version).expect("the tree can be built");
        let text = dump_of(&Image::from_bytes(image.clone()).expect("it is an image"));
        fs::write(bench.path("dump"), text).expect("files can be made");
        assert!(built(&bench, &bench.path("dump"), "again", version).expect("the dump can be built") == image);
    }
}

#[test]
fn a_directory_of_70_000_names_gives_the_image_of_mkcomposefs() {
    let bench = Bench::new();
    let many = bench.tree().join("many");
    fs::create_dir(&many).expect("directories can be made");
    for number in 0..70_000 {
        fs::File::create(many.join(format!("a-name-of-some-length-{number}"))).expect("files can be made");
    }
    let ours = built(&bench, &bench.tree(), "ours", None).expect("the tree can be built");
    assert!(ours == mkcomposefs(&bench, &bench.tree(), None, &[]).expect("mkcomposefs takes it"));
    let image = Image::from_bytes(ours).expect("it is an image");
    let find = |dir, name: &str| {
        let dir = image.inode(dir).expect("it is there");
        image.lookup(&dir, ferry_vfs::Name::new(name.as_bytes()).expect("a name")).expect("it is whole")
    };
    let many = find(image.root(), "many").expect("it is there");
    assert!((0..70_000).step_by(997).all(|number| find(many, &format!("a-name-of-some-length-{number}")).is_some()));
    assert_eq!((find(many, "a-name"), find(image.root(), "00")), (None, None));
}

/// Dumps that mkcomposefs refuses are refused, and some that it accepts by mistake: it stops at NUL bytes, and at missing fields.
#[test]
fn invalid_dump_files_are_refused() {
    let bench = Bench::new();
    let dump = bench.path("dump");
    let root = "/ 0 40755 2 0 0 0 1.0 - - -";
    let file = "0 100644 1 0 0 0 1.0 - - -";
    let digest = "4c7e6c75f1014377909ba4222b4a796bf40ce11e4d0990161ef7f4db9622cf9d";
    let lines = |rest: &str| format!("{root}\n{rest}\n");
    for (expected, text) in [
        ("its directory is not there", format!("/a {file}\n")),
        ("not a directory", lines("").replace("40755", "100644")),
        ("a root already", lines(root)),
        ("empty path", lines("")),
        ("is not a valid name", lines(&format!("/. {file}"))),
        ("is not a valid name", lines(&format!("/a/../b {file}"))),
        ("is not a valid name", lines(&format!("/a\\x00b {file}"))),
        ("ends with a slash", lines(&format!("/a/ {file}"))),
        ("is not a valid name", lines(&format!("/{} {file}", "n".repeat(256)))),
        ("there already", lines(&format!("/a {file}\n/a {file}"))),
        ("its directory is not there", lines(&format!("/a/b {file}"))),
        ("not a directory", lines(&format!("/a {file}\n/a/b {file}"))),
        ("no valid file type", lines("/a 0 644 1 0 0 0 1.0 - - -")),
        ("octal", lines("/a 0 1100644 1 0 0 0 1.0 - - -")),
        ("hard link to a directory", lines("/d 0 40755 2 0 0 0 1.0 - - -\n/a 0 @40755 1 0 0 0 1.0 /d - -")),
        ("target is not there", lines("/a 0 @100644 1 0 0 0 1.0 /d - -")),
        ("hard link to itself", lines("/a 0 @100644 1 0 0 0 1.0 a - -")),
        ("lead to each other", lines("/a 0 @100644 1 0 0 0 1.0 /b - -\n/b 0 @100644 1 0 0 0 1.0 /a - -")),
        ("without a target", lines("/a 0 @100644 1 0 0 0 1.0 - - -")),
        ("without a target", lines("/a 0 120777 1 0 0 0 1.0 - - -")),
        ("4095 bytes", lines(&format!("/a 4096 120777 1 0 0 0 1.0 {} - -", "s".repeat(4096)))),
        ("4095 bytes", lines("/a 4 120777 1 0 0 0 1.0 s\\x00s - -")),
        ("but a size of 7", lines("/a 7 100644 1 0 0 0 1.0 - abc -")),
        ("5001 bytes of content", lines(&format!("/a 5001 100644 1 0 0 0 1.0 - {} -", "c".repeat(5001)))),
        ("64 hexadecimal digits", lines("/a 5 100644 1 0 0 0 1.0 a/b - abcd")),
        ("is not a valid size", lines("/a -5 100644 1 0 0 0 1.0 a/b - -")),
        ("is not a valid size", lines("/a 0x5 100644 1 0 0 0 1.0 a/b - -")),
        ("8 PiB", lines("/a 9007199254740993 100644 1 0 0 0 1.0 a/b - -")),
        ("8 PiB", lines("/a 9500000000000000 100644 1 0 0 0 1.0 a/b - -")),
        ("is not a valid user", lines("/a 0 100644 1 4294967296 0 0 1.0 - - -")),
        ("is not a time", lines("/a 0 100644 1 0 0 0 5 - - -")),
        ("is not a time", lines("/a 0 100644 1 0 0 0 5.1000000000 - - -")),
        ("MTIME is missing", lines("/a 0 100644 1 0 0 0")),
        ("is not a time", lines("/a 0 100644 1 0 0 0 ")),
        // mkcomposefs reads uninitialized memory as the digest.
        ("64 hexadecimal digits", lines("/a 5 100644 1 0 0 0 1.0 a/b -")),
        ("but a size of 5", lines("/a 5 100644 1 0 0 0 1.0 a/b")),
        ("without =", format!("{root} user.a\n")),
        ("the name of an attribute", format!("{root} =1\n")),
        ("the name of an attribute", format!("{root} user.{}=1\n", "a".repeat(251))),
        ("the name of an attribute", format!("{root} user.\\x00=1\n")),
        ("32 KiB", format!("{root} user.a={}\n", "a".repeat(32743))),
        ("unknown escape", lines(&format!("/a\\q {file}"))),
        ("unknown escape", lines(&format!("/a\\x1 {file}"))),
        ("longer than 1 MiB", format!("{root} user.a={}", "a".repeat(2 << 20))),
        ("not a directory, tar archive", "a".into()),
        ("not a directory, tar archive", String::new()),
    ] {
        fs::write(&dump, &text).expect("files can be made");
        let said = built(&bench, &dump, "ours", None).map(drop).expect_err(expected).to_string();
        assert!(said.contains(expected), "{said}\nbut expected: {expected}");
    }
    // The maximum accepted values, as in mkcomposefs.
    let longest = [
        format!("{root} user.a={}\n", "a".repeat(32742)),
        lines(&format!("/a 5 100644 1 0 0 0 1.0 {} - {digest}", "p".repeat(4095))),
        lines("/a 8928034417541120 100644 1 0 0 0 1.0 a/b - -"),
        lines("/a 9000000000000000 100644 1 0 0 0 1.0 a/b - -"),
        lines("/a 9007199254740992 100644 1 0 0 0 1.0 a/b - -"),
        lines(&format!("//a {file}\nb {file}")),
        lines("/b 0 @100644 1 0 0 0 1.0 /c - -\n/c 0 @100644 1 0 0 0 1.0 d - -\n/d 0 100644 1 0 0 0 1.0 - - -"),
    ];
    for text in longest {
        fs::write(&dump, &text).expect("files can be made");
        let ours = built(&bench, &dump, "ours", None).expect("it can be built");
        assert!(ours == mkcomposefs(&bench, &dump, None, &["--from-file"]).expect("mkcomposefs takes it"));
    }
}

/// Asserts that mkcomposefs and `build` make the same image of a dump.
fn same(bench: &Bench, text: &str) {
    let dump = bench.path("dump");
    fs::write(&dump, text).expect("files can be made");
    let ours = built(bench, &dump, "ours", None).unwrap_or_else(|error| panic!("{text}: {error}"));
    let theirs = mkcomposefs(bench, &dump, None, &["--from-file"]).unwrap_or_else(|said| panic!("{text}: {said}"));
    assert!(ours == theirs, "{text}");
    let image = Image::open(&bench.path("ours"), None).expect("it is an image");
    assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new(), "{text}");
    let theirs = tool("composefs-info").arg("dump").arg(bench.path("ours")).output().expect("it starts").stdout;
    assert_eq!(String::from_utf8_lossy(&dump_of(&image)), String::from_utf8_lossy(&theirs), "{text}");
}

/// An index of 1016 chunks of 8 TiB or more fits behind an inode only at certain offsets, one of 1024 chunks only at a single one.
#[test]
fn the_largest_files_are_where_mkcomposefs_has_them() {
    let bench = Bench::of(tempfile::tempdir_in("/dev/shm").expect("a directory can be made"));
    let digest = "4c7e6c75f1014377909ba4222b4a796bf40ce11e4d0990161ef7f4db9622cf9d";
    for chunks in [1014, 1015, 1016, 1017, 1020, 1023, 1024_u64] {
        for attributes in ["", " user.a=1", " user.a=12345", " user.a=1 user.bc=123456789", " user.abc=12345678901"] {
            let mut text = String::from("/ 0 40755 2 0 0 0 1.0 - - -\n");
            for (number, size) in [(chunks << 43) - 4095, 5, chunks << 43, (chunks << 43) - 1].into_iter().enumerate() {
                let line = format!(
                    "/a{number} {size} 100644 1 0 0 0 1.0 {}/{} - {digest}{attributes}\n",
                    &digest[..2],
                    &digest[2..]
                );
                text.push_str(&line);
                text.push_str(&format!("/b{number} 3 100644 1 0 0 0 {number}.0 - abc -\n"));
            }
            same(&bench, &text);
        }
    }
}

/// Sizes and contents of files without data are ignored, and so are missing fields at the end of lines.
#[test]
fn files_that_mkcomposefs_skips_are_skipped() {
    let bench = Bench::of(tempfile::tempdir_in("/dev/shm").expect("a directory can be made"));
    let root = "/ 0 40755 2 0 0 0 1.0 - - -";
    for mode in ["20644", "60644", "10644", "140644", "40755"] {
        for rdev in [0, 5] {
            for rest in ["77 {} 1 0 0 {} 1.0 - - -", "77 {} 1 0 0 {} 1.0 a/b - -", "3 {} 1 0 0 {} 1.0 - abc -"] {
                let rest = rest.replacen("{}", mode, 1).replacen("{}", &rdev.to_string(), 1);
                same(&bench, &format!("{root}\n/a {rest}\n/b 0 100644 1 0 0 0 1.0 - - -\n"));
            }
        }
    }
    same(&bench, &format!("{root}\n/a 77 120777 1 0 0 0 1.0 target - -\n"));
    for end in ["", " ", " -", " a/b", " - ", " - -", " - - ", " a/b - ", " - - -", " - - - "] {
        for line in [format!("/a 0 100644 1 0 0 0 1.0{end}"), format!("/a 5 20644 1 0 0 5 1.0{end}")] {
            // mkcomposefs treats an empty field as content of no bytes.
            if line.starts_with("/a 5") && !end.starts_with(" - -") && !end.starts_with(" a/b - ") {
                continue;
            }
            same(&bench, &format!("{root}\n/d 0 40755 2 0 0 0 2.0 - - -\n{line}"));
            same(&bench, &format!("{root}\n{line}\n/d 0 40755 2 0 0 0 2.0 - - -\n"));
        }
    }
    for link in ["/b 0 @100644 1 0 0 0 1.0 /a", "/b 0 @100644 1 0 0 0 1.0 /a -", "/b x @100644     1 /a"] {
        same(&bench, &format!("{root}\n/a 5 100644 1 0 0 0 1.0 - hello\n{link}"));
    }
}

/// Any byte of an image may be damaged.
#[test]
fn damaged_images_are_errors_and_no_more() {
    let bench = Bench::new();
    for seed in 0..6 {
        fs::write(bench.path("dump"), random_dump(seed)).expect("files can be made");
        let whole = built(&bench, &bench.path("dump"), "image", None).expect("it can be built");
        // Frequently read parts: the beginning, and the surroundings of every inode.
        for step in 0..400 {
            let mut bytes = whole.clone();
            let at = (step * 7919 + step % 13) % bytes.len().min(60_000);
            bytes[at] ^= 1 << (step % 8);
            bytes[(at + 1) % whole.len()] = 0xff;
            let Ok(image) = Image::from_bytes(bytes) else { continue };
            ferry_image::check(&image);
            // Any result is accepted, as long as it ends.
            let _ = ferry_image::dump(&image, &mut std::io::sink());
        }
        assert!(
            Image::from_bytes(whole[..whole.len() / 2].to_vec())
                .map_or(true, |image| { !ferry_image::check(&image).findings.is_empty() })
        );
    }
}

/// Who has read a file must not map another one beyond the end of the object that both name.
#[test]
fn an_object_of_two_lengths_is_read_by_its_own() {
    let bench = Bench::new();
    fs::write(bench.tree().join("a"), bytes(1, 100_000)).expect("a file");
    let image = built(&bench, &bench.tree(), "image", None).expect("the tree can be built");
    let text = String::from_utf8(dump_of(&Image::from_bytes(image).expect("it is an image"))).expect("it is text");
    let line = text.lines().find(|line| line.starts_with("/a 100000 ")).expect("a file");
    fs::write(bench.path("dump"), format!("{text}{}\n", line.replacen("/a 100000 ", "/b 1000000 ", 1)))
        .expect("files can be made");
    built(&bench, &bench.path("dump"), "two", None).expect("the dump can be built");
    let source = Source::open(&bench.path("two"), &bench.store(), None).expect("an image and its store");
    let image = source.image();
    let nid = |name: &[u8]| {
        let root = image.inode(image.root()).expect("a root");
        let entries = image.entries(&root, 0).expect("a directory");
        entries.map(|entry| entry.expect("an entry")).find(|entry| entry.name == name).expect("a name").nid
    };
    let mut memory = [0; 4096];
    assert_eq!(source.read_at(nid(b"a"), 0, &mut memory), Ok(4096));
    assert_eq!(source.read_at(nid(b"b"), 0, &mut memory), Err(ferry_vfs::Errno::IO));
    assert_eq!(source.read_at(nid(b"a"), 0, &mut memory), Ok(4096));
}
