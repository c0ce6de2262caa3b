//! The volatile store: each file's bytes are in a file in memory, which clients' kernels and transfers use directly.
//!
//! * With `CAP_SYS_ADMIN`: a **private, detached tmpfs**, whose root only this process has. Files are named by inode
//!   number and open only while their inode is. The kernel enforces the size limit, also for writes through passed
//!   descriptors, and places each page on the NUMA node of the CPU that first writes it. With passthrough that is the
//!   client's CPU, and with io_uring, too, because its workers are bound to their clients' CPUs. Files with several
//!   transfers are mapped, so that most reads and writes need no system call ([`mapped`]).
//! * Without: **memfds**, one per non-empty file, open as long as the file exists. This process enforces the limit, so
//!   every write must go through it, and no descriptor is passed to clients.

mod file;
#[allow(unsafe_code, reason = "transfers are about addresses")]
mod mapped;
#[allow(unsafe_code, reason = "a mapping is accessed by address")]
mod mapping;
mod memfds;
mod pages;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ferry_engine::{FileId, Windows};
use ferry_vfs::{Backing, Data, Errno, Extent, FallocateFlags, Ino, Input, Output, Result, Seek, Timespec};
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::path::DecInt;

use self::file::{File, times};
use self::memfds::Memfds;
use crate::store::{Record, Space, Store, Usage, WriteAt};
use crate::{Error, Options};

/// The volatile store.
#[derive(Debug)]
pub struct Tmpfs(Place);

/// Where the files are.
#[derive(Debug)]
enum Place {
    /// The root of the private mount.
    Mount(OwnedFd),
    Memfds(Memfds),
}

/// The flags of every data file.
const FLAGS: OFlags = OFlags::RDWR.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Returns whether an error means that the kernel or a sandbox forbids mounting.
fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

/// Makes the private mount.
fn mount(options: &Options, size_bytes: u64) -> std::result::Result<OwnedFd, Error> {
    use rustix::mount::{fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen};
    let wrong = |what: &'static str| move |errno| Error::Mount { what, errno };
    let config = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(wrong("fsopen"))?;
    let set = |key: &'static str, value: &str| fsconfig_set_string(config.as_fd(), key, value).map_err(wrong(key));
    set("size", &size_bytes.to_string())?;
    set("mode", "0700")?;
    // The tree limits inodes, and it has more of them than the mount has files.
    set("nr_inodes", "0")?;
    if options.huge {
        // Not "always", which takes a huge page for the smallest file.
        fsconfig_set_string(config.as_fd(), "huge", "within_size").map_err(Error::Huge)?;
    }
    if !options.swap {
        fsconfig_set_flag(config.as_fd(), "noswap").map_err(Error::NoSwap)?;
    }
    fsconfig_create(config.as_fd()).map_err(wrong("fsconfig"))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    fsmount(config.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(wrong("fsmount"))
}

impl Tmpfs {
    /// Makes an empty store.
    pub(crate) fn new(options: &Options, size_bytes: u64) -> std::result::Result<Self, Error> {
        let refused = if options.memfds {
            None
        } else {
            match mount(options, size_bytes) {
                Ok(root) => return Ok(Self(Place::Mount(root))),
                Err(Error::Mount { errno, .. }) if is_refusal(errno) => Some(errno),
                Err(error) => return Err(error),
            }
        };
        if options.huge || !options.swap {
            return Err(Error::NeedsMount(refused.unwrap_or(Errno::PERM)));
        }
        Ok(Self(Place::Memfds(Memfds::new(size_bytes))))
    }

    /// Returns whether the kernel enforces the limit, so that descriptors can be passed to clients.
    pub fn is_mount(&self) -> bool {
        matches!(self.0, Place::Mount(_))
    }

    /// Opens a file of the mount by its number.
    fn open_at(root: BorrowedFd<'_>, ino: Ino, flags: OFlags) -> Result<OwnedFd> {
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::openat(root, DecInt::new(ino.0), FLAGS | flags, mode)
    }

    /// Returns the appending descriptor of a file, which others may write at the same time.
    fn append<'a>(&self, file: &'a File) -> Result<&'a Arc<Backing>> {
        if let Some(append) = file.append.get() {
            return Ok(append);
        }
        let fd = match &self.0 {
            Place::Mount(root) => Self::open_at(root.as_fd(), file.ino, OFlags::APPEND)?,
            Place::Memfds(_) => return Err(Errno::OPNOTSUPP),
        };
        Ok(file.append.get_or_init(|| Arc::new(Backing::new(fd))))
    }
}

