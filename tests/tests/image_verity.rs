//! Images where the kernel itself proves the bytes of files: ext4 with fs-verity in a QEMU guest. Objects of the layout composefs, and packs of
//! the layout flat.

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

/// The same for packs.
const FLAT: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
cp "$1" /run/program
ferry=/run/program mkfs=$2
mkdir -p /run/fs /run/mnt
truncate -s 200M /run/disk
"$mkfs" -q -b 4096 -O verity /run/disk
mount -o loop /run/disk /run/fs
cd /run/fs
mkdir tree
seq 20000 >tree/large
seq 30000 60000 >tree/other
echo small but not tiny >tree/small
mkdir /run/tree
cp tree/* /run/tree
digest=$("$ferry" image build tree -o image --store store --verity)
# What is built does not depend on the file system.
[ "$digest" = "$("$ferry" image build tree -o /run/image --store /run/store --verity)" ]
cmp image /run/image
diff -r store/packs /run/store/packs
pack=$(find store/packs -type f ! -name '*.index')
# fs-verity is on: nobody can write any more.
for file in image $pack; do if (echo x >>$file) 2>/dev/null; then exit 1; fi; done
"$ferry" image verify image --store store
"$ferry" image info image --store store | grep 'fs-verity: on$'
compare() { for name in large other small; do cmp /run/tree/$name /run/mnt/$name; done; }
proved() { "$ferry" image mount $image /run/mnt --store store --digest $digest "$@"; }
refused() { if proved "$@" 2>said; then exit 1; fi; cat said; }
image=image
for way in '' --loop '--upper upper'; do
    proved --verity require $way 2>said
    [ -z "$(grep '^ferry: ' said)" ]
    compare
    umount /run/mnt
done
# On a file system without it the same image is mounted, and it is said what is believed; or it is refused.
"$ferry" image mount /run/image /run/mnt --store /run/store --digest $digest 2>said
[ $(wc -l <said) = 1 ]
grep 'the file system of /run/store has no fs-verity: .* believed' said
compare
umount /run/mnt
if "$ferry" image mount /run/image /run/mnt --store /run/store --digest $digest --verity require 2>said; then exit 1; fi
grep 'the file system of /run/store has no fs-verity, so .*--verity require' said
# An image whose own file has none.
image=/run/image
proved 2>said
grep '/run/image has no fs-verity: the kernel proves the bytes of files' said
umount /run/mnt
refused --verity require
grep '/run/image has no fs-verity, so' said
image=image
# The same bytes without fs-verity prove nothing: refused, until it is on again.
cp $pack copy
mv -f copy $pack
refused
grep 'has no fs-verity, though its file system has: ferry image verify .*--repair' said
"$ferry" image info image --store store | grep 'fs-verity: off$'
"$ferry" image mount image /run/mnt --store store
compare
umount /run/mnt
"$ferry" image verify image --store store --repair
proved --verity require
compare
umount /run/mnt
# Other bytes with a fs-verity of their own.
mv $pack kept
cp kept $pack
printf X | dd of=$pack bs=1 seek=9000 conv=notrunc 2>/dev/null
chmod 444 $pack
mkdir other-tree
cp $pack other-tree/file
# Turned on by a build of the layout composefs, which names its objects by the same digest.
"$ferry" image build other-tree -o other-image --store other-store --layout composefs
mv -f $(find other-store/objects -type f -size $(($(stat -c %s kept) / 512))b) $pack
refused
grep 'the kernel proves it by the fs-verity digest .* but its index names' said
if "$ferry" mount image:image /run/mnt --store store --digest $digest && cat /run/mnt/large >/dev/null; then exit 1; fi
umount /run/mnt || true
mv -f kept $pack
proved --verity require
compare
umount /run/mnt
# Under a mount of ours the kernel proves what it reads, too: nobody hashes a pack before. What it has read in between counts as ours.
"$ferry" mount image:image /run/mnt --store store --digest $digest
compare
umount /run/mnt
# A bit that the disk has changed below a mount is an error, never read, and other files are as they were.
proved --verity require
sync
for at in $(grep -abo 45000 /run/disk | cut -d: -f1); do
    printf X | dd of=/run/disk bs=1 seek=$at conv=notrunc 2>/dev/null
done
echo 3 >/proc/sys/vm/drop_caches
if cat /run/mnt/other >/run/got; then exit 1; fi
cmp -n $(stat -c %s /run/got) /run/got /run/tree/other
cmp /run/tree/large /run/mnt/large
umount /run/mnt
"$ferry" mount image:image /run/mnt --store store --digest $digest
if cat /run/mnt/other >/run/got; then exit 1; fi
cmp /run/tree/large /run/mnt/large
umount /run/mnt
"$ferry" image verify image --store store >said || true
grep damaged said || grep 'cannot read the object' said
# Mended from what another pack has: fs-verity is on again.
if "$ferry" image verify image --store store --repair; then exit 1; fi
"$ferry" image build /run/tree -o plain --store store
proved --verity require
compare
umount /run/mnt
echo kernel $(uname -r)
echo proved
"#;

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_proves_what_it_reads_of_packs() {
    let (program, mkfs) = (program(), tool("mkfs.ext4"));
    in_a_guest(&["sh", "-euxc", FLAT, "sh", program.to_str().unwrap(), mkfs.to_str().unwrap()]);
}

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_proves_what_it_reads() {
    let theirs = GuestCache::from_env().unwrap().composefs().unwrap().join("bin/mount.composefs");
    let (program, mkfs) = (program(), tool("mkfs.ext4"));
    in_a_guest(&[
        "sh",
        "-euxc",
        SCRIPT,
        "sh",
        program.to_str().unwrap(),
        mkfs.to_str().unwrap(),
        theirs.to_str().unwrap(),
    ]);
}

/// Runs a script, which says at its end that all was proved.
fn in_a_guest(words: &[&str]) {
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let programs = Share::of(Path::new("/"), folder(Place::Disk), dir, options);
    let mut guest = guest_on(&programs.socket, words.iter().copied());
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
