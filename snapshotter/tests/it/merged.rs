//! One image of all layers below a container.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File, Permissions};
use std::hash::Hasher;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use ferry_snapshotter::api::{Labels, Mount};
use ferry_snapshotter::{GID_LABEL, UID_LABEL};
use rustix::fs::{CWD, FileType, Mode, XattrFlags, lgetxattr, llistxattr, lsetxattr, mknodat};
use rustix::mount::{UnmountFlags, unmount};

use crate::client::Client;
use crate::images::server;
use crate::server::{Mounted, Server};

/// An entry of a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    mode: u32,
    owner: (u32, u32),
    device: u64,
    mtime: (i64, i64),
    /// The length and a digest.
    contents: (usize, u64),
    xattrs: BTreeMap<String, Vec<u8>>,
    /// The first path of the same inode.
    first: PathBuf,
}

/// Everything in a tree, by path.
pub fn facts(root: &Path) -> BTreeMap<PathBuf, Facts> {
    let (mut seen, mut inodes) = (BTreeMap::new(), BTreeMap::new());
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        // A slash at the end would lead to what is mounted on the root.
        let path = if below.as_os_str().is_empty() { root.to_owned() } else { root.join(&below) };
        let found = fs::symlink_metadata(&path).unwrap();
        let contents = if found.is_dir() {
            let mut names: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort_unstable();
            left.extend(names.into_iter().rev().map(|name| below.join(name)));
            Vec::new()
        } else if found.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
        } else if found.is_file() {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        let mut hasher = DefaultHasher::new();
        hasher.write(&contents);
        let mut list = [0; 4096];
        let length = llistxattr(&path, &mut list[..]).unwrap();
        let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let xattrs = names.map(|name| {
            let mut value = [0; 4096];
            let length = lgetxattr(&path, name, &mut value[..]).unwrap();
            (String::from_utf8(name.to_vec()).unwrap(), value[..length].to_vec())
        });
        let facts = Facts {
            mode: found.mode(),
            owner: (found.uid(), found.gid()),
            device: found.rdev(),
            mtime: (found.mtime(), found.mtime_nsec()),
            contents: (contents.len(), hasher.finish()),
            xattrs: xattrs.collect(),
            first: inodes.entry((found.dev(), found.ino())).or_insert_with(|| below.clone()).clone(),
        };
        seen.insert(below, facts);
    }
    seen
}

/// Fails with what differs. Of the root, times do not count: a container has its own.
pub fn same(root: &Path, expected: &BTreeMap<PathBuf, Facts>, what: &str) {
    let found = facts(root);
    for path in found.keys().chain(expected.keys()) {
        let [one, other] = [&found, expected].map(|tree| {
            tree.get(path)
                .map(|facts| Facts { mtime: if path == Path::new("") { (0, 0) } else { facts.mtime }, ..facts.clone() })
        });
        assert_eq!(one, other, "{what}: {}", path.display());
    }
}

/// Adds a layer as containerd does, which unpacks into the upper directory, or by a mount; returns its id.
fn layer(server: &Server, client: &mut Client, (name, parent): (&str, &str), fill: impl FnOnce(&Path, &Path)) -> u64 {
    let key = format!("default/7/extract-{name} sha256:12");
    let mounts = client.prepare(&key, parent).unwrap();
    assert!(!lower(&mounts).iter().any(|path| path.ends_with("merged")), "{mounts:?}");
    let upper = option(&mounts, "upperdir=").unwrap_or(&mounts[0].source).to_owned();
    let mounted = Mounted::of(&mounts);
    fill(mounted.path(), Path::new(&upper));
    drop(mounted);
    client.commit(name, &key).unwrap();
    let id = Path::new(&upper).parent().unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap();
    assert!(server.root().join(format!("snapshots/{id}/layer")).exists(), "it is an image");
    id
}

