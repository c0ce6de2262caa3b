//! Every command block of README.md and of the book in `docs/`, and every command line among the examples of the help: it is run as it is
//! written, or listed here with what it needs that a machine for tests has not got. (That the program takes each line is a test of its
//! own, in `ferry/src/tests/command_lines.rs`.)

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, ROOT};
use ferry_tests::mounts::{RunningProgram, ferry, program};
use ferry_tests::recipes::{block, blocks, help_lines, may_run, run, script, without_description};
use ferry_tests::{GuestCache, Place, directory};

/// Longer than an answer takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(30);

/// How the blocks begin that are run, and by which test.
const RUN: &[(&str, &str)] = &[
    ("cargo build --release", "the_try_block"),
    ("ferry share /srv/src --virtiofs /run/src.sock\n", "the_first_recipe_on_one_cpu"),
    ("-object memory-backend-memfd", "the_first_recipe_on_one_cpu"),
    ("mount -t virtiofs src /mnt", "the_first_recipe_on_one_cpu"),
    ("[[share]]\nsource = \"/srv/src\"", "the_configuration_file"),
    ("ferry share /srv/src --virtiofs /run/src.sock --tag src", "a_window_on_one_cpu_and_on_two"),
    ("ferry share /srv/src --virtiofs /run/src.sock --state", "the_state_block"),
    ("ferry disk disk.raw --resize 20G", "the_disk_blocks_on_one_cpu_and_on_two"),
    ("-chardev socket,id=disk0", "the_disk_blocks_on_one_cpu_and_on_two"),
    ("ferry mount mem /mnt", "the_mount_blocks"),
    ("ferry mount pmem:/srv/data.pmem", "the_mount_blocks"),
    ("ln -s $(command -v ferry) /sbin/mount.ferry", "the_mount_helper_block"),
    ("ferry log", "the_log_block"),
    ("ferry share /srv/src --9p unix:/run/src.9p", "the_9p_blocks"),
    ("ferry mount 9p:tcp:HOST:564/export", "the_9p_blocks"),
    ("ferry image build rootfs -o rootfs.img", "the_image_blocks"),
    ("ferry image mount rootfs.img /mnt --store /var/lib/ferry --upper", "the_image_blocks"),
    ("ferry image build rootfs -o rootfs.cfs", "the_image_blocks"),
];

