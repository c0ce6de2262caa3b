//! `ferry image`, and images as sources of mounts.
use crate::common;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::place::Place;
use common::{ferry, needs_fuse, refused, run};

/// A tree, an image of it and its store, beside a mount point.
struct Made {
    place: Place,
    digest: String,
}

impl Made {
    fn new() -> Self {
        let place = Place::new();
        let tree = place.at("tree");
        fs::create_dir_all(tree.join("dir/below")).unwrap();
        fs::write(tree.join("dir/large"), large()).unwrap();
        fs::write(tree.join("dir/below/small"), "small").unwrap();
        fs::set_permissions(tree.join("dir/large"), fs::Permissions::from_mode(0o4750)).unwrap();
        std::os::unix::fs::symlink("dir/large", tree.join("link")).unwrap();
        let output = run(ferry()
            .args(["image", "build"])
            .arg(&tree)
            .arg("-o")
            .arg(place.at("image"))
            .arg("--store")
            .arg(place.at("store")));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let digest = String::from_utf8(output.stdout).unwrap().trim_end().to_owned();
        assert!(digest.starts_with("tree:") && digest.len() == 5 + 64, "{digest}");
        Self { place, digest }
    }

    fn image(&self, command: &str) -> Command {
        let mut line = ferry();
        line.args(["image", command]).arg(self.place.at("image"));
        line
    }

    fn with_store(&self, command: &str) -> Command {
        let mut line = self.image(command);
        line.arg("--store").arg(self.place.at("store"));
        line
    }

    fn pack(&self) -> PathBuf {
        let packs = fs::read_dir(self.place.at("store/packs")).unwrap().map(|entry| entry.unwrap().path());
        packs.into_iter().find(|path| path.extension().is_none()).unwrap()
    }

    /// Changes a byte of the large file where the store has it.
    fn damage(&self) {
        let pack = self.pack();
        fs::set_permissions(&pack, fs::Permissions::from_mode(0o644)).unwrap();
        fs::File::options().write(true).open(&pack).unwrap().write_all_at(b"x", 5000).unwrap();
    }

    fn mount(&self) -> Command {
        let mut line = ferry();
        line.arg("mount").arg(format!("image:{}", self.place.at("image").display())).arg(&self.place.mnt);
        line
    }
}

