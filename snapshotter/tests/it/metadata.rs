//! The cases of containerd's test suite about names, labels and kinds, and refusals.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use ferry_snapshotter::api::{Info, KeyRequest, Kind, Labels, Timestamp};
use ferry_snapshotter::{GID_LABEL, LABEL_BYTES_MAX, LABELS_MAX, NAME_BYTES_MAX, UID_LABEL};
use tonic::Code;

use crate::client::{Client, root_label};
use crate::server::{Mounted, Server, can_mount, refused};

fn labels(labels: &[(&str, &str)]) -> Labels {
    labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Committed, active and viewed snapshots, with a parent and without.
fn base(client: &mut Client) -> Vec<(&'static str, Kind, &'static str)> {
    client.prepare("c1-a", "").unwrap();
    client.commit("c1", "c1-a").unwrap();
    client.prepare("c2-a", "c1").unwrap();
    client.commit("c2", "c2-a").unwrap();
    client.prepare("a1", "c2").unwrap();
    client.prepare("a2", "").unwrap();
    client.view("v1", "c2").unwrap();
    client.view("v2", "").unwrap();
    vec![
        ("a1", Kind::Active, "c2"),
        ("a2", Kind::Active, ""),
        ("c1", Kind::Committed, ""),
        ("c2", Kind::Committed, "c1"),
        ("v1", Kind::View, "c2"),
        ("v2", Kind::View, ""),
    ]
}

#[test]
fn snapshots_are_described_and_labels_change() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    let before = Timestamp::now();
    let expected = base(&mut client);
    for (name, kind, parent) in expected {
        let mut info = client.stat(name).unwrap();
        assert_eq!((&*info.name, info.kind(), &*info.parent), (name, kind, parent));
        assert_eq!(info.created_at, info.updated_at);
        assert!((before..=Timestamp::now()).contains(&info.created_at.unwrap()), "{name}");

        let created = info.created_at;
        info.parent = "doesnotexist".into();
        info.labels = labels(&[("l1", "v1"), ("l2", "v2"), ("l3", "v3"), ("empty", "")]);
        let mut info = client.update(info, &[]).unwrap();
        assert_eq!(info.labels, labels(&[("l1", "v1"), ("l2", "v2"), ("l3", "v3")]), "without the empty one");
        assert_eq!((info.created_at, &*info.parent, info.kind()), (created, parent, kind));
        assert!(info.updated_at > created);

        info.labels = labels(&[("l1", "updated"), ("l4", "v4"), ("with.dot", "1")]);
        let paths = ["labels.l1", "labels.l2", "labels.with.dot"];
        let mut info = client.update(info, &paths).unwrap();
        assert_eq!(info.labels, labels(&[("l1", "updated"), ("l3", "v3"), ("with.dot", "1")]));
        info.labels = labels(&[("l4", "v4")]);
        let info = client.update(info, &["labels"]).unwrap();
        assert_eq!((&info.labels, client.stat(name).unwrap()), (&labels(&[("l4", "v4")]), info.clone()));
        for path in ["parent", "kind", "name", "created_at", "x"] {
            assert_eq!(client.update(info.clone(), &[path]).unwrap_err().code(), Code::InvalidArgument, "{path}");
        }
    }
    let none = Info { name: "none".into(), ..Info::default() };
    assert_eq!(client.update(none, &[]).unwrap_err().code(), Code::NotFound);
}

