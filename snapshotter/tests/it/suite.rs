//! The cases of containerd's own test suite for snapshotters, by their meaning, and some more: what layers show.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ferry_snapshotter::api::Kind;
use tonic::Code;

use crate::client::Client;
use crate::server::{Mounted, Server, can_mount, in_memory};
use crate::tree::Change::{self, Dir, Fifo, File, Link, Owner, Remove, Rename, Symlink};
use crate::tree::{apply, look};

/// Layers as directories, and as images where the kernel mounts them.
const IMAGES: [&str; 2] = ["never", "auto"];

/// Adds a committed layer with changes, and checks what a view of it shows.
fn layer(client: &mut Client, name: &str, parent: &str, changes: &[Change<'_>]) {
    let key = format!("{name}-prepare");
    let mounted = Mounted::of(&client.prepare(&key, parent).expect("it can be prepared"));
    apply(mounted.path(), changes);
    drop(mounted);
    client.commit(name, &key).expect("it can be committed");
}

/// Adds a layer for each set of changes; each must look like the same changes in one directory.
fn layers_look_like_a_directory(images: &'static str, layers: &[&[Change<'_>]]) {
    let mut server = Server::start(images);
    let mut client = server.client();
    let flat = tempfile::tempdir().expect("it can be made");
    let mut parent = String::new();
    fs::set_permissions(flat.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("it is ours");
    for (number, changes) in layers.iter().enumerate() {
        apply(flat.path(), changes);
        let name = format!("layer-{number}");
        layer(&mut client, &name, &parent, changes);
        let view = format!("{name}-view");
        let mounted = Mounted::of(&client.view(&view, &name).expect("there can be a view"));
        assert_eq!(look(mounted.path()), look(flat.path()), "layer {number}, images {images}");
        drop(mounted);
        client.remove(&view).expect("nobody uses it");
        parent = name;
    }
}

fn all_look_like_a_directory(layers: &[&[Change<'_>]]) {
    if can_mount() {
        for images in IMAGES {
            layers_look_like_a_directory(images, layers);
        }
    }
}

#[test]
fn layers_are_prepared_committed_and_viewed() {
    if !can_mount() {
        return;
    }
    for images in IMAGES {
        let mut server = Server::start(images);
        let mut client = server.client();
        let first = [File("foo", "foo\n", 0o777), Dir("a", 0o755), Dir("a/b", 0o755), Dir("a/b/c", 0o755)];
        let second = [File("bar", "bar\n", 0o777), File("foo", "bar\n", 0o777), Remove("a/b")];
        layer(&mut client, "committed", "", &first);
        let info = client.stat("committed").unwrap();
        assert_eq!((info.kind(), &*info.parent), (Kind::Committed, ""));
        assert_eq!(client.stat("committed-prepare").unwrap_err().code(), Code::NotFound);

        let mounted = Mounted::of(&client.prepare("next", "committed").unwrap());
        assert_eq!(fs::read(mounted.path().join("foo")).unwrap(), b"foo\n");
        apply(mounted.path(), &second);
        // Another mount of the same snapshot shows the same.
        let again = client.mounts("next").unwrap();
        drop(mounted);
        assert_eq!(fs::read(Mounted::of(&again).path().join("bar")).unwrap(), b"bar\n");
        let info = client.stat("next").unwrap();
        assert_eq!((info.kind(), &*info.parent), (Kind::Active, "committed"));
        client.commit("committed-next", "next").unwrap();
        assert_eq!(client.mounts("committed-next").unwrap_err().code(), Code::FailedPrecondition);

        let flat = tempfile::tempdir().unwrap();
        fs::set_permissions(flat.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        apply(flat.path(), &first);
        apply(flat.path(), &second);
        let mounted = Mounted::of(&client.view("view", "committed-next").unwrap());
        assert_eq!(look(mounted.path()), look(flat.path()));
        assert_eq!(client.remove("committed").unwrap_err().code(), Code::FailedPrecondition);
        drop(mounted);
        client.remove("view").unwrap();
        client.remove("committed-next").unwrap();
        client.remove("committed").unwrap();
        assert_eq!(server.mount_points(), [] as [&Path; 0]);
        client.cleanup().unwrap();
        assert_eq!(fs::read_dir(server.root().join("snapshots")).unwrap().count(), 0);
    }
}

#[test]
fn files_are_updated() {
    all_look_like_a_directory(&[
        &[Dir("etc", 0o700), File("etc/hosts", "10.0.0.1", 0o644), File("etc/profile", "PATH=/usr/bin", 0o644)],
        &[
            File("etc/hosts", "10.0.0.2", 0o644),
            File("etc/profile", "PATH=/usr/bin", 0o666),
            Dir("root", 0o700),
            File("root/.bashrc", "PATH=/usr/sbin:/usr/bin", 0o644),
        ],
    ]);
}

#[test]
fn a_recreated_directory_hides_the_old_one() {
    all_look_like_a_directory(&[
        &[Dir("lib", 0o700), File("lib/hidden", "", 0o644), Dir("lib/deep", 0o755), File("lib/deep/hidden", "", 0o644)],
        &[Remove("lib"), Dir("lib", 0o700), File("lib/not-hidden", "", 0o644), Dir("lib/deep", 0o711)],
        &[File("lib/newfile", "", 0o644)],
        &[Remove("lib/deep")],
    ]);
}

#[test]
fn owners_change() {
    let tree = ["opt", "opt/a", "opt/a/b", "opt/a/b/file"];
    all_look_like_a_directory(&[
        &[Dir("opt", 0o700), Dir("opt/a", 0o700), Dir("opt/a/b", 0o700), File("opt/a/b/file", "hello", 0o4755)],
        &tree.map(|path| Owner(path, 1)),
    ]);
}

#[test]
fn permissions_of_directories_are_committed() {
    all_look_like_a_directory(&[
        &[
            Dir("dir1", 0o700),
            Dir("dir2", 0o1777),
            Dir("dir3", 0o700),
            Dir("dir4", 0o2755),
            File("dir4/f1", "...", 0o644),
            Dir("dir5", 0o700),
            File("dir5/f1", "...", 0o644),
            Owner("dir1", 1),
            Owner("dir2", 1),
            Owner("dir3", 1),
            Owner("dir5", 70_000),
            Owner("dir5/f1", 1),
        ],
        &[Owner("dir2", 0), Remove("dir3"), Owner("dir4", 1), Owner("dir4/f1", 1)],
        &[Dir("dir3", 0o700), Owner("dir3", 1), Remove("dir5"), Dir("dir5", 0o700), Owner("dir5", 1)],
    ]);
}

#[test]
fn files_of_lower_layers_are_deleted_renamed_and_moved() {
    all_look_like_a_directory(&[
        &[
            Dir("dir1", 0o700),
            File("dir1/f1", "Hello", 0o644),
            Dir("dir2", 0o700),
            File("dir2/f2", "...", 0o644),
            File("foobar", "foobar\n", 0o777),
            Dir("some", 0o700),
            File("some/f1", "was here first!", 0o644),
            File("some/f2", "nothing interesting", 0o644),
        ],
        &[
            Dir("dir3", 0o700),
            File("dir3/f1", "Hello", 0o644),
            Remove("dir1"),
            Link("dir2/f2", "dir3/f2"),
            Remove("dir2/f2"),
            Remove("foobar"),
            File("some/f1-overwrite", "new content", 0o644),
            Rename("some/f1-overwrite", "some/f1"),
            Rename("some/f2", "some/f3"),
        ],
        &[Rename("some", "other"), Dir("some", 0o755), File("other/new", "new", 0o644)],
        &[Remove("other/f3"), Rename("other", "third")],
        &[],
        &[File("foobar", "again", 0o600)],
    ]);
}

#[test]
fn links_and_special_files_are_kept() {
    all_look_like_a_directory(&[
        &[
            File("a", "some text that is longer than what an inode of an image holds: sixty-four bytes or so", 0o644),
            Link("a", "b"),
            Symlink("/nowhere", "link"),
            Fifo("fifo"),
            Dir("empty", 0o755),
        ],
        // The name of a file is replaced by a directory, and the other way round.
        &[
            Remove("a"),
            Dir("a", 0o755),
            Remove("empty"),
            File("empty", "", 0o644),
            Remove("link"),
            File(".wh.x", "", 0o644),
        ],
        &[Remove("b"), Symlink("a", "b")],
    ]);
}

#[test]
fn a_view_cannot_be_written_to() {
    if !can_mount() {
        return;
    }
    for images in IMAGES {
        let mut server = Server::start(images);
        let mut client = server.client();
        layer(&mut client, "one", "", &[File("file", "one", 0o666)]);
        layer(&mut client, "two", "one", &[File("other", "two", 0o666)]);
        for (number, parent) in ["", "one", "two"].into_iter().enumerate() {
            let key = format!("view-{number}");
            let mounted = Mounted::of(&client.view(&key, parent).unwrap());
            let error = fs::write(mounted.path().join("new"), "").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem, "{parent}");
            assert_eq!(client.commit("x", &key).unwrap_err().code(), Code::FailedPrecondition);
            drop(mounted);
            client.remove(&key).unwrap();
        }
    }
}

/// containerd's own snapshotter forgets the permissions of an image's root directory.
#[test]
fn the_root_directory_has_owner_and_permissions_of_the_layer_below() {
    if !can_mount() {
        return;
    }
    for images in IMAGES {
        let mut server = Server::start(images);
        let mut client = server.client();
        let mounted = Mounted::of(&client.prepare("base", "").unwrap());
        assert_eq!(fs::metadata(mounted.path()).unwrap().mode() & 0o7777, 0o755);
        fs::set_permissions(mounted.path(), std::os::unix::fs::PermissionsExt::from_mode(0o1711)).unwrap();
        apply(mounted.path(), &[Owner(".", 12)]);
        drop(mounted);
        client.commit("root", "base").unwrap();
        let mounted = Mounted::of(&client.prepare("container", "root").unwrap());
        let found = fs::metadata(mounted.path()).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o1711, 12, 12));
    }
}

#[test]
fn a_hundred_and_twenty_eight_layers_are_stacked() {
    if !can_mount() {
        return;
    }
    for images in IMAGES {
        // In memory, where nothing waits for a disk; images need one.
        let mut server = if images == "never" { Server::start_with(images, in_memory) } else { Server::start(images) };
        let mut client = server.client();
        let flat = tempfile::tempdir().unwrap();
        fs::set_permissions(flat.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let first = [
            File("bottom", "way at the bottom\n", 0o777),
            File("overwriteme", "FIRST!\n", 0o777),
            Dir("addhere", 0o755),
            Dir("onlyme", 0o755),
            File("onlyme/bottom", "bye!\n", 0o777),
        ];
        apply(flat.path(), &first);
        layer(&mut client, "layer-0", "", &first);
        for number in 1..128 {
            let texts =
                [format!("{number} WAS HERE!\n"), format!("addhere/file-{number}"), format!("onlyme/file-{number}")];
            let changes = [
                File("overwriteme", &texts[0], 0o777),
                File(&texts[1], "same\n", 0o755),
                Remove("onlyme"),
                Dir("onlyme", 0o755),
                File(&texts[2], "only me!\n", 0o777),
            ];
            apply(flat.path(), &changes);
            layer(&mut client, &format!("layer-{number}"), &format!("layer-{}", number - 1), &changes);
        }
        if images == "auto" {
            assert_eq!(look(Mounted::of(&client.view("merged", "layer-127").unwrap()).path()), look(flat.path()));
            server.stop();
            server.configure("merge = false\n");
            client = server.start_again();
        }
        let mounts = client.view("view", "layer-127").unwrap();
        // containerd makes paths relative to what they have in common, because mount(2) takes one page of options.
        let common = server.root().join("snapshots").to_str().unwrap().len() + 1;
        let bytes: usize = mounts[0].options.iter().map(|option| option.len() + 1).sum();
        assert!(bytes - 128 * common < 4000, "{bytes} bytes of options");
        let mounted = Mounted::of(&mounts);
        assert_eq!(look(mounted.path()), look(flat.path()), "images {images}");
        assert!(server.resident_kib() < 50 << 10, "{} KiB", server.resident_kib());
    }
}
