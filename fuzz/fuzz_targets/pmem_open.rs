//! An image of persistent memory with any contents: checking, opening, reading, changing and repairing it ends, and what
//! was repaired is sound.
//!
//! The first byte of an input says what the rest is: payloads of the log, which get heads with good checksums; fields of
//! the superblock, likewise; or bytes to put anywhere. The mutator begins with the payloads of real images.
#![no_main]

use std::io;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use ferry_mem::pmem::format::{BLOCK_BYTES, Superblock};
use ferry_mem::pmem::{Media, Medium, Options, PMem, fsck_medium, open_media};
use ferry_vfs::{
    Caller, CreateArgs, DirItem, DirOutput, DirRange, Entry, FileSystem, Ino, IoRange, Name, OFlags, RenameFlags,
};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

const IMAGE_BYTES: usize = 1 << 20;
/// Bytes of a record's head, and of a superblock up to its checksum: see `format`.
const HEAD_BYTES: usize = 16;
const SUMMED_BYTES: usize = 92;
/// The number of mutator calls after which it starts again from a real image.
const SEED_EVERY: u32 = 256;

#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn with<T>(&self, offset: u64, bytes: usize, work: impl FnOnce(&mut [u8]) -> T) -> io::Result<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        all.get_mut(start..start.saturating_add(bytes)).map(work).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

impl Medium for Memory {
    fn bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        self.with(offset, bytes, |part| seen(part))
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize> {
        self.with(offset, bytes, fill)
    }

    fn persist(&self, _: &[Range<u64>]) -> io::Result<()> {
        Ok(())
    }
}

fn cx() -> Caller<'static> {
    Caller::default()
}

fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).expect("these names are valid")
}

fn options() -> Options {
    Options { commit: Some(Duration::ZERO), ..Options::default() }
}

fn media(bytes: Vec<u8>) -> (Arc<Memory>, Media) {
    let memory = Arc::new(Memory(Mutex::new(bytes)));
    let image: Arc<dyn Medium> = Arc::clone(&memory) as _;
    (memory, Media { image, tier2: None })
}

fn write(fs: &PMem, file: &[u8], offset: u64) {
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    if let Ok((entry, handle)) = fs.create(&cx(), Ino::ROOT, name(file), &new, OFlags::RDWR) {
        let (ino, len) = (entry.ino, 9000);
        let range = IoRange { ino, handle, offset, len, flags: OFlags::RDWR, clear_privileges: false, owner: None };
        let _ = fs.write(&cx(), &range, &mut &[7; 9000][..]);
        let _ = fs.fsync(&cx(), ino, handle, false);
        fs.release(&cx(), ino, handle);
        fs.forget(ino, 1);
    }
}

/// An image with a bit of everything.
static IMAGE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let (memory, media) = media(vec![0; IMAGE_BYTES]);
    let fs = open_media(&media, &options()).expect("zeros are made an image");
    let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
    let dir = fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &new).expect("there is room").ino;
    write(&fs, b"a", 0);
    write(&fs, b"a", 50_000);
    write(&fs, b"b", 5000);
    let _ = fs.symlink(&cx(), dir, name(b"link"), b"target");
    let _ = fs.setxattr(&cx(), dir, b"user.x", b"value", ferry_vfs::XattrFlags::empty(), false);
    let _ = fs.rename(&cx(), (Ino::ROOT, name(b"b")), (dir, name(b"c")), RenameFlags::empty());
    let _ = fs.rename(&cx(), (Ino::ROOT, name(b"a")), (dir, name(b"c")), RenameFlags::EXCHANGE);
    let _ = fs.unlink(&cx(), Ino::ROOT, name(b"a"));
    drop(fs);
    let bytes = memory.0.lock().unwrap_or_else(PoisonError::into_inner);
    bytes.clone()
});

fn superblock() -> (Superblock, usize) {
    let superblock = Superblock::decode(&IMAGE).expect("the image is a real one");
    let start = superblock.layout.log_offset(superblock.generation);
    (superblock, usize::try_from(start).expect("the image is small"))
}

fn word(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..at + 2).map_or(0, |word| usize::from(u16::from_le_bytes([word[0], word[1]])))
}

/// The payloads of the real image, as an input.
fn seed() -> Vec<u8> {
    let (superblock, mut at) = superblock();
    let mut input = vec![0];
    loop {
        let bytes = word(&IMAGE, at);
        let mut generation = [0; 4];
        generation.copy_from_slice(&IMAGE[at + 12..at + HEAD_BYTES]);
        if u64::from(u32::from_le_bytes(generation)) != superblock.generation {
            return input;
        }
        input.extend_from_slice(&IMAGE[at..at + 2]);
        input.extend_from_slice(&IMAGE[at + HEAD_BYTES..at + HEAD_BYTES + bytes]);
        at += HEAD_BYTES + bytes.next_multiple_of(8);
    }
}

