//! Pushing: blobs first, the manifest last, so that nobody finds an image of which something is missing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferry_image::{Digest, Image, Objects, Store};
use sha2::Digest as _;

use crate::error::{Error, Result};
use crate::manifest::{Blob, EMPTY, Manifest, PART_BYTES, PackBlobs, Sha256};
use crate::oci::Content;
use crate::remote::Remote;

/// What was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// What names and proves the image.
    pub digest: Digest,
    /// What names the manifest.
    pub manifest: Sha256,
    /// Bytes that the server did not have.
    pub sent_bytes: u64,
}

/// One blob to be.
enum Piece {
    Memory(Vec<u8>),
    /// A range of a pack: which, from where, how long.
    Pack(usize, u64, u64),
}

/// Pushes an image and those of its packs that the server has not got. Each object is proved before.
///
/// # Errors
/// The image or an object is damaged, or the server refuses something or cannot be reached.
pub fn push(
    remote: &Remote,
    image: &Path,
    digest: Option<Digest>,
    store: &Store,
    folder: &Path,
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Pushed> {
    let opened = Image::open(image, digest)?;
    if opened.is_composefs() {
        let reason = "its layout is composefs: images of the layout flat are pushed".into();
        return Err(Error::Manifest { name: image.display().to_string(), reason });
    }
    Objects::open(&opened, folder)?.prove_all()?;
    let metadata = std::fs::read(image).map_err(|source| io_error("read", image, source))?;
    if opened.digest().algorithm().of(&metadata) != opened.digest() {
        return Err(io_error("read", image, io::Error::other("it changed meanwhile")));
    }
    let mut files = Vec::new();
    let mut pieces = vec![Piece::Memory(EMPTY.to_vec()), Piece::Memory(metadata)];
    let names: Vec<Digest> = opened.packs().iter().map(|pack| pack.name).collect();
    for (number, pack) in names.iter().enumerate() {
        let path = store.pack_path(*pack);
        let file = File::open(&path).map_err(|source| io_error("open", &path, source))?;
        let bytes = file.metadata().map_err(|source| io_error("look at", &path, source))?.len();
        files.push((path, file));
        pieces.push(Piece::Memory(store.index(*pack)?.to_bytes()));
        let parts = (0..bytes).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        pieces.extend(parts.map(|from| Piece::Pack(number, from, PART_BYTES.min(bytes - from))));
    }
    let (blobs, sent_bytes) = upload(remote, &pieces, &files, jobs, progress)?;
    // What comes after an index, up to the next one, are the parts of its pack.
    let mut packs: HashMap<Digest, PackBlobs> = HashMap::new();
    let mut rest = blobs[2..].iter().zip(&pieces[2..]).peekable();
    for name in &names {
        let Some((index, _)) = rest.next() else { break };
        let mut parts = Vec::new();
        while let Some((part, _)) = rest.next_if(|(_, piece)| matches!(piece, Piece::Pack(..))) {
            parts.push(*part);
        }
        packs.insert(*name, PackBlobs { index: *index, parts });
    }
    let manifest = Manifest { digest: opened.digest(), image: blobs[1], packs };
    let bytes = manifest.write(&names);
    remote.put_manifest(&bytes)?;
    Ok(Pushed { digest: opened.digest(), manifest: Sha256::of(&bytes), sent_bytes })
}

fn io_error(what: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { what, path: path.into(), source }
}

/// Uploads pieces, so many at a time; answers what names them, in their order, and how many bytes the server did not have.
fn upload(
    remote: &Remote,
    pieces: &[Piece],
    files: &[(std::path::PathBuf, File)],
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Vec<Blob>, u64)> {
    let length = |piece: &Piece| match piece {
        Piece::Memory(bytes) => bytes.len() as u64,
        Piece::Pack(_, _, bytes) => *bytes,
    };
    let all = pieces.iter().map(length).sum();
    let blobs: Mutex<Vec<Option<Blob>>> = Mutex::new(vec![None; pieces.len()]);
    let (next, done, sent) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (stop, failed) = (AtomicBool::new(false), Mutex::new(None));
    let one = |piece: &Piece| -> Result<Blob> {
        let (blob, is_new) = match piece {
            Piece::Memory(bytes) => {
                let blob = Blob { sha256: Sha256::of(bytes), bytes: bytes.len() as u64 };
                (blob, remote.put(blob, &mut Content::of(&mut Cursor::new(bytes), blob.bytes))?)
            }
            Piece::Pack(number, from, bytes) => {
                let (path, file) = &files[*number];
                let mut part = Part { file, from: *from, bytes: *bytes, at: 0 };
                let sha256 = sha256_of(&mut part).map_err(|source| io_error("read", path, source))?;
                let blob = Blob { sha256, bytes: *bytes };
                (blob, remote.put(blob, &mut Content::of(&mut part, *bytes))?)
            }
        };
        if is_new {
            sent.fetch_add(blob.bytes, Ordering::Relaxed);
        }
        Ok(blob)
    };
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else { return };
            match one(piece) {
                Ok(blob) => {
                    blobs.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(blob);
                    progress(done.fetch_add(blob.bytes, Ordering::Relaxed) + blob.bytes, all);
                }
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            }
        }
    };
    thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let blobs = blobs.into_inner().unwrap_or_else(PoisonError::into_inner);
    let blobs = blobs.into_iter().map(|blob| blob.expect("each piece was uploaded, or one has failed"));
    Ok((blobs.collect(), sent.into_inner()))
}

fn sha256_of(reader: &mut dyn Read) -> io::Result<Sha256> {
    let mut hasher = sha2::Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(Sha256(hasher.finalize().into())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// A range of a file that others read at the same time.
struct Part<'a> {
    file: &'a File,
    from: u64,
    bytes: u64,
    at: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        let count = self.file.read_at(&mut buffer[..wanted], self.from + self.at)?;
        if count == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Part<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match to {
            SeekFrom::Start(at) if at <= self.bytes => self.at = at,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(self.at)
    }
}