/// How the blocks begin that are not run, and what they need.
const NEEDED: &[(&str, &str)] = &[
    ("make demo", "they are what runs this test, and a demonstration that takes minutes"),
    ("make deb", "a release build, and root's package manager; the lines that mount are in other blocks"),
    ("make container", "a container engine; tests/tests/it/packages.rs runs the image in namespaces"),
    ("# /etc/ferry/web.toml", "systemd: ferry/tests/it/units_systemd.rs runs such a file in a guest"),
    ("systemctl enable", "systemd: ferry/tests/it/units_systemd.rs starts the units in a guest"),
    ("# /etc/containerd/config.toml", "containerd: snapshotter/tests/it/containerd.rs has such a file"),
    (
        "# /etc/containerd/config.toml, for Kubernetes",
        "containerd: snapshotter/tests/it/cri.rs runs pods with this file",
    ),
    ("crictl ", "Kubernetes, and a registry of this name: snapshotter/tests/it/cri.rs has its own"),
    (
        "# /etc/containerd/config.toml, besides",
        "containerd: snapshotter/tests/it/lazy_containerd.rs has such a file, without Kubernetes",
    ),
    (
        "ctr images pull --snapshotter ferry ghcr.io/",
        "containerd and this registry: snapshotter/tests/it/lazy_containerd.rs has its own",
    ),
    ("ferry image trace --container", "containerd: snapshotter/tests/it/lazy_containerd.rs records a container"),
    (
        "ferry image trace --container web --output",
        "containerd; registry/tests/it/referrers.rs converts in the order of a list",
    ),
    ("[lazy]\nfrom = []", "a registry: snapshotter/tests/it/lazy.rs has such lines"),
    ("[lazy]\nfrom = [\"ghcr.io/", "a registry: snapshotter/tests/it/lazy.rs has such lines"),
    (
        "# /etc/ferry/snapshotter.toml\n[lazy]\nimage-service",
        "containerd: snapshotter/tests/it/image_service.rs, cri.rs",
    ),
    ("# kubelet's configuration file", "Kubernetes: snapshotter/tests/it/cri.rs has crictl call this socket"),
    (
        "systemctl enable --now ferry-snapshotter",
        "systemd, containerd and a registry: snapshotter/tests/it/containerd.rs imports an image",
    ),
    (
        "root = \"/var/lib/ferry-snapshotter\"",
        "root's own directories: snapshotter/tests/it/server.rs writes such a file",
    ),
    ("# /etc/ferry/layers.toml", "systemd; sources/layers/tests/it/mounts.rs makes such a mount"),
    ("# /etc/containers/storage.conf", "podman: sources/layers/tests/it/engines.rs writes such a file"),
    (
        "podman --root /srv/podman",
        "podman and a registry: ferry/tests/it/registry_layers.rs mounts such an image, and makes a container of it",
    ),
    (
        "mkdir -p /var/lib/ferry-layers.mnt",
        "systemd, podman and a registry: sources/layers/tests/it/engines.rs pulls so",
    ),
    (
        "ferry status /run/ferry-snapshotter/snapshotter.sock",
        "a snapshotter that runs: snapshotter/tests/it/control.rs asks one",
    ),
    ("ferry doctor ", "nothing: ferry/tests/it/doctor.rs runs it with each of these flags"),
    ("ferry status ", "servers that run: ferry/tests/it/status.rs has its own"),
    ("ferry metrics ", "servers that run, and a collector: ferry/tests/it/metrics.rs has its own"),
    ("ferry mount /srv /mnt --trace", "a viewer of traces: ferry/tests/it/trace.rs has servers with such files"),
    ("ferry top ", "servers that run, and a terminal: ferry/tests/it/metrics.rs has both"),
    ("ferry share /srv/a --limit iops=2000,bps=100M", "clients: ferry/tests/it/limits.rs has servers with such limits"),
    ("ferry share /srv/a --limit iops=2000,group=g", "two guests: tests/tests/alone/limits.rs has them"),
    ("ferry share /srv/a --quota 10G", "directories of that size: ferry/tests/it/quota.rs has servers with quotas"),
    ("ferry share /srv/src --virtiofs /run/src.sock --events", "root, and a guest: tests/tests/it/events.rs has both"),
    ("ferry agent ", "a guest: tests/tests/it/events.rs runs it there"),
    ("ferry add ", "a server that runs: tests/tests/it/changes.rs has its own, with guests"),
    ("ferry set ", "servers that run: ferry/tests/it/limits.rs has its own"),
    ("<memoryBacking>", "libvirt with QEMU in a daemon of its own; tests/tests/it/libvirt.rs runs such a domain"),
    ("--memory size=4G,shared=on --fs", "cloud-hypervisor, and KVM, without which it runs no guest"),
    ("podman volume create", "podman, and an image; ferry/tests/it/mount.rs mounts by the same helper"),
    ("[hypervisor.qemu]", "Kata; tests/tests/it/drop_in.rs gives the program such options"),
    ("<binary path=", "an installed ferry-virtiofsd; tests/tests/it/libvirt.rs runs it"),
    ("openssl req -x509", "certificates for two hosts: ferry/tests/it/share.rs runs this block as it is written"),
    ("[Service]", "a service manager: tests/tests/it/share_survives.rs kills servers and starts them again"),
    ("impl FileSystem for Hello", "a compiler: it is a part of examples/hello.rs, which fs/tests run"),
    ("cargo run --example hello", "a compiler: fs/tests/it/host.rs and fs/tests/it/guest.rs run the example so"),
    (
        "ferry image mount app.img /mnt --store /var/lib/ferry --from",
        "a registry of this name: ferry/tests/it/registry_layers.rs has its own",
    ),
    (
        "ferry share /srv/src --9p vhost-user:",
        "a guest's kernel on QEMU's generic device: tests/tests/it/ninep_qemu.rs has the same line",
    ),
    (
        "ferry image push rootfs.img oci:",
        "a registry and an S3 store of these names: ferry/tests/it/registry.rs has its own",
    ),
];

