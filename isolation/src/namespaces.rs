//! Splits a process in two: a server in its own namespaces, and a supervisor outside.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::UnmountFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal};
use rustix::thread::UnshareFlags;

use crate::root::{View, step};
use crate::supervisor::{BlockedSignals, Child, End, Supervisor};
use crate::{Capabilities, Error, Result, root};

/// The process in which [`split`] returned.
#[derive(Debug)]
pub enum Split {
    /// The original process.
    Supervisor(Supervisor),
    /// The server, process 1 of its namespace, with the shared directories' new paths.
    Server(Vec<PathBuf>),
}

/// Splits this process. The child has its own namespaces of mounts, processes and networks (unless the view keeps the
/// host's network). Without `CAP_SYS_ADMIN` it also has a user namespace, which maps only this user; files of other
/// users belong to nobody there.
///
/// Sockets that were bound before the split stay on the host's network. Open descriptors stay open in both processes.
///
/// # Errors
///
/// The step that failed. This process may then be unable to create children. A process that can run without namespaces
/// calls [`is_possible`] first.
pub fn split(view: &View) -> Result<Split> {
    has_one_thread()?;
    let mut flags = UnshareFlags::NEWPID;
    let as_user = !Capabilities::of_thread()?.can_mount();
    flags.set(UnshareFlags::NEWUSER, as_user);
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    step(unshare(flags), || match as_user {
        true => "cannot create a user namespace (does a sysctl or a container forbid it?)".into(),
        false => "cannot create a PID namespace".into(),
    })?;
    if as_user {
        for (file, text) in
            [("setgroups", "deny".to_owned()), ("uid_map", identity_map(uid)), ("gid_map", identity_map(gid))]
        {
            fs::write(Path::new("/proc/self").join(file), text)
                .map_err(|error| Error::System(format!("cannot write /proc/self/{file}: {error}")))?;
        }
    }
    match fork_child()? {
        Some(child) => Ok(Split::Supervisor(Supervisor::new(child))),
        None => {
            step(unshare(UnshareFlags::NEWNS), || "cannot create a mount namespace".into())?;
            if !view.network {
                leave_network()?;
            }
            root::enter(view).map(Split::Server)
        }
    }
}

/// Creates a child of this process, which must have one thread. Returns `None` in the child.
///
/// # Errors
///
/// [`Error::Threads`], or the limit of processes is reached.
pub fn begin_child() -> Result<Option<Child>> {
    has_one_thread()?;
    fork_child()
}

fn has_one_thread() -> Result<()> {
    match fs::read_dir("/proc/self/task").map_or(1, Iterator::count) {
        1 => Ok(()),
        threads => Err(Error::Threads(threads)),
    }
}

/// Creates a child that does not outlive this process.
fn fork_child() -> Result<Option<Child>> {
    let (reader, writer) = step(pipe_with(PipeFlags::CLOEXEC), || "cannot create a pipe".into())?;
    if let Some(child) = fork()? {
        return Ok(Some(Child::new(child, writer)));
    }
    drop(writer);
    step(rustix::process::set_parent_process_death_signal(Some(Signal::KILL)), || {
        "cannot request a signal for the end of the parent process".into()
    })?;
    // The parent may have ended before that. Then this process ends silently: the caller would report an error as the
    // parent's.
    let mut polled = [PollFd::new(&reader, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0) {
        exit(End::Signal(Signal::KILL.as_raw()).status());
    }
    Ok(None)
}

/// Moves this thread, and the threads that it starts later, to an empty network namespace. Threads that it started
/// before stay in theirs.
///
/// # Errors
///
/// [`Error::Namespaces`]: this thread may not create namespaces.
pub fn leave_network() -> Result<()> {
    step(unshare(UnshareFlags::NEWNET), || "cannot create a network namespace".into())
}

/// Hides directories of [`split`] from this thread and the threads that it starts later, in a new mount namespace.
/// Threads that it started before still see them.
///
/// # Errors
///
/// [`Error::Namespaces`]: this thread may not create namespaces, or a path is not a mount point.
pub fn hide_directories(paths: &[&Path]) -> Result<()> {
    step(unshare(UnshareFlags::NEWNS), || "cannot create a second mount namespace".into())?;
    let unmount = |path: &&Path| rustix::mount::unmount(*path, UnmountFlags::DETACH);
    paths.iter().try_for_each(|path| step(unmount(path), || format!("cannot unmount {}", path.display())))
}

/// Tests in a short-lived child whether [`split`] and leaving the network work here.
///
/// # Errors
///
/// The step that failed.
pub fn is_possible(view: &View) -> Result<()> {
    let (reader, writer) = step(pipe_with(PipeFlags::CLOEXEC), || "cannot create a pipe".into())?;
    if let Some(child) = fork()? {
        drop(writer);
        let mut reason = String::new();
        let read = fs::File::from(reader).read_to_string(&mut reason);
        let waited = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
        let succeeded = matches!(waited, Ok(Some((_, status))) if status.exit_status() == Some(0));
        return match read {
            Ok(_) if succeeded && reason.is_empty() => Ok(()),
            _ if !reason.is_empty() => Err(Error::System(reason)),
            _ => Err(Error::System("a process that tested namespaces failed".into())),
        };
    }
    let outcome = match BlockedSignals::hold().and_then(|signals| Ok((split(view)?, signals))) {
        Ok((Split::Server(_), _)) => leave_network(),
        Ok((Split::Supervisor(supervisor), signals)) => match supervisor.wait(&signals, |_| {}) {
            Ok(End::Status(status)) => exit(status),
            Ok(end) => Err(Error::System(format!("a process that tested namespaces ended by {end}"))),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let reported = match outcome {
        Ok(()) => Ok(()),
        Err(error) => fs::File::from(writer).write_all(error.to_string().as_bytes()),
    };
    exit(u8::from(reported.is_err()))
}

/// Changes the root directory with `chroot`. Descriptors of directories outside still give access to them.
///
/// # Errors
///
/// The step that failed; `CAP_SYS_CHROOT` is required.
pub fn change_root(dir: &Path) -> Result<()> {
    step(rustix::process::chdir(dir), || format!("cannot enter {}", dir.display()))?;
    step(rustix::process::chroot("."), || format!("cannot make {} the root directory", dir.display()))
}

/// Returns a map of an id to itself.
fn identity_map(id: u32) -> String {
    format!("{id} {id} 1")
}

fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: unshare_unsafe is unsafe only for CLONE_FILES, which no caller passes.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Lets this process wait for its children. Children inherit ignored SIGCHLD, and the kernel then reports no exits.
pub fn expect_children() {
    // SAFETY: no handler is set.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Calls fork(2) in a process with one thread. Returns `None` in the child.
fn fork() -> Result<Option<Pid>> {
    expect_children();
    // SAFETY: the child of a process with one thread inherits no lock of another thread. `split` and `begin_child`
    // count the threads, and `is_possible` runs before `split`.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        let errno = rustix::io::Errno::from_io_error(&std::io::Error::last_os_error());
        return step(Err(errno.unwrap_or(rustix::io::Errno::AGAIN)), || "cannot create a process".into());
    }
    Ok(Pid::from_raw(pid))
}

/// Ends a forked process without running exit handlers.
fn exit(status: u8) -> ! {
    // SAFETY: _exit only ends the process.
    unsafe { libc::_exit(i32::from(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_with_threads_cannot_be_split() {
        // The test harness has one thread per test and one that waits.
        let error = split(&View::default()).expect_err("threads").to_string();
        assert!(error.contains("threads already"), "{error}");
    }
}
