//! Layers that are unpacked by the Diff service.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use ferry_snapshotter::api::Mount;
use ferry_snapshotter::diff::{ApplyRequest, ApplyResponse, DIFF_SERVICE, Descriptor};
use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::fs::{XattrFlags, setxattr};
use tonic::Code;

use crate::client::{Answer, Client, root_label};
use crate::lazy_place::noise;
use crate::server::{Mounted, Server, can_mount};
use crate::toc_layers::{Layer, sha256};
use crate::tree::Change::{Dir, Fifo, File, Link, Owner, Symlink};
use crate::tree::{apply, look};

pub const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const BLOBS: &str = "io.containerd.content.v1.content/blobs/sha256";

/// Starts with the root of a containerd, which has an empty content store in `c-root`.
pub fn start(images: &'static str, containerd_root: &str) -> Option<Server> {
    start_with(images, containerd_root, |_| {})
}

/// The same; a function prepares the root.
pub fn start_with(images: &'static str, containerd_root: &str, prepare: impl FnOnce(&Path)) -> Option<Server> {
    can_mount().then(|| {
        let mut server = Server::start_with(images, |root| {
            let directory = root.parent().expect("it is in a directory");
            fs::create_dir_all(directory.join("c-root").join(BLOBS)).expect("it can be made");
            fs::write(directory.join("more.toml"), format!("containerd-root = {containerd_root:?}\n"))
                .expect("it can be written");
            prepare(root);
        });
        drop(server.client());
        server
    })
}

/// Makes an archive of names in a directory, as GNU tar with these options does.
pub fn archive(directory: &Path, options: &[&str], names: &[&str]) -> Vec<u8> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--no-recursion", "--format=pax", "--xattrs", "--xattrs-include=*"])
        .args(options)
        .arg("-C")
        .arg(directory)
        .arg("-cf-");
    let output = tar.args(names).output().expect("there is tar");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

pub fn layer(plain: Vec<u8>, blob: Vec<u8>, media_type: &'static str) -> Layer {
    Layer { blob, plain, media_type, annotations: Default::default() }
}

