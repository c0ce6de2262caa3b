//! Flags of a client's open that the host's descriptor has, too.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use crate::common;

use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{OpenOptionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use common::*;
use ferry_dir::Options;
use ferry_vfs::*;

/// The name by which /proc knows a file of a share.
fn seen(share: &Share, name: &str) -> PathBuf {
    share.path(name).canonicalize().unwrap()
}

/// The flags of the only descriptor of this process by which a file's data are reached.
fn open_with(path: &Path) -> OFlags {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        // Those of others may be closed meanwhile.
        let about = fs::read_to_string(Path::new("/proc/self/fdinfo").join(entry.file_name()));
        if let (Ok(file), Ok(about)) = (fs::read_link(entry.path()), about)
            && file == path
        {
            let octal = about.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            found.push(OFlags::from_bits_retain(u32::from_str_radix(octal.trim(), 8).unwrap()));
        }
    }
    found.retain(|flags| !flags.contains(OFlags::PATH));
    assert_eq!(found.len(), 1, "{}: {found:?}", path.display());
    found[0]
}

#[test]
fn direct_io_is_passed_to_the_host_where_allowed() {
    let direct = OFlags::RDWR | OFlags::DIRECT;
    for direct_io in [false, true] {
        for options in both_modes() {
            let share = Share::new(Options { direct_io, ..options });
            assert_eq!(share.dir.features().direct, direct_io);
            fs::write(share.path("f"), [1; 8192]).unwrap();
            let path = seen(&share, "f");
            if let Err(error) = File::options().read(true).custom_flags(libc::O_DIRECT).open(&path) {
                ferry_skip::skip!("no O_DIRECT here: {error}");
                return;
            }
            let (ino, handle) = share.open("f", direct).unwrap();
            assert_eq!(open_with(&path).contains(OFlags::DIRECT), direct_io);
            // The client changes it later.
            for flags in [OFlags::RDWR, direct] {
                let read = share.dir.read(&share.cx, &range(ino, handle, 0, 4096, flags), &mut Vec::new());
                let Data::Extent(extent) = read.unwrap() else { panic!("no extent") };
                let own = rustix::fs::fcntl_getfl(&*extent.file).unwrap();
                assert_eq!(own.contains(OFlags::DIRECT), direct_io && flags == direct, "{flags:?}");
            }
            share.dir.release(&share.cx, ino, handle);
            let (entry, handle) = share.create(Ino::ROOT, "new", direct).unwrap();
            assert_eq!(open_with(&seen(&share, "new")).contains(OFlags::DIRECT), direct_io);
            share.dir.release(&share.cx, entry.ino, handle);
        }
    }
}

#[test]
fn noatime_keeps_access_times() {
    for options in both_modes() {
        let share = Share::new(options);
        fs::write(share.path("f"), "x").unwrap();
        let path = seen(&share, "f");
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let stays = |flags: OFlags| {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_times(FileTimes::new().set_accessed(old)).unwrap();
            drop(file);
            let (ino, handle) = share.open("f", flags).unwrap();
            assert_eq!(open_with(&path).contains(OFlags::NOATIME), flags.contains(OFlags::NOATIME));
            assert_eq!(share.read((ino, handle), 0, 9).unwrap(), b"x");
            share.dir.release(&share.cx, ino, handle);
            fs::metadata(&path).unwrap().accessed().unwrap() == old
        };
        assert!(stays(OFlags::RDONLY | OFlags::NOATIME));
        if stays(OFlags::RDONLY) {
            eprintln!("this file system is mounted with noatime");
        }
    }
}

#[test]
fn noatime_without_permission_still_opens() {
    if !is_root() {
        return ferry_skip::skip!("needs root");
    }
    let this = std::env::current_exe().unwrap();
    let run = Command::new("setpriv")
        .args(["--bounding-set", "-fowner", "--inh-caps", "-fowner"])
        .arg(this)
        .args(["--exact", "open_flags::without_fowner", "--ignored", "--nocapture"])
        .env(ALONE, "1")
        .output();
    let output = run.unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
#[ignore = "needs a process without CAP_FOWNER"]
fn without_fowner() {
    if !is_alone() {
        return;
    }
    for options in both_modes() {
        let share = Share::new(options);
        fs::write(share.path("f"), "abc").unwrap();
        chown(share.path("f"), Some(77), Some(77)).unwrap();
        let path = seen(&share, "f");
        let refused = File::options().read(true).custom_flags(libc::O_NOATIME).open(&path).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
        let flags = OFlags::RDWR | OFlags::NOATIME;
        let (ino, handle) = share.open("f", flags).unwrap();
        assert!(!open_with(&path).contains(OFlags::NOATIME));
        // What the client changes later is changed without it, too.
        assert_eq!(share.write_flags((ino, handle), 0, b"d", flags | OFlags::APPEND), Ok(1));
        assert_eq!(fs::read(&path).unwrap(), b"abcd");
        share.dir.release(&share.cx, ino, handle);
    }
}
