//! Where the objects of a store are: found in the table of all packs ([`crate::format::pack_table`]), and believed when the pack's own index says so.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::format::index::{self, Index, Places};
use crate::format::pack_table::{self, Damaged, Table, TableEntry, TablePack};
use crate::store::layout::{self, Listing};
use crate::store::new_file::NewFile;

/// How many packs may be missing in the table before it is made again: the index of each is read by everybody who opens the store.
const BEHIND_MAX: usize = 16;

/// The packs and blocks of objects that are not in the table.
type Beside = HashMap<Digest, Vec<(Digest, u64)>>;

/// Where the objects of a store's packs are, of one that is in several packs the place in the first usable one by name.
#[derive(Debug)]
pub(crate) struct StorePlaces {
    store: PathBuf,
    /// Only packs with the fs-verity digest in their index are used.
    with_verity: bool,
    table: Option<Table>,
    listing: Listing,
    /// What is in packs that the table does not have.
    beside: Beside,
    /// Packs in which something was found: `None` of those that cannot be used.
    opened: Mutex<HashMap<Digest, Option<Arc<Usable>>>>,
    /// All places, where the table turns out to be damaged.
    all: OnceLock<Places>,
}

/// A pack that is whole, its index proved.
#[derive(Debug)]
struct Usable {
    index: Index,
    damaged: HashSet<Digest>,
}

impl StorePlaces {
    /// Those of a store in which there is so much. The table is made again if it is missing, damaged or too far behind.
    pub(crate) fn open(store: &Path, listing: Listing, with_verity: bool) -> Self {
        let folder = layout::packs_folder(store);
        let table = Table::open(&folder).unwrap_or_else(|error| {
            tracing::debug!("{}: the table of packs cannot be read: {error}", store.display());
            None
        });
        let known = table.as_ref().map_or(&[][..], Table::packs);
        let left = left(&listing.packs, known);
        // Those that could not be used may have been replaced: they count as known.
        let same = listing.packs.len() - left.iter().filter(|(_, is_known)| !is_known).count();
        let is_near = (listing.packs.len() - same).max(known.len() - same) <= BEHIND_MAX;
        let (table, beside) = if is_near {
            let indexes: Vec<Index> = left.into_iter().filter_map(|(pack, _)| index_of(store, pack)).collect();
            (table, beside(&indexes))
        } else {
            make_table(store, &listing.packs)
        };
        let (opened, all) = (Mutex::default(), OnceLock::new());
        Self { store: store.into(), with_verity, table, listing, beside, opened, all }
    }

    /// Places that are known already.
    pub(crate) fn known(places: Places) -> Self {
        let (beside, opened, all) = (Beside::new(), Mutex::default(), OnceLock::from(places));
        let listing = Listing::default();
        Self { store: PathBuf::new(), with_verity: false, table: None, listing, beside, opened, all }
    }

    /// Packs of which something is noted as damaged.
    pub(crate) fn noted(&self) -> &[Digest] {
        &self.listing.noted
    }

    /// The pack and the block that an object is at.
    pub(crate) fn get(&self, digest: &Digest) -> Option<(Digest, u64)> {
        if let Some(all) = self.all.get() {
            return all.get(digest).copied();
        }
        match self.candidates(digest) {
            Ok(candidates) => candidates.into_iter().find(|(pack, block)| self.is_there(digest, *pack, *block)),
            Err(Damaged) => self.all.get_or_init(|| self.read_all()).get(digest).copied(),
        }
    }

    /// Whether there is one.
    pub(crate) fn contains(&self, digest: &Digest) -> bool {
        self.get(digest).is_some()
    }

