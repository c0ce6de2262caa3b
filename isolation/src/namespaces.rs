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

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Side {
    /// The one that was there before, and that others know.
    Outside(Supervisor),
    /// The server, process 1 of its namespace, in a root directory that has only what is shared: where each is now.
    Inside(Vec<PathBuf>),
}

/// Splits this process. The child is in namespaces of mounts, processes and networks (but for a view with the host's network); without `CAP_SYS_ADMIN` in one of users,
/// too, in which this user has its own number and everybody else is nobody.
///
/// Only sockets that are bound before are any of the host's; open descriptors stay open in both.
///
/// # Errors
/// The step that failed. On this side the process may then have lost the right to make children: a process that wants to go
/// on without namespaces asks [`is_possible`] first.
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

/// Begins a child of this process, which has one thread. The child gets `None`.
///
/// # Errors
/// [`Error::Threads`], or there can be no more processes.
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

/// Begins a child that does not outlive this process.
fn fork_child() -> Result<Option<Child>> {
    let (lives_here, lives) = step(pipe_with(PipeFlags::CLOEXEC), || "no pipe can be had".into())?;
    if let Some(child) = fork()? {
        return Ok(Some(Child::new(child, lives)));
    }
    drop(lives);
    step(rustix::process::set_parent_process_death_signal(Some(Signal::KILL)), || {
        "the end of the process outside cannot be learnt".into()
    })?;
    // It may have gone before that.
    let mut polled = [PollFd::new(&lives_here, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if poll(&mut polled, Some(&now)).is_ok_and(|found| found > 0) {
        return Err(Error::Told("the process outside has gone".into()));
    }
    Ok(None)
}

/// Has this thread, and those that it begins from now on, be in a network of their own in which there is nobody. Threads that it has
/// begun before stay where they are.
///
/// # Errors
/// [`Error::Namespaces`]: this thread may not make namespaces (any more).
pub fn leave_network() -> Result<()> {
    step(unshare(UnshareFlags::NEWNET), || "no namespace of networks can be had".into())
}

/// Has this thread, and those that it begins from now on, do without directories of [`split`]'s, in a namespace of mounts of their own.
/// Threads that it has begun before see them on.
///
/// # Errors
/// [`Error::Namespaces`]: this thread may not make namespaces (any more), or there is nothing mounted at one of the places.
pub fn hide_directories(places: &[&Path]) -> Result<()> {
    step(unshare(UnshareFlags::NEWNS), || "no second namespace of mounts can be had".into())?;
    let leave = |place: &&Path| rustix::mount::unmount(*place, UnmountFlags::DETACH);
    places.iter().try_for_each(|place| step(leave(place), || format!("{} cannot be left", place.display())))
}

/// Whether [`split`], and leaving the network, would work here, tried by a child that ends at once.
///
/// # Errors
/// Why not: the step that failed.
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
            _ => Err(Error::Told("a process that tried namespaces did not end well".into())),
        };
    }
    let tried = BlockedSignals::hold().and_then(|held| Ok((split(view)?, held)));
    let outcome = match tried {
        Ok((Side::Inside(_), _)) => leave_network(),
        Ok((Side::Outside(outside), held)) => match outside.wait(&held) {
            Ok(End::Status(status)) => exit(status),
            Ok(end) => Err(Error::Told(format!("a process that tried namespaces ended by {end}"))),
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

/// Changes the root directory to one that is shared, as `chroot` does. Descriptors of directories outside of it still lead out.
///
/// # Errors
/// The step that failed: `CAP_SYS_CHROOT` is needed.
pub fn change_root(dir: &Path) -> Result<()> {
    step(rustix::process::chdir(dir), || format!("{} cannot be entered", dir.display()))?;
    step(rustix::process::chroot("."), || format!("{} cannot be made the root directory", dir.display()))
}

/// A number for itself.
fn one(id: u32) -> String {
    format!("{id} {id} 1")
}

fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    // SAFETY: unshare_unsafe is unsafe for CLONE_FILES alone, which is not among these.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// fork(2), for a process that has one thread. The child is `None`.
fn fork() -> Result<Option<Pid>> {
    // SAFETY: fork leaves a child that may do whatever it likes if no other thread held a lock at that moment, and there is
    // no other thread: `split` and `begin_child` have counted, and `is_possible` comes before `split`.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        let errno = rustix::io::Errno::from_io_error(&std::io::Error::last_os_error());
        return step(Err(errno.unwrap_or(rustix::io::Errno::AGAIN)), || "no process can be made".into());
    }
    Ok(Pid::from_raw(pid))
}

/// Ends a process that shares everything else with its parent, without running what is registered to run at exit.
fn exit(status: u8) -> ! {
    // SAFETY: _exit does nothing but end the process.
    unsafe { libc::_exit(i32::from(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_with_threads_are_not_split() {
        // The test harness has one thread for each test and one that waits.
        let error = split(&View::default()).expect_err("threads").to_string();
        assert!(error.contains("threads already"), "{error}");
    }
}
