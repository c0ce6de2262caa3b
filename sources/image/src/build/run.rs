//! Builds an image: scans, hashes, puts what is new into a pack, lays the metadata out, and gives it its name.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;

use rustix::fs::{CWD, Mode, openat};

use super::{directory, dump, oci, tar};
use crate::build::content_writer::{Hashed, Sink};
use crate::build::filter::Choice;
use crate::build::meter::Meter;
use crate::build::scan::{FOUND_FLAGS, Seen, scan, unreadable};
use crate::build::tar::Whiteouts;
use crate::build::trace::Trace;
use crate::format::digest::{Algorithm, Digest};
use crate::format::error::{Doing, Error, Result};
use crate::format::tree::{NodeId, Tree};
use crate::format::verity::Hasher;
use crate::store::packs::{New, Store, folder_of};
use crate::store::parallel;

/// Files up to this size are read once, hashed and kept in memory until their turn comes; larger ones are read again.
pub(crate) const KEPT_BYTES_MAX: u64 = 4 << 20;
/// How many files may be read ahead of the one whose turn it is; with [`KEPT_BYTES_MAX`] this bounds the memory.
const AHEAD_FILES_MAX: usize = 32;
/// How the metadata is laid out, and the bytes of files are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// In the order of a walk, with data in packs: what the kernel mounts alone, and fastest.
    #[default]
    Flat,
    /// As mkcomposefs does it, with a file for each object: what the kernel mounts below overlayfs.
    Composefs {
        /// The version of the layout: 0 or 1 as mkcomposefs has them, 2 as composefs-rs; without one 1 if there are whiteouts, 0 otherwise.
        version: Option<u32>,
    },
}

/// How an image is built.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many threads read and hash.
    pub threads: usize,
    /// The layout.
    pub layout: Layout,
    /// Which image of an index to take, as `os/architecture`, with a variant or without; without one Linux's for this machine.
    pub platform: Option<String>,
    /// What a workload needs first: these files are put into a pack of their own, in this order, which is read at once by whoever
    /// mounts the image. Of [`Layout::Flat`] only.
    pub order: Option<Trace>,
    /// What an archive that is a layer has for what is gone; without this it is refused. Of archives only.
    pub whiteouts: Option<Whiteouts>,
    /// Name the fs-verity digests of packs, and turn fs-verity on for what is written where the file system has it, so that the kernel can
    /// prove what it reads of them. Packs without such digests are not used then. Of [`Layout::Flat`] only: composefs's objects have it always.
    pub verity: bool,
    /// What is left out, and what is the same for everything.
    pub choice: Choice,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: thread::available_parallelism().map_or(1, usize::from),
            layout: Layout::default(),
            platform: None,
            order: None,
            whiteouts: None,
            verity: false,
            choice: Choice::default(),
        }
    }
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The digest of the image, with the places of files' bytes in packs: it depends on what the store held.
    pub digest: Digest,
    /// The digest of the tree alone. It is the image's in the layout composefs.
    pub tree: Digest,
    /// Size of the image, in bytes.
    pub image_bytes: u64,
    /// How many inodes there are.
    pub inodes: usize,
    /// Bytes of all files that are kept in packs, each file counted once.
    pub data_bytes: u64,
    /// Bytes that were not in the store before.
    pub new_bytes: u64,
    /// The packs that the image needs.
    pub packs: Vec<Digest>,
}

/// What is told while an image is built: how much is done, and of how much. Of a directory these are files, of anything else bytes; of a
/// pipe nobody knows how many there will be, and both are the same.
pub type Progress<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Builds an image of a directory, of a tar archive, packed or not, of an image directory as OCI has it (`oci:DIRECTORY[:TAG]`), or
/// of a dump file (composefs-dump(5)). What is not in the store yet is added;
/// an image that was at `image` is replaced, at once and at the end. A build that is killed leaves nothing but files that begin
/// with `.new-`. A dump file tells where files' bytes are; nothing is added to the store.
///
/// # Errors
/// Something cannot be read, changes meanwhile, or is nothing that EROFS can hold; the store or the image cannot be written.
pub fn build(source: &Path, image: &Path, store: Store, options: &Options, progress: &Progress<'_>) -> Result<Built> {
    let store = Arc::new(store);
    let mut sink = Sink::begin(&store, options.layout, options.threads, options.verity)?;
    let meter = Meter::new(progress);
    let mut tree = match Input::of(source, &meter)? {
        Input::Tar(_) | Input::Dump(_) | Input::Oci(_) if !options.choice.exclude.is_empty() => {
            let reason = "only of directories something can be left out (tar has an --exclude of its own)".into();
            return Err(Error::Input { path: source.into(), at: "as a whole".into(), reason });
        }
        Input::Directory | Input::Dump(_) | Input::Oci(_) if options.whiteouts.is_some() => {
            let reason = "what becomes of whiteouts is asked of archives only, which are layers by themselves".into();
            return Err(Error::Input { path: source.into(), at: "as a whole".into(), reason });
        }
        Input::Directory => from_directory(source, &mut sink, options, progress)?,
        Input::Dump(file) => match options.layout {
            Layout::Composefs { .. } => dump::read(file, source)?,
            Layout::Flat => {
                let reason = "it has the names of files' bytes only, which the layout flat has no use for: use the layout composefs";
                return Err(Error::Input { path: source.into(), at: "a dump file".into(), reason: reason.into() });
            }
        },
        Input::Tar(file) => tar::read(file, source, options.whiteouts, &mut sink)?,
        Input::Oci(reference) => {
            let platform = options.platform.clone().unwrap_or_else(oci::platform_here);
            oci::read(&reference, &platform, &mut sink, &meter)?
        }
    };
    options.choice.apply(&mut tree, options.whiteouts);
    let (inodes, data_bytes, new_bytes) = (tree.nodes.len(), sink.data_bytes, sink.new_bytes()?);
    let (bytes, tree, packs) = sink.finish(tree, options.order.as_ref())?;
    let algorithm = if options.layout == Layout::Flat { Algorithm::Blake3 } else { Algorithm::Verity };
    let digest = algorithm.of(&bytes);
    save(image, &bytes, options.verity)?;
    Ok(Built {
        digest,
        tree: tree.unwrap_or(digest),
        image_bytes: bytes.len() as u64,
        inodes,
        data_bytes,
        new_bytes,
        packs,
    })
}

