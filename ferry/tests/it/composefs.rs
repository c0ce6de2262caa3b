//! Images of the layout composefs: ours for composefs's programs and the kernel, theirs for us.
use crate::common;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::place::Place;
use common::{ferry, needs_fuse, refused, run};
use rustix::mount::{UnmountFlags, unmount};

fn tool(name: &str) -> Command {
    Command::new(ferry_guest::Cache::from_env().unwrap().composefs().unwrap().join("bin").join(name))
}

fn large() -> Vec<u8> {
    (0..50_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A tree, an image of it and its store, beside a mount point.
struct Made {
    place: Place,
    digest: String,
}

/// A mount that ends with the test.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

impl Made {
    fn tree() -> Place {
        let place = Place::new();
        let tree = place.at("tree");
        fs::create_dir_all(tree.join("dir/below")).unwrap();
        fs::write(tree.join("dir/large"), large()).unwrap();
        fs::write(tree.join("dir/twin"), large()).unwrap();
        fs::write(tree.join("dir/below/small"), "small").unwrap();
        fs::write(tree.join("dir/below/other"), [7; 5000]).unwrap();
        fs::set_permissions(tree.join("dir/large"), fs::Permissions::from_mode(0o4750)).unwrap();
        std::os::unix::fs::symlink("dir/large", tree.join("link")).unwrap();
        let name = "trusted.overlay.opaque";
        rustix::fs::lsetxattr(tree.join("dir"), name, b"y", rustix::fs::XattrFlags::empty()).unwrap();
        place
    }

    /// By `ferry image build`.
    fn ours() -> Self {
        let place = Self::tree();
        let mut line = ferry();
        line.args(["image", "build", "--layout", "composefs"]).arg(place.at("tree"));
        line.arg("-o").arg(place.at("image")).arg("--store").arg(place.at("store"));
        let digest = text(&mut line).trim_end().to_owned();
        Self { place, digest }
    }

    /// By `mkcomposefs`.
    fn theirs() -> Self {
        let place = Self::tree();
        fs::create_dir(place.at("store")).unwrap();
        let mut line = tool("mkcomposefs");
        line.arg("--print-digest").arg(format!("--digest-store={}", place.at("store/objects").display()));
        let digest = format!("sha256:{}", text(line.arg(place.at("tree")).arg(place.at("image"))).trim_end());
        Self { place, digest }
    }

    fn image(&self, command: &str) -> Command {
        let mut line = ferry();
        line.args(["image", command]).arg(self.place.at("image"));
        line
    }

    fn with_store(&self, command: &str) -> Command {
        let mut line = self.image(command);
        line.arg("--store").arg(self.place.at("store"));
        line
    }

    /// The object with the bytes of the large file.
    fn object(&self) -> PathBuf {
        let directories = fs::read_dir(self.place.at("store/objects")).unwrap().map(|entry| entry.unwrap().path());
        let mut all =
            directories.flat_map(|directory| fs::read_dir(directory).unwrap()).map(|entry| entry.unwrap().path());
        all.find(|path| fs::metadata(path).unwrap().len() == 200_000).unwrap()
    }

    /// That a mount shows the tree.
    fn compare(&self, mnt: &Path) {
        let tree = self.place.at("tree");
        for name in ["", "dir", "dir/large", "dir/twin", "dir/below", "dir/below/small", "dir/below/other", "link"] {
            let (is, was) =
                (fs::symlink_metadata(mnt.join(name)).unwrap(), fs::symlink_metadata(tree.join(name)).unwrap());
            assert_eq!((is.mode(), is.mtime(), is.mtime_nsec()), (was.mode(), was.mtime(), was.mtime_nsec()), "{name}");
            if is.is_file() {
                assert!(fs::read(mnt.join(name)).unwrap() == fs::read(tree.join(name)).unwrap(), "{name}");
            }
        }
        let names = |path: &Path| {
            let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names(mnt), ["dir", "link"]);
        assert_eq!(names(&mnt.join("dir")), ["below", "large", "twin"]);
        let mut value = [0; 10];
        let count = rustix::fs::lgetxattr(mnt.join("dir"), "trusted.overlay.opaque", &mut value[..]).unwrap();
        assert_eq!(&value[..count], b"y");
        assert_eq!(fs::read(mnt.join("00")).unwrap_err().raw_os_error(), Some(2));
    }
}

#[test]
fn images_of_both_are_listed_shown_and_checked() {
    for made in [Made::ours(), Made::theirs()] {
        let names = "/\n/dir\n/dir/below\n/dir/below/other\n/dir/below/small\n/dir/large\n/dir/twin\n/link\n";
        assert_eq!(text(&mut made.image("ls")), names);
        assert!(run(made.with_store("cat").arg("dir/large")).stdout == large());
        assert_eq!(text(made.with_store("cat").arg("dir/below/small")), "small");
        let info: serde_json::Value = serde_json::from_str(&text(made.image("info").arg("--json"))).unwrap();
        assert_eq!((info["digest"].as_str(), info["layout"].as_str()), (Some(made.digest.as_str()), Some("composefs")));
        assert_eq!(text(&mut made.image("fsck")), "clean\n");
        assert_eq!(text(&mut made.with_store("verify")), "clean\n");
        let dumped = text(&mut made.image("dump"));
        assert_eq!(dumped, text(tool("composefs-info").arg("dump").arg(made.place.at("image"))));
        let objects = format!("--basedir={}", made.place.at("store/objects").display());
        assert_eq!(text(tool("composefs-info").arg(objects).arg("missing-objects").arg(made.place.at("image"))), "");
    }
}

/// What is missing is told as composefs-info missing-objects tells it.
#[test]
fn missing_objects_are_reported() {
    let made = Made::theirs();
    let missing = || {
        let said = text(made.with_store("gc").arg("--dry-run"));
        let lines = said.lines().filter_map(|line| line.strip_prefix("missing: the object "));
        lines.map(|line| line.split(',').next().unwrap().to_owned() + "\n").collect::<String>()
    };
    assert_eq!(missing(), "");
    fs::remove_file(made.object()).unwrap();
    let objects = format!("--basedir={}", made.place.at("store/objects").display());
    let theirs = run(tool("composefs-info").arg(objects).arg("missing-objects").arg(made.place.at("image")));
    assert_eq!(missing(), String::from_utf8(theirs.stdout).unwrap());
    assert_eq!(missing().lines().count(), 1);
}

/// mkcomposefs has options of its own for times and attributes.
#[test]
fn exclusions_equal_those_of_mkcomposefs() {
    let place = Made::tree();
    let mut line = tool("mkcomposefs");
    line.args(["--use-epoch", "--skip-xattrs"]).arg(place.at("tree"));
    text(line.arg(place.at("theirs")));
    let mut line = ferry();
    line.args(["image", "build", "--layout", "composefs", "--mtime", "0", "--skip-xattrs"]).arg(place.at("tree"));
    text(line.arg("-o").arg(place.at("ours")).arg("--store").arg(place.at("store")));
    assert!(fs::read(place.at("ours")).unwrap() == fs::read(place.at("theirs")).unwrap());
}

#[test]
fn differences_of_a_newer_image_are_listed() {
    for made in [Made::ours(), Made::theirs()] {
        let tree = made.place.at("tree");
        let kept_time = |name: &str, change: &dyn Fn(&Path)| {
            let path = tree.join(name);
            let times = fs::metadata(&path).unwrap().modified().unwrap();
            change(&path);
            fs::File::options().append(true).open(&path).unwrap().set_modified(times).unwrap();
        };
        // Of the same length: an object by another name. A small one, which lies in the image.
        kept_time("dir/below/other", &|path| fs::write(path, [8; 5000]).unwrap());
        kept_time("dir/below/small", &|path| fs::write(path, "SMALL").unwrap());
        fs::set_permissions(tree.join("dir/large"), fs::Permissions::from_mode(0o640)).unwrap();
        fs::rename(tree.join("dir/twin"), tree.join("dir/xtwin")).unwrap();
        let mut line = ferry();
        line.args(["image", "build", "--layout", "composefs"]).arg(&tree).arg("-o").arg(made.place.at("newer"));
        text(line.arg("--store").arg(made.place.at("store")));
        let diff = |old: &str, new: &str, words: &[&str]| {
            let mut line = ferry();
            line.args(["image", "diff"]).arg(made.place.at(old)).arg(made.place.at(new)).args(words);
            let output = run(line.arg("--store").arg(made.place.at("store")));
            (output.status.code(), String::from_utf8(output.stdout).unwrap())
        };
        let expected = "M /dir (time)\nM /dir/below/other (content)\nM /dir/below/small (content)\nM /dir/large (mode)\n\
                        D /dir/twin\nA /dir/xtwin\n";
        assert_eq!(diff("image", "newer", &[]), (Some(4), expected.into()));
        let (_, back) = diff("newer", "image", &["--json"]);
        let first: serde_json::Value = serde_json::from_str(back.lines().next().unwrap()).unwrap();
        assert_eq!((&first["path"], &first["what"][0], back.lines().count()), (&"/dir".into(), &"time".into(), 6));
        assert_eq!(diff("newer", "newer", &[]), (Some(0), String::new()));
    }
}

#[test]
fn a_dump_file_and_an_archive_are_sources_too() {
    let made = Made::ours();
    fs::write(made.place.at("dump"), text(&mut made.image("dump"))).unwrap();
    let mut line = ferry();
    line.args(["image", "build", "--layout", "composefs", "--json"]).arg(made.place.at("dump"));
    line.arg("-o").arg(made.place.at("again")).arg("--store").arg(made.place.at("store"));
    let built: serde_json::Value = serde_json::from_str(&text(&mut line)).unwrap();
    assert_eq!((built["digest"].as_str(), built["new_bytes"].as_u64()), (Some(made.digest.as_str()), Some(0)));
    let mut line = Command::new("sh");
    line.arg("-c").arg("tar --format=posix --xattrs --xattrs-include='*' --sort=name -C \"$1\" -c . | \"$0\" image build --layout composefs - -o \"$2\" --store \"$3\"");
    line.arg(env!("CARGO_BIN_EXE_ferry"))
        .arg(made.place.at("tree"))
        .arg(made.place.at("third"))
        .arg(made.place.at("store"));
    assert_eq!(text(&mut line).trim_end(), made.digest);
    let mut line = ferry();
    line.args(["image", "build"]).arg(made.place.at("dump")).arg("-o").arg(made.place.at("flat"));
    let said = refused(1, line.arg("--store").arg(made.place.at("store")));
    assert!(said.contains("use the layout composefs"), "{said}");
    fs::write(made.place.at("dump"), "/ 0 40755 2 0 0 0 0.0 - - -\n/a/b 0 100644 1 0 0 0 0.0 - - -\n").unwrap();
    let mut line = ferry();
    line.args(["image", "build", "--layout", "composefs"]).arg(made.place.at("dump")).arg("-o").arg(made.place.at("x"));
    let said = refused(1, line.arg("--store").arg(made.place.at("store")));
    assert!(said.contains("line 2: its directory is not there"), "{said}");
}

#[test]
fn a_flipped_object_is_named_and_never_read() {
    for made in [Made::ours(), Made::theirs()] {
        let object = made.object();
        fs::set_permissions(&object, fs::Permissions::from_mode(0o644)).unwrap();
        fs::File::options().write(true).open(&object).unwrap().write_all_at(b"x", 5000).unwrap();
        let output = run(&mut made.with_store("verify"));
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(4));
        let name = object.display().to_string();
        assert!(said.starts_with("/dir/large: the object ") && said.contains(&name), "{said}");
        let output = run(made.with_store("cat").arg("dir/large"));
        assert_eq!((output.status.code(), output.stdout), (Some(1), Vec::new()));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(&name) && said.contains("readers get EIO"), "{said}");
        fs::remove_file(&object).unwrap();
        let said = String::from_utf8(run(&mut made.with_store("verify")).stdout).unwrap();
        assert!(said.contains("cannot read the object") && said.contains(&name), "{said}");
        assert_eq!(text(made.with_store("cat").arg("dir/below/small")), "small");
    }
}

