//! State of the packs that are not complete.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use crate::format::index::Places;
use crate::read::cache_limit::CacheLimit;
use crate::read::fetch_locks::FetchLocks;
use crate::read::singleflight::Singleflight;
use crate::store::fetch::Missing;
use crate::store::packs::Store;
use crate::store::places::StorePlaces;

/// What the packs of an image that are not all here have in common.
#[derive(Debug)]
pub(crate) struct PartialPacks {
    pub store: PathBuf,
    pub missing: Missing,
    pub limit: Option<Arc<CacheLimit>>,
    /// What other processes fetch.
    pub locks: FetchLocks,
    /// Where other packs of the store have objects.
    elsewhere: OnceLock<StorePlaces>,
    pub fetched_bytes: AtomicU64,
}

impl PartialPacks {
    pub(crate) fn new(store: &Path, missing: Missing) -> Arc<Self> {
        let limit = missing.cache_bytes.map(|bytes| Arc::new(CacheLimit::new(bytes)));
        Arc::new(Self {
            store: store.into(),
            missing,
            limit,
            locks: FetchLocks::of(store),
            elsewhere: OnceLock::new(),
            fetched_bytes: AtomicU64::new(0),
        })
    }

    pub(crate) fn elsewhere(&self) -> &StorePlaces {
        self.elsewhere.get_or_init(|| {
            let found = Store::open(&self.store).and_then(|store| store.places());
            found.unwrap_or_else(|error| {
                tracing::warn!("{error}: objects are fetched even where other packs have them");
                StorePlaces::known(Places::new())
            })
        })
    }
}

/// What a pack that is not all here has beside the others.
#[derive(Debug)]
pub(crate) struct PartialPack {
    pub common: Arc<PartialPacks>,
    /// Which of the image's packs.
    pub number: usize,
    /// Whether others that fetch the same are not waited for.
    pub alone: bool,
    pub flights: Singleflight,
}

impl PartialPack {
    pub(crate) fn new(common: &Arc<PartialPacks>, number: usize) -> Self {
        Self { common: Arc::clone(common), number, alone: common.limit.is_some(), flights: Singleflight::default() }
    }
}
