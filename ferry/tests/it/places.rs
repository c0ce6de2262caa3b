//! Mounts in unusual places: inside their own source, by a user without rights, and just being made.
use crate::common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::place::{Place, runs, until};
use common::{Server, ferry, needs_fuse, run};
use rustix::process::{Pid, Signal, kill_process};

/// The user and group that have nothing.
const NOBODY: u32 = 65534;

/// Runs a script under a watchdog. If a mount hangs, the server is killed, which ends what waits for it.
#[track_caller]
fn watched(server: Pid, script: &str, place: &Path) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "20", "sh", "-ec", script, "sh"]).arg(place).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = Pid::from_child(&child);
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let hangs =
            is_done.recv_timeout(std::time::Duration::from_secs(25)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if hangs {
            let _ = kill_process(server, Signal::KILL);
            let _ = kill_process(pid, Signal::KILL);
        }
        hangs
    });
    let output = child.wait_with_output().unwrap();
    drop(done);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!watchdog.join().unwrap(), "it hangs: {script}");
    assert!(output.status.success(), "{:?}: {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a mount inside its own source shows: the source, and in it the directory under the mount.
const WALK: &str = r#"cd "$1"
test "$(find . | sort | tr '\n' ' ')" = ". ./a ./a/file ./inner ./inner/under "
test "$(ls -aR . | grep -c file)" = 1
test "$(cat a/file)" = text && test "$(cat inner/under)" = hidden
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do find . -type f -exec cat {} + >/dev/null & done; wait
echo new >inner/new && rm inner/new && mkdir inner/dir && rmdir inner/dir
! ls inner/inner 2>/dev/null
du -s . | wc -l"#;

#[test]
fn a_mount_inside_its_own_source_does_not_contain_itself() {
    needs_fuse!();
    for args in [&["--path", "devfuse"][..], &[], &["--read-only"], &["--passthrough", "off", "--cache", "none"]] {
        let place = Place::new();
        let inner = place.source.join("inner");
        fs::remove_file(place.source.join("file")).unwrap();
        fs::remove_file(place.source.join("other")).unwrap();
        fs::create_dir(place.source.join("a")).unwrap();
        fs::write(place.source.join("a/file"), "text").unwrap();
        fs::create_dir(&inner).unwrap();
        fs::write(inner.join("under"), "hidden").unwrap();
        let mut command = ferry();
        command.arg("mount").arg(&place.source).arg(&inner).args(["--nonempty", "--foreground"]).args(args);
        let mut server = Server::start(&mut command);
        let script = match args {
            ["--read-only"] => {
                WALK.replace("echo new >inner/new && rm inner/new && mkdir inner/dir && rmdir inner/dir", "")
            }
            _ => WALK.to_owned(),
        };
        assert_eq!(watched(server.pid(), &script, &inner), "1\n", "{args:?}");
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
        assert_eq!(fs::read_dir(&inner).unwrap().count(), 1, "{args:?}");
    }
}

#[test]
fn the_root_of_the_host_can_be_mounted() {
    needs_fuse!();
    let place = Place::new();
    let mut server = Server::start(ferry().args(["mount", "/", "--foreground"]).arg(&place.mnt));
    let script = r#"test -d "$1/proc/self" && ls "$1/etc" >/dev/null && test -z "$(ls "$1$1")""#;
    watched(server.pid(), script, &place.mnt);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    // Explaining it mounts in the directory for temporary files, which is in there, too.
    let output = run(ferry().args(["mount", "/", "--explain", "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn several_mounts_in_each_others_sources_do_not_contain_themselves() {
    needs_fuse!();
    let place = Place::new();
    let (one, two) = (place.source.join("one"), place.mnt.join("two"));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    let mut command = ferry();
    command.arg("share").arg(&place.source).arg("--mount").arg(&two).arg(&place.mnt).arg("--mount").arg(&one);
    let mut server = Server::start(&mut command);
    let found = watched(server.pid(), "find \"$1\" | wc -l; find \"$1\"", &place.source);
    assert_eq!(found.lines().next(), Some("5"), "{found}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// A place where an unprivileged user may mount, with an executable copy of the program; `None`: not possible here.
fn of_nobody() -> Option<(Place, PathBuf)> {
    let is_there = |name: &str| Path::new("/usr/bin").join(name).exists();
    if !is_there("fusermount3") || !is_there("setpriv") {
        ferry_skip::skip!("needs fusermount3 and setpriv");
        return None;
    }
    let place = Place::new();
    fs::set_permissions(place.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for path in [&place.source, &place.mnt] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    let program = place.at("ferry");
    // By another process, because a file that a thread here has open for writing cannot be executed.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ferry")).arg(&program).status().unwrap().success());
    Some((place, program))
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "--inh-caps=-all"]);
    command.arg(program).env_remove("FERRY_LOG").env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
    command
}

/// Runs a user's command in a separate mount namespace where all users may open the device, unlike in containers.
const AS_USER: &str = r#"
mkdir dev && mount -t tmpfs none dev && mknod dev/fuse c 10 229 && chmod 666 dev/fuse && mount --bind dev/fuse /dev/fuse
trap 'umount -l mnt 2>/dev/null || true' EXIT
nobody() { setpriv --reuid nobody --regid nogroup --clear-groups --inh-caps=-all "$@"; }
"#;

/// Mounts a directory and memory.
const USER_MOUNTS: &str = r#"
nobody "$PWD/ferry" mount "$PWD/source" "$PWD/mnt" --json
grep " $PWD/mnt " /proc/self/mountinfo | grep -q 'nosuid,nodev.* - fuse.ferry '
nobody sh -ec 'test "$(cat mnt/file)" = "from the source" && echo x >mnt/new'
test -e source/new
nobody "$PWD/ferry" log "$PWD/mnt" | grep -q "mounted on $PWD/mnt"
nobody fusermount3 -u "$PWD/mnt"
! grep -q " $PWD/mnt " /proc/self/mountinfo
nobody "$PWD/ferry" mount mem "$PWD/mnt" --size 16M --json
nobody sh -ec 'echo in memory >mnt/file && test "$(cat mnt/file)" = "in memory"'
nobody fusermount3 -u "$PWD/mnt""#;

/// Runs a script after [`AS_USER`] and returns its outcome.
fn as_user(place: &Place, script: &str) -> Output {
    let mut command = Command::new("timeout");
    command.args(["-k", "2", "60", "unshare", "--mount", "--propagation", "private", "sh", "-ec"]);
    command
        .arg(format!("{AS_USER}{script}"))
        .env_remove("FERRY_LOG")
        .env_remove("XDG_RUNTIME_DIR")
        .stdin(Stdio::null());
    let output = run(command.current_dir(place.directory.path()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    output
}

#[test]
fn users_mount_in_the_background() {
    needs_fuse!();
    let Some((place, _)) = of_nobody() else { return };
    let output = as_user(&place, USER_MOUNTS);
    let out = String::from_utf8_lossy(&output.stdout);
    let pids = out.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        Pid::from_raw(line["pid"].as_i64().unwrap().try_into().unwrap()).unwrap()
    });
    assert_eq!(pids.clone().count(), 2, "{out}");
    pids.for_each(|pid| until("its end after fusermount3 -u", || !runs(pid)));
}

/// A mount that keeps everything for a day is notified of changes by inotify, because its user may not watch the file
/// system. Each state is read once before it changes, so that the mount keeps it.
const USER_WATCHES: &str = r#"
nobody "$PWD/ferry" mount "$PWD/source" "$PWD/mnt" --cache always --watch always
until_it_is() { for i in $(seq 200); do test "$(nobody sh -c "$1" 2>&1)" != "$2" || return 0; sleep 0.05; done; echo "$1: not $2 but $(nobody sh -c "$1" 2>&1)" >&2; return 1; }
mkdir -p source/directory/below && echo one >source/directory/file && echo two >source/directory/below/file
until_it_is 'cat mnt/directory/file mnt/directory/below/file' 'one
two'
echo uno >source/directory/file
until_it_is 'cat mnt/directory/file' uno
echo due >source/directory/below/new && mv source/directory/below/new source/directory/below/file
until_it_is 'cat mnt/directory/below/file; ls mnt/directory/below' 'due
file'
chmod 604 source/directory/file
until_it_is 'stat -c %a mnt/directory/file' 604
until_it_is 'test -e mnt/directory/absent || echo absent' absent
touch source/directory/absent
until_it_is 'test -e mnt/directory/absent && echo there' there
mv source/directory source/moved
until_it_is 'ls mnt; cat mnt/moved/file' 'file
moved
other
uno'
echo drei >source/moved/file
until_it_is 'cat mnt/moved/file' drei
rm -r source/moved
until_it_is 'ls mnt' 'file
other'
nobody fusermount3 -u "$PWD/mnt""#;

#[test]
fn users_see_changes_on_the_host_at_once() {
    needs_fuse!();
    let Some((place, _)) = of_nobody() else { return };
    let output = as_user(&place, USER_WATCHES);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("in directories that are in use"), "{said}");
}

#[test]
fn mounting_inside_the_source_is_an_error() {
    needs_fuse!();
    let Some((place, program)) = of_nobody() else { return };
    let inner = place.source.join("inner");
    fs::create_dir(&inner).unwrap();
    chown(&inner, Some(NOBODY), Some(NOBODY)).unwrap();
    let output = run(as_nobody(&program).arg("mount").arg(&place.source).arg(&inner));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("choose a mount point outside") && said.contains(inner.to_str().unwrap()), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// A mount is seen before its server listens; it is not taken for a source then.
#[test]
fn a_mount_that_has_just_been_made_is_explained() {
    needs_fuse!();
    for _ in 0..5 {
        let place = Place::new();
        let mut command = place.mount(&["--foreground", "--path", "devfuse", "--passthrough", "off"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("the mount", || !place.is_free());
        let output = run(ferry().args(["mount", "--explain", "--json"]).arg(&place.mnt));
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        common::wait(&mut child);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&line["path"], &line["passthrough"]["used"]), (&"devfuse".into(), &false.into()), "{line}");
    }
}

#[test]
fn a_dead_mount_is_not_taken_for_a_source() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&[]);
    kill_process(pid, Signal::KILL).unwrap();
    until("its death", || !runs(pid));
    // Nor for a file of a parent directory that another server shares.
    let outer = Place::new();
    let mut command = ferry();
    command.arg("mount").arg(place.mnt.parent().unwrap()).arg(&outer.mnt).arg("--foreground");
    let _outer = Server::start(&mut command);
    for args in [&["mount", "--explain"][..], &["log"]] {
        let said = common::refused(1, ferry().args(args).arg(&place.mnt));
        assert!(said.contains("does not answer") && said.contains(place.mnt.to_str().unwrap()), "{said}");
    }
    assert_eq!(place.mounts().len(), 1);
}
