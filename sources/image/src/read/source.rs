//! The source "image": an image and its packs, as a file system for any export.

use std::path::Path;
use std::sync::Arc;

use ferry_vfs::{
    Attr, Backing, ByNumber, Caller, Data as Moved, DirItem, DirOutput, DirRange, Entry, Errno, Features, FileSystem,
    FileType, Handle, Ino, IoRange, Mappable, Name, OFlags, Output, Piece, RatelimitedLog, Result, Seek, Statfs,
    openable,
};

use crate::format::data::Data;
use crate::format::digest::Digest;
use crate::format::erofs::{BLOCK_BYTES, XATTR_ACL, XATTR_LABEL};
use crate::format::error::{self, ImageResult};
use crate::format::image::{Image, Inode, Nid};
use crate::read::objects::{Objects, read_exact};
use crate::store::fetch::FetchOptions;
use crate::store::object_error::ObjectError;

/// An image as a file system.
#[derive(Debug)]
pub struct Source {
    image: Image,
    objects: Arc<Objects>,
    damage_log: RatelimitedLog,
}

impl Source {
    /// Returns the length of the image, which is in memory, in bytes.
    pub fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    /// Opens an image and its packs.
    ///
    /// # Errors
    ///
    /// It is not the requested image, or something is missing or damaged.
    pub fn open(image: &Path, store: &Path, digest: Option<Digest>) -> error::Result<Self> {
        Self::open_with(image, store, digest, None)
    }

    /// As [`Self::open`]; with `missing`, missing objects are fetched on read.
    ///
    /// # Errors
    ///
    /// It is not the requested image, or something cannot be fetched or is damaged.
    pub fn open_with(
        image: &Path,
        store: &Path,
        digest: Option<Digest>,
        missing: Option<FetchOptions>,
    ) -> error::Result<Self> {
        let image = Image::open(image, digest)?;
        let objects = Objects::open_with(&image, store, missing)?;
        let source = Self { image, objects: Arc::new(objects), damage_log: RatelimitedLog::default() };
        source.begin();
        Ok(source)
    }

    /// Opens an image without starting a thread, for a process that forks afterwards; see [`Self::begin`]. In the flat
    /// layout everything that is read later is open then, in the composefs layout a directory.
    ///
    /// # Errors
    ///
    /// Something is missing or damaged.
    pub fn open_idle(image: Image, store: &Path) -> error::Result<Self> {
        let objects = Objects::open(&image, store)?;
        Ok(Self { image, objects: Arc::new(objects), damage_log: RatelimitedLog::default() })
    }

    /// As [`Self::open_idle`], for a composefs image whose store this process sees at another path.
    ///
    /// # Errors
    ///
    /// The store cannot be opened.
    pub fn open_idle_at(image: Image, store: &Path, seen: &Path) -> error::Result<Self> {
        let objects = Objects::open_at(&image, store, seen)?;
        Ok(Self { image, objects: Arc::new(objects), damage_log: RatelimitedLog::default() })
    }

    /// Starts background threads; further calls have no effect.
    pub fn begin(&self) {
        self.objects.verify_ahead();
    }

    /// Returns the objects, so that missing ones can be fetched in the background.
    pub fn shared_objects(&self) -> Arc<Objects> {
        Arc::clone(&self.objects)
    }

    /// Returns the image.
    pub fn image(&self) -> &Image {
        &self.image
    }

    pub(crate) fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Reads bytes of a file.
    ///
    /// # Errors
    ///
    /// `IO` if the image or the object is damaged.
    pub fn read_at(&self, nid: Nid, offset: u64, bytes: &mut [u8]) -> Result<usize> {
        let inode = self.flawed(self.image.inode(nid))?;
        let left = inode.bytes.saturating_sub(offset);
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
        let bytes = &mut bytes[..count];
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.flawed(self.image.data(&inode))? {
            Data::Near(whole, rest) => {
                // Both halves together are as long as the file.
                let all = whole.iter().chain(rest).skip(usize::try_from(offset).unwrap_or(usize::MAX));
                bytes.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
            }
            data @ Data::Object { .. } => {
                let part = offset..offset + bytes.len() as u64;
                let extent =
                    self.objects.extent(data, inode.bytes, part).map_err(|bad| self.refused(&bad))?.ok_or(Errno::IO)?;
                read_exact(&extent.file, extent.offset, bytes).map_err(|error| {
                    self.damage_log.error(format_args!("cannot read what is in the store: {error}"));
                    Errno::IO
                })?;
            }
            data => self.objects.read(data, inode.bytes, offset, bytes).map_err(|bad| self.refused(&bad))?,
        }
        Ok(count)
    }

