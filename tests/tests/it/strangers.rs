//! Permissions in a mount or guest of users who are neither root nor the owner: no more than in the shared directory.

use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ferry_driver::{Caller, Config, Driver, INIT_FLAGS, ROOT};
use ferry_tests::mounts::{Cell, MountOptions, Mounted, Source, Transport};
use ferry_tests::ninep::NinePShare;
use ferry_tests::{Cache, GuestResult, Options, Place, Share};
use ferry_virtiofs::Acl;
use ferry_wire::fuse::InitFlags;
use ferry_wire::fuse::abi::{self, IoctlIn};
use rustix::fs::{CWD, RenameFlags, XattrFlags, renameat_with};
use rustix::io::Errno;
use rustix::ioctl::Opcode;
use rustix::process::{Gid, Uid};
use zerocopy::IntoBytes;

const USER: u32 = 1000;
const GROUP: u32 = 3000;
/// The duration of a race.
const RACE: Duration = Duration::from_secs(2);
/// The maximum duration, on a busy machine, until each outcome of a race has been seen.
const RACE_MAX: Duration = Duration::from_secs(120);
const ROADS: [Transport; 2] = [Transport::Auto, Transport::Passthrough];

/// A mount with everything cached, and without notifications of other changes.
fn cached(road: Transport, args: &[&str]) -> Option<Mounted> {
    let cell = Cell { source: Source::Dir, road, cache: "auto", writeback: false };
    let mut keeps = vec!["--entry-timeout", "30", "--attr-timeout", "30", "--watch", "never"];
    if !args.contains(&"--negative-timeout") {
        keeps.extend(["--negative-timeout", "30"]);
    }
    let args = keeps.iter().chain(args).map(ToString::to_string).collect();
    let mounted = Mounted::with(&cell, &MountOptions { args, ..MountOptions::default() })?;
    fs::set_permissions(&mounted.below, Permissions::from_mode(0o777)).unwrap();
    Some(mounted)
}

/// Runs `act` as this user, on a separate thread without capabilities.
fn as_user<T: Send>(uid: u32, gid: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let run = || {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            rustix::thread::set_thread_groups(&[]).unwrap();
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            act()
        };
        scope.spawn(run).join().unwrap()
    })
}

fn kind<T>(result: std::io::Result<T>) -> Result<(), Errno> {
    result.map(drop).map_err(|error| Errno::from_io_error(&error).unwrap())
}

/// Replaces a name by a file of this user with this mode, as another process would.
fn put(path: &Path, uid: u32, mode: u32) {
    let draft = path.with_file_name(".draft");
    fs::write(&draft, "secret").unwrap();
    chown(&draft, Some(uid), Some(uid)).unwrap();
    fs::set_permissions(&draft, Permissions::from_mode(mode)).unwrap();
    fs::rename(&draft, path).unwrap();
}

fn ioctl_flags<const NUMBER: Opcode>(file: &File, mut flags: u64) -> Result<u64, Errno> {
    // SAFETY: each of these commands takes an int, or a long at most, of the eight bytes of `flags`.
    unsafe {
        let call = rustix::ioctl::Updater::<NUMBER, u64>::new(&mut flags);
        rustix::ioctl::ioctl(file, call)?;
    }
    Ok(flags)
}

const GETFLAGS: Opcode = 0x8008_6601;
const SETFLAGS: Opcode = 0x4008_6602;
const GETFLAGS_32: Opcode = 0x8004_6601;
const SETFLAGS_32: Opcode = 0x4004_6602;
const NO_DUMP: u64 = 0x40;
const IMMUTABLE: u64 = 0x10;
const APPEND: u64 = 0x20;