/// Layers of every kind of member: the second changes the first, and the third has names in directories that it does not describe.
pub fn layers(directory: &Path) -> Vec<Layer> {
    let long = "more than an inode of an image holds, so that it is in a pack ".repeat(2000);
    let at = |name: &str| directory.join(name);
    let base = [
        Dir("etc", 0o750),
        File("etc/kept", &long, 0o4755),
        File("etc/gone", "short", 0o644),
        Link("etc/kept", "etc/linked"),
        Symlink("/etc/kept", "etc/link"),
        Fifo("etc/fifo"),
        Dir("opaque", 0o755),
        File("opaque/old", &long, 0o644),
        Dir("deep", 0o711),
        Dir("deep/er", 0o1777),
        File("deep/er/file", "", 0o600),
        Owner("deep/er", 7),
        Owner("deep", 70_000),
    ];
    let names = [
        ".",
        "etc",
        "etc/kept",
        "etc/gone",
        "etc/linked",
        "etc/link",
        "etc/fifo",
        "opaque",
        "opaque/old",
        "deep",
        "deep/er",
        "deep/er/file",
    ];
    fs::create_dir_all(at("1")).unwrap();
    apply(&at("1"), &base);
    symlink("deep", at("1/through")).unwrap();
    fs::create_dir_all(at("2/opaque")).unwrap();
    fs::create_dir_all(at("2/etc")).unwrap();
    apply(
        &at("2"),
        &[
            File("etc/.wh.gone", "", 0o600),
            File("opaque/.wh..wh..opq", "", 0o600),
            File("opaque/new", &long.replace('m', "n"), 0o640),
            File("etc/fifo", "a file now", 0o604),
        ],
    );
    let capability = [&[1, 0, 0, 2, 0, 4][..], &[0; 14]].concat();
    for (path, name, value) in [
        ("1/deep/er", "user.of-a-directory", &b"one"[..]),
        ("1/etc/kept", "user.of-a-file", b""),
        ("2/opaque/new", "security.capability", &capability),
    ] {
        setxattr(at(path), name, value, XattrFlags::empty()).unwrap();
    }
    let first = archive(&at("1"), &[], &[&names[..], &["through"]].concat());
    let second = archive(&at("2"), &[], &["etc/.wh.gone", "opaque", "opaque/.wh..wh..opq", "opaque/new", "etc/fifo"]);
    fs::create_dir_all(at("3/deep/er/new")).unwrap();
    fs::create_dir_all(at("3/etc")).unwrap();
    apply(
        &at("3"),
        &[
            File("deep/er/new/file", &long, 0o600),
            File("deep/er/.wh.file", "", 0o600),
            File("etc/last", "last", 0o600),
            Link("etc/last", "etc/last-too"),
        ],
    );
    let third = archive(&at("3"), &[], &["deep/er/new/file", "deep/er/.wh.file", "etc/last", "etc/last-too"]);
    let (start, end) = second.split_at(second.len() / 3);
    let members = [gzip(start), gzip(end)].concat();
    let packed = zstd::encode_all(&*third, 1).unwrap();
    vec![
        layer(first.clone(), gzip(&first), GZIP),
        layer(second, members, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
        layer(third, packed, "application/vnd.oci.image.layer.v1.tar+zstd"),
    ]
}

/// The call that unpacks a layer, whose blob is in the content store then.
pub fn request(server: &Server, layer: &Layer, mounts: &[Mount]) -> ApplyRequest {
    let digest = sha256(&layer.blob);
    let blobs = server.directory.path().join("c-root").join(BLOBS);
    let blob = blobs.join(digest.strip_prefix("sha256:").unwrap());
    if !blob.exists() {
        fs::write(blob, &layer.blob).unwrap();
    }
    let (media_type, size) = (layer.media_type.into(), i64::try_from(layer.blob.len()).unwrap());
    let diff = Some(Descriptor { media_type, digest, size, ..Descriptor::default() });
    ApplyRequest { diff, mounts: mounts.to_vec(), ..ApplyRequest::default() }
}

pub fn send(client: &mut Client, request: ApplyRequest) -> Answer<Descriptor> {
    let response: ApplyResponse = client.call(&format!("{DIFF_SERVICE}Apply"), request)?;
    Ok(response.applied.expect("a response has it"))
}

/// Unpacks and commits layers, each on the one before.
fn unpack(server: &Server, client: &mut Client, layers: &[Layer]) {
    let mut parent = String::new();
    for (number, layer) in layers.iter().enumerate() {
        let (key, name) = (format!("active-{number}"), format!("layer-{number}"));
        let mounts = client.prepare(&key, &parent).unwrap();
        let applied = send(client, request(server, layer, &mounts)).unwrap();
        assert_eq!((applied.digest, applied.media_type), (sha256(&layer.plain), PLAIN.into()));
        assert_eq!(usize::try_from(applied.size), Ok(layer.plain.len()));
        client.commit(&name, &key).unwrap();
        parent = name;
    }
}

/// What is in the directories of active snapshots beside overlayfs's, and in the store.
pub fn left(server: &Server) -> Vec<String> {
    let list = |directory: &Path| fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let ids = list(&server.root().join("snapshots"));
    let files = ids.flat_map(|id| list(&id).collect::<Vec<_>>()).chain(list(&server.root().join("store/packs")));
    let known = |name: &str| !["fs", "work", "table"].contains(&name);
    files.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).filter(|name| known(name)).collect()
}

