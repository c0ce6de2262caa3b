//! What a client makes beside data has a limit: names, links, directories, symbolic links, special files, attributes. Compared with
//! Linux's tmpfs. One test for memory, for it measures its process.

use crate::common;

use std::os::fd::{AsFd, OwnedFd};

use common::{Share, name, new};
use ferry_mem::Options;
use ferry_vfs::*;
use rustix::fs::{AtFlags, Mode};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};

const SIZE: u64 = 1 << 20;
/// How many inodes that size has room for.
const INODES: u64 = SIZE / 1024;
/// More than there is room for of anything.
const MANY: u64 = 200_000;

/// A way to make something with a name.
type Make<P> = fn(&P, u64) -> Result<()>;

fn share() -> Share {
    Share::new(Options { size_bytes: Some(SIZE), ..Options::default() })
}

/// A tmpfs with as much room, that is mounted nowhere; `None` where this user may not make one.
fn tmpfs() -> Option<OwnedFd> {
    let config = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    fsconfig_set_string(config.as_fd(), "size", SIZE.to_string()).unwrap();
    fsconfig_set_string(config.as_fd(), "nr_inodes", INODES.to_string()).unwrap();
    fsconfig_create(config.as_fd()).ok()?;
    fsmount(config.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()
}

/// Names of the greatest length.
fn long(number: u64) -> String {
    format!("{number:0255}")
}

/// How many can be made until there is no more room.
fn count<P>(place: &P, make: Make<P>) -> u64 {
    let made = (0..MANY).map(|number| make(place, number)).enumerate().find(|(_, outcome)| outcome.is_err());
    let (count, outcome) = made.expect("there is no end to it");
    assert_eq!(outcome, Err(Errno::NOSPC));
    count as u64
}

fn forget(share: &Share, entry: Entry) {
    share.forget(entry.ino);
}

const HERE: [(&str, Make<Share>); 5] = [
    ("files", |share, number| {
        let made = share.fs.mknod(&share.cx, Ino::ROOT, name(&number.to_string()), &new(0o644));
        made.map(|entry| forget(share, entry))
    }),
    ("files with long names", |share, number| {
        let made = share.fs.mknod(&share.cx, Ino::ROOT, name(&long(number)), &new(0o644));
        made.map(|entry| forget(share, entry))
    }),
    ("directories", |share, number| {
        let made = share.fs.mkdir(&share.cx, Ino::ROOT, name(&number.to_string()), &new(0o755));
        made.map(|entry| forget(share, entry))
    }),
    ("symbolic links", |share, number| {
        let made = share.fs.symlink(&share.cx, Ino::ROOT, name(&number.to_string()), b"somewhere");
        made.map(|entry| forget(share, entry))
    }),
    ("hard links", |share, number| {
        if number == 0 {
            let made = share.fs.mknod(&share.cx, Ino::ROOT, name("0"), &new(0o644));
            return made.map(|entry| forget(share, entry));
        }
        let made = share.fs.link(&share.cx, share.ino("0"), Ino::ROOT, name(&number.to_string()));
        made.map(|entry| forget(share, entry))
    }),
];

const THERE: [Make<OwnedFd>; 5] = [
    |dir, number| rustix::fs::mknodat(dir, number.to_string(), rustix::fs::FileType::RegularFile, Mode::RUSR, 0),
    |dir, number| rustix::fs::mknodat(dir, long(number), rustix::fs::FileType::RegularFile, Mode::RUSR, 0),
    |dir, number| rustix::fs::mkdirat(dir, number.to_string(), Mode::RWXU),
    |dir, number| rustix::fs::symlinkat("somewhere", dir, number.to_string()),
    |dir, number| match number {
        0 => rustix::fs::mknodat(dir, "0", rustix::fs::FileType::RegularFile, Mode::RUSR, 0),
        _ => rustix::fs::linkat(dir, "0", dir, number.to_string(), AtFlags::empty()),
    },
];

/// Removes all names in the root.
fn empty(share: &Share) {
    for file in share.names(Ino::ROOT) {
        let is_dir = share.attr(share.ino(&file)).kind() == FileType::Directory;
        let removed = match is_dir {
            true => share.fs.rmdir(&share.cx, Ino::ROOT, name(&file)),
            false => share.fs.unlink(&share.cx, Ino::ROOT, name(&file)),
        };
        removed.unwrap();
    }
}

#[test]
fn limits_match_tmpfs_and_all_space_is_freed() {
    let share = share();
    let free = || share.fs.statfs(&share.cx, Ino::ROOT).unwrap().ffree;
    let all = free();
    assert_eq!((share.fs.statfs(&share.cx, Ino::ROOT).unwrap().files, all), (INODES, INODES - 1));
    if tmpfs().is_none() {
        ferry_skip::skip!("not compared with a tmpfs: this user may not mount one");
    }
    for ((what, here), there) in HERE.into_iter().zip(THERE) {
        for _ in 0..2 {
            let counted = count(&share, here);
            assert_eq!(counted, INODES - 1, "{what}");
            assert_eq!(free(), 0, "{what}");
            empty(&share);
            assert_eq!(free(), all, "{what}");
        }
        if let Some(dir) = tmpfs() {
            assert_eq!(count(&dir, there), INODES - 1, "{what}: tmpfs");
        }
    }
}

#[test]
fn attributes_targets_and_replaced_names_are_counted() {
    let share = share();
    let (fs, cx) = (&share.fs, &share.cx);
    let free = || fs.statfs(cx, Ino::ROOT).unwrap().ffree;
    let all = free();
    // Long targets are charged by their length.
    let target = [b't'; 4000];
    let linked =
        (0..MANY).find(|number| fs.symlink(cx, Ino::ROOT, name(&number.to_string()), &target).is_err()).unwrap();
    assert!((SIZE / 6000..SIZE / 5000).contains(&linked), "{linked}");
    for number in 0..linked {
        let ino = share.ino(&number.to_string());
        fs.unlink(cx, Ino::ROOT, name(&number.to_string())).unwrap();
        fs.forget(ino, 1);
    }
    assert_eq!(free(), all);
    // Attributes, small ones and large ones.
    for bytes in [1, 1000, 60_000] {
        let value = vec![1; bytes];
        let mut set = 0;
        'full: for file in 0_u64.. {
            let Ok(entry) = fs.mknod(cx, Ino::ROOT, name(&file.to_string()), &new(0o644)) else { break };
            forget(&share, entry);
            for number in 0..500 {
                let attribute = format!("user.{number}");
                match fs.setxattr(cx, entry.ino, attribute.as_bytes(), &value, XattrFlags::empty(), false) {
                    Ok(()) => set += 1,
                    // What one inode may have, or all.
                    Err(Errno::NOSPC) if set > 0 && free() > 2 => continue 'full,
                    Err(Errno::NOSPC) => break 'full,
                    Err(error) => panic!("{error}"),
                }
            }
        }
        let most = usize::try_from(SIZE).unwrap() / (bytes + 64);
        assert!(set <= most && set > most / 2, "{set} attributes of {bytes} bytes");
        // Shorter and removed ones give room back, also to their inode.
        let ino = share.ino("0");
        fs.setxattr(cx, ino, b"user.0", b"", XattrFlags::REPLACE, false).unwrap();
        fs.removexattr(cx, ino, b"user.1").unwrap_or(());
        empty(&share);
        assert_eq!(free(), all, "{bytes}");
    }
    // A name that another is moved over: the last one of its inode, and one of two.
    for other in ["a", "b"] {
        share.file(Ino::ROOT, "a", b"");
        forget(&share, fs.link(cx, share.ino("a"), Ino::ROOT, name("b")).unwrap());
        share.file(Ino::ROOT, "c", b"");
        fs.rename(cx, (Ino::ROOT, name("c")), (Ino::ROOT, name(other)), RenameFlags::empty()).unwrap();
        assert_eq!(free(), all - 2);
        empty(&share);
        assert_eq!(free(), all);
    }
    // A file without a name, linked later.
    let (entry, handle) = fs.tmpfile(cx, Ino::ROOT, &new(0o644), OFlags::RDWR).unwrap();
    assert_eq!(free(), all - 1);
    forget(&share, fs.link(cx, entry.ino, Ino::ROOT, name("linked")).unwrap());
    assert_eq!(free(), all - 1);
    share.release((entry.ino, handle));
    forget(&share, entry);
    empty(&share);
    assert_eq!(free(), all);
    assert_eq!(fs.usage().inodes, 1);
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Found from outside: 200,000 hard links took 70 MiB, attributes 95 MiB, under a limit of 1 MiB.
#[test]
fn a_full_file_system_takes_little_more_memory_than_its_size() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let shares: Vec<Share> = (0..20).map(|_| share()).collect();
    let before = resident_bytes();
    for (number, share) in shares.iter().enumerate() {
        let (_, make) = HERE[number % HERE.len()];
        count(share, make);
    }
    for share in &shares[..1] {
        empty(share);
        let ino = share.file(Ino::ROOT, "attributes", b"");
        let set = |number: u64| {
            let attribute = format!("user.{number}");
            share.fs.setxattr(&share.cx, ino, attribute.as_bytes(), b"v", XattrFlags::empty(), false)
        };
        assert!((0..MANY).any(|number| set(number) == Err(Errno::NOSPC)));
    }
    let used = resident_bytes().saturating_sub(before);
    assert!(used < 2 * 20 * SIZE, "{used} bytes");
}