#[test]
fn both_are_sources_of_mounts() {
    needs_fuse!();
    for made in [Made::ours(), Made::theirs()] {
        let mount = || {
            let mut line = ferry();
            line.arg("mount").arg(format!("image:{}", made.place.at("image").display())).arg(&made.place.mnt);
            line.arg("--store").arg(made.place.at("store")).args(["--digest", &made.digest]);
            line
        };
        let pid = made.place.mounted_by(&mut mount());
        made.compare(&made.place.mnt);
        made.place.unmount(pid);
        let object = made.object();
        fs::set_permissions(&object, fs::Permissions::from_mode(0o644)).unwrap();
        fs::File::options().write(true).open(&object).unwrap().write_all_at(b"x", 199_999).unwrap();
        let pid = made.place.mounted_by(&mut mount());
        assert_eq!(fs::read(made.place.mnt.join("dir/large")).unwrap_err().raw_os_error(), Some(5));
        assert_eq!(fs::read(made.place.mnt.join("dir/below/other")).unwrap(), [7; 5000]);
        made.place.unmount(pid);
    }
}

#[test]
fn the_kernel_mounts_both() {
    for made in [Made::ours(), Made::theirs()] {
        let mnt = &made.place.mnt;
        let output = run(made.with_store("mount").arg(mnt));
        let said = String::from_utf8_lossy(&output.stderr);
        if said.contains("this kernel") || said.contains("only root") {
            ferry_skip::skip!("{said}");
            return;
        }
        assert!(output.status.success(), "{said}");
        let mounted = Mounted(mnt);
        made.compare(mnt);
        drop(mounted);
        // Where the kernel cannot prove what it reads, nothing is mounted that looks as if it did.
        let output = run(made.with_store("mount").arg(mnt).args(["--digest", &made.digest]));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "a temporary directory has no fs-verity");
        assert!(said.contains("fs-verity"), "{said}");
        let said = refused(1, made.with_store("mount").arg(mnt).args(["--digest", &"0".repeat(64)]));
        assert!(said.contains(&made.digest), "{said}");
    }
}

