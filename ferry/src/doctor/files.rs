//! Checks of the kernel's mounts and watches.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::Path;

use ferry_fuse::Verdict;
use ferry_image::{Verity, verity_of};

use super::check::{Check, Export, can_mount, device_remedy, remedy_to_mount};
use crate::image::kernel;
use crate::mount;

const FUSE_DEVICE: &str = "/dev/fuse";

pub fn checks() -> Vec<Check> {
    let mut checks = fuse();
    checks.extend([watch(), erofs(), overlayfs(), verity(), lazy_images(), ninep_client(), vsock()]);
    checks
}

/// Returns the default remedy.
fn for_root_or(otherwise: &'static str) -> &'static str {
    if can_mount() { otherwise } else { remedy_to_mount() }
}

/// The checks of mounts on this host: a mount of `mem` that is made and removed at once, as by `ferry mount --explain`.
fn fuse() -> Vec<Check> {
    let device = Check::new("fuse device", &[Export::Mount], &[Export::Image, Export::Containers]);
    let mount = Check::new("fuse mount", &[Export::Mount], &[Export::Image, Export::Containers]);
    let consequence = "ferry mount, and image mounts that the kernel does not make, fail";
    if let Err(error) = File::options().read(true).write(true).open(FUSE_DEVICE) {
        let otherwise = match error.kind() {
            ErrorKind::PermissionDenied => "chmod 666 /dev/fuse",
            ErrorKind::NotFound if has_file_system("fuse") => {
                "mknod -m 666 /dev/fuse c 10 229    # in a container: its option --device /dev/fuse"
            }
            _ => "modprobe fuse",
        };
        let remedy = device_remedy(&error, FUSE_DEVICE).unwrap_or_else(|| otherwise.into());
        let device = device.lacks(format!("{FUSE_DEVICE}: {error}"), consequence, remedy.as_str());
        let mount = mount.lacks(format!("not tried without {FUSE_DEVICE}"), consequence, remedy);
        return vec![device, mount, ring(&ferry_fuse::uring_verdict())];
    }
    let device = device.found(FUSE_DEVICE);
    match mount::explain_mem() {
        Ok(report) => {
            let mount = mount.found("mem was mounted and unmounted");
            vec![
                device,
                mount,
                ring(&verdict(&report.json["uring"])),
                passthrough(&verdict(&report.json["passthrough"])),
            ]
        }
        Err(error) => {
            let remedy = match rustix::process::geteuid().is_root() {
                true => remedy_to_mount(),
                false => "apt-get install fuse3    # or the package of this distribution that has fusermount3",
            };
            let mount = mount.lacks(format!("{error:#}"), consequence, remedy);
            vec![device, mount, ring(&ferry_fuse::uring_verdict())]
        }
    }
}

/// A verdict in a mount's report of its request paths.
fn verdict(json: &serde_json::Value) -> Verdict {
    let text = |field: &str| json[field].as_str().map(str::to_owned);
    Verdict { used: json["used"].as_bool().unwrap_or(false), reason: text("reason"), remedy: text("remedy") }
}

fn ring(verdict: &Verdict) -> Check {
    let check = Check::new("fuse ring", &[], &[Export::Mount]);
    match verdict {
        Verdict { used: true, .. } => check.found("requests can go through io_uring"),
        Verdict { reason, remedy, .. } => check.lacks(
            reason.as_deref().unwrap_or("not used"),
            "requests go through /dev/fuse, with more system calls and wake-ups",
            remedy.as_deref().unwrap_or("# boot Linux 6.14 or later, built with CONFIG_FUSE_IO_URING=y"),
        ),
    }
}

fn passthrough(verdict: &Verdict) -> Check {
    let check = Check::new("passthrough", &[], &[Export::Mount]);
    match verdict {
        Verdict { used: true, .. } => check.found("the kernel can read and write files of the source itself"),
        Verdict { reason, remedy, .. } => check.lacks(
            reason.as_deref().unwrap_or("not used"),
            "data of files pass through the server",
            remedy
                .as_deref()
                .unwrap_or_else(|| for_root_or("# boot Linux 6.9 or later, built with CONFIG_FUSE_PASSTHROUGH=y")),
        ),
    }
}

fn watch() -> Check {
    let check = Check::new("fanotify", &[], &[Export::Mount]);
    let outcome = File::open("/")
        .map_err(|error| error.to_string())
        .and_then(|root| ferry_dir::can_watch(root.as_fd()).map_err(|error| error.to_string()));
    match outcome {
        Ok(()) => check.found("changes by other programs can be watched"),
        Err(error) => check.lacks(
            error,
            "a mount is notified of changes in the directories that it knows (inotify), also of its own",
            for_root_or("# boot Linux 5.17 or later, built with CONFIG_FANOTIFY=y"),
        ),
    }
}

fn erofs() -> Check {
    let check = Check::new("erofs", &[], &[Export::Image, Export::Containers]);
    match kernel::erofs() {
        Ok(true) => check.found("the kernel mounts images from files"),
        Ok(false) => check.has_less(
            "no mounts from the files that were tried (files of overlayfs and tmpfs cannot be mounted)",
            "images are mounted from loop devices, and layers of containers stay directories",
            "# boot Linux 6.12 or later, built with CONFIG_EROFS_FS_BACKED_BY_FILE=y; keep images on ext4, XFS or btrfs",
        ),
        Err(error) => {
            let remedy = match kernel::has("erofs") {
                Ok(()) => "# run ferry as root of the host, on Linux 5.16 or later",
                Err(_) => for_root_or("modprobe erofs"),
            };
            check.lacks(
                format!("{error:#}"),
                "ferry image mount uses Ferry's own mount, and layers of containers stay directories",
                remedy,
            )
        }
    }
}

fn overlayfs() -> Check {
    let check = Check::new("overlayfs", &[Export::Containers], &[Export::Image]);
    match kernel::has("overlay") {
        Ok(()) => check.found("the kernel has it"),
        // The check needs the right to mount.
        Err(error) if !can_mount() => {
            check.has_less(format!("{error:#}"), "no --upper, and no snapshots of containers", remedy_to_mount())
        }
        Err(error) => check.lacks(
            format!("{error:#}"),
            "no --upper, no snapshots of containers, and composefs images are mounted by Ferry's own mount",
            "modprobe overlay",
        ),
    }
}

fn verity() -> Check {
    /// The file systems that show whether the kernel has fs-verity.
    const FEATURES: [&str; 2] = ["/sys/fs/ext4/features/verity", "/sys/fs/f2fs/features/verity"];
    let check = Check::new("fs-verity", &[], &[Export::Image]);
    let consequence = "a kernel mount of an image reads files without checking them; --verity require is refused";
    let is_here = File::open("/proc/self/exe").is_ok_and(|file| verity_of(&file) != Verity::Unavailable);
    match FEATURES.iter().find(|file| Path::new(file).exists()) {
        _ if is_here => check.found("on the file system of ferry"),
        Some(file) => check.has_less(
            format!("in this kernel ({file}), and not on the file system of ferry"),
            consequence,
            "# tune2fs -O verity DEVICE of the store",
        ),
        None => check.lacks(
            "none seen in this kernel",
            consequence,
            "# boot a kernel with CONFIG_FS_VERITY=y, or use ferry mount image:PATH, which checks each byte",
        ),
    }
}

fn lazy_images() -> Check {
    let check = Check::new("fanotify for images", &[], &[Export::Image]);
    match kernel::waits() {
        Ok(()) => check.found("the kernel waits for bytes that are not here yet"),
        Err(error) => check.lacks(
            format!("{error:#}"),
            "ferry image mount --from uses Ferry's own mount",
            for_root_or("# boot Linux 6.14 or later"),
        ),
    }
}

fn ninep_client() -> Check {
    let check = Check::new("9p client", &[], &[Export::Ninep]);
    // As root, the check loads the module, as a mount would.
    match has_file_system("9p") || kernel::has("9p").is_ok() {
        true => check.found("the kernel has it"),
        false => check.lacks(
            "not in this kernel, or not loaded",
            "mount -t 9p fails on this host; ferry mount 9p:ADDRESS works without it, and guests have their own",
            "modprobe 9p",
        ),
    }
}

fn vsock() -> Check {
    let check = Check::new("vsock", &[], &[Export::Ninep]);
    let address = nix::sys::socket::socket(
        nix::sys::socket::AddressFamily::Vsock,
        nix::sys::socket::SockType::Stream,
        nix::sys::socket::SockFlag::SOCK_CLOEXEC,
        None,
    );
    let device = Path::new("/dev/vhost-vsock");
    match address {
        Ok(_) if device.exists() => check.found("sockets, and a device for guests"),
        Ok(_) => check.has_less(
            format!("sockets, but no {}", device.display()),
            "guests of this host cannot reach --9p vsock:",
            "modprobe vhost_vsock",
        ),
        Err(error) => check.lacks(error.to_string(), "no --9p vsock:", "modprobe vsock"),
    }
}

/// Whether the kernel has a file system now, without loading a module.
fn has_file_system(kind: &str) -> bool {
    fs::read_to_string("/proc/filesystems").is_ok_and(|table| lists(&table, kind))
}

/// Whether the table of file systems (proc(5)) lists one.
fn lists(table: &str, kind: &str) -> bool {
    table.lines().any(|line| line.rsplit('\t').next() == Some(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_found_by_their_whole_names() {
        let table = "nodev\tsysfs\n\text4\nnodev\tfusectl\n\tfuseblk\n";
        for (kind, is_there) in [("sysfs", true), ("ext4", true), ("fuse", false), ("nodev", false), ("", false)] {
            assert_eq!(lists(table, kind), is_there, "{kind:?}");
        }
        for bad in ["", "\n\n\t\t", "fuse fuse", "\0fuse"] {
            assert!(!lists(bad, "fuse"), "{bad:?}");
        }
    }

    #[test]
    fn a_verdict_without_fields_means_unused() {
        for bad in ["null", "{}", "[]", r#"{"used": "yes", "reason": 7}"#] {
            let json = serde_json::from_str(bad).expect("it is JSON");
            assert_eq!(verdict(&json), Verdict { used: false, reason: None, remedy: None }, "{bad}");
        }
        let json = serde_json::json!({"used": false, "reason": "a", "remedy": "b"});
        assert_eq!(verdict(&json), Verdict { used: false, reason: Some("a".into()), remedy: Some("b".into()) });
    }
}
