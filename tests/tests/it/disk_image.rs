//! Images as disks with a public client, and mounted by the kernel from a copy of the disk.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ferry_image::{BuildOptions, Disk, Source, Store, build};
use ferry_tests::disks::{DiskServer, tool};
use ferry_tests::{Place, directory};
use tempfile::TempDir;

/// A tree and an image of it, in a directory.
struct Made {
    directory: TempDir,
}

impl Made {
    /// Builds twice, so that the second image has two packs, with most of the files in the first.
    fn new() -> Self {
        let made = Self { directory: directory(Place::Disk) };
        let tree = made.path("tree");
        for dir in 0..20 {
            let dir = tree.join(format!("dir{dir}"));
            fs::create_dir_all(&dir).unwrap();
            for file in 0..30_usize {
                fs::write(dir.join(format!("file{file}")), format!("{} {file};", dir.display()).repeat(file * 40))
                    .unwrap();
            }
        }
        fs::write(tree.join("large"), large()).unwrap();
        std::os::unix::fs::symlink("dir1/file29", tree.join("link")).unwrap();
        made.build("first");
        fs::write(tree.join("new"), "new".repeat(100_000)).unwrap();
        made.build("image");
        made
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn build(&self, name: &str) {
        let store = Store::create(&self.path("store")).unwrap();
        build(&self.path("tree"), &self.path(name), store, &BuildOptions::default(), &|_, _| {}).unwrap();
    }

    fn source(&self) -> Source {
        Source::open(&self.path("image"), &self.path("store"), None).unwrap()
    }

    fn offered(&self) -> DiskServer {
        let disk = Arc::new(Disk::new(self.source(), None));
        DiskServer::with(self.path("image"), tempfile::tempdir().unwrap(), disk, true)
    }
}

fn large() -> Vec<u8> {
    (0..1_500_000_u32).flat_map(u32::to_le_bytes).collect()
}

/// Reads the whole disk into a file.
fn copy(disk: &DiskServer, to: &Path) -> bool {
    let from = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on,read-only=on", disk.socket.display());
    let mut program = Command::new(tool("qemu-img"));
    program.args(["convert", "--image-opts", &from, "-O", "raw"]).arg(to);
    program.output().unwrap().status.success()
}

/// Runs a command of `qemu-io` on the read-only disk; returns its output.
fn read(disk: &DiskServer, command: &str) -> String {
    let image = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", disk.socket.display());
    let output = Command::new(tool("qemu-io")).args(["-r", "--image-opts", &image, "-c", command]).output().unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

/// A file system mounted from a file. It is unmounted at the end.
struct Mounted(PathBuf);

impl Mounted {
    fn new(file: &Path, on: PathBuf) -> Self {
        fs::create_dir_all(&on).unwrap();
        let mount = |options| {
            let mut program = Command::new("mount");
            program.args(["-t", "erofs", "-o", options]).arg(file).arg(&on).output().unwrap()
        };
        // Linux mounts EROFS from files since 6.12; before, from loop devices.
        let mounted = Some(mount("ro")).filter(|output| output.status.success()).unwrap_or_else(|| mount("ro,loop"));
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
        Self(on)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn an_image_as_a_disk_is_mounted_by_the_kernel() {
    let made = Made::new();
    assert_eq!(made.source().image().packs().len(), 2);
    let disk = made.offered();
    let raw = made.path("raw");
    assert!(copy(&disk, &raw));
    let mounted = Mounted::new(&raw, made.path("mounted"));
    let compared =
        Command::new("diff").args(["-r", "--no-dereference"]).arg(made.path("tree")).arg(&mounted.0).output();
    let compared = compared.unwrap();
    assert!(compared.status.success(), "{}", String::from_utf8_lossy(&compared.stdout));
    let listed = |dir: &Path| {
        let script = r#"cd "$1" && find . -printf '%p %m %U %G %s %T@ %l\n' | grep -v '^[.] ' | sort"#;
        let output = Command::new("sh").args(["-ec", script, "sh"]).arg(dir).output().unwrap();
        assert!(output.status.success());
        // A directory's size depends on the file system.
        let lines = String::from_utf8(output.stdout).unwrap();
        lines
            .lines()
            .filter(|line| !line.starts_with("./dir") || line.contains("/file"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let expected = listed(&made.path("tree"));
    assert!(expected.len() > 600);
    assert_eq!(listed(&mounted.0), expected);
}

/// Requests across the boundaries of image and packs return the bytes of both sides.
#[test]
fn requests_cross_boundaries_of_image_and_packs() {
    let made = Made::new();
    let disk = made.offered();
    let raw = made.path("raw");
    assert!(copy(&disk, &raw));
    let bytes = fs::read(&raw).unwrap();
    let source = made.source();
    let edges = [source.image().bytes(), source.image().bytes() + source.image().packs()[0].blocks * 4096];
    let mut expected = fs::read(made.path("image")).unwrap();
    for pack in source.image().packs() {
        expected.extend(fs::read(made.path("store/packs").join(pack.name.hex())).unwrap());
    }
    assert!(bytes == expected);
    for edge in edges {
        for (offset, count) in [(edge - 512, 1024), (edge - 4096, 8192), (edge - 512, 65536), (edge, 512)] {
            let (from, to) =
                (usize::try_from(offset).unwrap(), usize::try_from(offset + count).unwrap().min(bytes.len()));
            let dump = read(&disk, &format!("read -v {offset} {}", to - from));
            assert!(hex(&dump) == bytes[from..to], "{offset} {count}: {dump}");
        }
    }
    let output = disk.qemu_io(&["write 0 512"]);
    let said = [output.stdout, output.stderr].concat();
    assert!(!output.status.success() || String::from_utf8_lossy(&said).contains("failed"), "a write went through");
}

/// The bytes of a dump that `qemu-io` has written: `00000200:  00 01 02 ...  ....`.
fn hex(dump: &str) -> Vec<u8> {
    let lines = dump.lines().filter_map(|line| line.split_once(":  ")).filter(|(at, _)| at.len() >= 8);
    let byte = |digits: &str| u8::from_str_radix(digits, 16).unwrap();
    lines.flat_map(|(_, rest)| rest[..47].trim_end().split(' ').map(byte).collect::<Vec<_>>()).collect()
}

#[test]
fn damage_fails_the_requests_of_one_piece() {
    for at in [5_000_000, 5_999_999, 6_000_010] {
        let made = Made::new();
        let source = made.source();
        let image = source.image();
        let nid = image.lookup(&image.inode(image.root()).unwrap(), ferry_vfs::Name::new(b"large").unwrap()).unwrap();
        let ferry_image::Data::Far { pack, block } = image.data(&image.inode(nid.unwrap()).unwrap()).unwrap() else {
            panic!("a large file is in a pack")
        };
        let path = made.path("store/packs").join(image.packs()[pack].name.hex());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        // The last one lies past the file's end, where a mapping of the file shows it.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"x", block * 4096 + at).unwrap();
        let disk = made.offered();
        let said = |offset: u64| read(&disk, &format!("read {offset} 4096"));
        let is_read = |said: &str| said.contains("read 4096/4096 bytes");
        // They are ordered by name: the digest of their contents, which include this directory's path.
        let place =
            |pack: usize| image.bytes() + image.packs()[..pack].iter().map(|pack| pack.blocks * 4096).sum::<u64>();
        let start = place(pack) + block * 4096;
        for (offset, good) in [
            (0, true),
            (image.bytes() - 4096, true),
            // Files of several pieces are proved piece by piece.
            (start, true),
            (start + at / 4096 * 4096, false),
            (place(1 - pack), true),
        ] {
            let said = said(offset);
            assert_eq!(is_read(&said), good, "{at}: {offset}: {said}");
        }
        assert!(!copy(&disk, &made.path("raw")));
    }
}
