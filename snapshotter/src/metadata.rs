//! The records of all snapshots, in a crash-safe redb database.
//!
//! ```text
//! snapshots   name -> Record, as a message of Protocol Buffers
//! children    (name of the parent, name) -> nothing
//! state       "next id" -> number of the next snapshot's directory
//! ```
//!
//! A change is one transaction: after `kill -9` or a power failure it is there completely, or not at all. Ids are never used twice, so
//! a directory without a record is garbage.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::RwLock;

use ferry_vfs::sync::{read, write};
use prost::Message;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use rustix::fs::{FallocateFlags, fallocate};

use crate::api::{Info, Kind, Labels, Timestamp};
use crate::error::{Error, Result};

const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
const CHILDREN: TableDefinition<'_, (&str, &str), ()> = TableDefinition::new("children");
const STATE: TableDefinition<'_, &str, u64> = TableDefinition::new("state");
const NEXT_ID: &str = "next id";

/// The maximum number of snapshots below another: overlayfs stacks no more layers.
pub const LAYERS_MAX: usize = 500;
/// The size of the database's cache in bytes: a thousand snapshots take about 1 MB.
const CACHE_BYTES: usize = 4 << 20;
/// The space in bytes that is reserved beyond twice the size of the database.
const RESERVE_BYTES: u64 = 64 << 10;

/// A snapshot.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Record {
    /// The number that names its directory.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Its kind.
    #[prost(enumeration = "Kind", tag = "2")]
    pub kind: i32,
    /// The name of the snapshot below it, or nothing.
    #[prost(string, tag = "3")]
    pub parent: String,
    /// When it was prepared or committed.
    #[prost(message, required, tag = "4")]
    pub created: Timestamp,
    /// When its labels changed.
    #[prost(message, required, tag = "5")]
    pub updated: Timestamp,
    /// Its labels.
    #[prost(btree_map = "string, string", tag = "6")]
    pub labels: Labels,
    /// The space that it took when it was committed.
    #[prost(message, required, tag = "7")]
    pub usage: Usage,
    /// Its image, if it is not a directory.
    #[prost(message, optional, tag = "8")]
    pub image: Option<LayerImage>,
    /// If its layer is fetched on demand: the layers of the container image that it and the snapshots below it represent.
    #[prost(message, optional, tag = "9")]
    pub remote: Option<RemoteLayers>,
    /// The digest, as text, of the image of this layer and all below it, or nothing.
    #[prost(string, tag = "10")]
    pub merged: String,
    /// Whether it is based on such an image: an upper directory of overlayfs must not be used with other lower directories.
    #[prost(bool, tag = "11")]
    pub on_merged: bool,
}

/// The space that a snapshot takes without what is below it.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Usage {
    /// Bytes of its blocks.
    #[prost(int64, tag = "1")]
    pub bytes: i64,
    /// The number of its inodes.
    #[prost(int64, tag = "2")]
    pub inodes: i64,
}

/// An image of a committed layer.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LayerImage {
    /// The digest of the image, as text.
    #[prost(string, tag = "1")]
    pub digest: String,
    /// The names of the packs with its data, in hexadecimal digits.
    #[prost(string, repeated, tag = "2")]
    pub packs: Vec<String>,
}

/// The lower layers of a container image in a registry.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RemoteLayers {
    /// Its manifest, by its digest: `oci:HOST/NAME@sha256:DIGEST`.
    #[prost(string, tag = "1")]
    pub container: String,
    /// The number of its layers, from the lowest.
    #[prost(uint32, tag = "2")]
    pub layers: u32,
}

impl Record {
    /// Creates the record of a new snapshot.
    #[must_use]
    pub fn new(kind: Kind, parent: &str, labels: Labels) -> Self {
        Self { kind: kind.into(), parent: parent.into(), labels, ..Self::default() }
    }

    /// Whether its files are in a directory of its own.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.image.is_none() && self.remote.is_none()
    }

    /// Returns it in containerd's form.
    #[must_use]
    pub fn info(&self, name: &str) -> Info {
        Info {
            name: name.into(),
            parent: self.parent.clone(),
            kind: self.kind,
            created_at: Some(self.created),
            updated_at: Some(self.updated),
            labels: self.labels.clone(),
        }
    }
}

