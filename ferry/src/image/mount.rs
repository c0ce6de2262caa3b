//! `ferry image mount`: the kernel's EROFS, below overlayfs for composefs images and writable mounts. [`super::lazy`] mounts
//! incomplete images.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use ferry_image::{Data, Image, InodeShare, PackRef, Store, configure_erofs, kernel_messages, objects_directory};
use ferry_vfs::FileType;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, move_mount, unmount,
};

use super::args::{ImageArg, LazyArgs, StoreArg};
use super::loops::Loop;
use super::option_strings::{STRING_BYTES_MAX, escaped};
use super::private_root;
use super::upper::Upper;
use super::verity::{self, Packs, VerityPolicy};
use super::watch::KernelMountError;
use crate::paths::descriptor_path;

/// Why an incomplete image cannot be mounted: holes would be read as zeros.
pub(super) const NEEDS_BLOCK_DEVICE: &str = "the kernel mounts this image from block devices only, whose readers cannot wait for missing \
    data (keep it on ext4, XFS or btrfs, with Linux 6.14 or later)";

#[derive(Clone, Debug, clap::Args)]
pub struct MountArgs {
    #[command(flatten)]
    pub(super) image: ImageArg,
    /// The directory to mount on.
    #[arg(value_name = "DIR")]
    pub(super) dir: PathBuf,
    #[command(flatten)]
    pub(super) store: StoreArg,
    /// Make the mount writable, and keep the changes in this directory, for later mounts of the same image with it.
    #[arg(long, value_name = "DIR")]
    upper: Option<PathBuf>,
    /// The work directory of overlayfs, on the file system of the upper one [default: the upper directory's name plus .work].
    #[arg(long, value_name = "DIR", requires = "upper")]
    work: Option<PathBuf>,
    /// With --digest, whether to refuse a mount if the kernel cannot verify reads with fs-verity: auto refuses only if the file
    /// system supports it and a pack built with --verity lacks it; require always refuses. Objects of the composefs layout always
    /// need it.
    #[arg(long, value_enum, value_name = "auto|require", default_value_t = VerityPolicy::Auto, requires_if("require", "digest"))]
    #[arg(hide_possible_values = true)]
    verity: VerityPolicy,
    /// Let set-user-id programs (suid) and device nodes (dev) of the image take effect on this host; by default the mount is
    /// nosuid and nodev.
    #[arg(short = 'o', value_enum, value_name = "OPTIONS", value_delimiter = ',')]
    pub(super) options: Vec<Word>,
    /// Share the memory of files with the same files of other images that are mounted so, from the same store (Linux 7.0 or later; an
    /// image built with --inode-share). Programs cannot open such files with O_DIRECT.
    #[arg(long, conflicts_with = "from")]
    inode_share: bool,
    /// Mount from loop devices, the default before Linux 6.12.
    #[arg(long = "loop", conflicts_with = "from")]
    by_loop: bool,
    #[command(flatten)]
    pub(super) lazily: LazyArgs,
}

/// A supported option of mount(8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Word {
    Suid,
    Nosuid,
    Dev,
    Nodev,
}

impl MountArgs {
    /// Makes its paths absolute, relative to `directory`; not those of an image that is yet to be pulled, whose directory is renamed then.
    pub fn resolve_paths(&mut self, directory: &Path) {
        let Self { image: ImageArg { image, .. }, dir, store: StoreArg { store }, upper, work, lazily, .. } = self;
        let own = [image, dir].into_iter().filter(|_| lazily.pull.is_none());
        for path in own.chain([store]).chain(upper).chain(work) {
            *path = directory.join(&*path);
        }
    }

    /// Returns the mount attributes; the last option of each pair wins.
    fn attributes(&self) -> MountAttrFlags {
        let (nosuid, nodev) = (MountAttrFlags::MOUNT_ATTR_NOSUID, MountAttrFlags::MOUNT_ATTR_NODEV);
        self.options.iter().fold(nosuid | nodev, |attributes, word| match word {
            Word::Suid => attributes - nosuid,
            Word::Nosuid => attributes | nosuid,
            Word::Dev => attributes - nodev,
            Word::Nodev => attributes | nodev,
        })
    }

