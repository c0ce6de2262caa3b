//! What two guests and the host see of each other's files, one step after the other.
//!
//! Each step, and each failure, is announced by a file. Guests cannot be notified of changes: with `cache=auto` names
//! and attributes may be a second old, and an open sees the current contents.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::time::{Duration, Instant};

use ferry_tests::{Cache, Options, Place, Share, TIMEOUT, collect, guest_on};

/// What guests' scripts begin with: `step N` announces, `reached N` waits for that.
const STEPS: &str = r#"
    trap '[ $? = 0 ] || : >failed' EXIT
    step() { : >step.$1; }
    reached() { tries=0; while [ ! -e step.$1 ]; do tries=$((tries + 1)); [ $tries -lt 1500 -a ! -e failed ]; sleep 0.1; done; }
    is() { [ "$(cat $1)" = "$2" ] && [ $(stat -c %s $1) = ${#2} ] || { echo "$1: $(stat -c %s $1) bytes: $(cat $1), not $2"; exit 1; }; }
"#;

/// Waits for a step on the host, which caches nothing.
fn reached(share: &Share, step: u32) {
    let (end, file) = (Instant::now() + TIMEOUT, share.path.join(format!("step.{step}")));
    while !file.exists() {
        let failed = share.path.join("failed").exists();
        assert!(!failed && Instant::now() < end, "step {step} was not reached");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn step(share: &Share, step: u32) {
    fs::write(share.path.join(format!("step.{step}")), "").unwrap();
}

/// Runs two guests, and what the host does beside them; returns what they said.
fn two(share: &Share, options: Options, scripts: [&str; 2], on_host: impl FnOnce()) -> [String; 2] {
    let (second, export) = share.beside_with(options, 2);
    let start = Instant::now();
    let mut sockets = [&share.socket, &second].into_iter();
    let guests = scripts.map(|script| {
        let socket = sockets.next().expect("two sockets");
        guest_on(socket, ["sh", "-euc", &format!("{STEPS}\n{script}")]).spawn().unwrap()
    });
    let beside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(on_host));
    if beside.is_err() {
        fs::write(share.path.join("failed"), "").unwrap();
    }
    let ran = guests.map(|guest| collect(guest, TIMEOUT, start));
    assert!(beside.is_ok() && ran.iter().all(|ran| ran.status == 0), "{ran:?}");
    let said = ran.map(|ran| ran.out);
    share.assert_released();
    export.stop();
    said
}

fn options(cache: Cache, writeback: bool) -> Options {
    Options { cache, writeback, ..Options::default() }
}

/// What one has closed, the others see when they open it.
fn close_to_open(cache: Cache) {
    let share = Share::with(Place::Disk, options(cache, false));
    let one = "
        printf one >file; is file one; step 1
        reached 3; is file 'three, by the host'
        reached 8; printf ', and four' >>file; stat -c %y file; step 4
        reached 5; exec 3>>file; printf ', and five' >&3; sync file; stat -c %y file; step 6
        reached 7; exec 3>&-
    ";
    let two_ = "
        reached 1; is file one
        printf 'two, longer' >file; stat -c %y file; step 2
        reached 3; is file 'three, by the host'; step 8
        reached 4; is file 'three, by the host, and four'; stat -c %y file; step 5
        reached 6; is file 'three, by the host, and four, and five'; stat -c %y file; step 7
    ";
    let read = || fs::read_to_string(share.path.join("file")).unwrap();
    let said = two(&share, options(cache, false), [one, two_], || {
        reached(&share, 2);
        assert_eq!(read(), "two, longer");
        fs::write(share.path.join("file"), "three, by the host").unwrap();
        step(&share, 3);
        reached(&share, 6);
        assert_eq!(read(), "three, by the host, and four, and five", "it was made durable, and is not closed yet");
    });
    let [one, two] = said.each_ref().map(|said| said.lines().collect::<Vec<_>>());
    // The times of the last two writes, as who made them and the other see them.
    assert_eq!((one.len(), two.len()), (2, 3), "{said:?}");
    assert_eq!(one[..], two[1..], "times of change");
    assert!(fs::metadata(share.path.join("file")).unwrap().mtime() > 0);
}

#[test]
fn closed_files_are_seen_by_later_opens() {
    close_to_open(Cache::Auto);
}

/// Bytes that neither length nor time of change tell of: only that each open asks for them again shows them.
#[test]
fn opened_files_are_read_again() {
    let share = Share::new(Cache::Auto);
    let file = share.path.join("file");
    fs::write(&file, "round 0").unwrap();
    let script = format!(
        "{STEPS}
        exec 3<file; [ \"$(cat <&3)\" = 'round 0' ]
        for round in 1 2 3; do
            step ${{round}}0; reached ${{round}}1; cat file; echo
        done"
    );
    let guest = guest_on(&share.socket, ["sh", "-euc", &script]).spawn().unwrap();
    let start = Instant::now();
    for round in 1..=3 {
        reached(&share, round * 10);
        let changed = fs::metadata(&file).unwrap().modified().unwrap();
        let written = fs::File::options().write(true).open(&file).unwrap();
        written.write_all_at(format!("round {round}").as_bytes(), 0).unwrap();
        written.set_modified(changed).unwrap();
        drop(written);
        step(&share, round * 10 + 1);
    }
    assert_eq!(collect(guest, TIMEOUT, start).ok(), "round 1\nround 2\nround 3\n");
}

/// However long a guest may keep attributes: who opens a file finds where it ends now, by whichever way it is opened.
#[test]
fn opened_files_have_their_current_size() {
    let kept = Some(Duration::from_secs(1000));
    let options = Options { entry_timeout: kept, attr_timeout: kept, ..options(Cache::Auto, false) };
    let share = Share::with(Place::Disk, options);
    fs::create_dir_all(share.path.join("a/b")).unwrap();
    let file = share.path.join("a/b/file");
    fs::write(&file, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!(
        "{STEPS}
        exec 3<a/b/file; a/b/file; ls -l a/b a >/dev/null
        reached_by() {{ stat -c %s a/b/file; step $1; reached $2; stat -c %s a/b/file; }}
        reached_by 10 11; a/b/file
        reached_by 20 21; tail -c 7 a/b/file
        reached_by 30 31; printf '#end' >>a/b/file; tail -c 11 a/b/file; echo
        reached_by 40 41; cat </proc/self/fd/3 >/dev/null; tail -c 7 a/b/file"
    );
    let guest = guest_on(&share.socket, ["sh", "-euc", &script]).spawn().unwrap();
    let start = Instant::now();
    for round in 1..=4 {
        reached(&share, round * 10);
        let mut written = fs::File::options().append(true).open(&file).unwrap();
        writeln!(written, "{}echo {round}", if round == 4 { "\n" } else { "" }).unwrap();
        drop(written);
        step(&share, round * 10 + 1);
    }
    // A `stat` alone goes by what is known, and the open after it does not.
    let said = collect(guest, TIMEOUT, start).ok();
    let expected = "10\n10\n1\n17\n17\necho 2\n24\n24\necho 3\n#end\n35\n35\necho 4\n";
    assert_eq!(said, expected);
    share.assert_released();
}

/// Who writes back believes its own length of a file, and is therefore to be the only one that writes to it.
#[test]
fn written_back_data_are_seen_after_close_or_sync() {
    let share = Share::with(Place::Disk, options(Cache::Auto, true));
    let one = "
        printf one >file; stat -c %y file; step 1
        reached 2; exec 3>>file; printf ', two' >&3; sync file; stat -c %y file; step 3
        reached 4; printf ', three' >&3; exec 3>&-; stat -c %y file; step 5
    ";
    let other = "
        reached 1; is file one; stat -c %y file; step 2
        reached 3; is file 'one, two'; stat -c %y file; step 4
        reached 5; is file 'one, two, three'; stat -c %y file
    ";
    let read = || fs::read_to_string(share.path.join("file")).unwrap();
    let [one, other] = two(&share, options(Cache::Auto, false), [one, other], || {
        reached(&share, 3);
        assert_eq!(read(), "one, two", "it was made durable, and is not closed yet");
    });
    assert_eq!((one.lines().count(), read().as_str()), (3, "one, two, three"));
    assert_eq!(one, other, "times of change");
}

#[test]
fn nothing_is_kept_without_a_cache() {
    close_to_open(Cache::None);
}

/// With `O_DIRECT`, bytes are asked for whatever is kept, and whoever writes them.
#[test]
fn direct_reads_are_of_now() {
    let share = Share::new(Cache::Auto);
    fs::write(share.path.join("file"), [b'0'; 4096]).unwrap();
    let one = "
        direct() { dd if=file iflag=direct bs=4096 count=1 status=none | tr -d '\\n' | head -c 1; }
        cat file >/dev/null; [ $(direct) = 0 ]; step 1
        reached 2; [ $(direct) = 1 ]; step 3
        reached 4; [ $(direct) = 2 ]
    ";
    let other = "
        reached 1; head -c 4096 /dev/zero | tr '\\0' 1 | dd of=file oflag=direct conv=notrunc bs=4096 iflag=fullblock status=none; step 2
    ";
    two(&share, options(Cache::Auto, false), [one, other], || {
        reached(&share, 3);
        fs::write(share.path.join("file"), [b'2'; 4096]).unwrap();
        step(&share, 4);
    });
}

/// Shared mappings of files that are not kept: by default they work, and can be refused.
#[test]
fn shared_mappings_without_a_cache_can_be_had_and_refused() {
    let python = "/usr/bin/python3";
    if !std::path::Path::new(python).exists() {
        ferry_skip::skip!("no {python} here");
        return;
    }
    let script = format!(
        "exec {python} -c '
import errno, mmap
file = open(\"file\", \"r+b\")
try:
    mapped = mmap.mmap(file.fileno(), 0)
    mapped[0:3] = b\"new\"
    mapped.flush()
    print(\"mapped\")
except OSError as error:
    print(errno.errorcode[error.errno])
private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
print(private[0:3].decode())
'"
    );
    for (mmap, said, left) in [(true, "mapped\nnew\n", "new bytes"), (false, "ENODEV\nold\n", "old bytes")] {
        let share = Share::with(Place::Disk, Options { mmap, ..options(Cache::None, false) });
        fs::write(share.path.join("file"), "old bytes").unwrap();
        assert_eq!(share.sh(&script).ok(), said, "mmap {mmap}");
        assert_eq!(fs::read_to_string(share.path.join("file")).unwrap(), left);
    }
}

/// How often that is tried: a busy machine may hold up guest or host for any time, but not each time.
const ROUNDS: u32 = 4;

/// What a machine may add to a bound in the best of all rounds, seconds.
const SLACK: f64 = 0.5;

/// How late a guest sees what the host changes (a length, a name that goes, one that comes): never later than its timeout, for it cannot
/// be told. Measured in the guest between a file that is always asked for and what it knows.
#[test]
fn cached_data_of_a_guest_expire() {
    for (timeout, bound) in [(0, 0), (1, 1), (3, 3)] {
        let timeout = Some(Duration::from_secs(timeout));
        let share = Share::with(
            Place::Disk,
            Options {
                entry_timeout: timeout,
                attr_timeout: timeout,
                negative_timeout: timeout,
                ..options(Cache::Auto, false)
            },
        );
        fs::write(share.path.join("signal"), "0").unwrap();
        for round in 1..=ROUNDS {
            ["file", "gone"].iter().for_each(|name| fs::write(share.path.join(format!("{name}{round}")), "1").unwrap());
        }
        // All are asked for all the time; what is kept is given up when its time is over, asked for or not.
        let script = format!(
            "{STEPS}
            now() {{ cut -d ' ' -f 1 /proc/uptime; }}
            for round in $(seq {ROUNDS}); do
                [ $(stat -c %s file$round) = 1 ]; [ -e gone$round ]; [ ! -e new$round ]; step ${{round}}0
                # What was not there is believed, too; what is opened is read anew.
                until [ $(cat signal) = $round ]; do sleep 0.05; done; begin=$(now); size= gone= new= looks=0
                while [ -z \"$size\" ] || [ -z \"$gone\" ] || [ -z \"$new\" ]; do
                    looks=$((looks + 1))
                    [ -n \"$size\" ] || [ $(stat -c %s file$round) = 1 ] || size=\"$(now) $looks\"
                    [ -n \"$gone\" ] || [ -e gone$round ] || gone=\"$(now) $looks\"
                    [ -n \"$new\" ] || [ ! -e new$round ] || new=\"$(now) $looks\"
                done
                echo $begin $size $gone $new
            done"
        );
        let guest = guest_on(&share.socket, ["sh", "-euc", &script]).spawn().unwrap();
        let start = Instant::now();
        for round in 1..=ROUNDS {
            reached(&share, round * 10);
            let path = |name: &str| share.path.join(format!("{name}{round}"));
            fs::write(path("file"), "two").unwrap();
            fs::remove_file(path("gone")).unwrap();
            fs::write(path("new"), "1").unwrap();
            fs::write(share.path.join("signal"), round.to_string()).unwrap();
        }
        let said = collect(guest, TIMEOUT, start).ok();
        let rounds: Vec<Vec<f64>> =
            said.lines().map(|line| line.split(' ').map(|number| number.parse().unwrap()).collect()).collect();
        assert_eq!(rounds.len(), ROUNDS as usize, "{said}");
        for (what, at) in [("a length", 1), ("a name that went", 3), ("a new name", 5)] {
            let late = rounds.iter().map(|round| round[at] - round[0]).fold(f64::INFINITY, f64::min);
            println!(
                "a guest with a timeout of {bound} s sees {what} {late:.2} s after it knows that there is one, or later"
            );
            assert!(late <= f64::from(bound) + SLACK, "{what}: {late} s: {said}");
            if bound == 0 {
                assert!(rounds.iter().all(|round| round[at + 1] == 1.0), "{what} is seen at the first look: {said}");
            }
        }
    }
}