/// The committed form of an active snapshot.
#[derive(Debug)]
pub struct Commit<'a> {
    /// Its new name.
    pub name: &'a str,
    /// A parent for a snapshot that was prepared without one.
    pub parent: &'a str,
    /// Its labels, which replace those of the active snapshot.
    pub labels: Labels,
    /// The space that it takes.
    pub usage: Usage,
    /// Its image, if it has one.
    pub image: Option<LayerImage>,
}

/// The records of all snapshots.
#[derive(Debug)]
pub struct Metadata {
    path: PathBuf,
    /// `None` after an I/O error, such as a full disk: redb then refuses everything until the database is opened again.
    database: RwLock<Option<Database>>,
}

impl Metadata {
    /// Opens the database, or creates it. Only one process can have it open.
    ///
    /// # Errors
    ///
    /// It is in use or damaged, or cannot be written.
    pub fn open(path: &Path) -> Result<Self> {
        let metadata = Self { path: path.into(), database: RwLock::default() };
        metadata.with(|database| {
            let transaction = database.begin_write()?;
            transaction.open_table(SNAPSHOTS)?;
            transaction.open_table(CHILDREN)?;
            transaction.open_table(STATE)?;
            Ok(transaction.commit()?)
        })?;
        Ok(metadata)
    }

    /// Calls a function with the database.
    fn with<T>(&self, call: impl FnOnce(&Database) -> Result<T>) -> Result<T> {
        let outcome = loop {
            if let Some(database) = &*read(&self.database) {
                break call(database);
            }
            let mut closed = write(&self.database);
            if closed.is_none() {
                *closed = Some(Database::builder().set_cache_size(CACHE_BYTES).create(&self.path)?);
                self.reserve();
            }
        };
        if let Err(Error::Metadata(error)) = &outcome
            && matches!(**error, redb::Error::Io(_) | redb::Error::PreviousIo)
        {
            *write(&self.database) = None;
        }
        outcome
    }

