//! Reads the files of a directory for the layout flat: several threads read and hash, one writes, and the pieces come in the order of
//! the walk all the same.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::build::content_writer::Sink;
use crate::build::filter::Choice;
use crate::build::run::Progress;
use crate::build::scan::{FOUND_FLAGS, Seen, scan, unreadable};
use crate::format::chunk::{BATCH_BYTES, Batch, PIECE_BYTES};
use crate::format::error::{Error, Result};
use crate::format::tree::{Content, NodeId, Tree};

/// How many batches each thread may be ahead of the one that writes; with [`BATCH_BYTES`] this bounds the memory.
const AHEAD_BATCHES: usize = 4;
/// The most files of one group.
const GROUP_FILES_MAX: usize = 256;

/// A file that is to be read.
struct Wanted {
    node: NodeId,
    seen: Seen,
    path: PathBuf,
}

/// Files that follow each other, about as many as a batch holds. Groups are given to the threads in turn.
type Group = Vec<Wanted>;

/// A part of a group that was read.
struct Part {
    batch: Batch,
    /// The files that begin in it: their nodes and lengths, and which piece is the first.
    begun: Vec<(NodeId, u64, usize)>,
    /// Whether the group ends with it.
    is_last: bool,
}

/// A thread that reads, from its groups to its parts.
struct Lane {
    parts: Receiver<Result<Part>>,
    /// Takes batches back.
    empty: Sender<Batch>,
}

/// The tree of a directory, whose files' bytes go into packs. Files are read while others are still being found.
pub(crate) fn read(
    source: &Path,
    sink: &mut Sink,
    threads: usize,
    choice: &Choice,
    progress: &Progress<'_>,
) -> Result<Tree> {
    let found = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (groups, lanes): (Vec<_>, Vec<_>) = (0..threads)
            .map(|_| {
                let (groups, wanted) = channel::<Group>();
                let (sender, parts) = sync_channel(AHEAD_BATCHES);
                let (empty, free) = channel();
                (0..AHEAD_BATCHES).for_each(|_| _ = empty.send(sink.new_batch()));
                scope.spawn(move || read_groups(&wanted, &free, &sender));
                (groups, Lane { parts, empty })
            })
            .unzip();
        let count = &found;
        let scanner = scope.spawn(move || find(source, choice, &groups, count));
        let mut done = 0;
        let mut contents = Vec::new();
        'groups: for at in 0_usize.. {
            let Lane { parts, empty } = &lanes[at % threads];
            loop {
                // The end: the tree was walked, or could not be.
                let Ok(part) = parts.recv() else { break 'groups };
                let Part { mut batch, begun, is_last } = part?;
                let first = sink.add_batch(&batch)?;
                batch.clear();
                // Nobody wants it any more where all groups were read.
                let _ = empty.send(batch);
                done += begun.len();
                let content = |(node, bytes, at)| (node, Content::Packed { bytes, first: first + at });
                contents.extend(begun.into_iter().map(content));
                progress(done, found.load(Ordering::Relaxed));
                if is_last {
                    break;
                }
            }
        }
        let mut tree = scanner.join().expect("the scanner does not panic")?;
        for (node, content) in contents {
            if let Content::Packed { bytes, .. } = content {
                sink.data_bytes += bytes;
            }
            tree.nodes[node].content = content;
        }
        Ok(tree)
    })
}

/// Walks the tree, and hands over groups of files.
fn find(source: &Path, choice: &Choice, lanes: &[Sender<Group>], count: &AtomicUsize) -> Result<Tree> {
    let (mut group, mut room, mut turn) = (Group::new(), BATCH_BYTES as u64, 0_usize);
    let mut hand_over = |group: Group| {
        // Nobody listens any more once a file could not be read.
        let _ = lanes[turn % lanes.len()].send(group);
        turn += 1;
    };
    let tree = scan(source, false, choice, &mut |node, seen, path| {
        let bytes = seen.bytes;
        count.fetch_add(1, Ordering::Relaxed);
        if !group.is_empty() && (bytes > room || group.len() == GROUP_FILES_MAX) {
            hand_over(std::mem::take(&mut group));
            room = BATCH_BYTES as u64;
        }
        room = room.saturating_sub(bytes.next_multiple_of(crate::format::erofs::BLOCK_BYTES as u64));
        group.push(Wanted { node, seen, path });
    })?;
    if !group.is_empty() {
        hand_over(group);
    }
    Ok(tree)
}

/// Nobody wants anything more: another file could not be read.
struct Unwanted;

/// Why a group ends before its time.
enum End {
    Unwanted,
    Failed(Error),
}

impl From<Unwanted> for End {
    fn from(_: Unwanted) -> Self {
        Self::Unwanted
    }
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

fn read_groups(groups: &Receiver<Group>, free: &Receiver<Batch>, parts: &SyncSender<Result<Part>>) {
    for group in groups {
        match read_group(&group, free, parts) {
            Ok(()) => {}
            Err(End::Unwanted) => return,
            Err(End::Failed(error)) => {
                let _ = parts.send(Err(error));
                return;
            }
        }
    }
}

fn begin(free: &Receiver<Batch>) -> std::result::Result<Part, Unwanted> {
    let batch = free.recv().map_err(|_| Unwanted)?;
    Ok(Part { batch, begun: Vec::new(), is_last: false })
}

fn read_group(group: &Group, free: &Receiver<Batch>, parts: &SyncSender<Result<Part>>) -> std::result::Result<(), End> {
    let mut part = begin(free)?;
    let mut folder = Folder::default();
    for Wanted { node, seen, path } in group {
        let mut file = seen.file(folder.open(path), path)?;
        let mut left = seen.bytes;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            if !part.batch.has_room(count) {
                parts.send(Ok(part)).map_err(|_| Unwanted)?;
                part = begin(free)?;
            }
            if left == seen.bytes {
                part.begun.push((*node, seen.bytes, part.batch.len()));
            }
            part.batch.add(count, |piece| file.read_exact(piece)).map_err(|error| unreadable(error, path))?;
            left -= count as u64;
        }
        seen.check(&file, path)?;
    }
    part.is_last = true;
    parts.send(Ok(part)).map_err(|_| Unwanted.into())
}

/// The folder of the last file, for the next one is most often in it, too: finding it again would take longer than all else.
#[derive(Default)]
struct Folder(Option<(PathBuf, OwnedFd)>);

impl Folder {
    fn open(&mut self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let whole = || openat(CWD, path, FOUND_FLAGS, Mode::empty());
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return whole() };
        if self.0.as_ref().is_none_or(|(known, _)| known != parent) {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.0 = Some((parent.into(), openat(CWD, parent, flags, Mode::empty())?));
        }
        let Some((_, folder)) = &self.0 else { return whole() };
        openat(folder, name, FOUND_FLAGS, Mode::empty())
    }
}
