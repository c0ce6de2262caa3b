//! The locations of a store's objects: looked up in the table of all packs ([`crate::format::pack_table`]), and
//! verified by the pack's own index.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use ferry_vfs::sync::lock;

use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{IoContext, Result};
use crate::format::index::{self, Index, Places};
use crate::format::pack_table::{self, Table, TableDamage, TableEntry, TablePack};
use crate::store::layout::{self, Listing};
use crate::store::new_file::NewFile;

/// How many packs may be missing in the table before it is rebuilt: each open of the store reads their indexes.
const BEHIND_MAX: usize = 16;

/// The packs and blocks of objects that are not in the table.
type ExtraLocations = HashMap<Digest, Vec<(Digest, u64)>>;

/// The locations of objects in a store's packs; for one in several packs that in the first usable one by name.
#[derive(Debug)]
pub(crate) struct StorePlaces {
    store: PathBuf,
    /// Use only packs with an fs-verity digest in their index.
    with_verity: bool,
    table: Option<Table>,
    listing: Listing,
    /// Objects in packs that the table lacks.
    extra: ExtraLocations,
    /// The packs in which objects were found; `None` for unusable ones.
    opened: Mutex<HashMap<Digest, Option<Arc<UsablePack>>>>,
    /// All locations, if the table is damaged.
    all: OnceLock<Places>,
}

/// A complete pack with its verified index.
#[derive(Debug)]
struct UsablePack {
    index: Index,
    damaged: HashSet<Digest>,
}

impl UsablePack {
    fn object_at(&self, digest: &Digest, block: u64) -> Option<&index::Object> {
        self.index.objects_at(block).find(|object| object.digest == *digest)
    }
}

impl StorePlaces {
    /// Opens the locations of a store with these files. Rebuilds the table if it is missing, damaged or outdated.
    pub(crate) fn open(store: &Path, listing: Listing, with_verity: bool) -> Self {
        let directory = layout::packs_directory(store);
        let table = Table::open(&directory).unwrap_or_else(|error| {
            tracing::debug!("{}: the table of packs cannot be read: {error}", store.display());
            None
        });
        let known = table.as_ref().map_or(&[][..], Table::packs);
        let unlisted = unlisted(&listing.packs, known);
        // Unusable packs may have been replaced: they count as known.
        let same = listing.packs.len() - unlisted.iter().filter(|(_, is_known)| !is_known).count();
        let is_near = (listing.packs.len() - same).max(known.len() - same) <= BEHIND_MAX;
        let (table, extra) = if is_near {
            let indexes: Vec<Index> = unlisted.into_iter().filter_map(|(pack, _)| index_of(store, pack)).collect();
            (table, collect_locations(&indexes))
        } else {
            make_table(store, &listing.packs)
        };
        let (opened, all) = (Mutex::default(), OnceLock::new());
        Self { store: store.into(), with_verity, table, listing, extra, opened, all }
    }

    /// Leaves out the objects of some packs.
    pub(crate) fn without(mut self, packs: &[Digest]) -> Self {
        self.listing.packs.retain(|pack| !packs.contains(pack));
        self.extra.values_mut().for_each(|found| found.retain(|(pack, _)| !packs.contains(pack)));
        self
    }

    /// Creates a list of known locations.
    pub(crate) fn known(places: Places) -> Self {
        let (extra, opened, all) = (ExtraLocations::new(), Mutex::default(), OnceLock::from(places));
        let listing = Listing::default();
        Self { store: PathBuf::new(), with_verity: false, table: None, listing, extra, opened, all }
    }

    /// Returns the packs with a record of damage.
    pub(crate) fn noted(&self) -> &[Digest] {
        &self.listing.noted
    }

    /// Returns the pack and the block of an object.
    pub(crate) fn get(&self, digest: &Digest) -> Option<(Digest, u64)> {
        if let Some(all) = self.all.get() {
            return all.get(digest).copied();
        }
        match self.candidates(digest) {
            Ok(candidates) => candidates.into_iter().find(|(pack, block)| self.is_there(digest, *pack, *block)),
            Err(TableDamage) => self.all.get_or_init(|| self.read_all()).get(digest).copied(),
        }
    }

    /// Returns the pack of an object, and its offset there in bytes.
    pub(crate) fn find(&self, digest: &Digest) -> Option<(Digest, u64)> {
        let (pack, block) = self.get(digest)?;
        let opened = lock(&self.opened).get(&pack).cloned().flatten();
        // Packs of layers are known by their indexes only; all other objects begin at blocks.
        let object = opened.as_ref().and_then(|usable| usable.object_at(digest, block));
        Some((pack, object.map_or(block * BLOCK_BYTES as u64, index::Object::begin)))
    }

    /// Returns whether there is a location of an object.
    pub(crate) fn contains(&self, digest: &Digest) -> bool {
        self.get(digest).is_some()
    }

