//! Public suites and programs on mounts of this host: each source with each transport.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ferry_tests::mounts::{Cell, MountOptions, Mounted, ServerVendor, Site, Source};
use ferry_tests::suites::pjdfstest::{self, Results, names};
use ferry_tests::suites::programs::{
    FIO_ENGINES, MAKE_REPOSITORY, SQLITE, USE_REPOSITORY, fio as fio_line, has_sqlite,
};
use ferry_tests::suites::{build as tree, fsx as operations};
use ferry_tests::{Place, directory, on_cells};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The number of the probe's checks: fewer lines mean that the program ended early.
pub(crate) const CHECKS: usize = 72;

/// The time limit of each step, enough with ten times as many busy processes as CPUs.
const LIMIT: Duration = Duration::from_secs(600);

/// A mounted 9P server.
const NINEP: &[Source] = &[Source::NineP(ServerVendor::Ferry)];
const NO_FALLOCATE: &str = "there is no fallocate in the protocol, and this check makes use of it among other calls";
const NOT_IDMAPPED: &str = "idmapped mounts are not asked for: see `probe_with_idmapped_mounts`";
const NO_ACL: &str = "ACLs are attributes as others are: 9P does not say how they and new files' modes go together";

/// Checks that fail on mounts: sources, check, reason.
const FAILING: &[(&[Source], &str, &str)] = &[
    (&[Source::Dir, Source::Mem, Source::Pmem], "idmapped-mount", NOT_IDMAPPED),
    (NINEP, "idmapped-mount", NOT_IDMAPPED),
    (&[Source::Mem, Source::Pmem], "flags-ioctl", "their files have no flags (chattr)"),
    (NINEP, "flags-ioctl", "there is no ioctl in the protocol"),
    (NINEP, "fallocate", NO_FALLOCATE),
    (NINEP, "set-id-rules-of-ranges", NO_FALLOCATE),
    (NINEP, "set-id-exec-after-ranges", NO_FALLOCATE),
    (NINEP, "capabilities-cleared", NO_FALLOCATE),
    (NINEP, "rename-flags", "there is no renameat2 in the protocol"),
    (NINEP, "rename-storm", "it exchanges names"),
    (NINEP, "tmpfile", "there is no O_TMPFILE in the protocol"),
    (NINEP, "tmpfile-storm", "as tmpfile"),
    (NINEP, "sgid-directory", "as tmpfile"),
    (NINEP, "holes", "there is no SEEK_HOLE in the protocol"),
    (NINEP, "acl", NO_ACL),
    (NINEP, "acl-default", NO_ACL),
    (NINEP, "acl-clears-sgid", NO_ACL),
];

/// Cases of `pjdfstest` that fail on mounts of diod, and why: its fids are paths on its host.
const FAILING_ON_DIOD: &[(&[&str], &str)] = &[
    (
        &[
            "chmod::enametoolong_path",
            "chown::enametoolong_path",
            "chown::lchown::enametoolong_path",
            "link::enametoolong_path",
            "mkdir::enametoolong_path",
            "mkfifo::enametoolong_path",
            "mknod::enametoolong_path",
            "mknod::privileged::enametoolong_path",
            "open::enametoolong_path",
            "rename::enametoolong_path",
            "rmdir::enametoolong_path",
            "symlink::enametoolong_path",
            "truncate::enametoolong_path",
            "unlink::enametoolong_path",
        ],
        "the longest path that there may be is too long behind the path of the shared directory",
    ),
    (
        &[
            "link::remove_link::block",
            "link::remove_link::char",
            "link::remove_link::fifo",
            "link::remove_link::regular",
            "link::remove_link::socket",
            "unlink::open_file_not_freed",
        ],
        "a file whose name was removed is ENOENT, though it has another one or is open",
    ),
];

fn known_cases(source: Source) -> BTreeSet<String> {
    let of_diod = FAILING_ON_DIOD.iter().filter(|_| source == Source::NineP(ServerVendor::Diod));
    of_diod.flat_map(|(names, _)| *names).map(|name| (*name).to_owned()).collect()
}

/// As mount(8), which would call the helper of `fuse.ferry` for a remount: mount.fuse, which mounts a second time.
const MOUNT_WITHOUT_HELPERS: &str = "#!/bin/sh\nexec /bin/mount -i \"$@\"\n";

