//! Checks of KVM, and of the virtual machine monitors and container engines that are installed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::check::{Check, Export, device_remedy};
use super::version::{Version, first_version};

/// Directories besides PATH in which distributions have such programs.
const DIRECTORIES: [&str; 4] = ["/usr/sbin", "/usr/libexec", "/usr/lib/qemu", "/opt/kata/bin"];
/// How long a program may take to print its version.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most that is read of what it prints; QEMU's list of devices has 30 KiB.
const OUTPUT_BYTES_MAX: usize = 256 << 10;
/// The most of a version that is shown.
const SHOWN_CHARS_MAX: usize = 100;

/// A virtual machine monitor, or a container engine.
struct Vmm {
    name: &'static str,
    /// The names of its program; the first one that is found counts.
    programs: &'static [&'static str],
    /// Makes it print its version.
    version: &'static [&'static str],
    /// What versions before these lack.
    steps: &'static [Step],
    /// The first version that does not work with Ferry, and what is wrong with it.
    broken_from: Option<(Version, &'static str)>,
}

/// What came with a version.
struct Step {
    from: Version,
    /// What earlier versions lack.
    lacks: &'static str,
    /// Earlier versions than this are not concerned.
    since: Version,
}

const FIRST: Version = Version(0, 0);

#[cfg(target_arch = "aarch64")]
const QEMU: [&str; 2] = ["qemu-system-aarch64", "qemu-kvm"];
#[cfg(not(target_arch = "aarch64"))]
const QEMU: [&str; 2] = ["qemu-system-x86_64", "qemu-kvm"];
/// Debian's package of it.
const QEMU_PACKAGE: &str = if cfg!(target_arch = "aarch64") { "qemu-system-arm" } else { "qemu-system-x86" };

const VMMS: [Vmm; 4] = [
    Vmm {
        name: "QEMU",
        programs: &QEMU,
        version: &["--version"],
        steps: &[
            Step { from: Version(5, 0), lacks: "virtio-fs", since: FIRST },
            Step { from: Version(8, 1), lacks: "devices that tell their tag (leave out --tag)", since: Version(7, 1) },
            Step { from: Version(9, 2), lacks: "reconnect-ms (write reconnect=1)", since: FIRST },
            Step { from: Version(11, 1), lacks: "a DAX window and 9P over vhost-user", since: FIRST },
        ],
        broken_from: None,
    },
    Vmm {
        name: "libvirt",
        programs: &["virtqemud", "libvirtd", "virsh"],
        version: &["--version"],
        steps: &[
            Step { from: Version(6, 9), lacks: "<source socket=...> of file systems", since: FIRST },
            Step { from: Version(7, 1), lacks: "disks of type vhostuser", since: FIRST },
        ],
        broken_from: None,
    },
    Vmm {
        name: "cloud-hypervisor",
        programs: &["cloud-hypervisor"],
        version: &["--version"],
        steps: &[Step { from: Version(52, 0), lacks: "migration of a guest with a share", since: FIRST }],
        broken_from: None,
    },
    Vmm { name: "crosvm", programs: &["crosvm"], version: &["version"], steps: &[], broken_from: None },
];

const ENGINES: [Vmm; 2] = [
    Vmm {
        name: "containerd",
        programs: &["containerd"],
        version: &["--version"],
        steps: &[Step { from: Version(2, 0), lacks: "plugins that docs/guide/containers.md configures", since: FIRST }],
        broken_from: None,
    },
    Vmm {
        name: "podman",
        programs: &["podman"],
        version: &["--version"],
        steps: &[Step { from: Version(3, 2), lacks: "additional layer stores", since: FIRST }],
        broken_from: Some((
            Version(5, 5),
            "it loses images that it pulls with ferry mount layers:, and not complete images (docs/guide/podman.md)",
        )),
    },
];

pub fn checks() -> Vec<Check> {
    let directories = directories();
    let mut checks = vec![kvm()];
    for engine in &ENGINES {
        let Some(program) = find(engine.programs, &directories) else { continue };
        checks.push(judge(engine, &program, output(&program, engine.version).as_deref(), &[Export::Containers]));
    }
    let found: Vec<_> = VMMS.iter().filter_map(|vmm| Some((vmm, find(vmm.programs, &directories)?))).collect();
    let any = Check::new("vmm", &[Export::Virtiofs, Export::Disk], &[]);
    checks.push(match found.as_slice() {
        [] => any.lacks(
            "none in PATH",
            "no virtual machine can be started from here; ferry try brings a guest of its own",
            format!("apt-get install {QEMU_PACKAGE}    # or another one of QEMU, cloud-hypervisor, crosvm"),
        ),
        found => any.found(found.iter().map(|(vmm, _)| vmm.name).collect::<Vec<_>>().join(", ")),
    });
    for (vmm, program) in found {
        let helps = &[Export::Virtiofs, Export::Disk, Export::Ninep];
        checks.push(judge(vmm, &program, output(&program, vmm.version).as_deref(), helps));
        if vmm.name == "QEMU" {
            checks.push(devices(output(&program, &["-device", "help"]).as_deref()));
        }
    }
    checks
}

