//! Disks on failing files and devices, and drivers that remove memory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_disk::{Cache, Options};
use ferry_driver::ring::{Descriptor, INDIRECT, NEXT, WRITE};
use ferry_driver::{Config, Driver, Error, Ticket};
use ferry_tests::disks::{DiskServer, FEATURES, Process, tool};
use ferry_tests::mounts::{Cell, Mounted, missing, program};
use ferry_tests::{Guest, GuestCache, Input, Output, Place, TIMEOUT, directory, run};

const MIB: u64 = 1 << 20;
const WITHIN: Duration = Duration::from_secs(60);
/// The maximum number of rounds of a measurement.
const ROUNDS: usize = 5;

const READ: u32 = 0;
const WRITE_OUT: u32 = 1;
const FLUSH: u32 = 4;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;

fn header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn config(features: u64) -> Config {
    Config { first_queues: 0, queue_size: 128, device_features: features, timeout: WITHIN, ..Config::default() }
}

fn read(driver: &mut Driver, at: u64, bytes: usize) -> Ticket {
    driver.queue(0).submit(&[&header(READ, at / 512)], &[bytes, 1]).unwrap()
}

fn write(driver: &mut Driver, at: u64, data: &[u8]) -> Ticket {
    driver.queue(0).submit(&[&header(WRITE_OUT, at / 512), data], &[1]).unwrap()
}

/// The data and the status of a request.
#[track_caller]
fn outcome(driver: &mut Driver, ticket: Ticket) -> (Vec<u8>, u8) {
    let mut reply = driver.queue(0).wait_for(ticket, WITHIN).unwrap().reply;
    let status = reply.pop().expect("a status");
    (reply, status)
}

/// A file that fails in the places that `ferry-bad-disk` names.
fn on_bad_mount(test: impl FnOnce(PathBuf)) {
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    let place = directory(Place::Disk);
    let mountpoint = place.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferry-bad-disk"));
    let cell: Cell = "mem_devfuse_none".parse().unwrap();
    let mounted = Mounted::of(cell, &mountpoint, command.arg(&mountpoint), Duration::from_secs(120));
    test(mountpoint.join("disk"));
    mounted.end();
}

/// A disk on such a file.
fn on_bad_file(cache: Cache, test: impl FnOnce(&DiskServer)) {
    on_bad_mount(|file| {
        let options = Options { cache: Some(cache), ..Options::default() };
        test(&DiskServer::of(file, directory(Place::Disk), &options));
    });
}

#[test]
fn a_failing_file_fails_only_affected_requests() {
    for cache in [Cache::None, Cache::Writeback] {
        on_bad_file(cache, |disk| {
            // Nothing can be punched there, so discards are not offered.
            let mut driver = Driver::connect(&disk.socket, config(FEATURES & !(1 << 13))).unwrap();
            // In one batch, adjacent to each other: those before, in and after the bad place.
            for (mib, read_fails, write_fails) in
                [(1, true, false), (2, false, true), (3, false, true), (4, true, false)]
            {
                let places =
                    [-8192, -4096, 0, 4096, 61_440, 65_536, 69_632].map(|at| (mib * MIB).wrapping_add_signed(at));
                let bad = |at: u64| (mib * MIB..mib * MIB + 65_536).contains(&at);
                let writes = places.map(|at| write(&mut driver, at, &[7; 4096]));
                for (at, ticket) in places.into_iter().zip(writes) {
                    let status = if write_fails && bad(at) { IO_ERROR } else { OK };
                    assert_eq!(outcome(&mut driver, ticket).1, status, "{cache:?}: a write at {at}");
                }
                let reads = places.map(|at| read(&mut driver, at, 4096));
                for (at, ticket) in places.into_iter().zip(reads) {
                    let (bytes, status) = outcome(&mut driver, ticket);
                    match bad(at) {
                        // What a transfer of several requests has brought before it ended early is theirs.
                        true if mib == 4 && status == OK => assert!(bytes == [7; 4096], "{cache:?}: a read at {at}"),
                        true if read_fails => assert_eq!(status, IO_ERROR, "{cache:?}: a read at {at}"),
                        true => assert_eq!((bytes, status), (vec![0; 4096], OK), "{cache:?}: a read at {at}"),
                        false => assert_eq!((bytes, status), (vec![7; 4096], OK), "{cache:?}: a read at {at}"),
                    }
                }
            }
        });
    }
}