    /// Reserves disk space for the next changes, because removing a snapshot from a full disk is a change, too.
    fn reserve(&self) {
        let reserved = File::options().write(true).open(&self.path).and_then(|file| {
            // The library doubles the file when it grows.
            let bytes = 2 * file.metadata()?.len() + RESERVE_BYTES;
            Ok(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes)?)
        });
        if let Err(error) = reserved {
            tracing::debug!("no space is reserved for {}: {error}", self.path.display());
        }
    }

    /// Returns a snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn get(&self, name: &str) -> Result<Record> {
        self.with(|database| found(&database.begin_read()?.open_table(SNAPSHOTS)?, name))
    }

    /// Returns a snapshot and those below it, nearest first.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn chain(&self, name: &str) -> Result<Vec<(String, Record)>> {
        self.with(|database| {
            let transaction = database.begin_read()?;
            let snapshots = transaction.open_table(SNAPSHOTS)?;
            let mut chain = Vec::new();
            let mut next = name.to_owned();
            while !next.is_empty() {
                if chain.len() > LAYERS_MAX {
                    return Err(too_deep(name));
                }
                let record = found(&snapshots, &next)?;
                let parent = record.parent.clone();
                chain.push((std::mem::replace(&mut next, parent), record));
            }
            Ok(chain)
        })
    }

    /// Calls a function with each snapshot, in the order of names.
    ///
    /// # Errors
    ///
    /// The database or a record is damaged, or the function fails.
    pub fn for_each(&self, mut call: impl FnMut(&str, Record) -> Result<()>) -> Result<()> {
        self.with(|database| {
            let transaction = database.begin_read()?;
            for entry in transaction.open_table(SNAPSHOTS)?.iter()? {
                let (name, bytes) = entry?;
                call(name.value(), decoded(name.value(), bytes.value())?)?;
            }
            Ok(())
        })
    }

    /// Calls a function with the ids of all snapshots; meanwhile none can be added.
    ///
    /// # Errors
    ///
    /// As [`Self::for_each`].
    pub fn with_ids<T>(&self, call: impl FnOnce(&BTreeSet<u64>) -> Result<T>) -> Result<T> {
        self.reserve();
        self.with(|database| {
            let transaction = database.begin_write()?;
            let mut ids = BTreeSet::new();
            for entry in transaction.open_table(SNAPSHOTS)?.iter()? {
                let (name, bytes) = entry?;
                ids.insert(decoded(name.value(), bytes.value())?.id);
            }
            call(&ids)
        })
    }

    /// Adds a snapshot. `record` has its kind, parent and labels. `create` creates its directory before the snapshot
    /// exists.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]; [`Error::NotFound`]: there is no such parent; [`Error::InvalidArgument`]: it is not committed.
    pub fn insert(&self, name: &str, record: Record, create: impl FnOnce(u64) -> Result<()>) -> Result<Record> {
        self.with(|database| {
            let transaction = database.begin_write()?;
            let record = {
                let mut snapshots = transaction.open_table(SNAPSHOTS)?;
                let mut state = transaction.open_table(STATE)?;
                if snapshots.get(name)?.is_some() {
                    return Err(Error::AlreadyExists(name.into()));
                }
                let parent = &*record.parent;
                if !parent.is_empty() {
                    let below = found(&snapshots, parent)?;
                    if below.kind() != Kind::Committed {
                        return Err(Error::InvalidArgument(format!("the parent {parent} is not committed")));
                    }
                    transaction.open_table(CHILDREN)?.insert((parent, name), ())?;
                }
                let id = state.get(NEXT_ID)?.map_or(1, |id| id.value());
                state.insert(NEXT_ID, id + 1)?;
                let now = Timestamp::now();
                let record = Record { id, created: now, updated: now, ..record };
                snapshots.insert(name, &*record.encode_to_vec())?;
                create(id)?;
                record
            };
            transaction.commit()?;
            Ok(record)
        })
    }

    /// Makes an active snapshot a committed one with another name.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyExists`]; [`Error::NotFound`]; [`Error::FailedPrecondition`]: it is not active, or its parent not committed;
    /// [`Error::InvalidArgument`]: it has another parent already.
    pub fn commit(&self, key: &str, commit: Commit<'_>) -> Result<()> {
        self.with(|database| {
            let Commit { name, parent, labels, usage, image } = commit;
            let transaction = database.begin_write()?;
            {
                let mut snapshots = transaction.open_table(SNAPSHOTS)?;
                let mut children = transaction.open_table(CHILDREN)?;
                let mut record = found(&snapshots, key)?;
                check_commit(&snapshots, (key, &record), (name, parent))?;
                if record.parent.is_empty() {
                    record.parent = parent.into();
                }
                record.kind = Kind::Committed.into();
                record.created = Timestamp::now();
                record.updated = record.created;
                (record.labels, record.usage, record.image) = (labels, usage, image);
                snapshots.remove(key)?;
                snapshots.insert(name, &*record.encode_to_vec())?;
                if !record.parent.is_empty() {
                    children.remove((&*record.parent, key))?;
                    children.insert((&*record.parent, name), ())?;
                }
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Checks whether [`Self::commit`] would succeed now.
    ///
    /// # Errors
    ///
    /// As [`Self::commit`].
    pub fn check_commit(&self, key: &str, name: &str, parent: &str) -> Result<Record> {
        self.with(|database| {
            let transaction = database.begin_read()?;
            let snapshots = transaction.open_table(SNAPSHOTS)?;
            let record = found(&snapshots, key)?;
            check_commit(&snapshots, (key, &record), (name, parent))?;
            Ok(record)
        })
    }

    /// Changes the labels of a snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], or the function fails.
    pub fn update(&self, name: &str, change: impl FnOnce(&mut Labels) -> Result<()>) -> Result<Record> {
        self.change(name, |record| {
            change(&mut record.labels)?;
            record.updated = Timestamp::now();
            Ok(())
        })
    }

    /// Records the image that a layer has become.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn set_image(&self, name: &str, image: LayerImage) -> Result<Record> {
        self.change(name, |record| {
            record.image = Some(image);
            Ok(())
        })
    }

    /// Records the container image whose layers a snapshot without data is made of.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn set_remote(&self, name: &str, remote: RemoteLayers) -> Result<Record> {
        self.change(name, |record| {
            record.remote = Some(remote);
            Ok(())
        })
    }

    /// Records the image of a layer and all below it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]
    pub fn set_merged(&self, name: &str, digest: &str) -> Result<Record> {
        self.change(name, |record| {
            record.merged = digest.into();
            Ok(())
        })
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Record) -> Result<()>) -> Result<Record> {
        self.with(|database| {
            let transaction = database.begin_write()?;
            let record = {
                let mut snapshots = transaction.open_table(SNAPSHOTS)?;
                let mut record = found(&snapshots, name)?;
                change(&mut record)?;
                snapshots.insert(name, &*record.encode_to_vec())?;
                record
            };
            transaction.commit()?;
            Ok(record)
        })
    }

    /// Removes a snapshot on which no other one is based; returns it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::FailedPrecondition`]: another one is based on it.
    pub fn remove(&self, name: &str) -> Result<Record> {
        self.with(|database| {
            let transaction = database.begin_write()?;
            let record = {
                let mut snapshots = transaction.open_table(SNAPSHOTS)?;
                let mut children = transaction.open_table(CHILDREN)?;
                let record = found(&snapshots, name)?;
                if let Some(child) = children.range((name, "")..)?.next() {
                    let child = child?.0;
                    let (parent, child) = child.value();
                    if parent == name {
                        let why = format!("cannot remove snapshot {name}: snapshot {child} is based on it");
                        return Err(Error::FailedPrecondition(why));
                    }
                }
                snapshots.remove(name)?;
                children.remove((&*record.parent, name))?;
                record
            };
            transaction.commit()?;
            Ok(record)
        })
    }
}

