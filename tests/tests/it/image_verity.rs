//! Images with files that the kernel verifies: ext4 with fs-verity in a QEMU guest. Objects of the layout composefs,
//! and packs of the layout flat.

use std::path::Path;

use ferry_tests::GuestCache;
use ferry_tests::disks::tool;
use ferry_tests::host_root::run_on_host_root;
use ferry_tests::mounts::program;

/// What every script begins with: a file system with fs-verity, a tree in it, and a copy of that elsewhere. What ferry is started by does not
/// change while it runs.
const SET_UP: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/fs
cp "$1" /run/program
ferry=/run/program mkfs=$2 theirs=$3 registry=$3
mkdir -p /run/fs /run/mnt
truncate -s 200M /run/disk
"$mkfs" -q -b 4096 -O verity /run/disk
mount -o loop /run/disk /run/fs
cd /run/fs
echo kernel $(uname -r)
mkdir tree
seq 20000 >tree/large
seq 30000 60000 >tree/other
echo small but not tiny >tree/small
cp -r tree /run/tree
compare() { for name in large other small; do cmp /run/tree/$name /run/mnt/$name; done; }
# Changes bytes below the file system: those that something is found by.
spoil() {
    sync
    for at in $(grep -abo "$1" /run/disk | cut -d: -f1); do
        printf X | dd of=/run/disk bs=1 seek=$at conv=notrunc 2>/dev/null
    done
    echo 3 >/proc/sys/vm/drop_caches
}
"#;

