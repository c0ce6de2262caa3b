//! A guest that migrates from one stock QEMU to another, each with a server of its own, while it writes.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_tests::survivor::Survivor;
use ferry_tests::{Kind, Output, Place, guest_on};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(180);
const TICK: Duration = Duration::from_millis(50);
/// Less than the guest's memory.
const LARGE_BYTES: usize = 48 << 20;
/// How fast memory is sent, in bytes a second.
const BYTES_PER_S_MAX: u32 = 32 << 20;
/// How long memory is sent while it changes: all of it once, and what changed.
const IN_DOUBT: Duration = Duration::from_secs(10);

/// Writes, and keeps account of what it wrote, with a file open for appending and another for reading, until it is told to
/// stop. Meanwhile it reads a large file again and again, also while a slow machine computes sums, and looks at what it has of it in its memory, which the device has written
/// to. Nobody takes its output once it has moved.
const SCRIPT: &str = r#"
exec >out 2>&1
exec 3>>appended 4<host-file
dd bs=5 count=1 <&4 >head 2>/dev/null
: >started
while [ ! -e stop ]; do
    echo 3 >/proc/sys/vm/drop_caches
    cat large >/dev/null
done &
number=0
while [ ! -e stop ]; do
    dd if=/dev/urandom of=chunk.$number bs=64k count=8 2>/dev/null
    sha256sum chunk.$number >>sums
    echo $number >&3
    number=$((number + 1))
    echo 3 >/proc/sys/vm/drop_caches
    cat large >/dev/null
    sha256sum -c large.sum >/dev/null || echo $number >>wrong
done
wait
cat <&4 >tail
sync
echo 3 >/proc/sys/vm/drop_caches
sha256sum -c sums >/dev/null && [ "$(wc -l <appended)" = $number ] && echo $number >verified
: >ended
while :; do sleep 1; done
"#;

/// QEMU's monitor.
struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(socket: &Path) -> Self {
        let end = Instant::now() + LIMIT;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < end, "{}: {error}", socket.display()),
            }
            std::thread::sleep(TICK);
        };
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut monitor = Self(BufReader::new(stream));
        monitor.line();
        monitor.ask("qmp_capabilities", &json!({}));
        monitor
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        let question = json!({ "execute": command, "arguments": arguments });
        self.0.get_mut().write_all(format!("{question}\n").as_bytes()).unwrap();
        loop {
            let answer = self.line();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(answer) = answer.get("return") {
                return answer.clone();
            }
        }
    }
}

/// Ends the other machine, whatever happens.
struct RemoteMachine(Child);