fn found(snapshots: &impl ReadableTable<&'static str, &'static [u8]>, name: &str) -> Result<Record> {
    let bytes = snapshots.get(name)?.ok_or_else(|| Error::NotFound(name.into()))?;
    decoded(name, bytes.value())
}

fn decoded(name: &str, bytes: &[u8]) -> Result<Record> {
    Record::decode(bytes).map_err(|error| Error::Record(name.into(), error))
}

fn check_commit(
    snapshots: &impl ReadableTable<&'static str, &'static [u8]>,
    (key, record): (&str, &Record),
    (name, parent): (&str, &str),
) -> Result<()> {
    if snapshots.get(name)?.is_some() {
        return Err(Error::AlreadyExists(name.into()));
    }
    if record.kind() != Kind::Active {
        return Err(Error::FailedPrecondition(format!("snapshot {key} is not active")));
    }
    if parent.is_empty() || parent == record.parent {
        return Ok(());
    }
    if !record.parent.is_empty() {
        let own = &record.parent;
        let why = format!("snapshot {key} has the parent {own}, and cannot be committed with the parent {parent}");
        return Err(Error::InvalidArgument(why));
    }
    if found(snapshots, parent)?.kind() == Kind::Committed {
        Ok(())
    } else {
        Err(Error::FailedPrecondition(format!("the parent {parent} is not committed")))
    }
}

