//! Acting as the caller: user, groups and umask of this thread while it creates an inode.
//!
//! Linux keeps these per thread; the raw system calls change the calling thread only. Each thread caches its ids, so a
//! caller with the server's own ids costs nothing. Dropping a guard restores what it changed.

use std::cell::RefCell;
use std::marker::PhantomData;

use ferry_vfs::{Caller, Errno, Result};
use rustix::fs::Mode;
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use crate::sys;

/// Capabilities to drop while acting as another user. With them the kernel would not clear sgid of a file whose group
/// excludes the caller (CVE-2018-13405, CVE-2022-0358), or would grant the creator what only the owner may do. The
/// client's kernel has checked the remaining ones (DAC_OVERRIDE, MKNOD).
const NOT_AS_CALLER: CapabilitySet = CapabilitySet::FSETID
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::LINUX_IMMUTABLE);

/// Capabilities that override permissions.
const OVERRIDES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// The id that Linux shows for groups without a mapping in the user namespace (`/proc/sys/kernel/overflowgid`).
const UNNAMED: u32 = 65_534;

/// The privileges of this process, determined once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creds {
    uid: u32,
    gid: u32,
    /// The process can act as other users.
    pub(crate) switches: bool,
    /// May do what permissions forbid.
    overrides: bool,
    /// The user namespace may lack some ids, so that `setfsuid` may fail silently.
    partial_map: bool,
}

/// The current state of this thread.
#[derive(Debug, Default)]
struct Thread {
    /// `Some(true)` if the thread has its own umask and working directory; `Some(false)` if that failed.
    unshared: Option<bool>,
    umask: Option<u32>,
    /// The supplementary groups, once known.
    groups: Option<Vec<u32>>,
    caps: Option<CapabilitySets>,
    /// The kernel does not restore capabilities when the user id becomes 0 again.
    no_fixup: bool,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::new(Thread::default());
}

impl Creds {
    /// Looks at this process.
    pub(crate) fn detect() -> Self {
        let caps = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let full = map.split_ascii_whitespace().eq(["0", "0", "4294967295"]);
        Self {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            switches: caps.contains(CapabilitySet::SETUID | CapabilitySet::SETGID),
            overrides: caps.intersects(OVERRIDES),
            partial_map: !full,
        }
    }

    /// Acts as the caller until the guard is dropped, to create something that the client's kernel has allowed.
    ///
    /// Without the privilege, files created by a plain user's server belong to that user. Root's server then refuses to
    /// create files for others, because their set-user-id programs would be root's.
    pub(crate) fn enter(&self, cx: &Caller<'_>) -> Result<AsCaller> {
        if !self.switches {
            return if self.uid == 0 && cx.uid != 0 { Err(Errno::PERM) } else { Ok(self.as_server()) };
        }
        if cx.uid == self.uid && cx.gid == self.gid && cx.groups.is_empty() {
            return Ok(self.as_server());
        }
        self.enter_without(cx, NOT_AS_CALLER)
    }

    /// Acts as the caller until the guard is dropped, with no more rights than the caller.
    ///
    /// # Errors
    ///
    /// `PERM`: without the privilege, the server has rights that the caller lacks.
    pub(crate) fn enter_plain(&self, cx: &Caller<'_>) -> Result<AsCaller> {
        if !self.switches {
            return if self.has_no_more_than(cx)? { Ok(self.as_server()) } else { Err(Errno::PERM) };
        }
        if cx.uid == 0 && self.uid == 0 {
            return Ok(self.as_server());
        }
        self.enter_without(cx, NOT_AS_CALLER | OVERRIDES)
    }

    /// Returns a guard that changes nothing.
    fn as_server(&self) -> AsCaller {
        AsCaller { base: *self, uid: false, gid: false, groups: false, only_here: PhantomData }
    }

