//! A QEMU guest with persistent memory: XFS with DAX beside ours.
//!
//! The guest's NVDIMMs are memory of QEMU's. Its root is the host's, so fio, mkfs.xfs and ferry are at hand.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ferry_guest::{Cache, Device, Guest, Kind};

use super::commands::Programs;
use super::fio::{self, Found, Job};
use super::systems::{Files, System, Way};
use crate::agent::Agent;
use crate::cli::shell_word;
use crate::rows::Config;
use crate::server::{self, Peer, Server, Sharing};

/// The size of each file in the guest, where everything is slow.
pub const FILE_MIB: u64 = 8;
/// Threads of the guest's widest row: so many files there are.
const FILES: usize = 4;
const GUEST_MIB: u32 = 2048;
/// Room for the files and XFS, whose least size is 300 MiB.
const NVDIMM_MIB: u32 = 512;
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is looked whether a file system of ours is mounted in the guest, each fifth of a second or slower.
const MOUNT_LOOKS: u32 = 75;

/// The guest. It goes before the server of its root.
#[derive(Debug)]
pub struct NvdimmGuest {
    agent: Agent,
    root: Server,
    programs: Programs,
    fio: PathBuf,
    mkfs: PathBuf,
    mounted: Vec<System>,
    /// Its kernel.
    pub kernel: String,
}

impl NvdimmGuest {
    /// Boots it.
    pub fn boot(cache: &Cache, programs: &Programs, fio: &Path, mkfs: &Path, directory: &Path) -> Result<Self> {
        let sharing = Sharing {
            dir: Path::new("/"),
            socket: directory.join("root"),
            config: Config::Auto,
            queues: None,
            // No process is bound to a CPU in this table.
            cpus: &format!("0-{}", std::thread::available_parallelism().map_or(0, |cpus| cpus.get() - 1)),
            logs: false,
        };
        let servers = server::Programs { ferry: programs.ferry.clone(), virtiofsd: None };
        let root = Server::start(Peer::Ferry, &servers, &sharing).context("the guest's root has no server")?;
        let mut guest = Guest::new(cache.clone(), [""; 0]);
        guest.kind = Kind::Qemu { cpus: 2, root: Some(server::TAG.into()) };
        guest.memory_mib = GUEST_MIB;
        guest.devices = vec![Device::fs(root.socket(), server::TAG)];
        guest.qemu_args = nvdimms(2).split_whitespace().map(Into::into).collect();
        let agent = Agent::start(guest, &directory.join("guest.log"))?;
        let mut guest = Self {
            agent,
            root,
            programs: programs.clone(),
            fio: fio.into(),
            mkfs: mkfs.into(),
            mounted: Vec::new(),
            kernel: String::new(),
        };
        guest.kernel = guest.run("uname -r")?.trim().to_owned();
        Ok(guest)
    }

    fn run(&mut self, line: &str) -> Result<String> {
        let root = &mut self.root;
        let done = self.agent.run(line, COMMAND_TIMEOUT, &mut || root.is_alive())?;
        Ok(done.output)
    }

    /// Mounts a system and fills its files, unless that was done.
    pub fn mount(&mut self, system: System) -> Result<()> {
        if self.mounted.contains(&system) {
            return Ok(());
        }
        let line = mount_command(system, &self.programs, &self.mkfs)?;
        self.run(&line)?;
        let dir = directory(system);
        let last = FILES - 1;
        let fill = format!("for n in $(seq 0 {last}); do dd if=/dev/zero of={dir}/fio.$n bs=1M count={FILE_MIB}; done");
        self.run(&fill)?;
        self.mounted.push(system);
        Ok(())
    }

    /// Runs a job in a mounted system.
    pub fn fio(&mut self, system: System, job: Job) -> Result<Found> {
        ensure!(self.mounted.contains(&system), "it is not mounted in the guest");
        let mut line = shell_word(&self.fio);
        for word in fio::arguments(job, Path::new(&directory(system))) {
            let _ = write!(line, " {}", shell_word(Path::new(&word)));
        }
        let output = self.run(&format!("cd /run; {line}"))?;
        fio::parse(job, &output)
    }
}

