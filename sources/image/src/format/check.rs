//! `ferry image fsck`: everything an image says, looked at once.

mod overlap;

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use ferry_vfs::FileType;

use crate::format::chunk;
use crate::format::data::{Data, ENTRY_BYTES, Run};
use crate::format::erofs::{BLOCK_BYTES, kind};
use crate::format::error::{Checked, Flaw};
use crate::format::image::{Entry, Image, Inode, Nid};
use crate::format::walk::{DEPTH_MAX, Step};

use overlap::{Claims, Overlap};

/// How many findings are kept. Who has more knows enough.
const FINDINGS_MAX: usize = 1000;

/// What was found.
#[derive(Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// What is wrong, each with the path.
    pub findings: Vec<String>,
    /// How many inodes were met.
    pub inodes: u64,
}

/// Looks at every inode, name, attribute and place of data. Files' bytes are not read.
pub fn check(image: &Image) -> Report {
    let entries_left = image.bytes() / ENTRY_BYTES as u64;
    let (directories, links) = (HashSet::new(), HashMap::new());
    let (claims, shared) = (Claims::default(), HashSet::new());
    let mut walk = Walk { image, report: Report::default(), directories, entries_left, links, claims, shared };
    walk.claim_head();
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
    walk.compare_claims();
    let found = walk.report.inodes;
    // Also where only blocks without anything in them are missing: other readers, and the kernel, go by whole blocks.
    if image.bytes() < image.bytes_said() {
        let (is, said) = (image.bytes(), image.bytes_said());
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
    /// How many entries of indexes of pieces there may still be.
    entries_left: u64,
    /// For each inode that is no directory: how many names it says it has, how many were met, and one of them.
    links: HashMap<Nid, (u32, u32, Rc<Step<'a>>)>,
    /// Who has what of the image and of packs.
    claims: Claims<'a>,
    /// Attributes that are claimed already, by where they begin.
    shared: HashSet<usize>,
}

impl<'a> Walk<'a> {
    fn say(&mut self, path: &Step<'_>, what: &str) {
        self.report.findings.push(format!("{}: {what}", path.text()));
    }

    /// Looks at a directory and what is in it; returns the directories among that.
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

    /// Looks at what a name leads to; returns it if it is a directory.
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
        if let Err(flaw) = sound {
            self.say(&path, &flaw.to_string());
        }
        self.links.insert(entry.nid, (inode.nlink, 1, path));
        None
    }

    /// Looks at where a file's bytes are. Indexes of pieces do not overlap, so that all of them together are no longer than the image.
    fn data(&mut self, inode: &Inode) -> Checked<()> {
        let data = self.image.data(inode)?;
        match data {
            Data::Near(..) | Data::Object { .. } => {}
            Data::Far { pack, block } => {
                let run = Run { pack, at: block * BLOCK_BYTES as u64, bytes: inode.bytes };
                self.claims.far(self.image.packs(), &run);
            }
            Data::Chunks(_) => {
                let crowded = Flaw { what: "more pieces than there is room for", offset: inode.nid.0 };
                self.entries_left = self.entries_left.checked_sub(chunk::count(inode.bytes)).ok_or(crowded)?;
                for run in data.runs(inode.bytes, 0..inode.bytes) {
                    self.claims.far(self.image.packs(), &run?);
                }
            }
        }
        Ok(())
    }

    fn claim_head(&mut self) {
        self.claims.owner(&Step::top(b"the superblock and the table of packs"));
        self.image.head().into_iter().for_each(|bytes| self.claims.near(bytes, false));
    }

    /// Notes what an inode has of the image.
    fn claim(&mut self, inode: &Inode, path: &Rc<Step<'a>>) {
        self.claims.owner(path);
        // What is outside of the image is told elsewhere.
        if let Ok((itself, blocks)) = self.image.own_bytes(inode) {
            self.claims.near(itself, false);
            self.claims.near(blocks, inode.kind() == FileType::RegularFile);
        }
        let (shared, _) = self.image.shared_xattrs(inode).unwrap_or_default();
        for (_, bytes) in shared {
            if self.shared.insert(bytes.start) {
                self.claims.near(bytes, false);
            }
        }
    }

    fn compare_claims(&mut self) {
        let left = FINDINGS_MAX.saturating_sub(self.report.findings.len());
        for Overlap { of, with, place } in std::mem::take(&mut self.claims).overlaps(self.image, left) {
            self.say(&of, &format!("overlaps {} at {place}", with.text()));
        }
    }

    fn attributes(&mut self, inode: &Inode, path: &Step<'_>) {
        match self.image.raw_xattrs(inode) {
            Ok(xattrs) => {
                let names: HashSet<_> = xattrs.iter().map(|(name, _)| name).collect();
                if names.len() != xattrs.len() {
                    self.say(path, "an attribute twice");
                }
            }
            Err(flaw) => self.say(path, &flaw.to_string()),
        }
    }

    fn count_links(&mut self) {
        if self.image.is_composefs() {
            // Numbers of links are what its dump file said.
            return;
        }
        // In the order of inodes: that of paths would take all of their texts.
        let mut wrong: Vec<_> = self.links.iter().filter(|(_, (says, met, _))| says != met).collect();
        wrong.sort_unstable_by_key(|(nid, _)| **nid);
        let wrong: Vec<_> = wrong.into_iter().take(FINDINGS_MAX).map(|(_, links)| links.clone()).collect();
        for (says, met, path) in wrong {
            self.say(&path, &format!("{says} links, but {met} names"));
        }
    }
}