fn option<'a>(mounts: &'a [Mount], name: &str) -> Option<&'a str> {
    mounts[0].options.iter().find_map(|option| option.strip_prefix(name))
}

/// The directories below what is mounted.
fn lower(mounts: &[Mount]) -> Vec<PathBuf> {
    let lower = option(mounts, "lowerdir=").unwrap_or(&mounts[0].source);
    lower.split(':').map(PathBuf::from).collect()
}

/// What overlayfs shows of the images of layers, the highest first.
fn stacked(server: &Server, ids: &[u64]) -> Mounted {
    let lower: Vec<_> = ids.iter().map(|id| format!("{}/snapshots/{id}/layer", server.root().display())).collect();
    let options = vec![format!("lowerdir={}", lower.join(":"))];
    Mounted::of(&[Mount { r#type: "overlay".into(), source: "overlay".into(), target: String::new(), options }])
}

/// Files have as many links as names: overlayfs counts those that upper layers hide, too.
fn links_are_counted(root: &Path) {
    let found = facts(root);
    for (path, facts) in found.iter().filter(|(path, _)| !root.join(path).is_dir()) {
        let names = found.values().filter(|other| other.first == facts.first).count();
        assert_eq!(fs::symlink_metadata(root.join(path)).unwrap().nlink(), names as u64, "{}", path.display());
    }
}

pub fn set(path: &Path, name: &str, value: &[u8]) {
    lsetxattr(path, name, value, XattrFlags::empty()).unwrap_or_else(|error| panic!("{name}: {error}"));
}

pub fn node(path: &Path, kind: FileType, device: u64) {
    mknodat(CWD, path, kind, Mode::from_raw_mode(0o640), device).unwrap();
}

/// Bytes that have no equal chunks.
fn noise(seed: u32, length: usize) -> Vec<u8> {
    (0..).map(|at: u32| (at ^ seed).wrapping_mul(2_654_435_761)).flat_map(u32::to_le_bytes).take(length).collect()
}

/// Owner, some others, mask.
const ACL: [u8; 44] = [
    2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0, 4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 4, 0,
    255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255,
];

fn base(root: &Path) {
    for name in ["kept", "gone", "kept/deep", "to-file", "merged", "opaque", "opaque/below"] {
        fs::create_dir(root.join(name)).unwrap();
    }
    for (number, length) in [0, 1, 64, 65, 4096, 5000, 65_536, 200_000].into_iter().enumerate() {
        let path = root.join(format!("kept/file-{number}"));
        fs::write(&path, noise(u32::try_from(number).unwrap(), length)).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000 + number as u64 * 77, 123_456_789);
        File::open(&path).unwrap().set_modified(time).unwrap();
    }
    for name in ["gone/file", "merged/one", "merged/two", "opaque/file", "opaque/below/file", "to-file/file"] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::hard_link(root.join("kept/file-7"), root.join("merged/link")).unwrap();
    fs::hard_link(root.join("kept/file-5"), root.join("kept/deep/link")).unwrap();
    symlink("/nowhere", root.join("kept/symlink")).unwrap();
    symlink("merged", root.join("to-directory")).unwrap();
    node(&root.join("kept/fifo"), FileType::Fifo, 0);
    node(&root.join("kept/socket"), FileType::Socket, 0);
    node(&root.join("kept/null"), FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    node(&root.join("kept/loop"), FileType::BlockDevice, rustix::fs::makedev(7, 300));
    for name in ["symlink", "fifo", "null"] {
        fs::hard_link(root.join("kept").join(name), root.join(format!("merged/link-{name}"))).unwrap();
    }
    chown(root.join("kept/file-4"), Some(70_000), Some(5)).unwrap();
    fs::set_permissions(root.join("kept/file-4"), Permissions::from_mode(0o6755)).unwrap();
    fs::set_permissions(root.join("merged"), Permissions::from_mode(0o1777)).unwrap();
    set(
        &root.join("kept/file-3"),
        "security.capability",
        &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    set(&root.join("kept/file-3"), "user.some", b"value");
    set(&root.join("kept/deep"), "trusted.other", b"value");
    set(&root.join("kept/file-6"), "system.posix_acl_access", &ACL);
}

fn second(root: &Path, upper: &Path) {
    fs::remove_dir_all(root.join("gone")).unwrap();
    fs::remove_dir_all(root.join("to-file")).unwrap();
    fs::write(root.join("to-file"), "a file").unwrap();
    fs::remove_file(root.join("to-directory")).unwrap();
    fs::create_dir(root.join("to-directory")).unwrap();
    fs::write(root.join("to-directory/one"), "another").unwrap();
    fs::remove_dir_all(root.join("opaque")).unwrap();
    fs::create_dir(root.join("opaque")).unwrap();
    fs::create_dir(root.join("opaque/below")).unwrap();
    fs::write(root.join("opaque/below/new"), "new").unwrap();
    // A file with chunks in two packs.
    File::options().write(true).open(root.join("kept/file-7")).unwrap().write_all_at(b"changed", 70_000).unwrap();
    fs::remove_file(root.join("merged/two")).unwrap();
    fs::write(root.join("merged/three"), noise(9, 100_000)).unwrap();
    fs::set_permissions(root.join("kept/deep"), Permissions::from_mode(0o2711)).unwrap();
    // What hides nothing: layers of other programs have such.
    node(&upper.join("never-there"), FileType::CharacterDevice, 0);
}

fn third(root: &Path, _: &Path) {
    fs::remove_file(root.join("to-file")).unwrap();
    fs::create_dir(root.join("to-file")).unwrap();
    fs::write(root.join("to-file/again"), "again").unwrap();
    fs::create_dir(root.join("gone")).unwrap();
    fs::hard_link(root.join("merged/three"), root.join("gone/link")).unwrap();
    fs::write(root.join("merged/two"), "two again").unwrap();
    chown(root.join("merged"), Some(3), Some(4)).unwrap();
    chown(root, Some(12), Some(13)).unwrap();
}

/// Adds layers `layer-0` and on; returns their ids, the highest first.
fn layers(server: &Server, client: &mut Client) -> Vec<u64> {
    let first = |root: &Path, _: &Path| base(root);
    let ids = [
        layer(server, client, ("layer-0", ""), first),
        layer(server, client, ("layer-1", "layer-0"), second),
        layer(server, client, ("layer-2", "layer-1"), third),
        layer(server, client, ("layer-3", "layer-2"), |_, _| {}),
    ];
    ids.into_iter().rev().collect()
}

#[test]
fn a_merged_image_equals_overlayfs() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let ids = layers(&server, &mut client);
    for number in 1..4 {
        let expected = facts(stacked(&server, &ids[3 - number..]).path());
        let mounts = client.view("view", &format!("layer-{number}")).unwrap();
        assert!(mounts[0].r#type == "bind" && mounts[0].source.ends_with("/merged"), "{mounts:?}");
        let mounted = Mounted::of(&mounts);
        same(mounted.path(), &expected, "a view");
        links_are_counted(mounted.path());
        drop(mounted);
        client.remove("view").unwrap();
        let mounts = client.prepare("container", &format!("layer-{number}")).unwrap();
        let [merged] = &lower(&mounts)[..] else { panic!("{mounts:?}") };
        assert!(merged.ends_with("merged"), "{mounts:?}");
        let mounted = Mounted::of(&mounts);
        same(mounted.path(), &expected, "a container");
        // What is changed in it makes the same layer as before.
        fs::remove_dir_all(mounted.path().join("merged")).unwrap();
        fs::write(mounted.path().join("kept/file-5"), "changed").unwrap();
        assert_ne!(
            fs::read(mounted.path().join("kept/deep/link")).unwrap(),
            b"changed",
            "layers have no more links than files"
        );
        drop(mounted);
        client.commit("committed", "container").unwrap();
        let mounted = Mounted::of(&client.view("view", "committed").unwrap());
        assert!(!mounted.path().join("merged").exists());
        assert_eq!(fs::read(mounted.path().join("kept/file-5")).unwrap(), b"changed");
        drop(mounted);
        client.remove("view").unwrap();
        client.remove("committed").unwrap();
    }
    for number in (0..4).rev() {
        client.remove(&format!("layer-{number}")).unwrap();
    }
    client.remove("empty").unwrap();
    client.cleanup().unwrap();
    assert_eq!(server.mount_points(), [] as [&Path; 0]);
    assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 0);
}

/// What overlayfs alone can show is left to it.
#[test]
fn layers_with_renamed_directories_are_stacked() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let ids = layers(&server, &mut client);
    let renamed = layer(&server, &mut client, ("renamed", "layer-3"), |_, upper| {
        fs::create_dir(upper.join("other")).unwrap();
        set(&upper.join("other"), "trusted.overlay.redirect", b"/merged");
        node(&upper.join("merged"), FileType::CharacterDevice, 0);
    });
    for _ in 0..2 {
        let mounts = client.view("view", "renamed").unwrap();
        let expected: Vec<_> =
            [renamed].iter().chain(&ids).map(|id| server.root().join(format!("snapshots/{id}/layer"))).collect();
        assert_eq!(lower(&mounts), expected);
        client.remove("view").unwrap();
    }
    assert!(!server.root().join(format!("snapshots/{renamed}/merged-image")).exists());
    let mounts = client.view("view", "layer-3").unwrap();
    assert!(lower(&mounts)[0].ends_with("merged"), "those below are merged: {mounts:?}");
}

/// Many starts from one image at once make it once.
#[test]
fn a_merged_image_is_built_once_and_reused() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let ids = layers(&server, &mut client);
    let expected = facts(stacked(&server, &ids).path());
    let image = server.root().join(format!("snapshots/{}/merged-image", ids[0]));
    thread::scope(|scope| {
        for number in 0..8 {
            let socket = server.socket();
            scope.spawn(move || Client::connect(&socket).unwrap().prepare(&format!("c-{number}"), "layer-3").unwrap());
        }
    });
    let first = fs::metadata(&image).unwrap().ino();
    let mounted = Mounted::of(&client.mounts("c-0").unwrap());
    fs::write(mounted.path().join("kept/file-1"), "written").unwrap();
    let before = server.mount_points();
    server.kill();
    assert_eq!(fs::read(mounted.path().join("kept/file-2")).unwrap(), noise(2, 64));
    client = server.start_again();
    client.view("view", "layer-3").unwrap();
    assert_eq!((fs::metadata(&image).unwrap().ino(), server.mount_points()), (first, before), "it is used on");
    drop(mounted);

    // After a boot, it alone is mounted; and it is made once more where it is missing or damaged.
    for damage in [None, Some(false), Some(true)] {
        server.stop();
        server.mount_points().iter().for_each(|at| unmount(at, UnmountFlags::empty()).unwrap());
        match damage {
            None => {}
            Some(false) => fs::remove_file(&image).unwrap(),
            Some(true) => {
                let mut bytes = fs::read(&image).unwrap();
                bytes[3000] ^= 1;
                fs::remove_file(&image).unwrap();
                fs::write(&image, bytes).unwrap();
            }
        }
        client = server.start_again();
        let mounted = Mounted::of(&client.mounts("view").unwrap());
        assert_eq!(server.mount_points(), [image.with_file_name("merged")]);
        same(mounted.path(), &expected, &format!("{damage:?}"));
        drop(mounted);
        let mounted = Mounted::of(&client.mounts("c-0").unwrap());
        assert_eq!(fs::read(mounted.path().join("kept/file-1")).unwrap(), b"written");
    }
}

/// What a killed process left: a part, an image that is not recorded, and a mount of another one.
#[test]
fn unrecorded_images_are_removed() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let ids = layers(&server, &mut client);
    server.kill();
    let snapshots = server.root().join("snapshots");
    let at = |name: &str| snapshots.join(format!("{}/{name}", ids[0]));
    fs::write(at(".new-part"), "part").unwrap();
    fs::write(at("merged-image"), "another").unwrap();
    fs::create_dir(at("merged")).unwrap();
    rustix::mount::mount_bind(snapshots.join(format!("{}/layer", ids[3])), at("merged")).unwrap();
    client = server.start_again();
    for name in [".new-part", "merged-image", "merged"] {
        assert!(!at(name).exists(), "{name}");
    }
    let expected = facts(stacked(&server, &ids).path());
    same(Mounted::of(&client.view("view", "layer-3").unwrap()).path(), &expected, "after that");
}

