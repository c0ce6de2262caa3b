//! Names and directories: odd bytes, long ones, deep paths, listings.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{CWD, Dir, Mode, OFlags, mkdirat, openat, unlinkat};

use crate::Check;
use crate::sys::errno;

pub const CHECKS: &[Check] = &[
    ("odd-names", odd_names),
    ("long-names", long_names),
    ("deep-path", deep_path),
    ("seek-in-listing", seek_in_listing),
    ("rename-directories", rename_directories),
];

fn listed(dir: &Path) -> BTreeSet<OsString> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

fn odd_names(dir: &Path) {
    let mut names: BTreeSet<OsString> =
        (1..=255_u8).filter(|byte| !b"/.".contains(byte)).map(|byte| OsString::from_vec(vec![byte])).collect();
    for name in
        [&b"..."[..], b". ", b" .", b"a\nb", b"\xff\xfe", b"\xc3\x28", b"-rf", b"*", b"CON", b"a\\b", b"\xe2\x80\xae"]
    {
        names.insert(OsStr::from_bytes(name).into());
    }
    for name in &names {
        fs::write(dir.join(name), name.as_bytes()).unwrap();
    }
    assert_eq!(listed(dir), names);
    for name in &names {
        assert_eq!(fs::read(dir.join(name)).unwrap(), name.as_bytes());
        fs::remove_file(dir.join(name)).unwrap();
    }
    assert!(listed(dir).is_empty());
}

fn long_names(dir: &Path) {
    let name = "n".repeat(255);
    fs::write(dir.join(&name), "x").unwrap();
    fs::rename(dir.join(&name), dir.join("m".repeat(255))).unwrap();
    fs::create_dir(dir.join(&name)).unwrap();
    fs::hard_link(dir.join("m".repeat(255)), dir.join("l".repeat(255))).unwrap();
    assert_eq!(listed(dir), ["l", "m", "n"].map(|letter| OsString::from(letter.repeat(255))).into());
    let long = dir.join("n".repeat(256));
    assert_eq!(errno(fs::write(&long, "")), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::create_dir(&long)), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::rename(dir.join(&name), &long)), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::metadata(&long)), libc::ENAMETOOLONG);
    // As many as one byte more than a reply holds: listings must not stop or repeat at its border.
    let many: BTreeSet<_> = (0..300).map(|number| OsString::from(format!("{number:0>255}"))).collect();
    let directory = dir.join("many");
    fs::create_dir(&directory).unwrap();
    for name in &many {
        fs::write(directory.join(name), "").unwrap();
    }
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 300);
    assert_eq!(listed(&directory), many);
}

fn deep_path(dir: &Path) {
    const LEVELS: usize = 300;
    let name = "d".repeat(100);
    let mut open = vec![File::open(dir).unwrap()];
    for _ in 0..LEVELS {
        let parent = open.last().unwrap();
        mkdirat(parent, name.as_str(), Mode::from_raw_mode(0o755)).unwrap();
        open.push(openat(parent, name.as_str(), OFlags::DIRECTORY, Mode::empty()).unwrap().into());
        if open.len() > 3 {
            open.remove(0);
        }
    }
    let bottom = open.pop().unwrap();
    drop(File::from(openat(&bottom, "file", OFlags::CREATE | OFlags::WRONLY, Mode::from_raw_mode(0o644)).unwrap()));
    // Up again by `..`, 30,000 bytes of path.
    let mut at = bottom;
    unlinkat(&at, "file", rustix::fs::AtFlags::empty()).unwrap();
    for _ in 0..LEVELS {
        let up: File = openat(&at, "..", OFlags::DIRECTORY, Mode::empty()).unwrap().into();
        unlinkat(&up, name.as_str(), rustix::fs::AtFlags::REMOVEDIR).unwrap();
        at = up;
    }
    let [top, found] =
        [fs::metadata(dir).unwrap(), at.metadata().unwrap()].map(|meta| std::os::unix::fs::MetadataExt::ino(&meta));
    assert_eq!(top, found);
}

fn seek_in_listing(dir: &Path) {
    for number in 0..500 {
        fs::write(dir.join(format!("f{number}")), "").unwrap();
    }
    let mut listing = Dir::read_from(openat(CWD, dir, OFlags::DIRECTORY, Mode::empty()).unwrap()).unwrap();
    let all: Vec<_> = listing.by_ref().map(|entry| entry.unwrap().file_name().to_owned()).collect();
    assert_eq!(all.len(), 502);
    fs::write(dir.join("new"), "").unwrap();
    listing.rewind();
    let again: Vec<_> = listing.by_ref().map(|entry| entry.unwrap().file_name().to_owned()).collect();
    assert_eq!(again.len(), 503, "a listing from the start shows what is new");
    // From the middle, by the offset of an entry.
    listing.rewind();
    let middle = listing.nth(250).unwrap().unwrap().offset();
    let rest: Vec<_> = listing.by_ref().map(|entry| entry.unwrap().file_name().to_owned()).collect();
    listing.seek(middle).unwrap();
    let rest_again: Vec<_> = listing.map(|entry| entry.unwrap().file_name().to_owned()).collect();
    assert_eq!(rest, rest_again);
    assert_eq!(rest.len(), 503 - 251);
}

fn rename_directories(dir: &Path) {
    fs::create_dir_all(dir.join("a/b/c")).unwrap();
    assert_eq!(errno(fs::rename(dir.join("a"), dir.join("a/b/x"))), libc::EINVAL);
    fs::create_dir(dir.join("full")).unwrap();
    fs::write(dir.join("full/x"), "").unwrap();
    assert_eq!(errno(fs::rename(dir.join("a"), dir.join("full"))), libc::ENOTEMPTY);
    let held = File::open(dir.join("a/b")).unwrap();
    fs::rename(dir.join("a/b"), dir.join("moved")).unwrap();
    drop(File::from(openat(&held, "inside", OFlags::CREATE | OFlags::WRONLY, Mode::from_raw_mode(0o644)).unwrap()));
    assert!(dir.join("moved/inside").exists() && dir.join("moved/c").is_dir());
    let up = openat(&held, "..", OFlags::DIRECTORY, Mode::empty()).unwrap();
    let [up, top] = [File::from(up).metadata().unwrap(), fs::metadata(dir).unwrap()];
    assert_eq!(
        std::os::unix::fs::MetadataExt::ino(&up),
        std::os::unix::fs::MetadataExt::ino(&top),
        "'..' of a moved directory"
    );
    assert_eq!(errno(fs::remove_dir(dir.join("moved"))), libc::ENOTEMPTY);
}
