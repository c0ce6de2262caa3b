//! Files that a start makes: images of `pmem:`, raw disks. They go again if the start fails.

use std::fs::{self, File, Metadata};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// How all processes of a start learn that it has succeeded: a pipe that has something in it from then on.
#[derive(Debug)]
pub struct Success {
    reader: OwnedFd,
    /// None where another process says so.
    writer: Option<OwnedFd>,
}

impl Success {
    /// Of a start that goes on. To be called before processes are made of this one.
    pub fn new() -> Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("no pipe can be had")?;
        Ok(Self { reader, writer: Some(writer) })
    }

    /// Leaves it to the process that this one was made of to say so.
    #[must_use]
    pub fn of_parent(self) -> Self {
        Self { writer: None, ..self }
    }

    /// Says so.
    pub fn say(&self) {
        // The pipe is empty, and its reader is here.
        let _ = self.writer.as_ref().map(|writer| rustix::io::write(writer, &[1]));
    }

    /// Whether it has been said.
    fn is_said(&self) -> bool {
        self.look(Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).contains(PollFlags::IN)
    }

    /// Waits until it is said, or the process that would say so lets go of it; returns which.
    pub fn wait(&self) -> bool {
        loop {
            let seen = self.look(None);
            if !seen.is_empty() {
                return seen.contains(PollFlags::IN);
            }
        }
    }

    fn look(&self, left: Option<&Timespec>) -> PollFlags {
        let mut polled = [PollFd::new(&self.reader, PollFlags::IN)];
        match poll(&mut polled, left) {
            Ok(_) => polled[0].revents(),
            Err(Errno::INTR) => PollFlags::empty(),
            Err(_) => PollFlags::ERR,
        }
    }

    /// The same, for whoever else is to know it.
    pub fn try_clone(&self) -> Result<Self> {
        let reader = self.reader.try_clone().context("no descriptor is left")?;
        Ok(Self { reader, writer: None })
    }
}

/// The files that this start has made so far. They are removed when this is dropped, unless the start has succeeded. Until then their locks are
/// held, so that nobody else begins to use them.
#[derive(Debug)]
pub struct NewFiles {
    made: Vec<(PathBuf, File)>,
    success: Success,
}

impl NewFiles {
    /// None yet.
    pub fn until(success: Success) -> Self {
        Self { made: Vec::new(), success }
    }

    /// Takes care of files that were made; their descriptors hold their locks.
    pub fn add(&mut self, made: impl IntoIterator<Item = (PathBuf, File)>) {
        self.made.extend(made);
    }

    /// Leaves them to the process that made them, which is not the one that serves.
    pub fn take_over(&mut self) {
        self.made.clear();
    }

    /// What can be read from once the start has succeeded; `None` if it has made no files.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        (!self.made.is_empty()).then(|| self.success.reader.as_fd())
    }

    /// This process serves. If nobody else has a say in it, the start has succeeded.
    pub fn keep(&mut self) {
        self.success.say();
        self.release();
    }

    /// Closes the files if the start has succeeded.
    pub fn release(&mut self) {
        if self.success.is_said() {
            self.made.clear();
        }
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        if self.made.is_empty() || self.success.is_said() {
            return;
        }
        let identity = |found: Metadata| (found.dev(), found.ino());
        for (path, file) in &self.made {
            let there = fs::symlink_metadata(path).map(identity);
            let is_there = there.is_ok_and(|there| file.metadata().is_ok_and(|here| identity(here) == there));
            if is_there && let Err(error) = fs::remove_file(path) {
                tracing::warn!("{} was made by a start that failed, and cannot be removed: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_failed_start_are_removed_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let make = |name: &str| {
            let path = folder.path().join(name);
            (path.clone(), File::create(&path).expect("a file"))
        };
        let names = || {
            let entries = fs::read_dir(folder.path()).expect("a folder");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        let none = || NewFiles::until(Success::new().expect("a pipe"));
        let mut failed = none();
        failed.add([make("a"), make("b")]);
        // Somebody else has put another one in its place.
        fs::rename(make("other").0, folder.path().join("b")).expect("renamed");
        drop(failed);
        assert_eq!(names(), ["b"]);

        let mut kept = none();
        kept.add([make("c")]);
        kept.keep();
        drop(kept);
        assert_eq!(names(), ["b", "c"]);

        // One of several servers is up: whether that is enough, the process that began them says.
        for succeeds in [false, true] {
            let success = Success::new().expect("a pipe");
            let of_child = success.try_clone().expect("a descriptor");
            let waits = of_child.try_clone().expect("a descriptor");
            let mut of_child = NewFiles::until(of_child);
            of_child.add([make("d")]);
            of_child.keep();
            if succeeds {
                success.say();
            }
            drop(success);
            assert_eq!(waits.wait(), succeeds);
            drop(of_child);
            assert_eq!(names().contains(&"d".into()), succeeds);
        }
    }
}
