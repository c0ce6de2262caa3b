//! The command lines of the two kinds of guest, and the files that they boot from.
//!
//! Descriptors 3, 4 and 5 of the machine are its control line, standard output and standard error; its own
//! 1 and 2 are the log.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::CpuSet;

use crate::script::{self, Machine};
use crate::{Arch, Context, Device, DeviceKind, Error, Guest, Kind, Result};

/// The queue size of virtio-fs devices: a request of 256 pages needs 260 descriptors, and several should fit.
const FS_QUEUE_SIZE: u16 = 1024;

/// The queue size of 9P devices: Linux puts no more than 128 pieces into a request.
const NINEP_QUEUE_SIZE: u16 = 128;

/// Where the tag is in a 9P device's configuration space: behind its length.
const NINEP_TAG_AT: usize = 2;

/// The size of struct virtio_fs_config: a tag of 36 bytes and the number of queues.
const FS_CONFIG_BYTES: usize = 40;

/// The host's parameters of a machine.
pub(crate) struct Setup<'a> {
    /// The machine's own directory.
    pub dir: &'a Path,
    /// The terminal's rows and columns, when the command gets one.
    pub terminal: Option<(u16, u16)>,
    /// Whether QEMU uses KVM.
    pub kvm: bool,
}

/// The program to start, and its arguments.
pub(crate) fn build(guest: &Guest, setup: &Setup<'_>) -> Result<Vec<OsString>> {
    for Device { socket, .. } in &guest.devices {
        if !std::fs::metadata(socket).is_ok_and(|meta| meta.file_type().is_socket()) {
            return Err(Error::Invalid(format!("no socket at {}: start the back end first", socket.display())));
        }
    }
    match guest.kind {
        Kind::Uml => uml(guest, setup),
        Kind::Qemu { cpus, .. } => qemu(guest, setup, cpus),
    }
}

/// Returns the directory for the memory file, which should be in memory.
pub(crate) fn memory_directory(memory_mib: u32) -> &'static str {
    let free =
        |directory: &str| rustix::fs::statvfs(directory).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let needed = u64::from(memory_mib) << 20;
    if free("/dev/shm") > needed { "/dev/shm" } else { "/tmp" }
}

fn uml(guest: &Guest, setup: &Setup<'_>) -> Result<Vec<OsString>> {
    let parts = guest.cache.uml()?;
    let blank = |text: &OsStr| text.as_encoded_bytes().iter().any(u8::is_ascii_whitespace);
    if blank(setup.dir.as_os_str()) || guest.devices.iter().any(|device| blank(device.socket.as_os_str())) {
        return Err(Error::Invalid(
            "User-mode Linux takes no path with blanks: choose another TMPDIR or socket".into(),
        ));
    }
    // The cache's path may contain blanks, but an interpreter's path must not.
    let busybox = setup.dir.join("busybox");
    symlink(&parts.busybox, &busybox).context(|| format!("create {}", busybox.display()))?;

    let kernel = parts.modules.canonicalize().context(|| format!("find {}", parts.modules.display()))?;
    let mut modules = vec!["overlayfs/overlay.ko", "fuse/fuse.ko", "fuse/virtiofs.ko"];
    if guest.devices.iter().any(|device| device.kind == DeviceKind::Block) {
        modules.push("../drivers/block/virtio_blk.ko");
    }
    // Loaded through a link, for the same reason.
    symlink(kernel.join("kernel/fs"), setup.dir.join("fs")).context(|| "link the kernel's modules".into())?;
    let modules = modules.iter().map(|module| format!("{}/fs/{module}", setup.dir.display())).collect::<Vec<_>>();

    let init = setup.dir.join("init");
    let text = script::init(
        guest,
        &Machine {
            busybox: busybox.as_os_str(),
            lines: ["/dev/tty1", "/dev/tty2", "/dev/tty3"],
            modules: modules.join(" "),
            module_directory: kernel.as_os_str(),
            terminal: setup.terminal,
            stdin_null: stdin_null(guest),
        },
    );
    write(&init, &text)?;
    std::fs::set_permissions(&init, std::fs::Permissions::from_mode(0o755))
        .context(|| format!("make {} executable", init.display()))?;

    let mut args: Vec<OsString> = vec!["taskset".into(), "-c".into()];
    args.push(guest.host_cpu.unwrap_or_else(next_cpu).to_string().into());
    args.push(parts.kernel.into());
    args.extend(
        [
            "root=/dev/root rootfstype=hostfs rootflags=/ ro panic=-1 noreboot umid=guest seccomp=auto",
            "loglevel=5 initcall_blacklist=raid6_init,raid6_select_algo",
            "con=null ssl=null con0=null,fd:1 con1=fd:3 con2=fd:4 con3=fd:5",
        ]
        .iter()
        .flat_map(|words| words.split(' '))
        .map(OsString::from),
    );
    args.push(format!("mem={}M", guest.memory_mib).into());
    args.push(join("uml_dir=", setup.dir));
    args.push(join("init=", &init));
    for (number, device) in guest.devices.iter().enumerate() {
        let id = match device.kind {
            DeviceKind::Fs { .. } => 26,
            DeviceKind::Block => 2,
            DeviceKind::NineP { .. } => {
                return Err(Error::Invalid("Debian's User-mode Linux has no 9P over virtio: use QEMU".into()));
            }
        };
        let mut arg = join("virtio_uml.device=", &device.socket);
        arg.push(format!(":{id}:{number}"));
        args.push(arg);
    }
    args.extend(guest.kernel_args.iter().map(OsString::from));
    Ok(args)
}

