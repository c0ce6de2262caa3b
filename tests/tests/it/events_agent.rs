//! The agent as a service of a guest: what it waits for, how it ends, and what it costs.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ferry_dir::OwnChanges;
use ferry_tests::survivor::Survivor;
use ferry_tests::{Cache, Device, Mount, Options, Place, SETTLE, Share, alone, collect, guest_on, run};

use crate::events::{WATCH, Watched};
use crate::events_programs::{PRELUDE, beside, while_guest_runs};

/// Each mistake is one sentence, and a signal ends an agent that waits at once.
#[test]
fn an_ending_agent_reports_its_reason() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let script = format!(
        ": >ready
        mkdir /mnt/part /mnt/ro; mount --bind d /mnt/part; mount --bind . /mnt/ro; mount -o remount,bind,ro /mnt/ro
        mkdir /mnt/fixed; mount -t tmpfs t /mnt/fixed; mkdir /mnt/fixed/later; mount -o remount,ro /mnt/fixed
        for path in /none /usr /mnt/fixed/later /proc /mnt/part /mnt/ro; do {WATCH} agent $path 2>&1 & ended $!; done
        # Each attempt has files of its own: what starts in the background empties them when it comes to run.
        at_once() {{
            rm -f /tmp/log; {WATCH} agent . 2>/tmp/log & agent=$!; reach grep -q ': ready' /tmp/log; sleep 0.2
            begin=$(date +%s%N); kill $agent; ended $agent >/tmp/ended; [ $(($(date +%s%N) - begin)) -lt 3000000000 ]
        }}
        at_once || at_once || at_once || at_once; cat /tmp/ended
        # An agent that has not asked yet comes after one that was started later.
        two() {{
            rm -f /tmp/log /tmp/log2; {WATCH} agent . 2>/tmp/log & agent=$!; reach grep -q ': ready' /tmp/log
            {WATCH} agent . 2>/tmp/log2 & other=$!; reach grep -q 'another agent' /tmp/log /tmp/log2
            grep -q 'another agent' /tmp/log || {{ wait $other || :; kill $agent; wait $agent || :; return 1; }}
        }}
        two || two || two || two; ended $agent; grep -o 'another agent.*' /tmp/log
        kill $other; ended $other"
    );
    let said = while_guest_runs(&watched, &script, |_| ());
    let expected = [
        "ferry-watch: cannot open /none: No such file or directory (os error 2)",
        "status 1",
        "ferry-watch: nothing is mounted on /usr: mount the share there first, or let the agent wait for it (--wait)",
        "status 1",
        "ferry-watch: nothing is mounted on /mnt/fixed/later: mount the share there first, or let the agent wait for it \
         (--wait)",
        "status 1",
        "ferry-watch: /proc sends no events: share it with --events, and name its mount point in the guest",
        "status 2",
        "ferry-watch: /mnt/part sends no events: share it with --events, and name its mount point in the guest",
        "status 2",
        "ferry-watch: /mnt/ro is mounted read-only, so nothing can be replayed there: mount it without -o ro (a server \
         with --read-only refuses writes all the same)",
        "status 2",
        "status 0",
        "status 2",
        "another agent serves .: end one of them",
        "status 0",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

/// It ends when its mount does, or waits for the next one.
#[test]
fn an_agent_follows_its_mount() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let script = format!(
        "mkdir /mnt/later
        mount -t virtiofs t /mnt/later; {WATCH} agent /mnt/later 2>/tmp/log & agent=$!
        reach grep -q 'dropping its caches' /tmp/log; umount -l /mnt/later; ended $agent; grep -o 'later has been.*' /tmp/log
        {WATCH} agent --wait /mnt/later 2>/tmp/log & agent=$!; reach grep -q waiting /tmp/log
        mount -t virtiofs t /mnt/later; reach sh -c \"ls -l /proc/$agent/fd | grep -q '/mnt/later$'\"; umount -l /mnt/later
        reach grep -q 'later has been' /tmp/log
        mount -t virtiofs t /mnt/later; {WATCH} watch /mnt/later/d >/tmp/out & watch=$!
        watching $watch; : >ready; ended $watch; cat /tmp/out; kill $agent; ended $agent; umount /mnt/later"
    );
    let said = while_guest_runs(&watched, &script, |dir| {
        // Another process: the server knows what it does itself.
        assert!(std::process::Command::new("touch").arg(dir.join("end")).status().unwrap().success());
    });
    assert_eq!(said, "status 0\nlater has been unmounted\nstatus 0\n/mnt/later/d CREATE end\nstatus 0\n");
}