impl Store for Tmpfs {
    type File = Arc<File>;

    const JOURNALED: bool = false;
    const KEEPS_TIMES: bool = true;

    fn log(&self, _: &Record<'_>) -> Result<()> {
        Ok(())
    }

    fn open(&self, ino: Ino, times: (Timespec, Timespec)) -> Result<Arc<File>> {
        match &self.0 {
            Place::Mount(root) => match Self::open_at(root.as_fd(), ino, OFlags::empty()) {
                Ok(fd) => {
                    let stat = rustix::fs::fstat(&fd)?;
                    let mtime = mapped::usage(&stat).times.map_or(times.1, |(_, mtime)| mtime);
                    Ok(Arc::new(File::new(ino, fd, mtime)))
                }
                Err(Errno::NOENT) => {
                    let fd = Self::open_at(root.as_fd(), ino, OFlags::CREATE | OFlags::EXCL)?;
                    let file = File::new(ino, fd, times.1);
                    file.set_times(times)?;
                    Ok(Arc::new(file))
                }
                Err(error) => Err(error),
            },
            Place::Memfds(memfds) => memfds.open(ino, times),
        }
    }

    fn closing(&self, file: &Arc<File>) {
        file.closing();
    }

    fn usage(&self, ino: Ino, file: Option<&Arc<File>>) -> Result<Usage> {
        match (&self.0, file) {
            (_, Some(file)) => file.usage(),
            (Place::Memfds(memfds), None) => memfds.get(ino).map_or(Ok(Usage::default()), |file| file.usage()),
            (Place::Mount(root), None) => {
                match rustix::fs::statat(root, DecInt::new(ino.0), AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => Ok(mapped::usage(&stat)),
                    Err(Errno::NOENT) => Ok(Usage::default()),
                    Err(error) => Err(error),
                }
            }
        }
    }

    fn has_backing(&self) -> bool {
        self.is_mount()
    }

    fn backing(&self, file: &Arc<File>) -> Option<Arc<Backing>> {
        self.is_mount().then(|| Arc::clone(&file.plain))
    }

