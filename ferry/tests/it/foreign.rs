//! Files of others (a 9P server, the author of an image) grant no privileges on this host, unless the mount's flags allow it.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use crate::common;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use common::{Server, ferry, needs_fuse, run};

/// An unused user id.
const STRANGER: &str = "64321";

/// A tree with a set-user-id program of root that prints its user, and a device node, both accessible to all users.
fn tree(directory: &Path) {
    fs::create_dir(directory).unwrap();
    fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
    let id = Command::new("sh").args(["-c", "readlink -f \"$(command -v id)\""]).output().unwrap();
    fs::copy(String::from_utf8(id.stdout).unwrap().trim(), directory.join("id")).unwrap();
    fs::set_permissions(directory.join("id"), Permissions::from_mode(0o4755)).unwrap();
    let made =
        Command::new("mknod").args(["-m", "666"]).arg(directory.join("null")).args(["c", "1", "3"]).status().unwrap();
    assert!(made.success());
}

fn as_stranger(program: &Path, args: &[&str]) -> Output {
    let ids = [format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"), "--clear-groups".into()];
    run(Command::new("setpriv").args(ids).arg(program).args(args))
}

/// Whether a program of the mount runs as root for a stranger, and whether its device node can be opened.
fn rights(mount: &Path) -> (bool, bool) {
    let said = as_stranger(&mount.join("id"), &["-u"]);
    assert!(said.status.success(), "{said:?}");
    let who = String::from_utf8(said.stdout).unwrap();
    assert!(["0", STRANGER].contains(&who.trim()), "{who}");
    let null = fs::File::open(mount.join("null"));
    let is_refused = null.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
    assert!(null.is_ok() || is_refused, "{null:?}");
    (who.trim() == "0", null.is_ok())
}

/// Mounts with these words, and says what the mount gives.
fn with(words: &str, mount: &mut Command, place: &Path) -> (bool, bool) {
    if !words.is_empty() {
        mount.args(["-o", words]);
    }
    let output = run(mount);
    assert!(output.status.success(), "{mount:?}: {}", String::from_utf8_lossy(&output.stderr));
    let rights = rights(place);
    common::place::unmount(place);
    rights
}

const WORDS: [(&str, (bool, bool)); 5] = [
    ("", (false, false)),
    ("suid", (true, false)),
    ("dev", (false, true)),
    ("suid,dev", (true, true)),
    ("suid,dev,nosuid", (false, true)),
];

#[test]
fn a_9p_servers_set_user_id_programs_and_devices_need_a_flag() {
    needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("tree"));
    fs::create_dir(at("mnt")).unwrap();
    let mut server =
        Server::start(ferry().arg("share").arg(at("tree")).arg("--9p").arg(format!("unix:{}", at("s").display())));
    for (words, expected) in WORDS {
        let mut mount = ferry();
        mount.arg("mount").arg(format!("9p:unix:{}", at("s").display())).arg(at("mnt")).arg("--allow-other");
        assert_eq!(with(words, &mut mount, &at("mnt")), expected, "{words}");
    }
    // Whose files they are says this host, where it shares a directory of its own.
    let mut mount = ferry();
    mount.arg("mount").arg(at("tree")).arg(at("mnt")).arg("--allow-other");
    assert_eq!(with("", &mut mount, &at("mnt")), (true, true));
    // A share that is mounted as well is no other mount.
    let mut share = ferry();
    share.arg("share").arg(format!("9p:unix:{}", at("s").display())).arg("--mount").arg(at("mnt")).arg("--allow-other");
    let mut shared = Server::start(&mut share);
    assert_eq!(rights(&at("mnt")), (false, false));
    for server in [&mut shared, &mut server] {
        server.signal(rustix::process::Signal::TERM);
        assert_eq!(server.status(), Some(0));
    }
}

#[test]
fn an_images_set_user_id_programs_and_devices_need_a_flag() {
    needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    let at = |name: &str| directory.path().join(name);
    tree(&at("tree"));
    fs::create_dir(at("mnt")).unwrap();
    for layout in ["flat", "composefs"] {
        let (image, store) = (at(&format!("{layout}.img")), at(&format!("{layout}.store")));
        let mut build = ferry();
        build.args(["image", "build"]).arg(at("tree")).arg("-o").arg(&image).arg("--store").arg(&store);
        let output = run(build.args(["--layout", layout]));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for (words, expected) in WORDS {
            let mut mount = ferry();
            mount.arg("mount").arg(format!("image:{}", image.display())).arg(at("mnt")).arg("--store").arg(&store);
            assert_eq!(with(words, mount.arg("--allow-other"), &at("mnt")), expected, "{layout} {words}");
            // By the kernel, or, where that has no EROFS, by Ferry's own again.
            let mut mount = ferry();
            mount.args(["image", "mount"]).arg(&image).arg(at("mnt")).arg("--store").arg(&store);
            assert_eq!(with(words, &mut mount, &at("mnt")), expected, "{layout} {words}, by the kernel");
        }
    }
}
