//! `ferry image mount --from`: the kernel's EROFS on an incomplete image. This process fetches what is read, and the rest in the
//! background. It ends when the image is complete; the mount stays.

use std::ffi::OsString;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use ferry_control::{Control, Logging};
use ferry_fuse::MountEntry;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::args::LazyArgs;
use super::kernel;
use super::mount::{MountArgs, NEEDS_BLOCK_DEVICE, attach};
use super::registry::{self, Background, ImageObjects, JOBS, Origin};
use super::watch::{KernelMountError, MNT_ID_UNIQUE, Watch, mount_id, unique_id, wait_for_unmount};
use crate::background::{self, Terminal};
use crate::control;
use crate::flags::ImageDigest;
use crate::guardian::{Guardian, GuardianTask};
use crate::size::Size;

/// Readers of missing data that are served in parallel, besides the background requests.
const THREADS_MIN: usize = 4;

/// Returns the source of the data.
fn origin(args: &LazyArgs) -> Option<Origin> {
    let bytes = |size: Option<Size>| size.map(|Size(bytes)| bytes);
    Some(Origin {
        jobs: args.jobs.unwrap_or(JOBS),
        ahead_bytes: bytes(args.fetch_ahead),
        bytes_per_second: bytes(args.fetch_rate),
        ..Origin::new(args.from.clone()?, args.plain_http)
    })
}

/// Pulls an image for ferry-snapshotter, and returns the flags to mount it when the snapshotter requests that.
pub fn pull(args: &MountArgs, options: &str) -> Result<Option<(MountArgs, ImageObjects)>> {
    let origin = origin(&args.lazily).context("--from is missing")?;
    let pulled = registry::pull_and_report(&args.image.image, &args.store.store, options, &origin)?;
    let Some((objects, from)) = pulled else { return Ok(None) };
    let mut args = args.clone();
    // Their directory has its final name now.
    for path in [&mut args.image.image, &mut args.dir] {
        *path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
    }
    args.image.digest = Some(ImageDigest(objects.0.digest()));
    (args.lazily.from, args.lazily.pull) = (Some(from), None);
    Ok(Some((args, objects)))
}

enum EndReason {
    /// All data is stored and verified.
    Complete,
    Unmounted,
    Signal(i32),
}

