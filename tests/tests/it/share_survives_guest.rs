//! Stock guests whose share's server is killed with SIGKILL, or ended with SIGTERM or SIGINT, and started again: neither
//! they nor their VMMs notice.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_tests::disks::model::Random;
use ferry_tests::guest::DeviceKind;
use ferry_tests::survivor::Survivor;
use ferry_tests::{
    Device, Guest, GuestCache, GuestResult, Kind, Options, Place, Share, TIMEOUT, Turn, collect, directory, guest_on,
};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};

/// Longer than any of these guests lives on a machine that has other things to do.
const GUEST_MAX: Duration = Duration::from_secs(600);

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// What the guest does until it is told that it is enough: fio, which checks what it reads; with a lock of each kind held, and a file
/// open that no name leads to. `$1` is fio, `$2` the probe, `$3` is what fio is to do.
const SCRIPT: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec 8>nameless 7<nameless
rm nameless
echo before >&8
exec 9>flocked
flock -n 9
sleep 100000 | $2 --role hold posix locked >held &
while ! grep -q held held; do sleep 0.1; done
mkdir work
echo there >ready
while [ ! -e enough ]; do
    $1 --name=v --directory=work --size=8M --rw=randrw --bsrange=4k-64k --verify=crc32c --verify_fatal=1 --do_verify=1 $3 >fio 2>&1 || {
        cat fio
        exit 1
    }
    rm -f work/*
    echo round >>rounds
done
echo after >&8
printf 'before\nafter\n' | cmp - /dev/fd/7
exec 9>&-
kill %1 2>/dev/null || true
seq 1 10000 >last
sha256sum last >sum
sync
"#;

/// Where the guest's own numbers of bytes may be kept by it, and where each of them comes to the server.
const WAYS: [(&str, &str); 2] =
    [("direct", "--ioengine=libaio --direct=1 --iodepth=16"), ("cached", "--ioengine=psync --fsync=16")];

/// All of it is mapped, and its end is a copy.
const MAPPED: (&str, &str) = ("mapped", "--ioengine=mmap --size=8204k");

/// Where the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vmm {
    UserModeLinux,
    Qemu,
    /// QEMU, with a window.
    QemuDax,
}

/// The host's root, for the programs in it.
fn programs() -> Share {
    let options = Options { queues: 1, tag: Some("programs".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    Share::of(Path::new("/"), directory(Place::Disk), dir, options)
}

fn is_flocked(path: &Path) -> bool {
    let file = fs::File::open(path).unwrap();
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::AGAIN)
}

/// Whether a process of the host can have the lock that the guest's has.
fn is_locked(directory: &Path) -> bool {
    let output =
        Command::new(PROBE).args(["--role", "try", "posix", "locked"]).current_dir(directory).output().unwrap();
    String::from_utf8_lossy(&output.stdout) == "taken\n"
}

/// A guest whose output is collected.
struct GuestOutputThread(JoinHandle<GuestResult>);

impl GuestOutputThread {
    fn new(guest: Guest) -> Self {
        let turn = Turn::of(&guest);
        let begin = Instant::now();
        let running = guest.spawn().unwrap_or_else(|error| panic!("{error}"));
        Self(std::thread::spawn(move || {
            let _turn = turn;
            collect(running, GUEST_MAX, begin)
        }))
    }

    /// Waits until something happens, while the guest runs.
    #[track_caller]
    fn runs_until(self, condition: impl Fn() -> bool) -> Self {
        let end = Instant::now() + TIMEOUT;
        while !condition() {
            if self.0.is_finished() {
                panic!("the guest has ended: {:?}", self.0.join().unwrap());
            }
            assert!(Instant::now() < end, "it did not happen within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        self
    }
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

/// The signals of a server that is killed so often.
fn killed(times: usize) -> Vec<Signal> {
    vec![Signal::KILL; times]
}

/// The signals of a server that is ended so often, by an administrator and by a terminal in turn.
fn ended(times: usize) -> Vec<Signal> {
    [Signal::TERM, Signal::INT].into_iter().cycle().take(times).collect()
}

fn survives(vmm: Vmm, (name, fio): (&str, &str), signals: &[Signal], pause: Duration) {
    let mut server = Survivor::new(Place::Disk, &["--tag", "t"]);
    let path = server.path.clone();
    let program = GuestCache::from_env().unwrap().peer("fio").unwrap();
    let script = ["/bin/bash", "-euc", SCRIPT, "bash", program.to_str().unwrap(), PROBE, fio];
    fs::write(path.join("locked"), b"").unwrap();
    let mut guest = guest_on(&server.socket, script);
    if vmm == Vmm::QemuDax {
        guest.devices[0].kind = DeviceKind::Fs { tag: "t".into(), queues: 2, dax: true };
        guest.mounts[0].options = "dax=always".into();
    }
    let programs = (vmm != Vmm::UserModeLinux).then(programs);
    if let Some(programs) = &programs {
        guest.kind = Kind::Qemu { cpus: 2, root: Some("programs".into()) };
        guest.devices.insert(0, Device::fs(&programs.socket, "programs"));
    }
    guest.boot_timeout = TIMEOUT;
    let guest = GuestOutputThread::new(guest).runs_until(|| path.join("ready").exists());
    let mut random = Random::new(signals.len() as u64);
    let usual = usize::try_from(pause.as_micros()).unwrap();
    for signal in signals {
        std::thread::sleep(pause / 2 + Duration::from_micros(random.below(usual) as u64));
        match *signal {
            Signal::KILL => server.kill(),
            signal => assert_eq!(server.end_by(signal), ""),
        }
        assert!(is_flocked(&path.join("flocked")), "while there is no server, too");
        server.start();
        assert!(is_flocked(&path.join("flocked")) && is_locked(&path));
    }
    // What it began under the last server, it brings to an end.
    let rounds = lines(&path.join("rounds"));
    let guest = guest.runs_until(|| lines(&path.join("rounds")) > rounds);
    fs::write(path.join("enough"), b"").unwrap();
    let ran = guest.0.join().unwrap();
    println!("{vmm:?}, {name}: {signals:?}, {} rounds of fio, {:?}", lines(&path.join("rounds")), ran.took);
    ran.ok();
    let check = Command::new("sha256sum").args(["--quiet", "-c", "sum"]).current_dir(&path).status();
    assert!(check.unwrap().success(), "the host sees other contents than the guest wrote");
    assert_eq!(server.said(), "");
    server.end();
    server.wait_for_the_keeper();
}

#[test]
fn killed_under_fio_in_user_mode_linux() {
    for way in WAYS {
        survives(Vmm::UserModeLinux, way, &killed(3), Duration::from_millis(700));
    }
}

#[test]
fn ended_under_fio_in_user_mode_linux() {
    for way in WAYS {
        survives(Vmm::UserModeLinux, way, &ended(2), Duration::from_millis(700));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn ended_under_direct_fio_in_qemu() {
    survives(Vmm::Qemu, WAYS[0], &ended(4), Duration::from_secs(2));
}

/// The channel by which files are mapped is the next server's, too.
#[test]
#[ignore = "long: make test-all"]
fn ended_under_a_window_in_qemu() {
    survives(Vmm::QemuDax, MAPPED, &ended(4), Duration::from_secs(2));
}

#[test]
#[ignore = "long: make test-all"]
fn killed_50_times_under_fio_in_user_mode_linux() {
    for way in WAYS {
        survives(Vmm::UserModeLinux, way, &killed(50), Duration::from_millis(700));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn killed_under_direct_fio_in_qemu() {
    survives(Vmm::Qemu, WAYS[0], &killed(10), Duration::from_secs(2));
}

#[test]
#[ignore = "long: make test-all"]
fn killed_under_cached_fio_in_qemu() {
    survives(Vmm::Qemu, WAYS[1], &killed(10), Duration::from_secs(2));
}

/// What is in its window it reads and writes while there is no server, too.
#[test]
fn killed_under_a_window_in_qemu() {
    survives(Vmm::QemuDax, MAPPED, &killed(3), Duration::from_secs(2));
}

#[test]
#[ignore = "long: make test-all"]
fn killed_20_times_under_a_window_in_qemu() {
    survives(Vmm::QemuDax, MAPPED, &killed(20), Duration::from_secs(2));
}

/// The processor time that the processes with this word in their command lines have used.
fn cpu_time(word: &str) -> Duration {
    let ticks = |stat: &str| -> u64 {
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11..13].iter().map(|field| field.parse::<u64>().unwrap()).sum()
    };
    let has_word = |path: &Path| fs::read_to_string(path.join("cmdline")).is_ok_and(|line| line.contains(word));
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let stats = processes.filter(|path| has_word(path)).filter_map(|path| fs::read_to_string(path.join("stat")).ok());
    Duration::from_millis(10 * stats.map(|stat| ticks(&stat)).sum::<u64>())
}

/// How what holds a guest's share ends.
#[derive(Clone, Copy, Debug)]
enum Loss {
    /// The server is killed, and then the keeper, by this signal.
    KeeperLast(Signal),
    /// The keeper is killed, and then the server.
    KeeperFirst,
    /// The server is told to end for good.
    ForGood,
}

/// Loses a guest's share under it. Whatever ends that, the guest is not kept busy by it.
fn loses(loss: Loss) {
    let mut server = Survivor::new(Place::Disk, &["--tag", "t"]);
    let path = server.path.clone();
    let script = "touch ready; while echo line >>file; do sleep 0.01; done; exit 3";
    let guest = guest_on(&server.socket, ["/bin/sh", "-c", script]);
    let guest = GuestOutputThread::new(guest).runs_until(|| path.join("ready").exists());
    // A request is under way, which nobody will answer.
    let pause = Duration::from_millis(300);
    match loss {
        Loss::KeeperLast(signal) => {
            server.kill();
            std::thread::sleep(pause);
            kill_process(server.keeper().unwrap(), signal).unwrap();
        }
        Loss::KeeperFirst => {
            kill_process(server.keeper().unwrap(), Signal::KILL).unwrap();
            std::thread::sleep(pause);
            server.kill();
        }
        Loss::ForGood => drop(server.end_by(Signal::QUIT)),
    }
    server.wait_for_the_keeper();
    std::thread::sleep(pause);
    let word = server.socket.to_str().unwrap();
    let before = cpu_time(word);
    let moment = Duration::from_secs(1);
    std::thread::sleep(moment);
    let used = cpu_time(word).saturating_sub(before);
    assert!(used < moment / 4, "{loss:?}: the guest used {used:?} of {moment:?}");
    drop(guest);
}

#[test]
fn a_guest_without_a_keeper_does_not_spin() {
    loses(Loss::KeeperLast(Signal::KILL));
    loses(Loss::KeeperLast(Signal::TERM));
}

#[test]
fn a_guest_whose_keeper_ends_first_does_not_spin() {
    loses(Loss::KeeperFirst);
}

#[test]
fn a_guest_whose_share_ends_for_good_does_not_spin() {
    loses(Loss::ForGood);
}