/// What lines need, in a block that is run or in the help, by how they begin.
const NEEDED_BY_LINES: &[(&str, &str)] = &[
    ("mount -t 9p ", "9P in this host's kernel; guests run it in tests/tests/it/ninep_qemu.rs"),
    ("mount -o remount", "see the test the_mount_helper_block, which runs it after the line before"),
    ("ferry share /srv/src --9p vhost-user:", "see the block of docs/guide/9p.md"),
    ("ferry share /srv/src --9p tls:", "certificates: ferry/tests/it/share.rs runs the block of docs/guide/tls.md"),
    ("ferry disk root.qcow2", "a volume group"),
    ("crosvm run ", "crosvm, and KVM"),
    ("echo Y > /sys", "a kernel of this machine's own: it changes a setting of all mounts"),
    ("echo options fuse", "the next boot"),
    ("ferry image push ", "a registry"),
    ("ferry image pull ", "a registry"),
    ("ferry image convert ", "a registry"),
    ("ferry image mount app.img /mnt --store /var/lib/ferry --from", "a registry"),
    ("ferry image mount rootfs.img /mnt --store /var/lib/ferry --from", "a registry"),
    ("ferry mount image:rootfs.img /mnt --store /var/lib/ferry --from", "a registry"),
    ("ferry fsck /dev/pmem0", "persistent memory"),
];

/// Lines of the help that are in no block.
const HELP: &str = r#"
mkdir -p src build /run/user/1000 images /dev/shm
ferry share ~/project --virtiofs /run/user/1000/project.sock
ferry share /srv/src --virtiofs /run/src.sock /srv/doc --virtiofs /run/doc.sock --read-only
ferry share mem --size 1G --virtiofs /run/mem.sock --mount /mnt
ferry log /run/mem.sock debug
ferry mount /mnt --explain
umount /mnt
ferry mount mem /mnt --size 1G
fusermount3 -u /mnt
ferry disk disk.raw --resize 20G
ferry disk disk.raw --vhost-user /run/disk.sock
qemu-io --image-opts driver=virtio-blk-vhost-user,path=/run/disk.sock,cache.direct=on
ferry log /run/src.sock debug
ferry log /run/src.sock default
"#;

fn text(lines: &[String]) -> String {
    lines.join("\n") + "\n"
}

#[test]
fn every_block_is_run_or_needs_something() {
    let listed: Vec<_> = RUN.iter().chain(NEEDED).map(|(first, _)| *first).collect();
    let mut found = vec![BTreeSet::new(); listed.len()];
    for block in blocks() {
        let text = text(&block.lines);
        // The longest one: some begin as others do.
        let fits = (0..listed.len()).filter(|at| text.starts_with(listed[*at]));
        let at = fits.max_by_key(|at| listed[*at].len());
        let at = at.unwrap_or_else(|| {
            panic!("{}: this block is neither run nor listed with what it needs:\n{text}", block.file)
        });
        found[at].insert(text);
    }
    let wrong: Vec<_> = listed.iter().zip(&found).filter(|(_, found)| found.len() != 1).collect();
    assert!(wrong.is_empty(), "listed, and not there, or in different words: {wrong:?}");
    // Who runs a block is there.
    let tests = include_str!("recipes.rs");
    for (first, test) in RUN {
        assert!(tests.contains(&format!("\nfn {test}()")), "{first}: there is no test {test}");
    }
}

/// Whether a line is listed with what it needs.
fn needed_by(line: &str) -> bool {
    NEEDED_BY_LINES.iter().any(|(first, _)| line.starts_with(first))
}

