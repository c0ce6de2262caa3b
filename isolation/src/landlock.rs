//! Landlock: a fence that the kernel keeps for whoever asks for it.

use std::os::fd::BorrowedFd;

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use crate::{Error, Result};

/// The rules that this was written and tested with; kernels with fewer keep fewer of them.
const KNOWN: ABI = ABI::V6;

/// What stays inside the fence.
#[derive(Clone, Copy, Debug)]
pub enum Fence<'a> {
    /// Only what is below these directories; `true`: only for reading. Nothing is executed, no device is given commands.
    Below(&'a [(BorrowedFd<'a>, bool)]),
    /// All files: for servers that open files by handles. The kernel cannot tell in which directory such a file is, and so
    /// would refuse it.
    AllFiles,
}

/// How much of the fence there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// All that was asked for.
    Wholly,
    /// What this kernel knows of it.
    Partly,
    /// This kernel has no Landlock, or it is not turned on.
    Not,
}

/// Keeps this thread, and all that it starts, from everything else: files, if some are named, TCP ports and connections, abstract
/// sockets and signals to processes outside. It also gives up new privileges. Descriptors that are open are not concerned.
///
/// # Errors
/// [`Error::Landlock`]: the kernel refused, which it does not do where it has Landlock or none.
pub fn fence(fence: Fence<'_>) -> Result<Fenced> {
    let made = make(fence).map_err(|error| Error::Landlock(error.to_string()))?;
    Ok(match made {
        RulesetStatus::FullyEnforced => Fenced::Wholly,
        RulesetStatus::PartiallyEnforced => Fenced::Partly,
        RulesetStatus::NotEnforced => Fenced::Not,
    })
}

fn make(fence: Fence<'_>) -> std::result::Result<RulesetStatus, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?;
    let Fence::Below(dirs) = fence else { return Ok(rules.create()?.restrict_self()?.ruleset) };
    rules = rules.handle_access(AccessFs::from_all(KNOWN))?;
    let mut rules = rules.create()?;
    for (dir, read_only) in dirs {
        rules = rules.add_rule(PathBeneath::new(dir, allowed(*read_only)))?;
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
