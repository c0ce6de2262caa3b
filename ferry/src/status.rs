//! Exit statuses, with the same meaning in all commands.

use std::fmt;

/// Success; what was checked is in order.
pub const DONE: u8 = 0;
/// Failure.
pub const FAILED: u8 = 1;
/// The command line or the configuration file is invalid.
pub const MISUSED: u8 = 2;
/// What was checked is damaged; what was compared differs.
pub const WRONG: u8 = 4;

/// Shown by `ferry --help`.
pub const TABLE: &str = "\
Exit status of all commands:
  0  success; what was checked is in order, or was repaired with --repair
  1  failure, with the reason on standard error; for doctor: something needed is missing
  2  the command line or the configuration file is invalid
  4  what was checked is damaged or not an image, or what was compared differs
ferry try and ferry image trace exit with the status of the command that they run (128 + N if signal N
ended it), mount.ferry with those of mount(8).";

/// An error in the command line or configuration file that the table of flags cannot detect.
#[derive(Debug)]
struct Misuse(anyhow::Error);

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl std::error::Error for Misuse {}

/// Marks an error as one in the command line.
pub fn misuse(error: anyhow::Error) -> anyhow::Error {
    Misuse(error).into()
}

/// Returns the exit status for an error.
pub fn of(error: &anyhow::Error) -> u8 {
    use ferry_control::Error;

    let is_misuse = error.is::<Misuse>() || matches!(error.downcast_ref(), Some(Error::Level { .. }));
    if is_misuse { MISUSED } else { FAILED }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn misuse_is_distinguished_from_failure() {
        assert_eq!(of(&anyhow!("no disk")), FAILED);
        let misused = misuse(anyhow!("given twice").context("a share"));
        assert_eq!((of(&misused), misused.to_string()), (MISUSED, "a share: given twice".into()));
        let wrapped: anyhow::Result<()> = Err(misused).context("the file is wrong");
        assert_eq!(wrapped.map_err(|error| of(&error)), Err(MISUSED));
    }
}
