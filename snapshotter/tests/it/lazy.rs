//! Layers that are read before they are here: Prepare as containerd calls it, a registry in memory, and the program `ferry`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferry_snapshotter::{GID_LABEL, UID_LABEL};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use tonic::Code;

use crate::client::{Client, root_label};
use crate::fake::{Fake, Reply, Request, Way};
use crate::lazy_place::{Place, WAYS, ferry, is_right, layers, noise, until, without_tables};
use crate::server::{Mounted, can_mount};
use crate::toc_layers::{Format, Writer, sha256};

/// containerd/stargz-snapshotter pull request 134, containerd/nydus-snapshotter issue 106: a restart ended the mounts; and
/// containerd/stargz-snapshotter issue 1393: mounts stayed when images were removed.
#[test]
fn lazy_layers_are_readable_and_survive_kills() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let mut place = Place::of(way, 0);
        let mut client = place.server.client();
        place.pull(&mut client);
        let tables = place.fetched();
        // In the place where containers are made, and in that of another user's containers.
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
        assert!(!mounted.path().join("hidden").exists());
        let some = place.fetched();
        let all: usize = place.layers.iter().map(|layer| layer.blob.len()).sum();
        println!("{way:?}: {tables} bytes until the pull, {some} more until a file was read, of {all}");
        assert!(tables < 300_000 && some < 1_000_000, "{tables} {some} {all}");
        let usage = client.usage(&place.top()).unwrap();
        assert!(usage.size > 0 && usize::try_from(usage.size).unwrap() < all && usage.inodes > 3, "{usage:?}");
        // A pull of a complete image sends no request.
        place.pull(&mut client);
        assert_eq!(place.fetched(), 0);
        // containerd/stargz-snapshotter issue 2225: each open left a descriptor.
        let process = place.process().expect("it serves");
        let descriptors = || fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero())).unwrap().count();
        let before = descriptors();
        (0..500).for_each(|_| drop(fs::read(mounted.path().join("small")).unwrap()));
        assert!(descriptors() < before + 100, "{before} {}", descriptors());
        assert!(place.server.resident_kib() < 50 << 10, "{} KiB", place.server.resident_kib());
        let mut labels = root_label();
        labels.extend([UID_LABEL, GID_LABEL].map(|name| (name.to_owned(), "0:100000:65536".to_owned())));
        let mapped = Mounted::of(&client.prepare_with("mapped", &place.top(), labels).unwrap());
        assert_eq!(fs::metadata(mapped.path().join("small")).unwrap().uid(), 100_000, "the host sees other users");
        assert_eq!(fs::read(mapped.path().join("small")).unwrap(), noise(1, 20_000));
        drop(mapped);
        client.remove("mapped").unwrap();
        let before = place.server.mount_points();
        for round in 0..3 {
            if round == 1 {
                place.server.stop()
            } else {
                place.server.kill()
            }
            // What was not read before is fetched without the program.
            if round == 0 {
                assert_eq!(fs::read(mounted.path().join("above")).unwrap(), noise(5, 20_000));
                assert!(place.fetched() > 0);
            }
            fs::write(mounted.path().join(format!("written-{round}")), "some").unwrap();
            client = place.server.start_again();
            client.mounts("container").unwrap();
            assert_eq!(place.server.mount_points(), before, "mounts are used on");
        }
        is_right(mounted.path());
        drop(mounted);
        let mounted = Mounted::of(&client.view("view", &place.top()).unwrap());
        is_right(mounted.path());
        drop(mounted);
        // All of it goes again.
        for name in ["view", "container"] {
            client.remove(name).unwrap();
        }
        let process = place.process();
        for layer in (0..place.layers.len()).rev() {
            client.remove(&format!("sha256:chain-{layer}")).unwrap();
        }
        client.cleanup().unwrap();
        assert_eq!(place.images(), [] as [PathBuf; 0]);
        assert_eq!(place.server.mount_points(), [] as [PathBuf; 0]);
        if let Some(process) = process {
            let path = format!("/proc/{}/stat", process.as_raw_nonzero());
            until("the end of the process", || {
                !fs::read_to_string(&path)
                    .is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| !state.starts_with(" Z")))
            });
        }
        // containerd asks once, while the process still has packs open.
        until("the end of the packs", || {
            let packs = fs::read_dir(place.server.root().join("store/packs")).unwrap().flatten();
            packs.filter(|pack| pack.file_name() != "table").count() == 0
        });
    }
}

