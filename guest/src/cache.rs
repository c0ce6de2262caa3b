//! The cache of guest kernels and peer programs, and the script that fills it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{Arch, Context, Error, Guest, Input, Kind, Output, Result};

/// The script is part of the program, so that an installed `ferry` can fetch its guest.
const FETCH: &str = include_str!("../fetch");

/// A KVM guest boots in about a second; after this time KVM counts as broken.
const KVM_PROBE_TIMEOUT: Duration = Duration::from_secs(15);

/// A directory with the parts of guests, fetched at first use.
#[derive(Debug, Clone)]
pub struct Cache(PathBuf);

/// The parts of a User-mode Linux guest.
#[derive(Debug, Clone)]
pub struct Uml {
    /// The kernel, which is a program.
    pub kernel: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
    /// A static busybox.
    pub busybox: PathBuf,
}

/// The parts of a QEMU guest.
#[derive(Debug, Clone)]
pub struct Qemu {
    /// The program (a wrapper that finds its libraries and firmware).
    pub program: PathBuf,
    /// The kernel.
    pub kernel: PathBuf,
    /// An initramfs without `/init`.
    pub initramfs: PathBuf,
    /// The directory of the kernel's modules, compressed.
    pub modules: PathBuf,
}

impl Cache {
    /// Creates a cache in this directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// `$FERRY_CACHE`, else `$XDG_CACHE_HOME/ferry`, else `$HOME/.cache/ferry`.
    pub fn from_env() -> Result<Self> {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        var("FERRY_CACHE")
            .or_else(|| Some(var("XDG_CACHE_HOME")?.join("ferry")))
            .or_else(|| Some(var("HOME")?.join(".cache/ferry")))
            .map(Self)
            .ok_or(Error::NoCache)
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the parts of a User-mode Linux guest.
    pub fn uml(&self) -> Result<Uml> {
        let set = self.fetch("uml")?;
        Ok(Uml { kernel: set.join("linux"), modules: set.join("modules"), busybox: set.join("busybox") })
    }

    /// Returns the parts of a QEMU guest of this machine's architecture.
    pub fn qemu(&self) -> Result<Qemu> {
        self.qemu_of(Arch::HOST)
    }

    /// Returns the parts of a QEMU guest.
    pub fn qemu_of(&self, arch: Arch) -> Result<Qemu> {
        let set = match arch {
            _ if arch == Arch::HOST => "qemu",
            Arch::Aarch64 => "qemu-arm64",
            Arch::X86_64 => {
                return Err(Error::Invalid("no x86-64 guest on this machine: use its own architecture".into()));
            }
        };
        let set = self.fetch(set)?;
        Ok(Qemu {
            program: set.join(format!("bin/qemu-system-{}", arch.name())),
            kernel: set.join("vmlinuz"),
            initramfs: set.join("initramfs"),
            modules: set.join("modules"),
        })
    }

    /// Returns a peer program: `virtiofsd` or `fio`.
    pub fn peer(&self, name: &str) -> Result<PathBuf> {
        let program = self.fetch("peers")?.join("bin").join(name);
        if program.is_file() { Ok(program) } else { Err(Error::NoPeer(name.into())) }
    }

    /// Returns the directory of the peers of `bench/run zufs`: libfuse's sources, and mkfs.xfs in `bin`.
    pub fn zufs(&self) -> Result<PathBuf> {
        self.fetch("zufs")
    }

    /// Returns the directory of vhost-user-blk peers: qemu-img, qemu-io and qemu-storage-daemon in `bin`.
    pub fn disk(&self) -> Result<PathBuf> {
        self.fetch("disk")
    }

    /// Returns the program diod, another server of 9P2000.L.
    pub fn diod(&self) -> Result<PathBuf> {
        Ok(self.fetch("diod")?.join("bin/diod"))
    }

    /// Returns the directory of composefs's tools: mkcomposefs, composefs-info and mount.composefs in `bin`.
    pub fn composefs(&self) -> Result<PathBuf> {
        self.fetch("composefs")
    }

    /// Returns the directory of erofs-utils: mkfs.erofs, fsck.erofs and dump.erofs in `bin`.
    pub fn erofs(&self) -> Result<PathBuf> {
        self.fetch("erofs")
    }

    /// Returns the program umoci, which creates and unpacks OCI image directories.
    pub fn umoci(&self) -> Result<PathBuf> {
        Ok(self.fetch("umoci")?.join("bin/umoci"))
    }

    /// Returns the program skopeo, which copies and converts images.
    pub fn skopeo(&self) -> Result<PathBuf> {
        Ok(self.fetch("skopeo")?.join("bin/skopeo"))
    }

    /// Returns a directory with the programs containerd, ctr, and those that run containers.
    pub fn containerd(&self) -> Result<PathBuf> {
        Ok(self.fetch("containerd")?.join("bin"))
    }

    /// Returns the program crun, which runs containers as runc does.
    pub fn crun(&self) -> Result<PathBuf> {
        Ok(self.fetch("crun")?.join("bin/crun"))
    }

    /// Returns a directory with the programs podman, conmon, crun and netavark.
    pub fn podman(&self) -> Result<PathBuf> {
        Ok(self.fetch("podman")?.join("bin"))
    }

    /// Returns the same of Debian 13.
    pub fn podman_stable(&self) -> Result<PathBuf> {
        Ok(self.fetch("podman-stable")?.join("bin"))
    }

    /// Returns the program docker-registry.
    pub fn registry(&self) -> Result<PathBuf> {
        Ok(self.fetch("registry")?.join("bin/docker-registry"))
    }

    /// Returns the directory of other snapshotters for containerd, with their tools in `bin`.
    pub fn snapshotters(&self) -> Result<PathBuf> {
        self.fetch("snapshotters")
    }

    /// Returns the directory of packages that container images are made of: `NAME.list` lists those of an image, in `root`.
    pub fn rootfs(&self) -> Result<PathBuf> {
        self.fetch("rootfs")
    }

    /// Returns a root directory with libvirt and QEMU, for chroot.
    pub fn libvirt(&self) -> Result<PathBuf> {
        Ok(self.fetch("libvirt")?.join("root"))
    }

    /// Runs the script, which returns at once when the set is complete.
    fn fetch(&self, set: &str) -> Result<PathBuf> {
        let status = Command::new("sh")
            .args(["-c", FETCH, "fetch", set])
            .env("FERRY_CACHE", &self.0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .context(|| "start sh to fetch the guest".into())?;
        if !status.success() {
            return Err(Error::Fetch { set: set.into() });
        }
        let directory = self.0.join(set);
        directory.canonicalize().context(|| format!("find {}", directory.display()))
    }

    /// Returns whether a guest boots with KVM here. The result is stored beside the kernel that it applies to.
    pub fn kvm_works(&self) -> Result<bool> {
        if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(false);
        }
        let here = std::fs::read_to_string("/proc/version").unwrap_or_default();
        let here = here.trim_end();
        let note = self.fetch("qemu")?.join("kvm");
        if let Some((answer, place)) =
            std::fs::read_to_string(&note).ok().as_deref().and_then(|text| text.trim_end().split_once(' '))
            && place == here
        {
            return Ok(answer == "yes");
        }
        eprintln!(
            "ferry: trying whether a guest boots with KVM here (once, {} s at most)",
            KVM_PROBE_TIMEOUT.as_secs()
        );
        let works = self.probe_kvm();
        let answer = if works { "yes" } else { "no" };
        // If this fails, the next guest probes again.
        let _ = std::fs::write(&note, format!("{answer} {here}\n"));
        Ok(works)
    }

    fn probe_kvm(&self) -> bool {
        let mut guest = Guest::new(self.clone(), ["true"]);
        guest.kind = Kind::Qemu { cpus: 1, root: None };
        guest.stdin = Input::Null;
        guest.stdout = Output::Null;
        guest.stderr = Output::Null;
        guest.boot_timeout = KVM_PROBE_TIMEOUT;
        let probe = crate::Running::start_with(guest, Some(true));
        matches!(probe.and_then(|running| running.wait()), Ok(0))
    }
}