/// Returns the next CPU of this process; programs that start guests begin at different ones.
fn next_cpu() -> usize {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return 0 };
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let turn = TURN.fetch_add(1, Ordering::Relaxed) + std::process::id() as usize;
    allowed.get(turn % allowed.len().max(1)).copied().unwrap_or(0)
}

fn qemu(guest: &Guest, setup: &Setup<'_>, cpus: u16) -> Result<Vec<OsString>> {
    let parts = guest.cache.qemu_of(guest.arch)?;
    let modules = parts.modules.canonicalize().context(|| format!("find {}", parts.modules.display()))?;
    let text = script::init(
        guest,
        &Machine {
            busybox: OsStr::new("/bin/busybox"),
            lines: ["", if setup.terminal.is_some() { "/dev/hvc0" } else { "" }, ""],
            modules: "$(for module in $(/bin/busybox cat /modules/order); do echo /modules/$module; done)".into(),
            module_directory: modules.as_os_str(),
            terminal: setup.terminal,
            stdin_null: stdin_null(guest),
        },
    );
    // The kernel unpacks archives that follow each other.
    let mut initramfs = std::fs::read(&parts.initramfs).context(|| format!("read {}", parts.initramfs.display()))?;
    initramfs.extend(crate::cpio::archive("init", 0o755, &text));
    let initrd = setup.dir.join("initramfs");
    write(&initrd, &initramfs)?;

    let memory = guest.memory_mib;
    let mut args = Args(vec![parts.program.into()]);
    args.add("-nodefaults -no-user-config -no-reboot -display none");
    args.add(match guest.arch {
        Arch::X86_64 => "-machine q35,memory-backend=memory",
        Arch::Aarch64 => "-machine virt,memory-backend=memory",
    });
    args.add(&format!("-m {memory} -object memory-backend-memfd,id=memory,share=on,size={memory}M -smp {cpus}"));
    args.add(match (setup.kvm, guest.arch) {
        (true, _) => "-accel kvm -cpu host",
        (false, Arch::X86_64) => "-accel tcg,thread=multi -cpu max",
        // The architected algorithm of pointer authentication takes most of the time of emulation.
        (false, Arch::Aarch64) => "-accel tcg,thread=multi -cpu max,pauth-impdef=on",
    });
    args.add("-chardev file,id=log,path=/dev/stdout,append=on -serial chardev:log");
    args.add("-device virtio-serial-pci,max_ports=8");
    args.add("-chardev socket,id=control,fd=3 -device virtserialport,chardev=control,name=control");
    args.add("-chardev socket,id=stdout,fd=4 -chardev socket,id=stderr,fd=5");
    if setup.terminal.is_some() {
        args.add("-device virtconsole,chardev=stdout,name=terminal");
    } else {
        args.add("-device virtserialport,chardev=stdout,name=stdout");
        args.add("-device virtserialport,chardev=stderr,name=stderr");
    }
    for (number, device) in guest.devices.iter().enumerate() {
        add_device(&mut args, number, device);
    }
    let mut kernel_args = match guest.arch {
        // On a busy host without KVM, the guest's timer is too slow for the kernel's test, which would panic.
        Arch::X86_64 => "console=ttyS0 loglevel=4 panic=-1 no_timer_check",
        Arch::Aarch64 => "console=ttyAMA0 loglevel=4 panic=-1",
    }
    .to_owned();
    for word in &guest.kernel_args {
        kernel_args.push(' ');
        kernel_args.push_str(word);
    }
    args.0.extend(["-kernel".into(), parts.kernel.into(), "-initrd".into(), initrd.into()]);
    args.0.extend(["-append".into(), kernel_args.into()]);
    args.0.extend(guest.qemu_args.iter().cloned());
    Ok(args.0)
}

fn add_device(args: &mut Args, number: usize, device: &Device) {
    args.0.push("-chardev".into());
    // A comma within a value is written twice.
    let mut chardev = OsString::from(format!("socket,id=device{number},path="));
    chardev.push(device.socket.to_string_lossy().replace(',', ",,"));
    args.0.push(chardev);
    args.add(&match &device.kind {
        DeviceKind::Block => format!("-device vhost-user-blk-pci,chardev=device{number}"),
        DeviceKind::NineP { tag } => format!(
            "-device vhost-user-test-device-pci,chardev=device{number},virtio-id=9,num_vqs=1,vq_size={NINEP_QUEUE_SIZE},config_size={}",
            NINEP_TAG_AT + tag.len()
        ),
        DeviceKind::Fs { queues, dax: true, .. } => format!(
            "-device vhost-user-test-device-pci,chardev=device{number},virtio-id=26,num_vqs={},vq_size={FS_QUEUE_SIZE},config_size={FS_CONFIG_BYTES}",
            queues + 1
        ),
        DeviceKind::Fs { tag, queues, dax: false } => format!(
            "-device vhost-user-fs-pci,chardev=device{number},tag={tag},num-request-queues={queues},queue-size={FS_QUEUE_SIZE}"
        ),
    });
}

/// Arguments without blanks within them.
struct Args(Vec<OsString>);

impl Args {
    fn add(&mut self, words: &str) {
        self.0.extend(words.split(' ').map(OsString::from));
    }
}

fn stdin_null(guest: &Guest) -> bool {
    matches!(guest.stdin, crate::Input::Null)
}

fn join(prefix: &str, path: &Path) -> OsString {
    let mut joined = OsString::from(prefix);
    joined.push(path);
    joined
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).context(|| format!("write {}", path.display()))
}