/// containerd/stargz-snapshotter issues 151, 1520: after a crash of what serves the files, snapshots could not be used.
#[test]
fn a_process_that_died_is_started_again() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let mut place = Place::of(way, 0);
        let mut client = place.server.client();
        place.pull(&mut client);
        for round in 0..3 {
            let running = Mounted::of(&client.prepare("running", &place.top()).unwrap());
            if round == 2 {
                place.server.kill();
            }
            let process = place.process().expect("it serves");
            kill_process(process, Signal::KILL).unwrap();
            // While it ends: an error, or what is right.
            if let Ok(bytes) = fs::read(running.path().join("above")) {
                assert!(bytes == noise(5, 20_000), "{way:?}, round {round}");
            }
            until("its end", || place.process() != Some(process));
            if round == 2 {
                client = place.server.start_again();
            }
            // Without a container that needs it.
            until("the next one", || place.process().is_some_and(|next| next != process));
            drop(running);
            client.remove("running").unwrap();
            let key = format!("container-{round}");
            let mounted = Mounted::of(&client.prepare(&key, &place.top()).unwrap());
            assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000), "{way:?}");
            assert_ne!(place.process(), Some(process));
            drop(mounted);
            client.remove(&key).unwrap();
        }
        let mounted = Mounted::of(&client.view("view", &place.top()).unwrap());
        is_right(mounted.path());
    }
}

#[test]
fn complete_images_need_no_registry() {
    if !can_mount() {
        return;
    }
    for way in WAYS {
        let mut place = Place::of(way, 2);
        let mut client = place.server.client();
        place.pull(&mut client);
        until("all of it", || place.is_complete());
        place.fake.fault(|_, _| Reply::of(503, "gone"));
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        is_right(mounted.path());
        drop(mounted);
        // After a boot nothing is mounted.
        place.server.stop();
        for at in place.server.mount_points() {
            rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
        }
        client = place.server.start_again();
        let mounted = Mounted::of(&client.mounts("container").unwrap());
        is_right(mounted.path());
    }
}

