//! The kernel mounts what was built, and finds what was there.

use crate::common;

use std::fs;

use common::kernel::mount;
use common::{Bench, bytes, facts, fill};
use ferry_image::{BuildOptions, Image, Layout, Source, Store, build};
use ferry_vfs::{Caller, FileSystem, SessionId};
use rustix::io::Errno;

#[test]
fn a_mounted_image_is_the_tree() {
    let bench = Bench::new();
    fill(&bench.tree());
    let before = facts(&bench.tree());
    bench.build("image");
    let image = Image::open(&bench.path("image"), None).expect("what was built can be opened");
    assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new());
    let on = bench.path("mounted");
    let Some(_mounted) = mount(&bench, "image", &on) else {
        ferry_skip::skip!("this kernel mounts no images that are files");
        return;
    };
    let after = facts(&on);
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (path, facts) in &before {
        // Of long contents only whether they are the same.
        assert!(after[path] == *facts, "{}: {:?} {:?}", path.display(), facts.mtime, after[path].mtime);
    }
}

/// The superblock says where the device table is in 16 bits.
#[test]
fn metadata_may_be_longer_than_the_device_table_can_be_far() {
    let bench = Bench::of(tempfile::tempdir_in("/dev/shm").expect("a directory can be made"));
    fs::write(bench.tree().join("data"), bytes(0, 20_000)).expect("files can be made");
    for directory in 0..64 {
        let directory = bench.tree().join(directory.to_string());
        fs::create_dir(&directory).expect("directories can be made");
        for number in 0..512 {
            fs::write(directory.join(format!("{number:0250}")), []).expect("files can be made");
        }
    }
    let before = facts(&bench.tree());
    let built = bench.build("image");
    assert!(built.image_bytes > 9 << 20, "{built:?}");
    let image = Image::open(&bench.path("image"), None).expect("what was built can be opened");
    assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new());
    // What lies in memory the kernel does not mount.
    let disk = Bench::new();
    let mut copy = std::process::Command::new("cp");
    copy.arg("-r").args([bench.path("image"), bench.store()]).arg(disk.directory.path());
    assert!(copy.status().expect("cp is there").success());
    let on = disk.path("mounted");
    let Some(_mounted) = mount(&disk, "image", &on) else {
        ferry_skip::skip!("this kernel mounts no images that are files");
        return;
    };
    assert!(facts(&on) == before);
}

#[test]
fn images_share_common_data() {
    let bench = Bench::new();
    for number in 0..50 {
        fs::write(bench.tree().join(format!("{number}")), bytes(number, 20_000)).expect("files can be made");
    }
    let first = bench.build("first");
    assert_eq!(first.new_bytes, 50 * 20_000);
    fs::write(bench.tree().join("7"), bytes(1000, 30_000)).expect("files can be made");
    fs::write(bench.tree().join("again"), bytes(8, 20_000)).expect("files can be made");
    let second = bench.build("second");
    assert_eq!((second.new_bytes, second.packs.len()), (30_000, 2));
    let third = bench.build("third");
    assert_eq!((third.new_bytes, third.digest), (0, second.digest));
    let (old, new) = (bench.path("old"), bench.path("new"));
    let mounts = (mount(&bench, "first", &old), mount(&bench, "second", &new));
    if mounts.0.is_some() {
        assert_eq!(fs::read(old.join("7")).expect("files can be read"), bytes(7, 20_000));
        assert_eq!(fs::read(new.join("7")).expect("files can be read"), bytes(1000, 30_000));
        assert_eq!(fs::read(new.join("again")).expect("files can be read"), bytes(8, 20_000));
    }
}

