//! A tree like a developer's image, reproducible: deep directories, many small files, few large ones, hard links,
//! attributes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{XattrFlags, setxattr};

use super::tree::{below, named, set_time, sync};
use crate::noise::Noise;

/// Of a hundred files so many are objects of git, of packages of Node.js, and of Python's; the rest is a tool chain.
const SHARES: [usize; 3] = [20, 45, 20];
/// Files for each large one of a tool chain.
const FILES_PER_PROGRAM: usize = 250;
/// The largest program, in bytes.
const PROGRAM_BYTES_MAX: usize = 4 << 20;
/// Packages of Node.js that lie in each other.
const NESTED_MAX: usize = 6;
/// Of so many files one has an attribute, and one another name.
const FILES_PER_ATTRIBUTE: usize = 200;
const FILES_PER_LINK: usize = 50;

/// Makes files, and counts them.
struct TreeBuilder {
    noise: Noise,
    made: usize,
    directories: Vec<PathBuf>,
    last: Option<PathBuf>,
}

impl TreeBuilder {
    fn directory(&mut self, path: PathBuf) -> Result<PathBuf> {
        let new: Vec<_> = path.ancestors().take_while(|directory| !directory.exists()).map(Path::to_owned).collect();
        fs::create_dir_all(&path).with_context(|| named(&path))?;
        self.directories.extend(new.into_iter().rev());
        Ok(path)
    }

    /// A file of some length in this range; now and then one more name for the one before.
    fn file(&mut self, path: &Path, from: usize, to: usize) -> Result<()> {
        let number = self.made;
        self.made += 1;
        match &self.last {
            Some(last) if number % FILES_PER_LINK == 3 => fs::hard_link(last, path).with_context(|| named(path))?,
            _ => {
                let bytes = from + below(&mut self.noise, to - from);
                fs::write(path, self.noise.bytes(bytes)).with_context(|| named(path))?;
            }
        }
        if number % FILES_PER_ATTRIBUTE == 5 {
            setxattr(path, "user.mime_type", b"text/x-script", XattrFlags::empty()).with_context(|| named(path))?;
        }
        set_time(path, &mut self.noise)?;
        self.last = Some(path.to_owned());
        Ok(())
    }

    /// What a repository keeps of its history: 256 directories of small files, and a large one.
    fn git(&mut self, root: &Path, files: usize) -> Result<()> {
        let objects = root.join("home/dev/project/.git/objects");
        let directories = (0..256).map(|number| self.directory(objects.join(format!("{number:02x}"))));
        let directories = directories.collect::<Result<Vec<_>>>()?;
        for _ in 0..files {
            let directory = &directories[below(&mut self.noise, directories.len())];
            let name = format!("{:016x}{:016x}{:06x}", self.noise.next(), self.noise.next(), self.made);
            self.file(&directory.join(name), 40, 3000)?;
        }
        let pack = self.directory(objects.join("pack"))?;
        let pack = pack.join("pack-1.pack");
        fs::write(&pack, self.noise.bytes(16 << 20)).with_context(|| named(&pack))?;
        set_time(&pack, &mut self.noise)
    }

    /// Packages that have packages in them, each with a licence that is the same everywhere.
    fn node(&mut self, root: &Path, files: usize) -> Result<()> {
        let licence = self.noise.bytes(1071);
        let top = root.join("home/dev/project/node_modules");
        let (end, mut place, mut depth) = (self.made + files, top.clone(), 0);
        while self.made < end {
            let package = self.directory(place.join(format!("package-{}", self.made)))?;
            let path = package.join("LICENSE");
            fs::write(&path, &licence).with_context(|| named(&path))?;
            set_time(&path, &mut self.noise)?;
            self.made += 1;
            self.file(&package.join("package.json"), 300, 2500)?;
            self.file(&package.join("index.js"), 50, 4000)?;
            let library = self.directory(package.join("dist/lib"))?;
            for number in 0..2 + below(&mut self.noise, 14) {
                self.file(&library.join(format!("module-{number}.js")), 100, 9000)?;
                self.file(&library.join(format!("module-{number}.d.ts")), 60, 1500)?;
            }
            depth = if depth < NESTED_MAX && below(&mut self.noise, 3) == 0 { depth + 1 } else { 0 };
            place = if depth > 0 { package.join("node_modules") } else { top.clone() };
        }
        Ok(())
    }

