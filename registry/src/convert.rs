//! Converting: a container image is pulled and built, and the image is stored beside it as a referrer.

use std::path::Path;

use ferry_image::{Digest, Image, Store, Trace};

use crate::error::{Error, Result};
use crate::layers::pull_compact;
use crate::manifest::Sha256;
use crate::push::{PushAs, push_as};
use crate::referrers::{self, Converted};
use crate::remote::{Document, Remote};
use crate::traces::now;

/// How an image is converted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertOptions {
    /// The files that a workload needs first: they go into a pack of their own, in this order. Such an image is used instead of those
    /// that were converted before.
    pub order: Option<Trace>,
    /// The number of parallel requests.
    pub jobs: usize,
}

/// The outcome of [`convert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertOutcome {
    /// The digest of the tree.
    pub digest: Digest,
    /// The digest of the manifest that refers to the container image's.
    pub manifest: Sha256,
    /// The digest of the container image's manifest.
    pub subject: Sha256,
    /// The number of bytes that the server lacked; `None` if the image was there already.
    pub sent_bytes: Option<u64>,
}

/// Pulls a container image, builds an image of it at `output`, and stores that beside the container image. If one is
/// there and no order is wanted, nothing is pulled, and there is no `output`.
///
/// # Errors
///
/// The reference names no container image, its data are wrong, it has none of the files of the order, or the server refuses a request or
/// is not reachable.
pub fn convert(
    remote: &Remote,
    output: &Path,
    directory: &Path,
    options: &ConvertOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<ConvertOutcome> {
    let ConvertOptions { order, jobs } = options;
    let refused = |reason: &str| Error::Container { name: remote.reference().to_string(), reason: reason.into() };
    let Document::Container(container) = remote.find()?.0 else {
        return Err(refused("it is an image of Ferry already"));
    };
    let subject = container.manifest;
    let known = remote.converted(subject)?;
    let newest = referrers::newest(&known);
    let unchanged = |known: &Converted| {
        Some(ConvertOutcome { digest: known.tree?, manifest: known.manifest, subject, sent_bytes: None })
    };
    if let Some(outcome) = newest.filter(|_| order.is_none()).and_then(unchanged) {
        return Ok(outcome);
    }
    let store = Store::create(directory)?;
    pull_compact(remote, &container, output, directory, (order.as_ref(), *jobs), progress)?;
    if order.is_some() {
        let image = Image::open(output, None)?;
        if !image.packs().iter().any(|pack| pack.ahead) {
            return Err(refused("it has none of the files in the list, which must be of a container of this image"));
        }
        if let Some(outcome) = newest.filter(|known| known.image == Some(image.digest())).and_then(unchanged) {
            return Ok(outcome);
        }
    }
    // Newer than the others, also in the same second, or if the clock of their machine was wrong.
    let least = newest.map_or(0, |known| known.created.saturating_add(1));
    let kind = PushAs::Referrer(&container, order.as_ref().map(|_| now().max(least)));
    let pushed = push_as(remote, (output, None), &store, directory, &kind, *jobs, progress)?;
    Ok(ConvertOutcome {
        digest: pushed.digest,
        manifest: pushed.manifest,
        subject,
        sent_bytes: Some(pushed.sent_bytes),
    })
}