/// Files whose pieces are in several packs, with the shorter inode and the longer one, with attributes and without.
#[test]
fn files_in_pieces_are_mapped_by_the_kernel() {
    let bench = Bench::new();
    let large = |number: usize| bytes(number, 700_000 + number * 1000);
    for number in 0..6 {
        fs::write(bench.tree().join(number.to_string()), large(number)).expect("files can be made");
    }
    bench.build("first");
    for number in 0..5 {
        let mut content = large(number);
        content[(number * 140_000)..][..5].fill(0x77);
        let path = bench.tree().join(number.to_string());
        fs::write(&path, content).expect("files can be made");
        if number % 2 == 0 {
            std::os::unix::fs::lchown(&path, Some(100_000), Some(70_000)).expect("owners can be set");
        }
        if number > 2 {
            let value = vec![9; number * 5];
            rustix::fs::lsetxattr(&path, "user.some", &value, rustix::fs::XattrFlags::empty()).expect("it can be set");
        }
    }
    // The pieces of another file, and one's own.
    fs::write(bench.tree().join("mix"), [large(5), large(0)].concat()).expect("files can be made");
    let built = bench.build("second");
    assert!(built.new_bytes < 2_000_000 && built.packs.len() == 2, "{built:?}");
    let image = Image::open(&bench.path("second"), None).expect("what was built can be opened");
    assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new());
    let on = bench.path("mounted");
    let Some(_mounted) = mount(&bench, "second", &on) else {
        return ferry_skip::skip!("this kernel mounts no images that are files");
    };
    assert!(facts(&bench.tree()) == facts(&on));
    // Anywhere in it, too.
    let expected = fs::read(bench.tree().join("3")).expect("files can be read");
    let file = fs::File::open(on.join("3")).expect("it is there");
    for at in (1..expected.len()).rev().step_by(60_001) {
        let mut found = vec![0; (expected.len() - at).min(70_000)];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, at as u64).expect("it can be read");
        assert!(found == expected[at..at + found.len()], "{at}");
    }
}

#[test]
fn the_source_equals_the_tree() {
    let bench = Bench::new();
    fill(&bench.tree());
    bench.build("image");
    let source = Source::open(&bench.path("image"), &bench.store(), None).expect("what was built can be opened");
    let image = source.image();
    let mut left = vec![(image.root(), bench.tree())];
    let mut files = 0;
    while let Some((nid, path)) = left.pop() {
        let inode = image.inode(nid).expect("inodes are there");
        if inode.kind() == ferry_vfs::FileType::Directory {
            let names =
                image.entries(&inode, 0).expect("directories can be listed").map(|entry| entry.expect("a name"));
            for entry in names.filter(|entry| !matches!(entry.name, b"." | b"..")) {
                let name = ferry_vfs::Name::new(entry.name).expect("a name");
                assert_eq!(image.lookup(&inode, name), Ok(Some(entry.nid)), "{name:?}");
                left.push((entry.nid, path.join(std::str::from_utf8(entry.name).expect("our names are text"))));
            }
            let absent = ferry_vfs::Name::new(b"name-of-file-x").expect("a name");
            assert_eq!(image.lookup(&inode, absent), Ok(None));
        } else if inode.kind() == ferry_vfs::FileType::RegularFile {
            let mut bytes = vec![0; usize::try_from(inode.bytes).expect("it fits") + 100];
            let count = source.read_at(nid, 0, &mut bytes).expect("files can be read");
            assert!(bytes[..count] == fs::read(&path).expect("files can be read"), "{}", path.display());
            files += 1;
        }
    }
    assert!(files > 3000, "{files}");
}

#[test]
fn an_image_records_whether_it_has_attributes_and_acls() {
    let bench = Bench::new();
    let file = bench.tree().join("file");
    fs::write(&file, "x").expect("files can be made");
    let tells = |name: &str| {
        let of = |name: &str| {
            let image = Image::open(&bench.path(name), None).expect("what was built can be opened");
            (image.may_have_xattrs(), image.may_have_acls(), image.may_have_labels())
        };
        bench.build(name);
        // The other layout has no place for it: all names are looked at.
        let composefs = format!("{name}.cfs");
        let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
        let store = Store::create(&bench.path("objects")).expect("a store can be made");
        build(&bench.tree(), &bench.path(&composefs), store, &options, &|_, _| {}).expect("the tree can be built");
        assert_eq!(of(&composefs), of(name));
        of(name)
    };
    let set = |name: &str, value: &[u8]| {
        rustix::fs::setxattr(&file, name, value, rustix::fs::XattrFlags::empty()).expect("attributes can be set");
    };
    assert_eq!(tells("plain"), (false, false, false));
    set("user.one", b"1");
    assert_eq!(tells("attributes"), (true, false, false));
    // Version 2; owner, user 1000, group, mask and others, each with tag, permissions and number.
    let entries = [(1, 6, u32::MAX), (2, 4, 1000), (4, 4, u32::MAX), (0x10, 4, u32::MAX), (0x20, 0, u32::MAX)];
    let entries = entries.iter().flat_map(|(tag, allowed, id): &(u16, u16, u32)| {
        [tag.to_le_bytes().as_slice(), &allowed.to_le_bytes(), &id.to_le_bytes()].concat()
    });
    let acl: Vec<u8> = 2_u32.to_le_bytes().into_iter().chain(entries).collect();
    set("system.posix_acl_access", &acl);
    assert_eq!(tells("acls"), (true, true, false));
    set("security.selinux", b"system_u:object_r:etc_t:s0");
    assert_eq!(tells("labels"), (true, true, true));
}

