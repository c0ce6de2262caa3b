//! Computes fs-verity digests of large files with several threads, while the disk stays busy.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::fs::Advice;

use crate::format::digest::Digest;
use crate::format::verity::{CHUNK_BYTES, ChunkHash, Hasher, hash_chunk};

/// The minimum size for several threads, in bytes.
const PARALLEL_BYTES_MIN: u64 = 8 * CHUNK_BYTES as u64;
/// The maximum number of threads per file: a disk is busy with them, and other programs need CPUs.
const THREADS_MAX: usize = 4;
/// The read-ahead of each thread in chunks.
const AHEAD: u64 = 4;

/// Returns the digest of a part of a file.
///
/// # Errors
///
/// It cannot be read, or ends early.
pub(crate) fn digest(file: &File, offset: u64, bytes: u64) -> io::Result<Digest> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let mut hasher = Hasher::default();
    let mut done = 0;
    if bytes >= PARALLEL_BYTES_MIN && threads > 1 {
        // The hasher itself needs some bytes.
        let chunks = (bytes - 1) / CHUNK_BYTES as u64;
        let lanes: Vec<Vec<_>> = thread::scope(|scope| {
            let lane = |first: u64| scope.spawn(move || lane(file, offset, first..chunks, threads));
            let lanes: Vec<_> = (0..threads as u64).map(lane).collect();
            lanes.into_iter().map(|lane| lane.join().expect("a lane does not panic")).collect::<io::Result<_>>()
        })?;
        for chunk in 0..usize::try_from(chunks).unwrap_or(usize::MAX) {
            hasher.add_chunk(&lanes[chunk % threads][chunk / threads]);
        }
        done = chunks * CHUNK_BYTES as u64;
    }
    let mut piece = vec![0; usize::try_from(bytes - done).unwrap_or(usize::MAX).min(CHUNK_BYTES)];
    while done < bytes {
        let count = usize::try_from(bytes - done).unwrap_or(usize::MAX).min(piece.len());
        file.read_exact_at(&mut piece[..count], offset + done)?;
        hasher.update(&piece[..count]);
        done += count as u64;
    }
    Ok(hasher.finish())
}

/// Calls `work` for each number below `count`, on several threads, until one call fails.
///
/// # Errors
///
/// One of the failures.
pub(crate) fn each<E: Send>(count: usize, work: impl Fn(usize) -> Result<(), E> + Sync) -> Result<(), E> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let next = AtomicUsize::new(0);
    let lane = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return Ok(());
            }
            if let Err(error) = work(at) {
                next.store(count, Ordering::Relaxed);
                return Err(error);
            }
        }
    };
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..threads).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
    })
}

/// Hashes every n-th chunk.
fn lane(file: &File, offset: u64, chunks: std::ops::Range<u64>, threads: usize) -> io::Result<Vec<ChunkHash>> {
    let place = |chunk: u64| offset + chunk * CHUNK_BYTES as u64;
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut hashes = Vec::new();
    for number in chunks.step_by(threads) {
        // Only advice: without it, the disk is idle while chunks are hashed.
        let _ = rustix::fs::fadvise(
            file,
            place(number + AHEAD * threads as u64),
            NonZeroU64::new(CHUNK_BYTES as u64),
            Advice::WillNeed,
        );
        file.read_exact_at(&mut chunk, place(number))?;
        hashes.push(hash_chunk(&chunk));
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn parts_of_every_size_have_their_digest() {
        let data: Vec<u8> = (0..20 * CHUNK_BYTES + 77).map(|at: usize| ((at * 31) >> 6).to_le_bytes()[0]).collect();
        let mut file = tempfile::tempfile().expect("a file can be made");
        file.write_all(&data).expect("it can be written");
        let least = usize::try_from(PARALLEL_BYTES_MIN).expect("it fits");
        for bytes in [0, 1, CHUNK_BYTES, least - 1, least, least + 1, 19 * CHUNK_BYTES, 20 * CHUNK_BYTES] {
            let found = digest(&file, 77, bytes as u64).expect("it can be read");
            assert_eq!(found, crate::format::digest::Algorithm::Verity.of(&data[77..77 + bytes]), "{bytes} bytes");
        }
        for bytes in [CHUNK_BYTES, 30 * CHUNK_BYTES] {
            let error = digest(&file, 20 * CHUNK_BYTES as u64, bytes as u64).expect_err("the file ends before");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