/// Returns the checks that fail on a source.
pub(crate) fn known(source: Source) -> BTreeSet<String> {
    FAILING.iter().filter(|known| known.0.contains(&source)).map(|known| known.1.to_owned()).collect()
}

/// Mounts a cell, runs the test in it, unmounts it.
fn mounted(cell: &Cell, limit: Duration, test: impl FnOnce(&Mounted)) {
    mounted_with(cell, &[], limit, test);
}

/// The same with further flags.
fn mounted_with(cell: &Cell, flags: &[&str], limit: Duration, test: impl FnOnce(&Mounted)) {
    let args = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let options = MountOptions { args, limit: limit * 2, ..MountOptions::default() };
    let Some(mounted) = Mounted::with(cell, &options) else { return };
    let begin = std::time::Instant::now();
    test(&mounted);
    println!("{cell}: {:?}", begin.elapsed());
    mounted.finish();
}

fn posix(cell: &Cell) {
    mounted(cell, LIMIT, |mounted| {
        let run_cases = |remount, only: Option<&str>| {
            let scratch = directory(Place::Disk);
            // Cases act as other users, too.
            std::fs::set_permissions(scratch.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let second = directory(Place::Memory);
            let config = scratch.path().join("pjdfstest.toml");
            let mut command = pjdfstest::command(&config, &mounted.site.path, second.path(), remount);
            command.extend(only.map(Into::into));
            let mount = scratch.path().join("mount");
            std::fs::write(&mount, MOUNT_WITHOUT_HELPERS).unwrap();
            std::fs::set_permissions(&mount, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let path = format!("{}:{}", scratch.path().display(), std::env::var("PATH").unwrap());
            mounted.site.run(Command::new(&command[0]).args(&command[1..]).env("PATH", path), LIMIT)
        };
        let run = |remount| {
            let ran = run_cases(remount, None);
            Results::parse(&ran.out, &ran.err, remount)
        };
        let (mut main, remounting) = (run(false), run(true));
        main.run_racing_again(|name| run_cases(false, Some(name)).status == 0);
        assert_eq!(main.skipped_for_good(), names(pjdfstest::SKIPPED), "{cell}: skipped");
        assert_eq!(main.failed, known_cases(cell.source), "{cell}: other cases fail than are known to");
        assert!(remounting.skipped.is_empty() && remounting.failed.is_empty(), "{cell}: {remounting:?}");
        println!("{cell}: {} passed", main.passed.len() + remounting.passed.len());
    });
}

on_cells!(posix: quick [dir_uring, mem_uring, mem_passthrough, pmem_devfuse, ninep_devfuse]
    long [dir_devfuse, dir_passthrough, mem_devfuse, pmem_uring, pmem_passthrough, mem_uring_none, dir_uring_always,
    ninep_devfuse_none, ninep_devfuse_always, ninep_devfuse_auto_writeback, ninep_devfuse_always_writeback, diod_devfuse,
    dir_devfuse_none, dir_devfuse_metadata, dir_devfuse_always,
    dir_devfuse_none_writeback, dir_devfuse_auto_writeback, dir_devfuse_metadata_writeback, dir_devfuse_always_writeback]);

fn probe(cell: &Cell) {
    mounted(cell, LIMIT, |mounted| probed(cell, mounted));
}

/// The same with locks in the kernel, where closing a read-only file sends no request.
#[test]
fn probe_with_local_locks() {
    let cell: Cell = "dir_passthrough".parse().unwrap();
    mounted_with(&cell, &["--local-locks"], LIMIT, |mounted| probed(&cell, mounted));
}

/// With idmapped mounts the kernel sends the caller's ids only for creation.
#[test]
fn probe_with_idmapped_mounts() {
    const CHECKS: [&str; 12] = [
        "idmapped-mount",
        "owner-and-groups",
        "suid-cleared-by-chown",
        "capabilities-cleared",
        "xattr-namespaces",
        "xattr-listed",
        "set-id-rules",
        "set-id-rules-of-ranges",
        "set-id-chown",
        "set-id-exec",
        "set-id-exec-after-ranges",
        "set-id-held",
    ];
    for cell in ["dir_passthrough", "mem_devfuse"] {
        let cell: Cell = cell.parse().unwrap();
        mounted_with(&cell, &["--allow-idmap"], LIMIT, |mounted| {
            let ran = mounted.site.run(Command::new(PROBE).arg(&mounted.site.path).args(CHECKS), LIMIT);
            let failed = ran.out.lines().filter_map(|line| line.split_once(" FAILED"));
            let failed: BTreeSet<&str> = failed.map(|(name, _)| name).collect();
            assert_eq!(ran.out.lines().count(), CHECKS.len(), "{cell}: not to its end:\n{}\n{}", ran.out, ran.err);
            let expected = BTreeSet::from(["set-id-rules", "set-id-rules-of-ranges", "set-id-chown", "xattr-listed"]);
            assert_eq!(failed, expected, "{cell}:\n{}\n{}", ran.out, ran.err);
            // Sgid without group execution may stay, and root may lose it, too; other users keep neither bit.
            for kept in ["stranger: 6", "stranger: 4", "member: 6", "member: 4"] {
                assert!(!ran.out.contains(kept), "{cell}: {}", ran.out);
            }
        });
    }
}

fn probed(cell: &Cell, mounted: &Mounted) {
    let ran = mounted.site.run(Command::new(PROBE).arg(&mounted.site.path), LIMIT);
    let failed = |line: &str| line.split_once(" FAILED").map(|(name, _)| name.to_owned());
    let failures: BTreeSet<String> = ran.out.lines().filter_map(failed).collect();
    assert_eq!(ran.out.lines().count(), CHECKS, "{cell}: not to its end:\n{}\n{}", ran.out, ran.err);
    assert_eq!(failures, known(cell.source), "{cell}:\n{}\n{}", ran.out, ran.err);
}

on_cells!(probe: quick [dir_devfuse, dir_passthrough, mem_uring, pmem_uring, ninep_devfuse]
    long [dir_uring, mem_devfuse, mem_passthrough, pmem_devfuse, pmem_passthrough, mem_uring_none, mem_uring_always,
    ninep_devfuse_none, ninep_devfuse_always]);

fn fsx_of(cell: &Cell, weights: &str, count: u32, seed: u32) {
    let limit = Duration::from_secs(60 + u64::from(count) / 50);
    mounted(cell, limit, |mounted| {
        let scratch = directory(Place::Disk);
        let config = scratch.path().join("fsx.toml");
        let command = operations::command(&config, &mounted.site.path.join("file"), weights, count, seed);
        mounted.site.run(Command::new(&command[0]).args(&command[1..]), limit).ok();
    });
}

/// Runs all operations of the source concurrently; 9P cannot create holes.
fn mixed(cell: &Cell) -> String {
    match cell.source {
        Source::NineP(_) => operations::MIXED.replace("punch_hole = 3\n", ""),
        _ => operations::MIXED.into(),
    }
}

fn fsx(cell: &Cell) {
    fsx_of(cell, &mixed(cell), 5000, 1);
}

on_cells!(fsx: quick [dir_uring, dir_devfuse, dir_passthrough, mem_uring, mem_devfuse, mem_passthrough, pmem_uring,
    pmem_devfuse, pmem_passthrough, mem_passthrough_none, mem_uring_always, ninep_devfuse, ninep_devfuse_none,
    ninep_devfuse_always, ninep_devfuse_always_writeback] long [ninep_devfuse_auto_writeback,
    dir_devfuse_none, dir_devfuse_metadata, dir_devfuse_always,
    dir_devfuse_none_writeback, dir_devfuse_auto_writeback, dir_devfuse_metadata_writeback, dir_devfuse_always_writeback]);

fn fsx_long(cell: &Cell) {
    for (seed, weights) in [operations::PLAIN, operations::MAPPED, &mixed(cell)].into_iter().enumerate() {
        fsx_of(cell, weights, 50_000, 100 + u32::try_from(seed).unwrap());
    }
}

on_cells!(fsx_long: quick [] long [dir_uring, dir_devfuse, dir_passthrough, mem_uring, mem_devfuse, mem_passthrough,
    pmem_uring, pmem_devfuse, dir_passthrough_none, mem_uring_always, dir_uring_none, ninep_devfuse,
    ninep_devfuse_none, ninep_devfuse_always, ninep_devfuse_always_writeback, diod_devfuse, p9ufs_devfuse]);

fn fio_of(cell: &Cell, size_mib: u32, loops: u32) {
    mounted(cell, LIMIT * 3, |mounted| {
        for (engine, more) in FIO_ENGINES {
            let line = fio_line(&mounted.site.path, engine, more, size_mib, loops);
            mounted.site.sh(&format!("{line}; rm v.*"), LIMIT).ok();
        }
    });
}

fn fio(cell: &Cell) {
    fio_of(cell, 8, 1);
}

on_cells!(fio: quick [dir_devfuse, dir_passthrough, mem_uring, mem_passthrough, pmem_uring, ninep_devfuse] long []);

fn fio_long(cell: &Cell) {
    fio_of(cell, 64, 5);
}

on_cells!(fio_long: quick [] long [dir_uring, dir_devfuse, dir_passthrough, mem_uring, mem_devfuse, mem_passthrough,
    pmem_uring, pmem_devfuse, pmem_passthrough, mem_uring_none, mem_passthrough_always, ninep_devfuse,
    ninep_devfuse_none, ninep_devfuse_always]);

fn git(cell: &Cell) {
    mounted(cell, LIMIT, |mounted| {
        mounted.site.sh(MAKE_REPOSITORY, LIMIT).ok();
        mounted.site.sh(USE_REPOSITORY, LIMIT).ok();
    });
}

on_cells!(git: quick [dir_passthrough, mem_uring, pmem_devfuse, ninep_devfuse]
    long [dir_uring, dir_devfuse, mem_devfuse, mem_passthrough, pmem_uring, pmem_passthrough, mem_uring_always,
    ninep_devfuse_none, ninep_devfuse_always, diod_devfuse]);

/// Builds the tree in a directory; returns the results.
fn build_in(site: &Site, files: u32, limit: Duration) -> Vec<(&'static str, String)> {
    tree::write_tree(&site.path.join("tree"), files).unwrap();
    site.sh(&format!("cd tree\n{}", tree::BUILD), limit).ok();
    tree::LEFT.iter().map(|name| (*name, std::fs::read_to_string(site.path.join(name)).unwrap())).collect()
}

fn build_of(cell: &Cell, files: u32) {
    let host = directory(Place::Disk);
    mounted(cell, LIMIT * 3, |mounted| {
        let expected = build_in(&Site::on_host(host.path()), files, LIMIT);
        let rebuilt = &expected.iter().find(|(name, _)| *name == "built.2").unwrap().1;
        assert_eq!(rebuilt.matches("CC sub3/").count(), files as usize / 10, "the build does not do its part");
        for (here, there) in build_in(&mounted.site, files, LIMIT * 2).iter().zip(&expected) {
            assert_eq!(here, there, "{cell}: not as on the host");
        }
    });
}

fn build(cell: &Cell) {
    build_of(cell, 40);
}

on_cells!(build: quick [dir_devfuse, mem_passthrough, pmem_uring] long []);

fn build_long(cell: &Cell) {
    build_of(cell, 400);
}

on_cells!(build_long: quick [] long [dir_uring, dir_devfuse, dir_passthrough, mem_uring, mem_devfuse, mem_passthrough,
    pmem_uring, pmem_devfuse, pmem_passthrough, mem_uring_always, dir_uring_none, ninep_devfuse,
    ninep_devfuse_always]);

fn sqlite(cell: &Cell) {
    if !has_sqlite() {
        ferry_skip::skip!("/usr/bin/python3 has no sqlite3 here");
        return;
    }
    mounted(cell, LIMIT, |mounted| {
        for mode in ["delete", "persist", "wal"] {
            let mut python = Command::new("/usr/bin/python3");
            mounted.site.run(python.args(["-c", SQLITE, mode]), LIMIT).ok();
            mounted.site.sh("rm db*", LIMIT).ok();
        }
    });
}

on_cells!(sqlite: quick [dir_uring, mem_devfuse, mem_passthrough, pmem_uring]
    long [dir_devfuse, dir_passthrough, mem_uring, pmem_devfuse, pmem_passthrough, dir_passthrough_none,
    mem_uring_none, mem_uring_always, ninep_devfuse, ninep_devfuse_none, ninep_devfuse_always]);

/// A failure on the host is a fault of the tests.
#[test]
fn the_host_passes_all_suites() {
    for place in [Place::Disk, Place::Memory] {
        let directory = directory(place);
        let site = Site::on_host(directory.path());
        build_in(&site, 20, LIMIT);
        site.sh(MAKE_REPOSITORY, LIMIT).ok();
        site.sh(USE_REPOSITORY, LIMIT).ok();
        if has_sqlite() {
            site.run(Command::new("/usr/bin/python3").args(["-c", SQLITE, "wal"]), LIMIT).ok();
        }
        let line = fio_line(Path::new("."), "psync", "", 4, 1);
        site.sh(&line, LIMIT).ok();
    }
}