/// What an image is built of.
enum Input<'a> {
    Directory,
    Dump(Box<dyn Read + 'a>),
    Tar(Box<dyn Read + 'a>),
    Oci(oci::Reference),
}

impl<'a> Input<'a> {
    /// An archive has the sum of its first header, and a dump file begins with the path of the root.
    fn of(source: &Path, meter: &'a Meter<'a>) -> Result<Self> {
        if let Some(reference) = oci::Reference::parse(source) {
            return Ok(Self::Oci(reference));
        }
        let is_stdin = source == Path::new("-");
        if !is_stdin && fs::metadata(source).doing("look at", source)?.is_dir() {
            return Ok(Self::Directory);
        }
        let file = File::open(if is_stdin { Path::new("/dev/stdin") } else { source }).doing("open", source)?;
        meter.expect(file.metadata().doing("look at", source)?.len());
        let mut file = oci::unpacked(BufReader::with_capacity(1 << 18, meter.over(file))).doing("read", source)?;
        let mut head = Vec::new();
        Read::by_ref(&mut file).take(tar::HEADER_BYTES as u64).read_to_end(&mut head).doing("read", source)?;
        let (is_tar, is_dump) = (tar::is_header(&head), head.first() == Some(&b'/'));
        let all = Box::new(io::Cursor::new(head).chain(file));
        match (is_tar, is_dump) {
            (true, _) => Ok(Self::Tar(all)),
            (false, true) => Ok(Self::Dump(all)),
            (false, false) => {
                let reason =
                    "it is no directory, tar archive (plain, or packed by gzip or zstd) or composefs dump file".into();
                Err(Error::Input { path: source.into(), at: "at its beginning".into(), reason })
            }
        }
    }
}

/// The tree of a directory, whose files' bytes go into the store. Files are read while others are still being found.
fn from_directory(source: &Path, sink: &mut Sink, options: &Options, progress: &Progress<'_>) -> Result<Tree> {
    let threads = options.threads.max(1);
    if !sink.is_composefs() {
        return directory::read(source, sink, threads, &options.choice, progress);
    }
    let found = AtomicUsize::new(0);
    thread::scope(|scope| {
        // A lane for each thread, which takes every n-th file, so that results come in the order of the files.
        let (files, lanes): (Vec<_>, Vec<_>) = (0..threads)
            .map(|_| {
                let (files, wanted) = channel::<(NodeId, Seen, PathBuf)>();
                let (sender, receiver) = sync_channel(AHEAD_FILES_MAX.div_ceil(threads));
                scope.spawn(move || read_lane(wanted, &sender));
                (files, receiver)
            })
            .unzip();
        let count = &found;
        let scanner = scope.spawn(move || {
            scan(source, true, &options.choice, &mut |node, seen, path| {
                let at = count.fetch_add(1, Ordering::Relaxed);
                // Nobody listens any more once a file could not be read.
                let _ = files[at % threads].send((node, seen, path));
            })
        });
        let mut contents = Vec::new();
        for at in 0_usize.. {
            let lane: &Receiver<Lane> = &lanes[at % threads];
            // The end: the tree was walked, or could not be.
            let Ok((node, path, hashed)) = lane.recv() else { break };
            contents.push((node, sink.add_object(&path, &hashed?)?));
            progress(at + 1, found.load(Ordering::Relaxed));
        }
        let mut tree = scanner.join().expect("the scanner does not panic")?;
        for (node, content) in contents {
            tree.nodes[node].content = content;
        }
        Ok(tree)
    })
}

/// A file of a lane, and what was read of it.
type Lane = (NodeId, PathBuf, Result<Hashed>);

/// Reads files for the layout composefs.
fn read_lane(files: Receiver<(NodeId, Seen, PathBuf)>, results: &SyncSender<Lane>) {
    for (node, seen, path) in files {
        let hashed = hash(&seen, &path);
        // Nobody listens any more once another file has failed.
        if results.send((node, path, hashed)).is_err() {
            return;
        }
    }
}

fn hash(seen: &Seen, path: &Path) -> Result<Hashed> {
    let bytes = seen.bytes;
    let mut file = seen.file(openat(CWD, path, FOUND_FLAGS, Mode::empty()), path)?;
    let hashed = if bytes > KEPT_BYTES_MAX {
        let digest = parallel::digest(&file, 0, bytes).map_err(|error| unreadable(error, path))?;
        Hashed { bytes, digest, kept: None }
    } else {
        let mut kept = vec![0; usize::try_from(bytes).unwrap_or_default()];
        file.read_exact(&mut kept).map_err(|error| unreadable(error, path))?;
        let mut hasher = Hasher::default();
        hasher.update(&kept);
        Hashed { bytes, digest: hasher.finish(), kept: Some(kept) }
    };
    seen.check(&file, path)?;
    Ok(hashed)
}

fn save(image: &Path, bytes: &[u8], has_verity: bool) -> Result<()> {
    let mut new = New::begin(folder_of(image))?;
    new.file.write_all(bytes).doing("write to", &*new.path)?;
    new.keep_sealed(image, has_verity.then(|| Algorithm::Verity.of(bytes)))
}
