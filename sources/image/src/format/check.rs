//! `ferry image fsck`: checks everything in an image.

mod overlap;

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use ferry_vfs::FileType;

use crate::format::chunk;
use crate::format::data::{Data, ENTRY_BYTES, Run};
use crate::format::erofs::{BLOCK_BYTES, IDENTITY_XATTR, kind};
use crate::format::error::{Flaw, ImageResult};
use crate::format::image::{Entry, Image, Inode, Nid, XattrAt};
use crate::format::walk::{DEPTH_MAX, Step};

use overlap::{Claims, Overlap};

/// The maximum number of findings that are kept.
const FINDINGS_MAX: usize = 1000;

/// The result of a check.
#[derive(Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// What is wrong, each with its path.
    pub findings: Vec<String>,
    /// The number of inodes found.
    pub inodes: u64,
}

/// Checks every inode, name, attribute and location of data. Files' bytes are not read.
pub fn check(image: &Image) -> Report {
    let entries_left = image.bytes() / ENTRY_BYTES as u64;
    let (directories, links) = (HashSet::new(), HashMap::new());
    let (claims, shared) = (Claims::default(), HashSet::new());
    let mut walk = Walk { image, report: Report::default(), directories, entries_left, links, claims, shared };
    walk.claims.owner(&Step::top(b"the superblock and the table of packs"));
    image.head().into_iter().for_each(|bytes| walk.claims.claim_image(bytes, false));
    let root = image.root();
    walk.directories.insert(root);
    let mut left = vec![(root, root, Step::top(b"/"))];
    while let Some((nid, parent, path)) = left.pop() {
        if walk.report.findings.len() >= FINDINGS_MAX {
            walk.say(&path, "more is not looked at");
            break;
        }
        let directories = walk.directory(nid, parent, &path);
        if path.depth == DEPTH_MAX && !directories.is_empty() {
            walk.say(&path, "more than 2048 directories, one in the other");
            continue;
        }
        left.extend(directories.into_iter().rev().map(|(child, path)| (child, nid, path)));
    }
    walk.count_links();
    let left = FINDINGS_MAX.saturating_sub(walk.report.findings.len());
    for Overlap { of, with, place } in std::mem::take(&mut walk.claims).overlaps(image, left) {
        walk.say(&of, &format!("overlaps {} at {place}", with.text()));
    }
    let found = walk.report.inodes;
    // Also if only empty blocks are missing: other readers, and the kernel, read whole blocks.
    if image.bytes() < image.declared_bytes() {
        let (is, said) = (image.bytes(), image.declared_bytes());
        walk.say(&Step::top(b"/"), &format!("the image ends after {is} bytes, but the superblock says {said}"));
    }
    if found != image.inodes() && walk.report.findings.is_empty() {
        walk.say(&Step::top(b"/"), &format!("{found} inodes, but the superblock says {}", image.inodes()));
    }
    walk.report
}

struct Walk<'a> {
    image: &'a Image,
    report: Report,
    directories: HashSet<Nid>,
    /// How many more chunk index entries there may be.
    entries_left: u64,
    /// For each inode except directories: its link count, the number of names found, and one of them.
    links: HashMap<Nid, (u32, u32, Rc<Step<'a>>)>,
    /// The owners of parts of the image and of packs.
    claims: Claims<'a>,
    /// Offsets of attributes that are already claimed.
    shared: HashSet<usize>,
}

impl<'a> Walk<'a> {
    fn say(&mut self, path: &Step<'_>, what: &str) {
        self.report.findings.push(format!("{}: {what}", path.text()));
    }

