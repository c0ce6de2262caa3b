//! The units under a real systemd: this machine's own, as process 1 of a User-mode Linux whose root is this host's, read-only.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::ferry;

const SYSTEMD: &str = "/lib/systemd/systemd";

/// A guest boots in two seconds on a machine with nothing else to do.
const LIMIT: Duration = Duration::from_secs(180);

/// Process 1 until systemd is. No unit of the host is started, for ours have no default dependencies here. In what systemd takes for a
/// container it does not read the kernel's command line.
const INIT: &str = r#"#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /mnt
mkdir -p /run/systemd/system /run/systemd/journald.conf.d /run/etc /mnt/a /mnt/c /mnt/tree
printf '[Journal]\nStorage=volatile\n' >/run/systemd/journald.conf.d/volatile.conf
echo hello >/mnt/tree/file
truncate --size 1M /mnt/disk
cp HERE/units/* /run/systemd/system/
for unit in ferry-share@.service ferry-disk@.service ferry-mount@.service ferry-share@.socket ferry-disk@.socket ferry-agent@.service; do
    mkdir /run/systemd/system/$unit.d
    printf '[Unit]\nDefaultDependencies=no\n' >/run/systemd/system/$unit.d/alone.conf
done
for module in MODULES; do BUSYBOX insmod $module; done
exec /lib/systemd/systemd --unit=ferry-test.service --show-status=no
"#;

const UNIT: &str = "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nExecStart=/bin/sh HERE/test\n";

/// Functions for what is done in the guest.
const FUNCTIONS: &str = r#"
exec >/dev/console 2>&1
ask() {
    perl -MSocket -e 'socket(S, AF_UNIX, SOCK_STREAM, 0); connect(S, sockaddr_un($ARGV[0])) or die "connect: $!";
        syswrite S, pack("VVV", 1, 1, 0); sysread S, $b, 20; printf "- reply of %d bytes\n", length $b' $1
}
show() { echo "- $1 $(systemctl show -p ActiveState --value $1) $(systemctl show -p NRestarts --value $1)"; }
kill9() {
    pid=$(systemctl show -p MainPID --value $1)
    [ "$pid" -gt 0 ] && kill -9 $pid
    for try in $(seq 50); do
        sleep 0.2
        [ "$(systemctl show -p NRestarts --value $1) $(systemctl show -p ActiveState --value $1)" = "1 active" ] && break
    done
}
systemctl start systemd-journald.socket systemd-journald.service
"#;

/// What is done in the guest; each line that begins with a dash is compared with [`EXPECTED`].
const TEST: &str = r#"
cd /run/etc
printf '[[share]]\nsource = "/mnt/tree"\nvirtiofs = "/run/ferry-share/a.sock"\n' >a.toml
printf '[[share]]\nsource = "/mnt/tree"\nvirtiofs = "/run/ferry-share/b.sock"\n' >b.toml
printf '[[share]]\nsource = "/mnt/tree"\n9p = "unix:/run/ferry-share/n.sock"\n' >n.toml
printf '[[share]]\nsource = "mem"\nmount = "/mnt/a"\n' >m.toml
printf '[[disk]]\nfile = "/mnt/disk"\nvhost-user = "/run/ferry-disk/d.sock"\n' >d.toml
printf '[[share]]\nsource = "/mnt/tree"\nvirtiof = "x"\n' >bad.toml

systemctl start ferry-share@a; show ferry-share@a; ask /run/ferry-share/a.sock
kill9 ferry-share@a; show ferry-share@a; ask /run/ferry-share/a.sock
printf '[[share]]\nsource = "mem"\nvirtiofs = "/run/ferry-share/a2.sock"\n' >>a.toml
systemctl reload ferry-share@a; echo "- reload $?"; ask /run/ferry-share/a2.sock; show ferry-share@a
echo wrong >>a.toml; systemctl reload ferry-share@a; echo "- reload $?"; ask /run/ferry-share/a.sock; show ferry-share@a
systemctl stop ferry-share@a; show ferry-share@a; [ -e /run/ferry-share/a.sock ] || echo "- no socket"

systemctl start ferry-share@b.socket; show ferry-share@b; ask /run/ferry-share/b.sock; show ferry-share@b
kill9 ferry-share@b; ask /run/ferry-share/b.sock; show ferry-share@b

systemctl start ferry-share@n; PROGRAM mount 9p:unix:/run/ferry-share/n.sock /mnt/c; echo >/mnt/c/before; cd /mnt/c
kill9 ferry-share@n; show ferry-share@n; echo >after; ls | sed 's/^/- client: /'
cd /run/etc; umount /mnt/c; systemctl stop ferry-share@n

systemctl start ferry-mount@m; show ferry-mount@m; echo >/mnt/a/one; grep -c ' /mnt/a fuse.ferry' /proc/mounts | sed 's/^/- mounts: /'
kill9 ferry-mount@m; show ferry-mount@m; echo >/mnt/a/two; ls /mnt/a | sed 's/^/- file /'
systemctl stop ferry-mount@m; show ferry-mount@m; grep -c ' /mnt/a fuse.ferry' /proc/mounts | sed 's/^/- mounts: /'

systemctl start ferry-disk@d.socket; ask /run/ferry-disk/d.sock; show ferry-disk@d
systemctl stop ferry-disk@d.socket ferry-disk@d; systemctl start ferry-disk@d; show ferry-disk@d; ask /run/ferry-disk/d.sock

systemctl start ferry-share@bad; sleep 1; show ferry-share@bad
journalctl --sync
journalctl _SYSTEMD_UNIT=ferry-share@bad.service --output verbose | grep -oE '(SYSLOG_IDENTIFIER|MESSAGE)=.*' | sort -u | sed 's/^/- /'
echo "- end"
systemctl poweroff --force --force
"#;

const EXPECTED: &str = "\
- ferry-share@a active 0
- reply of 20 bytes
- ferry-share@a active 1
- reply of 20 bytes
- reload 0
- reply of 20 bytes
- ferry-share@a active 1
- reload 1
- reply of 20 bytes
- ferry-share@a active 1
- ferry-share@a inactive 0
- no socket
- ferry-share@b inactive 0
- reply of 20 bytes
- ferry-share@b active 0
- reply of 20 bytes
- ferry-share@b active 1
- ferry-share@n active 1
- client: after
- client: before
- client: file
- ferry-mount@m active 0
- mounts: 1
- ferry-mount@m active 1
- file two
- ferry-mount@m inactive 0
- mounts: 0
- reply of 20 bytes
- ferry-disk@d active 0
- ferry-disk@d active 0
- reply of 20 bytes
- ferry-share@bad failed 0
- MESSAGE=ferry: the configuration file /run/etc/bad.toml is wrong: line 3: unknown field `virtiof`: did you mean `virtiofs`?
- SYSLOG_IDENTIFIER=ferry
- end
";

/// What is done in a guest with a share, compared with [`EXPECTED_OF_AGENT`]. A mount is unmounted by its unit, by hand, and lazily.
const TEST_OF_AGENT: &str = r#"
agent=ferry-agent@mnt-a.service
until_is() {
    for try in $(seq 50); do
        [ "$(systemctl is-active $agent)" = $1 ] && break
        sleep 0.2
    done
    show $agent
}
systemctl enable --runtime --quiet $agent
mount -t virtiofs t /mnt/a; until_is active
kill9 $agent; show $agent
before=$(date +%s)
systemctl stop mnt-a.mount; until_is inactive
[ $(($(date +%s) - before)) -lt 4 ] && echo "- at once"
grep -c ' /mnt/a virtiofs' /proc/mounts | sed 's/^/- mounts: /'
mount -t virtiofs t /mnt/a; until_is active
umount /mnt/a 2>/dev/null || echo "- busy"
umount --lazy /mnt/a; until_is inactive
journalctl --sync
journalctl _SYSTEMD_UNIT=$agent --output cat | grep -c 'dropping its caches' | sed 's/^/- starts: /'
echo "- end"
systemctl poweroff --force --force
"#;

const EXPECTED_OF_AGENT: &str = "\
- ferry-agent@mnt-a.service active 0
- ferry-agent@mnt-a.service active 1
- ferry-agent@mnt-a.service inactive 0
- at once
- mounts: 0
- ferry-agent@mnt-a.service active 0
- busy
- ferry-agent@mnt-a.service inactive 0
- starts: 2
- end
";

/// The guest is a node of Kubernetes, and its root is a volume of a container. Programs can be written: they are links in memory.
const TEST_OF_NODE: &str = r#"
mkdir /run/programs /run/node
mount --bind /usr/bin /run/programs
mount -t tmpfs tmpfs /usr/bin
/run/programs/ln --symbolic /run/programs/* /usr/bin
mount -t tmpfs tmpfs /etc/systemd/system
mount -t tmpfs tmpfs /var/lib
mkdir -p /etc/systemd/system/ferry-snapshotter.service.d
printf '[Unit]\nDefaultDependencies=no\n' >/etc/systemd/system/ferry-snapshotter.service.d/alone.conf
mount --rbind / /run/node
unshare --pid --fork --mount-proc SNAPSHOTTER --install-to /run/node 2>&1 | sed 's/^/- /'
for time in first again newer; do
    [ $time = newer ] && chmod 700 /usr/bin/ferry
    SNAPSHOTTER --install-to /run/node && echo "- installed"
    show ferry-snapshotter.service; systemctl is-enabled ferry-snapshotter.service | sed 's/^/- /'
    [ -S /run/ferry-snapshotter/snapshotter.sock ] && echo "- socket"
    journalctl _SYSTEMD_UNIT=ferry-snapshotter.service
done
journalctl --sync
journalctl _SYSTEMD_UNIT=ferry-snapshotter.service --output cat | grep -c 'INFO serving' | sed 's/^/- starts: /'
find /usr/bin ! -type l -type f | sort | sed 's/^/- /'
echo "- end"
systemctl poweroff --force --force
"#;

const EXPECTED_OF_NODE: &str = "\
- ferry-snapshotter: this container does not see the node's processes: set hostPID: true in its pod
- installed
- ferry-snapshotter.service active 0
- enabled
- socket
- installed
- ferry-snapshotter.service active 0
- enabled
- socket
- installed
- ferry-snapshotter.service active 0
- enabled
- socket
- starts: 2
- /usr/bin/ferry
- /usr/bin/ferry-snapshotter
- end
";

/// As dist/kubernetes does it.
#[test]
#[ignore = "long: boots systemd"]
fn systemd_starts_the_installed_unit_on_a_node() {
    let programs = Path::new(env!("CARGO_BIN_EXE_ferry")).parent().unwrap();
    if !programs.join("ferry-snapshotter").exists() {
        return ferry_skip::skip!("no {}/ferry-snapshotter: cargo build -p ferry-snapshotter", programs.display());
    }
    // Without what debuggers need: the guest has them in memory, for a moment twice.
    let image = tempfile::tempdir().unwrap();
    for name in ["ferry", "ferry-snapshotter"] {
        let mut strip = Command::new("strip");
        let stripped = strip.arg("-o").arg(image.path().join(name)).arg(programs.join(name)).status().unwrap();
        assert!(stripped.success(), "{name}");
    }
    let snapshotter = image.path().join("ferry-snapshotter");
    boot(&TEST_OF_NODE.replace("SNAPSHOTTER", snapshotter.to_str().unwrap()), EXPECTED_OF_NODE, None);
}

/// Start, readiness, the end of a server by SIGKILL, also while it has a client, socket activation, a file with a mistake, and the
/// journal.
#[test]
#[ignore = "long: boots systemd"]
fn systemd_starts_and_restarts_the_units() {
    boot(TEST, EXPECTED, None);
}

/// The agent comes with the mount of a share, and goes before it does.
#[test]
#[ignore = "long: boots systemd"]
fn systemd_runs_the_agent_with_its_mount() {
    let directory = tempfile::tempdir().unwrap();
    if let Err(why) = ferry_dir::can_watch(fs::File::open(directory.path()).unwrap().as_fd()) {
        return ferry_skip::skip!("{why}");
    }
    let socket = directory.path().join("s");
    let mut command = ferry();
    command.arg("share").arg(directory.path()).args(["--events", "--tag", "t", "--virtiofs"]).arg(&socket);
    let server = Server(command.spawn().unwrap());
    let begin = std::time::Instant::now();
    while !socket.exists() {
        assert!(begin.elapsed() < LIMIT, "no socket");
        std::thread::sleep(Duration::from_millis(20));
    }
    boot(TEST_OF_AGENT, EXPECTED_OF_AGENT, Some(&socket));
    drop(server);
}

/// Ends a server.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

/// Boots a guest, with a share if a socket is given, and compares what the script says.
fn boot(test: &str, expected: &str, socket: Option<&Path>) {
    let Ok(parts) = ferry_guest::Cache::from_env().and_then(|cache| cache.uml()) else {
        return ferry_skip::skip!("no User-mode Linux: guest/fetch uml brings it");
    };
    if !Path::new(SYSTEMD).exists() {
        return ferry_skip::skip!("no {SYSTEMD}: apt-get install systemd");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("units")).unwrap();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/systemd")).unwrap() {
        let unit = entry.unwrap().path();
        let text = fs::read_to_string(&unit).unwrap().replace("/usr/bin/ferry-agent", "/usr/bin/ferry agent");
        let text = text.replace("/usr/bin/ferry", env!("CARGO_BIN_EXE_ferry"));
        let text = text.replace("/etc/ferry/", "/run/etc/");
        fs::write(path("units").join(unit.file_name().unwrap()), text).unwrap();
    }
    let modules = ["fuse/fuse.ko", "fuse/virtiofs.ko", "overlayfs/overlay.ko"];
    let modules = modules.map(|name| parts.modules.join("kernel/fs").join(name).display().to_string());
    let here = |text: &str| {
        let text = text.replace("HERE", directory.path().to_str().unwrap());
        let text = text.replace("BUSYBOX", parts.busybox.to_str().unwrap());
        text.replace("MODULES", &modules.join(" "))
    };
    fs::write(path("units/ferry-test.service"), here(UNIT)).unwrap();
    fs::write(path("test"), [FUNCTIONS, test].concat().replace("PROGRAM", env!("CARGO_BIN_EXE_ferry"))).unwrap();
    fs::write(path("init"), here(INIT)).unwrap();
    fs::set_permissions(path("init"), fs::Permissions::from_mode(0o755)).unwrap();
    let log = fs::File::create(path("log")).unwrap();
    let mut machine = Command::new(&parts.kernel);
    machine.args(
        "mem=512M con=null con0=null,fd:1 root=/dev/root rootfstype=hostfs rootflags=/ ro panic=-1 noreboot quiet"
            .split(' '),
    );
    machine.arg("seccomp=auto").arg(format!("init={}", path("init").display()));
    machine.arg(format!("uml_dir={}", directory.path().display())).env("TMPDIR", directory.path());
    machine.args(socket.map(|socket| format!("virtio_uml.device={}:26:0", socket.display())));
    machine.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let mut machine = machine.spawn().unwrap();
    let begin = std::time::Instant::now();
    while machine.try_wait().unwrap().is_none() {
        if begin.elapsed() > LIMIT {
            machine.kill().unwrap();
            machine.wait().unwrap();
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let said = String::from_utf8_lossy(&fs::read(path("log")).unwrap()).replace('\r', "");
    // Where systemd shows what it waits for.
    let said = said.replace("\u{1b}[K", "");
    let lines: String = said.lines().filter(|line| line.starts_with("- ")).map(|line| format!("{line}\n")).collect();
    assert_eq!(lines, expected, "{said}");
}
