//! An image that is open for reading. Whatever it says is checked where it is used: images come from anywhere.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ferry_vfs::{FileType, Name, Timespec};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use zerocopy::FromBytes;

use crate::composefs::view::{METACOPY, REDIRECT, digest_of, shown};
use crate::composefs::{self, Header};
use crate::digest::{Algorithm, Digest};
use crate::erofs::{
    BLOCK_BITS, BLOCK_BYTES, Compact, DeviceSlot, Dirent, Extended, FLAT_NO_ACLS, FLAT_NO_LABELS, FLAT_NO_XATTRS,
    FLAT_VOLUME, FLAT_VOLUME_1, INCOMPAT_CHUNKS, INCOMPAT_DEVICE_TABLE, Layout, SLOT_AHEAD, SLOT_BYTES, SUPER_MAGIC,
    SUPER_OFFSET, Super, XATTR_PREFIXES, XattrEntry, XattrHeader, split_xattr,
};
use crate::error::{Doing, Error, Flaw, Result};
use crate::piece::{self, CHUNK_FORMAT};
use crate::runs::{ENTRY_BYTES, Pieces};
use crate::store::pack_name;

/// The largest image that is opened. Metadata of a hundred million files would fit.
pub const IMAGE_BYTES_MAX: u64 = 16 << 30;

/// Files up to this size may be nothing but holes: so much memory is there.
const SPARSE_BYTES_MAX: u64 = 1 << 20;
/// How much longer than its data a larger file may be. Ours have no holes; those of copies can only be where blocks of zeros are.
const HOLES_PER_DATA: u64 = 8;

/// How much tells whether it is an image, before all of it is read.
const HEAD_BYTES: usize = SUPER_OFFSET + size_of::<Super>();

/// What a look at an image's bytes answers.
pub type Checked<T> = std::result::Result<T, Flaw>;

/// An extended attribute: its full name, and its value.
pub type Xattr<'a> = (Vec<u8>, &'a [u8]);

/// One with its place in the image.
type Placed<'a> = (Xattr<'a>, Range<usize>);

/// Number of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

/// An open image.
///
/// It is a copy of the file, made once: what was proved by the digest cannot change any more.
#[derive(Debug)]
pub struct Image {
    bytes: Vec<u8>,
    digest: Digest,
    header: Super,
    packs: Vec<PackRef>,
    is_composefs: bool,
}

/// A pack that an image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackRef {
    /// Its name.
    pub name: Digest,
    /// How many blocks it has.
    pub blocks: u64,
    /// Whether a workload needs all of it first, in the order in which it is there.
    pub ahead: bool,
    /// The first one's number in the address space of the image.
    pub(crate) first_block: u64,
}

/// An inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Its number.
    pub nid: Nid,
    /// Type and permissions.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the data.
    pub mtime: Timespec,
    /// Device number of a device, first block of everything else.
    place: u32,
    layout: Layout,
    /// Where the attributes are, and what follows them.
    xattrs: (usize, usize),
}

impl Inode {
    /// What kind of file.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    /// The number of a device, in the kernel's 32-bit form; 0 for everything else.
    pub fn rdev(&self) -> u32 {
        if matches!(self.kind(), FileType::BlockDevice | FileType::CharacterDevice) { self.place } else { 0 }
    }
}

/// Where the bytes of a file are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// In the image: whole blocks, and what is left behind the inode.
    Near(&'a [u8], &'a [u8]),
    /// In a pack.
    Far {
        /// Which of [`Image::packs`].
        pack: usize,
        /// The first block there.
        block: u64,
    },
    /// In packs, piece by piece.
    Pieces(Pieces<'a>),
    /// In an object store, as composefs has one.
    Object {
        /// Where, below its folder `objects`.
        path: Option<&'a [u8]>,
        /// What they are.
        digest: Option<Digest>,
    },
}

/// One name of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name; `.` and `..` too.
    pub name: &'a [u8],
    /// The inode.
    pub nid: Nid,
    /// What kind of file the directory says it is (`FT_*`).
    pub kind: u8,
    /// Where to go on after it.
    pub next: u64,
}