#[test]
fn flags_of_files_are_set_through_a_mount_by_their_owner_and_by_root() {
    for road in ROADS {
        let Some(mounted) = cached(road, &[]) else { return };
        for (name, uid) in [("roots", 0), ("users", USER)] {
            put(&mounted.below.join(name), uid, 0o644);
            let (path, below) = (mounted.site.path.join(name), mounted.below.join(name));
            let now = || ioctl_flags::<GETFLAGS>(&File::open(&below).unwrap(), 0).unwrap() & 0xffff_ffff;
            let old = now();
            let try_all = || {
                // Through a read-only descriptor; the commands of 32-bit programs are refused for all users.
                let file = File::open(&path).unwrap();
                let long = [NO_DUMP, IMMUTABLE, APPEND].map(|flag| {
                    let set = ioctl_flags::<SETFLAGS>(&file, old | flag).map(drop);
                    if set.is_ok() {
                        ioctl_flags::<SETFLAGS>(&file, old).unwrap();
                    }
                    set
                });
                let short = ioctl_flags::<SETFLAGS_32>(&file, old | NO_DUMP).map(drop);
                (long, short, ioctl_flags::<GETFLAGS_32>(&file, 0).map(drop))
            };
            let (yes, no, unknown) = (Ok(()), Err(Errno::PERM), Err(Errno::NOTTY));
            assert_eq!(try_all(), ([yes; 3], unknown, unknown), "{road:?}, {name}, root");
            let own = if uid == USER { yes } else { no };
            assert_eq!(as_user(USER, USER, try_all), ([own, no, no], unknown, unknown), "{road:?}, {name}, user");
            assert_eq!(as_user(USER + 1, USER, try_all), ([no; 3], unknown, unknown), "{road:?}, {name}, stranger");
            assert_eq!(now(), old, "{road:?}, {name}");
        }
        mounted.finish();
    }
}

/// The request that guests before Linux 5.13 send for any of their users.
#[test]
fn flags_of_files_are_set_by_a_guest_for_their_owner_and_for_root() {
    let share = Share::new(Cache::Auto);
    put(&share.path.join("f"), USER, 0o644);
    let mut driver = connect(&share, INIT_FLAGS);
    let node = driver.lookup(ROOT, "f").unwrap().nodeid;
    let fh = driver.open(node, 0).unwrap().fh;
    let mut ioctl = |uid, number: Opcode, input: &[u8], out: u32| {
        driver.set_caller(Caller { uid, gid: uid, pid: 1 });
        let args =
            IoctlIn { fh, cmd: number, in_size: u32::try_from(input.len()).unwrap(), out_size: out, ..IoctlIn::ZERO };
        let reply = driver.ask(abi::Opcode::Ioctl, node, &[args.as_bytes(), input], &[], 64);
        reply.map(drop).map_err(|error| error.errno().unwrap())
    };
    let below = File::open(share.path.join("f")).unwrap();
    let now = || ioctl_flags::<GETFLAGS>(&below, 0).unwrap() & 0xffff_ffff;
    let old = now();
    for (uid, may, may_all) in
        [(0, true, true), (USER, true, false), (USER + 1, false, false), (u32::MAX, false, false)]
    {
        let outcome = |may| if may { Ok(()) } else { Err(libc::EPERM) };
        assert_eq!(ioctl(uid, GETFLAGS, &[], 4), Ok(()), "{uid}");
        for (flag, may) in [(NO_DUMP, may), (IMMUTABLE, may_all), (APPEND, may_all)] {
            for flags in [old | flag, old] {
                let set = ioctl(uid, SETFLAGS, &u32::try_from(flags).unwrap().to_ne_bytes(), 0);
                // Unsupported flags may be missing.
                let may = if flags == old && flag != NO_DUMP { may || uid == USER } else { may };
                assert_eq!(set, outcome(may), "{uid}, {flag:x}");
            }
        }
        for (number, input, out) in [(SETFLAGS_32, &[0; 4][..], 0), (GETFLAGS_32, &[], 4)] {
            assert_eq!(ioctl(uid, number, input, out), Err(libc::ENOTTY), "{uid}, {number:x}");
        }
    }
    assert_eq!(now(), old);
}

fn connect(share: &Share, flags: InitFlags) -> Driver {
    let config = Config { queues: 1, memory_bytes: 16 << 20, ..Config::default() };
    let mut driver = Driver::connect(&share.socket, config).unwrap();
    driver.init_with(flags, 36).unwrap();
    driver
}

/// Opens a file with `O_CREAT`, after another process has created it.
fn open_or_make(path: &Path) -> std::io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

