//! Where control sockets are: a folder per user, which nobody else can enter.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::Error;

/// The folder of root's servers.
const OF_ROOT: &str = "/run/ferry";
/// Where systemd has a folder for each user who is logged in.
const OF_USERS: &str = "/run/user";
/// Enter: the user alone.
const MODE: u32 = 0o700;

/// The folder of this user's servers, which is made if it is not there.
pub(crate) fn own() -> Result<PathBuf, Error> {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| Path::new(folder).is_absolute());
    let folder = match runtime {
        _ if uid == 0 => OF_ROOT.into(),
        Some(runtime) => Path::new(&runtime).join("ferry"),
        None => format!("/tmp/ferry-{uid}").into(),
    };
    let made = fs::DirBuilder::new().recursive(uid == 0).mode(MODE).create(&folder);
    if let Err(error) = made.or_else(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Ok(()),
        _ => Err(error),
    }) {
        return Err(Error::Folder { folder, reason: error });
    }
    check(&folder, uid)?;
    Ok(folder)
}

/// In `/tmp` anybody could have made it first.
fn check(folder: &Path, uid: u32) -> Result<(), Error> {
    let found = fs::symlink_metadata(folder).map_err(|reason| Error::Folder { folder: folder.into(), reason })?;
    let private = found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0;
    if private { Ok(()) } else { Err(Error::NotPrivate(folder.into())) }
}

/// Removes the sockets that servers left when they were killed.
pub(crate) fn remove_dead(folder: &Path) {
    for path in entries(folder) {
        let is_socket = fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket());
        let pid = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        let Some(pid) = pid.and_then(rustix::process::Pid::from_raw).filter(|_| is_socket) else { continue };
        let gone = rustix::process::test_kill_process(pid) == Err(rustix::io::Errno::SRCH);
        // In a container that shares the folder, the number may mean nothing to us although the server runs.
        let deaf = UnixStream::connect(&path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
        if gone
            && deaf
            && let Err(error) = fs::remove_file(&path)
        {
            tracing::debug!("the socket {} of a dead server stays: {error}", path.display());
        }
    }
}

/// Every socket that this user may talk to, with the process id it is named after. Root sees those of all users.
#[must_use]
pub fn sockets() -> Vec<(u32, PathBuf)> {
    let mut folders: Vec<PathBuf> = own().into_iter().collect();
    if rustix::process::geteuid().is_root() {
        folders.extend(entries(Path::new(OF_USERS)).into_iter().map(|user| user.join("ferry")));
        folders.extend(
            entries(Path::new("/tmp"))
                .into_iter()
                .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ferry-"))),
        );
    }
    folders.sort();
    folders.dedup();
    let sockets = folders.iter().filter(|folder| is_private(folder)).flat_map(|folder| entries(folder));
    sockets
        .filter(|path| fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()))
        .filter_map(|path| Some((path.file_name()?.to_str()?.parse().ok()?, path)))
        .collect()
}

/// Whether a folder is its owner's alone, whoever that is.
fn is_private(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|found| check(folder, found.uid()).is_ok())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folders_that_others_can_enter_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ferry-1");
        let uid = rustix::process::geteuid().as_raw();
        fs::create_dir(&path).expect("a folder");
        for (mode, good) in [(0o700, true), (0o710, false), (0o777, false)] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(check(&path, uid).is_ok(), good, "{mode:o}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("it is ours");
        assert!(check(&path, uid + 1).is_err());
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        assert!(check(&link, uid).is_err());
    }
}