#[test]
fn mount_composefs_mounts_ferrys_images() {
    let made = Made::ours();
    let mnt = &made.place.mnt;
    let objects = format!("basedir={}", made.place.at("store/objects").display());
    let output = run(tool("mount.composefs").arg("-o").arg(objects).arg(made.place.at("image")).arg(mnt));
    let said = String::from_utf8_lossy(&output.stderr);
    if rustix::process::geteuid().is_root() {
        assert!(output.status.success(), "{said}");
        let _mounted = Mounted(mnt);
        made.compare(mnt);
    }
}

#[test]
fn an_image_of_this_layout_is_no_disk() {
    let made = Made::ours();
    let mut line = ferry();
    line.arg("disk")
        .arg(format!("image:{}", made.place.at("image").display()))
        .arg("--store")
        .arg(made.place.at("store"));
    let output = run(line.arg("--vhost-user").arg(made.place.at("socket")));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("cannot be a disk"), "{said}");
}

/// A store that mkcomposefs has filled is looked at and cleaned as well; what another program has just put there stays.
#[test]
fn the_store_of_mkcomposefs_is_cleaned() {
    let made = Made::theirs();
    let place = &made.place;
    fs::write(place.at("tree/dir/twin"), [9; 6000]).unwrap();
    let mut line = tool("mkcomposefs");
    line.arg(format!("--digest-store={}", place.at("store/objects").display()));
    text(line.arg(place.at("tree")).arg(place.at("newer")));
    let command = |name: &str, words: &[&str]| {
        let mut line = ferry();
        line.args(["image", name, "--json", "--store"]).arg(place.at("store")).args(words);
        serde_json::from_str::<serde_json::Value>(&text(line.current_dir(place.directory.path()))).unwrap()
    };
    let used = command("du", &["image", "newer"]);
    assert_eq!((used["objects"].as_u64(), used["garbage_bytes"].as_u64()), (Some(3), Some(0)), "{used}");
    let kept = command("gc", &["image"]);
    assert_eq!((kept["objects"]["removed"].as_u64(), kept["objects"]["young"].as_u64()), (Some(0), Some(1)), "{kept}");
    let done = command("gc", &["image", "--grace-s", "0"]);
    assert_eq!((done["objects"]["removed"].as_u64(), done["objects"]["kept"].as_u64()), (Some(1), Some(2)), "{done}");
    assert_eq!(text(&mut made.with_store("verify")), "clean\n");
    let damaged = run(ferry().args(["image", "verify"]).arg(place.at("newer")).arg("--store").arg(place.at("store")));
    assert_eq!(damaged.status.code(), Some(4));
}