#[test]
fn slow_sectors_delay_no_others_and_failed_flushes_are_reported() {
    on_bad_file(Cache::None, |disk| {
        let mut driver = Driver::connect(&disk.socket, config(FEATURES & !(1 << 13))).unwrap();
        // Only the fastest round counts: the machine may be busy during the others.
        let mut took = Vec::new();
        while took.iter().all(|took| *took >= Duration::from_millis(1500)) {
            assert!(took.len() < ROUNDS, "20 reads took {took:?} beside two that take 2 s");
            let slow = [read(&mut driver, 5 * MIB, 4096), write(&mut driver, 5 * MIB + 4096, &[3; 512])];
            let begin = Instant::now();
            for _ in 0..20 {
                let ticket = read(&mut driver, 8 * MIB, 4096);
                assert_eq!(outcome(&mut driver, ticket), (vec![0; 4096], OK));
            }
            took.push(begin.elapsed());
            assert_eq!(slow.map(|ticket| outcome(&mut driver, ticket).1), [OK, OK]);
        }
        let flush = |driver: &mut Driver| {
            let ticket = driver.queue(0).submit(&[&header(FLUSH, 0)], &[1]).unwrap();
            outcome(driver, ticket).1
        };
        for (at, status) in [(6 * MIB, IO_ERROR), (7 * MIB, OK)] {
            let ticket = write(&mut driver, at, &[1; 512]);
            assert_eq!(outcome(&mut driver, ticket).1, OK);
            assert_eq!(flush(&mut driver), status);
        }
        // Zeros are written where the file system knows no other way, and fail where writing fails.
        for (at, status) in [(8 * MIB, OK), (3 * MIB, IO_ERROR)] {
            let range = [&(at / 512).to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
            let ticket = driver.queue(0).submit(&[&header(WRITE_ZEROES, 0), &range], &[1]).unwrap();
            assert_eq!(outcome(&mut driver, ticket).1, status, "zeros at {at}");
        }
    });
}

/// The kernel tells of it once, and takes the lost pages for written.
#[test]
fn after_a_failed_flush_of_the_page_cache_all_fail() {
    on_bad_file(Cache::Writeback, |disk| {
        let mut driver = Driver::connect(&disk.socket, config(FEATURES & !(1 << 13))).unwrap();
        for (at, expected) in [(8 * MIB, OK), (6 * MIB, IO_ERROR), (8 * MIB, IO_ERROR)] {
            let ticket = write(&mut driver, at, &[1; 4096]);
            assert_eq!(outcome(&mut driver, ticket).1, OK);
            let flushes = [(); 2].map(|()| driver.queue(0).submit(&[&header(FLUSH, 0)], &[1]).unwrap());
            assert_eq!(flushes.map(|ticket| outcome(&mut driver, ticket).1), [expected; 2], "{at}");
        }
    });
}

/// The host may have no device mapper; a User-mode Linux guest has. There `ferry disk` serves the device, and qemu-io
/// uses it.
#[test]
#[ignore = "long: make test-all"]
fn a_failing_device_fails_only_affected_requests() {
    let script = format!(
        r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/run
for module in loop dm-mod dm-dust; do /run/ferry/busybox modprobe $module || true; done
truncate -s 16M /run/image
[ -b /dev/loop0 ] || mknod /dev/loop0 b 7 0
losetup /dev/loop0 /run/image
mkdir -p /dev/mapper
dm() {{ dmsetup --noudevrules --noudevsync "$@"; }}
# Sector 100 cannot be read until it is written; 8 sectors from the middle on cannot be used at all.
echo '0 32768 dust /dev/loop0 0 512' | dm create dust
dm message dust 0 addbadblock 100
dm message dust 0 enable
dm mknodes
printf '0 16384 linear /dev/mapper/dust 0\n16384 8 error\n16392 16376 linear /dev/mapper/dust 16392\n' | dm create bad
dm mknodes
{ferry} disk /dev/mapper/bad --vhost-user /run/s --json >/run/line &
server=$!
until [ -s /run/line ]; do sleep 0.1; done
qio() {{ {qemu_io} --image-opts driver=virtio-blk-vhost-user,path=/run/s,cache.direct=on "$@" 2>&1; }}
good() {{ out=$(qio "$@") && case $out in *error*|*failed*) false;; esac || {{ echo "it failed: $* $out"; exit 1; }}; }}
bad() {{ out=$(qio "$@") || true; case $out in *'Input/output error'*) ;; *) echo "it worked: $* $out"; exit 1;; esac; }}
good -c 'write -P 5 0 48k' -c 'write -P 6 64k 64k' -c flush
bad -c 'read 51200 512'
bad -c 'read 48k 8k'
good -c 'read -P 5 0 48k' -c 'read -P 0 51712 512' -c 'read -P 6 64k 64k'
good -c 'write -P 9 51200 512' -c 'read -P 9 51200 512'
bad -c 'write 8M 4k'
bad -c 'read 8M 512'
bad -c 'write -z 8M 4k'
bad -c 'write 8380416 64k'
good -c 'write -P 3 8392704 4k' -c 'write -P 4 8384512 4k' -c 'read -P 3 8392704 4k' -c 'read -P 4 8384512 4k' -c flush
kill -TERM $server
wait $server
echo all is well
"#,
        ferry = program().display(),
        qemu_io = tool("qemu-io").display(),
    );
    let mut guest = Guest::new(GuestCache::from_env().unwrap(), ["bash", "-euc", &script]);
    guest.stdin = Input::Null;
    guest.stdout = Output::Piped;
    guest.stderr = Output::Piped;
    let out = run(guest, TIMEOUT).ok();
    assert!(out.contains("all is well"), "{out}");
}