impl Image {
    /// Opens an image; with a digest, only if it has that one.
    ///
    /// # Errors
    /// It cannot be read, is not the one that was asked for, or is no image of Ferry's.
    pub fn open(path: &Path, wanted: Option<Digest>) -> Result<Self> {
        Self::open_with_file(path, wanted).map(|(image, _)| image)
    }

    /// The same, and the file that was read: another one may have its name by now.
    ///
    /// # Errors
    /// As above.
    pub fn open_with_file(path: &Path, wanted: Option<Digest>) -> Result<(Self, File)> {
        let invalid = |reason| Error::Invalid { path: path.into(), reason };
        let file = File::open(path).doing("open", path)?;
        let length = file.metadata().doing("look at", path)?.len();
        let mut bytes = Vec::new();
        (&file).take(HEAD_BYTES as u64).read_to_end(&mut bytes).doing("read", path)?;
        let bytes_max = bytes_max(&bytes).map_err(invalid)?;
        let check = |length| if length > bytes_max { Err(invalid(longer(bytes_max))) } else { Ok(()) };
        check(length)?;
        if let Some(flaw) = mostly_holes(&file, length).doing("look at", path)? {
            return Err(invalid(flaw));
        }
        // Without this, what was read is copied each time that the memory grows.
        let _ = bytes.try_reserve_exact(usize::try_from(length + 1).unwrap_or_default());
        (&file).take(bytes_max + 1 - bytes.len() as u64).read_to_end(&mut bytes).doing("read", path)?;
        check(bytes.len() as u64)?;
        let digest = algorithm(&bytes).of(&bytes);
        if let Some(wanted) = wanted.filter(|wanted| *wanted != digest) {
            return Err(Error::OtherDigest { path: PathBuf::from(path), wanted, found: digest });
        }
        Ok((Self::of_bytes(bytes, digest).map_err(invalid)?, file))
    }

    /// The image that these bytes are.
    ///
    /// # Errors
    /// They are none.
    pub fn from_bytes(bytes: Vec<u8>) -> Checked<Self> {
        let digest = algorithm(&bytes).of(&bytes);
        Self::of_bytes(bytes, digest)
    }

    fn of_bytes(bytes: Vec<u8>, digest: Digest) -> Checked<Self> {
        let header = superblock(&bytes)?;
        let composefs: Header = read_at(&bytes, 0)?;
        let is_composefs = composefs.magic.get() == composefs::MAGIC;
        let mut image = Self { bytes, digest, header, packs: Vec::new(), is_composefs };
        if header.feature_incompat.get() & INCOMPAT_DEVICE_TABLE != 0 {
            image.read_devices()?;
        }
        if image.inode(image.root())?.kind() != FileType::Directory {
            return Err(Flaw { what: "a root that is no directory", offset: SUPER_OFFSET as u64 + 14 });
        }
        Ok(image)
    }

    fn read_devices(&mut self) -> Checked<()> {
        let table = usize::from(self.header.device_table.get()) * size_of::<DeviceSlot>();
        for slot in 0..usize::from(self.header.extra_devices.get()) {
            let at = table + slot * size_of::<DeviceSlot>();
            let device: DeviceSlot = read_at(&self.bytes, at)?;
            let flaw = |what| Flaw { what, offset: at as u64 };
            let name = pack_name(&device.tag).ok_or_else(|| flaw("a device that is no pack"))?;
            let (blocks, first_block) = (device.blocks.get().into(), device.first_block.get().into());
            let pack = PackRef { name, blocks, ahead: device.flags & SLOT_AHEAD != 0, first_block };
            let after = self.packs.last().map_or(u64::from(self.header.blocks.get()), PackRef::end);
            if pack.first_block < after {
                return Err(flaw("devices that overlap"));
            }
            self.packs.push(pack);
        }
        Ok(())
    }

    /// What names and proves the image.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Size of the image in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The same, as its superblock says.
    pub(crate) fn bytes_said(&self) -> u64 {
        u64::from(self.header.blocks.get()) * BLOCK_BYTES as u64
    }