fn large() -> Vec<u8> {
    (0..50_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn text(command: &mut Command) -> String {
    let output = run(command);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn images_are_listed_shown_and_checked() {
    let made = Made::new();
    assert_eq!(text(&mut made.image("ls")), "/\n/dir\n/dir/below\n/dir/below/small\n/dir/large\n/link\n");
    assert_eq!(text(made.image("ls").arg("/dir/below")), "/dir/below\n/dir/below/small\n");
    let long = text(made.image("ls").args(["-l", "dir/large"]));
    assert!(long.starts_with("-rwsr-x---   1 ") && long.contains("     200000 "), "{long}");
    assert!(text(made.image("ls").args(["-l", "link"])).ends_with(" /link -> dir/large\n"));
    let lines = text(made.image("ls").arg("--json"));
    let first: serde_json::Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    assert_eq!((first["path"].as_str(), lines.lines().count()), (Some("/"), 6));
    assert!(run(made.with_store("cat").arg("dir/large")).stdout == large());
    assert_eq!(text(made.with_store("cat").arg("/dir/below/small")), "small");
    let info: serde_json::Value = serde_json::from_str(&text(made.image("info").arg("--json"))).unwrap();
    assert_eq!((info["digest"].as_str(), info["inodes"].as_u64()), (Some(made.digest.as_str()), Some(6)));
    assert_eq!(text(&mut made.image("fsck")), "clean\n");
    assert_eq!(text(&mut made.with_store("verify")), "clean\n");
    let (none, other) = (made.place.at("none"), made.place.at("other"));
    let said = refused(1, ferry().args(["image", "build"]).arg(&none).arg("-o").arg(&other).arg("--store").arg(&other));
    assert!(said.contains(&format!("there is no {}: an image is built from", none.display())), "{said}");
    assert!(!other.exists(), "a store that nobody wants");
    let said = refused(1, made.with_store("cat").arg("dir/none"));
    assert!(said.contains("dir/none is not in the image"), "{said}");
    let said = refused(1, made.image("ls").args(["--digest", &"0".repeat(64)]));
    let own = info["image_digest"].as_str().unwrap();
    assert!(own.starts_with("blake3:") && said.contains(own), "{said}");
    let shown = text(&mut made.image("info"));
    assert!(shown.starts_with(&format!("digest  {}\nimage   {own}\n", made.digest)), "{shown}");
}

/// The same tree, built into an empty store and into one with some of it: what is printed is the same, and is what every --digest takes.
#[test]
fn a_tree_has_the_same_digest_from_every_store_and_all_take_it() {
    let made = Made::new();
    let (part, tree, other) = (made.place.at("part"), made.place.at("tree"), made.place.at("other"));
    fs::create_dir(&part).unwrap();
    fs::write(part.join("x"), &large()[..1 << 16]).unwrap();
    let build = |tree: &Path| {
        let mut line = ferry();
        line.args(["image", "build", "--json"]).arg(tree).arg("-o").arg(made.place.at("again"));
        line
    };
    let json = |line: &mut Command| -> serde_json::Value { serde_json::from_str(&text(line)).unwrap() };
    let first = json(build(&tree).arg("--store").arg(made.place.at("store")));
    json(build(&part).arg("--store").arg(&other));
    let second = json(build(&tree).arg("--store").arg(&other));
    assert_eq!((first["digest"].as_str(), &second["digest"]), (Some(made.digest.as_str()), &first["digest"]));
    assert_ne!(second["image_digest"], first["image_digest"]);

    let wrong = format!("tree:{}", "7".repeat(64));
    for digest in [&made.digest, second["image_digest"].as_str().unwrap(), &wrong] {
        for (command, words) in
            [("cat", &["/dir/large"][..]), ("ls", &["/dir"]), ("info", &[]), ("fsck", &[]), ("verify", &[])]
        {
            let mut line = ferry();
            line.args(["image", command]).arg(made.place.at("again")).args(words).arg("--store").arg(&other);
            line.args(["--digest", digest]);
            if *digest == wrong {
                // For whoever checks it that is what was found.
                let said = match command {
                    "fsck" | "verify" => {
                        let output = run(&mut line);
                        assert_eq!(output.status.code(), Some(4), "{command}");
                        String::from_utf8(output.stdout).unwrap()
                    }
                    _ => refused(1, &mut line),
                };
                assert!(said.contains(&format!("has the digest {}, not {wrong}", made.digest)), "{command}: {said}");
            } else {
                let output = run(&mut line);
                assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
            }
        }
    }
    let without = |command| refused(1, made.image(command).args(["--digest", &made.digest]));
    for said in ["ls", "info", "fsck"].map(without) {
        assert!(said.contains("verifying the digest of a tree needs the store: add --store DIR"), "{said}");
    }
    // An image that says so, and is another tree.
    let path = made.place.at("again");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::File::options().write(true).open(&path).unwrap().write_all_at(&[0x77; 32], 992).unwrap();
    let verify = |words: &[&str]| {
        let mut line = ferry();
        line.args(["image", "verify"]).arg(&path).arg("--store").arg(&other).args(words);
        run(&mut line)
    };
    let output = verify(&[]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.code() == Some(4) && said.contains(&format!("has the digest {}, not {wrong}", made.digest)),
        "{said}"
    );
    assert_eq!(verify(&["--digest", &wrong]).status.code(), Some(4));
}

#[test]
fn build_options_select_the_contents() {
    let made = Made::new();
    let tree = made.place.at("tree");
    fs::create_dir_all(tree.join("cache/kept")).unwrap();
    fs::write(tree.join("cache/gone"), large()).unwrap();
    fs::write(tree.join("dir/a.o"), [1; 9000]).unwrap();
    // Only root can give files away.
    let is_root = rustix::process::geteuid().is_root();
    let own = |name: &str, uid: u32, gid: u32| {
        if is_root {
            std::os::unix::fs::chown(tree.join(name), Some(uid), Some(gid)).unwrap();
        }
    };
    own("dir", 1000, 1001);
    let flags = rustix::fs::XattrFlags::empty();
    let is_marked = rustix::fs::lsetxattr(tree.join("dir"), "user.mark", b"x", flags).is_ok();
    let build = |image: &str, layout: &str, words: &[&str]| {
        let mut line = ferry();
        line.args(["image", "build", "--json", "--layout", layout]).arg(&tree).arg("-o").arg(made.place.at(image));
        line.arg("--store").arg(made.place.at(&format!("{layout}.store"))).args(words);
        serde_json::from_str::<serde_json::Value>(&text(&mut line)).unwrap()
    };
    let list = |image: &str| {
        let lines = text(ferry().args(["image", "ls", "--json"]).arg(made.place.at(image)));
        lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()).collect::<Vec<_>>()
    };
    let choice = ["--exclude", "*.o", "--exclude", "/cache/g*", "--owner", "0:7", "--mtime", "86400", "--skip-xattrs"];
    for layout in ["flat", "composefs"] {
        let chosen = build("chosen", layout, &choice);
        let lines = list("chosen");
        let paths: Vec<_> = lines.iter().map(|line| line["path"].as_str().unwrap()).collect();
        let expected = ["/", "/cache", "/cache/kept", "/dir", "/dir/below", "/dir/below/small", "/dir/large", "/link"];
        assert_eq!(paths, expected, "{layout}");
        for line in &lines {
            let (uid, gid, time) = (&line["uid"], &line["gid"], &line["mtime"]);
            assert_eq!((uid, gid, &time["sec"], &time["nsec"]), (&0.into(), &7.into(), &86400.into(), &0.into()));
        }
        // What is left out is not in the store either.
        assert!(chosen["data_bytes"].as_u64().unwrap() <= 200_005, "{chosen}");
        // Whatever the tree's own times and owners are, the image is the same.
        for name in ["dir", "dir/below", "cache/kept"] {
            own(name, 5, 6);
            let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
            fs::File::open(tree.join(name)).unwrap().set_times(times).unwrap();
        }
        assert_eq!(build("again", layout, &choice)["digest"], chosen["digest"]);
        let whole = build("whole", layout, &[]);
        assert_eq!(list("whole").len(), 10);
        if is_marked {
            let bare = build("bare", layout, &["--skip-xattrs"]);
            assert_ne!((&bare["digest"], layout), (&whole["digest"], layout));
            let mut line = ferry();
            line.args(["image", "diff"]).arg(made.place.at("whole")).arg(made.place.at("bare")).arg("--store");
            let output = run(line.arg(made.place.at(&format!("{layout}.store"))));
            assert_eq!(String::from_utf8_lossy(&output.stdout), "M /dir (attributes)\n", "{layout}");
        }
    }
    let refused_words = |words: &[&str]| {
        let output = run(ferry().args(["image", "build", "tree", "-o", "x", "--store", "y"]).args(words));
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused_words(&["--owner", "root"]).contains("UID:GID"));
    assert!(refused_words(&["--exclude", "a/../b"]).contains("is not a pattern"));
    assert!(refused_words(&["--exclude", "core/"]).contains("a / at its end"));
    let archive = made.place.at("tree.tar");
    assert!(Command::new("tar").arg("-cf").arg(&archive).arg("-C").arg(&tree).arg("dir").status().unwrap().success());
    let mut line = ferry();
    line.args(["image", "build", "--exclude", "*.o"]).arg(&archive).arg("-o").arg(made.place.at("x"));
    let said = refused(1, line.arg("--store").arg(made.place.at("flat.store")));
    assert!(said.contains("only when the source is a directory"), "{said}");
}

#[test]
fn long_lists_have_dates_and_device_numbers() {
    let made = Made::new();
    let tree = made.place.at("tree");
    let is_root = rustix::process::geteuid().is_root();
    if is_root {
        let mode = rustix::fs::Mode::from(0o660);
        let device = rustix::fs::makedev(8, 300);
        let at = rustix::fs::CWD;
        rustix::fs::mknodat(at, tree.join("disk"), rustix::fs::FileType::BlockDevice, mode, device).unwrap();
    }
    for (name, seconds) in [("dir/large", 951_827_696_i64), ("dir/below/small", -1)] {
        let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: 0 };
        let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
        let flags = rustix::fs::AtFlags::empty();
        rustix::fs::utimensat(rustix::fs::CWD, tree.join(name), &times, flags).unwrap();
    }
    let mut line = ferry();
    line.args(["image", "build"]).arg(&tree).arg("-o").arg(made.place.at("image"));
    text(line.arg("--store").arg(made.place.at("store")));
    let long = text(made.image("ls").arg("-l"));
    let line = |name: &str| long.lines().find(|line| line.ends_with(name)).unwrap_or_else(|| panic!("{name}: {long}"));
    assert!(line("/dir/large").ends_with(" 200000 2000-02-29 12:34 /dir/large"), "{long}");
    assert!(line("/dir/below/small").ends_with(" 5 1969-12-31 23:59 /dir/below/small"), "{long}");
    if is_root {
        assert!(line("/disk").starts_with("b") && line("/disk").contains(" 8, 300 "), "{long}");
    }
}

#[test]
fn damage_is_found_and_named() {
    let made = Made::new();
    made.damage();
    let output = run(&mut made.with_store("verify"));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(said.starts_with("/dir/large: the object ") && said.ends_with(" is damaged\n"), "{said}");
    let output = run(made.with_store("cat").arg("dir/large"));
    assert_eq!((output.status.code(), output.stdout), (Some(1), Vec::new()));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("is damaged; its readers get EIO\nferry: dir/large cannot be read"), "{said}");
    assert_eq!(text(made.with_store("cat").arg("/dir/below/small")), "small");
}