    fn file_id(&self, ino: Ino) -> Option<FileId> {
        let Place::Mount(root) = &self.0 else { return None };
        let stat = rustix::fs::statat(root, DecInt::new(ino.0), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(FileId { dev: stat.st_dev, ino: stat.st_ino })
    }

    fn read(&self, file: &Arc<File>, offset: u64, _: u32, _: &mut dyn Output) -> Result<Data> {
        Ok(Data::Extent(Extent { file: Arc::clone(&file.plain), offset }))
    }

    fn write(&self, file: &Arc<File>, at: WriteAt, input: &mut dyn Input) -> Result<Data> {
        match &self.0 {
            Place::Memfds(memfds) => return memfds.write(file, at, input).map(Data::Bytes),
            Place::Mount(_) => {}
        }
        let backing = if at.append { self.append(file)? } else { &file.plain };
        Ok(Data::Extent(Extent { file: Arc::clone(backing), offset: at.offset }))
    }

    fn truncate(&self, file: &Arc<File>, size: u64) -> Result<()> {
        match &self.0 {
            Place::Mount(_) => file.resizing(size, || rustix::fs::ftruncate(file.as_fd(), size)),
            Place::Memfds(memfds) => memfds.shrinking(file, size, || rustix::fs::ftruncate(file.as_fd(), size)),
        }
    }

    fn fallocate(&self, file: &Arc<File>, offset: u64, len: u64, flags: FallocateFlags) -> Result<()> {
        let change = |flags| rustix::fs::fallocate(file.as_fd(), flags, offset, len);
        let zeroes = flags.contains(FallocateFlags::ZERO_RANGE);
        if zeroes && !(FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE).contains(flags) {
            return Err(Errno::OPNOTSUPP);
        }
        let end = offset.saturating_add(len);
        if flags.contains(FallocateFlags::PUNCH_HOLE) {
            return match &self.0 {
                Place::Mount(_) => file.removing(offset..end, || change(flags)),
                Place::Memfds(memfds) => memfds.shrinking(file, offset, || change(flags)),
            };
        }
        let keep = flags & FallocateFlags::KEEP_SIZE;
        if flags - FallocateFlags::KEEP_SIZE - FallocateFlags::ZERO_RANGE != FallocateFlags::empty() {
            return Err(Errno::OPNOTSUPP);
        }
        if let Place::Memfds(memfds) = &self.0 {
            memfds.reserve(file, offset, len)?;
        }
        change(keep)?;
        if zeroes { Windows::zero(file.as_fd(), offset..end) } else { Ok(()) }
    }

    fn seek(&self, file: &Arc<File>, offset: u64, seek: Seek) -> Result<u64> {
        // Moves the descriptor's own position, which nothing else uses.
        let from = match seek {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        rustix::fs::seek(file.as_fd(), from)
    }

    fn copy(&self, from: (&Arc<File>, u64), to: (&Arc<File>, u64), len: u64) -> Result<u64> {
        let size = from.0.usage()?.size;
        let len = len.min(size.saturating_sub(from.1));
        if let Place::Memfds(memfds) = &self.0 {
            memfds.reserve(to.0, to.1, len)?;
        }
        let (mut from_offset, mut to_offset) = (from.1, to.1);
        let len = usize::try_from(len).map_err(|_| Errno::INVAL)?;
        let (from, to) = (from.0.as_fd(), to.0.as_fd());
        let count = rustix::fs::copy_file_range(from, Some(&mut from_offset), to, Some(&mut to_offset), len)?;
        Ok(count as u64)
    }

    fn set_times(&self, ino: Ino, file: Option<&Arc<File>>, (atime, mtime): (Timespec, Timespec)) -> Result<()> {
        match (&self.0, file) {
            (_, Some(file)) => file.set_times((atime, mtime)),
            (Place::Memfds(memfds), None) => memfds.get(ino).map_or(Ok(()), |file| file.set_times((atime, mtime))),
            (Place::Mount(root), None) => {
                let times = times((atime, mtime));
                rustix::fs::utimensat(root, DecInt::new(ino.0), &times, AtFlags::SYMLINK_NOFOLLOW)
            }
        }
    }

    fn fsync(&self, _: Ino, _: Option<&Arc<File>>, _: bool) -> Result<Option<Arc<Backing>>> {
        Ok(None)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn remove(&self, ino: Ino) {
        match &self.0 {
            Place::Memfds(memfds) => memfds.remove(ino),
            Place::Mount(root) => match rustix::fs::unlinkat(root, DecInt::new(ino.0), AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => tracing::warn!(ino = ino.0, %error, "cannot remove the data of a deleted file"),
            },
        }
    }

    fn space(&self) -> Result<Space> {
        match &self.0 {
            Place::Memfds(memfds) => Ok(memfds.space()),
            Place::Mount(root) => {
                let stat = rustix::fs::fstatfs(root)?;
                let block = u64::try_from(stat.f_bsize).map_err(|_| Errno::IO)?;
                Ok(Space { total: stat.f_blocks.saturating_mul(block), free: stat.f_bavail.saturating_mul(block) })
            }
        }
    }
}
