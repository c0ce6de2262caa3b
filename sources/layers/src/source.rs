//! The tree as a file system.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Attr, Caller, Change, Changes, CreateArgs, Data, DirItem, DirOutput, DirRange, Entry, Errno, Features, FileSystem,
    FileType, Handle, Ino, IoRange, Name, OFlags, Output, Result, Seek, SessionId, SetAttr, Statfs, Timespec, openable,
};

use crate::LayerStore;
use crate::lookup::Finder;
use crate::name::{digest_of, reference_name, reference_of};
use crate::tree::{MountedLayer, Node};

/// Engines try to create this name in the directory of a layer when they begin to use it.
const USE: &[u8] = b"use";
/// The maximum of a read of `info` or `blob` in bytes; clients of this host read at most 1 MiB.
const READ_BYTES_MAX: usize = 1 << 20;

/// A listing of a layer, with the numbers of this tree.
struct Listing<'a> {
    layer: &'a MountedLayer,
    out: &'a mut dyn DirOutput,
}

impl DirOutput for Listing<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        self.out.fits(name)
    }

    fn wants(&mut self, name: &[u8], kind: FileType) -> bool {
        self.out.wants(name, kind)
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        let ino = self.layer.file_ino(Ino(item.ino)).0;
        let entry = entry.map(|entry| referred(self.layer, *entry));
        self.out.push(&DirItem { ino, ..*item }, entry.as_ref());
    }
}

/// Returns an entry of a layer with the numbers of this tree; it carries one reference.
fn referred(layer: &MountedLayer, entry: Entry) -> Entry {
    layer.refer();
    Entry { ino: layer.file_ino(entry.ino), attr: renumbered(layer, entry.attr), ..entry }
}

fn renumbered(layer: &MountedLayer, attr: Attr) -> Attr {
    Attr { ino: layer.file_ino(Ino(attr.ino)).0, ..attr }
}

/// Returns the attributes of a directory, or of a file with this size. They never change.
fn fixed(ino: Ino, size: Option<u64>) -> Attr {
    let (kind, mode) = if size.is_some() { (FileType::RegularFile, 0o444) } else { (FileType::Directory, 0o555) };
    let time = Timespec::default();
    let attr = Attr::new(ino, kind, mode).with_size(size.unwrap_or(0));
    Attr { atime: time, mtime: time, ctime: time, btime: None, ..attr }
}

impl LayerStore {
    fn node(&self, ino: Ino) -> Result<Node> {
        self.finder.tree.node(ino).ok_or(Errno::STALE)
    }