#[test]
fn damaged_metadata_is_found_and_named() {
    let made = Made::new();
    let image = made.place.at("image");
    let good = fs::read(&image).unwrap();
    let info: serde_json::Value = serde_json::from_str(&text(made.image("info").arg("--json"))).unwrap();
    let own = info["image_digest"].as_str().unwrap().to_owned();
    let name = good.windows(5).position(|bytes| bytes == b"below").unwrap();
    let fsck = |words: &[&str]| {
        let output = run(made.image("fsck").args(words));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let mut bad = good.clone();
    bad[name + 2] = b'/';
    fs::write(&image, &bad).unwrap();
    let (status, said) = fsck(&[]);
    assert!(status == Some(4) && said.starts_with("/dir: ") && said.lines().count() >= 1, "{status:?} {said}");
    let (status, json) = fsck(&["--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let findings: Vec<_> = json["findings"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    assert_eq!((status, json["clean"].as_bool(), findings), (Some(4), Some(false), said.lines().collect()));
    // verify says the same, and has nothing to say of bytes then; whoever knows the digest reads nothing of it.
    let output = run(&mut made.with_store("verify"));
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap()), (Some(4), said));
    let output = run(made.with_store("fsck").args(["--digest", &made.digest]));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("is damaged, so it proves no tree: /dir: ") && said.lines().count() == 1, "{said}");
    let (status, said) = fsck(&["--digest", &own]);
    assert!(status == Some(4) && said.contains(&own) && said.lines().count() == 1, "{said}");
    // What is no image at all is found, too; what cannot be looked at is not.
    fs::write(&image, &good[..1000]).unwrap();
    let (status, said) = fsck(&[]);
    assert!(status == Some(4) && said.contains("is no valid image") && said.lines().count() == 1, "{said}");
    let output = run(&mut made.with_store("verify"));
    assert_eq!((output.status.code(), String::from_utf8(output.stdout).unwrap()), (Some(4), said));
    fs::remove_file(&image).unwrap();
    for command in ["fsck", "verify"] {
        let mut line = if command == "fsck" { made.image(command) } else { made.with_store(command) };
        assert!(refused(1, &mut line).contains("No such file"), "{command}");
    }
    fs::write(&image, &good).unwrap();
    assert_eq!(fsck(&[]), (Some(0), "clean\n".into()));
    assert_eq!(fsck(&["--json"]).1, "{\"clean\":true,\"findings\":[]}\n");
}

