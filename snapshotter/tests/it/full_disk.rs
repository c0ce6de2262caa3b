//! A full disk while layers become images.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ferry_control::{REPORT_VERSION, Request, ServerReport};
use ferry_snapshotter::api::Mount;
use rustix::fs::{FallocateFlags, fallocate, syncfs};
use tonic::Code;

use crate::client::Client;
use crate::control::ask;
use crate::diff::{GZIP, archive, gzip, layer, left, request, send, start_with};
use crate::lazy_place::{noise, until};
use crate::server::{Mounted, Server, on_small_disk};

/// The size of what becomes an image, in bytes.
const BYTES: usize = 2 << 20;
/// How much of the disk is free, in KiB: each fails elsewhere.
const ROOMS: [u64; 8] = [0, 4, 16, 64, 512, 2048, 2080, 2200];

/// A program on a small disk, or `None`, and the test is skipped.
fn server() -> Option<Server> {
    let mut can = false;
    let server = start_with("auto", "c-root", |root| can = on_small_disk(root));
    server.filter(|_| can)
}

/// A file that takes almost all of the disk, until this is dropped.
struct Filler(PathBuf);

impl Filler {
    fn leaving(root: &Path, room_kib: u64) -> Self {
        let [filler, reserve] = ["filler", "reserve"].map(|name| root.join(name));
        let allocate = |file: &fs::File, at, length| fallocate(file, FallocateFlags::empty(), at, length);
        allocate(&fs::File::create(&reserve).unwrap(), 0, (room_kib << 10).max(1)).unwrap();
        let file = fs::File::create(&filler).unwrap();
        let mut at = 0;
        for length in [1 << 24, 1 << 20, 1 << 16, 1 << 12] {
            while allocate(&file, at, length).is_ok() {
                at += length;
            }
        }
        fs::remove_file(reserve).unwrap();
        syncfs(file).unwrap();
        Self(filler)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // A program that another test is just starting may have it open, too.
        fs::File::create(&self.0).and_then(|_| fs::remove_file(&self.0)).unwrap();
    }
}

/// Files that take all inodes, until this is dropped.
struct Crowd(PathBuf);

