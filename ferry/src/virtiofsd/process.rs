//! The process setup of virtiofsd: the limit of open files, and the pid file.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ferry_vfs::sync::lock;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::socket;

/// The default limit of open files, if the host allows it.
const NOFILE_USUAL: u64 = 1_000_000;
/// The host's maximum of that limit.
const NR_OPEN: &str = "/proc/sys/fs/nr_open";

/// The pid file. It is locked as long as it is open: until this process ends.
static PID_FILE: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);

/// The setup before sharing.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProcessSetup {
    /// The limit of open files.
    pub nofile: Option<u64>,
    /// The path of the pid file.
    pub pid_file: Option<PathBuf>,
}

impl ProcessSetup {
    /// Applies the setup. A limit above the possible maximum becomes that maximum.
    ///
    /// A sentence that says what is not possible.
    pub fn apply(&self) -> Result<(), String> {
        match self.nofile {
            Some(0) => {}
            Some(limit) => {
                if let Err(error) = set_limit(limit) {
                    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
                    eprintln!(
                        "virtiofsd: --rlimit-nofile {limit}: {error}; the limit is {most}, the maximum of this user"
                    );
                }
            }
            None => {
                let host = std::fs::read_to_string(NR_OPEN).ok().and_then(|number| number.trim().parse().ok());
                let limit = NOFILE_USUAL.min(host.unwrap_or(NOFILE_USUAL));
                if getrlimit(Resource::Nofile).maximum.is_some_and(|most| most < limit) {
                    // A failure leaves the limit as it was.
                    let _ = set_limit(limit);
                }
            }
        }
        let Some(path) = &self.pid_file else { return Ok(()) };
        let is_locked = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
        let file = socket::retry_in_use(|| write_pid(path), is_locked).map_err(|error| {
            if is_locked(&error) {
                let owner = std::fs::read_to_string(path).unwrap_or_default();
                return format!(
                    "{} is locked by a running server, process {}: end it, or choose another --socket-path",
                    path.display(),
                    owner.trim()
                );
            }
            format!("cannot write {}: {error}", path.display())
        })?;
        *lock(&PID_FILE) = Some((path.clone(), file));
        Ok(())
    }
}

/// Closes the pid file in the process inside the sandbox: the process outside still locks it.
pub fn leave_pid_file() {
    *lock(&PID_FILE) = None;
}

/// Removes the pid file of this process, if it has one and the path still leads to it.
pub fn remove_pid_file() {
    let Some((path, file)) = lock(&PID_FILE).take() else { return };
    if is_at(&path, &file).unwrap_or_default() {
        // A failure leaves the file.
        let _ = std::fs::remove_file(&path);
    }
}
fn is_at(path: &Path, file: &File) -> rustix::io::Result<bool> {
    let (file, named) = (rustix::fs::fstat(file)?, rustix::fs::lstat(path)?);
    Ok((named.st_dev, named.st_ino) == (file.st_dev, file.st_ino))
}

/// Sets the soft and the hard limit: a source raises the soft one to the hard one.
fn set_limit(limit: u64) -> rustix::io::Result<()> {
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) })
}

/// Creates the pid file, readable only for its user, without following a link. The file stays locked until it is closed, as
/// virtiofsd does, so that a later server does not take it.
///
/// [`ErrorKind::WouldBlock`]: another process has locked it; it is unchanged. Errors of the system.
fn write_pid(path: &Path) -> std::io::Result<File> {
    // Not blocking: a FIFO may have no reader.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let mut file = loop {
        let file = File::from(rustix::fs::open(path, flags, mode)?);
        // The file is overwritten, so it must not have another name or another owner.
        let found = rustix::fs::fstat(&file)?;
        let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        if !is_file || found.st_nlink > 1 || found.st_uid != rustix::process::geteuid().as_raw() {
            return Err(std::io::Error::other("it is not a regular file with this owner and a single name; remove it"));
        }
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        // It may have been removed or replaced before the lock.
        if is_at(path, &file).unwrap_or_default() {
            break file;
        }
    };
    file.set_len(0)?;
    rustix::fs::fchmod(&file, mode)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The path is predictable, so another user may have created a file there.
    #[test]
    fn a_pid_file_belongs_to_one_process() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("precious"), "precious").expect("a file");
        std::fs::hard_link(at("precious"), at("linked")).expect("a link");
        symlink(at("precious"), at("symlink")).expect("a link");
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a FIFO");
        for name in ["linked", "symlink", "fifo"] {
            write_pid(&at(name)).expect_err(name);
        }
        let found = std::fs::metadata(at("precious")).expect("it is there");
        assert_eq!(std::fs::read(at("precious")).expect("it is there"), b"precious");
        assert_ne!(found.permissions().mode() & 0o777, 0o600);
        let file = write_pid(&at("pid")).expect("a free path");
        assert_eq!(write_pid(&at("pid")).expect_err("it is locked").kind(), ErrorKind::WouldBlock);
        drop(file);
        let _again = write_pid(&at("pid")).expect("it was left");
        assert_eq!(std::fs::read_to_string(at("pid")).expect("it is there").trim(), std::process::id().to_string());
    }
}