#[test]
fn packs_that_are_missing_or_cut_are_findings() {
    let made = Made::new();
    let verify = || {
        let output = run(&mut made.with_store("verify"));
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let pack = made.pack();
    fs::set_permissions(&pack, fs::Permissions::from_mode(0o644)).unwrap();
    fs::File::options().write(true).open(&pack).unwrap().set_len(4096).unwrap();
    let (status, said) = verify();
    assert!(status == Some(4) && said.contains("has 4096 bytes"), "{status:?} {said}");
    fs::remove_file(&pack).unwrap();
    let name = pack.file_name().unwrap().to_str().unwrap();
    let (status, said) = verify();
    assert!(status == Some(4) && said.starts_with("the pack ") && said.contains(name), "{status:?} {said}");
    let output = run(made.with_store("verify").arg("--json"));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &said["clean"]), (Some(4), &false.into()));
    // Without a store nothing can be said of the image.
    fs::remove_dir_all(made.place.at("store")).unwrap();
    refused(1, &mut made.with_store("verify"));
}

#[test]
fn the_table_of_mounts_shows_where_an_image_is_from() {
    needs_fuse!();
    let made = Made::new();
    for digest in [&[][..], &["--digest", &made.digest]] {
        let output = run(made.with_store("mount").arg(&made.place.mnt).args(digest));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mounts = made.place.mounts();
        // By the kernel, or with image: before it by Ferry's own export.
        let image = made.place.at("image").canonicalize().unwrap();
        assert!(mounts[0].contains(&*image.to_string_lossy()), "{digest:?}: {mounts:?}");
        made.place.unmount_alone();
    }
}

