//! Events under adverse conditions: odd names, moves, losses, and agents and guests that stop.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ferry_tests::{Cache, MOUNTPOINT, Options, Running, TIMEOUT, alone, collect};
use ferry_vfs::FileSystem;
use rustix::process::{Pid, Signal, kill_process};

use crate::events::{WATCH, Watched, assert_same_names, by_watch};
use crate::events_programs::{PRELUDE, beside, host, while_running, with_agent};

/// Longer than the lease of an agent and the patience of its guard.
const SUSPENDED: Duration = Duration::from_secs(4);

#[test]
fn names_of_any_bytes_are_seen() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let script = r#"
        long=$(printf '%0255d' 7)
        for name in "$(printf 'a\377\376b')" "$(printf 'new\nline')" ' space ' -dash "$long" "$(printf 'caf\303\251')" '*' 'a"b\'; do
            : >"./$name"; s; mv -- "$name" moved; s; mv -- moved "$name"; s; printf x >>"./$name"; s; rm -- "$name"; s
            mkdir -- "$name"; s; rmdir -- "$name"; s
        done"#;
    let seen = watched.compare("d", "", script, "");
    assert_eq!(by_watch(&seen.guest), by_watch(&seen.host), "{}", seen.said);
}

/// Files and directories that come back to their names, faster than a guest can follow.
#[test]
fn loops_of_renames_are_seen() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::create_dir(watched.path("d/sub")).unwrap();
    let script = format!(
        ": >a; : >x; mkdir dir; s
        for round in $(seq 200); do
            mv a b; mv b sub/c; mv sub/c a; {WATCH} exchange a x; mv dir sub/dir; mv sub/dir dir
        done"
    );
    let seen = watched.compare("d d/sub", "", &script, "ls -d d/a d/x d/dir");
    let is_rename = |event: &&str| event.contains(" MOVED_");
    let [guest, host] =
        [&seen.guest, &seen.host].map(|events| by_watch(events).into_iter().filter(is_rename).collect::<Vec<_>>());
    assert_eq!(host.len(), 200 * (6 + 4 + 4));
    assert_eq!(guest, host, "{}", seen.said);
    assert!(seen.said.starts_with("d/a\nd/dir\nd/x\n"), "{}", seen.said);
}

/// Several names of a file; and directories that are moved, in the share and away from what is watched, with watchers inside.
#[test]
fn hard_links_and_moved_directories_are_seen() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    for dir in ["d/one/inside", "d/two"] {
        fs::create_dir_all(watched.path(dir)).unwrap();
    }
    fs::write(watched.path("d/file"), "x").unwrap();
    let script = "ln file link; s; printf x >>link; s; ln link two/third; s; rm file; s; chmod 600 link; s; rm link; s
        mv one/inside two/moved; s; mkfifo two/moved/first; s; mv two one/two; s; mkfifo one/two/moved/second; s
        mv one/two/moved ../away; s; mkfifo ../away/third; s; rm ../away/first; s; mv ../away one/inside; s
        rm one/inside/second; s; mv one/two two; s; printf x >>two/third; s; rm -r one";
    let seen = watched.compare("d d/one d/one/inside d/two", "", script, "stat -c '%h %s' d/two/third");
    // The number of a file's names is told by one of them. The end of directories is told when nobody has them open.
    let is_compared = |event: &&str| !event.contains(" ATTRIB ") && !event.contains("_SELF");
    let [guest, host] =
        [&seen.guest, &seen.host].map(|events| by_watch(events).into_iter().filter(is_compared).collect::<Vec<_>>());
    assert_eq!(guest, host, "{}", seen.said);
    assert!(seen.guest.iter().any(|event| event == "d ATTRIB link"), "{}", seen.said);
    assert!(seen.said.starts_with("1 3\n"), "{}", seen.said);
}

