//! Pushing: blobs first, the manifest last, so that every visible image is complete.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferry_image::{Digest, FileObject, Image, Objects, Store, file_objects};
use sha2::Digest as _;

use crate::error::{Error, Result};
use crate::manifest::{Blob, EMPTY, Manifest, PART_BYTES, PackBlobs, Sha256};
use crate::oci::Content as Body;
use crate::parts;
use crate::remote::Remote;

/// What was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// The name and proof of the image.
    pub digest: Digest,
    /// What names the manifest.
    pub manifest: Sha256,
    /// Bytes that the server did not have.
    pub sent_bytes: u64,
}

/// One blob to be.
enum Piece {
    Memory(Vec<u8>),
    /// A range of a pack: its index, offset and length.
    Part(usize, u64, u64),
}

/// What parts are read from.
trait Content: Sync {
    /// Reads bytes from an offset; none at the end.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;
    /// Where it is.
    fn path(&self) -> &Path;
}

/// A pack.
struct Pack {
    path: PathBuf,
    file: File,
}

impl Content for Pack {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        self.file.read_at(buffer, at)
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

/// composefs's objects, concatenated.
struct Joined<'a> {
    objects: &'a Objects,
    list: Vec<FileObject>,
    /// Where each begins.
    begins: Vec<u64>,
    folder: &'a Path,
}

impl<'a> Joined<'a> {
    fn of(image: &Image, objects: &'a Objects, folder: &'a Path) -> Result<Self> {
        let list = file_objects(image)?;
        // This also verifies their lengths.
        objects.prove_objects(&list)?;
        let begin = |end: &mut u64, object: &FileObject| {
            let begin = *end;
            *end = end.saturating_add(object.bytes);
            Some(begin)
        };
        let begins = list.iter().scan(0, begin).collect();
        Ok(Self { objects, list, begins, folder })
    }
}

impl Content for Joined<'_> {
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        // Empty objects begin where the next one does, and precede it.
        let Some(number) = self.begins.partition_point(|begin| *begin <= at).checked_sub(1) else { return Ok(0) };
        let (object, from) = (&self.list[number], at - self.begins[number]);
        self.objects.read_object(object, from, buffer).map_err(io::Error::other)
    }

    fn path(&self) -> &Path {
        self.folder
    }
}

/// Pushes an image with its packs, or parts of composefs's objects, that the server lacks. Each object is verified
/// before.
///
/// # Errors
///
/// The image or an object is damaged, or the server refuses a request or is not reachable.
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
    let objects = Objects::open(&opened, folder)?;
    objects.prove_all()?;
    objects.prove_tree(&opened)?;
    let metadata = std::fs::read(image).map_err(|source| io_error("read", image, source))?;
    if opened.digest().algorithm().of(&metadata) != opened.digest() {
        return Err(io_error("read", image, io::Error::other("it changed meanwhile")));
    }
    let mut contents: Vec<Box<dyn Content + '_>> = Vec::new();
    let mut pieces = vec![Piece::Memory(EMPTY.to_vec()), Piece::Memory(metadata)];
    let mut names = Vec::new();
    // For each pack: whether it has an index, and the number of parts.
    let mut counts = Vec::new();
    for pack in opened.packs().iter().map(|pack| pack.name) {
        let path = store.pack_path(pack);
        let file = File::open(&path).map_err(|source| io_error("open", &path, source))?;
        let bytes = file.metadata().map_err(|source| io_error("look at", &path, source))?.len();
        pieces.push(Piece::Memory(store.index(pack)?.to_bytes()));
        let parts = (0..bytes).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        let before = pieces.len();
        pieces.extend(parts.map(|from| Piece::Part(contents.len(), from, PART_BYTES.min(bytes - from))));
        counts.push((true, pieces.len() - before));
        contents.push(Box::new(Pack { path, file }));
        names.push(pack);
    }
    if opened.is_composefs() {
        let joined = Joined::of(&opened, &objects, folder)?;
        let (parts, mut from) = (parts::cut(&joined.list), 0);
        counts.push((false, parts.len()));
        for bytes in parts {
            pieces.push(Piece::Part(contents.len(), from, bytes));
            from += bytes;
        }
        contents.push(Box::new(joined));
        names.push(opened.digest());
    }
    let (blobs, sent_bytes) = upload(remote, &pieces, &contents, jobs, progress)?;
    let mut rest = blobs[2..].iter().copied();
    let mut packs: HashMap<Digest, PackBlobs> = HashMap::new();
    for (name, (has_index, parts)) in names.iter().zip(counts) {
        let index = if has_index { rest.next() } else { None };
        packs.insert(*name, PackBlobs { index, parts: rest.by_ref().take(parts).collect() });
    }
    let manifest = Manifest { digest: opened.digest(), image: blobs[1], packs };
    let bytes = manifest.write(&names);
    remote.put_manifest(&bytes)?;
    Ok(Pushed { digest: opened.shown_digest(), manifest: Sha256::of(&bytes), sent_bytes })
}

fn io_error(what: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { what, path: path.into(), source }
}

/// Uploads pieces concurrently; returns their names in order, and the number of bytes that the server lacked.
fn upload(
    remote: &Remote,
    pieces: &[Piece],
    contents: &[Box<dyn Content + '_>],
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Vec<Blob>, u64)> {
    let length = |piece: &Piece| match piece {
        Piece::Memory(bytes) => bytes.len() as u64,
        Piece::Part(_, _, bytes) => *bytes,
    };
    let all = pieces.iter().map(length).sum();
    let blobs: Mutex<Vec<Option<Blob>>> = Mutex::new(vec![None; pieces.len()]);
    let (next, done, sent) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (stop, failed) = (AtomicBool::new(false), Mutex::new(None));
    let one = |piece: &Piece| -> Result<Blob> {
        let (blob, is_new) = match piece {
            Piece::Memory(bytes) => {
                let blob = Blob { sha256: Sha256::of(bytes), bytes: bytes.len() as u64 };
                (blob, remote.put(blob, &mut Body::of(&mut Cursor::new(bytes), blob.bytes))?)
            }
            Piece::Part(number, from, bytes) => {
                let content = &*contents[*number];
                let mut part = Part { content, from: *from, bytes: *bytes, at: 0 };
                let sha256 = sha256_of(&mut part).map_err(|source| io_error("read", content.path(), source))?;
                let blob = Blob { sha256, bytes: *bytes };
                (blob, remote.put(blob, &mut Body::of(&mut part, *bytes))?)
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

/// A range of a file that other threads read, too.
struct Part<'a> {
    content: &'a dyn Content,
    from: u64,
    bytes: u64,
    at: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        let count = self.content.read_at(&mut buffer[..wanted], self.from + self.at)?;
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
