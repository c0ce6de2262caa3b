//! Restarts and `kill -9`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use tonic::Code;

use crate::client::Client;
use crate::server::{Mounted, Server, can_mount, in_memory};

/// Adds a committed layer with one file; what was acknowledged is `true`.
fn layer(client: &mut Client, name: &str, parent: &str) -> bool {
    let key = format!("{name}-a");
    let Ok(mounts) = client.prepare(&key, parent) else { return false };
    // As containerd's applier: into the directory, without a mount, so that a killed server leaves the test nothing to unmount.
    let upper =
        mounts[0].options.iter().find_map(|option| option.strip_prefix("upperdir=")).unwrap_or(&mounts[0].source);
    let text = format!("{name}: {}", "long enough for a pack of its own ".repeat(40));
    if fs::write(Path::new(upper).join(name), text).is_err() {
        return false;
    }
    client.commit(name, &key).is_ok()
}

/// What is there must be usable, and nothing else may be there.
fn check(server: &Server, client: &mut Client, expected: &BTreeSet<String>, maybe: &BTreeSet<String>) {
    let infos = client.list(&[]).unwrap();
    let committed: BTreeSet<String> =
        infos.iter().filter(|info| info.kind == 3).map(|info| info.name.clone()).collect();
    for name in expected {
        assert!(committed.contains(name), "{name} was acknowledged");
    }
    for name in committed.difference(expected) {
        assert!(maybe.contains(name), "{name} was not even asked for");
    }
    let ids: BTreeSet<_> =
        fs::read_dir(server.root().join("snapshots")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(ids.len(), infos.len(), "each directory has a snapshot: {ids:?} {infos:?}");
    assert_eq!(fs::read_dir(server.root().join("trash")).unwrap().count(), 0);
    for name in &committed {
        let view = format!("{name}-view");
        let mounted = Mounted::of(&client.view(&view, name).unwrap());
        assert!(fs::read_to_string(mounted.path().join(name)).unwrap().starts_with(&format!("{name}: ")));
        drop(mounted);
        client.remove(&view).unwrap();
    }
    for info in infos.iter().filter(|info| info.kind == 2) {
        client.remove(&info.name).unwrap();
    }
    // Each layer, and all up to it.
    assert!(server.mount_points().len() <= 2 * committed.len(), "{:?}", server.mount_points());
}

fn kills(images: &'static str, rounds: u64) {
    let mut server = Server::start(images);
    let mut client = server.client();
    let mut expected = BTreeSet::new();
    for round in 0..rounds {
        let mut maybe = BTreeSet::new();
        let socket = server.socket();
        let (asked, done) = thread::scope(|scope| {
            let calls = scope.spawn(|| {
                let (mut asked, mut done, mut parent) = (Vec::new(), Vec::new(), String::new());
                // On a loaded machine it may be killed before.
                let Ok(mut client) = Client::connect(&socket) else { return (asked, done) };
                for number in 0.. {
                    let name = format!("r{round}-{number}");
                    asked.push(name.clone());
                    if !layer(&mut client, &name, &parent) {
                        break;
                    }
                    done.push(name.clone());
                    parent = name;
                }
                (asked, done)
            });
            thread::sleep(Duration::from_millis(7 + round * 37 % 150));
            server.kill();
            calls.join().unwrap()
        });
        expected.extend(done);
        maybe.extend(asked);
        client = server.start_again();
        check(&server, &mut client, &expected, &maybe);
        // Those of this round are removed while the next kill comes near.
        let names: Vec<String> = client.list(&["kind==committed"]).unwrap().into_iter().map(|info| info.name).collect();
        expected.extend(names);
        if round % 2 == 1 {
            let mut last_first: Vec<String> = expected.iter().cloned().collect();
            last_first
                .sort_by_key(|name| std::cmp::Reverse(name.split_once('-').and_then(|(_, n)| n.parse::<u32>().ok())));
            for name in last_first {
                client.remove(&name).unwrap();
                expected.remove(&name);
            }
        }
    }
    for info in client.list(&[]).unwrap().into_iter().rev() {
        // Children first; several passes are the simplest order.
        let _ = client.remove(&info.name);
    }
    while !client.list(&[]).unwrap().is_empty() {
        for info in client.list(&[]).unwrap() {
            let _ = client.remove(&info.name);
        }
    }
    client.cleanup().unwrap();
    assert_eq!(server.mount_points(), [] as [&Path; 0]);
    let packs = fs::read_dir(server.root().join("store/packs")).map(|packs| {
        packs.flatten().filter(|pack| pack.file_name() != "table").map(|pack| pack.file_name()).collect::<Vec<_>>()
    });
    assert_eq!(packs.unwrap_or_default(), [] as [&str; 0], "no image needs a pack");
}

#[test]
fn directories_survive_kills() {
    if can_mount() {
        kills("never", 5);
    }
}

#[test]
fn images_survive_kills() {
    if can_mount() {
        kills("auto", 5);
    }
}

/// The long version of the two above.
#[test]
#[ignore = "long: make test-all"]
fn snapshots_survive_a_hundred_kills() {
    if can_mount() {
        kills("auto", 100);
        kills("never", 100);
    }
}

/// containerd/stargz-snapshotter issues 2126, 1520: after a restart, ordinary snapshots were lost, and containers failed.
#[test]
fn a_running_container_does_not_notice_restarts() {
    if !can_mount() {
        return;
    }
    for images in ["never", "auto"] {
        let mut server = Server::start(images);
        let mut client = server.client();
        assert!(layer(&mut client, "base", "") && layer(&mut client, "top", "base"));
        let mounted = Mounted::of(&client.prepare("container", "top").unwrap());
        let before = server.mount_points();
        for round in 0..3 {
            if round == 1 {
                server.stop()
            } else {
                server.kill()
            }
            assert!(fs::read_to_string(mounted.path().join("base")).unwrap().starts_with("base"));
            fs::write(mounted.path().join(format!("written-{round}")), "some").unwrap();
            client = server.start_again();
            client.mounts("container").unwrap();
            assert_eq!(server.mount_points(), before, "mounts are used on, not made again");
        }
        drop(mounted);
        let mounted = Mounted::of(&client.mounts("container").unwrap());
        assert_eq!(fs::read(mounted.path().join("written-2")).unwrap(), b"some");
    }
}

/// containerd/containerd pull request 11476 and awslabs/soci-snapshotter issue 93: one damaged snapshot prevented removal, or the start.
#[test]
fn a_damaged_snapshot_can_be_removed_and_harms_no_other() {
    if !can_mount() {
        return;
    }
    for images in ["never", "auto"] {
        let mut server = Server::start(images);
        let mut client = server.client();
        for name in ["good", "gone", "damaged"] {
            assert!(layer(&mut client, name, ""));
        }
        server.kill();
        for at in server.mount_points() {
            rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
        }
        fs::remove_dir_all(server.root().join("snapshots/2")).unwrap();
        let image = server.root().join("snapshots/3/image");
        if image.exists() {
            let mut bytes = fs::read(&image).unwrap();
            bytes[2000] ^= 1;
            fs::remove_file(&image).unwrap();
            fs::write(&image, bytes).unwrap();
        }
        let mut client = server.start_again();
        let has_images = image.exists();
        let mounted = Mounted::of(&client.view("v", "good").unwrap());
        assert!(fs::read_to_string(mounted.path().join("good")).unwrap().starts_with("good"));
        drop(mounted);
        assert_eq!(client.prepare("c", "gone").unwrap_err().code(), Code::Internal);
        if has_images {
            let error = client.prepare("c", "damaged").unwrap_err();
            assert!(error.code() == Code::Internal && error.message().contains("digest"), "{error}");
        }
        for name in ["gone", "damaged", "v", "good"] {
            client.remove(name).unwrap();
        }
        client.cleanup().unwrap();
        assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 0);
    }
}

