//! An image for tests, of which the store has a part.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use ferry_image::{BuildOptions, ByteSink, Digest, Fetch, FetchOptions, Image, Objects, Store, build};

/// A server that does not respond while the lock is held.
#[derive(Debug)]
pub struct Elsewhere {
    packs: PathBuf,
    pub silence: RwLock<()>,
}

impl Fetch for Elsewhere {
    fn index(&self, pack: Digest, _: u64) -> io::Result<Vec<u8>> {
        fs::read(self.packs.join(format!("{}.index", pack.hex())))
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        let _answers = ferry_vfs::sync::read(&self.silence);
        let mut found = vec![0; usize::try_from(range.end - range.start).expect("it is short")];
        File::open(self.packs.join(pack.hex()))?.read_exact_at(&mut found, range.start)?;
        sink(&found)
    }
}

/// Returns an image of 16 objects of a block each, of which only the first blocks are present.
pub fn partly_here(directory: &Path) -> (Arc<Elsewhere>, Objects, PathBuf) {
    let at = |name: &str| directory.join(name);
    fs::create_dir(at("tree")).expect("directories can be made");
    for number in 0..16_u8 {
        fs::write(at("tree").join(number.to_string()), [number; 4096]).expect("files can be made");
    }
    let store = || Store::create(&at("store")).expect("directories can be made");
    let built = build(&at("tree"), &at("image"), store(), &BuildOptions::default(), &|_, _| {});
    let pack = built.expect("it can be built").packs[0];
    drop(Store::create(&at("here")).expect("directories can be made"));
    let from = Arc::new(Elsewhere { packs: at("store/packs"), silence: RwLock::default() });
    let objects = open(directory, &from);
    (from, objects, at("here/packs").join(format!("{}.part", pack.hex())))
}

/// Opens the image once more.
pub fn open(directory: &Path, from: &Arc<Elsewhere>) -> Objects {
    let at = |name: &str| directory.join(name);
    let missing = FetchOptions { from: Arc::clone(from) as Arc<dyn Fetch>, ahead_bytes: 0, cache_bytes: None };
    let image = Image::open(&at("image"), None).expect("it was built");
    Objects::open_with(&image, &at("here"), Some(missing)).expect("it was built")
}