/// What is here is read without the registry, and what is not is an error, not zeros.
#[test]
fn an_unreachable_registry_affects_only_missing_data() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    place.pull(&mut client);
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
    // A status that is not tried again.
    place.fake.fault(|_, _| Reply::of(403, "no"));
    assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
    let error = fs::read(mounted.path().join("large")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    // Bytes of another registry's layer.
    place.fake.fault(|request, reply| match request.is_blob() {
        true => Reply { body: reply.body.iter().map(|byte| byte ^ 1).collect(), ..reply },
        false => reply,
    });
    let error = fs::read(mounted.path().join("large")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    place.fake.heal();
    until("the file", || fs::read(mounted.path().join("small")).is_ok());
    drop(mounted);
    // containerd/stargz-snapshotter pull requests 901, 2359, awslabs/soci-snapshotter issue 93: after a boot, without the registry, the
    // program did not start, and images could not be removed.
    place.fake.fault(|_, _| Reply::of(403, "no"));
    place.server.stop();
    for at in place.server.mount_points() {
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
    }
    let mut client = place.server.start_again();
    let mounted = Mounted::of(&client.mounts("container").unwrap());
    assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
    let error = fs::read(mounted.path().join("large")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    place.fake.heal();
    until("the file", || fs::read(mounted.path().join("large")).is_ok());
    is_right(mounted.path());
    drop(mounted);
    place.fake.fault(|_, _| Reply::of(403, "no"));
    for name in ["container", "sha256:chain-1", "sha256:chain-0"] {
        client.remove(name).unwrap();
    }
    assert_eq!(place.images(), [] as [PathBuf; 0]);
}

/// Whatever is wrong with the registry or the tables: the layer is unpacked as others are.
#[test]
fn a_pull_never_fails_because_it_cannot_be_lazy() {
    if !can_mount() {
        return;
    }
    type Fault = fn(&Request, Reply) -> Reply;
    let mut other = layers(Format::Estargz);
    other[0].annotations.insert("containerd.io/snapshot/stargz/toc.digest".into(), sha256(b"another table"));
    let wrong_table = Writer::new(Format::Estargz, &[1]).finish_with(|_| b"{\"version\": 1, \"entries\": 7}".to_vec());
    for (what, layers, fault) in [
        ("no tables", without_tables(layers(Format::Estargz)), None),
        ("a table that is not the one of the manifest", other, None),
        ("a table that cannot be read", vec![wrong_table], None),
        ("an error", layers(Format::Estargz), Some((|_, _| Reply::of(500, "")) as Fault)),
        ("too many requests", layers(Format::Estargz), Some(|_, _| Reply::of(429, "").with("retry-after", "1"))),
        ("no access", layers(Format::Estargz), Some(|_, _| Reply::of(401, ""))),
        (
            "an end in the middle",
            layers(Format::ZstdChunked),
            Some(|request, reply| match request.is_blob() {
                true => Reply { way: Way::Cut(10), ..reply },
                false => reply,
            }),
        ),
        (
            "whole blobs only",
            layers(Format::ZstdChunked),
            Some(|request, reply| match request.is_blob() {
                true => Reply { status: 200, headers: Vec::new(), ..reply },
                false => reply,
            }),
        ),
        (
            "another manifest",
            layers(Format::Estargz),
            Some(|request, reply| match request.is_manifest() {
                true => Reply::of(200, "{}"),
                false => reply,
            }),
        ),
    ] {
        let mut place = Place::new(layers);
        if let Some(fault) = fault {
            place.fake.fault(fault);
        }
        let mut client = place.server.client();
        let mounts = place.prepare(&mut client, 0, "", place.labels(0)).expect_err(what);
        let mounted = Mounted::of(&mounts);
        fs::write(mounted.path().join("unpacked"), what).unwrap();
        drop(mounted);
        let key = client.list(&[]).unwrap()[0].name.clone();
        let asked = place.fake.requests().len();
        assert!(asked <= 20, "{what}: {asked} requests");
        client.commit_with("sha256:chain-0", &key, "", place.labels(0)).unwrap();
        // Nobody is asked again for the other layers.
        if place.layers.len() > 1 {
            place.prepare(&mut client, 1, "sha256:chain-0", place.labels(1)).expect_err(what);
            assert_eq!(place.fake.requests().len(), 0, "{what}");
        }
        client.cleanup().unwrap();
        assert_eq!(place.images(), [] as [PathBuf; 0], "{what}");
    }
}

/// A registry that says nothing, and a program that cannot be started.
#[test]
fn a_silent_registry_or_a_missing_program_delays_a_pull_and_no_more() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    place.fake.fault(|_, _| Reply { way: Way::Silence, ..Reply::default() });
    let mut client = place.server.client();
    // Others need not wait.
    let prepared = thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut client = Client::connect(&place.server.socket()).unwrap();
            place.prepare(&mut client, 0, "", place.labels(0))
        });
        until("a request", || !place.fake.requests().is_empty());
        client.prepare("another", "").unwrap();
        assert!(!waiting.is_finished());
        waiting.join().unwrap()
    });
    assert!(prepared.is_err(), "it is unpacked");

    let mut place = Place::new(layers(Format::Estargz));
    place.server.stop();
    place.server.configure("[lazy]\nfrom = [\"*\"]\nprogram = \"/nowhere/ferry\"\n");
    let mut client = place.server.start_again();
    assert!(place.prepare(&mut client, 0, "", place.labels(0)).is_err());
}