/// The real image with these payloads in its log: each with two bytes of length in front.
fn with_payloads(mut input: &[u8]) -> Vec<u8> {
    let (superblock, start) = superblock();
    let mut log = Vec::new();
    let mut index = 0;
    while input.len() > 2 {
        let bytes = word(input, 0).min(input.len() - 2);
        let payload = &input[2..2 + bytes];
        let length = u32::try_from(bytes).unwrap_or(0).to_le_bytes();
        let sequence = (superblock.generation << 32 | index).to_le_bytes();
        let sum = crc32c::crc32c_append(crc32c::crc32c_append(superblock.salt, &length), &sequence);
        let sum = crc32c::crc32c_append(sum, payload);
        for part in [&length[..], &sum.to_le_bytes(), &sequence, payload] {
            log.extend_from_slice(part);
        }
        log.resize(log.len().next_multiple_of(8), 0);
        input = &input[2 + bytes..];
        index += 1;
    }
    let mut image = IMAGE.clone();
    let room = usize::try_from(superblock.layout.log_bytes()).unwrap_or(0);
    image[start..start + room].fill(0);
    log.truncate(room);
    image[start..start + log.len()].copy_from_slice(&log);
    image
}

/// The real image with these fields in both superblocks.
fn with_superblock(input: &[u8]) -> Vec<u8> {
    let mut image = IMAGE.clone();
    for copy in [0, BLOCK_BYTES as usize] {
        let bytes = input.len().min(SUMMED_BYTES - 12);
        image[copy + 12..copy + 12 + bytes].copy_from_slice(&input[..bytes]);
        let sum = crc32c::crc32c(&image[copy..copy + SUMMED_BYTES]);
        image[copy + SUMMED_BYTES..copy + SUMMED_BYTES + 4].copy_from_slice(&sum.to_le_bytes());
    }
    image
}

/// The real image with these bytes somewhere before the data.
fn with_bytes(input: &[u8]) -> Vec<u8> {
    let mut image = IMAGE.clone();
    let at = word(input, 0) * 8;
    let bytes = input.get(2..).unwrap_or_default();
    let end = image.len().min(at + bytes.len());
    image[at..end].copy_from_slice(&bytes[..end - at]);
    image
}

#[derive(Default)]
struct Names(Vec<(Vec<u8>, u64)>);

impl DirOutput for Names {
    fn fits(&self, _: &[u8]) -> bool {
        true
    }

    fn push(&mut self, item: &DirItem<'_>, _: Option<&Entry>) {
        self.0.push((item.name.to_vec(), item.ino));
    }
}

/// Reads a little of everything in a directory and below it.
fn look_around(fs: &PMem, dir: Ino) {
    let Ok(handle) = fs.opendir(&cx(), dir, OFlags::RDONLY) else { return };
    let mut names = Names::default();
    let _ = fs.readdir(&cx(), &DirRange { ino: dir, handle, offset: 0, plus: false }, &mut names);
    fs.releasedir(&cx(), dir, handle);
    for (file, ino) in names.0.into_iter().filter(|(file, _)| file != b"." && file != b"..") {
        let Ok(entry) = fs.lookup(&cx(), dir, name(&file)) else { panic!("{file:?} is listed and not there") };
        assert_eq!(entry.ino.0, ino);
        look_around(fs, entry.ino);
        if let Ok(handle) = fs.open(&cx(), entry.ino, OFlags::RDONLY) {
            for offset in [0, entry.attr.size.saturating_sub(4096)] {
                let (ino, len, flags) = (entry.ino, 8192, OFlags::RDONLY);
                let range = IoRange { ino, handle, offset, len, flags, clear_privileges: false, owner: None };
                let _ = fs.read(&cx(), &range, &mut Vec::new());
            }
            fs.release(&cx(), entry.ino, handle);
        }
        fs.forget(entry.ino, 1);
    }
}

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed_number: u32| {
    let real = seed();
    if real.len() <= max_size && (size < 2 || seed_number % SEED_EVERY == 0) {
        data[..real.len()].copy_from_slice(&real);
        return real.len();
    }
    fuzzer_mutate(data, size, max_size)
});

fuzz_target!(|input: &[u8]| {
    let Some((what, input)) = input.split_first() else { return };
    let image = match what % 4 {
        0 | 1 => with_payloads(input),
        2 => with_superblock(input),
        _ => with_bytes(input),
    };
    let (_, media) = media(image);
    let checked = fsck_medium(&media, false);
    if let Ok(fs) = open_media(&media, &options()) {
        assert!(checked.is_ok(), "what opens can be checked");
        look_around(&fs, Ino::ROOT);
        write(&fs, b"new", 0);
    }
    if fsck_medium(&media, true).is_ok_and(|report| report.repaired) {
        let report = fsck_medium(&media, false).expect("what was repaired can be checked");
        assert!(report.is_clean(), "what was repaired is sound: {report:?}");
    }
});
