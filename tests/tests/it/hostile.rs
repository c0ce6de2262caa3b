//! Malformed input: each piece gets an error or a dropped chain, the next good request works, and nothing leaks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use ferry_driver::{Error, ROOT, hostile};
use ferry_tests::survivor::Survivor;
use ferry_tests::{Cache, Place, Process, Share};

/// What the first connections allocate for good: thread stacks and allocator arenas.
const MORE_KIB: u64 = 32 << 10;

fn run_table(race: Duration) {
    let share = Share::new(Cache::Auto);
    let options = hostile::Options { drop_after: Duration::from_millis(100), race, ..hostile::Options::default() };
    let mut cases = hostile::cases();
    // To look into one case: FERRY_HOSTILE=ring/ cargo test ...
    if let Ok(wanted) = std::env::var("FERRY_HOSTILE") {
        cases.retain(|case| case.name.contains(&wanted));
    }
    // The first case warms up what stays.
    let _ = hostile::run(&cases[0], &share.socket, &options);
    share.assert_released();
    let before = Process::now();
    let mut failures = Vec::new();
    for case in &cases {
        let outcome = hostile::run(case, &share.socket, &options);
        if !outcome.passed {
            failures.push(format!("{}: {}", outcome.name, outcome.problem.unwrap_or_default()));
        }
    }
    assert!(failures.is_empty(), "{} of {} cases failed:\n{}", failures.len(), cases.len(), failures.join("\n"));
    share.assert_released();
    before.assert_back(MORE_KIB);
    println!("{} cases", cases.len());
}

#[test]
fn every_malformed_input_is_survived() {
    if !ferry_alone::in_own_process() {
        return;
    }
    run_table(Duration::from_millis(300));
}

#[test]
#[ignore = "long: make test-all"]
fn every_malformed_input_is_survived_with_long_races() {
    if !ferry_alone::in_own_process() {
        return;
    }
    run_table(Duration::from_secs(20));
}

/// A host's handle of a file: its type, and its bytes.
fn handle(path: &Path) -> (i32, Vec<u8>) {
    const BYTES_MAX: usize = 128;
    #[repr(C)]
    struct Buffer {
        bytes: u32,
        kind: i32,
        handle: [u8; BYTES_MAX],
    }
    let mut buffer = Buffer { bytes: u32::try_from(BYTES_MAX).unwrap(), kind: 0, handle: [0; BYTES_MAX] };
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    let mut mount = 0;
    // SAFETY: the path ends with NUL, the buffer is a `struct file_handle` with as many bytes behind it as it says, and all
    // live until the call is back.
    let done =
        unsafe { libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), (&raw mut buffer).cast(), &raw mut mount, 0) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    (buffer.kind, buffer.handle[..buffer.bytes as usize].to_vec())
}

/// A record of a state: an inode.
fn node(ino: u64, references: u64, identity: &[u8]) -> Vec<u8> {
    let length = u32::try_from(8 + identity.len()).unwrap();
    [&[1][..], &references.to_le_bytes(), &length.to_le_bytes(), &ino.to_le_bytes(), identity].concat()
}

/// The state of a guest that migrates leads to nothing that its lookups would not lead to.
#[test]
fn a_state_from_elsewhere_opens_no_file_outside_of_the_share() {
    const HEADER_BYTES: usize = 36;
    const INO: u64 = 77;
    const ON_ROOT_MOUNT: u8 = 1;
    const HANDLE: u8 = 4;
    const PATH: u8 = 32;
    const FAR: u8 = 64;
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("only root opens files by handles");
        return;
    }
    let here = Survivor::new(Place::Memory, &["--migration-on-error", "guest-error"]);
    let mut guest = here.connect();
    let secret = here.path.parent().unwrap().join("secret");
    fs::write(&secret, "of the host").unwrap();
    fs::write(here.path.join("there"), "shared").unwrap();
    let mut header = guest.save().unwrap();
    header.0.truncate(HEADER_BYTES);
    let (header, mut stopped) = header;
    let of = |path: &Path, flags: u8| {
        let (about, (kind, bytes)) = (fs::metadata(path).unwrap(), handle(path));
        let device = about.dev();
        let device = u64::from(libc::major(device)) << 32 | u64::from(libc::minor(device));
        let mut identity = [&[1, flags][..], &about.mode().to_le_bytes()].concat();
        if flags & FAR == 0 {
            identity.extend([device, about.ino()].into_iter().flat_map(u64::to_le_bytes));
        }
        identity.extend(kind.to_le_bytes());
        identity.push(u8::try_from(bytes.len()).unwrap());
        identity.extend(bytes);
        identity
    };
    let by_path = [&[1, PATH][..], &0o100_644_u32.to_le_bytes(), &5_u16.to_le_bytes(), b"there"].concat();
    for (what, references, identity, is_there) in [
        ("this host's own form", 1, of(&secret, ON_ROOT_MOUNT | HANDLE), false),
        ("the same of what is shared", 1, of(&here.path.join("there"), ON_ROOT_MOUNT | HANDLE), false),
        ("a handle from far", 1, of(&secret, FAR | HANDLE), false),
        ("more references than there can be", u64::MAX, by_path.clone(), false),
        ("a path", 1, by_path, true),
    ] {
        let state = [&header[..], &node(INO, references, &identity), &[0]].concat();
        guest.migrate(&here.socket, &(state, stopped)).unwrap();
        let found = guest.getattr(INO);
        assert_eq!(found.is_ok(), is_there, "{what}: {found:?}");
        assert!(is_there || matches!(found, Err(Error::Errno(libc::ESTALE))), "{what}: {found:?}");
        assert!(guest.lookup(ROOT, "there").is_ok(), "{what}");
        stopped = guest.save().unwrap().1;
    }
}
