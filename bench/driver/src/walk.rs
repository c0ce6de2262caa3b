//! A walk over a whole share by READDIRPLUS, as by a guest that keeps every inode; and the release of the inodes.

use std::path::Path;
use std::time::Duration;

use ferry_vfs::FileType;
use ferry_wire::fuse::abi::ForgetOne;

use crate::{Config, Driver, ROOT, Result};

/// What one READDIRPLUS may bring: what Linux asks for at most for a program's own buffer of 32 KiB.
const LISTING_BYTES: u32 = 32 << 10;
/// Inodes of one BATCH_FORGET: as many as fit in a page after its headers of 40 and 8 bytes, 16 bytes each. Linux over
/// virtio-fs sends a FORGET for each inode instead.
const FORGET_BATCH: usize = (4096 - 40 - 8) / size_of::<ForgetOne>();
/// How long a server may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A share that has been walked over; all its inodes have a reference until [`Walk::forget`].
#[derive(Debug)]
pub struct Walk {
    driver: Driver,
    nodes: Vec<ForgetOne>,
}

impl Walk {
    /// Walks over the share that is served at a socket.
    ///
    /// # Errors
    /// As [`Driver::connect`] and [`Driver::ask`].
    pub fn over(socket: &Path) -> Result<Self> {
        let mut driver = Driver::connect(socket, Config { timeout: TIMEOUT, ..Config::default() })?;
        driver.init()?;
        let mut walk = Self { driver, nodes: Vec::new() };
        let mut directories = vec![ROOT];
        while let Some(directory) = directories.pop() {
            walk.list(directory, &mut directories)?;
        }
        Ok(walk)
    }

    fn list(&mut self, directory: u64, directories: &mut Vec<u64>) -> Result<()> {
        let open = self.driver.opendir(directory)?;
        let mut offset = 0;
        loop {
            let found = self.driver.readdirplus(directory, open.fh, offset, LISTING_BYTES)?;
            let Some(last) = found.last() else { break };
            offset = last.next;
            for listed in found {
                if listed.name == b"." || listed.name == b".." {
                    continue;
                }
                let node = match listed.entry {
                    Some(entry) => entry.ino.0,
                    // A server may leave some out, to see whether they are wanted.
                    None => self.driver.lookup(directory, &listed.name)?.nodeid,
                };
                if listed.kind == FileType::Directory {
                    directories.push(node);
                }
                self.nodes.push(ForgetOne { nodeid: node, nlookup: 1 });
            }
        }
        self.driver.releasedir(directory, open.fh)
    }

    /// Returns the number of entries of all directories, without `.` and `..`.
    pub fn entries(&self) -> usize {
        self.nodes.len()
    }

    /// The connection, for more requests.
    pub fn driver(&mut self) -> &mut Driver {
        &mut self.driver
    }

    /// Gives all references back; the server has done so, too, when this returns.
    ///
    /// # Errors
    /// As [`Driver::batch_forget`].
    pub fn forget(&mut self) -> Result<()> {
        for batch in std::mem::take(&mut self.nodes).chunks(FORGET_BATCH) {
            self.driver.batch_forget(batch)?;
        }
        Ok(())
    }
}
