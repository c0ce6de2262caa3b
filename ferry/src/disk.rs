//! `ferry disk`: files and block devices as disks of virtual machines.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry_blk::Export;
use ferry_fs::Endings;

use crate::recipes;
use crate::share::{ENDINGS, shown};
use crate::size::Size;
use crate::socket::Bound;

/// Past a second of polling an idle disk costs a whole CPU for nothing.
const POLL_US_MAX: u64 = 1_000_000;

/// Shown by `ferry disk --help`.
pub const EXAMPLES: &str = "\
Examples:
  ferry disk disk.raw --resize 20G         make a file of 20 GiB, or grow it (a guest that uses it is told)
  ferry disk disk.raw --vhost-user /run/disk.sock
  ferry disk root.qcow2 --format qcow2 --vhost-user /run/root.sock /dev/vg/data --vhost-user /run/data.sock
                                           two disks, one process

QEMU (the guest's memory must be shared; 4G is an example):
  -object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem
  -chardev socket,id=disk0,path=/run/disk.sock,reconnect-ms=1000
  -device vhost-user-blk-pci,chardev=disk0,num-queues=4,queue-size=256,packed=on

libvirt (in the domain's XML):
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <devices>
    <disk type='vhostuser' device='disk'>
      <driver name='qemu' type='raw'/>
      <source type='unix' path='/run/disk.sock'><reconnect enabled='yes' timeout='1'/></source>
      <target dev='vda' bus='virtio'/>
    </disk>
  </devices>

cloud-hypervisor:
  --memory size=4G,shared=on --disk vhost_user=true,socket=/run/disk.sock,num_queues=4,queue_size=256

crosvm:
  crosvm run --vhost-user block,socket=/run/disk.sock ...

libblkio, without a virtual machine (qemu-img and qemu-io of package qemu-block-extra):
  qemu-io --image-opts driver=virtio-blk-vhost-user,path=/run/disk.sock,cache.direct=on

For management programs that start back ends themselves, once:
  ln -s $(command -v ferry) /usr/local/bin/ferry-disk
and in /etc/qemu/vhost-user/50-ferry-disk.json:
  {\"description\": \"Ferry's vhost-user-blk\", \"type\": \"block\", \"binary\": \"/usr/local/bin/ferry-disk\"}";

/// The flags of `ferry disk`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A file or block device.
    #[arg(index = 1, value_name = "FILE", required_unless_present_any = ["blk_file", "print_capabilities"])]
    pub file: Option<PathBuf>,

    /// The same, for management programs.
    #[arg(long, value_name = "FILE", conflicts_with = "file", hide_short_help = true)]
    pub blk_file: Option<PathBuf>,

    /// Listen for a VMM on this socket (vhost-user-blk).
    #[arg(long, value_name = "SOCKET", alias = "socket-path")]
    pub vhost_user: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "vhost_user")]
    pub fd: Option<u16>,

    /// What the file holds: raw or qcow2. Never guessed: without this flag it is raw, and a file that looks like an
    /// image is refused, for a guest may have made it look so.
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<ferry_disk::Format>,

    /// What lies between the guest's writes and the device [default: none for raw disks, writeback for images].
    #[arg(long, value_enum, value_name = "MODE")]
    pub cache: Option<Cache>,

    /// Let the guest change nothing.
    #[arg(long)]
    pub read_only: bool,

    /// What the guest sees as the serial number, up to 20 bytes [default: the file's name].
    #[arg(long, value_name = "TEXT")]
    pub serial: Option<String>,

    /// Where the backing files of images may lie [default: nowhere].
    #[arg(long, value_name = "DIR")]
    pub backing_dir: Option<PathBuf>,

    /// Make the disk this large if it is smaller; without a socket, that is all that is done.
    #[arg(long, value_name = "SIZE")]
    pub resize: Option<Size>,

    /// How many queues to offer [default: as many as CPUs, at most 16].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: Option<u16>,

    /// Poll up to this many microseconds for the next request before sleeping; 0 never polls [default: adapts].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// How data is moved: auto, uring (or an error that says why not), sync.
    #[arg(long, value_enum, value_name = "WAY", default_value = "auto", hide_short_help = true)]
    pub io: Way,

    /// Register the guest's memory with io_uring: transfers cost a little less, and all of the memory is allocated and
    /// pinned. Not for guests with a balloon, free page reporting or virtio-mem: what they get back would be other pages.
    #[arg(long, hide_short_help = true)]
    pub pin_memory: bool,

    /// Say in JSON what this program can do as a vhost-user back end.
    #[arg(long)]
    pub print_capabilities: bool,

    /// Print one line of JSON on standard output once every disk is listening.
    #[arg(long)]
    pub json: bool,
}

/// What lies between writes and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// Not the page cache (O_DIRECT), where the file can; the device's own until the guest flushes.
    None,
    /// The page cache of this host, until the guest flushes.
    Writeback,
    /// Each write ends when it is durable.
    Writethrough,
}

/// How data is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Way {
    /// io_uring, or plain system calls where that is not allowed.
    Auto,
    /// io_uring.
    Uring,
    /// Plain system calls.
    Sync,
}

/// The name under which management programs start `ferry disk`: they can give flags, but no command.
const BACK_END: &str = "ferry-disk";

/// Whether the program was started under that name.
pub fn is_back_end(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == BACK_END)
}

/// A disk and the socket that it is offered on.
struct Opened<'a> {
    args: &'a Args,
    bound: Bound,
    disk: Arc<dyn ferry_vfs::Disk>,
}