#[test]
fn files_created_since_the_kernels_lookup_are_checked_at_open() {
    for road in ROADS {
        let Some(mounted) = cached(road, &[]) else { return };
        let at = |name: &str| (mounted.site.path.join(name), mounted.below.join(name));
        for (name, mode, outcome) in [("secret", 0o600, Err(Errno::ACCESS)), ("shown", 0o666, Ok(()))] {
            let (path, below) = at(name);
            let truncate = || File::options().write(true).create(true).truncate(true).open(&path);
            // The kernel caches that the name does not exist.
            assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
            put(&below, 0, mode);
            assert_eq!(as_user(USER, USER, || kind(open_or_make(&path))), outcome, "{road:?}, {name}");
            assert_eq!(fs::read(&below).unwrap(), b"secret", "{road:?}, {name}");
            let (path, below) = at(&format!("{name}-truncated"));
            let truncate_other = || File::options().write(true).create(true).truncate(true).open(&path);
            assert_eq!(fs::metadata(&path).unwrap_err().kind(), ErrorKind::NotFound);
            put(&below, 0, mode);
            assert_eq!(as_user(USER, USER, || kind(truncate_other())), outcome, "{road:?}, {name}");
            assert_eq!(fs::metadata(&below).unwrap().len(), if outcome.is_ok() { 0 } else { 6 }, "{road:?}, {name}");
            assert_eq!(as_user(USER, USER, || kind(truncate())), outcome, "{road:?}, {name}");
        }
        mounted.finish();
    }
}

/// A file is created while others open it with `O_CREAT`.
#[test]
fn opening_a_file_created_concurrently_succeeds() {
    let Some(mounted) = cached(Transport::Auto, &["--negative-timeout", "0"]) else { return };
    /// Ends the other thread, also when the test fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (done, round) = (AtomicBool::new(false), AtomicUsize::new(0));
    // One in ten is accessible to root only.
    let is_roots = |path: &Path| path.as_os_str().as_encoded_bytes().ends_with(b"7");
    let name = |round: usize| format!("f{}", round / 8);
    let (mut created, mut found, mut refused) = (0, 0, 0);
    std::thread::scope(|scope| {
        let _stop = Stop(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // During the other thread's work in this round.
                let path = mounted.below.join(name(round.load(Ordering::Relaxed)));
                if !path.exists() {
                    put(&path, 0, if is_roots(&path) { 0o600 } else { 0o666 });
                }
            }
        });
        let start = Instant::now();
        while start.elapsed() < RACE || created == 0 || found == 0 {
            assert!(start.elapsed() < RACE_MAX, "the race was not run: {created} created, {found} found");
            let path = mounted.site.path.join(name(round.load(Ordering::Relaxed)));
            let (outcome, owner) = as_user(USER, USER, || {
                let made = open_or_make(&path);
                let owner = made.as_ref().ok().map(|file| (file.metadata().unwrap().uid(), read(file)));
                (kind(made), owner)
            });
            let is_other = owner.as_ref().is_some_and(|(uid, _)| *uid == 0);
            match outcome {
                Ok(()) if is_other => found += 1,
                Ok(()) => created += 1,
                Err(Errno::ACCESS) => refused += 1,
                Err(error) => panic!("{error}, after {created} created, {found} found, {refused} refused"),
            }
            let leaks = is_roots(&path) && owner.is_some_and(|(_, text)| is_other || !text.is_empty());
            assert!(!leaks, "a file of root's was opened");
            round.fetch_add(1, Ordering::Relaxed);
        }
    });
    println!("{created} created, {found} found, {refused} refused");
    mounted.finish();
}

fn read(file: &File) -> String {
    let mut text = String::new();
    let mut file = file;
    file.read_to_string(&mut text).unwrap();
    text
}

/// Creates a sticky directory with a file of the user that the kernel has cached.
fn sticky(mounted: &Mounted, number: usize) -> (PathBuf, PathBuf) {
    let dir = format!("tmp{number}");
    let (path, below) = (mounted.site.path.join(&dir), mounted.below.join(&dir));
    fs::create_dir(&below).unwrap();
    fs::set_permissions(&below, Permissions::from_mode(0o1777)).unwrap();
    put(&below.join("mine"), USER, 0o600);
    put(&below.join("own"), USER, 0o600);
    for name in ["mine", "own"] {
        assert_eq!(fs::metadata(path.join(name)).unwrap().uid(), USER);
    }
    (path, below)
}

