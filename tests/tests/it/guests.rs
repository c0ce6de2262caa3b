//! Several guests on one share, and guests that die.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_tests::{Cache, Export, GuestCache, MOUNTPOINT, Process, Share, TIMEOUT, cache_name, collect, guest_on, run};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// Rounds of killing a guest.
const KILLS: u32 = 3;
/// What guests may leave in the allocator and in thread stacks.
const MORE_KIB: u64 = 64 << 10;

/// Runs a script in two guests at once (`$1` is the guest's name), and another on the host beside them.
fn two(share: &Share, cache: Cache, script: &str, on_host: &str) {
    let (second, export) = share.beside(cache, 2);
    let start = Instant::now();
    let guests = [(&share.socket, "one"), (&second, "two")]
        .map(|(socket, name)| guest_on(socket, ["sh", "-euc", script, "sh", name]).spawn().unwrap());
    let mut host = Command::new("sh");
    host.args(["-euc", on_host, "sh", "host"]).current_dir(&share.path);
    let host = host.spawn().unwrap().wait().unwrap();
    for guest in guests {
        collect(guest, TIMEOUT, start).ok();
    }
    assert!(host.success(), "on the host");
    share.assert_released();
    export.stop();
}

#[test]
fn counting_under_locks_by_two_guests_and_the_host() {
    for cache in [Cache::None, Cache::Auto] {
        let share = Share::new(cache);
        for kind in ["posix", "flock", "ofd"] {
            let directory = share.path.join(kind);
            fs::create_dir(&directory).unwrap();
            let script = format!("exec {PROBE} --role count {kind} {kind} 40");
            two(&share, cache, &script, &script);
            let sum = u64::from_le_bytes(fs::read(directory.join("number")).unwrap().try_into().unwrap());
            assert_eq!(sum, 120, "{kind}, cache {}: counts were lost", cache_name(cache));
        }
    }
}

#[test]
fn appending_by_two_guests_and_the_host() {
    for cache in [Cache::None, Cache::Auto] {
        let share = Share::new(cache);
        let script = format!("exec {PROBE} --role append file $1 300");
        two(&share, cache, &script, &script);
        let text = fs::read_to_string(share.path.join("file")).unwrap();
        assert_eq!(text.lines().count(), 900, "cache {}: lines were lost or torn", cache_name(cache));
        for name in ["one", "two", "host"] {
            let lines = text.lines().filter(|line| line.starts_with(&format!("{name} "))).count();
            assert_eq!(lines, 300, "lines of {name}, cache {}", cache_name(cache));
        }
    }
}

#[test]
fn each_guest_sees_the_writes_of_the_other() {
    let script = r#"
        other=two; [ $1 = one ] || other=one
        for round in $(seq 1 10); do
            seq $round $((round * 100)) >$1.new && mv $1.new $1.$round
            tries=0
            while [ ! -e $other.$round ]; do tries=$((tries + 1)); [ $tries -lt 12000 ]; sleep 0.05; done
            seq $round $((round * 100)) | cmp - $other.$round
        done
    "#;
    for cache in [Cache::None, Cache::Auto] {
        let share = Share::new(cache);
        two(&share, cache, script, "true");
    }
}

/// A lock that a guest holds is handed over to a guest that waits for it, also when the holder dies.
#[test]
fn locks_pass_between_guests_and_from_the_dead() {
    let share = Share::new(Cache::Auto);
    let (second, export) = share.beside(Cache::Auto, 2);
    fs::write(share.path.join("file"), "").unwrap();
    for kind in ["posix", "flock", "ofd"] {
        let hold = format!("{PROBE} --role hold {kind} file");
        let first = share.guest(["sh", "-euc", &format!("sleep 1000 | {hold} >held.{kind}")]).spawn().unwrap();
        wait_for(|| {
            fs::read_to_string(share.path.join(format!("held.{kind}"))).is_ok_and(|text| text.contains("held"))
        });
        // The host's processes see it.
        let output =
            Command::new(PROBE).args(["--role", "try", kind, "file"]).current_dir(&share.path).output().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "taken\n",
            "{kind}: the host does not see the guest's lock"
        );
        let start = Instant::now();
        let waiting = guest_on(&second, ["sh", "-euc", &format!("{hold} </dev/null")]).spawn().unwrap();
        wait_for(|| in_flight(&export, "setlkw") > 0);
        first.kill();
        assert_eq!(collect(waiting, TIMEOUT, start).ok(), "held\n", "{kind}");
        drop(first);
        share.assert_released();
    }
    export.stop();
}

/// How many requests of an operation have no reply yet.
fn in_flight(export: &Export, operation: &str) -> u64 {
    let snapshot = export.share().metrics().snapshot();
    snapshot.operations.iter().filter(|counted| counted.name == operation).map(|counted| counted.in_flight).sum()
}

fn wait_for(condition: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < end, "it did not happen within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_killed_guest_leaves_nothing_and_the_next_one_mounts() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let fio = GuestCache::from_env().unwrap().peer("fio").unwrap();
    let share = Share::new(Cache::Auto);
    share.sh("true").ok();
    share.assert_released();
    let before = Process::now();
    for round in 0..KILLS {
        let script = format!(
            "{} --name=k --directory={MOUNTPOINT} --size=16M --rw=randrw --bs=16k --ioengine=libaio --direct=1 \
             --iodepth=16 --numjobs=2 --time_based --runtime=60 >/dev/null",
            fio.display()
        );
        let guest = share.guest(["sh", "-euc", &script]).spawn().unwrap();
        wait_for(|| share.dir.usage().handles >= 2);
        std::thread::sleep(Duration::from_millis(300));
        guest.kill();
        drop(guest);
        share.assert_released();
        let ran = run(share.guest(["sh", "-euc", "echo next >next; cat next"]), TIMEOUT);
        assert_eq!(ran.ok(), "next\n", "round {round}");
    }
    share.assert_released();
    before.assert_back(MORE_KIB);
}