    /// The superblock and what is before it, and the device table.
    pub(crate) fn head(&self) -> [Range<usize>; 2] {
        let table = usize::from(self.header.device_table.get()) * size_of::<DeviceSlot>();
        [0..HEAD_BYTES, table..table + self.packs.len() * size_of::<DeviceSlot>()]
    }

    /// All of it.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether it has the layout of composefs: files' bytes are in an object store.
    pub fn is_composefs(&self) -> bool {
        self.is_composefs
    }

    /// Whether an inode may have extended attributes.
    pub fn may_have_xattrs(&self) -> bool {
        !self.says(FLAT_NO_XATTRS)
    }

    /// Whether any inode may have an ACL; if not, mounts are faster when the kernel is told.
    pub fn may_have_acls(&self) -> bool {
        !self.says(FLAT_NO_XATTRS) && !self.says(FLAT_NO_ACLS)
    }

    /// Whether any inode may have a label of SELinux.
    pub fn may_have_labels(&self) -> bool {
        !self.says(FLAT_NO_XATTRS) && !self.says(FLAT_NO_LABELS)
    }

    fn says(&self, flag: u8) -> bool {
        let volume = &self.header.volume;
        volume.starts_with(FLAT_VOLUME) && volume[15] & flag != 0
    }

    /// How many inodes it says that there are.
    pub fn inodes(&self) -> u64 {
        self.header.inodes.get()
    }

    /// The packs that it needs, in the order in which a mount wants them.
    pub fn packs(&self) -> &[PackRef] {
        &self.packs
    }

    /// The root directory.
    pub fn root(&self) -> Nid {
        Nid(self.header.root_nid.get().into())
    }

    /// Where an inode begins, in bytes.
    fn offset(&self, nid: Nid) -> Checked<usize> {
        let meta = u64::from(self.header.meta_block.get()) * BLOCK_BYTES as u64;
        let at = nid.0.checked_mul(SLOT_BYTES as u64).and_then(|at| at.checked_add(meta));
        let outside = || Flaw { what: "an inode number outside of the image", offset: nid.0 };
        at.and_then(|at| usize::try_from(at).ok()).ok_or_else(outside)
    }

    /// An inode.
    ///
    /// # Errors
    /// There is none there.
    pub fn inode(&self, nid: Nid) -> Checked<Inode> {
        let at = self.offset(nid)?;
        let flaw = |what| Flaw { what, offset: at as u64 };
        let compact: Compact = read_at(&self.bytes, at)?;
        let (layout, is_extended) =
            Layout::of(compact.format.get()).ok_or_else(|| flaw("an inode of an unknown layout"))?;
        let xattr_bytes = match usize::from(compact.xattr_count.get()) {
            0 => 0,
            count => size_of::<XattrHeader>() + (count - 1) * 4,
        };
        let mode = u32::from(compact.mode.get());
        let inode = if is_extended {
            let inode: Extended = read_at(&self.bytes, at)?;
            let after = at + size_of::<Extended>();
            Inode {
                nid,
                mode,
                nlink: inode.nlink.get(),
                uid: inode.uid.get(),
                gid: inode.gid.get(),
                bytes: inode.size.get(),
                mtime: Timespec { sec: inode.mtime.get().cast_signed(), nsec: inode.mtime_nsec.get() },
                place: inode.place.get(),
                layout,
                xattrs: (after, after + xattr_bytes),
            }
        } else {
            let after = at + size_of::<Compact>();
            let epoch = self.header.epoch.get().cast_signed();
            Inode {
                nid,
                mode,
                nlink: compact.nlink.get().into(),
                uid: compact.uid.get().into(),
                gid: compact.gid.get().into(),
                bytes: compact.size.get().into(),
                mtime: Timespec {
                    sec: epoch.saturating_add(compact.mtime.get().into()),
                    nsec: self.header.fixed_nsec.get(),
                },
                place: compact.place.get(),
                layout,
                xattrs: (after, after + xattr_bytes),
            }
        };
        if inode.mtime.nsec >= 1_000_000_000 {
            return Err(flaw("a time with more than a second of nanoseconds"));
        }
        if inode.xattrs.1 > self.bytes.len() {
            return Err(flaw("attributes that end outside of the image"));
        }
        Ok(inode)
    }

