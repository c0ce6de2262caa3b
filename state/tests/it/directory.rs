//! The owner of a keeper's directory, and the users that a keeper and a server accept.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Command, Stdio};

use ferry_state::{Directory, DirectoryError, KeeperConnection, KeeperError};
use rustix::event::{EventfdFlags, eventfd};

/// A user id that does not exist.
const STRANGER: u32 = 64_321;

#[test]
fn a_directory_that_others_may_enter_or_that_is_a_link_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    // It is created with its parent.
    Directory::open(&at("a/b")).unwrap();
    for made in ["a", "a/b"] {
        assert_eq!(fs::metadata(at(made)).unwrap().permissions().mode() & 0o777, 0o700, "{made}");
    }
    for mode in [0o755, 0o710, 0o701, 0o1777] {
        fs::set_permissions(at("a/b"), Permissions::from_mode(mode)).unwrap();
        let error = Directory::open(&at("a/b")).unwrap_err();
        assert!(matches!(error, DirectoryError::Mode(found) if found == mode), "{error}");
        assert!(error.to_string().contains(&format!("{mode:04o}")), "{error}");
    }
    fs::set_permissions(at("a/b"), Permissions::from_mode(0o700)).unwrap();
    symlink(at("a/b"), at("link")).unwrap();
    symlink(at("nowhere"), at("dangling")).unwrap();
    fs::write(at("file"), "").unwrap();
    for name in ["link", "dangling", "file", "file/below"] {
        let error = Directory::open(&at(name)).unwrap_err();
        assert!(matches!(error, DirectoryError::NotADirectory), "{name}: {error}");
    }
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(at("a/b"), Some(STRANGER), None).unwrap();
        let error = Directory::open(&at("a/b")).unwrap_err();
        assert!(matches!(error, DirectoryError::Owner { owner: STRANGER, user: 0 }), "{error}");
    } else {
        ferry_skip::skip!("only root can give a directory away");
    }
}

/// Listens as another user where a keeper is expected, or connects to a keeper: this program again.
#[test]
fn strangers_are_neither_keepers_nor_servers() {
    if let Some(path) = std::env::var_os("FERRY_TEST_STRANGER") {
        stranger(&path.into_string().unwrap());
        return;
    }
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to start a program as another user");
        return;
    }
    let start = |what: &str, path: &std::path::Path| {
        let name = "directory::strangers_are_neither_keepers_nor_servers";
        let mut command = Command::new("setpriv");
        let ids = [format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"), "--clear-groups".into()];
        command.args(ids).arg(std::env::current_exe().unwrap()).args(["--exact", name, "--nocapture"]);
        command.env("FERRY_TEST_STRANGER", format!("{what} {}", path.display())).stdout(Stdio::piped()).spawn().unwrap()
    };
    // One listens in a directory that others could enter before.
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o777)).unwrap();
    let mut listening = start("listen", &place.path().join("keeper"));
    while !place.path().join("ready").exists() {
        assert!(listening.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    fs::set_permissions(place.path(), Permissions::from_mode(0o700)).unwrap();
    let refused = KeeperConnection::reach(&Directory::open(place.path()).unwrap());
    listening.kill().unwrap();
    listening.wait().unwrap();
    let error = refused.unwrap_err();
    assert!(matches!(error, KeeperError::Stranger { peer: STRANGER, user: 0 }), "{error}");

    // One connects to a keeper in an accessible directory.
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), Permissions::from_mode(0o700)).unwrap();
    let directory = Directory::open(place.path()).unwrap();
    let listener = ferry_state::listen(&directory).unwrap();
    std::thread::spawn(move || ferry_state::keep(&listener, &eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
    fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(place.path().join("keeper"), Permissions::from_mode(0o666)).unwrap();
    let output = start("connect", &place.path().join("keeper")).wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    // The right user is still served.
    KeeperConnection::reach(&directory).unwrap();
}

/// Runs as the other user.
fn stranger(what: &str) {
    use rustix::net::{
        AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept, bind, connect, listen, recv,
        socket_with,
    };
    assert_eq!(rustix::process::geteuid().as_raw(), STRANGER);
    let (what, path) = what.split_once(' ').unwrap();
    let address = SocketAddrUnix::new(path).unwrap();
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    if what == "listen" {
        bind(&socket, &address).unwrap();
        listen(&socket, 4).unwrap();
        fs::write(std::path::Path::new(path).with_file_name("ready"), "").unwrap();
        let _server = accept(&socket).unwrap();
        std::thread::sleep(std::time::Duration::from_secs(60));
    } else {
        connect(&socket, &address).unwrap();
        // Not one packet: the keeper hangs up.
        let came = recv(&socket, &mut [0_u8; 64][..], RecvFlags::empty());
        assert!(matches!(came, Err(_) | Ok((_, 0))), "{came:?}");
    }
}
