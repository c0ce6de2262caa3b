//! The systemd units in `dist/systemd`, as `make install` writes them.

use crate::common;
use crate::service_manager::{Manager, PATIENCE, signal};

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{ferry, run, wait};
use rustix::process::Signal;

/// Directives that give a service a mount namespace (systemd.exec(5)), in which it would mount for itself alone.
const WITH_MOUNT_NAMESPACE: [&str; 22] = [
    "BindPaths",
    "BindReadOnlyPaths",
    "ExecPaths",
    "InaccessiblePaths",
    "MountAPIVFS",
    "MountFlags",
    "NoExecPaths",
    "PrivateDevices",
    "PrivateMounts",
    "PrivateTmp",
    "ProcSubset",
    "ProtectControlGroups",
    "ProtectHome",
    "ProtectKernelLogs",
    "ProtectKernelModules",
    "ProtectKernelTunables",
    "ProtectProc",
    "ProtectSystem",
    "ReadOnlyPaths",
    "RootDirectory",
    "RootImage",
    "TemporaryFileSystem",
];

/// The templates, which are all of this program; `snapshotter/tests/it/unit.rs` tests the other one.
fn units() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/systemd");
    let units = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    units.filter(|path| path.to_string_lossy().contains('@')).collect()
}

/// The values of a directive of a unit, in their order.
fn values(unit: &Path, directive: &str) -> Vec<String> {
    let text = fs::read_to_string(unit).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once('='));
    lines.filter(|(name, _)| *name == directive).map(|(_, value)| value.to_owned()).collect()
}

fn unit(name: &str) -> PathBuf {
    units().into_iter().find(|path| path.ends_with(name)).unwrap()
}

#[test]
fn systemd_takes_the_units() {
    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
        return ferry_skip::skip!("no systemd-analyze: apt-get install systemd");
    }
    let directory = tempfile::tempdir().unwrap();
    let mut install = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install"));
    // Only that there is a program matters.
    install.env("FERRY", env!("CARGO_BIN_EXE_ferry")).env("FERRY_AGENT", env!("CARGO_BIN_EXE_ferry"));
    install.env("DESTDIR", "").env("PREFIX", directory.path());
    assert!(run(&mut install).status.success());
    // Templates are verified as the instance `i`, and the agent is bound to its mount.
    fs::write(directory.path().join("lib/systemd/system/i.mount"), "[Mount]\nWhat=t\nWhere=/i\nType=virtiofs\n")
        .unwrap();
    let units = units();
    assert_eq!(units.len(), 6, "{units:?}");
    for unit in units {
        let installed = directory.path().join("lib/systemd/system").join(unit.file_name().unwrap());
        // The pages are not where this machine's man looks for them.
        let output = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&installed));
        // It says what is wrong with the machine's own units, too.
        let said = String::from_utf8_lossy(&output.stderr);
        let wrong: Vec<_> = said.lines().filter(|line| line.contains("ferry")).collect();
        assert!(output.status.success() && wrong.is_empty(), "{}: {said}", unit.display());
    }
}

/// Mounts of the service are the host's, and whatever its program needs is left to it.
#[test]
fn units_allow_what_their_servers_need() {
    for unit in units() {
        let text = fs::read_to_string(&unit).unwrap();
        let set: Vec<_> = text.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect();
        for directive in ["PrivateUsers", "RestrictNamespaces", "SystemCallFilter", "RootDirectory", "DynamicUser"] {
            assert!(!set.contains(&directive), "{}: {directive}", unit.display());
        }
        // /run/ferry has root's control sockets, and only root may enter it.
        for place in [values(&unit, "ListenStream"), values(&unit, "RuntimeDirectory")].concat() {
            assert!(!Path::new("/run").join(&place).starts_with("/run/ferry"), "{}: {place}", unit.display());
        }
        // In a namespace of its own, a share would stay mounted.
        if unit.ends_with("ferry-mount@.service") || unit.ends_with("ferry-agent@.service") {
            let wrong: Vec<_> = WITH_MOUNT_NAMESPACE.iter().filter(|name| set.contains(*name)).collect();
            assert!(wrong.is_empty(), "{}: {wrong:?}", unit.display());
        }
    }
}

/// The memory of guests is not dumped with their server.
#[test]
fn servers_of_guests_dump_no_core() {
    for name in ["ferry-share@.service", "ferry-disk@.service"] {
        assert_eq!(values(&unit(name), "LimitCORE"), ["0"], "{name}");
    }
}

