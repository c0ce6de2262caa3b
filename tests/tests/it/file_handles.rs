//! File handles of mounts on this host (`name_to_handle_at(2)`, `open_by_handle_at(2)`), as NFS servers use them. They
//! lead to their files even when the kernel has evicted the inodes, as on the host's own file system.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;

use ferry_tests::mounts::{Cell, Mounted, NinePServer, ServerVendor};
use ferry_tests::{Place, directory, on_cells};
use rustix::mount::{MountFlags, mount_remount};

const BYTES_MAX: usize = 128;

/// `struct file_handle`.
#[repr(C)]
#[derive(Clone)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; BYTES_MAX],
}

impl FileHandle {
    /// Of what a path names; a link is not followed.
    fn of(path: &Path) -> Result<Self, i32> {
        let mut handle = Self { bytes: u32::try_from(BYTES_MAX).unwrap(), kind: 0, handle: [0; BYTES_MAX] };
        let path = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        let mut mount = 0;
        // SAFETY: the path ends with NUL, the handle has as many bytes behind its head as it says, and all live until the call is back.
        let done = unsafe {
            libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), (&raw mut handle).cast(), &raw mut mount, 0)
        };
        if done == 0 { Ok(handle) } else { Err(std::io::Error::last_os_error().raw_os_error().unwrap()) }
    }

    /// Opens it on the file system of `mount`.
    fn open(&self, mount: &File, flags: i32) -> Result<File, i32> {
        let mut handle = self.clone();
        // SAFETY: the handle has as many bytes as it says, and lives until the call is back.
        let fd =
            unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), flags | libc::O_CLOEXEC) };
        if fd >= 0 {
            // SAFETY: the call has just returned this descriptor, which nothing else owns.
            Ok(unsafe { File::from_raw_fd(fd) })
        } else {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap())
        }
    }

    /// With another byte somewhere; from the end where that is negative.
    fn with_other(&self, at: isize) -> Self {
        let mut other = self.clone();
        let at = if at < 0 { self.bytes as usize - at.unsigned_abs() } else { at.unsigned_abs() };
        other.handle[at] ^= 0x55;
        other
    }
}

/// Makes the kernel drop all unused inodes of a mount: a remount drops all names, and FUSE keeps no inode without one.
fn forget(root: &Path) {
    mount_remount(root, MountFlags::empty(), "").unwrap();
}

/// What handles lead to, after what happens to files.
fn outcomes(root: &Path, is_mount: bool) -> Vec<(&'static str, Result<String, i32>)> {
    let at = |name: &str| root.join(name);
    fs::create_dir_all(at("dir/below/deep")).unwrap();
    for name in ["plain", "dir/below/file", "moved", "linked", "removed", "replaced", "held"] {
        fs::write(at(name), name).unwrap();
    }
    std::os::unix::fs::symlink("plain", at("link")).unwrap();
    fs::hard_link(at("linked"), at("dir/other")).unwrap();
    let mount = File::open(root).unwrap();
    let names = ["plain", "dir/below/file", "moved", "linked", "removed", "replaced", "held", "link", "dir/below/deep"];
    let mut handles = names.map(|name| (name, FileHandle::of(&at(name)).unwrap())).to_vec();
    let plain = handles[0].1.clone();
    handles.push(("another generation", plain.with_other(-1)));
    handles.push(("another number", plain.with_other(1)));

    fs::rename(at("moved"), at("dir/moved")).unwrap();
    fs::remove_file(at("linked")).unwrap();
    fs::remove_file(at("removed")).unwrap();
    fs::remove_file(at("replaced")).unwrap();
    fs::write(at("replaced"), "by another").unwrap();
    let held = File::open(at("held")).unwrap();
    fs::remove_file(at("held")).unwrap();
    let mut found = Vec::new();
    for _ in 0..2 {
        if is_mount {
            forget(root);
        }
        for (name, handle) in &handles {
            let flags = if *name == "link" { libc::O_PATH } else { libc::O_RDONLY };
            let told = handle.open(&mount, flags).map(|mut file| {
                let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
                let mut text = String::new();
                match file.metadata().unwrap().file_type() {
                    // Directories are connected with the root.
                    kind if kind.is_dir() => text = path.strip_prefix(root).unwrap().display().to_string(),
                    kind if kind.is_file() => drop(file.read_to_string(&mut text).unwrap()),
                    kind => text = format!("{kind:?}"),
                }
                text
            });
            found.push((*name, told));
        }
    }
    drop(held);
    found
}

fn lead_where_those_of_the_host_do(cell: &Cell) {
    let expected = loop {
        let found = outcomes(directory(Place::Disk).path(), false);
        // The host itself returns this while another test's file takes a removed one's number.
        if found.iter().all(|(_, outcome)| *outcome != Err(libc::ENOMEM)) {
            break found;
        }
    };
    assert!(expected[..4].iter().all(|(name, found)| name.ends_with(found.as_ref().unwrap())), "{expected:?}");
    let Some(mounted) = Mounted::new(cell) else { return };
    assert_eq!(outcomes(&mounted.site.path, true), expected, "{cell}");
    mounted.finish();
}
on_cells!(lead_where_those_of_the_host_do:
    quick [dir_devfuse, dir_uring_always, dir_passthrough, mem_devfuse, pmem_devfuse_always]
    long []);

/// A directory that was opened by its handle has the parents that it has, and leads to its files.
#[test]
fn a_deep_tree_is_walked_by_handles_alone() {
    let Some(mounted) = Mounted::new(&"dir_devfuse".parse().unwrap()) else { return };
    let root = &mounted.site.path;
    let mut path = root.clone();
    let mut handles = Vec::new();
    for depth in 0..40 {
        path.push(format!("d{depth}"));
        fs::create_dir(&path).unwrap();
        fs::write(path.join("f"), depth.to_string()).unwrap();
        handles.push((path.clone(), FileHandle::of(&path).unwrap()));
    }
    let mount = File::open(root).unwrap();
    for (path, handle) in handles.iter().rev() {
        forget(root);
        let dir = handle.open(&mount, libc::O_RDONLY | libc::O_DIRECTORY).unwrap();
        let place = format!("/proc/self/fd/{}", dir.as_raw_fd());
        assert_eq!(&fs::read_link(&place).unwrap(), path);
        assert_eq!(fs::read(Path::new(&place).join("f")).unwrap(), fs::read(path.join("f")).unwrap());
    }
    drop(mount);
    mounted.finish();
}

/// Where inodes are not found again, there are no handles rather than ones that lead nowhere.
#[test]
fn sources_without_lookup_by_number_have_no_file_handles() {
    let below = directory(Place::Disk);
    let Some(server) = NinePServer::start(ServerVendor::Ferry, below.path()) else { return };
    let Some(mounted) = Mounted::of_server(&server, &"ninep_devfuse".parse().unwrap(), &Default::default()) else {
        return;
    };
    fs::write(mounted.site.path.join("f"), "").unwrap();
    assert_eq!(FileHandle::of(&mounted.site.path.join("f")).err(), Some(libc::EOPNOTSUPP));
    mounted.finish();
}
