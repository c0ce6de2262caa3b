//! Working for a while without the capability that lets a write keep suid and sgid.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

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
