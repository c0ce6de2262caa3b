//! Disks of QEMU guests with stock kernels: servers that are killed under fio, guests that reboot.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_tests::disks::{Process, check_image, fio_of_the_cache, tool};
use ferry_tests::{Cache, Guest, GuestResult, Kind, Options, Place, Share, Turn, collect, directory, guest_on};

const MIB: u64 = 1 << 20;
/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The host's root, for the programs in it.
fn programs() -> Share {
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    Share::of(Path::new("/"), directory(Place::Disk), dir, options)
}

/// A guest of two CPUs that runs a script, with a disk whose server may come and go.
fn guest(programs: &Share, socket: &Path, device: &str, script: &str) -> Guest {
    let mut guest = guest_on(&programs.socket, ["sh", "-euxc", script]);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.mounts.clear();
    guest.cwd = "/".into();
    let chardev = format!("socket,id=disk,path={},reconnect-ms=50", socket.display());
    let device = format!("vhost-user-blk-pci,chardev=disk,{device}");
    guest.qemu_args = ["-chardev".to_owned(), chardev, "-device".to_owned(), device].map(OsString::from).into();
    guest
}

/// Runs a guest, and kills the disk's server and starts it again whenever `pause` is over.
#[track_caller]
fn run_under_kills(guest: Guest, server: &mut Process, pause: Duration) -> (GuestResult, usize) {
    let _turn = Turn::of(&guest);
    let begin = Instant::now();
    let running = guest.spawn().unwrap_or_else(|error| panic!("{error}"));
    // The server ends with the thread that starts it, so that is this one.
    let collecting = std::thread::spawn(move || collect(running, TIMEOUT, begin));
    let mut kills = 0;
    let mut last = Instant::now();
    while !collecting.is_finished() {
        std::thread::sleep(Duration::from_millis(50));
        if last.elapsed() > pause && !collecting.is_finished() {
            server.kill();
            // Requests pile up for a while.
            std::thread::sleep(Duration::from_millis(100));
            server.start();
            kills += 1;
            last = Instant::now();
        }
    }
    let ran = collecting.join().unwrap_or_else(|_| panic!("the guest failed; the server said: {}", server.said()));
    (ran, kills)
}

/// A file system is made, written and verified, trimmed and checked.
fn script(mkfs: &str, fsck: &str, kind: &str, fio: &str) -> String {
    let defined = fio_of_the_cache();
    format!(
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\n\
         {defined}\
         test \"$(cat /sys/block/vda/queue/logical_block_size)\" = 512\n\
         cat /sys/block/vda/mq/*/nr_tags || true\n\
         {mkfs} /dev/vda\n\
         mkdir -p /run/disk\n\
         mount -t {kind} /dev/vda /run/disk\n\
         cd /run/disk\n\
         for round in 1 2 3; do\n\
             fio --name=direct --filename=direct --size=24m --rw=randwrite --bs=4k --iodepth=32 --ioengine=libaio \
                 --direct=1 --randseed=$round --verify=crc32c --do_verify=1 --verify_fatal=1 {fio} --minimal >/dev/null\n\
             fio --name=cached --filename=cached --size=16m --rw=randrw --bsrange=512-64k --ioengine=psync --fsync=64 \
                 --randseed=$round --verify=crc32c --do_verify=1 --verify_fatal=1 --minimal >/dev/null\n\
         done\n\
         dd if=/dev/urandom of=data bs=1M count=48 2>/dev/null\n\
         sha256sum data >sum\n\
         cd /\n\
         umount /run/disk\n\
         {fsck} /dev/vda\n\
         mount -t {kind} /dev/vda /run/disk\n\
         cd /run/disk\n\
         sha256sum -c sum\n\
         rm direct cached\n\
         sync\n\
         fstrim -v /run/disk\n\
         cd /\n\
         umount /run/disk\n"
    )
}

#[track_caller]
fn lives_through_kills(mut server: Process, device: &str, script: &str) -> Process {
    let programs = programs();
    let (ran, kills) =
        run_under_kills(guest(&programs, &server.socket, device, script), &mut server, Duration::from_secs(3));
    println!("QEMU, {device}: {kills} kills in {:?}", ran.took);
    let out = ran.ok();
    assert!(out.contains("trimmed"), "{out}");
    assert!(kills >= 3, "only {kills} kills");
    server
}