    /// Returns whether this process has no more access to files than the caller.
    fn has_no_more_than(&self, cx: &Caller<'_>) -> Result<bool> {
        if cx.uid != self.uid || cx.gid != self.gid || (self.overrides && cx.uid != 0) {
            return Ok(false);
        }
        let groups = rustix::process::getgroups()?;
        // Groups without a mapping cannot be compared here; the owner compared them before entering the namespace.
        let is_unnamed = |gid: u32| self.partial_map && gid == UNNAMED && !cx.groups.is_empty();
        let may_have = |gid: u32| gid == cx.gid || cx.groups.contains(&gid) || is_unnamed(gid);
        Ok(groups.iter().all(|gid| may_have(gid.as_raw())))
    }

    fn enter_without(&self, cx: &Caller<'_>, without: CapabilitySet) -> Result<AsCaller> {
        let mut guard = self.as_server();
        if cx.uid == u32::MAX || cx.gid == u32::MAX {
            return Err(Errno::INVAL);
        }
        THREAD.with_borrow_mut(|thread| {
            thread.drop_groups()?;
            if !cx.groups.is_empty() {
                sys::setgroups(cx.groups)?;
                guard.groups = true;
            }
            if cx.gid != self.gid {
                guard.gid = true;
                sys::setfsgid(cx.gid);
                if self.partial_map && sys::setfsgid(u32::MAX) != cx.gid {
                    return Err(Errno::OVERFLOW);
                }
            }
            // A server that is not root drops the caller's capabilities even if the ids are equal.
            if cx.uid != self.uid || self.uid != 0 {
                let caps = thread.caps()?;
                guard.uid = true;
                sys::setfsuid(cx.uid);
                if self.partial_map && sys::setfsuid(u32::MAX) != cx.uid {
                    return Err(Errno::OVERFLOW);
                }
                set_effective(thread, caps.effective - without)?;
            }
            Ok(())
        })?;
        Ok(guard)
    }

    /// Drops `CAP_FSETID` until the guard is dropped, so that the kernel clears suid and sgid as for an ordinary user.
    pub(crate) fn drop_fsetid() -> Result<WithoutFsetid> {
        THREAD.with_borrow_mut(|thread| {
            let caps = thread.caps()?;
            let changed = caps.effective.contains(CapabilitySet::FSETID);
            if changed {
                set_effective(thread, caps.effective - CapabilitySet::FSETID)?;
            }
            Ok(WithoutFsetid { changed, only_here: PhantomData })
        })
    }
}

impl Thread {
    /// Returns the thread's own capabilities, without the changes of a guard.
    fn caps(&mut self) -> Result<CapabilitySets> {
        match self.caps {
            Some(caps) => Ok(caps),
            None => {
                let caps = rustix::thread::capabilities(None)?;
                self.no_fixup = rustix::thread::capabilities_secure_bits()
                    .is_ok_and(|bits| bits.contains(CapabilitiesSecureBits::NO_SETUID_FIXUP));
                self.caps = Some(caps);
                Ok(caps)
            }
        }
    }

    /// Permanently drops the server's supplementary groups on each thread that creates files for another user. The
    /// caller is not a member of them, and a privileged server does not need them.
    fn drop_groups(&mut self) -> Result<()> {
        if self.groups.is_none() {
            sys::setgroups(&[])?;
            self.groups = Some(Vec::new());
        }
        Ok(())
    }
}

/// Sets this thread's effective capabilities, without those that a sandbox has removed meanwhile.
fn set_effective(thread: &mut Thread, effective: CapabilitySet) -> Result<()> {
    let Some(caps) = thread.caps else { return Err(Errno::PERM) };
    match rustix::thread::set_capabilities(None, CapabilitySets { effective, ..caps }) {
        Err(Errno::PERM) => {
            let now = rustix::thread::capabilities(None)?;
            let base = CapabilitySets { effective: caps.effective & now.permitted, ..now };
            thread.caps = Some(base);
            rustix::thread::set_capabilities(None, CapabilitySets { effective: effective & now.permitted, ..now })
        }
        other => other,
    }
}

/// A guard: this thread acts as a caller until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct AsCaller {
    base: Creds,
    uid: bool,
    gid: bool,
    groups: bool,
    /// Not `Send`: it belongs to the thread that created it.
    only_here: PhantomData<*const ()>,
}