/// Mounts, and serves missing data until the image is complete. `pulled` is the image if it is already open.
pub fn mount(args: &MountArgs, pulled: Option<ImageObjects>, line: &[OsString], logging: &Logging) -> Result<u8> {
    let lazily = &args.lazily;
    if !lazily.foreground && !lazily.detached {
        let mut words = line.to_vec();
        // The words `image mount` precede all flags.
        let at = words.iter().position(|word| word == "mount").map_or(words.len(), |at| at + 1);
        words.insert(at, "--detached".into());
        return background::start(&words, false);
    }
    let terminal = lazily.detached.then(Terminal::new).transpose()?;
    let origin = origin(lazily).context("--from is missing")?;
    let (image, mut objects, background) = match pulled {
        Some(objects) => objects,
        None => registry::objects(&args.image.image, &args.store.store, args.image.digest(), &origin)?,
    };
    if image.is_composefs() {
        // overlayfs needs a file for each object, which exists when the object is complete.
        let jobs = usize::from(origin.jobs.max(1));
        objects.fetch_all(jobs, &AtomicBool::new(false), &|_, _| {}).map_err(|bad| anyhow!("{bad}"))?;
        objects.complete()?;
        attach(args, &image, &|_| None)?;
        return ready(terminal).map(|()| 0);
    }
    let dir = args.dir.canonicalize().with_context(|| format!("cannot find {}", args.dir.display()))?;
    if objects.incomplete().next().is_none() {
        attach(args, &image, &|_| None)?;
        return ready(terminal).map(|()| 0);
    }
    let path = &args.image.image;
    if !kernel::mounts_from(&File::open(path).with_context(|| format!("cannot open {}", path.display()))?)? {
        return KernelMountError::fail(NEEDS_BLOCK_DEVICE);
    }
    // Signals are caught before there is a mount that they would leave behind.
    let signals = Signals::new([SIGINT, SIGTERM]).context("cannot wait for signals")?;
    let mut watch = Watch::begin(&mut objects)?;
    let task = GuardianTask::Packs {
        files: watch.for_guardian()?,
        restart_time: Duration::from_secs(lazily.restart_time.into()),
        shares_blocks: objects.shares_blocks(),
    };
    let guardian = Guardian::start(task).context("cannot start the guardian of the mount")?;
    // The guardian outlives this process unless the image is complete: guardians of earlier servers rely on this server from now
    // on, even if mounting fails, and holes must not be read as zeros. An unneeded guardian ends on its own.
    let guardian = ManuallyDrop::new(guardian);
    let objects = Arc::new(objects);
    watch.serve(&objects, THREADS_MIN + usize::from(origin.jobs))?;
    let mount = ServedMount::new(attach(args, &image, &|number| watch.path(number))?, dir);
    let served = control::served_image(path, &mount.dir, &objects);
    let _control = Control::start(Control::bind(), vec![served].into(), logging.clone(), control::OWNER);
    let over = wait(&mount, signals, background, &objects, terminal).inspect_err(|_| {
        if mount.is_on_top() {
            let _ = mount.unmount(UnmountFlags::DETACH);
        }
    })?;
    match over {
        EndReason::Complete => drop(ManuallyDrop::into_inner(guardian)),
        EndReason::Unmounted => watch.end(),
        EndReason::Signal(signal) => {
            tracing::info!(signal, "unmounting");
            watch.end();
            match mount.unmount(UnmountFlags::empty()) {
                Err(Errno::BUSY) => {
                    tracing::warn!("{} is in use: missing data can no longer be read there", mount.path().display());
                    mount.unmount(UnmountFlags::DETACH)
                }
                outcome => outcome,
            }
            .with_context(|| format!("cannot unmount {}", mount.path().display()))?;
        }
    }
    Ok(0)
}

/// The mount that this process serves.
struct ServedMount {
    id: u64,
    /// The kernel reuses the other id. `None`: another mount covered it at once.
    unique: Option<u64>,
    /// Where it was mounted.
    dir: PathBuf,
}

impl ServedMount {
    fn new(id: u64, dir: PathBuf) -> Self {
        Self { id, unique: unique_id(&dir, id), dir }
    }

    /// Returns where the mount is now: it may have been moved, or a directory above it renamed.
    fn path(&self) -> PathBuf {
        let found = MountEntry::all().ok().and_then(|all| all.into_iter().find(|mounted| mounted.id == self.id));
        found.map_or_else(|| self.dir.clone(), |mounted| mounted.at)
    }

    /// Whether `unmount` would remove this mount, and not another one that covers it.
    fn is_on_top(&self) -> bool {
        self.unique.is_some() && mount_id(&self.path(), MNT_ID_UNIQUE) == self.unique
    }

    fn unmount(&self, flags: UnmountFlags) -> rustix::io::Result<()> {
        unmount(self.path(), flags | UnmountFlags::NOFOLLOW)
    }
}

/// Reports that the image is mounted, and waits for the end.
fn wait(
    mount: &ServedMount,
    mut signals: Signals,
    background: Option<Background>,
    objects: &Arc<ferry_image::Objects>,
    terminal: Option<Terminal>,
) -> Result<EndReason> {
    let (sender, over) = channel();
    let by_signal = sender.clone();
    begin("signals", move || signals.forever().try_for_each(|signal| by_signal.send(EndReason::Signal(signal))))?;
    let (by_umount, id) = (sender.clone(), mount.id);
    begin("unmounted", move || match wait_for_unmount(id) {
        Ok(()) => drop(by_umount.send(EndReason::Unmounted)),
        Err(error) => tracing::warn!("cannot watch the mount: {error}"),
    })?;
    if let Some(background) = background {
        begin("fetch", fetch(background, objects, &sender))?;
    }
    ready(terminal)?;
    loop {
        match over.recv().context("all threads that wait for the end have ended")? {
            EndReason::Signal(_) if !mount.is_on_top() => {
                let path = mount.path();
                tracing::warn!("another mount covers {}: unmount that first, then this one", path.display());
            }
            reason => return Ok(reason),
        }
    }
}

