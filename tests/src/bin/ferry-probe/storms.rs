//! Concurrent operations on the same names and bytes.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, openat, renameat_with};
use rustix::io::Errno;

use crate::Check;
use crate::files::aligned;
use crate::many::Role;
use crate::sys::{Mapping, errno};

pub const CHECKS: &[Check] = &[
    ("mmap-private", mmap_private),
    ("tmpfile-storm", tmpfile_storm),
    ("rename-storm", rename_storm),
    ("mixed-opens", mixed_opens),
    ("fsync-and-rename", fsync_and_rename),
];

/// How often each of several does its part.
const ROUNDS: usize = 100;

/// What is written to a private mapping is seen there only, also by a process that maps the file at the same time.
fn mmap_private(dir: &Path) {
    let path = dir.join("file");
    fs::write(&path, [b'.'; 8192]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let shared = Mapping::new(&file, 8192).unwrap();
    let mut private = Mapping::private(&file, 8192).unwrap();
    private.write(4000, b"mine alone");
    Role::start(&["map-write", path.to_str().unwrap(), "100", "for all"]).finish();
    assert_eq!((shared.read(100, 7), shared.read(4000, 10)), (b"for all".to_vec(), vec![b'.'; 10]));
    assert_eq!(private.read(4000, 10), b"mine alone");
    // Read-only files can be mapped so, too.
    let mut private = Mapping::private(&File::open(&path).unwrap(), 8192).unwrap();
    private.write(0, b"mine");
    private.sync();
    drop((private, shared, file));
    let bytes = fs::read(&path).unwrap();
    assert_eq!(&bytes[100..107], b"for all");
    assert!(bytes[..100].iter().chain(&bytes[107..]).all(|&byte| byte == b'.'));
}

/// Files without a name get one, each once, with all that was written before.
fn tmpfile_storm(dir: &Path) {
    let unnamed = |flags| openat(CWD, dir, OFlags::TMPFILE | OFlags::RDWR | flags, Mode::from_raw_mode(0o644));
    let name = |file: &File, to: &Path| linkat(file.as_fd(), "", CWD, to, AtFlags::EMPTY_PATH);
    std::thread::scope(|scope| {
        for who in 0..4 {
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut file = File::from(unnamed(OFlags::empty()).unwrap());
                    file.write_all(format!("{who} {round}").as_bytes()).unwrap();
                    name(&file, &dir.join(format!("{who}.{round}"))).unwrap();
                    // All want this name; one gets it.
                    match name(&file, &dir.join(format!("all.{round}"))) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert_eq!(fs::read_dir(dir).unwrap().count(), 5 * ROUNDS);
    for round in 0..ROUNDS {
        for who in 0..4 {
            let text = fs::read_to_string(dir.join(format!("{who}.{round}"))).unwrap();
            assert_eq!(text, format!("{who} {round}"));
        }
        let text = fs::read_to_string(dir.join(format!("all.{round}"))).unwrap();
        assert!(text.ends_with(&format!(" {round}")), "{text}");
    }
    let file = File::from(unnamed(OFlags::EXCL).unwrap());
    assert_eq!(errno(name(&file, &dir.join("excluded"))), libc::ENOENT);
}

/// Files that several rename at once, within and between directories, swapped or not: none is lost, none is doubled, and
/// who opens one finds all of it.
fn rename_storm(dir: &Path) {
    const FILES: usize = 12;
    let place = |number: usize| dir.join(format!("d{}/n{}", number % 3, number / 3));
    for directory in 0..3 {
        fs::create_dir(dir.join(format!("d{directory}"))).unwrap();
    }
    for number in 0..FILES {
        fs::write(place(number), format!("file {number} ").repeat(50)).unwrap();
    }
    let whole = |text: &str| {
        let number = text.split(' ').nth(1).unwrap();
        assert_eq!(text, format!("file {number} ").repeat(50));
        number.to_owned()
    };
    std::thread::scope(|scope| {
        for who in 0..4 {
            scope.spawn(move || {
                for round in 0..ROUNDS * 5 {
                    // Twice as many places as files, each pair visited by each of the threads in an order of its own.
                    let from = (round * 7 + who * 5) % (2 * FILES);
                    let to = (round * 11 + who * 3 + 1) % (2 * FILES);
                    let flags = [RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][(round + who) % 2];
                    match renameat_with(CWD, place(from), CWD, place(to), flags) {
                        Ok(()) | Err(Errno::NOENT | Errno::EXIST) => {}
                        Err(error) => panic!("{error}"),
                    }
                    match fs::read_to_string(place(to)) {
                        Ok(text) => drop(whole(&text)),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
                    }
                }
            });
        }
    });
    let mut found = Vec::new();
    for directory in 0..3 {
        for entry in fs::read_dir(dir.join(format!("d{directory}"))).unwrap() {
            found.push(whole(&fs::read_to_string(entry.unwrap().path()).unwrap()));
        }
    }
    let numbers: BTreeSet<_> = found.iter().collect();
    assert_eq!((found.len(), numbers.len()), (FILES, FILES), "{found:?}");
}

/// The bytes of a file that one of the processes of [`mixed_opens`] has for itself.
const ZONE: usize = 64 << 10;
/// Its ways to open the file.
const WAYS: [&str; 5] = ["buffered", "direct", "mapped", "synchronous", "read-only-first"];

/// A process per way of opening a file, all on one file at the same time.
fn mixed_opens(dir: &Path) {
    let path = dir.join("file");
    File::create(&path).unwrap().set_len((WAYS.len() * ZONE) as u64).unwrap();
    let path = path.to_str().unwrap();
    let start = |(zone, way): (usize, &&str)| Role::start(&["mixed", path, way, &zone.to_string()]);
    let mut roles: Vec<Role> = WAYS.iter().enumerate().map(start).collect();
    roles.iter_mut().for_each(Role::finish);
    let bytes = fs::read(path).unwrap();
    for (zone, bytes) in bytes.chunks(ZONE).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == pattern(ROUNDS - 1, zone)), "zone of {}", WAYS[zone]);
    }
}

fn pattern(round: usize, zone: usize) -> u8 {
    u8::try_from((round * 5 + zone) % 251).unwrap()
}

/// Writes a zone of the file in one way, and reads it in all others, over and over.
pub fn mixed(path: &str, way: &str, zone: usize) {
    let open = |flags| File::options().read(true).write(true).custom_flags(flags).open(path).unwrap();
    let at = (zone * ZONE) as u64;
    for round in 0..ROUNDS {
        let byte = pattern(round, zone);
        let (buffer, range) = aligned(byte, ZONE);
        let data = &buffer[range];
        match way {
            "direct" => open(libc::O_DIRECT).write_all_at(data, at).unwrap(),
            "synchronous" => open(libc::O_SYNC).write_all_at(data, at).unwrap(),
            "mapped" => Mapping::new(&open(0), (zone + 1) * ZONE).unwrap().write(zone * ZONE, data),
            "read-only-first" => {
                let reader = File::open(path).unwrap();
                let _ = reader.read_at(&mut [0; 16], at).unwrap();
                open(0).write_all_at(data, at).unwrap();
            }
            _ => open(0).write_all_at(data, at).unwrap(),
        }
        let check = |bytes: &[u8], how: &str| {
            let wrong = bytes.iter().position(|&found| found != byte);
            assert_eq!(wrong, None, "round {round}: written {way}, read {how}");
        };
        let (mut buffer, range) = aligned(0, ZONE);
        open(libc::O_DIRECT).read_exact_at(&mut buffer[range.clone()], at).unwrap();
        check(&buffer[range], "direct");
        let mut buffer = vec![0; ZONE];
        File::open(path).unwrap().read_exact_at(&mut buffer, at).unwrap();
        check(&buffer, "buffered");
        if round % 10 == 0 {
            check(&Mapping::new(&open(0), (zone + 1) * ZONE).unwrap().read(zone * ZONE, ZONE), "mapped");
        }
    }
}

/// Makes, writes, lists, renames and removes the same few names as others do at the same time, perhaps through another
/// mount. What the others make of it may come as an error; nothing else may.
pub fn storm(directory: &Path, seed: u64, seconds: f64) {
    let begin = std::time::Instant::now();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut any = |below: u64| {
        // Xorshift: the same storm each time, and no two seeds alike.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    while begin.elapsed().as_secs_f64() < seconds {
        let mut place = || directory.join(format!("d{}", any(3))).join(format!("n{}", any(6)));
        let (one, two) = (place(), place());
        let outcome = match any(7) {
            0 => fs::create_dir_all(one.parent().unwrap()),
            1 => fs::write(&one, vec![b'x'; usize::try_from(any(9000)).unwrap()]),
            2 => fs::rename(&one, &two),
            3 => renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE).map_err(Into::into),
            4 => fs::remove_file(&one),
            5 => fs::read_dir(one.parent().unwrap()).map(|entries| assert!(entries.count() < 1000)),
            _ => fs::read(&one).map(drop),
        };
        if let Err(error) = outcome {
            let expected = [ErrorKind::NotFound, ErrorKind::AlreadyExists];
            // A name that the other mount has just taken away may be known by an inode that is gone already.
            let stale = error.raw_os_error() == Some(libc::ESTALE);
            assert!(stale || expected.contains(&error.kind()), "{one:?} {two:?}: {error}");
        }
    }
}

/// How programs replace a file for good: write aside, sync, rename over, sync the directory.
fn fsync_and_rename(dir: &Path) {
    let path = dir.join("settings");
    fs::write(&path, "0").unwrap();
    std::thread::scope(|scope| {
        for who in 0..3 {
            let path: PathBuf = path.clone();
            scope.spawn(move || {
                for round in 0..ROUNDS / 4 {
                    let aside = dir.join(format!("aside.{who}"));
                    let mut file = File::create(&aside).unwrap();
                    file.write_all(&vec![b'0' + who; 3000 + round]).unwrap();
                    file.sync_all().unwrap();
                    fs::rename(&aside, &path).unwrap();
                    File::open(dir).unwrap().sync_all().unwrap();
                    let bytes = fs::read(&path).unwrap();
                    assert!(bytes.len() >= 3000 && bytes.iter().all(|&byte| byte == bytes[0]), "a torn file");
                }
            });
        }
    });
}
