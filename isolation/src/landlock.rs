//! Landlock rules.

use std::os::fd::BorrowedFd;

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::fs::FileType;

use crate::{Error, Result};

/// The rules that this was written and tested with; kernels with fewer keep fewer of them.
const KNOWN: ABI = ABI::V6;

/// What stays inside the fence.
#[derive(Clone, Copy, Debug)]
pub enum LandlockRules<'a> {
    /// Only these files and what is below these directories; `true`: only for reading. Nothing is executed, no device is given
    /// commands.
    Below(&'a [(BorrowedFd<'a>, bool)]),
    /// All files: for servers that open files by handles. The kernel cannot tell in which directory such a file is, and so
    /// would refuse it.
    AllFiles,
}

/// How much of the fence there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LandlockStatus {
    /// All that was asked for.
    Wholly,
    /// What this kernel knows of it.
    Partly,
    /// This kernel has no Landlock, or it is not turned on.
    Not,
}

/// Keeps this thread, and all that it starts, from everything else: files, if some are named, TCP ports and connections (but to
/// these ports, of whatever host), abstract sockets and signals to processes outside. It also gives up new privileges. Descriptors that are open are not concerned.
///
/// # Errors
/// [`Error::Landlock`]: the kernel refused, which it does not do where it has Landlock or none.
pub fn restrict_landlock(fence: LandlockRules<'_>, ports: &[u16]) -> Result<LandlockStatus> {
    let made = make(fence, ports).map_err(|error| Error::Landlock(error.to_string()))?;
    Ok(match made {
        RulesetStatus::FullyEnforced => LandlockStatus::Wholly,
        RulesetStatus::PartiallyEnforced => LandlockStatus::Partly,
        RulesetStatus::NotEnforced => LandlockStatus::Not,
    })
}

fn make(fence: LandlockRules<'_>, ports: &[u16]) -> std::result::Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?;
    let beneath = match fence {
        LandlockRules::Below(beneath) => {
            rules = rules.handle_access(AccessFs::from_all(KNOWN))?;
            beneath
        }
        LandlockRules::AllFiles => &[],
    };
    let mut rules = rules.create()?;
    for (place, read_only) in beneath {
        // Of files the kernel takes no rule about what is done in directories.
        let is_file = rustix::fs::fstat(place).is_ok_and(|found| !FileType::from_raw_mode(found.st_mode).is_dir());
        let access = if is_file { AccessFs::from_file(KNOWN) } else { AccessFs::from_all(KNOWN) };
        rules = rules.add_rule(PathBeneath::new(place, allowed(*read_only) & access))?;
    }
    for port in ports {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    Ok(rules.restrict_self()?.ruleset)
}

fn allowed(read_only: bool) -> BitFlags<AccessFs> {
    if read_only {
        AccessFs::ReadFile | AccessFs::ReadDir
    } else {
        AccessFs::from_all(KNOWN) & !(AccessFs::Execute | AccessFs::IoctlDev)
    }
}