    /// Returns the possible locations of an object, by the names of packs.
    fn candidates(&self, digest: &Digest) -> Result<Vec<(Digest, u64)>, TableDamage> {
        let mut found = self.extra.get(digest).cloned().unwrap_or_default();
        if let Some(table) = &self.table {
            let place = |entry: &TableEntry| {
                let pack = usize::try_from(entry.pack).ok().and_then(|pack| table.packs().get(pack))?;
                Some((pack.name, u64::from(entry.block)))
                    .filter(|(pack, _)| self.listing.packs.binary_search(pack).is_ok())
            };
            found.extend(table.find(digest)?.iter().filter_map(place));
            found.sort_unstable();
        }
        Ok(found)
    }

    /// Returns whether a pack is usable and has an object at a block.
    fn is_there(&self, digest: &Digest, pack: Digest, block: u64) -> bool {
        let usable = {
            let mut opened = lock(&self.opened);
            opened.entry(pack).or_insert_with(|| self.usable(pack).map(Arc::new)).clone()
        };
        usable.is_some_and(|usable| usable.object_at(digest, block).is_some() && !usable.damaged.contains(digest))
    }

    /// Opens a pack if its objects are usable.
    fn usable(&self, pack: Digest) -> Option<UsablePack> {
        let index = index_of(&self.store, pack)?;
        if self.with_verity && index.verity.is_none() {
            return None;
        }
        if !layout::is_whole(&self.store, &index) {
            tracing::warn!("{}: the pack {pack} is truncated and not used", self.store.display());
            return None;
        }
        Some(UsablePack { damaged: layout::noted(&self.store, pack), index })
    }

    /// Returns all locations, from the packs' indexes.
    fn read_all(&self) -> Places {
        tracing::warn!("{}: the table of packs is damaged and is rebuilt", self.store.display());
        // The next process that opens the store rebuilds it.
        let table = layout::packs_directory(&self.store).join(pack_table::FILE);
        if let Err(error) = std::fs::remove_file(&table) {
            tracing::warn!("cannot remove {}: {error}", table.display());
        }
        let mut places = Places::new();
        for usable in self.listing.packs.iter().filter_map(|pack| self.usable(*pack)) {
            for object in usable.index.listed().filter(|object| !usable.damaged.contains(&object.digest)) {
                places.entry(object.digest).or_insert((usable.index.pack, object.block));
            }
        }
        places
    }
}

/// Returns the packs whose objects the table lacks, and whether it lists the pack; both inputs are sorted by name.
fn unlisted(packs: &[Digest], known: &[TablePack]) -> Vec<(Digest, bool)> {
    let mut known = known.iter().peekable();
    let look = |pack: &Digest| {
        while known.next_if(|known| known.name < *pack).is_some() {}
        match known.next_if(|known| known.name == *pack) {
            Some(known) if known.is_usable => None,
            found => Some((*pack, found.is_some())),
        }
    };
    packs.iter().filter_map(look).collect()
}

/// Returns a pack's index, if it is valid.
fn index_of(store: &Path, pack: Digest) -> Option<Index> {
    layout::read_index(store, pack).map_err(|error| tracing::warn!("{error}: not used")).ok()
}

/// Rebuilds the table of a store's packs; returns the locations without a table if the store is read-only.
fn make_table(store: &Path, packs: &[Digest]) -> (Option<Table>, ExtraLocations) {
    let directory = layout::packs_directory(store);
    let indexes: Vec<Index> = packs.iter().filter_map(|pack| index_of(store, *pack)).collect();
    match write_table(&directory, packs, &indexes).map(|()| Table::open(&directory)) {
        Ok(Ok(Some(table))) => (Some(table), ExtraLocations::new()),
        written => {
            tracing::debug!("{}: there is no table of packs: {written:?}", store.display());
            (None, collect_locations(&indexes))
        }
    }
}

fn collect_locations(indexes: &[Index]) -> ExtraLocations {
    let mut extra = ExtraLocations::new();
    for index in indexes {
        for object in index.listed() {
            extra.entry(object.digest).or_default().push((index.pack, object.block));
        }
    }
    extra
}

/// Writes the table of packs, whose indexes are given where usable. It is durable before it gets its name.
fn write_table(directory: &Path, packs: &[Digest], indexes: &[Index]) -> Result<()> {
    let usable: HashSet<Digest> = indexes.iter().map(|index| index.pack).collect();
    let packs: Vec<_> = packs.iter().map(|name| TablePack { name: *name, is_usable: usable.contains(name) }).collect();
    let numbers: HashMap<Digest, usize> = packs.iter().enumerate().map(|(number, pack)| (pack.name, number)).collect();
    let entry = |index: &Index, object: &index::Object| {
        let pack = u32::try_from(*numbers.get(&index.pack)?).ok()?;
        Some(TableEntry { digest: *object.digest.bytes(), pack, block: u32::try_from(object.block).ok()? })
    };
    let entries = indexes.iter().flat_map(|index| index.listed().filter_map(|object| entry(index, object)));
    let bytes = pack_table::write(&packs, entries.collect());
    let reason = || std::io::Error::other("there are too many packs or objects");
    let bytes = bytes.ok_or_else(reason).doing("make the table of packs in", directory)?;
    let mut new = NewFile::begin(directory)?;
    new.file.write_all(&bytes).doing("write to", &*new.path)?;
    new.keep(&directory.join(pack_table::FILE))
}
