//! The exports of shares: their options, start and end.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_engine::{PollLimit, RateLimiter};
use ferry_fs::ShutdownHandle;
use ferry_fuse::MountOptions;
use ferry_vfs::{ByNumber, Features, FileSystem, IdentityScope};
use ferry_virtiofs::SessionStore;

use crate::flags::{Acl, Cache, Carrier, DaxFiles, Kind, MigrationMode, OnMigrationError, Passthrough, Share, Window};
use crate::guardian::{Guardian, GuardianTask, WaitingGuardians};
use crate::mount_options;
use crate::ninep::NinepSocket;
use crate::socket::ListenSocket;
use crate::state;

/// The running exports, each with its socket, which is removed when it ends.
#[derive(Default)]
pub struct RunningExports {
    devices: Vec<(ferry_virtiofs::Export, ListenSocket)>,
    /// The state for the next server, with the names of the shares.
    kept: Vec<(String, Arc<SessionStore>)>,
    /// The ends of devices that serve a single virtual machine.
    ends: Vec<ferry_virtiofs::EndSignal>,
    /// A socket accepts further virtual machines or 9P clients.
    is_open: bool,
    ninep: Vec<(ferry_ninep::Export, Option<ListenSocket>)>,
    mounts: Vec<Arc<ferry_fuse::Export>>,
    /// One for each mount; they run until all mounts are gone.
    guardians: Vec<Guardian>,
}

impl RunningExports {
    /// Serves a source to virtual machines.
    pub fn start(
        &mut self,
        bound: ListenSocket,
        source: Arc<dyn FileSystem>,
        options: ferry_virtiofs::Options,
    ) -> Result<&ferry_virtiofs::Export> {
        let once = options.once;
        let kept = options.kept.clone().map(|kept| (options.name.clone(), kept));
        let export = ferry_virtiofs::Export::from_listener(bound.listener()?, source, options)?;
        if once {
            self.ends.push(export.ended());
        }
        self.is_open |= !once;
        self.kept.extend(kept);
        self.devices.push((export, bound));
        Ok(self.devices.last().map(|(export, _)| export).expect("it was just added"))
    }

    /// Serves a source to 9P clients.
    pub fn serve_9p(
        &mut self,
        listening: NinepSocket,
        source: Arc<dyn FileSystem>,
        share: &Share,
        (name, limiter, poll): (&str, Arc<RateLimiter>, PollLimit),
    ) -> Result<&ferry_ninep::Export> {
        let (export, bound) = listening.serve(source, share, (name, limiter, poll))?;
        self.is_open = true;
        self.ninep.push((export, bound));
        Ok(self.ninep.last().map(|(export, _)| export).expect("it was just added"))
    }

    /// Mounts a source on this host.
    pub fn mount(
        &mut self,
        mountpoint: &Path,
        source: Arc<dyn FileSystem>,
        options: ferry_fuse::Options,
    ) -> Result<Arc<ferry_fuse::Export>> {
        let restart_time = restart_time(source.features());
        let (waiting, resumed) = restart_time.and_then(|_| WaitingGuardians::find(mountpoint)).unzip();
        let options =
            ferry_fuse::Options { outlives_server: restart_time.is_some(), resumed: resumed.map(Arc::new), ..options };
        let mount = Arc::new(ferry_fuse::Export::mount(mountpoint, source, options)?);
        self.mounts.push(Arc::clone(&mount));
        let switch = mount.switch().context("cannot open the controls of the connection");
        let resumable = mount.resumable().context("cannot duplicate the connection")?.zip(restart_time);
        let guardian = switch.and_then(|switch| {
            Guardian::start(GuardianTask::Connection { mountpoint, switch: switch.into(), resumable })
        });
        if let Some(waiting) = waiting {
            tracing::info!("the mount on {} goes on: its last server has ended", mountpoint.display());
            waiting.end();
        }
        match guardian {
            Ok(guardian) => self.guardians.push(guardian),
            Err(error) => tracing::warn!(
                "the mount on {} has no guardian ({error:#}): if this server is killed, processes may hang in the mount until: echo 1 > /sys/fs/fuse/connections/{}/abort",
                mountpoint.display(),
                mount.connection_number()
            ),
        }
        Ok(mount)
    }

    /// Notifies `over` when nothing is left to serve: every mount was unmounted, and every single virtual machine has
    /// disconnected. Never while a socket accepts clients.
    pub fn notify_when_done(&self, over: ShutdownHandle) -> Result<()> {
        if self.is_open {
            return Ok(());
        }
        let (mounts, ends) = (self.mounts.clone(), self.ends.clone());
        let wait = move || {
            mounts.iter().for_each(|mount| mount.wait());
            ends.iter().for_each(ferry_virtiofs::EndSignal::wait);
            drop(mounts);
            over.shutdown();
        };
        std::thread::Builder::new().name("watch".into()).spawn(wait).context("cannot start a thread")?;
        Ok(())
    }

