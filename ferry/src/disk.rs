//! `ferry disk`: serves files and block devices as disks of virtual machines.

mod disks;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ferry_control::{MetricsAddress, TraceOptions};
use ferry_engine::{RateLimiter, TokenBucket};
use serde::Deserialize;

pub use disks::{PATIENCE, bind, inherit, refuse_duplicates, serve};

use crate::flags::{ImageDigest, Limit, POLL_US_MAX, as_keys, parsed};
use crate::paths::absolute;
use crate::sandbox::{self, SandboxFlags};
use crate::size::Size;
use crate::status::misuse;

/// The limit of vhost-user ([`ferry_blk::QUEUES_MAX`]).
const QUEUES_MAX: u16 = 256;

/// Shown by `ferry disk --help`.
pub const EXAMPLES: &str = "\
Examples:
  ferry disk disk.raw --resize 20G         create a file of 20 GiB, or grow it (also under a guest)
  ferry disk disk.raw --vhost-user /run/disk.sock
  ferry disk image:rootfs.img --store /var/lib/ferry --vhost-user /run/disk.sock      mount -t erofs /dev/vda in the guest
  ferry disk root.qcow2 --format qcow2 --vhost-user /run/root.sock /dev/vg/data --vhost-user /run/data.sock
                                           two disks, each served by its own process

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
  crosvm run --vhost-user block,socket=/run/disk.sock,max-queue-size=1024 ...

libblkio, without a virtual machine (qemu-img and qemu-io with package qemu-block-extra, of Debian 13 or later; those
of Debian 12 have no such driver):
  qemu-io --image-opts driver=virtio-blk-vhost-user,path=/run/disk.sock,cache.direct=on

Management programs start back ends themselves: make install creates ferry-disk, another name of this program, and
describes it in qemu/vhost-user/50-ferry-disk.json. They start it with --fd or --socket-path, and --blk-file.

Disks beside shares, in the file of ferry share --config:
  [[disk]]
  file = \"/srv/disk.raw\"
  vhost-user = \"/run/disk.sock\"";

/// The prefix of Ferry's images.
const IMAGE: &[u8] = b"image:";

/// One disk: a group of flags of `ferry disk`, or a `[[disk]]` table of a configuration file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Args {
    /// A file or block device; or image:PATH, an image from `ferry image build`, which guests mount as EROFS.
    #[arg(index = 1, value_name = "FILE", required_unless_present_any = ["blk_file", "print_capabilities"])]
    pub file: Option<PathBuf>,

    /// The file, for management programs.
    #[arg(long, value_name = "FILE", conflicts_with = "file", hide_short_help = true)]
    #[serde(skip)]
    pub blk_file: Option<PathBuf>,

    /// Listen for a VMM on this socket (vhost-user-blk).
    #[arg(long, value_name = "SOCKET", alias = "socket-path")]
    pub vhost_user: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "vhost_user")]
    pub fd: Option<u16>,

    /// The format of the file: raw or qcow2. It is never guessed: without this flag it is raw, and a file that looks like an
    /// image is refused, because a guest may have written that header.
    #[arg(long, value_name = "FORMAT")]
    #[serde(deserialize_with = "parsed")]
    pub format: Option<ferry_disk::Format>,

    /// The caching of writes [default: none for raw disks, writeback for images].
    #[arg(long, value_enum, value_name = "MODE")]
    pub cache: Option<Cache>,

    /// Serve the disk read-only.
    #[arg(long)]
    pub read_only: bool,

    /// The serial number, up to 20 bytes [default: the file's name].
    #[arg(long, value_name = "TEXT")]
    pub serial: Option<String>,

    /// The directory that backing files of images may be in [default: none].
    #[arg(long, value_name = "DIR")]
    pub backing_dir: Option<PathBuf>,

    /// The store with the data of an image's files.
    #[arg(long, value_name = "DIR", help_heading = "For image:PATH")]
    pub store: Option<PathBuf>,

    /// Fail unless the image has this digest, which covers the whole disk.
    #[arg(long, value_name = "DIGEST", help_heading = "For image:PATH")]
    pub digest: Option<ImageDigest>,

    /// Grow the disk to this size, or create the file; without a socket, do only that. Disks are never shrunk.
    #[arg(long, value_name = "SIZE")]
    pub resize: Option<Size>,

    /// The number of queues [default: 64].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// Limit requests per second (iops=N, up to 1000000000), bytes per second (bps=SIZE, up to 1T), or both: iops=2000,bps=100M.
    ///
    /// Requests over the limit wait in the guest's queues. A rate that was not used for up to burst=SECONDS (1 to 60) may be used
    /// at once [default: a twentieth of a second].
    #[arg(long, value_name = "RATES")]
    #[serde(deserialize_with = "parsed")]
    pub limit: Option<Limit>,

    /// Poll for the next request for up to this many microseconds before sleeping; 0 disables polling [default:
    /// adaptive].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// The system calls for transfers: auto, uring (an error if it is not available), sync.
    #[arg(long, value_enum, value_name = "WAY", default_value = "auto", hide_short_help = true)]
    pub io: IoPath,

    /// Register the guest's memory with io_uring: transfers cost a little less, but all of the memory is allocated and pinned.
    /// Not for guests with a balloon, free page reporting or virtio-mem: memory that they give back and reuse would be lost to
    /// the disk.
    #[arg(long, hide_short_help = true)]
    pub pin_memory: bool,

    /// Serve metrics over HTTP at 127.0.0.1:PORT, [::1]:PORT or unix:PATH, as /metrics; see ferry metrics.
    #[allow(rustdoc::broken_intra_doc_links, reason = "an address, in the text of the help")]
    #[arg(long, value_name = "ADDRESS")]
    #[serde(deserialize_with = "parsed")]
    pub metrics: Option<MetricsAddress>,

    /// Write requests as trace events, for Perfetto or Chrome, to a new file, for N seconds (1 to 600) [default: 10].
    #[arg(long, value_name = "FILE[,seconds=N]", hide_short_help = true)]
    #[serde(skip)]
    pub trace: Option<TraceOptions>,

    /// Print the capabilities of this vhost-user back end in JSON.
    #[arg(long)]
    #[serde(skip)]
    pub print_capabilities: bool,

    /// Print one line of JSON on standard output once every disk is listening.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,

    #[command(flatten)]
    #[serde(skip)]
    pub sandbox_flags: SandboxFlags,
}

