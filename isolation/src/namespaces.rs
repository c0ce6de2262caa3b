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
pub enum Side {
    /// The original process.
    Outside(Supervisor),
    /// The server, process 1 of its namespace, with the shared directories' new paths.
    Inside(Vec<PathBuf>),
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
pub fn split(view: &View) -> Result<Side> {
    has_one_thread()?;
    let mut flags = UnshareFlags::NEWPID;
    let as_user = !Capabilities::of_thread()?.can_mount();
    flags.set(UnshareFlags::NEWUSER, as_user);
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    step(unshare(flags), || match as_user {
        true => "no namespace of users can be had (is it forbidden by sysctl, or by a container?)".into(),
        false => "no namespace of processes can be had".into(),
    })?;
    if as_user {
        for (file, text) in [("setgroups", "deny".to_owned()), ("uid_map", one(uid)), ("gid_map", one(gid))] {
            fs::write(Path::new("/proc/self").join(file), text)
                .map_err(|error| Error::Told(format!("/proc/self/{file} cannot be written: {error}")))?;
        }
    }
    match fork_child()? {
        Some(child) => Ok(Side::Outside(Supervisor::new(child))),
        None => {
            step(unshare(UnshareFlags::NEWNS), || "no namespace of mounts can be had".into())?;
            if !view.network {
                leave_network()?;
            }
            root::enter(view).map(Side::Inside)
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
    let (lives_here, lives) = step(pipe_with(PipeFlags::CLOEXEC), || "no pipe can be had".into())?;
    if let Some(child) = fork()? {
        return Ok(Some(Child::new(child, lives)));
    }
    drop(lives);
    step(rustix::process::set_parent_process_death_signal(Some(Signal::KILL)), || {
        "the end of the process outside cannot be learnt".into()
    })?;
    // The parent may have ended before that. Then this process ends as silently: an error would be handled, and reported, as the parent's.
    let mut polled = [PollFd::new(&lives_here, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut polled, Some(&now)).is_ok_and(|found| found > 0) {
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
    step(unshare(UnshareFlags::NEWNET), || "no namespace of networks can be had".into())
}

/// Hides directories of [`split`] from this thread and the threads that it starts later, in a new mount namespace.
/// Threads that it started before still see them.
///
/// # Errors
///
/// [`Error::Namespaces`]: this thread may not create namespaces, or a path is not a mount point.
pub fn hide_directories(places: &[&Path]) -> Result<()> {
    step(unshare(UnshareFlags::NEWNS), || "no second namespace of mounts can be had".into())?;
    let leave = |place: &&Path| rustix::mount::unmount(*place, UnmountFlags::DETACH);
    places.iter().try_for_each(|place| step(leave(place), || format!("{} cannot be left", place.display())))
}

/// Tests in a short-lived child whether [`split`] and leaving the network work here.
///
/// # Errors
///
/// The step that failed.
pub fn is_possible(view: &View) -> Result<()> {
    let (reader, writer) = step(pipe_with(PipeFlags::CLOEXEC), || "no pipe can be had".into())?;
    if let Some(child) = fork()? {
        drop(writer);
        let mut why = String::new();
        let told = fs::File::from(reader).read_to_string(&mut why);
        let waited = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
        let well = matches!(waited, Ok(Some((_, status))) if status.exit_status() == Some(0));
        return match told {
            Ok(_) if well && why.is_empty() => Ok(()),
            _ if !why.is_empty() => Err(Error::Told(why)),
            _ => Err(Error::Told("a process that tested namespaces failed".into())),
        };
    }
    let tried = BlockedSignals::hold().and_then(|held| Ok((split(view)?, held)));
    let outcome = match tried {
        Ok((Side::Inside(_), _)) => leave_network(),
        Ok((Side::Outside(outside), held)) => match outside.wait(&held, |_| {}) {
            Ok(End::Status(status)) => exit(status),
            Ok(end) => Err(Error::Told(format!("a process that tested namespaces ended by {end}"))),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    let said = match outcome {
        Ok(()) => Ok(()),
        Err(error) => fs::File::from(writer).write_all(error.to_string().as_bytes()),
    };
    exit(u8::from(said.is_err()))
}

/// Changes the root directory with `chroot`. Descriptors of directories outside still give access to them.
///
/// # Errors
///
/// The step that failed; `CAP_SYS_CHROOT` is required.
pub fn change_root(dir: &Path) -> Result<()> {
    step(rustix::process::chdir(dir), || format!("{} cannot be entered", dir.display()))?;
    step(rustix::process::chroot("."), || format!("{} cannot become the root directory", dir.display()))
}

/// Returns a map of an id to itself.
fn one(id: u32) -> String {
    format!("{id} {id} 1")
}

fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: unshare_unsafe is unsafe only for CLONE_FILES, which no caller passes.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Calls fork(2) in a process with one thread. Returns `None` in the child.
fn fork() -> Result<Option<Pid>> {
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
    fn processes_with_threads_are_not_split() {
        // The test harness has one thread per test and one that waits.
        let error = split(&View::default()).expect_err("threads").to_string();
        assert!(error.contains("threads already"), "{error}");
    }
}