/// All its servers would end at once.
#[test]
fn no_unit_is_killed_as_a_whole_for_want_of_memory() {
    let snapshotter = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/systemd/ferry-snapshotter.service");
    assert_eq!(values(&snapshotter, "OOMScoreAdjust"), ["-500"]);
    let servers = ["ferry-share@.service", "ferry-disk@.service", "ferry-mount@.service"].map(unit);
    for unit in servers.into_iter().chain([snapshotter]) {
        for (directive, value) in
            [("OOMPolicy", "continue"), ("ManagedOOMPreference", "omit"), ("TasksMax", "infinity")]
        {
            assert_eq!(values(&unit, directive), [value], "{}: {directive}", unit.display());
        }
    }
}

/// A server waits for what it shares, and systemd, which allows five starts in ten seconds (systemd-system.conf(5)), does
/// not give it up.
#[test]
fn servers_wait_for_file_systems_and_are_started_again_without_limit() {
    let snapshotter = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/systemd/ferry-snapshotter.service");
    // Credentials of registries are there.
    assert_eq!(values(&snapshotter, "Environment"), ["HOME=/root"]);
    let services = units().into_iter().filter(|unit| unit.extension().unwrap() == "service");
    for unit in services.chain([snapshotter]) {
        let is_server = !unit.ends_with("ferry-agent@.service") && !unit.ends_with("ferry-snapshotter.service");
        assert_eq!(values(&unit, "After")[0].contains("remote-fs.target"), is_server, "{}", unit.display());
        assert_eq!(values(&unit, "StartLimitIntervalSec"), ["0"], "{}", unit.display());
    }
}

/// What Debian's `remove`, and RPM's, begins with. `$1`: a root with the units, `$2`: the script.
const REMOVE: &str = r#"
mount -t tmpfs none /run
mkdir -p /run/systemd/system "$1/bin"
printf '#!/bin/sh\nexec %s --root="%s" "$@"\n' "$(command -v systemctl)" "$1" >"$1/bin/systemctl"
chmod +x "$1/bin/systemctl"
PATH=$1/bin:$PATH
for unit in share@a.service share@a.socket disk@a.service disk@a.socket mount@a.service agent@mnt-a.service snapshotter.service; do
    systemctl --quiet enable ferry-$unit
done
links() { find "$1/etc/systemd" -type l | wc -l; }
links "$1"
sh "$2" upgrade 1.0
links "$1"
sh "$2" remove
links "$1"
"#;

#[test]
fn a_package_that_is_removed_disables_its_units() {
    let has_systemctl = Command::new("systemctl").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !rustix::process::geteuid().is_root() || !has_systemctl {
        return ferry_skip::skip!("needs root and systemctl");
    }
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist");
    let root = tempfile::tempdir().unwrap();
    let units = root.path().join("usr/lib/systemd");
    fs::create_dir_all(&units).unwrap();
    assert!(run(Command::new("cp").arg("-r").arg(dist.join("systemd")).arg(units.join("system"))).status.success());
    let mut remove = Command::new("unshare");
    remove.args(["--mount", "sh", "-euc", REMOVE, "sh"]).arg(root.path()).arg(dist.join("debian/prerm"));
    let output = run(&mut remove);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "7\n7\n0\n", "{told}");
}

/// Follows the advice of `scripts/install`, which is `$1`, and of its `--remove`. `$2`: the prefix of another user.
const ADVICE: &str = r#"
cd "$PREFIX"
links=$(readlink -f /sbin)
mount -t tmpfs none /etc
mount -t tmpfs none "$links"
"$1" 2>advice
sed 1d advice | sh -eu
find "$links" /etc/qemu -type l | wc -l
"$1" --remove 2>advice
sed 's/^install: as root: //' advice | sh -eu
find "$links" /etc/qemu -type l | wc -l
export PREFIX="$2"
setpriv --reuid=64321 --regid=64321 --clear-groups "$1" 2>&1
"#;

