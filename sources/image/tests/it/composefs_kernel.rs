//! The kernel's view of images of the layout composefs, below overlayfs.

use crate::common;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::composefs::random_dump;
use common::kernel::mount_composefs;
use common::{Bench, facts, fill};
use ferry_image::{BuildOptions, Flaw, Image, Layout, Store, build, walk};
use ferry_vfs::FileType;

fn composefs(bench: &Bench, source: &Path) -> ferry_image::Result<Image> {
    let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("a store can be made");
    build(source, &bench.path("image"), store, &options, &|_, _| {})?;
    Image::open(&bench.path("image"), None)
}

/// Every kind of file, devices, holes, long and many names, attributes.
#[test]
fn a_mounted_image_is_the_tree() {
    let bench = Bench::new();
    fill(&bench.tree());
    let image = composefs(&bench, &bench.tree()).expect("it can be built");
    assert_eq!(ferry_image::check(&image).findings, Vec::<String>::new());
    let on = bench.path("mounted");
    let Some(_mounted) = mount_composefs(&bench.path("image"), &bench.store().join("objects"), &on) else {
        ferry_skip::skip!("this kernel mounts no images that are files, or has no overlayfs");
        return;
    };
    let (mut before, mut after) = (facts(&bench.tree()), facts(&on));
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (path, facts) in &mut before {
        let found = after.remove(path).expect("it has the same names");
        // composefs stores each name of a file as a separate file.
        assert_eq!(found.nlink, u64::from(facts.mode & 0o170_000 != 0o040_000), "{}", path.display());
        facts.nlink = found.nlink;
        // Long contents are compared, but not printed.
        assert!(*facts == found, "{}: {:?} {:?}", path.display(), facts.mtime, found.mtime);
    }
}

/// Returns a device number in the form of an image.
fn encoded(rdev: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// For random dump files, with hard links and sizes up to the maximum, the kernel shows the same tree as the reader. There are no
/// objects, so only data in the image can be read.
#[test]
fn the_kernel_and_the_reader_agree_on_dumps() {
    let bench = Bench::new();
    let (on, dump) = (bench.path("mounted"), bench.path("dump"));
    let mut paths = 0;
    for seed in 0..60 {
        // The kernel denies access to files with an invalid ACL.
        let is_acl = |field: &&str| field.starts_with("system.posix_acl");
        let line = |line: &str| line.split(' ').filter(|field| !is_acl(field)).collect::<Vec<_>>().join(" ");
        let text = random_dump(seed).lines().map(line).collect::<Vec<_>>().join("\n") + "\n";
        fs::write(&dump, text).expect("files can be made");
        // A few have duplicate names, which are refused.
        let Ok(image) = composefs(&bench, &dump) else { continue };
        fs::create_dir_all(bench.store().join("objects")).expect("directories can be made");
        let Some(_mounted) = mount_composefs(&bench.path("image"), &bench.store().join("objects"), &on) else {
            ferry_skip::skip!("this kernel mounts no images that are files, or has no overlayfs");
            return;
        };
        let mut names = 0_isize;
        walk(&image, image.root(), b"/", |step, inode| -> Result<(), Flaw> {
            let path = step.path();
            let at = on.join(std::ffi::OsStr::from_bytes(&path[1..]));
            let text = format!("{} of seed {seed}", step.text());
            let found = fs::symlink_metadata(&at).unwrap_or_else(|error| panic!("{text}: {error}"));
            let owner = (found.uid(), found.gid());
            assert_eq!(
                (found.mode(), owner, encoded(found.rdev())),
                (inode.mode, (inode.uid, inode.gid), inode.rdev()),
                "{text}"
            );
            assert_eq!((found.mtime(), found.mtime_nsec()), (inode.mtime.sec, i64::from(inode.mtime.nsec)), "{text}");
            match inode.kind() {
                FileType::Directory => {
                    names += isize::try_from(fs::read_dir(&at).expect("it can be listed").count()).expect("it fits")
                }
                FileType::Symlink => {
                    assert_eq!(found.len(), inode.bytes, "{text}");
                    assert_eq!(fs::read_link(&at).expect("it can be read").as_os_str().as_bytes(), image.link(inode)?);
                }
                FileType::RegularFile => assert_eq!(found.len(), inode.bytes, "{text}"),
                _ => {}
            }
            paths += 1;
            names -= isize::from(step.path() != b"/");
            Ok(())
        })
        .expect("the image is sound");
        // There are no other names.
        assert_eq!(names, 0, "seed {seed}");
    }
    assert!(paths > 2000, "{paths}");
}