/// One agent serves several shares.
#[test]
fn an_agent_serves_several_mounts() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let options = Options { events: true, tag: Some("u".parse().unwrap()), ..Options::default() };
    let other = Share::with(Place::Disk, options);
    other.dir.watch(OwnChanges::Skip).unwrap();
    let script = format!(
        "{PRELUDE}
        {WATCH} agent . /mnt/other 2>/tmp/log & agent=$!
        reach grep -q 'mnt/other: .*dropping its caches' /tmp/log; reach grep -q ' \\.: .*dropping its caches' /tmp/log
        {WATCH} watch d >/tmp/out & one=$!; {WATCH} watch /mnt/other >/tmp/other & two=$!
        watching $one; watching $two; : >/mnt/other/ready; ended $one; ended $two; kill $agent; ended $agent"
    );
    let mut guest = watched.guest(&script);
    guest.devices.push(Device::fs(&other.socket, "u"));
    guest.mounts.push(Mount::virtiofs("u", "/mnt/other"));
    let (ready, paths) = (other.path.join("ready"), [watched.path("d/end"), other.path.join("end")]);
    let host = std::thread::spawn(move || {
        let begin = Instant::now();
        while !ready.exists() && begin.elapsed() < ferry_tests::TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
        let touched = std::process::Command::new("touch").args(paths).status();
        assert!(touched.unwrap().success());
    });
    let said = run(guest, ferry_tests::TIMEOUT).ok();
    host.join().unwrap();
    assert_eq!(said, "status 0\nstatus 0\nstatus 0\n");
}

