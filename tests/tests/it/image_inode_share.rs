//! Images whose files share memory: EROFS's `inode_share` (Linux 7.0) in a QEMU guest.

use std::process::Command;

use ferry_tests::disks::tool;
use ferry_tests::host_root::run_on_host_root;
use ferry_tests::mounts::program;
use ferry_tests::{Place, directory};

/// Makes images on the host: twenty that differ in one file each.
const BUILD: &str = r#"
ferry=$1
mkdir tree
for number in $(seq 8); do head -c 1000000 /dev/urandom >tree/$number; done
cp /bin/true tree/program
"$ferry" image build tree -o plain --store store 2>/dev/null
for image in $(seq 20); do
    seq $image 20000 >tree/own
    "$ferry" image build tree -o image$image --store store --inode-share 2>/dev/null
done
"$ferry" image info image1 | grep inode-share
"$ferry" image info image1 --json | grep '"inode_share":true'
# The identity of one file in the place of another one's.
cp image20 forged
entries=$(LC_ALL=C grep -aboP '\x00\x80\x20\x00' image20 | cut -d: -f1)
set -- $entries
[ $# = 10 ]
dd if=image20 of=forged bs=1 skip=$(($1 + 4)) seek=$(($2 + 4)) count=32 conv=notrunc 2>/dev/null
"#;

/// Mounts them in both ways: what is read through one mount is in memory once.
const MOUNT: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/fs
cp "$1" /run/program
ferry=/run/program mkfs=$2 made=$3
mkdir -p /run/fs
truncate -s 200M /run/disk
"$mkfs" -q -b 4096 /run/disk
mount -o loop /run/disk /run/fs
cd /run/fs
cp -r "$made"/. .
echo kernel $(uname -r)
for image in $(seq 20); do mkdir mnt$image; done
# Pages of all files, in KiB.
cached() { sed -n 's/^Cached: *\([0-9]*\) kB/\1/p' /proc/meminfo; }
# What reading all files of all mounts adds; packs are read before, as the pages of their files count, too.
grows() {
    echo 3 >/proc/sys/vm/drop_caches
    cat store/packs/* >/dev/null
    before=$(cached)
    for image in $(seq 20); do
        cat mnt$image/[1-8] >/dev/null
        [ "$(head -n 1 mnt$image/own)" = $image ]
    done
    echo $(($(cached) - before))
}
mount_all() { for image in $(seq 20); do "$ferry" image mount image$image mnt$image --store store $1; done; }
unmount_all() { for image in $(seq 20); do umount mnt$image; done; }
mount_all ''
apart=$(grows)
unmount_all
mount_all --inode-share
shared=$(grows)
echo "files of twenty images of 8 MB: $apart KiB, shared $shared KiB"
[ $apart -gt 150000 ]
[ $shared -lt $((apart / 10)) ]
for image in 1 7 20; do for number in $(seq 8); do cmp mnt$image/$number tree/$number; done; mnt$image/program; done
# The memory outlives the mount through which it was read.
umount mnt1
cmp mnt2/1 tree/1
if dd if=mnt2/1 iflag=direct of=/dev/null bs=4096 count=1 2>/dev/null; then exit 1; fi
umount mnt2 mnt3

refused() { if "$ferry" image mount "$1" mnt1 --store store --inode-share 2>said; then exit 1; fi; cat said; }
refused plain
grep 'plain has no identities of files: build it with --inode-share' said
refused forged
grep 'forged is no valid image: an inode with an identity that is not of its contents' said

# A changed file of a writable mount is a file of its own, without an identity; and nobody sees one.
"$ferry" image mount image1 mnt1 --store store --inode-share --upper upper
cmp mnt1/1 tree/1
mnt1/program
echo more >>mnt1/1
[ $(stat -c %s mnt1/1) = 1000005 ]
cmp mnt4/1 tree/1
for file in mnt1/1 mnt1/2; do python3 -c "import os; assert not os.listxattr('$file')"; done
python3 -c "import os; assert 'trusted.overlay.ferry.content' not in os.listxattr('upper/1')"
unmount_all || true
echo shared
"#;

#[test]
#[ignore = "long: make test-all"]
fn equal_files_of_mounted_images_are_in_memory_once() {
    let made = directory(Place::Disk);
    let mut build = Command::new("bash");
    build.args(["-euxc", BUILD, "bash"]).arg(program()).current_dir(made.path());
    let built = build.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let out = run_on_host_root(MOUNT, [program(), &tool("mkfs.ext4"), made.path()]);
    assert!(out.ends_with("shared\n"), "{out}");
}

/// Linux before 7.0 does not know the option, and later ones without the feature only say that it does nothing.
#[test]
fn a_kernel_that_cannot_share_is_named() {
    let made = directory(Place::Disk);
    let script = r#"
        ferry=$1
        mkdir tree mnt
        echo some text that is longer than what is kept with an inode, which is sixty-four bytes >tree/file
        "$ferry" image build tree -o image --store store --inode-share
        ! "$ferry" image mount image mnt --store store --inode-share"#;
    let mut command = Command::new("bash");
    command.args(["-euc", script, "bash"]).arg(program()).current_dir(made.path());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let is_refused = said.contains("this kernel cannot share the memory of files between mounts (Linux 7.0 or later");
    // Linux 7.0 or later mounts it.
    assert!(output.status.success() == is_refused, "{said}");
    let _ = rustix::mount::unmount(made.path().join("mnt"), rustix::mount::UnmountFlags::DETACH);
}