#[test]
fn sticky_directories_protect_files_replaced_meanwhile() {
    type Act = fn(&Path) -> std::io::Result<()>;
    let acts: [(&str, Act); 5] = [
        ("unlink", |dir| fs::remove_file(dir.join("mine"))),
        ("rename from", |dir| fs::rename(dir.join("mine"), dir.join("new"))),
        ("rename over", |dir| fs::rename(dir.join("own"), dir.join("mine"))),
        ("exchange", |dir| Ok(renameat_with(CWD, dir.join("own"), CWD, dir.join("mine"), RenameFlags::EXCHANGE)?)),
        ("exchange with", |dir| Ok(renameat_with(CWD, dir.join("mine"), CWD, dir.join("own"), RenameFlags::EXCHANGE)?)),
    ];
    for road in ROADS {
        let Some(mounted) = cached(road, &[]) else { return };
        for (number, (what, act)) in acts.into_iter().enumerate() {
            let (path, below) = sticky(&mounted, number);
            put(&below.join("mine"), 0, 0o600);
            let roots = fs::metadata(below.join("mine")).unwrap().ino();
            // The same as in the directory itself.
            assert_eq!(as_user(USER, USER, || kind(act(&below))), Err(Errno::PERM), "{what}");
            assert_eq!(as_user(USER, USER, || kind(act(&path))), Err(Errno::PERM), "{road:?}, {what}");
            assert_eq!(fs::metadata(below.join("mine")).unwrap().ino(), roots, "{road:?}, {what}");
            // Root may, and the user with its own files.
            assert_eq!(kind(act(&path)), Ok(()), "{road:?}, {what}, root");
            let (path, below) = sticky(&mounted, 10 + number);
            put(&below.join("mine"), USER, 0o600);
            assert_eq!(as_user(USER, USER, || kind(act(&path))), Ok(()), "{road:?}, {what}, its own");
        }
        // A directory replaced by a directory.
        let (path, below) = sticky(&mounted, 20);
        let replace = |uid| {
            fs::create_dir(below.join("draft")).unwrap();
            chown(below.join("draft"), Some(uid), None).unwrap();
            fs::rename(below.join("draft"), below.join("dir")).unwrap();
        };
        replace(USER);
        fs::metadata(path.join("dir")).unwrap();
        replace(0);
        assert_eq!(as_user(USER, USER, || kind(fs::remove_dir(path.join("dir")))), Err(Errno::PERM), "{road:?}");
        assert!(below.join("dir").exists(), "{road:?}");
        // A name that the kernel has cached as absent.
        assert_eq!(fs::metadata(path.join("free")).unwrap_err().kind(), ErrorKind::NotFound);
        put(&below.join("free"), 0, 0o600);
        let over = || kind(fs::rename(path.join("own"), path.join("free")));
        assert_eq!(as_user(USER, USER, over), Err(Errno::PERM), "{road:?}");
        assert_eq!(fs::metadata(below.join("free")).unwrap().uid(), 0, "{road:?}");
        mounted.finish();
    }
}

/// A user with a capability that only the client's kernel knows.
#[test]
fn the_capability_overrides_sticky_directories() {
    let Some(mounted) = cached(Transport::Auto, &[]) else { return };
    let (path, below) = sticky(&mounted, 0);
    let with_fowner = |script: &str| {
        let mut command = Command::new("setpriv");
        let user = USER + 1;
        command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".into()]);
        command.args(["--inh-caps=+fowner", "--ambient-caps=+fowner", "sh", "-euc", script]).current_dir(&path);
        let out = command.output().unwrap();
        assert!(out.status.success(), "{script}: {out:?}");
    };
    with_fowner("rm -f mine; mv own moved");
    assert!(!below.join("mine").exists() && below.join("moved").exists());
    put(&below.join("moved"), 0, 0o600);
    put(&below.join("other"), 0, 0o600);
    with_fowner("mv -f moved other; rm -f other");
    assert!(!below.join("moved").exists() && !below.join("other").exists());
    mounted.finish();
}

