//! An image as a disk: its metadata, then its packs at their locations in the address space of all devices. Linux
//! mounts such a disk without separate devices (`flatdev` in its EROFS).

use ferry_vfs::{BlockRange, Data, Disk as Contract, DiskFeatures, Errno, Extent, Geometry, Output, Result};

use crate::format::erofs::BLOCK_BYTES;
use crate::format::image::Image;
use crate::read::objects::read_exact;
use crate::read::source::Source;

/// Gaps are read in pieces of this.
const ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// An image as a read-only disk.
#[derive(Debug)]
pub struct Disk {
    source: Source,
    serial: String,
}

/// The location of a byte of the disk.
enum Place {
    /// At this offset in the image.
    Image(usize),
    /// At this offset in a pack.
    Pack(usize, u64),
    /// Between packs, or after them.
    Gap,
}

impl Disk {
    /// Creates a disk. The default serial number is the digest of the image; exports may cut it off.
    pub fn new(source: Source, serial: Option<String>) -> Self {
        let serial = serial.unwrap_or_else(|| source.image().digest().to_string());
        Self { source, serial }
    }

    /// As [`Source::begin`].
    pub fn begin(&self) {
        self.source.begin();
    }

    /// As [`ferry_vfs::FileSystem::counts`] of the same image.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        self.source.objects().counts()
    }

    fn image(&self) -> &Image {
        self.source.image()
    }

    fn place(&self, offset: u64) -> (Place, u64) {
        let image = self.image().as_bytes();
        if let Ok(at) = usize::try_from(offset)
            && at < image.len()
        {
            return (Place::Image(at), (image.len() - at) as u64);
        }
        let block = offset / BLOCK_BYTES as u64;
        let packs = self.image().packs();
        if let Some(at) = packs.iter().position(|pack| pack.first_block <= block && block < pack.end()) {
            let (first, end) = (packs[at].first_block * BLOCK_BYTES as u64, packs[at].end() * BLOCK_BYTES as u64);
            return (Place::Pack(at, offset - first), end - offset);
        }
        let next = packs.iter().map(|pack| pack.first_block * BLOCK_BYTES as u64).filter(|first| *first > offset).min();
        (Place::Gap, next.unwrap_or(u64::MAX) - offset)
    }

    /// Verifies a range of a pack, and returns where it lies.
    fn verified_extent(&self, pack: usize, offset: u64, bytes: u64) -> Result<Extent> {
        match self.source.objects().range(pack, offset, bytes) {
            Ok(file) => Ok(Extent { file: file.clone(), offset }),
            Err(bad) => {
                self.source.damage_log().error(format_args!("{bad}; its readers get I/O errors"));
                Err(Errno::IO)
            }
        }
    }
}

impl Contract for Disk {
    fn geometry(&self) -> Geometry {
        let image = self.image().as_bytes().len() as u64;
        let packs = self.image().packs().iter().map(|pack| pack.end() * BLOCK_BYTES as u64).max().unwrap_or(0);
        Geometry {
            bytes: image.max(packs).next_multiple_of(BLOCK_BYTES as u64),
            logical_block_bytes: 512,
            physical_block_bytes: 4096,
            optimal_io_bytes: 0,
            discard_bytes: 4096,
        }
    }

    fn features(&self) -> DiskFeatures {
        // Bytes that were never read are verified first, which takes as long as reading them.
        DiskFeatures { read_only: true, slow: true, ..DiskFeatures::default() }
    }

    fn serial(&self) -> String {
        self.serial.clone()
    }

    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
        let (place, in_place) = self.place(at.offset);
        if let Place::Pack(pack, offset) = place
            && at.bytes <= in_place
        {
            return self.verified_extent(pack, offset, at.bytes).map(Data::Extent);
        }
        let (mut offset, mut done) = (at.offset, 0);
        while offset < at.end() {
            let (place, in_place) = self.place(offset);
            let count = in_place.min(at.end() - offset).min(BLOCK_BYTES as u64 - offset % BLOCK_BYTES as u64);
            let bytes = usize::try_from(count).map_err(|_| Errno::INVAL)?;
            done += match place {
                Place::Image(from) => out.put(&self.image().as_bytes()[from..from + bytes]),
                Place::Gap => out.put(&ZEROS[..bytes]),
                Place::Pack(pack, from) => {
                    let file = self.verified_extent(pack, from, count)?.file;
                    let mut block = [0; BLOCK_BYTES];
                    read_exact(&file, from, &mut block[..bytes]).map_err(|error| {
                        self.source.damage_log().error(format_args!(
                            "cannot read pack {pack} at byte {from}: {error}; its readers get I/O errors"
                        ));
                        Errno::IO
                    })?;
                    out.put(&block[..bytes])
                }
            };
            offset += count;
        }
        Ok(Data::Bytes(done))
    }
}