/// An agent that is killed again and again, while it replays: the next one goes on where it was.
#[test]
fn agents_that_are_killed_lose_and_repeat_no_name() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::create_dir(watched.path("d/sub")).unwrap();
    // Each agent replays some hundred events, however fast the machine is, and at least tries to for a while.
    let before = format!(
        "(until [ -e ready ]; do sleep 0.1; done
        seen=0; tries=0
        while [ ! -e ended ]; do
            now=$(wc -l </tmp/out); tries=$((tries + 1))
            if [ $now -lt $((seen + 300)) ] && [ $tries -lt 40 ]; then sleep 0.01; continue; fi
            seen=$now; tries=0
            kill -9 $(cat /tmp/pid); {WATCH} agent . 2>/tmp/agent & echo $! >/tmp/pid; echo >>/tmp/kills
        done) & kills=$!"
    );
    let script = format!("{WATCH} churn . 4000 {}", std::process::id());
    let seen = watched.compare("d d/sub", &before, &script, ": >ended; wait $kills; wc -l </tmp/kills");
    assert_same_names(&seen);
    let kills: u32 = seen.said.lines().next().unwrap().trim().parse().unwrap();
    assert!(kills > 3, "{}", seen.said);
}

/// What a guest caches for minutes: a file that it has open, one that it has read, and a listing. Returns the script that
/// looks until all is as [`edit`] has left it. What is only forgotten is not told of as removed.
fn cached(watched: &Watched) -> String {
    for name in ["open", "read", "gone"] {
        fs::write(watched.path("d").join(name), "old").unwrap();
    }
    with_agent(&format!(
        "exec 9<d/open; cat d/open d/read d/gone >/dev/null; stat d/open d/read d/gone >/dev/null; ls -l d >/dev/null
        {WATCH} watch d >/tmp/out & watch=$!; watching $watch; : >ready
        for name in open read; do reach sh -c '[ \"$(cat d/'$name')\" = new ] && [ $(stat -c %s d/'$name') = 3 ]'; done
        reach [ ! -e d/gone ]; reach [ -e d/come ]; reach sh -c '[ \"$(echo $(ls d))\" = \"come open open.1 read\" ]'
        kill $watch; grep -E 'DELETE (open|read)' /tmp/out || echo seen"
    ))
}

/// Changes what is cached: the open file is moved away, and another one comes to its name.
fn edit(dir: &Path) {
    host(dir, "mv open open.1; printf new >open; printf new >read; rm gone; : >come");
}

/// More events than a kernel or a server keeps.
fn flood(dir: &Path, count: usize) {
    host(dir, &format!("{WATCH} contend . {count} >/dev/null; rm -f n?"));
}

/// While the server's watcher is held up, more happens than the host's kernel keeps: the guest finds what is there all the same.
#[test]
fn lost_events_are_recovered() {
    const MANY: usize = 200_000;
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    let limit = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").unwrap_or_default();
    let limit = limit.trim().parse().unwrap_or(usize::MAX);
    if limit > MANY {
        return ferry_skip::skip!("the kernel keeps {limit} events");
    }
    let script = cached(&watched);
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let said = while_running(&watched, &script, |dir, _| {
        let held = Arc::clone(&gate);
        let is_held = watched.share().dir.changes().unwrap().subscribe(move |_, _| {
            drop(held.1.wait_while(held.0.lock().unwrap(), |open| !*open).unwrap());
        });
        flood(dir, 8 * limit);
        edit(dir);
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        drop(is_held);
    });
    assert_eq!(said, "seen\n");
}

/// Runs a function while a guest is stopped, for longer than a lease.
fn suspended(guest: &Running, run: impl FnOnce()) {
    let pid = Pid::from_raw(i32::try_from(guest.pid()).unwrap()).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    run();
    std::thread::sleep(SUSPENDED);
    kill_process(pid, Signal::CONT).unwrap();
}

/// A guest that is suspended finds, when it goes on, what has changed meanwhile.
#[test]
fn a_suspended_guest_catches_up() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    let script = cached(&watched);
    assert_eq!(while_running(&watched, &script, |dir, guest| suspended(guest, || edit(dir))), "seen\n");
}

/// Has QEMU do something, and waits until it has.
fn ask(monitor: &Path, command: &str) {
    let mut stream = UnixStream::connect(monitor).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let questions = ["qmp_capabilities", command].map(|name| format!("{{\"execute\":\"{name}\"}}\n")).concat();
    stream.write_all(questions.as_bytes()).unwrap();
    let answers =
        BufReader::new(stream).lines().map(Result::unwrap).inspect(|line| assert!(!line.contains("\"error\"")));
    assert_eq!(answers.filter(|line| line.contains("\"return\"")).take(2).count(), 2, "{command}");
}