/// The caching of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// No page cache (O_DIRECT) if the file supports that; the device's cache until the guest flushes.
    None,
    /// The page cache of this host until the guest flushes.
    Writeback,
    /// Each write completes when it is durable.
    Writethrough,
}

/// The system calls for transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum IoPath {
    #[default]
    /// io_uring, or plain system calls if it is not allowed.
    Auto,
    /// io_uring.
    Uring,
    /// Plain system calls.
    Sync,
}

/// The name by which management programs start `ferry disk`: they pass flags, but no command.
const BACK_END: &str = "ferry-disk";

/// Whether the program was started by that name.
pub fn is_back_end(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == BACK_END)
}

/// A disk, the same disk as an image if it is one, and the file if it was created.
type Open = (Arc<dyn ferry_vfs::Disk>, Option<Arc<ferry_image::Disk>>, Option<(PathBuf, File)>);

impl Args {
    /// Returns where it listens: the path of its socket, or the number of its descriptor.
    pub fn socket(&self) -> (Option<&Path>, Option<u16>) {
        (self.vhost_user.as_deref(), self.fd)
    }

    /// Returns the file.
    ///
    /// The file is missing from the command line.
    pub fn path(&self) -> Result<&Path> {
        let path = self.file.as_deref().or(self.blk_file.as_deref());
        path.context("<FILE> is missing: a file or block device, or image:PATH")
    }

    /// Returns the image, if the disk is one.
    fn image(&self) -> Option<&Path> {
        let word = self.file.as_deref().or(self.blk_file.as_deref())?;
        word.as_os_str().as_bytes().strip_prefix(IMAGE).map(|path| Path::new(OsStr::from_bytes(path)))
    }

    /// Returns its file, and the directories that it needs.
    fn places(&self) -> (Option<&Path>, impl Iterator<Item = &Path>) {
        let file = self.image().or_else(|| self.path().ok());
        (file, self.store.iter().chain(&self.backing_dir).map(PathBuf::as_path))
    }

    /// Returns the word for the file, with its path relative to this directory.
    fn file_in(&self, directory: &Path) -> Option<PathBuf> {
        match self.image() {
            Some(image) => {
                let word = [IMAGE, directory.join(image).as_os_str().as_bytes()].concat();
                Some(OsString::from_vec(word).into())
            }
            None => self.file.as_ref().map(|file| directory.join(file)),
        }
    }

    /// Makes its paths absolute, relative to `directory`.
    pub fn resolve_paths(&mut self, directory: &Path) {
        self.file = self.file_in(directory);
        self.metrics.iter_mut().for_each(|metrics| metrics.resolve(directory));
        self.trace.iter_mut().for_each(|trace| trace.resolve(directory));
        for path in [&mut self.vhost_user, &mut self.backing_dir, &mut self.store, &mut self.blk_file] {
            *path = path.take().map(|path| directory.join(path));
        }
    }

