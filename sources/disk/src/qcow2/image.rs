//! An open image, and how it is read.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, RwLock};

use ferry_vfs::sync::{self, lock};

use super::compressed::decompress;
use super::file::ImageFile;
use super::header::Header;
use super::range_lock::RangeLock;
use super::refcounts::NewCluster;
use super::shape::{COPIED, ClusterLocation, Entry, OFFSET, Shape, damaged};

/// The backing file of an image.
pub(super) enum BackingImage {
    Raw { file: ImageFile, bytes: u64 },
    Image(Box<Image>),
}

impl BackingImage {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Raw { bytes, .. } => *bytes,
            Self::Image(image) => image.bytes,
        }
    }

    /// Reads a range; bytes past the end are zeros.
    fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let there = usize::try_from(self.bytes().saturating_sub(offset)).unwrap_or(usize::MAX).min(bytes.len());
        let (there, past) = bytes.split_at_mut(there);
        past.fill(0);
        match self {
            _ if there.is_empty() => Ok(()),
            Self::Raw { file, .. } => file.read(there, offset),
            Self::Image(image) => image.read(there, offset),
        }
    }
}

/// The tables in memory. They equal those in the file: every change is written to the file at once.
#[derive(Default)]
pub(super) struct Tables {
    pub l1: Vec<u64>,
    pub l1_offset: u64,
    /// Empty for read-only images.
    pub refcounts: Vec<u64>,
    pub refcounts_offset: u64,
    /// No cluster before this one is free.
    pub first_free: u64,
    /// Clusters with tables. Data are never written there, even if an L2 entry refers to one or its count is 0.
    pub occupied: HashSet<u64>,
    /// Clusters without a reference. Until the next flush, a power failure may restore the reference.
    pub unreferenced: Vec<Range<u64>>,
    /// Clusters that are durably counted, for later writes.
    pub reserved: VecDeque<NewCluster>,
    /// The number of clusters to reserve next time.
    pub reserve: usize,
    pub autoclear: u64,
}

/// An open image, with its backing files.
///
/// Reads, and writes to existing clusters, hold `tables` shared; a change of a table holds them exclusively. A write
/// that needs new clusters allocates them, fills them without holding `tables`, and then links them in the tables.
/// Meanwhile it holds its clusters in `changes`, so no other request changes them.
pub(super) struct Image {
    pub file: ImageFile,
    pub shape: Shape,
    /// The size of the disk.
    pub bytes: u64,
    pub snapshots: u32,
    pub tables: RwLock<Tables>,
    pub changes: RangeLock,
    pub below: Option<BackingImage>,
    /// Set before the first change of the image.
    pub changed: AtomicBool,
    /// The compressed cluster that was read last, and its offset.
    decompressed: Mutex<Option<(u64, Vec<u8>)>>,
}

/// The source of a range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// At this place of the file.
    Data(u64),
    Zeros,
    Below,
    /// In a compressed cluster, from this byte of it on.
    Compressed {
        offset: u64,
        bytes: u64,
        skip: usize,
    },
}

struct Piece {
    source: Source,
    bytes: usize,
}

impl Piece {
    /// Appends to pieces; merges a piece that continues the last one.
    fn push(self, pieces: &mut Vec<Self>) {
        if let Some(last) = pieces.last_mut() {
            let continues = match (last.source, self.source) {
                (Source::Data(before), Source::Data(after)) => before + last.bytes as u64 == after,
                (Source::Zeros, Source::Zeros) | (Source::Below, Source::Below) => true,
                _ => false,
            };
            if continues {
                last.bytes += self.bytes;
                return;
            }
        }
        pieces.push(self);
    }
}