#[test]
#[ignore = "long: make test-all"]
fn ext4_lives_through_kills_on_packed_rings() {
    let script = script("mkfs.ext4 -q", "e2fsck -fn", "ext4", "");
    let device = "num-queues=2,queue-size=128,packed=on";
    let server = Process::new(Place::Disk, 256 * MIB, &["--queues", "2"]);
    let mut server = lives_through_kills(server, device, &script);
    server.kill();
    let checked = Command::new("e2fsck").arg("-fn").arg(&server.file).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
    // 48 MiB of data are left, and what ext4 itself takes.
    assert!(server.allocated() < 96 * MIB, "{} bytes are allocated", server.allocated());
}

#[test]
#[ignore = "long: make test-all"]
fn xfs_lives_through_kills_on_split_rings() {
    let script = script(
        &format!("{} -q -f", tool("mkfs.xfs").display()),
        &format!("{} -n", tool("xfs_repair").display()),
        "xfs",
        "--iodepth_batch_submit=8",
    );
    let device = "num-queues=2,queue-size=256";
    let server = Process::new(Place::Disk, 512 * MIB, &["--queues", "2", "--cache", "writeback"]);
    let mut server = lives_through_kills(server, device, &script);
    server.kill();
    let checked = Command::new(tool("xfs_repair")).args(["-n", "-f"]).arg(&server.file).output().unwrap();
    assert!(checked.status.success(), "{checked:?}");
    assert!(server.allocated() < 160 * MIB, "{} bytes are allocated", server.allocated());
}

#[test]
#[ignore = "long: make test-all"]
fn an_image_lives_through_kills() {
    let place = directory(Place::Disk);
    let file = place.path().join("disk");
    let image = |args: &[&str]| Command::new(tool("qemu-img")).args(args).output().unwrap();
    let path = file.to_str().unwrap();
    assert!(image(&["create", "-q", "-f", "qcow2", path, "256M"]).status.success());
    let server = Process::of(file.clone(), place, &["--queues", "2", "--format", "qcow2", "--cache", "none"]);
    let script = script("mkfs.ext4 -q", "e2fsck -fn", "ext4", "");
    let mut server = lives_through_kills(server, "num-queues=2,queue-size=256,packed=on", &script);
    server.kill();
    // Unreferenced clusters (status 3) are no damage.
    let checked = check_image(&file);
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_guest_reboots_and_finds_its_disk() {
    // In sector 0 an x for each boot, in sector 16 the sum of what is from 1 MiB on.
    let script = "export PATH=/usr/sbin:/usr/bin:/sbin:/bin\n\
        boots=$(dd if=/dev/vda bs=512 count=1 iflag=direct | tr -dc x | wc -c)\n\
        if [ $boots -gt 0 ]; then\n\
            wanted=$(dd if=/dev/vda bs=512 skip=16 count=1 iflag=direct | head -c 64)\n\
            found=$(dd if=/dev/vda bs=64k skip=16 count=16 iflag=direct | sha256sum | head -c 64)\n\
            test $wanted = $found\n\
        fi\n\
        dd if=/dev/urandom of=/run/data bs=64k count=16\n\
        dd if=/run/data of=/dev/vda bs=64k seek=16 oflag=direct\n\
        sha256sum /run/data | head -c 64 | dd of=/dev/vda bs=512 seek=16 conv=sync\n\
        head -c $((boots + 1)) /dev/zero | tr '\\0' x | dd of=/dev/vda bs=512 conv=sync\n\
        sync\n\
        echo boot $boots\n\
        if [ $boots -lt 2 ]; then /run/ferry/busybox reboot -f; sleep 1000; fi\n";
    let programs = programs();
    let mut server = Process::new(Place::Disk, 16 * MIB, &["--queues", "2"]);
    let mut guest = guest(&programs, &server.socket, "num-queues=2,queue-size=128,packed=on", script);
    guest.qemu_args.extend(["-action", "reboot=reset"].map(OsString::from));
    let (ran, kills) = run_under_kills(guest, &mut server, Duration::from_secs(20));
    println!("QEMU, two reboots: {kills} kills in {:?}", ran.took);
    let out = ran.ok();
    assert!(out.contains("boot 2"), "{out}");
}
