//! Writable mounts of images: overlayfs's upper layer, and its work directory.

use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use ferry_fuse::MountEntry;
use ferry_image::Digest;
use rustix::fs::{AtFlags, CWD, FlockOperation, StatxFlags, XattrFlags, flock, getxattr, setxattr, statx};
use rustix::io::Errno;

use super::container::directory;
use super::option_strings::{STRING_BYTES_MAX, escaped, unescaped};

/// Longer than any digest as text.
const DIGEST_TEXT_BYTES_MAX: usize = 256;

/// The attribute of the upper directory that names its image. overlayfs neither shows nor copies it.
const IMAGE: &str = "trusted.overlay.ferry.image";
/// The attribute of the work directory where earlier builds recorded it.
const IMAGE_OF_WORK: &str = "trusted.ferry.image";

/// An upper layer that no other process mounts while this lives.
#[derive(Debug)]
pub struct Upper {
    /// The directory of changes. Both paths are absolute.
    pub dir: PathBuf,
    /// The work directory of overlayfs.
    pub work: PathBuf,
    _locks: [File; 2],
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
        let found = |path| statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID);
        let mount = |path| found(path).map(|found| (found.stx_mnt_id, found.stx_dev_major, found.stx_dev_minor));
        if mount(&dir) != mount(&work) {
            let (dir, work) = (dir.display(), work.display());
            bail!(
                "{work} is on another mount or file system than {dir}: use a subdirectory of {dir}, or name a directory on the same \
                 mount with --work"
            );
        }
        let locks = [locked(&dir)?, locked(&work)?];
        let mounts = MountEntry::all().context("cannot read the kernel's mount table")?;
        for path in [&dir, &work] {
            if let Some((role, at)) = use_of(&mounts, path) {
                bail!("{} is already the {role} of the mount on {}", path.display(), at.display());
            }
        }
        check_image(&dir, &work, image)?;
        Ok(Self { dir, work, _locks: locks })
    }
}

/// Opens and locks a directory.
fn locked(dir: &Path) -> Result<File> {
    let file = File::open(dir).with_context(|| format!("cannot open {}", dir.display()))?;
    lock_within(&file, LOCK_TIME)
        .with_context(|| format!("cannot lock {0}, which another process has locked (lsof {0})", dir.display()))?;
    Ok(file)
}

/// How long to wait for another process that has locked a directory, because it may be ending. Every process that can open the
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
    let bytes = escaped(&path).len();
    if bytes > STRING_BYTES_MAX {
        bail!(
            "{} has {bytes} bytes; the kernel takes at most {STRING_BYTES_MAX}: choose a shorter path",
            path.display()
        );
    }
    if path.is_dir() { Ok(path) } else { Err(anyhow!("{} is not a directory", path.display())) }
}

/// Returns the default work directory of an upper layer.
fn default_work_dir(dir: &Path) -> Result<PathBuf> {
    let mut name = dir.file_name().ok_or_else(|| anyhow!("{} cannot be an upper layer", dir.display()))?.to_owned();
    name.push(".work");
    Ok(dir.with_file_name(name))
}

/// Checks that a layer belongs to this image, or records that it does. An empty layer belongs to none.
fn check_image(dir: &Path, work: &Path, image: Digest) -> Result<()> {
    let recorded = match recorded_image(dir, IMAGE)? {
        None => recorded_image(work, IMAGE_OF_WORK)?,
        recorded => recorded,
    };
    let is_empty = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?.next().is_none();
    if recorded.is_some_and(|recorded| recorded != Some(image)) && !is_empty {
        bail!(
            "{} has the changes of another image{}: choose another directory, or remove it and {}",
            dir.display(),
            recorded.flatten().map(|found| format!(" ({found})")).unwrap_or_default(),
            work.display()
        );
    }
    match setxattr(dir, IMAGE, image.to_string().as_bytes(), XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP) => bail!(
            "{} is on a file system without trusted attributes, which overlayfs needs for an upper layer",
            dir.display()
        ),
        outcome => outcome.with_context(|| format!("cannot change {}", dir.display())),
    }
}

