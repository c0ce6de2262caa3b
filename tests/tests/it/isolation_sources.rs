//! The sandbox of a server of images and of persistent memory, and that both can be read in it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use ferry_driver::{Driver, ROOT};
use ferry_isolation::Capabilities;
use ferry_tests::sandboxed::{Served, USER, UserHome, is_root};
use rustix::process::Signal;

const O_RDWR_CREAT: u32 = 0o102;

/// A home with an image of a tree, of this layout.
fn image_of(user: u32, layout: &str) -> UserHome {
    let home = UserHome::of(user);
    home.make("tree", |tree| fs::create_dir(tree).unwrap());
    for file in ["one", "two"] {
        home.make(&format!("tree/{file}"), |path| fs::write(path, file.repeat(200_000)).unwrap());
    }
    home.run(&format!("image build tree -o image --store store --layout {layout}"));
    home
}

/// Reads a file of the image by virtio-fs, and by 9P.
fn is_read(served: &Served, name: &str) -> Driver {
    let mut driver = served.guest();
    let found = driver.lookup(ROOT, name).unwrap();
    let open = driver.open(found.nodeid, 0).unwrap();
    let expected = name.repeat(200_000).into_bytes();
    let mut read = Vec::new();
    while read.len() < expected.len() {
        let piece = driver.read(found.nodeid, open.fh, read.len() as u64, 128 << 10).unwrap();
        assert!(!piece.is_empty());
        read.extend(piece);
    }
    assert!(read == expected);
    driver
}

/// The names of the packs of a store, in their home.
fn packs(home: &UserHome) -> Vec<String> {
    let packs = fs::read_dir(home.at("store/packs")).unwrap();
    packs
        .map(|entry| format!("store/packs/{}", entry.unwrap().file_name().into_string().unwrap()))
        .filter(|name| !name.contains('.'))
        .collect()
}

/// A flat image: its packs are open, and nothing else of its store can be reached.
fn flat_images_are_confined(user: u32) {
    let home = image_of(user, "flat");
    let mut served = home.serve("share image:image --store store --virtiofs s --9p unix:n --json --log debug");
    served.says("confined namespaces=true landlock=Some(Full) capabilities=none seccomp=Some(Kill)");
    let driver = is_read(&served, "one");
    let packs = packs(&served.home);
    assert!(!packs.is_empty());
    served.is_confined(0, &packs.iter().map(String::as_str).collect::<Vec<_>>(), 0);
    drop(driver);
    drop(is_read(&served, "two"));
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    assert!(["s", "n"].iter().all(|socket| !served.home.at(socket).exists()));
}

#[test]
fn flat_images_of_roots_are_confined() {
    if is_root() {
        flat_images_are_confined(0);
    }
}

#[test]
fn flat_images_of_another_user_are_confined() {
    if is_root() {
        flat_images_are_confined(USER);
    }
}

