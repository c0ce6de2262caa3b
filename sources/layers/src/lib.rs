//! The source "layers": layers of container images, found by the image's reference and a digest, as podman and CRI-O look them up
//! (`additionallayerstores` of containers-storage.conf(5), with the option `ref`).
//!
//! ```text
//! BASE64(REFERENCE)/sha256:DIGEST/diff    the files of the layer, with overlayfs's whiteouts
//!                                /info    its record in JSON, as containers/storage keeps it
//!                                /blob    the layer as it is in the registry
//!                                /use     cannot be created: the attempt begins a use; removing the directory ends one
//! ```
//!
//! The digest is that of a layer's table of contents, or of its blob (podman before version 5.1). A lookup fetches the manifest and the
//! table of contents; files are fetched when they are read, and verified. Layers that cannot be read that way do not exist here, and
//! engines pull them as usual. Directories above layers are listed as empty.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//! use ferry_layers::{LayerStore, Options};
//!
//! let store = LayerStore::open(Path::new("/var/lib/ferry-layers"), Options::default())?;
//! let source: Arc<dyn ferry_vfs::FileSystem> = Arc::new(store);
//! # Ok::<(), ferry_layers::Error>(())
//! ```
#![forbid(unsafe_code)]

mod entry;
mod error;
mod garbage;
mod images;
mod lookup;
mod name;
mod options;
mod remove_unused;
mod source;
mod tree;

use std::path::Path;
use std::sync::Arc;

use ferry_vfs::Changes;

pub use error::{Error, Result};
pub use name::{reference_name, reference_of};
pub use options::Options;

use entry::Entries;
use images::Images;
use tree::Tree;

/// A file system of container layers. See the crate documentation.
#[derive(Debug)]
pub struct LayerStore {
    finder: Arc<lookup::Finder>,
    changes: Changes,
}

impl LayerStore {
    /// Opens or creates the directory, and removes the data of unused layers, as it does later when the last use of a layer has ended.
    ///
    /// # Errors
    ///
    /// Another process uses the directory, or it cannot be used.
    pub fn open(root: &Path, options: Options) -> Result<Self> {
        let entries = Entries::open(root)?;
        let (images, tree) = (Images::new(options.plain_http), Tree::new(&options));
        let (running, garbage) = Default::default();
        let finder = Arc::new(lookup::Finder { entries, images, options, tree, running, garbage });
        Ok(Self { finder, changes: Changes::default() })
    }
}