    /// Where the bytes of a file, link or directory are. All of them are there.
    ///
    /// # Errors
    /// They would be outside of the image and its packs.
    pub fn data(&self, inode: &Inode) -> Checked<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        let outside = || flaw("data outside of the image");
        if inode.layout == Layout::Chunks {
            return if self.is_composefs { self.object(inode) } else { self.pieces(inode) };
        }
        let first = u64::from(inode.place);
        let blocks = inode.bytes.div_ceil(BLOCK_BYTES as u64);
        let far = self.packs.iter().position(|pack| first >= pack.first_block && first < pack.end());
        if let (Layout::Plain, Some(pack)) = (inode.layout, far) {
            if blocks > self.packs[pack].end() - first {
                return Err(flaw("data that end outside of their pack"));
            }
            return Ok(Data::Far { pack, block: first - self.packs[pack].first_block });
        }
        let bytes = usize::try_from(inode.bytes).map_err(|_| outside())?;
        let tail = if inode.layout == Layout::Inline { bytes % BLOCK_BYTES } else { 0 };
        let whole = match bytes - tail {
            0 => &[],
            whole => {
                let at = usize::try_from(first).map_err(|_| outside())?.checked_mul(BLOCK_BYTES).ok_or_else(outside)?;
                let end = at.checked_add(whole).ok_or_else(outside)?;
                self.bytes.get(at..end).ok_or_else(outside)?
            }
        };
        let from = inode.xattrs.1;
        if tail > 0 && from / BLOCK_BYTES != (from + tail - 1) / BLOCK_BYTES {
            return Err(flaw("data behind an inode that cross a block"));
        }
        let rest = self.bytes.get(from..from + tail).ok_or_else(outside)?;
        Ok(Data::Near(whole, rest))
    }

    /// What an inode has of the image: itself, with its attributes and what follows them, and whole blocks with its data.
    ///
    /// # Errors
    /// They would be outside of the image.
    pub(crate) fn own_bytes(&self, inode: &Inode) -> Checked<(Range<usize>, Range<usize>)> {
        let begin = self.offset(inode.nid)?;
        let mut blocks = 0..0;
        let tail = match inode.kind() {
            FileType::RegularFile | FileType::Directory | FileType::Symlink => match self.data(inode)? {
                Data::Near(whole, rest) => {
                    let from = if whole.is_empty() { 0 } else { inode.place as usize * BLOCK_BYTES };
                    blocks = from..from + whole.len();
                    rest.len()
                }
                Data::Pieces(pieces) => pieces.index.len(),
                Data::Object { .. } => self.holes(inode)?.len(),
                Data::Far { .. } => 0,
            },
            _ => 0,
        };
        Ok((begin..inode.xattrs.1 + tail, blocks))
    }

    /// The index of the chunks of a file of composefs's.
    fn holes(&self, inode: &Inode) -> Checked<&[u8]> {
        let outside = || Flaw { what: "chunks outside of the image", offset: inode.xattrs.0 as u64 };
        let chunk = (BLOCK_BYTES as u64) << (inode.place & 31);
        let index = usize::try_from(inode.bytes.div_ceil(chunk)).ok().and_then(|count| count.checked_mul(4));
        let end = index.and_then(|index| inode.xattrs.1.checked_add(index));
        end.and_then(|end| self.bytes.get(inode.xattrs.1..end)).ok_or_else(outside)
    }

    /// Where composefs has the bytes of a file: all its chunks are holes, and attributes tell.
    fn object(&self, inode: &Inode) -> Checked<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        let index = self.holes(inode)?;
        if inode.kind() != FileType::RegularFile || inode.place > 31 || index.iter().any(|byte| *byte != 0xff) {
            return Err(flaw("chunks that are no holes"));
        }
        let (mut path, mut digest) = (None, None);
        for (name, value) in self.raw_xattrs(inode)? {
            if name == REDIRECT {
                path = Some(value.strip_prefix(b"/").ok_or_else(|| flaw("a redirection that is none"))?);
            } else if name == METACOPY {
                digest = digest_of(value).map_err(|()| flaw("a digest of an unknown kind"))?;
            }
        }
        Ok(Data::Object { path, digest })
    }

    /// The pieces of a file, whose index follows the inode. They are looked at when they are wanted.
    fn pieces(&self, inode: &Inode) -> Checked<Data<'_>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        if inode.kind() != FileType::RegularFile || inode.place != CHUNK_FORMAT {
            return Err(flaw("chunks that are not of 64 KiB"));
        }
        let bytes = usize::try_from(piece::count(inode.bytes)).ok().and_then(|count| count.checked_mul(ENTRY_BYTES));
        let end = bytes.and_then(|bytes| inode.xattrs.1.checked_add(bytes));
        let index = end.and_then(|end| self.bytes.get(inode.xattrs.1..end));
        let index = index.ok_or_else(|| flaw("chunks outside of the image"))?;
        Ok(Data::Pieces(Pieces { packs: &self.packs, index, at: inode.xattrs.1 as u64 }))
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// It is none, or not in the image.
    pub fn link(&self, inode: &Inode) -> Checked<Vec<u8>> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        match self.data(inode)? {
            Data::Near(whole, rest) if inode.kind() == FileType::Symlink && (1..=4095).contains(&inode.bytes) => {
                let target = [whole, rest].concat();
                if target.contains(&0) { Err(flaw("a link with a byte of zero")) } else { Ok(target) }
            }
            _ => Err(flaw("a link without a target")),
        }
    }

    /// The block of a directory that a position is in, and how many of its bytes count.
    fn dir_block<'a>(&self, (whole, rest): (&'a [u8], &'a [u8]), number: usize) -> Option<&'a [u8]> {
        let at = number.checked_mul(BLOCK_BYTES)?;
        if at < whole.len() {
            return whole.get(at..whole.len().min(at + BLOCK_BYTES));
        }
        (at == whole.len() && !rest.is_empty()).then_some(rest)
    }

    /// The bytes of a directory, which are in the image.
    fn dir_bytes(&self, inode: &Inode) -> Checked<(&[u8], &[u8])> {
        let flaw = |what| Flaw { what, offset: inode.xattrs.0 as u64 };
        if inode.kind() != FileType::Directory {
            return Err(flaw("a directory that is none"));
        }
        match self.data(inode)? {
            Data::Near(whole, rest) => Ok((whole, rest)),
            _ => Err(flaw("a directory outside of the image")),
        }
    }

    /// The entries of a directory from a position on: 0, or [`Entry::next`]. An error is the last thing that comes.
    ///
    /// # Errors
    /// It is no directory.
    pub fn entries(&self, inode: &Inode, from: u64) -> Checked<Entries<'_>> {
        let entries = self.all_entries(inode, from)?;
        Ok(Entries { hides_stubs: self.is_composefs, ..entries })
    }

    /// The same, with composefs's whiteouts, which overlayfs does not show.
    pub(crate) fn all_entries(&self, inode: &Inode, from: u64) -> Checked<Entries<'_>> {
        let bytes = self.dir_bytes(inode)?;
        Ok(Entries { image: self, bytes, at: inode.xattrs.0 as u64, next: from, hides_stubs: false })
    }

    fn is_stub(&self, nid: Nid) -> bool {
        self.inode(nid).is_ok_and(|inode| inode.kind() == FileType::CharacterDevice && inode.rdev() == 0)
    }

    /// Finds a name in a directory.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn lookup(&self, dir: &Inode, name: Name<'_>) -> Checked<Option<Nid>> {
        Ok(self.find(dir, name.as_bytes())?.filter(|nid| !(self.is_composefs && self.is_stub(*nid))))
    }

    /// The parent of a directory.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn parent(&self, dir: &Inode) -> Checked<Nid> {
        let missing = Flaw { what: "a directory without a parent", offset: dir.xattrs.0 as u64 };
        self.find(dir, b"..")?.ok_or(missing)
    }

    /// Blocks are sorted, and so is each of them.
    fn find(&self, dir: &Inode, name: &[u8]) -> Checked<Option<Nid>> {
        let bytes = self.dir_bytes(dir)?;
        let at = dir.xattrs.0 as u64;
        let (mut low, mut high) = (0, (bytes.0.len() + bytes.1.len()).div_ceil(BLOCK_BYTES));
        while low < high {
            let middle = low + (high - low) / 2;
            let block = Block::of(self.dir_block(bytes, middle).unwrap_or_default(), at)?;
            if name < block.entry(0)?.name {
                high = middle;
                continue;
            }
            if name > block.entry(block.count - 1)?.name {
                low = middle + 1;
                continue;
            }
            let (mut from, mut to) = (0, block.count);
            while from < to {
                let index = from + (to - from) / 2;
                let entry = block.entry(index)?;
                match name.cmp(entry.name) {
                    std::cmp::Ordering::Equal => return Ok(Some(entry.nid)),
                    std::cmp::Ordering::Less => to = index,
                    std::cmp::Ordering::Greater => from = index + 1,
                }
            }
            return Ok(None);
        }
        Ok(None)
    }

    /// The extended attributes of an inode: full names, and values; of a composefs image what overlayfs shows of them.
    ///
    /// # Errors
    /// They are damaged.
    pub fn xattrs(&self, inode: &Inode) -> Checked<Vec<Xattr<'_>>> {
        let raw = self.raw_xattrs(inode)?;
        if !self.is_composefs {
            return Ok(raw);
        }
        Ok(raw.into_iter().filter_map(|(name, value)| Some((shown(name)?, value))).collect())
    }

    /// The extended attributes as they are in the image, shared ones last.
    pub(crate) fn raw_xattrs(&self, inode: &Inode) -> Checked<Vec<Xattr<'_>>> {
        let (shared, mut at) = self.shared_xattrs(inode)?;
        let mut found = Vec::new();
        while at < inode.xattrs.1 {
            let (xattr, next) = self.xattr(at, inode.xattrs.1)?;
            found.push(xattr);
            at = next;
        }
        found.extend(shared.into_iter().map(|(xattr, _)| xattr));
        Ok(found)
    }

    /// Those of an inode's attributes that others may have, too, each with its place, and where the inode's own begin.
    pub(crate) fn shared_xattrs(&self, inode: &Inode) -> Checked<(Vec<Placed<'_>>, usize)> {
        let (from, to) = inode.xattrs;
        let mut found = Vec::new();
        if from == to {
            return Ok((found, to));
        }
        let header: XattrHeader = read_at(&self.bytes[..to], from)?;
        let mut at = from + size_of::<XattrHeader>();
        let shared = self.header.xattr_block.get() as usize * BLOCK_BYTES;
        for _ in 0..header.shared_count {
            let id: zerocopy::little_endian::U32 = read_at(&self.bytes[..to], at)?;
            at += size_of_val(&id);
            let place = shared + id.get() as usize * 4;
            let (xattr, next) = self.xattr(place, self.bytes.len())?;
            found.push((xattr, place..next));
        }
        Ok((found, at))
    }

    /// The attribute at a place, and where the next one is.
    fn xattr(&self, at: usize, end: usize) -> Checked<(Xattr<'_>, usize)> {
        let flaw = |what| Flaw { what, offset: at as u64 };
        let bytes = self.bytes.get(..end).unwrap_or_default();
        let entry: XattrEntry = read_at(bytes, at)?;
        let prefix: &[u8] = match XATTR_PREFIXES.iter().find(|(number, _)| *number == entry.prefix) {
            Some((_, prefix)) => prefix,
            None if entry.prefix == 0 => b"",
            None => return Err(flaw("an attribute of an unknown kind")),
        };
        let name = at + size_of::<XattrEntry>();
        let value = name + usize::from(entry.name_len);
        let after = value + usize::from(entry.value_len.get());
        let cut = || flaw("an attribute that is cut off");
        let suffix = bytes.get(name..value).ok_or_else(cut)?;
        let value = bytes.get(value..after).ok_or_else(cut)?;
        let name = [prefix, suffix].concat();
        if split_xattr(&name).0 != entry.prefix {
            return Err(flaw("an attribute of another kind than it says"));
        }
        if name.contains(&0) || name.len() > crate::erofs::XATTR_NAME_MAX {
            return Err(flaw("an attribute whose name is none"));
        }
        Ok(((name, value), after.next_multiple_of(4)))
    }
}

