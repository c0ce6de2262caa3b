//! Reads a directory: one thread walks it, several read and hash its files, and one stores them in the order of the walk.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::build::content_writer::{Buffer, ContentWriter, Stop};
use crate::build::filter::Filter;
use crate::build::options::Progress;
use crate::build::scan::{FoundFile, scan};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::Result;
use crate::format::tree::Tree;
use crate::store::batch::BATCH_BYTES;

/// A buffer with files of a group, and whether the group ends with it.
type Part<B> = (B, bool);

/// A thread that reads groups of files.
struct ReaderThread<B> {
    parts: Receiver<Result<Part<B>>>,
    /// Returns empty buffers to the thread.
    empty: Sender<B>,
}

/// Reads the tree of a directory; `writer` stores the files' bytes. Files are read while the walk continues.
pub(crate) fn read<W: ContentWriter>(
    source: &Path,
    writer: &mut W,
    threads: usize,
    filter: &Filter,
    progress: &Progress<'_>,
) -> Result<Tree> {
    let found = AtomicUsize::new(0);
    thread::scope(|scope| {
        let (groups, lanes): (Vec<_>, Vec<_>) = (0..threads)
            .map(|_| {
                let (groups, wanted) = channel();
                let (sender, parts) = channel();
                let (empty, free) = channel();
                (0..W::buffers_per_thread(threads)).for_each(|_| _ = empty.send(writer.new_buffer()));
                scope.spawn(move || read_groups(&wanted, &free, &sender));
                (groups, ReaderThread { parts, empty })
            })
            .unzip();
        let count = &found;
        let scanner = scope.spawn(move || find::<W>(source, filter, &groups, count));
        let (mut done, mut contents) = (0, Vec::new());
        'groups: for at in 0_usize.. {
            let ReaderThread { parts, empty } = &lanes[at % threads];
            loop {
                // No more parts: the walk has ended or failed.
                let Ok(part) = parts.recv() else { break 'groups };
                let (mut buffer, is_last) = part?;
                let added = writer.add_buffer(&mut buffer)?;
                // The thread may have read all of its groups.
                let _ = empty.send(buffer);
                done += added.len();
                contents.extend(added);
                progress(done, found.load(Ordering::Relaxed));
                if is_last {
                    break;
                }
            }
        }
        let mut tree = scanner.join().expect("the scanner does not panic")?;
        for (node, content) in contents {
            tree.nodes[node].content = content;
        }
        Ok(tree)
    })
}

/// Walks the tree, and assigns groups of files to the threads in turn. A group has about as many bytes as a batch.
fn find<W: ContentWriter>(
    source: &Path,
    filter: &Filter,
    lanes: &[Sender<Vec<FoundFile>>],
    count: &AtomicUsize,
) -> Result<Tree> {
    let (mut group, mut room, mut turn) = (Vec::new(), BATCH_BYTES as u64, 0_usize);
    let mut hand_over = |group: Vec<FoundFile>| {
        // A thread that could not read a file takes no more groups.
        let _ = lanes[turn % lanes.len()].send(group);
        turn += 1;
    };
    let tree = scan(source, W::IS_COMPOSEFS, filter, &mut |file| {
        let bytes = file.seen.bytes;
        count.fetch_add(1, Ordering::Relaxed);
        if !group.is_empty() && (bytes > room || group.len() == W::GROUP_FILES_MAX) {
            hand_over(std::mem::take(&mut group));
            room = BATCH_BYTES as u64;
        }
        room = room.saturating_sub(bytes.next_multiple_of(BLOCK_BYTES as u64));
        group.push(file);
    })?;
    if !group.is_empty() {
        hand_over(group);
    }
    Ok(tree)
}

fn read_groups<B: Buffer>(groups: &Receiver<Vec<FoundFile>>, free: &Receiver<B>, parts: &Sender<Result<Part<B>>>) {
    for group in groups {
        match read_group(&group, free, parts) {
            Ok(()) => {}
            Err(Stop::Cancelled) => return,
            Err(Stop::Failed(error)) => {
                let _ = parts.send(Err(error));
                return;
            }
        }
    }
}

fn read_group<B: Buffer>(group: &[FoundFile], free: &Receiver<B>, parts: &Sender<Result<Part<B>>>) -> Result<(), Stop> {
    let next = || free.recv().map_err(|_| Stop::Cancelled);
    let send = |buffer, is_last| parts.send(Ok((buffer, is_last))).map_err(|_| Stop::Cancelled);
    let mut buffer = next()?;
    for file in group {
        buffer.read(file, &mut |full| send(std::mem::replace(full, next()?), false))?;
    }
    send(buffer, true)
}
