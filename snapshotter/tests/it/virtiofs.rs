//! Views that virtual machines read by virtio-fs, with a driver in the machine's place.

use std::fs;
use std::path::{Path, PathBuf};

use ferry_driver::{Config, Driver, ROOT};
use ferry_snapshotter::VIRTIOFS_LABEL;
use ferry_snapshotter::api::{Labels, Mount, MountsResponse, PrepareRequest};
use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;

use crate::client::{Answer, Client, root_label};
use crate::lazy_place::{Place, ferry, layers, noise, until};
use crate::server::{Mounted, Server, can_mount};
use crate::toc_layers::Format;

const SETTING: &str = "[virtiofs]\nsocket-directory = \"sockets\"\n";

fn labels() -> Labels {
    let mut labels = root_label();
    labels.insert(VIRTIOFS_LABEL.into(), "true".into());
    labels
}

fn view(client: &mut Client, key: &str, parent: &str) -> Answer<Vec<Mount>> {
    let (key, parent, labels) = (key.into(), parent.into(), labels());
    let request = PrepareRequest { key, parent, labels, ..PrepareRequest::default() };
    Ok(client.call::<_, MountsResponse>("View", request)?.mounts)
}

/// The socket of a view.
fn socket(mounts: &[Mount]) -> PathBuf {
    let [Mount { r#type, source, options, .. }] = mounts else { panic!("{mounts:?}") };
    assert!(r#type == "virtiofs" && source.starts_with("ferry-") && options[0] == "ro", "{mounts:?}");
    options[1].strip_prefix("socket=").unwrap().into()
}

fn connect(mounts: &[Mount]) -> Driver {
    let mut driver = Driver::connect(socket(mounts), Config::default()).unwrap();
    driver.init().unwrap();
    driver
}

fn read(driver: &mut Driver, name: &str) -> Vec<u8> {
    let entry = driver.lookup(ROOT, name).unwrap();
    let open = driver.open(entry.nodeid, 0).unwrap();
    let mut found = Vec::new();
    loop {
        let bytes = driver.read(entry.nodeid, open.fh, found.len() as u64, 64 << 10).unwrap();
        if bytes.is_empty() {
            return found;
        }
        found.extend(bytes);
    }
}

/// Whether there is a name: the reply for one that is missing may be kept, and has no inode.
fn exists(driver: &mut Driver, name: &str) -> bool {
    driver.lookup(ROOT, name).unwrap().nodeid != 0
}

/// The process that a snapshot's file names, while it runs.
fn process(file: &Path) -> Option<Pid> {
    let text = fs::read_to_string(file).ok()?;
    Pid::from_raw(text.split(' ').next()?.parse().ok()?).filter(|pid| runs(*pid))
}

/// Whether a process runs. One that has ended may be nobody's child here.
fn runs(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, fields)| !fields.trim_start().starts_with('Z'))
}

fn commit(client: &mut Client, name: &str, parent: &str, contents: &[u8]) {
    let key = format!("extract-{name}");
    let mounted = Mounted::of(&client.prepare(&key, parent).unwrap());
    fs::write(mounted.path().join(name), contents).unwrap();
    drop(mounted);
    client.commit(name, &key).unwrap();
}

#[test]
fn a_machine_reads_a_view_while_the_snapshotter_and_the_share_are_killed() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start_with("auto", |root| {
        let more = format!("{SETTING}[lazy]\nprogram = {:?}\n", ferry());
        fs::write(root.with_file_name("more.toml"), more).unwrap();
    });
    let mut client = server.client();
    for (seed, name, parent) in [(1, "one", ""), (2, "two", "one")] {
        commit(&mut client, name, parent, &noise(seed, 300_000));
    }
    if !server.root().join("snapshots/1/layer").exists() {
        return ferry_skip::skip!("this kernel does not mount images from files");
    }
    let mut base = connect(&view(&mut client, "base", "one").unwrap());
    assert!(!exists(&mut base, "two") && exists(&mut base, "one"), "only the lower layer");
    client.remove("base").unwrap();

    let mounts = view(&mut client, "machine", "two").unwrap();
    let id = socket(&mounts).file_stem().unwrap().to_str().unwrap().to_owned();
    let file = server.root().join("snapshots").join(id).join("share");
    let mut driver = connect(&mounts);
    assert!(read(&mut driver, "one") == noise(1, 300_000));
    let first = process(&file).unwrap();
    // It is nobody's child then, and goes on.
    server.kill();
    client = server.start_again();
    assert_eq!((client.mounts("machine").unwrap(), process(&file)), (mounts.clone(), Some(first)));
    assert!(read(&mut driver, "two") == noise(2, 300_000));
    assert_eq!(client.remove("two").unwrap_err().code(), Code::FailedPrecondition);
    client.cleanup().unwrap();

    // Killed, it is started by the next call.
    kill_process(first, Signal::KILL).unwrap();
    until("the end of the share", || process(&file).is_none());
    assert_eq!(client.mounts("machine").unwrap(), mounts);
    assert!(read(&mut connect(&mounts), "two") == noise(2, 300_000));
    // Or by the next start.
    let second = process(&file).unwrap();
    server.stop();
    kill_process(second, Signal::KILL).unwrap();
    until("the end of the share", || process(&file).is_none());
    client = server.start_again();
    until("a share", || process(&file).is_some_and(|found| found != second));
    client.mounts("machine").unwrap();
    assert!(read(&mut connect(&mounts), "one") == noise(1, 300_000));

    let last = process(&file).unwrap();
    client.remove("machine").unwrap();
    assert!(!socket(&mounts).exists() && !file.exists());
    until("the end of the share", || !runs(last));
    client.remove("two").unwrap();
    client.remove("one").unwrap();
    client.cleanup().unwrap();
    assert_eq!(fs::read_dir(server.directory.path().join("sockets")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 0);
}

#[test]
fn a_machine_reads_an_image_that_starts_lazily() {
    if !can_mount() {
        return;
    }
    let mut place = Place::configured(layers(Format::Estargz), 0, SETTING);
    let mut client = place.server.client();
    place.pull(&mut client);
    let mounts = view(&mut client, "machine", &place.top()).unwrap();
    let mut driver = connect(&mounts);
    assert!(read(&mut driver, "small") == noise(1, 20_000) && read(&mut driver, "above") == noise(5, 20_000));
    assert!(!exists(&mut driver, "hidden"));
    client.remove("machine").unwrap();
    assert!(!socket(&mounts).exists());
}

#[test]
fn what_cannot_be_shared_is_refused_and_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    commit(&mut client, "one", "", b"some");
    let status = view(&mut client, "machine", "one").unwrap_err();
    assert!(status.code() == Code::FailedPrecondition && status.message().contains("socket-directory"), "{status}");
    server.stop();
    server.configure(SETTING);
    client = server.start_again();
    for parent in ["one", ""] {
        let status = view(&mut client, "machine", parent).unwrap_err();
        assert!(status.code() == Code::FailedPrecondition && status.message().contains("no one image"), "{status}");
    }
    let status = client.prepare_with("machine", "one", labels()).unwrap_err();
    assert!(status.code() == Code::InvalidArgument && status.message().contains("only a view"), "{status}");
    assert_eq!(client.list(&[]).unwrap().len(), 1);
    // Without the label, everything is as always.
    let mounted = Mounted::of(&client.view("host", "one").unwrap());
    assert_eq!(fs::read(mounted.path().join("one")).unwrap(), b"some");
}
