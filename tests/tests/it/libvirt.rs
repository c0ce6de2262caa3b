//! Libvirt starts the program as it starts virtiofsd: it finds it by its descriptor file, passes it a listening socket
//! and options, and gives QEMU's guest the file systems.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_tests::{GuestCache, Place, directory};

/// A guest under emulation boots in ten seconds.
const LIMIT: Duration = Duration::from_secs(600);
const TICK: Duration = Duration::from_millis(50);

/// Three file systems: one of which nothing is said, so that the program is found by its descriptor; one with all that
/// libvirt 12.8 can say; one with other numbers for its owners. The guest has them by the PCI bus.
const DOMAIN: &str = r#"
<domain type='qemu'>
  <name>guest</name>
  <memory unit='MiB'>512</memory>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>/run/parts/vmlinuz</kernel>
    <initrd>/run/initramfs</initrd>
    <cmdline>console=ttyS0 quiet panic=-1</cmdline>
  </os>
  <features><acpi/></features>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <filesystem type='mount' accessmode='passthrough'>
      <driver type='virtiofs'/>
      <source dir='/run/host/plain'/><target dir='plain'/>
    </filesystem>
    <filesystem type='mount' accessmode='passthrough'>
      <driver type='virtiofs' queue='1024'/>
      <binary path='/usr/libexec/ferry-virtiofsd' xattr='on'>
        <cache mode='always'/><sandbox mode='chroot'/><thread_pool size='4'/><openfiles max='2000'/>
      </binary>
      <source dir='/run/host/full'/><target dir='full'/><readonly/>
    </filesystem>
    <filesystem type='mount' accessmode='passthrough'>
      <driver type='virtiofs'/>
      <binary path='/usr/libexec/ferry-virtiofsd'/>
      <idmap><uid start='0' target='4000' count='10'/><gid start='0' target='5000' count='10'/></idmap>
      <source dir='/run/host/mapped'/><target dir='mapped'/>
    </filesystem>
    <serial type='file'><source path='/run/console'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"#;

/// What the guest does. It says each thing on its console.
const INIT: &str = r#"#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules/order); do $b insmod /modules/$module; done 2>/dev/null
say() { echo "guest: $*"; }
for tag in plain full mapped; do
    $b mkdir /mnt/$tag
    $b mount -t virtiofs $tag /mnt/$tag && say "$tag has $($b cat /mnt/$tag/from-host)"
done
echo from-guest >/mnt/plain/from-guest && say plain is written
echo from-guest >/mnt/full/from-guest || say full is read-only
echo from-guest >/mnt/mapped/from-guest && say mapped is written by $($b stat -c %u:%g /mnt/mapped/from-guest)
$b poweroff -f
"#;

/// Changes into a root of libvirt's and QEMU's own, with our program installed in it, and runs the guest. In namespaces of its
/// own, which go with it.
const RUN: &str = r#"
root=$1 ferry=$2 parts=$3 here=$4
mount --make-rprivate /
# A copy of another test's mount would keep its server.
umount --all --lazy --types fuse.ferry
mount -t tmpfs none /mnt
mkdir /mnt/up /mnt/work /mnt/root
mount -t overlay -o lowerdir=$root,upperdir=/mnt/up,workdir=/mnt/work none /mnt/root
DESTDIR=/mnt/root PREFIX=/usr FERRY=$ferry FERRY_AGENT=$ferry scripts/install
cd /mnt/root
mount -t proc proc proc
mount --rbind /dev dev
mount --rbind /sys sys
mount -t tmpfs none tmp
mount --bind $here run
mkdir run/parts run/state run/state/etc
mount --bind $parts run/parts
cat >run/state/etc/qemu.conf <<CONF
user = "root"
group = "root"
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
remember_owner = 0
CONF
cat run/parts/initramfs run/init.cpio >run/initramfs
# Libvirt asks for the host's full name, and would wait for a network.
echo "127.0.0.1 $(uname -n)" >etc/hosts
echo 'hosts: files' >>etc/nsswitch.conf
exec chroot . /usr/bin/virt-qemu-run -v -r /run/state /run/domain.xml
"#;

/// Ends the script, and with it all that runs in its namespaces.
struct ScriptGuard(Child);

impl Drop for ScriptGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn read(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

#[test]
#[ignore = "long: make test-all"]
fn libvirt_starts_it_as_virtiofsd() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        ferry_skip::skip!("needs root, for namespaces with mounts");
        return;
    }
    let cache = GuestCache::from_env().unwrap();
    let (root, qemu) = (cache.libvirt().unwrap(), cache.qemu().unwrap());
    let here = directory(Place::Disk);
    let at = |name: &str| here.path().join(name);
    for tree in ["plain", "full", "mapped"] {
        fs::create_dir_all(at("host").join(tree)).unwrap();
        fs::write(at("host").join(tree).join("from-host"), tree).unwrap();
    }
    for (tree, uid, gid) in [("mapped", 4000, 5000), ("mapped/from-host", 4000, 5000)] {
        std::os::unix::fs::chown(at("host").join(tree), Some(uid), Some(gid)).unwrap();
    }
    fs::write(at("domain.xml"), DOMAIN).unwrap();
    fs::write(at("init.cpio"), ferry_guest::archive("init", 0o755, INIT.as_bytes())).unwrap();
    let log = fs::File::create(at("log")).unwrap();
    let mut run = Command::new("unshare");
    run.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", RUN, "sh"]).arg(&root);
    run.arg(ferry_tests::mounts::program()).arg(qemu.kernel.parent().unwrap()).arg(here.path());
    run.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
    let started = run.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
    let mut running = ScriptGuard(started);
    let about = || {
        let mut about = format!("{}\n{}\n", read(&at("log")), read(&at("console")));
        for entry in fs::read_dir(at("state/log/qemu")).into_iter().flatten() {
            about.push_str(&read(&entry.unwrap().path()));
        }
        about
    };
    // Each server ends with its guest; libvirt's program stays.
    let end = Instant::now() + LIMIT;
    while about().matches("nothing is left to serve").count() < 3 {
        let ended = running.0.try_wait().unwrap();
        assert!(ended.is_none() && Instant::now() < end, "{ended:?}\n{}", about());
        std::thread::sleep(TICK);
    }
    let about = about();
    let console = read(&at("console"));
    let said: Vec<&str> = console.lines().filter_map(|line| line.trim_end().strip_prefix("guest: ")).collect();
    let expected = [
        "plain has plain",
        "full has full",
        "mapped has mapped",
        "plain is written",
        "full is read-only",
        "mapped is written by 0:0",
    ];
    assert_eq!(said, expected, "{about}");
    assert_eq!(read(&at("host/plain/from-guest")), "from-guest\n");
    let owner = fs::metadata(at("host/mapped/from-guest")).unwrap();
    assert_eq!(
        (std::os::unix::fs::MetadataExt::uid(&owner), std::os::unix::fs::MetadataExt::gid(&owner)),
        (4000, 5000)
    );
    // Libvirt's own record of how it has started them.
    for option in ["--sandbox chroot", "--cache always", "--thread-pool-size=4", "--rlimit-nofile=2000", "--readonly"] {
        assert!(about.contains(option), "libvirt passes no {option}: {about}");
    }
}
