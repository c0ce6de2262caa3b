//! Disks, in a guest with a stock driver.

use std::process::Command;
use std::time::{Duration, Instant};

use ferry_disk::{Cache, Options};
use ferry_tests::disks::{DiskServer, Process, guest_with};
use ferry_tests::{Place, run};

const MIB: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(900);

const LIFE_OF_A_FILE_SYSTEM: &str = r#"
grep -q . /sys/block/vda/serial
test "$(cat /sys/block/vda/queue/logical_block_size)" = 512
test "$(cat /sys/block/vda/queue/physical_block_size)" = 4096
test "$(cat /sys/block/vda/queue/discard_max_bytes)" -gt 0
mkfs.ext4 -q -E nodiscard /dev/vda
mkdir -p /mnt/disk
mount -t ext4 /dev/vda /mnt/disk
cd /mnt/disk
fio --name=v --filename=data --size=48m --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --direct=1 \
    --verify=crc32c --do_verify=1 --verify_fatal=1 --minimal >/dev/null
fio --name=w --filename=more --size=16m --rw=randrw --bsrange=512-64k --ioengine=psync \
    --verify=crc32c --do_verify=1 --verify_fatal=1 --minimal >/dev/null
sync
"#;

#[track_caller]
fn fsck(disk: &DiskServer) {
    let fsck = Command::new("e2fsck").args(["-fn"]).arg(&disk.file).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}

#[test]
fn ext4_lives_on_a_disk_and_trims_it() {
    for cache in [Cache::None, Cache::Writethrough] {
        let disk = DiskServer::new(Place::Disk, 128 * MIB, &Options { cache: Some(cache), ..Options::default() });
        disk.guest(&format!("{LIFE_OF_A_FILE_SYSTEM}\ncd /\numount /mnt/disk"), TIMEOUT).ok();
        fsck(&disk);
        let full = disk.allocated();
        assert!(full > 64 * MIB, "{full} bytes are allocated");
        let trim = "mkdir -p /mnt/disk; mount -t ext4 /dev/vda /mnt/disk; rm /mnt/disk/data; sync
            fstrim -v /mnt/disk; umount /mnt/disk";
        disk.guest(trim, TIMEOUT).ok();
        fsck(&disk);
        let trimmed = disk.allocated();
        assert!(trimmed + 40 * MIB < full, "{full} bytes before, {trimmed} after");
    }
}

#[test]
fn the_cache_can_be_turned_off_and_the_disk_be_grown_in_use() {
    let disk = DiskServer::new(Place::Disk, 64 * MIB, &Options::default());
    let file = disk.file.clone();
    let grower = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(12));
        ferry_disk::grow(&file, 96 * MIB, &Options::default()).unwrap();
    });
    let script = r#"
cache=/sys/block/vda/cache_type
grep -qx 'write back' $cache
echo 'write through' >$cache
grep -qx 'write through' $cache
dd if=/dev/zero of=/dev/vda bs=64k count=16 oflag=direct 2>/dev/null
echo 'write back' >$cache
grep -qx 'write back' $cache
tries=0
while [ "$(cat /sys/block/vda/size)" != 196608 ]; do
    tries=$((tries + 1))
    [ $tries -lt 60 ] || { cat /sys/block/vda/size; exit 1; }
    sleep 1
done
blkdiscard -z -o 1048576 -l 1048576 /dev/vda
blkdiscard /dev/vda
"#;
    disk.guest(script, TIMEOUT).ok();
    grower.join().unwrap();
}

/// User-mode Linux does not reconnect: for its guest the disk is gone. What it had made durable is there for the next one.
#[test]
fn ext4_is_sound_after_the_server_was_killed() {
    let mut server = Process::new(Place::Disk, 128 * MIB, &[]);
    let make = "mkfs.ext4 -q /dev/vda; mkdir -p /mnt/disk; mount -t ext4 /dev/vda /mnt/disk
        cd /mnt/disk; dd if=/dev/urandom of=kept bs=64k count=64 2>/dev/null; sha256sum kept >sum; sync
        echo kept >&2
        while true; do fio --name=w --size=16m --rw=randwrite --bsrange=512-64k --fsync=32 --minimal >/dev/null; done";
    let begin = Instant::now();
    let running = guest_with(&server.socket, make).spawn().unwrap_or_else(|error| panic!("{error}"));
    // In the middle of fio, once there is something to keep.
    let end = begin + TIMEOUT;
    while server.allocated() < 20 * MIB {
        assert!(Instant::now() < end, "the guest writes nothing");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(1));
    server.kill();
    running.kill();
    drop(running);
    server.start();
    let look = "mkdir -p /mnt/disk; mount -t ext4 /dev/vda /mnt/disk; cd /mnt/disk
        sha256sum -c sum; rm -f w*; sync; fstrim -v /mnt/disk; cd /; umount /mnt/disk";
    run(guest_with(&server.socket, look), TIMEOUT).ok();
    server.kill();
    let fsck = Command::new("e2fsck").args(["-fn"]).arg(&server.file).output().unwrap();
    assert!(fsck.status.success(), "{}", String::from_utf8_lossy(&fsck.stdout));
}