fn begin<T>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<()> {
    let begun = thread::Builder::new().name(format!("image-{name}")).spawn(move || drop(work()));
    begun.map(drop).context("cannot start a thread")
}

fn fetch(
    background: Background,
    objects: &Arc<ferry_image::Objects>,
    sender: &Sender<EndReason>,
) -> impl FnOnce() + use<> {
    let (objects, sender) = (Arc::clone(objects), sender.clone());
    move || {
        // Unwritten data could become holes, so the server continues.
        if background(&objects) {
            // Sending fails if the process is already ending.
            let _ = sender.send(EndReason::Complete);
        }
    }
}

/// Reports that the mount exists, and detaches from the terminal.
fn ready(terminal: Option<Terminal>) -> Result<()> {
    match terminal {
        Some(terminal) => terminal.leave(|| crate::output::print("mounted\n"), None),
        None => {
            tracing::info!("mounted");
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc::TryRecvError;

    use ferry_image::{BuildOptions, Image, Objects, Store, build};

    use super::*;

    #[test]
    fn a_mount_is_found_where_it_was_moved_to() {
        use rustix::fs::StatxFlags;
        use rustix::mount::{MountFlags, mount};
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().canonicalize().expect("it was made").join(name);
        fs::create_dir_all(at("before/mnt")).expect("directories can be made");
        let mounted = |path: PathBuf| mount("ferry-test", path, "tmpfs", MountFlags::empty(), None);
        if let Err(error) = mounted(at("before/mnt")) {
            return ferry_skip::skip!("cannot mount: {error}");
        }
        let id = || mount_id(&at("after/mnt"), StatxFlags::MNT_ID);
        let renamed = fs::rename(at("before"), at("after"));
        let served =
            ServedMount { dir: at("before/mnt"), ..ServedMount::new(id().unwrap_or_default(), at("after/mnt")) };
        let (path, is_on_top, has_unique) = (served.path(), served.is_on_top(), served.unique.is_some());
        let covered = mounted(at("after/mnt"));
        let is_covered = !served.is_on_top();
        let uncovered = unmount(at("after/mnt"), UnmountFlags::DETACH);
        let unmounted = served.unmount(UnmountFlags::DETACH);
        let now = id();
        // What the steps above have left.
        let _ = [at("before/mnt"), at("after/mnt")].map(|path| unmount(path, UnmountFlags::DETACH));
        renamed.expect("directories can be renamed");
        if !has_unique {
            return ferry_skip::skip!("no unique mount ids before Linux 6.8");
        }
        assert_eq!((path, is_on_top), (at("after/mnt"), true));
        covered.and(uncovered).expect("root can mount");
        assert!(is_covered, "another mount is there");
        unmounted.expect("it is a mount");
        assert_ne!(now, Some(served.id), "it is unmounted");
    }

    #[test]
    fn a_server_stays_if_its_packs_are_not_durable() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("tree")).expect("directories can be made");
        let store = Store::create(&at("store")).expect("directories can be made");
        build(&at("tree"), &at("image"), store, &BuildOptions::default(), &|_, _| {}).expect("it can be built");
        let image = Image::open(&at("image"), None).expect("it was built");
        let objects = Arc::new(Objects::open(&image, &at("store")).expect("it was built"));
        for lasts in [false, true] {
            let (sender, over) = channel();
            let other = sender.clone();
            fetch(Box::new(move |_| lasts), &objects, &sender)();
            let said = over.try_recv();
            assert!(
                matches!((&said, lasts), (Ok(EndReason::Complete), true) | (Err(TryRecvError::Empty), false)),
                "{lasts}"
            );
            drop(other);
        }
    }
}
