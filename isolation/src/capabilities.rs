//! The capabilities that a server keeps.

use std::fmt;

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::{Error, Result};

/// The capabilities for creating files with the owners, modes and types that clients request.
const OF_SERVER: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP);

/// A set of capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(CapabilitySet);

impl Capabilities {
    /// None at all.
    pub const NONE: Self = Self(CapabilitySet::empty());

    /// The capability to read files of all users, and to remove files in their directories, as root can.
    pub const ALL_USERS: Self = Self(CapabilitySet::DAC_OVERRIDE);

    /// The capabilities for creating mounts and changing the root directory.
    pub const MOUNTS: Self = Self(CapabilitySet::SYS_ADMIN.union(CapabilitySet::SYS_CHROOT));

    /// Returns the capabilities of a directory server. `file_handles` adds the one to open files by handle.
    #[must_use]
    pub const fn of_server(file_handles: bool) -> Self {
        Self(if file_handles { OF_SERVER.union(CapabilitySet::DAC_READ_SEARCH) } else { OF_SERVER })
    }

    /// Adds the capability to exceed the limit of locked memory.
    #[must_use]
    pub const fn and_lock_memory(self) -> Self {
        Self(self.0.union(CapabilitySet::IPC_LOCK))
    }

    /// Returns the capabilities of this thread.
    ///
    /// # Errors
    ///
    /// [`Error::Capabilities`]: those of capget(2).
    pub fn of_thread() -> Result<Self> {
        rustix::thread::capabilities(None).map(|sets| Self(sets.effective)).map_err(Error::Capabilities)
    }

    /// Applies a list of changes, separated by colons: `+NAME` keeps a capability, `-NAME` drops one. Names are those
    /// of capabilities(7), in any case, with or without `cap_`.
    ///
    /// # Errors
    ///
    /// [`Error::CapabilityList`]: the invalid word.
    pub fn modified(mut self, list: &str) -> Result<Self> {
        for word in list.split(':') {
            let invalid = || Error::CapabilityList(word.into());
            let (keep, name) = match word.split_at_checked(1) {
                Some(("+", name)) => (true, name),
                Some(("-", name)) => (false, name),
                _ => return Err(invalid()),
            };
            let name = name.to_ascii_uppercase();
            let capability =
                CapabilitySet::from_name(name.strip_prefix("CAP_").unwrap_or(&name)).ok_or_else(invalid)?;
            self.0.set(capability, keep);
        }
        Ok(self)
    }

    /// Returns whether the set allows creating namespaces and mounts.
    #[must_use]
    pub const fn can_mount(self) -> bool {
        self.0.contains(CapabilitySet::SYS_ADMIN)
    }

    /// Returns whether the set allows creating files of other users.
    #[must_use]
    pub const fn can_act_as_others(self) -> bool {
        self.0.contains(CapabilitySet::SETUID.union(CapabilitySet::SETGID))
    }

    /// Returns the capabilities that are in both sets.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the capabilities of this set that are not in another.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }

    /// Returns whether the set allows changing the root directory.
    #[must_use]
    pub const fn can_change_root(self) -> bool {
        self.0.contains(CapabilitySet::SYS_CHROOT)
    }

    /// Returns whether the set allows opening files by handle.
    #[must_use]
    pub const fn can_open_handles(self) -> bool {
        self.0.contains(CapabilitySet::DAC_READ_SEARCH)
    }

    /// Drops all other capabilities of this thread permanently, also from the bounding set if the thread may change it.
    /// It adds none that the thread lacks. Those in `temporary` stay until a later call.
    ///
    /// # Errors
    ///
    /// [`Error::Capabilities`]: those of prctl(2) and capset(2).
    pub fn limit(self, temporary: Self) -> Result<()> {
        let now = rustix::thread::capabilities(None).map_err(Error::Capabilities)?;
        let has_bounds = now.effective.contains(CapabilitySet::SETPCAP);
        for capability in CapabilitySet::all().iter().filter(|capability| has_bounds && !self.0.contains(*capability)) {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // This kernel does not have the capability.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(Error::Capabilities(errno)),
            }
        }
        match rustix::thread::clear_ambient_capability_set() {
            // Linux before 4.3 has no ambient set.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(Error::Capabilities(errno)),
        }
        let sets = CapabilitySets {
            effective: now.effective & (self.0 | temporary.0),
            permitted: now.permitted & (self.0 | temporary.0),
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, sets).map_err(Error::Capabilities)
    }

    /// Returns the bits as `/proc/PID/status` shows them.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0.bits()
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter_names().map(|(name, _)| name).collect();
        f.write_str(if names.is_empty() { "none".into() } else { names.join(" ") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_capabilities_are_parsed() {
        let server = Capabilities::of_server(false);
        for (list, expected) in [
            ("+sys_admin:+sys_chroot", Capabilities(server.0 | Capabilities::MOUNTS.0)),
            ("+CAP_SYS_ADMIN:+Sys_Chroot", Capabilities(server.0 | Capabilities::MOUNTS.0)),
            ("+SYS_ADMIN:-sys_admin", server),
            ("+dac_read_search", Capabilities::of_server(true)),
            ("-chown:-dac_override:-fowner:-fsetid:-setgid:-setuid:-mknod:-setfcap", Capabilities::NONE),
            ("-sys_admin", server),
        ] {
            assert_eq!(server.modified(list).expect(list), expected, "{list}");
        }
        for list in ["", "chown", "+", "-", "+nonsense", "+chown:", "+chown,-fowner", "é", "+cap_"] {
            let error = server.modified(list).expect_err(list).to_string();
            assert!(error.contains("not a list of capabilities"), "{error}");
        }
    }

    #[test]
    fn sets_have_the_kernels_numbers() {
        // capabilities(7): CHOWN is 0, DAC_READ_SEARCH 2, SETFCAP 31.
        assert_eq!(Capabilities::of_server(true).bits(), 0x8800_00df);
        assert_eq!(Capabilities::of_server(false).bits(), 0x8800_00db);
        assert_eq!(Capabilities::NONE.to_string(), "none");
    }

    #[test]
    fn dropped_capabilities_are_gone_and_none_are_gained() {
        let left = std::thread::spawn(|| {
            let had = Capabilities::of_thread().expect("capget");
            let kept = Capabilities::of_server(false);
            kept.limit(Capabilities::NONE).expect("dropping is allowed");
            let now = Capabilities::of_thread().expect("capget");
            assert_eq!(now.bits(), had.bits() & kept.bits());
            Capabilities::NONE.limit(Capabilities::NONE).expect("dropping is allowed");
            Capabilities::of_thread().expect("capget")
        });
        assert_eq!(left.join().expect("no panic"), Capabilities::NONE);
    }
}