    /// Finishes requests under way and syncs their writes. Keeps the state of guests for the next server, and logs that.
    pub fn stop(&mut self) {
        self.end(ferry_virtiofs::Export::stop);
    }

    /// Ends everything, and devices with this function.
    pub fn end(&mut self, end_device: fn(ferry_virtiofs::Export)) {
        for mount in self.mounts.drain(..) {
            mount.stop();
        }
        self.guardians.clear();
        for (export, bound) in self.devices.drain(..) {
            end_device(export);
            drop(bound);
        }
        for (export, bound) in self.ninep.drain(..) {
            export.stop();
            drop(bound);
        }
        for (name, kept) in self.kept.drain(..).filter(|(_, kept)| kept.outlives_server()) {
            state::log_keeper_stays(&name, &kept);
        }
    }
}

impl Drop for RunningExports {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Returns the names of shares in the log; equal names get their place added.
pub fn names(shares: &[Share]) -> Vec<String> {
    let plain: Vec<String> = shares.iter().map(Share::name).collect();
    let place = |share: &Share| {
        let path = share.mount.as_ref().or(share.virtiofs.as_ref()).map(|path| path.display().to_string());
        path.or_else(|| share.ninep.as_ref().map(ToString::to_string)).or_else(|| share.fd.map(|fd| format!("fd {fd}")))
    };
    let name = |(share, name): (&Share, &String)| match place(share) {
        Some(place) if plain.iter().filter(|other| *other == name).count() > 1 => format!("{name} on {place}"),
        _ => name.clone(),
    };
    shares.iter().zip(&plain).map(name).collect()
}

/// Returns the options of a share's virtio-fs device.
pub fn device_options(share: &Share) -> ferry_virtiofs::Options {
    let default = ferry_virtiofs::Options::default();
    ferry_virtiofs::Options {
        name: share.name(),
        // Without a default: some versions of QEMU fail with a device that offers its tag.
        tag: share.tag.clone(),
        cache: share.cache.into(),
        entry_timeout: share.entry_timeout.map(Duration::from_secs),
        attr_timeout: share.attr_timeout.map(Duration::from_secs),
        negative_timeout: negative_timeout(share),
        writeback: kernel_writeback(share),
        mmap: !share.no_mmap,
        readdirplus: !share.no_readdirplus,
        queues: share.queue_count(),
        once: share.once,
        xattr: !share.no_xattr,
        local_locks: share.local_locks,
        allow_idmap: share.allow_idmap,
        events: share.events,
        posix_acl: share.posix_acl.into(),
        security_label: share.security_label.unwrap_or(Acl::Never).into(),
        on_migration_error: share.migration_on_error.into(),
        migration: match (share.migration_mode, share.migration_verify_handles) {
            (MigrationMode::FileHandles, _) => IdentityScope::Handles,
            (MigrationMode::FindPaths, true) => IdentityScope::CheckedPaths,
            (MigrationMode::FindPaths, false) => IdentityScope::Paths,
        },
        begun: crate::sandbox::thread_hooks(),
        // Mapped data would pass them by.
        dax_bytes: if share.limit.is_some() || share.quota.is_some() {
            None
        } else {
            share.dax.map_or(default.dax_bytes, |Window(bytes)| bytes)
        },
        dax_files: share.dax_files.map_or(default.dax_files, |DaxFiles(files)| files),
        poll: share.poll(),
        ..default
    }
}

/// The environment variable with the seconds for which clients of a mount wait for its next server if this one is killed.
pub const RESTART_TIME: &str = "FERRY_MOUNT_RESTART_TIME";

/// Of sources that the next server finds unchanged, without anything that clients have open.
fn restart_time(features: Features) -> Option<Duration> {
    let seconds = std::env::var(RESTART_TIME).ok()?.parse().ok()?;
    let is_same = features.read_only && features.by_number == ByNumber::Any;
    (is_same && seconds > 0).then(|| Duration::from_secs(seconds))
}

/// Returns the options of a share's mount. `log_name` is its name in the log, `words` are those of `-o`, and `shared` tells
/// whether its source has other exports.
pub fn mount_options(share: &Share, log_name: &str, words: &[String], shared: bool) -> ferry_fuse::Options {
    let default = ferry_fuse::Options::default();
    ferry_fuse::Options {
        path: match share.path.unwrap_or(Carrier::Auto) {
            Carrier::Auto => ferry_fuse::Path::Auto,
            Carrier::Uring => ferry_fuse::Path::Uring,
            Carrier::Devfuse => ferry_fuse::Path::Devfuse,
        },
        passthrough: match share.passthrough.unwrap_or(Passthrough::Auto) {
            // Such data would pass them by.
            Passthrough::Auto if share.limit.is_some() || share.quota.is_some() => Some(false),
            Passthrough::Auto => None,
            Passthrough::On => Some(true),
            Passthrough::Off => Some(false),
        },
        cache: share.cache.into(),
        entry_timeout: share.entry_timeout.map(Duration::from_secs),
        attr_timeout: share.attr_timeout.map(Duration::from_secs),
        negative_timeout: negative_timeout(share),
        writeback: kernel_writeback(share),
        xattr: !share.no_xattr,
        local_locks: share.local_locks,
        single_client: !shared && matches!(share.kind(), Kind::Mem | Kind::Pmem(_)),
        allow_idmap: share.allow_idmap,
        allow_other: share.allow_other,
        read_only: share.read_only,
        fsname: share.name(),
        name: Some(log_name.into()),
        stacked_source: is_on_overlayfs(share),
        shared,
        mount: MountOptions { nonempty: share.nonempty, ..mount_options::of_mount(words, share.kind().is_foreign()) },
        handler_timeout: share.handler_timeout.map_or(default.handler_timeout, Duration::from_secs),
        threads: share.threads.map_or(default.threads, usize::from),
        ring_depth: share.depth.map_or(default.ring_depth, usize::from),
        ..default
    }
}

/// How long clients keep that a name does not exist. A layer that is not found now may be found later.
fn negative_timeout(share: &Share) -> Option<Duration> {
    let default = matches!(share.kind(), Kind::Layers(_)).then_some(0);
    share.negative_timeout.or(default).map(Duration::from_secs)
}

/// Whether the kernel collects writes. Its write-back cache uses its own length of a file. With `--cache auto`, an open must see
/// truncation by other clients of a 9P server, so only the source collects writes there.
fn kernel_writeback(share: &Share) -> bool {
    let is_revalidated = matches!(share.kind(), Kind::Ninep(_)) && share.cache != Cache::Always;
    share.writeback && !is_revalidated
}

/// Whether files are on an overlayfs, for which passthrough has to be enabled explicitly.
fn is_on_overlayfs(share: &Share) -> bool {
    /// `OVERLAYFS_SUPER_MAGIC` of Linux.
    const MAGIC: i64 = 0x794c_7630;
    let files = match share.kind() {
        Kind::Dir(path) | Kind::Layers(path) => Some(path),
        Kind::Image(_) => share.store.clone(),
        Kind::Mem | Kind::Pmem(_) | Kind::Ninep(_) => None,
    };
    files.is_some_and(|path| rustix::fs::statfs(&path).is_ok_and(|found| found.f_type == MAGIC))
}

/// Converts values of flags to the values of the exports, which have the same names.
macro_rules! convert {
    ($($from:ident => $to:ty { $($name:ident),+ })+) => {$(
        impl From<$from> for $to {
            fn from(value: $from) -> Self {
                match value {
                    $($from::$name => Self::$name,)+
                }
            }
        }
    )+};
}

convert! {
    Acl => ferry_serve::Acl { Never, Auto, Always }
    Cache => ferry_serve::Cache { None, Auto, Metadata, Always }
    OnMigrationError => ferry_virtiofs::OnMigrationError { Abort, GuestError }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::tests::shares;

    #[test]
    fn the_kernel_collects_where_its_own_length_will_do() {
        for (share, collects) in [
            ("/a --writeback", true),
            ("/a", false),
            ("mem --writeback --cache none", true),
            ("9p:unix:s --writeback", false),
            ("9p:unix:s --writeback --cache always", true),
            ("9p:unix:s --cache always", false),
        ] {
            let share = &shares(&format!("ferry share {share} --virtiofs v --mount m")).expect(share)[0];
            assert_eq!(device_options(share).writeback, collects, "{share:?}");
            assert_eq!(mount_options(share, "", &[], false).writeback, collects, "{share:?}");
        }
    }

    /// Processes of the host, other guests and other servers reach the files of the other sources.
    #[test]
    fn memory_with_one_export_has_a_single_client() {
        for (source, is_alone) in [("mem", true), ("pmem:/p", true), ("/a", false), ("9p:unix:s", false)] {
            let share = &shares(&format!("ferry share {source} --mount m")).expect(source)[0];
            assert_eq!(mount_options(share, "", &[], false).single_client, is_alone, "{source}");
            assert!(!mount_options(share, "", &[], true).single_client, "{source}");
        }
    }
}
