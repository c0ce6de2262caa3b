//! `fusermount3`, which mounts for unprivileged users: it checks that they may, mounts, and passes the connection over
//! a socket.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use super::{MountError, MountOptions};

/// The program, with its name from libfuse version 3; `fusermount` of version 2 lacks some options.
const PROGRAM: &str = "fusermount3";
/// The variable with the socket's descriptor number.
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";
/// The socket is its standard input, so no descriptor must be inherited.
const SOCKET_NUMBER: &str = "0";
/// The maximum output to read in bytes, more than it prints.
const TEXT_BYTES_MAX: u64 = 4096;

/// The state of `fusermount3` after a mount.
#[derive(Debug)]
pub(super) struct Helper {
    /// It waits for the socket's end, and then unmounts.
    waiting: Option<(Child, UnixStream)>,
}

impl Helper {
    /// Mounts; returns the connection to the kernel.
    pub(super) fn mount(path: &Path, options: &MountOptions) -> Result<(OwnedFd, Self), MountError> {
        let system = |reason: std::io::Error| MountError::System { path: path.into(), reason };
        let (ours, theirs) = UnixStream::pair().map_err(|_| MountError::Descriptors)?;
        let mut command = Command::new(PROGRAM);
        command.arg("-o").arg(options.helper_options()?).arg("--").arg(path);
        command.env(SOCKET_VARIABLE, SOCKET_NUMBER).env("LC_ALL", "C");
        command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| not_started(path, error))?;
        // The command holds a copy of its end of the socket.
        drop(command);
        let received = receive(&ours).map_err(system)?;
        if let Some(device) = received {
            if options.auto_unmount {
                return Ok((device, Self { waiting: Some((child, ours)) }));
            }
            child.wait().map_err(system)?;
            return Ok((device, Self { waiting: None }));
        }
        let text = said(&mut child);
        child.wait().map_err(system)?;
        Err(refused(path, &text))
    }

    /// Ends the wait, because the mount has ended.
    pub(super) fn end(&mut self) {
        if let Some((mut child, socket)) = self.waiting.take() {
            drop(socket);
            if let Err(error) = child.wait() {
                tracing::debug!("{PROGRAM} cannot be waited for: {error}");
            }
        }
    }
}

/// Unmounts a mount of this user.
pub(super) fn unmount(path: &Path, lazily: bool) -> Result<(), MountError> {
    let mut command = Command::new(PROGRAM);
    command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(path).env("LC_ALL", "C");
    let output = command.stdin(Stdio::null()).output().map_err(|error| not_started(path, error))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("Device or resource busy") {
        return Err(MountError::Busy(path.into()));
    }
    Err(MountError::Unmount { path: path.into(), reason: sentence(&text) })
}

/// Receives the one descriptor of a successful helper; none if it hung up without.
fn receive(socket: &UnixStream) -> std::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut data = [IoSliceMut::new(&mut byte)];
    rustix::io::retry_on_intr(|| rustix::net::recvmsg(socket, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

fn said(child: &mut Child) -> String {
    let mut text = Vec::new();
    if let Some(stderr) = child.stderr.take()
        && let Err(error) = stderr.take(TEXT_BYTES_MAX).read_to_end(&mut text)
    {
        tracing::debug!("what {PROGRAM} says cannot be read: {error}");
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn not_started(path: &Path, error: std::io::Error) -> MountError {
    match error.kind() {
        std::io::ErrorKind::NotFound if rustix::process::geteuid().is_root() => MountError::NotPermitted(path.into()),
        std::io::ErrorKind::NotFound => MountError::NoHelper(path.into()),
        _ => MountError::Helper { path: path.into(), text: error.to_string() },
    }
}

/// Interprets its messages since libfuse 3.0.
fn refused(path: &Path, text: &str) -> MountError {
    let path = path.to_owned();
    if text.contains("user_allow_other") {
        MountError::AllowOther
    } else if text.contains("no write access to mountpoint") {
        MountError::NotYours(path)
    } else if text.contains("modprobe fuse") || text.contains("device not found") {
        MountError::NoDevice
    } else if text.contains("mount failed: Operation not permitted") {
        MountError::NotPermitted(path)
    } else if text.contains("/dev/fuse: Permission denied") || text.contains("/dev/fuse: Operation not permitted") {
        MountError::DeviceRefused
    } else {
        MountError::Helper { path, text: sentence(text) }
    }
}

/// Returns its message on one line without the program's name.
fn sentence(text: &str) -> String {
    let lines = text.lines().map(|line| line.trim_start_matches(PROGRAM).trim_start_matches(": ").trim());
    let text = lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    if text.is_empty() { "it does not say why".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_become_sentences() {
        for (text, words) in [
            (
                "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf\n",
                "add the line user_allow_other",
            ),
            ("fusermount3: user has no write access to mountpoint /x\n", "may not write to the mount point /x"),
            ("fusermount3: fuse device not found, try 'modprobe fuse' first\n", "modprobe fuse"),
            ("fusermount3: mount failed: Operation not permitted\n", "CAP_SYS_ADMIN"),
            ("fusermount3: failed to open /dev/fuse: Permission denied\n", "--device /dev/fuse"),
            (
                "fusermount3: too many FUSE filesystems mounted; mount_max=N can be set in /etc/fuse.conf\n",
                "fusermount3 does not mount /x: too many FUSE filesystems mounted; mount_max=N",
            ),
            ("", "it does not say why"),
        ] {
            let error = refused(Path::new("/x"), text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
