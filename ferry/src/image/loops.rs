//! Loop devices: block devices from files, for kernels whose EROFS mounts only block devices.
#![allow(unsafe_code, reason = "two ioctls without a safe wrapper, and a structure of the kernel")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use linux_raw_sys::loop_device::{LOOP_CONFIGURE, LOOP_CTL_GET_FREE, loop_config};
use nix::libc;
use rustix::io::Errno;
use rustix::ioctl::{Setter, ioctl};

/// `LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR`: the device is released when it is neither open nor mounted.
const FLAGS: u32 = 1 | 4;
/// Another process may take a free device first.
const TRIES_MAX: usize = 64;

/// A read-only loop device. It exists while this or a mount uses it.
#[derive(Debug)]
pub struct Loop {
    pub path: PathBuf,
    _device: File,
}

impl Loop {
    /// Attaches a file to a free device.
    pub fn attach(file: &Path) -> Result<Self> {
        let backing = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
        let control = Path::new("/dev/loop-control");
        let control = File::options().read(true).write(true).open(control);
        let control = control.context("cannot open /dev/loop-control (modprobe loop)")?;
        for _ in 0..TRIES_MAX {
            let number = free(&control).context("there is no free loop device")?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            match configure(&device, &backing) {
                Ok(()) => return Ok(Self { path, _device: device }),
                Err(Errno::BUSY) => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("cannot attach {} to {}", file.display(), path.display()));
                }
            }
        }
        bail!("other processes took every free loop device: try again");
    }
}

/// Returns the number of a device that is free now.
fn free(control: &File) -> io::Result<i32> {
    // SAFETY: LOOP_CTL_GET_FREE takes no argument and writes to no memory.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as libc::Ioctl) };
    if number < 0 { Err(io::Error::last_os_error()) } else { Ok(number) }
}

fn configure(device: &File, backing: &File) -> rustix::io::Result<()> {
    // SAFETY: it consists of integers, all of which may be zero.
    let mut config: loop_config = unsafe { std::mem::zeroed() };
    config.fd = u32::try_from(backing.as_raw_fd()).unwrap_or(u32::MAX);
    config.info.lo_flags = FLAGS;
    // SAFETY: LOOP_CONFIGURE reads a `struct loop_config`, which lives until the call returns. The kernel takes a reference of its
    // own to the file.
    unsafe { ioctl(device, Setter::<LOOP_CONFIGURE, loop_config>::new(config)) }
}