fn kvm() -> Check {
    let check = Check::new("kvm", &[], &[Export::Virtiofs, Export::Disk]);
    let slow = "virtual machines run on an emulator, many times slower";
    let has_module = |name: &str| Path::new("/sys/module").join(name).exists();
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) if has_module("kvm_pvm") && !has_module("kvm_intel") && !has_module("kvm_amd") => check.has_less(
            "/dev/kvm of kvm_pvm, without hardware support",
            "only kernels that are built as PVM guests boot with it",
            "# enable nested virtualization on the host of this machine",
        ),
        Ok(_) => check.found("/dev/kvm"),
        Err(error) => {
            let otherwise = match error.kind() {
                ErrorKind::PermissionDenied => "usermod -aG kvm $USER    # and log in again",
                _ => "modprobe -a kvm_intel kvm_amd    # on x86-64, with virtualization enabled in the firmware",
            };
            let remedy = device_remedy(&error, "/dev/kvm").unwrap_or_else(|| otherwise.into());
            check.lacks(format!("/dev/kvm: {error}"), slow, remedy)
        }
    }
}

/// What the version of a program means.
fn judge(vmm: &Vmm, program: &Path, output: Option<&str>, helps: &'static [Export]) -> Check {
    let check = Check::new(vmm.name, &[], helps);
    let program = program.display();
    let Some((output, version)) = output.and_then(|output| Some((output, first_version(output)?))) else {
        return check.has_less(
            format!("{program} prints no version"),
            "it is not known whether it is new enough",
            format!("{program} {}", vmm.version.join(" ")),
        );
    };
    let line: String = output.lines().next().unwrap_or_default().chars().take(SHOWN_CHARS_MAX).collect();
    let found = format!("{line} ({program})");
    if let Some((from, consequence)) = vmm.broken_from.filter(|(from, _)| version >= *from) {
        return check.has_less(found, consequence, format!("# install {} before {from}", vmm.name));
    }
    let lacks: Vec<_> = vmm.steps.iter().filter(|step| version < step.from && version >= step.since).collect();
    match lacks.last() {
        None => check.found(found),
        Some(newest) => {
            let words: Vec<_> = lacks.iter().map(|step| step.lacks).collect();
            check.has_less(
                found,
                format!("it lacks {}", words.join(", ")),
                format!("# install {} {} or later", vmm.name, newest.from),
            )
        }
    }
}

/// Whether QEMU's list of devices has those that use a vhost-user server.
fn devices(list: Option<&str>) -> Check {
    const DEVICES: [&str; 2] = ["vhost-user-fs-pci", "vhost-user-blk-pci"];
    let check = Check::new("vhost-user", &[], &[Export::Virtiofs, Export::Disk]);
    let list = list.unwrap_or_default();
    let lacks: Vec<_> = DEVICES.into_iter().filter(|name| !list.contains(&format!("\"{name}\""))).collect();
    match lacks.is_empty() {
        true => check.found(format!("QEMU has {}", DEVICES.join(", "))),
        false => check.lacks(
            format!("this QEMU has no {}", lacks.join(", ")),
            "it cannot use a share or a disk of Ferry",
            "# install a QEMU that is built with vhost-user",
        ),
    }
}

/// The directories to look in, in their order.
fn directories() -> Vec<PathBuf> {
    let path: OsString = std::env::var_os("PATH").unwrap_or_default();
    // An empty word is the working directory, from which nothing is run.
    let own = std::env::split_paths(&path).filter(|directory| directory.is_absolute()).collect::<Vec<_>>();
    own.into_iter().chain(DIRECTORIES.map(PathBuf::from)).collect()
}

fn find(names: &[&str], directories: &[PathBuf]) -> Option<PathBuf> {
    let is_program =
        |path: &PathBuf| path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    names.iter().find_map(|name| directories.iter().map(|directory| directory.join(name)).find(is_program))
}

