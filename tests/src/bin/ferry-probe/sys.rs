//! System calls that the crates at hand do not have, and threads with other credentials.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{AtFlags, CWD, Statx, StatxFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::process::{Gid, Uid};
use rustix::thread::UnshareFlags;

/// The user that checks use as another user.
pub const NOBODY: u32 = 65534;

/// Runs something as another user, with these groups beside the first one; without any capability.
pub fn become_user<T: Send>(uid: u32, gid: u32, groups: &[u32], run: impl FnOnce() -> T + Send) -> T {
    let groups: Vec<Gid> = groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    let outcome = std::thread::scope(|scope| {
        // Linux has these ids per thread.
        scope
            .spawn(|| {
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                rustix::thread::set_thread_groups(&groups).unwrap();
                rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
                rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
                run()
            })
            .join()
    });
    outcome.unwrap_or_else(|panic| resume_unwind(panic))
}

/// As nobody, without groups.
pub fn as_nobody<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    become_user(NOBODY, NOBODY, &[], run)
}

/// statx of a path, the last link not followed.
pub fn statx(path: &Path) -> Statx {
    rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::ALL).unwrap()
}

/// The permission bits with suid, sgid and sticky.
pub fn mode(path: &Path) -> u32 {
    u32::from(statx(path).stx_mode) & 0o7777
}

/// The error of an operation that must fail.
#[track_caller]
pub fn errno<T, E: Into<io::Error>>(result: Result<T, E>) -> i32 {
    match result {
        Ok(_) => panic!("it worked, and should not"),
        Err(error) => error.into().raw_os_error().unwrap(),
    }
}

/// A vsock connection that programs started from here inherit.
pub fn vsock(cid: u32, port: u32) -> io::Result<OwnedFd> {
    // SAFETY: socket takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_vm is plain data.
    let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
    address.svm_family = libc::AF_VSOCK.try_into().unwrap();
    (address.svm_cid, address.svm_port) = (cid, port);
    let bytes = size_of_val(&address).try_into().unwrap();
    // SAFETY: the address is initialised, as long as is said, and outlives the call.
    let connected = unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), bytes) };
    if connected < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// A byte range lock operation; `kind` and `command` as for fcntl.
pub fn fcntl_lock(file: &File, command: i32, kind: i32, start: i64, len: i64) -> io::Result<libc::flock> {
    // SAFETY: flock is plain data.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).unwrap();
    lock.l_whence = i16::try_from(libc::SEEK_SET).unwrap();
    lock.l_start = start;
    lock.l_len = len;
    // SAFETY: the descriptor is open and `lock` is a valid flock that outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock)
}

/// Memory that a file is mapped to.
pub struct Mapping {
    at: *mut u8,
    len: usize,
}

impl Mapping {
    /// A shared, writable mapping of the first bytes of a file.
    pub fn new(file: &File, len: usize) -> io::Result<Self> {
        Self::map(file, len, MapFlags::SHARED)
    }

    /// A private, writable mapping of the first bytes of a file.
    pub fn private(file: &File, len: usize) -> io::Result<Self> {
        Self::map(file, len, MapFlags::PRIVATE)
    }

    fn map(file: &File, len: usize, flags: MapFlags) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint, so that the kernel chooses where there is nothing yet.
        let at = unsafe { mmap(std::ptr::null_mut(), len, prot, flags, file.as_fd(), 0) }?;
        Ok(Self { at: at.cast(), len })
    }

    /// Bytes of it.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        // SAFETY: the range lies in the mapping, which lives as long as `self`; bytes may change and are copied once.
        (offset..offset + len).map(|index| unsafe { self.at.add(index).read_volatile() }).collect()
    }

    /// Changes bytes of it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: as for `read`, and the mapping is writable.
            unsafe { self.at.add(offset + index).write_volatile(*byte) };
        }
    }

    /// msync(MS_SYNC).
    pub fn sync(&self) {
        // SAFETY: the range is the mapping's own.
        unsafe { rustix::mm::msync(self.at.cast(), self.len, rustix::mm::MsyncFlags::SYNC) }.unwrap();
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value, and is no longer used.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}

/// A directory mounted once more, nowhere, with other users: pairs of their number on the file system and of that which is seen.
pub fn idmapped(directory: &Path, users: &[(u32, u32)]) -> OwnedFd {
    // Only a process with one thread gets a namespace; `cat` ends with its standard input.
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    // SAFETY: a system call and nothing else.
    unsafe { command.pre_exec(|| Ok(rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER)?)) };
    let mut child = command.spawn().unwrap();
    let process = Path::new("/proc").join(child.id().to_string());
    let map: String = users.iter().map(|(stored, shown)| format!("{stored} {shown} 1\n")).collect();
    std::fs::write(process.join("uid_map"), &map).unwrap();
    std::fs::write(process.join("gid_map"), &map).unwrap();
    let namespace = File::open(process.join("ns/user")).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap();
    let tree = open_tree(CWD, directory, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).unwrap();
    let attr = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: u64::try_from(namespace.as_raw_fd()).unwrap(),
    };
    let (flags, bytes) = (libc::AT_EMPTY_PATH, size_of_val(&attr));
    // SAFETY: the path ends with a NUL, and the attributes are as long as is said; both outlive the call.
    let outcome = unsafe {
        libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, &raw const attr, bytes)
    };
    assert_eq!(outcome, 0, "no idmapped mount: {}", io::Error::last_os_error());
    tree
}

/// truncate(2): by the path, without a descriptor.
pub fn truncate(path: &Path, len: i64) -> io::Result<()> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: the path ends with a NUL and outlives the call.
    if unsafe { libc::truncate(path.as_ptr(), len) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
