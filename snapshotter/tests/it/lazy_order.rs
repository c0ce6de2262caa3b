//! What is fetched first: files that an image's converter has named, and files that were recorded of a container.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::SystemTime;

use ferry_snapshotter::{GID_LABEL, UID_LABEL};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::client::root_label;
use crate::fake::{Reply, Request, Way};
use crate::lazy_place::{Place, ferry, noise, until};
use crate::server::{Mounted, can_mount};
use crate::toc_layers::{Format, Layer, Writer, sha256};

/// The landmark is in the upper layer, of which the first file is wanted; the lower one would be fetched before it. No other test has this
/// image: recorders find containers of all snapshotters.
fn layers(landmark: &str, test: &str) -> Vec<Layer> {
    let mut lower = Writer::new(Format::Estargz, &[128 << 10]);
    lower.file("other", &noise(2, 20_000));
    lower.file("large", &noise(4, 600_000));
    lower.file("small", &noise(1, 20_000));
    let mut upper = Writer::new(Format::Estargz, &[128 << 10]);
    upper.file("above", &noise(5, 20_000));
    upper.file(landmark, b"\x0f");
    upper.file("below", &noise(6, 200_000));
    upper.file("test", format!("{test} {}", std::process::id()).as_bytes());
    vec![lower.finish(), upper.finish()]
}

/// The layer of the first request for files since the last call, and its range.
fn first(place: &Place) -> (usize, usize, usize) {
    until("all of it", || place.is_complete());
    let mut found = place.fake.requests().into_iter().filter(|request| request.is_blob()).filter_map(|request| {
        let layer = place.layers.iter().position(|layer| request.path.ends_with(&sha256(&layer.blob)))?;
        let (from, to) = request.range()?;
        // Neither its table of contents, nor the byte that is asked for to connect.
        (to < place.layers[layer].blob.len() && to - from > 1).then_some((layer, from, to))
    });
    found.next().expect("files are asked for")
}

/// Where a file of a layer begins and ends in its blob.
fn place_of(layer: &Layer, bytes: &[u8]) -> (usize, usize) {
    // Noise is not compressed, so any part of it is found.
    let middle = &bytes[1000..1100];
    let at = layer.blob.windows(middle.len()).position(|part| part == middle).expect("it is there");
    (at - 1000, at - 1000 + bytes.len())
}

fn remove(place: &mut Place) {
    let mut client = place.server.client();
    for name in ["sha256:chain-1", "sha256:chain-0"] {
        client.remove(name).unwrap();
    }
    until("the end of the packs", || {
        client.cleanup().unwrap();
        let packs = fs::read_dir(place.server.root().join("store/packs")).unwrap().flatten();
        packs.filter(|pack| pack.file_name() != "table").count() == 0
    });
    assert_eq!(place.images(), [] as [PathBuf; 0]);
    place.fake.requests();
}

#[test]
fn files_before_the_landmark_are_fetched_first() {
    if !can_mount() {
        return;
    }
    for (landmark, expected) in [(".prefetch.landmark", 1), (".no.prefetch.landmark", 0), ("dir/.prefetch.landmark", 0)]
    {
        let mut place = Place::configured(layers(landmark, "landmark"), 1, "");
        let mut client = place.server.client();
        place.pull(&mut client);
        let (layer, from, to) = first(&place);
        assert_eq!(layer, expected, "{landmark}");
        if expected == 1 {
            let (begin, end) = place_of(&place.layers[1], &noise(5, 20_000));
            let (below, _) = place_of(&place.layers[1], &noise(6, 200_000));
            assert!(from <= begin && end <= to && to <= below, "{from} {to}, not {begin} {end}");
        }
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        assert!(fs::read(mounted.path().join("below")).unwrap() == noise(6, 200_000));
    }
}

/// `ferry image trace` of a container.
pub struct Recorder(Child, BufReader<ChildStderr>);

impl Recorder {
    /// Starts it, and waits until it waits for the container.
    pub fn start(name: &str) -> Self {
        Self::start_with(name, &[])
    }

