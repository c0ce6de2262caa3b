//! A file system of one file, `disk`, with faulty zones, mounted until it is unmounted.
//!
//! `ferry-bad-disk MOUNTPOINT`. The file has a zone of 64 KiB at each MiB; [`Zone`] lists their faults.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferry_fuse::{Cache, Export, Options};
use ferry_vfs::{
    Attr, Backing, Caller, Data, Entry, Errno, Features, FileSystem, FileType, Handle, Ino, Input, IoRange, Name,
    OFlags, Output, Result,
};

/// The size of the file.
const BYTES: u64 = 16 << 20;
/// The size of a zone.
const ZONE_BYTES: u64 = 64 << 10;
/// How long slow requests take.
const SLOW: Duration = Duration::from_secs(2);
/// The file's inode.
const FILE: Ino = Ino(2);

/// The fault of a part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zone {
    Good,
    /// Cannot be read.
    Unreadable,
    /// Has no room.
    Full,
    /// Cannot be written.
    Unwritable,
    /// Returns half of the requested bytes.
    Short,
    /// Takes long.
    Slow,
    /// From then on syncs fail.
    Breaks,
    /// From then on syncs succeed again.
    Mends,
}

const ZONES: [Zone; 8] =
    [Zone::Good, Zone::Unreadable, Zone::Full, Zone::Unwritable, Zone::Short, Zone::Slow, Zone::Breaks, Zone::Mends];

/// Returns the worst zone that a range touches.
fn zone(at: &IoRange) -> Zone {
    let end = at.offset.saturating_add(at.len.into());
    let touched = |number: u64| at.offset < (number << 20) + ZONE_BYTES && end > number << 20;
    (1..).zip(&ZONES[1..]).find(|(number, _)| touched(*number)).map_or(Zone::Good, |(_, zone)| *zone)
}

struct BadDisk {
    bytes: Mutex<Vec<u8>>,
    broken: AtomicBool,
}

impl FileSystem for BadDisk {
    fn features(&self) -> Features {
        Features::default()
    }

    fn lookup(&self, cx: &Caller<'_>, _dir: Ino, name: Name<'_>) -> Result<Entry> {
        match name.as_bytes() {
            b"disk" => Ok(Entry::new(FILE, self.getattr(cx, FILE, None)?)),
            _ => Err(Errno::NOENT),
        }
    }

    fn getattr(&self, _cx: &Caller<'_>, ino: Ino, _handle: Option<Handle>) -> Result<Attr> {
        Ok(match ino {
            FILE => Attr::new(ino, FileType::RegularFile, 0o666).with_size(BYTES),
            _ => Attr::new(ino, FileType::Directory, 0o777),
        })
    }

    fn open(&self, _cx: &Caller<'_>, ino: Ino, _flags: OFlags) -> Result<Handle> {
        Ok(Handle(ino.0))
    }

    fn read(&self, _cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        let mut at = *at;
        match zone(&at) {
            Zone::Unreadable => return Err(Errno::IO),
            Zone::Short => at.len /= 2,
            Zone::Slow => std::thread::sleep(SLOW),
            _ => {}
        }
        Ok(at.read_from(&self.bytes.lock().unwrap_or_else(PoisonError::into_inner), out))
    }

    fn write(&self, _cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        match zone(at) {
            Zone::Full => return Err(Errno::NOSPC),
            Zone::Unwritable => return Err(Errno::IO),
            Zone::Slow => std::thread::sleep(SLOW),
            Zone::Breaks => self.broken.store(true, Ordering::SeqCst),
            Zone::Mends => self.broken.store(false, Ordering::SeqCst),
            _ => {}
        }
        at.write_to(&mut self.bytes.lock().unwrap_or_else(PoisonError::into_inner), input, BYTES)
    }

    fn fsync(&self, _cx: &Caller<'_>, _ino: Ino, _handle: Handle, _data_only: bool) -> Result<Option<Arc<Backing>>> {
        if self.broken.load(Ordering::SeqCst) { Err(Errno::IO) } else { Ok(None) }
    }
}

fn main() -> ExitCode {
    let Some(mountpoint) = std::env::args_os().nth(1) else {
        eprintln!("ferry-bad-disk: usage: ferry-bad-disk MOUNTPOINT");
        return ExitCode::from(2);
    };
    let bytes = vec![0; usize::try_from(BYTES).expect("16 MiB fit into memory")];
    let fs = Arc::new(BadDisk { bytes: Mutex::new(bytes), broken: AtomicBool::new(false) });
    let options = Options { cache: Cache::None, ..Options::default() };
    match Export::mount(mountpoint.as_ref(), fs, options) {
        Ok(export) => {
            export.wait();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("ferry-bad-disk: {error}");
            ExitCode::FAILURE
        }
    }
}