    /// Returns the first flag that needs a mount by the kernel.
    pub(super) fn only_by_kernel(&self) -> Option<&'static str> {
        let asked = [
            (self.upper.is_some(), "--upper"),
            (self.by_loop, "--loop"),
            (self.inode_share, "--inode-share"),
            (self.verity == VerityPolicy::Require, "--verity require"),
        ];
        asked.into_iter().find(|(is_asked, _)| *is_asked).map(|(_, flag)| flag)
    }
}

/// Attaches an image; returns the id of the mount. `elsewhere` returns the paths of incomplete packs, by their index in the image.
pub(super) fn attach(args: &MountArgs, image: &Image, elsewhere: &dyn Fn(usize) -> Option<PathBuf>) -> Result<u64> {
    // The file of this name may no longer be the one that was read.
    let (image, file) = Image::open_with_file(&args.image.image, Some(image.digest()))?;
    attach_file(args, &image, &file, elsewhere)
}

/// The same for an image that was read from this file.
pub(super) fn attach_file(
    args: &MountArgs,
    image: &Image,
    file: &File,
    elsewhere: &dyn Fn(usize) -> Option<PathBuf>,
) -> Result<u64> {
    let (store, is_proved) = (args.store.store.as_path(), args.image.digest.is_some());
    let path = &args.image.image;
    let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    if is_proved && image.is_composefs() && !has_verity(image, store)? {
        bail!(
            "the objects in {} have no fs-verity, so the kernel cannot verify the data of files: mount without --digest \
             after ferry image verify --digest, or use ferry mount image:{} --digest, which verifies it itself",
            objects_directory(store).display(),
            path.display()
        );
    }
    let prepare = |upper: &PathBuf| Upper::prepare(upper, args.work.as_deref(), image.digest());
    let upper = args.upper.as_ref().map(prepare).transpose()?;
    let share = args.inode_share.then(|| inode_share(image, &path, store)).transpose()?;
    let share = if args.verity == VerityPolicy::Require { share.map(InodeShare::verified) } else { share };
    // The file of this name may no longer be the one that was verified.
    let proved = (is_proved || share.is_some()).then_some(file);
    // Kept open until the kernel has opened them.
    let packs = if is_proved && !image.is_composefs() {
        verity::check((image, file, &path), store, elsewhere, args.verity)?
    } else {
        Packs { paths: packs(image, store, elsewhere)?, files: Vec::new() }
    };
    let attributes = args.attributes();
    let loops = match args.by_loop {
        true => LoopUse::Always,
        false if (0..image.packs().len()).any(|number| elsewhere(number).is_some()) => LoopUse::Never,
        false => LoopUse::IfNeeded,
    };
    let mut mounted = erofs((image, share.as_ref()), (proved, &path), &packs.paths, (loops, attributes))?;
    drop(packs.files);
    if image.is_composefs() || upper.is_some() {
        let objects = objects_directory(store);
        let objects = objects.canonicalize().with_context(|| format!("cannot find {}", objects.display()))?;
        let layers = Layers {
            image: &path,
            lower: &mounted,
            objects: image.is_composefs().then_some(&objects),
            upper: upper.as_ref(),
            verity: is_proved && image.is_composefs(),
            attributes,
        };
        mounted = layers.mount(args.by_loop)?;
    }
    let found = statx(&mounted, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).context("cannot inspect the mount")?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    move_mount(mounted.as_fd(), "", CWD, &args.dir, flags)
        .with_context(|| format!("cannot mount on {}", args.dir.display()))?;
    // A build marks at most one pack; an image that marks more must not fill the memory.
    let ahead = image.packs().iter().enumerate().find(|(_, pack)| pack.ahead);
    if let Some((_, pack)) = ahead.filter(|(number, _)| elsewhere(*number).is_none()) {
        // The mount works without it.
        let ahead = Store::open(store).and_then(|store| store.read_ahead(pack.name));
        if let Err(error) = ahead {
            tracing::warn!("cannot read the first pack ahead: {error}");
        }
    }
    Ok(found.stx_mnt_id)
}

/// Verifies that the page cache of an image's files can be shared.
fn inode_share(image: &Image, path: &Path, store: &Path) -> Result<InodeShare> {
    if let Some(why) = InodeShare::missing() {
        bail!(
            "this kernel cannot share the memory of files between mounts (Linux 7.0 or later with EROFS_FS_PAGE_CACHE_SHARE can): {why}; mount \
             without --inode-share"
        );
    }
    InodeShare::of(image, path, &Store::open(store)?)?.with_context(|| {
        format!("{} has no identities of files: build it with --inode-share, or mount without it", path.display())
    })
}