/// An ACL without permissions for the owning group, although the mask, which Linux shows as the group's permissions, allows reads and
/// writes; and one that denies everything to a user, but not to others.
fn files_with_acls(dir: &Path) -> bool {
    const NOBODY: u32 = u32::MAX;
    let acl = |entries: &[(u16, u16, u32)]| {
        let mut bytes = 2_u32.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            bytes.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
            bytes.extend(id.to_le_bytes());
        }
        bytes
    };
    let (owner, mask) = ((1, 6, NOBODY), (0x10, 6, NOBODY));
    let group = acl(&[owner, (4, 0, NOBODY), mask, (0x20, 0, NOBODY)]);
    let user = acl(&[owner, (2, 0, USER), (4, 4, NOBODY), mask, (0x20, 4, NOBODY)]);
    for (name, value) in [("group", group), ("user", user)] {
        put(&dir.join(name), 0, 0o600);
        chown(dir.join(name), None, Some(GROUP)).unwrap();
        let set = rustix::fs::setxattr(dir.join(name), "system.posix_acl_access", &value, XattrFlags::empty());
        if set == Err(Errno::OPNOTSUPP) {
            ferry_skip::skip!("{} has no ACLs", dir.display());
            return false;
        }
        set.unwrap();
        assert_ne!(fs::metadata(dir.join(name)).unwrap().mode() & 0o060, 0, "the mask is not shown");
    }
    true
}

#[test]
fn mounts_without_acls_grant_no_more_than_the_acl() {
    let options: [&[&str]; 4] = [
        &[],
        &["--no-xattr"],
        &["--xattrmap", ":map::user.virtiofs.:"],
        &["--xattrmap", ":unsupported:all:system.posix_acl_access:system.posix_acl_access: :ok:all:::"],
    ];
    for args in options {
        for lists_first in [false, true] {
            let Some(mounted) = cached(Transport::Auto, args) else { return };
            if !files_with_acls(&mounted.below) {
                return;
            }
            if lists_first {
                // The attributes come with the listing, except for the first file's.
                assert!(mounted.site.sh("ls -l", Duration::from_secs(60)).status == 0);
            }
            for (name, uid, gid) in [("group", USER, GROUP), ("user", USER, GROUP), ("user", USER, USER)] {
                for dir in [&mounted.below, &mounted.site.path] {
                    let opened = as_user(uid, gid, || kind(File::open(dir.join(name))));
                    assert_eq!(opened, Err(Errno::ACCESS), "{args:?}, {lists_first}, {name}, {}", dir.display());
                }
            }
            // Root and the owner's permissions are unaffected.
            assert_eq!(fs::read(mounted.site.path.join("group")).unwrap(), b"secret");
            let mode = fs::metadata(mounted.site.path.join("group")).unwrap().mode() & 0o777;
            assert_eq!(mode, if args.is_empty() { 0o660 } else { 0o600 }, "{args:?}");
            mounted.finish();
        }
    }
}

#[test]
fn modes_for_guests_without_acls_grant_no_more_than_the_acl() {
    let acl = InitFlags::POSIX_ACL;
    let plain = Options { cache: Cache::Auto, ..Options::default() };
    for (options, flags, shown) in [
        (plain.clone(), INIT_FLAGS | acl, [0o660, 0o664]),
        // Three cases: the guest's kernel has no ACLs, they are not offered, or there are no extended attributes.
        (plain.clone(), INIT_FLAGS - acl, [0o600, 0o600]),
        (Options { posix_acl: Acl::Never, ..plain.clone() }, INIT_FLAGS | acl, [0o600, 0o600]),
        (Options { xattr: false, ..plain }, INIT_FLAGS | acl, [0o600, 0o600]),
    ] {
        let share = Share::with(Place::Disk, options);
        if !files_with_acls(&share.path) {
            return;
        }
        let mut driver = connect(&share, flags);
        let names = ["group", "user"];
        let mode = |mode: u32| mode & 0o777;
        let fh = driver.opendir(ROOT).unwrap().fh;
        let listed = driver.readdirplus(ROOT, fh, 0, 4096).unwrap();
        for (name, shown) in names.into_iter().zip(shown) {
            let entry = driver.lookup(ROOT, name).unwrap();
            let attr = driver.getattr(entry.nodeid).unwrap().attr;
            assert_eq!([entry.attr.mode, attr.mode].map(mode), [shown; 2], "{name}");
            let listed = listed.iter().find(|listed| listed.name == name.as_bytes()).unwrap();
            if let Some(entry) = &listed.entry {
                assert_eq!(mode(entry.attr.mode), shown, "{name}, listed");
            }
        }
        assert!(listed.iter().any(|listed| listed.entry.is_some()), "no entry was listed");
        // A mode that the owner sets is set unchanged.
        let node = driver.lookup(ROOT, "group").unwrap().nodeid;
        let set = abi::SetattrIn { valid: abi::FATTR_MODE, mode: 0o640, ..abi::SetattrIn::ZERO };
        let set = driver.setattr(node, &set).unwrap().attr.mode;
        assert_eq!(mode(set), if shown[0] == 0o660 { 0o640 } else { 0o600 });
        assert_eq!(mode(fs::metadata(share.path.join("group")).unwrap().mode()), 0o640);
    }
}