#[test]
fn layers_become_images_without_a_directory() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let directory = tempfile::tempdir().unwrap();
    let layers = layers(directory.path());
    unpack(&server, &mut client, &layers);
    let mounted = Mounted::of(&client.view("view", "layer-2").unwrap());
    let found = look(mounted.path());
    let entry = |path: &str| found.get(path).map_or("", |found| found.as_str());
    for (path, start) in [
        ("", "40755 0:0"),
        ("etc", "40750 0:0"),
        ("etc/kept", "104755 0:0 more than"),
        ("etc/linked", "104755 0:0 more than"),
        ("etc/link", "120777 3:4 /etc/kept"),
        ("etc/fifo", "100604 0:0 a file now"),
        ("etc/last", "100600 0:0 last"),
        ("opaque", "40755 0:0"),
        ("opaque/new", "100640 0:0 nore than"),
        ("deep", "40711 70000:70000"),
        ("deep/er", "41777 7:7"),
        ("deep/er/new", "40755 0:0"),
        ("deep/er/new/file", "100600 0:0 more than"),
        ("through", "120777 0:0 deep"),
        ("etc/gone", ""),
        ("opaque/old", ""),
        ("deep/er/file", ""),
    ] {
        assert!(
            entry(path).starts_with(start) && entry(path).is_empty() == start.is_empty(),
            "{path}: {}",
            entry(path)
        );
    }
    assert_eq!(found.len(), 15, "{:?}", found.keys());
    let inode = |path: &str| fs::metadata(mounted.path().join(path)).unwrap().ino();
    assert_eq!((inode("etc/last"), inode("etc/kept")), (inode("etc/last-too"), inode("etc/linked")));
    let (usage, active) = (client.usage("layer-0").unwrap(), client.prepare("active", "").unwrap());
    // The same as a directory.
    send(&mut client, request(&server, &layers[0], &active)).unwrap();
    assert_eq!(client.usage("active").unwrap(), usage);
    let upper = Path::new(&active[0].source);
    assert_eq!(fs::read_dir(upper).unwrap().count(), 0);
    client.remove("active").unwrap();
    let again = client.prepare("again", "").unwrap();
    let tar = Command::new("tar")
        .arg("-xf")
        .arg("-")
        .arg("-C")
        .arg(&again[0].source)
        .stdin(std::process::Stdio::piped())
        .spawn();
    let mut tar = tar.unwrap();
    tar.stdin.take().unwrap().write_all(&layers[0].plain).unwrap();
    assert!(tar.wait().unwrap().success());
    assert_eq!(client.usage("again").unwrap(), usage);
}

#[test]
fn an_unpacked_layer_is_committed_or_removed_and_nothing_else() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let plain = {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), noise(1, 300_000)).unwrap();
        archive(directory.path(), &[], &["file"])
    };
    let layer = layer(plain.clone(), gzip(&plain), GZIP);
    let mounts = client.prepare("a", "").unwrap();
    let call = request(&server, &layer, &mounts);
    send(&mut client, call.clone()).unwrap();
    for refused in
        [client.mounts("a").map(drop), send(&mut client, call.clone()).map(drop), client.prepare("b", "a").map(drop)]
    {
        let status = refused.unwrap_err();
        assert!(matches!(status.code(), Code::FailedPrecondition | Code::InvalidArgument), "{status}");
    }
    // Another process writes to it nevertheless.
    let upper = Path::new(&mounts[0].source);
    fs::write(upper.join("more"), "").unwrap();
    assert_eq!(client.commit("layer", "a").unwrap_err().code(), Code::FailedPrecondition);
    fs::remove_file(upper.join("more")).unwrap();
    let mounted = Mounted::of(&mounts);
    assert_eq!(client.commit("layer", "a").unwrap_err().code(), Code::FailedPrecondition);
    drop(mounted);
    // Neither a restart nor garbage collection loses it.
    client.cleanup().unwrap();
    server.kill();
    client = server.start_again();
    client.cleanup().unwrap();
    client.commit("layer", "a").unwrap();
    let mounted = Mounted::of(&client.view("view", "layer").unwrap());
    assert!(fs::read(mounted.path().join("file")).unwrap() == noise(1, 300_000));
    drop(mounted);
    client.remove("view").unwrap();
    client.remove("layer").unwrap();

    let mounts = client.prepare("a", "").unwrap();
    send(&mut client, request(&server, &layer, &mounts)).unwrap();
    client.remove("a").unwrap();
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
}

/// What it removes is not known any more, and would be there again.
#[test]
fn a_layer_that_was_unpacked_for_no_parent_gets_none_later() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join(".wh.gone"), "").unwrap();
    let plain = archive(directory.path(), &[], &[".wh.gone"]);
    let layer = layer(plain.clone(), gzip(&plain), GZIP);
    for (key, parent) in [("below", ""), ("above", "")] {
        let mounts = client.prepare(key, parent).unwrap();
        send(&mut client, request(&server, &layer, &mounts)).unwrap();
    }
    client.commit("layer-below", "below").unwrap();
    let refused = client.commit_with("layer-above", "above", "layer-below", root_label()).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("rebase"), "{refused}");
    client.commit("layer-above", "above").unwrap();
}