#[test]
fn every_line_of_the_help_is_run_or_needs_something() {
    let in_blocks =
        blocks().into_iter().filter(|block| RUN.iter().any(|(first, _)| text(&block.lines).starts_with(first)));
    let all = in_blocks.flat_map(|block| block.lines).chain(HELP.lines().map(String::from));
    let all =
        all.chain(IMAGES.lines().chain(TRIALS.lines()).chain(FILES.lines()).chain(LOGS.lines()).map(String::from));
    let run: Vec<String> =
        all.map(|line| without_description(line.trim()).trim_start_matches("target/release/").to_owned()).collect();
    let lines = help_lines();
    assert!(lines.len() > 50, "{lines:?}");
    let missing: Vec<_> = lines.iter().filter(|line| !run.contains(line) && !needed_by(line)).collect();
    assert!(missing.is_empty(), "neither run nor listed with what they need: {missing:#?}");
}

/// What a guest of QEMU does, beside what a block says.
fn guest(commands: &str) -> Vec<u8> {
    let init = format!(
        "#!/bin/busybox sh\nb=/bin/busybox\n$b mount -t proc proc /proc\n$b mount -t devtmpfs dev /dev\n\
         $b mkdir -p /sys\n$b mount -t sysfs sys /sys\n\
         for module in $($b cat /modules/order); do $b insmod /modules/$module; done 2>/dev/null\n\
         mount() {{ $b mount \"$@\"; }}\n{commands}\n$b poweroff -f\n"
    );
    ferry_tests::guest::archive("init", 0o755, init.as_bytes())
}

/// Runs QEMU with these options beside what has to be said of any machine, and `before` in the host. The guest does `commands`. On one CPU
/// it has two, so fewer than the options name queues.
fn in_qemu(cpus: Option<&str>, before: &str, options: &[String], commands: &str) {
    let parts = GuestCache::from_env().unwrap().qemu().unwrap();
    let here = directory(Place::Disk);
    let initramfs = here.path().join("initramfs");
    fs::write(&initramfs, [fs::read(&parts.initramfs).unwrap(), guest(commands)].concat()).unwrap();
    let guest_cpus = if cpus.is_some() { 2 } else { 4 };
    let options: Vec<_> = options.iter().map(|line| without_description(line)).collect();
    let script = format!(
        "{before}\n\
         \"$QEMU\" -nodefaults -no-user-config -no-reboot -display none -machine q35 -m 4G -smp {guest_cpus} -accel tcg,thread=multi \
         -cpu max -chardev file,id=log,path=console -serial chardev:log -kernel \"$KERNEL\" -initrd \"$INITRAMFS\" \
         -append 'console=ttyS0 loglevel=4 panic=-1 no_timer_check' {}\n\
         cat console\ngrep -q 'guest: done' console\n",
        options.join(" ")
    );
    let variables = [("QEMU", parts.program.as_path()), ("KERNEL", &parts.kernel), ("INITRAMFS", &initramfs)];
    println!("{}", run(cpus, &variables, &script));
}

fn share_in_qemu(cpus: Option<&str>) {
    let [share, qemu, guest] =
        ["ferry share /srv/src --virtiofs /run/src.sock\0", "-object memory-backend", "mount -t virtiofs"].map(whole);
    let commands = format!(
        "{}[ $($b cat /mnt/from-host) = from-host ] && echo from-guest >/mnt/from-guest && echo guest: done",
        text(&guest)
    );
    in_qemu(cpus, &script(&share, |_| String::new()), &qemu, &commands);
}

/// The lines of a block that begins so, where `\0` stands for the end of the line.
fn whole(first: &str) -> Vec<String> {
    let Some(first) = first.strip_suffix('\0') else { return block(first) };
    let found = blocks().into_iter().find(|block| block.lines.first().is_some_and(|line| line == first));
    found.unwrap_or_else(|| panic!("no block begins with {first:?}")).lines
}

/// It asks for four queues.
#[test]
fn the_first_recipe_on_one_cpu() {
    if may_run() {
        share_in_qemu(Some("0"));
    }
}

#[test]
fn the_first_recipe_on_two_cpus() {
    if may_run() {
        share_in_qemu(None);
    }
}

#[test]
fn the_configuration_file() {
    if !may_run() {
        return;
    }
    let file = block("[[share]]");
    let share = "serve ferry share --config shares.toml\nls /run/src.sock /run/disk.sock\n";
    run(None, &[], &format!("truncate -s 1M /srv/disk.raw\ncat >shares.toml <<'END'\n{}END\n{share}", text(&file)));
}