/// containerd asks for it once.
#[test]
fn garbage_that_a_pull_keeps_is_collected_after_the_pull() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    place.pull(&mut client);
    let process = place.process().expect("it serves").as_raw_nonzero();
    ["sha256:chain-1", "sha256:chain-0"].iter().for_each(|name| client.remove(name).unwrap());
    until("the end of the process", || !Path::new(&format!("/proc/{process}")).exists());
    let packs = place.server.root().join("store/packs");
    let count = || fs::read_dir(&packs).unwrap().flatten().filter(|pack| pack.file_name() != "table").count();
    let [is_held, is_asked] = [true, false].map(|is_so| Arc::new(AtomicBool::new(is_so)));
    let (held, asked) = (Arc::clone(&is_held), Arc::clone(&is_asked));
    place.fake.fault(move |_, reply| {
        asked.store(true, Ordering::SeqCst);
        while held.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        reply
    });
    let mut labels = place.labels(0);
    let missing = format!("sha256:{}", "0".repeat(64));
    labels.insert("containerd.io/snapshot/cri.image-ref".into(), format!("{}/os/app:2", place.fake.address));
    labels.insert("containerd.io/snapshot/cri.manifest-digest".into(), missing);
    thread::scope(|scope| {
        let pull = scope.spawn(|| {
            let mut client = Client::connect(&place.server.socket()).unwrap();
            place.prepare(&mut client, 0, "", labels)
        });
        until("a request", || is_asked.load(Ordering::SeqCst));
        client.cleanup().unwrap();
        let kept = count();
        is_held.store(false, Ordering::SeqCst);
        pull.join().unwrap().unwrap_err();
        assert!(kept > 0);
    });
    until("the collection", || count() == 0);
}

/// Labels that do not fit the image: an older manifest of the tag, another layer, another table; and repositories that are not listed.
#[test]
fn only_the_layer_that_containerd_means_is_used() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(Format::Estargz), 0, "from = [\"127.0.0.1\", \"other.example/a\"]\n");
    let mut client = place.server.client();
    assert!(place.prepare(&mut client, 0, "", place.labels(0)).is_err(), "another port is another registry");
    assert_eq!(place.fake.requests().len(), 0);
    place.server.stop();
    // By default no image starts so.
    place.server.configure(&format!("[lazy]\nprogram = {:?}\n", ferry()));
    let mut client = place.server.start_again();
    assert!(place.prepare(&mut client, 0, "", place.labels(0)).is_err(), "nobody has listed it");
    assert_eq!(place.fake.requests().len(), 0);
    place.server.stop();
    let from = format!("[lazy]\njobs = 0\nprogram = {:?}\nfrom = [\"{}/os\"]\n", ferry(), place.fake.address);
    place.server.configure(&from);
    let mut client = place.server.start_again();
    let changed = |name: &str, value: Option<&str>| {
        let mut labels = place.labels(0);
        labels.remove("containerd.io/snapshot/cri.manifest-digest");
        match value {
            Some(value) => labels.insert(format!("containerd.io/snapshot/{name}"), value.into()),
            None => None,
        };
        labels
    };
    let zeros = format!("sha256:{}", "0".repeat(64));
    for (name, value) in [
        ("cri.layer-digest", &*zeros),
        ("stargz/toc.digest", &zeros),
        ("cri.manifest-digest", &zeros),
        ("cri.manifest-digest", "no digest"),
        ("cri.image-ref", "127.0.0.1"),
    ] {
        let labels = changed(name, Some(value));
        assert!(place.prepare(&mut client, 0, "", labels).is_err(), "{name}");
    }
    // The tag alone is enough if its layers are those.
    assert_eq!(place.prepare(&mut client, 0, "", changed("", None)), Ok(()));
    // As clients for eStargz say it.
    client.remove("sha256:chain-0").unwrap();
    let stargz = place.labels(0).into_iter().filter_map(|(name, value)| match name.rsplit('/').next()? {
        "cri.image-ref" => Some(("containerd.io/snapshot/remote/stargz.reference".into(), value)),
        "cri.layer-digest" => Some(("containerd.io/snapshot/remote/stargz.digest".into(), value)),
        "cri.image-layers" => Some(("containerd.io/snapshot/remote/stargz.layers".into(), value)),
        "cri.manifest-digest" => None,
        _ => Some((name, value)),
    });
    assert_eq!(place.prepare(&mut client, 0, "", stargz.collect()), Ok(()));
    // The second layer is no first one.
    assert!(place.prepare(&mut client, 1, "", place.labels(1)).is_err());
}

