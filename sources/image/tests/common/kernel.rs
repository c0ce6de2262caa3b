//! Images that the kernel mounts.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use ferry_image::{Image, Store};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};

use super::Bench;

/// A mounted image. It is unmounted at the end.
pub struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, UnmountFlags::DETACH);
    }
}

/// Mounts an image; `None` if this kernel cannot mount images that are files (before Linux 6.12).
pub fn mount<'a>(bench: &Bench, name: &str, on: &'a Path) -> Option<Mounted<'a>> {
    let image = Image::open(&bench.path(name), None).expect("what was built can be opened");
    let store = Store::open(&bench.store()).expect("the store is there");
    let context = match rustix::mount::fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC) {
        Err(Errno::NODEV) => return None,
        context => context.expect("root may mount"),
    };
    let fs = context.as_fd();
    rustix::mount::fsconfig_set_string(fs, "source", bench.path(name)).expect("a source is taken");
    for pack in image.packs() {
        rustix::mount::fsconfig_set_string(fs, "device", store.pack_path(pack.name)).expect("a device is taken");
    }
    match rustix::mount::fsconfig_create(fs) {
        Err(Errno::NOTBLK) => return None,
        outcome => outcome.expect("the kernel takes the image"),
    }
    let mount = rustix::mount::fsmount(fs, FsMountFlags::empty(), MountAttrFlags::MOUNT_ATTR_RDONLY);
    fs::create_dir_all(on).expect("a directory can be made");
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount.expect("it is mounted").as_fd(), "", rustix::fs::CWD, on, flags)
        .expect("it is mounted");
    Some(Mounted(on))
}

/// Mounts an image of composefs's as `mount.composefs` does, below overlayfs, with the objects of a directory; `None` if this kernel cannot.
pub fn mount_composefs<'a>(image: &Path, objects: &Path, on: &'a Path) -> Option<Mounted<'a>> {
    let erofs = match rustix::mount::fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC) {
        Err(Errno::NODEV) => return None,
        context => context.expect("root may mount"),
    };
    rustix::mount::fsconfig_set_string(erofs.as_fd(), "source", image).expect("a source is taken");
    match rustix::mount::fsconfig_create(erofs.as_fd()) {
        Err(Errno::NOTBLK) => return None,
        outcome => outcome.expect("the kernel takes the image"),
    }
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    let lower = rustix::mount::fsmount(erofs.as_fd(), FsMountFlags::empty(), attributes).expect("it is mounted");
    let overlay = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).expect("root may mount");
    let set = |name: &str, value: &Path| rustix::mount::fsconfig_set_string(overlay.as_fd(), name, value);
    let layer = format!("/proc/self/fd/{}", lower.as_raw_fd());
    // Older kernels take no layer that is mounted nowhere: what is done there, the program's own tests look at.
    set("lowerdir+", Path::new(&layer)).ok()?;
    set("datadir+", objects).ok()?;
    for name in ["metacopy", "redirect_dir"] {
        set(name, Path::new("on")).expect("overlayfs has it");
    }
    rustix::mount::fsconfig_create(overlay.as_fd()).expect("overlayfs takes the image");
    let mount = rustix::mount::fsmount(overlay.as_fd(), FsMountFlags::empty(), attributes).expect("it is mounted");
    fs::create_dir_all(on).expect("a directory can be made");
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount.as_fd(), "", rustix::fs::CWD, on, flags).expect("it is mounted");
    Some(Mounted(on))
}