    fn start_with(name: &str, words: &[&str]) -> Self {
        let mut command = Command::new(ferry());
        command.args(["image", "trace", "--container", name]).args(words).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap());
        let mut recorder = Self(child, said);
        recorder.says("ferry: waiting for the container ");
        recorder
    }

    fn says(&mut self, expected: &str) {
        let mut line = String::new();
        let said = PollFd::new(self.1.get_ref(), PollFlags::IN);
        let limit = Timespec { tv_sec: 300, tv_nsec: 0 };
        assert!(
            !self.1.buffer().is_empty() || poll(&mut [said], Some(&limit)) == Ok(1),
            "it does not say {expected:?}"
        );
        self.1.read_line(&mut line).unwrap();
        assert!(line.starts_with(expected), "{line}");
    }

    /// Waits until it has found the container.
    pub fn records(&mut self) {
        self.says("ferry: recording /");
    }

    /// Waits until it has ended with the container; returns what it said.
    pub fn end(self) -> String {
        let (succeeded, said) = self.ended();
        assert!(succeeded, "{said}");
        said
    }

    fn ended(mut self) -> (bool, String) {
        let mut said = String::new();
        self.1.read_to_string(&mut said).unwrap();
        (self.0.wait().unwrap().success(), said)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// awslabs/soci-snapshotter issues 749, 1768, dragonflyoss/nydus issue 807: which files a start needs is known by its workload only.
#[test]
fn recorded_files_are_fetched_first_at_the_next_start() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(".prefetch.landmark", "recorded"), 1, "");
    let mut client = place.server.client();
    place.pull(&mut client);
    assert_eq!(first(&place).0, 1);
    let manifest = place.manifest.clone();
    let earlier = Mounted::of(&client.prepare("earlier", &place.top()).unwrap());
    let gone = Mounted::of(&client.prepare("gone", &place.top()).unwrap());
    // It waits for the next one, which gets the number of a mount that was there.
    let mut recorder = Recorder::start(&manifest);
    drop(gone);
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    recorder.records();
    assert_eq!(fs::read(earlier.path().join("other")).unwrap(), noise(2, 20_000));
    drop(earlier);
    let read = |name: &str| fs::read(mounted.path().join(name)).unwrap();
    assert!(read("small") == noise(1, 20_000));
    fs::write(mounted.path().join("written"), "by the container").unwrap();
    read("written");
    read("below");
    read("small");
    // Another container of the same image is not recorded.
    let view = Mounted::of(&client.prepare("another", &place.top()).unwrap());
    fs::read(view.path().join("other")).unwrap();
    drop(view);
    drop(mounted);
    let said = recorder.end();
    let list = place.server.root().join("traces").join(manifest.strip_prefix("sha256:").unwrap());
    assert!(said.contains("2 files in ") && said.contains(list.to_str().unwrap()), "{said}");
    assert_eq!(fs::read_to_string(&list).unwrap(), "/small\n/below\n");
    for name in ["gone", "another", "container", "earlier"] {
        client.remove(name).unwrap();
    }

    remove(&mut place);
    // It is not trusted.
    let hostile = format!("/nowhere\n/../../../etc/passwd\n/small/x\n//small\n/\n/{}\n", "x".repeat(300));
    fs::write(&list, hostile + &fs::read_to_string(&list).unwrap()).unwrap();
    place.pull(&mut client);
    let (layer, from, to) = first(&place);
    let (begin, end) = place_of(&place.layers[0], &noise(1, 20_000));
    assert!(layer == 0 && from <= begin && end <= to && to - from < 40_000, "{layer} {from} {to}, not {begin} {end}");

    remove(&mut place);
    fs::write(&list, b"no path\n\xff\0").unwrap();
    place.pull(&mut client);
    assert_eq!(first(&place).0, 0, "in the order of the layers");
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    for (name, seed, length) in [("other", 2, 20_000), ("large", 4, 600_000), ("below", 6, 200_000)] {
        assert!(fs::read(mounted.path().join(name)).unwrap() == noise(seed, length), "{name}");
    }
}

/// Its directory has its id, as containerd's have.
#[test]
fn a_container_that_runs_is_recorded_by_its_id_or_the_beginning_of_it() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(".prefetch.landmark", "runs"), 1, "");
    let mut client = place.server.client();
    place.pull(&mut client);
    let id = sha256(place.manifest.as_bytes()).split_off("sha256:".len());
    let (short, rest) = id.split_at(8);
    let mounts = client.prepare("container", &place.top()).unwrap();
    let mounted = Mounted::named(&id, &mounts);
    let twin = Mounted::named(&format!("{short}{}", &rest[1..]), &client.prepare("twin", &place.top()).unwrap());
    let (succeeded, said) = Recorder::start(short).ended();
    assert!(!succeeded && said.contains("give a longer name"), "{said}");
    drop((twin, mounted));
    let list = place.server.root().join("traces").join(place.manifest.strip_prefix("sha256:").unwrap());
    for name in [&*id, short] {
        let mounted = Mounted::named(&id, &mounts);
        let read = |name: &str| drop(fs::read(mounted.path().join(name)).unwrap());
        read("other");
        let mut recorder = Recorder::start(name);
        recorder.records();
        read("small");
        read("below");
        drop(mounted);
        let said = recorder.end();
        assert!(said.contains("2 files in "), "{said}");
        assert_eq!(fs::read_to_string(&list).unwrap(), "/small\n/below\n", "{name}");
        fs::remove_file(&list).unwrap();
    }
}

