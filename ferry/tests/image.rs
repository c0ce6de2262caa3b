//! `ferry image`, and images as sources of mounts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
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
        assert!(digest.starts_with("blake3:") && digest.len() == 7 + 64, "{digest}");
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
    assert!(said.contains(&format!("there is no {}: an image is built of", none.display())), "{said}");
    assert!(!other.exists(), "a store that nobody wants");
    let said = refused(1, made.with_store("cat").arg("dir/none"));
    assert!(said.contains("dir/none is not in the image"), "{said}");
    let said = refused(1, made.image("ls").args(["--digest", &"0".repeat(64)]));
    assert!(said.contains(&made.digest), "{said}");
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
fn an_image_is_a_source_of_mounts() {
    needs_fuse!();
    let made = Made::new();
    let store = made.place.at("store");
    let output = run(&mut made.mount());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(2) && said.contains("image needs store, the folder"), "{said}");
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
    let made = Made::new();
    let mnt = &made.place.mnt;
    let output = run(made.with_store("mount").arg(mnt).args(["--digest", &made.digest]));
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("this kernel") || said.contains("only root") {
        eprintln!("{said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    let outcome = fs::read(mnt.join("link"));
    rustix::mount::unmount(mnt, rustix::mount::UnmountFlags::empty()).unwrap();
    assert!(outcome.unwrap() == large());
}

/// Where the file system has no fs-verity, as that of most test machines: what is believed is said, or the mount refused.
#[test]
fn what_the_kernel_cannot_prove_is_said_or_refused() {
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
