//! `ferry image mount --from`: the kernel's EROFS on an image that is not all here. This process fetches what is read, and the rest
//! beside that, and ends when all is here; the mount stays.

use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::mount::{MountArgs, attach};
use super::registry::{self, Background, Origin};
use super::watch::{Watch, until_unmounted};
use crate::flags::JOBS_MAX;
use crate::guardian::{Guardian, GuardianTask};
use crate::mount::{DevNull, in_background};
use crate::size::Size;

/// How many readers of what is not here are answered at a time, beside those whose objects are being fetched.
const THREADS_MIN: usize = 4;

#[derive(Debug, clap::Args)]
pub struct LazyArgs {
    /// Mount at once, and fetch what the store has not got from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG when it is read, and the
    /// rest beside that (Linux 6.14 or later; the store on ext4, XFS or btrfs). An image of the layout composefs is mounted when all is here.
    #[arg(long, value_name = "REF")]
    pub from: Option<String>,
    /// How many requests at a time fetch the rest; with 0 only what is read is fetched [default: 4].
    #[arg(long, value_name = "N", requires = "from")]
    #[arg(value_parser = clap::value_parser!(u16).range(..=i64::from(JOBS_MAX)))]
    jobs: Option<u16>,
    /// How much of what follows is fetched together with what is read [default: 256K].
    #[arg(long, value_name = "SIZE", requires = "from")]
    fetch_ahead: Option<Size>,
    /// Ask other machines than this one without encryption, too.
    #[arg(long, requires = "from")]
    plain_http: bool,
    /// Do not go to the background while there is something to fetch.
    #[arg(short, long, requires = "from")]
    foreground: bool,
    /// This process is the one in the background.
    #[arg(long, hide = true, requires = "from")]
    detached: bool,
}

impl LazyArgs {
    /// Whether this is the process in the background, for which another one waits.
    pub(super) fn is_detached(&self) -> bool {
        self.detached
    }

    /// Says the same to `ferry mount`, which goes to the background on its own.
    pub(super) fn add_to(&self, words: &mut Vec<OsString>) {
        let Some(from) = &self.from else { return };
        words.extend(["--from".into(), from.into()]);
        if let Some(jobs) = self.jobs {
            words.extend(["--jobs".into(), jobs.to_string().into()]);
        }
        if let Some(Size(bytes)) = self.fetch_ahead {
            words.extend(["--fetch-ahead".into(), bytes.to_string().into()]);
        }
        let flags = [(self.plain_http, "--plain-http"), (self.foreground, "--foreground")];
        words.extend(flags.into_iter().filter(|(is_given, _)| *is_given).map(|(_, flag)| flag.into()));
    }

    fn origin(&self) -> Option<Origin> {
        let ahead = self.fetch_ahead.map(|Size(bytes)| bytes);
        Some(Origin::new(self.from.clone()?, self.jobs, None, ahead, self.plain_http))
    }
}

/// Why there is nothing to be done any more.
enum Over {
    /// All is here and proved.
    Whole,
    Unmounted,
    Signal(i32),
}

