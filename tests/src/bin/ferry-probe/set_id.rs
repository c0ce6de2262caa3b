//! Files with suid and sgid: who may keep the bits, and that cleared bits have no effect.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use rustix::fs::{FallocateFlags, copy_file_range, fallocate};

use crate::Check;
use crate::privileges::{CHANGES, Change, RANGE_CHANGES};
use crate::sys::{Mapping, NOBODY, as_nobody, become_user, mode};

pub const CHECKS: &[Check] = &[
    ("set-id-rules", |dir| rules(dir, CHANGES)),
    ("set-id-rules-of-ranges", |dir| rules(dir, RANGE_CHANGES)),
    ("set-id-chown", chowned),
    ("set-id-exec", |dir| executed(dir, WRITES, NOBODY)),
    ("set-id-exec-after-ranges", |dir| executed(dir, RANGES, NOBODY)),
    // Linux lets a file keep them that is changed through a mapping.
    ("set-id-exec-after-mapping", |dir| executed(dir, MAPPINGS, 0)),
    ("set-id-held", held),
];

/// Who changes a file of root's and of this group: root, a member of the group, a stranger.
const GROUP: u32 = 4242;
const MEMBER: u32 = 1234;

fn as_member<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    become_user(MEMBER, GROUP, &[], run)
}

/// What is left of a mode (Linux's `setattr_should_drop_suidgid`) for a caller without `CAP_FSETID`.
fn kept(mode: u32, is_member: bool) -> u32 {
    let keeps_sgid = mode & 0o010 == 0 && is_member;
    mode & !(0o4000 | if keeps_sgid { 0 } else { 0o2000 })
}

/// With and without execution by the group, which makes sgid a privilege.
const MODES: [u32; 4] = [0o6777, 0o6767, 0o2767, 0o4666];

fn rules(dir: &Path, changes: &[Change]) {
    let mut wrong = Vec::new();
    for (name, change) in changes {
        for before in MODES {
            for (who, after) in [("root", before), ("member", kept(before, true)), ("stranger", kept(before, false))] {
                let path = dir.join(format!("{name}-{before:o}-{who}"));
                fs::write(&path, [1; 10_000]).unwrap();
                chown(&path, Some(0), Some(GROUP)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(before)).unwrap();
                match who {
                    "root" => change(&path),
                    "member" => as_member(|| change(&path)),
                    _ => as_nobody(|| change(&path)),
                }
                if mode(&path) != after {
                    wrong.push(format!("{name} of {before:o} by {who}: {:o}", mode(&path)));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// A change of owner clears suid for all callers, and sgid as any other change; for root too where it is a privilege.
fn chowned(dir: &Path) {
    let path = dir.join("file");
    for before in MODES {
        for is_nothing in [false, true] {
            let owner = |uid| if is_nothing { None } else { Some(uid) };
            for (who, after) in
                [("root", kept(before, true)), ("member", kept(before, true)), ("stranger", kept(before, false))]
            {
                let _ = fs::remove_file(&path);
                fs::write(&path, "x").unwrap();
                let uid = match who {
                    "root" => 0,
                    "member" => MEMBER,
                    _ => NOBODY,
                };
                chown(&path, Some(uid), Some(GROUP)).unwrap();
                fs::set_permissions(&path, fs::Permissions::from_mode(before)).unwrap();
                match who {
                    "root" => chown(&path, owner(5), owner(GROUP)).unwrap(),
                    "member" => as_member(|| chown(&path, None, owner(GROUP)).unwrap()),
                    _ => as_nobody(|| chown(&path, None, owner(NOBODY)).unwrap()),
                }
                assert_eq!(mode(&path), after, "{before:o} by {who}, to the same: {is_nothing}");
            }
        }
    }
}

/// Runs a program as `nobody`; returns the effective user id that it prints.
fn euid(program: &Path) -> u32 {
    let output = as_nobody(|| Command::new(program).args(["--role", "euid"]).output().unwrap());
    let said = String::from_utf8(output.stdout).unwrap();
    said.trim()
        .parse()
        .unwrap_or_else(|_| panic!("{}: {said}{}", output.status, String::from_utf8_lossy(&output.stderr)))
}

/// This program, which all users may change and run as root.
fn program(path: &Path) {
    fs::copy("/proc/self/exe", path).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o4777)).unwrap();
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

fn first_byte(file: &File) -> [u8; 1] {
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    byte
}

/// What changes a program that can be run as before then.
const WRITES: &[Change] = &[
    ("write", |path| {
        let file = open(path);
        file.write_all_at(&first_byte(&file), 0).unwrap();
    }),
    ("append", |path| std::io::Write::write_all(&mut File::options().append(true).open(path).unwrap(), b"x").unwrap()),
    ("direct", |path| {
        let (mut buffer, range) = crate::files::aligned(0, 4096);
        let file = open(path);
        file.read_exact_at(&mut buffer[range.clone()], 0).unwrap();
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(path).unwrap_or(file);
        direct.write_all_at(&buffer[range], 0).unwrap();
    }),
    ("ftruncate", |path| {
        let file = open(path);
        file.set_len(file.metadata().unwrap().len() + 1).unwrap();
    }),
    ("truncate", |path| {
        crate::sys::truncate(path, i64::try_from(fs::metadata(path).unwrap().len()).unwrap() + 1).unwrap()
    }),
];

const RANGES: &[Change] = &[
    ("fallocate", |path| {
        let file = open(path);
        fallocate(&file, FallocateFlags::empty(), file.metadata().unwrap().len(), 4096).unwrap();
    }),
    ("punch", |path| {
        let file = open(path);
        let len = file.metadata().unwrap().len();
        fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, len, 4096).unwrap();
    }),
    ("copy", |path| {
        let file = open(path);
        let (mut from, mut to) = (0, file.metadata().unwrap().len());
        assert_eq!(copy_file_range(&file, Some(&mut from), &file, Some(&mut to), 100).unwrap(), 100);
    }),
];

const MAPPINGS: &[Change] = &[("mmap", |path| {
    let file = open(path);
    let mut map = Mapping::new(&file, 4096).unwrap();
    map.write(0, &first_byte(&file));
    map.sync();
})];

/// A set-id program is changed by another user, and run at once.
fn executed(dir: &Path, changes: &[Change], expected: u32) {
    let mut wrong = Vec::new();
    for (name, change) in changes {
        let path = dir.join(name);
        program(&path);
        // Whatever the kernel keeps of it, it has now.
        assert_eq!(euid(&path), 0, "suid is not honoured here");
        as_nobody(|| change(&path));
        let euid = euid(&path);
        if euid != expected {
            wrong.push(format!("{name}: {euid}"));
        }
    }
    assert!(wrong.is_empty(), "the program runs as somebody else than {expected} after {wrong:?}");
}

/// The file was open for writing before it became one with set-id bits.
fn held(dir: &Path) {
    let path = dir.join("program");
    program(&path);
    for round in ["write", "again"] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let file = open(&path);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        as_nobody(|| file.write_all_at(&first_byte(&file), 0).unwrap());
        assert_eq!(mode(&path), 0o777, "{round}");
        drop(file);
        assert_eq!(euid(&path), NOBODY, "{round}");
    }
}
