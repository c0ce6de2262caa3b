//! Layers with everything that archives can have, against what tar unpacks.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{FileType, makedev};
use tonic::Code;

use crate::client::Client;
use crate::diff::{GZIP, gzip, layer, request, send, start};
use crate::lazy_place::noise;
use crate::merged::{facts, node, same, set};
use crate::server::{Mounted, Server};

/// No UTF-8.
const NAME: &[u8] = b"\xff\xfe \n";

/// Makes an archive of names in a directory, in their order.
fn tar(directory: &Path, options: &[&str], names: &[&[u8]]) -> Vec<u8> {
    let mut tar = Command::new("tar");
    tar.args(options).args(["--no-recursion", "--numeric-owner", "-C"]).arg(directory).arg("-cf-");
    let output = tar.args(names.iter().map(|name| OsStr::from_bytes(name))).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn untar(plain: &[u8], at: &Path) {
    let mut tar = Command::new("tar");
    tar.args(["-xp", "--xattrs", "--xattrs-include=*", "--numeric-owner", "--same-owner", "-f-", "-C"]).arg(at);
    let mut tar = tar.stdin(Stdio::piped()).spawn().unwrap();
    tar.stdin.take().unwrap().write_all(plain).unwrap();
    assert!(tar.wait().unwrap().success());
}

const ALL: [&str; 5] =
    ["--format=pax", "--xattrs", "--xattrs-include=*", "-S", "--pax-option=delete=atime,delete=ctime"];

fn first(at: &Path, long: &[u8]) -> Vec<u8> {
    let path = |name: &[u8]| at.join(OsStr::from_bytes(name));
    node(&path(b"null"), FileType::CharacterDevice, makedev(1, 3));
    node(&path(b"loop"), FileType::BlockDevice, makedev(7, 300));
    node(&path(b"fifo"), FileType::Fifo, 0);
    fs::write(path(NAME), "no text").unwrap();
    fs::write(path(long), noise(1, 5000)).unwrap();
    let sparse = fs::File::create(path(b"sparse")).unwrap();
    sparse.set_len(9 << 20).unwrap();
    sparse.write_all_at(&noise(2, 70_000), 3 << 20).unwrap();
    fs::write(path(b"one"), noise(3, 70_000)).unwrap();
    fs::hard_link(path(b"one"), path(b"link")).unwrap();
    fs::hard_link(path(b"null"), path(b"link-null")).unwrap();
    fs::write(path(b"target"), noise(4, 1000)).unwrap();
    symlink(OsStr::from_bytes(NAME), path(b"symlink")).unwrap();
    fs::create_dir_all(path(b"empty/deep")).unwrap();
    fs::create_dir(path(b"late")).unwrap();
    fs::write(path(b"late/file"), "before its directory").unwrap();
    chown(path(b"late"), Some(70_000), Some(5)).unwrap();
    fs::set_permissions(path(b"late"), fs::Permissions::from_mode(0o3750)).unwrap();
    set(&path(b"one"), "user.of-a-file", b"\0value");
    set(&path(b"late"), "trusted.of-a-directory", b"");
    let capability = [&[1, 0, 0, 2, 0, 4][..], &[0; 14]].concat();
    set(&path(long), "security.capability", &capability);
    let names: [&[u8]; 15] = [
        b".",
        b"null",
        b"loop",
        b"fifo",
        NAME,
        long,
        b"sparse",
        b"one",
        b"link",
        b"link-null",
        b"target",
        b"symlink",
        b"late/file",
        b"empty/deep",
        b"empty",
    ];
    tar(at, &ALL, &[&names[..], &[b"late"]].concat())
}

/// A hard link to a file of the layer below, which is not in this archive.
fn across(at: &Path) -> Vec<u8> {
    fs::hard_link(at.join("target"), at.join("across")).unwrap();
    tar(at, &["--format=ustar"], &[b"target", b"across"]).split_off(512 + 1024)
}

/// Other kinds of files under the same names.
fn third(at: &Path, long: &[u8]) -> Vec<u8> {
    let path = |name: &[u8]| at.join(OsStr::from_bytes(name));
    for name in [&b"null"[..], b"link", NAME] {
        fs::remove_file(path(name)).unwrap();
    }
    fs::write(path(b"null"), "a file").unwrap();
    fs::write(path(b"link"), "alone").unwrap();
    let deep = [NAME, b"/", long].concat();
    fs::create_dir(path(NAME)).unwrap();
    node(&path(&deep), FileType::Fifo, 0);
    tar(at, &ALL, &[b"null", b"link", NAME, &deep])
}

/// Unpacks a layer by the differ, or else as containerd does; whether it was the differ.
fn unpack(server: &Server, client: &mut Client, (name, parent): (&str, &str), plain: &[u8]) -> bool {
    let mounts = client.prepare("extract-a", parent).unwrap();
    let applied = send(client, request(server, &layer(plain.to_vec(), gzip(plain), GZIP), &mounts));
    if let Err(error) = &applied {
        assert_eq!(error.code(), Code::Unimplemented, "{name}: {error}");
        untar(plain, Mounted::of(&mounts).path());
    }
    client.commit(name, "extract-a").unwrap();
    applied.is_ok()
}

#[test]
fn odd_layers_equal_what_tar_unpacks() {
    let long = "n".repeat(255);
    for images in ["never", "require"] {
        let Some(mut server) = start(images, "c-root") else { return };
        let (mut client, directory, flat) =
            (server.client(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (at, long) = (directory.path(), long.as_bytes());
        let mut parent = "";
        for (name, plain) in [("first", first(at, long)), ("across", across(at)), ("third", third(at, long))] {
            let is_applied = unpack(&server, &mut client, (name, parent), &plain);
            assert_eq!(is_applied, images == "require" && name != "across", "{name}");
            untar(&plain, flat.path());
            let expected = facts(flat.path());
            for mounts in [client.view("view", name).unwrap(), client.prepare("container", name).unwrap()] {
                same(Mounted::of(&mounts).path(), &expected, &format!("{images} {name}"));
            }
            client.remove("view").and(client.remove("container")).unwrap();
            parent = name;
        }
        let mounted = Mounted::of(&client.view("view", "third").unwrap());
        assert_eq!(facts(mounted.path()).len(), 18);
    }
}