    fn python(&mut self, root: &Path, files: usize) -> Result<()> {
        let site = root.join("usr/lib/python3/site-packages");
        let end = self.made + files;
        while self.made < end {
            let package = self.directory(site.join(format!("library_{}/core", self.made)))?;
            let cache = self.directory(package.join("__pycache__"))?;
            for number in 0..3 + below(&mut self.noise, 20) {
                self.file(&package.join(format!("part_{number}.py")), 0, 16 << 10)?;
                self.file(&cache.join(format!("part_{number}.cpython-313.pyc")), 200, 12 << 10)?;
            }
        }
        Ok(())
    }

    fn tools(&mut self, root: &Path, files: usize) -> Result<()> {
        let chain = root.join("opt/toolchain");
        let programs = self.directory(chain.join("bin"))?;
        for number in 0..files.div_ceil(FILES_PER_PROGRAM).max(2) {
            self.file(&programs.join(format!("tool-{number}")), 200 << 10, PROGRAM_BYTES_MAX)?;
        }
        let headers = (0..files.div_ceil(100)).map(|number| {
            let directory = chain.join(format!("include/c++/part-{}/detail-{number}", number % 7));
            self.directory(directory)
        });
        let headers = headers.collect::<Result<Vec<_>>>()?;
        for number in 0..files {
            let directory = &headers[below(&mut self.noise, headers.len())];
            self.file(&directory.join(format!("header_{number}.hpp")), 500, 20 << 10)?;
        }
        Ok(())
    }
}

/// Makes a tree of about so many files.
pub fn make(root: &Path, files: usize) -> Result<()> {
    let noise = Noise(0x2545_f491_4f6c_dd1d);
    let mut maker = TreeBuilder { noise, made: 0, directories: Vec::new(), last: None };
    let [git, node, python] = SHARES.map(|share| files * share / 100);
    maker.git(root, git)?;
    maker.node(root, node)?;
    maker.python(root, python)?;
    maker.tools(root, files - git - node - python)?;
    for directory in std::mem::take(&mut maker.directories).iter().rev() {
        set_time(directory, &mut maker.noise)?;
    }
    sync(root)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::images::walk;

    /// What an image would have of a tree: each file and directory with its time, its names, and its bytes.
    fn all(root: &Path) -> Vec<(PathBuf, i64, i64, u64, Vec<u8>)> {
        let (mut left, mut found) = (vec![root.to_owned()], Vec::new());
        while let Some(path) = left.pop() {
            let inode = fs::symlink_metadata(&path).unwrap();
            let bytes = if inode.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if inode.is_dir() {
                left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
            let name = path.strip_prefix(root).unwrap().to_owned();
            found.push((name, inode.mtime(), inode.mtime_nsec(), inode.nlink(), bytes));
        }
        found.sort();
        found
    }

    #[test]
    fn the_tree_is_the_same_each_time() {
        let found = [0, 1].map(|_| {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("tree");
            make(&root, 2000).unwrap();
            (walk::walk(&root).unwrap(), walk::files(&root).unwrap(), all(&root))
        });
        assert!(found[0] == found[1], "a time, a link or a byte is another one");
        let (walked, files, _) = &found[0];
        assert!((2000..2400).contains(&files.len()), "{}", files.len());
        assert!(walked.bytes > 20 << 20, "{walked:?}");
        let depth = files.iter().map(|path| path.components().count()).max().unwrap();
        assert!(depth > 9, "{depth}");
    }
}