/// QEMU's arguments for so many NVDIMMs.
fn nvdimms(count: usize) -> String {
    let mut args = format!("-machine nvdimm=on -m slots={count},maxmem={}M", GUEST_MIB * 4);
    for number in 0..count {
        let _ = write!(
            args,
            " -object memory-backend-memfd,id=nvdimm{number},share=on,size={NVDIMM_MIB}M \
             -device nvdimm,id=n{number},memdev=nvdimm{number}"
        );
    }
    args
}

/// Where a system is mounted in the guest.
fn directory(system: System) -> String {
    format!("/run/bench/{}", system.full_name().replace(' ', "-"))
}

/// Makes a namespace of the kind that DAX needs, as `ndctl create-namespace -m fsdax` does, and says its device.
/// Without it the kernel knows no pages of that memory, and XFS refuses DAX.
const FSDAX: &str = "fsdax() { d=/sys/bus/nd; r=$d/devices/region$1; p=$(cat $r/pfn_seed); \
                     echo namespace$1.0 >$d/drivers/nd_pmem/unbind; echo pmem >$d/devices/$p/mode; \
                     cat /proc/sys/kernel/random/uuid >$d/devices/$p/uuid; echo namespace$1.0 >$d/devices/$p/namespace; \
                     echo $p >$d/drivers/nd_pmem/bind; basename $d/devices/$p/block/*; }";

/// The guest is thrown away, so nothing need be put back.
const ENABLE_URING: &str = "echo Y >/sys/module/fuse/parameters/enable_uring";

/// The line of shell that mounts a system in the guest.
fn mount_command(system: System, programs: &Programs, mkfs: &Path) -> Result<String> {
    let dir = directory(system);
    let ferry = |words: &str| {
        let ferry = shell_word(&programs.ferry);
        format!(
            "{ferry} mount {words} --foreground >/run/ferry.log 2>&1 & \
             for i in $(seq {MOUNT_LOOKS}); do mountpoint -q {dir} && break; kill -0 $! 2>/dev/null || break; sleep 0.2; done; \
             mountpoint -q {dir} || {{ cat /run/ferry.log; false; }}"
        )
    };
    let mount = match system {
        System::Tmpfs => format!("mount -t tmpfs bench {dir}"),
        System::XfsDax => format!(
            "{FSDAX}; device=$(fsdax 0) && {} -q -f -m reflink=0 /dev/$device && mount -t xfs -o dax=always /dev/$device {dir}",
            shell_word(mkfs)
        ),
        System::FerryPmem => {
            let words = ferry(&format!("pmem:/dev/$device {dir} --path uring"));
            format!("{FSDAX}; {ENABLE_URING}; device=$(fsdax 1) && [ -b /dev/$device ] && {{ {words}; }}")
        }
        System::Ferry(Files::Mem, Way::Uring) => {
            format!("{ENABLE_URING}; {}", ferry(&format!("mem {dir} --path uring --passthrough off")))
        }
        System::Ferry(Files::Mem, Way::Devfuse) => ferry(&format!("mem {dir} --path devfuse --passthrough off")),
        System::Ferry(Files::Mem, Way::Passthrough) => ferry(&format!("mem {dir} --passthrough on")),
        other => bail!("{} does not run in the guest", other.full_name()),
    };
    Ok(format!("mkdir -p {dir}; {mount}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs() -> Programs {
        Programs { ferry: "/f/ferry".into(), null: "/f/null".into(), libfuse: None }
    }

    #[test]
    fn all_of_the_guests_systems_can_be_mounted() {
        for system in super::super::systems::GUEST {
            let line = mount_command(system, &programs(), Path::new("/mkfs")).unwrap();
            assert!(!line.contains('\n') && line.contains(&directory(system)), "{line}");
        }
        assert!(mount_command(System::FerryCached, &programs(), Path::new("/mkfs")).is_err());
    }

    #[test]
    fn each_nvdimm_has_its_memory() {
        let args = nvdimms(2);
        assert_eq!(args.matches("memory-backend-memfd").count(), 2);
        assert!(args.contains("memdev=nvdimm1") && args.contains("slots=2"), "{args}");
    }
}