/// libvirt starts no guest while a descriptor is a link that leads nowhere.
#[test]
fn links_that_installing_advised_are_named_when_they_lead_nowhere() {
    if !rustix::process::geteuid().is_root() {
        return ferry_skip::skip!("needs root, for a /etc of its own");
    }
    let [own, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    std::os::unix::fs::chown(other.path(), Some(64_321), None).unwrap();
    let mut advice = Command::new("unshare");
    advice.args(["--mount", "sh", "-euc", ADVICE, "sh", concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/install")]);
    advice.arg(other.path()).env("FERRY", env!("CARGO_BIN_EXE_ferry")).env("FERRY_AGENT", env!("CARGO_BIN_EXE_ferry"));
    let output = run(advice.env("DESTDIR", "").env("PREFIX", own.path()));
    let told = String::from_utf8_lossy(&output.stderr);
    // Root is not advised to link to the programs of another user.
    assert_eq!(String::from_utf8_lossy(&output.stdout), "4\n0\n", "{told}");
    assert!(output.status.success() && other.path().join("bin/ferry").exists(), "{told}");
}

/// What a server has of capabilities and system calls, as /proc shows it.
fn confinement(pid: u32) -> Vec<String> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let server = children.split_whitespace().next().unwrap();
    let status = fs::read_to_string(format!("/proc/{server}/status")).unwrap();
    let names = ["CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp:"];
    status.lines().filter(|line| names.iter().any(|name| line.starts_with(name))).map(str::to_owned).collect()
}

/// With the capabilities of its unit a server is confined as without a unit, and has nothing to warn of.
#[test]
fn a_server_in_its_unit_is_confined_as_without() {
    if !rustix::process::geteuid().is_root()
        || Command::new("setpriv").arg("--version").stdout(Stdio::null()).status().is_err()
    {
        return ferry_skip::skip!("needs root and setpriv");
    }
    let directory = tempfile::tempdir().unwrap();
    let manager = Manager::new(directory.path());
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("tree")).unwrap();
    fs::write(path("disk"), [0; 4096]).unwrap();
    fs::write(path("share.toml"), "[[share]]\nsource = \"tree\"\nvirtiofs = \"s\"\n").unwrap();
    fs::write(path("disk.toml"), "[[disk]]\nfile = \"disk\"\nvhost-user = \"s\"\npin-memory = true\n").unwrap();
    for (name, config) in [("ferry-share@.service", "share.toml"), ("ferry-disk@.service", "disk.toml")] {
        let kept = values(&unit(name), "CapabilityBoundingSet").join(" ").replace("CAP_", "+").to_lowercase();
        let kept = format!("-all,{}", kept.split_whitespace().collect::<Vec<_>>().join(","));
        let run = |in_unit: bool| {
            let mut command = if in_unit { Command::new("setpriv") } else { ferry() };
            if in_unit {
                command.args(["--bounding-set", &kept, "--no-new-privs", env!("CARGO_BIN_EXE_ferry")]);
            }
            let log = path("log");
            command.arg("share").arg("--config").arg(path(config)).stderr(fs::File::create(&log).unwrap());
            let mut child = manager.start(&mut command);
            let (said, pid) = manager.next(PATIENCE).unwrap();
            assert_eq!(said, "READY=1");
            // The process that is known is the manager; its child waits for the server.
            let confinement = confinement(only_child(u32::try_from(pid).unwrap()));
            signal(&child, Signal::TERM);
            assert!(manager.next(PATIENCE).is_some());
            assert_eq!(wait(&mut child), Some(0));
            let log = fs::read_to_string(log).unwrap();
            assert!(!log.contains("WARN"), "{name}: {log}");
            confinement
        };
        let (without, within) = (run(false), run(true));
        assert!(without.len() == 5 && without == within, "{name}: {without:?}, {within:?}");
    }
}

fn only_child(pid: u32) -> u32 {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().next().unwrap().parse().unwrap()
}

/// What openrc-run does with its script: a shell reads it, and calls its functions.
#[test]
fn the_script_for_openrc_names_the_mounts() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist/openrc/ferry-agent");
    let read = |mounts: &str| {
        let text = ". \"$1\"; eerror() { echo \"error: $*\"; }; need() { :; }; after() { :; }
            depend; start_pre || exit 1; echo $supervisor $command $command_args
            [ $respawn_period -gt $((respawn_max * respawn_delay)) ]";
        let output = run(Command::new("sh").args(["-euc", text, "sh"]).arg(&script).env("mounts", mounts));
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    let expected = "supervise-daemon /usr/bin/ferry-agent --wait /mnt/a /mnt/b\n";
    assert_eq!(read("/mnt/a /mnt/b"), (true, expected.into()));
    assert_eq!(read(""), (false, "error: no mounts=\"...\" in /etc/conf.d/ferry-agent\n".into()));
}
