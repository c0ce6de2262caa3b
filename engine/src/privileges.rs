//! Temporarily drops `CAP_FSETID`, which lets a write keep suid and sgid.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::transfers::Operation;

/// Takes `CAP_FSETID` from this thread until dropped, so that the kernel clears suid and sgid of whatever is
/// written, as it does for an unprivileged writer.
#[derive(Debug)]
pub struct WithoutFsetid(Option<CapabilitySets>);

impl WithoutFsetid {
    /// Begins.
    ///
    /// # Errors
    /// Those of `capset(2)`.
    pub fn enter() -> rustix::io::Result<Self> {
        let had = capabilities(None)?;
        if !had.effective.contains(CapabilitySet::FSETID) {
            return Ok(Self(None));
        }
        set_capabilities(None, CapabilitySets { effective: had.effective - CapabilitySet::FSETID, ..had })?;
        Ok(Self(Some(had)))
    }
}

impl Drop for WithoutFsetid {
    fn drop(&mut self) {
        if let Some(had) = self.0.take()
            && let Err(error) = set_capabilities(None, had)
        {
            tracing::error!("cannot get CAP_FSETID back, writes by root now clear suid: {error}");
        }
    }
}

/// The capabilities of this thread during a row of transfers: they change only where two differ.
#[derive(Debug, Default)]
pub(crate) struct Privileges(Option<WithoutFsetid>);

impl Privileges {
    /// Gives the thread what a system call of the operation needs.
    pub(crate) fn set_for(&mut self, operation: Operation) -> io::Result<()> {
        match (operation, &self.0) {
            (Operation::Write { clear_privileges: true, .. }, None) => self.0 = Some(WithoutFsetid::enter()?),
            (Operation::Write { clear_privileges: true, .. }, Some(_)) => {}
            _ => self.0 = None,
        }
        Ok(())
    }
}
