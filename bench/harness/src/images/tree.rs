//! A tree like a distribution's root, reproducible.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags, setxattr, utimensat};

use crate::noise::Noise;

/// Files for each directory, as in Debian's root.
const FILES_PER_DIRECTORY: usize = 10;
/// Directories that a tenth of all files is in, as in `/usr/bin` and `/var/lib/dpkg/info`.
const CROWDED: usize = 8;
/// What begins the names of files.
const STEMS: [&str; 8] =
    ["lib", "README", "index-of", "module.cpython", "share", "m", "x11-common", "changelog.Debian"];
/// What ends them.
const ENDS: [&str; 6] = [".so.6.0.1", ".py", ".h", ".md5sums", "", ".conf"];
/// The earliest time of a file, in seconds since 1970. Packages have whole seconds.
const TIME_MIN: i64 = 1_600_000_000;
/// How far apart they are, in seconds.
const TIME_SPAN: u64 = 150_000_000;
/// Of so many files one has a capability, as ping has.
const FILES_PER_CAPABILITY: usize = 5000;
/// A `security.capability` of version 2 with CAP_NET_RAW.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Which tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Like a distribution's root.
    Root,
    /// Like a developer's image.
    Developer,
}

impl Kind {
    /// The name of its directory.
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "tree",
            Self::Developer => "developer",
        }
    }

    /// Makes it, with about so many files.
    pub fn make(self, root: &Path, files: usize) -> Result<()> {
        match self {
            Self::Root => make(root, files),
            Self::Developer => super::developer::make(root, files),
        }
    }
}

/// Makes a tree of so many files, and as many symbolic links as there are directories.
fn make(root: &Path, files: usize) -> Result<()> {
    let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
    let directories = directories(root, files.div_ceil(FILES_PER_DIRECTORY).max(CROWDED), &mut noise)?;
    let mut last: Option<PathBuf> = None;
    for number in 0..files {
        let among = if noise.below(10) == 0 { CROWDED } else { directories.len() };
        let directory = &directories[below(&mut noise, among)];
        let (stem, end) = (STEMS[below(&mut noise, STEMS.len())], ENDS[below(&mut noise, ENDS.len())]);
        let path = directory.join(format!("{stem}-{number:x}{end}"));
        let chance = noise.below(100);
        match &last {
            // One in a hundred is another name of the one before, three are copies of it.
            Some(last) if chance == 0 => fs::hard_link(last, &path).with_context(|| named(&path))?,
            Some(last) if chance < 4 => drop(fs::copy(last, &path).with_context(|| named(&path))?),
            _ => {
                let bytes = size(&mut noise);
                fs::write(&path, noise.bytes(bytes)).with_context(|| named(&path))?;
            }
        }
        if number % FILES_PER_CAPABILITY == 7 {
            setxattr(&path, "security.capability", &CAPABILITY, XattrFlags::empty()).with_context(|| named(&path))?;
        }
        set_time(&path, &mut noise)?;
        last = Some(path);
    }
    for directory in directories.iter().rev() {
        let link = directory.join("current");
        symlink("../share/of-another/package", &link).with_context(|| named(&link))?;
        set_time(&link, &mut noise)?;
        set_time(directory, &mut noise)?;
    }
    sync(root)
}

/// Nothing of a tree is to be written while something is measured.
pub(super) fn sync(root: &Path) -> Result<()> {
    File::open(root).and_then(|root| Ok(rustix::fs::syncfs(root)?)).with_context(|| named(root))
}

/// Makes directories, each in one that was made before; the root is the first.
fn directories(root: &Path, count: usize, noise: &mut Noise) -> Result<Vec<PathBuf>> {
    let mut made = vec![root.to_owned()];
    fs::create_dir_all(root).with_context(|| named(root))?;
    for number in 1..count {
        // Near the one before, so that the tree becomes some ten directories deep.
        let parent = (number - 1) / (2 + below(noise, 5));
        let path = made[parent].join(format!("{}-{number}", STEMS[below(noise, STEMS.len())]));
        fs::create_dir(&path).with_context(|| named(&path))?;
        made.push(path);
    }
    Ok(made)
}

/// Sizes as in Debian's root: half of the files below 4 KiB, some empty or tiny, few large; 11 KiB on average.
fn size(noise: &mut Noise) -> usize {
    let (from, to) = match noise.below(100) {
        0..2 => return 0,
        2..10 => (1, 64),
        10..58 => (65, 4096),
        58..87 => (4097, 16 << 10),
        87..98 => (16 << 10, 64 << 10),
        _ => (64 << 10, 384 << 10),
    };
    from + below(noise, to - from)
}

pub(super) fn below(noise: &mut Noise, bound: usize) -> usize {
    usize::try_from(noise.below(bound as u64)).unwrap_or_default()
}

pub(super) fn set_time(path: &Path, noise: &mut Noise) -> Result<()> {
    let since = i64::try_from(noise.below(TIME_SPAN)).unwrap_or_default();
    let time = Timespec { tv_sec: TIME_MIN + since, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).with_context(|| named(path))
}

pub(super) fn named(path: &Path) -> String {
    format!("cannot make {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::walk;

    #[test]
    fn the_tree_is_the_same_each_time_and_whole() {
        let sums = [0, 1].map(|_| {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("tree");
            make(&root, 2000).unwrap();
            let found = walk::walk(&root).unwrap();
            // Files, a link for each directory, and the directories.
            assert_eq!(found.inodes, 2000 + 200 + 200);
            found
        });
        assert_eq!(sums[0], sums[1]);
        let mean = sums[0].bytes / 2000;
        assert!((6000..20_000).contains(&mean), "{mean}");
    }
}
