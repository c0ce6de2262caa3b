//! The disks' files, and the servers on them.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::Advice;

use super::fio::USED_MIB;
use super::systems::{ALL, Programs, System};
use crate::data::write_noise;
use crate::server::Server;

/// The size of a system's file: a little more than is used, and another for each, by which guests tell them apart.
pub fn bytes(system: System) -> u64 {
    let index = ALL.iter().position(|one| *one == system).unwrap_or(ALL.len());
    (USED_MIB + index as u64) << 20
}

/// The files, and a directory for sockets.
#[derive(Debug)]
pub struct Files {
    directory: PathBuf,
}

impl Files {
    /// Makes a file for each system in a directory.
    pub fn make(directory: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let files = Self { directory };
        for system in ALL {
            write_noise(&files.path(system), bytes(system))?;
        }
        files.settle();
        Ok(files)
    }

    /// Where sockets and logs are.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The file of a system.
    pub fn path(&self, system: System) -> PathBuf {
        self.directory.join(format!("{}.disk", system.full_name()))
    }

    /// Lets what was written reach the disk, so that it does not disturb what is measured next.
    pub fn settle(&self) {
        if let Ok(dir) = File::open(&self.directory) {
            let _ = rustix::fs::syncfs(dir);
        }
    }

    /// Brings a system's file into the page cache, alike for all: anew, and in single pages. How large the pieces are that the
    /// kernel keeps there decides how long ext4 takes for a write, by a factor of six, and would depend on what was read and
    /// written before.
    pub fn warm(&self, system: System) -> Result<()> {
        let mut file = File::open(self.path(system)).context("cannot open a disk's file")?;
        file.sync_all().context("cannot sync a disk's file")?;
        for advice in [Advice::DontNeed, Advice::Random] {
            rustix::fs::fadvise(&file, 0, None, advice).context("cannot advise the kernel on a disk's file")?;
        }
        let mut chunk = vec![0; 1 << 20];
        while file.read(&mut chunk).context("cannot read a disk's file")? > 0 {}
        Ok(())
    }

    /// Starts the server of a system.
    pub fn serve(&self, programs: &Programs, system: System, direct: bool, cpus: &str) -> Result<Server> {
        let socket = self.directory.join(format!("{}.s", system.full_name()));
        let command = programs.server(system, &self.path(system), &socket, direct)?;
        Server::spawn(system.name(), &socket, cpus, command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_files_have_the_same_size() {
        let mut sizes: Vec<u64> = ALL.into_iter().map(bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        assert_eq!(sizes.len(), ALL.len());
        assert!(sizes[0] >= USED_MIB << 20);
    }
}