/// `ferry image du` and others may use it for as long as they like, and containerd's database is locked meanwhile.
#[test]
fn a_store_that_another_process_uses_keeps_nothing_waiting() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let layer = large();
    let mounts = client.prepare("key", "").unwrap();
    send(&mut client, request(&server, &layer, &mounts)).unwrap();
    client.commit("layer", "key").unwrap();
    client.remove("layer").unwrap();
    let used = ferry_image::Store::open(&server.root().join("store")).unwrap();
    client.cleanup().unwrap();
    assert_ne!(left(&server), [""; 0], "they may be in use");
    drop(used);
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
}

#[test]
fn only_layers_for_empty_snapshots_are_unpacked() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    fs::write(file("file"), noise(2, 200_000)).unwrap();
    fs::File::create(file("holes")).unwrap().set_len(8 << 40).unwrap();
    let plain = archive(directory.path(), &[], &["file"]);
    let packed = gzip(&plain);
    let mut damaged = packed.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 64].fill(0);
    let of = |plain: &[u8]| layer(plain.to_vec(), plain.to_vec(), PLAIN);
    let mounts = client.prepare("a", "").unwrap();
    for (what, layer, code) in [
        ("no layer", layer(plain.clone(), plain.clone(), "text/plain"), Code::Unimplemented),
        (
            "encrypted",
            layer(plain.clone(), plain.clone(), "application/vnd.oci.image.layer.v1.tar+encrypted"),
            Code::Unimplemented,
        ),
        ("gzip that ends early", layer(Vec::new(), packed[..packed.len() - 10].to_vec(), GZIP), Code::Internal),
        ("damaged gzip", layer(Vec::new(), damaged, GZIP), Code::Unimplemented),
        (
            "a name with ..",
            of(&archive(directory.path(), &["-P", "--transform=s,file,../../file,"], &["file"])),
            Code::Unimplemented,
        ),
        ("an archive that ends early", of(&plain[..plain.len() / 2]), Code::Unimplemented),
        ("no archive", of(&noise(3, 4096)), Code::Unimplemented),
        (
            "a file larger than the disk",
            of(&archive(directory.path(), &["-S"], &["file", "holes"])),
            Code::Unimplemented,
        ),
    ] {
        let status = send(&mut client, request(&server, &layer, &mounts)).unwrap_err();
        assert_eq!(status.code(), code, "{what}: {status}");
    }
    let good = request(&server, &layer(plain.clone(), packed.clone(), GZIP), &mounts);
    let mut other = good.clone();
    other.diff.as_mut().unwrap().size -= 1;
    assert_eq!(send(&mut client, other).unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(
        send(&mut client, ApplyRequest { diff: None, ..good.clone() }).unwrap_err().code(),
        Code::InvalidArgument
    );
    let foreign = |change: &dyn Fn(&mut Mount)| {
        let mut call = good.clone();
        change(&mut call.mounts[0]);
        call
    };
    for call in [
        ApplyRequest { mounts: Vec::new(), ..good.clone() },
        ApplyRequest { mounts: [mounts.clone(), mounts.clone()].concat(), ..good.clone() },
        foreign(&|mount| mount.source = "/etc".into()),
        foreign(&|mount| mount.source.push_str("/..")),
        foreign(&|mount| mount.source = mount.source.replace("snapshots/", "snapshots/+")),
        foreign(&|mount| mount.options = vec!["ro".into(), "rbind".into()]),
        foreign(&|mount| mount.r#type = "erofs".into()),
        ApplyRequest { mounts: client.view("view", "").unwrap(), ..good.clone() },
    ] {
        let status = send(&mut client, call.clone()).unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{call:?}: {status}");
    }
    let status = client.call::<_, ()>(&format!("{DIFF_SERVICE}Diff"), good.clone()).unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
    fs::write(Path::new(&mounts[0].source).join("some"), "").unwrap();
    assert_eq!(send(&mut client, good.clone()).unwrap_err().code(), Code::Unimplemented);
    fs::remove_file(Path::new(&mounts[0].source).join("some")).unwrap();
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
    send(&mut client, good).unwrap();
}

#[test]
fn a_layer_of_a_snapshot_that_is_gone_is_left_to_nobody() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), noise(5, 5000)).unwrap();
    let plain = archive(directory.path(), &[], &["file"]);
    let layer = layer(plain.clone(), gzip(&plain), GZIP);
    let mounts = client.prepare("a", "").unwrap();
    client.remove("a").unwrap();
    let status = send(&mut client, request(&server, &layer, &mounts)).unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    // Its name is another one's.
    let again = client.prepare("a", "").unwrap();
    let status = send(&mut client, request(&server, &layer, &mounts)).unwrap_err();
    assert_eq!(status.code(), Code::NotFound, "{status}");
    send(&mut client, request(&server, &layer, &again)).unwrap();
    client.commit("layer", "a").unwrap();
    let status = send(&mut client, request(&server, &layer, &again)).unwrap_err();
    assert!(status.code() == Code::FailedPrecondition && status.message().contains("as layer"), "{status}");
    client.remove("layer").unwrap();
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
}

