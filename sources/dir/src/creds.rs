//! Acting as the caller: user, groups and umask of this thread while it makes a new inode.
//!
//! Linux keeps these per thread; the raw system calls change the calling thread only. A thread remembers what it
//! has, so a caller who is the server's own user costs nothing. Whatever a guard changed, its drop changes back.

use std::cell::RefCell;
use std::marker::PhantomData;

use ferry_vfs::{Caller, Errno, Result};
use rustix::fs::Mode;
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use crate::sys;

/// Capabilities that creating as somebody else must not have: with them the kernel would not clear sgid of a file
/// whose group the caller is no member of (CVE-2018-13405 and CVE-2022-0358 are this mistake), or would let the
/// file's maker do what only its owner may. What stays (DAC_OVERRIDE, MKNOD) the client's kernel has checked.
const NOT_AS_CALLER: CapabilitySet = CapabilitySet::FSETID
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::LINUX_IMMUTABLE);

/// Capabilities that let their holder do what permissions forbid.
const OVERRIDES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// Linux's number for a group that the user namespace cannot name (`/proc/sys/kernel/overflowgid`).
const UNNAMED: u32 = 65_534;

/// What this process may do, found out once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Creds {
    uid: u32,
    gid: u32,
    /// May take on other users' ids.
    pub(crate) switches: bool,
    /// May do what permissions forbid.
    overrides: bool,
    /// The user namespace may lack some ids, so that `setfsuid` may silently fail.
    partial_map: bool,
}

/// What this thread has at the moment.
#[derive(Debug, Default)]
struct Thread {
    /// `Some(true)` once the umask and working directory are this thread's own; `Some(false)` where that fails.
    unshared: Option<bool>,
    umask: Option<u32>,
    /// The supplementary groups, once known.
    groups: Option<Vec<u32>>,
    caps: Option<CapabilitySets>,
    /// The kernel does not give capabilities back when the user id becomes 0 again.
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

    /// Takes on the caller's ids until the guard goes, to make something that the client's kernel has allowed.
    ///
    /// Without the privilege for it, what a plain user's server makes is that user's. Root's server makes nothing for
    /// others then: their set-user-id programs would be root's.
    pub(crate) fn enter(&self, cx: &Caller<'_>) -> Result<AsCaller> {
        if !self.switches {
            return if self.uid == 0 && cx.uid != 0 { Err(Errno::PERM) } else { Ok(self.as_server()) };
        }
        if cx.uid == self.uid && cx.gid == self.gid && cx.groups.is_empty() {
            return Ok(self.as_server());
        }
        self.enter_without(cx, NOT_AS_CALLER)
    }

    /// Takes on the caller's ids until the guard goes, and has no right that the caller has not.
    ///
    /// # Errors
    /// `PERM`: without the privilege for it, the server has rights that the caller has not.
    pub(crate) fn enter_plain(&self, cx: &Caller<'_>) -> Result<AsCaller> {
        if !self.switches {
            return if self.has_no_more_than(cx)? { Ok(self.as_server()) } else { Err(Errno::PERM) };
        }
        if cx.uid == 0 && self.uid == 0 {
            return Ok(self.as_server());
        }
        self.enter_without(cx, NOT_AS_CALLER | OVERRIDES)
    }

    /// The thread stays what it is.
    fn as_server(&self) -> AsCaller {
        AsCaller { base: *self, uid: false, gid: false, groups: false, only_here: PhantomData }
    }

    /// Whether this process, as it is, may do nothing to files that the caller may not.
    fn has_no_more_than(&self, cx: &Caller<'_>) -> Result<bool> {
        if cx.uid != self.uid || cx.gid != self.gid || (self.overrides && cx.uid != 0) {
            return Ok(false);
        }
        let groups = rustix::process::getgroups()?;
        // In a user namespace groups have no number here; the owner of the server has compared them before it was entered.
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
            // A server that is no root has the caller's capabilities taken away even where the ids are the same.
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

    /// Gives up `CAP_FSETID` until the guard goes, so that the kernel clears suid and sgid as for an ordinary user.
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
    /// The thread's own capabilities (not what a guard left of them).
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

    /// The server's own supplementary groups are given up for good, on each thread that ever creates for somebody:
    /// a member of them is not who the caller is, and a privileged server has no use for them.
    fn drop_groups(&mut self) -> Result<()> {
        if self.groups.is_none() {
            sys::setgroups(&[])?;
            self.groups = Some(Vec::new());
        }
        Ok(())
    }
}

/// Sets this thread's effective capabilities; what it must not have any more since a sandbox took it is left out.
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

/// This thread acts as a caller until this goes.
#[derive(Debug)]
#[must_use]
pub(crate) struct AsCaller {
    base: Creds,
    uid: bool,
    gid: bool,
    groups: bool,
    /// Belongs to the thread that made it.
    only_here: PhantomData<*const ()>,
}

impl Drop for AsCaller {
    fn drop(&mut self) {
        if self.uid {
            sys::setfsuid(self.base.uid);
            THREAD.with_borrow_mut(|thread| {
                // Becoming user 0 gives the file-system capabilities back by itself.
                if let Some(caps) = thread.caps.filter(|_| self.base.uid != 0 || thread.no_fixup) {
                    let restored = set_effective(thread, caps.effective);
                    debug_assert_eq!(restored, Ok(()), "a permitted capability can be made effective");
                }
            });
        }
        if self.gid {
            sys::setfsgid(self.base.gid);
        }
        if self.groups {
            let restored = sys::setgroups(&[]);
            debug_assert_eq!(restored, Ok(()), "who could set groups can clear them");
        }
    }
}

/// This thread has no `CAP_FSETID` until this goes.
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
                    debug_assert_eq!(restored, Ok(()), "a permitted capability can be made effective");
                }
            });
        }
    }
}

/// Makes the umask of this thread `umask`, and answers the permission bits to create with.
///
/// The umask must be the kernel's to apply, because a default ACL of the directory overrides it. It is a
/// property of the process unless the thread unshares it, which happens at the first call.
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

/// Whether this thread has a umask and a working directory of its own by now.
fn own_fs(thread: &mut Thread) -> bool {
    *thread.unshared.get_or_insert_with(|| sys::unshare_fs().is_ok())
}

/// Runs `f` in a thread whose working directory is its own, or not at all.
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
    fn a_guard_leaves_nothing_behind() {
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