impl PackRef {
    pub(crate) fn end(&self) -> u64 {
        self.first_block + self.blocks
    }
}

/// What the digest of an image is made by: BLAKE3 for the layout flat, fs-verity for all others.
fn algorithm(bytes: &[u8]) -> Algorithm {
    let is_flat = read_at(bytes, SUPER_OFFSET).is_ok_and(|header: Super| header.volume.starts_with(FLAT_VOLUME));
    if is_flat { Algorithm::Blake3 } else { Algorithm::Verity }
}

/// The superblock, if it is one that is read here.
fn superblock(bytes: &[u8]) -> Checked<Super> {
    let flaw = |what, at: usize| Flaw { what, offset: (SUPER_OFFSET + at) as u64 };
    let header: Super = read_at(bytes, SUPER_OFFSET)?;
    if header.magic.get() != SUPER_MAGIC {
        return Err(flaw("no magic number of EROFS", 0));
    }
    if header.block_bits != BLOCK_BITS || header.dir_block_bits != 0 {
        return Err(flaw("blocks that are not 4 KiB", 12));
    }
    if header.feature_incompat.get() & !(INCOMPAT_DEVICE_TABLE | INCOMPAT_CHUNKS) != 0 {
        return Err(flaw("features that Ferry does not know (compression, long prefixes)", 80));
    }
    if header.volume.starts_with(FLAT_VOLUME_1) {
        return Err(flaw(
            "the first version of the layout flat, which is not read any more: build the image again",
            64,
        ));
    }
    Ok(header)
}

