//! Writable mounts of images: overlayfs's upper layer, and its work directory.

use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ferry_fuse::MountEntry;
use ferry_image::Digest;
use rustix::fs::{FlockOperation, XattrFlags, flock, getxattr, setxattr};
use rustix::io::Errno;

/// Longer than any digest as text.
const DIGEST_TEXT_BYTES_MAX: usize = 256;

/// The attribute of the work directory that names the image of the upper layer.
const IMAGE: &str = "trusted.ferry.image";

/// An upper layer that no other process mounts while this lives.
#[derive(Debug)]
pub struct Upper {
    /// The directory of changes. Both paths are absolute.
    pub dir: PathBuf,
    /// The work directory of overlayfs.
    pub work: PathBuf,
    _lock: File,
}

impl Upper {
    /// Creates missing directories, and checks that this can be the upper layer of an image: changes over one image are invalid over
    /// another, and two mounts would destroy each other's.
    pub fn prepare(dir: &Path, work: Option<&Path>, image: Digest) -> Result<Self> {
        let dir = create_dir(dir)?;
        let work = match work {
            Some(work) => create_dir(work)?,
            None => create_dir(&default_work_dir(&dir)?)?,
        };
        if dir.starts_with(&work) || work.starts_with(&dir) {
            bail!("{} and {} must not contain each other", dir.display(), work.display());
        }
        let (upper, other) = (device(&dir)?, device(&work)?);
        if upper != other {
            let (dir, work) = (dir.display(), work.display());
            bail!("{work} is on another file system than {dir}: name a directory on the same one with --work");
        }
        let lock = File::open(&work).with_context(|| format!("cannot open {}", work.display()))?;
        lock_within(&lock, LOCK_TIME)
            .with_context(|| format!("cannot lock {0}, which another process has locked (lsof {0})", work.display()))?;
        let mounts = MountEntry::all().context("cannot read the kernel's mount table")?;
        if let Some(mounted) = mounted_on(&mounts, &dir) {
            bail!("{} is already the upper layer of the mount on {}", dir.display(), mounted.display());
        }
        check_image(&dir, &work, image)?;
        Ok(Self { dir, work, _lock: lock })
    }
}

/// How long to wait for another process that has locked the work directory, because it may be ending. Every process that can open the
/// directory can lock it.
const LOCK_TIME: Duration = Duration::from_secs(10);
const LOCK_TICK: Duration = Duration::from_millis(20);

fn lock_within(file: &File, time: Duration) -> rustix::io::Result<()> {
    let end = Instant::now() + time;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(LOCK_TICK),
            outcome => return outcome,
        }
    }
}

/// Creates a directory unless it exists; returns its absolute path.
fn create_dir(path: &Path) -> Result<PathBuf> {
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot create {}", path.display()));
        }
        _ => {}
    }
    let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    if path.is_dir() { Ok(path) } else { Err(anyhow!("{} is not a directory", path.display())) }
}

/// Returns the default work directory of an upper layer.
fn default_work_dir(dir: &Path) -> Result<PathBuf> {
    let mut name = dir.file_name().ok_or_else(|| anyhow!("{} cannot be an upper layer", dir.display()))?.to_owned();
    name.push(".work");
    Ok(dir.with_file_name(name))
}

fn device(path: &Path) -> Result<u64> {
    Ok(fs::metadata(path).with_context(|| format!("cannot inspect {}", path.display()))?.dev())
}

/// Checks that a layer belongs to this image, or records that it does.
fn check_image(dir: &Path, work: &Path, image: Digest) -> Result<()> {
    let unsupported = || {
        let work = work.display();
        anyhow!("{work} is on a file system without trusted attributes, which overlayfs needs for an upper layer")
    };
    let mut value = [0; DIGEST_TEXT_BYTES_MAX];
    let found = match getxattr(work, IMAGE, &mut value[..]) {
        Ok(bytes) => Digest::parse(&value[..bytes]),
        Err(Errno::NODATA) => {
            let set = setxattr(work, IMAGE, image.to_string().as_bytes(), XattrFlags::empty());
            return match set {
                Err(Errno::OPNOTSUPP) => Err(unsupported()),
                outcome => outcome.with_context(|| format!("cannot change {}", work.display())),
            };
        }
        Err(Errno::OPNOTSUPP) => return Err(unsupported()),
        Err(error) => return Err(error).with_context(|| format!("cannot inspect {}", work.display())),
    };
    match found {
        Some(found) if found == image => Ok(()),
        _ => bail!(
            "{} has the changes of another image{}: choose another directory, or remove it and {}",
            dir.display(),
            found.map(|found| format!(" ({found})")).unwrap_or_default(),
            work.display()
        ),
    }
}

/// Returns the mount point of an overlayfs with this upper layer.
fn mounted_on(mounts: &[MountEntry], upper: &Path) -> Option<PathBuf> {
    let is_it = |mounted: &&MountEntry| {
        mounted.kind == "overlay" && mounted.option("upperdir").is_some_and(|found| found == upper.as_os_str())
    };
    mounts.iter().find(is_it).map(|mounted| mounted.at.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every process that can open a directory can lock it for ever.
    #[test]
    fn the_wait_for_another_process_lock_is_limited() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = || File::open(dir.path()).expect("it is there");
        let (theirs, ours) = (open(), open());
        flock(&theirs, FlockOperation::LockShared).expect("nobody has it");
        assert_eq!(lock_within(&ours, LOCK_TICK * 2), Err(Errno::WOULDBLOCK));
        drop(theirs);
        assert_eq!(lock_within(&ours, Duration::ZERO), Ok(()));
    }

    #[test]
    fn an_upper_layer_is_found_in_the_table_of_mounts() {
        let table = b"22 27 0:21 / /sys rw shared:7 - sysfs sysfs rw\nbroken\n\
            36 35 98:0 / /my\\040mnt rw shared:2 - overlay /a rw,lowerdir+=/x,upperdir=/up\\054per,workdir=/w\n\
            37 35 98:0 / /other rw - ext4 /a rw,upperdir=/ext4\n38 35 0:1 / /low rw - overlay overlay ro,lowerdir=/x\n";
        let table = MountEntry::read(table);
        assert_eq!(mounted_on(&table, Path::new("/up,per")), Some("/my mnt".into()));
        for path in ["/up", "/x", "/ext4", "/w"] {
            assert_eq!(mounted_on(&table, Path::new(path)), None, "{path}");
        }
    }
}