/// The number of files that guest and host create concurrently.
const FILES: usize = 300;
/// The maximum number of times that a guest polls for the signal to continue.
const SIGNALS: usize = 600;

/// The script of a guest's user, after the host has replaced cached files by files of root; and files that both create
/// concurrently.
const IN_A_GUEST: &str = "
    as() { gid=$1; shift; setpriv --reuid 1000 --regid $gid --clear-groups sh -c \"$*\" 2>&1 || true; }
    as 1000 'cat tmp/mine >/dev/null; cat fresh 2>/dev/null'
    touch ready
    n=0; until [ -e go$n ]; do n=$((n+1)); sleep 0.1; done
    as 1000 'true >>fresh'
    as 1000 'true >>fresh; cat fresh'
    as 1000 'rm -f tmp/mine'
    as 3000 'cat group; true >>group'
    as 1000 'i=0; while [ $i -lt 300 ]; do true >>race/f$i || echo f$i failed; i=$((i+1)); done'";

/// Makes the host's changes for [`IN_A_GUEST`], and checks the result; `None`: there are no ACLs.
fn beside_a_guest(path: &Path, guest: impl FnOnce(&str) -> GuestResult) -> Option<String> {
    for (dir, mode) in [("tmp", 0o1777), ("race", 0o777)] {
        fs::create_dir(path.join(dir)).unwrap();
        fs::set_permissions(path.join(dir), Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    put(&path.join("tmp/mine"), USER, 0o600);
    if !files_with_acls(path) {
        return None;
    }
    let done = AtomicBool::new(false);
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            let until = |file: &str| {
                while !path.join(file).exists() && !done.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_micros(100));
                }
            };
            until("ready");
            put(&path.join("tmp/mine"), 0, 0o600);
            put(&path.join("fresh"), 0, 0o600);
            // A guest that caches everything looks up each name once.
            (0..SIGNALS).for_each(|number| fs::write(path.join(format!("go{number}")), "").unwrap());
            for file in 1..FILES {
                until(&format!("race/f{}", file - 1));
                let made = path.join(format!("race/f{file}"));
                if !made.exists() {
                    put(&made, 0, 0o666);
                }
            }
        });
        let ran = guest(IN_A_GUEST);
        done.store(true, Ordering::Relaxed);
        ran
    });
    assert_eq!(ran.status, 0, "{ran:?}");
    assert!(!ran.out.contains("secret") && !ran.out.contains("failed"), "{}", ran.out);
    for file in ["tmp/mine", "fresh", "group"] {
        assert_eq!(fs::read(path.join(file)).unwrap(), b"secret", "{file}");
        assert_eq!(fs::metadata(path.join(file)).unwrap().uid(), 0, "{file}");
    }
    Some(ran.out)
}

#[test]
#[ignore = "long: make test-all"]
fn users_of_a_guest_do_no_more_than_in_the_directory() {
    for cache in [Cache::Auto, Cache::Always] {
        let options = Options { cache, xattr: false, ..Options::default() };
        let share = Share::with(Place::Disk, options);
        let Some(said) = beside_a_guest(&share.path, |script| share.sh(script)) else { return };
        assert!(said.contains("cannot remove 'tmp/mine': Operation not permitted"), "{said}");
        assert_eq!(said.matches("Permission denied").count(), 5, "{said}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn users_of_a_guest_by_9p_do_no_more_than_in_the_directory() {
    for mode in ["msize=1048576,cache=none", "msize=1048576,cache=loose"] {
        let Some(share) = NinePShare::with(Place::Disk, ferry_ninep::Options::default()) else { return };
        let Some(said) = beside_a_guest(&share.path, |script| share.sh(mode, script)) else { return };
        // With `loose` Linux's client keeps its cached names.
        let is_loose = mode.ends_with("loose");
        let (error, denied) = if is_loose { ("Stale file handle", 2) } else { ("Operation not permitted", 5) };
        assert!(said.contains(&format!("cannot remove 'tmp/mine': {error}")), "{mode}: {said}");
        assert_eq!(said.matches("Permission denied").count(), denied, "{mode}: {said}");
    }
}