/// How many bytes an image that begins so has at most, by what it says itself.
fn bytes_max(head: &[u8]) -> Checked<u64> {
    let blocks = superblock(head)?.blocks.get();
    let bytes_max = (u64::from(blocks) * BLOCK_BYTES as u64).min(IMAGE_BYTES_MAX);
    // What was read already must not be too much.
    if bytes_max < head.len() as u64 { Err(longer(bytes_max)) } else { Ok(bytes_max) }
}

/// Whether a file takes so much less of the disk than it is long that no image of ours can be in it: whoever has few bytes could otherwise have
/// us take gigabytes of memory. Where holes cannot be told, nothing is one.
fn mostly_holes(mut file: &File, length: u64) -> io::Result<Option<Flaw>> {
    if length <= SPARSE_BYTES_MAX {
        return Ok(None);
    }
    let (mut at, mut data) = (0, 0);
    while at < length && data < length / HOLES_PER_DATA {
        let from = match seek(file, SeekFrom::Data(at)) {
            Ok(from) => from,
            Err(Errno::NXIO) => break,
            Err(_) => return Ok(None),
        };
        let to = seek(file, SeekFrom::Hole(from))?;
        data += to.saturating_sub(from);
        // A file system that tells nonsense is not asked for ever.
        at = to.max(at + 1);
    }
    file.seek(io::SeekFrom::Start(HEAD_BYTES as u64))?;
    let what = "a hole with most of what should be there: copy it with cp --sparse=never, or fetch the image again";
    Ok((data < length / HOLES_PER_DATA).then_some(Flaw { what, offset: at }))
}