/// After a failure the library of the metadata refuses everything until it is opened again.
#[test]
fn a_full_disk_is_an_error_until_there_is_space() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start_with("never", in_memory);
    let mut client = server.client();
    client.prepare("base-a", "").unwrap();
    client.commit("base", "base-a").unwrap();
    let filler = server.root().join("filler");
    let mut acknowledged = 0;
    for round in 0..3 {
        let mut file = fs::File::create(&filler).unwrap();
        while std::io::Write::write(&mut file, &[1; 65536]).is_ok() {}
        let mut failures = 0;
        // Some space is reserved for the metadata.
        for number in 0.. {
            if number >= 20 && failures > 0 {
                break;
            }
            let labels = (0..12).map(|label| (format!("label-{label}"), "x".repeat(3000)));
            match client.prepare_with(&format!("{round}-{number}"), "base", labels.collect()) {
                Ok(_) => acknowledged += 1,
                Err(error) => {
                    assert!(matches!(error.code(), Code::Internal), "{error}");
                    failures += 1;
                }
            }
        }
        // A program that another test is just starting may have the file open, too.
        file.set_len(0).unwrap();
        fs::remove_file(&filler).unwrap();
        client.prepare(&format!("{round}-after"), "base").unwrap();
        acknowledged += 1;
    }
    let count = client.list(&[]).unwrap().len();
    assert!(count > acknowledged, "{count} with the base, {acknowledged} acknowledged");
    client.cleanup().unwrap();
    assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), count);
}