/// A loop device on a file.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path, block_bytes: u32) -> Option<Self> {
        let mut program = Command::new("losetup");
        program.args(["--find", "--show", "--sector-size", &block_bytes.to_string()]);
        let output = program.arg(file).output().unwrap();
        output.status.success().then(|| Self(String::from_utf8(output.stdout).unwrap().trim().into()))
    }

    /// The number of writes that the kernel has not ended.
    fn writes(&self) -> usize {
        let path = Path::new("/sys/class/block").join(self.0.file_name().unwrap()).join("inflight");
        let counts = fs::read_to_string(path).unwrap();
        counts.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn requests_that_are_no_whole_blocks_are_refused() {
    let place = directory(Place::Disk);
    let file = place.path().join("image");
    fs::write(&file, vec![6; 1 << 20]).unwrap();
    let Some(device) = Loop::new(&file, 4096) else {
        ferry_skip::skip!("no loop devices here");
        return;
    };
    for cache in [Cache::None, Cache::Writeback] {
        let options = Options { cache: Some(cache), ..Options::default() };
        let disk = DiskServer::of(device.0.clone(), directory(Place::Disk), &options);
        // With F_BLK_SIZE; other drivers use sectors.
        let mut driver = Driver::connect(&disk.socket, config(FEATURES | 1 << 6)).unwrap();
        // The size of a block, in the configuration space (5.2.4).
        assert_eq!(driver.read_config(20, 4).unwrap(), 4096u32.to_le_bytes());
        for (at, bytes, status) in [
            (0, 4096, OK),
            (0, 512, IO_ERROR),
            (512, 4096, IO_ERROR),
            (4096, 3584, IO_ERROR),
            (4096, 4608, IO_ERROR),
            (1 << 20, 4096, IO_ERROR),
            ((1 << 20) - 4096, 8192, IO_ERROR),
            ((1 << 20) - 4096, 4096, OK),
        ] {
            let ticket = read(&mut driver, at, bytes);
            assert_eq!(outcome(&mut driver, ticket).1, status, "{bytes} bytes at {at}");
            let ticket = write(&mut driver, at, &vec![6; bytes]);
            assert_eq!(outcome(&mut driver, ticket).1, status, "{bytes} bytes at {at}");
        }
        for (sector, sectors, status) in [(8, 8, OK), (2048, 8, IO_ERROR), (2047, 8, IO_ERROR), (u64::MAX, 8, IO_ERROR)]
        {
            let range = [&u64::to_le_bytes(sector)[..], &u32::to_le_bytes(sectors), &[0; 4]].concat();
            let ticket = driver.queue(0).submit(&[&header(WRITE_ZEROES, 0), &range], &[1]).unwrap();
            assert_eq!(outcome(&mut driver, ticket).1, status, "{sectors} sectors of zeros at {sector}");
        }
        let ticket = read(&mut driver, 0, 12_288);
        let wanted = [vec![6; 4096], vec![0; 4096], vec![6; 4096]].concat();
        assert_eq!(outcome(&mut driver, ticket), (wanted, OK));
    }
}

/// A server that is killed ends before its writes do. Until they have ended, nobody else gets the disk: they would overwrite
/// what the next server writes to the same places.
#[test]
fn writes_of_a_killed_server_in_the_kernel_are_waited_for() {
    on_bad_mount(|file| {
        let Some(device) = Loop::new(&file, 512) else {
            ferry_skip::skip!("no loop devices here");
            return;
        };
        let mut server = Process::of(device.0.clone(), directory(Place::Disk), &["--queues", "1"]);
        let mut driver = Driver::connect(&server.socket, Config { inflight: true, ..config(1 << 9) }).unwrap();
        // Aligned as operating systems have it, so that it bypasses the cache.
        let [small, data] = [(); 2].map(|()| driver.memory().alloc(4096, 4096).unwrap());
        small.write(0, &header(WRITE_OUT, 5 * MIB / 512));
        data.write(0, &[7; 4096]);
        let queue = driver.queue(0);
        let heads = queue.take_descriptors(3).unwrap();
        let chain = [(small.guest(), 16, NEXT), (data.guest(), 4096, NEXT), (small.guest() + 16, 1, WRITE)];
        for (at, (addr, len, flags)) in chain.into_iter().enumerate() {
            let next = heads.get(at + 1).copied().unwrap_or(0);
            Descriptor { addr, len, flags, next }.store(queue.ring().table(), heads[at].into());
        }
        queue.ring_mut().push(heads[0]);
        queue.publish();
        let begin = Instant::now();
        while device.writes() == 0 {
            assert!(begin.elapsed() < WITHIN, "the kernel never got the write");
            std::thread::sleep(Duration::from_millis(1));
        }
        server.kill();
        let (gone, left) = (begin.elapsed(), device.writes());
        server.start();
        println!("killed after {gone:?} with {left} writes under way, begun again after {:?}", begin.elapsed());
        assert_eq!(device.writes(), 0, "it began with the write still under way");
        // Each takes 2 s.
        assert!(left == 1 || gone > Duration::from_secs(2), "{left} writes after {gone:?}");
        driver.reattach().unwrap();
        let used = driver.queue(0).wait_used(WITHIN).unwrap();
        let mut status = [9];
        small.read(16, &mut status);
        assert_eq!((used.len, status), (1, [OK]));
        server.kill();
    });
}

/// An ext4 of 48 MiB on a loop device, where `O_DIRECT` finds no room.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Option<Self> {
        let image = directory(Place::Disk);
        let file = image.path().join("image");
        File::create(&file).unwrap().set_len(48 * MIB).unwrap();
        assert!(Command::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&file).status().unwrap().success());
        let at = image.path().join("mnt");
        fs::create_dir(&at).unwrap();
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&file).arg(&at).status().unwrap();
        mounted.success().then_some(Self(image))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mnt")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

