//! Converting: a container image is pulled and built, and the image is stored beside it as a referrer.

use std::path::Path;

use ferry_image::{Digest, Store};

use crate::error::{Error, Result};
use crate::layers::pull_compact;
use crate::manifest::Sha256;
use crate::push::{PushAs, push_as};
use crate::remote::{Document, Remote};

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
/// there, nothing is pulled, and there is no `output`.
///
/// # Errors
///
/// The reference names no container image, its data are wrong, or the server refuses a request or is not reachable.
pub fn convert(
    remote: &Remote,
    output: &Path,
    directory: &Path,
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<ConvertOutcome> {
    let Document::Container(container) = remote.find()?.0 else {
        let reason = "it is an image of Ferry already".into();
        return Err(Error::Container { name: remote.reference().to_string(), reason });
    };
    let subject = container.manifest;
    let known = remote.converted(subject)?;
    if let Some((manifest, digest)) = known.iter().find_map(|known| Some((known.manifest, known.tree?))) {
        return Ok(ConvertOutcome { digest, manifest, subject, sent_bytes: None });
    }
    let store = Store::create(directory)?;
    pull_compact(remote, &container, output, directory, jobs, progress)?;
    let kind = PushAs::Referrer(&container);
    let pushed = push_as(remote, (output, None), &store, directory, &kind, jobs, progress)?;
    Ok(ConvertOutcome {
        digest: pushed.digest,
        manifest: pushed.manifest,
        subject,
        sent_bytes: Some(pushed.sent_bytes),
    })
}
