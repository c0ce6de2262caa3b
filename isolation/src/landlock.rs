//! Landlock rules.

use std::os::fd::BorrowedFd;

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use rustix::fs::FileType;

use crate::{Error, Result};

/// The newest Landlock version that is used and tested; older kernels enforce a subset.
const KNOWN: ABI = ABI::V6;

/// The files to which access stays allowed.
#[derive(Clone, Copy, Debug)]
pub enum LandlockRules<'a> {
    /// Only these files and the contents of these directories; `true`: read-only. Execution and device ioctls are
    /// forbidden. Needs version 2 (Linux 5.19); with version 1 all files stay allowed.
    Below(&'a [(BorrowedFd<'a>, bool)]),
    /// All files, for servers that open files by handle. The kernel does not know the directory of such a file and
    /// would refuse access.
    AllFiles,
}

/// How much of the ruleset the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LandlockStatus {
    /// All of it.
    Full,
    /// The part that this kernel supports.
    Partial,
    /// Nothing: this kernel has no Landlock, or it is disabled.
    None,
}

/// Restricts this thread and its future children. Forbidden are other files than those of the rules, TCP except to the
/// given ports, abstract sockets, and signals to outside processes. Also sets no_new_privs. Open descriptors are not
/// affected.
///
/// # Errors
///
/// [`Error::Landlock`]: the kernel refused the ruleset. A kernel without Landlock is not an error.
pub fn restrict_landlock(rules: LandlockRules<'_>, ports: &[u16]) -> Result<LandlockStatus> {
    let status = restrict(rules, ports).map_err(|error| Error::Landlock(error.to_string()))?;
    Ok(match status {
        RulesetStatus::FullyEnforced => LandlockStatus::Full,
        RulesetStatus::PartiallyEnforced => LandlockStatus::Partial,
        RulesetStatus::NotEnforced => LandlockStatus::None,
    })
}

/// Returns the version of Landlock that the kernel enforces; `None` if it enforces none.
#[must_use]
pub fn landlock_version() -> Option<u32> {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of linux/landlock.h: no ruleset is created, the version is returned.
    const VERSION: libc::c_uint = 1;
    let no_attributes = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the pointer must be null and the size 0, and no memory is accessed.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, no_attributes, 0_usize, VERSION) };
    u32::try_from(version).ok().filter(|version| *version > 0)
}

fn restrict(rules: LandlockRules<'_>, ports: &[u16]) -> std::result::Result<RulesetStatus, RulesetError> {
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?;
    let beneath = match rules {
        LandlockRules::Below(beneath) => {
            // Version 1 cannot allow renames and links across directories, and would refuse them all.
            if landlock_version() == Some(1) {
                &[]
            } else {
                ruleset = ruleset.handle_access(AccessFs::from_all(KNOWN))?;
                beneath
            }
        }
        LandlockRules::AllFiles => &[],
    };
    let mut ruleset = ruleset.create()?;
    for (file, read_only) in beneath {
        // The kernel accepts no directory rights for a file.
        let is_file = rustix::fs::fstat(file).is_ok_and(|stat| !FileType::from_raw_mode(stat.st_mode).is_dir());
        let access = if is_file { AccessFs::from_file(KNOWN) } else { AccessFs::from_all(KNOWN) };
        ruleset = ruleset.add_rule(PathBeneath::new(file, allowed_access(*read_only) & access))?;
    }
    for port in ports {
        ruleset = ruleset.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    Ok(ruleset.restrict_self()?.ruleset)
}

fn allowed_access(read_only: bool) -> BitFlags<AccessFs> {
    if read_only {
        AccessFs::ReadFile | AccessFs::ReadDir
    } else {
        AccessFs::from_all(KNOWN) & !(AccessFs::Execute | AccessFs::IoctlDev)
    }
}