/// Whether the first object of an image has fs-verity. Reads of another object without it fail with EIO.
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
                    let path = objects_directory(store).join(OsStr::from_bytes(path));
                    let found = statx(CWD, &path, AtFlags::empty(), StatxFlags::TYPE);
                    let found = found.with_context(|| format!("cannot inspect {}", path.display()))?;
                    return Ok(found.stx_attributes.contains(StatxAttributes::VERITY));
                }
            }
            _ => {}
        }
    }
    Ok(true)
}

/// A configured mount context, or the context and the error of the kernel.
type Configured = std::result::Result<OwnedFd, (OwnedFd, Errno)>;

fn finish(outcome: rustix::io::Result<()>, context: OwnedFd) -> Configured {
    match outcome {
        Ok(()) => Ok(context),
        Err(error) => Err((context, error)),
    }
}

/// Opens a mount context.
pub(super) fn context(kind: &str) -> Result<OwnedFd> {
    match fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC) {
        Ok(context) => Ok(context),
        Err(Errno::NODEV) => KernelMountError::fail(format!("this kernel has no {kind} (modprobe {kind})")),
        Err(Errno::NOSYS) => KernelMountError::fail("this kernel is older than Linux 5.2"),
        Err(Errno::PERM) => KernelMountError::fail("only root can mount images with the kernel"),
        Err(error) => Err(error).with_context(|| format!("cannot begin a mount of type {kind}")),
    }
}

/// Returns the error of a failed mount with the kernel's messages.
fn with_kernel_messages(context: &OwnedFd, error: Errno) -> anyhow::Error {
    let error = anyhow::Error::from(std::io::Error::from(error));
    match kernel_messages(context) {
        Some(messages) => error.context(messages),
        None => error,
    }
}

fn packs(image: &Image, store: &Path, elsewhere: &dyn Fn(usize) -> Option<PathBuf>) -> Result<Vec<PathBuf>> {
    if image.packs().is_empty() {
        return Ok(Vec::new());
    }
    let store = Store::open(store)?;
    let path = |(number, pack): (usize, &PackRef)| {
        elsewhere(number).unwrap_or_else(|| {
            let pack = store.pack_path(pack.name);
            std::path::absolute(&pack).unwrap_or(pack)
        })
    };
    Ok(image.packs().iter().enumerate().map(path).collect())
}

/// Whether to mount from loop devices.
#[derive(Clone, Copy)]
enum LoopUse {
    Always,
    /// If the kernel accepts only block devices.
    IfNeeded,
    /// The image is incomplete: the loop driver's reads cause no events, so holes would be read as zeros.
    Never,
}

/// Returns a detached mount of the image: from the file that was verified, if there is one, else from `path`.
fn erofs(
    (image, share): (&Image, Option<&InodeShare>),
    (proved, path): (Option<&File>, &Path),
    packs: &[PathBuf],
    (loops, attributes): (LoopUse, MountAttrFlags),
) -> Result<OwnedFd> {
    let attributes = attributes | MountAttrFlags::MOUNT_ATTR_RDONLY;
    let refused = || format!("the kernel does not mount {}", path.display());
    if !matches!(loops, LoopUse::Always) {
        let files: Vec<&Path> = packs.iter().map(PathBuf::as_path).collect();
        let configured = match proved {
            Some(proved) if path.as_os_str().len() <= STRING_BYTES_MAX => {
                configure_proved((image, share), (proved, path), &files)?
            }
            Some(proved) => configure((image, share), &descriptor_path(proved), &files)?,
            None => configure((image, share), path, &files)?,
        };
        match configured {
            Ok(context) => return detached_mount(&context, path, attributes),
            Err((_, Errno::NOTBLK)) if matches!(loops, LoopUse::Never) => bail!(NEEDS_BLOCK_DEVICE),
            Err((_, Errno::NOTBLK)) => {}
            Err((context, error)) => return Err(with_kernel_messages(&context, error)).with_context(refused),
        }
    }
    // Mounted loop devices stay; others are released at the end of this function.
    let source = proved.map(descriptor_path);
    let source = Loop::attach(source.as_deref().unwrap_or(path))?;
    let loops = packs.iter().map(|pack| Loop::attach(pack)).collect::<Result<Vec<_>>>()?;
    let devices: Vec<&Path> = loops.iter().map(|device| device.path.as_path()).collect();
    match configure((image, share), &source.path, &devices)? {
        Ok(context) => detached_mount(&context, path, attributes),
        Err((context, error)) => Err(with_kernel_messages(&context, error)).with_context(refused),
    }
}

