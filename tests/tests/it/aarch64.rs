//! The program on another architecture: AArch64, emulated by QEMU, with a stock Debian kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_tests::guest::Arch;
use ferry_tests::mounts::{ServerVendor, Source};
use ferry_tests::{Cache, Kind, Options, Place, Share, alone, directory, run, run_beside, static_program};

use crate::events::Watched;
use crate::{mounts_suites, ninep};

/// Each suite takes a minute under emulation on a machine with nothing else to do.
const LIMIT: Duration = Duration::from_secs(5400);

/// How the kernel's 9P client mounts: a mode whose failing checks `ninep` knows.
const NINEP_MODE: &str = "msize=1048576,cache=loose,posixacl";

/// The guest has busybox and the share, which has the programs; its disk is /dev/vda. A line that begins with `==` names the suite
/// of the lines after it.
const SCRIPT: &str = r#"
mkdir -p /programs /disk /mem /dir /9p /client /image
cp ferry ferry-probe /programs
export PATH=/programs:/bin:/sbin FERRY_LOG=warn
mount -t ext4 /dev/vda /disk
mkdir /disk/tree /disk/shared /disk/source
echo == machine
uname -m
suite() { echo == $1; ferry-probe $2 || true; }

ferry mount mem /mem --allow-other
suite mem /mem
umount /mem

ferry mount /disk/tree /dir --allow-other
suite dir /dir
umount /dir

ferry share /disk/shared --9p unix:/run/9p.sock --posix-acl always --modcaps +sys_admin --seccomp kill &
server=$!
for attempt in $(seq 300); do [ -S /run/9p.sock ] && break; sleep 0.1; done
mount -t 9p -o version=9p2000.L,trans=unix,access=client,$1 /run/9p.sock /9p
suite 9p /9p
umount /9p
ferry mount 9p:unix:/run/9p.sock /client --allow-other -o suid,dev
suite client /client
umount /client

echo == image
cp -r /modules /programs/ferry /disk/source
ln -s ferry /disk/source/link
mkdir /disk/source/empty
ferry image build /disk/source -o /disk/image --store /disk/store >/dev/null
ferry image verify /disk/image --store /disk/store >/dev/null
ferry mount image:/disk/image /image --store /disk/store
diff -r /disk/source /image
umount /image
ferry image mount /disk/image /image --store /disk/store
diff -r /disk/source /image
umount /image
echo equal

echo == end
kill $server
wait $server
echo $?
"#;

/// Returns the failed checks of a suite, all of which came to their end.
fn failures(lines: &[&str]) -> BTreeSet<String> {
    assert_eq!(lines.len(), mounts_suites::CHECKS, "not to its end: {lines:?}");
    lines.iter().filter_map(|line| line.split_once(" FAILED")).map(|(name, _)| name.to_owned()).collect()
}

#[test]
#[ignore = "long: emulates another architecture"]
fn sources_and_exports_pass_the_probe() {
    let programs = ["ferry", "ferry-probe"].map(|name| static_program(Arch::Aarch64, name));
    let [Some(ferry), Some(probe)] = programs else { return };
    let share = Share::with(Place::Disk, Options::default());
    fs::copy(ferry, share.path.join("ferry")).unwrap();
    fs::copy(probe, share.path.join("ferry-probe")).unwrap();
    let scratch = directory(Place::Disk);
    let disk = scratch.path().join("disk");
    let mkfs = Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4"]).arg(&disk).arg("1G").status().unwrap();
    assert!(mkfs.success());

    let mut guest = share.guest(["sh", "-euc", SCRIPT, "sh", NINEP_MODE]);
    guest.kind = Kind::Qemu { cpus: 2, root: None };
    guest.arch = Arch::Aarch64;
    guest.memory_mib = 1024;
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    guest.qemu_args = ["-drive", &drive].map(OsString::from).into();
    let ran = run(guest, LIMIT);
    println!("{:?}", ran.took);
    assert_eq!(ran.status, 0, "{}\n{}", ran.out, ran.err);

    let mut suites: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut suite = "";
    for line in ran.out.lines() {
        match line.strip_prefix("== ") {
            Some(name) => suite = name,
            None => suites.entry(suite).or_default().push(line),
        }
    }
    for (name, known) in [
        ("mem", mounts_suites::known(Source::Mem)),
        ("dir", mounts_suites::known(Source::Dir)),
        ("9p", ninep::known(NINEP_MODE)),
        ("client", mounts_suites::known(Source::NineP(ServerVendor::Ferry))),
    ] {
        assert_eq!(failures(&suites[name]), known, "{name}: {:#?}\n{}", suites[name], ran.err);
    }
    assert_eq!(
        [&suites["machine"], &suites["image"], &suites["end"]],
        [&["aarch64"], &["equal"], &["0"]],
        "{}",
        ran.err
    );
    share.assert_released();
}

/// The small program has all that it needs in a guest with nothing but busybox.
#[test]
#[ignore = "long: emulates another architecture"]
fn the_agent_replays_events() {
    let programs = ["ferry-agent", "ferry-watch"].map(|name| static_program(Arch::Aarch64, name));
    let [Some(agent), Some(watch)] = programs else { return };
    let _alone = alone();
    let Some(watched) = Watched::new(Cache::Auto) else { return };
    fs::copy(agent, watched.path("ferry-agent")).unwrap();
    fs::copy(watch, watched.path("ferry-watch")).unwrap();
    let script = "./ferry-agent . 2>/tmp/log & agent=$!; until grep -q dropping /tmp/log; do sleep 0.2; done
        ./ferry-watch watch d >/tmp/out & watch=$!
        until grep -q inotify /proc/$watch/fdinfo/* 2>/dev/null; do sleep 0.2; done; : >ready; wait $watch; cat /tmp/out; kill $agent; wait $agent; echo agent $?";
    let mut guest = watched.guest(script);
    guest.kind = Kind::Qemu { cpus: 2, root: None };
    guest.arch = Arch::Aarch64;
    let dir = watched.path("d");
    let said = run_beside(guest, LIMIT, || {
        let begin = Instant::now();
        while !dir.with_file_name("ready").exists() && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(50));
        }
        let script = "mkfifo fifo; sleep 0.5; mv fifo moved; sleep 0.5; rm moved; sleep 0.5; : >end";
        assert!(Command::new("sh").args(["-euc", script]).current_dir(dir).status().unwrap().success());
    })
    .ok();
    let expected =
        ["d CREATE fifo", "d MOVED_FROM fifo 0", "d MOVED_TO moved 0", "d DELETE moved", "d CREATE end", "agent 0"];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}
