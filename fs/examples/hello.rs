//! One file with a greeting: nearly the smallest possible file system.
//!
//! `hello mount DIR` mounts it on this host, `hello virtiofs SOCKET` shares it with a virtual machine.

use std::process::ExitCode;

use ferry_fs::{Attr, Caller, Data, DirOutput, DirRange, Entry, Errno, FileType, Handle, Ino};
use ferry_fs::{FileSystem, IoRange, Name, Output, Result};

const NAME: &[u8] = b"hello";
const GREETING: &[u8] = b"Hello from a file system of your own!\n";
const FILE: Ino = Ino(2);

struct Hello;

impl FileSystem for Hello {
    fn lookup(&self, cx: &Caller<'_>, _dir: Ino, name: Name<'_>) -> Result<Entry> {
        match name.as_bytes() {
            NAME => Ok(Entry::new(FILE, self.getattr(cx, FILE, None)?)),
            _ => Err(Errno::NOENT),
        }
    }

    fn getattr(&self, _cx: &Caller<'_>, ino: Ino, _handle: Option<Handle>) -> Result<Attr> {
        match ino {
            Ino::ROOT => Ok(Attr::new(ino, FileType::Directory, 0o755)),
            FILE => Ok(Attr::new(ino, FileType::RegularFile, 0o444).with_size(GREETING.len() as u64)),
            _ => Err(Errno::STALE),
        }
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let file = Entry::new(FILE, self.getattr(cx, FILE, None)?);
        at.list(out, Ino::ROOT, [(0, Name::new(NAME)?, file)], |_| ());
        Ok(())
    }

    fn read(&self, _cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        match at.ino {
            FILE => Ok(at.read_from(GREETING, out)),
            _ => Err(Errno::ISDIR),
        }
    }
}

fn main() -> ExitCode {
    ferry_fs::run(Hello)
}
