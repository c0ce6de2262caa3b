//! Committed layers as images.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

use rustix::fs::{XattrFlags, lsetxattr};

use crate::lazy_place::{ferry, until};
use crate::server::{Mounted, Server, can_mount, in_memory, refused};

/// A server that makes images, or `None`, and the test is skipped.
pub fn server() -> Option<Server> {
    if !can_mount() {
        return None;
    }
    let mut server = Server::start("auto");
    let mut client = server.client();
    client.prepare("a", "").unwrap();
    client.commit("empty", "a").unwrap();
    if server.root().join("snapshots/1/layer").exists() {
        return Some(server);
    }
    ferry_skip::skip!("this kernel does not mount images from files, or shows one time for all");
    None
}

#[test]
fn layers_share_files_and_directories_are_removed() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let contents: Vec<u8> = (0..2_000_000_u32).flat_map(u32::to_le_bytes).collect();
    for name in ["one", "two"] {
        let mounted = Mounted::of(&client.prepare("a", "").unwrap());
        fs::write(mounted.path().join(name), &contents).unwrap();
        drop(mounted);
        client.commit(name, "a").unwrap();
    }
    let space = |path: &Path| -> u64 {
        let files = fs::read_dir(path).unwrap().map(Result::unwrap).filter(|file| file.file_name() != "table");
        files.map(|file| file.metadata().unwrap().blocks() * 512).sum()
    };
    let packs = server.root().join("store/packs");
    assert!((8_000_000..9_000_000).contains(&space(&packs)), "{} bytes", space(&packs));
    for id in [2, 3] {
        let directory = server.root().join(format!("snapshots/{id}"));
        assert!(!directory.join("fs").exists() && !directory.join("work").exists() && directory.join("layer").exists());
    }
    let mounted = Mounted::of(&client.view("v", "two").unwrap());
    assert_eq!(fs::read(mounted.path().join("two")).unwrap(), contents);
    client.remove("one").unwrap();
    client.cleanup().unwrap();
    assert_eq!(fs::read(mounted.path().join("two")).unwrap(), contents, "what is shared stays");
    drop(mounted);
    client.remove("v").unwrap();
    client.remove("two").unwrap();
    client.cleanup().unwrap();
    assert_eq!(space(&packs), 0, "nothing is needed any more");
}

/// All of it would have to be hashed, and nothing else be committed meanwhile.
#[test]
fn a_layer_of_large_holes_stays_a_directory() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mounted = Mounted::of(&client.prepare("a", "").unwrap());
    let hole = fs::File::create(mounted.path().join("hole")).unwrap();
    if hole.set_len(1 << 41).is_err() {
        return ferry_skip::skip!("this file system has no files of 2 TiB");
    }
    drop((hole, mounted));
    client.commit("layer", "a").unwrap();
    assert!(!server.root().join("snapshots/2/layer").exists() && server.root().join("snapshots/2/fs").exists());
    let mounted = Mounted::of(&client.view("v", "layer").unwrap());
    assert_eq!(mounted.path().join("hole").metadata().unwrap().len(), 1 << 41);
}

/// containerd/containerd issue 10548: people look for space by hand. `ferry image gc` cannot know what leases and pulls hold.
#[test]
fn nothing_is_removed_from_the_store_by_hand() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mounted = Mounted::of(&client.prepare("a", "").unwrap());
    fs::write(mounted.path().join("file"), "of a layer".repeat(1000)).unwrap();
    drop(mounted);
    client.commit("layer", "a").unwrap();
    client.prepare("container", "layer").unwrap();
    let (root, link) = (server.root(), server.directory.path().join("link"));
    std::os::unix::fs::symlink(root.join("store"), &link).unwrap();
    let empty = root.join("snapshots/1/image");
    let image = |words: &[&str], store: &Path| {
        Command::new(ferry()).arg("image").args(words).arg("--store").arg(store).output().unwrap()
    };
    // It says why each image stays.
    let output = image(&["du", "--json"], &link);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let held: Vec<_> = found["images"].as_array().unwrap().iter().map(|image| image["held_by"].clone()).collect();
    let expected = [("empty", vec![]), ("layer", vec!["container"])].map(|(snapshot, uses)| {
        let count = uses.len();
        serde_json::json!([{"image": format!("snapshots/{}/image", 1 + count), "snapshot": snapshot, "uses": uses, "uses_count": count}])
    });
    assert_eq!(held, expected, "{found}");
    let output = image(&["du"], &root.join("store"));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("held by snapshot layer; based on it: container\n")
            && said.contains(
                "held by snapshot empty; no snapshot is based on it: an image or a lease of containerd keeps it\n"
            )
            && said.contains("that containerd's garbage collection removes\n"),
        "{said}"
    );
    // It makes no difference whether it runs.
    for is_running in [true, false] {
        if !is_running {
            server.stop();
        }
        for store in [root.join("store"), link.clone()] {
            let output = image(&["gc", "--grace-s", "0", empty.to_str().unwrap()], &store);
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains("is the store of ferry-snapshotter"), "{said}");
            assert!(said.contains("ctr images rm") && said.contains(store.to_str().unwrap()), "{said}");
        }
    }
    let output = image(&["du", "--json"], &link);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let images = found["images"].as_array().unwrap();
    assert!(images.len() == 2 && images.iter().any(|image| image["own_bytes"] == 12_288), "{found}");
    assert_eq!((&found["garbage_bytes"], &images[0]["held_by"]), (&0.into(), &serde_json::Value::Null));
    assert!(String::from_utf8_lossy(&output.stderr).contains("does not tell"), "{output:?}");
    let output = image(&["du"], server.directory.path());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    let mut client = server.start_again();
    let mounted = Mounted::of(&client.view("v", "layer").unwrap());
    assert_eq!(fs::read_to_string(mounted.path().join("file")).unwrap(), "of a layer".repeat(1000));
}