/// Killed at all times of the making.
#[test]
fn kills_leave_nothing_wrong() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mut ids = layers(&server, &mut client);
    let expected = facts(stacked(&server, &ids).path());
    for round in 0..12 {
        let (below, name) = (format!("layer-{}", round + 3), format!("layer-{}", round + 4));
        ids.insert(0, layer(&server, &mut client, (&name, &below), |_, _| {}));
        let socket = server.socket();
        thread::scope(|scope| {
            scope.spawn(|| {
                // It may be killed before.
                let _ = Client::connect(&socket).map(|mut client| client.prepare(&format!("c-{round}"), &name));
            });
            thread::sleep(Duration::from_millis(round));
            server.kill();
        });
        client = server.start_again();
        let mounted = Mounted::of(&client.view(&format!("v-{round}"), &name).unwrap());
        same(mounted.path(), &expected, &format!("round {round}"));
        let snapshots = fs::read_dir(server.root().join("snapshots")).unwrap().count();
        assert_eq!(snapshots, client.list(&[]).unwrap().len());
    }
}

fn mapped() -> Labels {
    [UID_LABEL, GID_LABEL].into_iter().map(|name| (name.into(), "0:100000:80000".into())).collect()
}

/// The same for users of a container. What is based on stacked layers stays on them, and what is based on merged ones on these
/// (containerd/containerd pull request 13321: overlayfs reports stale files otherwise).
#[test]
fn it_is_mounted_with_the_users_of_a_container() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    layers(&server, &mut client);
    server.stop();
    server.configure("merge = false\n");
    client = server.start_again();
    let mounts = client.prepare_with("container", "layer-3", mapped()).unwrap();
    assert_eq!(lower(&mounts).len(), 4, "{mounts:?}");
    let expected = facts(Mounted::of(&mounts).path());
    assert_eq!(expected[Path::new("kept/file-4")].owner, (170_000, 100_005));
    server.stop();
    server.configure("");
    client = server.start_again();
    assert_eq!(lower(&client.mounts("container").unwrap()), lower(&mounts));
    let mounts = client.prepare_with("merged", "layer-3", mapped()).unwrap();
    let [merged] = &lower(&mounts)[..] else { panic!("{mounts:?}") };
    // containerd maps the ids of a single layer.
    let is_mapped = mounts[0].options.iter().any(|option| option == "uidmap=0:100000:80000");
    let link: PathBuf = merged.components().collect();
    let layer = fs::read_link(link).unwrap();
    assert!(is_mapped && layer.ends_with("merged") && !layer.ends_with("lower/merged"), "{mounts:?}");
    same(Mounted::of(&mounts).path(), &expected, "merged");
    server.stop();
    server.configure("merge = false\n");
    client = server.start_again();
    assert_eq!(client.mounts("merged").unwrap(), mounts);
    for name in ["merged", "container"] {
        client.remove(name).unwrap();
    }
    assert!(!server.mount_points().iter().any(|at| at.iter().any(|name| name == "lower")));
}