#[test]
fn the_rest_is_fetched_no_faster_than_is_allowed() {
    if !can_mount() {
        return;
    }
    // Two requests, of which the second waits until the first had its four seconds.
    let mut place = Place::configured(layers(Format::Estargz), 4, "fetch-rate = 1_000_000\n");
    let mut client = place.server.client();
    let begun = Instant::now();
    place.pull(&mut client);
    until("the first request", || place.fetched() > 1_000_000);
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    assert_eq!(fs::read(mounted.path().join("above")).unwrap(), noise(5, 20_000));
    until("the end", || place.is_complete());
    assert!(begun.elapsed() >= Duration::from_millis(3500), "{:?}", begun.elapsed());
    is_right(mounted.path());
}

#[test]
fn of_two_pulls_at_once_and_removals_all_end_well() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let place = &place;
        let pulls: Vec<_> = (0..3)
            .map(|number| {
                scope.spawn(move || {
                    let mut client = Client::connect(&place.server.socket()).unwrap();
                    for round in 0..10 {
                        let (one, two) = (place.labels(0), place.labels(1));
                        let key = format!("{number}-{round}");
                        for (layer, parent, labels) in [(0, "", one), (1, "sha256:chain-0", two)] {
                            let error = client.prepare_with(&format!("{key}-{layer}"), parent, labels).err();
                            // Another thread has removed the layer below.
                            let code = error.map(|error| error.code());
                            assert!(matches!(code, Some(Code::AlreadyExists | Code::NotFound)), "{code:?}");
                        }
                        let Ok(mounts) = client.prepare(&key, "sha256:chain-1") else { continue };
                        let mounted = Mounted::of(&mounts);
                        assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
                        drop(mounted);
                        client.remove(&key).unwrap();
                    }
                })
            })
            .collect();
        let removing = scope.spawn(|| {
            let mut client = Client::connect(&place.server.socket()).unwrap();
            while !is_over.load(Ordering::SeqCst) {
                for name in ["sha256:chain-1", "sha256:chain-0"] {
                    let code = client.remove(name).err().map(|error| error.code());
                    assert!(matches!(code, None | Some(Code::NotFound | Code::FailedPrecondition)), "{name}: {code:?}");
                }
                client.cleanup().unwrap();
            }
        });
        for pull in pulls {
            pull.join().unwrap();
        }
        is_over.store(true, Ordering::SeqCst);
        removing.join().unwrap();
    });
    place.pull(&mut client);
    is_right(Mounted::of(&client.view("view", &place.top()).unwrap()).path());
}

