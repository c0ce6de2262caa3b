//! `pmem` in persistent memory itself, mapped: a file on ext4 with DAX and a device of /dev/dax*, on the emulated NVDIMMs
//! of a QEMU guest. The server is killed, then the machine; what was synced is there.
//!
//! The emulation loses nothing that was written to the memory, so what is still in a CPU's cache at the end of the power
//! is not tested here. What a kernel has in its page cache is lost with the machine, and that none of it counts as durable
//! is tested.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferry_tests::disks::tool;
use ferry_tests::mounts::program;
use ferry_tests::{Cache, Guest, Kind, Options, Place, Share, Turn, directory, guest_on, run};

/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(600);
const GUEST_MIB: u32 = 512;
const NVDIMM_MIB: u32 = 128;
/// What both guests' scripts begin with. `$region` of /sys/bus/nd becomes a namespace as `ndctl create-namespace` makes
/// it: one that keeps a block device with pages (`pfn`, for DAX of file systems), or a device of its own (`dax`).
const BEGIN: &str = r#"
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
ferry=$1 mkfs=$2
nd=/sys/bus/nd
for module in device_dax dax_pmem; do
    /run/ferry/busybox insmod /lib/modules/$(uname -r)/kernel/drivers/dax/$module.ko.xz
done
namespace() {
    seed=$(cat $nd/devices/region$1/$2_seed)
    echo namespace$1.0 >$nd/drivers/nd_pmem/unbind
    echo pmem >$nd/devices/$seed/mode
    cat /proc/sys/kernel/random/uuid >$nd/devices/$seed/uuid
    echo namespace$1.0 >$nd/devices/$seed/namespace
    echo $seed >$nd/drivers/$3/bind
}
wait_for() { for i in $(seq 100); do [ ! -e "$1" ] || return 0; sleep 0.2; done; ls /dev; false; }
serve() {
    "$ferry" --log debug mount pmem:$1 /run/at --foreground $2 >/run/said 2>&1 &
    server=$!
    for i in $(seq 300); do
        ! mountpoint -q /run/at || break
        kill -0 $server || { cat /run/said; exit 1; }
        sleep 0.2
    done
    mountpoint -q /run/at
    # Not by system calls: the memory itself is the medium.
    grep 'image opened' /run/said | grep -q 'dax=true' || { cat /run/said; exit 1; }
}
checked() { (cd /run/at && sha256sum --quiet -c sums) && "$ferry" fsck $1 2>&1 | grep -q 'in use'; }
ended() { umount /run/at && wait $server && "$ferry" fsck $1; }
mkdir -p /run/at /run/dax
"#;

/// Writes and kills the server in the midst of it, several times; then again, and says so: there is no sync by the kernel.
const FIRST: &str = r#"
namespace 0 pfn nd_pmem
namespace 1 dax dax_pmem
wait_for /dev/pmem0; wait_for /dev/dax1.0
"$mkfs" -q -b 4096 /dev/pmem0
mount -t ext4 -o dax=always /dev/pmem0 /run/dax
grep ' /run/dax ext4 .*dax=always' /proc/mounts
killed() {
    serve $1 "$2"
    for round in 1 2 3; do
        dd if=/dev/urandom of=/run/at/large bs=64k count=32 conv=fsync
        for number in 1 2 3 4 5 6 7 8; do head -c $((number * round * 777)) /dev/urandom >/run/at/$number.$round; done
        # In place, within a block, beyond the end.
        head -c 5000 /dev/urandom | dd of=/run/at/large bs=100 seek=701 conv=notrunc
        (cd /run/at && sha256sum large [1-8].* >sums && sync large [1-8].* sums)
        # What goes on when the end comes. The last of it is not synced.
        (while :; do head -c 30000 /dev/urandom >/run/at/churn; mv /run/at/churn /run/at/churn2; done) 2>/dev/null &
        churning=$!
        sleep 1
        kill -9 $server
        wait $server || true
        kill -9 $churning || true
        wait $churning || true
        ! stat /run/at/large
        umount -l /run/at || true
        "$ferry" fsck $1
        serve $1 "$2"
        checked $1
    done
    ended $1
}
killed /run/dax/image '--size 64M'
killed /dev/dax1.0 ''
serve /run/dax/image ''
head -c 300000 /dev/urandom >/run/at/last; (cd /run/at && sha256sum last >>sums && sync last sums)
umount /run/at; wait $server
serve /dev/dax1.0 ''
head -c 300000 /dev/urandom >/run/at/last; (cd /run/at && sha256sum last >>sums && sync last sums)
echo the power may fail now
sleep 1000
"#;

/// After the machine has gone.
const SECOND: &str = r#"
wait_for /dev/pmem0; wait_for /dev/dax1.0
mount -t ext4 -o dax=always /dev/pmem0 /run/dax
for image in /run/dax/image /dev/dax1.0; do
    "$ferry" fsck $image
    serve $image ''
    grep -q ' last$' /run/at/sums
    checked $image
    ended $image
done
"#;

/// The host's root, for the programs in it.
fn programs() -> Share {
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    Share::of(Path::new("/"), directory(Place::Disk), dir, options)
}

/// A guest with two NVDIMMs whose cells are files.
fn guest(programs: &Share, cells: &[PathBuf; 2], script: &str) -> Guest {
    let script = format!("{BEGIN}{script}");
    let mkfs = tool("mkfs.ext4");
    let words = ["sh", "-euxc", &script, "sh", program().to_str().unwrap(), mkfs.to_str().unwrap()];
    let mut guest = guest_on(&programs.socket, words);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    guest.memory_mib = GUEST_MIB;
    guest.mounts.clear();
    guest.cwd = "/".into();
    let mut args = format!("-machine nvdimm=on -m slots=2,maxmem={}M", GUEST_MIB * 4);
    for (number, cells) in cells.iter().enumerate() {
        args += &format!(
            " -object memory-backend-file,id=nvdimm{number},share=on,size={NVDIMM_MIB}M,mem-path={} \
             -device nvdimm,id=n{number},memdev=nvdimm{number}",
            cells.display()
        );
    }
    guest.qemu_args = args.split_whitespace().map(Into::into).collect();
    guest
}

#[test]
#[ignore = "long: make test-all"]
fn synced_data_survive_the_server_and_the_machine() {
    let programs = programs();
    let memory = directory(Place::Memory);
    let cells = [0, 1].map(|number| memory.path().join(format!("nvdimm{number}")));
    for cells in &cells {
        File::create(cells).unwrap().set_len(u64::from(NVDIMM_MIB) << 20).unwrap();
    }
    let begin = std::time::Instant::now();
    let first = guest(&programs, &cells, FIRST);
    let turn = Turn::of(&first);
    let mut running = first.spawn().unwrap_or_else(|error| panic!("{error}"));
    // What it says is read as it comes, so that it can be shown if the guest does not get to its end.
    let (out, err) = (running.stdout.take().unwrap(), running.stderr.take().unwrap());
    let said = std::thread::spawn(move || BufReader::new(err).lines().map_while(Result::ok).collect::<Vec<_>>());
    out.set_read_timeout(Some(TIMEOUT)).unwrap();
    let ready = BufReader::new(out).lines().map_while(Result::ok).any(|line| line == "the power may fail now");
    // The end of the machine, all at once.
    drop((running, turn));
    let said = said.join().unwrap();
    assert!(ready, "the first guest failed:\n{}", said.join("\n"));
    println!("written, killed: {:?}", begin.elapsed());
    let ran = run(guest(&programs, &cells, SECOND), TIMEOUT);
    println!("found again: {:?}", ran.took);
    ran.ok();
}