/// Returns the image that an attribute names, if there is one; `Some(None)`: it is damaged.
fn recorded_image(path: &Path, name: &str) -> Result<Option<Option<Digest>>> {
    let mut value = [0; DIGEST_TEXT_BYTES_MAX];
    match getxattr(path, name, &mut value[..]) {
        Ok(bytes) => Ok(Some(Digest::parse(&value[..bytes]))),
        // Setting it fails if the file system has none.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot inspect {}", path.display())),
    }
}

/// Returns how an overlayfs uses a directory, whatever path leads to it, and where it is mounted.
fn use_of<'a>(mounts: &'a [MountEntry], dir: &Path) -> Option<(&'static str, &'a Path)> {
    let ours = directory(dir)?;
    let overlays = mounts.iter().filter(|mounted| mounted.kind == "overlay");
    let uses = overlays.flat_map(|mounted| {
        [("upperdir", "upper layer"), ("workdir", "work directory")].map(|(option, role)| (mounted, option, role))
    });
    let is_it = |(mounted, option, _): &(&MountEntry, &str, &str)| {
        mounted.option(option).is_some_and(|path| directory(&unescaped(path)) == Some(ours))
    };
    uses.into_iter().find(is_it).map(|(mounted, _, role)| (role, &*mounted.at))
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
    fn directories_in_use_are_found_in_the_table_of_mounts() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        for name in ["up,\\per", "w", "low", "ext4", "x"] {
            fs::create_dir(at(name)).expect("directories can be made");
        }
        std::os::unix::fs::symlink(dir.path(), at("alias")).expect("links can be made");
        let path = |name: &str| at(name).display().to_string();
        let table = format!(
            "22 27 0:21 / /sys rw shared:7 - sysfs sysfs rw\nbroken\n\
             36 35 98:0 / /my\\040mnt rw shared:2 - overlay /a rw,lowerdir+={},upperdir={},workdir={}\n\
             37 35 98:0 / /other rw - ext4 /a rw,upperdir={}\n38 35 0:1 / /low rw - overlay o ro,lowerdir={}\n",
            path("x"),
            // Both by overlayfs and by the table.
            path("alias/up\\054\\134\\134per"),
            path("w"),
            path("ext4"),
            path("low")
        );
        let table = MountEntry::read(table.as_bytes());
        let mnt = Path::new("/my mnt");
        assert_eq!(use_of(&table, &at("up,\\per")), Some(("upper layer", mnt)));
        assert_eq!(use_of(&table, &at("alias/w")), Some(("work directory", mnt)));
        for name in ["low", "x", "ext4"] {
            assert_eq!(use_of(&table, &at(name)), None, "{name}");
        }
    }

    #[test]
    fn an_empty_layer_belongs_to_no_image() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        for name in ["upper", "work", "new"] {
            fs::create_dir(at(name)).expect("directories can be made");
        }
        let [one, other] = ["1", "2"].map(|digit| Digest::parse(digit.repeat(64).as_bytes()).expect("a digest"));
        let check = |work: &str, image| check_image(&at("upper"), &at(work), image);
        if let Err(error) = check("work", other) {
            ferry_skip::skip!("{error:#}");
            return;
        }
        check("work", one).expect("it is empty");
        fs::write(at("upper/file"), "").expect("files can be made");
        check("new", one).expect("it is the same image");
        for work in ["work", "new"] {
            let said = check(work, other).expect_err("it is another image").to_string();
            assert!(said.contains(&format!("has the changes of another image ({one})")), "{said}");
        }
        // As earlier builds recorded it.
        rustix::fs::removexattr(at("upper"), IMAGE).expect("it is there");
        let set = setxattr(at("work"), IMAGE_OF_WORK, one.to_string().as_bytes(), XattrFlags::empty());
        set.expect("attributes can be set");
        assert!(check("work", other).is_err());
        check("work", one).expect("it is the same image");
        assert!(check("new", other).is_err());
    }
}