/// composefs's layout: the objects of the store can be seen, and cannot be written; they are opened as they are wanted. The same
/// image twice is one source, and has one place.
#[test]
fn images_of_composefs_are_confined() {
    if !is_root() {
        return;
    }
    let home = image_of(0, "composefs");
    // A store of another user, which root reads as root.
    for entry in fs::read_dir(home.at("store/objects")).unwrap() {
        let dir = entry.unwrap().path();
        for object in fs::read_dir(&dir).unwrap() {
            let object = object.unwrap().path();
            fs::set_permissions(&object, fs::Permissions::from_mode(0o400)).unwrap();
            chown(object, Some(USER), Some(USER)).unwrap();
        }
    }
    let twice = "image:image --store store --virtiofs t";
    let line = format!("share image:image --store store --virtiofs s {twice} --json --log debug");
    let mut served = home.serve(&line);
    served.says("confined namespaces=true landlock=Some(Full) capabilities=DAC_OVERRIDE seccomp=Some(Kill)");
    assert!(served.inside.open_files().iter().all(|path| !path.starts_with(served.home.at("store"))));
    let driver = is_read(&served, "one");
    served.is_confined(1, &[], Capabilities::ALL_USERS.bits() & Capabilities::of_thread().unwrap().bits());
    let seen = served.inside.file("root/share/0").metadata().unwrap();
    let objects = served.home.at("store/objects").metadata().unwrap();
    assert_eq!((seen.dev(), seen.ino()), (objects.dev(), objects.ino()));
    let mounts = fs::read_to_string(served.inside.file("mountinfo")).unwrap();
    let share = mounts.lines().find(|line| line.contains(" /share/0 ")).unwrap();
    assert!(share.contains(" /share/0 ro,nosuid,nodev"), "{share}");
    drop(driver);
    drop(is_read(&served, "two"));
    // Damaged objects are reported by their names on the host.
    let object = fs::read_dir(served.home.at("store/objects")).unwrap().find_map(|dir| {
        let objects = fs::read_dir(dir.unwrap().path()).unwrap();
        objects.map(|object| object.unwrap().path()).next()
    });
    fs::write(object.unwrap(), "other bytes").unwrap();
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());

    let mut served = served.home.serve("share image:image --store store --virtiofs s --json");
    let mut driver = served.guest();
    let bad = ["one", "two"].into_iter().any(|name| {
        let found = driver.lookup(ROOT, name).unwrap();
        let open = driver.open(found.nodeid, 0).unwrap();
        driver.read(found.nodeid, open.fh, 0, 4096).is_err()
    });
    assert!(bad);
    served.says(&format!("the object {}/", served.home.at("store/objects").display()));
    drop(driver);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
}

/// A file system in a file, with a second tier: created inside the sandbox, used, and found again.
fn persistent_memory_is_confined(user: u32) {
    const LINE: &str = "share pmem:p --size 8M --tier2 cold --tier2-size 8M --virtiofs s --json --log debug";
    let mut served = UserHome::of(user).serve(LINE);
    served.says("confined namespaces=true landlock=Some(Full) capabilities=none seccomp=Some(Kill)");
    let mut guest = served.guest();
    let (file, open) = guest.create(ROOT, "new", O_RDWR_CREAT, 0o100_644).unwrap();
    let data = vec![7; 1 << 20];
    for piece in 0..10 {
        assert_eq!(guest.write(file.nodeid, open.fh, piece << 20, &data[..64 << 10]).unwrap(), 64 << 10);
    }
    guest.fsync(file.nodeid, open.fh).unwrap();
    served.is_confined(0, &["cold", "p"], 0);
    let names = served.inside.status("Name");
    assert!(names.contains(&"pmem-keeper".to_owned()), "{names:?}");
    drop(guest);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());

    let mut served = served.home.serve(LINE);
    let mut guest = served.guest();
    let found = guest.lookup(ROOT, "new").unwrap();
    let open = guest.open(found.nodeid, 0).unwrap();
    assert_eq!(guest.read(found.nodeid, open.fh, 9 << 20, 64 << 10).unwrap(), data[..64 << 10]);
    drop(guest);
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    served.home.run("fsck pmem:p --tier2 cold");
}

#[test]
fn persistent_memory_of_roots_is_confined() {
    if is_root() {
        persistent_memory_is_confined(0);
    }
}

#[test]
fn persistent_memory_of_another_user_is_confined() {
    if is_root() {
        persistent_memory_is_confined(USER);
    }
}

/// What asks servers while it serves stays outside, and says so to who insists.
#[test]
fn sources_that_contact_servers_are_not_confined() {
    let home = image_of(rustix::process::geteuid().as_raw(), "flat");
    let line = "share image:image --store store --from oci:localhost/none:1 --virtiofs s --sandbox namespace";
    let output = home.command(&[], line).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("fetches data from its server (--from)"), "{said}");
}
