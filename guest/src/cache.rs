//! The cache of guest kernels and peer programs, and the script that fills it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::{Context, Error, Guest, Input, Kind, Output, Result};

/// The script is part of the program, so that an installed `ferry` can fetch its guest.
const FETCH: &str = include_str!("../fetch");

/// A KVM guest that has not come up by then never will: it takes about a second.
const KVM_PROBE_TIMEOUT: Duration = Duration::from_secs(15);

/// A folder with the parts of guests, fetched on first use.
#[derive(Debug, Clone)]
pub struct Cache(PathBuf);

/// The parts of a User-mode Linux guest.
#[derive(Debug, Clone)]
pub struct Uml {
    /// The kernel, which is a program.
    pub kernel: PathBuf,
    /// The folder of its modules.
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
    /// The folder of the kernel's modules, compressed.
    pub modules: PathBuf,
}

impl Cache {
    /// The cache in a folder of the caller's choice.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
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

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The parts of a User-mode Linux guest.
    pub fn uml(&self) -> Result<Uml> {
        let set = self.fetch("uml")?;
        Ok(Uml { kernel: set.join("linux"), modules: set.join("modules"), busybox: set.join("busybox") })
    }

    /// The parts of a QEMU guest.
    pub fn qemu(&self) -> Result<Qemu> {
        let set = self.fetch("qemu")?;
        Ok(Qemu {
            program: set.join("bin/qemu-system-x86_64"),
            kernel: set.join("vmlinuz"),
            initramfs: set.join("initramfs"),
            modules: set.join("modules"),
        })
    }

    /// A program to compare with: `virtiofsd` or `fio`.
    pub fn peer(&self, name: &str) -> Result<PathBuf> {
        let program = self.fetch("peers")?.join("bin").join(name);
        if program.is_file() { Ok(program) } else { Err(Error::NoPeer(name.into())) }
    }

    /// The folder of what `bench/run zufs` compares with: libfuse's sources, and mkfs.xfs in `bin`.
    pub fn zufs(&self) -> Result<PathBuf> {
        self.fetch("zufs")
    }

    /// The folder of other people's ends of vhost-user-blk: qemu-img, qemu-io and qemu-storage-daemon in `bin`.
    pub fn disk(&self) -> Result<PathBuf> {
        self.fetch("disk")
    }

    /// The program diod, another server of 9P2000.L.
    pub fn diod(&self) -> Result<PathBuf> {
        Ok(self.fetch("diod")?.join("bin/diod"))
    }

    /// The folder of composefs's tools: mkcomposefs, composefs-info and mount.composefs in `bin`.
    pub fn composefs(&self) -> Result<PathBuf> {
        self.fetch("composefs")
    }

    /// The folder of erofs-utils: mkfs.erofs, fsck.erofs and dump.erofs in `bin`.
    pub fn erofs(&self) -> Result<PathBuf> {
        self.fetch("erofs")
    }

    /// The program umoci, which makes and unpacks OCI image directories.
    pub fn umoci(&self) -> Result<PathBuf> {
        Ok(self.fetch("umoci")?.join("bin/umoci"))
    }

    /// The program skopeo, which copies images and packs them otherwise.
    pub fn skopeo(&self) -> Result<PathBuf> {
        Ok(self.fetch("skopeo")?.join("bin/skopeo"))
    }

    /// A root to change into, with libvirt and QEMU.
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
        let folder = self.0.join(set);
        folder.canonicalize().context(|| format!("find {}", folder.display()))
    }

    /// Whether a guest boots with KVM here. The answer is kept beside the kernel it holds for.
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
        // Without the note the next guest probes again; that is all.
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