/// A layer that takes longer than a call is waited for.
fn large() -> Layer {
    let directory = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..64).map(|number| format!("file-{number}")).collect();
    for (seed, name) in (10..).zip(&names) {
        fs::write(directory.path().join(name), noise(seed, 1 << 20)).unwrap();
    }
    let plain = archive(directory.path(), &[], &names.iter().map(String::as_str).collect::<Vec<_>>());
    layer(plain.clone(), gzip(&plain), GZIP)
}

#[test]
fn a_call_that_ends_early_leaves_nothing() {
    let Some(mut server) = start("require", "c-root") else { return };
    let mut client = server.client();
    let layer = large();
    let apply = format!("{DIFF_SERVICE}Apply");
    for (round, wait) in [0, 1, 5, 20, 60, 150].into_iter().enumerate() {
        let key = format!("given-up-{round}");
        let mounts = client.prepare(&key, "").unwrap();
        let call = request(&server, &layer, &mounts);
        client.call_for(&apply, call.clone(), Duration::from_millis(wait));
        // Waits until the call has ended; it may have ended well.
        client = server.client();
        client.remove(&key).unwrap();

        let key = format!("killed-{round}");
        let mounts = client.prepare(&key, "").unwrap();
        let (apply, call, mut other) = (apply.clone(), ApplyRequest { mounts, ..call }, server.client());
        let waiting = thread::spawn(move || other.call_for(&apply, call, Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(wait));
        server.kill();
        waiting.join().unwrap();
        client = server.start_again();
        let has_layer = client.mounts(&key).is_err();
        let left = left(&server);
        assert!(left.contains(&"applied".into()) == has_layer && (has_layer || left.is_empty()), "{left:?}");
        client.remove(&key).unwrap();
    }
    client.cleanup().unwrap();
    assert_eq!(left(&server), [""; 0]);
}

#[test]
fn layers_are_unpacked_at_the_same_time_while_garbage_is_collected() {
    let Some(mut server) = start("require", "c-root") else { return };
    let layer = large();
    let mut client = server.client();
    let calls: Vec<_> = (0..4)
        .map(|number| {
            // The last two are one snapshot.
            let key = format!("key-{}", number.min(2));
            let mounts = client.mounts(&key).or_else(|_| client.prepare(&key, "")).unwrap();
            (key, request(&server, &layer, &mounts))
        })
        .collect();
    let socket = server.socket();
    let succeeded = thread::scope(|scope| {
        let threads: Vec<_> = calls
            .iter()
            .map(|(_, call)| scope.spawn(|| send(&mut Client::connect(&socket).unwrap(), call.clone()).is_ok()))
            .collect();
        for _ in 0..5 {
            client.cleanup().unwrap();
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).filter(|done| *done).count()
    });
    assert_eq!(succeeded, 3);
    client.cleanup().unwrap();
    for number in 0..3 {
        client.commit(&format!("layer-{number}"), &format!("key-{number}")).unwrap();
        let mounted = Mounted::of(&client.view(&format!("view-{number}"), &format!("layer-{number}")).unwrap());
        assert!(fs::read(mounted.path().join("file-63")).unwrap() == noise(73, 1 << 20));
    }
}

#[test]
fn where_layers_stay_directories_another_differ_unpacks_them() {
    let Some(mut server) = start("never", "c-root") else { return };
    let mut client = server.client();
    let directory = tempfile::tempdir().unwrap();
    let mounts = client.prepare("a", "").unwrap();
    let call = request(&server, &layers(directory.path())[0], &mounts);
    assert_eq!(send(&mut client, call).unwrap_err().code(), Code::Unimplemented);
}
