//! The 9P export, used by clients that others wrote: diod's tools, and a program on the Go package `hugelgupf/p9`.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use ferry_dir::Dir;
use ferry_ninep::{Export, Options};
use ferry_tests::mounts::{diod, go_program};
use ferry_tests::{Place, directory};
use tempfile::TempDir;

/// A server of a directory with a few files in it.
struct Server {
    address: SocketAddr,
    shared: PathBuf,
    _export: Export,
    _directory: TempDir,
}

fn pattern(bytes: u32) -> Vec<u8> {
    (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect()
}

impl Server {
    fn new() -> Self {
        ferry_tests::log();
        let directory = directory(Place::Disk);
        let shared = directory.path().join("shared");
        fs::create_dir_all(shared.join("sub")).unwrap();
        fs::write(shared.join("small"), "hello\n").unwrap();
        fs::write(shared.join("big"), pattern(3_000_001)).unwrap();
        for number in 0..300 {
            fs::write(shared.join(format!("sub/file {number}")), "").unwrap();
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let source = Arc::new(Dir::open(&shared, ferry_dir::Options::default()).unwrap());
        let export = Export::start(vec![listener.into()], source, Options::default()).unwrap();
        Self { address, shared, _export: export, _directory: directory }
    }
}

#[track_caller]
fn ok(output: Output) -> Vec<u8> {
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn sorted(lines: &[u8]) -> Vec<String> {
    let text = String::from_utf8(lines.to_vec()).unwrap();
    let mut names: Vec<_> = text.lines().filter(|name| !matches!(*name, "." | "..")).map(String::from).collect();
    names.sort_unstable();
    names
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn diod_lists_and_reads() {
    let server = Server::new();
    let address = server.address.to_string();
    let Some(mut list) = diod("diodls") else { return };
    let listed = ok(list.args(["-s", &address, "-a", "/", "sub"]).output().unwrap());
    assert_eq!(sorted(&listed), names_in(&server.shared.join("sub")));
    let read = ok(diod("diodcat").unwrap().args(["-s", &address, "-a", "/", "big", "small"]).output().unwrap());
    assert!(read == [&pattern(3_000_001)[..], b"hello\n"].concat(), "{} bytes", read.len());
    let missing = diod("diodcat").unwrap().args(["-s", &address, "-a", "/", "gone"]).output().unwrap();
    assert!(!missing.status.success());
    assert!(String::from_utf8_lossy(&missing.stderr).contains("No such file"), "{missing:?}");
}

#[test]
fn a_client_in_go_lists_reads_and_writes() {
    let Some(program) = go_program("go-client", ".") else { return };
    let server = Server::new();
    let address = server.address.to_string();
    let client = |verb: &str, target: &str| {
        let mut command = Command::new(&program);
        command.args(["tcp", &address, verb, target]);
        command
    };
    let listed = ok(client("ls", "/sub").output().unwrap());
    assert_eq!(sorted(&listed), names_in(&server.shared.join("sub")));
    assert!(ok(client("read", "/big").output().unwrap()) == pattern(3_000_001));
    let input = fs::File::open(server.shared.join("big")).unwrap();
    ok(client("write", "/sub/copy").stdin(input).output().unwrap());
    let copy = server.shared.join("sub/copy");
    assert!(fs::read(&copy).unwrap() == pattern(3_000_001));
    assert_eq!(fs::metadata(copy).unwrap().permissions().mode() & 0o7777, 0o640);
    let missing = client("read", "/gone").output().unwrap();
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no such file"), "{missing:?}");
}
