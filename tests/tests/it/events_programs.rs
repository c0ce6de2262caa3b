//! Programs that people run in a guest while others edit on the host: they see it at once, also where caches never expire.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferry_tests::{Cache, GuestResult, Running, TIMEOUT, alone, collect};

use crate::events::{STEPS, WATCH, Watched};

/// What guests' scripts begin with. An agent that has begun has dropped what was cached. `watching` waits until a process
/// watches something.
pub(crate) const PRELUDE: &str = r#"
trap '[ $? = 0 ] || { : >failed; cat /tmp/log* >&2; kill ${agent:-} || :; }' EXIT
ended() { status=0; wait $1 || status=$?; echo "status $status"; }
reach() { tries=0; until "$@"; do sleep 0.02; tries=$((tries + 1)); [ $tries -lt 3000 ] || { echo "never: $*" >&2; exit 1; }; done; }
watching() { reach sh -c "grep -Eqs '^(inotify|fanotify [im])' /proc/$1/fdinfo/*"; }
export HOME=/root
"#;

/// Between two changes of the host: longer than the clock of its file times.
const PAUSE: Duration = Duration::from_millis(100);

/// Runs a script in a guest, with an agent; once it has created `ready`, runs `on_host` with the directory `d`. Returns
/// what it said.
pub(crate) fn beside(watched: &Watched, script: &str, on_host: impl FnOnce(&Path)) -> String {
    while_guest_runs(watched, &with_agent(script), on_host)
}

/// A script that runs beside an agent.
pub(crate) fn with_agent(script: &str) -> String {
    format!(
        "{WATCH} agent . 2>/tmp/log & agent=$!
        reach grep -q 'dropping its caches' /tmp/log
        {script}
        kill $agent"
    )
}

/// The same, without an agent.
pub(crate) fn while_guest_runs(watched: &Watched, script: &str, on_host: impl FnOnce(&Path)) -> String {
    while_running(watched, script, |dir, _| on_host(dir))
}

/// The same; what runs on the host knows the guest.
pub(crate) fn while_running(watched: &Watched, script: &str, on_host: impl FnOnce(&Path, &Running)) -> String {
    let start = Instant::now();
    let guest = watched.guest(&format!("{PRELUDE}\n{script}")).spawn().unwrap();
    let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        while !watched.path("ready").exists() {
            let failed = watched.path("failed").exists();
            assert!(!failed && start.elapsed() < TIMEOUT, "the guest is not ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The server is in this process. A child that is started meanwhile has its descriptors until it executes a program,
        // and closes the file last: a change by another process.
        while is_written(&watched.path("ready")) {
            assert!(start.elapsed() < TIMEOUT, "`ready` stays open");
            std::thread::sleep(Duration::from_millis(1));
        }
        on_host(&watched.path("d"), &guest);
    }));
    let GuestResult { status, out, err, .. } = collect(guest, TIMEOUT, start);
    assert!(status == 0 && waited.is_ok(), "{out}\n{err}");
    out
}

/// Whether this process has a file open for writing.
fn is_written(path: &Path) -> bool {
    let Ok(file) = fs::metadata(path) else { return false };
    let is_file = |other: fs::Metadata| (other.dev(), other.ino()) == (file.dev(), file.ino());
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    descriptors.filter(|entry| fs::metadata(entry.path()).is_ok_and(is_file)).any(|entry| {
        let info = Path::new("/proc/self/fdinfo").join(entry.file_name());
        let info = fs::read_to_string(info).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        flags.is_some_and(|flags| i32::from_str_radix(flags.trim(), 8).unwrap() & libc::O_ACCMODE != 0)
    })
}

/// Runs a script of the host in another process: the server knows what it does itself.
pub(crate) fn host(dir: &Path, script: &str) {
    let script = format!("{STEPS}\n{script}");
    assert!(Command::new("sh").args(["-euc", &script]).current_dir(dir).status().unwrap().success());
    std::thread::sleep(PAUSE);
}