/// Mounts, and answers for what is not here until it is.
pub fn mount(args: &MountArgs, line: &[OsString]) -> Result<u8> {
    let lazily = &args.lazily;
    if !lazily.foreground && !lazily.detached {
        let mut words = line.to_vec();
        // Behind the two words that everything else follows.
        let at = words.iter().position(|word| word == "mount").map_or(words.len(), |at| at + 1);
        words.insert(at, "--detached".into());
        return in_background(&words, false);
    }
    let nulls = lazily.detached.then(DevNull::open).transpose()?;
    if lazily.detached {
        rustix::process::setsid().context("cannot leave the terminal")?;
    }
    let origin = lazily.origin().context("--from says where from")?;
    let digest = args.image.digest();
    let (image, mut objects, background) = registry::objects(&args.image.image, &args.store.store, digest, &origin)?;
    if image.is_composefs() {
        // overlayfs looks for a file of each object, which is there when all of the object is.
        let jobs = usize::from(origin.jobs().max(1));
        objects.fetch_all(jobs, &AtomicBool::new(false), &|_, _| {}).map_err(|bad| anyhow!("{bad}"))?;
        objects.complete()?;
        attach(args, &image, &|_| None)?;
        return ready(nulls).map(|()| 0);
    }
    let dir = args.dir.canonicalize().with_context(|| format!("cannot find {}", args.dir.display()))?;
    if objects.incomplete().next().is_none() {
        attach(args, &image, &|_| None)?;
        return ready(nulls).map(|()| 0);
    }
    // Before there is a mount: whoever ends this must not leave one.
    let signals = Signals::new([SIGINT, SIGTERM]).context("cannot wait for signals")?;
    let mut watch = Watch::begin(&mut objects)?;
    let (group, packs) = watch.for_guardian()?;
    let guardian =
        Guardian::start(GuardianTask::Packs { group, packs }).context("cannot start the guardian of the mount")?;
    // It outlives us unless all is here: from now on guardians of earlier servers rely on us, also if nothing gets mounted, and
    // nobody may take holes for zeros. One that nobody needs goes by itself.
    let guardian = ManuallyDrop::new(guardian);
    let objects = Arc::new(objects);
    watch.serve(&objects, THREADS_MIN + usize::from(origin.jobs()))?;
    attach(args, &image, &|number| watch.path(number))?;
    let over = wait(&dir, signals, background, &objects, nulls).inspect_err(|_| {
        let _ = unmount(&dir, UnmountFlags::DETACH);
    })?;
    match over {
        Over::Whole => drop(ManuallyDrop::into_inner(guardian)),
        Over::Unmounted => {}
        Over::Signal(signal) => {
            tracing::info!(signal, "unmounting");
            match unmount(&dir, UnmountFlags::empty()) {
                Err(Errno::BUSY) => {
                    tracing::warn!("{} is in use: what is not here cannot be read there any more", dir.display());
                    unmount(&dir, UnmountFlags::DETACH)
                }
                outcome => outcome,
            }
            .with_context(|| format!("cannot unmount {}", dir.display()))?;
        }
    }
    Ok(0)
}

/// Says that the image is mounted, and waits until this is over.
fn wait(
    dir: &Path,
    mut signals: Signals,
    background: Option<Background>,
    objects: &Arc<ferry_image::Objects>,
    nulls: Option<DevNull>,
) -> Result<Over> {
    let (sender, over) = channel();
    let mounted = statx(CWD, dir, AtFlags::empty(), StatxFlags::MNT_ID).context("cannot look at the mount")?;
    let by_signal = sender.clone();
    begin("signals", move || signals.forever().next().map(|signal| by_signal.send(Over::Signal(signal))))?;
    let by_umount = sender.clone();
    begin("unmounted", move || match until_unmounted(mounted.stx_mnt_id) {
        Ok(()) => drop(by_umount.send(Over::Unmounted)),
        Err(error) => tracing::warn!("it cannot be seen whether the image is unmounted: {error}"),
    })?;
    if let Some(background) = background {
        begin("fetch", fetch(background, objects, &sender))?;
    }
    ready(nulls)?;
    over.recv().context("nobody can say when this is over")
}

fn begin<T>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<()> {
    let begun = thread::Builder::new().name(format!("image-{name}")).spawn(move || drop(work()));
    begun.map(drop).context("cannot start a thread")
}

fn fetch(background: Background, objects: &Arc<ferry_image::Objects>, sender: &Sender<Over>) -> impl FnOnce() + use<> {
    let (objects, sender) = (Arc::clone(objects), sender.clone());
    move || {
        // Where not all of it came to the disk, holes may come of it: readers are answered on.
        if background(&objects) {
            // Nobody listens once it is over for another reason.
            let _ = sender.send(Over::Whole);
        }
    }
}

/// Says that the mount is there, and lets go of the terminal.
fn ready(nulls: Option<DevNull>) -> Result<()> {
    match nulls {
        Some(nulls) => {
            crate::output::print("mounted\n")?;
            nulls.leave(None)
        }
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
    fn a_server_whose_packs_do_not_last_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("tree")).expect("folders can be made");
        let store = Store::create(&at("store")).expect("folders can be made");
        build(&at("tree"), &at("image"), store, &BuildOptions::default(), &|_, _| {}).expect("it can be built");
        let image = Image::open(&at("image"), None).expect("it was built");
        let objects = Arc::new(Objects::open(&image, &at("store")).expect("it was built"));
        for lasts in [false, true] {
            let (sender, over) = channel();
            let other = sender.clone();
            fetch(Box::new(move |_| lasts), &objects, &sender)();
            let said = over.try_recv();
            assert!(matches!((&said, lasts), (Ok(Over::Whole), true) | (Err(TryRecvError::Empty), false)), "{lasts}");
            drop(other);
        }
    }
}