/// awslabs/soci-snapshotter issue 87, containerd/stargz-snapshotter pull requests 47 and 2216: readers, or the start, waited for it.
#[test]
fn prefetching_delays_no_reader() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(".prefetch.landmark", "nobody"), 1, "");
    let lower = place.layers[0].clone();
    let (name, bytes, small) = (sha256(&lower.blob), lower.blob.len(), place_of(&lower, &noise(1, 20_000)).0);
    let is_silent = move |request: &Request| {
        // Not its table of contents.
        let covers = request.range().is_some_and(|(from, to)| to < bytes && (from..to).contains(&small));
        request.path.ends_with(&name) && covers
    };
    let silent = is_silent.clone();
    place.fake.fault(move |request, reply| match silent(request) {
        true => Reply { way: Way::Silence, ..Reply::default() },
        false => reply,
    });
    let traces = place.server.root().join("traces");
    fs::create_dir(&traces).unwrap();
    fs::write(traces.join(place.manifest.strip_prefix("sha256:").unwrap()), "/small\n").unwrap();
    let mut client = place.server.client();
    place.pull(&mut client);
    until("the request", || place.fake.requests().iter().any(&is_silent));
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    assert!(fs::read(mounted.path().join("other")).unwrap() == noise(2, 20_000));
    assert!(fs::read(mounted.path().join("below")).unwrap() == noise(6, 200_000));
}

/// dragonflyoss/nydus issue 807, containerd/nydus-snapshotter issue 486: lists have to come to other machines.
#[test]
fn lists_are_stored_beside_images_for_other_machines() {
    if !can_mount() {
        return;
    }
    for lists_referrers in [false, true] {
        let mut place = Place::configured(layers(".prefetch.landmark", "stored"), 1, "");
        if lists_referrers {
            place.fake.list_referrers();
        }
        let mut client = place.server.client();
        place.pull(&mut client);
        let reference = format!("oci:{}/os/app:1", place.fake.address);
        for (name, file) in [("one", "other"), ("two", "small")] {
            let mut recorder = Recorder::start_with(&place.manifest, &["--push", &reference]);
            // A container with users of its own has other mounts of the same layers.
            let mut labels = root_label();
            labels.extend([UID_LABEL, GID_LABEL].map(|name| (name.to_owned(), "0:100000:65536".to_owned())));
            let mounted = Mounted::of(&client.prepare_with(name, &place.top(), labels).unwrap());
            recorder.records();
            fs::read(mounted.path().join(file)).unwrap();
            drop(mounted);
            let said = recorder.end();
            assert!(said.contains("1 files in ") && said.contains("the list is stored beside"), "{said}");
            client.remove(name).unwrap();
            // Lists of the same second have no order.
            until("the next second", {
                let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
                let begin = now();
                move || now() > begin
            });
        }
        // Another image is none of the container's.
        let mut layers = place.layers.clone();
        layers.truncate(1);
        let manifest = std::mem::replace(&mut place.layers, layers);
        place.push("2");
        place.layers = manifest;
        let mut recorder =
            Recorder::start_with(&place.manifest, &["--push", &format!("oci:{}/os/app:2", place.fake.address)]);
        let mounted = Mounted::of(&client.prepare("three", &place.top()).unwrap());
        recorder.records();
        fs::read(mounted.path().join("below")).unwrap();
        drop(mounted);
        let (succeeded, said) = recorder.ended();
        assert!(!succeeded && said.contains("the container's is sha256:"), "{said}");
        client.remove("three").unwrap();
        // Nor is a list of nothing.
        let mut recorder = Recorder::start(&place.manifest);
        let mounted = Mounted::of(&client.prepare("four", &place.top()).unwrap());
        recorder.records();
        drop(mounted);
        let (succeeded, said) = recorder.ended();
        assert!(!succeeded && said.contains("opened no file of its image"), "{said}");
        client.remove("four").unwrap();
        let list = place.server.root().join("traces").join(place.manifest.strip_prefix("sha256:").unwrap());
        assert_eq!(fs::read_to_string(list).unwrap(), "/below\n");

        remove(&mut place);
        fs::remove_dir_all(place.server.root().join("traces")).unwrap();
        place.pull(&mut client);
        assert_eq!(first(&place).0, 1, "it is not asked for");
        place.server.stop();
        let config = format!(
            "[lazy]\nfrom = [\"*\"]\njobs = 1\nprogram = {:?}\ntraces-from = [\"{}\"]\n",
            ferry(),
            place.fake.address
        );
        place.server.configure(&config);
        let mut client = place.server.start_again();
        remove(&mut place);
        place.pull(&mut client);
        let (layer, from, to) = first(&place);
        let (begin, end) = place_of(&place.layers[0], &noise(1, 20_000));
        assert!(layer == 0 && from <= begin && end <= to && to - from < 40_000, "{layer} {from} {to}");
    }
}
