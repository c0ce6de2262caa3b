//! A QEMU guest with a stock kernel: several queues, several CPUs.

use ferry_tests::guest::DeviceKind;
use ferry_tests::{Cache, Device, Kind, Mount, Options, Place, Share, TIMEOUT, guest_on, run};

const SCRIPT: &str = r#"
cd /mnt/share
grep -q ' /mnt/share virtiofs ' /proc/mounts
if grep 'share virtiofs.*dax' /proc/mounts; then exit 1; fi
nproc | grep -x 2
for number in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=file$number bs=64k count=64 2>/dev/null & done
wait
sha256sum file* >sums
sync
echo 3 >/proc/sys/vm/drop_caches
sha256sum -c sums >/dev/null
sha256sum -c host-sums >/dev/null
"#;

#[test]
#[ignore = "long: make test-all"]
fn two_queues_and_two_cpus() {
    let options = Options { cache: Cache::Auto, queues: 2, tag: Some("t".parse().unwrap()), ..Options::default() };
    let share = Share::with(Place::Disk, options);
    for number in 0..4 {
        std::fs::write(share.path.join(format!("host{number}")), vec![number; 3 << 20]).unwrap();
    }
    let sums =
        std::process::Command::new("sh").args(["-euc", "sha256sum host? >host-sums"]).current_dir(&share.path).status();
    assert!(sums.unwrap().success());
    let mut guest = guest_on(&share.socket, ["sh", "-euc", SCRIPT]);
    guest.kind = Kind::Qemu { cpus: 2, root: None };
    if let [Device { kind: DeviceKind::Fs { queues, .. }, .. }] = &mut guest.devices[..] {
        *queues = 2;
    }
    guest.mounts = vec![Mount::virtiofs("t", "/mnt/share")];
    guest.cwd = "/".into();
    let ran = run(guest, TIMEOUT);
    println!("QEMU, 2 queues, 2 CPUs: {:?}", ran.took);
    ran.ok();
    share.assert_released();
    let check =
        std::process::Command::new("sha256sum").args(["--quiet", "-c", "sums"]).current_dir(&share.path).status();
    assert!(check.unwrap().success(), "the host sees other contents than the guest wrote");
}