/// A file without attributes has none, which is no error, whatever other files have.
#[test]
fn a_file_without_attributes_has_an_empty_list_as_in_the_kernels_mount() {
    let bench = Bench::new();
    fs::create_dir(bench.tree().join("dir")).expect("directories can be made");
    for name in ["plain", "dir/other"] {
        fs::write(bench.tree().join(name), "x").expect("files can be made");
    }
    std::os::unix::fs::symlink("plain", bench.tree().join("link")).expect("links can be made");
    let caller = Caller { session: SessionId::unique(), uid: 0, gid: 0, pid: 1, groups: &[] };
    let compare = |image: &str| {
        bench.build(image);
        let source = Source::open(&bench.path(image), &bench.store(), None).expect("what was built can be opened");
        let list = |path: &str| {
            let names = path.split('/').filter(|name| !name.is_empty());
            let ino = names.fold(ferry_vfs::Ino::ROOT, |ino, name| {
                let name = ferry_vfs::Name::new(name.as_bytes()).expect("a name");
                source.lookup(&caller, ino, name).expect("it is there").ino
            });
            source.listxattr(&caller, ino)
        };
        let on = bench.path("mounted");
        let mounted = mount(&bench, image, &on);
        ["", "plain", "dir", "dir/other", "link"].map(|path| {
            let ours = list(path);
            if mounted.is_some() {
                let mut names = [0; 100];
                let theirs = rustix::fs::llistxattr(on.join(path), &mut names[..]);
                assert_eq!(ours, theirs.map(|count| names[..count].to_vec()), "{image}: {path}");
            }
            ours.expect("the list is no error")
        })
    };
    assert!(compare("none").iter().all(Vec::is_empty));
    rustix::fs::setxattr(bench.tree().join("plain"), "user.one", b"1", rustix::fs::XattrFlags::empty())
        .expect("attributes can be set");
    assert_eq!(compare("one"), ["", "user.one\0", "", "", ""].map(|list| list.as_bytes().to_vec()));
}

/// Programs ask each file for them, unless they are told that there is no such thing anywhere.
#[test]
fn a_source_reports_absent_attributes() {
    let bench = Bench::new();
    for name in ["plain", "labelled"] {
        fs::write(bench.tree().join(name), "x").expect("files can be made");
    }
    let caller = Caller { session: SessionId::unique(), uid: 0, gid: 0, pid: 1, groups: &[] };
    let answers = |image: &str| {
        bench.build(image);
        let source = Source::open(&bench.path(image), &bench.store(), None).expect("what was built can be opened");
        let name = ferry_vfs::Name::new(b"plain").expect("a name");
        let ino = source.lookup(&caller, ferry_vfs::Ino::ROOT, name).expect("it is there").ino;
        let ask = |name: &str| source.getxattr(&caller, ino, name.as_bytes());
        ["user.none", "system.posix_acl_access", "security.selinux"].map(ask)
    };
    let set = |name: &str| {
        let file = bench.tree().join("labelled");
        rustix::fs::setxattr(&file, name, b"x", rustix::fs::XattrFlags::empty()).expect("attributes can be set");
    };
    assert_eq!(answers("none"), [Err(Errno::NOSYS), Err(Errno::NOSYS), Err(Errno::NOSYS)]);
    set("user.one");
    assert_eq!(answers("one"), [Err(Errno::NODATA), Err(Errno::OPNOTSUPP), Err(Errno::OPNOTSUPP)]);
    set("security.selinux");
    assert_eq!(answers("label"), [Err(Errno::NODATA), Err(Errno::OPNOTSUPP), Err(Errno::NODATA)]);
}
