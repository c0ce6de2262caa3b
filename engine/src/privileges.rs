//! Temporarily drops `CAP_FSETID`, which exempts a write from clearing suid and sgid.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::transfers::Operation;

/// Drops `CAP_FSETID` on this thread until the value is dropped, so that the kernel clears suid and sgid on write.
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
            tracing::error!("cannot restore CAP_FSETID, so writes by root clear suid: {error}");
        }
    }
}

/// The capabilities of this thread during consecutive transfers: they only change when two transfers differ.
#[derive(Debug, Default)]
pub(crate) struct Privileges(Option<WithoutFsetid>);

impl Privileges {
    /// Sets the capabilities that a system call of the operation requires.
    pub(crate) fn set_for(&mut self, operation: Operation) -> io::Result<()> {
        match (operation, &self.0) {
            (Operation::Write { clear_privileges: true, .. }, None) => self.0 = Some(WithoutFsetid::enter()?),
            (Operation::Write { clear_privileges: true, .. }, Some(_)) => {}
            _ => self.0 = None,
        }
        Ok(())
    }
}
