//! `ferry image mount`: the kernel's own EROFS, for images of the layout composefs with overlayfs on top.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use ferry_image::{Data, Digest, Image, Objects, Store, objects_folder};
use ferry_vfs::FileType;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen, move_mount,
};

/// Mounts an image; with a digest only if it has that one, and only if the kernel proves the bytes of a composefs image's files.
pub fn mount(path: &Path, digest: Option<Digest>, dir: &Path, store: &Path) -> Result<()> {
    let image = Image::open(path, digest)?;
    // What it needs is there, and packs are of the right length.
    Objects::open(&image, store)?;
    if !dir.is_dir() {
        bail!("{} is no directory: make it first", dir.display());
    }
    let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    if digest.is_some() && image.is_composefs() && !has_verity(&image, store)? {
        bail!(
            "the objects in {} have no fs-verity, so the kernel cannot prove the bytes of files: mount without --digest \
             after ferry image verify --digest, or use ferry mount image:{} --digest, which proves them itself",
            objects_folder(store).display(),
            path.display()
        );
    }
    let mut mounted = erofs(&image, &path, store)?;
    if image.is_composefs() {
        mounted = overlay(&mounted, &path, store, digest.is_some())?;
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mounted.as_fd(), "", CWD, dir, flags).with_context(|| format!("cannot mount on {}", dir.display()))
}

/// Whether the first object of an image has fs-verity. If another one has not, its readers get EIO.
fn has_verity(image: &Image, store: &Path) -> Result<bool> {
    let mut left = vec![image.root()];
    let mut seen = HashSet::new();
    while let Some(nid) = left.pop() {
        let inode = image.inode(nid)?;
        match inode.kind() {
            FileType::Directory if seen.insert(nid) => {
                for entry in image.entries(&inode, 0)? {
                    let entry = entry?;
                    left.extend(Some(entry.nid).filter(|_| !matches!(entry.name, b"." | b"..")));
                }
            }
            FileType::RegularFile => {
                if let Data::Object { path: Some(path), .. } = image.data(&inode)? {
                    let path = objects_folder(store).join(OsStr::from_bytes(path));
                    let found = statx(CWD, &path, AtFlags::empty(), StatxFlags::TYPE);
                    let found = found.with_context(|| format!("cannot look at {}", path.display()))?;
                    return Ok(found.stx_attributes.contains(StatxAttributes::VERITY));
                }
            }
            _ => {}
        }
    }
    Ok(true)
}

fn context(kind: &str) -> Result<OwnedFd> {
    match fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(context) => Ok(context),
        Err(Errno::NODEV) => bail!("this kernel has no {kind} (modprobe {kind})"),
        Err(Errno::PERM) => bail!("only root can mount images with the kernel"),
        Err(error) => Err(error).with_context(|| format!("cannot begin a mount of type {kind}")),
    }
}

/// The image itself, mounted nowhere yet. The new calls take any number of packs; mount(2) has room for some forty.
fn erofs(image: &Image, path: &Path, store: &Path) -> Result<OwnedFd> {
    let context = context("erofs")?;
    let packs = match image.packs() {
        [] => Vec::new(),
        packs => {
            let store = Store::open(store)?;
            packs.iter().map(|pack| store.pack_path(pack.name)).collect()
        }
    };
    let configured = || -> rustix::io::Result<()> {
        let fs = context.as_fd();
        fsconfig_set_string(fs, "source", path)?;
        fsconfig_set_flag(fs, "ro")?;
        if !image.may_have_acls() {
            fsconfig_set_flag(fs, "noacl")?;
        }
        for pack in &packs {
            fsconfig_set_string(fs, "device", std::path::absolute(pack).unwrap_or_else(|_| pack.clone()))?;
        }
        fsconfig_create(fs)
    };
    match configured() {
        Ok(()) => {}
        Err(Errno::NOTBLK) => bail!("this kernel mounts images from block devices only: Linux 6.12 or later is needed"),
        Err(error) => return Err(error).with_context(|| format!("the kernel does not mount {}", path.display())),
    }
    read_only(&context, path)
}

fn read_only(context: &OwnedFd, path: &Path) -> Result<OwnedFd> {
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_RDONLY)
        .with_context(|| format!("cannot mount {}", path.display()))
}

/// overlayfs over the image and, below it, the objects, which are seen through the image's redirections only.
fn overlay(lower: &OwnedFd, path: &Path, store: &Path, verity: bool) -> Result<OwnedFd> {
    let context = context("overlay")?;
    let objects = objects_folder(store);
    let objects = objects.canonicalize().with_context(|| format!("cannot find {}", objects.display()))?;
    let set = |key: &str, value: &str| fsconfig_set_string(context.as_fd(), key, value);
    if verity {
        set("verity", "require")
            .context("this kernel's overlayfs does not prove the bytes of files (Linux 6.6 or later does)")?;
    }
    let configured = || -> rustix::io::Result<()> {
        fsconfig_set_string(context.as_fd(), "source", path)?;
        set("metacopy", "on")?;
        set("redirect_dir", "on")?;
        set("lowerdir+", &format!("/proc/self/fd/{}", lower.as_raw_fd()))?;
        fsconfig_set_string(context.as_fd(), "datadir+", objects.as_path())?;
        fsconfig_create(context.as_fd())
    };
    configured()
        .with_context(|| format!("overlayfs does not mount {} (Linux 6.15 or later is needed)", path.display()))?;
    read_only(&context, path)
}
