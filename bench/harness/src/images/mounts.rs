//! Mounted images of each kind, unmounted when dropped.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};

use super::made::{BuiltImage, Programs};
use super::systems::{Device, Prefetch, System};
use crate::mounted::Mounted;
use crate::process;

/// How long a program may take to mount.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(30);

/// A mounted image.
#[derive(Debug)]
pub struct Tree {
    dir: PathBuf,
    /// A server of ours.
    server: Option<Mounted>,
    /// What is to be unmounted, the last one first.
    mounts: Vec<PathBuf>,
}

impl Tree {
    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where to look for why its server failed.
    pub fn last_words(&self) -> Option<String> {
        self.server.as_ref().map(Mounted::last_words)
    }

    /// A tree that is nothing but a directory.
    pub fn bare(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), server: None, mounts: Vec::new() }
    }

    /// Mounts an image in a directory below `directory`.
    pub fn mount(system: System, made: &BuiltImage, directory: &Path, programs: &Programs) -> Result<Self> {
        let dir = directory.join(system.name().replace(' ', "-"));
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let mut tree = Self { dir: dir.clone(), server: None, mounts: Vec::new() };
        match system {
            System::Ferry | System::FerryOrdered | System::FerryComposefs => {
                let mut command = Command::new(&programs.ferry);
                command.args(["image", "mount"]).arg(made.image()).arg(&dir).arg("--store").arg(made.data());
                tree.run(command, directory)?;
            }
            System::FerryFuse | System::FerryComposefsFuse => {
                let mut source = OsString::from("image:");
                source.push(made.image());
                let ferry: OsString = programs.ferry.clone().into();
                let mut words: Vec<OsString> = vec![ferry, "mount".into(), source, dir.into(), "--store".into()];
                words.push(made.data().into());
                words.extend(["--foreground", "--cache", "always"].map(OsString::from));
                tree.server = Some(Mounted::new(tree.dir.clone(), Some(words))?);
            }
            System::Composefs(ahead) => {
                read_ahead(ahead, &made.image())?;
                let program = programs.composefs.as_ref().context("there is no composefs")?.join("mount.composefs");
                let mut base = OsString::from("basedir=");
                base.push(made.data());
                let mut command = Command::new(program);
                command.arg("-o").arg(base).arg(made.image()).arg(&dir);
                tree.run(command, directory)?;
            }
            System::Overlay(device) => {
                let lower = directory.join(format!("{}-lower", system.name()));
                tree.erofs(&lower, device, &[&made.image()])?;
                let data = made.data();
                let options = [
                    ("metacopy", Some(Path::new("on"))),
                    ("redirect_dir", Some(Path::new("follow"))),
                    ("lowerdir+", Some(&*lower)),
                    ("datadir+", Some(&*data)),
                ];
                tree.attach("overlay", &options, &dir)?;
            }
            System::Full(device) => tree.erofs(&dir, device, &[&made.image()])?,
            System::Blob(device, ahead) => {
                read_ahead(ahead, &made.image())?;
                tree.erofs(&dir, device, &[&made.image(), &made.data()])?;
            }
            System::FerryGuest | System::ComposefsGuest | System::BlobGuest | System::Bare => {
                bail!("nothing is mounted there")
            }
        }
        Ok(tree)
    }

    /// Runs a program that mounts on the tree's directory.
    fn run(&mut self, command: Command, directory: &Path) -> Result<()> {
        process::run(command, directory, MOUNT_TIMEOUT)?;
        self.mounts.push(self.dir.clone());
        Ok(())
    }

    /// Mounts an EROFS image with the other devices that it has.
    fn erofs(&mut self, dir: &Path, device: Device, files: &[&Path]) -> Result<()> {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let loops: Vec<Loop> = match device {
            Device::File => Vec::new(),
            Device::Loop => files.iter().map(|file| Loop::attach(file)).collect::<Result<_>>()?,
        };
        let devices: Vec<&Path> = match device {
            Device::File => files.to_vec(),
            Device::Loop => loops.iter().map(|device| &*device.0).collect(),
        };
        let mut options: Vec<(&str, Option<&Path>)> = vec![("source", devices.first().copied()), ("ro", None)];
        options.extend(devices.iter().skip(1).map(|device| ("device", Some(*device))));
        self.attach("erofs", &options, dir)
    }

    /// Mounts with the new calls: mount(8) would put every image on a loop device.
    fn attach(&mut self, kind: &str, options: &[(&str, Option<&Path>)], dir: &Path) -> Result<()> {
        let context = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)
            .with_context(|| format!("this kernel has no file system {kind}"))?;
        for (name, value) in options {
            match value {
                Some(value) => rustix::mount::fsconfig_set_string(context.as_fd(), *name, *value),
                None => rustix::mount::fsconfig_set_flag(context.as_fd(), *name),
            }
            .with_context(|| format!("{kind} does not take the option {name}"))?;
        }
        rustix::mount::fsconfig_create(context.as_fd()).with_context(|| format!("{kind} does not mount it"))?;
        let flags = MountAttrFlags::MOUNT_ATTR_RDONLY;
        rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, flags)
            .and_then(|mount| {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                rustix::mount::move_mount(mount.as_fd(), "", rustix::fs::CWD, dir, flags)
            })
            .with_context(|| format!("cannot mount on {}", dir.display()))?;
        self.mounts.push(dir.to_owned());
        Ok(())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for dir in self.mounts.iter().rev() {
            if rustix::mount::unmount(dir, UnmountFlags::empty()).is_err() {
                // A process still uses it; it is unmounted when that ends.
                let _ = rustix::mount::unmount(dir, UnmountFlags::DETACH);
            }
        }
    }
}

fn read_ahead(ahead: Prefetch, image: &Path) -> Result<()> {
    if ahead == Prefetch::Yes {
        let mut file = File::open(image).with_context(|| format!("cannot open {}", image.display()))?;
        std::io::copy(&mut file, &mut std::io::sink()).context("cannot read the image")?;
    }
    Ok(())
}

/// A loop device. The kernel detaches it when it is neither held nor mounted any more.
#[derive(Debug)]
struct Loop(PathBuf);

impl Loop {
    fn attach(file: &Path) -> Result<Self> {
        let output = Command::new("losetup").args(["--find", "--show", "--read-only"]).arg(file).output();
        let output = output.context("cannot start losetup")?;
        let said = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            bail!("losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self(said.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
