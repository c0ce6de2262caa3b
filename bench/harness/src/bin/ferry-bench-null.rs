//! The null file system, mounted: any name in its one directory is a file, writes are discarded, reads return zeros.
//!
//! Only the cost of the transport remains. bench/peers/null.c is the same with libfuse.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::Parser;
use ferry_fuse::{Export, Options};
use ferry_vfs::{
    Attr, Caller, Data, Entry, FileSystem, FileType, Handle, Ino, Input, IoRange, Name, OFlags, Output, SetAttr,
};

/// The size of every file: what the harness asks fio to work on, and as large in libfuse's null file system.
const FILE_BYTES: u64 = 32 << 20;

/// The largest read: 256 pages.
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

#[derive(Debug, Parser)]
struct Cli {
    /// Where
    mountpoint: PathBuf,
    /// How requests travel: auto, uring or devfuse
    #[arg(long, default_value = "auto")]
    path: ferry_fuse::Path,
}

struct Null;

fn attr(ino: Ino) -> Attr {
    match ino {
        Ino::ROOT => Attr::new(ino, FileType::Directory, 0o755),
        _ => Attr::new(ino, FileType::RegularFile, 0o644).with_size(FILE_BYTES),
    }
}

/// The same name is always the same inode: FNV-1a, with a bit that keeps it off the root's number.
fn number(name: Name<'_>) -> Ino {
    let hash = name
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    Ino(hash | 2)
}

impl FileSystem for Null {
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> ferry_vfs::Result<Entry> {
        let ino = number(name);
        Ok(Entry::new(ino, attr(ino)))
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> ferry_vfs::Result<Attr> {
        Ok(attr(ino))
    }

    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, _: &SetAttr) -> ferry_vfs::Result<Attr> {
        Ok(attr(ino))
    }

    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> ferry_vfs::Result<Handle> {
        Ok(Handle(0))
    }

    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> ferry_vfs::Result<Data> {
        let left = FILE_BYTES.saturating_sub(at.offset);
        let count = usize::try_from(left).map_or(ZEROS.len(), |left| left.min(ZEROS.len())).min(at.len as usize);
        Ok(Data::Bytes(out.put(&ZEROS[..count])))
    }

    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> ferry_vfs::Result<Data> {
        Ok(Data::Bytes(at.len as usize))
    }

    fn fsync(&self, _: &Caller<'_>, _: Ino, _: Handle, _: bool) -> ferry_vfs::Result<Option<Arc<ferry_vfs::Backing>>> {
        Ok(None)
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    // As libfuse's is set up: extended attributes are none of its business.
    let options = Options { path: cli.path, passthrough: Some(false), xattr: false, ..Options::default() };
    Export::mount(&cli.mountpoint, Arc::new(Null), options)?.wait();
    Ok(())
}
