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

use crate::container::Container;
use crate::error::{Error, Result};
use crate::frames::Frames;
use crate::http::{ReadSeek, Upload};
use crate::manifest::{Blob, EMPTY, MANIFEST_BYTES_MAX, Manifest, PART_BYTES, PackBlobs, Part, Sha256, Subject};
use crate::parts;
use crate::referrers;
use crate::remote::Remote;

/// The outcome of [`push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushOutcome {
    /// The digest of the image.
    pub digest: Digest,
    /// The digest of the manifest.
    pub manifest: Sha256,
    /// The number of bytes that the server lacked.
    pub sent_bytes: u64,
}

/// A part is compressed if at most this much of it is left.
const WORTHWHILE_PERCENT: u64 = 95;

/// A blob to upload.
enum NewBlob {
    Memory(Vec<u8>),
    /// A range of a source: its index, offset and length.
    Part(usize, u64, u64),
}

impl NewBlob {
    /// Its length in bytes, before compression.
    fn bytes(&self) -> u64 {
        match self {
            Self::Memory(bytes) => bytes.len() as u64,
            Self::Part(_, _, bytes) => *bytes,
        }
    }

    /// Returns what a manifest says of it before its digest is known.
    fn unnamed(&self) -> Part {
        Part { blob: Blob { sha256: Sha256([0; 32]), bytes: self.bytes() }, frames: None }
    }
}

/// The maximum length in bytes of what a manifest says of the compression of a part: four digits per frame of 256 KiB, and the keys.
fn frames_text_bytes(part: &Part) -> u64 {
    128 + 4 * part.blob.bytes.div_ceil(256 << 10)
}

/// Returns whether the parts of an image can be compressed: its manifest says more of such parts, and all may turn out so. Refuses an image
/// whose manifest registries do not accept in any case, before anything is uploaded.
fn can_compress(manifest: &Manifest, names: &[Digest], remote: &Remote) -> Result<bool> {
    let parts = || manifest.packs.values().flat_map(|pack| &pack.parts);
    let bytes = manifest.write(names).len() as u64;
    if bytes > MANIFEST_BYTES_MAX {
        return Err(Error::TooManyParts { name: remote.reference().to_string(), parts: parts().count(), bytes });
    }
    Ok(bytes + parts().map(frames_text_bytes).sum::<u64>() <= MANIFEST_BYTES_MAX)
}

/// Reads bytes from an offset; none at the end.
type ReadAt<'a> = dyn Fn(&mut [u8], u64) -> io::Result<usize> + Sync + 'a;

/// The source of parts: a pack, or composefs's objects.
struct PartSource<'a> {
    path: PathBuf,
    read_at: Box<ReadAt<'a>>,
}

impl<'a> PartSource<'a> {
    /// Concatenates composefs's objects.
    fn concatenate(list: Vec<FileObject>, objects: &'a Objects, directory: &Path) -> Self {
        let begin = |end: &mut u64, object: &FileObject| {
            let begin = *end;
            *end = end.saturating_add(object.bytes);
            Some(begin)
        };
        let begins: Vec<u64> = list.iter().scan(0, begin).collect();
        let read_at = move |buffer: &mut [u8], at: u64| {
            // Empty objects begin where the next one does, and precede it.
            let Some(number) = begins.partition_point(|begin| *begin <= at).checked_sub(1) else { return Ok(0) };
            objects.read_object(&list[number], at - begins[number], buffer).map_err(io::Error::other)
        };
        Self { path: directory.into(), read_at: Box::new(read_at) }
    }
}

