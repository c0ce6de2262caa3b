//! Mounts in a guest with a newer kernel (Linux 7.2, FUSE 7.45), which differs from the host's.

use std::time::Duration;

use ferry_tests::mounts::program;
use ferry_tests::{Guest, GuestCache, Input, Output, run};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// Longer than the guest takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(240);

/// Checks whose processes are many or whose files are large take long in a guest with one CPU.
const CHECKS: &str = "rename-flags tmpfile unlinked-but-open mmap-shared mmap-private append direct sync-flags statfs \
                      vectored open-flags copy-file-range holes xattr acl mixed-opens";

const SCRIPT: &str = r#"
ferry=$1 probe=$2 path=$3 passthrough=$4 checks=$5
echo Y >/sys/module/fuse/parameters/enable_uring
# The guest's own files are there; control sockets want a directory that nobody else can enter.
chmod 700 /run/ferry
mkdir /mnt/at
timeout 60 "$ferry" mount mem /mnt/at --path "$path" --passthrough "$passthrough" --allow-other --size 64M
grep ' /mnt/at fuse.ferry ' /proc/mounts
timeout 60 "$ferry" mount --explain /mnt/at
timeout 100 "$probe" /mnt/at $checks
cd /mnt/at && seq 1 100000 >file && cp file copy && cmp file copy && sync && rm file copy && cd /
umount /mnt/at
! grep /mnt/at /proc/mounts
"#;

fn in_guest(path: &str, passthrough: &str, said: &str) {
    let args = [program().to_str().unwrap(), PROBE, path, passthrough, CHECKS];
    let mut guest = Guest::new(GuestCache::from_env().unwrap(), ["sh", "-euc", SCRIPT, "sh"].into_iter().chain(args));
    (guest.stdin, guest.stdout, guest.stderr) = (Input::Null, Output::Piped, Output::Piped);
    let ran = run(guest, LIMIT);
    println!("{path}, passthrough {passthrough}: {:?}\n{}", ran.took, ran.out);
    let out = ran.ok();
    assert!(out.contains(said), "'{said}' is not in: {out}");
    assert_eq!(out.lines().filter(|line| line.ends_with(" ok")).count(), CHECKS.split(' ').count(), "{out}");
}

#[test]
fn by_io_uring() {
    in_guest("uring", "off", "Requests go through io_uring");
}

#[test]
fn by_dev_fuse() {
    in_guest("devfuse", "off", "Requests go through /dev/fuse");
}

#[test]
fn passed_through() {
    in_guest("auto", "on", "(passthrough)");
}
