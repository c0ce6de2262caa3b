//! Files that a start creates: images of `pmem:`, and raw disks. They are removed if the start fails.

use std::fs::{self, File, Metadata};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

/// The signal to all processes of a start that it has succeeded: a pipe with a byte in it.
#[derive(Debug)]
pub struct Success {
    reader: OwnedFd,
    /// `None` in processes that only wait for the signal.
    writer: Option<OwnedFd>,
}

impl Success {
    /// Creates the pipe. Call it before the fork.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe")?;
        Ok(Self { reader, writer: Some(writer) })
    }

    /// Returns the child's side, which only waits.
    #[must_use]
    pub fn of_parent(self) -> Self {
        Self { writer: None, ..self }
    }

    /// Sends the signal.
    pub fn send(&self) {
        // The pipe is empty, and its reader is here.
        let _ = self.writer.as_ref().map(|writer| rustix::io::write(writer, &[1]));
    }

    /// Returns whether the signal was sent.
    fn is_sent(&self) -> bool {
        self.poll(Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).contains(PollFlags::IN)
    }

    /// Waits for the signal; returns `false` if the sender closes its end without it.
    pub fn wait(&self) -> bool {
        loop {
            let events = self.poll(None);
            if !events.is_empty() {
                return events.contains(PollFlags::IN);
            }
        }
    }

    fn poll(&self, left: Option<&Timespec>) -> PollFlags {
        let mut polled = [PollFd::new(&self.reader, PollFlags::IN)];
        match poll(&mut polled, left) {
            Ok(_) => polled[0].revents(),
            Err(Errno::INTR) => PollFlags::empty(),
            Err(_) => PollFlags::ERR,
        }
    }

    /// Returns another waiting side.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> Result<Self> {
        let reader = self.reader.try_clone().context("no descriptor is left")?;
        Ok(Self { reader, writer: None })
    }
}

/// The files that this start has created. Dropping this removes them, unless the start has succeeded. Their descriptors hold
/// their locks, so that no other process starts to use a file that may be removed.
#[derive(Debug)]
pub struct NewFiles {
    files: Vec<(PathBuf, File)>,
    success: Success,
}

impl NewFiles {
    /// Returns an empty list.
    pub fn new(success: Success) -> Self {
        Self { files: Vec::new(), success }
    }

    /// Adds new files, by their path and a descriptor that holds the lock.
    pub fn add(&mut self, files: impl IntoIterator<Item = (PathBuf, File)>) {
        self.files.extend(files);
    }

    /// Leaves the files to the process outside the sandbox, which can remove them.
    pub fn leave(&mut self) {
        self.files.clear();
    }

    /// Returns the descriptor to poll for success.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.success.reader.as_fd()
    }

    /// Called when this process serves: sends the signal, unless another process decides, and closes the files if it was sent.
    pub fn keep(&mut self) {
        self.success.send();
        self.release();
    }

    /// Closes the files if the start has succeeded; returns whether it has.
    pub fn release(&mut self) -> bool {
        let is_sent = self.success.is_sent();
        if is_sent {
            self.files.clear();
        }
        is_sent
    }
}

impl Drop for NewFiles {
    fn drop(&mut self) {
        if self.files.is_empty() || self.success.is_sent() {
            return;
        }
        let identity = |found: Metadata| (found.dev(), found.ino());
        for (path, file) in &self.files {
            let there = fs::symlink_metadata(path).map(identity);
            let is_there = there.is_ok_and(|there| file.metadata().is_ok_and(|here| identity(here) == there));
            if is_there && let Err(error) = fs::remove_file(path) {
                tracing::warn!("{} was created by a start that failed, and cannot be removed: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_failed_start_are_removed_and_no_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let make = |name: &str| {
            let path = directory.path().join(name);
            (path.clone(), File::create(&path).expect("a file"))
        };
        let names = || {
            let entries = fs::read_dir(directory.path()).expect("a directory");
            let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
            names.sort();
            names
        };
        let none = || NewFiles::new(Success::new().expect("a pipe"));
        let mut failed = none();
        failed.add([make("a"), make("b")]);
        // Another file has taken the place of this one.
        fs::rename(make("other").0, directory.path().join("b")).expect("renamed");
        drop(failed);
        assert_eq!(names(), ["b"]);

        let mut kept = none();
        kept.add([make("c")]);
        kept.keep();
        drop(kept);
        assert_eq!(names(), ["b", "c"]);

        // One of several servers is up; the process that started them decides whether the start has succeeded.
        for succeeds in [false, true] {
            let success = Success::new().expect("a pipe");
            let of_child = success.try_clone().expect("a descriptor");
            let waits = of_child.try_clone().expect("a descriptor");
            let mut of_child = NewFiles::new(of_child);
            of_child.add([make("d")]);
            of_child.keep();
            if succeeds {
                success.send();
            }
            drop(success);
            assert_eq!(waits.wait(), succeeds);
            drop(of_child);
            assert_eq!(names().contains(&"d".into()), succeeds);
        }
    }
}