/// Waits for a file of the guest's.
fn until_exists(path: &Path) {
    let begin = Instant::now();
    while !path.exists() {
        assert!(begin.elapsed() < TIMEOUT, "the guest does not get to {}", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_installed(program: &str, package: &str) -> bool {
    let is_installed =
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !is_installed {
        ferry_skip::skip!("no {program}: apt-get install {package}");
    }
    is_installed
}

/// `tail` polls on FUSE, so a length that is cached would never change.
#[test]
fn tail_follows_appends_of_the_host() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    fs::write(watched.path("d/log"), "0\n").unwrap();
    let script = "tail -n +1 -s 0.02 -f d/log >/tmp/out & tail=$!
        reach grep -qx 0 /tmp/out; : >ready; reach grep -qx last /tmp/out; kill $tail; cat /tmp/out";
    let said = beside(&watched, script, |dir| {
        (1..20).for_each(|number| host(dir, &format!("echo {number} >>log")));
        host(dir, "echo last >>log");
    });
    let expected: String = (0..20).map(|number| format!("{number}\n")).collect();
    assert_eq!(said, expected + "last\n");
}

/// `make` compares times that the guest has cached.
#[test]
fn make_rebuilds_after_edits_of_the_host() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    fs::write(watched.path("d/Makefile"), "/tmp/out: in\n\tcat in >/tmp/out; cat /tmp/out >>/tmp/built\n").unwrap();
    fs::write(watched.path("d/in"), "0\n").unwrap();
    let script = "make -s -C d; : >ready
        for number in 1 2 3 4 5; do reach [ -e step.$number ]; make -s -C d; : >made.$number; done
        cat /tmp/built";
    let said = beside(&watched, script, |dir| {
        for number in 1..=5 {
            // An editor writes in place, or a new file that it moves there.
            host(
                dir,
                &if number % 2 == 0 { format!("echo {number} >in") } else { format!("echo {number} >new; mv new in") },
            );
            host(dir, &format!(": >../step.{number}"));
            until_exists(&dir.with_file_name(format!("made.{number}")));
        }
    });
    assert_eq!(said, "0\n1\n2\n3\n4\n5\n", "once for each edit");
}

/// A repository whose index and whose files the guest has cached; with git's own monitor, if this git has one for Linux.
#[test]
fn git_status_sees_edits_of_the_host() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    let make = "git init -q; git config user.name n; git config user.email e; mkdir sub; echo one >a; echo two >sub/b; echo three >c
        git add .; git commit -qm first";
    host(&watched.path("d"), make);
    let options = Command::new("git").args(["version", "--build-options"]).output().unwrap().stdout;
    let has_monitor = String::from_utf8_lossy(&options).contains("fsmonitor--daemon");
    let monitor =
        |command| if has_monitor { format!("git fsmonitor--daemon {command} >/dev/null") } else { ":".into() };
    let script = format!(
        "git config --global safe.directory '*'; git config --global core.fsmonitor {has_monitor}; cd d; {}
        git status --porcelain; git status --porcelain; : >../ready
        reach [ -e ../edited ]; git status --porcelain; git log --oneline | wc -l; {}; cd ..",
        monitor("start"),
        monitor("stop"),
    );
    let said = beside(&watched, &script, |dir| {
        host(dir, "echo ONE >a; rm sub/b; echo new >sub/d; git commit -qm second --allow-empty");
        host(dir, ": >../edited");
    });
    assert_eq!(said, " M a\n D sub/b\n?? sub/d\n2\n");
}

/// A typical development server: it reads a file again when its watcher reports a change.
#[test]
fn a_node_server_reloads_after_edits_of_the_host() {
    let _alone = alone();
    if !is_installed("node", "nodejs") {
        return;
    }
    let Some(watched) = Watched::new(Cache::Always) else { return };
    fs::write(watched.path("d/app.js"), "0").unwrap();
    let server = r#"
        const fs = require("fs");
        const reload = () => {
            const version = fs.readFileSync("d/app.js", "utf8");
            console.log(version);
            fs.writeFileSync("seen." + version, "");
            if (version === "10") process.exit(0);
        };
        reload();
        fs.watch("d", (event, name) => { if (name === "app.js") reload(); });
        fs.writeFileSync("ready", "");
        setTimeout(() => process.exit(3), 60000);
    "#;
    let said = beside(&watched, &format!("node -e '{server}'"), |dir| {
        for number in 1..=10 {
            let edit = if number % 2 == 0 { "printf N >app.js" } else { "printf N >app.new; mv app.new app.js" };
            host(dir, &edit.replace('N', &number.to_string()));
            until_exists(&dir.with_file_name(format!("seen.{number}")));
        }
    });
    // A file that is written in place is empty for a moment.
    let mut versions: Vec<u32> = said.lines().filter_map(|line| line.parse().ok()).collect();
    versions.dedup();
    assert_eq!(versions, (0..=10).collect::<Vec<_>>());
}

