//! containerd unpacks by the Diff service what it unpacks otherwise: the same snapshots, with the same trees.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use ferry_control::{REPORT_VERSION, Request, ServerReport};
use ferry_guest::Cache;
use rustix::fs::{lgetxattr, llistxattr};

use crate::containerd::{Containerd, WITHOUT_PODS, plugin, wait_until_empty};
use crate::control::ask;
use crate::diff::{layers, start};
use crate::server::Server;
use crate::toc_layers::{Layer, lay_out};
use crate::tree::look;

const IMAGE: &str = "ferry.test/image:1";

/// How containerd unpacks.
struct Way {
    name: &'static str,
    /// The differs of the service that clients use.
    differs: &'static str,
    /// That of the transfer service, if it is not containerd's.
    transfer: &'static str,
    flags: &'static [&'static str],
    content: &'static str,
    /// Whether layers become images on the way.
    is_ours: bool,
}

const WAYS: [Way; 5] = [
    Way {
        name: "walking",
        differs: "\"walking\"",
        transfer: "",
        flags: &["--local"],
        content: "c-root",
        is_ours: false,
    },
    Way {
        name: "client",
        differs: "\"ferry-diff\"",
        transfer: "",
        flags: &["--local"],
        content: "c-root",
        is_ours: true,
    },
    Way {
        name: "transfer",
        differs: "\"ferry-diff\"",
        transfer: "differ = \"ferry-diff\"\n",
        flags: &[],
        content: "c-root",
        is_ours: true,
    },
    Way {
        name: "another content store",
        differs: "\"ferry-diff\", \"walking\"",
        transfer: "",
        flags: &["--local"],
        content: "none",
        is_ours: false,
    },
    Way {
        name: "both",
        differs: "\"ferry-diff\", \"walking\"",
        transfer: "",
        flags: &["--local"],
        content: "c-root",
        is_ours: true,
    },
];

/// All entries, with the times of what is no directory: containerd's own way changes those of directories that it makes on the way.
type Tree = BTreeMap<String, (String, Vec<(String, Vec<u8>)>, Option<(i64, i64)>)>;
/// What containerd says of snapshots, and a tree.
type Seen = (String, Tree);

fn details(root: &Path) -> Tree {
    let time = |path: &Path| {
        let found = fs::symlink_metadata(path).expect("it is there");
        (!found.is_dir()).then(|| (found.mtime(), found.mtime_nsec()))
    };
    let xattrs = |path: &Path| {
        let (mut names, mut value) = (vec![0; 4096], vec![0; 4096]);
        let count = llistxattr(path, &mut names[..]).expect("it can be listed");
        let names = names[..count].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut found: Vec<_> = names
            .map(|name| {
                let count = lgetxattr(path, name, &mut value[..]).expect("it is there");
                (String::from_utf8_lossy(name).into_owned(), value[..count].to_vec())
            })
            .collect();
        found.sort();
        found
    };
    let entry = |(path, seen): (String, String)| {
        let at = root.join(&path);
        (path, (seen, xattrs(&at), time(&at)))
    };
    look(root).into_iter().map(entry).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn containerd_unpacks_the_same_by_the_diff_service() {
    let cache = Cache::from_env().expect("there is a cache");
    let programs = cache.containerd().expect("it can be fetched");
    let trees = tempfile::tempdir().expect("it can be made");
    let layers = layers(trees.path());
    let mut walked: Option<Seen> = None;
    for way in &WAYS {
        let Some(mut server) = start("require", way.content) else { return };
        let seen = unpack(&programs, &mut server, way, &layers);
        let expected = &*walked.get_or_insert(seen.clone());
        assert_eq!(expected.1["deep/er"].1, [("user.of-a-directory".into(), b"one".to_vec())]);
        assert_eq!(seen.0, expected.0, "{}", way.name);
        assert_eq!(seen.1.keys().collect::<Vec<_>>(), expected.1.keys().collect::<Vec<_>>(), "{}", way.name);
        for (path, entry) in &seen.1 {
            assert_eq!((&entry.1, entry.2), (&expected.1[path].1, expected.1[path].2), "{}: {path}", way.name);
            assert!(entry.0 == expected.1[path].0, "{}: {path}", way.name);
        }
    }
}

/// Imports an image, and returns its snapshots with what they take, and its tree.
fn unpack(programs: &Path, server: &mut Server, way: &Way, layers: &[Layer]) -> Seen {
    let directory = server.directory.path().to_owned();
    lay_out(&directory.join("bundle"), layers);
    let tar = Command::new("tar").args(["-C", "bundle", "-cf", "image.tar", "."]).current_dir(&directory).status();
    assert!(tar.expect("there is tar").success());
    let lines = format!(
        "[proxy_plugins.ferry-diff]\ntype = \"diff\"\naddress = {:?}\n\
         [plugins.\"io.containerd.service.v1.diff-service\"]\ndefault = [{}]\n",
        server.socket().display().to_string(),
        way.differs
    );
    let containerd = Containerd::start_with(
        programs.into(),
        &directory,
        WITHOUT_PODS,
        &(plugin(&server.socket()) + &lines),
        way.transfer,
    );
    let archive = directory.join("image.tar");
    let import = ["images", "import", "--snapshotter", "ferry", "--base-name", "ferry.test/image"];
    let words = [&import[..], way.flags, &[archive.to_str().expect("it is text")]].concat();
    containerd.ctr(&words);
    let listed = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "ls"]);
    assert_eq!(listed.matches("Committed").count(), 3, "{listed}");
    let usage = containerd.ctr(&["snapshots", "--snapshotter", "ferry", "usage"]);
    let (report, _) = ask::<ServerReport>(server, &Request::Report { version: REPORT_VERSION });
    let operations = report.shares.iter().flat_map(|share| &share.exports).flat_map(|export| &export.operations);
    let applied = operations.filter(|operation| operation.name == "apply");
    let unpacked: u64 =
        applied.map(|apply| apply.requests - apply.errors.iter().map(|error| error.requests).sum::<u64>()).sum();
    assert_eq!(unpacked, if way.is_ours { 3 } else { 0 }, "{}", way.name);
    let at = directory.join("at");
    fs::create_dir(&at).expect("it can be made");
    let at = at.to_str().expect("it is text");
    containerd.ctr(&["images", "mount", "--snapshotter", "ferry", IMAGE, at]);
    let seen = details(Path::new(at));
    containerd.ctr(&["images", "unmount", "--snapshotter", "ferry", "--rm", at]);
    containerd.ctr(&["images", "rm", "--sync", IMAGE]);
    let mut client = wait_until_empty(&containerd, server);
    client.cleanup().expect("it serves");
    let packs = fs::read_dir(server.root().join("store/packs"))
        .map(|packs| packs.flatten().map(|pack| pack.file_name()).filter(|name| name != "table").collect::<Vec<_>>());
    assert_eq!(packs.unwrap_or_default(), [""; 0]);
    (format!("{listed}{usage}"), seen)
}
