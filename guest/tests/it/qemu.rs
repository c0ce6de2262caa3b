//! QEMU guests.

use crate::common;

use common::{Virtiofsd, guest, run};
use ferry_guest::{Device, Kind, Mount};

#[test]
#[ignore = "long: make test-all"]
fn output_and_status_are_the_commands() {
    let mut guest = guest(&["sh", "-c", "echo hi; echo oh >&2; nproc; exit 7"]);
    guest.kind = Kind::Qemu { cpus: 2, root: None };
    let (status, out, err) = run(guest).unwrap();
    assert_eq!((status, &out[..], &err[..]), (7, &b"hi\n2\n"[..], &b"oh\n"[..]));
}

#[test]
#[ignore = "long: make test-all"]
fn a_share_beside_a_root_share() {
    let dir = tempfile::tempdir().unwrap();
    let shared = dir.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::write(shared.join("from-host"), "one\n").unwrap();
    let root = Virtiofsd::new("/".as_ref(), dir.path().join("root-socket"), "root");
    let work = Virtiofsd::new(&shared, dir.path().join("socket"), "work");
    let mut guest =
        guest(&["sh", "-c", "cat from-host; echo two >from-guest; sha256sum --version >/dev/null && echo coreutils"]);
    guest.kind = Kind::Qemu { cpus: 1, root: Some("root".into()) };
    guest.devices = vec![Device::fs(&root.socket, "root"), Device::fs(&work.socket, "work")];
    guest.mounts = vec![Mount::virtiofs("work", "/mnt/work")];
    guest.cwd = "/mnt/work".into();
    let (status, out, err) = run(guest).unwrap();
    assert_eq!((status, &out[..]), (0, &b"one\ncoreutils\n"[..]), "{}", String::from_utf8_lossy(&err));
    assert_eq!(std::fs::read(shared.join("from-guest")).unwrap(), b"two\n");
}
