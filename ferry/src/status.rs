//! Exit statuses. Each means the same in all commands.

use std::fmt;

/// It was done; what was checked is in order.
pub const DONE: u8 = 0;
/// It could not be done.
pub const FAILED: u8 = 1;
/// The command line, or a file in its place, makes no sense.
pub const MISUSED: u8 = 2;
/// What was checked is damaged, or not what it should be; what was compared differs.
pub const WRONG: u8 = 4;

/// Shown by `ferry --help`.
pub const TABLE: &str = "\
Exit status, of all commands:
  0  it was done; what was checked is in order, or is so after --repair
  1  it could not be done, and standard error says why; for doctor: something needed is missing
  2  the command line or the configuration file makes no sense
  4  what was checked is damaged or is no image, or the two that were compared differ
ferry try and ferry image trace end with the status of the command that they run, 128 + N if signal N
ended it; mount.ferry with those of mount(8).";

/// Why a command line, or a file in its place, makes no sense, where the table of flags cannot tell.
#[derive(Debug)]
struct Misuse(anyhow::Error);

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.0)
    }
}

impl std::error::Error for Misuse {}

/// The same error, as one of whoever wrote the command line.
pub fn misuse(error: anyhow::Error) -> anyhow::Error {
    Misuse(error).into()
}

/// The status that tells of an error.
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
    fn who_misused_it_is_told_from_what_failed() {
        assert_eq!(of(&anyhow!("no disk")), FAILED);
        let misused = misuse(anyhow!("given twice").context("a share"));
        assert_eq!((of(&misused), misused.to_string()), (MISUSED, "a share: given twice".into()));
        let wrapped: anyhow::Result<()> = Err(misused).context("the file is wrong");
        assert_eq!(wrapped.map_err(|error| of(&error)), Err(MISUSED));
    }
}