#[test]
fn times_and_attributes_are_kept() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mounted = Mounted::of(&client.prepare("a", "").unwrap());
    let times = [1, 1_700_000_000, 1_700_000_001].map(|s| SystemTime::UNIX_EPOCH + Duration::new(s, 123_000_000));
    for (number, time) in times.iter().enumerate() {
        let path = mounted.path().join(number.to_string());
        fs::write(&path, "some").unwrap();
        lsetxattr(
            &path,
            "security.capability",
            &[1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            XattrFlags::empty(),
        )
        .unwrap();
        fs::File::open(&path).unwrap().set_modified(*time).unwrap();
    }
    drop(mounted);
    client.commit("layer", "a").unwrap();
    let mounted = Mounted::of(&client.view("v", "layer").unwrap());
    for (number, time) in times.iter().enumerate() {
        let path = mounted.path().join(number.to_string());
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), *time);
        let mut value = [0; 32];
        assert_eq!(rustix::fs::lgetxattr(&path, "security.capability", &mut value[..]), Ok(20));
    }
}

/// A container that was not stopped would lose its files.
#[test]
fn a_snapshot_that_is_still_mounted_stays_a_directory() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    for (key, parent) in [("a", ""), ("b", "empty")] {
        let mounted = Mounted::of(&client.prepare(key, parent).unwrap());
        fs::write(mounted.path().join("file"), "before").unwrap();
        client.commit(&format!("{key}-layer"), key).unwrap();
        assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"before");
        drop(mounted);
        let mounted = Mounted::of(&client.view("v", &format!("{key}-layer")).unwrap());
        assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"before");
        client.cleanup().unwrap();
        thread::sleep(Duration::from_millis(200));
        assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"before", "a view is based on it");
        drop(mounted);
        client.remove("v").unwrap();
    }
    // Now nothing has them mounted.
    client.cleanup().unwrap();
    for (id, name) in [(2, "a-layer"), (4, "b-layer")] {
        let directory = server.root().join(format!("snapshots/{id}"));
        until("an image", || !directory.join("fs").exists() && directory.join("layer").exists());
        let mounted = Mounted::of(&client.view("v", name).unwrap());
        assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"before");
        drop(mounted);
        client.remove("v").unwrap();
    }
}

/// After a boot nothing is mounted.
#[test]
fn images_are_mounted_when_they_are_needed() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    client.prepare("a", "empty").unwrap();
    client.commit("top", "a").unwrap();
    client.prepare("container", "top").unwrap();
    server.stop();
    for at in server.mount_points() {
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
    }
    let mut client = server.start_again();
    assert!(server.mount_points().is_empty());
    drop(Mounted::of(&client.mounts("container").unwrap()));
    assert_eq!(server.mount_points().len(), 1, "the image of both layers");
}

/// What the kernel cannot do is found out before a layer is lost to it.
#[test]
fn where_images_cannot_be_mounted_layers_stay_directories() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start_with("auto", in_memory);
    let mut client = server.client();
    for (name, parent) in [("one", ""), ("two", "one")] {
        let mounted = Mounted::of(&client.prepare("a", parent).unwrap());
        fs::write(mounted.path().join(name), "some").unwrap();
        drop(mounted);
        client.commit(name, "a").unwrap();
    }
    let mounted = Mounted::of(&client.view("v", "two").unwrap());
    assert_eq!(fs::read_dir(mounted.path()).unwrap().count(), 2);
    assert_eq!(server.mount_points(), [server.root()], "only what the root itself is");
    assert!(server.root().join("snapshots/1/fs/one").exists());
    drop(mounted);
    server.stop();
    let said = refused(server.directory.path(), "require");
    assert!(said.contains("cannot use") && said.contains("does not mount"), "{said}");
    assert!(!server.root().join("probe").exists(), "nothing is left of what was tried");
}