#[test]
fn a_full_file_system_fails_only_allocating_requests() {
    let Some(small) = Small::new() else {
        ferry_skip::skip!("no loop devices here");
        return;
    };
    for cache in [Cache::None, Cache::Writethrough] {
        let place = tempfile::tempdir_in(small.path()).unwrap();
        let file = place.path().join("disk");
        ferry_disk::grow(&file, 128 * MIB, &Options::default()).unwrap();
        let disk = DiskServer::of(file, directory(Place::Disk), &Options { cache: Some(cache), ..Options::default() });
        let said = |commands: &[&str]| {
            let output = disk.qemu_io(commands);
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
        };
        let good = |commands: &[&str]| {
            let said = said(commands);
            assert!(!said.contains("failed") && !said.contains("error"), "{cache:?}: {said}");
        };
        let bad = |command: &str| {
            let said = said(&[command]);
            assert!(said.contains("Input/output error"), "{cache:?}: {command} worked: {said}");
        };
        good(&["write -P 4 0 4M"]);
        let filler = place.path().join("filler");
        let full = File::create(&filler).unwrap().write_all_at(&vec![1; 64 << 20], 0).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        bad("write -P 5 64M 8M");
        bad("write -z 32M 16M");
        good(&["read -P 4 0 4M", "write -P 6 1M 2M", "read -P 6 1M 2M", "read -P 0 120M 64k", "flush"]);
        fs::remove_file(&filler).unwrap();
        good(&["write -P 5 64M 8M", "read -P 5 64M 8M", "write -z 32M 16M", "discard 64M 8M"]);
    }
}

