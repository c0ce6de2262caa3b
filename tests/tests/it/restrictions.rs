//! Options that restrict clients: each is enforced, whichever user starts the server, or the server does not start.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_9p_client::{Cache, Client, Options, Unix};
use ferry_tests::sandboxed::{Served, USER, UserHome, is_root};
use ferry_vfs::{Caller, CreateArgs, Errno, FileSystem, Ino, IoRange, Name, OFlags, SetAttr, XattrFlags};

/// A group of another user's, and a user of every host.
const GROUP: u32 = 4321;
const DAEMON: u32 = 1;

/// A directory with files of the server's user, of root, and of a group.
fn tree_of(user: u32) -> UserHome {
    let home = UserHome::of(user);
    home.make("shared", |path| fs::create_dir(path).unwrap());
    fs::set_permissions(home.at("shared"), fs::Permissions::from_mode(0o777)).unwrap();
    for (name, uid, gid, mode) in [
        ("own", user, user, 0o600),
        ("roots", 0, 0, 0o600),
        ("groups", 0, GROUP, 0o660),
        ("users", USER, USER, 0o600),
        ("daemons", DAEMON, DAEMON, 0o600),
    ] {
        let path = home.at("shared").join(name);
        fs::write(&path, "text").unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    home
}

/// The program, started by a user who is in further groups.
fn command(home: &UserHome, groups: &[u32], line: &str) -> Command {
    let mut command = Command::new("setpriv");
    let user = home.user().to_string();
    command.args(["--reuid", &user, "--regid", &user]);
    match groups {
        [] => command.arg("--clear-groups"),
        groups => {
            let list: Vec<String> = groups.iter().map(ToString::to_string).collect();
            command.args(["--groups", &list.join(",")])
        }
    };
    command.arg(home.at("ferry-copy")).args(line.split_whitespace()).current_dir(home.path());
    command.env("XDG_RUNTIME_DIR", home.path()).env_remove("FERRY_LOG");
    command
}

/// The permissions of a 9P client with this user id.
struct Attempts {
    client: Client,
    cx: Caller<'static>,
}

impl Attempts {
    fn of(served: &Served, uid: u32) -> Result<Self, ferry_9p_client::Error> {
        let options = Options { uid, cache: Cache::None, ..Options::default() };
        let client = Client::connect(Arc::new(Unix(served.home.at("s"))), options)?;
        Ok(Self { client, cx: Caller { uid, gid: uid, ..Caller::default() } })
    }

    fn find(&self, name: &str) -> Result<Ino, Errno> {
        self.client.lookup(&self.cx, Ino::ROOT, Name::new(name.as_bytes()).unwrap()).map(|entry| entry.ino)
    }

    fn writes(&self, name: &str) -> Result<(), Errno> {
        let ino = self.find(name)?;
        let handle = self.client.open(&self.cx, ino, OFlags::RDWR)?;
        let at = IoRange { ino, handle, offset: 0, len: 3, flags: OFlags::RDWR, clear_privileges: false, owner: None };
        let written = self.client.write(&self.cx, &at, &mut &b"new"[..]).map(drop);
        self.client.release(&self.cx, ino, handle);
        written
    }

    fn makes(&self, name: &str) -> Result<(), Errno> {
        let new = CreateArgs { mode: 0o104_755, umask: 0, rdev: 0 };
        self.client.mknod(&self.cx, Ino::ROOT, Name::new(name.as_bytes()).unwrap(), &new).map(drop)
    }

    fn chmods(&self, name: &str) -> Result<(), Errno> {
        let set = SetAttr { mode: Some(0o666), ..SetAttr::default() };
        self.client.setattr(&self.cx, self.find(name)?, None, &set).map(drop)
    }

    fn sets_attribute(&self, name: &str) -> Result<(), Errno> {
        self.client.setxattr(&self.cx, self.find(name)?, b"user.a", b"1", XattrFlags::empty(), false)
    }
}

/// A restricted operation.
#[derive(Clone, Copy, Debug)]
enum Restriction {
    Attach,
    Write(&'static str),
    Make,
    Chmod(&'static str),
    Attribute(&'static str),
}

impl Restriction {
    fn by(self, served: &Served, uid: u32) -> Result<(), Errno> {
        let attempts = match Attempts::of(served, uid) {
            Ok(attempts) => attempts,
            Err(ferry_9p_client::Error::Refused { errno, .. }) => return Err(errno),
            Err(error) => panic!("{self:?}: {error}"),
        };
        match self {
            Self::Attach => Ok(()),
            Self::Write(name) => attempts.writes(name),
            Self::Make => attempts.makes("new"),
            Self::Chmod(name) => attempts.chmods(name),
            Self::Attribute(name) => attempts.sets_attribute(name),
        }
    }
}

/// The outcome of something tried by a client of this number.
type Expected = (u32, Restriction, Result<(), Errno>);

/// What becomes of an option.
enum Outcome {
    Refused(&'static str),
    Kept(&'static [Expected]),
}
use Outcome::{Kept, Refused};

const ACCESS: Result<(), Errno> = Err(Errno::ACCESS);
const PERM: Result<(), Errno> = Err(Errno::PERM);
const ROFS: Result<(), Errno> = Err(Errno::ROFS);

fn check(user: u32, groups: &[u32], flags: &str, outcome: &Outcome) {
    let home = tree_of(user);
    let line = format!("share shared --9p unix:s --json {flags}");
    let mut command = command(&home, groups, &line);
    match outcome {
        Refused(words) => {
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success() && said.contains(words), "{user} {groups:?} {flags}: {said}");
        }
        Kept(expected) => {
            let served = home.serve_by(command);
            for (uid, what, outcome) in *expected {
                assert_eq!(
                    what.by(&served, *uid),
                    *outcome,
                    "{user} {groups:?} {flags}: {what:?} by {uid}: {}",
                    served.said()
                );
            }
            let made = served.home.at("shared/new");
            if let Ok(made) = fs::metadata(&made) {
                assert!(
                    made.uid() != 0 || user == 0 && expected.iter().all(|(uid, ..)| *uid == 0),
                    "{flags}: made as root"
                );
            }
            // Whatever users it has acted as, it ends with the process that was started.
            let inside = served.inside.pid();
            drop(served);
            let end = Instant::now() + Duration::from_secs(60);
            // Whoever inherits it may wait for it late, or never.
            let runs = |status: String| !status.contains("State:\tZ");
            while fs::read_to_string(format!("/proc/{}/status", inside.as_raw_nonzero())).is_ok_and(runs) {
                assert!(Instant::now() < end, "{user} {groups:?} {flags}: process {inside:?} is left");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// A server that may act as any user.
#[test]
fn root_keeps_restrictions_of_clients() {
    if !is_root() {
        return;
    }
    let cases: [(&str, Outcome); 10] = [
        (
            "--9p-users 1234:1234",
            Kept(&[
                (0, Restriction::Write("roots"), ACCESS),
                (0, Restriction::Write("groups"), ACCESS),
                (0, Restriction::Write("users"), Ok(())),
                (0, Restriction::Chmod("roots"), PERM),
                (0, Restriction::Make, Ok(())),
            ]),
        ),
        (
            "--9p-users only=1",
            Kept(&[
                (0, Restriction::Attach, PERM),
                (USER, Restriction::Attach, PERM),
                (DAEMON, Restriction::Write("roots"), ACCESS),
                (DAEMON, Restriction::Write("daemons"), Ok(())),
                (DAEMON, Restriction::Chmod("roots"), PERM),
                (DAEMON, Restriction::Make, Ok(())),
            ]),
        ),
        (
            "--9p-users only=0,1",
            Kept(&[(0, Restriction::Write("roots"), Ok(())), (DAEMON, Restriction::Write("roots"), ACCESS)]),
        ),
        ("--9p-users only=4000000000", Refused("has no user 4000000000")),
        ("--9p-users only=1 --map-user 5:5", Refused("write --9p-users UID:GID")),
        ("--9p-users 1234:1234 --modcaps=-setuid", Refused("cannot act as user 1234")),
        ("--9p-users 1234:1234 --modcaps=-setgid --sandbox none", Refused("cannot act as user 1234")),
        ("--9p-users only=1 --modcaps=-setuid", Refused("cannot act as user 1 ")),
        // Without the right to act as others, nothing is made that would be root's.
        ("--modcaps=-setuid", Kept(&[(USER, Restriction::Make, PERM)])),
        ("--modcaps=-setuid", Kept(&[(0, Restriction::Make, Ok(()))])),
    ];
    for (flags, outcome) in &cases {
        check(0, &[], flags, outcome);
    }
}

/// A server that may act as its own user only.
#[test]
fn a_plain_users_server_keeps_restrictions_of_clients_or_fails() {
    if !is_root() {
        return;
    }
    let cases: [(&[u32], &str, Outcome); 22] = [
        // What it may by itself.
        (
            &[],
            "",
            Kept(&[
                (0, Restriction::Write("roots"), ACCESS),
                (0, Restriction::Write("own"), Ok(())),
                (5, Restriction::Make, Ok(())),
            ]),
        ),
        (&[GROUP], "", Kept(&[(0, Restriction::Write("groups"), Ok(()))])),
        (&[], "--9p-users 5:6", Refused("cannot act as user 5 with group 6")),
        (&[], "--9p-users 5:6 --sandbox none", Refused("cannot act as user 5 with group 6")),
        (&[], "--9p-users 1234:6", Refused("cannot act as user 1234 with group 6")),
        (
            &[],
            "--9p-users 1234:1234",
            Kept(&[
                (0, Restriction::Write("roots"), ACCESS),
                (0, Restriction::Write("groups"), ACCESS),
                (0, Restriction::Write("own"), Ok(())),
                (0, Restriction::Chmod("roots"), PERM),
                (0, Restriction::Make, Ok(())),
            ]),
        ),
        (
            &[],
            "--9p-users 1234:1234 --sandbox none",
            Kept(&[(0, Restriction::Write("roots"), ACCESS), (0, Restriction::Make, Ok(()))]),
        ),
        (&[GROUP], "--9p-users 1234:1234", Refused("must have no further groups")),
        (&[GROUP], "--9p-users 1234:1234 --sandbox none", Refused("must have no further groups")),
        (
            &[GROUP],
            "--9p-users only=1234",
            Kept(&[
                (0, Restriction::Attach, PERM),
                (USER, Restriction::Write("groups"), Ok(())),
                (USER, Restriction::Write("roots"), ACCESS),
                (USER, Restriction::Chmod("groups"), PERM),
                (USER, Restriction::Make, Ok(())),
            ]),
        ),
        (
            &[GROUP],
            "--9p-users only=1234 --sandbox none",
            Kept(&[(0, Restriction::Attach, PERM), (USER, Restriction::Write("groups"), Ok(()))]),
        ),
        (&[], "--9p-users only=1", Refused("cannot act as user 1 ")),
        (&[], "--9p-users only=1234,1", Refused("cannot act as user 1 ")),
        (
            &[],
            "--read-only",
            Kept(&[
                (0, Restriction::Write("own"), ROFS),
                (0, Restriction::Make, ROFS),
                (0, Restriction::Chmod("own"), ROFS),
                (0, Restriction::Attribute("own"), ROFS),
            ]),
        ),
        (&[], "--no-xattr", Kept(&[(0, Restriction::Attribute("own"), Err(Errno::OPNOTSUPP))])),
        (&[], "--map-user 5:6", Refused("--map-user 5:6: new files would belong to 1234:1234")),
        (
            &[],
            "--map-user auto",
            Kept(&[(0, Restriction::Write("roots"), ACCESS), (0, Restriction::Write("own"), Ok(()))]),
        ),
        (&[], "--translate-uid forbid-guest:77:1", Kept(&[(77, Restriction::Make, PERM)])),
        (&[], "--socket-group 4321", Refused("cannot give s to the group 4321")),
        (&[], "--sandbox chroot", Refused("only root may change the root directory")),
        (&[], "--inode-file-handles mandatory", Refused("--inode-file-handles mandatory")),
        (&[], "--modcaps=-setuid:-setgid --9p-users 5:6", Refused("cannot act as user 5")),
    ];
    for (groups, flags, outcome) in &cases {
        check(USER, groups, flags, outcome);
    }
}

/// What the kernel is to hold a plain user's server to is in the kernel's tables.
#[test]
fn an_unprivileged_server_is_confined_by_its_options() {
    if !is_root() {
        return;
    }
    for (flags, seccomp) in
        [("--seccomp kill", "2"), ("--seccomp log", "2"), ("--modcaps=-chown", "2"), ("--seccomp none", "0")]
    {
        let home = tree_of(USER);
        let command = command(&home, &[], &format!("share shared --9p unix:s --json {flags}"));
        let served = home.serve_by(command);
        served.inside.all_are("Seccomp", seccomp);
        served.inside.all_are("CapEff", "0000000000000000");
        let mode = fs::metadata(served.home.at("s")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{flags}");
    }
    let home = tree_of(USER);
    let command = command(&home, &[GROUP], "share shared --9p unix:s --json --socket-group 4321");
    let served = home.serve_by(command);
    let socket = fs::metadata(served.home.at("s")).unwrap();
    assert_eq!((socket.gid(), socket.permissions().mode() & 0o777), (GROUP, 0o660));
}

/// Sources that check no permissions are not shared as if they did.
#[test]
fn a_source_without_permissions_is_not_shared_as_a_user() {
    if !is_root() {
        return;
    }
    let server = tree_of(0).serve("share shared --9p unix:s --json");
    let address = format!("9p:unix:{}", server.home.at("s").display());
    let home = UserHome::of(0);
    let output = home.command(&[], &format!("share {address} --9p unix:t --9p-users 5:6")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("this source checks no permissions"), "{said}");
    // Those of memory are checked without any privilege.
    let home = UserHome::of(USER);
    let served = home.serve("share mem --9p unix:s --json --9p-users 5:6");
    assert_eq!(Restriction::Make.by(&served, 0), ACCESS);
}