impl Drop for RemoteMachine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The command line of a machine that waits for what the machine of this number sends: the same, but for its sockets.
fn twin(pid: u32, replaced: &[(&str, &str)], incoming: &str) -> Command {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let mut words = words.map(|word| String::from_utf8(word.to_vec()).unwrap());
    let mut command = Command::new(words.next().unwrap());
    while let Some(mut word) = words.next() {
        // It has been read, and is gone; what comes has booted.
        if word == "-initrd" {
            words.next();
            continue;
        }
        for (from, to) in replaced {
            word = word.replace(from, to);
        }
        // Its command has no connection any more.
        for (id, number) in [("control", 3), ("stdout", 4), ("stderr", 5)] {
            word = word.replace(&format!("socket,id={id},fd={number}"), &format!("null,id={id}"));
        }
        command.arg(word);
    }
    command.args(["-incoming", incoming]).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn wait_for(what: &Path, said: impl Fn() -> String) {
    let end = Instant::now() + LIMIT;
    while !what.exists() {
        assert!(Instant::now() < end, "no {}: {}", what.display(), said());
        std::thread::sleep(TICK);
    }
}

fn migrates(flags: &[&str]) {
    let here = Survivor::new(Place::Disk, &[&["--tag", "t"], flags].concat());
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (monitor, way) = (at("here.qmp"), at("way"));
    fs::write(here.path.join("host-file"), "first and last").unwrap();
    let script = format!("head -c {LARGE_BYTES} /dev/urandom >large; sha256sum large >large.sum");
    assert!(Command::new("sh").args(["-c", &script]).current_dir(&here.path).status().unwrap().success());
    let mut guest = guest_on(&here.socket, ["sh", "-euc", SCRIPT]);
    guest.kind = Kind::Qemu { cpus: 1, root: None };
    guest.memory_mib = 256;
    guest.boot_timeout = LIMIT;
    (guest.stdout, guest.stderr) = (Output::Null, Output::Null);
    // Pages that it fills with zeros before the device writes to them would be sent for that alone.
    guest.kernel_args = vec!["init_on_alloc=0".into()];
    guest.qemu_args = vec!["-qmp".into(), format!("unix:{monitor},server=on,wait=off").into()];
    let running = guest.spawn().unwrap();
    let there = Survivor::of(&here.path, &[&["--tag", "t"], flags].concat());
    let sockets = [here.socket.to_str().unwrap(), there.socket.to_str().unwrap()];
    let replaced = [(sockets[0], sockets[1]), ("here.qmp", "there.qmp")];
    let _there = RemoteMachine(twin(running.pid(), &replaced, &format!("unix:{way}")).spawn().unwrap());
    let mut arrival = Monitor::connect(Path::new(&at("there.qmp")));
    let said = || format!("here: {}; there: {}", here.said(), there.said());
    let mut departure = Monitor::connect(Path::new(&monitor));
    wait_for(&here.path.join("chunk.2"), said);
    // It does not come to its end before that is allowed: what has been sent is written to once more, by the device above all.
    departure.ask("migrate-set-parameters", &json!({ "max-bandwidth": BYTES_PER_S_MAX, "downtime-limit": 1 }));
    let begun = Instant::now();
    departure.ask("migrate", &json!({ "uri": format!("unix:{way}") }));
    std::thread::sleep(IN_DOUBT);
    let status = departure.ask("query-migrate", &json!({}))["status"].clone();
    assert_eq!(status, "active", "the device writes all the time, and QEMU does not know of it");
    departure.ask("migrate-set-parameters", &json!({ "downtime-limit": 10_000 }));
    loop {
        let found = departure.ask("query-migrate", &json!({}));
        match found["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => panic!("{found}; {}", said()),
            _ => assert!(begun.elapsed() < LIMIT, "{found}"),
        }
        std::thread::sleep(TICK);
    }
    println!("migrated within {:?}", begun.elapsed());
    running.kill();
    while arrival.ask("query-status", &json!({}))["status"] != "running" {
        assert!(begun.elapsed() < LIMIT, "it does not go on; {}", said());
        std::thread::sleep(TICK);
    }
    // It goes on there for a while.
    let chunks = || fs::read_dir(&here.path).unwrap().count();
    let before = chunks();
    while chunks() < before + 3 {
        assert!(begun.elapsed() < LIMIT, "it writes nothing any more; {}", said());
        std::thread::sleep(TICK);
    }
    fs::write(here.path.join("stop"), "").unwrap();
    wait_for(&here.path.join("ended"), said);
    assert!(!here.path.join("wrong").exists(), "its memory has lost what the device wrote to it");
    let text = |name: &str| fs::read_to_string(here.path.join(name)).unwrap_or_default();
    assert!(!text("verified").is_empty(), "{}; {}", text("out"), said());
    assert_eq!((text("head").as_str(), text("tail").as_str()), ("first", " and last"));
    let check = Command::new("sha256sum").args(["--quiet", "-c", "sums"]).current_dir(&here.path).status().unwrap();
    assert!(check.success(), "the host has other contents than the guest wrote");
    assert_eq!(there.said(), "");
}

#[test]
fn a_guest_continues_to_write_in_another_qemu() {
    let _alone = ferry_tests::alone();
    migrates(&["--cache", "always"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_guest_continues_to_write_in_another_qemu_by_file_handles() {
    let _alone = ferry_tests::alone();
    migrates(&["--cache", "always", "--migration-mode", "file-handles"]);
}
