//! containerd is restarted in the middle of each call; of Commit and Apply, see [`crate::concurrent`] and [`crate::diff`].

use std::fs;
use std::time::Duration;

use ferry_snapshotter::api::{CleanupRequest, Info, KeyRequest, Labels, ListRequest, PrepareRequest, UpdateRequest};
use prost::Message;
use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;

use crate::client::{Answer, Client};
use crate::server::{Mounted, Server, can_mount};

/// More calls than run at once in all.
const ROUNDS: u64 = 8;

/// Sends a call, and goes away after some time, or waits for what it returns.
type Call = fn(&mut Client, &str, Option<Duration>) -> Answer<()>;

fn send<Q: Message + 'static>(client: &mut Client, (method, request): (&str, Q), time: Option<Duration>) -> Answer<()> {
    match time {
        Some(time) => {
            client.call_for(method, request, time);
            Ok(())
        }
        None => client.call(method, request),
    }
}

fn prepare(key: &str) -> PrepareRequest {
    PrepareRequest { key: key.into(), parent: "base".into(), ..PrepareRequest::default() }
}

fn by_key(key: &str) -> KeyRequest {
    KeyRequest { key: key.into(), ..KeyRequest::default() }
}

fn labels(key: &str) -> Labels {
    Labels::from([("label".into(), key.into())])
}

fn update(key: &str) -> UpdateRequest {
    let info = Info { name: key.into(), labels: labels(key), ..Info::default() };
    UpdateRequest { info: Some(info), ..UpdateRequest::default() }
}

/// Each call, and the error of its repetition if the first one was finished.
const CALLS: [(&str, Call, Option<Code>); 9] = [
    ("Prepare", |client, key, time| send(client, ("Prepare", prepare(key)), time), Some(Code::AlreadyExists)),
    ("View", |client, key, time| send(client, ("View", prepare(key)), time), Some(Code::AlreadyExists)),
    ("Mounts", |client, key, time| send(client, ("Mounts", by_key(key)), time), None),
    ("Remove", |client, key, time| send(client, ("Remove", by_key(key)), time), Some(Code::NotFound)),
    ("Update", |client, key, time| send(client, ("Update", update(key)), time), None),
    ("List", |client, _, time| send(client, ("List", ListRequest::default()), time), None),
    ("Stat", |client, key, time| send(client, ("Stat", by_key(key)), time), None),
    ("Usage", |client, key, time| send(client, ("Usage", by_key(key)), time), None),
    ("Cleanup", |client, _, time| send(client, ("Cleanup", CleanupRequest::default()), time), None),
];

/// Checks what a call and its repetition made of a snapshot.
fn check(client: &mut Client, method: &str, key: &str) {
    let found = client.stat(key);
    if method == "Remove" {
        assert_eq!(found.unwrap_err().code(), Code::NotFound);
        return;
    }
    let found = found.unwrap();
    let expected = if method == "View" { 1 } else { 2 };
    assert_eq!((found.kind, &*found.parent), (expected, "base"));
    assert_eq!(found.labels.get("label").map(String::as_str), (method == "Update").then_some(key));
    let mounted = Mounted::of(&client.mounts(key).unwrap());
    assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"some");
    drop(mounted);
    client.remove(key).unwrap();
}

#[test]
fn each_call_can_be_repeated_when_its_client_is_gone() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("auto");
    let mut client = server.client();
    let mounted = Mounted::of(&client.prepare("extract", "").unwrap());
    fs::write(mounted.path().join("file"), "some").unwrap();
    drop(mounted);
    client.commit("base", "extract").unwrap();
    let (snapshots, pid) = (server.root().join("snapshots"), Pid::from_raw(server.pid().cast_signed()).unwrap());
    for (method, call, code) in CALLS {
        for round in 0..ROUNDS {
            let key = format!("{method}-{round}");
            if !["Prepare", "View"].contains(&method) {
                client.prepare_with(&key, "base", Labels::new()).unwrap();
            }
            fs::create_dir_all(snapshots.join(&key).join("garbage")).unwrap();
            let mut gone = Client::connect(&server.socket()).unwrap();
            // All of it is sent, and the connection closed, before it is read; or the call is begun.
            let signals = if round % 2 == 0 { [Signal::STOP, Signal::CONT] } else { [Signal::CONT; 2] };
            kill_process(pid, signals[0]).unwrap();
            call(&mut gone, &key, Some(Duration::from_millis(round))).unwrap();
            drop(gone);
            kill_process(pid, signals[1]).unwrap();
            let mut other = server.client();
            if let Err(error) = call(&mut other, &key, None) {
                assert_eq!(Some(error.code()), code, "{key}: {error}");
            }
            check(&mut other, method, &key);
        }
    }
    client.cleanup().unwrap();
    assert_eq!(client.list(&[]).unwrap().len(), 1);
    for (directory, expected) in [("snapshots", 1), ("trash", 0)] {
        assert_eq!(fs::read_dir(server.root().join(directory)).unwrap().count(), expected, "{directory}");
    }
}