/// Another image is based on the lower layer only, which was never here by itself (containerd/nydus-snapshotter issue 640).
#[test]
fn some_of_the_layers_can_be_a_parent() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    place.pull(&mut client);
    let mounted = Mounted::of(&client.prepare("unpack", "sha256:chain-0").unwrap());
    assert_eq!(fs::read(mounted.path().join("hidden")).unwrap(), noise(3, 20_000));
    assert!(!mounted.path().join("above").exists());
    fs::write(mounted.path().join("added"), "some").unwrap();
    drop(mounted);
    client.commit_with("other", "unpack", "sha256:chain-0", root_label()).unwrap();
    assert_eq!(place.images().len(), 2);
    let mounted = Mounted::of(&client.view("view", "other").unwrap());
    assert_eq!(fs::read(mounted.path().join("added")).unwrap(), b"some");
    assert_eq!(fs::read(mounted.path().join("small")).unwrap(), noise(1, 20_000));
    drop(mounted);
    // A cleanup and a restart keep both.
    client.cleanup().unwrap();
    place.server.kill();
    let mut client = place.server.start_again();
    assert_eq!(place.images().len(), 2);
    assert_eq!(client.remove("sha256:chain-0").unwrap_err().code(), Code::FailedPrecondition);
    for name in ["view", "other", "sha256:chain-1", "sha256:chain-0"] {
        client.remove(name).unwrap();
    }
    assert_eq!(place.images(), [] as [PathBuf; 0]);
}

/// Another image has the lowest layer, too, and cannot start lazily: that the first one's layer can be had later is not certain.
#[test]
fn layers_of_other_images_are_believed_only_if_they_can_be_had() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    place.pull(&mut client);
    let mut labels = place.labels(0);
    labels.insert("containerd.io/snapshot/cri.image-ref".into(), format!("{}/os/app:2", place.fake.address));
    labels.remove("containerd.io/snapshot/cri.manifest-digest");
    assert!(place.prepare(&mut client, 0, "", labels.clone()).is_err(), "it is unpacked");
    assert_eq!(place.prepare(&mut client, 0, "", place.labels(0)), Ok(()), "the image itself");
    // It exists after its first use.
    client.view("view", "sha256:chain-0").unwrap();
    assert_eq!(place.prepare(&mut client, 0, "", labels), Ok(()));
}

/// An image of another repository has the lowest layer, too, of which the first pull had no data, and the first repository is gone.
#[test]
fn layers_without_data_are_those_of_the_last_pull() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let mut client = place.server.client();
    assert_eq!(place.prepare(&mut client, 0, "", place.labels(0)), Ok(()));
    place.fake.fault(|_, _| Reply::of(403, "no"));
    place.fake = Arc::new(Fake::start());
    let mut upper = Writer::new(Format::Estargz, &[128 << 10]);
    upper.file("own", &noise(6, 20_000));
    place.layers.truncate(1);
    place.layers.extend(without_tables(vec![upper.finish()]));
    place.manifest = place.push("1");
    assert_eq!(place.prepare(&mut client, 0, "", place.labels(0)), Ok(()));
    let mut labels = place.labels(1);
    labels.insert("containerd.io/snapshot.ref".into(), "sha256:chain-other".into());
    let mounts = place.prepare(&mut client, 1, "sha256:chain-0", labels).expect_err("it has no table");
    assert_eq!(Mounted::of(&mounts).path().join("small").metadata().unwrap().len(), 20_000);
}

/// An image that was converted is used where that is allowed, whatever its layers are.
#[test]
fn converted_images_are_used_from_repositories_that_are_trusted() {
    if !can_mount() {
        return;
    }
    for is_trusted in [true, false] {
        let mut place = Place::configured(without_tables(layers(Format::Estargz)), 0, "");
        let store = place.server.directory.path().join("convert");
        let reference = format!("oci:{}/os/app:1", place.fake.address);
        let mut convert = Command::new(ferry());
        convert.args(["image", "convert", &reference, "--store"]).arg(&store);
        let output = convert.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        place.server.stop();
        let trusted = if is_trusted { format!("{:?}", place.fake.address.to_string()) } else { String::new() };
        let config =
            format!("[lazy]\nfrom = [\"*\"]\njobs = 0\nprogram = {:?}\nconverted-from = [{trusted}]\n", ferry());
        place.server.configure(&config);
        let mut client = place.server.start_again();
        if !is_trusted {
            assert!(place.prepare(&mut client, 0, "", place.labels(0)).is_err());
            continue;
        }
        place.fake.requests();
        place.pull(&mut client);
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        is_right(mounted.path());
        assert_eq!(place.fetched(), 0, "no layer is needed");
        assert_eq!(fs::metadata(mounted.path().join("small")).unwrap().size(), 20_000);
        drop(mounted);
        // The lower layer has to be pulled for another image.
        let mounted = Mounted::of(&client.prepare("other", "sha256:chain-0").unwrap());
        assert_eq!(fs::read(mounted.path().join("hidden")).unwrap(), noise(3, 20_000));
    }
}