impl Crowd {
    fn on(root: &Path) -> Self {
        let crowd = root.join("crowd");
        fs::create_dir(&crowd).unwrap();
        let mut number = 0;
        while fs::File::create(crowd.join(number.to_string())).is_ok() {
            number += 1;
        }
        Self(crowd)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn is_right(client: &mut Client, name: &str, expected: &[u8]) {
    let mounted = Mounted::of(&client.view("view", name).unwrap());
    assert!(fs::read(mounted.path().join("file")).unwrap() == expected);
    drop(mounted);
    client.remove("view").unwrap();
}

/// Removes a layer, after which nothing may be there.
fn remove(server: &Server, client: &mut Client, name: &str) {
    client.remove(name).unwrap();
    client.cleanup().unwrap();
    assert_eq!(left(server), [""; 0]);
    for directory in ["snapshots", "trash"] {
        assert_eq!(fs::read_dir(server.root().join(directory)).unwrap().count(), 0, "{directory}");
    }
}

#[test]
fn a_commit_on_a_full_disk_is_done_or_can_be_repeated() {
    let Some(mut server) = server() else { return };
    let (mut client, bytes) = (server.client(), noise(3, BYTES));
    for room in ROOMS {
        let mounts = client.prepare("key", "").unwrap();
        fs::write(Path::new(&mounts[0].source).join("file"), &bytes).unwrap();
        let filler = Filler::leaving(&server.root(), room);
        let committed = client.commit("layer", "key");
        let done = client.stat("layer").map(drop);
        assert_eq!(committed.clone().map_err(|error| error.code()), done.map_err(|_| Code::Internal), "{committed:?}");
        drop(filler);
        if committed.is_err() {
            client.commit("layer", "key").unwrap();
        }
        is_right(&mut client, "layer", &bytes);
        // This makes room.
        let filler = Filler::leaving(&server.root(), 0);
        remove(&server, &mut client, "layer");
        fs::write(server.root().join("file"), &bytes).unwrap();
        fs::remove_file(server.root().join("file")).unwrap();
        drop(filler);
    }
}

/// Starts the program on a disk that is full of something, and makes room.
fn starts_on<T>(server: &mut Server, full: impl FnOnce(&Path) -> T) {
    let mut client = server.client();
    let commit = |client: &mut Client| {
        let mounts = client.prepare("key", "").unwrap();
        fs::write(Path::new(&mounts[0].source).join("file"), noise(6, BYTES)).unwrap();
        client.commit("layer", "key").unwrap();
    };
    commit(&mut client);
    let has_image = |server: &Server| {
        let mut snapshots = fs::read_dir(server.root().join("snapshots")).unwrap();
        snapshots.any(|snapshot| snapshot.unwrap().path().join("image").exists())
    };
    let expected = has_image(server);
    let full = full(&server.root());
    server.kill();
    client = server.start_again();
    remove(server, &mut client, "layer");
    drop(full);
    client.cleanup().unwrap();
    commit(&mut client);
    assert_eq!(has_image(server), expected);
    remove(server, &mut client, "layer");
}

/// containerd cannot remove anything by a program that does not start.
#[test]
fn the_program_starts_on_a_full_disk() {
    let Some(mut server) = server() else { return };
    starts_on(&mut server, |root| Filler::leaving(root, 0));
    starts_on(&mut server, Crowd::on);
}

/// The names in the directory of a snapshot.
fn names(server: &Server, id: u64) -> Vec<String> {
    let entries = fs::read_dir(server.root().join(format!("snapshots/{id}"))).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_layer_that_stayed_a_directory_becomes_an_image_when_there_is_room() {
    let Some(mut server) = server() else { return };
    let (mut client, bytes) = (server.client(), noise(5, BYTES));
    let commit = |client: &mut Client, name: &str, parent: &str, room| {
        let mounted = Mounted::of(&client.prepare("extract-key", parent).unwrap());
        fs::write(mounted.path().join("file"), &bytes).unwrap();
        fs::write(mounted.path().join(name), name).unwrap();
        drop(mounted);
        let filler = Filler::leaving(&server.root(), room);
        client.commit(name, "extract-key").unwrap();
        filler
    };
    let filler = commit(&mut client, "lower", "", 512);
    if names(&server, 1).contains(&"image".to_owned()) {
        return ferry_skip::skip!("this disk had room for the image");
    }
    assert_eq!(names(&server, 1), ["fs", "work"]);
    let count = |name: &str| {
        let (report, _) = ask::<ServerReport>(&server, &Request::Report { version: REPORT_VERSION });
        report.shares[0].exports[0].usage.iter().find(|usage| usage.name == name).unwrap().value
    };
    assert_eq!(count("layer_directories"), 1);
    // There is no room yet.
    client.cleanup().unwrap();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(names(&server, 1), ["fs", "work"]);
    drop(filler);
    drop(commit(&mut client, "upper", "lower", 512));
    let ids = [1, 2].map(|id| names(&server, id).contains(&"fs".to_owned()));
    assert_eq!(ids, [true, true]);
    // What a container is based on stays, whatever has it mounted.
    let mounted = Mounted::of(&client.prepare("container", "upper").unwrap());
    client.cleanup().unwrap();
    thread::sleep(Duration::from_millis(200));
    assert_eq!([names(&server, 1), names(&server, 2)], [["fs", "work"], ["fs", "work"]]);
    assert_eq!(fs::read_to_string(mounted.path().join("lower")).unwrap(), "lower");
    client.remove("container").unwrap();
    client.cleanup().unwrap();
    thread::sleep(Duration::from_millis(200));
    assert!(fs::read(mounted.path().join("file")).unwrap() == bytes, "it is still mounted");
    drop(mounted);
    // At the next start, as well.
    server.kill();
    client = server.start_again();
    for id in [1, 2] {
        until("an image", || names(&server, id) == ["image", "layer"]);
    }
    is_right(&mut client, "lower", &bytes);
    is_right(&mut client, "upper", &bytes);
    let mounted = Mounted::of(&client.prepare("container", "upper").unwrap());
    assert_eq!(fs::read_to_string(mounted.path().join("upper")).unwrap(), "upper");
    drop(mounted);
    for name in ["container", "upper", "lower"] {
        client.remove(name).unwrap();
    }
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
}

#[test]
fn a_layer_that_did_not_fit_is_unpacked_when_there_is_room() {
    let Some(mut server) = server() else { return };
    let (mut client, bytes) = (server.client(), noise(4, BYTES));
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), &bytes).unwrap();
    let plain = archive(directory.path(), &[], &["file"]);
    let layer = layer(plain.clone(), gzip(&plain), GZIP);
    let mut failures = 0;
    for room in ROOMS {
        let mounts = client.prepare("key", "").unwrap();
        let call = request(&server, &layer, &mounts);
        let filler = Filler::leaving(&server.root(), room);
        if let Err(error) = send(&mut client, call.clone()) {
            assert_eq!(error.code(), Code::Internal, "{error}");
            failures += 1;
            client.cleanup().unwrap();
            assert_eq!(left(&server), ["filler"; 0]);
            drop(filler);
            send(&mut client, call).unwrap();
        }
        client.commit("layer", "key").unwrap();
        is_right(&mut client, "layer", &bytes);
        remove(&server, &mut client, "layer");
    }
    assert!(failures > 3, "{failures}");
}

fn lower(mounts: &[Mount]) -> usize {
    let lower = mounts[0].options.iter().find_map(|option| option.strip_prefix("lowerdir=")).unwrap();
    lower.split(':').count()
}

#[test]
fn layers_are_merged_when_there_is_room_again() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mut parent = "";
    for (number, name) in (0..).zip(["one", "two", "three"]) {
        let key = format!("extract-{name}");
        let mounted = Mounted::of(&client.prepare(&key, parent).unwrap());
        for file in 0..300 {
            fs::write(mounted.path().join(format!("{name}-{file}")), noise(number, 1000)).unwrap();
        }
        drop(mounted);
        client.commit(name, &key).unwrap();
        parent = name;
    }
    if !server.root().join("snapshots/3/layer").exists() {
        return ferry_skip::skip!("this kernel does not mount images from files");
    }
    let mut stacked = 0;
    for room in [0, 16, 64, 256, 512] {
        let filler = Filler::leaving(&server.root(), room);
        match client.prepare("container", "three") {
            Ok(mounts) => {
                stacked += usize::from(lower(&mounts) == 3);
                assert_eq!(fs::read_dir(Mounted::of(&mounts).path()).unwrap().count(), 900);
                client.remove("container").unwrap();
            }
            Err(error) => assert_eq!(error.code(), Code::Internal, "{error}"),
        }
        drop(filler);
    }
    assert!(stacked > 0);
    let mounts = client.prepare("container", "three").unwrap();
    assert_eq!(lower(&mounts), 1, "{mounts:?}");
    assert_eq!(fs::read_dir(Mounted::of(&mounts).path()).unwrap().count(), 900);
    client.remove("container").unwrap();
    client.cleanup().unwrap();
    let top = fs::read_dir(server.root().join("snapshots/3")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = top.collect();
    names.sort_unstable();
    assert_eq!(names, ["image", "layer", "merged", "merged-image"]);
}

/// Directories are moved before they are removed, which needs space, too.
#[test]
fn a_wide_directory_is_removed_from_a_full_disk() {
    let Some(mut server) = server() else { return };
    let mut client = server.client();
    let mounts = client.prepare("key", "").unwrap();
    for number in 0..1000 {
        let directory = Path::new(&mounts[0].source).join(number.to_string());
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "some").unwrap();
    }
    let _filler = Filler::leaving(&server.root(), 0);
    remove(&server, &mut client, "key");
}