/// A machine whose clock stands still while it is stopped: what it has cached has not aged, and is corrected all the same.
#[test]
#[ignore = "long: make test-all"]
fn a_stopped_machine_catches_up() {
    let _alone = alone();
    let Some(watched) = Watched::in_qemu(Cache::Always) else { return };
    let script = cached(&watched);
    let said = while_running(&watched, &script, |dir, _| {
        ask(&watched.monitor(), "stop");
        edit(dir);
        std::thread::sleep(SUSPENDED);
        ask(&watched.monitor(), "cont");
    });
    assert_eq!(said, "seen\n");
}

/// Also if more has happened than the server keeps for it.
#[test]
fn a_suspended_guest_drops_its_caches() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    let script = cached(&watched);
    let said = while_running(&watched, &script, |dir, guest| {
        suspended(guest, || {
            flood(dir, 250_000);
            edit(dir);
        });
    });
    assert_eq!(said, "seen\n");
}

/// A name that is replaced again and again is there at each look, with the bytes of one of its files.
#[test]
fn a_file_that_is_replaced_is_always_there() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    fs::write(watched.path("d/file"), "0000").unwrap();
    let script = "looks=0; : >ready
        while [ ! -e done ]; do
            read=$(cat d/file); [ ${#read} = 4 ] || { echo \"read '$read'\" >&2; exit 1; }
            stat d/file >/dev/null; ls -l d >/dev/null 2>&1 || :; looks=$((looks + 1))
        done
        echo $looks; reach grep -qx 1500 d/file";
    let said = beside(&watched, script, |dir| {
        host(dir, "for number in $(seq 1001 1500); do echo -n $number >new; mv new file; done; : >../done");
    });
    assert!(said.trim().parse::<u32>().unwrap() > 5, "{said}");
}

/// Stores through a mapping have no event but the end of writing: then bytes and times are those of the host.
#[test]
fn stores_through_a_mapping_are_seen_when_the_file_is_closed() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    fs::write(watched.path("d/file"), "old bytes").unwrap();
    // With an agent, for what is cached then lasts.
    let script = ": >../look; until [ -e ../looked ]; do s; done
        python3 -c 'import mmap, time\nwith open(\"file\", \"r+b\") as file:\n with mmap.mmap(file.fileno(), 0) as mapped:\n  time.sleep(0.1)\n  mapped[0:3] = b\"new\"'";
    let before = "(until [ -e look ]; do sleep 0.1; done; cat d/file >/dev/null; stat d/file >/dev/null; : >looked) &";
    let seen = watched.compare("d", before, script, "stat -c %.9Y d/file; cat d/file; echo");
    assert_eq!(seen.guest, ["d CLOSE_WRITE file"], "{}", seen.said);
    let found = fs::metadata(watched.path("d/file")).unwrap();
    let expected = format!("{}.{:09}\nnew bytes\n", found.mtime(), found.mtime_nsec());
    assert!(seen.said.starts_with(&expected), "{expected}: {}", seen.said);
}

/// A guest that may not change the share sees what happens. A mount that is read-only has no call that could be replayed.
#[test]
fn a_share_that_is_read_only_has_events() {
    let _alone = alone();
    let Some(watched) = Watched::with(Options { read_only: true, ..Options::default() }) else { return };
    let script = format!(
        "{PRELUDE}
        {WATCH} agent . 2>/tmp/log & agent=$!
        {WATCH} watch d >/tmp/out & watch=$!; reach grep -q CREATE /tmp/out; reach grep -q DELETE /tmp/out
        if touch d/new 2>/dev/null; then exit 1; fi
        mount -o remount,ro {MOUNTPOINT}; ended $agent; grep -o 'is mounted read-only' /tmp/log; kill $watch"
    );
    let start = Instant::now();
    let guest = watched.guest(&script).spawn().unwrap();
    let is_over = AtomicBool::new(false);
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                host(&watched.path("d"), "mkfifo name; rm name");
            }
        });
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| collect(guest, TIMEOUT, start)));
        is_over.store(true, Ordering::Relaxed);
        ran
    });
    assert_eq!(ran.unwrap().ok(), "status 2\nis mounted read-only\n");
}