    /// Checks flags that conflict with the kind of file or each other.
    fn check_flags(&self) -> Result<(), String> {
        let word = self.file.as_deref().or(self.blk_file.as_deref()).unwrap_or(Path::new("")).display();
        let of_images = [(self.store.is_some(), "store"), (self.digest.is_some(), "digest")];
        let of_files = [
            (self.format.is_some(), "format"),
            (self.cache.is_some(), "cache"),
            (self.backing_dir.is_some(), "backing-dir"),
            (self.resize.is_some(), "resize"),
        ];
        if let Some(limit) = self.limit.as_ref().filter(|limit| limit.group.is_some()) {
            return Err(format!("--limit {limit}: a disk has no group, because each is served by its own process"));
        }
        let is_image = self.image().is_some();
        let wrong = if is_image { &of_files[..] } else { &of_images };
        match wrong.iter().find(|(given, _)| *given) {
            Some((_, flag)) if is_image => {
                Err(format!("--{flag} is for files, and {word} is an image (a file of that name is ./{word})"))
            }
            Some((_, flag)) => Err(format!("--{flag} is for image:PATH, and {word} is a file")),
            None if is_image && self.store.is_none() => {
                Err(format!("image:PATH needs --store, the directory with the data of the files of {word}"))
            }
            None if self.backing_dir.is_some() && self.format != Some(ferry_disk::Format::Qcow2) => {
                Err(format!("--backing-dir is for qcow2 images, and {word} is raw: add --format qcow2, or omit it"))
            }
            None if self.resize.is_some() && self.read_only => {
                Err("--resize and --read-only exclude each other; omit one".into())
            }
            None if self.pin_memory && self.io == IoPath::Sync => {
                Err("--pin-memory is for io_uring, which --io sync does not use: omit one".into())
            }
            None => Ok(()),
        }
    }

    /// Opens it. Afterwards it needs no path and has no thread; `begin` starts the threads of an image.
    fn open(&self) -> Result<Open> {
        self.check_flags().map_err(anyhow::Error::msg).map_err(misuse)?;
        let (Some(path), Some(store)) = (self.image(), &self.store) else {
            let path = self.path()?;
            let (disk, made) = ferry_disk::open_or_make(path, &self.disk_options())?;
            return Ok((disk, None, made.map(|file| (path.into(), file))));
        };
        let image = ferry_image::Image::open(path, self.digest.map(|digest| digest.0))?;
        if image.is_composefs() {
            bail!(
                "{}: an image of the composefs layout cannot be a disk, because it does not contain the data of its files: build \
                 one of the flat layout, or share it as a file system",
                path.display()
            );
        }
        let source = ferry_image::Source::open_idle(image, store)?;
        let disk = Arc::new(ferry_image::Disk::new(source, self.serial.clone()));
        Ok((Arc::clone(&disk) as Arc<dyn ferry_vfs::Disk>, Some(disk), None))
    }

    /// Checks that a disk of a configuration file is complete and has no conflicting flags.
    pub fn check(&self) -> Result<(), String> {
        if self.file.is_none() {
            return Err("it needs file = \"FILE\", a file or block device".into());
        }
        match (&self.vhost_user, self.fd) {
            (None, None) => return Err("it needs vhost-user = \"SOCKET\" (or fd = N)".into()),
            (Some(_), Some(_)) => return Err("it has both vhost-user and fd; keep one".into()),
            _ => {}
        }
        self.check_flags().map_err(|why| as_keys(&why))
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

    /// Returns its name in the log, and where `ferry log` and `ferry status` show it.
    fn name(&self) -> String {
        self.path().map(absolute).unwrap_or_default()
    }

    fn device_options(&self, bucket: &Arc<TokenBucket>) -> ferry_blk::Options {
        let default = ferry_blk::Options::default();
        ferry_blk::Options {
            name: self.name(),
            writeback: self.cache != Some(Cache::Writethrough),
            io: match self.io {
                IoPath::Auto => ferry_blk::IoMode::Auto,
                IoPath::Uring => ferry_blk::IoMode::Uring,
                IoPath::Sync => ferry_blk::IoMode::Sync,
            },
            pin_memory: self.pin_memory,
            begun: Some(sandbox::confine_disk_thread),
            queues: self.queues.map_or(default.queues, usize::from),
            poll: self.poll_us.map_or(default.poll, |us| Duration::from_micros(us).into()),
            limiter: Some(RateLimiter::new(bucket)),
        }
    }

    /// Grows a disk without a socket.
    fn only_resize(&self) -> Result<()> {
        let path = self.path()?;
        self.check_flags().map_err(anyhow::Error::msg).map_err(misuse)?;
        let missing =
            || anyhow!("'--vhost-user <SOCKET>' is missing after {} (or --resize, to grow it)", path.display());
        let size = self.resize.ok_or_else(|| misuse(missing()))?;
        let of_served =
            [(self.metrics.is_some(), "metrics"), (self.trace.is_some(), "trace"), (self.limit.is_some(), "limit")];
        if let Some((_, flag)) = of_served.iter().find(|(given, _)| *given) {
            let why = "is for disks that are served: add --vhost-user, or omit it";
            return Err(misuse(anyhow!("--{flag} {why}")));
        }
        Ok(ferry_disk::grow(path, size.0, &self.disk_options())?)
    }
}
