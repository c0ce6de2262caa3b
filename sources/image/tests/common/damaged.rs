//! Images whose bytes are changed here and there, and where in them what is.

use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::path::Path;

use ferry_image::erofs::{BLOCK_BYTES, Compact, Extended, SLOT_BYTES, SUPER_OFFSET};
use ferry_image::{BuildOptions, Image, Inode, Layout, Nid, Store, build};
use ferry_vfs::Name;
use rustix::fs::{XattrFlags, lsetxattr};

use super::{Bench, bytes, set_time};

/// Where the superblock says how many inodes there are, and in which blocks attributes and inodes begin.
pub const SUPER_INODES: usize = SUPER_OFFSET + 16;
pub const SUPER_XATTR_BLOCK: usize = SUPER_OFFSET + 44;
const SUPER_META_BLOCK: usize = SUPER_OFFSET + 40;
/// Where the device table of our images is, how long a slot of it is, and where in one the first block's number is.
pub const DEVICES: usize = SUPER_OFFSET + 128;
pub const DEVICE_BYTES: usize = 128;
pub const DEVICE_BLOCKS: usize = 64;
pub const DEVICE_FIRST_BLOCK: usize = 68;
/// Where in an inode of either length what is.
pub const FORMAT: usize = 0;
pub const XATTR_COUNT: usize = 2;
pub const MODE: usize = 4;
pub const NLINK: usize = 6;
pub const SIZE: usize = 8;
pub const PLACE: usize = 16;
/// In the longer one.
pub const NSEC: usize = 40;
/// Where in a line of a directory what is.
pub const NAME_OFFSET: usize = 8;
pub const KIND: usize = 10;

/// A tree with one of each thing that can be damaged, of which an image has a file's pieces in two packs.
pub fn bench() -> Bench {
    let bench = Bench::new();
    let tree = bench.tree();
    for name in ["a/b", "empty", "many", "pair"] {
        fs::create_dir_all(tree.join(name)).expect("directories can be made");
    }
    let files = [("a/file", 9000), ("far", 9000), ("far-2", 10_000), ("tiny", 60), ("pair/x1", 1), ("pair/x2", 2)];
    for (number, (name, length)) in files.into_iter().enumerate() {
        fs::write(tree.join(name), bytes(number, length)).expect("files can be made");
    }
    for number in 0..150 {
        fs::write(tree.join(format!("many/{number:060}")), []).expect("files can be made");
    }
    fs::hard_link(tree.join("far-2"), tree.join("hard")).expect("links can be made");
    symlink("a/file", tree.join("link")).expect("links can be made");
    symlink("l".repeat(4090), tree.join("long")).expect("links can be made");
    fs::write(tree.join("attributes"), "x").expect("files can be made");
    for (name, attribute, value) in [
        ("attributes", "user.one", "1"),
        ("attributes", "user.two", "2"),
        ("attributes", "user.user.x", "3"),
        ("attributes", "user.both", "4"),
        ("a", "user.both", "4"),
    ] {
        lsetxattr(tree.join(name), attribute, value.as_bytes(), XattrFlags::empty()).expect("attributes can be set");
    }
    let mut mixed = [bytes(50, 200_000), bytes(51, 200_000)];
    for round in 0..2 {
        for (name, content) in ["mixed", "mixed-2"].into_iter().zip(&mut mixed) {
            content[100_000] = round;
            fs::write(tree.join(name), &content[..]).expect("files can be made");
        }
        // Some of its pieces, and something else; and all of another.
        let shares = [&mixed[0][..131_072], &bytes(52, 5000)].concat();
        fs::write(tree.join("shares"), shares).expect("files can be made");
        fs::copy(tree.join("far"), tree.join("twin")).expect("files can be made");
        fs::write(tree.join("older"), "x").expect("files can be made");
        lchown(tree.join("older"), Some(100_000), None).expect("owners can be set");
        settle(&tree);
        bench.build("image");
    }
    bench
}

/// Gives all of a tree one time, so that the shorter inode holds everything that it can.
pub fn settle(path: &Path) {
    if fs::symlink_metadata(path).expect("it is there").is_dir() {
        for entry in fs::read_dir(path).expect("directories can be listed") {
            settle(&entry.expect("directories can be listed").path());
        }
    }
    set_time(path, 1_700_000_000, 0);
}