impl Image {
    /// Reads the tables that a checked header describes.
    pub(super) fn new(file: ImageFile, header: &Header, below: Option<BackingImage>, writes: bool) -> io::Result<Self> {
        let shape = header.shape;
        let mut tables = Tables {
            l1: read_words(&file, header.l1_offset, u64::from(header.l1_entries))?,
            l1_offset: header.l1_offset,
            autoclear: header.autoclear,
            ..Tables::default()
        };
        if writes {
            let entries = u64::from(header.refcount_table_clusters) << (shape.cluster_bits - 3);
            tables.refcounts = read_words(&file, header.refcount_table_offset, entries)?;
            tables.refcounts_offset = header.refcount_table_offset;
            tables.occupy(shape, header, file.bytes()?)?;
        }
        Ok(Self {
            file,
            shape,
            bytes: header.bytes,
            snapshots: header.snapshots,
            tables: RwLock::new(tables),
            changes: RangeLock::default(),
            below,
            changed: AtomicBool::new(false),
            decompressed: Mutex::default(),
        })
    }

    /// The entries of some clusters in a row.
    pub(super) fn entries(&self, tables: &Tables, clusters: Range<u64>) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let mut at = clusters.start;
        while at < clusters.end {
            let table_end = ((at >> self.shape.l2_bits()) + 1) << self.shape.l2_bits();
            let end = clusters.end.min(table_end);
            let count = usize::try_from(end - at).unwrap_or(usize::MAX);
            match self.l2_table(tables, at)? {
                None => entries.resize(entries.len() + count, Entry::default()),
                Some(table) => {
                    let entry_bytes = self.shape.entry_bytes();
                    let mut bytes = vec![0; count * if self.shape.extended { 16 } else { 8 }];
                    let index = at & ((1 << self.shape.l2_bits()) - 1);
                    self.file.read_table(&mut bytes, table + index * entry_bytes)?;
                    for entry in bytes.chunks_exact(if self.shape.extended { 16 } else { 8 }) {
                        entries.push(Entry::decode(self.shape, entry)?);
                    }
                }
            }
            at = end;
        }
        Ok(entries)
    }

    /// Where the L2 table of a cluster is.
    pub(super) fn l2_table(&self, tables: &Tables, cluster: u64) -> io::Result<Option<u64>> {
        let index = usize::try_from(cluster >> self.shape.l2_bits()).unwrap_or(usize::MAX);
        let offset = tables.l1.get(index).copied().unwrap_or_default() & OFFSET;
        match offset {
            0 => Ok(None),
            _ if self.shape.is_cluster(offset) => Ok(Some(offset)),
            _ => Err(damaged(format!("an L1 entry refers to byte {offset}, where no cluster begins"))),
        }
    }

    /// Reads a range of the disk; past its end it reads zeros.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let tables = sync::read(&self.tables);
        let clusters = self.clusters(offset, bytes.len() as u64);
        let entries = self.entries(&tables, clusters.clone())?;
        self.read_entries(&entries, clusters.start, bytes, offset)
    }

    /// Returns the clusters that a range touches.
    pub(super) fn clusters(&self, offset: u64, bytes: u64) -> Range<u64> {
        let end = offset.saturating_add(bytes);
        offset >> self.shape.cluster_bits..end.div_ceil(self.shape.cluster_bytes())
    }

    /// Reads a range of the disk whose clusters, from `first`, have these entries.
    pub(super) fn read_entries(&self, entries: &[Entry], first: u64, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut pieces = Vec::new();
        let end = offset.saturating_add(bytes.len() as u64);
        let mut at = offset;
        while at < end {
            let index = usize::try_from((at >> self.shape.cluster_bits) - first).unwrap_or(usize::MAX);
            let entry = entries.get(index).copied().unwrap_or_default();
            let (source, source_end) = self.source(&entry, at);
            let count = usize::try_from(source_end.min(end) - at).unwrap_or(usize::MAX);
            Piece { source, bytes: count }.push(&mut pieces);
            at += count as u64;
        }
        let mut rest = bytes;
        let mut at = offset;
        for piece in pieces {
            let (part, after) = rest.split_at_mut(piece.bytes);
            match piece.source {
                Source::Data(place) => self.file.read(part, place)?,
                Source::Zeros => part.fill(0),
                Source::Below => match &self.below {
                    Some(below) => below.read(part, at)?,
                    None => part.fill(0),
                },
                Source::Compressed { offset, bytes, skip } => self.read_compressed(offset, bytes, skip, part)?,
            }
            rest = after;
            at += piece.bytes as u64;
        }
        Ok(())
    }

    /// Returns the source of a byte of the disk in a cluster with this entry, and the end of that source.
    fn source(&self, entry: &Entry, at: u64) -> (Source, u64) {
        let in_cluster = at % self.shape.cluster_bytes();
        let cluster_end = at - in_cluster + self.shape.cluster_bytes();
        let unit = self.shape.subcluster_bytes();
        let bit = 1 << (in_cluster / unit);
        let end = at - at % unit + unit;
        match entry.place {
            ClusterLocation::Compressed { offset, bytes } => {
                let skip = usize::try_from(in_cluster).unwrap_or(usize::MAX);
                (Source::Compressed { offset, bytes, skip }, cluster_end)
            }
            ClusterLocation::Cluster { offset, .. } if entry.allocated & bit != 0 => {
                (Source::Data(offset + in_cluster), end)
            }
            _ if entry.zero & bit != 0 => (Source::Zeros, end),
            _ => (Source::Below, end),
        }
    }

    fn read_compressed(&self, offset: u64, bytes: u64, skip: usize, part: &mut [u8]) -> io::Result<()> {
        let last = || lock(&self.decompressed);
        let place = skip..skip + part.len();
        if let Some((_, cluster)) = last().as_ref().filter(|(known, _)| *known == offset) {
            part.copy_from_slice(&cluster[place]);
            return Ok(());
        }
        let mut compressed = vec![0; usize::try_from(bytes).unwrap_or_default()];
        self.file.read(&mut compressed, offset)?;
        let mut cluster = vec![0; self.shape.cluster_len()];
        decompress(self.shape.compression, &compressed, &mut cluster)?;
        part.copy_from_slice(&cluster[place]);
        *last() = Some((offset, cluster));
        Ok(())
    }
}