#[test]
fn an_image_is_a_source_of_mounts() {
    needs_fuse!();
    let made = Made::new();
    let store = made.place.at("store");
    let output = run(&mut made.mount());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && said.contains("image needs --store, the directory"), "{said}");
    let pid = made.place.mounted_by(made.mount().arg("--store").arg(&store).args(["--digest", &made.digest]));
    let mnt = &made.place.mnt;
    assert!(fs::read(mnt.join("link")).unwrap() == large());
    assert_eq!(fs::read(mnt.join("dir/below/small")).unwrap(), b"small");
    assert_eq!(fs::metadata(mnt.join("dir/large")).unwrap().permissions().mode(), 0o104_750);
    assert_eq!(fs::read_dir(mnt.join("dir")).unwrap().count(), 2);
    assert_eq!(fs::write(mnt.join("new"), "x").unwrap_err().raw_os_error(), Some(30));
    made.place.unmount(pid);
    made.damage();
    let pid = made.place.mounted_by(made.mount().arg("--store").arg(&store));
    assert_eq!(fs::read(mnt.join("dir/large")).unwrap_err().raw_os_error(), Some(5));
    assert_eq!(fs::read(mnt.join("dir/below/small")).unwrap(), b"small");
    made.place.unmount(pid);
}

#[test]
fn the_kernel_mounts_an_image() {
    needs_fuse!();
    let made = Made::new();
    let mnt = &made.place.mnt;
    let output = run(made.with_store("mount").arg(mnt).args(["--digest", &made.digest]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    if said.contains("mounting over FUSE instead") {
        ferry_skip::skip!("{said}");
    }
    let outcome = fs::read(mnt.join("link"));
    made.place.unmount_alone();
    assert!(outcome.unwrap() == large());
}

#[test]
fn the_kernel_mounts_on_the_target_of_a_link() {
    needs_fuse!();
    let made = Made::new();
    let link = made.place.at("to");
    std::os::unix::fs::symlink("mnt", &link).unwrap();
    let output = run(made.with_store("mount").arg(&link));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read(made.place.mnt.join("dir/below/small")).unwrap(), b"small");
    made.place.unmount_alone();
}

/// The kernel lets root of a user namespace mount FUSE and not EROFS.
#[test]
fn root_of_a_user_namespace_has_an_image_mounted_by_our_own_export() {
    needs_fuse!();
    let made = Made::new();
    let line = r#""$0" image mount image mnt --store store && cat mnt/dir/below/small && umount mnt"#;
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "60", "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", line]);
    let output = run(command.arg(env!("CARGO_BIN_EXE_ferry")).current_dir(made.place.directory.path()));
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("unshare") {
        ferry_skip::skip!("{said}");
        return;
    }
    assert!(said.contains("only root of the host can mount erofs; mounting over FUSE instead: "), "{said}");
    assert!(output.status.success() && output.stdout == b"small", "{said}");
}