impl Drop for AsCaller {
    fn drop(&mut self) {
        if self.uid {
            sys::setfsuid(self.base.uid);
            THREAD.with_borrow_mut(|thread| {
                // The kernel restores file-system capabilities when the user id becomes 0.
                if let Some(caps) = thread.caps.filter(|_| self.base.uid != 0 || thread.no_fixup) {
                    let restored = set_effective(thread, caps.effective);
                    debug_assert_eq!(restored, Ok(()), "a permitted capability can become effective");
                }
            });
        }
        if self.gid {
            sys::setfsgid(self.base.gid);
        }
        if self.groups {
            let restored = sys::setgroups(&[]);
            debug_assert_eq!(restored, Ok(()), "a thread that could set groups can clear them");
        }
    }
}

/// A guard: this thread lacks `CAP_FSETID` until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct WithoutFsetid {
    changed: bool,
    only_here: PhantomData<*const ()>,
}

impl Drop for WithoutFsetid {
    fn drop(&mut self) {
        if self.changed {
            THREAD.with_borrow_mut(|thread| {
                if let Some(caps) = thread.caps {
                    let restored = set_effective(thread, caps.effective);
                    debug_assert_eq!(restored, Ok(()), "a permitted capability can become effective");
                }
            });
        }
    }
}

/// Sets the umask of this thread, and returns the permission bits for the create call.
///
/// The kernel must apply the umask, because a default ACL of the directory overrides it. The umask belongs to the
/// process unless the thread unshares it, which happens at the first call.
pub(crate) fn mode_under_umask(mode: u32, umask: u32) -> Mode {
    let umask = umask & 0o777;
    THREAD.with_borrow_mut(|thread| {
        if own_fs(thread) {
            if thread.umask != Some(umask) {
                rustix::process::umask(Mode::from_raw_mode(umask));
                thread.umask = Some(umask);
            }
            Mode::from_raw_mode(mode & 0o7777)
        } else {
            Mode::from_raw_mode(mode & 0o7777 & !umask)
        }
    })
}

/// Returns whether this thread has its own umask and working directory; unshares them at the first call.
fn own_fs(thread: &mut Thread) -> bool {
    *thread.unshared.get_or_insert_with(|| sys::unshare_fs().is_ok())
}

/// Runs `f` on a thread with its own working directory, or fails.
pub(crate) fn with_own_directory<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    if THREAD.with_borrow_mut(own_fs) { f() } else { Err(Errno::NOSYS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effective() -> CapabilitySet {
        rustix::thread::capabilities(None).unwrap().effective
    }

    #[test]
    fn a_dropped_guard_restores_everything() {
        let creds = Creds::detect();
        if !creds.switches {
            return;
        }
        let before = effective();
        let groups = [7, 8];
        let cx = Caller { uid: 1234, gid: 4321, groups: &groups, ..Caller::default() };
        {
            let _guard = creds.enter(&cx).unwrap();
            assert!(!effective().intersects(NOT_AS_CALLER));
            assert!(effective().contains(CapabilitySet::DAC_OVERRIDE));
            assert_eq!((sys::setfsuid(u32::MAX), sys::setfsgid(u32::MAX)), (1234, 4321));
        }
        assert_eq!((sys::setfsuid(u32::MAX), sys::setfsgid(u32::MAX)), (creds.uid, creds.gid));
        assert_eq!(effective(), before);
        assert!(
            std::panic::catch_unwind(|| {
                let _guard = creds.enter(&cx).unwrap();
                panic!("inside");
            })
            .is_err()
        );
        assert_eq!((sys::setfsuid(u32::MAX), effective()), (creds.uid, before));
        {
            let _guard = Creds::drop_fsetid().unwrap();
            assert!(!effective().contains(CapabilitySet::FSETID));
        }
        assert_eq!(effective(), before);
        assert_eq!(creds.enter(&Caller { uid: u32::MAX, ..cx }).unwrap_err(), Errno::INVAL);
        assert_eq!((sys::setfsuid(u32::MAX), effective()), (creds.uid, before));
    }
}