/// Calls [`configure`] with the file that was verified. The mount table shows its path; if the file was removed, it shows a
/// descriptor.
fn configure_proved(
    image: (&Image, Option<&InodeShare>),
    (proved, path): (&File, &Path),
    packs: &[&Path],
) -> Result<Configured> {
    let open = |pack: &&Path| File::open(pack).with_context(|| format!("cannot open {}", pack.display()));
    let opened = packs.iter().map(open).collect::<Result<Vec<_>>>()?;
    let places = private_root::placeholder_paths(packs.len());
    let devices: Vec<&Path> = places.iter().map(PathBuf::as_path).collect();
    let files: Vec<_> = [(path, proved)].into_iter().chain(devices.iter().copied().zip(&opened)).collect();
    private_root::with_files(&files, || configure(image, path, &devices)).unwrap_or_else(|error| {
        tracing::debug!("the mount table will not show the name of the image: {error}");
        configure(image, &descriptor_path(proved), packs)
    })
}

/// Configures a mount of the image.
fn configure((image, share): (&Image, Option<&InodeShare>), source: &Path, devices: &[&Path]) -> Result<Configured> {
    let context = context("erofs")?;
    Ok(finish(configure_erofs(&context, image, source, devices, share), context))
}

fn detached_mount(context: &OwnedFd, path: &Path, attributes: MountAttrFlags) -> Result<OwnedFd> {
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .with_context(|| format!("cannot mount {}", path.display()))
}

/// The layers of an overlayfs.
struct Layers<'a> {
    image: &'a Path,
    lower: &'a OwnedFd,
    /// The objects of composefs, visible only through redirections of the image.
    objects: Option<&'a PathBuf>,
    upper: Option<&'a Upper>,
    /// Whether the kernel verifies the objects.
    verity: bool,
    attributes: MountAttrFlags,
}

