//! The files that a workload opens, in order: a list of paths.
//!
//! ```text
//! # a comment
//! /usr/bin/sh
//! /usr/lib/a name\nin two lines
//! ```
//!
//! A path begins with the slash of the tree's root. In it `\n` stands for a line feed, and `\\` for a backslash.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use ferry_vfs::Name;

use crate::build::tree_builder::names_of;
use crate::format::error::{Error, IoContext, Result};
use crate::format::tree::{Content, NodeId, Tree};

/// The maximum size of a list in bytes: the paths of a few million files.
const TRACE_BYTES_MAX: u64 = 1 << 30;

/// Paths of files, each once, in the order of their first open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    paths: Vec<Vec<u8>>,
    known: HashSet<Vec<u8>>,
}

impl Trace {
    /// Adds a path, which begins with a slash; returns whether it is new.
    pub fn add(&mut self, path: &[u8]) -> bool {
        let is_new = self.known.insert(path.to_vec());
        if is_new {
            self.paths.push(path.to_vec());
        }
        is_new
    }

    /// Returns the number of files.
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The paths.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        self.paths.iter().map(Vec::as_slice)
    }

    /// Reads a list.
    ///
    /// # Errors
    ///
    /// It cannot be read, or contains something other than paths.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_within(path, TRACE_BYTES_MAX)
    }

    /// As [`Self::read`], if the list has at most so many bytes.
    ///
    /// # Errors
    ///
    /// As of [`Self::read`], or it is longer.
    pub fn read_within(path: &Path, bytes_max: u64) -> Result<Self> {
        let file = File::open(path).doing("open", path)?;
        let mut trace = Self::default();
        let mut input = BufReader::new(file.take(bytes_max.saturating_add(1)));
        let (mut line, mut bytes) = (Vec::new(), 0);
        for number in 1_usize.. {
            line.clear();
            let count = input.read_until(b'\n', &mut line).doing("read", path)?;
            bytes += count as u64;
            let refused =
                |reason: &str| Error::Input { path: path.into(), at: format!("line {number}"), reason: reason.into() };
            if bytes > bytes_max {
                return Err(refused(&format!("the list has more than {bytes_max} bytes")));
            }
            if count == 0 {
                break;
            }
            let line = line.strip_suffix(b"\n").unwrap_or(&line);
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            let path = unescape(line).filter(|path| path.starts_with(b"/"));
            let path =
                path.ok_or_else(|| refused("it is no path that begins with / (\\n and \\\\ are known in one)"))?;
            trace.add(&path);
        }
        Ok(trace)
    }

    /// Writes the list.
    ///
    /// # Errors
    ///
    /// The writer's.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        for path in &self.paths {
            for byte in path {
                match byte {
                    b'\n' => out.write_all(b"\\n")?,
                    b'\\' => out.write_all(b"\\\\")?,
                    byte => out.write_all(&[*byte])?,
                }
            }
            out.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Returns the files of a tree that are in the list, each once, in its order. Missing files are skipped.
    pub(crate) fn nodes(&self, tree: &Tree) -> Vec<NodeId> {
        let mut seen = HashSet::new();
        let nodes = self.paths().filter_map(|path| find(tree, &names_of(path).ok()?));
        nodes.filter(|id| seen.insert(*id)).collect()
    }
}

/// Finds a path, without following symbolic links.
fn find(tree: &Tree, names: &[Name<'_>]) -> Option<NodeId> {
    names.iter().try_fold(0, |id, name| match &tree.nodes.get(id)?.content {
        Content::Directory(entries) => {
            let by_name = |(known, _): &(ferry_vfs::NameBuf, NodeId)| known.as_name().as_bytes().cmp(name.as_bytes());
            entries.binary_search_by(by_name).ok().map(|at| entries[at].1)
        }
        _ => None,
    })
}

fn unescape(line: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(line.len());
    let mut rest = line.iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'\\' => match rest.next()? {
                b'n' => b'\n',
                b'\\' => b'\\',
                _ => return None,
            },
            byte => *byte,
        });
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Vec<Vec<u8>>, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a file can be made");
        file.write_all(text).expect("it can be written");
        Trace::read(file.path()).map(|trace| trace.paths).map_err(|error| error.to_string())
    }

    #[test]
    fn lists_are_read_as_they_are_written() {
        let paths: [&[u8]; 5] = [b"/usr/bin/sh", b"/a\nb", b"/\\n", b"/\xff # no comment", b"/ "];
        let mut trace = Trace::default();
        assert!(paths.iter().all(|path| trace.add(path)) && !trace.add(paths[1]));
        let mut text = b"# made by hand\n\n".to_vec();
        trace.write(&mut text).expect("it can be written");
        assert_eq!(read(&text), Ok(paths.map(<[u8]>::to_vec).to_vec()));
        assert_eq!(read(b"/a\n/b\n/a"), Ok(vec![b"/a".to_vec(), b"/b".to_vec()]));
    }

    #[test]
    fn long_lists_are_refused() {
        let mut file = tempfile::NamedTempFile::new().expect("a file can be made");
        file.write_all(b"/one\n/two\n").expect("it can be written");
        assert_eq!(Trace::read_within(file.path(), 10).map(|trace| trace.len()).ok(), Some(2));
        let said = Trace::read_within(file.path(), 9).expect_err("it is longer").to_string();
        assert!(said.contains("line 2: the list has more than 9 bytes"), "{said}");
    }

    #[test]
    fn other_lines_are_refused() {
        for text in [&b"/a\nb\n"[..], b"/a\n/b\\", b"/a\n/\\x"] {
            let said = read(text).expect_err("it is no list");
            assert!(said.contains("line 2: it is no path"), "{said}");
        }
    }
}
