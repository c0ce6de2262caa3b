//! Images of the layout composefs where the kernel itself proves the bytes of files: ext4 with fs-verity in a QEMU guest.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::path::Path;
use std::time::Duration;

use ferry_tests::disks::tool;
use ferry_tests::mounts::program;
use ferry_tests::{Cache, GuestCache, Kind, Options, Place, Share, collect, folder, guest_on};

/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(600);
const BOOT_TIMEOUT: Duration = Duration::from_secs(240);

/// Builds where fs-verity is, changes an object, mounts what overlayfs proves.
const SCRIPT: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
ferry=$1 mkfs=$2 theirs=$3
mkdir -p /run/fs /run/mnt
truncate -s 100M /run/disk
"$mkfs" -q -b 4096 -O verity /run/disk
mount -o loop /run/disk /run/fs
cd /run/fs
mkdir tree
seq 20000 >tree/large
seq 30000 >tree/other
echo small >tree/small
digest=$("$ferry" image build tree -o image --store store --layout composefs)
for object in store/objects/??/*; do
    # fs-verity is on: nobody can write any more.
    ! (echo x >>"$object") 2>/dev/null
done
"$ferry" image verify image --store store
again=$("$ferry" image build tree -o again --store store --layout composefs)
[ "$digest" = "$again" ]
echo kernel $(uname -r)
compare() { for name in large other small; do cmp tree/$name /run/mnt/$name; done; }
"$ferry" image mount image /run/mnt --store store --digest $digest
grep ' /run/mnt overlay .*verity=require' /proc/mounts
compare
umount /run/mnt
"$theirs" -o basedir=store/objects,verity image /run/mnt
compare
umount /run/mnt
# The same bytes without fs-verity prove nothing, and other bytes even less.
replace() { cp "$1" copy; mv copy "$1"; }
replace "$(find store/objects -type f -size -120k)"
"$ferry" image mount image /run/mnt --store store --digest $digest
if cat /run/mnt/large >/dev/null; then exit 1; fi
cmp tree/other /run/mnt/other
umount /run/mnt
# Without it in the object that is looked at, a mount that would fail later is refused at once.
replace "$(find store/objects -type f -size +120k)"
if "$ferry" image mount image /run/mnt --store store --digest $digest; then exit 1; fi
"$ferry" image mount image /run/mnt --store store
compare
umount /run/mnt
# Under a mount of ours the kernel proves what it reads, too: nobody hashes an object before, and nobody is asked for its bytes.
digest=$("$ferry" image build tree -o image2 --store store2 --layout composefs)
cp tree/other /run/other
ours() { "$ferry" mount image:image2 /run/mnt --store store2 --digest $digest --passthrough on; }
# What our processes have read, in bytes.
read_by_us() {
    all=0
    for process in /proc/[0-9]*; do
        if [ "$(readlink $process/exe)" = "$ferry" ]; then all=$((all + $(sed -n 's/rchar: //p' $process/io))); fi
    done
    echo $all
}
ours
before=$(read_by_us)
[ $before -gt 0 ]
cmp /run/other /run/mnt/other
[ $(read_by_us) -lt $((before + $(stat -c %s /run/other) / 2)) ]
umount /run/mnt
# What the disk has changed is an error, and never read.
rm tree/other
sync
for at in $(grep -abo 25000 /run/disk | cut -d: -f1); do
    printf X | dd of=/run/disk bs=1 seek=$at conv=notrunc 2>/dev/null
done
echo 3 >/proc/sys/vm/drop_caches
ours
if cat /run/mnt/other >/run/got; then exit 1; fi
cmp -n $(stat -c %s /run/got) /run/got /run/other
cmp tree/large /run/mnt/large
umount /run/mnt
echo proved
"#;

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_proves_what_it_reads() {
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let programs = Share::of(Path::new("/"), folder(Place::Disk), dir, options);
    let theirs = GuestCache::from_env().unwrap().composefs().unwrap().join("bin/mount.composefs");
    let (program, mkfs) = (program(), tool("mkfs.ext4"));
    let words =
        ["sh", "-euxc", SCRIPT, "sh", program.to_str().unwrap(), mkfs.to_str().unwrap(), theirs.to_str().unwrap()];
    let mut guest = guest_on(&programs.socket, words);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    guest.cwd = "/".into();
    guest.boot_timeout = BOOT_TIMEOUT;
    guest.memory_mib = 1024;
    let begin = std::time::Instant::now();
    let running = guest.spawn().unwrap_or_else(|error| panic!("{error}"));
    let ran = collect(running, TIMEOUT, begin);
    println!("{:?}, {}", ran.took, ran.out);
    assert!(ran.ok().ends_with("proved\n"));
}