/// The server answers an agent that waits after five seconds; nothing else wakes it.
#[test]
fn an_agent_costs_nothing_when_nothing_happens() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let script = "sleep 1
        count() { cat /proc/$agent/task/*/status | awk '/^voluntary/ { sum += $2 } END { print sum }'; }
        before=$(count); : >ready; sleep 11; echo $(($(count) - before)); cut -d ' ' -f 14,15 /proc/$agent/stat";
    let said = beside(&watched, script, |_| ());
    let numbers: Vec<u32> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let [wakeups, user, system] = numbers[..] else { panic!("{said}") };
    // Each answer wakes it once, and once more when the next request goes out.
    assert!(wakeups <= 8, "{wakeups} in 11 s");
    assert!(user + system <= 20, "{user} and {system} ticks of 10 ms, with the start");
}

/// What the kernel has cached of the share is dropped when events may have been missed, and only that.
#[test]
fn only_caches_of_the_share_are_dropped() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Always) else { return };
    for number in 0..1000 {
        std::fs::write(watched.path("d").join(number.to_string()), "text").unwrap();
    }
    let script = format!(
        "ls -l d >/dev/null; cat d/* >/dev/null; exec 9<d/7; : >ready
        reach [ -e known ]; {WATCH} agent . 2>/tmp/log & agent=$!; reach grep -q 'dropping its caches' /tmp/log
        reach [ -e forgotten ]; kill $agent; ended $agent
        dmesg | grep -c drop_caches || :"
    );
    let said = while_guest_runs(&watched, &script, |dir| {
        let known = || watched.share().dir.usage().inodes;
        assert!(known() > 1000, "{}", known());
        std::fs::write(dir.with_file_name("known"), "").unwrap();
        let end = Instant::now() + SETTLE;
        // Those of the open file, and of directories that are in use.
        while known() > 10 {
            assert!(Instant::now() < end, "{} are still known", known());
            std::thread::sleep(Duration::from_millis(10));
        }
        // By another process: the guest remembers that it is absent, and the server knows what it does itself.
        assert!(std::process::Command::new("touch").arg(dir.with_file_name("forgotten")).status().unwrap().success());
    });
    assert_eq!(said, "status 0\n0\n");
}

/// A million writes are one event in an interval.
#[test]
fn a_million_writes_are_few_events() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    std::fs::write(watched.path("d/file"), "").unwrap();
    let begin = Instant::now();
    let script = "dd if=/dev/zero of=file bs=1 count=1000000 conv=notrunc status=none";
    let seen = watched.compare("d", "", script, "stat -c %s d/file");
    let modified = seen.guest.iter().filter(|event| *event == "d MODIFY file").count();
    let intervals = usize::try_from(begin.elapsed().as_millis() / 5).unwrap();
    assert!((1..=intervals.min(5000)).contains(&modified), "{modified} events, {}", seen.said);
    assert!(seen.said.contains("1000000"), "{}", seen.said);
}

/// What a guest does itself, its own kernel tells, once. `is_compared`: which lines are.
fn own_changes(watched: fn(Cache) -> Option<Watched>, is_compared: fn(&str) -> bool) {
    let _alone = alone();
    let Some(watched) = watched(Cache::Auto) else { return };
    let script = format!(
        "{WATCH} watch d >/tmp/out & watch=$!; watching $watch
        for n in $(seq 20); do
            echo x >d/f; echo y >>d/f; chmod 600 d/f; mv d/f d/g; mkdir d/s; rmdir d/s; rm d/g
        done
        sleep 1; : >ready; wait $watch; cat /tmp/out"
    );
    let said = beside(&watched, &script, |dir| {
        assert!(std::process::Command::new("touch").arg(dir.join("end")).status().unwrap().success());
    });
    let each = [
        "CREATE f",
        "MODIFY f",
        "CLOSE_WRITE f",
        "MODIFY f",
        "CLOSE_WRITE f",
        "ATTRIB f",
        "MOVED_FROM f",
        "MOVED_TO g",
        "CREATE s/",
        "DELETE s/",
        "DELETE g",
    ];
    let said: Vec<_> = said.lines().map(|line| line.split(' ').skip(1).take(2).collect::<Vec<_>>().join(" ")).collect();
    let mut expected = each.repeat(20);
    expected.push("CREATE end");
    expected.retain(|line| is_compared(line));
    assert_eq!(said.iter().filter(|line| is_compared(line)).collect::<Vec<_>>(), expected);
}

#[test]
fn a_guest_sees_its_own_changes_once() {
    own_changes(Watched::new, |_| true);
}

/// On a busy machine, writes may be told twice.
#[test]
fn a_guest_sees_its_own_names_once_with_inotify() {
    own_changes(Watched::by_inotify, |line| !line.contains("MODIFY") && !line.contains("CLOSE_WRITE"));
}

/// What happens while there is no agent, the next one replays.
#[test]
fn an_agent_that_was_killed_has_lost_nothing() {
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    let script = format!(
        "{WATCH} agent . 2>/tmp/log & agent=$!; reach grep -q 'dropping its caches' /tmp/log
        {WATCH} watch d >/tmp/out & watch=$!
        watching $watch; kill -9 $agent; ended $agent 2>/dev/null; : >ready; reach [ -e done ]
        {WATCH} agent . 2>/tmp/log2 & agent=$!; ended $watch; cat /tmp/out; kill $agent; ended $agent
        grep -c 'dropping its caches' /tmp/log2 || :"
    );
    let said = while_guest_runs(&watched, &script, |dir| {
        let script = "mkfifo one; mkfifo two; rm one; : >end; sleep 0.2; : >../done";
        assert!(std::process::Command::new("sh").args(["-euc", script]).current_dir(dir).status().unwrap().success());
    });
    let expected = "status 137\nstatus 0\nd CREATE one\nd CREATE two\nd DELETE one\nd CREATE end\nstatus 0\n0\n";
    assert_eq!(said, expected);
}

/// A server that is killed, or ended, and started again goes on telling; what happens meanwhile is not told.
#[test]
fn an_agent_survives_its_server() {
    let _alone = alone();
    if let Err(why) = ferry_dir::can_watch(std::fs::File::open("/var/tmp").unwrap().as_fd()) {
        return ferry_skip::skip!("{why}");
    }
    let mut server = Survivor::new(Place::Disk, &["--tag", "t", "--events"]);
    let path = server.path.clone();
    std::fs::create_dir(path.join("d")).unwrap();
    let script = format!(
        "{PRELUDE}
        {WATCH} agent . 2>/tmp/log & agent=$!; reach grep -q 'dropping its caches' /tmp/log
        {WATCH} watch --answer d >/tmp/out & watch=$!; watching $watch; : >ready; ended $watch; grep -v ping /tmp/out
        kill $agent; ended $agent"
    );
    let start = Instant::now();
    let guest = guest_on(&server.socket, ["sh", "-euc", &script]).spawn().unwrap();
    let make = |name: &str| {
        assert!(std::process::Command::new("mkfifo").arg(path.join("d").join(name)).status().unwrap().success());
    };
    // The agent asks the next server for events at once, or when its guest has connected again; before, nothing is told.
    let mut number = 0;
    let mut until_seen = || {
        let first = number;
        while !(first..number).any(|number| path.join(format!("seen.ping.{number}")).exists()) {
            assert!(start.elapsed() < ferry_tests::TIMEOUT, "the guest does not see what is made");
            make(&format!("ping.{number}"));
            number += 1;
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    while !path.join("ready").exists() {
        assert!(start.elapsed() < ferry_tests::TIMEOUT, "the guest is not ready");
        std::thread::sleep(Duration::from_millis(20));
    }
    until_seen();
    make("before");
    until_seen();
    for (name, is_killed) in [("killed", true), ("ended", false)] {
        if is_killed {
            server.kill();
        } else {
            server.end();
        }
        server.start();
        until_seen();
        make(name);
        until_seen();
    }
    make("end");
    let said = collect(guest, ferry_tests::TIMEOUT, start).ok();
    let expected = ["status 0", "d CREATE before", "d CREATE killed", "d CREATE ended", "d CREATE end", "status 0"];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}
