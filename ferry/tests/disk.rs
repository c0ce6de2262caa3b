//! `ferry disk`: what the command line does, up to the socket.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use rustix::process::Signal;

use common::{Server, ferry, refused, run};

#[test]
fn makes_grows_and_offers_files() {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (disk, other, socket) = (folder.path().join("disk"), folder.path().join("other"), folder.path().join("s"));
    let second = folder.path().join("t");
    for (file, size, bytes) in
        [(&disk, "4M", 4 << 20), (&disk, "6M", 6 << 20), (&disk, "1M", 6 << 20), (&other, "1M", 1 << 20)]
    {
        assert!(run(ferry().arg("disk").arg(file).args(["--resize", size])).status.success());
        assert_eq!(fs::metadata(file).expect("the file").len(), bytes);
    }
    let mut command = ferry();
    command.arg("disk").arg(&disk).arg("--vhost-user").arg(&socket).args(["--serial", "one", "--queues", "2"]);
    command.arg(&other).arg("--vhost-user").arg(&second).args(["--read-only"]);
    let mut server = Server::start(&mut command);
    assert_eq!(server.line["disks"][0]["bytes"], 6 << 20);
    assert_eq!(
        (&server.line["disks"][0]["serial"], &server.line["disks"][1]["serial"]),
        (&"one".into(), &"other".into())
    );
    assert_eq!(server.line["disks"][1]["read_only"], true);
    assert!(socket.exists() && second.exists());
    let third = folder.path().join("u");
    let text = refused(1, ferry().arg("disk").arg(&disk).arg("--vhost-user").arg(&third));
    assert!(text.contains("is in use by another process"), "{text}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists() && !second.exists());
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let (disk, socket, image) = (folder.path().join("disk"), folder.path().join("s"), folder.path().join("image"));
    fs::write(&disk, [0; 4096]).expect("a file");
    fs::write(&image, [b"QFI\xfb".to_vec(), vec![0; 4092]].concat()).expect("a file");
    let offer = |file| {
        let mut command = ferry();
        command.arg("disk").arg(file).arg("--vhost-user").arg(&socket);
        command
    };
    assert!(refused(1, &mut offer(&image)).contains("begins like a qcow2 image"));
    assert!(refused(1, offer(&image).args(["--format", "qcow2"])).contains("cannot use the image"));
    assert!(refused(1, ferry().arg("disk").arg(&disk)).contains("'--vhost-user <SOCKET>' is missing"));
    let twice = refused(1, offer(&disk).arg(&image).arg("--vhost-user").arg(&socket));
    assert!(twice.contains("is given twice"), "{twice}");
    for wrong in [["--format", "vmdk"], ["--queues", "17"], ["--queues", "0"], ["--cache", "maybe"], ["--poll-us", "x"]]
    {
        let output = run(offer(&disk).args(wrong));
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    assert!(!socket.exists());
}

#[test]
fn management_programs_find_what_they_expect() {
    let folder = tempfile::tempdir().expect("a folder");
    let back_end = folder.path().join("ferry-disk");
    symlink(env!("CARGO_BIN_EXE_ferry"), &back_end).expect("a link");
    for command in [&mut Command::new(&back_end), ferry().arg("disk")] {
        let output = run(command.arg("--print-capabilities"));
        assert!(output.status.success());
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(said, serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
    }
    let (disk, socket) = (folder.path().join("disk"), folder.path().join("s"));
    fs::write(&disk, [0; 4096]).expect("a file");
    let mut command = Command::new(&back_end);
    command.arg("--socket-path").arg(&socket).arg("--blk-file").arg(&disk).arg("--read-only");
    let mut server = Server::start(&mut command);
    assert_eq!(server.line["disks"][0]["read_only"], true);
    server.signal(Signal::INT);
    assert_eq!(server.status(), Some(0));
}
