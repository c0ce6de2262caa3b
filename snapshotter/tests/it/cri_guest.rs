//! The same pods in a guest with a stock kernel of Debian's, cgroups of version 2, and nothing of this machine but its programs.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ferry_tests::disks::tool;
use ferry_tests::{Cache, Kind, Options, Place, Share, directory, guest_on, run};

use crate::cri::{CRICTL, crictl};
use crate::lazy_place::ferry;

/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(3000);
const DISK_BYTES: u64 = 4 << 30;

const SCRIPT: &str = r#"
mount -t cgroup2 none /sys/fs/cgroup
mount /dev/vda /var/tmp
if ! "$1" --ignored --exact cri::pods_start_and_end --nocapture --test-threads 1 >/tmp/said 2>&1; then
    grep -v level=debug /tmp/said | tail -c 20000 >&2
    exit 1
fi
grep -v ^ferry: /tmp/said
echo proved
"#;

#[test]
#[ignore = "long: make test-all"]
fn pods_run_in_a_guest() {
    let Some(crictl) = crictl() else { return };
    ferry();
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let programs = Share::of(Path::new("/"), directory(Place::Disk), dir, options);
    let disk = programs.socket.with_extension("disk");
    File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    let made = Command::new(tool("mkfs.ext4")).arg("-q").arg(&disk).status();
    assert!(made.unwrap().success());
    let this = std::env::current_exe().unwrap();
    let mut guest =
        guest_on(&programs.socket, ["sh".as_ref(), "-euxc".as_ref(), SCRIPT.as_ref(), "sh".as_ref(), this.as_os_str()]);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    guest.cwd = "/".into();
    guest.memory_mib = 2048;
    let cache = guest.cache.path().into();
    guest.env = vec![(CRICTL.into(), crictl.into()), ("FERRY_CACHE".into(), cache)];
    let drive = format!("file={},format=raw,if=virtio,cache=unsafe", disk.display());
    guest.qemu_args = ["-drive".into(), drive.into()].into();
    let ran = run(guest, TIMEOUT);
    println!("{:?}, {}", ran.took, ran.out);
    let said = ran.ok();
    assert!(said.contains("the first pod is by crun\n") && said.ends_with("proved\n"), "{said}");
}
