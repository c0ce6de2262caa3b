//! `ferry mount pmem:FILE`, its flags, and `ferry fsck`.
use crate::common;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use common::place::{Place, runs, until};
use common::{ferry, needs_fuse, refused, run};
use rustix::process::{Signal, kill_process};

/// An image beside the mount point.
fn image(place: &Place) -> PathBuf {
    place.at("image")
}

fn mount(place: &Place, args: &[&str]) -> Command {
    let mut command = ferry();
    command.arg("mount").arg(format!("pmem:{}", image(place).display())).arg(&place.mnt).args(args);
    command
}

/// Status, what it says, and what it says on standard error.
fn fsck(path: impl AsRef<Path>, args: &[&str]) -> (Option<i32>, String, String) {
    let output = run(ferry().arg("fsck").arg(path.as_ref()).args(args));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_remount_finds_the_data() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted_by(&mut mount(&place, &["--size", "64M"]));
    assert_eq!(fs::metadata(image(&place)).unwrap().len(), 64 << 20);
    fs::create_dir(place.mnt.join("dir")).unwrap();
    fs::write(place.mnt.join("dir/file"), "to stay").unwrap();
    // Unmounted, killed after fsync, and ended by a signal: it is there every time.
    place.unmount(pid);
    let pid = place.mounted_by(&mut mount(&place, &[]));
    assert_eq!(fs::read_to_string(place.mnt.join("dir/file")).unwrap(), "to stay");
    let synced = File::create(place.mnt.join("synced")).unwrap();
    synced.write_all_at(b"safe", 0).unwrap();
    synced.sync_all().unwrap();
    drop(synced);
    kill_process(pid, Signal::KILL).unwrap();
    until("its death", || !runs(pid));
    let pid = place.mounted_by(&mut mount(&place, &["--read-only"]));
    assert_eq!(fs::read_to_string(place.mnt.join("synced")).unwrap(), "safe");
    assert_eq!(fs::write(place.mnt.join("synced"), "x").unwrap_err().raw_os_error(), Some(30));
    kill_process(pid, Signal::TERM).unwrap();
    until("its end", || !runs(pid));
    assert!(place.is_free());
    assert_eq!(fsck(image(&place), &[]).0, Some(0));
}

#[test]
fn the_size_is_kept_and_flags_reach_the_source() {
    needs_fuse!();
    let place = Place::new();
    let cold = place.at("cold");
    let cold = cold.to_str().unwrap();
    let tiers = ["--size", "64M", "--huge", "--tier2", cold, "--tier2-size", "64M"];
    let pid = place.mounted_by(&mut mount(&place, &tiers));
    assert_eq!(fs::metadata(cold).unwrap().len(), 64 << 20);
    // More than the first tier holds, less than both do.
    let data: Vec<u8> = (0..80_u32 << 18).flat_map(u32::to_le_bytes).collect();
    fs::write(place.mnt.join("large"), &data).unwrap();
    assert!(fs::read(place.mnt.join("large")).unwrap() == data, "what was written is not what is read");
    let full = fs::write(place.mnt.join("more"), &data).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(28), "{full}");
    fs::remove_file(place.mnt.join("more")).unwrap();
    place.unmount(pid);
    // Without its second tier an image is not whole.
    let output = run(&mut mount(&place, &[]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("tier") && place.is_free(), "{said}");
    let (status, out, said) = fsck(image(&place), &["--tier2", cold]);
    assert_eq!(status, Some(0), "{out}{said}");
    let pid = place.mounted_by(&mut mount(&place, &["--tier2", cold]));
    assert!(fs::read(place.mnt.join("large")).unwrap() == data, "what was written is not what is found");
    place.unmount(pid);
}

/// Told by what the kernel would like to move of a file at a time: of one in huge pages, one of them.
#[test]
fn mem_is_in_huge_pages_if_it_is_to_be() {
    const FILE_BYTES: usize = 3 << 20;
    needs_fuse!();
    let Ok(huge_page) = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") else {
        return ferry_skip::skip!("this kernel has no huge pages");
    };
    let place = Place::new();
    for (flag, expected) in [(None, 4096), (Some("--huge"), huge_page.trim().parse::<u64>().unwrap())] {
        let pid = place.mounted_by(ferry().args(["mount", "mem"]).arg(&place.mnt).args(["--size", "64M"]).args(flag));
        let file = File::create(place.mnt.join("file")).unwrap();
        file.write_all_at(&vec![1; FILE_BYTES], 0).unwrap();
        // The data file, which nothing but the server has.
        let of_server = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero())).unwrap();
        let files = of_server.flatten().filter_map(|fd| fs::metadata(fd.path()).ok());
        let units: Vec<u64> = files.filter(|file| file.len() == FILE_BYTES as u64).map(|file| file.blksize()).collect();
        assert!(!units.is_empty() && units.iter().all(|unit| *unit == expected), "{flag:?}: {units:?}");
        drop(file);
        place.unmount(pid);
    }
}