/// What a pushed image is.
#[derive(Clone, Debug)]
pub(crate) enum PushAs<'a> {
    /// The image that the remote's reference names.
    Named,
    /// A referrer of a container image, without a name of its own. With a time, in seconds since 1970, it is used instead of older ones.
    Referrer(&'a Container, Option<u64>),
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
    directory: &Path,
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PushOutcome> {
    push_as(remote, (image, digest), store, directory, &PushAs::Named, jobs, progress)
}

pub(crate) fn push_as(
    remote: &Remote,
    (image, digest): (&Path, Option<Digest>),
    store: &Store,
    directory: &Path,
    kind: &PushAs<'_>,
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<PushOutcome> {
    let opened = Image::open(image, digest)?;
    let objects = Objects::open(&opened, directory)?;
    objects.verify_all()?;
    objects.verify_tree(&opened)?;
    let metadata = std::fs::read(image).map_err(|source| io_error("read", image, source))?;
    if opened.digest().algorithm().of(&metadata) != opened.digest() {
        return Err(io_error("read", image, io::Error::other("it changed meanwhile")));
    }
    let mut sources: Vec<PartSource<'_>> = Vec::new();
    let mut blobs = vec![NewBlob::Memory(EMPTY.to_vec()), NewBlob::Memory(metadata)];
    let mut names = Vec::new();
    // For each pack: whether it has an index, and the number of parts.
    let mut counts = Vec::new();
    // Those first whose indexes are needed first.
    let mut packs: Vec<_> = opened.packs().iter().collect();
    packs.sort_by_key(|pack| !pack.ahead);
    for pack in packs.into_iter().map(|pack| pack.name) {
        let path = store.pack_path(pack);
        let file = File::open(&path).map_err(|source| io_error("open", &path, source))?;
        let bytes = file.metadata().map_err(|source| io_error("examine", &path, source))?.len();
        blobs.push(NewBlob::Memory(store.index(pack)?.to_bytes()));
        let parts = (0..bytes).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        let before = blobs.len();
        blobs.extend(parts.map(|from| NewBlob::Part(sources.len(), from, PART_BYTES.min(bytes - from))));
        counts.push((true, blobs.len() - before));
        sources.push(PartSource { path, read_at: Box::new(move |buffer, at| file.read_at(buffer, at)) });
        names.push(pack);
    }
    if opened.is_composefs() {
        let list = file_objects(&opened)?;
        // This also verifies their lengths.
        objects.verify_objects(&list)?;
        let (parts, mut from) = (parts::split(&list), 0);
        counts.push((false, parts.len()));
        for bytes in parts {
            blobs.push(NewBlob::Part(sources.len(), from, bytes));
            from += bytes;
        }
        sources.push(PartSource::concatenate(list, &objects, directory));
        names.push(opened.digest());
    }
    let tree = opened.shown_digest();
    let subject = match kind {
        PushAs::Named => None,
        PushAs::Referrer(Container { manifest, bytes, media_type, .. }, created) => {
            let manifest = Blob { sha256: *manifest, bytes: bytes.len() as u64 };
            Some(Subject { media_type: media_type.clone(), manifest, tree, created: *created })
        }
    };
    let manifest_of = |blobs: Vec<Part>| {
        let image = blobs[1].blob;
        let mut rest = blobs.into_iter().skip(2);
        let mut packs: HashMap<Digest, PackBlobs> = HashMap::new();
        for (name, (has_index, parts)) in names.iter().zip(&counts) {
            let index = if *has_index { rest.next().map(|index| index.blob) } else { None };
            packs.insert(*name, PackBlobs { index, parts: rest.by_ref().take(*parts).collect() });
        }
        Manifest { digest: opened.digest(), image, packs, subject: subject.clone() }
    };
    let compresses = can_compress(&manifest_of(blobs.iter().map(NewBlob::unnamed).collect()), &names, remote)?;
    if !compresses {
        tracing::info!("{}: its parts are too many to be compressed", remote.reference());
    }
    let (blobs, sent_bytes) = upload(remote, &blobs, (&sources, compresses), jobs, progress)?;
    let manifest = manifest_of(blobs);
    let bytes = manifest.write(&names);
    match kind {
        PushAs::Named => remote.put_manifest(&bytes)?,
        PushAs::Referrer(container, _) => {
            let entry = referrers::entry(Sha256::of(&bytes), bytes.len() as u64, &manifest.annotations(&names));
            remote.put_referrer(container.manifest, &bytes, &entry)?;
        }
    }
    Ok(PushOutcome { digest: tree, manifest: Sha256::of(&bytes), sent_bytes })
}

fn io_error(what: &'static str, path: &Path, source: io::Error) -> Error {
    Error::Io { what, path: path.into(), source }
}

/// Uploads blobs concurrently, with parts compressed if that makes them shorter and `compresses` is set; returns their names in order, and
/// the number of bytes that the server lacked.
fn upload(
    remote: &Remote,
    new_blobs: &[NewBlob],
    (sources, compresses): (&[PartSource<'_>], bool),
    jobs: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<(Vec<Part>, u64)> {
    let all = new_blobs.iter().map(NewBlob::bytes).sum();
    let blobs: Mutex<Vec<Option<Part>>> = Mutex::new(vec![None; new_blobs.len()]);
    let (next, done, sent) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let (stop, failed) = (AtomicBool::new(false), Mutex::new(None));
    let put = |blob: Blob, reader: &mut dyn ReadSeek| -> Result<Blob> {
        if remote.put(blob, &mut Upload { reader, bytes: blob.bytes })? {
            sent.fetch_add(blob.bytes, Ordering::Relaxed);
        }
        Ok(blob)
    };
    let upload_one = |new: &NewBlob| -> Result<Part> {
        let (number, from, bytes) = match new {
            NewBlob::Memory(bytes) => {
                let blob = Blob { sha256: Sha256::of(bytes), bytes: bytes.len() as u64 };
                return Ok(Part { blob: put(blob, &mut Cursor::new(bytes))?, frames: None });
            }
            NewBlob::Part(number, from, bytes) => (*number, *from, *bytes),
        };
        let source = &sources[number];
        let failed = |error| io_error("read", &source.path, error);
        let mut part = PartReader { source, from, bytes, at: 0 };
        if compresses {
            let mut packed = Vec::new();
            let frames = Frames::pack(&mut part, &mut packed).map_err(failed)?;
            if frames.blob_bytes() <= bytes / 100 * WORTHWHILE_PERCENT {
                let blob = Blob { sha256: Sha256::of(&packed), bytes: frames.blob_bytes() };
                return Ok(Part { blob: put(blob, &mut Cursor::new(packed))?, frames: Some(frames) });
            }
        }
        let blob = Blob { sha256: part.rewind().and_then(|()| sha256_of(&mut part)).map_err(failed)?, bytes };
        Ok(Part { blob: put(blob, &mut part)?, frames: None })
    };
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(new) = new_blobs.get(at) else { return };
            match upload_one(new) {
                Ok(part) => {
                    blobs.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(part);
                    progress(done.fetch_add(new.bytes(), Ordering::Relaxed) + new.bytes(), all);
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
    let blobs = blobs.into_iter().map(|blob| blob.expect("each blob was uploaded, or one has failed"));
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

/// Reads a range of a source, which other threads read, too.
struct PartReader<'a> {
    source: &'a PartSource<'a>,
    from: u64,
    bytes: u64,
    at: u64,
}

impl Read for PartReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        let count = (self.source.read_at)(&mut buffer[..wanted], self.from + self.at)?;
        if count == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for PartReader<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match to {
            SeekFrom::Start(at) if at <= self.bytes => self.at = at,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        Ok(self.at)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use ferry_image::Algorithm;

    use super::*;
    use crate::http::{Client, Options};

    #[test]
    fn images_whose_manifest_no_registry_accepts_are_refused() {
        let remote = Remote::open(&"oci:localhost:1/a/b:1".parse().unwrap(), Client::new(Options::default())).unwrap();
        let digest = |byte| Digest::new(Algorithm::Blake3, [byte; 32]);
        let manifest = |part: &Part, count| {
            let pack = PackBlobs { index: Some(part.blob), parts: vec![part.clone(); count] };
            Manifest { digest: digest(1), image: part.blob, packs: [(digest(2), pack)].into(), subject: None }
        };
        let unnamed = NewBlob::Part(0, 0, PART_BYTES).unnamed();
        let check = |count| can_compress(&manifest(&unnamed, count), &[digest(2)], &remote);
        assert!(check(2800).unwrap());
        for count in [3000, 13_000] {
            assert!(!check(count).unwrap(), "{count}: it fits, if its parts are not compressed");
        }
        let error = check(14_000).unwrap_err().to_string();
        assert!(error.contains("its 14000 parts") && error.contains("split the tree"), "{error}");
        // As compressed parts turn out.
        let frames = Frames::pack(&mut io::repeat(0).take(PART_BYTES), &mut io::sink()).unwrap();
        let text = |part: &Part| manifest(part, 1).write(&[digest(2)]).len() as u64;
        let packed = text(&Part { frames: Some(frames), ..unnamed.clone() });
        let expected = text(&unnamed) + frames_text_bytes(&unnamed);
        assert!((expected - 100..=expected).contains(&packed), "{packed}, not {expected}");
    }
}
