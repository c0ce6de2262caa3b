//! What each system call does on a share, by the checks of `ferry-probe`, which the host's own file system passes too.

use std::collections::BTreeSet;
use std::process::Command;

use ferry_tests::confined::ConfinedShare;
use ferry_tests::{Cache, MOUNTPOINT, Options, Place, Share, TIMEOUT, cache_name, directory, guest_on, run};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The number of checks: fewer lines mean that the program ended early.
const CHECKS: usize = 72;

/// Checks that fail in a guest on a share, whether only with write-back, and why.
const FAILING: &[(&str, bool, &str)] = &[
    ("idmapped-mount", false, "idmapped mounts are not asked for: see `idmapped`"),
    (
        "flags-ioctl",
        true,
        "with write-back the guest places appended data, so an append-only file cannot be opened for it",
    ),
];

/// Checks that need a capability which a confined server does not keep on its own, as virtiofsd does not:
/// `LINUX_IMMUTABLE` and `SYS_ADMIN` (attributes `trusted.`).
const NEEDS_MORE: &[&str] = &["flags-ioctl", "xattr-namespaces", "xattr-listed"];

fn failures(out: &str) -> BTreeSet<String> {
    let failed = |line: &str| line.split_once(" FAILED").map(|(name, _)| name.to_owned());
    out.lines().filter_map(failed).collect()
}

fn checks(place: Place, options: Options, entries: Option<u32>) {
    let (cache, writeback) = (options.cache, options.writeback);
    let share = Share::with(place, options);
    // The checks ask the path whether tmpfs is below.
    let directory = if place == Place::Memory { "tmpfs" } else { "disk" };
    let script = format!("mkdir -p {directory} && exec {PROBE} {MOUNTPOINT}/{directory}");
    let mut guest = share.guest(["sh", "-c", &script]);
    if let Some(entries) = entries {
        guest.env = vec![("FERRY_PROBE_ENTRIES".into(), entries.to_string().into())];
    }
    let ran = run(guest, TIMEOUT);
    let lines = ran.out.lines().count();
    println!("{place:?}, cache {}: {lines} checks in {:?}", cache_name(cache), ran.took);
    assert_eq!(lines, CHECKS, "the checks did not come to their end:\n{}\n{}", ran.out, ran.err);
    let known = FAILING.iter().filter(|(_, only_writeback, _)| writeback || !only_writeback);
    let known: BTreeSet<_> = known.map(|(name, ..)| (*name).to_owned()).collect();
    assert_eq!(failures(&ran.out), known, "not what is known to fail:\n{}\n{}", ran.out, ran.err);
    share.assert_released();
}

fn options(cache: Cache) -> Options {
    Options { cache, ..Options::default() }
}

#[test]
fn without_a_cache() {
    checks(Place::Disk, options(Cache::None), None);
}

#[test]
fn cached() {
    checks(Place::Disk, options(Cache::Auto), None);
}

#[test]
fn cached_for_long() {
    checks(Place::Disk, options(Cache::Always), None);
}

/// The program in its whole sandbox: whatever a guest does, it gets by with its capabilities and system calls.
#[test]
fn confined() {
    let more = ["--inode-file-handles", "never", "--modcaps", "+sys_admin:+linux_immutable"];
    for (flags, missing) in [(&[][..], NEEDS_MORE), (&more, &[])] {
        let mut server = ConfinedShare::start(flags);
        let script = format!("mkdir -p disk && exec {PROBE} {MOUNTPOINT}/disk");
        let ran = run(guest_on(&server.socket, ["sh", "-c", &script]), TIMEOUT);
        assert!(server.is_alive(), "{}", server.said());
        assert_eq!(ran.out.lines().count(), CHECKS, "they did not come to their end:\n{}\n{}", ran.out, ran.err);
        let known = FAILING.iter().filter(|(_, only_writeback, _)| !only_writeback).map(|(name, ..)| *name);
        let known: BTreeSet<_> = known.chain(missing.iter().copied()).map(str::to_owned).collect();
        assert_eq!(failures(&ran.out), known, "{flags:?}: not what is known to fail:\n{}\n{}", ran.out, ran.err);
    }
}

/// Linux names the caller only where something is made then.
#[test]
fn idmapped() {
    const CHECKS: &str = "idmapped-mount owner-and-groups suid-cleared-by-chown capabilities-cleared xattr-namespaces xattr-listed \
                          set-id-rules set-id-rules-of-ranges set-id-chown set-id-exec set-id-exec-after-ranges set-id-held";
    let expected = ["set-id-rules", "set-id-rules-of-ranges", "set-id-chown", "xattr-listed"].map(str::to_owned);
    let share = Share::with(Place::Disk, Options { allow_idmap: true, ..options(Cache::Auto) });
    let script = format!("mkdir -p disk && exec {PROBE} {MOUNTPOINT}/disk {CHECKS}");
    let ran = run(share.guest(["sh", "-c", &script]), TIMEOUT);
    assert_eq!(ran.out.lines().count(), CHECKS.split_ascii_whitespace().count(), "{}\n{}", ran.out, ran.err);
    assert_eq!(failures(&ran.out), BTreeSet::from(expected), "not what is known to fail:\n{}\n{}", ran.out, ran.err);
    // Sgid that is no privilege may stay, and root loses what only root may keep; but nobody else keeps anything.
    for kept in ["stranger: 6", "stranger: 4", "member: 6", "member: 4"] {
        assert!(!ran.out.contains(kept), "{}", ran.out);
    }
    share.assert_released();
}

#[test]
fn on_tmpfs() {
    checks(Place::Memory, options(Cache::Auto), None);
}

#[test]
#[ignore = "long: make test-all"]
fn written_back_and_with_many_entries() {
    checks(Place::Disk, Options { writeback: true, ..options(Cache::Auto) }, None);
    checks(Place::Disk, options(Cache::Auto), Some(50_000));
}

#[test]
fn the_host_passes_them_too() {
    for (place, name) in [(Place::Disk, "disk"), (Place::Memory, "tmpfs")] {
        let directory = directory(place);
        let dir = directory.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        // The checks go through this directory as other users.
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let output = Command::new(PROBE).arg(&dir).output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert_eq!((out.lines().count(), failures(&out)), (CHECKS, BTreeSet::new()), "{out}");
    }
}

/// What the source leaves to the export: a client says with each OPEN whether truncation takes suid and sgid along.
#[test]
fn truncation_at_open_clears_suid_for_users_and_not_for_root() {
    let share = Share::new(Cache::Auto);
    let script = "touch root user; chmod 6777 root user; echo text | tee root >user; chmod 6777 root user
        : >root
        setpriv --reuid 1000 --regid 1000 --clear-groups sh -c ': >user'
        stat -c '%n %a %s' root user";
    let ran = share.sh(script);
    assert_eq!((ran.status, &*ran.out), (0, "root 6777 0\nuser 777 0\n"), "{ran:?}");
}