/// Takes the second half of the guest's memory away while transfers from and to it are under way.
#[test]
fn memory_that_vanishes_fails_requests_and_nothing_else() {
    for (packed, cache) in [(false, Cache::None), (true, Cache::Writeback)] {
        let disk = DiskServer::new(Place::Disk, 16 * MIB, &Options { cache: Some(cache), ..Options::default() });
        let data: Vec<u8> = (0..=250).cycle().take(1 << 20).collect();
        File::options().write(true).open(&disk.file).unwrap().write_all_at(&data, 0).unwrap();
        let config = Config { packed, regions: 2, memory_bytes: 16 << 20, ..config(FEATURES) };
        let mut driver = Driver::connect(&disk.socket, config).unwrap();
        // The rings are in the first half; what is left of it is taken, so that requests are in the second.
        let second = driver.memory().regions()[1].guest();
        let taken: Vec<_> =
            std::iter::from_fn(|| driver.memory().alloc(4096, 4096).filter(|page| page.guest() < second)).collect();
        assert!(!taken.is_empty());
        let (mut answered, mut dropped) = (0, 0);
        for round in 0..25 {
            let reads: Vec<_> = (0..24).map(|n| (n, read(&mut driver, n * 32_768, 32_768))).collect();
            let writes: Vec<_> = (0..8).map(|n| write(&mut driver, (2 + n) * MIB, &data[..65_536])).collect();
            driver.share_region(1, false).unwrap();
            for (n, ticket) in reads {
                let mut done = driver.queue(0).wait_for(ticket, WITHIN).unwrap();
                // Taken before, and then it is right; or there is nowhere to say anything.
                match done.reply.pop() {
                    Some(OK) => {
                        let from = usize::try_from(n).unwrap() * 32_768;
                        assert!(done.reply == data[from..from + 32_768], "round {round}, read {n}");
                        answered += 1;
                    }
                    status => {
                        assert_eq!((done.used_len, status), (0, None), "round {round}, read {n}");
                        dropped += 1;
                    }
                }
            }
            for ticket in writes {
                let done = driver.queue(0).wait_for(ticket, WITHIN).unwrap();
                assert!(done.reply == [OK] || done.used_len == 0, "round {round}: {done:?}");
            }
            driver.share_region(1, true).unwrap();
            let ticket = read(&mut driver, 0, 4096);
            assert_eq!(outcome(&mut driver, ticket), (data[..4096].to_vec(), OK));
        }
        println!("packed {packed}, {cache:?}: {answered} reads were answered, {dropped} lost their memory before");
        assert!(answered > 0);
        drop(taken);
    }
}

