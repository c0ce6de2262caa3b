//! `ferry image mount` with an upper layer, and from loop devices.
use crate::common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use common::place::Place;
use common::{ferry, refused, run};
use rustix::mount::{UnmountFlags, unmount};

/// Far more than the kernel takes to let go of a device.
const PATIENCE: Duration = Duration::from_secs(60);

fn large() -> Vec<u8> {
    (0..50_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// An image of a tree and its store, beside a mount point.
struct Made {
    place: Place,
}

/// A mount that ends with the test.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

impl Made {
    fn new(layout: &str) -> Self {
        let place = Place::new();
        let tree = place.at("tree");
        fs::create_dir_all(tree.join("dir/below")).unwrap();
        fs::write(tree.join("dir/large"), large()).unwrap();
        fs::write(tree.join("dir/below/small"), "small").unwrap();
        fs::write(tree.join("dir/goes"), [7; 5000]).unwrap();
        let made = Self { place };
        made.build("image", layout);
        made
    }

    /// Returns the digest.
    fn build(&self, image: &str, layout: &str) -> String {
        let mut line = ferry();
        line.args(["image", "build", "--layout", layout]).arg(self.place.at("tree"));
        text(line.arg("-o").arg(self.place.at(image)).arg("--store").arg(self.place.at("store"))).trim_end().to_owned()
    }

    fn command(&self, image: &str, options: &[&str]) -> Command {
        self.command_in("", image, options)
    }

    /// With the image and the store in this directory.
    fn command_in(&self, directory: &str, image: &str, options: &[&str]) -> Command {
        let directory = self.place.at(directory);
        let mut line = ferry();
        line.args(["image", "mount"]).arg(directory.join(image)).arg(&self.place.mnt).arg("--store");
        line.arg(directory.join("store")).args(options);
        line
    }

    /// Mounts the image; nothing if that cannot be done here.
    fn mounted(&self, options: &[&str]) -> Option<Mounted<'_>> {
        self.mounted_by(&mut self.command("image", options))
    }

    fn mounted_by(&self, line: &mut Command) -> Option<Mounted<'_>> {
        let output = run(line.current_dir(self.place.directory.path()));
        let said = String::from_utf8_lossy(&output.stderr);
        if ["this kernel", "only root", "loop-control"].iter().any(|reason| said.contains(reason)) {
            ferry_skip::skip!("{said}");
            return None;
        }
        assert!(output.status.success(), "{said}");
        Some(Mounted(&self.place.mnt))
    }

    /// Unmounts once, after which nothing is left of it.
    fn unmount(&self, mounted: Mounted<'_>) {
        let begin = Instant::now();
        // A process that another test just starts has all descriptors of this one for a moment.
        while let Err(error) = unmount(&self.place.mnt, UnmountFlags::empty()) {
            assert!(error == rustix::io::Errno::BUSY && begin.elapsed() < PATIENCE, "{error}");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::mem::forget(mounted);
        let (here, above) = (self.place.mnt.metadata().unwrap(), self.place.directory.path().metadata().unwrap());
        assert_eq!(here.dev(), above.dev(), "something is still mounted");
        // The kernel lets go of devices after the call.
        let begin = Instant::now();
        while let Some(device) = device_of(self.place.directory.path()) {
            assert!(begin.elapsed() < PATIENCE, "{} is still in use", device.display());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A loop device that is made of a file below a directory.
fn device_of(directory: &Path) -> Option<PathBuf> {
    let directory = directory.canonicalize().unwrap();
    fs::read_dir("/sys/block").ok()?.flatten().map(|entry| entry.path()).find(|device| {
        fs::read_to_string(device.join("loop/backing_file")).is_ok_and(|file| Path::new(&file).starts_with(&directory))
    })
}

fn is_kept(layout: &str, further: &[&str]) {
    let made = Made::new(layout);
    let (mnt, before) = (&made.place.mnt, fs::read(made.place.at("image")).unwrap());
    let options = [further, &["--upper", "changes"]].concat();
    let Some(mounted) = made.mounted(&options) else { return };
    assert!(fs::read(mnt.join("dir/large")).unwrap() == large());
    fs::write(mnt.join("dir/new"), "new").unwrap();
    let changed = [large(), b"more".to_vec()].concat();
    fs::write(mnt.join("dir/large"), &changed).unwrap();
    fs::remove_file(mnt.join("dir/goes")).unwrap();
    fs::set_permissions(mnt.join("dir/below/small"), fs::Permissions::from_mode(0o600)).unwrap();
    made.unmount(mounted);
    assert_eq!(fs::read(made.place.at("changes/dir/new")).unwrap(), b"new");
    assert!(fs::read(made.place.at("image")).unwrap() == before);

    let mounted = made.mounted(&options).unwrap();
    assert_eq!(fs::read(mnt.join("dir/new")).unwrap(), b"new");
    assert!(fs::read(mnt.join("dir/large")).unwrap() == changed);
    assert!(!mnt.join("dir/goes").exists());
    assert_eq!(fs::metadata(mnt.join("dir/below/small")).unwrap().mode(), 0o100_600);
    assert_eq!(fs::read(mnt.join("dir/below/small")).unwrap(), b"small");
    made.unmount(mounted);

    let mounted = made.mounted(further).unwrap();
    assert!(fs::read(mnt.join("dir/large")).unwrap() == large());
    assert!(mnt.join("dir/goes").exists() && !mnt.join("dir/new").exists());
    assert_eq!(fs::write(mnt.join("new"), "x").unwrap_err().raw_os_error(), Some(30));
    made.unmount(mounted);
}

#[test]
fn writes_to_an_image_are_kept() {
    is_kept("flat", &[]);
}

#[test]
fn writes_to_a_composefs_image_are_kept() {
    is_kept("composefs", &[]);
}

#[test]
fn writes_to_an_image_on_a_loop_device_are_kept() {
    is_kept("flat", &["--loop"]);
}

#[test]
fn writes_to_a_composefs_image_on_a_loop_device_are_kept() {
    is_kept("composefs", &["--loop"]);
}

/// fsconfig(2) takes 255 bytes.
#[test]
fn long_paths_are_mounted_or_refused() {
    for layout in ["flat", "composefs"] {
        let made = Made::new(layout);
        let digest = made.build("image", layout);
        let deep = format!("{0}/{0}", "d".repeat(150));
        fs::create_dir_all(made.place.at(&deep)).unwrap();
        for name in ["image", "store"] {
            fs::rename(made.place.at(name), made.place.at(&deep).join(name)).unwrap();
        }
        let proved = ["--digest", &digest];
        for words in [&[][..], &["--loop"], &proved, &["--upper", "changes"]] {
            // The kernel cannot verify objects here.
            if layout == "composefs" && words.contains(&"--digest") {
                continue;
            }
            let Some(mounted) = made.mounted_by(&mut made.command_in(&deep, "image", words)) else { return };
            assert!(fs::read(made.place.mnt.join("dir/large")).unwrap() == large(), "{layout} {words:?}");
            made.unmount(mounted);
        }
        let changes = made.place.at(&deep).join("changes");
        let said = refused(1, &mut made.command_in(&deep, "image", &["--upper", changes.to_str().unwrap()]));
        assert!(said.contains(" bytes; the kernel takes at most 255: choose a shorter path"), "{said}");
    }
}

#[test]
fn a_layer_is_of_one_image_and_one_mount() {
    let made = Made::new("flat");
    let directory = made.place.directory.path();
    let said = |image: &str, options: &[&str]| refused(1, made.command(image, options).current_dir(directory));
    let Some(mounted) = made.mounted(&["--upper", "changes", "--work", "own"]) else { return };
    fs::write(made.place.mnt.join("new"), "new").unwrap();
    let twice = said("image", &["--upper", "changes", "--work", "own"]);
    let mnt = made.place.mnt.display();
    assert!(twice.contains(&format!("changes is already the upper layer of the mount on {mnt}")), "{twice}");
    // By other paths, and with another work directory, or another upper layer.
    fs::create_dir(made.place.at("bound")).unwrap();
    rustix::mount::mount_bind(directory, made.place.at("bound")).unwrap();
    let bound = made.place.at("bound");
    let _bound = Mounted(&bound);
    for (upper, work, used) in [
        ("bound/changes", "bound/fresh", "bound/changes is already the upper layer of"),
        ("bound/new", "bound/own", "bound/own is already the work directory of"),
    ] {
        let twice = said("image", &["--upper", upper, "--work", work]);
        assert!(twice.contains(used), "{twice}");
    }
    let mount_point = said("image", &["--upper", "bound"]);
    assert!(mount_point.contains("/bound: use a subdirectory of "), "{mount_point}");
    made.unmount(mounted);
    fs::write(made.place.at("tree/another"), "file").unwrap();
    made.build("other", "flat");
    for work in ["own", "fresh"] {
        let other = said("other", &["--upper", "changes", "--work", work]);
        assert!(other.contains("changes has the changes of another image ("), "{other}");
    }
    // An empty layer belongs to no image. overlayfs removes backslashes.
    fs::create_dir(made.place.at("back\\slash")).unwrap();
    let empty = ["--upper", "back\\slash/upper"];
    made.unmount(made.mounted(&empty).unwrap());
    let mounted = made.mounted_by(&mut made.command("other", &empty)).unwrap();
    fs::write(made.place.mnt.join("new"), "new").unwrap();
    assert_eq!(fs::read(made.place.at("back\\slash/upper/new")).unwrap(), b"new");
    let twice = said("other", &empty);
    assert!(twice.contains("upper is already the upper layer of the mount on"), "{twice}");
    made.unmount(mounted);
    let inside = said("image", &["--upper", "changes", "--work", "changes/work"]);
    assert!(inside.contains("must not contain each other"), "{inside}");
    fs::write(made.place.at("file"), "").unwrap();
    let file = said("image", &["--upper", "file"]);
    assert!(file.contains("file is not a directory"), "{file}");
    let missing = said("image", &["--upper", "none/changes"]);
    assert!(missing.contains("/none/changes: No such file"), "{missing}");
    let output = run(&mut made.command("image", &["--work", "own"]));
    assert_eq!(output.status.code(), Some(2));
    let shared = Path::new("/dev/shm");
    if shared.metadata().is_ok_and(|shared| shared.dev() != directory.metadata().unwrap().dev()) {
        let work = tempfile::tempdir_in(shared).unwrap();
        let apart = said("image", &["--upper", "fresh", "--work", work.path().to_str().unwrap()]);
        assert!(apart.contains("is on another mount or file system than"), "{apart}");
    }
}
