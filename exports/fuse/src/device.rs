//! /dev/fuse: the connection to the kernel.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Mutex;

use ferry_vfs::sync::lock;
use ferry_wire::fuse::abi::BackingMap;
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const IOC_CLONE: libc::Ioctl = ior(0, size_of::<u32>());
/// `FUSE_DEV_IOC_BACKING_OPEN`: `_IOW(229, 1, struct fuse_backing_map)`.
const IOC_BACKING_OPEN: libc::Ioctl = iow(1, size_of::<BackingMap>());
/// `FUSE_DEV_IOC_BACKING_CLOSE`: `_IOW(229, 2, uint32_t)`.
const IOC_BACKING_CLOSE: libc::Ioctl = iow(2, size_of::<u32>());

/// The type of FUSE's ioctls (`FUSE_DEV_IOC_MAGIC`).
const MAGIC: usize = 229;

const fn ior(number: usize, bytes: usize) -> libc::Ioctl {
    ((2 << 30) | (bytes << 16) | (MAGIC << 8) | number) as libc::Ioctl
}

const fn iow(number: usize, bytes: usize) -> libc::Ioctl {
    ((1 << 30) | (bytes << 16) | (MAGIC << 8) | number) as libc::Ioctl
}

/// The descriptor of the mount call.
#[derive(Debug)]
pub(crate) struct Device(OwnedFd);

/// The result of reading a request.
pub(crate) enum ReadOutcome {
    /// A request of this length in bytes.
    Request(usize),
    /// None this time: interrupted, or the caller has aborted it.
    Nothing,
    /// The file system is unmounted, or the connection was aborted.
    Unmounted,
}

impl Device {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Returns another descriptor of the connection, with its own queue, so that replies do not contend for one lock.
    ///
    /// # Errors
    ///
    /// No descriptor is left, or /dev/fuse cannot be opened (a mount by fusermount3 in a container).
    pub(crate) fn channel(&self) -> io::Result<OwnedFd> {
        let fd = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let of = u32::try_from(self.0.as_raw_fd()).map_err(|_| io::Error::from(Errno::BADF))?;
        // SAFETY: the command reads one u32, which lives until the call returns.
        match unsafe { libc::ioctl(fd.as_raw_fd(), IOC_CLONE, &raw const of) } {
            0 => Ok(fd),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Registers a file as a backing file for passthrough.
    ///
    /// # Errors
    ///
    /// `EPERM` without `CAP_SYS_ADMIN`, `ELOOP` for a file on too many stacked file systems, and others.
    pub(crate) fn backing_open(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        let map = BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: the command reads one `fuse_backing_map`, which lives until the call returns.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_BACKING_OPEN, &raw const map) } {
            id if id > 0 => Ok(id),
            0 => Err(Errno::INVAL.into()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The reverse of [`Self::backing_open`]. Open files keep using passthrough.
    pub(crate) fn backing_close(&self, id: i32) -> io::Result<()> {
        // SAFETY: the command reads one u32, which lives until the call returns.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_BACKING_CLOSE, &raw const id) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Device {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits for a request.
///
/// # Errors
///
/// The connection is unusable.
pub(crate) fn receive(channel: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<ReadOutcome> {
    match rustix::io::read(channel, buffer) {
        Ok(bytes) => Ok(ReadOutcome::Request(bytes)),
        Err(Errno::NODEV | Errno::CONNABORTED) => Ok(ReadOutcome::Unmounted),
        Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => Ok(ReadOutcome::Nothing),
        Err(error) => Err(error.into()),
    }
}

/// As [`receive`], but does not wait: the request that a poll has reported may be another reader's by now, or its caller
/// was killed. Other readers that share the descriptor may return without a request meanwhile.
///
/// # Errors
///
/// The connection is unusable.
pub(crate) fn try_receive(channel: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<ReadOutcome> {
    // Readers may share the descriptor, and so its flags. The read does not wait.
    static SWITCHED: Mutex<()> = Mutex::new(());
    let _switched = lock(&SWITCHED);
    let flags = rustix::fs::fcntl_getfl(channel)? - OFlags::NONBLOCK;
    rustix::fs::fcntl_setfl(channel, flags | OFlags::NONBLOCK)?;
    let received = receive(channel, buffer);
    rustix::fs::fcntl_setfl(channel, flags)?;
    received
}

/// Sends a whole reply or notification in one call. A reply whose caller is gone (`ENOENT`) is not an error.
pub(crate) fn send(channel: BorrowedFd<'_>, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
    retry_on_intr(|| rustix::io::writev(channel, parts)).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn readers_of_a_shared_descriptor_wait_again_after_a_try() {
        let (channel, to) = rustix::pipe::pipe().unwrap();
        let read = || {
            let shared = channel.try_clone().unwrap();
            for _ in 0..10_000 {
                assert!(matches!(try_receive(shared.as_fd(), &mut [0]), Ok(ReadOutcome::Nothing)));
            }
        };
        std::thread::scope(|scope| {
            let readers = [(); 4].map(|()| scope.spawn(read));
            let until = Instant::now() + Duration::from_secs(20);
            while !readers.iter().all(|reader| reader.is_finished()) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            // One that waits nevertheless gets the end of the pipe, which is no message.
            drop(to);
        });
        assert!(!rustix::fs::fcntl_getfl(&channel).unwrap().contains(OFlags::NONBLOCK));
    }
}