    /// Returns the log for errors that readers of a damaged image can cause.
    pub(crate) fn damage_log(&self) -> &RatelimitedLog {
        &self.damage_log
    }

    /// Logs unavailable bytes, and returns `IO` for their readers.
    fn refused(&self, bad: &ObjectError) -> Errno {
        self.damage_log.error(format_args!("{bad}; its readers get EIO"));
        Errno::IO
    }

    /// Logs damage of the image, and returns `IO` for its readers.
    fn flawed<T>(&self, checked: ImageResult<T>) -> Result<T> {
        checked.map_err(|flaw| {
            self.damage_log.error(format_args!("the image is damaged: {flaw}"));
            Errno::IO
        })
    }

    fn nid(&self, ino: Ino) -> Nid {
        if ino == Ino::ROOT { self.image.root() } else { Nid(ino.0) }
    }

    fn inode(&self, ino: Ino) -> Result<Inode> {
        self.image.inode(self.nid(ino)).map_err(|_| Errno::STALE)
    }

    fn directory(&self, ino: Ino) -> Result<Inode> {
        let inode = self.inode(ino)?;
        // Listing another type of file is the caller's error, not damage.
        if inode.kind() == FileType::Directory { Ok(inode) } else { Err(Errno::NOTDIR) }
    }

    fn ino(&self, nid: Nid) -> Ino {
        if nid == self.image.root() { Ino::ROOT } else { Ino(nid.0) }
    }

    fn entry(&self, nid: Nid) -> Result<Entry> {
        let inode = self.flawed(self.image.inode(nid))?;
        Ok(Entry::new(self.ino(nid), self.attr(&inode)))
    }

    fn attr(&self, inode: &Inode) -> Attr {
        let mut attr = Attr::new(self.ino(inode.nid), inode.kind(), inode.mode).with_size(inode.bytes);
        (attr.uid, attr.gid, attr.nlink, attr.rdev) = (inode.uid, inode.gid, inode.nlink, inode.rdev());
        (attr.atime, attr.mtime, attr.ctime, attr.btime) = (inode.mtime, inode.mtime, inode.mtime, None);
        attr
    }
}

fn type_of(kind: u8) -> FileType {
    match kind {
        1 => FileType::RegularFile,
        2 => FileType::Directory,
        3 => FileType::CharacterDevice,
        4 => FileType::BlockDevice,
        5 => FileType::Fifo,
        6 => FileType::Socket,
        7 => FileType::Symlink,
        _ => FileType::Unknown,
    }
}

impl FileSystem for Source {
    fn features(&self) -> Features {
        Features {
            read_only: true,
            posix_acl: self.image.may_have_acls(),
            // Bytes in packs have no file of their own.
            backing: self.image.is_composefs(),
            by_number: ByNumber::Any,
            constant: true,
            ..Features::default()
        }
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        Some(self)
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.objects.counts()
    }

    fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let dir = self.directory(dir)?;
        self.entry(self.flawed(self.image.lookup(&dir, name))?.ok_or(Errno::NOENT)?)
    }

    fn lookup_parent(&self, _: &Caller<'_>, dir: Ino) -> Result<Entry> {
        self.entry(self.flawed(self.image.parent(&self.directory(dir)?))?)
    }

    fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        let inode = self.inode(ino)?;
        Ok(Entry::new(ino, self.attr(&inode)))
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(self.attr(&self.inode(ino)?))
    }

    fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.inode(ino)?;
        if inode.kind() != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        self.flawed(self.image.link(&inode))
    }

    fn open(&self, _: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        openable(self.inode(ino)?.kind())?;
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC) {
            return Err(Errno::ROFS);
        }
        Ok(Handle(ino.0))
    }

    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Moved> {
        let inode = self.inode(at.ino)?;
        let len = u64::from(at.len);
        let data = self.flawed(self.image.data(&inode))?;
        if let Some(end) = at.offset.checked_add(len).filter(|end| *end <= inode.bytes)
            && let Some(extent) =
                self.objects.extent(data, inode.bytes, at.offset..end).map_err(|bad| self.refused(&bad))?
        {
            return Ok(Moved::Extent(extent));
        }
        // The following bytes in the pack belong to other files.
        let left = inode.bytes.saturating_sub(at.offset).min(len);
        let mut bytes = vec![0; usize::try_from(left).unwrap_or_default()];
        let count = self.read_at(inode.nid, at.offset, &mut bytes)?;
        Ok(Moved::Bytes(out.put(&bytes[..count])))
    }

    fn backing(&self, _: &Caller<'_>, ino: Ino, _: Handle) -> Option<Arc<Backing>> {
        let inode = self.inode(ino).ok()?;
        self.objects.whole_file(self.image.data(&inode).ok()?, inode.bytes)
    }

    fn flush(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64) -> Result<()> {
        Ok(())
    }

    fn opendir(&self, _: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        self.directory(ino).map(|_| Handle(ino.0))
    }

    fn readdir(&self, _: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        let dir = self.directory(at.ino)?;
        for found in self.flawed(self.image.entries(&dir, at.offset))? {
            let found = self.flawed(found)?;
            if !out.fits(found.name) {
                break;
            }
            let is_own = matches!(found.name, b"." | b"..");
            let entry = if at.plus && !is_own { Some(self.entry(found.nid)?) } else { None };
            let item =
                DirItem { ino: self.ino(found.nid).0, next: found.next, kind: type_of(found.kind), name: found.name };
            out.push(&item, entry.as_ref());
        }
        Ok(())
    }

    fn statfs(&self, _: &Caller<'_>, _: Ino) -> Result<Statfs> {
        let packs: u64 = self.image.packs().iter().map(|pack| pack.blocks).sum();
        Ok(Statfs {
            blocks: packs + self.image.bytes() / 4096,
            files: self.image.inodes(),
            bsize: 4096,
            frsize: 4096,
            namelen: 255,
            ..Statfs::default()
        })
    }

    fn getxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        if !self.image.may_have_xattrs() {
            // Clients then stop asking.
            return Err(Errno::NOSYS);
        }
        // ls(1) requests both for each file, unless it is told once that there are none.
        let no_acl = name.starts_with(XATTR_ACL) && !self.image.may_have_acls();
        if no_acl || (name == XATTR_LABEL && !self.image.may_have_labels()) {
            return Err(Errno::OPNOTSUPP);
        }
        let xattrs = self.flawed(self.image.xattrs(&self.inode(ino)?))?;
        xattrs.into_iter().find(|(known, _)| known == name).map(|(_, value)| value.to_vec()).ok_or(Errno::NODATA)
    }

    fn listxattr(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        // Without attributes the list is empty, as in the kernel's EROFS: programs that copy attributes treat "not
        // supported" as an error, and clients apply it to all files.
        let xattrs = self.flawed(self.image.xattrs(&self.inode(ino)?))?;
        Ok(xattrs.into_iter().flat_map(|(name, _)| [name, vec![0]].concat()).collect())
    }

    fn lseek(&self, _: &Caller<'_>, ino: Ino, _: Handle, offset: u64, seek: Seek) -> Result<u64> {
        let inode = self.inode(ino)?;
        match seek {
            _ if offset >= inode.bytes => Err(Errno::NXIO),
            Seek::Data => Ok(offset),
            Seek::Hole => Ok(inode.bytes),
        }
    }
}

impl Mappable for Source {
    fn map_pieces(&self, _: &Caller<'_>, ino: Ino, offset: u64, len: u64) -> Result<Vec<Piece>> {
        let inode = self.inode(ino)?;
        openable(inode.kind())?;
        if !offset.is_multiple_of(BLOCK_BYTES as u64) {
            return Err(Errno::INVAL);
        }
        let end = offset.saturating_add(len).min(inode.bytes);
        if offset >= end {
            return Ok(Vec::new());
        }
        let data = self.flawed(self.image.data(&inode))?;
        if let Data::Near(..) = data {
            let mut bytes = vec![0; usize::try_from(end - offset).map_err(|_| Errno::OVERFLOW)?];
            self.read_at(inode.nid, offset, &mut bytes)?;
            return Ok(vec![Piece::Bytes(bytes)]);
        }
        self.objects.places(data, inode.bytes, offset..end).map_err(|bad| self.refused(&bad))
    }
}