/// What a program prints, up to a bound in bytes and time; `None` if it does not run, or does not end in time.
fn output(program: &Path, args: &[&str]) -> Option<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let text = child.stdout.take().and_then(|mut stdout| read(&mut stdout));
    // One that goes on printing, or closed its output and stays, is ended.
    let _ = child.kill();
    let _ = child.wait();
    Some(String::from_utf8_lossy(&text?).into_owned())
}

fn read(stdout: &mut std::process::ChildStdout) -> Option<Vec<u8>> {
    let end = Instant::now() + PATIENCE;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    while text.len() < OUTPUT_BYTES_MAX {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now())).ok()?;
        match poll(&mut [PollFd::new(&*stdout, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(1..) => {}
            Ok(0) | Err(_) => return None,
        }
        match stdout.read(&mut part).ok()? {
            0 => break,
            count => text.extend_from_slice(&part[..count]),
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::check::State;

    #[test]
    fn old_versions_report_missing_features() {
        let [qemu, libvirt, hypervisor, crosvm] = &VMMS;
        let [containerd, podman] = &ENGINES;
        for (vmm, output, lacks) in [
            (qemu, "QEMU emulator version 11.1.3", &[][..]),
            (qemu, "QEMU emulator version 10.0.2", &["DAX"]),
            (qemu, "QEMU emulator version 8.0.0", &["DAX", "--tag", "reconnect-ms"]),
            (qemu, "QEMU emulator version 7.0.0", &["DAX", "reconnect-ms"]),
            (qemu, "QEMU emulator version 4.2.0", &["DAX", "reconnect-ms", "virtio-fs"]),
            (libvirt, "/usr/sbin/libvirtd (libvirt) 9.0.0", &[]),
            (libvirt, "6.0.0", &["<source socket", "vhostuser"]),
            (hypervisor, "cloud-hypervisor v51.1", &["migration"]),
            (hypervisor, "cloud-hypervisor v52.0", &[]),
            (crosvm, "crosvm 0.1.0-0123abc", &[]),
            (containerd, "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1", &["plugins"]),
            (containerd, "containerd github.com/containerd/containerd/v2 v2.1.4 75cb2b71", &[]),
            (podman, "podman version 3.1.0", &["additional layer stores"]),
            (podman, "podman version 5.4.2", &[]),
            (podman, "podman version 5.5.0", &["loses images"]),
            (podman, "podman version 6.0.0-dev", &["loses images"]),
        ] {
            let check = judge(vmm, Path::new("/bin/it"), Some(output), &[]);
            let said = check.lack.as_ref().map(|lack| lack.consequence.clone()).unwrap_or_default();
            assert_eq!(check.lack.is_none(), lacks.is_empty(), "{output}: {said}");
            assert!(lacks.iter().all(|word| said.contains(word)), "{output}: {said}");
            assert_eq!(said.contains("--tag"), lacks.contains(&"--tag"), "{output}: {said}");
        }
        for bad in [None, Some(""), Some("no version"), Some("\x1b]0;1.x\x07")] {
            let check = judge(qemu, Path::new("/bin/it"), bad, &[]);
            assert!(check.found.contains("prints no version"), "{bad:?}: {check:?}");
            assert_eq!(check.state(&Export::ALL), State::Degraded, "{bad:?}");
        }
        let long = format!("QEMU 11.1 {}", "x".repeat(10_000));
        assert!(judge(qemu, Path::new("/bin/it"), Some(&long), &[]).found.len() < 200);
    }

    #[test]
    fn a_list_of_devices_without_vhost_user_is_reported() {
        let list = "name \"vhost-user-fs-pci\", bus PCI\nname \"vhost-user-blk-pci\", bus PCI\n";
        assert!(devices(Some(list)).lack.is_none());
        for bad in [None, Some(""), Some("vhost-user-fs-pci"), Some("name \"vhost-user-fs-pci\"")] {
            let check = devices(bad);
            assert!(check.found.contains("vhost-user-blk-pci"), "{bad:?}: {}", check.found);
        }
    }

    #[test]
    fn programs_that_print_too_much_or_never_end_are_ended() {
        let begin = Instant::now();
        let text = output(Path::new("/bin/sh"), &["-c", "exec yes 11.1"]).expect("it printed");
        assert!(text.len() >= OUTPUT_BYTES_MAX && text.len() < OUTPUT_BYTES_MAX + 4096, "{}", text.len());
        assert_eq!(output(Path::new("/no/such/program"), &[]), None);
        assert_eq!(output(Path::new("/bin/sh"), &["-c", "exec 1>&-; exec sleep 100"]).as_deref(), Some(""));
        assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    }
}