/// An image of composefs's of the same tree.
pub fn composefs_bench() -> Bench {
    let bench = bench();
    let options = BuildOptions { layout: Layout::Composefs { version: None }, ..BuildOptions::default() };
    let store = Store::create(&bench.store()).expect("a store can be made");
    build(&bench.tree(), &bench.path("image"), store, &options, &|_, _| {}).expect("the tree can be built");
    bench
}

/// An image, and its bytes to be changed.
pub struct Damaged {
    pub bytes: Vec<u8>,
    whole: Image,
}

impl Damaged {
    pub fn new(whole: &[u8]) -> Self {
        Self { bytes: whole.to_vec(), whole: Image::from_bytes(whole.to_vec()).expect("it is whole") }
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub fn put_u16(&mut self, at: usize, number: u16) {
        self.put(at, &number.to_le_bytes());
    }

    pub fn put_u32(&mut self, at: usize, number: u32) {
        self.put(at, &number.to_le_bytes());
    }

    pub fn put_u64(&mut self, at: usize, number: u64) {
        self.put(at, &number.to_le_bytes());
    }

    pub fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(*self.bytes[at..].first_chunk().expect("it is in the image"))
    }

    pub fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(*self.bytes[at..].first_chunk().expect("it is in the image"))
    }

    /// The number of the inode that a path of the whole image leads to.
    pub fn nid(&self, path: &str) -> Nid {
        path.split('/').filter(|name| !name.is_empty()).fold(self.whole.root(), |nid, name| {
            let dir = self.whole.inode(nid).expect("it is there");
            let name = Name::new(name.as_bytes()).expect("a name");
            self.whole.lookup(&dir, name).expect("the image is whole").expect("it is there")
        })
    }

    fn whole_inode(&self, path: &str) -> Inode {
        self.whole.inode(self.nid(path)).expect("it is there")
    }

    /// Where an inode begins, in bytes, as all places here.
    pub fn inode(&self, path: &str) -> usize {
        let slot = usize::try_from(self.nid(path).0).expect("it fits");
        self.u32(SUPER_META_BLOCK) as usize * BLOCK_BYTES + slot * SLOT_BYTES
    }

    pub fn is_extended(&self, path: &str) -> bool {
        self.u16(self.inode(path) + FORMAT) & 1 == 1
    }

    /// Where an inode's attributes begin.
    pub fn xattrs(&self, path: &str) -> usize {
        self.inode(path) + if self.is_extended(path) { size_of::<Extended>() } else { size_of::<Compact>() }
    }

    /// Where what follows an inode and its attributes begins.
    pub fn tail(&self, path: &str) -> usize {
        let xattr_bytes = match usize::from(self.u16(self.inode(path) + XATTR_COUNT)) {
            0 => 0,
            count => 12 + (count - 1) * 4,
        };
        self.xattrs(path) + xattr_bytes
    }

    /// Where bytes are behind an inode.
    pub fn find(&self, path: &str, bytes: &[u8]) -> usize {
        let from = self.xattrs(path);
        let at = self.bytes[from..].windows(bytes.len()).position(|found| found == bytes);
        from + at.expect("they are there")
    }

    /// Where the first block of a directory begins.
    fn listing(&self, dir: &str) -> usize {
        if self.whole_inode(dir).bytes < BLOCK_BYTES as u64 {
            return self.tail(dir);
        }
        self.u32(self.inode(dir) + PLACE) as usize * BLOCK_BYTES
    }

    /// Where a directory's line of a name begins, `.` and `..` among them, and the name itself; of the first block.
    pub fn line(&self, dir: &str, name: &str) -> (usize, usize) {
        let listing = self.listing(dir);
        let name_at = |line: usize| listing + usize::from(self.u16(listing + line * 12 + NAME_OFFSET));
        let count = (name_at(0) - listing) / 12;
        let is_it = |line: &usize| {
            let from = name_at(*line);
            let to = if line + 1 == count { from + name.len() } else { name_at(line + 1) };
            &self.bytes[from..to] == name.as_bytes()
        };
        let line = (0..count).find(is_it).expect("the name is there");
        (listing + line * 12, name_at(line))
    }
}
