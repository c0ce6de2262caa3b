//! The test matrix: source, transport, cache mode.

use std::fmt;
use std::str::FromStr;

use super::ServerVendor;

/// What is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A host directory on a disk.
    Dir,
    /// A memory file system.
    Mem,
    /// A persistent memory file system, on a file.
    Pmem,
    /// A host directory on a disk, by a 9P server.
    NineP(ServerVendor),
}

/// How requests and data go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// FUSE over io_uring.
    Uring,
    /// Reads and writes of /dev/fuse.
    DevFuse,
    /// Whatever the program chooses of these two.
    Auto,
    /// Files' data past the server, the rest by whatever the program chooses.
    Passthrough,
}

/// One combination, as in `mem_uring`, `dir_passthrough_always` or `dir_uring_auto_writeback`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// What is mounted.
    pub source: Source,
    /// How.
    pub road: Transport,
    /// The value of `--cache`.
    pub cache: &'static str,
    /// `--writeback`.
    pub writeback: bool,
}

impl Cell {
    /// The flags of `ferry mount` that choose the path.
    pub fn flags(&self) -> Vec<&'static str> {
        let (path, passthrough) = match self.road {
            Transport::Uring => ("uring", "off"),
            Transport::DevFuse => ("devfuse", "off"),
            Transport::Auto => ("auto", "off"),
            // What has no files below goes without.
            Transport::Passthrough if !self.has_files_below() => ("auto", "auto"),
            Transport::Passthrough => ("auto", "on"),
        };
        let mut flags = vec!["--path", path, "--passthrough", passthrough, "--cache", self.cache];
        flags.extend(self.writeback.then_some("--writeback"));
        flags
    }

    /// As [`Self::flags`], for a source that has other exports: with everything cached, what is open for writing is not
    /// passed through then, so that it cannot be insisted on.
    pub fn flags_of_one_of_several(&self) -> Vec<&'static str> {
        self.flags().into_iter().map(|flag| if flag == "on" { "auto" } else { flag }).collect()
    }

    /// Whether files' data can be had without the server.
    pub fn passes_through(&self) -> bool {
        self.road == Transport::Passthrough && self.has_files_below()
    }

    fn has_files_below(&self) -> bool {
        matches!(self.source, Source::Dir | Source::Mem)
    }
}

impl FromStr for Cell {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut words = name.split('_');
        let mut word = || words.next().unwrap_or_default();
        let source = match word() {
            "dir" => Source::Dir,
            "mem" => Source::Mem,
            "pmem" => Source::Pmem,
            "ninep" => Source::NineP(ServerVendor::Ferry),
            "diod" => Source::NineP(ServerVendor::Diod),
            "p9ufs" => Source::NineP(ServerVendor::P9ufs),
            other => return Err(format!("no source '{other}' in {name}")),
        };
        let road = match word() {
            "uring" => Transport::Uring,
            "devfuse" => Transport::DevFuse,
            "auto" => Transport::Auto,
            "passthrough" => Transport::Passthrough,
            other => return Err(format!("no path '{other}' in {name}")),
        };
        let cache = match word() {
            "" | "auto" => "auto",
            "none" => "none",
            "always" => "always",
            "metadata" => "metadata",
            other => return Err(format!("no cache mode '{other}' in {name}")),
        };
        let writeback = match word() {
            "" => false,
            "writeback" => true,
            other => return Err(format!("no '{other}' in {name}")),
        };
        Ok(Self { source, road, cache, writeback })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, road) = (format!("{:?}", self.source), format!("{:?}", self.road));
        let writeback = if self.writeback { " writeback" } else { "" };
        write!(f, "{} {} cache={}{writeback}", source.to_lowercase(), road.to_lowercase(), self.cache)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cells() {
        let cell: Cell = "pmem_devfuse_none".parse().unwrap();
        assert_eq!(cell, Cell { source: Source::Pmem, road: Transport::DevFuse, cache: "none", writeback: false });
        let cell: Cell = "dir_uring_auto_writeback".parse().unwrap();
        assert_eq!(cell.to_string(), "dir uring cache=auto writeback");
        let cell: Cell = "dir_passthrough".parse().unwrap();
        assert_eq!((cell.cache, cell.passes_through()), ("auto", true));
        let cell: Cell = "diod_devfuse".parse().unwrap();
        assert_eq!(
            (cell.source, cell.to_string().as_str()),
            (Source::NineP(ServerVendor::Diod), "ninep(diod) devfuse cache=auto")
        );
        assert!("pmem_passthrough".parse().is_ok_and(|cell: Cell| !cell.passes_through()));
        for wrong in ["", "mem", "mem_other", "tmpfs_uring", "mem_uring_often", "mem_uring_auto_back"] {
            assert!(wrong.parse::<Cell>().is_err(), "{wrong}");
        }
    }
}