#[test]
fn names_are_taken_once_and_free_again() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    for result in [
        client.stat("none").map(drop),
        client.mounts("none").map(drop),
        client.usage("none").map(drop),
        client.remove("none"),
        client.commit("x", "none"),
        client.prepare("x", "none").map(drop),
        client.view("x", "none").map(drop),
    ] {
        assert_eq!(result.unwrap_err().code(), Code::NotFound);
    }
    client.prepare("a", "").unwrap();
    client.commit("c", "a").unwrap();
    client.prepare("new", "c").unwrap();
    assert_eq!(client.view("new", "c").unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(client.prepare("new", "c").unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(client.prepare("below", "new").unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(client.commit("c", "new").unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(client.commit("d", "c").unwrap_err().code(), Code::FailedPrecondition);
    let error = client.remove("c").unwrap_err();
    assert!(error.code() == Code::FailedPrecondition && error.message().contains("cannot remove"), "{error}");
    client.remove("new").unwrap();
    client.view("new", "c").unwrap();
    client.remove("new").unwrap();
    client.prepare("new", "").unwrap();
    client.remove("c").unwrap();
    client.commit("c", "new").unwrap();
    // A parent that is named by the commit, as parallel unpacking does.
    client.prepare("top", "").unwrap();
    client.commit_with("d", "top", "c", root_label()).unwrap();
    assert_eq!(client.stat("d").unwrap().parent, "c");
    assert_eq!(client.remove("c").unwrap_err().code(), Code::FailedPrecondition);
    client.prepare("top", "c").unwrap();
    assert_eq!(client.commit_with("e", "top", "d", root_label()).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn lists_are_filtered() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    let with = |value: &str| labels(&[("l", value), ("containerd.io/snapshot.ref", "sha256:12")]);
    client.prepare("a-np", "").unwrap();
    client.prepare("p-tmp", "").unwrap();
    client.commit("p", "p-tmp").unwrap();
    client.prepare("a", "p").unwrap();
    client.view("v", "p").unwrap();
    client.prepare("p-wl-tmp", "").unwrap();
    client.commit_with("p-wl", "p-wl-tmp", "", with("1")).unwrap();
    client.prepare_with("a-wl", "p-wl", with("2")).unwrap();
    client.prepare_with("a-np-wl", "", with("2")).unwrap();
    for (filters, expected) in [
        (&[][..], "a a-np a-np-wl a-wl p p-wl v"),
        (&["kind==active"], "a a-np a-np-wl a-wl"),
        (&["kind==view"], "v"),
        (&["kind==committed,labels.l"], "p-wl"),
        (&["name==p", "name==a-np-wl"], "a-np-wl p"),
        (&["parent==p"], "a v"),
        (&["parent!=\"\""], "a a-wl v"),
        (&["labels.\"containerd.io/snapshot.ref\"==sha256:12,parent==\"p-wl\""], "a-wl"),
        (&["labels.l==2"], "a-np-wl a-wl"),
        (&["name~=/^a-.*p/"], "a-np a-np-wl"),
        (&["kind~=^(view|committed)$", "labels.l~=2"], "a-np-wl a-wl p p-wl v"),
    ] {
        let found: Vec<_> = client.list(filters).unwrap().into_iter().map(|info| info.name).collect();
        assert_eq!(found.join(" "), expected, "{filters:?}");
    }
    for info in client.list(&[]).unwrap() {
        assert_eq!(client.stat(&info.name).unwrap(), info);
    }
    let error = client.list(&["size==1"]).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("no field size"), "{error}");
    let error = client.list(&["name~=/(a/"]).unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("cannot be used"), "{error}");
    for number in 0..250 {
        client.prepare(&format!("many-{number:03}"), "").unwrap();
    }
    assert_eq!(client.list(&[]).unwrap().len(), 257, "in several messages");
}

#[test]
fn invalid_calls_are_refused() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let mut client = server.client();
    client.prepare("base", "").unwrap();
    let many: Vec<String> = (0..=LABELS_MAX).map(|number| number.to_string()).collect();
    let many: Vec<_> = many.iter().map(|name| (&**name, "x")).collect();
    let long = "x".repeat(LABEL_BYTES_MAX);
    for labels in [
        labels(&many),
        labels(&[("l", &long)]),
        labels(&[(UID_LABEL, "0:1:1")]),
        labels(&[(UID_LABEL, "0:1:1"), (GID_LABEL, "root")]),
    ] {
        assert_eq!(client.prepare_with("x", "", labels.clone()).unwrap_err().code(), Code::InvalidArgument);
    }
    for name in ["", &*"x".repeat(NAME_BYTES_MAX + 1)] {
        assert_eq!(client.prepare(name, "").unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(client.commit(name, "base").unwrap_err().code(), Code::InvalidArgument);
    }
    let unknown = client.call::<_, ()>("Unknown", KeyRequest::default()).unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
    let nothing = client.call::<_, ()>("Update", ()).unwrap_err();
    assert_eq!(nothing.code(), Code::InvalidArgument);
    assert_eq!(client.list(&[]).unwrap().len(), 1, "nothing was added");
}

#[test]
fn a_container_with_users_of_its_own_gets_idmapped_layers() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("auto");
    let mut client = server.client();
    let mounted = Mounted::of(&client.prepare("a", "").unwrap());
    fs::write(mounted.path().join("file"), "some").unwrap();
    drop(mounted);
    client.commit("image", "a").unwrap();
    let before = server.mount_points();
    let maps = labels(&[(UID_LABEL, "0:100000:65536"), (GID_LABEL, "0:200000:65536")]);
    let mounts = client.prepare_with("container", "image", maps.clone()).unwrap();
    let owner = |path: &Path| {
        let found = fs::metadata(path).unwrap();
        (found.uid(), found.gid())
    };
    let mounted = Mounted::of(&mounts);
    assert_eq!((owner(mounted.path()), owner(&mounted.path().join("file"))), ((100_000, 200_000), (100_000, 200_000)));
    server.kill();
    let mut client = server.start_again();
    drop(mounted);
    assert_eq!(client.mounts("container").unwrap(), mounts);
    // A layer with the users of one container would be wrong for all others.
    let error = client.commit("other", "container").unwrap_err();
    assert!(error.code() == Code::FailedPrecondition && error.message().contains(UID_LABEL), "{error}");
    client.remove("container").unwrap();
    assert_eq!(server.mount_points(), before);
    // The kernel refuses maps in which ids are twice: the snapshot is not left behind.
    let twice = labels(&[(UID_LABEL, "0:100000:10,5:200000:10"), (GID_LABEL, "0:200000:65536")]);
    assert_eq!(client.prepare_with("container", "image", twice).unwrap_err().code(), Code::Internal);
    client.prepare_with("container", "image", maps).unwrap();
}

#[test]
fn usage_counts_blocks_and_inodes_once() {
    if !can_mount() {
        return;
    }
    for images in ["never", "auto"] {
        let mut server = Server::start(images);
        let mut client = server.client();
        let mounted = Mounted::of(&client.prepare("a", "").unwrap());
        assert_eq!(client.usage("a").unwrap().inodes, 1);
        fs::write(mounted.path().join("file"), vec![1; 1 << 20]).unwrap();
        fs::hard_link(mounted.path().join("file"), mounted.path().join("link")).unwrap();
        fs::File::create(mounted.path().join("hole")).unwrap().set_len(1 << 30).unwrap();
        let usage = client.usage("a").unwrap();
        assert_eq!(usage.inodes, 3);
        assert!((1 << 20..2 << 20).contains(&usage.size), "{usage:?}");
        drop(mounted);
        client.commit("layer", "a").unwrap();
        assert_eq!(client.usage("layer").unwrap(), usage, "as before, whatever it is stored as");
        client.prepare("b", "layer").unwrap();
        assert_eq!(client.usage("b").unwrap().inodes, 1, "without what is below");
        client.view("v", "layer").unwrap();
        assert_eq!(client.usage("v").unwrap().size, 0);
    }
}

#[test]
fn only_root_can_connect_and_one_process_serves_a_root() {
    if !can_mount() {
        return;
    }
    let mut server = Server::start("never");
    let _client = server.client();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!((mode(&server.socket()), mode(&server.root())), (0o600, 0o700));
    let said = refused(server.directory.path(), "never");
    assert!(said.contains("already open") || said.contains("in use"), "{said}");
    let other = tempfile::tempdir().unwrap();
    fs::write(other.path().join("s"), "precious").unwrap();
    let said = refused(other.path(), "never");
    assert!(said.contains("is not a socket"), "{said}");
    assert_eq!(fs::read(other.path().join("s")).unwrap(), b"precious");
    let said = refused(other.path(), "perhaps");
    assert!(said.contains("config.toml is wrong") && said.contains("images = "), "{said}");
}