/// Rings that loop, lead nowhere or jump: dropped, or the queue stops; the next driver finds the disk as it was.
#[test]
fn rings_that_make_no_sense_harm_only_their_own_driver() {
    let disk = DiskServer::new(Place::Disk, 4 * MIB, &Options::default());
    fs::write(&disk.file, vec![9; 4 << 20]).unwrap();
    type Spoil = fn(&mut Driver);
    let cases: [(&str, Spoil); 8] = [
        ("a chain that leads to itself", |driver| push(driver, &[(0, 16, NEXT, 0)])),
        ("two that lead to each other", |driver| push(driver, &[(0, 16, NEXT, 1), (64, 512, NEXT, 0)])),
        ("a table in a table", |driver| push(driver, &[(0, 32, INDIRECT, 0)])),
        ("a table that is no whole number of entries", |driver| push(driver, &[(0, 17, INDIRECT, 0)])),
        ("a next that is outside", |driver| push(driver, &[(0, 16, NEXT, 9999)])),
        ("a buffer that wraps", |driver| {
            push(driver, &[(0, 16, NEXT, 1), (u64::MAX - 600, 1024, NEXT | WRITE, 2), (512, 1, WRITE, 0)]);
        }),
        ("an index that jumps", |driver| {
            driver.queue(0).ring_mut().jump(0x8000);
            driver.queue(0).publish();
        }),
        ("a head that is outside", |driver| {
            driver.queue(0).ring_mut().push(9999);
            driver.queue(0).publish();
        }),
    ];
    for (name, spoil) in cases {
        let mut driver = Driver::connect(&disk.socket, config(FEATURES)).unwrap();
        let ticket = read(&mut driver, 0, 512);
        assert_eq!(outcome(&mut driver, ticket), (vec![9; 512], OK));
        spoil(&mut driver);
        driver.queue(0).kick();
        match driver.queue(0).wait_used(Duration::from_millis(100)) {
            Ok(used) => assert!(used.len <= 1, "{name}: {used:?}"),
            Err(Error::TimedOut(_) | Error::Disconnected) => {}
            Err(error) => panic!("{name}: {error}"),
        }
        drop(driver);
        let mut driver = Driver::connect(&disk.socket, config(FEATURES)).unwrap();
        let ticket = read(&mut driver, 0, 512);
        assert_eq!(outcome(&mut driver, ticket), (vec![9; 512], OK), "after {name}");
    }
    assert!(fs::read(&disk.file).unwrap() == vec![9; 4 << 20]);
}

/// Makes descriptors (offset in a buffer, or an address past all memory; length; flags; next) available as a chain.
fn push(driver: &mut Driver, chain: &[(u64, u32, u16, u16)]) {
    let buffer = driver.memory().alloc(4096, 4096).unwrap();
    // A read of sector 0; as a table, its first entry is another table.
    buffer.write(0, &[0; 4096]);
    Descriptor { addr: buffer.guest(), len: 16, flags: INDIRECT, next: 0 }.store(&buffer, 0);
    let queue = driver.queue(0);
    let heads = queue.take_descriptors(chain.len()).unwrap();
    for (at, (offset, len, flags, next)) in chain.iter().enumerate() {
        let addr = if *offset < 4096 { buffer.guest() + offset } else { *offset };
        let next = heads.get(usize::from(*next)).copied().unwrap_or(*next);
        let descriptor = Descriptor { addr, len: *len, flags: *flags, next };
        descriptor.store(queue.ring().table(), heads[at].into());
    }
    queue.ring_mut().push(heads[0]);
    queue.publish();
    // The device may look at it for as long as the driver is there.
    std::mem::forget(buffer);
}

#[test]
fn a_file_that_shrinks_fails_direct_transfers_past_its_end() {
    let disk = DiskServer::new(Place::Disk, 8 * MIB, &Options::default());
    let file = File::options().write(true).open(&disk.file).unwrap();
    file.write_all_at(&vec![5; 8 << 20], 0).unwrap();
    let mut driver = Driver::connect(&disk.socket, config(FEATURES)).unwrap();
    for kept in [4 * MIB, MIB + 4096, MIB + 512, 100] {
        file.set_len(kept).unwrap();
        let reads: Vec<_> = (0..16).map(|n| (n * MIB / 2, read(&mut driver, n * MIB / 2, 8192))).collect();
        for (at, ticket) in reads {
            let (bytes, status) = outcome(&mut driver, ticket);
            match at + 8192 <= kept {
                true => assert_eq!((bytes, status), (vec![5; 8192], OK), "{at} of {kept}"),
                false => assert_eq!(status, IO_ERROR, "{at} of {kept}"),
            }
        }
    }
}
