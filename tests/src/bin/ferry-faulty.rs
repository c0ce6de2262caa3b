//! A file system with faulty files, each with another fault, mounted until it is unmounted.
//!
//! `ferry-faulty MOUNTPOINT PATH SECONDS`: the transport of requests, and the time limit of a handler in seconds. The
//! file `good` has no fault: its users must not notice the others.

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ferry_fuse::{Cache, Export, Options};
use ferry_vfs::{
    Attr, Backing, Caller, Data, DirItem, DirOutput, DirRange, Entry, Errno, Extent, Features, FileSystem, FileType,
    Handle, Ino, Input, IoRange, Name, OFlags, Output, Result,
};

/// What `good` holds.
const GOOD: &[u8] = b"as it should be\n";
/// The reported size of the other files, unless that is their fault.
const SIZE: u64 = 65_536;
/// More than a reply may contain.
const FAR_TOO_MUCH: usize = 4 << 20;

/// The fault of each file; its inode number is its index here, after the root's.
const FILES: &[&str] = &[
    "good",
    "panic-lookup",
    "panic-getattr",
    "panic-open",
    "panic-read",
    "panic-write",
    "panic-readdir",
    "block-read",
    "block-getattr",
    "more-read",
    "claims-read",
    "claims-write",
    "size-negative",
    "extent-path-only",
    "extent-write-only",
    "extent-empty",
    "link-long",
    "link-empty",
    "xattr-long",
    "type-none",
    "ino-of-root",
    "names-bad",
];

struct FaultyFs {
    empty: Arc<Backing>,
    path_only: Arc<Backing>,
    write_only: Arc<Backing>,
}

impl FaultyFs {
    fn new() -> std::io::Result<Self> {
        let file = tempfile::NamedTempFile::new()?;
        let write_only = File::options().write(true).open(file.path())?;
        let path_only = rustix::fs::open(file.path(), OFlags::PATH, rustix::fs::Mode::empty())?;
        let backing = |fd: OwnedFd| Arc::new(Backing::new(fd));
        Ok(Self {
            path_only: backing(path_only),
            write_only: backing(write_only.into()),
            empty: backing(file.into_file().into()),
        })
    }

    fn attr(ino: Ino) -> Attr {
        let name = name(ino);
        let (kind, size) = match name {
            "" | "panic-readdir" | "names-bad" => (FileType::Directory, 0),
            "link-long" | "link-empty" => (FileType::Symlink, SIZE),
            "good" => (FileType::RegularFile, GOOD.len() as u64),
            "size-negative" => (FileType::RegularFile, u64::MAX),
            _ => (FileType::RegularFile, SIZE),
        };
        let mut attr = Attr::new(ino, kind, 0o777).with_size(size);
        if name == "type-none" {
            attr.mode = 0o777;
        }
        attr
    }
}

/// Returns the name of an inode; empty for the root.
fn name(ino: Ino) -> &'static str {
    let place = usize::try_from(ino.0).ok().and_then(|ino| ino.checked_sub(2));
    place.and_then(|place| FILES.get(place)).copied().unwrap_or_default()
}

/// Never comes back.
fn block() -> ! {
    loop {
        std::thread::park();
    }
}

impl FileSystem for FaultyFs {
    fn features(&self) -> Features {
        Features::default()
    }

    fn lookup(&self, _cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let place = FILES.iter().position(|known| known.as_bytes() == name.as_bytes()).ok_or(Errno::NOENT)?;
        assert_ne!(FILES[place], "panic-lookup", "as its name says");
        if FILES[place] == "ino-of-root" {
            return Ok(Entry::new(dir, Self::attr(dir)));
        }
        let ino = Ino(place as u64 + 2);
        Ok(Entry::new(ino, Self::attr(ino)))
    }

    fn getattr(&self, _cx: &Caller<'_>, ino: Ino, _handle: Option<Handle>) -> Result<Attr> {
        match name(ino) {
            "panic-getattr" => panic!("as its name says"),
            "block-getattr" => block(),
            _ => Ok(Self::attr(ino)),
        }
    }

    fn readlink(&self, _cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Ok(vec![b'x'; if name(ino) == "link-long" { FAR_TOO_MUCH } else { 0 }])
    }

    fn open(&self, _cx: &Caller<'_>, ino: Ino, _flags: OFlags) -> Result<Handle> {
        assert_ne!(name(ino), "panic-open", "as its name says");
        Ok(Handle(ino.0))
    }

    fn read(&self, _cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        let extent = |file: &Arc<Backing>| Data::Extent(Extent { file: Arc::clone(file), offset: at.offset });
        Ok(match name(at.ino) {
            "good" => at.read_from(GOOD, out),
            "panic-read" => panic!("as its name says"),
            "block-read" => block(),
            "more-read" => {
                out.put(&vec![b'x'; FAR_TOO_MUCH]);
                Data::Bytes(FAR_TOO_MUCH)
            }
            "claims-read" => Data::Bytes(usize::MAX),
            "extent-path-only" => extent(&self.path_only),
            "extent-write-only" => extent(&self.write_only),
            "extent-empty" => extent(&self.empty),
            _ => Data::Bytes(0),
        })
    }

    fn write(&self, _cx: &Caller<'_>, at: &IoRange, _input: &mut dyn Input) -> Result<Data> {
        match name(at.ino) {
            "panic-write" => panic!("as its name says"),
            "claims-write" => Ok(Data::Bytes(usize::MAX)),
            _ => Ok(Data::Bytes(0)),
        }
    }

    fn opendir(&self, _cx: &Caller<'_>, ino: Ino, _flags: OFlags) -> Result<Handle> {
        Ok(Handle(ino.0))
    }

    fn readdir(&self, _cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        assert_ne!(name(at.ino), "panic-readdir", "as its name says");
        if at.offset == 0 {
            for (next, name) in [(1, "a/b".to_owned()), (2, String::new()), (3, "x".repeat(300))] {
                out.push(&DirItem { ino: 9, next, kind: FileType::RegularFile, name: name.as_bytes() }, None);
            }
        }
        Ok(())
    }

    fn getxattr(&self, _cx: &Caller<'_>, _ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        if name == b"user.long" { Ok(vec![b'x'; FAR_TOO_MUCH]) } else { Err(Errno::NODATA) }
    }

    fn listxattr(&self, _cx: &Caller<'_>, _ino: Ino) -> Result<Vec<u8>> {
        Ok(vec![b'x'; FAR_TOO_MUCH])
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [mountpoint, path, seconds] = &args[..] else {
        eprintln!("ferry-faulty: usage: ferry-faulty MOUNTPOINT PATH SECONDS");
        return ExitCode::from(2);
    };
    let (Ok(path), Ok(seconds)) = (path.parse(), seconds.parse()) else {
        eprintln!("ferry-faulty: no path {path}, or no number {seconds}");
        return ExitCode::from(2);
    };
    let handler_timeout = Duration::from_secs(seconds);
    let options = Options { path, handler_timeout, cache: Cache::None, ..Options::default() };
    let fs = match FaultyFs::new() {
        Ok(fs) => Arc::new(fs),
        Err(error) => {
            eprintln!("ferry-faulty: {error}");
            return ExitCode::FAILURE;
        }
    };
    match Export::mount(mountpoint.as_ref(), fs, options) {
        Ok(export) => {
            export.wait();
            // Handlers that never come back would hold up an orderly end.
            std::process::exit(0);
        }
        Err(error) => {
            eprintln!("ferry-faulty: {error}");
            ExitCode::FAILURE
        }
    }
}