impl Tables {
    /// Finds the clusters of tables, each of which must be within the file, and have one table only.
    fn occupy(&mut self, shape: Shape, header: &Header, file_bytes: u64) -> io::Result<()> {
        self.occupied.insert(0);
        self.occupy_range(shape, header.l1_offset, u64::from(header.l1_entries) * 8);
        self.occupy_range(shape, header.refcount_table_offset, self.refcounts.len() as u64 * 8);
        if header.snapshots > 0 {
            self.occupied.insert(header.snapshots_offset >> shape.cluster_bits);
        }
        let l2_tables = self.l1.iter().map(|entry| entry & OFFSET);
        let blocks = self.refcounts.iter().copied();
        for offset in l2_tables.chain(blocks).filter(|offset| *offset != 0) {
            if !shape.is_cluster(offset) || offset > file_bytes.saturating_sub(shape.cluster_bytes()) {
                return Err(damaged(format!("a table at {offset} is no cluster of the file's {file_bytes} bytes")));
            }
            if !self.occupied.insert(offset >> shape.cluster_bits) {
                return Err(damaged(format!("the cluster at {offset} has several tables")));
            }
        }
        Ok(())
    }

    pub(super) fn occupy_range(&mut self, shape: Shape, offset: u64, bytes: u64) {
        let first = offset >> shape.cluster_bits;
        self.occupied.extend(first..first + bytes.div_ceil(shape.cluster_bytes()));
    }

    /// Returns whether no snapshot shares a cluster's L2 table.
    pub(super) fn l2_is_own(&self, index: usize) -> bool {
        self.l1.get(index).is_some_and(|entry| entry & COPIED != 0)
    }
}

fn read_words(file: &ImageFile, offset: u64, count: u64) -> io::Result<Vec<u64>> {
    let bytes = count * 8;
    if offset.saturating_add(bytes) > file.bytes()? {
        return Err(damaged(format!("a table of {bytes} bytes at {offset} ends past the file's end")));
    }
    let mut buffer = vec![0; usize::try_from(bytes).unwrap_or_default()];
    file.read_table(&mut buffer, offset)?;
    let (words, _) = buffer.as_chunks::<8>();
    Ok(words.iter().map(|word| u64::from_be_bytes(*word)).collect())
}