fn longer(bytes_max: u64) -> Flaw {
    let what = if bytes_max == IMAGE_BYTES_MAX { "more than 16 GiB" } else { "more than its superblock tells of" };
    Flaw { what, offset: bytes_max }
}

/// A structure at a place that may be anywhere.
fn read_at<T: FromBytes>(bytes: &[u8], at: usize) -> Checked<T> {
    let flaw = || Flaw { what: "the end of the image in the middle of a structure", offset: at as u64 };
    let from = bytes.get(at..).ok_or_else(flaw)?;
    T::read_from_prefix(from).map(|(value, _)| value).map_err(|_| flaw())
}

/// One block of a directory.
struct Block<'a> {
    bytes: &'a [u8],
    count: usize,
    at: u64,
}

impl<'a> Block<'a> {
    fn of(bytes: &'a [u8], at: u64) -> Checked<Self> {
        let flaw = |what| Flaw { what, offset: at };
        let first: Dirent = read_at(bytes, 0).map_err(|_| flaw("a directory's block without entries"))?;
        let names = usize::from(first.name_offset.get());
        if names == 0 || !names.is_multiple_of(size_of::<Dirent>()) || names > bytes.len() {
            return Err(flaw("a directory's block with an impossible number of entries"));
        }
        Ok(Self { bytes, count: names / size_of::<Dirent>(), at })
    }