    /// Where an object may be, by the names of packs.
    fn candidates(&self, digest: &Digest) -> Result<Vec<(Digest, u64)>, Damaged> {
        let mut found = self.beside.get(digest).cloned().unwrap_or_default();
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

    /// Whether a pack can be used and has an object at a block.
    fn is_there(&self, digest: &Digest, pack: Digest, block: u64) -> bool {
        let usable = {
            let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
            opened.entry(pack).or_insert_with(|| self.usable(pack).map(Arc::new)).clone()
        };
        let has = |object: &&index::Object| object.digest == *digest;
        usable.is_some_and(|usable| {
            usable.index.objects_at(block).any(|object| has(&object)) && !usable.damaged.contains(digest)
        })
    }

    /// A pack whose objects can be taken from it.
    fn usable(&self, pack: Digest) -> Option<Usable> {
        let index = index_of(&self.store, pack)?;
        if self.with_verity && index.verity.is_none() {
            return None;
        }
        if !layout::is_whole(&self.store, &index) {
            tracing::warn!("{}: the pack {pack} is truncated and not used", self.store.display());
            return None;
        }
        Some(Usable { damaged: layout::noted(&self.store, pack), index })
    }

    /// All places, by the packs' indexes.
    fn read_all(&self) -> Places {
        tracing::warn!("{}: the table of packs is damaged and is rebuilt", self.store.display());
        // Whoever opens the store next makes another one.
        let table = layout::packs_folder(&self.store).join(pack_table::FILE);
        if let Err(error) = std::fs::remove_file(&table) {
            tracing::warn!("cannot remove {}: {error}", table.display());
        }
        let mut places = Places::new();
        for usable in self.listing.packs.iter().filter_map(|pack| self.usable(*pack)) {
            for object in usable.index.objects.iter().filter(|object| !usable.damaged.contains(&object.digest)) {
                places.entry(object.digest).or_insert((usable.index.pack, object.block));
            }
        }
        places
    }
}

/// Those of some packs whose objects are not in the table, and whether the table knows of them; both are by name.
fn left(packs: &[Digest], known: &[TablePack]) -> Vec<(Digest, bool)> {
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

/// A pack's index, if it is sound.
fn index_of(store: &Path, pack: Digest) -> Option<Index> {
    layout::read_index(store, pack).map_err(|error| tracing::warn!("{error}: not used")).ok()
}

/// Makes the table of a store's packs; what there is of them without it, if the store may not be written to.
fn make_table(store: &Path, packs: &[Digest]) -> (Option<Table>, Beside) {
    let folder = layout::packs_folder(store);
    let indexes: Vec<Index> = packs.iter().filter_map(|pack| index_of(store, *pack)).collect();
    match write_table(&folder, packs, &indexes).map(|()| Table::open(&folder)) {
        Ok(Ok(Some(table))) => (Some(table), Beside::new()),
        written => {
            tracing::debug!("{}: there is no table of packs: {written:?}", store.display());
            (None, beside(&indexes))
        }
    }
}

fn beside(indexes: &[Index]) -> Beside {
    let mut beside = Beside::new();
    for index in indexes {
        for object in &index.objects {
            beside.entry(object.digest).or_default().push((index.pack, object.block));
        }
    }
    beside
}

/// Makes the table of packs, some of which have indexes that can be used. It is durable before it has its name.
fn write_table(folder: &Path, packs: &[Digest], indexes: &[Index]) -> Result<()> {
    let usable: HashSet<Digest> = indexes.iter().map(|index| index.pack).collect();
    let packs: Vec<_> = packs.iter().map(|name| TablePack { name: *name, is_usable: usable.contains(name) }).collect();
    let numbers: HashMap<Digest, usize> = packs.iter().enumerate().map(|(number, pack)| (pack.name, number)).collect();
    let entry = |index: &Index, object: &index::Object| {
        let pack = u32::try_from(*numbers.get(&index.pack)?).ok()?;
        Some(TableEntry { digest: *object.digest.bytes(), pack, block: u32::try_from(object.block).ok()? })
    };
    let entries = indexes.iter().flat_map(|index| index.objects.iter().filter_map(|object| entry(index, object)));
    let bytes = pack_table::write(&packs, entries.collect());
    let reason = || std::io::Error::other("there are too many packs or objects");
    let bytes = bytes.ok_or_else(reason).doing("make the table of packs in", folder)?;
    let mut new = NewFile::begin(folder)?;
    new.file.write_all(&bytes).doing("write to", &*new.path)?;
    new.keep(&folder.join(pack_table::FILE))
}
