//! Which missing objects are fetched first: those of the pack that the image says is needed first (`build --order-from`), then those of the
//! files that a list names, in its order.
//!
//! Both are untrusted. They decide the order of requests, and nothing else.

use std::collections::HashSet;
use std::ops::Range;

use ferry_vfs::{FileType, Name};

use crate::format::error::ImageResult;
use crate::format::image::{Image, Nid};
use crate::read::objects::{Objects, touched};
use crate::read::pack::Pack;
use crate::read::partial::PartialPack;
use crate::read::singleflight::{FetchableSet, ObjectSet};
use crate::store::object_error::ObjectError;

/// The maximum number of unknown names that are returned, to limit what is logged.
const UNKNOWN_NAMES_MAX: usize = 5;

/// What a list of files names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FirstFiles {
    /// The number of files that are fetched first.
    pub files: usize,
    /// The number of paths that are no files of the image, or damaged.
    pub unknown: usize,
    /// The first few of these paths.
    pub unknown_names: Vec<Vec<u8>>,
}

impl Objects {
    /// Makes [`Self::fetch_all`] begin with the files at these paths, in this order. Only the first call has an effect.
    /// Symbolic links are not followed.
    pub fn put_first<'a>(&self, image: &Image, paths: impl IntoIterator<Item = &'a [u8]>) -> FirstFiles {
        let mut found = FirstFiles::default();
        let (mut known, mut first) = (HashSet::new(), Vec::new());
        for path in paths {
            match find(image, path) {
                // A link to a file that was there costs nothing, however many there are.
                Ok(Some(nid)) if !known.insert(nid) => {}
                Ok(Some(nid)) if self.add_first(image, nid, &mut first).is_ok() => found.files += 1,
                _ => {
                    found.unknown += 1;
                    if found.unknown_names.len() < UNKNOWN_NAMES_MAX {
                        found.unknown_names.push(path.to_vec());
                    }
                }
            }
        }
        let _ = self.first.set(first);
        found
    }

    /// Adds the objects of a file, joined with those before them where they follow on.
    fn add_first(&self, image: &Image, nid: Nid, first: &mut Vec<(usize, Range<usize>)>) -> ImageResult<()> {
        let inode = image.inode(nid)?;
        for run in image.data(&inode)?.runs(inode.bytes, 0..inode.bytes) {
            let run = run?;
            let Some(pack) = self.packs.get(run.pack).filter(|pack| pack.absent.is_some()) else { continue };
            let objects = touched(&pack.index.objects, run.at, run.at.saturating_add(run.bytes));
            match first.last_mut() {
                Some((number, last)) if *number == run.pack && last.end == objects.start => last.end = objects.end,
                _ => first.push((run.pack, objects)),
            }
        }
        Ok(())
    }

    /// Returns the objects that are fetched first: those of the pack that the image says is needed first, then those of the list.
    pub(crate) fn first_parts(&self) -> Vec<Part<'_>> {
        let part = |(number, objects): (usize, Range<usize>)| {
            let pack = &**self.packs.get(number)?;
            Some(Part { pack, absent: pack.absent.as_ref()?, objects })
        };
        // A build marks at most one; an image that marks more must not have all of them fetched beside its readers.
        let ahead = self.packs.iter().enumerate().find(|(_, pack)| pack.ahead);
        let ahead = ahead.map(|(number, pack)| (number, 0..pack.len()));
        ahead.into_iter().chain(self.first.get().into_iter().flatten().cloned()).filter_map(part).collect()
    }
}

/// Returns the regular file at a path that begins with the slash of the root.
fn find(image: &Image, path: &[u8]) -> ImageResult<Option<Nid>> {
    let mut nid = image.root();
    for part in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
        let inode = image.inode(nid)?;
        let Some(name) = Name::new(part).ok().filter(|_| inode.kind() == FileType::Directory) else { return Ok(None) };
        let Some(next) = image.lookup(&inode, name)? else { return Ok(None) };
        nid = next;
    }
    Ok(Some(nid).filter(|nid| image.inode(*nid).is_ok_and(|inode| inode.kind() == FileType::RegularFile)))
}

/// Adjacent objects of an incomplete pack.
pub(crate) struct Part<'a> {
    pack: &'a Pack,
    absent: &'a PartialPack,
    objects: Range<usize>,
}

impl ObjectSet for Part<'_> {
    fn is_here(&self, at: usize) -> bool {
        self.pack.is_here(self.objects.start + at)
    }

    fn bytes(&self, at: usize) -> u64 {
        self.pack.bytes(self.objects.start + at)
    }
}

impl FetchableSet for Part<'_> {
    fn count(&self) -> usize {
        self.objects.len()
    }

    fn objects(&self) -> &dyn ObjectSet {
        self
    }

    fn run_bytes(&self) -> u64 {
        (self.pack, self.absent).run_bytes()
    }

    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
        let from = self.objects.start;
        (self.pack, self.absent).fetch(from + range.start..from + range.end)
    }
}
