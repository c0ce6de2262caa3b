//! The state of incomplete packs.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use crate::format::index::Places;
use crate::read::cache_limit::CacheLimit;
use crate::read::fetch_locks::FetchLocks;
use crate::read::singleflight::Singleflight;
use crate::store::fetch::FetchOptions;
use crate::store::packs::Store;
use crate::store::places::StorePlaces;

/// What the incomplete packs of an image share.
#[derive(Debug)]
pub(crate) struct PartialPacks {
    pub store: PathBuf,
    pub missing: FetchOptions,
    pub limit: Option<Arc<CacheLimit>>,
    /// Fetches of other processes.
    pub locks: FetchLocks,
    /// The locations of objects in other packs of the store.
    elsewhere: OnceLock<StorePlaces>,
    pub fetched_bytes: AtomicU64,
    /// Bytes of objects that other packs of the store had.
    pub deduplicated_bytes: AtomicU64,
}

impl PartialPacks {
    pub(crate) fn new(store: &Path, missing: FetchOptions) -> Arc<Self> {
        let limit = missing.cache_bytes.map(|bytes| Arc::new(CacheLimit::new(bytes)));
        Arc::new(Self {
            store: store.into(),
            missing,
            limit,
            locks: FetchLocks::of(store),
            elsewhere: OnceLock::new(),
            fetched_bytes: AtomicU64::new(0),
            deduplicated_bytes: AtomicU64::new(0),
        })
    }

    pub(crate) fn elsewhere(&self) -> &StorePlaces {
        self.elsewhere.get_or_init(|| {
            let found = Store::open(&self.store).and_then(|store| store.places(false));
            found.unwrap_or_else(|error| {
                tracing::warn!("{error}: objects are fetched even where other packs have them");
                StorePlaces::known(Places::new())
            })
        })
    }
}

/// The state of an incomplete pack.
#[derive(Debug)]
pub(crate) struct PartialPack {
    pub common: Arc<PartialPacks>,
    /// The index of the image's pack.
    pub number: usize,
    /// Whether concurrent fetches of other processes are ignored.
    pub alone: bool,
    pub flights: Singleflight,
}

impl PartialPack {
    pub(crate) fn new(common: &Arc<PartialPacks>, number: usize) -> Self {
        Self { common: Arc::clone(common), number, alone: common.limit.is_some(), flights: Singleflight::default() }
    }
}
