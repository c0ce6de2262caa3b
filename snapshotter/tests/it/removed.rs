//! Snapshots that are removed while others are based on them.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ferry_snapshotter::api::Mount;
use rustix::mount::{UnmountFlags, unmount};
use tonic::Code;

use crate::client::{Answer, Client};
use crate::diff::{GZIP, archive, gzip, layer, left, request, send, start};
use crate::server::{Mounted, Server, in_memory};
use crate::toc_layers::Layer;

const LAYERS: usize = 3;

/// Returns what a call returns, or `None` if it fails as it may.
fn proper<T>(what: &str, outcome: Answer<T>, codes: &[Code]) -> Option<T> {
    outcome.map_err(|error| assert!(codes.contains(&error.code()), "{what}: {error}")).ok()
}

fn name(layer: usize) -> String {
    if layer == 0 { String::new() } else { format!("layer-{layer}") }
}

fn layers() -> Vec<Layer> {
    let directory = tempfile::tempdir().unwrap();
    let names = (1..=LAYERS).map(name);
    let layers = names.map(|name| {
        fs::write(directory.path().join(&name), name.repeat(3000)).unwrap();
        fs::write(directory.path().join("highest"), &name).unwrap();
        let plain = archive(directory.path(), &[], &[&name, "highest"]);
        layer(plain.clone(), gzip(&plain), GZIP)
    });
    layers.collect()
}

/// Unpacks a layer as containerd does, by the differ or into the directory.
fn fill(server: &Server, client: &mut Client, mounts: &[Mount], (number, layer): (usize, &Layer)) {
    if proper("Apply", send(client, request(server, layer, mounts)), &[Code::Unimplemented]).is_some() {
        return;
    }
    let upper = mounts[0].options.iter().find_map(|option| option.strip_prefix("upperdir="));
    let upper = Path::new(upper.unwrap_or(&mounts[0].source));
    fs::write(upper.join(name(number)), name(number).repeat(3000)).unwrap();
    fs::write(upper.join("highest"), name(number)).unwrap();
}

/// Pulls the image; returns whether no layer was removed meanwhile.
fn pull(server: &Server, client: &mut Client, (who, layers): (&str, &[Layer])) -> bool {
    for (number, layer) in (1..).zip(layers) {
        let key = format!("extract-{who}-{number}");
        let prepared = client.prepare(&key, &name(number - 1));
        let Some(mounts) = proper("Prepare", prepared, &[Code::NotFound]) else { return false };
        fill(server, client, &mounts, (number, layer));
        if proper("Commit", client.commit(&name(number), &key), &[Code::AlreadyExists]).is_none() {
            client.remove(&key).unwrap();
        }
    }
    true
}

/// Starts a container; whether its image was there.
fn run(client: &mut Client) -> bool {
    let Some(mounts) = proper("Prepare", client.prepare("container", &name(LAYERS)), &[Code::NotFound]) else {
        return false;
    };
    for mounts in [mounts, client.mounts("container").unwrap()] {
        is_right(&mounts);
    }
    client.remove("container").unwrap();
    true
}

fn is_right(mounts: &[Mount]) {
    let mounted = Mounted::of(mounts);
    for number in 1..=LAYERS {
        let found = fs::read_to_string(mounted.path().join(name(number))).unwrap();
        assert_eq!(found, name(number).repeat(3000));
    }
    assert_eq!(fs::read_to_string(mounted.path().join("highest")).unwrap(), name(LAYERS));
}

/// Removes the image, and garbage.
fn remove(client: &mut Client) {
    for number in (1..=LAYERS).rev() {
        proper("Remove", client.remove(&name(number)), &[Code::NotFound, Code::FailedPrecondition]);
    }
    client.cleanup().unwrap();
}

/// Looks at all snapshots, as containerd does for its statistics.
fn look(client: &mut Client) -> bool {
    for info in client.list(&[]).unwrap() {
        let name = &info.name;
        proper("Stat", client.stat(name), &[Code::NotFound]);
        proper("Usage", client.usage(name), &[Code::NotFound]);
        proper("Mounts", client.mounts(name), &[Code::NotFound, Code::FailedPrecondition]);
        proper("Update", client.update(info.clone(), &["labels"]), &[Code::NotFound]);
    }
    true
}

#[test]
fn an_image_is_removed_while_it_is_pulled_and_started() {
    for images in ["never", "require"] {
        let Some(mut server) = start(images, "c-root") else { return };
        let (layers, is_over) = (layers(), AtomicBool::new(false));
        let counts = [(); 4].map(|()| AtomicUsize::new(0));
        layers.iter().for_each(|layer| drop(request(&server, layer, &[])));
        let mut client = server.client();
        thread::scope(|scope| {
            let (server, layers, is_over) = (&server, &layers, &is_over);
            type Work<'a> = Box<dyn Fn(&mut Client) -> bool + Send + 'a>;
            let works: [Work<'_>; 4] = [
                Box::new(|client| pull(server, client, ("a", layers))),
                Box::new(|client| pull(server, client, ("b", layers))),
                Box::new(run),
                Box::new(look),
            ];
            let begun = works.into_iter().zip(&counts).map(|(work, count)| {
                let mut client = Client::connect(&server.socket()).unwrap();
                scope.spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        count.fetch_add(usize::from(work(&mut client)), Ordering::Relaxed);
                    }
                })
            });
            let threads: Vec<_> = begun.collect();
            for round in 0.. {
                let is_done = round > 24 && counts.iter().all(|count| count.load(Ordering::Relaxed) > 3);
                if is_done || threads.iter().any(|thread| thread.is_finished()) {
                    break;
                }
                remove(&mut client);
                thread::sleep(Duration::from_millis(round % 8 * 8));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(pull(&server, &mut client, ("last", &layers)) && run(&mut client));
        remove(&mut client);
        client.cleanup().unwrap();
        assert_eq!((client.list(&[]).unwrap().len(), left(&server), server.mount_points().len()), (0, vec![], 0));
        for directory in ["snapshots", "trash"] {
            assert_eq!(fs::read_dir(server.root().join(directory)).unwrap().count(), 0, "{directory}");
        }
    }
}

#[test]
fn a_directory_that_cannot_be_removed_prevents_nothing_else() {
    let Some(mut server) = start("auto", "c-root") else { return };
    let mut client = server.client();
    let mounts = client.prepare("key", "").unwrap();
    fs::write(Path::new(&mounts[0].source).join("file"), "some".repeat(3000)).unwrap();
    client.commit("layer", "key").unwrap();
    client.remove("layer").unwrap();
    let directories = ["snapshots", "lazy"].map(|name| server.root().join(name));
    for directory in &directories {
        ["1000", "stuck", "other"].iter().for_each(|name| fs::create_dir(directory.join(name)).unwrap());
        fs::write(directory.join("file"), "").unwrap();
        // It cannot be renamed.
        in_memory(&directory.join("stuck"));
    }
    let names = |directory: &Path| {
        let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    };
    client.cleanup().unwrap();
    assert_eq!((names(&directories[0]), names(&directories[1])), (vec!["stuck".into()], vec!["stuck".into()]));
    assert_eq!(left(&server), [""; 0]);
    directories.iter().for_each(|directory| unmount(directory.join("stuck"), UnmountFlags::empty()).unwrap());
    client.cleanup().unwrap();
    assert_eq!((names(&directories[0]).len(), names(&directories[1]).len()), (0, 0));
}