/// What the host does in the tests of watchers, and what is seen of it.
const EDITS: &str =
    "echo more >>file; s; chmod 600 file; s; mv file moved; s; rm moved; s; mkdir sub; s; rmdir sub; s; : >end";

#[test]
fn inotifywait_reports_host_changes() {
    let _alone = alone();
    if !is_installed("inotifywait", "inotify-tools") {
        return;
    }
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::write(watched.path("d/file"), "first\n").unwrap();
    let events = "create,modify,close_write,attrib,moved_from,moved_to,delete";
    let script = format!(
        "inotifywait -m -r -e {events} --format '%e %w%f' . >/tmp/out 2>/tmp/err & watch=$!
        {WATCH} watch --answer d >/dev/null & watching $!
        reach grep -q established /tmp/err; : >ready; reach grep -q 'd/end$' /tmp/out; kill $watch; grep -Ev 'ping|/end$' /tmp/out"
    );
    let said = beside(&watched, &script, |dir| host(dir, EDITS));
    let expected = [
        "CREATE ./ready",
        "CLOSE_WRITE,CLOSE ./ready",
        "MODIFY ./d/file",
        "CLOSE_WRITE,CLOSE ./d/file",
        "ATTRIB ./d/file",
        "MOVED_FROM ./d/file",
        "MOVED_TO ./d/moved",
        "DELETE ./d/moved",
        "CREATE,ISDIR ./d/sub",
        "DELETE,ISDIR ./d/sub",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn fanotify_reports_host_changes() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::write(watched.path("d/file"), "first\n").unwrap();
    let script = format!(
        "{WATCH} fanotify d >/tmp/out & watch=$!; watching $watch; {WATCH} watch --answer d >/dev/null & watching $!
        : >ready; wait $watch; cat /tmp/out"
    );
    let said = beside(&watched, &script, |dir| host(dir, EDITS));
    let expected = [
        "MODIFY file",
        "CLOSE_WRITE file",
        "ATTRIB file",
        "MOVED_FROM file",
        "MOVED_TO moved",
        "DELETE moved",
        "CREATE sub",
        "DELETE sub",
    ];
    let said: Vec<_> = said.lines().filter(|line| !line.ends_with(" end") && !line.contains("ping")).collect();
    assert_eq!(said, expected);
}

/// What watchers miss with other ways to forward events: deletions, also of whole trees; files that were empty; editors that
/// move the old file away; and directories that are mounted elsewhere, too. Reading is no event, or servers would never stop
/// to reload.
#[test]
fn nothing_that_is_missed_elsewhere_is_missed() {
    let _alone = alone();
    if !is_installed("inotifywait", "inotify-tools") {
        return;
    }
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::write(watched.path("d/empty"), "").unwrap();
    fs::write(watched.path("d/file"), "first\n").unwrap();
    let events = "create,modify,attrib,moved_from,moved_to,delete";
    let script = format!(
        "mkdir /mnt/elsewhere; mount --bind d /mnt/elsewhere
        inotifywait -m -r -e {events} --format '%e %w%f' /mnt/elsewhere >/tmp/out 2>/tmp/err & watch=$!
        {WATCH} watch --answer d >/dev/null & watching $!
        reach grep -q established /tmp/err; : >ready; cat d/file d/empty /mnt/elsewhere/file >/dev/null
        reach grep -q '/end$' /tmp/out; kill $watch; grep -Ev 'ping|/end$' /tmp/out | sed s:/mnt/elsewhere/::"
    );
    let said = beside(&watched, &script, |dir| {
        for edit in [
            "cat file empty >/dev/null",
            "echo text >>empty",
            // The guest's watcher has to see each directory before what is done in it is told.
            "mkdir tree",
            "sleep 2; mkdir tree/sub",
            "sleep 2; mkfifo tree/sub/fifo",
            "rm -r tree",
            "mv file file~",
            "mkfifo file",
            "rm file~",
        ] {
            host(dir, &format!("{edit}; s"));
        }
        host(dir, ": >end");
    });
    let expected = [
        "MODIFY empty",
        "CREATE,ISDIR tree",
        "CREATE,ISDIR tree/sub",
        "CREATE tree/sub/fifo",
        "DELETE tree/sub/fifo",
        "DELETE,ISDIR tree/sub",
        "DELETE,ISDIR tree",
        "MOVED_FROM file",
        "MOVED_TO file~",
        "CREATE file",
        "DELETE file~",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}