/// Builds where fs-verity is, changes an object, mounts what overlayfs proves.
const OBJECTS: &str = r#"
digest=$("$ferry" image build tree -o image --store store --layout composefs)
for object in store/objects/??/*; do
    # fs-verity is on: nobody can write any more.
    ! (echo x >>"$object") 2>/dev/null
done
"$ferry" image verify image --store store
again=$("$ferry" image build tree -o again --store store --layout composefs)
[ "$digest" = "$again" ]
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
cmp /run/tree/other /run/mnt/other
umount /run/mnt
# Without it in the object that is looked at, a mount that would fail later is refused at once.
replace "$(find store/objects -type f -size +120k)"
if "$ferry" image mount image /run/mnt --store store --digest $digest; then exit 1; fi
"$ferry" image mount image /run/mnt --store store
compare
umount /run/mnt
# Under a mount of ours the kernel proves what it reads, too: nobody hashes an object before, and nobody is asked for its bytes.
digest=$("$ferry" image build tree -o image2 --store store2 --layout composefs)
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
cmp /run/tree/other /run/mnt/other
[ $(read_by_us) -lt $((before + $(stat -c %s /run/tree/other) / 2)) ]
umount /run/mnt
# What the disk has changed is an error, and never read.
spoil 45000
ours
if cat /run/mnt/other >/run/got; then exit 1; fi
cmp -n $(stat -c %s /run/got) /run/got /run/tree/other
cmp /run/tree/large /run/mnt/large
umount /run/mnt
echo proved
"#;

/// The same for packs.
const PACKS: &str = r#"
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
grep 'the file system of /run/store has no fs-verity: the image was verified just now, but the data' said
compare
umount /run/mnt
if "$ferry" image mount /run/image /run/mnt --store /run/store --digest $digest --verity require 2>said; then exit 1; fi
grep 'the file system of /run/store has no fs-verity, so .*--verity require' said
# An image whose own file has none.
image=/run/image
proved 2>said
grep '/run/image has no fs-verity: the kernel verifies the data of files' said
umount /run/mnt
refused --verity require
grep '/run/image has no fs-verity, so' said
image=image
# The same bytes without fs-verity prove nothing: refused, until it is on again.
cp $pack copy
mv -f copy $pack
refused
grep 'has no fs-verity, though its file system supports it: ferry image verify .*--repair' said
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
spoil 45000
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
# Memory is shared among such mounts.
digest=$("$ferry" image build /run/tree -o shared --store store --verity --inode-share)
image=shared
proved --verity require --inode-share
compare
umount /run/mnt
echo proved
"#;

/// To a registry and back, past stores and a registry that have something else.
const PULLED: &str = r#"
mkdir server
cat >server/config.yml <<EOF
version: 0.1
storage: {filesystem: {rootdirectory: /run/fs/server/data}}
http: {addr: "127.0.0.1:5000", secret: x}
EOF
"$registry" serve server/config.yml >server/log 2>&1 &
# What cannot be compressed is pushed as it is.
for name in large other; do
    head -c 190000 /dev/urandom >tree/$name
    cp tree/$name /run/tree/$name
done
server=$!
there=oci:127.0.0.1:5000/os/base:1
digest=$("$ferry" image build tree -o image --store store --verity)
for try in $(seq 100); do
    if "$ferry" image push image $there --store store; then break; fi
    sleep 1
done
pack=$(basename $(find store/packs -type f ! -name '*.index'))
bytes=$(stat -c %s store/packs/$pack)
pull() { "$ferry" image pull $there -o $1.img --store $1 --digest $digest; }
flip() { printf X | dd of=$1 bs=1 seek=$2 conv=notrunc 2>/dev/null; }
# The image and its pack are what was built, the kernel proves both, and all files are read.
is_right() {
    cmp image $1.img
    diff -r store/packs $1/packs
    "$ferry" image verify $1.img --store $1
    for file in $1.img $1/packs/$pack; do if (echo x >>$file) 2>/dev/null; then exit 1; fi; done
    "$ferry" image mount $1.img /run/mnt --store $1 --digest $digest --verity require
    compare
    umount /run/mnt
}
pull copy
is_right copy
# A registry with something else behind an object, and in one.
blob=$(find server/data -type f -size ${bytes}c)
flip $blob $((bytes - 1))
pull lied
is_right lied
cp $blob sound
flip $blob 9000
if pull wrong 2>said; then exit 1; fi
grep 'came damaged, and was not kept' said
[ ! -e wrong.img ]
cp sound $blob
pull wrong
is_right wrong
# A store with something else: a pull hashes what it has before it is too late, and mends it.
spoiled() {
    rm -f copy.img
    cp store/packs/$pack spoiled
    flip spoiled $1
    chmod 444 spoiled
    mv -f spoiled copy/packs/$pack
}
for at in $((bytes - 1)) 9000; do
    spoiled $at
    pull copy
    is_right copy
done
# Without the registry what nobody has is said, and fs-verity stays off: then the file is as it was.
spoiled 9000
cp sound kept
flip $blob 9000
if pull copy 2>said; then exit 1; fi
grep "of the pack blake3:$pack: it came damaged" said
[ ! -e copy.img ]
(echo x >>copy/packs/$pack) 2>/dev/null
truncate -s $bytes copy/packs/$pack
cp kept $blob
pull copy
is_right copy
# It is too late where others have turned it on: for other bytes, or with a salt for these.
turn_on() {
    perl -e '$salt = $ARGV[1]; $enable = pack("L4 P L2 Q x88", 1, 1, 4096, length $salt, $salt, 0, 0, 0);
        open F, "<", $ARGV[0] and ioctl F, 0x40806685, $enable or die $!' $1 "$2"
}
spoiled $((bytes - 1))
turn_on copy/packs/$pack ''
pull copy
is_right copy
rm copy.img
cp store/packs/$pack salted
turn_on salted salt
mv -f salted copy/packs/$pack
pull copy
is_right copy
# What is only behind objects needs nobody.
spoiled $((bytes - 1))
cp image copy.img
kill $server
"$ferry" image verify copy.img --store copy --repair
is_right copy
echo proved
"#;

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_verifies_reads_of_packs() {
    in_a_guest(PACKS, Path::new(""));
}

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_verifies_reads() {
    in_a_guest(OBJECTS, &GuestCache::from_env().unwrap().composefs().unwrap().join("bin/mount.composefs"));
}

#[test]
#[ignore = "long: make test-all"]
fn the_kernel_verifies_pulled_images() {
    let registry = GuestCache::from_env().unwrap().path().join("registry/bin/docker-registry");
    if !registry.exists() {
        ferry_skip::skip!("no docker-registry: guest/fetch registry brings it");
        return;
    }
    in_a_guest(PULLED, &registry);
}

/// Runs a script, which says at its end that all was proved, with somebody else's program.
fn in_a_guest(script: &str, theirs: &Path) {
    let out = run_on_host_root(&format!("{SET_UP}{script}"), [program(), &tool("mkfs.ext4"), theirs]);
    assert!(out.ends_with("proved\n"), "{out}");
}
