//! User-mode Linux guests: what a command sees, and what comes out.

use crate::common;

use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{TIMEOUT, Virtiofsd, guest, run};
use ferry_guest::{Device, Error, Input, Mount};

#[test]
fn output_and_status_are_the_commands() {
    let (status, out, err) = run(guest(&["sh", "-c", "echo hi; echo oh >&2; exit 7"])).unwrap();
    assert_eq!((status, &out[..], &err[..]), (7, &b"hi\n"[..], &b"oh\n"[..]));
}

#[test]
fn arguments_environment_and_directory_arrive_as_they_are() {
    let odd = std::ffi::OsString::from_vec(b"it's \"x\" $HOME `y`\n\xff end".to_vec());
    let mut guest = guest(&["sh", "-c", "printf %s \"$1|$V|$HOME|\"; pwd", "sh"]);
    guest.command.push(odd.clone());
    guest.env = vec![("V".into(), odd.clone()), ("HOME".into(), "/nowhere".into())];
    guest.cwd = "/usr/bin".into();
    let (status, out, _) = run(guest).unwrap();
    let odd = odd.into_vec();
    assert_eq!((status, out), (0, [&odd[..], b"|", &odd, b"|/nowhere|/usr/bin\n"].concat()));
}

#[test]
fn bytes_pass_unchanged_in_and_out() {
    let data: Vec<u8> =
        (0..300_000u32).flat_map(|number| number.wrapping_mul(2_654_435_761).to_be_bytes()).take(300_000).collect();
    let mut guest = guest(&["cat"]);
    guest.stdin = Input::Piped;
    let mut running = guest.spawn().unwrap();
    let mut stdin = running.stdin.take().unwrap();
    let mut stdout = running.stdout.take().unwrap();
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let mut got = Vec::new();
    std::io::Read::read_to_end(&mut stdout, &mut got).unwrap();
    writer.join().unwrap();
    assert_eq!(running.wait_timeout(TIMEOUT).unwrap(), 0);
    assert!(got == data, "{} bytes of {} came back, or others", got.len(), data.len());
}

#[test]
fn the_root_is_the_hosts_and_nothing_written_stays() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "host").unwrap();
    let path = file.to_str().unwrap();
    let (status, out, err) = run(guest(&["sh", "-c", "cat $0 && echo guest >$0 && cat $0", path])).unwrap();
    assert_eq!((status, &out[..]), (0, &b"hostguest\n"[..]), "{}", String::from_utf8_lossy(&err));
    assert_eq!(std::fs::read(&file).unwrap(), b"host");
}

#[test]
fn a_share_is_read_and_written() {
    let dir = tempfile::tempdir().unwrap();
    let shared = dir.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::write(shared.join("from-host"), "one\n").unwrap();
    let server = Virtiofsd::new(&shared, dir.path().join("socket"), "work");
    let mut guest =
        guest(&["sh", "-c", "cat from-host; echo two >from-guest; mkdir -p a/b; grep -c virtiofs /proc/mounts"]);
    guest.devices = vec![Device::fs(&server.socket, "work")];
    guest.mounts = vec![Mount::virtiofs("work", "/mnt/some/where")];
    guest.cwd = "/mnt/some/where".into();
    let (status, out, err) = run(guest).unwrap();
    assert_eq!((status, &out[..]), (0, &b"one\n1\n"[..]), "{}", String::from_utf8_lossy(&err));
    assert_eq!(std::fs::read(shared.join("from-guest")).unwrap(), b"two\n");
    assert!(shared.join("a/b").is_dir());
}

#[test]
fn several_guests_run_at_once() {
    let guests = ["one", "two", "three"].map(|name| guest(&["echo", name]).spawn().unwrap());
    for (running, name) in guests.into_iter().zip(["one\n", "two\n", "three\n"]) {
        let mut running = running;
        let mut out = String::new();
        std::io::Read::read_to_string(&mut running.stdout.take().unwrap(), &mut out).unwrap();
        assert_eq!((out.as_str(), running.wait_timeout(TIMEOUT).unwrap()), (name, 0));
    }
}

#[test]
fn a_guest_that_is_dropped_is_gone() {
    let running = guest(&["sleep", "1000"]).spawn().unwrap();
    let process = format!("/proc/{}", running.pid());
    assert!(Path::new(&process).exists());
    drop(running);
    let start = Instant::now();
    while Path::new(&process).exists() {
        assert!(start.elapsed() < Duration::from_secs(5), "{process} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn failures_have_a_reason() {
    let (status, _, err) = run(guest(&["no-such-program"])).unwrap();
    assert_eq!(status, 127);
    assert!(String::from_utf8_lossy(&err).contains("no-such-program"));

    let mut lonely = guest(&["true"]);
    lonely.devices = vec![Device::fs("/nonexistent/socket", "work")];
    let error = run(lonely).unwrap_err();
    assert_eq!(error.to_string(), "no socket at /nonexistent/socket: start the back end first");

    let mut wrong = guest(&["true"]);
    wrong.mounts = vec![Mount::virtiofs("work", "/mnt/work")];
    let error = run(wrong).unwrap_err();
    let Error::Guest { message, log } = &error else { panic!("{error}") };
    assert!(message.contains("mounting work on /mnt/work failed"), "{message}");
    assert!(log.contains("tag <work> not found"), "{log}");

    let (status, _, _) = run(guest(&["sh", "-c", "kill -9 $$"])).unwrap();
    assert_eq!(status, 128 + 9);
}

#[test]
fn a_guest_without_a_word_at_its_end_is_an_error() {
    let error = run(guest(&["sh", "-c", "echo c >/proc/sysrq-trigger; sleep 100"])).unwrap_err();
    let Error::Guest { message, log } = &error else { panic!("{error}") };
    assert!(message.contains("ended without a status"), "{message}");
    assert!(log.contains("sysrq triggered crash"), "{log}");
}
