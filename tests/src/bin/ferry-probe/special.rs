//! Devices, FIFOs and sockets: used within the guest, never opened on the host.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::Check;

pub const CHECKS: &[Check] = &[("fifo", fifo), ("socket", socket), ("devices", devices)];

fn fifo(dir: &Path) {
    let path = dir.join("fifo");
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    assert!(fs::metadata(&path).unwrap().file_type().is_fifo());
    let mut child = std::process::Command::new("/bin/sh")
        .arg("-c")
        .arg("cat <\"$0\"")
        .arg(&path)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut writer = File::options().write(true).open(&path).unwrap();
    writer.write_all(b"through the fifo").unwrap();
    drop(writer);
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(text, "through the fifo");
}

fn socket(dir: &Path) {
    // The path must fit into a socket's address.
    std::env::set_current_dir(dir).unwrap();
    let listener = UnixListener::bind("socket").unwrap();
    assert!(fs::metadata("socket").unwrap().file_type().is_socket());
    let mut client = UnixStream::connect("socket").unwrap();
    client.write_all(b"hello").unwrap();
    drop(client);
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    std::env::set_current_dir("/").unwrap();
}

fn devices(dir: &Path) {
    let path = dir.join("zero");
    mknodat(CWD, &path, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(1, 5)).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert!(meta.file_type().is_char_device());
    assert_eq!(meta.rdev(), makedev(1, 5));
    let mut bytes = [1; 16];
    File::open(&path).unwrap().read_exact(&mut bytes).unwrap();
    assert_eq!(bytes, [0; 16]);
    for (major, minor) in [(1, 3), (259, 1_048_575), (4095, 255)] {
        let path = dir.join(format!("block{major}-{minor}"));
        mknodat(CWD, &path, FileType::BlockDevice, Mode::from_raw_mode(0o600), makedev(major, minor)).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())), (major, minor));
    }
}