impl Layers<'_> {
    /// Returns a detached mount of the layers. Before Linux 6.15, overlayfs accepts no detached layers, so the image is mounted
    /// on a directory of a private namespace: overlayfs then has its own mount of each layer.
    fn mount(&self, by_directory: bool) -> Result<OwnedFd> {
        if !by_directory {
            match self.configure(None)? {
                Ok(context) => return self.detached_mount(&context),
                Err((_, Errno::INVAL)) => {}
                Err((context, error)) => return Err(self.refused(with_kernel_messages(&context, error))),
            }
        }
        let directory = tempfile::Builder::new().prefix("ferry-image.").tempdir();
        let directory =
            directory.map_err(|error| anyhow!("cannot create a directory for a temporary mount: {error}"))?;
        let on_directory = || {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(self.lower.as_fd(), "", CWD, directory.path(), flags)
                .with_context(|| format!("cannot mount on {}", directory.path().display()))?;
            self.configure(Some(directory.path()))
        };
        let configured = match private_root::with_private_mounts(on_directory) {
            // After chroot(1) mounts cannot be private: others see this one for a moment.
            Err(Errno::INVAL) => {
                let configured = on_directory();
                if let Err(error) = unmount(directory.path(), UnmountFlags::DETACH) {
                    tracing::warn!("cannot unmount {}: {error}", directory.path().display());
                }
                configured
            }
            configured => configured.context("cannot create a mount namespace for a temporary mount")?,
        };
        match configured? {
            Ok(context) => self.detached_mount(&context),
            Err((context, error)) => Err(self.refused(with_kernel_messages(&context, error))),
        }
    }

    fn detached_mount(&self, context: &OwnedFd) -> Result<OwnedFd> {
        let read_only = if self.upper.is_none() { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
        detached_mount(context, self.image, self.attributes | read_only)
    }

    fn refused(&self, error: anyhow::Error) -> anyhow::Error {
        let upper = match self.upper {
            Some(upper) => format!(" with the upper layer {}", upper.dir.display()),
            None => String::new(),
        };
        let needed = if self.objects.is_some() { " (composefs needs Linux 6.6 or later)" } else { "" };
        error.context(format!("overlayfs does not mount {}{upper}{needed}", self.image.display()))
    }

    /// Configures the mount; with `lower`, for kernels that need the image on a directory.
    fn configure(&self, lower: Option<&Path>) -> Result<Configured> {
        let context = context("overlay")?;
        let fs = context.as_fd();
        if self.verity {
            fsconfig_set_string(fs, "verity", "require")
                .context("this kernel's overlayfs cannot verify the data of files (Linux 6.6 or later can)")?;
        }
        // Opened in the mount namespace of this thread, and kept open until the kernel has opened it.
        let opened = self.objects.map(File::open).transpose().context("cannot open the directory of objects")?;
        let lower_bytes = lower.map_or(0, |lower| escaped(lower).len() + "::".len());
        let fits = |objects: &&PathBuf| lower_bytes + escaped(objects).len() <= STRING_BYTES_MAX;
        let objects = self.objects.filter(fits).cloned().or_else(|| opened.as_ref().map(descriptor_path));
        let configured = || -> rustix::io::Result<()> {
            // overlayfs only shows it.
            let long = self.image.as_os_str().len() > STRING_BYTES_MAX;
            let name = self.image.file_name().filter(|_| long).unwrap_or(self.image.as_os_str());
            fsconfig_set_string(fs, "source", name)?;
            match lower {
                Some(lower) => {
                    let mut layers = escaped(lower);
                    if let Some(objects) = &objects {
                        layers.push("::");
                        layers.push(escaped(objects));
                    }
                    fsconfig_set_string(fs, "lowerdir", layers)?;
                }
                None => {
                    fsconfig_set_string(fs, "lowerdir+", descriptor_path(self.lower))?;
                    if let Some(objects) = &objects {
                        fsconfig_set_string(fs, "datadir+", objects.as_path())?;
                    }
                }
            }
            if self.objects.is_some() {
                fsconfig_set_string(fs, "metacopy", "on")?;
                fsconfig_set_string(fs, "redirect_dir", "on")?;
            }
            if let Some(upper) = self.upper {
                fsconfig_set_string(fs, "upperdir", escaped(&upper.dir))?;
                fsconfig_set_string(fs, "workdir", escaped(&upper.work))?;
            }
            fsconfig_create(fs)
        };
        Ok(finish(configured(), context))
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    use clap::Parser;
    use ferry_image::{BuildOptions, build};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: MountArgs,
    }

    #[test]
    fn the_file_that_was_proved_is_mounted() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let at = |name: &str| directory.path().join(name).into_os_string();
        let digest = ["good", "bad"].map(|name| {
            fs::create_dir(at("tree")).expect("directories can be made");
            fs::write(Path::new(&at("tree")).join(name), "some").expect("files can be made");
            let store = Store::create(Path::new(&at("store"))).expect("directories can be made");
            let (tree, image) = (at("tree"), at(name));
            let built = build(Path::new(&tree), Path::new(&image), store, &BuildOptions::default(), &|_, _| {});
            fs::remove_dir_all(at("tree")).expect("directories can be removed");
            built.expect("it can be built").digest.to_string()
        });
        for further in [None, Some("--loop")] {
            fs::copy(at("good"), at("image")).expect("files can be copied");
            fs::create_dir_all(at("mnt")).expect("directories can be made");
            let digest = OsString::from(&digest[0]);
            let words =
                ["mount".into(), at("image"), at("mnt"), "--store".into(), at("store"), "--digest".into(), digest];
            let args = Line::parse_from(words.into_iter().chain(further.map(OsString::from))).args;
            let opened = Image::open_with_file(&args.image.image, args.image.digest());
            let (image, file) = opened.expect("it has the digest");
            fs::copy(at("bad"), at("other")).expect("files can be copied");
            fs::rename(at("other"), at("image")).expect("files can be renamed");
            if let Err(error) = attach_file(&args, &image, &file, &|_| None) {
                let said = format!("{error:#}");
                assert!(["this kernel", "only root", "loop"].iter().any(|why| said.contains(why)), "{said}");
                ferry_skip::skip!("{said}");
                continue;
            }
            let found: Vec<_> = fs::read_dir(at("mnt"))
                .map(|names| names.flatten().map(|name| name.file_name()).collect())
                .unwrap_or_default();
            unmount(Path::new(&at("mnt")), UnmountFlags::empty()).expect("nobody uses it");
            assert_eq!(found, ["good"]);
        }
    }
}