/// Runs a user's command in a separate mount namespace where all users may open the device, unlike in containers.
const AS_USER: &str = r#"
mkdir dev && mount -t tmpfs none dev && mknod dev/fuse c 10 229 && chmod 666 dev/fuse && mount --bind dev/fuse /dev/fuse
trap 'umount -l mnt 2>/dev/null || true' EXIT
nobody() { setpriv --reuid nobody --regid nogroup --clear-groups --inh-caps=-all "$@"; }
nobody "$PWD/ferry" image --log debug mount "$PWD/image" "$PWD/mnt" --store "$PWD/store" --digest "$1"
grep " $PWD/mnt " /proc/self/mountinfo | grep -q ' - fuse.ferry '
nobody cat mnt/dir/below/small
nobody fusermount3 -u "$PWD/mnt"
! nobody "$PWD/ferry" image mount "$PWD/image" "$PWD/mnt" --store "$PWD/store" --upper "$PWD/changes""#;

#[test]
fn users_have_an_image_mounted_by_our_own_export() {
    needs_fuse!();
    if !["fusermount3", "setpriv"].iter().all(|name| Path::new("/usr/bin").join(name).exists()) {
        ferry_skip::skip!("needs fusermount3 and setpriv");
        return;
    }
    let made = Made::new();
    fs::set_permissions(made.place.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&made.place.mnt, Some(65534), Some(65534)).unwrap();
    assert!(
        Command::new("cp").arg(env!("CARGO_BIN_EXE_ferry")).arg(made.place.at("ferry")).status().unwrap().success()
    );
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "60", "unshare", "--mount", "--propagation", "private", "sh", "-ec", AS_USER, "sh"]);
    command.arg(&made.digest).env_remove("FERRY_LOG").env_remove("XDG_RUNTIME_DIR").stdin(std::process::Stdio::null());
    let output = run(command.current_dir(made.place.directory.path()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"small", "{said}");
    let line = format!(
        "ferry: only root can mount images with the kernel; mounting over FUSE instead: ferry --log debug mount \
         image:{}",
        made.place.at("image").display()
    );
    assert!(said.contains(&line), "{said}");
    assert!(said.contains("without --upper ferry mount can: ferry mount image:"), "{said}");
}

/// Where the file system has no fs-verity, as that of most test machines: what is believed is said, or the mount refused.
#[test]
fn data_without_fs_verity_is_reported_or_refused() {
    let made = Made::new();
    let verify = |image: &str| {
        text(ferry().args(["image", "verify"]).arg(made.place.at(image)).arg("--store").arg(made.place.at("store")))
    };
    let (tree, store) = (made.place.at("tree"), made.place.at("store"));
    let build = ["image", "build", "--verity", "-o"];
    let digest = text(ferry().args(build).arg(made.place.at("sealed")).arg(tree).arg("--store").arg(&store));
    assert_eq!((verify("image"), verify("sealed")), ("clean\n".into(), "clean\n".into()));
    let word = |image: &str| -> String {
        let info = text(ferry().args(["image", "info", "--json", "--store"]).arg(&store).arg(made.place.at(image)));
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        info["packs"][0]["verity"].as_str().unwrap().to_owned()
    };
    assert_eq!(word("image"), "none");
    let shown = text(ferry().args(["image", "info", "--store"]).arg(&store).arg(made.place.at("image")));
    assert!(shown.contains(" bytes, fs-verity: none\n"), "{shown}");
    let mount = |image: &str, digest: &str| {
        let mut line = ferry();
        line.args(["image", "mount"]).arg(made.place.at(image)).arg(&made.place.mnt).arg("--store").arg(&store);
        line.args(["--digest", digest.trim_end(), "--verity", "require"]);
        refused(1, &mut line)
    };
    let said = mount("image", &made.digest);
    assert!(said.contains("was built without --verity") && said.contains("--verity require"), "{said}");
    match word("sealed").as_str() {
        "unavailable" => {
            let said = mount("sealed", &digest);
            assert!(said.contains("has no fs-verity") && said.contains("--verity require"), "{said}");
        }
        word => assert_eq!(word, "on"),
    }
    let mut line = ferry();
    line.args(["image", "mount", "image", "mnt", "--store", "store", "--verity", "require"]);
    let output = run(&mut line);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("--digest <DIGEST>"), "{said}");
}