/// Returns the error for a snapshot with too many others below it.
pub(crate) fn too_deep(name: &str) -> Error {
    Error::FailedPrecondition(format!(
        "snapshot {name} has more than {LAYERS_MAX} snapshots below it, and overlayfs stacks no more"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(directory: &Path) -> Metadata {
        Metadata::open(&directory.join("metadata.redb")).expect("it can be made")
    }

    fn prepare(metadata: &Metadata, name: &str, parent: &str) -> Result<Record> {
        metadata.insert(name, Record::new(Kind::Active, parent, Labels::new()), |_| Ok(()))
    }

    fn commit(metadata: &Metadata, key: &str, name: &str, parent: &str) -> Result<()> {
        let (labels, usage) = (Labels::new(), Usage { bytes: 7, inodes: 2 });
        metadata.commit(key, Commit { name, parent, labels, usage, image: None })
    }

    #[test]
    fn snapshots_survive_a_restart_and_ids_are_never_reused() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = open(directory.path());
        assert_eq!(prepare(&metadata, "a", "").unwrap().id, 1);
        assert_eq!(prepare(&metadata, "b", "").unwrap().id, 2);
        metadata.remove("b").unwrap();
        assert!(matches!(prepare(&metadata, "a", ""), Err(Error::AlreadyExists(_))));
        let failed =
            metadata.insert("c", Record::new(Kind::View, "", Labels::new()), |_| Err(Error::NotFound("c".into())));
        assert!(failed.is_err() && metadata.get("c").is_err(), "a failed snapshot does not exist");
        commit(&metadata, "a", "base", "").unwrap();
        assert!(Metadata::open(&directory.path().join("metadata.redb")).is_err(), "it is in use");
        drop(metadata);
        let metadata = open(directory.path());
        assert_eq!(prepare(&metadata, "c", "base").unwrap().id, 3);
        let base = metadata.get("base").unwrap();
        assert_eq!((base.id, base.kind(), base.usage.bytes), (1, Kind::Committed, 7));
        let chain: Vec<_> = metadata.chain("c").unwrap().into_iter().map(|(name, record)| (name, record.id)).collect();
        assert_eq!(chain, [("c".to_owned(), 3), ("base".to_owned(), 1)]);
        assert_eq!(metadata.with_ids(|ids| Ok(ids.clone())).unwrap(), BTreeSet::from([1, 3]));
    }

    #[test]
    fn parents_must_be_committed_and_cannot_be_removed() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = open(directory.path());
        prepare(&metadata, "a", "").unwrap();
        assert!(matches!(prepare(&metadata, "b", "a"), Err(Error::InvalidArgument(_))), "it is active");
        assert!(matches!(prepare(&metadata, "b", "none"), Err(Error::NotFound(_))));
        commit(&metadata, "a", "base", "").unwrap();
        prepare(&metadata, "b", "base").unwrap();
        assert!(matches!(metadata.remove("base"), Err(Error::FailedPrecondition(_))));
        commit(&metadata, "b", "top", "").unwrap();
        assert!(matches!(metadata.remove("base"), Err(Error::FailedPrecondition(_))), "the child has another name now");
        metadata.remove("top").unwrap();
        metadata.remove("base").unwrap();
        assert!(matches!(metadata.remove("base"), Err(Error::NotFound(_))));
    }

    #[test]
    fn a_commit_can_name_a_parent() {
        let directory = tempfile::tempdir().unwrap();
        let metadata = open(directory.path());
        for name in ["x", "y"] {
            prepare(&metadata, "a", "").unwrap();
            commit(&metadata, "a", name, "").unwrap();
        }
        prepare(&metadata, "active", "").unwrap();
        for (own, parent, works) in [
            ("", "x", true),
            ("x", "x", true),
            ("x", "", true),
            ("x", "y", false),
            ("", "none", false),
            ("", "active", false),
        ] {
            prepare(&metadata, "k", own).unwrap();
            assert_eq!(metadata.check_commit("k", "n", parent).is_ok(), works, "{own} {parent}");
            assert_eq!(commit(&metadata, "k", "n", parent).is_ok(), works, "{own} {parent}");
            if works {
                assert_eq!(metadata.get("n").unwrap().parent, "x");
                assert!(metadata.remove("x").is_err(), "it has a child");
            }
            metadata.remove(if works { "n" } else { "k" }).unwrap();
        }
        assert!(matches!(commit(&metadata, "x", "n", ""), Err(Error::FailedPrecondition(_))), "it is committed");
        assert!(matches!(commit(&metadata, "active", "x", ""), Err(Error::AlreadyExists(_))));
        assert!(matches!(commit(&metadata, "none", "n", ""), Err(Error::NotFound(_))));
    }
}