/// Serves disks until SIGTERM or SIGINT.
pub fn run(disks: &[Args]) -> Result<()> {
    if disks.iter().any(|disk| disk.print_capabilities) {
        return say(&serde_json::json!({ "type": "block", "features": ["read-only", "blk-file"] }));
    }
    refuse_doubles(disks)?;
    // Inherited descriptors first: nothing has been opened yet that could have their numbers.
    let inherited: Vec<Option<Bound>> =
        disks.iter().map(|disk| disk.fd.map(Bound::inherit).transpose()).collect::<Result<_>>()?;
    let mut endings = Endings::catch(&ENDINGS).context("cannot catch signals")?;
    let opened = open(disks, inherited)?;
    if opened.is_empty() {
        return Ok(());
    }
    let exports: Vec<Export> = opened.iter().map(Opened::start).collect::<Result<_>>()?;
    announce(&opened)?;
    let signal = endings.wait();
    tracing::info!(signal, "ending: serving what is under way");
    exports.into_iter().for_each(Export::stop);
    Ok(())
}

/// Opens every disk and every socket before the first disk is served: what is wrong shows at once.
fn open(disks: &[Args], inherited: Vec<Option<Bound>>) -> Result<Vec<Opened<'_>>> {
    let mut opened = Vec::new();
    for (args, inherited) in disks.iter().zip(inherited) {
        let bound = match (inherited, &args.vhost_user) {
            (Some(bound), _) => bound,
            (None, Some(socket)) => Bound::bind(socket)?,
            (None, None) => {
                args.only_resize()?;
                continue;
            }
        };
        let disk = ferry_disk::open(args.path()?, &args.disk_options())?;
        opened.push(Opened { args, bound, disk });
    }
    Ok(opened)
}

/// A socket or descriptor can serve one disk only. Files are kept apart by their locks.
fn refuse_doubles(disks: &[Args]) -> Result<()> {
    let mut sockets = HashSet::new();
    let mut descriptors = HashSet::new();
    for disk in disks {
        if let Some(socket) = &disk.vhost_user {
            ensure!(sockets.insert(socket), "the socket {} is given twice; each disk needs its own", socket.display());
        }
        if let Some(fd) = disk.fd {
            ensure!(descriptors.insert(fd), "descriptor {fd} is given twice; each disk needs its own");
        }
    }
    Ok(())
}

impl Opened<'_> {
    fn start(&self) -> Result<Export> {
        let listener = self.bound.listener()?;
        let mut options = ferry_blk::Options {
            writeback: self.args.cache != Some(Cache::Writethrough),
            io: match self.args.io {
                Way::Auto => ferry_blk::IoMode::Auto,
                Way::Uring => ferry_blk::IoMode::Uring,
                Way::Sync => ferry_blk::IoMode::Sync,
            },
            pin_memory: self.args.pin_memory,
            ..ferry_blk::Options::default()
        };
        if let Some(queues) = self.args.queues {
            options.queues = usize::from(queues);
        }
        if let Some(poll_us) = self.args.poll_us {
            options.poll = Duration::from_micros(poll_us);
        }
        Ok(Export::start(listener, Arc::clone(&self.disk), options)?)
    }
}

impl Args {
    fn path(&self) -> Result<&Path> {
        let path = self.file.as_deref().or(self.blk_file.as_deref());
        path.context("<FILE> is missing: a file or block device")
    }

    fn disk_options(&self) -> ferry_disk::Options {
        ferry_disk::Options {
            format: self.format,
            cache: self.cache.map(|cache| match cache {
                Cache::None => ferry_disk::Cache::None,
                Cache::Writeback => ferry_disk::Cache::Writeback,
                Cache::Writethrough => ferry_disk::Cache::Writethrough,
            }),
            read_only: self.read_only,
            serial: self.serial.clone(),
            backing_dir: self.backing_dir.clone(),
            grow_to: self.resize.map(|size| size.0),
        }
    }

    /// Without a socket, a disk can be made larger, and nothing else.
    fn only_resize(&self) -> Result<()> {
        let path = self.path()?;
        let size = self.resize.with_context(|| {
            format!("'--vhost-user <SOCKET>' is missing after {} (or --resize, to make it larger)", path.display())
        })?;
        Ok(ferry_disk::grow(path, size.0, &self.disk_options())?)
    }
}

/// Says that every disk is up: to a program as JSON, to a person as what to give QEMU.
fn announce(opened: &[Opened<'_>]) -> Result<()> {
    if opened.iter().any(|one| one.args.json) {
        let disks: Vec<_> = opened.iter().map(Opened::described).collect();
        return say(&serde_json::json!({ "pid": std::process::id(), "disks": disks }));
    }
    let mut out = std::io::stdout().lock();
    for one in opened {
        let (path, bytes) = (one.args.path()?.display(), one.disk.geometry().bytes);
        match &one.args.vhost_user {
            Some(socket) if out.is_terminal() => {
                let line = recipes::qemu_disk(&shown(socket));
                writeln!(out, "{path}: {line}").context("cannot write to standard output")?;
            }
            socket => tracing::info!(%path, bytes, socket = socket.as_deref().map(shown), "offering a disk"),
        }
    }
    Ok(())
}

impl Opened<'_> {
    fn described(&self) -> serde_json::Value {
        let (geometry, features) = (self.disk.geometry(), self.disk.features());
        serde_json::json!({
            "file": self.args.path().ok().map(shown),
            "vhost_user": self.args.vhost_user.as_deref().map(shown),
            "fd": self.args.fd,
            "bytes": geometry.bytes,
            "block_bytes": geometry.logical_block_bytes,
            "read_only": features.read_only,
            "discard": features.discard,
            "serial": self.disk.serial(),
        })
    }
}

fn say(line: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output")
}
