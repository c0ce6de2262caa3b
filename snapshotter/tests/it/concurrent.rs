//! Concurrent calls, and cancelled calls.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tonic::Code;

use crate::client::Client;
use crate::server::{Mounted, Server, can_mount};

/// Writes a file to the directory that becomes the layer, as containerd's applier does.
fn write(mounts: &[ferry_snapshotter::api::Mount], name: &str, bytes: &[u8]) {
    let upper = mounts[0].options.iter().find_map(|option| option.strip_prefix("upperdir="));
    fs::write(Path::new(upper.unwrap_or(&mounts[0].source)).join(name), bytes).unwrap();
}

#[test]
fn one_of_several_pulls_of_an_image_wins_while_garbage_is_collected() {
    if !can_mount() {
        return;
    }
    for images in ["never", "auto"] {
        let mut server = Server::start(images);
        drop(server.client());
        let (socket, is_over, commits) = (server.socket(), AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let collector = scope.spawn(|| {
                let mut client = Client::connect(&socket).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    client.cleanup().unwrap();
                    // Removed snapshots leave garbage.
                    let key = "garbage";
                    let mounts = client.prepare(key, "").unwrap();
                    write(&mounts, "file", &[7; 100_000]);
                    client.commit("gone", key).unwrap();
                    client.remove("gone").unwrap();
                }
            });
            let pulls: Vec<_> = (0..4)
                .map(|pull| {
                    let (socket, commits) = (&socket, &commits);
                    scope.spawn(move || {
                        let mut client = Client::connect(socket).unwrap();
                        let mut parent = String::new();
                        for layer in 0..6 {
                            let (name, key) = (format!("layer-{layer}"), format!("extract-{pull}-{layer}"));
                            let mounts = client.prepare(&key, &parent).unwrap();
                            write(&mounts, &name, name.repeat(5000).as_bytes());
                            match client.commit(&name, &key) {
                                Ok(()) => _ = commits.fetch_add(1, Ordering::Relaxed),
                                Err(error) => {
                                    assert_eq!(error.code(), Code::AlreadyExists, "{error}");
                                    client.remove(&key).unwrap();
                                }
                            }
                            parent = name;
                        }
                    })
                })
                .collect();
            pulls.into_iter().for_each(|pull| pull.join().unwrap());
            is_over.store(true, Ordering::Relaxed);
            collector.join().unwrap();
        });
        assert_eq!(commits.into_inner(), 6, "each layer once");
        let mut client = server.client();
        client.cleanup().unwrap();
        let mounted = Mounted::of(&client.view("view", "layer-5").unwrap());
        for layer in 0..6 {
            let name = format!("layer-{layer}");
            assert_eq!(fs::read_to_string(mounted.path().join(&name)).unwrap(), name.repeat(5000));
        }
        assert_eq!(client.list(&[]).unwrap().len(), 7, "six layers and the view");
        assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 7);
    }
}

/// containerd is restarted during a call.
#[test]
fn a_cancelled_call_is_complete_or_never_begun() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("auto");
    let mut client = server.client();
    let mut outcomes = [0, 0];
    for round in 0..10_u64 {
        let (name, key) = (format!("layer-{round}"), format!("key-{round}"));
        let mounts = client.prepare(&key, "").unwrap();
        let bytes: Vec<u8> = (0..500_000_u64).flat_map(|number| (number * (round + 1)).to_le_bytes()).collect();
        write(&mounts, "file", &bytes);
        let mut impatient = Client::connect(&server.socket()).unwrap();
        impatient.commit_for(&name, &key, Duration::from_millis(round * 4));
        drop(impatient);
        // As containerd does with unfinished snapshots: the Remove waits for the commit.
        let removed = client.remove(&key);
        match client.stat(&name) {
            Ok(_) => {
                assert_eq!(removed.unwrap_err().code(), Code::NotFound);
                let mounted = Mounted::of(&client.view("view", &name).unwrap());
                assert_eq!(fs::read(mounted.path().join("file")).unwrap(), bytes);
                drop(mounted);
                client.remove("view").unwrap();
                client.remove(&name).unwrap();
                outcomes[0] += 1;
            }
            Err(error) => {
                assert_eq!(error.code(), Code::NotFound);
                outcomes[1] += usize::from(removed.is_ok());
            }
        }
        // A call that arrives now finds nothing to commit.
        assert!(client.list(&[]).unwrap().is_empty());
    }
    assert_eq!(outcomes[0] + outcomes[1], 10, "{outcomes:?}");
    client.cleanup().unwrap();
    assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 0);
}