/// Both this program and the one that fetches what is read get there.
#[test]
fn registries_are_reached_by_hosts_files_and_credentials() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(Format::Estargz), 0, "credentials = \"auth.json\"\n");
    let directory = place.server.directory.path().to_owned();
    let address = place.fake.address.to_string();
    fs::write(directory.join("auth.json"), json!({"auths": {&address: {"auth": "bWU6d29yZA=="}}}).to_string()).unwrap();
    fs::create_dir_all(directory.join("certs.d/registry.invalid")).unwrap();
    let hosts = format!("server = \"http://{address}/proxy\"\n[header]\nx-team = \"a\"\n");
    fs::write(directory.join("certs.d/registry.invalid/hosts.toml"), hosts).unwrap();
    place.fake.fault(|request, reply| {
        let header = |name: &str| request.headers.get(name).map(String::as_str);
        match (header("authorization"), header("x-team"), request.path.starts_with("/proxy/v2/os/app/")) {
            (Some("Basic bWU6d29yZA=="), Some("a"), true) => reply,
            _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
        }
    });
    let mut client = place.server.client();
    for layer in 0..2 {
        let mut labels = place.labels(layer);
        labels.insert("containerd.io/snapshot/cri.image-ref".into(), "registry.invalid/os/app:1".into());
        let parent = ["", "sha256:chain-0"][layer];
        assert_eq!(place.prepare(&mut client, layer, parent, labels), Ok(()));
    }
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    is_right(mounted.path());
}

/// What a mirror sends damaged, also if it stops after that, comes from the next server.
#[test]
fn damaged_data_of_a_mirror_comes_from_the_next_server() {
    if !can_mount() {
        return;
    }
    for (format, way) in
        [(Format::Estargz, Way::Whole), (Format::ZstdChunked, Way::Whole), (Format::Estargz, Way::Cut(9))]
    {
        let place = Place::new(layers(format));
        let mirror = Fake::start();
        place.layers.iter().for_each(|layer| drop(mirror.add_blob(&layer.blob)));
        let directory = place.server.directory.path().join("certs.d/registry.invalid");
        fs::create_dir_all(&directory).unwrap();
        let hosts = format!("server = \"http://{}\"\n[host.\"http://{}\"]\n", place.fake.address, mirror.address);
        fs::write(directory.join("hosts.toml"), hosts).unwrap();
        let mut place = place;
        let mut client = place.server.client();
        for layer in 0..2 {
            let mut labels = place.labels(layer);
            labels.insert("containerd.io/snapshot/cri.image-ref".into(), "registry.invalid/os/app:1".into());
            assert_eq!(place.prepare(&mut client, layer, ["", "sha256:chain-0"][layer], labels), Ok(()));
        }
        mirror.requests();
        mirror.fault(move |request, reply| match request.is_blob() {
            true => Reply { body: reply.body.iter().map(|byte| byte ^ 1).collect(), way, ..reply },
            false => reply,
        });
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        is_right(mounted.path());
        let asked = mirror.requests().iter().filter(|request| request.is_blob()).count();
        // Some at once, before it is known; not for each of the chunks.
        assert!((1..30).contains(&asked), "{format:?} {way:?}: {asked}");
    }
}