#[test]
fn ineffective_huge_pages_are_reported() {
    needs_fuse!();
    let place = Place::new();
    let said = |args: &[&str]| {
        let output = run(mount(&place, args).arg("--json"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let pid = line["pid"].as_i64().unwrap().try_into().unwrap();
        place.unmount(rustix::process::Pid::from_raw(pid).unwrap());
        said
    };
    let plain = said(&["--size", "16M"]);
    assert!(!plain.contains("huge"), "{plain}");
    let huge = said(&["--huge"]);
    let lines: Vec<_> = huge.lines().filter(|line| line.contains("huge")).collect();
    assert!(lines.len() == 1 && lines[0].contains(image(&place).to_str().unwrap()), "{huge}");
}

#[test]
fn an_image_is_checked_and_repaired() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted_by(&mut mount(&place, &["--size", "16M"]));
    fs::write(place.mnt.join("file"), "kept").unwrap();
    let (status, out, said) = fsck(image(&place), &[]);
    assert_eq!((status, &*out), (Some(1), ""));
    assert!(said.contains("in use") && said.lines().count() == 1, "{said}");
    place.unmount(pid);

    let short = place.at("short");
    fs::write(&short, "no image").unwrap();
    let (status, _, said) = fsck(&short, &[]);
    assert!(status == Some(4) && said.contains("8 bytes are too few"), "{said}");

    for word in [image(&place), format!("pmem:{}", image(&place).display()).into()] {
        let (status, out, said) = fsck(&word, &[]);
        assert_eq!((status, &*said), (Some(0), ""), "{out}");
        assert!(out.contains("clean; 2 inodes"), "{out}");
    }
    let (status, out, _) = fsck(image(&place), &["--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((status, &report["inodes"], &report["repaired"]), (Some(0), &2.into(), &false.into()));

    // The first superblock; there is another.
    let file = OpenOptions::new().write(true).open(image(&place)).unwrap();
    file.write_all_at(&[0xa5; 64], 0).unwrap();
    drop(file);
    let (status, out, said) = fsck(image(&place), &[]);
    assert_eq!(status, Some(4), "{out}{said}");
    assert!(out.contains("damaged") && out.contains("--repair"), "{out}");
    let (status, out, _) = fsck(image(&place), &["--repair", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((status, &report["repaired"]), (Some(0), &true.into()), "{out}");
    assert_eq!(fsck(image(&place), &[]).0, Some(0));
    let pid = place.mounted_by(&mut mount(&place, &[]));
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "kept");
    place.unmount(pid);
}

#[test]
fn other_files_are_refused_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("letter");
    let text = "precious ".repeat(1 << 16);
    fs::write(&other, &text).unwrap();
    let missing = directory.path().join("missing");
    let is_directory = directory.path().into();
    for (path, words, expected) in
        [(&other, "holds something else", 4), (&missing, "missing", 1), (&is_directory, "", 1)]
    {
        for args in [&[][..], &["--repair"]] {
            let (status, out, said) = fsck(path, args);
            assert_eq!((status, &*out), (Some(expected), ""), "{said}");
            assert!(said.starts_with("ferry: ") && said.contains(words) && said.lines().count() == 1, "{said}");
            assert!(said.contains(path.to_str().unwrap()), "{said}");
        }
    }
    assert!(fs::read_to_string(&other).unwrap() == text, "it was changed");
    assert!(!missing.exists());
}

/// A mount point or a directory that is missing is named before an image is made, and so is a size.
#[test]
fn a_mistake_leaves_no_image() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name).display().to_string();
    let (image, source) = (directory.path().join("image"), format!("pmem:{}", at("image")));
    let lines: [(&[&str], &str); 3] = [
        (&["mount", &source, &at("none"), "--size", "64M"], "does not exist; make it first"),
        (&["share", &source, "--virtiofs", &at("none/s"), "--size", "64M"], "the directory of the socket"),
        (&["share", &source, "--virtiofs", &at("s")], "give its size (for example --size 8G)"),
    ];
    for (line, words) in lines {
        let text = refused(1, ferry().args(line));
        assert!(text.contains(words) && !image.exists(), "{line:?}: {text}");
    }
}

/// What is wrong may show once the image was made: what this start has made goes again, with a sandbox and without, and nothing else does.
#[test]
fn a_start_that_fails_late_leaves_no_image() {
    needs_fuse!();
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name).display().to_string();
    let (image, tier) = (directory.path().join("image"), directory.path().join("tier"));
    let (source, tier2, file) = (format!("pmem:{}", at("image")), at("tier"), at("file"));
    let new = ["--size", "16M", "--tier2", &tier2, "--tier2-size", "16M"];
    fs::write(directory.path().join("file"), "").expect("a file");
    let ninep = ["--9p", "tcp:0.0.0.0:0"];
    let remote = "other machines can reach";
    let mount = [&["mount", &source, &file][..], &new].concat();
    let lines: [(Vec<&str>, &str); 3] = [
        (mount, "file"),
        ([&["share", &source][..], &new, &ninep].concat(), remote),
        ([&["share", &source][..], &new, &ninep, &["--sandbox", "none"]].concat(), remote),
    ];
    for (line, words) in &lines {
        let output = run(ferry().args(line));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(words), "{line:?}: {said}");
        assert!(said.contains("image is new: all of its 16777216 bytes are allocated"), "{line:?}: {said}");
        assert!(!image.exists() && !tier.exists(), "{line:?}: {said}");
    }
    // A file that was there is not removed, empty or not.
    for content in ["", "something else"] {
        fs::write(&tier, content).expect("a file");
        for (line, _) in &lines {
            assert_eq!(run(ferry().args(line)).status.code(), Some(1));
            assert!(!image.exists() && tier.exists(), "{line:?}");
        }
    }
}