    /// Returns the layer of an inode, with its number there.
    fn file(&self, ino: Ino) -> Result<(Arc<MountedLayer>, Ino)> {
        match self.node(ino)? {
            Node::File(layer, ino) => Ok((layer, ino)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns the directory of an image, with one more reference.
    fn image(&self, reference: &str) -> Result<Entry> {
        let ino = self.finder.tree.refer_image(reference).ok_or_else(|| {
            tracing::warn!("{reference}: too many images are in use; the engine must pull its layers");
            Errno::NOENT
        })?;
        Ok(Entry::new(ino, fixed(ino, None)))
    }

    fn layer(&self, reference: &str, name: Name<'_>) -> Result<Entry> {
        let name = digest_of(name.as_bytes()).ok_or(Errno::NOENT)?;
        for reference in self.finder.tree.references_to_evict() {
            if let Ok(name) = Name::new(reference_name(&reference).as_bytes()) {
                // Clients keep entries that are in use.
                self.changes.publish(SessionId::default(), || Change::Entry { dir: Ino::ROOT, name: name.to_buf() });
            }
        }
        self.finder.tree.drop_blobs(self.finder.options.blob_lifetime);
        let layer = self.finder.layer(reference, name)?;
        Ok(Entry::new(layer.ino(), fixed(layer.ino(), None)))
    }

    /// Records that an engine begins to use a layer (`known`), or no longer does. Returns whether that was the last use.
    fn count_use(&self, key: (&str, &str), known: Option<&crate::entry::Entry>) -> bool {
        self.finder.entries.count_use(key, known).unwrap_or_else(|error| {
            tracing::warn!("cannot count the uses of layer {}: {}", key.1, ferry_image::error_chain(&error));
            false
        })
    }

    /// Returns the blob of a layer for a read; fetches it if it is not here.
    fn blob(&self, layer: &MountedLayer) -> Result<Arc<File>> {
        let mut blob = lock(&layer.blob);
        if let Some((file, read)) = &mut *blob {
            *read = Instant::now();
            return Ok(Arc::clone(file));
        }
        let fetched = self.finder.fetch_blob(&layer.entry).map_err(|error| Finder::refuse_blob(&layer.log, &error))?;
        Ok(Arc::clone(&blob.insert((Arc::new(fetched), Instant::now())).0))
    }

    fn attr(&self, node: &Node, ino: Ino) -> Result<Attr> {
        Ok(match node {
            Node::Root | Node::Image(_) | Node::Layer(_) => fixed(ino, None),
            Node::Info(layer) => fixed(ino, Some(layer.info.len() as u64)),
            Node::Blob(layer) => fixed(ino, Some(layer.entry.bytes)),
            Node::File(layer, inner) => renumbered(layer, layer.source.getattr(&Caller::default(), *inner, None)?),
        })
    }
}

impl FileSystem for LayerStore {
    fn features(&self) -> Features {
        // Not read-only, because engines create and remove names to report uses. Layers never change once they are found.
        Features { constant: true, waits: true, ..Features::default() }
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.finder.tree.counts()
    }

    fn lookup(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        match self.node(dir)? {
            Node::Root => self.image(&reference_of(name.as_bytes()).ok_or(Errno::NOENT)?),
            Node::Image(reference) => self.layer(&reference, name),
            Node::Layer(layer) => {
                let ino = match name.as_bytes() {
                    b"diff" => layer.file_ino(Ino::ROOT),
                    b"info" => layer.info_ino(),
                    b"blob" => layer.blob_ino(),
                    _ => return Err(Errno::NOENT),
                };
                let attr = self.attr(&self.node(ino)?, ino)?;
                layer.refer();
                Ok(Entry::new(ino, attr))
            }
            Node::File(layer, dir) => Ok(referred(&layer, layer.source.lookup(cx, dir, name)?)),
            Node::Info(_) | Node::Blob(_) => Err(Errno::NOTDIR),
        }
    }

    fn lookup_parent(&self, cx: &Caller<'_>, dir: Ino) -> Result<Entry> {
        match self.node(dir)? {
            Node::Root | Node::Image(_) => Ok(Entry::new(Ino::ROOT, fixed(Ino::ROOT, None))),
            Node::Layer(layer) => self.image(&layer.key.0),
            Node::File(layer, Ino::ROOT) => {
                layer.refer();
                Ok(Entry::new(layer.ino(), fixed(layer.ino(), None)))
            }
            Node::File(layer, dir) => Ok(referred(&layer, layer.source.lookup_parent(cx, dir)?)),
            Node::Info(_) | Node::Blob(_) => Err(Errno::NOTDIR),
        }
    }

    fn forget(&self, ino: Ino, count: u64) {
        if ino != Ino::ROOT && self.finder.tree.forget(ino, count) {
            self.finder.remove_leftovers();
        }
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.attr(&self.node(ino)?, ino)
    }

    fn setattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        Err(Errno::ROFS)
    }

    fn readlink(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let (layer, ino) = self.file(ino)?;
        layer.source.readlink(cx, ino)
    }

    fn mkdir(&self, _: &Caller<'_>, _: Ino, _: Name<'_>, _: &CreateArgs) -> Result<Entry> {
        Err(Errno::ROFS)
    }

    fn create(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        match self.node(dir)? {
            Node::Layer(layer) if name.as_bytes() == USE => {
                self.count_use((&layer.key.0, &layer.key.1), Some(&layer.entry));
                // Engines treat it as success.
                Err(Errno::NOENT)
            }
            _ => Err(Errno::ROFS),
        }
    }

    fn unlink(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<()> {
        Err(Errno::ROFS)
    }

    fn rmdir(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        match (self.node(dir)?, digest_of(name.as_bytes())) {
            (Node::Image(reference), Some(digest)) => {
                if self.count_use((&reference, digest), None) {
                    // Clients drop what they have cached of the layer, unless it is in use.
                    self.changes.publish(SessionId::default(), || Change::Entry { dir, name: name.to_buf() });
                    self.finder.remove_unused_later();
                }
                // Engines treat it as success.
                Err(Errno::NOENT)
            }
            _ => Err(Errno::ROFS),
        }
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        if let Node::File(layer, inner) = self.node(ino)? {
            layer.source.open(cx, inner, flags)?;
        } else if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC) {
            return Err(Errno::ROFS);
        }
        openable(self.getattr(cx, ino, None)?.kind())?;
        Ok(Handle(0))
    }

    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        let len = usize::try_from(at.len).unwrap_or(READ_BYTES_MAX).min(READ_BYTES_MAX);
        match self.node(at.ino)? {
            Node::File(layer, ino) => layer.source.read(cx, &IoRange { ino, ..*at }, out),
            Node::Info(layer) => {
                let rest = layer.info.get(usize::try_from(at.offset).unwrap_or(usize::MAX)..).unwrap_or_default();
                Ok(Data::Bytes(out.put(&rest[..rest.len().min(len)])))
            }
            Node::Blob(layer) => {
                let mut bytes = vec![0; len];
                let count = self.blob(&layer)?.read_at(&mut bytes, at.offset).map_err(|_| Errno::IO)?;
                Ok(Data::Bytes(out.put(&bytes[..count])))
            }
            Node::Root | Node::Image(_) | Node::Layer(_) => Err(Errno::ISDIR),
        }
    }

    fn flush(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64) -> Result<()> {
        Ok(())
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        let is_directory = self.getattr(cx, ino, None)?.kind() == FileType::Directory;
        if is_directory { Ok(Handle(0)) } else { Err(Errno::NOTDIR) }
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        match self.node(at.ino)? {
            Node::File(layer, ino) => {
                layer.source.readdir(cx, &DirRange { ino, ..*at }, &mut Listing { layer: &layer, out })
            }
            Node::Layer(layer) => {
                let names = [
                    ("diff", layer.file_ino(Ino::ROOT), FileType::Directory),
                    ("info", layer.info_ino(), FileType::RegularFile),
                    ("blob", layer.blob_ino(), FileType::RegularFile),
                ];
                let rest = names.iter().zip(1..).skip(usize::try_from(at.offset).unwrap_or(names.len()));
                for ((name, ino, kind), next) in rest {
                    let name = name.as_bytes();
                    if !out.fits(name) {
                        break;
                    }
                    let entry = if at.plus { Some(self.lookup(cx, at.ino, Name::new(name)?)?) } else { None };
                    out.push(&DirItem { ino: ino.0, next, kind: *kind, name }, entry.as_ref());
                }
                Ok(())
            }
            Node::Root | Node::Image(_) => Ok(()),
            Node::Info(_) | Node::Blob(_) => Err(Errno::NOTDIR),
        }
    }

    fn statfs(&self, _: &Caller<'_>, _: Ino) -> Result<Statfs> {
        Ok(Statfs { bsize: 4096, frsize: 4096, namelen: 255, ..Statfs::default() })
    }

    fn getxattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let Node::File(layer, ino) = self.node(ino)? else { return Err(Errno::NODATA) };
        // A source without attributes returns ENOSYS, which clients would apply to all layers.
        layer.source.getxattr(cx, ino, name).map_err(|error| if error == Errno::NOSYS { Errno::NODATA } else { error })
    }

    fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let Node::File(layer, ino) = self.node(ino)? else { return Ok(Vec::new()) };
        layer.source.listxattr(cx, ino)
    }

    fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        let (layer, ino) = self.file(ino)?;
        layer.source.lseek(cx, ino, handle, offset, seek)
    }
}
