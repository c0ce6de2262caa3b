//! Other file systems mounted within the share. Needs root and the program `unshare`; otherwise skipped.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs;
use std::process::Command;

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

#[test]
fn mounts_are_crossed_and_shown() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let this = std::env::current_exe().unwrap();
    let run = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(this)
        .args(["--exact", "mounts::with_mounts", "--ignored", "--nocapture"])
        .env(ALONE, "1")
        .output();
    let output = run.unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

fn mount(args: &[&str], at: &std::path::Path) {
    assert!(Command::new("mount").args(args).arg(at).status().unwrap().success());
}

#[test]
#[ignore = "needs a mount namespace of its own"]
fn with_mounts() {
    if !is_alone() {
        return;
    }
    for options in both_modes() {
        for submounts in [false, true] {
            let share = Share::new(Options { submounts, descriptors_max: Some(1), ..options.clone() });
            let Share { dir, cx, .. } = &share;
            for at in ["tmp", "bind", "origin", "origin/sub"] {
                fs::create_dir(share.path(at)).unwrap();
            }
            fs::write(share.path("origin/file"), "origin").unwrap();
            fs::write(share.path("covered"), "below").unwrap();
            mount(&["-t", "tmpfs", "tmpfs"], &share.path("tmp"));
            mount(&["--bind", share.path("origin").to_str().unwrap()], &share.path("bind"));
            mount(&["--bind", "/dev/null"], &share.path("covered"));
            fs::create_dir(share.path("tmp/sub")).unwrap();
            for index in 0..300 {
                fs::write(share.path(format!("tmp/sub/f{index}")), "").unwrap();
            }
            assert_eq!(share.walk("tmp").unwrap().attr.submount, submounts);
            assert_eq!(share.walk("bind").unwrap().attr.submount, submounts);
            assert!(!share.walk("").unwrap().attr.submount);
            assert!(!share.walk("tmp/sub").unwrap().attr.submount);
            assert!(!share.walk("origin").unwrap().attr.submount);
            assert!(!share.walk("covered").unwrap().attr.submount);
            assert_eq!(share.walk("covered").unwrap().attr.kind(), FileType::CharacterDevice);
            assert_eq!(share.open("covered", OFlags::RDWR).unwrap_err(), Errno::ACCESS);
            // One file, at two places of the host, is two inodes; both work, however few descriptors there are.
            let (a, b) = (share.ino("bind/file"), share.ino("origin/file"));
            assert_ne!(a, b);
            let files: Vec<_> = (0..300).map(|index| share.ino(&format!("tmp/sub/f{index}"))).collect();
            for ino in files.iter().chain([&a, &b]) {
                let handle = dir.open(cx, *ino, OFlags::RDWR).unwrap();
                assert!(dir.getattr(cx, *ino, None).is_ok());
                dir.release(cx, *ino, handle);
            }
            assert!(dir.usage().descriptors < 40, "{:?}", dir.usage());
            assert_eq!(dir.lookup_parent(cx, share.ino("tmp/sub")).unwrap().ino, share.ino("tmp"));
            assert_eq!(dir.lookup_parent(cx, share.ino("tmp")).unwrap().ino, Ino::ROOT);
            let lines = share.list(Ino::ROOT, true, 3);
            assert!(lines.iter().all(|line| line.name.starts_with('.') || line.entry.is_some()));
            // Across mounts neither renamed nor linked.
            let (tmp, bind) = (share.ino("tmp"), share.ino("bind"));
            let moved = dir.rename(cx, (bind, name("file")), (tmp, name("file")), RenameFlags::empty());
            assert_eq!(moved, Err(Errno::XDEV));
            assert_eq!(dir.link(cx, a, tmp, name("file")).unwrap_err(), Errno::XDEV);
            assert_eq!(dir.rmdir(cx, Ino::ROOT, name("tmp")), Err(Errno::BUSY));
            assert!(dir.statfs(cx, tmp).unwrap().blocks > 0);
            assert_eq!(dir.syncfs(cx, Ino::ROOT), Ok(()));
            let (entry, handle) = share.create(tmp, "new", OFlags::RDWR).unwrap();
            dir.release(cx, entry.ino, handle);
            let Share { dir, tmp, .. } = share;
            drop(dir);
            for at in ["tmp", "bind", "covered"] {
                assert!(Command::new("umount").arg(tmp.path().join(at)).status().unwrap().success(), "{at} is busy");
            }
        }
    }
}