    fn entry(&self, index: usize) -> Checked<Entry<'a>> {
        let flaw = |what| Flaw { what, offset: self.at };
        let offset = |index| -> Checked<(Dirent, usize)> {
            let entry: Dirent = read_at(self.bytes, index * size_of::<Dirent>())?;
            Ok((entry, usize::from(entry.name_offset.get())))
        };
        let (entry, from) = offset(index)?;
        let is_last = index + 1 == self.count;
        let to = if is_last { self.bytes.len() } else { offset(index + 1)?.1 };
        let name = self.bytes.get(from..to).ok_or_else(|| flaw("a name outside of its block"))?;
        // The last name of a block ends with the block, or with a zero.
        let name = match name.iter().position(|byte| *byte == 0) {
            Some(end) if is_last => &name[..end],
            _ => name,
        };
        if !matches!(name, b"." | b"..") && Name::new(name).is_err() {
            return Err(flaw("a name that is none"));
        }
        Ok(Entry { name, nid: Nid(entry.nid.get()), kind: entry.kind, next: 0 })
    }
}

/// Lists a directory.
#[derive(Debug)]
pub struct Entries<'a> {
    image: &'a Image,
    bytes: (&'a [u8], &'a [u8]),
    at: u64,
    /// Number of the block, and above it of the entry in it.
    next: u64,
    hides_stubs: bool,
}

/// What a directory says of a character device.
const STUB_KIND: u8 = 3;
/// Entries of one block: fewer than this, for each takes 13 bytes.
const ENTRIES_MAX: u64 = 1 << 9;

impl<'a> Iterator for Entries<'a> {
    type Item = Checked<Entry<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let entry = self.step()?;
            let is_hidden =
                |entry: &Entry<'_>| self.hides_stubs && entry.kind == STUB_KIND && self.image.is_stub(entry.nid);
            if !entry.as_ref().is_ok_and(is_hidden) {
                return Some(entry);
            }
        }
    }
}

impl<'a> Entries<'a> {
    fn step(&mut self) -> Option<Checked<Entry<'a>>> {
        let (block, index) = (self.next / ENTRIES_MAX, self.next % ENTRIES_MAX);
        let bytes = self.image.dir_block(self.bytes, usize::try_from(block).ok()?)?;
        let entry = Block::of(bytes, self.at).and_then(|block| {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            if index >= block.count {
                return Err(Flaw { what: "a position where no entry is", offset: self.at });
            }
            Ok((block.entry(index)?, index + 1 == block.count))
        });
        match entry {
            Ok((entry, is_last)) => {
                self.next = if is_last { (block + 1) * ENTRIES_MAX } else { self.next + 1 };
                Some(Ok(Entry { next: self.next, ..entry }))
            }
            Err(flaw) => {
                self.next = u64::MAX;
                Some(Err(flaw))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn where_holes_cannot_be_told_nothing_is_one() {
        let (one, _other) = UnixStream::pair().expect("sockets can be made");
        assert_eq!(mostly_holes(&OwnedFd::from(one).into(), 1 << 30).expect("it is not asked"), None);
    }
}