    /// Checks a directory and its entries; returns its subdirectories.
    fn directory(&mut self, nid: Nid, parent: Nid, path: &Rc<Step<'a>>) -> Vec<(Nid, Rc<Step<'a>>)> {
        let mut directories = Vec::new();
        self.report.inodes += 1;
        let inode = match self.image.inode(nid) {
            Ok(inode) => inode,
            Err(flaw) => {
                self.say(path, &flaw.to_string());
                return directories;
            }
        };
        self.attributes(&inode, path);
        self.claim(&inode, path);
        let image = self.image;
        let entries = match image.all_entries(&inode, 0) {
            Ok(entries) => entries,
            Err(flaw) => {
                self.say(path, &flaw.to_string());
                return directories;
            }
        };
        let mut last: Option<&[u8]> = None;
        let mut own = 0;
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(flaw) => {
                    self.say(path, &flaw.to_string());
                    break;
                }
            };
            if self.report.findings.len() >= FINDINGS_MAX {
                break;
            }
            let name = path.below(entry.name);
            if last.is_some_and(|last| last >= entry.name) {
                self.say(&name, "not in the order of names, or twice");
            }
            last = Some(entry.name);
            match entry.name {
                b"." | b".." => {
                    own += 1;
                    let expected = if entry.name == b"." { nid } else { parent };
                    if entry.nid != expected {
                        self.say(&name, "leads to another directory than it should");
                    }
                }
                _ => directories.extend(self.entry(&entry, name)),
            }
        }
        if own != 2 {
            self.say(path, "no . or no ..");
        }
        if inode.nlink as usize != directories.len() + 2 {
            self.say(path, &format!("{} links, but {} directories in it", inode.nlink, directories.len()));
        }
        directories
    }

    /// Checks the inode of a name; returns it if it is a directory.
    fn entry(&mut self, entry: &Entry<'_>, path: Rc<Step<'a>>) -> Option<(Nid, Rc<Step<'a>>)> {
        if let Some((_, met, _)) = self.links.get_mut(&entry.nid) {
            *met += 1;
            return None;
        }
        let inode = match self.image.inode(entry.nid) {
            Ok(inode) => inode,
            Err(flaw) => {
                self.say(&path, &flaw.to_string());
                return None;
            }
        };
        if inode.kind() == FileType::Unknown || kind(inode.kind()) != entry.kind {
            self.say(&path, "another kind of file than its directory says");
        }
        if inode.kind() == FileType::Directory {
            if self.directories.insert(entry.nid) {
                return Some((entry.nid, path));
            }
            self.say(&path, "a directory that has another name already");
            return None;
        }
        self.report.inodes += 1;
        self.attributes(&inode, &path);
        self.claim(&inode, &path);
        let sound = match inode.kind() {
            FileType::Symlink => self.image.link(&inode).map(drop),
            FileType::RegularFile => self.data(&inode),
            _ => Ok(()),
        };
        match sound {
            Err(flaw) => self.say(&path, &flaw.to_string()),
            // Its pieces are no more than there is room for.
            Ok(()) if inode.kind() == FileType::RegularFile => self.identity(&inode, &path),
            Ok(()) => {}
        }
        self.links.insert(entry.nid, (inode.nlink, 1, path));
        None
    }

    /// Checks the locations of a file's bytes. Chunk indexes are disjoint, so together no longer than the image.
    fn data(&mut self, inode: &Inode) -> ImageResult<()> {
        let data = self.image.data(inode)?;
        match data {
            Data::Near(..) | Data::Object { .. } => {}
            Data::Far { pack, block } => {
                let run = Run { pack, at: block * BLOCK_BYTES as u64, bytes: inode.bytes };
                self.claims.claim_pack(self.image.packs(), &run);
            }
            Data::Chunks(_) => {
                let crowded = Flaw { what: "more pieces than there is room for", offset: inode.nid.0 };
                self.entries_left = self.entries_left.checked_sub(chunk::count(inode.bytes)).ok_or(crowded)?;
                for run in data.runs(inode.bytes, 0..inode.bytes) {
                    self.claims.claim_pack(self.image.packs(), &run?);
                }
            }
        }
        Ok(())
    }

    /// Claims the parts of the image that an inode uses.
    fn claim(&mut self, inode: &Inode, path: &Rc<Step<'a>>) {
        self.claims.owner(path);
        // Parts outside of the image are reported elsewhere.
        if let Ok((itself, blocks)) = self.image.own_bytes(inode) {
            self.claims.claim_image(itself, false);
            self.claims.claim_image(blocks, inode.kind() == FileType::RegularFile);
        }
        let (shared, _) = self.image.shared_xattrs(inode).unwrap_or_default();
        for XattrAt { range, .. } in shared {
            if self.shared.insert(range.start) {
                self.claims.claim_image(range, false);
            }
        }
    }

    fn attributes(&mut self, inode: &Inode, path: &Step<'_>) {
        match self.image.all_xattrs(inode) {
            Ok(xattrs) => {
                let names: HashSet<_> = xattrs.iter().map(|xattr| &xattr.name).collect();
                if names.len() != xattrs.len() {
                    self.say(path, "an attribute twice");
                }
                if xattrs.iter().any(|xattr| xattr.name != IDENTITY_XATTR && self.image.denies(&xattr.name)) {
                    self.say(path, "an attribute of a kind of which the image says that there is none");
                }
            }
            Err(flaw) => self.say(path, &flaw.to_string()),
        }
        // That of a file is checked after its data.
        if inode.kind() != FileType::RegularFile {
            self.identity(inode, path);
        }
    }

    fn identity(&mut self, inode: &Inode, path: &Step<'_>) {
        // Damage of attributes and locations is reported elsewhere.
        if self.image.has_identities()
            && let Ok(false) = self.image.has_own_identity(inode)
        {
            self.say(path, "an identity that is not of its contents");
        }
    }

    fn count_links(&mut self) {
        if self.image.is_composefs() {
            // Link counts are those of its dump file.
            return;
        }
        // In the order of inodes: sorting by path would need all paths in memory.
        let mut wrong: Vec<_> = self.links.iter().filter(|(_, (says, met, _))| says != met).collect();
        wrong.sort_unstable_by_key(|(nid, _)| **nid);
        let wrong: Vec<_> = wrong.into_iter().take(FINDINGS_MAX).map(|(_, links)| links.clone()).collect();
        for (says, met, path) in wrong {
            self.say(&path, &format!("{says} links, but {met} names"));
        }
    }
}
