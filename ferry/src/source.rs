//! Opens each source of the command line once.

mod opening;
mod overlap;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry_dir::Dir;
use ferry_idmap::{IdMapped, Ids, Xattrs};
use ferry_image::Digest;
use ferry_isolation::Capabilities;
use ferry_mem::pmem;
use ferry_quota::{Limits, Quota};
use ferry_vfs::{Caller, FileSystem, Ino, SetAttr};

use crate::flags::{Acl, FileHandles, Kind, MapUser, Share};
use crate::image::registry::{LayerOptions, Origin};
use crate::remote;

pub use opening::Sources;
pub use overlap::{quota_conflict, share_memory};

/// The flags of a source, without those of its exports.
#[derive(Clone, Debug, PartialEq)]
struct Options {
    dir: ferry_dir::Options,
    remote: remote::Flags,
    size_bytes: Option<u64>,
    huge: bool,
    tier2: Option<PathBuf>,
    tier2_bytes: Option<u64>,
    store: Option<PathBuf>,
    digest: Option<Digest>,
    from: Option<Origin>,
    layers: LayerOptions,
    needs_handles: bool,
    quota: Option<Limits>,
}

/// Returns the source as the clients of a share see it: with translated ids and renamed attributes.
pub fn client_view(share: &Share, source: Arc<dyn FileSystem>) -> Result<Arc<dyn FileSystem>> {
    let ((uids, gids), xattrs) = (share.ids().map_err(anyhow::Error::msg)?, share.xattrmap.clone().unwrap_or_default());
    if let (Some(user), Kind::Dir(_)) = (share.map_user, share.kind()) {
        check_can_create_as(user)?;
    }
    let is_same = [&uids, &gids].into_iter().all(|ids| *ids == Ids::default()) && xattrs == Xattrs::default();
    let source = if is_same { source } else { Arc::new(IdMapped::new(source, uids, gids, xattrs)) };
    if share.posix_acl == Acl::Always && !source.features().posix_acl {
        bail!("--posix-acl always: {} has no POSIX ACLs, or --xattrmap renames them", share.source.display());
    }
    Ok(source)
}

/// Checks that this process can create files of this user.
fn check_can_create_as(MapUser { uid, gid }: MapUser) -> Result<()> {
    let (own_uid, own_gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    ensure!(
        (uid, gid) == (own_uid, own_gid) || Capabilities::of_thread()?.can_act_as_others(),
        "--map-user {uid}:{gid}: new files would belong to {own_uid}:{own_gid}, the user of this server, which may not act as other users \
         (root, or CAP_SETUID and CAP_SETGID): start it as that user, or write --map-user auto"
    );
    Ok(())
}

impl Options {
    fn of(share: &Share) -> Self {
        Self {
            dir: ferry_dir::Options {
                read_only: share.read_only,
                direct_io: share.allow_direct_io,
                writeback: share.writeback,
                submounts: share.announce_submounts,
                file_handles: share.inode_file_handles != FileHandles::Never,
                watches_max: None,
                ..ferry_dir::Options::default()
            },
            remote: remote::Flags::of(share),
            size_bytes: share.size.map(|size| size.0),
            huge: share.huge,
            tier2: share.tier2.clone(),
            tier2_bytes: share.tier2_size.map(|size| size.0),
            store: share.store.clone(),
            digest: share.digest.map(|digest| digest.0),
            from: Origin::of(share),
            layers: LayerOptions::of(share),
            needs_handles: share.inode_file_handles == FileHandles::Mandatory,
            quota: share.quota.map(|quota| quota.0),
        }
    }

    fn pmem(&self) -> pmem::Options {
        pmem::Options {
            size_bytes: self.size_bytes,
            tier2: self.tier2.clone(),
            tier2_bytes: self.tier2_bytes,
            read_only: self.dir.read_only,
            huge: self.huge,
            ..pmem::Options::default()
        }
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<Dir>> {
        let dir = Dir::open(path, self.dir.clone())?;
        if self.needs_handles && !dir.has_file_handles() {
            bail!(
                "--inode-file-handles mandatory: {} has no file handles, or this user may not open them \
                 (CAP_DAC_READ_SEARCH)",
                path.display()
            );
        }
        Ok(Arc::new(dir))
    }

    /// Returns the directory with its quota. Counts the tree.
    fn with_quota(&self, dir: Arc<Dir>, path: &Path) -> Result<Arc<dyn FileSystem>> {
        let Some(limits) = self.quota else { return Ok(dir) };
        let quota = Quota::new(dir, limits).with_context(|| format!("--quota: {}", path.display()))?;
        let quota = Arc::new(quota);
        let usage = quota.usage();
        tracing::info!(source = %path.display(), bytes = usage.bytes, files = usage.files, "counted for the quota");
        quota.begin().context("cannot start a thread")?;
        Ok(quota)
    }

    fn open_mem(&self) -> Result<Arc<dyn FileSystem>> {
        give_to_process_user(Arc::new(ferry_mem::Mem::new(&ferry_mem::Options {
            size_bytes: self.size_bytes,
            huge: self.huge,
            read_only: self.dir.read_only,
            ..ferry_mem::Options::default()
        })?))
    }
}

/// Whether a file will be formatted as a new file system.
fn is_new(path: &Path) -> bool {
    path.metadata().map_or(true, |found| found.is_file() && found.len() == 0)
}

/// Gives the root of a new tree to the user of this process, as mounting a tmpfs does: other users could not create files in a
/// directory of root.
fn give_to_process_user(source: Arc<dyn FileSystem>) -> Result<Arc<dyn FileSystem>> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if !user.is_root() && !source.features().read_only {
        let owner = SetAttr { uid: Some(user.as_raw()), gid: Some(group.as_raw()), ..SetAttr::default() };
        let given = source.setattr(&Caller::default(), Ino::ROOT, None, &owner);
        given.with_context(|| format!("cannot give the new file system to user {}", user.as_raw()))?;
    }
    Ok(source)
}