#[test]
#[ignore = "long: make test-all"]
fn a_window_on_one_cpu_and_on_two() {
    if !may_run() {
        return;
    }
    let lines = block("ferry share /srv/src --virtiofs /run/src.sock --tag src");
    let [share, qemu, more, mount] = &lines[..] else { panic!("{lines:?}") };
    let memory = whole("-object memory-backend").remove(0);
    let options = format!(
        "{} {}",
        qemu.strip_prefix("qemu-system-x86_64 ... ").unwrap().trim_end_matches('\\').trim(),
        more.trim()
    );
    for cpus in [Some("0"), None] {
        let share = script(std::slice::from_ref(share), |_| String::new());
        let commands = format!("{mount}\n[ $($b cat /mnt/from-host) = from-host ] && echo guest: done");
        in_qemu(cpus, &share, &[memory.clone(), options.trim().into()], &commands);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_disk_blocks_on_one_cpu_and_on_two() {
    if !may_run() {
        return;
    }
    let mut options = block("-chardev socket,id=disk0");
    options.insert(0, whole("-object memory-backend").remove(0));
    let commands = "echo 20G of zeros | $b dd of=/dev/vda conv=fsync 2>/dev/null\n\
                    [ $($b cat /sys/block/vda/size) = $((20 << 21)) ] && [ -d /sys/block/vda/mq/$(($($b nproc) - 1)) ] && echo guest: done";
    for cpus in [Some("0"), None] {
        let before = script(&block("ferry disk disk.raw --resize 20G"), |_| String::new());
        in_qemu(cpus, &before, &options, commands);
    }
}

#[test]
fn the_state_block() {
    if !may_run() {
        return;
    }
    let lines = block("ferry share /srv/src --virtiofs /run/src.sock --state");
    let share = script(&lines, |_| String::new());
    for signal in ["KILL", "TERM", "INT", "QUIT"] {
        run(
            Some("0"),
            &[],
            &format!("{share}kill -{signal} $server\nwait $server || true\n{share}kill -QUIT $server; wait $server"),
        );
    }
}

#[test]
fn the_mount_blocks() {
    if !may_run() {
        return;
    }
    let lines = [block("ferry mount pmem:/srv/data.pmem"), block("ferry mount mem /mnt")].concat();
    // The image takes all of its room at once.
    let lines: Vec<_> = lines.iter().map(|line| line.replace("--size 8G", "--size 64M")).collect();
    let (last, mounts) = lines.split_last().unwrap();
    assert!(last.starts_with("umount /mnt"));
    let check = "grep -q ' /mnt fuse.ferry ' /proc/mounts; ls /mnt >/dev/null; umount /mnt; ! grep -q ' /mnt fuse' /proc/mounts";
    let after = |line: &str| if line.contains(" /mnt ") { check.into() } else { String::new() };
    let last = script(std::slice::from_ref(last), |_| String::new());
    for cpus in [Some("0"), None] {
        run(cpus, &[], &format!("{}ferry mount mem /mnt\n{last}", script(mounts, after)));
    }
}

/// In a directory of programs that is an overlay of this host's.
#[test]
fn the_mount_helper_block() {
    if !may_run() {
        return;
    }
    let lines = block("ln -s $(command -v ferry) /sbin/mount.ferry");
    let lines: Vec<_> = lines.iter().map(|line| line.replace("size=8G", "size=64M")).collect();
    let overlay = "mkdir /tmp/up /tmp/work; mount -t overlay -o lowerdir=/usr/sbin,upperdir=/tmp/up,workdir=/tmp/work none /usr/sbin\n\
                   rm -f /usr/sbin/mount.ferry /usr/sbin/mount.fuse.ferry\n";
    let then = "grep ' /mnt fuse.ferry rw' /proc/mounts\nmount -o remount,ro /mnt\ngrep ' /mnt fuse.ferry ro' /proc/mounts\numount /mnt\n";
    run(Some("0"), &[], &format!("{overlay}{}{then}", script(&lines, |_| String::new())));
}

/// Lines of the help for the log that are in no block.
const LOGS: &str = "
ferry log /mnt
ferry log /mnt/some/file requests -f
";

#[test]
fn the_log_block() {
    if !may_run() {
        return;
    }
    let lines = block("ferry log").into_iter().chain(LOGS.lines().map(String::from));
    // Those that follow end with Ctrl-C.
    let follows = |line: &str| without_description(line).split(' ').any(|word| ["--follow", "-f"].contains(&word));
    let lines: Vec<_> = lines.map(|line| if follows(&line) { format!("ends {line}") } else { line }).collect();
    let before = "ends() { status=0; timeout -s INT 1 \"$@\" || status=$?; [ $status = 0 ] || [ $status = 124 ] || exit 1; }\n\
                  serve ferry share mem --virtiofs /run/mem.sock --mount /mnt\n\
                  mkdir -p /mnt/some /mnt/hello; echo a >/mnt/some/file; echo b >/mnt/hello/hello\n";
    let after =
        |line: &str| if line.contains("debug") { "ferry log /run/mem.sock default".into() } else { String::new() };
    run(None, &[], &format!("{before}{}", script(&lines, after)));
}

#[test]
fn the_9p_blocks() {
    if !may_run() {
        return;
    }
    let lines = block("ferry share /srv/src --9p unix:/run/src.9p");
    let has_vsock = fs::exists("/dev/vsock").unwrap();
    if !has_vsock {
        ferry_skip::skip!("there is no /dev/vsock");
    }
    // The line of the help for TLS needs certificates; this block's is run with those below.
    let is_run =
        |line: &String| (!needed_by(line) || line.contains("--9p tls:")) && (has_vsock || !line.contains("vsock:"));
    let lines: Vec<_> = lines.into_iter().filter(is_run).collect();
    // Certificates as an administrator makes them.
    let certificates = r#"
new="openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9"
$new -subj /CN=authority -keyout ca.key -out ca.pem 2>/dev/null
for name in server me; do
    $new -CA ca.pem -CAkey ca.key -subj /CN=$name -addext basicConstraints=critical,CA:FALSE \
        -addext subjectAltName=DNS:localhost -keyout $name.key -out $name.pem 2>/dev/null
done
mkdir /srv/src/export; cp /srv/src/from-host /srv/src/export
"#;
    let servers = script(&lines, |_| String::new());
    let clients = block("ferry mount 9p:tcp:HOST:564/export /mnt");
    // This host, at the ports that are used above.
    let clients: Vec<_> = clients
        .iter()
        .map(|line| line.replace("tcp:HOST:564/", "tcp:127.0.0.1:5640/").replace("tls:HOST", "tls:localhost"))
        .collect();
    let after = |line: &str| match line.starts_with("ferry mount") {
        true => "grep -q from-host /mnt/from-host\numount /mnt".into(),
        false => String::new(),
    };
    run(Some("0"), &[], &format!("{certificates}{servers}{}", script(&clients, after)));
}

/// Lines of the help for images that are in no block.
const IMAGES: &str = "
umount /mnt
ferry mount image:rootfs.img /mnt --store /var/lib/ferry
umount /mnt
ferry image build rootfs -o rootfs.img --store /var/lib/ferry --verity
ferry image ls -l rootfs.img /etc
ferry image cat rootfs.img /usr/lib/os-release --store /var/lib/ferry
ferry image diff old.img rootfs.img --store /var/lib/ferry
ferry image verify rootfs.img --store /var/lib/ferry
ferry image verify rootfs.img --store /var/lib/ferry --repair
ferry image gc images/ --store /var/lib/ferry
ferry image build rootfs -o rootfs.img --store /var/lib/ferry --order-from start.trace
ferry image build rootfs -o rootfs.img --store /var/lib/ferry
ferry image build rootfs -o rootfs.img --store store
ferry disk image:rootfs.img --store /var/lib/ferry --vhost-user /run/disk.sock
";

#[test]
fn the_image_blocks() {
    if !may_run() {
        return;
    }
    let cache = GuestCache::from_env().unwrap();
    let busybox = cache.uml().unwrap().busybox;
    let umoci = cache.umoci().unwrap();
    let umoci = umoci.parent().unwrap();
    let before = r#"
mkdir -p rootfs/bin rootfs/usr/bin rootfs/etc rootfs/usr/lib images
cp "$BUSYBOX" rootfs/bin/busybox
printf '#!/bin/busybox sh\n/bin/busybox cat /etc/motd\n' >rootfs/usr/bin/service
chmod 755 rootfs/usr/bin/service
echo hello >rootfs/etc/motd
cp rootfs/etc/motd rootfs/usr/lib/os-release
"#;
    let bundle = r#"
PATH=$UMOCI:$PATH
umoci init --layout bundle; umoci new --image bundle:latest
umoci insert --image bundle:latest rootfs /
"#;
    let lines = |first: &str| -> Vec<String> {
        let lines = block(first);
        lines.iter().map(|line| line.replace("--digest DIGEST", "--digest $(cut -d' ' -f1 digest)")).collect()
    };
    // Each mount is taken away before the next one, but for the one that is traced.
    let after = |line: &str| {
        match line {
        line if line.starts_with("ferry image build rootfs -o rootfs.img") => "ferry image info rootfs.img | grep -o '[a-z0-9]*:[0-9a-f]\\{64\\}' | head -1 >digest; cp rootfs.img old.img; cp rootfs.img images".into(),
        line if line.contains(" mount ") && !line.contains("--upper") => "[ $(cat /mnt/etc/motd) = hello ]; umount /mnt".into(),
        line if line.contains("--upper") => "echo changed >/mnt/etc/changed; umount /mnt; ferry image mount rootfs.img /mnt --store /var/lib/ferry".into(),
        _ => String::new(),
    }
    };
    let first = script(&lines("ferry image build rootfs -o rootfs.img"), after);
    let second = script(&lines("ferry image mount rootfs.img /mnt --store /var/lib/ferry --upper"), after);
    let third = script(&lines("ferry image build rootfs -o rootfs.cfs"), after);
    let of_help: Vec<String> = IMAGES.lines().map(String::from).collect();
    let of_help = script(&of_help, |_| String::new());
    let all = format!("{before}{bundle}{first}{second}umount /mnt\n{third}ferry mount mem /mnt\n{of_help}");
    println!("{}", run(None, &[("BUSYBOX", &busybox), ("UMOCI", umoci)], &all));
}

/// Lines of the help for guests that are in no block.
const TRIALS: &str = "
ferry try .
ferry try . -- sh -c 'uname -r; ls'
ferry try --read-only src build
ferry try --memory 2G . -- ./test.sh
";

#[test]
fn the_try_block() {
    if !may_run() {
        return;
    }
    let lines = block("cargo build --release");
    let lines: Vec<_> = lines.iter().skip(1).map(|line| line.replace("target/release/", "")).collect();
    let before = "mkdir -p src build; printf 'test:\\n\\techo tested\\n' >~/project/Makefile\n\
                  printf '#!/bin/sh\\necho tested\\n' >test.sh; chmod 755 test.sh\n";
    let of_help: Vec<String> = TRIALS.lines().map(String::from).collect();
    let all = [lines, of_help].concat();
    let out = run(Some("0"), &[], &format!("{before}{}", script(&all, |_| String::new())));
    assert_eq!(out.matches("tested\n").count(), 3, "{out}");
}

/// Lines of the help about images of `pmem`.
const FILES: &str = "
ferry mount pmem:/srv/data.pmem /mnt --size 64M
umount /mnt
ferry fsck /srv/data.pmem
ferry fsck /srv/data.pmem --repair
";

#[test]
fn the_lines_of_the_help() {
    if !may_run() {
        return;
    }
    let qemu_io = GuestCache::from_env().unwrap().disk().unwrap().join("bin");
    let lines: Vec<String> = HELP.lines().chain(FILES.lines()).map(String::from).collect();
    run(Some("0"), &[("QEMU_IO", &qemu_io)], &format!("PATH=$QEMU_IO:$PATH\n{}", script(&lines, |_| String::new())));
}

/// Cloud-hypervisor's line asks for four queues, and whoever starts a virtiofsd has no flag for them.
#[test]
fn in_the_place_of_virtiofsd_as_many_queues_are_offered() {
    let here = directory(Place::Memory);
    let (name, socket) = (here.path().join("virtiofsd"), here.path().join("s"));
    std::os::unix::fs::symlink(program(), &name).unwrap();
    let mut command = Command::new("taskset");
    command.args(["-c", "0"]).arg(&name).args(["--thread-pool-size=32", "--cache=never", "--shared-dir"]);
    command.arg(here.path()).arg("--socket-path").arg(&socket);
    let started = RunningProgram::new(&mut command);
    let config = Config { queues: 4, timeout: LIMIT, connect_within: LIMIT, ..Config::default() };
    let mut guest = Driver::connect(&socket, config).unwrap_or_else(|error| panic!("{error}: {}", started.said().1));
    guest.init().unwrap();
    assert!(guest.getattr(ROOT).is_ok());
}

#[test]
fn too_many_queues_are_an_error_with_the_flag() {
    let here = directory(Place::Memory);
    let socket = here.path().join("s");
    for (command, remedy) in [
        (
            vec!["share", "mem", "--queues", "3", "--virtiofs"],
            "requests 5 queues but 4 are offered: start the server with --queues 4, or",
        ),
        (
            vec!["disk", "disk.raw", "--queues", "3", "--vhost-user"],
            "requests 4 queues but 3 are offered: start the server with --queues 4, or",
        ),
    ] {
        fs::write(here.path().join("disk.raw"), vec![0; 1 << 20]).unwrap();
        let mut started = RunningProgram::new(ferry(&command).arg(&socket).arg("--json").current_dir(here.path()));
        while !started.said().0.ends_with('\n') {
            assert!(started.wait(Duration::from_millis(1)).is_none(), "{}", started.said().1);
        }
        // QEMU does not ask how many queues a file system has.
        let mut front_end = UnixStream::connect(&socket).unwrap();
        let set_vring_call = |queue: u64| {
            let header = [13u32, 1, 8].map(u32::to_ne_bytes).concat();
            // The bit says that there is no descriptor.
            [header, (queue | 0x100).to_ne_bytes().to_vec()].concat()
        };
        (0..=4).for_each(|queue| drop(front_end.write_all(&set_vring_call(queue))));
        front_end.set_read_timeout(Some(LIMIT)).unwrap();
        // It is let go.
        assert!(!matches!(front_end.read(&mut [0; 1]), Ok(1)));
        let end = Instant::now() + LIMIT;
        while !started.said().1.contains(remedy) {
            assert!(Instant::now() < end, "{}", started.said().1);
        }
    }
}

/// QEMU asks for a queue per CPU of its guest where its line does not say how many, and ends if there are fewer.
#[test]
fn a_disk_has_a_queue_for_each_cpu_of_a_large_guest() {
    let parts = GuestCache::from_env().unwrap().qemu().unwrap();
    let here = directory(Place::Memory);
    let (disk, socket) = (here.path().join("disk.raw"), here.path().join("s"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let command = ["disk".as_ref(), disk.as_os_str(), "--vhost-user".as_ref(), socket.as_os_str(), "--json".as_ref()];
    let mut started = RunningProgram::new(&mut ferry(command));
    while !started.said().0.ends_with('\n') {
        assert!(started.wait(Duration::from_millis(1)).is_none(), "{}", started.said().1);
    }
    let chardev = format!("socket,id=disk0,path={}", socket.display());
    let mut qemu = Command::new("timeout");
    qemu.arg(LIMIT.as_secs().to_string()).arg(&parts.program);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg", "-S"]);
    qemu.args(["-smp", "64", "-m", "128M", "-object", "memory-backend-memfd,id=mem,size=128M,share=on"]);
    qemu.args(["-numa", "node,memdev=mem", "-chardev", &chardev, "-device", "vhost-user-blk-pci,chardev=disk0"]);
    let mut qemu = qemu.args(["-monitor", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    qemu.stdin.take().unwrap().write_all(b"quit\n").unwrap();
    assert!(qemu.wait().unwrap().success(), "{}", started.said().1);
}
